"""Rows and result folders made by hand, for the tests of comparisons and nightly runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from observations import document, exception, failed, observation, ok
from repro_matrix.changes.sides import VariantResult

SETTINGS: dict[str, Any] = {"model": {"slug": "m"}, "flags": {}, "strategy": {}, "steps": 1}


def variant(
    outcome: str = "passed", n: int = 3, *failure_ids: str, **changes: Any
) -> VariantResult:
    row = VariantResult(
        "c",
        "c/m",
        "",
        ("model=m",),
        "cpu",
        "now",
        started=1.0,
        kinds={outcome: n},
        failure_ids=failure_ids,
        text="text" if failure_ids else "",
    )
    return replace(row, **changes)


def cell(variants: Mapping[str, VariantResult], **changes: Any) -> list[VariantResult]:
    shared = {"control": "control" in variants, **changes}
    named = enumerate(variants.items())
    return [replace(row, variant=name, first=index == 0, **shared) for index, (name, row) in named]


REPRODUCED = variant("reproduced", 3, "c/norm")
HOLDS = variant("passed", 3, verdict="FIXED")
BOOM = variant("other_failure", 3, "RuntimeError in torch.f")
SKIPPED = variant(kinds={}, skipped="needs 2 GPUs")


@st.composite
def _variants(draw: Any) -> VariantResult:
    outcomes = st.sampled_from(["reproduced", "passed", "other_failure", "hang"])
    kinds = draw(st.dictionaries(outcomes, st.integers(1, 3), max_size=2))
    failures = draw(
        st.sets(st.sampled_from(["c/norm", "ValueError in torch.f", "check logits"]), max_size=2)
    )
    return variant(
        kinds=kinds,
        failure_ids=tuple(sorted(failures)) if kinds else (),
        verdict=draw(st.sampled_from([None, "FIXED", "NOT_FIXED", "NOT_REPRODUCED", "FLAKY"])),
        text=draw(st.sampled_from(["", "one text", "another"])),
        settings=draw(st.sampled_from([{}, SETTINGS, {**SETTINGS, "steps": 2}])),
    )


_PLACES = [st.sampled_from(each) for each in ("cd", "mn", ("cpu", "gpu1"), ("now", "old"))]
_VARIANTS = st.dictionaries(
    st.sampled_from(["unfixed", "fix", "control"]), _variants(), min_size=1, max_size=2
)


@st.composite
def _sides(draw: Any) -> list[VariantResult]:
    rows = []
    for case, model, hardware, stack in draw(
        st.lists(st.tuples(*_PLACES), max_size=5, unique=True)
    ):
        place = {
            "case": case,
            "key": f"{case}/{model}",
            "axes": (f"model={model}",),
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
