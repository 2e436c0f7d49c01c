"""`repro report [RESULTS...]`: show results as a page, a static site, or a file for other programs."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from repro_matrix.errors import ConfigError, ResultsError, nearest, unknown
from repro_matrix.results import runs
from repro_matrix.text import counted

if TYPE_CHECKING:
    from repro_matrix.report.load import Results

FORMATS = ("html", "junit", "markdown", "json", "csv")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0; 2 usage; 3 evidence that cannot be read (everything else is reported)"
    add = parser.add_argument
    add("overrides", nargs="*", metavar="RESULTS",
        help="results folders (default: the last run), several side by side; case=qwen15-* model= strategy= stack= "
        "hardware= select a part")  # fmt: skip
    add("--baseline", action="store_true", help="the published results, alone or beside the others")
    add("--history", metavar="DIR", help="earlier runs (nights.jsonl or folders), to show what changed")
    add("--format", choices=FORMATS, default="html", help="default: html, one self-contained file")
    add("--output", metavar="PATH", help="the file to write; - is stdout (the default except for html)")
    add("--site", metavar="DIR", help="write a static site: an index, and a page for each case")


def main(args: argparse.Namespace) -> int:
    from repro_matrix.config import project
    from repro_matrix.report import formats, html, load
    from repro_matrix.report.terminal import print_notes

    gc.freeze()
    gc.disable()  # many small objects that all live to the end: looking for garbage doubles the time
    results_root = project.current().results
    names = [word for word in args.overrides if "=" not in word]
    folders = [Path(name).expanduser() for name in names] or ([] if args.baseline else [results_root / "scratch"])
    folders = [runs.of(folder) for folder in folders]
    if args.baseline:
        folders += [folder for folder in project.published() if folder.is_dir() and folder not in folders]
    if args.site and (args.output or args.format != "html"):
        raise ConfigError("--site writes its own files: remove --output and --format")
    target = _target(args, folders, results_root)
    found = load.load_results(folders, _selection(args.overrides))
    if not found.cells and not found.remarks.incomplete:
        _refuse_nothing(args, folders, found)
    if args.format != "html":
        print_notes(found.remarks.all)  # the page shows them itself
    if args.format == "json":
        text = formats.to_json(
            found.cells, found.claims, [str(folder) for folder in folders], load.created_line(folders), found.remarks
        )
    elif args.format == "csv":
        text = formats.to_csv(found.cells)
    elif args.format == "junit":
        text = formats.to_junit(found.cells, found.remarks)
    elif args.format == "markdown":
        text = formats.to_markdown(found.cells, load.title(folders), "", found.remarks)
    else:
        page = load.page(found, folders, Path(args.history).expanduser() if args.history else None)
        if args.site:
            files = html.render_site(page)
            load.write_site(Path(args.site), files)
            print(f"{len(files)} pages: {Path(args.site) / 'index.html'}")
            return _exit_code(found)
        text = html.render_file(page)
    if target is None:
        sys.stdout.write(text)
    else:
        load.write(target, text)
        print(target)
    return _exit_code(found)


def _exit_code(found: Results) -> int:
    from repro_matrix.results.exit_code import TOO_LITTLE

    if not found.remarks.damaged:
        return 0
    number = counted(len(found.remarks.damaged), "file")
    print(f"exit code {TOO_LITTLE}: {number} of evidence cannot be read", file=sys.stderr)
    return TOO_LITTLE


def _refuse_nothing(args: argparse.Namespace, folders: list[Path], found: Results) -> None:
    """Raise ResultsError: nothing was selected, or no folder holds results. A run that measured nothing has a page."""
    from repro_matrix.report import load

    selected = [word for word in args.overrides if "=" in word]
    if selected:
        cases = _selection(selected).get("case", [])
        hint = "".join(nearest(one, found.stored_cases) for one in cases)
        raise ResultsError(f"{' '.join(selected)}: selects no stored cell{hint}")
    if args.output is None and not any(load.is_results(folder) for folder in folders):
        reason = f": {found.remarks.all[0]}" if found.remarks.all else ""
        raise ResultsError(f"{', '.join(map(str, folders))}: no results{reason}. Name a folder of results.")


def _selection(words: list[str]) -> dict[str, list[str]]:
    from repro_matrix.report.load import AXES

    found = {}
    for word in words:
        axis, equals, value = word.partition("=")
        if equals and axis not in AXES:
            raise unknown("axis", axis, AXES)
        if equals:
            found[axis] = [part.strip() for part in value.split(",")]
    return found


def _target(args: argparse.Namespace, folders: list[Path], root: Path) -> Path | None:
    """Return the file to write, or None for stdout. Raise ResultsError: it cannot be, or is among the evidence."""
    if args.output in ("-", "/dev/stdout") or (args.output is None and args.format != "html"):
        return None
    if args.output is None:
        folder = root / "scratch" if args.baseline or not folders else folders[0]
        return folder / ("baseline.html" if args.baseline and len(folders) == 1 else "report.html")
    target = Path(args.output).expanduser()
    if not target.parent.is_dir():
        raise ResultsError(f"{target.parent}: there is no such folder. Create it first.")
    if target.is_dir():
        raise ResultsError(f"{target}: is a folder. --output takes a file.")
    inside = any(target.resolve().is_relative_to(folder.resolve()) for folder in folders)
    if inside and target.suffix in (".json", ".jsonl", ".zst"):
        raise ResultsError(f"{target}: would be read as evidence there. Write it to another folder.")
    return target
