"""Real weights (``weights=hub``): downloaded once, by one process of the stack, before any attempt's deadline starts.

The ranks then read them from the hub's own cache, offline.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import replace

from repro_matrix.environment.stacks import Stack
from repro_matrix.planning.plan import ArmPlan, CellPlan
from repro_matrix.planning.skips import Skip

LIMIT_S = 4 * 3600.0

_FETCH = """
import json, sys
import huggingface_hub as hub
kinds = ["*.safetensors", "*.json", "*.py", "*.model", "*.tiktoken", "*.txt"]
try:
    print(json.dumps({"folder": hub.snapshot_download(sys.argv[1], allow_patterns=kinds)}))
except Exception as error:
    names = [kind.__name__ for kind in type(error).__mro__]
    said = (str(error).strip().splitlines() or ["?"])[0]
    print(json.dumps({"error": type(error).__name__, "names": names, "said": said}))
"""


def fetch(stack: Stack, name: str) -> str | None:
    """Download a model into the user's hub cache. None, or why its weights cannot be had."""
    env = {**os.environ, **stack.environment(), "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            [stack.python, "-c", _FETCH, name], capture_output=True, text=True, timeout=LIMIT_S, env=env
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"weights=hub: {name} was not downloaded within {LIMIT_S / 3600:g} hours"
    except (OSError, ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["?"])[-1] if "done" in locals() else "the stack's python fails"
        return f"weights=hub: {name} cannot be downloaded: {said}"
    if "folder" in answer:
        return None
    if "GatedRepoError" in answer["names"]:
        return f"weights=hub: {name} is gated: accept its terms on the hub, and give a token (HF_TOKEN)"
    offline = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"}
    if offline & set(answer["names"]):
        return f"weights=hub: {name} is not in the cache here, and the hub cannot be reached ({answer['error']})"
    return f"weights=hub: {name} cannot be downloaded: {answer['error']}: {answer['said']}"


def with_weights(plans: Iterable[CellPlan], stacks: dict[str, Stack]) -> list[CellPlan]:
    """The plans with every model's weights on this machine; an arm whose weights cannot be had is skipped for that."""
    known: dict[tuple[str, str], str | None] = {}

    def checked(arm: ArmPlan) -> ArmPlan:
        model = arm.settings["model"]
        if arm.skipped or model["weights"] != "hub" or arm.stack not in stacks:
            return arm
        if (arm.stack, model["hub"]) not in known:
            known[arm.stack, model["hub"]] = fetch(stacks[arm.stack], model["hub"])
        why = known[arm.stack, model["hub"]]
        return replace(arm, skip=Skip("weights", why, (model["hub"],)) if why else None)

    found = []
    for plan in plans:
        arms = tuple(checked(arm) for arm in plan.arms)
        if arms[0].skip:
            arms = tuple(arm if arm.skip else replace(arm, skip=arms[0].skip) for arm in arms)
        found.append(replace(plan, arms=arms))
    return found
