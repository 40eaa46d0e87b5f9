"""The figures of a point, from the records of its requests.

TTFT: from when a request was due to its first response. E2E: to its last. TPOT: (E2E - TTFT) / (tokens - 1). ITL:
between two responses of a reply, each of which may bring several tokens. Tokens/s/user is 1 / TPOT, of the median.
"""

import math
from collections import Counter, defaultdict
from itertools import pairwise, zip_longest

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from trtllm_dflash.sweep.load import Arm, Record, Traffic

PERCENTILES = (50, 90, 99)

#: Of the gaps between responses, which are too many to keep: each is kept as the nearest power of this.
_RESOLUTION = math.log(1.005)
_DIGITS = 6  # microseconds


class Requests(BaseModel):
    """The requests of a round that succeeded, column by column.

    Attributes:
        late: seconds from when a request was due until it was sent.
        steps, accepted: decoding steps and accepted drafts; None where the server does not tell.
    """

    model_config = ConfigDict(extra="forbid")

    sample: list[int] = []
    turn: list[int] = []
    late: list[float] = []
    ttft: list[float] = []
    e2e: list[float] = []
    tokens: list[int] = []
    prompt_tokens: list[int | None] = []
    steps: list[int | None] = []
    accepted: list[int | None] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({len(getattr(self, name)) for name in type(self).model_fields}) > 1:
            raise ValueError("its columns are not all of the same length")
        return self


class Counted(BaseModel):
    """Drafts as a server counted them: steps of one sequence each that verified some, and these drafts."""

    model_config = ConfigDict(extra="forbid")

    steps: float
    drafted: float
    accepted: float


class Round(BaseModel):
    """One stretch of load on one arm.

    Attributes:
        load: clients, or requests a second.
        tokens: that came within `seconds`.
        itl: gaps between responses, by the power of the resolution.
        drafted_at, accepted_at: steps by the position of a draft, from 1: verified there, accepted there.
        accepted_by_rank: accepted drafts of trees by the rank, from 1, that the drafter gave each at its depth.
        counted: drafts, from the server's metrics where its replies do not tell their positions.
        mean_length: an acceptance length that the server averages itself, where it counts nothing; over a time of its
            own, which ends with the round.
        metrics: whose and where they are.
        errors: how many of each.
    """

    model_config = ConfigDict(extra="forbid")

    arm: Arm
    load: float
    round: int
    seconds: float
    tokens: float
    requests: Requests
    itl: dict[int, int] = {}
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    accepted_by_rank: list[int] = []
    counted: Counted | None = None
    mean_length: float | None = None
    metrics: str | None = None
    errors: dict[str, int] = {}

    @classmethod
    def of(cls, arm: Arm, load: float, number: int, traffic: Traffic) -> "Round":
        """Summarizes a round's traffic."""
        whole = [record for record in traffic.records if record.reply.error is None]
        errors = Counter(record.reply.error for record in traffic.records if record.reply.error is not None)
        gaps: Counter[int] = Counter()
        for record in whole:
            times = record.reply.times
            gaps.update(_power(b - a) for a, b in pairwise(times))
        return cls(
            arm=arm,
            load=load,
            round=number,
            seconds=round(traffic.seconds, _DIGITS),
            tokens=round(traffic.tokens, 2),
            requests=_columns(whole),
            itl=dict(sorted(gaps.items())),
            drafted_at=_added([record.reply.drafted_at for record in whole]),
            accepted_at=_added([record.reply.accepted_at for record in whole]),
            errors=dict(errors),
        )


def _columns(records: list[Record]) -> Requests:
    columns = Requests()
    for record in records:
        reply = record.reply
        columns.sample.append(record.sample)
        columns.turn.append(record.turn)
        columns.late.append(round(record.sent - record.due, _DIGITS))
        columns.ttft.append(round(reply.times[0] - record.due, _DIGITS))
        columns.e2e.append(round(reply.times[-1] - record.due, _DIGITS))
        columns.tokens.append(reply.tokens)
        columns.prompt_tokens.append(reply.prompt_tokens)
        columns.steps.append(reply.steps)
        columns.accepted.append(reply.accepted)
    return columns


def _added(lists: list[list[int]]) -> list[int]:
    total = [0] * max(map(len, lists), default=0)
    for counts in lists:
        for i, count in enumerate(counts):
            total[i] += count
    return total


def _power(gap: float) -> int:
    return round(math.log(max(gap, 1e-7)) / _RESOLUTION)


class Spread(BaseModel):
    """Mean and percentiles over many requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread | None":
        """Computes the spread of values; None without values."""
        if not values:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
        mean = float(np.mean(values))
        return cls(
            **{name: round(x, _DIGITS + 1) for name, x in zip(cls.model_fields, (mean, p50, p90, p99), strict=True)}
        )

    def at(self, percentile: int) -> float:
        """Looks up one of the percentiles."""
        return float(getattr(self, f"p{percentile}"))


class Point(BaseModel):
    """The figures of an arm under a load.

    Attributes:
        load: clients, or requests a second.
        tokens_per_second_per_gpu: None where the number of GPUs is not known.
        tokens_per_second_per_user: 1 / the median TPOT.
        late: how long after they were due requests were sent: the load generator's own delay.
        acceptance_length: tokens a decoding step; None where the server does not tell, or drafted nothing.
        acceptance_from: its source: "replies", or whose metrics.
        verified_by_position: drafts verified at each position of the block.
        acceptance_by_position: the share of those that was accepted.
        accepted_by_rank: accepted drafts of trees by the rank, from 1, that the drafter gave each at its depth; empty
            where chains were drafted, where acceptance was imposed, and where the server does not tell.
        acceptance_length_by_category: of the dataset.
    """

    arm: Arm
    load: float
    rounds: int
    requests: int
    errors: dict[str, int]
    seconds: float
    mean_prompt_tokens: float | None
    mean_output_tokens: float
    requests_per_second: float
    output_tokens_per_second: float
    tokens_per_second_per_gpu: float | None
    tokens_per_second_per_user: float | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    late: Spread | None
    acceptance_length: float | None
    acceptance_from: str | None = None
    verified_by_position: list[int]
    acceptance_by_position: list[float]
    accepted_by_rank: list[int] = []
    acceptance_length_by_category: dict[str, float]


def tpots(requests: Requests) -> list[float]:
    """Computes seconds a token after the first, of each reply of more than one."""
    columns = zip(requests.ttft, requests.e2e, requests.tokens, strict=True)
    return [(e2e - ttft) / (tokens - 1) for ttft, e2e, tokens in columns if tokens > 1]


def summarize(rounds: list[Round], gpus: int | None, categories: list[str]) -> Point:
    """Summarizes an arm's rounds under one load.

    Args:
        categories: of the dataset's samples.
    """
    columns = [round_.requests for round_ in rounds]
    seconds = sum(round_.seconds for round_ in rounds)
    count = sum(len(requests.tokens) for requests in columns)
    rate = sum(round_.tokens for round_ in rounds) / seconds if seconds else 0.0
    tpot = Spread.of([value for requests in columns for value in tpots(requests)])
    prompts = [n for requests in columns for n in requests.prompt_tokens if n is not None]
    errors: Counter[str] = Counter()
    for round_ in rounds:
        errors.update(round_.errors)
    drafted = _added([round_.drafted_at for round_ in rounds])
    accepted = _added([round_.accepted_at for round_ in rounds])
    length, by_category = _acceptance_lengths(columns, categories, any(drafted))
    told = "replies" if length is not None else next((round_.metrics for round_ in rounds if round_.metrics), None)
    length = length if length is not None else _by_metrics(rounds, drafted, accepted)
    output = sum(sum(requests.tokens) for requests in columns) / count if count else 0.0
    return Point(
        arm=rounds[0].arm,
        load=rounds[0].load,
        rounds=len(rounds),
        requests=count,
        errors=dict(errors),
        seconds=seconds,
        mean_prompt_tokens=float(np.mean(prompts)) if prompts else None,
        mean_output_tokens=output,
        requests_per_second=rate / output if output else 0.0,
        output_tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / gpus if gpus else None,
        tokens_per_second_per_user=1 / tpot.p50 if tpot is not None and tpot.p50 > 0 else None,
        ttft=Spread.of([value for requests in columns for value in requests.ttft]),
        tpot=tpot,
        itl=_gaps([round_.itl for round_ in rounds]),
        e2e=Spread.of([value for requests in columns for value in requests.e2e]),
        late=Spread.of([value for requests in columns for value in requests.late]),
        acceptance_length=length,
        acceptance_from=told if length is not None else None,
        verified_by_position=[d for d in drafted if d],
        acceptance_by_position=[a / d for d, a in zip_longest(drafted, accepted, fillvalue=0) if d],
        accepted_by_rank=_added([round_.accepted_by_rank for round_ in rounds]),
        acceptance_length_by_category=by_category,
    )


def _gaps(parts: list[dict[int, int]]) -> Spread | None:
    total: Counter[int] = Counter()
    for part in parts:
        total.update(part)
    if not total:
        return None
    powers = np.array(sorted(total))
    counts = np.array([total[int(power)] for power in powers])
    values = np.exp(powers * _RESOLUTION)
    below = np.cumsum(counts)
    p50, p90, p99 = (float(values[np.searchsorted(below, below[-1] * p / 100)]) for p in PERCENTILES)
    return Spread(mean=float((values * counts).sum() / below[-1]), p50=p50, p90=p90, p99=p99)


def _acceptance_lengths(
    columns: list[Requests], categories: list[str], drafted: bool
) -> tuple[float | None, dict[str, float]]:
    """Computes tokens a decoding step of the replies that had drafts: of all, and by category.

    Args:
        drafted: whether any were verified, as far as that is known; accepted ones imply it.
    """
    tokens: dict[str, int] = defaultdict(int)
    steps: dict[str, int] = defaultdict(int)
    for requests in columns:
        rows = zip(requests.sample, requests.tokens, requests.steps, requests.accepted, strict=True)
        for sample, count, taken, accepted in rows:
            if taken:
                drafted = drafted or bool(accepted)
                # The first is the prefill's, as is one more after each preemption: no step has more than its drafts
                # and a token besides.
                most = count if accepted is None else taken + accepted
                tokens[categories[sample]] += min(count - 1, most)
                steps[categories[sample]] += taken
    if not drafted or not steps:
        return None, {}
    by_category = {name: tokens[name] / steps[name] for name in sorted(steps) if name}
    return sum(tokens.values()) / sum(steps.values()), by_category if len(by_category) > 1 else {}


def _by_metrics(rounds: list[Round], drafted: list[int], accepted: list[int]) -> float | None:
    """Computes acceptance length by a server's metrics: a step commits its accepted drafts and one token more."""
    counts = [round_.counted for round_ in rounds if round_.counted is not None]
    if counts:
        return 1 + sum(count.accepted for count in counts) / sum(count.steps for count in counts)
    if drafted and drafted[0]:
        return 1 + sum(accepted) / drafted[0]
    means = [round_.mean_length for round_ in rounds if round_.mean_length is not None]
    return float(np.mean(means)) if means else None
