"""Rows and result folders made by hand, for the tests of comparisons and nightly runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from observations import document, exception, failed, observation, ok
from repro_matrix.results.rows import AttemptView, HardwareView, Row, StackView

SETTINGS: dict[str, Any] = {"model": {"slug": "m"}, "flags": {}, "strategy": {}, "steps": 1}


def variant(outcome: str = "passed", n: int = 3, *failure_ids: str, **changes: Any) -> Row:
    """Return a row with ``n`` attempts. ``changes``: see ``with_values``."""
    row = Row(
        cell_id="c/m",
        case="c",
        title="",
        kind="failure",
        references=(),
        simulated=None,
        model="m",
        strategy="fsdp",
        flags={},
        ranks=2,
        overrides=(),
        scale="tiny",
        weights="random",
        params="m/fsdp",
        stack=StackView("", "now", {}),
        hardware=HardwareView("cpu", "cpu", (), {}, "cpu", "", None),
        complete=True,
        started=1.0,
        ended=2.0,
        commit=None,
        dirty=False,
        variant_count=1,
        variant="",
        help="",
        role="",
        first=False,
        own_stack=None,
        settings={},
        skipped=None,
        skip_kind=None,
        attempts=(),
        checks=(),
        errors=(),
        stacks={},
        error_at=None,
        torchrun=None,
        verdict=None,
        measured=True,
        no_evidence=False,
        unseen=False,
        failures=(),
        reason="text" if failure_ids else "",
        state=None,
        expected_verdict=None,
        note="",
    )
    return with_values(row, **{"kinds": {outcome: n}, "failure_ids": failure_ids, **changes})


def with_values(
    row: Row,
    kinds: Mapping[str, int] | None = None,
    failure_ids: Sequence[str] | None = None,
    versions: Mapping[str, str] | None = None,
    stack: str = "",
    hardware: str | Mapping[str, Any] = "",
    **changes: Any,
) -> Row:
    """Return a row with other values, which may be those that a row computes.

    ``kinds``: outcome -> number of attempts. ``failure_ids``: of every attempt that did not pass.
    ``stack``: its name. ``hardware``: its profile, or fields of ``HardwareView``.
    """
    if kinds is not None or failure_ids is not None:
        counts = row.kinds if kinds is None else kinds
        failures = row.failure_ids if failure_ids is None else tuple(failure_ids)
        attempts = (
            AttemptView(one, "", failures, True, False, 1.0, None, None, None, "forkserver", {})
            for one, count in counts.items()
            for _ in range(count)
        )
        changes["attempts"] = tuple(attempts)
    if versions is not None or stack:
        known = row.stack.versions if versions is None else versions
        changes["stack"] = StackView("", stack or row.stack.name, known)
    if hardware:
        fields = {"profile": hardware} if isinstance(hardware, str) else dict(hardware)
        changes["hardware"] = replace(row.hardware, **fields)
    return replace(row, **changes)


def cell(variants: Mapping[str, Row], **changes: Any) -> list[Row]:
    shared = {"kind": "control" if "control" in variants else "failure", **changes}
    named = enumerate(variants.items())
    return [
        with_values(row, variant=name, first=index == 0, **shared) for index, (name, row) in named
    ]


REPRODUCED = variant("reproduced", 3, "c/norm")
HOLDS = variant("passed", 3, verdict="FIXED")
BOOM = variant("other_failure", 3, "RuntimeError in torch.f")
SKIPPED = variant(kinds={}, skipped="needs 2 GPUs")


@st.composite
def _variants(draw: Any) -> Row:
    outcomes = st.sampled_from(["reproduced", "passed", "other_failure", "hang"])
    kinds = draw(st.dictionaries(outcomes, st.integers(1, 3), max_size=2))
    failures = draw(
        st.sets(st.sampled_from(["c/norm", "ValueError in torch.f", "check logits"]), max_size=2)
    )
    return variant(
        kinds=kinds,
        failure_ids=tuple(sorted(failures)) if kinds else (),
        verdict=draw(st.sampled_from([None, "FIXED", "NOT_FIXED", "NOT_REPRODUCED", "FLAKY"])),
        reason=draw(st.sampled_from(["", "one text", "another"])),
        settings=draw(st.sampled_from([{}, SETTINGS, {**SETTINGS, "steps": 2}])),
    )


_PLACES = [st.sampled_from(each) for each in ("cd", "mn", ("cpu", "gpu1"), ("now", "old"))]
_VARIANTS = st.dictionaries(
    st.sampled_from(["unfixed", "fix", "control"]), _variants(), min_size=1, max_size=2
)


@st.composite
def _sides(draw: Any) -> list[Row]:
    rows = []
    for case, model, hardware, stack in draw(
        st.lists(st.tuples(*_PLACES), max_size=5, unique=True)
    ):
        place = {
            "case": case,
            "cell_id": f"{case}/{model}",
            "model": model,
            "hardware": hardware,
        }
        rows += cell(draw(_VARIANTS), stack=stack, **place)
    return rows


SIDES = _sides()
FIRED = [("reproduced", observation(failed(0), failed(1)))] * 2
FAILED = [("other_failure", observation(failed(0, exception("ValueError", "boom")), ok(1)))] * 2
PASSED = [("passed", observation(ok(0), ok(1)))] * 2


def write(root: Path, variants: dict[str, Any], started: float = 1.0, **changes: Any) -> Path:
    """Write a result file into a results folder."""
    content = document(variants, {}, **{"cell_id": "some-case/m-fsdp", **changes})
    content["provenance"]["started"] = started
    path = root / "cpu" / "s" / f"{content['cell_id']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return root
