"""What a measurement was made on, to stamp it with."""

from __future__ import annotations

import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch


def stamp(device: torch.device | str = "cpu") -> str:
    """Tell processor or accelerator, threads, versions and date in one line."""
    return "; ".join(surroundings(device).values())


def surroundings(device: torch.device | str = "cpu") -> dict[str, str]:
    """Return hardware, versions and date by these names."""
    device = torch.device(device)
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{processor()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("tntprune", "torch", "timm"))
    versions += f", Python {platform.python_version()}"
    return {"hardware": hardware, "versions": versions, "date": date.today().isoformat()}


def processor() -> str:
    """Return the processor's own name for itself, or the machine's architecture where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
