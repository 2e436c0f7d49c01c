"""`repro upgrade --from LOCK --to LOCK`: which known failures an upgrade brings, takes away or changes."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro_matrix.analysis.upgrade import CAUSED_ELSEWHERE, MEANING, WORSE, Change, Compared, Unknown, compare, kind_of
from repro_matrix.cli import options as arguments
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, ReproError
from repro_matrix.external.scripts import options
from repro_matrix.records.document import Document
from repro_matrix.report.terminal import print_json, print_table
from repro_matrix.runner import session
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.request import Request, ask
from repro_matrix.search import culprits as blames
from repro_matrix.search.bisect import Hunt, Roles
from repro_matrix.search.prober import Prober, Stopped, Target
from repro_matrix.text import printable

WHY = ("all", "worse", "none")
EPILOG = (
    "and case=, model=, strategy=, flags.<name>=, arms=, repeat=, results=... as for `repro matrix`.\n\n"
    "What is stored for the two stacks is used, the rest is run. Exit code 1: a failure enters, a control breaks,\n"
    "a fix stops working or becomes needed; else 3: not every answer could be had; else 0."
)


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    parser.epilog = EPILOG
    add = parser.add_argument
    told = "the stack in use: a name, a lock, a requirements file, python:PATH"
    add("--from", dest="source", metavar="STACK", required=True, help=told)
    add("--to", dest="target", metavar="STACK", required=True, help="the stack to go to")
    told = "which changes to search the responsible package for (default: all)"
    add("--why", choices=WHY, default=WHY[0], help=told)
    add("--releases", action="store_true", help="search for the package's release, too")
    add("--budget", type=arguments.number(3), metavar="N", help="at most so many probes of each search for a release")
    add("--script", metavar="SCRIPT", help="a script of your own instead of the catalogue: ./train.py")
    options.add(parser)


def main(args: argparse.Namespace) -> int:
    _, texts = arguments.one_stack(args, {"stack": "the stacks are --from and --to"})
    args.case = args.script
    if args.script:
        return _of_script(args)
    if options.given(args):
        raise ConfigError(f"--{options.given(args)[0]} is for a script of your own: --script ./train.py")
    specs, why, asked = (args.source, args.target), args.why, ask(texts)
    one, other = (stacks.resolve(spec, say=_say) for spec in specs)
    if specs[0] == specs[1] or one.key == other.key:
        raise ConfigError(f"--from and --to are the same stack, {specs[0]}")
    stop = threading.Event()
    stopped: Stopped | None = None
    with workplace.interruptible(stop, _say):
        documents = _measure(asked, {specs[0]: one, specs[1]: other}, stop)
        found = compare(*([d for d in documents if d["stack"]["name"] == spec] for spec in specs))
        search = Causes(asked, specs, (one, other), stop, args.releases, args.budget)
        try:
            search.of([c for c in found.changes if why == "all" or (why == "worse" and c.kind in WORSE)], documents)
        except Stopped as error:
            stopped = error
    data = describe(specs, (one, other), found, search.found)
    data["stopped"] = str(stopped) if stopped else None
    print_json(data) if args.json else show(data)
    if stopped:
        _say(f"stopped: {stopped}. What was probed is stored; the same command goes on")
        return stopped.exit_code
    if any(change.kind in WORSE for change in found.changes):
        return 1
    return 3 if not (found.changes or found.same) or _infra(found) else 0


def _of_script(args: argparse.Namespace) -> int:
    """The script on both stacks; where it answers otherwise, through which package (and release)."""
    from repro_matrix.external.scripts import prober as probers
    from repro_matrix.external.scripts.endpoints import ends_of

    script, _, settings = options.script_of(args, search=True)
    source, target, notes = ends_of(args.source, args.target, script.results)
    specs, stop = (source, target), threading.Event()
    ends = stacks.resolve(source, say=_say), stacks.resolve(target, say=_say)
    if source == target or ends[0].key == ends[1].key:
        raise ConfigError(f"--from and --to are the same stack, {source}")
    how = settings.launcher.value
    prober = probers.ScriptProber(script, _say, stop, settings.repeat or 1, launcher=how)
    search = Causes(None, specs, ends, stop, args.releases, args.budget)
    with workplace.interruptible(stop, _say), prober:
        try:
            prober.learn(Target(source, source), Target(target, target))
            before, after = (prober.probe(Target(spec, spec)).arms[probers.ARM] for spec in specs)
            name, known = script.command.name, before.label is not None and after.label is not None
            kind = kind_of(before, after) if known else None
            changes = [Change(kind, name, name, probers.ARM, before, after)] if kind else []
            for change in changes if args.why == "all" or (args.why == "worse" and kind in WORSE) else ():
                search.found[change.key, change.arm] = search._cause(Hunt(prober, change.arm), change)
        except Stopped as error:
            _say(f"stopped: {error}. What was probed is stored; the same command goes on")
            return error.exit_code
    why = "; ".join(answer.detail for answer in (before, after) if answer.label is None)
    found = Compared(tuple(changes), () if known else (Unknown(name, probers.ARM, why),), int(known and not changes))
    data = {**describe(specs, ends, found, search.found), "stopped": None, "notes": [*notes, *prober.notes]}
    print_json(data) if args.json else show(data)
    return 3 if not known else 1 if kind in WORSE else 0


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _measure(asked: Request, given: Mapping[str, Stack], stop: threading.Event) -> list[Document]:
    from repro_matrix.report.progress import Progress

    prepared = session.prepare(asked.having({"stack": list(given)}), given=given)
    with Progress() as progress:
        summary = workplace.execute(prepared, progress.event, stop, resume=True, on_warning=progress.warn)
    if summary.problem:
        raise ReproError(summary.problem)
    if summary.interrupted:
        raise KeyboardInterrupt
    return summary.documents


@dataclass
class Causes:
    """The package (and the release) responsible for each change, or why it is not known."""

    asked: Request | None  # None: of a script
    specs: tuple[str, str]
    ends: tuple[Stack, Stack]
    stop: threading.Event
    with_releases: bool
    budget: int | None
    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # (cell, arm) -> cause

    def of(self, changes: Sequence[Change], documents: Sequence[Document]) -> None:
        of_cell = {document["key"]: document for document in documents}
        searched = [change for change in changes if change.kind not in CAUSED_ELSEWHERE]
        for key in dict.fromkeys(change.key for change in searched):
            of_key = [change for change in searched if change.key == key]
            arms = [change.arm for change in of_key]  # a probe measures every arm of the cell that is searched
            assert self.asked is not None
            selected = _only(of_cell[key], self.asked)
            with Prober(selected, _say, self.stop, arms=arms) as prober:
                for change in of_key:
                    _say(f"{key} {change.arm} {change.kind}: which package?")
                    self.found[key, change.arm] = self._cause(Hunt(prober, change.arm), change)

    def _cause(self, hunt: Hunt, change: Change) -> dict[str, Any]:
        exact = change.before.label == change.after.label  # the same failure in other words
        sides = [answer.whole if exact else answer.label for answer in (change.before, change.after)]
        roles = Roles(str(sides[0]), str(sides[1]), exact)
        for spec, role in zip(self.specs, ("no", "yes")):
            if roles.of(hunt.ask(Target(spec, spec)).arms[change.arm]) != role:
                return {"packages": None, "note": f"{spec} did not answer so again when it was asked alone"}
        found = blames.blame(hunt, roles, self.specs[0], *self.ends)
        out: dict[str, Any] = {
            "packages": list(found.members) if found.members is not None else None,
            "unproven": list(found.unproven),
            "note": "" if found.members else "; ".join(found.notes) or "no set of packages was seen to carry it",
            "tried": [list(item) for item in found.tried],
        }
        if self.with_releases:
            out["releases"] = {name: self._release(hunt, roles, found, name) for name in found.members or ()}
        return out

    def _release(self, hunt: Hunt, roles: Roles, found: blames.Blame, package: str) -> dict[str, Any]:
        hunted = blames.release_of(hunt, roles, self.specs[0], found, package, self.budget)
        if isinstance(hunted, str):
            return {"first": None, "last": None, "exact": False, "text": hunted}
        if hunted.stopped:
            raise hunted.stopped
        first, last = hunted.bad.target.name, hunted.good.target.name  # the first as in `to`, the last as in `from`
        lost = len(hunted.unknown) + len(hunted.unprobed)
        text = f"{first} (not yet {last})" if hunted.exact else f"between {last} and {first} ({lost} unknown)"
        return {"first": first, "last": last, "exact": hunted.exact, "text": text}


def _only(document: Document, asked: Request) -> Request:
    """Just this cell, with the run's other settings."""
    kept = asked.less(lambda key: key in ("case", "model", "strategy", "arms", "ranks") or key.startswith("flags."))
    axes: dict[str, Any] = {"case": document["case"], "model": document["model"], "strategy": document["strategy"]}
    if asked.selections[0].ranks:
        axes["ranks"] = document["ranks"]
    return kept.having({**axes, **{f"flags.{name}": value for name, value in document["flags"].items()}})


def _infra(found: Compared) -> bool:
    """Some answer is missing for another reason than a declared need."""
    return any(not each.declared for each in found.unknown)


def describe(
    specs: tuple[str, str],
    ends: tuple[Stack, Stack],
    found: Compared,
    causes: Mapping[tuple[str, str], Mapping[str, Any]],
) -> dict[str, Any]:
    changes = [
        {"change": c.kind, "case": c.case, "cell": c.key, "arm": c.arm, "before": c.before.whole,
         "after": c.after.whole, "error_at": [c.before.error_at, c.after.error_at], "documents": list(c.documents),
         "cause": causes.get((c.key, c.arm))}
        for c in found.changes
    ]  # fmt: skip
    counts: dict[str, int] = {}
    for change in found.changes:
        counts[change.kind] = counts.get(change.kind, 0) + 1
    return {
        "from": specs[0], "to": specs[1],
        "packages": {name: list(pair) for name, pair in blames.differences(*ends).items()},
        "changes": changes, "same": found.same, "counts": counts,
        "unknown": [{"cell": cell, "arm": arm, "reason": why} for cell, arm, why, _ in found.unknown],
    }  # fmt: skip


def show(data: Mapping[str, Any]) -> None:
    rows = [
        [c["change"], c["cell"], c["arm"], _because(c["cause"]), f"{c['before']}  =>  {c['after']}"]
        for c in data["changes"]
    ]
    print_table(f"{data['from']} -> {data['to']}", ["change", "cell", "arm", "through", "answers"], rows)
    for kind, count in data["counts"].items():
        print(f"{kind} ({count}): {MEANING[kind]}")
    reasons: dict[str, list[str]] = {}
    for item in data["unknown"]:
        reasons.setdefault(item["reason"], []).append(f"{item['cell']} {item['arm']}")
    for reason, where in reasons.items():
        print(f"unknown: {reason}: {', '.join(where[:4])}" + (f" and {len(where) - 4} more" if len(where) > 4 else ""))
    total = len(data["changes"])
    print(f"{total} arms answer otherwise, {data['same']} alike, {len(data['unknown'])} are not known on both stacks")


def _because(cause: Mapping[str, Any] | None) -> str:
    if cause is None:
        return ""
    if not cause["packages"]:
        return f"not found: {cause['note']}"
    found = cause.get("releases", {})
    return "; ".join(found[name]["text"] if name in found else name for name in cause["packages"])
