"""What `repro match` prints of one log: each failure, since when it exists, what helps, and the
next command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from repro_matrix.baseline.advice import advice
from repro_matrix.config.failure_rules import FailureRule, rules
from repro_matrix.config.schema import Case
from repro_matrix.match.collectives import LogHang
from repro_matrix.match.errors import callers, memory_of, where
from repro_matrix.match.known_failures import LogAnswer, LogFailure
from repro_matrix.match.scan import Finding, Scanned
from repro_matrix.text import WIDTH, counted, first_line, list_some, wrap

MOST_FAILURES = 8  # of a log that are listed; --json has all
MOST_VARIANTS = 4
FIRST_LINES = 6  # of a long message, and its last two
LONGEST = 600  # characters of one of its lines

Versions = tuple[
    Mapping[str, str], str
]  # package -> release, and where they come from: "stack current"


def log_json(
    path: str,
    seen: Scanned,
    answer: LogAnswer,
    cases: Mapping[str, Case],
    given: Versions | None = None,
) -> dict[str, Any]:
    """Return what is known of one log, with stable keys."""
    versions, source = versions_of(seen, given)
    found: dict[str, Any] = {"log": path, "lines": seen.lines, "recognized": answer.names}
    found["training_ended"] = seen.progress.ended
    found["failures"] = [_failure_json(failure, seen, versions) for failure in answer.failures]
    found["remarks"] = [
        asdict(remark) | {"text": answer.evidence[remark.line]} for remark in answer.remarks
    ]
    found["recovered"] = [_recovered(each) for each in answer.recovered]
    found["hang"] = None
    if answer.hang:
        waits = {rank: asdict(wait) for rank, wait in sorted(answer.hang.waits.items())}
        found["hang"] = {
            "text": str(answer.hang),
            "waits": waits,
            "silent": answer.hang.silent,
            "like": answer.like,
        }
    found |= {"kinds": answer.kinds, "findings": [asdict(finding) for finding in answer.findings]}
    found |= {
        "versions": versions,
        "versions_source": source,
        "versions_unclear": seen.versions.unclear,
    }
    found["unread"] = {str(line): problem for problem, line in seen.unread.items()}
    found["root_cause_rank"] = seen.summary.root
    advised = {name: advice(cases[name], versions) for name in answer.names}
    found["advice"] = {name: asdict(each) if each else None for name, each in advised.items()}
    return found


def _failure_json(
    failure: LogFailure, seen: Scanned, versions: Mapping[str, str]
) -> dict[str, Any]:
    error, names = failure.error, ("line", "type", "message", "ranks", "count", "whole", "mixed")
    found = {name: getattr(error, name) for name in names}
    found |= {
        name: [asdict(item) for item in getattr(failure, name)] for name in ("known", "perhaps")
    }
    kind = failure.rule.name if failure.rule else None
    found |= {
        "kind": kind,
        "raised_in": where(error),
        "called_from": callers(error),
        "echo": failure.echo,
    }
    found["refusal"] = None
    if failure.kind and (rule := failure.rule) and rule.library:
        refusal = {"library": rule.library, "meaning": rule.title, "change": rule.actions(versions)}
        found["refusal"] = refusal | {"numbers": rule.explain(error.message, seen.several_ranks)}
    return found


def versions_of(seen: Scanned, given: Versions | None) -> Versions:
    """Return the versions that count: the log's, else those given for a package that it does not
    name."""
    logged = seen.versions.known
    if not given:
        return logged, "the log" if logged else ""
    return {**given[0], **logged}, f"the log, the others {given[1]}" if logged else given[1]


def log_lines(
    path: str,
    seen: Scanned,
    answer: LogAnswer,
    cases: Mapping[str, Case],
    given: Versions | None = None,
    width: int = WIDTH,
) -> list[str]:
    """Return the lines that describe one log."""
    parts = _Parts(seen, answer, cases, versions_of(seen, given))
    indents = {0: 2, 2: 4}
    return [
        line
        for indent, text in parts.all(path)
        for line in wrap(text, " " * indent, indents.get(indent, 2), width)
    ]


Part = tuple[int, str]  # an indentation, and a paragraph


@dataclass
class _Parts:
    """The paragraphs that describe one log."""

    seen: Scanned
    answer: LogAnswer
    cases: Mapping[str, Case]
    versions: Versions
    advised: set[str] = field(default_factory=set)  # cases and rules

    def all(self, path: str) -> Iterator[Part]:
        seen, answer = self.seen, self.answer
        named = [f"{name} {version}" for name, version in seen.versions.known.items()]
        named += [f"{name} {' or '.join(found)}" for name, found in seen.versions.unclear.items()]
        name = "standard input" if path == "-" else path
        yield 0, f"{name}: {counted(seen.lines, 'line')}; {', '.join(named) or 'no versions named'}"
        for remark in answer.remarks:
            case = self.cases[remark.case]
            yield 2, f"line {remark.line}: a warning of {case.title} ({case.slug})"
            yield 4, first_line(answer.evidence[remark.line])
            yield from self.advice(case)
        leading = answer.leading
        ends = [each for each in answer.findings if each not in leading]
        listed = [*leading, *(each for each in answer.causes if each not in leading)]
        for each in listed[:MOST_FAILURES]:
            if isinstance(each, LogHang):
                yield from self.hang(each)
            else:
                yield from (
                    self.failure(each) if isinstance(each, LogFailure) else self.finding(each)
                )
        if more := len(listed[MOST_FAILURES:]):
            yield 2, f"{more} more errors: --json lists them"
        if ends and leading:
            ended = dict.fromkeys(_recovered(each, f"{_place(each)}, ") for each in ends)
            yield 2, f"Then: {'; '.join(list(ended)[:MOST_FAILURES])}"
        elif not leading:
            for kind in list(dict.fromkeys(each.kind for each in ends))[:2]:
                yield from self.finding(next(each for each in ends if each.kind == kind))
            if ends or answer.failures:
                yield 2, self.elsewhere(ends)
        own = {each.error.after for each in answer.causes}  # of the process that failed itself
        others = [each.error for each in answer.failures if each.echo and each.line not in own]
        echoes = sorted({f"{each.type} (line {each.line})" for each in others})
        if echoes:
            yield 2, f"Follow from another process's failure: {list_some(echoes, 4)}"
        if answer.recovered:
            caught = [_recovered(each) for each in answer.recovered]
            yield 2, f"Training went on after: {list_some(caught, 4, '; ')}"
        for problem, line in seen.unread.items():
            yield 2, f"line {line} cannot be read: {problem}"
        if answer.exit_code == 3 and not answer.remarks and not seen.unread:
            cut = "" if seen.progress.ended else "; the log ends before the training does"
            yield (
                2,
                (
                    f"no failure in this log{cut}"
                    if seen.lines
                    else "this log is empty: it tells nothing"
                ),
            )
        elif not answer.names and any(each.error.type for each in answer.causes):
            log = "LOG (save it as a file)" if path == "-" else path
            yield 2, f"To write it down as a case: repro new MY-CASE --from-log {log}"

    def elsewhere(self, ends: Sequence[Finding]) -> str:
        """Say where the error itself would be, where the log has none."""
        # Who lost a peer outlived it.
        own = (each for each in ends if rules()[each.kind].shows != "peer")
        first = next((_place(each) for each in own if each.rank is not None or each.place), "")
        who = first if self.seen.summary.root is None else f"rank {self.seen.summary.root}"
        where = (
            f"{who} ended first, as far as this log shows"
            if who
            else "The log does not say which rank ended first"
        )
        return f"The error itself is not in this log. {where}: look in its own log."

    def failure(self, failure: LogFailure) -> Iterator[Part]:
        error, rule = failure.error, failure.rule
        possible = {item.case: item for item in reversed(failure.perhaps)}
        if failure.known:
            case = self.cases[failure.known[0].case]
            meaning = f"{case.title} ({case.slug})"
        elif possible:
            meaning = "perhaps a known failure (below)"
        else:
            meaning = (
                rule.heading
                if rule
                else "not a known failure"
                if error.type
                else "cut off before its error"
            )
        yield 2, f"{self.who(failure)}, line {error.line}: {meaning}"
        if error.type or error.message:
            yield from (
                (4, line) for line in _telling(f"{error.type}: {error.message}".removeprefix(": "))
            )
        for inner in (
            each for each in self.answer.failures if each.echo and each.line == error.after
        ):
            yield (
                4,
                (
                    f"from line {error.after}:"
                    f" {first_line(f'{inner.error.type}: {inner.error.message}')}"
                ),
            )
        if where(error):
            yield 4, f"raised in {where(error)}"
        if called := callers(error):
            yield 4, f"called from {' > '.join(called)}"
        if error.mixed:
            yield 4, "No prefix names the rank, and tracebacks are mixed: frames are uncertain."
        if failure.known:
            yield from self.advice(case)
        for index, (name, item) in enumerate(reversed(possible.items())):
            yield 4, f"Perhaps: {self.cases[name].title} ({name}): {'; '.join(item.missing)}"
            yield from self.advice(self.cases[name]) if index == 0 else ()
        if rule and not possible and not failure.known:
            yield from self.rule(rule, f"{error.type}: {error.message}")

    def who(self, failure: LogFailure) -> str:
        """Return the rank that failed first, and the others; where no line names it, the one that
        torchrun reports."""
        error, root = failure.error, self.seen.summary.root
        if error.rank is None:
            gpus = f" (GPUs {_and(error.gpus)})" if len(error.gpus) == error.count else ""
            several = (
                f"{error.count} processes{gpus}"
                if error.mixed and error.count > 1
                else "unknown rank"
            )
            return (
                error.label or several
                if root is None
                else f"rank {root} (ended first, torchrun reports)"
            )
        first = f" (first: rank {error.rank})" * (error.rank != min(error.ranks))
        return f"rank{'s' * bool(error.ranks[1:])} {_and(error.ranks)}{first}"

    def finding(self, finding: Finding) -> Iterator[Part]:
        rule = rules()[finding.kind]
        yield 2, f"{_place(finding)}, line {finding.line}: {rule.heading}"
        yield from ((4, line) for line in _telling(finding.text))
        yield from self.rule(rule, finding.text)

    def rule(self, rule: FailureRule, text: str) -> Iterator[Part]:
        """Yield what the error says of memory, and what to try: first the advice that begins with
        words of the error. The advice of a rule comes once."""
        if memory := memory_of(text):
            yield 4, memory
        if explained := rule.explain(text, self.seen.several_ranks):
            yield 4, f"In this log: {explained}"
        if rule.name not in self.advised:
            yield 4, "What to change:" if rule.library else "What to try:"
            actions = rule.actions(self.versions[0])
            actions.sort(key=lambda each: each.partition(":")[0].lower() not in text.lower())
            yield from ((6, action) for action in actions)
        self.advised.add(rule.name)

    def hang(self, hang: LogHang) -> Iterator[Part]:
        at = f"line {hang.line}: " if hang.line else ""
        yield (
            2,
            (
                f"{at}{'the ranks entered different collectives' if hang.mismatch else 'a hang'}:"
                f" {hang}."
            ),
        )
        if self.answer.like:
            yield 4, "Known cases whose ranks wait so:"
        for name in self.answer.like:
            yield 6, f"{self.cases[name].title}: repro show {name}"
        yield (
            4,
            (
                "What to try: find what the other ranks did then (py-spy dump --pid PID), and the"
                " first difference between the ranks: TORCH_DISTRIBUTED_DEBUG=DETAIL, or the flight"
                " recorder (TORCH_FR_BUFFER_SIZE=2000, before torch 2.8"
                " TORCH_NCCL_TRACE_BUFFER_SIZE=2000; and TORCH_NCCL_DUMP_ON_TIMEOUT=1)."
            ),
        )

    def advice(self, case: Case) -> Iterator[Part]:
        """Yield since when a case exists, what helps with the code to change, and the next command;
        each case once."""
        if case.slug in self.advised:
            return
        self.advised.add(case.slug)
        known, source = self.versions
        found = advice(case, known)
        if found:
            if found.releases:
                yield 4, f"{found.releases[0].upper()}{found.releases[1:]}."
            if found.absent:
                note = f"it does not reproduce on your versions ({source}): another cause is likely"
            elif found.fits:
                yours = [f"{name} {known[name]}" for name in found.measured_at if name in known]
                note = (
                    f"your {', '.join(yours)} ({source}) {'are' if yours[1:] else 'is'} in its"
                    " range"
                )
            elif known:
                note = (
                    f"your versions ({source}) were not measured; these are the nearest on which it"
                    " reproduces"
                )
            else:
                note = "the log names no versions; name them with stack=NAME or --versions FILE"
            at = ", ".join(f"{name} {version}" for name, version in found.measured_at.items())
            yield 4, f"Measured on {at} ({found.hardware}): {note}."
            yield 4, "What helps:" + ("" if found.helps else " nothing that was measured there")
            for name in found.helps[:MOST_VARIANTS]:
                yield 6, f"{case.variants[name].help or name} ({name})"
            if found.does_not:
                names = "; ".join(
                    case.variants[name].help or name for name in found.does_not[:MOST_VARIANTS]
                )
                yield 4, f"What doesn't: {names}"
        references = f" ({', '.join(case.references)})" if case.references else ""
        yield (
            4,
            f"More: repro show {case.slug}{' [simulated]' if case.simulated else ''}{references}",
        )


def _telling(message: str) -> Iterator[str]:
    """Yield the lines of a message; of many lines the first and the last ones, of a long one both
    of its ends."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if left := len(lines[FIRST_LINES + 2 :]):
        lines[FIRST_LINES:-2] = [f"({left} more lines)"]
    for line in lines:
        yield (
            line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
        )


def _and(numbers: Sequence[int | str]) -> str:
    """Return ``0, 1 and 2``; of many the first ones and how many more there are."""
    *first, last = map(str, numbers)
    if first[MOST_FAILURES:]:
        return list_some([*first, last], MOST_FAILURES)
    return f"{', '.join(first)} and {last}" if first else last


def _recovered(each: LogFailure | Finding, place: str = "") -> str:
    if isinstance(each, Finding):
        title = rules()[each.kind].title if each.kind in rules() else each.text
        return f"{title.partition(';')[0]} ({place}line {each.line})"
    return f"{each.error.type or 'a traceback'} (line {each.line})"


def _place(finding: Finding) -> str:
    return finding.place or ("unknown rank" if finding.rank is None else f"rank {finding.rank}")
