"""The memory that an engine needs on each GPU, and whether it fits."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

import torch

from trtllm_dflash.cost.gpus import GB, GPU, GPUS, PublishedGPU, capability, find_gpu, gigabytes
from trtllm_dflash.cost.states import states_bytes
from trtllm_dflash.engine.config import Backend, EngineConfig
from trtllm_dflash.engine.flat_rows import why_not_flat
from trtllm_dflash.engine.ladder import PIECES, draft_lengths, shaped_kinds, step_kinds
from trtllm_dflash.engine.paging import PAGE_ROWS, Paging, linear_paging
from trtllm_dflash.errors import EngineError
from trtllm_dflash.kernels import OLDEST_GPU
from trtllm_dflash.kernels.delta_net import scratch_bytes
from trtllm_dflash.models import build_target, pair_weights
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import PREFIX, DrafterConfig
from trtllm_dflash.models.mixers import Attends, mixers_of
from trtllm_dflash.models.weights import Content, Weight, WeightPrecision, units_per_rank
from trtllm_dflash.ops.fp8 import multiplies_blocks
from trtllm_dflash.ops.tensorrt_attention import MOST_FUSED, SINK_SIZE
from trtllm_dflash.ops.tensorrt_moe import MOE_LAYER_CAPABILITIES, has_mixture_layer, multiplies_fp4

#: Bytes that CUDA keeps of one layer in one captured step, its kernels' launches and arguments: an H200 kept 29 KiB of
#: Qwen3-8B's shape, on average of 36 steps, and less of gpt-oss-20b's.
GRAPH_LAYER = 32 << 10


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each GPU with all slots in use."""

    weights: int
    target_cache: int
    drafter_cache: int
    states: int  # of gated delta nets, and copies of some
    scratch: int  # activations, an estimate
    graphs: int  # captured steps, an allowance; a CPU has none

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.target_cache + self.drafter_cache + self.states + self.scratch + self.graphs


def plan_memory(config: EngineConfig, gpu: GPU | None = None) -> MemoryPlan:
    """Counts the bytes that the first rank of an engine needs, which holds the most.

    Args:
        gpu: that it runs on, which decides on kernels; None: one that has all of ours, and multiplies as `stored_as`
            says of one that is not known.
    """
    size = config.cache_dtype.itemsize
    caches = {name: prod(shape) * size for name, shape in cache_shapes(config, pages_on_gpu(config, gpu)).items()}
    drafter = sum(count for name, count in caches.items() if name.startswith(PREFIX))
    return MemoryPlan(
        weights=weight_bytes(config, gpu),
        target_cache=sum(caches.values()) - drafter,
        drafter_cache=drafter,
        states=states_bytes(config),
        scratch=_scratch(config, gpu),
        graphs=_graphs(config),
    )


def fits_in(room: int, config: EngineConfig, gpu: GPU | None) -> bool:
    """Whether so many bytes of a GPU (as in `plan_memory`) hold an engine, and its pages one sequence."""
    try:
        return plan_memory(config, gpu).total <= room
    except EngineError:  # the pages do not
        return False


def check_fits(config: EngineConfig, gpu: str) -> MemoryPlan:
    """Checks that an engine fits a GPU; returns its memory plan.

    Raises:
        SettingsError: the GPU is not known.
        EngineError: it does not fit; says by how much, and which knob helps.
    """
    known = find_gpu(gpu)
    room = known.usable_bytes
    plan = plan_memory(config, known)
    if plan.total > room:
        parts = {"weights": plan.weights, "caches": plan.target_cache + plan.drafter_cache, "scratch": plan.scratch}
        parts |= {"states": plan.states} if plan.states else {}
        parts |= {"graphs": plan.graphs} if plan.graphs else {}
        raise EngineError(
            f"the engine needs {gigabytes(plan.total)} on each GPU "
            f"({', '.join(f'{part} {gigabytes(count)}' for part, count in parts.items())}), "
            f"{gigabytes(plan.total - room)} more than {gpu} has: {_advice(config, known)}"
        )
    return plan


def _advice(config: EngineConfig, gpu: PublishedGPU) -> str:
    """Names the knobs that would make an engine fit a GPU, each alone, with its largest value (lengths in tenths).

    Where none does alone, but fewer slots that are shorter too, both.
    """

    def fits(**changes: int | str) -> bool:
        return fits_in(gpu.usable_bytes, config.model_copy(update=changes), gpu)

    most = bisect_left(range(1, config.max_batch), True, key=lambda n: not fits(max_batch=n))
    tenth = -(-config.max_seq_len // 10)
    lengths = [n for n in range(config.max_seq_len - tenth, config.chunk, -tenth) if fits(max_seq_len=n)][:1]
    ranks = [n for n in _more_ranks(config) if fits(tp=n)][:1]
    knobs = {"--max-batch": [most] if most else [], "--max-seq-len": lengths, "--tp": ranks}
    advice = _smaller_pages(config, gpu)
    advice += [f"{knob} {value}" for knob, values in knobs.items() for value in values]
    advice += ["--precision bf16"] if config.precision == "fp32" and fits(precision="bf16") else []
    if not advice:
        halves = [(max(1, config.max_batch >> n), config.max_seq_len >> n) for n in range(1, 31)]
        both = [(n, length) for n, length in halves if length > config.chunk and fits(max_batch=n, max_seq_len=length)]
        advice = [f"--max-batch {n} with --max-seq-len {length}" for n, length in both[:1]]
    return "use " + " or ".join(advice or [_larger_gpu(config, gpu)])


def _smaller_pages(config: EngineConfig, gpu: PublishedGPU) -> list[str]:
    """Names the most memory for pages with which an engine that has such fits a GPU; nothing where none would do."""
    if config.kv_memory is None:
        return []
    plan = plan_memory(config, gpu)
    room = gpu.usable_bytes - plan.total + plan.target_cache + plan.drafter_cache + plan.states
    hundredths = 100 * max(0, room) // GB
    fits = fits_in(gpu.usable_bytes, config.model_copy(update={"kv_memory": hundredths * GB // 100}), gpu)
    return [f"--kv-memory {hundredths / 100:g}"] if hundredths and fits else []


def _more_ranks(config: EngineConfig) -> list[int]:
    return [n for n in (2, 4, 8) if n > config.tp and config.target.heads % n == 0]


def _larger_gpu(config: EngineConfig, gpu: PublishedGPU) -> str:
    """Names the smallest larger GPU that an engine fits, on as few of them as may be; else what is left to do."""
    larger = [known for known in GPUS.values() if known.memory > gpu.memory and known.nvlink >= gpu.nvlink]
    for other in sorted(larger, key=lambda known: known.memory):
        for tp in (config.tp, *_more_ranks(config)):
            changes = {"tp": tp, **({} if config.gpu is None else {"gpu": other.name})}
            if fits_in(other.usable_bytes, config.model_copy(update=changes), other):
                return f"--gpu {other.name}" + (f" --tp {tp}" if tp > config.tp else "")
    return ("--precision bf16, or " if config.precision == "fp32" else "") + "a smaller model"


def weight_count(config: EngineConfig) -> int:
    """Parameters that the first rank holds, with the RoPE tables; a tied head counts once."""
    numbers = {Content.NUMBERS: 1, Content.E2M1_PAIRS: 2, Content.E8M0: 0}  # an element's
    weights = pair_weights(config.target, config.drafter)
    return sum(prod(w.shape(config.tp, 0)) * numbers[w.parts[0].content] for w in weights) + _completed(config)


def weight_bytes(config: EngineConfig, gpu: GPU | None = None) -> int:
    """Bytes of those parameters and tables, in the precision that they are multiplied in on a GPU; see `stored_as`."""
    size = config.dtype.itemsize
    own = None if gpu is None else gpu.capability
    stored = _stored_bytes(config.target, config.drafter, config.backend, config.tp, config.dtype, own)
    return _completed(config) * size + stored + plan_adds(config)


def plan_adds(config: EngineConfig) -> int:
    """Bytes by which a TensorRT plan's experts are larger than MXFP4; see `ops.tensorrt_moe`."""
    moe = config.target.moe
    if config.backend != "tensorrt" or moe is None or not moe.mxfp4:
        return 0
    elements = _elements(config.target, config.tp)
    pairs, scales = elements[Content.E2M1_PAIRS], elements[Content.E8M0]
    gpu = capability(config.gpu) if config.gpu is not None else None
    if gpu in MOE_LAYER_CAPABILITIES:
        return scales  # NVFP4 has twice as many
    return 0 if multiplies_fp4(gpu) else 2 * pairs * config.dtype.itemsize - pairs - scales


@lru_cache  # a search for what fits asks for the same again and again
def _elements(target: DecoderConfig, tp: int) -> dict[Content, int]:
    """Counts the first rank's elements of each kind."""
    elements = dict.fromkeys(Content, 0)
    for weight in build_target(target).weights():
        elements[weight.parts[0].content] += prod(weight.shape(tp, 0))
    return elements


@lru_cache  # for such a search, too
def _stored_bytes(
    target: DecoderConfig,
    drafter: DrafterConfig | None,
    backend: Backend,
    tp: int,
    dtype: torch.dtype,
    own: int | None,
) -> int:
    shapes = [(weight, weight.shape(tp, 0)) for weight in pair_weights(target, drafter)]
    held = [(stored_there(weight, shape, backend, dtype, own), shape) for weight, shape in shapes]
    return sum(precision.stored_bytes(shape, dtype.itemsize) for precision, shape in held)


def stored_bytes(config: EngineConfig, weight: Weight, gpu: GPU | None = None) -> int:
    """Bytes of the first rank's part of a weight in GPU memory; see `stored_as`."""
    shape, own = weight.shape(config.tp, 0), None if gpu is None else gpu.capability
    stored = stored_there(weight, shape, config.backend, config.dtype, own)
    return stored.stored_bytes(shape, config.dtype.itemsize)


def stored_as(config: EngineConfig, weight: Weight, gpu: GPU | None) -> WeightPrecision:
    """The precision of a weight in GPU memory: the torch backend dequantizes NVFP4 at load, and FP8 by blocks too.

    But Hopper GPUs multiply FP8 by blocks as it is, and experts are dequantized as rows choose them.

    Args:
        gpu: None: not known, and none that multiplies FP8 by blocks.
    """
    own = None if gpu is None else gpu.capability
    return stored_there(weight, weight.shape(config.tp, 0), config.backend, config.dtype, own)


def is_multiplied_in_fp8(config: EngineConfig, weight: Weight, gpu: GPU | None) -> bool:
    """Whether rows are rounded to FP8 before they are multiplied by a weight, and products have twice BF16's rate."""
    kinds = [WeightPrecision.FP8]
    if config.backend == "torch":  # TensorRT keeps the weights alone so
        kinds.append(WeightPrecision.FP8_BLOCKS)
    if weight.precision not in kinds or weight.stack is not None:  # experts are dequantized
        return False
    return stored_as(config, weight, gpu) in kinds


def stored_there(
    weight: Weight, shape: tuple[int, ...], backend: Backend, dtype: torch.dtype, own: int | None
) -> WeightPrecision:
    """Finds the same of a part of that shape, in an engine of that type, on a GPU of that compute capability (90)."""
    kinds = WeightPrecision.FP8_BLOCKS, WeightPrecision.NVFP4, WeightPrecision.INT4
    if backend != "torch" or weight.precision not in kinds or weight.stack is not None:
        return weight.precision
    by_block = weight.precision is WeightPrecision.FP8_BLOCKS
    is_multiplied = by_block and multiplies_blocks(divmod(own or 0, 10), shape, dtype)
    return weight.precision if is_multiplied else WeightPrecision.ENGINE


def _completed(config: EngineConfig) -> int:
    """Counts the numbers that a session adds to the stored ones: RoPE tables, and a rank's slice of a tied head."""
    count = sum(config.cache_length * rotary for rotary, _ in config.rotated)
    if config.target.tied_embeddings and config.tp > 1:  # a tensor of its own
        count += config.target.vocab_size // config.tp * config.target.hidden_size
    return count


def cache_shapes(config: EngineConfig, paging: Paging | None = None) -> dict[str, tuple[int, int, int, int]]:
    """Shape [pages, heads, page rows, D] of every K/V cache on one rank, by name; without paging [slots, heads, S, D].

    In TensorRT's own layers, attention sinks take a row and dimensions; see `ops.tensorrt_attention`.
    """
    paging = paging or linear_paging(config)
    models: list[tuple[str, DecoderConfig]] = [("model.", config.target)]
    if config.drafter is not None:
        models.append((PREFIX, config.drafter))
    shapes: dict[str, tuple[int, int, int, int]] = {}
    windowed = windowed_caches(config, paging)
    for prefix, model in models:
        has_sink_keys = model is config.target and config.has_sink_keys
        rows, more = paging.rows + int(has_sink_keys), SINK_SIZE * int(has_sink_keys)
        attends = [(i, mixer) for i, mixer in enumerate(mixers_of(model)) if isinstance(mixer, Attends)]
        for i, mixer in attends:
            for kind, size in _kept_sizes(mixer):
                name = f"{prefix}layers.{i}.{kind}"
                pages = paging.window_pages if name in windowed else paging.pages
                shapes[name] = (pages, units_per_rank(mixer.kv_heads, config.tp), rows, size + more)
    return shapes


def _kept_sizes(mixer: Attends) -> list[tuple[str, int]]:
    """Lists the caches of a layer and the size of their rows in each head."""
    if mixer.latent:
        return [("latent", mixer.row)]
    return [("key", mixer.key_size), ("value", mixer.value_size)]


def windowed_caches(config: EngineConfig, paging: Paging) -> set[str]:
    """Names the caches that have pages of their own: those of layers with a window."""
    windows = config.target.windows if paging.window else None
    windowed = [i for i, window in enumerate(windows or ()) if window]
    return {f"model.layers.{i}.{kind}" for i in windowed for kind in config.target.caches(i)}


def plan_pages(config: EngineConfig, paged: bool = False) -> Paging:
    """Chooses the pages of a rank's caches: for all slots at their full length, or what `config.kv_memory` holds.

    Args:
        paged: whether pages are short where the engine says nothing; else each slot has one of its own.

    Raises:
        EngineError: they do not hold one sequence of `config.max_seq_len`.
    """
    paged = paged or config.kv_memory is not None
    rows = config.page_size or (PAGE_ROWS if paged else config.cache_length)
    if rows > config.cache_length or (rows >= config.max_seq_len and rows % PAGE_ROWS):
        rows = config.cache_length  # all tokens of a slot: of two pages our kernels would read no part of a tile
    width = -(-config.cache_length // rows)
    if width == 1:
        return _whole_slots(config)
    most = config.max_batch * width
    window, window_pages = _window_pages(config, rows)
    if window_pages >= most:
        window = window_pages = 0
    if config.kv_memory is None:
        return Paging(most, rows, width, window, window_pages)
    apart = cache_bytes(config, Paging(0, rows, width, window, window_pages)) + states_bytes(config)
    each = cache_bytes(config, Paging(1, rows, width, window, 0))
    pages = max(0, config.kv_memory - apart) // each
    if pages < width:
        raise EngineError(
            f"--kv-memory {config.kv_memory / GB:g} GB holds {pages * rows} tokens, fewer than one sequence of "
            f"{config.max_seq_len}; give it at least {_at_least(apart + width * each)}, or a smaller --max-seq-len"
        )
    return Paging(min(pages, most), rows, width, window, window_pages)


def _whole_slots(config: EngineConfig) -> Paging:
    """Makes one page for each slot, which `config.kv_memory` must hold: no slot can do without its own."""
    paging = linear_paging(config)
    needed = cache_bytes(config, paging) + states_bytes(config)
    if config.kv_memory is not None and needed > config.kv_memory:
        raise EngineError(
            f"--kv-memory {config.kv_memory / GB:g} GB: a page is a whole slot, and {config.max_batch} slots take "
            f"{_at_least(needed)}; use a smaller --page-size or --max-batch"
        )
    return paging


def _at_least(size: int) -> str:
    return f"{ceil(1e4 * size / GB) / 1e4:g} GB"


def pages_on_gpu(config: EngineConfig, gpu: GPU | None = None) -> Paging:
    """Chooses the pages of a rank's caches on a GPU (as in `plan_memory`): our kernels', where they compute it.

    Errors as `plan_pages`.
    """
    return plan_pages(config, paged=_have_kernels(config, gpu))


def _have_kernels(config: EngineConfig, gpu: GPU | None) -> bool:
    """Whether our kernels compute such an engine on a GPU, as `session.choice` finds when it is there."""
    own = OLDEST_GPU if gpu is None else divmod(gpu.capability, 10)
    return config.backend == "torch" and why_not_flat(config, own) is None


def _window_pages(config: EngineConfig, rows: int) -> tuple[int, int]:
    """Counts the pages that layers with a window need, however long the sequences: the largest window, and pages.

    A slot's are those that its rows see, and those that the steps under way and the next one write. What others have
    left is kept for prompts that begin so while slots are free, or short.
    """
    window = max((window for window in config.target.windows or () if window is not None), default=0)
    if not window:
        return 0, 0
    steps = 2  # under way, and the next one
    each = -(-(window + (steps + 1) * config.slot_rows) // rows) + 3  # begun at both ends, and one to copy from
    read = -(-steps * max(config.chunk, PAGE_ROWS) // rows)
    return window, config.max_batch * each + read


def cache_bytes(config: EngineConfig, paging: Paging) -> int:
    """Bytes of a rank's caches of these pages."""
    return sum(map(prod, cache_shapes(config, paging).values())) * config.cache_dtype.itemsize


def _scratch(config: EngineConfig, gpu: GPU | None) -> int:
    """Bytes of activations (TensorRT: in the larger of its profiles): the widest layer's, taps, and logits in FP32."""
    target, size = config.target, config.dtype.itemsize
    taps = len(config.drafter.tap_layers) if config.drafter else 0
    shared = units_per_rank(target.heads, config.tp) * max(target.head_sizes)
    moe = target.moe
    columns = target.intermediate_size
    if moe is not None:
        columns = moe.intermediate_size * (moe.experts if computes_all_experts(config) else moe.top_k)
    wide = 3 * columns // config.tp + 4 * shared + (taps + 6) * target.hidden_size
    logit_rows = config.max_batch * config.slot_rows
    # TensorRT's steps decode or read a chunk; others do both at once.
    rows = max(config.chunk, logit_rows) if config.backend == "tensorrt" else config.chunk + logit_rows
    # Greedy: the rank's own slice, and the drafts' logits after it. Sampled: the whole vocabulary, and its masses.
    logits = target.vocab_size * 3 if config.sampling else 2 * target.vocab_size // config.tp
    # A layer's keys and values in the engine's type, made by way of FP32: a prompt's chunk reads those of its slot, and
    # where our kernels do not compute, a step those of all slots.
    shapes = {shape for i in range(target.layers) for shape in target.caches(i).values()}
    cache = max(units_per_rank(heads, config.tp) * size for heads, size in shapes) * config.cache_length
    slots = 1 if _have_kernels(config, gpu) else config.max_batch
    widened = cache * (2 * size + 4) * slots if config.kv == "fp8" else 0
    decomposed = config.backend == "tensorrt" and max(target.head_sizes) > MOST_FUSED
    # Of all heads, rows and keys, before and after the softmax.
    scores = 2 * rows * units_per_rank(target.heads, config.tp) * config.cache_length * size if decomposed else 0
    parts = widened + scores + _trees(config, rows) + _nets(config, rows) + _shaping(config, logit_rows, gpu)
    return rows * wide * size + logit_rows * logits * 4 + parts


def _trees(config: EngineConfig, rows: int) -> int:
    """Counts the bytes that a TensorRT plan with trees takes besides: masks, and the accepted rows that are moved."""
    if not config.plan_tree:
        return 0
    shapes = Counter(shape for name, shape in cache_shapes(config).items() if not name.startswith(PREFIX))
    # Of one shape's caches after the other's.
    moved = max(count * heads * size for (_, heads, _, size), count in shapes.items()) * config.cache_dtype.itemsize
    # Of each row and key whether it is of the same tree, and whether it is seen: a byte each.
    masks = 2 * rows * config.cache_length if config.plugin is None else 0
    return masks + config.max_batch * config.block_size * moved


def _nets(config: EngineConfig, rows: int) -> int:
    """Counts the bytes that are made in FP32 of a gated delta net: by our kernels of the rows of blocks and prompts.

    By TensorRT's layers (see `ops.tensorrt_delta_net`) of all slots' states thrice, of each pair of a slot's rows, and
    of what the rows themselves are.
    """
    delta = config.target.delta
    if delta is None:
        return 0
    heads = units_per_rank(delta.value_heads, config.tp)
    if config.backend != "tensorrt" or config.plugin is not None:
        key_heads = units_per_rank(delta.key_heads, config.tp)
        return scratch_bytes(rows, config.max_batch + PIECES, key_heads, heads, delta.key_size, prompts=True)
    states = config.max_batch * heads * delta.key_size * delta.value_size
    pairs = heads * max(config.chunk**2, config.max_batch * config.block_size**2)
    return 4 * (3 * states + 6 * pairs + 6 * rows * heads * (delta.key_size + delta.value_size))


def _shaping(config: EngineConfig, logit_rows: int, gpu: GPU | None) -> int:
    """Counts the bytes that captured steps keep of penalties and masks, and those that torch's operations make of them.

    TensorRT's steps have neither; a CPU makes the former with the first request that asks for them.
    """
    if config.backend != "torch":
        return 0
    vocabulary = config.target.vocab_size
    kept = config.max_batch * vocabulary * 10 + logit_rows * vocabulary // 8
    made = 0 if _have_kernels(config, gpu) else 4 * 3 * logit_rows * vocabulary // config.tp
    return kept + made


def _graphs(config: EngineConfig) -> int:
    """Counts the bytes of the torch backend's captured steps, all that a service may prepare (`Session.prepare`)."""
    if config.backend != "torch":
        return 0
    lengths = draft_lengths(config.block_size) if config.drafter is not None else []
    layers = config.target.layers + (config.drafter.layers if config.drafter is not None else 0)
    shared = config.block_size if config.may_share_rows else 0
    kinds = _count_kinds(config.max_batch, tuple(lengths), config.sampling, config.chunk, config.draft_tree, shared)
    return kinds * layers * GRAPH_LAYER


@lru_cache(maxsize=4096)  # a search halves what is left: the next one asks for many of the same numbers
def _count_kinds(max_batch: int, lengths: tuple[int, ...], sampled: bool, chunk: int, tree: int, shared: int) -> int:
    """Counts the kinds of captured steps; arguments as `step_kinds`'s."""
    asked = max_batch, lengths, sampled, chunk, tree
    return len(step_kinds(*asked, shared)) + len(shaped_kinds(*asked))


def computes_all_experts(config: EngineConfig) -> bool:
    """Whether every row goes through every expert; see `ops.tensorrt_moe`."""
    moe = config.target.moe
    if config.backend == "torch" or moe is None:
        return False
    in_int4 = config.target.linear_precision is WeightPrecision.INT4
    gpu = capability(config.gpu) if config.gpu is not None else None
    return not has_mixture_layer(gpu, moe.activation, in_int4)
