"""Several servers under the same load by turns: each is an arm."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from trtllm_dflash.errors import DFlashError, EngineError
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.sweep.load import Arm, Reply, Request, Target
from trtllm_dflash.sweep.runtime_metrics import Reading


class ServerArms(Target):
    """Sends each request to the server of its arm, plain or drafting as that server is set up.

    Args:
        servers: by arm.
    """

    def __init__(self, servers: Mapping[Arm, Target]) -> None:
        self._servers = servers

    @property
    def heard(self) -> float:
        return max(server.heard for server in self._servers.values())

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def check(self, arms: tuple[Arm, ...], params: SamplingParams) -> None:
        for arm in arms:
            with _named(arm):
                await self._servers[arm].check(("served",), params)

    async def look(self, arm: Arm) -> Reading | None:
        with _named(arm):
            return await self._servers[arm].look("served")

    async def send(self, request: Request) -> Reply:
        return await self._servers[request.arm].send(replace(request, arm="served"))


@contextmanager
def _named(arm: Arm) -> Iterator[None]:
    """Adds the arm's name to errors."""
    try:
        yield
    except DFlashError as error:
        text = str(error)
        raise EngineError(text if f" {arm}=" in text else f"--compare {arm}: {text}") from None
