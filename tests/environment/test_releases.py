"""Releases as an index tells them; the index here is a small server of the test's own."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pypi_simple import PYPI_SIMPLE_ENDPOINT
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.index import Release, between, exact, indexes, near, parse_between, releases

PAGE = """<!DOCTYPE html><html><body>
<a href="demo-1.0.tar.gz">demo-1.0.tar.gz</a>
<a href="demo-1.0-py3-none-any.whl" data-yanked="">demo-1.0-py3-none-any.whl</a>
<a href="demo-1.10-py3-none-any.whl" data-requires-python="&gt;=3.9">demo-1.10-py3-none-any.whl</a>
<a href="demo-1.9-py3-none-any.whl" data-yanked="broken">demo-1.9-py3-none-any.whl</a>
<a href="demo-1.11rc1-py3-none-any.whl">demo-1.11rc1-py3-none-any.whl</a>
<a href="demo-1.2.win32.exe">demo-1.2.win32.exe</a>
<a href="demo-1.10.1-py3-none-any.whl">demo-1.10.1-py3-none-any.whl</a>
</body></html>"""


class Index(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        known = self.path == "/simple/demo/"
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode() if known else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in [*os.environ]:
        if name.startswith(("UV_", "PIP_INDEX", "PIP_EXTRA")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    Index.asked = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"http://127.0.0.1:{server.server_port}/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", where)
    yield where
    server.shutdown()
    server.server_close()


def versions(found: list[Release]) -> list[str]:
    return [release.version for release in found]


def test_yanked_releases_and_pre_releases_are_left_out_unless_asked_for(address: str) -> None:
    assert versions(releases("Demo")) == ["1.0", "1.10", "1.10.1"]  # one file of 1.0 is yanked, the other is not
    assert versions(releases("demo", yanked=True)) == ["1.0", "1.9", "1.10", "1.10.1"]
    assert versions(releases("demo", pre=True)) == ["1.0", "1.10", "1.10.1", "1.11rc1"]
    assert Index.asked == 1


def test_which_python_a_release_is_for(address: str) -> None:
    (found,) = [release for release in releases("demo") if release.version == "1.10"]
    assert found.runs_on("3.11.7") and not found.runs_on("3.8.0")


def test_an_unknown_package_is_said(address: str) -> None:
    with pytest.raises(StackError, match="no package 'transfomers'; did you mean 'transformers'"):
        releases("transfomers")


def test_what_was_read_last_serves_when_the_index_is_away(address: str, tmp_path: Path) -> None:
    env = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"}
    with pytest.raises(StackError, match="out of reach") as caught:
        releases("demo", env=env)
    assert caught.value.infra
    before = releases("demo")
    (kept,) = (tmp_path / "releases").glob("demo-*.json")
    kept.write_text("damaged", encoding="utf-8")
    assert releases("demo") == before and Index.asked == 2
    assert releases("demo", env={"UV_DEFAULT_INDEX": address, "UV_OFFLINE": "1"}) == before and Index.asked == 2
    with pytest.raises(StackError, match="UV_OFFLINE"):
        releases("other", env={"UV_OFFLINE": "1"})


def test_settings_of_uv_come_before_those_of_pip() -> None:
    assert indexes({}) == [PYPI_SIMPLE_ENDPOINT]
    assert indexes({"PIP_INDEX_URL": "http://pip/simple"}) == ["http://pip/simple"]
    both = {"PIP_INDEX_URL": "http://pip/simple", "UV_DEFAULT_INDEX": "http://uv/simple"}
    assert indexes(both) == ["http://uv/simple"]
    more = {"UV_INDEX": "mine=http://a/simple http://b/simple", "UV_INDEX_URL": "http://uv/simple"}
    assert indexes(more) == ["http://a/simple", "http://b/simple", "http://uv/simple"]
    assert indexes({"UV_FIND_LINKS": "/wheels"}) == ["/wheels", PYPI_SIMPLE_ENDPOINT]


def test_an_index_of_files_and_a_folder_of_wheels(address: str, tmp_path: Path) -> None:
    (tmp_path / "pages" / "demo").mkdir(parents=True)
    (tmp_path / "pages" / "demo" / "index.html").write_text(PAGE, encoding="utf-8")
    assert len(releases("demo", env={"UV_DEFAULT_INDEX": (tmp_path / "pages").as_uri()})) == 3
    empty = (tmp_path / "none").as_uri()
    (tmp_path / "demo-7.0-py3-none-any.whl").touch()
    (tmp_path / "demolition-8.0-py3-none-any.whl").touch()
    assert versions(releases("demo", env={"UV_DEFAULT_INDEX": empty, "UV_FIND_LINKS": str(tmp_path)})) == ["7.0"]


FOUND = [Release(version) for version in ("4.35.2", "4.36.0", "4.36.2", "5.0.0", "5.23.0", "5.23.1", "5.24.0")]


def test_a_range_takes_in_the_patches_of_its_end() -> None:
    assert versions(between(FOUND, *parse_between("4.36..5.23"))) == ["4.36.0", "4.36.2", "5.0.0", "5.23.0", "5.23.1"]
    assert versions(between(FOUND, *parse_between("5.24.."))) == ["5.24.0"]
    assert len(between(FOUND, *parse_between(".."))) == len(FOUND)


def test_bad_ranges_and_versions_are_said() -> None:
    with pytest.raises(StackError, match=r"write FIRST\.\.LAST"):
        parse_between("4.36")
    with pytest.raises(StackError, match="'new' is not a version"):
        parse_between("4.36..new")
    with pytest.raises(StackError, match="older release first"):
        parse_between("4.45..4.36")
    with pytest.raises(StackError, match=r"no release between 6 and 7 \(there are 7: 4\.35\.2 to 5\.24\.0\)"):
        between(FOUND, "6", "7")
    with pytest.raises(
        StackError, match=r"demo has no release 4\.37; the nearest are 4\.36\.0, 4\.36\.2, 5\.0\.0, 5\.23\.0"
    ):
        exact("demo", FOUND, "4.37")
    assert exact("demo", FOUND, "5.0") == 3
    assert near([], "1.0") == "the nearest are none"
