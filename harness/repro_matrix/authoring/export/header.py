"""The docstring of an exported script: what it is, the command, what to expect, with which versions. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from repro_matrix.authoring.export.stored import Measured
from repro_matrix.config.schema import Case

WIDTH = 100
_MEANS = {
    "reproduced": "it fails as follows",
    "passed": "it works: every rank ends with its checks right",
    "hang": "it hangs; end it with Ctrl-C",
    "other_failure": "it fails, not by the failure that is named above",
}


def lines(
    case: Case,
    variant: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    stored: Measured | None,
    proven: bool,
    skipped: str | None,
) -> list[str]:
    """``proven``: whether the script checks its result; ``skipped``: why it cannot run on this machine."""
    ranks = settings["world_size"]
    said = [f"{case.title}{' (simulated GPUs)' if case.simulated else ''}", ""]
    said += [f"    torchrun --nproc-per-node {ranks} this_file.py", ""]
    said.append("Versions: " + (" ".join(f"{name}=={version}" for name, version in versions.items()) or "unknown"))
    where = "GPUs" if settings["device"] == "cuda" else "CPU, gloo"
    said.append(f"Where: {ranks} rank(s), {where}; {settings['model']['title']} ({settings['model']['scale']}, random "
                f"weights); {settings['strategy']['title']}")  # fmt: skip
    if case.variants[variant].help:
        said.append(f"Variant {variant}: {case.variants[variant].help}")
    if skipped:
        said.append(f"Not run where this was written: {skipped}")
    said += ["", *_expected(stored)]
    if not proven:
        said.append(
            "(If it ends without an error, the failure is not there: whether its numbers are right is not asked.)"
        )
    if case.references:
        said.append(f"See: {', '.join(case.references)}")
    wrapped = []
    for line in said:
        again = "      " if line.startswith("    ") else ""
        wrapped += textwrap.wrap(line, WIDTH, subsequent_indent=again, break_on_hyphens=False) or [""]
    return wrapped


def _expected(stored: Measured | None) -> list[str]:
    if stored is None:
        return ["No measurement of it with these versions is stored: what to expect is not known."]
    outcome = stored.outcome
    means = _MEANS.get(outcome["outcome"], outcome["outcome"])
    said = [f"Expected ({stored.alike} of {len(stored.outcomes)} stored attempts with these versions): {means}"]
    primary = outcome["primary"]
    if primary and primary["type"]:
        message = primary["message"].partition("\n")[0][:300]
        said.append(f"    {primary['type']}: {message}")
        if primary["location"]:
            said.append(f"    raised in {primary['location']}")
    elif outcome["outcome"] != "passed":
        said.append(f"    {outcome['reason'][:300]}".replace("\n", " "))
    return said
