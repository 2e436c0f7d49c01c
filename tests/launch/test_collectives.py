"""No script and no part of the kit hands a tensor of the CPU to a collective: NCCL, the only backend on a GPU machine,
refuses it. Every script that runs on two ranks of this stack is run, in ranks as tests/collectives_ranks.py makes them;
by `make test` one that reaches a collective by way of the kit, and one that has its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from repro_kit.settings import resolve, variant_axis

import pytest
from launching import two_ranks
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.paths import CONF, REPROS, ROOT

yaml = pytest.importorskip("yaml")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("stack"),  # one server for all
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the stack `current`"),
]
CATALOGUE = catalogue.load()
# These reach a collective of their own in what is run here (by way of the kit, most of them).
TALK = {"train-step", "ddp-module-bypass", "ddp-ready-once", "ddp-unfinished-reduction", "fsdp-tied-embeddings"}
GATE = {"train-step", "ddp-unfinished-reduction"}


def conf(group: str, name: str) -> dict:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))


def job(case: Case) -> dict | None:
    """A case's control, or a fix of it that works: an unfixed variant would not reach its checks. None: not on two
    ranks.

    DeepSpeed's cases are left out: it compiles for minutes where nobody has, and their checks are the same kit's.
    """
    raw = conf("case", case.slug)
    if case.simulated or case.requires.gpus or any("deepspeed" in one for one in case.requires.packages):
        return None
    if not case.launch.process_group or raw.get("launch", {}).get("normal_exit") or case.slug.startswith("colossalai"):
        return None
    holds = [name for entry in case.expect for name, said in entry.verdicts.items() if said in ("FIXED", "PASSED")]
    variant = next((variant for variant in holds if variant in case.variants), next(iter(case.variants)))
    model, strategy = (variant_axis(raw, variant, axis, raw["axes"][axis][0]) for axis in ("model", "strategy"))
    settings = resolve(raw, variant, model=conf("model", model), strategy=conf("strategy", strategy), device="cpu")
    script = REPROS / case.script_name
    two = settings.get("world_size", settings.get("ranks")) == 2
    return {"name": case.slug, "script": str(script), "settings": settings} if two else None


@pytest.mark.parametrize("gate", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["gate", "the others"])
def test_collectives_of_scripts_and_kit_get_no_cpu_tensor(warm: ForkserverLauncher, gate: bool, tmp_path: Path) -> None:
    train = job(CATALOGUE.cases["train-step"])
    assert train
    jobs = [found for name, case in CATALOGUE.cases.items() if (name in GATE) == gate and (found := job(case))]
    talk = TALK & {one["name"] for one in jobs}
    assert talk == (GATE if gate else TALK - GATE)
    fault = {"name": "fault", "script": str(ROOT / "tests" / "faults" / "cpu_collective.py")}
    jobs.append({**fault, "settings": train["settings"]})
    ranks = two_ranks(warm, tmp_path, "collectives_ranks.py", train["settings"], {"jobs": jobs}, "accelerate", "peft")
    for facts in ranks:
        refused = {name: fact["error"] for name, fact in facts.items() if "device type cpu" in str(fact)}
        assert set(refused) == {"fault"}, refused
        fell = {one["name"]: facts[one["name"]]["error"] for one in jobs[:-1] if facts[one["name"]]["error"]}
        assert not fell, f"what did not get to its end has shown nothing of what comes later: {fell}"
        for name in talk:
            assert facts[name]["collectives"], (name, facts[name])
