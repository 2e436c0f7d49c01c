"""What a cell's document and a rank's record must hold: by the types, and by the JSON Schema
generated from them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from observations import case, document, ended, exception, failed, observation, ok, record
from repro_matrix.config.vocabulary import OutcomeName, SignatureKind, VerdictName
from repro_matrix.grading.grade import grade
from repro_matrix.grading.verdict import judge
from repro_matrix.records.document import FILE, json_schema, validate_cell, validate_record

SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def example() -> Any:
    """A cell as the store writes it: one variant reproduces, one passes, one was skipped."""
    entry = {"message": "m", "file": "f", "code_location": "torch.x"}
    wrote = record(
        1, logs=[{**entry, "logger": "x"}], warnings=[{**entry, "category": "UserWarning"}]
    )
    unfixed = observation(failed(0, exception(cause=exception())), ended(1), torchrun=None)
    lost = observation(infra_error={"kind": "disk", "message": "no space left"}, world_size=2)
    attempts = {"unfixed": [unfixed, lost], "fix": [observation(ok(0), ok(1, record=wrote))]}
    graded = {
        name: [grade(case(), name, each, []) for each in made] for name, made in attempts.items()
    }
    verdicts = {name: verdict.to_json() for name, verdict in judge(case(), graded).items()}
    stored = document({"unfixed": [], "fix": [], "other-fix": "needs 2 GPUs"})
    for name, made in attempts.items():
        pairs = zip(made, graded[name])
        stored["variants"][name]["attempts"] = [
            {"observation": each, "outcome": o.to_json()} for each, o in pairs
        ]
    return json.loads(json.dumps({**stored, "verdicts": verdicts}))


MADE = ("variants", "fix", "attempts", 0)


def is_valid(stored: Any) -> bool:
    """Whether a document is valid; then it is by the JSON Schema, too, which knows no rules between
    keys."""
    try:
        validate_cell(stored)
    except ValueError:
        return False
    assert VALIDATOR.is_valid(stored)
    return True


def test_json_schema_file_is_what_the_types_give() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert FILE.read_text(encoding="utf-8") == json_schema(), "run `make schema`"
    definitions = SCHEMA["$defs"]
    for name, key, literal in (
        ("Outcome", "outcome", OutcomeName),
        ("Verdict", "name", VerdictName),
        ("Recognized", "kind", SignatureKind),
    ):
        assert set(definitions[name]["properties"][key]["enum"]) == set(get_args(literal))


def test_document_of_failure_or_control_is_valid_and_not_converted() -> None:
    stored = example()
    assert is_valid(stored) and validate_cell(stored) is stored
    variant, verdict = stored["variants"]["fix"], stored["verdicts"]["fix"]
    assert is_valid(
        {
            **stored,
            "kind": "control",
            "variants": {"control": variant},
            "verdicts": {"control": verdict},
        }
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2),
        (("unknown",), 1),
        (("case",), "Not A Slug"),
        (("kind",), "control"),
        (("variants",), {}),
        (("variants", "fix", "skipped"), "a skipped variant has no attempts"),
        (("verdicts", "unfixed"), {}),
        ((*MADE, "outcome", "outcome"), "clean"),
        ((*MADE, "outcome", "unknown"), 1),
        ((*MADE, "observation", "ranks", 0, "rank"), "0"),
        ((*MADE, "observation", "attempt", "world_size"), 0),
        (("verdicts", "fix", "name"), "GOOD"),
        (("verdicts", "fix", "interval"), [0.1]),
        (("hardware", "gpus"), ["a"]),
    ],
)
def test_wrong_value_is_refused(path: tuple[Any, ...], value: Any) -> None:
    stored = example()
    parent: Any = stored
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    assert not is_valid(stored)


@pytest.mark.parametrize(
    ("kind", "variants", "verdicts", "where"),
    [
        ("failure", ["fix"], ["fix"], "variants: "),
        ("failure", ["unfixed", "fix"], ["unfixed"], "verdicts.unfixed: "),
        ("control", ["unfixed"], [], "variants.unfixed: "),
        ("control", ["control"], ["fix"], "verdicts.fix: "),
    ],
)
def test_wrong_variants_are_named(
    kind: str, variants: list[str], verdicts: list[str], where: str
) -> None:
    stored = example()
    names = {"variants": variants, "verdicts": verdicts}
    changes = {key: dict.fromkeys(listed, stored[key]["fix"]) for key, listed in names.items()}
    with pytest.raises(ValueError, match=f"^{where}"):
        validate_cell({**stored, "kind": kind, **changes})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank": "0"}, "rank: Input should be a valid integer"),
        ({"checks": [{}]}, "checks[0].name: Field required"),
        ({"versions": {"a b": 1}}, "versions.'a b'"),
        ({"checks": [{}] * 4}, "; and 5 more"),
    ],
)
def test_invalid_record_names_the_key(changes: dict[str, Any], error: str) -> None:
    honest = record(0)
    assert validate_record(honest) is honest
    with pytest.raises(ValueError) as refused:
        validate_record({**honest, **changes})
    assert error in str(refused.value)
