"""Snapshots of what people read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "UPDATE_SNAPSHOTS"  # in the environment: write the snapshots instead of comparing with them


@pytest.fixture
def snapshot() -> Callable[[str, str], None]:
    """Compare a text with the file of this name; with UPDATE_SNAPSHOTS=1 write it."""

    def check(name: str, text: str) -> None:
        path = SNAPSHOTS / name
        if os.environ.get(UPDATE):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, f"{path} differs; if that is intended: {UPDATE}=1 pytest"

    return check


@pytest.fixture
def hostile() -> str:
    return "</script><img src=x onerror=alert(1)>\x1b[31mred\x1b[0m\u202eevil\u200b\x00<b>&amp;'\"`|\ud800"
