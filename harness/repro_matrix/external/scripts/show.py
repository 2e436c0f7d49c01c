"""What one measurement of a script says, for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from repro_matrix.external.scripts.document import Document
from repro_matrix.external.scripts.failure import normal
from repro_matrix.external.scripts.traceback_text import tracebacks
from repro_matrix.grading.observation import Attempt, parse_threads
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.records.document import Made
from repro_matrix.records.observation import Observation
from repro_matrix.text import one_line

FRAMES = 4  # of a hung rank, the innermost first
TAIL = 6  # lines of a rank's log


def lines(document: Document) -> Iterator[str]:
    """Nothing in them that a terminal would obey: the error's text is the script's."""
    return map(one_line, _lines(document))


def _lines(document: Document) -> Iterator[str]:
    attempts = document["attempts"]
    outcomes = [attempt["outcome"] for attempt in attempts]
    count = Counter(outcome["outcome"] for outcome in outcomes)
    asked = document["failure"].get("text")
    yield f"{document['command']}" + (f"   (the failure: {asked})" if asked else "")
    told = ", ".join(f"{name.replace('_', ' ')} {n} of {len(attempts)}" for name, n in count.most_common())
    printed = {text for each in attempts for text in _tracebacks(each["observation"])}
    yield told + ("; but a rank printed a traceback, and ended well: see the notes" if printed else "")
    yield from (f"  note: {text}" for text in document["stack"].get("changed", [])[:FRAMES])
    shown = next((a for a in attempts if a["outcome"]["outcome"] != "clean"), attempts[0] if attempts else None)
    if shown is None:
        return
    yield f"  {shown['outcome']['reason'].splitlines()[0]}"
    yield from _where(shown)
    if shown["observation"]["attempt"]["timed_out"]:
        yield from _stood(shown["observation"])
    for item in dict.fromkeys(_notes(shown["observation"])):
        yield f"  note: {item}"


def _where(shown: Made) -> Iterator[str]:
    """The innermost frames, the rank's last lines, and how the same failure is asked for on another stack."""
    primary = shown["outcome"]["primary"]
    if not primary:
        return
    observation = shown["observation"]
    rank = next(each for each in observation["ranks"] if each["rank"] == primary["rank"])
    raised = rank["record"]["exception"] if rank["record"] else None
    frames = raised["frames"] if raised else []
    for frame in frames[-3:]:
        yield f"    {frame['file']}:{frame['line']} {frame['function']}: {frame.get('code', '')}"
    if not frames:
        yield from (f"    {line}" for line in rank["log_tail"].splitlines()[-TAIL:])
    first = f"  first: rank {primary['rank']}: {primary['type']}: {normal(primary['message'])}"
    yield first + (f" ({primary['where']})" if primary["where"] else "")


def _tracebacks(observation: Observation) -> Iterator[str]:
    """Those of ranks that ended well: no answer is of them (it may have been dealt with), and a reader decides."""
    for rank in observation["ranks"]:
        if rank["exit_code"] == 0 and not (rank["record"] and rank["record"]["exception"]):
            for one in tracebacks(rank["log_tail"])[-1:]:
                said = one_line(one["message"])
                yield f"rank {rank['rank']} printed a traceback of {one['type']}: {said} and ended with exit code 0"


def _differing(observation: Observation) -> Iterator[str]:
    printed = observation.get("printed")
    values = printed.get("by_rank", {}) if printed else {}
    if len(set(values.values())) > 1:
        told = ", ".join(f"rank {rank}: {value:g}" for rank, value in sorted(values.items()))
        yield f"the ranks do not agree on the metric: {told}; the first that prints it was taken"


def _stood(observation: Observation) -> Iterator[str]:
    """Of a hang: the innermost frames of each rank's main thread; ranks that stood alike in a line."""
    places: dict[tuple[str, ...], list[int]] = {}
    for rank in Attempt(observation).ranks:
        threads = parse_threads(rank.stack) if rank.stack else []
        frames = tuple(" ".join(line.split()) for line in threads[0].lines[:FRAMES]) if threads else ()
        places.setdefault(frames, []).append(rank.rank)
    for frames, ranks in places.items():
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        yield f"  {named} stood in" + (":" if frames else ": not known")
        yield from (f"    {frame}" for frame in frames)


def _notes(observation: Observation) -> Iterator[str]:
    attempt = Attempt(observation)
    failures = find_failures(attempt)
    silent = {rank.rank for rank in attempt.ranks if not rank.wrote and rank.exit_code is None and not rank.signal}
    follow = sorted(rank for rank in failures.excused if failures.primary and rank not in silent)
    if follow:
        yield f"what rank{'s' if len(follow) > 1 else ''} {', '.join(map(str, follow))} said follows from it"
    if any(rank.raised and rank.raised.type == "EOFError" for rank in attempt.ranks):
        yield "its standard input is empty here: a script that asks for input cannot be measured"
    if observation["attempt"]["leftover"]:
        left = ", ".join(observation["attempt"]["leftover"])
        yield f"it left processes behind, which were ended: {left} (what they would have done is not known)"
    printed = observation.get("printed")
    if printed and printed["cut"]:
        yield "a log was cut (64 MiB; a line: 1 MiB); what stood in the part that is gone was not looked at"
    yield from _tracebacks(observation)
    yield from _differing(observation)
    for rank in attempt.ranks:
        threads = [note for note in rank.log_entries if note.name == "threading"]
        if threads:
            yield f"rank {rank.rank}: a thread ended with {threads[0].message}"
        if rank.rank in silent and len(silent) < len(attempt.ranks):
            yield (
                f"rank {rank.rank} was not seen: it was never started (accelerate launch starts one process where it "
                "sees one device), or left no trace (python -I or -S)"
            )
        elif not rank.wrote:
            yield f"rank {rank.rank} left no record (python -I or -S, it ended before its first line, or deleted it)"
        elif rank.exit_code == 0 and not rank.done:
            yield f"rank {rank.rank} ended by os._exit or in a forked process: only its exit code is known"
