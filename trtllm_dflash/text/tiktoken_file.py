"""Tokenizers that are published as a tiktoken file and code of their own (Kimi's), converted without running that code.

The file has a token a line, its bytes in base64 and its rank: of neighbouring tokens, those are merged whose joined
bytes have the lowest rank. That makes a byte-level BPE; the cut into words is Kimi's.
"""

import base64
import binascii
import json
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from trtllm_dflash.errors import EngineError
from trtllm_dflash.text.token_text import bytes_of_characters

RANKS_FILE = "tiktoken.model"

#: The class in tokenizer_config.json whose words are `_WORDS`, and the tokens that it adds behind the file's.
_CLASS, _ADDED = "TikTokenTokenizer", 256

_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def needs_conversion(source: Path) -> bool:
    """Whether a checkpoint's tokenizer is such a file alone."""
    return not (source / "tokenizer.json").is_file() and (source / RANKS_FILE).is_file()


def convert(source: Path, folder: Path) -> None:
    """Writes the tokenizer of the checkpoint `source`, as Hugging Face's libraries load it, into `folder`.

    Raises:
        EngineError: the file cannot be read, or is another class's.
    """
    file = source / "tokenizer_config.json"
    config = _read_config(file)
    try:
        added, texts = _added_tokens(config), _texts(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise EngineError(f"{file}: added_tokens_decoder is not ids with their tokens ({reason})") from None
    tokenizer = make_tokenizer(read_ranks(source / RANKS_FILE), added, texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "added_tokens_decoder")}
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(kept, indent=2))
    template = source / "chat_template.jinja"
    if template.is_file() and folder != source:
        shutil.copyfile(template, folder / template.name)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Reads each token's bytes and its rank, which is its id.

    Raises:
        EngineError: it cannot be read, or has other lines; or a byte is no token.
    """
    try:
        pairs = (line.split() for line in file.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError, binascii.Error) as error:
        raise EngineError(f"{file}: is no tiktoken file ({' '.join(str(error).split())})") from None
    if any(bytes([byte]) not in ranks for byte in range(256)) or sorted(ranks.values()) != list(range(len(ranks))):
        raise EngineError(f"{file}: is no tiktoken file (its ranks are not 0 to {len(ranks) - 1}, or a byte has none)")
    return ranks


def make_tokenizer(ranks: dict[bytes, int], added: dict[int, str], texts: Set[int] = frozenset()) -> Tokenizer:
    """Makes a byte-level BPE of these ranks, with special tokens behind them.

    Args:
        added: the names of those that have one, by id.
        texts: those that are text where a reply has them, as the markers of calls and thinking are.
    """
    characters = {byte: character for character, byte in bytes_of_characters().items()}

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        # Whichever way its parts come about: a lower rank goes first.
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled(left), spelled(right)) for left, right in known]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    words = Split(Regex(_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    names = {token: added.get(token, f"<|reserved_token_{token}|>") for token in range(len(ranks), len(ranks) + _ADDED)}
    tokenizer.add_tokens(
        [AddedToken(name, special=token not in texts, normalized=False) for token, name in names.items()]
    )
    return tokenizer


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{file}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(config, dict) or config.get("tokenizer_class") != _CLASS:
        raise EngineError(f"{file}: a {RANKS_FILE} of another tokenizer_class than {_CLASS} is not converted")
    return config


def _added_tokens(config: dict[str, Any]) -> dict[int, str]:
    return {int(token): entry["content"] for token, entry in (config.get("added_tokens_decoder") or {}).items()}


def _texts(config: dict[str, Any]) -> set[int]:
    """Lists the added tokens that the configuration does not call special."""
    entries = (config.get("added_tokens_decoder") or {}).items()
    return {int(token) for token, entry in entries if entry.get("special", True) is False}
