"""The fake answers as the real module does: same names, same errors; in this process and in another."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import H200, Card, FakeNvml, Process

ASK = (
    "import json, pynvml as n; n.nvmlInit();"
    "h = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())];"
    "print(json.dumps([[n.nvmlDeviceGetName(x), n.nvmlDeviceGetUUID(x), n.nvmlDeviceGetMemoryInfo(x).total // 2**20,"
    " n.nvmlDeviceGetComputeMode(x), [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(x)]] for x in h]))"
)


def test_every_name_is_one_of_the_real_modules_with_its_value() -> None:
    real = importlib.import_module("pynvml")
    fake = FakeNvml([Card()]).module()
    for name in dir(fake):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(real, name), name
            if isinstance(getattr(fake, name), int):
                assert getattr(real, name) in (getattr(fake, name), (getattr(fake, name),)), name


def test_errors_are_caught_by_their_class_and_say_the_real_text() -> None:
    real = importlib.import_module("pynvml")
    fake = FakeNvml(init_error=12).module()
    with pytest.raises(fake.NVMLError_LibraryNotFound, match=str(real.NVMLError(12))):
        fake.nvmlInit()
    lost = FakeNvml([Card(lost=True), Card()]).module()
    with pytest.raises(lost.NVMLError_GpuIsLost):
        lost.nvmlDeviceGetHandleByIndex(0)
    assert lost.nvmlDeviceGetName(lost.nvmlDeviceGetHandleByIndex(1)) == "NVIDIA A100-SXM4-80GB"


def test_a_subprocess_sees_the_same_machine_and_its_changes(tmp_path: Path) -> None:
    nvml = FakeNvml([Card(), Card(H200, mode="exclusive_process", processes=[Process(77, 900)])])
    env = {**os.environ, **nvml.on_path(tmp_path / "nvml")}

    def ask() -> list[list[object]]:
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=env, check=True)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    assert ask()[1] == [H200, nvml.cards[1].uuid, 143771, 3, [77]]
    nvml.cards.append(Card())
    nvml.cards[2].uuid = "GPU-new"
    nvml.save()
    assert ask()[2][1] == "GPU-new"


def test_xids_are_events_that_are_waited_for_once() -> None:
    fake = FakeNvml([Card(xids=[79])]).module()
    events = fake.nvmlEventSetCreate()
    fake.nvmlDeviceRegisterEvents(0, fake.nvmlEventTypeXidCriticalError, events)
    assert fake.nvmlEventSetWait_v2(events, 0).eventData == 79
    with pytest.raises(fake.NVMLError_Timeout):
        fake.nvmlEventSetWait_v2(events, 0)
