"""The script of the page in a headless chromium: filters in the address hide cells, a link opens what it leads to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_cells import cell
from repro_matrix.report.load import render_file
from repro_matrix.report.page_model import build_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no chromium here"), pytest.mark.xdist_group("browser")]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    cells = [cell(case="one"), cell("NOT_FIXED", "unexpected", case="two", model="special")]
    path = tmp_path / "page.html"
    path.write_text(render_file(build_page(cells, "a title", "created now", {})), encoding="utf-8")
    return path


def dump(page: Path, anchor: str, profile: Path) -> str:
    """Return the page's elements after its script has run."""
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
        "--virtual-time-budget=5000", f"--user-data-dir={profile}", f"file://{page}#{anchor}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def cells_of_dom(dom: str) -> dict[str, str]:
    """Case -> the attributes of its cell."""
    tags = re.findall(r'<details class="cell"[^>]*>', dom)
    return {re.findall(r'data-case="([^"]+)"', tag)[0]: tag for tag in tags}


@pytest.mark.parametrize(
    ("anchor", "hidden", "text"),
    [("", set(), "2 of 2 cells"), ("q=special", {"one"}, "1 of 2 cells"), ("compared=unexpected", {"one"}, "1 of 2"),
     ("verdict=FIXED", {"two"}, "1 of 2 cells"), ("q=nothing+like+it", {"one", "two"}, "0 of 2 cells")],
)  # fmt: skip
def test_filters_of_the_address_hide_cells(
    page: Path, tmp_path: Path, anchor: str, hidden: set[str], text: str
) -> None:
    dom = dump(page, anchor, tmp_path / "profile")
    assert {case for case, tag in cells_of_dom(dom).items() if re.search(r"\shidden", tag)} == hidden
    assert text in dom


def test_link_to_a_cell_opens_it(page: Path, tmp_path: Path) -> None:
    tag = cells_of_dom(page.read_text(encoding="utf-8"))["two"]
    (name,) = re.findall(r' id="([^"]+)"', tag)
    cells = cells_of_dom(dump(page, name, tmp_path / "profile"))
    assert " open" in cells["two"] and " open" not in cells["one"]
