"""The benchmark that says whether cold and warm give the same outcomes must see it when they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import document, observation, ok, outcome
from repro_matrix.results.store import write_json

from bench.catalogue import differences
from bench.evidence import CUTS, cut
from bench.mutants import mutated, places

CLEAN = outcome("clean").to_json()


def fires(signature: str) -> dict[str, Any]:
    known = {"case": "c", "signature": signature, "ranks": [0], "kind": "exception", "message": "m"}
    return {**CLEAN, "outcome": "fires", "recognised": [known]}


def error(kind: str) -> dict[str, Any]:
    primary = {"rank": 0, "type": kind, "message": "m", "where": "x.py:1"}
    return {**CLEAN, "outcome": "other_error", "primary": primary}


FIRES = fires("s")


def folder(root: Path, **cells: dict[str, list[dict[str, Any]]]) -> Path:
    for name, arms in cells.items():
        seen = observation(ok(0), ok(1))
        made = document({arm: [(each["outcome"], seen) for each in shown] for arm, shown in arms.items()})
        for arm, shown in arms.items():
            for attempt, judged in zip(made["arms"][arm]["attempts"], shown):
                attempt["outcome"] = judged
        path = root / "cpu" / "stack" / "c" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**made, "case": "c", "key": f"c/{name}"})
    return root


def test_the_same_outcomes_do_not_differ(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", m={"broken": [FIRES], "fix": [CLEAN, error("OSError")]})
    other = folder(tmp_path / "other", m={"broken": [FIRES], "fix": [error("OSError"), CLEAN]})
    assert list(differences(one, other)) == []


def test_whatever_differs_is_named(tmp_path: Path) -> None:
    one = folder(
        tmp_path / "one", m={"broken": [FIRES], "fix": [CLEAN], "other": [error("OSError")]}, n={"broken": [CLEAN]}
    )
    other = folder(tmp_path / "other", m={"broken": [fires("t")], "fix": [CLEAN, CLEAN], "other": [error("KeyError")]})
    found = list(differences(one, other))
    assert [line.split(":")[0] for line in found] == ["c/m broken", "c/m fix", "c/m other", "c/n broken"]


def test_every_mutant_changes_one_place_and_does_something_else() -> None:
    source = 'def f(a):\n    """A docstring."""\n    if a < 2 and a != 0:\n        return [b for b in (a, 0) if b]\n'
    found = places("m.py", source)
    assert {m.what for m in found} >= {"if never", "Lt -> LtE", "And -> Or", "NotEq -> Eq", "2 -> 3", "filter left out"}
    assert all(m.text in source and "docstring" not in m.text for m in found)
    said = set()
    for mutant in found:
        names: dict[str, Any] = {}
        exec(compile(mutated(source, mutant.number), "m.py", "exec"), names)
        said.add(repr([names["f"](a) for a in (0, 1, 2, 3)]))
    honest: dict[str, Any] = {}
    exec(source, honest)
    assert repr([honest["f"](a) for a in (0, 1, 2, 3)]) not in said


def test_the_copy_without_evidence_is_one_of_todays_scripts(tmp_path: Path) -> None:
    copy = cut(tmp_path)  # SystemExit where a text that is to be cut is not there any more
    for name in CUTS:
        compile((copy / name).read_text(encoding="utf-8"), name, "exec")
