"""Running uv, and saying in plain words why it could not do what was asked. Mirrors, proxies and caches are uv's own
settings; where the user has given the index to pip alone, uv is told the same."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import uv

from repro_matrix.environment.stacks.errors import Kind, StackError

# What uv says -> what it was. The first that is found decides.
_REASONS: list[tuple[str, Kind]] = [
    (r"No space left on device|os error 28\b|Disk quota exceeded", "disk"),
    (r"Hash mismatch|hashes? (?:do|does) not match|--require-hashes", "hash"),
    (
        r"No interpreter found|No Python .*found|no Python installation|Failed to inspect Python",
        "python",
    ),
    (r"Failed to fetch|error sending request|dns error|tcp connect|Connection refused|operation timed out", "index"),
    (r"network was disabled|Network connectivity is disabled|\(offline\)", "index"),
    (r"was not found in the package registry|was not found in the provided package locations", "version"),
    (r"there is no version of|there are no versions of|no versions? of .* (?:is|are) available", "version"),
    (
        r"has no wheels with a matching|no matching (?:Python|platform)|doesn't have a (?:source distribution|wheel)",
        "wheel",
    ),
    (r"Requires-Python|does not satisfy Python|requires Python|depends on Python", "wheel"),
    (r"requirements are unsatisfiable|conflict", "conflict"),
]
_MEANING: dict[Kind, str] = {
    "disk": "the disk is full",
    "hash": "what the index gives differs from what was locked",
    "python": "the Python it asks for is not here",
    "index": "the package index is out of reach (uv's own settings apply: UV_DEFAULT_INDEX, UV_OFFLINE, proxies)",
    "version": "no such package or version",
    "wheel": "nothing to install for this Python and machine",
    "conflict": "the requirements contradict each other",
    "build": "the installer failed",
}


def index_settings(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What uv has to be told of the user's index settings beyond what it reads by itself: pip's, where uv has none."""
    given = os.environ if env is None else env
    out = {}
    if given.get("PIP_INDEX_URL") and not (given.get("UV_DEFAULT_INDEX") or given.get("UV_INDEX_URL")):
        out["UV_DEFAULT_INDEX"] = given["PIP_INDEX_URL"]
    if given.get("PIP_EXTRA_INDEX_URL") and not (given.get("UV_INDEX") or given.get("UV_EXTRA_INDEX_URL")):
        out["UV_INDEX"] = given["PIP_EXTRA_INDEX_URL"]
    return out


def installer_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    # The controller's own virtual environment and Python settings must not decide where things are installed.
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV" and not name.startswith("PYTHON")}
    return {**env, **index_settings(), "UV_NO_PROGRESS": "1", "NO_COLOR": "1", **(extra or {})}


def run_uv(
    what: str, args: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, stdin: str = ""
) -> str:
    """Run ``uv``; its messages (stderr, then stdout). ``what`` begins the error: "stack x"."""
    command = [uv.find_uv_bin(), *args]
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        env=installer_env(env),
        cwd=None if cwd is None else str(cwd),
    )
    if done.returncode:
        raise explain(what, done.stderr or done.stdout)
    return done.stderr + done.stdout


def explain(what: str, output: str) -> StackError:
    """uv's own words, shortened, behind what they mean."""
    kind: Kind = next((kind for pattern, kind in _REASONS if re.search(pattern, output, re.IGNORECASE)), "build")
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("warning:")]
    start = next((i for i, line in enumerate(lines) if line.startswith(("error", "×", "Caused"))), 0)
    said = "\n  ".join(lines[start:][-12:])
    return StackError(kind, f"{what}: {_MEANING.get(kind, 'the installer failed')}\n  {said}")


@functools.lru_cache(maxsize=1)
def uv_cache() -> Path:
    return Path(run_uv("uv cache", ["cache", "dir"]).strip().splitlines()[-1])
