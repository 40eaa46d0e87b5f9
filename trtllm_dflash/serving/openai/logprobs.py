"""Log-probabilities of tokens, in the forms of OpenAI's chats and completions, and of vLLM's prompts."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_dflash.runtime.request import TokenLogprobs
from trtllm_dflash.text.token_text import TokenTexts


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability; None of a prompt's first, which follows nothing."""

    token: int
    its: TokenLogprobs | None


def of_chat(scored: Sequence[Scored], texts: TokenTexts) -> dict[str, object]:
    """Makes the `logprobs` of a chat's choice."""

    def written(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": logprob, "bytes": list(texts.raw(token))}

    content = []
    for one in scored:
        assert one.its is not None
        top = [written(token, logprob) for token, logprob in one.its.top_logprobs]
        content.append({**written(one.token, one.its.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Makes the `logprobs` of a completion's choice, of whose text it counts the characters."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0  # characters before the next token

    def body(
        self, scored: Sequence[Scored], prompt: Sequence[Scored] = (), echo: str | None = None
    ) -> dict[str, object]:
        """Makes them of the reply's next tokens, behind those of a prompt whose text it repeats."""
        offsets = self._offsets(prompt, echo or "")
        if echo is not None:  # the reply begins behind it, whatever the prompt's tokens stand for
            self._decoder.reset()
            self._offset = len(echo)
        offsets += self._offsets(scored, "")
        every = [*prompt, *scored]
        top = [self._top(one) for one in every]
        return {
            "tokens": [self._texts.text(one.token) for one in every],
            "token_logprobs": [one.its and one.its.logprob for one in every],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }

    def _offsets(self, scored: Sequence[Scored], text: str) -> list[int]:
        """Counts the characters before each token.

        Args:
            text: of the prompt, which may have the name of a hidden token where it was written there.
        """
        offsets = []
        for one in scored:
            name = self._texts.hidden(one.token)
            raw = b"" if name is not None else self._texts.raw(one.token)
            if raw and self._decoder.getstate()[0] and not 0x80 <= raw[0] < 0xC0:
                # What came before is no character, which is known now.
                self._offset += len(self._decoder.decode(b"", True))
            offsets.append(self._offset)
            if name is None:
                self._offset += len(self._decoder.decode(raw))
            elif text.startswith(name, self._offset):
                self._offset += len(name)
        return offsets

    def _top(self, one: Scored) -> dict[str, float] | None:
        """Lists the most likely tokens, and the chosen one behind them where it is none of these, as OpenAI does.

        Of tokens with one text, such as bytes of a character, that is the chosen one's, else the likeliest's.
        """
        if one.its is None or not one.its.top_logprobs:
            return None
        top: dict[str, float] = {}
        for token, logprob in one.its.top_logprobs:
            top.setdefault(self._texts.text(token), logprob)
        top[self._texts.text(one.token)] = one.its.logprob
        return top


def of_prompt(scored: Sequence[Scored], texts: TokenTexts) -> list[dict[int, dict[str, object]] | None]:
    """Makes `prompt_logprobs` as vLLM has them: of each token, and of the most likely ones in its place, by token."""

    def written(one: Scored) -> dict[int, dict[str, object]] | None:
        if one.its is None:
            return None
        each = [*one.its.top_logprobs, (one.token, one.its.logprob)]
        return {token: {"logprob": logprob, "decoded_token": texts.text(token)} for token, logprob in each}

    return [written(one) for one in scored]
