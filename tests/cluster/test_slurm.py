"""The same on a real SLURM, with two nodes on this machine: `make test-cluster`."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cluster.conftest import Cluster, Make
from cluster.test_controller import cases, said, until
from repro_matrix.cluster.controller import Controller
from repro_matrix.config import executors
from repro_matrix.config.schema import VARIANT
from repro_matrix.environment.stacks import resolve
from repro_matrix.errors import ConfigError
from repro_matrix.results.store import Store
from repro_matrix.runner.adhoc_case import Script, command_of_script
from repro_matrix.runner.script_failure import ScriptFailure
from repro_matrix.search.in_jobs import Probe, ProbeJobs

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
    assert any("(CANCELLED)" in text for text in said(made))


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


def test_an_array_above_the_limit_of_the_site_is_submitted_in_parts(
    make_on: Make, tmp_path: Path
) -> None:
    made = make_on(*["ends"] * 7, executor=("executor.shards=7",))
    made.run(threading.Event())
    assert not made.problems() and len(cases(tmp_path / "run")) == 7
    arrays = {part.jobs[0].partition("_")[0] for part in made.parts}
    assert len(arrays) > 1 and all(len(part.jobs) == 1 for part in made.parts)


@pytest.mark.parametrize("option", ["partition=gpu", "mem_gb=900", "gpus_per_node=2"])
def test_jobs_that_no_node_can_run_are_refused(make_on: Make, option: str) -> None:
    with pytest.raises(ConfigError, match="sbatch refused the jobs"):
        make_on("ends", executor=(f"executor.{option}",)).run(threading.Event())


def test_a_job_at_its_time_limit_continues(make_on: Make, tmp_path: Path) -> None:
    """SLURM warns it 90 s before the limit; it is requeued, and keeps its results."""
    made = make_on("sleeps-once", "ends", executor=("executor.timeout_min=2",))
    totals = made.run(threading.Event())
    assert not made.problems() and len(totals.documents) == 2
    # SLURM may warn the second start before submitit listens: it is then submitted again.
    first = made.parts[0].jobs[0]
    assert "Requeued job" in (made.jobs.logs / f"{first}_0_log.out").read_text()
    assert len(made.parts[1].jobs) == 1


def test_a_node_that_sees_another_folder_is_named_and_avoided(
    make_on: Make, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    cluster.end("n1")
    cluster.start_node("n1", hidden=tmp_path / "run")
    cluster.until("idle", "n1")
    cluster.command("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    made = make_on("ends")
    thread = threading.Thread(target=made.run, args=(threading.Event(),), daemon=True)
    thread.start()
    until(lambda: any("under this path?" in text for text in said(made)))
    cluster.command("scontrol", "update", "nodename=n2", "state=resume")
    thread.join(120)
    assert not made.problems() and cases(tmp_path / "run") == ["shard-1"]
    assert made.parts[0].nodes == ["n1"]


def test_probes_of_a_search_are_measured_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    """One of their jobs is cancelled from outside; a second command repeats none."""
    script = tmp_path / "train.py"
    script.write_text("import sys, time\ntime.sleep(2)\nsys.exit(int(sys.argv[1]))\n")
    executor, _ = executors.split(["executor=slurm", "executor.poll_s=0.5"])
    assert executor is not None
    stack = resolve("current")
    probes = [
        Probe(
            Script(command_of_script(str(script), 1, text), ScriptFailure(), tmp_path).request(),
            stack,
            (VARIANT,),
            1,
        )
        for text in ("0", "1")
    ]
    texts: list[str] = []
    first = ProbeJobs(executor, tmp_path / "results", texts.append, threading.Event())
    thread = threading.Thread(target=first.submit, args=(probes,), daemon=True)
    thread.start()
    until(lambda: "jobs: 0 pending, 2 running, 0 finished" in texts)
    lost = first.parts[probes[0].key]
    cluster.command("scancel", lost.jobs[-1])
    thread.join(180)
    outcomes = []
    for probe in probes:
        document, path, now = first.result(probe)
        assert now and path.is_file()
        [attempt] = document["variants"][VARIANT]["attempts"]
        outcomes.append(attempt["outcome"]["outcome"])
    assert outcomes == ["passed", "other_failure"]
    assert len(lost.jobs) == 2 and len(first.parts[probes[1].key].jobs) == 1
    again = ProbeJobs(executor, tmp_path / "results", texts.append, threading.Event())
    assert [again.result(probe)[2] for probe in probes] == [False, False]


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
