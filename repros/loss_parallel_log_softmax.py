"""Under loss_parallel(), log_softmax without cross_entropy has an identity gradient (pytorch/pytorch#190746)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.tolerance import FACTOR, Single

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy, log_softmax


def make(run: Run) -> nn.Sequential:
    """Embedding, norm and head with the model's own sizes: its layers add nothing to a failure of the logits."""
    vocab, hidden = (run.model["config"][key] for key in ("vocab_size", "hidden_size"))
    torch.manual_seed(run.seed)
    model = nn.Sequential(nn.Embedding(vocab, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False))
    return model.to(run.device)


def train(run: Run, model: nn.Module, mesh: Any = None) -> dict[str, Any]:
    """Learn a teacher's distribution, or labels. Return the losses, and the first step's gradient."""
    vocab, how, kind = run.model["config"]["vocab_size"], run.flags["how"], run.flags["loss"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # DTensor and plain parameters together
    losses, gradient = [], {}

    def objective(logits: Any, labels: torch.Tensor, teacher: Any) -> Any:
        if kind == "cross-entropy":
            return cross_entropy(logits, labels)
        return -(teacher * log_softmax(logits, dim=-1)).sum() / labels.numel()  # <- its backward is wrong

    for step in range(run.steps):
        maker = torch.Generator().manual_seed(1000 * run.seed + step)
        ids, labels = (torch.randint(0, vocab, (64,), generator=maker).to(run.device) for _ in range(2))
        teacher: Any = torch.randn(64, vocab, generator=maker).softmax(-1).to(run.device)
        if mesh is None:
            loss = objective(model(ids), labels, teacher)
            loss.backward()
        else:
            logits = model(ids)  # a DTensor, sharded over the vocabulary
            if how == "gathered":
                logits = logits.redistribute(placements=[Replicate()])
            teacher = distribute_tensor(teacher, mesh, logits.placements)
            if how in ("outside", "gathered"):
                loss = objective(logits, labels, teacher)
                loss.backward()
            else:
                with loss_parallel():
                    loss = objective(logits, labels, teacher)
                    if how == "inside":
                        loss.backward()
                if how == "backward-outside":
                    loss.backward()
        if not step:
            gradient = {name: full(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(full(loss)))
    weights = {name: full(p) for name, p in model.named_parameters()}
    # The first loss is that of the forward alone.
    return {"first-loss": torch.tensor(losses[:1]), "gradient": gradient, "weights": weights}


def full(value: Any) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def body(run: Run) -> None:
    one = Single(make(run), lambda whole: train(run, whole), factor=FACTOR)
    alone = train(run, make(run))
    still = [name for name, start in make(run).named_parameters() if torch.equal(alone["weights"][name], start)]
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(make(run), mesh, plan)
    watch(run, model)
    actual = train(run, model, mesh)
    for part in ("first-loss", "gradient"):
        one.check(run, part, actual[part])
    if still:  # weights that never move are equal, whatever the gradient
        run.check("weights", actual=len(still), expected=0, tolerance=0, subject=compared(alone["weights"], still))
    else:
        one.check(run, "weights", actual["weights"])
    right = alone["gradient"]
    off = [torch.linalg.vector_norm(actual["gradient"][n] - g) / torch.linalg.vector_norm(g) for n, g in right.items()]
    run.metric("gradient error", max(float(each) for each in off))


if __name__ == "__main__":
    main(body)
