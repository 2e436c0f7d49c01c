"""The page: what it says, that hostile texts stay texts, that it stays small, and the files for other programs."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from judging import NORM, case, document, ended, exception, failed, observation, ok
from junitparser import Error, Failure, JUnitXml, Skipped
from repro_matrix.analysis.claims.ledger import ClaimRow
from repro_matrix.analysis.history import NightlyRun
from repro_matrix.analysis.inputs import ArmResult
from repro_matrix.cli.main import main
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.vocabulary import VerdictName
from repro_matrix.grading.regrade import regrade
from repro_matrix.paths import RESULTS
from repro_matrix.report import formats, tables
from repro_matrix.report import hang_tree as hangs
from repro_matrix.report import html as render
from repro_matrix.report.case import link
from repro_matrix.report.change import Change, changes
from repro_matrix.report.icons import MARKS, mark, of_kinds
from repro_matrix.report.page_model import Page, page
from repro_matrix.report.ranks import numbered
from repro_matrix.report.read import named
from repro_matrix.report.releases import axes
from repro_matrix.report.sanitize import harmless, line
from repro_matrix.report.view import Cell, cell
from repro_matrix.results import runs
from repro_matrix.results.store import write_json

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31mred\x1b[0m\u202eevil\u200b\x00<b>&amp;'\"`|\ud800"
BOOM = observation(failed(0, exception("RuntimeError", "boom")), ok(1))


def made(verdict: str = "FIX_HOLDS", expected: str = "expected", error: str = "boom", **changes: Any) -> dict[str, Any]:
    seen = observation(failed(0, exception("RuntimeError", error)), failed(1, exception("RuntimeError", error)))
    seen["ranks"][0]["log_tail"] = error
    said = document(
        {"broken": [("fires", seen)], "fix": [("clean" if verdict == "FIX_HOLDS" else "fires", seen)]},
        {"fix": verdict},
        **changes,
    )
    said["verdicts"]["fix"] |= {"expected": expected, "expectation": "FIX_HOLDS"}
    said["arms"]["broken"]["settings"] = {"flags": {"call": "inner"}, "model": {"slug": "m"}}
    said["arms"]["fix"]["settings"] = {"flags": {"call": "root"}, "model": {"slug": "m"}}
    return said


def armed(**changes: Any) -> dict[str, Any]:
    """With six fixes that hold: more than a cell's line names."""
    said = made(**changes)
    for number in range(1, 6):
        said["arms"][f"fix-{number}"] = said["arms"]["fix"]
        said["verdicts"][f"fix-{number}"] = said["verdicts"]["fix"]
    return said


def paged(*cells: Cell, **more: Any) -> Page:
    return page(cells, "a title", "made now", {}, **more)


def html(*cells: Cell, **more: Any) -> str:
    return render.one_file(paged(*cells, **more))


def whole(*cells: Cell, **more: Any) -> str:
    """The page with what it unpacks when a part is opened."""
    written = html(*cells, **more)
    packs = [unpacked(pack) for pack in re.findall(r'class="pack"[^>]*>([^<]+)</script>', written)]
    later = [unpacked(pack) for pack in re.findall(r'id="later">([^<]+)</script>', written)]
    drawn = [f'id="{data[0]}"' for cases in later for one in cases for data in one["cells"]]
    return "".join([written, *(body for pack in packs for body in pack.values()), *drawn])


def unpacked(pack: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(unescape(pack))))


def nights() -> list[NightlyRun]:
    """Two, in which a fix of the quiet case went on holding and another ceased to."""
    fires = ArmResult("quiet", "quiet/m1", "broken", ("model=m1", "strategy=fsdp"), "cpu", "now", first=True,
                      kinds={"fires": 3}, met=("quiet/fires",), text="boom")  # fmt: skip
    holds = replace(fires, arm="also", first=False, verdict="FIX_HOLDS", kinds={"clean": 3}, met=(), text="")
    ceased = replace(holds, arm="fix", verdict="FIX_BROKEN", kinds={"fires": 2, "clean": 1}, met=("quiet/fires",))
    return [
        NightlyRun(f"night {number}", float(number), None, 0, (fires, fix, holds))
        for number, fix in enumerate((replace(holds, arm="fix"), ceased))
    ]


# -- texts


@given(st.text(max_size=300))
def test_nothing_of_a_text_can_act_or_hide(text: str) -> None:
    shown = harmless(text)
    assert all(c == "\n" or c.isprintable() or c.isspace() for c in shown)
    assert not re.search("[\u200b-\u200f\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\ud800-\udfff]", shown)
    assert "\n" not in line(text) and len(line(text, 50)) <= 50


@given(st.integers(0, 40_000), st.integers(10, 3000))
def test_a_long_text_is_cut_and_says_so(size: int, limit: int) -> None:
    shown = harmless("ab" * size, limit)
    assert len(shown) <= limit + 60
    assert ("left out" in shown) == (2 * size > limit)


def test_ten_megabytes_cost_nothing_and_begin_and_end_as_they_did() -> None:
    shown = harmless("first " + "x" * 10_000_000 + " last")
    assert shown.startswith("first ") and shown.endswith(" last") and len(shown) < 2100


@given(st.text(min_size=1, max_size=80))
def test_the_page_escapes_every_text(text: str) -> None:
    bomb = f"<img src=x onerror=alert(1)>{text}</script><script>"
    shown = cell(made("FIX_BROKEN", "unexpected", error=bomb, model=bomb, title=bomb, references=[bomb]))
    assert "<img" not in whole(shown)
    written = html(shown)
    assert written.count("<script") == written.count("</script>") == 3  # two of ours, a pack
    for name, text_ in render.site(paged(shown)).items():
        assert "<img" not in text_, name


def test_filters_answer_when_the_cells_are_there_and_wait_for_nothing_behind_them() -> None:
    """Of 10,000 cells what is claimed and where the time went are five times what the cells are."""
    claim = ClaimRow("some-case", "c1", "it helps", "QwenLM/Qwen#920", "refuted", "why", ())
    written = html(cell(made()), ledger=[claim])
    filters, cells, claims = (written.index(text) for text in ('id="filters"', '<details class="cell"', 'id="claims"'))
    assert filters < cells < written.index('Event("cells-are-there")') < claims


def test_a_hostile_document_is_shown_and_every_format_can_be_read() -> None:
    bad = made("FIX_BROKEN", "unexpected", error=HOSTILE * 200, title=HOSTILE, model=HOSTILE, flags={HOSTILE: HOSTILE})
    bad["verdicts"]["fix"]["reason"] = HOSTILE
    shown = cell(bad)
    assert html(shown).isascii(), "a browser reads it at half the cost"
    written = unescape(html(shown))
    assert "⟨U+202E⟩" in written and "\u202e" not in written and "\x1b" not in written and "\x00" not in written
    JUnitXml.fromstring(formats.as_junit([shown]).encode())
    assert len(list(csv.reader(io.StringIO(tables.as_csv([shown]))))) == 3
    told = formats.as_markdown([shown])
    assert "\u202e" not in told and not re.search(r"(?<!\\)<", re.sub(r"`{3,}.*?`{3,}|`[^`]*`", "", told, flags=re.S))
    json.loads(formats.as_json([shown], [], [], "now"))


# -- what it says


def test_what_differs_stands_first_with_error_and_command() -> None:
    quiet, loud = cell(made(case="a-quiet")), cell(made("FIX_BROKEN", "unexpected", case="loud"))
    shown = paged(quiet, loud)
    assert [one.cell.case for one in shown.unexpected] == ["loud"] and [v.slug for v in shown.cases] == [
        "loud",
        "a-quiet",
    ]
    written = html(quiet, loud)
    first = written[written.index('id="worry"') : written.index('id="matrix"')]
    assert "m/fsdp, arm" in first and "1 differs" in written, "in words as people write them"
    assert "RuntimeError: boom" in first and "repro run loud model=m strategy=fsdp arms=fix" in first
    assert "expected" in first and "fix holds" in first and "fix broken" in first
    assert "Nothing differs" in html(quiet)


def test_every_verdict_has_a_symbol_a_word_and_no_two_look_alike() -> None:
    names = [*VerdictName.__args__, "fires", "clean", "other_error", "hang", "infra", "skipped"]  # type: ignore[attr-defined]
    assert all(name in MARKS for name in names)
    assert len({(MARKS[name].symbol, MARKS[name].word) for name in names}) == len(names)
    assert of_kinds(["fires", "clean"], "fires 2/3, clean 1/3").symbol == "≈"
    assert mark("SOMETHING_LATER").word == "SOMETHING_LATER"


def test_what_a_fix_changes_is_a_diff_of_settings() -> None:
    shown = cell(made())
    assert shown.arms[0].changes == () and shown.arms[1].changes == (Change("flags.call", "inner", "root"),)
    one = {"strategy": {"slug": "fsdp", "options": {"wrap": "size"}}, "model": {"slug": "a", "config": {"x": 1}}}
    other = {"strategy": {"slug": "ddp", "options": {}}, "model": {"slug": "b", "config": {"x": 2}}, "world_size": 1}
    assert changes(one, other) == [
        ("strategy", "fsdp", "ddp"), ("options.wrap", "size", None), ("model", "a", "b"), ("world_size", None, "1"),
    ]  # fmt: skip


def test_ranks_that_say_the_same_are_one_entry() -> None:
    said = cell(made()).arms[0].said
    assert [one.ranks for one in said] == ["0-1"] and said[0].type == "RuntimeError"
    assert numbered([7, 0, 1, 2]) == "0-2, 7"


def test_a_hang_is_a_tree_of_its_ranks() -> None:
    stack = (
        '# py-spy\nThread 1 (idle): "MainThread"\n    {} (/s/site-packages/torch/x.py:1)\n    body (/s/repros/a.py:3)\n'
    )
    nodes = hangs.tree({0: stack.format("all_reduce"), 1: stack.format("all_reduce"), 2: stack.format("barrier")})
    assert [(node.ranks, node.frames) for node in nodes] == [([0, 1, 2], ["body (/s/repros/a.py:3)"])]
    assert [(part.ranks, part.frames) for part in nodes[0].parts] == [
        ([0, 1], ["all_reduce (torch/x.py:1)"]), ([2], ["barrier (torch/x.py:1)"]),
    ]  # fmt: skip
    hung = observation(
        ended(0, "deadline", stack=stack.format("barrier")),
        timed_out=True,
        hang={"starting": False, "never_meet": None, "limit_s": 20},
    )
    arm = cell(document({"broken": [("hang", hung)]}, {})).arms[0]
    assert arm.why_hang == "still at work after 20 s" and arm.hang[0].ranks == [0]


def test_proofs_have_their_numbers_and_those_that_failed_stand_first() -> None:
    seen = observation(ok(0), ok(1))
    for rank in seen["ranks"]:
        rank["record"]["checks"] = [
            {"name": "loss", "passed": True, "got": 1.0, "want": 1.0, "tolerance": 0.1},
            {"name": "gradient", "passed": False, "got": 0.5, "want": 0.0, "tolerance": 1e-7},
        ]
    proofs = cell(document({"broken": [("clean", seen)]}, {})).arms[0].proofs
    assert [(p.name, p.state, p.got, p.want, p.tolerance, p.ranks) for p in proofs] == [
        ("gradient", "failed", "0.5", "0", "1e-07", "0-1"), ("loss", "passed", "1", "1", "0.1", "0-1"),
    ]  # fmt: skip


def at(version: str, verdict: str, torch: str = "2.6.0") -> Cell:
    stack = {"name": f"s{version}-{torch}", "versions": {"torch": torch, "transformers": version}}
    return cell(made(verdict, stack=stack))


def test_the_release_that_flipped_leads_to_both_measurements() -> None:
    cells = [
        at("4.10.0", "FIX_HOLDS"),
        at("4.9.0", "FIX_HOLDS"),
        at("4.11.0", "FIX_BROKEN"),
        at("5.0", "FIX_BROKEN", "2.13.0"),
    ]
    one, every = axes(cells)
    assert one.package == "transformers" and one.columns == ("4.9.0", "4.10.0", "4.11.0")
    ((flip, arms),) = one.flips
    assert (flip.before, flip.after, arms) == ("4.10.0", "4.11.0", ["fix"]) and flip.cells == (cells[0].id, cells[2].id)
    assert one.steady == 1 and every.package == "" and len(every.columns) == 4
    written = whole(*cells)
    assert all(f'href="#{shown.id}"' in written and f'id="{shown.id}"' in written for shown in cells[:3])
    assert axes(cells[:1]) == []


def test_two_results_side_by_side() -> None:
    before, after = cell(made(), source="a"), cell(made("FIX_BROKEN"), source="b")
    alone = cell(made(model="n"), source="b")
    shown = paged(before, after, alone, sources=["a", "b"])
    assert shown.same == 1 and [d.arm for d in shown.differences] == ["fix", "broken", "fix"]
    assert shown.differences[0].marks == ((MARKS["FIX_HOLDS"], before.id), (MARKS["FIX_BROKEN"], after.id))
    written = html(before, after, alone, sources=["a", "b"])
    assert "not there" in written and "1 arms say the same in all; 1 do not; 2 more are not in all of them." in written
    assert "1 arms say the same in all; 1 do not." in html(before, after, sources=["a", "b"])
    assert named([Path("/x/a/r"), Path("/y/b/r"), Path("/z/c")]) == ["a/r", "b/r", "c"]


def test_a_case_s_own_page_has_a_strip_of_each_arm_over_the_nights() -> None:
    quiet, other = cell(made(case="quiet")), cell(made(case="other"))
    pages = render.site(paged(quiet, other, nights=nights()))
    part = pages["quiet.html"].partition('<h2 id="nights">')[2].partition("</section>")[0]
    rows = re.findall(r'<th scope="row">(\w+) .*?</tr>', part)
    assert sorted(rows) == ["also", "broken", "fix"], "the arms that never changed too"
    assert part.count("night 0") == part.count("night 1") == 1 and "1 of 6" in part
    assert 'id="nights"' not in pages["other.html"] and 'id="nights"' in pages["index.html"]
    assert 'id="nights"' not in render.site(paged(quiet))["quiet.html"]


def test_claims_are_listed_by_what_they_were_read_in() -> None:
    row = ClaimRow("some-case", "c1", "it <helps>", "QwenLM/Qwen#920", "refuted", "2 measurements", ())
    written = whole(cell(made()), ledger=[row])
    assert 'href="https://github.com/QwenLM/Qwen/issues/920"' in written and "it &lt;helps&gt;" in written
    assert link("accelerate source").address == "" and link("javascript:alert(1)#1").address == ""


def test_nothing_measured_is_a_page_too() -> None:
    assert "holds no cell" in html().replace("hold no cell", "holds no cell")
    assert tables.as_csv([]).startswith("results,") and "Nothing was measured: " in formats.as_markdown([])
    lacking = cell(document({"broken": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"}))
    assert "needs 2 GPUs" in html(lacking) and lacking.arms[0].mark.name == "skipped"


def test_the_page_asks_nobody_and_runs_its_own_script_only() -> None:
    written = html(cell(made()))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', unescape(written))
    assert policy and policy[1].startswith("default-src 'none'; ") and "unsafe" not in policy[1]
    assert not re.search(r'\b(src|srcset|action)=|<link|@import|url\(|style="', written)


# -- sizes


def many(count: int) -> list[Cell]:
    told = [
        made("FIX_BROKEN" if n % 9 == 0 else "FIX_HOLDS", case=f"case-{n % 40}", model=f"model-{n // 40}",
             error=f"size mismatch, got input ({n}), mat (32x1024), vec ({n * 7919})")
        for n in range(count)
    ]  # fmt: skip
    return [cell(one) for one in told]


def test_a_page_of_a_thousand_cells_is_under_three_megabytes() -> None:
    assert len(html(*many(1000)).encode()) < 3_000_000


@limits(max_examples=12)  # thousands of cells each
@given(st.integers(0, 60), st.text(max_size=60))
def test_markdown_stays_under_its_limit(count: int, text: str) -> None:
    cells = [
        cell(made("FIX_BROKEN", "unexpected", error=text * 99, case=f"c{n}", model=text or "m")) for n in range(count)
    ]
    assert len(formats.as_markdown(cells * 40).encode()) <= formats.MOST


def test_a_heading_of_markdown_stands_apart() -> None:
    muted = made("FIX_BROKEN", "muted")
    muted["verdicts"]["fix"] |= {"muted": {"owner": "ada", "until": "2027-01-01", "reason": "known"}}
    told = formats.as_markdown([cell(muted), cell(made("FIX_BROKEN", "unexpected")), cell(made(expected="unset"))])
    headings = re.findall(r"(?m)(?:\A|\n\n)(?=#+ )", told)
    assert len(headings) == len(re.findall(r"(?m)^#+ ", told)) == 5 and "\n\n\n\n" not in told


def test_markdown_says_what_it_leaves_out_and_keeps_what_follows() -> None:
    cells = [cell(made("FIX_BROKEN", "unexpected", case=f"c{n}")) for n in range(900)]
    told = formats.as_markdown(cells)
    assert "900 arms differ" in told and re.search(r"… and \d+ more such arms", told) and "### Cases" in told


# -- other programs


def test_junit_says_a_tolerance_only_where_there_is_one() -> None:
    seen = observation(ok(0))
    check = {"name": "loss", "passed": True, "got": 1.0, "want": 1.0}
    seen["ranks"][0]["record"]["checks"] = [{**check, "tolerance": 0.1}, {**check, "name": "steps", "tolerance": None}]
    told = formats.as_junit([cell(document({"broken": [("clean", seen)]}, {}))])
    assert "loss: passed, got 1, want 1, tolerance 0.1\n" in told and "steps: passed, got 1, want 1\n" in told


def test_junit_has_a_failure_an_error_and_a_skip_and_numbers_for_what_passed() -> None:
    lost = made("INCONCLUSIVE")
    lost["arms"]["fix"]["attempts"][0]["outcome"] |= {"outcome": "infra", "reason": "infra: no port"}
    lost["verdicts"]["fix"] |= {"reason": "infra: no port"}
    skipped = document({"broken": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"}, case="b")
    xml = JUnitXml.fromstring(
        formats.as_junit(
            [cell(one) for one in (made(), made("FIX_BROKEN", "unexpected", model="n"), lost, skipped)]
        ).encode()
    )
    found = [test for suite in xml for test in suite]
    kinds = [type(test.result[0]).__name__ if test.result else "passed" for test in found]
    assert kinds == ["passed", "passed", "passed", "Failure", "passed", "Error", "Skipped", "Skipped"]
    assert (xml.failures, xml.errors, xml.skipped, xml.tests) == (1, 1, 2, 8)
    assert "expected FIX_HOLDS, measured FIX_BROKEN" in str(found[3].result[0].message)
    assert "verdict: FIX_HOLDS" in str(found[1].system_out) and "document:" in str(found[1].system_out)
    assert {Failure, Error, Skipped}


def test_what_is_counted_is_told_as_one_or_as_several() -> None:
    assert [MARKS["FIX_HOLDS"].counted(n) for n in (1, 2)] == ["1 fix holds", "2 fixes hold"]
    assert of_kinds(["fires", "clean"], "fires 2/3, clean 1/3").counted(2) == "2 fires 2/3, clean 1/3"
    shown = cell(armed())
    assert "✔ 6 fixes hold, ● 1 fires" in formats.as_markdown([shown])
    told = " ".join(unescape(re.sub("<[^>]*>", "", html(shown))).split())
    assert "✔ 6 fixes hold" in told and "6 fix holds" not in told


def test_a_claim_in_json_says_no_more_and_nothing_else_than_on_the_page() -> None:
    row = ClaimRow("some-case", "c1", "it helps", "", "refuted", f"{HOSTILE} {'x' * 9_000}", ())
    (claim,) = json.loads(formats.as_json([], [row], [], "now"))["claims"]
    assert len(claim["detail"]) <= 1000 and claim["detail"].isprintable() and "⟨U+202E⟩" in claim["detail"]


def test_json_is_as_its_schema_says() -> None:
    schema = json.loads((RESULTS / "schema" / "report-v1.schema.json").read_text(encoding="utf-8"))
    row = ClaimRow("some-case", "c1", "it helps", "", "upheld", "2 measurements", ())
    skipped = document({"broken": "needs 2 GPUs"}, {})
    raised = made()
    primary = {"rank": 1, "type": "RuntimeError", "message": "boom", "where": "", "kind": "exception"}
    raised["arms"]["broken"]["attempts"][0]["outcome"]["primary"] = primary
    value = json.loads(formats.as_json([cell(raised), cell(skipped)], [row], ["results/scratch"], "now"))
    jsonschema.validate(value, schema)
    at = {(item["arm"], item["attempts"]): item["error_at"] for item in value["rows"]}
    assert at == {("broken", 1): f"{NORM['file']}:{NORM['line']}", ("fix", 1): None, ("broken", 0): None}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**value, "rows": [{**value["rows"][0], "verdict": "GREEN"}]}, schema)


def test_csv_has_a_column_for_each_package_and_computes_nothing() -> None:
    (row,) = [r for r in csv.DictReader(io.StringIO(tables.as_csv([cell(made(model="=1+1"))]))) if r["arm"] == "fix"]
    assert (row["torch"], row["verdict"], row["model"]) == ("2.13.0", "FIX_HOLDS", "'=1+1")


def test_a_table_has_the_same_columns_whatever_was_measured_and_a_spreadsheet_computes_none_of_it() -> None:
    """As a reader of data frames takes it: one header, all rows of its length, numbers as numbers."""
    told = {
        "model": "=1+1", "strategy": "@SUM(A1)", "stack": {"name": "＝1＋1", "versions": {"torch": "2.13.0"}},
        "variant": ['ä b,"c"'],
    }  # fmt: skip
    nothing, one = (list(csv.reader(io.StringIO(tables.as_csv(cells)))) for cells in ([], [cell(made(**told))]))
    assert nothing[0] == one[0] == tables.NAMES and {len(row) for row in one} == {len(tables.NAMES)}
    assert not [value for row in one for value in row if value[:1] in tuple("=+-@\t\r＝＋－＠")]
    row = dict(zip(*one[:2]))
    assert row["also"] == 'ä b,"c"' and float(row["wall_s"]) == 21.0 and row["peft"] == ""
    assert list(next(tables.flat([cell(made())]))) == tables.NAMES
    assert list(next(tables.arm_rows([cell(made())]))) == list(tables.COLUMNS)


def test_parquet_is_read_back_with_its_types() -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="of the extra `parquet`")
    skipped = document({"broken": "needs 2 GPUs"}, {}, case="b")
    written = tables.as_parquet([cell(made(model="=1+1")), cell(skipped)])
    back = parquet.read_table(io.BytesIO(written))
    assert back.column_names == tables.NAMES and back.num_rows == 3
    assert back.to_pylist() == list(tables.flat([cell(made(model="=1+1")), cell(skipped)]))
    assert str(back.schema.field("wall_s").type) == "double" and str(back.schema.field("simulated").type) == "bool"
    assert parquet.read_table(io.BytesIO(tables.as_parquet([]))).column_names == tables.NAMES


def test_parquet_without_pyarrow_says_how_to_get_it_before_anything_is_read(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["report", str(stored), "--format", "parquet", "--output", str(tmp_path / "x.parquet")]) == 2
    told = capsys.readouterr().err
    assert "--format parquet needs pyarrow" in told and "pip install pyarrow; or --format csv" in told
    assert "note:" not in told and not (tmp_path / "x.parquet").exists()


# -- the verb


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    known = catalogue.load().cases["train-step"]
    seen = document({"control": [("infra", observation(infra={"kind": "port", "message": HOSTILE}))]}, {},
                    case=known.slug, kind="control", title=known.title)  # fmt: skip
    folder = tmp_path / "r ü" / "cpu" / "torch2.13.0-tf5.23.0-abc123" / known.slug
    folder.mkdir(parents=True)
    seen["stack"]["label"] = "torch2.13.0-tf5.23.0-abc123"
    seen["key"] = "train-step/m-fsdp"
    seen["provenance"]["fingerprint"] = "f"
    write_json(folder / "m-fsdp.json", json.loads(json.dumps(seen, ensure_ascii=True).replace("\\ud800", "")))
    return tmp_path / "r ü"


def test_the_verb_writes_a_page_a_site_and_formats(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(stored)]) == 0
    assert (stored / "report.html").is_file() and capsys.readouterr().out.strip() == str(stored / "report.html")
    assert main(["report", str(stored), "--site", str(stored.parent / "site")]) == 0
    assert sorted(p.name for p in (stored.parent / "site").iterdir()) == ["index.html", "train-step.html"]
    capsys.readouterr()
    for name in ("junit", "markdown", "json", "csv"):
        assert main(["report", str(stored), "--format", name, "case=train-*"]) == 0
        assert "train" in capsys.readouterr().out, name


def test_a_document_that_was_edited_is_named_in_every_format(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the page said so; and where it was all that there is, that nothing was there."""
    (path,) = stored.rglob("m-fsdp.json")
    honest = json.loads(path.read_text())
    verdict = regrade([{**honest, "path": str(path)}], catalogue.load().cases).documents[0]["verdicts"]["control"]
    write_json(path, {**honest, "verdicts": {"control": {**verdict, "name": "HEALTHY", "measured": True}}})
    for name in ("junit", "markdown", "json", "csv"):
        assert main(["report", str(stored), "--format", name]) == 0
        said = capsys.readouterr()
        assert "arm control: it says HEALTHY, its outcomes INCONCLUSIVE" in said.err, name
        if name in ("junit", "json"):  # what a machine keeps
            assert "arm control: it says HEALTHY, its outcomes INCONCLUSIVE" in said.out, name
    (stored / "torn.jsonl.zst").write_text("<<<<<<< HEAD\n")
    assert main(["report", str(stored), "--format", "junit"]) == 3
    assert '<error message="' in (said := capsys.readouterr().out) and "torn.jsonl.zst: damaged" in said
    (stored / "torn.jsonl.zst").unlink()
    write_json(path, {**honest, "arms": {"control": {**honest["arms"]["control"], "fingerprint": "edited"}}})
    assert main(["report", str(stored), "--format", "csv"]) == 0, "its attempts were made under none"
    assert "edited" not in capsys.readouterr().err
    write_json(path, {**honest, "stack": {**honest["stack"], "versions": {"torch": "2.12.0"}}})
    for words in ([], ["--format", "csv"]):
        assert main(["report", str(stored), *words]) == 2
        assert "nothing in it can be shown: " in (said := capsys.readouterr().err) and "says torch 2.13.0" in said


def test_bad_input_is_named(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for words, told in (
        ([str(tmp_path / "nowhere")], "nowhere: no such folder"),
        ([str(stored), "modle=x"], "did you mean 'model'"),
        (
            [str(stored), "model=other", "--format", "json"],
            "model=other chooses none of the cells that are stored there",
        ),
        ([str(stored), "case=train-stp"], "did you mean 'train-step'"),
        ([str(stored), "--site", str(tmp_path / "site"), "--format", "csv"], "--site writes pages of its own"),
        ([str(tmp_path / "empty")], "no results in it"),
        ([str(stored), "--output", str(tmp_path)], "is a folder"),
        ([str(stored), "--format", "json", "--output", str(stored / "x.json")], "would be taken for a cell's document"),
        ([str(stored), "--output", str(stored / "report.html" / "y.html")], "there is no such folder"),
        ([str(stored), "--output", "/proc/report.html"], "cannot be written"),  # read-only, for root too
    ):
        (stored / "report.html").write_text("a file, no folder")
        assert main(["report", *words]) == 2
        assert told in capsys.readouterr().err


def test_nights_in_which_there_are_none_are_said(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(stored), "--history", str(tmp_path / "empty")]) == 0
    assert "empty: contains no results" in capsys.readouterr().err


def test_a_folder_may_be_called_anything(stored: Path, tmp_path: Path) -> None:
    odd = tmp_path / "Nächte & <b>夜 no. 1"
    stored.rename(odd)
    assert main(["report", str(odd)]) == 0
    written = (odd / "report.html").read_text(encoding="utf-8")
    assert "N&#228;chte &amp; &lt;b&gt;&#22812;" in written and "<b>&#22812;" not in written
    for name in ("junit", "markdown", "json", "csv"):
        assert main(["report", str(odd), "--format", name]) == 0


def test_what_is_damaged_or_foreign_is_named_on_the_page(stored: Path) -> None:
    (stored / "cpu" / "broken.json").write_text("{not json")
    other = document({"broken": [("fires", BOOM)]}, {}, case="of-another-project")
    write_json(stored / "cpu" / "other.json", other)
    assert main(["report", str(stored)]) == 3
    written = (stored / "report.html").read_text(encoding="utf-8")
    assert "damaged" in written and "of-another-project" in written


def test_every_format_says_what_cannot_be_read_and_none_of_it_is_green(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(form: str) -> tuple[int, str]:
        code = main(["report", str(stored), "--format", form])
        return code, capsys.readouterr().out

    whole = {form: told(form) for form in ("markdown", "json", "junit", "csv")}
    assert {code for code, _ in whole.values()} == {0} and "cannot be read" not in whole["markdown"][1]
    (stored / "cpu" / "broken.json").write_text("{not json")
    later = {**document({"broken": [("fires", BOOM)]}, {}), "schema": 99}
    write_json(stored / "cpu" / "later.json", later)
    found = {form: told(form) for form in whole}
    assert {code for code, _ in found.values()} == {3}
    head = found["markdown"][1].split("differ")[0]
    assert "**Of 2 documents nothing can be said: cannot be read.**" in head
    assert "broken.json" in head and "later.json" in head and "Nothing differs" not in found["markdown"][1]
    value = json.loads(found["json"][1])
    jsonschema.validate(value, json.loads((RESULTS / "schema" / "report-v1.schema.json").read_text(encoding="utf-8")))
    assert ["broken.json" in text for text in value["unread"]] == [True, False] and len(value["notes"]) == 2
    assert json.loads(whole["json"][1])["unread"] == []
    errors = re.findall(r'<error message="([^"]*)" type="damaged"', found["junit"][1])
    assert [name in text for name, text in zip(("broken.json", "later.json"), errors)] == [True, True]
    assert found["csv"][1] == whole["csv"][1], "a table has no place for it"
    assert main(["report", str(stored), "--site", str(stored.parent / "site")]) == 3
    assert "exit code 3: 2 documents could not be read" in capsys.readouterr().err


def test_the_catalogue_s_words_stand_beside_the_arms() -> None:
    known = case(arms={"broken": {"help": "as reported"}, "fix": {"flags": {"call": "root"}, "help": "call the root"}})
    assert [arm.help for arm in cell(made(), known).arms] == ["as reported", "call the root"]


def test_a_run_whose_page_cannot_be_written_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from repro_matrix.cli.matrix import _page
    from repro_matrix.report import html as rendering

    control = document({"control": [("clean", observation(ok(0), ok(1)))]}, {"control": "HEALTHY"}, case="train-step")
    assert _page([control], tmp_path) == tmp_path / "report.html"
    assert "train-step" in (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "a file").write_text("")
    assert _page([control], tmp_path / "a file") is None
    monkeypatch.setattr(rendering, "one_file", lambda page: {}["a mistake of ours"])
    assert _page([control], tmp_path) is None
    assert capsys.readouterr().err.count("note: no page of this run") == 2


def test_the_ledger_misses_nothing_of_what_is_dropped_while_reading() -> None:
    """On published documents: those of a claim by numbers among them."""
    from repro_matrix.grading.regrade import regrade
    from repro_matrix.paths import BASELINE
    from repro_matrix.report.parts import slim
    from repro_matrix.report.read import ledger
    from repro_matrix.results.store import Store

    known = catalogue.load()
    names = {"fsdp-generate", "device-map-distributed", "qwen15-fsdp-norm-shard", "old-checkpointing-hook"}
    documents = regrade(Store(BASELINE).documents(cases=names), known.cases).documents
    whole, short = (ledger(known, found, names) for found in (documents, [slim(one) for one in documents]))
    assert whole == short and {"upheld", "refuted", "conditional"} <= {row.status for row in whole}
    assert len(json.dumps([slim(one) for one in documents])) < 0.5 * len(json.dumps(documents))


@pytest.mark.parametrize("state", ["unfinished", "ended"])
def test_a_run_that_was_killed_says_so_in_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    """Killed before its first document it said "Nothing differs from what is expected", and had an empty JUnit file."""
    folder = tmp_path / "20261122-120000"
    folder.mkdir()
    said = {"schema": 1, "texts": ["case=train-step"], "state": state}
    (folder / runs.MANIFEST).write_text(json.dumps(said), encoding="utf-8")
    told = "did not get to its end"
    for name in ("markdown", "junit", "json"):
        assert main(["report", str(folder), "--format", name]) == 0
        assert (told in capsys.readouterr().out) == (state == "unfinished"), name
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert (told in (tmp_path / "page.html").read_text()) == (state == "unfinished")
