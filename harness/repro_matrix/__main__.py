"""Run `repro` as `python -m repro_matrix`."""

import sys

from repro_matrix.cli.main import main

sys.exit(main(sys.argv[1:]))
