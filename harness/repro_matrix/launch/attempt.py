"""One attempt: what is launched, where its files are, in which environment. What every launcher shares.

The files of an attempt (all under ``Attempt.directory``):

    settings.json        what the script runs with (``--settings``)
    spec.json            what a worker inside the stack is told (``Attempt.spec``)
    launch.json          what that worker answers: {"ranks": [{"rank", "pid", "exit_code", "signal", "ended_by"}],
                         "error": null | {"kind", "message"}}; written when the ranks are up, and again at the end
    records/rank-N.json  repro_kit/record.py         records/stacks-N.txt  kit's faulthandler
    records/phases-N.txt, ask-N, collectives-N.json  repro_kit/rank_monitor.py: what a rank shows while it runs
    logs/rank-N.log      all output of a rank  logs/launcher.log     all output of the worker
    work/ tmp/ cache/    private to the attempt, always removed with it
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from repro_matrix.config import project
from repro_matrix.config.env_allowlist import inherited
from repro_matrix.launch.timeouts import costs

Json = dict[str, Any]

ATTEMPT_TOKEN = "REPRO_ATTEMPT"  # in the environment of every process of an attempt: how its descendants are found
PARENT_TOKEN = "REPRO_PARENT"  # pid that a worker must have as its parent: it ends if that one died meanwhile
RUN_TOKEN = "REPRO_RUN"  # likewise for everything that one run of the harness started (servers too)

_MAX_TMP = 60  # a socket's path may have 107 characters, and multiprocessing puts some 35 behind TMPDIR


@dataclass(frozen=True)
class Attempt:
    """One launch of one arm of one cell. ``settings`` come from repros/arm_settings.resolve."""

    id: str  # unique on the node; no characters that a file name cannot hold
    run_id: str  # the run of the harness it belongs to
    directory: Path
    script: Path
    settings: Json
    python: str  # interpreter of the stack
    world_size: int
    deadline_s: float  # for its work: from when every rank is past init_process_group
    env: dict[str, str] = field(default_factory=dict)  # of the stack, the case, the run's setting and the arm
    gpus: tuple[str, ...] = ()  # leased devices (UUIDs), all seen by every rank; empty: CPU
    imports: tuple[str, ...] = ()  # what a warm server imports ahead
    overlay: tuple[str, ...] = ()  # the stack's folders, which come first on PYTHONPATH
    cold: str | None = None  # why this attempt must start from a fresh interpreter
    stack_cache: Path | None = None  # caches that belong to the stack: compiled extensions, remote code
    start_limit_s: float | None = (
        None  # for starting; None: what the accelerator allows (harness/repro_matrix/launch/timeouts.py)
    )
    kit: Path | None = None  # where the kit lies, when that is not beside the script
    files: Mapping[str, Path] = field(default_factory=dict)  # of its case, model, strategy, where they are not shipped
    by_hand: str | None = None  # the command that does the same by hand, where the settings do not say it
    keep: bool = False  # keep records and logs in ``directory`` after the attempt
    references: Path | None = (
        None  # where attempts of this run leave each other their references (repro_kit/reference.py)
    )

    @property
    def records(self) -> Path:
        return self.directory / "records"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def work(self) -> Path:
        return self.directory / "work"

    @property
    def tmp(self) -> Path:
        return tmp_of(self.directory)

    @property
    def cache(self) -> Path:
        return self.directory / "cache"

    @property
    def settings_file(self) -> Path:
        return self.directory / "settings.json"

    @property
    def spec_file(self) -> Path:
        return self.directory / "spec.json"

    @property
    def launch_file(self) -> Path:
        return self.directory / "launch.json"

    @property
    def backend(self) -> str:
        wanted = str(self.settings.get("backend", "auto"))
        return wanted if wanted != "auto" else ("nccl" if self.device == "cuda" else "gloo")

    @property
    def device(self) -> str:
        wanted = str(self.settings.get("device", "auto"))
        return wanted if wanted != "auto" else ("cuda" if self.gpus else "cpu")

    def full_settings(self) -> Json:
        """The settings that the ranks read: the case's, and what the launch adds."""
        shared = {"references": {"folder": str(self.references), "attempt": self.id}} if self.references else {}
        return {
            **self.settings,
            **shared,
            "record_dir": str(self.records),
            "work_dir": str(self.work),
            "world_size": self.world_size,
            "device": self.device,
            "backend": self.backend,
            "limit_s": self.limit_s,
        }

    @property
    def limit_s(self) -> float:
        """Seconds after which the launcher has ended it whatever happens: what NCCL's own limits must not undercut."""
        cost = costs(self.device)
        return cost.start_limit(self.world_size) + cost.work_limit(self.deadline_s, self.world_size)

    def spec(self, port: int = 0) -> Json:
        """What a worker inside the stack is told. ``env`` is only what is private to the attempt (see environment)."""
        return {
            "script": str(self.script),
            "settings": str(self.settings_file),
            "world_size": self.world_size,
            "log_dir": str(self.logs),
            "record_dir": str(self.records),
            "env": private_environment(self),
            "port": port,
        }


class Launcher(Protocol):
    """Starts attempts and returns what came out of them, as docs/observation.md says. Thread-safe."""

    name: str

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt to its end. ``stop`` set (Ctrl-C) ends it at once. Nothing of it survives the return."""

    def close(self) -> None: ...


def tmp_of(directory: Path) -> Path:
    """TMPDIR of the attempt in ``directory``: inside it, or elsewhere where its path is too long for a socket."""
    inside = directory / "tmp"
    if len(str(inside)) <= _MAX_TMP:
        return inside
    return Path("/tmp") / f"repro-{os.getuid()}-{hashlib.sha1(str(directory).encode()).hexdigest()[:10]}"


def remove(directory: Path) -> None:
    """Remove all files of the attempt in ``directory``."""
    shutil.rmtree(tmp_of(directory), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def stack_environment(attempt: Attempt) -> dict[str, str]:
    """What is the same for all attempts of a stack and is read when packages are imported: a server's environment."""
    hub = attempt.settings.get("model", {}).get("weights") == "hub"
    env = inherited(hub) | {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        RUN_TOKEN: attempt.run_id,
    }
    if attempt.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
        # glibc gives the memory of every large tensor back to the system at once otherwise, and the kernel clears it
        # anew for the next one.
        env |= {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(attempt.gpus)
    # gloo and NCCL look up the host's own name otherwise, which stalls for seconds where DNS does not know it.
    env["GLOO_SOCKET_IFNAME"] = "lo"
    if not hub:
        env["HF_HUB_OFFLINE"] = "1"
    if attempt.stack_cache is not None:
        # The defaults are keyed by Python and CUDA alone, so that two stacks would share what they compiled.
        env["TORCH_EXTENSIONS_DIR"] = str(attempt.stack_cache / "torch_extensions")
        env["HF_MODULES_CACHE"] = str(attempt.stack_cache / "hf_modules")
    return env | attempt.env


def private_environment(attempt: Attempt) -> dict[str, str]:
    """What differs from attempt to attempt: temporary files, caches, and the token that marks its processes."""
    env = {
        ATTEMPT_TOKEN: attempt.id,
        RUN_TOKEN: attempt.run_id,
        "TMPDIR": str(attempt.tmp),
        "TORCHINDUCTOR_CACHE_DIR": str(attempt.cache / "inductor"),
        "TRITON_CACHE_DIR": str(attempt.cache / "triton"),
    }
    if attempt.settings.get("model", {}).get("weights") != "hub":
        env["HF_HOME"] = str(attempt.cache / "hf")  # real weights come from the user's own cache
    if attempt.stack_cache is None:
        env["TORCH_EXTENSIONS_DIR"] = str(attempt.cache / "torch_extensions")
        env["HF_MODULES_CACHE"] = str(attempt.cache / "hf_modules")
    env |= attempt.env
    if attempt.kit is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (attempt.env.get("PYTHONPATH"), str(attempt.kit))))
    return env


def environment(attempt: Attempt) -> dict[str, str]:
    """The whole environment of a process that starts from cold for this attempt."""
    return {**stack_environment(attempt), **private_environment(attempt)}


def prepare(attempt: Attempt) -> None:
    """Make the attempt's files. An older folder of the same id is removed first: no stale record may be read."""
    remove(attempt.directory)
    for folder in (attempt.records, attempt.logs, attempt.work, attempt.tmp, attempt.cache):
        folder.mkdir(parents=True, mode=0o700)
    if attempt.stack_cache is not None:
        attempt.stack_cache.mkdir(parents=True, exist_ok=True)
    if attempt.keep:
        (attempt.directory / "keep").touch()
    attempt.settings_file.write_text(json.dumps(attempt.full_settings(), indent=1), encoding="utf-8")
    attempt.spec_file.write_text(json.dumps(attempt.spec(), indent=1), encoding="utf-8")


def clean(attempt: Attempt) -> None:
    """Remove the attempt's files; with ``keep`` its settings, records and logs stay."""
    clear_directory(attempt.directory)


def clear_directory(directory: Path) -> None:
    """The same for an attempt of which only the folder is known (its controller died)."""
    if not (directory / "keep").exists():
        remove(directory)
        return
    for folder in (directory / "work", tmp_of(directory), directory / "cache"):
        shutil.rmtree(folder, ignore_errors=True)


def torchrun_line(attempt: Attempt) -> str:
    """The command that does the same by hand, from the root of the checkout, or of the user's own repository."""
    if attempt.by_hand is not None:
        return attempt.by_hand
    settings = attempt.settings
    script = attempt.script
    env = dict(attempt.env)
    if attempt.kit is not None:
        env["PYTHONPATH"] = private_environment(attempt)["PYTHONPATH"]
    said = ["env", *(_given(name, value) for name, value in sorted(env.items()))] if env else []
    words = ["torchrun"] if _same_interpreter(attempt.python) else [attempt.python, "-m", "torch.distributed.run"]
    words += ["--standalone", "--nproc-per-node", str(attempt.world_size), _from_root(script)]
    named = {
        "case": settings["case"], "model": settings["model"]["slug"], "strategy": settings["strategy"]["slug"],
        **{group: _from_root(file) for group, file in attempt.files.items()},
    }  # fmt: skip
    if "case" in attempt.files or script.stem != settings["case"].replace("-", "_"):  # several cases share the script
        words += ["--case", named["case"]]
    words += ["--arm", settings["arm"], "--model", named["model"], "--strategy", named["strategy"]]
    for name, default in (("scale", "tiny"), ("weights", "random")):
        value = settings["model"].get(name, default)
        words += [f"--{name}", value] if value != default else []
    follows = attempt.world_size if settings["strategy"]["slug"] == "tp" else 1
    words += ["--tp-size", str(settings["tp_size"])] if settings["tp_size"] != follows else []
    words += ["--device", attempt.device, "--steps", str(settings["steps"]), "--seed", str(settings["seed"])]
    for name, value in settings["flags"].items():
        # The script reads the value as YAML: a plain word stays one, anything else is written as JSON.
        plain = isinstance(value, str) and yaml.safe_load(value) == value
        words += ["--flag", f"{name}={value if plain else json.dumps(value)}"]
    return " ".join([*said, shlex.join(words)])


def _given(name: str, value: str) -> str:
    """A variable as a shell is given it: the stack's own programs stand before the reader's, not before this user's."""
    first, _, rest = value.partition(os.pathsep)
    if name == "PATH" and rest and rest == os.environ.get("PATH"):
        return f'PATH={shlex.quote(first)}{os.pathsep}"$PATH"'
    return f"{name}={shlex.quote(value)}"


def _from_root(file: Path) -> str:
    root = project.current().folder
    return str(file.relative_to(root) if file.is_relative_to(root) else file)


def _same_interpreter(python: str) -> bool:
    return os.path.abspath(python) == os.path.abspath(sys.executable)
