"""Signatures against observations: what is the known failure, and above all what is not.

The second half is about the catalogue's signatures: every part of every one is necessary. From an observation made of
a signature's parts, negatives are made that differ in one part. The signature must refuse them all, and each of its
mutants (message ``.*``, another type, package or check, no frames) must take some for the failure. (test_baseline.py
compares the stored observations.)
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
from repro_matrix.grading.observation import Attempt
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import (
    KNOWN_MATCHES,
    Match,
    UnrelatedMessage,
    message_patterns,
    near_misses,
    overbroad_signature,
    unrelated_matches,
    unrelated_messages,
)


def ranks_of(signature: dict[str, Any], *ranks: dict[str, Any], **attempt: Any) -> tuple[int, ...] | None:
    """The ranks on which the observation shows the signature; None where it does not."""
    match = matches(Signature.model_validate({"name": "s", **signature}), observation(*ranks, **attempt))
    return match.ranks if match else None


def finished(rank: int = 0, **changes: Any) -> dict[str, Any]:
    return ok(rank, record=record(rank, **changes))


FRAME = {"module": r"transformers\.models\.qwen2\..*", "function": "forward"}
TORCH = frame("torch.nn.functional", "linear")


def unlocated(shown: dict[str, Any]) -> dict[str, Any]:
    """A frame of a log, which names the file only."""
    return {key: value for key, value in shown.items() if key != "code_location"}


GENERATED = [unlocated(frame("", "<lambda>", "<string>")), unlocated(frame("builtins", "len", "<frozen>"))]

# (changes of the signature, the error, whether it matches)
EXCEPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "as declared": ({}, exception(), True),
    "by a base of its type": ({}, exception("OutOfCheese", bases=["RuntimeError", "Exception"]), True),
    "another type": ({}, exception("ValueError"), False),
    "another message": ({}, exception(message="size mismatch elsewhere"), False),
    "another package": ({}, exception(frames=[SCRIPT, TORCH]), False),
    "raised in torch": ({"package": "torch"}, exception(frames=[SCRIPT, TORCH]), True),
    "raised again by torch for a DataLoader's worker": (
        {"package": "torch"}, exception(frames=[SCRIPT, TORCH, frame("torch._utils", "reraise")]), False),
    "raised by the script": ({}, exception(frames=[SCRIPT]), False),
    "raised by a callback of the script": ({}, exception(frames=[SCRIPT, NORM, SCRIPT]), False),
    "raised by generated code": ({}, exception(frames=[SCRIPT, frame("", "<module>", "<string>")]), False),
    "a script that calls itself upstream": ({}, exception(frames=[unlocated({**NORM, "file": SCRIPT["file"]})]), False),
    "generated code without an origin is passed over": ({}, exception(frames=[SCRIPT, NORM, *GENERATED]), True),
    "a frame without a module": ({}, exception(frames=[SCRIPT, frame("", "f", f"{SITE}/transformers/x.py")]), True),
    "a declared frame": ({"frames": [FRAME]}, exception(), True),
    "a declared frame's other function": ({"frames": [{**FRAME, "function": "forw"}]}, exception(), False),
    "a declared frame's other module": ({"frames": [{**FRAME, "module": "transformers"}]}, exception(), False),
    "two declared frames, one missing": ({"frames": [FRAME, {"function": "backward"}]}, exception(), False),
    "behind a wrapper that repeats it": (
        {}, exception("ImportError", "failed: size mismatch in norm", [SCRIPT], cause=exception()), True),
    "handled while another was raised": ({}, exception("ValueError", "another", [SCRIPT], cause=exception()), False),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exception_matches_by_all_its_parts(name: str) -> None:
    changes, error, expected = EXCEPTIONS[name]
    assert (ranks_of({**EXCEPTION, **changes}, failed(0, error), failed(1, error)) == (0, 1)) is expected


@pytest.mark.parametrize(("device", "expected"), [("cuda", (0,)), ("cpu", None), ("", (0,))])
def test_signature_of_an_accelerator(device: str, expected: Any) -> None:
    assert ranks_of({**EXCEPTION, "accelerator": "cuda"}, failed(0), settings={"device": device}) == expected


def test_match_names_ranks_and_message() -> None:
    found = matches(Signature.model_validate(EXCEPTION), observation(ok(0), failed(1)))
    assert found == Match("norm", (1,), "size mismatch in norm")


@pytest.mark.parametrize(
    ("message", "backend", "common", "matching"),
    [
        ("gloo text", "gloo", "common", True), ("nccl text", "nccl", "common", True),
        ("nccl text", "gloo", "common", False), ("common text", "mpi", "common", True),
        ("nccl text", "cpu:gloo,cuda:nccl", "common", True),
        ("nccl text", "gloo", None, False), ("nccl text", "nccl", None, True),
    ],
)  # fmt: skip
def test_message_of_the_backend_is_preferred(message: str, backend: str, common: str | None, matching: bool) -> None:
    messages = {"nccl": "nccl text", "gloo": "gloo text"} if common else {"nccl": "nccl text"}
    signature = {**EXCEPTION, "message": "common text" if common else None, "messages": messages}
    assert (ranks_of(signature, failed(0, exception(message=message)), backend=backend) is not None) is matching


@pytest.mark.parametrize(
    ("ranks", "attempt", "expected"),
    [
        ([failed(0), failed(1)], {}, (0, 1)), ([failed(0), ended(1)], {}, (0,)),
        ([failed(0), ended(1, by="timeout")], {"timed_out": True}, (0,)), ([failed(0), peer_failed(1)], {}, (0,)),
        ([failed(0), ok(1)], {}, None), ([failed(0), failed(1, exception("ValueError"))], {}, None),
        ([failed(0)], {"world_size": 2}, None),
        ([failed(0), failed(1) | {"exit_code": None, "signal": "SIGTERM", "terminated_by": "launcher"}], {}, (0, 1)),
        ([failed(0), failed(1, exception("KeyboardInterrupt")) | {"terminated_by": "launcher"}], {}, (0,)),
    ],
)  # fmt: skip
def test_all_ranks_are_those_that_could_show_it(ranks: Any, attempt: Any, expected: Any) -> None:
    assert ranks_of({**EXCEPTION, "ranks": "all"}, *ranks, **attempt) == expected
    assert ranks_of(EXCEPTION, *ranks, **attempt) is not None


def test_secondary_error_matches_only_without_a_primary_one() -> None:
    lost = {**EXCEPTION, "message": "Connection closed", "package": "torch"}
    assert ranks_of(lost, peer_failed(0), failed(1)) is None
    assert ranks_of(lost, peer_failed(0), ended(1)) == (0,), "no other rank failed: then it is the failure"


# -- log records and warnings

LOG = {"kind": "log", "message": "old version of the format", "package": "transformers"}
MINE = "/home/me/project/repros/some_case.py"
LOGGED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "by the package": ({}, {"logger": "x"}, True),
    "as a warning of the package": ({}, {"category": "UserWarning"}, True),
    "with another text": ({}, {"logger": "x", "message": "other"}, False),
    "by another package": ({}, {"category": "UserWarning", "code_location": "torch.x"}, False),
    "by another package with its logger": ({}, {"logger": "transformers.x", "code_location": "torch.x"}, False),
    "by generated code with its logger": ({}, {"logger": "transformers.x", "code_location": ""}, False),
    "by the script with its logger": ({}, {"logger": "transformers.x", "code_location": "repros.x"}, False),
    "of the declared category": ({"logger": "FutureWarning"}, {"category": "FutureWarning"}, True),
    "of another category": ({"logger": "FutureWarning"}, {"category": "UserWarning"}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGGED)
def test_log_matches_by_code_location(name: str) -> None:
    changes, entry, expected = LOGGED[name]
    kind = "warnings" if "category" in entry else "logs"
    entry = {"message": "an old version of the format", "file": "f", "code_location": "transformers.x", **entry}
    assert (ranks_of({**LOG, **changes}, finished(**{kind: [entry]}), ok(1)) == (0,)) is expected


# -- checks, signals, hangs

CHECK = {"kind": "check", "check": "logits"}
BAD = check("logits", False)
SIGNAL = {"kind": "signal", "signal": "SIGSEGV"}
DIED = ok(0, exit_code=-11, record=record(0, done=False), stack=f"    f ({SITE}/torch/x.py:1)")


@pytest.mark.parametrize(
    ("signature", "rank", "expected"),
    [
        (CHECK, finished(checks=[check(), BAD]), True), (CHECK, ok(0), False),
        (CHECK, finished(checks=[BAD], done=False), False),
        (CHECK, finished(checks=[check(actual=0.5)]), False),  # void: the rank says that it passed
        (CHECK, finished(checks=[check("logits", False, actual="half")]), False),  # void: not a number
        ({**CHECK, "check": "loss"}, finished(checks=[BAD]), False), (SIGNAL, DIED, True),
        (SIGNAL, {**DIED, "exit_code": None, "signal": "SIGSEGV"}, True),
        ({**SIGNAL, "signal": "SIGABRT"}, DIED, False),
        ({**SIGNAL, "frames": [{"module": r"torch\.x", "function": "f"}]}, DIED, True),
        ({**SIGNAL, "frames": [{"module": r"torch\.x", "function": "g"}]}, DIED, False),
        (SIGNAL, {**DIED, "terminated_by": "launcher"}, False), (SIGNAL, ended(0, signal="SIGSEGV"), False),
    ],
)  # fmt: skip
def test_check_and_signal(signature: dict[str, Any], rank: dict[str, Any], expected: bool) -> None:
    assert (ranks_of(signature, rank, ok(1)) == (0,)) is expected


def test_abort_after_a_lost_peer_does_not_match() -> None:
    abort = ended(1, by="self", signal="SIGABRT")
    lost = {**abort, "log_tail": "terminate called: Connection closed by peer [127.0.0.1]:20635"}
    assert ranks_of({**SIGNAL, "signal": "SIGABRT"}, ended(0), abort) == (1,)
    assert ranks_of({**SIGNAL, "signal": "SIGABRT"}, failed(0), lost) is None


def hung(rank: int, *functions: str) -> dict[str, Any]:
    lines = [f"    {name} ({DIST}/distributed_c10d.py:1)" for name in functions]
    return ended(rank, "timeout", "SIGKILL", "\n".join([*lines, f"    body ({MINE}:7)"]))


WAITS = {"module": r"torch\.distributed\..*", "function": "barrier|wait"}
HANG = {"kind": "hang", "frames": [WAITS]}


@pytest.mark.parametrize(
    ("changes", "ranks", "attempt", "expected"),
    [
        ({}, [hung(0, "barrier"), hung(1, "broadcast")], {}, (0,)),
        ({}, [hung(0, "barrier"), hung(1, "broadcast")], {"timed_out": False}, None),
        ({}, [hung(0, "broadcast"), hung(1, "broadcast")], {}, None),
        ({"ranks": "all"}, [hung(0, "barrier"), hung(1, "broadcast")], {}, None),
        ({"ranks": "all"}, [hung(0, "barrier"), hung(1, "wait")], {}, (0, 1)),
        ({"ranks": "all"}, [hung(0, "barrier"), ended(1)], {}, (0,)),
        ({}, [ok(0), hung(1, "barrier")], {}, (1,)),
        ({}, [failed(0), hung(1, "barrier")], {}, None),  # it waits for another one
        ({}, [ok(0, exit_code=3), hung(1, "barrier")], {}, None),
        ({}, [peer_failed(0), hung(1, "barrier")], {}, (1,)),
        ({"frames": [WAITS, {**WAITS, "function": "wrapper"}]}, [hung(0, "barrier"), hung(1, "wrapper")], {}, (0, 1)),
        ({"frames": [WAITS, {**WAITS, "function": "wrapper"}]}, [hung(0, "barrier"), hung(1, "barrier")], {}, None),
        ({"frames": [{"function": "body"}]}, [hung(0, "barrier")], {}, None),  # a frame of the script
    ],
)
def test_hang_matches_where_ranks_are_stuck(changes: Any, ranks: Any, attempt: Any, expected: Any) -> None:
    assert ranks_of({**HANG, **changes}, *ranks, **{"timed_out": True, **attempt}) == expected


# -- near misses

FRAMED = [{"module": r"transformers\..*", "function": "forward"}, {"module": "a", "function": "b"}]
NEAR: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "type": ({}, failed(0, exception("ValueError")), "type: ValueError, declared RuntimeError, message ok, package ok"),
    "message": ({}, failed(0, exception(message=" so it is\nnot")), "message: so it is, declared size mismatch"),
    "package": ({}, failed(0, exception(frames=[SCRIPT, TORCH])), "package: torch, declared transformers"),
    "the script's": ({}, failed(0, exception(frames=[SCRIPT])), "package: none, declared transformers"),
    "frame": ({"frames": FRAMED}, failed(0), "no frame a b"),
    "of a backend": ({"messages": {"nccl": "of n"}, "message": None}, failed(0), "declared of n"),
    "far in type and message": ({}, failed(0, exception("ValueError", "another")), ""),
    "no error": ({}, ok(0), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_miss_names_the_part_that_missed(name: str) -> None:
    signature, rank, expected = NEAR[name]
    attempt = Attempt(observation(rank))
    wanted = [Signature.model_validate({**EXCEPTION, **signature})] * 2
    text = near_misses(wanted, attempt, find_failures(attempt))
    assert expected in text and bool(text) == bool(expected) and text.count(expected or "x") <= 1


# -- the catalogue's signatures

CATALOGUE = catalogue.load()
SIGNATURES = [(case.slug, signature) for case in CATALOGUE.cases.values() for signature in case.signatures]
NAMES = [f"{slug}/{signature.name}" for slug, signature in SIGNATURES]
WITH_TEXT = [item for item in SIGNATURES if message_patterns(item[1])]
Frame = dict[str, Any]


def of_text(pattern: str) -> str:
    """A text that a pattern matches, of the patterns as they are written here (checked by the caller)."""
    text = re.sub(r"\\d\+", "7", pattern)
    text = re.sub(r"\\w\+", "cuda", text)
    text = re.sub(r"\(([^()|]*)\|[^()]*(\([^()]*\)[^()]*)*\)", r"\1", text)  # the first of several
    text = re.sub(r"\.\*", "2", text)
    return re.sub(r"\\(.)", r"\1", text).replace("?", "")


def of_module(pattern: str) -> str:
    text = re.sub(r"\(([^()|]*)\|[^()]*\)", r"\1", pattern)
    return re.sub(r"\\(.)", r"\1", text.replace(r"\..*", r"\.inner").replace(".*", "any"))


def framed(module: str, function: str) -> Frame:
    file = f"/venv/lib/python3.11/site-packages/{module.replace('.', '/')}.py"
    return {"file": file, "line": 1, "function": function, "module": module, "code_location": module, "code": ""}


PART_SCRIPT = {**framed("repros.x", "body"), "file": "/home/me/repros/x.py"}


def frames_of(signature: Signature) -> list[Frame]:
    made = [framed(of_module(f.module if f.module != ".*" else f"{signature.package or 'torch'}.m"),
                   of_module(f.function) if f.function != ".*" else "call") for f in signature.frames]  # fmt: skip
    return [PART_SCRIPT, *made]


def stack_of(frames: list[Frame]) -> str:
    lines = [f'  File "{f["file"]}", line 1 in {f["function"]}' for f in reversed(frames)]
    return "\n".join(["# faulthandler", "Current thread 0x1 (most recent call first):", *lines])


def shown(signature: Signature, frames: list[Frame], **part: Any) -> dict[str, Any]:
    """An observation of the signature's kind with these parts; those left out are as declared."""
    kind = part.get("type", signature.type)
    text = part.get("message", of_text(message_patterns(signature)[0]) if message_patterns(signature) else "")
    package = part.get("package", signature.package)
    backend = next(iter(signature.messages), "gloo")
    if signature.kind == "exception":
        inner = [framed(f"{package}.inner", "raises")]
        error = exception(kind, text, [*frames, *inner], ["Exception"])
        return observation(failed(0, error), failed(1, error), backend=backend)
    if signature.kind == "log":
        entry = {"logger": "x", "message": text, "file": "/f.py", "code_location": f"{package}.inner"}
        return observation(*(ok(rank, record=record(rank, logs=[entry])) for rank in (0, 1)))
    if signature.kind == "check":
        failing = check(part.get("check", signature.check), False)
        return observation(*(ok(rank, record=record(rank, checks=[failing])) for rank in (0, 1)))
    stack = stack_of(frames)
    if signature.kind == "signal":
        name = part.get("signal", signature.signal)
        return observation(*(ended(rank, by="self", signal=name, stack=stack) for rank in (0, 1)))
    ranks = [ended(rank, by="timeout", signal="SIGKILL", stack=stack) for rank in (0, 1)]
    return observation(*ranks, timed_out=part.get("timed_out", True))


ANOTHER = {"type": "LookupError", "package": "ambiguous_with", "check": "another", "signal": "SIGBUS"}


def negatives(signature: Signature) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the part that is another, an observation that is not the failure)."""
    frames = frames_of(signature)
    if message_patterns(signature):
        for item in unrelated_messages()[:40]:
            yield "message", shown(signature, frames, message=item.message)
    for part, value in ANOTHER.items():
        if getattr(signature, part):
            yield part, shown(signature, frames, **{part: value})
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
    assert not taken, f"{slug}/{signature.name} takes another {', '.join(sorted(taken))} for its own"
    for part, mutant in mutants(signature):
        assert any(matches(mutant, there) for _, there in wrong), f"nothing notices when {part} may be anything"


@pytest.mark.parametrize(("slug", "signature"), WITH_TEXT, ids=[f"{s}/{g.name}" for s, g in WITH_TEXT])
def test_no_signature_matches_an_unrelated_message(slug: str, signature: Signature) -> None:
    assert len(unrelated_messages()) > 1000
    assert unrelated_matches(slug, signature) == []


def test_listed_known_matches_are_needed() -> None:
    for name, texts in KNOWN_MATCHES.items():
        signature = dict(zip(NAMES, (item[1] for item in SIGNATURES)))[name]
        for text in texts:
            held = [item.message for item in unrelated_messages() if item.message.startswith(text)]
            assert held and all(re.search(p, held[0]) for p in message_patterns(signature)[:1]), f"{name}: {text}"


@pytest.mark.parametrize("type_", ["Exception", "BaseException"])
def test_type_of_every_error_is_refused(type_: str) -> None:
    with pytest.raises(ValidationError, match="every error's"):
        case(signatures=[{**EXCEPTION, "type": type_}])


@pytest.mark.parametrize("wide", ["", ".*", ".", r"\w*", "x?", ".+", r"[\s\S]*", "(a|)", "e"])
def test_pattern_that_matches_anything_is_refused(wide: str) -> None:
    with pytest.raises(ValidationError, match=r"anything|needs message"):
        case(signatures=[{**EXCEPTION, "message": wide}])
    with pytest.raises(ValidationError, match=r"anything|needs message"):
        case(signatures=[{**EXCEPTION, "message": None, "messages": {"gloo": wide or ".*"}}])


def test_overbroad_signature_counts_the_messages_it_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, listed = case(signatures=[{**EXCEPTION, "message": "of size"}]), []
    unrelated = lambda: tuple(UnrelatedMessage("ValueError", text) for text in listed)  # noqa: E731
    monkeypatch.setattr(signature_module, "unrelated_messages", unrelated)
    assert overbroad_signature(wide) is None
    listed += ["another", f"of size {'x' * 200}\nand a second line", "of size 3"]
    assert "norm matches 2 messages" in str(overbroad_signature(wide)) and len(str(overbroad_signature(wide))) < 200
    monkeypatch.setattr(signature_module, "KNOWN_MATCHES", {"some-case/norm": ("of size 3", "of size 4")})
    listed[:] = ["of size 3 is it", "of size 5", "its of size 3"]
    assert unrelated_matches("some-case", wide.signatures[0]) == ["of size 5", "its of size 3"]
    assert unrelated_matches("other-case", wide.signatures[0]) == listed
