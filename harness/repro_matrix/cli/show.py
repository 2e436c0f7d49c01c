"""`repro show CASE`: show its symptom, variants, fixes, claims, cause and releases."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from repro_matrix.baseline.advice import advice
from repro_matrix.baseline.claims import ledger
from repro_matrix.baseline.releases import STATES, releases_of
from repro_matrix.cli import options
from repro_matrix.config.schema import Case, Variant
from repro_matrix.config.selection import expand
from repro_matrix.environment import machine
from repro_matrix.environment.profiles import settle_all
from repro_matrix.environment.stacks import spec
from repro_matrix.errors import ConfigError
from repro_matrix.grading.expected import Situation, basis, depends_on_capabilities
from repro_matrix.launch.attempt import torchrun_line
from repro_matrix.paths import REPROS
from repro_matrix.planning import cells
from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.outcome import FAILING
from repro_matrix.report import terminal
from repro_matrix.report.page_model import symptom
from repro_matrix.report.terminal import print_json, print_notes, print_table, print_wrapped
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.runner import prerequisites
from repro_matrix.runner.prepared import Session
from repro_matrix.runner.session import Request, make_request
from repro_matrix.text import counted

OUTCOMES = {"reproduces": "reproduced", "other_failure": "other_failure", "absent": "passed"}
ROLES = (
    "Roles: a fix is documented to help; a non_fix is known not to help; a probe isolates a"
    " condition."
)
SYMPTOM = 230  # characters, so that the table below it stays in sight
AXES = ("model", "strategy", "stack", "world_size", "devices")


@options.command
@options.case
@click.argument(
    "overrides",
    nargs=-1,
    metavar="[VARIANT|OVERRIDE]...",
    help="variants, whose commands are shown; or overrides, such as model=llama-2-7b"
    " stack=torch2.2-tf4.39",
)
@options.flag("--commands", "show the command of each variant, to run it yourself")
@options.json
def main(args: options.Arguments) -> int:
    request, case = _select_case(args.case, args.overrides)
    print_notes(request.left_out)
    prepared, plan = _plan_first_cell(request, case)
    commands = args.commands or bool(prepared.settings.variants)
    predictions = (prediction for claim in case.claims for prediction in claim.predictions)
    rows = runs.rows_of_cases({case.slug, *(each.case for each in predictions if each.case)})
    variants = list(_variant_rows(prepared, plan, case, rows, commands or args.json))
    claims = ledger([case], rows)
    reproduced = (
        row for row in rows if row.case == case.slug and row.first and row.counts["reproduced"]
    )
    newest = max(
        reproduced,
        key=lambda row: (row.stack.name == plan.cell.stack, row.started),
        default=None,
    )
    sign = symptom(newest, case)
    script = request.catalogue.script(case)
    place = f"repros/{script.name}" if script.parent == REPROS else str(script)
    releases = releases_of(case).sentence
    if args.json:
        found = {"case": case.slug, **case.model_dump(mode="json", exclude={"slug", "claims"})}
        found |= {"symptom": sign, "releases": releases, "script": place, "variants": variants}
        print_json(found | {"claims": [asdict(claim) for claim in claims]})
        return 0
    print_wrapped(f"{case.slug}: {case.title}")
    if sign:
        print_wrapped(textwrap.shorten(f"Symptom: {sign}", SYMPTOM, placeholder=" ..."))
    stack = prepared.stacks.get(plan.cell.stack)
    title = _table_title(request, plan, case)
    _print_variants(title, case, variants, stack.versions if stack else {})
    for each in variants if commands else ():
        skipped = f" (skipped here: {each['skipped']})" if each["skipped"] else ""
        print(f"\n{each['variant']}{skipped}:\n  {each['torchrun']}")
    if claims:
        print_wrapped("", "Claims of the threads, and what stored measurements show")
        terminal.print_lines(terminal.claim_lines(claims, terminal.columns()))
    print_wrapped("", *_facts(case), f"script: {place}", "")
    about = {"SIMULATED": case.simulated, "Cause": case.summary, "Releases": releases}
    print_wrapped(*(f"{name}: {text}" for name, text in about.items() if text))
    print_wrapped(f"Run it: repro run {case.slug}, or manually: repro show {case.slug} --commands")
    return 0


def _select_case(name: str, words: Sequence[str]) -> tuple[Request, Case]:
    """Return the request for one case, by its name or an unambiguous part of it."""
    for again in (word for word in words if word.startswith("case=")):
        raise ConfigError(f"{again}: the case is given already: {name}")
    chosen = ",".join(word for word in words if "=" not in word)
    variants = [f"variants=[{chosen}]"] if chosen else []
    request = make_request([*(word for word in words if "=" in word), *variants])
    cases = request.catalogue.cases
    similar = [] if name in cases else [slug for slug in cases if name in slug]
    names = similar if similar[1:] else expand("case", [name], cases)
    if names[1:]:
        listed = [f"  {slug:<{max(map(len, names))}}  {cases[slug].title}" for slug in names]
        head = f"{name}: `repro show` takes one case. These match:"
        raise ConfigError("\n".join([head, *listed]))
    selections = [replace(each, case=names) for each in request.selections]
    return replace(request, selections=selections), cases[names[0]]


def _table_title(request: Request, plan: CellPlan, case: Case) -> str:
    if not case.expect:
        file = f"results/expected/{case.slug}.yaml"
        return f"Ways to run it. Nothing is expected yet: `repro accept` writes {file}."
    cell = f"{plan.cell.where} on {plan.profile.name} with stack {plan.cell.stack}"
    more = f" (one of {len(request.cells)} combinations; choose with model=, strategy=)"
    return f"Ways to run it: {cell}{more if request.cells[1:] else ''}"


def _print_variants(
    title: str, case: Case, variants: Sequence[Mapping[str, Any]], versions: Mapping[str, str]
) -> None:
    heads = ["variant", "what it changes", "role", "result", "help"]
    table = []
    for each in variants:
        changes = _changed_settings(case.variants[each["variant"]])
        table.append([each["variant"], changes, each["role"], _result(each), each["help"]])
    print_wrapped("")
    print_table(title, heads, table, narrow=(heads[1], heads[-1]))
    near = {release: None for v in variants if v["expected"] for release in v["nearest"]}
    if near:
        print_wrapped(
            f"Expected as in the nearest measurements: {', '.join(near)}. Where they disagree,"
            " the first is shown."
        )
    if case.kind == "failure":
        print_wrapped(ROLES)
        stopped = {v["variant"] for v in variants if v["last"].partition(" ")[0] in FAILING}
        if todo := " ".join(_what_to_do(case, versions, stopped)):
            print_wrapped("", f"What to do: {todo}")


def _expected_here(
    case: Case, plan: CellPlan, name: str, versions: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Return an expected verdict as a run on this machine reports it.

    The baseline shows where the failure was. The second value is the place of the measurement, if
    that is not this stack and hardware. For the unfixed variant the outcome is returned, which
    follows from the verdicts of the others.
    """
    if needed := depends_on_capabilities(case, name):
        return f"by {', '.join(needed)}", []  # known when ranks have run
    first, *others = case.variants
    if case.kind == "failure" and name == first:
        for other in others:
            verdict, near = _expected_here(case, plan, other, versions)
            if verdict in STATES:
                return OUTCOMES[STATES[verdict]], near
        return "", []
    known = basis(case, name, Situation(plan.cell.where, versions, plan.profile.kind))
    if known is None:
        return ("PASSED" if case.kind == "control" else ""), []
    near = list(known.releases)
    if known.on_cpu:
        near = [f"{each} on a CPU" for each in near or ["these releases"]]
    verdict = known.verdicts[0] if len(set(known.verdicts)) == 1 else ""
    if verdict == "NOT_REPRODUCED" and releases_of(case).reproduces:
        verdict = "FIXED_UPSTREAM"
    return verdict, near


def _last(rows: Iterable[Row], plan: CellPlan, name: str, stack: str) -> str:
    """Return the newest stored result of a variant of the cell, and its date."""
    place = plan.cell.key, plan.profile.kind, stack, name
    found = [
        row
        for row in rows
        if row.attempts and (row.cell_id, row.hardware.kind, row.stack.name, row.variant) == place
    ]
    if not found:
        return ""
    last = max(found, key=lambda row: row.started)
    return f"{last.verdict or last.outcome} {time.strftime('%Y-%m-%d', time.gmtime(last.started))}"


def _result(variant: Mapping[str, Any]) -> str:
    """Return the last measured verdict with what is expected, where that differs."""
    last, expected = str(variant["last"]), variant["expected"]
    if not expected or last.startswith(f"{expected} "):
        return last
    return f"{last} (expected {expected})" if last else f"expected {expected}"


def _what_to_do(case: Case, versions: Mapping[str, str], stopped: Collection[str]) -> Iterator[str]:
    """Yield what helps on these versions: how to apply the first fix, and the names of the others.

    ``stopped``: fixes that failed in the last run here.
    """
    found = advice(case, versions)
    if not found:
        return
    others = found.others
    if found.absent and others and case.slug not in others:
        yield (
            f"with these packages another known failure occurs, {', '.join(others)}: repro show"
            f" {others[0]}."
        )
        yield "Where this one does:"
    elif found.absent:
        yield "it does not reproduce with these packages (see Releases). Where it does, this helps:"
    helps = [name for name in found.helps if name not in stopped]
    if not helps:
        yield "no fix is known to work; see the variants above."
        return
    first, *more = helps
    yield f"{case.variants[first].help or _changed_settings(case.variants[first])} ({first})."
    if more:
        yield f"Also: {', '.join(more)}."
    yield f"As a folder for an issue: repro export {case.slug}"


def _plan_first_cell(request: Request, case: Case) -> tuple[Session, CellPlan]:
    """Plan the first selected cell with stacks that are here; nothing is built."""
    settings, here = request.settings, machine.detect()
    if settings.variants:
        settings.variants = expand("variant", settings.variants, case.variants)
    settled = settle_all(request.hardware, request.catalogue.hardware, here)
    placed, _ = cells.place(
        request.catalogue, request.cells[:1], settled, auto=request.hardware == ["auto"]
    )
    prepared = Session(request.catalogue, settings, settled, here)
    prepared.stacks["current"] = spec.existing("current", sys.executable)
    prerequisites.plan_cells(prepared, placed, build=False)
    return prepared, prepared.plans[0]


def _variant_rows(
    prepared: Session, plan: CellPlan, case: Case, rows: Sequence[Row], commands: bool
) -> Iterator[dict[str, Any]]:
    for variant in plan.variants:
        name, settings, strategy = variant.variant, variant.settings, variant.settings["strategy"]
        stack = prepared.stacks.get(variant.stack)
        expected, near = _expected_here(case, plan, name, stack.versions if stack else {})
        torchrun = ""
        if commands:
            from repro_matrix.runner.attempts import recipe  # a tenth of the time of `repro show`

            torchrun = torchrun_line(recipe(prepared.catalogue, variant, stack, Path("show")))
        yield {
            "variant": name,
            "role": case.variants[name].role,
            "help": case.variants[name].help,
            "flags": settings["flags"],
            "options": strategy["options"],
            "model": settings["model"]["slug"],
            "strategy": strategy["slug"],
            "stack": variant.stack,
            "world_size": variant.world_size,
            "skipped": variant.skipped,
            "expected": expected,
            "nearest": near,
            "last": _last(rows, plan, name, plan.cell.stack),
            "torchrun": torchrun,
        }


def _facts(case: Case) -> Iterator[str]:
    yield f"references: {', '.join(case.references) or 'none'}"
    needs = list(case.requires.packages)
    if case.requires.gpus:
        needs.append(counted(case.requires.gpus, "GPU"))
    if needs or case.requires.stack:
        yield (
            f"needs: {', '.join(needs) or 'nothing special'}; reproduces on:"
            f" {case.requires.stack or 'current'}"
        )
    ranks = "all ranks" if case.pass_criteria.ranks == "all" else "the first rank"
    yield (
        f"pass criteria: {case.pass_criteria.kind}: {', '.join(case.pass_criteria.checks)} on"
        f" {ranks}"
    )
    for one in case.signatures:
        detail = (
            one.message
            or one.check
            or one.signal
            or ", ".join(frame.function for frame in one.frames)
        )
        yield f"signature {one.name} ({one.kind}): {' '.join(filter(None, (one.type, detail)))}"


def _changed_settings(variant: Variant) -> str:
    values = {
        **variant.flags,
        **variant.options,
        **{axis: getattr(variant, axis) for axis in AXES},
        **variant.env,
    }
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
