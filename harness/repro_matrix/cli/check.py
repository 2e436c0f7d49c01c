"""`repro check SLUG`: run a case several times with both launchers and list what is not ready about
it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from repro_matrix.authoring import check as ready
from repro_matrix.cli import options
from repro_matrix.config import catalog, project
from repro_matrix.paths import CONF
from repro_matrix.results.store import Store
from repro_matrix.search.prober import one_case
from repro_matrix.text import counted


@options.command
@options.case
@options.overrides
@options.flag("--no-run", "check its files only")
def main(args: options.Arguments) -> int:
    known, case = catalog.load(), one_case(args.case)
    file, script = (
        known.own.get("case", {}).get(case.slug, CONF / "case" / f"{case.slug}.yaml"),
        known.script(case),
    )
    shown, code = os.path.relpath(file), os.path.relpath(script)
    found = ready.check_texts(
        {shown: file.read_text(encoding="utf-8"), code: script.read_text(encoding="utf-8")}
    )
    not_measured: dict[str, str] = {}
    found += ready.check_signatures(shown, case)
    for folder in project.published():
        found += ready.check_other_cases(shown, case, known.cases, Store(folder).documents())
    if not args.no_run:
        measured = ready.measure_case(args.case, args.overrides)
        if measured is None:
            print(
                f"{case.slug}: interrupted: whether it is ready is unknown. Run it again.",
                file=sys.stderr,
            )
            return 130
        found += ready.check_attempts(shown, code, case, measured)
        not_measured = ready.unmeasured(measured)
    found = list(dict.fromkeys(found))
    print("\n".join(_lines(args, found, not_measured)))
    return 1 if found else 0


def _lines(
    args: options.Arguments, found: Sequence[str], not_measured: Mapping[str, str]
) -> Iterator[str]:
    yield from found
    how = "ready: the attempts with both launchers agree"
    how = "its files are complete; nothing was run" if args.no_run else how
    next_steps = "Its references were not looked up. Next: commit, "
    next_steps += f"`repro run {args.case} repeat=3`, `repro accept case={args.case} --reason ...`."
    yield f"{args.case}: " + (
        f"{counted(len(found), 'finding')}: not ready" if found else f"{how}. {next_steps}"
    )
    for variant, why in not_measured.items():
        yield f"  not measured here: {variant}: {why}"
