"""The same results for other programs: JUnit XML, Markdown, JSON and CSV. Pure: cells -> text."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from repro_matrix.analysis.claims import ClaimRow
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.report.labels import Label, count_labels, label
from repro_matrix.report.page_model import Cell, row_label
from repro_matrix.results.summary import Row
from repro_matrix.text import block, counted, line

SCHEMA = 1
MOST = 65_000  # bytes of Markdown: what a comment or a job's summary takes
PACKAGES = ("python", *UPSTREAM, "numpy")  # a column each in a table


@dataclass(frozen=True)
class Remarks:
    """What a report must say beside its rows. ``damaged``: evidence that cannot be read; ``incomplete``: runs that were
    interrupted and cases that cannot be graded; ``expired``: entries of the quarantine whose date has passed;
    ``notes``: everything else."""

    damaged: Sequence[str] = ()
    incomplete: Sequence[str] = ()
    expired: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def all(self) -> list[str]:
        return [*self.expired, *self.incomplete, *self.damaged, *self.notes]


NO_REMARKS = Remarks()


# Rows as records


def record(cell: Cell, row: Row) -> dict[str, Any]:
    """Return a variant with stable keys; results/schema/report-v1.schema.json describes them."""
    attempts = row.counts
    return {
        "results": cell.source, "case": row.case, "kind": row.kind, "simulated": bool(row.simulated),
        "model": row.model, "strategy": row.strategy, "also": line(cell.flags), "ranks": row.ranks, "scale": row.scale,
        "weights": row.weights, "hardware": row.hardware.profile, "stack": line(row.stack.name),
        "versions": {name: row.stack.versions[name] for name in PACKAGES if name in row.stack.versions},
        "variant": row.variant, "outcome": row.outcome, "verdict": row.verdict, "expected": row.state,
        "expectation": row.expected_verdict, "attempts": len(row.attempts), "reproduced": attempts["reproduced"],
        "passed": attempts["passed"], "wall_s": row.wall_s, "reason": line(row.reason, 1000), "started": row.started,
        "commit": row.commit, "document": line(row.evidence, 400),
        "error_at": line(row.error_at, 400) if row.error_at else None, "command": shlex.join(row.command),
    }  # fmt: skip


def to_json(
    cells: Sequence[Cell],
    claims: Sequence[ClaimRow],
    folders: Sequence[str],
    created: str,
    remarks: Remarks = NO_REMARKS,
) -> str:
    """Return the rows, the claims and the remarks as JSON."""
    value = {
        "schema": SCHEMA,
        "made": created,
        "results": list(folders),
        "counts": dict(Counter(one.name for cell in cells for one in cell.labels).most_common()),
        "rows": [record(cell, row) for cell in cells for row in cell.rows],
        "claims": [
            {"case": one.case, "id": one.id, "text": one.text, "source": one.source, "status": one.status,
             "detail": line(one.detail, 1000), "measurements": len(one.evidence)}
            for one in claims
        ],
        "unread": [line(text, 1000) for text in remarks.damaged],
        "notes": [line(text, 1000) for text in remarks.all],
    }  # fmt: skip
    return json.dumps(value, indent=1) + "\n"


def to_csv(cells: Sequence[Cell]) -> str:
    """Return a line for each variant, with a column for each package. Text that a spreadsheet would compute begins with
    an apostrophe."""
    records = [record(cell, row) for cell in cells for row in cell.rows]
    for one in records:
        versions = one.pop("versions")
        one |= {name: versions.get(name) for name in PACKAGES}
    out = io.StringIO()
    if records:
        writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _no_formula(value) for key, value in one.items()} for one in records)
    return out.getvalue()


def _no_formula(value: Any) -> Any:
    """Spreadsheets compute what begins so, some also with the wide signs of East Asian keyboards."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r＝＋－＠") else value


# JUnit


def to_junit(cells: Sequence[Cell], remarks: Remarks = NO_REMARKS) -> str:
    """Return a suite for each case and a test case for each variant.

    A variant that differs from its expectation is a failure, infrastructure and evidence that cannot be read are
    errors, what was not measured or is quarantined is skipped. Remarks stand in the suite ``results``.
    """
    from junitparser import Error, JUnitXml, TestCase, TestSuite

    suites: dict[str, Any] = {}
    for cell in cells:
        suite = suites.setdefault(cell.row.case, TestSuite(cell.row.case))
        for row in cell.rows:
            suite.add_testcase(_test_case(cell, row))
    if remarks.all:
        suites["results"] = TestSuite("results")
        for number, text in enumerate((*remarks.damaged, *remarks.incomplete), 1):
            test = TestCase(f"damaged {number}", "results")
            test.result = [Error(line(text, 1000), "damaged")]
            suites["results"].add_testcase(test)
        test = TestCase("notes", "results")
        test.system_err = "\n".join(line(text, 1000) for text in remarks.all)
        suites["results"].add_testcase(test)
    xml = JUnitXml("repro-matrix")
    for suite in suites.values():
        xml.add_testsuite(suite)
    written: bytes = xml.tostring()
    return written.decode()


def _test_case(cell: Cell, row: Row) -> Any:
    from junitparser import Error, Failure, Skipped, TestCase

    name = f"{row.model}/{row.strategy} {cell.flags}".strip()
    group = f"{row.hardware.profile}.{line(row.stack.name)}.{row.case}"
    test = TestCase(f"{line(name)} {row.variant}", group, row.wall_s or 0.0)
    verdict = row_label(row).name
    reason = line(row.reason, 1000)
    result: Any = None
    if not row.attempts:
        result = Skipped(reason)
    elif row.state == "quarantined":
        result = Skipped(line(f"quarantined: {row.quarantine} (measured {verdict}: {row.reason})", 1000))
    elif row.state == "unexpected":
        expected = row.expected_verdict or ("PASSED" if row.kind == "control" else "another result")
        result = Failure(f"expected {expected}, measured {verdict}: {reason}", verdict)
    elif row.no_evidence:
        result = Error(reason, verdict)
    if result is not None:
        if row.attempts and not isinstance(result, Skipped):
            errors = [_error_text(row, index) for index in range(len(row.errors))]
            result.text = "\n\n".join([*errors, block(shlex.join(row.command))])
        test.result = [result]
    checks = [
        f"{line(one.name)}: {one.state}, actual {one.actual}, expected {one.expected}"
        + (f", tolerance {one.tolerance}" if one.tolerance is not None else "")
        for one in row.checks
    ]
    out = [f"verdict: {verdict}", f"compared: {row.state or 'no expectation applies'}", f"reason: {reason}",
           f"attempts: {row.outcome}", *checks, f"evidence: {row.evidence}",
           f"command: {shlex.join(row.command)}"]  # fmt: skip
    test.system_out = "\n".join(block(text) for text in out)
    return test


def _error_text(row: Row, index: int) -> str:
    error = row.errors[index]
    head = f"ranks {', '.join(map(str, error.ranks))}: {error.ended}"
    return block(
        "\n".join(filter(None, (head, f"{error.type}: {error.message}" if error.type else "", error.log))), 4000
    )


# Markdown


def to_markdown(
    cells: Sequence[Cell], title: str = "repro-matrix", link: str = "", remarks: Remarks = NO_REMARKS
) -> str:
    """Return a summary for a job or a comment, what needs attention first, of at most ``MOST`` bytes. ``link``: the
    address of the page."""
    out = _Limited(MOST - 200)
    rows = [(cell, row) for cell in cells for row in cell.rows]
    by_state = {
        name: [item for item in rows if item[1].state == name]
        for name in ("unexpected", "differs_from_cpu", "quarantined")
    }
    new = [item for item in rows if item[1].state == "no_expectation" and item[1].attempts]
    out.add(f"## {escape(title)}\n")
    out.list([f"**{escape(text)}**\n" for text in (*remarks.incomplete, *remarks.expired)], "more")
    if remarks.damaged:
        out.add(f"**{counted(len(remarks.damaged), 'file')} of evidence cannot be read.**\n")
        out.list([f"- {escape(text)}\n" for text in remarks.damaged], "more")
    odd = len(by_state["unexpected"])
    if not cells:
        headline = "Nothing was measured: these results hold no cell."
    elif odd:
        differ = "variant differs from its expectation" if odd == 1 else "variants differ from their expectation"
        headline = f"**{odd} {differ}.**"
    else:
        headline = "Nothing differs from its expectation."
    out.add(f"{headline} {_numbers(cells)}\n")
    if link:
        out.add(f"[The page]({link})\n")
    for state, heading in (
        ("unexpected", "Differs from its expectation"),
        ("differs_from_cpu", "Differs from the CPU"),
    ):
        if by_state[state]:
            out.add(f"### {heading}\n")
            out.list([_details(*item) for item in by_state[state]], "more variants")
    if by_state["quarantined"]:
        out.add("### Quarantined\n")
        out.list([f"{_bullet(*item)}; {escape(item[1].quarantine or '')}" for item in by_state["quarantined"]], "more")
    if new:
        out.add("### No expectation yet\n")
        out.list([_bullet(*item) for item in new], "more")
    if cells:
        out.add("### Cases\n\n| case | cells | variants |\n|---|---|---|")
        by_case: dict[str, list[Cell]] = {}
        for cell in cells:
            by_case.setdefault(cell.row.case, []).append(cell)
        lines = [f"| {escape(case)} | {len(members)} | {_numbers(members)} |" for case, members in by_case.items()]
        out.list(lines, "more cases", "\n")
    missing = Counter(row.reason for _, row in rows if not row.attempts)
    if missing:
        out.add("\n\n### Not measured\n")
        out.list([f"- {count}: {code(reason)}" for reason, count in missing.most_common()], "more reasons")
    return out.text


class _Limited:
    """Text of a limited size: what does not fit is counted."""

    def __init__(self, most: int) -> None:
        self.text = ""
        self._left = most

    def add(self, part: str) -> bool:
        """Add a part if it fits. A heading stands apart from a list before it."""
        part = "\n" + part if part.startswith("#") and self.text and not self.text.endswith("\n\n") else part
        size = len(part.encode(errors="surrogatepass")) + 1
        if size > self._left:
            return False
        self._left -= size
        self.text += part + "\n"
        return True

    def list(self, parts: Sequence[str], rest: str, before: str = "") -> None:
        """Add parts to at most half of what is left, so that what follows fits too."""
        if not parts:
            return
        self.text = self.text.rstrip("\n") + "\n" + ("" if before else "\n")
        reserve, self._left = self._left - self._left // 2, self._left // 2
        for index, part in enumerate(parts):
            if not self.add(part):
                self._left += reserve
                self.add(f"{before}… and {len(parts) - index} {rest}\n")
                return
        self._left += reserve


def _numbers(cells: Iterable[Cell]) -> str:
    return ", ".join(
        f"{one.symbol} {one.count(n)}" for one, n in count_labels(one for cell in cells for one in cell.labels)
    )


def _bullet(cell: Cell, row: Row) -> str:
    place = " ".join(filter(None, (f"{row.model}/{row.strategy}", cell.flags)))
    where = f"({escape(row.hardware.profile)}, {escape(row.stack.name)})"
    return f"- **{escape(row.case)}** {escape(place)}, variant {escape(row.variant)} {where}: {_mark(row_label(row))}"


def _mark(one: Label) -> str:
    return f"{one.symbol} {one.text}"


def _details(cell: Cell, row: Row) -> str:
    expected = f"; expected {_mark(label(row.expected_verdict))}" if row.expected_verdict else ""
    parts = [f"{_bullet(cell, row)}{expected}\n", f"  {code(row.reason)}\n"]
    if row.errors:
        text = block(_error_text(row, 0), 800)
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
        parts.append("\n".join(f"  {one}" for one in (fence, *text.splitlines(), fence)) + "\n")
    return "\n".join([*parts, f"  {code(shlex.join(row.command))}\n"])


def code(text: str) -> str:
    """Return a text as code, in which nothing is markup, a mention or a link."""
    return f"`{line(text, 500).replace('`', chr(39)).replace('|', chr(0xA6))}`" if text else ""


def escape(text: str) -> str:
    """Return a text in which nothing is Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|~#@!&])", r"\\\1", line(text, 200))
