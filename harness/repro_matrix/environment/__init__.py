"""The machine and its GPUs; the software stacks. Never imports torch."""
