"""A changed case as an issue's text: what changed, since which release, which fixes hold, the command. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.analysis.diff import KINDS, Change
from repro_matrix.analysis.issue_host import Issue
from repro_matrix.analysis.regressions import Changed
from repro_matrix.analysis.show_diff import told
from repro_matrix.report.formats import code, plain
from repro_matrix.text import counted

MOST = 40  # changes that are listed
LONGEST = 60_000  # bytes of a body: hosts take 65,536


def issue(
    found: Sequence[Changed], night: str, link: str = "", searches: Mapping[tuple[str, str], Any] | None = None
) -> Issue:
    """A case's changes on all stacks. ``searches``: (stack, green night) -> its bisection's report, or why not."""
    first = found[0]
    changes = [change for one in found for change in one.changes]
    kinds = list(dict.fromkeys(change.kind for change in sorted(changes, key=lambda c: list(KINDS).index(c.kind))))
    title = f"{first.case}: {kinds[0]}" + (f" and {len(changes) - 1} more" if len(changes) > 1 else "")
    few = len(changes) == 1
    about = f"Night {plain(night)}: {counted(len(changes), 'answer')} of **{plain(first.case)}**"
    out = [f"{about} {'is' if few else 'are'} not {'that' if few else 'those'} of the last green night that has "
           f"{'it' if few else 'them'}."]  # fmt: skip
    out += [f"[The whole page]({link})"] if link else []
    for one in found:
        out.append(f"### Stack {plain(one.stack)}, against {plain(one.green.name)}")
        moved = [f"- {plain(name)}: {plain(was)} -> {plain(now)}" for name, (was, now) in one.versions.items()]
        out += ["Releases that changed:", "\n".join(moved)] if moved else ["No release of the stack changed."]
        out.append("\n".join(_change(change) for change in one.changes[:MOST]))
        out += [f"and {len(one.changes) - MOST} more"] if len(one.changes) > MOST else []
        held = ", ".join(map(plain, one.holds))
        out.append(f"Fixes that hold tonight wherever they were measured: {held or 'none'}.")
        search = (searches or {}).get((one.stack, one.green.name))
        if search:
            out += ["#### Since which release", str(search)]
        words = [one.case, *one.changes[0].axes]
        words += [f"stack={one.stack}"] if one.stack != "current" else []
        out.append(f"To see it: {code(shlex.join(['repro', 'run', *words, f'arms={one.changes[0].arm}']))}")
    body = "\n\n".join(out)
    cut = body.encode(errors="replace")[:LONGEST].decode(errors="ignore")
    digest = first.digest if len(found) == 1 else "".join(one.digest[:6] for one in found)
    return Issue(first.case, digest, title, cut + ("\n\n(cut off)" if cut != body else ""))


def _change(change: Change) -> str:
    where = f"{plain(' '.join(change.axes))} on {plain(change.hardware)}, arm **{plain(change.arm)}**"
    return (
        f"- {where}: {change.kind} ({KINDS[change.kind][1]})\n"
        f"  - before: {code(told(change.before))}\n"
        f"  - now: {code(told(change.after))}"
    )
