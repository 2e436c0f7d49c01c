"""Which GPUs a machine has and can use, which profile ``auto`` chooses, and when it refuses to be the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from fake_nvml import A100, H200, FakeGpu, FakeNvml, Process, uuid_of
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.config import catalog
from repro_matrix.environment import machine as machines
from repro_matrix.environment.gpus import RUN_TOKEN, DriverError, Gpu, GpuState, Nvml, Pynvml, states
from repro_matrix.environment.machine import Machine, Profile, detect, settle, settle_all
from repro_matrix.errors import ConfigError

KNOWN = catalog.load().hardware
Detect = Callable[..., Machine]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Detect:
    """``machine(nvml, files, **env)``: the machine with these GPUs, files under / and environment variables."""

    def detected(nvml: FakeNvml, files: dict[str, str] | None = None, **env: str) -> Machine:
        for name, text in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        nvml.install(monkeypatch)
        return detect(env, tmp_path)

    return detected


def no_library() -> FakeNvml:
    return FakeNvml(init_error=12)


# -- profiles


@pytest.mark.parametrize(
    ("gpus", "profile"),
    [
        ([FakeGpu() for _ in range(8)], "a100x8"),
        ([FakeGpu(H200)], "gpu1"),
        ([FakeGpu(H200) for _ in range(9)], "gpu8"),
        ([FakeGpu(), FakeGpu(), FakeGpu(H200), FakeGpu(H200)], "gpu4"),
        ([FakeGpu(), FakeGpu(), FakeGpu(), FakeGpu(mig=["MIG-1"])], "gpu3"),  # the GPU in MIG mode is left out
        ([*(FakeGpu() for _ in range(7)), FakeGpu(lost=True)], "gpu7"),
        ([FakeGpu(), FakeGpu(mode="prohibited"), FakeGpu()], "gpu2"),
        ([FakeGpu(problem="it must be reset"), FakeGpu()], "gpu1"),
        ([FakeGpu(mode="exclusive_process"), FakeGpu()], "gpu2"),  # free: one rank may use it
        ([FakeGpu(mode="exclusive_process", processes=[Process(99999999)]), FakeGpu()], "gpu1"),
        ([FakeGpu(processes=[Process(99999999, 70000)]), FakeGpu()], "gpu2"),  # busy: the scheduler waits for it
    ],
)
def test_auto_selects_the_largest_profile_of_usable_gpus(gpus: list[FakeGpu], profile: str, machine: Detect) -> None:
    here = machine(FakeNvml(gpus))
    settled = settle("auto", KNOWN, here)
    assert settled.name == profile and settled.idle == len(here.gpus) - len(settled.gpus)
    assert ("unused" in settled.words()) == (settled.idle > 0)


def test_profile_prefers_free_gpus(machine: Detect) -> None:
    busy, monitored = FakeGpu(processes=[Process(99999999, 40000)]), FakeGpu(processes=[Process(99999998, 8)])
    four = machine(FakeNvml([busy, FakeGpu(), monitored, FakeGpu()]))
    assert [gpu.busy for gpu in four.gpus] == [True, False, False, False], "a monitor does not count"
    assert [gpu.index for gpu in settle("gpu2", KNOWN, four).gpus] == [1, 2]
    assert [gpu.index for gpu in settle("gpu4", KNOWN, four).gpus] == [0, 1, 2, 3]


def test_exclusive_gpu_is_not_shared_by_ranks(machine: Detect) -> None:
    exclusive, usual = machine(FakeNvml([FakeGpu(mode="exclusive_process")])), machine(FakeNvml([FakeGpu()]))
    assert [profile.name for profile in settle_all(["auto"], KNOWN, usual)] == ["gpu1", "gpu1-shared", "cpu"]
    assert [profile.name for profile in settle_all(["cpu", "gpu1", "cpu"], KNOWN, usual)] == ["gpu1", "cpu"], "sorted"
    profiles = settle_all(["auto"], KNOWN, exclusive)
    assert [profile.name for profile in profiles] == ["gpu1", "cpu"] and len(profiles[0].warnings(4096)) == 1
    with pytest.raises(ConfigError, match="exclusive_process"):
        settle("gpu1-shared", KNOWN, exclusive)


def test_settle_names_the_reason_why_gpus_are_missing(machine: Detect) -> None:
    for name, gpus, visible, reason in [
        ("gpu2", [FakeGpu(), FakeGpu(mode="prohibited")], "0,1", "prohibited"),
        ("gpu8", [FakeGpu()], "0,9", "'9' names none"),
        ("gpu1", [FakeGpu()], "", "asks for no GPU"),
        ("gpu", [FakeGpu()], "0", "did you mean"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            settle(name, KNOWN, machine(FakeNvml(gpus), CUDA_VISIBLE_DEVICES=visible))


def test_settle_planned_accepts_hardware_that_is_not_here(machine: Detect) -> None:
    laptop = machine(no_library())
    (profile,), planned, elsewhere = machines.settle_planned(["a100x8"], KNOWN, laptop)
    assert elsewhere and len(profile.gpus) == 8 and profile.gpus[0].memory_mb == 80 * 1024
    assert planned.memory_gb == 1000 and planned.free_gb is None, "free memory here is not free memory there"
    assert machines.settle_planned(["cpu"], KNOWN, laptop) == ([Profile("cpu", "cpu", "gloo")], laptop, False)
    for names in (["a100x"], ["a100x8", "cpu"]):
        with pytest.raises(ConfigError):
            machines.settle_planned(names, KNOWN, laptop)


# -- GPUs that are here, or were requested, and cannot be used


REFUSED = [
    (FakeNvml(init_error=9), {}, {}, "Driver Not Loaded"),
    (FakeNvml([FakeGpu()], error=999), {}, {}, "Unknown Error"),
    (FakeNvml([FakeGpu(mig=["MIG-a"])]), {}, {}, "GPU 0 .*MIG mode"),
    (FakeNvml([FakeGpu(mig=["MIG-a"])]), {"CUDA_VISIBLE_DEVICES": "MIG-a"}, {}, "MIG devices"),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": "all"}, {}, "'all' names none"),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": "1"}, {}, "'1' names none"),
    (FakeNvml([FakeGpu(), FakeGpu(H200)]), {"CUDA_VISIBLE_DEVICES": "0"}, {}, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    (FakeNvml([FakeGpu(mode="prohibited")]), {}, {}, "prohibited"),
    (FakeNvml([FakeGpu(mode="exclusive_process", processes=[Process(99999999)])]), {}, {}, "process 99999999"),
    (FakeNvml([FakeGpu(lost=True)]), {}, {}, "GPU is lost"),
    (no_library(), {"NVIDIA_VISIBLE_DEVICES": "all"}, {}, "libraries have to be passed in"),
    (no_library(), {"CUDA_VISIBLE_DEVICES": "0"}, {}, "'0' names none"),
    (no_library(), {}, {"dev/nvidia0": ""}, "/dev/nvidia0"),
    (no_library(), {}, {"proc/driver/nvidia/version": "NVRM"}, "/proc/driver/nvidia/version"),
    (no_library(), {}, {"dev/dxg": ""}, "/dev/dxg"),
    # No GPU is here, or none is requested: the CPU.
    (no_library(), {}, {"dev/nvidia-caps/x": "", "dev/nvidiactl": ""}, None),
    (no_library(), {"NVIDIA_VISIBLE_DEVICES": "void"}, {}, None),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": ""}, {"dev/nvidia0": ""}, None),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": "-1"}, {}, None),
    (FakeNvml([FakeGpu()]), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}, None),
    (FakeNvml(init_error=9), {"CUDA_VISIBLE_DEVICES": ""}, {}, None),
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
    st.sampled_from([*UUIDS, "GPU-", "GPU-a", "GPU-ab1", "GPU-d5", "MIG-1", "all", "", " 1", "-1", "2x", "+3", "x2"]),
    st.integers(-2, 7).map(str),
    st.text("0123GPU-abcd ,", max_size=6),
)


def as_torch_reads(text: str, uuids: list[str]) -> list[int]:
    """torch's list, then (as `_device_count_nvml` does) up to the first entry that does not exist."""
    import torch.cuda as cuda

    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": text}):
        listed = cuda._parse_visible_devices()
    if listed and isinstance(listed[0], str):
        return [] if listed[0].startswith("MIG-") else list(cuda._transform_uuid_to_ordinals(listed, uuids))
    end = next((place for place, index in enumerate(listed) if index >= len(uuids)), len(listed))
    return listed[:end]


def gpus(uuids: list[str], names: list[str] | None = None) -> list[Gpu]:
    return [Gpu(index, name, uuid) for index, (uuid, name) in enumerate(zip(uuids, names or [A100] * len(uuids)))]


@given(st.lists(ENTRY, max_size=6).map(",".join), st.integers(0, len(UUIDS)))
def test_visible_gpus_are_those_that_torch_sees_or_refused(text: str, count: int) -> None:
    shown, problem = machines.visible_gpus(text, gpus(UUIDS[:count]), None)
    assert bool(shown) == (problem is None)
    if shown:
        assert [gpu.index for gpu in shown] == as_torch_reads(text, UUIDS[:count])


def test_visible_numbers_of_different_gpus_need_the_pci_order() -> None:
    different = gpus(UUIDS[:3], ["A100", "H200", "A100"])
    assert machines.visible_gpus("0,1", different, None)[0] == (), "the fastest first, which NVML does not know"
    assert machines.visible_gpus("0,1", different, "PCI_BUS_ID") == (tuple(different[:2]), None)
    assert machines.visible_gpus("2,0,1", different, None)[0] == (different[2], *different[:2]), "all of them"


# -- NVML


def test_detect_reports_what_a_gpu_is(machine: Detect) -> None:
    here = machine(FakeNvml([FakeGpu(), FakeGpu(H200)], driver="535.129.03", cuda=12020))
    assert (here.driver, here.cuda) == ("535.129.03", "12.2") and here.cores >= 1 and here.memory_gb > 0
    one, other = here.gpus
    assert (one.index, one.name, one.uuid, one.memory_mb) == (0, A100, uuid_of(0), 81920)
    assert (one.capability, one.mode, other.capability) == ("8.0", "default", "9.0")


def test_states_report_processes_errors_and_lost_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    me, other = psutil.Process(), Process(99999999, None)
    command, env = [sys.executable, "-c", "print(flush=True); input()"], {**os.environ, RUN_TOKEN: "r"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as ours:
        assert ours.stdout and ours.stdout.readline(), "it runs with its own environment"
        gpus = [
            FakeGpu(processes=[Process(me.pid, 500), other], ecc_uncorrected=2),
            FakeGpu(ecc_uncorrected=None),
            FakeGpu(lost=True),
            FakeGpu(mode="exclusive_process", processes=[Process(ours.pid)]),
        ]
        FakeNvml(gpus).install(monkeypatch)
        busy, plain, lost, run = states([gpu.uuid for gpu in gpus]).values()
        usable = detect({}).gpus
        ours.communicate()
    assert [(p.pid, p.memory_mb, p.name) for p in busy.others] == [(me.pid, 500, me.name()), (other.pid, None, None)]
    assert (busy.free_mb, busy.ecc_uncorrected, busy.problem) == (81920 - 500, 2, None)
    assert (plain.ecc_uncorrected, plain.processes, plain.problem) == (None, (), None)
    assert lost.problem == "NVML: GPU is lost"
    assert run.processes and run.others == () and gpus[3].uuid in {gpu.uuid for gpu in usable}


def test_nvml_reports_hardware_errors_of_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu(ecc_uncorrected=4), FakeGpu(), FakeGpu()]
    FakeNvml(gpus).install(monkeypatch)
    with Nvml([gpu.uuid for gpu in gpus]) as nvml:
        assert nvml.look(gpus[0].uuid).problem is None, "errors from before the run"
        gpus[1].xids += [31, 79, 94]  # 31 is a program's
        assert nvml.failed_gpus() == nvml.failed_gpus() == {gpus[1].uuid: "Xid 94"}, "asked again, it stays"
        gpus[0].ecc_uncorrected, gpus[2].problem = 6, "faulty"
        assert nvml.look(gpus[0].uuid).problem == "ECC: 2 uncorrected memory errors"
        assert nvml.look(gpus[2].uuid).problem
    no_library().install(monkeypatch)
    with Nvml(["GPU-x"]) as nvml:
        assert nvml.failed_gpus() == {} and nvml.look("GPU-x").problem is None


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def pynvml(**functions: object) -> SimpleNamespace:
    """A library with these functions only; every other question is refused."""
    return SimpleNamespace(
        NVMLError=NVMLError, NVML_ERROR_GPU_IS_LOST=15, NVML_ERROR_TIMEOUT=10, NVML_ERROR_LIBRARY_NOT_FOUND=12,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_VOLATILE_ECC=0, nvmlEventTypeXidCriticalError=8,
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid, **functions,
    )  # fmt: skip


def recovery(action: int) -> dict[str, object]:
    field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=action))
    return {"NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 1, "nvmlDeviceGetFieldValues": lambda *_: [field]}


MEMORY = SimpleNamespace(total=80 * 2**30, free=79 * 2**30, used=2**30)


def test_pynvml_refused_questions_are_unknown() -> None:
    driver = Pynvml(pynvml(
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetName=lambda h: H200,
        nvmlDeviceGetUUID=lambda h: "GPU-a", nvmlDeviceGetMemoryInfo=lambda h: MEMORY,
        nvmlSystemGetDriverVersion=lambda: "580.1",
    ))  # fmt: skip
    assert driver.gpu(0) == Gpu(0, H200, "GPU-a", 81920) and driver.versions() == ("580.1", None)
    assert driver.state("GPU-a") == GpuState(79 * 1024, 1024)
    driver.watch_errors(["GPU-a"])
    assert driver.next_error() is None
    driver.close()


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
def test_pynvml_reports_why_a_gpu_cannot_be_used(answers: dict[str, object], problem: str | None) -> None:
    state = Pynvml(pynvml(nvmlDeviceGetMemoryInfo=lambda h: MEMORY, **answers)).state("GPU-a")
    assert problem in str(state.problem) if problem else state.problem is None


def test_pynvml_lost_gpu_is_an_error() -> None:
    driver = Pynvml(pynvml(nvmlDeviceGetMemoryInfo=mock.Mock(side_effect=NVMLError(15))))
    with pytest.raises(DriverError) as caught:
        driver.state("GPU-a")
    assert caught.value.lost and not caught.value.missing


# -- cgroups


@pytest.fixture
def cgroups(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return the folder of all cgroups with these files, and the file that names this process's."""

    def make(files: dict[str, str]) -> tuple[Path, Path]:
        (tmp_path / "own").write_text("1:name=systemd:/x\n0::/job/step\n", encoding="utf-8")
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        return tmp_path / "root", tmp_path / "own"

    return make


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"memory.max": "max", "cpu.max": "max 100000"}, float("inf"), float("inf")),
        ({"job/step/memory.max": "1000", "job/memory.max": "500", "memory.max": "max"}, float("inf"), 500),
        ({"job/cpu.max": "150000 100000", "job/step/cpu.max": "400000 100000"}, 1.5, float("inf")),
        ({"job/cpu.max": "damaged"}, float("inf"), float("inf")),
    ],
)
def test_cgroup_limits_are_the_tightest(cgroups: Any, files: dict[str, str], cores: float, memory: float) -> None:
    assert machines.cgroup_limits(*cgroups(files)) == (cores, memory)


def test_cgroup_used_leaves_out_the_page_cache(cgroups: Any) -> None:
    assert machines.cgroup_used(*cgroups({})) == 0, "unknown"
    stat = "anon 300\nfile 600\nshmem 100"
    used = cgroups({"job/step/memory.current": "900", "job/step/memory.stat": stat})
    assert machines.cgroup_used(*used) == 400, "files in /dev/shm cannot be dropped"


def test_profile_warns_of_small_shared_memory() -> None:
    def warnings(backend: str, count: int, shm: int | None) -> int:
        return len(Profile("x", "cuda", backend, tuple(gpus(UUIDS[:count]))).warnings(shm))

    assert warnings("nccl", 2, 64) == warnings("nccl", 2, None) == 1
    assert warnings("nccl", 2, 24000) == warnings("gloo", 2, 64) == warnings("nccl", 1, 64) == 0
