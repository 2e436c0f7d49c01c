"""Say in a few sentences what results show, in the order in which a reader needs it. Pure.

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

from repro_matrix.changes.missing import lost_results
from repro_matrix.changes.regressions import Regressions
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.records.outcome import CONFIRMED, NOTHING_STORED
from repro_matrix.report.attention import Kind, attention
from repro_matrix.report.case_status import (
    CASE_STATES,
    GONE,
    age,
    case_status,
    is_failing_fix,
)
from repro_matrix.report.counts import ResultCounts
from repro_matrix.report.terminal import label
from repro_matrix.results.rows import Row
from repro_matrix.text import counted, list_some

SKIPS = {
    "gpus": "needs more GPUs",
    "nodes": "needs other nodes",
    "ranks": "needs another number of ranks",
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
    """A sentence of the answer.

    ``target``: where the page lists what it counts, the case that it is about, or "". ``urgent``:
    you must act.
    """

    text: str
    target: str = "matrix"
    urgent: bool = False


class Headline(ResultCounts):
    """The sentences about results, which every format uses."""

    @cached_property
    def differences(self) -> list[str]:
        """List the differences from expectations, the most urgent first."""
        names: Mapping[Kind, tuple[str, str]] = {
            "stopped_working": ("documented fix", f"stopped working: {list_some(self.stopped)}"),
            "came_back": ("known failure", "came back"),
            "new_failure": ("new failure", ""),
            "different": ("other difference", ""),
        }
        found = ((self.kinds[kind], *text) for kind, text in names.items())
        return [f"{counted(number, what)} {how}".strip() for number, what, how in found if number]

    @cached_property
    def unconfirmed(self) -> list[str]:
        """List what no expectation confirms: ``1 result different from the CPU``."""
        fixes = {(each.case, name) for each in self.cases for name in each.fixes}
        works = sum((row.case, row.variant) in fixes for row in self.flaky)
        stacks = dict.fromkeys(row.stack.name for row in self.flaky)
        newer = f" ({works} of fixes that work on newer releases)" if works else ""
        numbers = (
            (
                len(self.failing_fixes),
                "documented fix",
                "not working here (no expectation is stored)",
            ),
            (self.kinds["differs_from_cpu"], "result", "different from the CPU"),
            (self.kinds["differs_from_prediction"], "result", "different from the prediction"),
            (
                len(self.possible),
                "result",
                "as in one of the nearest measured releases, which disagree",
            ),
            (len(self.flaky), "flaky result", f"on {list_some(list(stacks))}{newer}"),
            (len(self.new), "result", "without an expectation"),
            (len(self.unanswered), "variant", "without a verdict"),
        )
        return [f"{counted(number, what)} {how}" for number, what, how in numbers if number]

    # The measurements

    @property
    def measured(self) -> str:
        """Name packages, devices, ranks, commit, date and duration of the measurements."""
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
        parts = [packages, ", ".join(dict.fromkeys(map(device, rows)))]
        fewest, most = min(ranks), max(ranks)
        parts.append(counted(most, "rank") if fewest == most else f"{fewest} to {most} ranks")
        if len(commits) == 1:
            changed = " with changed files" if any(row.dirty for row in rows) else ""
            parts.append(f"commit {commits.pop()}{changed}")
        if edited := dict.fromkeys(note for row in rows for note in row.stack.changed):
            parts.append(f"in a changed environment: {list_some(list(edited))}")
        parts.append(datetime.fromtimestamp(end, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
        if end - start < 86_400:
            parts.append(duration(seconds))
        return " · ".join(filter(None, parts))

    # The answer

    @cached_property
    def answers(self) -> Mapping[str, Sequence[Fact]]:
        """The questions of a reader and the answers, in the words of every format."""
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
        reproduce = self.count("reproduces")
        verb = "reproduces" if reproduce == 1 else "reproduce"
        if self.unselected:
            verb = f"measured {verb}"
        if self.failures:
            (silent, all_silent), (loud, all_loud) = map(self.reproducing, (True, False))
            number = f"{reproduce} of {self.failures}"
            if all_silent and all_loud:
                number = f"{loud} of {all_loud} loud and {silent} of {all_silent} silent"
            yield Fact(f"{number} {verb}{self.as_nearest}.", "reproduces")
        if self.unselected:
            yield Fact(f"{self.unselected} more not run.", "")

    @property
    def agreement(self) -> str:
        """Say with what the results agree that do not differ."""
        if not self.compared and self.new:
            return "no expectation is stored"
        if self.near and all(row.nearest for row in self.compared):
            return "as in the nearest measured releases; none is measured for this stack"
        if self.near:
            near = f"the nearest measured releases ({counted(len(self.near), 'result')})"
            return f"nothing differs from its expectation or from {near}"
        if self.unconfirmed:
            return "nothing differs from its expectation"
        return "everything as expected"

    @property
    def as_nearest(self) -> str:
        """Say that the nearest measured releases are the comparison, and which cases differ."""
        if 2 * len(self.near) <= len(self.compared):
            return ""
        differ = list(
            dict.fromkeys(
                row.case for row in self.near if row.state not in (*CONFIRMED, "possible")
            )
        )
        on = " on a CPU" if any(row.state == "matches_cpu" for row in self.near) else ""
        if not differ:
            return f", as in the nearest measured releases{on}; none differs"
        names = list_some(differ)
        return f", compared with the nearest measured releases{on}; different: {names}"

    def _simulated(self) -> Iterator[Fact]:
        if number := sum(each.simulated and each.state == "reproduces" for each in self.cases):
            yield Fact(f"{number} of the {self.count('reproduces')} that reproduce.", "reproduces")

    def _other_failures(self) -> Iterator[Fact]:
        """Yield the failures that do not reproduce, by their state."""
        gone = sum(each.detail == GONE for each in self.cases)
        for state in ("fixed", "absent", "other_failure", "unclear"):
            if number := self.count(state):
                before = f", {gone} of them reproduced before" if gone and state == "absent" else ""
                verb = ""
                if state == "other_failure":
                    verb = "fails with " if number == 1 else "fail with "
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
            none = f"None of {measured} works; " if measured and not works else ""
            count = f"0 of {measured}" if measured else "0"
            yield Fact(f"{none}{count} stopped working.")

    def _all_fixes(self) -> Iterator[Fact]:
        """Yield how many work, the names of the others, and how many were not measured."""
        works, measured = self.fixes
        if measured:
            counts = f"All {works}" if works == measured > 1 else f"{works} of {measured}"
            yield Fact(f"{counts} work{'s' if works == 1 else ''}.")
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
                f"{row.case}/{row.variant}": (
                    f" on {row.stack.name}" if row.state in NOTHING_STORED else ""
                )
                for row in rows
            }
            names = [name + on[name] for name in rest if name in on]
            rest = {name: None for name in rest if name not in on}
            if names:
                yield Fact(f"{len(names)} {what}: {list_some(names)}.")
        if self.unmeasured_fixes:
            more = "more " if measured else ""
            yield Fact(f"{self.unmeasured_fixes} {more}not measured.")

    def _what_to_do(self) -> Iterator[Fact]:
        """Yield the fix of one failure, or the catalog's own files if only these changed.

        If no line below has the command, add the one that shows the same for other cases.
        """
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
            why = "first run here"
            if self.since.earlier:
                why = "no earlier run here has these cells and passed"
            return self.no_previous or f"Not compared: {why}."
        causes = list(dict.fromkeys(text for each in self.attention for text in each.causes))
        parts = [counted(self.changes, "result")] if self.changes else []
        if self.lost:
            missing = list_some(self.lost)
            parts.append(f"{counted(len(self.lost), 'result')} missing now ({missing})")
        also = f" Also changed: {list_some(causes, 2)}." if causes else ""
        if self.newly_flaky:
            also += f" Flaky now, which chance explains: {list_some(self.newly_flaky)}."
        return f"{' and '.join(parts) or 'Nothing'} since {self.previous}.{also}"

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
                text = list_some(list(dict.fromkeys(releases)), 3, " and ")
                if len(near) > 1:
                    text += ", or others"
                what = "predictions, because all of these are older or newer: " if beyond else ""
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
            verb = "passes" if 1 in (passed, len(controls)) else "pass"
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
    """Return start, end, and the seconds of measuring without the time between several runs."""
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
    """Return what these rows show.

    ``since``: the comparison with the last passing runs. ``no_previous``: why there is none.
    """
    since, by_case = since or Regressions(), defaultdict[str, list[Row]](list)
    for row in rows:
        by_case[row.case].append(row)
    statuses = [case_status(members, cases[slug]) for slug, members in by_case.items()]
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
