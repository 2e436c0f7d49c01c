"""Store tensors in a file and read them one at a time, so that no process holds all of them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Iterator

import torch


class Writer:
    """Writes a file of tensors; readers see it once it is closed. Each name is written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: dict[str, tuple[int, int, list[int], str, int]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "wb")  # noqa: SIM115 - open until it is closed

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.index:
            raise ValueError(f"{name} is on the shelf {self.path} already")
        held = tensor.detach().to("cpu").contiguous()
        data = held.view(-1).view(torch.uint8).numpy().data if held.numel() else b""
        dtype = str(held.dtype).replace("torch.", "")
        self.index[name] = (self.file.tell(), held.numel(), list(held.shape), dtype, zlib.crc32(data))
        self.file.write(data)

    def close(self) -> None:
        self.file.close()
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self.index), encoding="utf-8")
        partial.rename(index_of(self.path))  # complete or absent


def index_of(path: Path) -> Path:
    return path.with_suffix(".index")


class Shelf(Mapping):
    """Name -> tensor, read from the file on each access. Raise ValueError where the file was changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: dict[str, Any] = json.loads(index_of(path).read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> torch.Tensor:
        start, count, shape, dtype, crc = self.index[name]
        out = torch.empty(count, dtype=getattr(torch, dtype))
        if count:
            data = out.view(torch.uint8).numpy()
            with open(self.path, "rb") as file:
                file.seek(start)
                read = file.readinto(data)  # type: ignore[arg-type]
            if read != len(data) or zlib.crc32(data) != crc:  # type: ignore[arg-type]
                raise ValueError(f"{self.path}: {name} is not what was put there")
        return out.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)
