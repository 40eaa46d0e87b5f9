"""Mixers of tokens, one in each layer of a model, as plans count them: attention, or a gated delta net."""

from dataclasses import dataclass

from trtllm_dflash.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Attends:
    """A layer's attention, and the rows that it keeps.

    Attributes:
        latent: a row is key and value of all heads, and every rank keeps it (MLA, absorbed).
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    latent: bool = False

    @property
    def row(self) -> int:
        """Numbers of a token that are kept of each key/value head."""
        return self.key_size if self.latent else self.key_size + self.value_size


@dataclass(frozen=True)
class DeltaNet:
    """A layer's gated delta net, and the state that it keeps of a sequence. A rank has whole key heads."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int  # rows of its convolution

    @property
    def channels(self) -> int:
        """Numbers of a row that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


def mixers_of(config: DecoderConfig) -> tuple[Attends | DeltaNet, ...]:
    """Lists what mixes tokens in each layer of any target or drafter."""
    return tuple(_mixer_of(config, i) for i in range(config.layers))


def _mixer_of(config: DecoderConfig, i: int) -> Attends | DeltaNet:
    delta = config.delta
    if delta is not None and delta.layers[i]:
        return DeltaNet(delta.key_heads, delta.value_heads, delta.key_size, delta.value_size, delta.kernel)
    latent = config.latent_attention
    if latent is not None:
        return Attends(config.heads, 1, latent.rank + latent.rotary_size, latent.rank, latent=True)
    kv_heads, size = config.caches(i)["key"]
    return Attends(config.heads, kv_heads, size, size, config.window(i))
