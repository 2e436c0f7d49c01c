"""What is said on a terminal."""
