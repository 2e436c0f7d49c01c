"""Traces of two trainings -> the first tensor that differs by more than rounding explains. Pure."""
