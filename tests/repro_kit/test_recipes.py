"""What a case's flags add to plain SGD, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the stack `current`")

from repro_kit import recipes
from repro_kit.recipes import PLAIN, Recipe


def a_run(scale: str = "tiny", kind: str = "cpu", **flags: Any) -> Any:
    defaults = {name: getattr(PLAIN, name) for name in Recipe.__dataclass_fields__}
    model = {"config": {"vocab_size": 50}, "scale": scale}
    return SimpleNamespace(
        seed=1, steps=2, world_size=2, device_kind=kind, flags={**defaults, **flags}, model=model
    )


def test_without_flags_a_step_is_one_batch_of_plain_sgd() -> None:
    run, layer = a_run(), torch.nn.Linear(2, 2)
    recipe = Recipe.of(run)
    assert recipe.plain and len(recipe.parts(run, 1, 0)) == 1
    assert (recipe.parts(run, 1, 0)[0]["labels"] >= 0).all()
    optimizer = recipe.make_optimizer(layer.named_parameters(), 0.5)
    assert type(optimizer) is torch.optim.SGD and len(optimizer.param_groups) == 1
    assert recipe.make_schedule(run, optimizer) is None


def test_micro_batches_have_different_numbers_of_tokens() -> None:
    run = a_run(accumulation=2)
    recipe = Recipe.of(run)
    parts = [part for rank in range(2) for part in recipe.parts(run, rank, 0)]
    assert len({recipes.counted(part) for part in parts}) == 4
    ids = {tuple(part["input_ids"].flatten().tolist()) for part in parts}
    assert len(ids) == 4, "and different tokens"
    whole = recipe.whole(run, 1, 0)
    assert recipes.counted(whole) == sum(map(recipes.counted, parts[2:]))


def test_adamw_decays_matrices_only() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    named = [("q_proj.weight", layer[0].weight), ("q_proj.bias", layer[0].bias)]
    named += [("input_layernorm.weight", layer[1].weight)]
    decayed, rest = Recipe(optimizer="adamw").make_optimizer(named, 0.1).param_groups
    assert len(decayed["params"]) == 1 and decayed["params"][0] is layer[0].weight
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    flat = [("_fsdp_wrapped_module._flat_param", layer[0].weight)]
    with pytest.raises(ValueError, match="use_orig_params"):
        Recipe(optimizer="adamw").make_optimizer(flat, 0.1)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_clipping_equals_torch(dtype: Any) -> None:
    torch.manual_seed(0)
    one, other = ([torch.nn.Parameter(torch.zeros(9)) for _ in range(2)] for _ in range(2))
    for a, b in zip(one, other, strict=True):
        a.grad = torch.randn(9)
        b.grad = a.grad.clone()
    found = recipes.clip_exactly(one, 0.5, dtype)
    assert found == pytest.approx(float(torch.nn.utils.clip_grad_norm_(other, 0.5)))
    assert all(torch.allclose(a.grad, b.grad) for a, b in zip(one, other, strict=True))


def test_no_token_is_generated_twice_in_a_row() -> None:
    logits = torch.zeros(50)
    logits[[7, 8, 9]] = torch.tensor([3.0, 2.0, 1.5])

    def call(input_ids: Any, **_: Any) -> Any:
        return SimpleNamespace(logits=logits.expand(*input_ids.shape, -1))

    start = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5)}
    tokens, margins = recipes.greedy(call, start)
    assert tokens[:4] == [7, 7, 8, 8] and margins[:4] == [1.0, 1.0, 0.5, 0.5]
    assert len(tokens) == len(margins) == 2 * recipes.TOKENS


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (a_run(scale="full", clip=0.5), "plain SGD only"),
        (a_run(scale="full", optimizer="adamw"), "plain SGD only"),
        (a_run(kind="cuda", dropout=0.1), "masks of a GPU"),
    ],
)
def test_impossible_recipes_are_refused(run: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.of(run)


def test_fault_without_its_flag_is_refused() -> None:
    from repro_kit.fault_injection import sabotaged

    run, trained = a_run(), SimpleNamespace(recipe=PLAIN)
    with pytest.raises(ValueError, match="without the flag clip"):
        sabotaged(run, trained, [], 0, "no_clip")  # type: ignore[arg-type]
