"""A script that is started without the harness: its arguments, and its record as text.

``torchrun --nproc-per-node 2 repros/<case>.py --variant unfixed``
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from repro_kit.record import Record
from repro_kit.settings import resolve, variant_axis

ROOT = Path(__file__).resolve().parents[2]


def _option_file(group: str, name: str) -> Path:
    """Return the file of a case, model or strategy: a shipped one by name, another one by path."""
    return Path(name) if name.endswith((".yaml", ".yml")) else ROOT / "conf" / group / f"{name}.yaml"


def load_settings(script: str, argv: list[str]) -> dict[str, Any]:
    """Resolve a script's settings from its arguments and the files that the harness reads (needs PyYAML)."""
    import yaml

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    slug = Path(script).stem.replace("_", "-")
    first.add_argument("--case", default=slug, help="where several cases share a script; or a case's file")
    named, argv = first.parse_known_args(argv)
    case_file = _option_file("case", named.case)
    case = yaml.safe_load(case_file.read_text(encoding="utf-8"))
    variants = list(case["variants"])
    parser = argparse.ArgumentParser(
        prog=Path(script).name, description=case["title"], allow_abbrev=False, parents=[first]
    )
    parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--model", default=(case.get("axes") or {}).get("model", ["qwen1.5-0.5b"])[0])
    parser.add_argument("--strategy", default=(case.get("axes") or {}).get("strategy", ["ddp"])[0])
    parser.add_argument("--scale", choices=["tiny", "full"], default="tiny")
    parser.add_argument("--weights", choices=["random", "hub"], default="random")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"])
    parser.add_argument("--devices", type=int, help="GPUs that the ranks use; default: one for each")
    parser.add_argument("--tp-size", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)

    def option(group: str, name: str) -> dict[str, Any]:
        path = _option_file(group, name)
        if not path.exists():
            have = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
            parser.error(f"no such {group}: {name} (there are: {have})")
        return yaml.safe_load(path.read_text(encoding="utf-8"))

    flags = {}
    for item in args.flag:
        name, _, value = item.partition("=")
        if name not in (case.get("flags") or {}):
            have = ", ".join(case.get("flags") or {})
            parser.error(f"{case_file.name} declares no flag {name!r} (it declares: {have})")
        flags[name] = yaml.safe_load(value)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    pinned = case["variants"][args.variant].get("world_size")
    if pinned and pinned != ranks:
        parser.error(f"variant {args.variant} is about {pinned} rank(s): torchrun --nproc-per-node {pinned} ...")
    settings = resolve(
        case,
        args.variant,
        world_size=ranks,
        tp_size=args.tp_size,
        model=option("model", variant_axis(case, args.variant, "model", args.model)),
        strategy=option("strategy", variant_axis(case, args.variant, "strategy", args.strategy)),
        flags=flags,
        scale=args.scale,
        weights=args.weights,
        device=args.device,
        backend=args.backend,
        steps=args.steps,
        seed=args.seed,
    )
    settings["devices"] = args.devices or settings["devices"]
    spec = case["variants"][args.variant] or {}
    settings["env"] = {**((case.get("launch") or {}).get("env") or {}), **(spec.get("env") or {})}
    return settings


def report(record: Record) -> None:
    """Print a rank's record."""
    data = record.data
    lines = []
    error = data["exception"]
    if error:
        where = error["frames"][-1] if error["frames"] else {"module": "?", "function": "?"}
        lines.append(f"{error['type']}: {error['message'].splitlines()[0] if error['message'] else ''}")
        lines.append(f"    raised in {where['module']}.{where['function']} during {data['phase']!r}")
    for check in data["checks"]:
        result = "ok" if check["passed"] else "FAILED"
        within = "" if check["tolerance"] is None else f", tolerance {check['tolerance']}"
        lines.append(f"check {check['name']}: {result} (got {check['actual']}, want {check['expected']}{within})")
    for name, value in {**data["facts"], **data["metrics"]}.items():
        lines.append(f"{name}: {value}")
    seen = sorted({f"{item['logger']}: {item['message'].splitlines()[0]}" for item in data["logs"] if item["message"]})
    lines += [f"log {text[:160]}" for text in seen[:8]]
    lines.append("finished" if data["done"] else "did not finish")
    sys.stdout.write("".join(f"[rank {data['rank']}] {line}\n" for line in lines))
    sys.stdout.flush()
