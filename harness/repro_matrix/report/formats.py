"""Write results in the formats of `repro report`, and as an issue of a nightly run.

To add a format, write a function that takes ``Results`` and returns text, and list it in
``FORMATS``, or in an entry point of the group ``repro_matrix.report_formats``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from repro_matrix.baseline.derivation import is_unanswered
from repro_matrix.changes.diff import KINDS, Change, describe_row
from repro_matrix.changes.regressions import ChangedCase
from repro_matrix.errors import unknown
from repro_matrix.records.outcome import NOT_GREEN
from repro_matrix.report.attention import NOTHING
from repro_matrix.report.load import Results
from repro_matrix.report.page_model import CellView, build_page, row_label
from repro_matrix.report.result_lines import detail_lines, result_lines
from repro_matrix.report.terminal import columns
from repro_matrix.results.rows import Row
from repro_matrix.text import block, counted, line, list_some

SCHEMA = 1
MOST = 60_000  # bytes of Markdown: GitHub takes 65,536 for an issue or a comment
MOST_LISTED = 40  # items of a list


# Another distribution adds a format by an entry point of this group: a function that takes Results.
GROUP = "repro_matrix.report_formats"


# Rows as records


def variant_record(cell: CellView, row: Row) -> dict[str, Any]:
    """Return a variant with stable keys; results/schema/report-v1.schema.json describes them."""
    attempts = row.counts
    return {
        "results": cell.source,
        "case": row.case,
        "kind": row.kind,
        "simulated": bool(row.simulated),
        "model": row.model,
        "strategy": row.strategy,
        "also": line(cell.flags),
        "ranks": row.ranks,
        "scale": row.scale,
        "weights": row.weights,
        "hardware": row.hardware.profile,
        "stack": line(row.stack.name),
        "versions": dict(row.stack.versions),
        "variant": row.variant,
        "outcome": row.outcome,
        "verdict": row.verdict,
        "expected": row.state,
        "expectation": row.expected_verdict,
        "nearest": list(row.nearest),
        "beyond": row.beyond,
        "attempts": len(row.attempts),
        "reproduced": attempts["reproduced"],
        "passed": attempts["passed"],
        "wall_s": row.wall_s,
        "reason": line(row.reason, 1000),
        "started": row.started,
        "commit": row.commit,
        "document": line(row.evidence, 400),
        "job": dict(row.job) or None,
        "error_at": line(row.error_at, 400) if row.error_at else None,
        "command": shlex.join(row.command),
    }


def report_to_json(found: Results) -> str:
    """Return the headline, the rows, the claims and the remarks as JSON."""
    rows = [(cell, row) for cell in found.cells for row in cell.rows]
    claims = [
        {
            "case": one.case,
            "id": one.id,
            "text": one.text,
            "source": one.source,
            "status": one.status,
            "detail": line(one.detail, 1000),
            "measurements": len(one.evidence),
        }
        for one in found.claims
    ]
    value = {
        "schema": SCHEMA,
        "made": found.created,
        "results": [str(folder) for folder in found.folders],
        "headline": found.headline.to_json(),
        "counts": dict(Counter(row_label(row).name for _, row in rows).most_common()),
        "rows": [variant_record(cell, row) for cell, row in rows],
        "claims": claims,
        "unread": [line(text, 1000) for text in found.remarks.damaged],
        "notes": [line(text, 1000) for text in found.remarks.all],
    }
    return json.dumps(value, indent=1) + "\n"


# JUnit


def to_junit(found: Results) -> str:
    """Return a suite for each case and a test case for each variant.

    A variant that differs from its expectation is a failure. A documented fix that fails without an
    expectation, infrastructure and evidence that cannot be read are errors. What was not measured
    or is quarantined is skipped. The suite ``headline`` has its sentences. The suite ``results``
    has an error for each damaged file and each interrupted run.
    """
    from junitparser import Error, JUnitXml, TestCase, TestSuite

    summary = TestSuite("headline")
    summary.add_property("headline", line(" ".join(found.headline.sentences), 2000))
    suites: dict[str, Any] = {"": summary}
    for cell in found.cells:
        suite = suites.setdefault(cell.row.case, TestSuite(cell.row.case))
        for row in cell.rows:
            suite.add_testcase(_test_case(cell, row))
    for number, text in enumerate((*found.remarks.damaged, *found.remarks.incomplete), 1):
        test = TestCase(f"damaged {number}", "results")
        test.result = [Error(line(text, 1000), "damaged")]
        suites.setdefault("results", TestSuite("results")).add_testcase(test)
    xml = JUnitXml("repro-matrix")
    for suite in suites.values():
        xml.add_testsuite(suite)
    written: bytes = xml.tostring()
    return written.decode()


def _test_case(cell: CellView, row: Row) -> Any:
    from junitparser import Error, Failure, Skipped, TestCase

    name = f"{row.model}/{row.strategy} {cell.flags}".strip()
    group = f"{row.hardware.profile}.{line(row.stack.name)}.{row.case}"
    test = TestCase(f"{line(name)} {row.variant}", group, row.wall_s or 0.0)
    verdict, command = row_label(row).name, shlex.join(row.command)
    reason = line(row.reason, 1000)
    if not row.attempts:
        reason = reason or "the run ended before its first attempt did"
        test.result = [Skipped(reason)]
    elif row.state == "quarantined":
        text = f"quarantined: {row.quarantine} (measured {verdict}: {row.reason})"
        test.result = [Skipped(line(text, 1000))]
    elif row.state in NOT_GREEN or row.no_evidence or is_unanswered(row):
        text = line(f"{row.difference}: {row.reason}", 1000) if row.state in NOT_GREEN else reason
        test.result = [(Failure if row.state == "unexpected" else Error)(text, verdict)]
        test.result[0].text = "\n\n".join([*map(_error_text, row.errors), block(command)])
    note = f" ({row.note})" if row.note else ""
    out = [
        f"verdict: {verdict}",
        f"compared: {row.state or 'no_expectation'}{note}",
        f"reason: {reason}",
        f"attempts: {row.outcome}",
        f"evidence: {row.evidence}",
        *([f"job: {row.job_text}"] if row.job else []),
        f"command: {command}",
    ]
    test.system_out = "\n".join(map(block, out))
    return test


def _error_text(error: Mapping[str, Any]) -> str:
    parts = [f"ranks {', '.join(map(str, error['ranks']))}: {error['ended']}"]
    if error["type"]:
        parts.append(f"{error['type']}: {error['message']}")
    parts.append(error["log"])
    return block("\n".join(filter(None, parts)), 4000)


# Markdown


def to_markdown(found: Results) -> str:
    """Return a summary for a job or a comment, of at most ``MOST`` bytes."""
    head, remarks = found.headline, found.remarks
    texts = (*remarks.incomplete, *remarks.expired, *remarks.damaged)
    answers = [
        f"- **{name}:** {escape(' '.join(fact.text for fact in facts), 2000)}"
        for name, facts in head.answers.items()
    ]
    out = [
        f"## {escape(found.title)}",
        list_some([f"- **{escape(text)}**" for text in texts], MOST_LISTED, "\n"),
        "\n".join(answers),
    ]
    text = "\n".join(detail_lines(head)).strip("\n")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    out += [f"{fence}\n{text}\n{fence}"] if text else []
    return _limited("\n\n".join(filter(None, out)) + "\n")


def _limited(text: str) -> str:
    short = text.encode(errors="replace")[:MOST].decode(errors="ignore")
    return text if len(short) >= len(text) else f"{short}\n\n(truncated)\n"


def code(text: str) -> str:
    """Return a text as code, in which nothing is markup, a mention or a link."""
    return f"`{line(text, 500).replace('`', chr(39)).replace('|', chr(0xA6))}`" if text else ""


def escape(text: str, most: int = 200) -> str:
    """Return a text in which nothing is Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|~#@!&])", r"\\\1", line(text, most))


# The registry


def to_html(found: Results) -> str:
    """Return the page."""
    from repro_matrix.report.page import render_file  # imports Jinja

    return render_file(build_page(found))


def to_text(found: Results) -> str:
    """Return all lines for a terminal."""
    lines = result_lines(found.headline, columns(), everything=True)
    return "\n".join([*found.remarks.all, *lines]) + "\n"


Format = Callable[[Results], str]
FORMATS: dict[str, Format] = {
    "html": to_html,
    "text": to_text,
    "junit": to_junit,
    "markdown": to_markdown,
    "json": report_to_json,
}


def find_format(name: str) -> Format:
    """Return a format by its name: ours, or an installed distribution's. Raises ConfigError."""
    if name in FORMATS:
        return FORMATS[name]
    others = entry_points(group=GROUP)
    if name not in others.names:
        raise unknown("format", name, [*FORMATS, *others.names], "--format")
    return others[name].load()


# Issues


def to_issue(
    changed: Sequence[ChangedCase], run_id: str, link: str, bisections: Mapping[str, str]
) -> tuple[str, str]:
    """Return the title and the Markdown of an issue about a case's changes on all stacks.

    The last line lets a closed issue acknowledge the change. ``bisections``: stack -> the report,
    or why there is none.
    """
    case = changed[0].case
    changes = sorted(
        (change for each in changed for change in each.changes),
        key=lambda c: list(KINDS).index(c.kind),
    )
    title = f"{case}: {changes[0].kind}"
    if len(changes) > 1:
        title += f" and {len(changes) - 1} more"
    count = counted(len(changes), "result")
    parts = [
        f"Nightly run {escape(run_id)}: {count} of **{escape(case)}** changed since the last"
        " passing run."
    ]
    parts += [f"[Full report]({link})"] if link else []
    for each in changed:
        parts.append(f"### Stack {escape(each.stack)}, compared with {escape(each.passing.run_id)}")
        moved = ["- " + escape(text).replace("-\\>", "->") for text in each.moved or [NOTHING]]
        parts += ["What else changed:", list_some(moved, MOST_LISTED, "\n")]
        parts.append(list_some(list(map(_change, each.changes)), MOST_LISTED, "\n"))
        working = ", ".join(map(escape, each.working_fixes)) or "none"
        parts.append(f"Fixes that still work in every measured cell: {working}.")
        if each.stack in bisections:
            parts += ["#### Bisection", bisections[each.stack]]
        parts.append(f"Reproduce: {code(shlex.join(each.changes[0].row.command))}")
    digests = " change=".join(each.digest for each in changed)
    body = _limited("\n\n".join(parts))
    return title, f"# {title}\n\n{body}\n\n<!-- repro-matrix change={digests} -->\n"


def _change(change: Change) -> str:
    row = change.row
    return (
        f"- {escape(' '.join(row.axes))} on {escape(row.hardware.profile)}, variant"
        f" **{escape(change.variant)}**: {change.kind} ({KINDS[change.kind]})\n  - before:"
        f" {code(describe_row(change.before))}\n  - now: {code(describe_row(change.after))}"
    )
