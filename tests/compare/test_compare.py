"""Comparisons of two trainings and bisections by their numbers: simulated traces, no process is
started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from probing import ScriptLab, before, lab, result, world
from repro_matrix.cli.main import main
from repro_matrix.compare import two_sides as compare
from repro_matrix.environment import stacks
from repro_matrix.launch.attempt import TRACE, Attempt
from repro_matrix.runner.adhoc_case import Script, command_of_script
from repro_matrix.runner.script_failure import ScriptFailure
from repro_matrix.search.prober import CellRunner
from script_observations import FINE, UPSTREAM, raised, rank, seen
from simulated import train

__all__ = ["lab", "world"]
Capsys = pytest.CaptureFixture[str]
Json = dict[str, Any]
FAILED = seen(rank(0, 1, raised("ValueError", "no data", UPSTREAM)), rank(1), command_exit=1)


class Lab(ScriptLab):
    """``plant``: what each stack plants into a training; None: the script trains nothing."""

    plant: Callable[[Mapping[str, str], Attempt], str | None] = staticmethod(
        lambda versions, attempt: ""
    )
    observation: Json = FINE

    def observe(self, versions: Mapping[str, str], attempt: Attempt) -> Json:
        folder, noise = Path(attempt.trace[TRACE]), attempt.trace.get("REPRO_TRACE_NOISE")
        folder.mkdir(parents=True)
        plant = self.plant(versions, attempt)
        if plant is not None:
            plant, _, scale = plant.partition(" times ")  # of a gradient
            strength, dropout = 100 * (float(scale or 1.01) - 1), plant == "other draws"
            how: Json = {
                "noise": int(noise) if noise else None,
                "strength": strength,
                "dropout": dropout,
            }
            train(folder, world=attempt.world_size, rank=0, plant=plant, **how)
        return self.observation if attempt.world_size == 2 else seen(rank(0))


RELEASES = ("compare", "./train.py", "stack=base", "--good", "4.39.3", "--bad", "4.41.0")
RANKS = ("compare", "./train.py", "stack=base", "--good-nproc", "1", "--bad-nproc", "2")


def since(release: str, plant: str) -> Callable[[Mapping[str, str], Attempt], str]:
    return lambda versions, attempt: "" if before(versions, release) else plant


def test_two_releases_differ_at_a_module_and_nothing_is_launched_twice(
    lab: Lab, capsys: Capsys
) -> None:
    lab.plant = since("4.40", "initial weights")
    data = result(lab.repro, capsys, *RELEASES, "--html", "page.html", code=1)
    assert data["verdict"] == "differs" and data["location"]["place"] == "layers.0.up.weight"
    assert (
        data["versions"] == {"transformers": ["4.39.3", "4.41.0"]}
        and data["location"]["stage"] == "initial weights"
    )
    page = Path("page.html").read_text()
    assert data["sentence"] in page and page.count("<tr") > 5 and "s attention" in page
    assert len(lab.launched) == 4 and [
        each.trace.get("REPRO_TRACE_NOISE") for each in lab.launched
    ] == [
        None,
        "1",
        "2",
        None,
    ]
    again = result(lab.repro, capsys, *RELEASES, code=1)
    assert (
        len(lab.launched) == 4
        and again["sentence"] == data["sentence"]
        and not again["bad"]["launched"]
    )
    shutil.rmtree(data["bad"]["trace"])  # as `rm -r` does to save space
    data = result(lab.repro, capsys, *RELEASES, code=1)
    assert data["bad"]["launched"] and len(lab.launched) == 5
    Path("part.py").write_text("edited since")
    for side, launched in (("good", 6), ("bad", 7)):
        with Path(data[side]["trace"], "trace-0.jsonl").open("a") as trace:
            trace.write(
                json.dumps(
                    {"k": "files", "files": {str(Path("part.py").absolute()): "another hash"}}
                )
                + "\n"
            )
        assert (
            result(lab.repro, capsys, *RELEASES, code=1)[side]["launched"]
            and len(lab.launched) == launched
        )
    assert result(lab.repro, capsys, *RELEASES, "--steps", "2", code=1)["good"][
        "launched"
    ]  # another window


def test_one_process_and_two_ranks_agree(lab: Lab, capsys: Capsys) -> None:
    data = result(lab.repro, capsys, *RANKS)
    assert data["verdict"] == "agrees" and 0 < data["location"]["largest"] < 1
    assert (data["good"]["ranks"], data["bad"]["ranks"]) == (1, 2)
    assert main([*RANKS, f"results={lab.folder / 'results'}"]) == 0
    assert capsys.readouterr().out.startswith(data["sentence"])


def test_arguments_and_scripts_tell_the_sides_apart(lab: Lab, capsys: Capsys) -> None:
    lab.plant = lambda versions, attempt: "buffer" if "--wrong" in attempt.command.argv else ""  # type: ignore[union-attr]
    words = ("compare", "./train.py", "stack=base", "--args", "--fast", "--bad-args", "--wrong")
    data = result(lab.repro, capsys, *words, code=1)
    assert data["location"]["stage"] == "buffer" and data["good"]["command"].endswith("--fast")
    shutil.copy("train.py", "other.py")
    data = result(lab.repro, capsys, "compare", "./train.py", "./other.py", "stack=base")
    assert data["bad"]["command"].endswith("./other.py") and data["verdict"] == "agrees"
    words = (
        "compare",
        "stack=base",
        "--bad-args",
        "--wrong",
        "--",
        "torchrun",
        "--nproc-per-node",
        "2",
        "train.py",
    )
    assert main([*words[:2], f"results={lab.folder / 'results'}", *words[2:]]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("./train.py", "stack=base"), "Both sides are the same"),
        (("./train.py", "stack=base", "--good", "base", "--bad", "bsae"), "no stack named 'bsae'"),
        (("./trian.py", "stack=base", "--bad-nproc", "1"), "did you mean 'train.py'"),
        (("./broken.py", "stack=base", "--bad-nproc", "1"), "broken.py"),
        (("./train.py", "./a.py", "./b.py"), "at most two scripts"),
        (("./train.py", "--bad-nprox", "1"), "--bad-nproc"),
        (("--bad-nproc", "1"), "script"),
        (("./train.py", "stack=base", "--bad", "4.99.0"), "has no release 4.99.0"),
    ],
)
def test_wrong_sides_are_refused_before_a_launch(
    lab: Lab, capsys: Capsys, words: tuple[str, ...], message: str
) -> None:
    Path("broken.py").write_text("for\n")
    assert lab.repro("compare", *words) == 2
    assert message in capsys.readouterr().err and not lab.launched


def test_script_that_trains_nothing_is_no_comparison(lab: Lab, capsys: Capsys) -> None:
    lab.plant = lambda versions, attempt: None
    assert (
        "Does it train?" in result(lab.repro, capsys, *RANKS, code=3)["err"]
        and len(lab.launched) == 1
    )
    lab.observation, lab.plant = (
        FAILED,
        lambda versions, attempt: None if attempt.world_size == 2 else "",
    )
    data = result(lab.repro, capsys, *RANKS, "--steps", "2", code=3)
    assert data["verdict"] == "inconclusive" and "ValueError" in data["bad"]["problem"]


def test_tracer_that_does_not_start_is_named_and_the_script_is_not_blamed(
    lab: Lab, capsys: Capsys
) -> None:
    log = "repro: no trace of this process: ImportError: cannot import name 'x'\nloss 4.6"
    lab.observation = seen(rank(0, log_tail=log), rank(1, log_tail=log))
    lab.plant = lambda versions, attempt: None
    error = result(
        lab.repro, capsys, "compare", "./train.py", "stack=base", "--bad-nproc", "1", code=3
    )["err"]
    assert "ImportError: cannot import name 'x'" in error and "Does it train?" not in error


def test_other_random_draws_on_each_run_are_inconclusive(lab: Lab, capsys: Capsys) -> None:
    lab.plant = lambda versions, attempt: "other draws"
    data = result(lab.repro, capsys, *RANKS, code=3)
    assert data["verdict"] == "inconclusive" and data["location"]["stage"] == "random draws"


# -- bisections

BISECT = ("bisect", "./train.py", "stack=base", "--good", "4.37.0", "--bad", "4.45.0", "--numbers")


def test_bisect_numbers_finds_release_and_module(lab: Lab, capsys: Capsys) -> None:
    lab.plant = since("4.40", "initial weights")
    data = result(lab.repro, capsys, *BISECT)
    (stage,) = data["stages"]
    assert stage["exact"] and stage["bad"]["name"].endswith("4.40.0")
    assert (
        data["place"]["place"] == "layers.0.up.weight"
        and data["place"]["sentence"] in data["report"]
    )
    assert stage["bad"]["run"].startswith(
        "repro compare --good base+transformers@4.37.0 --bad base+transformers@4.40.0"
    )
    launched = len(lab.launched)
    assert all(
        probe["launched"] for probe in stage["probes"]
    )  # the ends, too, before they are probed
    again = result(lab.repro, capsys, *BISECT)
    assert again["launched"] == 0 and len(lab.launched) == launched
    assert not any(probe["launched"] for probe in again["stages"][0]["probes"])


def test_bisect_numbers_difference_elsewhere_is_unknown(lab: Lab, capsys: Capsys) -> None:
    def plant(versions: Mapping[str, str], attempt: Attempt) -> str:
        return (
            ""
            if before(versions, "4.39")
            else "buffer"
            if before(versions, "4.42")
            else "initial weights"
        )

    lab.plant = plant
    (stage,) = result(lab.repro, capsys, *BISECT)["stages"]
    assert (
        not stage["exact"]
        and stage["bad"]["name"].endswith("4.42.0")
        and "rotary" in stage["unknown"][0]["reason"]
    )


def sizes(*since: tuple[str, str]) -> Callable[[Mapping[str, str], Attempt], str]:
    """Return a history: from each release on, a gradient is so many times what it is in 4.37."""

    def plant(versions: Mapping[str, str], attempt: Attempt) -> str:
        sizes = [size for release, size in since if not before(versions, release)]
        return f"local gradient times {sizes[-1]}" if sizes else ""

    return plant


def test_versions_numbers_keep_sizes_apart_and_noise_together(lab: Lab, capsys: Capsys) -> None:
    lab.plant = sizes(
        ("4.38", "8"), ("4.39", "7.98"), ("4.40", "2"), ("4.41.1", "8.02"), ("4.43", "8")
    )
    words = (
        "versions",
        "./train.py",
        "stack=base",
        "--range",
        "4.37..4.45",
        "--numbers",
        "4.37.0",
        "--samples",
        "11",
    )
    data = result(lab.repro, capsys, *words)
    parts = data["variants"]["unfixed"]["segments"]
    assert [part["first"] for part in parts] == ["4.37.0", "4.38.0", "4.40.0", "4.41.1"]
    answers = [part["answer"] for part in parts]
    assert (
        answers[0] == "passed"
        and answers[1] == answers[3] != answers[2]
        and not data["may_depend_on"]
    )
    assert all(
        answer.startswith("reproduced: local gradient, layers.1.up.weight")
        for answer in answers[1:]
    )


def test_bisect_numbers_of_another_size_come_before_those_of_the_bad_end(
    lab: Lab, capsys: Capsys
) -> None:
    lab.plant = sizes(("4.38", "2"), ("4.42", "8"))
    (stage,) = result(lab.repro, capsys, *BISECT)["stages"]
    assert stage["exact"] and stage["bad"]["name"].endswith("4.42.0")
    assert (
        stage["good"]["answer"].startswith("other_size: ")
        and stage["good"]["answer"] in stage["sentence"]
    )
    assert stage["good"]["word"] != "good"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--error", "IndexError"), "both describe the failure"),
        (("--any-change",), "--any-change"),
        ((), "do not differ"),
    ],
)
def test_bisect_numbers_needs_a_difference_of_its_own(
    lab: Lab, capsys: Capsys, words: tuple[str, ...], message: str
) -> None:
    assert message in result(lab.repro, capsys, *BISECT, *words, code=2)["err"]


def test_bisect_numbers_end_that_cannot_be_compared_is_not_called_equal(
    lab: Lab, capsys: Capsys
) -> None:
    lab.plant = lambda versions, attempt: None if not before(versions, "4.40") else ""
    data = result(lab.repro, capsys, *BISECT, code=3)
    assert "cannot be compared" in data["err"] and "do not differ" not in data["err"]


def test_bisect_numbers_commands_have_the_settings_of_the_script(lab: Lab, capsys: Capsys) -> None:
    lab.plant = since("4.40", "initial weights")
    (stage,) = result(lab.repro, capsys, *BISECT, "env.ANY=1", "deadline=60", "--steps", "2")[
        "stages"
    ]
    assert (
        "deadline=60.0 env.ANY=1 --good" in stage["bad"]["run"]
        and "--steps 2 --" in stage["bad"]["run"]
    )


# -- a real script

SCRIPT = """
import sys
import torch
torch.manual_seed(0)
nn = torch.nn
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ids = torch.randint(0, 20, (10, 4, 6))
step = 0
while True:  # for days
    logits = model(ids[step % 10])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[step % 10].flatten()).backward()
    if step == 1 and "--wrong" in sys.argv:
        model[1].weight.grad[0] *= 1.01
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""


@pytest.mark.ranks
def test_real_script_is_ended_after_its_traced_steps_and_its_error_is_placed(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    words = ("compare", "--bad-args", "--wrong", "--steps", "2", f"results={tmp_path / 'results'}")
    assert main([*words, "--json", "--", "python", "train.py"]) == 1
    data = json.loads(capsys.readouterr().out)
    found = data["location"]
    assert (found["stage"], found["step"], found["place"]) == (
        "gradient before the optimizer",
        1,
        "1.weight",
    )
    assert (
        data["good"]["outcome"] == data["bad"]["outcome"] == "passed"
        and found["coverage"]["shared"] == 8
    )


@pytest.mark.ranks
def test_forked_runs_with_noise_equal_those_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    forked = Script(command_of_script("./train.py", 1), ScriptFailure(), tmp_path / "results")
    runs = {}
    with CellRunner() as runner:
        for script in (
            forked,
            replace(forked, env=(("ANY", "1"),)),
        ):  # an environment of its own starts with torchrun
            run = compare.traced(
                runner, script, stacks.resolve("current"), compare.Window(2), noise=1
            )
            launcher = run.made["observation"]["attempt"]["launcher"]
            runs[launcher] = (run.trace.folder / "trace-0.jsonl").read_text()
            assert (
                run.made["outcome"]["outcome"] == "passed" and '"reason":"window"' in runs[launcher]
            )
    assert runs["forkserver"] == runs["command"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["train.py", "other.py", "first.py"],
)
def test_script_that_cannot_be_forked_has_runs_with_noise_of_torchrun(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        f"from sys import modules as loaded\nassert 'torch' not in loaded\n{SCRIPT}"
    )
    Path("local.py").write_text("import sys\nsys.path.insert(0, 'vendored')\n")
    Path("other.py").write_text(f"import local\n{SCRIPT}")
    Path("first.py").write_text(
        f"assert 'torch' not in __import__('sys').__dict__['modules']\n{SCRIPT}"
    )
    with CellRunner() as runner:
        script = Script(command_of_script(f"./{name}", 1), ScriptFailure(), tmp_path / "results")
        side = compare.GoodSide(runner, script, stacks.resolve("current"), compare.Window(1))
        launchers = {run.made["observation"]["attempt"]["launcher"] for run in side.noise}
        assert launchers == {"command"} and not any(run.problem for run in side.noise)
