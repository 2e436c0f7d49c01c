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
from dataclasses import dataclass, field, replace
from functools import cached_property

from repro_matrix.config.failure_rules import FailureRule, rule_of, rules
from repro_matrix.config.schema import AmbiguousWith, Case, Signature, Strategy
from repro_matrix.grading.log_labels import without_time
from repro_matrix.grading.observation import in_package, module_names
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import match_attempt
from repro_matrix.grading.tracebacks import Error
from repro_matrix.match.collectives import LogHang, cases_like, hang_of
from repro_matrix.match.errors import as_attempt, module_of, raised_by, with_installed_frames
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.scan import Finding, Note, Scanned, StepProgress

# Errors of launchers and drivers, that only say that some process of theirs failed.
_LAUNCHERS = re.compile(
    r"(?:[\w.]+\.)?(ChildFailedError|CalledProcessError|ProcessRaisedException"
    r"|ProcessExitedException|RayTaskError(\(.*\))?|RayActorError|ActorDiedError"
    r"|WorkerCrashedError|TrainingFailedError|SignalException|TuneError|SystemExit)"
)
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
_QUOTED = re.compile(r"[\"'`](?:[\w.]+: )?$")  # before words of another error
FEW_STEPS = 2  # that the other ranks still make, where no label tells them apart
_AMBIGUOUS = "it may as well be"
_MIXED = "lines of several tracebacks stand among each other"
_MODEL = re.compile(r"transformers\\\.models\\\.\w+")  # in a signature's regular expression


@dataclass(frozen=True)
class KnownFailure:
    """Describe a signature that an error, or a line, of the log shows.

    ``missing``: why it is only possible.
    """

    case: str
    signature: str
    line: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogFailure:
    """One error of the log, with the known failures that it is, or may be."""

    error: Error
    known: tuple[KnownFailure, ...] = ()
    perhaps: tuple[KnownFailure, ...] = ()
    echo: bool = False  # it only follows from another process's failure

    @property
    def line(self) -> int:
        return self.error.line

    @property
    def possible(self) -> list[KnownFailure]:
        """Return the possible known failures, each case once."""
        return list({item.case: item for item in reversed(self.perhaps)}.values())[::-1]

    @cached_property
    def rule(self) -> FailureRule | None:
        """Return the kind of failure that the message shows.

        How a process ended counts only in the message of a launcher.
        """
        error = self.error
        text = (
            f"died with signal {error.signal}" if error.signal else f"{error.type}: {error.message}"
        )
        rule = rule_of(
            text,
            [each for each in rules().values() if not each.library or _refuses(each, error, text)],
        )
        only_end = rule is not None and rule.shows == "end" and not rule.exit_codes
        return None if only_end and not (error.signal or _LAUNCHERS.fullmatch(error.type)) else rule

    @property
    def kind(self) -> str:
        """Return the name of that rule if the failure is not a case."""
        return self.rule.name if self.rule and not (self.known or self.perhaps) else ""


@dataclass
class LogAnswer:
    failures: list[LogFailure] = field(default_factory=list)  # the first cause first, echoes last
    remarks: list[KnownFailure] = field(default_factory=list)  # warnings that are a known failure's
    evidence: dict[int, str] = field(default_factory=dict)  # the lines of remarks
    hang: LogHang | None = None
    # known hangs whose ranks wait in the same kinds of collectives
    like: list[str] = field(default_factory=list)
    # other lines: causes, then how processes ended, then peers
    findings: list[Finding] = field(default_factory=list)
    # training went on after them, and none ended it
    recovered: list[LogFailure | Finding] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Return the recognized cases, the first cause's first."""
        every = [*(known for failure in self.failures for known in failure.known), *self.remarks]
        return list(dict.fromkeys(known.case for known in every))

    @property
    def causes(self) -> list[LogFailure]:
        return [failure for failure in self.failures if not failure.echo]

    @property
    def leading(self) -> list[LogFailure | Finding | LogHang]:
        """Return the errors and lines that show a cause, the first cause first.

        A general one ("NCCL failed") comes after a specific one and after a collective that timed
        out; a line comes after an error. An unexplained error comes later if a refusal was raised
        while it was handled.
        """
        refused = {each.error.after for each in self.causes if each.rule and each.rule.library}
        shown = [each for each in self.findings if rules()[each.kind].shows == "cause"]
        return sorted(
            [
                *(each for each in self.causes if each.error.type),
                *shown,
                *([self.hang] if self.hang else []),
            ],
            key=lambda each: (
                _is_general(each),
                isinstance(each, LogHang),
                isinstance(each, Finding),
                not each.kind and each.line in refused,
                each.line,
            ),
        )

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of failures that are not cases, the first cause's first."""
        every = [*self.leading, *self.causes, *self.findings, *self.failures]
        return list(dict.fromkeys(each.kind for each in every if each.kind))

    @property
    def exit_code(self) -> int:
        return 0 if self.names else 1 if self.failures or self.findings or self.hang else 3


def _refuses(rule: FailureRule, error: Error, text: str) -> bool:
    """Return whether a rule's library raised an error in its words, rather than quoting them."""
    found = re.search(rule.text, text)
    return bool(
        found and not _QUOTED.search(text, 0, found.start()) and raised_by(error, rule.packages)
    )


def _is_general(each: LogFailure | Finding | LogHang) -> bool:
    return each.kind in rules() and rules()[each.kind].general


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
    _recover(answer, seen, serious)
    for case, signature in catalogue.remarks:
        note = next((each for each in seen.notes if _is_remark(signature, each)), None)
        if note is not None:
            answer.remarks.append(KnownFailure(case.slug, signature.name, note.line))
            answer.evidence[note.line] = note.text
    return answer


def _is_launcher(error: Error) -> bool:
    return bool(_LAUNCHERS.fullmatch(error.type)) and "ninja" not in error.message


def _log_failures(seen: Scanned, catalogue: SignatureIndex) -> list[LogFailure]:
    """Return the errors with their known failures, the first cause first and echoes last."""
    raised = [error for error in seen.errors if not _is_launcher(error)]
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


def _recover(answer: LogAnswer, seen: Scanned, serious: Iterable[Finding]) -> None:
    """Move what training overcame to ``recovered``: it went on, and none of it ended the run."""
    progress, hang = seen.progress, answer.hang
    later = max(_fatal_lines(answer), default=0)
    if hang and (progress.recovered(hang.last) or progress.goes_on(hang.last, later)):
        answer.hang, answer.recovered = None, [Finding(hang.line, None, hang.kind, str(hang))]
    ends = [each.last for each in serious if rules()[each.kind].ends_process]
    ends += [error.last for error in seen.errors if _is_launcher(error)]
    crashed = answer.hang or any(last > progress.overcome for last in ends)

    def recovered(last: int, buffered: bool = False) -> bool:
        ends_well = not (crashed or buffered) and progress.recovered(last)
        return last < progress.overcome or progress.goes_on(last, later) or ends_well

    def caught(each: LogFailure) -> bool:
        error = each.error
        return _was_caught(each, answer.causes, progress) or (
            recovered(error.last, _may_be_buffered(error, progress))
            and (_may_be_caught(error, progress) or error.last < progress.overcome)
        )

    failures = list(filter(caught, answer.failures))
    findings = [each for each in answer.findings if recovered(each.last)]
    answer.recovered += [*failures, *findings]
    answer.failures = [each for each in answer.failures if each not in failures]
    answer.findings = [each for each in answer.findings if each not in findings]


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
    perhaps.sort(
        key=lambda item: (
            item.case in catalogue.simulated,
            item.case in ambiguous,
            len(item.missing),
        )
    )
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
            return (
                (
                    f"raised in {module_of(error)}, not in {signature.package}: perhaps a copy of"
                    " its code, or cut"
                ),
            )
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
    ]
    return any(
        re.search(ambiguous_with.ruled_out_by, text)
        for text in (*texts, *(note.text for note in seen.notes))
    )


def _fatal_lines(answer: LogAnswer) -> list[int]:
    """Return the last lines of the errors and of what else shows a cause by itself."""
    shown = [(each, rules()[each.kind]) for each in answer.findings]
    causes = [
        each
        for each, rule in shown
        if rule.shows == "cause" and rule.place == "any_line" and not rule.general
    ]
    return [
        *(each.error.last for each in answer.causes if each.error.type),
        *(each.last for each in causes),
    ]


def _may_be_caught(error: Error, progress: StepProgress) -> bool:
    """Return whether lines after an error can be of its process.

    Steps of another process, by their labels, do not show that this one went on. torch writes
    ``[rank1]:`` before each line of an error that a rank does not catch.
    """
    if not error.label or error.signal:
        return not error.signal
    label = re.sub(r"\d+", r"\\d+", re.escape(error.label))
    labelled = [text for _, text in progress.steps if re.match(label, without_time(text))]
    uncaught = labelled or re.fullmatch(r"\[rank\d+\]:?", error.label)
    return not uncaught or any(without_time(text).startswith(error.label) for text in labelled)


def _was_caught(failure: LogFailure, causes: list[LogFailure], progress: StepProgress) -> bool:
    """Return whether steps of the same process follow a refusal or an unexplained error.

    A later error must follow these steps. It must be of the same process if the steps may come from
    a buffer.
    """
    error, explained = (
        failure.error,
        failure.known or failure.perhaps or (failure.rule and not failure.rule.library),
    )
    if explained or failure.echo or not error.type:
        return False
    later = [each.error for each in causes if each.error.type]
    if progress.buffered(error.last):
        later = [each for each in later if each.label == error.label != ""]
    end = max((each.line for each in later), default=0)
    steps = [at for at, text in progress.steps if without_time(text).startswith(error.label)]
    return sum(error.last < at < end for at in steps) > (0 if error.label else FEW_STEPS)


def _may_be_buffered(error: Error, progress: StepProgress) -> bool:
    """Return whether an error may have ended the steps below it.

    Steps below an import that failed were made after it.
    """
    return (
        "ImportError" not in error.type
        and "ModuleNotFound" not in error.type
        and progress.buffered(error.last)
    )


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
