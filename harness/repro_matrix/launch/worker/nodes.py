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

LEASE_S = 30.0  # an agent ends when nothing has renewed the lease for so long
RENEW_S = 1.0
LOOK_S = 0.2
GRACE_S = 4.0  # after a rank or an agent failed: the others may fail with errors of their own
STOP_S = 15.0  # for agents to end their ranks
REACH_S = 3.0  # for the rendezvous host to answer
SIOCGIFADDR = 0x8915
ENVIRONMENT = "environment.json"  # of the ranks, in the attempt's folder
OWN = ("SLURM", "CUDA_VISIBLE_DEVICES")  # variables that differ between nodes


def machine_id() -> list[str]:
    """Return what identifies this machine's process ids: its boot and the PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


# -- beside the controller


class Agents:
    """The agents of all nodes, as the controller's machine sees them."""

    def __init__(self, spec: dict[str, Any], spec_file: Path) -> None:
        self.spec, self.folder = spec, spec_file.parent
        self.answer_file = self.folder / "launch.json"
        self.count = spec["nodes"]["count"]
        # -E: without PYTHONPATH and the like of the node.
        own = [
            sys.executable,
            "-E",
            os.path.abspath(__file__),
            str(spec_file),
            str(elastic.free_port()),
        ]
        self.commands = [[*words, *own] for words in spec["nodes"]["commands"]]
        if len(self.commands) == self.count:  # else srun gives each its number
            self.commands = [[*words, str(n)] for n, words in enumerate(self.commands)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.asked = threading.Event()
        self._beat, self._renewed = 0, 0.0

    def run(self) -> None:
        """Run the agents to their end, and merge what they report."""
        signal.signal(signal.SIGTERM, lambda *_: self.asked.set())
        self._renew("run")
        self._start()
        announced, failed_at, stopped_at = False, 0.0, 0.0
        while any(process.poll() is None for process in self.processes):
            now, merged = time.monotonic(), self._merged(self._answers())
            if not announced and len(merged["ranks"]) == self.spec["world_size"]:
                announced = True
                elastic.write(self.answer_file, {**merged, "finished": False})
            failed_at = failed_at or (now if self._failed(merged) else 0.0)
            late = failed_at and now - failed_at > GRACE_S
            stopped_at = stopped_at or (now if late or self.asked.is_set() else 0.0)
            if stopped_at and now - stopped_at > STOP_S:
                for process in self.processes:
                    process.kill()
            self._renew("stop" if stopped_at else "run")
            time.sleep(LOOK_S)
        answers = self._answers()
        answer = self._merged(answers)
        lost = [number for number, one in enumerate(answers) if not one.get("finished")]
        if lost and not self.asked.is_set():  # what the other agents report follows from it
            host = (answers[lost[0]].get("node") or {}).get("host", "its agent never started")
            text = f"node {lost[0]} ({host}) was lost: its torchrun agent ended before its ranks"
            answer["error"] = {"kind": "launcher_died", "message": text}
        elastic.finish(self.answer_file, answer)

    def _start(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "REPRO_PARENT"}

        def end_with_me() -> None:  # srun ends the agents that it has started
            elastic.prctl(elastic.PR_SET_PDEATHSIG, signal.SIGTERM)

        elastic.write(self.folder / ENVIRONMENT, env)
        for words in self.commands:
            self.processes.append(subprocess.Popen(words, env=env, preexec_fn=end_with_me))

    def _renew(self, word: str) -> None:
        if time.monotonic() - self._renewed > RENEW_S or word == "stop":
            self._beat, self._renewed = self._beat + 1, time.monotonic()
            with contextlib.suppress(OSError):
                (self.folder / "lease").write_text(f"{word} {self._beat}")

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for number in range(self.count):
            try:
                text = (self.folder / f"launch-{number}.json").read_text(encoding="utf-8")
                answers.append(dict(json.loads(text)))
            except (OSError, ValueError):
                answers.append({})
        return answers

    def _failed(self, merged: dict[str, Any]) -> bool:
        """Return whether a node cannot finish any more."""
        bad = any(entry["signal"] or entry["exit_code"] for entry in merged["ranks"])
        ended = any(process.poll() for process in self.processes)
        return bad or ended or merged["error"] is not None

    def _merged(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return launch.json of all nodes. Process ids of other machines mean nothing here."""
        result, here = elastic.blank_answer(), machine_id()
        for number, answer in enumerate(answers):
            more = {} if answer.get("machine") == here else {"pid": None, "elsewhere": True}
            entries = answer.get("ranks", ())
            result["ranks"] += [{**entry, "node": number, **more} for entry in entries]
            result["error"] = result["error"] or answer.get("error")
            result["port"] = result["port"] or answer.get("port")
            result["leaked_processes"] += answer.get("leaked_processes", [])
        result["nodes"] = [answer.get("node") for answer in answers]
        result["cpu_s"] = round(sum(answer.get("cpu_s", 0.0) for answer in answers), 3)
        result["finished"] = all(answer.get("finished") for answer in answers)
        return result


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


def use_environment(folder: Path) -> None:
    """Give this node the controller's environment, with what SLURM says of the node."""
    own = {name: value for name, value in os.environ.items() if name.startswith(OWN)}
    given = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    os.environ.clear()
    os.environ.update({**given, **own})


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
        about = {"machine": machine_id(), "node": self.node}
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
        Agents(spec, spec_file).run()
    else:
        use_environment(spec_file.parent)
        number = int(sys.argv[3] if len(sys.argv) > 3 else os.environ["SLURM_NODEID"])
        Agent(spec, spec_file.parent, int(sys.argv[2]), number).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
