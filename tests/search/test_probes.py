"""Packages that ask for a GPU while a warm server imports them (a made-up NVML; no GPU has run this)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import attempt_of
from repro_matrix.cli import main as cli
from repro_matrix.launch import forkserver as warm
from repro_matrix.launch.server import Refused, Server
from repro_matrix.launch.watch import Watched
from repro_matrix.runner import workspace as workplace
from test_engine import Fake, observation

sys.path.insert(0, str(Path(warm.__file__).resolve().parents[0] / "worker"))
from probes import Probes, devices

A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=80 << 30)
NVML = """
int nvmlInit_v2(void) { return 0; } int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)1; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) { *a = 8; *b = 0; return 0; }
int nvmlDeviceGetName(void *d, char *s, unsigned n) { s[0] = 'G'; s[1] = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = 1000; m[1] = m[2] = 500; return 0; }
"""


class Cuda:
    """torch.cuda, that remembers whether it was asked."""

    def __init__(self) -> None:
        self.initialised = False

    def get_device_properties(self, index: int = 0) -> Any:
        self.initialised = True
        return "torch's own"

    def get_device_capability(self, index: int = 0) -> Any:
        self.initialised = True
        return "torch's own"


def test_devices_that_are_alike_are_answered_for_without_the_driver() -> None:
    cuda = Cuda()
    with Probes(cuda, [A100, A100]) as probes:
        held = cuda.get_device_properties
        assert held(0).major == 8 and cuda.get_device_capability() == (8, 0)
    assert not cuda.initialised and probes.answered == ["get_device_properties", "get_device_capability"]
    assert held(0) == cuda.get_device_capability() == "torch's own", "a rank asks its own device"


@pytest.mark.parametrize("found", [[], [A100, SimpleNamespace(**{**vars(A100), "major": 9})]])
def test_where_nvml_does_not_know_the_driver_is_asked(found: list[Any]) -> None:
    cuda = Cuda()
    with Probes(cuda, found) as probes:
        assert cuda.get_device_properties(0) == "torch's own"
    assert cuda.initialised and probes.answered == []


def test_without_nvml_there_are_no_devices() -> None:
    assert devices("libno-such-library.so.9") == []


class Picky:
    """A server that does not come up while it imports what initialises CUDA."""

    def __init__(self, *arguments: Any) -> None:
        self.late = arguments[6]
        for module in ("deepspeed.ops", "accelerate"):
            if module.partition(".")[0] not in self.late:
                raise Refused("cuda", f"importing {module} initialised CUDA", module)


def test_what_initialises_cuda_is_left_for_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "Server", Picky)
    attempt = attempt_of(tmp_path / "a", "nothing")
    assert warm.started(attempt, {}, (), threading.Event()).late == ("deepspeed", "accelerate")
    monkeypatch.setattr(warm, "MOST_LATE", 1)
    with pytest.raises(Refused, match="accelerate"):
        warm.started(attempt, {}, (), threading.Event())


def test_the_summary_says_how_many_started_from_cold_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight interpreters for each attempt of a stack, and nobody was told."""
    monkeypatch.setenv("COLUMNS", "160")
    why = "no warm server (cuda): importing deepspeed.ops initialised CUDA"
    launcher = Fake(lambda attempt, stop: observation(attempt, None, cold=f"{why}\nand more of it"))
    monkeypatch.setattr(workplace, "open_launcher", lambda name: launcher)
    words = ["train-step", "model=qwen1.5-0.5b", "strategy=ddp", "hardware=cpu", "repeat=3"]
    cli.main(["run", *words, f"results={tmp_path}"])
    assert f"3 of them started from cold: {why}\n" in capsys.readouterr().out


def test_what_was_answered_in_the_drivers_place_is_in_the_record(tmp_path: Path) -> None:
    launcher, attempt = warm.WarmLauncher(), attempt_of(tmp_path / "a", "nothing")
    request: Any = SimpleNamespace(ended=threading.Event(), cpu_s=0.0, exit_code=0, problem=None)
    request.ended.set()
    server: Any = SimpleNamespace(
        command=[], late=["deepspeed"], ready={"probed": ["get_device_properties"]}, trunk=None, apart=None
    )
    found = launcher._observed(attempt, server, request, Watched(started=0.0))["attempt"]
    assert found["probed"] == ["get_device_properties"] and found["late"] == ["deepspeed"]


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the made-up NVML")
def test_a_server_imports_what_asks_for_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "nvml.c"], check=True)
    (tmp_path / "asks_at_import.py").write_text("import torch\nassert torch.cuda.get_device_properties(0).major == 8\n")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    server = Server(sys.executable, ("asks_at_import",), env, tmp_path / "run")
    try:
        assert server.ready["probed"] == ["get_device_properties"]
    finally:
        server.close()
