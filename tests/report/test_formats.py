"""JUnit, Markdown and JSON: fields that other programs read, and one snapshot of the text."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from report_cells import HOSTILE, cell, head, results, skipped_cell
from repro_matrix.baseline.claims import ClaimRow
from repro_matrix.paths import RESULTS
from repro_matrix.report.formats import MOST, report_to_json, to_junit, to_markdown
from repro_matrix.report.load import Remarks
from repro_matrix.report.page_model import CellView

REMARKS = Remarks(["x.json: damaged"], ["run: interrupted"], ["entry expired"], ["a note"])


def mixed() -> list[CellView]:
    return [
        cell(),
        cell("NOT_FIXED", "unexpected", case="loud"),
        cell("SIGNATURE_MISMATCH", "differs_from_cpu", case="news"),
        cell("SIGNATURE_MISMATCH", "no_expectation", case="new", flags={"call": "root"}),
        skipped_cell(case="away"),
    ]


def test_junit_has_a_failure_a_skip_and_errors_for_what_is_no_evidence() -> None:
    xml = JUnitXml.fromstring(to_junit(results(mixed(), remarks=REMARKS)).encode())
    kinds = {
        f"{test.classname.rpartition('.')[2]} {test.name}": [type(one) for one in test.result]
        for suite in xml
        for test in suite
    }
    assert kinds["some-case m/fsdp fix"] == kinds["news m/fsdp fix"] == []
    assert kinds["loud m/fsdp fix"] == [Failure] and kinds["away m/fsdp fix"] == [Skipped]
    assert kinds["results damaged 1"] == kinds["results damaged 2"] == [Error]
    assert (xml.failures, xml.errors, xml.skipped) == (1, 2, 2)
    assert all(
        one.time > 0
        for suite in xml
        for one in suite
        if one.name == "m/fsdp fix" and suite.name != "away"
    )


def test_junit_names_both_failures_of_the_same_verdict() -> None:
    odd = cell("DIFFERENT_FAILURE", "unexpected")
    note = "expected failure: check a; this one: check b"
    unfixed, fix = odd.rows
    cells = [
        replace(odd, rows=(unfixed, replace(fix, expected_verdict="DIFFERENT_FAILURE", note=note)))
    ]
    xml = JUnitXml.fromstring(to_junit(results(cells)).encode())
    (message,) = (each.result[0].message for suite in xml for each in suite if each.result)
    assert "check a" in message and "check b" in message


def test_every_format_reads_hostile_text() -> None:
    away = skipped_cell(HOSTILE, case="away")
    cells = [cell("DIFFERENT_FAILURE", "unexpected", HOSTILE, model=HOSTILE, title=HOSTILE), away]
    remarks = Remarks([HOSTILE], [HOSTILE], [HOSTILE], [HOSTILE])
    folder = Path(re.sub("[/\0\ud800]", "", HOSTILE))
    found = results(cells, remarks=remarks, folders=[folder])
    assert JUnitXml.fromstring(to_junit(found).encode())
    assert json.loads(report_to_json(found))["rows"]
    more = [*cells, skipped_cell("", case="away")]
    markdown = to_markdown(replace(found, cells=more, headline=head(more)))
    title = markdown.splitlines()[0]
    assert "\x1b" not in markdown and "\\<img" in title and "NOT MEASURED" in markdown


def test_json_is_valid_by_its_schema() -> None:
    claim = ClaimRow("some-case", "1a", "it helps", "a/b#1", "supported", "2 measurements")
    value = json.loads(report_to_json(results(mixed(), claims=[claim], remarks=REMARKS)))
    jsonschema.validate(
        value,
        json.loads((RESULTS / "schema" / "report-v1.schema.json").read_text(encoding="utf-8")),
    )
    assert (
        value["unread"] == ["x.json: damaged"]
        and "a note" in value["notes"]
        and value["counts"]["reproduced"] == 4
    )
    odd = next(row for row in value["rows"] if row["expected"] == "unexpected")
    assert (
        odd["command"] == "repro run loud model=m strategy=fsdp variants=fix"
        and odd["expectation"] == "FIXED"
    )


def test_markdown_of_each_kind_of_result() -> None:
    text = to_markdown(results(mixed(), remarks=REMARKS))
    path = Path(__file__).parent / "snapshots" / "report.md"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        "if that is intended: UPDATE_SNAPSHOTS=1 pytest"
    )


@given(st.integers(0, 300), st.text(max_size=400))
@settings(max_examples=10)
def test_markdown_stays_under_its_limit_and_keeps_every_section(count: int, text: str) -> None:
    odd = cell("NOT_FIXED", "unexpected", error=text)
    markdown = to_markdown(results([*[odd] * count, skipped_cell(case="away")]))
    assert len(markdown.encode(errors="replace")) <= MOST and "NOT MEASURED: 2 variants" in markdown
    assert ("STOPPED WORKING" in markdown) == (count > 0)
