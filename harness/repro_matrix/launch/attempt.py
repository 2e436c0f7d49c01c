"""Describe one attempt: its files, environment, time limits and command.

Every launcher uses it.

The files of an attempt (all under ``Attempt.directory``):

    settings.json        the settings of the script (``--settings``)
    spec.json            the input of a worker inside the stack (``Attempt.spec``)
    launch.json          that worker's answer, written when all ranks run, and again at the end:
    worker/elastic.py; with several nodes also launch-N.json of each, and lease: worker/nodes.py
    records/rank-N.json  repro_kit/record.py         records/stacks-N.txt  kit's faulthandler
    records/phases-N.txt, ask-N, collectives-N.json  repro_kit/rank_monitor.py: the state of a
    running rank
    logs/rank-N.log      all output of a rank  logs/launcher.log     all output of the worker
    work/ tmp/ cache/    private to the attempt
"""

from __future__ import annotations

import hashlib
import itertools
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
from repro_matrix.config.schema import AdhocCase
from repro_matrix.config.settings import inherited
from repro_matrix.environment.gpus import RUN_TOKEN
from repro_matrix.environment.nodes import Nodes
from repro_matrix.paths import read_json

Json = dict[str, Any]

# in the environment of every process of an attempt: how its descendants are found
ATTEMPT_TOKEN = "REPRO_ATTEMPT"
TRACE = "REPRO_TRACE"  # the folder of its trace, which outlives the attempt
PARENT_TOKEN = (  # pid that a worker must have as its parent: it ends if that one died meanwhile
    "REPRO_PARENT"
)

# else importing pyarrow starts a thread
QUIET_IMPORTS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}

# a socket's path may have 107 characters, and multiprocessing puts some 35 behind TMPDIR
_MAX_TMP = 60
MAX_LOG = 64 << 20  # bytes; a rank that prints without limit must not fill the disk
KEPT_TAIL = 64 << 10
CUT = b"\n[log cut here: the rank printed more than 64 MiB]\n"


# Seconds: to start, more for each rank; beside a case's deadline (NCCL connects in the first
# collective), more for each rank. CPU: a new interpreter takes up to 10 CPU s to import a stack,
# and other attempts run at the same time. CUDA: also cuInit and the contexts of 8 GPUs on a node
# without persistence mode, and NCCL's first connection, take 20 to 60 s the first time (figures of
# public reports; none was measured by this project).
LIMITS = {"cpu": (60, 20, 0, 0), "cuda": (120, 20, 20, 5)}


@dataclass(frozen=True)
class Attempt:
    """One launch of one variant of one cell. ``settings`` come from repro_kit.settings.resolve."""

    id: str  # unique on the node; every character is valid in a file name
    run_id: str  # the run of the harness it belongs to
    directory: Path
    script: Path
    settings: Json
    python: str  # interpreter of the stack
    world_size: int
    deadline_s: float  # for its work: from when every rank is past init_process_group
    # of the stack, the case, the run's setting and the variant
    env: dict[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()  # leased devices (UUIDs), visible to every rank; empty: CPU
    visible: tuple[str, ...] = ()  # how CUDA_VISIBLE_DEVICES names them (Gpu.visible)
    imports: tuple[str, ...] = ()  # packages that a fork server imports in advance
    overlay: tuple[str, ...] = ()  # the stack's folders, which come first on PYTHONPATH
    cold_start_reason: str | None = None  # why this attempt must start with torchrun
    # caches that belong to the stack: compiled extensions, HF_HOME, remote code
    stack_cache: Path | None = None
    kit: Path | None = None  # the kit's folder, when that is not beside the script
    # of its case, model, strategy, where they are not shipped
    files: Mapping[str, Path] = field(default_factory=dict)
    # a user's own command line (launch/torchrun.py), instead of the script
    command: AdhocCase | None = None
    # variables of its trace (worker/tracer); empty: none
    trace: Mapping[str, str] = field(default_factory=dict)
    nodes: Nodes | None = None  # over which its ranks are spread; None: this machine
    # where attempts of this run share their references (repro_kit/reference.py)
    references: Path | None = None

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
    def spec_file(self) -> Path:
        return self.directory / "spec.json"

    @property
    def launch_file(self) -> Path:
        return self.directory / "launch.json"

    @property
    def backend(self) -> str:
        return str(self.settings["backend"])

    @property
    def device(self) -> str:
        return str(self.settings["device"])

    def full_settings(self) -> Json:
        """Return the settings that the ranks read: the case's, and those that the launch adds."""
        shared: Json = {}
        if self.references:
            shared["references"] = {"folder": str(self.references), "attempt": self.id}
        return {
            **self.settings,
            **shared,
            "record_dir": str(self.records),
            "work_dir": str(self.work),
            "world_size": self.world_size,
            # when it ends, whatever happens; NCCL's own limits are longer
            "limit_s": self.start_limit + self.work_limit,
        }

    @property
    def start_limit(self) -> float:
        """Seconds until every rank must be past ``init_process_group``, or have ended.

        Beyond it the machine was too slow to show anything about the case.
        """
        start, per_rank, _, _ = LIMITS[self.device]
        return start + per_rank * self.world_size

    @property
    def work_limit(self) -> float:
        """Seconds from then on: a case's deadline is for its work."""
        _, _, bring_up, per_rank = LIMITS[self.device]
        return self.deadline_s + bring_up + per_rank * self.world_size

    def spec(self) -> Json:
        """Return the input of a worker inside the stack.

        ``env`` has only the attempt's private variables.
        """
        spec: Json = {
            "script": str(self.script),
            "settings": str(self.directory / "settings.json"),
            "world_size": self.world_size,
            "log_dir": str(self.logs),
            "record_dir": str(self.records),
            "env": private_environment(self),
        }
        if self.nodes:
            spec["nodes"] = {
                "count": self.nodes.count,
                "host": self.nodes.host,
                "commands": self.nodes.commands,
                "id": self.id,
                "tmp": str(_short_tmp(self.directory)),
            }
        return spec


class Launcher(Protocol):
    """Run attempts and return their observations (docs/concepts/evidence.md). Thread-safe."""

    name: str

    def launch(self, attempt: Attempt, stop: threading.Event) -> Json:
        """Run one attempt to its end; a set ``stop`` (Ctrl-C) ends it at once.

        Nothing of it outlives this call.
        """

    def close(self) -> None: ...


def tmp_of(directory: Path) -> Path:
    """Return TMPDIR of the attempt in ``directory``.

    It is inside it, unless its path is too long for a socket.
    """
    inside = directory / "tmp"
    if len(str(inside)) <= _MAX_TMP:
        return inside
    return _short_tmp(directory)


def _short_tmp(directory: Path) -> Path:
    name = hashlib.sha1(str(directory).encode()).hexdigest()[:10]
    return Path("/tmp") / f"repro-{os.getuid()}-{name}"


def remove(directory: Path) -> None:
    """Remove all files of the attempt in ``directory``, and those of its nodes on this machine."""
    short = _short_tmp(directory)
    for folder in (tmp_of(directory), *short.parent.glob(f"{short.name}-*")):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def visible_devices(attempt: Attempt) -> dict[str, str]:
    """Return the variables that show the ranks their GPUs, and let CUDA count as NVML does."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(attempt.visible or attempt.gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def stack_environment(attempt: Attempt) -> dict[str, str]:
    """Return the variables that all attempts of a stack share: a fork server's environment."""
    hub = attempt.settings.get("model", {}).get("weights") == "hub"
    env = inherited(*(["hub"] if hub else [])) | {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **QUIET_IMPORTS,
        RUN_TOKEN: attempt.run_id,
    }
    if attempt.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
        # Otherwise glibc returns the memory of every large tensor to the system, and the kernel
        # clears it for the next.
        env |= {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}
    elif attempt.nodes is None:  # else SLURM sets it on each node
        env |= visible_devices(attempt)
    # Otherwise gloo and NCCL look up the host's own name, which stalls for seconds where DNS does
    # not know it.
    env["GLOO_SOCKET_IFNAME"] = "lo"
    cache = attempt.stack_cache or attempt.cache
    if not hub:  # real weights come from the user's own HF_HOME
        env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache / "hf")}
    # The defaults are keyed by Python and CUDA alone, so that two stacks would share compiled
    # extensions.
    env |= {
        "TORCH_EXTENSIONS_DIR": str(cache / "torch_extensions"),
        "HF_MODULES_CACHE": str(cache / "hf_modules"),
    }
    return env | attempt.env


def private_environment(attempt: Attempt) -> dict[str, str]:
    """Return the variables of this attempt alone.

    Temporary files, caches, and the token that marks its processes.

    None of them is read when a package is imported.
    """
    env = {
        ATTEMPT_TOKEN: attempt.id,
        RUN_TOKEN: attempt.run_id,
        "TMPDIR": str(attempt.tmp),
        "TORCHINDUCTOR_CACHE_DIR": str(attempt.cache / "inductor"),
        "TRITON_CACHE_DIR": str(attempt.cache / "triton"),
        **attempt.env,
        **attempt.trace,
    }
    if attempt.kit is not None:
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, (attempt.env.get("PYTHONPATH"), str(attempt.kit)))
        )
    return env


def environment(attempt: Attempt) -> dict[str, str]:
    """Return the whole environment of a process that torchrun starts for this attempt."""
    return {**stack_environment(attempt), **private_environment(attempt)}


def create_files(attempt: Attempt, spec: Json | None = None) -> None:
    """Create the attempt's files; ``spec``: the worker's input, where it is not the attempt's own.

    An older folder of the same id is removed first: no stale record may be read.
    """
    remove(attempt.directory)
    for folder in (attempt.records, attempt.logs, attempt.work, attempt.tmp, attempt.cache):
        folder.mkdir(parents=True, mode=0o700)
    if attempt.trace:
        shutil.rmtree(attempt.trace[TRACE], ignore_errors=True)
        Path(attempt.trace[TRACE]).mkdir(parents=True)
    settings = json.dumps(attempt.full_settings(), indent=1)
    (attempt.directory / "settings.json").write_text(settings, encoding="utf-8")
    attempt.spec_file.write_text(json.dumps(spec or attempt.spec(), indent=1), encoding="utf-8")


def cut(path: Path) -> None:
    """Cut a log that has grown too long down to its tail.

    The ranks append, so they continue at its new end.
    """
    try:
        if path.stat().st_size > MAX_LOG:
            with open(path, "rb") as log:
                log.seek(-KEPT_TAIL, os.SEEK_END)
                end = log.read()
            os.truncate(path, 0)
            with open(path, "ab") as log:
                log.write(CUT + end)
    except OSError:
        pass


def read_launch(path: Path) -> dict[str, Any]:
    """Return launch.json, or an empty answer where it is missing or damaged."""
    try:
        answer = read_json(path)
        answer["ranks"] = [entry for entry in answer["ranks"] if isinstance(entry["rank"], int)]
        return dict(answer)
    except (KeyError, TypeError):
        return {"ranks": []}


def torchrun_line(attempt: Attempt) -> str:
    """Return the exact command, for the root of the checkout or of the user's repository."""
    if attempt.command is not None:
        return attempt.command.title
    settings, model, script = attempt.settings, attempt.settings["model"], attempt.script
    env = dict(attempt.env)
    if attempt.kit is not None:
        env["PYTHONPATH"] = private_environment(attempt)["PYTHONPATH"]
    prefix = ["env", *itertools.starmap(_assignment, sorted(env.items()))] if env else []
    same = os.path.abspath(attempt.python) == os.path.abspath(sys.executable)
    words = ["torchrun"] if same else [attempt.python, "-m", "torch.distributed.run"]
    nodes = settings.get("nodes", 1)
    where = ["--standalone"]
    if nodes > 1:  # the line of each node
        host = attempt.nodes.host if attempt.nodes else "HOST"
        where = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:29500"]
    words += [*where, "--nproc-per-node", str(attempt.world_size // nodes), _from_root(script)]
    files = {group: _from_root(file) for group, file in attempt.files.items()}
    shared = script.stem != settings["case"].replace("-", "_")  # by several cases
    options = {
        "case": files.get("case", settings["case"] if shared else None),
        "variant": settings["variant"],
        "model": files.get("model", model["slug"]),
        "strategy": files.get("strategy", settings["strategy"]["slug"]),
        "scale": "full" if model.get("scale") == "full" else None,
        "weights": "hub" if model.get("weights") == "hub" else None,
        "device": attempt.device,
        "steps": settings["steps"],
        "seed": settings["seed"],
    }
    if attempt.device == "cuda" and settings["devices"] < attempt.world_size // nodes:
        options |= {"backend": attempt.backend, "devices": settings["devices"]}
    for name, value in options.items():
        words += [f"--{name}", str(value)] if value is not None else []
    for name, value in settings["flags"].items():
        # The script reads the value as YAML: write a plain string as it is, anything else as JSON.
        plain = isinstance(value, str) and yaml.safe_load(value) == value
        words += ["--flag", f"{name}={value if plain else json.dumps(value)}"]
    return " ".join([*prefix, shlex.join(words)])


def _assignment(name: str, value: str) -> str:
    """Return a variable for the shell.

    Of PATH only the stack's own folder is written; ``$PATH`` follows.
    """
    first, _, rest = value.partition(os.pathsep)
    if name == "PATH" and rest and rest == os.environ.get("PATH"):
        return f'PATH={shlex.quote(first)}{os.pathsep}"$PATH"'
    return f"{name}={shlex.quote(value)}"


def _from_root(file: Path) -> str:
    root = project.current().folder
    return str(file.relative_to(root) if file.is_relative_to(root) else file)
