"""The OpenAI API tells how tokens are chosen, and says it: log-probabilities, penalties, forms, the best of several."""

import json

import numpy as np
import openai
import pytest

from tests.serving.fake_triton import Refuse, fake_triton, response
from tests.serving.test_gateway import STORY, Reply, client, gateway
from trtllm_dflash.runtime.request import SamplingParams, TokenLogprobs
from trtllm_dflash.serving.client import Piece, TokenRequest, _inputs
from trtllm_dflash.serving.openai import replies
from trtllm_dflash.serving.openai.jobs import Choice
from trtllm_dflash.serving.openai.logprobs import CompletionLogprobs, Scored
from trtllm_dflash.text.reply.parts import Part, PlainParser
from trtllm_dflash.text.reply.thinking import ThinkingParser
from trtllm_dflash.text.token_text import TokenTexts

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def api(server):
    with gateway(server.engine, server.grpc_url, model_name="tiny") as url:
        yield client(url)


@pytest.fixture(scope="module")
def texts(tiny):
    return TokenTexts(tiny.codec.backend, tiny.codec.hidden_ids)


def close(values):
    return pytest.approx(values, abs=1e-4)


def test_a_chat_tells_log_probabilities_whole_and_streamed(api, tiny, texts):
    (expected,) = tiny.generate([STORY], SamplingParams(max_tokens=40, logprobs=3))
    arguments = dict(model="tiny", messages=STORY, temperature=0, max_tokens=40, logprobs=True, top_logprobs=3)
    whole = api.chat.completions.create(**arguments).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in api.chat.completions.create(**arguments, stream=True)]
    streamed = [one for chunk in chunks if chunk.logprobs is not None for one in chunk.logprobs.content]
    assert streamed == whole
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected.text
    assert b"".join(bytes(one.bytes) for one in whole).decode() == expected.text
    assert [one.token for one in whole] == [texts.text(token) for token in expected.token_ids[: len(whole)]]
    assert [one.logprob for one in whole] == close([its.logprob for its in expected.logprobs[: len(whole)]])
    for one, its in zip(whole, expected.logprobs, strict=False):
        assert [top.token for top in one.top_logprobs] == [texts.text(token) for token, _ in its.top_logprobs]
        assert one.top_logprobs[0].logprob == close(one.logprob)  # greedy
    arguments["top_logprobs"] = 0
    assert all(one.top_logprobs == [] for one in api.chat.completions.create(**arguments).choices[0].logprobs.content)


def test_a_completion_repeats_its_prompt_with_log_probabilities(api, tiny):
    """As evaluations ask for them: `echo` with `logprobs`."""
    (expected,) = tiny.generate([PROMPT], SamplingParams(max_tokens=6, logprobs=1, prompt_logprobs=1))
    arguments = dict(model="tiny", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=1)
    choice = api.completions.create(**arguments, echo=True).choices[0]
    hidden = api.completions.create(**{**arguments, "prompt": [1], "max_tokens": 2}, echo=True).choices[0]
    assert len(hidden.logprobs.tokens) == 3 and hidden.logprobs.token_logprobs[0] is None
    assert choice.text == PROMPT + expected.text
    prompt = [None, *(its.logprob for its in expected.prompt_logprobs[1:])]
    found = choice.logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert expected.finish_reason == "stop"  # the token that ends the reply is no part of it
    assert found.token_logprobs[1:] == close(prompt[1:] + [its.logprob for its in expected.logprobs[:-1]])
    for token, start, end in zip(found.tokens, found.text_offset, [*found.text_offset[1:], None], strict=True):
        assert choice.text[start:end] == token
    chunks = [chunk.choices[0] for chunk in api.completions.create(**arguments, stream=True)]
    streamed = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    alone = api.completions.create(**arguments).choices[0].logprobs
    assert [at for part in streamed for at in part.text_offset] == alone.text_offset
    assert [logprob for part in streamed for logprob in part.token_logprobs] == alone.token_logprobs
    prompts = api.completions.create(**arguments, extra_body={"prompt_logprobs": 0}).choices[0].prompt_logprobs
    assert [each and next(iter(each.values()))["logprob"] for each in prompts[1:]] == close(prompt[1:])


@pytest.mark.parametrize("prompt", [PROMPT, [5, 6, 7], [1]])
def test_a_prompt_is_scored_without_a_reply(api, tiny, prompt):
    """As evaluations ask for it: `echo` with `max_tokens: 0`."""
    (expected,) = tiny.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=2))
    ids = tiny.encode(prompt)
    text = prompt if isinstance(prompt, str) else tiny.codec.decode(prompt)
    reply = api.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == len(ids)
    assert choice.logprobs.token_logprobs[1:] == close([its.logprob for its in expected.prompt_logprobs[1:]])
    usage, drafts = reply.usage, reply.usage.completion_tokens_details
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), 0, len(ids))
    assert (drafts.accepted_prediction_tokens, drafts.rejected_prediction_tokens) == (0, 0)
    bare = api.completions.create(model="tiny", prompt=[prompt, prompt], max_tokens=0, echo=True).choices
    assert [(one.text, one.logprobs, one.finish_reason) for one in bare] == [(text, None, "length")] * 2


def test_the_best_of_several_are_the_likeliest(api, tiny):
    sampled = dict(max_tokens=8, temperature=1.0)
    several = [tiny.generate([PROMPT], SamplingParams(**sampled, seed=s, logprobs=0))[0] for s in range(7, 12)]

    def mean(one):
        own = [its.logprob for its in one.logprobs]
        return sum(own) / len(own)

    reply = api.completions.create(model="tiny", prompt=PROMPT, best_of=5, n=2, seed=7, **sampled)
    likeliest = sorted(several, key=mean, reverse=True)[:2]
    assert [choice.text for choice in reply.choices] == [one.text for one in likeliest]
    assert all(choice.logprobs is None for choice in reply.choices)
    assert reply.usage.completion_tokens == sum(len(one.token_ids) for one in several)


def test_of_several_an_empty_one_is_as_likely_as_its_end(api, tiny):
    """A reply that ends at once has a token, too: that is no certain one."""
    end, sampled = tiny.config.stop_token_ids[0], dict(max_tokens=6, temperature=1.0)
    asked = dict(model="tiny", prompt=PROMPT, seed=1, logit_bias={str(end): 9}, **sampled)
    several = api.completions.create(n=8, logprobs=0, **asked).choices
    texts = {choice.text for choice in several}
    assert "" in texts and len(texts) > 1
    best = api.completions.create(best_of=8, n=8, **asked).choices
    assert [one.text for one in best].index("") > 0


def test_penalties_and_forms_are_those_of_the_engine(api, tiny):
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}, "legs": {"type": "integer"}}}
    schema |= {"required": ["kind", "legs"]}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    for asked, expected in (
        ({"presence_penalty": 2, "logit_bias": {"75": -100}}, {"presence_penalty": 2, "logit_bias": {75: -100}}),
        ({"response_format": form}, {"structured": {"kind": "json_schema", "value": schema}}),
    ):
        params = SamplingParams.model_validate({"max_tokens": 40, **expected})
        (plain,) = tiny.generate([STORY], params)
        reply = api.chat.completions.create(model="tiny", messages=STORY, temperature=0, max_tokens=40, **asked)
        assert reply.choices[0].message.content == plain.text
    assert json.loads(plain.text)["kind"] in ("fox", "owl")
    flat = {"type": "json_schema", "strict": True, **form["json_schema"]}
    asked = {"model": "tiny", "input": STORY, "temperature": 0, "max_output_tokens": 40, "text": {"format": flat}}
    response = api.responses.create(**asked, metadata={"a": "b"})
    assert response.output_text == plain.text
    assert response.text.format.to_dict() == flat | {"description": None} and response.metadata == {"a": "b"}
    *_, last = api.responses.create(**asked, stream=True)
    assert last.response.output_text == plain.text
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"a": {"type": 5}}}}}
    with pytest.raises(openai.BadRequestError, match="response_format: #/properties/a: ") as refusal:
        api.chat.completions.create(model="tiny", messages=STORY, response_format=wrong)
    assert refusal.value.param == "response_format"


def test_how_tokens_are_chosen_reaches_the_engine(tiny_engine):
    seen = {}

    def note(inputs):
        seen.update(inputs)
        yield response("ok", 1, "stop")

    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_p": 0.25}
    asked |= {"min_tokens": 3, "logit_bias": {"5": -1, "6": 2.5}, "logprobs": True, "top_logprobs": 4}
    with fake_triton(note) as (_, triton), gateway(tiny_engine, triton) as url:
        reply = Reply(url, "/v1/chat/completions", json.dumps({"model": "tiny", "messages": STORY, **asked}))
    assert reply.status == 200
    scalars = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens")
    assert {name: seen[name] for name in scalars} == {name: [asked[name]] for name in scalars}
    assert (seen["logit_bias_ids"], seen["logit_bias_values"]) == ([5, 6], [-1, 2.5])
    assert (seen["return_log_probs"], seen["num_log_probs"]) == ([True], [4])


@pytest.mark.parametrize(
    ("asked", "kind", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, "json", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "json_schema",
            '{"type": "object"}',
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", '["yes", "no"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark_grammar", 'start: "a"'),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type": "object"}'),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)
def test_forms_reach_the_engine(tiny_engine, monkeypatch, asked, kind, guide):
    sent = []

    async def note(self, request):
        sent.append(request.params.structured)
        raise Refuse("INTERNAL", "that is all")
        yield

    monkeypatch.setattr("trtllm_dflash.serving.client.TritonClient.stream", note)
    with gateway(tiny_engine, "127.0.0.1:1") as url:
        Reply(url, "/v1/chat/completions", json.dumps({"model": "tiny", "messages": STORY, **asked}))
    from trtllm_dflash.serving.choice_fields import choice_tensors

    tensors = choice_tensors(SamplingParams(structured=sent[0]))
    written = [tensors[name].item().decode() for name in sorted(tensors, reverse=True)]
    assert written == [text for text in (kind, guide) if text is not None]


@pytest.mark.parametrize("size", [1, 3])
def test_an_echo_has_the_prompts_tokens_and_each_its_own_among_the_likely(tiny, texts, size):
    """Without a server: of a prompt of one token, no log-probabilities ever come."""
    prompt, (new,) = tiny.codec.encode_words(PROMPT)[:size], tiny.codec.encode_words(" cat")
    its, other = TokenLogprobs(-2.0, [(5, -0.5)]), texts.text(5)
    request = TokenRequest(prompt, SamplingParams(logprobs=1, prompt_logprobs=1))
    choice = Choice(request, PlainParser(), echo=tiny.codec.decode(prompt))
    reply = replies.Reply(prompt=tiny.codec.decode(prompt))
    piece = Piece(" cat", 1, [new], 0, 0, [], "length", 0, [its], [its] * (size - 1))
    reply.add(choice.read(piece))
    reply.scored_prompt = choice._scored_prompt
    (body,) = replies.CompletionForm("tiny", False, texts=texts, prompts=True).whole([reply], choice.usage)["choices"]
    found, tokens = body["logprobs"], [texts.text(token) for token in [*prompt, new]]
    assert found["tokens"] == tokens and body["text"] == "".join(tokens)
    assert found["token_logprobs"] == [None] + [-2.0] * size
    assert found["top_logprobs"] == [None] + [{other: -0.5, token: -2.0} for token in tokens[1:]]
    assert [each and list(each) for each in body["prompt_logprobs"]] == [None] + [[5, token] for token in prompt[1:]]


def test_of_tokens_with_one_text_the_chosen_one_is_told_among_the_likely(texts):
    """Bytes of a character, say."""
    of_text = {}
    for token in range(2048):
        of_text.setdefault(texts.text(token), []).append(token)
    name, (first, chosen, last, *_) = next((name, tokens) for name, tokens in of_text.items() if len(tokens) > 2)
    likely = [(first, -0.5), (last, -6.0)]
    for top, told in ((likely, -3.0), ([(chosen, -3.0), *likely], -3.0)):
        found = CompletionLogprobs(texts).body([Scored(chosen, TokenLogprobs(-3.0, top))])
        assert found["top_logprobs"] == [{name: told}]
    other = Scored(5, TokenLogprobs(-1.0, likely))
    assert CompletionLogprobs(texts).body([other])["top_logprobs"] == [{name: -0.5, texts.text(5): -1.0}]


@pytest.mark.parametrize(
    ("pieces", "thinking"),
    [
        (["", "Hm", "\n", ""], 40),  # ended in its thinking
        (["", "Hm", "", "</think>\n\n", "Yes", ""], 20),
        (["", "</think>", "Yes"], 0),
        (["Hm</think>Yes", ""], 0),
    ],
)
def test_thinking_counts_the_tokens_whose_text_was_kept_back(pieces, thinking):
    choice = Choice(TokenRequest([5], SamplingParams()), ThinkingParser(PlainParser(), begun=True))
    for number, text in enumerate(pieces):
        choice.read(Piece(text, 10, [], 0, 0, [], "length" if number + 1 == len(pieces) else ""))
    assert choice.usage.thinking_tokens == thinking


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 0.5])
def test_a_small_top_p_is_no_zero_in_fewer_bits(top_p):
    """Which would be no filter at all, beside a top-k."""
    (sent,) = [x for x in _inputs(TokenRequest([5], SamplingParams(top_p=top_p))) if x.name() == "runtime_top_p"]
    assert 0 < np.frombuffer(sent._get_content(), np.float32)[0] <= 0.5


def test_each_choice_has_its_prompt_in_its_usage_and_all_have_it_once():
    choices = [
        Choice(TokenRequest([5, 6], SamplingParams()), PlainParser(), counts_prompt=one) for one in (True, False)
    ]
    told = [choice.read(Piece("a", 1, [], 0, 0, [], "length")).usage for choice in choices]
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in told] == [(2, 1), (2, 1)]
    assert sum((choice.usage for choice in choices), replies.Usage(0)) == replies.Usage(2, 2)


@pytest.mark.parametrize("written", [True, False])
def test_offsets_are_into_the_text_that_is_returned(tiny, texts, written):
    """Hidden tokens are no text, but where a prompt that is a text has their names in it."""
    end, name = tiny.config.stop_token_ids[0], texts.text(tiny.config.stop_token_ids[0])
    prompt = tiny.codec.encode_words(f"Once{name} upon")
    echo = f"Once{name} upon" if written else tiny.codec.decode(prompt)
    new = [end, *tiny.codec.encode_words(" a cat"), end, *tiny.codec.encode_words(" sat")]
    its = TokenLogprobs(-2.0, [])
    scored = [Scored(token, its) for token in new]
    form = replies.CompletionForm("tiny", False, texts=texts)
    reply = replies.Reply(prompt=echo, scored=scored)
    reply.add(replies.Added([Part("content", " a cat"), Part("content", " sat")]))
    reply.scored_prompt = [Scored(token, its) for token in prompt]
    (choice,) = form.whole([reply], replies.Usage(len(prompt)))["choices"]
    found = choice["logprobs"]
    places = dict(enumerate(found["text_offset"])).items()
    shown = [place for place, _ in places if [*prompt, *new][place] != end]
    assert len(shown) < len(places)
    assert "".join(found["tokens"][place] for place in shown) == choice["text"].replace(name, "")
    for place, start in places:
        token = found["tokens"][place]
        assert choice["text"].startswith(token, start) == (place in shown or (written and place < len(prompt)))
    assert found["text_offset"][len(prompt)] == len(echo)
    streamed = replies.CompletionForm("tiny", False, texts=texts)
    events = [streamed.added(0, replies.Added([], scored[at : at + 1])) for at in range(len(scored))]
    offsets = [json.loads(event[len(b"data: ") :])["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert [at for part in offsets for at in part] == [at - len(echo) for at in found["text_offset"][len(prompt) :]]


def test_an_offset_counts_what_turns_out_to_be_no_character(texts):
    """A token with the first byte of a character, and one that does not go on with it."""
    first = next(token for token in range(2048) if texts.raw(token) == "é".encode()[:1])
    word = next(token for token in range(2048) if texts.raw(token) == b" a")
    scored = [Scored(token, TokenLogprobs(-2.0, [])) for token in (word, first, word, first, first)]
    found = CompletionLogprobs(texts).body(scored)
    assert found["text_offset"] == [0, 2, 3, 5, 6]


def test_what_the_engine_refuses_bears_openais_name(tiny_engine):
    def refuse(inputs):
        field = "num_log_probs" if "return_log_probs" in inputs else "guided_decoding_guide"
        raise Refuse("INVALID_ARG", f"{field}: not yet")
        yield

    with fake_triton(refuse) as (_, triton), gateway(tiny_engine, triton) as url:
        for param, asked in (("logprobs", {"logprobs": True}), ("response_format", {"seed": 1})):
            with pytest.raises(openai.BadRequestError, match=f"{param}: not yet") as refusal:
                client(url).chat.completions.create(model="tiny", messages=STORY, **asked)
            assert refusal.value.param == param
        for param, asked in (("best_of", {}), ("logprobs", {"logprobs": 0})):  # what was sent, and not what it needs
            with pytest.raises(openai.BadRequestError, match=f"{param}: not yet") as refusal:
                client(url).completions.create(model="tiny", prompt=PROMPT, best_of=2, **asked)
            assert refusal.value.param == param
        form = {"structured_outputs": {"regex": "("}}
        for create, asked in (
            (client(url).chat.completions.create, {"messages": STORY}),
            (client(url).completions.create, {"prompt": PROMPT}),
        ):
            with pytest.raises(openai.BadRequestError, match="structured_outputs: not yet") as refusal:
                create(model="tiny", **asked, extra_body=form)
            assert refusal.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("path", "says", "asked"),
    [
        ("chat", "top_logprobs", {"top_logprobs": 3}),
        ("chat", "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("chat", "logprobs", {"logprobs": 3}),
        ("chat", "presence_penalty", {"presence_penalty": 2.5}),
        ("chat", "logit_bias", {"logit_bias": {"a": 1}}),
        ("chat", "logit_bias", {"logit_bias": {"5": 101}}),
        ("chat", "min_p", {"min_p": 2}),
        ("chat", "repetition_penalty", {"repetition_penalty": 1e-40}),
        ("chat", "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("chat", "response_format", {"response_format": {"type": "xml"}}),
        ("chat", "response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("chat", "structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        (
            "chat",
            "structured_outputs",
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        ),
        ("plain", "logprobs", {"logprobs": 21}),
        ("plain", "logprobs", {"logprobs": True}),
        ("plain", "echo", {"echo": True, "stream": True}),
        ("plain", "max_tokens", {"max_tokens": 0}),
        ("plain", "max_tokens", {"max_tokens": -1, "echo": True}),
        ("plain", "min_tokens", {"max_tokens": 0, "echo": True, "min_tokens": 1}),
        ("plain", "best_of", {"best_of": 2, "n": 3}),
        ("plain", "best_of", {"best_of": 3, "stream": True}),
        ("plain", "best_of", {"best_of": 129}),
        ("plain", "best_of", {"best_of": 65, "prompt": ["a", "b"]}),
        ("plain", "n", {"n": 65, "prompt": ["a", "b"]}),
        ("plain", "echo: with logprobs only with n: 1", {"n": 2, "echo": True, "logprobs": 0}),
        ("plain", "echo: with logprobs only with best_of: 1", {"best_of": 2, "n": 1, "echo": True, "logprobs": 0}),
        ("plain", "prompt_logprobs: only with best_of: 1", {"best_of": 2, "prompt_logprobs": 1}),
        ("plain", "prompt_logprobs: only with n: 1", {"n": 2, "best_of": 2, "prompt_logprobs": 1}),
        ("chat", "prompt_logprobs", {"n": 2, "prompt_logprobs": 1}),
        ("chat", "bad_words", {"bad_words": ["a"] * 65}),
        ("plain", "bad_words", {"bad_words": ["a" * 257]}),
        ("plain", "stop", {"stop": ["a"] * 17}),
        ("chat", "structured_outputs", {"structured_outputs": {"choice": ["a"] * 1001}}),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(unasked, path, says, asked):
    body = {"messages": STORY} if path == "chat" else {"prompt": "a"}
    path = "/chat/completions" if path == "chat" else "/completions"
    with pytest.raises(openai.BadRequestError) as refusal:
        client(unasked).post(path, body={"model": "tiny", **body, **asked}, cast_to=object)
    assert refusal.value.body["param"].startswith(says.partition(":")[0])
    assert refusal.value.body["message"].startswith(says)


@pytest.fixture(scope="module")
def unasked(tiny_engine):
    """A gateway whose Triton is not there."""
    with gateway(tiny_engine, "127.0.0.1:1") as url:
        yield url
