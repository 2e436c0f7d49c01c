"""Recognize the known failures that a log shows, by the signatures that grade attempts. Pure.

Every error becomes what a rank would have recorded, in the order of the log. Grading then decides
what matches (signature.py) and which errors only follow from another rank's (root_cause.py). A
signature is *recognized* if the log contains everything that it requires. It is *possible* if
nothing in the log contradicts it and something is missing: frames that were cut off, or a way to
exclude another cause (a signature's ``ambiguous_with``; two cases that look the same).

config/failure_rules.yaml classifies the other errors, and collectives.py collectives that timed
out. Wrong numbers without an error are not in a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from repro_matrix.config.failure_rules import rules
from repro_matrix.config.schema import AmbiguousWith, Case, Signature, Strategy
from repro_matrix.grading.observation import in_package, module_names
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import match_attempt
from repro_matrix.grading.tracebacks import Error
from repro_matrix.match.collectives import cases_like, hang_of
from repro_matrix.match.errors import as_attempt, module_of, with_installed_frames
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.log_failure import KnownFailure, LogAnswer, LogFailure, is_launcher
from repro_matrix.match.recovery import recover
from repro_matrix.match.scan import Finding, Note, Scanned

# A logger's format before a warning's text.
_BEFORE = re.compile(
    r"\[[\w.]+\] |"  # transformers 5: the package
    r"[\[\](){}|:\w./ ,=<>-]{0,160}(?:WARN|WARNING|warning|Warning|\d) ?[\])|>]* ?[:|-]? ?"
    r"(?:[\w.]+:\d+ ?[-:|>]+ ?)?"
)
# Messages of the interpreter: any program can cause them, so they need a traceback.
_PYTHON = re.compile(
    r"list index out of range|object has no attribute|object is not"
    r" (?:subscriptable|callable|iterable)"
)
_AMBIGUOUS = "it may as well be"
_MIXED = "lines of several tracebacks stand among each other"
_MODEL = re.compile(r"transformers\\\.models\\\.\w+")  # in a signature's regular expression


def recognize(seen: Scanned, catalogue: SignatureIndex) -> LogAnswer:
    """Return the known failures that a log shows."""
    progress = seen.progress
    answer = LogAnswer(_log_failures(seen, catalogue), hang=hang_of(seen.waits, progress.since))
    answer.like = cases_like(answer.hang, catalogue.cases) if answer.hang else []
    serious = [
        each
        for each in seen.findings.values()
        if not (each.warning and (progress.after(each.last) or progress.complete))
    ]
    answer.findings = _other_lines(answer, serious)
    recover(answer, seen, serious)
    for case, signature in catalogue.remarks:
        note = next((each for each in seen.notes if _is_remark(signature, each)), None)
        if note is not None:
            answer.remarks.append(KnownFailure(case.slug, signature.name, note.line))
            answer.evidence[note.line] = note.text
    return answer


def _log_failures(seen: Scanned, catalogue: SignatureIndex) -> list[LogFailure]:
    """Return the errors with their known failures, the first cause first and echoes last."""
    raised = [error for error in seen.errors if not is_launcher(error)]
    # An error that only a lost peer explains is an echo, even if the log does not contain the
    # error that it echoes.
    primary = find_failures(as_attempt(raised)).primary
    causes = {id(raised[each.rank]) for each in primary if not each.secondary}
    found = [
        _failure(error, catalogue, seen) if id(error) in causes else LogFailure(error, echo=True)
        for error in seen.errors
    ]
    found = [replace(each, perhaps=(*_reworded(each, catalogue), *each.perhaps)) for each in found]
    if not any(each.error.type and not each.echo for each in found):
        # Ranks that do not find each other raise the errors of a lost peer too.
        found = [
            replace(each, echo=False) if each.rule and each.rule.shows == "cause" else each
            for each in found
        ]
    # One line alone adds nothing to its traceback, and of mixed tracebacks an error without a type
    # is the rest of another one.
    mixed = any(each.error.mixed and each.error.type for each in found)
    framed = {
        item.case for each in found if each.error.places for item in (*each.known, *each.perhaps)
    }
    found = [
        each
        for each in found
        if (each.error.type or not (mixed and each.error.mixed))
        and not (each.error.ignored and seen.progress.complete)
        and (each.error.places or framed.isdisjoint(item.case for item in each.perhaps))
    ]
    return sorted(found, key=lambda each: (each.echo, not each.error.type, each.line))


def _other_lines(answer: LogAnswer, findings: Iterable[Finding]) -> list[Finding]:
    """Return the lines that no error explains: causes, then how processes ended, then peers."""
    lines = {each.line for each in answer.causes}
    kinds = {each.rule.name for each in answer.causes if each.rule}
    order = ["cause", "end", "peer"]
    return sorted(
        (each for each in findings if each.line not in lines and each.kind not in kinds),
        key=lambda each: (
            order.index(rules()[each.kind].shows),
            each.kind == "ended-without-error",
            each.line,
        ),
    )


def _failure(error: Error, catalogue: SignatureIndex, seen: Scanned) -> LogFailure:
    known: list[KnownFailure] = []
    perhaps: list[KnownFailure] = []
    strategies = strategies_of(error, catalogue.strategies)
    for case, signature in catalogue.failures:
        if not _applies_to(case, strategies):
            continue
        ambiguous_with = signature.ambiguous_with
        clear = not ambiguous_with or _ruled_out(ambiguous_with, error, seen)
        missing = _missing(signature, error, clear)
        if missing is None and clear:
            other = _in_any_model(signature)
            missing = _missing(other, error, clear) if other else None
            missing = None if missing is None else (*missing, "raised in the code of another model")
        if missing is None:
            continue
        if signature.kind == "signal":  # any mistake of an unknown script can end in a crash
            missing = (*missing, "a crash at this place may have other causes")
        elif ambiguous_with and not clear:
            missing = (*missing, f"{_AMBIGUOUS} {ambiguous_with.cause}")
        (perhaps if missing else known).append(
            KnownFailure(case.slug, signature.name, error.line, missing)
        )
    # Failures without another possible cause come first.
    ambiguous = {
        item.case for item in perhaps if any(text.startswith(_AMBIGUOUS) for text in item.missing)
    }
    simulated = catalogue.simulated
    perhaps.sort(key=lambda i: (i.case in simulated, i.case in ambiguous, len(i.missing)))
    names = list(dict.fromkeys(item.case for item in known))
    if len(names) == 1:
        return LogFailure(error, tuple(known))
    for index, item in enumerate(known):
        others = tuple(f"{other} shows the same" for other in names if other != item.case)
        perhaps.insert(index, replace(item, missing=others))
    return LogFailure(error, (), tuple(perhaps))


def _reworded(failure: LogFailure, catalogue: SignatureIndex) -> tuple[KnownFailure, ...]:
    """Return the case of which a rule recognizes another wording or another place."""
    name = failure.rule.case if failure.rule and not failure.known else ""
    strategies = strategies_of(failure.error, catalogue.strategies)
    cases = [each.slug for each in catalogue.cases if _applies_to(each, strategies)]
    # A case that is possible already is shown in its own wording.
    if name not in cases or name in {each.case for each in failure.perhaps}:
        return ()
    return (KnownFailure(name, "", failure.line, ("another wording of it, or raised elsewhere",)),)


def _applies_to(case: Case, strategies: set[str]) -> bool:
    # The same text under another strategy has another cause (grading/grade.py).
    return not strategies or bool(strategies & set(case.axes.strategy))


def _missing(signature: Signature, error: Error, clear: bool) -> tuple[str, ...] | None:
    """Return what the log does not show of a signature; None if the log contradicts it.

    ``clear``: no other cause is in question.
    """

    def matches(signature: Signature, error: Error) -> bool:
        attempt = as_attempt([error])
        return bool(
            match_attempt(signature, attempt, find_failures(attempt), ",".join(signature.messages))
        )

    if matches(signature, error):
        missing = [_MIXED] if error.mixed else []
        if error.record and not matches(
            signature, replace(error, record=with_installed_frames(error.record))
        ):
            missing.append("its files do not lie in an installed package")
        return tuple(missing)
    unframed = signature.model_copy(update={"frames": []})
    if signature.package == "torch" and error.places and clear and not signature.frames:
        copied = signature.model_copy(update={"package": None})
        if matches(copied, error):
            place = f"raised in {module_of(error)}, not in {signature.package}"
            return (f"{place}: perhaps a copy of its code, or cut",)
    if error.mixed and not signature.ambiguous_with:
        return (_MIXED,) if matches(unframed.model_copy(update={"package": None}), error) else None
    if (error.whole and not error.mixed) or (error.signal and not error.stack):
        return None
    if signature.kind == "exception" and error.record and not error.places:
        if signature.ambiguous_with and _PYTHON.search(error.message):
            return None
        location = f"{signature.package}.unknown"
        frame = {"file": "", "line": None, "function": "", "module": "", "code_location": location}
        bare = replace(error, record={**error.record, "frames": [frame]})
        return ("its last line alone, no traceback",) if matches(unframed, bare) else None
    if signature.frames and matches(unframed, error) and not _in_other_model(signature, error):
        return ("the frames that would tell are cut off",)
    return None


def _in_any_model(signature: Signature) -> Signature | None:
    """Return a signature for the code of any model of transformers.

    None for a signature whose frames are not of a model.
    """
    frames = [
        frame.model_copy(
            update={"module": _MODEL.sub(r"transformers\\.models\\.\\w+", frame.module)}
        )
        for frame in signature.frames
    ]
    named = any(_MODEL.search(frame.module) for frame in signature.frames)
    return signature.model_copy(update={"frames": frames}) if named else None


def _in_other_model(signature: Signature, error: Error) -> bool:
    """Return whether a traceback shows a model's code, but not that of the signature's model."""
    wanted = [
        frame.module
        for frame in signature.frames
        if frame.module.startswith(("transformers\\.models", "transformers_m"))
    ]
    names = [name for place in error.places for name in module_names(place["file"])]
    shown = [
        name for name in names if name.startswith(("transformers.models.", "transformers_modules."))
    ]
    return bool(wanted and shown) and not any(
        re.fullmatch(module, name) for module in wanted for name in shown
    )


def strategies_of(error: Error, strategies: Iterable[Strategy]) -> set[str]:
    """Return the strategies whose code is in a traceback (``source_files`` of conf/strategy)."""
    files = [place["file"] for place in error.places]
    return {
        strategy.slug
        for strategy in strategies
        if any(re.search(code, file) for code in strategy.source_files for file in files)
    }


def _ruled_out(ambiguous_with: AmbiguousWith, error: Error, seen: Scanned) -> bool:
    """Return whether the error or another line of the log excludes the other cause."""
    if ambiguous_with.ruled_out_by is None:
        return False
    texts = [
        error.message,
        *(f"{place['file']} {place['function']} {place.get('code')}" for place in error.places),
        *(note.text for note in seen.notes),
    ]
    return any(re.search(ambiguous_with.ruled_out_by, text) for text in texts)


def _is_remark(signature: Signature, note: Note) -> bool:
    """Return whether a line is the warning of a known failure.

    Only a warning shows the module that wrote it. Of another line the text counts if it begins the
    line, or follows a logger's format.
    """
    found = re.search(signature.message or "", note.text)
    if found is None or (found.start() > 0 and not _BEFORE.fullmatch(note.text[: found.start()])):
        return False
    modules = module_names(note.file) if note.file else ()
    return not note.file or any(in_package(name, signature.package or "") for name in modules)
