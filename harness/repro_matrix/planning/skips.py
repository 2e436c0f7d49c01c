"""Why a variant is not launched: the kinds, their sentences, and the checks of what a variant declares. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repro_matrix.config.axes import Strategy
from repro_matrix.config.schema import Case
from repro_matrix.records.document import Skip as Stored
from repro_matrix.records.document import SkipKind

if TYPE_CHECKING:
    from repro_matrix.environment.profiles import Profile

# One sentence per kind; {data} is filled in by ``skip``.
SENTENCES: dict[SkipKind, str] = {
    "ranks": "needs {needed} ranks; ranks={ranks}",
    "tp_size": "{reason}; tp_size={size}",
    "gpus": "needs {needed} GPUs; hardware {profile} has {count}{why}",
    "accelerator": "runs on the CPU only (accelerator: cpu); hardware {profile} is for GPUs",
    "shared": "ranks that share one GPU: {subject} does not declare `shared`",
    "gpu_mode": "its ranks compute on the same GPUs, and GPU {index} is in {mode} mode (nvidia-smi -c 0)",
    "flags": "flags.{flag}={value} is for {strategies}; the strategy is {strategy}",
    "divisible": "{count} {key} do not divide over {ranks} ranks",
    "stack": "{reason}",
    "packages": "stack {stack}: on {accelerator} needs {unmet}{known}{why}",
    "build": "stack {stack}: on {accelerator} needs {unmet}{known}{why}",
    "memory": "{reason}",
    "weights": "{reason}",
    "same": "the same as {variant} on stack {stack} with {ranks} ranks",
    "unknown": "{reason}",
}


@dataclass(frozen=True)
class Skip:
    """``reason``: for people. ``needs``: what would have to be there, as declared (``torch>=2.4``, ``2 GPUs``)."""

    kind: SkipKind
    reason: str
    needs: tuple[str, ...] = ()

    def to_json(self) -> Stored:
        return {"kind": self.kind, "requires": list(self.needs)}


def skip(kind: SkipKind, needs: tuple[str, ...] = (), **data: Any) -> Skip:
    return Skip(kind, SENTENCES[kind].format(**data), needs)


def unsuitable(
    case: Case, strategy: Strategy, settings: Mapping[str, Any], ranks: int, profile: Profile
) -> Skip | None:
    """Return why a variant with these settings measures nothing, whatever the stack has; or None."""
    return (
        wrong_ranks(case, ranks)
        or wrong_tp_size(strategy, settings)
        or wrong_hardware(case, strategy, settings["devices"], settings["world_size"], profile)
        or wrong_flags(case, settings)
        or (indivisible(strategy, settings) if case.requires.divisible else None)
    )


def wrong_ranks(case: Case, ranks: int) -> Skip | None:
    if ranks < case.min_ranks:
        return skip("ranks", needed=f"at least {case.min_ranks}", ranks=ranks)
    if ranks != case.launch.world_size and not case.supports_other_world_sizes:
        needed = f"exactly {case.launch.world_size} (the case does not declare `scales`)"
        return skip("ranks", needed=needed, ranks=ranks)
    return None


def wrong_tp_size(strategy: Strategy, settings: Mapping[str, Any]) -> Skip | None:
    size, ranks = settings["tp_size"], settings["world_size"]
    if not strategy.must_divide:
        reason = f"strategy {strategy.slug} has no tensor parallelism"
        return skip("tp_size", reason=reason, size=size) if size > 1 else None
    reason = f"tensor parallelism is over all {ranks} ranks here"
    return None if size == ranks else skip("tp_size", reason=reason, size=size)


def wrong_hardware(case: Case, strategy: Strategy, devices: int, ranks: int, profile: Profile) -> Skip | None:
    """Return why a variant with these devices and ranks cannot run on this hardware, or None."""
    have = {"profile": profile.name, "count": len(profile.gpus) or "none"}
    if case.requires.gpus > len(profile.gpus) or (case.requires.gpus and profile.shared):
        why = f" ({case.requires.reason})" if case.requires.reason else ""
        return skip("gpus", (f"{case.requires.gpus} GPUs",), needed=case.requires.gpus, why=why, **have)
    if profile.accelerator != "cuda":
        return None
    if case.accelerator == "cpu":
        return skip("accelerator", profile=profile.name)
    if profile.shared and not (case.allow_gpu_sharing and strategy.allow_gpu_sharing):
        return skip("shared", subject="the case" if not case.allow_gpu_sharing else f"strategy {strategy.slug}")
    if devices > len(profile.gpus):
        return skip("gpus", (f"{devices} GPUs",), needed=devices, why="", **have)
    exclusive = next((gpu for gpu in profile.gpus if gpu.mode.startswith("exclusive")), None)
    if case.requires.requires_default_compute_mode and ranks > 1 and exclusive:
        return skip("gpu_mode", index=exclusive.index, mode=exclusive.mode)
    return None


def wrong_flags(case: Case, settings: Mapping[str, Any]) -> Skip | None:
    """Return why a flag's value does not exist in this strategy, or None."""
    slug = settings["strategy"]["slug"]
    for name, flag in case.flags.items():
        value = settings["flags"].get(name)
        if flag.strategies is not None and slug not in flag.strategies and value not in (flag.default, flag.full):
            return skip("flags", flag=name, value=value, strategies=", ".join(flag.strategies), strategy=slug)
    return None


def indivisible(strategy: Strategy, settings: Mapping[str, Any]) -> Skip | None:
    """Return why the model cannot be split over ``tp_size`` ranks, or None."""
    size, config = settings["tp_size"], settings["model"]["config"]
    for key in strategy.must_divide:
        if config.get(key, 0) % size:
            name = key.removeprefix("num_").replace("_", " ")
            return skip("divisible", count=config[key], key=name, ranks=size)
    return None


def unmet_requirement(text: str, versions: Mapping[str, str]) -> str | None:
    """Describe a requirement that the versions do not meet; None when they do."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    requirement = Requirement(text)
    have = versions.get(requirement.name) or versions.get(requirement.name.replace("_", "-"))
    if have is None:
        return f"{text}, which it does not have"
    try:
        satisfied = requirement.specifier.contains(Version(have), prereleases=True)
    except InvalidVersion:
        satisfied = not requirement.specifier
    return None if satisfied else f"{text}, and it has {have}"
