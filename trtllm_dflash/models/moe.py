"""A decoder whose feed-forward is a mixture of experts. Written over `Ops`; the experts' tensors are `MoELayer`'s."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import Decoder, DecoderConfig, MoEConfig
from trtllm_dflash.models.weights import Part, Split, Weight, unit_range
from trtllm_dflash.ops.base import MoELayer, Ops, Residual

T = TypeVar("T")


class MoEDecoder(Decoder, ABC):
    """A decoder with experts in every layer. The router is whole on every rank, so all of them choose alike."""

    #: The router's name in the checkpoint's layers; an engine's is `mlp.router`.
    router = "mlp.router"

    #: The name there of an expert that every row goes through, where there is one, and whether it has a gate.
    shared = "mlp.shared_expert"
    has_shared_gate = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.moe is not None
        self.moe: MoEConfig = config.moe

    def feed_forward_weights(self, prefix: str) -> list[Weight]:
        part = Part(f"{prefix}{self.router}.weight", (self.moe.experts, self.config.hidden_size))
        weights = [Weight(prefix + "mlp.router.weight", (part,)), *self.expert_weights(prefix)]
        return weights if self.moe.shared_size is None else weights + self._shared_weights(prefix, self.moe.shared_size)

    @abstractmethod
    def expert_weights(self, prefix: str) -> list[Weight]:
        """Lists the tensors of a layer's experts."""

    def feed_forward(self, ops: Ops[T], prefix: str, x: Residual[T]) -> Residual[T]:
        norm, routers = prefix + "post_attention_layernorm", self._routers(prefix)
        stream, h, (logits, *gate) = ops.norm_and_linears(norm, routers, x, self.config.norm_eps)
        # logits [B, N, experts], gate [B, N, 1]
        return ops.add_mixture(self.experts(prefix, ops.tp, ops.rank), stream, h, logits, *gate)

    def _routers(self, prefix: str) -> tuple[str, ...]:
        """Names the linears that say how much each expert gives: the router, and the gate of the one of all rows."""
        router, gate = prefix + "mlp.router", prefix + "mlp.shared_expert_gate"
        return (router, gate) if self.has_shared_gate and self.moe.shared_size is not None else (router,)

    def joined_linears(self) -> list[tuple[str, ...]]:
        every = [self._routers(f"model.layers.{i}.") for i in range(self.config.layers)]
        return super().joined_linears() + [names for names in every if len(names) > 1]

    def expert_layers(self) -> list[MoELayer]:
        return [self.experts(f"model.layers.{i}.", 1, 0) for i in range(self.moe.dense_layers, self.config.layers)]

    def _shared_weights(self, prefix: str, size: int) -> list[Weight]:
        """Lists the tensors of the expert of all rows, whose columns ranks divide, and its gate."""
        shared, source, hidden = prefix + "mlp.shared_expert", prefix + self.shared, self.config.hidden_size
        gate_up = tuple(Part(f"{source}.{n}_proj.weight", (size, hidden), Split.ROWS, size) for n in ("gate", "up"))
        down = Part(source + ".down_proj.weight", (hidden, size), Split.COLUMNS, size)
        weights = [Weight(shared + ".gate_up_proj.weight", gate_up), Weight(shared + ".down_proj.weight", (down,))]
        if self.has_shared_gate:
            weights.append(Weight(shared + "_gate.weight", (Part(source + "_gate.weight", (1, hidden)),)))
        return weights

    def experts(self, prefix: str, tp: int, rank: int) -> MoELayer:
        """Describes a layer's experts on `rank` of `tp`."""
        return describe_experts(prefix, self.moe, tp, rank)


def describe_experts(prefix: str, moe: MoEConfig, tp: int, rank: int) -> MoELayer:
    """Describes the experts that `rank` of `tp` has of a layer."""
    first, last = unit_range(moe.experts, tp, rank) if moe.expert_parallel else (0, moe.experts)
    chosen = moe.top_k, moe.normalized, moe.clamp, moe.scores, moe.activation, moe.scale, moe.shared_size is not None
    return MoELayer(prefix + "mlp.", moe.experts, first, last - first, *chosen)


def separate_experts(prefix: str, moe: MoEConfig, hidden: int, sources: Mapping[str, str]) -> list[Weight]:
    """Lists the stacks of a layer's experts, each of whose matrices the checkpoint has by itself.

    Args:
        sources: the tensors of gate, up and down, less `.weight`, with {} for the expert's number.
    """
    size = moe.intermediate_size
    rows, columns = (Split.WHOLE, Split.WHOLE) if moe.expert_parallel else (Split.ROWS, Split.COLUMNS)

    def part(expert: int, name: str) -> Part:
        key = sources[name].format(expert) + ".weight"
        return Part(key, (hidden, size), columns, size) if name == "down" else Part(key, (size, hidden), rows, size)

    return _stacks(prefix, moe, part)


def stacked_experts(prefix: str, moe: MoEConfig, hidden: int, source: str) -> list[Weight]:
    """Lists the stacks of a layer's experts, which the checkpoint has as two tensors, gates above ups.

    Args:
        source: what their names there begin with.
    """
    size, count = moe.intermediate_size, moe.experts
    rows, columns = (Split.WHOLE, Split.WHOLE) if moe.expert_parallel else (Split.ROWS, Split.COLUMNS)

    def part(expert: int, name: str) -> Part:
        if name == "down":
            return Part(source + "down_proj", (count, hidden, size), columns, size, matrix=expert)
        section = (0, size) if name == "gate" else (size, 2 * size)
        key, shape = source + "gate_up_proj", (count, 2 * size, hidden)
        return Part(key, shape, rows, size, section=section, matrix=expert)

    return _stacks(prefix, moe, part)


def _stacks(prefix: str, moe: MoEConfig, part: Callable[[int, str], Part]) -> list[Weight]:
    """Joins the parts of each expert, `part` of its number and gate, up or down, into the two stacks of a layer."""
    divided = moe.expert_parallel
    gate_up = tuple(part(expert, name) for expert in range(moe.experts) for name in ("gate", "up"))
    down = tuple(part(expert, "down") for expert in range(moe.experts))
    return [
        Weight(prefix + "mlp.experts.gate_up_proj.weight", gate_up, stack=moe.experts, divided=divided),
        Weight(prefix + "mlp.experts.down_proj.weight", down, stack=moe.experts, divided=divided),
    ]


def check_experts(moe: MoEConfig) -> MoEConfig:
    """Checks that a token can choose as many experts as it should; returns the configuration.

    Raises:
        CheckpointError: it cannot.
    """
    if moe.top_k > moe.experts:
        raise CheckpointError(f"config.json: num_experts_per_tok {moe.top_k} exceeds the {moe.experts} experts")
    return moe
