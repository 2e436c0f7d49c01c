"""docs/page.png and docs/terminal.png anew, from the published baseline: ``make pictures``. Needs chromium.

The terminal shows the end of the run of the stack `current` whose documents are published; nothing is launched.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from repro_matrix.config import catalog as catalogue
from repro_matrix.grading.regrade import judged_again, with_expectations
from repro_matrix.paths import BASELINE, ROOT
from repro_matrix.report import summary
from repro_matrix.report import terminal as report
from repro_matrix.report.listing import wrapped
from repro_matrix.results import rows
from repro_matrix.results.exit_code import exit_code
from repro_matrix.results.store import Store
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from bench.browser import Browser

DOCS = ROOT / "docs"
STACK = "current"


def terminal() -> str:
    """What a run of the current stack ends with, as HTML."""
    cases = catalogue.load().cases
    stored = [document for document in Store(BASELINE).documents() if document["stack"]["name"] == STACK]
    documents = [with_expectations(d, cases[d["case"]]) for d in judged_again(stored, cases).documents]
    listed = rows.by_attention(row for document in documents for row in rows.arm_rows(document))
    out = Console(record=True, width=summary.WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    out.print("$ repro matrix repeat=3", style="bold")
    report.console = lambda stderr=False: out  # type: ignore[assignment]
    report.print_lines([*summary.lines(documents, listed), "", *wrapped(report.summary_line(listed), summary.WIDTH)])
    report.print_lines([summary.ending(exit_code(documents, 0), listed)])
    return out.export_html(theme=DIMMED_MONOKAI, inline_styles=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        page, told = Path(name) / "page.html", Path(name) / "terminal.html"
        command = [sys.executable, "-m", "repro_matrix", "report", "--baseline", "--output", str(page)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        told.write_text(terminal(), encoding="utf-8")
        browser.look(1180, 860)
        browser.open(page)
        browser.picture(DOCS / "page.png")
        browser.look(900, 690)
        browser.open(told)
        browser.js("document.body.style.cssText += ';margin:12px;zoom:0.76'")
        browser.look(900, browser.js("Math.ceil(document.querySelector('pre').getBoundingClientRect().bottom) + 12"))
        browser.picture(DOCS / "terminal.png")
    for picture in (DOCS / "page.png", DOCS / "terminal.png"):
        print(f"{picture}: {picture.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
