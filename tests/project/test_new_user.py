"""What a new user met with the README alone: nothing wrong is taken without a word, and messages say what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.config.settings import compose_run
from repro_matrix.text import counted


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("list stack=torch2.2-tf4.93", "did you mean 'torch2.2-tf4.39'?"),
        ("list hardware=gpu88", "unknown hardware 'gpu88'; did you mean 'gpu8'?"),
        ("list shard=9/8", "shard=9/8: PART/PARTS"),
        ("list shard=1/8", "`repro matrix --dry-run shard=...`"),
        ("list model.config.num_hidden_layer=4", "no model has that key; did you mean 'num_hidden_layers'?"),
        ("matrix --dry-run model.config.num_hidden_layer=4", "did you mean 'num_hidden_layers'?"),
        ("matrix --dry-run model.config.num_hidden_layers=four", "'four' is not of type int"),
        ("matrix --dry-run model.config.num_hidden_layers=true", "True is not of type int"),
        ("show", "arguments are required: CASE (`repro show"),
        ("run", "Nothing to run. Name a case (`repro list`), a script (./train.py), or a command after --"),
        ("matrix fsdp-generate", "'fsdp-generate' is not NAME=VALUE; is case=fsdp-generate meant?"),
        ("list case=train-step --config-dir", "--config-dir"),
        ("report --baseline --output /nowhere/at/all/x.html", "/nowhere/at/all: there is no such folder"),
    ],
)  # fmt: skip
def test_nothing_wrong_is_taken_without_a_word(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    shown = capsys.readouterr()
    assert told in shown.err and "OVERRIDE" not in shown.err, shown.err


def test_a_key_that_transformers_knows_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "case=train-step", "+model.config.attention_dropout=0.1"]) == 0
    assert cli.main(["list", "case=train-step", "model.config.num_hidden_layers=4"]) == 0


def test_variants_are_a_list_however_they_are_written() -> None:
    for text in ("variants=unfixed", "variants=[unfixed]"):
        assert compose_run([text]).variants == ["unfixed"]
    assert compose_run(["variants=unfixed,root-call"]).variants == ["unfixed", "root-call"]
    assert compose_run(["variants=null"]).variants is None


def test_one_is_not_several() -> None:
    assert [counted(number, "claim") for number in (0, 1, 2)] == ["0 claims", "1 claim", "2 claims"]


# -- scripts


def test_json_calls_a_case_a_case_and_names_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from repro_matrix.paths import BASELINE
    from repro_matrix.records import paths as place
    from repro_matrix.results.rows import variant_rows
    from repro_matrix.results.store import Store

    assert cli.main(["show", "train-step", "model=qwen-7b", "strategy=ddp", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["case"] == "train-step" and "slug" not in told
    stored = next(Store(BASELINE).documents(cases=["train-step"]))
    assert all(Path(place.read(row["document"]).file).is_file() for row in variant_rows(stored))
