"""`repro report [RESULTS...]`: show results as a page, a static site, or a file for other programs.

Exit codes: 0, whatever the results are (the run that measured them has another one); 2 usage error;
3 less was measured than requested, or evidence cannot be read.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace
from pathlib import Path

from repro_matrix.changes.sides import patterns_of
from repro_matrix.config import project
from repro_matrix.errors import ConfigError, ExitCode, ResultsError, nearest
from repro_matrix.report import page
from repro_matrix.report.formats import find_format, format_names
from repro_matrix.report.load import Results, load_results
from repro_matrix.report.terminal import print_notes
from repro_matrix.results import runs


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_text = (
        "folders of results (default: the last run); case=, model=, strategy=, stack=, hardware="
        " select a part"
    )
    add("overrides", nargs="*", metavar="RESULTS|OVERRIDE", help=help_text)
    add("--baseline", action="store_true", help="the published results, alone or with the others")
    add(
        "--history",
        metavar="DIR",
        help="a folder with nights.jsonl: show what changed over the nightly runs",
    )
    add(
        "--format",
        choices=format_names(),
        default="html",
        help="default: html, one self-contained file",
    )
    add(
        "--output",
        metavar="FILE",
        help="the file to write; - is stdout, the default of all formats but html",
    )
    add("--site", metavar="DIR", help="write a static site: an index, and a page for each case")


def main(args: argparse.Namespace) -> int:
    gc.freeze()
    # many small objects that all live to the end: looking for garbage doubles the time
    gc.disable()
    results_root = project.current().results
    names = [word for word in args.overrides if "=" not in word]
    folders = [Path(name).expanduser() for name in names] or (
        [] if args.baseline else [results_root / "scratch"]
    )
    folders = [runs.last_run(folder) for folder in folders]
    if args.baseline:
        folders += [
            folder for folder in project.published() if folder.is_dir() and folder not in folders
        ]
    if args.site and (args.output or args.format != "html"):
        raise ConfigError("--site writes its own files: remove --output and --format")
    selection = patterns_of(word for word in args.overrides if "=" in word)
    target = _target(args, folders, results_root, "-selected" if selection else "")
    history = Path(args.history).expanduser() if args.history else None
    found = load_results(folders, selection, history)
    if not found.cells and not found.remarks.incomplete:
        _refuse_nothing(selection, folders, found)
    if args.site:
        site = page.render_site(page.page_of(found))
        page.write_site(Path(args.site), site)
        print(f"{len(site)} pages: {Path(args.site) / 'index.html'}")
        return _exit_code(found)
    if args.format != "html":
        print_notes(found.remarks.all)  # the page shows them itself
    text = find_format(args.format)(replace(found, target=target))
    if target is None:
        sys.stdout.write(text)
    else:
        page.write_report(target, text)
        print(target)
    return _exit_code(found)


def _exit_code(found: Results) -> int:
    text = found.headline.incomplete
    if not text and any(row.attempts for row in found.headline.rows):
        return ExitCode.OK
    print(f"exit code {ExitCode.INCOMPLETE}: {text or 'nothing was measured'}", file=sys.stderr)
    return ExitCode.INCOMPLETE


def _refuse_nothing(selection: dict[str, list[str]], folders: list[Path], found: Results) -> None:
    """Raise ResultsError: nothing was selected, or no folder holds results. A run that measured
    nothing has a page."""
    if selection:
        words = " ".join(f"{axis}={','.join(patterns)}" for axis, patterns in selection.items())
        hint = "".join(nearest(one, found.stored_cases) for one in selection.get("case", ()))
        raise ResultsError(f"{words}: selects no stored cell{hint}")
    if not found.remarks.damaged and not any(
        (folder / ".lock").exists() or runs.read_run(folder) for folder in folders
    ):
        reason = f": {found.remarks.all[0]}" if found.remarks.all else ""
        raise ResultsError(
            f"{', '.join(map(str, folders))}: no results{reason}. Name a folder of results."
        )


def _target(args: argparse.Namespace, folders: list[Path], root: Path, suffix: str) -> Path | None:
    """Return the file to write, or None for stdout. ``suffix``: of the default name. Raise
    ResultsError: it cannot be, or is among the evidence."""
    if args.output == "-" or (args.output is None and args.format != "html"):
        return None
    if args.output is None:
        folder, name = (root / "scratch", "baseline") if args.baseline else (folders[0], "report")
        return folder / f"{name}{suffix}.html"
    target = Path(args.output).expanduser()
    inside = any(target.resolve().is_relative_to(folder.resolve()) for folder in folders)
    if inside and target.suffix in (".json", ".jsonl", ".zst"):
        raise ResultsError(
            f"{target}: would be read as evidence there. Write it to another folder."
        )
    return target
