"""Every script on ranks with a made-up GPU (tests/fake_cuda/devices.py): no variant mixes its
tensors with the CPU's.

Only mixtures are looked for: the innermost frame of another error is the made-up GPU's, so that few
signatures match. What cannot run so: cases for the CPU only, and those of OTHER_DEVICES. A variant
that needs the stack `current` runs beside an unfixed one of another stack; vLLM is made up, too
(tests/fake_cuda/vllm.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeGpu
from repro_matrix.config import catalog
from repro_matrix.runner.attempts import TOO_SLOW
from test_rehearsal import matrix

pytestmark = pytest.mark.ranks
CASES = catalog.load().cases
OTHER_DEVICES = {
    "qwen-device-map-devices": "each rank has two GPUs",
    "tp-plan-auto": "transformers itself chooses the device, and takes the CPU",
}
ON_GPUS = sorted(
    slug for slug, case in CASES.items() if case.accelerator != "cpu" and slug not in OTHER_DEVICES
)
GROUPS = (
    "a",
    "clip",
    "colossalai",
    "compiled",
    "d",
    "fsdp-g",
    "fsdp-o",
    "fsdp-r",
    "fsdp-s",
    "fsdp-t",
    "fsdp-u",
    "fsdp1",
    "fsdp2",
    "gradscaler",
    "l",
    "o",
    "p",
    "q",
    "spectral",
    "tp",
    "trainer",
    "trl",
    "z",
)


def run_on_made_up_gpus(folder: Path, *words: str, plant: str = "") -> tuple[str, dict[str, Any]]:
    """What was said, and ``case/model-strategy variant`` -> its attempt and verdict, of what was
    launched on GPUs."""
    fault = f"FAKE_CUDA_DEVICES={plant or 1}"
    words = (*words, "hardware=gpu8", "repeat=1", "deadline=60")
    _, said, documents = matrix(folder, [FakeGpu() for _ in range(8)], *words, fault=fault)
    found = {}
    for path in (folder / "results").rglob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        for name, variant in document.get("variants", {}).items():
            if variant["attempts"]:
                found[f"{document['cell_id']} {name}"] = (
                    variant["attempts"][-1],
                    document["verdicts"].get(name, {}),
                )
    assert documents, said
    return said, found


def mixtures(found: dict[str, Any]) -> dict[str, str]:
    """Return the first line of each error of the made-up GPU, whether or not the attempt counts as
    reproduced."""
    errors: dict[str, str] = {}
    for name, (attempt, _) in found.items():
        for rank in attempt["observation"]["ranks"]:
            error = (rank["record"] or {}).get("exception")
            if error and "on the made-up GPU" in json.dumps(error):
                errors.setdefault(name, error["message"].splitlines()[0])
    return errors


@pytest.mark.slow
def test_rotary_tables_and_ignored_parameters_are_on_the_gpu(tmp_path: Path) -> None:
    """Two mixtures that this found: what a reference's forward left in the model, and what FSDP
    does not move."""
    words = [
        "case=train-step,fsdp-optim-state-padding",
        "model=qwen-7b",
        "variants=[control,ignored-states]",
    ]
    said, found = run_on_made_up_gpus(tmp_path, *words, "strategy=fsdp")
    assert len(found) == 3
    assert mixtures(found) == {}, said


PLANTS = {
    "inputs": "same device",
    "factory": "same device",
    "reference": "same device",
    "collective": "No backend type",
    "numpy": "to numpy",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_mixture_is_found(plant: str, tmp_path: Path) -> None:
    words = ["case=train-step", "model=qwen1.5-0.5b", "strategy=ddp"]
    errors = mixtures(run_on_made_up_gpus(tmp_path, *words, plant=plant)[1])
    assert len(errors) == 1 and all(PLANTS[plant] in error for error in errors.values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", "tp", "zero2", "zero3"])
def test_controls_do_not_mix_devices(strategy: str, tmp_path: Path) -> None:
    said, found = run_on_made_up_gpus(tmp_path, "case=train-step", f"strategy={strategy}")
    assert len(found) == len(CASES["train-step"].axes.model)
    assert mixtures(found) == {}, said


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_no_variant_mixes_devices(group: str, tmp_path: Path) -> None:
    cases = [slug for slug in ON_GPUS if slug.startswith(group) and slug != "train-step"]
    said, found = run_on_made_up_gpus(tmp_path, f"case={','.join(cases)}")
    assert mixtures(found) == {}, said
    launched = {(name.partition("/")[0], name.rpartition(" ")[2]) for name in found}
    here = [  # other stacks are not installed, and there is one node
        slug for slug in cases if not CASES[slug].requires.stack and CASES[slug].launch.nodes == 1
    ]
    wanted = {
        (slug, name)
        for slug in here
        for name, variant in CASES[slug].variants.items()
        if variant.stack in (None, "current")
    }
    assert launched >= wanted
    late = {
        name
        for name, (attempt, _) in found.items()
        if attempt["outcome"].get("infra_error") == TOO_SLOW
    }
    assert not late, "they were ended before they had moved all tensors"


def test_groups_hold_every_case_once() -> None:
    held = [slug for slug in ON_GPUS for group in GROUPS if slug.startswith(group)]
    assert sorted(held) == [slug for slug in ON_GPUS if slug != "train-step"]
