"""The search over a script's statements: which of them its failure needs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_matrix.errors import MeasureError
from repro_matrix.search.labels import Answer as Said
from repro_matrix.search.prober import Stopped
from repro_matrix.search.reduce import lines
from repro_matrix.search.reduce.parameters import Config
from repro_matrix.search.reduce.probe import Asked
from repro_matrix.search.reduce.search import Answer, Trail
from repro_matrix.search.reduce.settings import Say, Search
from repro_matrix.search.reduce.tree import Kept, Pruned, prune
from repro_matrix.text import counted

if TYPE_CHECKING:
    from repro_matrix.search.reduce.script import ScriptAsker


@dataclass
class Lines:
    """The search over the file's lines, after that over the settings."""

    asker: ScriptAsker
    config: Config
    source: lines.Source
    search: Search
    say: Say
    asked: dict[Kept, Asked] = field(default_factory=dict)

    def run(self) -> Pruned:
        trail: Trail[Kept] = Trail(self._probe, None, self.search.repeat)
        if self.search.budget is not None:
            trail.budget = max(0, self.search.budget - self.search.attempts)
        whole = frozenset(range(len(self.source.elements)))
        if trail.ask(whole) is not True:  # the same text in the other file: it looks at its own name, or is flaky
            raise MeasureError(
                f"in a file beside it ({self.asker.at.name}) the same text does not fail as it did: "
                f"{self.asked[whole].words}"
            )
        pruned = Pruned(whole)
        try:
            prune(self.source.tree, trail, self.source.unbound, self.source.idle, pruned)
        except Stopped as stopped:
            self.search.stopped = stopped
        return pruned

    def unsure(self, pruned: Pruned) -> list[str]:
        """Statements of what is left of which nobody could say whether they have to be."""
        tree, every = self.source.tree, self.source.elements
        outs = {node: self.asked[tree.closed(pruned.kept - {node})] for node in sorted(pruned.alone)}
        return [f"line {every[node].first} ({out.said.detail})" for node, out in outs.items() if out.by_chance]

    def _probe(self, kept: Kept) -> tuple[Answer, int]:
        text = self.source.only(kept)
        if text is None:
            found = Asked(Said(None, "what is left does not parse"))
        else:
            began = time.monotonic()
            self.asker.at.write_text(text, encoding="utf-8")
            found = self.asker.launch(self.asker.made(self.config, text), self.search.repeat)
            took = time.monotonic() - began
            if found.by_chance:
                again = self.asker.launch(self.asker.made(self.config, text), self.search.repeat)
                found = replace(again, attempts=again.attempts + found.attempts)
                took = time.monotonic() - began
            self.search.attempts += found.attempts
            self.search.wall_s += took
            how = f"{took:.1f} s" if found.attempts else "stored before"
            self.say(f"{len(self.asked) + 1}: {counted(len(text.splitlines()), 'line')}: {found.words} ({how})")
        self.asked[kept] = found
        return found.answer, found.attempts


def as_json(found: Lines, pruned: Pruned, text: str, out: Path | None) -> dict[str, Any]:
    alone: dict[str, int] = {}  # what is left without a statement -> the statement
    for node in sorted(pruned.alone):
        alone.setdefault(found.source.only(found.source.tree.closed(pruned.kept - {node})) or f"{node}", node)
    every = found.source.lines
    return {
        "before": len(every), "now": len(text.splitlines()), "file": os.path.relpath(out) if out else None,
        "text": text,
        "done": pruned.done, "unsure": found.unsure(pruned),
        "alone": [
            {
                "line": found.source.elements[node].first,
                "text": every[found.source.elements[node].first - 1].strip(),
                "answer": each.words, "error_at": each.said.error_at, "document": each.document,
            }
            for node in alone.values()
            if (each := found.asked[found.source.tree.closed(pruned.kept - {node})])
        ],
        "questions": [
            {"elements": len(kept), "answer": each.words, "error_at": each.said.error_at, "document": each.document}
            for kept, each in found.asked.items()
        ],
    }  # fmt: skip
