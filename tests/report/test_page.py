"""The page: what it shows, in which order, and that texts of other programs stay texts."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok
from report_cells import HOSTILE, cell, rows, skipped_cell
from repro_matrix.analysis.claims import ClaimRow
from repro_matrix.analysis.history import make_run
from repro_matrix.analysis.inputs import from_row
from repro_matrix.config.vocabulary import OutcomeName, VerdictName
from repro_matrix.report.load import render_file, render_site
from repro_matrix.report.page_model import Cell, Page, build_page, cells_of, release_axes
from repro_matrix.report.terminal import LABELS
from repro_matrix.text import block, line

VOID = {"meta", "input", "br", "link"}


class Document(HTMLParser):
    """The parsed page: its elements, each with its attributes and the text inside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        assert not self._open, [self.elements[index][0] for index in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag, tag

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def find(self, tag: str, **attrs: str) -> list[str]:
        """Texts of the elements with these attributes."""
        wanted = {name.rstrip("_"): value for name, value in attrs.items()}
        return [
            " ".join("".join(text).split())
            for name, found, text in self.elements
            if name == tag and wanted.items() <= found.items()
        ]


def page(*cells: Cell, **more: Any) -> Page:
    return build_page(cells, "a title", "created now", {}, **more)


def shown(*cells: Cell, **more: Any) -> Document:
    return Document(render_file(page(*cells, **more)))


@given(st.text(max_size=300))
def test_block_of_any_text_has_no_control_or_invisible_character(text: str) -> None:
    assert not re.search("[\u200b-\u200f\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\ud800-\udfff]", block(text))
    assert "\n" not in line(text) and len(line(text, 50)) <= 50


@given(st.text(min_size=1, max_size=80))
def test_page_escapes_every_text(text: str) -> None:
    bomb = f"<img src=x onerror=alert(1)>{text}</script><script>"
    bad = cell("NOT_FIXED", "unexpected", error=bomb, model=bomb, title=bomb, references=[bomb])
    for written in (render_file(page(bad)), *render_site(page(bad)).values()):
        assert "<img" not in written and written.count("<script>") == written.count("</script>") == 1


def test_page_of_hostile_evidence_is_well_formed() -> None:
    names = {name: HOSTILE for name in ("title", "model", "simulated")}
    parsed = shown(cell("DIFFERENT_FAILURE", "unexpected", HOSTILE, **names), skipped_cell(HOSTILE), notes=[HOSTILE])
    assert len(parsed.find("details", class_="cell")) == 2
    assert not [text for _, _, found in parsed.elements for text in found if "\x1b" in text or "\u202e" in text]


def test_page_lists_what_needs_attention_first_with_error_and_command() -> None:
    parsed = shown(cell(case="quiet"), cell("NOT_FIXED", "unexpected", case="loud"),
                   cell("SIGNATURE_MISMATCH", "differs_from_cpu", case="news"))  # fmt: skip
    first, second = (text for text in parsed.find("li") if "the whole cell" in text)
    assert "differs from expectation loud m/fsdp" in first and "RuntimeError: boom" in first
    assert "repro run loud model=m strategy=fsdp variants=fix" in first and "differs from CPU news" in second
    sections = [attrs["id"] for tag, attrs, _ in parsed.elements if tag == "section" and attrs.get("class") == "case"]
    assert sections[-1] == "quiet"


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ((), "Nothing was measured"),
        ((cell(),), "Nothing differs from its expectation."),
        ((cell(), cell(model="n")), "1 known failure occurs on the newest stack"),
        ((cell("SIGNATURE_MISMATCH", "no_expectation"),), "1 measured variant has no expectation yet"),
        ((skipped_cell(),), "needs 2 GPUs"),
    ],
)
def test_page_headline(cells: tuple[Cell, ...], text: str) -> None:
    (section,) = shown(*cells).find("section", **{"aria-labelledby": "attention"})
    assert text in section


def test_page_is_self_contained() -> None:
    written = unescape(render_file(page(cell("NOT_FIXED", "unexpected", references=["a/b#1", "http://evil"]))))
    addresses = set(re.findall(r'(?:href|src)="([^"#][^"]*)"', written))
    assert addresses == {"https://github.com/a/b/issues/1"}
    assert "default-src 'none'" in written and "@import" not in written and "url(" not in written


def test_case_shows_claims_and_its_cell_changes_checks_error_and_evidence() -> None:
    claim = ClaimRow("some-case", "1a", "it helps", "a/b#1", "supported", "2 measurements")
    parsed = shown(cell(), claims=[claim])
    (text,) = parsed.find("details", class_="claims")
    assert "supported it helps" in text and "repro claims 1a" in text
    (text,) = parsed.find("details", class_="cell")
    for part in ("flags.call: inner → root", "logits passed: actual 0, expected 0, tolerance 0.0001", "ranks 0, 1",
                 "RuntimeError: boom", "cpu/stack/cell.json",
                 "repro run some-case", "transformers 5.23.0"):  # fmt: skip
        assert part in text


def test_every_link_of_the_page_and_the_site_has_a_target() -> None:
    cells = [cell(case=case, stack={"name": name, "python": "3", "versions": {"torch": "2.13.0", "transformers": name}})
             for case in ("one", "two") for name in ("5.0", "5.1")]  # fmt: skip
    files = {"": render_file(page(*cells))} | render_site(page(*cells))
    ids = {(name, found) for name, text in files.items() for found in re.findall(r' id="([^"]+)"', text)}
    for name, text in files.items():
        for address in re.findall(r'href="([^"]+)"', text):
            file, _, anchor = address.partition("#")
            assert (file or name) in files and (not anchor or (file or name, anchor) in ids), (name, address)


def test_case_status_is_of_the_newest_stack() -> None:
    stacks = [{"name": v, "python": "3", "versions": {"torch": "2.13.0", "transformers": v}} for v in ("4.9", "4.36")]
    old, new = cell(stack=stacks[0]), cell("NOT_REPRODUCED", stack=stacks[1])
    passed = document({"unfixed": [("passed", observation(ok(0)))], "fix": [("passed", observation(ok(0)))]},
                      {"fix": "NOT_REPRODUCED"}, stack=stacks[1])  # fmt: skip
    (case,) = page(old, new).cases
    assert case.label.name == "reproduced" and "4.36" in case.status
    (case,) = page(old, *cells_of(rows(passed))).cases
    assert case.label.name == "NOT_REPRODUCED" and case.fixes == ()
    (case,) = page(old).cases
    assert case.fixes == ("fix",)
    assert [(one.name, n) for one, n in case.by_strategy["fsdp"]] == [("reproduced", 1), ("FIXED", 1)]


def test_release_axis_names_the_release_that_changed_the_result() -> None:
    def at(release: str, verdict: str) -> Cell:
        versions = {"torch": "2.2.2", "transformers": release}
        return cell(verdict, stack={"name": f"base+transformers@{release}", "python": "3", "versions": versions})

    (axis,) = release_axes([at("4.44.0", "FIXED"), at("4.9.0", "NOT_FIXED"), at("4.40.0", "NOT_FIXED")])
    assert axis.columns == ("transformers 4.9.0", "transformers 4.40.0", "transformers 4.44.0") and axis.steady == 1
    (((earlier, before, later, after), variants),) = axis.changes.items()
    assert (earlier, before.name) == ("transformers 4.40.0", "NOT_FIXED")
    assert (later, after.name) == ("transformers 4.44.0", "FIXED") and variants == ["fix"]


def test_history_lists_variants_that_changed_and_counts_steady_ones() -> None:
    names = ["FIXED", "INCONCLUSIVE", "NOT_FIXED"]
    new = [cell(model="new", cell_id="some-case/new")]
    runs = []
    for number, name in enumerate(names):
        cells = [cell(name), *(new if number else [])]
        runs.append(make_run(f"run {number}", [from_row(row) for one in cells for row in one.rows]))
    past = page(cell(), runs=runs).history
    assert past and past.columns == ("run 0", "run 1", "run 2") and past.steady == 3
    (strip,) = past.strips
    assert [entry and entry[0].name for entry in strip.entries] == names
    assert "1 variant changed" in " ".join(shown(cell(), runs=runs).find("section"))


def test_verdicts_differ_in_symbol_or_text() -> None:
    assert {*get_args(VerdictName), *get_args(OutcomeName)} <= LABELS.keys()
    assert len({(LABELS[name].symbol, LABELS[name].text) for name in get_args(VerdictName)}) == len(
        get_args(VerdictName)
    )
