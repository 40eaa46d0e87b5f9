"""TensorRT-LLM's PyTorch backend: `trtllm-serve --config`, and the Triton model `llmapi`.

Fields and types: those of TensorRT-LLM 1.4.0rc1, tensorrt_llm/llmapi/llm_args.py (TorchLlmArgs, DFlashDecodingConfig,
Eagle3DecodingConfig, KvCacheConfig, CudaGraphConfig, MoeConfig). Refusals are those of tensorrt_llm/_torch/speculative/
dflash.py (block size, context arena) and dflash_attention.py (kernels), flags those of tensorrt_llm/commands/serve.py.
"""

import shlex
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.foreign.launch import Launch, Option, Runtime
from trtllm_dflash.foreign.plan import Plan, free_memory, left_by_weights
from trtllm_dflash.foreign.shapes import ModelShape

_FREE = 0.88  # of what is free after the weights, for both caches
_MOST = 0.85  # for the target's, as in NVIDIA's recipes
_ALL = 0.95  # of the same, for the target's cache and the drafter's arena; the rest is left to steps

available = free_memory(_FREE)


def kept(target: ModelShape, drafter: ModelShape | None) -> tuple[ModelShape, ModelShape | None]:
    """Keeps all rows of a drafter: its arena has no windows."""
    return target, None if drafter is None else drafter.without_windows()


#: Targets whose drafting its own tests or its table of models name.
TESTED = ("gpt_oss", "llama", "qwen3", "qwen3_5", "qwen3_5_moe")

RUNTIME = Runtime(
    title="TensorRT-LLM",
    package="tensorrt_llm",
    versions="TensorRT-LLM 1.4.0rc1",
    install="take its container (nvidia/tensorrt-llm/release:1.4.0rc1 of NGC), or pip install tensorrt-llm==1.4.0rc1",
    program="trtllm-serve",
    module="tensorrt_llm.commands.serve",
    check="""
import sys, yaml
from tensorrt_llm.llmapi import TorchLlmArgs
with open(sys.argv[2]) as file:
    TorchLlmArgs(model=sys.argv[1], **yaml.safe_load(file))
""",
)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KvCacheConfig(_Strict):
    """Fields of `kv_cache_config` that are set."""

    dtype: Literal["auto", "fp8", "nvfp4"]
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)]
    enable_block_reuse: bool


class CudaGraphConfig(_Strict):
    """Fields of `cuda_graph_config` that are set."""

    enable_padding: bool
    max_batch_size: PositiveInt


class MoeConfig(_Strict):
    """Fields of `moe_config` that are set."""

    backend: Literal["AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "TRITON"]


class DFlashConfig(_Strict):
    """Fields of `speculative_config` with `decoding_type: DFlash`."""

    decoding_type: Literal["DFlash"] = "DFlash"
    speculative_model: str
    max_draft_len: PositiveInt
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"]


class Eagle3Config(_Strict):
    """Fields of `speculative_config` with `decoding_type: Eagle3` (`Eagle` in older releases)."""

    decoding_type: Literal["Eagle3"] = "Eagle3"
    speculative_model: str
    max_draft_len: PositiveInt


class LlmArgs(_Strict):
    """The YAML of `--config`: arguments of TensorRT-LLM's LLM."""

    tensor_parallel_size: PositiveInt
    pipeline_parallel_size: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    moe_expert_parallel_size: PositiveInt | None = None
    max_batch_size: PositiveInt
    max_seq_len: PositiveInt
    max_num_tokens: PositiveInt
    kv_cache_config: KvCacheConfig
    cuda_graph_config: CudaGraphConfig
    moe_config: MoeConfig | None = None
    enable_iter_perf_stats: bool
    speculative_config: DFlashConfig | Eagle3Config | None = None


def llm_args(plan: Plan) -> LlmArgs:
    """Makes the arguments of TensorRT-LLM's LLM, the content of the YAML, for a plan."""
    settings = plan.settings
    return LlmArgs(
        tensor_parallel_size=settings.tp,
        pipeline_parallel_size=settings.pp if settings.pp > 1 else None,
        gpus_per_node=plan.ranks // settings.nodes if settings.nodes > 1 else None,
        moe_expert_parallel_size=1 if _has_experts(plan) else None,
        max_batch_size=plan.max_batch,
        max_seq_len=plan.max_seq_len,
        max_num_tokens=_step_tokens(plan),
        kv_cache_config=KvCacheConfig(
            dtype="fp8" if plan.sinks and plan.gpu.datacenter_blackwell else "auto",
            free_gpu_memory_fraction=cache_fraction(plan),
            enable_block_reuse=False,
        ),
        cuda_graph_config=CudaGraphConfig(enable_padding=True, max_batch_size=plan.max_batch),
        moe_config=_moe(plan),
        enable_iter_perf_stats=True,
        speculative_config=_speculative(plan),
    )


def config_file(plan: Plan) -> str:
    """Names the YAML file of a plan."""
    return f"{plan.name}-{plan.method}.yaml"


def launch(plan: Plan) -> Launch:
    """Makes the command and files for a plan."""
    settings = plan.settings
    name = config_file(plan)
    files = {name: render(plan)}
    several = settings.nodes > 1
    serve: tuple[str, ...] = ("trtllm-serve", plan.target)
    command = serve
    if several:
        each = plan.ranks // settings.nodes
        mpirun = ("mpirun", "-n", str(plan.ranks), "--map-by", f"ppr:{each}:node", "--hostfile", "hosts")
        command = (*mpirun, "trtllm-llmapi-launch", *serve)
    options = (
        Option(("--config", name), "the file above; in older releases the flag is --extra_llm_api_options"),
        Option(("--served_model_name", plan.name), "what clients call it"),
        Option(
            ("--host", settings.host),
            plan.host_reason(),
        ),
        Option(("--port", str(settings.port)), "where it listens; its statistics are at /metrics there, once each"),
    )
    if several:
        words = shlex.join((*serve, *(word for option in options for word in option.words)))
        files[f"{plan.name}-{plan.method}.sbatch"] = _slurm(plan, words)
    return Launch(RUNTIME, _head(plan), command, options, (plan.target, name), files, checks_options=False)


def cache_fraction(plan: Plan) -> float:
    """Computes `free_gpu_memory_fraction`: the share that the drafter's context arena leaves.

    The arena is dense, (max_batch + 1) sequences of the whole length, and is allocated after the cache pool took its
    fraction (DFlashWorker._check_ctx_arena_fits).

    Raises:
        SettingsError: the arena leaves nothing.
    """
    if plan.method != "dflash" or plan.room is None or plan.drafter_shape is None:
        return _MOST
    free = left_by_weights(plan.gpu, plan.room.weights)
    drafter = plan.drafter_shape.without_windows()
    arena = (plan.max_batch + 1) * drafter.cache_bytes(plan.max_seq_len, plan.settings.tp)
    share = int(100 * (_ALL - arena / free)) / 100
    if share <= 0:
        raise SettingsError(
            f"--max-batch {plan.max_batch}: the drafter's rows of {plan.max_batch + 1} sequences of "
            f"{plan.max_seq_len} tokens leave none of a {plan.gpu.name} for the target's; use a smaller "
            f"--max-seq-len{' or fewer' * (plan.max_batch > 1)}"
        )
    return min(_MOST, share)


def attention_backend(plan: Plan) -> Literal["VANILLA", "TRTLLM", "FA4"]:
    """Chooses the kernels of the drafter's attention (DFlashDecodingConfig.attention_backend)."""
    return "TRTLLM" if plan.gpu.datacenter_blackwell else "FA4" if plan.gpu.hopper else "VANILLA"


def _has_experts(plan: Plan) -> bool:
    return plan.shape is not None and plan.shape.experts > 0


def _moe(plan: Plan) -> MoeConfig | None:
    if not plan.sinks:
        return None
    if plan.gpu.datacenter_blackwell:
        return MoeConfig(backend="TRTLLM")
    return MoeConfig(backend="TRITON") if plan.gpu.hopper else None


def _speculative(plan: Plan) -> DFlashConfig | Eagle3Config | None:
    if plan.drafter is None:
        return None
    if plan.method == "eagle3":
        return Eagle3Config(speculative_model=plan.drafter, max_draft_len=plan.draft_length)
    return DFlashConfig(
        speculative_model=plan.drafter, max_draft_len=plan.draft_length, attention_backend=attention_backend(plan)
    )


def _step_tokens(plan: Plan) -> int:
    """Tokens of a step: at least max_batch * (1 + K), which it demands, and a whole prompt, which it would cut else."""
    needed = max(plan.max_seq_len, plan.max_batch * (1 + plan.draft_length))
    return 1 << (needed - 1).bit_length()


# -- text ------------------------------------------------------------------------------------------------------------


def render(plan: Plan, extra: tuple[tuple[str, Any, str], ...] = ()) -> str:
    """Writes the YAML with a remark above each key. `extra`: keys that precede it, with their values and remarks."""
    reasons = _reasons(plan)
    lines: list[str] = []
    for key, value, why in extra:
        lines += [f"# {why}", *_lines(key, value)]
    for key, value in llm_args(plan).model_dump(exclude_none=True).items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            for inner, nested in value.items():
                lines += [f"  # {reasons[f'{key}.{inner}']}", *("  " + line for line in _lines(inner, nested))]
        else:
            lines += [f"# {reasons[key]}", *_lines(key, value)]
    return "\n".join(lines) + "\n"


def _lines(key: str, value: Any) -> list[str]:
    return str(yaml.safe_dump({key: value}, default_flow_style=False, width=10_000)).rstrip("\n").split("\n")


def _head(plan: Plan) -> tuple[str, ...]:
    settings = plan.settings
    lines = [plan.headline(RUNTIME.title, RUNTIME.versions)]
    if settings.nodes > 1:
        lines.append(
            "The file `hosts` names the nodes, one a line; the YAML must lie at the same path on all of them. "
            f"With Slurm: sbatch {plan.name}-{plan.method}.sbatch"
        )
    if plan.drafts and plan.family not in TESTED:
        lines.append(f"TensorRT-LLM's tests do not draft for {plan.family or 'this family'}: watch its acceptance.")
    notes = (*plan.tokenizer_notes(RUNTIME.title, "--trust_remote_code"), *plan.thinking_notes(RUNTIME.program))
    return (*lines, *notes, *plan.catalog_notes())


def _slurm(plan: Plan, words: str) -> str:
    nodes = plan.settings.nodes
    each = plan.ranks // nodes
    return (
        "#!/bin/bash\n"
        f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks={plan.ranks}\n#SBATCH --ntasks-per-node={each}\n"
        f"#SBATCH --gpus-per-node={each}\n"
        "# one MPI rank a GPU; trtllm-llmapi-launch makes rank 0 the server and the others its workers\n"
        f"srun --mpi=pmix trtllm-llmapi-launch {words}\n"
    )


def _reasons(plan: Plan) -> dict[str, str]:
    """Gives the reason for each key in one line."""
    settings = plan.settings
    length = plan.draft_length
    kernels = {
        "TRTLLM": "the drafter's kernels: TensorRT-LLM's own, which need FlashInfer and SM100 or SM103",
        "FA4": "the drafter's kernels: FlashAttention 4, for SM90",
        "VANILLA": "the drafter's kernels: those of the package flash-attn, which must be installed",
    }
    rows = f"{plan.max_batch} x {1 + length} rows" if plan.drafts else f"{plan.max_batch} rows"
    learned = (
        f"; with the bonus token a block of {1 + length}, of the {plan.block_size} that it learned"
        if plan.block_size
        else ""
    )
    moe = {
        True: "experts in MXFP4, activations in MXFP8: TensorRT-LLM's kernels for data-center Blackwell",
        False: "experts in MXFP4, activations in BF16: Triton's kernels, for Hopper",
    }[plan.gpu.datacenter_blackwell]
    return {
        "tensor_parallel_size": f"--tp: GPUs that share every layer: {settings.tp}",
        "pipeline_parallel_size": "--pp: stages of layers, without drafting",
        "gpus_per_node": "ranks of a node",
        "moe_expert_parallel_size": "experts are split like everything else, not handed out: the latency recipe",
        "max_batch_size": "sequences at a time: " + plan.limits_reason(),
        "max_seq_len": "prompt and reply together. Always set: the drafter's context arena is dense in it"
        if plan.method == "dflash"
        else f"prompt and reply together: planned for {plan.max_seq_len} tokens",
        "max_num_tokens": f"tokens of a step: at least {rows}, and a whole prompt",
        "kv_cache_config.dtype": "half the memory, as in NVIDIA's recipe for gpt-oss; the text is then an FP8 cache's"
        if plan.sinks and plan.gpu.datacenter_blackwell
        else "the model's own",
        "kv_cache_config.free_gpu_memory_fraction": "of what the weights leave; the drafter's arena has the rest"
        if plan.method == "dflash"
        else "of what the weights leave",
        "kv_cache_config.enable_block_reuse": "a reused prefix would leave the drafter without its context"
        if plan.method == "dflash"
        else "the same as with DFlash, so that runs differ in the method alone",
        "cuda_graph_config.enable_padding": "batches between two captured sizes take the larger one's graph",
        "cuda_graph_config.max_batch_size": "a graph for every batch there can be",
        "moe_config.backend": moe,
        "enable_iter_perf_stats": "drafts and how many were accepted, at /metrics",
        "speculative_config.decoding_type": "DFlash: one pass drafts a block"
        if plan.method == "dflash"
        else "EAGLE-3: a chain of drafts; older releases call it Eagle",
        "speculative_config.speculative_model": "the drafter; its config.json says the mask token and the taps",
        "speculative_config.max_draft_len": f"drafts a step{learned}" if length else "",
        "speculative_config.attention_backend": kernels[attention_backend(plan)],
    }
