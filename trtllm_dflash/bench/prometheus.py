"""Drafts by position from a server's Prometheus metrics: ours, or vLLM's."""

import re
import urllib.request
from dataclasses import dataclass, field

from trtllm_dflash.errors import EngineError

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([-+.\dA-Za-z]+)")
_POSITION = re.compile(r'position="(\d+)"')

#: Ours are published about once a second.
SETTLE_SECONDS = 1.5


@dataclass(frozen=True)
class DraftCounts:
    """Counters since the server began: steps by the position of a draft, from 1, verified there and accepted there."""

    drafted_at: dict[int, float] = field(default_factory=dict)
    accepted_at: dict[int, float] = field(default_factory=dict)

    def since(self, before: "DraftCounts") -> tuple[list[int], list[int]]:
        """What was counted in between, by position."""
        ends = max((*self.drafted_at, *self.accepted_at), default=0) + 1
        drafted = [round(self.drafted_at.get(i, 0) - before.drafted_at.get(i, 0)) for i in range(1, ends)]
        accepted = [round(self.accepted_at.get(i, 0) - before.accepted_at.get(i, 0)) for i in range(1, ends)]
        return drafted, accepted


def read_counts(url: str) -> DraftCounts:
    """Reads a metrics endpoint; it may take a second.

    Raises:
        EngineError: it cannot be read, or has no such counters.
    """
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        raise EngineError(f"--metrics-url {url}: cannot be read: {error}") from None
    return parse_counts(text, url)


def parse_counts(text: str, url: str = "") -> DraftCounts:
    """The counters in a page of metrics."""
    counts = DraftCounts()
    drafts, known = 0.0, False
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match[1].removesuffix("_total"), match[2] or "", float(match[3])
        known = known or name.startswith(("dflash_", "vllm:spec_decode"))
        position = _POSITION.search(labels)
        if name == "vllm:spec_decode_num_drafts":
            drafts += value
        elif position is not None and name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            _add(counts.accepted_at, int(position[1]) + 1, value)  # vLLM counts from 0
        elif position is not None and name == "dflash_accepted_tokens":
            _add(counts.accepted_at, int(position[1]), value)
        elif position is not None and name == "dflash_drafted_tokens":
            _add(counts.drafted_at, int(position[1]), value)
    if drafts:  # vLLM verifies its whole block in each
        counts.drafted_at.update(dict.fromkeys(counts.accepted_at, drafts))
    if not known:
        raise EngineError(f"--metrics-url {url}: has neither dflash_ nor vllm:spec_decode counters; leave it out")
    return counts


def _add(counts: dict[int, float], position: int, value: float) -> None:
    counts[position] = counts.get(position, 0.0) + value
