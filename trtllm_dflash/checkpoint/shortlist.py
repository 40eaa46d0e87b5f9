"""A shortlist for drafting: the most frequent tokens of a text, and their rows of the target's LM head.

The head is read once more in every step for drafting alone. A token that is not on the list is never drafted; the
target can still choose it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from trtllm_dflash.checkpoint.drafter import DrafterCheckpoint
from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.text.tokenizer import TextCodec

#: What is counted of a line of JSON. `reference` is what the shipped prompts call a reply.
FIELDS = ("text", "prompt", "reference")

# Characters: of a text that are tokenized as one, and of those that are tokenized at a time.
_PIECE = 1 << 16
_BATCH = 1 << 20


def take_shortlist(
    pair: Pair, size: int, text: Path | None, stop_token_ids: tuple[int, ...], progress: Callable[[int, int], None]
) -> DrafterCheckpoint:
    """Reduces the vocabulary of a pair's drafter to the `size` most frequent tokens of `text`.

    Equals, and tokens not in the text, go by id: a BPE vocabulary's ids are roughly in order of frequency. Added
    (special) and stop tokens are always on the list. Drafts keep the order of the target's ids, so that among equal
    logits the choice is the whole head's.

    Args:
        text: see `count_tokens`; None where the list is the whole vocabulary.
        progress: told how many bytes of the text are counted, of how many.

    Raises:
        SettingsError: the text cannot be counted, or the list is too short.
    """
    assert pair.drafter is not None
    vocabulary = pair.target_config.vocab_size
    if text is None:
        ids = torch.arange(size)
    else:
        codec = TextCodec.load(pair.target_folder.path, {})
        if codec is None:
            raise SettingsError(
                f"--draft-vocab {size}: {pair.target_folder.path} has no tokenizer to count tokens with"
            )
        added = {token for token in codec.backend.get_added_tokens_decoder() if token < vocabulary}
        always = sorted(added | set(stop_token_ids))
        if size < len(always):
            raise SettingsError(
                f"--draft-vocab {size}: give at least {len(always)}, the number of special and stop tokens"
            )
        counts = count_tokens(text, codec, vocabulary, progress)
        counts[always] = torch.iinfo(counts.dtype).max
        ids = counts.sort(descending=True, stable=True).indices[:size].sort().values
    config = pair.drafter.config.model_copy(update={"draft_vocab_size": size})
    return replace(pair.drafter, config=config, draft_to_target=ids.int(), borrows_head=True)


def count_tokens(
    text: Path, codec: TextCodec, vocabulary: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> torch.Tensor:
    """Counts each token in a text: int64 [V].

    Args:
        text: UTF-8. A file named `.jsonl` has an object a line, of which `FIELDS` are counted.

    Raises:
        SettingsError: it cannot be read, holds no text, or is not what its name says.
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    pieces: list[str] = []
    waiting = done = 0
    total = _size(text)
    for piece, length in _pieces(text):
        pieces.append(piece)
        waiting, done = waiting + len(piece), done + length
        if waiting >= _BATCH:
            counts += _count(pieces, codec, vocabulary)
            pieces, waiting = [], 0
            progress(done, total)
    counts += _count(pieces, codec, vocabulary)
    progress(total, total)
    if not counts.any():
        raise SettingsError(f"--draft-text {text}: holds no text")
    return counts


def _size(text: Path) -> int:
    try:
        return text.stat().st_size
    except OSError as error:
        raise SettingsError(f"--draft-text {text}: cannot be read: {error.strerror}") from None


def _count(pieces: list[str], codec: TextCodec, vocabulary: int) -> torch.Tensor:
    encodings = codec.backend.encode_batch_fast(pieces, add_special_tokens=False)
    ids = torch.tensor([token for encoding in encodings for token in encoding.ids], dtype=torch.int64)
    counts = torch.bincount(ids, minlength=vocabulary)
    if len(counts) > vocabulary:
        raise SettingsError(f"--draft-vocab: the tokenizer has token {len(counts) - 1}, the target {vocabulary} tokens")
    return counts


def _pieces(text: Path) -> Iterator[tuple[str, int]]:
    """Yields pieces of the text to tokenize at once, each with its number of bytes in the file."""
    lines = _lines(text)
    if text.suffix == ".jsonl":
        for number, line in enumerate(lines, start=1):
            length = len(line.encode())
            for field in _fields(text, number, line) if line.strip() else []:
                yield field, length
                length = 0
        return
    # Long pieces, and none that ends between a line and its indentation: together those may be one token.
    piece = ""
    for line in lines:
        if len(piece) >= _PIECE and not line[0].isspace():
            yield piece, len(piece.encode())
            piece = ""
        piece += line
    yield piece, len(piece.encode())


def _lines(text: Path) -> Iterator[str]:
    try:
        with text.open(encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except OSError as error:
        raise SettingsError(f"--draft-text {text}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"--draft-text {text}: is not UTF-8: {error}") from None


def _fields(text: Path, number: int, line: str) -> list[str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or nested without end
        row = None
    found = [row[field] for field in FIELDS if isinstance(row.get(field), str)] if isinstance(row, dict) else []
    if not found:
        fields = ", ".join(f'"{field}"' for field in FIELDS)
        raise SettingsError(f"--draft-text {text}: line {number} is not a JSON object with a text in one of {fields}")
    # Half of a surrogate pair, which JSON can write, is no text.
    return [field.encode("utf-8", "ignore").decode("utf-8") for field in found]
