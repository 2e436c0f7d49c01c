"use strict";
// Filters that live in the address, and cells that are unpacked when they are opened. All HTML was escaped when it was made.
(() => {
  const form = document.getElementById("filters"), shown = document.getElementById("shown");
  const packs = [...document.querySelectorAll("script.pack")], unpacked = new Map();
  const keys = {model: "m", strategy: "s", stack: "k", hardware: "h", source: "r"};
  const cells = [...document.querySelectorAll("details.cell")].map(node => ({node, data: {...node.dataset},
    section: node.closest(".case"), text: null}));
  const sections = [...document.querySelectorAll(".case")];

  const unpack = number => {
    if (!unpacked.has(number)) unpacked.set(number, (async () => {
      const bytes = Uint8Array.from(atob(packs[number].textContent), c => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return JSON.parse(await new Response(stream).text());
    })());
    return unpacked.get(number);
  };
  const fill = async node => {
    if (node.dataset.p === undefined || node.dataset.filled) return;
    node.dataset.filled = "yes";
    try {
      node.insertAdjacentHTML("beforeend", (await unpack(+node.dataset.p))[node.id]);
    } catch (error) {
      node.append("What this cell holds could not be unpacked: " + error);
    }
  };
  document.addEventListener("toggle", event => {
    if (event.target.matches?.("details[data-p]") && event.target.open) fill(event.target);
  }, true);

  const wanted = () => Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
  const apply = () => {
    const now = wanted(), words = (now.q || "").toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    const full = new Set();
    for (const cell of cells) {
      let fits = !now.case || cell.section.dataset.case === now.case;
      for (const key in keys) fits = fits && (!now[key] || cell.data[keys[key]] === now[key]);
      fits = fits && (!now.verdict || cell.data.v.split(" ").includes(now.verdict));
      fits = fits && (!now.state || cell.data.e.split("|").includes(now.state));
      if (fits && words.length) {
        cell.text ??= (cell.section.dataset.case + " " + cell.section.querySelector("h2, h3").textContent + " " + cell.node.firstElementChild.textContent).toLowerCase();
        fits = words.every(word => cell.text.includes(word));
      }
      if (cell.node.hidden === fits) cell.node.hidden = !fits;
      if (fits) { count += 1; full.add(cell.section); }
    }
    for (const section of sections) if (section.hidden === full.has(section)) section.hidden = !full.has(section);
    shown.value = `${count} of ${cells.length} cells`;
  };
  const remember = () => {
    const now = new URLSearchParams(wanted()).toString();
    history.replaceState(null, "", now ? "#" + now : location.pathname + location.search);
  };
  const arrive = () => {
    const hash = decodeURIComponent(location.hash.slice(1)), target = hash && !hash.includes("=") && document.getElementById(hash);
    if (target) {
      if (target.closest("[hidden]")) { form.reset(); apply(); }
      for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
      target.scrollIntoView();
      if (target.matches("details")) target.querySelector("summary").focus({preventScroll: true});
    } else {
      const given = new URLSearchParams(location.hash.slice(1));
      for (const field of form.elements) if (field.name) field.value = given.get(field.name) || "";
      for (const field of form.elements) if (field.tagName === "SELECT" && field.selectedIndex < 0) field.value = "";
      apply();
    }
  };
  form.addEventListener("input", () => { apply(); remember(); });
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { apply(); remember(); }));
  document.getElementById("open").addEventListener("click", async () => {
    const found = cells.filter(cell => !cell.node.closest("[hidden]")).slice(0, 200);
    await Promise.all(found.map(cell => fill(cell.node)));
    for (const cell of found) cell.node.open = true;
    shown.value = found.length === 200 ? "the first 200 are open" : `${found.length} are open`;
  });
  window.addEventListener("hashchange", arrive);
  form.hidden = false;
  apply();
  arrive();
  window.addEventListener("load", () => { if (location.hash) arrive(); });  // the browser takes the focus away when it gets there itself
})();
