"""Plant each error in each strategy and ask the training whether it contradicts itself; then train
without errors.

    python -m bench.plants.consistency                     all of it: writes bench/consistency.json
    python -m bench.plants.consistency --plants ddp.loss-weight,tp.unreduced --healthy 0 --out
    /dev/null

No side is trusted: every configuration has the error. They are one process; the strategy; and the
strategy with two micro-batches and activation checkpointing. An error is *visible* where the
parameters that these trainings end with differ.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.machine import HERE, write
from bench.plants import healthy, runs
from bench.plants.__main__ import (
    ERRORS,
    NOISE,
    STRATEGIES,
    Traces,
    agrees,
    described,
    listed,
    total,
)

VISIBLE = 1e-4  # relative change of a parameter's sums, in three steps of float32
Words = tuple[str, ...]


def configurations(words: Words, world: int = 2) -> list[tuple[tuple[str, ...], Words, int]]:
    """Return labels, arguments and ranks of what must train as ``words`` do. ``words``: --strategy
    NAME ..."""
    strategy, rest = words[:2], [*words[2:]]
    options = {"--accumulate": ("1", "2"), "--checkpointing": ("none", "plain")}
    for name in options:
        if name in rest:
            place = rest.index(name)
            options[name] = ("1", "2") if name == "--accumulate" else ("none", rest[place + 1])
            del rest[place : place + 2]
    found = [(("1 rank", "--accumulate 1", "--checkpointing none"), tuple(rest), 1)]
    for accumulate, checkpointing in ((0, 0), (1, 1)):
        more = (
            "--accumulate",
            options["--accumulate"][accumulate],
            "--checkpointing",
            options["--checkpointing"][checkpointing],
        )
        labels = (f"{world} ranks", " ".join(more[:2]), " ".join(more[2:]))
        found.append((labels, (*strategy, *rest, *more), world))
    return found


def judged(
    words: Words, world: int, traces: Traces, name: str, turn: int = 0
) -> tuple[Any, list[Any], list[bool]]:
    """Return the answer, the parameters' sums of each run, and whether each ran. ``turn``: which
    comes first."""
    from repro_matrix.compare.consistency import group
    from repro_matrix.traces.comparison import locate
    from repro_matrix.traces.invariance import by_design

    chosen = configurations(words, world)
    chosen = [*chosen[turn % len(chosen) :], *chosen[: turn % len(chosen)]]
    ran = [
        traces.trace(words, world, f"{name}-{at}") for at, (_, words, world) in enumerate(chosen)
    ]
    noise: dict[int, list[Any]] = {}

    def compare(one: int, other: int) -> tuple[Any, str]:
        if one not in noise:
            _, words, world = chosen[one]
            noise[one] = [
                traces.trace(words, world, f"{name}-{one}-noise{each}", each)[0] for each in NOISE
            ]
        sides = ran[one][0], ran[other][0]
        found = locate(*sides, noise[one])
        return found, by_design(found, *sides, noise[one]) if found.verdict == "differs" else ""

    def problem(at: int) -> str:
        return "" if ran[at][1].passed else ran[at][1].log.strip().splitlines()[-1][:200]

    answer = group([labels for labels, *_ in chosen], compare, problem)
    return (
        answer,
        [total(each.results) for _, each in ran if each.passed],
        [each.passed for _, each in ran],
    )


def visible(sums: list[dict[str, tuple[float, float]]]) -> bool:
    """Return whether trainings ended with other parameters. One process and replicas: per rank, not
    their sum."""
    sizes = []
    for other in sums[1:]:
        for name, (_, square) in sums[0].items():
            ratio = other.get(name, (0.0, 0.0))[1] / square if square else 1.0
            sizes.append(min(abs(ratio - whole) / whole for whole in (1, 2, 4)))
    return max(sizes, default=0.0) > VISIBLE


def row(answer: Any, ran: list[bool]) -> dict[str, Any]:
    differences = [described(each) for each in answer.differences.values()]
    return {
        "verdict": answer.verdict,
        "sentence": answer.sentence(),
        "groups": answer.groups,
        "ran": ran,
        "unchecked": list(answer.unchecked.values()),
        "differences": differences,
    }


def totals(planted: list[dict[str, Any]], clean: list[dict[str, Any]]) -> str:
    found = [each for each in planted if each["differences"]]
    seen = [each for each in planted if each["visible"] or each["differences"]]
    right, verdicts = (
        sum(each["right"] for each in found),
        Counter(each["verdict"] for each in clean),
    )
    return (
        f"{len(planted)} planted errors: {len(seen)} make configurations differ; {len(found)} are"
        f" found, {right} with the right place. {len(clean)} trainings without an error:"
        f" {verdicts['contradicts itself']} false alarms, {verdicts['inconclusive']} inconclusive."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", type=listed, default=list(ERRORS)[1:])
    parser.add_argument("--strategies", type=listed, default=list(STRATEGIES))
    parser.add_argument("--plants", type=listed, metavar="STRATEGY.KIND,...", help="only these")
    parser.add_argument("--sample", action="store_true", help="each kind in one strategy, in turn")
    parser.add_argument("--healthy", type=int, default=60)
    parser.add_argument("--out", type=Path, default=HERE / "consistency.json")
    arguments = parser.parse_args()
    runs.preload()
    folder = Path(tempfile.mkdtemp(prefix="consistency-"))
    traces, planted, clean, began = Traces(folder), [], [], time.time()
    plants = [each.split(".") for each in arguments.plants or ()]
    every = [
        (one, kind)
        for kind in arguments.kinds
        for one in arguments.strategies
        if one not in ERRORS[kind].cannot
    ]
    if arguments.sample:
        by_kind = [[each for each in every if each[1] == kind] for kind in arguments.kinds]
        every = [each[number % len(each)] for number, each in enumerate(by_kind)]
    for strategy, name in plants or every:
        kind = ERRORS[name]
        answer, sums, ran = judged(
            ("--strategy", strategy, *kind.options, "--error", name),
            2,
            traces,
            f"{strategy}.{name}",
        )
        expected = kind.instead.get(strategy, kind.expected)
        right = any(agrees(location, expected) for location in answer.differences.values())
        planted.append(
            {
                "kind": name,
                "strategy": strategy,
                "visible": visible(sums),
                "right": right,
                **row(answer, ran),
            }
        )
        print(
            f"{name} {strategy}: visible {planted[-1]['visible']}, right {right}:"
            f" {answer.sentence()}",
            flush=True,
        )
        shutil.rmtree(folder)
    for number, each in enumerate(healthy.trainings(arguments.healthy)):
        answer, _, ran = judged(each.words, each.world, traces, f"healthy-{number}", number)
        clean.append({"words": " ".join(each.words), "world": each.world, **row(answer, ran)})
        print(
            f"{clean[-1]['words']} --nproc {each.world}: {answer.verdict}: {answer.sentence()}",
            flush=True,
        )
        shutil.rmtree(folder)
    if arguments.out != Path("/dev/null"):
        write(arguments.out, wall_s=time.time() - began, planted=planted, healthy=clean)
    print(totals(planted, clean))


if __name__ == "__main__":
    main()
