"""Find the samples of a root call in its inputs.

They are known by a checksum, so that ranks and micro-batches compare.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterator, Sequence

import torch

from .layout import dtype_name, located
from .sketch import crc, sketch

DEPTH = 4  # of nested lists and mappings


def tensors(value: Any, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested sequences, mappings and outputs of models, with their names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from tensors(each, f"{name}.{number}" if name else str(number), depth - 1)
    elif depth and hasattr(value, "items") and hasattr(value, "keys"):
        for key, each in list(value.items()):
            yield from tensors(each, f"{name}.{key}" if name else str(key), depth - 1)


def floating(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that can be sketched, without scalars.

    Scalars are losses, which belong to no sample.
    """
    for _, each in tensors(value):
        if each.is_floating_point() and each.dim() and each.device.type != "meta":
            yield each


def pick(found: dict[str, torch.Tensor], *names: str) -> torch.Tensor | None:
    return next((each for name, each in found.items() if name.rpartition(".")[2] in names), None)


@dataclasses.dataclass
class RootBatch:
    """The samples of one root call.

    length: elements of a sample that models may merge with the first dimension.
    """

    samples: list[int] = dataclasses.field(default_factory=list)
    labels: list[int] = dataclasses.field(default_factory=list)
    length: int = 0

    @staticmethod
    def of_call(
        args: Sequence[Any],
        kwargs: dict[str, Any],
        maker: Callable[[torch.Tensor], RootBatch | None],
    ) -> RootBatch:
        """Find the samples of a call.

        They are known by input_ids if there are any, without what the mask hides. Features have the
        samples of which a model made them: ``maker`` returns its batch.
        """
        found = {
            name: each
            for name, each in [*tensors(args), *tensors(kwargs)]
            if each.device.type != "meta"
        }
        ids = pick(found, "input_ids", "decoder_input_ids")
        if ids is None:
            data = {
                name: each
                for name, each in found.items()
                if not name.endswith(("mask", "position_ids"))
            } or found
            whole = [each for each in data.values() if not each.is_floating_point() and each.dim()]
            ids = next(iter([*whole, *(each for each in data.values() if each.dim() > 1)]), None)
        if ids is None or hasattr(ids, "placements"):
            return RootBatch()
        mask, labels = pick(found, "attention_mask"), pick(found, "labels", "label")
        source = maker(ids) if ids.is_floating_point() else None
        ids = ids.detach().cpu()
        if source is not None and len(source.samples) == len(ids):
            samples = source.samples
        elif mask is not None and mask.shape == ids.shape:
            mask = mask.detach().cpu().bool()
            samples = [crc(row[own]) for row, own in zip(ids, mask)]
        else:
            samples = [crc(row) for row in ids]
        marks: list[int] = []
        if labels is not None and labels.dim() and labels.shape[0] == len(samples):
            marks = [crc(row[row != -100]) for row in labels.detach().cpu()]
        return RootBatch(samples, marks, ids.shape[1] if ids.dim() > 1 else 0)

    def rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a sketch per sample and the line's fields.

        One sketch for a tensor that is not split into samples.
        """
        count, shape = len(self.samples), list(tensor.shape)
        part = located(tensor, sample=True)
        split = count and part.local.shape[:1] == (count,) and shape[0] == count
        if split:
            shape = shape[1:]
        elif count and self.length and shape[0] == count * self.length and part.kind == "full":
            split, shape = True, [self.length, *shape[1:]]
        else:
            part = located(tensor)
        local = part.local.reshape(count if split else 1, -1)
        fields = {
            "b": count if split else 0,
            **part.fields(),
            "shape": shape,
            "dtype": dtype_name(tensor),
        }
        return sketch(local, part.start, part.index), fields
