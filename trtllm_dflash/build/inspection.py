"""Inspecting an engine directory without loading it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_dflash.cost.gpus import GPU, present_gpu
from trtllm_dflash.cost.memory import MemoryPlan, pages_on_gpu, plan_memory
from trtllm_dflash.cost.states import checkpoint_count, copies_states, state_bytes
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import check_present, rank_files, read_config
from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.session.plan_io import IO, Binding, step_io


@dataclass(frozen=True)
class Inspection:
    """An engine's configuration, its step's inputs and outputs, and the memory that it needs on each GPU."""

    config: EngineConfig
    io: IO
    memory: MemoryPlan
    sizes: dict[str, int]  # each rank's file, bytes
    gpu: GPU | None  # of this process, on which the memory is counted; see `plan_memory`

    @property
    def paging(self) -> Paging:
        """The pages of its caches on a GPU; a CPU keeps one a slot unless it is asked for others."""
        return pages_on_gpu(self.config, self.gpu)

    @property
    def state(self) -> int:
        """Bytes of a slot's states of gated delta nets."""
        return state_bytes(self.config)

    @property
    def states(self) -> str:
        """The slots' states and those that are kept beside them, in words."""
        twice = " twice" if self.copies_states else ""
        return f"{self.config.max_batch} slots'{twice} and {checkpoint_count(self.config)} kept"

    @property
    def copies_states(self) -> bool:
        """Whether states are copied behind a step, and not updated in place."""
        return copies_states(self.config)

    @property
    def precision(self) -> str:
        """Precision of the target's matrices, and of the rest."""
        kind = self.config.target.linear_precision
        return self.config.precision if kind is None else f"{kind.value} matrices, the rest in {self.config.precision}"

    @property
    def drafter(self) -> str | None:
        """The drafter in words; None where there is none."""
        drafter = self.config.drafter
        if drafter is None:
            return None
        taps = ", ".join(map(str, drafter.tap_layers))
        words = f"drafter of {drafter.layers} layers, block {self.config.block_size}, tap layers {taps}"
        if self.config.plan_tree:
            words += f", trees of {self.config.plan_tree}"
        if drafter.linear_precision is not None:
            words += f", {drafter.linear_precision.value} matrices"
        if drafter.draft_vocab_size is not None:
            words += f", drafts among {drafter.draft_vocab_size} of {drafter.vocab_size} tokens"
        return words

    def as_json(self) -> dict[str, Any]:
        """Makes the report that `inspect --json` prints."""
        memory = {**asdict(self.memory), "total": self.memory.total}
        config = self.config.model_dump(mode="json", exclude={"files", "sources"})
        sides = {"inputs": self.io.inputs, "outputs": self.io.outputs}
        shapes = {side: {name: _binding(b) for name, b in bindings.items()} for side, bindings in sides.items()}
        return {**config, **shapes, "pages": asdict(self.paging), "memory_per_gpu": memory, "rank_files": self.sizes}


def inspect_engine(path: Path) -> Inspection:
    """Reads an engine directory's config.json and looks at its files.

    Raises:
        EngineError: it is not an engine directory, or not a whole one.
    """
    config = read_config(path)
    check_present(path, config)
    sizes = {file.name: file.stat().st_size for file in rank_files(path, config)}
    gpu = present_gpu()
    return Inspection(config, step_io(config, config.sampling), plan_memory(config, gpu), sizes, gpu)


def _binding(binding: Binding) -> dict[str, Any]:
    return {"shape": list(binding.shape), "dtype": str(binding.dtype).removeprefix("torch.")}
