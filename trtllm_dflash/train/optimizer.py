"""AdamW, or Muon for matrices and AdamW for the rest: their learning rate, and their state as tensors by name."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.train.network import TrainedDrafter

Tensor = torch.Tensor

_WARM_UP = 0.04  # of all steps, as published with DFlash
_CLIP = 1.0  # norm of all gradients
_DECAY = 0.01  # of matrices
_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95  # Muon's
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Optimizer:
    """Steps with a warm-up and a cosine.

    Args:
        drafter: whose parameters are trained.
        peak: learning rate after the warm-up; Muon's updates are scaled to the size of AdamW's, so that it is one.
        steps: of the whole training.
        kind: "muon" is for the layers' matrices; tables of the vocabulary, norms and biases have AdamW.

    Raises:
        SettingsError: this torch has no Muon.
    """

    def __init__(
        self, drafter: TrainedDrafter, peak: float, steps: int, kind: Literal["adamw", "muon"] = "adamw"
    ) -> None:
        self._parameters = drafter.tensors()
        self._peak, self._steps = peak, steps
        self._on_gpu = drafter.device.type == "cuda"
        tables = {key for key, p in self._parameters.items() if drafter.config.vocab_size in p.shape}
        matrices = {key for key, p in self._parameters.items() if p.ndim == 2}
        orthogonal = matrices - tables if kind == "muon" else set()
        self._parts: list[torch.optim.Optimizer] = [self._adam(matrices, orthogonal)]
        if orthogonal:
            self._parts.append(_muon([self._parameters[key] for key in sorted(orthogonal)], peak))

    def _adam(self, matrices: set[str], others: set[str]) -> torch.optim.Optimizer:
        """Makes AdamW over all parameters but `others`."""
        mine = {key: p for key, p in self._parameters.items() if key not in others}
        groups = [
            {"params": [p for key, p in mine.items() if key in matrices], "weight_decay": _DECAY},
            {"params": [p for key, p in mine.items() if key not in matrices], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._peak, betas=_BETAS, fused=self._on_gpu)

    def step(self, number: int) -> None:
        """Makes the step of that number, from 0, with the gradients that are there, and clears them."""
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), _CLIP)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate(number, self._steps, self._peak)
            with nullcontext() if self._on_gpu else _InFp32():
                part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Lists the moments by the names of their parameters."""
        return {
            f"{moment}/{key}": part.state[p][moment]
            for part in self._parts
            for key, p in self._parameters.items()
            for moment in _MOMENTS
            if moment in part.state.get(p, {})
        }

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Takes over moments, after so many steps."""
        for part in self._parts:
            mine = {p for group in part.param_groups for p in group["params"]}
            for key, parameter in self._parameters.items():
                moments = {m: tensors[f"{m}/{key}"] for m in _MOMENTS if f"{m}/{key}" in tensors}
                if parameter in mine and moments:
                    state: dict[str, Any] = {m: x.to(parameter.device) for m, x in moments.items()}
                    if "exp_avg" in moments:
                        state["step"] = torch.tensor(float(steps), device=parameter.device)  # as the fused one wants it
                    part.state[parameter] = state


class _InFp32(TorchFunctionMode):
    """Has Muon multiply in FP32 where it asks for BF16, which many CPUs multiply 20 times as slowly."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.bfloat16:
            return args[0].float().clone()  # which Muon overwrites
        return function(*args, **(kwargs or {}))


def _muon(matrices: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise SettingsError("--optimizer muon: needs torch 2.9 or later")
    made: torch.optim.Optimizer = kind(
        matrices, lr=rate, weight_decay=_DECAY, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    return made


def learning_rate(number: int, steps: int, peak: float) -> float:
    """Computes the learning rate of a step, from 0: up in a line, then down to nothing along a cosine."""
    warm = max(1.0, _WARM_UP * steps)
    return peak * min(1.0, (number + 1) / warm) * 0.5 * (1 + math.cos(math.pi * number / steps))
