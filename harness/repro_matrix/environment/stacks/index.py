"""Which releases a package has on the index: yanked ones and pre-releases are left out unless requested.

The index is the one that uv (or else pip) is configured for; proxies come from the usual environment variables. The
answer is cached for an hour, and used again when the index cannot be reached.
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
from repro_matrix.config.vocabulary import REPLACED
from repro_matrix.environment.stacks.lock import index_settings, write
from repro_matrix.environment.stacks.spec import StackError, canonical, short_hash
from repro_matrix.errors import nearest

CACHE_S = 3600


@dataclass(frozen=True)
class Release:
    version: str
    date: str = ""  # day of its first file, where the index gives it
    yanked: bool = False
    python: str = ""  # Requires-Python

    @property
    def parsed(self) -> Version:
        return Version(self.version)

    def runs_on(self, python: str) -> bool:
        """Return False where the release itself excludes this Python."""
        try:
            return not self.python or Version(python) in SpecifierSet(self.python)
        except InvalidSpecifier:
            return True


def indexes(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the addresses of the indexes in use (or folders of files), in uv's order."""
    settings = {**(os.environ if env is None else env), **index_settings(env)}
    folders = [path for path in re.split(r"[ ,]+", settings.get("UV_FIND_LINKS", "")) if path and "://" not in path]
    more = f"{settings.get('UV_INDEX', '')} {settings.get('UV_EXTRA_INDEX_URL', '')}".split()
    default = settings.get("UV_DEFAULT_INDEX") or settings.get("UV_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    return [*folders, *(re.sub(r"^[\w-]+=(?=\w+:)", "", address) for address in [*more, default])]


def releases(
    package: str, *, yanked: bool = False, pre: bool = False, env: Mapping[str, str] | None = None
) -> list[Release]:
    """Return a package's releases, oldest first (by version). Raises StackError."""
    everything = _cached(canonical(package), env)
    selected = [r for r in everything if (yanked or not r.yanked) and (pre or not r.parsed.is_prerelease)]
    return sorted(selected, key=lambda release: release.parsed)


def between(available: Sequence[Release], first: str | None, last: str | None) -> list[Release]:
    """Return the releases from ``first`` to ``last``, both included: ``5.23`` as the last one means all of 5.23.x."""
    low, high = (_version(text) if text else None for text in (first, last))
    out = [r for r in available if (low is None or r.parsed >= low) and (high is None or _up_to(r.parsed, high))]
    if not out:
        known = f" (there are {len(available)}: {available[0].version} to {available[-1].version})" if available else ""
        raise StackError("version", f"no release between {first or 'the first'} and {last or 'the last'}{known}")
    return out


def exact(package: str, available: Sequence[Release], version: str) -> int:
    """Return a release's index in the list; ``4.39`` means 4.39.0. Raises StackError."""
    parsed = _version(version)
    for index, release in enumerate(available):
        if release.parsed == parsed:
            return index
    raise StackError("version", f"{package} has no release {version}; {nearest_releases(available, version)}")


def nearest_releases(available: Sequence[Release], version: str) -> str:
    """Name the nearest releases below and above a version that does not exist."""
    parsed = _version(version)
    below = [r.version for r in available if r.parsed < parsed][-2:]
    above = [r.version for r in available if r.parsed > parsed][:2]
    return f"the nearest are {', '.join([*below, *above]) or 'none'}"


def parse_between(text: str) -> tuple[str | None, str | None]:
    """Parse ``4.36..5.23``; either side may be left out. Raises StackError."""
    first, dots, last = text.partition("..")
    if not dots:
        raise StackError("usage", f"--range {text}: write FIRST..LAST, such as 4.36..5.23")
    low, high = (_version(side) if side.strip() else None for side in (first, last))
    if low and high and low > high and not _up_to(low, high):
        raise StackError("usage", f"--range {text}: {low} comes after {high}; write the older release first")
    return first.strip() or None, last.strip() or None


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise StackError("usage", f"{text!r} is not a version such as 4.39.3") from None


def _up_to(version: Version, last: Version) -> bool:
    return version <= last or version.release[: len(last.release)] == last.release


# -- the index


def _cached(package: str, env: Mapping[str, str] | None) -> list[Release]:
    addresses = indexes(env)
    path = paths.cache_dir() / "releases" / f"{package}-{short_hash(*addresses)}.json"
    offline = (os.environ if env is None else env).get("UV_OFFLINE", "").lower() in ("1", "true", "yes")
    try:
        stored = [Release(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
        fresh = time.time() - path.stat().st_mtime < CACHE_S
    except (OSError, ValueError, TypeError):
        stored, fresh = None, False  # missing or damaged: ask the index again
    if stored is not None and (fresh or offline):
        return stored
    if offline:
        raise StackError("index", f"UV_OFFLINE is set and the releases of {package} were never read before")
    try:
        answer = _ask(package, addresses)
    except requests.RequestException as error:
        if stored is not None:
            return stored
        raise StackError("index", f"releases of {package}: the index cannot be reached: {error}") from None
    write(path, json.dumps([asdict(release) for release in answer]))
    return answer


class File(NamedTuple):
    name: str
    yanked: bool = False
    python: str = ""
    date: str = ""


def _ask(package: str, addresses: Sequence[str]) -> list[Release]:
    """Ask the first index that knows the package, as uv does; files in folders count too."""
    files: list[File] = []
    for address in addresses:
        if "://" not in address:
            parsed = ((path.name, _parse_name(path.name)) for path in Path(address).glob("*"))
            files += [File(name) for name, parts in parsed if parts and canonical(parts[0]) == package]
            continue
        page = _page(package, address)
        files += page
        if page:
            break
    if files:
        return collect(files)
    raise StackError("version", f"the index has no package {package!r}{nearest(package, REPLACED)}")


def _page(package: str, address: str) -> list[File]:
    if address.startswith("file:"):  # an index that is a folder of pages
        path = Path(unquote(urlparse(address).path), package, "index.html")
        listed = ProjectPage.from_html(package, path.read_text(encoding="utf-8")).packages if path.exists() else []
    else:
        session = requests.Session()
        session.verify = next(
            (os.environ[n] for n in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "PIP_CERT") if os.environ.get(n)), True
        )
        with PyPISimple(endpoint=address.rstrip("/") + "/", session=session) as client:
            try:
                listed = client.get_project_page(package, timeout=(10, 60)).packages
            except NoSuchProjectError:
                return []
    dates = [f.upload_time.date().isoformat() if f.upload_time else "" for f in listed]
    return [File(f.filename, f.is_yanked, f.requires_python or "", date) for f, date in zip(listed, dates)]


def collect(files: Iterable[File]) -> list[Release]:
    """Group files into releases; a release is yanked when every file of it is."""
    groups: dict[Version, list[File]] = {}
    for file in files:
        parsed = _parse_name(file.name)
        if parsed is not None:
            groups.setdefault(parsed[1], []).append(file)
    return [
        Release(
            str(version),
            min((file.date for file in group if file.date), default=""),
            all(file.yanked for file in group),
            next((file.python for file in group if file.python), ""),
        )
        for version, group in groups.items()
    ]


def _parse_name(filename: str) -> tuple[str, Version] | None:
    try:
        parts = parse_wheel_filename(filename) if filename.endswith(".whl") else parse_sdist_filename(filename)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None  # an old installer (.exe, .egg) or a nonstandard name
    return parts[0], parts[1]
