"""Which expectation applies, whether a verdict agrees with it, and which measurements may be
compared at all."""

from __future__ import annotations

import copy
import importlib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, observation, ok
from pydantic import ValidationError
from repro_matrix.baseline.derivation import expectations, measured
from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import Capability
from repro_matrix.grading import expected as grading
from repro_matrix.grading.expected import (
    Situation,
    compare_verdict,
    expected,
    failure_note,
    settings_difference,
)
from repro_matrix.grading.nearest import Basis
from repro_matrix.paths import REPROS
from repro_matrix.records.outcome import FailureId, Verdict

NOW = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
TORCH_213 = {"torch": ">=2.13,<2.14"}


def entry(verdict: str = "FIXED", variant: str = "fix", **changes: Any) -> dict[str, Any]:
    return {"verdicts": {variant: verdict}, "measured_at": [{}], "reason": "measured", **changes}


def expecting(verdict: str, *ids: str, variant: str = "fix") -> Expectation:
    return Expectation.model_validate(
        entry(verdict, variant) | ({"failure_ids": {variant: list(ids)}} if ids else {})
    )


def applying(
    *entries: dict[str, Any],
    where: str = "m/fsdp",
    variant: str = "fix",
    versions: Any = NOW,
    hardware: str = "cpu",
) -> Any:
    """The verdict that these entries expect of a cell; None where none applies."""
    applies = expected(case(expect=list(entries)), variant, Situation(where, versions, hardware))
    return next(iter(applies.verdicts.values())) if applies else None


@pytest.mark.parametrize(
    ("changes", "at", "applies"),
    [
        ({}, {}, True),
        ({}, {"variant": "other-fix"}, False),
        ({}, {"hardware": "gpu1"}, False),
        ({}, {"versions": {"torch": "2.12.1"}}, False),
        ({}, {"versions": {"transformers": "5.23.0"}}, False),
        ({}, {"versions": {"torch": "unknown"}}, False),
        ({"hardware": "a100x8"}, {"hardware": "a100x8"}, True),
        (
            {"versions": {"torch": ">=2.13"}},
            {"versions": {"torch": "2.14.0.dev20260101+cu130"}},
            True,
        ),
        # cells are named by their axes, and by the flags that are not at their defaults
        ({}, {"where": 'm/fsdp/call="root"'}, True),
        ({}, {"where": "m/fsdp/ranks=4"}, False),
        ({"cells": ["m/fsdp/ranks=4"]}, {"where": "m/fsdp/ranks=4"}, True),
        ({"cells": ["m/fsdp/ranks=4"]}, {"where": "m/fsdp/scale=full"}, False),
        ({"cells": ["x/ddp", "m/fsdp"]}, {}, True),
        ({"cells": ["m/ddp"]}, {}, False),
        ({"cells": ["m/fsdp"]}, {"where": 'm/fsdp/call="root"'}, False),
        ({"cells": ['m/fsdp/call="root"']}, {}, False),
        (
            {"cells": ['m/fsdp/cache=false/call="root"']},
            {"where": 'm/fsdp/call="root"/cache=false'},
            True,
        ),
        ({"cells": ["m/fsdp/cache=true"]}, {"where": 'm/fsdp/call="inner"'}, True),
        ({"cells": ['m/fsdp/call="a/b"']}, {"where": 'm/fsdp/call="a/b"'}, True),
    ],
)
def test_expectation_applies_by_variant_hardware_versions_and_cell(
    changes: Any, at: Any, applies: bool
) -> None:
    assert (applying(entry(**{"versions": TORCH_213, **changes}), **at) is not None) is applies


def test_most_specific_expectation_wins() -> None:
    anywhere, named, later = entry("FLAKY"), entry(cells=["m/fsdp"]), entry("SIGNATURE_MISMATCH")
    narrow = entry("NOT_REPRODUCED", versions=TORCH_213)
    assert (
        applying(named, anywhere) == "FIXED" and applying(anywhere, later) == "SIGNATURE_MISMATCH"
    )
    assert applying(narrow, anywhere) == "NOT_REPRODUCED" and applying(narrow, named) == "FIXED"


@pytest.mark.parametrize(
    ("name", "hardware", "variant", "stored"),
    [
        ("FIXED", "cpu", "fix", ("expected", "FIXED", "")),
        ("FIXED", "gpu1", "fix", ("matches_cpu", "FIXED", "")),
        ("NOT_FIXED", "gpu1", "fix", ("differs_from_cpu", "FIXED", "")),
        ("FIXED", "cpu", "other-fix", ("no_expectation", None, "")),
        ("NOT_FIXED", "own", "fix", ("expected", "NOT_FIXED", "the expectation lists no failure")),
    ],
)
def test_comparison_is_stored_beside_a_verdict(
    name: Any, hardware: str, variant: str, stored: Any
) -> None:
    known = case(expect=[entry(capabilities={}), entry("NOT_FIXED", hardware="own")])
    found = grading.comparison(
        known, variant, Situation("m/fsdp", NOW, hardware), Verdict(name, "x")
    )
    assert found == dict(zip(("expected", "expectation", "failure_note"), stored)) | {
        "nearest": (),
        "beyond": False,
    }


LOST = Verdict("INCONCLUSIVE", "skipped", measured=False)
HANGS = Verdict("INCONCLUSIVE", "it hangs")
HEALTHY, FAILING = (expecting(name, variant="control") for name in ("PASSED", "FAILED"))


@pytest.mark.parametrize(
    ("verdict", "expectation", "prediction", "control", "compared"),
    [
        (HANGS, expecting("FIXED"), None, False, "unexpected"),
        (LOST, None, None, True, "no_expectation"),
        (LOST, expecting("FIXED"), None, False, "no_expectation"),
        (LOST, None, expecting("FIXED"), False, "no_expectation"),
        # whether it was fixed upstream depends on other stacks' stored measurements
        ("FIXED_UPSTREAM", expecting("NOT_REPRODUCED"), None, False, "expected"),
        ("NOT_REPRODUCED", expecting("FIXED_UPSTREAM"), None, False, "expected"),
        ("FIX_BREAKS", expecting("NOT_REPRODUCED"), None, False, "unexpected"),
        *(
            (name, None, None, False, "no_expectation")
            for name in ("FIXED", "NOT_REPRODUCED", HANGS)
        ),
        # a control needs no expectation: it must train
        *((name, None, None, True, "unexpected") for name in ("FLAKY", HANGS)),
        ("PASSED", None, None, True, "no_expectation"),
        ("FAILED", None, HEALTHY, True, "unexpected"),
        ("FAILED", FAILING, None, True, "expected"),
        ("FAILED", None, FAILING, True, "matches_cpu"),
    ],
)
def test_compare(
    verdict: Any, expectation: Any, prediction: Any, control: bool, compared: str
) -> None:
    verdict = Verdict(verdict, "x") if isinstance(verdict, str) else verdict
    entry = expectation or prediction
    assert (
        compare_verdict(verdict, entry and Basis((entry,), on_cpu=not expectation), "fix", control)
        == compared
    )


@pytest.mark.parametrize(
    "name",
    ["NOT_FIXED", "DIFFERENT_FAILURE", "FIX_BREAKS", "SIGNATURE_MISMATCH", "FLAKY", "INCONCLUSIVE"],
)
def test_documented_fix_with_an_attempt_that_fails_is_news_where_nothing_is_stored(
    name: Any,
) -> None:
    def state(passed: int, role: str = "fix", known: Basis | None = None) -> str:
        return compare_verdict(Verdict(name, "x", fix_k=passed, fix_n=3), known, role)

    assert [state(passed) for passed in (0, 2, 3)] == ["differs_from_documentation"] * 2 + [
        "no_expectation"
    ]
    assert state(0, "non_fix") == state(0, "probe") == "no_expectation"
    assert state(0, known=Basis((expecting(name),))) == "expected"
    assert (
        compare_verdict(Verdict(name, "x", fix_k=0, fix_n=3, measured=False), None, "fix")
        == "no_expectation"
    )


# -- failure ids


def failing(*names: str) -> Verdict:
    return Verdict(
        "DIFFERENT_FAILURE", "x", failure_ids=tuple(FailureId(check=name) for name in names)
    )


@pytest.mark.parametrize(
    ("verdict", "expectation", "compared", "note"),
    [
        (
            failing("updates"),
            expecting("DIFFERENT_FAILURE", "ValueError in x.f"),
            "unexpected",
            True,
        ),
        (
            failing("a", "b"),
            expecting("DIFFERENT_FAILURE", "check b", "check a"),
            "expected",
            False,
        ),
        (
            failing("a", "c"),
            expecting("DIFFERENT_FAILURE", "check b", "check a"),
            "unexpected",
            True,
        ),
        (
            failing("updates"),
            expecting("DIFFERENT_FAILURE"),
            "expected",
            True,
        ),  # none is listed, and that is noted
        (
            failing("updates"),
            expecting("FIXED"),
            "unexpected",
            False,
        ),  # the verdict differs already
    ],
)
def test_verdict_of_a_failure_needs_an_expected_failure_id(
    verdict: Verdict, expectation: Expectation, compared: str, note: bool
) -> None:
    known = Basis((expectation,))
    assert compare_verdict(verdict, known) == compared
    assert bool(failure_note(verdict, known)) is note and failure_note(verdict, None) == ""


def test_expectation_is_narrowed_to_its_variant() -> None:
    both = {
        "verdicts": {"fix": "FAILED", "other-fix": "NOT_FIXED"},
        "failure_ids": {"fix": "a", "other-fix": "b"},
    }
    narrowed: Any = expected(
        case(expect=[{**entry(), **both}]), "fix", Situation("m/fsdp", {}, "cpu")
    )
    assert narrowed.verdicts == {"fix": "FAILED"} and narrowed.failure_ids == {"fix": "a"}
    with pytest.raises(ValidationError, match="typo"):
        Expectation.model_validate({**entry(), "failure_ids": {"typo": "check updates"}})


def test_release_with_another_failure_id_begins_another_range() -> None:
    def stored(release: str, verdict: Verdict) -> Any:
        return {
            "params": "m/fsdp",
            "verdicts": {"fix": verdict.to_json()},
            "variants": {"unfixed": {}, "fix": {}},
            "stack": {"versions": {"transformers": release}},
            "hardware": {"accelerator": "cpu"},
        }

    shown = {"4.38.0": failing("a"), "4.39.0": failing("a"), "4.40.0": failing("b", "a")}
    ranges = expectations(
        [item for at, v in shown.items() for item in measured(case(), stored(at, v), at)], "r"
    )
    assert [(each.versions["transformers"], each.failure_ids["fix"]) for each in ranges] == [
        (">=4.38,<4.40", "check a"),
        (">=4.40,<4.41", ["check b", "check a"]),
    ]


@given(
    st.lists(st.sampled_from("abc"), max_size=3),
    st.lists(st.sampled_from("abc"), min_size=1, unique=True),
)
def test_verdict_agrees_when_no_other_id_occurred(occurred: list[str], listed: list[str]) -> None:
    wanted = expecting("DIFFERENT_FAILURE", *(f"check {name}" for name in listed))
    assert (compare_verdict(failing(*occurred), Basis((wanted,))) == "expected") == (
        set(occurred) <= set(listed)
    )


# -- settings and machines

SETTINGS: dict[str, Any] = {
    "case": "some-case",
    "variant": "unfixed",
    "model": {
        "slug": "m",
        "title": "M",
        "config": {"hidden_size": 256, "layers": 2},
        "scale": "tiny",
        "weights": "random",
    },
    "strategy": {"slug": "fsdp", "title": "FSDP", "options": {"wrap": "layer"}},
    "flags": {"call": "inner"},
    "pass_criteria": {},
    "world_size": 2,
    "tp_size": 1,
    "seed": 0,
    "steps": 3,
    "device": "cpu",
    "backend": "gloo",
}
DECIDING = [
    ("model", "slug"),
    ("model", "scale"),
    ("model", "weights"),
    ("model", "config", "hidden_size"),
    ("model", "config", "new"),
    ("strategy", "slug"),
    ("strategy", "options", "wrap"),
    ("flags", "call"),
    ("world_size",),
    ("tp_size",),
    ("seed",),
    ("steps",),
    ("device",),
    ("backend",),
]
# A flag or option that only one has did not exist for the other, and was at its default there.
OTHERS = [
    ("case",),
    ("model", "title"),
    ("strategy", "title"),
    ("pass_criteria",),
    ("flags", "new"),
    ("strategy", "options", "new"),
]


def changed(*paths: tuple[str, ...]) -> Any:
    made = copy.deepcopy(SETTINGS)
    for path in paths:
        inner = made
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = "other"
    return made


@pytest.mark.parametrize("path", [*DECIDING, *OTHERS])
def test_settings_difference_names_the_setting(path: tuple[str, ...]) -> None:
    difference = settings_difference(changed(), changed(path))
    assert (difference is not None) is (path in DECIDING)
    named = path[0] if path[-1] == "slug" else path[-1]
    assert difference is None or (
        difference.startswith(f"{named} ") and difference.endswith("against other")
    )


@given(st.sets(st.sampled_from(DECIDING)), st.sets(st.sampled_from(DECIDING)))
def test_settings_difference_is_symmetric(one: set[Any], other: set[Any]) -> None:
    left, right = changed(*one), changed(*other)
    assert (
        settings_difference(left, left)
        is settings_difference(left, {})
        is settings_difference({}, left)
        is None
    )
    assert (
        (settings_difference(left, right) is None)
        == (settings_difference(right, left) is None)
        == (one == other)
    )


def test_machine_ignores_what_changes_from_day_to_day() -> None:
    made: Any = document({})
    gpus = [{"name": "B", "uuid": "2", "memory_mb": 1}, {"name": "A", "uuid": "1", "memory_mb": 1}]

    def of(**changes: Any) -> Any:
        return grading.machine({**made, "hardware": {**made["hardware"], "gpus": gpus, **changes}})

    assert of() == of(gpus=gpus[::-1], memory_gb=2.0)
    for other in (
        {"cpu": "x"},
        {"cores": 9},
        {"driver": "2"},
        {"gpus": gpus[:1]},
        {"accelerator": "cuda"},
    ):
        assert of(**other) != of()


# -- capabilities

FIX = {"flags": {"call": "root"}, "depends_on_capabilities": ["cpu_fp16"]}
FP16 = {"variants": {"unfixed": {}, "fix": FIX, "other-fix": {}}}


@pytest.mark.parametrize("here", [{"cpu_fp16": True}, {}, {"cpu_bf16": False}])
def test_nothing_is_expected_where_a_capability_differs(here: dict[str, bool]) -> None:
    both = {**entry(), "verdicts": {"fix": "DIFFERENT_FAILURE", "other-fix": "FIXED"}}
    known = case(expect=[{**both, "capabilities": {"cpu_fp16": False}}], **FP16)
    same = Situation("m/fsdp", NOW, "cpu", {"cpu_fp16": False})
    assert expected(known, "fix", same) is not None
    assert expected(known, "fix", same._replace(facts=here)) is None
    assert expected(known, "other-fix", same._replace(facts=here)) is not None, (
        "it does not depend on it"
    )
    unknown = case(expect=[both], **FP16)
    assert expected(unknown, "fix", same) is None


def test_expectation_carries_the_capabilities_that_its_variants_depend_on() -> None:
    reproduced = [("reproduced", observation(ok(0)))]
    made: Any = document(
        {"unfixed": reproduced, "fix": reproduced}, {"fix": "NOT_FIXED"}, params="m/fsdp"
    )
    made["hardware"]["capabilities"] = {"cpu_fp16": False, "cpu_capability": "AVX2"}
    for known, facts in ((case(**FP16), {"cpu_fp16": False}), (case(), {})):
        (one,) = expectations(measured(known, made, "baseline/x.json"), "why")
        assert one.capabilities == facts


def test_recorded_capability_is_the_same_on_all_ranks() -> None:
    ranks = [ok(0), ok(1), ok(2, record=None)]
    for rank, bf16 in zip(ranks, (True, False)):
        rank["record"]["facts"] = {"machine": {"cpu_fp16": True, "cpu_bf16": bf16}}
    stored: Any = document(
        {"unfixed": [("reproduced", observation(ok(0))), ("passed", observation(*ranks))]}
    )
    assert grading.recorded_capabilities(stored) == {"cpu_fp16": True}


def test_capability_difference_names_the_first() -> None:
    difference = grading.capability_difference
    assert (
        difference(["a", "b"], {"a": True, "b": "9.0"}, {"a": True, "b": "8.0"})
        == "b 9.0 against 8.0"
    )
    assert (
        difference(["a"], {}, {}) == "a unknown against unknown"
        and difference([], {"a": 1}, {}) is None
    )


def test_variant_depends_on_the_capabilities_of_its_case_and_its_own() -> None:
    known = case(depends_on_capabilities=["cpu_bf16", "cpu_fp16"], **FP16)
    assert grading.depends_on_capabilities(known, "fix") == ["cpu_bf16", "cpu_fp16"]
    assert grading.depends_on_capabilities(case(**FP16), "fix") == ["cpu_fp16"]
    with pytest.raises(ValueError, match="cpu_fp16"):
        Case.model_validate({**case().model_dump(), "depends_on_capabilities": ["cpu_fp61"]})


def test_kit_records_every_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPROS))
    torch, machine = importlib.import_module("torch"), importlib.import_module("repro_kit.machine")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    facts = machine.machine_facts()
    assert facts.keys() == set(get_args(Capability)) and facts["gpu_capability"] == "9.0"
