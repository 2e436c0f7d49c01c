"""`repro accept --reason ...`: take measured verdicts over as the expected ones, with their stored measurement.

The documents are copied into results/baseline and every case's ``expect:`` block is rewritten from them. It is a
reviewed change: nothing but this verb writes expectations, and a run never judges itself by what it has just measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import catalogue as catalogues
from harness import overrides, session
from harness.config import compose_run
from harness.errors import ResultsError
from harness.expect import write_expectations
from harness.paths import BASELINE, CONF, ROOT, cache_dir
from harness.report import print_json
from harness.schema import Expectation
from harness.store import Store, write_json

# An expectation holds for the minor releases it was measured on: later ones are for measuring, not for assuming.
RANGED = ("torch", "transformers", "accelerate", "peft", "deepspeed")
STABLE = ("FIX_HOLDS", "FIX_BROKEN", "FIX_UNMASKS", "NOT_FIRING", "UPSTREAM_FIXED", "FIX_HARMFUL", "CHANGED", "HEALTHY")


def main(args: argparse.Namespace) -> int:
    selection = overrides.parse(args.overrides)
    settings = compose_run(selection.run)
    catalogue = catalogues.load()
    names = set(overrides.expand("case", selection.case, catalogue.cases))
    source = Path(args.source) if args.source else session.results_folder(settings)
    documents = [d for d in Store(source).documents() if d["case"] in names and _usable(d)]
    if not documents:
        raise ResultsError(f"{source}: holds no complete measurement of the selected cases; run `repro matrix` first")
    for document in documents:
        path = BASELINE / document["hardware"]["profile"] / document["stack"]["label"] / f"{document['key']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _portable(document))
    for case in sorted({str(d["case"]) for d in documents}):
        _write(case, args.reason)
    accepted = [{"case": d["case"], "model": d["model"], "strategy": d["strategy"]} for d in documents]
    if args.json:
        print_json(accepted)
    else:
        print(f"accepted {len(accepted)} cells of {len({d['case'] for d in documents})} cases into {BASELINE}")
        print("review and commit: the documents, and the `expect:` blocks in conf/case")
    return 0


def _portable(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without this machine's own paths: what is published says nothing of whose disk it was."""
    text = json.dumps(document)
    for own, shown in ((str(ROOT), "/checkout"), (str(cache_dir()), "/cache"), (str(Path.home()), "/home")):
        text = text.replace(own + "/", shown + "/")
    portable: dict[str, Any] = json.loads(text)
    return portable


def _usable(document: Mapping[str, Any]) -> bool:
    return bool(document["complete"]) and any(arm["attempts"] for arm in document["arms"].values())


def _write(case: str, reason: str) -> None:
    """Every stored measurement of the case in the baseline -> its expectations, cells that agree in one entry."""
    grouped: dict[tuple[Any, ...], dict[str, Any]] = {}
    for document in Store(BASELINE).documents():
        if document["case"] != case or not _usable(document):
            continue
        verdicts = {arm: v["name"] for arm, v in document["verdicts"].items() if v["name"] in STABLE}
        if not verdicts:
            continue
        versions = _ranges(document["stack"]["versions"])
        hardware = document["hardware"]["profile"]
        identity = (tuple(sorted(verdicts.items())), tuple(sorted(versions.items())), hardware)
        entry = grouped.setdefault(
            identity,
            {
                "verdicts": verdicts, "cells": [], "hardware": hardware, "versions": versions,
                "measured_in": str(Path(document["path"]).relative_to(BASELINE.parent)), "reason": reason,
            },
        )  # fmt: skip
        entry["cells"].append(document["where"])
    path = CONF / "case" / f"{case}.yaml"
    path.write_text(
        write_expectations(path.read_text(encoding="utf-8"), [Expectation(**entry) for entry in grouped.values()]),
        encoding="utf-8",
    )


def _ranges(versions: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for package in RANGED:
        if package in versions:
            release = Version(versions[package]).release
            major, minor = release[0], release[1] if len(release) > 1 else 0
            found[package] = f">={major}.{minor},<{major}.{minor + 1}"
    return found
