"""Any server with OpenAI's API: our gateway, vLLM, SGLang, TensorRT-LLM's server; replies as server-sent events."""

import asyncio
import json
from typing import Any

import aiohttp

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.serving.client import UnavailableError
from trtllm_dflash.sweep.load import CHECK_SECONDS, Arm, Reply, Request, Target
from trtllm_dflash.sweep.openai_errors import NO_HTTP, OTHER_FORM, error_text, refusal
from trtllm_dflash.sweep.runtime_metrics import Reading, drafts_of_reply, find_metrics, read_metrics, steps_of


class OpenAITarget(Target):
    """Streams chat completions. To be made and used on one event loop.

    What is not OpenAI's is sent only where it is asked for: `ignore_eos` and `top_k`, which vLLM, SGLang and
    TensorRT-LLM's server know, too, and `draft`, which is our gateway's alone. SGLang, known by its metrics, is
    asked to report its drafts in each reply: its metrics count none.

    Args:
        url: as http://HOST:PORT, with or without /v1.
        model: by default the only one that the server has.
        metrics: URL of its metrics; by default they are looked for beside the API.
        name: of the server, for errors.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        metrics: str | None = None,
        name: str | None = None,
    ) -> None:
        self._name = name or f"--url {url}"
        self._metrics, self._seen = metrics, Reading(None, None)
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # As many connections as there are clients, and no limit of a reply's time: a long queue is a finding, no fault.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=headers
        )

    async def close(self) -> None:
        await self._http.close()

    async def check(self, arms: tuple[Arm, ...], params: SamplingParams) -> None:
        try:
            async with self._http.get(
                f"{self._url}/models", timeout=aiohttp.ClientTimeout(total=CHECK_SECONDS)
            ) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            reason = _without_ssl(error) or f"nothing came in {CHECK_SECONDS:g} s"
            if isinstance(error, aiohttp.ClientResponseError):
                reason = NO_HTTP
            raise UnavailableError(f"{self._name}: no OpenAI API answers there: {reason}") from None
        if status == 404:  # Triton's HTTP, say, whose gRPC is what is swept
            said = f"{self._name}: no OpenAI API answers there: {refusal(status, body)}"
            raise UnavailableError(f"{said}; Triton is given by its gRPC, as HOST:PORT")
        if status != 200:
            raise UnavailableError(f"{self._name}: {refusal(status, body)}")
        try:
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        except OTHER_FORM:
            raise UnavailableError(f"{self._name}: /models is not OpenAI's list of models") from None
        if self._model is None and len(names) != 1:
            raise SettingsError(f"--model: say which; {self._name} has: {', '.join(names) or 'none'}")
        if self._model is not None and self._model not in names:
            raise SettingsError(f"--model {self._model}: {self._name} has: {', '.join(names) or 'none'}")
        self._model = self._model or names[0]
        seen = await asyncio.to_thread(find_metrics, self._metrics, self._url)
        self._seen = seen or self._seen

    async def look(self, arm: Arm) -> Reading | None:
        return await asyncio.to_thread(read_metrics, self._seen.url) if self._seen.server is not None else None

    async def send(self, request: Request) -> Reply:
        reply = Reply()
        try:
            async with self._http.post(f"{self._url}/chat/completions", json=self._body(request)) as answer:
                # Some servers and proxies send errors as 200; they are no stream of events.
                if answer.status != 200 or answer.content_type == "application/json":
                    reply.error = refusal(answer.status, await answer.read())
                    return reply
                await self._read_events(reply, answer)
        except (aiohttp.ClientError, OSError) as error:
            reply.error = f"{type(error).__name__}: {_without_ssl(error)}"
        except OTHER_FORM as error:
            reply.error = f"the reply is not of OpenAI's form: {type(error).__name__}: {error}"
        return reply

    async def _read_events(self, reply: Reply, answer: aiohttp.ClientResponse) -> None:
        loop = asyncio.get_running_loop()
        usage: dict[str, Any] | None = None
        details: dict[str, Any] = {}
        done = False
        async for line in answer.content:  # each event is one line of data and an empty line
            now = self._heard = loop.time()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            event = json.loads(data)
            if event.get("error"):
                reply.error = error_text(event)
                return
            usage = event.get("usage") or usage
            details = event.get("sglext") or details
            for choice in event.get("choices") or ():
                said = choice.get("delta") or {}
                # A reasoning model's thoughts are tokens like any other.
                text = said.get("content") or said.get("reasoning_content") or said.get("reasoning") or ""
                if text:
                    reply.times.append(now)
                    reply.text += said.get("content") or ""
        if not done:
            reply.error = "the stream ended before [DONE]"
        elif not reply.times:
            reply.error = "the reply has no text"
        elif usage is None or not int(usage.get("completion_tokens") or 0) > 0:
            reply.error = "the server does not count tokens (stream_options.include_usage)"
        else:
            _count(reply, usage)
            _count_details(reply, details)

    def _body(self, request: Request) -> dict[str, Any]:
        params = request.params
        body: dict[str, Any] = {
            "model": self._model,
            "messages": request.sample.messages(request.replies),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
        }
        if params.temperature > 0:
            body["top_p"] = params.top_p
            body |= {"top_k": params.top_k} if params.top_k else {}
        if params.ignore_eos:
            body["ignore_eos"] = True
        if request.arm != "served":
            body["draft"] = request.arm == "draft"
        if self._seen.server == "sglang":
            body["return_spec_tokens_details"] = True
        return body


def _without_ssl(error: Exception) -> str:
    """Writes what aiohttp says without the TLS settings, which it names where there is no TLS, too."""
    return str(error).replace(" ssl:default", "")


def _count(reply: Reply, usage: dict[str, Any]) -> None:
    reply.tokens = int(usage["completion_tokens"])
    prompt = usage.get("prompt_tokens")
    reply.prompt_tokens = None if prompt is None else int(prompt)
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    if accepted is not None and rejected is not None and accepted + rejected:
        reply.drafted, reply.accepted = accepted + rejected, accepted
        reply.steps = max(len(reply.times) - 1, steps_of(reply.tokens, accepted))  # a response is a step or several


def _count_details(reply: Reply, details: dict[str, Any]) -> None:
    drafts = drafts_of_reply({"sglext": details})
    if drafts is not None:
        reply.drafted, reply.accepted, reply.steps = map(round, (drafts.drafted, drafts.accepted, drafts.steps))
        reply.drafted_at, reply.accepted_at = drafts.by_position()
