"""The kinds of failures that are no case of the catalog: failure_rules.yaml, read and validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, TypeAdapter

from repro_matrix.config.vocabulary import Regex, Strict


class FailureRule(Strict):
    """A kind of failure, and how to tell it from a line of a log or an exception's message."""

    name: str
    title: str
    shows: Literal["cause", "end", "peer"]
    text: Regex
    case: str = ""  # the case that it is, in an older or another package's wording
    words: list[str] = Field(default=[])  # without them, words of the text
    any_level: bool = False  # also a line that a logger prints as information
    exit_codes: list[int] = Field(default=[])
    examples: list[str] = Field(min_length=1)
    advice: list[str] = Field(min_length=1)
    references: list[str] = Field(min_length=1)


# What stands before a failure that a sentence only mentions.
ADVICE = re.compile(
    r"(?i)\b(?:to (?:avoid|prevent|fix)|avoids|avoiding|prevents|if (?:you|it|there|the|a)|in case of"
    r"|(?:may|can) (?:cause|lead)|might|help with|instead of|to reduce)\b[^.]*$"
)
# How launchers and schedulers print how a process ended.
_EXIT_CODE = re.compile(
    r"(?:\bexitcode\s*:?|\breturn code\s*=?|\bexit (?:code|status)\s*[:=]?|\bexited? with (?:code|status))\s*(-?\d+)"
)


@cache
def rules() -> Mapping[str, FailureRule]:
    """Return the rules by name, in the order in which they are tried."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = TypeAdapter(list[FailureRule]).validate_python(yaml.load(text, loader))
    return {rule.name: rule for rule in found}


@cache
def _compiled() -> tuple[tuple[re.Pattern[str], FailureRule], ...]:
    return tuple((re.compile(rule.text), rule) for rule in rules().values())


@lru_cache(4096)  # the ranks write the same
def rule_of(text: str) -> FailureRule | None:
    """Return the first rule that a line or a message shows; an exit code counts where no text does."""
    for pattern, rule in _compiled():
        if pattern.search(text):
            return rule
    code = _EXIT_CODE.search(text)
    if code is None or int(code[1]) == 0:
        return None
    named = (rule for rule in rules().values() if int(code[1]) in rule.exit_codes)
    return next(named, rules()["ended-without-error"])
