"""One variant of one case as a script of its own, to paste into an upstream issue. Pure."""
