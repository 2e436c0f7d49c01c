"""`repro reduce` on invented outcomes: what is kept, what is written where, what is refused."""

from __future__ import annotations

import ast
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.search import reduce, statements
from repro_matrix.search.labels import Answer
from repro_matrix.search.parameters import Config, Trail
from repro_matrix.search.reduce import CaseSubject, Probe
from repro_matrix.search.statements import Source, reduce_statements
from script_observations import FINE, of_attempt, raised, rank, seen

CASE = "ddp-ready-once"


def outcomes(monkeypatch: pytest.MonkeyPatch, reproduced: Any) -> list[dict[str, Any]]:
    """Return every configuration that is probed of a case from now on."""
    asked: list[dict[str, Any]] = []

    def probe(self: CaseSubject, config: Config, repeat: int) -> Probe:
        named = dict(zip((each.name for each in self.parameters), config))
        asked.append(named)
        fired = reproduced(named)
        times = fired if isinstance(fired, int) and not isinstance(fired, bool) else repeat if fired else 0
        label = "reproduced" if times else "passed"
        return Probe(Answer(label, "RuntimeError: ready twice", times, repeat), f"{len(asked)}.json", repeat)

    monkeypatch.setattr(CaseSubject, "probe", probe)
    return asked


def repro(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    code = cli.main(["reduce", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_reduce_case_reports_what_the_failure_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = outcomes(
        monkeypatch, lambda at: bool(at["flags.find_unused"]) and at["model.config.num_hidden_layers"] >= 3
    )
    code, data, _ = repro(capsys, CASE, "model.config.num_hidden_layers=24", f"results={tmp_path}")
    assert code == 0 and data["done"] and data["attempts"] == len(asked) + 2  # what is left: three times
    assert set(data["needs"]) == {"flags.find_unused", "model.config.num_hidden_layers"}
    assert data["minimal"]["model.config.num_hidden_layers"] == 3 and data["minimal"]["steps"] == 1
    layers = next(each for each in data["varied"] if each["name"] == "model.config.num_hidden_layers")
    assert layers["reproduces_at"][0] == 3 and 24 in layers["reproduces_at"] and 2 in layers["absent_at"]
    assert data["command"][:3] == ["repro", "run", CASE]
    assert "model.config.num_hidden_layers=3" in data["command"]
    text = "\n".join(reduce.lines(data))
    assert "model.config.num_hidden_layers at least 3" in text and "not needed:" in text


def test_reduce_case_command_gives_the_reduced_cell() -> None:
    from repro_matrix.environment import stacks
    from repro_matrix.runner import session
    from repro_matrix.runner.request import ask

    subject = reduce.open_case(None, ask([f"case={CASE}"]), stacks.resolve("current"), print, threading.Event())
    simplest = tuple(each.simplest for each in subject.parameters)
    prepared = session.prepare([f"case={CASE}", *subject.run_command(simplest)[3:]])
    found = prepared.plans[0].variants[0].settings
    for each, value in zip(subject.parameters, simplest):
        group, _, name = each.name.partition(".")
        if group == "flags":
            assert found["flags"][name] == value
        elif each.name.startswith("model.config."):
            assert found["model"]["config"][name.rpartition(".")[2]] == value
        elif group == "case":
            assert found["strategy"]["options"][name.rpartition(".")[2]] == value
    assert found["steps"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ddp-ready-onc"], "did you mean 'ddp-ready-once'"),
        ([CASE, "--variant", "unfixd"], "did you mean 'unfixed'"),
        ([CASE, "variants=[unfixed]"], "--variant NAME"),
        ([CASE, "--out", "x.py"], "--out is for a script"),
        (["./no_such.py"], "no such script"),
        ([CASE, "--error", "X: y"], "for a script of your own"),
    ],
)
def test_reduce_bad_input_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reduce", *words]) == 2
    assert message in capsys.readouterr().err


def test_reduce_case_without_the_failure_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(monkeypatch, lambda at: False)
    assert repro(capsys, CASE)[0] == 2


def test_reduce_max_probes_ends_with_what_fails_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = outcomes(monkeypatch, lambda at: at["flags.find_unused"])
    code, data, _ = repro(capsys, CASE, "--max-probes", "4")
    assert code == 3 and not data["done"] and data["attempts"] == len(asked) == 4


def test_reduce_flaky_failure_is_asked_more_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = outcomes(monkeypatch, lambda at: 1 if at["flags.find_unused"] else 0)
    code, data, _ = repro(capsys, CASE)
    assert code == 0 and data["repeat"] > 3 and any("1 of 3" in note for note in data["notes"])
    assert len(asked) > len({tuple(each.items()) for each in asked})


@pytest.mark.parametrize("lost", [1, 2])
def test_reduce_infra_is_retried_and_never_evidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: int
) -> None:
    outcomes(monkeypatch, lambda at: True)
    probe, left = CaseSubject.probe, {}

    def unlucky(self: CaseSubject, config: Config, repeat: int) -> Probe:
        out = dict(zip((each.name for each in self.parameters), config))["env.X"] == "(left out)"
        left[config] = left.get(config, 0) + 1
        if out and left[config] <= lost:
            return Probe(Answer(None, "killed by SIGKILL", infra_error="launcher_died"), "z.json", repeat)
        return probe(self, config, repeat)

    monkeypatch.setattr(CaseSubject, "probe", unlucky)
    code, data, _ = repro(capsys, CASE, "env.X=1")
    found = next(each for each in data["varied"] if each["name"] == "env.X")
    if lost == 1:
        assert code == 0 and found["value"] == "(left out)"
    else:
        assert code == 3 and not data["done"] and found["needed"] is None and found["value"] == "1"
        assert [each.partition(" ")[0] for each in data["unsure"]] == ["env.X"]


# -- scripts

SCRIPT = """import sys
import json


def helper(x):
    # a comment that stays with what it explains
    return json.dumps(x)


data = [1, 2]
helper(data)
if "--boom" in sys.argv:
    print("on the way")
    raise ValueError("no")
"""


class Ranks:
    """A launcher in which the text and the arguments decide the outcome."""

    def __init__(self) -> None:
        self.launched = 0

    def launch(self, attempt: Any, stop: Any) -> dict[str, Any]:
        self.launched += 1
        path = next(Path(word) for word in attempt.command.argv if word.endswith(".py"))
        text = path.read_text()
        reproduced = "raise ValueError" in text and "import sys" in text and "--boom" in attempt.command.argv
        ranks = range(attempt.world_size)
        failed = seen(*(rank(n, 1, raised("ValueError", "no")) for n in ranks), command_exit=1)
        return of_attempt(failed if reproduced else seen(*map(rank, ranks)) if ranks else FINE, attempt)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ranks:
    made = Ranks()
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("repro_matrix.runner.attempts.CommandLauncher", lambda: made)
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(SCRIPT)
    return made


def test_reduce_script_writes_the_smallest_file_beside_it(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["./s.py", "--args=--boom --lr 3", "results=out"]
    code, data, _ = repro(capsys, *words)
    assert code == 0 and data["done"] and data["args"] == ["--boom"] and data["nproc"] == 1
    text = Path("s.reduced.py").read_text()
    assert text.split() == ["import", "sys", "if", '"--boom"', "in", "sys.argv:", "raise", 'ValueError("no")']
    assert data["lines"]["file"] == "s.reduced.py" and Path("s.py").read_text() == SCRIPT
    assert "s.reduced.py" in data["command"] and not list(Path().glob(".s.*"))
    launched = ranks.launched
    again = repro(capsys, *words, "--out", "b.py")[1]
    assert again["attempts"] == 0 and ranks.launched == launched and Path("b.py").read_text() == text


def test_reduce_script_max_probes_is_kept(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    code, data, _ = repro(capsys, "./s.py", "--args=--boom", "--max-probes", "9", "results=out")
    assert code == 3 and not data["done"] and ranks.launched <= 9


def test_reduce_script_bad_input_is_refused(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not fail" in repro(capsys, "./s.py", "results=out")[2]
    Path("there.py").write_text("")
    assert "nothing is overwritten" in repro(capsys, "./s.py", "--out", "there.py")[2]


# -- statements

FILES = [Path(statements.__file__), Path(reduce.__file__), Path(cli.__file__)]
BLOCKS = '''"""Text."""
import os, sys  # two
TEXT = """
    spaces that are content
"""
@staticmethod
def unused():
    if True: return 1; pass
for step in range(3):
    if step == 2:
        x = 1; y = 2
    elif step == 1:
        print("one")
    else:
        print("two")
try:
    1 / 1
except (OSError,
        ValueError) as error:
    print(error)
finally:
    x = 1
'''


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([BLOCKS, *(path.read_text(encoding="utf-8") for path in FILES)]), st.data())
def test_source_any_subset_is_valid_python_without_the_rest(text: str, data: st.DataObject) -> None:
    source = Source(text)
    everything = range(len(source.statements))
    assert source.only(frozenset(everything)) == text
    kept = frozenset(data.draw(st.sets(st.sampled_from(everything))))
    left = source.only(kept)
    assert left is None or ast.parse(left)
    closed = source.closed(kept)
    for at in closed if left is not None else ():
        first = source.lines[source.statements[at].first - 1].strip()
        assert first in (left or "")


@settings(deadline=None)
@given(st.data())
def test_reduce_statements_keeps_exactly_what_is_needed(data: st.DataObject) -> None:
    source = Source(BLOCKS)
    needed = frozenset(data.draw(st.sets(st.sampled_from(range(len(source.statements))), max_size=3)))
    for at in sorted(needed, reverse=True):
        while (at := source.statements[at].parent) >= 0:
            needed |= {at}
    asked: list[frozenset[int]] = []

    def probe(kept: frozenset[int]) -> tuple[bool | None, int]:
        assert kept not in asked
        asked.append(kept)
        return needed <= kept, 1

    kept, done = reduce_statements(source, Trail(probe))
    assert done and kept == needed


def test_source_undefined_names_are_found() -> None:
    source = Source("import os\nx = os.getcwd()\nprint(x, __file__)\n")
    assert source.undefined("x = os.getcwd()\nprint(x)\n") == {"os"}
    assert source.undefined(source.text) == frozenset()
