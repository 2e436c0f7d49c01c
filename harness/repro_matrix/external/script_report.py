"""The result of a user's script as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from repro_matrix.config.adhoc import VARIANT, AdhocCase
from repro_matrix.external.adhoc_case import normal
from repro_matrix.grading.observation import Attempt, parse_threads
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.records.attempt import Observation
from repro_matrix.records.document import Document, Made
from repro_matrix.text import counted, one_line

FRAMES = 4  # of a hung rank, the innermost first
TAIL = 6  # lines of a rank's log


def lines(case: AdhocCase, document: Document) -> Iterator[str]:
    return map(one_line, _lines(case, document))


def _lines(case: AdhocCase, document: Document) -> Iterator[str]:
    attempts = document["variants"][VARIANT]["attempts"]
    yield case.title + (f"   (the failure: {case.failure})" if case.failure else "")
    outcomes = Counter(made["outcome"]["outcome"] for made in attempts)
    yield ", ".join(f"{name.replace('_', ' ')} {n} of {len(attempts)}" for name, n in outcomes.most_common())
    yield from (f"  note: {text}" for text in document["stack"].get("changed", [])[:FRAMES])
    made = next((a for a in attempts if a["outcome"]["outcome"] != "passed"), attempts[0] if attempts else None)
    if made is None:
        return
    yield f"  {made['outcome']['reason'].splitlines()[0]}"
    infra_error = made["observation"]["infra_error"]
    yield from (f"    {line}" for line in (infra_error["message"].splitlines()[1:][-TAIL:] if infra_error else ()))
    yield from _first_failure(made)
    if made["observation"]["attempt"]["timed_out"]:
        yield from _stacks(made["observation"])
    for note in dict.fromkeys(_notes(case, made["observation"])):
        yield f"  note: {note}"


def _first_failure(made: Made) -> Iterator[str]:
    """Yield the innermost frames or the rank's last lines, and the failure in the form that --error takes."""
    primary = made["outcome"]["primary"]
    if not primary:
        return
    rank = next(each for each in made["observation"]["ranks"] if each["rank"] == primary["rank"])
    raised = rank["record"]["exception"] if rank["record"] else None
    frames = raised["frames"] if raised else []
    for frame in frames[-3:]:
        yield f"    {frame['file']}:{frame['line']} {frame['function']}: {frame.get('code', '')}"
    if not frames:
        yield from (f"    {line}" for line in rank["log_tail"].splitlines()[-TAIL:])
    where = f" ({primary['location']})" if primary["location"] else ""
    yield f"  first: rank {primary['rank']}: {primary['type']}: {normal(primary['message'])}{where}"


def _stacks(observation: Observation) -> Iterator[str]:
    """Yield the innermost frames of each rank's main thread in a hang; ranks at the same place together."""
    places: dict[tuple[str, ...], list[int]] = {}
    for rank in Attempt(observation).ranks:
        threads = parse_threads(rank.stack) if rank.stack else []
        frames = tuple(" ".join(line.split()) for line in threads[0].lines[:FRAMES]) if threads else ()
        places.setdefault(frames, []).append(rank.rank)
    for frames, ranks in places.items():
        yield f"  {_ranks(ranks)} stopped at" + (":" if frames else ": unknown")
        yield from (f"    {frame}" for frame in frames)


def _notes(case: AdhocCase, observation: Observation) -> Iterator[str]:
    attempt = Attempt(observation)
    failures = find_failures(attempt)
    silent = {rank.rank for rank in attempt.ranks if not rank.wrote and rank.exit_code is None and not rank.signal}
    follow = sorted(rank for rank in failures.excused if failures.primary and rank not in silent)
    if follow:
        yield f"the errors of {_ranks(follow)} follow from it"
    if len(attempt.ranks) < case.launch.world_size:
        yield f"only {counted(len(attempt.ranks), 'rank')} of {case.launch.world_size} started"
    if observation["attempt"]["leaked_processes"]:
        yield f"processes that it left behind were ended: {', '.join(observation['attempt']['leaked_processes'])}"
    if attempt.printed.get("cut"):
        yield "a log was cut (64 MiB; a line: 1 MiB); the missing part was not searched"
    values = attempt.printed.get("by_rank", {})
    if len(set(values.values())) > 1:
        by_rank = ", ".join(f"rank {rank}: {value:g}" for rank, value in sorted(values.items()))
        yield f"the ranks disagree on the metric: {by_rank}; the first that prints it counts"
    for rank in attempt.ranks:
        if rank.raised and rank.raised.type == "EOFError":
            yield "standard input is empty here: a script that asks for input cannot be measured"
        yield from (
            f"rank {rank.rank}: a thread ended with {e.message}" for e in rank.log_entries if e.name == "threading"
        )
        if not rank.wrote:
            yield f"rank {rank.rank} left no record (python -I or -S, or it ended before its first line)"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
