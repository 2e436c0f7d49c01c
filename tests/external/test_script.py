"""Somebody's own script: what is launched, what counts as its failure, and how that is judged. Pure."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.errors import ConfigError
from repro_matrix.external.scripts import command_line as command
from repro_matrix.external.scripts import failure, launch, options, show
from repro_matrix.external.scripts import known_failures as known
from repro_matrix.external.scripts.failure import Failure, judge
from repro_matrix.external.scripts.measure import Script, stored
from repro_matrix.external.scripts.traceback_text import tracebacks
from repro_matrix.launch.attempt_logs import CUT

WHERE = {"file": "/home/a/train.py", "line": 3, "function": "step", "module": "__main__", "place": "", "code": "x"}
UPSTREAM = {**WHERE, "file": "/v/site-packages/transformers/cache.py", "module": "transformers.cache",
            "place": "transformers.cache", "function": "get"}  # fmt: skip
PEER = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22437"


def raised(kind: str, message: str, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "module": "builtins", "bases": ["Exception"], "message": message,
            "frames": list(frames or (WHERE,)), "cause": None}  # fmt: skip


def rank(number: int, code: int | None = 0, error: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    record = {"schema": 2, "rank": number, "pid": 100 + number, "done": code == 0, "exception": error, "ended": 5.0,
              "phase": "body", "checks": [], "metrics": {}, "facts": {}, "warnings": [], "logs": [],
              "versions": {}}  # fmt: skip
    return {"rank": number, "pid": 100 + number, "exit_code": code, "signal": None, "ended_by": "self",
            "record": record, "log_tail": "", "stack": None, **more}  # fmt: skip


def seen(*ranks: dict[str, Any], command_exit: int = 0, **more: Any) -> dict[str, Any]:
    about = {"id": "a", "launcher": "torchrun", "command": [], "started": 0.0, "ended": 9.0, "wall_s": 9.0,
             "cpu_s": 1.0, "leftover": [], "seed": 0, "backend": "gloo", "world_size": len(ranks),
             "deadline_s": 60.0, "timed_out": False, "interrupted": False,
             "settings": {}, "hang": None}  # fmt: skip
    found = {"schema": 1, "attempt": about, "infra": None, "ranks": list(ranks), "command_exit": command_exit,
             "printed": {"log": [], "metric": [], "cut": False}}  # fmt: skip
    found["attempt"].update({key: more.pop(key) for key in list(more) if key in about})
    return {**found, **more}


def outcome(wanted: Failure, observation: dict[str, Any]) -> str:
    return judge(wanted, observation, "train").outcome


FAILED = seen(
    rank(0, 1, raised("RuntimeError", PEER)), rank(1, 1, raised("IndexError", "list index 3")), command_exit=1
)
FINE = seen(rank(0), rank(1))


# -- the failure


def test_an_error_is_that_of_the_rank_that_failed_first() -> None:
    assert outcome(failure.error("IndexError: list index"), FAILED) == "fires"
    assert outcome(failure.error("IndexError: other text"), FAILED) == "other_error"
    assert outcome(failure.error("RuntimeError: Connection closed"), FAILED) == "other_error"  # a peer's echo
    assert outcome(failure.error("IndexError"), FINE) == "clean"
    found = judge(Failure(), FAILED, "train")
    assert found.outcome == "fires" and found.primary is not None
    assert (found.primary.rank, found.primary.type) == (1, "IndexError")


def test_what_is_learned_of_one_error_is_no_other() -> None:
    """Alike but for numbers: the same. Another text, another type or another package: another failure."""
    once = seen(rank(0, 1, raised("ValueError", "size 512 of 3", WHERE, UPSTREAM)))
    known = failure.learned(judge(Failure(), once, "train"))
    assert known is not None and known.package == "transformers"
    for same, error in (
        (True, raised("ValueError", "size 1024 of 4", UPSTREAM)),
        (False, raised("ValueError", "sizes 512 of 3", UPSTREAM)),
        (False, raised("KeyError", "size 512 of 3", UPSTREAM)),
        (False, raised("ValueError", "size 512 of 3", WHERE)),
    ):
        assert outcome(known, seen(rank(0, 1, error))) == ("fires" if same else "other_error"), error


def test_exit_codes_hangs_and_lines() -> None:
    assert outcome(Failure("exit", code=3), seen(rank(0, 3), command_exit=1)) == "fires"
    assert outcome(Failure("exit", code=3), seen(rank(0, 4), command_exit=1)) == "other_error"
    late = seen(
        rank(0, None, ended_by="deadline", signal="SIGKILL"), timed_out=True, infra={"kind": "too slow", "message": ""}
    )
    assert outcome(Failure("hang", seconds=60), late) == "fires"
    assert outcome(failure.error("IndexError"), late) == "infra"
    assert outcome(failure.error("IndexError"), {**late, "infra": None}) == "hang"
    assert outcome(Failure("hang", seconds=60), FINE) == "clean"
    line = {"log": [{"rank": 1, "line": "it diverges now"}], "metric": []}
    assert outcome(failure.log("diverges"), {**FINE, "printed": line}) == "fires"
    assert outcome(failure.log("diverges"), FINE) == "clean"


def test_a_metric_by_its_last_value_and_never_without_one() -> None:
    def at(*values: float) -> dict[str, Any]:
        return {**FINE, "printed": {"log": [], "metric": [{"rank": 0, "value": v, "line": ""} for v in values]}}

    wanted = failure.metric("loss > 3.2")
    assert outcome(wanted, at(2.0, 3.3)) == "fires" and outcome(wanted, at(3.3, 3.1)) == "clean"
    assert outcome(wanted, at()) == "infra"  # the line never came: neither
    assert outcome(wanted, at(float("nan"))) == "other_error"
    crashed = {**seen(rank(0, 1)), "printed": at(3.3)["printed"]}
    assert outcome(wanted, crashed) == "other_error", "that step's loss is as high in a healthy run"


def test_numbers_that_json_has_not_are_no_healthy_ones() -> None:
    """``-inf`` is not more than 3.2, and no loss either."""

    def at(line: str, wanted: str) -> tuple[str, str]:
        value = launch.metric_of(line, failure.metric(wanted))
        found = {**FINE, "printed": {"log": [], "metric": [{"rank": 0, "value": value, "line": line}], "cut": False}}
        json.dumps(found, allow_nan=False)
        judged = judge(failure.metric(wanted), found, "train")
        return judged.outcome, judged.reason

    assert at("loss: -inf", "loss > 3.2") == ("other_error", "loss is -inf")
    assert at('{"acc": Infinity}', "acc < 0.5") == ("other_error", "acc is inf")
    assert at("loss: inf", "loss > 3.2") == ("fires", "loss is inf")


def test_who_ends_late_while_it_is_looked_at_has_not_ended_by_then() -> None:
    """A watcher lets ranks be that end between its two looks at the deadline."""

    def ended(after: float) -> str:
        ranks = [rank(0), rank(1)]
        ranks[1]["record"]["ended"] = after
        found = seen(*ranks, started=0.0)
        found["attempt"]["working_s"] = 2.0
        return outcome(Failure("hang", seconds=5), found)

    assert ended(6.9) == "clean" and ended(7.1) == "fires"


def test_lines_are_read_as_they_are_seen(tmp_path: Path) -> None:
    """Without colours; what a progress bar writes over itself is several lines; of several numbers the last counts."""

    def read(wanted: Failure, *logs: str) -> Any:
        paths = [(number, tmp_path / f"{number}.log") for number in range(len(logs))]
        for (_, path), text in zip(paths, logs):
            path.write_text(text, encoding="utf-8")
        found = launch.printed(paths, wanted)
        return judge(wanted, {**FINE, "printed": found}, "train")  # type: ignore[typeddict-item]

    red, plain = "\x1b[31m", "\x1b[0m"
    assert read(failure.log("KNOWN BAD"), f"{red}KNOWN{plain} BAD\n").outcome == "fires"
    assert read(failure.log("^KNOWN"), "10%\rKNOWN\n").reason == "KNOWN"
    assert read(failure.metric("loss > 3"), f"loss: 1.0\nloss: {red}12.5{plain}\n").outcome == "fires"
    assert read(failure.metric("loss > 3"), f"{red}loss{plain}: 12.5\r\n").outcome == "fires"
    assert read(failure.metric("loss > 3"), "loss: 0.5\rloss: 9.5\rdone\n").reason == "loss is 9.5"
    assert read(failure.metric("loss > 3"), "loss: 9 then loss: 0.5\n").outcome == "clean"
    assert read(failure.metric("loss > 3"), "loss: 3,400.5\n").infra == "no-proof", "not 3"
    assert read(failure.metric("loss > 3"), "loss: 1.2.3\n").infra == "no-proof"
    gone = CUT.decode() + "x\n"
    assert read(failure.metric("loss > 3"), gone, "loss: 0.1\n").infra == "no-proof", "rank 0 may have said another"
    assert read(failure.metric("loss > 3"), gone + "loss: 0.1\n", "loss: 9\n").outcome == "clean"
    assert read(failure.metric("loss > 3"), gone, "loss: 9\n").infra == "no-proof"
    assert read(failure.log("never"), "y" * (1 << 20) + "never\n").infra == "no-proof", "so long a line is not read"


def test_the_command_may_fail_alone_and_nothing_may_run() -> None:
    assert outcome(Failure(), seen(rank(0), command_exit=1)) == "fires"
    assert outcome(failure.error("IndexError"), seen(rank(0), command_exit=1)) == "other_error"
    assert outcome(Failure(), seen(rank(0, None), infra={"kind": "launch", "message": "no rank"})) == "infra"
    assert outcome(Failure(), seen(rank(0), interrupted=True)) == "infra"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("loss 3.5", 3.5), ("loss: 3.5,", 3.5), ("step 3 loss=1e-3 lr 2", 1e-3), ('{"loss": 2, "x": 1}', 2.0),
        ("{'loss': 3.25, 'epoch': 1}", 3.25), ("eval_loss 3.5", None), ("loss is bad", None), ("loss nan", "nan"),
        ("rank 0 LOSS -0.5", -0.5),
    ],
)  # fmt: skip
def test_the_number_of_a_line(line: str, value: float | str | None) -> None:
    found = launch.metric_of(line, failure.metric("loss > 3.2"))
    assert str(found) == "nan" if value == "nan" else found == value


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_any_number_is_read_back(number: float) -> None:
    for line in (f"loss={number!r}", f"step 1 loss: {number!r} lr=1", f'{{"loss": {number!r}}}'):
        assert launch.metric_of(line, failure.metric("loss")) == float(repr(number))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: failure.error("no type"), "TYPE: REGEX"),
        (lambda: failure.error("ValueError: ("), "no regular expression"),
        (lambda: failure.error("Exception: x"), "every error's"),
        (lambda: failure.log("x*"), "matches an empty line"),
        (lambda: failure.metric("loss = 3"), "NAME > NUMBER"),
        (lambda: failure.metric("loss > many"), "no number"),
        (lambda: failure.metric("/loss .*/ > 3"), "one group"),
        (lambda: failure.like_log([b"all is well\n"], "a.log"), "no whole traceback"),
    ],
)
def test_a_definition_that_cannot_be(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


LOG = """\x1b[31m[rank0]: Traceback (most recent call last):\x1b[0m
[rank0]:   File "/v/site-packages/torch/distributed/c10d.py", line 9, in all_reduce
[rank0]:     work.wait()
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:2
[rank1]: Traceback (most recent call last):
[rank1]:   File "/v/lib/python3.11/site-packages/transformers/cache.py", line 31, in get
[rank1]:     return self.items[index]
[rank1]: IndexError: list index 7 out of range
"""


def test_a_failure_is_learned_from_a_log() -> None:
    found = failure.like_log([LOG.encode()], "failed.log")
    assert (found.type, found.package) == ("IndexError", "transformers")
    error = raised("IndexError", "list index 2 out of range", {**UPSTREAM, "function": "other"})
    assert outcome(found, seen(rank(0, 1, error))) == "fires"
    assert [one["type"] for one in tracebacks(LOG)] == ["RuntimeError", "IndexError"]
    assert tracebacks(LOG[: LOG.index("[rank1]: IndexError")])[1:] == []  # cut off before it says what it is


def test_what_nobody_saw_is_not_called_clean() -> None:
    """A line that may have stood in what was cut; a rank that never started, which ends with no exit code."""
    cut = {**FINE, "printed": {"log": [], "metric": [], "cut": True}}
    assert outcome(failure.log("no such line"), cut) == "infra"
    assert outcome(failure.log("no such line"), FINE) == outcome(Failure(), cut) == "clean"
    there = seen(rank(0), {**rank(1, None), "pid": None, "record": None, "ended_by": "launcher"})
    found = judge(Failure(), there, "train")
    assert (found.outcome, found.reason) == (
        "clean",
        "the command ended with exit code 0; 1 of 2 ranks were seen to",
    )
    died = seen(rank(0, 1, raised("IndexError", "list index 3")), there["ranks"][1], command_exit=1)
    notes = list(show._notes(died))  # type: ignore[arg-type]
    assert len(notes) == 1 and "rank 1 was not seen" in notes[0]  # and not that it said what follows from rank 0's


def test_settings_may_stand_before_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", f"results={tmp_path}", str(tmp_path / "none.py"), "--nproc", "2"]) == 2
    assert f"{tmp_path}/none.py: there is no such script" in capsys.readouterr().err


# -- the command


def test_command_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    made = command.of_script(str(script), 2, "--lr '1 2'")
    assert made.argv == (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        "--lr",
        "1 2",
    )
    assert (made.name, made.nproc, made.plain) == ("train", 2, False)
    for words, argv, nproc, plain in (
        (f"torchrun --nproc_per_node=4 {script}", ("-m", "torch.distributed.run"), 4, False),
        (f"python -m torch.distributed.run --nproc-per-node 3 {script}", ("-m", "torch.distributed.run"), 3, False),
        (f"accelerate launch --cpu --num_processes 2 {script}", ("-m", "accelerate.commands.launch"), 2, False),
        (f"deepspeed --num_gpus 2 {script} --x", ("-m", "deepspeed.launcher.runner"), 2, False),
        (f"python3.11 {script} --x", (str(script), "--x"), 1, True),
        ("python -m some.train", ("-m", "some.train"), 1, True),
    ):
        found = command.of_words(words.split())
        assert (found.argv[:2], found.nproc, found.plain) == (argv, nproc, plain), words
    assert command.of_words(["torchrun", str(script)]).nproc == 1
    assert command.of_words(["torchrun", "--nproc-per-node", "auto", str(script)], 2).nproc == 2


def test_what_cannot_be_launched_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("x = 1\nif True\n    pass\n")
    Path("good.py").write_text("print(1)\n")
    monkeypatch.setattr("repro_matrix.external.scripts.launch.launch", lambda *a: pytest.fail("launched"))
    for words, said in (
        (["./trian.py"], "there is no such script; did you mean 'train.py'"),
        (["./train.py"], "./train.py:2: expected ':': if True"),
        (["."], "unknown case"),
        (["./good.py", "--nproc", "0"], "not a number of at least 1"),
        (["./good.py", "--error", "A: b", "--exit", "3"], "--error and --exit"),
        (["./good.py", "--exit", "300"], "ends with 1 to 255"),
        (["./good.py", "--metric", "loss > nan"], "nothing is more or less than nan"),
        (["./good.py", "--hang", "soon"], "no number of seconds"),
        (["./good.py", "--like", "no.log"], "--like no.log: there is no such file"),
        (["./good.py", "--metric", "loss"], "NAME > NUMBER"),
        (["./good.py", "model=a"], "says nothing of a script"),
        (["./good.py", "stack=torhc2.2-tf4.39"], "did you mean 'torch2.2-tf4.39'"),
        (["./good.py", "--args", "'"], "--args"),
        (["--", "torchrun", "--nproc-per-node", "auto", "good.py"], "--nproc N before the --"),
        (["--", "sbatch", "x.sh"], "cannot be launched"),
        (["--", "accelerate", "config"], "accelerate launch"),
        (["--"], "after -- stands a command"),
        (["qwen15-fsdp-kv-cache", "--error", "A: b"], "is a case"),
    ):
        assert cli.main(["run", *words]) == 2, words
        assert said in capsys.readouterr().err, words


def test_a_command_line_keeps_its_own_options_and_overrides_stand_before_it() -> None:
    from repro_matrix.cli import options as arguments
    from repro_matrix.cli import run

    parser = arguments.Parser(prog="repro run")
    run.configure(parser)
    args = arguments.parse(parser, ["repeat=2", "--json", "--", "python", "x.py", "--json", "exit=3", "--", "y"])
    assert args.command == ["python", "x.py", "--json", "exit=3", "--", "y"] and args.json
    assert (args.case, args.words[-3:]) == ("repeat=2", ["exit=3", "--", "y"])
    assert options.asked(args)
    assert not options.asked(argparse.Namespace(command=(), module=False, case="train-step"))


def test_what_is_stored_and_is_no_measurement_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that did not finish, by a text that looks like yes: it had been taken for clean."""
    file = tmp_path / "stored.json"
    monkeypatch.setattr(Script, "path", lambda self, stack: file)
    script = Script(command.of_script(__file__, 2, "", False), Failure(), tmp_path)
    stack: Any = None
    document: dict[str, Any] = {
        "schema": 1, "kind": "script", "script": "x", "command": "x", "failure": {}, "env": {}, "nproc": 2, "stack": {},
        "hardware": {}, "provenance": {},
        "attempts": [{"observation": copy.deepcopy(FINE), "outcome": judge(Failure(), FINE, "x").to_json()}],
    }  # fmt: skip
    file.write_text(json.dumps(document))
    found = stored(script, stack)
    assert found and found["attempts"][0]["outcome"]["outcome"] == "clean"
    document["attempts"][0]["observation"]["ranks"][0]["record"]["done"] = "no"
    file.write_text(json.dumps(document))
    assert stored(script, stack) is None


def test_the_json_of_a_script_says_where_it_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    made = {"attempts": [{"observation": FAILED, "outcome": judge(Failure(), FAILED, "t").to_json()}]}
    monkeypatch.setattr("repro_matrix.external.scripts.measure.measure", lambda *given, **more: (made, 0))
    assert cli.main(["run", "./t.py", "--nproc", "2", "--json", f"results={tmp_path / 'r'}"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["error_at"] == f"{WHERE['file']}:3" and told["document"].endswith(".json")


def test_ranks_said_twice_must_agree(tmp_path: Path) -> None:
    """`--nproc 2 -- torchrun x.py` started one rank, and said clean."""
    (script := tmp_path / "x.py").write_text("")
    with pytest.raises(ConfigError, match=r"starts 1 rank\(s\), and --nproc says 2"):
        command.of_words(["torchrun", str(script)], 2)
    assert command.of_words(["torchrun", "--nproc-per-node", "2", str(script)], 2).nproc == 2
    assert command.of_words(["torchrun", "--nproc-per-node=gpu", str(script)], 4).nproc == 4


def test_a_failure_of_the_catalogue_is_recognised_in_a_script() -> None:
    ddp = {**WHERE, "file": "/v/site-packages/torch/nn/parallel/distributed.py", "function": "_pre_forward",
           "module": "torch.nn.parallel.distributed", "place": "torch.nn.parallel.distributed"}  # fmt: skip
    said = "Expected to have finished reduction in the prior iteration before starting a new one."
    shipped = catalogue.load().cases.values()

    def of(*errors: tuple[str, str, dict[str, Any]]) -> list[str]:
        attempts = [{"observation": seen(rank(0, 1, raised(*error)), command_exit=1)} for error in errors]
        judged = [{**each, "outcome": judge(Failure(), each["observation"], "t").to_json()} for each in attempts]
        return known.cases(judged, shipped)  # type: ignore[arg-type]

    assert of(("RuntimeError", said, ddp)) == ["ddp-unfinished-reduction"]
    assert of(("RuntimeError", said, WHERE)) == [], "the script's own words"
    assert of(("ValueError", said, ddp)) == of() == []
