"""Version maps of several arms over the same releases, where one probe answers for all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.search import Label, VersionMap, version_map

Answers = Mapping[str, Label | None]  # arm -> label


def maps(
    count: int,
    arms: Sequence[str],
    ask: Callable[[int], Answers],
    known: dict[int, Answers],
    *,
    spread: int | None = None,
    exhaustive: bool = False,
    budget: int | None = None,
) -> dict[str, VersionMap]:
    """The map of each arm. ``known`` is filled as answers come in, so that it holds them when ``ask`` raises.

    The first arm has the spread; the others start from its answers and only narrow what they see change, until no arm
    sees anything new. Whatever is asked is known to every arm. ``budget=0`` shows what is known and asks nothing.
    """
    began = len(known)

    def left() -> int | None:
        return None if budget is None else max(0, budget - (len(known) - began))

    def probe_of(arm: str) -> Callable[[int], Label | None]:
        def probe(index: int) -> Label | None:
            known[index] = ask(index)
            return known[index][arm]

        return probe

    found: dict[str, VersionMap] = {}
    first = True
    while True:
        before = len(known)
        for arm in arms:
            mine = {index: answers[arm] for index, answers in known.items()}
            spreads = first and arm == arms[0]
            # An arm that never answered here (it needs another stack) is no reason to probe its neighbours.
            silent = not spreads and all(label is None for label in mine.values())
            found[arm] = version_map(
                count,
                probe_of(arm),
                spread=spread if spreads else 1,
                exhaustive=exhaustive and spreads,
                known=mine,
                budget=0 if silent else left(),
            )
        if len(known) == before and not first:
            return found
        first = False
