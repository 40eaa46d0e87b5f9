"""EAGLE-3's drafter, counted: one layer over the target's hidden states, run once for each draft of a chain.

Shapes are those that its published drafters have (config.json of SpecForge's for gpt-oss-120b, Llama 3 and DeepSeek
V3): one layer with the heads of the target, its input the embedding beside the hidden state, 32,000 tokens to draft
from, and a feed-forward as the target's where that is dense, else six times as wide as the hidden state.
"""

from dataclasses import dataclass

from trtllm_dflash.cost.floor import PartWork, Work
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models.mixers import Attends
from trtllm_dflash.models.weights import units_per_rank

VOCABULARY = 32_000
_MOST_PASSES = 64  # several times those of any published chain or tree; each is counted by itself
_DIGITS = 4  # of a number of drafts
_TAPS = 3  # hidden states of the target, joined
_HEAD_SIZE = 128  # of a target whose heads are none of a usual kind


@dataclass(frozen=True)
class Eagle3Draft:
    """The drafts of a step.

    Attributes:
        passes: of the drafter, one after the other.
        width: rows of each pass but the first; 1 makes a chain.
        rows: that the target verifies, the bonus token among them.
    """

    passes: int = 3
    width: int = 1
    rows: int = 4

    @classmethod
    def parse(cls, text: str) -> "Eagle3Draft":
        """Reads "3", a chain, or "8x10x60": the passes, the width and the drafts that are verified, of a tree.

        Raises:
            SettingsError: it is neither.
        """
        parts = text.split("x")
        numbers = [int(part) for part in parts if part.isdecimal() and len(part) <= _DIGITS]
        if len(numbers) == len(parts) and min(numbers) >= 1 and numbers[0] <= _MOST_PASSES:
            if len(parts) == 1:
                return cls(numbers[0], 1, numbers[0] + 1)
            if len(parts) == 3 and numbers[0] <= numbers[2] <= _drafted(numbers[0], numbers[1]):
                return cls(numbers[0], numbers[1], numbers[2] + 1)
        raise SettingsError(
            f"--eagle3-drafts {text}: write the drafts of a chain, such as 3, or of a tree its passes, the best of "
            f"each and the drafts to verify, such as 8x10x60; at most {_MOST_PASSES} passes"
        )

    @property
    def is_chain(self) -> bool:
        """Whether each pass drafts one token."""
        return self.width == 1

    def __str__(self) -> str:
        return f"a chain of {self.passes}" if self.is_chain else f"a tree of {self.rows - 1} in {self.passes} passes"


def _drafted(passes: int, width: int) -> int:
    """Counts the drafts of a tree: as many of the first row as it is wide, then as many of each of a pass's best."""
    return width + (passes - 1) * width**2


class Eagle3Count:
    """Counts an EAGLE-3 drafter of the target of an engine, on its first rank."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, target = config, config.target
        hidden, tp = target.hidden_size, config.tp
        size = target.head_size if target.head_size <= _HEAD_SIZE else _HEAD_SIZE
        self._mixer = Attends(target.heads, min(target.kv_heads, target.heads), size, size)
        columns = target.intermediate_size if target.moe is None else 6 * hidden
        heads, kv_heads = units_per_rank(target.heads, tp), units_per_rank(self._mixer.kv_heads, tp)
        attention = (heads + 2 * kv_heads) * size * 2 * hidden + hidden * heads * size
        self._layer = attention + 3 * hidden * columns // tp + VOCABULARY // tp * hidden
        self._joined = _TAPS * hidden * hidden

    @property
    def bytes(self) -> int:
        """Bytes of its weights on a rank."""
        return (self._layer + self._joined) * self._config.dtype.itemsize

    def parts(self, draft: Eagle3Draft, batch: int, length: int) -> list[PartWork]:
        """Counts the passes of a step, each a part.

        The first goes over the rows that the target may have accepted: as many as there are passes, and the bonus
        token.
        """
        first = batch * (draft.passes + 1)
        others = [self._pass(batch * draft.width, 0, batch, length)] * (draft.passes - 1)
        return [self._pass(first, self._joined, batch, length), *others]

    def _pass(self, rows: int, joined: int, batch: int, length: int) -> PartWork:
        config = self._config
        numbers = self._layer + joined
        products = Work((numbers + rows * config.target.hidden_size) * config.dtype.itemsize, 2 * rows * numbers)
        cached = batch * length * units_per_rank(self._mixer.kv_heads, config.tp) * self._mixer.row
        flops = 4 * rows * length * units_per_rank(self._mixer.heads, config.tp) * self._mixer.key_size
        attention = Work(cached * config.cache_dtype.itemsize, flops)
        return PartWork(products, Work(0, 0), attention, 1, rows, config.target.hidden_size)
