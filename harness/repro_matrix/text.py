"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """``1 case``, ``2 cases``. ``what``: in the singular, as it takes an s."""
    return f"{number} {what}{'' if number == 1 else 's'}"
