"use strict";
// Filters that live in the address, and cells that are unpacked when they are opened. All HTML was escaped when it was made.
(() => {
  const form = document.getElementById("filters"), shown = document.getElementById("shown");
  const packs = new Map([...document.querySelectorAll("script.pack")].map(node => [node.dataset.pack, node]));
  const keys = ["model", "strategy", "stack", "hardware", "source"];
  const sections = [...document.querySelectorAll(".case")].map(node => ({node, data: node.dataset, cells: [], listed: [],
    more: node.querySelector("p.more"), first: +node.dataset.first || Infinity, limit: +node.dataset.first || Infinity}));
  const bySlug = new Map(sections.map(section => [section.data.case, section]));
  for (const section of sections) section.words = (section.data.case + " " + section.node.querySelector("h2, h3").textContent + " ").toLowerCase();

  const unpacked = new Map();
  const unpack = async node => {
    if (!unpacked.has(node)) unpacked.set(node, (async () => {
      const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(node.textContent) : Uint8Array.from(atob(node.textContent), c => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return JSON.parse(await new Response(stream).text());
    })());
    return unpacked.get(node);
  };

  // A cell: what filters ask for, and its node, which is made when it is shown first.
  const cells = [];
  const add = (section, cell) => { section.cells.push(cell); cells.push(cell); };
  for (const section of sections) for (const node of section.node.querySelectorAll("details.cell")) {
    const d = node.dataset;
    add(section, {section, id: node.id, node, of: [d.m, d.s, d.k, d.h, d.r || ""], verdicts: d.v.split(" "), states: d.e.split("|")});
    section.listed.push(node);
  }
  const rest = [...document.querySelectorAll("script.later")];
  const total = cells.length + rest.reduce((sum, node) => sum + +node.dataset.count, 0);
  const later = (async () => {
    for (const node of rest) {
      const section = bySlug.get(node.dataset.case);
      const here = new Set(section.cells.map(cell => cell.id));  // packed as well
      for (const [id, m, s, k, h, r, verdicts, states, said, html] of await unpack(node)) if (!here.has(id)) add(section, {section, id, html, said, of: [m, s, k, h, r], verdicts, states});
    }
  })();
  const made = cell => {
    if (!cell.node) {
      const box = document.createElement("template");
      box.innerHTML = cell.html;
      cell.node = box.content.firstElementChild;
    }
    return cell.node;
  };
  const text = cell => cell.text ??= cell.section.words + (cell.said ?? cell.node.firstElementChild.textContent).toLowerCase();

  const fill = async node => {
    if (node.dataset.p === undefined || node.dataset.filled) return;
    node.dataset.filled = "yes";
    try {
      node.insertAdjacentHTML("beforeend", (await unpack(packs.get(node.dataset.p)))[node.id]);
    } catch (error) {
      node.append("What this cell holds could not be unpacked: " + error);
    }
  };
  document.addEventListener("toggle", event => {
    if (event.target.matches?.("details[data-p]") && event.target.open) fill(event.target);
  }, true);

  const wanted = () => Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
  let fitting = [];
  const apply = () => {
    const now = wanted(), words = (now.q || "").toLowerCase().split(/\s+/).filter(Boolean);
    fitting = [];
    const bySection = new Map();
    for (const cell of cells) {
      if (now.case && cell.section.data.case !== now.case) continue;
      if (keys.some((key, index) => now[key] && cell.of[index] !== now[key])) continue;
      if (now.verdict && !cell.verdicts.includes(now.verdict)) continue;
      if (now.state && !cell.states.includes(now.state)) continue;
      if (words.length && !words.every(word => text(cell).includes(word))) continue;
      fitting.push(cell);
      if (!bySection.has(cell.section)) bySection.set(cell.section, []);
      bySection.get(cell.section).push(cell);
    }
    for (const section of sections) list(section, bySection.get(section) || []);
    shown.value = `${fitting.length} of ${total} cells`;
  };
  const list = (section, fits) => {
    const nodes = fits.slice(0, section.limit).map(made), left = fits.length - nodes.length;
    section.fits = fits;
    if (section.node.hidden === fits.length > 0) section.node.hidden = !fits.length;
    if (nodes.length !== section.listed.length || nodes.some((node, index) => node !== section.listed[index])) {
      for (const node of section.listed) node.remove();
      if (section.more) section.more.before(...nodes); else section.node.append(...nodes);
      section.listed = nodes;
    }
    if (section.more) {
      section.more.hidden = left <= 0;
      section.more.lastElementChild.textContent = `${nodes.length} of ${fits.length} are listed; filters look at all.`;
    }
  };
  const remember = () => {
    const now = new URLSearchParams(wanted()).toString();
    history.replaceState(null, "", now ? "#" + now : location.pathname + location.search);
  };
  const reach = hash => {
    const cell = cells.find(one => one.id === hash);
    if (cell && !cell.node?.isConnected) {
      form.reset();
      cell.section.limit = Math.max(cell.section.limit, cell.section.cells.indexOf(cell) + 1);
      apply();
    }
    return document.getElementById(hash);
  };
  const arrive = () => {
    const hash = decodeURIComponent(location.hash.slice(1)), target = hash && !hash.includes("=") && reach(hash);
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
    const found = sections.filter(section => !section.node.hidden).flatMap(section => section.listed).slice(0, 200);
    await Promise.all(found.map(fill));
    for (const node of found) node.open = true;
    shown.value = found.length === 200 ? "the first 200 are open" : `${found.length} are open`;
  });
  window.addEventListener("hashchange", arrive);
  document.addEventListener("click", event => {
    const section = bySlug.get(event.target.closest?.("button[data-more]")?.dataset.more);
    if (!section) return;
    const next = section.fits[section.limit];
    section.limit = Infinity;
    list(section, section.fits);
    next?.node.querySelector("summary").focus();
  });
  form.hidden = false;
  apply();
  arrive();
  if (rest.length) later.then(() => { if (location.hash) arrive(); else apply(); });
  window.addEventListener("load", () => { if (location.hash) arrive(); });  // the browser takes the focus away when it gets there itself
})();
