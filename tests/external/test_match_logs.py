"""`repro match` on real logs: public threads, what is published of our own ranks, and runs that went well.

A wrong name is worse than none. What a log does not tell may be said to be possible, never recognized.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from repro_matrix.config import catalog as catalogue
from repro_matrix.external.log_match import Answer, recognize
from repro_matrix.external.log_scan import Catalogue, scan
from repro_matrix.grading import grade
from repro_matrix.paths import BASELINE
from repro_matrix.results.store import Store

LOGS = Path(__file__).parents[1] / "data" / "logs"
CASES = catalogue.load().cases
CATALOGUE = Catalogue(CASES)


def fixtures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((LOGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def answer(log: str) -> Answer:
    return recognize(scan(log.split("\n"), CATALOGUE), CATALOGUE)


PUBLIC, PASSED = fixtures("public"), fixtures("healthy")


def possible(found: Answer) -> set[str]:
    return {item.case for failure in found.failures for item in failure.perhaps}


@pytest.mark.parametrize("entry", PUBLIC, ids=[entry["source"] for entry in PUBLIC])
def test_recognize_of_a_public_log_is_right_or_nothing(entry: dict[str, Any]) -> None:
    found = answer(entry["log"])
    assert found.names == entry.get("names", [])
    assert found.failures or found.remarks
    if not entry.get("names"):
        assert possible(found) >= set(entry.get("perhaps", ()))
        assert bool(possible(found)) == bool(entry.get("perhaps"))
    if entry.get("ranks"):
        assert list(found.causes[0].error.ranks) == entry["ranks"]
    if entry.get("echo"):
        assert not found.causes


@pytest.mark.parametrize("entry", PASSED, ids=[entry["about"] for entry in PASSED])
def test_recognize_of_a_healthy_log_is_nothing(entry: dict[str, Any]) -> None:
    found = answer(entry["log"])
    assert found.names == [] and found.failures == []
    assert scan(entry["log"].split("\n"), CATALOGUE).endings == []


@cache
def tails() -> dict[str, tuple[frozenset[str], str]]:
    """Every different log tail that is published -> (the cases that its attempt shows by its records, where it is)."""
    found: dict[str, tuple[frozenset[str], str]] = {}
    for document in Store(BASELINE).documents():
        case = CASES.get(document["case"])
        for name, variant in document["variants"].items() if case else ():
            for attempt in variant["attempts"]:
                seen = grade.grade(case, name, attempt["observation"], CASES) if name in case.variants else None
                right = frozenset(item.case for item in seen.recognized) if seen else frozenset()
                for rank in attempt["observation"]["ranks"]:
                    tail = rank.get("log_tail") or ""
                    if tail:
                        before, where = found.get(tail, (frozenset(), document["path"]))
                        found[tail] = (before | right, where)
    return found


def test_recognize_of_every_published_log_tail_is_right_or_nothing() -> None:
    wrong, missed, named = [], [], 0
    for tail, (right, where) in tails().items():
        found = answer(tail)
        names = set(found.names)
        if names - right:
            wrong.append(f"{where}: {sorted(names)}, not {sorted(right)}")
        named += bool(names)
        raised = {failure.error.type for failure in found.causes} - {""}
        known = {case for case in right if any(s.kind == "exception" for s in CASES[case].signatures)}
        if raised and known and not names and not possible(found) & right:
            missed.append(f"{where}: {sorted(raised)} is {sorted(right)}")
    assert (wrong, missed) == ([], []) and named > 300
