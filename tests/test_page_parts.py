"""What a report keeps of a case is what it would make anew, and is made anew when anything it depends on changed."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from test_diff import MADE

from repro_matrix.conf import catalogue
from repro_matrix.page import parts
from repro_matrix.page.read import read
from repro_matrix.results import muted
from repro_matrix.results.muted import Mute

CASE = "fsdp-generate"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(muted.read, "__defaults__", (tmp_path / "muted.yaml",))
    root = tmp_path / "results"
    for case in (CASE, "some-case"):
        path = root / "cpu" / "s" / case / "m.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**MADE, "case": case, "key": f"{case}/m-fsdp"}))
    (root / "cpu" / "s" / CASE / "bad.json").write_text("{")
    return root


def test_what_is_kept_is_what_would_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = catalogue.load()
    first = read([folder], known)
    assert len(first.cells) == 1 and "bad.json" in "".join(first.notes) and "some-case" in "".join(first.notes)
    calls: list[str] = []
    whole = parts.made
    monkeypatch.setattr(parts, "made", lambda asked, paths, *rest: calls.append("") or whole(asked, paths, *rest))
    assert read([folder], known) == first and not calls
    for path in (folder.parent / "cache" / "state" / "pages").iterdir():
        path.write_bytes(path.read_bytes()[:40])  # cut off behind its key
    assert read([folder], known) == first and len(calls) == 2, "what is damaged is made again"


def test_it_is_made_again_when_a_file_the_selection_or_a_mute_changed(folder: Path) -> None:
    known = catalogue.load()
    (one,) = read([folder], known).cells
    assert read([folder], known, {"model": ["nothing"]}).cells == []
    path = folder / "cpu" / "s" / CASE / "m.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "another"}))
    (other,) = read([folder], known).cells
    assert (one.model, other.model) == ("m", "another")
    before = parts.Asked(folder, "", known, {}, [], date(2026, 1, 1))
    mute = Mute(cell=f"{CASE}/m-fsdp", owner="a", until=date(2026, 1, 1), reason="r")
    said = {
        parts.Asked(folder, "", known, {}, mutes, day).digest()
        for mutes in ([], [mute])
        for day in (before.today, before.today + timedelta(1))
    }
    assert len(said) == 3 and before.digest() in said, "without mutes the day does not matter"
