"""The schema of a signature: how a known failure shows itself. Pure."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from repro_matrix.config.strict import Strict, regex
from repro_matrix.config.vocabulary import SignatureKind


class Frame(Strict):
    """One frame that must be among an exception's (or a hung rank's) frames; regular expressions, whole match."""

    module: str = ".*"
    function: str = ".*"

    _check = field_validator("module", "function")(regex)


class Collective(Strict):
    """A collective of one group in which the ranks of a hang disagree, as torch's flight recorder shows it."""

    kinds: list[str] = Field(min_length=1)  # regular expressions, each for one kind that was entered: allgather ...
    missing: bool | None = None  # whether some rank never entered it

    @field_validator("kinds")
    @classmethod
    def _regexes(cls, value: list[str]) -> list[str]:
        return [regex(item) for item in value]


class AmbiguousWith(Strict):
    """Another cause that shows the very same: of an unknown script, a log alone does not tell which it was."""

    cause: str
    ruled_out_by: str | None = None  # a regular expression: a line of the same log that rules the other cause out

    @field_validator("ruled_out_by")
    @classmethod
    def _check(cls, value: str | None) -> str | None:
        return value if value is None else regex(value)


class Signature(Strict):
    """How one known failure shows itself. Which keys apply depends on ``kind``; see docs/guides/add-a-case.md."""

    name: str
    kind: SignatureKind
    # exception: its type's name (or one of its bases), and a regular expression searched for in its message.
    type: str | None = None
    message: str | None = None
    messages: dict[str, str] = {}  # backend (nccl, gloo) -> message, where the backends word it differently
    package: str | None = None  # exception: package of the innermost frame; log: package the record comes from
    frames: list[Frame] = []  # exception, hang and signal: each must match one of the frames
    collective: Collective | None = None  # hang: in what the ranks disagree, beside the frames
    logger: str | None = None  # log: regular expression for the logger or the warning category
    check: str | None = None  # oracle: the name of the check that fails
    signal: str | None = None  # signal: SIGSEGV, SIGABRT ...
    accelerator: Literal["cpu", "cuda"] | None = None  # where it can show at all; None: anywhere
    ranks: Literal["any", "all"] = "any"
    ambiguous_with: AmbiguousWith | None = None  # for `repro match` alone: here the script is known

    @field_validator("message", "logger")
    @classmethod
    def _regexes(cls, value: str | None) -> str | None:
        return value if value is None else regex(value)

    @field_validator("messages")
    @classmethod
    def _variant_regexes(cls, value: dict[str, str]) -> dict[str, str]:
        return {backend: regex(text) for backend, text in value.items()}

    @model_validator(mode="after")
    def _needs(self) -> Signature:
        needed = {
            "exception": ("type", "package"),
            "log": ("message", "package"),
            "check": ("check",),
            "hang": () if self.collective else ("frames",),
            "signal": ("signal",),
        }[self.kind]
        missing = [key for key in needed if not getattr(self, key)]
        if missing:
            raise ValueError(f"a signature of kind {self.kind} needs {', '.join(missing)}")
        if self.collective and self.kind != "hang":
            raise ValueError(f"collective says where ranks hang; a signature of kind {self.kind} has none")
        for pattern in (self.message, *self.messages.values()):
            # The whole list of foreign messages is for the tests and `repro accept`; these few cost nothing.
            if pattern and any(re.search(pattern, text) for text in ("", "0", "a b", "Error: the x (y) [z] 'w'")):
                raise ValueError(f"message {pattern!r} matches anything: say what the failure's text is")
        if self.type in ("Exception", "BaseException"):
            raise ValueError(f"type {self.type} is every error's: name the type that is raised")
        if self.kind == "exception" and not (self.message or self.messages):
            raise ValueError("a signature of kind exception needs message or messages")
        return self
