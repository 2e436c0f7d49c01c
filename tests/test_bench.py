"""The benchmark that says whether cold and warm give the same outcomes must see it when they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.catalogue import differences
from bench.evidence import CUTS, cut
from bench.mutants import mutated, places
from repro_matrix.results.store import write_json

FIRES = {"outcome": "fires", "recognised": [{"case": "c", "signature": "s"}], "primary": None}
CLEAN: dict[str, Any] = {"outcome": "clean", "recognised": [], "primary": None}


def error(kind: str) -> dict[str, Any]:
    return {"outcome": "other_error", "recognised": [], "primary": {"type": kind}}


def folder(root: Path, **cells: dict[str, list[dict[str, Any]]]) -> Path:
    for name, arms in cells.items():
        shown = {arm: {"attempts": [{"outcome": outcome} for outcome in outcomes]} for arm, outcomes in arms.items()}
        path = root / "cpu" / "stack" / "c" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"schema": 1, "key": f"c/{name}", "arms": shown, "provenance": {"started": 0.0}})
    return root


def test_the_same_outcomes_do_not_differ(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", m={"broken": [FIRES], "fix": [CLEAN, error("OSError")]})
    other = folder(tmp_path / "other", m={"broken": [FIRES], "fix": [error("OSError"), CLEAN]})
    assert list(differences(one, other)) == []


def test_whatever_differs_is_named(tmp_path: Path) -> None:
    one = folder(
        tmp_path / "one", m={"broken": [FIRES], "fix": [CLEAN], "other": [error("OSError")]}, n={"broken": [CLEAN]}
    )
    signature = {**FIRES, "recognised": [{"case": "c", "signature": "t"}]}
    other = folder(tmp_path / "other", m={"broken": [signature], "fix": [CLEAN, CLEAN], "other": [error("KeyError")]})
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
