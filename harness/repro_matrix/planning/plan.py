"""Plan what is launched for each cell, what is skipped and why, and the cells of a shard.

Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from repro_kit.settings import resolve, variant_axis

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import AdhocCase, Case, Model, Strategy, Variant
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ConfigError
from repro_matrix.planning.cells import (
    Cell,
    Skip,
    parse_requirement,
    unmet_requirement,
    unsuitable,
    variants_of,
)
from repro_matrix.text import counted

if TYPE_CHECKING:
    from repro_matrix.environment.machine import Machine
    from repro_matrix.environment.profiles import Profile
    from repro_matrix.environment.stacks import Stack
    from repro_matrix.planning.memory import MemoryPlan

NOT_OF_RANKS = ("memory", "source_files")  # keys of a strategy that change no measurement
TORCH = "torch"  # what a skip for lack of it needs
MEMORY_PER_RANK_GB = 0.5  # a rank with torch and transformers imported: the least that it needs


@dataclass(frozen=True)
class VariantPlan:
    """One variant of one cell: its settings and attempts, or the reason it is skipped."""

    cell: Cell
    variant: str
    stack: str
    settings: dict[str, Any]
    world_size: int
    gpus: int
    deadline: float
    repeat: int
    skip: Skip | None
    fingerprint: str
    memory: MemoryPlan | None = None  # what it needs, where that is known
    # of a GPU on which other attempts may run at the same time; 0: it needs its GPUs alone
    share_mb: int = 0
    expected_s: float | None = None  # how long it takes at full size, roughly
    code: str = ""  # what its ranks execute, hashed when it was planned

    @property
    def skipped(self) -> str | None:
        """The reason, for people."""
        return self.skip.reason if self.skip else None


@dataclass(frozen=True)
class CellPlan:
    cell: Cell
    profile: Profile
    variants: tuple[VariantPlan, ...]
    # Fingerprints of the variants that were not requested, as they would be launched now (of those
    # whose stack is there): their recorded attempts stay only while they are current.
    unasked: Mapping[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> str | None:
        """The reason when nothing of the cell runs: that of its first variant."""
        return self.variants[0].skipped


@dataclass(frozen=True)
class Planner:
    """Plans all cells of a run.

    ``profiles``: by ``Cell.hardware``. ``stacks``: name -> the stack, or the reason why it is not
    available. ``code``:
    case -> hash of its script and the kit.
    """

    catalogue: Catalogue
    settings: RunSettings
    profiles: Mapping[str, Profile]
    machine: Machine
    stacks: Mapping[str, Stack | str]
    code: Mapping[str, str]

    def plan(self, cells: Iterable[Cell]) -> list[CellPlan]:
        """Plan each cell. Raises ConfigError for more ranks than this machine can ever hold."""
        return [self._cell(cell) for cell in cells]

    def _cell(self, cell: Cell) -> CellPlan:
        memory = self.machine.memory_gb
        if cell.ranks * MEMORY_PER_RANK_GB > memory:
            fits = int(memory / MEMORY_PER_RANK_GB)
            raise ConfigError(
                f"ranks={cell.ranks}: this machine's {memory:.4g} GiB hold at most {fits}"
            )
        case = self.catalogue.cases[cell.case]
        plans = {name: self._variant(cell, case, name) for name in case.variants}
        requested = [plans.pop(name) for name in variants_of(case, self.settings.variants)]
        variants = [
            requested[0],
            *(_unless_equal(variant, requested[0], case) for variant in requested[1:]),
        ]
        there = {name for name, stack in self.stacks.items() if not isinstance(stack, str)}
        unasked = {
            name: variant.fingerprint for name, variant in plans.items() if variant.stack in there
        }
        return CellPlan(cell, self.profiles[cell.hardware], skip_with_first(variants), unasked)

    def _variant(self, cell: Cell, case: Case, variant: str) -> VariantPlan:
        raw, profile, run = (
            self.catalogue.raw["case"][cell.case],
            self.profiles[cell.hardware],
            self.settings,
        )
        model = variant_axis(raw, variant, "model", cell.model)
        strategy = variant_axis(raw, variant, "strategy", cell.strategy)
        spec = case.variants[variant]
        stack_name = spec.stack or cell.stack
        stack = self.stacks.get(stack_name, f"stack {stack_name} is not built")
        settings = resolve(
            raw,
            variant,
            model=self.catalogue.raw["model"][model],
            strategy={
                key: value
                for key, value in self.catalogue.raw["strategy"][strategy].items()
                if key not in NOT_OF_RANKS
            },
            flags=dict(cell.flags),
            scale=run.scale,
            weights=run.weights,
            world_size=cell.ranks,
            steps=run.steps,
            seed=run.seed,
            device=profile.accelerator,
            backend=case.launch.backend or profile.backend,
        )
        nodes = spec.nodes or run.nodes or case.launch.nodes
        if nodes > 1:
            settings["nodes"] = nodes
            if not (spec.devices or case.launch.devices):
                settings["devices"] = -(-settings["world_size"] // nodes)
        if profile.shared:
            settings["devices"] = 1
        if run.env:
            settings["env"] = dict(run.env)
        env = {**case.launch.env, **run.env, **spec.env}  # a variant is what its file says
        versions = {} if isinstance(stack, str) else dict(stack.versions)
        if not isinstance(stack, str) and stack.changed:
            versions["changed"] = stack.key
        code = self.code.get(case.slug, "")
        return VariantPlan(
            cell=cell,
            variant=variant,
            stack=stack_name,
            settings=settings,
            world_size=settings["world_size"],
            gpus=settings["devices"] if profile.accelerator == "cuda" else 0,
            deadline=run.deadline or case.launch.deadline,
            repeat=run.repeat or case.repeat,
            skip=self._skip(cell, case, spec, settings, stack),
            fingerprint=fingerprint({**settings, "env": env}, code, versions, profile),
            code=code,
        )

    def _skip(
        self,
        cell: Cell,
        case: Case,
        variant: Variant,
        settings: Mapping[str, Any],
        stack: Stack | str,
    ) -> Skip | None:
        """Return why this variant cannot run here by its declared needs, or None."""
        profile = self.profiles[cell.hardware]
        model = self.catalogue.models[settings["model"]["slug"]]
        strategy = self.catalogue.strategies[settings["strategy"]["slug"]]
        for skip in unsuitable(case, strategy, settings, cell.ranks, profile):
            return skip
        if isinstance(stack, str):
            reason = f"needs stack {variant.stack}: {stack}" if variant.stack else stack
            return Skip("stack", reason, (f"stack {variant.stack or cell.stack}",))
        if "torch" not in stack.versions and not isinstance(case, AdhocCase):
            return Skip("packages", no_torch(stack), (TORCH,))
        nodes = settings.get("nodes", 1)
        have = nodes if self.settings.node_command else self.machine.nodes
        for skip in wrong_nodes(case, nodes, settings["world_size"], have):
            return skip
        needed = needs(case, variant, model, strategy, profile.kinds)
        named = {parse_requirement(item).name for item in needed}
        imported = (module.partition(".")[0] for module in case.launch.imports)
        needed += [name for name in imported if name not in named]
        failed = stack.probe.get("imports", {}) if profile.accelerator == "cuda" else {}
        missing = dict(stack.missing)
        for name, error in failed.items():
            missing[name] = f"{name}, which does not import with a GPU visible: {error}"
        versions = {name: version for name, version in stack.versions.items() if name not in failed}
        unmet = {item: text for item in needed if (text := unmet_requirement(item, versions))}
        if not unmet:
            return None
        unusable = {name for item in unmet if (name := parse_requirement(item).name) in missing}
        texts = [missing.get(parse_requirement(item).name, text) for item, text in unmet.items()]
        reason = (
            f"stack {stack.name}: on {profile.kinds[-1]} needs {', '.join(dict.fromkeys(texts))}"
        )
        if case.requires.stack not in (None, stack.name):
            reason += f"; needs stack {case.requires.stack}"
        if case.requires.reason and unmet.keys() & set(case.requires.packages):
            reason += f" ({case.requires.reason})"
        return Skip("build" if unusable else "packages", reason, tuple(unmet))


def wrong_nodes(case: Case, nodes: int, ranks: int, have: int) -> Iterator[Skip]:
    """Yield each reason why a variant cannot run on so many nodes. ``have``: how many are here."""
    if nodes == 1:
        return
    if isinstance(case, AdhocCase):
        yield Skip("nodes", f"nodes={nodes}: a script's own command says on which nodes it runs")
    if ranks % nodes:
        yield Skip("ranks", f"{counted(ranks, 'rank')} cannot be divided over {nodes} nodes")
    if nodes > have:
        how = "Run it with executor=slurm or in an allocation of SLURM, or set node_command"
        reason = f"needs {nodes} nodes; this run has {have}. {how}"
        yield Skip("nodes", reason, (f"{nodes} nodes",))


def needs(
    case: Case, variant: Variant, model: Model, strategy: Strategy, kinds: Sequence[str]
) -> list[str]:
    """Return the packages that a variant needs on hardware of these kinds.

    With those of its case, its model and its strategy.
    """
    return [
        *case.requires.packages,
        *variant.needs_on(*kinds),
        *model.requires,
        *strategy.needs_on(*kinds),
    ]


def no_torch(stack: Stack) -> str:
    """Say that a stack cannot run any case, and how to change that."""
    command = f"uv pip install --python {stack.python} torch transformers accelerate peft deepspeed"
    return f"stack {stack.name} has no torch. Install it: {command}"


def skip_with_first(variants: Sequence[VariantPlan]) -> tuple[VariantPlan, ...]:
    """Skip all variants if the first one is skipped.

    Without the unfixed variant a fix proves nothing.
    """
    first = variants[0].skip
    return tuple(variant if variant.skip else replace(variant, skip=first) for variant in variants)


def newer_release(stack: str) -> str:
    return f"the fix is a newer release, which stack {stack} already has"


def _unless_equal(variant: VariantPlan, unfixed: VariantPlan, case: Case) -> VariantPlan:
    """Skip a variant that the selection makes equal to the unfixed one.

    ``four-ranks`` with ranks=4 proves nothing.
    """
    equal = {
        **variant.settings,
        "variant": unfixed.variant,
    } == unfixed.settings and variant.stack == unfixed.stack
    if variant.skip or unfixed.skip or not equal or case.variants[variant.variant].env:
        return variant
    reason = (
        f"the same as {unfixed.variant} on stack {unfixed.stack} with"
        f" {counted(unfixed.world_size, 'rank')}"
    )
    if case.variants[variant.variant].stack:
        reason = newer_release(unfixed.stack)
    return replace(variant, skip=Skip("same", reason))


def fingerprint(
    settings: Mapping[str, Any], code: str, versions: Mapping[str, str], profile: Profile
) -> str:
    """Hash what a variant's result depends on.

    A recorded attempt with the same fingerprint need not run again.
    """
    gpus = [gpu.name for gpu in profile.gpus]
    text = json.dumps(
        [settings, code, sorted(versions.items()), profile.accelerator, gpus], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- shards: one selection over several machines (``shard=2/8``)
#
# Every machine computes the same shards independently of the others: from the selection and from
# durations that the commit itself holds (the published baseline), never from what a machine has
# measured. The longest cell goes to the shard that has least so far (Graham 1969), so that no shard
# is longer than the shortest by more than its longest cell.

Shard = tuple[int, int]  # its number, from 1, and how many there are


def parse_shard(text: str | None) -> Shard | None:
    """Parse ``2/8`` into (2, 8).

    Raises ConfigError.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", str(text))
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"shard={text}: not PART/PARTS. Write shard=2/8 (from 1/8 to 8/8).")
    return number, count


def select_shard(cells: Sequence[Cell], shard: Shard, seconds: Mapping[Cell, float]) -> list[Cell]:
    """Return this shard's cells, in their order.

    Raises ConfigError if there are more shards than cells.
    """
    number, count = shard
    if count > len(cells):
        raise ConfigError(
            f"shard={number}/{count}: the selection has only {len(cells)} cells. Use fewer shards."
        )
    loads = [0.0] * count
    selected = set()
    for cell in sorted(
        cells, key=lambda cell: (-seconds[cell], cell.key, cell.stack, cell.hardware)
    ):
        least = loads.index(min(loads))
        loads[least] += seconds[cell]
        if least == number - 1:
            selected.add(cell)
    return [cell for cell in cells if cell in selected]
