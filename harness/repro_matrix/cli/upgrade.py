"""`repro upgrade --from STACK --to STACK`: may I upgrade? GO, NO-GO, or GO with these fixes.

The answer comes from stored results: the baseline, your own runs, and the ranges of releases in
results/expected. Nothing is downloaded, built or launched without --measure. Restrict it to what
you use: strategy=fsdp model=qwen1.5-0.5b case='fsdp*'.

exit codes: 0 GO; 1 NO-GO, or GO with fixes to apply first; 3 UNDECIDED: nothing gets worse, but too
little of what depends on the changed packages can be compared; 2 usage, also two stacks with the
same packages

For a script of your own: repro bisect ./train.py --good STACK --bad STACK
"""

from __future__ import annotations

import threading

import click

from repro_matrix.changes import upgrade_answer as upgrade
from repro_matrix.changes.upgrade import End, Upgrade, compare_stacks
from repro_matrix.cli import options
from repro_matrix.environment import lockfiles, stacks
from repro_matrix.environment.stacks.spec import parse_stack
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.git import git_state
from repro_matrix.report.terminal import print_json, print_wrapped
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.results.summary import lost
from repro_matrix.runner import session
from repro_matrix.runner.session import Request, make_request
from repro_matrix.text import list_some, log


@options.command
@options.overrides
@options.json
@click.option(
    "--from",
    "source",
    metavar="STACK",
    required=True,
    help="the stack in use: a name, a lock, a requirements file, python:PATH",
)
@click.option("--to", "target", metavar="STACK", required=True, help="the stack to upgrade to")
@options.flag("--measure", "build both stacks and measure what no stored result tells")
def main(args: options.Arguments) -> int:
    _, texts = options.one_stack(args, {"stack": "the stacks are --from and --to"})
    request, specs = make_request(texts), (args.source, args.target)
    for file in (parse_stack(spec).file for spec in specs):
        if file and file.is_file() and file.name != "uv.lock" and file.suffix != ".toml":
            list(
                lockfiles.requirements(
                    file.read_text(encoding="utf-8-sig", errors="replace"), str(file)
                )
            )
    described = {spec: stacks.described(spec) for spec in specs}
    ends = {spec: End(spec, stack.versions if stack else {}) for spec, stack in described.items()}
    versions = [end.versions for end in ends.values() if end.versions]
    if len(ends) == 1 or (versions[1:] and versions[0] == versions[1]):
        raise ConfigError(
            f"--from {specs[0]} and --to {specs[1]} have the same packages: there is nothing to"
            " compare."
        )
    folder, notes = runs.results_folder(request.settings), list[str]()
    if request.settings.results and not folder.is_dir():
        log(f"note: results={folder}: there is no such folder, so nothing is read from it")
    rows = runs.rows_of_stacks(versions, folder, notes)
    if damaged := lost(notes):
        raise MeasureError(
            f"evidence cannot be used: {list_some(damaged)}. Without it there is no answer."
        )
    committed = [row for row in rows if not row.dirty]
    if git_state()[1] and committed != rows:
        log("note: results that were measured with files that are not committed count, too")
    else:
        rows = committed
    result = compare_stacks(request, list(ends.values()), rows)
    if args.measure and result.missing:
        rows += _measure(request, result, ends)
        result = compare_stacks(request, list(ends.values()), rows)
    if args.json:
        print_json(upgrade.upgrade_to_json(result))
    else:
        print_wrapped(*upgrade.describe_upgrade(result), f"exit code {result.exit_code}")
    return result.exit_code


def _measure(request: Request, missing: Upgrade, ends: dict[str, End]) -> list[Row]:
    """Measure the missing cells. ``ends`` gets the versions of the stacks as they were built."""
    from repro_matrix.report.run_summary import RunProgress
    from repro_matrix.results.summary import load_rows
    from repro_matrix.runner import run as workspace

    built = {spec: stacks.resolve(spec, say=log) for spec in ends}
    prepared = session.prepare(request.with_values({"stack": list(ends)}), given=built)
    prepared.plans = [
        each for each in prepared.plans if (each.cell.key, each.cell.stack) in missing.missing
    ]
    stop = threading.Event()
    with workspace.interruptible(stop, log), RunProgress() as progress:
        summary = workspace.execute(
            prepared, progress.event, stop, resume=True, on_warning=progress.warn
        )
    if summary.problem:
        raise summary.problem
    if summary.interrupted:
        raise KeyboardInterrupt
    ends.update({spec: End(spec, stack.versions) for spec, stack in built.items()})
    return load_rows(runs.results_folder(prepared.settings), request.catalogue.cases, write=True)
