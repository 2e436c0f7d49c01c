"""What real trainings add to plain SGD on one batch: a ``Recipe`` from a case's flags, the same for one process
(single_process.py) and for every strategy (strategies.py).

AdamW decays matrices only. With ``accumulation`` the labels of a prompt are ignored, of another length in each
micro-batch of each rank: the loss is the mean over all tokens of the step, whoever has them.
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Optional

from repro_kit.models import batch
from repro_kit.norms import norm_of
from repro_kit.run import Run

import torch
from torch import nn

Batch = dict  # name -> tensor
# Large enough for an update well above the rounding of the weights, small enough to train.
LR = 0.1
RATES = {torch.float32: LR, torch.bfloat16: 1.0}
# eps: with torch's 1e-8, a gradient below its rounding error moves a weight by a whole step of either sign.
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}


@dataclass(frozen=True)
class Recipe:
    optimizer: str = "sgd"  # or adamw
    accumulation: int = 1  # micro-batches of a step
    clip: float = 0.0  # the gradients' largest norm; 0: any
    schedule: str = "constant"  # or linear: to zero after the last step
    dropout: float = 0.0  # of the attention's weights (first-generation Qwen: of the embeddings)
    autocast: Optional[str] = None  # a dtype: the forward computes in it
    evaluation: bool = False  # after the training: the loss of other batches, and greedy tokens

    @classmethod
    def of(cls, run: Run) -> Recipe:
        """Return the recipe that the case's flags name."""
        made = cls(**{name: run.flags[name] for name in cls.__dataclass_fields__})
        if made.dropout and run.device_kind != "cpu":
            raise ValueError("dropout: the reference on the CPU cannot draw the masks of a GPU")
        if run.model["scale"] == "full" and not made.plain:
            raise ValueError(f"the memory plan of full-size models knows plain SGD only, not {made}")
        return made

    @property
    def plain(self) -> bool:
        return self == PLAIN

    def rate(self, dtype: torch.dtype) -> float:
        return ADAMW["lr"] if self.optimizer == "adamw" else RATES[dtype]

    @property
    def computes_in(self) -> Optional[torch.dtype]:
        return None if self.autocast is None else getattr(torch, self.autocast)

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which the forward computes."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.computes_in)

    def config(self, run: Run) -> dict[str, Any]:
        """Return the settings of the model's configuration."""
        name = "emb_dropout_prob" if run.model.get("remote_code") else "attention_dropout"
        return {name: self.dropout} if self.dropout else {}

    # --- data

    def parts(self, run: Run, rank: int, step: int) -> list[Batch]:
        """Return the micro-batches of one rank in one step."""
        if self.accumulation == 1:
            return [batch(run, rank, step)]
        return [uneven(run, rank, micro, step) for micro in range(self.accumulation)]

    def whole(self, run: Run, rank: int, step: int) -> Batch:
        """Return the micro-batches of one rank in one step as one batch."""
        return joined(self.parts(run, rank, step))

    def loss(self, run: Run, model: nn.Module, ranks: int, step: int) -> torch.Tensor:
        """Return the loss of one process on the micro-batches of all ranks, each with the masks that its rank draws."""
        parts = [part for rank in range(ranks) for part in self.parts(run, rank, step)]
        tokens = sum(map(counted, parts))
        losses = []
        for part in parts:
            seed(part)
            losses.append(model(**part, use_cache=False).loss * (counted(part) / tokens))
        return torch.stack(losses).sum()

    # --- update

    def make_optimizer(self, named: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters; their names may have prefixes."""
        # foreach=False: the fused loop refuses a mixture of DTensor and plain parameters (tp).
        pairs = list(named)
        if self.optimizer == "sgd":
            return torch.optim.SGD([parameter for _, parameter in pairs], lr=lr, foreach=False)
        trained = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        if any("flat_param" in name for name, _ in trained):
            raise ValueError("optimizer=adamw needs use_orig_params=true: a flat parameter has matrices and vectors")
        groups: list[dict[str, Any]] = [
            {"params": [parameter for name, parameter in trained if decays(name) == matrix], "weight_decay": decay}
            for matrix, decay in ((True, ADAMW["weight_decay"]), (False, 0.0))
        ]
        used = [group for group in groups if group["params"]]
        return torch.optim.AdamW(used, lr=lr, eps=ADAMW["eps"], foreach=False)

    def make_schedule(self, run: Run, optimizer: torch.optim.Optimizer) -> Optional[Any]:
        """Return the scheduler to be stepped after each step; None for a constant learning rate."""
        if self.schedule == "constant":
            return None
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / run.steps))


PLAIN = Recipe()


class Alone:
    """The training of ``model`` in one process.

    ``exact``: the norm that clips is summed up in float64. torch sums up 300,000 squares in float32 with an error of
    1e-5, which no perturbation of the weights shows; so one of the reference's two runs has it, and one has not.
    """

    def __init__(self, recipe: Recipe, run: Run, model: nn.Module, lr: float, exact: bool) -> None:
        self.recipe, self.model, self.exact = recipe, model, exact
        self.optimizer = recipe.make_optimizer(model.named_parameters(), lr)
        self.schedule = recipe.make_schedule(run, self.optimizer)
        self.norms: list[float] = []  # of the gradients in each step, where they are clipped

    def step(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        loss = loss_of(self.model)
        loss.backward()
        if self.recipe.clip:
            clip = clip_exactly if self.exact else nn.utils.clip_grad_norm_
            self.norms.append(float(clip(self.model.parameters(), self.recipe.clip)))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()


def uneven(run: Run, rank: int, micro: int, step: int) -> Batch:
    """Return a micro-batch of which the first labels are ignored, as those of a prompt are."""
    made = batch(run, rank + micro * run.world_size, step)
    made["labels"][:, : 2 + (5 * rank + 4 * micro + 3 * step) % 12] = -100
    return made


def seed(part: Batch) -> None:
    """Seed the masks of dropout by the tokens: others for each rank, step and micro-batch."""
    torch.manual_seed(zlib.crc32(part["input_ids"].cpu().numpy().tobytes()))


def counted(part: Batch) -> int:
    """Return the number of labels that count: the model shifts them by one."""
    return int((part["labels"][:, 1:] != -100).sum())


def joined(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def decays(name: str) -> bool:
    """Return whether a parameter decays: norms and biases do not."""
    return "norm" not in name.lower() and "ln_" not in name and not name.endswith("bias")


def clip_exactly(
    parameters: Iterable[nn.Parameter], limit: float, dtype: Optional[torch.dtype] = torch.float64
) -> float:
    """Clip as torch does, with a norm that is summed up in ``dtype`` (None: the gradients'); return the norm."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = norm_of(whole(torch.linalg.vector_norm(gradient, dtype=dtype)) for gradient in gradients)
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (total + 1e-6)))
    return total


def clip_mixed(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Clip gradients of which some are DTensor by their common norm: torch's function refuses the mixture."""
    return clip_exactly(parameters, limit, None)


def within(context: Callable[[], AbstractContextManager[Any]], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` inside of a context of its own."""

    def inside(*args: Any, **options: Any) -> Any:
        with context():
            return call(*args, **options)

    return inside


def whole(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


# --- after the training

TOKENS = 6  # generated for each row
PROMPT = 5  # tokens; the second row's first two are padding


def held_out(run: Run, rank: int) -> Batch:
    """Return a batch that no rank has trained on, with another number of tokens on each rank."""
    return uneven(run, rank, 0, run.steps)


def prompts(run: Run) -> Batch:
    """Return the prompts from which every rank generates: one is padded on the left."""
    made = batch(run, 0, run.steps + 1, length=PROMPT)
    made["attention_mask"][1, :2] = 0
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def greedy(call: Callable[..., Any], start: Batch) -> tuple[list[int], list[float]]:
    """Return the tokens, all rows' first ones first, that ``call``, a forward, finds most likely after the prompts, and
    the distance of each one's logit to the next one's.

    None comes twice in a row: with random weights that are tied, every token would be the one before.
    """
    ids, mask = start["input_ids"], start["attention_mask"]
    margins = []
    for _ in range(TOKENS):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = call(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        best, tokens = logits[:, -1].float().scatter(-1, ids, -torch.inf).topk(2)
        margins += (best[:, 0] - best[:, 1]).tolist()
        ids = torch.cat([ids, tokens[:, :1]], dim=-1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
    return ids[:, PROMPT:].T.flatten().tolist(), margins


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def evaluated(run: Run, model: nn.Module, ranks: int, device: torch.device) -> dict[str, Any]:
    """Return the loss of one process on the held-out batches of all ranks, and its greedy tokens."""
    data = joined([held_out(run, rank) for rank in range(ranks)])
    with evaluating(model):
        loss = model(**on(device, data), use_cache=False).loss.item()
        tokens, margins = greedy(model, on(device, prompts(run)))
    return {"evaluation": loss, "tokens": tokens, "margins": margins}


def on(device: torch.device, data: Batch) -> Batch:
    return {name: value.to(device) for name, value in data.items()}
