"""Results over time: a night in brief (night.py), nights as they are kept (kept.py), a case as a strip (strip.py)."""
