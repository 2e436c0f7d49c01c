"""The good side of the comparisons: one process, and two runs of it with noise."""

import pytest
from repro_matrix.traces.comparison import locate
from repro_matrix.traces.reader import read_trace
from simulated import train


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """Return the folders of the good side and of its noise runs."""
    folder = tmp_path_factory.mktemp("good")
    return [
        train(folder / "good"),
        train(folder / "noise1", noise=1),
        train(folder / "noise2", noise=2),
    ]


@pytest.fixture
def compare(good, tmp_path):
    """Simulate a training and compare it with the good side."""

    def compare(**settings):
        runs = list(map(read_trace, good))
        return locate(runs[0], read_trace(train(tmp_path / "bad", **settings)), runs[1:])

    return compare
