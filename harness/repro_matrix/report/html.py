"""HTML from what view.py and page.py say. The templates escape everything; what comes out asks nobody for anything."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from repro_matrix.report.case import CaseView, facets, link
from repro_matrix.report.history import Strip
from repro_matrix.report.icons import MARKS, Mark
from repro_matrix.report.page_model import Page
from repro_matrix.report.ranks import numbered
from repro_matrix.report.sanitize import line
from repro_matrix.report.view import NAMED

# Cells of a case that stand in the file as they are: of few cases FIRST, of many fewer (not fewer than LEAST), so that
# the page opens at once. The others are packed.
FIRST, LEAST, TOGETHER = 12, 3, 150
PACK = 50  # bodies that are packed together, and unpacked when one of them is opened
MEANING = {
    "FIX_HOLDS": "the broken arm fires, this fix is clean",
    "FIX_BROKEN": "the same failure fires with the fix too",
    "FIX_UNMASKS": "the fix meets another failure",
    "FIX_HARMFUL": "the broken arm is clean, the fix fails",
    "NOT_FIRING": "the broken arm is clean here",
    "UPSTREAM_FIXED": "the broken arm is clean here, and a stored older measurement fired",
    "CHANGED": "the broken arm fails with another error than the known one",
    "FLAKY": "attempts disagree",
    "INCONCLUSIVE": "infrastructure, an unknown hang, or skipped: with the reason",
    "HEALTHY": "a control: it trains and agrees with a single process",
    "UNHEALTHY": "a control that does not",
    "fires": "of the broken arm: the known failure",
    "clean": "of the broken arm: every rank finished and passed the checks",
    "other_error": "of the broken arm: it fails, and not with the known failure",
    "skipped": "a declared need is not met, or nothing was launched: with the reason",
}


@lru_cache(maxsize=1)
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("repro_matrix.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["oneline"] = line
    made.globals.update(marks=MARKS, meaning=MEANING, link=link, numbered=numbered, named=NAMED)
    return made


@dataclass(frozen=True)
class Drawn:
    """A case's cells as they stand in the one file. ``first``: HTML of so many as a page may show; ``later``: JSON,
    what filters need of all but the LEAST, and what page.js draws their lines from; ``bodies``: packed, what is
    unpacked when a part is opened."""

    first: tuple[Markup, ...]
    later: str
    bodies: Mapping[str, str]  # name of a pack -> what is in it


def drawn(view: CaseView) -> Drawn:
    """``view``: with its cells."""
    parts: Any = environment().get_template("parts.html").module
    made: dict[str, Callable[[], Any]] = {cell.id: partial(parts.cell_body, cell) for cell in view.cells}
    if view.axes:
        made[f"r-{view.slug}"] = partial(parts.axes, view, _here)
    names = list(made)
    bodies: dict[str, str] = {}
    packs: dict[str, str] = {}
    for start in range(0, len(names), PACK):
        name = f"{view.slug}/{start // PACK}"
        packs |= dict.fromkeys(names[start : start + PACK], name)
        bodies[name] = _packed({key: str(made[key]()) for key in names[start : start + PACK]})
    first = tuple(parts.cell(cell, packs[cell.id]) for cell in view.cells[:FIRST])
    later = json.dumps(_later(view, packs), separators=(",", ":")) if view.count > LEAST else ""
    return Drawn(first, later, bodies)


def _later(view: CaseView, packs: Mapping[str, str]) -> dict[str, Any]:
    """Data, not HTML: of ten thousand cells their lines would be ten megabytes, which a browser reads in half a
    second. The order of a cell's values is page.js'."""
    seen: dict[Mark, int] = {}
    known: dict[str, int] = {}
    cells = [
        [cell.id, packs[cell.id], cell.model, cell.strategy, cell.stack, cell.hardware, cell.source, cell.also,
         cell.ranks, len(cell.odd), list(cell.states),
         [[seen.setdefault(m, len(seen)), [known.setdefault(a, len(known)) for a in arms]] for m, arms in cell.groups]]
        for cell in view.cells[LEAST:]
    ]  # fmt: skip
    marks = [[m.name, m.symbol, m.word, m.tone] for m in seen]
    return {"case": view.slug, "marks": marks, "arms": list(known), "cells": cells}


def one_file(page: Page, kept: Mapping[str, Drawn] | None = None) -> str:
    """The whole page as one file. ``kept``: how its cases are drawn, where that is known; the others have their
    cells."""
    parts: Any = environment().get_template("parts.html").module
    cases = {view.slug: (kept or {}).get(view.slug) or drawn(view) for view in page.cases}
    packs = {name: pack for one in cases.values() for name, pack in one.bodies.items()}
    at_pack = {f"r-{view.slug}": list(cases[view.slug].bodies)[-1] for view in page.cases if view.axes}
    sources = {
        f"s-{number}": str(parts.source(name, listed, _here))
        for number, (name, listed) in enumerate(page.ledger.items(), 1)
    }
    if sources:
        packs["claims"] = _packed(sources)
        at_pack |= dict.fromkeys(sources, "claims")
    first = max(LEAST, min(FIRST, TOGETHER // max(1, len(cases))))
    later = ",".join(cases[view.slug].later for view in page.cases if view.count > first)
    text = _made("page.html", page, page.title, _here, _gzipped(f"[{later}]") if later else "", packs, packs=at_pack,
                 drawn=cases, first=first)  # fmt: skip
    # Plain ASCII: of megabytes that hold one other character a browser makes as many that are twice as wide.
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _here(name: str) -> str:
    return f"#{name}"


def site(page: Page) -> dict[str, str]:
    """A static site: file name -> content. Each case has a page of its own, which needs no script to be read."""
    home = {cell.id: view.slug for view in page.cases for cell in view.cells}

    def address(here: str) -> Callable[[str], str]:
        def at(name: str) -> str:
            slug = home.get(name, name)
            anchor = f"#{name}" if name in home else ""
            return anchor if slug == here and anchor else f"{slug}.html{anchor}"

        return at

    pages = {"index.html": _made("index.html", page, page.title, address(""))}
    for view in page.cases:
        own = facets(view.cells)
        pages[f"{view.slug}.html"] = _made("case.html", page, view.slug, address(view.slug), view=view, facets=own,
                                           claims=page.claims(view.slug), over=_strips(page, view))  # fmt: skip
    return pages


def _strips(page: Page, view: CaseView) -> Sequence[Strip]:
    return page.over.by_case.get(view.slug, ()) if page.over else ()


def _made(
    template: str,
    page: Page,
    title: str,
    at: Callable[[str], str],
    later: str = "",
    packed: Mapping[str, str] | None = None,
    **more: Any,
) -> str:
    css, script, ended = _asset("page.css"), _asset("page.js"), _asset("ended.js")
    return environment().get_template(template).render(
        page=page, title=title, at=at, css=Markup(css), script=Markup(script), ended=Markup(ended),
        policy=_policy(css, script, ended), later=later, packed=packed or {}, **more,
    )  # fmt: skip


def _packed(bodies: Any) -> str:
    return _gzipped(json.dumps(bodies))


def _gzipped(text: str) -> str:
    """Cells say much alike: a twentieth of the bytes is left."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _asset(name: str) -> str:
    loader: Any = environment().loader
    source: str = loader.get_source(environment(), name)[0]
    return source


def _policy(css: str, *scripts: str) -> str:
    """Nothing is loaded, and no script runs but the page's own."""

    def allowed(*sources: str) -> str:
        digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    ours = f"style-src {allowed(css)}; script-src {allowed(*scripts)}"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"
