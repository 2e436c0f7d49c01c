"""`repro` as a user runs it, with real ranks: a matrix, an interrupted run, and that they leave
nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from launching import wait_for
from repro_matrix.results.store import Store

pytestmark = pytest.mark.ranks
SHIPPED = sorted(
    path.stem for path in (Path(__file__).parents[2] / "conf/stack").glob("torch*.yaml")
)
Once = Callable[[str, Callable[[], Any]], Any]  # conftest's
CASE = "qwen15-fsdp-norm-shard"


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "REPRO_CACHE": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "repro_matrix",
        *words,
        f"results={tmp_path / 'results'}",
        "hardware=cpu",
    ]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def measured_from_cold(once: Once, tmp_path: Path, variant: str) -> dict[str, Any]:
    """The rows and the document of a run of ``CASE`` with torchrun that left nothing behind,
    measured once."""

    def measure() -> dict[str, Any]:
        folder = tmp_path / "cold"
        run = start(folder, "run", CASE, f"variants=[{variant}]", "launcher=torchrun", "--json")
        out, err = run.communicate(timeout=800)
        assert run.returncode == 0, err
        wait_for(lambda: not ours(folder))
        return {"rows": json.loads(out)["rows"], "document": documents(folder)[0]}

    return dict(once(f"cold-{variant}", measure))


def documents(tmp_path: Path) -> list[dict[str, Any]]:
    return list(Store(tmp_path / "results").documents())


def attempts(tmp_path: Path) -> int:
    return sum(
        len(variant["attempts"])
        for each in documents(tmp_path)
        for variant in each["variants"].values()
    )


def ours(tmp_path: Path) -> list[psutil.Process]:
    """Processes that work for this test: they have its folder in their command line or
    environment."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join([*process.cmdline(), *process.environ().values()])
            if (
                str(tmp_path) in text
                and process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def test_interrupted_run_keeps_results_and_resumes(tmp_path: Path) -> None:
    words = ("run", CASE, "variants=[root-call,summon]", "launcher=forkserver")
    first = start(tmp_path, *words)
    wait_for(lambda: attempts(tmp_path) >= 1)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=600)
    kept = attempts(tmp_path)
    if first.returncode == 130 and kept < 3:  # else it was on its way to the answer
        assert "0 of 1 cell complete" in out, out + err
    # It had just finished, or was on its way out, where Python's own handler ends it: then nothing
    # may be missing.
    assert first.returncode == 130 or (first.returncode in (0, -signal.SIGINT) and kept == 3), err
    assert kept >= 1
    wait_for(lambda: not ours(tmp_path))
    second = start(tmp_path, *words, "--resume", "--json")
    out, err = second.communicate(timeout=600)
    assert second.returncode == 0, err
    said = json.loads(out)
    assert (
        said["summary"]["reused"] == kept
        and said["summary"]["attempts"] + said["summary"]["reused"] == 3
    )
    rows = {row["variant"]: row for row in said["rows"]}
    assert rows["unfixed"]["outcome"] == "reproduced"
    assert rows["summon"]["verdict"] == "FIXED"
    assert (
        rows["root-call"]["verdict"] == "DIFFERENT_FAILURE"
        and "fsdp-tied-embeddings" in rows["root-call"]["reason"]
    )
    stored = documents(tmp_path)[0]["variants"]["summon"]["attempts"][0]["observation"]
    assert stored["attempt"]["launcher"] == "forkserver"
    assert all(rank["record"]["done"] and rank["exit_code"] == 0 for rank in stored["ranks"])
    wait_for(lambda: not ours(tmp_path))


@pytest.mark.slow
def test_matrix_with_a_script_that_cannot_be_imported_runs_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "project"
    for folder in ("conf", "repros"):
        shutil.copytree(Path(__file__).parents[2] / folder, root / folder)
    about = yaml.safe_load((root / "conf/case/ddp-module-bypass.yaml").read_text(encoding="utf-8"))
    about |= {"slug": "lacking", "script": "lacking.py"}
    about["launch"][
        "imports"
    ] = []  # what is listed there the stack must have, else the case is skipped
    (root / "conf/case/lacking.yaml").write_text(
        yaml.safe_dump(about, sort_keys=False), encoding="utf-8"
    )
    (root / "repros/lacking.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.setenv("REPRO_ROOT", str(root))
    done = start(
        tmp_path, "matrix", "case=lacking,ddp-module-bypass", "variants=[root-call]", "--json"
    )
    out, err = done.communicate(timeout=600)
    assert done.returncode == 3, err  # less was measured than asked for
    rows = {(row["case"], row["variant"]): row for row in json.loads(out)["rows"]}
    for variant in ("unfixed", "root-call"):
        row = rows["lacking", variant]
        assert row["outcome"] == "infra_error" and "no_such_package" in row["reason"]
    assert rows["ddp-module-bypass", "root-call"]["verdict"] == "FIXED"


@pytest.mark.slow
def test_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    run = start(tmp_path, "run", CASE, "variants=[summon]", "launcher=torchrun")
    wait_for(lambda: any("elastic.py" in " ".join(process.cmdline()) for process in ours(tmp_path)))
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=600)
    assert run.returncode == 130
    wait_for(lambda: not ours(tmp_path))


def test_matrix_prints_page_and_exit_code_last(tmp_path: Path) -> None:
    run = start(tmp_path, "matrix", "case=ddp-module-bypass", "variants=[unfixed]", "repeat=1")
    out, err = run.communicate(timeout=800)
    assert run.returncode == 0, err
    page, lines = tmp_path / "results" / "report.html", out.splitlines()
    assert lines[-2] == f"page: {page}" and page.is_file() and lines[-1].startswith("exit code 0")


@pytest.mark.slow
@pytest.mark.parametrize("stack", SHIPPED)
def test_smoke_matrix_is_as_expected_on_each_shipped_stack(tmp_path: Path, stack: str) -> None:
    """The other tests measure the current stack only; an older torch breaks what the kit reads
    without an error."""
    words = ["matrix", "+matrix=smoke", f"stack={stack}", "hardware=cpu", "repeat=1", "--json"]
    command = [
        sys.executable,
        "-m",
        "repro_matrix",
        *words,
        f"results={tmp_path}",
    ]  # with the stacks of this machine
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    rows = json.loads(run.stdout)["rows"]
    assert not [
        (row["case"], row["variant"], row["reason"])
        for row in rows
        if row["expected"] == "unexpected"
    ]
    assert run.returncode == 0, run.stderr
    assert any(row["verdict"] == "FIXED" and row["expected"] == "expected" for row in rows)
