"""What one measurement of a script says, for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from repro_matrix.judge.evidence import Attempt, items, mapping, text
from repro_matrix.judge.peers import failures_of
from repro_matrix.script.failure import normal

TAIL = 6  # lines of a rank's log


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    attempts = document["attempts"]
    outcomes = [attempt["outcome"] for attempt in attempts]
    count = Counter(outcome["outcome"] for outcome in outcomes)
    asked = text(mapping(document["failure"]).get("text"))
    yield f"{document['command']}" + (f"   (the failure: {asked})" if asked else "")
    yield ", ".join(f"{name.replace('_', ' ')} {n} of {len(attempts)}" for name, n in count.most_common())
    shown = next((a for a in attempts if a["outcome"]["outcome"] != "clean"), attempts[0] if attempts else None)
    if shown is None:
        return
    yield f"  {shown['outcome']['reason'].splitlines()[0]}"
    yield from _where(shown)
    for item in dict.fromkeys(_notes(shown["observation"])):
        yield f"  note: {item}"


def _where(shown: Mapping[str, Any]) -> Iterator[str]:
    """The innermost frames, the rank's last lines, and how the same failure is asked for on another stack."""
    primary = shown["outcome"]["primary"]
    if not primary:
        return
    observation = shown["observation"]
    rank = next(each for each in observation["ranks"] if each["rank"] == primary["rank"])
    frames = items(mapping(mapping(rank["record"]).get("exception")).get("frames"))
    for frame in frames[-3:]:
        yield f"    {frame.get('file')}:{frame.get('line')} {frame.get('function')}: {frame.get('code', '')}"
    if not frames:
        yield from (f"    {line}" for line in rank["log_tail"].splitlines()[-TAIL:])
    first = f"  first: rank {primary['rank']}: {primary['type']}: {normal(primary['message'])}"
    yield first + (f" ({primary['where']})" if primary["where"] else "")


def _notes(observation: Mapping[str, Any]) -> Iterator[str]:
    attempt = Attempt(observation)
    failures = failures_of(attempt)
    follow = sorted(rank for rank in failures.excused if failures.primary)
    if follow:
        yield f"what rank{'s' if len(follow) > 1 else ''} {', '.join(map(str, follow))} said follows from it"
    if any(rank.raised and rank.raised.type == "EOFError" for rank in attempt.ranks):
        yield "its standard input is empty here: a script that asks for input cannot be measured"
    if observation["attempt"]["leftover"]:
        left = ", ".join(observation["attempt"]["leftover"])
        yield f"it left processes behind, which were ended: {left} (what they would have done is not known)"
    if mapping(observation.get("printed")).get("cut"):
        yield "a log of more than 64 MiB was cut; what stood in the part that is gone was not looked at"
    for rank in attempt.ranks:
        threads = [note for note in rank.notes if note.name == "threading"]
        if threads:
            yield f"rank {rank.rank}: a thread ended with {threads[0].message}"
        if not rank.record:
            yield f"rank {rank.rank} left no record (python -I or -S, or it ended before its first line)"
        elif rank.exit_code == 0 and not rank.done:
            yield f"rank {rank.rank} ended by os._exit or in a forked process: only its exit code is known"
