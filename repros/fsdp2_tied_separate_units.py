"""fully_shard on tied embeddings as units of their own: refused since torch 2.13, untied before (pytorch#176076)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import apart
from repro_kit.instrumentation import watch
from repro_kit.models import build
from repro_kit.reference_checks import Reference
from repro_kit.strategies import each_step, layer_classes, shard_mesh
from repro_kit.wrapping import full_parameters, own_batch, wrap

import torch
from torch.distributed.fsdp import fully_shard


def shard(run: Run, model: Any) -> Any:
    """Make each layer a unit, and the two embeddings as the variant says."""
    how, mesh = run.flags["units"], shard_mesh(run)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if how == "together":
        fully_shard([embedding, head], mesh=mesh)
    elif how == "embedding":
        fully_shard(embedding, mesh=mesh)  # the head stays in the root unit
    elif how != "root":
        fully_shard(embedding, mesh=mesh)
        fully_shard(head, mesh=mesh)  # <- the same parameter again
    for layer in [module for module in model.modules() if isinstance(module, tuple(layer_classes(model)))]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if how == "retied":
        head.weight = embedding.weight
    run.fact("wrapped", type(model).__name__)
    return watch(run, model)


def body(run: Run) -> None:
    changed: dict[str, Any] = {} if run.flags["tied"] else {"tie_word_embeddings": False}
    if run.flags["padded"]:  # to a vocabulary that the ranks divide
        size = run.model["config"]["vocab_size"]
        changed["vocab_size"] = size + -size % (8 * run.world_size)
    model: Any = build(run, **changed).train().to(run.device)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    run.fact("tied", tied)
    reference = Reference(run, model)
    wrapped = shard(run, model) if run.strategy["slug"] == "fsdp2" else wrap(run, model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=reference.lr)
    losses: list[float] = []
    after: dict[str, torch.Tensor] = {}
    for step in each_step(run):
        loss = wrapped(**own_batch(run, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after = after or full_parameters(run, wrapped)
    last = full_parameters(run, wrapped)
    if tied:
        embedding = last["model.embed_tokens.weight"]
        off = apart(last.get("lm_head.weight", embedding), embedding)
        run.check("still_tied", actual=off, expected=0.0, tolerance=0.0)
    reference.check(run, losses=losses, first=after, last=last)


if __name__ == "__main__":
    main(body)
