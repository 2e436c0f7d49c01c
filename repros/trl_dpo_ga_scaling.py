"""DPOTrainer's gradient grows with gradient accumulation (huggingface/trl#2615, huggingface/transformers#35856)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.models import build

import torch

SAMPLES, BETA = 8, 0.1  # preference pairs of one optimizer step
WORDS = 64
SCALE = 0.02  # rounding moves the scale by less than 1e-5


def tokenizer() -> Any:
    """Return a tokenizer of numbers: the word 17 is token 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="0", pad_token="0", eos_token="1", bos_token="2", model_max_length=64
    )


def pairs(run: Run) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(run.seed)

    def words(number: int) -> str:
        return " ".join(str(int(word)) for word in torch.randint(3, WORDS, (number,), generator=generator))

    return [{"prompt": words(4), "chosen": words(6), "rejected": words(6)} for _ in range(SAMPLES)]


def log_probability(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + answer], device=model.device)
    each = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return each.gather(1, ids[0, len(prompt) :, None]).sum()


def gradient(model: Any, rows: Any) -> torch.Tensor:
    """Return DPO's gradient over all pairs in one process, while the reference model equals the model."""
    margins = [
        log_probability(model, row["prompt_input_ids"], row["chosen_input_ids"])
        - log_probability(model, row["prompt_input_ids"], row["rejected_input_ids"])
        for row in rows
    ]
    loss = torch.stack([-torch.nn.functional.logsigmoid(BETA * (each - each.detach())) for each in margins]).mean()
    return torch.cat([each.flatten().double().cpu() for each in torch.autograd.grad(loss, list(model.parameters()))])


def body(run: Run) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(run, trainer.model_wrapped)

    model = build(run).to(run.device)
    names, parameters = zip(*model.named_parameters())
    found: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([each.grad.flatten().cpu().double() for each in parameters]))
    )
    settings = DPOConfig(
        output_dir=str(run.work_dir / "trainer"),
        max_steps=run.steps,
        beta=BETA,
        per_device_train_batch_size=SAMPLES // run.flags["accumulation"],
        gradient_accumulation_steps=run.flags["accumulation"],
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=run.device_kind == "cpu",
    )
    trainer: Any = DPOTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(pairs(run)),
        processing_class=tokenizer(),
        callbacks=[Watch()],
        optimizers=(optimizer, None),
    )
    run.fact("model_accepts_loss_kwargs", trainer.model_accepts_loss_kwargs)
    if run.flags["accepts"] is not None:
        trainer.model_accepts_loss_kwargs = run.flags["accepts"]
    expected = gradient(model, trainer.train_dataset)
    trainer.train()  # <- adds up the means of the micro-batches
    run.check("steps", actual=len(found), expected=run.steps, tolerance=0)
    actual = found[0]
    scale = float(actual @ expected / (expected @ expected))
    direction = float((actual / actual.norm() - expected / expected.norm()).norm())
    run.metric("scale", scale)
    run.check("scale", actual=scale, expected=1.0, tolerance=SCALE, subject=compared(names))
    run.check("direction", actual=direction, expected=0.0, tolerance=1e-3, subject=compared(names))


if __name__ == "__main__":
    main(body)
