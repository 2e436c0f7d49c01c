"""The checks of parameters and gradients: what ranks record of a gradient, and what follows from
their records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repro_matrix.grading.checks import evaluate
from repro_matrix.launch.script_checks import add_checks
from repro_matrix.launch.worker.parameters import bit_sums, digest


def parameter(
    name: str,
    content: str = "same",
    step: int = 3,
    sums: str = "same",
    ignored: bool = False,
    frozen: bool = False,
) -> Any:
    return {
        "name": name,
        "shape": [2],
        "hash": content,
        "used": [step, step > 0 and sums],
        "ignored": ignored,
        "finite": True,
        "gradient": False,
        "frozen": frozen,
    }


def described(*parameters: Any, group: int = 2, others: int = 0, **changes: Any) -> Any:
    return {
        "parameters": list(parameters),
        "sharded": [],
        "errors": [],
        "group": group,
        "others": others,
        **changes,
    }


def checked(*facts: Any) -> Any:
    """Return the check of replicas that every rank of these descriptions records."""
    records = [{"facts": {"parameters": each}, "ended": 1.0, "checks": []} for each in facts]
    add_checks(records, ["replicas"])
    first, *rest = [check for record in records for check in record["checks"]]
    assert rest == [first] * (len(facts) - 1)
    return first


@pytest.mark.parametrize(
    ("one", "other", "wrong", "text"),
    [
        (
            parameter("w"),
            parameter("w"),
            0,
            "1 parameter and 1 gradient of the last of 3 steps are equal on 2 ranks",
        ),
        (parameter("w"), parameter("w", sums="other"), 1, "wrong: gradient of w"),
        (parameter("w"), parameter("w", "other", sums="other"), 2, "wrong: w, gradient of w"),
        (
            parameter("w"),
            parameter("w", step=2, sums="other"),
            0,
            "gradients not compared: the ranks made 2 and 3",
        ),
        (
            parameter("w", step=0),
            parameter("w", "other", step=0),
            1,
            "gradients not compared: no parameter has one",
        ),
        (
            parameter("w", ignored=True),
            parameter("w", "other", ignored=True),
            0,
            "no parameter has one after a step",
        ),
    ],
)
def test_replicas_are_equal_if_parameters_and_gradients_are(
    one: Any, other: Any, wrong: int, text: str
) -> None:
    check = checked(described(one), described(other))
    assert (check["actual"], check["passed"]) == (wrong, not wrong) and text in check["subject"]
    unknown = checked(described(one), described(other, errors=["RuntimeError: no sums"]))
    assert "gradients not compared: RuntimeError" in unknown["subject"]


def test_frozen_parameters_are_compared_and_what_is_not_is_counted() -> None:
    frozen = [parameter("base", content, step=0, frozen=True) for content in ("same", "other")]
    check = checked(*(described(parameter("w"), frozen[0], others=2) for _ in range(2)))
    assert evaluate(check, 1.0).state == "passed"
    assert (
        check["subject"]
        == "2 parameters (1 frozen) and 1 gradient of the last of 3 steps are equal on 2 ranks; "
        "2 parameters that no optimizer has stepped on were not compared"
    )
    wrong = checked(*(described(parameter("w"), each) for each in frozen))
    assert wrong["actual"] == 1 and wrong["subject"].endswith("wrong: base")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"group": 0}, "no process group was created: the 2 ranks are not one training"),
        ({"group": 1}, "the process group has 1 rank: the 2 ranks are not one training"),
        ({"sharded": ["FSDP"], "group": 0}, "sharded by FSDP"),
    ],
)
def test_equal_ranks_of_no_common_training_are_not_checked(changes: Any, why: str) -> None:
    result = evaluate(checked(*(described(parameter("w"), **changes) for _ in range(2))), 1.0)
    assert result.state == "void" and result.details == f"not checked: {why}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (5001,), (4, 6), (3, 5), (2, 3, 7), (1, 8), (8, 1)]
)
def test_sums_depend_on_the_numbers_and_not_on_their_place_in_memory(
    shape: tuple[int, ...], dtype: Any
) -> None:
    gradient = torch.randn(shape).to(dtype)
    last = gradient.clone()
    last.view(-1)[-1] += 1
    shifted = torch.cat([torch.ones(1, dtype=dtype), gradient.flatten()])[1:].view(shape)
    columns = gradient.movedim(0, -1).contiguous().movedim(-1, 0) if shape else gradient
    sums = digest(bit_sums(gradient))
    assert digest(bit_sums(last)) != sums
    assert digest(bit_sums(shifted)) == digest(bit_sums(columns)) == sums
    if gradient.dim() and gradient.shape[0] > 1:
        assert digest(bit_sums(gradient.flip(0))) != sums, (
            "rows in another order are another gradient"
        )


def test_sums_of_a_sparse_gradient_depend_on_its_rows() -> None:
    one, other = (
        torch.sparse_coo_tensor([rows], torch.ones(3, 4), (9, 4), check_invariants=True)
        for rows in ([1, 1, 3], [1, 3, 1])
    )
    moved = torch.sparse_coo_tensor([[1, 1, 4]], torch.ones(3, 4), (9, 4), check_invariants=True)
    assert digest(bit_sums(one)) == digest(bit_sums(other)) != digest(bit_sums(moved))
