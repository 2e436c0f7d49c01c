"""Resolve the settings of one variant of a case from the entries of its files.

Pure and standard library only. The harness and scripts run by hand use the same functions on the same files.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

# The axes that a variant may change, apart from flags: for some failures that is the fix.
VARIANT_AXES = ("model", "strategy", "world_size", "tp_size", "devices", "stack")

Json = dict[str, Any]


def merged(*layers: Mapping[str, Any] | None) -> Json:
    """Merge layers; later ones win. Mappings are merged key by key, other values are replaced."""
    out: Json = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
                out[key] = merged(out[key], value)
            else:
                out[key] = value
    return out


def first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def flag_defaults(case: Mapping[str, Any], scale: str = "tiny") -> Json:
    """Return the flags of the unfixed variant: all declared flags at their defaults, which may differ at
    ``scale=full``."""
    key = {name: "full" if scale == "full" and "full" in spec else "default" for name, spec in _flags(case)}
    return {name: spec[key[name]] for name, spec in _flags(case)}


def _flags(case: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return (case.get("flags") or {}).items()


def model_settings(model: Mapping[str, Any], scale: str, weights: str, case: Mapping[str, Any] | None = None) -> Json:
    """Return a model's configuration at a scale: ``tiny`` lays the file's ``tiny`` block over its real values.

    The case's ``preserve_config`` names the keys that keep their real values, because the failure depends on them; its
    ``tiny_config`` has values of its own.
    """
    case = case or {}
    preserved = case.get("preserve_config") or ()
    smaller = {key: value for key, value in (model.get("tiny") or {}).items() if key not in preserved}
    smaller.update(case.get("tiny_config") or {})
    config = merged(model["config"], smaller if scale == "tiny" else None)
    out = {key: value for key, value in model.items() if key not in ("config", "tiny")}
    return {**out, "config": config, "scale": scale, "weights": weights}


def variant_axis(case: Mapping[str, Any], variant: str, axis: str, cell_value: Any) -> Any:
    """Return the variant's own value of an axis, else the cell's."""
    value = case["variants"][variant].get(axis)
    return cell_value if value is None else value


def resolve(
    case: Mapping[str, Any],
    variant: str,
    *,
    model: Mapping[str, Any],
    strategy: Mapping[str, Any],
    flags: Mapping[str, Any] | None = None,
    scale: str = "tiny",
    weights: str = "random",
    **run: Any,
) -> Json:
    """Return the settings of one variant as plain JSON values.

    ``model`` and ``strategy`` are the mappings that apply to this variant (see ``variant_axis``); ``flags`` are the
    cell's flags, which the variant's flags override. ``run`` holds what the launch adds (world_size, backend, device,
    seed, steps ...). Of sizes, the variant's own wins over the cell's, and the cell's over the case's.
    """
    spec = case["variants"][variant]
    launch = case.get("launch") or {}
    world_size = first(spec.get("world_size"), run.pop("world_size", None), launch.get("world_size"), 2)
    # Tensor parallelism covers all ranks by default.
    own_tp = world_size if strategy.get("slug") == "tp" else launch.get("tp_size")
    out: Json = {
        "case": case["slug"],
        "variant": variant,
        "model": model_settings(model, scale, weights, case),
        "strategy": {
            **strategy,
            "options": merged(strategy.get("options"), case.get("options"), spec.get("options")),
        },
        "flags": merged(flag_defaults(case, scale), flags, spec.get("flags")),
        "pass_criteria": case.get("pass_criteria") or {},
        "world_size": world_size,
        "tp_size": first(spec.get("tp_size"), run.pop("tp_size", None), own_tp, 1),
        # Devices of the attempt, which all its ranks see: one per rank, unless a rank splits its model.
        "devices": first(spec.get("devices"), launch.get("devices"), world_size),
        "process_group": launch.get("process_group", True),
        "normal_exit": launch.get("normal_exit", False),
        "seed": 0,
        "steps": case.get("steps", 3),
        "device": "auto",
        "backend": launch.get("backend") or "auto",
    }
    out.update({key: value for key, value in run.items() if value is not None})
    return out


def host_of_its_own(rank: int, world_size: int = 2, attempt: str = "repro") -> dict[str, str]:
    """Return the variables that make a rank look like the only one of its machine: NCCL refuses two of one machine on
    one GPU, and DeepSpeed takes the device LOCAL_RANK. ``attempt``: part of NCCL's name of the machine.

    The ranks then talk over sockets. NVIDIA does not support this; profile gpu1-nccl is never published.
    """
    sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    place.update(dict.fromkeys(("GROUP_RANK", "NODE_RANK", "CROSS_RANK"), str(rank)))
    place.update(dict.fromkeys(("GROUP_WORLD_SIZE", "CROSS_SIZE"), str(world_size)))
    return {"NCCL_HOSTID": f"{attempt}-rank-{rank}", **sockets, **place}
