"""Read and check what a user may vary: conf/, results/expected, and overrides."""
