"""Describe the machine, its GPUs and the software stacks; never import torch."""
