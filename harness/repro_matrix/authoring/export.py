"""Export one variant of a case as a folder that runs without repro-matrix.

The folder has the script, its settings, the kit, and a README with the outcome to expect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from repro_matrix.baseline.advice import advice
from repro_matrix.config import project
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, ReproError
from repro_matrix.grading.expected import settings_difference
from repro_matrix.planning.plan import VariantPlan
from repro_matrix.records.attempt import Settings
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import StoredOutcome
from repro_matrix.results.store import Store
from repro_matrix.runner import session
from repro_matrix.runner.session import make_request

README, START = (Path(__file__).with_name(f"{name}.txt") for name in ("readme.md", "run.py"))
_MEANINGS = {
    "reproduced": "it fails as follows",
    "passed": "it works: every rank ends with its checks right",
    "hang": "it hangs; end it with Ctrl-C",
    "other_failure": "it fails, but not with the failure that is named above",
}


@dataclass(frozen=True)
class MeasuredVariant:
    """The attempts of a stored document's variant."""

    versions: Mapping[str, str]
    outcomes: list[StoredOutcome]

    @property
    def outcome(self) -> StoredOutcome:
        return self.outcomes[0]


@dataclass(frozen=True)
class Exported:
    files: Mapping[str, str]  # path in the folder -> text
    ranks: int
    stored: MeasuredVariant | None  # the outcome to expect
    skipped: str | None  # why it cannot run here
    stack: Stack | None  # None: it is not built here

    def write(self, folder: Path) -> None:
        """Write the files into a new folder."""
        folder.mkdir()
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def export_variant(
    slug: str, variant: str, overrides: Iterable[str] = (), stack: str | None = None
) -> Exported:
    """Export one variant. Raise ReproError if its versions are unknown."""
    request = make_request([f"case={slug}", *overrides])
    absent = None
    on_stack = request.with_values({"stack": stack}) if stack else request
    try:
        prepared = session.prepare(on_stack, build_stacks=False)
    except ReproError as error:
        if stack is None:
            raise
        prepared = session.prepare(request, build_stacks=False)
        absent = str(error)
    plan = prepared.plans[0]
    case = prepared.catalogue.cases[slug]
    planned = next(each for each in plan.variants if each.variant == variant)
    name = case.variants[variant].stack or stack or plan.cell.stack
    have = prepared.stacks.get(name)
    here = dict(have.versions) if have else {}
    documents: list[Document] = []
    for folder in project.published():
        documents += Store(folder).documents(history=True, cases=[slug])
    measured = _measured(documents, planned, name, here)
    stored = max(measured, key=lambda each: len(each.outcomes), default=None)
    versions = stored.versions if stored else here
    if not versions:
        stacks = ", ".join(sorted({document["stack"]["name"] for document in documents})) or "none"
        raise ConfigError(
            f"{absent or planned.skipped}; nor is {slug}/{variant} stored with it (stored stacks:"
            f" {stacks})."
        )
    settings = dict(planned.settings)
    if case.requires.gpus:  # also where there are no GPUs
        settings |= {"device": "cuda", "backend": "nccl"}
    settings["env"] = {**case.launch.env, **settings.get("env", {}), **case.variants[variant].env}
    built = have is not None and all(Path(path).exists() for path in (have.python, *have.path))
    skipped = absent or planned.skipped or (None if built else f"stack {name} is not built here")
    repros = prepared.catalogue.repros
    script = prepared.catalogue.script(case)
    copied = [*(repros / "repro_kit").glob("*.py")]
    if remote := settings["model"].get("remote_code"):
        copied += (repros / "remote_code" / remote).glob("*.*")
    files = {path.relative_to(repros).as_posix(): _text(path) for path in copied}
    files |= {
        "README.md": _readme(case, script.name, settings, versions, stored, skipped),
        "run.py": _text(START).replace("SCRIPT", script.stem, 1),
        "settings.json": json.dumps(settings, indent=2) + "\n",
        script.name: _text(script),
    }
    return Exported(files, settings["world_size"], stored, skipped, have if built else None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _measured(
    documents: Iterable[Document], variant: VariantPlan, stack: str, versions: Mapping[str, str]
) -> Iterator[MeasuredVariant]:
    """Find the attempts with these settings on this stack, or with these versions if given."""
    for document in documents:
        stored = document["variants"].get(variant.variant)
        have = document["stack"]["versions"]
        same = document["stack"]["name"] == stack
        if versions:
            same = all(have.get(name) == versions.get(name) for name in UPSTREAM)
        if not (same and stored and stored["attempts"]):
            continue
        device = {"device": "", "backend": ""}
        one = {**stored["settings"], **device}
        other = {**variant.settings, **device}
        if not settings_difference(cast(Settings, one), cast(Settings, other)):
            yield MeasuredVariant(have, [attempt["outcome"] for attempt in stored["attempts"]])


def _readme(
    case: Case,
    script: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    stored: MeasuredVariant | None,
    skipped: str | None,
) -> str:
    from jinja2 import Template

    outcomes = stored.outcomes if stored else []
    kinds = [outcome["outcome"] for outcome in outcomes]
    template = Template(_text(README), trim_blocks=True, lstrip_blocks=True)
    return (
        template.render(
            case=case,
            script=script,
            settings=settings,
            help=case.variants[settings["variant"]].help,
            advice=advice(case, versions),
            versions=[f"{name}=={versions[name]}" for name in UPSTREAM if name in versions],
            skipped=skipped,
            outcome=outcomes[0] if outcomes else None,
            meaning=_MEANINGS.get(kinds[0], kinds[0]) if kinds else "",
            equal=kinds.count(kinds[0]) if kinds else 0,
            count=len(kinds),
        )
        + "\n"
    )
