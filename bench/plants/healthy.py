"""Trainings without an error, of every strategy, in many configurations: a comparison must not find
a difference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

COUNT = 100


@dataclass(frozen=True)
class Training:
    """``words``: arguments of train.py; ``good``: those of the run in one process."""

    words: tuple[str, ...]
    good: tuple[str, ...]
    world: int = 2


MODELS = (
    (),
    ("--model", "llama"),
    ("--model", "qwen3"),
    ("--model", "gpt2"),
    ("--model", "qwen2", "--tied"),
    ("--model", "llama", "--layers", "3", "--hidden", "48"),
    ("--model", "mistral"),
)
CHECKPOINTING = ((), ("--checkpointing", "reentrant"), ("--checkpointing", "plain"))
ACCUMULATE = ((), ("--accumulate", "2"))


def trainings(count: int = COUNT) -> list[Training]:
    """Return the first trainings of a fixed list; every strategy comes with every model, and so
    on."""
    lists = [
        list(each)
        for each in (
            _plain("ddp"),
            _plain("fsdp"),
            _plain("fsdp2"),
            _plain("zero2"),
            _plain("zero3"),
            _plain("tp"),
            _lora(),
            _trainer(),
            _bfloat16(),
        )
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*lists))
    return [each for each in turns if each][:count]


def _plain(strategy: str) -> list[Training]:
    """Combine models, checkpointing, accumulation, seeds and ranks so that each of them occurs with
    most others."""
    found = []
    for number in range(14):
        model = MODELS[number % len(MODELS)]
        # train.py splits no GPT-2, and Qwen3 wrongly: its norms of heads get the gradient of a
        # rank's own heads only.
        if strategy == "tp" and ("gpt2" in model or "qwen3" in model):
            model = MODELS[1]
        seed = ("--seed", str(number // len(MODELS))) if number >= len(MODELS) else ()
        world = 4 if number % 5 == 3 else 2
        words = (
            "--strategy",
            strategy,
            *model,
            *seed,
            *CHECKPOINTING[number % 3],
            *ACCUMULATE[number // 2 % 2],
        )
        found.append(Training(words, (*model, *seed), world))
    return found


def _lora() -> list[Training]:
    model = ("--lora",)
    choices = itertools.product(
        ("ddp", "fsdp", "fsdp2", "zero2", "zero3"), (((), ()), (CHECKPOINTING[2], ACCUMULATE[1]))
    )
    return [
        Training(("--strategy", strategy, *model, *more, *turn), model)
        for strategy, (more, turn) in choices
    ]


def _trainer() -> list[Training]:
    model = ("--loop", "trainer")
    choices = itertools.product(("ddp", "zero2", "zero3"), ACCUMULATE)
    return [Training(("--strategy", strategy, *model, *turn), model) for strategy, turn in choices]


def _bfloat16() -> list[Training]:
    model = ("--dtype", "bfloat16")
    choices = itertools.product(("ddp", "fsdp", "fsdp2", "tp"), ACCUMULATE)
    return [Training(("--strategy", strategy, *model, *turn), model) for strategy, turn in choices]
