"""The tolerance of a proof that compares outputs with one process: it follows the model's own rounding."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.paths import REPROS

torch = pytest.importorskip("torch", reason="needs the stack `current`")
if str(REPROS) not in sys.path:
    sys.path.insert(0, str(REPROS))

from repro_kit.tolerance import FACTOR, Single, training

from test_kit_proof import BAD, a_run, checks_of


def layers(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(dtype)


def inputs(dtype: Any = torch.float32) -> Any:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def logits_of(dtype: Any = torch.float32) -> tuple[Single, Any]:
    model, data = layers(dtype), inputs(dtype)
    with torch.no_grad():
        return Single(model, lambda whole: {"logits": whole(data)}), model(data)


def state(one: Single, got: Any, **more: Any) -> str:
    run = a_run()
    one.check(run, "logits", got, **more)
    return checks_of(run)["logits"].state


@pytest.mark.parametrize(("dtype", "seen"), [(torch.float32, 1e-5), (torch.bfloat16, 0.4)])
def test_one_element_that_is_off_by_more_than_rounding_is_seen(dtype: Any, seen: float) -> None:
    one, want = logits_of(dtype)
    assert state(one, want) == "passed"
    exact = layers(dtype).double()(inputs(dtype).double()).to(dtype)  # another way to compute it
    assert state(one, exact) == "passed"
    wrong = want.clone()
    wrong[-1, -1] += seen * want.abs().max()
    assert state(one, wrong) == "failed"


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_or_not_there_is_seen(bad: float) -> None:
    one, want = logits_of()
    wrong = want.clone()
    wrong[-1, -1] = bad
    assert state(one, wrong) == "failed"
    assert state(one, want[:-1]) == "failed" and state(one, torch.empty_like(want, device="meta")) == "failed"
    assert state(one, {"another": want}) == "failed" and state(one, {}) == "failed"


def test_what_is_like_it_has_its_tolerance() -> None:
    one, want = logits_of()
    assert state(one, 2 * want, like=2 * want) == "passed" and state(one, 2 * want, like=2.0001 * want) == "failed"


def test_a_yardstick_that_is_no_good_proves_nothing() -> None:
    model = layers()
    one = Single(model, lambda whole: {"logits": 1e5 * (whole[0].weight.sum() - model[0].weight.double().sum())})
    assert state(one, torch.tensor(0.0)) == "void"
    nothing = Single(model, lambda whole: {"logits": torch.zeros(3)})
    assert state(nothing, torch.zeros(3)) == "void"
    broken = Single(model, lambda whole: {"logits": torch.full((3,), math.nan)})
    assert state(broken, torch.full((3,), math.nan)) != "passed"


def test_a_tensor_of_zeros_must_be_zeros() -> None:
    model = layers()
    one = Single(model, lambda whole: {"logits": {"a": whole(inputs()), "b": torch.zeros(2)}})
    a = model(inputs())
    assert state(one, {"a": a, "b": torch.zeros(2)}) == "passed"
    assert state(one, {"a": a, "b": torch.tensor([0.0, 1e-9])}) == "failed"


def trained(model: Any, factor: float = 1.0) -> Any:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(inputs()).square().mean()
        (factor * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return training(losses, model)


def test_a_training_leaves_the_model_as_it_was_and_a_wrong_one_is_seen() -> None:
    model = layers()
    one = Single(model, trained, factor=FACTOR)
    assert all(torch.equal(value, layers().state_dict()[name]) for name, value in model.state_dict().items())
    for factor, state in ((1.0, "passed"), (1.0005, "failed")):
        run, other = a_run(), layers()
        found = trained(other, factor)
        one.check(run, "losses", found["losses"])
        one.check(run, "one-process", found["weights"], part="weights")
        assert {check.state for check in checks_of(run).values()} == {state}


def test_no_script_chooses_a_tolerance() -> None:
    """What is not zero is derived (docs/proofs.md)."""
    fixed = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(REPROS).glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if "tolerance=" in line and not line.split("tolerance=")[1].startswith(("0)", "0,", "0.0)", "0.0,"))
    ]
    assert fixed == []
