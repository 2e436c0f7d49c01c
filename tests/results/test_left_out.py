"""A wrong file of conf/ or results/expected disables itself only: it is named, and selecting it is
an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.baseline.derivation import published_place
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.expectations import Expectation, text
from repro_matrix.errors import ConfigError
from repro_matrix.paths import BASELINE, CONF, EXPECTED
from repro_matrix.results.store import Store, write_json

WRONG = {
    "case/bad.yaml:5: not valid YAML": (
        "slug: bad\ntitle: x\nkind: failure\npass_criteria: {a: 1\nvariants: ]\n"
    ),
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
def test_invalid_case_is_named_and_others_work(
    wrong: str, own: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own("case/bad.yaml", WRONG[wrong])
    code, out, err = said(capsys, "list", "case=train-*")
    assert code == 0 and "train-step" in out and "note: left out: " in err and wrong in err
    assert wrong in said(capsys, "doctor", "--json", "case=train-step", "model=qwen-7b")[1].replace(
        '\\"', '"'
    )
    for words in (
        ["list", "case=bad"],
        ["run", "bad"],
        ["show", "bad"],
        ["matrix", "case=train-step,bad"],
    ):
        code, _, err = said(capsys, *words)
        assert code == 2 and wrong in err and "Traceback" not in err


@pytest.mark.ranks
@pytest.mark.xdist_group("stack")
def test_run_with_an_invalid_selected_file_is_incomplete(
    own: Callable[[str, str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    runs_are_warm: None,
) -> None:
    own("case/train-stop.yaml", "slug: train-stop\ntilte: x\n")
    own("case/bad.yaml", "slug: bad\ntilte: x\n")
    words = [
        "case=train-st?p",
        "model=qwen1.5-0.5b",
        "strategy=ddp",
        "hardware=cpu",
        f"results={tmp_path / 'r'}",
    ]
    code, out, err = said(capsys, "run", "train-st?p", *words[1:])
    assert code == 3, out + err
    assert "LEFT OUT: " in out and "train-stop.yaml: unknown key 'tilte'" in " ".join(
        out.split()
    )  # wrapped
    assert "bad.yaml" not in out and "bad.yaml" in err  # known to be wrong, and not asked for


def test_invalid_model_removes_only_its_cells(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "model" / "qwen-7b.yaml").write_text("slug: [\n")
    (conf / "strategy" / "zero3.yaml").write_text("slug: zero3\ntitel: x\n")
    (conf / "stack" / "colossalai.yaml").write_text("slug: colossalai\npinz: []\n")
    whole, found = catalogue.load(), catalogue.load(conf)
    assert "qwen-7b" in whole.cases["train-step"].axes.model
    assert "qwen-7b" not in found.cases["train-step"].axes.model
    assert "zero3" not in found.cases["train-step"].axes.strategy
    assert "zero3-device-map" in catalogue.left_out(found.cases)  # it has no other strategy
    assert "fsdp-generate" in found.cases  # although a claim of another case is not there
    assert len(found.left_out) > 3 and any("model/qwen-7b.yaml:" in text for text in found.left_out)


def test_invalid_stack_is_an_error_only_where_it_is_used(
    own: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own("stack/bad.yaml", "slug: bad\ntitle: x\npinz: []\n")
    assert said(capsys, "list", "stack=current", "case=train-step")[0] == 0
    for words, expected in ((["stack", "list"], 0), (["stack", "build", "bad"], 2)):
        code, _, err = said(capsys, *words)
        assert code == expected and "unknown key 'pinz'; did you mean 'pins'?" in err


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped configuration and of what is expected, which the catalogue reads."""
    shutil.copytree(CONF, tmp_path / "conf")
    shutil.copytree(EXPECTED, tmp_path / "results" / "expected")
    load = catalogue.load
    monkeypatch.setattr(
        catalogue, "load", lambda conf=tmp_path / "conf", **more: load(conf, **more)
    )
    return tmp_path


BAD_TABLES = {
    "results/expected/train-step.yaml:4: not valid YAML": (
        "case: train-step\nranges:\n- {a: b\nverdicts: {}\nx: ]\n"
    ),
    "results/expected/train-step.yaml: unknown key 'rangess'; did you mean 'ranges'?": (
        "case: train-step\nrangess: 1\n"
    ),
}


@pytest.mark.parametrize("wrong", BAD_TABLES)
def test_invalid_expectations_disable_their_case_only(
    wrong: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "results" / "expected" / "train-step.yaml").write_text(BAD_TABLES[wrong])
    (checkout / "results" / "expected" / "train-stepp.yaml").write_text("case: train-stepp\n")
    code, out, err = said(capsys, "list", "case=fsdp-generate")
    assert code == 0 and "fsdp-generate" in out and wrong in err
    assert "results/expected/train-stepp.yaml: " in err and "'train-stepp'" in err
    code, _, err = said(capsys, "show", "train-step")
    assert code == 2 and wrong in err and "Traceback" not in err
    results = checkout / "one"  # what was measured of it cannot pass
    stored = next(Store(BASELINE).documents(cases=["train-step"]))
    path = results / f"{published_place(stored)}.json"
    path.parent.mkdir(parents=True)
    write_json(path, stored)
    code, out, _ = said(capsys, "report", str(results), "--format", "junit")
    assert code == 3 and 'errors="1"' in out
    code, _, err = said(
        capsys,
        "nightly",
        str(results),
        "--history",
        str(checkout / "nights"),
        "--run-exit-code",
        "0",
    )
    assert (
        code == 3
        and "case 'train-step' cannot be graded" in err
        and "results/expected/train-step.yaml" in err
    )


# The tables of expectations

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
VARIANTS = st.sampled_from(["fix", "other-fix", "per-rank: [x]", "~"])
ENTRIES = st.builds(
    Expectation,
    verdicts=st.dictionaries(
        VARIANTS, st.sampled_from(["FIXED", "SIGNATURE_MISMATCH"]), min_size=1
    ),
    cells=st.lists(WORDS, max_size=2),
    hardware=st.sampled_from(["cpu", "gpu1"]),
    capabilities=st.dictionaries(WORDS, st.booleans() | st.just("AVX2"), max_size=1),
    versions=st.just({"torch": ">=2.13,<2.14"}),
    measured_at=st.lists(
        st.builds(lambda v: {"torch": v}, st.sampled_from(["2.13", "2.6.0"])),
        min_size=1,
        max_size=2,
    ),
    reason=WORDS,
)


@given(st.lists(ENTRIES, min_size=1, max_size=3), st.data())
def test_expectations_text_reads_back(entries: list[Expectation], data: Any) -> None:
    said = WORDS | st.lists(WORDS, min_size=2, max_size=3)
    failure_ids = [
        data.draw(st.dictionaries(st.sampled_from(sorted(e.verdicts)), said)) for e in entries
    ]
    entries = [e.model_copy(update={"failure_ids": seen}) for e, seen in zip(entries, failure_ids)]
    written = text("some-case", entries)
    assert table(written) == {"some-case": entries}


def table(written: str, name: str = "some-case") -> dict[str, list[Expectation]]:
    path = Path(f"results/expected/{name}.yaml")
    return {name: catalogue.parse_expectations(yaml.safe_load(written), path)}


GOOD = text(
    "some-case",
    [Expectation(verdicts={"fix": "FIXED"}, measured_at=[{"torch": "2.13.0"}], reason="r")],
)


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
