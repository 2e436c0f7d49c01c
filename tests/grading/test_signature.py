"""Signatures against observations: what is the known failure, and above all what is not.

The second half is about the catalogue's signatures: every part of every one is necessary. From an
observation made of a signature's parts, negatives are made that differ in one part. The signature
must refuse them all, and each of its mutants (message ``.*``, another type, package or check, no
frames) must take some for the failure. (test_baseline.py compares the stored observations.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from observations import (
    DIST,
    EXCEPTION,
    NORM,
    SCRIPT,
    SITE,
    case,
    check,
    ended,
    exception,
    failed,
    frame,
    matches,
    observation,
    ok,
    peer_failed,
    record,
)
from pydantic import ValidationError
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Signature
from repro_matrix.grading import signature as signature_module
from repro_matrix.grading.observation import Evidence
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import (
    message_patterns,
    near_misses,
    overbroad_signature,
    unrelated_messages,
)


def ranks_of(
    signature: dict[str, Any], *ranks: dict[str, Any], **attempt: Any
) -> tuple[int, ...] | None:
    """The ranks on which the observation shows the signature; None where it does not."""
    match = matches(
        Signature.model_validate({"name": "s", **signature}), observation(*ranks, **attempt)
    )
    return match.ranks if match else None


def finished(rank: int = 0, **changes: Any) -> dict[str, Any]:
    return ok(rank, record=record(rank, **changes))


FRAME = {"module": r"transformers\.models\.qwen2\..*", "function": "forward"}
TORCH, CHECKS = (
    frame("torch.nn.functional", "linear"),
    [frame("torch", "_check"), frame("torch", "_check_with")],
)
# Frames of a log name the file only.
GENERATED = [
    {**frame("", "<lambda>", "<string>"), "code_location": None},
    {**frame("builtins", "len", "<frozen>"), "code_location": None},
]

# (changes of the signature, the error, whether it matches)
EXCEPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "as declared": ({}, exception(), True),
    "by a base of its type": (
        {},
        exception("OutOfCheese", bases=["RuntimeError", "Exception"]),
        True,
    ),
    "raised in torch": ({"package": "torch"}, exception(frames=[SCRIPT, TORCH]), True),
    "raised again by torch for a DataLoader's worker": (
        {"package": "torch"},
        exception(frames=[SCRIPT, TORCH, frame("torch._utils", "reraise")]),
        False,
    ),
    "raised by torch._check": (
        {"package": "torch"},
        exception(frames=[SCRIPT, TORCH, *CHECKS]),
        True,
    ),
    "raised by torch._check for the script": (
        {"package": "torch"},
        exception(frames=[SCRIPT, *CHECKS]),
        False,
    ),
    "raised by a callback of the script": ({}, exception(frames=[SCRIPT, NORM, SCRIPT]), False),
    "raised by generated code": (
        {},
        exception(frames=[SCRIPT, frame("", "<module>", "<string>")]),
        False,
    ),
    "a script that calls itself upstream": (
        {},
        exception(frames=[{**SCRIPT, "module": NORM["module"]}]),
        False,
    ),
    "generated code without an origin is passed over": (
        {},
        exception(frames=[SCRIPT, NORM, *GENERATED]),
        True,
    ),
    "a frame without a module": (
        {},
        exception(frames=[SCRIPT, frame("", "f", f"{SITE}/transformers/x.py")]),
        True,
    ),
    "a declared frame": ({"frames": [FRAME]}, exception(), True),
    "a declared frame's other function": (
        {"frames": [{**FRAME, "function": "forw"}]},
        exception(),
        False,
    ),
    "a declared frame's other module": (
        {"frames": [{**FRAME, "module": "transformers"}]},
        exception(),
        False,
    ),
    "behind a wrapper that repeats it": (
        {},
        exception("ImportError", "failed: size mismatch in norm", [SCRIPT], cause=exception()),
        True,
    ),
    "handled while another was raised": (
        {},
        exception("ValueError", "another", [SCRIPT], cause=exception()),
        False,
    ),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exception_matches_by_all_its_parts(name: str) -> None:
    changes, error, expected = EXCEPTIONS[name]
    assert (
        ranks_of({**EXCEPTION, **changes}, failed(0, error), failed(1, error)) == (0, 1)
    ) is expected


def test_accelerator_and_message_of_the_backend() -> None:
    for device, expected in (("cuda", (0,)), ("cpu", None), ("", (0,))):
        assert (
            ranks_of({**EXCEPTION, "accelerator": "cuda"}, failed(0), settings={"device": device})
            == expected
        )
    for common, backend, matching in (
        ("common", "gloo", "gloo"),
        ("common", "cpu:gloo,cuda:nccl", "gloo nccl"),
        ("common", "mpi", "common"),
        (None, "mpi", ""),
    ):
        signature = {**EXCEPTION, "message": common, "messages": {"nccl": "nccl", "gloo": "gloo"}}
        for text in ("gloo", "nccl", "common"):
            found = ranks_of(signature, failed(0, exception(message=text)), backend=backend)
            assert (found is not None) is (text in matching)


@pytest.mark.parametrize(
    ("ranks", "attempt", "expected"),
    [
        ([failed(0), failed(1)], {}, (0, 1)),
        ([failed(0), ended(1, by="timeout")], {"timed_out": True}, (0,)),
        ([failed(0), peer_failed(1)], {}, (0,)),
        ([failed(0)], {"world_size": 2}, None),
        ([ok(0), failed(1)], {}, None),
        ([failed(0), failed(1, exception("ValueError"))], {}, None),
        (
            [
                failed(0),
                failed(1) | {"exit_code": None, "signal": "SIGTERM", "terminated_by": "launcher"},
            ],
            {},
            (0, 1),
        ),
        (
            [failed(0), failed(1, exception("KeyboardInterrupt")) | {"terminated_by": "launcher"}],
            {},
            (0,),
        ),
    ],
)
def test_all_ranks_are_those_that_could_show_it(ranks: Any, attempt: Any, expected: Any) -> None:
    assert ranks_of({**EXCEPTION, "ranks": "all"}, *ranks, **attempt) == expected
    assert ranks_of(EXCEPTION, *ranks, **attempt) is not None


# -- log records and warnings

LOG = {"kind": "log", "message": "old version of the format", "package": "transformers"}
MINE = "/home/me/project/repros/some_case.py"
LOGGED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "by the package": ({}, {"logger": "x"}, True),
    "with another text": ({}, {"logger": "x", "message": "other"}, False),
    "by another package with its logger": (
        {},
        {"logger": "transformers.x", "code_location": "torch.x"},
        False,
    ),
    "by the script with its logger": (
        {},
        {"logger": "transformers.x", "code_location": "repros.x"},
        False,
    ),
    "of the declared category": ({"logger": "FutureWarning"}, {"category": "FutureWarning"}, True),
    "of another category": ({"logger": "FutureWarning"}, {"category": "UserWarning"}, False),
}


@pytest.mark.parametrize("name", LOGGED)
def test_log_matches_by_code_location(name: str) -> None:
    changes, entry, expected = LOGGED[name]
    kind = "warnings" if "category" in entry else "logs"
    entry = {
        "message": "an old version of the format",
        "file": "f",
        "code_location": "transformers.x",
        **entry,
    }
    assert (ranks_of({**LOG, **changes}, finished(**{kind: [entry]}), ok(1)) == (0,)) is expected


# -- checks, signals, hangs

CHECK = {"kind": "check", "check": "logits"}
BAD = check("logits", False)
TEXT = check(passed=False, actual="cpu", expected="cuda", tolerance=None)
SIGNAL = {"kind": "signal", "signal": "SIGSEGV"}
DIED = ok(0, exit_code=-11, record=record(0, done=False), stack=f"    f ({SITE}/torch/x.py:1)")


@pytest.mark.parametrize(
    ("signature", "rank", "expected"),
    [
        (CHECK, finished(checks=[check(), BAD]), True),
        (CHECK, finished(checks=[BAD], done=False), False),
        (CHECK, finished(checks=[check(passed=False, actual="nan")]), False),
        (CHECK, finished(checks=[check(passed=False, actual="inf")]), False),
        ({**CHECK, "actual": [0.4, 0.6]}, finished(checks=[BAD]), True),
        ({**CHECK, "actual": [0.6, 0.9]}, finished(checks=[BAD]), False),
        ({**CHECK, "actual": [0.4, 0.6]}, finished(checks=[TEXT]), False),
        (CHECK, finished(checks=[TEXT]), True),
        (CHECK, finished(checks=[check(actual=0.5)]), False),  # void: the rank says that it passed
        (SIGNAL, {**DIED, "exit_code": None, "signal": "SIGSEGV"}, True),
        *(
            ({**SIGNAL, "frames": [{"module": r"torch\.x", "function": name}]}, DIED, name == "f")
            for name in "fg"
        ),
        (SIGNAL, {**DIED, "terminated_by": "launcher"}, False),
        (SIGNAL, ended(0, signal="SIGSEGV"), False),
    ],
)
def test_check_and_signal(signature: dict[str, Any], rank: dict[str, Any], expected: bool) -> None:
    assert (ranks_of(signature, rank, ok(1)) == (0,)) is expected


def test_secondary_failure_matches_only_without_a_primary_one() -> None:
    lost = {**EXCEPTION, "message": "Connection closed", "package": "torch"}
    assert ranks_of(lost, peer_failed(0), failed(1)) is None
    assert ranks_of(lost, peer_failed(0), ended(1)) == (0,), (
        "no other rank failed: then it is the failure"
    )
    aborted = {
        **ended(1, by="self", signal="SIGABRT"),
        "log_tail": "terminate called: Connection closed by peer [1]:2",
    }
    assert ranks_of({**SIGNAL, "signal": "SIGABRT"}, ended(0), aborted) == (1,)
    assert ranks_of({**SIGNAL, "signal": "SIGABRT"}, failed(0), aborted) is None


def hung(rank: int, *functions: str) -> dict[str, Any]:
    lines = [f"    {name} ({DIST}/distributed_c10d.py:1)" for name in functions]
    return ended(rank, "timeout", "SIGKILL", "\n".join([*lines, f"    body ({MINE}:7)"]))


WAITS = {"module": r"torch\.distributed\..*", "function": "barrier|wait"}
HANG = {"kind": "hang", "frames": [WAITS]}


@pytest.mark.parametrize(
    ("changes", "ranks", "attempt", "expected"),
    [
        ({}, [hung(0, "barrier"), hung(1, "broadcast")], {}, (0,)),
        ({}, [ok(0), hung(1, "barrier")], {}, (1,)),
        ({}, [hung(0, "barrier"), hung(1, "broadcast")], {"timed_out": False}, None),
        ({"ranks": "all"}, [hung(0, "barrier"), hung(1, "broadcast")], {}, None),
        ({"ranks": "all"}, [hung(0, "barrier"), hung(1, "wait")], {}, (0, 1)),
        ({"ranks": "all"}, [hung(0, "barrier"), ended(1)], {}, (0,)),
        ({}, [failed(0), hung(1, "barrier")], {}, None),
        ({}, [ok(0, exit_code=3), hung(1, "barrier")], {}, None),
        (
            {},
            [peer_failed(0), hung(1, "barrier")],
            {},
            (1,),
        ),  # it does not wait for one that failed
        (
            {"frames": [WAITS, {**WAITS, "function": "wrapper"}]},
            [hung(0, "barrier"), hung(1, "wrapper")],
            {},
            (0, 1),
        ),
        (
            {"frames": [{"function": "body"}]},
            [hung(0, "barrier")],
            {},
            None,
        ),  # a frame of the script
    ],
)
def test_hang_matches_where_ranks_are_stuck(
    changes: Any, ranks: Any, attempt: Any, expected: Any
) -> None:
    assert ranks_of({**HANG, **changes}, *ranks, **{"timed_out": True, **attempt}) == expected


# -- near misses

FRAMED = [{"module": r"transformers\..*", "function": "forward"}, {"module": "a", "function": "b"}]
NEAR: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "type": (
        {},
        failed(0, exception("ValueError")),
        "type: ValueError, declared RuntimeError, message ok, package ok",
    ),
    "message": (
        {},
        failed(0, exception(message=" so it is\nnot")),
        "message: so it is, declared size mismatch",
    ),
    "package": (
        {},
        failed(0, exception(frames=[SCRIPT, TORCH])),
        "package: torch, declared transformers",
    ),
    "the script's": (
        {},
        failed(0, exception(frames=[SCRIPT])),
        "package: none, declared transformers",
    ),
    "frame": ({"frames": FRAMED}, failed(0), "no frame a b"),
    "no error": ({}, ok(0), ""),
    "far in type and message": ({}, failed(0, exception("ValueError", "another")), ""),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss_names_the_part_that_missed(name: str) -> None:
    signature, rank, expected = NEAR[name]
    attempt = Evidence(observation(rank))
    wanted = [Signature.model_validate({**EXCEPTION, **signature})] * 2
    text = near_misses(wanted, attempt, find_failures(attempt))
    assert expected in text and bool(text) == bool(expected) and text.count(expected or "x") <= 1


# -- the catalogue's signatures

CATALOGUE = catalogue.load()
SIGNATURES = [
    (case.slug, signature) for case in CATALOGUE.cases.values() for signature in case.signatures
]
NAMES = [f"{slug}/{signature.name}" for slug, signature in SIGNATURES]
WIDE = [".*", ".", r"\w*", "x?", ".+", r"[\s\S]*", "(a|)", "e"]


def of_text(pattern: str) -> str:
    """A text that a pattern matches, of the patterns as they are written here (checked by the
    caller)."""
    text = re.sub(r"\\d\+", "7", pattern)
    text = re.sub(r"\\w\+", "cuda", text)
    text = re.sub(r"\(([^()|]*)\|[^()]*(\([^()]*\)[^()]*)*\)", r"\1", text)  # the first of several
    text = re.sub(r"\.\*", "2", text)
    return re.sub(r"\\(.)", r"\1", text).replace("?", "")


def of_module(pattern: str) -> str:
    text = re.sub(r"\(([^()|]*)\|[^()]*\)", r"\1", pattern)
    return re.sub(r"\\(.)", r"\1", text.replace(r"\..*", r"\.inner").replace(".*", "any"))


def frames_of(signature: Signature) -> list[dict[str, Any]]:
    made = [
        frame(
            of_module(f.module if f.module != ".*" else f"{signature.package or 'torch'}.m"),
            of_module(f.function) if f.function != ".*" else "call",
        )
        for f in signature.frames
    ]
    return [SCRIPT, *made]


def shown(
    signature: Signature, frames: list[dict[str, Any]], timed_out: bool = True, **part: Any
) -> dict[str, Any]:
    """An observation of the signature's kind with these parts; those left out are as declared."""
    number = part.pop("number", signature.actual[0] if signature.actual else 0.5)
    patterns, made = message_patterns(signature), signature.model_copy(update=part)
    text = part.get("message", of_text(patterns[0]) if patterns else "")
    lines = [f'  File "{f["file"]}", line 1 in {f["function"]}' for f in reversed(frames)]
    stack = "\n".join(["# faulthandler", "Current thread 0x1 (most recent call first):", *lines])
    error = exception(
        made.type or "", text, [*frames, frame(f"{made.package}.inner", "raises")], ["Exception"]
    )
    entry = {
        "logger": "x",
        "message": text,
        "file": "/f.py",
        "code_location": f"{made.package}.inner",
    }
    ranks = {
        "exception": lambda rank: failed(rank, error),
        "log": lambda rank: finished(rank, logs=[entry]),
        "check": lambda rank: finished(rank, checks=[failed_check(made.check or "", number)]),
        "signal": lambda rank: ended(rank, by="self", signal=made.signal or "", stack=stack),
        "hang": lambda rank: ended(rank, by="timeout", signal="SIGKILL", stack=stack),
    }[signature.kind]
    backend, late = next(iter(signature.messages), "gloo"), timed_out and signature.kind == "hang"
    return observation(ranks(0), ranks(1), backend=backend, timed_out=late)


def failed_check(name: str, number: float | str) -> dict[str, Any]:
    """A check that failed with this number."""
    return check(name, False, actual=number, expected=1e6, tolerance=1.0)


ANOTHER = {
    "type": "LookupError",
    "package": "ambiguous_with",
    "check": "another",
    "signal": "SIGBUS",
}


def negatives(signature: Signature) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the part that is another, an observation that is not the failure)."""
    frames = frames_of(signature)
    if message_patterns(signature):
        for item in unrelated_messages()[:40]:
            yield "message", shown(signature, frames, message=item)
    for part, value in ANOTHER.items():
        if getattr(signature, part):
            yield part, shown(signature, frames, **{part: value})
    if signature.kind == "check":
        low, high = signature.actual or (0, 1)
        numbers: list[float | str] = ["nan", "inf"]
        numbers += [low - 1, high + 1] if signature.actual else []
        for number in numbers:
            yield "actual", shown(signature, frames, number=number)
    if signature.kind == "hang":
        yield "deadline", shown(signature, frames, timed_out=False)
    for number in range(len(signature.frames)):
        yield f"frame {number}", shown(signature, frames[: number + 1] + frames[number + 2 :])


def mutants(signature: Signature) -> Iterator[tuple[str, Signature]]:
    """(the part that any would do for, the signature so)."""
    if message_patterns(signature):
        anything = dict.fromkeys(signature.messages, ".*")
        yield "message", signature.model_copy(update={"message": ".*", "messages": anything})
    for part, value in ANOTHER.items():
        if getattr(signature, part):
            yield part, signature.model_copy(update={part: value})
    for number in range(len(signature.frames)):
        rest = signature.frames[:number] + signature.frames[number + 1 :]
        if rest or signature.kind != "hang":
            yield f"frame {number}", signature.model_copy(update={"frames": rest})


@pytest.mark.parametrize(("slug", "signature"), SIGNATURES, ids=NAMES)
def test_every_part_of_a_signature_is_necessary(slug: str, signature: Signature) -> None:
    whole = shown(signature, frames_of(signature))
    assert matches(signature, whole), "the observation made of its parts must show it"
    wrong = list(negatives(signature))
    taken = {part for part, there in wrong if matches(signature, there)}
    assert not taken, (
        f"{slug}/{signature.name} takes another {', '.join(sorted(taken))} for its own"
    )
    for part, mutant in mutants(signature):
        assert any(matches(mutant, there) for _, there in wrong), (
            f"nothing notices when {part} may be anything"
        )


@pytest.mark.parametrize("slug", CATALOGUE.cases)
def test_no_signature_matches_an_unrelated_message(slug: str) -> None:
    assert len(unrelated_messages()) > 1000 and any("\n" in text for text in unrelated_messages())
    assert overbroad_signature(CATALOGUE.cases[slug]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "Exception"},
        {"type": "BaseException"},
        *({"message": text} for text in WIDE),
        *({"message": None, "messages": {"gloo": text}} for text in WIDE),
    ],
)
def test_signature_that_any_error_shows_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"anything|needs message|every error's"):
        case(signatures=[{**EXCEPTION, **changes}])


def test_overbroad_signature_counts_the_messages_it_matches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = ("another", f"of size {'x' * 200}\nand a second line", "of size 3")
    monkeypatch.setattr(signature_module, "unrelated_messages", lambda: listed)
    found = str(overbroad_signature(case(signatures=[{**EXCEPTION, "message": "of size"}])))
    assert "norm matches 2 messages" in found and len(found) < 200
