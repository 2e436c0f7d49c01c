"""The kit's comparisons take a GPU's tensors and the CPU's, on a made-up second device with CUDA's
rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from repro_kit import saving
from repro_kit.collectives import gather
from repro_kit.error_reduction import apart
from repro_kit.norms import digest, norm
from repro_kit.record import Record
from repro_kit.run import Run
from repro_kit.tolerance import Single

import pytest

torch = pytest.importorskip("torch", reason="needs the stack `current`")
sys.path.insert(0, str(Path(__file__).parents[1] / "fake_cuda"))
import devices

GPU = devices.ON_GPU


@pytest.fixture
def rules() -> Iterator[None]:
    with devices.rules():
        yield


def on_gpu(*values: float) -> Any:
    return torch.tensor(values).to(GPU)


@pytest.mark.usefixtures("rules")
def test_made_up_gpu_refuses_what_cuda_refuses() -> None:
    one, other = on_gpu(1.0, 2.0), on_gpu(1.0, 2.0).cpu()
    for mixed in (torch.equal, torch.add, torch.dot, lambda a, b: a.add_(b)):
        for pair in ((one, other), (other, one), (one + one, other * 2)):
            with pytest.raises(RuntimeError, match="same device"):
                mixed(*pair)
    assert one.device == GPU and other.device != GPU and (one * 2).device == GPU
    assert (
        torch.equal(one.cpu(), other)
        and torch.equal(one, other.to(GPU))
        and one[0] + on_gpu(3.0).cpu()[0] == 4
    )
    with pytest.raises(RuntimeError, match="same device"):
        torch.equal(
            on_gpu(1.0)[0], on_gpu(1.0).cpu()[0]
        )  # numbers are no exception there: AdamW's step in FSDP1


@pytest.mark.usefixtures("rules")
def test_comparisons_of_the_kit_move_what_they_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = on_gpu(1.0, 2.0), on_gpu(1.0, 2.0).cpu()
    assert (
        saving.equal(one, other) and saving.equal(other, one) and not saving.equal(one, other + 1)
    )
    assert saving.equal(one[0], other[0].to(torch.float64))
    assert apart(one, other) == apart(other, one) == 0 and norm(one, other) == norm(other, one) == 0
    assert norm(one, other, other, one) == 0 and digest([("a", one)]) == digest([("a", other)])
    settings = {
        "case": "c",
        "variant": "v",
        "flags": {},
        "model": {},
        "strategy": {"slug": "ddp"},
        "steps": 1,
        "seed": 0,
    }
    run = Run(
        {**settings, "tp_size": 1, "devices": 1, "device": "cpu", "backend": "gloo"},
        Record(None, 0, 1),
    )
    layer = torch.nn.Linear(2, 2)
    single = Single(
        layer, lambda model: {"out": model(other), "grid": dict(model.named_parameters())}
    )
    single.check(run, "out", layer.to(GPU)(one))
    single.check(run, "grid", dict(layer.named_parameters()))
    assert all(check["passed"] for check in run.record.data["checks"])
    monkeypatch.setattr(Run, "device", property(lambda self: GPU))
    monkeypatch.setattr(torch.distributed, "all_gather", lambda parts, own: parts[0].copy_(own))
    assert gather(SimpleNamespace(device=GPU, world_size=1), [3.0]) == [[3.0]]  # type: ignore[arg-type]
