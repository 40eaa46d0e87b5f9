"""Assumptions of a plan's figures, in words for whoever reads them."""

from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.gpus import PublishedGPU, capability
from trtllm_dflash.cost.memory import computes_all_experts, is_multiplied_in_fp8, pages_on_gpu, stored_as
from trtllm_dflash.cost.prediction import (
    ERROR_BOUND,
    FASTEST_GPU_ERROR_BOUND,
    FP8_CACHE_ERROR_BOUND,
    MIXTURE_ERROR_BOUND,
    decoded_share,
    rows_at_once,
    stored_experts,
)
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.kernels import HEAD_SIZES, HOPPER, MAX_ROWS, MOST_SEGMENTS
from trtllm_dflash.models import target_weights, without_kernels
from trtllm_dflash.models.decoder import DecoderConfig, MoEConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.mixers import DeltaNet, mixers_of
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops.tensorrt_moe import MOE_LAYER_CAPABILITIES, multiplies_fp4


def assumptions(config: EngineConfig, gpu: PublishedGPU, acceptance: float | None) -> list[str]:
    """Lists the assumptions of a plan for an engine on a GPU, a line each.

    Args:
        acceptance: tokens a step with the drafter's whole block; None: none is given.
    """
    target, drafter = config.target, config.drafter
    notes = [*_steps(config, gpu), *_ranks(config, gpu)]
    where = _unsupported(config, gpu)
    if where is not None:
        notes.append(
            f"Target: our kernels compute family {target.family} in part{where}, and torch the rest: matrices, caches "
            "and states are counted, and steps predicted as if our kernels did all of it; none has been compared."
        )
    nets = sum(isinstance(mixer, DeltaNet) for mixer in mixers_of(target))
    if nets:
        notes.append(f"States: {nets} of {target.layers} layers keep one in FP32, read and written once in a step.")
    if target.moe is not None:
        notes += _experts(config, gpu, target.moe)
    notes += _caches(config, gpu)
    if target.linear_precision is not None:
        notes.append(_target(config, target.linear_precision, gpu))
    if drafter is not None:
        notes += _drafter(drafter, acceptance)
    notes.append("Tokens/s: of decoding alone, with all slots at work; prompts and the queue are not in it.")
    return notes


def _unsupported(config: EngineConfig, gpu: PublishedGPU) -> str | None:
    """Says where our kernels do not compute all of a target: anywhere (nothing is said), or where; else None."""
    target = config.target
    if config.backend != "torch":
        return None
    if without_kernels(target) is not None:
        return ""
    if config.block_size > MAX_ROWS:
        return f" with blocks of {config.block_size} rows"
    if config.max_batch > MOST_SEGMENTS:
        return f" with {config.max_batch:,} slots"
    is_wide = not set(target.head_sizes) <= set(HEAD_SIZES)
    return f" on {gpu.name}" if is_wide and divmod(gpu.capability, 10) != HOPPER else None


def error_bound(config: EngineConfig) -> float:
    """Bounds the error of an engine's predicted steps, as a share of measured ones."""
    if config.kv == "fp8":
        return FP8_CACHE_ERROR_BOUND
    return ERROR_BOUND if config.target.moe is None else MIXTURE_ERROR_BOUND


def expert_precision(config: EngineConfig) -> str | None:
    """Names the experts' precision; None where there are none. A TensorRT plan's depends on the GPU."""
    moe = config.target.moe
    if moe is None:
        return None
    if not moe.mxfp4:
        return stored_experts(config.target) or config.precision
    if config.backend == "torch":
        return "mxfp4"
    gpu = capability(str(config.gpu))
    return "nvfp4" if gpu in MOE_LAYER_CAPABILITIES else "mxfp4" if multiplies_fp4(gpu) else config.precision


def _drafts_in_fp8(drafter: DrafterConfig | None) -> bool:
    return drafter is not None and drafter.linear_precision is WeightPrecision.FP8


# -- one function a topic --------------------------------------------------------------------------------------------


def _steps(config: EngineConfig, gpu: PublishedGPU) -> list[str]:
    steps = "torch's, captured, with our CUDA kernels"
    if config.backend == "tensorrt":
        steps = f"predicted as {steps}, and memory is TensorRT's"
    return [
        f"Rates: {gpu.copy_share:.0%} of the published bandwidth and {gpu.gemm_share:.0%} of the published dense "
        f"operations, as a large copy and a large BF16 product were measured to get on an {gpu.measured_on}.",
        "Steps: those measured on H200s, plain and drafted, at batch 1, 8 and 32, are predicted: of Qwen3-8B's, "
        f"Qwen3.5-27B's and Gemma 4 31B's shapes within {ERROR_BOUND:.0%} (Qwen3-8B's of more than 16 rows also on 2 "
        f"and 4; on a faster one within {FASTEST_GPU_ERROR_BOUND:.0%}), of gpt-oss, Qwen3-Coder-30B-A3B, "
        f"Qwen3.5-35B-A3B, Qwen3-Coder-Next in FP8 and Gemma 4 26B-A4B within {MIXTURE_ERROR_BOUND:.0%} (Gemma 4's at "
        "batch 16, not 32).",
        "Steps: on an H100 likewise, of Qwen3-8B's and, at batch 8 and 32, Qwen3-4B's shape within "
        f"{ERROR_BOUND:.0%}, of layers of MiniMax-M2.5 and, drafted, Qwen3-Coder-30B-A3B within "
        f"{MIXTURE_ERROR_BOUND:.0%}; of gpt-oss and hybrids there none by today's kernels. Left out are steps by older "
        "kernels (docs/plan.md). Other GPUs are taken to wait as long.",
        f"Backend: steps are {steps}; none of a TensorRT plan has been measured.",
    ]


def rest_precision(target: DecoderConfig) -> WeightPrecision | None:
    """The precision of a target's matrices, experts aside; None: the engine's own type."""
    kind = target.linear_precision
    held = kind is not None and any(w.precision is kind and w.stack is None for w in target_weights(target))
    return kind if held else None


def _ranks(config: EngineConfig, gpu: PublishedGPU) -> list[str]:
    notes = []
    if config.tp > 4:
        notes.append("Ranks: sums were measured on 2 and 4 H200s; more are extrapolated.")
    if config.tp > 1 and not gpu.nvlink:
        notes.append("Ranks: without NVLink, sums are taken to have the latency of NCCL's over it.")
    return notes


def _experts(config: EngineConfig, gpu: PublishedGPU, moe: MoEConfig) -> list[str]:
    precision, rest = config.precision.upper(), rest_precision(config.target)
    stored = str(expert_precision(config)).upper()
    chosen = f"Every choice of {moe.top_k} of {moe.experts} is taken to be equally likely; real routing touches fewer."
    if computes_all_experts(config):
        chosen = f"A TensorRT plan for {gpu.name} reads all {moe.experts} in every step."
    notes = [
        f"Experts: {stored}, multiplied in {precision}, read if touched, once for each {rows_at_once(config, gpu)} "
        f"rows; the rest {precision if rest is None else rest.value.upper()}.",
        f"Experts: {chosen}",
    ]
    if config.backend != "torch":
        return notes
    share = decoded_share(config, gpu)
    if share is not None:
        decoded = "as an H200 decodes it" if stored == "NVFP4" else "as its multiprocessors decode it"
        notes.append(f"Experts: {stored} is read at {share:.0%} of the bandwidth counted on, {decoded}.")
    is_torchs = stored in ("MXFP4", "NVFP4") and share is None
    is_torchs |= stored in ("FP8", "FP8-BLOCKS", "INT4") and config.precision == "fp32"
    where = "" if is_torchs else "without our kernels, "
    notes.append(f"Experts: {where}the torch backend unpacks their weights in memory: slower than this.")
    return notes


def _caches(config: EngineConfig, gpu: PublishedGPU) -> list[str]:
    target, notes = config.target, []
    sizes = [window for window in target.windows or () if window is not None]
    if sizes:
        pages = pages_on_gpu(config, gpu).window_pages
        held = (
            f": they have {pages:,} pages of their own, which sequences give back as they go on."
            if pages
            else ", and are counted with every slot's whole length."
        )
        notes.append(f"Caches: {len(sizes)} of {target.layers} layers see {max(sizes)} tokens only{held}")
    if config.kv == "fp8":
        notes.append(
            "Caches: FP8, in half the memory. Attention reads half as much and takes some microseconds more: steps of "
            f"Qwen3-8B's shape on an H200 were within {FP8_CACHE_ERROR_BOUND:.0%}."
        )
    return notes


def _target(config: EngineConfig, kind: WeightPrecision, gpu: PublishedGPU) -> str:
    """Explains how a step is assumed to multiply a target's matrices in few bits."""
    said = f"Target: matrices in {kind.value.upper()}"
    if kind is WeightPrecision.INT4:
        read = "all of them dequantized each time"
        if config.backend == "torch":
            read = "those that rows choose dequantized each time" if config.precision == "fp32" else "read as they are"
        return f"Target: experts in INT4, {read}."
    dense = [weight for weight in target_weights(config.target) if weight.precision is kind and weight.stack is None]
    left = [weight for weight in dense if stored_as(config, weight, gpu) is not kind]
    if left:
        apart = "" if config.target.moe is None else ", but for experts,"
        share = "" if left == dense else " in part"
        return f"{said}{apart}{share} dequantized to {config.precision.upper()} at load by the torch backend."
    in_fp8 = any(is_multiplied_in_fp8(config, weight, gpu) for weight in dense)
    rate = "at twice BF16's rate" if in_fp8 else "at BF16's rate"
    is_compared = kind is WeightPrecision.FP8_BLOCKS and config.target.moe is not None
    where = "" if is_compared else "; not compared with steps of such a target"
    return f"{said}, read as they are and multiplied {rate}{where}."


def _drafter(drafter: DrafterConfig, acceptance: float | None) -> list[str]:
    notes = []
    if _drafts_in_fp8(drafter):
        notes.append(
            f"Drafter: FP8, read in half the time; steps with one were within {ERROR_BOUND:.0%} (Qwen3-8B's shape) and "
            f"{MIXTURE_ERROR_BOUND:.0%} (gpt-oss) on an H200."
        )
    if acceptance is not None:
        survival = ImposedAcceptance(acceptance, drafter.step_rows).survival
        notes.append(
            f"Acceptance: given, not measured: {acceptance:g} tokens a step with {drafter.step_rows} rows, at which "
            f"each draft survives with {survival:.3f} once those before it have."
        )
    return notes
