"""The checks of parameters and gradients: what ranks record of a gradient, and what follows from their records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repro_matrix.launch.script_checks import add_checks
from repro_matrix.launch.worker.parameters import bit_sums, digest


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
        (parameter("w", ignored=True), parameter("w", "other", ignored=True), 0, "no parameter has one after a step"),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5001,), (4, 6), (3, 5), (2, 3, 7), (1, 8), (8, 1)])
def test_sums_depend_on_the_numbers_and_not_on_their_place_in_memory(shape: tuple[int, ...], dtype: Any) -> None:
    gradient = torch.randn(shape).to(dtype)
    last = gradient.clone()
    last.view(-1)[-1] += 1
    shifted = torch.cat([torch.ones(1, dtype=dtype), gradient.flatten()])[1:].view(shape)
    columns = gradient.movedim(0, -1).contiguous().movedim(-1, 0) if shape else gradient
    sums = digest(bit_sums(gradient))
    assert digest(bit_sums(last)) != sums
    assert digest(bit_sums(shifted)) == digest(bit_sums(columns)) == sums
    if gradient.dim() and gradient.shape[0] > 1:
        assert digest(bit_sums(gradient.flip(0))) != sums, "rows in another order are another gradient"


def test_sums_of_a_sparse_gradient_depend_on_its_rows() -> None:
    one, other = (
        torch.sparse_coo_tensor([rows], torch.ones(3, 4), (9, 4), check_invariants=True)
        for rows in ([1, 1, 3], [1, 3, 1])
    )
    moved = torch.sparse_coo_tensor([[1, 1, 4]], torch.ones(3, 4), (9, 4), check_invariants=True)
    assert digest(bit_sums(one)) == digest(bit_sums(other)) != digest(bit_sums(moved))
