"""`repro upgrade`: what changes between two stacks, and which package and release changed it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from probing import BASE, CASE, World, before, world
from repro_matrix.analysis.upgrade import Upgrade, compare_stacks
from results_by_hand import BOOM, HOLDS, REPRODUCED, SETTINGS, SKIPPED, cell, variant

__all__ = ["world"]


def compared(old: dict[str, Any], new: dict[str, Any]) -> Upgrade:
    return compare_stacks(cell(old, stack="old"), cell(new, stack="new"))


@pytest.mark.parametrize(
    ("old", "new", "kinds", "code"),
    [
        ({"unfixed": variant()}, {"unfixed": REPRODUCED}, ["reproduces_now"], 1),
        ({"unfixed": REPRODUCED}, {"unfixed": variant()}, ["no_longer_reproduces"], 0),
        ({"unfixed": REPRODUCED}, {"unfixed": replace(REPRODUCED, text="another")}, [], 0),
        ({"unfixed": variant()}, {"unfixed": BOOM}, ["new_failure"], 1),
        ({"unfixed": BOOM}, {"unfixed": variant()}, ["failure_gone"], 0),
        ({"unfixed": REPRODUCED, "fix": HOLDS}, {"unfixed": REPRODUCED, "fix": REPRODUCED}, ["fix_stopped_working"], 1),
        ({"unfixed": REPRODUCED, "fix": REPRODUCED}, {"unfixed": REPRODUCED, "fix": HOLDS}, ["fix_works_now"], 0),
        ({"unfixed": REPRODUCED, "fix": HOLDS}, {"unfixed": REPRODUCED, "fix": HOLDS}, [], 0),
    ],
)
def test_compare_stacks_gives_kind_and_exit_code(
    old: dict[str, Any], new: dict[str, Any], kinds: list[str], code: int
) -> None:
    result = compared(old, new)
    assert ([change.kind for change in result.changes], result.exit_code) == (kinds, code)
    assert result.same == len(old) - len(kinds)


def test_compare_stacks_variant_without_result_is_unknown() -> None:
    skipped = compared({"unfixed": SKIPPED, "fix": HOLDS}, {"unfixed": REPRODUCED, "fix": HOLDS})
    assert [(each.variant, each.declared) for each in skipped.unknown] == [("unfixed", True)]
    assert (skipped.changes, skipped.same, skipped.exit_code) == ((), 1, 0)
    lost = compared({"unfixed": variant(kinds={}, text="a GPU failed")}, {"unfixed": REPRODUCED})
    assert [each.declared for each in lost.unknown] == [False] and lost.exit_code == 3
    assert compare_stacks([], cell({"unfixed": REPRODUCED})).exit_code == 3
    two_steps = replace(REPRODUCED, settings={**SETTINGS, "steps": 2})
    other = compared({"unfixed": variant(settings=SETTINGS)}, {"unfixed": two_steps})
    assert (other.changes, other.same, len(other.unknown)) == ((), 0, 1)


def upgraded(world: World, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    actual = world.repro("upgrade", f"case={CASE}", "variants=[root-call,summon]", *words, "--json")
    out = capsys.readouterr()
    assert actual == code, out.err
    return dict(json.loads(out.out))


def newer(world: World) -> None:
    world.bases["newer"] = {**BASE, "torch": "2.6.0", "transformers": "4.44.0", "accelerate": "1.0.0"}
    world.releases_of("accelerate", "0.29.2", "0.30.0", "0.31.0", "1.0.0")


def test_upgrade_names_package_and_release(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)

    def history(versions: Mapping[str, str], variant: str) -> str:
        if variant == "summon":  # the fix stops working with another package
            return "passed" if before(versions, "0.31", "accelerate") else "no such key"
        return "reproduced" if variant == "unfixed" and not before(versions, "4.41.0") else "passed"

    world.history = history
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", "--releases", code=1)
    changes = {change["variant"]: change for change in data["changes"]}
    assert {variant: change["change"] for variant, change in changes.items()} == {
        "unfixed": "reproduces_now", "summon": "new_failure",
    }  # fmt: skip
    for name, package, first in (("unfixed", "transformers", "4.41.0"), ("summon", "accelerate", "0.31.0")):
        cause = changes[name]["cause"]
        assert cause["packages"] == [package]
        assert cause["releases"][package]["first"] == f"{package} {first}"
    launched = len(world.launched)
    again = upgraded(world, capsys, "--from", "base", "--to", "newer", "--releases", code=1)
    assert again["changes"] == data["changes"] and len(world.launched) == launched
    data = upgraded(world, capsys, "--from", "newer", "--to", "base", "--why", "none")
    assert data["counts"] == {"no_longer_reproduces": 1, "failure_gone": 1}, "improvements: exit code 0"
    assert all(change["cause"] is None for change in data["changes"])


def test_upgrade_interrupted_search_shows_the_changes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    newer(world)
    world.interrupt_at = 7  # six for the two stacks, then the search for the package
    data = upgraded(world, capsys, "--from", "base", "--to", "newer", code=130)
    assert data["stopped"] == "interrupted" and data["counts"] == {"reproduces_now": 1}


@pytest.mark.parametrize(
    "words",
    ["--from base", "--from base --to base", "--from base --to bse", "--from base --to newer stack=base",
     "--from base --to newer relases=true", "--from base --to newer case=nope"],
)  # fmt: skip
def test_upgrade_bad_input_is_a_usage_error(world: World, words: str) -> None:
    newer(world)
    assert world.repro("upgrade", *words.split()) == 2
    assert world.launched == []
