"""What a page keeps of a case is what it would make anew, and is made anew when anything it depends on changed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from judging import document, failed, observation
from repro_matrix.config import catalog as catalogue
from repro_matrix.grading.regrade import regrade, with_expectations
from repro_matrix.paths import BASELINE
from repro_matrix.records.document import Document
from repro_matrix.report import parts, shown
from repro_matrix.report.formats import as_markdown
from repro_matrix.report.html import FIRST, LEAST, TOGETHER, drawn, one_file
from repro_matrix.report.page_model import of_views
from repro_matrix.report.parts import Asked, Stored, listed
from repro_matrix.report.read import Views, read, take, views
from repro_matrix.report.shown import OfCase
from repro_matrix.results import cache as kept
from repro_matrix.results import quarantine as muted
from repro_matrix.results.quarantine import Mute
from repro_matrix.results.store import Store, write_json
from test_page import armed, cell, made, paged, unpacked, whole

CASE = "fsdp-generate"

MADE = document({"broken": [("fires", observation(failed(0), failed(1)))] * 2}, {})


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


def test_a_case_that_is_read_in_divisions_says_what_it_says_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: list[str]
) -> None:
    known, root, case = catalogue.load(), tmp_path / "results", "lora-reentrant-checkpointing"
    for document in Store(BASELINE).documents(cases=[case]):  # noqa: F402
        at = root / document["hardware"]["profile"] / document["stack"]["label"] / f"{document['key']}.json"
        at.parent.mkdir(parents=True, exist_ok=True)
        write_json(at, document)
    found, cells = [], []
    for together in (10_000, 4):
        monkeypatch.setattr(parts, "TOGETHER", together)
        monkeypatch.setenv("REPRO_CACHE", str(tmp_path / f"cache {together}"))
        found.append(html(views([root], known)))
        cells.append(read([root], known).cells)
    assert found[0] == found[1] and cells[0] == cells[1]
    assert {row["verdict"] for one in cells[0] for row in one.rows} >= {"UPSTREAM_FIXED"}, "of another stack's document"
    assert made_again.count(f"Stored {case}") > 3
    made_again.clear()
    os.utime(at)
    views([root], known)
    assert sorted(made_again) == [f"OfCase {case}", f"Stored {case}"], "the others are kept"


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


FIXED = "lora-reentrant-checkpointing"


def as_a_run_ends(folder: Path, cases: Collection[str] = (CASE,), most: int = 1) -> list[Document]:
    """Published cells in the folder, and as the run that measured them has them in memory."""
    known = catalogue.load()
    shutil.rmtree(folder)
    for case in cases:
        for one in itertools.islice(Store(BASELINE).documents(cases=[case]), most):
            write_json(below(folder, one), one)
    judged = regrade(Store(folder).documents(), known.cases).documents
    return [with_expectations(document, known.cases[document["case"]]) for document in judged]


def below(folder: Path, one: Document) -> Path:
    path = folder / one["hardware"]["profile"] / one["stack"]["label"] / f"{one['key']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def judges_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def nothing() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(Stored, "made", lambda self: pytest.fail("judged for a report"))
            yield

    return nothing


def test_a_runs_own_report_is_that_of_the_same_documents_copied_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, judges_nothing: Any
) -> None:
    """What is kept is what is made from the files, of failures and controls, of a case's several stacks; a run that has
    ended draws it, too."""
    known, documents = catalogue.load(), as_a_run_ends(folder, (CASE, "train-step", FIXED), 4)
    shutil.copytree(folder, tmp_path / "elsewhere" / "results")
    shown_at_its_end = html(take(documents, folder, known))
    with judges_nothing(), monkeypatch.context() as patched:
        patched.setattr(OfCase, "made", lambda self: pytest.fail("drawn for a report"))
        own = html(views([folder], known))
    assert own == shown_at_its_end
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "another"))
    foreign = views([tmp_path / "elsewhere" / "results"], known)
    assert html(foreign) == own and foreign.count == len(documents) > 9


def test_who_reads_a_folder_is_told_what_is_in_it_and_not_what_its_run_knew_from_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, judges_nothing: Any
) -> None:
    """An older stack that fired lies elsewhere: to the run it is fixed upstream, by the folder it does not fire.
    Neither of them judges it again."""
    known, documents = catalogue.load(), as_a_run_ends(folder, (CASE, FIXED), 1)
    (one,) = (each for each in documents if each["case"] == FIXED)
    name, said = next((name, said) for name, said in one["verdicts"].items() if said["name"] == "NOT_FIRING")
    fixed = {**one["verdicts"], name: {**said, "name": "UPSTREAM_FIXED", "reason": "it fired elsewhere"}}
    of_run = html(take([{**one, "verdicts": fixed} if each is one else each for each in documents], folder, known))
    assert "it fired elsewhere" in unpacked_all(of_run)
    with judges_nothing():
        own = html(views([folder], known))
    assert "it fired elsewhere" not in unpacked_all(own)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "another"))
    assert html(views([folder], known)) == own


def unpacked_all(text: str) -> str:
    """A page with all that is packed in it."""
    return text + "".join(str(unpacked(one)) for one in re.findall(r'class="pack"[^>]*>([^<]+)</script>', text))


def test_what_does_not_say_what_it_shows_is_not_kept_from_a_run(
    folder: Path, made_again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, (one,) = catalogue.load(), as_a_run_ends(folder)
    name = next(name for name in one["verdicts"])
    wrong = {**one["verdicts"], name: {**one["verdicts"][name], "name": "UPSTREAM_FIXED"}}
    take([{**one, "verdicts": wrong}], folder, known)
    views([folder], known)
    assert f"Stored {CASE}" in made_again, "its files are judged"
    made_again.clear()
    assert take([], folder, known).views == [], "of what the run did not measure its page says nothing"
    another = folder / "cpu" / "s" / "some-case" / "m.json"
    another.parent.mkdir(parents=True)
    another.write_text(json.dumps({**MADE, "case": "some-case"}))
    assert [view.slug for view in take([one], folder, known).views] == [CASE] and not made_again


def test_a_mute_whose_day_is_over_is_said_on_the_page_and_for_a_pull_request(folder: Path, tmp_path: Path) -> None:
    known, yesterday = catalogue.load(), datetime.now(timezone.utc).date() - timedelta(1)
    entry = Mute(cell=f"{CASE}/m-fsdp", owner="someone", until=yesterday, reason="r")
    (tmp_path / "muted.yaml").write_text(muted.written([entry, entry.model_copy(update={"cell": "other/cell"})]))
    for _ in ("made", "kept"):
        (note,) = (note for note in views([folder], known).notes if "its day is over" in note)
        assert entry.told() in note
    found = read([folder], known)
    assert found.expired == [note] and note in found.notes
    assert "its day is over" in as_markdown(found.cells, expired=found.expired)
    (tmp_path / "muted.yaml").unlink()
    assert read([folder], known).expired == []
