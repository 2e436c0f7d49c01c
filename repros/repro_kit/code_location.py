"""Find the installed package in whose file code lies, whatever the code calls itself.

A signature counts what an installed package raised. A module's ``__name__`` proves nothing (a folder on sys.path may be
called transformers), nor does a code object's filename (``compile(text, "/site-packages/...", "exec")``): a frame
belongs to a package when its file lies where the import system finds that package, and when the file contains this
code.

The search path is read when the kit is imported, before the script can change it; files are read when something was
raised, and only those in its traceback. Standard library only.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Iterator

OWN = "repros"  # locations in the script and the kit begin with this
REMOTE = "transformers_modules"  # the package into which transformers copies remote code
# Recorded with their folders before the script runs: the stack of a hang or a crash names files only.
KNOWN = (
    "torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai", "trl", "safetensors",
    "transformers_stream_generator",
)  # fmt: skip


def _folder(path: str) -> str:
    return os.path.join(os.path.abspath(path), "")


def _own_folders() -> tuple[str, ...]:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    kit = str(Path(__file__).resolve().parents[1])
    return tuple(dict.fromkeys(_folder(path) for path in (kit, os.path.dirname(script) if script else kit)))


_OWN = _own_folders()
# The interpreter's search path at its start, without the script's folder and the working directory.
_ENTRIES = tuple(entry for entry in dict.fromkeys(map(_folder, filter(None, sys.path))) if entry not in _OWN)
_FINDERS = tuple(f for f in sys.meta_path if f is not PathFinder and "ditable" in getattr(f, "__name__", repr(f)))


def packages() -> dict[str, str]:
    """Return where the known packages of this stack are installed: name -> folder, or the file of a single module."""
    return {name: roots[0].rstrip(os.sep) for name, roots in ((n, _roots(n)) for n in (*KNOWN, REMOTE)) if roots}


@lru_cache(maxsize=1024)
def _roots(top: str) -> tuple[str, ...]:
    """Return the folders (or the one file) of a top-level package, as the import system finds it. Import nothing."""
    if top == REMOTE:
        return (_folder(os.path.join(_remote_cache(), REMOTE)),)
    try:
        spec = PathFinder.find_spec(top, [entry.rstrip(os.sep) for entry in _ENTRIES])
        for finder in _FINDERS if spec is None else ():
            spec = spec or finder.find_spec(top, None)
    except Exception:  # a third-party finder may fail
        return ()
    if spec is None:
        return ()
    folders = tuple(_folder(path) for path in spec.submodule_search_locations or ())
    return folders or ((os.path.abspath(spec.origin),) if spec.origin and os.path.exists(spec.origin) else ())


def _remote_cache() -> str:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return os.path.abspath(os.environ.get("HF_MODULES_CACHE") or os.path.join(home, "modules"))


def of_code(code: CodeType, names: Any = None) -> str:
    """Return the location of a code object as a dotted name; "" where no installed file has it. ``names``: its
    globals."""
    try:
        file = code.co_filename
        if not file.endswith(".py"):
            return _compiled(code, names)
        place = dotted(file)
        return place if place.partition(".")[0] == OWN or _held(file, code) else ""
    except Exception:  # unusual code belongs to no package
        return ""


def of_frame(frame: FrameType | None) -> str:
    return "" if frame is None else of_code(frame.f_code, frame.f_globals)


@lru_cache(maxsize=1024)
def dotted(file: str) -> str:
    """Return the dotted name of a file of this project or of an installed package, else ""."""
    for path in dict.fromkeys((os.path.abspath(file), os.path.realpath(file))):
        inside = [folder for folder in (*_OWN, *_ENTRIES) if path.startswith(folder)]
        if inside:
            nearest = max(inside, key=len)
            name = _name(path[len(nearest) :])
            if nearest in _OWN:
                return f"{OWN}.{name}"
            if any(path.startswith(root) for root in _roots(name.partition(".")[0])):
                return name
        for top in (REMOTE, *(KNOWN if _FINDERS else ())):  # not on the search path, or known to a finder only
            for root in _roots(top):
                if path.startswith(root):
                    return f"{top}.{_name(path[len(root) :])}".rstrip(".")
    return ""


def _name(relative: str) -> str:
    parts = os.path.splitext(relative)[0].split(os.sep)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _held(file: str, code: CodeType) -> bool:
    """Return whether the file contains this code. Equal code objects have equal names, lines, constants and
    instructions."""
    return any(code == other for other in _contents(file).get((code.co_name, code.co_firstlineno), ()))


@lru_cache(maxsize=256)
def _contents(file: str) -> dict[tuple[str, int], list[CodeType]]:
    """Return all code objects of a source file, read as an import would (from its compiled file where that is
    valid)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about an invalid escape belongs to the import
        module = SourceFileLoader("contents", file).get_code("contents")
    found: dict[tuple[str, int], list[CodeType]] = {}
    for code in _nested(module):
        found.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    return found


def _nested(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _nested(constant)


def _compiled(code: CodeType, names: Any) -> str:
    """Return whether an extension module (Cython) made up this frame for a traceback: its code has no instructions."""
    module = sys.modules.get(str((names or {}).get("__name__")))
    spec = getattr(module, "__spec__", None)
    if spec is None or getattr(module, "__dict__", None) is not names:
        return ""
    if not isinstance(spec.loader, ExtensionFileLoader) or code.co_names or any(c is not None for c in code.co_consts):
        return ""
    origin = os.path.abspath(spec.origin or "")
    return spec.name if any(origin.startswith(root) for root in _roots(spec.name.partition(".")[0])) else ""
