"""Write results as a page, a static site, JUnit, Markdown or JSON.

Exit codes: 0, whatever the results are (the run that measured them has another one); 2 usage; 3
less was measured than requested, or evidence cannot be read.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from fnmatch import filter as matching
from pathlib import Path

import click

from repro_matrix.changes.sides import AXES, patterns_of
from repro_matrix.cli import options
from repro_matrix.config import project
from repro_matrix.errors import ConfigError, ExitCode, ResultsError, nearest
from repro_matrix.report import page
from repro_matrix.report.formats import find_format
from repro_matrix.report.load import Results, load_results
from repro_matrix.report.page_model import build_page
from repro_matrix.report.terminal import print_notes
from repro_matrix.results import runs


@options.command
@click.argument(
    "overrides",
    nargs=-1,
    metavar="[RESULTS|OVERRIDE]...",
    help="folders of results (default: the last run); case=, model=, strategy=, stack=, hardware=,"
    " area= and silent= select a part",
)
@options.flag("--baseline", "the published results, alone or with the others")
@click.option(
    "--history",
    metavar="DIR",
    help="a folder with nights.jsonl: show what changed over the nightly runs",
)
@click.option(
    "--format",
    metavar="FORMAT",
    default="html",
    help="html (default: one self-contained file), text, junit, markdown, json, or a plug-in's",
)
@click.option(
    "--output",
    metavar="FILE",
    help="the file to write; - is stdout, the default of all formats but html",
)
@click.option(
    "--site", metavar="DIR", help="write a static site: an index, and a page for each case"
)
def main(args: options.Arguments) -> int:
    write = find_format(args.format)
    gc.freeze()
    gc.disable()  # many small objects that all live to the end: collections double the time
    results_root = project.current().results
    folders = [Path(word).expanduser() for word in args.overrides if "=" not in word]
    if not folders and not args.baseline:
        folders = [results_root / "scratch"]
    folders = [runs.last_run(folder) for folder in folders]
    if args.baseline:
        folders += [
            folder for folder in project.published() if folder.is_dir() and folder not in folders
        ]
    if args.site and (args.output or args.format != "html"):
        raise ConfigError("--site writes its own files: remove --output and --format")
    words = (word for word in args.overrides if "=" in word)
    selection = patterns_of(words, (*AXES, "area", "silent"))
    target = _target(args, folders, results_root, "-selected" if selection else "")
    history = Path(args.history).expanduser() if args.history else None
    found = load_results(folders, selection, history)
    if not found.cells and not found.remarks.incomplete:
        _refuse_nothing(selection, folders, found)
    if args.site:
        site = page.render_site(build_page(found))
        page.write_site(Path(args.site), site)
        print(f"{len(site)} pages: {Path(args.site) / 'index.html'}")
        return _exit_code(found)
    if args.format != "html":
        print_notes(found.remarks.all)  # the page shows them itself
    text = write(replace(found, target=target))
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
    """Raise ResultsError if nothing is selected, or if no folder has results.

    A run that measured nothing has a page, too.
    """
    if selection:
        words = " ".join(f"{axis}={','.join(patterns)}" for axis, patterns in selection.items())
        missing = [
            one for one in selection.get("case", ()) if not matching(found.stored_cases, one)
        ]
        hint = "".join(nearest(one, found.stored_cases) for one in missing)
        raise ResultsError(f"{words}: selects no stored cell{hint}")
    if not found.remarks.damaged and not any(
        (folder / ".lock").exists() or runs.read_run(folder) for folder in folders
    ):
        reason = f": {found.remarks.all[0]}" if found.remarks.all else ""
        raise ResultsError(
            f"{', '.join(map(str, folders))}: no results{reason}. Name a folder of results."
        )


def _target(args: options.Arguments, folders: list[Path], root: Path, suffix: str) -> Path | None:
    """Return the file to write, or None for stdout. Raise ResultsError for a file of evidence.

    ``suffix``: the end of the default name.
    """
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
