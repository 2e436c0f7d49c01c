"""Hierarchical delta debugging (Misherghi and Su): of a tree whose nodes can be left out, with all below them, a
smallest one that still fires. Pure.

Level by level from the top: what goes at an upper level takes most of the file with it for one question. Then again
until no single node can be left out. Two hints save questions and never decide anything: what cannot stand without
what was left out goes along with it (``along``), and what nobody uses any more is tried first (``idle``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from repro_matrix.search.reduce.search import Answer, Spent, Trail, minimal

Kept = frozenset[int]
Hint = Callable[[Kept], Kept]


def _none(kept: Kept) -> Kept:
    return frozenset()


@dataclass(frozen=True)
class Tree:
    """Nodes 0 ... n-1; ``parent[i]`` is -1 at the top and less than i otherwise."""

    parent: Sequence[int]

    def closed(self, kept: Kept) -> Kept:
        """Without the nodes whose parents are gone."""
        found: set[int] = set()
        for node in sorted(kept):
            if self.parent[node] < 0 or self.parent[node] in found:
                found.add(node)
        return frozenset(found)

    def depth(self, node: int) -> int:
        return 0 if self.parent[node] < 0 else 1 + self.depth(self.parent[node])


@dataclass
class Pruned:
    kept: Kept
    done: bool = False
    alone: dict[int, Answer] = field(default_factory=dict)  # node -> the answer where it alone (and all below) is out


def prune(
    tree: Tree, trail: Trail[Kept], along: Hint = _none, idle: Hint = _none, found: Pruned | None = None
) -> Pruned:
    """The whole tree is known to fire. ``along``: which kept nodes cannot stand in such a tree; ``idle``: which of
    them nothing in it needs. ``found`` is filled on the way."""
    pruned = found or Pruned(frozenset(range(len(tree.parent))))
    levels = sorted({tree.depth(node) for node in pruned.kept})

    def settled(kept: Kept) -> Kept:
        while True:
            kept = tree.closed(kept)
            fewer = kept - along(kept)
            if fewer == kept:
                return kept
            kept = fewer

    def fires(kept: Kept) -> bool:
        if trail.fires(kept):
            pruned.kept = kept
            return True
        return False

    def only(nodes: Kept) -> Callable[[tuple[int, ...]], bool]:
        return lambda rest: fires(settled(pruned.kept - (nodes - frozenset(rest))))

    def drop_idle() -> None:
        while found := idle(pruned.kept):
            if not fires(settled(pruned.kept - found)):
                return

    try:
        while True:
            before = pruned.kept
            drop_idle()
            for level in levels:
                nodes = sorted(node for node in pruned.kept if tree.depth(node) == level)
                if nodes:
                    minimal(nodes, only(frozenset(nodes)), lambda: pruned.kept)
                    drop_idle()
            if pruned.kept == before and _each_alone(tree, trail, pruned, fires):
                pruned.done = True
                return pruned
    except Spent:
        return pruned


def _each_alone(tree: Tree, trail: Trail[Kept], pruned: Pruned, fires: Callable[[Kept], bool]) -> bool:
    """Whether no single node can be left out: asked without any hint, the last ones of the file first."""
    pruned.alone = {}
    for node in sorted(pruned.kept, reverse=True):
        rest = tree.closed(pruned.kept - {node})
        if fires(rest):
            return False
        pruned.alone[node] = trail.answers[rest]
    return True
