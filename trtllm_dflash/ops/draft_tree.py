"""Trees of drafts: which nodes a step may verify, and how the best of them are found without a heap.

A drafter's one pass gives the likely tokens of each depth. A node is a tuple of ranks, one for each depth down to its
own; its chance is the product of their probabilities. The best tree of so many nodes is those of the largest chances:
nobody's chance is above its parent's, so no node comes without its parent. The search is over a fixed list of nodes:
one product of a 0/1 matrix and the log-probabilities scores them all, and the largest scores are the tree. The list was
chosen by `examples/tiny_pair/choose_tree_nodes.py`; it holds ranks and no tokens, so it serves every pair.

Siblings are listed by their ranks, and none is in a tree without those that are likelier. So a node's rank is its place
among its siblings, which parents alone tell: nobody has to keep it until the node is accepted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeAlias

#: Numbers of nodes that a tree may have; their step has a row more, for the bonus token.
TREE_SIZES = (15, 31, 63)

#: Ranks of a depth: its most likely tokens, so many, are looked at.
RANKS = 8

#: Nodes listed for trees of each size: more change no tree that matters.
_LISTED = {15: 256, 31: 256, 63: 512}

#: Log-probabilities below this are taken for it, and each depth costs so much besides: more than sums of so many such
#: numbers are rounded by, so that no node scores above its parent, nor as much.
LEAST, TOLL = -15.0, 1e-3

#: A node: its rank at each depth from 1 to its own.
Ranks: TypeAlias = tuple[int, ...]

_FILE = Path(__file__).with_name("draft_tree.json")


@dataclass(frozen=True, eq=False)
class DraftTree:
    """The trees of `nodes` drafts out of a list of nodes, each after its parent, the chain of all first ranks in front.

    Attributes:
        parents: each node's parent in the list; -1: the bonus token.
        ranks: each node's own rank at its depth.
    """

    nodes: int
    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.nodes <= len(self.parents) == len(self.ranks)
        assert all(parent < i for i, parent in enumerate(self.parents))
        assert all(rank + 1 == place_among_siblings(self.parents, i) for i, rank in enumerate(self.ranks))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    @cached_property
    def paths(self) -> tuple[Ranks, ...]:
        """The ranks of each node, from depth 1 down to its own."""
        paths: list[Ranks] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        return tuple(paths)


def place_among_siblings(parents: Sequence[int], row: int) -> int:
    """Finds a row's place among the children of its parent, from 1: a node's rank at its depth."""
    return 1 + parents[:row].count(parents[row])


def ranks_of(parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """Finds the ranks, from 1, of a tree's drafts on a path of rows from row 0, which is none: of each after it."""
    return [place_among_siblings(parents, row) for row in path[1:]]


def chain_tree(drafts: int) -> DraftTree:
    """Makes the tree that is a chain: its list has no other nodes."""
    return DraftTree(drafts, tuple(range(-1, drafts - 1)), (0,) * drafts)


@lru_cache
def draft_tree(nodes: int, block_size: int) -> DraftTree:
    """Makes the trees of so many nodes, of the listed ones that a block reaches."""
    return tree_of(_listed(nodes, block_size), nodes)


def listed_nodes(nodes: int, block_size: int) -> int:
    """Counts the nodes that trees of this size are made of, where drafts come out of such blocks."""
    return len(_listed(nodes, block_size))


def _listed(nodes: int, block_size: int) -> list[Ranks]:
    listed = json.loads(_FILE.read_text())
    paths: list[Ranks] = []
    for parent, rank in zip(listed["parents"], listed["ranks"], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return [path for path in paths if len(path) < block_size][: _LISTED[nodes]]


def tree_of(paths: list[Ranks], nodes: int) -> DraftTree:
    """Makes the trees of so many nodes out of these, each after its parent."""
    ordered = sorted(paths, key=lambda path: any(path))  # stable: the chain of first ranks comes to the front
    places = {path: i for i, path in enumerate(ordered)} | {(): -1}
    return DraftTree(nodes, tuple(places[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))
