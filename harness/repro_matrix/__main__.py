"""Run `repro`, or `python -m repro_matrix`."""

from __future__ import annotations

import sys
import traceback


def main() -> int:
    """Run a command. An import that fails exits with 198: smaller codes are bad to git bisect."""
    try:
        from repro_matrix.cli import main as cli
    except Exception:  # noqa: BLE001 - a package is missing, or a module of PYTHONPATH replaces it
        traceback.print_exc()
        text = "repro: its packages cannot be imported: see PYTHONPATH, or install it again"
        print(text, file=sys.stderr)
        return 198
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
