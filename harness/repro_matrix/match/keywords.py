"""Choose the patterns to try on a line by its keywords: most lines contain none. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from repro_matrix.config.catalog import read_yaml
from repro_matrix.config.failure_rules import FailureRule, rules, words_of
from repro_matrix.config.schema import Case, Signature, Strategy
from repro_matrix.config.vocabulary import TRAINERS, UPSTREAM

DIGITS = b"0123456789"
MAX_TOKENS = 100_000  # that are remembered
_STATES = re.compile(r"(?i)error|exception|fail")


@dataclass(frozen=True)
class LinePatterns:
    """Collect the patterns to try on lines with certain words."""

    readers: list[str]
    patterns: list[str]
    messages: list[tuple[Signature, str]]
    rules: list[FailureRule]

    @cached_property
    def exact(self) -> bool:
        """Return whether lines that differ only in their digits must all be read.

        Otherwise the first lines of that shape show the same as all.
        """
        texts = [
            *self.patterns,
            *(text for _, text in self.messages),
            *(rule.text for rule in self.rules),
        ]
        digits = any(re.search(r"\d", re.sub(r"\{\d*,?\d*\}", "", text)) for text in texts)
        return digits or not {"summary", "waits"}.isdisjoint(self.readers)

    def message_in(self, text: str) -> tuple[Signature, str] | None:
        """Return the exception whose message a line contains, and the message.

        For lines outside of a traceback. A message that also has other causes must begin the line,
        or follow words that mark an error.
        """
        for signature, pattern in self.messages:
            found = re.search(pattern, text)
            if found and (
                not signature.ambiguous_with
                or _STATES.search(text, 0, found.start())
                or not re.search(r"\w", text[: found.start()])
            ):
                return signature, text[found.start() :]
        return None


class SignatureIndex:
    """Index the signatures that a log can show by their words.

    A log shows a rank only by its words, and rarely a backend: the signatures apply to any.
    """

    def __init__(self, cases: Mapping[str, Case], strategies: Mapping[str, Strategy]) -> None:
        self.cases = list(cases.values())
        self.strategies = list(strategies.values())
        self.simulated = {case.slug for case in self.cases if case.simulated}
        every = [(case, signature) for case in self.cases for signature in case.signatures]
        self.remarks = [item for item in every if item[1].kind == "log"]
        self.failures = [
            (case, _lenient(s)) for case, s in every if s.kind in ("exception", "signal")
        ]
        patterns = {s.message for _, s in self.remarks}
        patterns |= {s.ambiguous_with.ruled_out_by for _, s in every if s.ambiguous_with}
        messages = [
            (s, text)
            for _, s in self.failures
            for text in (s.message, *s.messages.values())
            if text
        ]
        readers: dict[str, list[str]] = read_yaml(Path(__file__).with_name("keywords.yaml"))
        wanted: list[tuple[str, Any, Iterable[str]]] = [
            *(("readers", reader, words) for reader, words in readers.items()),
            ("readers", "versions", (*UPSTREAM, *TRAINERS)),
            *(("patterns", text, words_of(text)) for text in filter(None, patterns)),
            *(("messages", message, words_of(message[1])) for message in messages),
            *(("rules", rule, rule.words) for rule in rules().values() if rule.place == "any_line"),
        ]
        self._wanted = [(kind, what) for kind, what, _ in wanted]
        self.words: dict[bytes, list[int]] = {}
        for at, (_, _, words) in enumerate(wanted):
            for word in words:
                self.words.setdefault(word.encode().translate(None, DIGITS), []).append(at)
        # Only the words whose longest part the log has, and few logs have many, are looked for in
        # its lines.
        self._parts: dict[bytes, list[bytes]] = {}
        for each in self.words:
            self._parts.setdefault(max(each.split(), key=len), []).append(each)
        self._present = list[bytes]()
        self._tokens = set[bytes]()
        self._patterns: dict[tuple[bytes, ...], LinePatterns | None] = {(): None}

    def patterns_of(self, shapes: set[bytes]) -> dict[bytes, LinePatterns | None]:
        """Return the patterns to try on each line without its digits; None: none."""
        text = b"\n".join(shapes)
        text += b"\n" + text.lower()
        tokens = set(text.split())
        new = b" ".join(tokens - self._tokens)
        self._tokens = tokens if len(self._tokens) > MAX_TOKENS else self._tokens | tokens
        for part in [part for part in self._parts if part in new]:
            self._present += self._parts.pop(part)
        words = [word for word in self._present if word in text]
        return {
            shape: self._patterns_of(
                tuple(word for word in words if word in shape.lower() or word in shape)
            )
            for shape in shapes
        }

    def _patterns_of(self, words: tuple[bytes, ...]) -> LinePatterns | None:
        if words not in self._patterns:
            wanted = [
                self._wanted[at] for at in sorted({at for word in words for at in self.words[word]})
            ]
            kinds = ("readers", "patterns", "messages", "rules")
            self._patterns[words] = LinePatterns(
                *([what for each, what in wanted if each == kind] for kind in kinds)
            )
        return self._patterns[words]


def _lenient(signature: Signature) -> Signature:
    """Return a signature that also matches other logs of its failure.

    It applies to any rank, ignores case, and does not need the backticks that Markdown removes.
    """
    lenient = {
        "ranks": "any",
        "message": signature.message and "(?i)" + signature.message.replace("`", "`?"),
    }
    return signature.model_copy(update=lenient)
