"""Remove one statement of a case's script at a time, and run unfixed and the fixes without it.

A statement without which the results stay the same is printed for review: either the case does not
need it, or the script has no evidence that it ran, and a fix could pass without the trigger.

    make triggers ARGS=dcp-empty-with-grads
    make triggers ARGS='ds-rope-buffers-bf16 stack=torch2.6-tf4.51'
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from repro_matrix.config import catalog
from repro_matrix.errors import unknown
from repro_matrix.paths import CONF
from repro_matrix.results.rows import Row
from repro_matrix.results.summary import load_rows

EVIDENCE = {"check", "effect", "fact", "metric", "note", "phase", "watch"}


def is_step(statement: ast.stmt) -> bool:
    """Return whether a statement acts on the training, and the script can be run without it."""
    if isinstance(statement, ast.Assign):
        return isinstance(statement.targets[0], (ast.Attribute, ast.Subscript))
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, (ast.AugAssign, ast.With))
    called = statement.value.func if isinstance(statement.value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    return name is not None and name not in EVIDENCE


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yield each statement of the script's functions, and the script without it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(node, ast.Module) or not isinstance(block, list):
                continue
            for index, statement in enumerate(list(block)):
                if is_step(statement):
                    inner = statement.body if isinstance(statement, ast.With) else [ast.Pass()]
                    before = list(block)
                    block[index : index + 1] = inner
                    text = ast.unparse(ast.fix_missing_locations(tree))
                    block[:] = before
                    yield f"{statement.lineno}: {ast.unparse(statement).splitlines()[0]}", text


def write_copies(slug: str, folder: Path) -> dict[str, str]:
    """Write the case as it is, and once without each statement; return the copies' names."""
    source = catalog.load()
    if slug not in source.cases:
        raise SystemExit(str(unknown("case", slug, source.cases, "make triggers ARGS=CASE")))
    script = source.script(source.cases[slug]).read_text()
    case = yaml.safe_load((CONF / "case" / f"{slug}.yaml").read_text())
    for key in ("claims", "script"):
        case.pop(key, None)
    case["variants"] = {
        name: variant
        for name, variant in case["variants"].items()
        if name == "unfixed" or (variant["role"] == "fix" and "stack" not in variant)
    }
    copies = {}
    for number, (statement, text) in enumerate([("as it is", script), *mutants(script)]):
        name = f"{slug}-without-{number}"
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump({**case, "slug": name}, sort_keys=False)
        )
        (folder / f"{name.replace('-', '_')}.py").write_text(text)
        copies[name] = statement
    return copies


def main(slug: str, *overrides: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        cases, results = Path(folder, "case"), Path(folder, "results")
        cases.mkdir()
        copies = write_copies(slug, cases)
        selection = [f"case={slug}-without-*", "repeat=1", f"results={results}", *overrides]
        command = [sys.executable, "-m", "repro_matrix", "matrix", "--config-dir", folder]
        subprocess.run([*command, *selection], stdout=subprocess.DEVNULL, check=False)
        measured: dict[str, dict[str, Row]] = {}
        for row in load_rows(results):
            measured.setdefault(row.case, {})[row.variant] = row
    outcomes = {
        name: {variant: (row.verdict, row.kinds) for variant, row in rows.items()}
        for name, rows in measured.items()
    }
    original = outcomes.get(f"{slug}-without-0", {})
    if "reproduced" not in original.get("unfixed", ("", ()))[1]:
        print(f"{slug} does not reproduce here: choose another stack")
        return 3
    if missing := copies.keys() - outcomes.keys():
        print(f"{slug}: {len(missing)} of {len(copies)} copies were not measured")
        return 3
    del copies[f"{slug}-without-0"]
    same = [statement for name, statement in copies.items() if outcomes.get(name) == original]
    print(f"{slug}: the same results without {len(same)} of {len(copies)} statements")
    for statement in same:
        print(f"  line {statement}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
