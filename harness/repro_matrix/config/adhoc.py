"""A user's script as an ad-hoc case: one variant, and a signature built from the command line's options."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from repro_matrix.config.schema import Axes, Case, Launch, PassCriteria, Signature, Variant
from repro_matrix.config.vocabulary import Strict
from repro_matrix.errors import ConfigError

VARIANT = "unfixed"
MODEL = "own"  # slug of the model axis: the script brings its own
INFINITE = 1e308  # stands for infinity, which JSON does not have


class Metric(Strict):
    """A number that the script prints. It shows the failure when it compares so with the limit; without ``op`` a
    search finds the limit between its two ends."""

    name: str
    pattern: str  # group 1 is the number
    op: Literal["", "<", "<=", ">", ">="] = ""
    limit: float = 0.0

    def violated_by(self, value: float) -> bool:
        comparisons = {"<": value < self.limit, "<=": value <= self.limit,
                       ">": value > self.limit, ">=": value >= self.limit}  # fmt: skip
        return comparisons.get(self.op, False)


class AdhocCase(Case):
    """``argv`` follows the stack's interpreter; ``title`` is the command as a person writes it."""

    argv: tuple[str, ...]
    path: Path | None = None  # the script; None: a module
    plain: bool = False  # no launcher: the command's one process is rank 0
    single: bool = False  # it may be one process without a rank
    failure: str = ""  # the failure in words; "": any failure
    log: str = ""  # the lines to keep from the ranks' logs
    metric: Metric | None = None

    @model_validator(mode="after")
    def _coherent(self) -> AdhocCase:
        return self  # one variant is enough, and the failure may be any


def adhoc_case(
    slug: str,
    title: str,
    argv: tuple[str, ...],
    *,
    nproc: int,
    signatures: tuple[Signature, ...] = (),
    env: dict[str, str] | None = None,
    deadline: float,
    **values: object,
) -> AdhocCase:
    """Build the case. Signatures are taken as they are: a user's script may raise its failure itself."""
    launch = Launch(
        world_size=nproc, deadline=deadline, env=env or {}, cold_start_reason="a user's script", process_group=False
    )
    case = AdhocCase(
        slug=slug,
        title=title,
        argv=argv,
        pass_criteria=PassCriteria(kind="training", checks=["exit code"]),
        min_ranks=1,
        allow_gpu_sharing=True,
        launch=launch,
        axes=Axes(model=[MODEL], strategy=["script"]),
        variants={VARIANT: Variant()},
        **values,
    )
    return case.model_copy(update={"signatures": list(signatures)})


def check_syntax(path: Path, shown: str = "") -> None:
    """Raise ConfigError, which names the line, if a file is not Python. ``shown``: the path as written."""
    name = shown or str(path)
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigError(f"{name}:{error.lineno}: {error.msg}: {line}") from None
    except ValueError as error:  # null bytes
        raise ConfigError(f"{name}: not a Python script: {error}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
