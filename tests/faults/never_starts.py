"""A rank that is not through with its imports for a long time."""

from __future__ import annotations

import time

from misbehave import body, main

if __name__ == "__main__":
    time.sleep(600)
    main(body)
