"""Generate the documentation's reference pages from the code, and insert the parts of the README that pages repeat.

mkdocs calls ``on_files`` and ``on_page_markdown`` (mkdocs.yml, ``hooks``). Nothing is written into docs/: on GitHub,
there are short pages and links in these places.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pydantic import BaseModel


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the short reference pages by generated ones."""
    for path, text in {
        "reference/commands.md": commands(),
        "reference/case.md": keys("A case file", "conf/case/SLUG.yaml", case_models()),
        "reference/axes.md": keys("Models, strategies, stacks and hardware", "conf/", axis_models()),
        "reference/settings.md": settings(),
        "reference/failures.md": failures(),
    }.items():
        if short := files.get_file_from_path(path):
            files.remove(short)
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Replace ``<!-- README.md:NAME -->`` and the line below it by the part NAME of the README."""
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")

    def part(match: re.Match[str]) -> str:
        _, start, rest = readme.partition(f"<!-- --8<-- [start:{match[1]}] -->\n")
        text, end, _ = rest.partition(f"<!-- --8<-- [end:{match[1]}] -->")
        if not (start and end):
            raise PluginError(f"README.md has no part {match[1]}")
        return text

    return re.sub(r"^<!-- README\.md:([\w-]+) -->\n.*$", part, markdown, flags=re.M)


def commands() -> str:
    """Return a section per command, made from its ``--help``."""
    from repro_matrix.cli import main as cli

    parts = ["# Commands", "Generated from `repro COMMAND --help`."]
    for command in cli.COMMANDS:
        text = cli.help_of(command)
        parts.append(f"## repro {command}\n\n```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def case_models() -> list[type[BaseModel]]:
    from repro_matrix.config import schema

    return [model for model in reachable(schema.Case) if model.__name__ != "Expectation"]  # not in a case's file


def axis_models() -> list[type[BaseModel]]:
    from repro_matrix.config import schema

    axes = (schema.Model, schema.Strategy, schema.StackFile, schema.HardwareProfile)
    return list(dict.fromkeys(model for axis in axes for model in reachable(axis)))


def reachable(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return a model and those that its keys hold, each once."""
    models = [model]
    for current in models:
        pending = [field.annotation for field in current.model_fields.values()]
        while pending:
            kind = pending.pop(0)
            pending.extend(get_args(kind))
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in models:
                models.append(kind)
    return models


def keys(title: str, where: str, models: list[type[BaseModel]]) -> str:
    """Return a table of keys per model; a key's description is the comment beside its field."""
    parts = [f"# {title}", f"Keys of `{where}`, generated from the schema. Unknown keys are an error."]
    for model in models:
        rows = "\n".join(f"| `{name}` | {kind} | {default} | {text} |" for name, kind, default, text in fields(model))
        summary = inspect.cleandoc(vars(model).get("__doc__") or "")
        parts.append(
            f"## {model.__name__}\n\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}"
        )
    return "\n\n".join(parts) + "\n"


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and description of each key of a model, inherited keys included."""
    comments: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            comments |= field_comments(inspect.getsource(cls))
    for name, field in model.model_fields.items():
        if name == "expect":  # not in a case's file: read from results/expected
            continue
        value = field.get_default(call_default_factory=True)
        empty = "see there" if isinstance(value, BaseModel) else f"`{json.dumps(value, default=str)}`"
        default = "required" if field.is_required() else empty
        yield name, cell(type_text(field.annotation)), cell(default), cell(field.description or comments.get(name, ""))


def type_text(kind: Any) -> str:
    """Return a type as a reader of YAML says it: ``list of text``, ``"cpu" or null``, a link to a model."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{arg}`" for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin is Annotated:
        return type_text(args[0])
    if origin is list:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return f"mapping from {type_text(args[0])} to {type_text(args[1])}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}.get(kind, "anything")


def field_comments(source: str) -> dict[str, str]:
    """Return the comment of each field of a class: the one behind it, else the lines above it."""
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            behind = " ".join(line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]).strip()
            first = node.lineno - 1
            while lines[first - 1].lstrip().startswith("# "):
                first -= 1
            above = " ".join(line.lstrip()[2:] for line in lines[first : node.lineno - 1])
            comments[node.target.id] = behind or above
    return comments


def cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def failures() -> str:
    """Return a table of known failures: releases, fixes that work, and advice that does not help."""
    from repro_matrix.baseline.advice import advice
    from repro_matrix.config import catalog
    from repro_matrix.paths import BASELINE, RESULTS
    from repro_matrix.report.load import load_results

    cases = catalog.load().cases
    results = load_results([BASELINE])
    refuted: dict[str, list[str]] = {}
    for claim in results.claims:
        if claim.status == "refuted":
            refuted.setdefault(claim.case, []).append(f"{claim.text} ({claim.source or 'no source'})")
    def today(status: Any) -> bool:
        return status.state == "reproduces" and not status.releases.after

    def known(slug: str) -> tuple[str, ...]:
        found = advice(cases[slug], {})
        return found.helps if found else ()

    places = json.loads((RESULTS / "places.json").read_text(encoding="utf-8"))
    found = {status.case: status for status in results.headline.cases}
    current = {slug: status for slug, status in found.items() if slug in cases and today(status)}
    unreported = [slug for slug in current if cases[slug].unreported]
    parts = [
        "# Known failures",
        "Generated from the published results. `repro show CASE` has the evidence of each line. The place is the first "
        "difference that `repro compare` finds between the failure and a fix (`python -m bench.places`); its steps include "
        "those of a reference that the script trains first.",
        "## Not reported upstream",
        "These reproduce on the newest stack, and a search found no open report. `repro export CASE` writes the script and "
        "the text of an issue.\n\n"
        + "\n".join(f"- `{slug}`: {current[slug].title} (searched {cases[slug].unreported})" for slug in unreported),
    ]
    for title, shown in (
        ("Silent failures that reproduce", lambda status: status.silent and today(status)),
        ("Loud failures that reproduce", lambda status: not status.silent and today(status)),
        ("Failures that today's releases do not show", lambda status: status.releases.reproduces and not today(status)),
    ):
        lines = [
            f"| {cell(status.title)}<br>`{slug}` {', '.join(cases[slug].references[:2])} | {status.area} "
            f"| {cell(status.releases.reproduces or status.detail)} | {cell(', '.join(status.fixes or known(slug)))} "
            f"| {cell('<br>'.join(refuted.get(slug, [])))} | {cell(place(places.get(slug)))} |"
            for slug, status in found.items()
            if slug in cases and shown(status)
        ]
        table = (
            "| failure | area | reproduces in | fixes that work | refuted advice | place |\n|---|---|---|---|---|---|\n"
        )
        parts.append(f"## {title}\n\n{table}" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def place(stored: dict[str, Any] | None) -> str:
    """Return where a comparison found the failure, without what it adds in detail."""
    if not stored or stored["location"]["verdict"] != "differs":
        return ""
    return stored["sentence"].partition("; everything before agrees")[0]


def settings() -> str:
    """Return conf/config.yaml, whose comments describe each setting."""
    from repro_matrix.paths import CONF

    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    return f"# Run settings\n\nEvery key is an override: `repro matrix repeat=3 jobs=2`.\n\n```yaml\n{text}```\n"
