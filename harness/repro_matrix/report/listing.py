"""What `claims`, `list` and `doctor` say, in lines of at most so many columns. Pure.

What belongs together stands together: claims under their case, cells that run in a line, those that do not by reason.
Where a line has no room for a reason, that stands on one of its own; nothing is left out without a word.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro_matrix.text import counted, one_line

if TYPE_CHECKING:  # what lists cells needs nothing that judges
    from repro_matrix.analysis.claims.ledger import ClaimRow, Evidence

WIDE = 120  # from here on a reason stands beside what it explains
SMALL = 60  # and below this nothing is cut
STATUSES = ("refuted", "conditional", "upheld", "untested")
HOLDS = {True: "bears it out", False: "speaks against it", None: "decides nothing"}


def wrapped(text: str, width: int, indent: str = "", deeper: str | None = None) -> Iterator[str]:
    """``deeper``: what the second and later lines begin with."""
    later = indent if deeper is None else deeper
    shown = textwrap.wrap(one_line(text), width, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False)
    yield from shown or [indent.rstrip()]


def cut(text: str, width: int) -> str:
    text = one_line(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


# -- claims


def claims(rows: Sequence[ClaimRow], width: int, simulated: Iterable[str] = ()) -> Iterator[str]:
    """A line for each claim: its status, its words, and when it holds. Narrower than ``WIDE``: its words in a line, its
    name and the rest below; narrower than ``SMALL``, where hardly a word would be left, both are whole."""
    marked = set(simulated)
    names = min(max((len(row.id) for row in rows), default=0), 28)
    for case in dict.fromkeys(row.case for row in rows):
        yield ""
        yield cut(case + (" [simulated]" if case in marked else ""), width)
        for row in rows:
            if row.case == case:
                yield from _claim(row, names, width)
    if rows:
        counts = Counter(str(row.status) for row in rows)
        told = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        yield ""
        yield from wrapped(f"{counted(len(rows), 'claim')}: {told}. `repro claims ID` shows the evidence.", width)


def _claim(row: ClaimRow, names: int, width: int) -> Iterator[str]:
    why = few_words(row)
    if width < WIDE:
        told, below = f"  {row.status:<11}  {one_line(row.text)}", f"{row.id}: {why}"
        if width < SMALL:
            yield from wrapped(told.strip(), width, "  ", "    ")
            yield from wrapped(below, width, "    ")
        else:
            yield cut(told, width)
            yield cut(" " * 15 + below, width)
        return
    head = f"  {row.status:<11}  {cut(row.id, names):<{names}}  "
    room = width - len(head)
    share = min(len(one_line(row.text)), max(room // 2, room - len(one_line(why)) - 3))
    words = cut(row.text, share)
    yield cut(f"{head}{words} | {why}", width)


def few_words(row: ClaimRow) -> str:
    """When it holds and when not; of what is settled, by how many measurements."""
    return row.brief or row.detail


def evidence(row: ClaimRow, width: int) -> Iterator[str]:
    """One claim: its words, where it comes from, and every measurement, those that decide it first."""
    yield from wrapped(f"{row.id}: {row.text}", width, deeper="  ")
    yield from wrapped(f"of {row.case}; claimed in {row.source or 'no thread: tried beside the others'}", width, "  ")
    yield from wrapped(f"{row.status}: {row.detail}", width, "  ", "    ")
    for holds, title in HOLDS.items():
        found = [item for item in row.evidence if item.holds is holds]
        if found:
            yield ""
            yield f"{title}: {len(found)}"
            yield from _by_reason(found, width) if holds is None else _listed(found, width)


def _listed(found: Sequence[Evidence], width: int) -> Iterator[str]:
    for item in found:
        when = f" ({item.when})" if item.when else ""
        place = f"{item.arm}{when}: {item.model}/{item.strategy}, {item.ranks}, {item.hardware}, {item.stack}"
        yield from wrapped(place, width, "  - ", "    ")
        yield from wrapped(f"{item.measured} (predicted: {item.predicted})", width, "    ", "      ")
        yield f"    {one_line(item.document)}"  # in one piece, to be copied


def _by_reason(found: Sequence[Evidence], width: int) -> Iterator[str]:
    for reason, count in Counter(item.measured for item in found).most_common():
        arms = dict.fromkeys(item.arm for item in found if item.measured == reason)
        yield from wrapped(f"{count:4}  {reason} [{', '.join(arms)}]", width, "", " " * 6)


# -- list


def cases(entries: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """``entries``: case, title, kind, simulated, cells, arms, models, strategies. Failures, then controls."""
    groups = (
        ("known failures", [e for e in entries if e["kind"] != "control" and not e["simulated"]]),
        ("simulated: no device takes part", [e for e in entries if e["kind"] != "control" and e["simulated"]]),
        ("controls: must train and agree with a single process", [e for e in entries if e["kind"] == "control"]),
    )
    names = max((len(entry["case"]) for entry in entries), default=0)
    for title, members in groups:
        if not members:
            continue
        yield ""
        yield cut(title, width)
        for entry in members:
            head = f"  {entry['case']:<{names}}  "
            over = f"{_few(entry['models'], 'models')} / {_few(entry['strategies'], 'strategies')}"
            size = f"{_some(entry['cells'], 'cell')}, {_some(entry['arms'], 'arm')}: {over}"
            yield cut(head + size, width)
            yield from wrapped(entry["title"], width, "      ")


def _few(names: Iterable[str], what: str) -> str:
    listed = sorted(names)
    return ", ".join(listed) if len(listed) < 3 else f"{len(listed)} {what}"


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# -- matrix --dry-run


def planned(items: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """``items``: of each arm case (as it is named), cell, model, strategy, attempts, skipped (why, or None). A line for
    each case, of what would be launched; then what would not, by reason."""
    asked = [item for item in items if not item["skipped"]]
    names = max((len(item["case"]) for item in asked), default=0)
    for case in dict.fromkeys(item["case"] for item in asked):
        own = [item for item in asked if item["case"] == case]
        models, strategies = ({item[axis] for item in own} for axis in ("model", "strategy"))
        over = f"{_few(models, 'models')} / {_few(strategies, 'strategies')}"
        tries = sum(item["attempts"] for item in own)
        size = f"{_some(len({item['cell'] for item in own}), 'cell')}, {_some(len(own), 'arm')}"
        head = f"{case:<{names}}  {size}" + (f", {tries} attempts" if tries != len(own) else "")
        beside = len(head) + 2 + len(over) <= width
        yield f"{head}: {over}" if beside else cut(head, width)
        if not beside:
            yield from wrapped(over, width, "      ")
    yield from not_launched(items, width)
    if items:
        cells, tries = len({item["cell"] for item in asked}), sum(item["attempts"] for item in asked)
        whole = f"{_some(tries, 'attempt')} of {_some(len(asked), 'arm')} in {_some(cells, 'cell')}"
        yield ""
        yield from wrapped(f"{whole}; `--all` names every arm", width)


def not_launched(items: Iterable[Mapping[str, Any]], width: int) -> Iterator[str]:
    """``items`` as above; of those that are skipped a line for each reason, with the cases that it is of."""
    skipped = [item for item in items if item["skipped"]]
    reasons = Counter(str(item["skipped"]) for item in skipped)
    if reasons:
        yield from ("", f"not launched: {_some(reasons.total(), 'arm')}")
    for reason, count in reasons.most_common():
        of = ", ".join(dict.fromkeys(item["case"] for item in skipped if item["skipped"] == reason))
        yield from wrapped(f"{count:4}  {reason} [{of}]", width, "", " " * 6)


# -- doctor


def runs_here(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """``rows``: case, model, strategy, simulated, runs, reason, skipped_arms. What runs; then what not, by reason."""
    whole = [
        case for case in dict.fromkeys(row["case"] for row in rows) if all(_whole(r) for r in rows if r["case"] == case)
    ]
    marked = {row["case"] for row in rows if row["simulated"]}
    if whole:
        shown = ", ".join(case + (" [simulated]" if case in marked else "") for case in whole)
        yield ""
        yield from wrapped(f"run here, with all their arms: {shown}", width, deeper="  ")
    cells: dict[str, list[Mapping[str, Any]]] = {}
    arms: dict[str, list[str]] = {}
    for row in rows:
        if not row["runs"]:
            cells.setdefault(str(row["reason"]), []).append(row)
        for arm, reason in row["skipped_arms"].items():
            arms.setdefault(reason, []).append(f"{row['case']}/{arm}")
    if cells:
        yield ""
        yield "cells that cannot run here"
        for reason, found in sorted(cells.items(), key=lambda item: -len(item[1])):
            listed = ", ".join(dict.fromkeys(str(row["case"]) for row in found))
            yield from wrapped(f"{len(found):4}  {reason} [{listed}]", width, "", " " * 6)
    if arms:
        yield ""
        yield from wrapped("arms that cannot run here, of cases that can", width)
        for reason, names in sorted(arms.items(), key=lambda item: -len(item[1])):
            listed = ", ".join(dict.fromkeys(names))
            yield from wrapped(f"{len(names):4}  {reason} [{listed}]", width, "", " " * 6)


def _whole(row: Mapping[str, Any]) -> bool:
    return bool(row["runs"]) and not row["skipped_arms"]
