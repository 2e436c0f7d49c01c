"""Freezes as package versions: what each format says, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.errors import ConfigError
from repro_matrix.external import lockfiles
from repro_matrix.external.lockfiles import Lockfile, compared, overlay_of, parse, remaining

PIP = """# frozen
accelerate==1.0.0
Huggingface_Hub==0.26.0
-e git+https://github.com/me/mine@abc#egg=mine
other @ file:///home/me/other
torch==2.13.0+cpu ; python_version >= "3.8"
old==1 ; python_version < "3"
numpy==2.0.0 \\
    --hash=sha256:aa
"""
UV = """version = 1
requires-python = ">=3.11"

[[package]]
name = "accelerate"
version = "1.0.0"
source = { registry = "https://pypi.org/simple" }
dependencies = [
    { name = "numpy" },
]

[[package]]
name = "mine"
version = "0.1.0"
source = { editable = "." }

[[package]]
name = "numpy"
version = "1.26.0"
source = { registry = "https://pypi.org/simple" }

[[package]]
name = "numpy"
version = "2.0.0"
source = { registry = "https://pypi.org/simple" }
"""
POETRY = """[[package]]
name = "accelerate"
version = "1.0.0"
description = "x"
files = []

[package.dependencies]
numpy = ">=1.17"

[[package]]
name = "mine"
version = "0.1.0"

[package.source]
type = "git"
url = "https://github.com/me/mine"
resolved_reference = "abc"

[metadata]
python-versions = "^3.10"
"""
CONDA = """# packages in environment at /opt/conda/envs/a:
#
# Name                    Version                   Build  Channel
_libgcc_mutex             0.1                 conda_forge    conda-forge
accelerate                1.0.0                    pypi_0    pypi
python                    3.9.18          h0755675_1_cpython    conda-forge
pytorch                   2.4.1           py3.9_cpu_0    pytorch
"""


def test_what_each_format_says() -> None:
    pip = parse(PIP, "a.txt")
    assert pip.pins == {"accelerate": "1.0.0", "huggingface-hub": "0.26.0", "torch": "2.13.0+cpu", "numpy": "2.0.0"}
    assert set(pip.unreleased) == {"mine", "other"}
    uv = parse(UV, "uv.lock")
    assert uv.pins == {"accelerate": "1.0.0"} and uv.python == ">=3.11"
    assert uv.unreleased == {"mine": "editable .", "numpy": "several versions, by platform or Python"}
    poetry = parse(POETRY, "poetry.lock")
    assert poetry.pins == {"accelerate": "1.0.0"} and poetry.python == "^3.10"
    assert poetry.unreleased == {"mine": "resolved_reference abc, type git, url https://github.com/me/mine"}
    conda = parse(CONDA, "env.txt")
    assert conda.pins == {"accelerate": "1.0.0", "torch": "2.4.1"} and conda.python == "==3.9.*"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accelerate>=1\n", r"a:1: 'accelerate>=1' is not one release"),
        ("accelerate==1.*\n", "not one release"),
        ("numpy==2.0\neinops==0.7\nnumpy==2.1\n", r"a:3: 'numpy==2\.1' and a:1: 'numpy==2\.0': two versions of numpy"),
        (CONDA + "accelerate 1.2.0 pypi_0 pypi\n", r"a:8: .* and a:5: .*: two versions of accelerate"),
        ("all is well here\n", "a:1: .* is not NAME==VERSION"),
        ("# nothing\n", "no package with its version"),
        ("# packages in environment at x:\nwhat is this line of\n", "a:2: .* is not a line of `conda list`"),
    ],
)
def test_what_is_no_freeze(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text, "a")


def test_a_freeze_that_has_a_clone_alone_is_told_what_is_wrong_with_that() -> None:
    clone = parse("transformers @ git+https://github.com/huggingface/transformers@abc\n", "new")
    with pytest.raises(
        ConfigError, match=r"transformers is not a release of an index \(old: 4\.45\.2; new: transformers @"
    ):
        compared(Lockfile("old", {"transformers": "4.45.2"}), clone)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.txt: No such file"):
        lockfiles.read(tmp_path / "no.txt")
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        lockfiles.read(tmp_path / "a")


def test_two_freezes() -> None:
    one = Lockfile("old", {"a": "1", "b": "2"}, {"mine": "-e git+x@1"})
    assert compared(one, Lockfile("new", {"a": "2", "c": "3"}, {"mine": "-e git+x@1"})) == {
        "a": ("1", "2"), "b": ("2", ""), "c": ("", "3"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="old and old name the same versions"):
        compared(one, one)
    with pytest.raises(ConfigError, match=r"mine is not a release of an index \(old: -e git\+x@1; new: absent\)"):
        compared(one, Lockfile("new", {"a": "2", "b": "2"}))


def test_another_python() -> None:
    Lockfile("a", {}, {}, "^3.10").check_python("3.11.7")
    Lockfile("a", {}).check_python("3.11.7")
    for wanted in ("==3.9.*", ">=3.12", "^2.7"):
        with pytest.raises(ConfigError, match=r"a is for Python .*python:PATH"):
            Lockfile("a", {}, {}, wanted).check_python("3.11.7")


def test_the_same_release_twice_is_one() -> None:
    assert parse("numpy==2.0\nNumPy==2.0.0\n", "a").pins == {"numpy": "2.0.0"}
    told = 'numpy==1.26 ; python_version < "3"\nnumpy==2.0 ; python_version >= "3"\n'
    assert parse(told, "a").pins == {"numpy": "2.0"}


def test_a_line_that_chooses_the_python() -> None:
    freeze = parse("# python: 3.9\nnumpy==2.0.0\n", "a")
    assert freeze.python == "==3.9.*" == parse("# python: 3.9.18\nnumpy==2.0.0\n", "a").python
    freeze.check_python("3.9.2")
    with pytest.raises(ConfigError, match=r"a is for Python ==3\.9\.\*, and this is 3\.11\.7"):
        freeze.check_python("3.11.7")


OTHER = Lockfile("b", {})


def test_an_overlay_takes_no_package_away() -> None:
    here = {"torch": "2.13.0+cpu", "einops": "0.8.2", "nvidia-nccl-cu12": "2.27"}
    one, other = Lockfile("a", {"torch": "2.13.0"}), Lockfile("b", {"torch": "2.13.0", "einops": "0.7.0"})
    assert remaining(one, other, here) == ["einops"] and not remaining(other, one, here)
    assert overlay_of(one, "current", here, other) is None
    assert overlay_of(other, "current", here, one) == "current+einops@0.7.0"
    assert overlay_of(one, "current", {"torch": "2.13.0+cpu"}, other) == "current"
    brought = Lockfile("b", {**one.pins, "nvidia-nccl-cu12": "2.20"})
    assert overlay_of(one, "current", here, brought) == "current"


def test_a_freeze_near_an_environment_is_laid_over_it() -> None:
    here = {"torch": "2.13.0+cpu", "transformers": "5.0.0", "numpy": "2.0.0"}
    near = Lockfile("a", {"torch": "2.13.0", "transformers": "4.45.2", "numpy": "2.0.0", "einops": "0.8.1"})
    assert overlay_of(near, "current", here, OTHER) == "current+einops@0.8.1+transformers@4.45.2"
    assert overlay_of(Lockfile("a", {"torch": "2.6.0"}), "current", here, OTHER) is None
    assert overlay_of(Lockfile("a", {f"p{n}": "1" for n in range(40)}), "current", here, OTHER) is None


def test_what_torch_brings_along_is_no_other_torch() -> None:
    """A freeze from a machine with GPUs names nvidia-... and triton; the CPU build of the same torch serves it."""
    here = {"torch": "2.13.0+cpu", "transformers": "5.0.0"}
    brought = {"nvidia-cublas-cu12": "12.8", "triton": "3.5.0", "transformers": "4.45.2"}
    assert (
        overlay_of(Lockfile("a", {"torch": "2.13.0", **brought}), "current", here, OTHER)
        == "current+transformers@4.45.2"
    )
    assert overlay_of(Lockfile("a", brought), "current", here, OTHER) is None
    assert overlay_of(Lockfile("a", {"torch": "2.6.0", **brought}), "current", here, OTHER) is None


def test_jax_comes_with_no_torch() -> None:
    """A pin of jax was left out in silence: nothing of it can be laid over, so the freeze is built whole."""
    here = {"torch": "2.13.0+cpu", "transformers": "5.0.0", "jax": "0.4.30"}
    other = Lockfile("b", {"torch": "2.13.0", "jax": "0.4.30"})
    assert overlay_of(Lockfile("a", {"torch": "2.13.0", "jax": "0.4.31"}), "current", here, other) is None
    assert overlay_of(other, "current", here, other) == "current"
    assert remaining(Lockfile("a", {"torch": "2.13.0"}), other, here) == ["jax"]


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,2}", fullmatch=True)
PINS = st.dictionaries(NAMES, VERSIONS, min_size=1, max_size=8)


@given(PINS)
def test_requirements_are_read_back(pins: dict[str, str]) -> None:
    assert parse(Lockfile("a", pins).requirements, "a").pins == pins


@given(PINS, PINS)
def test_a_comparison_names_exactly_what_differs(one: dict[str, str], other: dict[str, str]) -> None:
    if one == other:
        return
    found = compared(Lockfile("a", one), Lockfile("b", other))
    assert {name: old for name, (old, _) in found.items() if old} == dict(one.items() - other.items())
    assert {name: new for name, (_, new) in found.items() if new} == dict(other.items() - one.items())
