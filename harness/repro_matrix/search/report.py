"""Turn the results of searches into plain data with stable keys, and into Markdown."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from repro_matrix.config.catalog import load
from repro_matrix.config.schema import AdhocCase
from repro_matrix.environment import machine as machines
from repro_matrix.environment.profiles import settle_all
from repro_matrix.environment.stacks import version_differences
from repro_matrix.git import git_state
from repro_matrix.search.algorithms import Label, Trail, boundaries, labels_of
from repro_matrix.search.bisect import Search, Stage
from repro_matrix.search.prober import OTHER_SIZE, PASSED, Point, Prober
from repro_matrix.text import printable

Data = dict[str, Any]


def render_search(template: str, data: Data) -> str:
    """Return the Markdown of a result.

    Markup, mentions and control characters of other programs are made harmless.
    """
    import jinja2

    loader = jinja2.PackageLoader("repro_matrix.search")
    environment = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["cell"] = lambda value: (
        _inert(str(value)).replace("|", "\\|").replace("\n", " ")
    )
    environment.filters["text"] = _inert
    return printable(environment.get_template(f"{template}.md.j2").render(**data))


def _inert(value: str) -> str:
    return re.sub(r"([<@])", r"\\\1", value)


# -- bisections


def bisection(search: Search, command: str) -> Data:
    """Return the result of a bisection."""
    prober = search.prober
    culprits = search.culprits
    case = prober.case
    cell = prober.cell
    machine = machines.detect()
    profile = settle_all([cell.hardware], load().hardware, machine)[0]
    stages = [_stage_to_json(stage, search) for stage in search.stages]
    result = [f"{stage['sentence']}." for stage in stages]
    if culprits and not result:
        members = ", ".join(culprits.members or ())
        result = [f"Culprit: {members}." if members else "No package is the culprit by itself."]
    if prober.place:
        result.append(f"The numbers first differ here: {prober.place['sentence']}.")
    if search.stopped:
        result.append(f"The search was stopped ({search.stopped}); the same command continues it.")
    title = case.title
    if isinstance(case, AdhocCase):
        title += f" (the failure: {case.failure or 'any failure'})"
    points = list(prober.points.values())
    return {
        "case": case.slug,
        "references": case.references,
        "model": "" if isinstance(case, AdhocCase) else cell.model,
        "title": title,
        "strategy": cell.strategy,
        "variant": search.variant,
        "packages": vars(culprits) if culprits else None,
        "stages": stages,
        "notes": [*prober.notes, *search.notes],
        "command": command,
        "hardware": f"{profile.name} ({machine.cpu})",
        "commit": git_state()[0],
        "result": " ".join(result),
        "place": prober.place,
        "stopped": str(search.stopped) if search.stopped else None,
        "probes": len(points),
        "launched": sum(point.attempts > 0 for point in points),
    }


def _stage_to_json(stage: Stage, search: Search) -> Data:
    variant = search.variant
    prober = search.prober
    found = stage.found
    roles = found.roles

    def probe_to_json(point: Point) -> Data:
        answer = point.variants[variant]
        return {
            "name": point.target.name,
            "role": roles.side(answer).value,
            "answer": answer.label or str(answer),
            "attempts": answer.counted,
            "launched": point.attempts,
            "wall_s": round(point.wall_s, 1),
            "document": point.document,
        }

    changed = version_differences(found.good.versions, found.bad.versions)
    return {
        "kind": stage.kind,
        "what": stage.package,
        "candidates": len(found.targets),
        "title": stage.title,
        "yanked": list(stage.yanked),
        "exact": found.boundary.exact,
        "good": _end(found.good, variant, prober),
        "bad": _end(found.bad, variant, prober),
        "also_changed": {
            name: list(pair) for name, pair in changed.items() if name != stage.package
        },
        "unknown": [
            {"name": point.target.name, "reason": point.variants[variant].detail}
            for point in (found.points[at] for at in found.boundary.unknown)
        ],
        "unprobed": [found.targets[at].name for at in found.boundary.unprobed],
        "probes": list(map(probe_to_json, found.points.values())),
        "sentence": stage.sentence or _sentence(stage, variant, prober.place is not None),
        "good_means": None if roles.exact or roles.good == PASSED else roles.good,
    }


def _end(point: Point, variant: str, prober: Prober) -> Data:
    answer = point.variants[variant]
    target = point.target
    changes = {name: version for name, (_, version) in point.moved.items() if version}
    pinned = sorted(
        f"{name} @ {new}" if "://" in new else f"{name}=={new}" for name, new in changes.items()
    )
    return {
        "word": "another size" if str(answer.label).startswith(OTHER_SIZE) else "good",
        "name": target.name,
        "stack": target.spec,
        "answer": answer.label,
        "error_at": answer.error_at,
        "text": f"{answer.label}: {answer.detail}",
        "times": f"{answer.reproductions} of {answer.counted}",
        "document": point.document,
        "run": shlex.join(prober.command(target.spec, variant)),
        "install": shlex.join(["pip", "install", *pinned]) if pinned else None,
        "torchrun": _portable(answer.torchrun or ""),
    }


def _portable(line: str) -> str:
    """Return a command line without this machine's PATH and home."""
    line = re.sub(r"(?<![\w.])PATH=([^:\s]+):\S+", r'PATH=\1:"$PATH"', line)
    return line.replace(f"{os.path.expanduser('~')}/", '"$HOME"/')


def _sentence(stage: Stage, variant: str, numbers: bool) -> str:
    """Return the result in a line, with no more than was measured."""
    kind = stage.kind
    found = stage.found
    good = found.good.target.name
    bad = found.bad.target.name
    label = found.good.variants[variant].label or ""
    other = ""
    if not found.roles.exact and label != PASSED:
        other = f"fails differently: {label.partition(': ')[2] or label}"
    if not found.boundary.exact:
        between = len(found.boundary.unknown) + len(found.boundary.unprobed)
        return (
            f"the change lies between {good} ({other or 'good'}) and {bad} (bad); {between}"
            f" {kind}s between them are unknown"
        )
    if numbers:  # neither side is known to be right
        before, after = (good, bad) if stage.older_is_good else (bad, good)
        text = f"{after} is the {kind} that changed the numbers; {before} is the last one before it"
        return text if label == PASSED else f"{text}. {good} differs, too: {label}"
    if other:
        end = "first" if stage.older_is_good else "last"
        return f"{bad} is the {end} {kind} with this failure; {good} {other}"
    if stage.older_is_good:
        return f"{bad} is the first bad {kind}, {good} the last good one"
    return f"{good} is the first good {kind}, {bad} the last bad one"


# -- version maps


def version_map_to_json(
    prober: Prober,
    base: str,
    package: str,
    names: Sequence[str],
    trail: Trail[int, Mapping[str, Label]],
    points: Mapping[int, Point],
) -> Data:
    """Return the map of all variants.

    ``names``: the releases; ``points``: by the index of the release.
    """

    def describe(variant: str) -> Data:
        labels = labels_of(trail, variant)
        segments = []
        for label, group in groupby(
            (i for i in labels if labels[i] is not None), key=labels.__getitem__
        ):
            probed = list(group)
            segments.append(
                {
                    "first": names[probed[0]],
                    "last": names[probed[-1]],
                    "answer": label,
                    "probed": [names[i] for i in probed],
                    "releases": probed[-1] - probed[0] + 1,
                }
            )
        edges = [
            {
                "before": names[edge.before],
                "after": names[edge.after],
                "adjacent": edge.exact,
                "unknown": [names[i] for i in edge.unknown],
                "unprobed": [names[i] for i in edge.unprobed],
            }
            for edge in boundaries(labels)
        ]
        reasons = {i: points[i].variants[variant].detail for i in labels if labels[i] is None}
        unknown = [{"release": names[i], "reason": reason} for i, reason in reasons.items()]
        return {"segments": segments, "boundaries": edges, "unknown": unknown}

    return {
        "case": prober.case.slug,
        "model": prober.cell.model,
        "strategy": prober.cell.strategy,
        "package": package,
        "stack": base,
        "complete": trail.ended is None,
        "releases": list(names),
        "own_stack": prober.own_stack,
        "variants": {variant: describe(variant) for variant in prober.variants},
        "unprobed": [name for i, name in enumerate(names) if i not in points],
        "probes": [
            {
                "release": names[i],
                "document": point.document,
                "launched": point.attempts,
                "wall_s": round(point.wall_s, 2),
                "answers": {variant: answer.result for variant, answer in point.variants.items()},
            }
            for i, point in sorted(points.items())
        ],
    }
