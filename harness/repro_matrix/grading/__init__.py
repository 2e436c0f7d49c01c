"""Grade what attempts showed: signatures, checks, effects, hangs, outcomes, verdicts, expectations.

Pure.
"""
