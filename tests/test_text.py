"""Tokens to text: what is released is the decoder's own text, never taken back, and ends before a stop string."""

import json
import shutil
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from tests.conftest import TINY
from tests.test_reply_parsers import texts_in
from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.stream import StoppableText, TextStream
from trtllm_dflash.text.tokenizer import TextCodec

TOKENIZER = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
TOKENS = TOKENIZER.get_vocab()

# Surrogates are no characters; the rest, with what splits across tokens and joins across characters made frequent.
AWKWARD = st.sampled_from(
    ["👩‍👩‍👧‍👦", "🇫🇮", "👍🏽", "e\u0301", "漢字", "한국어", "\ufffd", "\u200d", "\u0301", "\r\n", " ", "ß", "العربية"]
)
TEXTS = st.lists(AWKWARD | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=10).map("".join)
IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)

#: Tokens of bytes that are no characters by themselves, and one of them.
NO_TEXT = sorted(token for token in TOKENS.values() if "\ufffd" in TOKENIZER.decode([token]))
HALF = NO_TEXT[0]

PIECES = ["▁Hi", "▁", "x", "👩"]


def tokenizer_of_bytes() -> Tokenizer:
    """One of characters that falls back on bytes, as Gemma's: it decodes a run of them whole, or not at all."""
    vocabulary = {name: at for at, name in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


OF_BYTES = tokenizer_of_bytes()
RUNS = st.lists(
    st.sampled_from(["🧙", "é", "\n"]).map(str.encode) | st.sampled_from([b"\xf0\x9f", b"\xc3", b"\x99", b"A", b" "]),
    min_size=1,
    max_size=4,
).map(b"".join)


def as_far_as_text(run: bytes) -> str:
    """A run of bytes: its characters up to the first that is none, and a mark for each byte from there on."""
    try:
        return run.decode()
    except UnicodeDecodeError as error:
        return run[: error.start].decode() + "\ufffd" * (len(run) - error.start)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def stream_text(
    ids: list[int], stop: tuple[str, ...] = (), step: int = 1, tokenizer: Tokenizer = TOKENIZER
) -> tuple[str, TextStream]:
    """All that is released when `step` tokens come at a time; checks on the way that it is never taken back."""
    stream = TextStream(tokenizer, stop)
    released = ""
    for i in range(0, len(ids), step):
        for token in ids[i : i + step]:
            stream.push(token)
        released += stream.release()
        assert stream.text.startswith(released)
    stream.finish()
    released += stream.release()
    assert released == stream.text
    return released, stream


@given(TEXTS)
def test_text_comes_back_as_it_was(text):
    assert stream_text(encode(text))[0] == decode(encode(text)) == text


@given(IDS, st.integers(1, 16))
def test_any_tokens_give_the_decoder_s_text(ids, step):
    """Also special tokens, and bytes that are no character."""
    assert stream_text(ids, step=step)[0] == decode(ids)


@given(st.lists(RUNS | st.sampled_from(PIECES), max_size=8), st.integers(1, 16))
def test_bytes_that_are_no_text_take_nothing_back_and_no_later_text_with_them(parts, step):
    """The decoder itself shows none of the characters of such a run, of which some were released before."""
    ids, text = [], ""
    for is_run, group in groupby(parts, key=lambda part: isinstance(part, bytes)):
        for part in [b"".join(group)] if is_run else group:
            ids += [1 + byte for byte in part] if is_run else [257 + PIECES.index(part)]
            text += as_far_as_text(part) if is_run else part.replace("▁", " ")
    assert stream_text(ids, step=step, tokenizer=OF_BYTES)[0] == text
    whole = OF_BYTES.decode(ids)
    assert whole == text or "\ufffd" in whole


class CountedStream:
    """A decoder's stream that counts the tokens it decodes: with each token all before it whose text has not come."""

    decoded = 0

    def __init__(self, **settings):
        self._stream, self._pending = DecodeStream(**settings), 0

    def step(self, tokenizer, token):
        self._pending += 1
        CountedStream.decoded += self._pending
        piece = self._stream.step(tokenizer, token)
        self._pending = 0 if piece else self._pending
        return piece


@pytest.mark.parametrize("token", [3, HALF, 10**6], ids=["special", "half", "unknown"])
def test_tokens_that_give_no_text_are_not_decoded_again_with_all_that_follow(token, monkeypatch):
    monkeypatch.setattr("trtllm_dflash.text.stream.DecodeStream", CountedStream)
    monkeypatch.setattr(CountedStream, "decoded", 0)
    ids = [*encode("ok"), *[token] * 3000, *encode("🦩 ok")]
    stream = TextStream(TOKENIZER)
    for pushed in ids:
        stream.push(pushed)
    assert CountedStream.decoded < 150 * len(ids)
    stream.finish()
    assert stream.release() == decode(ids)


BROKEN = st.lists(st.sampled_from(NO_TEXT) | st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60)


@given(BROKEN, st.integers(1, 16))
def test_shown_early_bytes_that_are_no_character_give_the_same_text(ids, step):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtllm_dflash.text.stream._MOST_PENDING", 5)
        assert stream_text(ids, step=step)[0] == decode(ids)


@given(st.data(), TEXTS.filter(bool), st.integers(1, 16))
def test_text_ends_before_the_first_stop_string(data, text, step):
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : begin + data.draw(st.integers(1, 6))]
    released, stream = stream_text(encode(text), (stop,), step)
    assert released == text[: text.index(stop)]
    assert stream.stopped


@given(st.text("ab", min_size=1, max_size=40), st.lists(st.text("ab", min_size=2, max_size=5), min_size=1, max_size=3))
def test_of_several_stop_strings_the_first_to_be_complete_ends_the_text(text, stops):
    """A small alphabet: beginnings of stop strings are everywhere. One token a character, so first is unambiguous."""
    ids = [TOKENS[character] for character in text]
    released, stream = stream_text(ids, tuple(stops))
    complete = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    expected = text
    if complete:
        shown = text[: complete[0]]
        expected = shown[: -max(len(stop) for stop in stops if shown.endswith(stop))]
    assert released == expected
    assert stream.stopped == bool(complete)


@example("abc", ["abc", "b"])
@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_where_a_text_stops_does_not_depend_on_the_pieces_that_it_comes_in(text, stops):
    """A step brings as many tokens as were accepted: drafted text would end elsewhere than plain text."""
    ends = []
    for longest in range(1, 13):
        stream, left, released = StoppableText(tuple(stops)), text, ""
        while left:
            stream.append(left[:longest])
            released, left = released + stream.release(), left[longest:]
        stream.flush()
        ends.append((released + stream.release(), stream.stopped))
    assert len(set(ends)) == 1


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_text_that_grows_is_not_copied_with_each_piece(stop):
    stream, released = StoppableText(stop), ""
    for _ in range(2_000):
        stream.append("none")
        released += stream.release()
    assert max(map(len, texts_in(stream))) < 100
    stream.flush()
    assert released + stream.release() == stream.text == "none" * 2_000


@given(TEXTS, TEXTS.filter(bool))
def test_a_stop_string_that_does_not_come_changes_nothing(text, stop):
    if stop not in text:
        released, stream = stream_text(encode(text), (stop,))
        assert released == text
        assert not stream.stopped


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_known():
    stream = TextStream(TOKENIZER, ("END",))
    for character, released in [("a", "a"), ("E", ""), ("N", ""), ("E", "EN"), ("N", ""), ("x", "ENx")]:
        stream.push(TOKENS[character])
        assert stream.release() == released


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_character_cut_off_at_the_end_is_shown_as_the_decoder_shows_it(missing):
    whole = encode("ok 🦩")
    # The tokenizer knows no flamingo: its four bytes are tokens of their own.
    assert decode(whole[:-3]).rstrip("\ufffd") == "ok "
    cut = whole[:-missing]
    stream = TextStream(TOKENIZER)
    for token in cut:
        stream.push(token)
    assert stream.release() == "ok ", "half a character must not be released"
    stream.finish()
    assert stream.release() == decode(cut)[3:] != ""


def test_the_tokenizer_of_an_engine_is_the_one_that_transformers_chooses(tiny_engine):
    from transformers import AutoTokenizer

    codec, chosen = TextCodec.load(tiny_engine, {}), AutoTokenizer.from_pretrained(tiny_engine, local_files_only=True)
    assert codec is not None
    assert codec.backend.to_str() == chosen.backend_tokenizer.to_str()
    assert (codec.end_id, codec.pad_id) == (chosen.eos_token_id, chosen.pad_token_id)
    chat = [{"role": "user", "content": "Tell a story."}]
    assert codec.encode_chat(chat) == chosen.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("config.json", {"model_type": "gemma"}),
        ("tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.py", None]}}),
    ],
)
def test_where_files_say_more_than_that_they_are_plain_transformers_chooses(file, said, tmp_path, monkeypatch):
    import transformers

    files = {"config.json": {}, "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    files[file] |= said
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    shutil.copy(TINY / "target" / "tokenizer.json", tmp_path)
    asked, choose = [], transformers.AutoTokenizer.from_pretrained

    def spy(folder, **options):
        asked.append(folder)
        return choose(TINY / "target")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", spy)
    TextCodec.load(tmp_path, {})
    assert asked == [tmp_path]


def test_a_chat_template_that_refuses_in_several_lines_is_quoted_in_one(tmp_path):
    shutil.copytree(TINY / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ raise_exception('no\nway') }}")
    codec = TextCodec.load(tmp_path / "target", {})
    assert codec is not None
    with pytest.raises(RequestError, match=r"^the chat template refuses these messages: no way$"):
        codec.encode_chat([{"role": "user", "content": "x"}])
