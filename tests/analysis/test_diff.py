"""What differs between two sets of measurements: nothing against itself, the opposite when read backwards."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import document, exception, failed, observation, ok
from repro_matrix.analysis import inputs as sides
from repro_matrix.analysis import noise
from repro_matrix.analysis import show_diff as show
from repro_matrix.analysis.brief import ArmBrief, Brief, brief, from_json, to_json
from repro_matrix.analysis.diff import KINDS, Diff, compare
from repro_matrix.analysis.inputs import read, side
from repro_matrix.cli import main as cli
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.paths import BASELINE
from repro_matrix.text import WIDTH

METS = ["c/norm", "other/boom", "ValueError in torch.f", "check logits", "hang"]


@st.composite
def arms(draw: Any) -> ArmBrief:
    kinds = draw(
        st.dictionaries(st.sampled_from(["fires", "clean", "other_error", "hang"]), st.integers(1, 3), max_size=2)
    )
    n = sum(kinds.values())
    seconds = st.lists(st.sampled_from([0.5, 0.51, 1.0, 4.0]), min_size=n, max_size=n)
    return ArmBrief(
        draw(st.sampled_from([None, "FIX_HOLDS", "FIX_BROKEN", "NOT_FIRING", "FLAKY"])), kinds,
        tuple(sorted(draw(st.sets(st.sampled_from(METS), max_size=2)))) if n else (),
        draw(st.sampled_from(["", "one text", "another"])), tuple(draw(seconds)), tuple(draw(seconds)),
        draw(st.sampled_from([(), ("a", "b", "c", "d"), ("a", "b", "c", "e")])),
    )  # fmt: skip


CELLS = st.builds(
    lambda case, model, hardware, stack, started, control, made: Brief(
        case, f"{case}/{model}", (f"model={model}",), hardware, stack, {}, started, None, control, made
    ),
    st.sampled_from("cd"), st.sampled_from("mn"), st.sampled_from(["cpu", "gpu1"]), st.sampled_from(["now", "old"]),
    st.sampled_from([1.0, 2.0]), st.booleans(), st.dictionaries(st.sampled_from(["broken", "fix"]), arms(), max_size=2),
)  # fmt: skip
SIDES = st.lists(CELLS, max_size=5, unique_by=lambda b: (b.key, b.hardware, b.stack))
PARTS: dict[str, Any] = {"a": {"slug": "m"}, "b": {}, "c": {}, "d": {"steps": 1}, "e": {"steps": 2}}


def between(one: list[Brief], other: list[Brief]) -> Diff:
    return compare(one, other, PARTS, need_common=False)


@given(SIDES)
def test_nothing_differs_from_itself(briefs: list[Brief]) -> None:
    found = between(briefs, briefs)
    assert found.changes == () and found.exit_code == 0 and found.slower == 1 and not found.unlike


@given(SIDES, SIDES)
def test_read_backwards_it_says_the_opposite(one: list[Brief], other: list[Brief]) -> None:
    there, back = between(one, other), between(other, one)

    def said(found: Diff, turned: bool) -> list[Any]:
        changes = [change.backwards() if turned else change for change in found.changes]
        return sorted((c.kind, c.case, c.arm, repr(c.before), repr(c.after), round(c.factor or 0, 9)) for c in changes)

    assert said(there, True) == said(back, False)
    assert (there.cells, there.arms, there.unknown_noise) == (back.cells, back.arms, back.unknown_noise)
    assert math.isclose(there.slower * back.slower, 1) and there.unlike.keys() == back.unlike.keys()


@given(SIDES, SIDES, st.sampled_from([40, 80, WIDTH]))
def test_every_cell_is_said_once_and_every_arm_has_one_answer(one: list[Brief], other: list[Brief], width: int) -> None:
    found = between(one, other)
    cells = len(found.of("vanished")) + len(found.of("appeared")) + 2 * found.cells
    assert cells == len(one) + len(other)
    answered = [(c.where, c.hardware, c.stack, c.arm) for c in found.changes if c.arm and c.factor is None]
    assert len(answered) == len(set(answered))
    for line in show.lines(found, every=True, width=width):
        assert len(line) <= width and line.isprintable()
    json.dumps(show.as_json(found), allow_nan=False)


def arm(name: str = "clean", n: int = 3, *met: str, **changes: Any) -> ArmBrief:
    made = ArmBrief(None, {name: n}, met, "said" if met else "", (1.0,) * n, (300.0,) * n, ())
    return made._replace(**changes)


def cell(started: float = 1.0, **made: ArmBrief) -> Brief:
    return Brief("c", "c/m", ("model=m",), "cpu", "now", {}, started, None, "control" in made, made)


FIRES = arm("fires", 3, "c/norm")
HOLDS = arm("clean", 3, verdict="FIX_HOLDS")
BOOM = arm("other_error", 3, "RuntimeError in torch.f")


@pytest.mark.parametrize(
    ("was", "now", "kinds"),
    [
        ({"broken": FIRES, "fix": HOLDS}, {"broken": arm(), "fix": HOLDS}, {"broken": "stopped firing"}),
        ({"broken": FIRES, "fix": HOLDS}, {"broken": FIRES, "fix": FIRES}, {"fix": "fix ceased"}),
        ({"broken": FIRES, "fix": BOOM}, {"broken": FIRES, "fix": HOLDS}, {"fix": "fix began"}),
        ({"broken": FIRES}, {"broken": BOOM}, {"broken": "stopped firing"}),
        ({"control": arm()}, {"control": BOOM}, {"control": "new failure"}),
        ({"control": BOOM}, {"control": arm("other_error", 3, "check updates")}, {"control": "other failure"}),
        ({"control": BOOM}, {"control": BOOM._replace(text="otherwise")}, {"control": "changed text"}),
        ({"control": arm()}, {"control": arm(kinds={"clean": 2, "hang": 1}, met=("x",))}, {"control": "new failure"}),
        ({"control": BOOM}, {"control": BOOM._replace(kinds={"other_error": 2, "clean": 1})}, {"control": "flaky now"}),
        ({"control": arm()}, {"control": arm(kinds={}, skipped="needs 2 GPUs")}, {"control": "unmeasured"}),
        ({"broken": FIRES}, {"broken": FIRES, "new-fix": HOLDS}, {"new-fix": "measured"}),
        ({"broken": FIRES}, {"broken": FIRES, "new-fix": arm(kinds={}, skipped="needs")}, {}),
        ({"control": arm(wall_s=(1.0, 1.1, 1.2))}, {"control": arm(wall_s=(1.3, 1.0, 1.1))}, {}),
        ({"control": arm(peak_mb=(300.0, 301.0))}, {"control": arm(peak_mb=(9e2, 9e2))}, {"control": "more memory"}),
    ],
)  # fmt: skip
def test_what_an_arm_does_otherwise(was: dict[str, ArmBrief], now: dict[str, ArmBrief], kinds: dict[str, str]) -> None:
    found = between([cell(**was)], [cell(**now)])
    assert {change.arm: change.kind for change in found.changes} == kinds
    expected = (
        3 if "unmeasured" in kinds.values() else 1 if kinds.keys() - {"new-fix"} and not found.of("more memory") else 0
    )
    assert found.exit_code == expected


def test_a_busier_machine_is_said_once_and_one_arm_that_is_slower_beside_it() -> None:
    steady = {f"a{n}": arm(wall_s=(1.0, 1.02, 1.05)) for n in range(5)}
    later = {name: arm(wall_s=(3.0, 3.05, 3.1)) for name in steady} | {"a4": arm(wall_s=(9.0, 9.1, 9.3))}
    found = between([cell(**steady)], [cell(**later)])
    assert [(c.arm, c.kind) for c in found.changes] == [("a4", "slower")]
    assert 2.9 < found.slower < 3.1 and 2.9 < (found.changes[0].factor or 0) < 3.1 and found.exit_code == 0
    alone = between([cell(a=arm(wall_s=(1.0,)))], [cell(a=arm(wall_s=(9.0,)))])
    assert alone.changes == () and alone.unknown_noise == 1
    assert "with one attempt the noise is unknown" in "\n".join(show.lines(alone))


@given(st.lists(st.floats(0.01, 1e4), min_size=2, max_size=5), st.lists(st.floats(0.01, 1e4), min_size=2, max_size=5))
def test_overlapping_attempts_never_differ_and_noise_has_two_sides(one: list[float], other: list[float]) -> None:
    assert noise.beyond(one, other) == -noise.beyond(other, one)
    if min(one) <= max(other) and min(other) <= max(one):
        assert noise.beyond(one, other) == 0


def test_sides_of_one_stack_each_are_compared_across_it_and_of_several_by_name() -> None:
    here, there = cell(control=arm()), changed(cell(control=BOOM), stack="old")
    across = between([here], [there])
    assert across.across == {"stack": ("now", "old")} and [c.kind for c in across.changes] == ["new failure"]
    by_name = between([here, there], [here])
    assert not by_name.across and [c.kind for c in by_name.changes] == ["vanished"] and by_name.exit_code == 3


def test_other_settings_are_no_difference_but_said() -> None:
    found = between([cell(control=arm(settings=tuple("abcd")))], [cell(control=BOOM._replace(settings=tuple("abce")))])
    assert found.changes == () and "steps" in found.unlike["case=c model=m control"]


def test_json_names_both_documents_and_where_the_error_was_raised() -> None:
    before, after = changed(cell(control=arm()), path="one.json"), cell(control=BOOM._replace(error_at="f.py:7"))
    found = between([before], [changed(after, path="other.json", stack="old")])
    (said,) = show.as_json(found)["changes"]
    assert said["documents"] == ["one.json", "other.json"]
    assert (said["before"]["error_at"], said["after"]["error_at"]) == (None, "f.py:7")
    assert found.changes[0].backwards().documents == ("other.json", "one.json")
    more = changed(cell(control=arm()), key="c/n", axes=("model=n",), path="gone.json")
    (gone,) = show.as_json(between([before, more], [before]))["changes"]
    assert (gone["kind"], gone["documents"]) == ("vanished", ["gone.json", None])


def test_two_runs_without_a_common_cell_are_an_error_that_says_what_each_has() -> None:
    with pytest.raises(ConfigError, match=r"no cell in common: the first has 1 \(case c; .*the second has 1 \(case d"):
        compare([cell(a=arm())], [changed(cell(a=arm()), case="d", key="d/m")], {})


def write(root: Path, name: str, text: Any) -> Path:
    path = root / "cpu" / "s" / "some-case" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "results"


MADE = document({"broken": [("fires", observation(failed(0), failed(1)))] * 2}, {})
for attempt in MADE["arms"]["broken"]["attempts"]:
    seen = {"case": "some-case", "signature": "norm", "ranks": [0], "kind": "exception", "message": "size mismatch"}
    attempt["outcome"]["recognised"] = [seen]


def test_a_brief_is_the_same_when_it_comes_from_the_cache(results: Path) -> None:
    made = brief(MADE, {})
    assert from_json(json.loads(json.dumps(to_json(made)))) == made
    path = write(results, "m.json", MADE)
    first = read(results)
    assert read(results).briefs == first.briefs and len(first.briefs) == 1
    path.write_text(json.dumps({**MADE, "model": "other"}))
    assert read(results).briefs[0].where == "case=some-case model=other strategy=fsdp", "a changed file is read again"
    path.unlink()
    assert read(results).briefs == []


def test_damaged_and_foreign_files_are_named_and_left_where_they_are(results: Path) -> None:
    write(results, "good.json", MADE)
    wrong = {
        "damaged.json": '{"schema": 1, ',
        "foreign.json": {"hello": "world"},
        "list.json": [1],
        "newer.json": {**MADE, "schema": 7},
        "nested.json": "[" * 100_000,
        "hollow.json": {"schema": 1, "case": "x", "arms": {"a": 3}, "provenance": {"started": 1}},
    }
    for name, text in wrong.items():
        write(results, name, text)
    (results / "cpu" / "s" / "some-case" / "latin.json").write_bytes(b'{"a": "\xff"}')
    found = read(results)
    assert len(found.briefs) == 1
    said = "\n".join(found.notes)
    assert all(f"{name}: left out" in said for name in [*wrong, "latin.json"])
    assert "schema 7: a newer repro-matrix wrote it" in said and "'some-case' is not in this catalogue" in said
    assert (results / "cpu" / "s" / "some-case" / "damaged.json").exists()
    assert read(results).notes == found.notes, "they are named again from the cache"


def test_the_verb_reads_folders_and_names_and_ends_with_a_documented_code(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = results / "one", results / "other"
    write(one, "m.json", MADE)
    boom = observation(failed(0, exception("ValueError", "boom")), ok(1))
    write(other, "m.json", document({"broken": [("other_error", boom)] * 2}, {}))
    assert cli.main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out.endswith("exit code 0: the same answers\n")
    unread = results / "unread"
    write(unread, "m.json", MADE)
    write(unread, "n.json", '{"schema": 1, ')
    for pair in ([str(one), str(unread)], [str(unread), str(one)], [str(unread), str(unread)], [str(one), "--json"]):
        pair = [str(unread), *pair] if "--json" in pair else pair
        assert cli.main(["diff", *pair]) == 3, "what cannot be read may have said anything"
    assert cli.main(["diff", str(unread), str(one)]) == 3
    assert capsys.readouterr().out.endswith("exit code 3: the same answers, and 1 document that could not be read\n")
    assert cli.main(["diff", str(one), str(other)]) == 1
    assert "STOPPED FIRING: 1" in capsys.readouterr().out
    assert cli.main(["diff", str(one), str(other), "--json"]) == 1
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert change["kind"] == "stopped firing" and change["after"]["met"] == ["unfinished"]
    assert cli.main(["diff", str(one), str(other), "case=nothing"]) == 2
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:  # seconds, for a name that is mistyped
        patch.setattr(sides, "read", lambda root, name="", real=sides.read: real(root, name) if root == one else 1 / 0)
        assert cli.main(["diff", str(one), "torch2.2-tf4.3"]) == 2
    said = capsys.readouterr().err
    assert "'torch2.2-tf4.3' is neither a folder nor a stack of the baseline; did you mean 'torch2.2-tf4.3" in said
    (results / "empty").mkdir()
    with pytest.raises(ResultsError, match="no results in it"):
        side(str(results / "empty"))


def test_a_published_stack_against_another_names_what_the_releases_changed(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a baseline of these two alone: judging all stacks takes seconds."""
    if not BASELINE.is_dir():
        pytest.skip("no baseline")
    names = ("torch2.2-tf4.36", "torch2.2-tf4.39")
    (tmp_path / "published" / "cpu").mkdir(parents=True)
    for label, name in (sides._named([BASELINE]) or {}).items():
        if name in names:
            shutil.copy(BASELINE / "cpu" / f"{label}.jsonl", tmp_path / "published" / "cpu")
    monkeypatch.setattr("repro_matrix.config.project.published", lambda: [tmp_path / "published"])
    one, other = map(side, names)
    found = compare(one.briefs, other.briefs, {**one.parts, **other.parts})
    assert found.cells > 10 and found.across == {"stack": ("torch2.2-tf4.36", "torch2.2-tf4.39")}
    assert {change.kind for change in found.changes} <= KINDS.keys()


def test_a_run_is_compared_with_the_cells_that_it_measured(results: Path) -> None:
    from repro_matrix.cli.matrix import _against

    write(results, "m.json", MADE)
    write(results, "n.json", {**MADE, "model": "n", "key": "some-case/n-fsdp"})
    now = {**MADE, "key": side(str(results)).briefs[0].key}
    found = _against(side(str(results)), [now])
    assert (found.cells, found.changes) == (1, ()), "what was not selected has not vanished"
    gone = _against(side(str(results)), [{**now, "arms": {"broken": {**now["arms"]["broken"], "attempts": []}}}])
    assert [change.kind for change in gone.changes] == ["unmeasured"]


def test_two_runs_that_measured_nothing_have_no_answer_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one", "a.json", {**document({"broken": "needs 2 GPUs"}), "key": "some-case/a"})
    assert cli.main(["diff", str(tmp_path / "one"), str(tmp_path / "one")]) == 2
    assert "measured anything" in capsys.readouterr().err


def test_a_folder_beside_one_that_lies_in_it_is_said_to_be_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`repro diff results results/scratch` was quiet, and found the same answers."""
    write(tmp_path / "one", "m.json", MADE)
    write(tmp_path / "two", "m.json", MADE)
    assert cli.main(["diff", str(tmp_path), str(tmp_path / "one")]) == 0
    assert "note: all documents of" in capsys.readouterr().err
    assert cli.main(["diff", str(tmp_path / "one"), str(tmp_path)]) == 0
    assert "note: 1 of the 2 documents of" in capsys.readouterr().err
    assert cli.main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    said = capsys.readouterr()
    assert "with themselves" not in said.err and "1 cell in both" in said.out and "1 cells" not in said.out


def test_a_second_side_that_is_missing_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "results"]) == 2
    assert "the following arguments are required: B (" in capsys.readouterr().err


def test_an_arm_that_was_not_asked_for_is_not_called_one_that_the_case_lacks() -> None:
    """With arms=broken the others are not stored; the case has them as ever."""
    told = "\n".join(show.lines(between([cell(broken=FIRES)], [cell(broken=FIRES, fix=HOLDS)])))
    assert "before: nothing is stored of this arm" in told and "now:    FIX_HOLDS, clean 3/3" in told
