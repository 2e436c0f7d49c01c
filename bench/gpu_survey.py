"""Record how one GPU behaves when things go wrong: ``make gpu-survey``, or ``python
bench/gpu_survey.py`` of any stack.

Each probe runs in processes of its own, with a time limit of its own; everything takes at most four
minutes on an H100. The result is one JSON file, written after every probe: name -> {status,
seconds, facts, ranks}. ``ranks`` have the form of the harness's observations
(harness/repro_matrix/records/attempt.py), so that a record of a real card can be put through the
grader. Without a GPU, probes that have a stand-in run on the CPU and the others are skipped.

Standard library and torch only. The probes' own code is project code to the grader, as a case's
script is.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import fnmatch
import importlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "repros"))
from repro_kit.rank_monitor import nccl_environment  # standard library only, as all of this file

Json = dict[str, Any]

LIMIT_S = 240.0  # of everything
PARALLEL = 6  # probes at a time; each process needs about 0.6 GiB of the card for its context
START_S = 60.0  # until a probe's ranks have begun; their own limit counts from there
# a failed rank waits so long before it ends, as in the harness: NCCL's watchdog may be faster
GRACE_S = 2.0
TAIL_LINES, TAIL_BYTES, MAX_TEXT = 60, 8192, 4000
INSTALLED = re.compile(r"""[^\s"'(]*/(?:site|dist)-packages/""")
LIBRARY = sysconfig.get_paths()["stdlib"] + "/"
NO_GPU = "no GPU"


# -- one rank: its record, in the form of repros/repro_kit/record.py


class Rank:
    """What a probe's process knows and leaves. The record is written at every phase: an abort
    leaves the last one."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.cuda = folder, device == "cuda"
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = "cuda:0" if self.cuda else "cpu"
        self.facts: Json = {}
        self.record: Json = {
            "schema": 2,
            "rank": self.rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "started": time.time(),
            "ended": None,
            "phase": "start",
            "done": False,
            "done_at": None,
            "exception": None,
            "checks": [],
            "metrics": {},
            "facts": self.facts,
            "warnings": [],
            "logs": [],
            "versions": {"python": platform.python_version()},
            "packages": {},
        }

    def phase(self, name: str) -> None:
        self.record["phase"] = name
        self.write()

    def write(self) -> None:
        if "torch" in sys.modules:
            self.record["versions"]["torch"] = sys.modules["torch"].__version__
        write_json(self.folder / f"rank-{self.rank}.json", self.record)

    def init_process_group(self, backend: str) -> None:
        import torch
        import torch.distributed as dist

        self.phase("init_process_group")
        if self.cuda:
            torch.cuda.set_device(0)
        started = time.monotonic()
        dist.init_process_group(
            backend,
            init_method=f"file://{self.folder}/store",
            rank=self.rank,
            world_size=self.world_size,
        )
        self.facts["init_s"] = round(time.monotonic() - started, 3)
        self.phase("body")


def portable(text: str) -> str:
    """Return a text without the paths of this machine."""
    text = INSTALLED.sub("/site-packages/", text).replace(
        __file__, f"/repros/{Path(__file__).name}"
    )
    return text.replace(LIBRARY, f"/lib/python{sys.version_info[0]}.{sys.version_info[1]}/")


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def describe_exception(error: BaseException, depth: int = 0) -> Json:
    """Return type, message, frames and causes as repro_kit.record does, without paths of this
    machine."""
    kind, code = type(error), getattr(error, "error_code", None)
    tb, frames = error.__traceback__, []
    lines = traceback.extract_tb(tb)
    for line in lines:
        assert tb is not None
        name = str(tb.tb_frame.f_globals.get("__name__", ""))
        frames.append(
            {
                "file": portable(line.filename),
                "line": line.lineno,
                "function": line.name,
                "module": name,
                "code_location": "repros.gpu_survey" if line.filename == __file__ else name,
                "code": line.line or "",
            }
        )
        tb = tb.tb_next
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "bases": [base.__qualname__ for base in kind.__mro__[1:-1]],
        "message": str(error)[:MAX_TEXT],
        **({"error_code": code} if isinstance(code, int) else {}),
        "frames": frames[-60:],
        "cause": describe_exception(cause, depth + 1) if cause is not None and depth < 5 else None,
    }


def run_rank(name: str, folder: Path, device: str) -> None:
    """Run one rank of a probe in this process. Never returns."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # end with the survey (Linux)
    stacks = open(folder / f"stacks-{os.environ['RANK']}.txt", "w")  # noqa: SIM115 - must stay open
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # answers without the GIL
    faulthandler.enable(file=stacks)
    probe = next(probe for probe in PROBES if probe.name == name)
    rank, code = Rank(folder, device), 1
    rank.phase("body")
    try:
        probe.body(rank, *probe.args)
        rank.record["done"], rank.record["done_at"], code = True, time.monotonic(), 0
    except BaseException as error:
        rank.record["exception"] = describe_exception(error)
        traceback.print_exc()
    rank.record["ended"] = time.time()
    rank.write()
    if code and rank.world_size > 1:
        time.sleep(GRACE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- the probes


def machine_facts(rank: Rank) -> None:
    """Record what the machine has and what torch was built for."""
    import torch

    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    memory = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[:3]
    rank.facts.update(
        gpus=torch.cuda.device_count(),
        cuda=torch.version.cuda,
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        shm_mb=shm and shm.f_frsize * shm.f_blocks >> 20,
        nccl_conf=Path("/etc/nccl.conf").exists(),
        environment={
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(("NCCL_", "CUDA_", "NVIDIA_"))
        },
    )
    try:
        answer = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=20)
        rank.facts["nvidia_smi"] = answer.stdout[:20000]
    except (OSError, subprocess.TimeoutExpired) as error:
        rank.facts["nvidia_smi"] = repr(error)
    if rank.cuda and rank.facts["gpus"]:
        names = [torch.cuda.get_device_name(index) for index in range(rank.facts["gpus"])]
        rank.facts.update(
            names=names, arch_list=torch.cuda.get_arch_list(), nccl=torch.cuda.nccl.version()
        )
        rank.facts.update(
            capability=torch.cuda.get_device_capability(), free_total=torch.cuda.mem_get_info()
        )


def read_back(value: Any, reader: str) -> None:
    {"item": lambda: value.sum().item(), "cpu": value.cpu, "tolist": value.tolist}[reader]()


def bad_index(rank: Rank, reader: str) -> None:
    """Look up a row that an embedding does not have (710 on a GPU, IndexError on the CPU)."""
    import torch

    table, rows = torch.ones(10, 4, device=rank.device), torch.tensor([99], device=rank.device)
    rank.phase("launch")
    found = torch.nn.functional.embedding(rows, table)
    rank.phase("read")
    read_back(found, reader)


def freed_view(rank: Rank, reader: str) -> None:
    """Read a view of memory that was freed (700 on a GPU, SIGSEGV on the CPU)."""
    import torch

    whole = torch.ones(1 << 20, device=rank.device)
    view = whole[10:]
    whole.untyped_storage().resize_(0)
    rank.phase("launch")
    found = view * 2
    rank.phase("read")
    read_back(found, reader)


def too_large(rank: Rank) -> None:
    import torch

    torch.empty(1 << 50 if not rank.cuda else 1 << 40, dtype=torch.uint8, device=rank.device)


def full_card(rank: Rank) -> None:
    """Fill the card, then need cuBLAS, which allocates outside torch's allocator."""
    import torch

    small, held = torch.ones(16, 16, device=rank.device), []
    for size in (1 << 30, 1 << 26, 1 << 21):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device=rank.device))
        except torch.cuda.OutOfMemoryError:
            continue
    rank.facts["free_total"] = torch.cuda.mem_get_info()
    rank.phase("cublas")
    (small @ small).sum().item()


def no_such_device(rank: Rank) -> None:
    import torch

    torch.ones(1, device="cuda:7")


def sticky(rank: Rank) -> None:
    """Compute after a device-side assert: which error does everything else report?"""
    import torch

    try:
        bad_index(rank, "item")
    except Exception as error:
        rank.facts["first"] = describe_exception(error)
    rank.phase("after the error")
    torch.ones(16, 16, device=rank.device).matmul(
        torch.ones(16, 16, device=rank.device)
    ).sum().item()


def fork(rank: Rank) -> None:
    """Import a stack's packages, fork, and compute in the child."""
    imported = {}
    for name in (
        ("torch", "transformers", "accelerate", "peft", "deepspeed") if rank.cuda else ("torch",)
    ):
        try:
            imported[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
        except Exception as error:
            imported[name] = f"{type(error).__name__}: {error}"[:400]
    import torch

    def state() -> Json:
        links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "initialized": torch.cuda.is_initialized(),
            "bad_fork": torch.cuda._is_in_bad_fork(),
            "devices": [link for link in links if "nvidia" in link],
        }

    for asked_first in (False, True):  # is_available() is the usual way to poison a fork
        available = torch.cuda.is_available() if asked_first else None
        before, (read, write) = state(), os.pipe()
        if os.fork() == 0:
            answer = state()
            try:
                answer["sum"] = torch.ones(1, device=rank.device).sum().item()
            except BaseException as error:
                answer["exception"] = describe_exception(error)
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        os.wait()
        with os.fdopen(read, "rb") as pipe:
            child = json.loads(pipe.read() or b"{}")
        rank.facts[f"is_available={available}"] = {"before": before, "child": child}
    rank.facts["imported"] = imported


def wait(rank: Rank, kind: str) -> None:
    """Wait in one way while a thread counts its turns: does the wait hold the GIL, and does it use
    the CPU?

    ``sleep`` and ``held`` are the controls: a wait that releases the GIL, and one that holds it.
    """
    import torch

    waits: dict[str, Callable[[], Any]] = {
        "sleep": lambda: time.sleep(1.0),
        "held": lambda: ctypes.PyDLL(None).usleep(900_000),
        "item": lambda: value.sum().item(),
        "cpu": lambda: value.cpu(),
        "tolist": lambda: value.tolist(),
        "save": lambda: torch.save(value, rank.folder / "saved.pt"),
        "synchronize": torch.cuda.synchronize,
        "event": lambda: event.synchronize(),
    }
    value = torch.ones(1000, device=rank.device)
    if rank.cuda:
        torch.save(value, rank.folder / "saved.pt")  # its imports
        event = torch.cuda.Event()
        torch.cuda.synchronize()
        torch.cuda._sleep(3_000_000_000)  # 1.5 s at 2 GHz
        event.record()
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0.001)

    rank.phase(f"wait {kind}")
    with open(rank.folder / "waiting.txt", "w+", encoding="utf-8") as stack:
        faulthandler.dump_traceback_later(0.5, file=stack)
        threading.Thread(target=count, daemon=True).start()
        before, cpu, started = turns[0], time.process_time(), time.monotonic()
        waits[kind]()
        seconds = time.monotonic() - started
        rank.facts.update(
            seconds=round(seconds, 3), turns_per_s=round((turns[0] - before) / seconds, 1)
        )
        rank.facts["cpu_share"] = round((time.process_time() - cpu) / seconds, 3)
        stop.set()
        faulthandler.cancel_dump_traceback_later()
        stack.seek(0)
        rank.facts["stack"] = portable(stack.read()).splitlines()[:12]


def collective(rank: Rank, backend: str, name: str) -> None:
    """Run one collective twice on tensors of the device; check its result."""
    import torch
    import torch.distributed as dist

    rank.init_process_group(backend)
    size, ones = rank.world_size, torch.full((4,), rank.rank + 1.0, device=rank.device)
    total = size * (size + 1) / 2
    for number in ("first", "second"):
        started, mine = time.monotonic(), ones.clone()
        if name == "broadcast":
            dist.broadcast(mine, 0)
            result, expected = mine, [1.0] * 4
        elif name == "all_reduce":
            dist.all_reduce(mine)
            result, expected = mine, [total] * 4
        elif name == "all_gather":
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine)
            result, expected = torch.stack(parts)[:, 0], [each + 1.0 for each in range(size)]
        elif name == "all_gather_into_tensor":
            result = torch.empty(4 * size, device=rank.device)
            dist.all_gather_into_tensor(result, mine)
            result, expected = result[::4], [each + 1.0 for each in range(size)]
        elif name == "reduce_scatter_tensor":
            result, expected = torch.empty(4 // size, device=rank.device), [total] * (4 // size)
            dist.reduce_scatter_tensor(result, mine)
        elif name == "all_to_all_single":
            result = torch.empty_like(mine)
            dist.all_to_all_single(result, mine)
            result, expected = result[:: 4 // size], [each + 1.0 for each in range(size)]
        else:
            dist.barrier()
            result, expected = mine, mine.tolist()
        if result.tolist() != expected:
            raise AssertionError(f"{name}: {result.tolist()} instead of {expected}")
        rank.facts[f"{number}_s"] = round(time.monotonic() - started, 4)


def training(rank: Rank, backend: str, name: str) -> None:
    """Train a small model for two steps under one strategy, and compare its loss with one
    process's."""
    import torch
    import torch.distributed as dist
    from torch import nn

    rank.init_process_group(backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(rank.device)
    batch = torch.arange(16.0, device=rank.device).reshape(2, 8) / 16
    wrapped: Any = model
    reference = [(model(batch) ** 2).mean().item()]
    if name == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif name == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device(rank.device), use_orig_params=True
        )
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh(
            rank.device[:4].rstrip(":"), (rank.world_size,)
        )
        if name == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=mesh)
        else:
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer, losses = torch.optim.SGD(wrapped.parameters(), 0.1), []
    for step in range(2):
        rank.phase(f"step {step}")
        loss = (wrapped(batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    rank.facts.update(losses=losses, reference=reference, backend=dist.get_backend())
    if abs(losses[0] - reference[0]) > 1e-4 or not losses[1] < losses[0]:
        raise AssertionError(f"{name}: losses {losses}, one process has {reference}")


def mismatched(rank: Rank, backend: str) -> None:
    """Rank 0 gathers while rank 1 is in a barrier of the same group."""
    import torch
    import torch.distributed as dist

    collective(rank, backend, "all_reduce")
    gathered, mine = (
        torch.zeros(2048, device=rank.device),
        torch.full((1024,), rank.rank + 1.0, device=rank.device),
    )
    for call in ("first", "second"):
        rank.phase(f"{call} mismatched call")
        if rank.rank == 0:
            dist.all_gather_into_tensor(gathered, mine)
            rank.facts[f"{call}_gather"] = gathered[::512].tolist()
        elif call == "first":
            dist.barrier()


def peer_exits(rank: Rank, backend: str, how: str) -> None:
    """Rank 0 ends (or raises) while rank 1 waits for it in an all-reduce."""
    import torch
    import torch.distributed as dist

    collective(rank, backend, "all_reduce")
    rank.phase("peer")
    if rank.rank == 1:
        dist.all_reduce(torch.ones(4, device=rank.device))
        rank.facts["synchronised"] = torch.cuda.synchronize() if rank.cuda else None
    else:
        time.sleep(1.0)
        if how == "raises":
            raise ValueError("rank 0 fails by itself")


def error_with_pending_work(rank: Rank, backend: str) -> None:
    """Rank 0 has a collective outstanding when its kernel fails: the exception or the watchdog's
    abort?."""
    import torch
    import torch.distributed as dist

    collective(rank, backend, "all_reduce")
    rank.phase("pending")
    if rank.rank == 0:
        work = dist.all_reduce(torch.ones(4, device=rank.device), async_op=True)
        bad_index(rank, "item")
        work.wait()
    else:
        time.sleep(3.0)
        dist.all_reduce(torch.ones(4, device=rank.device))
        rank.facts["synchronised"] = torch.cuda.synchronize() if rank.cuda else None


def recorder_pipe(rank: Rank, backend: str) -> None:
    """Rank 0 holds the GIL in torch.save behind a collective that never ends; rank 1 asks its pipe
    for a dump."""
    import torch
    import torch.distributed as dist

    collective(rank, backend, "all_reduce")
    rank.phase("pipe")
    if rank.rank == 0:
        value = torch.ones(4, device=rank.device)
        dist.all_reduce(value)
        torch.save(value, rank.folder / "saved.pt")
        return
    time.sleep(4.0)
    pipe = next((path for path in rank.folder.glob("pipe*") if "0" in path.name), None)
    rank.facts["pipe"] = pipe.name if pipe else None
    if pipe:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"1\n")
        started = time.monotonic()
        while time.monotonic() - started < 5 and not (rank.folder / "nccl-0").exists():
            time.sleep(0.1)
        rank.facts["answer_s"] = round(time.monotonic() - started, 1)
    rank.facts["dumps"] = sorted(path.name for path in rank.folder.glob("nccl-*"))


# -- what is probed


@dataclass(frozen=True)
class Probe:
    """``env``: "{rank}" and "{folder}" are filled in. ``cpu``: it has a stand-in without a GPU."""

    name: str
    body: Callable[..., None]
    args: tuple[Any, ...] = ()
    ranks: int = 1
    limit_s: float = 30.0
    env: Mapping[str, str] = field(default_factory=dict)
    cpu: bool = False
    alone: bool = False  # it measures times, or fills the card


BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
# Two ranks on one card: NCCL refuses peers with the same host and the same device.
TWO_HOSTS = {
    "NCCL_HOSTID": "survey-{rank}",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
# What ranks of the harness get, by the names that this torch knows.
RELEASE = tuple(int(part) for part in re.findall(r"\d+", version("torch"))[:2])
OURS = nccl_environment(RELEASE, LIMIT_S, Path("{folder}"))
PIPE = {
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "{folder}/pipe",
    "TORCH_FR_DUMP_PIPE_FILE": "{folder}/pipe",
}
NO_RETHROW = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
COLLECTIVES = (
    "broadcast",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)
STRATEGIES = ("ddp", "fsdp1", "fully_shard", "tp")


def _errors() -> list[Probe]:
    bodies: list[tuple[str, Callable[..., None], tuple[Any, ...], bool]] = [
        *(
            (f"bad_index.{how}", bad_index, (how,), how == "item")
            for how in ("item", "cpu", "tolist")
        ),
        *(
            (f"freed_view.{how}", freed_view, (how,), how == "item")
            for how in ("item", "cpu", "tolist")
        ),
        ("too_large", too_large, (), True),
        ("no_such_device", no_such_device, (), True),
        ("sticky", sticky, (), False),
        ("full_card", full_card, (), False),
    ]
    return [
        Probe(
            f"error.{name}{suffix}",
            body,
            args,
            env=env,
            cpu=cpu and not env,
            alone=name == "full_card",
        )
        for name, body, args, cpu in bodies
        for suffix, env in (("", {}), (".blocking", BLOCKING))
    ]


def _groups() -> list[Probe]:
    two, ours = {**OURS, **TWO_HOSTS}, OURS
    probes = [
        *(
            Probe(f"gloo.{each}", collective, ("gloo", each), 2, 40, cpu=True)
            for each in COLLECTIVES
        ),
        *(Probe(f"gloo.{each}", training, ("gloo", each), 2, 40, cpu=True) for each in STRATEGIES),
        Probe("nccl.one_rank", collective, ("nccl", "all_reduce"), 1, 40, ours),
        Probe("nccl.same_card", collective, ("nccl", "all_reduce"), 2, 30, ours),
        *(
            Probe(f"nccl.two_hosts.{each}", collective, ("nccl", each), 2, 40, two)
            for each in COLLECTIVES
        ),
        *(
            Probe(f"nccl.two_hosts.{each}", training, ("nccl", each), 2, 40, two)
            for each in STRATEGIES
        ),
        Probe("nccl.pending_error", error_with_pending_work, ("nccl",), 2, 30, two),
        Probe(
            "nccl.pending_error.no_rethrow",
            error_with_pending_work,
            ("nccl",),
            2,
            30,
            {**two, **NO_RETHROW},
        ),
        Probe("nccl.pipe", recorder_pipe, ("nccl",), 2, 25, {**two, **PIPE}),
    ]
    for backend, env in (("gloo", {}), ("nccl", two)):
        for how in ("exits", "raises"):
            cpu = backend == "gloo"
            probes.append(
                Probe(f"{backend}.peer_{how}", peer_exits, (backend, how), 2, 20, env, cpu)
            )
    return probes + [
        Probe(f"nccl.mismatched.{n}", mismatched, ("nccl",), 2, 20, two) for n in range(10)
    ]


PROBES: list[Probe] = [
    Probe("machine", machine_facts, limit_s=60, cpu=True, alone=True),
    *(
        Probe(f"wait.{kind}", wait, (kind,), cpu=kind in ("sleep", "held"), alone=True)
        for kind in ("sleep", "held", "item", "cpu", "tolist", "save", "synchronize", "event")
    ),
    Probe("fork", fork, limit_s=60, env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, cpu=True),
    *_errors(),
    *_groups(),
]


# -- running them


def run_probe(probe: Probe, device: str, limit_s: float) -> Json:
    """Run a probe's ranks to their end or to the limit; return its entry."""
    started, ranks = time.monotonic(), []
    # One card: on a node of eight, cuda:7 must not exist, and each rank of a pair must be on the
    # same card.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""
    with tempfile.TemporaryDirectory(prefix="gpu-survey-") as name:
        folder, processes = Path(name), []
        for rank in range(probe.ranks):
            given = {
                key: value.format(rank=rank, folder=folder) for key, value in probe.env.items()
            }
            given |= {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(probe.ranks),
                "OMP_NUM_THREADS": "1",
            }
            given |= {"GLOO_SOCKET_IFNAME": "lo"}
            given |= {} if probe.body is machine_facts else {"CUDA_VISIBLE_DEVICES": visible}
            command = [
                sys.executable,
                __file__,
                "--rank",
                probe.name,
                "--folder",
                name,
                "--device",
                device,
            ]
            with open(folder / f"rank-{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **given},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

        def wait_until(limit_s: float, done: Callable[[int], Any]) -> None:
            end = time.monotonic() + limit_s
            while time.monotonic() < end and not all(done(rank) for rank in range(probe.ranks)):
                time.sleep(0.05)

        def ended(rank: int) -> bool:
            return processes[rank].poll() is not None

        wait_until(START_S, lambda rank: ended(rank) or (folder / f"rank-{rank}.json").exists())
        wait_until(limit_s, ended)
        late = [rank for rank in range(probe.ranks) if not ended(rank)]
        for rank in late:  # its stacks first
            os.killpg(processes[rank].pid, signal.SIGUSR1)
        wait_until(5.0, lambda rank: ended(rank) or _rank(folder, rank, 0, True)["stack"])
        time.sleep(0.5 if late else 0)  # the rest of the stacks
        for rank in late:
            os.killpg(processes[rank].pid, signal.SIGKILL)
        for rank, process in enumerate(processes):
            ranks.append(_rank(folder, rank, process.wait(), rank in late))
    facts = [(each["record"] or {}).get("facts", {}) for each in ranks]
    status = (
        "timeout"
        if late
        else "passed"
        if all(each["exit_code"] == 0 for each in ranks)
        else "failed"
    )
    return {
        "status": status,
        "seconds": round(time.monotonic() - started, 2),
        "limit_s": round(limit_s, 1),
        "facts": {**facts[0], **({"rank 1": facts[1]} if len(facts) > 1 else {})},
        "ranks": ranks,
    }


def _rank(folder: Path, rank: int, code: int, late: bool) -> Json:
    def text(name: str) -> str:
        data = (folder / name).read_bytes()[-TAIL_BYTES:] if (folder / name).exists() else b""
        clean = portable(data.decode(errors="replace")).replace(str(folder), "/folder")
        return "\n".join(clean.splitlines()[-TAIL_LINES:])

    try:
        record = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    stack = text(f"stacks-{rank}.txt")
    return {
        "rank": rank,
        "pid": None,
        "exit_code": code if code >= 0 else None,
        "signal": signal.Signals(-code).name if code < 0 else None,
        "terminated_by": "timeout" if late else "self",
        "record": record,
        "log_tail": text(f"rank-{rank}.log"),
        "stack": f"# faulthandler\n{stack}" if stack else None,
    }


def survey(out: Path, patterns: Sequence[str], limit_s: float) -> Json:
    """Run the selected probes; write their entries after each. Return them."""
    started, lock, entries = time.monotonic(), threading.Lock(), {}
    document = {"survey": 1, "started": time.time(), "device": "cuda", "probes": entries}

    def run(probe: Probe) -> None:
        left, device = limit_s - (time.monotonic() - started), document["device"]
        if device == "cpu" and not probe.cpu:
            entry: Json = {"status": "skipped", "reason": NO_GPU}
        elif left < 5:
            entry = {"status": "skipped", "reason": f"the survey's time limit of {limit_s:g} s"}
        else:
            entry = run_probe(probe, str(device), min(probe.limit_s, left))
        with lock:
            entries[probe.name] = entry
            write_json(out, document)
            if entry["status"] != "skipped":
                errors = (each["record"] and each["record"]["exception"] for each in entry["ranks"])
                first = next(
                    (f": {e['type']}: {e['message'].splitlines()[0][:90]}" for e in errors if e), ""
                )
                signals = " ".join(each["signal"] for each in entry["ranks"] if each["signal"])
                print(
                    f"{probe.name}: {entry['status']} {entry['seconds']} s {signals}{first}",
                    flush=True,
                )

    selected = [
        probe for probe in PROBES[1:] if any(fnmatch.fnmatch(probe.name, each) for each in patterns)
    ]
    run(PROBES[0])
    if not entries["machine"].get("facts", {}).get("gpus"):
        document["device"] = "cpu"
    for probe in selected:
        if probe.alone:
            run(probe)
    with ThreadPoolExecutor(2 if document["device"] == "cpu" else PARALLEL) as pool:
        list(pool.map(run, [probe for probe in selected if not probe.alone]))
    document["seconds"] = round(time.monotonic() - started, 1)
    write_json(out, document)
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-survey.json"))
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="probes by name, such as 'error.*'"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # this process is a rank of that probe
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank:
        run_rank(args.rank, args.folder, args.device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = survey(args.out, args.only or ["*"], args.limit)
    skipped = sum(entry["status"] == "skipped" for entry in document["probes"].values())
    ran = len(document["probes"]) - skipped
    print(
        f"{args.out}: {ran} probes on {document['device']}, {skipped} skipped,"
        f" {document['seconds']} s"
    )
    probes = {
        name: entry["status"] for name, entry in document["probes"].items() if name != "machine"
    }
    # Of an error, the failed probe is the record.
    shown = [
        name
        for name, how in probes.items()
        if how == "passed" or (how == "failed" and name.startswith("error."))
    ]
    if not shown:
        print(
            "no probe gave a result: this survey shows nothing. Names: --only 'error.*', 'nccl.*'",
            file=sys.stderr,
        )
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
