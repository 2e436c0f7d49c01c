"""`repro nightly RESULTS...`: what tonight answers otherwise than the last green night, and one issue for each case."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_matrix.cli import options as arguments
from repro_matrix.errors import ConfigError, ResultsError

if TYPE_CHECKING:
    from repro_matrix.analysis.brief import Brief
    from repro_matrix.analysis.issue_host import Issue
    from repro_matrix.analysis.night import Night
    from repro_matrix.analysis.regressions import Changed
    from repro_matrix.results.quarantine import Mute

EPILOG = """RESULTS: tonight's folders (the pinned stack's, the floating one's). After the runs, as the last step of a
job; docs/nightly.md has whole jobs to copy. Tonight is kept in NIGHTS/nights.jsonl, its lock in NIGHTS/locks.

Where an answer changed on a stack whose lock was kept that green night and tonight, `repro bisect` searches between the
two locks, for --budget in all; what it has no time for goes on the next night. Issues: with GITHUB_TOKEN and
GITHUB_REPOSITORY (GITHUB_API_URL) opened or updated, one for each case; the same texts always lie in --issues.

exit codes: 1 an answer changed that nobody has dealt with (muted it, or closed the issue of this very change); else the
exit code of the runs (--code); else 3 where a file cannot be read, or what a green night measured is not there tonight
and nothing says why"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("folders", nargs="+", metavar="RESULTS", help="tonight's results")
    add("--nights", metavar="DIR", required=True, help="where nights are kept")
    add("--name", metavar="NIGHT", help="tonight's name (default: today's date, written as 2026-11-22)")
    add("--code", type=arguments.number(0), required=True, metavar="N", help="the runs' exit code, the worst of them")
    add("--lock", action="append", default=[], metavar="STACK=FILE", help="the lock that a floating stack had tonight")
    add("--budget", default="0s", metavar="TIME", help="for bisections, in all: 30m (default: none)")
    add("--issues", metavar="DIR", help="where the texts lie (default: NIGHTS/issues)")
    add("--page", default="", metavar="URL", help="where tonight's page can be read")


def main(args: argparse.Namespace) -> int:
    from filelock import FileLock

    from repro_matrix.analysis import inputs as sides
    from repro_matrix.analysis import missing as gone
    from repro_matrix.analysis import regressions as tonight
    from repro_matrix.analysis.night import of_briefs
    from repro_matrix.report.issue import issue
    from repro_matrix.report.terminal import print_notes, print_wrapped
    from repro_matrix.results import history as kept
    from repro_matrix.results import quarantine as muted
    from repro_matrix.results import requested as words
    from repro_matrix.results.exit_code import TOO_LITTLE
    from repro_matrix.runner import session
    from repro_matrix.text import counted

    name = _name(args.name)
    folder = Path(args.nights).expanduser()
    seconds = 0.0 if args.budget == "0s" else session.seconds_of("--budget", args.budget) or 0.0
    locks = _locks(args.lock)
    found = [sides.read(Path(one).expanduser()) for one in args.folders]
    briefs = [brief for side in found for brief in side.briefs]
    print_notes([note for side in found for note in side.notes])
    if not briefs:
        raise ResultsError(f"{', '.join(args.folders)}: no results: nothing was measured, or nothing was uploaded")
    tonight.one_commit(briefs)
    today = datetime.now(timezone.utc).date()
    entries = muted.read()
    mutes = [mute for mute in entries if mute.until >= today]
    _make(folder)
    with FileLock(str(folder / ".lock")):
        own = of_briefs(name, briefs).started
        ledger = kept.ledger(folder, [])
        given, name = name, _free(name, own, ledger)
        if name != given:
            print_notes([f"a night {given} is kept, of other measurements: tonight is {name}, and that one stays"])
        _keep_locks(folder, name, locks)
        # It may be told once more, or days later, from what a runner had uploaded before it was lost.
        others = [night for night in ledger if night.name != name]
        ledger = [night for night in others if night.started <= own]
        compared = tonight.since_green(briefs, ledger, lambda key, arm: any(m.covers(key, arm) for m in mutes))
    unread = [note for side in found for note in side.unread]
    runs = [words.of(Path(one).expanduser(), side.briefs) for one, side in zip(args.folders, found)]
    missing = gone.gone(briefs, ledger, runs, unread)
    lost = [one for one in missing if not one.why]
    print_notes([*_odd_clock(own, others), *compared.notes, *gone.notes(one for one in missing if one.why)])
    search = Searches(folder, name, seconds)
    by_case: dict[str, list[Changed]] = {}
    for one in compared.changed:
        by_case.setdefault(one.case, []).append(one)
    made = [
        issue(listed, name, args.page, {(o.stack, o.green.name): text for o in listed if (text := search.of(o))})
        for listed in by_case.values()
    ]
    texts = Path(args.issues).expanduser() if args.issues else folder / "issues" / name
    dealt = _publish(made, texts)
    open_ = [one for one in made if one.case not in dealt]
    code = 1 if open_ else args.code or (TOO_LITTLE if unread or lost else 0)
    with FileLock(str(folder / ".lock")):
        kept.keep(folder, of_briefs(name, briefs, code))
    told = (
        f"{counted(len(open_), 'case')} changed since the last green night"
        if open_
        else "no answer changed that is not dealt with"
    )
    print(f"night {name}: {counted(len(briefs), 'cell')}; {told}; kept in {folder / kept.FILE}")
    print_wrapped(*_muted(mutes, briefs, compared.muted))
    print_notes([m.over() for m in entries if m not in mutes and m.cell in {brief.key for brief in briefs}])
    if lost:
        print_wrapped(gone.told(lost))
    little = [f"{counted(len(unread), 'file')} could not be read"] if unread else []
    little += [f"{gone.count(lost)} of a green night gone"] if lost else []
    why = "" if open_ or not code else ": that of the runs" if args.code else f": {'; '.join(little)}"
    print(f"exit code {code}{why}")
    return code


def _muted(mutes: Iterable[Mute], briefs: Sequence[Brief], changed: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """What somebody has taken on of what was measured tonight, and what it would have been red for."""
    for mute in mutes:
        own = [b for b in briefs if b.key == mute.cell]
        if any(arm.measured and mute.covers(b.key, name) for b in own for name, arm in b.arms.items()):
            told = [f"arm {arm}: {what}" for (key, arm), what in changed.items() if mute.covers(key, arm)]
            yield f"MUTED, known and owned (`repro mute`): {mute.told()} ({'; '.join(told) or 'it did not change'})"


def _free(name: str, started: float, nights: Sequence[Night]) -> str:
    """The name; ``NAME.2``, ``NAME.3`` ... where a night of that name began at another time. It would be replaced
    without having been compared: with a name that is always the same, no change was ever seen."""
    began = {night.name: night.started for night in nights}
    names = (name if number == 1 else f"{name}.{number}" for number in itertools.count(1))
    return next(each for each in names if began.get(each, started) == started)


def _odd_clock(started: float, others: Sequence[Night]) -> list[str]:
    """Tonight is compared with nights before it, so that it matters what its machine takes for now."""
    found = []
    if started > time.time() + 3600:
        found.append(f"tonight's results say that they were measured {_day(started)}, which is still to come")
    later = [night.name for night in others if night.started > started]
    if later:
        told = ", ".join(later[-3:]) + (f" and {len(later) - 3} more" if len(later) > 3 else "")
        why = "it is told late, or a clock was wrong"
        found.append(f"tonight was measured {_day(started)}, before {told}: not compared with these ({why})")
    return found


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _name(given: str | None) -> str:
    name = given or datetime.now(timezone.utc).strftime("%Y-%m-%d")
    if not name.strip() or "/" in name or name.startswith("."):
        raise ConfigError(f"--name {name}: a word without /, as 2026-11-22")
    return name


def _locks(given: Sequence[str]) -> dict[str, Path]:
    found = {}
    for text in given:
        stack, equals, path = text.partition("=")
        if not equals or not Path(path).is_file():
            raise ConfigError(f"--lock {text}: STACK=FILE, as newest=/cache/locks/newest.txt; there is no such file")
        found[stack] = Path(path)
    return found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written: {error.strerror or error}") from None


def lock_at(folder: Path, stack: str, night: str) -> Path:
    return folder / "locks" / f"{stack}-{night}.txt"


def _keep_locks(folder: Path, name: str, locks: dict[str, Path]) -> None:
    for stack, path in locks.items():
        target = lock_at(folder, stack, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


Run = Callable[[list[str], float], tuple[dict[str, Any] | None, str]]


class Searches:
    """Bisections between the green night's lock and tonight's, until their time is over. ``run`` is `repro bisect`."""

    def __init__(self, folder: Path, name: str, seconds: float, run: Run | None = None) -> None:
        self.folder, self.name = folder, name
        self.run = run or bisected
        self.until = time.monotonic() + seconds
        self.seconds = seconds

    def of(self, found: Changed) -> str | None:
        """The report, or why there is none; None where there is nothing to search: the stack does not float."""
        good, bad = (lock_at(self.folder, found.stack, night) for night in (found.green.name, self.name))
        told = [c for c in found.changes if c.kind not in ("flaky now", "steady now", "changed text")]
        if not bad.is_file() or not told:
            return None
        if not good.is_file():
            return f"no lock of {found.green.name} is kept: no search."
        if good.read_bytes() == bad.read_bytes():
            return "both nights had the same lock: it is not a release."
        words = ["bisect", found.case, "--good", str(good), "--bad", str(bad), "--arm", told[0].arm, "--find", "change"]
        words += [*told[0].axes, f"hardware={told[0].hardware}", f"results={self.folder / 'bisect'}"]
        left = self.until - time.monotonic()
        again = shlex.join(["repro", *words])
        if left <= 0:
            return f"no time was left for a search (--budget): `{again}`"
        print(f"searching for {left:.0f} s at most: {again}", file=sys.stderr, flush=True)
        data, why = self.run(words, left)
        return str(data["report"]) if data and data.get("report") else f"{why}; it goes on with `{again}`"


def bisected(words: list[str], seconds: float) -> tuple[dict[str, Any] | None, str]:
    """(what `repro bisect --json` says, or None and why). What is not over in time is stopped; probes are stored."""
    command = [sys.executable, "-m", "repro_matrix", *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
            return None, f"the search was not over after {seconds:.0f} s"
    try:
        return json.loads(out), ""
    except ValueError:
        return None, f"the search ended with exit code {process.returncode} and no report"


def _publish(made: Sequence[Issue], texts: Path) -> set[str]:
    """Every text to a file, and to the host where one is named; the cases that a person has dealt with."""
    from repro_matrix.analysis.issue_host import Host, HostError
    from repro_matrix.results.store import write_text

    dealt: set[str] = set()
    try:
        host = Host.of(os.environ) if made else None
    except HostError as error:
        host = None
        print(f"note: no issues: {error}", file=sys.stderr)
    for one in made:
        path = texts / f"{one.case}.md"
        try:
            texts.mkdir(parents=True, exist_ok=True)
            write_text(path, f"# {one.title}\n\n{one.body}\n")
        except OSError as error:
            raise ResultsError(f"{path}: cannot be written: {error.strerror or error}") from None
        print(f"{one.title}: {path}")
        if host is None:
            continue
        try:
            told, closed = host.publish(one)
            print(f"  issue {told}")
            dealt |= {one.case} if closed else set()
        except HostError as error:
            print(f"note: no issue of {one.case}: {error}; its text is {path}", file=sys.stderr)
    return dealt
