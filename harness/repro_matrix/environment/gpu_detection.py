"""Signs that GPUs are here, or were meant to be, though none can be used: why ``auto`` does not become the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NVIDIA = "0x10de"  # the vendor's PCI number
_NO_DEVICES = ("", "void", "none")  # NVIDIA_VISIBLE_DEVICES: the container is to have none


def signs(env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """What was seen, in words; nothing on a machine that simply has no NVIDIA GPU."""
    found = []
    nodes = sorted(path.name for path in (root / "dev").glob("nvidia*") if path.name[6:].isdigit())
    if nodes:
        found.append(f"device nodes /dev/{', /dev/'.join(nodes[:8])}")
    cards = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    if cards:
        found.append(
            f"the kernel's driver shows {len(cards)} GPU{'s' if len(cards) > 1 else ''} (/proc/driver/nvidia/gpus)"
        )
    elif (root / "proc/driver/nvidia/version").exists():
        found.append("the kernel's driver is loaded (/proc/driver/nvidia)")
    if (root / "dev/dxg").exists():
        found.append("/dev/dxg, a GPU of Windows under WSL")
    buses = _on_pci(root)
    if buses and not cards:
        found.append(f"NVIDIA GPU on the PCI bus at {', '.join(buses[:8])}")
    wanted = env.get("NVIDIA_VISIBLE_DEVICES", "")
    if wanted not in _NO_DEVICES:
        found.append(f"NVIDIA_VISIBLE_DEVICES={wanted}: the container was meant to have GPUs")
    return found


def _on_pci(root: Path) -> list[str]:
    """Addresses of NVIDIA's display and 3D controllers, with or without a driver."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if vendor == NVIDIA and kind.startswith("0x03"):
            found.append(device.name)
    return found
