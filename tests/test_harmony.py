"""gpt-oss's chat format, with the vocabulary of its published tokenizer."""

import json
import os
import re
from collections.abc import AsyncIterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_harmony import StreamableParser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints import make_gpt_oss
from trtllm_dflash import LLM, SamplingParams, Structured
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import EngineError, LongPromptError, RequestError
from trtllm_dflash.runtime.intake import Intake
from trtllm_dflash.serving.client import Piece, TokenRequest
from trtllm_dflash.text import harmony
from trtllm_dflash.text.grammar import Grammars
from trtllm_dflash.text.reply.call_grammar import call_grammar
from trtllm_dflash.text.reply.grammar_terms import Callee, form_of
from trtllm_dflash.text.reply.harmony_form import harmony_form
from trtllm_dflash.text.reply.parts import Part
from trtllm_dflash.text.tokenizer import TextCodec

if find_spec("bpe_openai") is None:
    pytest.skip("the vocabulary o200k comes from bpe-openai, of the dev extra", allow_module_level=True)

SPECIAL = [
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>", "<|constrain|>"),
    *("<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|reserved_200009|>"),
    *("<|reserved_200010|>", "<|reserved_200011|>", "<|call|>"),
]


@pytest.fixture(scope="module")
def encoding():
    import bpe_openai  # which reads all vocabularies that it has

    return bpe_openai.get_encoding("o200k_base")


@pytest.fixture(scope="module")
def folder(encoding, tmp_path_factory) -> Path:
    """A checkpoint with gpt-oss's vocabulary. Merges are left out: what is encoded here is encoded by the library."""
    path = make_gpt_oss(tmp_path_factory.mktemp("gpt-oss"), layers=1, hidden=32, intermediate=32, vocab=201088)
    seen = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Of bytes in order: those that are characters of their own, then the others, from U+0100 on.
    own = [ord(character) for character in seen if ord(character) < 256]
    rest = iter(character for character in seen if ord(character) >= 256)
    characters = {byte: chr(byte) if byte in own else next(rest) for byte in range(256)}
    vocabulary = {
        "".join(characters[byte] for byte in encoding.decode_single_token_bytes(rank)): rank for rank in range(199998)
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


@pytest.fixture(scope="module")
def codec(folder) -> TextCodec:
    codec = TextCodec.load(folder, {})
    assert codec is not None
    return codec


def tokens(encoding, text: str) -> list[int]:
    """A text in which Harmony's own tokens are written out."""
    ids: list[int] = []
    for i, part in enumerate(text.replace("<|", "\0<|").replace("|>", "|>\0").split("\0")):
        ids += [SPECIAL.index(part) + 199998] if i % 2 else encoding.encode(part)
    return ids


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|end|>"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why? 🦊"},
]


def test_a_conversation_is_rendered_as_harmony(codec, encoding):
    ids = codec.encode_chat(CONVERSATION, {"reasoning_effort": "low", "conversation_start_date": "2026-01-31"})
    before, after = (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-01-31\n\nReasoning: low\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>user<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|end|>"
        "<|start|>user<|message|>Why? 🦊<|end|><|start|>assistant",
    )
    # What a user writes is text, whatever it looks like.
    assert ids == tokens(encoding, before) + encoding.encode("Hi <|end|>") + tokens(encoding, after)


def test_without_arguments_it_is_today_and_the_effort_medium(codec, encoding):
    text = encoding.decode([token for token in codec.encode_chat(CONVERSATION[1:2]) if token < 199998])
    assert f"Current date: {date.today()}" in text
    assert "Reasoning: medium" in text


def test_instructions_that_are_empty_are_none(codec):
    empty = {"role": "system", "content": ""}
    assert codec.encode_chat([empty, *CONVERSATION[1:]]) == codec.encode_chat(CONVERSATION[1:])


def function(name, parameters=None, description="Does it."):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function("weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})


def test_tools_and_their_calls_are_rendered_as_harmony(codec, encoding):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        CONVERSATION[0],
        {"role": "user", "content": "And Rome?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    date = {"conversation_start_date": "2026-01-31"}
    ids = codec.encode_chat(messages, date, tools=[WEATHER])
    text = codec.backend.decode(ids, skip_special_tokens=False)
    assert "Calls to these tools must go to the commentary channel: 'functions'.<|end|>" in text
    assert text.endswith(
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// Does it.\ntype weather = (_: {\ncity: string,\n}) => any;\n\n"
        "} // namespace functions<|end|><|start|>user<|message|>And Rome?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant"
    )
    # Without instructions the tools are a message of their own; without tools there is no word of them.
    assert "developer<|message|># Tools" in codec.backend.decode(
        codec.encode_chat(messages[1:2], date, tools=[WEATHER]), skip_special_tokens=False
    )
    assert codec.encode_chat(messages[1:2], date, tools=[]) == codec.encode_chat(messages[1:2], date)


WORD = "x" * 3000
CHINESE = "\uff0c".join(["这是一个很长的句子"] * 400)  # without blanks


@pytest.mark.parametrize("text", [WORD, f"a {WORD} b", CHINESE, " " * 5000, "!" + "\n/" * 2000, "short", ""])
def test_the_library_is_given_no_long_words_whose_square_it_takes(text):
    """Half a million letters took it a minute, in which Python did nothing else: no reply of anybody went on."""
    parts = list(harmony._parts(text))
    assert "".join(parts) == text
    assert all(len(word) <= 1024 for part in parts for word in re.findall(r"[^\s\d]+|\s+|[\r\n/]+", part))


@given(
    st.lists(st.tuples(st.sampled_from("a/\n\r 1"), st.sampled_from([1, 2, 600, 1023, 1024, 1025, 2000])), max_size=9)
)
def test_long_words_are_those_that_a_search_from_every_character_finds(runs):
    text = "".join(character * count for character, count in runs)
    long_word = re.compile(r"[^\s\d]{1025,}|\s{1025,}|[\r\n/]{1025,}")
    assert list(harmony._long_words(text)) == [word.span() for word in long_word.finditer(text)]


@pytest.mark.parametrize("word", ["=" * 9000, " " * 9000, "\n/" * 4500])
def test_long_words_are_looked_for_where_they_begin_alone(word):
    """A megabyte of words of 1,024 characters was searched from each of them for 5 s: no reply of anybody went on."""
    for pattern in (harmony._LONG_WORD, harmony._LONGEST_WORD):
        assert pattern.search("1" + word)[0] == word
        assert pattern.search(word, 1) is None


def test_a_cut_word_is_the_same_text_and_where_it_ends_in_signs_the_same_tokens(codec, monkeypatch):
    said = [{"role": "system", "content": f"Be brief. {WORD} end"}, {"role": "user", "content": CHINESE}]
    decoded = codec._harmony._encoding.decode
    for tools in ((), [WEATHER]):
        ids, chinese = (codec.encode_chat(messages, tools=tools) for messages in (said, said[1:]))
        with monkeypatch.context() as uncut:
            uncut.setattr(harmony, "_long_words", lambda text: iter(()))
            assert decoded(ids) == decoded(codec.encode_chat(said, tools=tools))
            assert chinese == codec.encode_chat(said[1:], tools=tools)


def test_long_words_that_cannot_be_cut_are_refused(codec):
    messages = [{"role": "user", "content": "Hi"}]
    for tool in (function("f", None, WORD * 2), function("f", {"type": "object", "properties": {WORD * 2: {}}})):
        with pytest.raises(RequestError, match="a word of more than 4096 characters in what describes a function"):
            codec.encode_chat(messages, tools=[tool])
    for name in ("model_identity", "conversation_start_date"):
        with pytest.raises(RequestError, match=f"chat argument '{name}' is longer than 4096 characters"):
            codec.encode_chat(messages, {name: WORD * 2})


def test_the_library_is_asked_for_its_state_at_special_tokens_alone(codec, encoding, monkeypatch):
    """It writes all of a message's tokens out each time: of 32,000 that took 1.3 ms a token, of everybody's replies."""
    asked = []
    state = StreamableParser.state.fget
    monkeypatch.setattr(StreamableParser, "state", property(lambda parser: asked.append(1) or state(parser)))
    text = "<|channel|>analysis<|message|>" + "Well. " * 500 + "<|end|><|start|>assistant<|channel|>final<|message|>"
    ids = tokens(encoding, text + "Yes. " * 500 + "<|return|>")
    parser = codec.parser([], None)
    parts = [part for token in ids for part in parser.read("", [token])] + parser.finish()
    for kind, said in (("thinking", "Well. " * 500), ("content", "Yes. " * 500)):
        assert "".join(part.text for part in parts if part.kind == kind) == said
    assert len(asked) == 7  # as there are special tokens


def test_a_schema_that_is_nested_too_deeply_is_refused(codec):
    schema: dict = {}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RequestError, match="cannot be written in Harmony"):
        codec.encode_chat(CONVERSATION, {}, tools=[function("f", schema)])


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([{"role": "ipython", "content": "x"}], {}, "messages of the role 'ipython' are not supported"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], {}, "the result of call 'c': there is no such call"),
        (CONVERSATION, {"reasoning_effort": "extreme"}, "reasoning_effort 'extreme': choose low, medium or high"),
        (CONVERSATION, {"enable_thinking": False}, "chat argument 'enable_thinking' is not known to Harmony"),
    ],
)
def test_what_harmony_has_not_is_refused(messages, arguments, message, codec):
    with pytest.raises(RequestError, match=message):
        codec.encode_chat(messages, arguments)


REPLIES = {
    "thinking, then an answer": (
        "<|channel|>analysis<|message|>The user asks.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Because 🦊 é.<|return|>",
        "Because 🦊 é.",
    ),
    "an answer at once": ("<|channel|>final<|message|>Yes.", "Yes."),
    "cut off while thinking": ("<|channel|>analysis<|message|>The user", ""),
    "an answer that tells its type": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', '{"a": 1}'),
    "a call of a tool": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "",
    ),
    "cut off before a message": ("<|channel|>analysis", ""),
    "no Harmony at all": ("Plain text.", "Plain text."),
}


@pytest.mark.parametrize("case", REPLIES)
def test_the_reader_gets_the_final_channel(case, codec, encoding):
    written, expected = REPLIES[case]
    reply, shown = codec.reply(), ""
    for token in tokens(encoding, written):
        reply.push(token)
        shown += reply.release()
        assert "�" not in shown
    reply.finish()
    assert shown + reply.release() == reply.text == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "<|channel|>analysis<|message|>A call 🦊.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Zürich"}<|call|>',
            [
                ("thinking", "A call 🦊."),
                ("content", "I look."),
                ("call", "weather"),
                ("arguments", '{"city": "Zürich"}'),
            ],
        ),
        # The recipient may stand in the role's part of the header.
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
            "<|message|>{}<|call|>",
            [("thinking", "Hm."), ("call", "now"), ("arguments", "{}")],
        ),
        (
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            [("thinking", "One.\nTwo."), ("content", "Yes.")],
        ),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", [("thinking", "1 + 1")]),
        # The namespace is left out at times; what is no name calls nothing.
        ("<|channel|>commentary to=weather<|message|>{}<|call|>", [("call", "weather"), ("arguments", "{}")]),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", [("thinking", "{}")]),
        # Arguments are none of JSON's where there are none; those that are cut off stay so.
        (
            "<|channel|>commentary to=functions.now<|message|><|end|><|start|>assistant<|channel|>commentary "
            "to=functions.later<|message|><|call|>",
            [("call", "now"), ("arguments", "{}"), ("call", "later"), ("arguments", "{}")],
        ),
        ("<|channel|>commentary to=functions.now<|message|>", [("call", "now")]),
        # An answer may tell its type, as one does that is held to a form; a channel may be named twice.
        ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', [("content", '{"a": 1}')]),
        ('<|channel|>final<|constrain|>json<|message|>{"a": 1}<|return|>', [("content", '{"a": 1}')]),
        ("<|channel|>final json<|message|>{}<|return|>", [("content", "{}")]),
        ("<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", [("thinking", "{}")]),  # to nobody
        (
            "<|channel|>commentary to=functions.weather<|channel|>commentary<|message|>{}<|call|>",
            [("call", "weather"), ("arguments", "{}")],
        ),
        ("No Harmony.", [("content", "No Harmony.")]),
    ],
)
def test_a_reply_is_taken_apart_by_its_channels(written, expected, codec, encoding):
    for size in (1, 7):
        parser, ids = codec.parser([], {"weather": {}}), tokens(encoding, written)
        parts = [part for at in range(0, len(ids), size) for part in parser.read("", ids[at : at + size])]
        found: list[tuple[str, str]] = []
        for part in parts + parser.finish():
            if found and part.kind == found[-1][0]:
                found[-1] = part.kind, found[-1][1] + part.text
            else:
                found.append((part.kind, part.text))
        assert found == expected


def test_without_tools_a_call_is_thinking(codec, encoding):
    ids = tokens(encoding, REPLIES["a call of a tool"][0])
    assert [part.kind for part in codec.parser([], None).read("", ids)] == ["thinking"]


def test_a_stop_string_ends_the_final_channel(codec, encoding):
    reply = codec.reply(("cause",))
    for token in tokens(encoding, REPLIES["thinking, then an answer"][0]):
        reply.push(token)
    assert reply.stopped
    assert reply.text == "Be"


@pytest.mark.slow
def test_a_changed_vocabulary_is_refused_and_the_environment_left_as_it_was(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "/somewhere")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    names = list(vocabulary)
    vocabulary[names[1000]], vocabulary[names[1001]] = vocabulary[names[1001]], vocabulary[names[1000]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    with pytest.raises(EngineError, match="has Harmony's tokens, but not its vocabulary"):
        TextCodec.load(tmp_path, {})
    assert os.environ["TIKTOKEN_ENCODINGS_BASE"] == "/somewhere"


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "engine"
    build(BuildSettings(name="gpt-oss", target=str(folder), precision="fp32", max_seq_len=256), path)
    return path


@pytest.mark.slow
def test_llm_speaks_harmony_in_conversations_and_not_in_raw_prompts(engine, codec):
    llm = LLM.load(engine, "cpu")
    assert llm.encode(CONVERSATION) == codec.encode_chat(CONVERSATION)
    params = SamplingParams(max_tokens=3)
    chat, raw = llm.generate([CONVERSATION, codec.encode_chat(CONVERSATION)], params)
    assert chat.token_ids == raw.token_ids
    assert raw.text == codec.decode(raw.token_ids)


def test_a_long_conversation_is_not_even_counted(engine, codec):
    """The library takes time with the square of a word's length; a raw prompt is not its business."""
    intake = Intake(read_config(engine), codec)
    assert intake.encode_unserved(CONVERSATION) == codec.encode_chat(CONVERSATION)
    with pytest.raises(LongPromptError, match="more than 255 tokens; the limit is 255"):
        intake.encode_unserved([{"role": "user", "content": "a" * 4_000_000}])
    assert len(intake.encode_unserved("a" * 1000)) == 1000


FORMS = {
    "json_schema": ({"properties": {"city": {"type": "string"}}, "required": ["city"]}, '{"city": "Zürich"}', "Riga"),
    "json_object": (None, '{\n  "a": 1\n}', "[1]"),
    "regex": ("a/b\\/c\n[0-9]+", "a/b/c\n42", "a/b/c 4"),
    "choice": (["yes", "n/o"], "n/o", "non"),
}


@pytest.fixture(scope="module")
def grammars(codec) -> Grammars:
    return Grammars(codec.backend, 201088, [200002, 200012])


@pytest.mark.principal("json_schema")
@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_the_final_channel_alone_is_held_to_a_form(kind, grammars, encoding):
    value, right, wrong = FORMS[kind]
    grammar = grammars.compile("grammar", harmony_form(kind, value))
    thought = "<|channel|>analysis<|message|>Which <one>?\n{<|end|><|start|>assistant"
    for head in ("<|channel|>final<|message|>", 2 * thought + "<|channel|>final <|constrain|>json<|message|>"):
        ids = tokens(encoding, head + right + "<|return|>")
        assert grammar.plan(ids).drafts == ids
        assert len(grammar.plan(ids).masks) == (1 + len(ids)) * 201088 // 8
        ids = tokens(encoding, head + wrong + "<|return|>")
        assert grammar.plan(ids).drafts != ids
    for ids in (encoding.encode("Hi"), tokens(encoding, "<|channel|>analysis<|message|>Hi<|return|>")):
        assert grammar.plan(ids).drafts != ids


CITY = {"type": "object", "properties": {"city": {"enum": ["Riga"]}}, "required": ["city"]}
CALLED = '<|message|>{"city": "Riga"}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Which <one>?\n{<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.slow
def test_calls_and_the_final_channel_beside_them_are_held_to_their_forms(grammars, codec, encoding):
    calls = [
        f"{THOUGHT}{THOUGHT} to=functions.weather<|channel|>commentary <|constrain|>json{CALLED}",
        f" to=functions.weather<|channel|>commentary{CALLED}",
        f"<|channel|>commentary to=functions.weather <|constrain|>json{CALLED}",
    ]
    for call in calls:  # each is read as one
        parser = codec.parser([], {"weather": CITY})
        parts = [part for part in parser.read("", tokens(encoding, call)) if part.kind != "thinking"]
        assert parts[0] == Part("call", "weather") and {part.kind for part in parts[1:]} == {"arguments"}
        assert "".join(part.text for part in parts[1:]) == '{"city": "Riga"}'
    wrong = [call.replace("Riga", "Rome") for call in calls] + [call.replace("weather", "news") for call in calls]
    wrong += ["Hi", f"{THOUGHT}<|return|>", f"<|channel|>analysis to=functions.weather code{CALLED}"]
    word = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    said, free = FINAL + "{}<|return|>", FINAL + "So. {<|return|>"
    callees = [Callee("weather", CITY, strict=True), Callee("weather_tomorrow", CITY, strict=True)]
    for must, form, more in (
        (True, None, []),
        (True, form_of("json_object", None), [said, THOUGHT + said]),
        (False, None, [said, free, THOUGHT + word + free, word + THOUGHT + word + calls[0]]),
    ):
        grammar = grammars.compile("grammar", call_grammar("harmony", callees, must, form=form))
        for text in [*calls, *more, *wrong, *({said, free, word + calls[0], word + free} - {*more} if must else ())]:
            ids = tokens(encoding, text)
            assert (grammar.plan(ids).drafts == ids) == (text in calls + more), text


def test_a_grammar_of_ones_own_has_no_place_in_harmony(codec):
    with pytest.raises(RequestError, match="structured: grammar: not where a reply has calls"):
        harmony_form("grammar", "start: /a/")


def test_a_chat_is_held_to_its_form_and_a_raw_prompt_to_nothing_else(engine, codec, encoding):
    intake = Intake(read_config(engine).model_copy(update={"stop_token_ids": (200002,)}), codec)
    params = SamplingParams(structured=Structured(kind="choice", value=["yes", "no"]))
    channel, answer = tokens(encoding, "<|channel|>"), tokens(encoding, "yes")
    for prompt, begins, other in ((CONVERSATION, channel, answer), ([5, 6], answer, channel)):
        grammar = intake.sequence(prompt, params).grammar
        assert grammar.plan(begins).drafts == begins
        assert grammar.plan(other).drafts != other
    with pytest.raises(RequestError, match="structured: #: Invalid type: strin"):
        intake.sequence(
            CONVERSATION, SamplingParams(structured=Structured(kind="json_schema", value={"type": "strin"}))
        )


@pytest.mark.slow
def test_the_openai_api_says_the_final_channel(engine, encoding, monkeypatch):
    pytest.importorskip("fastapi", reason="the gateway needs the serving extra")
    from fastapi.testclient import TestClient

    from trtllm_dflash.serving.gateway import GatewaySettings, create_app

    ids = tokens(encoding, REPLIES["thinking, then an answer"][0])
    stops, sent, forms = [], [], []

    async def replies(self, request: TokenRequest) -> AsyncIterator[Piece]:
        stops.append(request.params.stop)
        forms.append(request.params.structured)
        for i in range(0, len(ids), 3):
            last = i + 3 >= len(ids)
            sent.append(i)
            new = ids[i : i + 3]
            yield Piece("as the engine has it", len(new), new, 0, 0, [], "stop" if last else "")

    monkeypatch.setattr("trtllm_dflash.serving.client.TritonClient.stream", replies)
    with TestClient(create_app(GatewaySettings(engine=engine))) as client:
        asked = {"model": "gpt-oss", "messages": CONVERSATION}
        answer = client.post("/v1/chat/completions", json=asked).json()
        assert answer["choices"][0]["message"]["content"] == "Because 🦊 é."
        streamed = client.post("/v1/chat/completions", json={**asked, "stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "Because 🦊 é."
        client.post("/v1/chat/completions", json={**asked, "response_format": {"type": "json_object"}})
        assert forms[-1] == Structured(kind="grammar", value=harmony_form("json_object", None))
        own = {"structured_outputs": {"grammar": "start: /a/"}}
        refused = client.post("/v1/chat/completions", json={**asked, **own})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("structured_outputs: grammar: not where a reply has calls")
        plain = client.post("/v1/completions", json={"model": "gpt-oss", "prompt": [1, 2]}).json()
        assert plain["choices"][0]["text"].startswith("as the engine has it")
        # A stop string is looked for in what the reader sees, not in the thinking; the server need not go on after it.
        sent.clear()
        for stream in (False, True):
            answer = client.post("/v1/chat/completions", json={**asked, "stop": ["use", "asks"], "stream": stream})
            if stream:
                events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                assert answer.text.rstrip().endswith("data: [DONE]")
            else:
                events = [answer.json()]
            said = [choice["delta" if stream else "message"] for event in events for choice in event["choices"]]
            assert "".join(part.get("content") or "" for part in said) == "Beca"
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert stops[-2:] == [(), ()]
        assert max(sent) + 3 < len(ids)


@pytest.mark.slow
def test_the_openai_api_hands_on_harmonys_calls(engine, codec, encoding, monkeypatch):
    pytest.importorskip("fastapi", reason="the gateway needs the serving extra")
    from fastapi.testclient import TestClient

    from trtllm_dflash.serving.gateway import GatewaySettings, create_app

    written = (
        "<|channel|>analysis<|message|>A call.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Zürich"}<|call|>'
    )
    ids, prompts, forms = tokens(encoding, written), [], []

    async def replies(self, request: TokenRequest) -> AsyncIterator[Piece]:
        forms.append(request.params.structured)
        prompts.append(codec.backend.decode(request.token_ids, skip_special_tokens=False))
        for token in ids[:-1]:
            yield Piece("", 1, [token], 0, 0, [], "")
        yield Piece("", 1, ids[-1:], 0, 0, [], "stop")

    monkeypatch.setattr("trtllm_dflash.serving.client.TritonClient.stream", replies)
    asked = {"model": "gpt-oss", "messages": CONVERSATION[1:2], "tools": [WEATHER], "reasoning_effort": "low"}
    with TestClient(create_app(GatewaySettings(engine=engine))) as client:
        (choice,) = client.post("/v1/chat/completions", json=asked).json()["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
        assert message["reasoning_content"] == "A call."
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        again = [*asked["messages"], {key: value for key, value in message.items() if value is not None}, result]
        client.post("/v1/chat/completions", json={**asked, "messages": again})
        for more, must, form in (
            ({"tool_choice": "required"}, True, None),
            ({"response_format": {"type": "json_object"}}, True, form_of("json_object", None)),
            ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, False, None),
        ):
            assert client.post("/v1/chat/completions", json={**asked, **more}).status_code == 200
            callee = Callee("weather", WEATHER["function"]["parameters"], strict="tools" in more)
            source = call_grammar("harmony", [callee], must, form=form)
            assert forms[-1] == Structured(kind="grammar", value=source)
        for path, param, more in (
            ("chat/completions", "reasoning_effort", {"reasoning_effort": "minimal"}),
            ("responses", "reasoning.effort", {"reasoning": {"effort": "none"}}),
        ):
            body = {"model": "gpt-oss", "input": "a"} | more if path == "responses" else asked | more
            error = client.post(f"/v1/{path}", json=body).json()["error"]
            assert error["param"] == param and "is none of low, medium, high" in error["message"]
    assert "Reasoning: low" in prompts[0] and "type weather = (_: {" in prompts[0]
    assert prompts[1].endswith(
        "<|start|>assistant<|channel|>analysis<|message|>A call.<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary <|constrain|>json<|message|>{"city": "Zürich"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant"
    )
