"""Lock files as package versions, and two of them as stacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.environment import lockfiles
from repro_matrix.environment.lockfiles import (
    Lockfile,
    changed_packages,
    overlay_of,
    parse_lock_file,
)
from repro_matrix.environment.stacks import StackError
from repro_matrix.errors import ConfigError

PIP = """# frozen
accelerate==1.0.0
Huggingface_Hub==0.26.0
-e git+https://github.com/me/mine@abc#egg=mine
other @ file:///home/me/other
torch==2.13.0+cpu ; python_version >= "3.8"
old==1 ; python_version < "3"
numpy==2.0.0 \\
    --hash=sha256:aa
NumPy==2.0
"""


def test_parse_of_pip_freeze_separates_releases_from_clones() -> None:
    lockfile = parse_lock_file(PIP, "a.txt")
    assert lockfile.pins == {
        "accelerate": "1.0.0",
        "huggingface-hub": "0.26.0",
        "torch": "2.13.0+cpu",
        "numpy": "2.0.0",
    }
    assert set(lockfile.unreleased) == {"mine", "other"}
    assert parse_lock_file("torch (==2.1)\npeft===0.9.0\n", "a").pins == {
        "torch": "2.1",
        "peft": "0.9.0",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accelerate>=1\n", r"a:1: 'accelerate>=1' is not one release"),
        ("numpy==2.0\neinops==0.7\nnumpy==2.1\n", r"a:3: 'numpy==2\.1': two versions of numpy"),
        ("all is well here\n", "a:1: .* is not NAME==VERSION"),
        ('[[package]]\nname = "numpy"\n', "is not NAME==VERSION"),  # a poetry.lock
    ],
)
def test_parse_of_other_text_raises(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_lock_file(text, "a")


def test_read_of_a_uv_lock_exports_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "0"\ndependencies = ["einops"]\n'
    )
    lock = tmp_path / "uv.lock"
    lock.write_text(
        'version = 1\nrequires-python = ">=3.9"\n\n[[package]]\nname = "einops"\nversion ='
        ' "0.7.0"\nsource = { registry = "https://pypi.org/simple" }\n\n[[package]]\nname ='
        ' "mine"\nversion = "0"\nsource = { virtual = "." }\ndependencies = [{ name = "einops" }]\n'
    )
    assert lockfiles.read_lock_file(lock).pins == {"einops": "0.7.0"}
    lock.write_text("no TOML")
    with pytest.raises(StackError):
        lockfiles.read_lock_file(lock)


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,2}", fullmatch=True)
PINS = st.dictionaries(NAMES, VERSIONS, min_size=1, max_size=8)


@given(PINS, PINS)
def test_compared_of_any_pins_returns_differences(
    one: dict[str, str], other: dict[str, str]
) -> None:
    assert (
        parse_lock_file("".join(f"{name}=={version}\n" for name, version in one.items()), "a").pins
        == one
    )
    if one != other:
        found = changed_packages(Lockfile("a", one), Lockfile("b", other))
        assert {name: old for name, (old, _) in found.items() if old} == dict(
            one.items() - other.items()
        )
        assert {name: new for name, (_, new) in found.items() if new} == dict(
            other.items() - one.items()
        )


def test_compared_of_lockfiles_refuses_different_clones() -> None:
    one = Lockfile("old", {"a": "1"}, {"mine": "-e git+x@1"})
    with pytest.raises(ConfigError, match="old and old name the same versions"):
        changed_packages(one, one)
    for other in (Lockfile("new", {"a": "2"}), Lockfile("new", {"mine": "1"})):
        with pytest.raises(ConfigError, match="mine is not a release of an index"):
            changed_packages(one, other)


HERE = {
    "torch": "2.13.0+cpu",
    "transformers": "5.0.0",
    "einops": "0.8.2",
    "nvidia-nccl-cu12": "2.27",
    "jax": "0.4.30",
}
TORCH = {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("pins", "other", "expected"),
    [
        (
            {**TORCH, "transformers": "4.45.2", "einops": "0.8.1"},
            {},
            "current+einops@0.8.1+transformers@4.45.2",
        ),
        (TORCH, {"einops": "0.7.0"}, None),  # an overlay does not remove a package
        ({**TORCH, "einops": "0.7.0"}, TORCH, "current+einops@0.7.0"),
        (TORCH, {"nvidia-nccl-cu12": "2.20"}, "current"),  # torch brings it along
        ({**TORCH, "nvidia-nccl-cu12": "2.20", "triton": "3.5.0"}, {}, "current"),
        ({"nvidia-nccl-cu12": "2.20"}, {}, None),  # of an unknown torch
        ({f"p{number}": "1" for number in range(40)}, {}, None),
        ({**TORCH, "jax": "0.4.31"}, {}, None),  # jax does not come with torch
    ],
)
def test_overlay_of_a_lockfile(
    pins: dict[str, str], other: dict[str, str], expected: str | None
) -> None:
    assert overlay_of(Lockfile("a", pins), "current", HERE, Lockfile("b", other)) == expected
