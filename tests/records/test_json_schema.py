"""What a cell's document must hold, and what it may not: by its types, and by the JSON Schema made from them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from observations import case, ended, exception, failed, observation, ok, record
from repro_matrix.config.vocabulary import OutcomeName, SignatureKind, VerdictName
from repro_matrix.grading.grade import grade
from repro_matrix.grading.verdict import judge
from repro_matrix.records.document import FILE, MAX_ERRORS, json_schema, key_path, validate_cell, validate_record

SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def example() -> dict[str, Any]:
    """A cell as the store writes it: one variant reproduces, one is clean, one was skipped."""
    known = case()
    note = {"logger": "transformers.x", "level": "WARNING", "message": "m", "file": "f", "code_location": "x"}
    warning = {"category": "UserWarning", "message": "m", "file": "f", "line": 1, "code_location": "torch"}
    unfixed = observation(failed(0, exception(cause=exception())), ended(1), torchrun=None)
    fix = observation(ok(0), ok(1, record=record(1, logs=[note], warnings=[warning])))
    lost = observation(infra_error={"kind": "disk", "message": "no space left"}, world_size=2)
    attempts = {"unfixed": [unfixed, lost], "fix": [fix], "other-fix": []}
    graded = {variant: [grade(known, variant, seen, [known]) for seen in there] for variant, there in attempts.items()}
    verdicts = {variant: {**asdict(found), "expected": "no_expectation", "expectation": None}
                for variant, found in judge(known, graded).items()}  # fmt: skip
    return json.loads(
        json.dumps(
            {
                "schema": 1,
                "cell_id": "some-case/m-fsdp",
                "params": "m/fsdp",
                "case": "some-case",
                "title": "a case",
                "kind": "failure",
                "simulated": None,
                "references": ["o/r#1"],
                "model": "m",
                "strategy": "fsdp",
                "flags": {"call": "root"},
                "ranks": 2,
                "overrides": [],
                "scale": "tiny",
                "weights": "random",
                "stack": {
                    "name": "current",
                    "python": "3.11.7",
                    "versions": {"torch": "2.13.0+cpu"},
                    "label": "torch2.13.0",
                },
                "hardware": {
                    "profile": "gpu1",
                    "accelerator": "cuda",
                    "cpu": "a cpu",
                    "cores": 2,
                    "memory_gb": 8.0,
                    "driver": "570.1",
                    "os": "Linux",
                    "gpus": [{"name": "g", "uuid": "GPU-1", "memory_mb": 81559}],
                },
                "provenance": {
                    "git_commit": None,
                    "git_dirty": True,
                    "harness_version": "0.1.0",
                    "command": "repro matrix",
                    "started": 1.0,
                    "ended": None,
                    "seed": 0,
                    "launcher": "torchrun",
                },
                "variants": {
                    variant: {
                        "skipped": None if there else "needs 2 GPUs",
                        "stack": "current",
                        "fingerprint": "f",
                        "settings": {},
                        "attempts": [
                            {"observation": seen, "outcome": asdict(found)}
                            for seen, found in zip(there, graded[variant])
                        ],
                    }
                    for variant, there in attempts.items()
                },
                "verdicts": verdicts,
                "complete": False,
            }
        )
    )


def complaints(document: Any) -> list[str]:
    """By the JSON Schema; the types, which the readers trust, must say the same of it."""
    found = [f"{'/'.join(map(str, error.path))}: {error.message}" for error in VALIDATOR.iter_errors(document)]
    try:
        validate_cell(document)
    except ValueError as error:
        assert found, f"only the types refuse it: {error}"
    else:
        assert not found, f"only the JSON Schema refuses it: {found}"
    return found


def test_the_json_schema_is_what_the_types_say() -> None:
    assert FILE.read_text(encoding="utf-8") == json_schema(), "make schema writes it anew"


def test_the_schema_is_valid_and_says_so() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_an_example_is_valid() -> None:
    assert complaints(example()) == []


def test_a_control_is_valid() -> None:
    document = example()
    document["kind"] = "control"
    document["variants"] = {"control": document["variants"]["fix"]}
    document["verdicts"] = {"control": document["verdicts"]["fix"]}
    assert complaints(document) == []


def test_the_schema_knows_every_outcome_verdict_and_kind() -> None:
    definitions = SCHEMA["$defs"]
    assert set(definitions["Outcome"]["properties"]["outcome"]["enum"]) == set(get_args(OutcomeName))
    assert set(definitions["Verdict"]["properties"]["name"]["enum"]) == set(get_args(VerdictName))
    kinds = definitions["Recognized"]["properties"]["kind"]["enum"]
    assert set(kinds) == set(get_args(SignatureKind))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2),
        (("unknown",), 1),
        (("case",), "Not A Slug"),
        (("kind",), "control"),
        (("variants",), {}),
        (("variants", "fix", "skipped"), "a skipped variant has no attempts"),
        (("variants", "fix", "attempts", 0, "outcome", "outcome"), "clean"),
        (("variants", "fix", "attempts", 0, "outcome", "reason"), ""),
        (("variants", "fix", "attempts", 0, "observation", "ranks", 0, "terminated_by"), "someone"),
        (("variants", "fix", "attempts", 0, "observation", "ranks", 0, "record", "done"), "yes"),
        (("variants", "unfixed", "attempts", 1, "observation", "infra_error", "kind"), "weather"),
        (("verdicts", "unfixed"), {}),
        (("verdicts", "fix", "name"), "GOOD"),
        (("verdicts", "fix", "interval"), [0.1]),
        (("hardware", "gpus"), ["a gpu"]),
        (("stack", "versions", "torch"), 2),
    ],
)
def test_what_is_not_a_document(path: tuple[Any, ...], value: Any) -> None:
    document = example()
    parent: Any = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    assert complaints(document)


@pytest.mark.parametrize("key", SCHEMA["required"])
def test_every_required_key_is_required(key: str) -> None:
    document = example()
    del document[key]
    assert complaints(document)


def test_what_types_cannot_say_is_named_by_its_place() -> None:
    def wrong(**changes: Any) -> str:
        with pytest.raises(ValueError, match=r"^(variants|verdicts)\b") as found:
            validate_cell({**example(), **changes})
        return str(found.value)

    whole = example()
    fix, said = whole["variants"]["fix"], whole["verdicts"]["fix"]
    only = {"control": fix}
    assert validate_cell(whole) is whole, "nothing is converted"
    assert wrong(variants={"fix": fix}) == "variants: a failure has the variant unfixed"
    assert wrong(verdicts={"unfixed": said}) == "verdicts.unfixed: verdicts are of the other variants"
    assert wrong(kind="control", verdicts={}).startswith("variants.unfixed: a control has the one variant control")
    assert wrong(kind="control", variants=only) == "verdicts.fix: a control has the one variant control"
    skipped = {**whole["variants"], "fix": {**fix, "skipped": "no"}}
    assert wrong(variants=skipped) == "variants.fix: a variant that was skipped has no attempts"


def test_a_record_is_doubted_where_it_arrives() -> None:
    honest = record(0)
    assert validate_record(honest) is honest
    for value, said in (
        ({**honest, "rank": "0"}, "rank: Input should be a valid integer"), ("text", "it: "),
        ({**honest, "checks": [{}]}, "checks[0].name: Field required"),
        ({**honest, "versions": {"a b": 1}}, "versions.'a b'"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as found:
            validate_record(value)
        assert str(found.value).startswith(said), found.value
    with pytest.raises(ValueError, match=r"; and \d+ more$") as many:
        validate_record({})
    assert str(many.value).count("Field required") == MAX_ERRORS
    with pytest.raises(ValueError, match=r"required$") as three:
        validate_record({key: value for key, value in honest.items() if key not in ("rank", "done", "phase")})
    assert str(three.value).count("Field required") == 3


def test_a_place_in_words() -> None:
    assert key_path(()) == "it" and key_path((0, "a")) == "[0].a"
    assert key_path(("variants", "x-y", "attempts", 0, "a b")) == "variants.x-y.attempts[0].'a b'"
