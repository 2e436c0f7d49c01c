"""CUDA_VISIBLE_DEVICES, as CUDA reads it. Pure.

Sources: "CUDA environment variables" in the CUDA C++ programming guide (the list ends at the first entry that is not
valid; a UUID may be cut short for as long as it names one device only; indices follow CUDA_DEVICE_ORDER, by default
the fastest device first), and torch/cuda/__init__.py (`_parse_visible_devices`), which says what CUDA does and the
guide does not: numbers are read as strtoul reads them, the first entry decides whether the list holds numbers or names,
and a device that is named twice leaves none at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NAME = "CUDA_VISIBLE_DEVICES"
_NUMBER = re.compile(r"[+-]?[0-9]+")
# Nothing is to be seen: the empty list, the usual idiom for it, and what Slurm sets for a job without GPUs.
_NONE = ("", "-1", "NoDevFiles")


@dataclass(frozen=True)
class Visible:
    """``cards``: positions (NVML's, which is the PCI order) in the order in which CUDA numbers them.

    ``problem``: why they are fewer than the list names. ``wished``: the list asks for no GPU: then none is no problem.
    """

    cards: tuple[int, ...]
    problem: str | None = None
    wished: bool = False


def read(text: str | None, uuids: Sequence[str], names: Sequence[str], order: str | None = None) -> Visible:
    """What ``text`` (the variable; None: not set) leaves of the cards with these UUIDs and names (PCI order).

    ``order``: CUDA_DEVICE_ORDER.
    """
    if text is None:
        return Visible(tuple(range(len(uuids))))
    if text.strip() in _NONE:
        return Visible((), wished=True)
    if text.startswith("MIG-"):
        return Visible((), f"{NAME}={text} names a MIG device; what is measured needs whole GPUs")
    named = text.startswith("GPU-")
    listed: dict[int | str, str] = {}  # as far as the list can be read at all, whatever is there
    problem = unread = None
    for entry in text.split(","):
        key, problem = (entry, None if entry.startswith("GPU-") else "is no UUID") if named else _number(entry)
        if problem:
            problem = f"{NAME}={text}: CUDA reads it up to {entry.strip()!r}, which {problem}"
            break
        if key in listed:
            return _twice(text, entry)
        listed[key] = entry
        if not named and not unread and _NUMBER.fullmatch(entry.strip()) is None:
            unread = f"{NAME}={text}: CUDA reads {entry.strip()!r} as {key}; commas separate the cards"
    found: list[int] = []
    for key, entry in listed.items():
        fitting = [place for place, uuid in enumerate(uuids) if (uuid.startswith(entry) if named else place == key)]
        if len(fitting) != 1:
            why = f"begins the UUIDs of {len(fitting)} GPUs" if fitting else f"is no GPU (there are {len(uuids)})"
            problem = f"{NAME}={text}: CUDA reads it up to {entry.strip()!r}, which {why}"
            break
        if fitting[0] in found:
            return _twice(text, entry)
        found += fitting
    if not named and _order_matters(found, names, order):
        return Visible((), f"{NAME}={text} counts devices in CUDA's own order (the fastest first), which NVML does not "
                       "know, and this machine's GPUs differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID or name them by UUID"
                       )  # fmt: skip
    return Visible(tuple(found), problem or unread)


def _twice(text: str, entry: str) -> Visible:
    return Visible((), f"{NAME}={text} names a device twice ({entry.strip()!r}): CUDA then shows none")


def _number(entry: str) -> tuple[int, str | None]:
    found = _NUMBER.match(entry.strip())
    if found is None:
        return -1, "is no number" + ("; 'all' is a word of NVIDIA_VISIBLE_DEVICES" if entry.strip() == "all" else "")
    return int(found[0]), "ends the list" if int(found[0]) < 0 else None


def _order_matters(found: Sequence[int], names: Sequence[str], order: str | None) -> bool:
    """Whether CUDA's default order can make these other cards than the PCI order does: never where all are alike."""
    return order != "PCI_BUS_ID" and 0 < len(found) < len(names) and len(set(names)) > 1
