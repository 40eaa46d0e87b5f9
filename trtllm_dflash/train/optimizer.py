"""AdamW over a drafter's parameters, its learning rate, and its state as tensors by name."""

import math
from collections.abc import Mapping

import torch

from trtllm_dflash.train.network import TrainedDrafter

Tensor = torch.Tensor

_WARM_UP = 0.04  # of all steps, as published with DFlash
_CLIP = 1.0  # norm of all gradients
_DECAY = 0.01  # of matrices
_BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Steps of AdamW with a warm-up and a cosine.

    Args:
        drafter: whose parameters are trained.
        peak: learning rate after the warm-up.
        steps: of the whole training.
    """

    def __init__(self, drafter: TrainedDrafter, peak: float, steps: int) -> None:
        self._parameters = drafter.tensors()
        self._peak, self._steps = peak, steps
        matrices = [p for p in self._parameters.values() if p.ndim == 2]
        others = [p for p in self._parameters.values() if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=peak, betas=_BETAS, fused=drafter.device.type == "cuda")

    def step(self, number: int) -> None:
        """Makes the step of that number, from 0, with the gradients that are there, and clears them."""
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), _CLIP)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(number, self._steps, self._peak)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Lists the moments by the names of their parameters."""
        states = {key: self._adam.state[p] for key, p in self._parameters.items() if p in self._adam.state}
        return {f"{moment}/{key}": state[moment] for key, state in states.items() for moment in _MOMENTS}

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Takes over moments, after so many steps."""
        for key, parameter in self._parameters.items():
            if f"exp_avg/{key}" in tensors:
                moments = {moment: tensors[f"{moment}/{key}"].to(parameter.device) for moment in _MOMENTS}
                step = torch.tensor(float(steps), device=parameter.device)  # where the fused optimizer wants it
                self._adam.state[parameter] = {"step": step, **moments}


def learning_rate(number: int, steps: int, peak: float) -> float:
    """Computes the learning rate of a step, from 0: up in a line, then down to nothing along a cosine."""
    warm = max(1.0, _WARM_UP * steps)
    return peak * min(1.0, (number + 1) / warm) * 0.5 * (1 + math.cos(math.pi * number / steps))
