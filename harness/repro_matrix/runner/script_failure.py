"""Define the failure of a user's script, by options of the command line or by a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro_matrix.config.schema import Metric, Signature
from repro_matrix.errors import ConfigError
from repro_matrix.grading.failure_text import comparable_text
from repro_matrix.grading.observation import RaisedException, raised_chain
from repro_matrix.records.document import GradedAttempt
from repro_matrix.records.outcome import Outcome

SIGNATURE = "failure"
# --check -> the check's name, the text of its failure, and what usually helps
CHECKS = {
    "replicas": (
        "replicas_equal",
        "parameters or gradients differ between ranks",
        (
            "call the DDP model itself, not its .module, and reduce gradients in a step's last"
            " backward pass: repro show ddp-module-bypass"
        ),
    ),
    "finite": ("parameters_finite", "parameters or gradients are not finite", ""),
    "data": (
        "data_partitioned",
        "the ranks' samples are not disjoint and complete",
        (
            "give each rank its part: DistributedSampler or accelerator.prepare(loader); divide an"
            " iterable data set by rank and by worker"
        ),
    ),
}
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?))"
_METRIC = re.compile(
    r"^\s*(?P<name>/.+/|[^<>=\s]+)\s*(?:(?P<op><=|>=|<|>)\s*(?P<limit>[-+\w.]+))?\s*$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ScriptFailure:
    """Define what counts as the failure; without signatures and metric, any failure does."""

    text: str = ""  # for reports
    signatures: tuple[Signature, ...] = ()
    log: str = ""
    metric: Metric | None = None
    hang_s: float | None = None
    option: tuple[str, ...] = ()  # of the command line, to paste

    @property
    def needs_limit(self) -> bool:
        """Return True if a search has to find the metric's limit."""
        return self.metric is not None and not self.metric.op


# -- reading the options


def _regex(option: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{option} {pattern!r}: not a regular expression: {error}.") from None
    return pattern


def _signature(**values: object) -> Signature:
    return Signature.model_construct(name=SIGNATURE, **values)  # type: ignore[arg-type]


def error(text: str) -> ScriptFailure:
    """Parse ``IndexError: list index``: a type, and a regular expression for its message."""
    kind, _, message = (part.strip() for part in text.partition(":"))
    if not re.fullmatch(r"[A-Za-z_][\w.]*", kind):
        raise ConfigError(
            f"--error {text!r}: write TYPE: REGEX, such as 'IndexError: list index' or"
            " 'IndexError'."
        )
    if kind in ("Exception", "BaseException"):
        raise ConfigError(
            f"--error {text!r}: every error is an {kind}. Name the type that is raised."
        )
    pattern = _regex("--error", message) or r"\A"
    return ScriptFailure(text, (_signature(kind="exception", type=kind, message=pattern),))


def failure_in_log(text: str) -> ScriptFailure:
    if re.search(_regex("--log", text), ""):
        raise ConfigError(f"--log {text!r}: it matches an empty line. Write a part of the line.")
    signature = _signature(kind="log", message=text)
    return ScriptFailure(f"a line that matches {text!r}", (signature,), log=text)


def with_checks(failure: ScriptFailure, checks: Sequence[str]) -> ScriptFailure:
    """Add failed checks to what counts as the failure."""
    signatures = tuple(_signature(kind="check", check=CHECKS[name][0]) for name in checks)
    text = " or ".join(filter(None, (failure.text, *(CHECKS[name][1] for name in checks))))
    option = (*failure.option, *(word for name in checks for word in ("--check", name)))
    return replace(failure, text=text, signatures=(*failure.signatures, *signatures), option=option)


def failure_by_exit_code(code: int) -> ScriptFailure:
    if not 1 <= code <= 255:
        raise ConfigError(f"--exit {code}: a failing process ends with 1 to 255.")
    text = f"exit code {code}"
    return ScriptFailure(text, (_signature(kind="signal", signal=text),))


def hang(seconds: float) -> ScriptFailure:
    text = f"it has not ended after {seconds:g} s"
    return ScriptFailure(text, (_signature(kind="hang"),), hang_s=seconds)


def metric(text: str) -> ScriptFailure:
    r"""Parse ``loss > 3.2``, ``/final loss: (\S+)/ > 3.2``, or a name alone.

    A name alone is for a search, which compares its ends.
    """
    match = _METRIC.match(text)
    if match is None:
        raise ConfigError(
            f"--metric {text!r}: write NAME > NUMBER, or /REGEX WITH (A GROUP)/ > NUMBER."
        )
    name = match["name"]
    if name.startswith("/"):
        pattern = _regex("--metric", name[1:-1])
        if re.compile(pattern).groups != 1:
            raise ConfigError(
                f"--metric {text!r}: the expression needs exactly one group, around the number."
            )
    else:
        pattern = rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=\s]\s*{_NUMBER}(?!\w|[.,]\d)"
    limit = 0.0
    if match["op"]:
        try:
            limit = float(match["limit"])
        except ValueError:
            limit = math.nan  # which cannot be compared either
        if math.isnan(limit):
            raise ConfigError(f"--metric {text!r}: {match['limit']!r} is not a number.")
    number = Metric.model_validate(
        {"name": name, "pattern": pattern, "op": match["op"] or "", "limit": limit}
    )
    return ScriptFailure(text, metric=number)


# Option of the command line -> the function that reads its value.
OPTIONS: dict[str, Callable[[Any], ScriptFailure]] = {
    "error": error,
    "log": failure_in_log,
    "exit": failure_by_exit_code,
    "hang": hang,
    "metric": metric,
}


def learned(outcome: Outcome, made: GradedAttempt) -> ScriptFailure | None:
    """Return exactly the failure of an attempt, so that no other counts; None without a failure."""
    primary = outcome.primary
    if primary is None:
        return None
    if primary.kind != "exception":
        return ScriptFailure(primary.type, (_signature(kind="signal", signal=primary.type),))
    ranks = made["observation"]["ranks"]
    record = next((rank["record"] for rank in ranks if rank["rank"] == primary.rank), None)
    chain = raised_chain(record["exception"]) if record else []
    return _exact_failure(chain[0]) if chain else None


def _exact_failure(raised: RaisedException) -> ScriptFailure:
    frame = raised.innermost
    library = (
        frame
        and frame.modules
        and frame.origin != ""
        and (frame.origin or "site-packages" in frame.file)
    )
    package = frame.modules[0].partition(".")[0] if frame and library else None
    message = normal(raised.message)
    pattern = rf"\A\s*{re.escape(message)}" if message else r"\A\s*\Z"
    for token, any_text in ((r"\#", r"\d+"), ("…", ".*"), ("host:port", ".*")):
        pattern = pattern.replace(token, any_text)
    signature = _signature(kind="exception", type=raised.type, message=pattern, package=package)
    return ScriptFailure(f"{raised.type}: {message}", (signature,))


def normal(message: str) -> str:
    """Return a message's first line without its numbers, which differ between releases."""
    return re.sub(r"\d+", "#", comparable_text(message))
