"""`repro match`: prefixes, interleaving, order, versions, stored measurements, what is no log, and
real logs.

A wrong name is worse than none. What a log does not tell may be said to be possible, never
recognized.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from published import published
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.failure_rules import FailureRule, rules
from repro_matrix.grading.log_labels import Labels
from repro_matrix.grading.tracebacks import Errors
from repro_matrix.match.errors import memory_of
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.known_failures import recognize
from repro_matrix.match.lines import MAX_LINE
from repro_matrix.match.log_failure import LogAnswer
from repro_matrix.match.scan import Scanned, scan
from repro_matrix.paths import BASELINE, RESULTS

Match = Callable[..., tuple[int, str, str]]

CASES = catalogue.load().cases
CATALOGUE = SignatureIndex(CASES, catalogue.load().strategies)

UNIFORM = """\
Traceback (most recent call last):
  File "/w/train.py", line 12, in <module>
    main()
  File "/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_flat_param.py", line 770, in _validate_tensors
    raise ValueError(
ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32
""".splitlines()
ECHO = """\
Traceback (most recent call last):
  File "/w/train.py", line 40, in <module>
    dist.barrier()
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4387, in barrier
    work.wait()
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:32177
""".splitlines()
OWN = """\
Traceback (most recent call last):
  File "/w/train.py", line 7, in load
    return table[name]
KeyError: 'train'
""".splitlines()


def seen(lines: list[str]) -> Scanned:
    return scan([f"{line}\n" for line in lines], CATALOGUE)


def answer(lines: list[str]) -> LogAnswer:
    return recognize(seen(lines), CATALOGUE)


PREFIXES = {
    "torch": "[rank{}]: ",
    "torchrun --tee": "[default{}]:",
    "mpirun": "[1,{}]<stderr>:",
    "srun --label": "{}: ",
    "ray": "(RayTrainWorker pid=40{}, ip=10.0.0.{}) ",
    "docker": "worker-{}  | ",
    "pdsh": "node-{}: ",
    "pdsh and torch": "node-1: [rank{}]: ",
    "a number and torch": "1|[rank{}]: ",
    "a pod and torch": "[pod/train-worker-1/pytorch] [rank{}]: ",
    "a container and torch": "(train-1) [rank{}]:",
    "a time and torch": "2024-05-01T12:00:00.123Z [rank{}]: ",
    "colours": "\x1b[36m(WorkerDict pid=40{})\x1b[0m ",
}


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_an_error_knows_the_one_of_its_process_that_it_was_raised_from(prefix: str) -> None:
    def raised(text: str) -> list[str]:
        return [
            "Traceback (most recent call last):",
            '  File "/x/a.py", line 1, in f',
            "    f()",
            text,
        ]

    inner, outer = (
        "torch.distributed.DistNetworkError: no answer of (10.0.0.1, 29400).",
        "x.RendezvousError: failed",
    )
    between = ["", "The above exception was the direct cause of the following exception:", ""]
    found = answer([prefix + line for line in (*raised(inner), *between, *raised(outer))])
    (cause,) = found.causes
    assert (cause.error.type, cause.error.after) == ("RendezvousError", 4)
    assert not answer([*raised(inner), "", *raised(outer)]).causes[0].error.after


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_recognize_with_prefixed_interleaved_ranks_separates_them(prefix: str) -> None:
    draw = random.Random(0)
    streams = {rank: list(UNIFORM if rank != 2 else ECHO) for rank in range(4)}
    lines = ["step 1 loss 2.0"]
    while any(streams.values()):
        rank = draw.choice([r for r in streams if streams[r]])
        lines.append(prefix.replace("{}", str(rank)) + streams[rank].pop(0))
    found = answer(lines)
    assert found.names == ["fsdp-uniform-dtype"]
    (cause,), echoes = found.causes, [failure for failure in found.failures if failure.echo]
    assert cause.error.count == 3 and len(cause.error.places) == 2 and not cause.error.mixed
    assert [echo.error.type for echo in echoes] == ["RuntimeError"]
    if prefix in map(PREFIXES.get, ("torchrun --tee", "mpirun", "srun --label")) or (
        "[rank" in prefix
    ):
        assert cause.error.ranks == (0, 1, 3)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4))
def test_recognize_with_unlabelled_interleaving_names_no_other_failure(
    order: list[int], ranks: int
) -> None:
    streams = [list(UNIFORM) for _ in range(ranks)]
    lines = []
    for rank in order:
        if rank < ranks and streams[rank]:
            lines.append(streams[rank].pop(0))
    for rest in streams:
        lines += rest
    found = answer(lines)
    possible = {item.case for failure in found.failures for item in failure.perhaps}
    assert {*found.names, *possible} == {"fsdp-uniform-dtype"}
    named = [
        failure.error.type
        for failure in found.causes
        if failure.error.type or not failure.error.mixed
    ]
    assert set(named) == {"ValueError"}
    assert ranks > 1 or found.names


def test_recognize_with_several_errors_orders_causes_before_echoes() -> None:
    found = answer([*ECHO, *OWN, *UNIFORM])
    assert [failure.error.type for failure in found.failures] == [
        "KeyError",
        "ValueError",
        "RuntimeError",
    ]
    assert [failure.echo for failure in found.failures] == [False, False, True]
    assert answer(ECHO).causes == []  # what they follow from is in another log


def test_recognize_with_a_handled_exception_counts_it_only_when_repeated() -> None:
    during = ["", "During handling of the above exception, another exception occurred:", ""]
    assert answer([*UNIFORM, *during, *OWN]).causes[-1].error.type == "KeyError"
    wrapped = [
        *UNIFORM,
        *during,
        *OWN[:-1],
        "RuntimeError: it failed: " + UNIFORM[-1].partition(": ")[2],
    ]
    assert answer(wrapped).names == ["fsdp-uniform-dtype"]


@pytest.mark.parametrize("cut", range(1, len(UNIFORM)))
def test_recognize_with_a_cut_beginning_needs_the_frames(cut: int) -> None:
    found = answer(UNIFORM[cut:])
    framed = any("_flat_param.py" in line for line in UNIFORM[cut:])
    assert found.names == (["fsdp-uniform-dtype"] if framed else [])
    assert framed or [item.case for failure in found.failures for item in failure.perhaps] == [
        "fsdp-uniform-dtype"
    ]


def test_recognize_with_a_crash_dump_is_possible_only() -> None:
    dump = [
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f (most recent call first):",
        (
            "  File"
            ' "/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_state_dict_utils.py",'
            " line 12 in _full"
        ),
        '  File "/w/train.py", line 3 in main',
        "",
        "Extension modules: numpy",
    ]
    found = answer(dump)
    assert found.names == [] and found.failures[0].error.type == "SIGSEGV"
    assert "fsdp-cpu-offload-state-dict" in {item.case for item in found.failures[0].perhaps}


def test_recognize_with_another_strategy_is_another_cause() -> None:
    frames = [
        "Traceback (most recent call last):",
        '  File "/v/site-packages/deepspeed/runtime/engine.py", line 1, in forward',
        '  File "/v/site-packages/torch/nn/functional.py", line 2, in embedding',
        (
            "RuntimeError: Expected all tensors to be on the same device, "
            "but found at least two devices, cuda:1 and cuda:0"
        ),
    ]
    possible = {item.case for item in answer(frames).failures[0].perhaps}
    assert possible == {"qwen-device-map-devices"}  # the others are DDP's and FSDP's
    frames.pop(1)
    assert "inputs-card-zero-simulated" in {
        item.case for item in answer(frames).failures[0].perhaps
    }


@pytest.mark.parametrize(
    ("old", "new", "certain", "possible"),
    [
        ("/site-packages/", "/dist-packages/", True, True),
        ("ValueError: ", "builtins.ValueError: ", True, True),
        (
            "/venv/lib/python3.11/site-packages/",
            "/home/me/proj/",
            False,
            True,
        ),  # perhaps a checkout of torch
        (
            "/venv/lib/python3.11/site-packages/torch/",
            "/home/me/proj/",
            False,
            True,
        ),  # perhaps a copy of torch's code
        ("ValueError: ", "mylib.errors.ValueError: ", False, False),
    ],
)
def test_recognize_needs_an_installed_package_and_the_type(
    old: str, new: str, certain: bool, possible: bool
) -> None:
    found = answer(
        [
            line.replace(old, new) if old[0] == "/" or line.startswith(old) else line
            for line in UNIFORM
        ]
    )
    perhaps = any(failure.perhaps for failure in found.failures)
    assert (bool(found.names), bool(found.names) or perhaps) == (certain, possible) and found.causes


@given(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=60), max_size=8))
def test_recognize_after_any_lines_names_no_other_failure(noise: list[str]) -> None:
    found = answer([*noise, *UNIFORM])
    assert set(found.names) <= {"fsdp-uniform-dtype"}
    assert found.names or any("Traceback" in line or "File" in line for line in noise)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch==2.2.2+cu121", {"torch": "2.2.2+cu121"}),
        ("transformers     4.39.3", {"transformers": "4.39.3"}),
        ("- `transformers` version: 4.38.1", {"transformers": "4.38.1"}),
        ("- PyTorch version (GPU?): 2.1.0+cu121 (True)", {"torch": "2.1.0+cu121"}),
        ("torch version .................... 2.0.1", {"torch": "2.0.1"}),
        (
            "[INFO] [Rank 0] DeepSpeed info: version=0.14.2, git-hash=unknown",
            {"deepspeed": "0.14.2"},
        ),
        ("Successfully installed peft-0.10.0 torch-2.2.2", {"peft": "0.10.0", "torch": "2.2.2"}),
        ("- Transformers 4.38.2", {"transformers": "4.38.2"}),
        ("torchvision==0.15.2", {}),
        ("Requires: torch (>=2.0)", {}),
        ("Collecting torch==2.1.0", {}),
        ("  Uninstalling torch-1.13.1:", {}),
        ("  Found existing installation: torch 1.13.1", {}),
        ("FSDP2 is in torch 2.4 or newer", {}),
        ("In PyTorch 2.6, we changed the default", {}),
        ("Requirement already satisfied: peft==0.10.0 in /usr/lib", {"peft": "0.10.0"}),
        (
            (
                "accelerate 0.30.0 requires torch==2.3.0, but you have torch 2.2.2 which is"
                " incompatible."
            ),
            {"accelerate": "0.30.0", "torch": "2.2.2"},
        ),
    ],
)
def test_versions_of_tools_output_are_read(line: str, said: dict[str, str]) -> None:
    assert seen([line]).versions.known == said


def test_versions_with_two_releases_are_unclear() -> None:
    found = seen(["torch==2.2.2", "torch==2.3.0", "peft==0.10.0", "torch version: 2.2.2"]).versions
    assert found.known == {"peft": "0.10.0"} and found.unclear == {"torch": ["2.2.2", "2.3.0"]}


# --- the command


@pytest.fixture
def match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Match:
    """Write a log and match it; return the exit code and the outputs."""

    def run(content: bytes | list[str], *options: str) -> tuple[int, str, str]:
        log = tmp_path / "a.log"
        log.write_bytes(
            content if isinstance(content, bytes) else "\n".join([*content, ""]).encode()
        )
        code = cli.main(["match", str(log), *options])
        return code, *capsys.readouterr()

    return run


def test_match_of_a_failure_gives_its_exit_code(match: Match) -> None:
    versions = [
        "torch==2.13.0",
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "peft==0.21.2",
        "deepspeed==0.19.8",
    ]
    lines = [*versions, *(f"[rank1]: {line}" for line in UNIFORM)]
    code, out, _ = match(lines)
    assert code == 0
    for part in (
        "(fsdp-uniform-dtype)",
        "rank 1, line 11: ",
        "huggingface/trl#1723",
        "repro show fsdp-uniform-dtype",
    ):
        assert part in out
    assert (
        "get_peft_model(model, config, autocast_adapter_dtype=False): adapters stay bf16"
        " (no-autocast)" in out
    )
    (found,) = json.loads(match(lines, "--json")[1])
    assert found["recognized"] == ["fsdp-uniform-dtype"] and found["failures"][0]["ranks"] == [1]
    assert found["advice"]["fsdp-uniform-dtype"]["fits"] and found["versions_source"] == "the log"
    code, out, _ = match(OWN)
    assert code == 1 and "not a known failure" in out and "load (/w/train.py:7)" in out


def test_match_text_of_a_failure_and_of_a_healthy_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = [
        "torch==2.13.0",
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "peft==0.21.2",
        "deepspeed==0.19.8",
    ]
    lines = [
        *versions,
        *(f"[rank1]: {line}" for line in UNIFORM),
        *(f"[rank0]: {line}" for line in ECHO),
        "train.py FAILED",
    ]
    caught = ["step 1 loss 2.0", *OWN, "step 2 loss 1.9", "Training completed."]
    texts = []
    monkeypatch.chdir(tmp_path)
    for number, each in enumerate((lines, ["step 2 loss inf"], [WATCHDOG], caught)):
        Path(f"{number}.log").write_text("\n".join(each))
        cli.main(["match", f"{number}.log"])
        texts.append(capsys.readouterr().out)
    text = "\n".join(texts)
    path = Path(__file__).parent / "snapshots" / "match.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        "if that is intended: UPDATE_SNAPSHOTS=1 pytest"
    )


def test_match_takes_versions_that_the_log_does_not_name(match: Match, tmp_path: Path) -> None:
    freeze = tmp_path / "freeze.txt"
    freeze.write_text("torch==2.2.2\nnumpy==1.26.4\n")
    expected = {
        "stack=torch2.2-tf4.39": ("torch", "2.2.2"),
        f"--versions={freeze}": ("numpy", "1.26.4"),
    }
    for option, (name, version) in expected.items():
        (found,) = json.loads(match(["transformers==4.39.3", *UNIFORM], option, "--json")[1])
        assert found["versions"]["transformers"] == "4.39.3" and found["versions"][name].startswith(
            version
        )
        assert found["versions_source"].startswith("the log, the others ")
    assert match(UNIFORM, "stack=torch9")[0] == match(UNIFORM, "--versions", "none.txt")[0] == 2
    (found,) = json.loads(match(UNIFORM, "--json")[1])
    assert (
        found["versions"] == {}
        and found["versions_source"] == ""
        and not found["advice"]["fsdp-uniform-dtype"]["fits"]
    )


def test_match_without_labels_takes_the_rank_from_torchrun(match: Match) -> None:
    end = ["Root Cause (first observed failure):", "[0]:", "  rank      : 3 (local_rank: 3)"]
    assert "rank 3 (ended first, torchrun reports)" in match([*UNIFORM, *end])[1]


WATCHDOG = (
    "[rank3]:[E1123 10:11:12.1 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029"
    " milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("line", "kind", "rank"),
    [
        (WATCHDOG, "collective-timeout", None),
        *[
            (example, rule.name, None)
            for rule in rules().values()
            if not rule.case
            for example in rule.examples
        ],
        ("  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 7)", "ended-without-error", 2),
        ("srun: error: node1: task 3: Out Of Memory", "host-out-of-memory", 3),
        (
            (
                "[E ProcessGroupGloo.cpp:138] Rank 2 successfully reached monitoredBarrier, but"
                " received errors while waiting for send/recv from rank 1. Please check rank 1 logs"
                " for faulty rank."
            ),
            "collective-timeout",
            None,
        ),
        ("3: srun: error: task 0: Exited with exit code 1", "ended-without-error", 0),
        (
            "[177/train/578 (pid 28936)] RuntimeError: CUDA out of memory.",
            "cuda-out-of-memory",
            None,
        ),
    ],
)
def test_match_of_a_line_that_shows_a_kind_of_failure(
    line: str, kind: str, rank: int | None
) -> None:
    place = rules()[kind].place if kind in rules() else "any_line"
    ends = place == "last_line" or (kind in rules() and rules()[kind].library)
    after = [] if ends else ["step 2 loss 1.9"]
    found = answer(
        line.split("\n")
        if place == "every_step"
        else ["step 1 loss 2.0", *line.split("\n"), *after]
    )
    assert found.kinds[:1] == [kind] and found.exit_code == 1
    assert rank is None or [each.rank for each in found.findings] == [rank]


@pytest.mark.parametrize(
    "line",
    [
        (
            "[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:1 (errno: 98 -"
            " Address already in use)"
        ),
        (
            "[W socket.cpp:663] [c10d] The client socket has failed to connect to [n1]:29500"
            " (errno: 111)"
        ),
        (
            "n1:12:34 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal"
            " implementation"
        ),
        "n1:12:34 [0] NCCL INFO TUNER/Plugin: libnccl-tuner.so: cannot open shared object file",
        "n1:12:34 [0] NCCL INFO [Service thread] Connection closed by localRank 1",
        "Tip: use gradient checkpointing to avoid CUDA out of memory errors",
        'WARNING: if you see "CUDA out of memory", reduce the batch size',
        "if the watchdog reports a collective timeout, raise --timeout",
        "2026-01-01 INFO on CUDA out of memory the batch is halved",
        "2026-01-01 INFO Segmentation fault handler installed (faulthandler)",
        "Segmentation fault handler installed (faulthandler)",
        "2026-01-01 INFO dumps the stack on Segmentation fault, Bus error and abort",
        "2026-01-01 INFO nan_check enabled: will abort if loss is nan or inf",
        "EarlyStopping(monitor=val_loss, check_finite=True): stops when loss is NaN",
        "val_loss improved; best_loss: inf, loss scale: 65536",
        "POST /metrics status=200/OK, exit_code 0",
        "caught signal 10 (SIGUSR1): saving a checkpoint",
        "NCCL error count: 0",
        "Saved /data/fix-oom-killed/checkpoint-300",
        "val loss: nan (no validation data)",
        "slurmstepd: error: Failed to destroy CPU frequency",
        "0 out of memory events, 0 NCCL errors",
        f'{{"step": 4, "sample": "{OWN[0]} ... RuntimeError: CUDA out of memory"}}',
    ],
)
def test_match_of_a_line_that_only_mentions_a_failure_is_nothing(line: str) -> None:
    assert answer(["step 1 loss 2.0", line, "step 2 loss 1.9"]).exit_code == 3


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (["step 3 loss 1.8", "step 4 loss 1.7", "Training completed."], 3),
        ([f"step {step} loss 1.8" for step in range(3, 300)], 3),
        (
            ["step 3 loss 1.8", "step 4 loss 1.7"],
            1,
        ),  # perhaps what was in the buffer of a process that crashed
        (["Training completed."], 1),  # nothing was trained after it
        (["step 3 loss nan", "Training completed."], 1),
        (["step 3 loss 1.8", "Training completed.", "  exitcode  : 1 (pid: 7)"], 1),
        (["step 3 loss 1.8", "Training completed.", *OWN], 1),  # the same error again, at the end
    ],
)
def test_match_of_an_error_that_was_caught_is_nothing(after: list[str], code: int) -> None:
    found = answer(["step 1 loss 2.0", *OWN, *after])
    assert found.exit_code == code and bool(found.recovered) == (code == 3)


@pytest.mark.parametrize(
    ("error", "steps", "code"),
    [
        (OWN, 100, 1),  # standard output may have been in a buffer: the steps were before the error
        (OWN, 600, 3),  # more than a buffer holds
        (["ImportError: cannot import name 'flash_attn' (falling back to sdpa)"], 8, 3),
    ],
)
def test_match_of_an_error_above_all_steps_may_have_ended_them(
    error: list[str], steps: int, code: int
) -> None:
    shown = [f"step {step} loss 1.8" for step in range(steps)]
    assert answer([*error, *shown, "Training finished. Saving the model"]).exit_code == code


@pytest.mark.parametrize(
    ("caught", "steps", "first"),
    [
        (OWN, 19, "KeyError"),
        (OWN, 20, "ValueError"),
        (OWN, 150, "ValueError"),
        (
            [f"[rank1]: {line}" for line in OWN],
            150,
            "KeyError",
        ),  # torch's label of an error that is not caught
        ([WATCHDOG], 20, "ValueError"),
        (["ImportError: cannot import name 'flash_attn' (falling back to sdpa)"], 50, "ValueError"),
    ],
)
def test_match_of_a_crash_after_an_error_that_was_caught(
    caught: list[str], steps: int, first: str
) -> None:
    crash = [*OWN[:-1], "ValueError: bad batch: expected 8 got 7"]
    healthy = [f"step {step} loss 1.8" for step in range(steps)]
    for end in ([], ["  exitcode  : 1 (pid: 7)"]):
        found = answer([*caught, *healthy, *crash, *end])
        assert found.exit_code == 1 and found.causes[0].error.type == first
        assert bool(found.recovered) == (first == "ValueError")
        assert not answer([*caught, *healthy, *end]).recovered


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        (["Exception ignored in: <function Iter.__del__ at 0x7f>", *OWN], (3, 1)),
        (OWN, (1, 1)),
        (
            [
                "[W1126 10:00:00.0 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=10):"
                " Broken pipe"
            ],
            (3, 1),
        ),
        (["Exception in thread Thread-3 (_monitor):", *OWN], (3, 1)),
        ([f"INFO generated sample: {' '.join(OWN)}"], (3, 3)),
        ([f"ERROR generation of samples failed: {' '.join(OWN)}"], (1, 1)),
        (["[INFO] child process wandb-service exited with signal 15"], (3, 1)),
        (
            [
                "[E api.py:869] failed (exitcode: -15) local_rank: 1 (pid: 7) of binary:"
                " /usr/bin/python"
            ],
            (1, 1),
        ),
        (["rank 2: exitcode -9"], (1, 1)),
        (['{"level":"error","rank":1,"exit_code":-9,"msg":"rank ended"}'], (1, 1)),
        (['{"event":"worker_exit","rank":1,"signal":"SIGSEGV"}'], (1, 1)),
        (['{"event":"worker_exit","rank":1,"exit_code":0,"signal":null}'], (3, 3)),
    ],
)
def test_match_of_what_a_process_prints_while_it_ends(
    lines: list[str], codes: tuple[int, int]
) -> None:
    steps = ["step 1 loss 2.0", "step 2 loss 1.9"]
    assert (
        answer([*steps, "Training finished", *lines]).exit_code,
        answer([*steps, *lines]).exit_code,
    ) == codes


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("INFO tensorboard exited with code -15", 3),
        ("INFO previous job: exit code -9 detected, resuming from checkpoint step 100", 3),
        ("[launch.py:347:main] Process 101 exits with return code = -11", 1),
    ],
)
def test_match_of_a_line_in_a_training_that_is_completed(line: str, code: int) -> None:
    assert (
        answer(["step 1 loss 2.0", line, "step 2 loss 1.9", line, "Training finished"]).exit_code
        == code
    )
    assert answer(["step 1 loss 2.0", "step 2 loss 1.9", line]).exit_code == 1


@pytest.mark.parametrize(
    "label", ["[default{}]:", "{}: ", "[pod/train-worker-{}/pytorch] ", "(train_fn pid=1{}) "]
)
def test_match_of_an_error_after_which_only_other_processes_go_on_is_a_failure(label: str) -> None:
    error = [label.format(1) + line for line in OWN]
    for rank, code in ((0, 1), (1, 3)):
        steps = [f"{label.format(rank)}step {step} loss 1.8" for step in range(300)]
        assert answer([*steps[:9], *error, *steps[9:], "Training completed."]).exit_code == code


@pytest.mark.parametrize("bare", [False, True], ids=["each line", "the first line"])
@pytest.mark.parametrize(
    "before",
    [
        "2026-01-01 00:00:00,123 - ERROR - ",
        "2026-01-01 00:00:00,123 - app.train - ERROR - ",
        "ERROR:root:",
        "[2024-01-01, 00:00:00 UTC] {subprocess.py:93} INFO - ",
        "[2026-01-01 00:00:00,123][train][ERROR] - ",
        "2026-01-01 00:00:00.123 | ERROR    | __main__:main:12 - ",
        "E1120 10:00:00.123456 123 file.py:12] ",
        "2026/01/01 00:00:00 - mmengine - ERROR - ",
        "2026-01-01 00:00:00 | ERROR | fairseq_cli.train | ",
        "01/01/2026 00:00:00 - INFO - __main__ -   ",
        "[rank1]: 2026-01-01 00:00:00,123 - ERROR - ",
        "[1,mpirank:0,algo-1]<stderr>:",
        "2024-01-01T00:00:00.000+0000\talgo-1\t",
    ],
)
def test_recognize_of_a_traceback_with_a_loggers_format_before_its_lines(
    before: str, bare: bool
) -> None:
    launcher = re.match(r"\[rank1\]: |\[1,.*|2024-01-01T.*", before)  # stands before every line
    label = launcher[0] if launcher else ""
    found = answer([(label if bare and at else before) + line for at, line in enumerate(UNIFORM)])
    assert found.names == ["fsdp-uniform-dtype"] and len(found.failures) == 1


@pytest.mark.parametrize(("prefix", "code"), [("", 1), ("[rank0]: ", 1), ("[rank1]: ", 3)])
def test_match_of_an_error_that_a_rank_did_not_catch_while_others_go_on(
    prefix: str, code: int
) -> None:
    steps = [f"{prefix}step {step} loss 1.8" for step in range(600)]
    assert (
        answer([*(f"[rank1]: {line}" for line in OWN), *steps, "Training completed."]).exit_code
        == code
    )


STEPS = [f"step {step} loss 1.8" for step in range(300)]


def test_match_of_an_error_after_the_last_restart_of_torchrun_is_a_failure() -> None:
    restart = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"
    error = ["[rank1]: " + line for line in OWN]
    ends = ["step 5 loss 1.8", "Training finished"]
    for lines, code in ((ends, 3), (ends[:1], 1), ([*ends, *error], 1), ([*error, *ends], 1)):
        assert answer(["step 1 loss 2.0", *error, restart, *lines]).exit_code == code


def test_match_of_a_timeout_that_training_survived_and_another_error(match: Match) -> None:
    refused = "[rank1]: RuntimeError: DDP expects same model across all ranks, but Rank 1 has 2"
    lines = [WATCHDOG, *STEPS, f"{refused} params, while rank 0 has inconsistent 4 params."]
    code, out, _ = match(lines)
    assert "collective timeout" in out
    assert match(lines, "--json")[0] == code == 1


def test_match_of_a_timeout_before_and_after_a_restart_counts_the_last_one() -> None:
    assert answer([WATCHDOG, *STEPS]).exit_code == 3 and answer([WATCHDOG, *STEPS]).recovered
    later = WATCHDOG.replace("SeqNum=5", "SeqNum=9")
    found = answer([WATCHDOG, *STEPS, later])
    assert found.hang and found.hang.line == 302 and found.hang.waits[3].sequence == 9


@pytest.mark.parametrize(
    ("lines", "kind", "types"),
    [
        (["Traceback (most recent call last):"], None, [""]),
        (["│ ❱ 45 │   args.func(args)                       │"], None, [""]),
        (
            ["failed to train: X, traceback: Traceback (most recent call last): File a.py"],
            None,
            [""],
        ),
        (["RuntimeError: ", "    Some tensors share memory"], None, ["RuntimeError"]),
        (["Fatal Python error: Segmentation fault"], "segmentation-fault", ["SIGSEGV"]),
        (
            ["IndexError: list index out of range", "Killing subprocess 3"],
            "ended-without-error",
            ["IndexError"],
        ),
        ([json.dumps({"msg": "\n".join(OWN), "level": "error"})], None, ["KeyError"]),
        (["Jul 13 21:22:34 " + line for line in OWN], None, ["KeyError"]),
        (
            ["2024-08-22 13:50:25 ERROR 200507 [worker_base.py:148] " + line for line in OWN],
            None,
            ["KeyError"],
        ),
    ],
)
def test_match_of_what_is_left_of_an_error_is_a_failure(
    lines: list[str], kind: str | None, types: list[str]
) -> None:
    found = answer(["step 1 loss 2.0", *lines])
    assert found.exit_code == 1 and [failure.error.type for failure in found.failures] == types
    assert found.kinds == ([kind] if kind else []) and not any(
        failure.perhaps for failure in found.failures
    )


def test_recognize_of_a_traceback_in_records_of_json() -> None:
    lines = [
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-01-01T00:00:00Z"})
        for line in UNIFORM
    ]
    assert answer(["step 1 loss 2.0", *lines]).names == ["fsdp-uniform-dtype"]
    windows = [line.replace("/", "\\").replace("\\venv", "C:\\venv") for line in UNIFORM]
    assert answer(["step 1 loss 2.0", *windows]).names == ["fsdp-uniform-dtype"]


ESCAPED = "\\n".join(UNIFORM)  # line breaks are written as two characters


@pytest.mark.parametrize(
    "lines",
    [
        [repr([f"{line}\n" for line in UNIFORM])],
        [f"2026-01-01 ERROR the task failed: {ESCAPED}"],
        [f"reason: '{ESCAPED}'"],
        [json.dumps({"step": 1, "exception": " ".join(UNIFORM)})],
        [json.dumps({"log": "\n".join(UNIFORM)})[:300]],
        ['{"log":', json.dumps("\n".join(UNIFORM))],
        [" ".join(UNIFORM)],
        [" ".join(f"[rank1]: {line}" for line in UNIFORM)],
        [f"ERROR the task failed: {' '.join(UNIFORM)} {' '.join(ECHO)}"],
        [f"Exception in thread Thread-3 (_monitor): {' '.join(OWN)}"],
    ],
)
def test_match_of_a_traceback_that_is_on_one_line_says_what_to_do(
    lines: list[str], match: Match
) -> None:
    code, out, _ = match(["step 1 loss 2.0", *lines])
    assert code in (1, 2) and "no failure" not in out and "cannot be read: a " in out
    (found,) = json.loads(match(["step 1 loss 2.0", *lines], "--json")[1])
    assert found["unread"] and not found["recognized"]


@pytest.mark.parametrize(
    ("general", "cause", "kinds"),
    [
        (
            ["RuntimeError: NCCL Error 2: unhandled system error"],
            (
                "n1:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<36> with status=12"
                " opcode=129 len=0"
            ),
            ["infiniband", "nccl-error"],
        ),
        (
            [
                WATCHDOG,
                (
                    "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled system"
                    " error"
                ),
            ],
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            ["cuda-out-of-memory", "collective-timeout", "nccl-error"],
        ),
        (
            ["RuntimeError: Error building extension 'fused_adam'"],
            "nvcc fatal   : Unsupported gpu architecture 'compute_90a'",
            ["compiler-too-old", "extension-build"],
        ),
    ],
)
def test_match_lists_a_cause_before_what_it_causes_in_any_order(
    general: list[str], cause: str, kinds: list[str]
) -> None:
    for lines in ([*general, "", cause], [cause, *general]):
        assert answer(lines).kinds == kinds


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("Error: loss diverged, aborting", ["last-message"]),
        ("2099-12-31 23:59:59 ERROR loss diverged", ["last-message"]),
        ("[rank1]: Terminated", ["last-message"]),
        ("Finished with 0 errors, failed: 0", []),
        ("WARNING upload failed, it is repeated", []),
        ("INFO to avoid that a worker crashed", []),
        ("terminate_on_nan: loss=nan will stop training", []),
        ("Error: could not open file, upload failed", ["last-message"]),
        ("worker did not answer, node n1 crashed", ["last-message"]),
        ("job failed: no space", ["last-message"]),
        ("saved checkpoint; job failed", ["last-message"]),
        ("Loss diverged? no", []),
        ("diverged=False oom=False", []),
        ("Early stopping: loss plateaued; aborting training.", []),
        ("finished: 0 errors, 0 failures, loss diverged? no", []),
        ("No errors. Loss never diverged. Shutting down workers.", []),
        ("Failed samples: 0/1000, exit", []),
        ("Aborted runs so far: 0", []),
        ("Saved predictions of failed cases to failed.jsonl", []),
    ],
)
def test_match_of_a_last_line_that_says_how_training_ended(line: str, kinds: list[str]) -> None:
    assert answer(["step 1 loss 2.0", line]).kinds == kinds
    assert not answer(["step 1 loss 2.0", line, "step 2 loss 1.9"]).kinds
    assert not answer(["step 1 loss 2.0", "Training completed", line]).kinds


@pytest.mark.parametrize(
    "line",
    [
        "Exception in thread Thread-3 (_pin_memory_loop):",
        "Process SpawnProcess-1:",
        "[rank3]: frame #17: <unknown> + 0x55",
    ],
)
def test_match_of_what_stands_above_or_below_a_traceback_is_a_failure(line: str) -> None:
    assert answer(["step 1 loss 2.0", line]).exit_code == 1
    assert [each.error.type for each in answer([line, *OWN]).failures] == ["KeyError"]
    warned = [
        "[W1121 10:00:00 TCPStore.cpp:106] [c10d] sendBytes failed",
        "frame #0: c10::Error::Error(...)",
    ]
    assert answer(["step 1 loss 2.0", *warned]).exit_code == 3


@pytest.mark.parametrize(
    "rule", [rule for rule in rules().values() if rule.case], ids=lambda rule: rule.name
)
def test_match_of_another_wording_is_possible_with_and_without_its_type(rule: FailureRule) -> None:
    for line in (*rule.examples, *(example.partition("Error: ")[2] for example in rule.examples)):
        assert not line or possible(answer(["step 1 loss 2.0", line])) >= {rule.case}
    fsdp = (
        '  File "/v/lib/python3.11/site-packages/torch/distributed/fsdp/_runtime_utils.py", line 1,'
        " in forward"
    )
    strategies = CASES[rule.case].axes.strategy
    found = possible(answer(["Traceback (most recent call last):", fsdp, rule.examples[-1]]))
    if "Error: " in rule.examples[-1]:
        assert (rule.case in found) == ("fsdp" in strategies), "another strategy is another cause"


def test_recognize_in_the_code_of_another_model_is_possible_only_without_another_cause() -> None:
    fsdp = (
        '  File "/v/lib/python3.11/site-packages/torch/distributed/fsdp/_runtime_utils.py", line 1,'
        " in forward"
    )
    frames = [
        (
            "  File"
            ' "/v/lib/python3.11/site-packages/transformers/models/mistral/modeling_mistral.py",'
            " line 1, in forward"
        ),
        '  File "/v/lib/python3.11/site-packages/torch/nn/functional.py", line 2, in embedding',
        "RuntimeError: 'weight' must be 2-D",
    ]
    named = (
        '  File "train.py", line 3, in main',
        "    with FSDP.summon_full_params(model): model(x)",
    )
    for above, wanted in (
        ([fsdp], "fsdp-generate"),
        ([], "zero3-outside-engine"),
        (named, "fsdp-generate"),
    ):
        found = answer(["Traceback (most recent call last):", *above, *frames])
        assert [failure.perhaps[0].case for failure in found.failures] == [
            wanted
        ] and not found.names


@pytest.mark.parametrize("unit", ["* ", "(a)", "torch 1.0 ", "Error", "[E ", "loss="])
def test_scan_of_a_long_row_of_anything_ends(unit: str) -> None:
    began = time.process_time()
    seen([unit * (60_000 // len(unit)) + " error"])
    assert time.process_time() - began < 5  # each took minutes, or for ever


def test_scan_after_an_early_error_reads_no_further_line() -> None:
    errors = Errors()
    for number, text in enumerate(UNIFORM, 1):
        errors.read(Labels().split(f"[rank0]: {text}", number))
    assert errors.busy
    errors.expire(5000)
    assert not errors.busy and len(errors.found) == 1


def test_words_that_are_looked_for_are_in_no_usual_line() -> None:
    usual = [
        (
            "[2024-05-01 12:00:00] [INFO] train.py:120 rank 3 step 12 loss 2.3 lr 1e-5 time 1.2 s"
            " tokens/s 900"
        ),
        "{'loss': 1.2, 'grad_norm': 0.3, 'learning_rate': 1e-05, 'epoch': 0.1}",
        " 5%|# | 1/20 [00:01<00:02, 1it/s]",
    ]
    text = re.sub(r"\d", "", "\n".join(usual)).lower().encode()
    assert not [word for word in CATALOGUE.words if len(word) < 3 or word in text]


HEALTHY = {
    "words": "step {0} loss 1.{0} error=0.{0} done, nccl ok, 0 failed",
    "json": '{{"step": {0}, "loss": 1.{0}, "msg": "step {0} done, nccl ok", "error": null}}',
    "samples": (
        '{{"step": {0}, "loss": 1.{0}, "sample": "Traceback (most recent call last):\\n  NameError:'
        ' x{0}"}}'
    ),
}


@pytest.mark.parametrize("form", HEALTHY.values(), ids=HEALTHY)
def test_scan_of_many_lines_that_differ_in_their_digits_reads_what_others_show(form: str) -> None:
    lines = [form.format(number) for number in range(3000)]
    assert answer(lines).exit_code == 3
    for bad in (UNIFORM, [f"[rank1]: {UNIFORM[-1]}"], [WATCHDOG], ["rank 5: exit code 1"]):
        assert answer([*lines[:2000], *bad, *lines[2000:2010]]).exit_code != 3, bad


def test_scan_of_many_equal_errors_knows_the_last_line_and_other_exit_codes() -> None:
    warned = [f"[rank1]: RuntimeError: bad batch {number}" for number in range(3000)]
    (error,) = seen(warned).errors
    assert (error.line, error.last) == (1, 3000)
    codes = [f"rank {number}: exit code 0" for number in range(3000)]
    assert answer(codes).exit_code == 3
    assert answer([*codes[:2500], "rank 7: exit code 1", *codes]).exit_code == 1


WELL = ("\n".join(UNIFORM) + "\n").encode()


def test_match_of_an_empty_log_beside_others_is_no_error(match: Match, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert match(b"step 1 loss 2.0\ntraining done\n", str(tmp_path / "empty"))[0] == 3


@pytest.mark.parametrize(("last", "ended"), [("Finished", True), ("step 4 loss 1.8", False)])
def test_match_of_a_log_that_stops_after_a_step_says_so(
    last: str, ended: bool, match: Match
) -> None:
    text = f"step 2 loss 2.0\nstep 3 loss 1.9\n{last}\n".encode()
    assert json.loads(match(text, "--json")[1])[0]["training_ended"] == ended
    code, out, _ = match(text)
    assert code == 3 and ("before the training does" in out) != ended


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("loss 1.2 val_loss nan (in 3 batches)", ["validation-not-a-number"]),
        ("train_loss nan val_loss nan", ["not-a-number"]),
        ("latest loss: nan", ["not-a-number"]),
        ("{'eval_loss': nan, 'epoch': 1.0}", ["validation-not-a-number"]),
    ],
)
def test_a_loss_of_validation_that_is_no_number_is_not_that_of_training(
    line: str, kinds: list[str]
) -> None:
    assert answer([line, line, "Finished"]).kinds == kinds


def test_a_failure_without_another_cause_comes_before_those_that_have_one() -> None:
    sizes = (
        "copying a param with shape torch.Size([151936, 896]) from checkpoint, the shape in current"
        " model is"
    )
    head = "[rank1]: RuntimeError: Error(s) in loading state_dict for Qwen2ForCausalLM:"
    (cause,) = answer(
        [head, f"[rank1]: \tsize mismatch for model.embed_tokens.weight: {sizes} torch.Size([0])."]
    ).causes
    assert cause.perhaps[0].case == "zero3-load-state-dict"


def test_the_own_wording_of_a_case_is_not_another_wording_of_it() -> None:
    line = (
        "RuntimeError: Expected to mark a variable ready only once. 1) Use of a module parameter"
        " outside the `forward`"
    )
    place = (
        '  File "/venv/lib/python3.10/site-packages/torch/autograd/__init__.py", line 267, in'
        " backward"
    )
    (own,) = answer([*OWN[:-1], line]).causes
    assert [item.case for item in own.perhaps] == ["ddp-ready-once"]
    (cause,) = answer(["Traceback (most recent call last):", place, "    run()", line]).causes
    ((name, missing),) = {item.case: item.missing for item in cause.perhaps}.items()
    assert name == "ddp-ready-once" and any("used twice in a forward" in each for each in missing)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", 2),
        (b"\n\n\n", 3),
        (gzip.compress(WELL), 0),
        (WELL.replace(b"\n", b"\r\n"), 0),
        (b"  0%|   | 0/9 [00:00<?]\r" * 5000 + WELL, 0),
        (b"x" * 3_000_000 + b"\n" + WELL, 0),
        ("Fehler über \xff\n".encode("latin-1") + WELL, 0),
        (b"\0" * 5000 + WELL.replace(b"dtype", b"dt\0ype"), 0),
    ],
    ids=["0 bytes", "blank", "gzip", "CRLF", "a bar", "a long line", "latin-1", "zeros"],
)
def test_match_of_any_encoding_reads_it(
    content: bytes, code: int, match: Match, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out, _ = match(content)
    assert found == code and ("log is empty" in out) == (not content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert cli.main(["match"]) == code


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(256)) * 40, "Unpack it first"),
        (gzip.compress(WELL)[:20], "Unpack what is left: gzip -dc"),
        (gzip.compress(WELL * 5000)[:-9], "Unpack what is left: gzip -dc"),
        ("\n".join(UNIFORM).encode("utf-16"), "iconv -f UTF-16 -t UTF-8 {log} > "),
        (b'{"log": "' + b"a" * (17 << 20), "a record a line: jq -c"),
    ],
    ids=["binary", "cut gzip", "long cut gzip", "utf-16", "long JSON"],
)
def test_match_of_something_else_exits_2(
    content: bytes, message: str, match: Match, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = match(content)
    assert code == 2 and message.format(log=tmp_path / "a.log") in err and "a.log" in err
    assert (
        cli.main(["match", str(tmp_path / "none.log")]) == 2
        and "No such file" in capsys.readouterr().err
    )


@pytest.mark.parametrize("prefix", ["[rank{}]: ", ""])
def test_match_puts_the_message_of_interleaved_ranks_together(prefix: str, match: Match) -> None:
    frames = [
        "Traceback (most recent call last):",
        (
            '  File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 2581, in'
            " load_state_dict"
        ),
        "    raise RuntimeError(",
    ]
    shapes = "torch.Size([64, 32]) from checkpoint, the shape in current model is torch.Size([0])."
    error = [
        "RuntimeError: Error(s) in loading state_dict for Qwen2ForCausalLM:",
        f"\tsize mismatch for model.embed_tokens.weight: copying a param with shape {shapes}",
    ]
    lines = [prefix.format(rank) + line for line in frames + error for rank in range(4)]
    code, out, _ = match("\n".join(lines).encode())
    assert (code == 0) == bool(prefix) and "zero3-load-state-dict" in out


@pytest.mark.parametrize(
    ("before", "known"),
    [
        ("", True),
        ("[rank1]: [transformers] ", True),
        ("[WARNING|modeling_utils.py:2301] 2026-11-22 10:11:12,345 >> ", True),
        ("2026-11-22 10:11:12 - transformers.modeling_utils - WARNING - ", True),
        ("I had asked why it says: ", False),
    ],
)
def test_recognize_of_a_warning_skips_a_loggers_prefix(before: str, known: bool) -> None:
    said = (
        "You are using an old version of the checkpointing format that is deprecated (We will also"
    )
    assert [one.case for one in answer([f"{before}{said}"]).remarks] == [
        "old-checkpointing-hook"
    ] * known


# --- real logs: public threads, what is published of our own ranks, and runs that went well

LOGS = Path(__file__).parents[1] / "data" / "logs"


def fixtures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(
        (LOGS / f"{name}.yaml").read_text(encoding="utf-8")
    )
    return found


PUBLIC, PASSED = fixtures("public"), fixtures("healthy")


@pytest.mark.parametrize("entry", fixtures("hangs"), ids=lambda entry: entry["about"])
def test_recognize_of_a_timeout_tells_who_waited_where(entry: dict[str, Any]) -> None:
    lines = entry["log"].splitlines()
    found = answer(
        [
            *lines,
            (
                "E1123 api.py:826] failed (exitcode: -6) local_rank: 0 (pid: 7) of binary:"
                " /usr/bin/python"
            ),
        ]
    )
    assert (
        found.hang
        and {rank: str(wait) for rank, wait in found.hang.waits.items()} == entry["waits"]
    )
    assert (list(found.hang.silent), sorted(found.like)) == (
        entry.get("silent", []),
        entry.get("like", []),
    )
    assert found.kinds == [found.hang.kind, "abort"] and found.exit_code == 1
    sizes = [wait.size for _, wait in sorted(found.hang.waits.items())]
    assert found.hang.sizes_differ == ("sizes" in entry) and sizes == entry.get("sizes", sizes)
    assert answer([*UNIFORM, *lines]).names == ["fsdp-uniform-dtype"]  # the hang follows from it


def possible(found: LogAnswer) -> set[str]:
    return {item.case for failure in found.failures for item in failure.perhaps}


@pytest.mark.parametrize("entry", PUBLIC, ids=[entry["source"] for entry in PUBLIC])
def test_recognize_of_a_public_log_is_right_or_nothing(entry: dict[str, Any]) -> None:
    found = answer(entry["log"].split("\n"))
    assert found.names == entry.get("names", [])
    assert found.failures or found.remarks
    if not entry.get("names"):
        assert possible(found) >= set(entry.get("perhaps", ()))
        assert bool(possible(found)) == bool(entry.get("perhaps"))
    if entry.get("ranks"):
        assert list(found.causes[0].error.ranks) == entry["ranks"]
    if entry.get("echo"):
        assert not found.causes


@pytest.mark.parametrize("entry", PASSED, ids=[entry["about"] for entry in PASSED])
def test_recognize_of_a_healthy_log_is_nothing(entry: dict[str, Any]) -> None:
    found = answer(entry["log"].split("\n"))
    assert found.exit_code == 3, (found.failures, found.findings)


def test_match_of_losses_that_are_all_zero_is_a_failure_unless_a_gradient_is_not() -> None:
    steps = [f"{{'loss': 0.0, 'epoch': 0.{number}}}" for number in range(300)]
    assert (
        answer(steps).kinds
        == answer(["{'loss': 2.0, 'epoch': 0.0}", *steps, "done"]).kinds
        == ["zero-loss"]
    )
    for healthy in (
        steps[:2],
        [*steps, "{'loss': 0.01, 'epoch': 0.4}"],
        [*steps, "loss: 0.0, grad_norm: 1e-3"],
        [*steps, "lm loss: 0.2, aux loss: 0.0"],
    ):
        assert answer(healthy).exit_code == 3


def test_match_of_a_crash_in_the_output_that_a_scheduler_prints_as_information_is_one() -> None:
    assert (
        answer(
            ["step 1 loss 2.0", "{bash.py:12} INFO - Segmentation fault (core dumped)"]
        ).exit_code
        == 1
    )


@pytest.mark.parametrize(
    "form", ["Epoch {} recon_loss: {:.1f} kl_loss: 3.2", "epoch {} | loss {:.1f}"]
)
def test_match_of_large_losses_is_nothing(form: str) -> None:
    falling = [form.format(number, 54321.2 * 0.99**number) for number in range(100)]
    assert answer(["epoch 0 | loss 2.300", *falling, "Training completed"]).exit_code == 3


def test_advice_of_a_kind_of_failure_comes_once(match: Match) -> None:
    _, out, _ = match([f"[rank{rank}]: NCCL WARN Call to ibv_poll_cq failed" for rank in range(8)])
    assert out.count("InfiniBand or RoCE failed") == 8 and out.count("What to try:") == 1


def test_match_says_which_versions_are_in_the_range(match: Match) -> None:
    _, out, _ = match(["transformers==5.23.0", *UNIFORM])
    assert "your transformers 5.23.0 (the log) is in its range" in " ".join(out.split())


@pytest.mark.parametrize("form", ["string", "records", "array", "nested"])
def test_match_of_megabytes_of_json_on_one_line_reads_its_strings(form: str, match: Match) -> None:
    lines = [*(f"step {number} loss 2.{number % 10}" for number in range(40_000)), *UNIFORM]
    text = "\n".join(lines)
    made: dict[str, Any] = {
        "string": {"level": "info", "message": text, "host": "n1"},
        "records": [{"stack": text, "level": "error"}, {"msg": "ended", "level": "info"}],
        "array": [{"log": line, "stream": "stderr"} for line in lines],
        "nested": {"kubernetes": {"pod": "train-0"}, "log": "a" * 200_000 + "\n" + text},
    }
    (found,) = json.loads(match(json.dumps(made[form]).encode(), "--json")[1])
    assert found["recognized"] == ["fsdp-uniform-dtype"] and not found["failures"][0]["mixed"]
    assert match(json.dumps(made[form]).partition("Traceback")[0].encode())[0] == 3


@pytest.mark.parametrize("form", ["text", "zeros", "json"])
def test_match_names_the_lines_that_it_cuts(form: str, match: Match) -> None:
    begin, error = {"text": "x", "zeros": "\0", "json": "x"}[form], "torch.OutOfMemoryError: CUDA"
    for length, cut in ((MAX_LINE - len(error), []), (MAX_LINE, [2])):
        text = begin * (length - 1) + " " + error
        lines = ["step 0", json.dumps({"log": text}) if form == "json" else text, "step 1"]
        _, out, _ = match(lines)
        assert ("65,536 characters are read of line 2" in " ".join(out.split())) == bool(cut)
        (found,) = json.loads(match(lines, "--json")[1])
        assert found["cut"] == cut


def outcome(entry: dict[str, Any]) -> str:
    """Return how the first answer to an error line of a thread compares with the expected one."""
    found = answer(entry["line"].split("\n"))
    if found.exit_code == 3 and entry.get("failure", True):
        return "no failure"
    possible_first = list(
        dict.fromkeys(item.case for failure in found.causes for item in failure.perhaps)
    )
    named = found.names or possible_first or found.kinds[:1]
    if not named:
        return "right" if entry["want"] is None else "nothing"
    return "right" if entry["want"] in named else "wrong"


def test_figures_of_the_guide_are_those_of_the_threads() -> None:
    halves: dict[str, Counter[str]] = {}
    for row in fixtures("threads"):
        halves.setdefault(row["half"], Counter())[outcome(row)] += 1
    columns = ("right", "wrong", "nothing", "no failure")
    lines = [
        f"| {half} | {counts.total()} | {' | '.join(str(counts[each]) for each in columns)} |"
        for half, counts in halves.items()
    ]
    guide = Path(__file__).parents[2] / "docs" / "guides" / "match.md"
    assert "\n".join(lines) in guide.read_text(encoding="utf-8"), lines
    for half, counts in halves.items():
        assert (
            counts["right"] >= 0.9 * counts.total() and counts["wrong"] <= 0.05 * counts.total()
        ), half


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [
        (
            (
                "total capacity of 80.00 GiB of which 1.00 GiB is free. Of the allocated memory"
                " 70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but"
                " unallocated"
            ),
            "unused: fragmentation",
        ),
        (
            (
                "GPU 0; 80.00 GiB total capacity; 78.00 GiB already allocated; 512.00 MiB free;"
                " 78.50 GiB reserved in total"
            ),
            "no fragmentation",
        ),
        (
            (
                "total capacty of 80.00 GiB of which 0 bytes is free. Process 7 has 61.00 GiB"
                " memory in use. Of the allocated memory 19.00 GiB is allocated by PyTorch, and 0"
                " bytes is reserved by PyTorch but unallocated"
            ),
            "61.0 GiB belong to other processes (process 7: 61.00 GiB)",
        ),
        (
            (
                "total capacity of 80.00 GiB of which 1.00 GiB is free. Process 7 has 60.00 GiB"
                " memory in use. Of the allocated memory 10.00 GiB is allocated by PyTorch, and"
                " 9.00 GiB is reserved by PyTorch but unallocated"
            ),
            "belong to other processes (process 7: 60.00 GiB)",
        ),  # and fragmentation
        ("", ""),
    ],
)
def test_memory_tells_fragmentation_from_a_full_gpu(sizes: str, verdict: str) -> None:
    text = memory_of(f"CUDA out of memory. Tried to allocate 2.00 GiB ({sizes})")
    assert verdict in text and bool(text) == bool(sizes)


@pytest.mark.parametrize(
    ("example", "first"),
    [(0, "Unexpected keyword argument: "), (1, "Undefined symbol: "), (3, "Cannot import name: ")],
)
def test_advice_for_what_the_error_says_comes_first(example: int, first: str, match: Match) -> None:
    _, out, _ = match([rules()["version-conflict"].examples[example]])
    assert out.split("What to try:")[1].strip().startswith(first)


def test_what_only_follows_comes_last(match: Match) -> None:
    _, out, _ = match(
        b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        b"Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"
        b"  exitcode  : -9 (pid: 7)\n"
    )
    assert (
        out.splitlines()[-1].startswith("  Follow from another process's failure")
        and "SIGKILL" in out
    )


def test_rules_name_cases_of_the_catalog_and_threads() -> None:
    assert {rule.case for rule in rules().values()} - {""} <= set(CASES)
    assert all(
        re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each)
        for rule in rules().values()
        for each in rule.references
    )
    assert all(rule.references or rule.library for rule in rules().values())
    assert {row["want"] for row in fixtures("threads")} <= {
        *CASES,
        *rules(),
        "collective-timeout",
        "collective-mismatch",
        None,
    }


# A log of it is answered by the refusal dcp-no-metadata, by a path that published evidence shortens.
REFUSED = {"dcp-node-local"}


def tails(part: int) -> dict[str, tuple[frozenset[str], frozenset[str], str]]:
    """Every different log tail that is published, if ``part`` divides its checksum -> (the cases that its attempt shows by its
    records, those that its case declares to match too, where it is)."""
    found: dict[str, tuple[frozenset[str], frozenset[str], str]] = {}
    for document in published(BASELINE):
        case = CASES.get(document["case"])
        for name, variant in document["variants"].items() if case else ():
            for attempt in variant["attempts"]:
                ranks = [
                    rank
                    for rank in attempt["observation"]["ranks"]
                    if rank.get("log_tail") and zlib.crc32(rank["log_tail"].encode()) % part == 0
                ]
                if not ranks:
                    continue
                # As graded today: test_regrade_of_the_baseline_finds_no_difference.
                nothing: Any = {"outcome": "", "recognized": []}
                outcome = attempt["outcome"] if name in case.variants else nothing
                right = frozenset(item["case"] for item in outcome["recognized"])
                # A grade also needs the strategy, which a log does not show.
                ended = outcome["outcome"] == "other_failure"
                also = frozenset(case.also_matches if ended else ())
                for rank in ranks:
                    tail = rank.get("log_tail") or ""
                    if tail:
                        before, others, where = found.get(
                            tail, (frozenset(), frozenset(), document["path"])
                        )
                        found[tail] = (before | right, others | also, where)
    return found


@pytest.mark.xdist_group("baseline")
@pytest.mark.parametrize(
    ("part", "least"),
    [(30, 10), pytest.param(1, 300, marks=pytest.mark.slow)],
    ids=["gate", "all"],
)
def test_recognize_of_every_published_log_tail_is_right_or_nothing(part: int, least: int) -> None:
    """The gate reads a thirtieth of them: those whose checksum is divisible by ``part``."""
    wrong, missed, named = [], [], 0
    for tail, (right, also, where) in tails(part).items():
        found = answer(tail.split("\n"))
        names = set(found.names)
        if names - right - also:
            wrong.append(f"{where}: {sorted(names)}, not {sorted(right)}")
        named += bool(names)
        refused = [
            each.kind
            for each in found.leading
            if each.kind in rules() and rules()[each.kind].library
        ]
        if right and refused:
            wrong.append(f"{where}: {refused}, not {sorted(right)}")
        raised = {failure.error.type for failure in found.causes} - {""}
        known = {
            case for case in right if any(s.kind == "exception" for s in CASES[case].signatures)
        }
        known -= REFUSED
        if raised and known and not names and not possible(found) & right:
            missed.append(f"{where}: {sorted(raised)} is {sorted(right)}")
    assert (wrong, missed) == ([], []) and named > least


# Probe of the survey of a real GPU -> what its log shows; of the others: nothing.
SURVEYED = {
    "error.full_card*": "cuda-out-of-memory",
    "error.too_large*": "cuda-out-of-memory",
    "error.bad_index*": "device-side-assert",
    "error.sticky*": "device-side-assert",
    "nccl.pending_error*": "device-side-assert",
    "error.freed_view*": "cuda-illegal-access",
    "error.no_such_device*": "cuda-setup",
    "nccl.same_card": "nccl-error",
    "*.peer_*": "peer-lost",
    "nccl.two_hosts.broadcast": "peer-lost",
    "nccl.pipe": "peer-lost",
}


def test_match_of_the_logs_of_a_real_gpu() -> None:
    packed = (RESULTS / "gpu" / "h100-2026-11-28" / "survey.json.zst").read_bytes()
    probes = json.loads(zstandard.ZstdDecompressor().decompress(packed))["probes"]
    for name, probe in probes.items():
        found = answer([line for rank in probe["ranks"] for line in rank["log_tail"].splitlines()])
        expected = [kind for pattern, kind in SURVEYED.items() if fnmatchcase(name, pattern)]
        assert found.kinds == expected and found.hang is None, name
        own = [each.error.type for each in found.failures if not each.echo]
        assert own == ["ValueError"] or "peer_raises" not in name, (
            "a lost peer never hides the first failure"
        )
