"""What one variant of one case runs with: the variant's file entries turned into settings.

Pure and standard-library only. The harness uses the same functions on the same files, so a script run by hand and a
script launched by the harness get the same settings.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

# A variant may change an axis (that *is* the fix, for some failures) as well as flags; these are the axes it may name.
VARIANT_AXES = ("model", "strategy", "world_size", "tp_size", "devices", "stack")

Json = dict[str, Any]


def merged(*layers: Mapping[str, Any] | None) -> Json:
    """Later layers win; mappings are merged key by key, everything else is replaced."""
    out: Json = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
                out[key] = merged(out[key], value)
            else:
                out[key] = value
    return out


def first(*values: Any) -> Any:
    """The first value that is given."""
    return next(value for value in values if value is not None)


def flag_defaults(case: Mapping[str, Any], scale: str = "tiny") -> Json:
    """The flags of the unfixed variant: every declared flag at its default, which may be another at ``scale=full``."""
    key = {name: "full" if scale == "full" and "full" in spec else "default" for name, spec in _flags(case)}
    return {name: spec[key[name]] for name, spec in _flags(case)}


def _flags(case: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return (case.get("flags") or {}).items()


def model_settings(model: Mapping[str, Any], scale: str, weights: str, preserve_config: Iterable[str] = ()) -> Json:
    """A model's configuration at a scale: ``tiny`` lays the file's ``tiny`` block over its real values.

    ``keeps``: the keys that are left at their real value then, because the failure depends on them.
    """
    smaller = {key: value for key, value in (model.get("tiny") or {}).items() if key not in preserve_config}
    config = merged(model["config"], smaller if scale == "tiny" else None)
    out = {key: value for key, value in model.items() if key not in ("config", "tiny")}
    return {**out, "config": config, "scale": scale, "weights": weights}


def variant_axis(case: Mapping[str, Any], variant: str, axis: str, cell_value: Any) -> Any:
    """The variant's value of an axis: the variant's own where it declares one, else the cell's."""
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
    """Settings of one variant as plain JSON values.

    ``model`` and ``strategy`` are the mappings of the options that apply to this variant (the caller has already
    followed
    ``variant_axis``); ``flags`` are the cell's own flags, which the variant's flags override. ``run`` holds what the
    launch adds (world_size, backend, device, seed, steps ...). Of sizes the variant's own comes first (it *is* what the
    variant changes), then the cell's, then the case's.
    """
    spec = case["variants"][variant]
    launch = case.get("launch") or {}
    world_size = first(spec.get("world_size"), run.pop("world_size", None), launch.get("world_size"), 2)
    # Tensor parallelism is over all ranks, unless somebody says otherwise.
    own_tp = world_size if strategy.get("slug") == "tp" else launch.get("tp_size")
    out: Json = {
        "case": case["slug"],
        "variant": variant,
        "model": model_settings(model, scale, weights, case.get("preserve_config") or ()),
        "strategy": {
            **strategy,
            "options": merged(strategy.get("options"), case.get("options"), spec.get("options")),
        },
        "flags": merged(flag_defaults(case, scale), flags, spec.get("flags")),
        "pass_criteria": case.get("pass_criteria") or {},
        "world_size": world_size,
        "tp_size": first(spec.get("tp_size"), run.pop("tp_size", None), own_tp, 1),
        # Devices that the attempt has and each of its ranks sees: one a rank, unless a rank splits its model.
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
