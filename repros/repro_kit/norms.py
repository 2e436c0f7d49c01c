"""Compute 2-norms of tensors and of their differences chunk by chunk, without a copy of a large tensor."""

from __future__ import annotations

import math
import zlib
from typing import Any, Iterable, Iterator

import torch

CHUNK = 2**22  # elements


def each_chunk(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same CHUNK elements of tensors of one shape; views where the tensors are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors))
    elif tensors[0].numel():
        yield tensors


def local_part(tensor: Any) -> Any:
    """Return the part of a tensor that this rank holds (a DTensor's shard, or the tensor itself)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def norm(one: torch.Tensor, *others: torch.Tensor) -> float:
    """Return |a|, |a - b|, or |(a - b) - (c - d)| in float32, on the first tensor's device.

    NaN or infinity when any element is; infinity when shapes differ.
    """
    tensors = [tensor.detach() for tensor in (one, *others)]
    if any(tensor.shape != one.shape for tensor in tensors):
        return math.inf
    total = 0.0
    for parts in each_chunk(*tensors):
        first, *rest = (part.to(one.device).float() for part in parts)
        if len(rest) == 3:
            rest = [rest[0], rest[1] - rest[2]]
        for part in rest:
            first = first - part
        total += float(torch.linalg.vector_norm(first)) ** 2
    return math.sqrt(total) if math.isfinite(total) else total


def norm_of(norms: Iterable[float]) -> float:
    return math.sqrt(sum(value * value for value in norms))


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return a digest of names and bits, independent of their order."""
    sums = sorted((name, checksum(tensor)) for name, tensor in tensors)
    return f"{zlib.crc32(repr(sums).encode()):08x}"


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits."""
    if not tensor.numel():
        return 0
    return zlib.crc32(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)
