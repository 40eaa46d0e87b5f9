"""An engine in this process, behind the service that serves it elsewhere: no server, no network, the same scheduler."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from trtllm_dflash.errors import RequestError, SettingsError
from trtllm_dflash.llm import LLM, Prompt
from trtllm_dflash.runtime.request import SamplingParams, Update
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.sweep.load import Arm, Reply, Request, Target
from trtllm_dflash.sweep.runtime_metrics import Drafts, Reading


class LocalTarget(Target):
    """Submits requests to a service. The event loop is woken once for each reply, at its end, and holds up no step."""

    def __init__(self, llm: LLM, service: Service) -> None:
        self._llm, self._service = llm, service

    async def check(self, arms: tuple[Arm, ...], params: SamplingParams) -> None:
        if "draft" in arms and self._llm.config.drafter is None:
            raise SettingsError("--compare: this engine has no drafter")

    async def look(self, arm: Arm) -> Reading | None:
        # All else is in the replies.
        return Reading("trtllm-dflash", Drafts(by_rank=dict(self._service.statistics().ranks)), is_live=True)

    async def send(self, request: Request) -> Reply:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        longest = self._llm.config.block_size - 1
        reply = _Growing(longest, lambda: loop.call_soon_threadsafe(ended.set))
        sample = request.sample
        prompt: Prompt = list(sample.token_ids) or sample.messages(request.replies)
        try:
            ticket = self._service.submit(prompt, request.params, reply.take, draft=request.arm != "plain")
        except RequestError as error:
            return Reply(error=str(error))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self._service.cancel(ticket)
            raise
        return reply.reply


class _Growing:
    """A reply, filled in on the service's thread.

    Args:
        longest: drafts of the longest chain; more are a tree's, which count by depth.
    """

    def __init__(self, longest: int, on_end: Callable[[], object]) -> None:
        self.reply = Reply()
        self._longest, self._on_end = longest, on_end

    def take(self, update: Update) -> None:
        """Adds an update to the reply."""
        reply, now = self.reply, time.monotonic()  # an event loop's clock
        if update.error is not None:
            reply.error = str(update.error)
        else:
            self._count(update)
            reply.times.append(now)
        if update.completion is not None or update.error is not None:
            with suppress(RuntimeError):  # nobody waits any more: the loop is closed
                self._on_end()

    def _count(self, update: Update) -> None:
        reply = self.reply
        if reply.times:
            drafted = update.drafted_tokens - (reply.drafted or 0)
            reply.count_step(min(drafted, self._longest), update.accepted_tokens - (reply.accepted or 0))
        reply.drafted, reply.accepted = update.drafted_tokens, update.accepted_tokens
        reply.tokens += len(update.token_ids)
        reply.tokens_by_response.append(len(update.token_ids))
        reply.text += update.text
        if update.completion is not None:
            reply.steps = update.completion.steps
            reply.prompt_tokens = update.completion.prompt_tokens
