"""Chats of hybrids: prompts by templates in the shape of Qwen3.5's and Qwen3-Coder-Next's, thinking on and off."""

import json
import shutil

import pytest

from tests.conftest import HYBRID, succeeds
from tests.hybrid_chats import CHATS, QWEN35, THINKERS, make_chat_engine
from tests.test_chat_families import CALLS, TOOLS, USER, called, read
from tests.test_reply_parsers import calls_of, text_of, together
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.errors import RequestError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.text.reply.parts import Part
from trtllm_dflash.text.tokenizer import TextCodec

ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
ASSISTANT, OPENED, CLOSED = "<|im_start|>assistant\n", "<think>\n", "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def codec_of(tmp_path_factory):
    engines = {layout: make_chat_engine(tmp_path_factory.mktemp("chats"), layout) for layout in CHATS}
    return {layout: TextCodec.load(engine, {}) for layout, engine in engines.items()}


@pytest.mark.parametrize("layout", CHATS)
def test_thinking_is_opened_closed_or_not_there_at_all(layout, codec_of):
    codec = codec_of[layout]
    thinks = layout in THINKERS
    assert codec.chat_format == "qwen3-coder" and not codec.marker_ids
    assert codec.chat_variables == ({"enable_thinking"} if thinks else set())
    for arguments, end in (({}, OPENED), (ON, OPENED), (OFF, CLOSED)):
        prompt = codec.chat_text([{"role": "system", "content": "Be brief."}, USER], arguments)
        asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n" + ASSISTANT
        assert prompt == asked + (end if thinks else "")
        ids = codec.encode_chat([USER], arguments)
        assert codec.begins_with_thinking(ids) == codec.thinks_first(ids) == (thinks and end == OPENED)


@pytest.mark.parametrize("layout", CHATS)
@pytest.mark.parametrize("arguments", [ON, OFF], ids=["on", "off"])
def test_calls_come_behind_thinking_and_without_any(layout, arguments, codec_of):
    codec = codec_of[layout]
    prompt = codec.encode_chat([USER], arguments, tools=TOOLS)
    thought = "I may write <tool_call>, é.\n</think>\n\n" if codec.begins_with_thinking(prompt) else ""
    parts = read(codec, prompt, f"{thought}Two:\n\n{together('qwen3-coder', CALLS)}<|im_end|>")
    assert text_of(parts, "thinking") == ("I may write <tool_call>, é." if thought else "")
    assert text_of(parts) == "Two:"
    assert calls_of(parts) == CALLS


@pytest.mark.parametrize("layout", THINKERS)
def test_a_reply_that_ends_in_its_thinking_has_no_content(layout, codec_of):
    codec = codec_of[layout]
    thinking, plain = (codec.encode_chat([USER], arguments) for arguments in (ON, OFF))
    assert read(codec, thinking, "Hm, é", None) == [Part("thinking", "Hm, é")]
    assert read(codec, plain, "Hm, é", None) == [Part("content", "Hm, é")]
    # A call is never lost in thinking that the model forgot to close.
    parts = read(codec, thinking, "Hm.\n" + together("qwen3-coder", CALLS[1:2]))
    assert parts == [Part("thinking", "Hm."), Part("call", "now"), Part("arguments", "{}")]


@pytest.mark.parametrize("layout", THINKERS)
@pytest.mark.parametrize("arguments", [ON, OFF], ids=["on", "off"])
def test_what_a_tool_answers_goes_on_behind_the_prompt_and_its_reply(layout, arguments, codec_of):
    """So that nothing is read anew; and the parts of the reply are those that are sent back."""
    codec = codec_of[layout]
    thought = "Both.\n</think>\n\n" if arguments == ON else ""
    reply = f"{thought}Two:\n\n{together('qwen3-coder', CALLS[:2])}<|im_end|>"
    parts = read(codec, codec.encode_chat([USER], arguments, tools=TOOLS), reply)
    said = called(*calls_of(parts), content=text_of(parts))
    if arguments == ON:
        said["reasoning_content"] = text_of(parts, "thinking")
    answer = {"role": "tool", "content": "done", "tool_call_id": "call_1"}
    first, second = (codec.chat_text(talk, arguments, TOOLS) for talk in ([USER], [USER, said, answer]))
    assert second.startswith(first + reply + "\n<|im_start|>user\n<tool_response>\ndone\n</tool_response>")
    # A further question's prompt has no earlier thinking.
    third = codec.chat_text([USER, said, answer, USER], arguments, TOOLS)
    assert third.removesuffix(OPENED).removesuffix(CLOSED).count("<think>") == 0


@pytest.mark.parametrize("layout", THINKERS)
def test_what_the_template_refuses_is_the_client_s_to_know(layout, codec_of):
    with pytest.raises(RequestError, match="the chat template refuses these messages: there is no question"):
        codec_of[layout].chat_text([{"role": "assistant", "content": "Yes."}])


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The shipped hybrid's target with a template that thinks; its tokenizer spells `<think>` out."""
    target = shutil.copytree(HYBRID / "target", tmp_path_factory.mktemp("thinker") / "target")
    (target / "chat_template.jinja").write_text(QWEN35)
    return target


def test_an_engine_s_arguments_say_whether_conversations_think(thinker):
    params = SamplingParams(max_tokens=24)
    story = [{"role": "user", "content": read_prompts(1)["story"][0]}]
    for arguments, end in ((None, OPENED), (OFF, CLOSED)):
        values = {"precision": "fp32", "device": "cpu", "max_seq_len": 512, "chat_arguments": arguments}
        with LLM.from_pretrained(thinker, HYBRID / "drafter", **values) as llm:
            prompt = llm.codec.chat_text(story)
            assert prompt.endswith(ASSISTANT + end)
            assert llm.codec.begins_with_thinking(llm.encode(story)) == (end == OPENED)
            drafted, same = llm.generate([story, prompt], params)
            (plain,) = llm.generate([story], params, draft=False)
            assert drafted.token_ids == same.token_ids == plain.token_ids


def test_a_build_s_arguments_reach_generate(thinker, tmp_path):
    built = "build", "--target", thinker, "--drafter", HYBRID / "drafter", "--precision", "fp32"
    flags = "--backend", "torch", "--max-batch", 1, "--max-seq-len", 512
    succeeds(*built, *flags, "--set", "chat-arguments={enable_thinking: false}", "--output", tmp_path / "engine")
    asked = "generate", "--engine", tmp_path / "engine", "--device", "cpu", "--max-tokens", 12, "--json"
    raw = "<|im_start|>user\nGo.<|im_end|>\n" + ASSISTANT + CLOSED
    chat, same = (succeeds(*asked, *prompt) for prompt in (("--prompt", "Go."), ("--raw", "--prompt", raw)))
    assert json.loads(chat)["token_ids"] == json.loads(same)["token_ids"]
