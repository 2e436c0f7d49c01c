"""An environment that was changed after it was installed: what is found of it, and what follows."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from judging import document, observation, ok
from repro_matrix.environment.stacks import integrity as changes
from repro_matrix.environment.stacks import resolve
from repro_matrix.environment.stacks.integrity import with_changes
from repro_matrix.environment.stacks.stack import Stack
from repro_matrix.results.accept_checks import refusals

SOURCES = {"torch/__init__.py": "__version__ = '2.13.0'\n", "torch/nn/fsdp.py": "def wrap(): ...\n"}
LATER = 2_000_000_000


def installed(folder: Path, name: str = "torch", sources: dict[str, str] = SOURCES) -> None:
    """As an installer leaves a package: its files, and then what it wrote of them."""
    rows = []
    for path, text in sources.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        os.utime(file, (1, 1))
        said = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={said},{len(text)}")
    info = folder / f"{name}-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]) + "\n")


def notes(folder: Path) -> list[str]:
    changes.in_folder.cache_clear()
    return [one.note for one in changes.in_folder(folder)]


def test_what_was_installed_has_no_note(tmp_path: Path) -> None:
    installed(tmp_path)
    assert notes(tmp_path) == []
    os.utime(tmp_path / "torch/nn/fsdp.py", (LATER, LATER))
    assert notes(tmp_path) == [], "a copied environment: younger, and the same"


def test_what_was_installed_from_a_source_tree_is_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched checkout bore the release's version, and was measured, and published, as the release."""
    site, tree = tmp_path / "site", tmp_path / "my torch"
    installed(site)
    (tree / "torch").mkdir(parents=True)
    (tree / "torch" / "patched.py").write_text("1\n")
    monkeypatch.setattr(changes, "site_folders", lambda python: [site])

    def said(origin: str) -> list[changes.Changed]:
        (site / "torch-2.13.0.dist-info" / "direct_url.json").write_text(origin)
        changes.in_folder.cache_clear()
        changes.changed.cache_clear()
        return list(changes.changed("python"))

    (one,) = said(json.dumps({"url": tree.as_uri(), "dir_info": {"editable": True}}))
    assert one.note == f"torch 2.13.0 was installed from a folder ({tree.as_uri()}), and is no release"
    (tree / "torch" / "patched.py").write_text("1/0\n")
    (other,) = said(json.dumps({"url": tree.as_uri(), "dir_info": {}}))
    assert other.digest != one.digest, "another patch is another stack"
    (fork,) = said('{"url": "https://example.org/torch", "vcs_info": {"vcs": "git", "commit_id": "abc"}}')
    assert "installed from a repository (https://example.org/torch)" in fork.note
    assert said('{"url": "file:///wheels/torch.whl", "archive_info": {}}') == [], "a wheel from a disk"
    assert said("nonsense") == [] == said("[1]")


def test_an_edited_source_is_named(tmp_path: Path) -> None:
    installed(tmp_path)
    edited = tmp_path / "torch/nn/fsdp.py"
    edited.write_text(SOURCES["torch/nn/fsdp.py"].replace("...", "1/0"))  # as long as before, and younger
    assert notes(tmp_path) == ["torch/nn/fsdp.py is not as torch 2.13.0 was installed"]
    edited.write_text("longer than before, and with its old time\n")
    os.utime(edited, (1, 1))
    assert len(notes(tmp_path)) == 1
    edited.unlink()
    assert len(notes(tmp_path)) == 1, "a file that is gone"


def test_a_package_that_no_case_is_about_is_not_compared(tmp_path: Path) -> None:
    installed(tmp_path, "pip", {"pip/__init__.py": "x = 1\n"})
    (tmp_path / "pip/__init__.py").write_text("x = 2222\n")
    assert notes(tmp_path) == []


def test_what_has_no_record_cannot_be_compared(tmp_path: Path) -> None:
    installed(tmp_path)
    (tmp_path / "torch-2.13.0.dist-info" / "RECORD").unlink()
    (tmp_path / "torch/nn/fsdp.py").write_text("def wrap(): 1/0\n")
    assert notes(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("patch.pth", "import os; os.environ['A'] = 'b'\n", True),
        ("sitecustomize.py", "import torch\n", True),
        ("usercustomize.py", "", True),
        ("paths.pth", "/opt/lib\n# import nothing\n", False),
        ("_virtualenv.pth", "import _virtualenv", False),
        ("_virtualenv.pth", "import _virtualenv\nimport patch\n", True),
    ],
)
def test_code_that_every_process_runs(tmp_path: Path, name: str, text: str, said: bool) -> None:
    installed(tmp_path)
    (tmp_path / name).write_text(text)
    assert [note.startswith(f"{name} in ") for note in notes(tmp_path)] == [True] * said


def test_what_an_installed_package_brought_may_run(tmp_path: Path) -> None:
    installed(tmp_path, "setuptools", {"distutils-precedence.pth": "import os; os.getcwd()\n"})
    assert notes(tmp_path) == []


def found(monkeypatch: pytest.MonkeyPatch, *given: changes.Changed) -> None:
    monkeypatch.setattr(changes, "changed", lambda python: given)


def edited(digest: str = "one", package: str = "torch") -> changes.Changed:
    return changes.Changed(package, Path("/env/torch/a.py"), "torch/a.py is not as installed", digest)


def test_a_changed_environment_is_another_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack("current", "/env/bin/python", {"torch": "2.13.0"}, key="k", content="c")
    found(monkeypatch)
    assert with_changes(stack) is stack
    found(monkeypatch, edited())
    one = with_changes(stack)
    assert one.changed == ("torch/a.py is not as installed",)
    assert one.key != "k" and one.content not in ("c", "")
    assert one.extensions_dir == stack.extensions_dir, "nothing is compiled anew for it"
    found(monkeypatch, edited("other"))
    assert with_changes(stack).label_key != one.label_key, "what was measured before the next edit is not its"


def test_what_a_layer_replaces_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack("s+transformers@4.51.0", "/env/bin/python", moved={"transformers": ("5.0.0", "4.51.0")}, key="k")
    found(monkeypatch, edited(package="transformers"))
    assert with_changes(stack) is stack
    found(monkeypatch, edited(package="transformers"), edited())
    assert with_changes(stack).changed == ("torch/a.py is not as installed",)


def test_it_is_not_published() -> None:
    arms = {arm: [(name, observation(ok(0)))] * 3 for arm, name in (("broken", "fires"), ("fix", "clean"))}
    measured = document(arms, {"fix": "FIX_HOLDS"}, key="some-case/m-fsdp")
    assert refusals([measured]) == []
    measured["stack"]["changed"] = ["patch.pth runs in every process"]
    (refused,) = refusals([measured])
    assert refused.why.endswith("changed after it was installed: patch.pth runs in every process")


def test_a_stack_is_resolved_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a script are stored by the stack's key: those from before an edit were taken for it."""
    before = resolve("current")
    found(monkeypatch, edited())
    said: list[str] = []
    now = resolve("current", say=said.append)
    assert now.key != before.key and now.versions == before.versions
    assert said == ["note: stack current is not as its packages were installed: torch/a.py is not as installed"]


def test_what_lies_beside_a_package_s_modules_may_hide_one(tmp_path: Path) -> None:
    installed(tmp_path)
    (tmp_path / "torch/nn/fsdp").mkdir()
    (tmp_path / "torch/nn/fsdp/__init__.py").write_text("")
    (tmp_path / "torch/nn/__pycache__").mkdir()
    (tmp_path / "torch/nn/__pycache__/fsdp.py").write_text("")
    assert notes(tmp_path) == ["torch/nn/fsdp/__init__.py is none of torch 2.13.0's files"]


def test_a_library_of_another_length(tmp_path: Path) -> None:
    installed(tmp_path, sources={**SOURCES, "torch/lib/libtorch.so": "ELF"})
    assert notes(tmp_path) == []
    (tmp_path / "torch/lib/libtorch.so").write_text("ELF and more")
    assert notes(tmp_path) == ["torch/lib/libtorch.so is not as torch 2.13.0 was installed"]


def test_what_every_environment_has_may_not_touch_a_package(tmp_path: Path) -> None:
    (tmp_path / "_virtualenv.pth").write_text("import _virtualenv")
    (tmp_path / "_virtualenv.py").write_text("import sys\n")
    assert notes(tmp_path) == []
    (tmp_path / "_virtualenv.py").write_text("import torch\n")
    assert len(notes(tmp_path)) == 1


def test_a_package_s_own_start_may_not_be_edited(tmp_path: Path) -> None:
    installed(tmp_path, "setuptools", {"distutils-precedence.pth": "import os; os.getcwd()\n"})
    (tmp_path / "distutils-precedence.pth").write_text("import os; import patch\n")
    assert len(notes(tmp_path)) == 1


def test_a_layer_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch in the folder of an overlay made UPSTREAM_FIXED, exit code 0."""
    installed(tmp_path)
    found(monkeypatch)
    stack = Stack("s+torch@2.13.0", "/env/bin/python", path=(str(tmp_path),), key="k")
    assert with_changes(stack) is stack
    changes.in_folder.cache_clear()
    (tmp_path / "sitecustomize.py").write_text("import torch\n")
    assert with_changes(stack).changed and with_changes(stack).key != "k"


def test_what_an_environment_builds_upon_and_points_to_is_looked_at(tmp_path: Path) -> None:
    """venv --system-site-packages, as for a vendor's container; a folder that a .pth names."""
    import subprocess
    import sys

    from repro_matrix.environment.stacks.stack import site_folders

    outer, beside = tmp_path / "outer", tmp_path / "beside"
    beside.mkdir()
    make = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(outer)]
    subprocess.run(make, check=True)
    (packages,) = (outer / "lib").glob("python*/site-packages")
    (packages / "more.pth").write_text(f"{beside}\n")
    folders = site_folders(str(outer / "bin" / "python"))
    assert packages in folders and beside in folders
    assert any(folder.name in ("site-packages", "dist-packages") for folder in folders if folder != packages)
