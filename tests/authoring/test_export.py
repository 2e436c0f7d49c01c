"""`repro export`: one file about one variant without the kit, in which every name that it uses is defined."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro_kit.settings import resolve, variant_axis

import pytest
from repro_matrix.authoring.bundle import ExportError, bundle, with_stubs
from repro_matrix.authoring.export import render, run_values
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError
from repro_matrix.paths import REPROS
from repro_matrix.runner import prerequisites as wanted
from repro_matrix.runner import session
from repro_matrix.runner.session import Request
from ruff import __main__ as ruff

CATALOGUE = catalogue.load()
KIT = {f"repro_kit.{p.stem}": p.read_text() for p in sorted((REPROS / "repro_kit").glob("*.py"))}


def settings_of(case: Case, variant: str) -> dict[str, Any]:
    raw = CATALOGUE.raw["case"][case.slug]
    axes = {axis: variant_axis(raw, variant, axis, getattr(case.axes, axis)[0]) for axis in ("model", "strategy")}
    chosen = {axis: CATALOGUE.raw[axis][name] for axis, name in axes.items()}
    return resolve(raw, variant, device="cpu", backend="gloo", **chosen)


def file_of(case: Case, variant: str, checks: bool) -> str:
    kit, script = with_stubs(KIT, checks), CATALOGUE.script(case).read_text()
    values = run_values(settings_of(case, variant), checks)
    made = bundle(script, kit, values, case.slug, checks)
    return render(["What \\ it is", 'a """quote"""'], values, {"X": "1"}, made, {"qwen_v1/a.py": "x = 1\n"})


@pytest.mark.slow
@pytest.mark.parametrize("checks", [True, False])
def test_export_of_every_case_defines_every_name_and_is_short(checks: bool, tmp_path: Path) -> None:
    lines = []
    for case in CATALOGUE.cases.values():
        text = file_of(case, next(iter(case.variants)), checks)
        (tmp_path / f"{case.slug}.py").write_text(text)
        lines.append(text.count("\n"))
        imported = {str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in imported if name.partition(".")[0] in ("repro_kit", "repro_matrix")}
    command = [ruff.find_ruff_bin(), "check", "--isolated", "--select", "E9,F821,F811", str(tmp_path)]
    subprocess.run(command, check=True)
    assert sorted(lines)[len(lines) // 2] <= (250 if checks else 200) and max(lines) <= 500


SCRIPT = """
from repro_kit import Run, three
from repro_kit.one import make
from repro_kit.two import both

TABLE = {"a": make, "b": both}


def body(run: Run) -> int:
    number: int = run.flags["x"]
    run.fact("number", number)
    total = []
    how = run.flags.get("how", "plain")
    if how == "plain" and number in (0, 1):
        total.append(make())  # <- here
    elif not run.flags["on"]:
        total.append(both())
    else:
        total.append(three.three() if run.flags["on"] else -1)
    total.append(TABLE[run.flags["which"]]())
    return number, total, run.seed is None
"""
PARTS = {
    "repro_kit.one": "def make():\n    return 1\n\n\ndef unused():\n    return missing\n",
    "repro_kit.two": "def two():\n    return 2\n\n\ndef both():\n    from repro_kit.one import make\n"
    "    return two() + make()\n",
    "repro_kit.three": "from repro_kit.run import Run\n\n\ndef three():\n    return 3\n",
    "repro_kit.run": "class Run:\n    rank = 0\n\n\ndef main(body):\n    body(Run())\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"x": 0, "on": False, "which": "a"}, (0, [1, 1], False)),
        ({"x": 2, "on": True, "which": "a", "how": "plain"}, (2, [3, 1], False)),
        ({"x": 1, "on": True, "which": "b", "how": "other"}, (1, [3, 3], False)),
    ],
)
def test_bundle_behaves_as_the_script_with_its_settings(flags: dict[str, Any], expected: Any) -> None:
    made = bundle(SCRIPT, PARTS, {"flags": flags, "seed": 0}, "it")
    text = "\n".join([*made.kit, *made.case])
    names: dict[str, Any] = {}
    exec(text, names)
    run = names["Run"]()
    run.seed, run.flags = 0, flags
    assert names["body"](run) == expected
    assert "unused" not in text and "fact" not in text
    assert "# --> here\n        total.append(make())" in text
    assert "three.three" not in text and "-1" not in text  # branches that the settings rule out


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("x = 1\n", "no function body"),
        ("from repro_kit.rank_monitor import Witness\n\n\ndef body(run):\n    Witness()\n", r"repro_kit\.rank_monitor"),
        ("X = __file__\n\n\ndef body(run):\n    return X\n", "files in its folder"),
        ("from repro_kit.models import build as b\n\n\ndef body(run):\n    b()\n", "its own name"),
        ("from repro_kit.wrapping import own_batch\n\n\ndef batch():\n    pass\n\n\n"
         "def body(run):\n    own_batch(run)\n    batch()\n", "both define batch"),
    ],
)  # fmt: skip
def test_bundle_of_an_unsuitable_script_raises(script: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        bundle(script, with_stubs(KIT, True), {}, "it")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fsdp-uniform-dtyp", "did you mean 'fsdp-uniform-dtype'"),
        ("fsdp-uniform-dtype --variant unfixd", "unknown variant 'unfixd'"),
        ("fsdp-uniform-dtype stack=curent", "did you mean 'current'"),
        ("fsdp-uniform-dtype --out there.py", "is not overwritten"),
        ("fsdp-uniform-dtype --out none/x.py", "cannot be written"),
    ],
)
def test_export_with_bad_input_exits_2(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("mine")
    assert cli.main(["export", *words.split()]) == 2
    assert message in capsys.readouterr().err and Path("there.py").read_text() == "mine"


def test_export_with_an_absent_stack_uses_the_stored_versions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = session.prepare

    def absent(asked: Request, **options: Any) -> Any:
        if "stack" in asked.selections[0].given:
            raise ConfigError("no index to build it from")
        return prepare(asked, **options)

    monkeypatch.setattr(session, "prepare", absent)
    assert cli.main(["export", "tp-save-pretrained", "stack=torch2.6-tf4.51"]) == 0
    text = capsys.readouterr().out
    assert "torch==2.6" in text and re.search(r"Expected \(\d+ of \d+ stored", text)
    assert "Not run where this was written: no index" in text


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("slug", ["fsdp-uniform-dtype", "qwen-remote-code-load", "fsdp-generate-uneven"])
def test_exported_script_shows_the_recorded_outcome_under_plain_torchrun(slug: str, tmp_path: Path) -> None:
    """An exception, wrong numbers with a model's own code, and a hang. `make exports` tries the whole catalogue."""
    from exports import check_export

    case = CATALOGUE.cases[slug]
    stacks.resolve(case.requires.stack or "current")  # built where it is not: an export takes what is there
    result, why = check_export(case, next(iter(case.variants)), tmp_path)
    assert result == "shown", why


def test_export_with_an_overlay_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [replace(each, state="locked") if each.state == "built" else each for each in stacks.defined_stacks()]
    monkeypatch.setattr(wanted, "defined_stacks", lambda: there)
    found = wanted.resolve
    monkeypatch.setattr(wanted, "resolve", lambda name: pytest.fail(name) if "+" in name else found(name))
    assert cli.main(["export", "fsdp-uniform-dtype", "stack=torch2.2-tf4.36+transformers@4.37.0"]) == 2
    assert "it is not built here" in capsys.readouterr().err
