"""The engines whose steps our CUDA kernels compute on flat rows, over caches in pages."""

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.kernels import MAX_ROWS, MOST_SEGMENTS, why_unsupported
from trtllm_dflash.models import without_kernels


def why_not_flat(config: EngineConfig, capability: tuple[int, int]) -> str | None:
    """Reason why our kernels do not compute flat rows of an engine on a GPU; None: they do, where they are built."""
    family = without_kernels(config.target)
    if family is not None:
        return f"our CUDA kernels have no flat rows of {family}"
    if config.block_size > MAX_ROWS:
        return f"our CUDA kernels have blocks of at most {MAX_ROWS} rows, not of {config.block_size}"
    if config.max_batch > MOST_SEGMENTS:
        return f"our CUDA kernels have steps of at most {MOST_SEGMENTS:,} slots, not of {config.max_batch:,}"
    return why_unsupported(config.dtype, config.head_sizes, capability, config.kv, config.rotated)
