"""What a run of many cells says at its end, the important first: what differs, what is new, a line per case, what was
not measured and why, and the exit code. Pure: documents and rows -> lines of at most ``WIDTH`` columns.

Modelled on pytest's short summary: every variant of every cell is in the documents, and printed with ``--all``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from repro_matrix.results import identical_failures as alike
from repro_matrix.results import unpaired as alone
from repro_matrix.results.rows import Row, again, where_of
from repro_matrix.text import WIDTH, counted, one_line, wrap

if TYPE_CHECKING:
    from repro_matrix.records.document import Document

LOG_LINES = 4
FEW = 16  # lines in which what is new is told cell by cell; of more, case by case
# A verdict in a line that counts: one, several.
WORDS = {
    "FIXED": ("fix holds", "fixes hold"),
    "NOT_FIXED": ("fix broken", "fixes broken"),
    "DIFFERENT_FAILURE": ("unmasks another failure", "unmask another failure"),
    "FIX_BREAKS": ("harmful", "harmful"),
    "NOT_REPRODUCED": ("does not reproduce", "do not reproduce"),
    "FIXED_UPSTREAM": ("fixed upstream", "fixed upstream"),
    "SIGNATURE_MISMATCH": ("fails otherwise", "fail otherwise"),
    "FLAKY": ("flaky", "flaky"),
    "INCONCLUSIVE": ("inconclusive", "inconclusive"),
    "PASSED": ("healthy", "healthy"),
    "FAILED": ("unhealthy", "unhealthy"),
}
ODD = {"unexpected": "DIFFERS from what is expected", "differs_from_cpu": "NEWS: differs from what a CPU showed"}


def lines(documents: Sequence[Document], rows: Sequence[Row], width: int = WIDTH) -> Iterator[str]:
    """All parts, each with an empty line before it. ``width``: in columns, of the narrowest place they are read in."""
    known = {(where_of(document), document["stack"]["name"]): document for document in documents}
    for kind, title in ODD.items():
        found = [row for row in rows if row["expected"] == kind]
        if found:
            yield from _title(f"{title}: {_variants(len(found))}", width)
            for same in _alike(found):
                yield from _detail(same, known.get((same[0]["params"], same[0]["stack"])), width)
    muted = [row for row in rows if row["expected"] == "muted"]
    if muted:
        yield from _title(f"MUTED, known and owned (`repro mute`): {_variants(len(muted))}", width)
        for row in muted:
            by = row["muted"] or {}
            where = f"{row['case']} {row['model']}/{row['strategy']}, variant {row['variant']}"
            told = f"{row['verdict']}: {by.get('reason')} ({by.get('owner')}, until {by.get('until')})"
            yield from wrap(f"{where}: expected {row['expectation'] or 'PASSED'}, measured {told}", "  ", 4, width)
    judged_by_nobody = alone.unshown(documents)
    if judged_by_nobody:
        told = (
            f"ANOTHER FAILURE THAN THE KNOWN ONE, of {counted(len(judged_by_nobody), 'unfixed variant')} measured alone"
        )
        yield from _title(f"{told} (compared with what is expected where a fix is measured beside it)", width)
        for document, made in judged_by_nobody:
            yield from wrap(f"{where_of(document)}: {made['outcome']['reason']}", "  ", 4, width)
    failing = alike.failing(documents)
    if failing:
        told = f"EVERY ARM FAILS ALIKE, in {counted(len(failing), 'cell')}: nothing is shown of the failure or of a fix"
        yield from _title(told, width)
        for document, made in failing:
            yield from wrap(f"{where_of(document)}: {made['outcome']['reason']}", "  ", 4, width)
    silent = [row for row in rows if _no_answer(row)]
    if silent:
        yield from _title(f"NO ANSWER: {_variants(len(silent))}", width)
        yield from _reasons(silent, width)
    new = [
        r for r in rows if r["expected"] == "no_expectation" and r["attempts"] and r["verdict"] and not _no_answer(r)
    ]
    if new:
        yield from _title(f"NEW, nothing is expected of them yet: {_variants(len(new))}", width)
    measured = [row for row in rows if row["attempts"]]
    listed = list(_listed(new, width))
    wholly = _wholly_new(new, measured) if len(listed) > FEW else set()
    yield from _new_by_case(new, wholly, width) if len(listed) > FEW else listed
    if measured:
        yield from _title("CASES measured" + (" (+: all of it is new)" if wholly else ""), width)
        yield from _cases(measured, wholly, width)
    missing = [row for row in rows if not row["attempts"] and row["reason"]]
    if missing:
        yield from _title(f"NOT MEASURED: {_variants(len(missing))}", width)
        yield from _reasons(missing, width)


def _title(text: str, width: int) -> Iterator[str]:
    yield ""
    yield from wrap(text, "", 2, width)


def _no_answer(row: Row) -> bool:
    """Nothing of it can be new or known: what came in between is what the person in front must read."""
    said = row["infra_error"] or row["verdict"] == "INCONCLUSIVE"
    return bool(row["attempts"] and said and row["expected"] in (None, "no_expectation"))


def left_out(texts: Sequence[str], width: int = WIDTH) -> Iterator[str]:
    """The files of conf/ that are wrong, and were not measured for it; tables that nothing stored shows."""
    if texts:
        yield f"LEFT OUT: {len(texts)} file{'s' if len(texts) > 1 else ''} with an error, or not believed"
        for text in texts:
            for line in text.splitlines():
                yield from wrap(line, "  ", 4, width)
        yield ""


def _variants(count: int) -> str:
    return counted(count, "variant")


def _alike(rows: Iterable[Row]) -> list[list[Row]]:
    """Variants of a cell that differ for the same reason, mostly that their unfixed variant does, are told once."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in ("case", "params", "stack", "verdict", "reason")), []).append(row)
    return list(found.values())


def _detail(same: Sequence[Row], document: Document | None, width: int) -> Iterator[str]:
    row, variants = same[0], [each["variant"] for each in same]
    about = f"{row['case']} {row['model']}/{row['strategy']}, variant{'s' * (len(variants) > 1)} {', '.join(variants)}"
    yield from wrap(about, "  ", 4, width)
    wanted: dict[str | None, list[str]] = {}
    for each in same:
        wanted.setdefault(each["expectation"], []).append(each["variant"])
    told = ", ".join(
        (f"expected {name}" if name else "a control must be healthy")
        + (f" ({', '.join(of)})" if len(wanted) > 1 else "")
        for name, of in wanted.items()
    )
    yield from wrap(f"{told}, measured {row['verdict']}: {row['reason']}", "    ", 3, width)
    for line in _log(row["variant"], document):
        yield _cut(f"    | {line}", width)
    yield from _command(again({**row, "variant": ",".join(variants)}), width)


def _command(told: str, width: int) -> Iterator[str]:
    """It can be pasted as it stands: a line that goes on ends with a backslash, and no quoted word is taken apart."""
    line = "    $"
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", one_line(told)):
        if len(line) + len(word) + 3 > width and line.strip() not in ("", "$"):
            yield f"{line} \\"
            line = " " * 8
        line += f" {word}"
    yield line


def _log(variant: str, document: Document | None) -> list[str]:
    """The last lines that the first failing rank printed; its own words, where a traceback was."""
    for attempt in document["variants"][variant]["attempts"] if document else ():
        outcome, ranks = attempt["outcome"], attempt["observation"]["ranks"]
        if outcome["outcome"] == "passed" or not ranks:
            continue
        first = outcome["primary"]["rank"] if outcome["primary"] else None
        rank = next((rank for rank in ranks if rank["rank"] == first), ranks[0])
        printed = [one_line(line) for line in rank["log_tail"].splitlines()]
        return [line for line in printed if line.strip()][-LOG_LINES:]
    return []


def _listed(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Each case and cell in a line: its variants and their verdicts."""
    grouped: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        cell = " ".join([f"{row['model']}/{row['strategy']}", *row["overrides"]])
        grouped.setdefault((row["case"], cell), {}).setdefault(row["verdict"], []).append(row["variant"])
    same: dict[str, list[tuple[str, str]]] = {}
    for where, verdicts in grouped.items():
        same.setdefault("; ".join(f"{name}: {', '.join(variants)}" for name, variants in verdicts.items()), []).append(
            where
        )
    for told, places in same.items():
        first = places[0][0]
        cells = ", ".join(cell for case, cell in places if case == first)
        cells += "".join(f"; {case} {cell}" for case, cell in places if case != first)
        yield from wrap(f"{first} {cells}: {told}", "  ", 4, width)


def _wholly_new(new: Iterable[Row], measured: Iterable[Row]) -> set[str]:
    """The cases of which nothing that has a verdict is known."""
    all_of_it = Counter(row["case"] for row in measured if row["verdict"])
    return {case for case, count in Counter(row["case"] for row in new).items() if count == all_of_it[case]}


def _new_by_case(new: Iterable[Row], wholly: set[str], width: int) -> Iterator[str]:
    """A catalogue that was never measured here is not told variant by variant: its cases' own lines count its
    verdicts."""
    if wholly:
        told = f"all of {counted(len(wholly), 'case')}, marked + below; `--all` prints every variant"
        yield from wrap(told, "  ", 4, width)
    by_case: dict[str, list[Row]] = {}
    for row in new:
        by_case.setdefault(row["case"], []).append(row)
    for case, own in by_case.items():
        if case not in wholly:
            found = Counter(row["verdict"] for row in own)
            seen = ", ".join(f"{count} {WORDS[verdict][count > 1]}" for verdict, count in found.most_common())
            cells = counted(len({row["params"] for row in own}), "cell")
            yield from wrap(f"{case} in {cells}: {seen}", "  ", 4, width)


def _cases(rows: Sequence[Row], wholly: set[str], width: int) -> Iterator[str]:
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    names = max(map(len, by_case))
    for name, own in by_case.items():
        found = Counter(row["verdict"] for row in own if row["verdict"])
        told = ", ".join(f"{count} {WORDS[verdict][count > 1]}" for verdict, count in found.most_common())
        odd = sum(row["expected"] in ("unexpected", "differs_from_cpu") for row in own)
        cells = len({row["params"] + row["stack"] + row["hardware"] for row in own})
        first = [row["outcome"] for row in own if not row["verdict"]]
        reproduced = Counter(first)
        seen = ", ".join(
            f"{kind}" if count == len(first) else f"{kind} in {count}" for kind, count in reproduced.items()
        )
        mark = "!" if odd else "+" if name in wholly else " "
        simulated = " [simulated]" if own[0]["simulated"] else ""
        count = counted(cells, "cell")
        head = f"{mark} {name.ljust(names)}  {count:>8}  "
        yield from wrap(head + ": ".join(filter(None, [seen, told])) + simulated, "", min(len(head), width // 2), width)


def _reasons(rows: Sequence[Row], width: int) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["reason"], []).append(row["case"])
    for reason, of in sorted(found.items(), key=lambda item: -len(item[1])):
        cases, count = list(dict.fromkeys(of)), len(of)
        about = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
        yield from wrap(f"{count:4}  {reason} [{about}]", "", 6, width)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 4] + " ..."


def ending(code: int, rows: Sequence[Row], outcome_without_warning: int = 0) -> str:
    """The exit code and why, in a line. ``otherwise``: variants that answer otherwise than what they were compared
    with."""
    odd = sum(row["expected"] == "unexpected" for row in rows)
    why = {
        0: "nothing unexpected",
        1: f"{_variants(odd)} differ{'s' * (odd == 1)} from what is expected"
        + (f"; {_variants(outcome_without_warning)} answer otherwise than before" if outcome_without_warning else ""),
        2: "a mute's day is over: see above, and `repro mute`",
        3: "less was measured than asked for: see above, and `repro doctor`",
    }.get(code, "")
    return f"exit code {code}: {why}" if why else f"exit code {code}"
