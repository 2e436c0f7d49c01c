"""Add `pytest --repro "case=qwen15-* repeat=1"`: every fix of every cell is a test.

pytest loads this plugin in every run where repro-matrix is installed, so it imports pytest_cells.py
only with the option.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repro",
        metavar="OVERRIDES",
        help="run the matrix's cells as tests: 'case=qwen15-* repeat=1'",
    )


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--repro")
    if given is not None:
        from repro_matrix.pytest_cells import Cells

        config.pluginmanager.register(Cells(config, given))
