"""A session of flat rows and pages whose model is a function of the tokens in its caches, so that wrong ones show."""

from types import SimpleNamespace

import torch

from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.runtime.request import SamplingParams, Sequence
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.step import Drafting

VOCABULARY = 50
END = 0  # the token that ends a reply


def choose(tokens, sampling):
    """The target's token after these: a function of the target, the seed and the position."""
    seed = sampling.seed if sampling.temperature else 0
    return hash((tuple(tokens), seed)) % VOCABULARY


def reply(prompt, params):
    """The reply to a prompt that is computed alone."""
    tokens = []
    while len(tokens) < params.max_tokens and (params.ignore_eos or END not in tokens):
        tokens.append(choose(prompt + tokens, params))
    return tokens


def request(prompt, tokens=20, draft=True, priority=100, deadline=None, ignore_eos=True, **params):
    """A request for a reply of so many tokens."""
    settings = SamplingParams(max_tokens=tokens, ignore_eos=ignore_eos, **params)
    end = frozenset() if ignore_eos else frozenset([END])
    return Sequence(list(prompt), settings, tokens, end, draft=draft, priority=priority, deadline=deadline)


class PagedSession:
    """Keeps in each row of each page the token that the target wrote, and the one that the drafter did.

    A draft is right three times in four, where the drafter's rows are; it is computed from them.
    """

    def __init__(
        self,
        slots=4,
        pages=40,
        page_rows=20,
        max_seq_len=200,
        block=4,
        pieces=3,
        prompt_rows=96,
        mixes=True,
        ahead=1,
        window=0,
    ):
        self.config = SimpleNamespace(
            block_size=block, draft_tree=0, max_batch=slots, max_seq_len=max_seq_len, drafter=object(), sampling=True
        )
        self.limits = StepLimits(pieces, prompt_rows, mixes)
        width = -(-(max_seq_len + 2 * block) // page_rows)
        seen = slots * (-(-(window + (ahead + 2) * block) // page_rows) + 3)
        window_pages = seen + -(-(ahead + 1) * prompt_rows // page_rows) if window else 0
        self.paging = Paging(pages, page_rows, width, window, window_pages)
        self.windowed = [[None] * page_rows for _ in range(window_pages)]  # the target's layers with a window
        self.window_tables = [{} for _ in range(slots)]
        self.looks = []  # slot, and the first and last position that the last step saw through the window
        self.lost = []  # slot and position of rows that a step has to see through the window and did not find
        self.ahead = ahead
        self.choice = SimpleNamespace(labels={})
        self.prepared = None
        self.steps = []  # all that were run
        self.writes = []  # slot, position and page of each row that the last one wrote
        self.target = [[None] * page_rows for _ in range(pages)]
        self.drafter = [[None] * page_rows for _ in range(pages)]
        self.tables = [{} for _ in range(slots)]
        self.next_start = [0] * slots
        self.next_tokens = [[] for _ in range(slots)]
        self.sampling = [None] * slots

    def prepare(self, call):
        self.prepared = call

    def prompt_room(self, step, pieces):
        return sum(pieces)

    def run(self, step):
        self.steps.append(step)
        self.writes, self.looks = [], []
        for slot, index, page in step.pages:
            self.tables[slot][index] = page
        targets = [target for _, target, _ in step.copies]
        assert len({*targets, *(source for source, _, _ in step.copies)}) >= len(set(targets)) + bool(targets)
        assert not {source for source, _, _ in step.copies} & set(targets), "copies may be made at once"
        for source, target, rows in step.copies:
            for cache in (self.target, self.drafter):
                cache[target][:rows] = cache[source][:rows]
        for slot, index, page in step.window_pages:
            self.window_tables[slot][index] = page
        assert len({entry[:2] for entry in step.window_pages}) == len(step.window_pages)
        for source, target, rows in step.window_copies:
            self.windowed[target][:rows] = self.windowed[source][:rows]
        slots = [slot for slot, _ in step.decode] + [piece.slot for piece in step.pieces]
        assert len(slots) == len(set(slots))
        assert len(step.pieces) <= self.limits.pieces
        assert sum(len(piece.token_ids) for piece in step.pieces) <= self.limits.prompt_rows
        assert self.limits.mixes or len(step.pieces) + bool(step.decode) == 1
        committed = []
        for slot, count in step.decode:
            assert count <= len(self.next_tokens[slot])
            committed.append(self._segment(step, slot, self.next_start[slot], self.next_tokens[slot][:count], count))
        for piece in step.pieces:
            self.sampling[piece.slot] = piece.sampling
            committed.append(self._segment(step, piece.slot, piece.start, piece.token_ids, 1))
        most = max(map(len, committed))
        return Outcome(torch.tensor([[len(ids) - 1, *ids, *[END] * (most - len(ids))] for ids in committed]))

    def _segment(self, step, slot, start, token_ids, logits):
        for position, token in enumerate(token_ids, start):
            self._write(self.target, slot, position, token)
            if step.drafting is not Drafting.OFF:
                self._write(self.drafter, slot, position, token)
        if self.paging.window:
            self._look(slot, start, token_ids)
        sampling = self.sampling[slot]
        assert step.sampled or not sampling.temperature
        first = start + len(token_ids) - logits
        chosen = [choose(self._read(self.target, slot, first + i + 1), sampling) for i in range(logits)]
        accepted = next((i for i in range(logits - 1) if token_ids[i + 1] != chosen[i]), logits - 1)
        start = min(first + accepted + 1, self.config.max_seq_len - 1)
        self.next_start[slot] = start
        self.next_tokens[slot] = [chosen[accepted]]
        if step.drafting is Drafting.BLOCK:
            context = [*self._read(self.drafter, slot, start), chosen[accepted]]
            for _ in range(step.block - 1):
                right = choose(context, sampling)
                context.append(right if hash(tuple(context)) % 4 else -1)
            self.next_tokens[slot] = context[start:]
            for position in range(start, start + step.block):
                self._write(self.drafter, slot, position, None)
        return chosen[: accepted + 1]

    def _look(self, slot, start, token_ids):
        size, table = self.paging.rows, self.window_tables[slot]
        for position, token in enumerate(token_ids, start):
            self.windowed[table[position // size]][position % size] = token
        tokens = self._read(self.target, slot, start + len(token_ids))
        first = max(0, start + 1 - self.paging.window)
        self.looks.append((slot, first, len(tokens) - 1))
        for position in range(first, len(tokens)):
            page = table.get(position // size)
            if page is None or self.windowed[page][position % size] != tokens[position]:
                self.lost.append((slot, position))

    def _read(self, cache, slot, rows):
        size = self.paging.rows
        return [cache[self.tables[slot][i // size]][i % size] for i in range(rows)]

    def _write(self, cache, slot, position, token):
        page = self.tables[slot][position // self.paging.rows]
        self.writes.append((slot, position, page))
        cache[page][position % self.paging.rows] = token
