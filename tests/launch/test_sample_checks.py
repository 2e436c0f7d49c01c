"""The check of the samples that ranks trained on: what follows from their records."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from repro_matrix.launch.sample_checks import compare_samples
from repro_matrix.launch.script_checks import add_checks

Epochs = list[dict[str, Any]]


def epoch(samples: list[int], length: int | None, **fields: Any) -> dict[str, Any]:
    return {
        "sampler": "DistributedSampler",
        "batch_size": 4,
        "batches": None,
        "length": length,
        "replacement": False,
        "drop_last": False,
        "even_batches": False,
        "shard": None,
        "continues": False,
        "exact": True,
        "finished": True,
        "samples": samples,
        "content": list(samples),
        "subset": None,
        "workers": 0,
        "steps": [0, 4],
        **fields,
    }


def ranks(*epochs: Epochs) -> list[dict[str, Any]]:
    return [{"epochs": each} for each in epochs]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Return the length of a data set, and its samples divided over ranks as DistributedSampler
    does, with padding."""
    world, length = draw(st.integers(1, 6)), draw(st.integers(12, 80))
    order = draw(st.permutations(range(length)))
    padded = order + order[: -length % world]
    return length, [padded[rank::world] for rank in range(world)]


@given(divisions())
def test_data_that_a_sampler_divides_is_no_error(division: tuple[int, list[list[int]]]) -> None:
    length, parts = division
    assert compare_samples(ranks(*([epoch(part, length)] for part in parts)))[1:] == ([], "")


@given(divisions(), st.data())
def test_a_sample_too_many_or_missing_is_an_error(
    division: tuple[int, list[list[int]]], data: st.DataObject
) -> None:
    length, parts = division
    rank = data.draw(st.integers(0, len(parts) - 1))
    sample = data.draw(st.sampled_from(parts[rank]))
    others = [each for part in parts for each in part if each != sample]
    if data.draw(st.booleans()):
        parts[rank] = parts[rank] + [others[0]] * len(parts)
    else:
        parts = [[each for each in part if each != sample] for part in parts]
    _, wrong, unknown = compare_samples(ranks(*([epoch(part, length)] for part in parts)))
    assert wrong and not unknown


@pytest.mark.parametrize(
    ("epochs", "is_wrong", "is_unknown", "remark"),
    [
        (ranks([epoch([0, 1], 4)], [epoch([2, 3], 4)]), False, False, ""),
        (ranks([epoch([0, 1, 2, 3], 4)], [epoch([0, 1, 2, 3], 4)]), True, False, ""),
        (ranks([epoch([0, 1], 4)], [epoch([0, 1], 4)]), True, False, ""),
        (
            ranks([epoch([0, 1], 9, finished=False)], [epoch([2, 3], 9, finished=False)]),
            False,
            False,
            "not checked",
        ),
        (
            ranks([epoch([0, 1], 5, drop_last=True)], [epoch([2, 3], 5, drop_last=True)]),
            False,
            False,
            "drop_last",
        ),
        (ranks([epoch([0, 0], None, replacement=True)], [epoch([0, 1], None)]), False, True, ""),
        (ranks([epoch([0], 2, shard=[1, 0])], [epoch([0], 2, shard=[1, 0])]), True, True, ""),
        (
            ranks([epoch([0, 1], 2, shard=[1, 0])], [epoch([0, 1], 2, shard=[1, 0])]),
            False,
            True,
            "",
        ),
        (ranks([epoch([0, 1], 4)], [epoch([2, 3], 4, exact=False)]), False, True, ""),
        (
            ranks([epoch([0, 1], 4), epoch([0, 1], 4, steps=[4, 8])], [epoch([2, 3], 4)]),
            False,
            True,
            "",
        ),
        (
            ranks([epoch([5, 6], None, exact=False)], [epoch([5, 6], None, exact=False)]),
            True,
            False,
            "by content",
        ),
        ([{"missing": "no loader"}, *ranks([epoch([0], 1)])], False, True, ""),
    ],
)
def test_kinds_of_data(
    epochs: list[dict[str, Any]], is_wrong: bool, is_unknown: bool, remark: str
) -> None:
    compared, wrong, unknown = compare_samples(epochs)
    assert (bool(wrong), bool(unknown)) == (is_wrong, is_unknown) and remark in compared


@pytest.mark.parametrize(
    ("first", "second", "remarked"),
    [([2, 0], [2, 0], True), ([2, 0], [0, 2], False), ([0, 2], [0, 2], False)],
    ids=["set_epoch is missing", "shuffled anew", "not shuffled"],
)
def test_epochs_with_one_shuffled_order_are_remarked(
    first: list[int], second: list[int], remarked: bool
) -> None:
    own = [epoch(first, 4), epoch(second, 4)]
    compared, wrong, unknown = compare_samples(ranks(own, [epoch([1, 3], 4), epoch([1, 3], 4)]))
    assert (wrong, unknown) == ([], "") and ("set_epoch" in compared) == remarked


def test_few_samples_of_equal_content_may_be_duplicates_of_the_data() -> None:
    one, other = list(range(50)), list(range(49, 99))
    exact = compare_samples(ranks([epoch(one, None)], [epoch(other, None)]))
    by_content = compare_samples(
        ranks([epoch(one, None, exact=False)], [epoch(other, None, exact=False)])
    )
    assert exact[1] and not by_content[1] and by_content[2]


OWN = [
    epoch([0, 1, 2], 3),
    epoch([0, 1, 2], 3, content=[7, 8, 9]),
]  # each rank has a data set of its own
LATER = {"steps": [4, 8]}
BROKEN = [epoch([0, 1], 8, finished=False), epoch([2, 3], 8, finished=False)]


@pytest.mark.parametrize(
    ("epochs", "is_wrong", "is_unknown"),
    [
        (ranks(*([each] for each in OWN)), False, True),
        (ranks(*([each, {**each, **LATER}] for each in OWN)), False, False),
        (ranks([OWN[0]], [OWN[0]]), True, False),
        (ranks([epoch([0, 1], 2, subset=1)], [epoch([4, 5], 2, subset=2)]), False, False),
        (ranks([epoch([0, 1], 2, subset=1)], [epoch([0, 1], 2, subset=1)]), True, False),
        # Two loaders that are read in the same steps: the one that is wrong may be for validation.
        (ranks([OWN[0], epoch([0, 1], 4)], [OWN[0], epoch([2, 3], 4)]), False, True),
        (
            ranks([OWN[0], epoch([0, 1], 4, **LATER)], [OWN[0], epoch([2, 3], 4, **LATER)]),
            True,
            False,
        ),
        (ranks([OWN[0]] * 2, [OWN[0]] * 2), True, False),
        (ranks(*([each, {**each, **LATER}] for each in BROKEN)), False, True),
        (
            ranks([epoch([0, 1], 4, content=[5, 5])], [epoch([2, 3], 4, content=[5, 5])]),
            False,
            True,
        ),
        (
            ranks([epoch([5, 5, 6, 6], None, exact=False)], [epoch([7, 7], None, exact=False)]),
            False,
            True,
        ),
        (
            ranks(
                [epoch([5, 5], None, exact=False, workers=2)], [epoch([7, 7], None, exact=False)]
            ),
            True,
            False,
        ),
    ],
)
def test_data_that_indices_alone_do_not_tell_apart(
    epochs: list[dict[str, Any]], is_wrong: bool, is_unknown: bool
) -> None:
    _, wrong, unknown = compare_samples(epochs)
    assert (bool(wrong), bool(unknown)) == (is_wrong, is_unknown)


def test_resumed_epoch_is_joined_with_its_beginning() -> None:
    begun = [epoch([0, 1], 8, finished=False), epoch([2, 3], 8, finished=False)]
    rest = [epoch([4, 5], 8, continues=True), epoch([6, 7], 8, continues=True)]
    again = [epoch([0, 5], 8, continues=True), epoch([6, 7], 8, continues=True)]
    assert compare_samples(ranks(*([one, two] for one, two in zip(begun, rest))))[1:] == ([], "")
    assert compare_samples(ranks(*([one, two] for one, two in zip(begun, again))))[1]
    compared, wrong, _ = compare_samples(ranks(*([each] for each in rest)))
    assert not wrong and "not checked" in compared, "the launch that began the epoch is another one"


def test_command_that_started_no_rank_has_no_checks() -> None:
    add_checks([], ["data", "replicas", "finite"])


def test_check_is_added_to_every_rank() -> None:
    same = ranks([epoch([0, 1], 2)], [epoch([0, 1], 2)])
    records = [{"facts": {"samples": each}, "ended": 1.0, "checks": []} for each in same]
    add_checks(records, ["data"])
    assert [[check["passed"] for check in record["checks"]] for record in records] == [
        [False],
        [False],
    ]
