"""Run one case live, with all its variants, or a script of your own as it is.

  repro run CASE
  repro run ./train.py
  repro run [OPTION ...] -- torchrun|python|accelerate launch|deepspeed ...    any command line
Exit codes of a script: 0 passed, 1 it fails, 3 the outcome is unknown.
"""

from __future__ import annotations

import threading

from repro_matrix.cli import matrix, options
from repro_matrix.cli import script_arguments as scripts
from repro_matrix.config import catalog
from repro_matrix.config.schema import VARIANT, AdhocCase
from repro_matrix.config.selection import expand
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError, ExitCode
from repro_matrix.records.document import Document
from repro_matrix.report.terminal import print_json
from repro_matrix.results.projection import error_at
from repro_matrix.runner import run as workspace
from repro_matrix.runner import session
from repro_matrix.text import counted, log


@options.command
@options.case_or_script
@matrix.run_options
@options.flag(
    "--bisect-exit",
    "for git bisect run: of the variant unfixed, or the script, 0 passed, 1 the failure occurs, 125"
    " neither; 128 or more: an error",
)
def main(args: options.Arguments) -> int:
    if scripts.names_script(args):
        return run_script(args)
    options.refuse_script_options(args)
    cases = options.named_case(args.case).split(",")
    where = "the first argument of `repro run` is a case or a script"
    expand("case", cases, catalog.load().cases, where)
    texts = [f"case={args.case}", *args.overrides]
    return matrix.run_selection(args, texts, live=True)


def run_script(args: options.Arguments) -> int:
    from repro_matrix.runner.adhoc_case import in_shell

    script, spec, settings = scripts.script_of(args)
    request = script.request(spec, settings.repeat)
    case = request.catalogue.cases[script.slug]
    assert isinstance(case, AdhocCase)
    if args.dry_run:
        ranks = counted(case.launch.world_size, "rank")
        print(f"{case.title}: {ranks} on stack {spec}, at most {case.launch.deadline:g} s")
        return 0
    prepared = session.prepare(request, given={spec: in_shell(stacks.resolve(spec, say=log))})
    plan = prepared.plans[0].variants[0]
    if plan.skipped:
        raise ConfigError(f"{case.title} cannot run here: {plan.skipped}")
    stop = threading.Event()
    stored = workspace.RESUMED if (settings.repeat or 1) > 1 else "there is no result yet"
    with workspace.interruptible(stop, log, stored):
        summary = workspace.execute(
            prepared, lambda event: None, stop, resume=args.resume, on_warning=log
        )
    if summary.problem:
        raise summary.problem
    if not summary.documents:  # interrupted
        return ExitCode.INTERRUPTED
    document = summary.documents[0]
    attempts = document["variants"][VARIANT]["attempts"]
    outcomes = {attempt["outcome"]["outcome"] for attempt in attempts}
    _print_result(args, case, document, outcomes)
    if not args.json:
        print(f"on stack {spec}; result: {document['path']}")
    if summary.interrupted:
        return ExitCode.INTERRUPTED
    if outcomes == {"passed"}:
        return 0
    if args.bisect_exit:
        failed = "reproduced" if case.failure else "other_failure"
        return 1 if failed in outcomes else 125
    return 3 if outcomes <= {"infra_error"} else 1


def _print_result(
    args: options.Arguments, case: AdhocCase, document: Document, outcomes: set[str]
) -> None:
    """Print the outcome of a script, and the known failures that it shows."""
    from repro_matrix.runner.adhoc_case import known_failures
    from repro_matrix.search.script_prober import describe_probe_result

    attempts = document["variants"][VARIANT]["attempts"]
    shipped = catalog.load().cases if outcomes - {"passed", "infra_error"} else {}
    known = known_failures(attempts, shipped.values())
    if args.json:
        more = {"attempts": attempts, "error_at": error_at(attempts), "known": known}
        print_json({**document, **more, "document": document["path"]})
        return
    print("\n".join(describe_probe_result(case, document)))
    for slug in known:
        print(f"a known failure: {slug}, {shipped[slug].title}")
        print(f"  its fixes: `repro show {slug}`; live: `repro run {slug}`")
