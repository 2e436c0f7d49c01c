"""The page in a real browser: Debian's chromium, headless. Without one these are skipped, and say so.

The accessibility checker is axe-core; `make page-check` fetches it (nothing here asks the network for anything).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repro_matrix.analysis.claims.ledger import ClaimRow
from repro_matrix.paths import ROOT
from repro_matrix.report import html as render
from repro_matrix.report.html import FIRST
from repro_matrix.report.view import Cell
from test_page import HOSTILE, armed, cell, html, made, nights, paged

from bench.browser import Browser, program

pytestmark = pytest.mark.skipif(
    program() is None, reason="no chromium here: apt-get install chromium, or CHROMIUM=path"
)
AXE = Path(os.environ.get("AXE_CORE") or ROOT / ".venv" / "axe-core" / "package" / "axe.min.js")


def cells() -> list[Cell]:
    shown = [cell(made(case="quiet", model=f"m{n}")) for n in range(2)]
    owned = made("FIX_BROKEN", "muted", case="quiet", model="m2")
    owned["verdicts"]["fix"] |= {"muted": {"owner": "someone", "until": "2027-01-01", "reason": "known"}}
    shown.append(cell(owned))
    old = {"name": "old", "versions": {"torch": "2.13.0", "transformers": "4.0.0"}}
    shown.append(cell(made("FIX_BROKEN", case="quiet", model="m1", stack=old)))
    shown.append(cell(made("FIX_BROKEN", "unexpected", case="loud", error=HOSTILE * 50, title=HOSTILE, model=HOSTILE)))
    return shown


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "a page ü.html"
    claim = ClaimRow("quiet", "c1", "it helps", "QwenLM/Qwen#920", "refuted", "why", ())
    path.write_text(html(*cells(), ledger=[claim], nights=nights()), encoding="utf-8")
    return path


@pytest.fixture
def shown(browser: Browser, address: Path) -> Browser:
    browser.look(1280, 900)
    browser.open(address)
    browser.errors.clear()
    browser.requests.clear()
    return browser


VISIBLE = "[...document.querySelectorAll('details.cell')].filter(c => c.checkVisibility()).length"


def test_filters_live_in_the_address_and_a_link_brings_them_back(shown: Browser, address: Path) -> None:
    assert shown.js(VISIBLE) == 5
    shown.js("const f = document.forms.filters ?? document.getElementById('filters'); f.model.value = 'm1'; "
             "f.dispatchEvent(new Event('input'))")  # fmt: skip
    assert shown.js(VISIBLE) == 2 and shown.js("location.hash") == "#model=m1"
    assert shown.js("document.getElementById('shown').value") == "2 of 5 cells"
    shown.open(address.resolve().as_uri() + "#verdict=FIX_BROKEN&q=QUIET+old")
    assert shown.js(VISIBLE) == 1 and shown.js("document.getElementById('filters').verdict.value") == "FIX_BROKEN"
    shown.js("document.querySelector('#filters button[type=reset]').click()")
    shown.until(f"{VISIBLE} === 5")
    assert shown.js("location.hash") == ""
    shown.open(address.resolve().as_uri() + "#model=of-nobody&nonsense=%&case")
    assert shown.js(VISIBLE) == 5


TYPES = """new MutationObserver((_, watch) => { const form = document.getElementById("filters");
  if (!form || form.hidden || window.there !== undefined) return;
  window.there = document.querySelectorAll(".case").length;
  form.q.value = "quiet m2"; form.dispatchEvent(new Event("input")); watch.disconnect();
}).observe(document, {subtree: true, childList: true, attributes: true})"""


def test_filters_are_there_before_the_cells_and_keep_what_is_typed_meanwhile(shown: Browser, address: Path) -> None:
    typed = shown.call("Page.addScriptToEvaluateOnNewDocument", source=TYPES)["identifier"]
    try:
        shown.open(address)
    finally:
        shown.call("Page.removeScriptToEvaluateOnNewDocument", identifier=typed)
    assert shown.js("window.there") == 0, "no case had been read"
    assert shown.js("document.getElementById('shown').value") == "1 of 5 cells" and shown.js(VISIBLE) == 1
    assert shown.js("location.hash") == "#q=quiet+m2" and not shown.errors


def test_a_cell_is_unpacked_when_it_is_opened_or_linked_to(shown: Browser, address: Path) -> None:
    name = cells()[0].id
    assert shown.js(f"document.getElementById('{name}').querySelector('table')") is None
    shown.open(address.resolve().as_uri() + f"#{name}")
    shown.until(f"document.getElementById('{name}').querySelector('table.arms tbody')?.rows.length === 2")
    assert shown.js(f"document.getElementById('{name}').open && document.activeElement.parentElement.id") == name
    assert "repro run quiet" in shown.js(f"document.getElementById('{name}').textContent")
    assert shown.js("document.querySelectorAll('details.cell[open]').length") == 1
    shown.js("document.getElementById('open').click()")
    shown.until("document.querySelectorAll('details.cell[open] table.arms').length === 5")
    assert not shown.errors


def test_cells_that_are_packed_are_found_linked_to_and_listed(browser: Browser, tmp_path: Path) -> None:
    many = [cell(made(case="many", model=f"m{n:02}")) for n in range(FIRST + 30)]
    last = many[-1]
    path = tmp_path / "page.html"
    path.write_text(html(*many, cell(made(case="few"))), encoding="utf-8")
    browser.look(1280, 900)
    browser.errors.clear()
    browser.open(path)
    said, every = "document.getElementById('shown').value", len(many) + 1
    browser.until(f"{said} === '{every} of {every} cells'")
    assert browser.js(VISIBLE) == FIRST + 1
    browser.js(
        "const f = document.getElementById('filters'); f.q.value = 'many m41'; f.dispatchEvent(new Event('input'))"
    )
    assert browser.js(VISIBLE) == 1 and browser.js(said) == f"1 of {every} cells"
    assert browser.js("document.querySelector('details.cell:not([hidden])').id") == last.id
    browser.js("document.querySelector('#filters button[type=reset]').click()")
    browser.until(f"{VISIBLE} === {FIRST + 1}")
    browser.js("document.querySelector('button[data-more]').click()")
    assert browser.js(VISIBLE) == every and browser.js("document.querySelector('p.more').hidden")
    assert browser.js("document.activeElement.parentElement.id") == many[FIRST].id, "where the list goes on"
    browser.open(path.resolve().as_uri() + f"#{last.id}")
    browser.until(f"document.getElementById('{last.id}')?.querySelector('table.arms tbody')?.rows.length === 2")
    assert not browser.errors


def test_the_search_finds_also_the_arms_that_a_line_does_not_name(browser: Browser, tmp_path: Path) -> None:
    """Of cells that are written out, and of those that are drawn from data."""
    many = [cell(armed(case="many", model=f"m{n:02}")) for n in range(FIRST + 3)]
    path = tmp_path / "page.html"
    path.write_text(html(*many), encoding="utf-8")
    browser.look(1280, 900)
    browser.errors.clear()
    browser.open(path)
    said, every = "document.getElementById('shown').value", len(many)
    browser.until(f"{said} === '{every} of {every} cells'")
    seek = "const f = document.getElementById('filters'); f.q.value = '%s'; f.dispatchEvent(new Event('input'))"
    for words, count in (("fix-1", every), ("fix-5", every), ("fix-6", 0), ("m14 fix-5", 1)):
        browser.js(f"{{ {seek % words} }}")
        assert browser.js(said) == f"{count} of {every} cells", words
    assert not browser.errors


def test_a_line_that_the_script_draws_is_the_template_s(browser: Browser, tmp_path: Path) -> None:
    """The same cells, with the first of them written out and packed as data."""
    told = [made("FIX_BROKEN", "unexpected", model=HOSTILE, flags={"use_cache": "<b>"}), armed(variant=["ranks=4"])]
    shown = [cell({**one, "case": "many"}, source="of <one>") for one in told]
    every = [*(cell(made("FIX_BROKEN", "unexpected", case="many", model=f"a{n:02}")) for n in range(FIRST + 1)), *shown]
    path, drawn = tmp_path / "page.html", []
    for cells_ in (shown, every):
        path.write_text(html(*cells_), encoding="utf-8")
        browser.look(1280, 900)
        browser.errors.clear()
        browser.open(path)
        browser.until(f"document.getElementById('shown').value === '{len(cells_)} of {len(cells_)} cells'")
        browser.js("document.querySelector('button[data-more]')?.click()")
        lines = [browser.js(f"document.getElementById('{one.id}').outerHTML") for one in shown]
        drawn.append([re.sub(r"\s+", " ", re.sub(r' data-p="[^"]*"', "", text)) for text in lines])
    assert drawn[0] == drawn[1] and "1 not as expected" in drawn[0][0] and "use_cache" in drawn[0][0]
    assert not browser.errors


def test_of_hundreds_of_stacks_a_filter_s_choices_are_written_when_it_is_used(browser: Browser, tmp_path: Path) -> None:
    def on(number: int) -> Cell:
        return cell(made(case="many", stack={"name": f"s{number:03}", "versions": {"torch": f"2.13.{number}"}}))

    every = [on(number) for number in range(120)]
    path = tmp_path / "page.html"
    path.write_text(html(*every), encoding="utf-8")
    browser.look(1280, 900)
    browser.open(path)
    browser.until("document.getElementById('shown').value === '120 of 120 cells'")
    stacks = "document.getElementById('filters').stack"
    assert browser.js(f"{stacks}.options.length") == 1
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.js(f"{stacks}.focus()")
    browser.until(f"{stacks}.options.length === 121")
    assert browser.js(f"{stacks}.value") == ""
    browser.key("s")  # to choose with the keyboard
    browser.until("document.getElementById('shown').value === '1 of 120 cells'")
    assert browser.js("location.hash") == "#stack=s000"
    browser.open(path.resolve().as_uri() + "#stack=s077")
    browser.until("document.getElementById('shown').value === '1 of 120 cells'")
    assert browser.js(f"{stacks}.value") == "s077" and browser.js(VISIBLE) == 1


def test_paper_says_what_is_on_it(shown: Browser, address: Path) -> None:
    shown.open(address.resolve().as_uri() + f"#{cells()[0].id}")
    shown.until("document.querySelector('details.cell[open] table.arms') !== null")
    shown.look(1280, 900, media="print")
    shown.js("window.dispatchEvent(new Event('beforeprint'))")
    assert "5 of 5 cells; 1 of them with what they hold" in shown.js("document.getElementById('paper').innerText")
    shown.look(1280, 900)
    assert not shown.js("document.getElementById('paper').checkVisibility()")


def test_without_its_script_a_page_says_what_differs_and_what_it_lacks(browser: Browser, address: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(address)
        told = browser.js("document.body.innerText")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "repro run loud" in told and "arms=fix" in told, "what differs, and the command"
    assert "need the script of this page" in told and browser.js(VISIBLE) == 5


def test_every_link_of_the_page_leads_somewhere(shown: Browser) -> None:
    shown.js("document.querySelectorAll('details[data-p]').forEach(d => d.open = true)")
    shown.until("[...document.querySelectorAll('details[data-p]')].every(d => d.children.length > 1)")
    assert shown.js("document.querySelectorAll('.flips a').length") == 2  # the measurements around the release
    dead = shown.js("[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.getAttribute('href').slice(1))"
                    ".filter(id => !document.getElementById(id))")  # fmt: skip
    assert dead == []
    away = shown.js("[...document.querySelectorAll('a:not([href^=\"#\"])')].map(a => a.href)")
    assert away == ["https://github.com/QwenLM/Qwen/issues/920"]


def test_hostile_texts_are_texts(shown: Browser) -> None:
    shown.js("document.getElementById('open').click()")
    shown.until("document.querySelectorAll('details.cell[open] table.arms').length === 5")
    assert shown.js("document.images.length") == 0
    assert "<img src=x onerror=alert(1)>" in shown.js("document.body.textContent")
    assert shown.js("[...document.body.textContent].filter(c => /[\\u202e\\u200b\\u0000\\u001b]/.test(c)).length") == 0
    assert not shown.errors and shown.requests == []


def test_it_can_be_used_with_the_keyboard_alone(shown: Browser) -> None:
    seen = []
    for _ in range(60):
        shown.key("Tab")
        seen.append(shown.js("[document.activeElement].map(n => n.tagName + ' ' + (n.id || n.name || "
                             "n.parentElement?.className))[0]"))  # fmt: skip
        if seen[-1] == "SUMMARY cell":
            break
    assert seen[0] == "A skip" or shown.js("document.querySelector('.skip') !== null")
    assert "INPUT q" in seen and "SELECT model" in seen and seen[-1] == "SUMMARY cell", seen
    assert shown.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    shown.key("Enter")
    shown.until("document.querySelector('details.cell[open] table.arms') !== null")


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window(shown: Browser, width: int, dark: bool) -> None:
    shown.look(width, 900, dark)
    shown.js("document.getElementById('open').click()")
    shown.until("document.querySelectorAll('details.cell[open] table.arms').length === 5")
    assert shown.js("document.documentElement.scrollWidth") <= width
    back = shown.js("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") is not dark


def test_on_paper_there_are_no_filters_and_colours(shown: Browser) -> None:
    shown.look(1280, 900, dark=True, media="print")
    assert shown.js("document.getElementById('filters').checkVisibility()") is False
    assert shown.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shown.look(1280, 900)


def test_the_site_needs_no_script(browser: Browser, tmp_path: Path) -> None:
    for name, text in render.site(paged(*cells())).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(tmp_path / "index.html")
        assert browser.js("document.querySelectorAll('.matrix tbody tr').length") == 2
        browser.open(tmp_path / "quiet.html")
        assert browser.js("document.querySelectorAll('details.cell table.arms').length") == 4
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    links = browser.js("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    assert all((tmp_path / link.partition("#")[0]).exists() for link in links if not link.startswith("http"))


def barriers(browser: Browser) -> list[str]:
    """What axe-core finds with everything opened."""
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.js(AXE.read_text(encoding="utf-8"))
    found: list[str] = browser.js(
        "axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => "
        "n.html.slice(0, 160) + ' ' + n.failureSummary).join(' | ')))"
    )
    return found


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: make page-check fetches it")
@pytest.mark.parametrize("dark", [False, True])
def test_the_accessibility_checker_finds_nothing(shown: Browser, dark: bool) -> None:
    shown.look(1280, 900, dark)
    shown.js("document.getElementById('open').click()")
    shown.until("document.querySelectorAll('details.cell[open] table.arms').length === 5")
    assert "Over the nights" in shown.js("document.body.textContent")
    assert "muted by" in shown.js("document.body.textContent")
    assert barriers(shown) == []


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: make page-check fetches it")
def test_nor_on_the_site(browser: Browser, tmp_path: Path) -> None:
    for name, text in render.site(paged(*cells(), nights=nights())).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    browser.look(1280, 900)
    for name in ("index.html", "quiet.html"):
        browser.open(tmp_path / name)
        assert barriers(browser) == [], name
