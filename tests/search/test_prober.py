"""Answers of stored variants."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from observations import failed, observation
from probing import World, world
from repro_matrix.runner.session import ask
from repro_matrix.search.prober import Prober, answer_of

__all__ = ["world"]


def attempt(name: str, message: str = "", kind: str = "exception", type: str = "ValueError", **more: Any) -> Any:
    primary = {"rank": 0, "type": type, "message": message, "location": "", "kind": kind} if message else None
    outcome = {"outcome": name, "reason": f"reason {message}", "primary": primary, "recognized": [], **more}
    return {"outcome": outcome, "observation": observation(failed(0))}


def variant(*attempts: dict[str, Any], skipped: str | None = None, kind: str = "gpus") -> Any:
    skip = {"kind": kind, "requires": ["torch>=2.6", "y>=1"]} if skipped else None
    return {"skipped": skipped, "skip": skip, "attempts": list(attempts)}


def known(case: str, kind: str = "exception", message: str = "m") -> dict[str, Any]:
    return {"case": case, "signature": "s", "ranks": [0, 1, 2], "kind": kind, "message": message}


PASSED, FAILED, INFRA = attempt("passed"), attempt("reproduced", "x"), attempt("infra_error", "x")
KEY_ERROR = attempt("other_failure", "b", type="KeyError")
CHECK = {"ranks": [0], "check": "logits", "failed": ["logits"]}


@pytest.mark.parametrize(
    ("attempts", "label"),
    [
        ([FAILED], "reproduced"),
        ([PASSED, FAILED, INFRA], "reproduced"),  # one failure is proof
        ([PASSED, PASSED], "passed"),
        ([PASSED, attempt("hang")], None),
        ([PASSED, INFRA], None),
        ([PASSED, attempt("other_failure", "odd")], "other_failure: ValueError"),
        ([attempt("other_failure", "a"), *[KEY_ERROR] * 2], "other_failure: KeyError"),
        ([attempt("other_failure", **CHECK)], "other_failure: check logits"),
        ([attempt("other_failure", "a warning", "signal", "SIGSEGV")], "other_failure: SIGSEGV"),
        ([attempt("other_failure", "m", recognized=[known("other"), known("x", "log")])], "other_failure: other/s"),
        ([], None),
    ],
)
def test_answer_of_attempts(attempts: list[dict[str, Any]], label: str | None) -> None:
    found = answer_of("a", variant(*attempts))
    assert found.label == label
    assert bool(found.error_at) == (label not in (None, "passed", "other_failure: check logits"))


def test_answer_of_a_variant_that_was_not_launched_has_the_reason() -> None:
    text = "stack x{n}: needs torch>=2.6, and it has 2.{n}; needs stack other (why not)"
    details = {answer_of("a", variant(skipped=text.format(n=n), kind="packages")).detail for n in (1, 2)}
    assert details == {"skipped: needs torch>=2.6, y>=1"}  # the same on every stack
    assert answer_of("a", variant(skipped="needs 2 GPUs")).detail == "skipped: needs 2 GPUs"
    assert answer_of("a", None).label is None


def test_prober_leaves_out_variants_with_a_stack_of_their_own(world: World) -> None:
    search = Prober(ask(["case=qwen15-fsdp-kv-cache"]), print, threading.Event())
    assert search.own_stack == {"newer-transformers": "current"}
    assert "newer-transformers" not in search.variants and search.variants[0] == "unfixed"
