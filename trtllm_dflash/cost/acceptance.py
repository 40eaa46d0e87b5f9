"""Acceptance that is imposed, not measured: random weights accept nothing, and a step's time does not depend on it."""

from dataclasses import dataclass
from functools import cached_property

from trtllm_dflash.errors import SettingsError

#: Tokens that a step commits with trees, by their nodes, over those with chains of a whole block of so many rows: what
#: the shipped pair measured, 256 prompts decoded greedily (benchmarks/results/draft-trees-cpu.json).
TREE_GAINS = {15: 1.109, 31: 1.202, 63: 1.264}
_GAINS_BLOCK = 16


@dataclass(frozen=True)
class ImposedAcceptance:
    """Tokens that a step commits a slot, if each draft has the same chance once all before it are accepted.

    Args:
        tokens: committed a step with the whole block, the bonus token among them.
        block: rows of that block.

    Raises:
        SettingsError: no such block commits so many.
    """

    tokens: float
    block: int

    def __post_init__(self) -> None:
        check_acceptance("--simulate-acceptance", self.tokens, self.block)

    @cached_property
    def survival(self) -> float:
        """The chance p of each draft: 1 + p + ... + p^(block - 1) are `tokens`."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _committed(middle, self.block) < self.tokens else (low, middle)
        return high

    def at(self, rows: int) -> float:
        """Tokens that a step commits when it verifies that many rows of the block."""
        return self.tokens if rows == self.block else _committed(self.survival, rows)

    def of_tree(self, nodes: int) -> float | None:
        """Tokens that a step commits with a tree of so many nodes in the block's place: by `TREE_GAINS`.

        None of blocks that have not been measured.
        """
        return min(float(self.block), TREE_GAINS[nodes] * self.tokens) if self.block == _GAINS_BLOCK else None


def check_acceptance(flag: str, tokens: float, block: int) -> None:
    """Checks that a block of so many rows can commit that many tokens a step.

    Raises:
    SettingsError: it cannot; names the flag.
    """
    if not 1 <= tokens <= block:
        raise SettingsError(f"{flag} {tokens:g}: a block of {block} rows commits 1 to {block} tokens a step")


def _committed(survival: float, rows: int) -> float:
    return float(sum(survival**i for i in range(rows)))
