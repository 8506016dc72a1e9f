"""What one has to know of a machine to compare figures."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """Processor, memory, accelerator, versions, and how busy it is."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "cpu": cpu[0] if cpu else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "l3_cache": "".join(_lines("/sys/devices/system/cpu/cpu0/cache/index3/size")) or None,
        "memory_gib": round(memory[0] / 2**20) if memory else None,
        "shm_gib": round(shm.f_blocks * shm.f_frsize / 2**30, 2) if shm else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
