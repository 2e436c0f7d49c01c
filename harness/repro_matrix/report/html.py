"""Render the page: one self-contained file, or a static site with a page for each case.

Every text is made harmless (text.py) and escaped (autoescape) before it is written. The file needs no network
access: its policy allows nothing but its own style and script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from repro_matrix.report.labels import LABELS, label
from repro_matrix.report.page_model import Page, link
from repro_matrix.text import block, line, list_ranks

TEXT, BLOCK = 600, 2400  # characters of a text in a line, and of a block


def render_file(page: Page) -> str:
    """Return the whole page as one file."""
    return _render("page.html", page, page.title, lambda name: f"#{name}", page.cases)


def render_site(page: Page) -> dict[str, str]:
    """Return a static site: file name -> content."""
    home = {cell.id: case.slug for case in page.cases for cell in case.cells}

    def addresses(current: str) -> Callable[[str], str]:
        def address(name: str) -> str:
            slug = home.get(name, name)
            anchor = f"#{name}" if name in home else ""
            return anchor if slug == current and anchor else f"{slug}.html{anchor}"

        return address

    files = {"index.html": _render("page.html", page, page.title, addresses(""), ())}
    for case in page.cases:
        files[f"{case.slug}.html"] = _render("case.html", page, case.slug, addresses(case.slug), (case,))
    return files


def _render(template: str, page: Page, title: str, address: Callable[[str], str], cases: Iterable[Any]) -> str:
    environment = _environment()
    css, script = (_source(name) for name in ("page.css", "page.js"))
    return environment.get_template(template).render(
        page=page, title=title, at=address, cases=tuple(cases), css=Markup(css), script=Markup(script),
        policy=_policy(css, script),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("repro_matrix.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined, finalize=_harmless,
    )  # fmt: skip
    environment.globals |= {"labels": LABELS, "link": link}
    environment.filters |= {
        "label": label, "block": lambda text: Markup(escape(block(text, BLOCK))), "value": format_value,
        "ranks": list_ranks, "shell": shlex.join, "time": format_time,
    }  # fmt: skip
    return environment


def _harmless(value: Any) -> Any:
    """What every expression of a template goes through; markup has gone through it."""
    return line(value, TEXT) if type(value) is str else value


def format_value(value: Any) -> str:
    """Return a checked value as text: numbers with four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else "" if value is None else line(json.dumps(value, default=str), 80)


def format_time(seconds: float) -> str:
    """Return a moment in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC") if seconds else "unknown"


def _source(name: str) -> str:
    environment = _environment()
    assert environment.loader
    return environment.loader.get_source(environment, name)[0]


def _policy(css: str, script: str) -> str:
    """Return a content security policy: nothing is loaded, and only our own script runs."""
    style, code = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in (css, script))
    ours = f"style-src 'sha256-{style}'; script-src 'sha256-{code}'"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"
