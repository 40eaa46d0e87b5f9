"""Counts of what became of MXFP4 blocks that were made NVFP4."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Transcoded:
    """Counts of MXFP4 blocks of 32 numbers that were made NVFP4, and the error; several tensors add up."""

    blocks: int = 0
    rounded: int = 0  # some of their numbers are others now
    largest_error: float = 0.0  # of one number

    def __add__(self, other: "Transcoded") -> "Transcoded":
        error = max(self.largest_error, other.largest_error)
        return Transcoded(self.blocks + other.blocks, self.rounded + other.rounded, error)

    def __str__(self) -> str:
        said = f"{self.blocks:,} blocks of MXFP4 as NVFP4, "
        if not self.rounded:
            return said + "all exact"
        return said + f"{self.rounded:,} of them rounded, by at most {self.largest_error:.3g}"
