"""What this machine has, which hardware profile that is, and whether a stack's torch can use it. Never imports torch.

visible   CUDA_VISIBLE_DEVICES, as CUDA reads it (pure)
gpus      what can be known of a card; nvml: the one place that asks NVML
signs     that GPUs are here, or were meant, though NVML shows none
machine   all of that, cores and memory
profile   the profile to run with, or a clear error; ``auto`` never becomes the CPU without a word
probe     one process in a stack's own python: what torch says, and whether it can use the cards
around    what else a run on GPUs depends on: /dev/shm, ptrace
"""

from repro_matrix.hardware.gpus import CardState, Gpu, GpuProcess, LeftOut
from repro_matrix.hardware.machine import Machine, cgroup_held, cgroup_limits, detect
from repro_matrix.hardware.nvml import states
from repro_matrix.hardware.profile import HardwareError, Profile, settle, settle_all, together

__all__ = [
    "CardState", "Gpu", "GpuProcess", "HardwareError", "LeftOut", "Machine", "Profile", "cgroup_held", "cgroup_limits",
    "detect", "settle", "settle_all", "states", "together",
]  # fmt: skip
