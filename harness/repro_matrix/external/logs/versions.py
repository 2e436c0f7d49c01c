"""Which releases a log says it ran with: from what it prints of its environment, and from nothing else. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from repro_matrix.config.vocabulary import TRAINERS, UPSTREAM

PACKAGES = (*UPSTREAM, *TRAINERS)
_NAMES = {"pytorch": "torch"}
_NUMBER = r"v?(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|post|rc|a|b)\d*)?(?:\+[\w.]+)?)"
_PACKAGE = r"(?P<package>pytorch|" + "|".join(PACKAGES) + r")"
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?<![\w-]){_PACKAGE}=={_NUMBER}",  # pip freeze, requirements
        rf"(?<![\w-]){_PACKAGE} {{2,}}{_NUMBER}(?: |$)",  # pip list, conda list
        rf"(?<![\w-]){_PACKAGE}(?:-{_NUMBER})(?=\s|$|\.dist-info)",  # Successfully installed ...
        # transformers env, collect_env, ds_report, a Trainer's model card, what scripts print
        rf"(?<![\w-]){_PACKAGE}[`'\"]?(?:\.__version__|[ _](?:install )?version)(?: \(GPU\?\))?"
        rf"[`'\"]?[ :=.]*[`'\"]?{_NUMBER}",
        rf"(?<![\w-]){_PACKAGE}[ :]+{_NUMBER}(?![\w.])",
        rf"\b{_PACKAGE} info[ :]+(?:version=|\.+ ){_NUMBER}",
        rf"\bUsing {_PACKAGE} (?:version )?{_NUMBER}",
    )
)
_PYTHON = re.compile(r"\bPython (?:version: )?(?P<version>3\.\d+(?:\.\d+)?)|/lib/python(?P<path>3\.\d+)/")
LITERALS = tuple(
    text
    for name in (*PACKAGES, "pytorch", "PyTorch", "Pytorch", "Transformers", "Accelerate", "DeepSpeed", "PEFT", "Torch")
    for text in (f"{name}==", f"{name}  ", f"{name}-0", f"{name}-1", f"{name}-2", f"{name}-4", f"{name}-5",
                 f"{name} version", f"{name}_version", f"{name}.__version__", f"{name}` version",
                 f"{name} install", f"{name} info", *(f"{name}{sep}{d}." for sep in (" ", ": ") for d in range(6)))
)  # fmt: skip


@dataclass
class Versions:
    """Package -> release -> the first line that says so. Of two releases of one package neither is known."""

    said: dict[str, dict[str, int]] = field(default_factory=dict)
    python: str = ""

    def read(self, text: str, number: int) -> None:
        for pattern in _PATTERNS:
            for found in pattern.finditer(text):
                name = found["package"].lower()
                try:
                    version = str(Version(found["version"]))
                except InvalidVersion:
                    continue
                releases = self.said.setdefault(_NAMES.get(name, name), {})
                if len(releases) < 8:
                    releases.setdefault(version, number)

    def read_path(self, text: str) -> None:
        found = _PYTHON.search(text)
        if found and not self.python:
            self.python = found["version"] or found["path"]

    @property
    def known(self) -> dict[str, str]:
        """The packages of which the log names one release. ``2.2.2`` beside ``2.2.2+cu121`` is one."""
        found = {}
        for name, releases in self.said.items():
            full = {v for v in releases if not any(o != v and Version(o).public == v for o in releases)}
            if len(full) == 1:
                found[name] = full.pop()
        return found

    @property
    def unclear(self) -> dict[str, list[str]]:
        return {name: sorted(found) for name, found in self.said.items() if name not in self.known}
