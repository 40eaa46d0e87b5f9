"""SGLang: `python -m sglang.launch_server` with `--speculative-algorithm`.

Fields, choices and refusals are those of SGLang 0.5.23: sglang/srt/arg_groups/fields/ (spec, schedule, parallel, model,
exec_, serving), arg_groups/choices.py (backends), arg_groups/speculative_hook.py (_handle_dflash and
_resolve_dflash_draft_attention_backend), arg_groups/model_hook.py, model_overrides/gpt_oss.py (attention sinks) and
gemma4.py (heads of 512), and model_override_base.py (get_default_attn_backend: latent attention).
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from trtllm_dflash.foreign.calls import SGLANG_CALLS, SGLANG_THINKING, format_of_target
from trtllm_dflash.foreign.launch import Launch, Option, Runtime
from trtllm_dflash.foreign.plan import Plan, as_shaped, static_memory

_MEMORY = 0.75
_HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # families with linear attention beside the usual one
_NO_CODE = "No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run."
_RENDEZVOUS = 20000  # port of the first node, for the ranks of all

available = static_memory(_MEMORY)
kept = as_shaped

RUNTIME = Runtime(
    title="SGLang",
    package="sglang",
    versions="SGLang 0.5.23",
    install="pip install 'sglang>=0.5.23'",
    program="sglang",
    module="sglang.launch_server",
    check="""
import argparse, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang.launch_server")
ServerArgs.add_cli_args(parser)
parser.parse_args(sys.argv[1:])
""",
)

AttentionBackend = Literal["flashinfer", "fa3", "fa4", "triton", "trtllm_mha", "trtllm_mla"]


class LaunchServer(BaseModel):
    """The flags of `sglang.launch_server` that are set, by their names there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: str
    served_model_name: str
    host: str
    port: PositiveInt
    tp_size: PositiveInt
    pp_size: PositiveInt | None = None
    nnodes: PositiveInt | None = None
    node_rank: NonNegativeInt | None = None
    dist_init_addr: str | None = None
    context_length: PositiveInt
    max_running_requests: PositiveInt
    cuda_graph_max_bs_decode: PositiveInt
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)]
    attention_backend: AttentionBackend
    mamba_radix_cache_strategy: Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"] | None = None
    enable_metrics: Literal[True] = True
    default_chat_template_kwargs: dict[str, Any] | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    speculative_algorithm: Literal["DFLASH", "EAGLE3"] | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_draft_tokens: PositiveInt | None = None  # with DFLASH: the block size
    speculative_num_steps: PositiveInt | None = None
    speculative_eagle_topk: PositiveInt | None = None
    speculative_draft_attention_backend: AttentionBackend | None = None

    def words(self, field: str) -> tuple[str, ...]:
        """Spells a field as words of the command line; none where it is not set."""
        value = getattr(self, field)
        flag = "--" + field.replace("_", "-")
        if isinstance(value, dict):
            value = json.dumps(value, separators=(",", ":"))
        return () if value is None else (flag,) if value is True else (flag, str(value))


def launch(plan: Plan) -> Launch:
    """Makes the command for a plan, on the node that it is for."""
    settings = plan.settings
    several = settings.nodes > 1
    calls = format_of_target(plan.target, plan.family)
    drafting = {
        "dflash": {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": plan.draft_length + 1},
        "eagle3": {
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": plan.draft_length,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": plan.draft_length + 1,
        },
        "none": {},
    }[plan.method]
    server = LaunchServer.model_validate(
        {
            "model_path": plan.target,
            "served_model_name": plan.name,
            "host": settings.host,
            "port": settings.port,
            "tp_size": settings.tp,
            "pp_size": settings.pp if settings.pp > 1 else None,
            "nnodes": settings.nodes if several else None,
            "node_rank": settings.node_rank if several else None,
            "dist_init_addr": f"{settings.head}:{_RENDEZVOUS}" if several else None,
            "context_length": plan.max_seq_len,
            "max_running_requests": plan.max_batch,
            "cuda_graph_max_bs_decode": plan.max_batch,
            "mem_fraction_static": _MEMORY,
            "attention_backend": target_backend(plan),
            "mamba_radix_cache_strategy": "extra_buffer" if plan.drafts and plan.family in _HYBRID else None,
            "default_chat_template_kwargs": {"enable_thinking": False} if plan.thinking_off else None,
            "tool_call_parser": SGLANG_CALLS[calls] if calls else None,
            "reasoning_parser": SGLANG_THINKING.get(plan.family),
            "speculative_draft_model_path": plan.drafter,
            "speculative_draft_attention_backend": draft_backend(plan) if plan.method == "dflash" else None,
            **drafting,
        }
    )
    options = tuple(
        Option(server.words(field), why) for field, why in _reasons(plan, server).items() if server.words(field)
    )
    command = ("python", "-m", "sglang.launch_server")
    return Launch(RUNTIME, _head(plan), command, options, tuple(word for option in options for word in option.words))


def target_backend(plan: Plan) -> AttentionBackend:
    """Chooses the kernels of the target's attention.

    For gpt-oss SGLang takes triton, trtllm_mha, fa3 and fa4 alone. Latent attention has kernels of its own: trtllm_mla,
    and those of fa3 and triton. fa3 has no heads above 256.
    """
    if plan.gpu.datacenter_blackwell:
        return "trtllm_mla" if plan.latent else "trtllm_mha"
    if plan.gpu.hopper and not plan.large_heads:
        return "fa3"
    return "triton" if plan.sinks or plan.latent or plan.large_heads else "flashinfer"


def draft_backend(plan: Plan) -> AttentionBackend:
    """Chooses the kernels of the drafter's attention. It is not causal: SGLang would turn trtllm_mha into fa4 there."""
    return "fa4" if plan.gpu.datacenter_blackwell else "fa3" if plan.gpu.hopper else "flashinfer"


def _head(plan: Plan) -> tuple[str, ...]:
    settings = plan.settings
    lines = [
        plan.headline(RUNTIME.title, RUNTIME.versions),
        *(plan.tokenizer_notes(RUNTIME.title) or [_NO_CODE]),
    ]
    if settings.nodes > 1:
        lines.append(
            f"For node {settings.node_rank} of {settings.nodes}; the others: the same with another --node-rank. "
            "Requests go to node 0."
        )
    return (*lines, *plan.catalog_notes())


def _reasons(plan: Plan, server: LaunchServer) -> dict[str, str]:
    """Gives the reason for each field in one line, in the order of the command."""
    triton = "latent attention (MLA)" if plan.latent else "attention sinks" if plan.sinks else "heads of 512"
    kernels: dict[AttentionBackend, str] = {
        "trtllm_mha": "the target's kernels: TensorRT-LLM's, for data-center Blackwell",
        "trtllm_mla": "the target's kernels: TensorRT-LLM's for latent attention (MLA), for data-center Blackwell",
        "fa3": "the target's kernels: FlashAttention 3, for Hopper" + (", which has latent attention" * plan.latent),
        "triton": f"the target's kernels: Triton, which has {triton} on {plan.gpu.name}",
        "fa4": "the target's kernels: FlashAttention 4",
        "flashinfer": f"the target's kernels: FlashInfer, which there is for {plan.gpu.name}",
    }
    length = plan.draft_length
    tokens = {
        "dflash": f"the block: the bonus token and {length} drafts"
        + (f" (the drafter learned {plan.block_size} rows)" if plan.block_size != length + 1 else ""),
        "eagle3": f"rows to verify: the bonus token and {length} drafts",
        "none": "",
    }[plan.method]
    return {
        "model_path": "the target",
        "served_model_name": "what clients call it",
        "host": plan.host_reason(),
        "port": "where it listens",
        "tp_size": plan.tp_reason(),
        "pp_size": "--pp: stages of layers, without drafting",
        "nnodes": "--nodes",
        "node_rank": "--node-rank: which of them this is",
        "dist_init_addr": "where the ranks of all nodes meet: the first node",
        "context_length": f"prompt and reply together: planned for {plan.max_seq_len} tokens",
        "max_running_requests": "sequences at a time: " + plan.limits_reason(),
        "cuda_graph_max_bs_decode": "graphs up to that many, so that no step of replies runs without one",
        "mem_fraction_static": "of a GPU's memory for weights and caches; the rest is for activations and graphs",
        "attention_backend": kernels[server.attention_backend],
        "mamba_radix_cache_strategy": "linear attention keeps its state at every row, to go back to one",
        "enable_metrics": "acceptance at /metrics (sglang:spec_accept_length)",
        "default_chat_template_kwargs": "the drafter was trained without thinking; with it acceptance more than halves",
        "tool_call_parser": "how the target writes calls of tools",
        "reasoning_parser": "how it thinks: apart from what it says",
        "speculative_algorithm": "DFlash: one pass drafts a block"
        if plan.method == "dflash"
        else "EAGLE-3: a chain of drafts",
        "speculative_draft_model_path": "the drafter",
        "speculative_num_steps": "passes of the drafter",
        "speculative_eagle_topk": "a chain, not a tree",
        "speculative_num_draft_tokens": tokens,
        "speculative_draft_attention_backend": "the drafter's kernels, which compute attention that is not causal",
    }
