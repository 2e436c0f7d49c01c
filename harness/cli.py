"""`repro`: argument parsing and exit codes. Verbs live in harness/verbs; each is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from harness.errors import ReproError, nearest

OVERRIDES = "Hydra overrides: case=qwen15-* model=a,b strategy=fsdp flags.call=root repeat=3 jobs=2 hardware=cpu ..."

# verb -> (module in harness/verbs, one line of help)
VERBS = {
    "list": ("list_cells", "the cells of a selection, and which of them cannot run here"),
    "show": ("show", "one case: arms, signatures, claims, the command that reproduces each arm by hand"),
    "run": ("run", "one case, all its arms, live"),
    "matrix": ("run", "every cell of a selection; the final table says what fires, with and without each fix"),
    "plan": ("plan", "memory of every cell, what does not fit, what runs when; also for hardware that is not here"),
    "versions": ("versions", "in which releases of a package each arm of a case fires, from measurement"),
    "bisect": ("bisect", "which release, package or commit changed the answer; ends with a report to paste"),
    "upgrade": ("upgrade", "what going from one stack to another changes: failures, their texts, their fixes"),
    "claims": ("claims", "the ledger: what the write-ups claim, and what measurement says"),
    "stack": ("stack", "software stacks: list, show, lock, build, prune"),
    "doctor": ("doctor", "what this machine can run, and why not the rest"),
    "gpu-proof": ("gpu_proof", "the first minutes on a GPU machine: what works here, as one folder to commit"),
    "accept": ("accept", "publish measured results as the baseline and as the cases' expectations"),
}


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="repro",
        description="Which known distributed-training failures fire on this stack, and do their fixes still work?",
        epilog="exit codes: 0 as expected; 1 something differs from its expectation; 2 usage or configuration; "
        "3 less could be measured than was asked for; 130 interrupted",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (_, text) in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        if verb == "stack":
            if wanted == verb:  # its own arguments, read from its module only when they are needed
                importlib.import_module("harness.verbs.stack").configure(sub)
            continue
        if wanted == verb and verb in ("versions", "bisect", "upgrade"):  # words of their own beside the overrides
            sub.epilog = importlib.import_module(f"harness.verbs.{verb}").EPILOG
            sub.formatter_class = argparse.RawDescriptionHelpFormatter
        if verb in ("show", "run", "versions", "bisect"):
            sub.add_argument("case", metavar="CASE", help="the case's slug (`repro list` shows them)")
        sub.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=OVERRIDES)
        sub.add_argument("--json", action="store_true", help="print JSON with stable keys instead of a table")
        if verb == "gpu-proof" and wanted == verb:
            importlib.import_module("harness.verbs.gpu_proof").configure(sub)
        if verb in ("run", "matrix"):
            if verb == "matrix":
                sub.add_argument("--all", action="store_true", help="a line for every arm of every cell")
            sub.add_argument("--resume", action="store_true", help="go on: what is recorded is not run again")
            sub.add_argument("--plan", action="store_true", help="show what would be launched, and launch nothing")
        if verb == "plan":
            sub.add_argument("--measured", action="store_true", help="each plan beside the recorded peak")
        if verb == "run":
            told = "for git bisect run: of the broken arm, 0 clean, 1 fires, 125 neither; 128 and more: an error"
            sub.add_argument("--bisect-exit", action="store_true", help=told)
        if verb == "accept":
            sub.add_argument("--reason", help="why these verdicts are now the expected ones")
            sub.add_argument("--plan", action="store_true", help="show what would change, and write nothing")
            sub.add_argument("--from", dest="source", metavar="DIR", help="results folder (default: results/scratch)")
            told = "also publish verdicts that may as well be a mistake (may be given for each)"
            sub.add_argument("--take", action="append", default=[], choices=("CHANGED", "FIX_HARMFUL"), help=told)
        if verb == "claims":
            sub.add_argument("--from", dest="source", metavar="DIR", help="read only this results folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        print(f"repro: unknown verb {arguments[0]!r}{nearest(arguments[0], VERBS)}", file=sys.stderr)
        return 2
    parser = build_parser(arguments[0] if arguments else None)
    args, late = parser.parse_known_args(arguments)
    if late:  # overrides that stand after an option: argparse takes a positional list in one piece only
        if any(word.startswith("-") for word in late) or not hasattr(args, "overrides"):
            parser.error(f"unrecognized arguments: {' '.join(late)}")
        args.overrides += late
    module, _ = VERBS[args.verb]
    try:
        return int(importlib.import_module(f"harness.verbs.{module}").main(args))
    except ReproError as error:
        print(f"repro: {error}", file=sys.stderr)
        # `git bisect run` takes 2 and 3 for "bad"; from 128 on it stops.
        return error.exit_code + (128 if getattr(args, "bisect_exit", False) else 0)
    except BrokenPipeError:  # `repro list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
