"""Which releases a package has, as the index says it: yanked ones and pre-releases are left out unless asked for.

The index is the one that uv (or else pip) is set to; a proxy is what the usual environment variables say. What was read
is kept for an hour, and used again when the index is out of reach.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

import requests
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, ProjectPage, PyPISimple

from repro_matrix import paths
from repro_matrix.config.packages import REPLACED
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.installer import index_settings
from repro_matrix.environment.stacks.stack import canonical, short_hash
from repro_matrix.errors import nearest

KEEP_S = 3600


@dataclass(frozen=True)
class Release:
    version: str
    date: str = ""  # day of its first file, where the index says it
    yanked: bool = False
    python: str = ""  # which Pythons it says it needs

    @property
    def parsed(self) -> Version:
        return Version(self.version)

    def runs_on(self, python: str) -> bool:
        """False: the release itself says that this Python is not for it."""
        try:
            return not self.python or Version(python) in SpecifierSet(self.python)
        except InvalidSpecifier:
            return True


def indexes(env: Mapping[str, str] | None = None) -> list[str]:
    """Addresses of the indexes in use (or folders of files), in the order in which uv asks them."""
    given = {**(os.environ if env is None else env), **index_settings(env)}
    folders = [path for path in re.split(r"[ ,]+", given.get("UV_FIND_LINKS", "")) if path and "://" not in path]
    more = f"{given.get('UV_INDEX', '')} {given.get('UV_EXTRA_INDEX_URL', '')}".split()
    default = given.get("UV_DEFAULT_INDEX") or given.get("UV_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    return [*folders, *(re.sub(r"^[\w-]+=(?=\w+:)", "", address) for address in [*more, default])]


def releases(
    package: str, *, yanked: bool = False, pre: bool = False, env: Mapping[str, str] | None = None
) -> list[Release]:
    """Oldest first (by version)."""
    found = [
        release
        for release in _all(canonical(package), env)
        if (yanked or not release.yanked) and (pre or not release.parsed.is_prerelease)
    ]
    return sorted(found, key=lambda release: release.parsed)


def between(found: Sequence[Release], first: str | None, last: str | None) -> list[Release]:
    """Releases from ``first`` to ``last``, both included: ``5.23`` as the last one means all of 5.23.x."""
    low, high = (_version(text) if text else None for text in (first, last))
    out = [r for r in found if (low is None or r.parsed >= low) and (high is None or _upto(r.parsed, high))]
    if not out:
        raise StackError(
            "version", f"no release between {first or 'the first'} and {last or 'the last'}{_range(found)}"
        )
    return out


def exact(package: str, found: Sequence[Release], version: str) -> int:
    """Where a release stands in the list; ``4.39`` means 4.39.0."""
    wanted = _version(version)
    for index, release in enumerate(found):
        if release.parsed == wanted:
            return index
    raise StackError("version", f"{package} has no release {version}; {near(found, version)}")


def near(found: Sequence[Release], version: str) -> str:
    """The nearest releases below and above a version that does not exist."""
    wanted = _version(version)
    below = [r.version for r in found if r.parsed < wanted][-2:]
    above = [r.version for r in found if r.parsed > wanted][:2]
    return f"the nearest are {', '.join([*below, *above]) or 'none'}"


def parse_between(text: str) -> tuple[str | None, str | None]:
    """``4.36..5.23``; either side may be left out."""
    first, dots, last = text.partition("..")
    if not dots:
        raise StackError("usage", f"--between {text}: write FIRST..LAST, such as 4.36..5.23")
    low, high = (_version(side) if side.strip() else None for side in (first, last))
    if low and high and low > high and not _upto(low, high):
        raise StackError("usage", f"--between {text}: {low} comes after {high}; write the older release first")
    return first.strip() or None, last.strip() or None


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise StackError("usage", f"{text!r} is not a version such as 4.39.3") from None


def _upto(version: Version, last: Version) -> bool:
    return version <= last or version.release[: len(last.release)] == last.release


def _range(found: Sequence[Release]) -> str:
    return f" (there are {len(found)}: {found[0].version} to {found[-1].version})" if found else ""


# -- the index --------------------------------------------------------------------------------------------------------


def _all(package: str, env: Mapping[str, str] | None) -> list[Release]:
    addresses = indexes(env)
    kept = paths.cache_dir() / "releases" / f"{package}-{short_hash(*addresses)}.json"
    offline = (os.environ if env is None else env).get("UV_OFFLINE", "").lower() in ("1", "true", "yes")
    age = time.time() - kept.stat().st_mtime if kept.exists() else None
    stored = _read(kept) if age is not None else None
    if stored is not None and age is not None and (age < KEEP_S or offline):
        return stored
    if offline:
        raise StackError("index", f"UV_OFFLINE is set and the releases of {package} were never read before")
    try:
        found = _ask(package, addresses)
    except requests.RequestException as error:
        if stored is not None:
            return stored
        raise StackError("index", f"releases of {package}: the index is out of reach: {error}") from None
    _write(kept, found)
    return found


class File(NamedTuple):
    name: str
    yanked: bool = False
    python: str = ""
    date: str = ""


def _ask(package: str, addresses: Sequence[str]) -> list[Release]:
    """From the first index that knows the package, as uv does it; files in folders count beside it."""
    files: list[File] = []
    for address in addresses:
        if "://" not in address:
            files += [File(path.name) for path in Path(address).glob("*") if _is_of(package, path.name)]
            continue
        found = _page(package, address)
        if found:
            files += found
            break
    if files:
        return collect(files)
    raise StackError("version", f"the index has no package {package!r}{nearest(package, REPLACED)}")


def _page(package: str, address: str) -> list[File]:
    if address.startswith("file:"):  # an index that is a folder of pages
        path = Path(unquote(urlparse(address).path), package, "index.html")
        listed = ProjectPage.from_html(package, path.read_text(encoding="utf-8")).packages if path.exists() else []
    else:
        with PyPISimple(endpoint=address.rstrip("/") + "/", session=_session()) as client:
            try:
                listed = client.get_project_page(package, timeout=(10, 60)).packages
            except NoSuchProjectError:
                return []
    return [
        File(
            f.filename, f.is_yanked, f.requires_python or "", f.upload_time.date().isoformat() if f.upload_time else ""
        )
        for f in listed
    ]


def _is_of(package: str, filename: str) -> bool:
    parsed = _parsed(filename)
    return parsed is not None and canonical(parsed[0]) == package


def _session() -> requests.Session:
    session = requests.Session()
    bundle = next(
        (os.environ[n] for n in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "PIP_CERT") if os.environ.get(n)), None
    )
    if bundle:
        session.verify = bundle
    return session


def collect(files: Iterable[File]) -> list[Release]:
    """A release is yanked when every file of it is."""
    found: dict[Version, list[File]] = {}
    for file in files:
        parsed = _parsed(file.name)
        if parsed is not None:
            found.setdefault(parsed[1], []).append(file)
    return [
        Release(
            str(version),
            min((file.date for file in group if file.date), default=""),
            all(file.yanked for file in group),
            next((file.python for file in group if file.python), ""),
        )
        for version, group in found.items()
    ]


def _parsed(filename: str) -> tuple[str, Version] | None:
    try:
        parts = parse_wheel_filename(filename) if filename.endswith(".whl") else parse_sdist_filename(filename)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None  # an old installer (.exe, .egg) or a name of no standard
    return parts[0], parts[1]


def _read(path: Path) -> list[Release] | None:
    try:
        return [Release(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return None  # damaged: the index is asked again


def _write(path: Path, found: Sequence[Release]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps([asdict(release) for release in found]), encoding="utf-8")
    os.replace(temporary, path)
