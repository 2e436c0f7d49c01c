"""Judges at their edges: grade, genuine. Each was a small change (`make mutants`) that nobody saw."""

from __future__ import annotations

from typing import Any

import pytest
from judging import (
    SITE,
    as_promised,
    case,
    check,
    control,
    document,
    ended,
    exception,
    failed,
    made,
    observation,
    ok,
    record,
)  # fmt: skip
from repro_matrix.grading import consistency as genuine
from repro_matrix.grading.grade import failed_checks, grade, same_release
from repro_matrix.grading.observation import Attempt
from repro_matrix.grading.outcome import Outcome

# -- grade


def test_the_same_release_but_for_a_build_that_only_one_names() -> None:
    for one, other, alike in (
        ("2.2.0", "2.2.0", True), ("2.2.0+cu121", "2.2.0", True), ("2.2.0+cu121", "2.2.0+cpu", False),
        ("2.2.0", "2.2.1", False), ("2.2.0+cpu", "2.2.1", False), ("2.2.0+cpu", "2.2.1+cpu", False),
    ):  # fmt: skip
        assert same_release(one, other) is alike is same_release(other, one)


CASE = case()


def graded(*ranks: dict[str, Any], arm: str = "fix", **more: Any) -> Outcome:
    return grade(CASE, arm, observation(*ranks, **more), [CASE])


def test_what_an_outcome_says() -> None:
    clean = graded(ok(0), ok(1))
    assert (clean.outcome, clean.reason) == ("clean", "every rank finished; passed: logits")
    lost = graded(ok(0, record=record(0, checks=[])), ok(1))
    assert (lost.outcome, lost.reason) == ("infra", "no-proof: check logits was not made on rank 0")
    bad = [check("logits", False), check("loss", False)]
    wrong = graded(ok(0, record=record(0, checks=bad)), ok(1, record=record(1, checks=bad[:1])))
    assert wrong.outcome == "other_error" and wrong.failed == ("logits", "loss")
    assert (
        wrong.reason.startswith("silent: check logits failed on ranks 0, 1 (")
        and "; check loss failed on rank 0 (" in wrong.reason
    )
    assert wrong.primary is None and failed_checks(CASE, Attempt(observation(ok(0), ok(1)))) == ()
    fires = graded(failed(0), failed(1))
    assert (fires.outcome, fires.reason) == ("fires", "norm on ranks 0, 1: size mismatch in norm")
    assert fires.primary and (fires.primary.rank, fires.primary.type) == (0, "RuntimeError")
    undone = graded(ok(0, record=record(0, done=False)), ok(1))
    assert (undone.outcome, undone.reason) == ("other_error", "rank 0: exit 0 without its done marker")
    killed = graded(ok(0), ok(1, ended_by="launcher", exit_code=None, signal="SIGTERM"))
    assert killed.reason == "rank 1: finished, but was ended by the launcher (SIGTERM)"
    gone = graded(ok(0), world_size=2)
    assert gone.outcome == "other_error" and gone.reason == "rank 1 left nothing behind"
    late = graded(ended(0, "deadline", stack=f"    wait ({SITE}/torch/x.py:1)"), ended(1, "deadline"), timed_out=True)
    assert late.outcome == "hang" and late.reason == "the deadline of 120 s passed; rank 0 was in torch.x.wait"
    never = {"never_meet": "rank 1 ended", "limit_s": 9.0, "starting": False}
    stood = f"    body (/home/me/repros/x.py:3)\n    wait ({SITE}/torch/x.py:1)"
    within_ours = graded(ended(0, "deadline", stack=stood), ended(1, "deadline"), timed_out=True)
    assert within_ours.reason.endswith("; rank 0 was in torch.x.wait"), "the script's own frame says nothing"
    known = graded(ended(0, "deadline"), ended(1, "deadline"), timed_out=True, hang=never)
    assert known.reason == "its ranks can never go on: rank 1 ended"
    assert graded().reason == "lost: the observation holds no rank"
    assert graded(ok(0), interrupted=True).reason == "interrupted"
    long = graded(failed(0, exception("ValueError", "w" * 900)), ok(1))
    assert long.primary and len(long.primary.message) == 500
    assert long.reason.startswith(f"rank 0: ValueError: {'w' * 185}... in transformers")


def test_an_outcome_is_read_back_as_it_was() -> None:
    fires = graded(failed(0), failed(1))
    assert Outcome.from_json(fires.to_json()) == fires
    with pytest.raises(ValueError, match="no such outcome: 'fired'"):
        Outcome.from_json({**fires.to_json(), "outcome": "fired"})
    assert Outcome.from_json({**fires.to_json(), "otherwise": "nonsense"}).otherwise is None
    assert Outcome.from_json({**fires.to_json(), "otherwise": "clean"}).otherwise == "clean"
    assert fires.others("some-case") == () and len(fires.others("another")) == 1
    whole = Outcome("other_error", "why", (), None, ("loss",), "clean", (1,), "loss", "no-proof")
    assert Outcome.from_json(whole.to_json()) == whole
    bad = [check("logits", False)]
    for seen in (graded(ok(0, record=record(0, checks=[])), ok(1)), graded(ok(0, record=record(0, checks=bad)), ok(1))):
        assert Outcome.from_json(seen.to_json()) == seen and seen.check == "logits" and seen.ranks == (0,)


def test_steps_that_were_not_asked_for_are_no_proof() -> None:
    step = {**made(want=1, got=1, tolerance=0), "name": "steps"}
    proof = [step, {**made(), "name": "logits"}]
    settings = {"steps": 3, "flags": {}, "strategy": {"slug": "fsdp", "promises": {"collectives": []}}}
    wrote = [record(rank, schema=2, done_at=2.0, checks=proof, **as_promised(settings, 2)) for rank in (0, 1)]
    found = graded(*(ok(rank, record=wrote[rank]) for rank in (0, 1)), arm="broken", settings=settings)
    assert (found.outcome, found.infra, found.check) == ("infra", "no-proof", "steps")
    assert found.reason == "no-proof: check steps on rank 0 wanted 1, the attempt 3"
    settings["steps"] = 1
    assert (
        graded(*(ok(rank, record=wrote[rank]) for rank in (0, 1)), arm="broken", settings=settings).outcome == "clean"
    )


# -- genuine


def doubt(*ranks: dict[str, Any], settings: dict[str, Any] | None = None, **more: Any) -> str | None:
    return genuine.doubt(CASE, "fix", Attempt(observation(*ranks, settings=settings or {}, **more)))


def test_records_that_cannot_be_of_this_attempt() -> None:
    assert doubt(ok(0), ok(1)) is None
    assert doubt(ok(0), settings={"case": "other"}) == "it is an attempt of case other, not some-case"
    assert doubt(ok(0), settings={"arm": "broken"}) == "it is an attempt of arm broken, not fix"
    assert doubt(ok(0), settings={"case": "some-case", "arm": "fix"}) is None
    one = record(0, pid=7), record(1, pid=7)
    assert doubt(ok(0, pid=7, record=one[0]), ok(1, pid=7, record=one[1])) == "ranks 0 and 1 are one process"
    assert doubt(ok(0, record=record(0, started=38.9)), ok(1)) == "rank 0: its record was begun 60 s before the attempt"
    assert doubt(ok(0, record=record(0, started=39.0)), ok(1)) is None
    alone = observation(ok(0), ok(1))
    alone["ranks"][1]["record"]["world_size"] = 3
    assert genuine.doubt(CASE, "fix", Attempt(alone)) == "rank 1: its record is of 3 ranks, the attempt of 2"
    assert (
        doubt(ok(0, record=record(0, done_at=1.0)))
        == "rank 0: its record says that it is an older kit's, and holds done_at"
    )
    assert doubt(ok(0, record=record(0, schema=2, ended=None))) == "rank 0: its record says done, and was never ended"
    assert doubt(ok(0, record=record(0, schema=2, ended=None, done=False))) is None
    assert doubt(ok(0, record=None)) is None
    for key in ("in_force", "read"):
        gone = observation(ok(0, record=record(0, schema=2)), ok(1, record=record(1, schema=2)))
        del gone["ranks"][1]["record"][key]
        assert genuine.doubt(CASE, "fix", Attempt(gone)) == f"rank 1: its record says done, and holds no {key}"
        gone["ranks"][1]["record"]["done"] = False
        assert genuine.doubt(CASE, "fix", Attempt(gone)) is None, "it may have failed before it knew"


@pytest.mark.parametrize("strategy", [None, {}, {"slug": "fsdp"}, {"slug": "fsdp", "promises": {}}])
@pytest.mark.parametrize("today", ["schema", "versions", "fingerprint"])
def test_what_today_made_holds_its_strategys_promises(strategy: Any, today: str) -> None:
    """Without them nothing is asked of what was in force."""
    settings = {} if strategy is None else {"strategy": strategy}
    seen = observation(ok(0), ok(1), settings=settings)
    assert genuine.doubt(CASE, "fix", Attempt(seen)) is None, "an older engine's"
    if today == "schema":
        seen["ranks"][1]["record"].update(schema=2, in_force=[], read={"flags": [], "options": []})
    else:
        seen["attempt"][today] = {"torch": "2.13.0"} if today == "versions" else "f"
    assert genuine.doubt(CASE, "fix", Attempt(seen)) == "its settings hold none of the strategy's promises"


def test_ranks_of_one_attempt_ran_on_the_same_releases() -> None:
    def apart(one: str, other: str) -> str | None:
        ranks = [ok(rank, record=record(rank, versions={"torch": said})) for rank, said in enumerate((one, other))]
        return genuine.versions_apart(Attempt(observation(*ranks)))

    assert apart("2.2", "2.2") is None is apart("unknown", "2.2") and apart("2.2", "unknown") is None
    assert apart("2.2", "2.3") == "rank 1 had torch 2.3, rank 0 2.2"


def test_steps_are_those_that_were_asked_for() -> None:
    def steps(want: int, schema: int = 2, **settings: Any) -> str | None:
        wrote = record(0, schema=schema, checks=[{**made(want=want, got=want), "name": "steps"}])
        return genuine.other_steps(Attempt(observation(ok(0, record=wrote), settings=settings)))

    assert steps(3, steps=3) is None and steps(2) is None and steps(2, schema=1, steps=3) is None
    assert steps(2, steps=3) == "check steps on rank 0 wanted 2, the attempt 3"


def test_a_document_says_what_its_attempts_ran_with() -> None:
    ran = {"model": {"slug": "m", "scale": "tiny", "weights": "random"}, "strategy": {"slug": "fsdp"}, "world_size": 2,
           "flags": {"call": "inner"}, "device": "cpu"}  # fmt: skip

    def said(arm: str = "broken", settings: dict[str, Any] | None = None, **changes: Any) -> str | None:
        seen = observation(ok(0), ok(1), settings=settings or ran)
        other = (
            {"broken": [("clean", seen)]}
            if arm == "broken"
            else {"broken": [("fires", observation(failed(0)))], arm: [("clean", seen)]}
        )
        return genuine.contradiction(document(other, {}, **changes), CASE)  # type: ignore[arg-type]

    assert said() is None
    for changes, told in (
        ({"model": "n"}, "it ran with model m, the document says n"),
        ({"strategy": "ddp"}, "it ran with strategy fsdp, the document says ddp"),
        ({"scale": "full"}, "it ran with scale tiny, the document says full"),
        ({"weights": "hub"}, "it ran with weights random, the document says hub"),
        ({"ranks": 4}, "it ran with ranks 2, the document says 4"),
        ({"flags": {"call": "root"}}, "it ran with call=inner, the document says root"),
        ({"flags": {"unknown": 1}}, None),
    ):  # fmt: skip
        assert said(**changes) == (f"arm broken: {told}" if told else None)  # type: ignore[arg-type]
    assert said("fix", model="n") is None, "a fix may be a change of axis"
    assert said(settings={**ran, "device": "cuda"}) == "arm broken: it ran on cuda, the document says cpu"
    late = document({"broken": [("clean", observation(ok(0)))]}, {})
    late["provenance"]["started"] = 180.0
    assert genuine.contradiction(late, CASE) is None  # type: ignore[arg-type]
    late["provenance"]["started"] = 180.5
    assert genuine.contradiction(late, CASE) == "it says that it was begun after its last attempt had ended"  # type: ignore[arg-type]
    at = {"path": "results/gpu1/s/some-case/m.json"}
    assert (
        said(**at) == "its folder says gpu1, and its hardware cpu"
        and said(path="results/cpu/s/some-case/m.json") is None
    )  # type: ignore[arg-type]
    assert said(path="results/gpu1/s/other-case/m.json") is None
    simulated = case(simulated="devices", accelerator="cpu", launch={"backend": "fake"})
    assert genuine.contradiction(document({"broken": [("fires", observation(failed(0)))]}, {}), simulated) == (  # type: ignore[arg-type]
        "case some-case is simulated, and it does not say so"
    )
    alone = document({"control": [("clean", observation(ok(0), ok(1), settings=ran))]}, {}, model="n")
    said_of_control = genuine.contradiction(alone, control())  # type: ignore[arg-type]
    assert said_of_control == "arm control: it ran with model m, the document says n", "a control changes no axis"
    own = case(arms={"broken": {}, "fix": {"stack": "older"}, "other-fix": {"flags": {"call": "root"}}})
    for arm, told in (("fix", None), ("other-fix", "arm other-fix was measured on stack older, the document is of")):
        made = document({"broken": [("fires", observation(failed(0)))], arm: [("clean", observation(ok(0)))]}, {})
        made["arms"][arm]["stack"] = "older"
        found = genuine.contradiction(made, own)  # type: ignore[arg-type]
        assert found is None if told is None else str(found).startswith(told)
    reseeded = document({"broken": [("clean", observation(ok(0), settings={"seed": 1}))]}, {})
    assert genuine.contradiction(reseeded, CASE) == "arm broken: its settings say seed 1, its attempt 0"  # type: ignore[arg-type]
    changed = document({"broken": [("clean", observation(ok(0), settings={"seed": 1}))]}, {})
    changed["arms"]["broken"]["settings"] = {"seed": 2}
    assert genuine.contradiction(changed, CASE) == "arm broken: its seed is not what its attempt ran with"  # type: ignore[arg-type]
