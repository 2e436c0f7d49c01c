"""What a run that goes on keeps of an older document, what is still missing, and what is made once
more. All pure."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from observations import case, document, failed, observation, ok, summary_rows
from repro_matrix.launch.observe import EITHER
from repro_matrix.runner import attempts, documents
from repro_matrix.runner.attempts import (
    BLOCKING,
    GPU_FAILURE,
    LONGER,
    OTHER_GPUS,
    TOO_SLOW,
    plan_retry,
)
from repro_matrix.runner.documents import missing_attempts

CASE = case()
REPRODUCED, PASSED = observation(failed(0), failed(1)), observation(ok(0), ok(1))


def plan(repeat: int = 2, unasked: dict[str, str] | None = None, **variants: str) -> Any:
    """Variant -> its fingerprint now; ``skipped`` as a fingerprint: it is."""
    made = [
        SimpleNamespace(
            variant=variant,
            fingerprint=now,
            skipped="no GPU" if now == "skipped" else None,
            repeat=repeat,
        )
        for variant, now in {"unfixed": "b", "fix": "f", **variants}.items()
    ]
    return SimpleNamespace(variants=made, unasked=tuple((unasked or {}).items()))


def older(**changes: Any) -> dict[str, Any]:
    found = document(
        {"unfixed": [("passed", REPRODUCED)], "fix": [("passed", PASSED), ("infra_error", PASSED)]}
    )
    found["provenance"]["started"] = 1.0
    for variant, under in (("unfixed", "b"), ("fix", "f")):
        found["variants"][variant]["fingerprint"] = under
    return {**found, **changes}


def begun(**changes: Any) -> dict[str, Any]:
    found = document({"unfixed": [], "fix": []})
    found["provenance"]["started"] = 2.0
    return {**found, **changes}


def kept(
    before: dict[str, Any], at: Any = None, now: dict[str, Any] | None = None
) -> tuple[dict[str, int], float]:
    """Variant -> how many attempts were kept; when the document says that it was begun."""
    new = now or begun()
    documents.take_over(new, before, at or plan(), {CASE.slug: CASE})  # type: ignore[arg-type]
    return {name: len(variant["attempts"]) for name, variant in new["variants"].items()}, new[
        "provenance"
    ]["started"]


def test_take_over_grades_kept_attempts_again_and_drops_infra_errors() -> None:
    new = begun()
    assert kept(older(), now=new) == ({"unfixed": 1, "fix": 1}, 1.0)
    (made,) = new["variants"]["unfixed"]["attempts"]
    assert made["outcome"]["outcome"] == "reproduced", "however it was judged then"
    assert new["provenance"]["ended"] is None and "ended" in older()["provenance"]
    assert missing_attempts(new, plan()) == [("unfixed", 1), ("fix", 1)]
    assert (
        missing_attempts(new, plan(repeat=1)) == [] and missing_attempts(new, plan(repeat=0)) == []
    )
    assert missing_attempts(new, plan(fix="skipped")) == [("unfixed", 1)]


def test_take_over_keeps_an_asynchronous_error_that_did_not_occur_again() -> None:
    """Dropped at --resume, a new attempt gave exit 0."""
    either, gpu = {"kind": EITHER, "message": "m"}, {"kind": GPU_FAILURE, "message": "Xid 79"}

    def made(error: Any, retry_of: Any = None) -> dict[str, Any]:
        found = copy.deepcopy(PASSED)
        found["infra_error"] = error
        found["attempt"] |= {"retry_of": retry_of} if retry_of else {}
        return {
            "observation": found,
            "outcome": (
                {"outcome": "infra_error", "infra_error": error["kind"]}
                if error
                else {"outcome": "passed"}
            ),
        }

    def resumed(*before: dict[str, Any]) -> tuple[int, int, int]:
        """How many are kept and are still missing, of one attempt; how many of all are lost
        (results/rows.py)."""
        stored, new = older(), begun()
        stored["variants"]["fix"]["attempts"] = made_before = copy.deepcopy(list(before))
        for number, each in enumerate(made_before):
            each["observation"]["attempt"]["id"] = f"attempt-{number}"
        kept(stored, now=new)
        missing = [variant for variant, _ in missing_attempts(new, plan(repeat=1))].count("fix")
        rows = {row.variant: row for row in summary_rows(new)}
        return len(new["variants"]["fix"]["attempts"]), missing, rows["fix"].lost_attempts

    assert resumed(made(either), made(either, either)) == (2, 0, 1)
    assert resumed(made(gpu), made(either, gpu)) == (2, 0, 1)
    assert resumed(made(either)) == (1, 1, 1), "interrupted before it was repeated"
    assert resumed(made(gpu), made(None, gpu), made(gpu)) == (
        2,
        0,
        0,
    ), "what is repeated now is dropped"
    assert resumed(made(gpu), made(gpu, gpu)) == (0, 1, 0)


def test_take_over_with_another_fingerprint_machine_or_skip_keeps_nothing() -> None:
    assert kept(older(), plan(fix="other")) == ({"unfixed": 1, "fix": 0}, 2.0)
    elsewhere = begun(hardware={**begun()["hardware"], "cpu": "another"})
    assert kept(older(), now=elsewhere) == ({"unfixed": 0, "fix": 0}, 2.0)
    assert kept(older(), plan(unfixed="skipped")) == ({"unfixed": 0, "fix": 1}, 2.0)
    forged = older()
    forged["variants"]["fix"]["fingerprint"] = "other"
    assert kept(forged)[0]["fix"] == 0, "what the document says of its variant is compared, too"
    copied = copy.deepcopy(older())
    copied["variants"]["fix"]["attempts"][0]["observation"]["attempt"]["fingerprint"] = "other"
    assert kept(copied)[0]["fix"] == 0, "an attempt that was launched as another variant"


def test_take_over_keeps_an_unselected_variant_with_the_same_fingerprint() -> None:
    only = begun(variants={"unfixed": begun()["variants"]["unfixed"]})
    at = plan(unasked={"fix": "f"})
    at.variants.pop()
    assert kept(older(), at, copy.deepcopy(only)) == ({"unfixed": 1, "fix": 1}, 1.0)
    at.unasked = (("fix", "other"),)
    assert kept(older(), at, copy.deepcopy(only)) == ({"unfixed": 1}, 2.0)
    at.unasked = (("fix", "f"), ("gone", "g"))
    before = older()
    before["variants"]["gone"] = {**before["variants"]["fix"], "fingerprint": "g"}
    assert "gone" not in kept(before, at, copy.deepcopy(only))[0], (
        "the case has no such variant any more"
    )
    skipped = older()
    skipped["variants"]["fix"] = {
        "skipped": "no GPU",
        "fingerprint": "f",
        "settings": {},
        "attempts": [],
    }
    assert kept(skipped, at, copy.deepcopy(only)) == ({"unfixed": 1, "fix": 0}, 1.0)
    empty = older()
    empty["variants"]["fix"]["attempts"] = []
    assert "fix" not in kept(empty, at, copy.deepcopy(only))[0]


# -- repeated attempts


def ended(infra_error: Any = None, **attempt: Any) -> dict[str, Any]:
    return {
        "attempt": {"deadline_s": 40, "interrupted": False, **attempt},
        "infra_error": infra_error,
        "ranks": [],
    }


def test_plan_retry_repeats_some_errors_once() -> None:
    for kind in OTHER_GPUS:
        why = {"kind": kind, "message": "Xid 79"}
        again = {"retry_of": why, "avoid": ("GPU-1", "GPU-2")} | (
            {"env": BLOCKING} if kind == EITHER else {}
        )
        assert plan_retry(ended(why), ["GPU-1", "GPU-2"]) == again
        assert plan_retry(ended(why, retry_of=why)) is None, "never twice"
    why = {"kind": TOO_SLOW, "message": "still at work"}
    for gpus, first, again in (([], 2000, True), (["GPU-1"], 2000, False), (["GPU-1"], 1200, True)):
        longer = {
            "retry_of": why,
            "deadline": LONGER * first,
            "share_mb": 0,
        }  # alone, as deadlines are measured
        assert plan_retry(ended(why, deadline_s=first), gpus) == (longer if again else None), (
            "else it holds the GPU"
        )
    full = {"kind": "memory", "message": "m"}
    assert plan_retry(ended(full), ["GPU-1"]) is None is plan_retry(ended())
    assert plan_retry(ended(full), ["GPU-1"], shared=True) == {
        "retry_of": full,
        "share_mb": 0,
    }, "alone on the GPU"


def test_repeated_ambiguous_error_is_the_programs() -> None:
    either, gpu = {"kind": EITHER, "message": "m"}, {"kind": GPU_FAILURE}
    assert attempts.resolve_repeated_error(ended(either, retry_of=either))["infra_error"] is None
    for first, second in ((either, None), (gpu, either), (None, either), (either, gpu)):
        assert attempts.resolve_repeated_error(ended(first, retry_of=second)) == ended(
            first, retry_of=second
        )


def test_pass_with_blocking_launches_after_an_asynchronous_error_is_no_evidence() -> None:
    either = {"kind": EITHER, "message": "m"}
    assert attempts.unconfirmed_pass(ended(None, retry_of=either))["infra_error"]["kind"] == EITHER
    for other in (None, {"kind": GPU_FAILURE, "message": "m"}, {"kind": TOO_SLOW, "message": "m"}):
        assert attempts.unconfirmed_pass(ended(None, retry_of=other)) == ended(None, retry_of=other)
