"""Tensors on disk, one at a time: the store, norms in chunks, and a reference whose weights are on
disk."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from repro_kit import norms
from repro_kit import reference_checks as pass_criteria
from repro_kit.lora_training import checkpoint, lora_to_draw
from repro_kit.models import batch, drawable
from repro_kit.offloaded_model import Streamed
from repro_kit.settings import model_settings
from repro_kit.single_process import Copied, Drawn, Perturbed, train_alone
from repro_kit.tensor_store import Shelf, Writer, index_of

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repro_matrix.config import catalog as catalogue
from test_reference_checks import Tiny, a_run, trained_against
from torch.multiprocessing.reductions import StorageWeakRef

torch = pytest.importorskip("torch", reason="needs the stack `current`")
pytest.importorskip("transformers")

SHAPES = st.lists(st.integers(0, 5), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])


@settings(deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=5))
def test_tensor_store_returns_what_was_stored(
    tmp_path_factory: Any, wanted: list[tuple[list[int], Any]]
) -> None:
    path = tmp_path_factory.mktemp("shelf") / "first"
    tensors = {str(i): torch.randn(shape).to(dtype) for i, (shape, dtype) in enumerate(wanted)}
    writer = Writer(path)
    for name, tensor in tensors.items():
        writer.put(name, tensor.t() if tensor.dim() == 2 else tensor)
    assert not index_of(path).exists(), "not there before it is complete"
    writer.close()
    shelf = Shelf(path)
    assert set(shelf) == set(tensors) and len(shelf) == len(tensors)
    for name, tensor in tensors.items():
        expected = tensor.t() if tensor.dim() == 2 else tensor
        assert shelf[name].dtype == expected.dtype and torch.equal(shelf[name], expected)


def test_tensor_store_refuses_a_changed_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "last")
    writer.put("a", torch.ones(4))
    with pytest.raises(ValueError, match="already"):
        writer.put("a", torch.ones(4))
    writer.close()
    data = bytearray((tmp_path / "last").read_bytes())
    for changed in (data[:5] + bytes([data[5] ^ 1]) + data[6:], data[:7]):
        (tmp_path / "last").write_bytes(changed)
        with pytest.raises(ValueError, match="a is not what was put there"):
            Shelf(tmp_path / "last")["a"]


@given(st.integers(1, 40), st.integers(1, 17), st.booleans())
def test_norm_in_chunks_equals_the_norm(size: int, chunk: int, across: bool) -> None:
    a, b, c, d = (torch.randn(size, 3) for _ in range(4))
    if across:
        a = torch.randn(3, size).t()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "CHUNK", chunk)
        for actual, expected in (
            (norms.norm(a), a),
            (norms.norm(a, b), a - b),
            (norms.norm(a, b, c, d), (a - b) - (c - d)),
        ):
            assert actual == pytest.approx(float(expected.norm()), rel=1e-5)
        a[-1, -1] = math.inf
        assert norms.norm(a) == math.inf
        a[-1, -1] = math.nan
        assert math.isnan(norms.norm(a, b))
    assert norms.norm(a, torch.ones(2)) == math.inf


CATALOGUE = catalogue.load()
STEPS = 2


def drawn(name: str, kind: str = "plain", dtype: Any = torch.float32) -> tuple[Any, Drawn]:
    """What is recorded of the run, and a fresh start."""
    model_of = model_settings(CATALOGUE.raw["model"][name], "tiny", "random")
    model_of["config"] = {**model_of["config"], "num_hidden_layers": 2}
    run: Any = SimpleNamespace(
        model=model_of, seed=3, device=torch.device("cpu"), flags={}, record=None
    )
    model, weights = drawable(run, dtype)
    if kind == "lora":
        model = lora_to_draw(run, model, weights)
    if kind in ("lora", "checkpointing"):
        checkpoint(model)
    return run, Drawn(model.train(), weights)


def trained(start: Any, run: Any, folder: Path | None) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses, and copies of all parameters before the first step and after each."""
    seen: list[dict[str, Any]] = []

    def loss(model: Any, step: int) -> Any:
        return model(**batch(run, 0, step), use_cache=False).loss

    def after(_: int, model: Any) -> None:
        seen.append({name: value.detach().clone() for name, value in model.named_parameters()})

    return train_alone(start, loss, STEPS, pass_criteria.LR, after, folder), seen


def same(one: Any, other: Any) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(
        list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs
    )


def hooks(model: Any) -> list[int]:
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "perturbed"),
    [
        ("qwen1.5-0.5b", "plain", "float32", True),  # tied, with biases
        ("llama-2-7b", "plain", "bfloat16", False),
        ("llama-3.2-1b", "checkpointing", "float32", False),  # tied
        (
            "qwen-1.8b",
            "plain",
            "float32",
            False,
        ),  # first generation: one fused projection, remote code
        (
            "qwen-1.8b",
            "checkpointing",
            "float32",
            True,
        ),  # the reentrant kind: a backward inside the backward
        ("qwen1.5-0.5b", "lora", "float32", False),  # most parameters are frozen
    ],
)
def test_offloaded_step_is_bitwise_equal(
    name: str, kind: str, dtype: str, perturbed: bool, tmp_path: Path
) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    run, start = drawn(name, kind, getattr(torch, dtype))
    begin = Perturbed(start) if perturbed else start
    hooked = hooks(start.bare)
    whole = trained(begin, run, None)
    assert same(trained(begin, run, tmp_path / "weights"), whole)
    moved = [key for key in whole[1][0] if not torch.equal(whole[1][0][key], whole[1][-1][key])]
    assert moved and len(set(whole[0])) == STEPS, "something was trained"
    assert not (tmp_path / "weights").exists(), "nothing is left behind"
    assert {p.device.type for p in start.bare.parameters()} == {"meta"}, (
        "and the model is as it was"
    )
    assert hooks(start.bare) == hooked, "with the hooks that it had"


def test_checks_with_an_offloaded_reference_pass_and_fail(tmp_path: Path) -> None:
    states = {}
    for factor in (1.0, 1.01):
        run, model = a_run(work_dir=str(tmp_path), reference="layers"), Tiny()
        reference = pass_criteria.Reference(run, model)
        assert all(map(torch.equal, Tiny().state_dict().values(), model.state_dict().values())), (
            "it is as it was"
        )
        found = trained_against(reference, run, model, factor)
        states[factor] = {name: check.state for name, check in found.items()}
    assert set(states[1.0].values()) == {"passed"}, states
    assert states[1.01]["gradient"] == states[1.01]["updates"] == "failed", states


def test_offloaded_step_moves_one_module_at_a_time(tmp_path: Path) -> None:
    run, start = drawn("llama-2-7b")
    sizes = [p.numel() for p in start.bare.parameters()]
    most, alive = 0, []

    class Counting(Streamed):
        """Count the elements of parameters that are in memory whenever another one is read."""

        def _read(self, name: str) -> Any:
            nonlocal most, alive
            out = super()._read(name)
            alive = [each for each in alive if not each[0].expired()]
            alive.append((StorageWeakRef(out.untyped_storage()), out.numel()))
            most = max(most, sum(size for _, size in alive))
            return out

    with Counting(start.bare, start.value, pass_criteria.LR, tmp_path / "weights") as streamed:
        for step in range(2):
            streamed.step(
                lambda model, step=step: model(**batch(run, 0, step), use_cache=False).loss
            )
        held = {id(p): p.untyped_storage().nbytes() for p in start.bare.parameters()}
        assert sum(held.values()) == 4 * len(held), "one element each"
    assert 0 < most <= 2 * max(sizes) < sum(sizes) / 2


def test_offloaded_step_with_a_shared_parameter_is_refused(tmp_path: Path) -> None:
    class Borrowing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.lent = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return (self.own(x) @ self.lent.weight).sum()

    model = Borrowing()
    start = Copied(model)
    with Streamed(model, start.value, 0.1, tmp_path / "weights") as seen:
        expected = float(start.value("own.weight").sum() + start.value("own.bias").sum())
        assert seen.step(lambda model: model.own(torch.ones(1, 4)).sum()) == pytest.approx(expected)
        assert math.isnan(seen.step(lambda model: model(torch.ones(1, 4))))
