"""The published Qwen-7B code cannot be imported any more: a package that it names imports names that transformers
removed."""

from __future__ import annotations

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import watch
from repro_kit.models import batch, build
from repro_kit.qwen import configuration, folder, published
from repro_kit.tolerance import Single

import torch


def body(run: Run) -> None:
    source = build(run, fp32=True).eval()  # the model that runs everywhere is the reference
    ids = batch(run, run.rank)["input_ids"]
    with torch.no_grad():
        one = Single(source, lambda model: {"logits": model(ids, use_cache=False).logits})
    model_class = published(run, folder(run))  # <- transformers imports every package that the file mentions
    model = model_class(configuration(run)).eval()
    watch(run, model)
    wrong = model.load_state_dict(source.state_dict(), strict=False)
    names = [*wrong.missing_keys, *wrong.unexpected_keys]
    run.check("names", actual=len(names), expected=0, tolerance=0, subject=compared(source.state_dict(), names))
    with torch.no_grad():
        actual = model(ids, use_cache=False).logits
    one.check(run, "logits", actual)


if __name__ == "__main__":
    main(body)
