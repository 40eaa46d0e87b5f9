"""The precision and the pages of an engine's K/V caches, from the settings and the checkpoints."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from trtllm_dflash.build.weights import cache_scales
from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.checkpoint.quantized import cache_format
from trtllm_dflash.cost.gpus import GB
from trtllm_dflash.engine.config import Backend
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.kernels import PAGE_TILE
from trtllm_dflash.models.drafter import PREFIX
from trtllm_dflash.models.weights import Precision

#: What `--kv` takes. auto: FP8 where the target's checkpoint says so; engine: the engine's own type.
CachePrecision: TypeAlias = Literal["auto", "fp8", "engine"]


@dataclass(frozen=True)
class CacheChoice:
    """The chosen precision, as in `EngineConfig.kv`, and a remark on it."""

    kv: Literal["fp8"] | None
    said: str | None = None


def check_caches(asked: CachePrecision, backend: Backend) -> None:
    """Checks that a backend can keep such caches.

    Raises:
        SettingsError: it cannot.
    """
    if asked == "fp8" and backend == "tensorrt":
        raise SettingsError(
            "--kv fp8: TensorRT updates caches of FP32, FP16 or BF16 only; use --kv engine, or --backend torch"
        )


def choose_caches(pair: Pair, asked: CachePrecision, backend: Backend, engine: Precision) -> CacheChoice:
    """Chooses the precision of an engine's caches, the target's and the drafter's alike.

    Args:
        engine: the engine's own type.

    Raises:
        SettingsError: as `check_caches`.
        CheckpointError: a checkpoint's scale is not valid.
    """
    check_caches(asked, backend)
    wanted = cache_format(pair.target_folder)
    if asked == "engine" or (asked == "auto" and wanted is None):
        return CacheChoice(None)
    if asked == "auto" and (wanted != "FP8" or backend == "tensorrt"):
        return CacheChoice(None, f"kv auto: the target's checkpoint asks for caches in {wanted}; they are in {engine}")
    models = {"target": pair.target_config, **({"drafter": pair.drafter.config} if pair.drafter is not None else {})}
    found = dict.fromkeys(models, 0)
    for name in cache_scales(pair):
        found["drafter" if name.startswith(PREFIX) else "target"] += 1
    scales = [f"{role}: {_scales(found[role], 2 * model.layers)}" for role, model in models.items()]
    return CacheChoice("fp8", f"kv {asked}: caches in fp8; {', '.join(scales)}")


def _scales(found: int, caches: int) -> str:
    if found == 0:
        return "scale 1"
    return "its checkpoint's scales" if found == caches else f"scale 1 in {caches - found} of {caches} caches"


def page_limits(page_size: int | None, kv_memory: float | None, backend: Backend, max_seq_len: int) -> dict[str, Any]:
    """Chooses what `EngineConfig` says of its caches' pages, from --page-size and --kv-memory in GB.

    Raises:
        SettingsError: the backend keeps no pages, or our kernels read no such ones.
    """
    limits: dict[str, Any] = {}
    for name, asked in (("--kv-memory", kv_memory), ("--page-size", page_size)):
        if asked is not None and backend == "tensorrt":
            raise SettingsError(f"{name} {asked:g}: TensorRT's own layers keep one page a slot; use --backend torch")
    if page_size is not None:
        if page_size < max_seq_len and page_size % PAGE_TILE:
            raise SettingsError(f"--page-size {page_size}: choose a multiple of {PAGE_TILE}")
        limits["page_size"] = page_size
    if kv_memory is not None:
        limits["kv_memory"] = int(kv_memory * GB)
    return limits
