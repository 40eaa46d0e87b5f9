"""What an engine takes in, and by which field it refuses the rest."""

import pytest
from pydantic import ValidationError

from trtllm_dflash import SamplingParams
from trtllm_dflash.errors import LongPromptError, RequestError, SettingsError
from trtllm_dflash.runtime.intake import Intake


@pytest.mark.parametrize(
    ("prompt", "params", "field", "says"),
    [
        ([], {}, "prompt", "the prompt is empty"),
        ([5, 2048], {}, "prompt", "2048 is not a token id; they are 0 to 2047"),
        ([-1], {}, "prompt", "-1 is not a token id"),
        ([5], {"stop_token_ids": (9999,)}, "stop_token_ids", "9999 is not a token id"),
        ([5], {"stop_token_sequences": ((5, 6), (7, 9999))}, "stop_token_sequences", "9999 is not a token id"),
        ([5], {"logit_bias": {2048: 1.0}}, "logit_bias", "2048 is not a token id"),
        ([5], {"bad_token_sequences": ((5, 2048),)}, "bad_token_sequences", "2048 is not a token id"),
        ([5], {"bad_token_sequences": (tuple(range(9)),)}, "bad_token_sequences", "are more than 8 tokens"),
        ([5], {"bad_words": ("antidisestablishmentarianism",)}, "bad_words", "tokens; at most 8 are taken"),
        ([5], {"bad_words": tuple(map(str, range(100, 140)))}, "bad_words", "runs of tokens; at most 64 are taken"),
        ([5], {"structured": {"kind": "regex", "value": "["}}, "structured", "regex: error: unclosed character class"),
        ([5], {"structured": {"kind": "json_object"}, "ignore_eos": True}, "structured", "leave out ignore_eos"),
        ([5], {"temperature": 0.5}, "temperature", "built greedy"),
        ([5], {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "5 is more than max_tokens 4"),
    ],
)
def test_a_refusal_names_its_field_once(tiny, prompt, params, field, says):
    greedy = Intake(tiny.config.model_copy(update={"sampling": False}), tiny.codec)
    with pytest.raises(RequestError) as refusal:
        greedy.sequence(prompt, SamplingParams(**params))
    assert refusal.value.field == field
    assert says in refusal.value.reason
    assert str(refusal.value) == f"{field}: {refusal.value.reason}"


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 20},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: -100.0}},
        {"min_p": 0.1},
        {"min_tokens": 3},
        {"bad_words": ("fox",)},
        {"bad_token_sequences": ((5, 6),)},
        {"structured": {"kind": "json_object"}},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_a_session_lacks_is_refused_by_name(tiny, params):
    lacking = Intake(tiny.config, tiny.codec, lacks="only torch on a CPU does this yet")
    with pytest.raises(RequestError, match=f"^{next(iter(params))}: only torch on a CPU does this yet; leave it out"):
        lacking.sequence([5], SamplingParams.model_validate(params))


def test_a_bad_word_of_no_tokens_bans_nothing(tiny, monkeypatch):
    real = tiny.codec.encode_words
    monkeypatch.setattr(tiny.codec, "encode_words", lambda text: [] if "\u200b" in text else real(text))
    runs = tiny.intake.sequence([5], SamplingParams(bad_words=("\u200b", "fox"))).bad_runs
    assert runs == tiny.intake.sequence([5], SamplingParams(bad_words=("fox",))).bad_runs
    assert all(runs)


def test_a_bad_word_of_tokens_that_the_model_does_not_know_bans_nothing(tiny, monkeypatch):
    """Added tokens may lie beyond the vocabulary."""
    monkeypatch.setattr(tiny.codec, "encode_words", lambda text: [5, 2048])
    assert tiny.intake.sequence([5], SamplingParams(bad_words=("<extra>",))).bad_runs == ()


def test_a_form_needs_an_end_token_that_the_model_knows(tiny, monkeypatch):
    endless = Intake(tiny.config.model_copy(update={"stop_token_ids": ()}), tiny.codec)
    monkeypatch.setattr(type(tiny.codec), "end_id", 2048)
    with pytest.raises(RequestError, match="structured: needs an end token, and this engine knows none"):
        endless.sequence([5], SamplingParams.model_validate({"structured": {"kind": "json_object"}}))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logprobs": 21}, "less than or equal to 20"),
        ({"presence_penalty": 2.1}, "less than or equal to 2"),
        ({"repetition_penalty": 0}, "greater than or equal to 0.0078125"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty\n.*greater than or equal to 0.0078125"),
        ({"logit_bias": {-1: 0.0}}, "greater than or equal to 0"),
        ({"logit_bias": {1: 101.0}}, "less than or equal to 100"),
        ({"bad_words": ("",)}, "at least 1 character"),
        ({"structured": {"kind": "json_schema", "value": "{}"}}, "value of json_schema is a JSON schema: an object"),
        ({"structured": {"kind": "choice", "value": []}}, "value of choice is a list of 1 to 1,000 texts"),
        ({"structured": {"kind": "regex"}}, "value of regex is a text"),
    ],
)
def test_a_parameter_out_of_its_range_is_refused(params, says):
    with pytest.raises(ValidationError, match=says):
        SamplingParams.model_validate(params)


def test_a_prompt_is_as_long_as_leaves_room_for_a_token_or_as_is_said(tiny):
    assert tiny.intake.sequence([5] * 2047, SamplingParams()).room == 1
    with pytest.raises(LongPromptError, match=r"2048 tokens; the limit is 2047 \(build --max-seq-len\)"):
        tiny.intake.encode([5] * 2048)
    short = Intake(tiny.config, tiny.codec, max_prompt_tokens=10)
    assert short.encode([5] * 10) == [5] * 10
    with pytest.raises(LongPromptError, match=r"11 tokens; the limit is 10 \(max_prompt_tokens\)"):
        short.encode([5] * 11)
    with pytest.raises(SettingsError, match="max_prompt_tokens 2048: this engine takes 2047"):
        Intake(tiny.config, tiny.codec, max_prompt_tokens=2048)


def test_stop_strings_need_a_tokenizer(tiny):
    bare = Intake(tiny.config, None)
    assert bare.sequence([5], SamplingParams()).text is None
    with pytest.raises(RequestError, match=r"^stop: .*use stop_token_ids"):
        bare.sequence([5], SamplingParams(stop=("a",)))
    with pytest.raises(RequestError, match="give token ids"):
        bare.encode("a text")


#: Texts of four million characters: of nothing but long tokens, of short ones, and of none that is known.
ENDLESS = ["a story " * 500_000, "9 z " * 1_000_000, "\u0416\0" * 2_000_000]


@pytest.mark.parametrize("text", ENDLESS, ids=["words", "digits", "bytes"])
@pytest.mark.parametrize("prompt", [str, lambda text: [{"role": "user", "content": text}]], ids=["text", "chat"])
def test_a_text_that_no_tokens_could_hold_is_refused_before_it_is_tokenized(tiny, monkeypatch, text, prompt):
    encoded = spy(tiny, monkeypatch)
    with pytest.raises(LongPromptError, match=r"more than 2047 tokens; the limit is 2047 \(build --max-seq-len\)"):
        tiny.intake.encode(prompt(text))
    assert encoded == []


def test_a_text_far_too_long_is_tokenized_until_it_has_too_many_tokens_and_no_further(tiny, monkeypatch):
    """Of an engine whose context is so long that bytes alone do not tell."""
    roomy = Intake(tiny.config.model_copy(update={"max_seq_len": 200_001}), tiny.codec)
    encoded = spy(tiny, monkeypatch)
    with pytest.raises(LongPromptError, match=r"more than 200000 tokens; the limit is 200000"):
        roomy.encode("9 z " * 1_000_000)
    assert 200_000 <= sum(map(len, encoded)) < 400_000  # characters: each a token


def test_counting_in_pieces_refuses_no_text_that_fits(tiny):
    text = " comprehension" * 20_000  # a long token, many times: it is counted, in several pieces
    exact = len(tiny.codec.encode(text))
    assert exact == 20_000
    roomy = Intake(tiny.config.model_copy(update={"max_seq_len": exact + 1}), tiny.codec)
    assert roomy.encode(text) == tiny.codec.encode(text)
    with pytest.raises(LongPromptError):
        roomy.encode(text + " comprehension")


def test_a_conversation_of_more_messages_than_tokens_is_refused_before_it_is_rendered(tiny):
    with pytest.raises(LongPromptError, match="more than 2047 tokens"):
        tiny.intake.encode([{"role": "user", "content": ""}] * 2048)


def spy(tiny, monkeypatch) -> list[str]:
    """The texts that the tokenizer gets."""
    encoded: list[str] = []
    backend = tiny.codec.backend

    class Spy:
        def encode_batch_fast(self, texts, **named):
            encoded.extend(texts)
            return backend.encode_batch_fast(texts, **named)

    monkeypatch.setattr(type(tiny.codec), "backend", property(lambda _: Spy()))
    return encoded
