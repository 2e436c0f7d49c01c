"""Which release changed an answer: probes, searches over releases, packages and commits, advice on
an upgrade."""
