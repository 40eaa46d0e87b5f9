"""Caches in FP8: what is written, what is read of checkpoints, and that drafted text stays plain text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import edit_config, edit_tensors, make_drafter, make_gpt_oss, make_target
from tests.conftest import TINY, refusal, succeeds
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.plan import BuildPlan
from trtllm_dflash.build.planning import plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.torch_session import TorchSession

pytestmark = pytest.mark.slow

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_k=40, top_p=0.95, seed=11)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ops_with_caches(dtype: torch.dtype, scale: float = 0.05) -> TorchOps:
    """Two slots, two heads, 24 rows of 8, all of them 104 before."""
    caches = {name: torch.full((2, 2, 24, 8), 104.0).to(dtype) for name in ("key", "value")}
    weights = {f"{name}.scale": torch.tensor(scale) for name in caches}
    return TorchOps(weights, caches)


# -- rows --------------------------------------------------------------------------------------------------------------


def nearest_e4m3(x: float) -> float:
    """Of all E4M3 numbers the nearest; of two as near, the one whose last bit is 0."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).double().tolist()
    finite = [(abs(number - x), code % 2, number) for code, number in enumerate(numbers) if number == number]
    return min(finite)[2]


def test_rows_are_divided_by_the_scale_rounded_to_the_nearest_and_saturated():
    ops, scale = ops_with_caches(FP8, 0.25), 0.25
    values = [0.0, 1.0, 17.0, 19.0, 21.0, -17.0, 0.0009, 0.0029, 0.001953125 * 1.5, 440.0, 500.0, -1e30, 3e-3, 0.3]
    generator = torch.Generator().manual_seed(0)
    values += (torch.randn(16 * 8 - len(values), generator=generator) * 30).tolist()
    rows = (torch.tensor(values) * scale).view(1, 2, 8, 8).repeat(2, 1, 1, 1)
    ops.append_kv("key", rows, ints(3, 0))
    expected = torch.tensor([nearest_e4m3(x) for x in values]).view(2, 8, 8)
    for slot, first in ((0, 3), (1, 0)):
        assert torch.equal(ops.caches["key"][slot, :, first : first + 8].float(), expected)
        untouched = [row for row in range(24) if not first <= row < first + 8]
        assert ops.caches["key"][slot, :, untouched].float().eq(104).all()


def test_what_is_returned_is_what_the_cache_stands_for_up_to_the_last_row_in_use():
    ops = ops_with_caches(FP8)
    rows = torch.randn(2, 2, 3, 8)
    found = ops.append_kv("key", rows, ints(5, 0))
    assert found.shape == (2, 2, 8, 8) and found.dtype == torch.float32
    assert torch.equal(found, ops.caches["key"][:, :, :8].float() * 0.05)
    assert not torch.equal(found[0, :, 5:], rows[0])
    assert ops.append_kv("key", rows.bfloat16(), ints(5, 0)).dtype == torch.bfloat16


def test_rows_past_the_end_are_dropped():
    ops = ops_with_caches(FP8)
    ops.append_kv("key", torch.ones(2, 2, 4, 8), ints(22, 40))
    assert ops.caches["key"][0, :, 22:].float().eq(20).all() and ops.caches["key"][1].float().eq(104).all()


def test_rows_of_a_block_see_each_other_as_later_rows_will_see_them():
    """Or a drafted token would be judged by other numbers than a plain step's."""
    q, k, v = (torch.randn(1, 2, 6, 8) * 3 for _ in range(3))
    together, one_by_one, unrounded = ops_with_caches(FP8), ops_with_caches(FP8), ops_with_caches(torch.float32)

    def attend(ops: TorchOps, first: int, last: int) -> Tensor:
        start = ints(first)
        keys, values = (ops.append_kv(n, x[:, :, first:last], start) for n, x in (("key", k), ("value", v)))
        return ops.attention(q[:, :, first:last], keys, values, start + last - first, True)

    for ops in (together, one_by_one, unrounded):
        ops.caches = {name: cache[:1] for name, cache in ops.caches.items()}
    block = attend(together, 0, 6)
    torch.testing.assert_close(block, torch.cat([attend(one_by_one, i, i + 1) for i in range(6)], dim=1))
    assert (block - attend(unrounded, 0, 6)).abs().max() > 0.01


# -- text --------------------------------------------------------------------------------------------------------------


def tokens(completions: Any) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.principal("qwen3")
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt-oss"])
def test_drafted_text_equals_plain_text(family, tmp_path, monkeypatch):
    """Sampled and greedy by turns."""
    if family == "gpt-oss":
        target = make_gpt_oss(tmp_path / "target", vocab=16)
    else:
        target = make_target(tmp_path / "target", family, vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target)
    limits: dict[str, Any] = {"precision": "fp32", "device": "cpu", "max_batch": 4, "max_seq_len": 128, "kv": "fp8"}
    generator = torch.Generator().manual_seed(0)
    prompts: list[Any] = [torch.randint(0, 15, (n,), generator=generator).tolist() for n in (1, 2, 7, 30, 64, 87)]
    with LLM.from_pretrained(target, drafter, **limits) as llm:
        assert {cache.dtype for cache in llm.session.caches.values()} == {FP8}
        params = [SAMPLED, GREEDY] * 3
        drafted = llm.generate(prompts, params)
        plain = tokens(llm.generate(prompts, params, draft=False))
        assert tokens(drafted) == plain
        for some in (drafted[::2], drafted[1::2]):
            assert any(count for completion in some for count in completion.accepted_per_step)
        # Prefixes that are there already are copied from slot to slot.
        copies, run = [], llm.session.run
        monkeypatch.setattr(llm.session, "run", lambda step: (copies.extend(step.copies), run(step))[1])
        short = GREEDY.model_copy(update={"max_tokens": 1})
        # The short ones leave their slots to the last, while the first, of the same prompt, still has its own.
        after = llm.generate([prompts[5], *prompts[:3], prompts[5]], [GREEDY, short, short, short, GREEDY])
        assert tokens(after[::4]) == [plain[5]] * 2
        assert copies
    with LLM.from_pretrained(target, drafter, **{**limits, "kv": "engine"}) as llm:
        assert {cache.dtype for cache in llm.session.caches.values()} == {torch.float32}


@pytest.fixture(scope="module")
def scaled_pair(tmp_path_factory) -> tuple[Path, Path]:
    """The shipped pair, its target with the scales that calibration by ModelOpt finds, and asking for FP8 caches."""
    folder = tmp_path_factory.mktemp("scaled")
    for role in ("target", "drafter"):
        (folder / role).mkdir()
        for file in (TINY / role).iterdir():
            (folder / role / file.name).write_bytes(file.read_bytes())
    # amax / 448, about what `quantize --kv fp8` writes of it.
    scales = {
        f"model.layers.{i}.self_attn.{letter}_proj.{letter}_scale": torch.tensor(scale)
        for i in range(8)
        for letter, scale in (("k", 0.017), ("v", 0.022))
    }
    edit_tensors(folder / "target", lambda tensors: tensors.update(scales))
    summary = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "target" / "hf_quant_config.json").write_text(json.dumps(summary))
    return folder / "target", folder / "drafter"


def test_the_shipped_pair_s_drafts_survive_as_before_and_no_text_turns(scaled_pair):
    texts = [text for texts in read_prompts(1).values() for text in texts]
    lengths = {}
    for name, (target, drafter), kv in (
        ("engine", (TINY / "target", TINY / "drafter"), "auto"),
        ("calibrated", scaled_pair, "auto"),
        ("scale 1", (TINY / "target", TINY / "drafter"), "fp8"),
    ):
        with LLM.from_pretrained(target, drafter, "fp32", "cpu", max_batch=8, max_seq_len=512, kv=kv) as llm:
            assert llm.config.kv == (None if name == "engine" else "fp8")
            prompts: list[Any] = [llm.encode([{"role": "user", "content": text}]) for text in texts]
            drafted, plain = llm.generate(prompts, GREEDY), llm.generate(prompts, GREEDY, draft=False)
            assert tokens(drafted) == tokens(plain)
        lengths[name] = sum(len(r.token_ids) - 1 for r in drafted) / sum(r.steps for r in drafted)
    print(lengths)
    assert all(length > 0.85 * lengths["engine"] for length in lengths.values())


def test_a_rank_s_scales_are_those_of_all(scaled_pair, tmp_path):
    target, drafter = scaled_pair
    pair = ["--target", target, "--drafter", drafter, "--precision", "fp32", "--max-seq-len", 256]
    said = succeeds("build", *pair, "--tp", 2, "--output", tmp_path / "two")
    assert said.startswith("kv auto: caches in fp8; target: its checkpoint's scales, drafter: scale 1\n")
    ranks = [load_file(tmp_path / "two" / f"rank{rank}.safetensors") for rank in (0, 1)]
    scales = [
        {name: x for name, x in tensors.items() if name.endswith((".key.scale", ".value.scale"))} for tensors in ranks
    ]
    assert scales[0] == scales[1] and len(scales[0]) == 16
    assert scales[0]["model.layers.7.value.scale"] == torch.tensor(0.022)
    config = read_config(tmp_path / "two")
    assert config.kv == "fp8"
    session = TorchSession(config.model_copy(update={"tp": 1}), load_whole(pair, tmp_path), torch.device("cpu"))
    assert session.weights["drafter.layers.1.key.scale"] == 1
    assert session.weights["model.layers.0.key.scale"] == torch.tensor(0.017)


def load_whole(pair: list[Any], folder: Path) -> dict[str, Tensor]:
    succeeds("build", *pair, "--output", folder / "one")
    return load_file(folder / "one" / "rank0.safetensors")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_caches_take_half_the_bytes_of_16_bit_ones(tmp_path):
    pair = open_pair(TINY / "target", TINY / "drafter")
    settings: dict[str, Any] = {"name": "a", "target": "", "drafter": "", "precision": "bf16", "max_seq_len": 512}
    bf16, fp8 = (plan_engine(pair, BuildSettings(**settings, kv=kv)).config for kv in ("engine", "fp8"))
    before, after = plan_memory(bf16), plan_memory(fp8)
    assert (before.target_cache, before.drafter_cache) == (2 * after.target_cache, 2 * after.drafter_cache)
    assert before.weights == after.weights
    assert after.scratch - before.scratch == 4 * 64 * fp8.cache_length * 8  # keys and values of one layer, widened
    # In pages, as plans count them: those of our kernels.
    weights = {"model.embed_tokens.weight": torch.zeros(2048, 256)}
    session = TorchSession(fp8, weights, torch.device("cpu"), paged=True)
    assert sum(cache.nbytes for cache in session.caches.values()) == after.target_cache + after.drafter_cache


def test_an_engine_says_that_its_caches_are_in_fp8(tmp_path):
    said = succeeds("build", "--model", "tiny", "--kv", "fp8", "--output", tmp_path / "engine")
    assert said.startswith("kv fp8: caches in fp8; target: scale 1, drafter: scale 1\n")
    assert "caches in fp8" in succeeds("inspect", tmp_path / "engine")
    assert "model.layers.0.key [?, 4, " in (shown := succeeds("inspect", tmp_path / "engine", "--caches"))
    assert "float8_e4m3fn" in shown
    said = succeeds("build", "--model", "tiny", "--kv", "fp8", "--output", tmp_path / "engine")
    assert said.endswith("up to date\n")


@pytest.mark.parametrize("name", ["qwen3-8b", "gpt-oss-120b"])
def test_a_plan_counts_them(name):
    command = ("build", "--plan", "--model", name, "--gpu", "h200", "--tp", 2, "--json")
    bf16, fp8 = (BuildPlan.model_validate_json(succeeds(*command, *more)) for more in ((), ("--kv", "fp8")))
    assert bf16.memory.target_cache_per_slot == 2 * fp8.memory.target_cache_per_slot
    assert bf16.memory.drafter_cache_per_slot == 2 * fp8.memory.drafter_cache_per_slot
    assert fp8.points[0].attention_seconds == pytest.approx(bf16.points[0].attention_seconds / 2)
    assert fp8.points[0].layers_seconds > bf16.points[0].layers_seconds  # of attention that unpacks them
    assert fp8.largest_batch > 1.5 * bf16.largest_batch
    assert any("Caches: FP8" in note for note in fp8.assumptions)


def test_steps_with_them_are_timed():
    command = ("bench", "step", "--shape", "tiny", "--device", "cpu", "--batch", 1, "--rows", 2, "--layers", 2)
    assert "drafted" in succeeds(*command, "--kv", "fp8", "--rounds", 1, "--steps", 2, "--cache-length", 16)
    assert "--kv fp8: an engine has its own" in refusal("bench", "step", "--engine", "nowhere", "--kv", "fp8")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def small(path: Path, edit: Any = None, config: dict[str, Any] | None = None, algorithm: str | None = None) -> Path:
    target = make_target(path / "target", layers=2)
    if edit is not None:
        edit_tensors(target, edit)
    if config is not None:
        edit_config(target, lambda raw: raw.update(quantization_config=config))
    if algorithm is not None:
        summary = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": algorithm}}
        (target / "hf_quant_config.json").write_text(json.dumps(summary))
    return target


def scale_tensors(layers: int, where: str = "self_attn.{n}_proj.{n}_scale", scale: Any = 0.5) -> dict[str, Tensor]:
    return {
        f"model.layers.{i}.{where.format(n=n)}": torch.as_tensor(scale).clone() for i in range(layers) for n in "kv"
    }


SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}


@pytest.mark.parametrize(
    ("tensors", "config", "algorithm", "flags", "says"),
    [
        ({}, None, None, [], None),
        (scale_tensors(2), None, None, [], None),
        (scale_tensors(2), None, None, ["--kv", "fp8"], "kv fp8: caches in fp8; target: its checkpoint's scales"),
        (scale_tensors(2), None, "FP8", [], "kv auto: caches in fp8; target: its checkpoint's scales"),
        (scale_tensors(2, "self_attn.{n}_scale"), SCHEME, None, [], "kv auto: caches in fp8; target: its checkpoint's"),
        (
            scale_tensors(2, "self_attn.{n}_scale"),
            {**SCHEME, "format": "dense"},
            None,
            [],
            "kv auto: caches in fp8; target: its checkpoint's",
        ),
        (scale_tensors(1), None, "FP8", [], "kv auto: caches in fp8; target: scale 1 in 2 of 4 caches"),
        ({}, None, "FP8", [], "kv auto: caches in fp8; target: scale 1"),
        (scale_tensors(2), None, "FP8", ["--kv", "engine"], None),
        (
            scale_tensors(2),
            None,
            "NVFP4",
            [],
            "kv auto: the target's checkpoint asks for caches in NVFP4; they are in fp32",
        ),
        (scale_tensors(2), None, "NVFP4", ["--kv", "fp8"], "kv fp8: caches in fp8; target: scale 1"),
    ],
)
def test_what_the_checkpoint_asks_for_and_what_it_brings_are_said(tensors, config, algorithm, flags, says, tmp_path):
    target = small(tmp_path, lambda held: held.update(tensors), config, algorithm)
    flags = ["--target", target, "--backend", "torch", "--precision", "fp32", "--max-seq-len", 64, *flags]
    lines = succeeds("build", *flags, "--output", tmp_path / "engine").splitlines()
    said = [line for line in lines if line.startswith("kv ")]
    assert len(said) == (0 if says is None else 1)
    assert says is None or said[0].startswith(says)
    held = load_file(tmp_path / "engine" / "rank0.safetensors")
    is_read = says is not None and "caches in fp8" in says and algorithm != "NVFP4"
    assert sum(name.endswith((".key.scale", ".value.scale")) for name in held) == (len(tensors) if is_read else 0)


def test_a_method_that_is_not_read_stays_so_where_it_asks_for_such_caches(tmp_path):
    target = small(tmp_path, config={"quant_method": "gptq", "kv_cache_scheme": SCHEME["kv_cache_scheme"]})
    assert "quantized by gptq, which is not read" in refusal(
        "build", "--target", target, "--output", tmp_path / "engine"
    )


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        ([1.0, 2.0], r"k_scale is \[2\] instead of \[\]; --kv engine does without"),
        (0.0, "k_scale is 0.0, which no cache can be divided by"),
        (float("nan"), "k_scale holds NaN"),
    ],
)
def test_a_scale_that_cannot_be_one_is_refused_where_it_is_needed(scale, says, tmp_path):
    target = small(tmp_path, lambda held: held.update(scale_tensors(2, scale=scale)), None, "FP8")
    pair = open_pair(target)
    settings: dict[str, Any] = {"name": "a", "target": "", "max_seq_len": 64}
    with pytest.raises(CheckpointError, match=says):
        plan_engine(pair, BuildSettings(**settings))
    assert plan_engine(pair, BuildSettings(**settings, kv="engine")).config.kv is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv", "int8"], "--kv int8: Input should be 'auto', 'fp8' or 'engine'"),
        (
            ["--kv", "fp8", "--backend", "tensorrt", "--gpu", "sm120"],
            "--kv fp8: TensorRT updates caches of FP32, FP16 or BF16 only; use --kv engine, or --backend torch",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(flags, says, tmp_path):
    assert says in refusal("build", "--model", "tiny", *flags, "--output", tmp_path / "engine")
