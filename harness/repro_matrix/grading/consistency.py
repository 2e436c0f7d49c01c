"""Whether an attempt's records can be what its own ranks left, and what its settings asked for. Pure.

A forgery that is consistent in everything (records, settings, versions, fingerprint, times) is believed: records are
not signed. What contradicts itself is no evidence.
"""

from __future__ import annotations

from repro_matrix.config.schema import Case
from repro_matrix.grading.observation import Attempt, Rank, number
from repro_matrix.records import paths as place
from repro_matrix.records.document import Document
from repro_matrix.records.observation import Settings

NEWER = ("done_at",)  # what records of schema 1 do not hold
EVIDENCE = ("in_force", "read")  # what the kit puts into every record of schema 2 before the script's body runs
SKEW_S = 60.0  # by how much the clocks of a node's ranks and of the controller may disagree


def doubt(case: Case, arm: str, attempt: Attempt) -> str | None:
    """The first reason why the attempt's records are not what they say; None where there is none."""
    said = attempt.settings
    for key, here in (("case", case.slug), ("arm", arm)):
        if said.get(key) not in (None, here):
            return f"it is an attempt of {key} {said.get(key)}, not {here}"
    # Promises are as old as records of schema 2, and as the plan's releases and fingerprint in an attempt.
    recent = attempt.recent or any(rank.schema > 1 for rank in attempt.ranks)
    if recent and not said.get("strategy", {}).get("promises"):
        return "its settings hold none of the strategy's promises"
    pids: dict[int, int] = {}
    for rank in attempt.ranks:
        if rank.pid is not None and rank.pid in pids:
            return f"ranks {pids[rank.pid]} and {rank.rank} are one process"
        if rank.pid is not None:
            pids[rank.pid] = rank.rank
        problem = _of_rank(rank, attempt)
        if problem:
            return f"rank {rank.rank}: {problem}"
    return None


def _of_rank(rank: Rank, attempt: Attempt) -> str | None:
    record = rank.record
    if not rank.wrote:
        return None
    began = number(record.get("started"))
    if began is not None and attempt.started is not None and began < attempt.started - SKEW_S:
        return f"its record was begun {attempt.started - began:.0f} s before the attempt"
    size = record.get("world_size")
    if size is not None and attempt.world_size and size != attempt.world_size:
        return f"its record is of {size} ranks, the attempt of {attempt.world_size}"
    if rank.schema == 1:
        newer = [key for key in NEWER if key in record]
        return f"its record says that it is an older kit's, and holds {newer[0]}" if newer else None
    if rank.done and rank.at is None:
        return "its record says done, and was never ended"
    absent = [key for key in EVIDENCE if key not in record]
    return f"its record says done, and holds no {absent[0]}" if rank.done and absent else None


def versions_apart(attempt: Attempt) -> str | None:
    """Two ranks of one attempt on different releases."""
    seen: dict[str, tuple[str, int]] = {}
    for rank in attempt.ranks:
        for package, had in rank.record["versions"].items():
            first, where = seen.setdefault(package, (had, rank.rank))
            if "unknown" not in (first, had) and first != had:
                return f"rank {rank.rank} had {package} {had}, rank {where} {first}"
    return None


def other_steps(attempt: Attempt) -> str | None:
    """A count of steps that was compared with another number than the attempt was to make."""
    asked = attempt.settings.get("steps")
    for rank in attempt.ranks:
        for check in rank.record["checks"] if rank.schema > 1 else []:
            if asked is not None and check["name"] == "steps" and check.get("want") != asked:
                return f"check steps on rank {rank.rank} wanted {check.get('want')}, the attempt {asked}"
    return None


def contradiction(document: Document, case: Case) -> str | None:
    """Where what a document says of itself is not what its attempts ran with, in words; else None."""
    hardware = document["hardware"]
    ended = [-1.0]
    at, profile = place.read(document.get("path", "")), hardware["profile"]
    in_place = at.case == case.slug if at.line is None else at.stack == document["stack"].get("label")
    if in_place and at.hardware and profile and at.hardware != profile:
        return f"its folder says {at.hardware}, and its hardware {profile}"
    for name, arm in document["arms"].items():
        for attempt in arm["attempts"]:
            made = attempt["observation"]["attempt"]
            wrong = _of_attempt(document, name, arm["settings"], made["settings"])
            if wrong:
                return f"arm {name}: {wrong}"
            if made["seed"] != made["settings"].get("seed", made["seed"]):
                return f"arm {name}: its settings say seed {made['settings']['seed']}, its attempt {made['seed']}"
            ended.append(number(made["ended"]) or -1.0)
    wrong = _told_twice(document) or _of_arms(document, case)
    if wrong:
        return wrong
    started = number(document["provenance"]["started"])
    if started is not None and max(ended) >= 0 and started > max(ended) + SKEW_S:
        return "it says that it was begun after its last attempt had ended"
    if document["simulated"] is None and case.simulated:
        return f"case {case.slug} is simulated, and it does not say so"
    return None


def _told_twice(document: Document) -> str | None:
    """One attempt that stands in two places: by its name, or by a rank's process and when that began its record."""
    seen: dict[object, str] = {}
    for name, arm in document["arms"].items():
        for index, made in enumerate(arm["attempts"]):
            here, observation = f"attempt {index} of arm {name}", made["observation"]
            marks: list[object] = [name for name in [observation["attempt"]["id"]] if name]  # older launchers gave none
            for rank in observation["ranks"]:
                began = number(rank["record"].get("started")) if rank["record"] else None
                if rank.get("pid") is not None and began is not None:
                    marks.append((rank["pid"], began))
            for mark in marks:
                if seen.setdefault(mark, here) != here:
                    return f"{here} is {seen[mark]}, told twice"
    return None


def _of_arms(document: Document, case: Case) -> str | None:
    """What it says of an arm that it does not hold, or that another stack than its own and the case's measured."""
    for name in document["verdicts"]:
        if name not in document["arms"]:
            return f"it has a verdict of arm {name}, and no such arm"
    for name, arm in document["arms"].items():
        if document["complete"] and not arm["attempts"] and not arm["skipped"]:
            return f"it says that it is complete, and arm {name} was neither launched nor skipped"
        elsewhere = name in case.arms and case.arms[name].stack is not None
        if not elsewhere and arm.get("stack") not in (None, document["stack"]["name"]):
            return (
                f"arm {name} was measured on stack {arm.get('stack')}, the document is of {document['stack']['name']}"
            )
    return None


def _of_attempt(document: Document, name: str, settings: Settings, ran: Settings) -> str | None:
    planned, had_all = dict(settings), dict(ran)
    for key in sorted(had_all.keys() & planned.keys()):
        if had_all[key] != planned[key]:
            return f"its {key} is not what its attempt ran with"
    device, accelerator = ran.get("device", ""), document["hardware"]["accelerator"]
    if device in ("cpu", "cuda") and device != accelerator:
        return f"it ran on {device}, the document says {accelerator}"
    if name not in ("broken", "control"):
        return None  # a fix may be a change of axis
    model = ran.get("model", {})
    axes: tuple[tuple[str, object, object], ...] = (
        ("model", model.get("slug"), document["model"]),
        ("strategy", ran.get("strategy", {}).get("slug"), document["strategy"]),
        ("scale", model.get("scale"), document["scale"]),
        ("weights", model.get("weights"), document["weights"]),
        ("ranks", ran.get("world_size"), document["ranks"]),
    )
    for axis, had, said in axes:
        if had is not None and said != had:
            return f"it ran with {axis} {had}, the document says {said}"
    flags = ran.get("flags", {})
    for flag, value in document["flags"].items():
        if flag in flags and flags[flag] != value:
            return f"it ran with {flag}={flags[flag]}, the document says {value}"
    return None
