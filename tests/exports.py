"""`make exports`: every case's script, written by `repro export`, run under plain torchrun: the recorded outcome?

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from repro_matrix.authoring.export import Measured, export_variant
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ReproError
from repro_matrix.external.log_match import recognize
from repro_matrix.external.log_scan import Catalogue, scan

CATALOGUE = catalogue.load()
LIMIT_S, LOOK_S = 900.0, 10.0  # for a whole script; between two looks at one that is to hang


@dataclass
class Ran:
    """What came of a script: its output, its exit code (None: it was ended), the functions that ranks stood in."""

    said: str
    code: int | None
    stood_in: str = ""


def run(file: Path, ranks: int, hangs: bool, stack: Stack) -> Ran:
    """Under torchrun, in an environment that has nothing of this project's, in the file's folder."""
    command = [stack.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), file.name]
    env = stack.environment({"PATH": "/usr/local/bin:/usr/bin:/bin"})
    log = file.with_suffix(".log")
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=file.parent, stdout=out, stderr=out, start_new_session=True,
                                   env={"TMPDIR": str(file.parent), "HOME": str(Path.home()), **env})  # fmt: skip
        stood = ""
        try:
            if hangs:
                stood = _watched(process, log, ranks)
            else:
                process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            ended = process.poll()
            _end(process)
    return Ran(log.read_text(errors="replace"), ended, stood)


def _watched(process: subprocess.Popen[bytes], log: Path, ranks: int) -> str:
    """Where the ranks of a hang stand: all of them in the same place twice, with LOOK_S between."""
    limit = time.monotonic() + LIMIT_S
    before = ""
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(LOOK_S)
        now = "\n".join(_stack(child.pid) for child in psutil.Process(process.pid).children())
        if now and now == before:
            return now
        before = now
    return before


def _stack(pid: int) -> str:
    """The functions of a process's main thread, by py-spy."""
    found = subprocess.run(["py-spy", "dump", "--pid", str(pid)], capture_output=True, text=True,
                           env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})  # fmt: skip
    return "\n".join(re.findall(r"^ {4}(\S+) \(", found.stdout, re.M))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wrong(case: Case, stored: Measured, ranks: int, ran: Ran) -> str | None:
    """In what a run differs from the stored outcome; None where it shows it."""
    outcome = stored.outcome
    tail = ran.said[-400:]
    if outcome["outcome"] == "passed":
        finished = ran.said.count("every check is right")
        return None if ran.code == 0 and finished == ranks else f"exit code {ran.code}, {finished} ranks right: {tail}"
    known = outcome.get("recognized") or []  # of another case, too
    missing = [item for item in known if _shown(CATALOGUE.cases[item["case"]], item["signature"], ran)]
    if known:
        return f"does not show {missing[0]['signature']}: {tail}" if missing else None
    primary = outcome.get("primary") or {}
    text = str(primary.get("message") or "").partition("\n")[0][:60]
    shows = ran.code not in (0, None) and primary.get("type", "") in ran.said and text in ran.said
    return None if shows else f"not {primary.get('type')}: {tail}"


def _shown(case: Case, name: str, ran: Ran) -> str | None:
    signature = next(each for each in case.signatures if each.name == name)
    if signature.kind == "check":
        return None if f"check {signature.check}: FAILED" in ran.said and ran.code not in (0, None) else "not failed"
    if signature.kind == "hang":
        frames = [re.search(rf"^(\S+\.)?{frame.function}$", ran.stood_in, re.M) for frame in signature.frames]
        return None if ran.code is None and ran.stood_in and all(frames) else "does not hang there"
    if signature.kind == "signal":
        number = getattr(signal, str(signature.signal))
        return None if f"Signal {number:d}" in ran.said else "no such signal"
    known = Catalogue(CATALOGUE.cases)
    found = recognize(scan(ran.said.split("\n"), known), known)
    perhaps = [known.case for failure in found.failures for known in failure.perhaps]
    return None if case.slug in [*found.names, *perhaps] else "not recognized"


def tried(case: Case, variant: str, folder: Path) -> tuple[str, str]:
    """(shown, differs or not tried; why)."""
    try:
        made = export_variant(case.slug, variant, stack=case.requires.stack)
    except ReproError as error:
        return "not tried", str(error)
    if made.stored is None:
        return "not tried", "nothing is stored of it"
    if made.skipped or made.stack is None:
        return "not tried", made.skipped or "its stack is not here"
    file = folder / f"{case.slug}-{variant}.py"
    file.write_text(made.text)
    hangs = any(item.get("kind") == "hang" for item in made.stored.outcome.get("recognized") or [])
    ran = run(file, made.ranks, hangs, made.stack)
    said = wrong(case, made.stored, made.ranks, ran)
    return ("shown", f"{made.text.count(chr(10))} lines") if said is None else ("differs", said)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make exports", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="only cases whose slug contains this")
    parser.add_argument("--all-variants", action="store_true", help="every variant, not the first alone")
    args = parser.parse_args()
    count = {"shown": 0, "differs": 0, "not tried": 0}
    with tempfile.TemporaryDirectory() as folder:
        for case, variant in _chosen(args.name, args.all_variants):
            result, why = tried(case, variant, Path(folder))
            count[result] += 1
            print(f"{case.slug:36} {variant:16} {result:10} {' '.join(why.split())[:300]}", flush=True)
    print(", ".join(f"{number} {what}" for what, number in count.items()))
    return 1 if count["differs"] else 3 if count["not tried"] or not count["shown"] else 0


def _chosen(name: str, every: bool) -> Iterator[tuple[Case, str]]:
    for case in CATALOGUE.cases.values():
        if name in case.slug:
            yield from ((case, variant) for variant in (case.variants if every else [next(iter(case.variants))]))


if __name__ == "__main__":
    sys.exit(main())
