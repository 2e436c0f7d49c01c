"""Everything that ranks do wrong, with both launchers: the right outcome, and nothing left
behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import FAILED, Json, attempt_of, ends, failed_together, launched, launched_until
from repro_matrix.launch.attempt import Launcher

pytestmark = pytest.mark.ranks
End = tuple[int | None, str | None, str]  # exit code, signal, who ended it


# --- checks besides how the ranks ended


def leaked_processes(count: int, text: str = "") -> Callable[[Json], Any]:
    return lambda seen: (
        len([each for each in seen["attempt"]["leaked_processes"] if text in each]) == count
    )


def stack(rank: int, *words: str) -> Callable[[Json], Any]:
    return lambda seen: all(word in seen["ranks"][rank]["stack"] for word in words)


def never_done(rank: int) -> Callable[[Json], Any]:
    return lambda seen: (
        (seen["ranks"][rank]["record"]["done"], seen["ranks"][rank]["record"]["ended"])
        == (False, None)
    )


class Fault(NamedTuple):
    """``does``: a function of tests/faults, or one for each rank."""

    does: str | list[str]
    ends: dict[int, End]
    infra_error: str | None = None
    checks: tuple[Callable[[Json], Any], ...] = ()
    flags: Json = {}  # noqa: RUF012 - never written
    script: str = "misbehave.py"
    stuck: int = 0  # so many ranks hang: the deadline comes once they do


OK: End = (0, None, "self")
HANG: End = (None, "SIGTERM", "timeout")
FAULTS = {
    "raises": Fault(
        "raises",
        {0: FAILED, 1: (None, "SIGTERM", "launcher")},
        checks=(lambda seen: "rank 0 of 2" in seen["ranks"][0]["record"]["exception"]["message"],),
        flags={"rank": 0, "others": "wait"},
    ),
    "raises while its peer ignores SIGTERM": Fault(
        ["raises_beside_stuck", "ignores_term"], {0: FAILED, 1: (None, "SIGKILL", "launcher")}
    ),
    "ends without finishing, or leaves processes or shared memory behind": Fault(
        ["leaves", "grandchildren", "leaves_memory"],
        dict.fromkeys(range(3), OK),
        checks=(
            never_done(0),
            leaked_processes(3),
            leaked_processes(2, "killed"),
            leaked_processes(1, "/dev/shm"),
        ),
    ),
    "hangs in Python, ignores SIGTERM or has a grandchild in its own session": Fault(
        ["nothing", "stuck_in_here", "ignores_term", "grandchild_and_stuck"],
        {0: OK, 1: HANG, 2: (None, "SIGKILL", "timeout"), 3: HANG},
        stuck=3,
        checks=(
            stack(1, "stuck_in_here"),
            stack(2, "ignores_term"),
            stack(3, "grandchild_and_stuck"),
        ),
    ),
    "os._exit(3)": Fault(
        "leaves", {0: (3, None, "self")}, checks=(never_done(0),), flags={"rank": 0, "code": 3}
    ),
    "segfaults": Fault(
        "segfault",
        {1: (None, "SIGSEGV", "self")},
        flags={"rank": 1},
        checks=(never_done(1), stack(1, "# faulthandler", "segfault")),
    ),
    "is killed": Fault("killed", {1: (None, "SIGKILL", "self")}, "memory", flags={"rank": 1}),
    "hangs in a collective": Fault(
        "receives",
        {},
        script="waits.py",
        stuck=2,
        checks=(stack(0, "barrier", "waits.py"), stack(1, "recv", "waits.py"), leaked_processes(0)),
    ),
    "fills the disk": Fault("disk_full", {0: FAILED}, "disk", flags={"rank": 0}),
    # Both fail: the launcher may end one before it has failed by itself.
    "cannot import what it needs": Fault(
        "none", {}, "import", (failed_together,), script="no_kit.py"
    ),
}


# With torchrun each takes ten times as long: the gate runs one of them there.
LAUNCHES = [
    pytest.param(
        name,
        launcher,
        marks=[pytest.mark.slow] if launcher == "torchrun" and name != "raises" else [],
    )
    for name in FAULTS
    for launcher in ("torchrun", "forkserver")
]


@pytest.mark.parametrize(("name", "launcher"), LAUNCHES, indirect=["launcher"])
def test_faulty_rank_gets_its_outcome(tmp_path: Path, launcher: Launcher, name: str) -> None:
    fault = FAULTS[name]
    does, flags = (
        (fault.does, fault.flags) if isinstance(fault.does, str) else ("each", {"each": fault.does})
    )
    ranks = len(flags.get("each", "ab"))
    attempt = attempt_of(
        tmp_path / "a", does, fault.script, deadline=400, world_size=ranks, **flags
    )
    result = (
        launched_until(launcher, attempt, fault.stuck)
        if fault.stuck
        else launched(launcher, attempt)
    )
    assert result["attempt"]["launcher"] == launcher.name and "retried" not in result["attempt"]
    assert result["attempt"]["timed_out"] == bool(fault.stuck) and result["attempt"]["wall_s"] < 400
    assert (result["infra_error"] or {}).get("kind") == fault.infra_error, result["infra_error"]
    assert {rank: ends(result)[rank] for rank in fault.ends} == fault.ends
    for number, check in enumerate(fault.checks):
        assert check(result), (number, result["ranks"], result["attempt"])
