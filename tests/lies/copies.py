"""A copy of the checkout, in which lies are planted, and `repro` run from it: its harness, its scripts, its conf.

The copy's kit leaves a mark in every record, and its judge another in every reason for clean: what comes back without
them was not measured and judged by the copy. The user's environment is a hostile one while it runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hostile import HOSTILE
from repro_matrix.paths import ROOT

Json = dict[str, Any]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "baseline", "scratch", "__pycache__", ".*_cache", ".hypothesis")
MARKS = {
    "repros/repro_kit/run.py": (
        'record.data["in_force"] = []',
        'record.data["in_force"] = []; self.fact("copy", True)',
    ),
    "harness/repro_matrix/grading/grade.py": (
        '"clean", f"every rank finished;',
        '"clean", f"in the copy every rank finished;',
    ),
}
# Set where the copy's own interpreter does not need them: what it starts must not see them either.
_MAIN = (
    "import os, sys; os.environ.update({hostile!r}); "
    "from repro_matrix.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


class Copy:
    """The copy in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.root = Path(shutil.copytree(ROOT, folder / "checkout", ignore=LEFT_OUT, symlinks=True))
        for file, change in MARKS.items():
            self.edit(file, change)

    def edit(self, file: str, *changes: tuple[str, str]) -> None:
        """Replace texts, each of which must be there once."""
        path = self.root / file
        path.write_text(edited(path.read_text(encoding="utf-8"), *changes), encoding="utf-8")

    def case(self, slug: str, like: str, script: tuple[tuple[str, str], ...] = (), **changes: Any) -> None:
        """A new case: another's file and script, with texts of the script and keys of the file changed."""
        conf, repros = self.root / "conf" / "case", self.root / "repros"
        data = yaml.safe_load((conf / f"{like}.yaml").read_text(encoding="utf-8"))
        text = (repros / f"{like.replace('-', '_')}.py").read_text(encoding="utf-8")
        data = {
            key: value for key, value in {**data, "slug": slug, **changes}.items() if key not in ("claims", "expect")
        }
        (conf / f"{slug}.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        (repros / f"{slug.replace('-', '_')}.py").write_text(edited(text, *script), encoding="utf-8")

    def repro(self, *words: str, hostile: bool = True) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(self.root), "REPRO_ROOT": str(self.root)}
        main = _MAIN.format(hostile=HOSTILE if hostile else {})
        return subprocess.run(
            [sys.executable, "-c", main, *words], cwd=self.root, env=env, capture_output=True, text=True, timeout=1500
        )

    def documents(self, results: Path) -> dict[str, tuple[Path, Json]]:
        """Case -> the file of its one cell, and the document in it."""
        found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in results.glob("*/*/*/*.json")]
        return {document["case"]: (path, document) for path, document in found}


def edited(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        if text.count(old) != 1:
            raise AssertionError(f"{old!r} is {text.count(old)} times in the text that is to be changed")
        text = text.replace(old, new)
    return text
