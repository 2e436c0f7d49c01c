"""Publish results, derive expectations from them, and evaluate claims."""
