"""`compare`: the same prompts, greedy, to two servers of OpenAI's API. Would clients notice the swap?

A swap is safe if every text is the same, or if each first difference is a near-tie: both servers that offer
log-probabilities say that the two tokens are at most `near_tie` apart there. A difference for which nobody offers
log-probabilities is no near-tie. What follows a first difference is another reply, and is not compared. Where both
servers are ours and compute alike, and so that a token depends on nothing else in the batch, there are no near-ties.
"""

import http.client
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.pairs.prompts import PROMPTS
from trtllm_dflash.sweep.openai_errors import NO_HTTP, OTHER_FORM, error_text, refusal
from trtllm_dflash.sweep.runtime_metrics import SETTLE_SECONDS, Drafts, Reading, drafts_of_reply, read_metrics

#: Log-probabilities (natural) that two tokens may be apart where two servers chose differently: two steps of BF16 for a
#: logit between 16 and 32, which is what a pass of one row and one of 16 rows may differ by.
NEAR_TIE = 0.25

_TOP = 5  # alternatives asked for at each token


class CompareSettings(BaseModel):
    """Settings of `compare`; each field but the bodies is a flag."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    a: str
    b: str
    prompts: tuple[str, ...]
    max_tokens: PositiveInt = 128
    near_tie: Annotated[float, Field(ge=0)] = NEAR_TIE
    chat: bool = True
    model_a: str | None = None
    model_b: str | None = None
    body_a: dict[str, Any] = {}  # further fields of A's requests
    body_b: dict[str, Any] = {}
    metrics_a: str | None = None
    metrics_b: str | None = None
    api_key: str | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6)] = 300.0  # seconds for a reply


@dataclass(frozen=True)
class Token:
    """A token of a reply, as reported by the server; `alternatives`: log-probabilities by text, its own among them."""

    text: str
    logprob: float
    alternatives: Mapping[str, float]

    def lead_over(self, other: str) -> float:
        """Margin of log-probability over another token; a lower bound where the server does not list the other."""
        listed = {self.text: self.logprob, **self.alternatives}
        return self.logprob - listed.get(other, min(listed.values()))

    def lists(self, other: str) -> bool:
        """Whether the server gives the other token's log-probability."""
        return other in self.alternatives or other == self.text


@dataclass(frozen=True)
class Reply:
    """A greedy reply.

    Attributes:
        text: thoughts of a reasoning model first, as they come.
        tokens: with log-probabilities, where the server offers them.
        first, seconds: until the first text, and until the end.
    """

    text: str
    finish_reason: str
    tokens: tuple[Token, ...]
    completion_tokens: int
    first: float
    seconds: float
    drafts: Drafts | None


@dataclass(frozen=True)
class Difference:
    """The first difference between two replies.

    Attributes:
        position: of the first character that differs.
        token: the number of tokens before it, where they are known.
        a, b: the text of each there.
        margins: log-probabilities by which each server that offers them prefers its own token, by "a" and "b".
        near_tie: whether all of these, of which there are some, are small enough.
    """

    position: int
    token: int | None
    a: str
    b: str
    margins: Mapping[str, float]
    near_tie: bool


@dataclass
class Side:
    """One of the two servers, its replies, and its acceptance.

    Attributes:
        acceptance: of its drafts during the comparison, from its replies or its metrics.
        mean_length: an acceptance length that it averages itself, where it counts nothing.
    """

    url: str
    model: str
    offers_logprobs: bool
    replies: list[Reply] = field(default_factory=list)
    acceptance: Drafts | None = None
    mean_length: float | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a step; None where nothing was drafted, or the server does not tell."""
        return self.acceptance.length if self.acceptance is not None else self.mean_length

    def as_json(self) -> dict[str, Any]:
        """This server's part of the report."""
        tokens = sum(reply.completion_tokens for reply in self.replies)
        after_first = [(r.completion_tokens - 1, r.seconds - r.first) for r in self.replies if r.completion_tokens > 1]
        rate = sum(n for n, _ in after_first) / (sum(t for _, t in after_first) or 1) if after_first else None
        drafts = self.acceptance
        return {
            "url": self.url,
            "model": self.model,
            "logprobs": self.offers_logprobs,
            "tokens": tokens,
            "acceptance_length": _rounded(self.acceptance_length),
            "acceptance_rate": _rounded(drafts.rate if drafts is not None else None),
            "time_to_first_text_s": _spread([reply.first for reply in self.replies]),
            "reply_s": _spread([reply.seconds for reply in self.replies]),
            "tokens_per_second": _rounded(rate),
        }


@dataclass(frozen=True)
class Comparison:
    """Both servers' replies, and each prompt's difference, or None."""

    a: Side
    b: Side
    prompts: tuple[str, ...]
    differences: tuple[Difference | None, ...]
    near_tie: float | None  # None: no difference is allowed

    @property
    def safe(self) -> bool:
        """Whether every text is the same, or each first difference a near-tie."""
        return all(difference is None or difference.near_tie for difference in self.differences)

    @property
    def equal(self) -> int:
        """Number of prompts whose texts are the same."""
        return sum(difference is None for difference in self.differences)

    def as_json(self) -> dict[str, Any]:
        """Makes the report that `--json` writes."""
        return {
            "safe": self.safe,
            "prompts": len(self.prompts),
            "equal": self.equal,
            "near_ties": sum(difference is not None and difference.near_tie for difference in self.differences),
            "near_tie": self.near_tie,
            "a": self.a.as_json(),
            "b": self.b.as_json(),
            "differences": [
                {
                    "prompt": prompt,
                    "position": difference.position,
                    "token": difference.token,
                    "a": difference.a,
                    "b": difference.b,
                    "margins": {side: _rounded(margin) for side, margin in difference.margins.items()},
                    "near_tie": difference.near_tie,
                }
                for prompt, difference in zip(self.prompts, self.differences, strict=True)
                if difference is not None
            ],
        }


def shipped_prompts(number: int) -> tuple[str, ...]:
    """Takes prompts that come with the package, of all kinds by turns."""
    kinds: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        kinds.setdefault(entry["kind"], []).append(entry["prompt"])
    turns = [prompt for prompts in zip(*kinds.values(), strict=False) for prompt in prompts]
    return tuple(turns[:number])


def compare(settings: CompareSettings) -> Comparison:
    """Sends every prompt to both servers, one at a time, and compares the replies.

    Raises:
        EngineError: a server does not answer, or refuses a request.
        SettingsError: a URL or a model's name is wrong.
    """
    clients = (
        _Client("a", settings.a, settings.model_a, settings.body_a, settings.metrics_a, settings),
        _Client("b", settings.b, settings.model_b, settings.body_b, settings.metrics_b, settings),
    )
    for client in clients:
        client.look_before()
    for number, prompt in enumerate(settings.prompts):
        for client in clients if number % 2 == 0 else clients[::-1]:  # neither is always the first
            client.ask(prompt)
    is_one_server = bool(clients[0].before.url) and clients[0].before.url == clients[1].before.url
    for client in clients:
        client.look_after(counts_alone=not is_one_server)
    a, b = (client.side for client in clients)
    are_exact = clients[0].before.is_exact_with(clients[1].before)
    near_tie = None if are_exact else settings.near_tie
    differences = tuple(find_difference(*pair, near_tie) for pair in zip(a.replies, b.replies, strict=True))
    return Comparison(a, b, settings.prompts, differences, near_tie)


def find_difference(a: Reply, b: Reply, near_tie: float | None) -> Difference | None:
    """Finds where two replies first differ, and whether it is a near-tie; None if they do not.

    Args:
        near_tie: log-probabilities that tied tokens may be apart; None: there are no ties.
    """
    if a.text == b.text and a.finish_reason == b.finish_reason:
        return None
    position = next((i for i, (x, y) in enumerate(zip(a.text, b.text, strict=False)) if x != y), None)
    if position is None:
        position = min(len(a.text), len(b.text))
    index, rivals = _rivals(a, b, position)
    margins = {side: token.lead_over(other) for side, (token, other) in rivals.items()}
    listed = near_tie is not None and all(token.lists(other) for token, other in rivals.values())
    near = listed and bool(margins) and all(abs(margin) <= (near_tie or 0.0) for margin in margins.values())
    return Difference(position, index, _excerpt(a, position), _excerpt(b, position), margins, near)


def _rivals(a: Reply, b: Reply, position: int) -> tuple[int | None, dict[str, tuple[Token, str]]]:
    """Finds the first tokens that differ: their number, and for each side with log-probabilities its token and the
    other's text. Compares tokens where both sides report them, since special tokens are not in the text.
    """
    if a.tokens and b.tokens:
        pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
        found = next(((i, x, y) for i, (x, y) in pairs if x.text != y.text), None)
        if found is None:  # one is the other's beginning
            return min(len(a.tokens), len(b.tokens)), {}
        index, x, y = found
        return index, {"a": (x, y.text), "b": (y, x.text)}
    for side, mine, other in (("a", a, b), ("b", b, a)):
        place = _token_at(mine, position)
        if place is not None:
            index, start = place
            rival = _alternative(mine.tokens[index], other.text[start:])
            return index, {} if rival is None else {side: (mine.tokens[index], rival)}
    return None, {}


def _token_at(reply: Reply, position: int) -> tuple[int, int] | None:
    """Finds the token that holds a character: its number, and where it begins; None where tokens are not known."""
    start = 0
    for index, token in enumerate(reply.tokens):
        if start + len(token.text) > position:
            return index, start
        start += len(token.text)
    return None


def _alternative(token: Token, text: str) -> str | None:
    """Finds the longest alternative that the other text begins with."""
    others = token.alternatives.keys() - {token.text}
    fitting = [other for other in others if other and text.startswith(other)]
    return max(fitting, key=len, default=None)


def _excerpt(reply: Reply, position: int) -> str:
    return reply.text[position : position + 40] or f"[end: {reply.finish_reason}]"


# -- one server ------------------------------------------------------------------------------------------------------


class _Client:
    """A client of one server; collects its replies and metrics."""

    def __init__(
        self,
        name: str,
        url: str,
        model: str | None,
        body: dict[str, Any],
        metrics: str | None,
        settings: CompareSettings,
    ) -> None:
        if "@" in url:
            raise SettingsError(f"--{name}: give no user and password in an address; a key goes into the environment")
        if not _is_address(url):
            raise SettingsError(f"--{name} {url}: write http://HOST:PORT, of a server with OpenAI's API")
        self._flag = f"--{name} {url}"
        self._base = url.rstrip("/").removesuffix("/v1")
        self._body = body
        self._settings = settings
        self._metrics = metrics
        self.before = Reading(None, None)
        self.side = Side(url, model or self._only_model(name), offers_logprobs=True)

    def look_before(self) -> None:
        """Reads the server's metrics before the comparison, if it has any."""
        self.before = self._read_metrics()
        if self.before.server == "sglang":
            self._body = {"return_spec_tokens_details": True, **self._body}

    def ask(self, prompt: str) -> None:
        """Sends a prompt, and appends the reply to the side's."""
        body = self._request(prompt)
        begun = time.monotonic()
        try:
            reply = self._stream(body, begun)
        except _Refused as refused:
            # OpenAI's servers need not offer them, and say so. Once is enough to know.
            if not (self.side.offers_logprobs and not self.side.replies and "logprobs" in str(refused)):
                raise EngineError(f"{self._flag}: refuses a request: {refused}") from None
            self.side.offers_logprobs = False
            self.ask(prompt)
            return
        except OTHER_FORM as error:
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(f"{self._flag}: the reply is not of OpenAI's form: {reason}") from None
        if not self.side.replies and not reply.tokens:
            self.side.offers_logprobs = False  # left out, without a word
        self.side.replies.append(reply)

    def look_after(self, counts_alone: bool) -> None:
        """Counts the drafts: from the replies, else from the metrics, where these are of this side alone."""
        told = [reply.drafts for reply in self.side.replies if reply.drafts is not None]
        if told:
            self.side.acceptance = sum(told, Drafts())
            return
        if self.before.server is None or not counts_alone:
            return
        time.sleep(SETTLE_SECONDS)
        after = self._read_metrics()
        counted = after.since(self.before)
        self.side.acceptance = counted if counted is not None and counted.steps else None
        self.side.mean_length = after.mean_length

    def _request(self, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.side.model,
            "max_tokens": self._settings.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._settings.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.side.offers_logprobs:
            body |= {"logprobs": True, "top_logprobs": _TOP} if self._settings.chat else {"logprobs": _TOP}
        return {**body, **self._body}

    def _stream(self, body: dict[str, Any], begun: float) -> Reply:
        text, reason, first = "", "", None
        tokens: list[Token] = []
        usage: dict[str, Any] = {}
        last: dict[str, Any] = {}
        path = "/v1/chat/completions" if self._settings.chat else "/v1/completions"
        for event in self._events(path, body):
            if event.get("error"):
                raise _Refused(error_text(event))
            usage = event.get("usage") or usage
            last = {**last, **{name: event[name] for name in ("sglext", "usage") if event.get(name)}}
            for choice in event.get("choices") or ():
                said = choice.get("delta") or {}
                piece = said.get("reasoning_content") or said.get("reasoning") or ""
                piece += said.get("content") or choice.get("text") or ""
                if piece and first is None:
                    first = time.monotonic() - begun
                text += piece
                tokens += _tokens(choice.get("logprobs"))
                reason = choice.get("finish_reason") or reason
        seconds = time.monotonic() - begun
        if not reason:
            raise EngineError(f"{self._flag}: the stream ended before the reply did")
        count = int(usage.get("completion_tokens") or len(tokens))
        return Reply(text, reason, tuple(tokens), count, first or seconds, seconds, drafts_of_reply(last))

    def _only_model(self, name: str) -> str:
        answer = b"".join(self._call("GET", "/v1/models", None))
        try:
            names = [str(model["id"]) for model in json.loads(answer)["data"]]
        except OTHER_FORM:
            raise EngineError(f"{self._flag}: /v1/models is not OpenAI's list of models") from None
        if len(names) != 1:
            raise SettingsError(f"--model-{name}: say which; the server has: {', '.join(names) or 'none'}")
        return names[0]

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for line in self._call("POST", path, json.dumps(body)):
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:])

    def _call(self, method: str, path: str, body: str | None) -> Iterator[bytes]:
        """Sends a request; yields the response's lines as they arrive."""
        parts = urlsplit(self._base)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self._settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        connection = kind(parts.netloc, timeout=self._settings.timeout)
        try:
            connection.request(method, parts.path + path, body, headers)
            response = connection.getresponse()
            # Some servers and proxies send errors as 200; they are no stream of events.
            document = method == "POST" and response.headers.get_content_type() == "application/json"
            if response.status != 200 or document:
                raise _Refused(refusal(response.status, response.read()))
            yield from response
        except _Refused as refused:
            if method == "GET":
                raise EngineError(f"{self._flag}: {refused}") from None
            raise
        except (OSError, http.client.HTTPException) as error:
            # One of them is an OSError, too: a connection that ended before any answer.
            is_http = isinstance(error, OSError) or not isinstance(error, http.client.BadStatusLine)
            reason = (str(error) or type(error).__name__) if is_http else NO_HTTP
            raise EngineError(f"{self._flag}: no OpenAI API answers there: {reason}") from None
        finally:
            connection.close()

    def _read_metrics(self) -> Reading:
        """Reads the metrics page; without a URL, beside the API, where TensorRT-LLM, vLLM and SGLang have it."""
        try:
            return read_metrics(self._metrics or f"{self._base}/metrics")
        except EngineError:
            if self._metrics is not None:
                raise
            return Reading(None, None)


class _Refused(Exception):
    """The server refused a request."""


def _tokens(logprobs: Any) -> list[Token]:
    """Reads tokens of a chat (`content`) or of a completion (`tokens`, `token_logprobs`, `top_logprobs`)."""
    if not isinstance(logprobs, dict):
        return []
    if logprobs.get("content") is not None:
        return [
            Token(
                entry["token"],
                float(entry["logprob"]),
                {other["token"]: float(other["logprob"]) for other in entry.get("top_logprobs") or ()},
            )
            for entry in logprobs["content"]
        ]
    rows = zip(
        logprobs.get("tokens") or (),
        logprobs.get("token_logprobs") or (),
        logprobs.get("top_logprobs") or (),
        strict=False,
    )
    return [Token(text, float(logprob or 0.0), top or {}) for text, logprob, top in rows]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"median": _rounded(statistics.median(values)), "longest": _rounded(max(values))}


def _is_address(url: str) -> bool:
    """Whether that is the address of a server that HTTP reaches."""
    try:
        parts = urlsplit(url)
        return url.isascii() and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none, and of half an IPv6 address
        return False
