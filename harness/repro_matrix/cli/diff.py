"""`repro diff A B`: what the second measured otherwise than the first."""

from __future__ import annotations

import argparse
import fnmatch
import gc
import os
from collections.abc import Sequence
from dataclasses import replace

from repro_matrix.analysis import show_diff as show
from repro_matrix.analysis.brief import Brief
from repro_matrix.analysis.diff import Diff, compare
from repro_matrix.analysis.inputs import Side, side
from repro_matrix.config import selection as overrides
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.report.terminal import columns, print_json, print_lines, print_notes, print_wrapped
from repro_matrix.results.exit_code import TOO_LITTLE
from repro_matrix.text import counted

AXES = ("case", "model", "strategy", "stack", "hardware")
EPILOG = """A, B: a folder of results (of a run, a night, a machine; older ones in its history/ are left out), one
document, or the name of a stack of the baseline (torch2.2-tf4.39, current). Where each side has one stack or one
hardware and they differ, the comparison goes across them. case=, model=, strategy=, stack=, hardware= (globs)
compare only those.

exit codes: 0 the same answers; 1 an answer differs (a failure, a fix, a failure's text, flakiness); 3 none differs, and
something that A measured is not measured in B; 2 usage, no results, or no cell in common. Time, memory and what only B
measured are said, and change no exit code."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("one", metavar="A", help="what is compared with")
    parser.add_argument("other", metavar="B", help="what is compared")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="NAME=VALUE", help="compare only these: case='fsdp*' stack=current"
    )
    parser.add_argument("--all", action="store_true", help="every change, also of a kind that has many")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def main(args: argparse.Namespace) -> int:
    gc.freeze()  # the small objects of many thousand cells are all kept: looking for garbage takes as long as reading
    gc.disable()
    one, other = (selected(side(name), args.overrides) for name in (args.one, args.other))
    print_notes([*_in_both(one, other), *one.notes, *other.notes])
    if not any(arm.measured for each in (one, other) for brief in each.briefs for arm in brief.arms.values()):
        raise ConfigError(f"neither {args.one} nor {args.other} measured anything: there is no answer to compare")
    found = between(one, other)
    unread = len(one.unread) + len(other.unread)
    if args.json:
        code = found.exit_code or (TOO_LITTLE if unread else 0)
        print_json({"a": args.one, "b": args.other, **show.as_json(found), "unread": unread, "exit_code": code})
        return code
    print_wrapped(show.described(one.name, one.briefs), show.described(other.name, other.briefs))
    print_lines(show.lines(found, args.all, columns()))
    if unread and not found.exit_code:  # it may have said anything
        print(f"exit code {TOO_LITTLE}: the same answers, and {counted(unread, 'document')} that could not be read")
        return TOO_LITTLE
    print(ending(found))
    return found.exit_code


def _in_both(one: Side, other: Side) -> list[str]:
    """Documents that both sides hold, as a folder and one that lies in it do: of those nothing can differ."""
    found = [{os.path.abspath(brief.path) for brief in each.briefs if brief.path} for each in (one, other)]
    both = len(found[0] & found[1])
    if not both:
        return []
    told = "all" if both == len(found[1]) else f"{both} of the {len(found[1])}"
    return [f"{told} documents of {other.name} are documents of {one.name}, too: they are compared with themselves"]


def between(one: Side, other: Side) -> Diff:
    return compare(one.briefs, other.briefs, {**one.parts, **other.parts})


def ending(found: Diff) -> str:
    why = {0: "the same answers", 1: "answers differ", 3: "less is measured than before"}[found.exit_code]
    return f"exit code {found.exit_code}: {why}"


def selected(found: Side, texts: Sequence[str]) -> Side:
    """Only the cells that NAME=VALUE words name. Raises ConfigError: no such axis, or no cell left."""
    briefs = found.briefs
    for text in texts:
        name, equals, _ = text.partition("=")
        if not equals or name not in AXES:
            raise unknown("axis", name, AXES, f"{text!r}")
        wanted = _values(text, name)
        briefs = [b for b in briefs if any(fnmatch.fnmatchcase(_axis(b, name), pattern) for pattern in wanted)]
        if not briefs:
            known = {_axis(b, name) for b in found.briefs}
            raise ConfigError(f"{found.name}: none of its cells has {text} ({', '.join(sorted(known)[:8])})")
    return replace(found, briefs=briefs)


def _values(text: str, name: str) -> list[str]:
    found: list[str] = getattr(overrides.parse([text]), name) or []
    return found


def _axis(brief: Brief, name: str) -> str:
    return str(getattr(brief, name))
