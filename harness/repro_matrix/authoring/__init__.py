"""Draft a case, check whether it is ready, and export it for an upstream issue."""
