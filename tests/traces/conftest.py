"""The trusted side of the comparisons: one process, and two runs of it with noise."""

import pytest
from repro_matrix.traces.comparison import locate
from repro_matrix.traces.reader import read
from simulated import train


@pytest.fixture(scope="session")
def trusted(tmp_path_factory):
    """Return the folders of the trusted side and of its noise runs."""
    folder = tmp_path_factory.mktemp("trusted")
    return [train(folder / "trusted"), train(folder / "noise1", noise=1), train(folder / "noise2", noise=2)]


@pytest.fixture
def compare(trusted, tmp_path):
    """Simulate a training and compare it with the trusted side."""

    def compare(**settings):
        runs = list(map(read, trusted))
        return locate(runs[0], read(train(tmp_path / "suspect", **settings)), runs[1:])

    return compare
