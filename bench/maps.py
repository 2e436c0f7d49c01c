"""Stored version maps, measured again with servers that share: ``python -m bench.maps CASE/CELL ...``.

Each published document of the case that was measured on a base stack with another release of a package laid over it was
measured with a server of its own. The same stacks are probed again, one after another in one workplace, as a search
does it, and every arm's answer is compared with the published one, judged by today's judge. Says what differs.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

from repro_matrix.config import project
from repro_matrix.results.store import Store
from repro_matrix.search import labels
from repro_matrix.search.prober import Prober, Target

from bench.machine import machine

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent


def published(case: str, base: str) -> dict[str, list[Json]]:
    """Cell key -> the documents of its map, on overlays over ``base``."""
    found: dict[str, list[Json]] = {}
    for root in project.published():
        for document in Store(root).documents(history=True, cases=[case]):
            if document["stack"]["name"].startswith(f"{base}+") and document["hardware"]["profile"] == "cpu":
                found.setdefault(document["key"], []).append(document)
    return found


def again(case: str, documents: list[Json], arms: list[str], results: str) -> list[Json]:
    first = documents[0]
    texts = [f"model={first['model']}", f"strategy={first['strategy']}", "repeat=1", f"results={results}"]
    rows: list[Json] = []
    with Prober(case, texts, lambda text: print(text, flush=True), threading.Event(), arms=arms or None) as prober:
        for document in documents:
            spec, began = document["stack"]["name"], time.monotonic()
            point = prober.probe(Target(spec, spec))
            stored = {arm: labels.of_cell(case, document["arms"].get(arm)).label for arm in prober.arms}
            seen = {arm: answer.label for arm, answer in point.arms.items()}
            made = json.loads(Path(str(point.document)).read_text(encoding="utf-8"))["arms"] if point.document else {}
            attempts = [each["observation"]["attempt"] for arm in made.values() for each in arm["attempts"]]
            rows.append(
                {
                    "stack": spec,
                    "arms": len(stored),
                    "same": seen == stored,
                    "differ": {arm: [stored[arm], seen[arm]] for arm in stored if stored[arm] != seen[arm]},
                    "attempts": len(attempts),
                    "shared": sum(bool(each.get("shared")) for each in attempts),
                    "apart": sorted({str(each.get("apart") or each.get("cold")) for each in attempts
                                     if not each.get("shared")}),
                    "wall_s": round(time.monotonic() - began, 1),
                }
            )  # fmt: skip
            print({name: rows[-1][name] for name in ("stack", "same", "attempts", "shared", "apart")}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("maps", nargs="+", metavar="CASE@BASE", help="lora-reentrant-checkpointing@torch2.2-tf4.36")
    parser.add_argument("--arms", default="", help="only these (broken,fix)")
    parser.add_argument("--out", type=Path, default=HERE / "maps.json")
    parser.add_argument("--results", default="results/scratch/bench-maps", help="where the probes are stored")
    arguments = parser.parse_args()
    kept = json.loads(arguments.out.read_text(encoding="utf-8"))["maps"] if arguments.out.exists() else {}
    for text in arguments.maps:
        case, _, base = text.partition("@")
        for key, documents in published(case, base).items():
            of_stack = {document["stack"]["name"]: document for document in reversed(documents)}
            documents = [of_stack[name] for name in sorted(of_stack)]
            arms = [arm for arm in arguments.arms.split(",") if arm]
            kept[f"{key} on {base}"] = again(case, documents, arms, arguments.results)
            data = {"machine": machine(), "maps": kept}
            arguments.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for name, rows in kept.items():
        print(f"{name}: {sum(row['same'] for row in rows)} of {len(rows)} stacks the same")


if __name__ == "__main__":
    main()
