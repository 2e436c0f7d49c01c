"""Draft the first files of a case: YAML with a proposed signature, and a script without its trigger.

A draft begins with nothing, with a training log, with a script of the user's, with another case, or with the result of
`repro reduce --json`.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.external.tracebacks import Error
from repro_matrix.paths import CHECKOUT, CONF, REPROS

Json = dict[str, Any]
TODO = "TODO"
SHAPE: Json = {
    "pass_criteria": {"kind": "training", "checks": ["steps", "loss", "updates", "batches"]},
    "launch": {"world_size": 2, "deadline": 120, "imports": ["transformers"]},
    "axes": {"model": ["qwen1.5-0.5b"], "strategy": ["ddp"]},
    "flags": {"fixed": {"default": False, "choices": [True, False], "help": f"{TODO}: what the fix changes"}},
    "variants": {"unfixed": {"help": f"{TODO}: as the reports do it"},
                 "fixed": {"flags": {"fixed": True}, "help": f"{TODO}: the documented fix"}},
}  # fmt: skip
COPIED = (
    "pass_criteria", "requires", "steps", "supports_other_world_sizes", "allow_gpu_sharing", "min_ranks",
    "accelerator", "launch", "axes", "options", "preserve_config", "flags", "variants",
)  # fmt: skip
UNKNOWN_EXCEPTION = {
    "name": "raised", "kind": "exception", "type": "RuntimeError",
    "message": f"{TODO}: the error's text, as a regular expression", "package": "torch",
}  # fmt: skip

SCRIPT = '''"""TODO: the failure in one line, and its reference (owner/repository#number)."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch


def body(run: Run) -> None:
    model = build(run).train()
    reference = Reference(run, model)
    run.phase("wrap")
    wrapped = wrap(run, model)
    if not run.flags["fixed"]:
        pass  # <- TODO: the call that fails; under else what the fix does in its place
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)
    losses: list[float] = []
    for step in each_step(run):
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    reference.check(run, losses=losses, last=full_parameters(run, wrapped))


if __name__ == "__main__":
    main(body)
'''


@dataclass(frozen=True)
class Draft:
    """The contents of a new case's files. ``shape``: another case's file, or SHAPE; ``model``: the text of its own."""

    shape: Json = field(default_factory=lambda: SHAPE)
    script: str = SCRIPT
    signatures: Sequence[Json] = (UNKNOWN_EXCEPTION,)
    references: Sequence[str] = ()
    model: str = ""

    def case_text(self, slug: str) -> str:
        data = {"slug": slug, "title": f"{TODO}: what fails", "kind": "failure", "references": list(self.references),
                "summary": f"{TODO}: why it fails, in two sentences.",
                **{key: self.shape[key] for key in COPIED if key in self.shape},
                "signatures": [dict(each) for each in self.signatures]}  # fmt: skip
        data["variants"] = data.pop("variants")
        return _yaml(data)

    def write(self, slug: str) -> list[Path]:
        """Write the files into the project's folders, all or none. Raises ConfigError; nothing is overwritten."""
        folder, scripts = _case_folders()
        texts = {folder / f"{slug}.yaml": self.case_text(slug), scripts / f"{slug.replace('-', '_')}.py": self.script}
        if self.model:
            texts[folder.parent / "model" / f"{slug}.yaml"] = self.model
        written: list[Path] = []
        try:
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "x", encoding="utf-8") as file:
                    written.append(path)
                    file.write(text)
        except OSError as error:
            for path in written:
                path.unlink(missing_ok=True)
            raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror}.") from None
        return written


def _case_folders() -> tuple[Path, Path]:
    """Return the folders of the project's cases and of their scripts."""
    here = project.current()
    if here.conf:
        folder = here.conf[0] / "case"
        return folder, here.scripts[0] if here.scripts else folder
    if not CHECKOUT:
        raise ConfigError(
            f'{here.folder}: no repro.toml names the folder of your own cases. Write one: conf = "failures"'
        )
    return CONF / "case", REPROS


def _yaml(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(data), sort_keys=False, width=118, allow_unicode=True)


def read_text(path: str, option: str) -> str:
    """Return a file's text. Raises ConfigError that names the option."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from None


# -- signatures


def signature_of_error(error: Error) -> Json:
    """Return the signature that an error of a log proposes: its type, its text without what changes, who raised it."""
    files = [str(frame["file"]).replace("\\", "/") for frame in error.places]
    packages = [file.rpartition("-packages/")[2].partition("/")[0] for file in files if "-packages/" in file]
    return exception(error.type, error.message, packages[-1].removesuffix(".py") if packages else f"{TODO}-package")


def exception(raised: str, message: str, package: str) -> Json:
    kind = raised.rpartition(".")[2]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind).lower().removesuffix("-error") or "raised"
    first = pattern(message.strip().partition("\n")[0][:160])
    return {"name": name, "kind": "exception", "type": kind, "message": first or TODO, "package": package}


def silent(check: str) -> Json:
    return {"name": "wrong", "kind": "check", "check": check}


def pattern(text: str) -> str:
    """Return a regular expression for this text with any numbers and paths."""
    parts = re.split(r"((?:/[\w.+-]+){2,}|0x[0-9a-fA-F]+|\d+)", text)
    for number, part in enumerate(parts):
        variable = r"\S+" if part.startswith(("/", "0x")) else r"\d+"
        parts[number] = variable if number % 2 else re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", part)
    return "".join(parts)


# -- from a script


def of_script(text: str, name: str, args: Sequence[str] = ()) -> Draft:
    """Turn a user's script into a case's: its definitions stay, its statements go into ``body(run)``.

    ``args``: its arguments. Raises ConfigError with the line where it does not parse."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{name}:{error.lineno}: not valid Python: {error.msg}") from None
    lines = text.splitlines()
    defined = ["import sys"] if args else []
    done = [f"sys.argv[1:] = {list(args)!r}  # as it was started"] if args else []
    last = 0
    for node in tree.body:
        block = lines[last : node.end_lineno]
        last = node.end_lineno or last
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            done += [line[4:] if line.startswith("    ") else line for line in block[1:]]
        elif isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            defined += [] if getattr(node, "module", "") == "__future__" else block
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            done += block
    inner = "\n".join(f"    {line}" if line.strip() else "" for line in done).strip("\n") or "    pass"
    script = (
        f'"""{TODO}: the failure in one line, and its reference. (From {name}.)"""\n\n'
        "from __future__ import annotations\n\n"
        "from repro_kit import Run, main\n\n" + "\n".join(defined).strip("\n") + "\n\n\ndef body(run: Run) -> None:\n"
        f'    # {TODO}: without the fix only where run.flags["fixed"] is false\n{inner}\n'
        '    run.check("finished", actual=True, expected=True, '
        f'subject="{TODO}: a number that the fix makes right")\n\n\n'
        'if __name__ == "__main__":\n    main(body)\n'
    )
    launch = {**SHAPE["launch"], **({"process_group": False} if "init_process_group" in text else {})}
    criteria = {"kind": "training", "checks": ["finished"]}
    return Draft({**SHAPE, "pass_criteria": criteria, "launch": launch}, script)


# -- from the result of `repro reduce --json`


def of_reduction(slug: str, path: str, known: Catalogue) -> Draft:
    """Draft a case from a reduction of a script or of another case. Raises ConfigError."""
    option = "--from-reduction"
    try:
        found = json.loads(read_text(path, option))
    except ValueError:
        found = None
    keys = {"failure", "case", "overrides"}, {"failure", "script", "nproc", "args"}
    if not isinstance(found, dict) or found.get("kind") != "reduced" or not any(each <= set(found) for each in keys):
        raise ConfigError(f"{option} {path}: not a result of `repro reduce ... --json > {Path(path).name}`.")
    return _of_reduced_case(slug, found, known) if "case" in found else _of_reduced_script(found, option)


def _of_reduced_script(found: Json, option: str) -> Draft:
    text = (found.get("lines") or {}).get("text") or read_text(found["script"], f"{option}: its script")
    draft = of_script(text, Path(found["script"]).name, [str(arg) for arg in found["args"]])
    ranks = int(found["nproc"])
    shape = {**draft.shape, "min_ranks": min(2, ranks), "launch": {**draft.shape["launch"], "world_size": ranks}}
    return replace(draft, shape=shape, signatures=[_signature(found)])


def _signature(found: Json) -> Json:
    """Return the signature of the error; its stored measurement says who raised it."""
    kind, _, message = str(found["failure"]).partition(":")
    package = f"{TODO}-package"
    try:
        document = json.loads(Path(str(found.get("document"))).read_text(encoding="utf-8"))
        attempts = document["variants"]["unfixed"]["attempts"]
        primary = next(a["outcome"]["primary"] for a in attempts if a["outcome"]["outcome"] == "reproduced")
        kind, message, where = primary["type"], primary["message"], primary.get("location") or ""
        package = where.partition(".")[0] if where and "/" not in where else package  # a path: the script's own code
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        pass  # the measurement was removed: the text alone is known
    if not re.fullmatch(r"[A-Za-z_][\w.]*", kind.strip()):
        return {**UNKNOWN_EXCEPTION, "package": package}
    return exception(kind.strip(), message, package)


def _of_reduced_case(slug: str, found: Json, known: Catalogue) -> Draft:
    """Return that case with its smallest cell as the unfixed variant, and the variants that differ from it in flags or
    options alone."""
    from repro_matrix.config import catalog, selection
    from repro_matrix.config.settings import compose_run

    name = str(found["case"])
    if name not in known.cases:
        raise unknown("case", name, known.cases, "--from-reduction")
    chosen = selection.parse(map(str, found["overrides"]))
    patched = catalog.load(patches=chosen.patches, cases=[name])
    shape = copy.deepcopy(patched.raw["case"][name])
    for flag, values in chosen.flags.items():
        shape["flags"][flag]["default"] = values[0]
    model, text = (chosen.model or shape["axes"]["model"])[0], ""
    if patched.raw["model"][model] != known.raw["model"][model]:
        text = _model(slug, patched.raw["model"][model], shape.pop("preserve_config", []))
        model = slug
    shape["axes"] = {"model": [model], "strategy": (chosen.strategy or shape["axes"]["strategy"])[:1]}
    launch = shape.setdefault("launch", {})
    launch["world_size"] = (chosen.ranks or [launch.get("world_size", 2)])[0]
    settings = compose_run(chosen.run)
    if settings.steps:
        shape["steps"] = settings.steps
    if settings.env:
        launch["env"] = {**launch.get("env", {}), **settings.env}
    first = next(iter(shape["variants"]))
    others = {name: spec for name, spec in shape["variants"].items() if name != first and _differs(spec, shape)}
    shape["variants"] = {first: {"help": shape["variants"][first].get("help", TODO)}, **others}
    script = known.script(known.cases[name]).read_text(encoding="utf-8")
    return Draft(shape, script, shape["signatures"], shape.get("references", []), text)


def _differs(variant: Mapping[str, Any], shape: Json) -> bool:
    """Whether a variant differs from the smallest cell, which may have taken what it changes, in flags or options."""
    if {"model", "strategy", "stack", "tp_size", "world_size", "env"} & set(variant):
        return False
    defaults = {name: flag["default"] for name, flag in shape["flags"].items()}
    changed = {**defaults, **variant.get("flags", {})} != defaults
    options = shape.get("options", {})
    return changed or {**options, **variant.get("options", {})} != options


def _model(slug: str, raw: Json, preserve_config: list[str]) -> str:
    """Return the text of the model as small as it was found, at every scale."""
    tiny = {key: value for key, value in (raw.get("tiny") or {}).items() if key not in preserve_config}
    title = f"{raw['title']}, as small as the failure of {slug} allows"
    return _yaml({**raw, "slug": slug, "title": title, "config": {**raw["config"], **tiny}, "tiny": {}})
