"""The JSON Schema of a cell's document, for other programs: made from the types.

``python -m repro_matrix.records.json_schema`` writes it anew (``make schema``); a test compares.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from repro_matrix.paths import RESULTS
from repro_matrix.records.document import Cell

FILE = RESULTS / "schema" / "cell-v1.schema.json"
_CONTROL = {"propertyNames": {"const": "control"}}
# What a type cannot say; harness/repro_matrix/records/validate.py says it in Python.
_RULES: dict[str, Any] = {
    "if": {"properties": {"kind": {"const": "control"}}},
    "then": {"properties": {"variants": _CONTROL, "verdicts": _CONTROL}},
    "else": {
        "properties": {
            "variants": {"required": ["unfixed"]},
            "verdicts": {"propertyNames": {"not": {"const": "unfixed"}}},
        }
    },
}
_VARIANT_RULES: dict[str, Any] = {
    "if": {"properties": {"skipped": {"type": "string"}}},
    "then": {"properties": {"attempts": {"maxItems": 0}}},
}


class _Plain(GenerateJsonSchema):
    """Without a title for every key."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def made() -> dict[str, Any]:
    found = TypeAdapter(Cell).json_schema(schema_generator=_Plain)
    definitions = found.pop("$defs")
    for each in (found, *definitions.values()):
        each.pop("title", None)
        if "description" in each:
            each["description"] = " ".join(each["description"].split())
    definitions["Variant"] |= _VARIANT_RULES
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": FILE.name, "title": "A cell's document"}
    return {**head, **found, **_RULES, "$defs": dict(sorted(definitions.items()))}


def text() -> str:
    return json.dumps(made(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
