"""Calls that the host makes of a session: to prepare, to read a chunk, to decode, to copy; and each as integers."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_dflash.step import Drafting

_DRAFTING = list(Drafting)


@dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of one slot; see `SamplingParams`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


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


@dataclass(frozen=True)
class Decode:
    """Runs a decoding step of the slots 0..B-1 together."""

    row_counts: list[int]  # [B] rows of each that are verified: the bonus token and drafts; 0: it takes no part
    drafting: Drafting
    block: int  # rows of the block to draft for the next step
    sampled: bool  # False: all of them are greedy


@dataclass(frozen=True)
class Copy:
    """Copies the first rows of one slot's caches into another's."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True)
class Prepare:
    """Prepares the kinds of decoding steps that requests may need; plain ones always are."""

    lengths: tuple[int, ...]  # of drafts, that are chosen among; 0: none are made, and the drafter keeps up
    sampled: bool  # besides greedy ones


Call = Prefill | Decode | Copy | Prepare


def words_of(call: Call) -> Iterator[int]:
    """Encodes a call as integers; real numbers by their bits."""
    if isinstance(call, Copy):
        yield from (0, call.source, call.target, call.rows)
    elif isinstance(call, Prepare):
        yield from (3, call.sampled, *call.lengths)
    elif isinstance(call, Decode):
        yield from (1, _DRAFTING.index(call.drafting), call.block, call.sampled, *call.row_counts)
    else:
        yield from (2, call.slot, call.start, call.last, _DRAFTING.index(call.drafting), call.block)
        sampling = call.sampling
        yield from (_bits(sampling.temperature), sampling.top_k, _bits(sampling.top_p), signed(sampling.seed))
        yield from call.token_ids


def call_of(words: list[int]) -> Call:
    kind, *rest = words
    if kind == 0:
        return Copy(*rest)
    if kind == 3:
        sampled, *lengths = rest
        return Prepare(tuple(lengths), bool(sampled))
    if kind == 1:
        drafting, block, sampled, *row_counts = rest
        return Decode(row_counts, _DRAFTING[drafting], block, bool(sampled))
    slot, start, last, drafting, block, temperature, top_k, top_p, seed, *token_ids = rest
    sampling = SlotSampling(_real(temperature), top_k, _real(top_p), seed % 2**64)
    return Prefill(slot, start, token_ids, bool(last), _DRAFTING[drafting], block, sampling)


def signed(seed: int) -> int:
    """Converts a seed of 64 bits to torch's int64 of the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _real(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
