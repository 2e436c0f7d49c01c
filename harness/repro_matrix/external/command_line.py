"""The command of a user's script: the script under torchrun, or a command line of a known launcher. Pure, except that
it reads the script's file.

The stack's interpreter replaces the launcher's program (``torchrun`` becomes ``python -m torch.distributed.run``), so
that the same command runs on any stack.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro_matrix.config.adhoc import check_syntax
from repro_matrix.errors import ConfigError, nearest

# program -> module that is its command line
LAUNCHERS = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}
PROGRAMS = (*LAUNCHERS, "accelerate", "python")
# modules that start ranks; any other module or file is itself the one process
STARTS_RANKS = {*LAUNCHERS.values(), "torch.distributed.launch", "accelerate.commands.launch"}
_COUNT = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|num[-_]accelerators)(?:=(.*))?")


@dataclass(frozen=True)
class Command:
    """``argv``: arguments of the stack's interpreter. ``shown``: the command as the user writes it."""

    argv: tuple[str, ...]
    nproc: int  # expected ranks
    plain: bool  # no launcher: the command's one process is rank 0
    name: str  # of the script or module, and of its results
    shown: str
    script: Path | None = None

    @property
    def single(self) -> bool:
        """Whether it may be one process without a rank, as accelerate starts a script on one device."""
        return self.plain or self.argv[:2] == ("-m", "accelerate.commands.launch")


def is_script(word: str) -> bool:
    """Return whether a command's first argument names a script: a case's slug has no slash and does not end in .py."""
    return word.endswith(".py") or "/" in word


def of_script(word: str, nproc: int, args: str = "", module: bool = False) -> Command:
    """Return the command of a script, or of a module's dotted name, under torchrun."""
    try:
        rest = shlex.split(args)
    except ValueError as error:
        raise ConfigError(f"--args {args!r}: {error}") from None
    script = None if module else checked(word)
    options = ["--standalone", "--nproc-per-node", str(nproc), *(["--module"] if module else [])]
    name = word.rpartition(".")[2] if module else Path(word).stem
    shown = shlex.join(["torchrun", *options, word, *rest])
    target = word if script is None else str(script)
    return Command(("-m", LAUNCHERS["torchrun"], *options, target, *rest), nproc, False, name, shown, script)


def of_words(words: Sequence[str], nproc: int | None = None) -> Command:
    """Return a command line given after ``--``. ``nproc``: expected ranks, if the command line does not set them."""
    if not words:
        raise ConfigError("No command after --. Write one, such as torchrun --nproc-per-node 2 train.py.")
    program, rest = Path(words[0]).name, list(words[1:])
    if re.fullmatch(r"python(3(\.\d+)?)?", program):
        argv = rest
    elif program in LAUNCHERS:
        argv = ["-m", LAUNCHERS[program], *rest]
    elif program == "accelerate":
        if not rest or rest[0] != "launch":
            raise ConfigError(f"`{shlex.join(words)}` starts no ranks. Use `accelerate launch`.")
        argv = ["-m", "accelerate.commands.launch", *rest[1:]]
    else:
        hint = "; write it as env.NAME=VALUE before the --" if "=" in program else nearest(program, PROGRAMS)
        raise ConfigError(f"`{words[0]}` cannot be launched on a stack of its own{hint}")
    plain = not (argv[:1] == ["-m"] and len(argv) > 1 and argv[1] in STARTS_RANKS)
    module = argv[1].rpartition(".")[2] if plain and argv[:1] == ["-m"] and len(argv) > 1 else ""
    file = next((word for word in argv if word.endswith(".py")), None)
    script = checked(file) if file and not module else None
    name = script.stem if script else module or next((w for w in reversed(argv) if not w.startswith("-")), program)
    return Command(tuple(argv), _ranks(argv, plain, nproc, words), plain, name, shlex.join(words), script)


def _ranks(argv: Sequence[str], plain: bool, nproc: int | None, words: Sequence[str]) -> int:
    if plain:
        return 1
    counts = [(found[1] or next_) for word, next_ in zip(argv, [*argv[1:], ""]) if (found := _COUNT.fullmatch(word))]
    usual = "1" if argv[1].startswith("torch.distributed") else ""
    count = counts[0] if counts else usual
    starts = int(count) if count.isdecimal() and int(count) else nproc
    if starts is None:
        raise ConfigError(f"`{shlex.join(words)}` does not set its number of ranks. Give --nproc N before the --.")
    if nproc not in (None, starts):
        raise ConfigError(f"`{shlex.join(words)}` starts {starts} ranks, but --nproc is {nproc}. Leave --nproc out.")
    return starts


def checked(word: str) -> Path:
    """Return the script's path. Raises ConfigError: no such file, or a syntax error, with its line."""
    path = Path(word).expanduser().absolute()
    if not path.is_file():
        beside = [str(other.name) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        what = "is a folder" if path.is_dir() else "there is no such script"
        raise ConfigError(f"{word}: {what}{nearest(path.name, beside) if beside else ''}")
    check_syntax(path, word)
    return path
