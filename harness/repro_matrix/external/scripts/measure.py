"""Attempts of somebody's own script on one stack, judged and stored: results/…/scripts/<script>/<stack>/<key>.json."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from repro_matrix.environment import machine as machine_module
from repro_matrix.environment.stacks import Stack, integrity
from repro_matrix.environment.stacks.spec import short_hash
from repro_matrix.errors import ResultsError
from repro_matrix.external.scripts import forked as forking
from repro_matrix.external.scripts import launch as launching
from repro_matrix.external.scripts.command_line import Command
from repro_matrix.external.scripts.document import Document, read
from repro_matrix.external.scripts.failure import Failure, judge
from repro_matrix.external.scripts.forked import Forked
from repro_matrix.launch.attempt import Attempt
from repro_matrix.launch.forkserver import Refused
from repro_matrix.paths import cache_dir
from repro_matrix.records.document import Made
from repro_matrix.records.observation import Observation
from repro_matrix.records.outcome import Outcome as Judged
from repro_matrix.results import provenance
from repro_matrix.results.store import SCRIPTS, stack_label, write_json

START_S = 180.0  # for a launcher to begin its ranks: it imports torch first
MOST_BESIDE = 1000  # files that lie beside a script


DEADLINE_S = 300.0


@dataclass(frozen=True)
class Script:
    """What is measured: the command, what counts as its failure, and how it is launched."""

    command: Command
    failure: Failure
    results: Path
    deadline_s: float = DEADLINE_S
    env: dict[str, str] = field(default_factory=dict, hash=False)
    patience_s: float = math.inf  # less than the deadline where what takes longer cannot be what is looked for
    keep_text: bool = False  # the script's text goes into the document: its file will not stay

    @property
    def limit_s(self) -> float:
        return self.failure.seconds if self.failure.kind == "hang" else self.deadline_s

    def key(self, stack: Stack) -> str:
        """Of all that the answer depends on; another text of the script is another measurement."""
        text = self.command.script.read_bytes().decode("utf-8", "replace") if self.command.script else ""
        # Of the definition only what is read off an attempt while its logs are there; the rest is judged again.
        read = f"{self.failure.kind}: {self.failure.pattern}" if self.failure.kind in ("log", "metric") else ""
        what = [*self.command.argv, text, *beside(self.command.script), read, json.dumps(self.env), str(self.limit_s)]
        over = integrity.shadow_hash(integrity.shadowed(stack, os.environ.get("PYTHONPATH", "")))
        return short_hash(stack.key, os.getcwd(), *what, *([over] if over else []))

    def path(self, stack: Stack) -> Path:
        label = stack_label(stack.versions, stack.label_key)
        return self.results / SCRIPTS / self.command.name / label / f"{self.key(stack)}.json"


def beside(script: Path | None) -> list[str]:
    """The names and contents of what a script can import from its own folder: modules, and packages with all of theirs.

    Its data and the shell's environment are not looked at: what they decide is asked anew with another ``results=``.
    """
    if script is None:
        return []
    folder = script.resolve().parent
    found = [path for path in folder.glob("*.py") if path.name != script.name]
    for package in folder.glob("*/__init__.py"):
        found += package.parent.rglob("*.py")
    told = []
    for path in sorted(found)[:MOST_BESIDE]:
        with contextlib.suppress(OSError):
            told.append(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return told


def stored(script: Script, stack: Stack) -> Document | None:
    """The document of an earlier measurement; its attempts are judged again, by today's judge. None where there is
    none, or what is there is not one."""
    try:
        document = read(json.loads(script.path(stack).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    for attempt in document["attempts"]:
        attempt["outcome"] = _judged(script, attempt["observation"])
    return document


def _judged(script: Script, observation: Observation) -> Judged:
    return judge(script.failure, observation, script.command.name).to_json()


def measure(
    script: Script,
    stack: Stack,
    repeat: int,
    stop: threading.Event,
    fresh: bool = False,
    forked: Forked | None = None,
) -> tuple[Document, int]:
    """(the document, attempts launched now). What is stored is not launched again, but for infra, or when ``fresh``.
    ``forked``: ranks are forked from its servers, where the script allows that."""
    document = None if fresh else stored(script, stack)
    known: list[Made] = document["attempts"] if document else []
    kept = [each for each in known if each["outcome"]["outcome"] != "infra"]
    if forked is None:  # a start from cold is asked for: what was forked does not count
        kept = [each for each in kept if each["observation"]["attempt"]["launcher"] != Forked.name]
    launched = 0
    machine = machine_module.detect()
    while len(kept) < repeat and not stop.is_set():
        observation = once(script, stack, "cuda" if machine.gpus else "cpu", stop, forked)
        launched += 1
        outcome = _judged(script, observation)
        kept.append({"observation": observation, "outcome": outcome})
        if outcome["outcome"] == "infra":
            break  # the machine's, or nothing to be judged by: more of the same says no more
    commit, dirty = provenance.git_state()
    document = {
        "schema": 1, "kind": "script", "script": script.command.name, "command": script.command.shown,
        "failure": script.failure.to_json(), "env": script.env, "nproc": script.command.nproc,
        "stack": {"name": stack.name, "key": stack.key, "versions": dict(stack.versions)},
        "hardware": {"cpu": machine.cpu, "gpus": [gpu.name for gpu in machine.gpus]},
        "provenance": {"started": time.time(), "git_commit": commit, "git_dirty": dirty},
        "attempts": kept,
    }  # fmt: skip
    changed = [*stack.changed, *integrity.shadow_notes(integrity.shadowed(stack, os.environ.get("PYTHONPATH", "")))]
    if changed:
        document["stack"]["changed"] = changed
    if script.keep_text and script.command.script:
        document["text"] = script.command.script.read_text(encoding="utf-8")
    path = script.path(stack)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror}); another folder: results=DIR") from None
    return document, launched


def once(script: Script, stack: Stack, device: str, stop: threading.Event, forked: Forked | None = None) -> Observation:
    command = script.command
    state = cache_dir() / "state" / "scripts"
    state.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=forked.folder if forked else state))
    try:
        attempt = Attempt(
            id=folder.name,
            run_id=forked.folder.name if forked else folder.name,
            directory=folder if forked else folder / "attempt",
            script=command.script or Path(command.name),
            settings={"device": device, "script": command.shown, "failure": asdict(script.failure), "seed": 0},
            python=stack.python,
            world_size=command.nproc,
            deadline_s=min(script.limit_s, script.patience_s),
            env={**{k: v for k, v in stack.environment({}).items() if k != "PYTHONPATH"}, **script.env},
            overlay=tuple(stack.path),
            start_limit_s=START_S,
            by_hand=command.shown,
        )
        why = None
        if forked is not None:
            begins, why = (forked.begins, "") if forked.begins else forking.lines(command, script.failure, device)
            if begins:
                try:
                    return cast(
                        Observation, forked.attempt(replace(attempt, imports=begins), command, script.failure, stop)
                    )
                except Refused as refused:
                    why = f"no warm server ({refused.kind}): {refused}"
        found = launching.launch(attempt, command, script.failure, os.pathsep.join(stack.path), stop)
        return cast(Observation, {**found, "attempt": {**found["attempt"], "cold": why}} if why else found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
