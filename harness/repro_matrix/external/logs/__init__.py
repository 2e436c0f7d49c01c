"""Known failures in any training log: read it, put its tracebacks together, match the signatures."""
