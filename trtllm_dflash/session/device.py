"""The device that a session computes on."""

import torch

from trtllm_dflash.errors import EngineError, SettingsError


def pick_device(name: str) -> torch.device:
    """Chooses the device of a name: cpu, cuda or auto.

    Raises:
        SettingsError: there is no device of that name.
        EngineError: the name is cuda, and torch sees no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise SettingsError(f"--device {name}: choose cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError("--device cuda: torch sees no CUDA GPU; use --device cpu, or see trtllm-dflash doctor")
    return torch.device(name)
