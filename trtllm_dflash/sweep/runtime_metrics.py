"""Acceptance from each server's own reports: ours, vLLM, SGLang and TensorRT-LLM, all in one form.

Read in their sources: vllm/v1/spec_decode/metrics.py (0.26.0), sglang/srt/observability/metrics_collector.py and
managers/tokenizer_manager.py (0.5.23), and the iteration statistics of TensorRT-LLM's `/metrics` (1.4.0rc1;
`enable_iter_perf_stats: true`).
"""

import http.client
import json
import math
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trtllm_dflash.errors import EngineError

Server = Literal["trtllm-dflash", "vllm", "sglang", "tensorrt-llm"]

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([-+.\dA-Za-z]+)")
_POSITION = re.compile(r'position="(\d+)"')
_RANK = re.compile(r'rank="(\d+)"')
_LABEL = re.compile(r'(\w+)="([^"]*)"')
#: After which a page holds the last reply: ours is published about once a second.
SETTLE_SECONDS = 1.5

_PREFIXES: dict[str, Server] = {"dflash_": "trtllm-dflash", "vllm:": "vllm", "sglang:": "sglang"}


@dataclass(frozen=True)
class Drafts:
    """Drafts that were verified, over some time.

    Attributes:
        steps: steps of one sequence each in which drafts were verified.
        drafted, accepted: drafts in them.
        accepted_at: steps by the position of a draft, from 1, in which it was accepted; empty where nobody says.
        drafted_at: steps by position in which it was verified; empty where each step verifies a whole block.
        by_rank: accepted drafts of trees by the rank, from 1, that the drafter gave each at its depth; ours alone tell.
    """

    steps: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    accepted_at: Mapping[int, float] = field(default_factory=dict)
    drafted_at: Mapping[int, float] = field(default_factory=dict)
    by_rank: Mapping[int, float] = field(default_factory=dict)

    @property
    def length(self) -> float | None:
        """Acceptance length: tokens a step, the bonus token among them; None without a step."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Share of the drafts that were accepted; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    def by_position(self) -> tuple[list[int], list[int]]:
        """Counts steps that verified, and that accepted, the draft at each position; empty where they are not known."""
        positions = range(1, max((*self.accepted_at, *self.drafted_at), default=0) + 1)
        drafted = [round(self.drafted_at.get(i, 0.0) if self.drafted_at else self.steps) for i in positions]
        return drafted, [round(self.accepted_at.get(i, 0.0)) for i in positions]

    def ranks(self) -> list[int]:
        """Counts accepted drafts of trees at each rank, from 1; empty where there are none."""
        last = max((rank for rank, count in self.by_rank.items() if round(count)), default=0)
        return [round(self.by_rank.get(rank, 0.0)) for rank in range(1, last + 1)]

    def __add__(self, other: "Drafts") -> "Drafts":
        return self._with(other, 1)

    def __sub__(self, before: "Drafts") -> "Drafts":
        """Drafts since an earlier count."""
        return self._with(before, -1)

    def _with(self, other: "Drafts", sign: int) -> "Drafts":
        return Drafts(
            self.steps + sign * other.steps,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            _joined(self.accepted_at, other.accepted_at, sign),
            _joined(self.drafted_at, other.drafted_at, sign),
            _joined(self.by_rank, other.by_rank, sign),
        )


def _joined(one: Mapping[int, float], other: Mapping[int, float], sign: int) -> dict[int, float]:
    return {i: one.get(i, 0.0) + sign * other.get(i, 0.0) for i in sorted({*one, *other})}


@dataclass(frozen=True)
class Reading:
    """A server's metrics, read once.

    Attributes:
        server: whose they are; None where their form is not known.
        drafts: counted since the server began; TensorRT-LLM's are counted since they were last read.
        mean_length: an acceptance length that the server averages itself, over a time of its own; SGLang has no other.
        url: of the page.
        computes: of ours, the labels that say what computes its steps.
        is_live: whether it counts everything up to now; pages are published a little later.
    """

    server: Server | None
    drafts: Drafts | None
    mean_length: float | None = None
    url: str = ""
    computes: Mapping[str, str] = field(default_factory=dict)
    is_live: bool = False

    def is_exact_with(self, other: "Reading") -> bool:
        """Whether both servers, ours, say that they compute a token alike, to the bit."""
        labels = {name for name in (*self.computes, *other.computes) if name != "model"}
        alike = all(self.computes.get(name) == other.computes.get(name) for name in labels)
        return alike and self.computes.get("exact", "no") != "no"

    def since(self, before: "Reading") -> Drafts | None:
        """Drafts between two readings; None where the server does not count."""
        if self.drafts is None:
            return None
        if self.server == "tensorrt-llm" or before.drafts is None:
            return self.drafts
        counted = self.drafts - before.drafts
        numbers = counted.steps, counted.drafted, counted.accepted
        return counted if all(0 <= number < math.inf for number in numbers) else None  # it began anew meanwhile


def read_metrics(url: str, timeout: float = 10.0) -> Reading:
    """Reads a metrics endpoint, past any proxy that the environment names: so are servers asked that are measured.

    Raises:
        EngineError: it cannot be read.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        raise EngineError(f"{url}: cannot be read: {error}") from None
    except http.client.HTTPException as error:  # of a gRPC port, or of a page that is cut off
        raise EngineError(f"{url}: cannot be read as HTTP: {type(error).__name__}") from None
    try:
        return replace(parse_metrics(text), url=url)
    except EngineError as error:
        raise EngineError(f"{url}: {error}") from None


def find_metrics(url: str | None, api: str | None = None) -> Reading | None:
    """Finds and reads a server's metrics for the first time.

    Args:
        url: of the page, where it was given.
        api: of an OpenAI API, as http://HOST:PORT: without `url` the page is looked for beside it, at /metrics, where
        vLLM, SGLang and TensorRT-LLM have theirs.

    Returns:
        None where no URL was given and there is no page.

    Raises:
        EngineError: the page that was given cannot be read, or its form is not known.
    """
    if url is not None:
        try:
            reading = read_metrics(url)
        except EngineError as error:
            raise EngineError(f"--metrics-url {error}") from None
        if reading.server is None:
            known = "of ours, vLLM's, SGLang's or TensorRT-LLM's"
            raise EngineError(f"--metrics-url {url}: has no metrics {known}; leave it out")
        return reading
    if api is None:
        return None
    try:
        reading = read_metrics(f"{api.rstrip('/').removesuffix('/v1')}/metrics")
    except EngineError:
        return None
    return reading if reading.server is not None else None


def parse_metrics(text: str) -> Reading:
    """Parses a metrics page: Prometheus text of ours, vLLM's or SGLang's, or TensorRT-LLM's JSON."""
    if text.lstrip().startswith("["):
        return _parse_iterations(text)
    server: Server | None = None
    sums: dict[str, float] = {}
    at: dict[int, float] = {}
    tried: dict[int, float] = {}
    by_rank: dict[int, float] = {}
    means: list[float] = []  # of several ranks
    computes: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:  # a page of something else
            continue
        name, labels = match[1].removesuffix("_total"), match[2] or ""
        server = server or next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), None)
        sums[name] = sums.get(name, 0.0) + value
        position = _POSITION.search(labels)
        if position is not None and name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            at[int(position[1]) + 1] = at.get(int(position[1]) + 1, 0.0) + value  # vLLM counts from 0
        elif position is not None and name == "dflash_accepted_tokens":
            at[int(position[1])] = at.get(int(position[1]), 0.0) + value
        elif name == "sglang:spec_accept_length" and value > 0:
            means.append(value)
        elif name == "dflash_kernels_info":
            computes = dict(_LABEL.findall(labels))
        elif name == "dflash_accepted_nodes" and (its := _RANK.search(labels)) is not None:
            by_rank[int(its[1])] = by_rank.get(int(its[1]), 0.0) + value
        elif position is not None and name == "dflash_drafted_tokens":
            tried[int(position[1])] = tried.get(int(position[1]), 0.0) + value
    mean = sum(means) / len(means) if means else None
    drafts = _counted(server, sums, at, tried)
    if drafts is not None:
        drafts = replace(drafts, by_rank=by_rank)
    return Reading(server, drafts, mean, computes=computes)


def _counted(
    server: Server | None, sums: Mapping[str, float], at: Mapping[int, float], tried: Mapping[int, float]
) -> Drafts | None:
    if server == "vllm" and "vllm:spec_decode_num_drafts" in sums:
        name = "vllm:spec_decode_num_"
        drafted, accepted = sums.get(name + "draft_tokens", 0.0), sums.get(name + "accepted_tokens", 0.0)
        return Drafts(sums[name + "drafts"], drafted, accepted, at)
    if server == "trtllm-dflash":
        drafted, accepted = sums.get("dflash_drafted_tokens", 0.0), sums.get("dflash_accepted_tokens", 0.0)
        return Drafts(tried.get(1, 0.0), drafted, accepted, at, tried)  # each step that drafts has a first draft
    return None


def _parse_iterations(text: str) -> Reading:
    """Parses TensorRT-LLM's iteration statistics: each is reported once, so these are those since the last reading."""
    try:
        entries = [json.loads(entry) if isinstance(entry, str) else entry for entry in json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the metrics are not valid JSON: {error}") from None
    total, drafts = Drafts(), False
    for entry in entries:
        found = entry.get("specDecodingStats") if isinstance(entry, dict) else None
        if isinstance(found, dict) and found:
            drafts = True
            total += Drafts(
                float(found.get("numRequestsWithDraftTokens") or 0),
                float(found.get("numDraftTokens") or 0),
                float(found.get("numAcceptedTokens") or 0),
            )
    return Reading("tensorrt-llm", total if drafts else None)


def steps_of(tokens: int, accepted: int) -> int:
    """Counts a reply's decoding steps: each gives the drafts that it accepts and one token more, but the last one where
    the reply is cut; the first token is the prefill's."""
    return max(1, tokens - 1 - accepted)


def drafts_of_reply(body: Mapping[str, Any]) -> Drafts | None:
    """Reads the counts of drafts in a reply itself; None where it has none.

    Takes OpenAI's `usage` of our gateway, and SGLang's `meta_info` (of /generate) or `spec_tokens_details` (in
    `sglext`, asked for with `return_spec_tokens_details`).
    """
    details = (body.get("sglext") or {}).get("spec_tokens_details") or body.get("meta_info")
    if isinstance(details, list):
        details = details[0] if details else None
    if details and details.get("spec_verify_ct"):
        histogram = details.get("spec_correct_drafts_histogram") or []
        at = {i: float(sum(histogram[i:])) for i in range(1, len(histogram))}
        accepted = details.get("spec_num_correct_drafts", 0)
        return Drafts(
            float(details["spec_verify_ct"]), float(details.get("spec_num_proposed_drafts", 0)), float(accepted), at
        )
    usage = body.get("usage") or {}
    counts = usage.get("completion_tokens_details") or {}
    accepted, rejected = counts.get("accepted_prediction_tokens"), counts.get("rejected_prediction_tokens")
    if accepted is None or rejected is None or not accepted + rejected:
        return None
    steps = steps_of(int(usage.get("completion_tokens", 0)), accepted)
    return Drafts(float(steps), float(accepted + rejected), float(accepted))
