"""The PyTorch session: `DraftVerifyStep` over `TorchOps`, on CPU or CUDA, alone or as one rank of several."""

from dataclasses import replace

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.session import Session
from trtllm_dflash.engine.weights import complete_weights
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import PREFIX, Drafter
from trtllm_dflash.models.weights import units_per_rank
from trtllm_dflash.ops import SamplingInputs
from trtllm_dflash.ops.communicator import Communicator, Solo
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs, StepOutputs

Tensor = torch.Tensor

_DRAFTING = list(Drafting)
_HEADER_SIZE = 8


class TorchSession(Session):
    """Loads a rank's weights onto a device and runs steps there.

    Under tensor parallelism rank 0 calls `step`; every other rank calls `follow` once and stays in it: rank 0 sends
    each step's small integer inputs, and all ranks compute.

    Args:
        config: the engine.
        weights: this rank's stored tensors, on the CPU.
        device: where to compute.
        communicator: the other ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        communicator: Communicator | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.communicator = communicator or Solo()
        moved = {name: tensor.to(device) for name, tensor in weights.items()}
        self.weights = complete_weights(moved, config, self.communicator.rank)
        self.caches = {name: torch.zeros(shape, dtype=config.dtype, device=device) for name, shape in _caches(config)}
        self._step = DraftVerifyStep(build_target(config.target), Drafter(config.drafter) if config.drafter else None)
        self._closed = False

    @torch.inference_mode()
    def step(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int = 0) -> StepOutputs[Tensor]:
        if self.communicator.size > 1:
            self._send(inputs, drafting, first_slot)
        return self._run(inputs, drafting, first_slot)

    @torch.inference_mode()
    def follow(self) -> None:
        """Runs the steps that rank 0 sends, until it closes its session."""
        while (call := self._receive()) is not None:
            self._run(*call)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.communicator.size > 1 and self.communicator.rank == 0:
            self.communicator.broadcast(torch.zeros(_HEADER_SIZE, dtype=torch.int32, device=self.device))
        self.communicator.close()

    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        last_slot = first_slot + inputs.token_ids.shape[0]
        caches = {name: cache[first_slot:last_slot] for name, cache in self.caches.items()}
        ops = TorchOps(self.weights, caches, self.communicator)
        out = self._step(ops, _moved(inputs, self.device), drafting)
        return StepOutputs(out.target_ids.cpu(), out.accepted.cpu(), out.next_start.cpu(), out.next_tokens.cpu())

    # -- one step's inputs between ranks: a header of sizes, then the integers, then the real numbers ---------------

    def _send(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> None:
        slots, rows = inputs.token_ids.shape
        sizes = [slots, rows, inputs.logit_rows.shape[1], inputs.block_offsets.shape[1]]
        sampling = inputs.sampling
        header = [*sizes, _DRAFTING.index(drafting), first_slot, int(sampling is not None), 0]
        integers = [inputs.token_ids, inputs.start, inputs.row_count, inputs.logit_rows]
        self._broadcast(torch.tensor(header, dtype=torch.int32))
        self._broadcast(torch.cat([x.flatten() for x in integers]))
        if sampling is not None:
            self._broadcast(sampling.top_k)
            self._broadcast(torch.cat([x.flatten() for x in (sampling.temperature, sampling.top_p, sampling.uniform)]))

    def _receive(self) -> tuple[StepInputs[Tensor], Drafting, int] | None:
        header = self._broadcast(torch.empty(_HEADER_SIZE, dtype=torch.int32)).tolist()
        slots, rows, logit_rows, block, drafting, first_slot, sampled, _ = header
        if slots == 0:
            return None
        counts = [slots * rows, slots, slots, slots * logit_rows]
        integers = self._broadcast(torch.empty(sum(counts), dtype=torch.int32)).split(counts)
        sampling = None
        if sampled:
            top_k = self._broadcast(torch.empty(slots, dtype=torch.int32))
            counts = [slots, slots, slots * logit_rows]
            reals = self._broadcast(torch.empty(sum(counts), dtype=torch.float32)).split(counts)
            sampling = SamplingInputs(reals[0], top_k, reals[1], reals[2].view(slots, logit_rows))
        inputs = StepInputs(
            token_ids=integers[0].view(slots, rows),
            start=integers[1],
            row_count=integers[2],
            logit_rows=integers[3].view(slots, logit_rows),
            block_offsets=torch.arange(block, dtype=torch.int32)[None],
            sampling=sampling,
        )
        return inputs, _DRAFTING[drafting], first_slot

    def _broadcast(self, x: Tensor) -> Tensor:
        return self.communicator.broadcast(x.to(self.device)).cpu()


def _caches(config: EngineConfig) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Name and shape [slots, heads, S, D] of every cache on one rank."""
    models = [("model.", config.target)]
    if config.drafter is not None:
        models.append((PREFIX, config.drafter))
    return [
        (f"{prefix}layers.{i}.{kind}", (config.max_batch, heads, config.cache_length, model.head_size))
        for prefix, model in models
        for heads in [units_per_rank(model.kv_heads, config.tp)]
        for i in range(model.layers)
        for kind in ("key", "value")
    ]


def _moved(inputs: StepInputs[Tensor], device: torch.device) -> StepInputs[Tensor]:
    if device.type == "cpu":
        return inputs
    sampling = inputs.sampling
    if sampling is not None:
        sampling = SamplingInputs(
            sampling.temperature.to(device),
            sampling.top_k.to(device),
            sampling.top_p.to(device),
            sampling.uniform.to(device),
        )
    return replace(
        inputs,
        token_ids=inputs.token_ids.to(device),
        start=inputs.start.to(device),
        row_count=inputs.row_count.to(device),
        logit_rows=inputs.logit_rows.to(device),
        block_offsets=inputs.block_offsets.to(device),
        sampling=sampling,
    )
