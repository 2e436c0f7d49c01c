"""The checks of parameters and gradients, from what ranks described."""

from __future__ import annotations

from typing import Any

import pytest
from repro_matrix.launch.script_checks import add_checks


def parameter(name: str, content: str = "same", step: int = 3, sums: str = "same", ignored: bool = False) -> Any:
    return {"name": name, "shape": [2], "hash": content, "used": [step, step > 0 and sums], "ignored": ignored,
            "finite": True, "gradient": False}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "wrong", "text"),
    [
        (parameter("w"), parameter("w"), 0, "1 tensors and 1 gradients of the last of 3 steps"),
        (parameter("w"), parameter("w", sums="other"), 1, "wrong: gradient of w"),
        (parameter("w"), parameter("w", "other", sums="other"), 2, "wrong: w, gradient of w"),
        (parameter("w"), parameter("w", step=2, sums="other"), 0, "gradients not compared: the ranks made 2 and 3"),
        (parameter("w", step=0), parameter("w", "other", step=0), 1, "gradients not compared: no parameter has one"),
        (parameter("w", ignored=True), parameter("w", "other", ignored=True), 0, "0 tensors (1 ignored by DDP)"),
    ],
)
def test_replicas_are_equal_if_parameters_and_gradients_are(one: Any, other: Any, wrong: int, text: str) -> None:
    facts = [{"parameters": [each], "sharded": [], "errors": []} for each in (one, other)]
    records = [{"facts": {"parameters": each}, "ended": 1.0, "checks": []} for each in facts]
    add_checks(records, ["replicas"])
    for record in records:
        (check,) = record["checks"]
        assert (check["actual"], check["passed"]) == (wrong, not wrong) and text in check["subject"]
    facts[1]["errors"] = ["RuntimeError: no sums"]
    add_checks(records, ["replicas"])
    assert "gradients not compared: RuntimeError" in records[0]["checks"][1]["subject"]
