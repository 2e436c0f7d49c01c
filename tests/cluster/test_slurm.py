"""The same on a real SLURM, with two nodes on this machine: `make test-cluster`."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cluster.conftest import Cluster, Make
from cluster.test_controller import cases, until
from repro_matrix.cluster.controller import Controller
from repro_matrix.results.store import Store

pytestmark = pytest.mark.cluster


def started(made: Controller) -> tuple[threading.Thread, threading.Event]:
    """Run a controller beside the test, until its first shard runs."""
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,), daemon=True)
    thread.start()
    until(lambda: bool(made.parts[0].node) and (made.parts[0].folder / "cpu").exists())
    return thread, stop


def test_shards_are_measured_in_jobs(make_on: Make, tmp_path: Path) -> None:
    made = make_on("ends", "ends:1", "ends")
    totals = made.run(threading.Event())
    assert cases(tmp_path / "run") == ["shard-1", "shard-2", "shard-3"]
    assert not totals.interrupted and not made.problems()


def test_a_job_that_somebody_cancels_is_submitted_again(make_on: Make, cluster: Cluster) -> None:
    made = make_on("sleeps-once", "ends")
    thread, _ = started(made)
    cluster.command("scancel", made.parts[0].jobs[-1])
    thread.join(120)
    assert not made.problems() and len(made.parts[0].jobs) == 2


def test_a_lost_node_is_replaced(make_on: Make, cluster: Cluster) -> None:
    made = make_on("sleeps-once", "ends")
    thread, _ = started(made)
    until((made.parts[0].folder / "again").exists)
    pids = cluster.command("pgrep", "-f", f"{made.parts[0].folder} sleeps-once").split()
    cluster.end(made.parts[0].node)
    subprocess.run(["kill", "-9", *pids], check=False)  # a lost node's processes are gone, too
    thread.join(180)
    assert not made.problems()


def test_a_preempted_job_continues(make_on: Make, cluster: Cluster) -> None:
    made = make_on("sleeps-once", "ends")
    thread, _ = started(made)
    job = made.parts[0].jobs[-1]
    cluster.command("scancel", "--signal=USR2", job)
    thread.join(180)
    assert not made.problems() and made.parts[0].jobs == [job]


def test_a_restarted_slurmctld_loses_nothing(make_on: Make, cluster: Cluster) -> None:
    made = make_on("waits", "ends")
    thread, _ = started(made)
    cluster.end("slurmctld")
    (made.parts[0].folder / "go").touch()  # the job ends while SLURM does not answer
    until(lambda: any("does not answer" in text for text in made.said))  # type: ignore[attr-defined]
    cluster.start_controller()
    thread.join(120)
    assert not made.problems() and [len(part.jobs) for part in made.parts] == [1, 1]


def test_a_drained_node_leaves_jobs_pending(make_on: Make, cluster: Cluster) -> None:
    for node in ("n1", "n2"):
        cluster.command("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    made, stop = make_on("ends"), threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,), daemon=True)
    thread.start()
    said = made.said  # type: ignore[attr-defined]
    until(lambda: any("1 pending (" in text for text in said))
    cluster.command("scontrol", "update", "nodename=n2", "state=resume")
    thread.join(120)
    assert not made.problems()


def test_an_array_above_the_limit_of_the_site_is_refused(make_on: Make) -> None:
    from repro_matrix.errors import MeasureError

    with pytest.raises(MeasureError, match=r"executor\.shards"):
        make_on(*["ends"] * 30, executor=("executor.shards=30",)).run(threading.Event())


def test_ctrl_c_cancels_the_jobs(make_on: Make, cluster: Cluster, tmp_path: Path) -> None:
    made = make_on("sleeps", "ends")
    thread, stop = started(made)
    until(lambda: len(list((tmp_path / "run" / "jobs").glob("shard-*/run.manifest"))) == 2)
    stop.set()
    thread.join(120)
    assert not cluster.command("squeue", "-h").strip()
    assert cases(tmp_path / "run") == ["shard-1", "shard-2"]


def test_the_matrix_is_as_on_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    """Two shards of real cells: the verdicts of `repro matrix`, in one folder."""
    words = ["matrix", "case=tp-heads-not-divisible,ddp-unfinished-reduction", "executor=slurm"]
    words += ["executor.shards=2", "executor.poll_s=1", f"results={tmp_path / 'run'}"]
    run = subprocess.run(
        [sys.executable, "-m", "repro_matrix", *words],
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 of 2 measured reproduce" in run.stdout


def test_a_cell_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """The job gets two nodes, and srun starts an agent on each."""
    words = ["matrix", "case=ddp-ready-once", "variants=unfixed", "nodes=2", "executor=slurm"]
    words += ["executor.poll_s=1", f"results={tmp_path / 'run'}"]
    run = subprocess.run(
        [sys.executable, "-m", "repro_matrix", *words],
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    [document] = Store(tmp_path / "run").documents()
    [made] = document["variants"]["unfixed"]["attempts"]
    attempt = made["observation"]["attempt"]
    assert made["outcome"]["outcome"] == "reproduced"
    assert [node["host"] for node in attempt["nodes"]] == ["n1", "n2"] and attempt["slurm_job"]
    assert not cluster.command("squeue", "-h").strip()
