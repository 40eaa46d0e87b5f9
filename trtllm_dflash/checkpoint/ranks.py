"""Numbers of ranks that can share a model."""

from collections.abc import Iterable

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
            whose = "the drafter's" if config is drafter else "the"
            raise SettingsError(f"--tp {tp} does not divide {whose} {trouble}; possible: {', '.join(fitting)}")


def unshared_heads(tp: int, heads: int, kv_heads: Iterable[int], key_heads: int) -> str | None:
    """Names the heads of a model that `tp` ranks cannot share evenly; None: they can share every kind.

    Query heads are divided, and the key heads of gated delta nets; a key/value head may be held by several neighbouring
    ranks. Where query heads cannot be shared, others are named only if they rule out numbers that divide these.

    Args:
        kv_heads: of each kind of layer that attends.
        key_heads: 0 where no layer is a gated delta net.
    """
    if tp < 1:
        return f"{heads} query heads"
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    unshared = [f"{heads} query heads"] if heads % tp else []
    if key_heads % tp and any(key_heads % n for n in divisors):
        unshared.append(f"{key_heads} key heads of its gated delta nets")
    for count in kv_heads:
        if count % tp and tp % count and any(count % n and n % count for n in divisors):
            unshared.append(f"{count} key/value heads, nor they it")
    return ", nor the ".join(unshared) or None


def _indivisible(tp: int, config: DecoderConfig) -> str | None:
    """Names the part of a model that `tp` ranks cannot share evenly; None: they can share all of it."""
    kv_heads = {heads for i in config.attention_layers for heads, _ in config.caches(i).values()}
    key_heads = 0 if config.delta is None else config.delta.key_heads
    heads = unshared_heads(tp, config.heads, sorted(kv_heads), key_heads)
    if heads is not None:
        return heads
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
            return f"{size} {name}"
    return None
