"""Bad command lines, files, disks and homes: exit code 2 and a message that names the cause, never
a traceback."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.config.selection import parse_overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ResultsError
from repro_matrix.paths import CONFIG_PATH
from repro_matrix.results import runs
from repro_matrix.results.store import Store
from repro_matrix.runner import run as workspace

Capsys = pytest.CaptureFixture[str]


def refused(capsys: Capsys, *words: str) -> str:
    """Run a command that must end with exit code 2; return its message."""
    assert cli.main(list(words)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("list stack=torch2.2-tf4.93", "did you mean 'torch2.2-tf4.39'?"),
        ("list shard=9/8", "shard=9/8: not PART/PARTS"),
        ("list shard=1/8", "`repro matrix --dry-run shard=...`"),
        (
            "list model.config.num_hidden_layer=4",
            "no model has that key; did you mean 'num_hidden_layers'?",
        ),
        ("matrix --dry-run model.config.num_hidden_layers=four", "'four' is not of type int"),
        ("show ddp*", "`repro show` takes one case"),
        ("show ddp-module-bypass case=train-step", "case=train-step"),
        ("run", "Nothing to run."),
        ("run train-step results=", "run settings: results: "),
        ("run --module", "--module: a module's name is missing"),
        ("versions train-step --max-probes 0", "0 is not in the range x>=1"),
    ],
)
def test_command_with_bad_arguments_is_refused_and_writes_nothing(
    line: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, *line.split())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["Ergebnis ö", "a,b", "[x]", "it's", "plain", "a=b {c}"])
def test_results_folder_may_have_any_name(name: str) -> None:
    assert compose_run([f"results=/tmp/{name}"]).results == f"/tmp/{name}"
    assert parse_overrides([f"results=/tmp/{name}"]).run == [f"results=/tmp/{name}"]


# -- files of conf/


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of groups beside the shipped ones."""
    monkeypatch.setenv(CONFIG_PATH, str(tmp_path / "conf"))
    for group in ("case", "model", "matrix"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    return tmp_path / "conf"


def test_glob_that_matches_only_an_invalid_file_names_its_error(conf: Path, capsys: Capsys) -> None:
    (conf / "case" / "bad-one.yaml").write_text("slug: bad-one\nkind: failur\n")
    error = refused(capsys, "list", "case=bad-*")
    assert (
        "bad-one.yaml: " in error
        and "did you mean 'failure'" in error
        and "unknown case" not in error
    )


def test_file_with_another_ending_is_named(conf: Path, capsys: Capsys) -> None:
    file = conf / "case" / "our-case.yml"
    file.write_text("slug: our-case\n")
    assert str(file) in refused(capsys, "list", "case=our-case")
    assert cli.main(["list", "case=train-step"]) == 0 and str(file) in capsys.readouterr().err


# -- disks and homes


def test_closed_stdout_is_named() -> None:
    command = f"exec {sys.executable} -m repro_matrix list >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "standard output" in done.stderr


def test_new_on_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    (tmp_path / "repro.toml").write_text('conf = "failures"\nscripts = "failures/scripts"\n')
    (tmp_path / "failures/scripts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def full(path: Path, *values: object, **more: object) -> object:
        if path.suffix == ".py":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return open(path, *values, **more)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr("repro_matrix.authoring.draft.open", full, raising=False)
        assert "my_case.py" in refused(capsys, "new", "my-case")
    assert not list((tmp_path / "failures").rglob("my*"))
    assert cli.main(["new", "my-case"]) == 0


def test_results_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "afile"
    file.write_text("x")
    for open_results in (
        Store(file).open,
        Store(file / "below").open,
        lambda: runs.create_run(file, []),
    ):
        with pytest.raises(ResultsError, match="afile"):
            open_results()


@pytest.mark.parametrize(
    "error", [errno.EROFS, errno.EACCES, errno.ENOENT]
)  # ENOENT: HOME=/proc/nothing
def test_path_that_cannot_be_written_is_named_with_a_remedy(
    error: int, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def main(_: object) -> int:
        raise OSError(error, os.strerror(error), "/nonexistent/.cache")

    monkeypatch.setattr("repro_matrix.cli.list.main.callback", main)
    message = refused(capsys, "list")
    assert message.startswith("repro: /nonexistent/.cache: ") and "REPRO_CACHE=DIR" in message


def test_user_without_a_home_gets_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "REPRO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert "REPRO_CACHE" in refused(capsys, "stack", "show")
    assert cli.main(["list", "case=train-step"]) == 0  # needs no home


# -- damaged runs


def test_damaged_last_run_is_not_replaced_by_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr("repro_matrix.results.runs.scratch", lambda: tmp_path)
    old = runs.create_run(tmp_path, ["case=a"])
    runs.note(old, ["case=a"], runs.ENDED)
    last = runs.create_run(tmp_path, ["case=b"])
    (last / runs.MANIFEST).write_text('{"schema": 1, "te')
    with pytest.raises(ResultsError, match=rf"{last.name}/{runs.MANIFEST}: damaged"):
        runs.last_run(tmp_path)
    for texts in ([], ["case=a"]):
        with pytest.raises(ResultsError, match="damaged"):
            workspace.resumed(texts)
    assert "damaged" in refused(capsys, "report", str(tmp_path))
    assert runs.last_run(last) == last and runs.last_run(old) == old  # by name both can be read
    (last / runs.MANIFEST).unlink()
    last.rename(tmp_path / "kept-aside")
    assert runs.last_run(tmp_path) == old
