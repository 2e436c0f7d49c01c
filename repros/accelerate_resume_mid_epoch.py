"""After load_state inside an epoch, accelerate skips batches of another order (huggingface/accelerate#2823)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.collectives import gather
from repro_kit.instrumentation import note, watch
from repro_kit.models import build
from repro_kit.norms import norm, norm_of

import torch
from torch.utils.data import DataLoader

DONE = 2  # batches of the interrupted epoch
EPOCHS = 3


def start(run: Run, samples: list[int], seed: int) -> tuple[Any, Any, Any, Any]:
    """Return an accelerator, a model, an optimizer and a loader as a new process makes them."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(seed)
    split = DataLoaderConfiguration(use_seedable_sampler=run.flags["seedable"])
    accelerator = Accelerator(cpu=run.device_kind == "cpu", dataloader_config=split)
    loader = DataLoader(samples, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    model = build(run).train()
    return (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader))


def train(accelerator: Any, model: Any, optimizer: Any, batch: torch.Tensor) -> list[int]:
    """Train on a batch of samples, each a token, and return them."""
    accelerator.backward(model(input_ids=batch[None], labels=batch[None], use_cache=False).loss)
    optimizer.step()
    optimizer.zero_grad()
    return [int(sample) for sample in batch]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def note_distance(
    run: Run, what: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **bounds: float
) -> None:
    note(run, what, norm_of(norm(one[name], other[name]) for name in one), **bounds, subject="distance of the weights")


def body(run: Run) -> None:
    from accelerate import skip_first_batches

    flags, folder = run.flags, str(run.work_dir / "state")
    samples = list(range(8 * run.world_size))
    at = int(flags["at_epoch"])

    def epoch_of(loader: Any, epoch: int) -> Any:
        if flags["set_epoch"]:
            loader.set_epoch(epoch)
        return loader

    accelerator, model, optimizer, loader = start(run, samples, seed=1)
    watch(run, model)
    whole: list[list[int]] = []
    for epoch in range(EPOCHS):
        whole.append([])
        for index, batch in enumerate(epoch_of(loader, epoch)):
            whole[-1] += train(accelerator, model, optimizer, batch)
            if (epoch, index + 1) == (at, DONE):
                accelerator.save_state(folder)
                saved = weights(model)

    run.phase("resume")
    accelerator, model, optimizer, loader = start(run, samples, seed=1 if flags["same_seed"] else 2)
    note_distance(run, "trained", saved, weights(model), least=1e-3)  # the new model is as the first one began
    accelerator.load_state(folder)
    note_distance(run, "loaded", saved, weights(model), most=0.0)
    for epoch in range(at if flags["replay"] else 0):
        list(epoch_of(loader, epoch))
    epoch_of(loader, at)
    rest = skip_first_batches(loader, DONE) if flags["skip"] == "function" else loader  # <- skips in another order
    done = 0 if flags["skip"] == "function" else DONE
    resumed: list[int] = []
    for index, batch in enumerate(rest):
        if index >= done:
            resumed += train(accelerator, model, optimizer, batch)
    note_distance(run, "trained again", saved, weights(model), least=1e-3)
    following = [sample for batch in epoch_of(loader, at + 1) for sample in batch.tolist()]

    before = whole[at][: 2 * DONE]
    run.metric("wrong_samples", sum(a != b for a, b in zip(resumed, whole[at][2 * DONE :])))
    run.check(
        "rest-of-epoch", actual=resumed, expected=whole[at][2 * DONE :], tolerance=0, subject="this rank's samples"
    )
    seen = sorted(int(sample) for own in gather(run, before + resumed) for sample in own)
    times = [seen.count(sample) for sample in samples]
    run.check("each-once", actual=times, expected=[1] * len(samples), tolerance=0, subject="times that each is seen")
    run.check("next-epoch", actual=following, expected=whole[at + 1], tolerance=0, subject="this rank's samples")


if __name__ == "__main__":
    main(body)
