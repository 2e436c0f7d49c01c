"""Read the rules that recognize failures outside of the catalog.

These are kinds of failures (failure_rules.yaml), wrong uses that libraries refuse (refusals.yaml),
and the errors of CUDA and of communication libraries (device_errors.yaml).
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from packaging.version import Version
from pydantic import Field, TypeAdapter

from repro_matrix.config.vocabulary import Regex, Strict

DEVICE_ERRORS = "device_errors.yaml"


class Hint(Strict):
    """Define a sentence about the named groups of a rule's text (see refusals.yaml)."""

    when: dict[str, str | int] = Field(default={})
    several_ranks: bool | None = None
    text: str


class Action(Strict):
    """Advice that needs a release: ``since`` is package -> the first one that has it."""

    text: str
    since: dict[str, str]


class _Groups(dict[str, str]):
    """Hold the named groups of a match. ``a/b/c`` is a quotient.

    Raises KeyError for a missing group or a quotient with a remainder.
    """

    def __missing__(self, key: str) -> str:
        first, *others = key.split("/")
        divisor = math.prod(int(self[each]) for each in others) if others else 0
        if not divisor or int(self[first]) % divisor:
            raise KeyError(key)
        return str(int(self[first]) // divisor)


_PACKAGES = {
    "DeepSpeed": "deepspeed",
    "Accelerate": "accelerate",
    "Trainer": "transformers",
    "transformers": "transformers",
    "PEFT": "peft",
}


class FailureRule(Strict):
    """Define a kind of failure, and how to recognize it in a line or a message."""

    name: str
    title: str
    shows: Literal["cause", "end", "peer"] = "cause"
    library: str = ""  # it refuses a wrong use
    # packages or modules; by default the library's package
    raised_in: list[str] = Field(default=[])
    text: Regex
    says: list[Hint] = Field(default=[])
    case: str = ""  # the case that it is, in an older or another package's wording
    words: list[str] = Field(default=[])  # without them, words of the text
    any_level: bool = False  # also a line that a logger prints as information
    # every_step: of the last ones, three or more
    place: Literal["any_line", "every_step", "last_line"] = "any_line"
    # says that something failed, not what: a line that says more comes before it
    general: bool = False
    exit_codes: list[int] = Field(default=[])
    examples: list[str] = Field(min_length=1)
    advice: list[str | Action] = Field(min_length=1)
    references: list[str] = Field(default=[])

    @property
    def packages(self) -> list[str]:
        """Return the packages whose code raises a refusal."""
        return self.raised_in or [_PACKAGES.get(self.library, "torch")]

    @property
    def ends_process(self) -> bool:
        return self.shows == "end" or bool(self.exit_codes)

    @property
    def heading(self) -> str:
        return f"{self.library} refused this: {self.title}" if self.library else self.title

    def actions(self, versions: Mapping[str, str]) -> list[str]:
        """Return the advice, without what is newer than these versions."""
        actions = [
            Action(text=each, since={}) if isinstance(each, str) else each for each in self.advice
        ]
        return [
            each.text
            for each in actions
            if all(
                Version(versions.get(name, first)) >= Version(first)
                for name, first in each.since.items()
            )
        ]

    def explain(self, message: str, several_ranks: bool = False) -> str:
        """Return what the numbers and names in a message mean; "" if no hint fits.

        ``several_ranks``: the log shows more than one.
        """
        found = re.search(self.text, message)
        named = found.groupdict() if found else {}
        groups = {name: text for name, text in named.items() if text is not None}
        escaped = _Groups({name: re.escape(text) for name, text in groups.items()})
        for hint in (each for each in self.says if each.several_ranks in (None, several_ranks)):
            with suppress(KeyError):
                wanted = {name: str(text).format_map(escaped) for name, text in hint.when.items()}
                if all(re.fullmatch(text, _Groups(groups)[name]) for name, text in wanted.items()):
                    return hint.text.format_map(_Groups(groups))
        return ""


class DeviceError(Strict):
    """Define a row of device_errors.yaml, which explains its fields."""

    name: str
    code: int | None = None
    text: Regex
    kind: Literal["peer", "memory", "hardware", "asynchronous", "device", "starting", "program"]
    rule: str = ""
    source: str

    @property
    def pattern(self) -> str:
        """Return the regular expression for a message or a line of a log."""
        if self.code is None:
            return self.text
        return (
            rf"(?:CUDA(?: driver)? error|Triton Error \[CUDA\]): {self.text}|Cuda failure (?:\d+"
            rf" )?'{self.text}"
        )


# Words before a failure that a sentence only mentions.
ADVICE = re.compile(
    r"(?i)\b(?:(?:terminate|stop|abort|skip)_(?:on|if)_\w+"
    r"|to (?:avoid|prevent|fix)|avoids|avoiding|prevents|if (?:you|it|there|the|a)|in case of"
    r"|(?:may|can) (?:cause|lead)|might|help with|instead of|to reduce)\b[^.]*$|\b(?:if|when) $"
)
# The forms in which launchers and schedulers print the end of a process.
_SIGNAL = re.compile(
    r"(?:terminated|killed|exited|died|interrupted|[Cc]aught|got)\b.{0,12}\bsignal:?"
    r" ?(\d+|SIG[A-Z]+)"
    r'|"signal"\s*:\s*"(SIG[A-Z]+)"'
    r"|\b[Ss]ignal (\d+) \(|Signals\.(SIG[A-Z]+)|WTERMSIG (\d+)|code=\w+, status=(\d+)/|\([Ss]ignal"
    r" (\d+)\)"
)
# a job catches them and goes on
_HARMLESS = (0, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
_EXIT_CODE = re.compile(
    r"(?i)\b(?:exit[_ ]?(?:code|status)|return[_ ]?code|(?:exit|terminat)(?:ed)? with (?:non-?zero"
    r" )?(?:code|status))"
    r"[\"']?\s*[:=]?\s*[\"']?(-?\d+|0x\w+)"
)


def _load(file: str) -> Any:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def device_errors() -> tuple[DeviceError, ...]:
    """Return the rows of device_errors.yaml, in the order in which they are tried."""
    return tuple(TypeAdapter(list[DeviceError]).validate_python(_load(DEVICE_ERRORS)))


@cache
def _device_patterns() -> tuple[tuple[re.Pattern[str], DeviceError], ...]:
    # CUDA's own texts count only where torch and NCCL put them.
    begin = {True: "", False: "^"}
    return tuple(
        (re.compile(begin[row.code is None] + row.pattern, re.MULTILINE), row)
        for row in device_errors()
    )


@lru_cache(4096)
def device_error(message: str, code: int | None) -> DeviceError | None:
    """Return the row that an exception's message, or the driver's number of its error, shows."""
    if code is not None and (
        coded := next((row for row in device_errors() if row.code == code), None)
    ):
        return coded
    return next((row for pattern, row in _device_patterns() if pattern.search(message)), None)


@cache
def peer_errors() -> re.Pattern[str]:
    """Return what a rank's message has that lost another one."""
    return re.compile("|".join(row.text for row in device_errors() if row.kind == "peer"))


@cache
def rules() -> Mapping[str, FailureRule]:
    """Return the rules by name, in the order in which they are tried.

    Cases come first, then refusals, then others; with the texts of device_errors.yaml, and without
    digits in their words.
    """
    texts = [*_load("refusals.yaml"), *_load("failure_rules.yaml")]
    found = TypeAdapter(list[FailureRule]).validate_python(texts)
    return {rule.name: _completed(rule) for rule in sorted(found, key=lambda rule: not rule.case)}


def _completed(rule: FailureRule) -> FailureRule:
    text = "|".join([rule.text, *(row.pattern for row in device_errors() if row.rule == rule.name)])
    words = [_DIGITS.sub("", word) for word in rule.words or words_of(text)]
    return rule.model_copy(update={"text": text, "words": words})


_DIGITS = re.compile(r"\d+")


def words_of(pattern: str) -> list[str]:
    """Return words in lower case, one of which is in every line that matches.

    Of each alternative the longest.
    """
    bare = re.sub(
        r"\[(\w)(\w)\]",
        lambda pair: pair[1] if pair[1].lower() == pair[2].lower() else pair[0],
        pattern,
    )
    # escaped marks are literal, not syntax
    bare = re.sub(r"\\(\W)(?![?*+{])", lambda mark: chr(_MARKS + ord(mark[1])), bare)
    bare = re.sub(r"\(\?i\)|\\[b]|(?:\\.|\[[^]]*\]|\.)(?:[?*+]|\{[^}]*\})?|[^()][?*]", "\n", bare)
    while (inner := re.sub(r"\([^()]*\)[?*]?", "\n", bare)) != bare:
        bare = inner
    found = (
        max(re.findall(r"[^\n.+^$]+", part), key=len, default="").lower()
        for part in bare.split("|")
    )
    return [word.translate({_MARKS + each: each for each in range(128)}) for word in found]


_MARKS = 0xE000  # characters of private use


def names_end(text: str) -> bool:
    """Return whether a line contains an exit code or a signal, also a harmless one."""
    return bool(_EXIT_CODE.search(text) or _SIGNAL.search(text))


def _exit_of(text: str) -> int:
    """Return how a process ended: its exit code, the negative number of its signal, or 0."""
    for found in _SIGNAL.finditer(text):
        name = next(filter(None, found.groups()))
        number = int(name) if name.isdigit() else signal.Signals.__members__.get(name, 0)
        if number not in _HARMLESS:
            return -number
    code = _EXIT_CODE.search(text)
    return int(code[1], 0) if code else 0


def rule_of(text: str, among: Iterable[FailureRule]) -> FailureRule | None:
    """Return the first rule that a line or a message shows.

    ``among``: the rules that its words allow. An exit code or a signal counts if no text does.
    """
    for rule in among:
        if rule.place == "any_line" and re.search(rule.text, text):
            return rule
    ended = _exit_of(text)
    if ended == 0:
        return None
    named = (rule for rule in rules().values() if ended in rule.exit_codes)
    return next(named, rules()["ended-without-error"])
