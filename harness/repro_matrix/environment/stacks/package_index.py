"""List the releases of a package on the index that uv uses, else pip's.

Yanked releases and pre-releases are left out unless requested. Proxies come from the usual
environment variables.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from repro_matrix.config.vocabulary import REPLACED
from repro_matrix.environment.stacks.lock import index_settings
from repro_matrix.environment.stacks.spec import StackError, canonical
from repro_matrix.errors import suggestion

PYPI = "https://pypi.org/simple/"


@dataclass(frozen=True)
class Release:
    version: str
    yanked: bool = False

    @property
    def parsed(self) -> Version:
        return Version(self.version)


def releases(package: str, *, yanked: bool = False, pre: bool = False) -> list[Release]:
    """Return a package's releases, oldest first (by version). Raises StackError."""
    everything = _ask_indexes(canonical(package))
    selected = [
        r for r in everything if (yanked or not r.yanked) and (pre or not r.parsed.is_prerelease)
    ]
    return sorted(selected, key=lambda release: release.parsed)


def between(
    available: Sequence[Release], first: Version | None, last: Version | None
) -> list[Release]:
    """Return the releases from ``first`` to ``last``, both included.

    ``5.23`` as the last one means all of 5.23.x.
    """
    out = [
        r
        for r in available
        if (first is None or r.parsed >= first) and (last is None or _up_to(r.parsed, last))
    ]
    if not out:
        known = ""
        if available:
            ends = f"{available[0].version} to {available[-1].version}"
            known = f" (there are {len(available)}: {ends})"
        raise StackError(
            f"no release between {first or 'the first'} and {last or 'the last'}{known}"
        )
    return out


def exact(package: str, available: Sequence[Release], version: str) -> str:
    """Return a release as the list has it; ``4.39`` means 4.39.0. Raises StackError."""
    parsed = _parsed_version(version)
    known = {release.parsed: release.version for release in available}
    if parsed in known:
        return known[parsed]
    below = [name for each, name in known.items() if each < parsed][-2:]
    above = [name for each, name in known.items() if each > parsed][:2]
    raise StackError(
        f"{package} has no release {version}; the nearest are"
        f" {', '.join([*below, *above]) or 'none'}"
    )


def parse_between(text: str) -> tuple[Version | None, Version | None]:
    """Parse ``4.36..5.23``; either side may be left out. Raises StackError."""
    first, dots, last = text.partition("..")
    if not dots:
        raise StackError(f"--range {text}: write FIRST..LAST, such as 4.36..5.23")
    low, high = (_parsed_version(side) if side.strip() else None for side in (first, last))
    if low and high and low > high and not _up_to(low, high):
        raise StackError(f"--range {text}: {low} comes after {high}; write the older release first")
    return low, high


def _parsed_version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise StackError(f"{text!r} is not a version such as 4.39.3") from None


def _up_to(version: Version, last: Version) -> bool:
    return version <= last or version.release[: len(last.release)] == last.release


def indexes() -> list[str]:
    """Return the addresses of the indexes in use, in uv's order."""
    settings = {**os.environ, **index_settings()}
    more = f"{settings.get('UV_INDEX', '')} {settings.get('UV_EXTRA_INDEX_URL', '')}".split()
    default = settings.get("UV_DEFAULT_INDEX") or settings.get("UV_INDEX_URL") or PYPI
    return [re.sub(r"^[\w-]+=(?=\w+:)", "", address) for address in [*more, default]]


def _ask_indexes(package: str) -> list[Release]:
    """Return a package's releases on the first index that has it, as uv does.

    A release is yanked when all its files are.
    """
    import pypi_simple  # takes 100 ms
    import requests

    for address in indexes():
        session = requests.Session()
        session.verify = (
            os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True
        )
        with pypi_simple.PyPISimple(endpoint=address.rstrip("/") + "/", session=session) as client:
            try:
                files = client.get_project_page(package, timeout=(10, 60)).packages
            except pypi_simple.NoSuchProjectError:
                continue
            except requests.RequestException as error:
                why = f"releases of {package}: the index cannot be reached: {error}"
                raise StackError(why, "infra") from None
        yanked: dict[Version, bool] = {}
        for file in files:
            if file.package_type in ("wheel", "sdist"):
                with contextlib.suppress(InvalidVersion):  # a nonstandard name
                    version = Version(file.version or "")
                    yanked[version] = yanked.get(version, True) and file.is_yanked
        return [Release(str(version), value) for version, value in yanked.items()]
    known = {*REPLACED, *(each.name for each in importlib.metadata.distributions())}
    raise StackError(
        f"the index has no package {package!r}{suggestion(package, known)}", "unavailable"
    )
