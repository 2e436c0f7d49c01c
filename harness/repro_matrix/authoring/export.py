"""Export one variant of a case as a folder that runs without repro-matrix: script, settings, kit,
README."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from repro_matrix.config import project
from repro_matrix.config.schema import Case
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

Json = Mapping[str, Any]
PACKAGES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai")
_MEANS = {
    "reproduced": "it fails as follows",
    "passed": "it works: every rank ends with its checks right",
    "hang": "it hangs; end it with Ctrl-C",
    "other_failure": "it fails, but not with the failure that is named above",
}


START = '''"""Start the case under torchrun; README.md has the command.

Exit code 1: an error, or a failed check.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SETTINGS = json.loads((FOLDER / "settings.json").read_text(encoding="utf-8"))
RANKS = SETTINGS["world_size"]
if int(os.environ.get("WORLD_SIZE", "1")) != RANKS:
    sys.exit(f"This needs {RANKS} rank(s): torchrun --nproc-per-node {RANKS} run.py")
os.environ.update({"OMP_NUM_THREADS": "1", **SETTINGS["env"], **os.environ})

from SCRIPT import body  # noqa: E402 - after the environment
from repro_kit.run import execute  # noqa: E402


def checked(run):
    body(run)
    failed = [check["name"] for check in run.record.data["checks"] if not check["passed"]]
    if failed:
        sys.exit(f"failed checks: {', '.join(failed)}")


os._exit(execute(checked, SETTINGS))
'''


@dataclass(frozen=True)
class MeasuredVariant:
    """The attempts of one stored document's variant."""

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
    """Export one variant. Raises ReproError: its versions are unknown."""
    request, absent = make_request([f"case={slug}", *overrides]), None
    try:
        prepared = session.prepare(
            request.with_values({"stack": stack}) if stack else request, build_stacks=False
        )
    except ReproError as error:
        if stack is None:
            raise
        prepared, absent = (
            session.prepare(request, build_stacks=False),
            str(error),
        )  # for this environment
    plan = prepared.plans[0]
    case = prepared.catalogue.cases[slug]
    planned = next(each for each in plan.variants if each.variant == variant)
    stores = map(Store, project.published())
    documents = [
        document for store in stores for document in store.documents(history=True, cases=[slug])
    ]
    name = case.variants[variant].stack or stack or plan.cell.stack
    have = prepared.stacks.get(name)
    here = dict(have.versions) if have else {}
    stored = _measured(documents, planned, name, here)
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
    repros, script = prepared.catalogue.repros, prepared.catalogue.script(case)
    remote = settings["model"].get("remote_code")
    copied = [
        *(repros / "repro_kit").glob("*.py"),
        *((repros / "remote_code" / remote).glob("*.*") if remote else ()),
    ]
    files = {
        "README.md": (
            "\n".join(_readme(case, script.name, settings, versions, stored, skipped)) + "\n"
        ),
        "run.py": START.replace("SCRIPT", script.stem, 1),
        "settings.json": json.dumps(settings, indent=2) + "\n",
        script.name: script.read_text(encoding="utf-8"),
        **{
            path.relative_to(repros).as_posix(): path.read_text(encoding="utf-8") for path in copied
        },
    }
    return Exported(files, settings["world_size"], stored, skipped, have if built else None)


# -- what is stored of it


def _measured(
    documents: Iterable[Document], variant: VariantPlan, stack: str, versions: Mapping[str, str]
) -> MeasuredVariant | None:
    """Return the most attempts with these settings on this stack; if ``versions`` are given, with
    these releases."""
    found: list[MeasuredVariant] = []
    for document in documents:
        stored = document["variants"].get(variant.variant)
        have = document["stack"]["versions"]
        same = all(have.get(name) == versions.get(name) for name in PACKAGES)
        if (
            stored
            and stored["attempts"]
            and (same if versions else document["stack"]["name"] == stack)
        ):
            one, other = (
                {**each, "device": "", "backend": ""}
                for each in (stored["settings"], variant.settings)
            )
            if not settings_difference(cast(Settings, one), cast(Settings, other)):
                found.append(
                    MeasuredVariant(have, [attempt["outcome"] for attempt in stored["attempts"]])
                )
    return max(found, key=lambda each: len(each.outcomes), default=None)


# -- as text


def _readme(
    case: Case,
    script: str,
    settings: Json,
    versions: Mapping[str, str],
    stored: MeasuredVariant | None,
    skipped: str | None,
) -> Iterator[str]:
    ranks = settings["world_size"]
    where = "GPUs" if settings["device"] == "cuda" else "CPU, gloo"
    model, strategy = settings["model"], settings["strategy"]["title"]
    yield f"# {case.title}{' (simulated GPUs)' if case.simulated else ''}"
    yield f"\n    torchrun --nproc-per-node {ranks} run.py\n"
    yield "- Versions: " + " ".join(
        f"{name}=={versions[name]}" for name in PACKAGES if name in versions
    )
    yield (
        f"- Where: {ranks} rank(s), {where}; {model['title']} ({model['scale']}, random weights);"
        f" {strategy}"
    )
    yield (
        f"- Variant {settings['variant']}: {case.variants[settings['variant']].help}".removesuffix(
            ": "
        )
    )
    if skipped:
        yield f"- Not run where this was written: {skipped}"
    if case.references:
        yield f"- See: {', '.join(case.references)}"
    yield from ["", *_expected(stored)]
    yield (
        f"\nThe case is {script}; `# <-` marks its trigger. repro_kit builds the model and checks"
        " the result."
    )
    yield "Every rank prints its checks. Exit code 1: an error, or a failed check."


def _expected(stored: MeasuredVariant | None) -> list[str]:
    if stored is None:
        return ["No measurement with these versions is stored: the outcome to expect is unknown."]
    outcome, count = stored.outcome, len(stored.outcomes)
    equal = sum(each["outcome"] == outcome["outcome"] for each in stored.outcomes)
    means = _MEANS.get(outcome["outcome"], outcome["outcome"])
    lines = [f"Expected ({equal} of {count} stored attempts with these versions): {means}"]
    primary = outcome["primary"]
    if primary and primary["type"]:
        lines.append(f"\n    {primary['type']}: {primary['message'].partition(chr(10))[0][:300]}")
        if primary["location"]:
            lines.append(f"    raised in {primary['location']}")
    elif outcome["outcome"] != "passed":
        lines.append("\n    " + outcome["reason"][:300].replace("\n", " "))
    return lines
