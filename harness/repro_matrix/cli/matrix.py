"""`repro matrix`, and what `repro run CASE` does too: launch, watch, print what was found."""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repro_matrix.analysis import diff as diffs
from repro_matrix.analysis.inputs import Side, load_side, side_of_run
from repro_matrix.cli import options as arguments
from repro_matrix.errors import ConfigError, ReproError
from repro_matrix.records.document import Document
from repro_matrix.report import listing
from repro_matrix.report import summary as summaries
from repro_matrix.report.terminal import columns as wide
from repro_matrix.report.terminal import (
    matrix_table,
    named,
    print_json,
    print_lines,
    print_table,
    print_wrapped,
    summary_line,
)
from repro_matrix.results import local as own_results
from repro_matrix.results import quarantine as muted
from repro_matrix.results import rows
from repro_matrix.results.exit_code import DIFFERS, bisect_exit, exit_code
from repro_matrix.runner import resume as going_on
from repro_matrix.runner import session
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.request import print_composed
from repro_matrix.text import counted, wrap


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    arguments.cfg(parser)
    parser.add_argument("--all", action="store_true", help="a line for every arm of every cell")
    how(parser)


def how(parser: argparse.ArgumentParser) -> None:
    """What `repro run CASE` takes as well."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the interrupted run (or this selection): what is recorded is not run again",
    )
    told = "also say what this run answers otherwise than these results (as `repro diff`); exit code 1 for it"
    parser.add_argument("--against", metavar="DIR", help=told)
    parser.add_argument("--plan", action="store_true", help="show what would be launched, and launch nothing")


def main(args: argparse.Namespace) -> int:
    if args.cfg:
        return print_composed(args.overrides)
    return measure(args, args.overrides, every_arm=args.all, page=True)


def measure(
    args: argparse.Namespace,
    texts: Sequence[str],
    *,
    every_arm: bool,
    live: bool = False,
    for_git: bool = False,
    page: bool = False,
) -> int:
    """``every_arm``: a line for each instead of what differs; ``live``: a line for each attempt; ``for_git``: exit
    codes for `git bisect run`; ``page``: a run of the matrix, which measures planted cells first (running/canary.py)
    and writes its page beside its documents."""
    mutes = muted.read()
    before = load_side(args.against) if args.against else None  # what cannot be read is said before anything runs
    texts, resumed = going_on.resumed(texts) if args.resume else (list(texts), None)
    prepared = session.prepare(texts, build_stacks=not args.plan, overlap=True, probe=True)
    muted.check(mutes, prepared.catalogue)
    print(f"repro: {prepared.headline()}", file=sys.stderr, flush=True)
    for note in prepared.notes():
        print(f"note: {note}", file=sys.stderr, flush=True)
    if args.plan:
        return show_plan(prepared, args.json, every_arm)
    from repro_matrix.runner.progress import Progress

    stop = threading.Event()
    with (
        going_on.folder(prepared, texts, resumed) as ended,
        Progress(verbose=live) as progress,
        workplace.interruptible(stop, progress.warn, workplace.RESUMED),
    ):
        summary = workplace.execute(prepared, progress.event, stop, args.resume, progress.warn, planted=page)
        ended(summary)
    told = muted.applied(summary.documents, mutes, datetime.now(timezone.utc).date())
    summary.documents = told.documents
    found = rows.by_attention(row for document in summary.documents for row in rows.arm_rows(document))
    per_attempt = summary.cpu_s / summary.attempts if summary.attempts else 0.0
    totals = {
        "hardware": [profile.name for profile in prepared.profiles],
        "profiles": [
            {
                "profile": profile.name,
                "accelerator": profile.accelerator,
                "backend": profile.backend,
                "devices": [gpu.name for gpu in profile.gpus],
                "ranks": prepared.sizes(profile),
            }
            for profile in prepared.profiles
        ],
        "stacks": {stack.name: dict(stack.versions) for stack in prepared.stacks.values()},
        "attempts": summary.attempts,
        "reused": summary.reused,
        "cpu_s": round(summary.cpu_s, 1),
        "cpu_s_per_attempt": round(per_attempt, 2),
        "wall_s": round(summary.wall_s, 1),
        "cold": dict(summary.cold),
        "interrupted": summary.interrupted,
        "problem": summary.problem,
        "cards": summary.cards,
        "changed": prepared.changed(),
        "results": str(own_results.results_folder(prepared.settings)),
        "verdicts": rows.counts(found),
        "counts": rows.figures(found),
        "expected": dict(Counter(row["expected"] for row in found if row["expected"])),
        "elsewhere": prepared.elsewhere,
        "left": [" ".join((cell.hardware, cell.stack, cell.key)) for cell in summary.not_started],
        "left_out": prepared.left_out,
    }
    written = _page(summary.documents, own_results.results_folder(prepared.settings)) if page else None
    totals["page"] = str(written) if written else None
    changed = _against(before, summary.documents) if before else None
    if args.json:
        against = {"against": diffs.diff_to_json(changed)} if changed else {}
        print_json({"rows": found, "summary": totals, **against})
    else:
        if every_arm:
            matrix_table(found)
        else:
            print_lines(summaries.lines(summary.documents, found, wide()))
            print()
        print_lines(summaries.left_out(prepared.left_out, wide()))
        print_wrapped(*(f"MUTED no longer: {mute.over()}" for mute in told.expired))
        print_lines(wrap(summary_line(found), "", 4, wide()))
        if summary.interrupted:
            print_wrapped(_interrupted(prepared, summary.documents))
        print_wrapped(
            f"{counted(summary.attempts, 'attempt')} ({summary.reused} more reused), {summary.cpu_s:.0f} "
            f"CPU-seconds ({per_attempt:.2f} per attempt), {summary.wall_s:.0f} s"
        )
        elsewhere = f"measured elsewhere than on {prepared.profiles[0].name}"
        print_wrapped(*(f"{counted(n, 'cell')} {elsewhere}: {why}" for why, n in prepared.elsewhere.items()))
        if summary.not_started:
            not_started = session.count_by_case(summary.not_started)
            print_wrapped(f"NOT MEASURED within time_limit={prepared.settings.time_limit}: {not_started}")
        print_wrapped(*(f"{count} of them started from cold: {why}" for why, count in summary.cold.most_common()))
        lost = map(str, prepared.machine.left_out) if prepared.profile.accelerator != "cpu" else ()
        print_wrapped(*(f"note: {text}" for text in [*prepared.changed(), *lost, *summary.cards]))
        if changed and before and not (summary.problem or summary.interrupted or for_git):
            print()
            print_wrapped(f"compared with {diffs.describe_side(before.name, before.rows)}")
            print_wrapped(*diffs.describe_diff(changed), "")
        print(f"documents: {totals['results']}")
        if written:
            print(f"page: {written}")
    if summary.problem:
        raise ReproError(summary.problem)
    if summary.interrupted:
        print("interrupted: --resume goes on with what is missing", file=sys.stderr)
        return 130
    if for_git:
        return bisect_exit(summary.documents)
    lacking = {document["stack"]["name"] for document in summary.documents} & prepared.unavailable.keys()
    lacking |= prepared.unusable  # those of single arms, too: that they are skipped is no declared need
    for name in sorted(lacking):
        print(f"repro: stack={name}: {prepared.unavailable[name]}", file=sys.stderr)
    code = exit_code(
        summary.documents, prepared.settings.min_measured, stopped_early=bool(lacking or prepared.left_out)
    )
    if changed and changed.exit_code == DIFFERS:
        code = DIFFERS
    for mute in told.expired:
        print(f"repro: {mute.over()}", file=sys.stderr)
    code = code or (ConfigError.exit_code if told.expired else 0)
    if not args.json:
        count = counted(len(summary.not_started), "cell")
        left = f"; not started within the time limit: {count}" if summary.not_started else ""
        print(summaries.ending(code, found, len(changed.select(diffs.RESULTS)) if changed else 0) + left)
    return code


def _interrupted(prepared: session.Session, documents: Sequence[Document]) -> str:
    """What the lines above do not speak of."""
    asked = len({(plan.cell.hardware, plan.cell.stack, plan.cell.key) for plan in prepared.plans})
    asked += sum(len(each.cells) for each in prepared.later)  # what waited for a build
    lacking = asked - sum(document["complete"] for document in documents)
    if lacking <= 0:
        return "INTERRUPTED, when all of it was measured"
    of = counted(asked, "cell")
    return f"INTERRUPTED: {lacking} of {of} not measured, or not to the end: of these nothing is said"


def _against(before: Side, documents: Sequence[Document]) -> diffs.Diff:
    """Compare what was measured now with the same cells there: cells that were not selected are not missing."""
    now = side_of_run("this run", documents).rows
    selected = {row.key for row in now}
    return diffs.compare([row for row in before.rows if row.key in selected], now, need_common=False)


def _page(documents: list[Document], folder: Path) -> Path | None:
    """The page of a run. That there can be none is a note: what was measured is recorded."""
    from repro_matrix.cli.report import of_run

    try:
        return of_run(documents, folder)
    except (ReproError, OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        print(f"note: no page of this run: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def show_plan(prepared: session.Session, as_json: bool, everything: bool) -> int:
    items: list[dict[str, Any]] = [
        {
            "case": plan.cell.case, "model": plan.cell.model, "strategy": plan.cell.strategy,
            "flags": dict(plan.cell.flags), "ranks": plan.cell.ranks, "stack": arm.stack,
            "hardware": plan.cell.hardware, "arm": arm.arm, "world_size": arm.world_size, "devices": arm.gpus,
            "attempts": arm.repeat,
            "deadline_s": arm.deadline, "skipped": arm.skipped,
            "simulated": prepared.catalogue.cases[plan.cell.case].simulated,
        }
        for plan in prepared.plans
        for arm in plan.arms
    ]  # fmt: skip
    for name in sorted({item["stack"] for item in items} & prepared.unavailable.keys() | prepared.unusable):
        print(f"repro: stack={name}: {prepared.unavailable[name]}", file=sys.stderr)
    if as_json:
        print_json(items)
        return 0
    if everything:
        _print_arms(items)
    else:
        keys = [repr((p.cell.hardware, p.cell.stack, p.cell.key)) for p in prepared.plans for _ in p.arms]
        named_ = [i | {"case": named(i["case"], i["simulated"]), "cell": key} for i, key in zip(items, keys)]
        print_lines(listing.planned(named_, wide()))
    for why, count in prepared.elsewhere.items():
        of = counted(count, "cell")
        print(f"{of} would be measured elsewhere than on {prepared.profiles[0].name}: {why}")
    return 0


def _print_arms(items: Sequence[dict[str, Any]]) -> None:
    heads = ["case", "model", "strategy", "arm", "stack", "hardware", "ranks", "devices", "attempts", "skipped"]
    table = [
        [
            named(i["case"], i["simulated"]), i["model"], i["strategy"], i["arm"], i["stack"], i["hardware"],
            i["world_size"], i["devices"], i["attempts"], i["skipped"],
        ]
        for i in items
    ]  # fmt: skip
    print_table("", heads, table, narrow=("skipped",), fold=True, whole=True)
