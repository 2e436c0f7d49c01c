"""Configure DeepSpeed's ZeRO for a script: configuration, engine and whole parameters. Imports deepspeed on use."""

from __future__ import annotations

from typing import Any, Iterable

from repro_kit.instrumentation import watch
from repro_kit.run import Run

import torch


def config(run: Run, stage: int, **extra: Any) -> dict[str, Any]:
    """Return a ZeRO configuration that also runs on a CPU, with torch's optimizer, which DeepSpeed calls untested."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # the default is no clipping in some releases and clipping at 1.0 in others
        # Small buckets and no persistent parameters, so that even a tiny model is partitioned.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10000, "stage3_param_persistence_threshold": 0},
        **extra,
    }


def module() -> Any:
    """Import deepspeed so that zero.Init works: the newest releases need some modules of torch loaded before it."""
    import importlib

    for name in ("torch._dynamo", "torch._dynamo.polyfills.loader"):
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # torch before 2.5 has no polyfills
    import deepspeed

    return deepspeed


def engine(
    run: Run,
    model: torch.nn.Module,
    stage: int,
    lr: float = 0.1,
    optimizer: Any = None,
    schedule: Any = None,
    **extra: Any,
) -> Any:
    """Call deepspeed.initialize, by default with plain SGD, whose updates show the gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    made, *_ = module().initialize(
        model=model,
        model_parameters=parameters,
        optimizer=torch.optim.SGD(parameters, lr=lr) if optimizer is None else optimizer,
        lr_scheduler=schedule,
        config=config(run, stage, **extra),
        dist_init_required=False,
    )
    return watch(run, made)


def partition(run: Run, model: torch.nn.Module, **extra: Any) -> None:
    """ZeRO-3: partition those of these parameters that are still whole, and only those."""
    settings = config(run, 3, **extra)
    module().zero.Init(module=model, config_dict_or_path=settings, dtype=next(model.parameters()).dtype)


def whole(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return whole copies of parameters that may be partitioned. Every rank must call it."""
    found = []
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            with module().zero.GatheredParameters([parameter]):
                found.append(parameter.detach().clone())
        else:
            found.append(parameter.detach().clone())
    return found
