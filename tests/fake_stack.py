"""A stack whose torch says of the GPUs what a test wants: an interpreter that answers the device
probe by itself, and is the real one in everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_nvml import FakeGpu

DONE = """echo '{"stage": "done"}'"""
ARCH = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


def lines(gpus: int = 2, **said: Any) -> list[dict[str, Any]]:
    """What the probe prints where all is well; ``said`` replaces parts of it."""
    devices = [
        {
            "index": i,
            "touched": True,
            "error": None,
            "name": "NVIDIA A100-SXM4-80GB",
            "capability": "8.0",
        }
        for i in range(gpus)
    ]
    found = {
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "hip": None,
        "gloo": True,
        "nccl": True,
        "gpus": gpus,
    }
    found |= {"arch_list": ARCH, "nccl_version": "2.28.9"} | said
    return [
        found,
        *({"device": device} for device in found.pop("devices", devices)),
        {"stage": "done"},
    ]


def devices_of(gpus: Sequence[FakeGpu]) -> list[dict[str, Any]]:
    """What torch says of these."""
    return [
        {
            "index": i,
            "touched": True,
            "error": None,
            "name": gpu.name,
            "capability": "{}.{}".format(*gpu.capability),
        }
        for i, gpu in enumerate(gpus)
    ]


def python_that_says(
    folder: Path,
    *said: dict[str, Any],
    rehearse: bool = False,
    pair: str = DONE,
    probe: str = ":",
    fault: str = "",
) -> Path:
    """An interpreter for ``stack=python:...``. ``rehearse``: its ranks compute on the CPU
    (tests/fake_cuda), with this ``fault`` (a variable of it). As shell: ``pair``, what each of the
    probe's two NCCL ranks does; ``probe``, what the probe does before it answers."""
    text = "".join(json.dumps(line) + "\n" for line in said)
    (folder / "said.txt").write_text(text, encoding="utf-8")
    path = folder / "python"
    first = (
        f'export PYTHONPATH="{Path(__file__).parent / "fake_cuda"}:$PYTHONPATH" {fault}\n'
        if rehearse
        else ""
    )
    path.write_text(
        '#!/bin/sh\ncase "$1" in */device_probe.py)\n'
        f'  if [ "$2" = rank ]; then {pair}; exit 0; fi\n'
        f"  {probe}\n"
        f'  cat "{folder}/said.txt"; echo "$@" >>"{folder}/asked"\n'
        f'  echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER" >>"{folder}/visible"; exit 0;; esac\n'
        f'{first}exec {sys.executable} "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path
