"""`make exports`: every case's folder, written by `repro export`, run under plain torchrun: the
recorded outcome?

A table, a line for each; exit 1 when one shows something else, 3 when one could not be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from repro_matrix.authoring.export import MeasuredVariant, export_variant
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ReproError
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.known_failures import recognize
from repro_matrix.match.scan import scan

CATALOGUE = catalogue.load()
LIMIT_S, LOOK_S = 900.0, 10.0  # for a whole script; between two looks at one that is to hang


@dataclass
class Ran:
    """What a script showed: its output, its exit code (None: it was killed), the functions in which
    its ranks hang."""

    output: str
    code: int | None
    functions: str = ""


def run(folder: Path, ranks: int, hangs: bool, stack: Stack) -> Ran:
    """Run an exported folder under torchrun, in an environment without anything of this project."""
    command = [
        stack.python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "run.py",
    ]
    env = stack.environment({"PATH": "/usr/local/bin:/usr/bin:/bin"})
    env |= {"TMPDIR": str(folder.parent), "HOME": str(Path.home())}
    log, limit, functions = folder / "log", time.monotonic() + LIMIT_S, ""
    with (
        open(log, "w") as out,
        psutil.Popen(command, cwd=folder, stdout=out, stderr=out, env=env) as process,
    ):
        while process.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(LOOK_S)
            before, functions = (
                functions,
                "\n".join(_stack(child.pid) for child in process.children()) if hangs else "",
            )
            if functions and functions == before:
                break  # the ranks were in the same place twice
        code = process.poll()
        with contextlib.suppress(psutil.Error):
            for each in [*process.children(recursive=True), process]:
                each.kill()
    return Ran(log.read_text(errors="replace"), code, functions)


def _stack(pid: int) -> str:
    """Return the functions of a process's main thread, by py-spy."""
    found = subprocess.run(
        ["py-spy", "dump", "--pid", str(pid)],
        capture_output=True,
        text=True,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    return "\n".join(re.findall(r"^ {4}(\S+) \(", found.stdout, re.M))


def difference(stored: MeasuredVariant, ranks: int, ran: Ran) -> str | None:
    """Describe how a run differs from the stored outcome; None: it shows it."""
    outcome = stored.outcome
    tail = ran.output[-400:]
    if outcome["outcome"] == "passed":
        finished = ran.output.count("] finished")
        return (
            None
            if ran.code == 0 and finished == ranks
            else f"exit code {ran.code}, {finished} ranks ended: {tail}"
        )
    known = outcome.get("recognized") or []  # of another case, too
    missing = [
        item for item in known if not _shows(CATALOGUE.cases[item["case"]], item["signature"], ran)
    ]
    if known:
        return f"does not show {missing[0]['signature']}: {tail}" if missing else None
    primary = outcome.get("primary") or {}
    text = str(primary.get("message") or "").partition("\n")[0][:60]
    shows = (
        ran.code not in (0, None) and primary.get("type", "") in ran.output and text in ran.output
    )
    return None if shows else f"not {primary.get('type')}: {tail}"


def _shows(case: Case, name: str, ran: Ran) -> bool:
    signature = next(each for each in case.signatures if each.name == name)
    if signature.kind == "check":
        return f"check {signature.check}: FAILED" in ran.output and ran.code not in (0, None)
    if signature.kind == "hang":
        frames = [
            re.search(rf"^(\S+\.)?{frame.function}$", ran.functions, re.M)
            for frame in signature.frames
        ]
        return ran.code is None and bool(ran.functions) and all(frames)
    if signature.kind == "signal":
        return f"Signal {getattr(signal, str(signature.signal)):d}" in ran.output
    known = SignatureIndex(CATALOGUE.cases, CATALOGUE.strategies)
    found = recognize(scan(ran.output.split("\n"), known), known)
    return case.slug in [
        *found.names,
        *(each.case for failure in found.failures for each in failure.perhaps),
    ]


def check_export(case: Case, variant: str, folder: Path) -> tuple[str, str]:
    """Return ``shown``, ``differs`` or ``not tried``, and why."""
    try:
        made = export_variant(case.slug, variant, stack=case.requires.stack)
    except ReproError as error:
        return "not tried", str(error)
    if made.stored is None:
        return "not tried", "nothing is stored of it"
    if made.skipped or made.stack is None:
        return "not tried", made.skipped or "its stack is not here"
    made.write(target := folder / f"{case.slug}-{variant}")
    hangs = any(item.get("kind") == "hang" for item in made.stored.outcome.get("recognized") or [])
    ran = run(target, made.ranks, hangs, made.stack)
    problem = difference(made.stored, made.ranks, ran)
    return ("shown", "") if problem is None else ("differs", problem)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make exports", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="only cases whose slug contains this")
    parser.add_argument(
        "--all-variants", action="store_true", help="every variant, not the first alone"
    )
    args = parser.parse_args()
    count = {"shown": 0, "differs": 0, "not tried": 0}
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for case in CATALOGUE.cases.values() if args.name in case.slug):
            for variant in list(case.variants)[: None if args.all_variants else 1]:
                result, why = check_export(case, variant, Path(folder))
                count[result] += 1
                print(
                    f"{case.slug:36} {variant:16} {result:10} {' '.join(why.split())[:300]}",
                    flush=True,
                )
    print(", ".join(f"{number} {what}" for what, number in count.items()))
    return 1 if count["differs"] else 3 if count["not tried"] or not count["shown"] else 0


if __name__ == "__main__":
    sys.exit(main())
