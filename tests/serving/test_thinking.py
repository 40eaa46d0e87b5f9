"""Thinking of hybrids through the OpenAI API: prompts that end inside it, and replies whole and streamed."""

import json
from contextlib import contextmanager

import openai
import pytest

from tests.hybrid_chats import CHATS, THINKERS, make_chat_engine
from tests.serving.fake_triton import fake_triton, response
from tests.serving.test_gateway import Reply, client, gateway
from tests.serving.test_tools import ASKED, TOOLS, pieces
from tests.test_reply_parsers import written
from trtllm_dflash.text.tokenizer import TextCodec

pytestmark = pytest.mark.slow

OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
CALL = written("qwen3-coder", "double", {"x": 4})
#: What a client sends, and whether the reply begins inside its thinking.
WAYS = {
    "by itself": ({}, True),
    "on": ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True),
    "effort": ({"reasoning_effort": "high"}, True),
    "off": ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
    "no effort": ({"reasoning_effort": "none"}, False),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return {layout: make_chat_engine(tmp_path_factory.mktemp("chats"), layout) for layout in CHATS}


class Told:
    """A chat's reply, whole or put together from its stream."""

    def __init__(self, url, stream, **asked):
        create = client(url).chat.completions.create
        told = create(model="small", messages=ASKED, stream=stream, **asked)
        self.order = []  # what came after what
        if stream:
            choices = [chunk.choices[0] for chunk in told if chunk.choices]
            said = [choice.delta for choice in choices]
            self.reason = choices[-1].finish_reason
        else:
            said, self.reason = [told.choices[0].message], told.choices[0].finish_reason
            self.thinking_tokens = told.usage.completion_tokens_details.reasoning_tokens
        self.thinking, self.content, self.calls, self.arguments = "", "", [], ""
        for each in said:
            thought, names = getattr(each, "reasoning_content", None), each.tool_calls or []
            assert thought == getattr(each, "reasoning", None)
            self.thinking += thought or ""
            self.content += each.content or ""
            self.calls += [call.function.name for call in names if call.function.name]
            self.arguments += "".join(call.function.arguments or "" for call in names)
            for kind, came in (("thinking", thought), ("content", each.content), ("call", names)):
                if came and kind not in self.order:
                    self.order.append(kind)


@contextmanager
def replying(engine, text, reason="stop"):
    """A gateway to an engine that always writes this text; its URL, and the prompts that it gets."""
    codec, prompts = TextCodec.load(engine, {}), []

    def script(inputs):
        prompts.append(codec.backend.decode(inputs["input_ids"], skip_special_tokens=False))
        *begun, (piece, ids) = pieces(text, codec)
        yield from (response(piece, len(ids), ids=ids) for piece, ids in begun)
        yield response(piece, len(ids), reason, ids=ids)

    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        yield url, prompts


@pytest.mark.principal("qwen3_5-by itself-False", "qwen3_5-by itself-True", "qwen3_5-off-False", "qwen3_5-off-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", THINKERS)
def test_thinking_is_apart_where_the_prompt_opened_it(engines, layout, way, stream):
    asked, thinks = WAYS[way]
    thought = "Hm, é <b>.\n\nSo" if thinks else ""
    text = (thought + "\n</think>\n\n" if thinks else "") + "Yes,\n\nit is <i>8</i>."
    with replying(engines[layout], text) as (url, prompts):
        told = Told(url, stream, **asked)
    assert prompts[0].endswith("<|im_start|>assistant\n" + (OPENED if thinks else CLOSED))
    assert (told.thinking, told.content, told.reason) == (thought, "Yes,\n\nit is <i>8</i>.", "stop")
    assert told.order == (["thinking", "content"] if thinks else ["content"])
    assert stream or (told.thinking_tokens > 0) == thinks


@pytest.mark.principal("qwen3_5-on-True", "qwen3_5-off-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["on", "off"])
@pytest.mark.parametrize("layout", THINKERS)
def test_a_reply_that_is_cut_off_is_all_thinking_or_all_content(engines, layout, way, stream):
    asked, thinks = WAYS[way]
    with replying(engines[layout], "Hm, é", "length") as (url, _):
        told = Told(url, stream, **asked)
    assert (told.thinking, told.content) == (("Hm, é", "") if thinks else ("", "Hm, é"))
    assert told.reason == "length"


@pytest.mark.principal("qwen3_5-on-False", "qwen3_5-on-True", "qwen3_5-off-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["on", "off"])
@pytest.mark.parametrize("layout", THINKERS)
def test_a_tool_is_called_behind_thinking_closed_or_left_open(engines, layout, way, stream):
    asked, thinks = WAYS[way]
    for between in ("\n</think>\n\n", "\n") if thinks else ("",):
        thought = "I double <it>." if thinks else ""
        with replying(engines[layout], thought + between + CALL) as (url, prompts):
            told = Told(url, stream, tools=TOOLS, **asked)
        assert '"name": "double"' in prompts[0]
        assert (told.thinking, told.content, told.reason) == (thought, "", "tool_calls")
        assert (told.calls, told.arguments) == (["double"], '{"x": 4}')
        assert told.order == (["thinking", "call"] if thinks else ["call"])


@pytest.mark.parametrize("stream", [False, True])
def test_coder_next_never_thinks(engines, stream):
    """Whatever the variables are, for its template has none."""
    text = f"I double.\n\n{CALL}"
    with replying(engines["qwen3_next"], text) as (url, prompts):
        for way in ("by itself", "on", "off", "no effort"):
            told = Told(url, stream, tools=TOOLS, **WAYS[way][0])
            assert (told.thinking, told.content, told.calls) == ("", "I double.", ["double"])
        assert len(set(prompts)) == 1 and prompts[0].endswith("<|im_start|>assistant\n")
        with pytest.raises(openai.BadRequestError, match="reasoning_effort: only none"):
            Told(url, stream, **WAYS["effort"][0])


@pytest.mark.parametrize("layout", CHATS)
def test_a_response_has_an_item_of_its_thinking(engines, layout):
    thinks = layout in THINKERS
    for effort, opened in (("high", thinks), ("none", False)) if thinks else (("none", False),):
        text = ("Hm.\n</think>\n\n" if opened else "") + "Yes."
        with replying(engines[layout], text) as (url, _):
            arguments = dict(model="small", input="Go.", reasoning={"effort": effort})
            whole = client(url).responses.create(**arguments)
            *_, last = client(url).responses.create(**arguments, stream=True)
        for told in (whole, last.response):
            assert [item.type for item in told.output] == ["reasoning"] * opened + ["message"]
            assert told.output_text == "Yes."
            assert [part.text for part in told.output[0].content] == ["Hm." if opened else "Yes."]


def test_a_form_needs_thinking_off(engines):
    form = {"response_format": {"type": "json_object"}}
    with replying(engines["qwen3_5"], '{"x": 8}') as (url, _):
        with pytest.raises(openai.BadRequestError, match="response_format: the reply would begin with thinking"):
            Told(url, False, **form, **WAYS["on"][0])
        assert Told(url, False, **form, **WAYS["off"][0]).content == '{"x": 8}'


def test_a_prompt_s_tokens_are_told_with_and_without_thinking(engines):
    codec = TextCodec.load(engines["qwen3_5"], {})
    with replying(engines["qwen3_5"], "") as (url, _):
        for arguments in ({"enable_thinking": True}, {"enable_thinking": False}):
            told = Reply(url, "/tokenize", json.dumps({"messages": ASKED, "chat_template_kwargs": arguments})).json()
            assert told["tokens"] == codec.encode_chat(ASKED, arguments)
