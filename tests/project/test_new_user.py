"""What a new user met with the README alone: nothing wrong is taken without a word, and messages say what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from judging import observation, ok, record
from repro_matrix.cli import main as cli
from repro_matrix.config.settings import compose_run
from repro_matrix.external.scripts import failure, show
from repro_matrix.grading.outcome import Outcome
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
        ("run", "what is to be run? A case (`repro list` shows them), ./train.py, or a command line after --"),
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


def test_arms_are_a_list_however_they_are_written() -> None:
    for text in ("arms=broken", "arms=[broken]"):
        assert compose_run([text]).arms == ["broken"]
    assert compose_run(["arms=broken,root-call"]).arms == ["broken", "root-call"]
    assert compose_run(["arms=null"]).arms is None


def test_one_is_not_several() -> None:
    assert [counted(number, "claim") for number in (0, 1, 2)] == ["0 claims", "1 claim", "2 claims"]


# -- scripts


def observed(*ranks: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a script's ranks showed: none has a check."""
    made = [
        {**ok(number), **rank, "record": record(number, checks=[], finished=True, **rank["record"])}
        if rank.get("record", {}) is not None and "record" in rank
        else {**ok(number, record=record(number, checks=[], finished=True)), **rank}
        for number, rank in enumerate(ranks)
    ]
    return {**observation(*made), "command_exit": 0, "printed": {}, **more}


def notes(observation: dict[str, Any]) -> str:
    return "\n".join(show._notes(observation))


def test_an_error_in_a_thread_is_the_failure_that_was_asked_for() -> None:
    log = {"logger": "threading", "level": "ERROR", "message": "ValueError: bad batch 7", "file": ""}
    seen = observed({"record": {"logs": [log]}}, {})
    asked = failure.judge(failure.error("ValueError: bad batch"), seen, "x")
    assert asked.outcome == "fires" and "in a thread" in asked.reason and asked.recognised[0].ranks == (0,)
    for other in ("KeyError: bad batch", "ValueError: good batch"):
        assert failure.judge(failure.error(other), seen, "x").outcome == "clean"


def test_a_traceback_of_a_rank_that_ended_well_is_said() -> None:
    tail = 'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n    f()\nKeyError: 7\n'
    assert "rank 1 printed a traceback of KeyError: 7 and ended with exit code 0" in notes(
        observed({}, {"log_tail": tail})
    )
    assert "traceback" not in notes(observed({}, {}))
    for ranks, said in ((({}, {"log_tail": tail}), True), (({}, {}), False)):
        made = {
            "observation": observed(*ranks),
            "outcome": Outcome("clean", "every rank ended with exit code 0").to_json(),
        }
        document: Any = {"attempts": [made], "failure": {"text": "KeyError"}, "command": "train.py", "stack": {}}
        assert ("a traceback" in list(show.lines(document))[1]) == said, "beside the answer, not only at the end"


def test_ranks_that_disagree_on_a_metric_are_said(tmp_path: Path) -> None:
    from repro_matrix.external.scripts.launch import printed

    for rank, values in enumerate((("1.0", "2.5"), ("2.5",), ("3.5",))):
        (tmp_path / f"{rank}.log").write_text("".join(f"loss: {value}\n" for value in values))
    logs = [(rank, tmp_path / f"{rank}.log") for rank in range(3)]
    found = printed(logs, failure.metric("loss > 9"))
    assert [item["value"] for item in found["metric"]] == [1.0, 2.5]  # the first rank's
    told = notes(observed({}, {}, {}, printed=found))
    assert "the ranks do not agree on the metric: rank 0: 2.5, rank 1: 2.5, rank 2: 3.5" in told
    assert "agree" not in notes(observed({}, {}, printed=printed(logs[:2], failure.metric("loss > 9"))))


def test_a_rank_without_a_record_may_have_deleted_it() -> None:
    assert "or deleted it" in notes(observed({"record": None}))


def test_a_hang_says_where_the_ranks_stood() -> None:
    stack = 'Thread 12 (idle): "MainThread"\n    wait (threading.py:320)\n    main (train.py:7)\n'
    told = "\n".join(show._stood(observed({"stack": stack}, {"stack": stack}, {"stack": None})))
    assert "ranks 0, 1 stood in:" in told and "main (train.py:7)" in told
    assert "rank 2 stood in: not known" in told


def test_json_calls_a_case_a_case_and_names_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from repro_matrix.paths import BASELINE
    from repro_matrix.records import paths as place
    from repro_matrix.results.rows import arm_rows
    from repro_matrix.results.store import Store

    assert cli.main(["show", "train-step", "model=qwen-7b", "strategy=ddp", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["case"] == "train-step" and "slug" not in told
    stored = next(Store(BASELINE).documents(cases=["train-step"]))
    assert all(Path(place.read(row["document"]).file).is_file() for row in arm_rows(stored))
