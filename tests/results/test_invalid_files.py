"""An invalid file of conf/ or results/expected is an error that names file, key and the nearest choice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.expectations import Expectation, text
from repro_matrix.errors import ConfigError
from repro_matrix.paths import CONF, EXPECTED

WRONG = {
    "case/bad.yaml:5: not valid YAML": "slug: bad\ntitle: x\nkind: failure\npass_criteria: {a: 1\nvariants: ]\n",
    "case/bad.yaml: unknown key 'tilte'; did you mean 'title'?": "slug: bad\ntilte: x\n",
    "case/bad.yaml: cannot be read": "\udcff",
}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a file of a team's own folder of groups."""
    monkeypatch.setenv("REPRO_CONFIG_PATH", str(tmp_path))

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        return path

    return write


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_case_is_an_error_that_names_it(
    wrong: str, own: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own("case/bad.yaml", WRONG[wrong])
    for words in (["list", "case=train-*"], ["run", "bad"], ["show", "train-step"], ["match", "train.log"]):
        code, _, err = said(capsys, *words)
        assert code == 2 and wrong in err and "Traceback" not in err


def test_invalid_stack_is_an_error_that_names_it(
    own: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own("stack/bad.yaml", "slug: bad\ntitle: x\npinz: []\n")
    for words in (["list", "case=train-step"], ["stack", "list"], ["stack", "build", "bad"]):
        code, _, err = said(capsys, *words)
        assert code == 2 and "unknown key 'pinz'; did you mean 'pins'?" in err


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped configuration and of what is expected, which the catalogue reads."""
    shutil.copytree(CONF, tmp_path / "conf")
    shutil.copytree(EXPECTED, tmp_path / "results" / "expected")
    load = catalogue.load
    monkeypatch.setattr(catalogue, "load", lambda conf=tmp_path / "conf", **more: load(conf, **more))
    return tmp_path


BAD_TABLES = {
    "results/expected/train-step.yaml:4: not valid YAML": "case: train-step\nranges:\n- {a: b\nverdicts: {}\nx: ]\n",
    "results/expected/train-step.yaml: unknown key 'rangess'; did you mean 'ranges'?":
        "case: train-step\nrangess: 1\n",
}  # fmt: skip


@pytest.mark.parametrize("wrong", BAD_TABLES)
def test_invalid_expectations_are_an_error_that_names_them(
    wrong: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "results" / "expected" / "train-step.yaml").write_text(BAD_TABLES[wrong])
    code, _, err = said(capsys, "show", "train-step")
    assert code == 2 and wrong in err and "Traceback" not in err


def test_expectations_of_an_unknown_case_are_an_error(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "results" / "expected" / "train-stepp.yaml").write_text("case: train-stepp\n")
    code, _, err = said(capsys, "list", "case=fsdp-generate")
    assert code == 2 and "results/expected/train-stepp.yaml: " in err and "did you mean 'train-step'?" in err


# The tables of expectations

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
VARIANTS = st.sampled_from(["fix", "other-fix", "per-rank: [x]", "~"])
ENTRIES = st.builds(
    Expectation,
    verdicts=st.dictionaries(VARIANTS, st.sampled_from(["FIXED", "SIGNATURE_MISMATCH"]), min_size=1),
    cells=st.lists(WORDS, max_size=2),
    hardware=st.sampled_from(["cpu", "gpu1"]),
    capabilities=st.dictionaries(WORDS, st.booleans() | st.just("AVX2"), max_size=1),
    versions=st.just({"torch": ">=2.13,<2.14"}),
    measured_at=st.lists(st.builds(lambda v: {"torch": v}, st.sampled_from(["2.13", "2.6.0"])), min_size=1, max_size=2),
    reason=WORDS,
)


@given(st.lists(ENTRIES, min_size=1, max_size=3), st.data())
def test_expectations_text_reads_back(entries: list[Expectation], data: Any) -> None:
    said = WORDS | st.lists(WORDS, min_size=2, max_size=3)
    failure_ids = [data.draw(st.dictionaries(st.sampled_from(sorted(e.verdicts)), said)) for e in entries]
    entries = [e.model_copy(update={"failure_ids": seen}) for e, seen in zip(entries, failure_ids)]
    written = text("some-case", entries)
    assert table(written) == {"some-case": entries}


def table(written: str, name: str = "some-case") -> dict[str, list[Expectation]]:
    path = Path(f"results/expected/{name}.yaml")
    return {name: catalogue.parse_expectations(yaml.safe_load(written), path)}


GOOD = text("some-case", [Expectation(verdicts={"fix": "FIXED"}, measured_at=[{"torch": "2.13.0"}], reason="r")])


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("FIXED", "FIX_HODLS", "FIXED"),
        ("[FIXED]", "[FIXED, FIXED]", "2 columns for 1 ranges"),
        ("hardware", "hardwear", "hardware"),
        ("case: some-case", "case: other-case", "must be the file's name"),
        ("measured_at: [{torch: 2.13.0}]", "measured: []", "measured_at"),
    ],
)
def test_parse_expectations_invalid_table_is_refused(old: str, new: str, said: str) -> None:
    assert old in GOOD and table(GOOD)["some-case"]
    with pytest.raises(ConfigError, match=r"results/expected/some-case.yaml") as refused:
        table(GOOD.replace(old, new))
    assert said in str(refused.value)
