"""Tiny wheels in a folder that stands in for an index, so that the tests of the stacks need no
network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType


def wheel(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
    python: str = "",
    more: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A package with one module that knows its version. ``more``: further files of it."""
    info = f"{name}-{version}.dist-info"
    needs = [f"Requires-Dist: {item}" for item in requires] + (
        [f"Requires-Python: {python}"] if python else []
    )
    meta = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *needs, ""])
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": meta,
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
        ),
    }
    files |= more
    record = ""
    for path, text in files.items():
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        )
        record += f"{path},sha256={digest},{len(text)}\n"
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as out:
        for inside, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            out.writestr(inside, text)
    return path


def fill(folder: Path) -> None:
    """Write the wheels: top 2 needs a newer part than top 1; torch is a package that an overlay
    cannot replace."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, version, *requires in (
        ("part", "1.0"),
        ("part", "2.0"),
        ("other", "1.0"),
        ("other", "1.1"),
        ("top", "1.0", "part<2"),
        ("top", "1.1", "part<2"),
        ("top", "2.0", "part>=2"),
        ("torch", "1.0", "other"),
        ("torch", "2.0", "other"),
    ):
        wheel(folder, name, version, requires)
    wheel(folder, "old", "1.0", tag="cp27-cp27m-any")
    wheel(folder, "future", "1.0", python=">=9")
