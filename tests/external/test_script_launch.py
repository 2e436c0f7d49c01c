"""A script as it is, really launched: what is known of its ranks, and that its own process stays what it was."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import spec
from repro_matrix.external import adhoc_case as failure
from repro_matrix.external import command_line as command
from repro_matrix.external import script_report
from repro_matrix.external.adhoc_case import Failure, Script, in_shell
from repro_matrix.runner import session, workspace

pytestmark = pytest.mark.ranks


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = stacks.resolve("current")

    def write(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def document(self, made: command.Command, wanted: Failure = Failure(), **how: Any) -> Any:  # noqa: B008
        self.script = Script(made, wanted, self.folder / "results", **how)
        prepared = session.prepare(self.script.request(), given={"current": in_shell(self.stack)})
        return workspace.execute(prepared, lambda event: None, threading.Event()).documents[0]

    def run(self, made: command.Command, wanted: Failure = Failure(), **how: Any) -> dict[str, Any]:  # noqa: B008
        (attempt,) = self.document(made, wanted, **how)["variants"]["unfixed"]["attempts"]
        return dict(attempt)

    def plain(self, text: str, wanted: Failure = Failure(), *args: str, **how: Any) -> dict[str, Any]:  # noqa: B008
        """Started as `python train.py`: the cheapest launch, with the same hooks."""
        return self.run(command.of_words(["python", str(self.write(text)), *args]), wanted, **how)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path)


def test_two_ranks_of_torchrun_without_a_line_changed(bench: Bench) -> None:
    """The first failing rank's exception with its frames, the other ended by the launcher, own hooks called."""
    script = bench.write("""
        import logging, os, sys, time, warnings
        sys.excepthook = lambda kind, error, tb: print("own hook", kind.__name__, flush=True)
        warnings.warn("careful")
        logging.getLogger("own").warning("logged %d", 3)
        assert sys.argv[1:] == ["a b"] and sys.path[0] == os.path.dirname(__file__) and __name__ == "__main__"
        assert not [path for path in sys.path if path.endswith("hooks")], sys.path
        assert "kit" not in sys.modules and "repro_kit.record" not in sys.modules
        assert os.getcwd() == os.environ["PWD_WAS"]
        if os.environ["RANK"] == "1":
            [1, 2][int(os.environ["WORLD_SIZE"])]
        time.sleep(600)
    """)
    wanted = failure.error("IndexError: list index")
    made = command.of_script(str(script), 2, "'a b'")
    attempt = bench.run(made, wanted, env=(("PWD_WAS", str(bench.folder)),), deadline_s=300.0)
    assert attempt["outcome"]["outcome"] == "reproduced", attempt["outcome"]
    zero, one = attempt["observation"]["ranks"]
    assert (one["exit_code"], one["terminated_by"], zero["terminated_by"], zero["signal"]) == (
        1,
        "self",
        "launcher",
        "SIGTERM",
    )
    frame = one["record"]["exception"]["frames"][-1]
    assert frame["file"] == str(script) and frame["code"].startswith("[1, 2]")
    assert "own hook IndexError" in one["log_tail"] and "own hook" not in zero["log_tail"]
    assert "careful" in one["record"]["warnings"][0]["message"]
    assert one["record"]["logs"][0]["message"] == "logged 3"
    assert not attempt["observation"]["attempt"]["leaked_processes"]


@pytest.mark.parametrize(
    ("text", "outcome", "said"),
    [
        ("import sys; sys.exit(3)", "other_failure", "exit code 3"),
        ("import os; os._exit(0)", "passed", "exit code 0"),
        ("print(input())", "other_failure", "EOFError"),
        ("import threading, sys; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", "passed", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "other_failure", "SIGSEGV"),
        ("import no_such_module_at_all", "other_failure", "No module named"),
        (
            "import argparse; p = argparse.ArgumentParser(); p.add_argument('data'); p.parse_args()",
            "other_failure",
            "exit code 2",
        ),
    ],
    ids=["exit", "os._exit", "stdin", "exit in a thread", "signal", "import", "needs arguments"],
)
def test_ways_to_end(bench: Bench, text: str, outcome: str, said: str) -> None:
    found = bench.plain(text)["outcome"]
    assert found["outcome"] == outcome and said in str(found), found


def test_an_exception_is_known_whatever_becomes_of_the_excepthook(bench: Bench) -> None:
    found = bench.plain("""
        import sys
        sys.excepthook = None
        raise KeyError("x")
    """)
    assert found["outcome"]["primary"]["type"] == "KeyError"


def test_an_excepthook_that_ends_the_process_hides_nothing(bench: Bench) -> None:
    found = bench.plain(
        """
        import os, sys
        sys.excepthook = lambda *about: os._exit(0)
        raise RuntimeError("boom")
    """,
        failure.error("RuntimeError: boom"),
    )
    assert found["outcome"]["outcome"] == "reproduced"


def test_the_environments_own_sitecustomize_is_imported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write("import builtins; builtins.was_here = 7", "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(bench.folder))
    found = bench.plain("import sys; sys.exit(was_here if 'hooks' not in str(sys.path) else 1)", failure.exit_code(7))
    assert found["outcome"]["outcome"] == "reproduced"


def test_package_of_the_shells_pythonpath_is_named_and_another_measurement(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script is launched with the shell's environment: the stack's label would say what was not measured."""
    made = command.of_words(["python", str(bench.write("import transformers, sys; sys.exit(transformers.patched)"))])
    (bench.folder / "mine" / "transformers").mkdir(parents=True)
    patched = bench.write("patched = 7", "mine/transformers/__init__.py")
    monkeypatch.setenv("PYTHONPATH", f"{bench.folder / 'other'}:mine")
    document = bench.document(made)
    note = f"transformers is {patched} (the shell's PYTHONPATH), not the stack's"
    assert document["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"] == "other_failure"
    assert document["stack"]["changed"] == [note]
    assert f"  note: {note}" in list(script_report.lines(bench.script.case(), document))
    key = in_shell(bench.stack).key
    patched.write_text("patched = 0", encoding="utf-8")
    os.utime(patched, (1, 1))
    assert len({bench.stack.key, key, in_shell(bench.stack).key}) == 3
    layered = dataclasses.replace(bench.stack, moved={"transformers": ("5.23.0", "5.24.0")})
    assert spec.shadowed(layered, "mine") == [], "a layer of the stack comes before it"


def test_a_log_without_end_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut while it runs; what was asked for stands at its end."""
    monkeypatch.setattr("repro_matrix.launch.attempt.cut.__defaults__", (1 << 20,))
    found = bench.plain(
        """
        import os, time
        path = f"/proc/{os.getpid()}/fd/1"
        print(("x" * 1023 + "\\n") * 2048, flush=True)
        while os.stat(path).st_size > 1 << 20:
            time.sleep(0.1)
        print("loss 3.5")
        """,
        failure.metric("loss > 3.2"),
    )
    assert found["outcome"]["outcome"] == "reproduced" and found["observation"]["printed"]["cut"]


def test_script_that_puts_itself_in_the_background_is_ended(bench: Bench) -> None:
    found = bench.plain("""
        import os, sys, time
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(600)
    """)
    assert any("killed" in each for each in found["observation"]["attempt"]["leaked_processes"])


@pytest.mark.slow
def test_a_script_that_spawns_its_own_ranks(bench: Bench) -> None:
    """torch.multiprocessing carries the child's error as text: its type and place are read from there."""
    found = bench.plain("""
        import torch.multiprocessing as mp
        def work(rank):
            if rank == 1:
                {}["missing"]
        if __name__ == "__main__":
            mp.spawn(work, nprocs=2)
    """)
    primary = found["outcome"]["primary"]
    assert (primary["type"], primary["message"]) == ("KeyError", "'missing'") and "train.py" in primary["location"]


def test_a_hang_has_its_stack(bench: Bench) -> None:
    found = bench.plain(
        """
        import threading
        def waits_for_ever():
            threading.Event().wait()
        waits_for_ever()
        """,
        failure.hang(3.0),
    )
    assert found["outcome"]["outcome"] == "reproduced"
    assert "waits_for_ever" in found["observation"]["ranks"][0]["stack"]


@pytest.mark.slow
def test_what_accelerate_launches_without_a_rank(bench: Bench) -> None:
    """On a CPU it starts one plain process, whatever --num_processes says: that is rank 0, with its exit code."""
    bench.write("raise LookupError('here')")
    words = ["accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "train.py"]
    found = bench.run(command.of_words(words), failure.error("LookupError: here"))
    assert found["outcome"]["outcome"] == "reproduced" and found["observation"]["ranks"][0]["exit_code"] == 1


def test_a_command_that_starts_no_rank(bench: Bench) -> None:
    bench.write("print(1)")
    found = bench.run(command.of_words(["torchrun", "--no-such-option", "--nproc-per-node", "2", "train.py"]))
    assert (
        found["outcome"]["outcome"] == "infra_error"
        and "no-such-option" in found["observation"]["infra_error"]["message"]
    )
    assert sys.executable in found["observation"]["attempt"]["command"][0]
