"""`repro report [RESULTS...]`: what was measured, as one page, as a static site, or for other programs."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from repro_matrix.errors import ConfigError, ResultsError, nearest, unknown
from repro_matrix.results import runs
from repro_matrix.text import counted

if TYPE_CHECKING:
    from repro_matrix.analysis.history import NightlyRun
    from repro_matrix.config.catalog import Catalogue
    from repro_matrix.records.document import Document

FORMATS = ("html", "junit", "markdown", "json", "csv", "parquet")
AXES = ("case", "model", "strategy", "stack", "hardware")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 3 a document could not be read (the rest is told all the same), else 0"
    parser.add_argument(
        "overrides", nargs="*", metavar="RESULTS",
        help="results folders (default: results/scratch, the last run), several side by side; case=qwen15-* model= "
        "strategy= stack= hardware= show a part of them",
    )  # fmt: skip
    parser.add_argument("--baseline", action="store_true", help="the published results, alone or beside the others")
    told = "the history of nightly runs (nights.jsonl): the page shows what changed over them"
    parser.add_argument("--history", metavar="DIR", help=told)
    parser.add_argument("--format", choices=FORMATS, default="html", help="default: html, one file that needs no other")
    parser.add_argument("--output", metavar="PATH", help="where to write it; - is stdout (the default but for html)")
    parser.add_argument("--site", metavar="DIR", help="write a static site there: an index, and a page for each case")


def main(args: argparse.Namespace) -> int:
    from repro_matrix.config import catalog as catalogues
    from repro_matrix.config import project
    from repro_matrix.report import formats, tables
    from repro_matrix.report import html as render
    from repro_matrix.report.page_model import of_views, page
    from repro_matrix.report.read import Results, Views, read, views
    from repro_matrix.report.terminal import print_notes
    from repro_matrix.results import unshown

    gc.freeze()  # the small objects of many thousand cells are all kept: looking for garbage takes as long as reading
    gc.disable()
    words, results = args.overrides, project.current().results
    wanted = _selection([word for word in words if "=" in word])
    folders = [Path(word).expanduser() for word in words if "=" not in word] or (
        [] if args.baseline else [results / "scratch"]
    )
    folders = [runs.of(folder) for folder in folders]
    published = [folder for folder in project.published() if folder.is_dir()]
    folders += [folder for folder in published if args.baseline and folder not in folders]
    if args.site and (args.output or args.format != "html"):
        raise ConfigError("--site writes pages of its own: not together with --output or another --format")
    target = _target(args, folders, results)
    if args.format == "parquet":  # else it is found out when everything has been read
        tables.arrow()
        if target is None and sys.stdout.isatty():
            raise ConfigError("--format parquet is no text: --output PATH")
    catalogue = catalogues.load()
    for note in [*(f"left out: {text}" for text in catalogue.left_out), *unshown.dropped(catalogue)]:
        print(f"note: {note}", file=sys.stderr)
    as_page = args.format == "html" and not args.site  # from what is kept of each case, without its cells
    found: Results | Views = (views if as_page else read)(folders, catalogue, wanted)
    if not found.count and not found.unjudged:
        _nothing_found(args, folders, wanted, catalogue, found.notes)
    if args.format != "html":
        print_notes(found.notes)  # the page has them itself
    made = made_line(folders)
    text: str | bytes
    if isinstance(found, Views):
        view = of_views(
            found.views, title_of(folders), made, found.ledger, found.sources, found.notes,
            _nights(folders, args.history),
        )  # fmt: skip
        text = render.one_file(view, found.drawn)
    elif args.site:
        over = _nights(folders, args.history)
        view = page(
            found.cells, title_of(folders), made, catalogue.cases, found.ledger, found.sources, found.notes, over
        )
        _refuse_foreign(Path(args.site))
        pages = render.site(view)
        for name, content in pages.items():
            write(Path(args.site) / name, content)
        print(f"{len(pages)} pages: {Path(args.site) / 'index.html'}")
        return _ended(found.damaged)
    elif args.format == "json":
        told = [str(folder) for folder in folders]
        text = formats.as_json(found.cells, found.ledger, told, made, found.unjudged, found.notes, found.damaged)
    elif args.format == "csv":
        text = tables.as_csv(found.cells)
    elif args.format == "parquet":
        text = tables.as_parquet(found.cells)
    elif args.format == "junit":
        text = formats.as_junit(found.cells, found.unjudged, found.notes, [*found.damaged, *found.unfinished])
    else:
        text = formats.as_markdown(
            found.cells, title_of(folders), "", found.unjudged, found.unfinished, found.expired, found.damaged
        )  # fmt: skip
    if target is None:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            sys.stdout.write(text)
    else:
        write(target, text)
        print(target)
    return _ended(found.damaged)


def _ended(damaged: Sequence[str]) -> int:
    """The exit code."""
    from repro_matrix.results.exit_code import TOO_LITTLE

    if not damaged:
        return 0
    print(f"exit code {TOO_LITTLE}: {counted(len(damaged), 'document')} could not be read", file=sys.stderr)
    return TOO_LITTLE


def _nothing_found(
    args: argparse.Namespace,
    folders: list[Path],
    wanted: dict[str, list[str]],
    catalogue: Catalogue,
    notes: Sequence[str],
) -> None:
    """Raises ResultsError: nothing was chosen, or nothing is a result; a run that measured nothing has a page too."""
    from repro_matrix.report.read import views

    if wanted:
        words = " ".join(word for word in args.overrides if "=" in word)
        choices = {view.slug for view in views(folders, catalogue).views}
        hint = "".join(nearest(one, choices) for one in wanted.get("case", ()))
        raise ResultsError(f"{words} chooses none of the cells that are stored there{hint}")
    if args.output is None and not any(_is_results(folder) for folder in folders):
        named = ", ".join(map(str, folders))
        if notes:  # something is there, and none of it is believed
            more = f"; and {len(notes) - 1} more" if len(notes) > 1 else ""
            raise ResultsError(f"{named}: nothing in it can be shown: {notes[0]}{more}")
        raise ResultsError(f"{named}: no results in it; a folder of your choice: --output PATH")


def _nights(folders: list[Path], history: str | None) -> list[NightlyRun]:
    """Return the runs that the page shows over time: the history and these results, or three results and more."""
    from repro_matrix.analysis.history import load_runs
    from repro_matrix.report.terminal import print_notes

    if history is None and len(folders) < 3:  # two are beside each other on the page
        return []
    stored = [Path(history).expanduser()] if history else []
    runs, notes = load_runs([*stored, *folders])
    print_notes([note for note in notes if history and note.startswith(history)])  # the page has the others
    return runs


def _refuse_foreign(folder: Path) -> None:
    """Raises ResultsError: a folder that holds something else than a site of ours; its files would lie among ours."""
    if not folder.is_dir():
        return
    index = folder / "index.html"
    ours = index.is_file() and "repro-matrix" in index.read_text(encoding="utf-8", errors="replace")
    if any(folder.iterdir()) and not ours:
        raise ResultsError(f"{folder}: holds other files and no site of ours; --site takes a new or empty folder")


def _is_results(folder: Path) -> bool:
    """Whether a run has written there, also one that has not stored anything yet."""
    return (folder / ".lock").exists() or folder.name == "scratch" or runs.read(folder) is not None


def _selection(words: list[str]) -> dict[str, list[str]]:
    found = {}
    for word in words:
        axis, _, value = word.partition("=")
        if axis not in AXES:
            raise unknown("axis", axis, AXES)
        found[axis] = [part.strip() for part in value.split(",")]
    return found


def _target(args: argparse.Namespace, folders: list[Path], results: Path) -> Path | None:
    """None: stdout. Raises ResultsError: it would lie among the documents."""
    if args.output in ("-", "/dev/stdout") or (args.output is None and args.format != "html"):
        return None
    if args.output is None:
        own = results / "scratch" if args.baseline or not folders else folders[0]
        return own / ("baseline.html" if args.baseline and len(folders) == 1 else "report.html")
    target = Path(args.output).expanduser()
    if not target.parent.is_dir():
        raise ResultsError(f"{target.parent}: there is no such folder; --output makes none")
    if target.is_dir():
        raise ResultsError(f"{target}: is a folder; --output takes a file")
    inside = any(target.resolve().is_relative_to(folder.resolve()) for folder in folders)
    if target.suffix in (".json", ".jsonl") and inside:
        raise ResultsError(f"{target}: would be taken for a cell's document there; write it to another folder")
    return target


def title_of(folders: list[Path]) -> str:
    from repro_matrix.report.read import named

    names = named(folders)
    return "repro-matrix: " + (" beside ".join(names) if names != ["baseline"] else "what is known today")


def made_line(folders: list[Path]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    told = "Every statement comes from a launched process whose evidence is stored."
    return f"Made {when} UTC from {', '.join(folder.name or str(folder) for folder in folders)}. {told}"


def of_run(documents: list[Document], folder: Path) -> Path:
    """The page of a run that has just ended, from its documents in memory: they are judged. Raises ResultsError: it
    cannot be written."""
    from repro_matrix.config import catalog as catalogues
    from repro_matrix.report import html as render
    from repro_matrix.report import read
    from repro_matrix.report.page_model import of_views

    found = read.take(documents, folder, catalogues.load())
    view = of_views(found.views, title_of([folder]), made_line([folder]), found.ledger, (), found.notes)
    text = render.one_file(view, found.drawn)
    target = folder / "report.html"
    write(target, text)
    return target


def write(target: Path, text: str | bytes) -> None:
    """Raises ResultsError: it cannot be written."""
    from repro_matrix.results.store import write_bytes

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, text.encode() if isinstance(text, str) else text)
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written ({error.strerror or error})") from None
