"""The PyTorch session on a GPU: each decoding step is one CUDA graph, from one step's outputs to the next one's.

There is a graph for each batch size of a few, number of rows, kind of drafting, and whether any slot samples: all of
them are captured by `prepare`. One holds the whole step: random numbers, verify, choice, acceptance, drafting, and the
slots' next rows. The host fills in which slots take part, launches, and reads what was decided one step behind.
"""

import gc
import logging
import time
from dataclasses import dataclass, field, replace

import torch

from trtllm_dflash import kernels
from trtllm_dflash.cost.gpus import GB
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.ladder import StepKind
from trtllm_dflash.errors import EngineError
from trtllm_dflash.models.moe import MoEDecoder
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.cuda_ops import CudaOps, takes_experts
from trtllm_dflash.session.calls import Decode, Prefill, Prepare
from trtllm_dflash.session.choice import TORCH, Choice, Kernels, find_kernels, precision_of, torch_choice
from trtllm_dflash.session.graphs import StepGraphs
from trtllm_dflash.session.torch_session import SlotAccept, TorchSession
from trtllm_dflash.step import Drafting, StepInputs, StepOutputs

Tensor = torch.Tensor

_log = logging.getLogger(__name__)


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    row_count: Tensor  # [B] read by each replay
    decided: Tensor  # [B, 1 + R] written by each replay
    row_counts: list[int] = field(default_factory=list)  # what row_count holds, once it was filled in


class CudaSession(TorchSession):
    """Runs captured steps.

    Args: as in `TorchSession`, and
        kernels: "auto" computes with our CUDA kernels wherever they compute such an engine; "torch" without them.

    Raises:
        EngineError: as `Session`; and our kernels compute such an engine and are missing, stale or not for this GPU.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        communicator: Communicator | None = None,
        accept: SlotAccept | None = None,
        kernels: Kernels = "auto",
    ) -> None:
        self.library, self._why = find_kernels(config, kernels, torch.cuda.get_device_capability(device))
        super().__init__(config, weights, device, communicator, accept, flat=False)
        self._chunk_end: int | None = None  # of the chunk that is run
        if self.library is not None:
            self.communicator.share_memory(device)
        self._graphs = StepGraphs(config, self._capture)
        self._constants: dict[tuple[int, int], Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time
        self._own_stream = torch.cuda.Stream(device)
        self._own_stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def choice(self) -> Choice:
        device = torch.cuda.get_device_name(self.device)
        if self.library is None:
            return torch_choice(self.config, device, self._why)
        ours = str(self.library)
        has_products = torch.cuda.get_device_capability(self.device)[0] in kernels.SKINNY_GPUS
        experts = "none"
        if isinstance(self._step.target, MoEDecoder):
            experts = ours if self._has_experts(self._step.target) else TORCH
        return Choice(
            backend="torch, captured",
            device=device,
            precision=precision_of(self.config),
            attention=ours,
            products=ours if has_products else TORCH,
            experts=experts,
            why=self._why,
            library=self.library.path,
        )

    def _has_experts(self, target: MoEDecoder) -> bool:
        """Whether our kernels compute the target's experts; its layers are alike."""
        layer = target.experts("model.layers.0.", self.communicator.size, self.communicator.rank)
        return takes_experts(layer, self.weights, self.config.target.hidden_size, self.config.dtype)

    def _stream(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._own_stream)

    def _free(self) -> None:
        torch.cuda.synchronize(self.device)
        self._graphs.clear()
        super()._free()

    def _run_prefill(self, call: Prefill) -> Tensor:
        self._chunk_end = call.start + len(call.token_ids)
        try:
            return super()._run_prefill(call)
        finally:
            self._chunk_end = None

    def _needs(self, call: Prepare) -> bool:
        return bool(self._graphs.missing(call))

    @torch.inference_mode()
    def _prepare(self, call: Prepare, progress: Progress) -> None:
        torch.cuda.empty_cache()
        begin, before, count = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0], len(self._graphs)
        # torch collects garbage before each capture: what is there now need not be looked through every time.
        gc.collect()
        gc.freeze()
        try:
            with self._stream():
                self._graphs.prepare(call, progress)
        except torch.OutOfMemoryError:
            raise EngineError(
                "the GPU's memory ran out while steps were captured; build with a smaller --max-batch or --max-seq-len"
            ) from None
        finally:
            gc.unfreeze()
        torch.cuda.empty_cache()  # what the steps took that ran before each capture
        taken = (before - torch.cuda.mem_get_info(self.device)[0]) / GB
        seconds, captured = time.perf_counter() - begin, len(self._graphs) - count
        if self.communicator.rank == 0:
            _log.info("%s: %d steps captured in %.1f s and %.2f GB", self.config.name, captured, seconds, taken)

    def _run_decode(self, call: Decode) -> Tensor:
        kind, captured = self._graphs.find(call)
        row_counts = call.row_counts + [0] * (kind.slots - len(call.row_counts))
        if row_counts != captured.row_counts:
            on_host = torch.tensor(row_counts, dtype=torch.int32, pin_memory=True)
            captured.row_count.copy_(on_host, non_blocking=True)
            captured.row_counts = row_counts
        captured.graph.replay()
        return captured.decided

    def _capture(self, kind: StepKind) -> _Graph:
        row_count = torch.zeros(kind.slots, dtype=torch.int32, device=self.device)
        arguments = row_count, kind.rows, kind.drafting, kind.rows, kind.sampled
        # Once for real, with no slot taking part: libraries set themselves up, which no capture allows.
        self._decode_rows(*arguments)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating: only this one is held to what a capture allows.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._own_stream, capture_error_mode="thread_local"):
            decided = self._decode_rows(*arguments)
        return _Graph(graph, row_count, decided)

    def _decode_rows(self, row_count: Tensor, rows: int, drafting: Drafting, block: int, sampled: bool) -> Tensor:
        if self.library is None:
            return super()._decode_rows(row_count, rows, drafting, block, sampled)
        count, slots = len(row_count), self._slots
        here = slice(0, count)
        token_ids, start = kernels.begin_step(slots.tokens, slots.start, row_count, rows, rows + block)
        logit_rows = self._constant(count, rows)
        sampling = slots.sampling(here, slots.start[here, None] + logit_rows) if sampled else None
        inputs = StepInputs(token_ids, start, row_count, logit_rows, self._constant(1, block), sampling)
        out = self._step(CudaOps(self.weights, self._caches_of(0, count), self.communicator), inputs, drafting)
        return kernels.end_step(
            slots.tokens,
            slots.start,
            row_count,
            self.config.max_seq_len - 1,
            out.target_ids,
            out.accepted,
            out.next_start,
            out.next_tokens,
        )

    def _constant(self, count: int, rows: int) -> Tensor:
        """Makes 0..rows-1 for each of `count` slots, [count, rows]. Made before a capture, it is not in the graph."""
        made = self._constants.get((count, rows))
        if made is None:
            made = self._constants[count, rows] = self._offsets(rows).repeat(count, 1)
        return made

    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        if self.library is None:
            return super()._run(inputs, drafting, first_slot)
        caches = self._caches_of(first_slot, len(inputs.token_ids))
        ops = CudaOps(self.weights, caches, self.communicator, self._chunk_end)
        if self._chunk_end is None:
            inputs = replace(inputs, start=_idle_below_zero(inputs))
        return self._step(ops, inputs, drafting)


def _idle_below_zero(inputs: StepInputs[Tensor]) -> Tensor:
    """Lowers `start` [B] of slots without real rows, so that their rows end below position 0: see `CudaOps`."""
    rows = inputs.token_ids.shape[1] + inputs.block_offsets.shape[1]
    return inputs.start.masked_fill(inputs.row_count == 0, -rows)


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
