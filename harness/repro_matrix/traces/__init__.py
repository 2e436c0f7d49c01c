"""Find the first tensor of two trainings that differs by more than rounding explains. Pure."""
