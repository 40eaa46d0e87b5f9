"""The judge of tokens that two computations chose: they may differ where the logits nearly tie, and nowhere else.

In 16 bits, and with caches in FP8, sums over one row and over sixteen round differently; so do two kinds of CPU, of
kernels, and numbers of ranks. Where the largest logits lie closer together than that, either token is right.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.kernels import Pages
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.philox import uniform_numbers
from trtllm_dflash.step import Drafting, StepInputs

Tensor = torch.Tensor
Array = np.ndarray


def all_logits(llm: LLM, ids: list[int], rows: int | None = None) -> Tensor:
    """[N, V]: the step's own forward, with every row a logit row.

    Args:
        rows: of each step; None: all in one.
    """
    seen: list[Tensor] = []
    session: Any = llm.session
    target = session._step.target
    inner = target.logits

    def spy(ops, hidden):
        seen.append(inner(ops, hidden))
        return seen[-1]

    target.logits = spy
    give_own_pages(session)
    try:
        for first in range(0, len(ids), rows or len(ids)):
            part = torch.tensor([ids[first:][:rows]], dtype=torch.int32)
            places = torch.arange(part.shape[1], dtype=torch.int32)[None]
            start, count = (torch.tensor([x], dtype=torch.int32) for x in (first, part.shape[1]))
            llm.session.step(StepInputs(part, start, count, places, places[:, :1]), Drafting.OFF)
    finally:
        target.logits = inner
    return torch.cat(seen, dim=1)[0]


def give_own_pages(session: Any) -> None:
    """Gives slot 0 a page for each of its places, where rows lie in pages: what a scheduler left may have one twice."""
    paging = session.paging
    for name, count in (("_pages", paging.pages), ("_window_pages", paging.window_pages or paging.pages)):
        pages = getattr(session, name, None)
        if isinstance(pages, Pages):
            with torch.inference_mode(), session._stream():
                every = torch.arange(pages.table.shape[1], dtype=pages.table.dtype, device=pages.table.device)
                pages.table[0].copy_(every % count)


def rounding_gap(count: float, logits: Tensor, dtype: torch.dtype) -> float:
    """So many roundings of the largest of logits [..., V] in this type: a gap for `is_near_tie`."""
    return float(count * torch.finfo(dtype).eps * logits.abs().max())


def is_near_tie(logits: Tensor, token: int, gap: float, sampling: SamplingInputs[Tensor] | None = None) -> bool:
    """Whether logits that lie within gap / 2 of these [V] could choose the token.

    Args:
        sampling: what it is drawn by, of one slot [1] and row [1, 1]; None: it is the largest.
    """
    logits = logits.float().cpu()
    if sampling is None or not sampling.temperature.item():
        return bool(logits.max() - logits[token] <= gap)
    temperature, uniform = sampling.temperature.item(), sampling.uniform.item()
    # The least that the others can weigh beside it; each of them may weigh so many times as much.
    least = logits.double().index_add(0, torch.tensor([token]), torch.tensor([gap], dtype=torch.double))
    probs = filtered(least.numpy(), temperature, int(sampling.top_k), sampling.top_p.item())
    before, own, after = probs[:token].sum(), probs[token], probs[token + 1 :].sum()
    most, odds = math.exp(gap / temperature), uniform / (1 - uniform)
    # A draw goes through the tokens by id, to the one at which their sum passes `uniform` of all.
    return bool(own > 0 and before <= odds * (own + after * most) and odds * after < own + before * most)


def filtered(logits: Array, temperature: float, top_k: int, top_p: float) -> Array:
    """Probabilities [V] of the documented distribution, in float64 and the plainest words."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = [i for i in order if not top_k or scaled[i] >= scaled[order[min(top_k, len(order)) - 1]]]
    weights = np.exp(scaled - scaled.max())
    nucleus: list[int] = []
    total, reached = weights[kept].sum(), 0.0
    for i in kept:
        if reached / total >= top_p and scaled[i] < scaled[nucleus[-1]]:
            break
        nucleus.append(i)
        reached += weights[i]
    probs = np.zeros(len(scaled))
    probs[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probs


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts first differ; None where they are the same.

    Raises:
        AssertionError: one goes on where the other, the same so far, ends.
    """
    for i, pair in enumerate(zip(a, b, strict=False)):
        if pair[0] != pair[1]:
            return i
    assert len(a) == len(b), f"a text of {len(a)} tokens, the same so far as one of {len(b)}"
    return None


def assert_only_near_ties_differ(
    llm: LLM,
    prompts: Sequence[list[int]],
    found: Sequence[list[int]],
    expected: Sequence[list[int]],
    params: SamplingParams | None = None,
    *,
    dtype: torch.dtype,
    count: float = 1,
) -> int:
    """Asserts that each text found is the expected one, or first differs from it at a near-tie; counts the former.

    Args:
        llm: whose logits decide; None of the texts need be its own.
        params: how the tokens were chosen, with one seed for all prompts; None: greedily.
        dtype, count: both tokens' logits lie within so many roundings in this type.
    """
    same = 0
    for prompt, a, b in zip(prompts, found, expected, strict=True):
        first = first_difference(a, b)
        if first is None:
            same += 1
            continue
        ids = [*prompt, *a[:first]]
        logits = all_logits(llm, ids)[-1].float().cpu()
        gap, sampling = rounding_gap(count, logits, dtype), _sampling(params, len(ids))
        for token in (a[first], b[first]):
            below = float(logits.max() - logits[token])
            assert is_near_tie(logits, token, gap, sampling), (
                f"no near-tie at token {first}: {a[first]} and {b[first]}; {token} lies {below:.4f} below the largest "
                f"logit, and {gap:.4f} is allowed"
            )
    return same


def assert_each_is_nearly_the_largest(
    exact: LLM,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    params: SamplingParams | None = None,
    *,
    dtype: torch.dtype,
    count: float,
    wrong: int = 0,
) -> int:
    """Asserts that each token of texts is the one to be chosen, or a near-tie; counts the latter.

    Rows that rounding moves more than most may lie further apart: within two deviations of what it does to them.

    Args:
        exact: whose logits decide, on a CPU in FP32.
        params: how the tokens were chosen, with one seed for all prompts; None: greedily.
        dtype, count: a token's logit lies within so many roundings in this type.
        wrong: tokens of all that need not: where a rounding sends rows to other experts, say.
    """
    others, found = 0, []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        rows = all_logits(exact, prompt + text)[len(prompt) - 1 : -1]
        for at, (token, logits) in enumerate(zip(text, rows, strict=True)):
            sampling, gap = _sampling(params, len(prompt) + at), rounding_gap(count, logits, dtype)
            others += not is_near_tie(logits, token, 0.0, sampling)
            if is_near_tie(logits, token, gap, sampling):
                continue
            moved = randomly_rounded_logits(exact, prompt + text[:at], dtype)
            apart = moved - moved[:, token, None]  # of every token, from this one
            gap = max(gap, 2 * float(apart[:, logits.argmax()].std() if sampling is None else apart.std(dim=0).max()))
            if not is_near_tie(logits, token, gap, sampling):
                below = float(logits.max() - logits[token])
                found.append(
                    f"text {i}, token {at}: {token} lies {below:.4f} below the largest logit, {gap:.4f} allowed"
                )
    assert len(found) <= wrong, "; ".join(found)
    return others


#: Operations of a network, behind each of which 16 bits round.
_ROUNDED = "linear", "rms_norm", "moe", "gated_delta", "gated", "add", "attention"


def randomly_rounded_logits(exact: LLM, ids: list[int], dtype: torch.dtype, samples: int = 16) -> Tensor:
    """[samples, V]: the last row's logits where each operation on a CPU rounds to this type, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    steps = 2 / torch.finfo(dtype).eps  # of numbers from 1/2 to 1

    def rounding(operation: Any) -> Any:
        def rounded(*args: Any, **settings: Any) -> Tensor:
            part, power = torch.frexp(operation(*args, **settings))
            up = torch.rand(part.shape, generator=generator)
            return torch.ldexp((part * steps + up).floor() / steps, power)

        return rounded

    with pytest.MonkeyPatch.context() as patch:
        for name in _ROUNDED:
            patch.setattr(TorchOps, name, rounding(getattr(TorchOps, name)))
        return torch.stack([all_logits(exact, ids)[-1] for _ in range(samples)])


def _sampling(params: SamplingParams | None, position: int) -> SamplingInputs[Tensor] | None:
    if params is None or params.temperature == 0:
        return None
    uniform = uniform_numbers(torch.tensor([params.seed]), torch.tensor([[position]]))
    top_k = torch.tensor([params.top_k], dtype=torch.int32)
    return SamplingInputs(torch.tensor([params.temperature]), top_k, torch.tensor([params.top_p]), uniform)


class SidingOps(TorchOps):
    """Takes another computation's choices where they are near-ties, so that all that follows is the same to the digit.

    Without it a tie that turns would end a comparison: other tokens are accepted, and other rows are written.

    Args:
        choices: [B, R] of each choice of a step, in their order: the target's, then the drafter's.
        count: roundings, in the logits' own type, that a choice may lie below the largest.
    """

    def __init__(
        self, weights: dict[str, Tensor], caches: dict[str, Tensor], choices: list[Tensor], count: float
    ) -> None:
        super().__init__(weights, caches)
        self._choices = list(choices)
        self._count = count
        self.turned = 0

    def argmax(self, logits: Tensor) -> Tensor:
        return self._side(logits, super().argmax(logits), None)

    def sample(self, logits: Tensor, sampling: SamplingInputs[Tensor]) -> Tensor:
        return self._side(logits, super().sample(logits, sampling), sampling)

    def _side(self, logits: Tensor, own: Tensor, sampling: SamplingInputs[Tensor] | None) -> Tensor:
        theirs = self._choices.pop(0)
        assert own.shape == theirs.shape
        for slot, row in (own != theirs).nonzero().tolist():
            token, gap = int(theirs[slot, row]), rounding_gap(self._count, logits[slot, row], logits.dtype)
            by = None if sampling is None else _of(sampling, slot, row)
            assert is_near_tie(logits[slot, row], token, gap, by), (
                f"slot {slot}, row {row}: {token} instead of {int(own[slot, row])} is no near-tie within {gap}"
            )
            self.turned += 1
        return theirs


def _of(sampling: SamplingInputs[Tensor], slot: int, row: int) -> SamplingInputs[Tensor]:
    one = slice(slot, slot + 1)
    uniform = sampling.uniform[one, row : row + 1]
    return SamplingInputs(sampling.temperature[one], sampling.top_k[one], sampling.top_p[one], uniform)
