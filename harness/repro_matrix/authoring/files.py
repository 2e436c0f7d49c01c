"""Write the files of a new case into the project's folders."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from repro_matrix.config import project
from repro_matrix.errors import ConfigError
from repro_matrix.paths import CHECKOUT, CONF, REPROS


def write_files(texts: Mapping[Path, str]) -> None:
    """Write all files, or none. Raises ConfigError."""
    begun: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            begun.append(path)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for path in begun:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise ConfigError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from None
    for path in begun:
        print(f"wrote {path}")


def case_folders() -> tuple[Path, Path]:
    """The folders of the project's cases and of their scripts."""

    here = project.current()
    if here.conf:
        folder = here.conf[0] / "case"
        return folder, here.scripts[0] if here.scripts else folder
    if not CHECKOUT:
        raise ConfigError(
            f'{here.folder}: no repro.toml names the folder of your own cases. Write one: conf = "failures"'
        )
    return CONF / "case", REPROS
