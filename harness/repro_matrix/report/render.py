"""Load what a report shows from folders of results, render the page, and write files.

The page is one self-contained file, or a static site with a page for each case. Every text is made
harmless (text.py) and escaped (autoescape). The file needs no network access: its policy allows
nothing but its own style and script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from repro_matrix.baseline import quarantine
from repro_matrix.baseline.claims import ClaimRow, ledger
from repro_matrix.changes.history import NightlyRun, load_history, make_run
from repro_matrix.changes.regressions import (
    Regressions,
    against_history,
    compare_to_last_passing,
    since_last_passing,
)
from repro_matrix.changes.sides import AXES
from repro_matrix.config import catalog as catalogs
from repro_matrix.config.catalog import Catalogue, left_out
from repro_matrix.config.schema import Case
from repro_matrix.errors import ReproError, ResultsError
from repro_matrix.paths import BASELINE, write_bytes
from repro_matrix.planning.plan import newer_release
from repro_matrix.records.outcome import NOTHING_STORED
from repro_matrix.report import formats
from repro_matrix.report.attention import ATTENTION
from repro_matrix.report.case_status import CASE_STATES
from repro_matrix.report.formats import Remarks
from repro_matrix.report.headline import Headline, headline
from repro_matrix.report.page_model import CellView, Page, build_page, cells_of, row_label
from repro_matrix.report.result_lines import result_lines
from repro_matrix.report.terminal import Label, columns, label
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.results.summary import load_rows, lost
from repro_matrix.text import block, counted, line, list_ranks, log, one_line

PUBLISHED = "published results"
TEXT, BLOCK = 600, 2400  # characters of a text in a line, and of a block

TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class Results:
    """``stored_cases``: before anything was selected. ``past``: the runs of the history before
    these results."""

    catalog: Catalogue
    headline: Headline
    cells: Sequence[CellView]
    remarks: Remarks
    stored_cases: set[str]
    claims: Sequence[ClaimRow]
    past: Sequence[NightlyRun] = ()


def load_results(
    folders: Sequence[Path],
    selection: Mapping[str, Sequence[str]] | None = None,
    history: Path | None = None,
) -> Results:
    """Load the cells of these folders. ``selection``: axis -> patterns. Cases that are not in the
    catalog cannot be graded: they are named and left out. They are compared with the last passing
    runs: of a history (a folder with nights.jsonl), else of the runs beside them. Raises
    ResultsError: a folder is missing or cannot be read."""
    catalog = catalogs.load()
    cells: list[CellView] = []
    entries, today = quarantine.read_quarantine(), datetime.now(timezone.utc).date()
    texts: list[str] = []
    expired: list[str] = []
    stored: list[Row] = []
    for folder, name in zip(folders, source_names(folders)):
        try:
            rows = load_rows(folder, catalog.cases, texts, write=folder != BASELINE)
        except FileNotFoundError:
            hint = (
                "`repro run CASE` stores a run, and `repro report --baseline` shows the published"
                " results."
            )
            raise ResultsError(f"{folder}: no such folder of results. {hint}") from None
        except OSError as error:
            raise ResultsError(f"{folder}: cannot be read ({error.strerror or error})") from None
        stored += rows
        rows = [
            _explained(row, catalog.cases[row.case])
            for row in rows
            if row.case in catalog.cases and _is_selected(row, selection or {})
        ]
        if (
            folder == BASELINE
        ):  # what is published is what is known: a fix that is flaky there is no news
            rows = [
                (
                    replace(row, state="no_expectation", note="")
                    if row.state in NOTHING_STORED
                    else row
                )
                for row in rows
            ]
        expired += quarantine.expired(rows, entries, today)
        cells += cells_of(
            quarantine.mark_rows(rows, entries, today), name if len(folders) > 1 else ""
        )
    rows, since = [row for cell in cells for row in cell.rows], Regressions()
    past: list[NightlyRun] = []
    if history is not None:
        if not history.is_dir():
            raise ResultsError(f"{history}: no such folder")
        end = max((row.started for row in stored), default=0.0)
        past = [run for run in load_history(history) if run.started < end]
        since = compare_to_last_passing(rows, past)
    elif len(folders) == 1:
        since = since_last_passing(folders[0], rows, catalog.cases)
    rows = quarantine.mark_rows(against_history(rows, since), entries, today)
    members, stored_cases = iter(rows), {row.case for row in stored}
    cells = [replace(cell, rows=tuple(islice(members, len(cell.rows)))) for cell in cells]
    shown = [catalog.cases[name] for name in dict.fromkeys(row.case for row in rows)]
    read = {folder: run for folder in folders if (run := runs.read_run(folder))}
    incomplete = [
        f"{folder}: the run was interrupted. To continue: repro matrix --resume results={folder}"
        for folder, run in read.items()
        if run.interrupted
    ]
    less = "less was measured or confirmed than requested"
    incomplete += [
        f"{folder}: exit code 3 of its run: {less}"
        for folder, run in read.items()
        if run.exit_code == 3
    ]
    ungraded = sorted(stored_cases - catalog.cases.keys())
    wrong = left_out(catalog.cases)
    unknown = "the catalog has no such case"
    incomplete += [
        f"{case}: its results are left out: {wrong.get(case, unknown)}" for case in ungraded
    ]
    damaged = lost(texts)
    notes = [text for text in texts if text not in damaged]
    notes += [
        f"left out: {text}"
        for text in catalog.left_out
        if not any(text in each for each in incomplete)
    ]
    remarks = Remarks(damaged, incomplete, list(dict.fromkeys(expired)), notes)
    claims = ledger(shown, stored)
    head = headline(rows, catalog.cases, since, _no_previous(folders, history))
    if damaged:
        first = one_line(damaged[0]).partition(". ")[0]
        text = (
            f"{counted(len(damaged), 'file')} of evidence missing or not readable, the first:"
            f" {first}"
        )
        head = replace(head, incomplete=text)
    elif incomplete or not all(row.complete for row in rows):
        head = replace(head, incomplete="Less was measured than requested")
    return Results(catalog, head, cells, remarks, stored_cases, claims, past)


def _explained(row: Row, case: Case) -> Row:
    """Return the row; of a fix that is a newer release, older runs stored only that it is the same
    as unfixed."""
    declared = case.variants.get(row.variant)
    if row.skip_kind == "same" and declared and declared.stack:
        return replace(row, reason=newer_release(row.stack.name))
    return row


def _no_previous(folders: Sequence[Path], history: Path | None) -> str:
    """Say why these results have no earlier run to compare with; "" of a run."""
    if history is not None:
        return (
            f"Not known yet: {history} has no earlier run that passed. repro nightly adds and"
            " compares each night's."
        )
    if folders == [BASELINE]:
        return "Not compared: these are the published results."
    return (
        "Not compared: these are several results. repro diff compares two."
        if len(folders) > 1
        else ""
    )


def _is_selected(row: Row, selection: Mapping[str, Sequence[str]]) -> bool:
    values = dict(
        zip(AXES, (row.case, row.model, row.strategy, row.stack.name, row.hardware.profile))
    )
    return all(
        any(fnmatchcase(values[axis], one) for one in patterns)
        for axis, patterns in selection.items()
    )


def page(loaded: Results, folders: Sequence[Path], target: Path | None = None) -> Page:
    """Build the page of loaded results. ``target``: the page's file."""
    past = loaded.past
    runs = [*past, make_run("these results", loaded.headline.rows)] if past else []
    return build_page(
        loaded.cells,
        loaded.headline,
        title(folders),
        created_line(folders),
        loaded.catalog.cases,
        notes=loaded.remarks.all,
        claims=loaded.claims,
        runs=runs,
        beside=[target and target.resolve().parent] == [each.resolve() for each in folders],
    )


def render_page(
    form: str, loaded: Results, folders: Sequence[Path], target: Path | None = None
) -> str:
    """Return loaded results in a format: html, text, junit, markdown or json."""
    if form == "html":
        return render_file(page(loaded, folders, target))
    head = loaded.headline
    if form == "json":
        names = [str(folder) for folder in folders]
        return formats.report_to_json(
            loaded.cells, head, loaded.claims, names, created_line(folders), loaded.remarks
        )
    if form == "junit":
        return formats.to_junit(loaded.cells, head, loaded.remarks)
    if form == "markdown":
        return formats.to_markdown(head, title(folders), loaded.remarks)
    return "\n".join([*loaded.remarks.all, *result_lines(head, columns(), everything=True)]) + "\n"


def title(folders: Sequence[Path]) -> str:
    """Return the page's title."""
    named = [
        PUBLISHED if folder == BASELINE else f"run {name}"
        for folder, name in zip(folders, source_names(folders))
    ]
    return f"repro-matrix: {' and '.join(named)}"


def source_names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder: its own, or its path where two have the same."""
    names = ["baseline" if folder == BASELINE else folder.resolve().name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names)]


def created_line(folders: Sequence[Path]) -> str:
    """Return when and from what a report was made."""
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    names = ", ".join(source_names(folders))
    return (
        f"Created {when} UTC from {names}. Every result comes from a launched process; its evidence"
        " is stored."
    )


def write_report(path: Path, text: str) -> None:
    """Write a file in one step. Raises ResultsError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode(errors="replace"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_site(folder: Path, files: Mapping[str, str]) -> None:
    """Write a site. Raises ResultsError: the folder holds other files, among which ours would
    lie."""
    index = folder / "index.html"
    ours = index.is_file() and "repro-matrix" in index.read_text(encoding="utf-8", errors="replace")
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise ResultsError(f"{folder}: holds other files. --site takes a new or empty folder.")
    for name, content in files.items():
        write_report(folder / name, content)


def write_run_page(folder: Path) -> Path | None:
    """Write the page of a run that has ended, from its summary. An error is only a note: the
    results are recorded."""
    target = folder / "report.html"
    try:
        write_report(target, render_page("html", load_results([folder]), [folder], target=target))
    except (
        ReproError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ImportError,
    ) as error:
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
    """What every expression of a template goes through; markup has gone through it."""
    return line(value, TEXT) if type(value) is str else value


def format_value(value: Any) -> str:
    """Return a checked value as text: numbers with four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else line(json.dumps(value, default=str), 80)
    )


def proof(cell: CellView, place: str) -> Markup:
    """Return the attempts and checks of a cell's variants, and what repeats them, as lines.
    Variants with the same checks stand together."""
    same: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in cell.rows:
        same[tuple(_details(row))][_attempts(row, row_label(row))].append(row.variant)
    lines = ["", "", place]
    for details, heads in same.items():
        lines += [*(f"{', '.join(names)}: {text}" for text, names in heads.items()), *details]
    command = shlex.join(cell.row.command[:-1])
    lines.append(f"again: {command} variants=NAME")
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
        if check not in passed:
            yield (
                f"    {check['state']}: {_check(check)} {line(check['subject'], 160)}"
                f" {list_ranks(check['ranks'])}"
            )
    if passed:
        yield f"    passed: {', '.join(map(_check, passed))}"


def _check(check: Mapping[str, Any]) -> str:
    """Return a check with its numbers: ``loss 7.1 (expected 7.2, tolerance 1e-6)``; of an exact one
    the name."""
    actual, expected, tolerance = (
        format_value(check[name]) for name in ("actual", "expected", "tolerance")
    )
    if actual == expected and tolerance in ("", "0"):
        return str(check["name"])
    parts = [f"expected {expected}"] * (expected != actual) + [f"tolerance {tolerance}"] * bool(
        tolerance
    )
    return f"{check['name']} {line(actual, 60)} ({line(', '.join(parts), 80)})"


def policy(css: str, script: str) -> str:
    """Return a content security policy: nothing is loaded, and only our own script runs."""
    style, code = (
        base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        for source in (css, script)
    )
    ours = f"style-src 'sha256-{style}'; script-src 'sha256-{code}'"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"
