"""Settings of optimizers: the groups that have the same parameters are compared."""

from types import SimpleNamespace

import pytest
from repro_matrix.traces.settings import different_setting


def side(*groups, kind="AdamW", at=None, wrapper="DDP"):
    """Return one rank's step with an optimizer; a group is (settings, names)."""
    event = {"class": kind, "groups": [g for g, _ in groups], "names": [n for _, n in groups]}
    return SimpleNamespace(
        optimizers={0: [event | {"at": at}]},
        counterpart=lambda name: name,
        trace=SimpleNamespace(wrappers=[wrapper]),
    )


@pytest.mark.parametrize("at, words", [(2, ": the scheduler is at 2, there at 1"), (1, "")])
def test_a_scheduler_is_named_only_if_it_made_other_steps(at, words):
    """A steeper schedule has the value of the good side's next step, too."""
    good, bad = (side(({"lr": lr}, ["a"]), at=at) for lr, at in ((0.5, 1), (0.25, at)))
    text = f"0.25; on the good side 0.5{words}; the group of a"
    assert different_setting(good, bad) == ("group 0: lr", text, ())


def test_a_parameter_in_another_group_is_named():
    decay, none = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    good = side((decay, ["weight"]), (none, ["norm", "bias"]))
    bad = side((decay, ["weight", "norm"]), (none, ["bias"]))
    text = "0.1; on the good side 0; the group of norm"
    assert different_setting(good, bad) == ("group 1: weight_decay", text, ())
    assert different_setting(good, side((none, ["norm", "bias"]), (decay, ["weight"]))) is None


@pytest.mark.parametrize(
    "other, found", [({}, True), ({"kind": "SGD"}, False), ({"wrapper": "FSDP"}, False)]
)
def test_lost_states_are_named_where_they_must_be_the_same(other, found):
    good, bad = side(({"state": "exp_avg float32"}, ["a"])), side(({"state": ""}, ["a"]), **other)
    text = "none; on the good side exp_avg float32; the group of a"
    assert different_setting(good, bad) == (("group 0: state", text, ()) if found else None)
