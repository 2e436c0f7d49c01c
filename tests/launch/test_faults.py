"""Everything that ranks do wrong, with both launchers: the right outcome, and nothing left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import FAILED, Json, attempt_of, ends, failed_together, launched, launched_until
from repro_matrix.launch import watch
from repro_matrix.launch.attempt import Launcher

pytestmark = pytest.mark.ranks
End = tuple[int | None, str | None, str]  # exit code, signal, who ended it


@pytest.fixture(autouse=True)
def no_cgroup_left() -> Iterator[None]:
    yield
    for group in [*Path("/sys/fs/cgroup").glob("repro-fault-*"), *Path("/sys/fs/cgroup").glob("memory/repro-fault-*")]:
        with contextlib.suppress(OSError):
            group.rmdir()


# --- checks besides how the ranks ended


def message(text: str) -> Callable[[Json], Any]:
    return lambda seen: any(text in (r["record"]["exception"] or {}).get("message", "") for r in seen["ranks"])


def tail(rank: int, text: str) -> Callable[[Json], Any]:
    def check(seen: Json) -> bool:
        said = seen["ranks"][rank]["log_tail"]
        return said.endswith(text) and len(said) <= 8192 and not any(ord(c) < 32 and c not in "\n\t" for c in said)

    return check


def leaked_processes(count: int, text: str = "") -> Callable[[Json], Any]:
    return lambda seen: len([each for each in seen["attempt"]["leaked_processes"] if text in each]) == count


def stack(rank: int, *words: str) -> Callable[[Json], Any]:
    return lambda seen: all(word in seen["ranks"][rank]["stack"] for word in words)


def never_done(rank: int) -> Callable[[Json], Any]:
    return lambda seen: (seen["ranks"][rank]["record"]["done"], seen["ranks"][rank]["record"]["ended"]) == (False, None)


class Fault(NamedTuple):
    """Two ranks, some of which call a function of tests/faults; or one rank for each function in ``each``."""

    does: str
    ends: dict[int, End]
    infra_error: str | None = None
    checks: tuple[Callable[[Json], Any], ...] = ()
    flags: Json = {}  # noqa: RUF012 - never written
    script: str = "misbehave.py"
    stuck: int = 0  # so many ranks hang: the deadline comes once they do


OK: End = (0, None, "self")
HANG: End = (None, "SIGTERM", "timeout")
FAULTS = {
    "raises": Fault("raises", {0: FAILED, 1: (None, "SIGTERM", "launcher")},
                    checks=(message("rank 0 of 2 does not want to"),), flags={"rank": 0, "others": "wait"}),
    "raises while its peer ignores SIGTERM": Fault(
        "ignores_term", {0: FAILED, 1: (None, "SIGKILL", "launcher")}, script="two_faults.py"
    ),
    "ends, without finishing, or with processes, shared memory, binary or much output left behind": Fault(
        "each",
        dict.fromkeys(range(5), OK),
        checks=(
            never_done(0),
            leaked_processes(3),
            leaked_processes(2, "killed"),
            leaked_processes(1, "/dev/shm"),
            tail(3, "after it"),
            tail(4, "the last line"),
        ),
        flags={"each": ["leaves", "grandchildren", "leaves_memory", "binary", "prints"], "megabytes": 400},
    ),
    "hangs in Python, ignores SIGTERM or has a grandchild in its own session": Fault(
        "each",
        {0: OK, 1: HANG, 2: (None, "SIGKILL", "timeout"), 3: HANG},
        checks=(stack(1, "stuck_in_here"), stack(2, "ignores_term"), stack(3, "grandchild_and_stuck")),
        flags={"each": ["nothing", "stuck_in_here", "ignores_term", "grandchild_and_stuck"]},
        stuck=3,
    ),
    "os._exit(3)": Fault("leaves", {0: (3, None, "self")}, checks=(never_done(0),), flags={"rank": 0, "code": 3}),
    "segfaults": Fault("segfault", {1: (None, "SIGSEGV", "self")}, flags={"rank": 1},
                       checks=(never_done(1), stack(1, "# faulthandler", "segfault"))),
    "aborts in C++": Fault("aborts_in_cpp", {1: (None, "SIGABRT", "self")}, flags={"rank": 1},
                           checks=(never_done(1), stack(1, "aborts_in_cpp"))),
    "is killed": Fault("killed", {1: (None, "SIGKILL", "self")}, "memory", flags={"rank": 1}),
    "is killed by the OOM killer": Fault("out_of_memory", {0: (None, "SIGKILL", "self")}, "memory", flags={"rank": 0}),
    "meets a limit on its memory": Fault("no_memory", {1: FAILED}, "memory", flags={"rank": 1}),
    "hangs in a collective": Fault(
        "hang", {}, script="collective.py", stuck=2,
        checks=(stack(0, "barrier", "collective.py"), stack(1, "recv", "collective.py"), leaked_processes(0)),
    ),
    "fills the disk": Fault("disk_full", {0: FAILED}, "disk", flags={"rank": 0}),
    "has no room for its record": Fault("disk_full_for_the_record", {0: FAILED}, "disk", flags={"rank": 0}),
    # Both fail: the launcher may end one before it has failed by itself.
    "cannot import what it needs": Fault("none", {}, "import", (failed_together,), script="no_kit.py"),
}  # fmt: skip


# With torchrun each takes ten times as long: the gate runs one of them there.
IN_GATE = {"raises"}
LAUNCHES = [
    pytest.param(name, launcher, marks=[pytest.mark.slow] if launcher == "torchrun" and name not in IN_GATE else [])
    for name in FAULTS
    for launcher in ("torchrun", "forkserver")
]


@pytest.mark.parametrize(("name", "launcher"), LAUNCHES, indirect=["launcher"])
def test_faulty_rank_gets_its_outcome(
    tmp_path: Path, launcher: Launcher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    each = fault.flags.get("each", "ab")
    if "prints" in each:
        monkeypatch.setattr(watch, "LOOK_S", 0.2)
    how: Json = {"deadline": 400, "keep": True, "world_size": len(each), **fault.flags}
    attempt = attempt_of(tmp_path / "a", fault.does, fault.script, **how)
    result = launched_until(launcher, attempt, fault.stuck) if fault.stuck else launched(launcher, attempt)
    assert result["attempt"]["launcher"] == launcher.name and "retried" not in result["attempt"]
    assert result["attempt"]["timed_out"] == bool(fault.stuck) and result["attempt"]["wall_s"] < 400
    assert (result["infra_error"] or {}).get("kind") == fault.infra_error, result["infra_error"]
    assert {rank: ends(result)[rank] for rank in fault.ends} == fault.ends
    for number, check in enumerate(fault.checks):
        assert check(result), (number, result["ranks"], result["attempt"])
    assert sum(path.stat().st_size for path in attempt.logs.iterdir()) < 300 << 20
