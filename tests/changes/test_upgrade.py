"""`repro upgrade`: GO, NO-GO or GO with fixes, from stored results; what was not compared, and
why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observations import document, exception, failed, observation, ok
from probing import BASE, CASE, World, world
from repro_matrix.changes import upgrade_answer as upgrade
from repro_matrix.changes.upgrade import End, Upgrade, compare_stacks
from repro_matrix.cli.main import main
from repro_matrix.config import catalog, project
from repro_matrix.config.expectations import Expectation
from repro_matrix.environment import stacks
from repro_matrix.results.projection import rows_of
from repro_matrix.results.rows import Row
from repro_matrix.runner.session import Request, make_request

__all__ = ["world"]

FAILING = {
    "passed": observation(ok(0), ok(1)),
    "reproduced": observation(failed(0), failed(1)),
    "other_failure": observation(failed(0, exception("ValueError", "boom")), ok(1)),
}
CELLS = [cell for cell in make_request([f"case={CASE}"]).cells if cell.strategy == "fsdp"][:1]
FIXES = ("small-min", "summon")
# A release of torch of which no expectation speaks.
OLD = {"python": "3.11.7", "torch": "2.99.0", "transformers": "4.39.3", "accelerate": "0.29.2"}
NEW = {**OLD, "transformers": "9.9.9", "accelerate": "9.9.9"}


def rows(versions: Mapping[str, str], outcomes: Mapping[str, str], **changes: Any) -> list[Row]:
    """One attempt of each variant of one cell; "flaky": two that disagree."""
    names = {
        name: ["passed", "other_failure"] if how == "flaky" else [how]
        for name, how in outcomes.items()
    }
    content = document(
        {name: [(how, FAILING[how]) for how in hows] for name, hows in names.items()},
        {},
        case=CASE,
        cell_id=CELLS[0].key,
        stack={"name": "x", "python": None, "versions": dict(versions)},
        **changes,
    )
    return rows_of(content, catalog.load().cases)  # type: ignore[arg-type]


def compared(
    stored: list[Row], variants: tuple[str, ...] = FIXES, old: Any = OLD, new: Any = NEW
) -> Upgrade:
    return compare_stacks(asked(variants), (End("a", old), End("b", new)), stored)


def asked(variants: tuple[str, ...] = FIXES) -> Request:
    return make_request(
        [
            f"case={CASE}",
            "strategy=fsdp",
            f"model={CELLS[0].model}",
            f"variants={','.join(variants)}",
        ]
    )


BROKEN = {"unfixed": "reproduced", "small-min": "passed", "summon": "passed"}
CLEAN = dict.fromkeys(BROKEN, "passed")


@pytest.mark.parametrize(
    ("old", "new", "verdict", "problems"),
    [
        (BROKEN, BROKEN, "GO", []),
        (BROKEN, CLEAN, "GO", []),
        (
            CLEAN,
            BROKEN,
            "GO with these fixes",
            [("new_failure", ("unfixed",), ("small-min", "summon"))],
        ),
        (CLEAN, dict.fromkeys(CLEAN, "reproduced"), "NO-GO", [("new_failure", ("unfixed",), ())]),
        (
            CLEAN,
            {**CLEAN, "unfixed": "other_failure"},
            "GO with these fixes",
            [("new_failure", ("unfixed",), ("small-min", "summon"))],
        ),
        (
            BROKEN,
            {**BROKEN, "summon": "other_failure"},
            "GO with these fixes",
            [("fix_stopped_working", ("summon",), ("small-min",))],
        ),
        (
            BROKEN,
            {**BROKEN, "summon": "reproduced", "small-min": "reproduced"},
            "NO-GO",
            [("fix_stopped_working", ("small-min", "summon"), ())],
        ),
        (
            BROKEN,
            {**CLEAN, "summon": "other_failure"},
            "GO with these fixes",
            [("fix_stopped_working", ("summon",), ("unfixed", "small-min"))],
        ),
        (
            {**BROKEN, "no-cache": "passed"},
            {**BROKEN, "no-cache": "reproduced"},
            "GO",
            [],
        ),  # its role is not fix
        (BROKEN, {**BROKEN, "unfixed": "other_failure"}, "GO", []),
    ],
)
def test_verdict_follows_from_what_gets_worse(
    old: dict[str, str], new: dict[str, str], verdict: str, problems: list[Any]
) -> None:
    result = compared([*rows(OLD, old), *rows(NEW, new)], tuple(old)[1:])
    assert [(each.kind, each.variants, each.fixes) for each in result.problems] == problems
    assert (result.verdict, result.compared, result.unknown) == (verdict, len(old), [])
    assert result.exit_code == {"GO": 0}.get(verdict, 1) and upgrade.verdict_sentence(
        result
    ).startswith(verdict)
    assert bool(result.gone) == (
        old["unfixed"] == "reproduced" and new["unfixed"] == "passed" and not problems
    )
    json.dumps(upgrade.upgrade_to_json(result))


def test_other_packages_and_builds_are_the_same_stack_and_text_is_no_difference() -> None:
    stored = [
        *rows({**OLD, "torch": "2.99.0+cpu", "accelerate": "1.0"}, BROKEN),
        *rows(NEW, BROKEN),
    ]
    assert compared(stored).compared == 3
    assert compared(stored, old={**OLD, "transformers": "4.40.0"}).compared == 0
    other = [*rows(OLD, BROKEN), *rows(NEW, BROKEN)]
    other[-3:] = [row for row in other[-3:] if row.first] + [
        row for row in other[-3:] if not row.first
    ]
    assert compared(other).same == 3


def test_a_patched_build_is_not_the_release() -> None:
    patched = {**NEW, "transformers": f"{NEW['transformers']}+x"}
    stored = [*rows(OLD, BROKEN), *rows(NEW, BROKEN)]
    assert compared(stored, new=patched).compared == 0
    assert compared([*stored, *rows(patched, BROKEN)], new=patched).compared == 3
    measured = {
        "python": "3.11",
        "torch": "2.13.0+cpu",
        "transformers": "5.23.0",
        "accelerate": "1.15.0",
    }
    assert compared([], old=measured, new=measured).compared == 3, "expectations know the release"
    assert compared([], old=measured, new={**measured, "transformers": "5.23.0+x"}).compared == 0


def test_what_cannot_be_compared_has_a_reason_and_what_to_measure() -> None:
    only_old = compared(rows(OLD, BROKEN))
    assert (only_old.verdict, only_old.exit_code) == ("UNDECIDED", 3)
    assert only_old.missing == {(CELLS[0].key, "b")} and only_old.seconds > 0
    assert {each.reason for each in only_old.unknown} == {"never measured on b"}
    flaky = compared([*rows(OLD, BROKEN), *rows(NEW, {**BROKEN, "summon": "flaky"})])
    assert [(each.variant, each.reason) for each in flaky.unknown] == [
        ("summon", "attempts disagree on b")
    ]
    assert flaky.verdict == "UNDECIDED" and not flaky.missing, (
        "measuring it again gives no answer either"
    )
    unknown = compared(rows(OLD, BROKEN), new={})
    assert unknown.missing == {
        (CELLS[0].key, "b")
    } and "`repro stack lock b`" in upgrade.verdict_sentence(unknown)
    assert {each.reason for each in unknown.unknown} == {"the releases of b are not known"}
    without = compared(
        rows(OLD, BROKEN), new={name: v for name, v in NEW.items() if name != "torch"}
    )
    assert (
        all(each.reason.startswith("b pins no torch") for each in without.unknown)
        and not without.missing
    )


def test_what_a_stack_lacks_is_no_missing_measurement() -> None:
    request = make_request(
        ["case=train-step", "model=qwen1.5-0.5b", "strategy=fsdp2", "hardware=cpu"]
    )
    old = {**OLD, "torch": "2.2.2", "transformers": "4.36.2"}
    (lacks,) = compare_stacks(request, (End("a", old), End("b", NEW)), []).unknown
    assert lacks.reason.startswith("a lacks ") and lacks.ends == ()
    newer = {**OLD, "transformers": "4.39.3"}  # the model and the strategy can run there
    (never,) = compare_stacks(request, (End("a", newer), End("b", NEW)), []).unknown
    assert never.ends == ("a", "b")


def test_packages_that_change_are_named_and_which_of_them_are_not_judged() -> None:
    old, new = (
        {**OLD, "torch": "2.99.0+cpu", "mine": "1.2", "a": "1"},
        {**OLD, "transformers": "9.9.9", "mine": "2.0"},
    )
    result = compared([*rows(OLD, BROKEN), *rows(NEW, BROKEN)], old=old, new={**new, "b": "1"})
    data = upgrade.upgrade_to_json(result)
    assert (data["verdict"], data["changes"]) == ("GO", {"transformers": ("4.39.3", "9.9.9")})
    assert data["not_judged"] == {"mine": ("1.2", "2.0")}
    assert any("mine 1.2 -> 2.0" in line for line in upgrade.describe_upgrade(result))


def test_packages_that_only_one_stack_pins_are_named_with_the_consequence() -> None:
    result = compared(
        rows(OLD, BROKEN),
        old={**OLD, "peft": "0.9.0"},
        new={**OLD, "transformers": "9.9.9", "mine": "1"},
    )
    assert upgrade.upgrade_to_json(result)["only_one_side"] == {
        "peft": ("0.9.0", ""),
        "mine": ("", "1"),
    }
    text = "\n".join(upgrade.describe_upgrade(result))
    assert (
        "Only in a: peft 0.9.0. What needs peft is not compared." in text
        and "Only in b: mine 1." in text
    )


@pytest.mark.parametrize(
    "pin",
    [
        "torch==2.99.0+cu126",
        "torch == 2.99.0+cu126",
        "Torch[x] (==2.99.0+cu126)",
        "torch===2.99.0+cu126  # mine",
        "\ufefftorch==2.99.0+cu126",
        "torch==2.99.0+cu126 --hash=sha256:aa \\\n  --hash=sha256:bb",
        "torch==2.99.0+cu126;python_version>'3'\ntorch==1.0;python_version<'3'",
    ],
)
def test_two_files_with_the_same_packages_are_a_usage_error(
    pin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"{name}.txt" for name in "ab"]
    for file, text in zip(files, (pin, "torch==2.99.0+cu126")):
        file.write_text(f"{text}\ntransformers==4.39.3\n", encoding="utf-8")
    assert main(["upgrade", "--from", str(files[0]), "--to", str(files[1])]) == 2
    err = capsys.readouterr().err
    assert "nothing to compare" in " ".join(err.split()) and all(str(file) in err for file in files)


def test_expectations_answer_for_releases_that_were_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(versions: str, verdict: str, *measured: str) -> Expectation:
        ends = [{"transformers": each, "torch": "2.99.0"} for each in measured]
        every = {name: verdict for name in FIXES}
        return Expectation(
            versions={"transformers": versions}, measured_at=ends, reason="r", verdicts=every
        )

    known = catalog.load()
    expect = [
        entry(">=4.38,<5.1", "NOT_REPRODUCED", "4.38.0", "5.0.0"),
        entry(">=5.1,<6", "NOT_FIXED", "5.1.0"),
    ]
    case = known.cases[CASE].model_copy(update={"expect": expect})
    monkeypatch.setitem(known.cases, CASE, case)
    ends = End("a", {**OLD, "transformers": "4.39.3"}), End("b", {**OLD, "transformers": "5.5.5"})
    result = compare_stacks(replace(asked(), catalogue=known), ends, [])
    (problem,) = result.problems
    assert result.verdict == "NO-GO" and problem.boundary == (
        "transformers",
        "5.1.0",
        "5.0.0",
        True,
    )
    assert upgrade.verdict_sentence(result).startswith(
        "NO-GO: hold transformers below 5.1.0 because"
    )
    outside = compare_stacks(
        replace(asked(), catalogue=known), (ends[0], End("c", {**OLD, "transformers": "6.0"})), []
    )
    assert outside.verdict == "UNDECIDED" and outside.compared == 0


def test_nearest_measured_releases_are_said_and_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(torch: str, verdict: str) -> Expectation:
        return Expectation(
            versions={"torch": f"=={torch}"},
            measured_at=[{"torch": torch}],
            reason="r",
            verdicts=dict.fromkeys(FIXES, verdict),
        )

    known, expect = (
        catalog.load(),
        [entry(torch, "FIXED") for torch in ("2.90.0", "3.1.0", "3.2.0")],
    )
    expect += [entry(torch, "NOT_FIXED") for torch in ("3.5.0", "3.7.0")]
    monkeypatch.setitem(known.cases, CASE, known.cases[CASE].model_copy(update={"expect": expect}))
    for torch, changes in (
        ("3.0.0", "same"),
        ("3.6.0", "worse"),
        ("3.3.0", ""),
    ):  # the last one: they disagree
        ends = End("a", OLD), End("b", {**OLD, "torch": torch})
        result = compare_stacks(replace(asked(), catalogue=known), ends, [])
        assert (result.verdict, result.compared) == ("UNDECIDED", 0)
        found = {each.variant: each.nearest for each in result.unknown}
        assert {found[name] for name in FIXES} == {changes}
        assert ("nearest measured releases" in upgrade.verdict_sentence(result)) == bool(changes)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("4.39.3", "4.45.0", "GO"),  # between measured releases
        (
            "4.39.3",
            "5.0.1",
            "UNDECIDED",
        ),  # later than all measured ones: that nothing changes is not known
        ("4.37.0", "4.39.3", "UNDECIDED"),
        ("4.39.3", "4.45.0.dev0", "UNDECIDED"),
    ],
)
def test_expectation_is_no_evidence_of_no_change_beyond_the_measured_releases(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, verdict: str
) -> None:
    known, ends = (
        catalog.load(),
        [{"transformers": each, "torch": "2.99.0"} for each in ("4.38.0", "5.0.0")],
    )
    entry = Expectation(
        versions={"transformers": ">=4.36,<5.1"},
        measured_at=ends,
        reason="r",
        verdicts=dict.fromkeys(FIXES, "FIXED"),
    )
    monkeypatch.setitem(known.cases, CASE, known.cases[CASE].model_copy(update={"expect": [entry]}))
    sides = End("a", {**OLD, "transformers": old}), End("b", {**OLD, "transformers": new})
    result = compare_stacks(replace(asked(), catalogue=known), sides, [])
    assert result.verdict == verdict
    assert {end for each in result.unknown for end in each.ends} == (
        {"a", "b"}
        & {
            side.name
            for side in sides
            if side.versions["transformers"] in ("5.0.1", "4.37.0", "4.45.0.dev0")
        }
        if verdict == "UNDECIDED"
        else set()
    )


def test_fixes_are_no_go_where_too_little_is_known() -> None:
    names = ("small-min", "summon", "no-cache", "no-root-cast", "no-orig-params")
    stored = [
        *rows(OLD, dict.fromkeys(("unfixed", *names), "passed")),
        *rows(NEW, {"unfixed": "reproduced", "small-min": "passed"}),
    ]
    result = compared(stored, names)
    assert (result.verdict, result.exit_code, len(result.problems)) == ("UNDECIDED", 3, 1)
    assert "small-min" in upgrade.verdict_sentence(result)


# -- the command


def upgraded(
    world: World, capsys: pytest.CaptureFixture[str], *words: str, code: int
) -> dict[str, Any]:
    actual = world.repro("upgrade", f"case={CASE}", "variants=[small-min,summon]", *words, "--json")
    out = capsys.readouterr()
    assert actual == code, out.err
    return dict(json.loads(out.out)) if out.out else {"err": out.err}


@pytest.fixture
def two(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    world.bases = {
        "base": {**BASE, "torch": "2.99.0"},
        "newer": {**BASE, "torch": "2.99.0", "transformers": "4.44.0"},
    }
    monkeypatch.setattr(project, "published", list)
    monkeypatch.setattr(stacks, "described", lambda text: world.resolve(text))
    return world


def test_upgrade_measures_only_if_told_to_and_only_what_is_missing(two: World, capsys: Any) -> None:
    ends = ("--from", "base", "--to", "newer")
    assert upgraded(two, capsys, *ends, code=3)["verdict"] == "UNDECIDED" and not two.launched
    data = upgraded(two, capsys, *ends, "--measure", code=1)
    assert data["verdict"] == "GO with these fixes" and len(two.launched) == 6
    assert [(each["kind"], each["fixes"]) for each in data["problems"]] == [
        ("new_failure", list(FIXES))
    ]
    again = [upgraded(two, capsys, *ends, *more, code=1) for more in ((), ("--measure",))]
    assert [each["verdict"] for each in again] == [data["verdict"]] * 2 and len(two.launched) == 6
    data = upgraded(two, capsys, "--from", "newer", "--to", "base", code=0)
    assert data["fixed"] == [CASE] and len(two.launched) == 6


@pytest.mark.parametrize(
    "words",
    [
        "--from base",
        "--from base --to base",
        "--from base --to newer stack=base",
        "--from base --to newer relases=true",
        "--from base --to newer case=nope",
        "--from base --to newer --budget 3",
        "--from base --to newer --script x.py",
    ],
)
def test_upgrade_bad_input_is_a_usage_error(two: World, words: str) -> None:
    assert two.repro("upgrade", *words.split()) == 2
    assert two.launched == []


def test_upgrade_from_lock_files_needs_no_index(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Packages that no index has, in both formats; nothing is resolved."""
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(stacks, "resolve", None)
    monkeypatch.setattr(project, "published", list)
    (tmp_path / "old.txt").write_text(
        "torch==2.99.0\ntransformers==4.39.3\nno-such-package-anywhere==1.0\n"
    )
    (tmp_path / "uv.lock").write_text(
        "".join(
            f'[[package]]\nname = "{name}"\nversion = "{v}"\n'
            for name, v in NEW.items()
            if name != "python"
        )
    )
    (tmp_path / "loose.txt").write_text("torch>=2.4\n")
    (tmp_path / "r").mkdir()

    def run(source: str, target: str) -> tuple[int, str]:
        ends = [
            str(tmp_path / name) if name.endswith((".txt", ".lock")) else name
            for name in (source, target)
        ]
        words = [
            "--from",
            ends[0],
            "--to",
            ends[1],
            f"case={CASE}",
            f"results={tmp_path / 'r'}",
            "--json",
        ]
        code = main(["upgrade", *words])
        out = capsys.readouterr()
        return code, out.out + out.err

    code, text = run("old.txt", "uv.lock")
    assert code == 3 and json.loads(text)["measure"]["cells"] == 1
    code, text = run("old.txt", "loose.txt")
    assert code == 3 and json.loads(text)["measure"]["cells"] > 0, "known after it was resolved"
    assert "pin torch in " in json.loads(text)["headline"]
    (tmp_path / "twice.txt").write_text(
        "torch==2.99.0\ntransformers==4.39.3\nTransformers==4.40.0\n"
    )
    code, text = run("twice.txt", "uv.lock")
    assert code == 2 and all(word in text for word in ("twice.txt", "line 3", "transformers"))
    marked = "torch==2.99.0\na==1 ; python_version < '3'\na==2 ; python_version >= '3'\n"
    (tmp_path / "marked.txt").write_text(marked)
    assert run("marked.txt", "uv.lock")[0] == 3
    assert run("old.txt", "old.txt")[0] == run("old.txt", "none.txt")[0] == 2
    (tmp_path / "prose.txt").write_text(
        "# pins\ntorch==2.99.0 --hash=sha256:aa\n-e .\nhello world !!\n"
    )
    code, text = run("old.txt", "prose.txt")
    assert code == 2 and "prose.txt:4" in text
    code, text = run("torch2.6-tf4.52", "old.txt")
    assert code == 2 and "torch2.6-tf4.51" in text
