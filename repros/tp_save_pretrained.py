"""Calling save_pretrained on a model that tp_plan="auto" spread over the ranks (huggingface/transformers#36436)."""

from __future__ import annotations

from typing import Any

from repro_kit import Run, main
from repro_kit.error_reduction import compared
from repro_kit.instrumentation import files, sizes, watch
from repro_kit.models import build
from repro_kit.saved_models import differing, store

import torch.distributed as dist
from transformers import AutoModelForCausalLM


def body(run: Run) -> None:
    reference: Any = build(run)
    source = {name: value.clone() for name, value in reference.state_dict().items()}
    folder = store(run, reference)
    run.phase("load")
    many = run.flags["tensor_parallel"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **({"tp_plan": "auto"} if many else {}))
    watch(run, model, whole=sizes(reference.parameters())[2])
    run.fact("embedding", type(model.get_input_embeddings().weight.data).__name__)
    spread = [name for name, value in model.state_dict().items() if hasattr(value, "full_tensor")]
    seen = f"{len(spread)} of {len(source)} tensors are spread over the ranks"
    run.check("spread", actual=bool(spread), expected=many, subject=seen)

    run.phase("save")
    options: dict[str, Any] = {}
    if run.flags["save"] == "gathered":
        options["state_dict"] = {n: v.full_tensor() if n in spread else v for n, v in model.state_dict().items()}
    elif run.flags["save"] == "local":  # a non-fix: each rank has only its own part
        options["state_dict"] = {n: v.to_local() if n in spread else v for n, v in model.state_dict().items()}
    elif run.flags["save"] == "pickled":
        options["safe_serialization"] = False
    out = run.work_dir / f"{run.case}-saved"
    model.save_pretrained(str(out), is_main_process=run.rank == 0, **options)  # <- every rank calls it
    dist.barrier()

    run.phase("reload")
    files(run, out, least=sizes(reference.parameters())[1])
    again = AutoModelForCausalLM.from_pretrained(str(out))
    wrong = differing(again, source)
    run.check("weights", actual=len(wrong), expected=0, tolerance=0, subject=compared(source, wrong))


if __name__ == "__main__":
    main(body)
