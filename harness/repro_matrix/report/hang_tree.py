"""Where the ranks of a hang stood, as one tree: frames that ranks share are said once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from repro_matrix.grading.observation import parse_threads
from repro_matrix.report.sanitize import line

MOST_FRAMES = 60
MOST_RANKS = 64


@dataclass
class Node:
    """Frames in a row that the same ranks have, outermost first, and where they part."""

    frames: list[str]
    ranks: list[int]
    parts: list[Node] = field(default_factory=list)


def tree(stacks: Mapping[int, str]) -> list[Node]:
    """``stacks``: rank -> its backtrace, as py-spy or faulthandler print it; only the main threads are shown."""
    found: dict[int, list[str]] = {}
    for rank, stack in list(stacks.items())[:MOST_RANKS]:
        threads = parse_threads(stack[:200_000])
        if threads:
            lines = [line(_short(text)) for text in threads[0].lines[:MOST_FRAMES]]
            found[rank] = lines[::-1]  # outermost first
    return _grow(found, 0)


def _grow(stacks: Mapping[int, Sequence[str]], depth: int) -> list[Node]:
    groups: dict[str, dict[int, Sequence[str]]] = {}
    for rank, frames in stacks.items():
        if len(frames) > depth:
            groups.setdefault(frames[depth], {})[rank] = frames
    nodes = []
    for first, members in groups.items():
        same = [first]
        while (follow := _common(members.values(), depth + len(same))) is not None:
            same.append(follow)
        nodes.append(Node(same, sorted(members), _grow(members, depth + len(same))))
    return nodes


def _common(stacks: Iterable[Sequence[str]], depth: int) -> str | None:
    """The frame that all of them have at this depth."""
    found = {frames[depth] if len(frames) > depth else None for frames in stacks}
    return found.pop() if len(found) == 1 else None


def _short(frame: str) -> str:
    """A frame without the folders above its package."""
    for root in ("/site-packages/", "/checkout/"):
        before, _, after = frame.rpartition(root)
        if after:
            start = before.rfind("(") if "(" in before else before.rfind('"')
            return before[: start + 1] + after
    return frame
