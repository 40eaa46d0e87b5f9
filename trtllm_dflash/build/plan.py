"""`build --plan`: the memory, steps and tokens a second of an engine that does not exist yet."""

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trtllm_dflash.build.assumptions import assumptions, error_bound, expert_precision, rest_precision
from trtllm_dflash.build.caches import page_limits
from trtllm_dflash.build.defaults import choose_limits, memory_of
from trtllm_dflash.build.planning import build_precision, open_checkpoints, plan_engine, plan_models
from trtllm_dflash.build.settings import DEFAULT_MAX_BATCH, DEFAULTS_OF_TENSORRT, BuildSettings, Count
from trtllm_dflash.build.transcoding import check_transcoding
from trtllm_dflash.checkpoint.hub import PACKAGE
from trtllm_dflash.cost.acceptance import ImposedAcceptance, check_acceptance
from trtllm_dflash.cost.floor import StepCount, experts_touched, is_expert
from trtllm_dflash.cost.gpus import GPUS, RESERVED, PublishedGPU
from trtllm_dflash.cost.memory import (
    MemoryPlan,
    check_fits,
    computes_all_experts,
    fits_in,
    pages_on_gpu,
    plan_adds,
    stored_bytes,
)
from trtllm_dflash.cost.prediction import Limit, predict_step, sum_bytes
from trtllm_dflash.cost.published import PUBLISHED
from trtllm_dflash.cost.shapes import planned_models, shape_models
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.ladder import batch_sizes, draft_lengths
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.models import target_weights
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.models.weights import Weight
from trtllm_dflash.step import Drafting

_CACHE_LENGTH = 1024
_MOST_SLOTS = 1 << 16  # that are searched for
_MOST_BATCH = 1024  # that a step is predicted for
#: Batches at which GPUs are compared.
COMPARED = (1, 32)


class PlanSettings(BaseModel):
    """Settings of `build --plan`, besides those of `build`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str | None = None  # None: all that are known, one line each
    acceptance: float | None = None  # tokens a step with the drafter's whole block
    cache_length: Count | None = None  # tokens that each slot holds in the steps that are predicted


class Limits(BaseModel):
    """Published limits of a GPU, and the shares of them that a large copy and product are taken to get."""

    memory: int  # bytes
    bandwidth: float  # bytes a second
    flops: float  # in the engine's precision, dense, a second
    link: float  # bytes a second one way, between GPUs
    nvlink: bool
    copy_share: float
    gemm_share: float


class Memory(BaseModel):
    """Bytes on each GPU; on the first rank, which holds the most."""

    attention: int
    feed_forward: int  # dense
    experts: int
    embedding: int
    lm_head: int  # 0: the embedding is the head
    rest: int  # norms, routers, RoPE tables
    drafter: int
    target_cache_per_slot: int
    drafter_cache_per_slot: int
    slots: int
    states: int  # of gated delta nets: the slots', and those that are kept beside them
    scratch: int  # activations, an estimate
    graphs: int  # captured steps, an allowance
    reserved: int  # the driver, CUDA, fragmentation
    total: int


class Pages(BaseModel):
    """Pages of the K/V caches that --kv-memory holds."""

    count: int
    rows: int  # tokens in each

    def conversations(self, tokens: int) -> int:
        """Conversations of so many tokens that fit, if they share nothing."""
        return self.count // -(-tokens // self.rows)


class Point(BaseModel):
    """One step with so many slots and drafts.

    Attributes:
        arm: as a sweep's.
        drafts: K; a draft step of 0 writes the drafter's context alone.
        best: of the draft steps of this batch, it commits the most tokens a second at the given acceptance.
        limit: the part that takes the most of its time.
        experts_touched: of each layer's, by all slots together; None of a dense target.
        sums, sum_bytes: all-reduces in a step, and bytes of each rank in one.
        tokens_per_step: of each slot; None where no acceptance is given.
    """

    arm: Literal["plain", "draft"]
    batch: int
    drafts: int
    best: bool = False
    seconds: float
    floor_seconds: float
    products_seconds: float
    attention_seconds: float
    layers_seconds: float
    sums_seconds: float
    limit: Limit
    experts_touched: float | None
    sums: int
    sum_bytes: int
    tokens_per_step: float | None
    tokens_per_second: float | None
    tokens_per_second_per_user: float | None
    tokens_per_second_per_gpu: float | None


class BuildPlan(BaseModel):
    """A GPU's plan, as `--json` writes it."""

    schema_version: Literal[1] = 1
    kind: Literal["plan"] = "plan"
    command: str = ""
    model: str
    gpu: str
    limits: Limits
    precision: str
    linear_precision: str | None  # of the target's matrices, experts aside; None: `precision`
    expert_precision: str | None
    tp: int
    expert_parallel: bool
    max_batch: int
    max_seq_len: int
    block_size: int
    cache_length: int
    acceptance: float | None  # tokens a step with the whole block
    memory: Memory
    pages: Pages | None  # None without --kv-memory: all slots have room for max_seq_len tokens
    largest_batch: int  # with slots of max_seq_len tokens, or these pages; no more than 65,536 are looked for
    largest_seq_len: int  # with max_batch slots
    error_bound: float  # of predicted steps against measured ones: see the assumptions
    assumptions: list[str]
    points: list[Point]


class Comparison(BaseModel):
    """The comparison of GPUs, as `--json` writes it where no GPU is named."""

    schema_version: Literal[1] = 1
    kind: Literal["plans"] = "plans"
    command: str = ""
    plans: list[BuildPlan]
    refused: dict[str, str]  # GPU -> why the engine does not fit it, and which knobs help


def compare_gpus(build: BuildSettings, settings: PlanSettings) -> Comparison:
    """Plans for every known GPU, at a few batches.

    Raises:
        SettingsError: as `make_plan`'s.
    """
    plans, refused, wrong = [], {}, []
    for gpu in GPUS:
        try:
            plans.append(make_plan(build, settings.model_copy(update={"gpu": gpu}), COMPARED))
        except EngineError as error:
            refused[gpu] = str(error)
        except SettingsError as error:  # a GPU may lack a precision
            refused[gpu] = str(error)
            wrong.append(error)
    if len(wrong) == len(GPUS):
        raise wrong[0]
    return Comparison(plans=plans, refused=refused)


def make_plan(build: BuildSettings, settings: PlanSettings, batches: tuple[int, ...] | None = None) -> BuildPlan:
    """Plans the engine of these settings, on the GPU that they name.

    Args:
        batches: to predict steps for, where they fit; None: 1, 2, 4 and so on.

    Raises:
        SettingsError: the GPU or the model's shape is not known, or a setting does not fit the model.
        EngineError: it does not fit the GPU; says which knobs help.
    """
    if settings.gpu not in GPUS:
        raise SettingsError(f"--gpu {settings.gpu}: --plan knows {', '.join(GPUS)}")
    gpu = GPUS[settings.gpu]
    config = planned_engine(build, gpu.name)
    check_plan(config, settings)
    memory = check_fits(config, gpu.name)

    def fits(**changes: int) -> bool:
        return fits_in(gpu.usable_bytes, config.model_copy(update=changes), gpu)

    most = largest(config.max_batch, _MOST_SLOTS, lambda n: fits(max_batch=n))
    longest = largest(config.max_seq_len, config.target.max_positions, lambda n: fits(max_seq_len=n))
    length = settings.cache_length or min(_CACHE_LENGTH, config.max_seq_len - 1)
    pages = _pages(config, gpu)
    at_once = most if pages is None else max(1, min(most, pages.conversations(length + config.block_size)))
    if batches is None:
        batches = tuple(batch_sizes(min(at_once, _MOST_BATCH)))
    moe = config.target.moe
    return BuildPlan(
        model=config.name,
        gpu=gpu.name,
        limits=_limits(config, gpu),
        precision=config.precision,
        linear_precision=rest_precision(config.target),
        expert_precision=expert_precision(config),
        tp=config.tp,
        expert_parallel=moe is not None and moe.expert_parallel,
        max_batch=config.max_batch,
        max_seq_len=config.max_seq_len,
        block_size=config.block_size,
        cache_length=length,
        acceptance=settings.acceptance,
        memory=_memory(config, memory, gpu),
        pages=pages,
        largest_batch=most,
        largest_seq_len=longest,
        error_bound=error_bound(config),
        assumptions=[*assumptions(config, gpu, settings.acceptance), *_of_drafter(config)],
        points=_points(config, gpu, settings.acceptance, sorted({min(batch, at_once) for batch in batches}), length),
    )


def _of_drafter(config: EngineConfig) -> list[str]:
    shape = PUBLISHED.get(config.name)
    if config.drafter is None or shape is None or not shape.facts.deduced:
        return []
    return ["Drafter: its config.json is behind a gate: layers, widths, block and taps are deduced, not read."]


def planned_engine(build: BuildSettings, gpu: str) -> EngineConfig:
    """Configures the engine that would be built for a GPU, from a local checkpoint, or else a known pair's shape.

    Raises:
        SettingsError: there is neither, or a setting does not fit the model.
    """
    is_here = build.target.startswith(PACKAGE) or Path(build.target).expanduser().is_dir()
    config = _engine_of_checkpoint(build, gpu) if is_here else _engine_of_shape(build, gpu)
    backend = build.backend or "torch"
    asked = {"gpu": gpu, "plugin": build.plugin} if backend == "tensorrt" else {}
    config = config.model_copy(update={"backend": backend, "sampling": build.sampling, **asked})
    return config.model_copy(update=choose_limits(config, build, memory_of(gpu)).changes)


def _engine_of_checkpoint(build: BuildSettings, gpu: str) -> EngineConfig:
    pair = open_checkpoints(build)
    check_transcoding(pair, build)
    choice = build_precision(pair.target_config, pair.drafter_config, build, gpu)
    # For torch: no compiler is asked what it can compile here.
    kv = "engine" if build.backend == "tensorrt" else build.kv
    settings = build.model_copy(update={**DEFAULTS_OF_TENSORRT, "gpu": None, "backend": "torch", "kv": kv})
    return plan_engine(pair, settings, choice).config


def _engine_of_shape(build: BuildSettings, gpu: str) -> EngineConfig:
    if build.name not in PUBLISHED:
        known = ", ".join(PUBLISHED)
        raise SettingsError(f"--plan: the shape of {build.target} is not known without its checkpoint; known: {known}")
    # A TensorRT plan holds what it does, and not what our kernels will.
    target, drafter = (shape_models if build.backend == "tensorrt" else planned_models)(build.name)
    choice = build_precision(target, drafter, build, gpu)
    models = plan_models(target, drafter, build, choice)
    return EngineConfig(
        name=build.name,
        precision=choice.engine,
        tp=build.tp,
        max_batch=build.max_batch or DEFAULT_MAX_BATCH,
        max_seq_len=models.max_seq_len,
        chunk=models.chunk,
        block_size=models.block_size,
        target=models.target,
        drafter=models.drafter,
        kv="fp8" if build.kv == "fp8" else None,
        **page_limits(build.page_size, build.kv_memory, build.backend or "torch", models.max_seq_len),
    )


def check_plan(config: EngineConfig, settings: PlanSettings) -> None:
    """Checks a plan's own settings against the engine.

    Raises:
        SettingsError: nothing is drafted, a block does not commit so many tokens, or a slot does not hold so many.
    """
    tokens, length = settings.acceptance, settings.cache_length
    if tokens is not None:
        if config.drafter is None:
            raise SettingsError(f"--acceptance {tokens:g}: there is no drafter; give --drafter")
        check_acceptance("--acceptance", tokens, config.drafter.step_rows)
    if length is not None and length >= config.max_seq_len:
        raise SettingsError(
            f"--cache-length {length}: a slot holds less than --max-seq-len {config.max_seq_len} tokens"
        )


def largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Finds the largest number up to `most` that fits; `least` does."""
    return least + bisect_left(range(least + 1, most + 1), True, key=lambda n: not fits(n))


def _limits(config: EngineConfig, gpu: PublishedGPU) -> Limits:
    return Limits(
        memory=gpu.bytes,
        bandwidth=gpu.bandwidth,
        flops=gpu.products(config.precision),
        link=gpu.link,
        nvlink=gpu.nvlink,
        copy_share=gpu.copy_share,
        gemm_share=gpu.gemm_share,
    )


def _memory(config: EngineConfig, plan: MemoryPlan, gpu: PublishedGPU) -> Memory:
    return Memory(
        **_weights_by_part(config, plan.weights, gpu),
        target_cache_per_slot=plan.target_cache // config.max_batch,
        drafter_cache_per_slot=plan.drafter_cache // config.max_batch,
        slots=config.max_batch,
        states=plan.states,
        scratch=plan.scratch,
        graphs=plan.graphs,
        reserved=RESERVED,
        total=plan.total + RESERVED,
    )


def _pages(config: EngineConfig, gpu: PublishedGPU) -> Pages | None:
    if config.kv_memory is None:
        return None
    paging = pages_on_gpu(config, gpu)
    return Pages(count=paging.pages, rows=paging.rows)


def _weights_by_part(config: EngineConfig, total: int, gpu: PublishedGPU) -> dict[str, int]:
    sizes = dict.fromkeys(("attention", "feed_forward", "experts", "embedding", "lm_head", "rest", "drafter"), 0)
    size = config.dtype.itemsize
    for weight in target_weights(config.target):
        sizes[_part(weight)] += stored_bytes(config, weight, gpu)
    if config.drafter is not None:
        sizes["drafter"] = sum(stored_bytes(config, weight, gpu) for weight in Drafter(config.drafter).weights())
    if config.target.tied_embeddings and config.tp > 1:  # a rank's slice is a tensor of its own
        sizes["lm_head"] = config.target.vocab_size // config.tp * config.target.hidden_size * size
    # A TensorRT plan may hold experts otherwise than they are stored.
    sizes["experts"] += plan_adds(config)
    sizes["rest"] += total - sum(sizes.values())
    return sizes


def _part(weight: Weight) -> str:
    if is_expert(weight):
        return "experts"
    names = {"embed_tokens": "embedding", "lm_head": "lm_head", "self_attn": "attention", "linear_attn": "attention"}
    names |= {"mlp.gate_up_proj": "feed_forward", "mlp.down_proj": "feed_forward", "shared_expert": "feed_forward"}
    return next((part for name, part in names.items() if name in weight.name), "rest")


# -- steps -----------------------------------------------------------------------------------------------------------


def _points(
    config: EngineConfig, gpu: PublishedGPU, acceptance: float | None, batches: list[int], length: int
) -> list[Point]:
    count, points = StepCount(config, gpu), []
    for batch in batches:
        points.append(_point(count, gpu, acceptance, "plain", batch, 0, length))
        if config.drafter is None:
            continue
        lengths = draft_lengths(config.block_size)
        drafted = [_point(count, gpu, acceptance, "draft", batch, drafts, length) for drafts in lengths]
        if acceptance is not None:
            best = max(drafted, key=lambda point: point.tokens_per_second or 0)
            drafted = [point.model_copy(update={"best": point is best}) for point in drafted]
        points += drafted
    return points


def _point(
    count: StepCount,
    gpu: PublishedGPU,
    acceptance: float | None,
    arm: Literal["plain", "draft"],
    batch: int,
    drafts: int,
    length: int,
) -> Point:
    config = count.config
    drafting = Drafting.OFF if arm == "plain" else Drafting.BLOCK if drafts else Drafting.CONTEXT
    time = predict_step(count, gpu, drafting, batch, drafts + 1, length)
    parts = count.parts(drafting, batch, drafts + 1, length)
    tokens = 1.0 if drafts == 0 else None
    if drafts and acceptance is not None and config.drafter is not None:
        tokens = ImposedAcceptance(acceptance, config.drafter.step_rows).at(drafts + 1)
    rate = None if tokens is None else batch * tokens / time.seconds
    moe, touched = config.target.moe, None
    if moe is not None:
        touched = moe.experts if computes_all_experts(config) else experts_touched(moe, batch * (drafts + 1))
    return Point(
        arm=arm,
        batch=batch,
        drafts=drafts,
        seconds=time.seconds,
        floor_seconds=time.floor,
        products_seconds=time.products,
        attention_seconds=time.attention,
        layers_seconds=time.layers,
        sums_seconds=time.sums,
        limit=time.limit,
        experts_touched=touched,
        sums=sum(part.sums for part in parts) if config.tp > 1 else 0,
        sum_bytes=sum_bytes(config, parts[0]),
        tokens_per_step=tokens,
        tokens_per_second=rate,
        tokens_per_second_per_user=None if rate is None else rate / batch,
        tokens_per_second_per_gpu=None if rate is None else rate / config.tp,
    )
