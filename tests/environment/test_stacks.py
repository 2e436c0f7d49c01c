"""Stacks are locked, built once, completely or not at all, and repaired; errors have a kind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import requests
import stack_wheels
from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, ProjectPage, PyPISimple
from repro_matrix import paths
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import (
    Stack,
    StackError,
    build,
    defined_stacks,
    make_lock,
    package_index,
    prune_stacks,
    resolve,
    spec,
)
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.package_index import Release

ROOT = Path(__file__).resolve().parents[2]
HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for this test, and no settings of uv or pip."""
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conf folder and a folder of packages for this test; no network."""
    stack_wheels.fill(tmp_path / "wheels")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    (tmp_path / "conf" / "stack").mkdir(parents=True)
    monkeypatch.setattr(paths, "CONF", tmp_path / "conf")
    define(tmp_path / "conf", "small", pins=["top==1.0", "other==1.0"])
    return tmp_path / "conf"


def define(conf: Path, name: str, lock: bool = True, **keys: object) -> None:
    values = {"slug": name, "title": name, "python": HERE, **keys}
    (conf / "stack" / f"{name}.yaml").write_text(json.dumps(values), encoding="utf-8")
    if lock:
        make_lock(name)


def versions(stack: Stack, *packages: str) -> tuple[str, ...]:
    """The versions that a process of the stack imports."""
    code = (
        "import importlib, sys; print(*(importlib.import_module(n).__version__ for n in"
        " sys.argv[1:]))"
    )
    env = {**os.environ, **stack.environment({})}
    command = [stack.python, "-c", code, *packages]
    return tuple(
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    )


# -- locks


def test_shipped_locks_fit_their_definitions_and_contain_hashes_and_no_address() -> None:
    for item in defined_stacks():
        if item.state in ("here", "floating"):
            continue
        lock = locks.read_lock(ROOT / "conf" / "stack" / "locks" / f"{item.name}.txt")
        assert item.state in ("built", "locked"), f"{item.name}: {item.state}"
        assert "://" not in lock.text and "index" not in lock.body, item.name
        pinned = [
            line for line in lock.body.splitlines() if line.strip() and not line.startswith(" ")
        ]
        assert pinned and all(line.endswith("\\") for line in pinned), (
            f"{item.name}: a pin without hashes"
        )
        pins = dict(pin.split("==") for pin in item.pins if "==" in pin)
        assert pins.items() <= lock.pins.items(), item.name


def test_resolve_outdated_or_missing_lock_raises(conf: Path) -> None:
    define(conf, "small", lock=False, pins=["top==1.1"])
    define(conf, "bare", lock=False, pins=["top==1.0"])
    assert {item.name: item.state for item in defined_stacks()} == {
        "small": "out of date",
        "bare": "not locked",
    }
    for name in ("small", "bare"):
        with pytest.raises(StackError, match=f"repro stack lock {name}"):
            resolve(name)


def test_no_deps_are_installed_as_they_are(conf: Path) -> None:
    define(conf, "bent", pins=["part==2.0"], no_deps=["top==1.0"])  # top 1.0 requires part<2
    assert versions(resolve("bent"), "top", "part") == ("1.0", "2.0")


def test_floating_stack_is_resolved_daily_also_offline(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(conf, "moving", lock=False, floating=True, pins=["top"])
    assert resolve("moving").versions["top"] == "2.0"
    stack_wheels.wheel(conf.parent / "wheels", "top", "3.0")
    assert resolve("moving").versions["top"] == "2.0"  # the same day
    cached = next((paths.cache_dir() / "locks").glob("moving-*.txt"))
    os.utime(cached, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(locks, "run_uv", mock.Mock(side_effect=StackError("away", "infra")))
        assert resolve("moving").versions["top"] == "2.0"
    make_lock("moving")
    assert resolve("moving").versions["top"] == "3.0"


# -- building


def test_build_happens_once(conf: Path) -> None:
    log: list[str] = []
    stack = resolve("small", say=log.append)
    assert log and versions(stack, "top", "part") == ("1.0", "1.0")
    assert stack.versions["top"] == "1.0" and stack.versions["python"].startswith(HERE)
    assert list(
        (build.stacks_dir() / stack.key).glob(
            "env-*/lib/python3*/site-packages/top/__pycache__/*.pyc"
        )
    )
    log.clear()
    assert resolve("small", say=log.append) == stack and log == []
    assert [item.state for item in defined_stacks()] == ["built"]


def test_concurrent_builds_make_one_environment(conf: Path) -> None:
    code = (
        "import sys, pathlib; from repro_matrix import paths; paths.CONF ="
        " pathlib.Path(sys.argv[1])\n"
    )
    code += "from repro_matrix.environment.stacks import resolve; print(resolve('small').python)"
    command = [sys.executable, "-c", code, str(conf)]
    runs = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    pythons = {run.communicate(timeout=600)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0] and len(pythons) == 1
    assert len(list(build.stacks_dir().glob("*/env-*"))) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_failed_build_leaves_nothing(
    conf: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(build, "inspect_python", mock.Mock(side_effect=error))
    with pytest.raises((KeyboardInterrupt, StackError)) as caught:
        resolve("small")
    assert [path for path in build.stacks_dir().iterdir() if path.is_dir()] == []
    assert not isinstance(caught.value, StackError) or caught.value.infra_error


def test_damaged_cache_is_rebuilt(conf: Path) -> None:
    folder = build.stacks_dir() / resolve("small").key
    for damage in ("package", "marker"):
        env = next(folder.glob("env-*"))
        if damage == "marker":
            (folder / "done.json").write_text("{", encoding="utf-8")
        else:
            shutil.rmtree(next(env.glob("lib/python3*/site-packages/top-1.0.dist-info")))
        assert versions(resolve("small"), "top") == ("1.0",) and next(folder.glob("env-*")) != env


def test_prune_removes_old_named_and_unfinished_stacks(conf: Path) -> None:
    resolve("small")
    (build.stacks_dir() / "feedbeef" / "env-half").mkdir(parents=True)
    assert [(item.name, item.whole) for item in stacks.cached_stacks(["small"])] == [
        ("small", True)
    ]
    assert [item.key for item in prune_stacks()] == ["feedbeef"]
    assert [item.name for item in prune_stacks(older_than_days=0)] == [
        "small"
    ] and stacks.cached_stacks() == []


# -- overlays, other torches


def test_overlay_contains_the_replaced_package_and_what_has_to_move_with_it(conf: Path) -> None:
    stack_wheels.wheel(conf.parent / "wheels", "deepspeed", "1.0")
    base, over = resolve("small"), resolve("small+top==2.0")
    assert over.python == base.python and over.path and over.key != base.key
    assert over.moved == {"top": ("1.0", "2.0"), "part": ("1.0", "2.0")}
    assert versions(over, "top", "part", "other") == ("2.0", "2.0", "1.0")
    assert versions(base, "top", "part") == ("1.0", "1.0")
    assert over.versions == {**base.versions, "top": "2.0", "part": "2.0"}
    assert resolve("small+top@2.0").key == over.key
    assert over.extensions_dir == base.extensions_dir  # minutes to compile, and the same
    assert resolve("small+top==1.0").key == base.key  # replaced by itself
    assert versions(resolve(f"python:{base.python}+top==1.1"), "top") == ("1.1",)
    compiled = resolve("small+deepspeed==1.0")
    assert (
        compiled.moved == {"deepspeed": ("", "1.0")}
        and compiled.extensions_dir != base.extensions_dir
    )
    prune_stacks(names=("small",))
    again = resolve("small+top==2.0")  # follows its base, which is built again
    assert (
        again.python != over.python and again.key == over.key and versions(again, "top") == ("2.0",)
    )


def test_another_torch_is_a_whole_environment_and_keeps_the_rest(conf: Path) -> None:
    define(conf, "loose", pins=["torch==1.0", "other<1.1"])  # other could move, and stays
    base, other = resolve("loose"), resolve("loose+torch==2.0")
    assert other.path == () and other.python != base.python
    assert versions(other, "torch", "other") == ("2.0", "1.0")
    with pytest.raises(StackError) as caught:
        resolve(f"python:{base.python}+torch==2.0")
    assert caught.value.kind == "usage"


def test_resolve_compatible_leaves_conflicting_companions_to_the_installer(conf: Path) -> None:
    stack = stacks.resolve_compatible(f"python:{resolve('small').python}+top@2.0+part@1.0", {"top"})
    assert versions(stack, "top", "part") == ("2.0", "2.0") and stack.name.endswith("+top@2.0")
    with pytest.raises(StackError):
        stacks.resolve_compatible(f"{stack.name}+part@1.0", {"top", "part"})


def test_with_release_names_a_probe_that_parses() -> None:
    name = stacks.with_release("small+top==1.1+part@1.0", "Top", "2.13.0+cpu")
    assert name == "small+part@1.0+top@2.13.0+cpu"
    assert spec.parse_stack(name).base == "small" and list(
        map(str, spec.parse_stack(name).swaps)
    ) == [
        "part==1.0",
        "top==2.13.0+cpu",
    ]
    clone = spec.parse_stack("small+top @ git+file:///clone@1bc123")
    assert [(swap.name, swap.url) for swap in clone.swaps] == [("top", "git+file:///clone@1bc123")]


def test_differences_leave_out_what_torch_brings() -> None:
    good = {
        "python": "3.10.1",
        "torch": "2.2",
        "nvidia-nccl-cu12": "1",
        "triton": "2",
        "a": "1",
        "b": "1",
    }
    bad = {
        "python": "3.11.1",
        "torch": "2.6",
        "nvidia-nccl-cu12": "2",
        "triton": "3",
        "a": "1",
        "c": "3",
    }
    assert stacks.version_differences(good, bad) == {
        "torch": ("2.2", "2.6"),
        "b": ("1", ""),
        "c": ("", "3"),
    }


# -- the user's own


def test_requirements_file_is_a_stack_and_follows_its_includes(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("other<1.1\n", encoding="utf-8")
    mine = tmp_path / "requirements.txt"
    mine.write_text(f"# python: {HERE}\n-r more.txt\ntorch==1.0\ntop==1.1\n", encoding="utf-8")
    stack = resolve(str(mine))
    assert versions(stack, "top", "part", "other") == ("1.1", "1.0", "1.0")
    other = resolve(f"{mine}+torch@2.0+top@2.0")  # another torch keeps the rest
    assert versions(other, "torch", "top", "other") == ("2.0", "2.0", "1.0")
    assert other.path == () and set(stacks.version_differences(stack.versions, other.versions)) == {
        "torch",
        "top",
        "part",
    }
    (tmp_path / "more.txt").write_text("other==1.1\n", encoding="utf-8")
    assert versions(resolve(str(mine)), "other") == ("1.1",)


def test_uv_lock_is_a_stack(conf: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    text = (
        '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies ='
        ' ["top==1.0"]\n'
    )
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    locks.run_uv("lock", ["lock", "--project", str(project)])
    assert versions(resolve(str(project / "uv.lock")), "part") == ("1.0",)


def test_existing_environment_has_one_label_in_every_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = resolve("current")
    assert here.python == sys.executable and "pytest" in here.versions
    assert resolve(f"python:{sys.executable}").versions == here.versions
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    monkeypatch.setattr(spec, "inspect_python", lambda python: ({**versions, "ruff": python}, ()))
    one, other = (spec.existing("current", path) for path in ("/one/python", "/other/python"))
    assert one.label_key == other.label_key and one.key != other.key
    assert (
        len(
            {spec.existing("python:x", path).label_key for path in ("/one/python", "/other/python")}
        )
        == 2
    )


def test_python_that_prints_by_itself_is_a_stack(tmp_path: Path) -> None:
    """A sitecustomize that greets, an exit handler, a wrapper of a cluster."""
    noisy = tmp_path / "python"
    noisy.write_text(
        f"#!/bin/sh\nprintf welcome\n{sys.executable} \"$@\"\necho '[bye]'\n", encoding="utf-8"
    )
    noisy.chmod(0o755)
    assert spec.existing("python:x", str(noisy)).versions == resolve("current").versions


# -- errors


def test_resolve_errors_have_a_kind_and_a_hint(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    for text, kind, hint in [
        ("smal", "usage", "did you mean 'small'"),
        ("small+top==9.9", "unavailable", "top==9.9"),
        ("small+top==2.0+part==1.0", "unavailable", "part"),
        ("small+top>=1", "usage", "no stack named"),
        ("small+top==1.0+top==2.0", "usage", "twice"),
        ("+top==1.0", "usage", "no base"),
        ("python:/no/such/python", "python", "/no/such/python"),
        ("python:/bin/false", "python", "does not run"),
        ("python:/bin/echo", "python", "does not run"),
        ("no/such/requirements.txt", "usage", "No such file"),
    ]:
        with pytest.raises(StackError, match=hint) as caught:
            resolve(text)
        assert (caught.value.kind, caught.value.exit_code) == (kind, 2)
    with pytest.raises(StackError, match=r"3\.7") as caught:
        define(conf, "far", python="3.7", pins=["part==1.0"])
        resolve("far")
    assert caught.value.kind == "python"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(StackError, match="sampleproject") as caught:
        define(conf, "away", pins=["sampleproject==1.0"])
    assert (caught.value.kind, caught.value.exit_code) == ("infra", 3)
    full = locks.uv_error(
        "stack x", "error: Failed to write\n  cause: No space left on device (os error 28)"
    )
    assert full.kind == "infra" and "os error 28" in str(full)
    assert locks.uv_error("stack x", "error: Hash mismatch for `top==1.0`").kind == "unavailable"


# -- releases

PAGE = """<!DOCTYPE html><html><body>
<a href="demo-1.0.tar.gz">demo-1.0.tar.gz</a>
<a href="demo-1.0-py3-none-any.whl" data-yanked="">demo-1.0-py3-none-any.whl</a>
<a href="demo-1.10-py3-none-any.whl" data-requires-python="&gt;=3.9">demo-1.10-py3-none-any.whl</a>
<a href="demo-1.9-py3-none-any.whl" data-yanked="unfixed">demo-1.9-py3-none-any.whl</a>
<a href="demo-1.11rc1-py3-none-any.whl">demo-1.11rc1-py3-none-any.whl</a>
<a href="demo-1.2.win32.exe">demo-1.2.win32.exe</a>
<a href="demo-1.10.1-py3-none-any.whl">demo-1.10.1-py3-none-any.whl</a>
</body></html>"""
RANGE = [
    Release(version)
    for version in ("4.35.2", "4.36.0", "4.36.2", "5.0.0", "5.23.0", "5.23.1", "5.24.0")
]


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that the index was asked for: it has one page; port 9 cannot be reached."""
    asked: list[str] = []

    def page(self: PyPISimple, package: str, timeout: object) -> ProjectPage:
        asked.append(package)
        if ":9/" in self.endpoint:
            raise requests.ConnectionError("refused")
        if package != "demo":
            raise NoSuchProjectError(package, self.endpoint)
        return ProjectPage.from_html(package, PAGE)

    monkeypatch.setattr(PyPISimple, "get_project_page", page)
    return asked


def listed(found: Sequence[Release]) -> list[str]:
    return [release.version for release in found]


def test_releases_leave_out_yanked_and_pre_releases_unless_requested(requested: list[str]) -> None:
    assert listed(package_index.releases("Demo")) == [
        "1.0",
        "1.10",
        "1.10.1",
    ]  # one file of 1.0 is yanked, the other is not
    assert listed(package_index.releases("demo", yanked=True)) == ["1.0", "1.9", "1.10", "1.10.1"]
    assert listed(package_index.releases("demo", pre=True)) == ["1.0", "1.10", "1.10.1", "1.11rc1"]
    with pytest.raises(StackError, match="did you mean 'transformers'"):
        package_index.releases("transfomers")
    assert requested == ["demo"] * 3 + ["transfomers"]


def test_releases_of_an_index_that_cannot_be_reached_are_an_error_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, requested: list[str]
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(StackError) as caught:
        package_index.releases("demo")
    assert caught.value.infra_error


def test_indexes_prefer_uv_settings_to_pip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package_index.indexes() == [PYPI_SIMPLE_ENDPOINT]
    monkeypatch.setenv("PIP_INDEX_URL", "http://pip/simple")
    assert package_index.indexes() == ["http://pip/simple"]
    monkeypatch.setenv("UV_INDEX_URL", "http://uv/simple")
    monkeypatch.setenv("UV_INDEX", "mine=http://a/simple http://b/simple")
    assert package_index.indexes() == ["http://a/simple", "http://b/simple", "http://uv/simple"]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://default/simple")
    assert package_index.indexes()[-1] == "http://default/simple"


def test_between_and_exact_select_releases_or_name_the_nearest() -> None:
    def between_of(text: str) -> list[str]:
        return listed(package_index.between(RANGE, *package_index.parse_between(text)))

    assert between_of("4.36..5.23") == [
        "4.36.0",
        "4.36.2",
        "5.0.0",
        "5.23.0",
        "5.23.1",
    ], "with its end's patches"
    assert between_of("5.24..") == ["5.24.0"] and between_of("..") == listed(RANGE)
    for text in ("4.36", "4.36..new", "4.45..4.36", "6..7"):
        with pytest.raises(StackError):
            between_of(text)
    assert package_index.exact("demo", RANGE, "5.0") == "5.0.0"
    with pytest.raises(StackError, match=r"4\.36\.0, 4\.36\.2, 5\.0\.0, 5\.23\.0"):
        package_index.exact("demo", RANGE, "4.37")
