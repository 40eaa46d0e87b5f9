"""What a caller asks for, and the sequence that grows out of it."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

from trtllm_dflash.runtime.text import TextStream

FinishReason = Literal["stop", "length"]


class SamplingParams(BaseModel):
    """How one reply is generated.

    Attributes:
        max_tokens: most tokens to generate; the engine's max_seq_len bounds prompt and reply together.
        temperature: 0 is greedy.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that reach this probability together; 1 keeps all.
        seed: with the token's absolute position, all that a sampled token's random number depends on.
        stop: texts that end the reply; they are not part of it.
        stop_token_ids: tokens that end the reply, besides the model's own.
        ignore_eos: go on past the model's own end token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: PositiveInt = 256
    temperature: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    ignore_eos: bool = False


@dataclass
class Sequence:
    """A prompt and what has been generated for it so far.

    Attributes:
        room: most tokens that can still be generated: max_tokens, or what the context leaves.
        end_token_ids: tokens that end it.
        text: the reply as text, where the engine has a tokenizer.
        prefilled: prompt tokens whose K/V rows exist.
        accepted_per_step: drafts of each decoding step that became part of the reply.
    """

    prompt_ids: list[int]
    params: SamplingParams
    room: int
    end_token_ids: frozenset[int]
    text: TextStream | None = None
    prefilled: int = 0
    token_ids: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seconds: float = 0.0  # from its first prefill step to its last token

    def commit(self, ids: list[int]) -> int:
        """Appends a step's final tokens, up to and with the one that ends the sequence; returns how many."""
        for count, token in enumerate(ids, start=1):
            self.token_ids.append(token)
            ended = token in self.end_token_ids
            if self.text is not None:
                self.text.push(token)
                ended = ended or self.text.stopped
            if ended or len(self.token_ids) == self.room:
                self.finish_reason = "stop" if ended else "length"
                if self.text is not None:
                    self.text.finish()
                return count
        return len(ids)
