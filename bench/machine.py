"""The machine on which a benchmark ran, and the file with its results."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def machine() -> dict[str, Any]:
    """Return the machine's CPU, cores, memory and load."""
    info = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    )
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in info.splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "load_average": [round(each, 1) for each in os.getloadavg()],
    }


def rounded(value: Any) -> Any:
    """Round every float of a JSON value to four digits after the point; small ones to four
    digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")


def write(path: Path, **result: Any) -> None:
    """Write a benchmark's results, with the machine, as JSON."""
    path.write_text(
        json.dumps({"machine": machine(), **rounded(result)}, indent=1) + "\n", encoding="utf-8"
    )
