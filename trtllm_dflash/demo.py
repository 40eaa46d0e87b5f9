"""`demo`: the same prompts with and without drafting, side by side, from a Triton server, timed in one run."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import EngineError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.trees import check_trees
from trtllm_dflash.text.tokenizer import TextCodec

if TYPE_CHECKING:
    from trtllm_dflash.serving.client import TritonClient
    from trtllm_dflash.session.kernels import Kernels


_FRAMES_PER_SECOND = 20
_BAR_WIDTH = 40


@dataclass
class Reply:
    """A reply, as far as the client has received it.

    Attributes:
        seconds: from sending the request to the last token received.
        accepted: drafts that became part of the reply, by decoding step.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)


@dataclass
class Arm:
    """Totals of one way of decoding, plain or drafted, over a number of prompts."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    step_tokens: int = 0  # tokens that came out of decoding steps; a prefill gives the first of a reply
    accepted: Counter[int] = field(default_factory=Counter)

    def count(self, reply: Reply) -> None:
        """Adds a reply to the totals."""
        self.tokens += len(reply.token_ids)
        self.seconds += reply.seconds
        self.steps += len(reply.accepted)
        self.step_tokens += len(reply.token_ids) - 1
        self.accepted.update(reply.accepted)

    @property
    def rate(self) -> float:
        """Tokens a second, from sending the request to the last token."""
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
        """Ratio of drafted to plain tokens a second."""
        return self.drafted.rate / self.plain.rate

    def as_json(self) -> dict[str, Any]:
        """Makes the JSON of the figures, rounded for reading."""
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
    """Figures of the whole demo, and of each kind of prompt."""

    by_kind: dict[str, Comparison] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "by_kind": {kind: part.as_json() for kind, part in self.by_kind.items()}}


def run_demo(
    engine: Path,
    per_kind: int,
    max_tokens: int,
    device: str,
    kernels: "Kernels",
    show: bool,
    draft_tree: str = "auto",
) -> DemoResult:
    """Serves the engine with Triton, and decodes prompts of every kind both ways; `show` draws streams and tables.

    For the figures each reply is timed alone. Before that, the first prompt of each kind is shown: two clients at once,
    in one batch.
    """
    try:
        from trtllm_dflash.serving.endpoints import Endpoints
        from trtllm_dflash.serving.repository import DeploySettings
        from trtllm_dflash.serving.serve import serving
    except ImportError as error:
        raise EngineError(f"the demo needs {error.name}: {pip_install('serving')}") from None
    console = Console(quiet=not show)
    codec = TextCodec.load(engine, read_config(engine).chat_arguments)
    if codec is None:
        raise EngineError(f"{engine}: the demo needs a tokenizer, and this engine has none")
    check_trees(read_config(engine), draft_tree, pick_device(device).type != "cpu")  # before a server is started
    # The whole block always: here drafting is compared with not drafting, and there is one client at a time.
    length = read_config(engine).block_size - 1
    settings = DeploySettings.model_validate(
        {"device": device, "kernels": kernels, "draft_length": length, "draft_tree": draft_tree}
    )
    anywhere = Endpoints(http_port=0, grpc_port=0, metrics_port=0)
    with serving(engine, settings, anywhere) as running:
        console.print(f"Triton Inference Server is ready: gRPC at {running.endpoints.grpc}")
        console.print(*running.server.said_at_load, sep="\n")
        result = asyncio.run(_compare(running.endpoints.grpc, codec, per_kind, max_tokens, console))
    console.print(_table(result), _histogram(result.drafted.accepted))
    return result


async def _compare(url: str, codec: TextCodec, per_kind: int, max_tokens: int, console: Console) -> DemoResult:
    from trtllm_dflash.serving.client import TritonClient

    result = DemoResult()
    kinds = read_prompts(per_kind)
    client = TritonClient(url)
    try:
        ask = _Asker(client, codec, max_tokens)
        for draft in (False, True):
            await ask(next(iter(kinds.values()))[0], draft)  # to warm up
        for kind, prompts in kinds.items():
            part = result.by_kind[kind] = Comparison()
            if not console.quiet:
                await _show(ask, kind, prompts[0], console)
            for text in prompts:
                await ask(text, draft=True)  # so that both find the prompt's K/V rows: the second would anyway
                plain, drafted = await ask(text, draft=False), await ask(text, draft=True)
                for total in (part, result):
                    total.prompts += 1
                    total.identical &= plain.token_ids == drafted.token_ids and plain.text == drafted.text
                    total.plain.count(plain)
                    total.drafted.count(drafted)
    finally:
        await client.close()
    return result


async def _show(ask: "_Asker", kind: str, prompt: str, console: Console) -> None:
    """Draws the two clients' streams side by side, as they arrive."""
    canvas = _Canvas(console, kind, prompt)
    try:
        await asyncio.gather(*(ask(prompt, draft, canvas) for draft in (False, True)))
    finally:
        canvas.close()


class _Asker:
    """A client that requests replies from the server."""

    def __init__(self, client: "TritonClient", codec: TextCodec, max_tokens: int) -> None:
        self._client = client
        self._codec = codec
        self._params = SamplingParams(max_tokens=max_tokens)

    async def __call__(self, prompt: str, draft: bool, canvas: "_Canvas | None" = None) -> Reply:
        from trtllm_dflash.serving.client import TokenRequest

        ids = self._codec.encode_chat([{"role": "user", "content": prompt}])
        reply = Reply()
        begin = time.perf_counter()
        async for piece in self._client.stream(TokenRequest(ids, self._params, draft)):
            reply.accepted += piece.accepted_per_step  # with the last: a piece may be of several steps
            reply.text += piece.text
            reply.token_ids += piece.token_ids
            reply.seconds = time.perf_counter() - begin
            if canvas is not None:
                canvas.draw(draft, reply, last=bool(piece.finish_reason))
        return reply


class _Canvas:
    """Two panels, plain and drafted, that fill as the tokens arrive."""

    def __init__(self, console: Console, kind: str, prompt: str) -> None:
        self._replies = {False: Reply(), True: Reply()}
        self._console = console
        self._drawn = 0.0
        console.print(f"\n[bold]{kind}[/bold]  ", Text(prompt, style="dim"), sep="")
        self._live = Live(console=console, auto_refresh=False)
        if console.is_terminal:
            self._live.start()

    def draw(self, draft: bool, reply: Reply, last: bool) -> None:
        self._replies[draft] = reply
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
        reply = self._replies[draft]
        steps = f" in {len(reply.accepted)} steps" if reply.accepted else ""
        said = f"{len(reply.token_ids)} tokens{steps}, {reply.seconds:.2f} s"
        title = "drafted" if draft else "plain"
        return Panel(Text(reply.text), title=title, subtitle=said if reply.token_ids else "waiting", width=width)


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
    """Draws the share of steps by their number of accepted drafts."""
    total = sum(accepted.values())
    lines = [Text("\naccepted drafts a step", style="bold")]
    for count in range(max(accepted, default=0) + 1):
        share = accepted[count] / max(1, total)
        lines.append(Text(f"{count:>4}  {'#' * round(share * _BAR_WIDTH):<{_BAR_WIDTH}} {share:6.1%}"))
    return Group(*lines)
