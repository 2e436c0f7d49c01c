"""`repro doctor`, `repro matrix` and `repro run` on machines with GPUs: a fake NVML, and
interpreters that answer the probe. Nothing launches ranks unless it is marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml, Process, uuid_of
from fake_stack import DONE, devices_of, lines, python_that_says
from repro_matrix.cli import main as cli
from repro_matrix.environment import probe as probe_module
from repro_matrix.results.store import Store
from repro_matrix.runner import run as workplace
from repro_matrix.runner import session
from repro_matrix.runner.gpu_pool import GpuLocks
from test_engine import Fake, observation

ONE = ("case=qwen15-fsdp-norm-shard", "model=qwen1.5-0.5b", "variants=[summon]")
CHECK = "repro_matrix.runner.prerequisites.check_torch"
Repro = Callable[..., Any]  # conftest.py


CPU_BUILD = lines(0, torch="2.13.0+cpu", cuda=None, nccl=False)


def documents(tmp_path: Path) -> list[dict[str, Any]]:
    folder = tmp_path / "results"
    return list(Store(folder).documents()) if folder.exists() else []


def test_matrix_torch_that_cannot_use_the_gpus_launches_nothing(
    repro: Repro, tmp_path: Path
) -> None:
    """A CPU build on a machine with GPUs is exit 3 and the command that installs another one."""
    nvml = FakeNvml([FakeGpu(), FakeGpu()], driver="535.129.03", cuda=12020)
    python = python_that_says(tmp_path, *CPU_BUILD)
    done = repro(nvml, "matrix", *ONE, f"stack=python:{python}", f"results={tmp_path / 'results'}")
    assert done.code == 3 and documents(tmp_path) == []
    assert (
        "NVML sees 2 x NVIDIA A100-SXM4-80GB (driver 535.129.03" in done.err
        and "--torch-backend=auto" in done.err
    )


def test_plan_reports_hardware_and_problems_as_a_run_does(repro: Repro, tmp_path: Path) -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(4)], driver="535.129.03", cuda=12020)
    old = python_that_says(
        tmp_path, *lines(init_error="RuntimeError: The NVIDIA driver on your system is too old")
    )
    words = ("matrix", "--dry-run", *ONE)
    done = repro(nvml, *words, f"stack=python:{old}")
    assert done.code == 3 and "--torch-backend=auto" in done.err and not done.out
    python = python_that_says(tmp_path, *lines(gpus=2))
    done = repro(
        nvml, *words, "ranks=2", f"stack=python:{python}", env={"CUDA_VISIBLE_DEVICES": "1,3"}
    )
    assert done.code == 0
    assert done.err.startswith("repro: hardware gpu2 (2 x NVIDIA A100-SXM4-80GB), backend nccl")
    done = repro(nvml, *words, env={"CUDA_VISIBLE_DEVICES": ""})
    first, second = done.err.splitlines()[:2]
    assert (
        done.code == 0
        and first.startswith("repro: hardware cpu, backend gloo")
        and "no GPU" in second
    )


def test_doctor_shows_every_gpu_and_its_problems(repro: Repro, tmp_path: Path) -> None:
    gpus = [
        FakeGpu(mode="exclusive_process", ecc_uncorrected=3),
        FakeGpu(processes=[Process(99999999, 4321)]),
    ]
    gpus += [FakeGpu(mig=["MIG-x"]), FakeGpu()]
    python = python_that_says(tmp_path, *lines(gpus=3))
    done = repro(
        FakeNvml(gpus), "doctor", *ONE[:2], "variants=[four-ranks]", f"stack=python:{python}"
    )
    shown = " ".join(done.out.split())
    assert done.code == 3, "the variants for four ranks"
    for part in (
        "PROBLEM: 1 variant not measured on GPUs because some are left out (GPU 2 ",
        "GPU 0: NVIDIA A100-SXM4-80GB GPU-00000000",
        "mode exclusive_process",
        "3 uncorrected ECC errors",
        "in use by process 99999999 (4321 MiB)",
        "77599 of 81920 MiB free",
        "GPU 2 (NVIDIA A100-SXM4-80GB): it is in MIG mode",
        "/dev/shm: ",
        "hangs: ",
        "hardware: gpu3 (3 x NVIDIA A100-SXM4-80GB), backend nccl | cpu, backend gloo;",
        "torch 2.13.0+cu130 (CUDA 13.0, NCCL 2.28.9): it computes on 3 of 3 GPUs",
    ):
        assert part in shown
    python = python_that_says(tmp_path, *lines(gpus=2))
    two = repro(FakeNvml(gpus), "doctor", *ONE, f"stack=python:{python}", "hardware=gpu2").out
    assert "hardware: gpu2 (2 x NVIDIA A100-SXM4-80GB; 1 more unused), backend nccl;" in two


def test_doctor_reports_gpus_that_are_in_use_or_were_not_tested(
    repro: Repro, tmp_path: Path
) -> None:
    gpus = [FakeGpu(), FakeGpu(processes=[Process(99999999, 4321)]), FakeGpu()]
    devices = devices_of(gpus)
    devices[2]["touched"] = False
    words = (*ONE, f"stack=python:{python_that_says(tmp_path, *lines(3, devices=devices))}")
    with GpuLocks(tmp_path / "cache" / "state", "another-run") as other:
        assert other.acquire([uuid_of(2)])
        found = repro(FakeNvml(gpus), "doctor", *words, "--json")
    notes = "\n".join(json.loads(found.out)["notes"])
    assert found.code == 0, "two GPUs are enough for these attempts"
    assert "GPU 1 is in use by process 99999999 (4321 MiB)" in notes and "End that process" in notes
    assert "GPU 2 not tested" in notes and "GPU 0" not in notes
    for command in (["doctor"], ["matrix", "--dry-run"]):
        idle = repro(FakeNvml(gpus), *command, *words)
        assert idle.code == 3 and "nothing was computed on GPU 2" in " ".join(
            (idle.out + idle.err).split()
        )
    gpus[2].processes, devices[2]["touched"] = gpus[1].processes, True
    python_that_says(tmp_path, *lines(3, devices=devices))
    for command in (["doctor"], ["matrix", "--dry-run"]):
        busy = repro(FakeNvml(gpus), *command, *words)
        assert busy.code == 3 and "up to 2 GPUs, and 1 of" in " ".join(
            (busy.out + busy.err).split()
        )


def test_machine_without_a_loopback_interface_measures_nothing(
    repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that has no network at all."""

    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", unreachable)
    words = (*ONE, f"stack=python:{python_that_says(tmp_path, *lines())}", "hardware=cpu")
    done = repro(FakeNvml([]), "doctor", *words, "--json")
    assert done.code == 3 and "127.0.0.1" in json.loads(done.out)["problems"][0]
    done = repro(FakeNvml([]), "matrix", *words)
    assert done.code == 3 and "127.0.0.1" in done.err


def test_doctor_reports_a_problem_where_a_run_would_end(repro: Repro, tmp_path: Path) -> None:
    words = ("doctor", *ONE, "--json")
    python = python_that_says(tmp_path, *lines())
    done = repro(
        FakeNvml([FakeGpu()]), *words, f"stack=python:{python}", env={"CUDA_VISIBLE_DEVICES": "all"}
    )
    shown = json.loads(done.out)
    assert done.code == 3 and "CUDA_VISIBLE_DEVICES=all" in shown["problems"][0]
    assert shown["hardware"] == ["cpu"] and shown["cells"], (
        "what can run on the CPU is reported as well"
    )
    unusable = repro(
        FakeNvml([FakeGpu()]), *words, f"stack=python:{python_that_says(tmp_path, *CPU_BUILD)}"
    )
    assert unusable.code == 3 and "a build without CUDA" in json.loads(unusable.out)["problems"][0]


@pytest.mark.parametrize(
    ("gpus", "visible", "why"),
    [
        ([FakeGpu(mig=["MIG-x"]) for _ in range(8)], None, "MIG mode"),
        ([FakeGpu(mode="prohibited") for _ in range(8)], None, "prohibited"),
        ([FakeGpu() for _ in range(8)], "0,1,1", "a second time"),
    ],
    ids=["MIG", "mode", "duplicates"],
)
def test_doctor_does_not_contradict_itself_where_no_gpu_can_be_used(
    gpus: list[FakeGpu], visible: str | None, why: str, repro: Repro, tmp_path: Path
) -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    done = repro(
        FakeNvml(gpus),
        "doctor",
        *ONE,
        f"stack=python:{python_that_says(tmp_path, *lines(8))}",
        env=env,
    )
    shown = " ".join(done.out.split())
    assert done.code == 3 and "PROBLEM: hardware=auto: GPUs are here" in shown and why in shown
    assert shown.count(why) == 1, "one line for eight GPUs"
    assert (
        "GPUs: none that can be used" in shown
        and "8 of 8 GPUs" not in shown
        and "run here" not in shown
    )
    assert done.out.splitlines()[-1].startswith(
        "1 of 1 cells can run with hardware=cpu; those of the GPUs, once 1 problem"
    )


def test_doctor_reports_a_gpu_that_is_lost_while_it_is_probed(
    repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, ask = [FakeGpu(), FakeGpu()], probe_module.run_probe

    def lose(*words: Any) -> Any:
        answer = ask(*words)
        gpus[1].lost = True
        return answer

    monkeypatch.setattr(probe_module, "run_probe", lose)
    done = repro(
        FakeNvml(gpus),
        "doctor",
        *ONE,
        "--json",
        f"stack=python:{python_that_says(tmp_path, *lines(2))}",
    )
    assert done.code == 3 and any(
        "GPU 1" in problem for problem in json.loads(done.out)["problems"]
    )


def test_run_variant_whose_stack_cannot_use_the_gpus_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(stack: Any, *_: Any) -> tuple[dict[str, Any], str | None]:
        why = "NVML sees 2 x A100 (driver 535), and torch cannot use them:\n  uv pip install ..."
        found = {
            "torch": "2.13",
            "cuda": "13.0",
            "nccl_version": "2.28",
            "devices": [],
            "asked": [0, 1],
        }
        return found, None if stack.name != "current" else why

    class Clean(Fake):
        def launch(self, attempt: Any, stop: Any) -> dict[str, Any]:
            return observation(attempt, None)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    FakeNvml([FakeGpu(), FakeGpu()]).install(monkeypatch)
    monkeypatch.setattr(CHECK, probe)
    monkeypatch.setattr(workplace, "open_launcher", lambda name: Clean())
    words = [
        "fsdp-generate",
        "model=qwen1.5-0.5b",
        "variants=[summon,newer-transformers]",
        "hardware=gpu2",
    ]
    stack = f"stack=python:{python_that_says(tmp_path, *lines())}"
    code = cli.main(["run", *words, stack, f"results={tmp_path / 'results'}", "--json"])
    said = capsys.readouterr()
    (stored,) = documents(tmp_path)
    variants = {name: variant["skipped"] for name, variant in stored["variants"].items()}
    assert variants["unfixed"] is variants["summon"] is None, "the rest is measured"
    assert code == 3 and variants["newer-transformers"] is not None
    assert (
        "repro: stack=current: NVML sees 2 x A100 (driver 535)" in said.err
        and "uv pip install" in said.err
    )
    assert (
        cli.main(["run", *words, stack, "--dry-run"]) == 3
        and "stack=current: NVML" in capsys.readouterr().err
    )
    assert cli.main(["doctor", f"case={words[0]}", *words[1:], stack, "--json"]) == 3
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("NVML sees 2 x A100 (driver 535)"), (
        "no green doctor before such a run"
    )


@pytest.mark.parametrize(
    ("words", "probed", "first"),
    [
        ([*ONE, "hardware=cpu"], set(), "cpu"),
        (["case=qwen-remote-code-import"], set(), "cpu"),  # its cells are for the CPU
        ([*ONE, "hardware=cpu,gpu2"], {2}, "gpu2"),
        ([*ONE, "hardware=gpu1,gpu2"], {2}, "gpu2"),
    ],
)
def test_prepare_probes_all_selected_gpus_and_no_cpu(
    words: list[str], probed: set[int], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    FakeNvml([FakeGpu(), FakeGpu()]).install(monkeypatch)
    monkeypatch.setattr(
        "repro_matrix.environment.stacks.extensions.op_compiled", lambda stack: True
    )
    monkeypatch.setattr(
        CHECK, lambda stack, profile, *_: (seen.add(len(profile.gpus)), ({}, None))[1]
    )
    prepared = session.prepare(words, build_stacks=False, probe=True)
    assert seen == probed and {plan.profile.name for plan in prepared.plans} >= {first}


@pytest.mark.parametrize(("signal", "known"), [("TERM", False), ("KILL", False), ("SEGV", True)])
def test_probe_that_is_ended_from_outside_says_nothing_about_the_gpus(
    signal: str, known: bool, repro: Repro, tmp_path: Path
) -> None:
    python = python_that_says(tmp_path, *lines(1), probe=f"kill -{signal} $$")
    done = repro(FakeNvml([FakeGpu()]), "doctor", *ONE, f"stack=python:{python}", "--json")
    (problem,) = json.loads(done.out)["problems"]
    assert done.code == 3 and f"SIG{signal}" in problem
    assert ("cannot use them" in problem, "it is unknown" in problem) == (known, not known)


HANGS = """echo '{"stage": "all-reduce"}'; [ -n "$NCCL_P2P_DISABLE" ] || exec sleep 60; echo '{"stage": "done"}'"""
WRONG = """echo '{"error": "RuntimeError: the sum of 1048576 numbers is wrong"}'"""
TWICE = """[ "$NCCL_HOSTID" = repro-rank-$3 ] && echo '{"error": "Duplicate GPU detected"}'"""


@pytest.mark.parametrize(
    ("pair", "hardware", "reasons"),
    [
        (HANGS, "gpu2", ["it hangs", "add env.NCCL_P2P_DISABLE=1"]),
        (WRONG, "gpu2", ["sum of 1048576 numbers is wrong", "NCCL_P2P_DISABLE=1 does not help"]),
        ("echo Killed", "gpu2", ["a rank ended with exit code 0: Killed"]),
        (TWICE, "gpu1-nccl", ["Duplicate GPU detected", "hardware=gpu1-shared uses gloo"]),
        (WRONG, "gpu1", []),  # one rank alone is for the canary
        (WRONG, "gpu1-shared", []),
    ],
)
def test_doctor_lets_two_ranks_add_numbers_with_nccl(
    pair: str,
    hardware: str,
    reasons: list[str],
    repro: Repro,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("repro_matrix.environment.probe.PAIR_S", 1.0)
    gpus = [FakeGpu() for _ in range(2 if hardware == "gpu2" else 1)]
    python = python_that_says(tmp_path, *lines(len(gpus)), pair=pair)
    words = (
        "doctor",
        *ONE,
        f"stack=python:{python}",
        f"hardware={hardware}",
        "min_cells=0",
        "--json",
    )
    done = repro(FakeNvml(gpus), *words)
    problems = json.loads(done.out)["problems"]
    assert done.code == (3 if reasons else 0) and len(problems) == bool(reasons)
    assert all(reason in problems[0] for reason in reasons)
    if pair == HANGS:
        assert "nvidia-smi" not in problems[0], "both GPUs answer"
        monkeypatch.setattr("repro_matrix.environment.probe.PAIR_S", 200.0)
        remedied = repro(FakeNvml(gpus), *words, "env.NCCL_P2P_DISABLE=1")
        assert remedied.code == 0, "what the ranks are given, the probe is given too"


def test_every_pair_of_gpus_is_tried_and_those_that_fail_are_named(
    repro: Repro, tmp_path: Path
) -> None:
    """GPUs 2 and 3, and 3 and 4, have a broken path; only the pair of GPUs 0 and 1 was tried."""
    python = python_that_says(
        tmp_path, *lines(5), pair=f'[ "$5" -lt 3 ] || {{ {WRONG}; exit; }}; {DONE}'
    )
    words = (*ONE, f"stack=python:{python}", "min_cells=0", "--json")
    done = repro(FakeNvml([FakeGpu() for _ in range(5)]), "doctor", *words)
    said = json.loads(done.out)
    assert (
        done.code == 3
        and said["torch"]["pairs"] == [[2, 3], [3, 4]]
        and not said["torch"]["without_p2p"]
    )
    assert "fails on GPU 2 and 3, GPU 3 and 4: " in said["problems"][0]
    assert (
        probe_module.pairs_of([0, 2, 5, 7]) == [[0, 2], [5, 7]] and probe_module.pairs_of([4]) == []
    )


def test_doctor_names_both_numbers_where_torch_sees_fewer_gpus(
    repro: Repro, tmp_path: Path
) -> None:
    python = python_that_says(tmp_path, *lines(1))
    done = repro(FakeNvml([FakeGpu(), FakeGpu()]), "doctor", *ONE, f"stack=python:{python}")
    assert done.code == 3 and "computes on 1 of 2 GPUs, of which torch sees 1" in " ".join(
        done.out.split()
    )


SLOW_IMPORT = """echo '{"stage": "import torch"}'; sleep 2"""
IN_CUDA = """echo '{"stage": "initialise CUDA"}'; exec sleep 60"""
IN_NCCL = """echo '{"stage": "all-reduce"}'; exec sleep 60"""


@pytest.mark.parametrize(
    ("probe", "pair", "reasons"),
    [
        (SLOW_IMPORT, SLOW_IMPORT + "\n" + DONE, []),
        (IN_CUDA, DONE, ["(at: initialise CUDA) was not done after", "nvidia-smi -pm 1"]),
        (":", IN_CUDA, ["it hangs (at: initialise CUDA"]),
        (":", IN_NCCL, ["it hangs (at: all-reduce", "NCCL_P2P_DISABLE=1 does not help"]),
    ],
    ids=["slow import", "cuda", "rank", "nccl"],
)
def test_probe_waits_for_imports_and_reports_a_hang_in_seconds(
    probe: str,
    pair: str,
    reasons: list[str],
    repro: Repro,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"DEVICE_S": 1.5, "PAIR_S": 1.0, "NEWS_S": 0.5}
    assert probe_module.PAIR_S < probe_module.DEVICE_S < 20, (
        "as the limits really are, a hang is found within 20 s"
    )
    for name, value in limits.items():
        monkeypatch.setattr(probe_module, name, value)
    python = python_that_says(tmp_path, *lines(2), probe=probe, pair=pair)
    done = repro(
        FakeNvml([FakeGpu(), FakeGpu()]), "doctor", *ONE, f"stack=python:{python}", "--json"
    )
    problems = json.loads(done.out)["problems"]
    assert done.code == (3 if reasons else 0) and len(problems) == bool(reasons)
    assert all(reason in " ".join(problems[0].split()) for reason in reasons), problems
    if not reasons:
        assert "import torch has taken" in done.err


@pytest.mark.parametrize("mode", ["default", "exclusive_process"])
def test_probe_puts_one_process_on_an_exclusive_gpu(
    mode: str, repro: Repro, tmp_path: Path
) -> None:
    """The probe itself and two pairs of ranks are on the GPUs at once, where they may be."""

    def count(together: int) -> str:
        wait = f"while [ $(ls been-* | wc -l) -lt {together} ]; do sleep 0.05; done"
        stay = f"touch at-$$ been-$$; {wait}; ls at-* | wc -l >>counts; sleep 0.5; rm at-$$"
        return f"cd {tmp_path}; {stay}; cd - >/dev/null"

    probe = count(3 if mode == "default" else 1)
    python = python_that_says(tmp_path, *lines(2), probe=probe, pair=f"{count(3)}; {DONE}")
    gpus = [FakeGpu(mode=mode), FakeGpu(mode=mode)]
    done = repro(FakeNvml(gpus), "doctor", *ONE, f"stack=python:{python}", "--json")
    assert done.code == 0 and not json.loads(done.out)["problems"]
    most = max(map(int, (tmp_path / "counts").read_text().split()))
    assert most == 2 if mode != "default" else most > 2, "two ranks on two GPUs"


def test_doctor_names_what_the_ranks_will_and_will_not_get(repro: Repro, tmp_path: Path) -> None:
    python = python_that_says(
        tmp_path, *lines(2, imports={"deepspeed": "MissingCUDAException: CUDA_HOME ..."})
    )
    shell = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_DEBUG": "INFO",
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    words = (
        "doctor",
        "case=train-step",
        "model=qwen1.5-0.5b",
        f"stack=python:{python}",
        "env.NCCL_DEBUG=WARN",
        "--json",
    )
    notes = json.loads(repro(FakeNvml([FakeGpu(), FakeGpu()]), *words, env=shell).out)["notes"]
    (shell_note,) = [note for note in notes if "this shell" in note]
    assert (
        "env.CUDA_LAUNCH_BLOCKING=1 env.NCCL_P2P_DISABLE=1" in shell_note
        and "NCCL_DEBUG" not in shell_note
    )
    assert "DEVICE_ORDER" not in shell_note, "the launcher reads it itself"
    (package_note,) = [note for note in notes if "deepspeed does not import" in note]
    assert "CUDA_HOME to a CUDA toolkit" in package_note


def test_doctor_on_eight_gpus_computes_on_all_of_them_in_one_process_of_each_stack(
    tmp_path: Path,
) -> None:
    gpus = [FakeGpu() for _ in range(8)]
    python = python_that_says(tmp_path, *lines(8, devices=devices_of(gpus)))
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= FakeNvml(gpus).on_path(tmp_path / "nvml", current=python) | {
        "REPRO_CACHE": str(tmp_path / "cache")
    }
    command = [sys.executable, "-m", "repro_matrix", "doctor", f"stack=python:{python}", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["hardware"] == ["a100x8", "cpu"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and all(line.endswith(" 0,1,2,3,4,5,6,7") for line in asked), (
        "this stack and the current one"
    )


HANGS_IN_CUDA = """echo '{"torch": "2.13.0+cu130", "cuda": "13.0"}'; echo '{"stage": "initialise CUDA"}'; exec sleep 60"""


def test_matrix_with_a_probe_that_hangs_measures_nothing(
    repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro_matrix.environment.probe.DEVICE_S", 1.0)
    python = python_that_says(tmp_path, probe=HANGS_IN_CUDA)
    done = repro(
        FakeNvml([FakeGpu(), FakeGpu()]),
        "matrix",
        *ONE,
        f"stack=python:{python}",
        f"results={tmp_path / 'r'}",
    )
    assert done.code == 3 and documents(tmp_path) == []
    assert "(at: initialise CUDA) was not done after 1 s" in done.err


@pytest.mark.parametrize(
    ("said", "words", "reason"),
    [
        # The package that a ZeRO cell needs does not import on these GPUs ...
        (
            {"imports": {"deepspeed": "MissingCUDAException: CUDA_HOME does not exist"}},
            ["case=zero3-outside-engine", "model=qwen1.5-0.5b", "hardware=gpu2"],
            "does not import with a GPU visible",
        ),
        # ... and two ranks need two GPUs, of which this job's profile has one.
        ({}, ["case=zero3-outside-engine", "model=qwen1.5-0.5b", "hardware=gpu1"], "needs 2 GPUs"),
    ],
    ids=["import", "nothing planned"],
)
def test_matrix_that_launches_nothing_is_never_green(
    said: dict[str, Any],
    words: list[str],
    reason: str,
    repro: Repro,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Never(Fake):
        def launch(self, attempt: Any, stop: Any) -> dict[str, Any]:
            raise AssertionError("nothing can be measured")

    monkeypatch.setattr(workplace, "open_launcher", lambda name: Never())
    python = python_that_says(tmp_path, *lines(int(words[-1][-1]), **said))
    gpus = [FakeGpu() for _ in range(int(words[-1][-1]))]
    for command in (["doctor"], ["matrix", "--dry-run"]):
        planned = repro(FakeNvml(gpus), *command, *words, f"stack=python:{python}")
        assert planned.code == 3 and reason in " ".join((planned.out + planned.err).split()), (
            planned.out + planned.err
        )
    done = repro(
        FakeNvml(gpus),
        "matrix",
        *words,
        f"stack=python:{python}",
        f"results={tmp_path / 'results'}",
    )
    assert done.code == 3 and reason in " ".join((done.out + done.err).split()), done.out + done.err
