"""An environment that was changed after it was installed is reported, and is another stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.environment.stacks import Stack, integrity
from repro_matrix.environment.stacks.integrity import PackageChange, with_changes
from repro_matrix.environment.stacks.spec import inspect_python
from stack_wheels import wheel

SOURCE = "def wrap(): ...\n"


def install(folder: Path, name: str = "torch") -> None:
    """Unpack a wheel of the package; its files are older than their RECORD."""
    more = {f"{name}/nn/fsdp.py": SOURCE, f"{name}/l.so": "ELF"}
    with zipfile.ZipFile(wheel(folder, name, "2.13.0", more=more)) as packed:
        packed.extractall(folder)
    for file in (folder / name).rglob("*.*"):
        os.utime(file, (1, 1))


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[PackageChange]]:
    """``changes()``: those in an environment whose packages are in ``tmp_path``."""
    monkeypatch.setattr(integrity, "inspect_python", lambda python: ({}, [tmp_path]))

    def found() -> list[PackageChange]:
        integrity.changes.cache_clear()
        return list(integrity.changes("python"))

    return found


@pytest.mark.parametrize(
    ("file", "text", "time", "reported"),
    [
        ("torch/nn/fsdp.py", SOURCE, 2_000_000_000, False),  # a copied environment
        (
            "torch/nn/fsdp.py",
            "def wrap(): 1/0\n",
            2_000_000_000,
            True,
        ),  # as long as before, and younger
        ("torch/nn/fsdp.py", "longer than before, with its old time\n", 1, True),
        ("torch/l.so", "ELF and more", 1, True),
        ("torch/nn/fsdp.py", None, 1, True),  # deleted
    ],
)
def test_edited_files_compares_with_record(
    tmp_path: Path, changes: Any, file: str, text: str | None, time: int, reported: bool
) -> None:
    install(tmp_path)
    assert changes() == []
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
        os.utime(tmp_path / file, (time, time))
    assert [change.note.partition(" ")[0] for change in changes()] == [file] * reported


def test_package_that_is_no_release_is_a_change(tmp_path: Path, changes: Any) -> None:
    tree = tmp_path / "my torch"
    for name in ("pip", "torch"):  # of pip no file is compared
        install(tmp_path, name)
        (tmp_path / name / "__init__.py").write_text("x = 2222\n")
    assert [change.package for change in changes()] == ["torch"]
    (tmp_path / "torch-2.13.0.dist-info" / "RECORD").unlink()
    assert changes() == [], "of a Linux distribution"
    (tree / "torch").mkdir(parents=True)
    (tree / "torch" / "patched.py").write_text("1\n")

    def changes_from(origin: dict[str, Any] | str) -> list[PackageChange]:
        (tmp_path / "torch-2.13.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
        return list(changes())

    (one,) = changes_from({"url": tree.as_uri(), "dir_info": {"editable": True}})
    assert one.package == "torch" and tree.as_uri() in one.note
    (tree / "torch" / "patched.py").write_text("1/0\n")
    (other,) = changes_from({"url": tree.as_uri(), "dir_info": {}})
    assert other.digest != one.digest, "another patch is another stack"
    (fork,) = changes_from(
        {"url": "https://example.org/torch", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    )
    assert "https://example.org/torch" in fork.note
    assert changes_from({"url": "file:///wheels/torch.whl", "archive_info": {}}) == []


def test_changed_environment_or_overlay_is_another_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def base_has(*changes: PackageChange) -> None:
        monkeypatch.setattr(integrity, "changes", lambda python: changes)

    note = "torch/a.py is not as installed"
    stack = Stack("current", "/env/bin/python", {"torch": "2.13.0"}, key="k", content="c")
    base_has()
    assert with_changes(stack) is stack
    base_has(PackageChange("torch", note, "one"))
    one = with_changes(stack)
    assert one.changed == (note,) and one.key != "k" and one.content not in ("c", "")
    assert one.extensions_dir == stack.extensions_dir, "nothing is compiled again for it"
    base_has(PackageChange("torch", note, "other"))
    assert with_changes(stack).label_key != one.label_key, "each edit has its own results"
    install(tmp_path)
    moved = {"torch": ("2.12.0", "2.13.0")}
    over = Stack("s+torch@2.13.0", "/env/bin/python", path=(str(tmp_path),), moved=moved, key="k")
    assert with_changes(over) is over, "the overlay hides changes of its base"
    (tmp_path / "torch/nn/fsdp.py").write_text("def wrap(): 1/0\n")
    assert with_changes(over).changed and with_changes(over).key != "k"


def test_package_folders_include_the_base_environment_and_pth_folders(tmp_path: Path) -> None:
    outer, beside = tmp_path / "outer", tmp_path / "beside"
    beside.mkdir()
    make = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(outer)]
    subprocess.run(make, check=True)
    (packages,) = (outer / "lib").glob("python*/site-packages")
    (packages / "more.pth").write_text(f"{beside}\n")
    _, folders = inspect_python(str(outer / "bin" / "python"))
    assert packages in folders and beside in folders
    assert any(
        folder.name in ("site-packages", "dist-packages")
        for folder in folders
        if folder != packages
    )
