"""A cell is one document of its folder: copies are counted once, contradictions named, and so are names of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.results.twice import Held, sort_out
from test_nightly import results
from test_nights import CLEAN, document
from test_nights import FIRES as FIRED

__all__ = ["results"]  # a fixture
CASE = "fsdp-generate"
KEY = f"{CASE}/qwen1.5-0.5b-fsdp"


def held(path: str, started: float = 1.0, says: str = "x", key: str = "c/m-ddp", hardware: str = "cpu") -> Held:
    return Held(path, key, hardware, "now", started, says)


OWN = held("r/cpu/s/c/m-ddp.json")


@pytest.mark.parametrize(
    ("others", "dropped", "notes", "wrong"),
    [
        ([], 0, 0, 0),
        ([held("r/cpu/s/c/copy.json")], 1, 1, 0),
        ([held("r/cpu/s/c/copy.json", started=2.0)], 1, 0, 1),
        ([held("r/cpu/s/other/m-ddp.json", says="y")], 1, 0, 1),
        ([held("r/cpu/s/c/copy.json", 2.0, "y"), held("r/cpu/s/c/copy2.json")], 2, 1, 1),
        ([held("r/cpu/s/c/n-ddp.json", key="c/n-ddp", says="y")], 0, 0, 0),
        ([held("r/cpu/t/c/m-ddp.json", says="y")], 0, 0, 0),
        ([held("s/cpu/s/c/m-ddp.json", says="y")], 0, 0, 0),
        ([held("r/gpu1/s/c/m-ddp.json", says="y", hardware="gpu1")], 0, 0, 0),
        ([held("r/cpu/s/c/n-ddp.json", key="c/o-ddp", says="y")], 0, 1, 0),
        ([held("before.json", key="c/o-ddp", says="y")], 0, 0, 0),
        ([held("r/cpu/now.jsonl:2"), held("r/cpu/now.jsonl:3", says="y", key="c/n-ddp")], 0, 0, 0),
    ],
    ids=["alone", "a copy", "another time", "says otherwise", "both", "another cell", "another stack",
         "another folder", "other hardware", "another cell's name", "no tree of results", "lines"],
)  # fmt: skip
def test_a_cell_is_one_document(others: list[Held], dropped: int, notes: int, wrong: int) -> None:
    for order in ([OWN, *others], [*others, OWN]):
        found = sort_out(order)
        assert (len(found.dropped), len(found.notes), len(found.wrong)) == (dropped, notes, wrong)
        assert OWN.path not in found.dropped


@pytest.mark.parametrize("otherwise", [False, True])
def test_every_verb_counts_a_copy_once(otherwise: bool, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = results / "mon" / "cpu" / "s" / CASE
    folder.mkdir(parents=True)
    made: dict[str, Any] = document({"broken": FIRED}, {}, case=CASE, key=KEY, model="qwen1.5-0.5b")
    (folder / "qwen1.5-0.5b-fsdp.json").write_text(json.dumps(made))
    other = document({"broken": CLEAN}, {}, case=CASE, key=KEY, model="qwen1.5-0.5b") if otherwise else made
    (folder / "copy.json").write_text(json.dumps(other))
    told = "once more and says otherwise" if otherwise else "the same document as"
    code = 3 if otherwise else 0
    mon = str(results / "mon")
    for words in (["nightly", mon, "--nights", str(results / "n"), "--code", "0"], ["diff", mon, mon]):
        assert cli.main(words) == code
        out, err = capsys.readouterr()
        assert "1 cell" in out and "2 cells" not in out and told in " ".join(err.split())
    for form in ("markdown", "json", "csv", "junit"):
        assert cli.main(["report", mon, "--format", form]) == code
        out, err = capsys.readouterr()
        assert told in " ".join(err.split())
        assert form != "json" or len(json.loads(out)["rows"]) == 1
    assert cli.main(["report", mon]) == code
    assert told in (results / "mon" / "report.html").read_text()


def test_a_document_under_another_cells_name_is_named(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = results / "mon" / "cpu" / "s" / CASE
    folder.mkdir(parents=True)
    made = document({"broken": FIRED}, {}, case=CASE, key=KEY, model="qwen1.5-0.5b")
    (folder / "qwen2-0.5b-fsdp.json").write_text(json.dumps(made))
    told = f"qwen2-0.5b-fsdp.json: holds the cell {KEY}, and not the one of its name"
    for words in (["nightly", "--nights", str(results / "n"), "--code", "0"], ["report", "--format", "csv"]):
        assert cli.main([words[0], str(results / "mon"), *words[1:]]) == 0
        assert told in " ".join(capsys.readouterr().err.split())
