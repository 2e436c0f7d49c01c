"""Which releases a package has on the index: yanked ones and pre-releases are left out unless requested.

The index is the one that uv (or else pip) is configured for; proxies come from the usual environment variables. The
answer is cached for an hour, and used again when the index cannot be reached.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import requests
from packaging.version import InvalidVersion, Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, NoSuchProjectError, PyPISimple

from repro_matrix import paths
from repro_matrix.config.vocabulary import REPLACED
from repro_matrix.environment.stacks.lock import index_settings, write
from repro_matrix.environment.stacks.spec import StackError, canonical, short_hash
from repro_matrix.errors import nearest

CACHE_S = 3600


@dataclass(frozen=True)
class Release:
    version: str
    yanked: bool = False

    @property
    def parsed(self) -> Version:
        return Version(self.version)


def releases(package: str, *, yanked: bool = False, pre: bool = False) -> list[Release]:
    """Return a package's releases, oldest first (by version). Raises StackError."""
    everything = _cached(canonical(package))
    selected = [r for r in everything if (yanked or not r.yanked) and (pre or not r.parsed.is_prerelease)]
    return sorted(selected, key=lambda release: release.parsed)


def between(available: Sequence[Release], first: str | None, last: str | None) -> list[Release]:
    """Return the releases from ``first`` to ``last``, both included: ``5.23`` as the last one means all of 5.23.x."""
    low, high = (_version(text) if text else None for text in (first, last))
    out = [r for r in available if (low is None or r.parsed >= low) and (high is None or _up_to(r.parsed, high))]
    if not out:
        known = f" (there are {len(available)}: {available[0].version} to {available[-1].version})" if available else ""
        raise StackError("usage", f"no release between {first or 'the first'} and {last or 'the last'}{known}")
    return out


def exact(package: str, available: Sequence[Release], version: str) -> int:
    """Return a release's index in the list; ``4.39`` means 4.39.0. Raises StackError."""
    parsed = _version(version)
    known = [release.parsed for release in available]
    if parsed in known:
        return known.index(parsed)
    below = [str(each) for each in known if each < parsed][-2:]
    above = [str(each) for each in known if each > parsed][:2]
    raise StackError(
        "usage", f"{package} has no release {version}; the nearest are {', '.join([*below, *above]) or 'none'}"
    )


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


def indexes() -> list[str]:
    """Return the addresses of the indexes in use, in uv's order."""
    settings = {**os.environ, **index_settings()}
    more = f"{settings.get('UV_INDEX', '')} {settings.get('UV_EXTRA_INDEX_URL', '')}".split()
    default = settings.get("UV_DEFAULT_INDEX") or settings.get("UV_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    return [re.sub(r"^[\w-]+=(?=\w+:)", "", address) for address in [*more, default]]


def _cached(package: str) -> list[Release]:
    addresses = indexes()
    path = paths.cache_dir() / "releases" / f"{package}-{short_hash(*addresses)}.json"
    offline = os.environ.get("UV_OFFLINE", "").lower() in ("1", "true", "yes")
    try:
        stored = [Release(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
        if offline or time.time() - path.stat().st_mtime < CACHE_S:
            return stored
    except (OSError, ValueError, TypeError):
        stored = []  # missing or damaged: ask the index again
    if offline:
        raise StackError("infra", f"UV_OFFLINE is set and the releases of {package} were never read before")
    try:
        answer = _ask(package, addresses)
    except requests.RequestException as error:
        if stored:
            return stored
        raise StackError("infra", f"releases of {package}: the index cannot be reached: {error}") from None
    write(path, json.dumps([asdict(release) for release in answer]))
    return answer


def _ask(package: str, addresses: Sequence[str]) -> list[Release]:
    """Ask the first index that knows the package, as uv does."""
    for address in addresses:
        session = requests.Session()
        session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True
        with PyPISimple(endpoint=address.rstrip("/") + "/", session=session) as client:
            try:
                return _collect(client.get_project_page(package, timeout=(10, 60)).packages)
            except NoSuchProjectError:
                continue
    raise StackError("unavailable", f"the index has no package {package!r}{nearest(package, REPLACED)}")


def _collect(files: Iterable[DistributionPackage]) -> list[Release]:
    """Group files into releases; a release is yanked when every file of it is."""
    groups: dict[Version, list[DistributionPackage]] = {}
    for file in files:
        try:
            version = Version(file.version or "")
        except InvalidVersion:
            continue  # a nonstandard name
        if file.package_type in ("wheel", "sdist"):
            groups.setdefault(version, []).append(file)
    return [Release(str(version), all(file.is_yanked for file in group)) for version, group in groups.items()]
