"""Compare the numbers of trainings: two sides, or the configurations of one script."""
