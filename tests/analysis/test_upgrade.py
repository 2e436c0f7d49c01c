"""`repro upgrade`: what changes between two stacks, and which package and release changed it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from probing import BASE, CASE, World, before, world
from repro_matrix.analysis.upgrade import Upgrade, compare_stacks
from results_by_hand import BOOM, FIRES, HOLDS, SETTINGS, SKIPPED, arm, cell

__all__ = ["world"]


def compared(old: dict[str, Any], new: dict[str, Any]) -> Upgrade:
    return compare_stacks(cell(old, stack="old"), cell(new, stack="new"))


@pytest.mark.parametrize(
    ("old", "new", "kinds", "code"),
    [
        ({"broken": arm()}, {"broken": FIRES}, ["reproduces_now"], 1),
        ({"broken": BOOM}, {"broken": FIRES}, ["reproduces_now"], 1),
        ({"broken": FIRES}, {"broken": arm()}, ["no_longer_reproduces"], 0),
        ({"broken": FIRES}, {"broken": BOOM}, ["no_longer_reproduces"], 0),
        ({"broken": FIRES}, {"broken": replace(FIRES, text="another")}, ["text_changed"], 0),
        ({"broken": arm()}, {"broken": BOOM}, ["new_failure"], 1),
        ({"broken": BOOM}, {"broken": arm()}, ["failure_gone"], 0),
        ({"broken": FIRES, "fix": HOLDS}, {"broken": FIRES, "fix": FIRES}, ["fix_stopped_working"], 1),
        ({"broken": FIRES, "fix": FIRES}, {"broken": FIRES, "fix": HOLDS}, ["fix_works_now"], 0),
        ({"broken": FIRES, "fix": HOLDS}, {"broken": FIRES, "fix": HOLDS}, [], 0),
        ({"broken": arm(wall_s=(1.0, 1.0))}, {"broken": arm(wall_s=(9.0, 9.0))}, [], 0),
    ],
)
def test_compare_stacks_gives_kind_and_exit_code(
    old: dict[str, Any], new: dict[str, Any], kinds: list[str], code: int
) -> None:
    result = compared(old, new)
    assert ([change.kind for change in result.changes], result.exit_code) == (kinds, code)
    assert result.same == len(old) - len(kinds)


def test_compare_stacks_arm_without_result_is_unknown() -> None:
    skipped = compared({"broken": SKIPPED, "fix": HOLDS}, {"broken": FIRES, "fix": HOLDS})
    assert [(each.arm, each.declared) for each in skipped.unknown] == [("broken", True)]
    assert (skipped.changes, skipped.same, skipped.exit_code) == ((), 1, 0)
    lost = compared({"broken": arm(kinds={}, text="a GPU failed")}, {"broken": FIRES})
    assert [each.declared for each in lost.unknown] == [False] and lost.exit_code == 3
    assert compare_stacks([], cell({"broken": FIRES})).exit_code == 3
    other = compared({"broken": arm(settings=SETTINGS)}, {"broken": replace(FIRES, settings={**SETTINGS, "steps": 2})})
    assert (other.changes, other.same, len(other.unknown)) == ((), 0, 1)


def upgraded(world: World, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    got = world.repro("upgrade", f"case={CASE}", "arms=[root-call,summon]", *words, "--json")
    out = capsys.readouterr()
    assert got == code, out.err
    return dict(json.loads(out.out)) if out.out else {"err": out.err}


def newer(world: World) -> None:
    world.bases["newer"] = {**BASE, "torch": "2.6.0", "transformers": "4.44.0", "accelerate": "1.0.0"}
    world.releases_of("accelerate", "0.29.2", "0.30.0", "0.31.0", "1.0.0")


def test_upgrade_names_package_and_release(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)

    def history(versions: Mapping[str, str], arm: str) -> str:
        if arm == "summon":  # the fix stops working with another package
            return "clean" if before(versions, "0.31", "accelerate") else "no such key"
        return "fires" if arm == "broken" and not before(versions, "4.41.0") else "clean"

    world.history = history
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", "--releases", code=1)
    changes = {change["arm"]: change for change in data["changes"]}
    assert {arm: change["change"] for arm, change in changes.items()} == {
        "broken": "reproduces_now", "summon": "new_failure",
    }  # fmt: skip
    assert changes["broken"]["cause"]["packages"] == ["transformers"]
    assert changes["broken"]["cause"]["releases"]["transformers"]["first"] == "transformers 4.41.0"
    assert changes["summon"]["cause"]["packages"] == ["accelerate"]
    assert (
        changes["summon"]["cause"]["releases"]["accelerate"]["text"] == "accelerate 0.31.0 (not yet accelerate 0.30.0)"
    )
    launched = len(world.launched)
    assert (
        upgraded(world, capsys, "--from", "base", "--to", "newer", "--releases", code=1)["changes"] == data["changes"]
    )
    assert len(world.launched) == launched


def test_upgrade_improvement_is_exit_0(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)
    world.history = lambda versions, arm: "fires" if arm == "broken" and before(versions, "4.42") else "clean"
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", "--why", "none")
    assert data["counts"] == {"no_longer_reproduces": 1} and all(c["cause"] is None for c in data["changes"])
    assert world.repro("upgrade", f"case={CASE}", "arms=[root-call]", "--from", "base", "--to", "newer") == 0
    assert "no_longer_reproduces" in capsys.readouterr().out


def test_upgrade_other_python_alone_blames_no_package(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)
    world.bases["newer"]["python"] = "3.12.0"
    world.history = lambda versions, arm: "fires" if versions["python"] == "3.12.0" and arm == "broken" else "clean"
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", code=1)
    cause = next(c["cause"] for c in data["changes"] if c["arm"] == "broken")
    assert cause["packages"] is None and "Python differs" in cause["note"]


def test_upgrade_interrupted_search_shows_the_changes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)
    world.interrupt_at = 7  # six for the two stacks, then the search for the package
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", code=130)
    assert data["stopped"] == "interrupted" and data["counts"] == {"reproduces_now": 1}


@pytest.mark.parametrize(
    "words",
    [
        ("--from", "base"),
        ("--from", "base", "--to", "base"),
        ("--from", "base", "--to", "bse"),
        ("--from", "base", "--to", "newer", "stack=base"),
        ("--from", "base", "--to", "newer", "relases=true"),
        ("--from", "base", "--to", "newer", "case=nope"),
    ],
)
def test_upgrade_bad_input_is_a_usage_error(world: World, words: tuple[str, ...]) -> None:
    newer(world)
    assert world.repro("upgrade", *words) == 2
    assert world.launched == []
