"""Known failures in any training log: reading it, putting its tracebacks together, and asking the signatures. Pure but
for reading.py."""
