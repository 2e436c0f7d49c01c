"""An overlay takes over what another has compiled of the same sources."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from repro_matrix.environment.stacks import overlay
from repro_matrix.environment.stacks.compiled import take_over


def package(folder: Path, written: float, **modules: str) -> Path:
    (folder / "pack").mkdir(parents=True)
    for name, text in modules.items():
        path = folder / "pack" / f"{name}.py"
        path.write_text(text)
        os.utime(path, (written, written))
    return folder


def compiled_of(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.glob("pack/__pycache__/*.pyc")}


WHERE = "def where():\n    return where.__code__.co_filename\n"


def test_what_is_alike_is_not_compiled_again_and_says_where_it_lies_now(tmp_path: Path) -> None:
    one = package(tmp_path / "one", 1e9, __init__="", alike=WHERE, changed="x = 1\n", gone="", unused="")
    for name in ("__init__", "alike", "changed", "gone"):
        py_compile.compile(str(one / "pack" / f"{name}.py"))
    other = package(tmp_path / "other", 1.2e9, __init__="", alike=WHERE, changed="x = 2\n", unused="", new="")
    assert take_over(other, [one]) == 2 and compiled_of(other) == {"__init__", "alike"}
    code = "import pack.alike, pack.changed; print(pack.alike.where(), pack.changed.x)"
    env = {**os.environ, "PYTHONPATH": str(other), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-v", "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == [str(other / "pack" / "alike.py"), "2"]
    read = [line for line in done.stderr.splitlines() if "matches" in line and str(other) in line]
    assert [line for line in read if line.endswith("alike.py")] and not [each for each in read if "changed.py" in each]


def test_what_was_compiled_of_another_text_is_not_taken(tmp_path: Path) -> None:
    one = package(tmp_path / "one", 1e9, __init__="", edited="x = 1\n")
    py_compile.compile(str(one / "pack" / "edited.py"))
    (one / "pack" / "edited.py").write_text("x = 3\n")  # as long, but written later than what was compiled
    other = package(tmp_path / "other", 1e9, __init__="", edited="x = 3\n")
    assert take_over(other, [one, tmp_path / "pruned"]) == 0 and not compiled_of(other)


def test_the_releases_next_to_it_are_looked_through_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    for used, (key, python, version) in enumerate(
        [("a", "py", "4.9.0"), ("b", "py", "4.40.0"), ("c", "py", "4.39.3"), 
         ("d", "other", "4.39.1"), ("e", "py", "4.51.3")]
    ):  # fmt: skip
        folder = tmp_path / "stacks" / key
        folder.mkdir(parents=True)
        done = {"python": python, "overlay": f"/{version}", "versions": {"transformers": version}}
        (folder / "done.json").write_text(json.dumps(done))
        (folder / "used").touch()
        os.utime(folder / "used", (used, used))

    def near(wanted: str) -> list[str]:
        return [str(path) for path in overlay._neighbours("py", [Requirement(wanted)])]

    assert near("transformers==4.39.0") == ["/4.9.0", "/4.39.3"]
    assert near("transformers==4.40.0") == ["/4.40.0", "/4.51.3"]
    assert near("transformers==5.0.0") == ["/4.51.3", "/4.39.3"]  # nothing above: the one used last
    assert near("transformers @ git+file:///src") == near("accelerate==1.0.0") == ["/4.51.3", "/4.39.3"]
