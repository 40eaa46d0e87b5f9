"""`demo`: the same prompts with and without drafting, side by side, timed in one run."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trtllm_dflash.errors import EngineError
from trtllm_dflash.llm import LLM, Completion, Prompt, SamplingParams

PROMPTS = Path(__file__).parent / "pairs" / "tiny" / "prompts.jsonl"

_FRAMES_PER_SECOND = 20
_BAR_WIDTH = 40


@dataclass
class Arm:
    """One way of decoding, over a number of prompts. Rates count what the steps take, not what drawing takes."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    step_tokens: int = 0  # tokens that came out of decoding steps; a prefill gives the first of a reply
    accepted: Counter[int] = field(default_factory=Counter)

    def count(self, completion: Completion, seconds: float) -> None:
        """Adds a reply."""
        self.tokens += len(completion.token_ids)
        self.seconds += seconds
        self.steps += completion.steps
        self.step_tokens += len(completion.token_ids) - 1
        self.accepted.update(completion.accepted_per_step)

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens a decoding step."""
        return self.step_tokens / max(1, self.steps)


@dataclass
class Comparison:
    """Plain and drafted decoding of the same prompts."""

    prompts: int = 0
    identical: bool = True
    plain: Arm = field(default_factory=Arm)
    drafted: Arm = field(default_factory=Arm)

    @property
    def speedup(self) -> float:
        """Drafted over plain tokens a second."""
        return self.drafted.rate / self.plain.rate

    def as_json(self) -> dict[str, Any]:
        """The figures, rounded for reading."""
        return {
            "identical": self.identical,
            "acceptance_length": round(self.drafted.acceptance_length, 3),
            "speedup": round(self.speedup, 3),
            "plain_tokens_per_second": round(self.plain.rate, 1),
            "drafted_tokens_per_second": round(self.drafted.rate, 1),
            "prompts": self.prompts,
        }


@dataclass
class DemoResult(Comparison):
    """The whole demo, and each kind of prompt."""

    by_kind: dict[str, Comparison] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "by_kind": {kind: part.as_json() for kind, part in self.by_kind.items()}}


def read_prompts(per_kind: int, file: Path = PROMPTS) -> dict[str, list[str]]:
    """The first prompts of each kind from a file of JSON lines with "kind" and "prompt"."""
    kinds: dict[str, list[str]] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EngineError(f"{file}: the demo's prompts cannot be read: {error.strerror}") from error
    for line in lines:
        row = json.loads(line)
        kinds.setdefault(row["kind"], []).append(row["prompt"])
    return {kind: prompts[:per_kind] for kind, prompts in kinds.items()}


def run_demo(engine: Path, per_kind: int, max_tokens: int, device: str, show: bool) -> DemoResult:
    """Decodes prompts of every kind both ways, one at a time; `show` draws the streams and the tables."""
    console = Console(quiet=not show)
    result = DemoResult()
    params = SamplingParams(max_tokens=max_tokens)
    with LLM.load(engine, device) as llm:
        kinds = read_prompts(per_kind)
        _warm_up(llm, kinds)
        for kind, prompts in kinds.items():
            part = result.by_kind[kind] = Comparison()
            for i, text in enumerate(prompts):
                prompt: Prompt = [{"role": "user", "content": text}]
                # The first of each kind is drawn as it comes; the rest only count.
                canvas = _Canvas(console, kind, text) if show and i == 0 else None
                plain, plain_seconds = _timed(llm, prompt, params, False, canvas)
                drafted, drafted_seconds = _timed(llm, prompt, params, True, canvas)
                if canvas is not None:
                    canvas.close()
                for total in (part, result):
                    total.prompts += 1
                    total.identical &= plain.token_ids == drafted.token_ids
                    total.plain.count(plain, plain_seconds)
                    total.drafted.count(drafted, drafted_seconds)
    console.print(_table(result), _histogram(result.drafted.accepted))
    return result


def _warm_up(llm: LLM, kinds: dict[str, list[str]]) -> None:
    text = next(iter(kinds.values()))[0]
    for draft in (False, True):
        llm.generate([[{"role": "user", "content": text}]], SamplingParams(max_tokens=24), draft)


def _timed(
    llm: LLM, prompt: Prompt, params: SamplingParams, draft: bool, canvas: "_Canvas | None"
) -> tuple[Completion, float]:
    """A reply, and the seconds its steps took; what drawing takes is left out of them."""
    stream = llm.stream(prompt, params, draft)
    seconds = 0.0
    while True:
        begin = time.perf_counter()
        chunk = next(stream)
        seconds += time.perf_counter() - begin
        if canvas is not None:
            canvas.add(draft, chunk.text, len(chunk.token_ids), seconds, last=chunk.completion is not None)
        if chunk.completion is not None:
            return chunk.completion, seconds


class _Canvas:
    """Two panels, plain and drafted, that fill as the tokens come."""

    def __init__(self, console: Console, kind: str, prompt: str) -> None:
        self._texts = {False: "", True: ""}
        self._tokens = {False: 0, True: 0}
        self._seconds = {False: 0.0, True: 0.0}
        self._console = console
        self._drawn = 0.0
        console.print(f"\n[bold]{kind}[/bold]  ", Text(prompt, style="dim"), sep="")
        self._live = Live(console=console, auto_refresh=False)
        if console.is_terminal:
            self._live.start()

    def add(self, draft: bool, text: str, tokens: int, seconds: float, last: bool) -> None:
        self._texts[draft] += text
        self._tokens[draft] += tokens
        self._seconds[draft] = seconds
        now = time.perf_counter()
        if self._console.is_terminal and (last or now - self._drawn > 1 / _FRAMES_PER_SECOND):
            self._live.update(self._panels(), refresh=True)
            self._drawn = now

    def close(self) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._console.print(self._panels())

    def _panels(self) -> Columns:
        width = max(30, self._console.width // 2 - 1)
        return Columns([self._panel(False, width), self._panel(True, width)], padding=(0, 1))

    def _panel(self, draft: bool, width: int) -> Panel:
        name = "drafted" if draft else "plain"
        seconds = self._seconds[draft]
        rate = f"{self._tokens[draft] / seconds:.0f} tokens/s, {seconds:.2f} s" if seconds else "waiting"
        return Panel(Text(self._texts[draft]), title=name, subtitle=rate, width=width)


def _table(result: DemoResult) -> Table:
    headers = "kind", "prompts", "acceptance\nlength", "plain\ntokens/s", "drafted\ntokens/s", "speed-up", "identical"
    table = Table(*headers, pad_edge=False)  # fits in 80 columns
    for name, part in [*result.by_kind.items(), ("all", result)]:
        table.add_row(
            name,
            str(part.prompts),
            f"{part.drafted.acceptance_length:.2f}",
            f"{part.plain.rate:.0f}",
            f"{part.drafted.rate:.0f}",
            f"{part.speedup:.2f}x",
            "yes" if part.identical else "NO",
            end_section=name == list(result.by_kind)[-1],
        )
    return table


def _histogram(accepted: Counter[int]) -> Group:
    """Share of the steps by how many drafts each had accepted."""
    total = sum(accepted.values())
    lines = [Text("\naccepted drafts a step", style="bold")]
    for count in range(max(accepted, default=0) + 1):
        share = accepted[count] / max(1, total)
        lines.append(Text(f"{count:>4}  {'#' * round(share * _BAR_WIDTH):<{_BAR_WIDTH}} {share:6.1%}"))
    return Group(*lines)
