"""Numbers of ranks that can share a model."""

from typing import Literal

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import DrafterConfig


def check_tp(tp: int, target: DecoderConfig, drafter: DrafterConfig | None = None) -> None:
    """Refuses a number of ranks that does not divide the models.

    Raises:
        SettingsError: names `--tp`, what it does not divide, and the values that would do.
    """
    configs = (target,) if drafter is None else (target, drafter)
    for config in configs:
        trouble = _indivisible(tp, config)
        if trouble:
            most = max(config.heads for config in configs)
            fitting = [str(n) for n in range(1, most + 1) if not any(_indivisible(n, config) for config in configs)]
            raise SettingsError(f"--tp {tp} does not divide {trouble}; possible: {', '.join(fitting)}")


def unshared_heads(tp: int, heads: int, kv_heads: int) -> Literal["query", "key/value"] | None:
    """Names the heads of a layer that `tp` ranks cannot share evenly; None: they can share both kinds.

    Query heads are divided; a key/value head may be held by several neighbouring ranks.
    """
    if tp < 1 or heads % tp:
        return "query"
    return "key/value" if kv_heads % tp and tp % kv_heads else None


def _indivisible(tp: int, config: DecoderConfig) -> str | None:
    """Names the part of a model that `tp` ranks cannot share evenly; None: they can share all of it."""
    kv_heads = config.kv_heads
    if config.full_attention is not None and unshared_heads(tp, config.heads, kv_heads) is None:
        kv_heads = config.full_attention.kv_heads
    heads = unshared_heads(tp, config.heads, kv_heads)
    if heads == "query":
        return f"the {config.heads} query heads"
    delta = config.delta
    if delta is not None and delta.key_heads % tp:
        return f"the {delta.key_heads} key heads of its gated delta nets"
    moe = config.moe
    sizes = {"rows of the vocabulary": config.vocab_size}
    if moe is None or moe.dense_layers or config.full_attention is not None:  # Gemma's experts stand beside one
        sizes["FFN columns"] = config.intermediate_size
    if moe is not None and moe.expert_parallel:
        sizes["experts"] = moe.experts
    elif moe is not None and not moe.mxfp4:  # whose blocks are padded
        sizes["FFN columns of an expert"] = moe.intermediate_size
    if moe is not None and moe.shared_size is not None:
        sizes["FFN columns of the shared expert"] = moe.shared_size
    if isinstance(config, DrafterConfig) and config.draft_vocab_size is not None:
        sizes["rows of the draft vocabulary"] = config.draft_vocab_size
    for name, size in sizes.items():
        if size % tp:
            return f"the {size} {name}"
    return None if heads is None else f"the {kv_heads} key/value heads, nor they it"
