"""Write the lines of a rank's trace. Sketches stay on their device until a step ends; then they leave it together."""

from __future__ import annotations

import base64
import json
import os
from typing import Any, Dict, List, Optional, Tuple

import torch

from .sketch import content

PENDING = 4000  # lines that are kept before they are written


class Writer:
    def __init__(self, path: str) -> None:
        self.file = open(path, "a")  # noqa: SIM115 (open for as long as the rank is traced)
        self.pid = os.getpid()
        self.pending: List[Tuple[Dict[str, Any], Optional[torch.Tensor]]] = []

    def add(self, kind: str, values: Optional[torch.Tensor] = None, /, **fields: Any) -> None:
        """Append a line; values are a sketch: (rows, 9), or (9) for a tensor that is one row."""
        self.pending.append(({"k": kind, **fields}, values))
        if len(self.pending) >= PENDING:
            self.flush()

    def flush(self) -> None:
        """Write all lines. Raises OSError (a full disk); what was written before stays readable."""
        pending, self.pending = self.pending, []
        if os.getpid() != self.pid or self.file.closed:  # a child that was forked; its parent writes these lines
            return
        by_device: Dict[torch.device, List[torch.Tensor]] = {}
        for _, values in pending:
            if values is not None:
                by_device.setdefault(values.device, []).append(values.reshape(-1))
        rest = {device: memoryview(content(torch.cat(parts))) for device, parts in by_device.items()}
        lines = []
        for fields, values in pending:
            if values is not None:
                size = values.numel() * values.element_size()
                own = rest[values.device]
                fields["v"], rest[values.device] = base64.b64encode(own[:size]).decode(), own[size:]
            lines.append(json.dumps(fields, separators=(",", ":"), default=str) + "\n")
        self.file.write("".join(lines))
        self.file.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self.file.close()
