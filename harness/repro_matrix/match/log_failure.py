"""Define the types of an answer about a log: known failures and other errors. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from repro_matrix.config.failure_rules import FailureRule, rule_of, rules
from repro_matrix.grading.tracebacks import Error
from repro_matrix.match.collectives import LogHang
from repro_matrix.match.errors import raised_by
from repro_matrix.match.scan import Finding

# Errors of launchers and drivers, that only say that some process of theirs failed.
_LAUNCHERS = re.compile(
    r"(?:[\w.]+\.)?(ChildFailedError|CalledProcessError|ProcessRaisedException"
    r"|ProcessExitedException|RayTaskError(\(.*\))?|RayActorError|ActorDiedError"
    r"|WorkerCrashedError|TrainingFailedError|SignalException|TuneError|SystemExit)"
)
_QUOTED = re.compile(r"[\"'`](?:[\w.]+: )?$")  # before words of another error


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
    failures: list[LogFailure]  # the first cause first, echoes last
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


def is_launcher(error: Error) -> bool:
    return bool(_LAUNCHERS.fullmatch(error.type)) and "ninja" not in error.message
