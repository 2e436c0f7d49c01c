"""Write a changed case as an issue: what changed, since which release, which fixes work, the command. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repro_matrix.analysis.diff import KINDS, Change, describe_row
from repro_matrix.analysis.regressions import ChangedCase
from repro_matrix.report.formats import code, escape
from repro_matrix.text import counted

MOST = 40  # changes that are listed
LONGEST = 60_000  # bytes of a body: GitHub takes 65,536


@dataclass(frozen=True)
class Issue:
    title: str
    body: str
    digest: str

    @property
    def markdown(self) -> str:
        """Return title, body, and a last line by which a closed issue acknowledges the change."""
        return f"# {self.title}\n\n{self.body}\n\n<!-- repro-matrix change={self.digest} -->\n"


def issue(
    changed: Sequence[ChangedCase], run_id: str, link: str = "", bisections: Mapping[str, str] | None = None
) -> Issue:
    """Describe a case's changes on all stacks. ``bisections``: stack -> the report, or why there is none."""
    case = changed[0].case
    changes = sorted((change for each in changed for change in each.changes), key=lambda c: list(KINDS).index(c.kind))
    title = f"{case}: {changes[0].kind}" + (f" and {len(changes) - 1} more" if len(changes) > 1 else "")
    count = counted(len(changes), "result")
    parts = [f"Nightly run {escape(run_id)}: {count} of **{escape(case)}** changed since the last passing run."]
    parts += [f"[Full report]({link})"] if link else []
    for each in changed:
        row = each.changes[0].row
        parts.append(f"### Stack {escape(each.stack)}, compared with {escape(each.passing.run_id)}")
        moved = [f"- {escape(name)}: {escape(was)} -> {escape(now)}" for name, (was, now) in each.versions.items()]
        parts += ["Releases that changed:", "\n".join(moved)] if moved else ["No release of the stack changed."]
        parts.append("\n".join(map(_change, each.changes[:MOST])))
        parts += [f"and {len(each.changes) - MOST} more"] if len(each.changes) > MOST else []
        parts.append(f"Fixes that work in every measured cell: {', '.join(map(escape, each.working_fixes)) or 'none'}.")
        if (bisections or {}).get(each.stack):
            parts += ["#### Bisection", str((bisections or {})[each.stack])]
        words = [case, *row.axes, *([f"stack={each.stack}"] if each.stack != "current" else [])]
        parts.append(f"Reproduce: {code(shlex.join(['repro', 'run', *words, f'variants={each.changes[0].variant}']))}")
    body = "\n\n".join(parts)
    short = body.encode(errors="replace")[:LONGEST].decode(errors="ignore")
    digests = [each.digest for each in changed]
    return Issue(title, short + ("\n\n(truncated)" if short != body else ""), " change=".join(digests))


def _change(change: Change) -> str:
    row = change.row
    return (
        f"- {escape(' '.join(row.axes))} on {escape(row.hardware)}, variant **{escape(change.variant)}**: "
        f"{change.kind} "
        f"({KINDS[change.kind].meaning})\n"
        f"  - before: {code(describe_row(change.before))}\n"
        f"  - now: {code(describe_row(change.after))}"
    )
