"""What `repro accept` selects, refuses, publishes and writes; it names no machine's own folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observations import document, observation, ok
from repro_matrix import git
from repro_matrix.baseline import accept
from repro_matrix.baseline.derivation import published_place
from repro_matrix.baseline.refusals import never_reproduced, refusals
from repro_matrix.cli import accept as command
from repro_matrix.cli.main import main
from repro_matrix.config import catalog as catalogue
from repro_matrix.paths import BASELINE, ROOT, cache_dir
from repro_matrix.results import store
from repro_matrix.results.store import Store, portable

SLUG = "fsdp2-mixed-dtensor"
ATTEMPT = cache_dir() / "state" / "runs" / "20261121-1-2-ab" / "20261121-1-2-ab-cd"


@pytest.mark.parametrize(
    ("stored", "published"),
    [
        (
            f"saved in {ATTEMPT}/work/it, log {ATTEMPT}/logs/0",
            "saved in /attempt/it, log /attempt/logs/0",
        ),
        (f"{ROOT}/repros/repro_kit/run.py", "/checkout/repros/repro_kit/run.py"),
        ("see /tmp/pytest-1/saved: 3 files", "see /tmp/results: 3 files"),
        (
            "/disk/a/harness/repro_matrix/launch/worker/fork_server.py ran /disk/a/repros/run.py",
            (
                "/checkout/harness/repro_matrix/launch/worker/fork_server.py ran"
                " /checkout/repros/run.py"
            ),
        ),
    ],
)
def test_portable_replaces_local_folders_only(stored: str, published: str) -> None:
    assert portable({"message": stored, "number": 3}) == {"message": published, "number": 3}


def cell(verdict: str = "FIXED", attempts: int = 3, **changes: Any) -> dict[str, Any]:
    variants: Any = {
        variant: [(name, observation(ok(0)))] * attempts
        for variant, name in (("unfixed", "reproduced"), ("fix", "passed"))
    }
    return document(variants, {"fix": verdict}, cell_id="some-case/m-fsdp", **changes)


# Refusals


def on(cpu: str, profile: str = "cpu", **more: Any) -> dict[str, Any]:
    return cell(hardware={**cell()["hardware"], "cpu": cpu, "profile": profile, **more})


def from_code(**changes: Any) -> dict[str, Any]:
    return cell(provenance={**cell()["provenance"], **changes})


def with_fix(**changes: Any) -> dict[str, Any]:
    made = cell()
    made["variants"]["fix"].update(changes)
    return made


LOST = cell()["variants"]["fix"]["attempts"]
LOST[0] = {**LOST[0], "outcome": {"outcome": "infra_error"}}
REFUSED: list[tuple[str, list[dict[str, Any]]]] = [
    ("uncommitted", [from_code(git_dirty=True)]),
    ("uncommitted", [from_code(git_dirty=None)]),  # nobody looked
    ("outside a checkout", [from_code(git_commit=None)]),
    ("2 attempts with evidence, at least 3 are needed: repeat=3", [with_fix(attempts=LOST)]),
    ("--allow SIGNATURE_MISMATCH", [cell("SIGNATURE_MISMATCH")]),
    ("--allow FIX_BREAKS", [cell("FIX_BREAKS")]),
    (
        "a test of the harness",
        [on("a", "gpu1-nccl", accelerator="cuda", backend="nccl", shares_gpu=True)],
    ),
    ("profile cpu: cpu b against a", [on("a"), on("b"), on("a")]),
]


@pytest.mark.parametrize(("reason", "documents"), REFUSED)
def test_refusals_name_the_cell_and_the_reason(
    reason: str, documents: list[dict[str, Any]]
) -> None:
    (found,) = refusals(documents)
    assert found.cell == "some-case/m-fsdp on current" and reason in found.reason
    assert found.variant == ("fix" if "at least" in reason or "--allow" in reason else "")


@pytest.mark.parametrize(
    "documents",
    [
        [cell(), cell(model="n", attempts=4)],
        [with_fix(skipped="needs 2 GPUs", attempts=[])],
        [on("a"), on("b", "gpu1"), on("a", os="newer", memory_gb=1.0)],
    ],
)
def test_refusals_none_for_committed_code_with_enough_attempts(
    documents: list[dict[str, Any]],
) -> None:
    assert refusals(documents) == []
    assert refusals([cell("FIX_BREAKS")], ["FIX_BREAKS"]) == []


def measured(*outcomes: str, stack: str = "current", complete: bool = True) -> dict[str, Any]:
    attempts = [{"outcome": {"outcome": outcome, "reason": "because"}} for outcome in outcomes]
    return {
        "complete": complete,
        "stack": {"name": stack},
        "variants": {"unfixed": {"attempts": attempts}},
    }


def test_is_usable_needs_evidence_and_a_release() -> None:
    assert accept._is_usable(measured("infra_error", "reproduced"))
    assert not accept._is_usable(
        measured("reproduced", stack="current+transformers#0123456789ab")
    ), "no release"
    assert not accept._is_usable(measured("reproduced", complete=False))
    assert not accept._is_usable(measured("infra_error", "infra_error")) and not accept._is_usable(
        measured()
    )


@pytest.mark.parametrize(
    ("kind", "stack", "usable"),
    [
        ("packages", "torch2.6-tf4.51", True),
        ("build", "torch2.6-tf4.51", False),
        ("packages", "current+transformers@4.40.0", False),
    ],
)
def test_is_usable_a_named_stack_answers_by_its_skips(kind: str, stack: str, usable: bool) -> None:
    skipped = measured(stack=stack)
    skipped["variants"]["unfixed"] |= {
        "skipped": "needs x",
        "skip": {"kind": kind, "requires": ["x"]},
    }
    assert accept._is_usable(skipped) == usable


def test_never_reproduced_refuses_failures_and_no_controls() -> None:
    known = catalogue.load().cases
    failure = known[SLUG]
    control = next(case for case in known.values() if case.kind != "failure")
    refused = never_reproduced
    assert (
        refused(failure, [measured("passed"), measured("reproduced")])
        == refused(control, [measured("passed")])
        == ""
    )
    assert "none of 2 attempts" in refused(failure, [measured("passed", "other_failure")])
    fix: Any = {"variants": {"fix": measured("reproduced")["variants"]["unfixed"]}}
    assert "none of 0 attempts" in refused(failure, [fix])


# The command


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A project without results, whose code is that of the published ones."""
    folders = {
        "baseline": tmp_path / "baseline",
        "expected": tmp_path / "expected",
        "folder": tmp_path,
    }
    own = SimpleNamespace(**folders, is_shipped=True, file=None)
    for module in (accept, command):
        monkeypatch.setattr(module, "project", SimpleNamespace(current=lambda: own, published=list))
    monkeypatch.setattr(git, "since", lambda commit, root, paths: None)
    return own


@pytest.fixture
def accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(source: str, *more: str) -> tuple[int, str, str]:
        code = main(
            [
                "accept",
                f"case={SLUG}",
                "--reason",
                "measured anew",
                "--from",
                str(tmp_path / source),
                *more,
            ]
        )
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def put(
    folder: Path, variants: int = 99, attempts: int = 99, cell: str = "fsdp2", **changes: Any
) -> Path:
    """A published document, as if it had been measured into ``folder``."""
    found = next(d for d in Store(BASELINE).documents(cases=[SLUG]) if d["cell_id"].endswith(cell))
    found["variants"] = dict(list(found["variants"].items())[:variants])
    for variant in found["variants"].values():
        variant["attempts"] = variant["attempts"][:attempts]
    found["verdicts"] = {
        name: verdict for name, verdict in found["verdicts"].items() if name in found["variants"]
    }
    path = folder / f"{published_place(found)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    store.write_json(path, {**found, **changes})
    return path


def test_accept_publishes_results_once(
    own: Any, tmp_path: Path, accepted: Callable[..., tuple[int, str, str]]
) -> None:
    put(tmp_path / "measured")
    code, out, _ = accepted("measured", "--dry-run")
    assert code == 0 and "1 document to publish" in out
    assert main(["accept", f"case={SLUG}", "--from", str(tmp_path / "measured")]) == 2, (
        "without a reason"
    )
    assert not own.baseline.exists() and not own.expected.exists()
    code, out, _ = accepted("measured")
    assert code == 0 and "1 document to publish" in out and "changed expectations" not in out
    table = own.expected / f"{SLUG}.yaml"
    content = table.read_text(encoding="utf-8")
    assert f"case: {SLUG}" in content
    os.utime(table, ns=(1, 1))
    code, out, _ = accepted("measured")
    assert (
        code == 0
        and "1 document with the same results as published" in out
        and "to publish" not in out
    )
    assert table.stat().st_mtime_ns == 1, "an unchanged table is not written again"
    table.write_text("edited")
    accepted("measured")
    assert table.read_text(encoding="utf-8") == content
    (written,) = (
        file for file in own.baseline.rglob("*.zst") if not file.name.startswith("summary")
    )
    written.write_text("{")
    code, _, err = accepted("measured")
    assert code == 2 and "the baseline is damaged" in err and written.name in err
    assert written.read_text() == "{", "and nothing was written"


@pytest.mark.usefixtures("own")
def test_accept_refuses_incomplete_results_and_other_code(
    tmp_path: Path, accepted: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    put(tmp_path / "part", variants=2)
    put(tmp_path / "cut", complete=False)
    for source in ("empty", "part", "cut"):
        code, _, err = accepted(source)
        assert code == 2 and "no complete measurement of the selected cases" in err
    put(tmp_path / "few", attempts=1)
    code, out, err = accepted("few", "--dry-run")
    assert code == 2 and "1 document to publish" in out, "the plan is shown all the same"
    reasons = err[err.index("cannot be published:") :].splitlines()[1:]
    assert sum(line[:4].strip().isdigit() for line in reasons) == 1 and "at least 3" in reasons[0]
    put(tmp_path / "more", variants=2, cell="ranks=4")
    put(tmp_path / "more").with_name("torn.json").write_text("{")
    code, _, err = accepted("more", "--dry-run")
    assert (
        code == 0
        and "1 cell of which only some variants were measured" in err
        and "torn.json" in err
    )
    monkeypatch.setattr(
        git, "since", lambda commit, root, paths: "repros/x.py has changed since commit abc"
    )
    assert (
        "measured with other code: repros/x.py has changed since commit abc" in accepted("more")[2]
    )


@pytest.mark.usefixtures("own")
def test_accept_joins_folders_and_refuses_a_cell_in_two(
    tmp_path: Path, accepted: Callable[..., tuple[int, str, str]]
) -> None:
    one, other = put(tmp_path / "one"), put(tmp_path / "other", cell="ranks=4")
    both = f"one,{tmp_path / 'other'}"
    code, out, _ = accepted(both, "--dry-run")
    assert code == 0 and "2 documents to publish" in out
    other.with_name(one.name).write_bytes(one.read_bytes())
    code, _, err = accepted(both, "--dry-run")
    assert code == 2 and "is in two folders" in err


def test_publish_removes_an_empty_table(own: Any) -> None:
    none: Any = SimpleNamespace(cases={})
    accept.publish(accept.Publication(tables={"gone": None, "kept": "case: kept\n"}), none)
    assert [path.name for path in own.expected.iterdir()] == ["kept.yaml"]
    accept.publish(accept.Publication(tables={"kept": None}), none)
    assert not list(own.expected.iterdir())
