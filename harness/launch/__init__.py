"""Launching: attempts started, watched, and ended as a whole."""
