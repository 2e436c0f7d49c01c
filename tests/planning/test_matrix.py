"""Selection and enumeration: every cell once, nothing but what was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.errors import ConfigError
from repro_matrix.planning import cells as matrix

CATALOGUE = catalogue.load()
CASES = sorted(CATALOGUE.cases)


def cells(*texts: str) -> list[matrix.Cell]:
    return matrix.enumerate_cells(CATALOGUE, overrides.parse(texts))


def test_everything_is_every_case_on_its_axes() -> None:
    expected = sum(len(c.axes.model) * len(c.axes.strategy) for c in CATALOGUE.cases.values())
    assert len(cells()) == expected == len(set(cells()))


@pytest.mark.parametrize("named", [True, False])
@given(
    models=st.lists(st.sampled_from(sorted(CATALOGUE.models)), min_size=1, unique=True),
    strategies=st.lists(st.sampled_from(sorted(CATALOGUE.strategies)), min_size=1, unique=True),
)
def test_case_that_is_named_takes_any_combination_and_a_glob_only_narrows(
    named: bool, models: list[str], strategies: list[str]
) -> None:
    try:
        found = matrix.enumerate_cells(
            CATALOGUE, overrides.Selection(case=CASES if named else ["*"], model=models, strategy=strategies)
        )
    except ConfigError:
        found = []  # no case lists them
    if named:
        assert len(found) == len(set(found)) == len(CASES) * len(models) * len(strategies)
    else:
        assert set(found) == {cell for cell in cells() if cell.model in models and cell.strategy in strategies}


def test_keys_are_unique_and_safe_as_paths() -> None:
    found = [
        cell.key for cell in cells("case=qwen15-fsdp-norm-shard", "flags.use_cache=true,false", "flags.call=inner,root")
    ]
    assert len(found) == len(set(found)) == 4
    assert all(key.count("/") == 1 and ".." not in key for key in found)


def test_flag_sweep_leaves_out_cases_without_the_flag() -> None:
    found = cells("flags.use_cache=true,false")
    assert found and all("use_cache" in CATALOGUE.cases[cell.case].flags for cell in found)


def test_hydra_grammar() -> None:
    parsed = overrides.parse(
        ["case=glob(qwen15-*)", "model=qwen1.5-0.5b,qwen1.5-1.8b", "model.config.num_hidden_layers=4", "repeat=3"]
    )
    assert parsed.case == ["qwen15-*"] and parsed.model == ["qwen1.5-0.5b", "qwen1.5-1.8b"]
    assert parsed.patches == {"model": [(["config", "num_hidden_layers"], 4)]} and parsed.run == ["repeat=3"]


@pytest.mark.parametrize(
    "text, names",
    [
        ("case=qwen15-fsdp-norm-shrd", "did you mean 'qwen15-fsdp-norm-shard'"),
        ("model=qwen1.5-05b", "did you mean 'qwen1.5-0.5b'"),
        ("strategy=fspd", "did you mean 'fsdp'"),
        ("flags.use_cach=true", "did you mean 'use_cache'"),
        ("case=nothing-*", "unknown case 'nothing-*'"),
        ("not an override", "not NAME=VALUE"),
        ("hardware=cpu,auto", "auto cannot be combined"),
        ("ranks=0", "not a number of ranks"),
        ("model.config.x=1,2", "sweep a group"),
    ],
)
def test_bad_selections_name_what_is_wrong(text: str, names: str) -> None:
    with pytest.raises(ConfigError) as error:
        cells(text)
    assert names in str(error.value)


def test_a_flag_value_outside_its_choices() -> None:
    with pytest.raises(ConfigError, match="did you mean 'inner'"):
        cells("case=qwen15-fsdp-norm-shard", "flags.call=innr")


def test_unfixed_variant_is_always_run() -> None:
    case = CATALOGUE.cases["qwen15-fsdp-norm-shard"]
    assert matrix.variants_of(case, ["root-call"]) == ["unfixed", "root-call"]
    assert matrix.variants_of(case, None) == list(case.variants)
