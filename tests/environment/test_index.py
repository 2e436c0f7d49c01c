"""Releases as an index lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import requests
from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, ProjectPage, PyPISimple
from repro_matrix.environment.stacks import StackError
from repro_matrix.environment.stacks.lock import Release, between, exact, indexes, parse_between, releases

PAGE = """<!DOCTYPE html><html><body>
<a href="demo-1.0.tar.gz">demo-1.0.tar.gz</a>
<a href="demo-1.0-py3-none-any.whl" data-yanked="">demo-1.0-py3-none-any.whl</a>
<a href="demo-1.10-py3-none-any.whl" data-requires-python="&gt;=3.9">demo-1.10-py3-none-any.whl</a>
<a href="demo-1.9-py3-none-any.whl" data-yanked="unfixed">demo-1.9-py3-none-any.whl</a>
<a href="demo-1.11rc1-py3-none-any.whl">demo-1.11rc1-py3-none-any.whl</a>
<a href="demo-1.2.win32.exe">demo-1.2.win32.exe</a>
<a href="demo-1.10.1-py3-none-any.whl">demo-1.10.1-py3-none-any.whl</a>
</body></html>"""
RANGE = [Release(version) for version in ("4.35.2", "4.36.0", "4.36.2", "5.0.0", "5.23.0", "5.23.1", "5.24.0")]


@pytest.fixture(autouse=True)
def requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that the index was asked for: it has one page; port 9 cannot be reached."""
    asked: list[str] = []

    def page(self: PyPISimple, package: str, timeout: object) -> ProjectPage:
        asked.append(package)
        if ":9/" in self.endpoint:
            raise requests.ConnectionError("refused")
        if package != "demo":
            raise NoSuchProjectError(package, self.endpoint)
        return ProjectPage.from_html(package, PAGE)

    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_INDEX", "PIP_EXTRA"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    monkeypatch.setattr(PyPISimple, "get_project_page", page)
    return asked


def versions(found: list[Release]) -> list[str]:
    return [release.version for release in found]


def test_releases_leave_out_yanked_and_pre_releases_unless_requested(requested: list[str]) -> None:
    assert versions(releases("Demo")) == ["1.0", "1.10", "1.10.1"]  # one file of 1.0 is yanked, the other is not
    assert versions(releases("demo", yanked=True)) == ["1.0", "1.9", "1.10", "1.10.1"]
    assert versions(releases("demo", pre=True)) == ["1.0", "1.10", "1.10.1", "1.11rc1"]
    assert requested == ["demo"]
    with pytest.raises(StackError, match="did you mean 'transformers'"):
        releases("transfomers")


def test_releases_use_the_cache_when_the_index_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: list[str]
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(StackError) as caught:
        releases("demo")
    assert caught.value.infra_error
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    before = releases("demo")
    (cached,) = (tmp_path / "releases").glob("demo-*.json")
    cached.write_text("damaged", encoding="utf-8")
    assert releases("demo") == before and len(requested) == 3
    monkeypatch.setenv("UV_OFFLINE", "1")
    os.utime(cached, (0, 0))
    assert releases("demo") == before and len(requested) == 3
    with pytest.raises(StackError, match="UV_OFFLINE"):
        releases("other")


def test_indexes_prefer_uv_settings_to_pip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert indexes() == [PYPI_SIMPLE_ENDPOINT]
    monkeypatch.setenv("PIP_INDEX_URL", "http://pip/simple")
    assert indexes() == ["http://pip/simple"]
    monkeypatch.setenv("UV_INDEX_URL", "http://uv/simple")
    monkeypatch.setenv("UV_INDEX", "mine=http://a/simple http://b/simple")
    assert indexes() == ["http://a/simple", "http://b/simple", "http://uv/simple"]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://default/simple")
    assert indexes()[-1] == "http://default/simple"


def test_between_selects_a_range() -> None:
    def between_of(text: str) -> list[str]:
        return versions(between(RANGE, *parse_between(text)))

    assert between_of("4.36..5.23") == ["4.36.0", "4.36.2", "5.0.0", "5.23.0", "5.23.1"], "with its end's patches"
    assert between_of("5.24..") == ["5.24.0"] and between_of("..") == versions(RANGE)
    for text in ("4.36", "4.36..new", "4.45..4.36", "6..7"):
        with pytest.raises(StackError):
            between_of(text)


def test_exact_finds_a_release_or_names_its_neighbours() -> None:
    assert exact("demo", RANGE, "5.0") == 3
    with pytest.raises(StackError, match=r"4\.36\.0, 4\.36\.2, 5\.0\.0, 5\.23\.0"):
        exact("demo", RANGE, "4.37")
    with pytest.raises(StackError, match="none"):
        exact("demo", [], "1.0")
