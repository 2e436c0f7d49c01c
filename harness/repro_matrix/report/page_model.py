"""Summary rows -> what the page shows: a row and a section for each case. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from repro_matrix.baseline.claims import ClaimRow
from repro_matrix.changes.history import NightlyRun, make_run
from repro_matrix.config.schema import Case
from repro_matrix.grading.failure_text import comparable_text
from repro_matrix.report.attention import ATTENTION, Attention, describe_kind
from repro_matrix.report.case_status import CASE_STATES, CaseStatus, age, case_status
from repro_matrix.report.headline import Headline
from repro_matrix.report.terminal import LABELS, Label, label
from repro_matrix.results.rows import Row
from repro_matrix.text import counted

if TYPE_CHECKING:
    from repro_matrix.report.load import Results

MOST_RUNS = 14  # earlier runs that are shown
MOST_ERRORS = 40  # of a case
MESSAGE = 600  # characters of a message that a summary keeps
# Verdicts that say nothing of what helps.
ABSENT = ("skipped", "INCONCLUSIVE", "NOT_REPRODUCED", "FIXED_UPSTREAM", "SIGNATURE_MISMATCH")
# Verdict -> the state of the failure under the variant's strategy.
SHOWN = {
    "FIXED": "absent",
    "NOT_REPRODUCED": "absent",
    "FIXED_UPSTREAM": "absent",
    "NOT_FIXED": "reproduces",
    "DIFFERENT_FAILURE": "other_failure",
    "FIX_BREAKS": "other_failure",
}
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


@dataclass(frozen=True, eq=False)
class CellView:
    """The variants of one cell on one stack and machine.

    ``source``: which of several results it comes from.
    """

    rows: tuple[Row, ...]
    source: str = ""

    @cached_property
    def row(self) -> Row:
        """The first variant's row, for what all of them share."""
        return self.rows[0]

    @cached_property
    def flags(self) -> str:
        """Describe how it differs from the usual cell of its model and strategy."""
        return " ".join(self.row.axes[2:]).replace("flags.", "")

    @cached_property
    def place(self) -> tuple[str, ...]:
        """All that tells it from the other cells of its case."""
        row = self.row
        ranks = counted(row.ranks, "rank")
        return (
            row.model,
            row.strategy,
            self.flags,
            ranks,
            row.stack.name,
            row.hardware.profile,
            self.source,
        )


@dataclass(frozen=True)
class VariantView:
    """One variant over all cells.

    ``changes``: setting, before and after. ``results``: a label, and the number and the places of
    the cells that have it; where the failure does not reproduce, nothing can help.
    """

    name: str
    help: str
    role: str
    changes: tuple[tuple[str, Any, Any], ...]
    results: tuple[tuple[Label, int, tuple[str, ...]], ...]


@dataclass(frozen=True)
class FailureView:
    """An error text that rows of a case share. ``row``: the first of them."""

    row: Row
    variants: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class CaseView:
    """One case on the page.

    ``state``: that of the status, or "attention". ``symbols``: strategy -> state on the newest
    stack. ``places``: what tells a cell from the others. ``past``: (id, state) of earlier runs.
    """

    status: CaseStatus
    summary: str
    symptom: str  # the known failure's text
    references: tuple[tuple[str, str], ...]  # text, address
    cells: tuple[CellView, ...]  # those that need attention first, then those of the newest stack
    places: Mapping[CellView, str]
    symbols: Mapping[str, str]
    variants: Mapping[str, Sequence[VariantView]]  # by role; a fix that works nowhere is a non_fix
    failures: tuple[FailureView, ...]  # that of the newest unfixed variant first
    claims: tuple[ClaimRow, ...] = ()
    attention: tuple[Attention, ...] = ()
    past: tuple[tuple[str, str], ...] = ()

    @property
    def slug(self) -> str:
        return self.status.case

    @property
    def state(self) -> str:
        return "attention" if any(each.urgent for each in self.attention) else self.status.state

    @property
    def stopped(self) -> int:
        """The number of documented fixes that stopped working."""
        return sum(len(each.variants) for each in self.attention if each.kind == "stopped_working")


@dataclass(frozen=True)
class Page:
    """All that the page shows. ``beside``: whether the page lies in the folder of its evidence."""

    title: str
    created: str
    headline: Headline
    cases: tuple[CaseView, ...]
    notes: tuple[str, ...] = ()
    beside: bool = False

    @cached_property
    def groups(self) -> dict[str, list[CaseView]]:
        """State -> cases, what needs attention first."""
        found = {
            state: [case for case in self.cases if case.state == state] for state in CASE_STATES
        }
        return {state: cases for state, cases in found.items() if cases}

    @cached_property
    def runs(self) -> bool:
        """Return whether earlier runs are shown."""
        return any(case.past for case in self.cases)

    @cached_property
    def strategies(self) -> list[str]:
        return sorted({name for case in self.cases for name in case.symbols})

    @cached_property
    def states(self) -> set[str]:
        return {state for case in self.cases for state in (case.state, *case.symbols.values())}


def row_label(row: Row) -> Label:
    """Return the label of a row: of its verdict, else of the outcome of its attempts."""
    if not row.attempts:
        return LABELS["skipped"]
    if row.verdict and row.verdict != "INCONCLUSIVE":
        return label(row.verdict)
    usual = label(row.counts.most_common(1)[0][0])
    return usual if len(row.counts) == 1 else Label(usual.name, row.outcome, "warn")


def cells_of(rows: Iterable[Row], source: str = "") -> list[CellView]:
    """Group rows by cell, in their order."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[
            row.hardware.profile, row.stack.label, row.stack.name, row.evidence or row.cell_id
        ].append(row)
    return [CellView(tuple(members), source) for members in found.values()]


def build_page(found: Results) -> Page:
    """Build the page of loaded results."""
    head = found.headline
    runs = [*found.past, make_run("these results", head.rows)] if found.past else []
    by_case: dict[str, list[CellView]] = defaultdict(list)
    for cell in found.cells:
        by_case[cell.row.case].append(cell)
    views = [_case_view(found, status, by_case[status.case], runs) for status in head.cases]
    views.sort(key=lambda view: list(CASE_STATES).index(view.state))
    folders = [folder.resolve() for folder in found.folders]
    beside = found.target is not None and folders == [found.target.resolve().parent]
    return Page(found.title, found.created, head, tuple(views), tuple(found.remarks.all), beside)


def _case_view(
    found: Results, status: CaseStatus, cells: Sequence[CellView], runs: Sequence[NightlyRun]
) -> CaseView:
    """Return what is shown of one case.

    ``cells``: its own, at least one. ``runs``: earlier runs and this one, the oldest first.
    """
    case = found.catalog.cases[status.case]
    ordered = sorted(cells, key=lambda cell: (cell.row.model, cell.row.strategy))
    ordered = sorted(ordered, key=lambda cell: age(cell.row), reverse=True)
    varying = [len(set(values)) > 1 for values in zip(*(cell.place for cell in cells))]
    places = {
        cell: (
            " ".join(part for part, varies in zip(cell.place, varying) if varies and part)
            or cell.row.stack.name
        )
        for cell in ordered
    }
    news = tuple(each for each in found.headline.attention if each.row.case == status.case)
    symbols = _symbols(ordered, case)
    symbols |= dict.fromkeys(
        (row.strategy for each in news for row in each.rows if each.urgent), "attention"
    )
    variants: dict[str, list[VariantView]] = defaultdict(list)
    for view in _variants(ordered, places):
        fails = bool(view.results) and all(
            one.name in ("NOT_FIXED", "DIFFERENT_FAILURE") for one, _, _ in view.results
        )
        variants["non_fix" if view.role == "fix" and fails else view.role].append(view)
    failures = tuple(_failures(ordered))
    ordered.sort(key=lambda cell: all(row.state != "unexpected" for row in cell.rows))
    return CaseView(
        status,
        case.summary,
        symptom(failures[0].row if failures else None, case),
        tuple(map(link, case.references)),
        tuple(ordered),
        places,
        symbols,
        variants,
        failures,
        tuple(each for each in found.claims if each.case == status.case),
        news,
        tuple(_past(status.case, runs)),
    )


def _symbols(cells: Sequence[CellView], case: Case) -> dict[str, str]:
    """Return strategy -> state on the newest stack.

    The state is that of its cells, else of the variants that another strategy's cells run under it.
    ``cells``: the newest first.
    """
    newest = [cell for cell in cells if age(cell.row) == age(cells[0].row)]
    rows: dict[str, list[Row]] = defaultdict(list)
    for cell in newest:
        rows[cell.row.strategy] += cell.rows
    found: dict[str, str] = dict.fromkeys((cell.row.strategy for cell in cells), "not_measured")
    found |= {name: case_status(members, case).state for name, members in rows.items()}
    for row in (row for cell in newest for row in cell.rows if row.measured):
        name, state = (
            row.settings.get("strategy", {}).get("slug", row.strategy),
            SHOWN.get(row.verdict or ""),
        )
        if state and name not in rows:
            found[name] = min(found.get(name, state), state, key=list(CASE_STATES).index)
    return found


def _variants(cells: Iterable[CellView], places: Mapping[CellView, str]) -> Iterator[VariantView]:
    found: dict[str, list[tuple[CellView, Row]]] = defaultdict(list)
    for cell in cells:
        for row in cell.rows[1:]:
            found[row.variant].append((cell, row))
    for name, members in found.items():
        decided = [
            (cell, row)
            for cell, row in members
            if row.state == "unexpected" or (row.verdict or "skipped") not in ABSENT
        ]
        results: dict[Label, list[str]] = defaultdict(list)
        for cell, row in decided or members:
            one = row_label(row)
            tone, text = "none", one.text
            if one.name == "FIXED":
                tone, text = "good", "works" if row.role == "fix" else "passes"
            if row.state == "unexpected":
                tone, text = "bad", f"{ATTENTION[describe_kind(row)].lower()}: {text}"
            results[replace(one, tone=tone, text=text)].append(places[cell])
        cell, row = (decided or members)[0]
        ordered = sorted(results.items(), key=lambda item: -len(item[1]))
        changes = tuple(_changes(cell.row, row))
        yield VariantView(
            name,
            row.help,
            row.role,
            changes,
            tuple((one, len(where), tuple(dict.fromkeys(where))) for one, where in ordered),
        )


def _changes(first: Row, row: Row) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting in which a variant differs from the first one, before and after."""

    def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
        strategy = settings.get("strategy", {})
        found = {f"flags.{name}": value for name, value in settings.get("flags", {}).items()}
        found |= {f"options.{name}": value for name, value in strategy.get("options", {}).items()}
        found |= {name: settings.get(name) for name in ("world_size", "tp_size", "steps", "seed")}
        return found | {
            "model": settings.get("model", {}).get("slug"),
            "strategy": strategy.get("slug"),
        }

    before, after = flat(first.settings), flat(row.settings)
    if row.own_stack:
        before["stack"], after["stack"] = first.stack.name, row.own_stack
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _failures(cells: Iterable[CellView]) -> Iterator[FailureView]:
    """Yield the distinct failures, that of an unfixed variant that reproduces first."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    rows = [row for cell in cells for row in cell.rows]
    for row in sorted(rows, key=lambda row: (not row.first, not row.counts["reproduced"])):
        if row.attempts and row.counts["passed"] < len(row.attempts):
            error = next((error for error in row.errors if error["type"]), None)
            text = error["message"] if error else row.reason
            found[error["type"] if error else "", comparable_text(text)].append(row)
    for members in list(found.values())[:MOST_ERRORS]:
        yield FailureView(
            members[0], tuple(dict.fromkeys(row.variant for row in members)), len(members)
        )


def symptom(row: Row | None, case: Case) -> str:
    """Return the known failure's text as a log has it, else a sentence. ``row``: a measured one."""
    if not case.signatures:  # a control
        return ""
    if row and not (row.first and row.counts["reproduced"]):
        row = None
    attempts, errors = (row.attempts, row.errors) if row else ((), ())
    names = {name.partition("/")[2] for each in attempts for name in each.failures}
    known = min(case.signatures, key=lambda one: one.name not in names)
    error = next((each for each in errors if each["type"]), None)
    if error and known.kind == "exception":
        text = error["message"]
        if len(text) >= MESSAGE:  # to the end of a sentence or line
            text = text[: 1 + max(text.rfind(". "), text.rfind("\n"))].rstrip() + " ..."
        return f"{error['type']}: {text}"
    died = [each["log"] for each in errors if "terminate called" in each["log"]]
    if died and known.kind == "signal":
        return died[0][died[0].index("terminate called") :]
    measured = row.reason.partition(" on ")[2] or row.reason if row else ""
    if known.kind in ("check", "hang"):
        waits = ", the ranks wait for each other" if known.kind == "hang" else ""
        seen = f"\nMeasured: {measured}" if measured else ""
        return f"No error is raised{waits}. {case.title}.{seen}"
    if measured:
        return measured
    text = f"a rank dies of {known.signal}" if known.signal else _example(known.message or "")
    return ": ".join(filter(None, (known.type, text)))


def _example(pattern: str) -> str:
    """Return a text like those that a regular expression of a signature matches."""
    first = re.sub(r"\((?:\?:)?([^()|]*)\|[^()]*\)", r"\1", pattern)
    plain = re.sub(r"(?:\\[dwS]|\.)[+*]\??", "…", first)
    return re.sub(r"\\(?=\W)", "", re.sub(r"(?<=\w) \?", "", plain))


def _past(case: str, runs: Sequence[NightlyRun]) -> Iterator[tuple[str, str]]:
    """Yield the id and the state of the newest runs: "" where the case was not measured."""
    for run in runs[-MOST_RUNS:]:
        rows = [row for row in run.rows if row.case == case and row.kinds]
        kinds = {kind for row in rows if row.first for kind in row.kinds}
        state = "absent" if kinds else ""
        if any(row.state == "unexpected" for row in rows):
            state = "attention"
        elif any(row.kind == "control" for row in rows):
            state = "passes"
        elif "reproduced" in kinds:
            state = "reproduces"
        yield run.run_id, state


def link(reference: str) -> tuple[str, str]:
    """Return a reference with its address, which is "" unless it reads owner/repository#number."""
    found = _ISSUE.fullmatch(reference)
    return reference, f"https://github.com/{found[1]}/issues/{found[2]}" if found else ""
