"""What runs a step: the interface that the runtime knows, whatever computes behind it, on one rank or several."""

from abc import ABC, abstractmethod

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.memory import GB, cache_shapes, plan_memory
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import SamplingInputs
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.step import Drafting, StepInputs, StepOutputs

Tensor = torch.Tensor

_DRAFTING = list(Drafting)
_HEADER_SIZE = 7


class Session(ABC):
    """One rank of an engine, loaded: its weights, and the K/V caches of `config.max_batch` slots.

    Under tensor parallelism rank 0 calls `step`; every other rank calls `follow` once and stays in it: rank 0 sends
    each step's small integer inputs, and all ranks compute.

    Args:
        config: the engine.
        device: where it computes.
        communicator: the other ranks.

    Raises:
        EngineError: the device has not the memory for the caches.
    """

    def __init__(self, config: EngineConfig, device: torch.device, communicator: Communicator) -> None:
        self.config = config
        self.device = device
        self.communicator = communicator
        self.caches = _allocate_caches(config, device)
        self._closed = False

    @torch.inference_mode()
    def step(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int = 0) -> StepOutputs[Tensor]:
        """Runs one step on the slots from first_slot on, as many as the inputs' B.

        Inputs lie on the CPU; so do the outputs. The slots' caches are updated in place.

        Raises:
            EngineError: the session is closed, or the engine cannot run such a step.
        """
        if self._closed:
            raise EngineError("this engine is closed; load it again")
        if self.communicator.size > 1:
            self._send(inputs, drafting, first_slot)
        return self._run(inputs, drafting, first_slot)

    @torch.inference_mode()
    def follow(self) -> None:
        """Runs the steps that rank 0 sends, until it closes its session."""
        while (call := self._receive()) is not None:
            self._run(*call)

    def close(self) -> None:
        """Frees what the session holds, and lets the other ranks go."""
        if self._closed:
            return
        self._closed = True
        if self.communicator.size > 1 and self.communicator.rank == 0:
            self._broadcast(torch.zeros(_HEADER_SIZE, dtype=torch.int32))
        self.caches = {}
        self._free()
        self.communicator.close()

    @abstractmethod
    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        """Computes a step on this rank."""

    @abstractmethod
    def _free(self) -> None:
        """Lets go of what this kind of session holds."""

    # -- one step's inputs between ranks: a header of sizes, then the integers, then the real numbers ---------------

    def _send(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> None:
        slots, rows = inputs.token_ids.shape
        sizes = [slots, rows, inputs.logit_rows.shape[1], inputs.block_offsets.shape[1]]
        sampling = inputs.sampling
        header = [*sizes, _DRAFTING.index(drafting), first_slot, int(sampling is not None)]
        integers = [inputs.token_ids, inputs.start, inputs.row_count, inputs.logit_rows]
        self._broadcast(torch.tensor(header, dtype=torch.int32))
        self._broadcast(torch.cat([x.flatten() for x in integers]))
        if sampling is not None:
            self._broadcast(sampling.top_k)
            self._broadcast(torch.cat([x.flatten() for x in (sampling.temperature, sampling.top_p, sampling.uniform)]))

    def _receive(self) -> tuple[StepInputs[Tensor], Drafting, int] | None:
        header = self._broadcast(torch.empty(_HEADER_SIZE, dtype=torch.int32)).tolist()
        slots, rows, logit_rows, block, drafting, first_slot, sampled = header
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


def _allocate_caches(config: EngineConfig, device: torch.device) -> dict[str, Tensor]:
    shapes = cache_shapes(config)
    try:
        return {name: torch.zeros(shape, dtype=config.dtype, device=device) for name, shape in shapes.items()}
    except RuntimeError as error:  # what torch's allocators raise, on CPU and on CUDA
        plan = plan_memory(config)
        size = (plan.target_cache + plan.drafter_cache) / GB
        raise EngineError(
            f"there is no memory for {size:.1f} GB of caches: {config.max_batch} slots of {config.max_seq_len} tokens; "
            "build with a smaller --max-batch or --max-seq-len"
        ) from error
