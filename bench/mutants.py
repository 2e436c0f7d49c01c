"""Mutation testing of what judges: ``make mutants`` (or ``python -m bench.mutants --only judge/grade,judge/met``).

One place of one module is changed at a time (a comparison, a condition, a constant, a result, a call left out), and the
fast tests of that module must fail. Nothing is written to the tree: a forked child, in which the package and the tests
are imported already, gets the changed function's code (or, for what is no function's, imports all of it anew with the
changed source), runs the tests in itself and ends at the first failure. Where a module has more places than
``--sample``, a sample is drawn (seeded: the same each time). Killed by its time limit counts as killed. Property tests
make fewer examples than usual: what survives here may still be seen by them, what is killed is killed.

``EXPLAINED`` says of survivors why no test can, or need, see them; whatever else survives is to get a test. Exit code 1
where a module's share is not over 90 % or a survivor is not explained.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import gc
import importlib.abc
import importlib.util
import io
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "mutants.json"
CPU_LIMIT_S = 60  # of one mutant's tests; the slowest honest ones take 15
PROFILE, EXAMPLES = "mutants", 15
NOT_PLANTED = 71  # a child's exit code
# Tests of other things than one module's logic, which take longer than all others together.
SLOW = (
    "test_lies.py::test_every_lie_is_caught[declared]",
    "test_checks.py::test_the_kit_and_the_judge_agree_on_what_passes",
    "test_facts.py::test_every_fact_that_a_case_may_name_is_one_that_the_kit_asks_for",
)

EDGES = (
    "test_edges_checks_collectives", "test_edges_grade_genuine", "test_edges_in_force", "test_edges_peers_evidence",
    "test_edges_signatures",
)  # fmt: skip
# Module -> its fast tests, those that see most first.
_GRADE = (
    *EDGES, "test_own_mistakes", "test_grade", "test_checks", "test_place", "test_in_force", "test_again"
)  # fmt: skip
MODULES: dict[str, tuple[str, ...]] = {
    "harness/repro_matrix/grading/regrade.py": (*EDGES, "test_again", "test_facts", "test_comparable"),
    "harness/repro_matrix/grading/checks.py": (*EDGES, "test_checks", "test_grade"),
    "harness/repro_matrix/analysis/claims/ledger.py": ("test_claims", "test_comparable"),
    "harness/repro_matrix/grading/hangs/deadlock.py": (
        *EDGES,
        "test_hang",
    ),
    "harness/repro_matrix/grading/comparability.py": (*EDGES, "test_comparable", "test_facts"),
    "harness/repro_matrix/analysis/claims/conditions.py": (*EDGES, "test_conditions", "test_claims"),
    "harness/repro_matrix/grading/observation.py": (
        *EDGES,
        "test_place",
        "test_signature",
        "test_own_mistakes",
        "test_grade",
        "test_hang",
    ),
    "harness/repro_matrix/grading/expectations.py": (*EDGES, "test_expect", "test_met", "test_facts"),
    "harness/repro_matrix/grading/capabilities.py": ("test_facts",),
    "harness/repro_matrix/grading/specificity.py": (
        *EDGES,
        "test_signature_parts",
    ),
    "harness/repro_matrix/grading/consistency.py": (*EDGES, "test_lies", "test_checks"),
    "harness/repro_matrix/grading/grade.py": _GRADE,
    "harness/repro_matrix/grading/outcome.py": (*_GRADE, "test_values"),
    "harness/repro_matrix/grading/location.py": (
        *EDGES,
        "test_place",
        "test_signature",
        "test_own_mistakes",
        "test_hang",
    ),
    "harness/repro_matrix/analysis/claims/evaluate.py": (*EDGES, "test_claims", "test_comparable"),
    "harness/repro_matrix/grading/effect.py": (*EDGES, "test_in_force", "test_own_mistakes"),
    "harness/repro_matrix/grading/hangs/progress.py": (
        *EDGES,
        "test_hang",
    ),
    "harness/repro_matrix/grading/failure_id.py": ("test_met", "test_expect"),
    "harness/repro_matrix/analysis/claims/metrics.py": (
        *EDGES,
        "test_claims",
    ),
    "harness/repro_matrix/grading/script_errors.py": ("test_own_mistakes", "test_grade"),
    "harness/repro_matrix/grading/root_cause.py": (*EDGES, "test_signature", "test_grade"),
    "harness/repro_matrix/results/accept_checks.py": ("test_publishable", "test_accept"),
    "harness/repro_matrix/analysis/claims/support.py": (*EDGES, "test_in_force", "test_claims"),
    "harness/repro_matrix/grading/signature.py": (
        *EDGES,
        "test_signature",
        "test_signature_parts",
        "test_place",
        "test_own_mistakes",
        "test_hang",
    ),
    "harness/repro_matrix/grading/verdict.py": (
        "test_verdict",
        "test_met",
        "test_own_mistakes",
        "test_expect",
        "test_comparable",
    ),
    "harness/repro_matrix/records/validate.py": ("test_result_schema", "test_store"),
    "harness/repro_matrix/results/supported.py": ("test_backed",),
    "harness/repro_matrix/results/unshown.py": ("test_left_out",),
    "harness/repro_matrix/results/document.py": ("test_taken_over", "test_result_schema", "test_store", "test_engine"),
    "harness/repro_matrix/results/accept.py": ("test_publishing", "test_accept", "test_publishable"),
    "harness/repro_matrix/runner/retry.py": ("test_taken_over",),
    "harness/repro_matrix/runner/resume.py": ("test_runs",),
    "harness/repro_matrix/cli/accept.py": ("test_accept", "test_publishing", "test_publishable", "test_met"),
    "repros/repro_kit/reference_checks.py": ("test_kit_proof",),
    "repros/repro_kit/single_process.py": ("test_kit_proof",),
    "repros/repro_kit/offloaded_model.py": ("test_streamed",),
    "repros/repro_kit/error_reduction.py": ("test_kit_proof",),
}
# (module, what the mutant does, the line's text) -> why nothing can, or need, notice it.
EXPLAINED: dict[tuple[str, str, str], str] = {
    (
        "harness/repro_matrix/grading/grade.py",
        "returns None",
        'return None if rank.done else "exit 0 without its done marker"',
    ): "such a rank has failed by then (peers.py): this is asked of nobody",
    (
        "harness/repro_matrix/grading/consistency.py",
        "0 -> 1",
        "if started is not None and max(ended) >= 0 and started > max(ended) + SKEW_S:",
    ): "no attempt ended in the first second of 1970",
    (
        "harness/repro_matrix/grading/signature.py",
        "returns None",
        "return False",
    ): "only whether it is true is looked at",
    (
        "harness/repro_matrix/analysis/claims/conditions.py",
        "LtE -> Lt",
        "if version <= low[1]:",
    ): "the end of the first range is in it: the line below says the same of it",
    (
        "harness/repro_matrix/grading/root_cause.py",
        "0 -> 1",
        "if rank.signal or rank.exit_code is None or rank.exit_code >= 0:",
    ): "exit code 0: Signals(0) is none, which is said likewise",
    (
        "harness/repro_matrix/cli/accept.py",
        "filter left out",
        "held = [d for d in kept.documents(cases=names) if _usable(d)]",
    ): "only accept writes there, and it writes what is usable; who edits it by hand is caught by what is judged anew",
    (
        "harness/repro_matrix/grading/expectations.py",
        "2 -> 3",
        r'scores.append(1 if re.search(r"[*?\[]", pattern) else 2)',
    ): "only the order counts: a name above a pattern above none",
}

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    what: str
    text: str  # of the line
    number: int  # which of the module's places
    owner: tuple[str, ...] = ()  # the outermost function whose body it is in, by its name (a method: class and name)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.what, self.text


class _Places(ast.NodeTransformer):
    """Walks a module; changes the place with the number that is asked for and keeps a list of all."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self.found: list[tuple[int, str, tuple[str, ...]]] = []
        self._within: list[str] = []  # classes, then the outermost function
        self._in_function = False

    def _here(self, node: Any, what: str) -> bool:
        self.found.append((node.lineno, what, tuple(self._within) if self._in_function else ()))
        return self.wanted == len(self.found) - 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        outermost = not self._in_function
        if outermost:
            self._within.append(node.name)
            self._in_function = True
        node.body = [self.visit(part) for part in node.body]  # neither annotations nor decorators
        if outermost:
            self._within.pop()
            self._in_function = False
        node.args.defaults = [self.visit(part) for part in node.args.defaults]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self._within.append(node.name)
        node.body = [self.visit(part) for part in node.body]
        self._within.pop()
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        if any(isinstance(target, ast.Name) and target.id.lstrip("_") == "SHOWN" for target in node.targets):
            return node  # how many letters people are shown
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Constant):
            return node  # a docstring
        if isinstance(node.value, ast.Call) and self._here(node, "call left out"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node  # words

    def visit_Raise(self, node: ast.Raise) -> Any:
        return ast.copy_location(ast.Pass(), node) if self._here(node, "raise left out") else node

    def visit_Continue(self, node: ast.Continue) -> Any:
        return ast.copy_location(ast.Pass(), node) if self._here(node, "continue left out") else node

    def visit_Return(self, node: ast.Return) -> Any:
        constant = isinstance(node.value, ast.Constant) and node.value.value is None
        if node.value is not None and not constant and self._here(node, "returns None"):
            node.value = ast.copy_location(ast.Constant(None), node.value)
            return node
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        for index, operator in enumerate(node.ops):
            other = _SWAPPED[type(operator)]
            if self._here(node, f"{type(operator).__name__} -> {other.__name__}"):
                node.ops[index] = other()
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        other = _SWAPPED[type(node.op)]
        if self._here(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        other = _SWAPPED.get(type(node.op))
        words = any(
            isinstance(side, (ast.JoinedStr, ast.Constant)) and _is_text(side) for side in (node.left, node.right)
        )
        if other is not None and not words and self._here(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not) and self._here(node, "not left out"):
            return self.visit(node.operand)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        if self._here(node, "if never"):
            node.test = ast.copy_location(ast.Constant(False), node.test)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if self._here(node, "if turned round"):
            node.body, node.orelse = node.orelse, node.body
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        for index, test in enumerate(node.ifs):
            if self._here(test, "filter left out"):
                node.ifs[index] = ast.copy_location(ast.Constant(True), test)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, bool):
            changed: Any = not value
        elif isinstance(value, (int, float)):
            changed = value + 1
        elif isinstance(value, str) and value and " " not in value:  # a name; what has blanks is for people to read
            changed = value + "x"
        else:
            return node
        return ast.copy_location(ast.Constant(changed), node) if self._here(node, f"{value!r} -> {changed!r}") else node


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node.value, str)


def places(module: str, source: str) -> list[Mutant]:
    walk = _Places()
    walk.visit(ast.parse(source))
    lines = source.splitlines()
    return [
        Mutant(module, line, what, lines[line - 1].strip(), n, owner)
        for n, (line, what, owner) in enumerate(walk.found)
    ]


def mutated(source: str, number: int) -> ast.Module:
    tree = _Places(number).visit(copy.deepcopy(ast.parse(source)))
    return ast.fix_missing_locations(tree)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one file's module a changed tree, under whatever name it is imported."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.file, self.tree = file, tree

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.rpartition(".")[2] != self.file.stem:
            return None
        for folder in path or sys.path:
            if Path(folder or ".").resolve() == self.file.parent:
                return importlib.util.spec_from_file_location(name, self.file, loader=self)
        return None

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.tree, str(self.file), "exec"), module.__dict__)


def planted(mutant: Mutant, source: str, file: Path) -> None:
    """Let this process, which has imported everything, run the mutant."""
    tree = mutated(source, mutant.number)
    loaded = [m for m in list(sys.modules.values()) if _file_of(m) == file]
    olds = [function for module in loaded if (function := _function(module.__dict__, mutant.owner))]
    if not mutant.owner or not loaded or len(olds) != len(loaded):
        for name, module in list(sys.modules.items()):
            if _is_ours(module) and name != "__main__" and not name.startswith("bench"):
                del sys.modules[name]
        sys.meta_path.insert(0, _Finder(file, tree))
        return
    for module, old in zip(loaded, olds):
        names = {**module.__dict__}
        exec(compile(tree, str(file), "exec"), names)
        changed = _function(names, mutant.owner)
        assert changed is not None
        old.__code__ = changed.__code__
    for module in list(sys.modules.values()):  # what the honest one has answered while tests were imported
        for value in list(vars(module).values()) if _is_ours(module) else ():
            if isinstance(value, _CACHED):
                value.cache_clear()


_CACHED = type(functools.lru_cache(lambda: None))


def _is_ours(module: Any) -> bool:
    place = _file_of(module)
    return place is not None and place.is_relative_to(ROOT) and "site-packages" not in place.parts


def _file_of(module: Any) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if isinstance(name, str) else None


def _function(names: Any, owner: tuple[str, ...]) -> Any:
    """The plain function behind a name (a method's, a property's, a wrapped one's); None where there is none."""
    found: Any = None
    for part in owner:
        found = names.get(part) if isinstance(names, dict) else vars(names).get(part)
        names = found
        if found is None:
            return None
    for name in ("fget", "func", "__func__"):
        found = getattr(found, name, None) or found
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found if hasattr(found, "__code__") else None


def prepared() -> None:
    """Import what the tests need and what is not under test: a child forks from here."""
    for name in ("pytest", "hypothesis", "hypothesis.strategies", "pydantic", "yaml", "jsonschema", "rich", "psutil",
                 "packaging.version", "hydra", "torch"):  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from hypothesis import HealthCheck, Phase, settings

    # A failure is enough: nobody reads the smallest example.
    settings.register_profile(
        PROFILE, derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        max_examples=EXAMPLES, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    settings.load_profile(PROFILE)  # of what tests set themselves the rest is taken where they are imported
    gc.freeze()


def survives(mutant: Mutant | None, tests: Sequence[str], source: str, file: Path) -> bool:
    """Whether the tests pass, run in a forked child. None: nothing is changed."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (1, 2):
                os.dup2(null, fd)
            sys.stdout = sys.stderr = io.StringIO()
            sys.dont_write_bytecode = True
            code = NOT_PLANTED
            if mutant is not None:
                planted(mutant, source, file)
            else:
                for owner in {each.owner for each in places(str(file), source)} - {()}:
                    planted(Mutant(str(file), 0, "nothing", "", -1, owner), source, file)
            code = 70
            import pytest

            names = [f"tests/{name}.py" for name in tests]
            words = [
                "-x",
                "-q",
                "-m",
                "not ranks",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "-o",
                "addopts=",
                "--assert=plain",
                f"--hypothesis-profile={PROFILE}",
            ]
            for test in SLOW:
                words += ["--deselect", f"tests/{test}"]
            code = int(pytest.main([*words, *names]))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == NOT_PLANTED:
        raise SystemExit(f"{file}: {mutant} could not be planted")
    return code == 0


def chosen(module: str, source: str, sample: int, seed: int) -> tuple[list[Mutant], int]:
    every = places(module, source)
    if len(every) <= sample:
        return every, len(every)
    return sorted(random.Random(f"{seed}/{module}").sample(every, sample), key=lambda m: m.number), len(every)


def measure(modules: dict[str, tuple[str, ...]], sample: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    for module, tests in modules.items():
        file = (ROOT / module).resolve()
        source = file.read_text(encoding="utf-8")
        for name in tests:
            importlib.import_module(name)
        some, count = chosen(module, source, sample, seed)
        # Planting must change nothing by itself: what fails then would be counted as killed.
        if not survives(None, tests, source, file):
            raise SystemExit(f"{module}: its tests fail as it is: {', '.join(tests)}")
        began = time.monotonic()
        left = [mutant for mutant in some if survives(mutant, tests, source, file)]
        yield module, {
            "commit": commit, "sample": sample,
            "places": count, "tried": len(some), "killed": len(some) - len(left), "tests": list(tests),
            "wall_s": round(time.monotonic() - began, 1),
            "survivors": [
                {"line": m.line, "what": m.what, "text": m.text, "why": EXPLAINED.get(m.key)} for m in left
            ],
        }  # fmt: skip


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| module | places | tried | killed | survivors explained |", "|---|---|---|---|---|"]
    for module, row in rows.items():
        explained = sum(1 for each in row["survivors"] if each["why"])
        lines.append(f"| {module} | {row['places']} | {row['tried']} | {row['killed']} | {explained} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=20, help="mutants of a module, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="modules, by parts of their names, with commas")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "repros")]
    prepared()
    words = arguments.only.split(",") if arguments.only else [""]
    modules = {name: tests for name, tests in MODULES.items() if any(word in name for word in words)}
    known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    rows: dict[str, dict[str, Any]] = known.get("modules", {}) if known.get("seed") == arguments.seed else {}
    bad = 0
    for module, row in measure(modules, arguments.sample, arguments.seed):
        rows[module] = row
        open_ones = [each for each in row["survivors"] if not each["why"]]
        noticeable = row["tried"] - len(row["survivors"]) + len(open_ones)
        bad += bool(open_ones) or row["killed"] <= 0.9 * noticeable
        print(
            f"{module}: {row['killed']} of {row['tried']} killed ({row['places']} places, {row['wall_s']:.0f} s)",
            flush=True,
        )
        for each in row["survivors"]:
            print(f"    {each['line']}: {each['what']}: {each['text']}   {each['why'] or 'NOT EXPLAINED'}", flush=True)
        rows = {name: rows[name] for name in MODULES if name in rows}
        OUT.write_text(json.dumps({"seed": arguments.seed, "modules": rows}, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
