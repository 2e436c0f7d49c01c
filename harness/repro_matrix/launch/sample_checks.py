"""Compare the samples that the ranks of a user's script trained on.

Pure. launch/worker/samples.py records them.

In an epoch the ranks' samples are disjoint and complete, and none occurs twice. Samplers pad an
epoch so that all ranks make the same number of steps, or drop its rest: as many as the sampler's
own rule explains are no error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from repro_matrix.text import counted, list_ranks, list_some

Json = dict[str, Any]
# share of samples with the content of another one that data sets are expected to have
DUPLICATES = 0.01
ALL = 0.9  # share from which all samples occur several times, but for a rest


def compare_samples(ranks: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], str]:
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
    key = "index" if all(epoch["exact"] for each in epochs for epoch in each) else "content"
    compared = f"{counted(total, 'sample')}, known by {key}, of {counted(numbers[0], 'epoch')} on "
    compared += counted(len(ranks), "rank")
    stable = _has_stable_content(epochs)
    results = [_compare_epoch(same, stable) for same in zip(*epochs)]
    right = [at for at, (wrong, _, _) in enumerate(results) if not wrong]
    for at, (wrong, unknown, remarks) in enumerate(results):
        if any(_overlap(epochs[0][at], epochs[0][other]) for other in right):
            excused = [f"{text} (right if this loader is for validation)" for text in wrong]
            results[at] = [], unknown + excused, remarks
    wrong, unknown, remarks = (_by_epoch([each[kind] for each in results]) for kind in range(3))
    if numbers[0] > 1 and all(map(_is_one_part, epochs)):
        unknown.append(f"each of {numbers[0]} epochs ended early, on the same samples")
    if any(map(_has_one_order, epochs)):
        remarks.insert(0, "all epochs have the same shuffled order: is set_epoch called?")
    return "; ".join([compared, *remarks[:4]]), wrong, next(iter(unknown), "")


def _by_epoch(texts: Sequence[Sequence[str]]) -> list[str]:
    """Return each text once, after the epochs of which it is true."""
    found: dict[str, list[str]] = {}
    for number, each in enumerate(texts):
        for text in each:
            found.setdefault(text, []).append(str(number))
    return [
        f"epoch{'s' if numbers[1:] else ''} {list_some(numbers)}: {text}"
        for text, numbers in found.items()
    ]


def _overlap(one: Json, other: Json) -> bool:
    """Return whether both loaders are read in the same steps."""
    return (
        one is not other
        and one["steps"][0] < other["steps"][1]
        and other["steps"][0] < one["steps"][1]
    )


def _is_one_part(epochs: Sequence[Json]) -> bool:
    return (
        not any(each["finished"] for each in epochs)
        and len({frozenset(each["samples"]) for each in epochs}) == 1
    )


def _has_one_order(epochs: Sequence[Json]) -> bool:
    """Return whether a rank's sampler shuffles, but in each epoch alike."""
    orders = [each["samples"] for each in epochs if each["exact"] and each["finished"]]
    return (
        len(orders) > 1
        and orders[0] != sorted(orders[0])
        and all(one == other for one, other in pairwise(orders))
    )


def _has_stable_content(epochs: Sequence[Sequence[Json]]) -> bool:
    """Return whether an index has the same content in several epochs of a rank.

    Then nothing changes samples randomly.
    """
    pairs = [[set(zip(each["samples"], each["content"])) for each in own] for own in epochs]
    return all(any(one & other for one, other in pairwise(own)) for own in pairs)


def _continued(epochs: Sequence[Json]) -> list[Json]:
    """Join an epoch that a resumed loader continues with its beginning."""
    joined: list[Json] = []
    for epoch in epochs:
        if (
            epoch["continues"]
            and joined
            and not joined[-1]["finished"]
            and joined[-1]["exact"] == epoch["exact"]
        ):
            begun = joined[-1]
            both = {key: begun[key] + epoch[key] for key in ("samples", "content")}
            joined[-1] = {**begun, **both, "finished": epoch["finished"]}
        else:
            joined.append({**epoch, "partial": epoch["continues"]})
    return joined


def _compare_epoch(ranks: Sequence[Json], stable: bool) -> tuple[list[str], list[str], list[str]]:
    """Return what is wrong, what is unknown, and remarks on one epoch of all ranks."""
    first = ranks[0]
    if any(each["replacement"] for each in ranks):
        return [], [f"{first['sampler']} draws with replacement: samples repeat by design"], []
    if any(each["exact"] != first["exact"] for each in ranks):
        return [], ["some ranks have indices of samples, others only their content"], []
    shards = {tuple(each["shard"] or (len(ranks), rank)): rank for rank, each in enumerate(ranks)}
    unknown = []
    if all(count < len(ranks) for count, _ in shards):
        unknown = [
            f"{first['sampler']} splits the data in {max(shards)[0]}, which is right if other ranks"
            " share a model"
        ]
        ranks = [ranks[rank] for rank in sorted(shards.values())]
    if not first["exact"]:
        wrong, more, remarks = _by_content(ranks)
        return wrong, unknown + more, remarks
    wrong, remarks = _by_index(ranks)
    if wrong and not _same_data(ranks):
        wrong, more, _ = _by_content(ranks)
        remarks = ["completeness not checked, because each rank has a data set of its own"]
        if not stable:
            more.append(
                "the ranks have data sets of their own, or change the same samples randomly"
            )
        return [], unknown + more + wrong, remarks
    if not wrong and _share_of_twins(ranks) >= ALL:
        unknown.append("samples with other indices have equal content")
    return wrong, unknown, remarks


def _same_data(ranks: Sequence[Json]) -> bool:
    """Return whether an index is the same sample on all ranks, as far as ranks share indices."""
    known: dict[int, int] = {}
    pairs = [pair for each in ranks for pair in dict(zip(each["samples"], each["content"])).items()]
    different = sum(known.setdefault(index, content) != content for index, content in pairs)
    return 2 * different <= len(pairs) - len(known)


def _by_index(ranks: Sequence[Json]) -> tuple[list[str], list[str]]:
    """Return what is wrong, and remarks, for samples with indices in one data set."""
    first = ranks[0]
    everything = Counter(sample for each in ranks for sample in each["samples"])
    wrong, remarks = _repeated([each["samples"] for each in ranks]), []
    length = first["length"] if all(each["subset"] == first["subset"] for each in ranks) else None
    excess, size = everything.total() - len(everything), max(1, first["batch_size"])
    if (
        wrong
        and length is not None
        and excess <= -length % (len(ranks) * (size if first["even_batches"] else 1))
    ):
        wrong, remarks = [], [f"{counted(excess, 'sample')} repeated as padding"]
    absent = 0 if length is None else length - len(everything)
    if not _is_whole(ranks):
        remarks.append("completeness not checked, because the epoch was not trained whole")
    elif length is None:
        remarks.append("completeness not checked, because each rank has a subset of its own")
    elif absent > 0 and first["drop_last"] and absent < len(ranks) * size:
        remarks.append(f"{counted(absent, 'sample')} left out by drop_last")
    elif absent > 0:
        wrong.append(f"{absent} of {counted(length, 'sample')} on no rank")
    return wrong, remarks


def _by_content(ranks: Sequence[Json]) -> tuple[list[str], list[str], list[str]]:
    """Return what is wrong, unknown, and remarks, for samples with checksums of their content."""
    first, samples = ranks[0], [each["content"] for each in ranks]
    total, distinct = sum(map(len, samples)), len(set().union(*samples))
    excess, size = total - distinct, max(1, first["batch_size"])
    remarks = [
        "completeness not checked: samples are known by their content, which a random augmentation"
        " changes"
    ]
    length, share = first["length"], _share_of_twins(ranks)
    padded = length is not None and excess <= -length % (len(ranks) * size)
    why = "repeated as padding" if padded else "with the content of another"
    text = f"{counted(excess, 'sample')} {why}"
    if padded or share <= DUPLICATES:
        return [], [], [*remarks, text] if excess else remarks
    # Workers that all read the whole stream repeat each sample on their rank; else the data holds
    # equal samples.
    repeats = any(len(set(own)) < len(own) for own in samples)
    if share >= ALL and (not repeats or first["workers"] > 1):
        return _repeated(samples), [], remarks
    return [], [f"{text}: duplicates in the data, or seen twice"], remarks


def _share_of_twins(ranks: Sequence[Json]) -> float:
    """Return the share of samples whose content occurs more than once."""
    counts = Counter(sample for each in ranks for sample in each["content"])
    return sum(count for count in counts.values() if count > 1) / max(1, counts.total())


def _is_whole(ranks: Sequence[Json]) -> bool:
    return all(each["finished"] and not each["partial"] for each in ranks)


def _repeated(samples: Sequence[Sequence[int]]) -> list[str]:
    """Name the ranks that share samples, and those that got one more than once."""
    wrong = []
    owners: dict[int, list[int]] = {}
    for rank, own in enumerate(samples):
        counts = Counter(own)
        if twice := sum(count > 1 for count in counts.values()):
            wrong.append(f"{counted(twice, 'sample')} more than once on rank {rank}")
        for sample in counts:
            owners.setdefault(sample, []).append(rank)
    shared = Counter(tuple(ranks) for ranks in owners.values() if len(ranks) > 1)
    return wrong + [
        f"{counted(count, 'sample')} shared by {list_ranks(ranks)}"
        for ranks, count in shared.most_common()
    ]
