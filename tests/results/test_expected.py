"""results/expected: the table reads back as what was written, bad ones are refused, and all of it was measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.expectations import Expectation, text
from repro_matrix.errors import ConfigError
from repro_matrix.paths import CONF, EXPECTED

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
VARIANTS = st.sampled_from(["fix", "other-fix", "per-rank: [x]", "~"])
ENTRIES = st.builds(
    Expectation,
    verdicts=st.dictionaries(VARIANTS, st.sampled_from(["FIXED", "SIGNATURE_MISMATCH"]), min_size=1),
    cells=st.lists(WORDS, max_size=2),
    hardware=st.sampled_from(["cpu", "gpu1"]),
    capabilities=st.dictionaries(WORDS, st.booleans() | st.just("AVX2"), max_size=1),
    versions=st.just({"torch": ">=2.13,<2.14"}),
    measured_at=st.lists(st.builds(lambda v: {"torch": v}, st.sampled_from(["2.13", "2.6.0"])), min_size=1, max_size=2),
    reason=WORDS,
)


@given(st.lists(ENTRIES, min_size=1, max_size=3), st.data())
def test_expectations_text_reads_back(entries: list[Expectation], data: Any) -> None:
    said = WORDS | st.lists(WORDS, min_size=2, max_size=3)
    failure_ids = [data.draw(st.dictionaries(st.sampled_from(sorted(e.verdicts)), said)) for e in entries]
    entries = [e.model_copy(update={"failure_ids": seen}) for e, seen in zip(entries, failure_ids)]
    written = text("some-case", entries)
    for variant in {variant for entry in entries for variant in entry.verdicts}:
        assert written.count("\n  " + yaml.safe_dump([variant], default_flow_style=True).strip()[1:-1] + ": [") in (
            1,
            2,
        )
    assert table(written) == {"some-case": entries}


def table(written: str, name: str = "some-case") -> dict[str, list[Expectation]]:
    path = Path(f"results/expected/{name}.yaml")
    return {name: catalogue.parse_expectations(yaml.safe_load(written), path)}


GOOD = text("some-case", [Expectation(verdicts={"fix": "FIXED"}, measured_at=[{"torch": "2.13.0"}], reason="r")])


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("FIXED", "FIX_HODLS", "FIXED"),
        ("[FIXED]", "[FIXED, FIXED]", "2 columns for 1 ranges"),
        ("hardware", "hardwear", "hardware"),
        ("case: some-case", "case: other-case", "must be the file's name"),
        ("measured_at: [{torch: 2.13.0}]", "measured: []", "measured_at"),
    ],
)
def test_parse_expectations_invalid_table_is_refused(old: str, new: str, said: str) -> None:
    assert old in GOOD and table(GOOD)["some-case"]
    with pytest.raises(ConfigError, match=r"results/expected/some-case.yaml") as refused:
        table(GOOD.replace(old, new))
    assert said in str(refused.value)


def test_catalogue_refuses_expectations_in_a_case_file(tmp_path: Path) -> None:
    shutil.copytree(CONF, tmp_path / "conf")
    shutil.copytree(EXPECTED, tmp_path / "results" / "expected")
    assert catalogue.load(tmp_path / "conf").cases["train-step"].expect
    file = tmp_path / "conf" / "case" / "train-step.yaml"
    file.write_text(file.read_text() + "expect: []\n")
    table = tmp_path / "results" / "expected" / "train-step.yaml"
    table.with_stem("train-stepp").write_text(table.read_text())
    left_out = " ".join(catalogue.load(tmp_path / "conf").left_out)
    assert "case/train-step.yaml: expect: expectations are kept in results/expected/train-step.yaml" in left_out
    assert "train-stepp.yaml: unknown case 'train-stepp'" in left_out
