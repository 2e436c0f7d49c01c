"""A planted error is named with its stage, place, step, rank and micro-batch."""

import pytest

ANY = ("DDP", "shard", "TP")
LAYER, UP, ALL = "layers.1", "layers.1.up.weight", "embed.weight"
# plant: stage, place, ranks, micro-batches, words of the relation, kinds of training
PLANTS = {
    "data": ("data", "", (1,), (), "4 of 8", ("DDP", "shard")),
    "repeated micro-batch": ("data", "", (1,), (1,), "2 of 8", ("DDP", "shard")),
    "same data": ("data", "", (1,), (), "rank 1 trains on rank 0's samples", ("DDP", "shard")),
    "labels": ("data", "", (1,), (), "2 of 8 samples have other labels", ("DDP", "shard")),
    "positions": ("forward", "positions", (1,), (), "", ("DDP", "shard")),
    "norm eps": ("forward", f"{LAYER}.norm", (), (), "", ANY),
    "functional": ("forward", f"{LAYER}.act", (), (), "", ANY),
    "nan": ("forward", f"{LAYER}.act", (), (), "not a number", ANY),
    "activation": ("forward", LAYER, (1,), (), "", ("DDP", "shard")),
    "addend left out": ("forward", LAYER, (), (), "", ("TP",)),
    "own count": ("loss weight", "loss", (), (), "times", ANY),
    "loss not divided": ("loss weight", "loss", (), (), "weigh 2 times", ANY),
    "detach": ("backward", f"{LAYER}.down", (), (), "no gradient arrives", ANY),
    "gradient flow": ("backward", f"{LAYER}.down", (1,), (), "1.01 times", ("DDP", "shard")),
    "local gradient": ("local gradient", UP, (1,), (), "rank 1: 1.01 times", ("DDP", "shard")),
    "not reduced": ("reduction", "head.weight", (), (), "not reduced over the ranks: ", ("DDP",)),
    "late flag": (
        "reduction",
        ALL,
        (),
        (1,),
        "micro-batch 1 is not reduced over the ranks",
        ("DDP",),
    ),
    "nothing reduced": ("reduction", ALL, (), (), "not reduced over the ranks: ", ("DDP",)),
    "summed": ("reduction", ALL, (), (), "summed", ("DDP", "shard")),
    "rank left out": ("reduction", ALL, (1,), (), "rank 1 is left out", ("DDP", "shard")),
    "micro-batch discarded": ("reduction", ALL, (), (0,), "micro-batch 0 is left out", ANY),
    "own norm": ("clipping", "total norm", (1,), (), "rank 1: ", ANY),
    "clipped, then reduced": ("clipping", "total norm", (), (), "rank 0: ", ("DDP",)),
    "not clipped": ("clipping", "factor", (), (), "factor", ANY),
    "stale gradient": ("gradient before the optimizer", "layers.0.up.weight", (), (), "", ANY),
    "eps": ("optimizer setting", "group 0: eps", (), (), "1e-06", ANY),
    "scheduler": (
        "optimizer setting",
        "group 0: lr",
        (),
        (),
        "0.0081; on the good side 0.009: the scheduler is at 2, there at 1",
        ANY,
    ),
    "edited weight": ("update", "layers.0.up.weight", (), (), "between the steps", ANY),
    "not updated": ("update", "layers.0.down.weight", (), (), "did not change", ANY),
    "left out": ("update", "layers.0.down.weight", (), (), "optimizer", ANY),
    "skipped step": ("update", "the optimizer", (), (), "made no step", ANY),
    "exception": ("stopped", "", (), (), "exception", ANY),
}


@pytest.mark.parametrize(
    "plant, kind", [(plant, kind) for plant, row in PLANTS.items() for kind in row[-1]]
)
def test_a_planted_error_is_named(compare, plant, kind):
    stage, place, ranks, micro, words, _ = PLANTS[plant]
    location = compare(kind=kind, world=2, micro=2, order=7, plant=plant, step=1)
    assert (location.verdict, location.stage, location.step) == ("differs", stage, 1)
    assert (location.place, location.ranks, location.micro) == (place, ranks, micro)
    assert words in location.relation
    assert location.agreed >= 60  # the whole of step 0


@pytest.mark.parametrize(
    "plant, stage, place",
    [
        ("initial weights", "initial weights", "layers.0.up.weight"),
        ("buffer", "buffer", "rotary"),
        ("frozen", "local gradient", "layers.1.up.weight"),
    ],
)
def test_what_is_wrong_from_the_beginning(compare, plant, stage, place):
    location = compare(world=2, plant=plant)
    assert (location.stage, location.place, location.step) == (stage, place, 0)


@pytest.mark.parametrize("kind", ANY)
def test_a_side_that_ends_before_its_optimizer_steps_made_no_step(compare, kind):
    location = compare(kind=kind, world=2, plant="ends", step=0)
    assert (location.verdict, location.stage, location.place) == (
        "differs",
        "update",
        "the optimizer",
    )


@pytest.mark.parametrize("kind", ANY)
def test_a_module_may_compute_in_another_way_if_the_output_around_it_agrees(compare, kind):
    assert compare(kind=kind, world=2, plant="refactored").verdict == "agrees"


@pytest.mark.parametrize("plant, place", [("", ""), ("functional", "layers.1.act")])
def test_of_slices_of_unknown_places_the_norms_are_compared(compare, plant, place):
    location = compare(kind="TP", world=2, micro=2, order=3, plain=True, plant=plant)
    assert (location.place, location.coverage.not_compared) == (place, 0)


def test_where_the_data_differ_the_samples_that_both_saw_are_compared(compare):
    location = compare(world=2, plant="data", step=1)
    assert location.beyond.verdict == "agrees" and location.beyond.coverage.aligned > 10
    assert (location.coverage.only_good, location.coverage.only_bad) == (4, 4)


def test_the_last_that_agrees_and_other_places_are_named(compare):
    location = compare(world=2, plant="norm eps", step=1)
    assert location.last_agreeing == "layers.0: output"
    location = compare(world=2, plant="summed", step=1)
    assert len(location.also) == 7 and any("head.weight" in each for each in location.also)
