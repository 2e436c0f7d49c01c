"""`repro new` and `repro check`, as docs/guides/add-a-case.md shows them."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from observations import EXCEPTION, case, document, observation, ok
from repro_matrix.authoring import check, draft
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.errors import MeasureError
from repro_matrix.paths import BASELINE
from repro_matrix.results.store import Store
from repro_matrix.runner import run as workplace

LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/optim/optimizer.py", line 388, in __init__
[rank1]:     raise ValueError("optimizer got an empty parameter list")
[rank1]: ValueError: optimizer got an empty parameter list
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "repro.toml").write_text('conf = "failures"\nscripts = "failures/scripts"\n')
    (tmp_path / ".git").mkdir()
    (tmp_path / "failures/scripts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edited(path: Path, *pairs: tuple[str, str]) -> None:
    """Replace each pattern of a draft, and remove every TODO."""
    text = path.read_text()
    for pattern, new in pairs:
        text, count = re.subn(pattern, new, text)
        assert count == 1, pattern
    path.write_text(re.sub(r"TODO:? ?", "", text))


@given(st.from_regex(r"[ -~]{1,60}", fullmatch=True))
def test_pattern_matches_its_own_text(text: str) -> None:
    assert re.search(draft.pattern(text), text)


def test_new_from_a_log_proposes_its_signature(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "train.log").write_text(LOG)
    assert cli.main(["new", "empty-list", "--from-log", "train.log"]) == 0
    made = yaml.safe_load((mine / "failures/case/empty-list.yaml").read_text())["signatures"][0]
    assert made == {
        "name": "value",
        "kind": "exception",
        "type": "ValueError",
        "package": "torch",
        "message": "optimizer got an empty parameter list",
    }
    found = catalogue.load()
    assert found.script(found.cases["empty-list"]) == mine / "failures/scripts/empty_list.py"
    capsys.readouterr()
    assert cli.main(["check", "empty-list", "--no-run"]) == 1
    assert "failures/case/empty-list.yaml: line 2: TODO is left" in capsys.readouterr().out
    assert cli.main(["new", "empty-list"]) == 2 and "exists already" in capsys.readouterr().err


def test_new_like_a_case_copies_it(mine: Path) -> None:
    assert cli.main(["new", "other-one", "--like", "ddp-ready-once"]) == 0
    found = catalogue.load()
    other, made = found.cases["ddp-ready-once"], found.cases["other-one"]
    assert (made.flags, made.variants, made.pass_criteria) == (
        other.flags,
        other.variants,
        other.pass_criteria,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("Bad_Slug", "lower-case letters"),
        ("a --like ddp-redy-once", "did you mean 'ddp-ready-once'"),
        ("a --from-log text", "no rank raises an error"),
        ("a --silent updates --from-log text", "--from-log"),
    ],
)
def test_new_with_bad_input_exits_2_and_writes_nothing(
    words: str, message: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "text").write_text("nothing\n")
    assert cli.main(["new", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list((mine / "failures").rglob("*.*"))


def test_check_of_an_unfinished_case_names_each_problem() -> None:
    wide = case(signatures=[{**EXCEPTION, "message": "tensor"}])
    assert "too broad" in next(check.check_signatures("a.yaml", wide))

    def problems(*documents: Any) -> str:
        return "\n".join(
            check.check_attempts("a.yaml", "a.py", case(), {"forkserver": list(documents)})
        )

    there = observation(ok(0))
    name = next(name for name in case().variants if name != "unfixed")
    good = {"unfixed": [("reproduced", there)] * 3, name: [("passed", there)] * 3}
    assert problems(document(good)) == ""
    for variant, outcomes, message in (
        ("unfixed", "reproduced passed", "not deterministic"),
        ("unfixed", "passed", "is passed instead of reproduced"),
        (name, "reproduced", "matches this variant too"),
        (name, "infra_error", "no verdict"),
        (name, "other_failure", "no variant passes"),
    ):
        assert message in problems(
            document({**good, variant: [(each, there) for each in outcomes.split()]})
        )
    also = next(each for each in case().variants if each not in ("unfixed", name))
    reviewed = document({**good, name: [("reproduced", there)], also: [("passed", there)]})
    reviewed["verdicts"][name] = {
        **reviewed["verdicts"].get(name, {}),
        "name": "NOT_FIXED",
        "expected": "expected",
    }
    assert problems(reviewed) == ""
    probe = case(
        variants={"unfixed": {}, name: {"role": "probe", "flags": {"call": "root"}}, also: {}}
    )
    measured = {
        "forkserver": [document({**good, name: [("reproduced", there)], also: [("passed", there)]})]
    }
    assert check.check_attempts("a.yaml", "a.py", probe, measured) == [], "only a fix must pass"
    for kind, ready_ in (("packages", True), ("flags", False)):
        lacking = document({**good, also: []})
        lacking["variants"][also] |= {
            "skipped": "needs vllm",
            "skip": {"kind": kind, "requires": ["vllm"]},
        }
        assert bool(problems(lacking)) != ready_
        assert check.unmeasured({"forkserver": [lacking]}) == (
            {also: "needs vllm"} if ready_ else {}
        )
    both = {
        "forkserver": [document(good)],
        "torchrun": [document({**good, name: [("hang", there)]})],
    }
    assert any(
        "the launchers disagree" in str(each)
        for each in check.check_attempts("a.yaml", "a.py", case(), both)
    )


def test_check_with_a_signature_of_another_case_names_that_case() -> None:
    cases = catalogue.load().cases
    case = cases["ddp-ready-once"]
    copy = case.model_copy(update={"slug": "a-copy", "also_matches": []})
    documents = list(Store(BASELINE).documents(cases=[case.slug]))
    found = check.check_other_cases("a.yaml", copy, {**cases, "a-copy": copy}, documents)
    assert "matches the stored evidence of ddp-ready-once" in str(found[0])
    assert check.check_other_cases("a.yaml", case, cases, documents) == []


def test_syntax_error_is_exit_2_before_anything_starts(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "empty-list"]) == 0
    script = mine / "failures/scripts/empty_list.py"
    script.write_text("x = 1\ndef body(run:\n")
    for command in ("run", "check"):
        assert cli.main([command, "empty-list", "hardware=cpu"]) == 2
        assert "empty_list.py:2: " in capsys.readouterr().err
    assert not (mine / "results").exists()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_check_of_finished_drafts_exits_0(
    mine: Path, capsys: pytest.CaptureFixture[str], runs_are_warm: None
) -> None:
    (mine / "train.log").write_text(LOG)
    assert cli.main(["new", "empty-list", "--from-log", "train.log"]) == 0
    assert cli.main(["new", "shared-buffer", "--silent", "updates"]) == 0
    scripts, trigger = mine / "failures/scripts", r" +pass  # <- TODO: the call that fails.*\n"
    edited(
        scripts / "empty_list.py",
        (trigger, "        torch.optim.SGD([], lr=0.1)  # <- nothing to train\n"),
    )
    edited(
        scripts / "shared_buffer.py",
        (trigger, "        reference_lr = 0.05  # <- half of it\n"),
        (
            r"optimizer = (torch.optim.SGD\(wrapped.parameters\(\), lr=)reference.lr\)",
            r'optimizer = \1reference.lr if run.flags["fixed"] else reference_lr)',
        ),
    )
    for slug in ("empty-list", "shared-buffer"):
        edited(mine / f"failures/case/{slug}.yaml")
        capsys.readouterr()
        code = cli.main(["check", slug, "repeat=1", "hardware=cpu"])
        assert code == 0, capsys.readouterr().out


@pytest.mark.slow
def test_check_when_interrupted_or_failing_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(prepared: Any, on_event: Any, stop: threading.Event, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C, or timeout(1) with TERM
        assert stop.is_set()
        return SimpleNamespace(problem=None, documents=[])

    def full(*_: Any, **more: Any) -> Any:
        return SimpleNamespace(problem=MeasureError("the disk is full"), documents=[])

    for execute, code, message in ((ends, 130, "interrupted"), (full, 3, "the disk is full")):
        monkeypatch.setattr(workplace, "execute", execute)
        assert cli.main(["check", "ddp-ready-once"]) == code
        shown = capsys.readouterr()
        assert "ready" not in shown.out and message in shown.err
