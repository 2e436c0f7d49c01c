"""`repro nightly RESULTS...`: compare a nightly run with the last passing one.

RESULTS: tonight's result folders (of the pinned stack, of the floating one, or of all shards); of a
folder of runs, e.g. results/scratch, the last run. Run this as the last step of a job; see
docs/guides/nightly.md. The run is added to DIR/nights.jsonl, and its lock files to DIR/locks.

If the lock of a stack differs from the one of the last passing run, `repro bisect` searches between
the two locks, for --bisect-time in all; probes are stored, so that the next run continues. Each
changed case gets a Markdown file in --issues, with a title line and a last line `change=DIGEST`;
`gh issue create` posts it. --acknowledged: a file with such lines of handled changes, e.g. the
texts of closed issues; these changes do not count.

exit codes: 1 a result changed, or is not the expected one, and is neither quarantined nor
acknowledged, or a quarantine entry has expired; else the exit code of the runs (--run-exit-code);
else 3 a run did not end or measured less than requested, a file cannot be read, or results of the
last passing run are missing
"""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone
from pathlib import Path

import click

from repro_matrix.baseline import quarantine
from repro_matrix.changes import nightly
from repro_matrix.changes.sides import join_sides, load_folder
from repro_matrix.cli import options
from repro_matrix.config import catalog
from repro_matrix.errors import ConfigError
from repro_matrix.report.formats import to_issue
from repro_matrix.report.page import write_report
from repro_matrix.report.terminal import print_notes, print_wrapped
from repro_matrix.results import runs
from repro_matrix.runner import session


def _run_id(text: str) -> str:
    if not text.strip() or "/" in text or text.startswith("."):
        raise click.BadParameter(
            f"{text!r} is not a valid id. Use a name without /, e.g. 2026-11-22."
        )
    return text


def _lock(text: str) -> tuple[str, Path]:
    stack, equals, path = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not STACK=FILE, e.g. newest=/cache/locks/newest.txt")
    return stack, Path(path)


@options.command
@click.argument("folders", nargs=-1, required=True, metavar="RESULTS...", help="tonight's results")
@click.option("--history", metavar="DIR", required=True, help="where the history of runs is stored")
@click.option(
    "--run-id",
    type=_run_id,
    metavar="ID",
    help="the id of this run (default: today's date, e.g. 2026-11-22)",
)
@click.option(
    "--run-exit-code",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="the worst exit code of the runs, where it says more than their results: a lost GPU, an"
    " interruption",
)
@click.option(
    "--lock",
    type=_lock,
    multiple=True,
    metavar="STACK=FILE",
    help="the lock file of a floating stack tonight",
)
@click.option(
    "--bisect-time",
    default="0s",
    metavar="TIME",
    help="time for all bisections, e.g. 30m (default: none)",
)
@click.option(
    "--issues", metavar="DIR", help="where to write issues (default: DIR/issues of --history)"
)
@click.option("--acknowledged", metavar="FILE", help="changes that are handled and do not count")
@click.option("--page", default="", metavar="URL", help="the address of tonight's report")
def main(args: options.Arguments) -> int:
    seconds = (
        0.0
        if args.bisect_time == "0s"
        else session.seconds_of("--bisect-time", args.bisect_time) or 0.0
    )
    today = datetime.now(timezone.utc).date()
    missing = [path for _, path in args.lock if not path.is_file()]
    if missing:
        raise ConfigError(f"--lock {missing[0]}: no such file")
    handled, entries = _digests(args.acknowledged), quarantine.read_quarantine()
    quarantine.check_quarantine(entries, catalog.load())
    folders = [runs.last_run(Path(folder).expanduser()) for folder in args.folders]
    history = Path(args.history).expanduser()
    side = join_sides(", ".join(map(str, folders)), map(load_folder, folders))
    print_notes(side.notes)
    run_id = args.run_id or str(today)
    night = nightly.Night(
        run_id, side, today, entries, args.run_exit_code, dict(args.lock), handled
    )
    report = nightly.finish_night(night, history)
    print_notes(report.notes)
    deadline = time.monotonic() + seconds
    target = Path(args.issues).expanduser() if args.issues else history / "issues" / run_id
    for case, changes in report.changed.items():
        reports = {}
        for each in changes:
            if text := nightly.bisect_change(each, history, run_id, deadline):
                reports[each.stack] = text
        title, text = to_issue(changes, run_id, args.page, reports)
        write_report(target / f"{case}.md", text)
        print(f"{title}: {target / case}.md")
    print_wrapped(*report.messages, f"exit code {report.exit_code}: {report.reason}")
    return report.exit_code


def _digests(file: str | None) -> set[str]:
    if not file:
        return set()
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--acknowledged {file}: cannot be read: {error}") from None
    return set(re.findall(r"\bchange=([0-9a-f]{12,})", text))
