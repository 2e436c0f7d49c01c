"""What `repro accept` publishes, refuses and says; it names no machine's own folders."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repro_matrix.cli import accept as command
from repro_matrix.cli.main import main
from repro_matrix.config import catalog as catalogue
from repro_matrix.paths import BASELINE, ROOT, cache_dir
from repro_matrix.results import accept, store
from repro_matrix.results.accept import place, publication
from repro_matrix.results.store import Store, portable

SLUG = "fsdp2-mixed-dtensor"


def test_portable_replaces_local_folders_only() -> None:
    attempt = cache_dir() / "state" / "runs" / "20261121-1-2-ab" / "20261121-1-2-ab-cd"
    saved, log, kit = (
        attempt / "work" / "checkpoint",
        attempt / "logs" / "rank-0.log",
        ROOT / "repros" / "repro_kit" / "run.py",
    )
    text = f"saved in {saved}, log {log}, kit {kit}"
    shown = portable({"message": text, "number": 3})
    assert shown == {
        "message": "saved in /attempt/checkpoint, log /attempt/logs/rank-0.log, kit /checkout/repros/repro_kit/run.py",
        "number": 3,
    }
    assert str(ROOT) not in json.dumps(shown)


def measured(*outcomes: str, stack: str = "current", complete: bool = True) -> dict[str, Any]:
    attempts = [{"outcome": {"outcome": outcome, "reason": "because"}} for outcome in outcomes]
    return {"complete": complete, "stack": {"name": stack}, "variants": {"unfixed": {"attempts": attempts}}}


def test_is_usable_needs_evidence_and_a_release() -> None:
    document = measured
    assert accept._is_usable(document("infra_error", "reproduced"))
    assert not accept._is_usable(document("reproduced", stack="current+transformers#0123456789ab")), (
        "a commit is no release"
    )
    assert not accept._is_usable(document("reproduced", complete=False))
    assert not accept._is_usable(document("infra_error", "infra_error")) and not accept._is_usable(document())


def test_portable_replaces_the_folder_of_another_checkout() -> None:
    document = {
        "command": ["python", "/disk/a/harness/repro_matrix/launch/worker/fork_server.py"],
        "file": "/disk/a/repros/repro_kit/run.py",
    }
    shown = {
        "command": ["python", "/checkout/harness/repro_matrix/launch/worker/fork_server.py"],
        "file": "/checkout/repros/repro_kit/run.py",
    }
    assert portable(document) == shown


def test_never_reproduced_refuses_failures_and_no_controls() -> None:
    known = catalogue.load().cases
    failure = known[SLUG]
    control = next(case for case in known.values() if case.kind != "failure")
    reproduced: Any = {"outcome": {"outcome": "reproduced"}}
    refused = accept._never_reproduced
    assert refused(failure, [measured("passed"), measured("reproduced")]) == ""
    assert refused(control, [measured("passed")]) == ""
    assert "none of 2 attempts" in refused(failure, [measured("passed", "other_failure")])
    assert "none of 0 attempts" in refused(failure, [{"variants": {"fix": {"attempts": [reproduced]}}}])


def test_publish_removes_an_empty_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(baseline=tmp_path / "baseline", expected=tmp_path / "deep" / "expected")
    found, none = publication({}, [], [], ""), SimpleNamespace(cases={})
    monkeypatch.setattr(accept, "project", SimpleNamespace(current=lambda: own))
    accept.publish(replace(found, tables={"gone": None, "kept": "case: kept\n"}), none)  # type: ignore[arg-type]
    assert [path.name for path in own.expected.iterdir()] == ["kept.yaml"]
    accept.publish(replace(found, tables={"kept": None}), none)  # type: ignore[arg-type]
    assert not list(own.expected.iterdir())


def put(folder: Path, **changes: Any) -> Path:
    """A published document, as if it had been measured into ``folder``."""
    (document,) = (d for d in Store(BASELINE).documents(cases=[SLUG]) if "ranks=" not in d["cell_id"])
    path = folder / f"{place(document)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in {**document, **changes}.items() if key != "path"}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return path


def test_accept_publishes_complete_results_of_this_code_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = SimpleNamespace(
        baseline=tmp_path / "baseline", expected=tmp_path / "expected", is_shipped=True, folder=tmp_path
    )
    own.file = None
    for module in (accept, command):
        monkeypatch.setattr(module, "project", SimpleNamespace(current=lambda: own, published=list))
    other: list[str] = []  # what has changed since the commit
    monkeypatch.setattr(store, "since", lambda commit, root, paths: other[0] if other else None)

    def accepted(source: str, *more: str) -> tuple[int, str, str]:
        code = main(["accept", f"case={SLUG}", "--reason", "measured anew", "--from", str(tmp_path / source), *more])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    (tmp_path / "empty").mkdir()
    code, _, err = accepted("empty")
    assert code == 2 and "no complete measurement of the selected cases" in err
    (published,) = (d for d in Store(BASELINE).documents(cases=[SLUG]) if "ranks=" not in d["cell_id"])
    variants = dict(list(published["variants"].items())[:2])
    put(
        tmp_path / "part",
        variants=variants,
        verdicts={variant: v for variant, v in published["verdicts"].items() if variant in variants},
    )
    assert "no complete measurement" in accepted("part")[2] and not own.baseline.exists()
    put(tmp_path / "dirty", provenance={**published["provenance"], "git_dirty": True})
    assert "cannot be published:" in (refused := accepted("dirty")[2]) and "uncommitted" in refused
    assert f"  {published['cell_id']} on {published['stack']['name']}: measured with" in refused
    put(tmp_path / "measured")
    other.append("repros/x.py has changed since commit abc")
    assert "measured with other code: repros/x.py has changed since commit abc" in accepted("measured")[2]
    other.clear()
    code, out, _ = accepted("measured", "--dry-run")
    assert "of which only some variants were measured" not in out
    beside = next(d for d in Store(BASELINE).documents(cases=[SLUG]) if "ranks=4" in d["cell_id"])
    first = dict(list(beside["variants"].items())[:2])
    some = {
        **beside,
        "variants": first,
        "verdicts": {variant: v for variant, v in beside["verdicts"].items() if variant in first},
    }
    path = put(tmp_path / "more").with_name("beside.json")
    path.write_text(json.dumps({key: value for key, value in some.items() if key != "path"}))
    path.with_name("torn.json").write_text("{")
    code, out, err = accepted("more", "--dry-run")
    assert code == 0 and "1 cell of which only some variants were measured" in err and "torn.json" in err
    code, out, _ = accepted("measured", "--dry-run")
    assert code == 0 and "1 document to publish" in out and "Review and commit" not in out
    assert not own.baseline.exists() and not own.expected.exists(), "a plan writes nothing"
    code, out, _ = accepted("measured")
    assert code == 0 and "1 document to publish" in out and f"written to {own.baseline}" in out
    assert "changed expectations" not in out
    assert "left out" not in out
    put(tmp_path / "cut", complete=False)
    assert "no complete measurement" in accepted("cut")[2], "a run that was interrupted"
    (written,) = (file for file in own.baseline.rglob("*.zst") if not file.name.startswith("summary"))
    table = own.expected / f"{SLUG}.yaml"
    said = table.read_text(encoding="utf-8")
    assert f"case: {SLUG}" in said
    os.utime(table, ns=(1, 1))
    code, out, _ = accepted("measured")
    assert code == 0 and "1 document with the same results as published" in out and "to publish" not in out
    assert table.stat().st_mtime_ns == 1, "what says the same is not written again"
    table.write_text("somebody else's")
    accepted("measured")
    assert table.read_text(encoding="utf-8") == said, "and what somebody made of it is"
    monkeypatch.setenv("REPRO_CONFIG_PATH", str(tmp_path / "conf"))
    (tmp_path / "conf" / "case").mkdir(parents=True)
    (tmp_path / "conf" / "case" / "bad.yaml").write_text("slug: bad\ntilte: x\n")
    assert "note: left out: " in (said := accepted("measured")[2]) and "bad.yaml" in said
    written.write_text("{")
    code, _, err = accepted("measured")
    assert code == 2 and "the baseline is damaged" in err and written.name in err
    assert written.read_text() == "{", "and nothing was written"
