"""Probes of a script whose ranks are forked from servers: when that may be, and that it is a start of its own."""

from __future__ import annotations

import json
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from probing import world
from repro_matrix.cli.main import main
from repro_matrix.environment import stacks
from repro_matrix.external.scripts import command_line as command
from repro_matrix.external.scripts.failure import Failure, log
from repro_matrix.external.scripts.forked import Forked, lines
from repro_matrix.external.scripts.measure import Script, beside, once
from repro_matrix.external.scripts.prefix import imports
from repro_matrix.search.prober import Target
from test_script import FINE
from test_script_bisect import BISECT, Lab, before, error, found, lab, number

__all__ = ["lab", "world"]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("import torch\nimport os, sys\nprint(1)\nimport yaml", ["import torch", "import os, sys"]),
        ('"""What it is."""\nfrom __future__ import annotations\nimport torch', ["import torch"]),
        ("from a import (\n  A,\n  B as C,\n)\nimport torch as t", ["from a import A, B as C", "import torch as t"]),
        # What stands before torch may decide what torch is: then nothing is imported ahead.
        ("import os\nos.environ['A'] = '1'\nimport torch", []),
        ("try:\n    import torch\nexcept ImportError:\n    pass", []),
        ("import transformers", []),
        # Its own modules, and what comes after them, are the rank's to import.
        ("import torch\nimport mine\nimport transformers", ["import torch"]),
        ("import torch\nfrom . import x\nimport yaml", ["import torch"]),
        ("import torch\nx = 1\nimport yaml", ["import torch"]),
        ("import torch(", []),
        ("", []),
    ],
)  # fmt: skip
def test_what_a_script_imports_before_it_does_anything(text: str, wanted: list[str]) -> None:
    assert list(imports(text, {"mine", "data"})) == wanted


def test_what_lies_beside_a_script_is_part_of_what_was_measured(tmp_path: Path) -> None:
    """A helper module was edited, and the search read what was stored before."""
    folder = tmp_path / "mine"
    (folder / "pack" / "deep").mkdir(parents=True)
    for name in ("train.py", "helper.py", "pack/__init__.py", "pack/deep/more.py"):
        (folder / name).write_text("x = 1\n")
    seen = [beside(folder / "train.py")]
    for name in ("helper.py", "pack/deep/more.py", "new.py"):
        (folder / name).write_text("x = 2\n")
        seen.append(beside(folder / "train.py"))
    (folder / "data.txt").write_text("nobody looks at it\n")
    assert beside(folder / "train.py") == seen[-1] and beside(None) == []
    assert len({tuple(each) for each in seen}) == 4


def test_what_has_to_start_from_cold(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    made = command.of_script(str(tmp_path / "train.py"), 2, "--lr 1")
    assert lines(made, Failure(), "cpu") == (("import torch",), "")
    assert "import" in lines(made, log("deprecated"), "cpu")[1]
    assert "cards" in lines(made, Failure(), "cuda")[1]
    assert "torchrun" in lines(command.of_words(["python", str(tmp_path / "train.py")]), Failure(), "cpu")[1]
    assert "torchrun" in lines(command.of_script("my.train", 2, module=True), Failure(), "cpu")[1]


# --- a search: its first two probes are launched both ways


class Servers:
    """In place of the launcher: it was opened, it was closed."""

    name = "warm"
    opened: ClassVar[list[Any]] = []

    def __init__(self, share: bool) -> None:
        self.share, self.closed = share, False
        Servers.opened.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def two(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What was measured: (the release, whether its ranks were forked)."""
    Servers.opened = []
    asked: list[tuple[str, bool]] = []
    cold = lab.measure

    def measure(script: Any, stack: Any, repeat: int, stop: Any, forked: Any = None) -> Any:
        asked.append((stack.versions["transformers"], forked is not None))
        as_is = lab.observe
        if forked is not None and hasattr(lab, "between"):
            lab.observe = lab.between
        try:
            return cold(script, stack, repeat, stop)
        finally:
            lab.observe = as_is

    def again(script: Any, stack: Any, device: str, stop: Any, forked: Any) -> dict[str, Any]:
        asked.append((stack.versions["transformers"], True))
        observation = lab.forked(stack.versions) if hasattr(lab, "forked") else lab.observe(stack.versions)
        return {**observation, "attempt": {**observation["attempt"], "launcher": "warm"}}

    monkeypatch.setattr("repro_matrix.external.scripts.prober.measure", measure)
    monkeypatch.setattr("repro_matrix.external.scripts.prober.once", again)
    monkeypatch.setattr("repro_matrix.external.scripts.prober.Forked", Servers)
    Path("train.py").write_text("import torch\n")
    return asked


def test_the_ends_of_a_search_are_launched_both_ways_and_the_rest_is_forked(
    lab: Lab, two: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    data = found(lab, capsys, *BISECT, "--error", "IndexError: list index")
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0"
    for end in ("4.37.0", "4.45.0"):
        assert {(end, True), (end, False)} <= set(two)
    rests_on = {data["stages"][0][side]["name"].removeprefix("transformers ") for side in ("good", "bad")}
    assert {(release, forked) for release in rests_on for forked in (True, False)} <= set(two), "from cold, too"
    between = [forked for release, forked in two if release not in {"4.37.0", "4.45.0", *rests_on}]
    assert all(between)
    assert [each.share for each in Servers.opened] == [True] and Servers.opened[0].closed


def test_what_only_a_forked_rank_answers_is_no_answer(
    lab: Lab, two: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Forked ranks share a hash seed: an order that differs between real ranks was the same, and a release clean."""
    lab.between = lambda v: FINE if before(v, "4.43") else error("IndexError", "list index 3")  # type: ignore[attr-defined]
    data = found(lab, capsys, *BISECT, "--error", "IndexError: list index")
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0", "as torchrun answers"
    assert "the search was made again, every probe from cold" in data["report"]
    assert Servers.opened[0].closed


def test_a_script_that_is_another_one_when_it_is_forked_starts_from_cold(
    lab: Lab, two: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    lab.forked = lambda versions: error("TypeError", "not without my start")  # type: ignore[attr-defined]
    data = found(lab, capsys, *BISECT, "--error", "IndexError: list index")
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0"
    assert sum(forked for _, forked in two) == 1 and Servers.opened[0].closed
    assert "every probe started from cold" in data["report"]


@pytest.mark.parametrize("otherwise", [False, True])
def test_what_an_answer_rests_on_is_launched_from_cold_as_what_could_be_had(
    lab: Lab, two: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    otherwise: bool,
) -> None:  # fmt: skip
    """Of two freezes, a release may not take all that was asked beside it: its stack has another name (KeyError)."""
    real = Target.settle

    def settle(self: Target, say: Any) -> Any:
        stack, target = real(self, say)
        return stack, replace(target, spec=target.spec.replace("@", "=="))

    monkeypatch.setattr(Target, "settle", settle)
    if otherwise:
        lab.between = lambda v: FINE if before(v, "4.43") else error("IndexError", "list index 3")  # type: ignore[attr-defined]
    data = found(lab, capsys, *BISECT, "--error", "IndexError: list index")
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0"
    rests_on = {data["stages"][0][side]["name"].removeprefix("transformers ") for side in ("good", "bad")}
    assert {(release, False) for release in rests_on} <= set(two)
    assert ("the search was made again" in data["report"]) == otherwise


def test_a_metric_that_is_noisy_is_the_same_answer_from_cold(
    lab: Lab, two: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    noise = iter(range(1, 10_000))
    lab.observe = lambda v: number((1.0 if before(v, "4.40") else 2.0) + next(noise) / 1e6)
    data = found(lab, capsys, *BISECT, "--metric", "loss")
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0"
    assert "from cold" not in data["report"]


def test_the_launcher_can_be_said(lab: Lab, two: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]) -> None:
    found(lab, capsys, *BISECT, "--error", "IndexError: list index", "launcher=torchrun")
    assert not Servers.opened and not any(forked for _, forked in two)
    found(lab, capsys, *BISECT, "--error", "IndexError: list index", "launcher=warm", "results=other")
    assert [each.share for each in Servers.opened] == [False]
    assert main(["run", "./train.py", "launcher=warm"]) == 2  # it starts from cold, always
    assert "says nothing of a script" in capsys.readouterr().err
    assert FINE["command_exit"] == 0


# --- really launched


@pytest.mark.ranks
def test_a_forked_rank_is_the_process_that_python_would_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same script as `python train.py` and forked: its paths, arguments, modules, hooks, and how it ends."""
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probes.py").write_text("MINE = True\n")  # a server has a module of that name
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import torch
            import atexit, json, os, sys, threading, time
            import probes
            facts = {
                "argv": sys.argv, "path": [p for p in sys.path if "zip" not in p], "name": __name__, "file": __file__,
                "main": sys.modules["__main__"].facts_of() if False else sys.modules["__main__"].__dict__ is globals(),
                "spec": __spec__, "package": __package__, "mine": probes.MINE, "cwd": os.getcwd(),
                "ours": sorted({"repro_kit", "fork_server", "fork_rank", "sitecustomize_"} & set(sys.modules)),
                "excepthook": sys.excepthook.__name__, "threads": threading.active_count(),
                "stdin": sys.stdin.read(), "orig": sys.orig_argv[1:], "grad": torch.is_grad_enabled(),
            }
            print("FACTS " + json.dumps(facts))
            atexit.register(lambda: print("at exit", flush=True))
            threading.Thread(target=lambda: (time.sleep(0.2), print("thread done", flush=True))).start()
            sys.excepthook = lambda kind, error, tb: print("own hook", kind.__name__, tb.tb_frame.f_code.co_name)
            raise KeyError("as it is")
        """)
    )
    stack, stop = stacks.resolve("current"), threading.Event()
    forked = Forked()
    try:
        made = command.of_script("./train.py", 2, "--lr 1")
        warm = once(Script(made, Failure(), tmp_path / "r"), stack, "cpu", stop, forked)
    finally:
        forked.close()
    assert not list(forked.folder.parent.glob("*")), "its folder is gone"
    plain = command.of_words(["python", "-u", str(tmp_path / "train.py"), "--lr", "1"])
    cold = once(Script(plain, Failure(), tmp_path / "r"), stack, "cpu", stop)
    assert (warm["attempt"]["launcher"], warm["attempt"].get("cold"), warm["infra"]) == ("warm", None, None), warm
    said = [each["ranks"][0]["log_tail"] for each in (warm, cold)]
    facts = [json.loads(log.partition("FACTS ")[2].partition("\n")[0]) for log in said]
    assert facts[0] == facts[1]
    ends = [log.partition("FACTS ")[2].split("\n")[1:] for log in said]
    assert ends[0] == ends[1] == ["own hook KeyError <module>", "thread done", "at exit"]
    for rank in (*warm["ranks"], *cold["ranks"]):
        assert rank["exit_code"] == 1 and rank["record"]["finished"]
        (frame,) = rank["record"]["exception"]["frames"]
        assert frame["function"] == "<module>" and frame == cold["ranks"][0]["record"]["exception"]["frames"][0]
    assert warm["command_exit"] == 1
