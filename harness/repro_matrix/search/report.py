"""Results of searches as plain data, as Markdown to paste into an issue, and as lines for a terminal."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_matrix.config.catalog import load
from repro_matrix.environment import machine as machines
from repro_matrix.environment import profiles
from repro_matrix.environment.stacks.index import Release
from repro_matrix.environment.stacks.spec import canonical, parse
from repro_matrix.results import provenance
from repro_matrix.search.labels import PASSED, REPRODUCED
from repro_matrix.search.prober import Point, Prober
from repro_matrix.search.releases import Boundary, VersionMap
from repro_matrix.text import printable

if TYPE_CHECKING:
    from repro_matrix.search.bisect import BisectionResult, Search

Data = dict[str, Any]
TEMPLATES = Path(__file__).parent / "templates"


def bisection(search: Search, command: str) -> Data:
    """Return everything about a bisection, with stable keys."""
    prober = search.prober
    case, cell = prober.case, prober.cell
    machine = machines.detect()
    profile = profiles.settle_all([cell.hardware], load().hardware, machine)[0]
    packages = None
    if search.culprits is not None:
        packages = {key: getattr(search.culprits, key) for key in ("members", "unproven", "changed", "notes", "tried")}
    result = [f"{stage['sentence']}." for stage in search.stages]
    if packages and not result:
        members = packages["members"]
        result = [f"Culprit: {', '.join(members)}." if members else "No package is the culprit by itself."]
    if search.stopped:
        result.append(f"The search was stopped ({search.stopped}); the same command continues it.")
    failure = getattr(case, "failure", None)
    points = list(prober.points.values())
    return {
        "case": case.slug, "references": case.references, "model": cell.model if failure is None else "",
        "title": case.title if failure is None else f"{case.title} (the failure: {failure or 'any failure'})",
        "strategy": cell.strategy, "variant": search.variant, "find": search.find, "packages": packages,
        "stages": search.stages, "notes": [*prober.notes, *search.notes], "command": command,
        "hardware": f"{profile.name} ({machine.cpu})", "commit": provenance.git_state()[0], "result": " ".join(result),
        "stopped": str(search.stopped or "") or None, "probes": len(points),
        "launched": sum(point.attempts > 0 for point in points),
        "wall_s": round(sum(point.wall_s for point in points), 1),
    }  # fmt: skip


def stage(kind: str, what: str, found: BisectionResult, prober: Prober, older_is_good: bool | None) -> Data:
    """Return one search over releases or commits."""
    variant = found.variant
    order = list(dict.fromkeys([len(found.targets) - 1, 0, *found.result.asked]))
    roles = {"yes": "bad", "no": "good"}
    return {
        "kind": kind,
        "what": what,
        "candidates": len(found.targets),
        "title": None,
        "from": found.targets[0].name,
        "to": found.targets[-1].name,
        "older_is_good": older_is_good,
        "found": found.result.boundary is not None,
        "exact": found.exact,
        "good": _side(found.good, variant, prober),
        "bad": _side(found.bad, variant, prober),
        "unknown": [{"name": p.target.name, "reason": p.variants[variant].detail} for p in found.unknown],
        "unprobed": [target.name for target in found.unprobed],
        "probes": [
            {
                "name": point.target.name,
                "role": roles.get(str(found.roles.label(point.variants[variant])), "unknown"),
                "answer": str(point.variants[variant])
                if point.variants[variant].label is None
                else point.variants[variant].label,
                "error_at": point.variants[variant].error_at,
                "attempts": point.variants[variant].counted,
                "launched": point.attempts,
                "wall_s": round(point.wall_s, 1),
                "stack_s": round(point.stack_s, 1),
                "document": point.document,
            }
            for point in (found.points[i] for i in order if i in found.points)
        ],
        "sentence": sentence(kind, found, older_is_good),
        "good_means": None if found.roles.exact or found.roles.good in (PASSED, REPRODUCED) else found.roles.good,
    }


def _side(point: Point, variant: str, prober: Prober) -> Data:
    answer, target = point.variants[variant], point.target
    replaced = {canonical(swap.name) for swap in parse(target.base or target.spec).swaps}  # on purpose
    pinned = sorted(f"{name}=={version}" for name, (_, version) in point.moved.items() if version)
    text = f"{answer.label}: {answer.detail}" if answer.label else f"unknown: {answer.detail}"
    return {
        "name": target.name, "stack": target.spec, "answer": answer.label, "message": answer.detail, "text": text,
        "error_at": answer.error_at, "times": f"{answer.fired} of {answer.counted}", "document": point.document,
        "moved": {name: list(change) for name, change in point.moved.items() if name not in replaced},
        "run": None if target.make else shlex.join(prober.command(target.spec, variant)),
        "install": shlex.join(["pip", "install", *pinned]) if pinned and not target.make else None,
        "torchrun": _portable(point.torchrun.get(variant)),
    }  # fmt: skip


def _portable(line: str | None) -> str | None:
    """Return a command line without this machine's PATH and home."""
    if not line:
        return None
    line = re.sub(r"(?<![\w.])PATH=([^:\s]+):\S+", r'PATH=\1:"$PATH"', line)
    return line.replace(f"{os.path.expanduser('~')}/", '"$HOME"/')


def sentence(kind: str, found: BisectionResult, older_is_good: bool | None) -> str:
    """Return the result in a line, with no more than was measured."""
    good, bad = found.good.target.name, found.bad.target.name
    if found.result.boundary is None:
        return f"between {good} (good) and {bad} (bad): not searched"
    if not found.exact:
        between = len(found.unknown) + len(found.unprobed)
        return f"the change lies between {good} (good) and {bad} (bad); {between} {kind}s between them are unknown"
    if found.roles.exact:  # one answer turns into another: neither need be the better one
        before, after = (bad, good) if older_is_good is False else (good, bad)
        return f"the result changes with {after}; {before} is the last with the earlier result"
    if older_is_good is False:
        text = f"{good} is the first good {kind}, {bad} the last bad one"
        return text + (": the failure no longer occurs from there on" if found.roles.bad == REPRODUCED else "")
    return f"{bad} is the first bad {kind}, {good} the last good one"


def render(data: Data) -> str:
    """Return a bisection as Markdown."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined, autoescape=False,
    )  # fmt: skip
    environment.filters["cell"] = lambda value: _inert(str(value)).replace("|", "\\|").replace("\n", " ")
    environment.filters["text"] = _inert
    return environment.get_template("bisect.md.j2").render(**_printable(data))


def _inert(value: str) -> str:
    """Escape HTML and mentions: an error's text is foreign."""
    return re.sub(r"([<@])", r"\\\1", value)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {name: _printable(each) for name, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, (list, tuple)) else value


# -- version maps


def version_maps(
    prober: Prober, base: str, package: str, listed: Sequence[Release], found: Mapping[str, VersionMap],
    points: Mapping[int, Point],
) -> Data:  # fmt: skip
    """Return the maps of all variants, with stable keys."""
    names = [release.version for release in listed]

    def side(at: int, variant: str) -> Data:
        answer = points[at].variants[variant]
        return {"release": names[at], "answer": answer.label, "detail": answer.detail, "error_at": answer.error_at,
                "document": points[at].document}  # fmt: skip

    def edge(boundary: Boundary, variant: str) -> Data:
        sides = {"before": side(boundary.before, variant), "after": side(boundary.after, variant)}
        between = {"unknown": boundary.unknown, "unprobed": boundary.unprobed}
        return {**sides, "adjacent": boundary.exact, **{key: [names[i] for i in at] for key, at in between.items()}}

    variants = {
        variant: {
            "segments": [
                {"first": names[s.first], "last": names[s.last], "answer": s.label,
                 "probed": [names[i] for i in s.probed], "releases": s.last - s.first + 1}
                for s in drawn.segments
            ],
            "boundaries": [edge(boundary, variant) for boundary in drawn.boundaries],
            "unknown": [{"release": names[i], "reason": points[i].variants[variant].detail} for i in drawn.unknown],
        }
        for variant, drawn in found.items()
    }  # fmt: skip
    return {
        "case": prober.case.slug, "model": prober.cell.model, "strategy": prober.cell.strategy, "package": package,
        "stack": base, "releases": names, "variants": variants, "own_stack": prober.own_stack,
        "unprobed": [name for i, name in enumerate(names) if i not in points],
        "probes": [
            {"release": names[i], "stack": point.target.spec, "document": point.document, "launched": point.attempts,
             "wall_s": round(point.wall_s, 2), "stack_s": round(point.stack_s, 2),
             "answers": {variant: answer.label for variant, answer in point.variants.items()}}
            for i, point in sorted(points.items())
        ],
    }  # fmt: skip


def map_rows(data: Data) -> list[list[str]]:
    """Return a row per stretch of releases with one answer: variant, releases, probed, answer."""
    rows = []
    for variant, found in data["variants"].items():
        for at, part in enumerate(found["segments"]):
            span = part["first"] if part["first"] == part["last"] else f"{part['first']}–{part['last']}"
            probed = f"{len(part['probed'])} of {part['releases']}"
            rows.append(["" if at else variant, span, probed, part["answer"]])
        if not found["segments"]:
            reasons = dict.fromkeys(item["reason"] for item in found["unknown"])
            rows.append([variant, "", "", f"unknown: {'; '.join(reasons) or 'not probed'}"])
    return rows


def map_notes(data: Data) -> Iterator[str]:
    """Yield the changes that are not exact, then the unknown."""
    edges = [(variant, edge) for variant, found in data["variants"].items() for edge in found["boundaries"]]
    if edges and all(edge["adjacent"] for _, edge in edges):
        yield "Every change lies between two neighbouring releases, both probed."
    for variant, edge in edges:
        if not edge["adjacent"]:
            before, after = (f"{edge[side]['release']} ({edge[side]['answer']})" for side in ("before", "after"))
            words = {"unknown": "unknown", "unprobed": "not probed"}
            between = [f"{word}: {', '.join(edge[key])}" for key, word in words.items() if edge[key]]
            yield f"{variant}: changes between {before} and {after}; between them, {'; '.join(between)}"
    reasons: dict[str, dict[str, list[str]]] = {}
    shown = {variant: found for variant, found in data["variants"].items() if found["segments"]}
    for variant, found in shown.items():
        for item in found["unknown"]:
            reasons.setdefault(item["reason"], {}).setdefault(item["release"], []).append(variant)
    for reason, releases in reasons.items():
        names = [
            name if len(variants) == len(shown) else f"{name} ({', '.join(variants)})"
            for name, variants in releases.items()
        ]
        yield f"unknown: {', '.join(names)}: {reason}"
    for variant, stack in data["own_stack"].items():
        yield f"not in the map: {variant} runs on stack {stack}"
    if data["unprobed"]:
        yield f"not probed ({len(data['unprobed'])} of {len(data['releases'])}): {', '.join(data['unprobed'])}"
    launched = [probe for probe in data["probes"] if probe["launched"]]
    each = f", {sum(probe['wall_s'] for probe in launched) / len(launched):.1f} s each" if launched else ""
    yield f"{len(data['probes'])} of {len(data['releases'])} releases probed, {len(launched)} launched now{each}"
