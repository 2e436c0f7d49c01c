"""Find known failures in training logs."""
