"""Sketch tensors: inner products with 8 vectors of signs, and the sum of squares, in float64.

The signs depend on an element's index in the whole tensor only, so the sketches of disjoint slices
add up to the sketch of the whole, and the sketch of a sum is the sum of the sketches. The same on
every device and release of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from typing import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

PRODUCTS = 8
BLOCK = 4096  # an index is a block and a place in it; its sign is the product of the signs of both
CHUNK = 1 << 20  # elements that are turned into float64 at a time
tables: dict = {}  # device -> signs of the places of a block


def signs(numbers: torch.Tensor) -> torch.Tensor:
    """Return the 8 signs of each number: 8 bits of a 32-bit hash (lowbias32)."""
    mask = 0xFFFFFFFF
    mixed = (numbers ^ (numbers >> 16)) & mask
    mixed = (mixed * 0x7FEB352D) & mask
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & mask
    mixed = mixed ^ (mixed >> 16)
    bits = mixed.unsqueeze(-1) >> torch.arange(3, 3 + PRODUCTS, device=numbers.device)
    return (bits & 1).to(torch.float64) * 2 - 1


def counting(start: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int64, device=device)


def place_signs(device: torch.device) -> torch.Tensor:
    if device not in tables:
        tables[device] = signs(counting(0, BLOCK, device) + (1 << 31))
    return tables[device]


def block_signs(blocks: torch.Tensor) -> torch.Tensor:
    """Return the signs of blocks; block 0, where most tensors end, has 1 only."""
    return torch.where((blocks == 0).unsqueeze(-1), 1.0, signs(blocks))


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Compute beside the script.

    No gradient is recorded, and no mode (selective checkpointing) notices it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        yield


def sketch(rows: torch.Tensor, start: int = 0, index: torch.Tensor | None = None) -> torch.Tensor:
    """Return a (rows, 9) tensor for a (rows, elements) one.

    Its rows begin at index ``start`` of the whole tensor, or its elements have the indices
    ``index``.
    """
    total = torch.zeros(rows.shape[0], PRODUCTS + 1, dtype=torch.float64, device=rows.device)
    step = max(1, CHUNK // max(1, rows.shape[1]))
    for row in range(0, rows.shape[0], step):
        for first in range(0, rows.shape[1], CHUNK):
            part = rows[row : row + step, first : first + CHUNK].to(torch.float64)
            if index is None:
                products = _contiguous(part, start + first)
            else:
                places = index[first : first + CHUNK]
                products = part @ (
                    place_signs(part.device)[places % BLOCK] * block_signs(places // BLOCK)
                )
            total[row : row + step, :PRODUCTS] += products
            total[row : row + step, PRODUCTS] += (part * part).sum(1)
    return total


def _contiguous(part: torch.Tensor, start: int) -> torch.Tensor:
    table, lead = place_signs(part.device), start % BLOCK
    if start + part.shape[1] <= BLOCK:
        return part @ table[lead : lead + part.shape[1]]
    blocks = -(-(lead + part.shape[1]) // BLOCK)
    part = torch.nn.functional.pad(part, (lead, blocks * BLOCK - lead - part.shape[1]))
    products = part.view(-1, blocks, BLOCK) @ table
    return (products * block_signs(counting(start // BLOCK, blocks, part.device))).sum(1)


def content(tensor: torch.Tensor) -> bytes:
    own = tensor.detach().cpu().contiguous()
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())


def crc(tensor: torch.Tensor) -> int:
    """Return a checksum; integers of any width have the same one."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return zlib.crc32(content(tensor.to(torch.int64) if whole else tensor))


class Noise:
    """Change values by one unit in the last place, up, down or not at all.

    It draws no random number of the script's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def add(self, tensor: torch.Tensor, key: str) -> None:
        """Change a tensor in place, unseen by autograd."""
        if tensor.is_floating_point():
            tensor.data.add_(self.delta(tensor, key))

    def delta(self, tensor: torch.Tensor, key: str) -> torch.Tensor:
        generator = torch.Generator(tensor.device)
        generator.manual_seed(zlib.crc32(f"{self.seed}/{key}".encode()))
        draws = torch.randint(
            -1, 2, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int8
        )
        # 0.75: for a mantissa in [1, 2) the change is 0.75 to 1.5 units, which rounds to one.
        return tensor.detach() * (draws * (0.75 * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)
