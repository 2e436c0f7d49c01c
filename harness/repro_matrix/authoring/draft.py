"""Draft the first files of a case: YAML with a proposed signature, and a script without its trigger. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from repro_matrix.errors import ConfigError
from repro_matrix.external.tracebacks import Error

TODO = "TODO"
SHAPE: dict[str, Any] = {
    "pass_criteria": {"kind": "training", "checks": ["steps", "loss", "updates", "batches"]},
    "launch": {"world_size": 2, "deadline": 120, "imports": ["transformers"]},
    "axes": {"model": ["qwen1.5-0.5b"], "strategy": ["ddp"]},
    "flags": {"fixed": {"default": False, "choices": [True, False], "help": f"{TODO}: what the fix changes"}},
    "variants": {"unfixed": {"help": f"{TODO}: as the reports do it"},
             "fixed": {"flags": {"fixed": True}, "help": f"{TODO}: the documented fix"}},
}  # fmt: skip
COPIED = (
    "pass_criteria",
    "requires",
    "steps",
    "supports_other_world_sizes",
    "allow_gpu_sharing",
    "min_ranks",
    "accelerator",
    "launch",
    "axes",
    "options",
    "preserve_config",
    "flags",
    "variants",
)

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
        pass  # <- TODO: the call that fails stands here, and what the fix does in its place under else
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


def case_text(
    slug: str, signatures: Sequence[Mapping[str, Any]], shape: Mapping[str, Any], references: Sequence[str] = ()
) -> str:
    """The case's file. ``shape``: another case's file, or SHAPE."""
    data = {"slug": slug, "title": f"{TODO}: what fails", "kind": "failure", "references": list(references),
            "summary": f"{TODO}: why it fails, in two sentences.",
            **{key: shape[key] for key in COPIED if key in shape},
            "signatures": [dict(each) for each in signatures]}  # fmt: skip
    data["variants"] = data.pop("variants")
    return yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True)


def signature_of_error(error: Error) -> dict[str, Any]:
    """The signature that an error of a log proposes: its type, its text without what changes, who raised it."""
    files = [str(frame.get("file")).replace("\\", "/") for frame in error.places]
    places = [file.rpartition("-packages/")[2].partition("/")[0] for file in files if "-packages/" in file]
    package = places[-1].removesuffix(".py") if places else f"{TODO}-package"
    return exception(error.type, error.message, package)


def exception(raised: str, message: str, package: str) -> dict[str, Any]:
    kind = raised.rpartition(".")[2]
    first = message.strip().partition("\n")[0][:160]
    return {
        "name": _name(kind),
        "kind": "exception",
        "type": kind,
        "message": pattern(first) or TODO,
        "package": package,
    }


def unknown_exception() -> dict[str, Any]:
    return {"name": "raised", "kind": "exception", "type": "RuntimeError",
            "message": f"{TODO}: the error's text, as a regular expression", "package": "torch"}  # fmt: skip


def silent(check: str) -> dict[str, Any]:
    return {"name": "wrong", "kind": "check", "check": check}


def pattern(text: str) -> str:
    """A regular expression for this text with any numbers and paths."""
    parts = re.split(r"((?:/[\w.+-]+){2,}|0x[0-9a-fA-F]+|\d+)", text)
    words = {True: r"\S+", False: r"\d+"}
    return "".join(
        words[part.startswith(("/", "0x"))] if number % 2 else re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", part)
        for number, part in enumerate(parts)
    )


def script_from(text: str, name: str, args: Sequence[str] = ()) -> str:
    """Turn a user's script into a case's: its definitions stay, its statements go into ``body(run)``.

    ``args``: its arguments. Raises ConfigError with the line where it does not parse."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{name}:{error.lineno}: not valid Python: {error.msg}") from None
    lines = text.splitlines()
    defined: list[str] = []
    done: list[str] = []
    last = 0
    for node in tree.body:
        block = lines[last : node.end_lineno]
        last = node.end_lineno or last
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            done += [line[4:] if line.startswith("    ") else line for line in block[1:]]
        elif isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            defined += block
        else:
            done += block
    if args:
        defined.insert(0, "import sys")
        done.insert(0, f"sys.argv[1:] = {list(args)!r}  # as it was started")
    inner = "\n".join(f"    {line}" if line.strip() else "" for line in done).strip("\n") or "    pass"
    return (
        f'"""{TODO}: the failure in one line, and its reference. (From {name}.)"""\n\n'
        "from __future__ import annotations\n\n"
        "from repro_kit import Run, main\n\n" + "\n".join(defined).strip("\n") + "\n\n\ndef body(run: Run) -> None:\n"
        f'    # {TODO}: without the fix only where run.flags["fixed"] is false\n{inner}\n'
        '    run.check("finished", actual=True, expected=True, '
        f'subject="{TODO}: a number that the fix makes right")\n\n\n'
        'if __name__ == "__main__":\n    main(body)\n'
    )


def script_shape(text: str) -> dict[str, Any]:
    """The shape of a case whose script is a user's."""
    launch = {**SHAPE["launch"], **({"process_group": False} if "init_process_group" in text else {})}
    return {**SHAPE, "pass_criteria": {"kind": "training", "checks": ["finished"]}, "launch": launch}


def _name(kind: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind).lower()
    return words.removesuffix("-error") or "raised"
