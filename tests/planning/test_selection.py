"""Selection and enumeration: every cell once, nothing but what was requested; named matrices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError
from repro_matrix.paths import CONF, CONFIG_PATH
from repro_matrix.planning import cells as matrix
from repro_matrix.results import runs
from repro_matrix.runner import session

CATALOGUE = catalogue.load()
CASES = sorted(CATALOGUE.cases)
PRESETS = sorted(path.stem for path in (CONF / "matrix").glob("*.yaml"))


def cells(*texts: str) -> list[matrix.Cell]:
    return session.make_request(texts).cells


def test_everything_is_every_case_on_its_axes() -> None:
    expected = sum(len(c.axes.model) * len(c.axes.strategy) for c in CATALOGUE.cases.values())
    assert len(cells()) == expected == len(set(cells()))


def test_area_and_silent_select_cases_by_their_files() -> None:
    everything = {cell.case for cell in cells()}
    silent = {cell.case for cell in cells("silent=true")}
    assert silent == {name for name in CASES if CATALOGUE.cases[name].silent} != set()
    assert {cell.case for cell in cells("silent=false")} == everything - silent
    areas = {CATALOGUE.cases[cell.case].area for cell in cells("area=saving,loading")}
    assert areas == {"saving", "loading"}
    assert {cell.case for cell in cells("area=loading", "silent=true")} < silent
    for wrong in ("area=dta", "silent=maybe", "silent=true,false"):
        with pytest.raises(ConfigError, match=wrong):
            cells(wrong)


def test_every_case_declares_its_area() -> None:
    assert [name for name in CASES if not CATALOGUE.cases[name].area] == []


@pytest.mark.parametrize("named", [True, False])
@given(
    models=st.lists(st.sampled_from(sorted(CATALOGUE.models)), min_size=1, unique=True),
    strategies=st.lists(st.sampled_from(sorted(CATALOGUE.strategies)), min_size=1, unique=True),
)
def test_case_that_is_named_takes_any_model_and_a_glob_only_narrows(
    named: bool, models: list[str], strategies: list[str]
) -> None:
    selection = overrides.Selection(
        case=["train-step"] if named else ["*"], model=models, strategy=strategies
    )
    expected = {cell for cell in cells() if cell.model in models and cell.strategy in strategies}
    if not named and not expected:  # no case lists them
        with pytest.raises(ConfigError, match="has no cell"):
            matrix.enumerate_cells(CATALOGUE, selection)
        return
    found = matrix.enumerate_cells(CATALOGUE, selection)
    assert (
        len(found) == len(set(found)) == (len(models) * len(strategies) if named else len(expected))
    )
    assert named or set(found) == expected


@pytest.mark.parametrize("slug", CASES)
def test_named_case_takes_the_strategies_of_its_file_and_refuses_others(slug: str) -> None:
    case = CATALOGUE.cases[slug]
    known = {cell.strategy for cell in cells(f"case={slug}", "strategy=*")}
    named = {
        *case.axes.strategy,
        *(each.strategy for each in case.variants.values() if each.strategy),
    }
    assert (
        {*case.axes.strategy}
        <= known
        == named - ({"fsdp2"} if case.options.get("wrap") == "size" else set())
    )
    for name in CATALOGUE.strategies.keys() - known:
        with pytest.raises(ConfigError, match=rf"strategy={name}: case {slug}: .*there are: "):
            cells(f"case={slug}", f"strategy={name}")


def test_strategies_of_several_named_cases_are_those_that_each_supports() -> None:
    found = {cell.where for cell in cells("case=train-step,zero3-device-map", "strategy=ddp,zero3")}
    assert {where.rpartition("/")[2] for where in found} == {"ddp", "zero3"}
    devices = cells("case=zero3-device-map,train-step", "strategy=ddp,zero3")
    assert {cell.strategy for cell in devices if cell.case == "zero3-device-map"} == {"zero3"}
    for words in (
        ("case=train-step,zero3-device-map", "strategy=ddp"),  # one case would have no cell
        ("case=zero2-two-backwards,zero3-device-map", "strategy=zero2,fsdp"),
    ):
        with pytest.raises(ConfigError, match="unknown strategy of this case"):
            cells(*words)


def test_keys_of_a_flag_sweep_are_unique_and_safe_as_paths() -> None:
    found = [
        cell.key
        for cell in cells(
            "case=qwen15-fsdp-norm-shard", "flags.use_cache=true,false", "flags.call=inner,root"
        )
    ]
    assert len(found) == len(set(found)) == 4
    assert all(key.count("/") == 1 and ".." not in key for key in found)
    swept = cells("flags.use_cache=true,false")
    assert swept and all("use_cache" in CATALOGUE.cases[cell.case].flags for cell in swept), (
        "cases without it have no cell"
    )


def test_variants_of_always_has_the_unfixed_one() -> None:
    case = CATALOGUE.cases["qwen15-fsdp-norm-shard"]
    assert matrix.variants_of(case, ["root-call"]) == ["unfixed", "root-call"]
    assert matrix.variants_of(case, None) == list(case.variants)


# -- named matrices


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_has_a_comment_and_cells(preset: str) -> None:
    assert cells(f"+matrix={preset}")
    head = (CONF / "matrix" / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    assert head[0] == "# @package _global_" and head[1].startswith("# ")


def test_reproducing_stacks_are_those_of_stored_measurements() -> None:
    found = session.reproduces_on(
        CATALOGUE, {"qwen15-fsdp-kv-cache", "fsdp-tied-embeddings", "train-step"}
    )
    assert found["qwen15-fsdp-kv-cache"] == [
        "colossalai",
        "torch2.2-tf4.39",
    ]  # nowhere else but in version maps of it
    assert {"current", "torch2.2-tf4.39"} < set(found["fsdp-tied-embeddings"])
    assert found["train-step"] == ["current"]  # never reproduces: where its file says
    placed = cells("case=qwen15-fsdp-kv-cache,fsdp-tied-*", "stack=reproducing")
    expected = {
        (case, stack) for case, stacks in found.items() for stack in stacks if case != "train-step"
    }
    assert {(cell.case, cell.stack) for cell in placed} == expected


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (["current+peft@0.1"], ["current+peft@0.1"]),  # reproduced in a version map alone
        (["current+peft@0.1", "torch2.6-tf4.51"], ["torch2.6-tf4.51"]),
        (["newest", "current"], ["current"]),  # a floating stack is whatever the index holds today
    ],
)
def test_reproduces_on_prefers_stacks_with_a_lock(
    stored: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(stack: str) -> Any:
        return SimpleNamespace(
            case="train-step",
            first=True,
            counts={"reproduced": 1},
            stack=SimpleNamespace(name=stack),
        )

    monkeypatch.setattr(runs, "measured_rows", lambda: map(row, stored))
    assert session.reproduces_on(CATALOGUE, {"train-step"}) == {"train-step": expected}


def test_the_command_line_wins_over_a_preset() -> None:
    assert compose_run(["+matrix=nightly"]).repeat == 3
    assert compose_run(["repeat=1", "+matrix=nightly"]).repeat == 1
    assert {cell.stack for cell in cells("+matrix=seeds", "stack=current")} == {"current"}
    assert {cell.case for cell in cells("+matrix=seeds", "case=train-step", "model=qwen-7b")} == {
        "train-step"
    }
    # A model of the line narrows what a preset's cases list; it does not put every case on that
    # model.
    narrowed = cells("+matrix=seeds", "model=qwen-7b")
    assert {cell.model for cell in narrowed} == {"qwen-7b"}
    assert all("qwen-7b" in CATALOGUE.cases[cell.case].axes.model for cell in narrowed)


def test_presets_add_up_and_a_cell_is_measured_once() -> None:
    both = cells("+matrix=[smoke,nightly]")
    assert (
        len(both)
        == len(set(both))
        == len(set(cells("+matrix=smoke")) | set(cells("+matrix=nightly")))
    )


HEAD = "# @package _global_\n"


@pytest.mark.parametrize(
    ("words", "preset", "message"),
    [
        (["list", "case=qwen15-fsdp-norm-shrd"], None, "did you mean 'qwen15-fsdp-norm-shard'"),
        (["list", "flags.use_cach=true"], None, "did you mean 'use_cache'"),
        (["list", "case=nothing-*"], None, "unknown case 'nothing-*'"),
        (["list", "not an override"], None, "not NAME=VALUE"),
        (["list", "hardware=cpu,auto"], None, "auto cannot be combined"),
        (["list", "ranks=0"], None, "not a number of ranks"),
        (["list", "case=qwen15-fsdp-norm-shard", "flags.call=innr"], None, "did you mean 'inner'"),
        (["list", "case=train-step", "flags.clip=yes"], None, "takes a number"),
        (["list", "+matrix=sedes"], None, "unknown matrix 'sedes'; did you mean 'seeds'?"),
        (["matrix", "matrix=seeds"], None, "+matrix=seeds"),
        (["list", "+matrix=seeds", "matrix.seeds.stak=x"], None, "'stak' is not in"),
        (
            ["list", "+matrix=seeds", "+matrix.seeds.model=qwen-7"],
            None,
            "seeds.yaml: matrix.seeds: unknown model",
        ),
        (
            ["bisect", "fsdp-generate", "+matrix=seeds", "--good", "4.40", "--bad", "4.50"],
            None,
            "+matrix=seeds",
        ),
        (
            ["list", "+matrix=bad"],
            HEAD + "matrix: {b: {modle: x}}",
            "bad.yaml: matrix.b: unknown key 'modle'",
        ),
        (
            ["list", "+matrix=bad"],
            HEAD + "matrix: {b: {case: [unknwon]}}",
            "matrix.b: unknown case 'unknwon'",
        ),
        (
            ["list", "+matrix=bad"],
            HEAD + "matrix: {b: {case: [train-step}}",
            "bad.yaml:2: not valid YAML",
        ),
        (
            ["list", "+matrix=bad"],
            HEAD + "matrix: {b: {hardware: cpu}, c: {hardware: gpu8}}",
            "different hardware",
        ),
        (
            ["list", "+matrix=bad"],
            HEAD,
            "+matrix=bad: it has no block",
        ),  # it stood for the whole catalogue
        (
            ["list", "+matrix=bad"],
            "matrix: {b: {case: train-step}}",
            "begins with the line '# @package _global_'",
        ),
    ],
)
def test_wrong_selection_exits_with_2_and_names_what_is_wrong(
    words: list[str],
    preset: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if preset is not None:
        monkeypatch.setenv(CONFIG_PATH, str(tmp_path))
        (tmp_path / "matrix").mkdir()
        (tmp_path / "matrix" / "bad.yaml").write_text(f"{preset}\n", encoding="utf-8")
    code, err = cli.main(words), capsys.readouterr().err
    assert code == 2 and message in err, err


def test_a_flag_of_the_line_is_for_the_blocks_that_have_it() -> None:
    found = cells("+matrix=smoke", "flags.lora=true")
    assert {cell.case for cell in found} == {"train-step"}
    with pytest.raises(ConfigError, match="unknown flag 'loar'"):
        cells("+matrix=smoke", "flags.loar=true")
