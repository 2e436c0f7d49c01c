"""No script and no part of the kit hands a tensor of the CPU to a collective: NCCL, the only
backend on a GPU machine, refuses it. Every script that runs on two ranks of this stack is run, in
ranks as tests/collectives_ranks.py makes them; by `make test` one that reaches a collective by way
of the kit, and one that has its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from repro_kit.settings import resolve, variant_axis

import pytest
from launching import FAULTS, two_ranks
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.paths import REPROS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("stack"),  # one server for all
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs the stack `current`"
    ),
]
CATALOGUE = catalogue.load()
# These reach a collective of their own in what is run here (by way of the kit, most of them).
TALK = {
    "train-step",
    "ddp-module-bypass",
    "ddp-ready-once",
    "ddp-unfinished-reduction",
    "fsdp-tied-embeddings",
}
GATE = {"train-step", "ddp-unfinished-reduction"}


def job(case: Case) -> dict[str, Any] | None:
    """Return a case's control, or a fix of it that works: an unfixed variant would not reach its
    checks. None: not on two ranks, or with DeepSpeed, which compiles for minutes and has the same
    kit's checks.
    """
    raw = CATALOGUE.raw["case"][case.slug]
    if (
        case.simulated
        or case.requires.gpus
        or any("deepspeed" in one for one in case.requires.packages)
    ):
        return None
    if (
        not case.launch.process_group
        or case.launch.normal_exit
        or case.slug.startswith("colossalai")
    ):
        return None
    works = [
        name
        for entry in case.expect
        for name, verdict in entry.verdicts.items()
        if verdict in ("FIXED", "PASSED")
    ]
    variant = next(
        (variant for variant in works if variant in case.variants), next(iter(case.variants))
    )
    axes = {
        axis: CATALOGUE.raw[axis][variant_axis(raw, variant, axis, raw["axes"][axis][0])]
        for axis in ("model", "strategy")
    }
    settings = resolve(raw, variant, **axes, device="cpu")
    two = settings.get("world_size", settings.get("ranks")) == 2
    return (
        {"name": case.slug, "script": str(REPROS / case.script_name), "settings": settings}
        if two
        else None
    )


@pytest.mark.parametrize(
    "gate", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["gate", "the others"]
)
def test_collectives_of_scripts_and_kit_get_no_cpu_tensor(
    warm: ForkserverLauncher, gate: bool, tmp_path: Path
) -> None:
    jobs = [
        found
        for name, case in CATALOGUE.cases.items()
        if (name in GATE) == gate and (found := job(case))
    ]
    talk = TALK & {one["name"] for one in jobs}
    assert talk == (GATE if gate else TALK - GATE)
    train = job(CATALOGUE.cases["train-step"]) or {}
    fault = {**train, "name": "fault", "script": str(FAULTS / "cpu_collective.py")}
    asked = {"jobs": [*jobs, fault]}
    for facts in two_ranks(
        warm, tmp_path, "collectives_ranks.py", train["settings"], asked, "accelerate", "peft"
    ):
        refused = {
            name: fact["error"] for name, fact in facts.items() if "device type cpu" in str(fact)
        }
        assert set(refused) == {"fault"}, refused
        failed = {
            one["name"]: facts[one["name"]]["error"] for one in jobs if facts[one["name"]]["error"]
        }
        assert not failed, (
            f"a script that did not finish has shown nothing of what comes later: {failed}"
        )
        for name in talk:
            assert facts[name]["collectives"], (name, facts[name])
