"""Files that are replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step; of a link the file that it leads to.

    What is no file (a device, a pipe) is written to: as root a rename would put a file in the place of /dev/null.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb") as out:
            out.write(content)
        return
    path = path.resolve() if path.is_symlink() and path.exists() else path
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
