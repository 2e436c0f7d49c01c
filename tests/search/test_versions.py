"""`repro versions`: several variants from the same probes, with every boundary between stored results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from probing import CASE, World, before, world

__all__ = ["world"]
Capsys = pytest.CaptureFixture[str]
KEY_ERROR = "other_failure: KeyError in transformers.models.qwen2.modeling_qwen2.forward"


def mapped(world: World, capsys: Capsys, *words: str, code: int = 0) -> dict[str, Any]:
    actual = world.repro("versions", CASE, "stack=base", "variants=[root-call]", "--range", "..", *words, "--json")
    out = capsys.readouterr()
    assert actual == code, out.err
    return dict(json.loads(out.out))


def test_versions_boundary_has_a_stored_probe_on_each_side(world: World, capsys: Capsys) -> None:
    data = mapped(world, capsys, "--samples", "4")
    (edge,) = data["variants"]["unfixed"]["boundaries"]
    documents = {probe["release"]: probe["document"] for probe in data["probes"]}
    for side, answer in (("before", "passed"), ("after", "reproduced")):
        document = json.loads(Path(documents[edge[side]]).read_text(encoding="utf-8"))
        assert document["stack"]["versions"]["transformers"] == edge[side]
        assert document["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"] == answer
    assert data["variants"]["root-call"]["boundaries"] == []
    words = ("stack=base", "variants=[root-call]", "--range", "4.37..4.45", "--samples", "4")
    assert world.repro("versions", CASE, *words) == 0
    out = capsys.readouterr().out
    assert "| unfixed | 4.37.0–4.39.3 |" in out and "| unfixed | 4.40.0–4.45.0 |" in out
    assert "| root-call | 4.37.0–4.45.0 |" in out and "not probed: " in out


def test_versions_of_a_changing_history_has_every_segment(world: World, capsys: Capsys) -> None:
    bad = ("4.38.0", "4.41.0", "4.41.1", "4.44.0")
    world.history = lambda versions, variant: (
        "no such key" if variant != "unfixed" else "reproduced" if versions["transformers"] in bad else "passed"
    )
    data = mapped(world, capsys, "--exhaustive")
    reproducing = [s["probed"] for s in data["variants"]["unfixed"]["segments"] if s["answer"] == "reproduced"]
    assert reproducing == [["4.38.0"], ["4.41.0", "4.41.1"], ["4.44.0"]] and data["unprobed"] == []
    assert [s["answer"] for s in data["variants"]["root-call"]["segments"]] == [KEY_ERROR]


def test_versions_unknown_releases_widen_the_boundary(world: World, capsys: Capsys) -> None:
    world.uninstallable = {("transformers", "4.40.0")}
    world.history = lambda versions, variant: (
        "hang" if versions["transformers"] == "4.41.0" else "passed" if before(versions, "4.40") else "reproduced"
    )
    data = mapped(world, capsys, "--exhaustive")
    (edge,) = data["variants"]["unfixed"]["boundaries"]
    assert (edge["before"], edge["after"]) == ("4.39.3", "4.41.1")
    assert edge["unknown"] == ["4.40.0", "4.41.0"] and not edge["adjacent"]
    reasons = {item["release"]: item["reason"] for item in data["variants"]["unfixed"]["unknown"]}
    assert reasons["4.40.0"].startswith("cannot be installed") and reasons["4.41.0"].startswith("hang")


def test_versions_without_the_index_keeps_known_answers(
    world: World, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from repro_matrix.environment import stacks

    def resolve(spec: str, **_: Any) -> Any:
        if "4.41.1" in spec:
            raise stacks.StackError("infra", "no connection to the index")
        return world.resolve(spec)

    monkeypatch.setattr(stacks, "resolve", resolve)
    data = mapped(world, capsys, "--exhaustive", code=3)
    assert data["stopped"] == "no connection to the index" and "4.41.1" in data["unprobed"]
    assert [s["answer"] for s in data["variants"]["unfixed"]["segments"]] == ["passed", "reproduced"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--package", "transformes"), "'transformers'"), (("--range", "4.36"), "FIRST..LAST"),
     (("--range", "6..7"), "no release between"), (("model=*",), "Choose one by model=")],
)  # fmt: skip
def test_versions_bad_input_is_refused(world: World, capsys: Capsys, words: tuple[str, ...], message: str) -> None:
    assert world.repro("versions", CASE, "stack=base", *words) == 2
    assert message in capsys.readouterr().err and world.launched == []
