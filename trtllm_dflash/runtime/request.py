"""Sampling parameters of a request, the sequence that it becomes, and its updates and completion."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

from trtllm_dflash.errors import DFlashError, ReplyError
from trtllm_dflash.runtime.clock import now_ns
from trtllm_dflash.runtime.structured import Structured
from trtllm_dflash.text.stream import TextStream

if TYPE_CHECKING:
    from trtllm_dflash.text.grammar import Grammar

FinishReason = Literal["stop", "length"]

#: A request without a priority of its own; 1 is the most urgent, as in Triton.
DEFAULT_PRIORITY = 100

#: Of repetition penalties: what is divided by it stays finite. Exact in FP32, as Triton has it.
LEAST_REPETITION = 2.0**-7

# Types of a reply's parameters, in every interface.
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
Temperature = Annotated[FiniteFloat, Field(ge=0, le=1e4)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
TopP = Annotated[FiniteFloat, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
StopText = Annotated[str, Field(min_length=1)]
Logprobs = Annotated[int, Field(ge=0, le=20)]
Penalty = Annotated[FiniteFloat, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[FiniteFloat, Field(ge=LEAST_REPETITION, le=10)]
LogitBias = Annotated[Mapping[NonNegativeInt, Annotated[FiniteFloat, Field(ge=-100, le=100)]], Field(max_length=1024)]
MinP = Annotated[FiniteFloat, Field(ge=0, le=1)]
BadWord = Annotated[str, Field(min_length=1)]


class SamplingParams(BaseModel):
    """Sampling parameters of one reply, and the rules that end it.

    Attributes:
        max_tokens: most tokens to generate; the engine's max_seq_len bounds prompt and reply together.
        temperature: 0 is greedy.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that reach this probability together; 1 keeps all.
        seed: a sampled token's random number depends on it and on the token's absolute position alone.
        stop: texts that end the reply; they are not part of it.
        stop_token_ids: tokens that end the reply, besides the model's own.
        stop_token_sequences: runs of tokens that end the reply, and are part of it.
        ignore_eos: go on past the model's own end token.
        logprobs: log-probabilities of the chosen tokens, and of so many most likely ones at each; None: none.
        prompt_logprobs: likewise of the prompt's tokens but the first.
        presence_penalty: taken from the logit of each token that the reply has.
        frequency_penalty: taken as often as the reply has the token.
        repetition_penalty: divides the logit of each token that prompt or reply has; a negative one is multiplied.
        logit_bias: added to logits, by token.
        min_p: keep tokens that are at least so likely, beside the most likely one.
        min_tokens: no end token is chosen before the reply has so many.
        bad_words: texts that the reply is kept from.
        bad_token_sequences: runs of tokens that the reply is kept from.
        structured: the form that the reply is held to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    seed: Seed = 0
    stop: tuple[StopText, ...] = ()
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    stop_token_sequences: tuple[Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)], ...] = ()
    ignore_eos: bool = False
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    min_p: MinP = 0.0
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    bad_words: tuple[BadWord, ...] = ()
    bad_token_sequences: tuple[Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)], ...] = ()
    structured: Structured | None = None

    @property
    def penalizes(self) -> bool:
        """Whether logits change before a token is chosen."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1)
        return not neutral or bool(self.logit_bias or self.min_tokens or self.bad_words or self.bad_token_sequences)

    def __hash__(self) -> int:  # pydantic's would have every field be hashable
        return hash((self.max_tokens, self.temperature, self.seed, self.stop))


@dataclass
class Times:
    """Times of a request's events: nanoseconds since the epoch, 0 for those that have not happened."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one token, of the model's own distribution: before temperature, penalties and filters.

    Attributes:
        logprob: of the token.
        top_logprobs: the most likely tokens and theirs, the most likely first; as many as were asked for.
    """

    logprob: float
    top_logprobs: list[tuple[int, float]]


@dataclass(frozen=True)
class Completion:
    """One finished reply.

    Attributes:
        text: the reply; None where the engine has no tokenizer.
        token_ids: the reply's tokens, the one that ended it included.
        prompt_tokens: length of the prompt.
        reused_tokens: of those, the ones whose K/V rows an earlier request had left in the caches.
        pages: of the caches that it had at its end.
        shared_pages: of those, the ones that it began with, full of an earlier request's rows.
        steps: decoding steps, the prefill not counted.
        accepted_per_step: drafts of each that became part of the reply.
        drafted_tokens: drafts that were verified for it.
        seconds: from the start of the prefill to the last token.
        finish_reason: "stop" (an end token or a stop string) or "length" (max_tokens, or the context is full).
        logprobs: of each token of the reply, where they were asked for.
        prompt_logprobs: of each token of the prompt, None of the first, where they were asked for.
        begun: tokens of the reply that reading a prompt gave: one, and one more after each preemption.
    """

    text: str | None
    token_ids: list[int]
    prompt_tokens: int
    reused_tokens: int
    pages: int
    shared_pages: int
    steps: int
    accepted_per_step: list[int]
    drafted_tokens: int
    seconds: float
    finish_reason: FinishReason
    times: Times
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    begun: int = 1

    @property
    def step_tokens(self) -> int:
        """Tokens that came out of decoding steps."""
        return len(self.token_ids) - self.begun

    @property
    def acceptance_length(self) -> float:
        """Tokens per decoding step, accepted drafts and the bonus token together; NaN without a step."""
        return self.step_tokens / self.steps if self.steps else math.nan

    @property
    def accepted_tokens(self) -> int:
        """Drafts that became part of the reply."""
        return sum(self.accepted_per_step)

    def as_json(self) -> dict[str, Any]:
        """Describes the reply in JSON: its text and tokens, and its counts of drafts."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "steps": self.steps,
            "accepted_per_step": self.accepted_per_step,
            "acceptance_length": round(self.acceptance_length, 4) if self.steps else None,
            "seconds": round(self.seconds, 6),
            "finish_reason": self.finish_reason,
        }


@dataclass(slots=True)
class Update:
    """The tokens and text that a step adds to a reply. All updates' texts, joined, are the reply's.

    Nobody changes one: it is not frozen for the time that takes in each step and slot.

    Attributes:
        token_ids: new tokens.
        text: new text that is final: a character, or what may begin a stop string, comes once it is whole.
        drafted_tokens: drafts verified so far.
        accepted_tokens: drafts accepted so far.
        completion: the whole reply, with its last update.
        error: why there is no reply. Nothing follows.
        logprobs: of each new token, where they were asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    completion: Completion | None = None
    error: DFlashError | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def joined(self, later: "Update") -> "Update":
        """Makes one update of this one and the next."""
        return Update(
            self.token_ids + later.token_ids,
            self.text + later.text,
            later.drafted_tokens,
            later.accepted_tokens,
            later.completion,
            later.error,
            self.logprobs + later.logprobs,
        )


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated for it so far. `take_update` takes the new ones.

    Attributes:
        room: most tokens of the reply: max_tokens, or what the context leaves.
        end_token_ids: tokens that end it.
        text: the reply as text, where the engine has a tokenizer.
        draft: False decodes it plainly.
        priority: 1 is the most urgent.
        deadline: of its last token, on the scheduler's clock.
        arrival: its place among all requests, in order of arrival; -1 before it is queued.
        reused: prompt tokens whose K/V rows an earlier request had left.
        pages, shared_pages: as in `Completion`.
        accepted_per_step: drafts of each decoding step that became part of the reply.
        logprobs, prompt_logprobs: of tokens of the reply, and of the prompt but its first, so far.
        bad_runs: runs of tokens that the reply is kept from.
        grammar: what the reply is held to, and where it stands there.
        is_sampled: whether its tokens are drawn.
        is_shaped: whether it asks for log-probabilities, penalties or a grammar.
    """

    prompt_ids: list[int]
    params: SamplingParams
    room: int
    end_token_ids: frozenset[int]
    text: TextStream | None = None
    draft: bool = True
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    arrival: int = -1
    reused: int = 0
    pages: int = 0
    shared_pages: int = 0
    token_ids: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)
    drafted: int = 0
    finish_reason: FinishReason | None = None
    error: DFlashError | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    bad_runs: tuple[tuple[int, ...], ...] = ()
    grammar: "Grammar | None" = None
    is_sampled: bool = field(init=False)
    is_shaped: bool = field(init=False)
    times: Times = field(default_factory=lambda: Times(arrival_ns=now_ns()))
    _begun: int = 0  # tokens that came of prompts, not of decoding steps
    _reported: int = 0
    _told: bool = False  # its end
    _has_stops: bool = False

    def __post_init__(self) -> None:
        params = self.params
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        self.is_sampled = params.temperature > 0
        self.is_shaped = asks or params.penalizes or self.grammar is not None
        self._has_stops = bool(params.stop or params.stop_token_sequences or self.grammar)

    @property
    def done(self) -> bool:
        """Whether the sequence has ended, with a reply or an error."""
        return self.finish_reason is not None or self.error is not None

    @property
    def left(self) -> int:
        """Tokens that the reply may still get; 0 once it has ended."""
        return 0 if self.done else self.room - len(self.token_ids)

    @property
    def accepted(self) -> int:
        """Drafts that became part of the reply."""
        return sum(self.accepted_per_step)

    @property
    def is_watched(self) -> bool:
        """Whether each of its tokens has to be looked at: for texts or runs that end it, or for its grammar."""
        return self._has_stops

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all sequences: the most urgent first, among equals the earliest."""
        return self.priority, self.arrival

    def tokens(self, first: int, end: int) -> list[int]:
        """Lists its tokens at these positions, as far as they are known."""
        prompt = len(self.prompt_ids)
        return self.prompt_ids[first:end] + self.token_ids[max(0, first - prompt) : max(0, end - prompt)]

    def begin(self, ids: tuple[int, ...], now_ns: int) -> int:
        """Appends the token that its prompt's last piece gives; returns the number of tokens."""
        if not self.token_ids:
            self.times.first_token_ns = now_ns
        self._begun += len(ids)
        return self._commit_until_end(ids, now_ns)

    def commit(self, ids: tuple[int, ...], drafted: int, now_ns: int) -> int:
        """Appends a decoding step's final tokens, up to and with the one that ends the sequence; returns their number.

        Args:
            drafted: drafts that the step has verified.
        """
        taken = new = len(ids)
        if len(self.token_ids) + new >= self.room or self._has_stops or not self.end_token_ids.isdisjoint(ids):
            taken = self._commit_until_end(ids, now_ns)
        else:
            self.token_ids += ids
            self.say(ids)
        # The last is the bonus token, unless a draft was the end.
        self.accepted_per_step.append(taken - 1 if taken == new else taken)
        self.drafted += drafted
        return taken

    def cut(self, now_ns: int) -> None:
        """Ends the sequence where it is: its client has all that it wants."""
        self.times.last_token_ns = now_ns
        try:
            if self.text is not None:
                self.text.finish()
            self.finish_reason = "stop"
        except Exception as error:
            self.error = fault_of("text", error)

    def say(self, ids: tuple[int, ...]) -> None:
        """Adds tokens to its text, where it has one; none of them is its end."""
        if self.text is None:
            return
        try:
            for token in ids:
                self.text.push(token)
        except Exception as error:
            raise fault_of("text", error) from error

    def _commit_until_end(self, ids: tuple[int, ...], now_ns: int) -> int:
        for count, token in enumerate(ids, start=1):
            self.token_ids.append(token)
            is_full = len(self.token_ids) >= self.room
            if self.grammar is not None:
                self._accept(self.grammar, token)
            ended = token in self.end_token_ids or self._ends_with_stop_sequence()
            if self.text is not None:
                ended = self._say(self.text, token, ended or is_full) or ended
            if ended or is_full:
                self.finish_reason = "stop" if ended else "length"
                self.times.last_token_ns = now_ns
                return count
        return len(ids)

    def _accept(self, grammar: "Grammar", token: int) -> None:
        try:
            grammar.accept(token)
        except Exception as error:
            raise fault_of("grammar", error) from error

    def _say(self, text: TextStream, token: int, is_last: bool) -> bool:
        """Adds a token to the text, the last one if the reply has ended; returns whether a stop string has come."""
        try:
            text.push(token)
            if is_last or text.stopped:
                text.finish()
        except Exception as error:
            raise fault_of("text", error) from error
        return text.stopped

    def take_update(self) -> Update | None:
        """Takes the tokens and text since the last update, and the end; None if there is nothing new."""
        if self.error is not None:
            return Update(drafted_tokens=self.drafted, accepted_tokens=self.accepted, error=self.error)
        new = self.token_ids[self._reported :]
        if not new and (self.finish_reason is None or self._told):
            return None
        logprobs = self.logprobs[self._reported :] if self.logprobs else []
        self._reported += len(new)
        text = self.text.release() if self.text is not None else ""
        if self.finish_reason is None:  # each step so far has given its accepted drafts and one token more
            accepted = self._reported - self._begun - len(self.accepted_per_step)
            # All fields by place: with defaults or names it takes half as long again.
            return Update(new, text, self.drafted, accepted, None, None, logprobs)
        self._told = True
        return Update(new, text, self.drafted, self.accepted, self.completion(), logprobs=logprobs)

    def completion(self) -> Completion:
        """Makes the finished reply.

        Raises:
            DFlashError: the request failed.
        """
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None
        return Completion(
            text=self.text.text if self.text is not None else None,
            token_ids=list(self.token_ids),
            prompt_tokens=len(self.prompt_ids),
            reused_tokens=self.reused,
            pages=self.pages,
            shared_pages=self.shared_pages,
            steps=len(self.accepted_per_step),
            accepted_per_step=list(self.accepted_per_step),
            drafted_tokens=self.drafted,
            seconds=(self.times.last_token_ns - self.times.first_scheduled_ns) / 1e9,
            finish_reason=self.finish_reason,
            times=self.times,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else [None, *self.prompt_logprobs],
            begun=self._begun,
        )

    def _ends_with_stop_sequence(self) -> bool:
        return any(tuple(self.token_ids[-len(stop) :]) == stop for stop in self.params.stop_token_sequences)


def fault_of(part: str, error: Exception) -> DFlashError:
    """Makes the error that ends one reply: whatever its text or grammar cannot do, the engine and other replies can."""
    if isinstance(error, DFlashError):
        return error
    return ReplyError(f"the reply's {part} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
