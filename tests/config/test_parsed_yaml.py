"""Files of conf/ that were read before are not parsed again, and never stand for what they say no longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import parsed_yaml
from repro_matrix.errors import ConfigError
from repro_matrix.paths import file_state

KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])) | st.integers()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsed_yaml, "cache_dir", lambda: folder)
        patch.setattr(parsed_yaml, "FRESH_NS", -(10**10))
        yield folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text("slug: a\nn: 1\n")
    return path


def again(path: Path) -> object:
    """As another process would."""
    catalogue._read_yaml.cache_clear()
    return catalogue.read_yaml(path)


def test_a_file_is_parsed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert again(file) == {"slug": "a", "n": 1}
    monkeypatch.setattr(yaml, "load", lambda *_, **__: pytest.fail("parsed again"))
    assert again(file) == {"slug": "a", "n": 1}


def test_a_file_that_was_just_written_is_not_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text of the same length may follow within one tick of the disk's clock."""
    monkeypatch.setattr(parsed_yaml, "FRESH_NS", 10**12)
    again(file)
    assert parsed_yaml.read(file, file_state(file)) is None


def test_a_changed_file_is_read_and_a_wrong_one_refused(file: Path) -> None:
    assert again(file) == {"slug": "a", "n": 1}
    file.write_text("slug: b\nn: 12\n")  # another length
    assert again(file) == {"slug": "b", "n": 12}
    file.write_text("slug: [\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        again(file)


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"key": 1}', '{"key": [1], "data": []}', "\x00"])
def test_a_damaged_cache_is_no_answer(file: Path, cache: Path, junk: str) -> None:
    again(file)
    for kept in cache.rglob("*.json"):
        kept.write_text(junk)
    assert again(file) == {"slug": "a", "n": 1}


def test_a_cache_that_cannot_be_written_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed_yaml, "cache_dir", lambda: file)  # no folder
    assert again(file) == again(file) == {"slug": "a", "n": 1}


@given(data=st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_is_kept_is_what_was_read(data: dict[str, object]) -> None:
    path = Path("/nowhere/x.yaml")
    parsed_yaml.write(path, (1, 2), {})
    parsed_yaml.write(path, (1, 2), data)
    found = parsed_yaml.read(path, (1, 2))
    assert found == {} or repr(found) == repr(data)
    assert parsed_yaml.read(path, (1, 3)) is None
