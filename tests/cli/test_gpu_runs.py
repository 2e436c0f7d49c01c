"""`repro run` where something happens to the GPUs, before or meanwhile; what its ranks do is made
up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml, Process, uuid_of
from fake_stack import lines, python_that_says
from repro_matrix.launch.attempt import Attempt
from repro_matrix.results.store import Store
from repro_matrix.runner import run as workplace
from repro_matrix.runner.gpu_pool import GpuLocks
from test_engine import Fake, observation
from test_engine_gpus import hang, when_idle

Repro = Callable[..., Any]  # conftest.py
ONE = (
    "qwen15-fsdp-norm-shard",
    "model=qwen1.5-0.5b",
    "variants=[summon]",
    "repeat=1",
    "hardware=auto",
)


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ("3,1", [3, 1]),
        (f"{uuid_of(2)},{uuid_of(0)}", [2, 0]),
        ("GPU-1,GPU-3", [1, 3]),  # as much of a UUID as tells them apart
        ("", "CUDA_VISIBLE_DEVICES='' asks for no GPU"),
        ("-1", "asks for no GPU"),
        ("1,1", "'1' names a GPU a second time"),
        (f"{uuid_of(1)},GPU-1", "'GPU-1' names a GPU a second time"),
        ("GPU-", "'GPU-' names 4 of the 4 GPUs"),
        ("0,4", "'4' names none of the 4 GPUs"),
        ("0,GPU-1", "'GPU-1' names none of the 4 GPUs: CUDA takes numbers or UUIDs"),
        ("GPU-1,0", "'0' names none of the 4 GPUs: CUDA takes numbers or UUIDs"),
        ("MIG-5d7a", "not MIG devices"),
        (f"MIG-{uuid_of(1)}/1/0", "not MIG devices"),
    ],
)
def test_visible_devices_select_gpus_or_are_refused(
    visible: str, shown: Any, repro: Repro, tmp_path: Path
) -> None:
    python = python_that_says(tmp_path, *lines(2))
    words = ("doctor", f"case={ONE[0]}", *ONE[1:3], f"stack=python:{python}", "--json")
    done = repro(
        FakeNvml([FakeGpu() for _ in range(4)]), *words, env={"CUDA_VISIBLE_DEVICES": visible}
    )
    said = json.loads(done.out)
    if isinstance(shown, list):
        assert done.code == 0 and [gpu["index"] for gpu in said["gpus"]] == shown, said["problems"]
        assert (tmp_path / "visible").read_text().strip() == ",".join(
            map(str, shown)
        ) + " PCI_BUS_ID"
        return
    on_the_cpu = visible in ("", "-1")
    assert done.code == (0 if on_the_cpu else 3) and said["hardware"] == ["cpu"]
    assert shown in " ".join(said["notes"] if on_the_cpu else said["problems"])


def test_container_with_fewer_gpus_than_nvml_shows_measures_nothing(
    repro: Repro, tmp_path: Path
) -> None:
    python = python_that_says(tmp_path, *lines(2))
    words = ("run", *ONE, f"stack=python:{python}", f"results={tmp_path / 'results'}")
    done = repro(FakeNvml([FakeGpu() for _ in range(4)]), *words)
    assert done.code == 3 and not list(Store(tmp_path / "results").documents())
    assert "it sees 2 of 4 GPUs" in done.err and "list its own in CUDA_VISIBLE_DEVICES" in done.err


class Run:
    """`repro run` of two attempts, unfixed and summon, on these GPUs; ``happens`` while each is at
    work."""

    def __init__(self, repro: Repro, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repro, self.folder = repro, folder
        self.launched: list[tuple[str, tuple[str, ...]]] = []
        self.happens: Callable[[Attempt, threading.Event], Any] = lambda attempt, stop: None
        monkeypatch.setattr(workplace, "open_launcher", lambda name: Fake(self._launch))
        # CHECK_S 0: made-up attempts end at once, so every one must find the GPUs as the one before
        # has left them
        for name, value in {
            "gpu_pool.RELEASE_S": 0.3,
            "gpu_pool.CHECK_S": 0.0,
            "schedule.OTHER_USER_S": 0.3,
        }.items():
            monkeypatch.setattr(f"repro_matrix.runner.{name}", value)

    def _launch(self, attempt: Attempt, stop: threading.Event) -> Any:
        self.launched.append((attempt.settings["variant"], attempt.gpus))
        return self.happens(attempt, stop)

    def __call__(
        self, gpus: list[FakeGpu], usable: int | None = None, visible: str | None = None
    ) -> tuple[int, str, list[Any]]:
        """Exit code, what was said, and (variant, kind of infrastructure error) of each stored
        attempt."""
        self.nvml = FakeNvml(gpus)
        python = python_that_says(self.folder, *lines(len(gpus) if usable is None else usable))
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        words = ("run", *ONE, f"stack=python:{python}", f"results={self.folder / 'results'}")
        done = self.repro(self.nvml, *words, env=env)
        (stored,) = Store(self.folder / "results").documents()
        attempts = [
            (name, each["outcome"].get("infra_error"))
            for name, variant in stored["variants"].items()
            for each in variant["attempts"]
        ]
        return done.code, " ".join((done.out + done.err).split()), attempts


@pytest.fixture
def run(repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(repro, tmp_path, monkeypatch)


def test_gpu_that_another_user_fills_is_left_and_the_attempt_repeated(run: Run) -> None:
    def fill(attempt: Attempt, stop: threading.Event) -> Any:
        if len(run.launched) > 1:
            return None
        run.nvml.gpus[0].processes.append(Process(4711, 81000))
        return {
            **observation(attempt, None),
            "infra_error": {"kind": "memory", "message": "rank 0: out of memory"},
        }

    run.happens = fill
    code, said, attempts = run([FakeGpu() for _ in range(4)])
    assert code == 0 and attempts[:2] == [("unfixed", "device"), ("unfixed", None)]
    assert "gpu0" in said and "process 4711 (81000 MiB)" in said
    assert sum(uuid_of(0) in gpus for _, gpus in run.launched) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_gpu_that_falls_off_the_bus_ends_its_attempt(run: Run, count: int) -> None:
    def fall_off(attempt: Attempt, stop: threading.Event) -> Any:
        if len(run.launched) > 1:
            return None
        run.nvml.gpus[1].xids.append(79)
        run.nvml.gpus[1].lost = True
        assert stop.wait(100), "its ranks would hang until the deadline"
        return observation(attempt, None, interrupted=True)

    run.happens = fall_off
    code, said, attempts = run([FakeGpu() for _ in range(count)])
    assert "Xid 79" in said and ("unfixed", "gpu_failure") in attempts
    assert code == (0 if count == 3 else 3) and (("unfixed", None) in attempts) == (count == 3)
    assert sum(uuid_of(1) in gpus for _, gpus in run.launched) == 1


@pytest.mark.parametrize(
    ("gpus", "visible", "code"),
    [
        ([FakeGpu(), FakeGpu(lost=True)], None, 3),
        (
            [FakeGpu(), FakeGpu(lost=True)],
            "0",
            0,
        ),  # one GPU is all that is requested: as on a machine with one
        ([FakeGpu(), FakeGpu(), FakeGpu(lost=True)], None, 0),  # its cells need two
        ([FakeGpu()], None, 0),
    ],
)
def test_cells_that_leave_the_gpus_because_one_is_lost_make_the_run_incomplete(
    gpus: list[FakeGpu], visible: str | None, code: int, run: Run
) -> None:
    """With two GPUs the case runs on them, with one on the CPU."""
    found, said, attempts = run(gpus, sum(not gpu.lost for gpu in gpus), visible)
    assert found == code and len(attempts) == 2, said
    assert ("not measured on GPUs because some are left out" in said) == (code == 3)
    assert {len(used) for _, used in run.launched} == ({2} if len(gpus) == 3 else {0})


@pytest.mark.parametrize("at", [1, 2])
def test_attempt_on_a_gpu_with_a_hardware_error_at_its_end_is_no_evidence(
    run: Run, at: int
) -> None:
    def report_error(attempt: Attempt, stop: threading.Event) -> None:
        if len(run.launched) == at:
            index = next(index for index in range(4) if uuid_of(index) in attempt.gpus)
            run.nvml.gpus[index].xids.append(48)

    run.happens = report_error
    _, said, attempts = run([FakeGpu() for _ in range(4)])
    assert (
        "Xid 48" in said
        and [kind for _, kind in attempts].count("gpu_failure") == 1
        and len(attempts) == 3
    )


def test_driver_that_is_updated_meanwhile_ends_the_use_of_gpus(run: Run) -> None:
    run.happens = lambda attempt, stop: vars(run.nvml).update(error=18) or None
    code, said, attempts = run([FakeGpu(), FakeGpu()])
    assert code == 3 and len(run.launched) == 1 and "NVML/RM version mismatch" in said
    assert ("summon", "not_enough_gpus") in attempts


def test_run_that_nvml_cannot_watch_uses_no_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be opened to plan the run, and cannot when the run begins."""
    enter = workplace.Nvml.__enter__

    def fail(self: Any) -> Any:
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # ends before the fixture's own, which it must not restore
            FakeNvml(init_error=18).install(patch)
            return enter(self)

    monkeypatch.setattr(workplace, "Nvml", type("Nvml", (workplace.Nvml,), {"__enter__": fail}))
    code, said, attempts = run([FakeGpu(), FakeGpu()])
    assert code == 3 and not run.launched and "cannot be watched: NVML: RM has detected" in said, (
        said
    )
    assert {kind for _, kind in attempts} == {"not_enough_gpus"}


def test_run_that_stops_early_says_what_it_measured(
    repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hangs with NCCL in a cell of four variants."""

    def launch(attempt: Attempt, stop: threading.Event) -> Any:
        return hang(attempt, "nccl")

    monkeypatch.setattr(workplace, "open_launcher", lambda name: Fake(launch))
    words = [
        ONE[0],
        ONE[1],
        "variants=[summon,root-call,ddp]",
        *ONE[3:],
        "jobs=1",
        f"results={tmp_path / 'results'}",
    ]
    done = repro(
        FakeNvml([FakeGpu(), FakeGpu()]),
        "run",
        *words,
        f"stack=python:{python_that_says(tmp_path, *lines(2))}",
    )
    assert done.code == 3 and "stopped after 3 hangs with NCCL" in done.err
    assert (
        "Stopped after 3 attempts, 0 of 1 cell complete" in done.out
        and "Nothing was measured" not in done.out
    )
    assert done.out.splitlines()[-1].startswith("exit code 3: ")


def test_run_waits_for_the_gpus_of_another_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with GpuLocks(run.folder / "cache" / "state", "another-run") as other:
        assert other.acquire([uuid_of(0)])
        launched_before: list[int] = []
        when_idle(
            monkeypatch,
            lambda: (launched_before.append(len(run.launched)), other.release([uuid_of(0)])),
        )
        code, said, attempts = run([FakeGpu(), FakeGpu()])
    assert code == 0 and len(attempts) == 2 and launched_before == [0], said
