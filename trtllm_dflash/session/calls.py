"""Calls that the host makes of a session: to prepare, to run a step, to copy rows; and each as integers."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trtllm_dflash.step import Drafting

_DRAFTING = list(Drafting)


@dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of one slot; see `SamplingParams`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class SlotPenalties:
    """Penalties of one slot, its prompt, and its reply so far; see `SamplingParams`."""

    prompt_ids: list[int]
    reply_ids: list[int]
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()  # by token
    end_ids: tuple[int, ...] = ()
    ends_from: int = 0  # the first position that an end token may stand at
    bad_runs: tuple[tuple[int, ...], ...] = ()  # of tokens


@dataclass(frozen=True)
class Guide:
    """Drafts of a slot whose reply has a grammar: such as stand in for its own, or else those."""

    slot: int
    drafts: list[int]  # in place of its own; all that are verified
    own: int = 0  # of its own that are verified, where no others are

    @property
    def rows(self) -> int:
        """Rows that have masks."""
        return 1 + (len(self.drafts) or self.own)


class Masks(ABC):
    """The tokens that rows of a step's guides may choose, made when they are written.

    Attributes:
        width: 32-bit words of a mask, which has a bit for each token, the lowest first.
    """

    width: int

    @abstractmethod
    def write(self, words: torch.Tensor) -> None:
        """Writes [n, width] int32 on the host, a row for each row of each guide in turn.

        Raises nothing for a guide that cannot be followed: the step's target may have run already.
        """


@dataclass(frozen=True)
class MadeMasks(Masks):
    """Masks that are there."""

    width: int
    words: list[int]

    def write(self, words: torch.Tensor) -> None:
        words.copy_(torch.tensor(self.words, dtype=torch.int32).view(words.shape))


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt, read in one slot."""

    slot: int
    start: int  # position of its first token
    token_ids: list[int]
    last: bool  # the reply's first token comes out of it, and the first block
    sampling: SlotSampling = SlotSampling()
    next_ids: list[int] = field(default_factory=list)  # whose log-probabilities its first rows give, one each
    penalties: SlotPenalties | None = None  # with the last piece


@dataclass(slots=True)
class Step:
    """Runs decoding slots and pieces of prompts together; no slot twice.

    The pages are given and the copies made, in this order, before any row is computed. Nobody changes one: it is not
    frozen for the time that takes in each step.
    """

    decode: list[tuple[int, int]]  # slot, and rows of it that are verified: the bonus token and drafts, a tree's too
    pieces: list[Piece]
    drafting: Drafting
    block: int  # rows of the block to draft for the next step; with chances, what each slot's has on average
    sampled: bool  # False: all of them are greedy
    pages: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index in its table, page
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # page from, page to, its first rows
    window_pages: list[tuple[int, int, int]] = field(default_factory=list)  # likewise, of layers with a window, where
    window_copies: list[tuple[int, int, int]] = field(default_factory=list)  # they have pages of their own
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # from and to; those kept are behind the slots'
    logprobs: bool = False  # whether log-probabilities of the choices are computed
    tree: int = 0  # nodes of the trees to draft out of the block; 0: chains
    penalized: list[int] = field(default_factory=list)  # slots that choose by penalized logits
    guides: list[Guide] = field(default_factory=list)  # of slots whose replies have a grammar
    masks: Masks | None = None  # of the guides' rows
    chances: bool = False  # whether chains are drafted with their chances, by which the next step may share rows; they
    # may be as long as the drafter's whole block
    share: int = 0  # rows of all decoding slots, to be divided by those; each has at most its own. 0: each has its own

    @property
    def reports(self) -> bool:
        """Whether its outcome has log-probabilities, of choices or of prompts."""
        return self.logprobs or (bool(self.pieces) and any(piece.next_ids for piece in self.pieces))


@dataclass(frozen=True)
class Prefill:
    """Runs a chunk of a prompt in one slot."""

    slot: int
    start: int  # position of its first token
    token_ids: list[int]
    last: bool  # the reply's first token comes out of it, and the first block
    drafting: Drafting
    block: int  # rows of the block to draft
    sampling: SlotSampling = SlotSampling()
    tree: int = 0  # nodes of the tree to draft out of the block; 0: a chain


@dataclass(frozen=True)
class Decode:
    """Runs a decoding step of the slots 0..B-1 together."""

    row_counts: list[int]  # [B] rows of each that are verified: the bonus token and drafts; 0: it takes no part
    drafting: Drafting
    block: int  # rows of the block to draft for the next step
    sampled: bool  # False: all of them are greedy
    tree: int = 0  # nodes of the trees to draft out of the block; 0: chains


@dataclass(frozen=True)
class Copy:
    """Copies the first rows of one slot's caches into another's."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True)
class CopyStates:
    """Copies the recurrent states of one place over those of another: slots, and behind them those that are kept."""

    source: int
    target: int


@dataclass(frozen=True)
class Place:
    """Lets a slot's recurrent states stand at a position, whatever they hold: for measurements of random weights."""

    slot: int
    position: int
    beside: int = 0  # rows behind it that were accepted and not absorbed yet


@dataclass(frozen=True)
class Prepare:
    """Prepares the kinds of decoding steps that requests may need; plain ones always are."""

    lengths: tuple[int, ...]  # of drafts, that are chosen among; 0: none are made, and the drafter keeps up
    sampled: bool  # besides greedy ones
    shaped: bool = False  # besides those without log-probabilities, penalties and masks
    shares: bool = False  # whether slots share the rows of steps that draft less than the most


Call = Step | Prefill | Decode | Copy | CopyStates | Place | Prepare


def words_of(call: Call) -> Iterator[int]:
    """Encodes a call as integers; real numbers by their bits."""
    if isinstance(call, Copy):
        yield from (0, call.source, call.target, call.rows)
    elif isinstance(call, CopyStates):
        yield from (6, call.source, call.target)
    elif isinstance(call, Place):
        yield from (5, call.slot, call.position, call.beside)
    elif isinstance(call, Step):
        yield from (4, _DRAFTING.index(call.drafting), call.block, call.sampled, call.logprobs, call.tree)
        yield from (call.chances, call.share)
        yield from _listed(call.penalized)
        yield len(call.guides)
        for guide in call.guides:
            yield from (guide.slot, guide.own)
            yield from _listed(guide.drafts)
        if call.masks is not None:
            yield call.masks.width
            yield from masks_of(call).flatten().tolist()
        for run in (call.decode, call.pages, call.copies, call.window_pages, call.window_copies, call.state_copies):
            yield len(run)
            for numbers in run:
                yield from numbers
        for piece in call.pieces:
            yield from (piece.slot, piece.start, piece.last, *_sampling_words(piece.sampling))
            yield from _listed(piece.token_ids)
            yield from _listed(piece.next_ids)
            yield from _listed(list(_penalty_words(piece.penalties)))
    elif isinstance(call, Prepare):
        yield from (3, call.sampled, call.shaped, call.shares, *call.lengths)
    elif isinstance(call, Decode):
        yield from (1, _DRAFTING.index(call.drafting), call.block, call.sampled, call.tree, *call.row_counts)
    else:
        yield from (2, call.slot, call.start, call.last, _DRAFTING.index(call.drafting), call.block, call.tree)
        yield from _sampling_words(call.sampling)
        yield from call.token_ids


def call_of(words: list[int]) -> Call:
    kind, *rest = words
    if kind == 0:
        return Copy(*rest)
    if kind == 5:
        return Place(*rest)
    if kind == 6:
        return CopyStates(*rest)
    if kind == 3:
        sampled, shaped, shares, *lengths = rest
        return Prepare(tuple(lengths), bool(sampled), bool(shaped), bool(shares))
    if kind == 1:
        drafting, block, sampled, tree, *row_counts = rest
        return Decode(row_counts, _DRAFTING[drafting], block, bool(sampled), tree)
    if kind == 4:
        return _step_of(rest)
    slot, start, last, drafting, block, tree = rest[:6]
    sampling, token_ids = _sampling_of(rest[6:11]), rest[11:]
    return Prefill(slot, start, token_ids, bool(last), _DRAFTING[drafting], block, sampling, tree)


def _step_of(words: list[int]) -> Step:
    drafting, block, sampled, logprobs, tree, chances, share = words[:7]
    penalized, at = _list_at(words, 7)
    guides, at = _guides_at(words, at)
    masks, at = _masks_at(words, at, guides)
    runs: list[list[int]] = []
    for size in (2, 3, 3, 3, 3, 2):
        end = at + 1 + words[at] * size
        runs.append(words[at + 1 : end])
        at = end
    decode, *changes, state_copies = runs
    pages, copies, window_pages, window_copies = (
        list(zip(run[::3], run[1::3], run[2::3], strict=True)) for run in changes
    )
    pieces = []
    while at < len(words):
        slot, start, last = words[at : at + 3]
        sampling = _sampling_of(words[at + 3 : at + 8])
        token_ids, at = _list_at(words, at + 8)
        next_ids, at = _list_at(words, at)
        penalties, at = _list_at(words, at)
        pieces.append(Piece(slot, start, token_ids, bool(last), sampling, next_ids, _penalties_of(penalties)))
    return Step(
        decode=list(zip(decode[::2], decode[1::2], strict=True)),
        pieces=pieces,
        drafting=_DRAFTING[drafting],
        block=block,
        sampled=bool(sampled),
        pages=pages,
        copies=copies,
        window_pages=window_pages,
        window_copies=window_copies,
        state_copies=list(zip(state_copies[::2], state_copies[1::2], strict=True)),
        logprobs=bool(logprobs),
        tree=tree,
        penalized=penalized,
        guides=guides,
        masks=masks,
        chances=bool(chances),
        share=share,
    )


def _sampling_words(sampling: SlotSampling) -> tuple[int, ...]:
    temperature, top_p, min_p = (_bits(x) for x in (sampling.temperature, sampling.top_p, sampling.min_p))
    return temperature, sampling.top_k, top_p, signed(sampling.seed), min_p


def _sampling_of(words: list[int]) -> SlotSampling:
    temperature, top_k, top_p, seed, min_p = words
    return SlotSampling(_real(temperature), top_k, _real(top_p), seed % 2**64, _real(min_p))


def _penalty_words(given: SlotPenalties | None) -> Iterator[int]:
    if given is None:
        return
    yield from (_bits(x) for x in (given.presence, given.frequency, given.repetition))
    yield given.ends_from
    for ids in (given.prompt_ids, given.reply_ids, given.end_ids, *given.bad_runs):
        yield from _listed(ids)
    for token, bias in given.bias:
        yield from (-1, token, _bits(bias))  # no list is so long


def _penalties_of(words: list[int]) -> SlotPenalties | None:
    if not words:
        return None
    presence, frequency, repetition = (_real(bits) for bits in words[:3])
    at, lists, bias = 4, [], []
    while at < len(words):
        if words[at] < 0:
            bias.append((words[at + 1], _real(words[at + 2])))
            at += 3
        else:
            ids, at = _list_at(words, at)
            lists.append(ids)
    prompt_ids, reply_ids, end_ids, *bad_runs = lists
    return SlotPenalties(
        prompt_ids,
        reply_ids,
        presence,
        frequency,
        repetition,
        bias=tuple(bias),
        end_ids=tuple(end_ids),
        ends_from=words[3],
        bad_runs=tuple(map(tuple, bad_runs)),
    )


def _guides_at(words: list[int], at: int) -> tuple[list[Guide], int]:
    """Decodes a step's guides; returns where they end, too."""
    guides = []
    count, at = words[at], at + 1
    for _ in range(count):
        slot, own = words[at : at + 2]
        drafts, at = _list_at(words, at + 2)
        guides.append(Guide(slot, drafts, own))
    return guides, at


def _masks_at(words: list[int], at: int, guides: list[Guide]) -> tuple[Masks | None, int]:
    """Decodes the masks of a step's guides; returns where they end, too."""
    if not guides:
        return None, at
    width = words[at]
    end = at + 1 + width * guided_rows(guides)
    return MadeMasks(width, words[at + 1 : end]), end


def guided_rows(guides: list[Guide]) -> int:
    """Counts the rows that have masks."""
    return sum(guide.rows for guide in guides)


def masks_of(call: Step, place: torch.Tensor | None = None) -> torch.Tensor:
    """Makes the masks of a step's guides on the host: [n, W] int32.

    Args:
        place: for at least so many; None makes one.
    """
    assert call.masks is not None
    count = guided_rows(call.guides)
    words = torch.empty(count, call.masks.width, dtype=torch.int32) if place is None else place[:count]
    call.masks.write(words)
    return words


def _listed(numbers: Sequence[int]) -> Iterator[int]:
    """Encodes a list, its length first."""
    yield len(numbers)
    yield from numbers


def _list_at(words: list[int], at: int) -> tuple[list[int], int]:
    """Decodes a list; returns where it ends, too."""
    end = at + 1 + words[at]
    return words[at + 1 : end], end


def signed(seed: int) -> int:
    """Converts a seed of 64 bits to torch's int64 of the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _real(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
