"""Simulated acceptance: how many drafts a target would accept, counted on its greedy replies without decoding.

One pass of the target over a prompt and its greedy reply gives the features of every position; a step at a position
accepts the longest run of drafts that equals the reply, of a chain or in a tree. The count is that of real decoding.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from trtllm_dflash.ops.draft_tree import RANKS, DraftTree, chain_tree
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.train.documents import Document, Pack, moved
from trtllm_dflash.train.features import FrozenTarget
from trtllm_dflash.train.head import Head
from trtllm_dflash.train.network import PackContext, TrainedDrafter

Tensor = torch.Tensor

#: Tokens of documents that are looked at together: a GPU waits for the host rather than the other way round.
_TOGETHER = {"cpu": 8192, "cuda": 65536}


@dataclass
class Tally:
    """Counts of decoding steps."""

    steps: int = 0
    tokens: int = 0  # that they added to replies
    accepted: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # position 1.. -> drafts accepted there
    tried: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # position -> steps that could accept there

    def add(self, accepted: int, possible: int) -> None:
        """Counts a step that accepted so many drafts of so many that the reply had room for."""
        self.steps += 1
        self.tokens += accepted + 1
        for position in range(1, possible + 1):
            self.tried[position] += 1
            self.accepted[position] += position <= accepted

    def include(self, other: "Tally") -> None:
        """Adds another's counts."""
        self.steps += other.steps
        self.tokens += other.tokens
        for mine, theirs in ((self.accepted, other.accepted), (self.tried, other.tried)):
            for position, count in theirs.items():
                mine[position] += count

    @property
    def length(self) -> float:
        """Tokens a step, the target's own included: tau."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def by_position(self) -> list[float]:
        """Share of the steps whose drafts are accepted up to each position, from the first."""
        return [self.accepted[position] / self.tried[position] for position in sorted(self.tried)]


@dataclass
class Acceptance:
    """Acceptance on held-out prompts."""

    overall: Tally = field(default_factory=Tally)
    domains: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, domain: str, accepted: int, possible: int) -> None:
        """Counts a step; see `Tally.add`."""
        self.overall.add(accepted, possible)
        self.domains[domain].add(accepted, possible)

    @classmethod
    def sum(cls, parts: "list[Acceptance]") -> "Acceptance":
        """Adds up the counts of parts of the prompts."""
        whole = cls()
        for part in parts:
            whole.overall.include(part.overall)
            for domain, tally in part.domains.items():
                whole.domains[domain].include(tally)
        return whole

    def as_json(self) -> dict[str, object]:
        """Describes it in JSON."""
        return {
            "tau": round(self.overall.length, 4),
            "steps": self.overall.steps,
            "by_position": [round(share, 4) for share in self.overall.by_position],
            "by_domain": {name: round(tally.length, 4) for name, tally in sorted(self.domains.items())},
        }


@torch.no_grad()
def simulate(
    drafter: TrainedDrafter,
    target: FrozenTarget,
    documents: list[Document],
    progress: Callable[[int, int], None] = lambda done, total: None,
    tree: DraftTree | None = None,
) -> Acceptance:
    """Counts the steps of greedy decoding of these replies.

    Args:
        documents: prompts with the target's own greedy replies.
        tree: that is drafted; None: the chain of a whole block. A drafter with a selector has no other.
        progress: told how many are done.
    """
    acceptance = Acceptance()
    tree = tree or chain_tree(drafter.config.block_size - 1)
    done = 0
    for together in _groups(documents, _TOGETHER[target.device.type]):
        pack = Pack.of(together).to(target.device)
        context = drafter.context(pack, target.features(pack).taps)
        _walk(drafter, target, context, tree, acceptance)
        done += len(together)
        progress(done, len(documents))
    return acceptance


def _groups(documents: list[Document], most: int) -> list[list[Document]]:
    """Divides documents into groups of at most so many tokens (or of one)."""
    groups: list[list[Document]] = []
    room = 0
    for document in documents:
        size = len(document.token_ids)
        if size > room:
            groups.append([])
            room = most
        groups[-1].append(document)
        room -= size
    return groups


def _walk(
    drafter: TrainedDrafter, target: FrozenTarget, context: PackContext, tree: DraftTree, acceptance: Acceptance
) -> None:
    """Decodes a pack's replies in lockstep, a block of each a time."""
    documents = context.pack.documents
    head = drafter.head(target.head)
    firsts = list(accumulate((len(document.token_ids) for document in documents), initial=0))
    at = [document.prompt for document in documents]  # the anchor: the token that was chosen last
    while live := [i for i, document in enumerate(documents) if at[i] < len(document.token_ids) - 1]:
        rows = torch.tensor([firsts[i] + at[i] for i in live])
        trees = _drafted(head, tree, drafter.draft(context, rows), context.pack.token_ids[moved(rows, target.device)])
        for i, tokens, parents in zip(live, *(part.tolist() for part in trees), strict=True):
            # The last step of a reply ends with it, whatever the target would have said next.
            possible = documents[i].token_ids[at[i] + 1 : -1]
            accepted = _depth(tokens, parents, possible)
            acceptance.add(documents[i].domain, accepted, min(max(tree.depths), len(possible)))
            at[i] += accepted + 1


def _drafted(head: Head, tree: DraftTree, rows: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts under bonus tokens [A] from the drafter's rows [A, block - 1, ...]: tokens and parents of the trees' rows.

    A drafter with a selector drafts chains.
    """
    hidden, gate = head.parts(rows)
    logits = head.plain_logits(hidden)
    if head.selector is None:
        ops = TorchOps({}, {})
        return ops.grow_tree(tree, bonus.int(), *ops.top_ids(logits, RANKS))
    tokens = torch.cat([bonus[:, None], head.selector.choose(logits, gate, bonus)], dim=1)
    return tokens, torch.arange(-1, tokens.shape[1] - 1).expand_as(tokens)


def _depth(tokens: list[int], parents: list[int], reply: Sequence[int]) -> int:
    """Follows a reply down a tree of drafts, whose row 0 is the bonus token; returns the number of drafts that it has.

    Args:
        tokens, parents: of each row.
    """
    children = {(parent, token): row for row, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    row = 0
    for depth, token in enumerate(reply):
        if (row, token) not in children:
            return depth
        row = children[row, token]
    return len(reply)
