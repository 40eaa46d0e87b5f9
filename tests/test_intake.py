"""What an engine takes in, and by which field it refuses the rest."""

import pytest

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
        ([5], {"temperature": 0.5}, "temperature", "built greedy"),
    ],
)
def test_a_refusal_names_its_field_once(tiny, prompt, params, field, says):
    greedy = Intake(tiny.config.model_copy(update={"sampling": False}), tiny.codec)
    with pytest.raises(RequestError) as refusal:
        greedy.sequence(prompt, SamplingParams(**params))
    assert refusal.value.field == field
    assert says in refusal.value.reason
    assert str(refusal.value) == f"{field}: {refusal.value.reason}"


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
