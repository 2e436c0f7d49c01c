"""An environment that was changed after it was installed is reported, and is another stack."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repro_matrix.environment.stacks import Stack, spec
from repro_matrix.environment.stacks.spec import Change, inspect_python, with_changes

SOURCES = {
    "torch/__init__.py": "__version__ = '2.13.0'\n",
    "torch/nn/fsdp.py": "def wrap(): ...\n",
    "torch/l.so": "ELF",
}


def install(folder: Path, name: str = "torch") -> None:
    """Write a package as an installer does: its files, then RECORD."""
    rows = []
    for path, text in SOURCES.items():
        file = folder / path.replace("torch", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        os.utime(file, (1, 1))
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{file.relative_to(folder)},sha256={digest},{len(text)}")
    info = folder / f"{name}-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]) + "\n")


def edited(folder: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "inspect_python", lambda python: ({}, [folder]))
        spec.changes.cache_clear()
        return [change.note.partition(" ")[0] for change in spec.changes("python")]


def rewrite(path: Path, text: str, time: int | None = None) -> None:
    path.write_text(text)
    if time is not None:
        os.utime(path, (time, time))


@pytest.mark.parametrize(
    ("file", "text", "time", "reported"),
    [
        ("torch/nn/fsdp.py", SOURCES["torch/nn/fsdp.py"], 2_000_000_000, False),  # a copied environment
        ("torch/nn/fsdp.py", "def wrap(): 1/0\n", None, True),  # as long as before, and younger
        ("torch/nn/fsdp.py", "longer than before, with its old time\n", 1, True),
        ("torch/l.so", "ELF and more", 1, True),
        ("torch/nn/fsdp.py", None, None, True),  # deleted
    ],
)
def test_edited_files_compares_with_record(
    tmp_path: Path, file: str, text: str | None, time: int | None, reported: bool
) -> None:
    install(tmp_path)
    assert edited(tmp_path) == []
    rewrite(tmp_path / file, text, time) if text is not None else (tmp_path / file).unlink()
    assert edited(tmp_path) == [file] * reported


def test_edited_files_ignores_other_packages_and_packages_without_record(tmp_path: Path) -> None:
    install(tmp_path, "pip")
    install(tmp_path)
    (tmp_path / "torch-2.13.0.dist-info" / "RECORD").unlink()
    for name in ("pip", "torch"):
        (tmp_path / name / "__init__.py").write_text("x = 2222\n")
    assert edited(tmp_path) == []


def test_package_from_a_folder_or_repository_is_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, tree = tmp_path / "site", tmp_path / "my torch"
    install(site)
    (tree / "torch").mkdir(parents=True)
    (tree / "torch" / "patched.py").write_text("1\n")
    monkeypatch.setattr(spec, "inspect_python", lambda python: ({}, [site]))

    def changes(origin: str) -> list[Change]:
        (site / "torch-2.13.0.dist-info" / "direct_url.json").write_text(origin)
        spec.changes.cache_clear()
        return list(spec.changes("python"))

    (one,) = changes(json.dumps({"url": tree.as_uri(), "dir_info": {"editable": True}}))
    assert one.package == "torch" and tree.as_uri() in one.note
    (tree / "torch" / "patched.py").write_text("1/0\n")
    (other,) = changes(json.dumps({"url": tree.as_uri(), "dir_info": {}}))
    assert other.digest != one.digest, "another patch is another stack"
    (fork,) = changes('{"url": "https://example.org/torch", "vcs_info": {"vcs": "git", "commit_id": "abc"}}')
    assert "https://example.org/torch" in fork.note
    for harmless in ('{"url": "file:///wheels/torch.whl", "archive_info": {}}', "nonsense"):
        assert changes(harmless) == []


def fake(monkeypatch: pytest.MonkeyPatch, *changes: Change) -> None:
    monkeypatch.setattr(spec, "changes", lambda python: changes)


def change(digest: str = "one", package: str = "torch") -> Change:
    return Change(package, "torch/a.py is not as installed", digest)


def test_changed_environment_is_another_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack("current", "/env/bin/python", {"torch": "2.13.0"}, key="k", content="c")
    fake(monkeypatch)
    assert with_changes(stack) is stack
    fake(monkeypatch, change())
    one = with_changes(stack)
    assert one.changed == ("torch/a.py is not as installed",)
    assert one.key != "k" and one.content not in ("c", "")
    assert one.extensions_dir == stack.extensions_dir, "nothing is compiled again for it"
    fake(monkeypatch, change("other"))
    assert with_changes(stack).label_key != one.label_key, "each edit has its own results"


def test_overlay_hides_changes_of_its_base_and_is_compared_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path)
    moved = {"transformers": ("5.0.0", "4.51.0")}
    stack = Stack("s+transformers@4.51.0", "/env/bin/python", path=(str(tmp_path),), moved=moved, key="k")
    fake(monkeypatch, change(package="transformers"))
    assert with_changes(stack) is stack
    fake(monkeypatch, change(package="transformers"), change())
    assert with_changes(stack).changed == ("torch/a.py is not as installed",)
    fake(monkeypatch)
    (tmp_path / "torch/nn/fsdp.py").write_text("def wrap(): 1/0\n")
    assert with_changes(stack).changed and with_changes(stack).key != "k"


def test_package_folders_include_the_base_environment_and_pth_folders(tmp_path: Path) -> None:
    outer, beside = tmp_path / "outer", tmp_path / "beside"
    beside.mkdir()
    make = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(outer)]
    subprocess.run(make, check=True)
    (packages,) = (outer / "lib").glob("python*/site-packages")
    (packages / "more.pth").write_text(f"{beside}\n")
    _, folders = inspect_python(str(outer / "bin" / "python"))
    assert packages in folders and beside in folders
    assert any(folder.name in ("site-packages", "dist-packages") for folder in folders if folder != packages)
