"""The torchrun command that repeats an attempt manually."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import yaml

from repro_matrix.config import project
from repro_matrix.launch.attempt import Attempt, private_environment


def torchrun_line(attempt: Attempt) -> str:
    """Return the exact command, to be run from the root of the checkout or of the user's own repository."""
    if attempt.by_hand is not None:
        return attempt.by_hand
    settings, script = attempt.settings, attempt.script
    env = dict(attempt.env)
    if attempt.kit is not None:
        env["PYTHONPATH"] = private_environment(attempt)["PYTHONPATH"]
    prefix = ["env", *(_assignment(name, value) for name, value in sorted(env.items()))] if env else []
    same = os.path.abspath(attempt.python) == os.path.abspath(sys.executable)
    words = ["torchrun"] if same else [attempt.python, "-m", "torch.distributed.run"]
    words += ["--standalone", "--nproc-per-node", str(attempt.world_size), _from_root(script)]
    names = {
        "case": settings["case"], "model": settings["model"]["slug"], "strategy": settings["strategy"]["slug"],
        **{group: _from_root(file) for group, file in attempt.files.items()},
    }  # fmt: skip
    if "case" in attempt.files or script.stem != settings["case"].replace("-", "_"):  # several cases share the script
        words += ["--case", names["case"]]
    words += ["--variant", settings["variant"], "--model", names["model"], "--strategy", names["strategy"]]
    for name, default in (("scale", "tiny"), ("weights", "random")):
        value = settings["model"].get(name, default)
        words += [f"--{name}", value] if value != default else []
    default_tp = attempt.world_size if settings["strategy"]["slug"] == "tp" else 1
    words += ["--tp-size", str(settings["tp_size"])] if settings["tp_size"] != default_tp else []
    words += ["--device", attempt.device, "--steps", str(settings["steps"]), "--seed", str(settings["seed"])]
    for name, value in settings["flags"].items():
        # The script reads the value as YAML: write a plain string as it is, anything else as JSON.
        plain = isinstance(value, str) and yaml.safe_load(value) == value
        words += ["--flag", f"{name}={value if plain else json.dumps(value)}"]
    return " ".join([*prefix, shlex.join(words)])


def _assignment(name: str, value: str) -> str:
    """Return a variable for the shell. Of PATH only the stack's own folder is written out: the reader's own follow."""
    first, _, rest = value.partition(os.pathsep)
    if name == "PATH" and rest and rest == os.environ.get("PATH"):
        return f'PATH={shlex.quote(first)}{os.pathsep}"$PATH"'
    return f"{name}={shlex.quote(value)}"


def _from_root(file: Path) -> str:
    root = project.current().folder
    return str(file.relative_to(root) if file.is_relative_to(root) else file)
