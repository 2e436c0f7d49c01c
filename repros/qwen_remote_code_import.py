"""3c: the published Qwen-7B code no longer imports: a package that it names imports names that transformers dropped."""

from __future__ import annotations

from kit import Run, main
from kit.models import batch, build
from kit.qwen import configuration, folder, published

import torch


def body(run: Run) -> None:
    source = build(run, fp32=True).eval()  # the stand-in that runs everywhere is the reference
    ids = batch(run, run.rank)["input_ids"]
    with torch.no_grad():
        want = source(ids, use_cache=False).logits
    model_class = published(run, folder(run))  # <- transformers imports every package that the file's text names
    model = model_class(configuration(run)).eval()
    wrong = model.load_state_dict(source.state_dict(), strict=False)
    run.check("names", not wrong.missing_keys and not wrong.unexpected_keys, got=wrong, want="the published names")
    with torch.no_grad():
        error = (model(ids, use_cache=False).logits - want).abs().max().item()
    run.check("logits", error < 1e-5, got=error, want=0.0, tolerance=1e-5)


if __name__ == "__main__":
    main(body)
