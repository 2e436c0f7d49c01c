"""A script compared with itself: simulated traces; one test starts real ranks."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from probing import ScriptLab, before, lab, result, world
from repro_matrix import launch
from repro_matrix.cli.main import main
from repro_matrix.compare.consistency import combinations, option_choices
from repro_matrix.errors import ConfigError
from repro_matrix.launch.attempt import TRACE, Attempt
from repro_matrix.traces.invariance import by_design
from repro_matrix.traces.location import Location
from repro_matrix.traces.reader import Trace, read_trace
from script_observations import FINE, UPSTREAM, raised, rank, seen
from simulated import train

__all__ = ["lab", "world"]
Capsys = pytest.CaptureFixture[str]
Json = dict[str, Any]
FAILED = seen(rank(0, 1, raised("ValueError", "no data", UPSTREAM)), command_exit=1)


class Lab(ScriptLab):
    """A script with --acc N and --plant NAME; a step has eight samples, or those of --size.
    ``since``: the release from which on it has the plant ``wrong`` with several micro-batches."""

    since = ""
    wrong = "loss not divided"

    def observe(self, versions: Mapping[str, str], attempt: Attempt) -> Json:
        assert attempt.command is not None
        argv, noise = attempt.command.argv, attempt.trace.get("REPRO_TRACE_NOISE")
        given = {name: argv[at + 1] for at, name in enumerate(argv[:-1]) if name.startswith("--")}
        micro, ranks = int(given.get("--acc", 1)), attempt.world_size
        plant = given.get("--plant", "")
        if self.since and not before(versions, self.since) and micro > 1:
            plant = self.wrong
        if "--fail" in argv and ranks == 1:
            return FAILED
        folder = Path(attempt.trace[TRACE])
        folder.mkdir(parents=True)
        if "--no-step" not in argv:
            train(
                folder,
                world=ranks,
                micro=micro,
                noise=int(noise) if noise else None,
                plant=plant,
                rank=0,
                batch=int(given.get("--size", 8)),
                order=int(given.get("--order", 0)),
                dropout="--dropout" in argv,
                strength=float(given.get("--strength", 1)),
            )
        return FINE if ranks == 2 else seen(rank(0))


COMMAND = ("consistency", "./train.py", "stack=base")
RANKS, ACC = ("--ranks", "1,2"), ("--vary", "--acc {1,2}")


def test_configurations_that_train_alike_agree_and_are_launched_once(
    lab: Lab, capsys: Capsys
) -> None:
    data = result(lab.repro, capsys, *COMMAND, *RANKS, *ACC)
    assert (
        data["verdict"] == "agrees" and data["groups"] == [[0, 1, 2, 3]] and not data["not_checked"]
    )
    assert [each["labels"] for each in data["configurations"]] == [
        ["1 rank", "--acc 1"],
        ["2 ranks", "--acc 1"],
        ["1 rank", "--acc 2"],
        ["2 ranks", "--acc 2"],
    ]
    assert all(each["location"]["coverage"]["shared"] == 24 for each in data["compared"])
    launched = len(lab.launched)
    assert launched == 4 + 2  # and the noise of the first
    result(lab.repro, capsys, *COMMAND, *RANKS, *ACC)
    assert len(lab.launched) == launched


def test_contradiction_has_its_place_and_no_side_is_called_good(lab: Lab, capsys: Capsys) -> None:
    lab.since = "4.0"
    data = result(lab.repro, capsys, *COMMAND, *RANKS, *ACC, code=1)
    assert data["groups"] == [[0, 1], [2, 3]] and data["verdict"] == "contradicts itself"
    located = next(
        each["location"] for each in data["compared"] if each["configurations"] == [0, 2]
    )
    assert (located["stage"], located["step"]) == ("loss weight", 0)
    text = data["sentence"]
    assert "1 rank and 2 ranks agree" in text and "--acc 1 and --acc 2 differ" in text
    assert "good" not in text and "bad" not in text and "odd" not in text  # two against two


@pytest.mark.parametrize("wrong", ["--acc 1", "--acc 2", "--acc 4"])
def test_odd_one_out_of_three_is_named_also_if_it_is_the_first(
    lab: Lab, capsys: Capsys, wrong: str
) -> None:
    strength = ",".join("1" if wrong[-1] == micro else "0" for micro in "124")
    words = ("--vary", f"--acc {{1,2,4}} --plant activation --strength {{{strength}}}")
    text = result(lab.repro, capsys, *COMMAND, *words, code=1)["sentence"]
    assert f"{wrong} is the odd one out" in text


def test_error_of_two_settings_together_is_found(lab: Lab, capsys: Capsys) -> None:
    words = ("--ranks", "1,2", "--vary", "--plant '{none,not reduced}'")
    data = result(lab.repro, capsys, *COMMAND, *words, code=1)
    assert data["groups"] == [[0, 1, 2], [3]]
    assert data["compared"][-1]["location"]["stage"] == "reduction"
    assert "2 ranks" in data["sentence"] and "odd one out" in data["sentence"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--args", "--dropout", "--ranks", "1,2"), "dropout"),
        (("--args", "--plant 'own count'", "--ranks", "1,2"), "averages its own loss"),
        (("--args", "--plant 'own count'", "--nproc", "2", *ACC), "may average its own loss"),
        (("--ranks", "1,2 --order {0,1}"), ""),
        (("--ranks", "1,2 --size {8,16}"), "8 and 16 samples"),
        (("--ranks", "2,1", "--args", "--fail"), "ValueError: no data"),
        (("--ranks", "1,2", "--args", "--fail"), "ValueError: no data"),
        (("--ranks", "1,2", "--args", "--no-step"), "without a step"),
    ],
)
def test_what_is_not_invariant_by_design_is_no_alarm(
    lab: Lab, capsys: Capsys, words: tuple[str, ...], reason: str
) -> None:
    if not reason:  # another order within the step has the same samples
        assert result(lab.repro, capsys, *COMMAND, *words)["verdict"] == "agrees"
        return
    data = result(lab.repro, capsys, *COMMAND, *words, code=3)
    assert data["verdict"] == "inconclusive" and reason in " ".join(data["not_checked"].values())


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        (("--ranks", "1,2 --plant {none,labels}"), "data"),
        (("--ranks", "1,2 --plant {none,data}"), "data"),
        (("--ranks", "1,2", "--args", "--plant summed"), "reduction"),
    ],
)
def test_samples_that_a_rank_repeats_and_other_labels_are_an_error(
    lab: Lab, capsys: Capsys, words: tuple[str, ...], stage: str
) -> None:
    data = result(lab.repro, capsys, *COMMAND, *words, code=1)
    assert data["compared"][-1]["location"]["stage"] == stage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Nothing to vary"),
        (("--vary", "--acc {}"), "--acc {1,4}"),
        (("--vary", "--acc {1,1}"), "given twice"),
        (("--vary", "--acc {1,2} --size {1,2,3}"), "different lengths"),
        (("--vary", ""), "Write it as --vary"),
        (("--ranks", "0,1"), "'0' is not a number of ranks"),
        (("--ranks", "2"), "one value"),
        (("--ranks", "1,2", "--", "python", "train.py"), "torchrun --nproc-per-node"),
        (("--vary", "--acc {1,'}"), "--args"),
    ],
)
def test_bad_input_is_refused_before_a_launch(
    lab: Lab, capsys: Capsys, words: tuple[str, ...], message: str
) -> None:
    command = ("consistency", "stack=base") if "--" in words else COMMAND
    assert main([*command, *words]) == 2
    assert message in capsys.readouterr().err and not lab.launched


def test_command_line_gets_its_ranks_and_arguments(lab: Lab, capsys: Capsys) -> None:
    words = ("--vary", "--acc {1,2}", f"results={lab.folder / 'results'}", "--json")
    for option in (["--nproc-per-node", "2"], ["--nproc_per_node=2"]):
        assert (
            main(
                [
                    "consistency",
                    "stack=base",
                    *RANKS,
                    *words,
                    "--",
                    "torchrun",
                    *option,
                    "train.py",
                    "--x",
                    "1",
                ]
            )
            == 0
        )
        shown = [each["command"] for each in json.loads(capsys.readouterr().out)["configurations"]]
        assert shown[0].endswith("train.py --x 1 --acc 1") and shown[3].endswith("--acc 2")
        assert "=1 " in shown[0] or "per-node 1 " in shown[0]


def test_arguments_of_a_trainer_are_found(lab: Lab, capsys: Capsys) -> None:
    Path("train.py").write_text("from transformers import HfArgumentParser\n")
    given = ("--args", "--per_device_train_batch_size 4 --gradient-accumulation-steps=2")
    commands = [
        each["command"] for each in result(lab.repro, capsys, *COMMAND, *given)["configurations"]
    ]
    sizes = [command.partition("steps=2 ")[2] for command in commands]
    values = {
        "--per_device_train_batch_size": (4, 4, 2, 8),
        "--gradient_accumulation_steps": (2, 2, 4, 2),
        "--gradient_checkpointing": (False, True, False, False),
    }
    assert sizes == [
        " ".join(f"{name} {each[at]}" for name, each in values.items()) for at in range(4)
    ]
    assert [" 1 ./train.py" in command for command in commands] == [False, False, False, True]
    Path("fixed.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 4}))
    assert (
        '"auto"'
        in result(lab.repro, capsys, *COMMAND, "--args", "--deepspeed fixed.json", code=2)["err"]
    )


def test_strategy_that_needs_more_gpus_than_the_machine_has_is_not_checked(
    lab: Lab, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from repro_matrix.planning import plan

    skip = plan.Skip("gpus", "needs 2 GPUs; hardware x has 1", ("2 GPUs",))
    monkeypatch.setattr(
        plan,
        "unsuitable",
        lambda case, strategy, settings, ranks, profile: [skip][: ranks - 1],
    )
    data = result(lab.repro, capsys, *COMMAND, "--ranks", "1,2", code=3)
    assert "needs 2 GPUs" in data["not_checked"]["1"] and len(lab.launched) == 1


def test_trace_in_which_code_was_made_for_one_start_is_used_again() -> None:
    ending = Path(launch.__file__).parent / "worker" / "tracer" / "ending.py"
    installed = runpy.run_path(str(ending))["INSTALLED"]
    assert installed.search("/tmp/tmpt5splvv9/_remote_module_non_scriptable.py")
    assert not installed.search("/home/me/tmp/tmpfiles_of_mine/train.py")


# -- with other commands


def test_versions_and_bisect_find_the_releases_that_contradict_themselves(
    lab: Lab, capsys: Capsys
) -> None:
    lab.since = "4.40"
    words = ("./train.py", "stack=base", "--nproc", "1", *ACC)
    data = result(lab.repro, capsys, "versions", *words, "--range", "4.37..4.45")
    segments = next(iter(data["variants"].values()))["segments"]
    assert [each["first"] for each in segments] == ["4.37.0", "4.40.0"]
    (stage,) = result(lab.repro, capsys, "bisect", *words, "--good", "4.37.0", "--bad", "4.45.0")[
        "stages"
    ]
    assert stage["exact"] and stage["bad"]["name"].endswith("4.40.0")
    assert stage["bad"]["run"].startswith(
        "repro consistency stack=base+transformers@4.40.0 '--vary=--acc {1,2}' --"
    )
    error = result(
        lab.repro,
        capsys,
        "bisect",
        *words,
        "--good",
        "4.37.0",
        "--bad",
        "4.45.0",
        "--exit",
        "1",
        code=2,
    )
    assert "--exit" in error["err"]


def test_comparison_says_which_side_is_consistent_with_itself(lab: Lab, capsys: Capsys) -> None:
    lab.since = "4.40"
    sides = ("./train.py", "stack=base", "--good", "4.41.0", "--bad", "4.39.3", "--nproc", "1")
    data = result(lab.repro, capsys, "compare", *sides, "--args", "--acc 2", *ACC, code=1)
    assert {side: each["verdict"] for side, each in data["consistency"].items()} == {
        "good": "contradicts itself",
        "bad": "agrees",
    }
    report = result(lab.repro, capsys, "bisect", *sides, "--args", "--acc 2", *ACC, "--numbers")[
        "report"
    ]
    assert "4.41.0 contradicts itself" in report and "4.39.3 is consistent with itself" in report


# -- pure


def test_settings_that_share_an_option_are_not_combined() -> None:
    axes = [
        option_choices("--ranks", "1,2 --batch {8,4}"),
        option_choices("--vary", "--batch {8,2} --acc {1,4}"),
    ]
    assert len(combinations(axes)) == 3
    assert [each.labels for each in axes[1]] == [("--batch 8",), ("--batch 2",)]
    strategies = option_choices("--ranks", "1,2,2 --strategy {none,ddp,fsdp}")
    assert [(each.ranks, each.labels) for each in strategies][1:] == [
        (2, ("--strategy ddp",)),
        (2, ("--strategy fsdp",)),
    ]
    assert [each.words for each in option_choices("--vary", "--checkpoint")] == ["", "--checkpoint"]
    with pytest.raises(ConfigError):
        option_choices("--ranks", "one,two")


def test_batch_norm_and_another_order_of_the_data_are_there_by_design(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (0, 1):
        train(tmp_path / str(seed), seed=seed)
    good, other = (read_trace(tmp_path / str(seed)) for seed in (0, 1))
    inner = Location("differs", stage="forward", step=0, place="layers.0.norm", role="output")
    assert not by_design(inner, good, other)
    monkeypatch.setattr(Trace, "modules", {"layers.0.norm": "BatchNorm1d"})
    assert "batch norm" in by_design(inner, good, other)
    assert not by_design(inner, good, good), "the same micro-batches on both sides"
    setting = Location("differs", stage="optimizer setting", step=0, place="group 0: lr")
    assert not by_design(setting, good, other)
    data = Location("differs", stage="data", step=0, role="samples")
    assert "other samples" in by_design(data, good, other)
    assert not by_design(replace(data, role="labels"), good, other)


SCRIPT = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--acc", type=int, default=1)
parser.add_argument("--batch", type=int, default=4)
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
nn = torch.nn
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 20))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ids = torch.randint(0, 20, (12, 6))
for step in range(3):
    for micro in range(args.acc):
        first = step * 4 + (micro * world + rank) * args.batch
        batch = ids[first : first + args.batch]
        nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()  # not divided by --acc
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_real_script_contradicts_itself(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    words = (
        "--ranks",
        "1,1,2 --acc {1,2,1} --batch {4,2,2}",
        f"results={tmp_path / 'results'}",
        "--json",
    )
    assert main(["consistency", "./train.py", *words]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["groups"] == [[0, 2], [1]] and "--acc 2" in data["sentence"]
    (found,) = (each["location"] for each in data["compared"] if each["configurations"] == [0, 1])
    assert (found["stage"], found["step"]) == ("loss weight", 0)
