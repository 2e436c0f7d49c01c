"""Where code lies: a frame of an exception or of a backtrace, by its module, its file and what the rank found. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/(.+)$")
_STANDARD = re.compile(r"(?:^|/)lib(?:64)?/python3(?:\.\d+)?t?/(.+)$")
_REPROS = re.compile(r"(?:^|/)repros/(?!.*(?:(?:site|dist)-packages/|transformers_modules/|lib/python3)).+\.py$")
_OWN = "repros"  # what the kit puts before the places of the project's own code
_OWN_MODULES = {"__main__", "__mp_main__", "kit", "repro_kit", "repros"}
_PYSPY = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^()]+?)(?::\d+)?\)\s*$")
_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+,? in (?P<function>.+?)\s*$')


@lru_cache(maxsize=4096)
def dotted(file: str) -> tuple[str, ...]:
    """The dotted module names that a source file may have, the most likely first.

    Under site-packages (or the standard library) there is one. Elsewhere (an overlay on PYTHONPATH, a checkout, paths
    that py-spy shortened) the root is not known: every suffix of the path is possible.
    """
    path = file.replace("\\", "/")
    found = _INSTALLED.search(path) or _STANDARD.search(path)
    rest = found.group(1) if found else path.lstrip("/")
    parts = [part for part in re.sub(r"\.(py|pyc|so|pyx)$", "", rest).split("/") if part not in ("", ".", "..")]
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    if found:
        return (".".join(parts),)
    return tuple(".".join(parts[start:]) for start in range(len(parts)))


@lru_cache(maxsize=4096)
def is_own(module: str, file: str) -> bool:
    """Whether a frame is this project's: the case's script, the kit. Such a frame never counts as upstream."""
    return module.partition(".")[0] in _OWN_MODULES or bool(_REPROS.search(file.replace("\\", "/")))


class Place(NamedTuple):
    """One frame, of an exception or of a hung rank's stack."""

    module: str
    file: str
    function: str
    # Where its code really lies, as the rank found it (code_location.py): an installed module, ``repros.…`` for the
    # project's own, "" for neither. None: an older record, which knows names only.
    place: str | None = None
    line: int | None = None

    @property
    def own(self) -> bool:
        return is_own(self.module, self.file) if self.place is None else within(self.place, _OWN)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names to match against: where it lies; else the module's own name, else those that its file allows."""
        if self.place is not None:
            return (self.place,) if self.place and not self.own else ()
        if self.module not in ("", "builtins"):
            return (self.module,)
        return dotted(self.file) if not self.file.startswith("<") else ()

    @property
    def named(self) -> bool:
        """False for generated code without a module (``<string>``) in an older record, which lies nowhere.

        Where the rank looked, code that lies nowhere is somebody's who made it: it is no package's, and never passed
        over for the frame around it.
        """
        return self.place is not None or bool(self.modules) or self.own

    def __str__(self) -> str:
        name = self.place or (self.modules[0] if self.modules else self.module if self.place is None else self.file)
        return ".".join(part for part in (name or "?", self.function) if part)


def lies_in(file: str, packages: Mapping[str, str]) -> str | None:
    """The place of a file by where the rank's packages are installed; None where that does not decide.

    A file of another installed package is placed by its path; one that only looks like a known package is nowhere.
    """
    path = file.replace("\\", "/")
    for name, root in packages.items():
        if path == root:
            return name
        if path.startswith(root.rstrip("/") + "/"):
            return ".".join(filter(None, (name, *dotted("/site-packages/" + path[len(root.rstrip("/")) + 1 :]))))
    if _REPROS.search(path):
        return None  # the project's own
    installed = _INSTALLED.search(path) or _STANDARD.search(path)
    name = dotted(path)[0] if installed else ""
    return name if name.partition(".")[0] not in packages else ""


class Thread(NamedTuple):
    """One thread of a backtrace: its frames as they were printed (with their lines), and as places, innermost first."""

    main: bool
    lines: tuple[str, ...]
    places: tuple[Place, ...]


def threads_of(stack: str, packages: Mapping[str, str] | None = None) -> list[Thread]:
    """The threads of a rank, as py-spy or faulthandler print them, the main thread first.

    ``packages``: where the rank's packages are installed, as it recorded it; without, files are placed by their path.
    """
    found: list[tuple[bool, list[str], list[Place]]] = [(True, [], [])]
    for line in stack.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            # faulthandler calls the thread that was interrupted the current one; py-spy names the main thread
            found.append((line.startswith("Current") or "MainThread" in line, [], []))
            continue
        frame = _FAULTHANDLER.match(line) or _PYSPY.match(line)
        if frame:
            found[-1][1].append(line.strip())
            # py-spy gives the qualified name where it can (f.<locals>.wrapper), records and faulthandler the plain one
            place = lies_in(frame["file"], packages) if packages else None
            found[-1][2].append(Place("", frame["file"], frame["function"].rpartition(".")[2], place))
    threads = [Thread(main, tuple(lines), tuple(places)) for main, lines, places in found if lines]
    return sorted(threads, key=lambda thread: not thread.main)


def stack_places(stack: str, packages: Mapping[str, str] | None = None) -> tuple[Place, ...]:
    """The frames of a hung rank: innermost first, the main thread first."""
    return tuple(place for thread in threads_of(stack, packages) for place in thread.places)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
