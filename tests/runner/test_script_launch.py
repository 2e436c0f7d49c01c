"""Users' scripts, launched with real ranks: what is recorded, and that recording changes nothing in
the script."""

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
from repro_matrix.environment.stacks import integrity
from repro_matrix.runner import adhoc_case, script_failure, session
from repro_matrix.runner import run as workspace
from repro_matrix.runner.adhoc_case import Script, in_shell
from repro_matrix.runner.script_failure import (
    ScriptFailure,
    error,
    failure_by_exit_code,
    hang,
    metric,
)
from repro_matrix.search.script_prober import describe_probe_result

pytestmark = pytest.mark.ranks
ANY = ScriptFailure()


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = stacks.resolve("current")

    def write(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def document(self, words: str, wanted: ScriptFailure = ANY, **how: Any) -> Any:
        self.script = Script(
            adhoc_case.command_of_words(words.split()), wanted, self.folder / "results", **how
        )
        prepared = session.prepare(self.script.request(), given={"current": in_shell(self.stack)})
        return workspace.execute(prepared, lambda event: None, threading.Event()).documents[0]

    def run(self, words: str, wanted: ScriptFailure = ANY, **how: Any) -> dict[str, Any]:
        (attempt,) = self.document(words, wanted, **how)["variants"]["unfixed"]["attempts"]
        return dict(attempt)

    def plain(self, text: str, wanted: ScriptFailure = ANY) -> dict[str, Any]:
        """Start as `python train.py`: the cheapest launch, with the same hooks."""
        self.write(text)
        return self.run("python train.py", wanted)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path)


def test_torchrun_of_two_ranks_records_each_and_changes_nothing(bench: Bench) -> None:
    script = bench.write("""
        import logging, os, sys, time, warnings
        sys.excepthook = lambda kind, error, tb: print("own hook", kind.__name__, flush=True)
        warnings.warn("careful")
        logging.getLogger("own").warning("logged %d", 3)
        assert sys.argv[1:] == ["a"] and sys.path[0] == os.path.dirname(__file__) and __name__ == "__main__"
        assert not [path for path in sys.path if path.endswith("hooks")], sys.path
        assert "repro_kit.record" not in sys.modules and os.getcwd() == os.environ["PWD_WAS"]
        if os.environ["RANK"] == "1":
            [1, 2][int(os.environ["WORLD_SIZE"])]
        time.sleep(600)
    """)
    env = (("PWD_WAS", str(bench.folder)),)
    attempt = bench.run(
        "torchrun --nproc-per-node 2 train.py a", error("IndexError: list index"), env=env
    )
    assert attempt["outcome"]["outcome"] == "reproduced", attempt["outcome"]
    zero, one = attempt["observation"]["ranks"]
    assert (one["exit_code"], one["terminated_by"]) == (1, "self")
    assert (zero["terminated_by"], zero["signal"]) == ("launcher", "SIGTERM")
    frame = one["record"]["exception"]["frames"][-1]
    assert frame["file"] == str(script) and frame["code"].startswith("[1, 2]")
    assert "own hook IndexError" in one["log_tail"] and "own hook" not in zero["log_tail"]
    assert "careful" in one["record"]["warnings"][0]["message"]
    assert one["record"]["logs"][0]["message"] == "logged 3"
    assert not attempt["observation"]["attempt"]["leaked_processes"]


@pytest.mark.parametrize(
    ("text", "wanted", "outcome", "expected"),
    [
        ("import sys; sys.exit(3)", ANY, "other_failure", "exit code 3"),
        ("import os; os._exit(0)", ANY, "passed", "exit code 0"),
        ("print(input())", ANY, "other_failure", "EOFError"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            ANY,
            "other_failure",
            "SIGSEGV",
        ),
        (
            "import sys; sys.excepthook = None; raise KeyError('x')",
            error("KeyError"),
            "reproduced",
            "",
        ),
        (
            "import os, sys; sys.excepthook = lambda *_: os._exit(0); raise RuntimeError('boom')",
            error("RuntimeError: boom"),
            "reproduced",
            "",
        ),
        (
            "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(600)",
            ANY,
            "infra_error",
            "killed",
        ),
        (
            "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)",
            ANY,
            "passed",
            "killed",
        ),
    ],
    ids=[
        "exit",
        "os._exit",
        "stdin",
        "signal",
        "no excepthook",
        "exit in the excepthook",
        "fork",
        "background",
    ],
)
def test_plain_script_end_gives_outcome(
    bench: Bench, text: str, wanted: ScriptFailure, outcome: str, expected: str
) -> None:
    found = bench.plain(text, wanted)
    assert found["outcome"]["outcome"] == outcome, found["outcome"]
    assert expected in str((found["outcome"], found["observation"]["attempt"]["leaked_processes"]))


def test_end_without_pythons_exit_is_noted(bench: Bench) -> None:
    """An error may have been swallowed; scripts that end so on purpose pass nevertheless."""
    for text, noted in (
        ("import os\ntry: [][1]\nfinally: os._exit(0)", True),
        ("import sys; sys.exit(0)", False),
    ):
        bench.write(text)
        document = bench.document("python train.py")
        shown = "\n".join(describe_probe_result(bench.script.case(), document))
        assert (
            "passed 1 of 1" in shown
            and ("note: rank 0 ended without Python's exit" in shown) == noted
        )


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("threading.Thread(target=fails).start()", "reproduced"),
        ("type('Saver', (), {'__del__': fails})()", "reproduced"),
        pytest.param(
            "atexit.register(fails)",
            "reproduced",
            marks=pytest.mark.skipif(
                sys.version_info < (3, 10),
                reason="Python 3.9 has no hook for errors of atexit handlers",
            ),
        ),
        ("threading.Thread(target=sys.exit).start()", "passed"),
    ],
    ids=["thread", "destructor", "atexit", "exit of a thread"],
)
def test_error_that_does_not_end_the_script_is_its_failure(
    bench: Bench, text: str, outcome: str
) -> None:
    text = f"import atexit, sys, threading\ndef fails(*_): raise KeyError('shard')\n{text}"
    found = bench.plain(text, error("KeyError: shard"))
    assert found["outcome"]["outcome"] == outcome, found["outcome"]
    assert found["observation"]["ranks"][0]["exit_code"] == 0
    assert (found["observation"]["ranks"][0]["log_tail"] == "") == (outcome == "passed"), (
        "Python reports it as before"
    )


def test_plain_script_imports_the_environments_sitecustomize(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("import builtins; builtins.was_here = 7", "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(bench.folder))
    found = bench.plain(
        "import sys; sys.exit(was_here if 'hooks' not in str(sys.path) else 1)",
        failure_by_exit_code(7),
    )
    assert found["outcome"]["outcome"] == "reproduced"


def test_package_of_the_shells_pythonpath_is_named_and_another_measurement(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script is launched with the shell's environment: the stack's label alone would be wrong."""
    bench.write("import transformers, sys; sys.exit(transformers.patched)")
    (bench.folder / "mine" / "transformers").mkdir(parents=True)
    patched = bench.write("patched = 7", "mine/transformers/__init__.py")
    monkeypatch.setenv("PYTHONPATH", f"{bench.folder / 'other'}:mine")
    document = bench.document("python train.py")
    assert document["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"] == "other_failure"
    (note,) = document["stack"]["changed"]
    assert str(patched) in note
    assert f"  note: {note}" in list(describe_probe_result(bench.script.case(), document))
    key = in_shell(bench.stack).key
    patched.write_text("patched = 0", encoding="utf-8")
    os.utime(patched, (1, 1))
    assert len({bench.stack.key, key, in_shell(bench.stack).key}) == 3
    layered = dataclasses.replace(bench.stack, moved={"transformers": ("5.23.0", "5.24.0")})
    assert integrity.shadowed(layered, "mine") == [], "a layer of the stack comes before it"


def test_log_without_end_is_cut_and_its_end_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro_matrix.launch.attempt.MAX_LOG", 1 << 20)
    found = bench.plain(
        """
        import os, time
        path = f"/proc/{os.getpid()}/fd/1"
        print(("x" * 1023 + "\\n") * 2048, flush=True)
        while os.stat(path).st_size > 1 << 20:
            time.sleep(0.1)
        print("loss 3.5")
        """,
        metric("loss > 3.2"),
    )
    assert found["outcome"]["outcome"] == "reproduced" and found["observation"]["printed"]["cut"]


def test_script_that_hangs_has_a_stack(bench: Bench) -> None:
    found = bench.plain(
        "import threading\ndef waits():\n    threading.Event().wait()\nwaits()", hang(3.0)
    )
    assert (
        found["outcome"]["outcome"] == "reproduced"
        and "waits" in found["observation"]["ranks"][0]["stack"]
    )


@pytest.mark.slow
def test_error_of_a_spawned_rank_is_read_from_its_parents_text(bench: Bench) -> None:
    primary = bench.plain("""
        import torch.multiprocessing as mp
        def work(rank):
            if rank == 1:
                {}["missing"]
        if __name__ == "__main__":
            mp.spawn(work, nprocs=2)
    """)["outcome"]["primary"]
    assert (primary["type"], primary["message"]) == (
        "KeyError",
        "'missing'",
    ) and "train.py" in primary["location"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "outcome"), [(1, "reproduced"), (2, "infra_error")])
def test_accelerate_process_without_a_rank_is_the_only_rank(
    bench: Bench, ranks: int, outcome: str
) -> None:
    """On a CPU accelerate starts one plain process, whatever --num_processes says."""
    bench.write("raise LookupError('here')")
    found = bench.run(
        f"accelerate launch --cpu --num_processes {ranks} train.py", error("LookupError: here")
    )
    assert found["outcome"]["outcome"] == outcome and (
        ranks == 1 or "only 1 rank of 2" in found["outcome"]["reason"]
    )


def test_command_that_starts_no_rank_is_an_infra_error(bench: Bench) -> None:
    bench.write("print(1)")
    found = bench.run("torchrun --no-such-option --nproc-per-node 2 train.py")
    assert found["outcome"]["outcome"] == "infra_error"
    assert "no-such-option" in found["observation"]["infra_error"]["message"]
    assert sys.executable in found["observation"]["attempt"]["command"][0]


TRAINS = """
    import os, sys
    import torch
    import torch.distributed as dist
    def main(how):
        if how != "alone":
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        teacher = torch.nn.Linear(4, 2) if how == "frozen" else None
        if how == "frozen":  # with a base that is another one on each rank
            model.register_parameter("base", torch.nn.Parameter(torch.full((3,), float(dist.get_rank())), False))
            global kept
            kept = model
        if how == "alone":
            ddp = model
        elif how == "frozen":  # without DDP, which would broadcast it
            ddp = torch.nn.Sequential(model)
            for parameter in model.parameters():
                parameter.register_hook(lambda each: dist.all_reduce(each) or each) if parameter.requires_grad else 0
        elif how == "sharded":
            from torch.distributed.fsdp import FullyShardedDataParallel
            ddp = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            ddp = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW([each for each in ddp.parameters() if each.requires_grad], lr=0.1)
        if how == "zero1":  # its inner optimizers step, too, each on a part of the parameters
            from torch.distributed.optim import ZeroRedundancyOptimizer
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
        if how == "compiled":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        called = ddp.module if how in ("bypassed", "signs") else ddp
        # Exact products: AdamW's first step is the same from each, but for the sign.
        rank = int(os.environ["RANK"])
        factors = {"nan": (float("nan"),) * 2, "bypassed": (4.0, -4.0), "alone": (4.0, 4.0)}
        factor = factors.get(how, (4.0, 8.0))[rank]
        called(torch.full((3, 4), factor)).sum().backward()
        optimizer.step()
        if called is not ddp:
            optimizer.zero_grad()
        if how == "frozen" and len(sys.argv) > 2:
            model.base.data[0] = float("nan")
        if how == "crash" and dist.get_rank() == 1:
            raise ValueError("boom")
        if how != "alone":
            dist.destroy_process_group()
        sys.exit(0) if how in ("bypassed", "signs") else os._exit(0) if how == "os._exit" else None
    main(sys.argv[1])
"""
REPLICAS, FINITE = ("replicas",), ("finite",)


@pytest.mark.parametrize(
    ("how", "checks", "outcome", "text"),
    [
        pytest.param(
            "right",
            REPLICAS + FINITE,
            "passed",
            "parameters_finite: 2 tensors and 2 gradients",
            marks=pytest.mark.slow,
        ),
        (
            "bypassed",
            REPLICAS,
            "reproduced",
            "compared on 2 ranks; wrong: weight, gradient of weight",
        ),
        pytest.param(
            "signs",
            REPLICAS,
            "reproduced",
            "compared on 2 ranks; wrong: gradient of weight",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "alone",
            REPLICAS,
            "infra_error",
            "not checked: no process group was created",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "frozen",
            REPLICAS,
            "reproduced",
            (
                "3 parameters (1 frozen) and 2 gradients of the last of 1 step compared on 2 ranks;"
                " 2 parameters that no optimizer has stepped on were not compared; wrong: 0.base"
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param("frozen nan", FINITE, "reproduced", "wrong: 0.base", marks=pytest.mark.slow),
        pytest.param(
            "frozen", FINITE, "passed", "parameters_finite: 3 tensors", marks=pytest.mark.slow
        ),
        pytest.param("right", (), "passed", "no number was checked", marks=pytest.mark.slow),
        pytest.param("bypassed", (), "passed", "no number was checked", marks=pytest.mark.slow),
        pytest.param(
            "zero1", REPLICAS, "passed", "2 parameters and 2 gradients", marks=pytest.mark.slow
        ),
        pytest.param(
            "compiled", REPLICAS, "passed", "2 parameters and 2 gradients", marks=pytest.mark.slow
        ),
        pytest.param("nan", FINITE, "reproduced", "wrong: weight", marks=pytest.mark.slow),
        pytest.param(
            "crash", REPLICAS, "other_failure", "ValueError: boom", marks=pytest.mark.slow
        ),
        pytest.param(
            "sharded",
            REPLICAS,
            "infra_error",
            "not checked: sharded by FSDP",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sharded", FINITE, "passed", "parameters_finite: 1 tensors", marks=pytest.mark.slow
        ),
        pytest.param(
            "os._exit",
            REPLICAS,
            "infra_error",
            "ended without Python's exit",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parameters_of_a_script_are_checked_at_its_end(
    how: str, checks: tuple[str, ...], outcome: str, text: str, bench: Bench
) -> None:
    bench.write(TRAINS)
    wanted = script_failure.with_checks(ANY, checks) if checks else ANY
    document = bench.document(
        f"torchrun --standalone --nproc-per-node 2 train.py {how}", wanted, checks=checks
    )
    (attempt,) = document["variants"]["unfixed"]["attempts"]
    assert attempt["outcome"]["outcome"] == outcome, attempt["outcome"]
    shown = "\n".join(describe_probe_result(bench.script.case(), document))
    assert text in shown
    if outcome == "infra_error":
        assert (
            "not checked 1 of 1" in shown and "infra error" not in shown and "want 0" not in shown
        )


DATA = """
    import sys, torch, torch.distributed as dist
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    how, workers = sys.argv[1], int(sys.argv[2])
    class Stream(IterableDataset):
        def __iter__(self):
            yield from torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    if __name__ == "__main__":
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = Stream() if how == "stream" else TensorDataset(torch.randn(15, 4))
        sampler = DistributedSampler(data) if how == "sampler" else None
        loader = DataLoader(data, 2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
        if how == "accelerate":
            from accelerate import Accelerator
            model, optimizer, loader = Accelerator(cpu=True).prepare(model, optimizer, loader)
        evaluation = DataLoader(TensorDataset(torch.randn(6, 4)), 2)
        for epoch in range(2):
            for number, batch in enumerate(loader):
                x = batch if how == "stream" else batch[0]
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                if number == 0:
                    for (each,) in evaluation:  # all ranks evaluate on the same samples
                        model(each)
        dist.destroy_process_group()
"""
PADDED = "epochs 0, 1: 1 sample repeated as padding"


@pytest.mark.parametrize(
    ("how", "workers", "outcome", "text"),
    [
        pytest.param("sampler", 2, "passed", PADDED, marks=pytest.mark.slow),
        ("stream", 0, "reproduced", "wrong: epochs 0, 1: 16 samples shared by ranks 0, 1"),
        pytest.param("accelerate", 0, "passed", PADDED, marks=pytest.mark.slow),
        pytest.param("sampler", 0, "passed", PADDED, marks=pytest.mark.slow),
        pytest.param(
            "none",
            0,
            "reproduced",
            "wrong: epochs 0, 1: 15 samples shared by ranks 0, 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "none",
            1,
            "reproduced",
            "wrong: epochs 0, 1: 15 samples shared by ranks 0, 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_samples_of_a_script_are_disjoint_and_complete(
    how: str, workers: int, outcome: str, text: str, bench: Bench
) -> None:
    bench.write(DATA)
    line = f"torchrun --standalone --nproc-per-node 2 train.py {how} {workers}"
    document = bench.document(line, script_failure.with_checks(ANY, ("data",)), checks=("data",))
    (attempt,) = document["variants"]["unfixed"]["attempts"]
    assert attempt["outcome"]["outcome"] == outcome, attempt["outcome"]
    assert text in "\n".join(describe_probe_result(bench.script.case(), document))


def test_script_without_a_model_is_not_checked_rather_than_passed(bench: Bench) -> None:
    bench.write("print('no model')")
    document = bench.document(
        "python train.py", script_failure.with_checks(ANY, FINITE), checks=FINITE
    )
    outcome = document["variants"]["unfixed"]["attempts"][0]["outcome"]
    assert (
        outcome["infra_error"] == "missing_check"
        and "no optimizer of torch has stepped" in outcome["reason"]
    )
