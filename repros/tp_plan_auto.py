"""Control: tensor parallelism with tp_plan="auto" gives the logits of one process, and a saved model comes back
equal."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import files, sizes, watch
from repro_kit.models import batch, build
from repro_kit.saved_models import differing, store
from repro_kit.tolerance import Single

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM


def body(run: Run) -> None:
    reference: Any = build(run, **({"vocab_size": run.flags["vocab"]} if run.flags["vocab"] else {})).eval()
    source = {name: value.clone() for name, value in reference.state_dict().items()}
    folder = store(run, reference)
    run.phase("load")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    watch(run, model, whole=sizes(reference.parameters())[2])
    spread = {n: v for n, v in model.state_dict().items() if hasattr(v, "to_local") and v.to_local().shape != v.shape}
    seen = f"{len(spread)} of {len(source)} tensors, of which each rank has a part"
    run.check("spread", actual=bool(spread), expected=True, subject=seen)

    inputs = batch(run, rank=0)  # tensor parallelism: the same batch on every rank
    with torch.no_grad():
        one = Single(reference, lambda whole: {"logits": whole(**inputs).logits})
        actual = model(**{k: v.to(model.device) for k, v in inputs.items()}).logits
    actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
    one.check(run, "logits", actual)

    run.phase("save")
    out = run.work_dir / f"{run.case}-saved"
    model.save_pretrained(str(out), is_main_process=run.rank == 0)
    dist.barrier()
    files(run, out, least=sizes(reference.parameters())[1])
    wrong = differing(AutoModelForCausalLM.from_pretrained(str(out)), source)
    run.check("weights", actual=len(wrong), expected=0, tolerance=0, subject=compared(source, wrong))


if __name__ == "__main__":
    main(body)
