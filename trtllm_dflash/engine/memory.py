"""How much memory an engine needs on each GPU, and whether it has that."""

from bisect import bisect_left
from dataclasses import dataclass

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.models import build_target
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import PREFIX, Drafter
from trtllm_dflash.models.weights import Weight, WeightPrecision, units_per_rank

GB = 1_000_000_000

#: What the driver, CUDA's context and captured graphs take, and what fragmentation loses.
RESERVED = 2 * GB


@dataclass(frozen=True)
class GPU:
    """A GPU that engines are built for."""

    memory: int  # GB, as in its data sheet
    capability: int  # 89: compute capability 8.9


#: By the name that `--gpu` takes.
GPUS = {
    "b300": GPU(288, 103),
    "b200": GPU(192, 100),
    "h200": GPU(141, 90),
    "h100": GPU(80, 90),
    "rtx-pro-6000": GPU(96, 120),
    "rtx-5090": GPU(32, 120),
    "rtx-4090": GPU(24, 89),
    "l40s": GPU(48, 89),
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each GPU with all slots in use."""

    weights: int
    target_cache: int
    drafter_cache: int
    scratch: int  # activations, an estimate

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.target_cache + self.drafter_cache + self.scratch


def plan_memory(config: EngineConfig) -> MemoryPlan:
    """The bytes that one rank of an engine needs; the first rank, which holds the most."""
    size = config.dtype.itemsize
    caches = {name: _count(shape) * size for name, shape in cache_shapes(config).items()}
    drafter = sum(count for name, count in caches.items() if name.startswith(PREFIX))
    return MemoryPlan(
        weights=weight_bytes(config),
        target_cache=sum(caches.values()) - drafter,
        drafter_cache=drafter,
        scratch=_scratch(config),
    )


def check_fits(config: EngineConfig, gpu: str) -> MemoryPlan:
    """The memory plan of an engine, once it fits.

    Raises:
        SettingsError: the GPU is not known.
        EngineError: it does not fit; says by how much, and which knob helps.
    """
    if gpu not in GPUS:
        raise SettingsError(f"--gpu {gpu} is not known; known: {', '.join(GPUS)}")
    plan = plan_memory(config)
    room = GPUS[gpu].memory * GB - RESERVED
    if plan.total > room:
        parts = {"weights": plan.weights, "caches": plan.target_cache + plan.drafter_cache, "scratch": plan.scratch}
        raise EngineError(
            f"the engine needs {_gb(plan.total)} on each GPU ({', '.join(f'{k} {_gb(v)}' for k, v in parts.items())}), "
            f"{_gb(plan.total - room)} more than {gpu} has: {_advice(config, room)}"
        )
    return plan


def _advice(config: EngineConfig, room: int) -> str:
    """The knobs that would do, one at a time, with the largest value of each (of lengths: in tenths)."""

    def fits(**changes: int) -> bool:
        return plan_memory(config.model_copy(update=changes)).total <= room

    most = bisect_left(range(1, config.max_batch), True, key=lambda n: not fits(max_batch=n))
    tenth = -(-config.max_seq_len // 10)
    lengths = [n for n in range(config.max_seq_len - tenth, config.chunk, -tenth) if fits(max_seq_len=n)][:1]
    ranks = [n for n in (2, 4, 8) if n > config.tp and config.target.heads % n == 0 and fits(tp=n)][:1]
    knobs = {"--max-batch": [most] if most else [], "--max-seq-len": lengths, "--tp": ranks}
    advice = [f"{knob} {value}" for knob, values in knobs.items() for value in values]
    return "use " + " or ".join(advice) if advice else "use a smaller model, or --precision bf16 where it is fp32"


def weight_count(config: EngineConfig) -> int:
    """Parameters that the first rank holds, with the RoPE tables; a tied head counts once."""
    return sum(_count(weight.shape(config.tp, 0)) for weight in _weights(config)) + _completed(config)


def weight_bytes(config: EngineConfig) -> int:
    """Bytes of those parameters and tables, as they are multiplied; see `multiplied_precision`."""
    size = config.dtype.itemsize
    weights = [(multiplied_precision(config, weight), weight.shape(config.tp, 0)) for weight in _weights(config)]
    return sum(precision.stored_bytes(shape, size) for precision, shape in weights) + _completed(config) * size


def multiplied_precision(config: EngineConfig, weight: Weight) -> WeightPrecision:
    """How a weight lies in a GPU's memory: the torch backend dequantizes NVFP4, and blocks of FP8, at load."""
    if config.backend == "torch" and weight.precision is not WeightPrecision.FP8:
        return WeightPrecision.ENGINE
    return weight.precision


def _weights(config: EngineConfig) -> list[Weight]:
    weights = build_target(config.target).weights()
    return weights + Drafter(config.drafter).weights() if config.drafter is not None else weights


def _completed(config: EngineConfig) -> int:
    """Numbers that a session adds to what is stored: RoPE tables, and a rank's slice of a tied head."""
    sizes = [config.target.head_size] + ([config.drafter.head_size] if config.drafter is not None else [])
    count = sum(config.cache_length * size for size in sizes)
    if config.target.tied_embeddings and config.tp > 1:  # a tensor of its own
        count += config.target.vocab_size // config.tp * config.target.hidden_size
    return count


def cache_shapes(config: EngineConfig) -> dict[str, tuple[int, int, int, int]]:
    """Shape [slots, heads, S, D] of every K/V cache on one rank, by name."""
    models: list[tuple[str, DecoderConfig]] = [("model.", config.target)]
    if config.drafter is not None:
        models.append((PREFIX, config.drafter))
    return {
        f"{prefix}layers.{i}.{kind}": (
            config.max_batch,
            units_per_rank(model.kv_heads, config.tp),
            config.cache_length,
            model.head_size,
        )
        for prefix, model in models
        for i in range(model.layers)
        for kind in ("key", "value")
    }


def _scratch(config: EngineConfig) -> int:
    """Activations of the larger of the two profiles: the widest layer's, the taps, and the logits in FP32."""
    target, size = config.target, config.dtype.itemsize
    taps = len(config.drafter.tap_layers) if config.drafter else 0
    shared = units_per_rank(target.heads, config.tp) * target.head_size
    wide = 3 * target.intermediate_size // config.tp + 4 * shared + (taps + 6) * target.hidden_size
    rows = max(config.chunk, config.max_batch * config.block_size)
    logit_rows = config.max_batch * config.block_size
    # Greedy: the rank's own slice, and the drafts' logits after it. Sampled: the whole vocabulary, and its masses.
    logits = target.vocab_size * 3 if config.sampling else 2 * target.vocab_size // config.tp
    return rows * wide * size + logit_rows * logits * 4


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _gb(count: int) -> str:
    return f"{count / GB:.1f} GB"
