"""`repro upgrade`: what changes between two stacks, and through which package and release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from judging import failed, observation
from probing import BASE, CASE, World, before, world
from repro_matrix.analysis.upgrade import compare

__all__ = ["world"]


def outcome(name: str, message: str = "m") -> dict[str, Any]:
    primary = {"rank": 0, "type": "ValueError", "message": message, "where": ""} if name != "clean" else None
    recognised = [{"case": "a", "signature": "s", "ranks": [0], "kind": "exception", "message": message}]
    return {"outcome": name, "reason": message, "primary": primary, "recognised": recognised if name == "fires" else []}


def document(stack: str, **arms: str) -> dict[str, Any]:
    """Arms as ``fires``, ``clean``, ``other_error:message``, ``skipped``."""
    made: dict[str, Any] = {}
    for arm, how in arms.items():
        name, _, message = how.partition(":")
        attempts = [{"outcome": outcome(name, message or "m"), "observation": observation(failed(0))}]
        skipped = "needs 2 GPUs" if name == "skipped" else None
        made[arm] = {"skipped": skipped, "stack": stack, "settings": {}, "attempts": [] if skipped else attempts}
    return {"case": "a", "key": "a/m-s", "stack": {"name": stack}, "arms": made}


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("clean", "fires", "enters"),
        ("fires", "clean", "leaves"),
        ("fires", "other_error:masked", "leaves"),
        ("other_error:x", "fires", "enters"),
        ("fires:one text", "fires:another", "changes its text"),
        ("other_error:x", "other_error:y", "changes its text"),
        ("clean", "other_error:x", "breaks"),
        ("other_error:x", "clean", "heals"),
        ("clean", "clean", None),
        ("fires", "fires", None),
    ],
)
def test_the_broken_arm(old: str, new: str, kind: str | None) -> None:
    found = compare([document("old", broken=old)], [document("new", broken=new)])
    assert [change.kind for change in found.changes] == ([kind] if kind else [])
    assert found.same == (kind is None)
    for change in found.changes:
        assert bool(change.before.error_at) == (old != "clean") and bool(change.after.error_at) == (new != "clean")


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (("fires", "clean"), ("clean", "clean"), "needless"),
        (("fires", "clean"), ("fires", "fires"), "stops working"),
        (("fires", "clean"), ("fires", "other_error"), "stops working"),
        (("fires", "clean"), ("clean", "other_error"), "stops working"),
        (("fires", "fires"), ("fires", "clean"), "starts working"),
        (("clean", "clean"), ("fires", "clean"), "is needed now"),
        (("fires", "clean"), ("fires", "clean"), None),
        (("fires", "clean"), ("other_error", "clean"), None),  # without the fix it fails otherwise: not needless
        (("fires", "other_error:x"), ("fires", "other_error:y"), "changes its text"),
    ],
)
def test_a_fix(old: tuple[str, str], new: tuple[str, str], kind: str | None) -> None:
    found = compare([document("old", broken=old[0], fix=old[1])], [document("new", broken=new[0], fix=new[1])])
    assert [change.kind for change in found.changes if change.arm == "fix"] == ([kind] if kind else [])


def test_what_is_not_known_on_both_is_no_change() -> None:
    found = compare([document("old", broken="skipped")], [document("new", broken="fires")])
    assert not found.changes and found.unknown == (("a/m-s", "broken", "from: skipped: needs 2 GPUs", True),)
    assert compare([], [document("new", broken="fires")]).same == 0


def test_an_arm_on_a_stack_of_its_own_is_left_out() -> None:
    old, new = document("old", broken="fires", newer="clean"), document("new", broken="fires", newer="other_error:x")
    for item in (old, new):
        item["arms"]["newer"]["stack"] = "current"
    assert not compare([old], [new]).changes


def upgraded(world: World, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    got = world.repro("upgrade", f"case={CASE}", "arms=[root-call,summon]", *words, "--json")
    out = capsys.readouterr()
    assert got == code, out.err
    return dict(json.loads(out.out)) if out.out else {"err": out.err}


def newer(world: World) -> None:
    world.bases["newer"] = {**BASE, "torch": "2.6.0", "transformers": "4.44.0", "accelerate": "1.0.0"}
    world.releases_of("accelerate", "0.29.2", "0.30.0", "0.31.0", "1.0.0")


def test_an_upgrade_names_package_and_release(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)

    def history(versions: Mapping[str, str], arm: str) -> str:
        if arm == "summon":  # the fix stops working with another package
            return "clean" if before(versions, "0.31", "accelerate") else "no such key"
        return "fires" if arm == "broken" and not before(versions, "4.41.0") else "clean"

    world.history = history
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", "--releases", code=1)
    changes = {change["arm"]: change for change in data["changes"]}
    assert {arm: change["change"] for arm, change in changes.items()} == {
        "broken": "enters", "summon": "stops working", "root-call": "is needed now",
    }  # fmt: skip
    assert changes["broken"]["cause"]["packages"] == ["transformers"]
    assert changes["broken"]["cause"]["releases"]["transformers"]["first"] == "transformers 4.41.0"
    assert changes["summon"]["cause"]["packages"] == ["accelerate"]
    assert (
        changes["summon"]["cause"]["releases"]["accelerate"]["text"] == "accelerate 0.31.0 (not yet accelerate 0.30.0)"
    )
    assert changes["root-call"]["cause"] is None
    launched = len(world.launched)
    assert (
        upgraded(world, capsys, "--from", "base", "--to", "newer", "--releases", code=1)["changes"] == data["changes"]
    )
    assert len(world.launched) == launched


def test_an_upgrade_for_the_better_is_exit_0(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)
    world.history = lambda versions, arm: "fires" if arm == "broken" and before(versions, "4.42") else "clean"
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", "--why", "none")
    assert data["counts"] == {"leaves": 1, "needless": 2} and all(c["cause"] is None for c in data["changes"])
    assert world.repro("upgrade", f"case={CASE}", "arms=[root-call]", "--from", "base", "--to", "newer") == 0
    out = capsys.readouterr().out
    assert "leaves (1): the known failure no longer fires" in out and "transformers" in out


def test_a_change_of_python_alone_is_not_blamed_on_a_package(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)
    world.bases["newer"]["python"] = "3.12.0"
    world.history = lambda versions, arm: "fires" if versions["python"] == "3.12.0" and arm == "broken" else "clean"
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", code=1)
    cause = next(c["cause"] for c in data["changes"] if c["arm"] == "broken")
    assert cause["packages"] is None and "Python differs" in cause["note"]


def test_an_interrupted_explanation_shows_the_changes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)
    world.interrupt_at = 7  # six for the two stacks, then the search for the package
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", code=130)
    assert data["stopped"] == "interrupted" and data["counts"] == {"enters": 1, "is needed now": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "base"), "required: --to"),
        (("--from", "base", "--to", "base"), "the same stack"),
        (("--from", "base", "--to", "bse"), "no stack named 'bse'"),
        (("--from", "base", "--to", "newer", "stack=base"), "--from and --to"),
        (("--from", "base", "--to", "newer", "relases=true"), "did you mean '--releases'"),
        (("--from", "base", "--to", "newer", "case=nope"), "unknown case 'nope'"),
    ],
)
def test_bad_input(world: World, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    newer(world)
    assert world.repro("upgrade", *words) == 2
    assert said in capsys.readouterr().err
    assert world.launched == []
