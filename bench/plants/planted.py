"""All errors that train.py can have, by name."""

from __future__ import annotations

import planted_model
import planted_training
from errors import Error


def named(kind: type[Error]) -> str:
    return "".join(f"-{each.lower()}" if each.isupper() else each for each in kind.__name__).lstrip(
        "-"
    )


KINDS = [
    each
    for module in (planted_model, planted_training)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Error) and each is not Error
]
ERRORS: dict[str, type[Error]] = {"none": Error, **{named(kind): kind for kind in KINDS}}
