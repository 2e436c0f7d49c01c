"""What every model of a file in conf/ is made of: no unknown keys; texts that are patterns or requirements. Pure."""

from __future__ import annotations

import re

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return value


def requirement(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"not a requirement such as 'torch>=2.4': {error}") from None
    return value
