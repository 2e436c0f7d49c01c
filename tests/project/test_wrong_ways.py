"""Ways in which a command line, a file or a disk is wrong: each is said with what is wrong, none is an answer."""

from __future__ import annotations

import errno
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observations import document, observation, ok
from repro_matrix.cli import main as cli
from repro_matrix.config.selection import parse
from repro_matrix.config.settings import compose_run
from repro_matrix.environment import machine as around
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.external import command_line as command
from repro_matrix.paths import CONFIG_PATH
from repro_matrix.report import run_summary
from repro_matrix.results import local as own_results
from repro_matrix.results import runs
from repro_matrix.results.store import Store
from repro_matrix.runner import resume as going_on
from repro_matrix.search import report as bisect_report

FULL = Path("/dev/full")


@pytest.fixture
def more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of options beside the shipped ones."""
    monkeypatch.setenv(CONFIG_PATH, str(tmp_path / "conf"))
    return tmp_path / "conf"


# -- words that were taken as something else, without a word


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["run", "ddp-module-bypass", "case=train-step"],
            "case=train-step: the case is named already: ddp-module-bypass",
        ),
        (
            ["show", "ddp-module-bypass", "case=train-step"],
            "case=train-step: the case is named already: ddp-module-bypass",
        ),
        (["show", "ddp*"], "ddp*: `repro show` takes one case, and these are 4: ddp-module-bypass, ddp-ready-once, "),
        (["run", "train-step", "results="], "results=: which folder? A value is missing"),
        (["run", "--module"], "--module: a module's name is missing"),
        (["run", "--module", ""], "--module: a module's name is missing"),
        (["versions", "train-step", "--max-probes", "0"], "'0' is not a number of at least 1"),
    ],
)
def test_what_would_run_something_else_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err


def test_cells_that_waited_for_a_build_were_not_measured() -> None:
    plans = [SimpleNamespace(cell=SimpleNamespace(hardware="cpu", stack="current", key=key)) for key in ("a", "b")]
    prepared: Any = SimpleNamespace(plans=plans, later=[SimpleNamespace(cells=range(14))])
    done: Any = SimpleNamespace(documents=[{"complete": True}] * 2)
    assert run_summary._describe_interruption(prepared, done).startswith("INTERRUPTED: 14 of 16 cells not measured")
    prepared.later = []
    assert run_summary._describe_interruption(prepared, done) == "INTERRUPTED after everything was measured"


def test_a_closed_standard_output_is_no_defect() -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m repro_matrix list >&-"], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "the standard output is closed" in done.stderr


# -- files that are not read


def test_a_glob_that_only_a_wrong_file_matches_says_what_is_wrong_with_it(
    more: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (more / "case").mkdir(parents=True)
    (more / "case" / "bad-one.yaml").write_text("slug: bad-one\nkind: failur\n")
    for words in (["list", "case=bad-*"], ["matrix", "--dry-run", "case=bad-*"]):
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert "bad-one.yaml: " in said and "'failur' is not valid; did you mean 'failure'" in said
        assert "unknown case" not in said


def test_an_ending_that_nobody_reads_is_said(more: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (more / "case").mkdir(parents=True)
    file = more / "case" / "our-case.yml"
    file.write_text("slug: our-case\n")
    told = f"{file}: is not read: its ending must be .yaml"
    assert cli.main(["list", "case=our-case"]) == 2 and told in capsys.readouterr().err
    assert cli.main(["list", "case=train-step"]) == 0 and told in capsys.readouterr().err
    (more / "model").mkdir()
    (more / "model" / "qwen1.5-0.5b.yml").write_text("x")  # a leftover beside the file that is read
    assert cli.main(["list", "case=train-step", "model=qwen1.5-0.5b"]) == 0
    assert "qwen1.5-0.5b.yml: is not read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("repeet: 3", r"matrix/bad.*'repeet'.*did you mean 'repeat'"),
        ("repeat: three", r"matrix/bad.*"),
        ("order: longst", r"matrix/bad.*"),
    ],
)
def test_a_setting_that_a_named_matrix_gets_wrong_is_named_with_its_file(more: Path, line: str, told: str) -> None:
    (more / "matrix").mkdir(parents=True)
    file = more / "matrix" / "bad.yaml"
    file.write_text(f"# @package _global_\n{line}\nmatrix:\n  a:\n    case: train-step\n")
    with pytest.raises(ConfigError, match=told) as error:
        compose_run(["+matrix=bad"])
    assert "bad" in str(error.value)


# -- what cannot be written


def repro(*words: str, stdout: Path = FULL) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "repro_matrix", *words]
    with open(stdout, "w") as out:
        return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=600)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("export", "fsdp-uniform-dtype"), ("list", "case=train-step")])
def test_a_full_disk_behind_the_standard_output_is_no_defect_of_this_program(words: tuple[str, ...]) -> None:
    done = repro(*words)
    assert done.returncode == 2
    assert done.stderr.endswith("repro: the standard output: cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_new_writes_all_of_a_case_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "repro.toml").write_text('conf = "failures"\nscripts = "failures/scripts"\n')
    (tmp_path / ".git").mkdir()
    (tmp_path / "failures/scripts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    honest = Path.write_text

    def full(path: Path, *given: object, **more: object) -> int:
        if path.suffix == ".py":
            raise OSError(28, "No space left on device", str(path))
        return honest(path, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["new", "my-case"]) == 2
    said = capsys.readouterr()
    assert "my_case.py: cannot be written: No space left on device" in said.err and "wrote" not in said.out
    assert not list((tmp_path / "failures").rglob("my*")), "the next try is not told that it is there already"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my-case"]) == 0


def test_a_file_where_a_folder_of_results_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "afile"
    file.write_text("x")
    for root in (file, file / "below"):
        with pytest.raises(ResultsError, match=r"afile.*: is a file.*results=DIR"):
            Store(root).open()
    with pytest.raises(ResultsError, match=r"afile: is a file, no folder.*results=DIR"):
        runs.begin(file, [])


def test_a_read_only_home_is_answered_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/home/me/.cache")

    monkeypatch.setattr("repro_matrix.cli.list.main", main)
    assert cli.main(["list"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("repro: /home/me/.cache: cannot be written: Read-only") and "REPRO_CACHE=DIR" in said


def test_a_home_of_somebody_else_is_answered_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user without a name has HOME=/ in many a container: `/.cache: Permission denied` was all that was said."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("REPRO_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    for refused, said in (("/nonexistent", True), ("/nonexistent/.cache/repro-matrix/state", True), ("/nights", False)):

        def main(_: object, refused: str = refused) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), refused)

        monkeypatch.setattr("repro_matrix.cli.list.main", main)
        assert cli.main(["list"]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"repro: {refused}: Permission denied") and ("REPRO_CACHE=DIR" in told) == said


def test_doctor_names_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    assert around.unwritable(tmp_path / "new" / "below") is None
    (tmp_path / "file").write_text("x")
    assert around.unwritable(tmp_path / "file" / "below") == (
        f"{tmp_path}/file/below: cannot be written to ({tmp_path}/file is no folder)"
    )


# -- which run


def test_a_damaged_last_run_is_never_passed_over_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_results, "scratch", lambda: tmp_path)
    old = runs.begin(tmp_path, ["case=a"])
    runs.note(old, ["case=a"], runs.ENDED)
    last = runs.begin(tmp_path, ["case=b"])
    (last / runs.MANIFEST).write_text('{"schema": 1, "te')
    with pytest.raises(ResultsError, match=rf"{last.name}/{runs.MANIFEST}: damaged"):
        runs.of(tmp_path)
    for texts in ([], ["case=a"]):
        with pytest.raises(ResultsError, match="damaged"):
            going_on.resumed(texts)
    assert cli.main(["report", str(tmp_path)]) == 2 and "damaged" in capsys.readouterr().err
    assert runs.of(last) == last and runs.of(old) == old, "by its name it can be read"
    (last / runs.MANIFEST).unlink()
    last.rename(tmp_path / "kept-aside")
    assert runs.of(tmp_path) == old, "one that was removed is no damage"
    while runs._held:
        runs._held.popitem()[1].close()


def test_results_that_are_compared_with_themselves_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    passed = [("passed", observation(ok(0), ok(1)))]
    for name in ("a", "b"):
        path = tmp_path / name / "cpu" / "s" / "some-case" / "m.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document({"unfixed": passed, "fix": passed}, {})))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    told = "compared with themselves"
    for other, same in (("a", True), ("link", True), ("b", False)):
        assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / other), "--agreement"]) == 0
        assert (told in capsys.readouterr().err) is same


# -- what is shown


def test_dry_run_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["case=fsdp-silently-untied,fsdp-optim-state-padding", "hardware=cpu", f"results={tmp_path}"]
    assert cli.main(["matrix", "--dry-run", "--memory", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10


def test_a_report_to_paste_is_no_html_and_mentions_nobody() -> None:
    said = "ValueError: <img src=x> @ada \x1b[1m\u202e | `x`"
    assert bisect_report._inert(said).startswith("ValueError: \\<img src=x> \\@ada")
    data = bisect_report._printable({"said": [said], "probes": ({"n": 1, "text": "a\nb\x07"},)})
    assert data == {"said": ["ValueError: <img src=x> @ada   | `x`"], "probes": [{"n": 1, "text": "a\nb "}]}


# -- names


@pytest.mark.parametrize("name", ["Ergebnis ö", "a,b", "[x]", "it's", "plain", "a=b {c}"])
def test_a_folder_of_results_may_have_any_name(name: str) -> None:
    """A space or a letter that is not English was Hydra's "LexerNoViableAltException"."""
    assert compose_run([f"results=/tmp/{name}"]).results == f"/tmp/{name}"
    assert parse([f"results=/tmp/{name}"]).run == [f"results=/tmp/{name}"]
    assert compose_run(["results='in quotes'"]).results == "in quotes" and compose_run(["results=null"]).results is None


def test_no_name_is_near_for_what_all_of_its_kind_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`repro run ./nope.py` asked whether needs.py was meant."""
    monkeypatch.chdir(tmp_path)
    for name in ("needs.py", "imp.py", "train_min.py"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"no such script \(there are: imp.py, needs.py, train_min.py\)"):
        command.checked("./nope.py")
    with pytest.raises(ConfigError, match=r"did you mean 'train_min.py'"):
        command.checked("./trian_min.py")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nightly", "/nope", "--history", "history", "--run-exit-code", "0"], "/nope: no such folder of results"),
        (["new", "a-case", "--from-script", "nope.py"], "nope.py: there is no such script"),
    ],
)
def test_what_is_not_there_is_said_in_words(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"repro: {told}\n"
    assert os.listdir(tmp_path) == []


# -- whose files they are


def test_what_its_owner_forbids_is_no_defect_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback and exit code 70 (a folder of nights that another user had made)."""
    from repro_matrix.cli import stack

    def refused(args: object) -> int:
        raise PermissionError(13, "Permission denied", "/nights/.lock")

    monkeypatch.setattr(stack, "main", refused)
    assert cli.main(["stack", "list"]) == 2
    assert capsys.readouterr().err == "repro: /nights/.lock: Permission denied\n"


def test_a_user_without_a_home_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container whose user has a number and no name."""
    for name in ("HOME", "XDG_CACHE_HOME", "REPRO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert cli.main(["stack", "show"]) == 2
    assert "no home folder is known: set HOME, or REPRO_CACHE" in capsys.readouterr().err
    assert cli.main(["list", "case=train-step"]) == 0, "which needs none"
