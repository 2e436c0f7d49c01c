// Search and filters: they hide cells, and live in the address (#q=...&case=...). The page is complete without them.
"use strict";
(() => {
  const form = document.getElementById("filters");
  const output = document.getElementById("shown");
  const cells = [...document.querySelectorAll("details.cell")];
  const texts = new Map();
  const text = (cell) => {
    if (!texts.has(cell)) texts.set(cell, `${cell.dataset.case} ${cell.textContent}`.toLowerCase());
    return texts.get(cell);
  };

  function matches(cell, words, chosen) {
    return chosen.every(([name, value]) => (cell.dataset[name] || "").split("|").includes(value))
      && words.every((word) => text(cell).includes(word));
  }

  function apply() {
    const values = [...new FormData(form)].filter(([, value]) => value);
    const words = (form.elements.q.value || "").toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = values.filter(([name]) => name !== "q");
    let shown = 0;
    for (const cell of cells) {
      cell.hidden = !matches(cell, words, chosen);
      shown += !cell.hidden;
    }
    for (const section of document.querySelectorAll("section.case")) {
      section.hidden = values.length > 0 && !section.querySelector("details.cell:not([hidden])");
    }
    output.textContent = `${shown} of ${cells.length} cells`;
    const address = values.length ? `#${new URLSearchParams(values)}` : location.pathname + location.search;
    if (values.length || location.hash.includes("=")) history.replaceState(null, "", address);
  }

  function followAddress() {
    const hash = decodeURIComponent(location.hash.slice(1));
    if (form && hash.includes("=")) {
      for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
        if (form.elements[name]) form.elements[name].value = value;
      }
      apply();
      return;
    }
    const target = hash && document.getElementById(hash);
    for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    if (target) target.scrollIntoView();
  }

  if (form) {
    form.hidden = false;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", apply);
    form.addEventListener("reset", () => setTimeout(apply));
    document.getElementById("open").addEventListener("click", () => {
      for (const cell of cells) if (!cell.hidden) cell.open = true;
    });
    if (!location.hash.includes("=")) apply();
  }
  addEventListener("hashchange", followAddress);
  followAddress();
})();
