"""A rank that is not through with its imports for a long time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from misbehave import body, main

if __name__ == "__main__":
    Path(f"stuck-{os.environ['RANK']}").touch()  # in the attempt's own folder
    time.sleep(600)
    main(body)
