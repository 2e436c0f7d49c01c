"""Compare the samples that the ranks of a user's script trained on (launch/worker/samples.py). Pure.

In an epoch the ranks' samples are disjoint and complete, and none occurs twice. Samplers pad an epoch so that all ranks
make the same number of steps, or drop its rest: as many as the sampler's own rule explains are no error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.text import counted, list_ranks, list_some

Json = dict[str, Any]
CHANCE = 0.1  # share of samples that may have the content of another: data sets hold duplicates


def compare(ranks: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], str]:
    """Return what was compared, what is wrong, and why nothing or not all could be compared.

    ranks: of each rank, the epochs that it trained, or ``missing``.
    """
    missing = next((each["missing"] for each in ranks if "missing" in each), "")
    if missing:
        return "", [], missing
    epochs = [_continued(each["epochs"]) for each in ranks]
    numbers = sorted({len(each) for each in epochs})
    if len(numbers) > 1:
        return "", [], f"the ranks trained {' and '.join(map(str, numbers))} epochs"
    total = sum(len(epoch["samples"]) for each in epochs for epoch in each)
    compared = f"{counted(total, 'sample')} of {counted(numbers[0], 'epoch')} on {counted(len(ranks), 'rank')}"
    found: tuple[dict[str, list[int]], ...] = {}, {}, {}
    for number, same in enumerate(zip(*epochs)):
        for kind, texts in zip(found, _compare_epoch(same)):
            for text in texts:
                kind.setdefault(text, []).append(number)
    wrong, unknown, remarks = (
        [
            f"{'epoch' if len(each) == 1 else 'epochs'} {list_some(list(map(str, each)))}: {text}"
            for text, each in kind.items()
        ]
        for kind in found
    )
    return "; ".join([compared, *remarks[:4]]), wrong, next(iter(unknown), "")


def _continued(epochs: Sequence[Json]) -> list[Json]:
    """Join an epoch that a resumed loader continues with its beginning."""
    joined: list[Json] = []
    for epoch in epochs:
        if epoch["continues"] and joined and not joined[-1]["finished"] and joined[-1]["exact"] == epoch["exact"]:
            begun = joined[-1]
            joined[-1] = {**begun, "samples": begun["samples"] + epoch["samples"], "finished": epoch["finished"]}
        else:
            joined.append({**epoch, "partial": epoch["continues"]})
    return joined


def _compare_epoch(ranks: Sequence[Json]) -> tuple[list[str], list[str], list[str]]:
    """Return what is wrong, what is unknown, and remarks on one epoch of all ranks."""
    first, world = ranks[0], len(ranks)
    if any(each["replacement"] for each in ranks):
        return [], [f"{first['sampler']} draws with replacement: samples repeat by design"], []
    if any(each["exact"] != first["exact"] for each in ranks):
        return [], ["some ranks have indices of samples, others only their content"], []
    unknown, remarks, kept = [], [], list(range(world))
    shards = {tuple(each["shard"] or (world, rank)): rank for rank, each in enumerate(ranks)}
    if all(count < world for count, _ in shards):
        kept = sorted(shards.values())
        unknown = [
            f"{first['sampler']} splits the data in {max(shards)[0]}, which is right if other ranks share a model"
        ]
    seen: dict[int, Counter[int]] = {rank: Counter(ranks[rank]["samples"]) for rank in kept}
    everything: Counter[int] = sum(seen.values(), Counter())
    wrong = _repeated(seen)
    excess, length = everything.total() - len(everything), first["length"]
    step = len(kept) * (first["batch_size"] if first["even_batches"] or not first["exact"] else 1)
    if wrong and length is not None and excess <= -length % step:
        remarks, wrong = [f"{counted(excess, 'sample')} repeated as padding"], []
    elif wrong and not first["exact"] and excess <= CHANCE * everything.total():
        unknown.append(
            f"{counted(excess, 'sample')} with the content of another: duplicates in the data, or seen twice"
        )
        wrong = []
    absent = None if length is None else length - len(everything)
    if not all(each["finished"] for each in ranks) or first["partial"]:
        remarks.append("completeness not checked, because the epoch was not trained whole")
    elif absent is None:
        remarks.append("completeness not checked, because the length of the data set is unknown")
    elif absent > 0 and first["drop_last"] and absent < len(kept) * max(1, first["batch_size"]):
        remarks.append(f"{counted(absent, 'sample')} left out by drop_last")
    elif absent > 0 and (first["exact"] or not excess):
        wrong.append(f"{absent} of {counted(length, 'sample')} on no rank")
    return wrong, unknown, remarks


def _repeated(seen: Mapping[int, Counter[int]]) -> list[str]:
    """Name the ranks that share samples, and those that got one twice."""
    wrong = []
    for rank, own in seen.items():
        twice = sum(count > 1 for count in own.values())
        if twice:
            wrong.append(f"{counted(twice, 'sample')} more than once on rank {rank}")
    owners: Counter[tuple[int, ...]] = Counter()
    for sample in set().union(*seen.values()):
        owners[tuple(rank for rank, own in seen.items() if sample in own)] += 1
    for ranks, count in owners.most_common():
        if len(ranks) > 1:
            wrong.append(f"{counted(count, 'sample')} on {list_ranks(ranks)}")
    return wrong
