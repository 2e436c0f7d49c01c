"""`repro reduce` on invented outcomes: what is kept, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.environment import stacks
from repro_matrix.runner import session
from repro_matrix.runner.session import make_request
from repro_matrix.search import prober
from repro_matrix.search.prober import ProbeAnswer
from repro_matrix.search.reduce import CaseReduction
from script_observations import FINE, of_attempt, raised, rank, seen

CASE = "ddp-ready-once"
Capsys = pytest.CaptureFixture[str]
Json = dict[str, Any]


class Cell:
    """A case's cell with invented outcomes, and every configuration that was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
        self.capsys, self.launched = capsys, list[Json]()
        self.outcome: Callable[[Json], Any] = lambda at: (
            True
        )  # whether, or in how many attempts, or the answer
        self.fixed: Callable[[Json], bool] = lambda at: True  # whether the fix passes
        request = CaseReduction.request

        def remember(search: Any, config: Any) -> Any:
            search.config = dict(zip((each.name for each in search.parameters), config))
            return request(search, config)

        def measure(search: Any, request: Any, stack: Any, variants: list[str], repeat: int) -> Any:
            self.launched.append(search.config)
            answer = (
                self.outcome(search.config)
                if variants == [search.variant]
                else not self.fixed(search.config)
            )
            if not isinstance(answer, ProbeAnswer):
                times = repeat if answer is True else int(answer)
                answer = ProbeAnswer("reproduced" if times else "passed", "x", times, repeat)
            return {"variants": {variants[0]: answer}}, Path(f"{len(self.launched)}.json"), repeat

        monkeypatch.setattr(CaseReduction, "request", remember)
        monkeypatch.setattr(CaseReduction, "measure", measure)
        monkeypatch.setattr(prober, "answer_of", lambda case, variant: variant)

    def reduce(self, *words: str) -> tuple[int, Any]:
        return repro(self.capsys, CASE, *words)[:2]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> Cell:
    return Cell(monkeypatch, capsys)


def repro(capsys: Capsys, *words: str) -> tuple[int, Any, str]:
    code = cli.main(["reduce", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_reduce_case_reports_needed_parameters(cell: Cell) -> None:
    cell.outcome = lambda at: at["flags.find_unused"] and at["model.config.num_hidden_layers"] >= 3
    code, data = cell.reduce("model.config.num_hidden_layers=24")
    assert (
        code == 0 and data["done"] and data["attempts"] == len(cell.launched) + 2
    )  # the result: three times
    assert set(data["needs"]) == {"flags.find_unused", "model.config.num_hidden_layers"}
    assert data["minimal"]["model.config.num_hidden_layers"] == 3 and data["minimal"]["steps"] == 1
    layers = next(
        each for each in data["varied"] if each["name"] == "model.config.num_hidden_layers"
    )
    assert {"value": 2, "reproduced": False, "answer": "passed"} in layers["answers"]
    assert (
        data["command"][:3] == ["repro", "run", CASE]
        and "model.config.num_hidden_layers=3" in data["command"]
    )
    assert cli.main(["reduce", CASE, "model.config.num_hidden_layers=24"]) == 0
    out = cell.capsys.readouterr().out
    assert (
        "model.config.num_hidden_layers: 3; " in out and "model.config.num_hidden_layers=3" in out
    )


def test_reduce_case_keeps_sizes_at_which_the_fix_passes(cell: Cell) -> None:
    cell.fixed = lambda at: at["model.config.vocab_size"] >= 16
    code, data = cell.reduce()
    assert (
        code == 0
        and data["minimal"]["model.config.vocab_size"] == 16
        and "model.config.vocab_size" in data["needs"]
    )
    vocabulary = next(each for each in data["varied"] if each["name"] == "model.config.vocab_size")
    assert any("the fix non-reentrant fails" in each["answer"] for each in vocabulary["answers"])
    cell.fixed = lambda at: False  # not even as given
    assert cell.reduce()[1]["minimal"]["model.config.vocab_size"] == 1


def test_reduce_case_command_gives_the_reduced_cell() -> None:
    search = CaseReduction(
        None,
        make_request([f"case={CASE}"]),
        stacks.resolve("current"),
        None,
    )
    simplest = tuple(each.simplest for each in search.parameters)
    prepared = session.prepare([f"case={CASE}", *search.command(simplest)[3:]])
    found = prepared.plans[0].variants[0].settings
    groups = {
        "flags": found["flags"],
        "case": found["strategy"]["options"],
        "model": found["model"]["config"],
    }
    for each, value in zip(search.parameters, simplest):
        group, _, name = each.name.partition(".")
        assert (
            groups[group][name.rpartition(".")[2]] if group in groups else found[group]
        ) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ddp-ready-onc"], "'ddp-ready-once'"),
        (["./no_such.py"], "no such script"),
        ([CASE, "--error", "X: y"], "for a script of your own"),
    ],
)
def test_reduce_bad_input_is_refused(words: list[str], message: str, capsys: Capsys) -> None:
    assert cli.main(["reduce", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [(False, 2), (ProbeAnswer(None, "hang"), 3)])
def test_reduce_without_the_failure_is_refused(cell: Cell, answer: Any, code: int) -> None:
    cell.outcome = lambda at: answer
    assert cell.reduce()[0] == code


def test_reduce_max_probes_ends_with_a_failing_cell(cell: Cell) -> None:
    cell.outcome = lambda at: at["flags.find_unused"]
    code, data = cell.reduce("--max-probes", "4")
    assert code == 3 and not data["done"] and data["attempts"] == len(cell.launched) == 4
    assert data["minimal"]["flags.find_unused"] is True


def test_reduce_flaky_failure_is_launched_more_often(cell: Cell) -> None:
    cell.outcome = lambda at: 1 if at["flags.find_unused"] else 0
    code, data = cell.reduce()
    assert code == 0 and data["repeat"] > 3 and data["notes"]
    assert len(cell.launched) > len({tuple(each.items()) for each in cell.launched})


@pytest.mark.parametrize(("kind", "unsure"), [("launcher_died", True), ("script_error", False)])
def test_reduce_infra_error_is_never_evidence(cell: Cell, kind: Any, unsure: bool) -> None:
    killed = ProbeAnswer(None, "killed by SIGKILL", infra_error=kind)
    cell.outcome = lambda at: killed if at["env.X"] == "(left out)" else True
    code, data = cell.reduce("env.X=1")
    found = next(each for each in data["varied"] if each["name"] == "env.X")
    assert found["needed"] is None and found["value"] == "1"
    assert (
        bool(data["unsure"]) == unsure
        and code == (3 if unsure else 0)
        and data["done"] == (not unsure)
    )


# -- scripts

SCRIPT = """import sys

if "--boom" in sys.argv:
    raise ValueError("no")
"""


class Ranks:
    """A launcher in which the arguments decide the outcome."""

    name = "fake"

    def __init__(self) -> None:
        self.launched = 0

    def close(self) -> None: ...

    def launch(self, attempt: Any, stop: Any) -> Json:
        self.launched += 1
        reproduced = "--boom" in attempt.command.argv
        ranks = range(attempt.world_size)
        failed = seen(*(rank(n, 1, raised("ValueError", "no")) for n in ranks), command_exit=1)
        return of_attempt(
            failed if reproduced else seen(*map(rank, ranks)) if ranks else FINE, attempt
        )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ranks:
    launcher = Ranks()
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("repro_matrix.runner.run.open_launcher", lambda name: launcher)
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(SCRIPT)
    return launcher


def test_reduce_script_leaves_out_arguments_and_ranks(ranks: Ranks, capsys: Capsys) -> None:
    words = ["./s.py", "--args=--boom --lr 3", "--nproc", "4", "results=out"]
    code, data, _ = repro(capsys, *words)
    assert (
        code == 0 and data["done"] and data["args"] == ["--boom"] and data["confirmed"] == "3 of 3"
    )
    assert (
        data["nproc"] == 1
        and data["needs"] == ["--boom"]
        and data["command"][-2:] == ["./s.py", "--boom"]
    )
    assert Path("s.py").read_text() == SCRIPT
    launched = ranks.launched
    assert repro(capsys, *words)[1]["attempts"] == 0 and ranks.launched == launched


def test_reduce_script_without_its_failure_is_refused(ranks: Ranks, capsys: Capsys) -> None:
    assert repro(capsys, "./s.py", "results=out")[0] == 2
