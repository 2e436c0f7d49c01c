"""Measure what a trace costs a training: ``python -m bench.trace``.

CPU seconds and peak memory of a process that trains three steps, start included, without and with
the tracer, in turn; the least of several runs counts. Then what `repro compare` of two built stacks
costs, with two ranks. The size of a 7B model's trace is computed, not measured: from its modules
and parameters on the meta device, a line per module and call, and the lengths of the lines of a
trace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import repro_matrix
from repro_matrix.config.schema import VARIANT

from bench.machine import HERE, write

HOOKS = Path(repro_matrix.__file__).parent / "launch" / "worker" / "hooks"
# hidden size, layers, words, tokens of a sample
MODELS = {"tiny": (32, 2, 128, 16), "hidden_256": (256, 4, 2000, 128)}
SEVEN_B = (4096, 32, 32000, 2048)
BATCH, STEPS = 8, 3
SCRIPT = f"""
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.set_num_threads(1)
hidden, layers, words, length = map(int, sys.argv[1:])
model = Qwen2ForCausalLM(Qwen2Config(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
    num_attention_heads=4, num_key_value_heads=4, vocab_size=words, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters())
for step in range({STEPS}):
    batch = torch.randint(0, words, ({BATCH}, length))
    model(input_ids=batch, labels=batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def measure(model: tuple[int, ...], traced: bool) -> dict[str, float]:
    """Run the training once; return its CPU seconds, its peak of memory and the size of its
    trace."""
    with tempfile.TemporaryDirectory(prefix="repro-bench-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for each in ("records", "logs", "traces"):
            (folder / each).mkdir()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOOKS), "REPRO_PLAIN": "1"}
        env["REPRO_RECORDS"] = str(folder / "records")
        if traced:
            env["REPRO_TRACE"] = str(folder / "traces")
        process = subprocess.Popen(
            [sys.executable, str(folder / "train.py"), *map(str, model)], env=env
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"the training ended with {process.returncode}. Its error is above.")
        size = sum(each.stat().st_size for each in (folder / "traces").iterdir())
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss / 1024,
        "trace_mb": size / 1e6,
    }


def compare(model: tuple[int, ...], runs: int) -> dict[str, Any]:
    pairs = [(measure(model, False), measure(model, True)) for _ in range(runs)]
    plain, traced = (
        {name: min(each[name] for each in side) for name in side[0]}
        for side in zip(*pairs, strict=True)
    )
    return {
        "plain": plain,
        "traced": traced,
        "cpu_ratio": traced["cpu_s"] / plain["cpu_s"],
        "more_peak_mb": traced["peak_mb"] - plain["peak_mb"],
    }


def compared(good: str, bad: str) -> dict[str, Any]:
    """Return the CPU seconds of `repro compare` of two built stacks, all of its processes
    included."""
    script = HERE.parent / "docs" / "examples" / "numbers" / "ddp.py"
    with tempfile.TemporaryDirectory(prefix="repro-bench-") as results:
        words = [
            "compare",
            str(script),
            "--good",
            good,
            "--bad",
            bad,
            f"results={results}",
            "--json",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "repro_matrix", *words], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        data = json.loads(process.stdout.read())
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
        documents = [json.loads(Path(each["document"]).read_text()) for each in data["noise"]]
    attempts = [
        each["variants"][VARIANT]["attempts"][0]["observation"]["attempt"] for each in documents
    ]
    # A fork server does not wait for its forks: their figures are their own.
    forked = sum(each["cpu_s"] for each in attempts if each["launcher"] == "forkserver")
    return {
        "good": good,
        "bad": bad,
        "verdict": data["verdict"],
        "cpu_s": used.ru_utime + used.ru_stime + forked,
    }


def computed_size(model: tuple[int, ...]) -> dict[str, Any]:
    """Return the size of a rank's trace of a larger model: batch BATCH, STEPS steps, one
    micro-batch each."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, layers, words, _ = model
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=words,
    )
    with torch.device("meta"):
        built = Qwen2ForCausalLM(config)
    modules, parameters = (
        [name for name, _ in built.named_modules()],
        [name for name, _ in built.named_parameters()],
    )
    frame = {
        "k": "lgrad",
        "s": 1,
        "m": 0,
        "n": "",
        "p": "shard",
        "shape": [32000, 4096],
        "dtype": "float32",
    }
    row = 4 * -(-9 * 8 // 3)
    of_module = len(json.dumps({**frame, "i": 0, "t": 0, "b": BATCH, "v": ""})) + row * BATCH
    of_parameter = len(json.dumps({**frame, "v": ""})) + row
    # An output and its gradient, and an input that functional code made, for each module; 4 kinds
    # for a parameter.
    per_step = sum(3 * (of_module + len(name)) for name in modules)
    per_step += sum(4 * (of_parameter + len(name)) for name in parameters)
    first = sum(of_parameter + len(name) for name in parameters)
    return {
        "computed": True,
        "parameters": sum(each.numel() for each in built.parameters()),
        "modules": len(modules),
        "batch": BATCH,
        "steps": STEPS,
        "trace_mb": (first + STEPS * per_step) / 1e6,
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument(
        "--stacks", default="torch2.6-tf4.51,torch2.2-tf4.39", help="two built ones, to compare"
    )
    parser.add_argument("--out", type=Path, default=HERE / "trace.json")
    arguments = parser.parse_args(words)
    results = {name: compare(MODELS[name], arguments.runs) for name in arguments.models.split(",")}
    results["compare_two_stacks"] = compared(*arguments.stacks.split(","))
    write(arguments.out, steps=STEPS, batch=BATCH, **results, model_7b=computed_size(SEVEN_B))


if __name__ == "__main__":
    main()
