"""Export one variant of a case as a script that stands alone: header, settings, the case, then what it uses."""

from __future__ import annotations

import pprint
import re
import subprocess
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from repro_matrix.authoring.bundle import Bundle, bundle, with_stubs
from repro_matrix.config import project
from repro_matrix.config.schema import Case
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, ReproError
from repro_matrix.grading.expectations import settings_difference
from repro_matrix.planning.plan import VariantPlan
from repro_matrix.records.attempt import Settings
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import StoredOutcome
from repro_matrix.results.store import Store
from repro_matrix.runner import session
from repro_matrix.runner.session import ask

Json = Mapping[str, Any]
WIDTH = 110
PACKAGES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai")
_MEANS = {
    "reproduced": "it fails as follows",
    "passed": "it works: every rank ends with its checks right",
    "hang": "it hangs; end it with Ctrl-C",
    "other_failure": "it fails, but not with the failure that is named above",
}


@dataclass(frozen=True)
class Measured:
    """The attempts of one stored document's variant."""

    versions: Mapping[str, str]
    outcomes: list[StoredOutcome]

    @property
    def outcome(self) -> StoredOutcome:
        return self.outcomes[0]

    @property
    def fails_by_itself(self) -> bool:
        """Whether the failure shows without a check of the script: an error, a warning, a hang, a crash."""
        kinds = {item["kind"] for item in self.outcome["recognized"]}
        primary = self.outcome["primary"]
        raised = self.outcome["outcome"] in ("other_failure", "hang") or bool(primary and primary["type"])
        return raised or bool(kinds & {"exception", "log", "hang", "signal"})


@dataclass(frozen=True)
class Exported:
    text: str
    ranks: int
    stored: Measured | None  # the outcome to expect
    skipped: str | None  # why it cannot run here
    stack: Stack | None  # None: it is not built here


def export_variant(slug: str, variant: str, overrides: Iterable[str] = (), stack: str | None = None) -> Exported:
    """Export one variant. Raises ReproError: its versions are unknown, or the script cannot stand alone."""
    request, absent = ask([f"case={slug}", *overrides]), None
    try:
        prepared = session.prepare(request.with_values({"stack": stack}) if stack else request, build_stacks=False)
    except ReproError as error:
        if stack is None:
            raise
        prepared, absent = session.prepare(request, build_stacks=False), str(error)  # for this environment
    plan = prepared.plans[0]
    case = prepared.catalogue.cases[slug]
    planned = next(each for each in plan.variants if each.variant == variant)
    stores = map(Store, project.published())
    documents = [document for store in stores for document in store.documents(history=True, cases=[slug])]
    name = case.variants[variant].stack or stack or plan.cell.stack
    have = prepared.stacks.get(name)
    here = dict(have.versions) if have else {}
    stored = _measured(documents, planned, name, here)
    versions = stored.versions if stored else here
    if not versions:
        stacks = ", ".join(sorted({document["stack"]["name"] for document in documents})) or "none"
        raise ConfigError(
            f"{absent or planned.skipped}; nor is {slug}/{variant} stored with it (stored stacks: {stacks})."
        )
    settings = dict(planned.settings)
    if case.requires.gpus:  # also where there are no GPUs
        settings |= {"device": "cuda", "backend": "nccl"}
    checks = stored is None or not stored.fails_by_itself
    repros, script = prepared.catalogue.repros, prepared.catalogue.script(case)
    kit = {f"repro_kit.{path.stem}": path.read_text(encoding="utf-8") for path in (repros / "repro_kit").glob("*.py")}
    code = script.read_text(encoding="utf-8")
    values = run_values(settings, checks)
    made = bundle(code, with_stubs(kit, checks), values, f"{slug} ({script.name})", checks)
    remote = settings["model"].get("remote_code")
    files = _model_files(repros / "remote_code", remote, "published" in code) if remote else {}
    env = {**case.launch.env, **settings.get("env", {}), **case.variants[variant].env}
    built = have is not None and all(Path(path).exists() for path in (have.python, *have.path))
    skipped = absent or planned.skipped or (None if built else f"stack {name} is not built here")
    header = header_lines(case, settings, versions, stored, checks, skipped)
    text = render(header, values, env, made, files)
    return Exported(text, settings["world_size"], stored, skipped, have if built else None)


def _model_files(folder: Path, name: str, published: bool) -> dict[str, str]:
    """Return a model's own code, by its path under ``folder``; ``published``: with the published overrides."""
    files = [path for path in sorted((folder / name).iterdir()) if path.suffix in (".py", ".json")]
    used = [path for path in files if published or not path.stem.endswith("_published")]
    return {f"{name}/{path.name}": path.read_text(encoding="utf-8") for path in used}


# -- what is stored of it


def _measured(
    documents: Iterable[Document], variant: VariantPlan, stack: str, versions: Mapping[str, str]
) -> Measured | None:
    """Return the most attempts with these settings on this stack; if ``versions`` are given, with these releases."""
    found: list[Measured] = []
    for document in documents:
        stored = document["variants"].get(variant.variant)
        have = document["stack"]["versions"]
        same = all(have.get(name) == versions.get(name) for name in PACKAGES)
        if stored and stored["attempts"] and (same if versions else document["stack"]["name"] == stack):
            one, other = ({**each, "device": "", "backend": ""} for each in (stored["settings"], variant.settings))
            if not settings_difference(cast(Settings, one), cast(Settings, other)):
                found.append(Measured(have, [attempt["outcome"] for attempt in stored["attempts"]]))
    return max(found, key=lambda each: len(each.outcomes), default=None)


# -- as text


def run_values(settings: Json, checks: bool) -> dict[str, Any]:
    """Return the attributes of `run` that a variant's settings give."""
    known = {key: settings[key] for key in ("case", "variant", "flags", "model", "strategy", "world_size", "tp_size",
             "devices", "seed", "steps", "backend", "process_group", "normal_exit")}  # fmt: skip
    options = settings["strategy"].get("options") or {}
    values = {**known, "options": options, "device_kind": settings["device"], "checks": checks}
    return {**values, "settings": dict(settings)}


def header_lines(
    case: Case, settings: Json, versions: Mapping[str, str], stored: Measured | None, checks: bool, skipped: str | None
) -> list[str]:
    """Return the lines of the docstring. ``checks``: it checks its result; ``skipped``: why it cannot run here."""
    ranks = settings["world_size"]
    where = "GPUs" if settings["device"] == "cuda" else "CPU, gloo"
    model, strategy = settings["model"], settings["strategy"]["title"]
    lines = [
        f"{case.title}{' (simulated GPUs)' if case.simulated else ''}",
        "",
        f"    torchrun --nproc-per-node {ranks} this_file.py",
        "",
        "Versions: " + " ".join(f"{name}=={versions[name]}" for name in PACKAGES if name in versions),
        f"Where: {ranks} rank(s), {where}; {model['title']} ({model['scale']}, random weights); {strategy}",
        f"Variant {settings['variant']}: {case.variants[settings['variant']].help}".removesuffix(": "),
    ]
    if skipped:
        lines.append(f"Not run where this was written: {skipped}")
    lines += ["", *_expected(stored)]
    if not checks:
        lines.append("(If it ends without an error, the failure does not occur. It does not check its numbers.)")
    if case.references:
        lines.append(f"See: {', '.join(case.references)}")
    wrapped: list[str] = []
    for line in lines:
        indent = "      " if line.startswith("    ") else ""
        wrapped += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return wrapped


def _expected(stored: Measured | None) -> list[str]:
    if stored is None:
        return ["No measurement with these versions is stored: the outcome to expect is unknown."]
    outcome, count = stored.outcome, len(stored.outcomes)
    equal = sum(each["outcome"] == outcome["outcome"] for each in stored.outcomes)
    means = _MEANS.get(outcome["outcome"], outcome["outcome"])
    lines = [f"Expected ({equal} of {count} stored attempts with these versions): {means}"]
    primary = outcome["primary"]
    if primary and primary["type"]:
        lines.append(f"    {primary['type']}: {primary['message'].partition(chr(10))[0][:300]}")
        if primary["location"]:
            lines.append(f"    raised in {primary['location']}")
    elif outcome["outcome"] != "passed":
        lines.append(f"    {outcome['reason'][:300]}".replace("\n", " "))
    return lines


def render(
    header: Sequence[str], values: Json, env: Mapping[str, str], bundle: Bundle, files: Mapping[str, str]
) -> str:
    """Return one Python file. ``header``: its docstring's lines; ``values``: of ``run_values``;
    ``files``: the model's own code, path -> text."""
    docstring = "\n".join(header).replace("\\", "\\\\").replace('"""', "'''")
    default = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if values["device_kind"] == "cpu":
        default.update(GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")
    code = "\n\n\n".join([*bundle.case, *bundle.kit])
    imports = [line for line in bundle.imports if line != "import os"]
    # The case stands first, unless it uses the kit while it is imported: a base class, a decorator, a default, a table.
    case_first = all(re.match(r"def \w+\([\w, *]*\):", statement) for statement in bundle.case)
    sections = [
        f'"""{docstring}\n"""\n\nimport os\n\nos.environ.update({ {**default, **env}!r} | os.environ)\n\n'
        + "\n".join(imports),
        _constants(values, code),
        *([*bundle.case, *bundle.kit] if case_first else [*bundle.kit, *bundle.case]),
        _files(files) if re.search(r"\bFILES\b", code) else "",
        'if __name__ == "__main__":\n    main(body)',
    ]
    return _formatted("\n\n\n".join(section for section in sections if section) + "\n")


def _constants(values: Json, code: str) -> str:
    """Return the settings that the code uses, as literals: `run` has them as attributes."""
    used = set(re.findall(r"\b(?:run|self)\.(\w+)", code))
    lines = ["class Settings:", f'    """The settings of the variant {values["variant"]}."""', ""]
    for name, value in values.items():
        if name in ("model", "strategy", "flags", "settings"):  # only what is named
            value = {key: each for key, each in value.items() if re.search(rf"['\"]{re.escape(key)}['\"]", code)}
        if name in used:
            literal = repr({**value, "config": None} if name == "model" and "config" in value else value)
            lines.append(f"    {name} = " + literal.replace("'config': None", "'config': CONFIG"))
    text = "\n".join(lines)
    config = f"CONFIG = {pprint.pformat(values['model']['config'], sort_dicts=False)}\n\n\n"
    return (config if re.search(r"\bCONFIG\b", code + text) else "") + text


def _files(files: Mapping[str, str]) -> str:
    quoted = {name: text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') for name, text in files.items()}
    texts = "\n".join(f'    "{name}": """\\\n{text}""",' for name, text in quoted.items())
    return f"# The model's own code, as it lies beside its weights.\nFILES = {{\n{texts}\n}}"


def _formatted(text: str) -> str:
    """Return ``text`` as `ruff format` writes it, if ruff is installed."""
    try:
        from ruff.__main__ import find_ruff_bin
    except ImportError:
        return text
    options = ["--isolated", "--line-length", str(WIDTH), "--target-version", "py39"]
    command = [find_ruff_bin(), "format", *options, "--stdin-filename", "exported.py", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else text
