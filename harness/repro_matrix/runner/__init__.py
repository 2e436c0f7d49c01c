"""Execute a run: plan its attempts, lease GPUs, launch attempts in parallel, report progress."""
