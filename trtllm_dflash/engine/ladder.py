"""The sizes that decoding steps come in: numbers of slots, and of drafts."""

#: Draft lengths to choose from, those that a drafter's block allows: each is a captured graph for every batch size.
LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    return sorted({size for power in range(most.bit_length()) if (size := 2**power) <= most} | {most})


def draft_lengths(block_size: int) -> list[int]:
    """The lengths to choose from with a drafter of this block size, its whole block among them."""
    return sorted({drafts for drafts in LENGTHS if drafts < block_size} | {block_size - 1})
