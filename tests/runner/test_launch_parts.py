"""Leases of GPUs and clearing up after dead runs, without ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import attempt_of
from repro_matrix.environment.gpus import Seen
from repro_matrix.launch.attempt import RUN_TOKEN, prepare, remove
from repro_matrix.runner.gpu_locks import Leases, Trouble, clear_leftovers, register_run
from repro_matrix.runner.scheduler import Kept

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def no_files_left(tmp_path: Path) -> Iterator[None]:
    """pytest's folders have long names, so that TMPDIR of an attempt lies elsewhere."""
    yield
    for spec in list(tmp_path.rglob("spec.json")):
        remove(spec.parent)


@pytest.fixture
def sleeper() -> Iterator[Any]:
    """Starts processes of a run; ends them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run_id: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(SLEEP, env={**os.environ, RUN_TOKEN: run_id}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


# --- leases


def test_a_gpu_is_held_by_one_attempt_of_one_run_and_all_are_taken_or_none(tmp_path: Path) -> None:
    one, other = Leases(tmp_path, "one"), Leases(tmp_path, "other")
    assert one.take(["GPU-a"]) and not one.take(["GPU-a"])
    assert other.available(["GPU-a", "GPU-b"]) == ["GPU-b"]
    assert not other.take(["GPU-b", "GPU-a"])
    assert one.available(["GPU-a", "GPU-b"]) == ["GPU-b"]  # what was taken beside it was given back
    assert one.give_back(["GPU-a"]) == {} and other.take(["GPU-b", "GPU-a"])
    other.give_back(["GPU-a", "GPU-b"])


def test_cards_that_are_kept_for_a_run_are_said_to_the_others_until_it_has_them_or_is_dead(tmp_path: Path) -> None:
    wide, narrow = Leases(tmp_path, "wide"), Leases(tmp_path, "narrow")
    cards = ["GPU-a", "GPU-b", "GPU-c"]
    assert narrow.take(["GPU-a"], ends=12.5) and wide.ends(cards) == {"GPU-a": 12.5} and narrow.ends(cards) == {}
    assert wide.keep(cards[:2], due=12.5) and wide.kept() is None
    assert narrow.kept() == Kept(frozenset(cards[:2]), 12.5)
    assert not narrow.keep(["GPU-c"], due=0.0)  # one at a time: two would wait for each other
    assert narrow.give_back(["GPU-a"]) == {} and wide.available(cards) == cards and wide.take(cards[:2])
    wide.unkeep()
    wide.give_back(cards[:2])
    assert narrow.kept() is None and narrow.available(cards) == cards
    note = {"run": "dead", "cards": cards, "due": 1e9}
    (wide.folder / "kept.json").write_text(json.dumps(note))  # and nobody holds the lock
    assert narrow.kept() is None and narrow.keep(cards, due=0.0)
    narrow.unkeep()
    (wide.folder / "kept.json").write_text("damaged")
    assert narrow.kept() is None


class Looked:
    """What is on the cards, as a test says it."""

    def __init__(self) -> None:
        self.users: dict[int, int | None] = {}
        self.used_mb = 500
        self.problem: str | None = None

    def __call__(self, uuid: str) -> Seen:
        return Seen(dict(self.users), self.used_mb, self.problem)


def test_a_card_is_kept_from_everybody_while_a_process_of_ours_sits_on_it(
    tmp_path: Path, sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro_matrix.runner.gpu_locks.EMPTY_S", 0.3)
    seen = Looked()
    with Leases(tmp_path, "ours", seen) as ours:
        assert ours.take(["GPU-a"])
        process = sleeper("ours")
        seen.users[process.pid] = 400
        trouble = ours.give_back(["GPU-a"])["GPU-a"]
        assert trouble.kind == "left" and f"process {process.pid}" in trouble.why and "400 MiB" in trouble.why
        others = Leases(tmp_path, "others")
        assert not others.take(["GPU-a"]) and not ours.take(["GPU-a"]) and not ours.available(["GPU-a"])
    assert others.take(["GPU-a"])  # whoever comes after this run has ended what it left (its name stands in the note)
    assert others.give_back(["GPU-a"]) == {}
    process.kill()
    process.wait()


def test_memory_that_nobody_is_named_for_keeps_a_card_from_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container NVML names no process."""
    monkeypatch.setattr("repro_matrix.runner.gpu_locks.EMPTY_S", 0.2)
    seen = Looked()
    with Leases(tmp_path, "ours", seen) as ours:
        assert ours.take(["GPU-a"])
        seen.used_mb += 420
        assert "420 MiB" in ours.give_back(["GPU-a"])["GPU-a"].why
    assert not list(ours.folder.glob("kept*")) and Leases(tmp_path, "others").take(["GPU-a"])


def test_a_stranger_on_the_card_does_not_keep_our_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro_matrix.runner.gpu_locks.EMPTY_S", 0.1)
    seen = Looked()
    seen.users[os.getpid()] = 100
    ours, others = (Leases(tmp_path, name, seen) for name in ("ours", "others"))
    assert ours.take(["GPU-a"])
    seen.users[1] = 100
    assert ours.give_back(["GPU-a"]) == {}
    assert others.take(["GPU-a"]) and others.give_back(["GPU-a"]) == {}


def test_a_card_that_failed_is_said_and_not_waited_for(tmp_path: Path) -> None:
    seen = Looked()
    leases = Leases(tmp_path, "ours", seen)
    assert leases.take(["GPU-a"])
    seen.problem = "NVML: GPU is lost"
    assert leases.give_back(["GPU-a"])["GPU-a"] == Trouble("lost", "NVML: GPU is lost")


def test_the_lease_of_a_dead_run_is_taken_over_and_its_processes_ended(tmp_path: Path, sleeper: Any) -> None:
    run = f"dead-{os.getpid()}"
    process = sleeper(run)
    leases = Leases(tmp_path, "next")
    leases.folder.mkdir(parents=True)
    (leases.folder / "GPU-a.json").write_text(json.dumps({"run": run, "pid": 1}))
    (leases.folder / "GPU-b.json").write_text("damaged")
    assert leases.take(["GPU-a", "GPU-b"]) and process.wait(60) is not None
    leases.give_back(["GPU-a", "GPU-b"])
    assert not list(leases.folder.glob("*.json"))


def test_a_living_run_is_left_alone_and_a_dead_one_cleared(tmp_path: Path, sleeper: Any) -> None:
    run = f"run-{os.getpid()}"
    process = sleeper(run)
    kept, other = (tmp_path / "runs" / run / name for name in ("kept", "other"))
    for folder in (kept, other):
        prepare(dataclasses.replace(attempt_of(folder, "nothing"), keep=folder == kept))
        (folder / "records" / "rank-0.json").write_text("{}")
    with register_run(tmp_path, run):
        assert clear_leftovers(tmp_path) == [] and process.poll() is None
    lock = next((tmp_path / "nodes").iterdir()) / "runs" / f"{run}.lock"
    lock.touch()  # as a killed controller leaves it
    said = clear_leftovers(tmp_path)
    assert process.wait(60) is not None and any(str(process.pid) in text for text in said)
    assert (kept / "records" / "rank-0.json").exists() and not (kept / "work").exists() and not other.exists()
    assert not lock.exists() and clear_leftovers(tmp_path) == []
