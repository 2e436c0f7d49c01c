"""What a page keeps of a case is what it would make anew, and is made anew when anything it depends on changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from test_diff import MADE
from test_page import armed, cell, made, paged, unpacked, whole

from repro_matrix.cell.document import Document
from repro_matrix.conf import catalogue
from repro_matrix.diff import sides
from repro_matrix.judge.again import judged_again, with_expectations
from repro_matrix.page import parts, shown
from repro_matrix.page.page import of_views
from repro_matrix.page.parts import Asked, Stored, listed
from repro_matrix.page.read import Views, read, take, views
from repro_matrix.page.render import FIRST, LEAST, TOGETHER, drawn, one_file
from repro_matrix.page.shown import OfCase
from repro_matrix.paths import BASELINE
from repro_matrix.results import kept, muted
from repro_matrix.results.muted import Mute
from repro_matrix.results.store import Store, write_json

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
    assert len(drawn(view).first) == FIRST and drawn(view).later
    written = one_file(paged(*cells))
    assert written.count('<details class="cell"') == FIRST and f"show all {FIRST + 5} cells" in written
    assert all(f'id="{one.id}"' in whole(*cells) for one in cells)
    assert not drawn(paged(*cells[:LEAST]).cases[0]).later


def test_what_a_search_looks_at_has_every_arm() -> None:
    many = [cell(armed(model=f"m{n}")) for n in range(FIRST + 3)]
    written = one_file(paged(*many))
    lines = re.findall(r'<details class="cell"[^>]* data-a="([^"]*)"', written)
    assert len(lines) == FIRST and set(lines) == {"fix-3 fix-4 fix-5"}
    (later,) = [unpacked(pack) for pack in re.findall(r'id="later">([^<]+)</script>', written)]
    named = [later[0]["arms"][one] for _, arms in later[0]["cells"][-1][11] for one in arms]
    assert sorted(named) == ["broken", "fix", *(f"fix-{n}" for n in range(1, 6))]


def test_of_many_cases_fewer_cells_each_are_written_out() -> None:
    """Else a page of many cases would not open at once."""
    several = [cell(made(case=f"c{n:02}", model=f"m{m}")) for n in range(TOGETHER // LEAST) for m in range(FIRST)]
    written = one_file(paged(*several))
    assert written.count('<details class="cell"') == TOGETHER and f"{LEAST} are listed; filters look" in written


def as_a_run_ends(folder: Path) -> list[Document]:
    """A published cell in the folder, and as the run that measured it has it in memory."""
    known = catalogue.load()
    shutil.rmtree(folder)
    one = next(Store(BASELINE).documents(cases=[CASE]))
    write_json(below(folder, one), one)
    judged = judged_again(Store(folder).documents(), known.cases).documents
    return [with_expectations(document, known.cases[CASE]) for document in judged]


def below(folder: Path, one: Document) -> Path:
    path = folder / one["hardware"]["profile"] / one["stack"]["label"] / f"{one['key']}.json"
    path.parent.mkdir(parents=True)
    return path


def test_what_a_run_has_judged_is_not_judged_again_by_who_reads_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known, documents = catalogue.load(), as_a_run_ends(folder)
    assert take(documents, folder, known)
    with monkeypatch.context() as patched:
        patched.setattr(Stored, "made", lambda self: pytest.fail("judged for a report"))
        patched.setattr(sides, "_chunk", lambda paths: pytest.fail("judged for a comparison"))
        warm, briefs = html(views([folder], known)), sides.read(folder).briefs
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "another"))
    assert html(views([folder], known)) == warm and sides.read(folder).briefs == briefs, "the same from the files"
    assert CASE in warm and [one.case for one in briefs] == [CASE]


def test_what_a_run_knows_from_elsewhere_is_not_kept_for_who_reads_its_folder(folder: Path) -> None:
    known, (one,) = catalogue.load(), as_a_run_ends(folder)
    name = next(name for name in one["verdicts"])
    elsewhere = {**one["verdicts"], name: {**one["verdicts"][name], "name": "UPSTREAM_FIXED"}}
    assert not take([{**one, "verdicts": elsewhere}], folder, known)
    assert not take([], folder, known) and take([one], folder, known)
    (folder / "cpu" / "s" / "some-case").mkdir(parents=True)
    (folder / "cpu" / "s" / "some-case" / "m.json").write_text(json.dumps({**MADE, "case": "some-case"}))
    assert not take([one], folder, known), "there is more than the run has measured"
