"""What a cell's document and a rank's record must hold: by the types, and by the JSON Schema generated from them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from observations import case, document, ended, exception, failed, observation, ok, record
from repro_matrix.config.vocabulary import OutcomeName, SignatureKind, VerdictName
from repro_matrix.grading.grade import grade
from repro_matrix.grading.verdict import judge
from repro_matrix.records.document import FILE, json_schema, key_path, validate_cell, validate_record

SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def example() -> dict[str, Any]:
    """A cell as the store writes it: one variant reproduces, one passes, one was skipped."""
    known = case()
    entry = {"message": "m", "file": "f", "code_location": "torch.x"}
    wrote = record(1, logs=[{**entry, "logger": "x"}], warnings=[{**entry, "category": "UserWarning"}])
    unfixed = observation(failed(0, exception(cause=exception())), ended(1), torchrun=None)
    lost = observation(infra_error={"kind": "disk", "message": "no space left"}, world_size=2)
    attempts = {"unfixed": [unfixed, lost], "fix": [observation(ok(0), ok(1, record=wrote))], "other-fix": []}
    outcomes = {variant: [grade(known, variant, each, [known]) for each in made] for variant, made in attempts.items()}
    stored = document({variant: "needs 2 GPUs" for variant in attempts})
    for variant, made in attempts.items():
        if made:
            graded = zip(made, outcomes[variant])
            stored["variants"][variant] = {
                "skipped": None, "settings": {},
                "attempts": [{"observation": each, "outcome": outcome.to_json()} for each, outcome in graded],
            }  # fmt: skip
    stored["verdicts"] = {variant: verdict.to_json() for variant, verdict in judge(known, outcomes).items()}
    return json.loads(json.dumps(stored))


def is_valid(stored: Any) -> bool:
    """Whether a document is valid; the types and the JSON Schema must agree."""
    try:
        validate_cell(stored)
    except ValueError:
        by_types = False
    else:
        by_types = True
    assert VALIDATOR.is_valid(stored) is by_types
    return by_types


def test_json_schema_file_is_what_the_types_give() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert FILE.read_text(encoding="utf-8") == json_schema(), "run `make schema`"
    definitions = SCHEMA["$defs"]
    for name, key, literal in (("Outcome", "outcome", OutcomeName), ("Verdict", "name", VerdictName),
                               ("Recognized", "kind", SignatureKind)):  # fmt: skip
        assert set(definitions[name]["properties"][key]["enum"]) == set(get_args(literal))


def test_document_of_failure_or_control_is_valid_and_not_converted() -> None:
    stored = example()
    assert is_valid(stored) and validate_cell(stored) is stored
    variant, verdict = stored["variants"]["fix"], stored["verdicts"]["fix"]
    assert is_valid({**stored, "kind": "control", "variants": {"control": variant}, "verdicts": {"control": verdict}})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2), (("unknown",), 1), (("case",), "Not A Slug"), (("kind",), "control"), (("variants",), {}),
        (("variants", "fix", "skipped"), "a skipped variant has no attempts"),
        (("variants", "fix", "attempts", 0, "outcome", "outcome"), "clean"),
        (("variants", "fix", "attempts", 0, "outcome", "reason"), ""),
        (("variants", "fix", "attempts", 0, "outcome", "unknown"), 1),
        (("variants", "fix", "attempts", 0, "observation", "ranks", 0, "terminated_by"), "someone"),
        (("variants", "fix", "attempts", 0, "observation", "ranks", 0, "record", "done"), "yes"),
        (("variants", "fix", "attempts", 0, "observation", "ranks", 0, "rank"), "0"),
        (("variants", "unfixed", "attempts", 1, "observation", "infra_error", "kind"), "weather"),
        (("verdicts", "unfixed"), {}), (("verdicts", "fix", "name"), "GOOD"), (("verdicts", "fix", "interval"), [0.1]),
        (("verdicts", "fix", "fix_n"), "1"), (("hardware", "gpus"), ["a gpu"]), (("stack", "versions", "torch"), 2),
    ],
)  # fmt: skip
def test_wrong_value_is_refused(path: tuple[Any, ...], value: Any) -> None:
    stored = example()
    parent: Any = stored
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    assert not is_valid(stored)


@pytest.mark.parametrize("key", SCHEMA["required"])
def test_missing_key_is_refused(key: str) -> None:
    stored = example()
    del stored[key]
    assert not is_valid(stored)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"variants": ["fix"]}, "variants: "), ({"verdicts": ["unfixed"]}, "verdicts.unfixed: "),
        ({"kind": "control", "verdicts": []}, "variants.unfixed: "),
        ({"kind": "control", "variants": ["control"]}, "verdicts.fix: "),
    ],
)  # fmt: skip
def test_wrong_variants_are_named(changes: dict[str, Any], where: str) -> None:
    stored = example()
    for key in ("variants", "verdicts"):
        if key in changes:
            changes = {**changes, key: dict.fromkeys(changes[key], stored[key]["fix"])}
    with pytest.raises(ValueError, match=f"^{where}"):
        validate_cell({**stored, **changes})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank": "0"}, "rank: Input should be a valid integer"), ({"checks": [{}]}, "checks[0].name: Field required"),
        ({"versions": {"a b": 1}}, "versions.'a b'"),
    ],
)  # fmt: skip
def test_invalid_record_names_the_key(changes: dict[str, Any], error: str) -> None:
    honest = record(0)
    assert validate_record(honest) is honest
    with pytest.raises(ValueError) as refused:
        validate_record({**honest, **changes})
    assert str(refused.value).startswith(error)


def test_key_path_quotes_what_is_not_a_word() -> None:
    assert key_path(()) == "it" and key_path((0, "a")) == "[0].a"
    assert key_path(("variants", "x-y", "attempts", 0, "a b")) == "variants.x-y.attempts[0].'a b'"
