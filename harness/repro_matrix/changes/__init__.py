"""Compare results: two sets (diff), nightly runs (nightly), two stacks (upgrade)."""
