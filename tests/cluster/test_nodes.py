"""One cell over several nodes: two agents on this machine, and in namespaces with a link between.

Whatever happens to a node or the link, the attempt ends by its deadline with an observation of every
rank, is no pass, and leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster.conftest import Cluster
from launching import Json, facts, launched, scripted, wait_for
from observations import case
from repro_matrix.environment.nodes import of_slurm, started_by
from repro_matrix.grading.grade import grade
from repro_matrix.launch import attempt as attempts
from repro_matrix.launch import processes
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, Attempt
from repro_matrix.launch.torchrun import TorchrunLauncher

BODY = """
import time, torch, torch.distributed as dist
run.fact("place", [run.rank, run.local_rank, os.environ["TMPDIR"]])
numbers = torch.ones({size})
dist.all_reduce(numbers)
(run.work_dir / f"works-{run.rank}").touch()
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
run.check("sum", actual=float(numbers[0]), expected=2.0, tolerance=0.0)
"""
CASE = case(pass_criteria={"kind": "inference", "checks": ["sum"]})


def of_two(
    folder: Path, command: str, host: str | None = None, size: int = 4, seconds: float = 0
) -> Attempt:
    body = BODY.replace("{size}", str(size)).replace("{seconds}", str(seconds))
    made = scripted(folder / "a", "import os\n" + body, deadline_s=8.0)
    strategy = {**made.settings["strategy"], "invariants": {"collectives": []}}
    settings = {**made.settings, "nodes": 2, "process_group": True, "strategy": strategy}
    return dataclasses.replace(made, settings=settings, nodes=started_by(command, 2, host))


def outcome_of(observation: Json) -> str:
    made = grade(CASE, "unfixed", observation, [CASE])  # type: ignore[arg-type]
    print(made)
    return made.outcome


def disturbed(attempt: Attempt, disturb: Callable[[], object]) -> Json:
    """Launch an attempt, and disturb it once its ranks are at work."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(TorchrunLauncher().launch, attempt, threading.Event())
        wait_for(lambda: len(list(attempt.work.glob("works-*"))) == 2)
        disturb()
        result = future.result(timeout=120)
    assert not processes.with_token(ATTEMPT_TOKEN, attempt.id)
    assert not list(Path("/tmp").glob(f"{Path(attempt.spec()['nodes']['tmp']).name}*"))
    return result


def assert_no_pass(observation: Json) -> None:
    assert [rank["rank"] for rank in observation["ranks"]] == [0, 1]
    assert outcome_of(observation) not in ("passed", "reproduced")


@pytest.mark.ranks
def test_two_agents_make_one_process_group(tmp_path: Path) -> None:
    result = launched(TorchrunLauncher(), of_two(tmp_path, "env"))
    places = [fact["place"] for fact in facts(result)]
    assert [place[:2] for place in places] == [[0, 0], [1, 0]]
    assert places[0][2] != places[1][2] and not any(Path(place[2]).exists() for place in places)
    assert sorted(rank["node"] for rank in result["ranks"]) == [0, 1]
    assert [node["interface"] for node in result["attempt"]["nodes"]] == ["lo", "lo"]
    assert outcome_of(result) == "passed"


class Network:
    """Two network namespaces, and a third between them in which a bridge is the link."""

    def __init__(self) -> None:
        self.name = f"repro-{os.getpid()}"
        self.command = f"ip netns exec {self.name}-{{node}}"
        self.host = "10.77.0.1"

    def ip(self, *words: str) -> str:
        command = ["ip", *(word.replace("@", self.name) for word in words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def start(self) -> None:
        for place in ("0", "1", "link"):
            self.ip("netns", "add", f"@-{place}")
        self.ip("-n", "@-link", "link", "add", "bridge", "type", "bridge")
        self.ip("-n", "@-link", "link", "set", "bridge", "up")
        for node in ("0", "1"):
            end = ("peer", "name", f"port{node}", "netns", "@-link")
            self.ip("-n", f"@-{node}", "link", "add", "eth7", "type", "veth", *end)
            self.ip("-n", "@-link", "link", "set", f"port{node}", "master", "bridge", "up")
            self.ip("-n", f"@-{node}", "addr", "add", f"10.77.0.{int(node) + 1}/24", "dev", "eth7")
            for device in ("lo", "eth7"):
                self.ip("-n", f"@-{node}", "link", "set", device, "up")

    def cut(self) -> None:
        """Take the link away: both nodes keep their interfaces, and nothing arrives any more."""
        self.ip("-n", "@-link", "link", "set", "port1", "nomaster")

    def narrow(self) -> None:
        """Drop large packets on the link without a message, as a switch with a smaller MTU does."""
        for node in ("0", "1"):
            self.ip("-n", f"@-{node}", "link", "set", "eth7", "gso_max_segs", "1")
            self.ip("-n", "@-link", "link", "set", f"port{node}", "mtu", "1280")

    def kill(self, node: int) -> None:
        for pid in self.ip("netns", "pids", f"@-{node}").split():
            os.kill(int(pid), signal.SIGKILL)

    def stop(self) -> None:
        for place in ("0", "1", "link"):
            subprocess.run(["ip", "netns", "del", f"{self.name}-{place}"], check=False)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.mark.cluster
def test_two_nodes_are_measured_and_recorded(tmp_path: Path, network: Network) -> None:
    result = launched(TorchrunLauncher(), of_two(tmp_path, network.command, network.host))
    assert outcome_of(result) == "passed"
    nodes = result["attempt"]["nodes"]
    assert [node["address"] for node in nodes] == ["10.77.0.1", "10.77.0.2"]
    assert [node["interface"] for node in nodes] == ["eth7", "eth7"]


@pytest.mark.cluster
@pytest.mark.parametrize("prefix", ["", "unshare --pid --fork --mount-proc "])  # as of one machine
def test_a_cut_link(tmp_path: Path, network: Network, prefix: str) -> None:
    attempt = of_two(tmp_path, prefix + network.command, network.host, seconds=600)
    result = disturbed(attempt, network.cut)
    assert_no_pass(result)
    assert result["attempt"]["timed_out"]
    assert "any more" in result["infra_error"]["message"]
    assert all(rank["record"] for rank in result["ranks"])


@pytest.mark.cluster
@pytest.mark.parametrize("node", [0, 1])  # node 0 hosts the store
def test_a_killed_node(tmp_path: Path, network: Network, node: int) -> None:
    attempt = of_two(tmp_path, network.command, network.host, seconds=600)
    result = disturbed(attempt, lambda: network.kill(node))
    assert_no_pass(result)
    assert f"node {node}" in result["infra_error"]["message"]
    assert all(rank["record"] for rank in result["ranks"])


@pytest.mark.cluster
def test_a_late_node(tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attempts.LIMITS, "cpu", (8, 0, 0, 0))
    late = "sh -c '[ {node} = 0 ] || sleep 60; exec \"$@\"' sh "
    result = launched(TorchrunLauncher(), of_two(tmp_path, late + network.command, network.host))
    assert_no_pass(result)
    assert result["attempt"]["timed_out"] and result["infra_error"]["kind"] == "launch"


@pytest.mark.cluster
def test_a_name_that_does_not_resolve(tmp_path: Path, network: Network) -> None:
    attempt = of_two(tmp_path, network.command, "no-such-host.invalid")
    result = launched(TorchrunLauncher(), attempt)
    assert_no_pass(result)
    assert "no-such-host.invalid" in result["infra_error"]["message"]


@pytest.mark.cluster
def test_a_link_that_drops_large_packets(tmp_path: Path, network: Network) -> None:
    network.narrow()
    attempt = of_two(tmp_path, network.command, network.host, size=1 << 20)
    result = launched(TorchrunLauncher(), attempt)
    assert_no_pass(result)
    assert result["attempt"]["timed_out"]


def assert_ends_with_its_controller(attempt: Attempt) -> None:
    pid = os.fork()
    if not pid:
        os.setsid()
        TorchrunLauncher().launch(attempt, threading.Event())
        os._exit(0)
    wait_for(lambda: len(list(attempt.work.glob("works-*"))) == 2)
    assert processes.with_token(ATTEMPT_TOKEN, attempt.id)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not processes.with_token(ATTEMPT_TOKEN, attempt.id), 60)


@pytest.mark.cluster
@pytest.mark.parametrize("prefix", ["", "unshare --pid --fork --mount-proc "])
def test_a_killed_controller(tmp_path: Path, network: Network, prefix: str) -> None:
    attempt = of_two(tmp_path, prefix + network.command, network.host, seconds=600)
    assert_ends_with_its_controller(attempt)


@pytest.fixture
def allocation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of SLURM's two nodes, as a job has it."""
    cluster.command("salloc", "--nodes=2", "--no-shell")
    found = cluster.command("squeue", "--noheader", "--format=%i %N").split()
    monkeypatch.setenv("SLURM_JOB_ID", found[0])
    monkeypatch.setenv("SLURM_JOB_NODELIST", found[1])


def in_allocation(folder: Path) -> Attempt:
    return dataclasses.replace(of_two(folder, "env", seconds=600), nodes=of_slurm(2, None))


@pytest.mark.cluster
@pytest.mark.usefixtures("allocation")
def test_a_deadline_ends_the_agents_of_srun(tmp_path: Path, cluster: Cluster) -> None:
    result = disturbed(in_allocation(tmp_path), lambda: None)
    assert_no_pass(result)
    assert result["attempt"]["timed_out"] and len(result["ranks"][1]["samples"]) == 2
    assert [rank["terminated_by"] for rank in result["ranks"]] == ["timeout"] * 2
    wait_for(lambda: "." not in cluster.command("squeue", "--steps", "-h", "-o", "%i"), 30)


@pytest.mark.cluster
@pytest.mark.usefixtures("allocation")
def test_a_lost_node_of_slurm(tmp_path: Path, cluster: Cluster) -> None:
    def lose() -> None:
        cluster.end("n2")
        for process in processes.with_token("SLURMD_NODENAME", "n2"):
            process.kill()

    result = disturbed(in_allocation(tmp_path), lose)
    assert_no_pass(result)
    assert "node 1 (n2) was lost" in result["infra_error"]["message"]


@pytest.mark.cluster
@pytest.mark.usefixtures("allocation")
def test_srun_ends_with_its_controller(tmp_path: Path) -> None:
    assert_ends_with_its_controller(in_allocation(tmp_path))
