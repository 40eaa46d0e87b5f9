"""gpt-oss and Qwen3-MoE: against Hugging Face transformers, drafted, and divided among ranks."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors
from packaging.version import parse
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

from tests.checkpoints import (
    YARN,
    edit_config,
    edit_tensors,
    make_drafter,
    make_gpt_oss,
    make_qwen3_moe,
    split_into_shards,
)
from tests.conftest import TINY, refusal, succeeds
from tests.family_checks import assert_greedy, on_ranks
from tests.near_ties import all_logits
from tests.test_checkpoint import http_error
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.checkpoint.ranks import check_tp
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.cost.shapes import SHAPES, shape_config
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.moe import MoEDecoder
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.ops.mxfp4 import dequantize
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.weights import complete_weights

pytestmark = pytest.mark.slow

TIGHT = "tight clamps"
SINCE = "5.19"
CLAMPS = pytest.mark.skipif(
    parse(transformers.__version__) < parse(SINCE),
    reason=f"transformers clamps gpt-oss's experts as their configuration says since {SINCE}",
)

# Windows of 16 tokens, prompts of 200; the original context of YaRN ends at 64.
GPT_OSS: dict[str, dict[str, Any]] = {
    "as published": {},
    "experts in BF16's layout": {"mxfp4": False},
    TIGHT: {"limit": 0.5},
    "YaRN by whole dimensions, factor 32": {"rope": {**YARN, "factor": 32.0, "truncate": True}},
    "YaRN with its own attention factor": {"rope": {**YARN, "attention_factor": 0.7, "beta_fast": 8.0}},
    "YaRN with mscale": {"rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "eight query heads a KV head, a window of 1": {"heads": 8, "kv_heads": 1, "window": 1},
}
QWEN3_MOE: dict[str, dict[str, Any]] = {
    "as published": {},
    "shares of all experts": {"normalized": False, "top_k": 3},
}


def assert_equals_transformers(path: Path, model: torch.nn.Module) -> None:
    llm = LLM.from_pretrained(str(path), None, precision="fp32", device="cpu", max_seq_len=256)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 128, (200,), generator=generator).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    actual = all_logits(llm, ids)
    assert (actual - expected).norm(dim=-1).div(expected.norm(dim=-1)).max() < 1e-4
    for length in (1, 17, 70):
        prompt = torch.randint(0, 128, (length,), generator=generator).tolist()
        (completion,) = llm.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
        assert len(completion.token_ids) == 6
        assert_greedy(model, [prompt], [completion.token_ids])


@pytest.mark.principal("as published", "YaRN with mscale")
@pytest.mark.parametrize("case", [pytest.param(case, marks=[CLAMPS] * (case == TIGHT)) for case in GPT_OSS])
def test_gpt_oss_equals_transformers(case, tmp_path):
    path = make_gpt_oss(tmp_path, **GPT_OSS[case])
    # transformers reads the blocks and scales itself.
    packed = {"quantization_config": Mxfp4Config(dequantize=True)} if GPT_OSS[case].get("mxfp4", True) else {}
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **options, **packed).eval()
    assert_equals_transformers(path, model.float())  # up to transformers 5.20, what was packed stays in BF16


def test_in_bf16_gpt_oss_is_as_near_to_fp32_as_transformers_is(tmp_path):
    path = make_gpt_oss(tmp_path, layers=3)
    ids = torch.randint(0, 128, (100,), generator=torch.Generator().manual_seed(0)).tolist()

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        options = {"dtype": dtype, "attn_implementation": "eager"}
        packed = {"quantization_config": Mxfp4Config(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(path, **options, **packed).eval().to(dtype)
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float()

    exact = theirs(torch.float32)
    ours = all_logits(LLM.from_pretrained(path, None, precision="bf16", device="cpu", max_seq_len=256), ids).float()
    # The median: where two experts' logits are nearly equal, either may be chosen.
    off, allowed = ((x - exact).norm(dim=-1).div(exact.norm(dim=-1)).median() for x in (ours, theirs(torch.bfloat16)))
    assert off < 1.5 * allowed


@pytest.mark.parametrize("case", QWEN3_MOE)
def test_qwen3_moe_equals_transformers(case, tmp_path):
    path = make_qwen3_moe(tmp_path, **QWEN3_MOE[case])
    assert_equals_transformers(path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


def test_the_published_configuration_of_gpt_oss_20b_is_read():
    raw = {
        **SHAPES["gpt-oss-20b"].target,
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }
    config = read_target_config(raw)
    assert config.windows == (128, None) * 12
    assert config.attention_bias
    assert config.attention_sinks
    assert config.moe is not None
    assert (config.moe.experts, config.moe.top_k, config.moe.mxfp4) == (32, 4, True)
    assert config.moe.clamp is not None
    assert (config.moe.clamp.alpha, config.moe.clamp.limit) == (1.702, 7.0)
    assert (config.rope.factor, config.rope.truncate) == (32.0, False)
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    # What transformers takes a missing list for.
    assert read_target_config({key: value for key, value in raw.items() if key != "layer_types"}) == config


# -- drafted -----------------------------------------------------------------------------------------------------------


def gpt_oss_pair(folder: Path, **drafter: Any) -> tuple[Path, Path]:
    """A pair whose vocabulary of 16 lets a drafter that knows nothing be right now and then."""
    target = make_gpt_oss(folder / "target", layers=3, vocab=16, heads=8, kv_heads=8, head_size=8, experts=4, top_k=2)
    values = {"attention_bias": True, "block_size": 10, "layers": 8, "rope_scaling": YARN, "seed": 3, **drafter}
    return target, make_drafter(folder / "drafter", target, **values)


def test_what_a_configuration_of_gpt_oss_lacks_is_what_transformers_takes_it_to_be():
    whole = {**GptOssConfig().to_dict(), "tie_word_embeddings": False}
    optional = ("attention_bias", "head_dim", "num_key_value_heads", "rms_norm_eps", "sliding_window", "layer_types")
    rope = {key: value for key, value in whole["rope_parameters"].items() if key != "rope_theta"}
    partial = {key: value for key, value in whole.items() if key not in optional}
    assert read_target_config({**partial, "rope_parameters": rope}) == read_target_config(whole)


@pytest.mark.principal("8")
@pytest.mark.parametrize("block_size", [8, 10])
def test_drafted_text_of_gpt_oss_equals_plain_text(block_size, tmp_path):
    target, drafter = gpt_oss_pair(tmp_path, block_size=block_size)
    llm = LLM.from_pretrained(target, drafter, precision="fp32", device="cpu", max_batch=3, max_seq_len=160)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in (3, 20, 40)]
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=5),
    ):
        drafted, plain = (llm.generate(prompts, params, draft=draft) for draft in (True, False))
        assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
        assert any(count for completion in drafted for count in completion.accepted_per_step)


def test_a_mixture_of_the_shipped_targets_own_ffn_is_accepted_as_the_shipped_target_is(tiny, tmp_path):
    # Experts that are all the trained FFN make the same model, so its drafter must do as well as it ever does.
    experts, folder = 4, tmp_path / "target"
    shutil.copytree(TINY / "target", folder)
    edit_config(
        folder,
        lambda raw: raw.update(
            model_type="qwen3_moe",
            num_experts=experts,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            moe_intermediate_size=raw["intermediate_size"],
        ),
    )

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in [name for name in tensors if ".mlp.gate_proj." in name]:
            prefix = name.split("mlp.")[0] + "mlp."
            for kind in ("gate", "up", "down"):
                whole = tensors.pop(f"{prefix}{kind}_proj.weight")
                for i in range(experts):
                    tensors[f"{prefix}experts.{i}.{kind}_proj.weight"] = whole.clone()
            hidden = tensors[prefix.replace("mlp.", "input_layernorm.weight")].shape[0]
            tensors[prefix + "gate.weight"] = torch.randn(experts, hidden, generator=generator).to(whole.dtype)

    edit_tensors(folder, mix)
    llm = LLM.from_pretrained(folder, TINY / "drafter", precision="fp32", device="cpu", max_seq_len=512)
    prompts = [[{"role": "user", "content": text}] for texts in read_prompts(1).values() for text in texts]
    params = SamplingParams(max_tokens=48)
    ours, dense = llm.generate(prompts, params), tiny.generate(prompts, params)
    assert [c.token_ids for c in ours] == [c.token_ids for c in dense]
    assert [c.accepted_per_step for c in ours] == [c.accepted_per_step for c in dense]
    assert sum(c.acceptance_length for c in ours) / len(ours) > 5


# -- ranks -------------------------------------------------------------------------------------------------------------


def sum_of_ranks(path: Path, tp: int, ep: bool, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What the ranks' parts of layer 0's experts add up to."""
    pair = open_pair(path)
    moe = pair.target_config.moe
    assert moe is not None
    config = pair.target_config.model_copy(update={"moe": moe.model_copy(update={"expert_parallel": ep})})
    check_tp(tp, config)
    model = build_target(config)
    assert isinstance(model, MoEDecoder)
    prefix = "model.layers.0."
    total = torch.zeros_like(x)
    for rank in range(tp):
        reader = pair.target_reader(tp, rank)
        stored = {w.name: reader.read(w, torch.float32) for w in model.expert_weights(prefix)}
        for weight in model.expert_weights(prefix):
            tensor = stored[weight.name]
            assert tensor is None or tensor.shape == weight.shape(tp, rank)
        weights = {name: tensor for name, tensor in stored.items() if tensor is not None}
        total += TorchOps(weights, {}).moe(model.experts(prefix, tp, rank), x, logits)
    return total


@pytest.mark.parametrize(("tp", "ep"), [(2, False), (4, False), (8, False), (2, True), (8, True)])
@pytest.mark.parametrize("family", ["gpt-oss", "gpt-oss in BF16's layout", "qwen3-moe"])
def test_the_ranks_parts_add_up_to_the_whole(family, tp, ep, tmp_path):
    if family == "qwen3-moe":
        path = make_qwen3_moe(tmp_path, layers=1, heads=8, kv_heads=8)
    else:
        # 160 columns are 5 blocks: no number of ranks here divides them, and of 8 three have padding alone.
        path = make_gpt_oss(tmp_path, layers=1, heads=8, kv_heads=8, intermediate=160, mxfp4=family == "gpt-oss")
    experts = 16 if family == "qwen3-moe" else 8
    x, logits = torch.randn(2, 7, 64), torch.randn(2, 7, experts)
    whole = sum_of_ranks(path, 1, False, x, logits)
    torch.testing.assert_close(sum_of_ranks(path, tp, ep, x, logits), whole, rtol=1e-4, atol=1e-4)


def test_mxfp4_bytes_are_stored_as_they_are_but_for_the_order_of_rows_and_padding(tmp_path):
    pair = open_pair(make_gpt_oss(tmp_path, layers=1, intermediate=160, heads=8, kv_heads=8))
    prefix = "model.layers.0.mlp.experts."
    blocks, scales = (pair.target_folder.read(f"{prefix}gate_up_proj_{kind}") for kind in ("blocks", "scales"))
    ranks = [read_rank_weights(pair, 2, rank, torch.bfloat16) for rank in range(2)]
    name = prefix + "gate_up_proj."
    for kind, whole, padding in (("blocks", blocks, 0), ("scales", scales, 127)):
        parts = [rank[name + kind] for rank in ranks]
        assert all(part.dtype is torch.uint8 and part.shape[1] == 2 * 96 for part in parts)  # 3 blocks and 2
        gates = torch.cat([part[:, :96] for part in parts], dim=1)
        ups = torch.cat([part[:, 96:] for part in parts], dim=1)
        assert torch.equal(gates[:, :160], whole[:, 0::2])
        assert torch.equal(ups[:, :160], whole[:, 1::2])
        assert bool((gates[:, 160:] == padding).all() and (ups[:, 160:] == padding).all())
    down = [dequantize(r[prefix + "down_proj.blocks"], r[prefix + "down_proj.scales"], torch.float32) for r in ranks]
    whole = dequantize(
        *(pair.target_folder.read(f"{prefix}down_proj_{kind}") for kind in ("blocks", "scales")), torch.float32
    )
    joined = torch.cat(down, dim=2)
    assert torch.equal(joined[..., :160], whole)
    assert not joined[..., 160:].any()


def test_the_shape_of_gpt_oss_120b_on_eight_ranks():
    config = shape_config("gpt-oss-120b", precision="bf16", tp=8, max_batch=8, max_seq_len=4096, chunk=512, layers=2)
    shapes = {weight.name: weight.shape(8, 7) for weight in build_target(config.target).weights()}
    layer = "model.layers.0."
    assert shapes[layer + "self_attn.qkv_proj.weight"] == ((8 + 1 + 1) * 64, 2880)
    assert shapes[layer + "self_attn.sinks"] == (8,)
    assert shapes[layer + "mlp.router.weight"] == (128, 2880)
    # 2880 columns are 90 blocks of 32: two ranks have 12 of them, six have 11 and one of padding.
    assert shapes[layer + "mlp.experts.gate_up_proj.blocks"] == (128, 2 * 384, 90, 16)
    assert shapes[layer + "mlp.experts.down_proj.scales"] == (128, 2880, 12)
    assert shapes["lm_head.weight"] == (201088 // 8, 2880)


@pytest.mark.principal("sliced experts")
@pytest.mark.parametrize("ep", [False, True], ids=["sliced experts", "whole experts"])
def test_two_ranks_give_the_tokens_of_one(ep, tmp_path):
    def reply(llm):
        (done,) = llm.generate([[1, 2, 3] * 9], SamplingParams(max_tokens=20))
        return done.token_ids, done.accepted_per_step

    target, drafter = gpt_oss_pair(tmp_path)
    llm = LLM.from_pretrained(target, drafter, precision="fp32", device="cpu", max_seq_len=96)
    expected = reply(llm)

    def reply_of_ranks(llm):
        assert llm.session.config.target.moe.expert_parallel is ep
        return reply(llm)

    assert on_ranks(target, drafter, 2, reply_of_ranks, ep=ep) == expected


def test_ranks_that_cannot_share_the_experts_are_refused(tmp_path):
    config = open_pair(make_gpt_oss(tmp_path, layers=1, heads=12, kv_heads=12)).target_config
    assert config.moe is not None
    apart = config.model_copy(update={"moe": config.moe.model_copy(update={"expert_parallel": True})})
    check_tp(4, config)
    with pytest.raises(SettingsError, match=r"--tp 3 does not divide the 128 rows of the vocabulary"):
        check_tp(3, config)
    with pytest.raises(SettingsError, match=r"--tp 16 does not divide"):
        check_tp(16, apart)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ep",), "--ep: there is one rank only"),
        (("--ep", "--tp", "2", "--target", TINY / "target"), "--ep: the target has no experts"),
    ],
)
def test_experts_are_divided_among_several_ranks_only(flags, message, tmp_path):
    target = make_gpt_oss(tmp_path / "target", layers=1)
    given = () if "--target" in flags else ("--target", target)
    assert message in refusal("build", *given, *flags, "--output", tmp_path / "engine")


def gpt_oss_refusal(path: Path) -> str:
    return refusal("build", "--target", path, "--output", path.parent / "engine")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"rope_parameters": None}, "config.json: rope_scaling is missing"),
        ({"num_local_experts": None}, "config.json: 'num_local_experts' is missing"),
        ({"num_experts_per_tok": 9}, "config.json: num_experts_per_tok 9 exceeds the 8 experts"),
        ({"layer_types": ["full_attention"]}, "config.json: layer_types must say sliding_attention or full_attention"),
        ({"sliding_window": 0}, "config.json: sliding_window 0 is not a positive number of tokens"),
        ({"quantization_config": {"quant_method": "gptq"}}, "config.json: quant_method 'gptq' is not supported"),
        ({"intermediate_size": 100}, "intermediate_size 100 must be multiples of 32, MXFP4's block"),
        ({"num_local_experts": 4}, "mlp.router.weight [8, 64] instead of [4, 64]"),
        ({"quantization_config": None}, "missing: model.layers.0.mlp.experts.gate_up_proj, "),
    ],
)
def test_a_gpt_oss_that_is_not_what_its_config_says_is_refused(edit, message, tmp_path):
    path = make_gpt_oss(tmp_path / "target", layers=2)
    edit_config(path, lambda raw: raw.update(edit))
    assert message in gpt_oss_refusal(path)


def test_experts_of_another_type_or_with_scales_that_are_no_numbers_are_refused(tmp_path):
    path, name = make_gpt_oss(tmp_path / "target", layers=1), "model.layers.0.mlp.experts.down_proj_scales"
    edit_tensors(path, lambda tensors: tensors[name][0, 0].fill_(255))
    assert f"tensor {name} holds NaN; download the checkpoint again" in gpt_oss_refusal(path)
    edit_tensors(path, lambda tensors: tensors.update({name: tensors[name].float()}))
    assert f"dtype other than U8: {name} F32" in gpt_oss_refusal(path)


def test_a_qwen3_moe_with_dense_layers_is_refused(tmp_path):
    path = make_qwen3_moe(tmp_path / "target", layers=1)
    edit_config(path, lambda raw: raw.update(mlp_only_layers=[0]))
    assert "mlp_only_layers [0] is not supported: every layer must have experts" in gpt_oss_refusal(path)


TARGET, DRAFTER = "openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            DRAFTER,
            f"{DRAFTER} is neither a folder nor a repository that can be seen at https://huggingface.co/{DRAFTER}",
        ),
        (TARGET, f"{TARGET} is gated: accept its terms at https://huggingface.co/{TARGET}, then set HF_TOKEN"),
        ("model-00002-of-00003.safetensors", "is missing, but model.safetensors.index.json names it; download"),
        ("config.json", "config.json is missing; pass the folder that holds the checkpoint"),
        ("damage", "model-00002-of-00003.safetensors is truncated or damaged"),
        ("tensor", "tensors do not fit config.json; missing: model.layers.1.mlp.experts.down_proj_scales"),
        ("wrong drafter", "was made for another target: number of layers 3, but"),
        ("nothing", "gpt-oss-120b: its build configuration says target_layers 36, but the checkpoints have 3"),
    ],
)
def test_what_is_wrong_with_the_checkpoints_of_gpt_oss_120b_is_said(lost, message, tmp_path, monkeypatch):
    target, drafter = gpt_oss_pair(tmp_path)
    if lost == "tensor":
        edit_tensors(target, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales"))
    if lost == "wrong drafter":
        target = make_gpt_oss(tmp_path / "another", layers=2, vocab=16)
    split_into_shards(target, 3)
    if (target / lost).is_file():
        (target / lost).unlink()
    if lost == "damage":
        os.truncate(target / "model-00002-of-00003.safetensors", 1000)

    def snapshot_download(repository: str, *, local_files_only: bool, **_: object) -> str:
        if repository == lost and local_files_only:
            raise errors.LocalEntryNotFoundError("not here")
        if repository == lost:
            raise http_error(
                *((errors.GatedRepoError, 403) if lost == TARGET else (errors.RepositoryNotFoundError, 404))
            )
        return str({TARGET: target, DRAFTER: drafter}[repository])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    line = refusal("build", "--model", "gpt-oss-120b", "--tp", "8", "--output", tmp_path / "engine")
    assert message in line
    assert not (tmp_path / "engine").exists()


def test_an_engine_of_gpt_oss_generates_from_the_command_line(tmp_path):
    target, drafter = gpt_oss_pair(tmp_path)
    succeeds("build", "--target", target, "--drafter", drafter, "--precision", "fp32", "--output", tmp_path / "engine")
    llm = LLM.load(tmp_path / "engine", "cpu")
    straight = LLM.from_pretrained(target, drafter, precision="fp32", device="cpu")
    params = SamplingParams(max_tokens=20)
    assert llm.generate([[1, 2, 3]], params)[0].token_ids == straight.generate([[1, 2, 3]], params)[0].token_ids


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_rounded_to_fp8_experts_routers_and_the_head_stay_as_they_are(family, tmp_path):
    target = make_qwen3_moe(tmp_path / "target") if family == "qwen3-moe" else gpt_oss_pair(tmp_path)[0]
    succeeds("build", "--target", target, "--precision", "fp8", "--output", tmp_path / "engine")
    llm = LLM.load(tmp_path / "engine", "cpu")
    rounded = [weight.linear for weight in build_target(llm.config.target).weights() if weight.precision == "fp8"]
    layers = llm.config.target.layers
    linears = ("self_attn.qkv_proj", "self_attn.o_proj")
    assert rounded == [f"model.layers.{i}.{name}" for i in range(layers) for name in linears]
    stored = load_file(tmp_path / "engine" / "rank0.safetensors")
    plain = read_rank_weights(open_pair(target), 1, 0, torch.float32)
    assert {name for name, tensor in stored.items() if tensor.dtype == FP8} == {name + ".weight" for name in rounded}
    for name in plain.keys() - {name + ".weight" for name in rounded}:
        assert torch.equal(stored[name], plain[name])
    assert plan_memory(llm.config).weights == sum(x.nbytes for x in complete_weights(stored, llm.config, 0).values())
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_random_weights_for_timing_have_the_tensors_of_an_engine(tmp_path):
    target, drafter = gpt_oss_pair(tmp_path)
    config = LLM.from_pretrained(target, drafter, precision="bf16", device="cpu", max_seq_len=64).config
    made = random_weights(config, 0, torch.device("cpu"))
    read = read_rank_weights(open_pair(target, drafter), 1, 0, torch.bfloat16)
    assert {n: (t.shape, t.dtype) for n, t in made.items()} == {n: (t.shape, t.dtype) for n, t in read.items()}
