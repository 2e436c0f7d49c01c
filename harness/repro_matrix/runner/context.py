"""What a run is made with, beside its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.grading.regrade import Graded
from repro_matrix.records.document import Around, Document


@dataclass(frozen=True)
class Given:
    """``profiles``: side by side; each cell's plan has its own. ``history``: older documents by key."""

    catalogue: Catalogue
    settings: RunSettings
    profiles: Sequence[Profile]
    machine: Machine
    stacks: Mapping[str, Stack]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, list[Document]] = field(default_factory=dict)
    graded: Graded = field(default_factory=dict)  # of these, what runs one after another share
    around: Around = field(default_factory=lambda: Around())

    @property
    def gpus(self) -> list[Gpu]:
        """All cards of all profiles, each once, in the machine's order."""
        found = {gpu.uuid: gpu for profile in self.profiles for gpu in profile.gpus}
        return sorted(found.values(), key=lambda gpu: gpu.index)
