"""The frontier of throughput against speed for each user, readings at a fixed speed, and their confidence intervals."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from trtllm_dflash.sweep.summary import Round

Floats = NDArray[np.float64]

REPLICATES = 1000
_LEAST_SHARE = 0.95  # of the replicates that must reach a speed for an interval to be given
_INTERVAL = (2.5, 97.5)


class Reading(BaseModel):
    """Throughput at a fixed speed.

    Attributes:
        value: output tokens a second, or None where no load gives that speed.
        bound: "at least": every load that was measured is faster for its users than asked, and a larger one would give
            more. "unknown": of a ratio to such a value.
        low, high: the bootstrap's 95% interval; None where too few replicates reach that speed.
    """

    value: float | None
    bound: Literal["", "at least", "not reached", "unknown"] = ""
    low: float | None = None
    high: float | None = None


class Comparison(BaseModel):
    """Readings of arms at one speed, and the ratio of each to the reference.

    Attributes:
        at: tokens a second for each user.
        reference: an arm; None where none is everybody's.
        ratios: of the other arms.
    """

    at: float
    arms: dict[str, Reading]
    reference: str | None = None
    ratios: dict[str, Reading] = {}


@dataclass(frozen=True)
class Measured:
    """One load on one arm, as the bootstrap needs it: columns of its requests, and its speed and rate."""

    load: float
    rate: float  # output tokens a second
    key: list[tuple[int, int, int]]  # of each request: round, sample and turn
    tokens: Floats
    seconds: Floats  # of each request, whole
    tpot: Floats  # NaN of a reply of one token
    closed: bool

    @property
    def speed(self) -> float:
        """Tokens a second for each user."""
        return float(1 / np.nanmedian(self.tpot))

    def resampled(self, draws: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Computes speed and rate of each replicate; draws [replicates, requests] are indices of requests.

        So many clients get tokens in proportion to a request's mean tokens over its mean seconds (Little's law); at a
        fixed rate of arrivals, in proportion to its mean tokens. Replicates of replies of one token have no speed: NaN.
        """
        tpot = self.tpot[draws]
        tells = ~np.isnan(tpot).all(axis=1)
        speed = np.full(len(draws), np.nan)
        with np.errstate(divide="ignore"):  # a replicate of replies that came at once: faster than any speed asked
            speed[tells] = 1 / np.nanmedian(tpot[tells], axis=1)
        weight = self.tokens[draws].mean(axis=1) / self.tokens.mean()
        if self.closed:
            weight /= self.seconds[draws].mean(axis=1) / self.seconds.mean()
        return speed, self.rate * weight


def measured(rounds: list[Round], closed: bool) -> Measured | None:
    """Joins a load's rounds on one arm for the bootstrap; None where the median reply has no TPOT: all came at once."""
    rows = sorted(
        (round_.round, sample, turn, tokens, ttft, e2e)
        for round_ in rounds
        for sample, turn, tokens, ttft, e2e in zip(
            round_.requests.sample,
            round_.requests.turn,
            round_.requests.tokens,
            round_.requests.ttft,
            round_.requests.e2e,
            strict=True,
        )
    )
    tokens, ttft, e2e = (np.array([row[i] for row in rows], float) for i in (3, 4, 5))
    tpot = np.where(tokens > 1, (e2e - ttft) / np.maximum(tokens - 1, 1), np.nan)
    if not (tpot > 0).any() or not np.nanmedian(tpot) > 0:
        return None
    rate = sum(round_.tokens for round_ in rounds) / sum(round_.seconds for round_ in rounds)
    return Measured(rounds[0].load, rate, [row[:3] for row in rows], tokens, e2e, tpot, closed)


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keeps the points (speed, rate) that no other one beats in both, by growing speed."""
    best: list[tuple[float, float]] = []
    for speed, rate in sorted(points, reverse=True):
        if not best or rate > best[-1][1]:
            best.append((speed, rate))
    return best[::-1]


def rate_at(points: list[tuple[float, float]], speed: float) -> Reading:
    """Reads the frontier's rate at a speed: between two of its points, on the straight line."""
    corners = frontier(points)
    if not corners or speed > corners[-1][0]:
        return Reading(value=None, bound="not reached")
    if speed < corners[0][0]:
        # A load that was slower and gave less: a larger one than the best gains nothing.
        saturated = min(points)[0] <= speed
        return Reading(value=corners[0][1], bound="" if saturated else "at least")
    speeds, rates = zip(*corners, strict=True)
    return Reading(value=float(np.interp(speed, speeds, rates)))


def compare(
    arms: dict[str, list[Measured]], speeds: tuple[float, ...], reference: str | None, seed: int = 0
) -> list[Comparison]:
    """Reads every arm at each speed, with intervals from resampling each point's requests, and ratios to the reference.

    Where two arms had the same requests under a load, both are resampled alike: what differs between prompts is not
    held against their ratio.
    """
    replicas = _resample(arms, seed)
    found = []
    for speed in speeds:
        readings, drawn = {}, {}
        for name, loads in arms.items():
            drawn[name] = _drawn(replicas[name], speed)
            reading = rate_at([(load.speed, load.rate) for load in loads], speed)
            readings[name] = _with_interval(reading, drawn[name])
        others = [name for name in arms if reference in arms and name != reference]
        ratios = {name: _ratio(readings, drawn, str(reference), name) for name in others}
        found.append(Comparison(at=speed, arms=readings, reference=reference, ratios=ratios))
    return found


def _resample(arms: dict[str, list[Measured]], seed: int) -> dict[str, list[tuple[Floats, Floats]]]:
    replicas: dict[str, list[tuple[Floats, Floats]]] = {}
    for name, loads in arms.items():
        replicas[name] = []
        for load in loads:
            key = hash((load.load, tuple(load.key)))  # of integers and floats: the same in every process
            chance = np.random.default_rng([seed, key & 0xFFFFFFFF])
            draws = chance.integers(len(load.key), size=(REPLICATES, len(load.key)))
            replicas[name].append(load.resampled(draws))
    return replicas


def _drawn(loads: list[tuple[Floats, Floats]], speed: float) -> Floats:
    """Reads each replicate at a speed; NaN where it does not reach the speed."""
    values = []
    for i in range(REPLICATES):
        points = [(float(speeds[i]), float(rates[i])) for speeds, rates in loads if not np.isnan(speeds[i])]
        value = rate_at(points, speed).value
        values.append(np.nan if value is None else value)
    return np.array(values)


def _ratio(readings: dict[str, Reading], drawn: dict[str, Floats], one: str, two: str) -> Reading:
    first, second = readings[one], readings[two]
    if first.value is None or second.value is None:
        return Reading(value=None, bound="not reached")
    if first.bound:
        return Reading(value=None, bound="unknown")
    bound: Literal["", "at least"] = "at least" if second.bound else ""
    return _with_interval(Reading(value=second.value / first.value, bound=bound), drawn[two] / drawn[one])


def _with_interval(reading: Reading, drawn: Floats) -> Reading:
    reached = drawn[~np.isnan(drawn)]
    if reading.value is None or len(reached) < _LEAST_SHARE * len(drawn):
        return reading
    low, high = (float(value) for value in np.percentile(reached, _INTERVAL))
    return reading.model_copy(update={"low": low, "high": high})
