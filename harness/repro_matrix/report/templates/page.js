// Search: hides cases that lack a word, and lives in the address (#q=...)
"use strict";
(() => {
  const form = document.getElementById("bar"), main = document.getElementById("main");
  const rows = [...document.querySelectorAll("tr[data-case]")];
  const sections = [...document.querySelectorAll("section.case")];
  const cases = sections.length ? sections : rows; // a site's index has no sections
  const others = document.querySelectorAll("main > section:not(.case):not([aria-labelledby=matrix])");
  const texts = new Map();
  const has = (one, words) => {
    if (!texts.has(one)) texts.set(one, one.textContent.toLowerCase());
    return words.every((word) => texts.get(one).includes(word));
  };
  function apply() {
    const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = cases.filter((one) => has(one, [words.join(" ")])); // the whole phrase, else its words
    if (!found.length) found = cases.filter((one) => has(one, words));
    const known = words.filter((word) => !/\d|\//.test(word)); // a pasted error has numbers and paths of its own
    if (!found.length && known.length) found = cases.filter((one) => has(one, known));
    const shown = new Set(found);
    for (const one of cases) one.hidden = !shown.has(one);
    const names = new Set(found.map((one) => one.dataset.case || one.id));
    for (const row of rows) row.hidden = !names.has(row.dataset.case);
    for (const body of document.querySelectorAll("tbody[id]")) body.hidden = !body.querySelector("tr[data-case]:not([hidden])");
    for (const one of others) one.hidden = words.length > 0;
    document.getElementById("empty").hidden = found.length > 0 || !words.length;
    document.getElementById("shown").textContent = words.length ? `${found.length} of ${cases.length} cases` : "";
    if (words.length || location.hash.startsWith("#q=")) {
      history.replaceState(null, "", words.length ? `#${new URLSearchParams({ q: form.elements.q.value })}` : location.pathname);
    }
  }
  function follow() {
    const search = location.hash.startsWith("#q=");
    if (!search && !form.elements.q.value) return;
    form.elements.q.value = search ? new URLSearchParams(location.hash.slice(1)).get("q") : "";
    apply();
    if (!search) document.getElementById(location.hash.slice(1))?.scrollIntoView(); // a link shows what was hidden
  }
  if (cases.length < 2) return;
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    apply();
    if (main.getBoundingClientRect().top < 0) main.scrollIntoView(); // to the first case
  });
  addEventListener("hashchange", follow);
  follow();
})();
