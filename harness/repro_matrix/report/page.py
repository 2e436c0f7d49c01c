"""Render the page of a report, and write it.

The page is one self-contained file, or a static site with a page for each case. Every text is made
harmless (text.py) and escaped (autoescape). The file needs no network access: its policy allows
nothing but its own style and script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from repro_matrix.errors import ResultsError
from repro_matrix.paths import write_bytes
from repro_matrix.report.attention import ATTENTION
from repro_matrix.report.case_status import CASE_STATES
from repro_matrix.report.load import load_results
from repro_matrix.report.page_model import CellView, Page, build_page, row_label
from repro_matrix.report.terminal import Label, label
from repro_matrix.results.rows import Row
from repro_matrix.text import block, counted, line, list_ranks, log

TEXT, BLOCK = 600, 2400  # characters of a text in a line, and of a block

TEMPLATES = Path(__file__).parent / "templates"


def write_report(path: Path, text: str) -> None:
    """Write a file in one step. Raises ResultsError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode(errors="replace"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_site(folder: Path, files: Mapping[str, str]) -> None:
    """Write a site. Raises ResultsError: the folder contains other files."""
    index = folder / "index.html"
    ours = index.is_file() and "repro-matrix" in index.read_text(encoding="utf-8", errors="replace")
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise ResultsError(f"{folder}: contains other files. Name a new or an empty folder.")
    for name, content in files.items():
        write_report(folder / name, content)


def write_run_page(folder: Path) -> Path | None:
    """Write the page of a run that has ended. An error is only a note."""
    target = folder / "report.html"
    try:
        write_report(
            target, render_file(build_page(replace(load_results([folder]), target=target)))
        )
    except Exception as error:  # noqa: BLE001 - the results are recorded
        log(f"note: no page of this run: {type(error).__name__}: {error}")
        return None
    return target


# The page


def render_file(page: Page) -> str:
    """Return the whole page as one file."""
    return _render("page.html", page, page.title, "#{}".format, page.cases)


def render_site(page: Page) -> dict[str, str]:
    """Return a static site: file name -> content."""
    files = {"index.html": _render("page.html", page, page.title, "{}.html".format, ())}
    files["badge.json"] = json.dumps(page.headline.badge()) + "\n"
    for case in page.cases:
        files[f"{case.slug}.html"] = _render(
            "case.html", page, case.slug, "{}.html".format, (case,)
        )
    return files


def _render(
    template: str, page: Page, title: str, address: Callable[[str], str], cases: Iterable[Any]
) -> str:
    css, script = (
        (TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    return (
        template_environment()
        .get_template(template)
        .render(
            page=page,
            title=title,
            at=address,
            cases=tuple(cases),
            css=Markup(css),
            script=Markup(script),
            policy=policy(css, script),
        )
    )


@lru_cache(maxsize=1)
def template_environment() -> Environment:
    made = Environment(
        loader=PackageLoader("repro_matrix.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_harmless,
    )
    made.globals |= {"symbols": CASE_STATES, "kinds": ATTENTION}
    made.filters |= {
        "label": label,
        "block": lambda text: Markup(escape(block(text, BLOCK))),
        "proof": proof,
        "setting": lambda value: "not set" if value is None else format_value(value),
        "ranks": list_ranks,
        "counted": counted,
        "shell": shlex.join,
    }
    return made


def _harmless(value: Any) -> Any:
    """Sanitize the value of a template's expression, unless it is markup."""
    return line(value, TEXT) if type(value) is str else value


def format_value(value: Any) -> str:
    """Return a checked value as text: numbers with four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value
    return "" if value is None else line(json.dumps(value, default=str), 80)


def proof(cell: CellView, place: str) -> Markup:
    """Return the attempts and checks of a cell's variants, and the command that repeats them.

    Variants with the same checks share their lines.
    """
    same: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in cell.rows:
        same[tuple(_details(row))][_attempts(row, row_label(row))].append(row.variant)
    lines = ["", "", place]
    for details, heads in same.items():
        lines += [*(f"{', '.join(names)}: {text}" for text, names in heads.items()), *details]
    command = shlex.join(cell.row.command[:-1])
    lines.append(f"again: {command} variants=NAME")
    lines += [f"measured in {cell.row.job_text}"] if cell.row.job_text else []
    return Markup(escape("\n".join(block(text, TEXT) for text in lines)))


def _attempts(row: Row, one: Label) -> str:
    if not row.attempts:
        return "not measured"
    outcome = f" ({row.outcome})" if len(row.counts) > 1 else ""
    return f"{one.text}{outcome}, {counted(len(row.attempts), 'attempt')}, {row.wall_s:.1f} s"


def _details(row: Row) -> Iterator[str]:
    """Yield why a variant did not pass or was not measured, and its checks."""
    if row.verdict != "NOT_FIXED" and (
        not row.attempts or row.counts["passed"] < len(row.attempts)
    ):
        yield f"    {line(row.reason, 240)}"
    for note in filter(None, (row.note, row.quarantine and f"quarantined: {row.quarantine}")):
        yield f"    {note}"
    passed = [check for check in row.checks if check["state"] == "passed"]
    for check in row.checks:
        if check["state"] != "passed":
            yield (
                f"    {check['state']}: {_check(check)} {line(check['subject'], 160)}"
                f" {list_ranks(check['ranks'])}"
            )
    if passed:
        yield f"    passed: {', '.join(map(_check, passed))}"


def _check(check: Mapping[str, Any]) -> str:
    """Return a check with its numbers: ``loss 7.1 (expected 7.2, tolerance 1e-6)``.

    Of a check whose values are equal, return only the name.
    """
    actual, expected, tolerance = (
        format_value(check[name]) for name in ("actual", "expected", "tolerance")
    )
    if actual == expected and tolerance in ("", "0"):
        return str(check["name"])
    parts = []
    if expected != actual:
        parts.append(f"expected {expected}")
    if tolerance:
        parts.append(f"tolerance {tolerance}")
    return f"{check['name']} {line(actual, 60)} ({line(', '.join(parts), 80)})"


def policy(css: str, script: str) -> str:
    """Return a content security policy: nothing is loaded, and only our own script runs."""
    style, code = (
        base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        for source in (css, script)
    )
    ours = f"style-src 'sha256-{style}'; script-src 'sha256-{code}'"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"
