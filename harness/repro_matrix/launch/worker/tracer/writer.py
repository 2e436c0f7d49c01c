"""Write the lines of a rank's trace. Sketches stay on their device until a step ends."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from .sketch import content

PENDING = 4000  # lines that are kept before they are written


class Writer:
    def __init__(self, path: str) -> None:
        self.file = open(path, "a")  # noqa: SIM115 (open for as long as the rank is traced)
        self.pending: list[tuple[dict[str, Any], torch.Tensor | None]] = []

    def add(self, kind: str, values: torch.Tensor | None = None, /, **fields: Any) -> None:
        """Append a line; values are a sketch: (rows, 9), or (9) for a tensor that is one row."""
        self.pending.append(({"k": kind, **fields}, values))
        if len(self.pending) >= PENDING:
            self.flush()

    def flush(self) -> None:
        """Write all lines. Raises OSError (a full disk); what was written before stays readable."""
        pending, self.pending = self.pending, []
        for fields, values in pending:
            if values is not None:
                fields["v"] = base64.b64encode(content(values)).decode()
            self.file.write(json.dumps(fields, separators=(",", ":"), default=str) + "\n")
        self.file.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self.file.close()
