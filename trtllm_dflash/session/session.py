"""The interface of sessions, which run steps: the same whatever computes them, on one rank or several.

Each slot's next rows and position lie on the device, where a step leaves them for the next: the host says which slots
take part, launches, and reads a step's outcome at any later time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from trtllm_dflash.cost.gpus import gigabytes
from trtllm_dflash.cost.memory import cache_bytes, cache_shapes
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.paging import Paging, linear_paging
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.session.calls import Call, Copy, CopyStates, Decode, Place, Prefill, Prepare, Step, call_of, words_of
from trtllm_dflash.session.choice import Choice
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.slots import SlotTensors
from trtllm_dflash.step import Drafting, StepInputs, StepOutputs

Tensor = torch.Tensor


class Session(ABC):
    """One rank of an engine, loaded: its weights, and the K/V caches of `config.max_batch` slots.

    Under tensor parallelism rank 0 calls `prepare`, `run` and the other methods that take calls; every other rank calls
    `follow` once and stays in it: rank 0 sends each call's small integers, and all ranks compute.

    Args:
        config: the engine.
        device: of the computation.
        communicator: the other ranks.
        paging: the pages of its caches; None: one for each slot.

    Raises:
        EngineError: the device has not the memory for the caches.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, communicator: Communicator, paging: Paging | None = None
    ) -> None:
        self.config = config
        self.device = device
        self.communicator = communicator
        self.paging = paging or linear_paging(config)
        self.caches = self._allocate_caches()
        self._slots = SlotTensors(config, device)
        self._outcome_of: Callable[[Tensor], Outcome] = Outcome  # of what the host reads of a step of [slots, rows]
        self._closed = self._is_torn = False  # torn: rank 0 left a step that others are in

    @property
    @abstractmethod
    def choice(self) -> Choice:
        """The backend and kernels that compute the steps, and the reason."""

    @property
    def ahead(self) -> int:
        """Steps to launch before the first is read: one where the device computes while the host does other work."""
        return 1 if self.device.type == "cuda" else 0

    def prepare(self, call: Prepare, progress: Progress = lambda what, done, total: None) -> None:
        """Prepares these kinds of steps before the first request: no `decode` waits for a capture after it.

        A session that captures its steps decodes no other kinds. What was prepared before stays.

        Raises:
            EngineError: the session is closed, or the device's memory ran out.
        """
        self._check_open()
        if not self._needs(call):
            return
        self._tell(call)
        with self._in_step():
            self._prepare(call, progress)

    @property
    def limits(self) -> StepLimits:
        """The steps that `run` takes."""
        return StepLimits(pieces=1, prompt_rows=self.config.chunk, mixes=False)

    def prompt_room(self, call: Step, pieces: list[int]) -> int:
        """Counts the prompt rows that a step like this one takes, with pieces of so many rows, in the same time."""
        return sum(pieces)

    def run(self, call: Step) -> Outcome:
        """Runs a step: its outcome has the decoding slots first, then the pieces. Errors as in `prefill`.

        A session of [slots, rows] decodes, or reads one piece.
        """
        self._copy_first(call)
        if call.pieces:
            (piece,) = call.pieces
            assert not call.decode
            drafting, block = call.drafting, call.block
            read = piece.token_ids, piece.last
            return self.prefill(Prefill(piece.slot, piece.start, *read, drafting, block, piece.sampling, call.tree))
        slots = [slot for slot, _ in call.decode]
        row_counts = [0] * (1 + max(slots))
        for slot, rows in call.decode:
            row_counts[slot] = rows
        return self.decode(Decode(row_counts, call.drafting, call.block, call.sampled, call.tree)).of(slots)

    def _copy_first(self, call: Step) -> None:
        """Makes a step's copies, of K/V rows and of kept states, as calls of their own."""
        for source, target, rows in call.copies:
            self.copy_rows(Copy(source, target, rows))
        for source, target in call.state_copies:
            self._copy_all_states(CopyStates(source, target))

    def prefill(self, call: Prefill) -> Outcome:
        """Runs a chunk of a prompt. The last one's outcome holds the reply's first token.

        Raises:
            EngineError: the session is closed, or the engine cannot run such a step.
        """
        return self._launch(call)

    def decode(self, call: Decode) -> Outcome:
        """Runs a step of the slots 0..B-1 on the rows that their last step left. Errors as in `prefill`."""
        return self._launch(call)

    def copy_rows(self, call: Copy) -> None:
        """Copies K/V rows between slots, after all that was launched before. Errors as in `prefill`."""
        self._tell(call)
        self._copy(call)

    def drafts(self, slots: list[int]) -> list[list[int]]:
        """Reads the drafts that the last step left in these slots; waits for it, if it must."""
        with self._stream():  # the copy to the host too: another stream's would not wait for the step
            tokens = self._slots.tokens.index_select(0, torch.tensor(slots, device=self.device)).tolist()
        return [row[1:] for row in tokens]

    def place(self, call: Place) -> None:
        """Lets a slot's recurrent states, where there are some, stand at a position. Errors as in `prefill`."""
        self._tell(call)
        self._place(call)

    @torch.inference_mode()
    def step(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int = 0) -> StepOutputs[Tensor]:
        """Runs one step of these very inputs, on this rank alone; inputs and outputs lie on the CPU.

        The caches of the slots from first_slot on are updated; the slots' own next rows are not.
        """
        self._check_open()
        with self._stream():
            out = self._run(_moved(inputs, self.device), drafting, first_slot)
            parents = None if out.next_parents is None else out.next_parents.cpu()
            chosen, accepted = out.target_ids.cpu(), out.accepted.cpu()
            return StepOutputs(chosen, accepted, out.next_start.cpu(), out.next_tokens.cpu(), parents)

    def follow(self) -> None:
        """Runs what rank 0 sends, until it closes its session.

        Raises:
            EngineError: another rank has left in the middle of it.
        """
        try:
            self._follow()
        except RuntimeError as error:
            if "by peer" not in str(error):  # as gloo says of connections that were closed or reset
                raise
            raise EngineError(f"rank {self.communicator.rank}: another rank has left in the middle of a step") from None

    def _follow(self) -> None:
        while (call := self._receive()) is not None:
            if isinstance(call, Copy):
                self._copy(call)
            elif isinstance(call, CopyStates):
                self._copy_states(call)
            elif isinstance(call, Place):
                self._place(call)
            elif isinstance(call, Prepare):
                self._prepare(call, lambda what, done, total: None)
            else:
                self._compute(call)

    def close(self) -> None:
        """Frees the session's memory, and ends the other ranks."""
        if self._closed:
            return
        self._closed = True
        if self.communicator.size > 1 and self.communicator.rank == 0 and not self._is_torn:
            self._send(None)
        self._free()  # waits for the steps under way, which write to the caches
        self.caches = {}
        self.communicator.close()

    def _allocate_caches(self) -> dict[str, Tensor]:
        config, shapes = self.config, cache_shapes(self.config, self.paging)
        try:
            return self._make_caches(shapes)
        except RuntimeError as error:  # what torch's allocators raise, on CPU and on CUDA
            pages = config.kv_memory is not None
            raise EngineError(
                f"there is no memory for {gigabytes(cache_bytes(config, self.paging))} of caches: {config.max_batch} "
                f"slots of {config.max_seq_len} tokens; build with a smaller {'--kv-memory, ' if pages else ''}"
                "--max-batch or --max-seq-len"
            ) from error

    def _make_caches(self, shapes: dict[str, tuple[int, int, int, int]]) -> dict[str, Tensor]:
        """Makes caches of zeros of these shapes, by name."""
        dtype = self.config.cache_dtype
        return {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, shape in shapes.items()}

    @abstractmethod
    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        """Computes a step on this rank; inputs and outputs lie on the device. No later step changes the outputs."""

    @abstractmethod
    def _free(self) -> None:
        """Frees the memory of this kind of session."""

    def _needs(self, call: Prepare) -> bool:
        """Whether there is anything to prepare for these kinds of steps; the same on all ranks."""
        return False

    def _prepare(self, call: Prepare, progress: Progress) -> None:  # noqa: B027
        """Prepares on this rank."""

    def _place(self, call: Place) -> None:  # noqa: B027
        """Places a slot's recurrent states on this rank."""

    def _copy_all_states(self, call: CopyStates) -> None:
        """Copies recurrent states on all ranks, after all that was launched before."""
        self._tell(call)
        self._copy_states(call)

    def _copy_states(self, call: CopyStates) -> None:  # noqa: B027
        """Copies recurrent states on this rank."""

    def _cache_rows(self, name: str, tokens: int) -> int:
        """Number of rows of a cache that hold the first `tokens` tokens."""
        return tokens

    def _stream(self) -> AbstractContextManager[object]:
        """The CUDA stream that everything runs on, where it is not the current one."""
        return nullcontext()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this engine is closed; load it again")
        if self._is_torn:
            raise EngineError("a step failed on rank 0, and the other ranks are still in it: start the engine again")

    def _launch(self, call: Step | Prefill | Decode) -> Outcome:
        self._tell(call)
        with self._in_step():
            return self._compute(call)

    def _tell(self, call: Call) -> None:
        """Sends a call to the other ranks, where there are any."""
        self._check_open()
        if self.communicator.size > 1:
            self._send(call)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Notes that ranks are no longer in step after an error: the others may wait in a sum for this one."""
        try:
            yield
        except BaseException:
            self._is_torn = self.communicator.size > 1
            raise

    @torch.inference_mode()
    def _compute(self, call: Step | Prefill | Decode) -> Outcome:
        with self._stream():
            if isinstance(call, Step):
                return self._run_step(call)
            decided = self._run_prefill(call) if isinstance(call, Prefill) else self._run_decode(call)
            return self._outcome_of(decided)

    def _run_step(self, call: Step) -> Outcome:
        """Runs a step of flat rows."""
        raise NotImplementedError

    def _run_prefill(self, call: Prefill) -> Tensor:
        """Runs a chunk; like the method below, returns the tensor that an `Outcome` is made of."""
        return self._keep_prefill(call, self._run(self._prefill_inputs(call), call.drafting, call.slot))

    def _prefill_inputs(self, call: Prefill) -> StepInputs[Tensor]:
        here = slice(call.slot, call.slot + 1)
        self._slots.set_sampling(call.slot, call.sampling)
        start = self._int32([call.start])
        rows = self._int32([[len(call.token_ids) - 1]])
        return StepInputs(
            token_ids=self._int32([call.token_ids]),
            start=start,
            row_count=rows[:, 0] + 1,
            logit_rows=rows,
            block_offsets=self._offsets(call.block),
            sampling=self._sampling_of(here, start[:, None] + rows) if call.sampling.temperature > 0 else None,
            tree=call.tree > 0,
        )

    def _keep_prefill(self, call: Prefill, out: StepOutputs[Tensor]) -> Tensor:
        here = slice(call.slot, call.slot + 1)
        self._slots.start[here] = out.next_start
        if call.last:
            self._slots.tokens[here, : out.next_tokens.shape[1]] = out.next_tokens
            if out.next_parents is not None:
                self._slots.parents[here, : out.next_parents.shape[1]] = out.next_parents
        return _decided(out)

    def _run_decode(self, call: Decode) -> Tensor:
        row_count = self._int32(call.row_counts)
        rows, is_tree = max(call.row_counts), call.tree > 0
        return self._decode_rows(row_count, rows, call.drafting, call.block, call.sampled, is_tree)

    def _decode_rows(
        self, row_count: Tensor, rows: int, drafting: Drafting, block: int, sampled: bool, tree: bool = False
    ) -> Tensor:
        """Runs a step of the first slots, from tensors on the device alone; row_count [B] of `rows` rows are real."""
        inputs = replace(self._decode_inputs(row_count, rows, block, sampled), tree=tree)
        return self._keep_decoded(inputs, self._run(inputs, drafting, 0))

    def _decode_inputs(self, row_count: Tensor, rows: int, block: int, sampled: bool) -> StepInputs[Tensor]:
        here = slice(0, len(row_count))
        start = self._slots.start[here].clone()
        logit_rows = self._offsets(rows).expand(len(row_count), -1)
        return StepInputs(
            token_ids=self._slots.tokens[here, :rows].contiguous(),
            start=start,
            row_count=row_count,
            logit_rows=logit_rows,
            block_offsets=self._offsets(block),
            sampling=self._sampling_of(here, start[:, None] + logit_rows) if sampled else None,
            parents=self._slots.parents[here, :rows] if self.config.plan_tree else None,
        )

    def _keep_decoded(self, inputs: StepInputs[Tensor], out: StepOutputs[Tensor]) -> Tensor:
        here = slice(0, len(inputs.start))
        # A slot that takes no part stays as it is. A sequence that has come to the last position is at its end, which
        # the host may learn only one step later: until then its rows must stay inside the caches.
        takes_part = inputs.row_count > 0
        next_start = out.next_start.clamp(max=self.config.max_seq_len - 1)
        self._slots.start[here] = torch.where(takes_part, next_start, inputs.start)
        tokens = self._slots.tokens[here, : out.next_tokens.shape[1]]
        tokens.copy_(torch.where(takes_part[:, None], out.next_tokens, tokens))
        if out.next_parents is not None:
            parents = self._slots.parents[here, : out.next_parents.shape[1]]
            parents.copy_(torch.where(takes_part[:, None], out.next_parents, parents))
        return self._for_host(inputs, out)

    def _for_host(self, inputs: StepInputs[Tensor], out: StepOutputs[Tensor]) -> Tensor:
        """Joins what the host reads of a step of decoding slots into one tensor."""
        return _decided(out)

    def _sampling_of(self, slots: slice, positions: Tensor) -> SamplingInputs[Tensor]:
        return self._slots.sampling(slots, positions)

    @torch.inference_mode()
    def _copy(self, call: Copy) -> None:
        with self._stream():
            for name, cache in self.caches.items():
                rows = self._cache_rows(name, call.rows)
                cache[call.target, :, :rows] = cache[call.source, :, :rows]
            self._slots.start[call.target].fill_(call.rows)  # where a slot that takes no part writes its rows meanwhile

    def _int32(self, values: list[int] | list[list[int]]) -> Tensor:
        on_host = torch.tensor(values, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def _offsets(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)[None]

    # -- calls between ranks: their number of integers, then the integers -------------------------------------------

    def _send(self, call: Call | None) -> None:
        words = [] if call is None else list(words_of(call))
        self._broadcast(torch.tensor([len(words)]))
        if words:
            self._broadcast(torch.tensor(words))

    def _receive(self) -> Call | None:
        count = int(self._broadcast(torch.zeros(1, dtype=torch.int64)))
        return call_of(self._broadcast(torch.zeros(count, dtype=torch.int64)).tolist()) if count else None

    def _broadcast(self, x: Tensor) -> Tensor:
        return self.communicator.broadcast(x)  # from host to host: the device is not waited for


def _decided(out: StepOutputs[Tensor]) -> Tensor:
    """Joins the outputs of any step that the host reads into one tensor."""
    return torch.cat([out.accepted[:, None], out.target_ids], dim=1)


def _moved(inputs: StepInputs[Tensor], device: torch.device) -> StepInputs[Tensor]:
    sampling = inputs.sampling
    if sampling is not None:
        parts = sampling.temperature, sampling.top_k, sampling.top_p, sampling.uniform
        sampling = SamplingInputs(*(x.to(device) for x in parts))
    return StepInputs(
        token_ids=inputs.token_ids.to(device),
        start=inputs.start.to(device),
        row_count=inputs.row_count.to(device),
        logit_rows=inputs.logit_rows.to(device),
        block_offsets=inputs.block_offsets.to(device),
        sampling=sampling,
        parents=None if inputs.parents is None else inputs.parents.to(device),
        tree=inputs.tree,
    )
