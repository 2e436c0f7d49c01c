"""`repro accept --reason ...`: take measured verdicts over as the expected ones, with their stored measurement.

The documents are copied into results/baseline and every case's table in results/expected is written from them. It is a
reviewed change: nothing but this verb writes expectations, and a run never judges itself by what it has just measured.
``--dry-run`` shows what would be written, and writes nothing.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from repro_matrix.cli import options as arguments
from repro_matrix.config import catalog as catalogues
from repro_matrix.config import project
from repro_matrix.config import selection as overrides
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.project import Project
from repro_matrix.config.schema import Case
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.grading.regrade import document_name, regrade
from repro_matrix.grading.signature import overbroad_signature
from repro_matrix.paths import ROOT
from repro_matrix.records.document import Document
from repro_matrix.report.terminal import print_json, print_notes, print_table
from repro_matrix.results import baseline, provenance, runs, summary
from repro_matrix.results import local as own_results
from repro_matrix.results.accept import Publication, publication
from repro_matrix.results.accept_checks import Refusal, inconsistencies, refusals
from repro_matrix.results.filters import chosen
from repro_matrix.results.store import Store, write_text
from repro_matrix.results.version_ranges import whole
from repro_matrix.text import counted


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    parser.add_argument("--reason", help="why these verdicts are now the expected ones")
    parser.add_argument("--dry-run", action="store_true", help="show what would change, and write nothing")
    parser.add_argument(
        "--from", dest="source", metavar="DIR", help="results folder (default: results/scratch: the last run)"
    )
    told = "also publish verdicts that may as well be a mistake (may be given for each)"
    parser.add_argument("--allow", action="append", default=[], choices=("SIGNATURE_MISMATCH", "FIX_BREAKS"), help=told)


def main(args: argparse.Namespace) -> int:
    selection = overrides.parse(args.overrides)
    settings = compose_run(selection.run)
    if not args.dry_run and not (args.reason or "").strip():
        raise ConfigError("accept: --reason says why these verdicts are now the expected ones (--dry-run shows them)")
    catalogue = catalogues.load()
    print_notes([f"left out: {text}" for text in catalogue.left_out])
    names = set(overrides.expand("case", selection.case, catalogue.cases))
    asked = args.source or settings.results
    source = runs.of(Path(asked).expanduser() if asked else own_results.scratch())
    if asked and not source.is_dir():
        raise ResultsError(f"{asked}: no such folder of results (`repro matrix` writes one)")
    own = project.current()
    shipped = set() if own.is_shipped else names - catalogue.own.get("case", {}).keys()
    names -= shipped
    # What is published is judged here and now, by the cases as they are, and beside what is published already.
    kept, measured = Store(own.baseline), Store(source)
    every = [d for d in measured.documents() if d["case"] in names | shipped and _usable(d)]
    print_notes(measured.damaged)
    every = chosen(every, selection)
    given = [d for d in every if d["case"] in names]
    if len(every) > len(given):
        told = f"{len(every) - len(given)} cells of cases that are shipped with repro-matrix"
        print_notes([f"left out {told}: what is expected of those is read-only here, and changed in a checkout of it"])
    if not any(whole(catalogue.cases[d["case"]], d) for d in given):
        raise ResultsError(f"{source}: holds no complete measurement of the selected cases; run `repro matrix` first")
    held = [d for d in kept.documents(cases=names) if _usable(d)]
    if kept.damaged:  # what is expected would be written without it
        raise ResultsError("\n  ".join(["what is published is damaged: restore it first", *kept.damaged]))
    judged = regrade([*held, *given], catalogue.cases)
    print_notes(judged.notes)
    stored = [d for d in judged.documents if _within(source, d)]
    held = [d for d in judged.documents if _within(own.baseline, d)]
    documents = [d for d in stored if whole(catalogue.cases[d["case"]], d)]
    refused = refusals(documents, args.allow)
    refused += _of_other_code(documents, catalogue, own)
    for document in documents:
        refused += [Refusal(document_name(document), "", f"edited: {why}") for why in inconsistencies(document)]
    if refused and not args.dry_run:
        raise ResultsError("\n  ".join([f"{source}: not published:", *_grouped(refused)]))
    for name in sorted({str(d["case"]) for d in documents}):
        _refuse(catalogue.cases[name], [d for d in (*held, *documents) if d["case"] == name])
    found = publication(catalogue.cases, held, documents, args.reason or "")
    if args.json:
        print_json({**asdict(found), "written": sorted(found.written), "tables": sorted(found.tables)})
    else:
        _show(found)
        if len(stored) > len(documents):
            print(f"left out {counted(len(stored) - len(documents), 'cell')} of which only some variants were measured")
    if refused:  # the plan is seen first: what would be new is the reason to measure once more
        raise ResultsError("\n  ".join([f"{source}: would not be published:", *_grouped(refused)]))
    if not args.dry_run:
        _publish(found, own, catalogue)
        if not args.json:
            print(f"review and commit: the documents in {own.baseline}, and the tables in {own.expected}")
    return 0


def _of_other_code(documents: Sequence[Document], catalogue: Catalogue, own: Project) -> list[Refusal]:
    """What was measured with another script or kit than the checkout holds that its measurement is published in."""
    root = own.folder if own.file else ROOT

    @functools.cache
    def why(commit: str, slug: str) -> str | None:
        paths = [catalogue.script(catalogue.cases[slug]), *provenance.shared_code(catalogue)]
        return provenance.since(commit, root, [path for path in paths if path.is_relative_to(root)])

    asked = [(d, why(d["provenance"]["git_commit"], d["case"])) for d in documents if d["provenance"]["git_commit"]]
    return [
        Refusal(document_name(document), "", f"measured with other code: {said}") for document, said in asked if said
    ]


def _show(found: Publication) -> None:
    rows = [[c.case, c.where, c.stack, c.variant, c.old or "(nothing)", c.new] for c in found.changes]
    if rows:
        print_table("what is expected", ["case", "cell", "stack", "variant", "until now", "from now on"], rows)
    for one, several, places in (
        ("to publish", "to publish", found.written),
        ("says what is published", "say what is published", found.same),
        ("backs nothing: left out", "back nothing: left out", found.nothing),
        ("lies between two releases that say the same", "lie between two releases that say the same", found.inner),
        (
            "was published and backs nothing now: to remove",
            "were published and back nothing now: to remove",
            found.dropped,
        ),
    ):
        if places:
            print(f"{counted(len(places), 'document')} {one if len(places) == 1 else several}")


def _publish(found: Publication, own: Project, catalogue: Catalogue) -> None:
    baseline.write(own.baseline, found.written, found.dropped)
    summary.write_baseline(own.baseline, catalogue.cases)
    own.expected.mkdir(parents=True, exist_ok=True)
    for slug, table in found.tables.items():
        path = own.expected / f"{slug}.yaml"
        if table is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_text(encoding="utf-8") != table:
            write_text(path, table)


SHOWN = 20  # reasons


def _grouped(refused: Sequence[Refusal]) -> list[str]:
    """A line for each reason; those that are said of one variant, or one cell, name it."""
    by_why: dict[str, list[Refusal]] = {}
    for one in refused:
        by_why.setdefault(one.why, []).append(one)
    told = []
    for why, found in by_why.items():
        cells, variants = list(dict.fromkeys(one.cell for one in found)), sum(bool(one.variant) for one in found)
        of = (
            f"{counted(variants, 'variant')} of {counted(len(cells), 'cell')}"
            if variants
            else counted(len(cells), "cell")
        )
        names = ", ".join(cells[:3]) + (", ..." if len(cells) > 3 else "")
        told.append(str(found[0]) if len(found) == 1 else f"{of}: {why} [{names}]")
    return told[:SHOWN] + ([f"and {counted(len(told) - SHOWN, 'more reason')}"] if len(told) > SHOWN else [])


def _refuse(case: Case, documents: list[Document]) -> None:
    """Raises ResultsError for a failure that cannot be published: never seen to reproduce, or a signature for
    anything."""
    if case.kind != "failure":
        return
    wide = overbroad_signature(case)
    if wide:
        raise ResultsError(f"{case.slug}: {wide}")
    attempts = [a for d in documents if "unfixed" in d["variants"] for a in d["variants"]["unfixed"]["attempts"]]
    if not any(attempt["outcome"]["outcome"] == "reproduced" for attempt in attempts):
        last = f"; last: {attempts[-1]['outcome']['reason']}" if attempts else ""
        raise ResultsError(
            f"{case.slug}: its unfixed variant "
            f"reproduced in none of {len(attempts)} attempts, here and in the baseline{last}"
        )


def _usable(document: Document) -> bool:
    """Complete, something was measured (infra is none), and on releases: a commit between two is no range's."""
    attempts = [attempt for variant in document["variants"].values() for attempt in variant["attempts"]]
    ran = any(attempt["outcome"]["outcome"] != "infra_error" for attempt in attempts)
    return document["complete"] and ran and "#" not in document["stack"]["name"]


def _within(folder: Path, document: Document) -> bool:
    return Path(document["path"]).is_relative_to(folder)
