"""Why an arm is not launched: a sentence for people, a kind and the needs for programs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from repro_matrix.records.base import SkipKind
from repro_matrix.records.document import Skip as Stored


@dataclass(frozen=True)
class Skip:
    """``needs``: what would have to be there, each as it is declared (``torch>=2.4``, ``2 GPUs``)."""

    kind: SkipKind
    reason: str
    needs: tuple[str, ...] = ()

    def to_json(self) -> Stored:
        return {"kind": self.kind, "needs": list(self.needs)}
