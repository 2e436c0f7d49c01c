"""What a page keeps of a case is what it would make anew, and is made anew when anything it depends on changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from test_diff import MADE
from test_page import cell, made, paged, whole

from repro_matrix.conf import catalogue
from repro_matrix.page import parts, shown
from repro_matrix.page.page import of_views
from repro_matrix.page.parts import Asked, Stored, listed
from repro_matrix.page.read import Views, read, views
from repro_matrix.page.render import FIRST, drawn, one_file
from repro_matrix.page.shown import OfCase
from repro_matrix.results import kept, muted
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


@pytest.fixture
def made_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made from documents, and what from a case's cells."""
    calls: list[str] = []

    def counted(of: Any) -> Callable[[Any], Any]:
        itself = of.made
        return lambda self: calls.append(f"{of.__name__} {self.case}") or itself(self)

    for of in (Stored, OfCase):
        monkeypatch.setattr(of, "made", counted(of))
    return calls


def html(found: Views) -> str:
    return one_file(of_views(found.views, "t", "m", found.ledger, found.sources, found.notes), found.drawn)


def test_what_is_kept_is_what_would_be_made(folder: Path, made_again: list[str]) -> None:
    known = catalogue.load()
    first, cells = views([folder], known), read([folder], known)
    assert first.count == len(cells.cells) == 1
    assert "bad.json" in "".join(first.notes) and "some-case" in "".join(first.notes)
    assert cells.notes == first.notes and {said.row.id for said in first.ledger} == {row.id for row in cells.ledger}
    assert sorted(made_again) == [
        "OfCase fsdp-generate",
        "OfCase some-case",
        "Stored fsdp-generate",
        "Stored some-case",
    ]
    made_again.clear()
    assert html(views([folder], known)) == html(first) and read([folder], known) == cells and not made_again
    for path in (folder.parent / "cache" / "state" / "kept").iterdir():
        path.write_bytes(path.read_bytes()[:-1])  # its key is whole
    assert html(views([folder], known)) == html(first) and len(made_again) == 4, "what is damaged is made again"


def test_only_the_case_with_a_changed_document_is_made_again(folder: Path, made_again: list[str]) -> None:
    known = catalogue.load()
    second = folder / "cpu" / "s" / "fsdp-uniform-dtype" / "m.json"
    second.parent.mkdir()
    second.write_text(json.dumps({**MADE, "case": second.parent.name, "key": f"{second.parent.name}/m-fsdp"}))
    assert "<strong>n</strong>" not in html(views([folder], known))
    made_again.clear()
    before = second.stat()
    second.write_text(second.read_text().replace('"model": "m"', '"model": "n"'))
    os.utime(second, ns=(before.st_atime_ns, before.st_mtime_ns))  # as long as before, and at the same time
    found = views([folder], known)
    assert sorted(made_again) == ["OfCase fsdp-uniform-dtype", "Stored fsdp-uniform-dtype"]
    assert "<strong>n</strong>" in html(found)


def test_it_is_made_again_when_a_file_the_selection_a_mute_the_judge_or_a_template_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = catalogue.load()
    (one,) = read([folder], known).cells
    assert read([folder], known, {"model": ["nothing"]}).cells == []
    path = folder / "cpu" / "s" / CASE / "m.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "another"}))
    (other,) = read([folder], known).cells
    assert (one.model, other.model) == ("m", "another")
    before = Asked(folder, "", known, {}, [], date(2026, 1, 1))
    mute = Mute(cell=f"{CASE}/m-fsdp", owner="a", until=date(2026, 1, 1), reason="r")
    said = {
        Asked(folder, "", known, {}, mutes, day).digest
        for mutes in ([], [mute])
        for day in (before.today, before.today + timedelta(1))
    }
    assert len(said) == 3 and before.digest in said, "without mutes the day does not matter"
    monkeypatch.setattr(parts, "judge_key", lambda: "another judge")
    assert Asked(folder, "", known, {}, [], before.today).digest not in said
    stored = (Stored(before, CASE, listed(folder)[CASE]),)
    key = OfCase(CASE, stored, ()).key
    monkeypatch.setattr(shown, "_drawn_by", lambda: ["another template"])
    assert OfCase(CASE, stored, ()).key != key


def test_what_was_made_long_ago_goes(folder: Path) -> None:
    views([folder], catalogue.load())
    pages = folder.parent / "cache" / "state" / "kept"
    kept.prune()
    newest = max(path.stat().st_mtime for path in pages.iterdir())
    kept.prune(newest + kept.DAYS * 86400 + 1)
    assert not list(pages.iterdir())


def test_of_many_cells_of_a_case_the_first_are_written_out_and_the_others_packed() -> None:
    cells = [cell(made(case="many", model=f"m{n:02}")) for n in range(FIRST + 5)]
    view = paged(*cells).cases[0]
    assert drawn(view).first.count('<details class="cell"') == FIRST and drawn(view).later
    written = whole(*cells)
    assert all(f'id="{one.id}"' in written for one in cells) and f"show all {FIRST + 5} cells" in written
    assert not drawn(paged(*cells[:FIRST]).cases[0]).later
