"""`repro upgrade --from STACK --to STACK`: may I upgrade? GO, NO-GO, or GO with these fixes."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence

from repro_matrix.analysis import upgrade
from repro_matrix.analysis.upgrade import Boundary, End, Upgrade
from repro_matrix.cli import options
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError, ReproError
from repro_matrix.report.terminal import print_json, print_wrapped
from repro_matrix.results import runs
from repro_matrix.results.summary import Row
from repro_matrix.runner import session
from repro_matrix.runner.session import Request, ask
from repro_matrix.search.algorithms import Stopped
from repro_matrix.search.prober import PASSED, REPRODUCED, Answer, Target
from repro_matrix.text import log

EPILOG = """The answer comes from stored results: the baseline, your own runs, and the ranges of releases in
results/expected. Nothing is downloaded, built or launched without --measure. Restrict it to what you use:
strategy=fsdp model=qwen1.5-0.5b case='fsdp*'.

exit codes: 0 GO; 1 NO-GO, or GO with fixes to apply first; 3 UNDECIDED: nothing gets worse, but less than half of the
results can be compared"""


def configure(parser: argparse.ArgumentParser) -> None:
    options.overrides(parser)
    add = parser.add_argument
    help_text = "the stack in use: a name, a lock, a requirements file, python:PATH"
    add("--from", dest="source", metavar="STACK", required=True, help=help_text)
    add("--to", dest="target", metavar="STACK", required=True, help="the stack to upgrade to")
    add("--measure", action="store_true", help="build both stacks and measure what no stored result tells")
    add("--script", metavar="SCRIPT", help="your own script instead of the catalog, e.g. ./train.py; with --measure")
    add("--budget", type=options.number(3), metavar="N", help="--script: at most N probes for each package")
    options.script(parser)


def main(args: argparse.Namespace) -> int:
    _, texts = options.one_stack(args, {"stack": "the stacks are --from and --to"})
    args.case = args.script
    if args.script:
        return _upgrade_script(args)
    options.refuse(args)
    if args.budget:
        raise ConfigError("--budget is for --script. For a case: repro bisect --max-probes.")
    request, specs = ask(texts), (args.source, args.target)
    described = {spec: stacks.described(spec) for spec in specs}
    ends = {spec: End(spec, stack.versions if stack else {}) for spec, stack in described.items()}
    if len(ends) == 1 or (ends[specs[0]].versions and ends[specs[0]].versions == ends[specs[1]].versions):
        raise ConfigError(f"--from and --to are the same stack, {specs[0]}")
    versions = [end.versions for end in ends.values() if end.versions]
    rows = runs.rows_of_stacks(versions, runs.results_folder(request.settings))
    result = _compare(request, ends, rows)
    if args.measure and result.missing:
        rows += _measure(request, result, ends)
        result = _compare(request, ends, rows)
    if args.json:
        print_json(upgrade.to_json(result))
    else:
        print_wrapped(*upgrade.describe(result), f"exit code {result.exit_code}")
    return result.exit_code


def _compare(request: Request, ends: dict[str, End], rows: Sequence[Row]) -> Upgrade:
    settings, (source, target) = request.settings, ends.values()
    return upgrade.compare(
        request.catalogue, request.cells, settings.variants, settings.repeat, (source, target), rows
    )  # fmt: skip


def _measure(request: Request, missing: Upgrade, ends: dict[str, End]) -> list[Row]:
    """Measure the missing cells. ``ends`` gets the versions of the stacks as they were built."""
    from repro_matrix.report.run_summary import Progress
    from repro_matrix.results.summary import load_rows
    from repro_matrix.runner import workspace

    built = {spec: stacks.resolve(spec, say=log) for spec in ends}
    prepared = session.prepare(request.with_values({"stack": list(ends)}), given=built)
    prepared.plans = [each for each in prepared.plans if (each.cell.key, each.cell.stack) in missing.missing]
    stop = threading.Event()
    with workspace.interruptible(stop, log), Progress() as progress:
        summary = workspace.execute(prepared, progress.event, stop, resume=True, on_warning=progress.warn)
    if summary.problem:
        raise ReproError(summary.problem)
    if summary.interrupted:
        raise KeyboardInterrupt
    ends.update({spec: End(spec, stack.versions) for spec, stack in built.items()})
    return load_rows(runs.results_folder(prepared.settings), request.catalogue.cases, write=True)


def _upgrade_script(args: argparse.Namespace) -> int:
    from repro_matrix.config.schema import VARIANT
    from repro_matrix.external.lockfiles import endpoints
    from repro_matrix.external.scripts import ScriptProber
    from repro_matrix.runner import workspace
    from repro_matrix.search.bisect import Bisector, Search

    script, _, settings = options.script_of(args, needs_limit=False)
    if not args.measure:
        why = "no result of your own script is stored. Add --measure: it builds both stacks and runs the script there."
        raise ConfigError(f"{args.script}: {why}")
    source, target, notes = endpoints(args.source, args.target, script.results)
    if source == target or stacks.resolve(source, say=log).key == stacks.resolve(target, say=log).key:
        raise ConfigError(f"--from and --to are the same stack, {source}")
    ends, stop = [Target(name, name) for name in (source, target)], threading.Event()
    prober = ScriptProber(script, log, stop, settings.repeat)
    with workspace.interruptible(stop, log), prober:
        try:
            prober.learn(*ends)
            before, after = (Bisector(prober, VARIANT).ask(end).variants[VARIANT] for end in ends)
            search = Search(prober, VARIANT, after.label != REPRODUCED, max_probes=args.budget)
            verdict, reason = _verdict_of_script(before, after)
            if verdict == "NO-GO":
                search.run(source, target, None, "")
        except Stopped as error:
            return options.stopped(error)
    names = [(each, each["bad"]["name"].split()[-1], each["good"]["name"].split()[-1]) for each in search.stages]
    holds = [Boundary(each["what"], first, last, each["exact"]).hold for each, first, last in names]
    because = f"{' and '.join(holds) or f'stay on {source}'} because " if verdict == "NO-GO" else ""
    code, headline = upgrade.EXIT_CODES[verdict], f"{verdict}: {because}{reason}"
    if args.json:
        print_json({"from": source, "to": target, "verdict": verdict, "headline": headline, "before": str(before),
                    "after": str(after), "stages": search.stages, "notes": [*notes, *prober.notes, *search.notes],
                    "exit_code": code})  # fmt: skip
    else:
        print_wrapped(headline, f"before: {before}", f"after:  {after}", *notes, *prober.notes, *search.notes)
        print_wrapped(f"exit code {code}")
    return options.stopped(search.stopped) if search.stopped else code


def _verdict_of_script(before: Answer, after: Answer) -> tuple[str, str]:
    if before.label is None or after.label is None:
        return "UNDECIDED", "; ".join(each.detail for each in (before, after) if each.label is None)
    if after.label == PASSED:
        return "GO", "the script passes" if before.label == PASSED else "the upgrade fixes the script"
    if before.label == after.label:
        return "GO", f"the script fails in the same way before and after: {after}"
    return "NO-GO", f"the script fails: {after}"
