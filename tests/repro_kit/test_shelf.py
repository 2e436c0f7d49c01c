"""Tensors that processes leave each other in a file, one at a time; and norms that need no further copy."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repro_matrix.paths import REPROS

torch = pytest.importorskip("torch", reason="needs the stack `current`")
if str(REPROS) not in sys.path:
    sys.path.insert(0, str(REPROS))

from repro_kit import norms
from repro_kit.tensor_store import Shelf, Writer, index_of

SHAPES = st.lists(st.integers(0, 5), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])


@settings(deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=5))
def test_what_is_put_is_what_is_read(tmp_path_factory: Any, wanted: list[tuple[list[int], Any]]) -> None:
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
        want = tensor.t() if tensor.dim() == 2 else tensor
        assert shelf[name].dtype == want.dtype and torch.equal(shelf[name], want)


def test_a_shelf_that_was_changed_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "last")
    writer.put("a", torch.ones(4))
    with pytest.raises(ValueError, match="already"):
        writer.put("a", torch.ones(4))
    writer.close()
    data = bytearray((tmp_path / "last").read_bytes())
    data[5] ^= 1
    (tmp_path / "last").write_bytes(data)
    with pytest.raises(ValueError, match="a is not what was put there"):
        Shelf(tmp_path / "last")["a"]
    (tmp_path / "last").write_bytes(data[:7])
    with pytest.raises(ValueError, match="a is not what was put there"):
        Shelf(tmp_path / "last")["a"]


@given(st.integers(1, 40), st.integers(1, 17), st.booleans())
def test_a_norm_in_chunks_is_the_norm(size: int, chunk: int, across: bool) -> None:
    a, b, c, d = (torch.randn(size, 3) for _ in range(4))
    if across:
        a = torch.randn(3, size).t()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "CHUNK", chunk)
        for got, want in (
            (norms.norm(a), a), (norms.norm(a, b), a - b), (norms.norm(a, b, c, d), (a - b) - (c - d)),
        ):  # fmt: skip
            assert got == pytest.approx(float(want.norm()), rel=1e-5)
        a[-1, -1] = math.inf
        assert norms.norm(a) == math.inf
        a[-1, -1] = math.nan
        assert math.isnan(norms.norm(a, b))
    assert norms.norm(a, torch.ones(2)) == math.inf


def test_a_digest_says_names_and_bits_and_not_their_order() -> None:
    one, other = torch.ones(3), torch.arange(4.0)
    said = norms.digest([("a", one), ("b", other)])
    assert said == norms.digest([("b", other), ("a", one)])
    changed = (
        [("a", one), ("c", other)],
        [("a", one), ("b", other.flip(0))],
        [("a", one)],
        [("a", one), ("b", -other)],
    )
    assert said not in [norms.digest(pairs) for pairs in changed]
