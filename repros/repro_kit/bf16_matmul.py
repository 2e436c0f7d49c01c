"""Compute bfloat16 matrix products on a CPU without instructions for them.

There torch falls back to loops that are a hundred times slower than float32. The instructions multiply bfloat16, sum in
float32 and round the result; this does the same block by block with torch's float32 product. For the control at full
size only, never for a case whose failure could depend on it; the record's facts mention it.
"""

from __future__ import annotations

import warnings
from typing import Any

from repro_kit.run import Run

import torch

BLOCK = 4096  # rows and columns that are float32 at a time: 64 MiB
_library: list[Any] = []  # torch uses the replacement while this reference exists


def products_in_float32(run: Run, dtype: torch.dtype) -> None:
    """Replace the bfloat16 product in this process; nothing changes for another dtype or a CPU with instructions for
    it."""
    if dtype != torch.bfloat16 or run.device.type != "cpu" or _has_instructions():
        return
    run.fact("bfloat16 products", "multiplied and added up in float32, then rounded: this CPU has no instructions")
    if not _library:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns about the replacement, which is intended
            library.impl("mm", _mm, "CPU")
            library.impl("addmm", _addmm, "CPU")
        _library.append(library)


def _has_instructions() -> bool:
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and supported())


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype != torch.bfloat16:
        return torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    return _product(a, b, None)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    if a.dtype != torch.bfloat16 or beta != 1 or alpha != 1 or bias.dim() != 1:
        out = a.new_empty(a.shape[0], b.shape[1])
        return torch.ops.aten.addmm.out(bias, a, b, beta=beta, alpha=alpha, out=out)
    return _product(a, b, bias)


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    (rows, inner), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns)
    for row in range(0, rows, BLOCK):
        for column in range(0, columns, BLOCK):
            block = out[row : row + BLOCK, column : column + BLOCK]
            total = torch.zeros(block.shape)
            for at in range(0, inner, BLOCK):
                left = a[row : row + BLOCK, at : at + BLOCK].float()
                total.addmm_(left, b[at : at + BLOCK, column : column + BLOCK].float())
            if bias is not None:
                total += bias[column : column + BLOCK].float()
            block.copy_(total)
    return out
