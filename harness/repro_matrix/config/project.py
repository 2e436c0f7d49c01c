"""Find whose repository this is: its results, cases, models, strategies and stacks.

``repro.toml`` declares them, in the working directory or above it up to the repository's root; its
paths are relative to the file. Without one it is the checkout of this project. If that was
installed from a wheel, it is the repository around the working directory (or that directory), with
the shipped catalogue alone.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from repro_matrix.config.vocabulary import Strict
from repro_matrix.errors import ConfigError, describe_validation
from repro_matrix.paths import (
    BASELINE,
    CHECKOUT,
    CONF,
    CONFIG_PATH,
    EXPECTED,
    REPROS,
    ROOT,
    file_state,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "repro.toml"


class Declared(Strict):
    """Define the keys of repro.toml."""

    # folders of groups, as conf/ is: case/ model/ strategy/ stack/ hardware/
    conf: list[str] = Field(default=[])
    # where the cases' scripts lie; default: beside their files
    scripts: list[str] = Field(default=[])
    # runs in scratch/; expected/ and baseline/ where the next two do not say otherwise
    results: str = "results"
    expected: str | None = None
    baseline: str | None = None

    @field_validator("conf", "scripts", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Project:
    """Hold the folders of a project.

    ``file``: its repro.toml, if any. ``conf`` and ``scripts``: its own, beside the shipped ones.
    """

    folder: Path
    file: Path | None
    conf: tuple[Path, ...]
    scripts: tuple[Path, ...]
    results: Path
    expected: Path
    baseline: Path

    @property
    def is_shipped(self) -> bool:
        """Return whether it is this project's own checkout, whose expectations are shipped."""
        return self.expected == EXPECTED and CHECKOUT

    def script(self, name: str, beside: Path) -> Path:
        """Return the script of one of its own cases, whose file is in ``beside``.

        It is there or in ``scripts``, else shipped. A script that does not exist has the first
        place.
        """
        places = [folder / name for folder in (*self.scripts, beside, REPROS)]
        return next((place for place in places if place.is_file()), places[0])


def current() -> Project:
    """Return the project of the working directory.

    Raises ConfigError with the file and the key.
    """
    folder, file, declared = _declaration()
    if file is None and CHECKOUT:
        return Project(ROOT, None, (), (), ROOT / "results", EXPECTED, BASELINE)
    results = folder / declared.results
    return Project(
        folder,
        file,
        tuple(_existing_folder(folder, name, file, "conf") for name in declared.conf),
        tuple(_existing_folder(folder, name, file, "scripts") for name in declared.scripts),
        results,
        folder / declared.expected if declared.expected else results / "expected",
        folder / declared.baseline if declared.baseline else results / "baseline",
    )


def conf_folders(conf: Path = CONF) -> list[Path]:
    """Return the folders of groups (case/ model/ matrix/ ...): the shipped one, then the user's.

    Those of a command line are in the environment, so that started processes read the same files.
    """
    more = [Path(text) for text in os.environ.get(CONFIG_PATH, "").split(os.pathsep) if text]
    for folder in more:
        if not folder.is_dir():
            raise ConfigError(f"{CONFIG_PATH}: {folder}: no such folder")
    return list(dict.fromkeys([conf, *((*current().conf, *more) if conf == CONF else ())]))


def group_files(group: str, conf: Path) -> dict[str, Path]:
    """Return a group's files by name, the shipped ones first.

    Raises ConfigError for a name that is in two folders.
    """
    found: dict[str, Path] = {}
    for folder in conf_folders(conf):
        for path in sorted((folder / group).glob("*.yaml")):
            if path.stem in found:
                raise ConfigError(
                    f"{path}: {group} {path.stem!r} is also in {found[path.stem]}; give it another"
                    " name"
                )
            found[path.stem] = path
    return found


def misnamed(group: str, conf: Path) -> list[Path]:
    """Return the files with the ending .yml, which are not read."""
    return [
        path for folder in conf_folders(conf) for path in sorted((folder / group).glob("*.yml"))
    ]


def published() -> list[Path]:
    """Return the folders of published measurements: the user's own first, then the shipped one."""
    return list(dict.fromkeys((current().baseline, BASELINE)))


def _declaration() -> tuple[Path, Path | None, Declared]:
    """Return the nearest folder that declares a project, its file, and what that says.

    Else the repository's root, or the working directory.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        file = folder / FILE
        if state := file_state(file):
            return folder, file, _read_declaration(file, state)
        if (folder / ".git").exists():
            return folder, None, Declared()
    return here, None, Declared()


def make_folders() -> None:
    """Create the folders that the nearest repro.toml names."""
    folder, _, declared = _declaration()
    for name in (*declared.conf, *declared.scripts):
        (folder / name).mkdir(parents=True, exist_ok=True)


def _existing_folder(base: Path, name: str, file: Path | None, key: str) -> Path:
    if not (base / name).is_dir():
        raise ConfigError(
            f"{file}: {key}: there is no folder {base / name}; `mkdir` or `repro new` makes it"
        )
    return base / name


@functools.lru_cache(maxsize=64)
def _read_declaration(file: Path, state: tuple[int, ...]) -> Declared:
    try:
        return Declared.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise describe_validation(error, Declared, str(file)) from None
