"""Probes of a script whose ranks are forked from servers, as those of cases are (launch/forkserver.py).

A server imports what the script imports before its first other statement (prefix.py); servers of releases share a
trunk. A script for which that is not its own start (it sets something before it imports torch, it is a module, a
command line of another launcher, its failure is a line that may come from an import) starts from cold, as every ``repro
run`` does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from repro_matrix.external.scripts import prefix
from repro_matrix.external.scripts.command_line import LAUNCHERS, Command
from repro_matrix.external.scripts.failure import Failure
from repro_matrix.external.scripts.launch import HOOKS, completed, environment
from repro_matrix.launch.attempt import Attempt, Json, clean
from repro_matrix.launch.forkserver import Refused, WarmLauncher
from repro_matrix.paths import cache_dir

AGAIN = ("lost", "port")  # problems of a server that say nothing of the script
OURS = ("REPRO_", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")  # of the attempt, not of the server


def lines(command: Command, failure: Failure, device: str) -> tuple[tuple[str, ...], str]:
    """(what a server imports for it, why none may: one of them is empty)."""
    if device != "cpu":
        return (), "ranks of a script take the cards that the shell shows"
    standalone = ("-m", LAUNCHERS["torchrun"], "--standalone", "--nproc-per-node")
    if command.script is None or command.argv[:4] != standalone or command.argv[5] != str(command.script):
        return (), "not a script that torchrun launches"
    if failure.kind == "log":
        return (), "the line that is looked for may come at an import"
    try:
        source = command.script.read_text(encoding="utf-8")
        beside = {path.name.partition(".")[0] for path in command.script.parent.iterdir()}
    except (OSError, UnicodeDecodeError) as error:
        return (), f"{command.script.name} cannot be read: {error}"
    found = prefix.imports(source, beside - {command.script.stem})
    return found, "" if found else "torch is not among the imports that it begins with"


class Forked(WarmLauncher):
    """One for a search. ``folder`` is that of its servers, and of its attempts."""

    def __init__(self, share: bool = True, begins: tuple[str, ...] = ()) -> None:
        """``begins``: what every server imports, whatever the script at hand begins with (it is made smaller)."""
        super().__init__()
        self.begins = begins
        state = cache_dir() / "state" / "scripts"
        state.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=state))
        self._command: Command | None = None
        self._begins: dict[tuple[str, ...], tuple[str, ...]] = {}  # of what a script begins with, what a server can do

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def attempt(self, attempt: Attempt, command: Command, failure: Failure, stop: threading.Event) -> Json:
        """The observation; raises Refused where it has to start from cold. One at a time. ``attempt.imports``: what
        ``lines`` gave. From a line on that a server cannot import (it fails, it starts a thread) ranks do it."""
        self._command = command
        asked = attempt.imports
        try:
            while True:
                begins = self._begins.get(asked, asked)
                try:
                    found = self._once(replace(attempt, imports=begins), stop)
                    break
                except Refused as refused:
                    if refused.module not in begins[1:]:
                        raise
                    self._begins[asked] = begins[: begins.index(refused.module)]
            problem = found["infra"]
            if problem and problem["kind"] in AGAIN and not stop.is_set():
                found = self._once(replace(attempt, imports=self._begins.get(asked, asked)), stop)
                found["attempt"]["retried"] = f"{problem['kind']}: {problem['message']}"
            codes = [rank["exit_code"] for rank in found["ranks"]]
            return {**completed(found, attempt, failure), "command_exit": int(any(code != 0 for code in codes))}
        finally:
            clean(attempt)

    def _environment(self, attempt: Attempt) -> tuple[dict[str, str], tuple[str, ...]]:
        """The user's own, and what torchrun adds for several ranks (one alone has one thread of OpenMP, too: with more
        it could not be forked); the overlay first on PYTHONPATH, without the hooks."""
        assert self._command is not None
        whole = environment(attempt, self._command, os.pathsep.join(attempt.overlay))
        env = {name: value for name, value in whole.items() if not name.startswith(OURS)}
        paths = [path for path in whole["PYTHONPATH"].split(os.pathsep) if path != str(HOOKS)]
        return with_path(env, paths) | {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}, ()

    def _spec(self, attempt: Attempt) -> Json:
        assert self._command is not None
        whole = environment(attempt, self._command, os.pathsep.join(attempt.overlay))
        env: dict[str, str] = {name: value for name, value in whole.items() if name.startswith(OURS)}
        env.pop("REPRO_PARENT", None)
        env["PYTHONPATH"] = whole["PYTHONPATH"]
        own = {"arguments": list(self._command.argv[6:]), "hooks": str(HOOKS)}
        return {**attempt.spec(), "env": env, "cwd": os.getcwd(), "own": own}


def with_path(env: Mapping[str, str], paths: list[str]) -> dict[str, str]:
    out = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return {**out, "PYTHONPATH": os.pathsep.join(paths)} if paths else out
