"""`repro mute CELL --owner --until --reason`: a difference that somebody has taken on; without a CELL, the list."""

from __future__ import annotations

import argparse
from datetime import date, datetime, timezone

from repro_matrix.errors import ConfigError, ResultsError, nearest

EPILOG = """CELL: case/model-strategy, as the name of its document (repro list --json: key). Until its day an arm of it
that differs from its expectation does not make a run red: it is said in every summary. From then on the arm counts as
before, and the entry is an error of every run of that cell. What could not be measured is never muted.

The entries are in results/muted.yaml: a change of it is reviewed and committed as code is.

exit codes: 0; 2 no such cell or arm, a day that is over, or (listing) an entry whose day is over"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cell", nargs="?", metavar="CELL", help="case/model-strategy[-name=value...]")
    parser.add_argument("--arm", help="only this arm (default: all of the cell)")
    parser.add_argument("--owner", help="who has taken it on")
    parser.add_argument("--until", metavar="DAY", help="the last day on which it is silent: 2026-12-31")
    parser.add_argument("--reason", help="why; an issue's address")
    parser.add_argument("--remove", action="store_true", help="take the entry out again")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def main(args: argparse.Namespace) -> int:
    from repro_matrix.config import catalog as catalogues
    from repro_matrix.report.terminal import print_json, print_table
    from repro_matrix.results import quarantine as muted

    today = datetime.now(timezone.utc).date()
    given = [f"--{name}" for name in ("arm", "owner", "until", "reason", "remove") if getattr(args, name)]
    if args.cell is None and given:
        raise ConfigError(f"{', '.join(given)}: of which cell? repro mute CELL ... (`repro list --json`: key)")
    mutes = muted.read()
    if args.cell is None:
        expired = [mute for mute in mutes if mute.until < today]
        if args.json:
            print_json([{**mute.model_dump(mode="json"), "expired": mute in expired} for mute in mutes])
        elif not mutes:
            print("nothing is muted")
        else:
            state = {True: "EXPIRED", False: "silent"}
            rows = [[m.cell, m.arm or "all", state[m in expired], m.until, m.owner, m.reason] for m in mutes]
            print_table("", ["cell", "arm", "state", "until", "owner", "reason"], rows, narrow=("reason",))
        muted.check(mutes, catalogues.load())
        return 2 if expired else 0
    kept = [mute for mute in mutes if (mute.cell, mute.arm) != (args.cell, args.arm)]
    if args.remove:
        if len(kept) == len(mutes):
            raise ConfigError(f"{args.cell}: is not muted{nearest(args.cell, {mute.cell for mute in mutes})}")
    else:
        lacking = [f"--{name}" for name in ("owner", "until", "reason") if not getattr(args, name)]
        if lacking:
            raise ConfigError(f"{args.cell}: {', '.join(lacking)} missing: who, until which day, and why")
        new = muted.entry(args.cell, args.arm, args.owner, _day(args.until, today), args.reason)
        kept.append(new)
        muted.check([new], catalogues.load(), "repro mute")
    _write(muted.written(kept))
    if args.json:
        print_json([mute.model_dump(mode="json") for mute in kept])
    else:
        print(f"{muted.file()}: {len(kept)} {'entry' if len(kept) == 1 else 'entries'}; commit it with a review")
    return 0


def _day(text: str, today: date) -> date:
    from repro_matrix.results import quarantine as muted

    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--until {text}: a day, as 2026-12-31") from None
    if day < today:
        raise ConfigError(f"--until {text}: that day is over")
    if day > today + muted.LONGEST:
        raise ConfigError(f"--until {text}: at most {muted.LONGEST.days} days from today: {today + muted.LONGEST}")
    return day


def _write(text: str) -> None:
    from repro_matrix.results import quarantine as muted
    from repro_matrix.results.store import write_text

    try:
        muted.file().parent.mkdir(parents=True, exist_ok=True)
        write_text(muted.file(), text)
    except OSError as error:
        raise ResultsError(f"{muted.file()}: cannot be written: {error.strerror or error}") from None
