"""The pytest plugin: `pytest --repro "case=qwen15-* repeat=1"` makes every fix of every cell a test
(pytest_cells.py).

It is loaded in every run of pytest where repro-matrix is installed: what it needs is imported with
the option.
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
