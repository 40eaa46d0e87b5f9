"""Qwen3-Next (Qwen3-Coder-Next): gated delta nets, gated attention, and experts in every layer."""

from typing import Any

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import DecoderConfig, MoEConfig
from trtllm_dflash.models.hybrid import HybridDecoder, read_hybrid_config
from trtllm_dflash.models.qwen3_moe import Qwen3Moe, read_experts
from trtllm_dflash.models.weights import Part, Split


class Qwen3Next(HybridDecoder, Qwen3Moe):
    """Qwen3NextForCausalLM. Its projections' rows are grouped by key head."""

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        return read_moe_hybrid("qwen3_next", {"norm_topk_prob": True, **raw})

    def input_parts(self, net: str, sections: tuple[tuple[int, int], ...]) -> tuple[Part, ...]:
        d = self.delta
        values = d.value_heads // d.key_heads * d.value_size
        return self._grouped(net + "in_proj_qkvz.weight", (d.key_size, d.key_size, values, values))

    def gate_parts(self, net: str) -> tuple[Part, ...]:
        each = self.delta.value_heads // self.delta.key_heads
        return self._grouped(net + "in_proj_ba.weight", (each, each))

    def _grouped(self, key: str, runs: tuple[int, ...]) -> tuple[Part, ...]:
        """Lists the parts of a tensor that has, of each key head, runs of so many rows."""
        heads = self.delta.key_heads
        ends = [sum(runs[: i + 1]) for i in range(len(runs))]
        shape = (heads * ends[-1], self.config.hidden_size)
        return tuple(
            Part(key, shape, Split.ROWS, heads, run=(end - rows, end)) for rows, end in zip(runs, ends, strict=True)
        )


def read_moe_hybrid(family: str, raw: dict[str, Any]) -> DecoderConfig:
    """Reads the configuration of a hybrid with experts, one of which every row goes through.

    Raises:
        CheckpointError: a setting is missing, or asks for something that is not computed.
    """
    # Of dense layers, of which there are none.
    base = read_hybrid_config(family, {"intermediate_size": raw.get("moe_intermediate_size", 1), **raw})
    moe: MoEConfig = read_experts(raw)
    size = raw.get("shared_expert_intermediate_size")
    if not size:
        raise CheckpointError("config.json: 'shared_expert_intermediate_size' is missing")
    return base.model_copy(update={"moe": moe.model_copy(update={"shared_size": size})})
