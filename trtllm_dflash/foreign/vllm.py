"""vLLM: `vllm serve` with `--speculative-config`.

Fields, types and refusals are those of vLLM 0.26.0: vllm/config/speculative.py (SpeculativeConfig), vllm/engine/
arg_utils.py and vllm/entrypoints/openai/cli_args.py (flags), vllm/config/vllm.py (_set_max_num_scheduled_tokens),
vllm/v1/attention/backends/flash_attn.py, mla/*.py and registry.py (kernels), vllm/platforms/cuda.py (those for latent
attention, by GPU), vllm/model_executor/models/config.py (Gemma4Config) and qwen3_dflash.py,
vllm/v1/core/kv_cache_utils.py and vllm/v1/spec_decode/llm_base_proposer.py (validate_same_kv_cache_group).
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from trtllm_dflash.cost.gpus import GPU
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.foreign.calls import VLLM_CALLS, VLLM_THINKING, format_of_target
from trtllm_dflash.foreign.launch import Launch, Option, Runtime
from trtllm_dflash.foreign.plan import Plan, static_memory
from trtllm_dflash.foreign.shapes import ModelShape

_MEMORY = 0.9
_PREFILL = 8192  # tokens that a step can take besides drafts; with fewer vLLM warns of its speed

available = static_memory(_MEMORY)


def kept(target: ModelShape, drafter: ModelShape | None) -> tuple[ModelShape, ModelShape | None]:
    """Keeps all rows of a target's layers with a window, where one group must hold every layer's."""
    return (target.without_windows() if needs_one_group(target, drafter) else target), drafter


RUNTIME = Runtime(
    title="vLLM",
    package="vllm",
    versions="vLLM 0.26.0",
    install="pip install 'vllm>=0.24'",
    program="vllm",
    module="vllm.entrypoints.cli.main",
    check="""
import sys
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
validate_parsed_serve_args(make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(sys.argv[1:]))
""",
)

AttentionBackend = Literal[
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "TRITON_MLA"
]


_LATENT = {"FLASHINFER_MLA": "FlashInfer's", "FLASH_ATTN_MLA": "FlashAttention 3's", "TRITON_MLA": "Triton's"}


class SpeculativeConfig(BaseModel):
    """The JSON of `--speculative-config`: the fields that are set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["dflash", "eagle3"]
    model: str
    num_speculative_tokens: PositiveInt
    attention_backend: AttentionBackend | None = None


class Serve(BaseModel):
    """The flags of `vllm serve` that are set, by their names there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    served_model_name: str
    host: str
    port: PositiveInt
    tensor_parallel_size: PositiveInt
    pipeline_parallel_size: PositiveInt | None = None
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    dtype: Literal["auto", "bfloat16", "float16"]
    max_model_len: PositiveInt
    max_num_seqs: PositiveInt
    max_num_batched_tokens: PositiveInt
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    attention_backend: AttentionBackend | None = None
    disable_hybrid_kv_cache_manager: Literal[True] | None = None
    default_chat_template_kwargs: dict[str, Any] | None = None
    enable_auto_tool_choice: Literal[True] | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    speculative_config: SpeculativeConfig | None = None

    def words(self, field: str) -> tuple[str, ...]:
        """Spells a field as words of the command line; none where it is not set."""
        value = getattr(self, field)
        flag = "--" + field.replace("_", "-")
        if value is None:
            return ()
        if value is True:
            return (flag,)
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_none=True)
        text = json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
        return (flag, text)


def launch(plan: Plan) -> Launch:
    """Makes the command for a plan.

    Raises:
        SettingsError: a GPU or a shape that none of vLLM's kernels takes.
    """
    _check_kernels(plan)
    settings = plan.settings
    calls = format_of_target(plan.target, plan.family)
    serve = Serve(
        served_model_name=plan.name,
        host=settings.host,
        port=settings.port,
        tensor_parallel_size=settings.tp,
        pipeline_parallel_size=settings.pp if settings.pp > 1 else None,
        distributed_executor_backend="ray" if settings.nodes > 1 else None,
        dtype="auto",
        max_model_len=plan.max_seq_len,
        max_num_seqs=plan.max_batch,
        max_num_batched_tokens=_batched_tokens(plan),
        gpu_memory_utilization=_MEMORY,
        attention_backend=target_backend(plan),
        disable_hybrid_kv_cache_manager=True if _has_one_group(plan) else None,
        default_chat_template_kwargs={"enable_thinking": False} if plan.thinking_off else None,
        enable_auto_tool_choice=True if calls else None,
        tool_call_parser=VLLM_CALLS[calls] if calls else None,
        reasoning_parser=VLLM_THINKING.get(plan.family),
        speculative_config=_speculative(plan),
    )
    reasons = _reasons(plan, serve)
    options = tuple(Option(serve.words(field), why) for field, why in reasons.items() if serve.words(field))
    command = ("vllm", "serve", plan.target)
    words = tuple(word for option in options for word in option.words)
    return Launch(RUNTIME, _head(plan), command, options, (plan.target, *words))


def target_backend(plan: Plan) -> AttentionBackend:
    """Chooses the kernels of the target's attention.

    FlashAttention 2 has no sinks (get_flash_attn_version gives 3 on SM90, 4 on SM100, 2 elsewhere), and only 4 has
    heads above 256. No usual kernels compute latent attention: those that do are the first of their GPU in
    platforms/cuda.py (_get_backend_priorities).
    """
    if plan.latent:
        return (
            "FLASHINFER_MLA" if plan.gpu.datacenter_blackwell else "FLASH_ATTN_MLA" if plan.gpu.hopper else "TRITON_MLA"
        )
    if plan.large_heads and not plan.gpu.datacenter_blackwell:
        return "TRITON_ATTN"
    if plan.sinks and not (plan.gpu.hopper or plan.gpu.datacenter_blackwell):
        return "TRITON_ATTN"
    return "FLASH_ATTN"


def needs_one_group(target: ModelShape, drafter: ModelShape | None) -> bool:
    """Whether vLLM must keep every layer's rows in one group.

    Its groups have equally many layers. A drafter whose layers attend alike is divided among several where the target
    has layers with a window and layers without, and then refused: "All drafting layers should belong to the same kv
    cache group". Drafters that have both kinds themselves run on another model runner, which takes several groups.
    """
    return bool(target.windows) and len(target.caches) > 1 and (drafter is None or len(drafter.caches) == 1)


def _has_one_group(plan: Plan) -> bool:
    return plan.method == "dflash" and plan.shape is not None and needs_one_group(plan.shape, plan.drafter_shape)


def _speculative(plan: Plan) -> SpeculativeConfig | None:
    if plan.method == "none":
        return None
    assert plan.drafter is not None
    return SpeculativeConfig(
        method=plan.method,
        model=plan.drafter,
        num_speculative_tokens=plan.draft_length,
        attention_backend="FLASH_ATTN" if plan.method == "dflash" else None,
    )


def _batched_tokens(plan: Plan) -> int:
    """Tokens of a step: vLLM sets draft_length - 1 aside for every sequence, and refuses if none is left."""
    needed = _PREFILL + plan.max_batch * max(0, plan.draft_length - 1)
    return 1 << (needed - 1).bit_length()


def _check_kernels(plan: Plan) -> None:
    if plan.gpu.capability < 80:
        raise SettingsError(f"--gpu {plan.gpu.name}: vLLM's FlashAttention needs compute capability 8.0 or later")
    shapes = (("target", plan.shape, target_backend(plan)), ("drafter", plan.drafter_shape, "FLASH_ATTN"))
    for whose, shape, backend in shapes:
        if shape is not None and backend == "FLASH_ATTN" and not head_size_fits(shape.head_size, plan.gpu):
            raise SettingsError(
                f"--runtime vllm: the {whose}'s heads of {shape.head_size} fit none of FlashAttention's kernels, which "
                "take multiples of 8, to 256 (512 on data-center Blackwell)"
            )


def head_size_fits(size: int, gpu: GPU) -> bool:
    """Whether vLLM's FlashAttention takes heads of that size (FlashAttentionBackend.supports_head_size)."""
    return size % 8 == 0 and size <= (512 if gpu.datacenter_blackwell else 256)


def _head(plan: Plan) -> tuple[str, ...]:
    settings = plan.settings
    lines = [plan.headline(RUNTIME.title, RUNTIME.versions)]
    if settings.nodes > 1:
        each = plan.ranks // settings.nodes
        lines += [
            f"{settings.nodes} nodes of {each} GPUs are one Ray cluster; before this, once on each of them:",
            f"  on {settings.head}:  ray start --head --port=6379 --num-gpus={each}",
            f"  on the others:  ray start --address={settings.head}:6379 --num-gpus={each}",
        ]
    return (*lines, *plan.tokenizer_notes(RUNTIME.title), *plan.catalog_notes())


def _reasons(plan: Plan, serve: Serve) -> dict[str, str]:
    """Gives the reason for each field in one line, in the order of the command."""
    block = plan.block_size
    draft = {
        "dflash": f"DFlash: {plan.draft_length} drafts and the bonus token are a block of {plan.draft_length + 1}"
        + (f" (the drafter learned {block})" if block != plan.draft_length + 1 else "")
        + "; its attention is not causal, which FlashAttention computes",
        "eagle3": f"EAGLE-3: a chain of {plan.draft_length} drafts",
        "none": "",
    }[plan.method]
    lacking = "heads of 512" if plan.large_heads else "attention sinks"
    backends = {
        "FLASH_ATTN": "the target's kernels: FlashAttention, with attention sinks"
        if plan.sinks
        else "the target's kernels: FlashAttention, the one that block drafting is run with",
        "TRITON_ATTN": f"the target's kernels: Triton, since FlashAttention has no {lacking} on {plan.gpu.name}",
        **{
            name: f"the target's kernels: {title}, for latent attention (MLA) on {plan.gpu.name}"
            for name, title in _LATENT.items()
        },
    }
    spare = serve.max_num_batched_tokens - plan.max_batch * max(0, plan.draft_length - 1)
    return {
        "served_model_name": "what clients call it",
        "host": plan.host_reason(),
        "port": "where it listens; its metrics are at /metrics there",
        "tensor_parallel_size": plan.tp_reason(),
        "pipeline_parallel_size": "--pp: stages of layers, without drafting",
        "distributed_executor_backend": "ranks on several nodes: Ray starts them",
        "dtype": "the checkpoint's own: BF16, or what it is quantized to",
        "max_model_len": f"prompt and reply together: planned for {plan.max_seq_len} tokens",
        "max_num_seqs": "sequences at a time: " + plan.limits_reason(),
        "max_num_batched_tokens": f"tokens of a step: {spare} are left beside the drafts of {plan.max_batch} sequences"
        if plan.drafts
        else "tokens of a step: prompts come in by chunks of it",
        "gpu_memory_utilization": "of a GPU's memory for weights, caches and activations",
        "attention_backend": backends[target_backend(plan)],
        "disable_hybrid_kv_cache_manager": "layers with a window keep all rows: vLLM refuses a drafter that is divided "
        "among their groups and the others'",
        "default_chat_template_kwargs": "the drafter was trained without thinking; with it acceptance more than halves",
        "enable_auto_tool_choice": "clients' tools, which vLLM refuses else",
        "tool_call_parser": "how the target writes calls of tools",
        "reasoning_parser": "how it thinks: apart from what it says",
        "speculative_config": draft,
    }
