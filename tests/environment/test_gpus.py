"""Which GPUs a machine has and can use, which profile ``auto`` chooses, and when it refuses to be
the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from fake_nvml import A100, H200, FakeGpu, FakeNvml, Process, uuid_of
from fake_stack import lines, python_that_says
from hypothesis import given
from hypothesis import strategies as st
from launching import wait_for
from repro_matrix.config import catalog
from repro_matrix.environment import machine as machines
from repro_matrix.environment import probe as probe_module
from repro_matrix.environment.gpus import (
    RUN_TOKEN,
    DriverError,
    Gpu,
    GpuState,
    Nvml,
    Pynvml,
    describe_unusable,
    states,
)
from repro_matrix.environment.machine import Machine, detect
from repro_matrix.environment.probe import (
    parse_output,
    probe_record,
    problem,
    problem_of_torch,
    run_probe,
)
from repro_matrix.environment.profiles import Profile, settle, settle_all
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError
from repro_matrix.runner.gpu_pool import GpuLocks
from repro_matrix.runner.prerequisites import ask_torch

KNOWN = catalog.load().hardware
Detect = Callable[..., Machine]
NO_LIBRARY = FakeNvml(init_error=12)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Detect:
    """``machine(nvml, files, **env)``: the machine with these GPUs, files under / and environment
    variables."""

    def detected(nvml: FakeNvml, files: dict[str, str] | None = None, **env: str) -> Machine:
        for name, text in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        nvml.install(monkeypatch)
        return detect(env, tmp_path)

    return detected


# -- profiles


@pytest.mark.parametrize(
    ("gpus", "profile"),
    [
        ([FakeGpu() for _ in range(8)], "a100x8"),
        ([FakeGpu(H200) for _ in range(9)], "gpu8"),
        ([FakeGpu(), FakeGpu(), FakeGpu(H200), FakeGpu(H200)], "gpu4"),
        (
            [FakeGpu(), FakeGpu(), FakeGpu(), FakeGpu(mig=["MIG-1"])],
            "gpu3",
        ),  # the GPU in MIG mode is left out
        ([*(FakeGpu() for _ in range(7)), FakeGpu(lost=True)], "gpu7"),
        ([FakeGpu(), FakeGpu(mode="prohibited"), FakeGpu()], "gpu2"),
        ([FakeGpu(problem="it must be reset"), FakeGpu()], "gpu1"),
        ([FakeGpu(mode="exclusive_process", processes=[Process(99999999)]), FakeGpu()], "gpu1"),
        (
            [FakeGpu(processes=[Process(99999999, 70000)]), FakeGpu()],
            "gpu2",
        ),  # busy: the scheduler waits for it
    ],
)
def test_auto_selects_the_largest_profile_of_usable_gpus(
    gpus: list[FakeGpu], profile: str, machine: Detect
) -> None:
    here = machine(FakeNvml(gpus))
    settled = settle("auto", KNOWN, here)
    counted_alike = all(gpu.mig is None and not gpu.lost and not gpu.problem for gpu in gpus)
    assert all(
        gpu.visible == (str(gpu.index) if counted_alike else gpu.uuid) for gpu in settled.gpus
    )
    assert settled.name == profile and settled.idle == len(here.gpus) - len(settled.gpus)
    assert ("unused" in settled.words()) == (settled.idle > 0)


def test_profile_prefers_free_gpus(machine: Detect) -> None:
    busy, monitored = (
        FakeGpu(processes=[Process(99999999, 40000)]),
        FakeGpu(processes=[Process(99999998, 8)]),
    )
    four = machine(FakeNvml([busy, FakeGpu(), monitored, FakeGpu()]))
    assert [gpu.busy for gpu in four.gpus] == [
        True,
        False,
        False,
        False,
    ], "a monitor does not count"
    assert [gpu.index for gpu in settle("gpu2", KNOWN, four).gpus] == [1, 2]
    assert [gpu.index for gpu in settle("gpu4", KNOWN, four).gpus] == [0, 1, 2, 3]


def test_exclusive_gpu_is_not_shared_by_ranks(machine: Detect) -> None:
    exclusive, usual = (
        machine(FakeNvml([FakeGpu(mode="exclusive_process")])),
        machine(FakeNvml([FakeGpu()])),
    )
    assert [profile.name for profile in settle_all(["auto"], KNOWN, usual)] == [
        "gpu1",
        "gpu1-shared",
        "cpu",
    ]
    assert [profile.name for profile in settle_all(["cpu", "gpu1", "cpu"], KNOWN, usual)] == [
        "gpu1",
        "cpu",
    ], "sorted"
    profiles = settle_all(["auto"], KNOWN, exclusive)
    assert [profile.name for profile in profiles] == ["gpu1", "cpu"] and len(
        profiles[0].warnings(4096)
    ) == 1
    with pytest.raises(ConfigError, match="exclusive_process"):
        settle("gpu1-shared", KNOWN, exclusive)
    assert settle("gpu1-nccl", KNOWN, usual).backend == "nccl", (
        "where it is named only: auto never takes it"
    )


def test_gpu_that_nvml_does_not_count_any_more_is_left_out(machine: Detect) -> None:
    files = {f"dev/nvidia{minor}": "" for minor in range(3)}
    two = FakeNvml([FakeGpu(), FakeGpu()])
    lost = machine(two, files)
    assert (
        len(lost.gpus) == 2
        and "3 device files" in str(lost.left_out)
        and "NVML counts 2" in str(lost.left_out)
    )
    assert machine(two, CUDA_VISIBLE_DEVICES="0,1").left_out == (), (
        "a batch job's own, of a node with more"
    )


def test_gpus_that_are_left_out_for_one_reason_are_one_line(machine: Detect) -> None:
    gpus = [FakeGpu(mig=["MIG-x"]) for _ in range(3)]
    here = machine(FakeNvml([*gpus, FakeGpu(), FakeGpu(mode="prohibited")]))
    lines = describe_unusable(here.left_out)
    assert lines[0] == f"GPUs 0, 1, 2 (3 x {A100}): it is in MIG mode" and lines[1].startswith(
        f"GPU 4 ({A100}): "
    )
    assert machine(FakeNvml(gpus)).unusable == (lines[0],)


def test_settle_names_the_reason_why_gpus_are_missing(machine: Detect) -> None:
    for name, gpus, visible, reason in [
        ("gpu2", [FakeGpu(), FakeGpu(mode="prohibited")], "0,1", "prohibited"),
        ("gpu8", [FakeGpu()], "0,9", "'9' names none"),
        (
            "gpu1",
            [FakeGpu()],
            "",
            "none that can be used. .*asks for no GPU: unset it, or list GPUs. hardware=cpu",
        ),
        (
            "gpu2",
            [FakeGpu(), FakeGpu()],
            "0,0",
            "none that can be used. .*a second time. .*unset it. hardware=cpu",
        ),
        ("gpu", [FakeGpu()], "0", "did you mean"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            settle(name, KNOWN, machine(FakeNvml(gpus), CUDA_VISIBLE_DEVICES=visible))


# -- GPUs that are here, or were requested, and cannot be used


REFUSED = [
    (FakeNvml(init_error=9), {}, {}, "Driver Not Loaded"),
    (FakeNvml([FakeGpu()], error=999), {}, {}, "Unknown Error"),
    (FakeNvml([FakeGpu(mig=["MIG-a"])]), {}, {}, "GPU 0 .*MIG mode"),
    (FakeNvml([FakeGpu(mig=["MIG-a"])]), {"CUDA_VISIBLE_DEVICES": "MIG-a"}, {}, "MIG devices"),
    (
        FakeNvml([FakeGpu(), FakeGpu(H200)]),
        {"CUDA_VISIBLE_DEVICES": "0"},
        {},
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ),
    (
        FakeNvml([FakeGpu(mode="exclusive_process", processes=[Process(99999999)])]),
        {},
        {},
        "process 99999999",
    ),
    (NO_LIBRARY, {"NVIDIA_VISIBLE_DEVICES": "all"}, {}, "libraries have to be passed in"),
    (NO_LIBRARY, {}, {"dev/nvidia0": ""}, "/dev/nvidia0"),
    (NO_LIBRARY, {}, {"proc/driver/nvidia/version": "NVRM"}, "/proc/driver/nvidia/version"),
    (NO_LIBRARY, {}, {"dev/dxg": ""}, "/dev/dxg"),
    # No GPU is here, or none is requested: the CPU.
    (NO_LIBRARY, {}, {"dev/nvidia-caps/x": "", "dev/nvidiactl": ""}, None),
    (NO_LIBRARY, {"NVIDIA_VISIBLE_DEVICES": "void"}, {}, None),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": ""}, {"dev/nvidia0": ""}, None),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": "-1"}, {}, None),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}, None),
]


@pytest.mark.parametrize(("nvml", "env", "files", "reason"), REFUSED)
def test_auto_refuses_the_cpu_where_gpus_were_meant(
    nvml: FakeNvml, env: dict[str, str], files: dict[str, str], reason: str | None, machine: Detect
) -> None:
    here = machine(nvml, files, **env)
    assert settle("cpu" if reason else "auto", KNOWN, here).name == "cpu"
    if reason:
        with pytest.raises(ConfigError, match=reason):
            settle("auto", KNOWN, here)


# -- CUDA_VISIBLE_DEVICES

UUIDS = ["GPU-ab12", "GPU-ab34", "GPU-c", "GPU-d56", "GPU-d57"]
ENTRY = st.one_of(
    st.sampled_from(
        [
            *UUIDS,
            "GPU-",
            "GPU-a",
            "GPU-ab1",
            "GPU-d5",
            "MIG-1",
            "all",
            "",
            " 1",
            "-1",
            "2x",
            "+3",
            "x2",
        ]
    ),
    st.integers(-2, 7).map(str),
    st.text("0123GPU-abcd ,", max_size=6),
)


def as_torch_reads(text: str, uuids: list[str]) -> list[int]:
    """torch's list, then (as `_device_count_nvml` does) up to the first entry that does not
    exist."""
    import torch.cuda as cuda

    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": text}):
        listed = cuda._parse_visible_devices()
    if listed and isinstance(listed[0], str):
        return (
            []
            if listed[0].startswith("MIG-")
            else list(cuda._transform_uuid_to_ordinals(listed, uuids))
        )
    end = next((place for place, index in enumerate(listed) if index >= len(uuids)), len(listed))
    return listed[:end]


def gpus(uuids: list[str], names: list[str] | None = None) -> list[Gpu]:
    return [
        Gpu(index, name, uuid)
        for index, (uuid, name) in enumerate(zip(uuids, names or [A100] * len(uuids)))
    ]


@given(st.lists(ENTRY, max_size=6).map(",".join), st.integers(0, len(UUIDS)))
def test_visible_gpus_are_those_that_torch_sees_or_refused(text: str, count: int) -> None:
    shown, problem = machines.visible_gpus(text, gpus(UUIDS[:count]), None)
    assert bool(shown) == (problem is None)
    if shown:
        assert [gpu.index for gpu in shown] == as_torch_reads(text, UUIDS[:count])


def test_visible_numbers_of_different_gpus_need_the_pci_order() -> None:
    different = gpus(UUIDS[:3], ["A100", "H200", "A100"])
    assert machines.visible_gpus("0,1", different, None)[0] == (), (
        "the fastest first, which NVML does not know"
    )
    assert machines.visible_gpus("0,1", different, "PCI_BUS_ID") == (tuple(different[:2]), None)
    assert machines.visible_gpus("2,0,1", different, None)[0] == (
        different[2],
        *different[:2],
    ), "all of them"


# -- NVML


def test_states_report_processes_errors_and_lost_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    me, other = psutil.Process(), Process(99999999, None)
    command, env = (
        [sys.executable, "-c", "print(flush=True); input()"],
        {**os.environ, RUN_TOKEN: "r"},
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as ours:
        assert ours.stdout and ours.stdout.readline(), "it runs with its own environment"
        gpus = [
            FakeGpu(processes=[Process(me.pid, 500), other], ecc_uncorrected=2),
            FakeGpu(ecc_uncorrected=None),
            FakeGpu(lost=True),
            FakeGpu(mode="exclusive_process", processes=[Process(ours.pid)]),
        ]
        FakeNvml(gpus, driver="535.129.03", cuda=12020).install(monkeypatch)
        busy, plain, lost, run = states([gpu.uuid for gpu in gpus]).values()
        here = detect({})
        ours.communicate()
    assert [(p.pid, p.memory_mb, p.name) for p in busy.others] == [
        (me.pid, 500, me.name()),
        (other.pid, None, None),
    ]
    assert (busy.free_mb, busy.ecc_uncorrected, busy.problem) == (81920 - 500, 2, None)
    assert (plain.ecc_uncorrected, plain.processes, plain.problem) == (None, (), None)
    assert lost.problem == "NVML: GPU is lost"
    assert run.processes and run.others == () and [gpu.index for gpu in here.gpus] == [0, 1, 3]
    assert (
        (here.driver, here.cuda) == ("535.129.03", "12.2")
        and here.cores >= 1
        and here.memory_gb > 0
    )
    assert here.gpus[1] == Gpu(1, A100, uuid_of(1), 81920, "8.0", "default", by_uuid=True), (
        "one is lost"
    )


def test_nvml_reports_hardware_errors_of_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu(ecc_uncorrected=4), FakeGpu(), FakeGpu()]
    FakeNvml(gpus).install(monkeypatch)
    with Nvml([gpu.uuid for gpu in gpus]) as nvml:
        assert nvml.look(gpus[0].uuid).problem is None, "errors from before the run"
        gpus[1].xids += [31, 79, 94]  # 31 is a program's
        assert nvml.failed_gpus() == nvml.failed_gpus() == {gpus[1].uuid: "Xid 94"}, (
            "asked again, it stays"
        )
        gpus[0].ecc_uncorrected, gpus[2].problem = 6, "faulty"
        assert nvml.look(gpus[0].uuid).problem == "ECC: 2 uncorrected memory errors"
        assert nvml.look(gpus[2].uuid).problem
    NO_LIBRARY.install(monkeypatch)
    with Nvml(["GPU-x"]) as nvml:
        assert nvml.failed_gpus() == {} and "Library Not Found" in str(nvml.look("GPU-x").problem)


class NVMLError(Exception):
    value = 15


def pynvml(**functions: object) -> SimpleNamespace:
    """A library with these functions only; every other question is refused."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_ERROR_GPU_IS_LOST=15,
        NVML_ERROR_TIMEOUT=10,
        NVML_ERROR_LIBRARY_NOT_FOUND=12,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlEventTypeXidCriticalError=8,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        **{"nvmlInit": lambda: None, **functions},
    )


def recovery(action: int) -> dict[str, object]:
    field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=action))
    return {
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 1,
        "nvmlDeviceGetFieldValues": lambda *_: [field],
    }


MEMORY = SimpleNamespace(total=80 * 2**30, free=79 * 2**30, used=2**30)


def test_pynvml_refused_questions_are_unknown_and_a_lost_gpu_is_an_error() -> None:
    driver = Pynvml(
        pynvml(
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetName=lambda h: H200,
            nvmlDeviceGetUUID=lambda h: "GPU-a",
            nvmlDeviceGetMemoryInfo=lambda h: MEMORY,
            nvmlSystemGetDriverVersion=lambda: "580.1",
        )
    )
    assert driver.gpu(0) == Gpu(0, H200, "GPU-a", 81920) and driver.versions() == ("580.1", None)
    assert driver.state("GPU-a") == GpuState(79 * 1024, 1024)
    driver.watch_errors(["GPU-a"])
    assert driver.next_error() is None
    driver.close()
    driver.lib.nvmlDeviceGetMemoryInfo = mock.Mock(side_effect=NVMLError)
    with pytest.raises(DriverError) as caught:
        driver.state("GPU-a")
    assert not caught.value.missing


def test_gpu_of_which_nvml_says_nothing_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = pynvml(
        nvmlDeviceGetMemoryInfo=mock.Mock(
            side_effect=type("NoPermission", (NVMLError,), {"value": 4})
        )
    )
    monkeypatch.setattr("repro_matrix.environment.gpus.open_driver", lambda: Pynvml(lib))
    assert states(["GPU-a"])["GPU-a"].problem


def test_nvml_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = [], threading.Event()

    def hang(*args: object) -> None:
        asked.append(args)
        over.wait(100)

    def wait_while_nvml_answers(answers: list[Future[Any]], limit: float) -> Any:
        wait_for(lambda: asked or answers[0].done())
        return wait(answers, 0.05)

    monkeypatch.setattr("repro_matrix.environment.gpus.wait", wait_while_nvml_answers)
    for question in (
        "nvmlDeviceGetCount",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMigMode",
        "nvmlEventSetCreate",
    ):
        asked.clear()
        answers = {"nvmlDeviceGetMemoryInfo": lambda handle: MEMORY, question: hang}
        monkeypatch.setattr(
            "repro_matrix.environment.gpus.open_driver",
            lambda: Pynvml(pynvml(**answers)),  # noqa: B023
        )
        if question == "nvmlDeviceGetCount":
            reasons = detect({}).unusable
        else:
            with Nvml(["GPU-a", "GPU-b"]) as nvml:
                reasons = tuple(str(nvml.look(uuid).problem) for uuid in nvml.gpus)
        assert (
            len(asked) == 1 and reasons and all("does not answer" in reason for reason in reasons)
        ), question
    over.set()


def test_driver_that_was_updated_is_named_with_the_remedy() -> None:
    def refuse() -> None:
        raise NVMLError("RM has detected an NVML/RM version mismatch.")

    with pytest.raises(DriverError, match=r"^driver/library version mismatch \(NVML.* reboot$"):
        Pynvml(pynvml(nvmlInit=refuse, NVML_ERROR_LIB_RM_VERSION_MISMATCH=NVMLError.value))


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"nvmlDeviceGetMigMode": lambda h: [1, 1]}, "MIG mode"),
        (recovery(2), "recovery action 2"),
        (recovery(0), None),
        ({"nvmlDeviceGetRemappedRows": lambda h: (1, 0, 1, 0)}, None),  # replaced at the next reset
        ({"nvmlDeviceGetRemappedRows": lambda h: (1, 0, 0, 1)}, "faulty rows"),
    ],
)
def test_pynvml_reports_why_a_gpu_cannot_be_used(
    answers: dict[str, object], problem: str | None
) -> None:
    state = Pynvml(pynvml(nvmlDeviceGetMemoryInfo=lambda h: MEMORY, **answers)).state("GPU-a")
    assert problem in str(state.problem) if problem else state.problem is None


def test_cgroup_limits_are_the_tightest_and_the_page_cache_is_not_in_use(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/job/step\n", encoding="utf-8")

    def add(files: dict[str, str]) -> tuple[Path, Path]:
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        return tmp_path / "root", tmp_path / "own"

    limits, used, inf = machines.cgroup_limits, machines.cgroup_used, float("inf")
    assert limits(*add({})) == (inf, inf) and used(*add({})) == 0, "unknown"
    assert limits(*add({"memory.max": "max", "cpu.max": "max 100000"})) == (inf, inf)
    assert limits(*add({"job/step/memory.max": "1000", "job/memory.max": "500"})) == (inf, 500)
    assert limits(*add({"job/cpu.max": "150000 100000", "job/step/cpu.max": "400000 100000"})) == (
        1.5,
        500,
    )
    assert limits(*add({"job/cpu.max": "damaged"})) == (4, 500)
    stat = "anon 300\nfile 600\nshmem 100"  # files in /dev/shm cannot be dropped
    assert used(*add({"job/step/memory.current": "900", "job/step/memory.stat": stat})) == 400


def test_profile_warns_of_small_shared_memory() -> None:
    def warnings(backend: str, count: int, shm: int | None) -> int:
        return len(Profile("x", "cuda", backend, tuple(gpus(UUIDS[:count]))).warnings(shm))

    assert warnings("nccl", 2, 64) == warnings("nccl", 2, None) == 1
    assert warnings("nccl", 2, 24000) == warnings("gloo", 2, 64) == warnings("nccl", 1, 64) == 0


# -- GPUs that NVML sees: can the torch of a stack use them?

GPUS = tuple(Gpu(index, A100, f"GPU-{index}", 81920, "8.0") for index in range(2))
TWO = Profile("gpu2", "cuda", "nccl", GPUS)
MACHINE = Machine(GPUS, "535.129.03", "cpu", 2, 24.0, "linux", cuda="12.2")
STACK = Stack("current", "/venv/bin/python", {"torch": "2.13.0"})
OK = {"error": None, "capability": "8.0"}
OTHER = {"error": None, "name": H200, "capability": "9.0"}
OLD = "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."
BAD = {"error": "AcceleratorError: CUDA error: uncorrectable ECC error encountered"}
NO_KERNEL = {
    "error": (
        "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
    )
}


def answer(**parts: Any) -> dict[str, Any]:
    return parse_output("\n".join(json.dumps(line) for line in lines(**parts)).encode())


@pytest.mark.parametrize(
    ("parts", "reason", "other_build"),
    [
        ({"init_error": OLD, "gpus": 0}, "driver 535.129.03.* too old", True),
        ({"torch": "2.13.0+cpu", "cuda": None}, "without CUDA", True),
        ({"hip": "6.4", "cuda": None}, "ROCm", True),
        (
            {"init_error": "Error 802: system not yet initialized", "gpus": 0, "cuda": "12.1"},
            "fabricmanager",
            False,
        ),
        ({"gpus": 1}, "1 of 2.* container", False),
        (
            {"devices": [OK, BAD]},
            r"GPU 1 \(GPU-1\): AcceleratorError.* CUDA_VISIBLE_DEVICES without it",
            False,
        ),
        ({"devices": [OTHER, OK]}, "NVIDIA H200.* GPU 0", False),  # another order
        (
            {"devices": [OK, {**OK, "name": "NVIDIA A100-SXM4-40GB"}]},
            "40GB.* GPU 1",
            False,
        ),  # of the same capability
        (
            {"devices": [OK, {**OK, "uuid": "0"}]},
            "it sees .*, 0.*, where NVML has GPU 1: .*GPU-1",
            False,
        ),
        ({"devices": [OK, NO_KERNEL]}, "GPU 1.* no kernel image", True),
        (
            {"devices": [{**OK, "index": 0}, {**OK, "index": 0}]},
            r"devices \[0, 0\] instead of 0 to 1",
            False,
        ),
        ({"nccl": False}, "without NCCL", True),
    ],
)
def test_problem_has_a_reason_and_a_remedy(
    parts: dict[str, Any], reason: str, other_build: bool
) -> None:
    text = str(problem(answer(**parts), STACK, TWO, MACHINE))
    assert re.search(reason, text) and "hardware=cpu" in text
    assert ("--torch-backend=auto --python /venv/bin/python torch" in text) == other_build


def test_problem_working_or_unknown_is_none() -> None:
    assert problem(answer(), STACK, TWO, MACHINE) is None
    assert problem(answer(nccl=False), STACK, replace(TWO, backend="gloo"), MACHINE) is None
    unknown = replace(TWO, gpus=tuple(replace(gpu, capability=None, name="") for gpu in GPUS))
    assert problem(answer(devices=[OTHER, OK]), STACK, unknown, MACHINE) is None
    hung = {"stage": "initialise CUDA", "failed": "was not done after 240 s"}
    assert "was not done" in str(problem(answer() | hung, STACK, TWO, MACHINE))
    missing = run_probe(replace(STACK, python="/no/such/python"), [0], {})
    assert "could not be started" in str(problem(missing, STACK, TWO, MACHINE))


PARTS = st.sampled_from(["cuda", "init_error", "gpus", "failed", "stage", "nccl"])


@given(st.dictionaries(PARTS, st.none() | st.text()))
def test_problem_incomplete_answer_is_never_good(part: dict[str, Any]) -> None:
    assert problem({"devices": [], **part, "gpus": 0}, STACK, TWO, MACHINE)


def test_ask_runs_the_probe_in_the_stack() -> None:
    here = Stack("current", sys.executable, {}, key="here")
    cpu = run_probe(here, None, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert cpu["stage"] == "done" and cpu["torch"] and "nccl" in cpu and "init_error" not in cpu


def test_probe_leaves_out_locked_and_full_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu(processes=[Process(99999999, 81500)]), FakeGpu()]).install(
        monkeypatch
    )
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    gpus = tuple(Gpu(i, A100, gpu.uuid, 81920) for i, gpu in enumerate(nvml.gpus))
    stack = Stack("python:x", str(python_that_says(tmp_path, *lines(gpus=3))), {}, key="x")
    with GpuLocks(tmp_path / "state", "another-run") as other:
        assert other.acquire([gpus[2].uuid])
        answer = ask_torch(stack, replace(TWO, gpus=gpus), {})
    recorded = probe_record(answer)
    assert problem_of_torch(answer, replace(TWO, gpus=gpus)) is None
    assert recorded["torch"] == "2.13.0+cu130", "and what does not change from run to run"
    assert recorded.keys() == {"torch", "cuda", "arch_list", "nccl_version", "devices"}
    assert recorded["devices"] == [{"name": A100, "capability": "8.0"}] * 3
    assert (tmp_path / "asked").read_text().split()[1:] == ["0"]
    assert (tmp_path / "visible").read_text().strip() == "0,1,2 PCI_BUS_ID"


ON_THE_CPU = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import device_probe
torch.cuda.set_device = lambda device: None
for name in ("zeros", "full"):
    setattr(torch, name, lambda *args, make=getattr(torch, name), device=None: make(*args))
begin, reduce = dist.init_process_group, dist.all_reduce
dist.init_process_group = lambda backend, **more: begin("gloo", **more)
dist.all_reduce = lambda numbers: (reduce(numbers), numbers.add_(numbers.numel() > 1 and sys.argv[4] == "corrupt"))
device_probe.all_reduce(int(sys.argv[2]), sys.argv[3], 0)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "last"), [("works", {"stage": "done"}), ("corrupt", {"error": "wrong"})]
)
def test_pair_of_the_probe_adds_numbers_of_two_processes(
    how: str, last: dict[str, str], tmp_path: Path
) -> None:
    """The worker itself, with gloo for NCCL and the CPU for a GPU."""
    folder = str(Path(probe_module.SCRIPT).parent)
    command = [
        [sys.executable, "-c", ON_THE_CPU, folder, str(rank), str(tmp_path), how] for rank in (0, 1)
    ]
    ranks = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in command]
    for out in [rank.communicate(timeout=100)[0] for rank in ranks]:
        ((name, text),) = last.items()
        assert text in json.loads(out.splitlines()[-1])[name]


def test_machine_lists_what_nccl_reads(machine: Detect) -> None:
    here = machine(
        FakeNvml([FakeGpu()]), {"etc/nccl.conf": "NCCL_IB_DISABLE=1"}, NCCL_DEBUG="INFO", HOME="/h"
    )
    assert here.shell == ("NCCL_DEBUG=INFO",) and here.nccl_files == ("/etc/nccl.conf",)
    assert len(here.notes({})) == 2 and len(here.notes({"NCCL_DEBUG": "WARN"})) == 1
