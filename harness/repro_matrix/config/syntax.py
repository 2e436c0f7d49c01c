"""Whether a script is Python: asked before anything of it is started."""

from __future__ import annotations

import ast
from pathlib import Path

from repro_matrix.errors import ConfigError


def check_syntax(path: Path, shown: str = "") -> None:
    """Raises ConfigError with the line. ``shown``: how the user wrote the path."""
    name = shown or str(path)
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigError(f"{name}:{error.lineno}: {error.msg}: {line}") from None
    except ValueError as error:  # null bytes
        raise ConfigError(f"{name}: not a Python script: {error}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
