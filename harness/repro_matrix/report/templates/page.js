"use strict";
// Filters that live in the address, and cells that are drawn when they are listed and unpacked when they are opened. What
// is packed as HTML was escaped when it was made; what is data becomes text nodes, never HTML.
// This stands right behind the filters, so that they are there before the cells have been read; ended.js stands behind
// the cells, and behind the data of those that are not written out.
(async () => {
  const form = document.getElementById("filters"), shown = document.getElementById("shown");
  let touched = false;
  const touch = () => { touched = true; };
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", touch);
  form.hidden = false;
  const there = () => new Promise(done => document.addEventListener("cells-are-there", done, {once: true}));
  await there();
  const paper = document.getElementById("paper");
  const keys = ["model", "strategy", "stack", "hardware", "source"];
  const sections = [...document.querySelectorAll(".case")].map(node => ({node, data: node.dataset, cells: [], listed: [],
    more: node.querySelector("p.more"), first: +node.dataset.first || Infinity, limit: +node.dataset.first || Infinity}));
  const bySlug = new Map(sections.map(section => [section.data.case, section]));
  for (const section of sections) section.words = (section.data.case + " " + section.node.querySelector("h2, h3").textContent + " ").toLowerCase();

  const whole = new Promise(done => document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", done) : done());
  const unpacked = new Map();
  const unpack = async node => {
    if (!unpacked.has(node)) unpacked.set(node, (async () => {
      const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(node.textContent) : Uint8Array.from(atob(node.textContent), c => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return JSON.parse(await new Response(stream).text());
    })());
    return unpacked.get(node);
  };
  const pack = async name => {
    const found = () => document.querySelector(`script.pack[data-pack="${CSS.escape(name)}"]`);
    if (!found()?.nextSibling) await whole;  // the end of the file may not be there yet
    return unpack(found());
  };

  // A cell: what filters ask for, and its node, which is made when it is listed first.
  const cells = [];
  const add = (section, cell) => { section.cells.push(cell); cells.push(cell); };
  for (const section of sections) for (const node of section.node.querySelectorAll("details.cell")) {
    const d = node.dataset;
    add(section, {section, id: node.id, node, of: [d.m, d.s, d.k, d.h, d.r || ""], verdicts: d.v.split(" "), states: d.e.split("|")});
    section.listed.push(node);
  }
  const total = sections.reduce((sum, section) => sum + +section.data.count, 0);
  const later = cells.length < total ? (async () => {
    await there();
    for (const {case: slug, marks, arms: known, cells: data} of await unpack(document.getElementById("later"))) {
      const section = bySlug.get(slug), here = new Set(section.cells.map(cell => cell.id));  // packed as well
      const looks = marks.map(([name, symbol, word, tone]) => ({name, symbol, word, tone}));
      for (const [id, pack, m, s, k, h, r, also, ranks, odd, states, seen] of data) if (!here.has(id)) {
        const groups = seen.map(([look, arms]) => ({look: looks[look], arms: arms.map(one => known[one])}));
        add(section, {section, id, pack, also, ranks, odd, groups, of: [m, s, k, h, r], verdicts: groups.map(one => one.look.name), states});
      }
    }
  })() : null;

  // Of what there are hundreds (stacks) the filter's choices are written when somebody comes to choose.
  const choose = field => {
    if (field.dataset.filled === String(cells.length)) return;
    field.dataset.filled = cells.length;
    const index = keys.indexOf(field.name), now = field.value;
    const values = [...new Set(cells.map(cell => cell.of[index]))].sort();
    field.replaceChildren(field.options[0], ...values.map(value => new Option(value, value)));
    field.value = now;
  };
  const late = [...form.querySelectorAll("select[data-late]")];
  for (const field of late) for (const kind of ["focus", "pointerdown"]) field.addEventListener(kind, () => choose(field));

  // The line of a cell: as parts.html draws it (cell, cell_summary).
  const el = (tag, name, ...inside) => { const node = document.createElement(tag); if (name) node.className = name; node.append(...inside); return node; };
  const badge = ({symbol, tone}, said) => {
    const sign = el("b", "", symbol);
    sign.setAttribute("aria-hidden", "true");
    return el("span", "m " + tone, sign, " " + said);
  };
  const where = ({of: [m, s, k, h, r], also, ranks}) => [m, also ? `${s} ${also}` : s, [`${ranks} ranks`, h, k, ...r ? [r] : []].join(" \u00b7 ")];
  const most = +form.dataset.named, names = arms => arms.slice(0, most).join(", ") + (arms.length > most ? ` and ${arms.length - most} more` : "");
  const grouped = ({look, arms}) => `${look.word}: ${names(arms)}`;
  const unnamed = ({groups}) => groups.flatMap(one => one.arms.slice(most)).join(" ");
  const unlike = cell => `${cell.odd} not as expected`;
  const draw = cell => {
    const [model, strategy, small] = where(cell), [m, s, k, h, r] = cell.of, a = unnamed(cell), seen = el("span", "seen");
    if (cell.odd) seen.append(badge({symbol: form.dataset.odd, tone: "bad"}, unlike(cell)), " ");
    for (const group of cell.groups) seen.append(badge(group.look, grouped(group)), " ");
    const axes = el("span", "axes", el("strong", "", model), " ", el("span", "", strategy), " ", el("small", "", small));
    const node = el("details", "cell", el("summary", "", axes, "\n", seen, "\n"));
    node.id = cell.id;
    Object.assign(node.dataset, {m, s, k, h, ...r ? {r} : {}, v: cell.verdicts.join(" "), e: cell.states.join("|"), ...a ? {a} : {}, p: cell.pack});
    return node;
  };
  const made = cell => cell.node ??= draw(cell);
  const text = cell => cell.text ??= cell.section.words + (cell.node ? `${cell.node.firstElementChild.textContent} ${cell.node.dataset.a || ""}`
    : [...where(cell), ...cell.odd ? [unlike(cell)] : [], ...cell.groups.map(grouped), unnamed(cell)].join(" ")).toLowerCase();

  const fill = async node => {
    if (node.dataset.p === undefined || node.dataset.filled) return;
    node.dataset.filled = "yes";
    try {
      node.insertAdjacentHTML("beforeend", (await pack(node.dataset.p))[node.id]);
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
    const on = keys.map((key, index) => [index, now[key]]).filter(([, value]) => value);
    fitting = [];
    const bySection = new Map();
    for (const cell of cells) {
      if (now.case && cell.section.data.case !== now.case) continue;
      if (on.some(([index, value]) => cell.of[index] !== value)) continue;
      if (now.verdict && !cell.verdicts.includes(now.verdict)) continue;
      if (now.state && !cell.states.includes(now.state)) continue;
      if (words.length && !words.every(word => text(cell).includes(word))) continue;
      fitting.push(cell);
      if (!bySection.has(cell.section)) bySection.set(cell.section, []);
      bySection.get(cell.section).push(cell);
    }
    for (const section of sections) list(section, bySection.get(section) || []);
    const some = cells.length < total;  // the others are being unpacked
    shown.value = some && !on.length && !words.length && !now.case && !now.verdict && !now.state ? `${total} of ${total} cells`
      : `${fitting.length} of ${some ? cells.length : total} cells${some ? ", more to come" : ""}`;
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
      for (const field of late) if (given.get(field.name)) choose(field);
      for (const field of form.elements) if (field.name) field.value = given.get(field.name) || "";
      for (const field of form.elements) if (field.tagName === "SELECT" && field.selectedIndex < 0) field.value = "";
      apply();
    }
  };
  form.addEventListener("input", () => { apply(); remember(); });
  form.addEventListener("reset", () => setTimeout(() => { apply(); remember(); }));
  document.getElementById("open").addEventListener("click", async () => {
    const found = sections.filter(section => !section.node.hidden).flatMap(section => section.listed).slice(0, 200);
    await Promise.all(found.map(fill));
    for (const node of found) node.open = true;
    shown.value = found.length === 200 ? "the first 200 are open" : `${found.length} are open`;
  });
  window.addEventListener("hashchange", arrive);
  window.addEventListener("beforeprint", () => {
    const listed = sections.filter(section => !section.node.hidden).flatMap(section => section.listed);
    const open = listed.filter(node => node.open).length, chosen = new URLSearchParams(wanted());
    paper.textContent = `On paper: ${listed.length} of ${total} cells${String(chosen) ? `, chosen by ${chosen}` : ""}; `
      + `${open} of them with what they hold (those that were open), of the others their line.`;
  });
  document.addEventListener("click", event => {
    const section = bySlug.get(event.target.closest?.("button[data-more]")?.dataset.more);
    if (!section) return;
    const next = section.fits[section.limit];
    section.limit = Infinity;
    list(section, section.fits);
    next?.node.querySelector("summary").focus();
  });
  if (touched) { apply(); remember(); } else arrive();
  later?.then(() => {
    if (location.hash) arrive(); else apply();
    if (late.includes(document.activeElement)) choose(document.activeElement);
  });
  window.addEventListener("load", () => { if (location.hash) arrive(); });  // the browser takes the focus away when it gets there itself
})();
