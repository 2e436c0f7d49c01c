"""Every record of the runs on a real GPU is graded as an engineer reads it
(data/gpu/outcomes.txt)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard
from launching import attempt_of
from observations import as_promised, control
from repro_matrix.config import catalog
from repro_matrix.config.schema import PassCriteria
from repro_matrix.grading.grade import grade
from repro_matrix.launch import observe
from repro_matrix.launch.attempt import create_files
from repro_matrix.launch.watch import Watched
from repro_matrix.paths import RESULTS
from repro_matrix.records.outcome import Outcome
from repro_matrix.results.store import Store
from repro_matrix.runner.attempts import resolve_repeated_error

H100 = RESULTS / "gpu" / "h100-2026-11-28"
CASES = catalog.load().cases
# A probe checks nothing: it passes by ending without an error.
NO_CHECKS = PassCriteria.model_construct(kind="training", checks=[], ranks="all", effects=[])
PROBE = control().model_copy(update={"pass_criteria": NO_CHECKS})


@cache
def tables() -> list[list[list[str]]]:
    """The rows of both tables: of the survey, and of the runs."""
    text = (Path(__file__).parents[1] / "data" / "gpu" / "outcomes.txt").read_text(encoding="utf-8")
    parts = (
        [line for line in part.splitlines() if line and line[0] != "#"]
        for part in text.split("# ----")
    )
    return [[[cell.strip() for cell in line.split("|")] for line in part] for part in parts]


@cache
def probes() -> dict[str, Any]:
    packed = (H100 / "survey.json.zst").read_bytes()
    found: dict[str, Any] = json.loads(zstandard.ZstdDecompressor().decompress(packed))["probes"]
    return found


def as_attempt(name: str, probe: dict[str, Any], folder: Path) -> Any:
    """The observation of a probe as if the launcher had started its ranks."""
    ranks = probe["ranks"]
    attempt = attempt_of(folder, "x", world_size=len(ranks), deadline=probe["limit_s"])
    strategy = {"slug": "", "options": {}, "invariants": {"collectives": []}}
    attempt.settings.update(device="cuda", backend=name[:4], flags={}, strategy=strategy)
    create_files(attempt)
    for rank in ranks:
        record = {**as_promised(attempt.settings, len(ranks)), **rank["record"]}
        if record["phase"] == "start":  # a probe of one rank wrote no phase when its body began
            record["phase"] = "body"
        (attempt.records / f"rank-{rank['rank']}.json").write_text(json.dumps(record))
        (attempt.logs / f"rank-{rank['rank']}.log").write_text(rank["log_tail"])
    entries = [{**rank, "pid": rank["record"]["pid"]} for rank in ranks]
    attempt.launch_file.write_text(json.dumps({"ranks": entries, "error": None, "finished": True}))
    late = {rank["rank"] for rank in ranks if rank["terminated_by"] == "timeout"}
    started = min(rank["record"]["started"] for rank in ranks)
    stacks = {rank["rank"]: rank["stack"] for rank in ranks if rank["stack"]}
    watched = Watched(
        started, started + probe["seconds"], timed_out=bool(late), running=late, stacks=stacks
    )
    seen = observe.observation(attempt, "torchrun", ["python"], watched, worker_exit=0)
    if name.endswith(".blocking"):  # so it is repeated
        seen["attempt"]["retry_of"] = {"kind": "gpu_or_program", "message": ""}
    return resolve_repeated_error(seen)  # type: ignore[arg-type]


def failure(outcome: Outcome, case: str) -> str:
    """What the third column names."""
    if outcome.outcome == "reproduced":
        return next(item.signature for item in outcome.recognized if item.case == case)
    kinds = (outcome.infra_error, outcome.primary and outcome.primary.type)
    return next(filter(None, kinds), None) or " ".join(outcome.failed)


@pytest.mark.parametrize("name", sorted(probes()))
def test_probe_of_a_real_gpu_is_graded_as_a_person_would(name: str, tmp_path: Path) -> None:
    expected = {row[0]: row[1:4] for row in tables()[0]}.get(name, ["passed", "", ""])
    outcome = grade(PROBE, "control", as_attempt(name, probes()[name], tmp_path / "a"), CASES)
    rank = str(outcome.primary.rank) if outcome.primary else ""
    assert [outcome.outcome, failure(outcome, ""), rank] == expected, outcome.reason
    assert not outcome.recognized, "a probe is no known failure"


def test_table_names_probes_and_variants_that_exist() -> None:
    survey, runs = tables()
    assert {row[0] for row in survey} < probes().keys() and len(probes()) == 71
    assert len({row[0] for row in survey}) == len(survey)
    named = {(row[0], variant.partition(":")[0]) for row in runs for variant in row[3].split()}
    assert named <= {(case.slug, variant) for case in CASES.values() for variant in case.variants}


def expected_of(run: str, document: Any, variant: str) -> list[str]:
    """The row for an attempt of a run; "VARIANT:repeated" is one that repeats another."""
    places = {run, document["strategy"], f"{run}/{document['model']}/{document['strategy']}"}
    rows = [row for row in tables()[1] if row[0] == document["case"] and variant in row[3].split()]
    found = [row[1:3] for row in rows if not row[4] or places & set(row[4].split())]
    assert len(found) < 2, (run, document["case"], variant)
    return found[0] if found else ["passed", ""]


@pytest.mark.parametrize("run", sorted(path.name for path in H100.iterdir() if path.is_dir()))
def test_attempt_of_a_run_on_a_real_gpu_is_graded_as_a_person_would(run: str) -> None:
    wrong, attempts = [], 0
    for document in Store(H100 / run).documents():
        for variant, stored in document["variants"].items():
            for attempt in stored["attempts"]:
                seen = attempt["observation"]
                name = f"{variant}:repeated" if seen["attempt"].get("retry_of") else variant
                outcome = grade(CASES[document["case"]], variant, seen, CASES)
                given, attempts = (
                    [outcome.outcome, failure(outcome, document["case"])],
                    attempts + 1,
                )
                if sorted(" ".join(given).split()) != sorted(
                    " ".join(expected_of(run, document, name)).split()
                ):
                    wrong.append((document["cell_id"], name, given, outcome.reason))
    assert not wrong and attempts >= 29
