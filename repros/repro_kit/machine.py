"""What of this machine an answer can depend on, as this rank's torch sees it. A case names those that decide its
answers (``depends_on``); the judge compares them (harness/repro_matrix/grading/capabilities.py)."""

from __future__ import annotations

import sys
from typing import Any, Callable


def machine_facts() -> dict[str, Any]:
    """The facts that torch can say; none of a package that this rank has not imported, and CUDA's only where it is in
    use already: asking must not start a context."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    questions: dict[str, Callable[[], Any]] = {
        "cpu_capability": lambda: torch.backends.cpu.get_cpu_capability(),  # AVX2, AVX512, DEFAULT ...
        "cpu_bf16": lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "cpu_fp16": lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    }
    if torch.cuda.is_initialized():
        questions["gpu_capability"] = lambda: "{}.{}".format(*torch.cuda.get_device_capability())
    found = {}
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except Exception:  # a release or a build that cannot say it: the fact is unknown there
            continue
    return found
