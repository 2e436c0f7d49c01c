"""The page in a headless Chromium: accessible, searchable, nothing hidden, on a screen, a phone and
paper."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from report_cells import HOSTILE, cell, results, skipped_cell
from repro_matrix.baseline.claims import ClaimRow
from repro_matrix.changes.history import make_run
from repro_matrix.paths import ROOT
from repro_matrix.report.load import Remarks
from repro_matrix.report.page import render_file, render_site
from repro_matrix.report.page_model import CellView, build_page

from bench import chromium
from bench.chromium import Chromium

AXE = Path(os.environ.get("AXE") or ROOT / ".venv" / "axe-core" / "package" / "axe.min.js")
WIDTHS = (390, 1000, 1920)
LONG = HOSTILE + "x" * 300
pytestmark = [
    pytest.mark.skipif(chromium.PATH is None, reason="no chromium here"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = [
        cell(
            "NOT_FIXED",
            "unexpected",
            "size mismatch 32 for lm_head",
            case="broken",
            title="A fix stopped working",
        ),
        *(
            cell(case=f"case-{number}", title=f"Failure number {number}", model="special")
            for number in range(12)
        ),
        *(
            cell(
                case="old",
                stack={
                    "name": name,
                    "python": "3",
                    "versions": {"torch": "2.1", "transformers": name},
                },
            )
            for name in ("5.0", "5.1")
        ),
        cell("PASSED", case="healthy", kind="control"),
        cell(case="hostile", title=LONG, error=LONG),
        skipped_cell(case="a-name-of-a-case-that-is-longer-than-a-phone-is-wide-and-then-some"),
    ]
    runs = [make_run(f"night {n}", [row for one in cells[:n] for row in one.rows]) for n in (1, 8)]
    claims = [
        ClaimRow("old", "1a", "the lock is the cause", "a/b#1", "supported", "2 measurements")
    ]
    remarks = Remarks(notes=["a note"])
    page = build_page(results(cells, remarks=remarks, claims=claims, past=runs))
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_file(page), encoding="utf-8", errors="replace")
    return path.as_uri()


OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"


def violations(browser: Chromium) -> Any:
    """Return what axe-core finds with everything open: a rule and an element each."""
    browser.evaluate(OPEN_ALL)
    browser.evaluate(AXE.read_text(encoding="utf-8"))
    return browser.evaluate(
        "axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))"
    )


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: make page-check fetches it")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_violation(browser: Chromium, address: str, width: int, dark: bool) -> None:
    browser.open(address, width, dark=dark)
    assert violations(browser) == []


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: make page-check fetches it")
@pytest.mark.parametrize(
    "cells", [(), (cell(),), (skipped_cell(),)], ids=["none", "one", "skipped"]
)
def test_axe_finds_no_violation_in_a_small_page(
    browser: Chromium, tmp_path: Path, cells: tuple[CellView, ...]
) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_file(build_page(results(cells))), encoding="utf-8")
    browser.open(path.as_uri())
    assert violations(browser) == []
    assert not browser.evaluate("document.getElementById('empty').checkVisibility()")


VISIBLE = (
    "[...document.querySelectorAll('section.case')].filter((one) =>"
    " one.checkVisibility()).map((one) => one.id)"
)


def search(browser: Chromium, text: str) -> Any:
    browser.evaluate(
        f"q = document.querySelector('[type=search]'), q.value = {json.dumps(text)}, "
        "q.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    return browser.evaluate(VISIBLE)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("size mismatch", ["broken"]),
        ("Size  MISMATCH for", ["broken"]),
        ("number 11", ["case-11"]),
        ("size mismatch 77 for /home/me/x.py", ["broken"]),  # a number and a path of one's own
        ("transformers 5.1", ["old"]),
        ("lock is the cause", ["old"]),
        ("flags.call inner", 16),
        ("no such thing", []),
    ],
)
def test_search_finds_errors_titles_releases_claims_and_settings(
    browser: Chromium, address: str, text: str, found: Any
) -> None:
    browser.open(address)
    shown = search(browser, text)
    assert (len(shown) if isinstance(found, int) else shown) == found
    rows = browser.evaluate(
        "[...document.querySelectorAll('tr[data-case]')].filter((one) =>"
        " one.checkVisibility()).length"
    )
    assert rows == len(shown)
    assert browser.evaluate("document.getElementById('empty').checkVisibility()") is (not shown)
    assert search(browser, "") == browser.evaluate(VISIBLE) and len(search(browser, "")) == 17


@pytest.mark.parametrize(
    ("text", "found"), [("size+mismatch", ["broken"]), ("size%20mismatch", ["broken"]), ("9%", [])]
)
def test_search_of_the_address(
    browser: Chromium, address: str, text: str, found: list[str]
) -> None:
    browser.open(f"{address}#q={text}")
    assert browser.evaluate(VISIBLE) == found


def test_search_of_a_site_finds_cases_by_title(browser: Chromium, tmp_path: Path) -> None:
    cells = [
        cell(case="one", title="Failure number one"),
        cell(case="two", title="Failure number two"),
    ]
    for name, text in render_site(build_page(results(cells))).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    browser.open((tmp_path / "index.html").as_uri())
    search(browser, "number two")
    rows = "[...document.querySelectorAll('tr[data-case]')].filter((one) => one.checkVisibility())"
    assert browser.evaluate(f"{rows}.map((one) => one.dataset.case)") == ["two"]


@pytest.mark.parametrize("width", WIDTHS)
def test_anchor_is_below_the_sticky_bar(browser: Chromium, address: str, width: int) -> None:
    browser.open(f"{address}#case-5", width)
    top, bottom = browser.evaluate(
        "[document.querySelector('#case-5 h2').getBoundingClientRect().top,"
        " document.getElementById('bar').getBoundingClientRect().bottom]"
    )
    assert bottom <= top < bottom + 200


def test_search_of_a_scrolled_page_shows_the_first_case(browser: Chromium, address: str) -> None:
    browser.open(f"{address}#case-11")
    search(browser, "size mismatch")
    row = "document.querySelector('tr[data-case=broken]').getBoundingClientRect()"
    assert browser.evaluate(
        f"document.getElementById('bar').offsetHeight < {row}.top && {row}.bottom < innerHeight"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_header_of_the_table_stays_in_sight(browser: Chromium, address: str, width: int) -> None:
    browser.open(address, width, 300)
    browser.evaluate(
        "document.querySelector('tr[data-case=case-5]').scrollIntoView({block: 'center'})"
    )
    bar, top, bottom = browser.evaluate(
        "(({top, bottom}) => [document.getElementById('bar').getBoundingClientRect().bottom, top,"
        " bottom])(document.querySelector('.matrix thead').getBoundingClientRect())"
    )
    assert bar - 1 <= top < bottom < 150
    assert browser.evaluate(
        f"document.elementFromPoint(innerWidth / 2, {bottom - 4}).closest('thead') != null"
    )


def test_find_in_page_opens_what_is_folded(browser: Chromium, address: str) -> None:
    browser.open(
        f"{address}#:~:text={quote('again: repro run healthy')}"
    )  # a link to a text searches as Ctrl-F does
    opened = browser.evaluate(
        "new Promise((done) => { const look = (left) => { const found ="
        " document.querySelector('details[open]'); found || !left ? done(found &&"
        " found.closest('section').id) : setTimeout(look, 50, left - 1); }; look(100); })"
    )
    assert opened == "healthy"


@pytest.mark.parametrize("width", [*WIDTHS, 840])
def test_no_text_or_column_is_outside_the_window(
    browser: Chromium, address: str, width: int
) -> None:
    browser.open(address, width)
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    cells = "[...document.querySelectorAll('.matrix :is(td, th), .chip, pre, .variants td')]"
    assert (
        browser.evaluate(f"Math.max(...{cells}.map((one) => one.getBoundingClientRect().right))")
        <= width
    )
    assert browser.evaluate("document.querySelector('.matrix td.s').checkVisibility()")


@pytest.mark.parametrize("dark", [False, True])
def test_print_is_black_on_white_without_the_bar(
    browser: Chromium, address: str, dark: bool
) -> None:
    browser.open(address, media="print", dark=dark)
    assert not browser.evaluate("document.getElementById('bar').checkVisibility()")
    style = browser.evaluate(
        "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    )
    assert style == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    assert browser.pdf().count(b"/Type /Page\n") > 2
    heights = (
        "[...document.querySelectorAll('details:not([open]) > pre')].map((one) => one.offsetHeight)"
    )
    assert min(browser.evaluate(heights)) > 20  # what is folded is printed
