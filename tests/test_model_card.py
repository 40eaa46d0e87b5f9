"""The code of a drafter's model card, with its import changed."""

import copy
import json

import pytest
import torch
import transformers

from tests.conftest import TINY
from trtllm_dflash import LLM, AutoModel, AutoModelForCausalLM, AutoTokenizer, SamplingParams, model_card
from trtllm_dflash.errors import DFlashError, RequestError, SettingsError

#: As the card of z-lab/Qwen3-8B-DFlash-b16 has it.
CARD = """
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

model = AutoModel.from_pretrained(
    "z-lab/Qwen3-8B-DFlash-b16",
    trust_remote_code=True,
    dtype="auto",
    device_map="cuda:0"
).eval()

target = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-8B",
    dtype="auto",
    device_map="cuda:0"
).eval()

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-8B")
tokenizer.add_special_tokens({"mask_token": "<|MASK|>"})

prompt = "How many positive whole-number divisors does 196 have?"
messages = [
    {"role": "user", "content": prompt}
]
text = tokenizer.apply_chat_template(
    messages,
    tokenize=False,
    add_generation_prompt=True,
    enable_thinking=False
)
model_inputs = tokenizer([text], return_tensors="pt").to(model.device)

generate_ids = model.spec_generate(
    input_ids=model_inputs["input_ids"],
    max_new_tokens=2048,
    temperature=0.0,
    target=target,
    mask_token_id=tokenizer.mask_token_id,
    stop_token_ids=[tokenizer.eos_token_id]
)

print(tokenizer.decode(generate_ids[0], skip_special_tokens=True))
"""

#: What the shipped pair has in its places; and less to say, for a pair that was trained on other prompts.
PLACES = {
    "z-lab/Qwen3-8B-DFlash-b16": str(TINY / "drafter"),
    "Qwen/Qwen3-8B": str(TINY / "target"),
    "cuda:0": "cpu",
    "<|MASK|>": "<|mask|>",
    "2048": "16",
}
PROMPT = [{"role": "user", "content": "How many positive whole-number divisors does 196 have?"}]


def run(card: str, **replaced: str) -> dict:
    """The names that a card's code leaves, with the shipped pair in place of its own."""
    for name, place in PLACES.items():
        assert name in card
        card = card.replace(name, place)
    left: dict = {}
    exec(card, left)
    return left


@pytest.fixture(scope="module")
def in_its_type():
    """Prompt and reply together, and the reply's text, of the shipped pair in the type of its checkpoints."""
    folders = str(TINY / "target"), str(TINY / "drafter")
    with LLM.from_pretrained(*folders, precision="bf16", device="cpu") as llm:
        (completion,) = llm.generate([PROMPT], SamplingParams(max_tokens=16))
        return [llm.encode(PROMPT) + completion.token_ids], completion.text


@pytest.fixture
def drafter():
    model = AutoModel.from_pretrained(TINY / "drafter", device_map="cpu")
    yield model
    model.close()


@pytest.fixture
def target():
    return AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)


@pytest.fixture
def prompt(tiny):
    return torch.tensor([tiny.encode(PROMPT)])


def test_the_card_s_code_runs_with_its_import_changed(in_its_type, capsys):
    left = run(CARD.replace("from transformers import", "from trtllm_dflash import"))
    assert left["generate_ids"].tolist() == in_its_type[0]
    assert in_its_type[1] in capsys.readouterr().out
    left["model"].close()


def test_the_target_may_be_a_model_of_transformers(in_its_type):
    ours = "from trtllm_dflash import AutoModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer"
    card = CARD.replace("from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer", ours)
    head, its_target, tail = card.partition("target = ")
    # Of transformers' models alone: they want another package for this.
    left = run(head + its_target + tail.replace('    device_map="cuda:0"\n', "", 1))
    assert isinstance(left["target"], transformers.PreTrainedModel)
    assert left["generate_ids"].tolist() == in_its_type[0]
    left["model"].close()


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"text_config": {"dtype": "bfloat16"}}, "bf16"),
        ({"torch_dtype": "float16", "dtype": None, "text_config": {"dtype": "bfloat16"}}, "fp16"),
        ({"dtype": "bfloat16", "text_config": {"quantization_config": {"format": "pack-quantized"}}}, None),
    ],
)
def test_a_model_of_more_than_text_may_say_its_type_within(config, precision, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").precision == precision


def test_what_a_chat_template_returns_is_a_prompt(drafter, target, tiny):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    inputs = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert isinstance(inputs, transformers.BatchEncoding)
    (completion,) = tiny.generate([PROMPT], SamplingParams(max_tokens=24))
    expected = [tiny.encode(PROMPT) + completion.token_ids]
    asked = {"input_ids": inputs, "max_new_tokens": 24}
    assert drafter.spec_generate(target=target, **asked).tolist() == expected
    assert tiny.spec_generate(**asked).tolist() == expected
    assert tiny.spec_generate({"input_ids": inputs["input_ids"]}, 24).tolist() == expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "attention_mask: has zeros; give the prompt without padding"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values: prompts are text alone"),
        ({"input_ids": [[1, 2, 3]]}, r"a tensor \[1, N\], not list"),
        ({"input_ids": torch.ones(2, 3)}, r"a tensor \[1, N\], not \[2, 3\]"),
    ],
)
def test_a_batch_that_is_not_one_prompt_is_refused(change, says, tiny, drafter):
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3), **change}
    with pytest.raises(RequestError, match=says):
        tiny.spec_generate(batch)
    with pytest.raises(RequestError, match=says):
        drafter.spec_generate(input_ids=batch, target=TINY / "target", max_new_tokens=5)


def test_the_engine_is_loaded_once_until_something_else_is_asked_for(drafter, target, prompt, monkeypatch):
    loads = []
    real = LLM.from_pretrained

    def counted(target, drafter, precision, device, **limits):
        loads.append((precision, limits["max_seq_len"]))
        return real(target, drafter, precision, device, **limits)

    monkeypatch.setattr(LLM, "from_pretrained", counted)
    for tokens in (2, 3):
        ids = drafter.spec_generate(input_ids=prompt, target=target, max_new_tokens=tokens, stop_token_ids=[])
        assert ids.shape[1] == prompt.shape[1] + tokens
    assert loads == [("fp32", None)]
    other = AutoModelForCausalLM.from_pretrained(TINY / "target", torch_dtype="auto", device_map={"": "cpu"})
    drafter.spec_generate(input_ids=prompt, target=other, max_new_tokens=2)
    assert loads[1:] == [("bf16", None)]
    with pytest.raises(SettingsError, match="at most 4096 positions"):
        drafter.spec_generate(input_ids=prompt, target=other, max_new_tokens=9000)
    assert loads[2:] == [("bf16", prompt.shape[1] + 9000)]


def test_sampling_is_generate_s(drafter, target, tiny, prompt):
    sampled = drafter.spec_generate(
        input_ids=prompt, target=target, max_new_tokens=24, temperature=0.9, stop_token_ids=[], seed=3
    )
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=3, ignore_eos=True)
    (completion,) = tiny.generate([PROMPT], params)
    assert sampled[0].tolist() == prompt[0].tolist() + completion.token_ids


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attn_implementation": "sdpa"}, "attn_implementation: has no meaning here"),
        ({"dtype": torch.float64}, "dtype float64: choose auto, float32, bfloat16, float16"),
        ({"device_map": "cuda:1"}, "device_map cuda:1: choose cpu, cuda or auto; CUDA_VISIBLE_DEVICES"),
        ({"device_map": 2}, "device_map cuda:2: choose"),
        ({"device_map": {"model": 0, "lm_head": 1}}, "device_map .*: choose"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(options, says):
    for kind in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(SettingsError, match=says):
            kind.from_pretrained(TINY / "target", **options)


def test_devices_are_named_as_transformers_does():
    places = {"cpu": "cpu", "cuda:0": "cuda", 0: "cuda", None: "auto", torch.device("cpu"): "cpu"}
    assert {given: model_card.Checkpoint("x", device_map=given).place for given in places} == places
    assert model_card.Checkpoint("x").to("cpu").device == torch.device("cpu")


def test_a_pair_that_contradicts_itself_is_refused(drafter, prompt):
    target = TINY / "target"

    def generate(target: object, model=drafter, **more: object) -> None:
        model.spec_generate(**{"input_ids": prompt, "target": target, "max_new_tokens": 4, **more})

    with pytest.raises(SettingsError, match="dtype: the drafter's is float16, the target's auto"):
        generate(target, AutoModel.from_pretrained(TINY / "drafter", dtype=torch.float16))
    with pytest.raises(SettingsError, match="device_map: the drafter's is cpu, the target's cuda"):
        generate(AutoModelForCausalLM.from_pretrained(target, device_map="cuda"))
    with pytest.raises(RequestError, match="mask_token_id: 7: the drafter's own is 3"):
        generate(target, mask_token_id=7)
    with pytest.raises(RequestError, match="max_new_tokens: Input should be greater than or equal to 1"):
        generate(target, max_new_tokens=0)
    with pytest.raises(DFlashError):
        generate(TINY / "drafter")


def test_a_model_of_transformers_must_say_where_its_weights_are(drafter, prompt):
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY / "target")
    nameless = copy.copy(model)
    nameless.name_or_path = ""
    for target in (nameless, torch.nn.Linear(2, 2), 7):
        with pytest.raises(RequestError, match="target: give a folder, a Hugging Face name, or a model with a"):
            drafter.spec_generate(input_ids=prompt, target=target, max_new_tokens=4)


@pytest.mark.parametrize(("field", "value"), [("max_new_tokens", "4"), ("max_new_tokens", None), ("stop_token_ids", 0)])
def test_a_value_of_another_type_is_refused_by_name(field, value):
    model, target = AutoModel.from_pretrained(TINY / "drafter"), AutoModelForCausalLM.from_pretrained(TINY / "target")
    values = {"input_ids": torch.tensor([[1, 2]]), "target": target, "max_new_tokens": 4, field: value}
    with pytest.raises(RequestError, match=f"^{field}: "):
        model.spec_generate(**values)
