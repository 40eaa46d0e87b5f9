"""The configuration of a drafter in the speculators format, from z-lab's."""

from typing import Any

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
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": {key: value for key, value in raw.items() if key not in _DRAFTING},
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_layers],  # the embedding's output is 0
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        # vLLM takes the format for what it is only where it finds this (transformers_utils/config.py).
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }
