"""Acceptance that is imposed, not measured: random weights accept nothing, and a step's time does not depend on it."""

from dataclasses import dataclass
from functools import cached_property

from trtllm_dflash.errors import SettingsError


@dataclass(frozen=True)
class ImposedAcceptance:
    """Tokens that a step commits a slot, had each draft the same chance once all before it are accepted.

    Args:
        tokens: committed a step with the whole block, the bonus token among them.
        block: rows of that block.

    Raises:
        SettingsError: no such block commits so many.
    """

    tokens: float
    block: int

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.block:
            most = f"a block of {self.block} rows commits 1 to {self.block} tokens a step"
            raise SettingsError(f"--simulate-acceptance {self.tokens:g}: {most}")

    @cached_property
    def survival(self) -> float:
        """The chance p of each draft: 1 + p + ... + p^(block - 1) are `tokens`."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _committed(middle, self.block) < self.tokens else (low, middle)
        return high

    def at(self, rows: int) -> float:
        """Tokens a step with that many rows of the block."""
        return self.tokens if rows == self.block else _committed(self.survival, rows)


def _committed(survival: float, rows: int) -> float:
    return float(sum(survival**i for i in range(rows)))
