"""A case in the making: its first files, and what is not ready about it."""
