"""Building: once, whole or not at all, repaired when damaged; and clear words when it cannot be done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import stack_wheels
from repro_matrix import paths
from repro_matrix.environment.stacks import (
    NOT_DUE,
    Stack,
    StackError,
    build,
    differences,
    disk,
    make_lock,
    prune,
    resolve,
    show,
    spec,
    stacks,
    swapped,
)
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks import stack as stack_module
from repro_matrix.environment.stacks.installer import explain

ROOT = Path(__file__).resolve().parents[2]
HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A conf folder, a cache and a package folder of this test's own; no network."""
    for name in [*os.environ]:
        if name.startswith(("UV_", "PIP_")):
            monkeypatch.delenv(name)
    stack_wheels.fill(tmp_path / "wheels")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "uv_cache", lambda: tmp_path / "uv")
    folder = tmp_path / "conf"
    (folder / "stack").mkdir(parents=True)
    define(folder, "small", pins=["top==1.0", "other==1.0"])
    yield folder


def define(conf: Path, name: str, lock: bool = True, **keys: object) -> None:
    values = {"slug": name, "title": name, "python": HERE, **keys}
    (conf / "stack" / f"{name}.yaml").write_text(json.dumps(values), encoding="utf-8")
    if lock:
        make_lock(name, conf=conf)


def imported(stack: Stack, package: str) -> str:
    code = f"import {package}; print({package}.__version__)"
    env = {**os.environ, **stack.environment({})}
    return subprocess.run(
        [stack.python, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def folder_of(stack: Stack) -> Path:
    return build.stacks_dir() / stack.key


# -- locks


def test_shipped_locks_belong_to_their_definitions_and_name_no_address() -> None:
    for item in stacks(ROOT / "conf"):
        if item.state in ("here", "floating"):
            continue
        path = ROOT / "conf" / "stack" / "locks" / f"{item.name}.txt"
        assert item.state in ("built", "locked"), f"{item.name}: {item.state}"
        lock = locks.read(path)
        assert lock.hashed and "://" not in lock.text and "index" not in lock.body, item.name
        pins = dict(pin.split("==") for pin in item.pins if "==" in pin)
        assert pins.items() <= lock.pins.items(), item.name


def test_a_lock_that_no_longer_fits_its_definition_is_refused(conf: Path) -> None:
    define(conf, "small", lock=False, pins=["top==1.1"])
    with pytest.raises(StackError, match=r"made from another definition.*repro stack lock small"):
        resolve("small", conf=conf)
    assert [item.state for item in stacks(conf)] == ["out of date"]


def test_a_stack_without_a_lock_says_how_to_get_one(conf: Path) -> None:
    define(conf, "bare", lock=False, pins=["top==1.0"])
    with pytest.raises(StackError, match="repro stack lock bare"):
        resolve("bare", conf=conf)


def test_a_lock_that_does_not_resolve_says_why(conf: Path) -> None:
    with pytest.raises(StackError, match="contradict each other") as caught:
        define(conf, "clash", pins=["top==1.0", "part==2.0"])
    assert caught.value.kind == "conflict" and caught.value.unavailable


def test_no_deps_are_taken_as_they_are(conf: Path) -> None:
    define(conf, "bent", pins=["part==2.0"], no_deps=["top==1.0"])  # top 1.0 wants part<2
    stack = resolve("bent", conf=conf)
    assert (imported(stack, "top"), imported(stack, "part")) == ("1.0", "2.0")


# -- building


def test_a_stack_is_built_once(conf: Path) -> None:
    said: list[str] = []
    stack = resolve("small", conf=conf, say=said.append)
    assert said and (imported(stack, "top"), imported(stack, "part")) == ("1.0", "1.0")
    assert stack.versions["top"] == "1.0" and stack.versions["python"].startswith(HERE)
    assert list(folder_of(stack).glob("env-*/lib/python3*/site-packages/top/__pycache__/*.pyc"))
    said.clear()
    assert resolve("small", conf=conf, say=said.append) == stack and said == []
    assert [item.state for item in stacks(conf)] == ["built"]


def test_two_builds_at_the_same_time_make_one(conf: Path) -> None:
    code = "import sys; from pathlib import Path; from repro_matrix.environment.stacks import resolve\n"
    code += "print(resolve('small', conf=Path(sys.argv[1])).python)"
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(conf)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    pythons = {run.communicate(timeout=600)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0] and len(pythons) == 1
    assert len(list(build.stacks_dir().glob("*/env-*"))) == 1


def test_a_killed_build_is_never_used(conf: Path) -> None:
    key = locks.key(locks.read(conf / "stack" / "locks" / "small.txt"))
    half = build.stacks_dir() / key / "env-dead" / "bin"
    half.mkdir(parents=True)
    (half / "python").symlink_to(sys.executable)
    stack = resolve("small", conf=conf)
    assert "env-dead" not in stack.python and not half.exists() and imported(stack, "top") == "1.0"


def test_a_build_that_fails_leaves_nothing(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("small", conf=conf)
    assert [path for path in build.stacks_dir().iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    "damage", ["module", "marker", *(pytest.param(name, marks=pytest.mark.slow) for name in ("package", "python"))]
)
def test_a_damaged_cache_is_repaired(conf: Path, damage: str) -> None:
    folder = folder_of(resolve("small", conf=conf))
    env = next(folder.glob("env-*"))
    if damage == "package":
        shutil.rmtree(next(env.glob("lib/python3*/site-packages/top-1.0.dist-info")))
    elif damage == "module":
        shutil.rmtree(next(env.glob("lib/python3*/site-packages/top")))
    elif damage == "python":
        (env / "bin" / "python").unlink()
        (env / "bin" / "python").symlink_to("/nowhere/python")
    else:
        (folder / "done.json").write_text("{", encoding="utf-8")
    said: list[str] = []
    again = resolve("small", conf=conf, say=said.append)
    assert any("damaged" in text for text in said) and imported(again, "top") == "1.0"


def test_a_changed_file_is_found_by_the_thorough_look(conf: Path) -> None:
    folder = folder_of(resolve("small", conf=conf))
    module = next(folder.glob("env-*/lib/python3*/site-packages/top/__init__.py"))
    module.unlink()  # never write through it: the file may be linked into uv's cache
    module.write_text("broken", encoding="utf-8")
    assert [item.whole for item in show()] == [True]
    assert [item.whole for item in show(thorough=True)] == [False]


# -- overlays and variants


def test_a_replaced_package_is_laid_over_with_what_has_to_move(conf: Path) -> None:
    base = resolve("small", conf=conf)
    over = resolve("small+top==2.0", conf=conf)
    assert over.python == base.python and over.path and over.key != base.key
    assert over.moved == {"top": ("1.0", "2.0"), "part": ("1.0", "2.0")}
    assert (imported(over, "top"), imported(over, "part"), imported(over, "other")) == ("2.0", "2.0", "1.0")
    assert (imported(base, "top"), imported(base, "part")) == ("1.0", "1.0")
    assert over.versions == {**base.versions, "top": "2.0", "part": "2.0"}
    assert resolve("small+top@2.0", conf=conf).key == over.key
    assert over.extensions_dir == base.extensions_dir  # minutes to compile, and the same


def test_a_pth_file_of_what_is_laid_over_is_not_run_and_that_is_said(conf: Path) -> None:
    starts = {"starts.pth": "import sys; sys.started = True\n"}
    stack_wheels.wheel(conf.parent / "wheels", "starts", "1.0", more=starts)
    said: list[str] = []
    over = resolve("small+starts==1.0", conf=conf, say=said.append)
    assert imported(over, "starts") == "1.0"
    assert any("starts.pth is not run" in line for line in said), said


def test_another_deepspeed_has_compiled_extensions_of_its_own(conf: Path) -> None:
    stack_wheels.wheel(conf.parent / "wheels", "deepspeed", "1.0")
    base, over = resolve("small", conf=conf), resolve("small+deepspeed==1.0", conf=conf)
    assert over.moved == {"deepspeed": ("", "1.0")} and over.extensions_dir != base.extensions_dir


def test_replacing_a_package_by_itself_is_the_base(conf: Path) -> None:
    assert resolve("small+top==1.0", conf=conf).key == resolve("small", conf=conf).key


def test_an_overlay_follows_when_its_base_was_built_again(conf: Path) -> None:
    first = resolve("small+top==2.0", conf=conf)
    prune(names=("small",))
    again = resolve("small+top==2.0", conf=conf)
    assert again.python != first.python and again.key == first.key and imported(again, "top") == "2.0"


def test_an_environment_that_is_there_can_be_laid_over(conf: Path) -> None:
    base = resolve("small", conf=conf)
    over = resolve(f"python:{base.python}+top==1.1", conf=conf)
    assert over.python == base.python and imported(over, "top") == "1.1" and imported(base, "top") == "1.0"


def test_another_torch_is_a_whole_environment_and_keeps_the_rest(conf: Path) -> None:
    define(conf, "heavy", pins=["torch==1.0", "other==1.0"])
    # other is free to move in this one, and stays all the same
    define(conf, "loose", pins=["torch==1.0"], constraints=["other<1.1"])
    base, other = resolve("heavy", conf=conf), resolve("heavy+torch==2.0", conf=conf)
    assert other.path == () and other.python != base.python
    assert (imported(other, "torch"), imported(other, "other")) == ("2.0", "1.0")
    assert imported(resolve("loose+torch==2.0", conf=conf), "other") == "1.0"
    with pytest.raises(StackError, match="cannot be laid over"):
        resolve(f"python:{base.python}+torch==2.0", conf=conf)


def test_a_probe_is_named_by_what_it_replaces() -> None:
    assert swapped("small", "Top", "2.0") == "small+top@2.0"
    assert swapped("small+top==1.1+part@1.0", "top", "2.13.0+cpu") == "small+part@1.0+top@2.13.0+cpu"
    both = spec.parse("small+part@1.0+top@2.13.0+cpu")
    assert both.base == "small" and [str(swap) for swap in both.swaps] == ["part==1.0", "top==2.13.0+cpu"]
    clone = spec.parse("small+top @ git+file:///clone@1bc123")
    assert [(swap.name, swap.url) for swap in clone.swaps] == [("top", "git+file:///clone@1bc123")]


# -- the user's own


def test_a_requirements_file_is_a_stack(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("other<1.1\n", encoding="utf-8")
    mine = tmp_path / "requirements.txt"
    mine.write_text(f"# python: {HERE}\n-r more.txt\ntop==1.1\n", encoding="utf-8")
    stack = resolve(str(mine), conf=conf)
    assert (imported(stack, "top"), imported(stack, "part"), imported(stack, "other")) == ("1.1", "1.0", "1.0")
    (tmp_path / "more.txt").write_text("other==1.1\n", encoding="utf-8")
    assert imported(resolve(str(mine), conf=conf), "other") == "1.1"


def test_another_torch_under_a_users_own_lock_keeps_the_rest(conf: Path, tmp_path: Path) -> None:
    mine = tmp_path / "requirements.txt"
    mine.write_text(f"# python: {HERE}\ntorch==1.0\nother==1.0\ntop==1.1\n", encoding="utf-8")
    good, bad = resolve(str(mine), conf=conf), resolve(f"{mine}+torch@2.0+top@2.0", conf=conf)
    assert (imported(bad, "torch"), imported(bad, "top"), imported(bad, "other")) == ("2.0", "2.0", "1.0")
    assert bad.path == () and set(differences(good.versions, bad.versions)) == {"torch", "top", "part"}
    assert imported(resolve(f"{mine}+top@2.0", conf=conf), "torch") == "1.0"


def test_differences_leave_out_what_torch_brings() -> None:
    good = {"python": "3.10.1", "torch": "2.2", "nvidia-nccl-cu12": "1", "triton": "2", "a": "1", "b": "1"}
    bad = {"python": "3.11.1", "torch": "2.6", "nvidia-nccl-cu12": "2", "triton": "3", "a": "1", "c": "3"}
    assert differences(good, bad) == {"torch": ("2.2", "2.6"), "b": ("1", ""), "c": ("", "3")}


def test_a_uv_lock_is_a_stack(conf: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    text = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["top==1.0"]\n'
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    build.run_uv("lock", ["lock", "--project", str(project)])
    assert imported(resolve(str(project / "uv.lock"), conf=conf), "part") == "1.0"


def test_existing_environments() -> None:
    here = resolve("current")
    assert here.python == sys.executable and "pytest" in here.versions
    assert resolve(f"python:{sys.executable}").versions == here.versions
    assert len({here, here}) == 1


def test_the_same_environment_in_two_checkouts_has_one_folder_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stack_module, "look", lambda python: {"python": "3.11.7", "torch": "2.13.0", "ruff": str(len(python))}
    )
    places = [tmp_path / name for name in ("one", "other")]
    for place in places:
        place.touch()
    here, there = (stack_module.existing("current", str(place)) for place in places)
    assert here.label_key == there.label_key and here.key != there.key  # what is compiled there is not shared
    named = [stack_module.existing(f"python:{place}", str(place)) for place in places]
    assert len({stack.label_key for stack in named}) == 2


def test_what_a_process_of_a_stack_finds_in_its_environment() -> None:
    stack = Stack("x", "/env/bin/python", path=("/over",), key="abc")
    env = stack.environment({"PYTHONPATH": "/mine", "PATH": "/usr/bin"})
    assert (env["PYTHONPATH"], env["PATH"]) == ("/over:/mine", "/env/bin:/usr/bin")
    assert env["TORCH_EXTENSIONS_DIR"].endswith("extensions/abc")
    assert "PYTHONPATH" not in Stack("x", "/env/bin/python").environment({})


def test_a_floating_stack_is_kept_for_a_day_and_when_the_index_is_away(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(conf, "moving", lock=False, floating=True, pins=["top"])
    assert resolve("moving", conf=conf).versions["top"] == "2.0"
    stack_wheels.wheel(conf.parent / "wheels", "top", "3.0")
    assert resolve("moving", conf=conf).versions["top"] == "2.0"
    kept = next((paths.cache_dir() / "locks").glob("moving-*.txt"))
    os.utime(kept, (0, 0))
    monkeypatch.setattr(locks, "run_uv", lambda *_, **__: (_ for _ in ()).throw(StackError("index", "away")))
    assert resolve("moving", conf=conf).versions["top"] == "2.0"
    monkeypatch.undo()


def test_a_floating_stack_follows_its_index(conf: Path) -> None:
    define(conf, "moving", lock=False, floating=True, pins=["top"])
    assert resolve("moving", conf=conf).versions["top"] == "2.0"
    stack_wheels.wheel(conf.parent / "wheels", "top", "3.0")
    make_lock("moving", conf=conf)
    assert resolve("moving", conf=conf).versions["top"] == "3.0"


# -- pruning


def test_prune_takes_what_is_old_or_unfinished_and_leaves_what_runs(conf: Path) -> None:
    stack = resolve("small", conf=conf)
    (build.stacks_dir() / "feedbeef" / "env-half").mkdir(parents=True)
    done = prune()
    assert [item.key for item in done.removed] == ["feedbeef"]
    assert [(item.name, why) for item, why in done.kept] == [("small", NOT_DUE)]
    sleeper = subprocess.Popen([stack.python, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        done = prune(everything=True)
        assert done.removed == () and f"process {sleeper.pid}" in done.kept[0][1]
    finally:
        sleeper.communicate(b"\n", timeout=200)
    assert len(prune(everything=True).removed) == 1 and show() == []


# -- what can go wrong


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("smal", "usage", "did you mean 'small'"),
        ("small+top==9.9", "version", r"top has no release 9\.9; the nearest are 1\.1, 2\.0"),
        ("small+nosuch==1.0", "version", "nosuch was not found"),
        ("small+old==1.0", "wheel", "nothing to install for this Python"),
        ("small+future==1.0", "wheel", "nothing to install for this Python"),
        ("small+top>=1", "usage", "NAME@VERSION|no stack named"),
        ("small+top==1.0+top==2.0", "usage", "twice"),
        ("+top==1.0", "usage", "no base"),
        ("python:/no/such/python", "python", "no interpreter at /no/such/python"),
        ("no/such/requirements.txt", "usage", "there is no such file"),
        ("small+top", "usage", "'top' is not NAME@VERSION"),
    ],
)
def test_what_cannot_be_had_is_said(conf: Path, text: str, kind: str, words: str) -> None:
    with pytest.raises(StackError, match=words) as caught:
        resolve(text, conf=conf)
    assert caught.value.kind == kind


def test_a_python_that_does_not_run_is_said(conf: Path, tmp_path: Path) -> None:
    bad = tmp_path / "python"
    bad.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    bad.chmod(0o755)
    with pytest.raises(StackError, match="does not run"):
        resolve(f"python:{bad}")


def test_a_python_that_is_not_here_is_said(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    define(conf, "far", python="3.7", pins=["part==1.0"])
    with pytest.raises(StackError, match=r"Python 3\.7") as caught:
        resolve("far", conf=conf)
    assert caught.value.kind == "python"


def test_an_index_out_of_reach_is_said(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(StackError, match="out of reach") as caught:
        define(conf, "away", pins=["sampleproject==1.0"])
    assert caught.value.kind == "index" and caught.value.exit_code == 3


def test_a_nightly_without_its_index_says_what_to_set(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRO_NIGHTLY_INDEX", raising=False)
    with pytest.raises(StackError, match="REPRO_NIGHTLY_INDEX=ADDRESS"):
        resolve("nightly", conf=ROOT / "conf")


def test_too_little_room_is_said_before_anything_is_downloaded(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    monkeypatch.setattr(build, "run_uv", _would_download(build.run_uv))
    with pytest.raises(StackError, match=r"about 0\.5 GB is needed .* 0 MB is free") as caught:
        resolve("small", conf=conf)
    assert caught.value.kind == "disk" and not list(build.stacks_dir().glob("*/done.json"))


def _would_download(run: object) -> object:
    def wrapped(what: str, args: list[str], **more: object) -> str:
        return run(what, args, **more) + ("Would download 3 packages\n" if "--dry-run" in args else "")  # type: ignore[operator]

    return wrapped


def test_a_disk_that_fills_up_is_said_with_what_is_needed(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build.run_uv

    def full(what: str, args: list[str], **more: object) -> str:
        if "--compile-bytecode" in args:
            raise explain(what, "error: Failed to write\n  cause: No space left on device (os error 28)")
        return run(what, args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "run_uv", full)
    with pytest.raises(StackError, match=r"the disk is full(.|\n)*is needed") as caught:
        resolve("small", conf=conf)
    assert caught.value.kind == "disk" and caught.value.infra
    monkeypatch.setattr(build, "run_uv", run)
    assert imported(resolve("small", conf=conf), "top") == "1.0"


def test_a_file_that_differs_from_the_lock_is_refused(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(conf.parent / "fresh"))  # the first one holds the file as it was locked
    changed = conf.parent / "wheels" / "top-1.0-py3-none-any.whl"
    changed.unlink()
    stack_wheels.wheel(conf.parent / "wheels", "top", "1.0", ["part<3"])
    with pytest.raises(StackError, match="differs from what was locked") as caught:
        resolve("small", conf=conf)
    assert caught.value.kind == "hash"
