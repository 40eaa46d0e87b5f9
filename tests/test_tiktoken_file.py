"""A tokenizer in tiktoken's form, converted: against the definition of its merges, in plain words."""

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex  # type: ignore[import-untyped]

from trtllm_dflash.errors import CheckpointError, EngineError
from trtllm_dflash.text.tiktoken_file import _WORDS, convert, read_ranks
from trtllm_dflash.text.tokenizer import TextCodec, check_tokenizer

TEXTS = [
    "The theme of the others isn't HERE, it's 1234567 there!",
    "  two  spaces\n\n and\ttabs \r\n",
    "你好。世界 mixed中文words and naïve café",
    "don'T WE'LL camelCaseWords XMLHttpRequest",
    "🙂 emoji, e\u0301 and ﷺ",
    "",
]
MERGES = ["th", "he", "the", " the", "er", "her", "ere", "there", "is", "ca", "se", " t", "12", "123"]
MERGES += ["你", "好", "你好"]


@pytest.fixture
def folder(tmp_path) -> Path:
    tokens = [bytes([byte]) for byte in range(256)]
    for word in MERGES:
        content = word.encode()
        tokens += [content[:end] for end in range(2, len(content) + 1) if content[:end] not in tokens]
    lines = (base64.b64encode(token).decode() + f" {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    named = {"[BOS]": len(tokens), "<|im_end|>": len(tokens) + 2, "<think>": len(tokens) + 5}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(token): {"content": name, "special": name != "<think>"} for name, token in named.items()
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    return tmp_path


def encoded(text: str, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's own definition: in each word, of all neighbours the first pair of the lowest rank is merged."""
    ids = []
    for word in regex.findall(f"(?V1){_WORDS}", text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            joined = [ranks.get(a + b) for a, b in pairwise(parts)]
            known = [rank for rank in joined if rank is not None]
            if not known:
                break
            at = joined.index(min(known))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_the_converted_tokenizer_s_ids_are_those_of_the_ranks(folder):
    codec, ranks = TextCodec.load(folder, {}), read_ranks(folder / "tiktoken.model")
    assert codec is not None
    for text in TEXTS:
        assert codec.encode_words(text) == encoded(text, ranks)
        assert codec.decode(encoded(text, ranks)) == text
    assert len(codec.encode_words("there you're")) < len("there you're")


def test_special_tokens_stand_behind_the_ranks_each_at_its_id(folder):
    codec, count = TextCodec.load(folder, {}), len(read_ranks(folder / "tiktoken.model"))
    assert codec is not None
    vocabulary = codec.backend.get_vocab()
    assert (vocabulary["[BOS]"], vocabulary["<|im_end|>"]) == (count, count + 2)
    assert vocabulary[f"<|reserved_token_{count + 1}|>"] == count + 1
    assert len(vocabulary) == count + 256
    assert codec.end_id == count + 2
    assert codec.encode_chat([{"role": "user", "content": "the"}])[-1] == count + 2


def test_added_tokens_that_are_not_special_are_text(folder):
    codec, count = TextCodec.load(folder, {}), len(read_ranks(folder / "tiktoken.model"))
    assert codec is not None
    assert codec.encode_words("<think>the") == [count + 5, *codec.encode_words("the")]
    assert codec.decode([count + 5, *codec.encode_words("the"), count + 2]) == "<think>the"


@pytest.mark.parametrize("lines", ["AA== 0\n", "no base64 0\n", "AA== zero\n"])
def test_a_file_that_is_not_tiktoken_s_is_refused(lines, folder):
    (folder / "tiktoken.model").write_text(lines)
    with pytest.raises(EngineError, match=r"tiktoken\.model: is no tiktoken file"):
        convert(folder, folder)


@pytest.mark.parametrize("added", [{"x": {"content": "a"}}, {"300": {}}, {"300": "a"}, ["a"]])
def test_added_tokens_that_are_none_are_one_line(added, folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": added}))
    with pytest.raises(EngineError, match=r"tokenizer_config\.json: added_tokens_decoder is not ids with their tokens"):
        convert(folder, folder)


def test_the_file_of_another_model_is_refused(folder):
    count = len(read_ranks(folder / "tiktoken.model"))
    check_tokenizer(folder, count)
    with pytest.raises(CheckpointError, match=f"has {count} tokens, but config.json a vocabulary of {count - 1}"):
        check_tokenizer(folder, count - 1)


def test_the_file_of_another_class_is_refused(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "QWenTokenizer"}))
    with pytest.raises(EngineError, match="of another tokenizer_class than TikTokenTokenizer is not converted"):
        convert(folder, folder)
