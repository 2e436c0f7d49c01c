"""The benchmark that says whether cold and warm give the same outcomes must see it when they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.catalogue import differences
from harness.store import write_json

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
