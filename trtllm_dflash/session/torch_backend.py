"""The torch backend's session on whatever device."""

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.torch_session import SlotAccept, TorchSession

Tensor = torch.Tensor


def open_torch_session(
    config: EngineConfig,
    weights: dict[str, Tensor],
    device: torch.device,
    communicator: Communicator,
    accept: SlotAccept | None = None,
    kernels: Kernels = "auto",
) -> TorchSession:
    """Opens the session of the torch backend on a device. Arguments and errors as in `CudaSession`."""
    if device.type == "cuda":
        return CudaSession(config, weights, device, communicator, accept, kernels)
    return TorchSession(config, weights, device, communicator, accept)
