"""Plant each error in each strategy and ask the comparison where it begins; then train without
errors.

    python -m bench.plants         all of it: writes bench/plants.json and
    docs/reference/planted-errors.md
    python -m bench.plants --kinds norm-eps --strategies ddp,tp --healthy 0 --out /dev/null
    python -m bench.plants --plants ddp.norm-eps,tp.unreduced --healthy 0 --out /dev/null

The good side is one process. A planted error counts only where an untraced run shows that it
changes the training.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.machine import HERE, write
from bench.plants import healthy, runs, table

sys.path.insert(0, str(Path(__file__).parent))

from errors import Expected, plain  # as train.py imports them
from planted import ERRORS

STRATEGIES = ("ddp", "fsdp", "fsdp2", "zero2", "zero3", "tp")
NOISE = (1, 2)
NO_EFFECT = 1e-6


class Traces:
    """Traces of train.py; those of a good run, with its noise runs, are taken once for each set of
    options."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._good: dict[tuple[str, ...], list[Any]] = {}

    def good(self, options: tuple[str, ...]) -> list[Any]:
        if options not in self._good:
            name = f"good-{len(self._good)}"
            self._good[options] = [
                self.trace(options, 1, f"{name}-{noise}", noise)[0] for noise in (0, *NOISE)
            ]
        return self._good[options]

    def trace(
        self, words: tuple[str, ...], world: int, name: str, noise: int = 0
    ) -> tuple[Any, runs.Ran]:
        from repro_matrix.traces.reader import read_trace

        folder = self.folder / name
        variables = {
            "REPRO_TRACE": str(folder),
            **({"REPRO_TRACE_NOISE": str(noise)} if noise else {}),
        }
        ran = runs.launch(list(words), world, folder, variables)
        if not ran.passed:
            print(f"{name} {' '.join(words)}: exit codes {ran.codes}\n{ran.log}", file=sys.stderr)
        return read_trace(folder), ran

    def locate(
        self, words: tuple[str, ...], world: int, good: tuple[str, ...], name: str
    ) -> tuple[Any, runs.Ran]:
        from repro_matrix.traces.comparison import locate

        first, *noise = self.good(good)
        bad, ran = self.trace(words, world, name)
        return locate(first, bad, noise), ran

    def healthy(self, words: tuple[str, ...], world: int) -> runs.Ran:
        """Return an untraced run without an error."""
        return runs.launch(list(words), world, self.folder / f"untraced{''.join(words)}")


def effect(healthy: runs.Ran, planted: runs.Ran) -> float:
    """Return the largest relative change of a loss, a norm or a parameter's sums (over all
    ranks)."""
    sizes = [0.0]
    for ours, theirs in zip(healthy.results, planted.results):
        pairs = [pair for key in ("losses", "norms") for pair in zip(ours[key], theirs[key])]
        sizes += [abs(left - right) / abs(left) for left, right in pairs if left]
    sums = [total(ran.results) for ran in (healthy, planted)]
    for name, (value, square) in sums[0].items():
        other = sums[1].get(name, (value, square))
        sizes += [
            abs(square - other[1]) / (square + 1e-30),
            abs(value - other[0]) / (square + 1e-30) ** 0.5,
        ]
    return min(max(sizes), 1e6)  # a norm may be infinite


def total(results: list[Any]) -> dict[str, tuple[float, float]]:
    names = {plain(name) for each in results for name in each["parameters"]}
    found = {name: (0.0, 0.0) for name in names}
    for each in results:
        for name, (value, square) in each["parameters"].items():
            old = found[plain(name)]
            found[plain(name)] = old[0] + value, old[1] + square
    return found


def judged(name: str, strategy: str, traces: Traces, world: int) -> dict[str, Any]:
    """Plant one error in one strategy; return what it did and what the comparison says."""
    kind = ERRORS[name]
    row: dict[str, Any] = {"kind": name, "what": kind.__doc__, "strategy": strategy}
    if strategy in kind.cannot:
        return {**row, "cannot": kind.cannot[strategy]}
    words = ("--strategy", strategy, *kind.options)
    plain = traces.healthy(words, world)
    wrong = runs.launch(
        [*words, "--error", name], world, traces.folder / f"untraced.{strategy}.{name}"
    )
    if wrong.passed:
        row["effect"] = effect(plain, wrong)
        if row["effect"] < NO_EFFECT:
            return row
    else:
        row["raised"] = wrong.log.strip().splitlines()[-1][:300]
    expected = kind.instead.get(strategy, kind.expected)
    location, ran = traces.locate(
        (*words, "--error", name), world, kind.options, f"{strategy}.{name}"
    )
    return {
        **row,
        "expected": asdict(expected),
        "right": agrees(location, expected),
        "answer": described(location),
        "same_numbers": ran.results == wrong.results,
    }


def described(location: Any) -> dict[str, Any]:
    names = (
        "verdict",
        "reason",
        "stage",
        "step",
        "ranks",
        "micro",
        "place",
        "role",
        "size",
        "tolerance",
        "relation",
        "last_agreeing",
        "largest",
    )
    return {**{name: getattr(location, name) for name in names}, "sentence": location.sentence()}


def agrees(location: Any, expected: Expected) -> bool:
    place = "" if location.place == "the model" else location.place
    return (
        location.verdict == "differs"
        and location.stage in expected.stages
        and location.step == expected.step
        and (not expected.places or place in expected.places)
        and (not expected.ranks or tuple(location.ranks) == expected.ranks)
    )


def listed(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", type=listed, default=list(ERRORS)[1:])
    parser.add_argument("--strategies", type=listed, default=list(STRATEGIES))
    parser.add_argument("--plants", type=listed, metavar="STRATEGY.KIND,...", help="only these")
    parser.add_argument("--healthy", type=int, default=healthy.COUNT)
    parser.add_argument("--out", type=Path, default=HERE / "plants.json")
    parser.add_argument(
        "--keep", type=Path, help="keep the runs in this folder, and use those that it has"
    )
    arguments = parser.parse_args(words)
    runs.preload()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="plants-"))
    traces, rows, began = Traces(folder), [], time.time()
    plants = [each.split(".") for each in arguments.plants or ()]
    for strategy, name in plants or [
        (one, kind) for kind in arguments.kinds for one in arguments.strategies
    ]:
        row = judged(name, strategy, traces, 2)
        rows.append(row)
        print(table.line(row), flush=True)
    clean = []
    for number, each in enumerate(healthy.trainings(arguments.healthy)):
        location, ran = traces.locate(each.words, each.world, each.good, f"healthy-{number}")
        clean.append(
            {
                "words": " ".join(each.words),
                "world": each.world,
                "trained": ran.passed,
                **described(location),
            }
        )
        print(f"{clean[-1]['words']} --nproc {each.world}: {clean[-1]['sentence']}", flush=True)
    if not arguments.keep:
        shutil.rmtree(folder)
    if arguments.out != Path("/dev/null"):
        write(arguments.out, wall_s=time.time() - began, planted=rows, healthy=clean)
    if arguments.out == HERE / "plants.json":
        table.write(arguments.out)
    print(table.totals(rows, clean))


if __name__ == "__main__":
    main()
