"""`repro export CASE --variant A`: one script without this project's kit, to paste into an upstream issue."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_matrix.cli import options as arguments
from repro_matrix.errors import ConfigError, ReproError, unknown

if TYPE_CHECKING:
    from repro_matrix.authoring.export.stored import Measured
    from repro_matrix.environment.stacks import Stack
    from repro_matrix.runner.session import Session

SHOWN = ("torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai")


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.case(parser)
    arguments.overrides(parser)
    parser.add_argument("--variant", help="which variant (default: the first, which is the broken one)")
    parser.add_argument("--stack", help="with the versions and the outcome that are stored of this stack")
    parser.add_argument("--out", metavar="FILE", help="write it there instead of to the standard output")


def main(args: argparse.Namespace) -> int:
    from repro_matrix.config import catalog as catalogue

    cases = catalogue.load().cases
    if args.case not in cases:
        raise unknown("case", args.case, cases)
    variant = args.variant or next(iter(cases[args.case].variants))
    if variant not in cases[args.case].variants:
        raise unknown("variant", variant, cases[args.case].variants, args.case)
    given, overrides = arguments.one_stack(args)
    text = exported(args.case, variant, overrides, args.stack or given).text
    if not args.out:
        sys.stdout.write(text)
        return 0
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out {out}: it is there already; nothing is overwritten")
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    print(f"wrote {out} ({text.count(chr(10))} lines)", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class Exported:
    text: str
    ranks: int
    stored: Measured | None  # what is expected of it
    skipped: str | None  # why it cannot run here
    stack: Stack | None  # None where it is not here


def exported(slug: str, variant: str, overrides: Iterable[str] = (), stack: str | None = None) -> Exported:
    """One variant as a file. Raises ReproError: nothing is known of the stack, or the script cannot stand alone."""
    from repro_matrix.authoring.export import bundle as bundles
    from repro_matrix.authoring.export.header import lines
    from repro_matrix.authoring.export.script import values, written
    from repro_matrix.authoring.export.stored import measured
    from repro_matrix.config import project
    from repro_matrix.results.store import Store

    prepared, absent = _prepared(slug, list(overrides), stack)
    plan = prepared.plans[0]
    case = prepared.catalogue.cases[slug]
    found = next(each for each in plan.variants if each.variant == variant)
    stores = map(Store, project.published())
    documents = [document for store in stores for document in store.documents(history=True, cases=[slug])]
    name = case.variants[variant].stack or stack or plan.cell.stack
    have = prepared.stacks.get(name)
    defaults = {flag: spec.default for flag, spec in case.flags.items()}
    stored = measured(documents, found, name, dict(have.versions) if have else {}, defaults)
    versions = dict(stored.versions) if stored else dict(have.versions) if have else {}
    if not versions:
        stored_with = ", ".join(sorted({document["stack"]["name"] for document in documents})) or "none"
        why = f"{absent or found.skipped}; nor is {slug}/{variant} stored with it (there are: {stored_with})"
        raise ConfigError(why)
    settings = _of_hardware(found.settings, case.requires.gpus)
    proven = stored is None or not stored.fails_by_itself
    repros, script = prepared.catalogue.repros, prepared.catalogue.script(case)
    made = bundles.bundle(
        script.read_text(encoding="utf-8"),
        {
            f"repro_kit.{path.stem}": path.read_text(encoding="utf-8")
            for path in sorted((repros / "repro_kit").glob("*.py"))
        },
        values(settings),
        f"{slug} ({script.name})",
        proven,
    )
    remote = settings["model"].get("remote_code")
    published = any(part == "repro_kit.qwen" for part, _ in made.kit)
    files = _model_files(repros / "remote_code", remote, published) if remote else {}
    env = {**case.launch.env, **settings.get("env", {}), **case.variants[variant].env}
    built = have is not None and all(Path(path).exists() for path in (have.python, *have.path))
    skipped = absent or found.skipped or (None if built else f"stack {name} is not built here")
    header = lines(case, variant, settings, {n: versions[n] for n in SHOWN if n in versions}, stored, proven, skipped)
    text = written(header, settings, env, made, files)
    return Exported(text, settings["world_size"], stored, skipped, have if built else None)


def _prepared(slug: str, overrides: list[str], stack: str | None) -> tuple[Session, str | None]:
    """The case's plan, and why the stack is not here: then the plan is this environment's, its versions are not."""
    from repro_matrix.runner import session
    from repro_matrix.runner.request import ask

    asked = ask([f"case={slug}", *overrides])
    if stack is None:
        return session.prepare(asked, build_stacks=False), None
    try:
        return session.prepare(asked.having({"stack": stack}), build_stacks=False), None
    except ReproError as error:
        return session.prepare(asked, build_stacks=False), str(error)


def _of_hardware(settings: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """What needs GPUs is written for GPUs also where there are none."""
    return {**settings, "device": "cuda", "backend": "nccl"} if gpus else dict(settings)


def _model_files(folder: Path, name: str, published: bool) -> dict[str, str]:
    """A model's own code, by its path under ``folder``; the published overrides only where the script asks for it."""
    files = [path for path in sorted((folder / name).iterdir()) if path.suffix in (".py", ".json")]
    kept = [path for path in files if published or not path.stem.endswith("_published")]
    return {f"{name}/{path.name}": path.read_text(encoding="utf-8") for path in kept}
