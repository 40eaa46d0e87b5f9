"""The configuration of a drafter in the speculators format, from z-lab's."""

from typing import Any

from trtllm_dflash.models.dflash2 import ConvolutionConfig, SelectorConfig
from trtllm_dflash.models.drafter import DrafterConfig

#: What z-lab's format adds to a layer stack's configuration, and speculators' keeps elsewhere.
_DRAFTING = ("architectures", "dflash_config", "block_size", "num_target_layers", "auto_map")


def speculators_config(
    raw: dict[str, Any], config: DrafterConfig, verifier: str, architectures: list[str]
) -> dict[str, Any]:
    """Makes a drafter's config.json in the speculators format.

    Args:
        raw: it in z-lab's.
        config: its shape.
        verifier: the target's folder or name.
        architectures: the target's.
    """
    kind = "dflash" if config.convolution is None else "dflash2"
    return {
        "speculators_model_type": kind,
        "architectures": ["DFlashDraftModel" if config.convolution is None else "DFlash2DraftModel"],
        **second_settings(config.convolution, config.selector),
        **({} if config.convolution is None else {"sliding_window_non_causal": True}),
        "transformer_layer_config": {key: value for key, value in raw.items() if key not in _DRAFTING},
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_layers],  # the embedding's output is 0
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        # vLLM takes the format for what it is only where it finds this (transformers_utils/config.py).
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }


def second_settings(
    convolution: ConvolutionConfig | None = None, selector: SelectorConfig | None = None
) -> dict[str, Any]:
    """Describes what DFlash 2 adds to a drafter, as both formats do; nothing where it has none."""
    if convolution is None or selector is None:
        return {}
    return {
        "conv_kernel_size": convolution.taps,
        "conv_group_size": convolution.group_size,
        "selector_rank": selector.rank,
        "selector_top_k": selector.candidates,
        "output_multiplier": selector.multiplier,
        "final_logit_softcapping": selector.softcap or 0,
    }
