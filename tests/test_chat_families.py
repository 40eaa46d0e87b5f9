"""Chats of Gemma 4, MiniMax-M2 and Kimi-K2.5: prompts by their templates' syntax, and replies by their tokens.

The templates are our own, as short as they can be, in the syntax of the published ones.
"""

import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.conftest import TINY
from tests.test_reply_parsers import SCHEMAS, calls_of, text_of, together
from trtllm_dflash.text.reply.formats import ChatFormat, markers_of
from trtllm_dflash.text.reply.parts import Part
from trtllm_dflash.text.tokenizer import TextCodec

GEMMA = """{%- macro value(v) -%}
{%- if v is string -%}<|"|>{{ v }}<|"|>
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}
{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif v is sequence -%}[{% for w in v %}{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
{%- if tools or enable_thinking -%}
{{ '<|turn>system\\n' }}{{ '<|think|>\\n' if enable_thinking }}
{%- for tool in tools or [] -%}<|tool>declaration:{{ tool.function.name }}<tool|>{%- endfor -%}{{ '<turn|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.tool_calls and message.reasoning_content -%}
{{ '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '<|tool_call>call:' + call.function.name }}{{ value(call.function.arguments) }}{{ '<tool_call|>' }}
{%- endfor -%}
{%- for response in message.tool_responses or [] -%}
{{ '<|tool_response>response:' + response.name + '{value:' }}{{ value(response.response) }}{{ '}<tool_response|>' }}
{%- endfor -%}
{{ message.content }}{{ '<turn|>\\n' if not message.tool_responses }}
{%- endfor -%}
{{ '<|turn>model\\n' if not messages[-1].tool_responses }}
{{- '<|channel>thought\\n<channel|>' if not enable_thinking }}"""

MINIMAX = """{%- set opening, closing = '<minimax:tool_call>', '</minimax:tool_call>' -%}
{{ ']~!b[]~b]system\\n' }}
{%- for tool in tools or [] -%}<tool>{{ tool.function | tojson }}</tool>{%- endfor -%}
{{ '[e~[\\n' }}
{%- for message in messages -%}
{{ ']~b]' + ('ai' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.reasoning_content -%}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}
{{ '<response>' + message.content + '</response>' if message.role == 'tool' else message.content }}
{%- if message.tool_calls -%}
{{ '\\n' + opening + '\\n' }}
{%- for call in message.tool_calls -%}
{{ '<invoke name="' + call.function.name + '">\\n' }}
{%- for k, v in call.function.arguments | items -%}
{{ '<parameter name="' + k + '">' }}{{ v if v is string else v | tojson }}{{ '</parameter>\\n' }}
{%- endfor -%}
{{ '</invoke>\\n' }}
{%- endfor -%}
{{ closing }}
{%- endif -%}
{{ '[e~[\\n' }}
{%- endfor -%}
{{ ']~b]ai\\n<think>\\n' }}"""

KIMI = """{%- if tools_ts_str -%}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str }}<|im_end|>
{%- elif tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_assistant|>assistant<|im_middle|><think>{{ message.reasoning_content }}</think>
{%- else -%}<|im_{{ 'user' if message.role == 'user' else 'system' }}|>{{ message.role }}<|im_middle|>
{%- endif -%}
{%- if message.role == 'tool' -%}{{ '## Return of ' + message.tool_call_id + '\\n' }}{%- endif -%}
{{ message.content }}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endfor -%}
<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}"""

TEMPLATES = {"gemma4": GEMMA, "minimax-m2": MINIMAX, "kimi-k2": KIMI}
#: Other special tokens that a reply may have in it: what ends it.
ENDS = {"gemma4": ("<turn|>", "<|tool_response>"), "minimax-m2": ("[e~[",), "kimi-k2": ("<|im_end|>",)}
#: Gemma's markers are special tokens. Kimi's are where its own code decodes, and MiniMax's are not.
WAYS = [("gemma4", True), ("minimax-m2", False), ("kimi-k2", True), ("kimi-k2", False)]


@pytest.fixture(scope="module")
def codec_of(tmp_path_factory):
    made: dict[tuple[ChatFormat, bool], TextCodec] = {}

    def make(chat_format: ChatFormat, special: bool) -> TextCodec:
        folder: Path = tmp_path_factory.mktemp(chat_format)
        shutil.copyfile(TINY / "target" / "tokenizer_config.json", folder / "tokenizer_config.json")
        tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in ENDS[chat_format]])
        tokenizer.add_tokens(
            [AddedToken(marker, special=special, normalized=False) for marker in markers_of(chat_format)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(TEMPLATES[chat_format])
        codec = TextCodec.load(folder, {})
        assert codec is not None
        return codec

    def of(chat_format: ChatFormat, special: bool) -> TextCodec:
        if (chat_format, special) not in made:
            made[chat_format, special] = make(chat_format, special)
        return made[chat_format, special]

    return of


def called(*calls, **more):
    functions = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": functions, **more}


def read(codec: TextCodec, prompt: list[int], reply: str, schemas=SCHEMAS) -> list[Part]:
    """The parts of a reply whose tokens come one at a time, those of one kind in a row joined."""
    stream, parser = codec.text(), codec.parser(prompt, schemas)
    ids = codec.encode_words(reply)
    parts: list[Part] = []
    for token in ids:
        stream.push(token)
        parts += parser.read(stream.release(), [token])
    stream.finish()
    parts += [*parser.read(stream.release(), []), *parser.finish()]
    joined: list[Part] = []
    for part in parts:
        if joined and part.kind == joined[-1].kind != "call":
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


CALLS = [
    ("write", {"text": 'é 🦊 "}],{<\n', "items": [1, "a", [True, {"b": None}]], "options": {"c": {"d": [-1.5, ""]}}}),
    ("now", {}),
    ("write", {"count": 7, "sure": False}),
]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
USER = {"role": "user", "content": "Go."}


@pytest.mark.parametrize(("chat_format", "special"), WAYS)
def test_calls_thinking_and_content_come_out_of_a_reply_s_tokens(chat_format, special, codec_of):
    codec = codec_of(chat_format, special)
    assert codec.chat_format == chat_format
    assert set(codec.marker_ids) == (set(markers_of(chat_format)) if special else set())
    thinks = {"enable_thinking": True} if chat_format == "gemma4" else {}
    prompt = codec.encode_chat([USER], thinks, tools=TOOLS)
    assert codec.begins_with_thinking(prompt) == (chat_format != "gemma4")
    thought = "<|channel>thought\nHm é.\n<channel|>" if chat_format == "gemma4" else "Hm é.</think>"
    reply = f"{thought}Two:{together(chat_format, CALLS)}{ENDS[chat_format][0]}"
    parts = read(codec, prompt, reply)
    assert [part.text for part in parts[:2]] == ["Hm é.", "Two:"]
    assert calls_of(parts) == CALLS
    assert {part.kind for part in parts} == {"thinking", "content", "call", "arguments"}
    # Without tools the thinking alone is set apart; the rest stands as it was written, but for what ends it.
    parts = read(codec, prompt, reply, None)
    assert text_of(parts, "thinking") == "Hm é."
    assert text_of(parts) == "Two:" + together(chat_format, CALLS)


@pytest.mark.parametrize(("chat_format", "special"), WAYS)
def test_what_the_template_writes_of_a_call_is_read_as_that_call(chat_format, special, codec_of):
    codec = codec_of(chat_format, special)
    result = {"role": "tool", "content": "done", "tool_call_id": "call_1"}
    prompt = codec.chat_text([USER, called(*CALLS[:2], reasoning_content="Both."), result, USER], tools=TOOLS)
    begin = prompt.index({"gemma4": "<|channel>", "minimax-m2": "<think>", "kimi-k2": "<think>"}[chat_format])
    parts = read(codec, [], prompt[begin : prompt.index("done")])
    assert parts[0] == Part("thinking", "Both.")
    assert calls_of(parts[:5]) == CALLS[:2]
    shown = {
        "gemma4": '<tool_call|><|tool_response>response:now{value:<|"|>done<|"|>}<tool_response|>',
        "minimax-m2": "</minimax:tool_call>[e~[\n]~b]tool\n<response>done</response>",
        "kimi-k2": "<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.now:1\ndone",
    }
    assert shown[chat_format] in prompt
    assert chat_format != "kimi-k2" or "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}" in prompt


def test_thinking_is_turned_off_by_each_template_s_own_variable(codec_of):
    gemma, minimax, kimi = (codec_of(*way) for way in WAYS[:3])
    assert [codec.chat_variables for codec in (gemma, minimax, kimi)] == [{"enable_thinking"}, set(), {"thinking"}]
    assert gemma.chat_text([USER]).endswith("<|turn>model\n<|channel>thought\n<channel|>")
    assert gemma.chat_text([USER], {"enable_thinking": True}).endswith("<|turn>model\n")
    assert minimax.chat_text([USER]).endswith("]~b]ai\n<think>\n")
    for thinking, begins in ((True, True), (False, False)):
        assert kimi.begins_with_thinking(kimi.encode_chat([USER], {"thinking": thinking})) == begins
        asked = gemma.encode_chat([USER], {"enable_thinking": thinking})
        assert gemma.thinks_first(asked) == begins and not gemma.begins_with_thinking(asked)


def test_special_tokens_that_mark_no_part_are_no_text(codec_of):
    codec = codec_of("gemma4", True)
    ids = codec.encode_words("a<|channel>b<turn|>c")
    assert codec.decode(ids) == "a<|channel>bc"
    stream = codec.reply()
    for token in ids:
        stream.push(token)
    stream.finish()
    assert stream.text == "a<|channel>bc"


def test_kimis_template_gets_functions_as_types(codec_of):
    leaf = {"type": "object", "properties": {"at": {"enum": [1, "b", None]}}, "description": "Two\n\nlines."}
    schema = {
        "type": "object",
        "properties": {
            "zone": {"type": ["string", "null"], "description": "Where."},
            "name": {"type": "string", "minLength": 2, "pattern": "a+", "default": "é"},
            "list": {"type": "array", "items": {"type": "integer", "maximum": 3}, "maxItems": 2},
            "any": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "array"}]},
            "inner": {"type": "object", "properties": {"on": {"type": "boolean", "default": False}}},
        },
        "required": ["zone"],
        "additionalProperties": False,
        "$defs": {"leaf": leaf},
    }
    tools = [
        {"type": "function", "function": {"name": "find", "description": "Finds it.", "parameters": schema}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]
    kimi = codec_of("kimi-k2", True)
    text = kimi.chat_text([USER], tools=tools)
    assert text.startswith("<|im_system|>tool_declare<|im_middle|>" + TYPES + "<|im_end|>")
    tools[1]["function"]["parameters"] = {"properties": {"a": {"not": {}}}}  # which has no such form
    assert '"name": "now"' in kimi.chat_text([USER], tools=tools)
    assert "tool_declare" not in kimi.chat_text([USER])


TYPES = """# Tools

## functions
namespace functions {
// Two

// lines.
interface leaf {
  at?: 1 | "b" | None
}
// Finds it.
type find = (_: {
  // Where.
  zone: string | null,
  any?: leaf | Array<any>,
  inner?: {
    // Default: False
    on?: boolean
  },
  // maxItems: 2
  list?: Array<
    // maximum: 3
    number
  >,
  // minLength: 2, pattern: a+
  // Default: "é"
  name?: string,
  [k: string]: never
}) => any;
type now = (_: {}) => any;
}
"""
