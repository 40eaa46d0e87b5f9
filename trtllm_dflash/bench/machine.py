"""The machine and the versions that a figure was measured with."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describes the host, without its name, and its GPU: `device`, or the current one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "ram_bytes": memory,
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
    }


def versions() -> dict[str, str]:
    """Lists the versions of this package, Python, torch and, where torch has it, CUDA."""
    found = {
        "trtllm-dflash": trtllm_dflash.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
