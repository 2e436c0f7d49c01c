"""Writes grading/unrelated_messages.txt anew: real error messages of installed packages, and well-known ones.

    .venv/bin/python tests/data/collect_foreign_messages.py

A line is ``Type: message``, with \\n for a new line. What a package raises with a text in its source is taken evenly
over its files; a value that it puts in stands as a sample. No signature decides what is taken: messages that one of
them exists to recognize are listed here by hand (KNOWN).
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "harness" / "repro_matrix" / "grading" / "unrelated_messages.txt"
SITE = Path(sysconfig.get_paths()["purelib"])
STDLIB = Path(sysconfig.get_paths()["stdlib"])
PER_PACKAGE = {
    "torch": 420, "transformers": 320, "accelerate": 110, "deepspeed": 160, "peft": 90, "safetensors": 10, "numpy": 60,
    "huggingface_hub": 40,
}  # fmt: skip
FROM_STDLIB = 110
KNOWN = ("ValueError: You can't train a model that has been loaded with `device_map='auto'` in any",)
SAMPLES = ("2", "model.layers.0.weight", "torch.float32", "[2, 16]", "cpu")


def text_of(node: ast.expr, number: int = 0) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = []
        for place, value in enumerate(node.values):
            literal = isinstance(value, ast.Constant)
            parts.append(str(value.value) if literal else SAMPLES[(place + number) % len(SAMPLES)])  # type: ignore[attr-defined]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left, number), text_of(node.right, number)
        return left + right if left is not None and right is not None else None
    return None


def raised_in(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and call.args:
            text = text_of(call.args[0], len(path.name))
            name = ast.unparse(call.func).rpartition(".")[2]
            if text and 15 <= len(text) <= 400:
                yield f"{name}: {text}"


def collected(root: Path, wanted: int) -> list[str]:
    inside = ((path, set(path.relative_to(root).parts)) for path in sorted(root.rglob("*.py")))
    files = [path for path, parts in inside if not {"tests", "testing", "site-packages"} & parts]
    found = list(dict.fromkeys(text for path in files for text in raised_in(path)))
    step = max(1, len(found) // wanted)
    return found[::step][:wanted]


def main() -> None:
    lines = Path(__file__).with_name("well_known_messages.txt").read_text(encoding="utf-8").splitlines()
    for package, wanted in PER_PACKAGE.items():
        lines += [text.replace("\\", "\\\\").replace("\n", "\\n") for text in collected(SITE / package, wanted)]
    lines += [text.replace("\\", "\\\\").replace("\n", "\\n") for text in collected(STDLIB, FROM_STDLIB)]
    lines = list(dict.fromkeys(line for line in lines if line.strip() and not line.startswith(KNOWN)))
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(lines)} messages in {TARGET}\n")


if __name__ == "__main__":
    main()
