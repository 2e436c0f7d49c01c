"""What a run shows, in the order in which a reader needs it: how many known failures reproduce, whether the documented
fixes work, what needs attention, and one line for each case. Pure.

The terminal, the page, JUnit, Markdown and the badge all take their words and numbers from here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from repro_matrix.analysis.regressions import ChangedCase, Regressions
from repro_matrix.analysis.releases import STATES, Releases, releases_of
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.report.terminal import label
from repro_matrix.results.rows import Row
from repro_matrix.text import counted

CaseState = Literal["reproduces", "fixed", "absent", "other_failure", "unclear", "passes", "fails", "not_measured"]
# The state of a case -> its symbol and its name, in the order of a table. Only the first two need somebody to act.
CASE_STATES: Mapping[str, tuple[str, str]] = {
    "attention": ("!", "needs attention"), "fails": ("!", "control fails"), "reproduces": ("R", "reproduces"),
    "fixed": ("f", "fixed upstream"), "absent": ("o", "not reproduced"), "other_failure": ("e", "with another error"),
    "unclear": ("?", "unclear"), "passes": ("✓", "control passes"), "not_measured": ("–", "not measured"),
}  # fmt: skip

Kind = Literal["stopped_working", "came_back", "new_failure", "different", "differs_from_cpu"]
# What needs attention, the most urgent first.
ATTENTION: Mapping[Kind, str] = {
    "stopped_working": "STOPPED WORKING", "came_back": "CAME BACK", "new_failure": "NEW FAILURE",
    "different": "DIFFERENT", "differs_from_cpu": "DIFFERENT FROM THE CPU",
}  # fmt: skip

SKIPS = {
    "gpus": "needs more GPUs", "accelerator": "needs a GPU", "packages": "needs other packages",
    "stack": "needs a stack that is not built", "build": "needs an extension that cannot be built",
    "memory": "needs more memory", "weights": "needs weights", "same": "equals the unfixed variant here",
}  # fmt: skip
GONE = "no longer reproduces"
NO_PREVIOUS = "No earlier run here to compare with. The next one is compared with this one, if this one passes."


@dataclass(frozen=True)
class Fact:
    """A sentence of the answer. ``target``: where the page lists what it counts. ``urgent``: somebody has to act."""

    text: str
    target: str = "matrix"
    urgent: bool = False


@dataclass(frozen=True)
class Attention:
    """Variants of one cell that differ for the same reason. ``change``: since the last passing run, where there is
    one; it names the packages that changed and the fixes that still work."""

    kind: Kind
    rows: tuple[Row, ...]
    change: ChangedCase | None = None

    @property
    def row(self) -> Row:
        return self.rows[0]

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments that measure these variants again."""
        return replace(self.row, variant=",".join(row.variant for row in self.rows)).command

    @property
    def since(self) -> str:
        """Say since which run the result differs and what else changed; "" where that is unknown."""
        if self.change is None:
            return ""
        nothing = ["no package, no part of the machine and no file of the catalog changed"]
        return f"since {self.change.passing.run_id}: {'; '.join(self.change.moved or nothing)}"

    @property
    def search(self) -> tuple[str, ...]:
        """The arguments that find the release, where packages changed since the last passing run."""
        versions = self.change.versions if self.change else {}
        before = [f"+{name}@{versions[name][0].partition('+')[0]}" for name in UPSTREAM if name in versions]
        if not before or any(each.endswith("@none") for each in before):
            return ()
        stack = self.row.stack.name
        variant = () if self.kind == "came_back" else ("--variant", self.row.variant)
        ends = "--good", stack + "".join(before), "--bad", stack
        return "repro", "bisect", self.row.case, *ends, *variant, "--any-change", *self.row.axes


@dataclass(frozen=True)
class CaseStatus:
    """What one case shows on the newest stack that was measured. ``fixes``: documented ones that work in every cell in
    which the failure reproduces; ``failing``: the other documented ones, also those that fail on an older stack where
    nothing is expected; ``lost``: those that were launched and gave no evidence."""

    case: str
    title: str
    state: CaseState
    detail: str
    simulated: bool
    fixes: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    releases: Releases = field(default_factory=Releases)


@dataclass(frozen=True)
class Headline:
    """``previous``: the last passing run that the results were compared with; "" where there is none, and
    ``no_previous`` says why and what to do. ``partial``: it measured less than requested. ``removed``: its variants
    that the catalog no longer has. ``unselected``: known failures of the catalog that are not among the rows."""

    rows: Sequence[Row]
    cases: Sequence[CaseStatus]
    attention: Sequence[Attention]
    changes: int = 0
    previous: str = ""
    partial: bool = False
    removed: tuple[str, ...] = ()
    no_previous: str = NO_PREVIOUS
    unselected: int = 0

    def count(self, *states: CaseState) -> int:
        return sum(each.state in states for each in self.cases)

    @cached_property
    def failures(self) -> int:
        """Known failures with a result."""
        return self.count("reproduces", "fixed", "absent", "other_failure", "unclear")

    @cached_property
    def kinds(self) -> Counter[Kind]:
        """Numbers of variants, over all cells; of cases for failures that came back."""
        rows = [(each.kind, row) for each in self.attention for row in each.rows]
        return Counter(
            kind for kind, *_ in {(kind, row.case, row.variant * (kind != "came_back")) for kind, row in rows}
        )

    @cached_property
    def fixes(self) -> tuple[int, int]:
        """Documented fixes that work, and all that were tried where the failure reproduces."""
        works = sum(len(each.fixes) for each in self.cases)
        return works, works + sum(len(each.failing) + len(each.lost) for each in self.cases)

    @cached_property
    def lost(self) -> int:
        """Documented fixes that were tried and not measured."""
        return sum(len(each.lost) for each in self.cases)

    @cached_property
    def unconfirmed(self) -> list[str]:
        """What no expectation confirms: ``1 result different from the CPU``."""
        stacks = list(dict.fromkeys(row.stack.name for row in self.flaky))
        numbers = ((self.kinds["differs_from_cpu"], "result", "different from the CPU"),
                   (len(self.flaky), "flaky result", f"on {_some(stacks)}"),
                   (len(self.new), "result", "without an expectation"),
                   (len(self.unanswered), "variant", "without a verdict"))  # fmt: skip
        return [f"{counted(number, what)} {how}" for number, what, how in numbers if number]

    @cached_property
    def new(self) -> list[Row]:
        """Measured variants with a verdict that have neither an expectation nor a prediction."""
        return [row for row in self.rows if row.attempts and row.verdict and row.state == "no_expectation"
                and row.verdict != "FLAKY" and not _is_unanswered(row)]  # fmt: skip

    @cached_property
    def flaky(self) -> list[Row]:
        """Variants whose attempts disagree: an expectation cannot confirm them."""
        return [row for row in self.rows if row.verdict == "FLAKY" and row.state == "no_expectation"]

    @cached_property
    def unanswered(self) -> list[Row]:
        """Variants that ran and gave no evidence; what an expectation accepts is left out."""
        return [row for row in self.rows if _is_unanswered(row)]

    @cached_property
    def skipped(self) -> list[Row]:
        """Variants that were not launched, and why."""
        return [row for row in self.rows if not row.attempts and row.reason]

    @property
    def not_measured(self) -> str:
        """Count the cases and variants that were not launched, and the variants by reason."""
        counts = Counter(SKIPS.get(row.skip_kind or "", "other reason") for row in self.skipped)
        reasons = ", ".join(f"{text} ({count})" for text, count in counts.most_common())
        cases = self.count("not_measured")
        whole = f"{counted(cases, 'case')}. " if cases else ""
        return f"{whole}{counted(len(self.skipped), 'variant')}: {reasons}"

    def to_json(self) -> dict[str, Any]:
        """Return the numbers under stable keys."""
        works, tried = self.fixes
        return {
            "sentences": self.sentences, "known_failures": self.failures,
            "cases": dict(Counter(each.state for each in self.cases)),
            "documented_fixes": {"work": works, "tried": tried, "lost": self.lost}, "attention": dict(self.kinds),
            "changed": self.changes, "previous": self.previous or None, "new": len(self.new),
        }  # fmt: skip

    def badge(self) -> dict[str, Any]:
        """Return a badge in the format of an endpoint of shields.io."""
        works, tried = self.fixes
        message = f"{self.count('reproduces')} of {self.failures} reproduce, {works} of {tried} fixes work"
        color = "red" if any(kind != "differs_from_cpu" for kind in self.kinds) else "green"
        return {"schemaVersion": 1, "label": "known failures", "message": message, "color": color}

    @property
    def stack(self) -> str:
        """The stack in a few words: ``torch 2.13.0 + transformers 5.23.0 (CPU)``."""
        newest = max(self.rows, key=age)
        if len({row.stack.name for row in self.rows}) > 1:
            return "the newest stack of each"
        versions = newest.stack.versions
        names = [f"{name} {versions[name].partition('+')[0]}" for name in ("torch", "transformers") if name in versions]
        devices = dict.fromkeys(device(row) for row in self.rows if row.attempts)
        return f"{' + '.join(names) or newest.stack.name} ({', '.join(devices)})"

    @property
    def measured(self) -> str:
        """What was measured, and on what: packages, devices, ranks, commit, date and duration."""
        rows = [row for row in self.rows if row.attempts]
        if not rows:
            return ""
        newest = {row.case: row.stack for row in sorted(rows, key=age)}.values()
        usual = Counter(stack.name for stack in newest).most_common(1)[0][0]
        versions = next(stack.versions for stack in newest if stack.name == usual)
        packages = ", ".join(f"{name} {versions[name]}" for name in UPSTREAM if name in versions)
        stacks = len({row.stack.name for row in rows})
        ranks = Counter(row.ranks for row in rows).most_common(1)[0][0]
        commits = {row.commit[:7] for row in rows if row.commit}
        named = f"commit {min(commits)}" if len(commits) == 1 else f"{len(commits)} commits of this repository"
        ended, seconds = 0.0, 0.0  # those in which a cell was measured: of several runs, without the time between them
        for start, end in sorted((row.started, row.ended or row.started) for row in rows):
            seconds += max(0.0, end - max(start, ended))
            ended = max(ended, end)
        parts = [
            packages, f"each case on its newest of {stacks} stacks, this one for most" if stacks > 1 else "",
            ", ".join(dict.fromkeys(map(device, rows))), counted(ranks, "rank"),
            (named if commits else "no commit") + " with changed files" * any(row.dirty for row in rows),
            datetime.fromtimestamp(ended, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "" if ended - min(row.started for row in rows) > 86_400 else duration(seconds),
        ]  # fmt: skip
        return " · ".join(filter(None, parts))

    @cached_property
    def answers(self) -> Mapping[str, Sequence[Fact]]:
        """What a reader asks, and the answer. Every format has these words."""
        skipped = [Fact(f"{self.not_measured}. Reasons: repro doctor", "skipped")] if self.skipped else []
        if not any(row.attempts for row in self.rows):
            return {"Results": [Fact("Nothing was measured.")], **({"Not measured": skipped} if skipped else {})}
        listed = "unconfirmed" if self.new or self.flaky or self.unanswered else "attention-list"
        answers = {
            "Needs attention": [Fact(f"{text}.", "attention-list", True) for text in self.differences],
            "Known failures": list(self._failures()),
            "Documented fixes": list(self._fixes()),
            "Changes": [Fact(self.changed)],
            "What to do": [
                Fact(f"repro show {each.case} (or another case) prints symptom, cause and the code that helps.")
                for each in (self.example,)
                if each
            ],
            "Controls": list(self._controls()),
            "Not confirmed": [Fact(f"{text}.", listed) for text in self.unconfirmed],
            "Not measured": skipped,
        }
        return {name: facts for name, facts in answers.items() if facts}

    @property
    def sentences(self) -> list[str]:
        return [f"{name}: {' '.join(fact.text for fact in facts)}" for name, facts in self.answers.items()]

    def _failures(self) -> Iterator[Fact]:
        if self.failures:
            simulated = sum(each.simulated and each.state == "reproduces" for each in self.cases)
            some = f", {simulated} of them simulated" if simulated else ""
            shown = f"{self.count('reproduces')} of {self.failures} reproduce{'s' * (self.failures == 1)}"
            yield Fact(f"{shown} on {self.stack}{some}.", "reproduces")
        if self.unselected:
            yield Fact(f"{self.unselected} others were not selected.")
        gone = sum(each.detail == GONE for each in self.cases)
        for state in ("fixed", "absent", "other_failure", "unclear"):
            if number := self.count(state):
                before = f", {gone} of them reproduced before" if gone and state == "absent" else ""
                yield Fact(f"{number} {CASE_STATES[state][1]}{before}.", state)

    def _fixes(self) -> Iterator[Fact]:
        """Yield how many stopped working, then how many work, and the name of every other one, with what it shows."""
        works, tried = self.fixes
        stopped = list(dict.fromkeys(f"{row.case}/{row.variant}" for each in self.attention for row in each.rows
                                     if each.kind == "stopped_working"))  # fmt: skip
        if not tried and not stopped:
            return
        text = f"{len(stopped)} stopped working{': ' * bool(stopped)}{_some(stopped)}."
        yield Fact(text, "attention-list" if stopped else "matrix", bool(stopped))
        listed = {(each.case, name) for each in self.cases for name in each.failing}
        failing = [row for row in self.rows if _is_failing_fix(row)]
        known = [f"{row.case}/{row.variant} ({label(row.verdict or '').text})" for row in failing
                 if row.state in ("expected", "matches_cpu") and (row.case, row.variant) in listed]  # fmt: skip
        new = [f"{row.case}/{row.variant} on {row.stack.name}" for row in failing if row.state == "no_expectation"]
        parts = [f"All {tried} work" if works == tried > 1 else f"{works} of {tried} work{'s' * (tried == 1)}"]
        parts += [f"{self.lost} not measured"] if self.lost else []
        flaky = [f"{row.case}/{row.variant}" for row in self.flaky if (row.case, row.variant) in listed]
        for what, names in (("failing as expected", known), ("failing without an expectation", new),
                            ("flaky", flaky)):  # fmt: skip
            parts += [f"{len(set(names))} {what}: {_some(list(dict.fromkeys(names)))}"] if names else []
        yield Fact(f"{'; '.join(parts)}.")

    def _controls(self) -> Iterator[Fact]:
        passed, failed = self.count("passes"), self.count("fails")
        if passed or failed:
            what = "training without a known failure, equal to a single process"
            yield Fact(f"{passed} of {passed + failed} passed ({what}).", "fails" if failed else "passes", bool(failed))

    @property
    def example(self) -> CaseStatus | None:
        """The case that shows what to do about a failure: what needs attention, else one with a fix that works."""
        urgent = self.attention[0].row.case if self.attention else ""
        cases = [each for each in self.cases if each.state != "not_measured"]
        return min(cases, default=None, key=lambda each: (each.case != urgent, each.state != "reproduces",
                                                          each.simulated, not each.fixes))  # fmt: skip

    @property
    def differences(self) -> list[str]:
        """What differs from its expectation, the most urgent first: ``1 documented fix stopped working``."""
        names = {
            "stopped_working": ("documented fix", "stopped working"), "came_back": ("known failure", "came back"),
            "new_failure": ("new failure", ""), "different": ("other difference", ""),
        }  # fmt: skip
        found = ((self.kinds[kind], *text) for kind, text in names.items())  # type: ignore[index]
        return [f"{counted(number, what)} {how}".strip() for number, what, how in found if number]

    @property
    def changed(self) -> str:
        """Say what changed since the last passing run."""
        if not self.previous:
            return self.no_previous
        what = counted(self.changes, "result") if self.changes else "Nothing"
        partial = ", which measured less than requested" * self.partial
        removed = f"; no longer in the catalog: {', '.join(self.removed)}" if self.removed else ""
        return f"{what} changed since the last passing run ({self.previous}{partial}){removed}."


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def age(row: Row) -> tuple[Version, ...]:
    """Return the releases of torch and transformers, to sort stacks by."""
    return tuple(release(row.stack.versions.get(name, "0")) for name in ("torch", "transformers"))


def release(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def device(row: Row) -> str:
    """Return what a row was measured on: ``CPU``, ``8x NVIDIA A100``."""
    models = Counter(row.hardware.gpus)
    return ", ".join(f"{count}x {name}" for name, count in models.items()) or "CPU"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# From rows


def headline(
    rows: Sequence[Row], cases: Mapping[str, Case], since: Regressions | None = None, no_previous: str = NO_PREVIOUS
) -> Headline:
    """Return what these rows show. ``since``: the comparison with the last passing runs; ``no_previous``: what to say
    where there is none."""
    by_case: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_case[row.case].append(row)
    statuses = [case_status(members, cases.get(slug)) for slug, members in by_case.items()]
    changed = {place: each for each in reversed(since.changed if since else ()) for place in
               ((each.case, each.stack), *((each.case, each.stack, one.variant) for one in each.changes))}  # fmt: skip
    attention = sorted(_attention(rows, changed), key=lambda each: list(ATTENTION).index(each.kind))
    order, previous = list(CASE_STATES), since.previous if since else None
    measured = (row for row in (previous.rows if previous else ()) if row.measured and row.case in cases)
    removed = {f"{row.case}/{row.variant}" for row in measured if row.variant not in cases[row.case].variants}
    return Headline(
        rows, sorted(statuses, key=lambda each: (order.index(each.state), each.simulated, each.case)), attention,
        sum(len(each.changes) for each in (since.changed if since else ())), previous.run_id if previous else "",
        bool(previous and previous.partial), tuple(sorted(removed)), no_previous,
        sum(case.kind == "failure" and slug not in by_case for slug, case in cases.items()),
    )  # fmt: skip


def case_status(rows: Sequence[Row], case: Case | None) -> CaseStatus:
    """Return what one case shows on the newest of its stacks. ``case``: None if the catalog does not have it."""
    newest = max(map(age, rows))
    older = [row for row in rows if age(row) != newest]
    rows = [row for row in rows if age(row) == newest]
    releases = releases_of(case) if case else Releases()
    first = [row for row in rows if row.first and row.attempts]
    state, detail = _state(first, rows, releases)
    verdicts: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.role == "fix" and row.verdict and row.measured and STATES.get(row.verdict, "reproduces") == "reproduces":
            verdicts[row.variant].add(row.verdict)
    for row in older:
        if row.state == "no_expectation" and _is_failing_fix(row):
            verdicts[row.variant].add(str(row.verdict))
    works = tuple(variant for variant, found in verdicts.items() if found == {"FIXED"})
    failing = tuple(variant for variant in verdicts if variant not in works)
    lost = tuple(dict.fromkeys(row.variant for row in rows if row.role == "fix" and row.attempts and not row.measured
                               and row.variant not in verdicts))  # fmt: skip
    one = rows[0]
    title = case.title if case else one.title
    return CaseStatus(one.case, title, state, detail, bool(one.simulated), works, failing, lost, releases)


def _is_unanswered(row: Row) -> bool:
    no_answer = row.no_evidence or row.verdict == "INCONCLUSIVE"
    return bool(row.attempts) and no_answer and row.state in (None, "no_expectation")


def _is_failing_fix(row: Row) -> bool:
    return row.role == "fix" and row.measured and row.verdict in ("NOT_FIXED", "DIFFERENT_FAILURE")


def _state(first: Sequence[Row], rows: Sequence[Row], releases: Releases) -> tuple[CaseState, str]:
    """Return the state of a case and the details. ``first``: the unfixed or control variants that were launched."""
    if not first:
        return "not_measured", next((row.reason for row in rows if row.reason), "")
    if first[0].kind == "control":
        failed = [row for row in first if row.verdict != "PASSED"]
        return ("fails", failed[0].reason) if failed else ("passes", counted(len(first), "cell"))
    usual = [row.counts.most_common(1)[0][0] for row in first]
    reproducing = [row for row in first if row.counts["reproduced"]]
    if reproducing:
        flaky = next((row for row in reproducing if len(row.counts) > 1), None)
        in_cells = "" if len(reproducing) == len(first) else f"in {len(reproducing)} of {len(first)} cells"
        return "reproduces", f"flaky: {flaky.outcome}" if flaky else in_cells
    if set(usual) == {"passed"}:
        upstream = any(row.verdict == "FIXED_UPSTREAM" for row in rows)
        if any(row.state in ("unexpected", "quarantined") and STATES.get(row.expected_verdict or "") == "reproduces"
               for row in rows):  # fmt: skip
            return "absent", GONE  # on a release on which it did
        ended = releases.ended if releases.after and releases.after.state == "absent" else ""
        return ("fixed", ended or "upstream") if upstream or ended else ("absent", "")
    failures = dict.fromkeys(name for row in first for each in row.evidence_attempts for name in each.failures)
    if not any(row.evidence_attempts for row in first):
        return "unclear", first[0].reason
    others = dict.fromkeys(name.partition("/")[0] for name in failures if "/" in name)
    return "other_failure", f"as in {', '.join(others)}" if others else first[0].reason


def _attention(rows: Iterable[Row], changed: Mapping[tuple[str, ...], ChangedCase]) -> Iterator[Attention]:
    """Yield what differs from its expectation, or from what a CPU showed."""
    same: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        if row.state in ("unexpected", "differs_from_cpu"):
            kind = kind_of(row)
            # A failure that came back changes the verdict of every variant of its cell.
            detail = () if kind == "came_back" else (row.verdict, row.reason, row.expected_verdict)
            same[kind, row.cell, detail].append(row)
    for (kind, *_), members in same.items():  # type: ignore[misc]
        place = members[0].case, members[0].stack.name
        yield Attention(kind, tuple(members), changed.get((*place, members[0].variant), changed.get(place)))


def kind_of(row: Row) -> Kind:
    """Say what a row means that differs from its expectation."""
    if row.state == "differs_from_cpu":
        return "differs_from_cpu"
    before, now = STATES.get(row.expected_verdict or ""), STATES.get(row.verdict or "")
    if before == "absent" and now == "reproduces":
        return "came_back"
    fails_now = now == "reproduces" or (row.verdict == "FLAKY" and row.counts["passed"] < len(row.evidence_attempts))
    if row.role == "fix" and row.expected_verdict == "FIXED" and fails_now:
        return "stopped_working"
    if row.verdict in ("SIGNATURE_MISMATCH", "FAILED", "FIX_BREAKS", "DIFFERENT_FAILURE"):
        return "new_failure"
    return "different"
