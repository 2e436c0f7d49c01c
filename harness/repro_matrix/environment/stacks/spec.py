"""What the user wrote after ``stack=``, taken apart. Reads files, runs nothing.

current                                   the project's own environment
python:/path/to/python                    an environment that is already there
torch2.2-tf4.39                           conf/stack/torch2.2-tf4.39.yaml with its lock
path/to/requirements.txt, path/uv.lock    the user's own
BASE+transformers==4.40.0[+NAME==VERSION] one of these with some packages replaced (NAME@VERSION says the same)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from repro_matrix import paths
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import project
from repro_matrix.config.axes import Stack as Definition
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.stack import canonical
from repro_matrix.errors import ConfigError, Options, nearest

# A '+' that begins a replacement, and not one inside a version (2.13.0+cpu) or an address (git+file:).
_PLUS = re.compile(r"\+(?=[A-Za-z][\w.-]*\s*(?:\[[^\]]*\])?\s*(?:==|@))")
_FILES = (".txt", ".lock", ".in", ".toml")


@dataclass(frozen=True)
class Spec:
    text: str
    base: str
    swaps: tuple[Requirement, ...] = ()

    @property
    def python(self) -> str | None:
        """The interpreter of an environment that is already there."""
        return self.base.removeprefix("python:") if self.base.startswith("python:") else None

    @property
    def file(self) -> Path | None:
        """The user's own requirements or lock."""
        if self.base.endswith(_FILES) or ("/" in self.base and not self.python):
            return Path(self.base).expanduser().absolute()
        return None


def parse(text: str) -> Spec:
    base, *rest = _PLUS.split(text.strip())
    swaps = []
    for part in rest:
        wanted = re.sub(r"^([A-Za-z][\w.-]*(?:\[[^\]]*\])?)\s*@\s*(?=\d)", r"\1==", part.strip())
        try:
            swap = Requirement(wanted)
        except InvalidRequirement as error:
            raise StackError("usage", f"stack={text}: {part!r} is not NAME@VERSION: {error}") from None
        if not swap.url and [item.operator for item in swap.specifier] != ["=="]:
            raise StackError("usage", f"stack={text}: {part!r}: a replaced package needs one release (NAME@VERSION)")
        swaps.append(swap)
    if not base:
        raise StackError("usage", f"stack={text}: no base stack before '+'")
    names = [canonical(swap.name) for swap in swaps]
    if len(set(names)) != len(names):
        raise StackError("usage", f"stack={text}: a package is replaced twice")
    return Spec(text.strip(), base, tuple(sorted(swaps, key=lambda swap: canonical(swap.name))))


def definitions(conf: Path | None = None) -> Options[Definition]:
    """Every stack of conf/stack; one whose file is wrong is left out, with the reason."""
    out: Options[Definition] = Options()
    for path in project.files("stack", conf or paths.CONF).values():
        try:
            found = catalogue.parse(Definition, catalogue.read_yaml(path), path)
        except ConfigError as error:
            out.left_out[path.stem] = error
            continue
        out[found.slug] = found
    return out


def definition(name: str, conf: Path | None = None) -> Definition:
    known = definitions(conf)
    base, plus, rest = name.partition("+")
    if plus and base in known:
        raise StackError("usage", f"stack={name}: {rest!r} is not NAME@VERSION, such as transformers@4.40.0")
    if name not in known and name in known.left_out:
        raise StackError("usage", str(known.left_out[name]))
    if name not in known:
        raise StackError("usage", f"no stack named {name!r}{nearest(name, known)}")
    return known[name]


def lock_path(name: str, conf: Path | None = None) -> Path:
    """Beside the definition."""
    folder = conf or paths.CONF
    return project.files("stack", folder).get(name, folder / "stack" / name).parent / "locks" / f"{name}.txt"


def replaced(found: Definition, swaps: tuple[Requirement, ...]) -> Definition:
    """The definition with these packages at other releases: where it pins them, and as further pins elsewhere."""
    wanted = {canonical(swap.name): str(swap) for swap in swaps}

    def swap_in(items: list[str]) -> list[str]:
        return [wanted.pop(canonical(Requirement(item).name), item) for item in items]

    no_deps, pins = swap_in(found.no_deps), swap_in(found.pins)
    return found.model_copy(update={"pins": [*pins, *wanted.values()], "no_deps": no_deps})
