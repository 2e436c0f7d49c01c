"""`repro check SLUG`: run a case several times with both launchers and list what is not ready about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from repro_matrix.cli import options as arguments
from repro_matrix.text import counted

if TYPE_CHECKING:
    from repro_matrix.authoring.check import Finding
    from repro_matrix.config.catalog import Catalogue

TIMES = 3


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.case(parser)
    arguments.overrides(parser)
    parser.add_argument(
        "--times", type=arguments.number(1), default=TIMES, help="attempts of each variant with each launcher"
    )
    parser.add_argument("--no-run", action="store_true", help="check its files only")


def main(args: argparse.Namespace) -> int:
    from repro_matrix.authoring import check as ready
    from repro_matrix.config import catalog as catalogue
    from repro_matrix.config import project
    from repro_matrix.errors import unknown
    from repro_matrix.report.terminal import print_json
    from repro_matrix.results.store import Store

    known = catalogue.load()
    if args.case not in known.cases:
        raise unknown("case", args.case, known.cases)
    case = known.cases[args.case]
    file, script = _file(known, args.case), known.script(case)
    shown, code = _short(file), _short(script)
    found = ready.check_texts(shown, file.read_text(encoding="utf-8"), code, script.read_text(encoding="utf-8"))
    notes: dict[str, dict[str, str]] = {}
    parses = not any("not valid Python" in finding.text for finding in found)
    found += ready.check_signatures(shown, case)
    for folder in project.published():
        found += ready.check_other_cases(shown, case, known.cases, Store(folder).documents())
    if parses and not args.no_run:
        measured = ready.measure(args.case, args.times, args.overrides)
        if measured is None:
            print(f"{case.slug}: interrupted: whether it is ready is unknown. Run it again.", file=sys.stderr)
            return 130
        found += ready.check_attempts(shown, code, case, measured)
        notes = {"not_measured": ready.unmeasured(measured), "as_recorded": ready.expected_non_fixes(measured)}
    found = list(dict.fromkeys(found))
    if args.json:
        findings = [vars(finding) for finding in found]
        print_json({"case": case.slug, "ready": not found, "findings": findings, **notes})
    else:
        print("\n".join([*_lines(case.slug, found, args), *_notes(notes)]))
    return 1 if found else 0


def _lines(slug: str, found: list[Finding], args: argparse.Namespace) -> list[str]:
    if found:
        return [*map(str, found), f"{slug}: {len(found)} finding{'s' if len(found) > 1 else ''}: not ready"]
    how = (
        "its files are complete; nothing was run"
        if args.no_run
        else f"ready ({counted(args.times, 'attempt')} a variant with each launcher)"
    )
    return [f"{slug}: {how}. Next: commit, `repro run {slug} repeat=3`, `repro accept case={slug} --reason ...`."]


def _notes(notes: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for variant, why in notes.get("not_measured", {}).items():
        yield f"  not measured here: {variant}: {why}"
    known = [f"{variant} {verdict}" for variant, verdict in notes.get("as_recorded", {}).items()]
    if known:
        yield f"  no help, as results/expected says: {', '.join(known)}"


def _file(known: Catalogue, slug: str) -> Path:
    from repro_matrix.paths import CONF

    return known.own.get("case", {}).get(slug, CONF / "case" / f"{slug}.yaml")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
