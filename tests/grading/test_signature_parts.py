"""Every part of every signature is needed: without it, an observation that is not the failure would fire.

From an observation made of a signature's parts (the stored ones are in test_baseline.py) negatives are made that differ
in one part. The signature must refuse them all; each of its mutants (message ``.*``, another type, package or check, no
frames) must take some for the failure: else that part of the signature could be anything, and no test would notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from judging import EXCEPTION, case, control, document, ended, exception, failed, observation, ok, record
from pydantic import ValidationError
from repro_matrix.cli import accept
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.config.signatures import Signature
from repro_matrix.errors import ResultsError
from repro_matrix.grading import specificity as foreign
from repro_matrix.grading.signature import (
    OWN,
    Foreign,
    matched,
    matches,
    overbroad_signature,
    patterns,
    unrelated_messages,
)

CATALOGUE = catalogue.load()
SIGNATURES = [(case.slug, signature) for case in CATALOGUE.cases.values() for signature in case.signatures]
NAMES = [f"{slug}/{signature.name}" for slug, signature in SIGNATURES]
WITH_TEXT = [item for item in SIGNATURES if patterns(item[1])]
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
    return {"file": file, "line": 1, "function": function, "module": module, "place": module, "code": ""}


SCRIPT = {**framed("repros.x", "body"), "file": "/home/me/repros/x.py"}


def frames_of(signature: Signature) -> list[Frame]:
    made = [framed(of_module(f.module if f.module != ".*" else f"{signature.package or 'torch'}.m"),
                   of_module(f.function) if f.function != ".*" else "call") for f in signature.frames]  # fmt: skip
    return [SCRIPT, *made]


def stack_of(frames: list[Frame]) -> str:
    lines = [f'  File "{f["file"]}", line 1 in {f["function"]}' for f in reversed(frames)]
    return "\n".join(["# faulthandler", "Current thread 0x1 (most recent call first):", *lines])


def seen(signature: Signature, frames: list[Frame], **part: Any) -> dict[str, Any]:
    """An observation of the signature's kind with these parts; those left out are as declared."""
    kind = part.get("type", signature.type)
    text = part.get("message", of_text(patterns(signature)[0]) if patterns(signature) else "")
    package = part.get("package", signature.package)
    backend = next(iter(signature.variants), "gloo")
    if signature.kind == "exception":
        inner = [framed(f"{package}.inner", "raises")]
        error = exception(kind, text, [*frames, *inner], ["Exception"])
        return observation(failed(0, error), failed(1, error), backend=backend)
    if signature.kind == "log":
        entry = {"logger": "x", "message": text, "file": "/f.py", "place": f"{package}.inner"}
        return observation(*(ok(rank, record=record(rank, logs=[entry])) for rank in (0, 1)))
    if signature.kind == "oracle":
        check = {"name": part.get("check", signature.check), "passed": False, "got": 1.0, "want": 0.0, "tolerance": 0.1}
        return observation(*(ok(rank, record=record(rank, checks=[check])) for rank in (0, 1)))
    stack = stack_of(frames)
    if signature.kind == "signal":
        name = part.get("signal", signature.signal)
        return observation(*(ended(rank, by="self", signal=name, stack=stack) for rank in (0, 1)))
    ranks = [ended(rank, by="deadline", signal="SIGKILL", stack=stack) for rank in (0, 1)]
    return observation(*ranks, timed_out=part.get("timed_out", True))


def negatives(signature: Signature) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the part that is another, an observation that is not the failure)."""
    frames = frames_of(signature)
    if patterns(signature):
        for item in unrelated_messages()[:40]:
            yield "message", seen(signature, frames, message=item.message)
    if signature.type:
        yield "type", seen(signature, frames, type="LookupError")
    if signature.package:
        yield "package", seen(signature, frames, package="elsewhere")
    if signature.check:
        yield "check", seen(signature, frames, check="another")
    if signature.signal:
        yield "signal", seen(signature, frames, signal="SIGBUS")
    if signature.kind == "hang":
        yield "deadline", seen(signature, frames, timed_out=False)
    for number in range(len(signature.frames)):
        yield f"frame {number}", seen(signature, frames[: number + 1] + frames[number + 2 :])


def mutants(signature: Signature) -> Iterator[tuple[str, Signature]]:
    """(the part that any would do for, the signature so)."""
    if patterns(signature):
        anything = dict.fromkeys(signature.variants, ".*")
        yield "message", signature.model_copy(update={"message": ".*", "variants": anything})
    for part, value in (("type", "LookupError"), ("package", "elsewhere"), ("check", "another"), ("signal", "SIGBUS")):
        if getattr(signature, part):
            yield part, signature.model_copy(update={part: value})
    for number in range(len(signature.frames)):
        rest = signature.frames[:number] + signature.frames[number + 1 :]
        if rest or signature.kind != "hang":
            yield f"frame {number}", signature.model_copy(update={"frames": rest})


@pytest.mark.parametrize(("slug", "signature"), SIGNATURES, ids=NAMES)
def test_every_part_of_a_signature_is_needed(slug: str, signature: Signature) -> None:
    whole = seen(signature, frames_of(signature))
    assert matches(signature, whole), "the observation made of its parts must show it"
    wrong = list(negatives(signature))
    taken = {part for part, there in wrong if matches(signature, there)}
    assert not taken, f"{slug}/{signature.name} takes another {', '.join(sorted(taken))} for its own"
    for part, mutant in mutants(signature):
        assert any(matches(mutant, there) for _, there in wrong), f"nothing notices when {part} may be anything"


@pytest.mark.parametrize(("slug", "signature"), WITH_TEXT, ids=[f"{s}/{g.name}" for s, g in WITH_TEXT])
def test_no_signature_matches_a_foreign_message(slug: str, signature: Signature) -> None:
    assert len(unrelated_messages()) > 1000
    assert matched(slug, signature) == []


def test_what_is_listed_as_a_signatures_own_is_needed() -> None:
    for name, texts in OWN.items():
        signature = dict(zip(NAMES, (item[1] for item in SIGNATURES)))[name]
        for text in texts:
            held = [item.message for item in unrelated_messages() if item.message.startswith(text)]
            assert held and all(re.search(p, held[0]) for p in patterns(signature)[:1]), f"{name}: {text}"


@pytest.mark.parametrize("wide", ["", ".*", ".", r"\w*", "x?", ".+", r"[\s\S]*", "(a|)", "e"])
def test_a_pattern_that_matches_anything_is_refused_when_a_case_is_loaded(wide: str) -> None:
    with pytest.raises(ValidationError, match=r"anything|needs message"):
        case(signatures=[{**EXCEPTION, "message": wide}])
    with pytest.raises(ValidationError, match=r"anything|needs message"):
        case(signatures=[{**EXCEPTION, "message": None, "variants": {"gloo": wide or ".*"}}])


def test_a_type_that_every_error_has_is_refused() -> None:
    for name in ("Exception", "BaseException"):
        with pytest.raises(ValidationError, match="every error's"):
            case(signatures=[{**EXCEPTION, "type": name}])


@pytest.mark.parametrize("wide", ["tensor", "out of range", "not supported", "must be"])
def test_a_pattern_of_everyday_words_is_found_too_wide(wide: str) -> None:
    known: Case = case(signatures=[{**EXCEPTION, "message": wide}])
    said = overbroad_signature(known)
    assert said is not None and "messages that are not its failure" in said
    assert overbroad_signature(case()) is None


def test_a_listed_message_is_read_as_it_was_raised() -> None:
    messages = [item.message for item in unrelated_messages()]
    assert messages[0] == "" and unrelated_messages()[0].type == "RuntimeError"
    keys = 'Error(s) in loading state_dict for LlamaForCausalLM:\n\tMissing key(s) in state_dict: "lm_head.weight".'
    assert Foreign("RuntimeError", keys) in unrelated_messages(), "its line break and its tab are no letters"
    assert any(r"r'.*\.layers\.\d+$'" in text for text in messages) and not any("\\n" in text for text in messages)


def test_what_is_said_of_a_pattern_that_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, listed = case(signatures=[{**EXCEPTION, "message": "of size"}]), []
    monkeypatch.setattr(foreign, "unrelated_messages", lambda: tuple(Foreign("ValueError", text) for text in listed))

    def said() -> str | None:
        return overbroad_signature(wide)

    assert said() is None
    listed += ["another", f"of size {'x' * 200}\nand a second line", "of size 3"]
    assert said() == f"signature norm matches 2 messages that are not its failure: {('of size ' + 'x' * 200)[:100]!r}"
    monkeypatch.setattr(foreign, "OWN", {"some-case/norm": ("of size 3", "of size 4")})
    listed[:] = ["of size 3 is it", "of size 5", "its of size 3"]
    assert matched("some-case", wide.signatures[0]) == ["of size 5", "its of size 3"], "one that begins so is its own"
    assert matched("other-case", wide.signatures[0]) == listed


def test_accept_refuses_a_failure_that_fired_nowhere_and_a_pattern_that_is_too_wide() -> None:
    there = observation(ok(0))
    clean, fired = document({"broken": [("clean", there)]}), document({"broken": [("fires", there)]})
    with pytest.raises(ResultsError, match="its broken arm fired in none of 1 attempts"):
        accept._refuse(case(), [clean])
    with pytest.raises(ResultsError, match="not its failure"):
        accept._refuse(case(signatures=[{**EXCEPTION, "message": "tensor"}]), [fired])
    accept._refuse(case(), [clean, fired])
    accept._refuse(control(), [clean])
