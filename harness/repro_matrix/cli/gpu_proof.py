"""`repro gpu-proof`: the first minutes on a GPU machine, as one folder to commit.

Steps: the environment; every cell that a GPU here can show, once; the same attempts from cold (torchrun) as from the
warm servers; a real hang and what is known of it; memory planned against measured. Each has its share of the minutes
that are left when it begins, is said to be cut where they were too few, and is recorded before the next one begins,
whatever becomes of it. What takes minutes to build (DeepSpeed's CPU op, for cells that stay on the CPU) is left out.
Nothing asks the network: on a machine with a torch of its own give `stack=python:/path/to/python`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.config import project
from repro_matrix.config.settings import LauncherName
from repro_matrix.environment import system_checks as around
from repro_matrix.environment.nvml import states
from repro_matrix.errors import ConfigError, MeasureError, ReproError
from repro_matrix.records.document import Document
from repro_matrix.report import proof as terminal
from repro_matrix.report import summary as summaries
from repro_matrix.report.terminal import columns, print_json, print_lines, print_table
from repro_matrix.results import rows
from repro_matrix.results.exit_code import DIFFERS, TOO_LITTLE, exit_code
from repro_matrix.results.store import stack_label, write_json
from repro_matrix.runner import session
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.request import Request, ask

Json = dict[str, Any]
SHARES = {"cells": 0.6, "cold": 0.7, "hang": 0.8}  # of the time that is left; the other steps take seconds
ASK_S = 60.0  # what is left for asking stacks what their models need; less is not begun
# One attempt of each strategy that these cards can run.
KEPT = "what is measured is in its folder"
COLD = {"case": "train-step", "model": "qwen1.5-0.5b", "launcher": LauncherName.torchrun}
# A collective that one rank never enters; on one card, which ranks can share under DDP alone.
HANGS = [{"case": case, "arms": ["broken"]} for case in ("fsdp-rank0-state-dict", "ddp-uneven-batches")]


@dataclass
class Proof:
    """One run of all steps. ``ends``, by the monotonic clock, says how long each may take."""

    asked: Request
    ends: float
    out: Path
    steps: dict[str, Json] = field(default_factory=dict)
    documents: list[Document] = field(default_factory=list)  # of the step `cells`

    def prepare(self, more: Mapping[str, Any] | None = None, memory: bool = False) -> session.Session:
        """The cells of a step that run on GPUs, and no others. ``more``: what the step asks for, by key."""
        prepared = prepare(self.asked.having({"repeat": 1, **(more or {})}), memory)
        return replace(prepared, plans=[plan for plan in prepared.plans if plan.profile.accelerator == "cuda"])

    def measure(self, step: str, prepared: session.Session) -> tuple[list[Document], Json]:
        """Run a step's cells within its share of the time: their documents, and what is to be said of them."""
        settings = replace(prepared.settings, results=str(self.out / step))
        stop, warned = threading.Event(), list[str]()
        limit = threading.Timer(max(0.0, SHARES[step] * (self.ends - time.monotonic())), stop.set)
        limit.daemon = True
        limit.start()
        try:
            with workplace.interruptible(stop, lambda text: print(f"note: {text}", file=sys.stderr), KEPT):
                summary = workplace.execute(
                    replace(prepared, settings=settings), lambda event: None, stop, on_warning=warned.append
                )
        finally:
            limit.cancel()
        if summary.problem:
            raise MeasureError(summary.problem)
        found = [row for document in summary.documents for row in rows.arm_rows(document)]
        return summary.documents, {
            "cells": len(prepared.plans),
            "measured": sum(any(arm["attempts"] for arm in d["arms"].values()) for d in summary.documents),
            "attempts": summary.attempts,
            "wall_s": round(summary.wall_s, 1),
            "cut": summary.interrupted,
            "verdicts": rows.counts(found),
            "started_cold": dict(summary.cold),
            "cards_left_out": summary.cards,
            "warnings": warned,
            "exit_code": exit_code(summary.documents, 1, stopped_early=summary.interrupted or bool(prepared.unusable)),
        }


def prepare(asked: Request, memory: bool = False) -> session.Session:
    """What can be measured without building anything first; only where that is nothing it is built. ``memory``: with
    what every arm is planned to need, for which the stacks are asked once."""
    return replace(session.prepare(asked, overlap=True, plan_memory=memory), later=[])


def main(args: argparse.Namespace) -> int:
    if args.minutes <= 0:
        raise ConfigError(f"--minutes {args.minutes:g}: must be more than 0")
    began, ends = time.time(), time.monotonic() + args.minutes * 60
    asked = ask(args.overrides)
    first = prepare(asked)  # whatever is wrong with the machine or the words is said here
    if first.profile.accelerator != "cuda":
        raise MeasureError("gpu-proof: there is no GPU here (`repro doctor` says what is)")
    stack = first.stacks[first.plans[0].cell.stack]
    name = f"{first.profile.name}-{stack_label(stack.versions, stack.label_key)}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = args.out or asked.settings.results
    proof = Proof(asked, ends, Path(out) if out else project.current().results / "gpu-proof" / name)
    proof.out.mkdir(parents=True, exist_ok=True)
    print(f"repro: {first.headline()}", file=sys.stderr, flush=True)
    steps: dict[str, Callable[[], Json]] = {
        "environment": lambda: environment(first),
        "cells": lambda: cells(proof),
        "cold": lambda: cold(proof),
        "hang": lambda: hang(proof),
        "memory": lambda: memory(proof),
    }
    for step, work in steps.items():
        started = time.monotonic()
        print(f"gpu-proof: {step} ...", file=sys.stderr, flush=True)
        try:
            found = work()
        except ReproError as error:
            found = {"problem": str(error)}
        except Exception as error:  # noqa: BLE001 - a fault of ours in one step does not take the minutes of the others
            traceback.print_exc()
            found = {"problem": f"a fault of gpu-proof's own: {type(error).__name__}: {error}"}
        proof.steps[step] = {**found, "seconds": round(time.monotonic() - started, 1)}
        write_json(proof.out / "proof.json", _summary(proof, first, began, args.minutes))
    data = _summary(proof, first, began, args.minutes)
    codes = [found.get("exit_code", 0) for found in proof.steps.values()]
    lacking = any("problem" in found or found.get("cut") for found in proof.steps.values())
    code = DIFFERS if DIFFERS in codes else TOO_LITTLE if lacking or TOO_LITTLE in codes else 0
    if args.json:
        print_json(data)
        return code
    arms = rows.by_attention(row for document in proof.documents for row in rows.arm_rows(document))
    print_lines(summaries.lines(proof.documents, arms, columns()))
    said = [[step, terminal.of_step(each), each["seconds"]] for step, each in proof.steps.items()]
    print_table("", ["step", "result", "seconds"], said, narrow=("result",), fold=True)
    done = f"commit {proof.out}" if any(row["attempts"] for row in arms) else f"nothing was measured; {proof.out}"
    print(f"gpu-proof: {data['seconds']:g} s of {args.minutes * 60:g}; {done}")
    print(terminal.ending(code, proof.steps))
    return code


def _summary(proof: Proof, first: session.Session, began: float, minutes: float) -> Json:
    return {
        "schema": 1,
        "command": " ".join(["repro gpu-proof", *proof.asked.texts]),
        "started": began,
        "seconds": round(time.time() - began, 1),
        "minutes": minutes,
        "hardware": first.headline(),
        "steps": proof.steps,
    }


def environment(first: session.Session) -> Json:
    """The machine, its cards and their state, and what every stack's torch said of them."""
    seen = states([gpu.uuid for gpu in first.machine.gpus])
    return {
        "machine": first.machine.to_json(),
        "cards": {uuid: asdict(state) for uuid, state in seen.items()},
        "shm_mb": around.shm_mb(),
        "notes": first.notes(),
        "stacks": {
            stack.name: {"versions": dict(stack.versions), "probe": stack.probe} for stack in first.stacks.values()
        },
    }


def cells(proof: Proof) -> Json:
    prepared = proof.prepare()
    skipped: dict[str, int] = {}
    for plan in prepared.plans:
        if plan.skipped:
            skipped[plan.skipped] = skipped.get(plan.skipped, 0) + 1
    proof.documents, said = proof.measure("cells", prepared)
    news = [row for d in proof.documents for row in rows.arm_rows(d) if row["expected"] in ("unexpected", "differs")]
    shown = [{key: row[key] for key in ("case", "model", "strategy", "arm", "verdict", "reason")} for row in news]
    return {**said, "elsewhere": prepared.elsewhere, "skipped": skipped, "differs": shown}


def cold(proof: Proof) -> Json:
    """The same attempts from fresh interpreters: what a warm server shows must be what torchrun shows."""
    documents, said = proof.measure("cold", proof.prepare(COLD))
    warm = {_attempt(d, name): outcome for d in proof.documents for name, outcome in _outcomes(d, warm=True).items()}
    compared, differ = 0, []
    for document in documents:
        for name, outcome in _outcomes(document).items():
            other = warm.get(_attempt(document, name))
            if other is None:
                continue
            compared += 1
            if other != outcome:
                differ.append({"cell": document["key"], "arm": name, "cold": outcome, "warm": other})
    if not compared and (said["cut"] or (proof.steps.get("cells") or {}).get("cut")):
        raise MeasureError("the time was over before an attempt had been made both ways")
    if not compared:
        whys = (proof.steps.get("cells") or {}).get("started_cold") or {}
        no_server = "".join(f"; {count} attempts found no server: {why}" for why, count in whys.items())
        failed = {
            attempt["outcome"]["reason"]
            for document in [*documents, *proof.documents]
            for arm in document["arms"].values()
            for attempt in arm["attempts"]
            if attempt["outcome"]["outcome"] == "infra"
        }
        no_answer = "".join(f"; {reason}" for reason in sorted(failed)[:2])
        raise MeasureError(f"no attempt was made both from cold and from a warm server{no_server}{no_answer}")
    return {**said, "compared": compared, "differ": differ, "exit_code": DIFFERS if differ else said["exit_code"]}


def hang(proof: Proof) -> Json:
    """A real hang: was it recognised, how soon, and what is known of where each rank stood."""
    every = [proof.prepare(each) for each in HANGS]
    prepared = next((each for each in every if any(not plan.skipped for plan in each.plans)), None)
    if prepared is None:
        skipped = [plan.skipped for each in every for plan in each.plans]
        return {"skipped": skipped or ["no profile of these cards shows a hang"]}
    documents, said = proof.measure("hang", prepared)
    attempts = [a for d in documents for arm in d["arms"].values() for a in arm["attempts"]]
    known = [
        {
            "outcome": attempt["outcome"]["outcome"],
            "reason": attempt["outcome"]["reason"],
            "wall_s": attempt["observation"]["attempt"]["wall_s"],
            "ranks": len(attempt["observation"]["ranks"]),
            "backtraces": sum(bool(rank.get("stack")) for rank in attempt["observation"]["ranks"]),
            "collectives": sum(bool(rank.get("collectives")) for rank in attempt["observation"]["ranks"]),
        }
        for attempt in attempts
    ]
    return {**said, "known": known}


def memory(proof: Proof) -> Json:
    """Peak memory on the cards beside what is planned, both without the driver's own part (torch's peak has none).

    Asking the stacks what their models need takes a minute of one core: last, so that no measurement waits for it.
    """
    plans: dict[str, Json] = {}
    unplanned = [f"less than {ASK_S:g} s were left to ask for it"]
    if proof.ends - time.monotonic() >= ASK_S:
        prepared = proof.prepare(memory=True)
        unplanned = prepared.unplanned
        for plan in prepared.plans:
            for each in plan.arms:
                if each.memory:
                    plans[json.dumps([plan.profile.name, plan.cell.key, each.arm])] = each.memory.to_json()
    return {**beside(proof.documents, plans), "unplanned": unplanned}


def beside(documents: Sequence[Document], plans: Mapping[str, Json]) -> Json:
    """Measured peaks, and those that a plan can be laid beside. ``plans``: by profile, cell and arm (`_attempt`)."""
    peaks = []
    for document in documents:
        for name, arm in document["arms"].items():
            ranks = [rank for attempt in arm["attempts"] for rank in attempt["observation"]["ranks"]]
            seen = [rank["record"].get("peak_gpu_mb") for rank in ranks if rank["record"]]
            peak = max((float(value) for value in seen if value), default=None)
            if peak is None:
                continue
            found: Json = {"cell": document["key"], "arm": name, "peak_mb": peak}
            plan = plans.get(_attempt(document, name)) or {}
            # An arm that failed never got to its fullest moment.
            if "device" in plan and all(attempt["outcome"]["outcome"] == "clean" for attempt in arm["attempts"]):
                needed = plan["device_rank_mb"] - plan["device"]["parts_mb"].get("base", 0.0)
                found |= {"planned_mb": round(needed, 1), "off": round(needed / peak - 1, 3)}
            peaks.append(found)
    if not peaks:
        made = any(arm["attempts"] for document in documents for arm in document["arms"].values())
        raise MeasureError(
            "no attempt used memory of a card" if made else "no attempt was made before the time was over"
        )
    planned = [found for found in peaks if "off" in found]
    return {
        "attempts": len(peaks),
        "most_mb": max(found["peak_mb"] for found in peaks),
        "planned": len(planned),
        "worst": max(planned, key=lambda found: abs(found["off"]), default=None),
        "peaks": peaks,
    }


def _outcomes(document: Document, warm: bool = False) -> dict[str, str]:
    """Arm -> the outcome of its attempt, infra apart: what the machine did is no answer. ``warm``: where it did come
    from a warm server, and was not started from cold for want of one."""
    first = {name: arm["attempts"][0] for name, arm in document["arms"].items() if arm["attempts"]}
    return {
        name: attempt["outcome"]["outcome"]
        for name, attempt in first.items()
        if attempt["outcome"]["outcome"] != "infra" and not (warm and attempt["observation"]["attempt"].get("cold"))
    }


def _attempt(document: Document, arm: str) -> str:
    return json.dumps([document["hardware"]["profile"], document["key"], arm])


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all of it (default: 8)")
    parser.add_argument("--out", metavar="DIR", help="where it goes (default: results/gpu-proof/<name>)")
