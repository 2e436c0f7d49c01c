"""Not a test: the ranks of tests/repro_kit/test_training_ranks.py. Each strategy trains with every
recipe that is asked for, honestly and with injected faults, all in one pair of ranks; the record's
facts contain the checks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "repros"))

from repro_kit import Run, main
from repro_kit import fault_injection as sabotage
from repro_kit import reference_checks as pass_criteria
from repro_kit.fault_injection import CANNOT_BE
from repro_kit.instrumentation import finish
from repro_kit.recipes import PLAIN, Recipe
from repro_kit.record import Record

import torch
import train_step
import yaml

Reference = pass_criteria.Reference
made: dict[str, Reference] = {}
recipe_of = Recipe.of


def once(run: Run, model: torch.nn.Module, same_batch: bool, **more: Any) -> Reference:
    """The reference is the same whatever is then done to the training: made once, and watching each
    new model."""
    key = f"{next(model.parameters()).dtype} {same_batch} {more['recipe']}"
    if key not in made:
        work = run.work_dir / f"reference-{len(made)}"
        run.work_dir, kept = work, run.work_dir
        made[key] = Reference(run, model, same_batch, **more)
        run.work_dir = kept
    made[key].watch(model)
    return made[key]


def body(run: Run) -> None:
    train_step.Reference = once
    asked = run.settings["asked"]
    sabotage.SCALE = asked.get(
        "scale", sabotage.SCALE
    )  # docs/concepts/checks.md: the smallest that is seen
    for slug in asked["strategies"]:
        strategy = yaml.safe_load(
            (ROOT / "conf" / "strategy" / f"{slug}.yaml").read_text(encoding="utf-8")
        )
        for key, changed in asked["trainings"].items():  # a name -> flags of the case
            changed = dict(changed)
            ignored = changed.pop("ignored", False)  # the recipe does not heed the flags
            wrong = changed.get("sabotage", "none")
            if slug == "tp" and (wrong in CANNOT_BE["tp"] or "dropout" in changed):
                continue
            checkpoint = train_step.check_checkpoint
            if (
                ignored or wrong != "none"
            ):  # it is seen before, and an honest run proves the checkpoint
                train_step.check_checkpoint = lambda *_: None
            settings = {**run.settings, "strategy": strategy, "flags": {**run.flags, **changed}}
            record = Record(None, run.rank, run.world_size)
            started = time.process_time()
            if ignored:
                Recipe.of = classmethod(lambda *_: PLAIN)
            try:
                one = Run(settings, record)
                train_step.body(one)
                finish(one)
            finally:
                train_step.check_checkpoint = checkpoint
                Recipe.of = recipe_of
            took = round(time.process_time() - started, 2)
            found = {"checks": record.data["checks"], "effects": record.data["effects"]}
            run.fact(f"{slug}/{key}", {**found, "cpu_s": took})


main(body)
