"""`python -m repro_matrix`: the same as `repro`."""

import sys

from repro_matrix.cli.main import main

sys.exit(main(sys.argv[1:]))
