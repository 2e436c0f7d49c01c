"""HTML from what view.py and page.py say. The templates escape everything; what comes out asks nobody for anything."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from repro_matrix.page.marks import MARKS
from repro_matrix.page.page import Page, facets, link
from repro_matrix.page.safe import line
from repro_matrix.page.view import numbered

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
        loader=PackageLoader("repro_matrix.page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["oneline"] = line
    made.globals.update(marks=MARKS, meaning=MEANING, link=link, numbered=numbered)
    return made


def one_file(page: Page) -> str:
    """The whole page as one file."""
    parts: Any = environment().get_template("parts.html").module

    def at(name: str) -> str:
        return f"#{name}"

    bodies: dict[str, Callable[[], Any]] = {cell.id: partial(parts.cell_body, cell) for cell in page.cells}
    bodies |= {f"r-{view.slug}": partial(parts.axes, view, at) for view in page.cases if view.axes}
    bodies |= {
        f"s-{number}": partial(parts.source, name, listed, at)
        for number, (name, listed) in enumerate(page.ledger.items(), 1)
    }
    packed: list[str] = []
    packs: dict[str, int] = {}
    for start in range(0, len(bodies), PACK):
        names = list(bodies)[start : start + PACK]
        packs |= dict.fromkeys(names, len(packed))
        packed.append(_packed({name: str(bodies[name]()) for name in names}))
    return _made("page.html", page, page.title, at, packed=packed, packs=packs)


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
        pages[f"{view.slug}.html"] = _made("case.html", page, view.slug, address(view.slug), view=view, facets=own)
    return pages


def _made(
    template: str, page: Page, title: str, at: Callable[[str], str], packed: Sequence[str] = (), **more: Any
) -> str:
    css, script = _asset("page.css"), _asset("page.js")
    return environment().get_template(template).render(
        page=page, title=title, at=at, css=Markup(css), script=Markup(script), policy=_policy(css, script),
        packed=packed, **more,
    )  # fmt: skip


def _packed(bodies: dict[str, str]) -> str:
    """Cells say much alike: a twentieth of the bytes is left."""
    return base64.b64encode(gzip.compress(json.dumps(bodies).encode(), 6, mtime=0)).decode()


def _asset(name: str) -> str:
    loader: Any = environment().loader
    source: str = loader.get_source(environment(), name)[0]
    return source


def _policy(css: str, script: str) -> str:
    """Nothing is loaded, and no script runs but the page's own."""
    allowed = {kind: base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for kind, source in
               (("style-src", css), ("script-src", script))}  # fmt: skip
    listed = "; ".join(f"{kind} 'sha256-{digest}'" for kind, digest in allowed.items())
    return f"default-src 'none'; {listed}; base-uri 'none'; form-action 'none'"
