"""`repro export`: a folder about one variant that runs without repro-matrix."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError
from repro_matrix.runner import prerequisites as wanted
from repro_matrix.runner import session
from repro_matrix.runner.session import Request

CATALOGUE = catalogue.load()


def exported(*words: str) -> Path:
    """Export into the folder ``out``; return it."""
    assert cli.main(["export", *words, "--out", "out"]) == 0
    return Path("out")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("slug", ["fsdp-uniform-dtype", "qwen-remote-code-load"])
def test_export_is_a_folder_with_all_that_it_imports(slug: str) -> None:
    folder = exported(slug)
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["case"] == slug and settings["variant"] == next(
        iter(CATALOGUE.cases[slug].variants)
    )
    readme = (folder / "README.md").read_text()
    assert f"--nproc-per-node {settings['world_size']} run.py" in readme and "torch==" in readme
    assert re.search(r"Expected \(\d+ of \d+ stored", readme)
    assert bool(list(folder.glob("remote_code/*/*.py"))) == bool(
        settings["model"].get("remote_code")
    )
    for file in folder.rglob("*.py"):
        assert "repro_matrix" not in {
            node.module
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom)
        }


RUNS = {  # the body of a case: (exit code with two ranks' check, part of the output)
    "pass": (0, "finished"),
    "run.check('sum', actual=1, expected=2)": (1, "check sum: FAILED"),
    "raise ValueError('planted')": (1, "ValueError: planted"),
}


@pytest.mark.parametrize("body", RUNS)
def test_run_py_exits_with_1_for_an_error_or_a_failed_check(body: str) -> None:
    folder = exported("fsdp-uniform-dtype", "--variant", "cast-adapter")
    (folder / "fsdp_uniform_dtype.py").write_text(f"def body(run):\n    {body}\n")
    settings = json.loads((folder / "settings.json").read_text())
    settings.update(process_group=False, world_size=1, env={"PLANTED": "1"})
    (folder / "settings.json").write_text(json.dumps(settings))
    python = [
        sys.executable,
        "-S",
        "-c",
        (
            f"import sys; sys.path += {sys.path[1:]!r}; import runpy; "
            "sys.argv = ['out/run.py']; sys.path.insert(0, 'out'); runpy.run_path('out/run.py')"
        ),
    ]
    done = subprocess.run(python, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    code, text = RUNS[body]
    assert done.returncode == code and text in done.stdout + done.stderr
    env = {"PATH": os.environ["PATH"], "WORLD_SIZE": "3"}
    assert "needs 1 rank" in subprocess.run(python, capture_output=True, text=True, env=env).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fsdp-uniform-dtyp", "did you mean 'fsdp-uniform-dtype'"),
        ("fsdp-uniform-dtype --variant unfixd", "unknown variant 'unfixd'"),
        ("fsdp-uniform-dtype stack=curent", "did you mean 'current'"),
        ("fsdp-uniform-dtype --out there", "is not overwritten"),
        ("fsdp-uniform-dtype --out none/x", "cannot be written"),
    ],
)
def test_export_with_bad_input_exits_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there").write_text("mine")
    assert cli.main(["export", *words.split()]) == 2
    assert message in capsys.readouterr().err and Path("there").read_text() == "mine"


def test_export_with_an_absent_stack_uses_the_stored_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = session.prepare

    def absent(asked: Request, **options: Any) -> Any:
        if "stack" in asked.selections[0].given:
            raise ConfigError("no index to build it from")
        return prepare(asked, **options)

    monkeypatch.setattr(session, "prepare", absent)
    text = (exported("tp-save-pretrained", "stack=torch2.6-tf4.51") / "README.md").read_text()
    assert "torch==2.6" in text and re.search(r"Expected \(\d+ of \d+ stored", text)
    assert "Not run where this was written: no index" in text


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "slug", ["fsdp-uniform-dtype", "qwen-remote-code-load", "fsdp-generate-uneven"]
)
def test_exported_folder_shows_the_recorded_outcome_under_plain_torchrun(
    slug: str, tmp_path: Path
) -> None:
    """An exception, wrong numbers with a model's own code, and a hang. `make exports` tries the
    whole catalogue."""
    from exports import check_export

    case = CATALOGUE.cases[slug]
    stacks.resolve(
        case.requires.stack or "current"
    )  # built where it is not: an export takes what is there
    result, why = check_export(case, next(iter(case.variants)), tmp_path)
    assert result == "shown", why


def test_export_with_an_overlay_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [
        replace(each, state="locked") if each.state == "built" else each
        for each in stacks.defined_stacks()
    ]
    monkeypatch.setattr(wanted, "defined_stacks", lambda: there)
    found = wanted.resolve
    monkeypatch.setattr(
        wanted, "resolve", lambda name: pytest.fail(name) if "+" in name else found(name)
    )
    assert (
        cli.main(["export", "fsdp-uniform-dtype", "stack=torch2.2-tf4.36+transformers@4.37.0"]) == 2
    )
    assert "it is not built here" in capsys.readouterr().err
