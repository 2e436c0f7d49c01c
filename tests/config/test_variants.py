"""Options and invariants that a catalogue may not hold: they are refused when it is loaded, with file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from repro_matrix.config import catalog as catalogue
from repro_matrix.errors import ConfigError


def edit(conf: Path, name: str, old: str, new: str) -> None:
    path = conf / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def complaint(conf: Path, repros: Path, **patches: Any) -> str:
    with pytest.raises(ConfigError) as error:
        catalogue.load(conf, repros, patches or None, strict=True)
    return str(error.value)


NORM = "case/qwen15-fsdp-norm-shard.yaml"


def test_a_mistyped_option_of_an_variant_is_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "options: {use_orig_params: false}", "options: {use_orig_param: false}")
    text = complaint(conf, repros)
    assert NORM in text and "variants.no-orig-params" in text and "did you mean 'use_orig_params'" in text


def test_a_value_that_an_option_does_not_take_is_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "  layer-wrap: {options: {wrap: layer}", "  layer-wrap: {options: {wrap: layers}")
    assert "did you mean 'layer'" in complaint(conf, repros)


def test_a_mistyped_option_of_a_case_and_of_a_strategy_is_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "options: {wrap: size, min_num_params: 2000}", "options: {wrap: size, min_params: 2000}")
    assert "did you mean 'min_num_params'" in complaint(conf, repros)
    edit(conf, NORM, "min_params: 2000", "min_num_params: two")
    assert "not of type int" in complaint(conf, repros)
    edit(conf, NORM, "min_num_params: two", "min_num_params: 2000")
    edit(conf, "strategy/fsdp.yaml", "sharding: FULL_SHARD", "sharding: FULL")
    assert "strategy/fsdp.yaml" in complaint(conf, repros)


@pytest.mark.parametrize(
    ("instead", "says"), [("", "key 'invariants' is missing"), ("invariants: {}", "invariants: none")]
)
def test_a_strategy_without_invariants_is_refused(conf: Path, repros: Path, instead: str, says: str) -> None:
    """Nothing could show that it was in effect: what it measured would be no evidence."""
    promised = "invariants: {parameters: whole, gradients: whole, updates: whole, collectives: [reduce]}"
    edit(conf, "strategy/ddp.yaml", promised, instead)
    text = complaint(conf, repros)
    assert "strategy/ddp.yaml" in text and says in text


def test_a_mistyped_option_on_the_command_line_is_refused(conf: Path, repros: Path) -> None:
    text = complaint(conf, repros, strategy=[(["options", "shardng"], "NO_SHARD")])
    assert "did you mean 'sharding'" in text
    found = catalogue.load(conf, repros, {"strategy": [(["options", "sharding"], "NO_SHARD")]})
    assert found.raw["strategy"]["fsdp"]["options"]["sharding"] == "NO_SHARD"
    assert "sharding" not in found.raw["strategy"]["ddp"]["options"]  # it has none


@pytest.mark.parametrize("twin", ["{}", "{flags: {call: inner}}", "{strategy: fsdp}", "{options: {wrap: size}}"])
def test_an_variant_that_changes_nothing_is_refused(conf: Path, repros: Path, twin: str) -> None:
    edit(conf, NORM, "\nclaims:", f"\n  twin: {twin}\nclaims:")
    text = complaint(conf, repros)
    assert "variants.twin" in text and "'unfixed'" in text and "changes nothing" in text


def test_equal_fix_variants_are_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "\nclaims:", "\n  again: {help: other words, flags: {call: root}}\nclaims:")
    assert "changes nothing" in complaint(conf, repros)


def test_a_strategy_says_where_it_runs() -> None:
    fsdp2 = catalogue.load().strategies["fsdp2"]
    assert fsdp2.needs_on("cuda") == ["torch>=2.4"] and fsdp2.needs_on("cpu") == ["torch>=2.4", "torch>=2.7"]


DDP = "case/ddp-unfinished-reduction.yaml"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (DDP, "\nclaims:", "\n  lie: {help: a lie, flags: {tuch: true}}\nclaims:"),  # a flag that is not declared
        (DDP, "\nclaims:", "\n  lie: {help: a lie, flags: {touch: 'yes'}}\nclaims:"),  # not one of its values
        (DDP, "\nclaims:", "\n  lie: {help: a lie, flags: {touch: false}}\nclaims:"),  # its default
        (DDP, "variant: find-unused", "variant: find"),  # a claim about a variant that there is not
        (DDP, "signatures:", "signatures: []\nignored:"),
        ("case/train-step.yaml", "checks:", "checks: []\n  ignored:"),
    ],
)
def test_case_that_could_show_nothing_is_refused(conf: Path, repros: Path, name: str, old: str, new: str) -> None:
    edit(conf, name, old, new)
    assert name in complaint(conf, repros)
