"""What a user may vary, read and checked: conf/, results/expected, the words of a command line."""
