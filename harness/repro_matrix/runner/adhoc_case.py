"""Make an ad-hoc case of a user's script: its command, and the request for its cell.

The request takes the same path as every case: planner, launcher, grader, store and searches. The
stack's interpreter replaces the launcher's program (``torchrun`` becomes ``python -m
torch.distributed.run``), so that the same command runs on any stack.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro_matrix.config import project, schema
from repro_matrix.config.catalog import Catalogue, check_syntax, load
from repro_matrix.config.schema import VARIANT, AdhocCase, Case, Model, Strategy
from repro_matrix.config.selection import Selection
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks.integrity import shadowed
from repro_matrix.environment.stacks.spec import short_hash
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.grading.observation import Evidence
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import match_attempt
from repro_matrix.launch.torchrun import WORKER
from repro_matrix.paths import file_state
from repro_matrix.planning.cells import Cell
from repro_matrix.records.document import GradedAttempt
from repro_matrix.runner.script_failure import CHECKS, ScriptFailure
from repro_matrix.runner.session import Request

DEADLINE_S = 300.0
STRATEGY = "script"
TRACER = WORKER.with_name("tracer") / "__init__.py"
MODEL = "own"  # slug of the model axis: the script brings its own
NOISE_SEED = "REPRO_TRACE_NOISE"
PRELOADED = ("torch", "transformers")
# A variable of the environment is set, or what an import finds may be another module than without
# the script.
_IMPORTS_DIFFER = re.compile(
    rb"environ\s*(\[[^\]]*\]\s*=[^=]|\|=|\.\s*(update|setdefault|pop))|putenv|del\s.*environ|import"
    rb" environ"
    rb"|\bsys\.(path|modules|meta_path)\b|from sys import|importlib|addsitedir|runpy"
)
# program -> module that is its command line
LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
    "accelerate launch": "accelerate.commands.launch",
}
# modules that start ranks; any other module or file is itself the one process
STARTS_RANKS = {*LAUNCHERS.values(), "torch.distributed.launch"}
_COUNT = re.compile(
    r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|num[-_]accelerators)(?:=(.*))?"
)


@dataclass(frozen=True)
class Command:
    """Hold a command line of a script.

    ``argv``: arguments of the stack's interpreter. ``shown``: the command as the user writes it.
    """

    argv: tuple[str, ...]
    nproc: int  # expected ranks
    plain: bool  # no launcher: the command's one process is rank 0
    name: str  # of the script or module, and of its results
    shown: str
    script: Path | None = None

    @property
    def single(self) -> bool:
        """Return True if it may be one process without a rank, as of accelerate on one device."""
        return self.plain or self.argv[:2] == ("-m", "accelerate.commands.launch")


def is_script(word: str) -> bool:
    """Return True if the word is a script: it contains a slash or ends in .py, as no case does."""
    return word.endswith(".py") or "/" in word


def command_of_script(word: str, nproc: int, args: str = "", module: bool = False) -> Command:
    """Return the command of a script, or of a module's dotted name, under torchrun."""
    try:
        rest = shlex.split(args)
    except ValueError as error:
        raise ConfigError(f"--args {args!r}: {error}") from None
    script = None if module else checked_script(word)
    options = ["--standalone", "--nproc-per-node", str(nproc), *(["--module"] if module else [])]
    name = word.rpartition(".")[2] if module else Path(word).stem
    shown = shlex.join(["torchrun", *options, word, *rest])
    target = word if script is None else str(script)
    return Command(
        ("-m", LAUNCHERS["torchrun"], *options, target, *rest), nproc, False, name, shown, script
    )


def command_of_words(words: Sequence[str], nproc: int | None = None) -> Command:
    """Return a command line given after ``--``.

    ``nproc``: expected ranks, if the command line does not set them.
    """
    program = Path(words[0]).name
    rest = list(words[1:])
    if program == "accelerate" and rest:
        program = f"accelerate {rest[0]}"
        rest = rest[1:]
    if re.fullmatch(r"python(3(\.\d+)?)?", program):
        argv = rest
    elif program in LAUNCHERS:
        argv = ["-m", LAUNCHERS[program], *rest]
    else:
        hint = nearest(program, [*LAUNCHERS, "python"])
        if "=" in program:
            hint = "; write it as env.NAME=VALUE before the --"
        raise ConfigError(
            f"`{program}`: not a program that can be launched on a chosen stack{hint}"
        )
    module = argv[1] if argv[:1] == ["-m"] and len(argv) > 1 else ""
    plain = module not in STARTS_RANKS
    users_module = module if plain else ""
    file = next((word for word in argv if word.endswith(".py")), None)
    script = checked_script(file) if file and not users_module else None
    words_of_name = [word for word in argv if not word.startswith("-")] or [program]
    name = script.stem if script else (users_module or words_of_name[-1]).rpartition(".")[2]
    return Command(
        tuple(argv), _ranks(argv, plain, nproc, words), plain, name, shlex.join(words), script
    )


def _ranks(argv: Sequence[str], plain: bool, nproc: int | None, words: Sequence[str]) -> int:
    if plain:
        return 1
    counts = [
        (found[1] or next_)
        for word, next_ in zip(argv, [*argv[1:], ""])
        if (found := _COUNT.fullmatch(word))
    ]
    usual = "1" if argv[1].startswith("torch.distributed") else ""
    count = counts[0] if counts else usual
    starts = int(count) if count.isdecimal() and int(count) else nproc
    if starts is None:
        raise ConfigError(
            f"`{shlex.join(words)}` does not set its number of ranks. Give --nproc N before the --."
        )
    if nproc not in (None, starts):
        raise ConfigError(
            f"`{shlex.join(words)}` starts {starts} ranks, but --nproc is {nproc}. Leave --nproc"
            " out."
        )
    return starts


def with_ranks(words: Sequence[str], nproc: int) -> list[str]:
    """Return a command line that starts another number of ranks.

    Raises ConfigError if it has no option for that.
    """
    for at, word in enumerate(words):
        if found := _COUNT.fullmatch(word):
            option = (
                [f"{word.partition('=')[0]}={nproc}"]
                if found[1] is not None
                else [word, str(nproc)]
            )
            return [*words[:at], *option, *words[at + len(option) :]]
    advice = "Write torchrun --nproc-per-node N before the script"
    raise ConfigError(f"`{shlex.join(words)}` has no option for its number of ranks. {advice}.")


def checked_script(word: str) -> Path:
    """Return the script's path; raise ConfigError if the file is missing or has a syntax error."""
    path = Path(word).expanduser().absolute()
    if not path.is_file():
        beside = [other.name for other in path.parent.glob("*.py")]
        what = "is a folder" if path.is_dir() else "there is no such script"
        raise ConfigError(f"{word}: {what}{nearest(path.name, beside) if beside else ''}")
    check_syntax(path, word)
    return path


# -- the case


@dataclass(frozen=True)
class Script:
    """Hold a command, its failure, and how it is launched."""

    command: Command
    failure: ScriptFailure
    results: Path
    deadline_s: float = DEADLINE_S
    env: tuple[tuple[str, str], ...] = ()
    checks: tuple[str, ...] = ()
    # Variables of its trace (launch/worker/tracer); None: it has none.
    trace: Mapping[str, str] | None = None
    # A run with noise may be forked from a process that has imported its packages.
    forks: bool = True

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.command.name.lower()).strip("-") or "script"

    def case(self) -> AdhocCase:
        command = self.command
        failure = self.failure
        with_noise = self.trace is not None and NOISE_SEED in self.trace
        imports = _preloaded(command) if with_noise and self.forks and not self.env else None
        launch = schema.Launch(
            world_size=command.nproc,
            deadline=failure.hang_s or self.deadline_s,
            env=dict(self.env),
            cold_start_reason="a user's script" if imports is None else None,
            process_group=False,
            imports=imports or [],
        )
        checks = [CHECKS[name][0] for name in self.checks] or ["exit code"]
        case = AdhocCase(
            slug=self.slug,
            title=command.shown,
            argv=command.argv,
            path=command.script,
            plain=command.plain,
            single=command.single,
            failure=failure.text,
            log=failure.log,
            metric=failure.metric,
            min_ranks=1,
            allow_gpu_sharing=True,
            launch=launch,
            axes=schema.Axes(model=[MODEL], strategy=[STRATEGY]),
            pass_criteria=schema.PassCriteria(kind="training", checks=checks),
            checks=self.checks,
            trace=self.trace and dict(self.trace),
            variants={VARIANT: schema.Variant(role="unfixed")},
        )
        return case.model_copy(
            update={"signatures": list(failure.signatures)}
        )  # a user's script may raise it itself

    def request(self, stack: str = "current", repeat: int | None = None) -> Request:
        """Return the request for the script's one cell."""
        command = self.command
        case = self.case()
        # Everything that the outcome depends on. Of the failure only what is read from logs: the
        # rest can be regraded.
        options: dict[str, Any] = {
            "command": list(command.argv),
            "folder": os.getcwd(),
            "code": _code(command.script),
            "log": case.log,
            "metric": case.metric.pattern if case.metric else "",
            "deadline": case.launch.deadline,
        }
        if self.checks:
            options["checks"] = list(self.checks)
        if self.trace is not None:
            options["trace"] = [*self.trace.items(), _code(TRACER)]
        overrides = (f"id={short_hash(json.dumps([options, self.env, command.nproc]))[:10]}",)
        raw = case.model_dump(mode="json", include={"slug", "launch", "pass_criteria", "steps"})
        raw["variants"] = {VARIANT: {}}
        model = {
            "slug": MODEL,
            "title": "the script's own",
            "hub": "",
            "model_type": "",
            "config": {},
        }
        how = {
            "slug": STRATEGY,
            "title": STRATEGY,
            "options": options,
            "invariants": {"parameters": "whole"},
        }
        strategy = Strategy.model_validate({**how, "options": {}, "allow_gpu_sharing": True})
        shipped = load()
        catalogue = AdhocCatalogue(
            {case.slug: case},
            {MODEL: Model.model_validate(model)},
            {STRATEGY: strategy},
            shipped.stacks,
            shipped.hardware,
            {"case": {case.slug: raw}, "model": {MODEL: model}, "strategy": {STRATEGY: how}},
        )
        settings = RunSettings(results=str(self.results / "scripts"), repeat=repeat)
        cell = Cell(case.slug, MODEL, STRATEGY, (), stack, "auto", command.nproc, overrides)
        return AdhocRequest(
            (), catalogue, settings, [Selection(case=[case.slug], stack=[stack])], cell
        )


@dataclass(frozen=True)
class AdhocCatalogue(Catalogue):
    """Serve the one case of a user's script as a catalogue."""

    def script(self, case: Case) -> Path:
        assert isinstance(case, AdhocCase)
        return case.path or Path(__file__)  # the file of a module is unknown here


@dataclass(frozen=True)
class AdhocRequest(Request):
    cell: Cell

    @property
    def cells(self) -> list[Cell]:
        return [replace(self.cell, stack=name) for each in self.selections for name in each.stack]


def _code(script: Path | None) -> str:
    """Hash the script and what it imports."""
    if script is None:
        return ""
    digest = hashlib.sha256()
    files = _files(script)
    for path in files:
        name = os.path.relpath(path, files[0].parent)
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def _files(script: Path) -> list[Path]:
    """Return the script and the files that it imports, directly or not.

    Imports are looked up in its folder, the working directory and PYTHONPATH.
    """
    seen = dict[Path, None]()
    waiting = [script.resolve()]
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    others = (Path(path).resolve() for path in (".", *paths))
    roots = dict.fromkeys([waiting[0].parent, *others])
    for path in waiting:
        if path in seen or not path.is_file():
            continue
        seen[path] = None
        for name in sorted(_imported(path, file_state(path))):
            for module in (root / name for root in roots):
                waiting += [module.with_suffix(".py"), *sorted(module.rglob("*.py"))]
    return list(seen)


def _preloaded(command: Command) -> list[str] | None:
    """Return the packages that a fork server may import before the script; None if it may not.

    It may not if torchrun does not start the script itself, or if the script may set what those
    packages read, or import another package by their name.
    """
    script = command.script
    torchrun = command.argv[:3] == ("-m", LAUNCHERS["torchrun"], "--standalone")
    if script is None or not torchrun:
        return None
    others = (script.parent / each for name in PRELOADED for each in (name, f"{name}.py"))
    files = _files(script)
    if any(path.exists() for path in others) or any(
        _IMPORTS_DIFFER.search(path.read_bytes()) for path in files
    ):
        return None
    imported = {name for path in files for name in _imported(path, file_state(path))}
    return [name for name in PRELOADED[1:] if name in imported]


@functools.lru_cache(maxsize=1024)
def _imported(path: Path, state: tuple[int, ...]) -> set[str]:
    """Return the first parts of the names of the modules that a file imports."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    names = [node.name for node in nodes if isinstance(node, ast.alias)]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names} - {"*"}


def in_shell(stack: Stack) -> Stack:
    """Return the stack as a script imports it: PYTHONPATH may hide some of its packages."""
    hidden = shadowed(stack, os.environ.get("PYTHONPATH", ""))
    if not hidden:
        return stack
    changed = (*stack.changed, *(change.note for change in hidden))
    return replace(
        stack, changed=changed, key=short_hash(stack.key, *(change.digest for change in hidden))
    )


def script_results(given: str | None) -> Path:
    return Path(given).absolute() if given else project.current().results / "scratch"


# -- which known failure it is


def known_failures(attempts: Sequence[GradedAttempt], cases: Iterable[Case]) -> list[str]:
    """Return the slugs of the cases with a signature that matches the first attempt which failed.

    Only exceptions count: the meaning of a check or a log line depends on the case's own script."""
    failed = next(
        (made for made in attempts if made["outcome"]["outcome"] not in ("passed", "infra_error")),
        None,
    )
    if failed is None:
        return []
    attempt = Evidence(failed["observation"])
    failures = find_failures(attempt)

    def matches(case: Case) -> bool:
        return any(
            s.kind == "exception" and match_attempt(s, attempt, failures) for s in case.signatures
        )

    return [case.slug for case in cases if matches(case)]
