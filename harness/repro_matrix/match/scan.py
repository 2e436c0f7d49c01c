"""Scan a log for what can be judged in it: tracebacks, versions, texts of signatures.

Constant memory, and a few seconds for 100 MB: only lines with one of a few words, and those that
follow them while a traceback is open, are parsed, and only for what has these words. Lines that
differ in their digits only are asked for words once; of many of them the first ones and the last
one are parsed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import itemgetter

from packaging.version import Version

from repro_matrix.config.failure_rules import ADVICE, FailureRule, names_end, rule_of, rules
from repro_matrix.config.vocabulary import TRAINERS, UPSTREAM
from repro_matrix.grading.log_labels import HEADER, Labels, Line
from repro_matrix.grading.tracebacks import Error, Errors
from repro_matrix.match.collectives import Waits
from repro_matrix.match.keywords import DIGITS, LinePatterns, SignatureIndex
from repro_matrix.match.lines import CutLine, unpack

MAX_NOTES = 1000
MAX_NOTE = 1200  # characters

# --- versions: from what a log prints of its environment

_NUMBER = (
    r"v?(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|post|rc|a|b)\d*)?"
    r"(?:\+[a-z0-9]+(?:[._][a-z0-9]+)*)?)"
)
_VERSION = re.compile(
    rf"(?<![\w-])(?P<package>pytorch|{'|'.join((*UPSTREAM, *TRAINERS))})"
    r"(?:=="  # pip freeze, requirements
    r"| {2,}"  # pip list, conda list
    r"|-"  # Successfully installed ...
    # transformers env, collect_env, ds_report, a Trainer's model card, what scripts print
    r"|[`'\"]?(?:\.__version__|[ _](?:install )?version)(?: \(GPU\?\))?[`'\"]?[ :=.]*[`'\"]?"
    r"| info[ :]+(?:version=|\.+ )"
    rf"|[ :]+){_NUMBER}(?=$|[\s,;'\"`)]|\.dist-info)",
    re.IGNORECASE | re.ASCII,
)
# Words near the version of a package that is required or removed, not installed.
_WANTED = re.compile(
    r"(?i)\b(?:requires?|requirement|required|requested|collecting|(?:un|pip )install\w*|existing"
    r" installation"
    r"|downloading|cached|upgrade|downgrade|deprecated|removed|since|until|before|minimum"
    r"|least|supports?|needs?)\b"
)
_OR_NEWER = re.compile(
    r"(?i),? *(?:or (?:newer|later|higher|above|greater)|(?:is|are) required|will\b|we changed)"
)


@dataclass
class Versions:
    """Collect package -> release -> the first line that mentions it.

    If a log mentions two releases of a package, neither is known.
    """

    releases: dict[str, dict[str, int]] = field(default_factory=dict)

    def read(self, text: str, number: int) -> None:
        """Read the versions in a line."""
        for found in _VERSION.finditer(text):
            before = text[max(0, found.start() - 200) : found.start()].replace(
                "Requirement already satisfied", ""
            )
            if _WANTED.search(before.rpartition("but you have")[2]) or _OR_NEWER.match(
                text, found.end()
            ):
                continue
            version = str(Version(found["version"]))
            self.releases.setdefault(found["package"].lower().removeprefix("py"), {}).setdefault(
                version, number
            )

    @property
    def known(self) -> dict[str, str]:
        """Return the packages with one release in the log.

        ``2.2.2`` and ``2.2.2+cu121`` are one release.
        """
        known = {}
        for name, releases in self.releases.items():
            full = {
                v for v in releases if not any(o != v and Version(o).public == v for o in releases)
            }
            if len(full) == 1:
                known[name] = full.pop()
        return known

    @property
    def unclear(self) -> dict[str, list[str]]:
        return {
            name: sorted(releases)
            for name, releases in self.releases.items()
            if name not in self.known
        }


# --- torchrun's summary

_SUMMARY = re.compile(r"^\s*(?:rank +: (?P<rank>\d+)|exitcode +: )")


@dataclass
class ScanSummary:
    """Read the ranks that torchrun lists.

    ``root``: the first rank that failed; ``rank``: that of the current line.
    """

    root: int | None = None
    rank: int | None = None
    _root_next: bool = False

    def read(self, text: str) -> None:
        self._root_next = self._root_next or "Root Cause" in text
        found = _SUMMARY.match(text)
        if found and found["rank"]:
            self.rank = int(found["rank"])
            if self._root_next:
                self.root = self.rank
                self._root_next = False


# --- lines that show a kind of failure (config/failure_rules.yaml)

_STATED = re.compile(r"\b[Rr]ank ?(\d+)\]|\btask (\d+):|\bprocess rank (\d+)|\b(local_rank: \d+)")
_NOTE = re.compile(r"\[I[ \d]|^I\d{4} |(?<![=\w])(?:INFO|DEBUG)\b")
_WARNED = re.compile(
    r"\[W[ \d]|^W\d{4} |^Warning: |(?<!NCCL )(?<!=)\b(?:WARN|WARNING|UserWarning)\b"
)
_TYPED = re.compile(r"[a-z](?:Error|Exception)\b")
_EARLIER = re.compile(
    r"(?i)\b(?:previous|earlier|prior|last) (?:job|run|attempt)\b|\bresum\w+ (?:from|training)\b"
)
# Text that marks a traceback as harmless: generated by a model, or raised in a helper thread.
_QUOTES = re.compile(
    r"Exception in thread|(?i:^(?!.*(?:error|exception|fail)).*"
    r"\b(?:samples?|generat(?:ed|ions?)|predict(?:ed|ions?)|prompt|completion|response"
    r"|answer|question)\b[^.]{0,40}$)"
)
# Text before a failure in a last line that reports none.
_NONE = re.compile(
    r"(?i)\bearly.?stop|\bsav(?:ed|ing)\b[^.;]*$|\b(?:no|none|never|not)(?: \w+){0,2} $"
)
MAX_FINDINGS = 300


@dataclass(frozen=True)
class Finding:
    """Describe a line that shows a kind of failure: the first line of each rank and kind."""

    line: int
    rank: int | None
    kind: str  # the name of the rule
    text: str
    place: str = ""  # "local rank 5"
    last: int = 0  # the last line that shows it
    warning: bool = False  # only warned of, or noted


# --- whether training went on

_STEP = re.compile(r"(?i)(?<![a-z])loss\b\W{0,6}[-+]?\d")
_DONE = re.compile(
    r"(?i)train_runtime|\btraining (?:is |has |was )?(?:complete|done|finished|ended)|finished"
    r" training"
    r"|exits successfully|\.fit` stopped|exit code:? 0\b|^\W*(?:all"
    r" )?(?:done|finished|completed)\W*$"
)
STEPS = 200  # more lines than a process that has crashed still writes from its buffer (8 KiB)
BUFFER = 8192  # bytes
STEPS_BETWEEN = 20  # after an error that was caught, before another one


@dataclass
class StepProgress:
    """Follow the progress of a training: its last steps, its end, and the last line."""

    steps: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=STEPS))
    first: int = 0
    done: int = 0
    restarted: int = 0  # the last line that says that torchrun starts its processes again
    last: tuple[str, int] = ("", 0)

    def read(self, batch: list[str], shapes: list[bytes], first: int) -> None:
        """Read the steps of a batch of lines, the last ones only."""

        def is_step(at: int) -> bool:
            return b"loss" in shapes[at].lower() and bool(_STEP.search(batch[at]))

        places = range(len(batch))
        filled = ((batch[at], first + at) for at in reversed(places) if batch[at].strip())
        self.last = next(filled, self.last)
        last = list(islice(filter(is_step, reversed(places)), STEPS))
        if last and not self.first:
            self.first = first + next(filter(is_step, places))
        self.steps.extend((first + at, batch[at].strip()) for at in reversed(last))

    def findings(self) -> Iterator[Finding]:
        """Yield what each of the last steps shows."""
        for rule in rules().values() if len(self.steps) > 2 else ():
            if rule.place == "every_step" and all(
                re.search(rule.text, text) for _, text in self.steps
            ):
                line, text = self.steps[0]
                last, _ = self.steps[-1]
                yield Finding(line, None, rule.name, text[:MAX_NOTE], last=last)

    @property
    def since(self) -> int:
        """Return the line of the first of the last STEPS steps; 0 if there are fewer."""
        return self.steps[0][0] if len(self.steps) == STEPS else 0

    @property
    def ended(self) -> bool:
        """Return whether training is complete, or the log shows no step of it."""
        return not self.after(self.done)

    def after(self, line: int) -> bool:
        """Return whether a step follows a line."""
        return bool(self.steps) and self.steps[-1][0] > line

    @property
    def complete(self) -> bool:
        """Return whether the log reports that training is complete, and no step follows."""
        return self.done > 0 and self.ended

    def buffered(self, line: int) -> bool:
        """Return whether the steps after a line may have been made before it.

        That is, the first step follows the line, and all steps fit in the buffer of a process.
        """
        size = sum(len(text) + 1 for _, text in self.steps) / max(1, len(self.steps))
        return line < self.first and (self.steps[-1][0] - self.first) * size < BUFFER

    @property
    def overcome(self) -> int:
        """Return the line of a restart after which training was completed.

        Errors before it did not end the run.
        """
        return self.restarted if self.complete and self.after(self.restarted) else 0

    def goes_on(self, line: int, later: int) -> bool:
        """Return whether training went on after a line, until another one."""
        return sum(line < at < later for at, _ in self.steps) >= STEPS_BETWEEN

    def recovered(self, line: int) -> bool:
        """Return whether training went on after a line, and was complete or went on for long."""
        return self.since > line or any(line < at < self.done for at, _ in self.steps)


# --- the scan

LINES = 4096  # that are read together
SHAPES = 100_000  # lines without their digits that are remembered
REPEATS = 1000  # of the lines that differ in their digits only are parsed, and the last one


@dataclass(frozen=True)
class Note:
    """Describe a line that a signature, or what excludes its other causes, looks for."""

    line: int
    text: str
    file: str  # of the module that a warning blames


@dataclass
class Scanned:
    """All that a log shows."""

    lines: int = 0
    errors: list[Error] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    versions: Versions = field(default_factory=Versions)
    summary: ScanSummary = field(default_factory=ScanSummary)
    # by rank, kind and place
    findings: dict[tuple[int | None, str, str], Finding] = field(default_factory=dict)
    progress: StepProgress = field(default_factory=StepProgress)
    waits: Waits = field(default_factory=Waits)
    unread: dict[str, int] = field(default_factory=dict)  # why -> the first line that is not read
    cut: set[int] = field(default_factory=set)  # lines of which only the beginning is read
    world: int = 1  # the largest world size that a line names, outside of errors

    @property
    def several_ranks(self) -> bool:
        """Return whether the log shows more than one rank."""
        ranks = {rank for error in self.errors for rank in error.ranks} | {
            rank or 0 for rank, *_ in self.findings
        }
        return self.world > 1 or max(ranks, default=0) > 0


_WORLD = re.compile(r"(?i)world[_ ]sizes?[\"']?\s*[=:]\s*\[?(\d+)")
_TORCHRUN = (  # printed where it starts several
    "OMP_NUM_THREADS environment variable for each process"
)
_WARNING = re.compile(r"^(?P<file>\S+\.py):\d+: \w+: (?P<message>.*)$")


def scan(texts: Iterable[str], known: SignatureIndex) -> Scanned:
    """Scan the lines of a log."""
    found = Scanned()
    errors = Errors()
    labels = Labels()
    remaining = iter(texts)
    answers: dict[bytes, LinePatterns | None] = {}
    times: Counter[bytes] = Counter()
    skipped: dict[bytes, tuple[int, str, LinePatterns | None]] = {}

    def read(number: int, raw: str, patterns: LinePatterns | None) -> None:
        errors.quoted = HEADER in raw and bool(_QUOTES.search(raw, 0, raw.index(HEADER)))
        texts, problem = unpack(raw)
        if problem:
            found.unread.setdefault(problem, number)
        if any(isinstance(text, CutLine) for text in texts):
            found.cut.add(number)
        for line in (labels.split(text, number) for text in texts):
            taken = errors.read(line) or errors.quoted
            if patterns:
                _note(found, line, patterns, errors, taken)

    while batch := list(islice(remaining, LINES)):
        text = " \n".join([*map(str.rstrip, batch), ""]).encode("utf-8", "replace")
        shapes = text.translate(None, DIGITS).split(b"\n")
        found.progress.read(batch, shapes, found.lines + 1)
        lines = enumerate(batch, found.lines + 1)
        found.cut |= {number for number, line in lines if isinstance(line, CutLine)}
        errors.expire(found.lines)
        if len(answers) > SHAPES:
            answers.clear()
            times.clear()
        answers |= known.patterns_of(set(shapes) - answers.keys())
        for number, raw, shape in zip(count(found.lines + 1), batch, shapes):
            patterns = answers[shape]
            if not (patterns or errors.busy):
                continue
            alone = patterns and not patterns.exact and not errors.unfinished
            if alone and times[shape] == REPEATS:
                skipped[shape] = (number, raw, patterns)
                continue
            read(number, raw, patterns)
            if alone and not errors.unfinished and not names_end(raw):
                times[shape] += 1
        found.lines += len(batch)
    errors.expire(sys.maxsize)
    for number, raw, patterns in sorted(skipped.values(), key=itemgetter(0)):
        read(number, raw, patterns)
    errors.end()
    if found.progress.complete:
        found.unread.clear()  # a quoted error, or one that training went on after
    found.findings |= {(None, each.kind, ""): each for each in found.progress.findings()}
    _note_last(
        found, labels.split(*found.progress.last), [each.last for each in errors.found.values()]
    )
    found.errors = list(errors.found.values())
    return found


def _note(found: Scanned, line: Line, patterns: LinePatterns, errors: Errors, taken: bool) -> None:
    """Note what a line shows, in a traceback or outside of it."""
    text = line.text
    if text.lstrip("[>^~ ").startswith('File "'):
        return
    if "summary" in patterns.readers:
        found.summary.read(text)
    if "waits" in patterns.readers:
        found.waits.read(line)
    message = patterns.message_in(text)
    rule = rule_of(text, patterns.rules)
    if message and not taken and not text.startswith("│"):
        errors.add_message(line, str(message[0].type), message[1])
    elif rule and (not taken or rule.shows == "end") and not _mentions(rule, text):
        if rule.case:
            errors.add_message(line, "", text)
        else:
            _find(found, line, rule)
    if "done" in patterns.readers:
        if _DONE.search(text):
            found.progress.done = max(found.progress.done, line.number)
        if "will restart worker group" in text:
            found.progress.restarted = line.number
    if "world" in patterns.readers and not taken:
        sizes = [int(size) for size in _WORLD.findall(text)]
        found.world = max(found.world, *sizes, 1 + (_TORCHRUN in text))
    if "versions" in patterns.readers:
        found.versions.read(text, line.number)
    if len(found.notes) < MAX_NOTES and any(
        re.search(pattern, text) for pattern in patterns.patterns
    ):
        warning = _WARNING.match(text)
        file, message_text = (warning["file"], warning["message"]) if warning else ("", text)
        found.notes.append(Note(line.number, message_text[:MAX_NOTE], file))


def _note_last(found: Scanned, line: Line, errors: list[int]) -> None:
    """Note the last line of a training that is not complete, if no other line explains why."""
    progress = found.progress
    text = line.text[:MAX_NOTE]
    shown = max([found.waits.last, *errors, *(each.last for each in found.findings.values())])
    if (progress.done and progress.ended) or not progress.after(shown) or _is_warning(text):
        return
    for rule in rules().values():
        ends = re.search(rule.text, text) if rule.place == "last_line" else None
        if ends and not (_mentions(rule, text) or _NONE.search(text, 0, ends.start())):
            _find(found, line, rule)


def _mentions(rule: FailureRule, text: str) -> bool:
    """Return whether a line only mentions a failure: a logger's note, or advice."""
    shown = re.search(rule.text, text)
    advice = shown and ADVICE.search(text, 0, shown.start())
    return rule.shows != "end" and bool(advice or (not rule.any_level and _is_noted(rule, text)))


def _is_noted(rule: FailureRule, text: str) -> bool:
    """Return whether a logger prints the content of a line as information."""
    shown = re.search(rule.text, text)
    counts = rule.shows == "peer" or (shown and not rule.any_level)
    end = shown.start() if shown else len(text)
    return bool(counts and not _TYPED.search(text) and _NOTE.search(text, 0, end))


def _is_warning(text: str) -> bool:
    return bool(_WARNED.search(text)) and not _TYPED.search(text)


def _find(found: Scanned, line: Line, rule: FailureRule) -> None:
    stated = _STATED.search(line.label + line.text)
    named = stated[stated.lastindex or 1] if stated else ""
    rank = int(named) if named.isdigit() else line.rank
    if rank is None and _SUMMARY.match(line.text):
        rank = found.summary.rank
    place = "" if named.isdigit() else named.replace("_", " ").replace(":", "")
    key = (rank, rule.name, place)
    # Refusals are raised: a line that steps follow only mentions one.
    warning = (
        _is_warning(line.text)
        or _is_noted(rule, line.text)
        or bool(_EARLIER.search(line.text) or rule.library)
    )
    old = found.findings.get(key)
    if old and (old.warning <= warning):
        found.findings[key] = replace(old, last=line.number)
    elif old or len(found.findings) < MAX_FINDINGS:
        text = line.text[:MAX_NOTE]
        found.findings[key] = Finding(
            line.number, rank, rule.name, text, place, line.number, warning
        )
