"""SLURM for the tests: commands that stand in for it, or a cluster of two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from repro_matrix.cluster import jobs
from repro_matrix.cluster.controller import Controller
from repro_matrix.config import executors
from repro_matrix.planning.cells import Cell

HERE = Path(__file__).parent
Make = Callable[..., Controller]
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
CONF = """ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MaxArraySize=5
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of SLURM that run jobs here; the folder of the jobs."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue", "scancel", "srun"):
        command = tmp_path / "bin" / name
        command.write_text(f"#!{sys.executable}\n" + (HERE / "slurm_stand_in.py").read_text())
        command.chmod(0o755)
    (tmp_path / "queue").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(tmp_path / "queue"))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    monkeypatch.setattr(jobs, "GONE_S", 0.3)
    return tmp_path / "queue"


@pytest.fixture
def make(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return _maker(tmp_path, monkeypatch)


def _maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(
        *behaviors: str,
        executor: tuple[str, ...] = (),
        texts: tuple[str, ...] = (),
        resume: bool = False,
        code: dict[str, str] | None = None,
    ) -> Controller:
        """A run whose shards behave so."""

        def command(self: Controller, number: int, folder: Path) -> list[str]:
            return [sys.executable, str(HERE / "shard.py"), str(folder), behaviors[number - 1]]

        monkeypatch.setattr(Controller, "_command", command)
        chosen, _ = executors.split(["executor=slurm", "executor.poll_s=0.1", *executor])
        assert chosen is not None
        said: list[str] = []
        cells = [
            Cell(f"shard-{number}", "m", "fsdp", (), "current", "cpu")
            for number in range(1, len(behaviors) + 1)
        ]
        made = Controller(chosen, texts, cells, tmp_path / "run", said.append, resume, code or {})
        made.said = said  # type: ignore[attr-defined]
        return made

    return make


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Cluster:
    """slurmctld and two slurmd on this machine, with ports and folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        folder, user = self.folder, os.environ.get("USER") or "root"
        ports = [free_port() for _ in range(len(NODES) + 1)]
        nodes = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=1"
            " RealMemory=1000"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        partition = f"PartitionName=main Nodes={','.join(NODES)} Default=YES State=UP"
        text = CONF.format(folder=folder, port=ports[0], user=user)
        (folder / "slurm.conf").write_text("\n".join([text, *nodes, partition, ""]))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        names = ("key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid")
        names = (*names, "log-file=munge.log", "seed-file=munge.seed")
        options = [f"--{name.replace('=', f'={folder}/')}" for name in names]
        self._start("munged", "munged", "--foreground", "--force", *options)
        self.start_controller()
        for node in NODES:
            (folder / f"spool.{node}").mkdir()
            self.start_node(node)
        self.until("idle", *NODES)

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")

    def start_node(self, node: str, hidden: Path | None = None) -> None:
        """Start a node. ``hidden``: a folder that is empty there."""
        command = ["slurmd", "-D", "-N", node]
        if hidden is not None:
            mount = f"mount -t tmpfs none {hidden} && exec {' '.join(command)}"
            command = ["unshare", "--mount", "sh", "-c", mount]
        self._start(node, *command)

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        self.daemons[name] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def end(self, name: str) -> None:
        """Kill a daemon: a node without one is lost."""
        self.daemons[name].kill()
        self.daemons.pop(name).wait()

    def command(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.env, check=True, capture_output=True, text=True
        ).stdout

    def until(self, state: str, *nodes: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            command = ["sinfo", "-h", "-N", "-o", "%N %t"]
            found = subprocess.run(
                command, env=self.env, capture_output=True, text=True, check=False
            )
            states = dict(line.split() for line in found.stdout.splitlines())
            if all(states.get(node) == state for node in nodes):
                return
            time.sleep(0.2)
        raise TimeoutError(f"nodes {nodes} are not {state}: {found.stdout} {found.stderr}")

    def stop(self) -> None:
        for name in reversed(list(self.daemons)):
            self.daemons[name].terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)} (make test-cluster installs them)")
    (tmp_path / "slurm").mkdir()
    made = Cluster(tmp_path / "slurm")
    try:
        made.start()
        monkeypatch.setenv("SLURM_CONF", made.env["SLURM_CONF"])
        monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
        monkeypatch.setattr(jobs, "GONE_S", 3.0)
        yield made
    finally:
        made.stop()


@pytest.fixture
def make_on(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return _maker(tmp_path, monkeypatch)
