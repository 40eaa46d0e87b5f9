"""Single tokens as bytes and as text: a character may be spread over several."""

import re

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how vocabularies of characters write a byte


class TokenTexts:
    """The bytes and the text of each token of a vocabulary.

    Args:
        hidden: tokens that are not shown in texts.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._added = {token: its.content for token, its in tokenizer.get_added_tokens_decoder().items()}
        self._bytes = bytes_of_characters() if "ByteLevel" in repr(tokenizer.decoder) else None

    def raw(self, token: int) -> bytes:
        """Returns a token's bytes; those of a special token's name."""
        written = self._added.get(token)
        if written is not None:
            return written.encode()
        written = self._tokenizer.id_to_token(token) or ""  # a model's vocabulary may be padded
        if self._bytes is not None:
            return b"".join(
                bytes([self._bytes[character]]) if character in self._bytes else character.encode()
                for character in written
            )
        found = _BYTE.fullmatch(written)
        return bytes([int(found[1], 16)]) if found else written.replace("▁", " ").encode()

    def hidden(self, token: int) -> str | None:
        """Returns the name of a token that texts do not show; None of one that they do."""
        return self._added[token] if token in self._hidden else None

    def text(self, token: int) -> str:
        """Returns a token's text; what is no whole character in it is replaced."""
        return self.raw(token).decode(errors="replace")


def bytes_of_characters() -> dict[str, int]:
    """Maps each character of a byte-level tokenizer to its byte; invisible bytes have stand-in characters."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(moved)}
