"""Lies in what ranks left behind: a training's observation, and one of a failure and its fix, judged after an edit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from judging import PEER, as_promised, ended, failed, observation, ok, record
from repro_matrix.config import catalog as catalogue
from repro_matrix.grading import verdict
from repro_matrix.grading.grade import grade

from .lie import Bench, Lie

Json = dict[str, Any]
KNOWN = catalogue.load()
TRAIN = KNOWN.cases["train-step"]
FAILS = KNOWN.cases["ddp-unfinished-reduction"]
SIGNATURE = "Expected to have finished reduction in the prior iteration before starting a new one"
DDP = "torch.nn.parallel.distributed"
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}


def settings(case: str, strategy: str) -> Json:
    flags = {name: flag.default for name, flag in KNOWN.cases[case].flags.items()}
    return {"strategy": copy.deepcopy(KNOWN.raw["strategy"][strategy]), "flags": flags, "steps": 2}


def numbers(name: str, got: Any = 1e-7, want: Any = 0.0, tolerance: Any = 1e-6) -> Json:
    return {
        "name": name, "got": got, "want": want, "tolerance": tolerance, "looked_at": "42 tensors", "passed": True,
        "at": 5.0,
    }  # fmt: skip


def trained(rank: int, case: str, strategy: str) -> Json:
    """A rank that trained, and proved all that the case asks for."""
    checks = [
        numbers("steps", 2, 2, 0),
        *(numbers(name) for name in ("gradient", "updates", "rounding")),
        numbers("loss", [2.1, 2.0], [2.1, 2.0]),
        numbers("batches", [2, 2], [2, 2], 0),
        numbers("checkpoint", 0, 0, 0),
    ]
    more = as_promised(settings(case, strategy), 2, KNOWN.cases[case].proof.in_force)
    made = record(rank, schema=2, checks=checks, done_at=10.0, pid=100 + rank, versions=VERSIONS, **more)
    return ok(rank, pid=100 + rank, record=made)


def frame(place: str, function: str) -> Json:
    file = f"/venv/lib/python3.11/site-packages/{place.replace('.', '/')}.py"
    return {"file": file, "line": 7, "function": function, "module": place, "place": place, "code": ""}


def fires(rank: int) -> Json:
    script = {**frame("repros.ddp_unfinished_reduction", "body"), "file": "/x/repros/ddp_unfinished_reduction.py"}
    error = {
        "type": "RuntimeError", "module": "builtins", "bases": ["Exception"], "message": SIGNATURE,
        "frames": [script, frame(DDP, "forward")], "cause": None,
    }  # fmt: skip
    return failed(rank, error)


def _training(plants: Sequence[Any]) -> list[str]:
    said = []
    for plant in plants:
        seen = observation(*(trained(rank, "train-step", "fsdp") for rank in (0, 1)),
                           settings=settings("train-step", "fsdp"), versions=VERSIONS)  # fmt: skip
        if plant:
            plant(seen)
        found = verdict.judge(TRAIN, {"control": [grade(TRAIN, "control", seen, KNOWN.cases)]})["control"]
        said.append(f"{found.name}: {found.reason}")
    return said


def _failure(plants: Sequence[Any]) -> list[str]:
    said = []
    for plant in plants:
        made = settings("ddp-unfinished-reduction", "ddp")
        arms = {
            "broken": observation(fires(0), fires(1), settings=made),
            "find-unused": observation(
                *(trained(rank, "ddp-unfinished-reduction", "ddp") for rank in (0, 1)),
                settings={**made, "flags": {**made["flags"], "find_unused": True}},
            ),
        }
        if plant:
            plant(arms)
        outcomes = {name: [grade(FAILS, name, seen, KNOWN.cases)] for name, seen in arms.items()}
        found = verdict.judge(FAILS, outcomes)["find-unused"]
        said.append(f"{found.name}: {found.reason}")
    return said


# --- edits of a training's observation


def check(name: str, **changes: Any) -> Callable[[Json], None]:
    """The last rank's check of that name, changed."""

    def plant(seen: Json) -> None:
        found = next(one for one in seen["ranks"][1]["record"]["checks"] if one["name"] == name)
        found.update(changes)

    return plant


def last(**changes: Any) -> Callable[[Json], None]:
    """The last rank, changed; ``record`` is merged into its record."""

    def plant(seen: Json) -> None:
        more = dict(changes)
        if isinstance(more.get("record"), dict):
            more["record"] = {**seen["ranks"][1]["record"], **more["record"]}
        seen["ranks"][1].update(more)

    return plant


def attempt(**changes: Any) -> Callable[[Json], None]:
    return lambda seen: seen["attempt"].update(changes)


def twice(seen: Json) -> None:
    checks = seen["ranks"][1]["record"]["checks"]
    checks.append({**checks[0]})


def without_check(seen: Json) -> None:
    made = seen["ranks"][1]["record"]
    made["checks"] = [one for one in made["checks"] if one["name"] != "updates"]


def in_force(what: str, every: bool = True, **changes: Any) -> Callable[[Json], None]:
    def plant(seen: Json) -> None:
        for rank in seen["ranks"][0 if every else 1 :]:
            for item in rank["record"]["in_force"]:
                if item["what"] == what:
                    item.update(changes)

    return plant


def without_evidence(seen: Json) -> None:
    for rank in seen["ranks"]:
        rank["record"]["in_force"] = []


def one_rank_as_two(seen: Json) -> None:
    del seen["ranks"][1]


def only_rank_zero_left(seen: Json) -> None:
    """Both entries are the same rank's."""
    seen["ranks"][1] = copy.deepcopy(seen["ranks"][0])


def all_checks(name: str, **changes: Any) -> Callable[[Json], None]:
    """Every rank's check of that name, changed."""

    def plant(seen: Json) -> None:
        for rank in seen["ranks"]:
            for one in rank["record"]["checks"]:
                one.update(changes if one["name"] == name else {})

    return plant


def of_an_older_kit(seen: Json) -> None:
    """Whose checks were believed: wrong numbers that call themselves passed."""
    for rank in seen["ranks"]:
        rank["record"]["schema"] = 1
        for one in rank["record"]["checks"]:
            one.update(got=0.9, passed=True)


def without_promises(seen: Json) -> None:
    del seen["attempt"]["settings"]["strategy"]["promises"]
    without_evidence(seen)


def without_strategy(seen: Json) -> None:
    del seen["attempt"]["settings"]["strategy"]
    without_evidence(seen)


def promising(promises: Json) -> Callable[[Json], None]:
    def plant(seen: Json) -> None:
        seen["attempt"]["settings"]["strategy"]["promises"] = promises
        without_evidence(seen)

    return plant


def of_an_older_engine(seen: Json) -> None:
    """Which stored neither releases nor a fingerprint in an attempt, nor promises."""
    del seen["attempt"]["versions"]
    without_promises(seen)


def without(key: str) -> Callable[[Json], None]:
    """The last rank's record does not hold it."""

    def plant(seen: Json) -> None:
        del seen["ranks"][1]["record"][key]

    return plant


def on_rank_zero(seen: Json) -> None:
    seen["ranks"][0]["record"]["in_force"].append({"what": "checkpointing", "got": 4, "least": 1})


def one_process(seen: Json) -> None:
    for rank in seen["ranks"]:
        rank["pid"] = rank["record"]["pid"] = 100


def two_releases(seen: Json) -> None:
    """Nobody says which was planned."""
    del seen["attempt"]["versions"]
    seen["attempt"]["fingerprint"] = "f"
    versions = seen["ranks"][1]["record"]["versions"]
    seen["ranks"][1]["record"]["versions"] = {**versions, "torch": "2.12.0"}


def settings_say(key: str, value: Any) -> Callable[[Json], None]:
    return lambda seen: seen["attempt"]["settings"].update({key: value})


LOOK = {"at_s": 1.0, "ended": False, "cpu_s": 1.0, "io": 10, "busy": True, "phase": "step 0", "stack": "a",
        "entered": "a", "inside": "", "spins": False}  # fmt: skip


def slow(seen: Json) -> None:
    """At the deadline the ranks still moved between two looks."""
    seen["attempt"].update(timed_out=True, working_s=1.0, hang={"starting": False, "never_meet": None, "limit_s": 120})
    for rank in seen["ranks"]:
        rank.update({**ended(rank["rank"], "deadline", "SIGKILL"), "pid": None})
        rank["looks"] = [LOOK, {**LOOK, "at_s": 5.0, "cpu_s": 5.0, "io": 999, "phase": "step 1", "stack": "b"}]


TRAINING = Bench(
    "training",
    "its observation judged",
    "^HEALTHY",
    _training,
    (
        Lie("passed=True with wrong numbers", "P4", check("updates", got=0.5), "INCONCLUSIVE.*contradictory"),
        Lie("passed=False with right numbers", "P4", check("updates", passed=False), "INCONCLUSIVE.*contradictory"),
        Lie("a NaN that calls itself passed", "P1", check("updates", got="nan"), "^(INCONCLUSIVE|UNHEALTHY)"),
        Lie("a NaN among a list's numbers", "P1", check("loss", got=[2.1, "nan"], passed=False), "UNHEALTHY.*loss"),
        Lie("a NaN wanted and got", "P1", check("loss", got=["nan"] * 2, want=["nan"] * 2), "^(INCONCL|UNHEALTHY)"),
        Lie("a tolerance that lets a zero pass", "P3", check("steps", tolerance=2), "so wide a tolerance"),
        Lie("an infinite tolerance", "P3", check("updates", tolerance="inf"), "INCONCLUSIVE.*tolerance"),
        Lie("a negative tolerance", "P3", check("updates", tolerance=-1.0), "INCONCLUSIVE.*tolerance"),
        Lie("a tolerance of true", "P3", check("updates", tolerance=True), "INCONCLUSIVE"),
        Lie('check("steps", True)', "P4", check("steps", got=True, want=True, tolerance=None, looked_at=""),
            "does not say what it looked at"),
        Lie("got is a string where a number belongs", "bad input", check("steps", got="2"), "INCONCLUSIVE.*no number"),
        Lie("got is 1e308", "bad input", check("updates", got=1e308, passed=False), "UNHEALTHY.*updates"),
        Lie("got is 10**400", "bad input", check("updates", got=10**400, passed=False), "UNHEALTHY.*updates"),
        Lie("fewer numbers than wanted", "P4", check("loss", got=[2.1]), "INCONCLUSIVE.*1 numbers against 2"),
        Lie("a check after done", "bad input", check("updates", at=11.0), "INCONCLUSIVE.*before the script was done"),
        Lie("a check that was never dated", "bad input", check("updates", at=None), "INCONCLUSIVE.*before the script"),
        Lie("a check made twice", "P4", twice, "INCONCLUSIVE.*made 2 times"),
        Lie("a check not made on one rank", "own", without_check, "INCONCLUSIVE.*updates was not made on rank 1"),
        Lie("a record forged by another process", "bad input", last(record={"pid": 4711}), "INCONCLUSIVE.*4711"),
        Lie("a record of another rank", "bad input", last(record={"rank": 0}), "INCONCLUSIVE.*rank 0"),
        Lie("one rank's record twice, the other's missing", "bad input", only_rank_zero_left,
            "^(INCONCLUSIVE|UNHEALTHY)"),
        Lie("a rank missing", "P5", one_rank_as_two, "UNHEALTHY.*left nothing behind"),
        Lie("exit 0 without done", "P5", last(record={"done": False, "done_at": None}), "UNHEALTHY.*done marker"),
        Lie("exit 0 without a record", "P5", last(record=None), "UNHEALTHY.*done marker"),
        Lie("done, and then killed", "P5", last(exit_code=None, signal="SIGSEGV"), "UNHEALTHY.*SIGSEGV"),
        Lie("done, and exit code 1", "P5", last(exit_code=1), "UNHEALTHY.*exit code 1"),
        Lie("sharded in name only", "P6", in_force("parameters", got=1000), "not in force: every rank"),
        Lie("gradients that are not sharded", "P6", in_force("gradients", got=1000), "not in force: every rank"),
        Lie("one rank that updates nothing", "P6", in_force("updates", False, got=0), "not in force.*updates"),
        Lie("a process group of one", "P6", in_force("group", got=1), "process group of rank 0 has 1 of 2"),
        Lie("a backend that was not asked for", "P6", in_force("group", backend="mpi"), "gloo was not in force"),
        Lie("no reduction in a step", "P6", in_force("collectives", got={"gather": 3}), "no reduce between ranks"),
        Lie("no evidence of being in force", "P6", without_evidence, "INCONCLUSIVE.*no evidence"),
        Lie("shares of NaN", "P6", in_force("parameters", got="nan"), "INCONCLUSIVE.*left no evidence"),
        Lie("a rank on another transformers", "P10", last(record={"versions": {"transformers": "4.39.3"}}),
            "INCONCLUSIVE.*stack changed.*4.39.3"),
        Lie("a record that calls itself an older kit's", "more", of_an_older_kit, "INCONCLUSIVE.*older kit's"),
        Lie("settings without the strategy's promises", "more", without_promises, "INCONCLUSIVE.*promises"),
        Lie("settings with no strategy at all", "more", without_strategy, "INCONCLUSIVE.*promises"),
        Lie("promises of nothing", "more", promising({}), "INCONCLUSIVE.*promises"),
        Lie("a record of today as of an older engine", "more", of_an_older_engine, "INCONCLUSIVE.*promises"),
        Lie("in force on one rank only", "P6", last(record={"in_force": []}), "INCONCLUSIVE.*group on rank 1"),
        Lie("a record without what was in force", "P6", without("in_force"), "INCONCLUSIVE.*holds no in_force"),
        Lie("a record without what was read", "own", without("read"), "INCONCLUSIVE.*holds no read"),
        Lie("a recomputation on one rank only", "P6", on_rank_zero, "INCONCLUSIVE.*checkpointing.*on rank 1"),
        Lie("fewer steps wanted than were to be made", "more", all_checks("steps", got=1, want=1), "wanted 1, the att"),
        Lie("nine tenths of an update as rounding", "more", all_checks("updates", got=0.9, tolerance=0.95),
            "so wide a tolerance"),
        Lie("one process as two ranks", "more", one_process, "INCONCLUSIVE.*one process"),
        Lie("ranks on two releases", "more", two_releases, "INCONCLUSIVE.*stack changed.*rank 0"),
        Lie("yesterday's record", "more", last(record={"started": -1e5}), "INCONCLUSIVE.*before the attempt"),
        Lie("a record of one rank alone", "more", last(record={"world_size": 1}), "INCONCLUSIVE.*of 1 ranks"),
        Lie("done, and never ended", "more", last(record={"ended": None}), "INCONCLUSIVE.*never ended"),
        Lie("another case's attempt", "more", settings_say("case", "ddp-ready-once"), "INCONCLUSIVE.*of case ddp"),
        Lie("slow ranks as a hang", "P14", slow, "INCONCLUSIVE.*too slow"),
        Lie("an interrupted attempt that was done", "more", attempt(interrupted=True), "INCONCLUSIVE.*interrupted"),
    ),
)  # fmt: skip


# --- edits of a failure's observations: the broken arm must not fire, or the fix must not hold


def at(arm: str, plant: Callable[[Json], None]) -> Callable[[Json], None]:
    return lambda arms: plant(arms[arm])


def frames(place: str | None, file: str | None = None) -> Callable[[Json], None]:
    """The innermost frame is somewhere else."""

    def plant(seen: Json) -> None:
        for rank in seen["ranks"]:
            inner = rank["record"]["exception"]["frames"][-1]
            inner["place"] = place
            if file:
                inner["file"] = file

    return plant


def error(**changes: Any) -> Callable[[Json], None]:
    def plant(seen: Json) -> None:
        for rank in seen["ranks"]:
            rank["record"]["exception"].update(changes)

    return plant


def printed(seen: Json) -> None:
    """Nothing was raised: the text stands in the output."""
    for number, rank in enumerate(seen["ranks"]):
        honest = trained(number, "ddp-unfinished-reduction", "ddp")
        rank.update(honest, log_tail=f"RuntimeError: {SIGNATURE}\n")


def by_the_peer(seen: Json) -> None:
    """The known text in a message that only says that a peer is gone, from gloo."""
    rank = seen["ranks"][1]["record"]
    rank["exception"].update(message=PEER)
    rank["exception"]["frames"][-1].update(place="torch.distributed.distributed_c10d", function="wait")
    first = seen["ranks"][0]
    first.update(exit_code=None, signal="SIGKILL", ended_by="self")
    first["record"].update(exception=None, ended=None)


def as_a_cause(seen: Json) -> None:
    """The known failure was being handled when another error was raised."""
    for rank in seen["ranks"]:
        known = rank["record"]["exception"]
        other = {**known, "message": "out of patience", "frames": [known["frames"][0], frame("accelerate.x", "y")]}
        rank["record"]["exception"] = {**other, "cause": known}


def unread(seen: Json) -> None:
    for rank in seen["ranks"]:
        rank["record"]["read"]["flags"].remove("find_unused")


def infra_that_fires(seen: Json) -> None:
    seen["infra"] = {"kind": "memory", "message": "the machine ran out of memory"}


FAILURE = Bench(
    "failure",
    "two observations judged",
    "^FIX_HOLDS",
    _failure,
    (
        Lie("a script that raises the signature itself", "P5", at("broken", frames("repros.x", "/x/repros/x.py")),
            "INCONCLUSIVE.*script itself fails"),
        Lie("exec with a borrowed filename", "P5", at("broken", frames("")), "INCONCLUSIVE.*not what"),
        Lie("a package of that name in a work folder", "P5", at("broken", frames("", "/elsewhere/x/torch/nn.py")),
            "INCONCLUSIVE.*script itself fails"),
        Lie("another package with the known text", "P5", at("broken", frames("accelerate.utils.other")),
            "CHANGED.*accelerate, declared torch"),
        Lie("another type with the known text", "P5", at("broken", error(type="ValueError")), "CHANGED.*ValueError"),
        Lie("another text of the known type", "P5", at("broken", error(message="Expected something else")),
            "CHANGED.*Expected something else"),
        Lie("the known failure as a handled cause", "P5", at("broken", as_a_cause), "CHANGED.*out of patience"),
        Lie("output that prints the signature", "P5", at("broken", printed), "NOT_FIRING"),
        Lie("a peer's error as the known one", "P5", at("broken", by_the_peer), "CHANGED.*SIGKILL"),
        Lie("the failure of a machine without memory", "more", at("broken", infra_that_fires), "INCONCLUSIVE.*memory"),
        Lie("a flag that is never read", "own", at("find-unused", unread), "find_unused was never read"),
        Lie("a fix that does not train", "P2", at("find-unused", check("steps", got=0, passed=False)), "FIX_UNMASKS"),
        Lie("a fix that proves nothing", "own", at("find-unused", without_check), "INCONCLUSIVE.*no-proof"),
        Lie("a fix on one rank of two", "P6", at("find-unused", one_rank_as_two), "FIX_UNMASKS.*left nothing"),
    ),
)  # fmt: skip
