"""Version maps: of several variants from the same probes, with every boundary between stored measurements."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probing import CASE, World, before, world
from repro_matrix.config import project
from repro_matrix.results import local as own_results
from repro_matrix.runner.request import ask
from repro_matrix.search.prober import Prober, Target
from repro_matrix.search.releases import maps

__all__ = ["world"]
REAL_HISTORY = own_results.history
LABELS = st.sampled_from(["passed", "reproduced", "other_failure: KeyError", None])


def drawn(world: World, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    actual = world.repro("versions", CASE, "stack=base", "variants=[root-call]", "--range", "..", *words, "--json")
    out = capsys.readouterr()
    assert actual == code, out.err
    return dict(json.loads(out.out))


# -- the searches together


@given(st.integers(1, 40).flatmap(lambda n: st.lists(st.tuples(LABELS, LABELS), min_size=n, max_size=n)))
def test_maps_of_two_variants_say_only_what_was_probed(history: list[tuple[str | None, str | None]]) -> None:
    asked: list[int] = []

    def ask(index: int) -> dict[str, str | None]:
        asked.append(index)
        return dict(zip("ab", history[index]))

    known: dict[int, Mapping[str, Any]] = {}
    found = maps(len(history), ["a", "b"], ask, known)
    assert len(asked) == len(set(asked)) and set(known) == set(asked)
    for variant, side in (("a", 0), ("b", 1)):
        for boundary in found[variant].boundaries:
            one, other = history[boundary.before][side], history[boundary.after][side]
            assert None not in (one, other) and one != other
            between = range(boundary.before + 1, boundary.after)
            assert all(history[i][side] is None and i in known for i in between)
        for segment in found[variant].segments:
            assert {history[i][side] for i in segment.probed} == {segment.label}
        assert set(found[variant].unprobed) == set(range(len(history))) - set(asked)


@given(st.integers(9, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_one_flip_costs_the_spread_and_a_narrowing(case: tuple[int, int]) -> None:
    count, flip = case
    known: dict[int, Mapping[str, Any]] = {}
    found = maps(count, ["a"], lambda i: {"a": "reproduced" if i >= flip else "passed"}, known, samples=8)
    if found["a"].boundaries:
        assert [(b.before, b.after) for b in found["a"].boundaries] == [(flip - 1, flip)]
    assert len(known) <= 8 + math.ceil(math.log2(count / 8))


def test_an_variant_that_never_answers_costs_nothing() -> None:
    known: dict[int, Mapping[str, Any]] = {}
    maps(100, ["a", "b"], lambda i: {"a": "passed", "b": None}, known, samples=4)
    assert len(known) == 4


def test_the_budget_is_for_all_variants_together() -> None:
    known: dict[int, Mapping[str, Any]] = {}
    maps(200, ["a", "b"], lambda i: {"a": i // 7 % 2, "b": i // 5 % 2}, known, max_probes=12)
    assert len(known) == 12


# -- the verb


def test_a_line_per_stretch_of_releases(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.repro("versions", CASE, "stack=base", "variants=[root-call]", "--range", "4.37..4.45") == 0
    out = capsys.readouterr().out
    assert "4.37.0–4.39.3" in out and "4.40.0–4.45.0" in out
    assert "Every change lies between two neighbouring releases" in out
    assert "root-call" in out and "not probed" in out


def test_every_boundary_has_a_stored_probe_on_each_side(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    data = drawn(world, capsys, "--samples", "4")
    (edge,) = data["variants"]["unfixed"]["boundaries"]
    for side, answer in (("before", "passed"), ("after", "reproduced")):
        with open(edge[side]["document"], encoding="utf-8") as stored:
            document = json.load(stored)
        assert document["stack"]["versions"]["transformers"] == edge[side]["release"]
        assert document["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"] == answer
    assert data["variants"]["root-call"]["boundaries"] == []


def test_a_history_that_goes_back_and_forth(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    bad = ("4.38.0", "4.41.0", "4.41.1", "4.44.0")
    world.history = lambda versions, variant: (
        "reproduced" if variant == "unfixed" and versions["transformers"] in bad else "passed"
    )
    data = drawn(world, capsys, "--exhaustive")
    reproducing = [s["probed"] for s in data["variants"]["unfixed"]["segments"] if s["answer"] == "reproduced"]
    assert reproducing == [["4.38.0"], ["4.41.0", "4.41.1"], ["4.44.0"]] and data["unprobed"] == []


def test_another_error_is_an_answer_of_its_own(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.history = lambda versions, variant: "passed" if before(versions, "4.40") else "no such key"
    data = drawn(world, capsys)
    assert [s["answer"] for s in data["variants"]["unfixed"]["segments"]] == [
        "passed",
        "other_failure: KeyError in transformers.models.qwen2.modeling_qwen2.forward",
    ]


def test_unknown_releases_are_said_and_widen_the_boundary(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.uninstallable = {("transformers", "4.40.0")}
    world.history = lambda versions, variant: (
        "hang" if versions["transformers"] == "4.41.0" else "passed" if before(versions, "4.40") else "reproduced"
    )
    data = drawn(world, capsys, "--exhaustive")
    (edge,) = data["variants"]["unfixed"]["boundaries"]
    assert (edge["before"]["release"], edge["after"]["release"]) == ("4.39.3", "4.41.1")
    assert edge["unknown"] == ["4.40.0", "4.41.0"] and not edge["adjacent"]
    reasons = {item["release"]: item["reason"] for item in data["variants"]["unfixed"]["unknown"]}
    assert reasons["4.40.0"].startswith("cannot be installed") and reasons["4.41.0"].startswith("hang")


def test_needs_that_are_not_met_are_unknown_with_the_reason(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    actual = world.repro("versions", CASE, "stack=base", "variants=[fsdp2]", "--json")
    data = json.loads(capsys.readouterr().out)
    assert actual == 0
    reasons = {item["reason"] for item in data["variants"]["fsdp2"]["unknown"]}
    assert len(reasons) == 1 and "needs torch" in reasons.pop()


def test_nothing_is_probed_twice_and_an_interrupted_map_goes_on(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.interrupt_at = 7
    data = drawn(world, capsys, code=130)
    assert data["stopped"] == "interrupted" and data["unprobed"]
    world.interrupt_at = None
    once = len(world.launched)
    whole = drawn(world, capsys)
    assert whole["stopped"] is None and len(world.launched) == len(whole["probes"]) * 2
    assert once < len(world.launched)
    launched = len(world.launched)
    again = drawn(world, capsys)
    assert len(world.launched) == launched and again["variants"] == whole["variants"]
    assert all(probe["launched"] == 0 for probe in again["probes"])


def test_the_index_out_of_reach_keeps_what_is_known(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from repro_matrix.environment import stacks

    def away(spec: str, **_: Any) -> Any:
        if "4.41.1" in spec:
            raise stacks.StackError("infra", "the index is out of reach")
        return world.resolve(spec)

    monkeypatch.setattr(stacks, "resolve", away)
    data = drawn(world, capsys, "--exhaustive", code=3)
    assert data["stopped"] == "the index is out of reach"
    assert [s["answer"] for s in data["variants"]["unfixed"]["segments"]] == ["passed", "reproduced"]
    assert "4.41.1" in data["unprobed"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--package", "transformes"), "did you mean 'transformers'"),
        (("rang=4.37..4.40",), "did you mean '--range'"),
        (("--range", "4.36"), "write FIRST..LAST"),
        (("--range", "6..7"), "no release between"),
        (("--samples", "none"), "--samples: 'none' is not a number of at least 1"),
        (("--exhaustiv",), "did you mean '--exhaustive'"),
        (("variants=[rot-call]",), "did you mean 'root-call'"),
        (("model=*",), "Choose one by model="),
        (("stack=bse",), "no stack named 'bse'"),
    ],
)
def test_bad_input(world: World, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    stack = () if words[0].startswith("stack=") else ("stack=base",)
    assert world.repro("versions", CASE, *stack, *words) == 2
    assert said in capsys.readouterr().err
    assert world.launched == []


def test_what_is_published_is_read_and_graded_once_a_search(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every probe read and graded all that is published of its case anew: three quarters of the controller's time."""
    from repro_matrix.grading import regrade as again
    from repro_matrix.results.store import Store

    baseline = tmp_path / "published"
    monkeypatch.setattr(own_results, "history", REAL_HISTORY)
    monkeypatch.setattr(project, "published", lambda: [])

    def probing(folder: Path) -> Prober:
        asked = ask([f"case={CASE}", "stack=base", f"results={folder}"])
        return Prober(asked, lambda text: None, threading.Event(), ["unfixed"])

    with probing(baseline) as prober:
        prober.probe(Target("4.40.0", "base+transformers@4.40.0"))
    monkeypatch.setattr(project, "published", lambda: [baseline])
    (stored,) = Store(baseline).documents()
    read: list[Path] = []
    graded: list[str] = []
    took, grade = Store.read, again.outcomes_of
    monkeypatch.setattr(Store, "read", lambda self, path, **how: read.append(path) or took(self, path, **how))
    monkeypatch.setattr(again, "outcomes_of", lambda d, *a: graded.append(d["path"]) or grade(d, *a))
    with probing(tmp_path / "own") as prober:
        for release in ("4.41.0", "4.42.0", "4.43.0"):
            prober.probe(Target(release, f"base+transformers@{release}"))
    assert [str(path) for path in read].count(stored["path"]) == 1
    assert graded.count(stored["path"]) == 1
