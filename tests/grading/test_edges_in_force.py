"""Judges at their edges: in force. Each was a small change (`make mutants`) that nobody saw."""

from __future__ import annotations

from typing import Any

import pytest
from judging import (
    as_promised,
    case,
    observation,
    ok,
    record,
)  # fmt: skip
from repro_matrix.grading import effect as in_force
from repro_matrix.grading.observation import Attempt

CASE = case()


# -- in force

PROMISES = {"parameters": "shard", "gradients": "shard", "updates": "shard", "collectives": ["all_gather"]}
SET = {"flags": {"call": "root"}, "strategy": {"slug": "fsdp", "promises": PROMISES, "options": {}}}


def force(
    changes: dict[str, Any] | None = None, promises: dict[str, Any] | None = None, ranks: int = 2, **more: Any
) -> Any:
    """What is doubted where rank 1's evidence differs so; ``changes``: what -> its item, None: it is not there."""
    settings = {**SET, "strategy": {**SET["strategy"], "promises": promises or PROMISES, **more}}  # type: ignore[dict-item]
    kind = case(proof={"kind": "training", "checks": ["logits"]})
    made = []
    for rank in range(ranks):
        said = as_promised(settings, ranks)
        if rank == ranks - 1:
            items = {item["what"]: item for item in said["in_force"]}
            items |= {what: {"what": what, **item} for what, item in (changes or {}).items() if item is not None}
            said["in_force"] = [item for what, item in items.items() if (changes or {}).get(what, True) is not None]
        elif "extra" in (changes or {}):
            said["in_force"].append({"what": "extra", "got": 1})
        made.append(ok(rank, record=record(rank, **said)))
    return in_force.problem(kind, "fix", Attempt(observation(*made, settings=settings)))


def held(got: Any, whole: Any = 1000) -> dict[str, Any]:
    return {"got": got, "whole": whole}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"group": None}, "no evidence of a process group on rank 1"),
        ({"group": {"got": 1, "backend": "gloo"}}, "the process group of rank 1 has 1 of 2 ranks"),
        ({"group": {"got": 2, "backend": "mpi"}}, "the backend gloo was not in force: rank 1 used mpi"),
        ({"group": {"got": 2}}, "the backend gloo was not in force: rank 1 used none"),
        ({"parameters": None}, "fsdp left no evidence: parameters were not measured on rank 1"),
        ({"gradients": None}, "fsdp left no evidence: gradients were not measured on rank 1"),
        ({"parameters": held("x")}, "fsdp left no evidence: parameters on rank 1: x of 1000"),
        ({"parameters": held(5, 0)}, "fsdp left no evidence: parameters on rank 1: 5 of 0"),
        ({"parameters": held(-1)}, "fsdp left no evidence: parameters on rank 1: -1 of 1000"),
        ({"parameters": held(560)}, None),
        ({"parameters": held(570)}, "fsdp was not in force: rank 1 holds 57% of the parameters, 1/2 was promised"),
        ({"parameters": held(390)}, "fsdp was not in force: the ranks together hold 89% of the parameters"),
        ({"parameters": held(410)}, None),
        ({"gradients": held(610)}, None),
        ({"gradients": held(640)},
         "fsdp was not in force: the ranks together hold 114% of the gradients, 1 x 100% was promised"),
        ({"collectives": None}, "fsdp left no evidence: collectives were not counted on rank 1"),
        ({"collectives": {"got": {"all_gather": 0}}},
         "fsdp was not in force: no all_gather between ranks in a step of rank 1"),
        ({"collectives": {"got": {}}}, "fsdp was not in force: no all_gather between ranks in a step of rank 1"),
        ({"extra": {"got": 1, "least": 1, "most": 1}}, None),
        ({"extra": {"got": 0, "least": 1}}, "extra was not in force on rank 1: got 0, promised at least 1"),
        ({"extra": {"got": 3, "least": 1, "most": 2, "looked_at": "y"}},
         "extra was not in force on rank 1: got 3, promised at least 1 and at most 2 (y)"),
        ({"extra": {"got": 3, "least": 2, "most": 2}}, "extra was not in force on rank 1: got 3, promised 2"),
        ({"extra": {"got": 3, "least": None}},
         "extra was not in force on rank 1: got 3, promised nothing that can be judged"),
        ({"extra": {"got": "x", "most": 2}}, "extra was not in force on rank 1: got x, promised at most 2"),
        ({"extra": {"got": 3}}, None),
        ({"extra": None}, "extra left no evidence on rank 1"),  # where another rank has measured it
    ],
)  # fmt: skip
def test_what_a_strategy_promises_is_measured(changes: dict[str, Any], told: str | None) -> None:
    assert force(changes) == told


def test_whole_part_and_copies() -> None:
    whole = {"parameters": "whole"}
    assert force({"parameters": held(900)}, whole) is None
    assert force({"parameters": held(890)}, whole) == (
        "fsdp was not in force: rank 1 holds 89% of the parameters, all were promised"
    )
    part = {"parameters": "part"}
    assert force({"parameters": held(310)}, part) is None
    assert (
        force({"parameters": held(290)}, part) == "fsdp was not in force: the ranks together hold 89% of the parameters"
    )
    every = {what: held(950) for what in ("parameters",)}
    settings = {"parameters": "shard"}
    two = {"options": {"strategy": "HYBRID"}, "copies": {"strategy": {"HYBRID": 2}}}
    assert (
        force(every, settings, ranks=4, **two)
        == "fsdp was not in force: the ranks together hold 170% of the parameters"
    )
    strategy = {"options": {"a": "x", "b": 1}, "copies": {"a": {"y": 4}, "b": {"1": 2}}}
    assert in_force._copies(strategy) == 2 and in_force._copies({}) == 1  # type: ignore[typeddict-item, arg-type]
    assert in_force._copies({"options": {"a": "x"}, "copies": {"a": {"x": 0}}}) == 1  # type: ignore[typeddict-item]
    shares = in_force._shares
    assert shares("parameters", "shard", [0.95, 0.95], 2, 2) == "every rank holds all parameters"
    assert shares("gradients", "part", [0.95, 0.95], 2, 1) == "every rank holds all gradients"
    assert shares("updates", "part", [1.0, 1.0], 2, 2) == "every rank updates all parameters"
    assert (
        shares("parameters", "shard", [1.0], 1, 1) is None and shares("parameters", "shard", [1.0, 1.0], 2, 1) is None
    )


def test_what_an_arm_changes_was_read() -> None:
    def unread(read: dict[str, list[str]], arm: str = "fix", known: Any = CASE, flags: Any = None) -> str | None:
        ranks = [ok(rank, record=record(rank, read=read if rank else {})) for rank in (0, 1)]
        seen = observation(*ranks, settings={"flags": flags or {"call": "root", "cache": True}})
        return in_force.unread(known, arm, Attempt(seen))

    assert unread({"flags": ["call"]}) is None
    assert unread({}) == "the flag call was never read: the arm changes nothing by it"
    assert unread({}, "no-such-arm") is None
    assert unread({}, flags={"call": "inner", "cache": True}) is None, "as it is by default"
    assert (
        unread({}, flags={"call": "inner", "cache": 1})
        == "the flag cache was never read: the arm changes nothing by it"
    )
    options = case(
        arms={"broken": {}, "fix": {"options": {"stage": 2}}, "other": {"strategy": "ddp", "options": {"x": 1}}}
    )
    usual = {"call": "inner", "cache": True}
    assert unread({}, known=options, flags=usual) == "the option stage was never read: the arm changes nothing by it"
    assert unread({"options": ["stage"]}, known=options, flags=usual) is None
    assert unread({}, "other", options, usual) is None, "another strategy reads its own"
    silent = Attempt(observation(ok(0), ok(1), settings={"flags": {"call": "root"}}))
    assert in_force.unread(CASE, "fix", silent) is None, "older records say nothing of what was read"


def test_one_rank_calls_no_collectives() -> None:
    assert force({"collectives": {"got": {}}}, {"parameters": "whole", "collectives": ["all_reduce"]}, ranks=1) is None
