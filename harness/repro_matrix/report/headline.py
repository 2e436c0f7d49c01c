"""The headline of results, in the order in which a reader needs it: how many known failures
reproduce, whether the documented fixes work, what changed, what was not measured. Pure.

The terminal, the page, JUnit, Markdown and the badge all take their words and numbers from here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from repro_matrix.baseline.derivation import is_unanswered
from repro_matrix.changes.history import place_of
from repro_matrix.changes.missing import lost_results
from repro_matrix.changes.regressions import Regressions
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.records.outcome import CONFIRMED, NOTHING_STORED
from repro_matrix.report.attention import Attention, Kind, attention
from repro_matrix.report.case_status import (
    CASE_STATES,
    GONE,
    CaseState,
    CaseStatus,
    age,
    case_status,
    is_failing_fix,
)
from repro_matrix.report.terminal import label
from repro_matrix.results.rows import Row
from repro_matrix.text import counted, list_some

SKIPS = {
    "gpus": "needs more GPUs",
    "accelerator": "needs a GPU",
    "packages": "needs other packages",
    "stack": "needs a stack that is not built",
    "build": "needs an extension that cannot be built",
    "memory": "needs more memory",
    "weights": "needs weights",
    "same": "the same as unfixed here",
}
_FIRST = re.compile(
    r"; |(?<=\))[:.] "
)  # ends what to write, before what else there is to say of it


@dataclass(frozen=True)
class Fact:
    """A sentence of the answer. ``target``: where the page lists what it counts, the case that it
    is about, or "".
    ``urgent``: you must act."""

    text: str
    target: str = "matrix"
    urgent: bool = False


@dataclass(frozen=True)
class Headline:
    """``since``: the comparison with the last passing runs. ``previous``: the one of them that is
    named; "" where there is none, which ``no_previous`` explains of other results than a run's.
    ``lost``: variants that it, or a passing run before it, has a result of, and these results have
    none. ``unselected``: known failures of the catalog that are not among the rows."""

    rows: Sequence[Row]
    cases: Sequence[CaseStatus]
    attention: Sequence[Attention]
    since: Regressions
    previous: str = ""
    lost: tuple[str, ...] = ()
    no_previous: str = ""
    unselected: int = 0
    incomplete: str = ""  # why less is here than was measured or requested

    # What is counted

    def count(self, *states: CaseState) -> int:
        return sum(each.state in states for each in self.cases)

    @cached_property
    def failures(self) -> int:
        """Known failures with a result."""
        return self.count("reproduces", "fixed", "absent", "other_failure", "unclear")

    @cached_property
    def kinds(self) -> Counter[Kind]:
        """Numbers of variants that need attention, over all cells; of cases for failures that came
        back."""
        rows = [(each.kind, row) for each in self.attention for row in each.rows]
        return Counter(
            kind
            for kind, *_ in {
                (kind, row.case, row.variant * (kind != "came_back")) for kind, row in rows
            }
        )

    @cached_property
    def fixes(self) -> tuple[int, int]:
        """Documented fixes that work, and all that were measured where the failure reproduces."""
        works = sum(len(each.fixes) for each in self.cases)
        return works, works + sum(len(each.failing) for each in self.cases)

    @cached_property
    def unmeasured_fixes(self) -> int:
        return sum(len(each.unmeasured) for each in self.cases)

    @cached_property
    def new(self) -> list[Row]:
        """Measured variants with a verdict that have neither an expectation nor a prediction."""
        return [
            row
            for row in self.rows
            if row.attempts
            and row.verdict
            and row.state == "no_expectation"
            and row.verdict != "FLAKY"
            and not is_unanswered(row)
        ]

    @cached_property
    def possible(self) -> list[Row]:
        """Results as in one of the nearest measured releases, which disagree."""
        return [row for row in self.rows if row.state == "possible"]

    @cached_property
    def near(self) -> list[Row]:
        """Results that the nearest measured releases say something of."""
        return [row for row in self.rows if row.nearest]

    @cached_property
    def flaky(self) -> list[Row]:
        """Variants whose attempts disagree: an expectation cannot confirm them."""
        return [
            row for row in self.rows if row.verdict == "FLAKY" and row.state == "no_expectation"
        ]

    @cached_property
    def unanswered(self) -> list[Row]:
        """Variants that ran and gave no evidence; what an expectation accepts is left out."""
        return [row for row in self.rows if is_unanswered(row)]

    @cached_property
    def skipped(self) -> list[Row]:
        """Variants of cells that were launched on no stack."""
        launched = {(row.cell_id, row.variant) for row in self.rows if row.attempts}
        return [
            row for row in self.rows if row.reason and (row.cell_id, row.variant) not in launched
        ]

    @cached_property
    def differences(self) -> list[str]:
        """What differs from its expectation, the most urgent first: ``1 documented fix stopped
        working: slug/fix``."""
        names: Mapping[Kind, tuple[str, str]] = {
            "stopped_working": ("documented fix", f"stopped working: {list_some(self.stopped)}"),
            "came_back": ("known failure", "came back"),
            "new_failure": ("new failure", ""),
            "different": ("other difference", ""),
        }
        found = ((self.kinds[kind], *text) for kind, text in names.items())
        return [f"{counted(number, what)} {how}".strip() for number, what, how in found if number]

    @property
    def changes(self) -> int:
        """Number of results that changed since the last passing run."""
        return sum(len(each.changes) for each in self.since.changed)

    @cached_property
    def stopped(self) -> list[str]:
        """Documented fixes that stopped working."""
        return self._of_kind("stopped_working")

    @cached_property
    def failing_fixes(self) -> list[str]:
        """Documented fixes that do not work, of which nothing is stored."""
        return self._of_kind("differs_from_documentation")

    def _of_kind(self, kind: Kind) -> list[str]:
        rows = (row for each in self.attention for row in each.rows if each.kind == kind)
        return list(dict.fromkeys(f"{row.case}/{row.variant}" for row in rows))

    @cached_property
    def unconfirmed(self) -> list[str]:
        """What no expectation confirms: ``1 result different from the CPU``."""
        fixes = {(each.case, name) for each in self.cases for name in each.fixes}
        works = sum((row.case, row.variant) in fixes for row in self.flaky)
        stacks = dict.fromkeys(row.stack.name for row in self.flaky)
        verb = "does" if len(self.failing_fixes) == 1 else "do"
        numbers = (
            (
                len(self.failing_fixes),
                "documented fix",
                f"{verb} not work here (no expectation is stored)",
            ),
            (self.kinds["differs_from_cpu"], "result", "different from the CPU"),
            (self.kinds["differs_from_prediction"], "result", "different from the prediction"),
            (
                len(self.possible),
                "result",
                "as in one of the nearest measured releases, which disagree",
            ),
            (
                len(self.flaky),
                "flaky result",
                f"on {list_some(list(stacks))}"
                + f" ({works} of fixes that work on newer releases)" * bool(works),
            ),
            (len(self.new), "result", "without an expectation"),
            (len(self.unanswered), "variant", "without a verdict"),
        )
        return [f"{counted(number, what)} {how}" for number, what, how in numbers if number]

    # What was measured

    @property
    def measured(self) -> str:
        """What was measured, and on what: packages, devices, ranks, commit, date and duration."""
        rows = [row for row in self.rows if row.attempts]
        if not rows:
            return ""
        stacks = {row.stack.name for row in rows}
        failures = [row for row in rows if row.kind != "control" and not row.simulated]
        newest = max(failures or rows, key=age).stack.versions
        packages = ", ".join(f"{name} {newest[name]}" for name in UPSTREAM if name in newest)
        if len(stacks) > 1:
            names = (
                f"{name} {newest[name].partition('+')[0]}"
                for name in ("torch", "transformers")
                if name in newest
            )
            packages = f"{len(stacks)} stacks, each case on its newest: up to {' + '.join(names)}"
        start, end, seconds = _times(rows)
        ranks = [row.settings.get("world_size", row.ranks) for row in rows]
        commits = {row.commit[:7] for row in rows if row.commit}
        parts = [
            packages,
            ", ".join(dict.fromkeys(map(device, rows))),
            " to ".join(map(str, dict.fromkeys((min(ranks), max(ranks)))))
            + " rank"
            + "s" * (max(ranks) > 1),
            *(
                f"commit {one}{' with changed files' * any(row.dirty for row in rows)}"
                for one in commits
                if len(commits) == 1
            ),
            datetime.fromtimestamp(end, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            duration(seconds) if end - start < 86_400 else "",
        ]
        return " · ".join(filter(None, parts))

    # The answer

    @cached_property
    def answers(self) -> Mapping[str, Sequence[Fact]]:
        """What a reader asks, and the answer. Every format has these words."""
        skipped = [Fact(f"{self.not_measured}.", "skipped")] if self.skipped else []
        if not any(row.attempts for row in self.rows):
            return {
                "Results": [Fact(f"{self.incomplete or 'Nothing was measured'}.")],
                **({"Not measured": skipped} if skipped else {}),
            }
        listed = "unconfirmed" if self.new or self.flaky or self.unanswered else "attention-list"
        answers = {
            "Incomplete": [Fact(f"{self.incomplete}.", "", True)] if self.incomplete else [],
            "Known failures": list(self._failures()),
            "Documented fixes": list(self._fixes()),
            "Needs attention": [
                Fact(f"{text}.", "attention-list", True)
                for text in self.differences[bool(self.stopped) :]
            ],
            "Changes": [Fact(self.changed)],
            "What to do": list(self._what_to_do()),
            "Measured on": [Fact(self.measured, "")],
            "Compared with": list(self._compared()),
            "Other failures": list(self._other_failures()),
            "All fixes": list(self._all_fixes()),
            "Simulated": list(self._simulated()),
            "Controls": list(self._controls()),
            "Not confirmed": [
                Fact(f"{text}.", listed) for text in self.unconfirmed[bool(self.failing_fixes) :]
            ],
            "Not measured": skipped,
        }
        return {name: facts for name, facts in answers.items() if facts}

    @property
    def sentences(self) -> list[str]:
        return [
            f"{name}: {' '.join(fact.text for fact in facts)}"
            for name, facts in self.answers.items()
        ]

    def _failures(self) -> Iterator[Fact]:
        reproduce, which = self.count("reproduces"), "measured " * bool(self.unselected)
        if self.failures:
            text = f"{reproduce} of {self.failures} {which}reproduce{'s' * (reproduce == 1)}"
            yield Fact(f"{text}{self.as_nearest}.", "reproduces")
        if self.unselected:
            yield Fact(f"{self.unselected} more not run.", "")

    @property
    def agreement(self) -> str:
        """Say with what the results agree that do not differ."""
        compared = [row for row in self.rows if row.state not in (None, *NOTHING_STORED)]
        if not compared and self.new:
            return "no expectation is stored"
        if self.near and all(row.nearest for row in compared):
            return "as in the nearest measured releases; none is measured for this stack"
        near = (
            f" or from the nearest measured releases ({counted(len(self.near), 'result')})"
            * bool(self.near)
        )
        return (
            f"nothing differs from its expectation{near}"
            if near or self.unconfirmed
            else "everything as expected"
        )

    @property
    def as_nearest(self) -> str:
        """Say that most results are compared with the nearest measured releases, and which cases
        differ from them."""
        if 2 * len(self.near) <= sum(row.state not in (None, *NOTHING_STORED) for row in self.rows):
            return ""
        differ = list(
            dict.fromkeys(
                row.case for row in self.near if row.state not in (*CONFIRMED, "possible")
            )
        )
        on = " on a CPU" * any(row.state == "matches_cpu" for row in self.near)
        if not differ:
            return f", as in the nearest measured releases{on}; none differs"
        names = f"{len(differ)} differ{'s' * (len(differ) == 1)}: {list_some(differ)}"
        return f"; compared with the nearest measured releases{on}, {names}"

    def _simulated(self) -> Iterator[Fact]:
        if number := sum(each.simulated and each.state == "reproduces" for each in self.cases):
            yield Fact(f"{number} of the {self.count('reproduces')} that reproduce.", "reproduces")

    def _other_failures(self) -> Iterator[Fact]:
        """Yield the failures that do not reproduce, by their state, and those that no device takes
        part in."""
        gone = sum(each.detail == GONE for each in self.cases)
        for state in ("fixed", "absent", "other_failure", "unclear"):
            if number := self.count(state):
                before = f", {gone} of them reproduced before" if gone and state == "absent" else ""
                verb = f"fail{'s' * (number == 1)} with " if state == "other_failure" else ""
                yield Fact(f"{number} {verb}{CASE_STATES[state][1]}{before}.", state)
        unmeasured = {row.case for row in self.rows if row.kind != "control"}
        if number := sum(
            each.state == "not_measured" and each.case in unmeasured for each in self.cases
        ):
            yield Fact(f"{number} not measured.", "not_measured")

    def _fixes(self) -> Iterator[Fact]:
        """Yield which ones stopped working or do not work here, or that none did."""
        works, measured = self.fixes
        if self.stopped:
            yield Fact(
                f"{len(self.stopped)} stopped working: {list_some(self.stopped)}.",
                "attention-list",
                True,
            )
        if self.failing_fixes:
            why = {
                f"{row.case}/{row.variant} ({label(row.verdict or '').text})": None
                for each in self.attention
                for row in each.rows
                if each.kind == "differs_from_documentation"
            }
            yield Fact(f"{self.unconfirmed[0]}: {list_some(list(why))}.", "attention-list", True)
        elif measured + self.unmeasured_fixes and not self.stopped:
            none = f"None of {measured} works; " * bool(measured and not works)
            yield Fact(f"{none}0{f' of {measured}' * bool(measured)} stopped working.")

    def _all_fixes(self) -> Iterator[Fact]:
        """Yield how many work, the names of the others by what they show, and how many were not
        measured."""
        works, measured = self.fixes
        if measured:
            counts = f"All {works}" if works == measured > 1 else f"{works} of {measured}"
            yield Fact(f"{counts} work{'s' * (works == 1)}.")
        rest = dict.fromkeys(f"{each.case}/{name}" for each in self.cases for name in each.failing)
        failing = [row for row in self.rows if is_failing_fix(row)]
        for what, rows in {
            "stopped working": [
                row for row in self.rows if f"{row.case}/{row.variant}" in self.stopped
            ],
            "never worked here": [row for row in failing if row.state in CONFIRMED],
            "flaky": [row for row in self.rows if row.verdict == "FLAKY"],
            "failed, with no expectation": [row for row in failing if row.state in NOTHING_STORED],
            "failed, as in one of the nearest releases": [
                row for row in failing if row.state == "possible"
            ],
            "with another result": self.rows,
        }.items():
            on = {
                f"{row.case}/{row.variant}": f" on {row.stack.name}" * (row.state in NOTHING_STORED)
                for row in rows
            }
            names = [name + on[name] for name in rest if name in on]
            rest = {name: None for name in rest if name not in on}
            if names:
                yield Fact(f"{len(names)} {what}: {list_some(names)}.")
        if self.unmeasured_fixes:
            yield Fact(f"{self.unmeasured_fixes} {'more ' * bool(measured)}not measured.")

    def _what_to_do(self) -> Iterator[Fact]:
        """Yield what to write for the fix of one failure; where nothing below has the command, also
        the one that tells the same of every other. Where only the catalog's own files changed, they
        come first."""
        suspects = (
            each.change.suspect for each in self.attention if each.change and each.change.suspect
        )
        if command := next(suspects, ""):
            yield Fact(f"Check {command}.", "attention-list")
        if case := self.example:
            fix = (case.case, *case.fixes[:1])
            helps = [
                _FIRST.split(row.help)[0]
                for row in self.rows
                if (row.case, row.variant) == fix and row.help
            ]
            show = [] if helps and self.attention else [f"repro show {case.case}"]
            name = "Works" if command and helps else case.case
            yield Fact(f"{name}: {'. More: '.join([*helps[:1], *show])}", case.case)

    @property
    def changed(self) -> str:
        """Say what changed since the last passing run: results, and what may have caused it."""
        if not self.previous:
            why = (
                "no earlier run here has these cells and passed"
                if self.since.earlier
                else "first run here"
            )
            return self.no_previous or f"Not compared: {why}."
        causes = list(dict.fromkeys(text for each in self.attention for text in each.causes))
        parts = [counted(self.changes, "result")] if self.changes else []
        parts += (
            [f"{counted(len(self.lost), 'result')} missing now ({list_some(self.lost)})"]
            if self.lost
            else []
        )
        what = " and ".join(parts) or "Nothing"
        also = f" Also changed: {list_some(causes, 2)}." if causes else ""
        also += (
            f" Flaky now, which chance explains: {list_some(self._newly_flaky)}."
            if self._newly_flaky
            else ""
        )
        return f"{what} since {self.previous}.{also}"

    @cached_property
    def _newly_flaky(self) -> list[str]:
        """Variants that were steady in the last passing run and are flaky now, without enough
        attempts for a change."""
        changes = {place_of(change.row) for each in self.since.changed for change in each.changes}
        before = {
            place: row for place, (_, row) in self.since.references.items() if place not in changes
        }
        now = [(place_of(row), row) for row in self.rows]
        return [
            f"{row.case}/{row.variant}"
            for place, row in now
            if row.verdict == "FLAKY"
            and place in before
            and before[place].stored_verdict != "FLAKY"
        ]

    def _compared(self) -> Iterator[Fact]:
        """Yield with what the results were compared, and what was not."""
        if self.previous:
            run = self.since.previous
            yield Fact(
                f"{self.previous}, the {run.description if run else 'last passing run'}.", ""
            )
        for beyond in (False, True):
            near = Counter(row.nearest for row in self.near if row.beyond == beyond)
            for releases, _ in near.most_common(1):
                text = list_some(list(dict.fromkeys(releases)), 3, " and ") + ", or others" * (
                    len(near) > 1
                )
                what = "predictions, because all of these are older or newer: " * beyond
                yield Fact(f"{text} ({what}{counted(near.total(), 'result')}).", "")
        if self.previous and self.since.new:
            yield Fact(f"{counted(len(self.since.new), 'cell')} not measured then.", "")

    def _controls(self) -> Iterator[Fact]:
        measured = [
            row for row in self.rows if row.kind == "control" and row.first and row.attempts
        ]
        newest = {row.case: age(row) for row in sorted(measured, key=age)}
        controls = [row for row in measured if age(row) == newest[row.case]]
        failed = sum(row.verdict != "PASSED" for row in controls)
        if controls:
            passed = len(controls) - failed
            verb = "passes" if passed == 1 else "pass"
            text = (
                f"{passed} of {counted(len(controls), 'cell')} {verb}: training equals a single"
                " process."
            )
            yield Fact(text, "fails" if failed else "passes", bool(failed))

    @property
    def not_measured(self) -> str:
        """Count the variants that were not launched by reason."""
        counts = Counter(
            SKIPS.get(row.skip_kind or "", "other reason") for row in self.skipped
        ).most_common()
        reasons = ", ".join(f"{text} ({count})" if counts[1:] else text for text, count in counts)
        return f"{counted(len(self.skipped), 'variant')}: {reasons}"

    @property
    def example(self) -> CaseStatus | None:
        """The case that shows what to do about a failure: what needs attention, else one with a fix
        that works."""
        urgent = self.attention[0].row.case if self.attention else ""
        cases = [each for each in self.cases if each.state != "not_measured"]
        return min(
            cases,
            default=None,
            key=lambda each: (
                each.case != urgent,
                each.state != "reproduces",
                each.simulated,
                not each.fixes,
            ),
        )

    # For other programs

    def to_json(self) -> dict[str, Any]:
        """Return the numbers under stable keys."""
        works, measured = self.fixes
        fixes = {"work": works, "measured": measured, "not_measured": self.unmeasured_fixes}
        return {
            "sentences": self.sentences,
            "known_failures": self.failures,
            "cases": dict(Counter(each.state for each in self.cases)),
            "documented_fixes": fixes,
            "attention": dict(self.kinds),
            "changed": self.changes,
            "previous": self.previous or None,
            "missing": list(self.lost),
            "new": len(self.new),
        }

    def badge(self) -> dict[str, Any]:
        """Return a badge in the format of an endpoint of shields.io."""
        works, measured = self.fixes
        message = (
            f"{self.count('reproduces')} of {self.failures} reproduce, {works} of {measured} fixes"
            " work"
        )
        unclear = self.incomplete or self.unanswered
        message = f"incomplete: {message}" if unclear else message
        color = (
            "red" if self.differences else "yellow" if unclear or self.failing_fixes else "green"
        )
        return {"schemaVersion": 1, "label": "known failures", "message": message, "color": color}


def _times(rows: Iterable[Row]) -> tuple[float, float, float]:
    """Return the start and the end, and the seconds in which a cell was measured: of several runs,
    without the time between them."""
    times = sorted((row.started, row.ended or row.started) for row in rows)
    ended = seconds = 0.0
    for start, end in times:
        seconds += max(0.0, end - max(start, ended))
        ended = max(ended, end)
    return times[0][0], ended, seconds


def device(row: Row) -> str:
    """Return what a row was measured on: ``CPU``, ``8x NVIDIA A100``."""
    models = Counter(row.hardware.gpus)
    return ", ".join(f"{count}x {name}" for name, count in models.items()) or "CPU"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def headline(
    rows: Sequence[Row],
    cases: Mapping[str, Case],
    since: Regressions | None = None,
    no_previous: str = "",
) -> Headline:
    """Return what these rows show. ``since``: the comparison with the last passing runs;
    ``no_previous``: what to say where there is none, of other results than a run's."""
    since, by_case = since or Regressions(), defaultdict[str, list[Row]](list)
    for row in rows:
        by_case[row.case].append(row)
    statuses = [case_status(members, cases.get(slug)) for slug, members in by_case.items()]
    order, previous = list(CASE_STATES), since.previous
    lost = list(lost_results(rows, since.passing))
    return Headline(
        rows,
        sorted(statuses, key=lambda each: (order.index(each.state), each.simulated, each.case)),
        attention(rows, since),
        since,
        previous.run_id if previous else lost[0].run_id if lost else "",
        tuple(dict.fromkeys(f"{each.row.case}/{each.row.variant}" for each in lost)),
        no_previous,
        sum(case.kind == "failure" and slug not in by_case for slug, case in cases.items()),
    )
