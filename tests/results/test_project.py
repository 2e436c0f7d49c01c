"""Whose repository this is: repro.toml, what it adds, and what is wrong with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from repro_matrix import git as git_module
from repro_matrix import paths
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import project
from repro_matrix.environment.stacks import spec
from repro_matrix.errors import ConfigError
from repro_matrix.launch.attempt import Attempt, private_environment, torchrun_line
from repro_matrix.results import runs

TEAM = Path(__file__).parents[1] / "team"  # a repository with a catalogue of its own


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(TEAM, tmp_path / "team"))
    monkeypatch.chdir(folder)
    return folder


def test_project_adds_to_the_shipped_catalogue(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (team / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(team / "deep" / "er")
    found = catalogue.load()
    assert {"odd-batch", "train-step"} <= found.cases.keys() and "our-head" in found.models
    assert found.script(found.cases["odd-batch"]) == team / "failures/scripts/odd_batch.py"
    assert found.script(found.cases["train-step"]) == paths.REPROS / "train_step.py"
    assert {"by-hand"} <= found.strategies.keys() and {
        "ours",
        "current",
    } <= spec.definitions().keys()
    assert spec.lock_path("ours") == team / "failures/stack/locks/ours.txt"
    here = project.current()
    assert here.folder == team and here.results == team / "results" and not here.is_shipped
    assert project.published() == [team / "results/baseline", paths.BASELINE]
    from repro_matrix.config.settings import compose_run

    assert runs.results_folder(compose_run([])).is_relative_to(team / "results" / "scratch")


def test_torchrun_line_of_a_project_finds_kit_and_files(team: Path) -> None:
    found = catalogue.load()
    settings = {
        "case": "odd-batch",
        "variant": "unfixed",
        "model": {"slug": "our-head"},
        "strategy": {"slug": "by-hand"},
        "tp_size": 1,
        "device": "cpu",
        "steps": 1,
        "seed": 0,
        "flags": {},
    }
    attempt = Attempt(
        id="x",
        run_id="x",
        directory=team,
        script=found.script(found.cases["odd-batch"]),
        settings=settings,
        python="/elsewhere/python",
        world_size=2,
        deadline_s=1,
        env={"PYTHONPATH": "/overlay"},
        kit=paths.REPROS,
        files=found.files(settings),
    )
    assert private_environment(attempt)["PYTHONPATH"] == f"/overlay:{paths.REPROS}"
    words = torchrun_line(attempt)
    assert (
        f"PYTHONPATH=/overlay:{paths.REPROS} " in words
        and " failures/scripts/odd_batch.py " in words
    )
    assert (
        "--case failures/case/odd-batch.yaml --variant unfixed --model failures/model/our-head.yaml"
        in words
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('cnof = ["failures"]', r"repro\.toml: unknown key 'cnof'; did you mean 'conf'"),
        ('conf = ["failurse"]', r"repro\.toml: conf: there is no folder .*failurse"),
        ("conf = [", r"repro\.toml: not valid TOML"),
    ],
)
def test_project_invalid_file_names_file_and_key(team: Path, text: str, said: str) -> None:
    (team / "repro.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        project.current()


def test_catalogue_reads_project_expectations_and_refuses_duplicates(team: Path) -> None:
    table = (
        "case: {}\nranges: [{{cells: [our-head/by-hand], measured_at: [{{torch: 2.13.0}}], reason:"
        " r}}]\n"
    )
    table += "verdicts: {{drop-last: [FIXED]}}\n"
    folder = team / "results" / "expected"
    folder.mkdir(parents=True)
    (folder / "odd-batch.yaml").write_text(table.format("odd-batch"))
    (entry,) = catalogue.load().cases["odd-batch"].expect
    assert entry.verdicts == {"drop-last": "FIXED"}
    (folder / "odd-batch.yaml").rename(folder / "train-step.yaml")
    (folder / "train-step.yaml").write_text(table.format("train-step"))
    (team / "failures" / "model").mkdir(exist_ok=True)
    shutil.copy(paths.CONF / "model" / "qwen1.5-0.5b.yaml", team / "failures" / "model")
    with pytest.raises(
        ConfigError, match=rf"failures/model/qwen1.5-0.5b.yaml: .*is also in {paths.CONF}/model"
    ):
        catalogue.load()
    (team / "failures" / "model" / "qwen1.5-0.5b.yaml").unlink()
    cases = catalogue.load().cases  # the others go on
    assert "odd-batch" in cases and "the expectations of train-step are also in" in str(
        cases.left_out["train-step"]
    )


def git(folder: Path, *words: str) -> None:
    words = ("-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words)
    subprocess.run(["git", *words], check=True, capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_commit_of_a_repository_of_another_user_is_recorded(team: Path) -> None:
    git(team, "init", "-q")
    git(team, "add", "-A")
    git(team, "commit", "-qm", "one")
    for path in (team, *team.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    head = subprocess.run(["git", "-C", team, "rev-parse", "HEAD"], check=False)
    assert head.returncode == 128, "git itself refuses"
    commit, changed = git_module._commit_state(team, [team / "failures"])
    assert commit and not changed
    (team / "failures/scripts/odd_batch.py").write_text("pass\n")
    assert git_module._commit_state(team, [team / "failures"]) == (commit, True)


def test_git_state_of_a_failing_git_is_not_clean(
    team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status that failed was an empty one, and an edited script was published as the commit's."""
    script, added = team / "failures/scripts/odd_batch.py", team / "failures/new.py"
    git(team, "init", "-q")
    git(team, "add", "-A")
    git(team, "commit", "-qm", "one")

    def state() -> tuple[str | None, bool]:
        return git_module._commit_state(team, [team / "failures"])

    commit, changed = state()
    assert commit and not changed and git_module.since(commit, team, [script]) is None
    git(team, "config", "status.showUntrackedFiles", "no")
    added.write_text("1\n")
    assert state() == git_module.git_state() == (commit, True)
    added.unlink()
    script.write_text("pass\n")
    monkeypatch.setenv("GIT_DIR", str(paths.ROOT / ".git"))  # as in a git hook
    monkeypatch.setenv("GIT_WORK_TREE", str(paths.ROOT))
    assert state() == (commit, True)
    changed_file = f"failures/scripts/odd_batch.py has changed since commit {commit[:12]}"
    assert git_module.since(commit, team, [script]) == changed_file
    assert (
        git_module.since("f" * 40, team, [script]) == f"commit {'f' * 12} is not in this repository"
    )
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_WORK_TREE")
    (team / ".git" / "index").write_text("garbage")
    assert state() == (None, False), "no commit is known to be this code"
