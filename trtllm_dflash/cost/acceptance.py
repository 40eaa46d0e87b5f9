"""Acceptance that is imposed, not measured: random weights accept nothing, and a step's time does not depend on it."""

import math
from dataclasses import dataclass
from functools import cached_property

from trtllm_dflash.errors import SettingsError

#: Tokens that a step commits with trees, by their nodes, over those with chains of a whole block of so many rows: what
#: the shipped pair measured, 256 prompts decoded greedily (benchmarks/results/draft-trees-cpu.json).
TREE_GAINS = {15: 1.109, 31: 1.202, 63: 1.264}
_GAINS_BLOCK = 16

#: Tokens that a step commits with chains of a whole block: what is imposed wherever figures here are.
USUAL_TOKENS = 6.49


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
        return _survival(self.tokens, self.block)

    def tree_survival(self, nodes: int) -> float | None:
        """The chance, likewise, that a tree of so many nodes has each draft of the target's own; None as `of_tree`."""
        tokens = self.of_tree(nodes)
        return None if tokens is None else _survival(tokens, self.block)

    def at(self, rows: int) -> float:
        """Tokens that a step commits when it verifies that many rows of the block."""
        return self.tokens if rows == self.block else _committed(self.survival, rows)

    def of_tree(self, nodes: int) -> float | None:
        """Tokens that a step commits with a tree of so many nodes in the block's place: by `TREE_GAINS`.

        None of blocks that have not been measured.
        """
        return min(float(self.block), TREE_GAINS[nodes] * self.tokens) if self.block == _GAINS_BLOCK else None


def chain_power(nodes: int) -> float:
    """The power of a draft's survival in trees of so many nodes that is its survival in a chain, by `TREE_GAINS`.

    At the usual acceptance, of blocks of 16: it depends on it but little, 1.14 to 1.21 from 3 to 8 tokens of 15 nodes.
    """
    usual = ImposedAcceptance(USUAL_TOKENS, _GAINS_BLOCK)
    tree = usual.tree_survival(nodes)
    assert tree is not None
    return math.log(usual.survival) / math.log(tree)


def check_acceptance(flag: str, tokens: float, block: int) -> None:
    """Checks that a block of so many rows can commit that many tokens a step.

    Raises:
        SettingsError: it cannot; names the flag.
    """
    if not 1 <= tokens <= block:
        raise SettingsError(f"{flag} {tokens:g}: a block of {block} rows commits 1 to {block} tokens a step")


def _survival(tokens: float, block: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _committed(middle, block) < tokens else (low, middle)
    return high


def _committed(survival: float, rows: int) -> float:
    return float(sum(survival**i for i in range(rows)))
