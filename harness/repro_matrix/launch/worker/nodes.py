"""Start one torchrun agent on each node of an attempt, and report the ranks of all nodes together.

Run by path, as elastic.py: ``python nodes.py SPEC`` runs beside the controller. It starts
``python nodes.py SPEC PORT [NODE]`` on every node by the commands in the spec (srun starts all with
one command, and tells each its number) and merges their answers launch-N.json to launch.json.

All of them see the attempt's folder. The file ``lease`` there ends the agents: it says "stop", or
nothing renews it, because the controller or its machine is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import elastic

PR_SET_PDEATHSIG = 1
LEASE_S = 30.0  # an agent ends when nothing has renewed the lease for so long
RENEW_S = 1.0
LOOK_S = 0.2
GRACE_S = 4.0  # after a rank or an agent failed: the others may fail with errors of their own
STOP_S = 15.0  # for agents to end their ranks
REACH_S = 3.0  # for the rendezvous host to answer
SIOCGIFADDR = 0x8915


def read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def machine() -> list[str]:
    """Return what identifies this machine's process ids: its boot and the PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


# -- beside the controller


def merged(answers: list[dict[str, Any]], stopped: bool) -> dict[str, Any]:
    """Return launch.json of all nodes. Process ids of other machines mean nothing here: None."""
    result = elastic.blank_answer()
    here = machine()
    for number, answer in enumerate(answers):
        elsewhere = answer.get("machine") != here
        for entry in answer.get("ranks", ()):
            more = {"pid": None, "elsewhere": True} if elsewhere else {}
            result["ranks"].append({**entry, "node": number, **more})
        result["error"] = result["error"] or answer.get("error")
        result["port"] = result["port"] or answer.get("port")
        result["leaked_processes"] += answer.get("leaked_processes", [])
    result["nodes"] = [answer.get("node") for answer in answers]
    result["cpu_s"] = round(sum(answer.get("cpu_s", 0.0) for answer in answers), 3)
    result["finished"] = all(answer.get("finished") for answer in answers)
    lost = [number for number, answer in enumerate(answers) if not answer.get("finished")]
    if lost and not stopped:  # what the other agents report follows from it
        host = (answers[lost[0]].get("node") or {}).get("host", "its agent never started")
        text = f"node {lost[0]} ({host}) was lost: its torchrun agent ended before its ranks"
        result["error"] = {"kind": "launcher_died", "message": text}
    return result


def failed(answers: list[dict[str, Any]], ended: list[int]) -> bool:
    """Return whether a node cannot finish any more. ``ended``: exit codes of its commands."""
    entries = [entry for answer in answers for entry in answer.get("ranks", ())]
    bad = any(entry["signal"] or entry["exit_code"] for entry in entries)
    return bad or any(ended) or any(answer.get("error") for answer in answers)


def run(spec: dict[str, Any], spec_file: Path) -> None:
    """Run the agents of all nodes to their end."""
    folder, nodes = spec_file.parent, spec["nodes"]
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    port = str(elastic.free_port())
    own = [sys.executable, os.path.abspath(__file__), str(spec_file), port]
    commands = [[*words, *own] for words in nodes["commands"]]
    if len(commands) == nodes["count"]:
        commands = [[*words, str(number)] for number, words in enumerate(commands)]
    env = {name: value for name, value in os.environ.items() if name != "REPRO_PARENT"}

    def end_with_me() -> None:  # srun ends the agents that it has started
        elastic.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    beat, renewed, announced = 0, 0.0, False
    failed_at = stopped_at = 0.0
    processes: list[subprocess.Popen[bytes]] = []
    while True:
        now = time.monotonic()
        answers = [read(folder / f"launch-{number}.json") for number in range(nodes["count"])]
        codes = [process.poll() for process in processes]
        if processes and None not in codes:
            break
        ranks = sum(len(answer.get("ranks", ())) for answer in answers)
        if ranks == spec["world_size"] and not announced:
            announced = True
            answer = merged(answers, True)
            elastic.write(folder / "launch.json", {**answer, "finished": False})
        if not failed_at and failed(answers, [code for code in codes if code is not None]):
            failed_at = now
        if not stopped_at and (asked.is_set() or (failed_at and now - failed_at > GRACE_S)):
            stopped_at, renewed = now, 0.0
        if stopped_at and now - stopped_at > STOP_S:
            for process in processes:
                process.kill()
        if now - renewed > RENEW_S:
            beat, renewed = beat + 1, now
            with contextlib.suppress(OSError):
                (folder / "lease").write_text(f"{'stop' if stopped_at else 'run'} {beat}")
        if not processes:
            for words in commands:
                processes.append(subprocess.Popen(words, env=env, preexec_fn=end_with_me))
        time.sleep(LOOK_S)
    answers = [read(folder / f"launch-{number}.json") for number in range(nodes["count"])]
    answer = merged(answers, asked.is_set())
    elastic.finish(folder / "launch.json", answer)


# -- on a node


def route(host: str, port: int) -> tuple[str, str | None]:
    """Return this node's address and network interface on the route to a host.

    Raises OSError: the name does not resolve, or there is no route.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex() if family == socket.AF_INET else ():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                raw = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(raw[20:24]) == address:
                    return address, name
    return address, None


class Agent:
    """The torchrun agent of one node."""

    def __init__(self, spec: dict[str, Any], folder: Path, port: int, number: int) -> None:
        self.spec, self.folder, self.port, self.number = spec, folder, port, number
        self.host = spec["nodes"]["host"]
        self.answer_file = folder / f"launch-{number}.json"
        self.tmp = Path(f"{spec['nodes']['tmp']}-{number}")
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.node: dict[str, Any] = {"host": name, "address": None}
        self.stopping = threading.Event()

    @property
    def answer(self) -> dict[str, Any]:
        about = {"machine": machine(), "node": self.node}
        return {**elastic.blank_answer(), "port": self.port, **about}

    def run(self) -> None:
        """Run this node's ranks, and report their ends."""
        signal.signal(
            signal.SIGTERM, lambda *_: self.stopping.set()
        )  # until torchrun's code has its own
        try:
            self._prepare()
        except OSError as error:
            return self._finish(f"has no route to the rendezvous host {self.host}: {error}")
        obeying = threading.Thread(target=self._obey, daemon=True)
        obeying.start()
        answer = self.answer
        elastic.launch(self.spec, self.answer_file, answer, self._options)
        if self.stopping.is_set():
            obeying.join()  # an error of a launch that was asked to end is none
        self._write(answer)

    def _prepare(self) -> None:
        """Choose the network interface, and give this node a folder of its own."""
        self.node["address"], interface = route(self.host, self.port)
        given = self.spec["env"]
        names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        if interface:
            given.update({name: given.get(name, value) for name, value in names.items()})
        self.node["interface"] = given.get("GLOO_SOCKET_IFNAME")
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir(mode=0o700)
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        given.update({name: str(self.tmp / folder) for name, folder in caches.items()})
        given["TMPDIR"] = str(self.tmp)

    def _options(self, port: int) -> dict[str, Any]:
        """Return torchrun's options: --nnodes, --rdzv-backend=c10d, --rdzv-endpoint ..."""
        count = self.spec["nodes"]["count"]
        return {
            "min_nodes": count,
            "max_nodes": count,
            "nproc_per_node": self.spec["world_size"] // count,
            "run_id": self.spec["nodes"]["id"],
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{self.host}:{port}",
            # Else torchrun looks up this host's name to find out which agent hosts the store.
            "rdzv_configs": {"is_host": self.number == 0, "read_timeout": 300},
            "local_addr": self.node["address"],
        }

    def _obey(self) -> None:
        """End the ranks when the lease says so, or is not renewed."""
        last, since = "", time.monotonic()
        while not (last.startswith("stop") or self.stopping.wait(LOOK_S)):
            with contextlib.suppress(OSError):
                text = (self.folder / "lease").read_text()
                if text and text != last:
                    last, since = text, time.monotonic()
            if time.monotonic() - since > LEASE_S:
                break
        self.stopping.set()
        self._signal(signal.SIGTERM)
        problem = self._lost_link()
        self._signal(signal.SIGKILL)
        self._finish(problem)
        os._exit(0)

    def _signal(self, number: int) -> None:
        for process in list(elastic.ranks.values()):
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)

    def _lost_link(self) -> str | None:
        """Return an error if the rendezvous host does not answer any more: the link is down."""
        try:
            if self.number:
                socket.create_connection((self.host, self.port), REACH_S).close()
            else:
                time.sleep(REACH_S)  # the others ask this node
        except ConnectionRefusedError:
            pass  # the host is there, and its agent has ended
        except OSError as error:
            return f"does not reach the rendezvous host {self.host} any more: {error}"
        return None

    def _finish(self, problem: str | None) -> None:
        answer = {**self.answer, "ranks": elastic.rank_entries()}
        if problem:
            text = f"node {self.number} ({self.node['host']}) {problem}"
            answer["error"] = {"kind": "launch", "message": text}
        self._write(answer)

    def _write(self, answer: dict[str, Any]) -> None:
        elastic.finish(self.answer_file, answer)
        shutil.rmtree(self.tmp, ignore_errors=True)


def main() -> None:
    spec_file = Path(sys.argv[1])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    elastic.prctl(elastic.PR_SET_CHILD_SUBREAPER, 1)
    if len(sys.argv) == 2:
        elastic.die_with_parent()
        run(spec, spec_file)
    else:
        number = int(sys.argv[3] if len(sys.argv) > 3 else os.environ["SLURM_NODEID"])
        Agent(spec, spec_file.parent, int(sys.argv[2]), number).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
