"""The page: what it shows, in which order, and that texts of other programs stay texts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok
from report_cells import HOSTILE, cell, results, rows, skipped_cell, stored_cell
from repro_matrix.baseline.claims import ClaimRow
from repro_matrix.changes.history import make_run
from repro_matrix.config import catalog
from repro_matrix.config.schema import Signature
from repro_matrix.config.vocabulary import OutcomeName, VerdictName
from repro_matrix.report.load import Remarks
from repro_matrix.report.page import render_file, render_site
from repro_matrix.report.page_model import CellView, Page, build_page, cells_of
from repro_matrix.report.terminal import LABELS
from repro_matrix.text import block, line

from bench import pictures

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


def page(*cells: CellView, **more: Any) -> Page:
    return build_page(results(cells, **more))


def shown(*cells: CellView, **more: Any) -> Document:
    return Document(render_file(page(*cells, **more)))


@given(st.text(max_size=300))
def test_block_of_any_text_has_no_control_or_invisible_character(text: str) -> None:
    assert not re.search(
        "[\u200b-\u200f\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\ud800-\udfff]", block(text)
    )
    assert "\n" not in line(text) and len(line(text, 50)) <= 50


@given(st.text(min_size=1, max_size=80))
def test_page_escapes_every_text(text: str) -> None:
    bomb = f"<img src=x onerror=alert(1)>{text}</script><script>"
    bad = cell("NOT_FIXED", "unexpected", error=bomb, model=bomb, title=bomb, references=[bomb])
    for name, written in (("index.html", render_file(page(bad))), *render_site(page(bad)).items()):
        scripts = int(name.endswith(".html"))  # a site has a badge, too
        assert (
            "<img" not in written
            and written.count("<script>") == written.count("</script>") == scripts
        )


def test_page_of_hostile_evidence_is_well_formed() -> None:
    names = {name: HOSTILE for name in ("title", "model", "simulated")}
    parsed = shown(
        cell("DIFFERENT_FAILURE", "unexpected", HOSTILE, **names),
        skipped_cell(HOSTILE),
        remarks=Remarks(notes=[HOSTILE]),
    )
    assert len(parsed.find("section", class_="case")) == 1  # of two cells
    assert not [
        text
        for _, _, found in parsed.elements
        for text in found
        if "\x1b" in text or "\u202e" in text
    ]


def symbols(parsed: Document) -> dict[str, list[str]]:
    """Case -> its symbols, by strategy."""
    found: dict[str, list[str]] = {}
    for tag, attrs, text in parsed.elements:
        if tag == "tr" and attrs.get("data-case"):
            found[str(attrs["data-case"])] = []
        elif tag == "td" and str(attrs.get("class")).startswith("s "):
            list(found.values())[-1].append("".join(text))
    return found


def test_page_lists_what_needs_attention_first_with_error_fixes_and_commands() -> None:
    loud = cell("NOT_FIXED", "unexpected", case="loud")
    parsed = shown(
        cell(case="quiet"), loud, cell("SIGNATURE_MISMATCH", "differs_from_cpu", case="news")
    )
    first, second, *sections = parsed.find("div", class_="news")
    assert ["STOPPED WORKING" in one for one in sections] == [
        True,
        False,
    ]  # a case's section says it, too
    assert "STOPPED WORKING" in first and "loud" in first and "because" in first
    assert "repro run loud model=m strategy=fsdp variants=fix" in first
    assert "DIFFERENT FROM THE CPU" in second and "news" in second
    ids = [
        attrs["id"]
        for tag, attrs, _ in parsed.elements
        if tag == "section" and attrs.get("class") == "case"
    ]
    assert ids[-1] == "quiet"
    assert symbols(parsed) == {"loud": ["!"], "news": ["R"], "quiet": ["R"]}


def test_only_what_needs_attention_is_red() -> None:
    calm = shown(
        cell("NOT_FIXED"),
        cell("DIFFERENT_FAILURE", case="two"),
        cell("FIX_BREAKS", case="three"),
        cell("FIX_BREAKS", "differs_from_cpu", case="four"),
    )
    assert not [
        attrs
        for _, attrs, _ in calm.elements
        if {"bad", "attention", "fails"} & {*str(attrs.get("class")).split()}
    ]
    loud = shown(cell("NOT_FIXED", "unexpected"))
    red = {*loud.find("b", class_="bad"), *loud.find("span", class_="bad")}
    assert red == {
        "STOPPED WORKING",
        "1 stopped working: some-case/fix.",
        "1 stopped working",
        "stopped working: same failure",
    }


(CONTROL,) = cells_of(
    rows(
        document(
            {"control": [("passed", observation(ok(0)))]}, {"control": "PASSED"}, kind="control"
        )
    )
)


@pytest.mark.parametrize(
    ("cells", "texts", "symbol"),
    [
        ((), ["Nothing was measured."], None),
        (
            (cell(),),
            ["1 of 1 reproduces", "1 of 1 works", "0 of 1 stopped working", "What to do"],
            "R",
        ),
        ((cell(), cell(model="n")), ["1 of 1 reproduces"], "R"),
        ((CONTROL,), ["1 of 1 cell passes"], "✓"),
        ((cell("SIGNATURE_MISMATCH", "no_expectation"),), ["1 result without an expectation"], "R"),
        ((skipped_cell(),), ["Nothing was measured.", "needs 2 GPUs"], "–"),
    ],
)
def test_page_headline(cells: tuple[CellView, ...], texts: list[str], symbol: str | None) -> None:
    parsed = shown(*cells)
    (text,) = parsed.find("body")
    assert not [one for one in texts if one not in text]
    assert list(symbols(parsed).values()) == ([[symbol]] if symbol else [])


def test_page_is_self_contained() -> None:
    written = unescape(
        render_file(page(cell("NOT_FIXED", "unexpected", references=["a/b#1", "http://evil"])))
    )
    addresses = set(re.findall(r'(?:href|src)="([^"#][^"]*)"', written))
    assert addresses == {"https://github.com/a/b/issues/1"}
    assert "default-src 'none'" in written and "@import" not in written and "url(" not in written


def test_case_shows_symptom_fixes_claims_and_proof() -> None:
    claim = ClaimRow("some-case", "1a", "it helps", "a/b#1", "supported", "2 measurements")
    error = "the same error " * 20
    parsed = shown(cell(error=error), cell(error=error, model="n"), claims=[claim])
    (text,) = parsed.find("section", class_="case")
    for part in (
        "RuntimeError: the same error",
        "What helps",
        "flags.call: inner → root",
        "works in all 2 cells",
        "supported: it helps",
        "logits 0 (tolerance 0.0001)",
        "ranks 0, 1",
        "cpu/stack/cell.json",
        "again: repro run some-case",
        "n",
    ):
        assert part in text, part
    assert text.count(error.strip()) == 2  # the symptom and the errors; each cell has its beginning


def test_proof_of_a_case_is_one_text_and_names_what_variants_share_once() -> None:
    cells = [skipped_cell(), skipped_cell(model="n")]
    (proof,) = re.findall(
        r"commands: 2 cells</summary><pre>(.*?)</pre></details>", render_file(page(*cells)), re.S
    )
    assert proof.count("unfixed, fix: not measured") == 2 == proof.count("evidence: ")


def test_evidence_is_a_link_only_on_the_page_beside_it() -> None:
    assert 'href="cpu/stack/cell.json"' in render_file(
        page(cell(), target=Path("results/x/report.html"))
    )
    assert 'href="cpu' not in render_file(page(cell()))


@pytest.mark.parametrize(
    ("signature", "symptom"),
    [
        ({"kind": "check", "check": "loss"}, "No error is raised. A title."),
        ({"kind": "signal", "signal": "SIGABRT"}, "a rank dies of SIGABRT"),
        (
            {
                "kind": "exception",
                "type": "E",
                "message": r"got (an?|two) \[\d+\] of x",
                "package": "p",
            },
            "E: got an? […] of x",
        ),
    ],
)
def test_symptom_that_was_not_measured_is_no_regular_expression(
    signature: dict[str, Any], symptom: str
) -> None:
    shown_case = next(iter(catalog.load().cases.values())).model_copy(
        update={"title": "A title", "signatures": [Signature(name="s", **signature)]}
    )
    known = replace(catalog.load(), cases={"some-case": shown_case})
    (only,) = page(CONTROL, catalog=known).cases
    assert only.symptom == symptom


def test_every_link_of_the_page_and_the_site_has_a_target() -> None:
    cells = [
        cell(
            "SIGNATURE_MISMATCH",
            "no_expectation",
            case=case,
            stack={
                "name": name,
                "python": "3",
                "versions": {"torch": "2.13.0", "transformers": name},
            },
        )
        for case in ("one", "two")
        for name in ("5.0", "5.1")
    ]
    files = {"": render_file(page(*cells))} | render_site(page(*cells))
    ids = {
        (name, found)
        for name, text in files.items()
        for found in re.findall(r' id="([^"]+)"', text)
    }
    for name, text in files.items():
        for address in re.findall(r'href="([^"]+)"', text):
            file, _, anchor = address.partition("#")
            assert (file or name) in files and (not anchor or (file or name, anchor) in ids), (
                name,
                address,
            )


def test_symbol_is_of_the_newest_stack() -> None:
    stacks = [
        {"name": v, "python": "3", "versions": {"torch": "2.13.0", "transformers": v}}
        for v in ("4.9", "4.36")
    ]
    passed = document(
        {"unfixed": [("passed", observation(ok(0)))], "fix": [("passed", observation(ok(0)))]},
        {"fix": "NOT_REPRODUCED"},
        stack=stacks[1],
    )
    fixed = cells_of(rows(passed))
    assert symbols(shown(cell(stack=stacks[0]), *fixed)) == {"some-case": ["o"]}
    assert symbols(shown(cell(stack=stacks[0]))) == {"some-case": ["R"]}
    assert symbols(shown(cell(strategy="ddp", stack=stacks[0]), *fixed)) == {
        "some-case": ["–", "o"]
    }


def test_what_helps_counts_only_where_the_failure_reproduces() -> None:
    absent = cell("NOT_REPRODUCED", model="other")
    (case,) = page(cell(), absent).cases
    ((label, count, places),) = case.variants["fix"][0].results
    assert (label.name, count, places) == ("FIXED", 1, ("m",))
    (case,) = page(cell("NOT_FIXED"), absent).cases
    assert case.variants["non_fix"][0].name == "fix" and "fix" not in case.variants


def test_earlier_runs_are_a_strip_for_each_case() -> None:
    names = ["FIXED", "INCONCLUSIVE", "NOT_FIXED"]
    past = [make_run(f"run {n}", [row for row in cell(name).rows]) for n, name in enumerate(names)]
    with_runs = page(cell(), past=past)
    assert [state for _, state in with_runs.cases[0].past] == ["reproduces"] * 4
    assert Document(render_file(with_runs)).find("td", class_="more runs") == ["RRRR"]
    assert not page(cell()).runs


@pytest.mark.xdist_group("baseline")
@pytest.mark.usefixtures("published_rows")
def test_pictures_show_the_page_of_today() -> None:
    stored = json.loads(pictures.DIGESTS.read_text(encoding="utf-8"))
    assert stored == pictures.digests(pictures.report()), (
        "the page or the results changed: make pictures"
    )
    assert (
        {path.stem for path in pictures.FOLDER.glob("*.png")}
        == stored.keys()
        == pictures.PICTURES.keys()
    )


def test_verdicts_differ_in_text() -> None:
    assert {*get_args(VerdictName), *get_args(OutcomeName)} <= LABELS.keys()
    assert len({LABELS[name].text for name in get_args(VerdictName)}) == len(get_args(VerdictName))


@pytest.mark.parametrize(
    ("verdict", "symbol"),
    [("FIXED", "o"), ("NOT_FIXED", "R"), ("DIFFERENT_FAILURE", "e"), ("FLAKY", None)],
)
def test_variant_under_another_strategy_has_its_symbol_there(
    verdict: str, symbol: str | None
) -> None:
    first, fix = rows(stored_cell(verdict))
    elsewhere = replace(fix, settings={"strategy": {"slug": "ddp"}})
    (only,) = cells_of([first, elsewhere])
    (found,) = symbols(shown(only)).values()
    assert found == ([symbol, "R"] if symbol else ["R"])
