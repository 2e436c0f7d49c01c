"""Run a new case several times under both launchers, and list what is not ready."""

from __future__ import annotations

import os

from repro_matrix.authoring import check as ready
from repro_matrix.cli import options
from repro_matrix.config import catalog, project
from repro_matrix.errors import ExitCode
from repro_matrix.paths import CONF
from repro_matrix.search.prober import one_case
from repro_matrix.text import counted, log


@options.command
@options.case
@options.overrides
@options.flag("--no-run", "check its files only")
def main(args: options.Arguments) -> int:
    known, case = catalog.load(), one_case(args.case)
    file = known.own.get("case", {}).get(case.slug, CONF / "case" / f"{case.slug}.yaml")
    shown, code = os.path.relpath(file), os.path.relpath(known.script(case))
    found = ready.check_texts([shown, code])
    not_measured: dict[str, str] = {}
    found += ready.check_signatures(shown, case)
    for folder in project.published():
        others = ready.distinct_evidence(folder)
        found += ready.check_other_cases(shown, case, known.cases, others)
    if not args.no_run:
        measured = ready.measure_case(args.case, args.overrides)
        if measured is None:
            log(f"{case.slug}: interrupted: whether it is ready is unknown. Run it again.")
            return ExitCode.INTERRUPTED
        found += ready.check_attempts(shown, code, case, measured)
        not_measured = ready.unmeasured(measured)
    if found:
        print("\n".join(dict.fromkeys(found)))
        print(f"{args.case}: {counted(len(set(found)), 'finding')}: not ready")
    else:
        how = "its files are complete; nothing was run"
        if not args.no_run:
            how = "ready: the attempts with both launchers agree"
        print(
            f"{args.case}: {how}. Its references were not looked up. Next: commit,"
            f" `repro run {args.case} repeat=3`, `repro accept case={args.case} --reason ...`."
        )
    for variant, why in not_measured.items():
        print(f"  not measured here: {variant}: {why}")
    return 1 if found else 0
