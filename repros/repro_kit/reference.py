"""Make the two runs of a reference, plain and perturbed, once or take them from an earlier attempt.

The first two ranks share the work and write the results into the attempt's folder, tensor by tensor; no rank
waits for them before the first check. Where the memory plan says that two do not fit (settings ``reference``: "turns"),
the first rank does both; where not even one fits, it does both with the weights on disk ("layers",
repro_kit/offloaded_model.py).

Attempts of one run that need the same reference share it (settings ``references``: the run's folder and the attempt's
name; absent in a run by hand). Rank 0 looks it up under a key of everything that it depends on
(cache_key.py) and informs the others. If there is none, it is made and stored when complete; attempts do not wait for
each other. The fact ``reference`` in the record names the attempt that made it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional

from repro_kit import cache_key as depends
from repro_kit import tracing
from repro_kit.norms import digest, norm
from repro_kit.recipes import PLAIN, Alone, Recipe, evaluated
from repro_kit.reference_cache import Common, short
from repro_kit.run import Run
from repro_kit.single_process import Perturbed, Seen, Start, train_alone, unit
from repro_kit.tensor_store import Shelf, Writer, index_of

import torch
from torch import nn

Batch = Callable[[Run, int, int], dict[str, torch.Tensor]]
_made: list[str] = []  # references of this process; every rank makes the same number
WAIT_S = 120.0  # seconds to wait for the results of the other rank


class Runs:
    """The training of ``model`` from ``start`` for ``run.steps`` steps on the batches of ``ranks`` at once."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        start: Start,
        ranks: int,
        lr: float,
        make_batch: Batch,
        computes_in: Optional[torch.dtype],
        recipe: Recipe = PLAIN,
    ) -> None:
        self.recipe = recipe
        self.run, self.start, self.ranks, self.lr = run, start, ranks, lr
        self.make_batch, self.computes_in = make_batch, computes_in
        self.norms: list[float] = []  # of the last training's gradients, where they are clipped
        self._found: dict[str, Any] = {}
        self._wait_s = float(run.settings.get("limit_s") or WAIT_S)
        alone = run.world_size == 1
        helpers = min(2, run.world_size)
        where = run.settings.get("reference")
        if where in ("turns", "layers"):
            helpers = 1
        token = "one" if alone else os.environ.get("MASTER_PORT", "0")
        _made.append(token)  # a second reference in this process must not be mistaken for the first
        self.folder = run.work_dir / f"{run.case}-reference-{token}-{_launch()}-{len(_made)}"
        self.on_disk = self.folder.with_name(f"{self.folder.name}-weights") if where == "layers" else None
        if self._taken(model):
            return
        if run.rank == 0:
            tracing.side("trusted")
            self._plain()
            for seed, name in enumerate(tracing.NOISE if tracing.active() else (), 1):
                tracing.side(name, seed)
                self._train(self.start, lambda steps, model: None)
        if run.rank == helpers - 1:
            tracing.side("perturbed")
            self._perturbed()
            self._share()
        tracing.side()

    # --- results

    def truth(self) -> dict[str, Any]:
        """Return the plain run: ``losses`` and ``norms`` of clipped gradients by step, ``start`` (a digest), and for
        each tensor the norms of its initial ``values`` and of its movement by the ``first`` and until the ``last``
        step.
        """
        return self._take("truth")

    def noise(self) -> dict[str, Any]:
        """Return how far the perturbed run is from the plain one: ``losses`` and ``norms`` by step, ``first`` and
        ``last`` by tensor."""
        return self._take("noise")

    def after(self, when: str) -> Mapping[str, torch.Tensor]:
        """Return the plain run's parameters after its ``first`` or ``last`` step; frozen ones are stored once."""
        first = self._shelf("first")
        return Layered(self._shelf("last"), first) if when == "last" and self.run.steps > 1 else first

    # --- computation

    def _plain(self) -> None:
        found: dict[str, Any] = {"first": {}, "values": {}}

        def after(steps: int, model: Seen) -> None:
            if steps == 0:
                found["start"] = digest(model.named_parameters())
            if steps == self.run.steps and self.recipe.evaluation:
                found.update(self._evaluated(model))
            for when in self._moments(steps):
                shelf, found[when] = Writer(self.folder / when), {}
                for name, parameter in model.named_parameters():
                    if when == "first" or parameter.requires_grad:
                        shelf.put(name, parameter)
                    moved = norm(parameter, self.start.value(name)) if parameter.requires_grad else 0.0
                    found[when][name] = moved
                    found["values"][name] = unit(parameter.dtype) / 4 * norm(parameter)
                shelf.close()

        found["losses"] = self._train(self.start, after)
        found["norms"] = self.norms
        self._leave(self.folder / "truth", {"last": found["first"], **found})

    def _perturbed(self) -> None:
        off = Perturbed(self.start, self.computes_in)
        found: dict[str, Any] = {}

        def after(steps: int, model: Seen) -> None:
            if steps == self.run.steps and self.recipe.evaluation:
                found.update(self._evaluated(model))
            for when in self._moments(steps):
                plain = self.after(when)
                found[when] = {
                    name: norm(parameter, off.value(name), plain[name], self.start.value(name))
                    if parameter.requires_grad
                    else 0.0
                    for name, parameter in model.named_parameters()
                }

        losses = self._train(off, after, exact=False)
        found["losses"] = apart(self.truth()["losses"], losses)
        found["norms"] = apart(self.truth()["norms"], self.norms)
        self._leave(self.folder / "noise", {"last": found["first"], **found})

    def _train(self, start: Start, after: Callable[[int, Seen], None], exact: bool = True) -> list[float]:
        alone: Optional[Callable[[nn.Module], Alone]] = None
        if not self.recipe.plain:
            if self.on_disk is not None:
                raise ValueError(f"with its weights on disk the reference trains plain SGD only, not {self.recipe}")

            def alone(model: nn.Module) -> Alone:
                # A trace sees torch's function only.
                made = Alone(self.recipe, self.run, model, self.lr, exact and not tracing.active())
                self.norms = made.norms
                return made

        return train_alone(start, self._loss, self.run.steps, self.lr, after, self.on_disk, alone)

    def _evaluated(self, model: Any) -> dict[str, Any]:
        device = next(model.parameters()).device
        with self.recipe.forward(device):
            return evaluated(self.run, model, self.ranks, device)

    def _loss(self, model: nn.Module, step: int) -> torch.Tensor:
        with self.recipe.forward(next(model.parameters()).device):
            return self._batch_loss(model, step)

    def _batch_loss(self, model: nn.Module, step: int) -> torch.Tensor:
        if self.recipe.dropout:
            return self.recipe.loss(self.run, model, self.ranks, step)
        parts = [self.make_batch(self.run, rank, step) for rank in range(self.ranks)]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        device = next(model.parameters()).device
        return model(**{name: value.to(device) for name, value in whole.items()}, use_cache=False).loss

    def _moments(self, steps: int) -> list[str]:
        return ["first"] if steps == 1 else ["last"] if steps == self.run.steps and steps else []

    # --- sharing with other attempts

    def _taken(self, model: nn.Module) -> bool:
        """Return whether the reference of another attempt is in the folder now."""
        shared = self.run.settings.get("references")
        if not shared:
            return False
        self.common = Common(Path(shared["folder"]), shared["attempt"])
        answer = self.folder.with_name(f"{self.folder.name}.from")
        if self.run.rank == 0:
            key = self._key(model)
            by = self.common.take(key, self.folder)
            self._leave(answer, {"key": key, "made_by": by or shared["attempt"], "taken": by is not None})
        said = verified(self._there(answer))
        self.key: str = said["key"]
        self.run.fact("reference", {"key": short(self.key), "made_by": said["made_by"]})
        return bool(said["taken"])

    def _key(self, model: nn.Module) -> str:
        steps = range(self.run.steps)
        batches = {(rank, step): self.make_batch(self.run, rank, step) for rank in range(self.ranks) for step in steps}
        return depends.key_of(
            self.run, model, self.start, batches=depends.batches(batches), steps=self.run.steps, lr=self.lr,
            computes_in=str(self.computes_in), recipe=str(self.recipe), where=str(self.run.settings.get("reference")),
        )  # fmt: skip

    def _share(self) -> None:
        """Store the reference for other attempts, unless making it read settings that its key does not contain."""
        if self.run.settings.get("references"):
            known = json.loads(self.key)["settings"]
            if known["flags"] == depends.read(self.run.flags) and known["options"] == depends.read(self.run.options):
                self.common.leave(self.key, self.folder)

    # --- exchange between ranks

    def _leave(self, path: Path, what: dict[str, Any]) -> None:
        self._found[path.name] = what
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(signed(what), encoding="utf-8")
        partial.rename(path)  # complete or absent

    def _take(self, name: str) -> dict[str, Any]:
        if name not in self._found:
            self._found[name] = verified(self._there(self.folder / name))
        return self._found[name]

    def _shelf(self, name: str) -> Shelf:
        self._there(index_of(self.folder / name))
        return Shelf(self.folder / name)

    def _there(self, path: Path) -> Path:
        limit = time.monotonic() + self._wait_s
        while not path.exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"no rank left {path.name} of the reference in {path.parent}: {self._wait_s:.0f} s")
            time.sleep(0.005)
        return path


def _launch() -> str:
    """Return what the ranks of one launch share, and no other launch has: torchrun's id where each node has its own
    agent, else the agent's process."""
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")
    return (several and os.environ.get("TORCHELASTIC_RUN_ID")) or str(os.getppid())


def apart(expected: list[float], actual: list[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(expected, actual)]


def signed(what: dict[str, Any]) -> str:
    """Return the content with a checksum: it contains the tolerances of all checks."""
    return json.dumps({"what": what, "crc": _crc(what)})


def verified(path: Path) -> dict[str, Any]:
    """Return the content of a signed file. Raise ValueError where it was changed."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["crc"] != _crc(found["what"]):
        raise ValueError(f"{path.name} of the reference is not what was written: changed on the disk")
    return found["what"]


def _crc(what: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(what, sort_keys=True).encode())


class Layered(Mapping):
    """A mapping that looks up a key in the upper mapping, then in the lower one."""

    def __init__(self, upper: Mapping[str, Any], lower: Mapping[str, Any]) -> None:
        self.upper, self.lower = upper, lower

    def __getitem__(self, name: str) -> Any:
        return self.upper[name] if name in self.upper else self.lower[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.lower)

    def __len__(self) -> int:
        return len(self.lower)
