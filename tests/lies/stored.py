"""Lies in stored documents: a published measurement, edited, and read as the claims, `accept` and a run's history do.

The honest thing is a published document of today's stack beside one of an older stack (hand-made from it: the failure
fires there, too), read through harness/repro_matrix/grading/regrade.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from repro_matrix.analysis.claims.ledger import ledger
from repro_matrix.config import catalog as catalogue
from repro_matrix.grading.regrade import regrade
from repro_matrix.paths import BASELINE, ROOT
from repro_matrix.records import validate as doubt
from repro_matrix.results.accept_checks import refusals
from repro_matrix.results.store import Store

from .lie import Bench, Lie

Json = dict[str, Any]
KNOWN = catalogue.load()
CASE = "ddp-unfinished-reduction"
FIX = "find-unused"
CLAIM = "6-unfinished-find-unused"
OLD = "torch2.2.2-tf4.39.3-58c32a"


def published() -> Json:
    """The newest stack's document, with one attempt an arm."""
    found = [copy.deepcopy(d) for d in Store(BASELINE).documents(cases=[CASE])]
    document = next(d for d in found if d["stack"]["name"] == "current")
    for arm in document["arms"].values():
        del arm["attempts"][1:]
    return document


def attempts_of(document: Json, arm: str, under: str) -> list[Json]:
    """The attempts of an arm, as if they had been made under another's name."""
    made = copy.deepcopy(document["arms"][arm]["attempts"])
    for attempt in made:
        if "fingerprint" in attempt["observation"]["attempt"]:
            attempt["observation"]["attempt"]["fingerprint"] = document["arms"][under]["fingerprint"]
        attempt["observation"]["attempt"]["settings"] = document["arms"][under]["settings"]
    return renewed(made, arm + under)


def renewed(attempts: list[Json], mark: object) -> list[Json]:
    """The same attempts as if they had been made once more: with names and processes of their own."""
    for attempt in attempts:
        attempt["observation"]["attempt"]["id"] += f"-{mark}"
        for rank in attempt["observation"]["ranks"]:
            rank["pid"] += 1 + crc32(str(mark).encode())
            rank["record"]["pid"] = rank["pid"]
    return attempts


def older(document: Json) -> Json:
    """The same on older releases."""
    made = copy.deepcopy(document)
    made["stack"].update(name="older", label=OLD)
    made["stack"]["versions"].update(torch="2.2.2", transformers="4.39.3")
    for arm in made["arms"].values():
        arm["stack"] = "older"
    made["path"] = f"baseline/cpu/{OLD}.jsonl:2"
    _ranks_on(made)
    return made


def _ranks_on(document: Json) -> None:
    """Its ranks had the versions that it says."""
    for seen in (attempt["observation"] for arm in document["arms"].values() for attempt in arm["attempts"]):
        for had in (
            seen["attempt"].get("versions"),
            *((rank["record"] or {}).get("versions") for rank in seen["ranks"]),
        ):
            had = had or {}
            had.update({name: document["stack"]["versions"][name] for name in ("torch", "transformers") if name in had})


def quiet(document: Json) -> None:
    """The broken arm does not fire there: it did what the fix did."""
    document["arms"]["broken"]["attempts"] = attempts_of(document, FIX, "broken")


def _said(*documents: Json) -> str:
    """The first document's verdict, the claim's status, and what was remarked on."""
    for document in documents:  # as harness/repro_matrix/results/store.py does where it reads it
        try:
            doubt.cell({key: value for key, value in document.items() if key != "path"})
        except ValueError as error:
            return f"left out: damaged ({error})"
    found = regrade(documents, KNOWN.cases)
    verdicts = [d["verdicts"].get(FIX, {}).get("name", "none") for d in found.documents[:1]]
    claim = next(c for c in ledger([KNOWN.cases[CASE]], found.documents) if c.id == CLAIM)
    notes = [note.replace(f"{documents[0]['path']}: ", "").replace(str(ROOT), "") for note in found.notes]
    return "; ".join([*(verdicts or ["left out"]), f"claim {claim.status}", *notes])


def _read(plants: Sequence[Any]) -> list[str]:
    said = []
    for plant in plants:
        document = published()
        if plant:
            plant(document)
        said.append(_said(document))
    return said


def _compared(plants: Sequence[Any]) -> list[str]:
    """Today the broken arm is clean; on an older stack it fired."""
    said = []
    for plant in plants:
        document = published()
        old = older(document)
        quiet(document)
        if plant:
            plant(old)
        said.append(_said(document, old))
    return said


def edit(*path: Any, to: Any) -> Callable[[Json], None]:
    def plant(document: Json) -> None:
        inner: Any = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to

    return plant


def the(arm: str, *path: Any, to: Any) -> Callable[[Json], None]:
    return edit("arms", arm, "attempts", 0, *path, to=to)


def moved(document: Json) -> None:
    """It lies in another stack's file."""
    document["path"] = str(Path(document["path"]).with_name(f"{OLD}.jsonl:2"))


def fingerprint(document: Json) -> None:
    document["arms"][FIX]["fingerprint"] = "f1"
    document["arms"][FIX]["attempts"][0]["observation"]["attempt"]["fingerprint"] = "f2"


def arm_for_arm(document: Json) -> None:
    """The fix that holds, stored as the one that does not."""
    document["arms"]["bucket-view"]["attempts"] = attempts_of(document, FIX, "bucket-view")
    document["arms"][FIX]["attempts"] = attempts_of(published(), "bucket-view", FIX)


def replaced_between(document: Json) -> None:
    """A package was replaced between the attempts."""
    for rank in document["arms"][FIX]["attempts"][0]["observation"]["ranks"]:
        rank["record"]["versions"]["torch"] = "2.12.0"


def of_broken(*path: Any, to: Any) -> Callable[[Json], None]:
    return edit("arms", "broken", "settings", *path, to=to)


def forged(document: Json) -> None:
    """It says that it fired; its observation does not."""
    outcome = document["arms"]["broken"]["attempts"][0]["outcome"]
    quiet(document)
    document["arms"]["broken"]["attempts"][0]["outcome"] = outcome


def as_older(document: Json) -> None:
    """Today's own measurement under an older version's number."""
    document.update(copy.deepcopy(published()))
    document["stack"]["versions"]["torch"] = "2.2.2"


def another_text(document: Json) -> None:
    """The older stack failed with another error than the known one, and calls it by that name."""
    for rank in document["arms"]["broken"]["attempts"][0]["observation"]["ranks"]:
        rank["record"]["exception"]["message"] = "Expected something else"


def newer(document: Json) -> None:
    """What fired is newer, not older: nothing was fixed."""
    document["stack"].update(label="torch2.99.0-tf5.99.0-000000")
    document["stack"]["versions"].update(torch="2.99.0", transformers="5.99.0")
    document["path"] = document["path"].replace(OLD, "torch2.99.0-tf5.99.0-000000")
    _ranks_on(document)


def half_of_it(document: Json) -> None:
    """The older stack fired once in two attempts."""
    document["arms"]["broken"]["attempts"] += attempts_of(document, FIX, "broken")


def of_another_arm(document: Json) -> None:
    arm = document["arms"][FIX]
    for settings in (arm["settings"], *(made["observation"]["attempt"]["settings"] for made in arm["attempts"])):
        settings["arm"] = "broken"


def told_twice(document: Json) -> None:
    """What was seen once stands there as two of two."""
    document["arms"][FIX]["attempts"] *= 2


def told_twice_by_name(document: Json) -> None:
    attempts = document["arms"][FIX]["attempts"]
    attempts.append(copy.deepcopy(attempts[0]))
    attempts[1]["observation"]["attempt"]["id"] += "-again"


STORED = Bench(
    "stored",
    "a published document edited, judged anew",
    r"^FIX_HOLDS; claim upheld$",
    _read,
    (
        Lie("an edited verdict", "P10", edit("verdicts", FIX, "name", to="FIX_BROKEN"),
            "^FIX_HOLDS; claim upheld.*it says FIX_BROKEN"),
        Lie("an edited outcome", "P10", the(FIX, "outcome", "outcome", to="fires"), "^FIX_HOLDS.*it says fires"),
        Lie("an outcome edited to clean", "P10", the("broken", "outcome", "outcome", to="clean"),
            "^FIX_HOLDS.*it says clean, its observation fires"),
        Lie("edited versions", "P10", edit("stack", "versions", "transformers", to="5.22.0"), "^left out; claim untes"),
        Lie("an edited label", "P10", edit("stack", "label", to=OLD), "^left out"),
        Lie("a document in another stack's folder", "P10", moved, "^left out.*its file"),
        Lie("an edited fingerprint", "bad input", fingerprint, "^left out.*fingerprint"),
        Lie("one arm's attempts under another's name", "P12", arm_for_arm, "^(?!FIX_HOLDS)"),
        Lie("a package replaced between attempts", "P10", replaced_between, "^INCONCLUSIVE.*stack changed"),
        Lie("an arm that the case does not have", "P10", edit("case", to="no-such-case"), "^left out; claim untested"),
        Lie("another strategy's name", "more", edit("strategy", to="fsdp2"), "^left out.*ran with strategy ddp"),
        Lie("another model's name", "more", edit("model", to="llama-3.2-1b"), "^left out.*ran with model"),
        Lie("tiny as full size", "more", edit("scale", to="full"), "^left out.*ran with scale tiny"),
        Lie("random weights as real ones", "more", edit("weights", to="hub"), "^left out.*ran with weights random"),
        Lie("two ranks as eight", "more", edit("ranks", to=8), "^left out.*ran with ranks 2"),
        Lie("a CPU's measurement as a GPU's", "more", edit("hardware", "accelerator", to="cuda"), "^left out.*cpu"),
        Lie("one machine's profile as another's", "more", edit("hardware", "profile", to="a100x8"), "^left out.*fold"),
        Lie("a measurement of the future", "more", edit("provenance", "started", to=9e12), "^left out.*begun after"),
        Lie("another arm's attempt", "more", the(FIX, "observation", "attempt", "settings", "arm", to="broken"),
            "^left out.*its arm is not what its attempt ran with"),
        Lie("another arm's attempt, and its settings", "more", of_another_arm, "^INCONCLUSIVE.*attempt of arm broken"),
        Lie("one attempt told twice", "more", told_twice, "^left out.*told twice"),
        Lie("one attempt told twice, under a name of its own", "more", told_twice_by_name, "^left out.*told twice"),
        Lie("an arm taken out", "more", lambda document: document["arms"].pop("bucket-view"),
            "^left out.*verdict of arm bucket-view"),
        Lie("another stack's name", "more", edit("stack", "name", to="known"), "^left out.*measured on stack current"),
        Lie("another seed", "more", the(FIX, "observation", "attempt", "seed", to=7), "^left out.*seed 0, its att"),
        Lie("an arm without attempts in a complete cell", "more", edit("arms", "bucket-view", "attempts", to=[]),
            "^left out.*neither launched nor skipped"),
        Lie("an observation without ranks", "P10", the(FIX, "observation", "ranks", to=[]), "^INCONCLUSIVE"),
        Lie("an observation that is a text", "P10", the(FIX, "observation", to="clean"),
            r"^left out: damaged \(arms.find-unused.attempts\[0\].observation: "),
    ),
)  # fmt: skip


HISTORY = Bench(
    "history",
    "an older stack's document edited, compared with today's",
    "^UPSTREAM_FIXED",
    _compared,
    (
        Lie(
            "another model's shape as history",
            "P11",
            of_broken("model", "config", "hidden_size", to=1024),
            "^NOT_FIRING",
        ),
        Lie("four ranks as the history of two", "P11", of_broken("world_size", to=4), "^NOT_FIRING"),
        Lie("more steps as the history of few", "P11", of_broken("steps", to=40), "^NOT_FIRING"),
        Lie("other flags as the history of these", "P11", of_broken("flags", "static_graph", to=True), "^NOT_FIRING"),
        Lie("history whose observation never fired", "P10", forged, "^NOT_FIRING.*it says fires"),
        Lie("history that failed otherwise", "P10", another_text, "^NOT_FIRING.*it says fires"),
        Lie("today's measurement as an older one", "P10", as_older, "^NOT_FIRING.*left out"),
        Lie("a newer stack's firing as history", "P11", newer, "^NOT_FIRING"),
        Lie("a GPU's firing as a CPU's history", "P11", edit("hardware", "accelerator", to="cuda"), "^NOT_FIRING"),
        Lie("a firing of one attempt in two", "P11", half_of_it, "^NOT_FIRING"),
    ),
)


# --- what `accept` refuses


def _publish(plants: Sequence[Any]) -> list[str]:
    said = []
    for plant in plants:
        document = published()
        document["provenance"].update(git_commit="c0ffee", git_dirty=False)
        document["arms"] = {name: document["arms"][name] for name in ("broken", FIX)}
        document["verdicts"] = {FIX: document["verdicts"][FIX]}
        for arm in document["arms"].values():
            arm["attempts"] = [_another(arm["attempts"][0], number) for number in range(3)]
        more = (plant(document) or []) if plant else []
        found = regrade([document, *more], KNOWN.cases)
        told = [*map(str, refusals(found.documents)), *(why for _, why in found.left_out)]
        said.append("; ".join(told) or "published")
    return said


def _another(attempt: Json, number: int) -> Json:
    """One more attempt that came out alike."""
    return renewed([copy.deepcopy(attempt)], number)[0]


def one_attempt_thrice(document: Json) -> None:
    for arm in document["arms"].values():
        arm["attempts"] = [copy.deepcopy(arm["attempts"][0]) for _ in range(3)]


def other_machine(document: Json) -> list[Json]:
    other = copy.deepcopy(document)
    other["hardware"]["cpu"] = "another"
    other["key"] = "another"
    return [other]


def two_of_three_lost(document: Json) -> None:
    for attempt in document["arms"][FIX]["attempts"][1:]:
        attempt["observation"]["infra"] = {"kind": "memory", "message": "none left"}
        attempt["outcome"]["outcome"] = "clean"


def one_attempt(document: Json) -> None:
    del document["arms"]["broken"]["attempts"][1:]


def harmful(document: Json) -> None:
    quiet(document)
    document["arms"][FIX]["attempts"] = [
        _another(attempts_of(published(), "bucket-view", FIX)[0], number) for number in range(3)
    ]


PUBLISHED = Bench(
    "published",
    "asked of what `accept` refuses",
    "^published$",
    _publish,
    (
        Lie("measured on a changed tree", "P15", edit("provenance", "git_dirty", to=True), "not committed"),
        Lie("measured outside a checkout", "P15", edit("provenance", "git_commit", to=None), "outside a checkout"),
        Lie("an arm with one attempt", "P15", one_attempt, "arm broken: 1 attempt that counts"),
        Lie("one attempt three times", "P15", one_attempt_thrice, "told twice"),
        Lie("infra that calls itself clean", "P15", two_of_three_lost, f"arm {FIX}: 1 attempt that counts"),
        Lie("two machines under one profile", "P15", other_machine, "another machine"),
        Lie("a broken arm that never fired, with a fix that fails", "P15",
            harmful, "FIX_HARMFUL"),
    ),
)  # fmt: skip
