"""The same results for other programs: JUnit XML, Markdown, JSON (tables: page/tables.py). Pure: cells -> text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from repro_matrix.analysis.claims.ledger import ClaimRow
from repro_matrix.report.icons import MARKS
from repro_matrix.report.sanitize import harmless, line
from repro_matrix.report.tables import arm_rows
from repro_matrix.report.view import ArmView, Cell

SCHEMA = 1
MOST = 65_000  # bytes of Markdown: what a comment or a job's summary takes
ODD = ("unexpected", "differs from cpu")


def as_json(
    cells: Sequence[Cell],
    ledger: Sequence[ClaimRow],
    sources: Sequence[str],
    made: str,
    unjudged: Mapping[str, str] = MappingProxyType({}),
    notes: Sequence[str] = (),
    unread: Sequence[str] = (),
) -> str:
    """By results/schema/report-v1.schema.json. ``unjudged``: case -> why none of its documents is judged. ``notes``:
    what was left out of the results, or says another thing than it shows; ``unread``: documents that cannot be read."""
    rows = list(arm_rows(cells))
    claims = [
        {"case": row.case, "id": row.id, "text": row.text, "source": row.source, "status": row.status,
         "detail": line(row.detail, 1000), "measurements": len(row.evidence)}
        for row in ledger
    ]  # fmt: skip
    counts = Counter(arm.mark.name for cell in cells for arm in cell.arms)
    value = {"schema": SCHEMA, "made": made, "results": list(sources), "counts": dict(counts.most_common()),
             "rows": rows, "claims": claims,
             "unjudged": [{"case": case, "reason": reason} for case, reason in unjudged.items()],
             "unread": [line(note, 1000) for note in unread],
             "notes": [line(note, 1000) for note in notes]}  # fmt: skip
    return json.dumps(value, indent=1) + "\n"


def as_junit(
    cells: Sequence[Cell],
    unjudged: Mapping[str, str] = MappingProxyType({}),
    notes: Sequence[str] = (),
    damaged: Sequence[str] = (),
) -> str:
    """A suite for each case, a test case for each arm: unexpected is a failure, infrastructure an error, and so is a
    case that nobody can judge (``unjudged``: case -> why), and evidence that cannot be read (``damaged``). ``notes``
    stand in the output of the suite ``results``."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    suites: dict[str, Any] = {}
    for cell in cells:
        suite = suites.setdefault(cell.case, TestSuite(cell.case))
        for arm, row in zip(cell.arms, cell.rows):
            where = " ".join(filter(None, (f"{cell.model}/{cell.strategy}", cell.also)))
            test = TestCase(f"{where} {arm.name}", f"{cell.hardware}.{cell.stack}.{cell.case}", row["wall_s"] or 0.0)
            found = _junit_result(cell, arm)
            if found:
                kind = {"failure": Failure, "error": Error, "skipped": Skipped}[found[0]]
                result = kind(found[1], None if found[0] == "skipped" else arm.mark.name)
                if found[2]:
                    result.text = found[2]
                test.result = [result]
            said = [f"verdict: {arm.mark.name}", f"compared: {row['expected'] or 'nothing is expected of it'}"]
            said += [f"reason: {arm.reason}", f"numbers: {arm.counts}; {arm.numbers}"]
            said += [", ".join(filter(None, (
                f"{proof.name}: {proof.state}", f"got {proof.got}", f"want {proof.want}",
                proof.tolerance and f"tolerance {proof.tolerance}")))
                for proof in arm.proofs]  # fmt: skip
            test.system_out = "\n".join([*said, f"document: {cell.path}", f"command: {arm.command}"])
            suite.add_testcase(test)
    for case, reason in unjudged.items():
        test = TestCase("judged", case)
        test.result = [Error(reason, "unjudged")]
        suites[case] = TestSuite(case)
        suites[case].add_testcase(test)
    if notes or damaged:
        suites["results"] = TestSuite("results")
        for number, told in enumerate(damaged, 1):
            test = TestCase(f"damaged {number}", "results")
            test.result = [Error(line(told, 1000), "damaged")]
            suites["results"].add_testcase(test)
        test = TestCase("notes", "results")
        test.system_err = "\n".join(line(note, 1000) for note in notes)
        suites["results"].add_testcase(test)
    xml = JUnitXml("repro-matrix")
    for suite in suites.values():
        xml.add_testsuite(suite)
    written: bytes = xml.tostring()
    return written.decode()


def _junit_result(cell: Cell, arm: ArmView) -> tuple[str, str, str] | None:
    """(kind, message, text)"""
    if not arm.attempts:
        return "skipped", arm.reason, ""
    text = "\n\n".join(filter(None, (*(f"rank {s.ranks}: {s.how}\n{s.type}: {s.message}\n{s.log}" for s in arm.said),
                                     arm.command)))  # fmt: skip
    if arm.muted:
        return "skipped", f"{arm.muted} (measured {arm.mark.name}: {arm.reason})", ""
    if arm.expected and arm.expected.name == "unexpected":
        wanted = arm.expectation.name if arm.expectation else "HEALTHY" if cell.kind == "control" else "something else"
        return "failure", f"expected {wanted}, measured {arm.mark.name}: {arm.reason}", text
    if arm.infra:
        return "error", arm.reason, text
    return None


def as_markdown(
    cells: Sequence[Cell],
    title: str = "repro-matrix",
    link: str = "",
    unjudged: Mapping[str, str] = MappingProxyType({}),
    unfinished: Sequence[str] = (),
    expired: Sequence[str] = (),
    unread: Sequence[str] = (),
) -> str:
    """For a job's summary or a comment: what changed first, always under ``MOST`` bytes. ``link``: to the page.
    ``unjudged``: case -> why none of its documents is judged. ``unfinished``: runs that did not get to their end.
    ``expired``: mutes whose day is over. ``unread``: documents that cannot be read."""
    out = _Short(MOST - 200)
    found = [(cell, arm) for cell in cells for arm in cell.arms]
    odd = {state: [item for item in found if item[1].expected == MARKS[state]] for state in (*ODD, "unset")}
    out.add(f"## {plain(title)}\n")
    worst = len(odd["unexpected"])
    differ = (
        f"**{worst} arms differ from what is expected.**" if worst > 1 else "**One arm differs from what is expected.**"
    )
    if unjudged or unfinished or unread:
        nothing = "Of what was measured nothing differs from what is expected." if cells else "No other cell is here."
    elif cells:
        nothing = "Nothing differs from what is expected."
    else:
        nothing = "Nothing was measured: these results hold no cell."
    out.each([f"**{plain(text)}**\n" for text in (*unfinished, *expired)], "more")
    if unread:
        many = "documents" if len(unread) > 1 else "document"
        out.add(f"**Of {len(unread)} {many} nothing can be said: cannot be read.**\n")
        out.each([f"- {plain(told)}\n" for told in unread], "more")
    if unjudged:
        out.add(f"**Nothing can be said of {', '.join(map(plain, list(unjudged)[:8]))}.**\n")
        out.each([f"- {plain(reason)}" for reason in unjudged.values()], "more")
    out.add(f"{differ if worst else nothing} {_tally(cells)}\n")
    if link:
        out.add(f"[The whole page]({link})\n")
    for state, heading in (
        ("unexpected", "Differs from what is expected"),
        ("differs from cpu", "News: differs from what a CPU showed"),
    ):
        if odd[state]:
            out.add(f"### {heading}\n")
            out.each([_detail(cell, arm) for cell, arm in odd[state]], "more such arms")
    muted = [(cell, arm) for cell, arm in found if arm.muted]
    if muted:
        out.add("### Muted: known, and owned\n")
        out.each([f"- {_place(cell, arm)}: {arm.mark.symbol} {arm.mark.name}; {plain(arm.muted)}"
                  for cell, arm in muted], "more")  # fmt: skip
    if odd["unset"]:
        out.add("### New: nothing is expected of them yet\n")
        out.each([f"- {_place(cell, arm)}: {arm.mark.symbol} {arm.mark.name}" for cell, arm in odd["unset"]], "more")
    if cells:
        out.add("### Cases\n\n| case | cells | arms |\n|---|---|---|")
        by_case: dict[str, list[Cell]] = {}
        for cell in cells:
            by_case.setdefault(cell.case, []).append(cell)
        out.each(
            [f"| {plain(case)} | {len(own)} | {_tally(own)} |" for case, own in by_case.items()], "more cases", "\n"
        )
    missing = Counter(arm.reason for _, arm in found if not arm.attempts)
    if missing:
        out.add("\n\n### Not measured\n")
        out.each([f"- {count}: {code(reason)}" for reason, count in missing.most_common()], "more reasons")
    return out.text


class _Short:
    """Text that stays under a size: what does not fit is counted."""

    def __init__(self, most: int) -> None:
        self.text = ""
        self._left = most

    def add(self, part: str) -> bool:
        """A heading stands apart from a list before it."""
        part = "\n" + part if part.startswith("#") and self.text and not self.text.endswith("\n\n") else part
        size = len(part.encode(errors="surrogatepass")) + 1
        if size > self._left:
            return False
        self._left -= size
        self.text += part + "\n"
        return True

    def each(self, parts: Sequence[str], rest: str, before: str = "") -> None:
        """Of a long list no more than half of what is left, so that what follows is seen, too."""
        self.text = self.text.rstrip("\n") + "\n" + ("" if before else "\n")
        keep, self._left = self._left - self._left // 2, self._left // 2
        for index, part in enumerate(parts):
            if not self.add(part):
                self._left += keep
                self.add(f"{before}… and {len(parts) - index} {rest}\n")
                return
        self._left += keep


def _tally(cells: Iterable[Cell]) -> str:
    counts = Counter(arm.mark for cell in cells for arm in cell.arms)
    return ", ".join(f"{mark.symbol} {mark.counted(count)}" for mark, count in counts.most_common())


def _place(cell: Cell, arm: ArmView) -> str:
    where = " ".join(filter(None, (f"{cell.model}/{cell.strategy}", cell.also)))
    on = f"({plain(cell.hardware)}, {plain(cell.stack)})"
    return f"**{plain(cell.case)}** {plain(where)}, arm {plain(arm.name)} {on}"


def _detail(cell: Cell, arm: ArmView) -> str:
    wanted = f"expected {arm.expectation.name}, " if arm.expectation else ""
    parts = [f"- {_place(cell, arm)}: {wanted}measured {arm.mark.symbol} {arm.mark.name}\n"]
    parts.append(f"  {code(arm.reason)}\n")
    for said in arm.said[:1]:
        shown = harmless("\n".join(filter(None, (f"{said.type}: {said.message}" if said.type else "", said.log))), 800)
        fence = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=2) + 1)
        parts.append(
            "\n".join(
                "  " + text
                for text in [
                    fence if len(fence) > 2 else "```",
                    *shown.splitlines(),
                    fence if len(fence) > 2 else "```",
                ]
            )
            + "\n"
        )
    parts.append(f"  {code(arm.command)}\n")
    return "\n".join(parts)


def code(text: str) -> str:
    """In code nothing is a mark, a mention or a link."""
    return f"`{line(text, 500).replace('`', chr(39)).replace('|', chr(0xA6))}`" if text else ""


def plain(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|~#@!&])", r"\\\1", line(text, 200))
