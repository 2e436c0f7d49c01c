"""What a bisection found, as plain data and as Markdown that can be pasted into an issue."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

from repro_matrix.environment.stacks.spec import canonical, parse
from repro_matrix.search.bisect import Hunted, shown
from repro_matrix.search.labels import CLEAN, FIRES
from repro_matrix.search.prober import Point, Probing
from repro_matrix.text import printable

Data = dict[str, Any]
TEMPLATES = Path(__file__).parent / "templates"


def stage(kind: str, what: str, hunted: Hunted, prober: Probing, older_is_good: bool | None) -> Data:
    """One search: over releases or over commits."""
    arm = hunted.arm
    order = list(dict.fromkeys([len(hunted.targets) - 1, 0, *hunted.result.asked]))
    return {
        "kind": kind,
        "what": what,
        "candidates": len(hunted.targets),
        "from": hunted.targets[0].name,
        "to": hunted.targets[-1].name,
        "older_is_good": older_is_good,
        "found": hunted.result.boundary is not None,
        "exact": hunted.exact,
        "good": side(hunted.good, arm, prober),
        "bad": side(hunted.bad, arm, prober),
        "unknown": [{"name": p.target.name, "reason": p.arms[arm].detail} for p in hunted.unknown],
        "unprobed": [target.name for target in hunted.unprobed],
        "probes": [_probe(hunted.points[i], arm, hunted) for i in order if i in hunted.points],
        "sentence": sentence(kind, hunted, older_is_good),
        "good_means": None if hunted.roles.exact or hunted.roles.good in (CLEAN, FIRES) else hunted.roles.good,
    }


def side(point: Point, arm: str, prober: Probing) -> Data:
    answer = point.arms[arm]
    return {
        "name": point.target.name,
        "stack": point.target.spec,
        "answer": answer.label,
        "message": answer.detail,
        "error_at": answer.error_at,
        "times": f"{answer.fired} of {answer.counted}",
        "document": point.document,
        "said": said(answer.label, answer.detail),
        "moved": {name: list(change) for name, change in point.moved.items() if name not in _swapped(point)},
        "run": None if point.target.make else shlex.join(prober.words(point.target.spec, arm)),
        "install": install_line(point),
        "torchrun": _portable(point.torchrun.get(arm)),
    }


def _swapped(point: Point) -> set[str]:
    """What the probe replaced on purpose."""
    return {canonical(swap.name) for swap in parse(point.target.base or point.target.spec).swaps}


def said(label: str | None, detail: str) -> str:
    """Label and message, each once."""
    return f"{label}: {detail}" if label in (FIRES, CLEAN) else str(label or f"unknown: {detail}")


def _portable(line: str | None) -> str | None:
    """The stack's programs first, then the reader's own rather than those of this machine; and the reader's home."""
    if not line:
        return None
    line = re.sub(r"(?<![\w.])PATH=([^:\s]+):\S+", r'PATH=\1:"$PATH"', line)
    return line.replace(f"{os.path.expanduser('~')}/", '"$HOME"/')


def install_line(point: Point) -> str | None:
    """How the packages that a probe replaced are installed elsewhere; None where it replaced none."""
    pinned = sorted(f"{name}=={version}" for name, (_, version) in point.moved.items() if version)
    return shlex.join(["pip", "install", *pinned]) if pinned and not point.target.make else None


def _probe(point: Point, arm: str, hunted: Hunted) -> Data:
    answer = point.arms[arm]
    role = {"yes": "bad", "no": "good"}.get(str(hunted.roles.of(answer)), "unknown")
    return {
        "name": point.target.name,
        "role": role,
        "answer": shown(answer) if answer.label is None else answer.short,
        "error_at": answer.error_at,
        "attempts": answer.counted,
        "launched": point.attempts,
        "wall_s": round(point.wall_s, 1),
        "stack_s": round(point.stack_s, 1),
        "document": point.document,
    }


def sentence(kind: str, hunted: Hunted, older_is_good: bool | None) -> str:
    """The result in a line, with as much as was seen and no more."""
    good, bad = hunted.good.target.name, hunted.bad.target.name
    if hunted.result.boundary is None:
        return f"between {good} (good) and {bad} (bad): not searched"
    fires = hunted.roles.bad == FIRES
    if hunted.roles.exact:  # one answer turns into another: neither need be the better one
        before, after = (bad, good) if older_is_good is False else (good, bad)
        text = f"the answer changes with {after}; {before} is the last that answers as before"
    elif older_is_good is False:
        text = f"{good} is the first good {kind}, {bad} the last bad one"
        text += ": the failure no longer fires from there on" if fires else ""
    else:
        text = f"{bad} is the first bad {kind}, {good} the last good one"
    if hunted.exact:
        return text
    between = len(hunted.unknown) + len(hunted.unprobed)
    return f"the change lies between {good} (good) and {bad} (bad); {between} {kind}s between them could not be told"


def render(data: Data) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined, autoescape=False,
    )  # fmt: skip
    environment.filters["cell"] = lambda value: harmless(str(value)).replace("|", "\\|").replace("\n", " ")
    environment.filters["text"] = harmless
    return environment.get_template("bisect.md.j2").render(**_without_control(data))


def harmless(value: str) -> str:
    """Where the report is pasted an error's text is no HTML, and mentions nobody."""
    return re.sub(r"([<@])", r"\\\1", value)


def _without_control(value: Any) -> Any:
    """What no terminal obeys and no browser turns round: the texts come from what was launched."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {name: _without_control(each) for name, each in value.items()}
    return [_without_control(each) for each in value] if isinstance(value, (list, tuple)) else value
