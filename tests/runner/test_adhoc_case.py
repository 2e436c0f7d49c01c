"""A user's script as an ad-hoc case: what is launched, what counts as its failure, and how that is
graded."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.cli import options, script_arguments
from repro_matrix.config import catalog
from repro_matrix.config.schema import VARIANT, AdhocCase
from repro_matrix.errors import ConfigError
from repro_matrix.grading.grade import grade
from repro_matrix.launch.attempt import CUT
from repro_matrix.launch.torchrun import metric_in, printed
from repro_matrix.records.outcome import Outcome
from repro_matrix.runner import adhoc_case
from repro_matrix.runner.adhoc_case import known_failures
from repro_matrix.runner.script_failure import (
    ScriptFailure,
    error,
    failure_by_exit_code,
    failure_in_log,
    hang,
    learned,
    metric,
)
from repro_matrix.search.script_prober import describe_probe_result
from script_observations import FAILED, FINE, UPSTREAM, WHERE, of_attempt, raised, rank, seen

ANY = ScriptFailure()
Json = dict[str, Any]


def case_of(failure: ScriptFailure) -> AdhocCase:
    command = adhoc_case.Command(("train.py",), 2, False, "train", "train.py")
    return adhoc_case.Script(command, failure, Path("results"), 60.0).case()


def graded(failure: ScriptFailure, observation: Json) -> Outcome:
    case = case_of(failure)
    return grade(case, VARIANT, observation, {case.slug: case})  # type: ignore[arg-type]


def values(*numbers: float, rank_: int = 0, **more: Any) -> Json:
    lines = [{"rank": rank_, "value": number, "line": ""} for number in numbers]
    return {"printed": {"log": [], "metric": lines, "cut": False, **more}}


def infra(kind: str, *ranks: Json) -> Json:
    return seen(*ranks, infra_error={"kind": kind, "message": ""})


LATE = seen(rank(0, None, terminated_by="timeout", signal="SIGKILL"), timed_out=True)
SLOW = {**LATE, "infra_error": {"kind": "timeout_while_progressing", "message": ""}}
CRASH = seen(rank(0, 1))
IN_THREAD = seen(rank(0))
IN_THREAD["ranks"][0]["record"]["threads"] = [raised("ValueError", "bad value 3", WHERE)]


@pytest.mark.parametrize(
    ("failure", "observation", "outcome"),
    [
        (error("IndexError: list index"), FAILED, "reproduced"),
        (
            error("RuntimeError: Connection closed"),
            FAILED,
            "other_failure",
        ),  # follows from the other rank's
        (error("IndexError"), FINE, "passed"),
        (error("ValueError: bad value"), IN_THREAD, "reproduced"),
        (
            error("KeyError"),
            IN_THREAD,
            "passed",
        ),  # the rank went on: only an error that was described counts
        (ANY, IN_THREAD, "passed"),
        (ANY, FAILED, "other_failure"),
        (ANY, FINE, "passed"),
        (failure_by_exit_code(3), seen(rank(0, 3), command_exit=1), "reproduced"),
        (failure_by_exit_code(3), seen(rank(0, 4), command_exit=1), "other_failure"),
        (hang(60), LATE, "reproduced"),
        (hang(60), SLOW, "reproduced"),
        (error("IndexError"), SLOW, "infra_error"),
        (error("IndexError"), LATE, "hang"),
        (metric("loss > 3.2"), {**FINE, **values(2.0, 3.3)}, "reproduced"),
        (metric("loss > 3.2"), {**FINE, **values(3.3, 3.1)}, "passed"),
        (metric("loss > 3.2"), {**FINE, **values()}, "infra_error"),
        (metric("loss > 3.2"), {**FINE, **values(float("nan"))}, "other_failure"),
        (metric("loss > 3.2"), {**CRASH, **values(3.3)}, "other_failure"),  # an earlier step's loss
        (metric("loss > 3.2"), {**FINE, **values(9.0, rank_=1, cut=True)}, "infra_error"),
        (failure_in_log("no such line"), {**FINE, **values(cut=True)}, "infra_error"),
        (ANY, seen(rank(0), command_exit=1), "other_failure"),
        (ANY, seen(rank(0), interrupted=True), "infra_error"),
        (error("IndexError"), infra("launch", rank(0, None)), "infra_error"),
        (
            error("OutOfMemoryError"),
            infra("memory", rank(0, 1, raised("OutOfMemoryError", "CUDA"))),
            "reproduced",
        ),
        (ANY, infra("import", rank(0, 1, raised("ImportError", "no x"))), "other_failure"),
        (
            ANY,
            infra(
                "gpu_failure", rank(0, 1, raised("RuntimeError", "CUDA error: uncorrectable ECC"))
            ),
            "infra_error",
        ),
    ],
)
def test_grade_script_outcome(failure: ScriptFailure, observation: Json, outcome: str) -> None:
    found = graded(failure, observation)
    assert found.outcome == outcome, found


@pytest.mark.parametrize(
    ("same", "other"),
    [
        (True, raised("ValueError", "size 1024 of 4", UPSTREAM)),
        (False, raised("ValueError", "sizes 512 of 3", UPSTREAM)),
        (False, raised("ValueError", "size 512 of 3", WHERE)),
    ],
)
def test_learned_failure_matches_only_itself(same: bool, other: Json) -> None:
    once = seen(rank(0, 1, raised("ValueError", "size 512 of 3", WHERE, UPSTREAM)))
    known = learned(graded(ANY, once), {"observation": once, "outcome": {}})  # type: ignore[typeddict-item]
    assert known is not None
    assert graded(known, seen(rank(0, 1, other))).outcome == (
        "reproduced" if same else "other_failure"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: error("no type"), "TYPE: REGEX"),
        (lambda: error("Exception: x"), "Name the type"),
        (lambda: failure_in_log("x*"), "matches an empty line"),
        (lambda: metric("loss = 3"), "NAME > NUMBER"),
        (lambda: metric("loss > many"), "not a number"),
        (lambda: metric("/loss .*/ > 3"), "one group"),
        (lambda: failure_by_exit_code(300), "1 to 255"),
    ],
)
def test_failure_definition_invalid_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -- what is read from logs


def user_command(failure: ScriptFailure) -> AdhocCase:
    return AdhocCase.model_construct(log=failure.log, metric=failure.metric)


@pytest.mark.parametrize(
    ("failure", "logs", "expected"),
    [
        (failure_in_log("KNOWN BAD"), ["\x1b[31mKNOWN\x1b[0m BAD\n"], ["KNOWN BAD"]),
        (metric("loss > 3"), ["loss: 1.0\nloss: \x1b[31m12.5\x1b[0m\n"], 12.5),
        (metric("loss > 3"), ["loss: 0.5\rloss: 9.5\rdone\n"], 9.5),
        (metric("loss > 3"), ["loss: 3,400.5\n"], None),
        (metric("loss > 3"), ["loss: 1.2.3\n"], None),
        (metric("loss > 3"), ["loss: 0.1\n", "loss: 9\n"], 0.1),  # the first rank that prints it
    ],
)
def test_printed_of_logs_has_lines_and_numbers(
    failure: ScriptFailure, logs: list[str], expected: Any, tmp_path: Path
) -> None:
    paths = [(number, tmp_path / f"{number}.log") for number in range(len(logs))]
    for (_, path), text in zip(paths, logs):
        path.write_text(text, encoding="utf-8")
    found = printed(paths, user_command(failure))
    if failure.metric is None:
        assert [item["line"] for item in found["log"]] == expected
    else:
        assert (found["metric"][-1]["value"] if found["metric"] else None) == expected
    paths[0][1].write_text(CUT.decode() + logs[0])
    assert printed(paths, user_command(failure))["cut"]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("loss 3.5", 3.5),
        ("loss: 3.5,", 3.5),
        ("step 3 loss=1e-3 lr 2", 1e-3),
        ('{"loss": 2, "x": 1}', 2.0),
        ("{'loss': 3.25, 'epoch': 1}", 3.25),
        ("eval_loss 3.5", None),
        ("loss is bad", None),
        ("rank 0 LOSS -0.5", -0.5),
        ("loss: inf", 1e308),
        ('{"loss": -Infinity}', -1e308),
    ],
)
def test_metric_in_a_line_is_its_number(line: str, value: float | None) -> None:
    wanted = metric("loss > 3.2").metric
    assert wanted and metric_in(line, wanted) == value


# -- the command


def test_command_lines_of_known_launchers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    made = adhoc_case.command_of_script(str(script), 2, "--lr '1 2'")
    assert made.argv[-3:] == (str(script), "--lr", "1 2") and (
        made.name,
        made.nproc,
        made.plain,
    ) == ("train", 2, False)
    for words, argv, nproc, plain in (
        (f"torchrun --nproc_per_node=4 {script}", ("-m", "torch.distributed.run"), 4, False),
        (
            f"python -m torch.distributed.run --nproc-per-node 3 {script}",
            ("-m", "torch.distributed.run"),
            3,
            False,
        ),
        (
            f"accelerate launch --cpu --num_processes 2 {script}",
            ("-m", "accelerate.commands.launch"),
            2,
            False,
        ),
        (f"deepspeed --num_gpus 2 {script} --x", ("-m", "deepspeed.launcher.runner"), 2, False),
        (f"python3.11 {script} --x", (str(script), "--x"), 1, True),
        ("python -m some.train", ("-m", "some.train"), 1, True),
    ):
        found = adhoc_case.command_of_words(words.split())
        assert (found.argv[:2], found.nproc, found.plain) == (argv, nproc, plain), words
    assert adhoc_case.command_of_words(["torchrun", str(script)]).nproc == 1
    assert (
        adhoc_case.command_of_words(["torchrun", "--nproc-per-node", "auto", str(script)], 2).nproc
        == 2
    )
    with pytest.raises(ConfigError, match="but --nproc is 3"):
        adhoc_case.command_of_words(["torchrun", "--nproc-per-node", "2", str(script)], 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./trian.py"], "there is no such script; did you mean 'train.py'"),
        (["./train.py"], "./train.py:2: expected ':': if True"),
        (["./good.py", "--error", "A: b", "--exit", "3"], "--error and --exit"),
        (["./good.py", "--hang", "soon"], "'soon' is not a valid float"),
        (["./good.py", "model=a"], "does not apply to a script"),
        (["./good.py", "--args", "'"], "--args"),
        (["--", "torchrun", "--nproc-per-node", "auto", "good.py"], "--nproc N before the --"),
        (["--", "accelerate", "config"], "accelerate launch"),
        (["--"], "No command after --"),
        (["qwen15-fsdp-kv-cache", "--error", "A: b"], "is for a script of your own"),
    ],
)
def test_run_bad_input_is_refused_before_a_launch(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("x = 1\nif True\n    pass\n")
    Path("good.py").write_text("print(1)\n")
    monkeypatch.setattr(
        "repro_matrix.runner.run.open_launcher", lambda name: pytest.fail("launched")
    )
    assert cli.main(["run", *words]) == 2
    assert message in capsys.readouterr().err


def test_command_after_dashes_keeps_its_options() -> None:
    words = ["repeat=2", "--json", "--", "python", "x.py", "--json", "exit=3", "--", "y"]
    args = options.Arguments(**cli.parse("run", words).params)
    assert args.command == ["python", "x.py", "--json", "exit=3", "--", "y"] and args.json
    assert script_arguments.names_script(args)


# -- run


class Lab:
    """A launcher with an invented observation."""

    name = "fake"

    observe: Any
    launched = 0

    def close(self) -> None: ...

    def launch(self, attempt: Any, stop: Any) -> Json:
        self.launched += 1
        return of_attempt(self.observe(stop), attempt)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    found = Lab()
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)\n")
    monkeypatch.setattr("repro_matrix.runner.run.open_launcher", lambda name: found)
    return found


@pytest.mark.parametrize(
    ("observation", "words", "code", "bisect_code"),
    [
        (FINE, [], 0, 0),
        (FAILED, [], 1, 1),
        (FAILED, ["--error", "IndexError"], 1, 1),
        (FAILED, ["--error", "KeyError"], 1, 125),
        (seen(rank(0), rank(1), infra_error={"kind": "disk", "message": ""}), [], 3, 125),
    ],
)
def test_run_exit_codes(
    observation: Json,
    words: list[str],
    code: int,
    bisect_code: int,
    lab: Lab,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab.observe = lambda stop: observation
    line = ["run", "./train.py", *words, "results=out"]
    assert cli.main([*line, "--json"]) == code
    data = json.loads(capsys.readouterr().out)
    assert Path(data["document"]).is_file() and len(data["attempts"]) == 1
    assert data["error_at"] == ("/home/a/train.py:3" if observation is FAILED else None)
    assert cli.main([*line, "--bisect-exit", "--resume"]) == bisect_code
    assert lab.launched == (
        1 if code != 3 else 2
    )  # what is stored is graded again, infra is launched again


def test_run_interrupted_before_a_result_exits_130(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(stop: Any) -> Json:
        if lab.launched == 1:  # a second signal would end the process that runs the tests
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(60)
        return seen(rank(0), interrupted=True)

    lab.observe = interrupted
    assert cli.main(["run", "./train.py", "repeat=2", "results=out"]) == 130
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "--resume" in err


def test_script_report_names_error_also_of_a_child_process() -> None:
    died = seen(rank(0, 1, raised("IndexError", "list index 3")), command_exit=1)
    child = seen(rank(0, log_tail="x\nIndexError: list index 3\n"))
    for found, part in ((died, "IndexError: list index #"), (child, "no rank raised it")):
        document: Any = {
            "stack": {},
            "variants": {
                VARIANT: {
                    "attempts": [
                        {
                            "observation": found,
                            "outcome": graded(error("IndexError: list"), found).to_json(),
                        }
                    ]
                }
            },
        }
        assert part in "\n".join(
            describe_probe_result(case_of(error("IndexError: list")), document)
        )


def test_script_report_has_the_last_lines_of_a_rank_that_raised_nothing_once() -> None:
    usage = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --nope\n"
    found = seen(rank(0, 2, log_tail=usage), command_exit=2)
    document: Any = {
        "stack": {},
        "variants": {
            VARIANT: {
                "attempts": [
                    {
                        "observation": found,
                        "outcome": graded(error("IndexError: list"), found).to_json(),
                    }
                ]
            }
        },
    }
    lines = list(describe_probe_result(case_of(error("IndexError: list")), document))
    assert (
        not any("first: " in line for line in lines)
        and sum(usage.split("\n")[0] in line for line in lines) == 1
    )


def test_known_failure_of_the_catalogue_is_recognized() -> None:
    ddp = {
        **WHERE,
        "file": "/v/site-packages/torch/nn/parallel/distributed.py",
        "function": "_pre_forward",
        "module": "torch.nn.parallel.distributed",
        "code_location": "torch.nn.parallel.distributed",
    }
    message = (
        "Expected to have finished reduction in the prior iteration before starting a new one."
    )
    shipped = catalog.load().cases.values()

    def slugs(*errors: tuple[str, str, Json]) -> list[str]:
        found = [seen(rank(0, 1, raised(*each)), command_exit=1) for each in errors]
        made: Any = [
            {"observation": each, "outcome": graded(ANY, each).to_json()} for each in found
        ]
        return known_failures(made, shipped)

    assert slugs(("RuntimeError", message, ddp)) == ["ddp-unfinished-reduction"]
    assert slugs(("RuntimeError", message, WHERE)) == [], "raised by the script"
    assert slugs(("ValueError", message, ddp)) == slugs() == []


def test_the_key_follows_what_the_script_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import os\nfrom helpers import data\nimport model.layers as layers\n"
    )
    Path("helpers.py").write_text("import deeper\n")
    Path("deeper.py").write_text("for")  # no Python
    Path("model").mkdir()
    Path("model/layers.py").write_text("x = 1\n")

    def key() -> str:
        command = adhoc_case.Command(
            ("train.py",), 2, False, "train", "train.py", script=Path("train.py")
        )
        return adhoc_case.Script(command, ANY, Path("results"), 60.0).request().cells[0].key

    before = key()
    Path("other.py").write_text("print(1)\n")
    assert key() == before
    for name in ("train.py", "helpers.py", "deeper.py", "model/layers.py"):
        Path(name).write_text(Path(name).read_text() + "# changed\n")
        before, changed = key(), before
        assert before != changed


@pytest.mark.parametrize(
    "text, imports",
    [
        ("import torch", []),
        ("import os, transformers\nif os.environ['A'] == '1': pass", ["transformers"]),
        ("import os\nos.environ['A'] = '1'\nimport torch", None),
        ("from os import environ\nenviron.setdefault('A', '1')", None),
        ("import settings", None),
    ],
)
def test_runs_with_noise_are_forked_unless_the_script_may_change_what_packages_read(
    tmp_path: Path, text: str, imports: list[str] | None
) -> None:
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "settings.py").write_text("import os\nos.environ |= {'A': '1'}")
    command = adhoc_case.command_of_script(str(tmp_path / "train.py"), 2)
    noise = adhoc_case.Script(command, ANY, tmp_path, trace={"REPRO_TRACE_NOISE": "1"})
    launch = noise.case().launch
    assert (launch.imports if launch.cold_start_reason is None else None) == imports
    for trace in (None, {}):
        assert (
            adhoc_case.Script(command, ANY, tmp_path, trace=trace).case().launch.cold_start_reason
        )
    (tmp_path / "torch.py").touch()
    assert noise.case().launch.cold_start_reason
