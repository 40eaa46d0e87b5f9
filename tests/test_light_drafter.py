"""A lighter drafter: FP8 matrices, a shortlist for its head. The text never depends on either; only acceptance does."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY, build_tiny, refusal, succeeds
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.checkpoint.shortlist import count_tokens
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import EngineError
from trtllm_dflash.llm import Prompt
from trtllm_dflash.ops.fp8 import FP8, dequantize_rows, quantize_rows
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import PROMPTS as PROMPT_FILE
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.request import Completion
from trtllm_dflash.text.tokenizer import TextCodec

pytestmark = pytest.mark.slow

PROMPTS: list[Prompt] = [[{"role": "user", "content": texts[0]}] for texts in read_prompts(1).values()]
PARAMS = {
    "greedy": SamplingParams(max_tokens=48),
    "sampled": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=11),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> Path:
    """What shortlists are counted in: the last half of each kind's prompts. The first of each are asserted on."""
    rows = [json.loads(line) for line in PROMPT_FILE.read_text().splitlines()]
    last = [row for kind in {row["kind"]: 0 for row in rows} for row in [r for r in rows if r["kind"] == kind][-32:]]
    file = tmp_path_factory.mktemp("text") / "counted.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in last))
    return file


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    codec = TextCodec.load(TINY / "target", {})
    assert codec is not None
    return codec


@pytest.fixture(scope="module")
def light(counted, tmp_path_factory) -> Path:
    """FP8, and a shortlist of 304 of the 2,048 tokens."""
    folder = tmp_path_factory.mktemp("light") / "engine"
    return build_tiny(folder, draft_vocab=304, draft_text=str(counted), drafter_precision="fp8")


def rank_file(engine: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(engine / f"rank{rank}.safetensors")


def acceptance(completions: list[Completion]) -> float:
    return sum(len(c.token_ids) - 1 for c in completions) / sum(c.steps for c in completions)


# -- the same text -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tiny) -> dict[str, list[Completion]]:
    """Replies with the shipped drafter, each known to be plain decoding's."""
    drafted = {params: tiny.generate(PROMPTS, PARAMS[params]) for params in PARAMS}
    for params, completions in drafted.items():
        plain = tiny.generate(PROMPTS, PARAMS[params], draft=False)
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    return drafted


# And how much of the full drafter's acceptance must be left. Measured, greedy on these prompts: 0.97, 1.00, 0.81, 0.85.
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "fp8": ({"drafter_precision": "fp8"}, 0.9),
    "fp8 and a head of its own": ({"draft_vocab": 2048, "drafter_precision": "fp8"}, 0.9),
    "shortlist": ({"draft_vocab": 1000}, 0.7),
    "both": ({"draft_vocab": 1008, "drafter_precision": "fp8"}, 0.7),
}


@pytest.mark.principal("both")
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_plain_text_and_most_acceptance_is_left(kind, counted, full, tmp_path):
    settings, least = KINDS[kind]
    if settings.get("draft_vocab", 2048) < 2048:
        settings = {**settings, "draft_text": str(counted)}
    with LLM.load(build_tiny(tmp_path / "engine", **settings), "cpu") as llm:
        drafted = {params: llm.generate(PROMPTS, PARAMS[params]) for params in PARAMS}
    for params, completions in drafted.items():
        assert [c.token_ids for c in completions] == [c.token_ids for c in full[params]]
    left = acceptance(drafted["greedy"]) / acceptance(full["greedy"])
    print(kind, left, acceptance(full["greedy"]))
    assert least < left < 1.1


# -- the shortlist -----------------------------------------------------------------------------------------------------


def test_the_head_is_the_most_frequent_tokens_rows_of_the_target_s(counted, codec, tmp_path):
    weights = rank_file(build_tiny(tmp_path / "engine", draft_vocab=300, draft_text=str(counted)))
    ids = weights["drafter.draft_to_target"]
    table = weights["model.embed_tokens.weight"]  # tied
    assert torch.equal(weights["drafter.lm_head.weight"], table[ids])
    assert (ids.dtype, len(ids)) == (torch.int32, 300)
    assert ids.tolist() == sorted(set(ids.tolist())), "among equal logits the whole head chooses the lowest id"
    seen: Counter[int] = Counter()
    for row in map(json.loads, counted.read_text().splitlines()):
        seen.update(codec.encode(row["prompt"] + "\n" + row["reference"]))
    listed = set(ids.tolist())
    assert {0, 1, 2, 3} <= listed, "special and stop tokens"
    left_out = max(count for token, count in seen.items() if token not in listed)
    assert min(seen[token] for token in listed - {0, 1, 2, 3}) >= left_out


def test_equals_and_what_never_occurs_go_by_id(codec, tmp_path):
    (tmp_path / "short.txt").write_text("zebra zebra")
    seen = set(codec.encode("zebra zebra"))
    engine = build_tiny(tmp_path / "engine", draft_vocab=40, draft_text=str(tmp_path / "short.txt"))
    listed = set(rank_file(engine)["drafter.draft_to_target"].tolist())
    assert seen <= listed
    assert listed - seen == set([i for i in range(2048) if i not in seen][: 40 - len(seen)])


def test_an_untied_head_s_rows_are_taken_and_divided_among_ranks(tmp_path, codec):
    target = make_target(tmp_path / "target", vocab=2048)
    drafter = make_drafter(tmp_path / "drafter", target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((TINY / "target" / name).read_bytes())
    (tmp_path / "text.txt").write_text("A story about a dog.\n")
    pair = {"name": "small", "target": str(target), "drafter": str(drafter), "precision": "fp32", "max_seq_len": 64}
    light = {"draft_vocab": 64, "draft_text": str(tmp_path / "text.txt"), "drafter_precision": "fp8", "tp": 2}
    build(BuildSettings.model_validate({**pair, **light}), tmp_path / "engine")
    ranks = [rank_file(tmp_path / "engine", rank) for rank in (0, 1)]
    ids = ranks[0]["drafter.draft_to_target"]
    assert torch.equal(ids, ranks[1]["drafter.draft_to_target"])
    assert set(codec.encode("A story about a dog.\n")) <= set(ids.tolist())
    head = [dequantize_rows(rank["drafter.lm_head.weight"], rank["drafter.lm_head.scale"]) for rank in ranks]
    assert [len(rows) for rows in head] == [32, 32]
    assert_near(torch.cat(head), load_file(target / "model.safetensors")["lm_head.weight"][ids])
    # Split by columns: each rank has scales of its own.
    down = [dequantize_rows(r[f"{DOWN}.weight"], r[f"{DOWN}.scale"]) for r in ranks]
    whole = load_file(drafter / "model.safetensors")["layers.0.mlp.down_proj.weight"]
    assert_near(torch.cat(down, dim=1), whole)


def test_text_and_json_lines_count_alike(codec, tmp_path):
    parts = ["def f(x):\n\n    return x\n", "One.\n\n\nTwo: \u2028 caf\u00e9 {x}\n"]
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("".join(parts))
    lines.write_text("\n".join(json.dumps({"text": part, "kind": "ignored"}) for part in parts))
    expected = torch.bincount(torch.tensor([i for part in parts for i in codec.encode(part)]), minlength=2048)
    assert torch.equal(count_tokens(text, codec, 2048), expected)
    assert torch.equal(count_tokens(lines, codec, 2048), expected)


def test_counting_a_long_text_says_how_far_it_is(codec, tmp_path, monkeypatch):
    monkeypatch.setattr("trtllm_dflash.checkpoint.shortlist._PIECE", 100)
    monkeypatch.setattr("trtllm_dflash.checkpoint.shortlist._BATCH", 1000)
    file = tmp_path / "long.txt"
    file.write_text("The dog ran home.\n" * 500)
    told: list[tuple[int, int]] = []
    counts = count_tokens(file, codec, 2048, lambda done, total: told.append((done, total)))
    size = file.stat().st_size
    assert len(told) > 5 and told == sorted(told) and told[-1] == (size, size)
    assert counts.sum() == 500 * len(codec.encode("The dog ran home.\n"))


# -- FP8 ---------------------------------------------------------------------------------------------------------------

DOWN = "drafter.layers.0.mlp.down_proj"


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """E4M3 keeps 3 bits after the first: half of the last is 2^-4 of the number, or of the smallest that is normal."""
    scale = expected.abs().amax(dim=1, keepdim=True) / 448
    assert ((found - expected).abs() <= expected.abs() / 16 * 1.001 + scale * 2**-10).all()
    assert not torch.equal(found, expected)


def test_rows_keep_their_own_scale():
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6])[:, None]
    x[3] = 0
    rows, scale = quantize_rows(x)
    assert (rows.dtype, scale.dtype, scale.shape) == (FP8, torch.float32, (5, 1))
    assert torch.equal(dequantize_rows(rows, scale)[3], x[3])
    keep = [0, 1, 2, 4]
    assert_near(dequantize_rows(rows, scale)[keep], x[keep])


def test_the_drafter_s_matrices_and_nothing_else_are_stored_as_fp8(light, tiny_engine):
    full, weights = rank_file(tiny_engine), rank_file(light)
    for name, tensor in full.items():
        is_matrix = name.startswith("drafter.") and tensor.ndim == 2
        if is_matrix:
            found = dequantize_rows(weights[name], weights[name.removesuffix(".weight") + ".scale"])
            assert weights[name].dtype == FP8
            assert_near(found, tensor)
        else:
            assert torch.equal(weights[name], tensor)
    assert weights["drafter.lm_head.weight"].dtype == FP8


def test_a_cpu_computes_with_the_same_numbers_in_the_engine_s_type(light):
    weights = rank_file(light)
    with LLM.load(light, "cpu") as llm:
        held = llm.session.weights
    assert {tensor.dtype for tensor in held.values()} == {torch.float32, torch.int32}
    expected = dequantize_rows(weights[f"{DOWN}.weight"], weights[f"{DOWN}.scale"])
    found = held[f"{DOWN}.weight"]
    assert torch.equal(found.to_dense() if found.is_mkldnn else found, expected)
    assert not [name for name in held if name.endswith(".scale")]


def test_the_memory_plan_counts_bytes_as_they_are_stored(light, tiny_engine):
    full, config = read_config(tiny_engine), read_config(light)
    stored = [sum(x.nbytes for x in rank_file(engine).values()) for engine in (tiny_engine, light)]
    table = rank_file(light)["drafter.draft_to_target"].nbytes  # integers are no weights
    assert plan_memory(full).weights - plan_memory(config).weights == stored[0] - (stored[1] - table)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU multiplies no FP8"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("slots", "rows", "inputs", "outputs"), [(1, 16, 4096, 6144), (3, 5, 512, 48), (1, 1, 64, 16)])
@torch.inference_mode()
def test_a_gpu_s_products_are_those_of_the_rounded_numbers(slots, rows, inputs, outputs, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(slots, rows, inputs, generator=generator, device="cuda").to(dtype)
    weight, scale = quantize_rows(torch.randn(outputs, inputs, generator=generator, device="cuda") * 0.02)
    bias = torch.randn(outputs, generator=generator, device="cuda").to(dtype)
    ops = TorchOps({"a.weight": weight, "a.scale": scale.flatten(), "a.bias": bias}, {})
    expected = dequantize_rows(*quantize_rows(x.flatten(0, 1))).double() @ dequantize_rows(weight, scale).double().t()
    y = ops.linear("a", x)
    assert (y.shape, y.dtype) == ((slots, rows, outputs), dtype)
    torch.testing.assert_close(y.flatten(0, 1).double(), expected + bias.double(), rtol=0.02, atol=0.02)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.linear("a", x)
    graph.replay()
    torch.testing.assert_close(captured, y, rtol=0.01, atol=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_text_on_a_gpu_is_the_cpu_s(light, full):
    replies = {}
    for device in ("cpu", "cuda"):
        with LLM.load(light, device) as llm:
            replies[device] = llm.generate(PROMPTS, PARAMS["greedy"])
    assert [c.token_ids for c in replies["cuda"]] == [c.token_ids for c in full["greedy"]]
    assert acceptance(replies["cuda"]) > 0.85 * acceptance(replies["cpu"])


# -- building ----------------------------------------------------------------------------------------------------------


def test_inspect_says_how_the_drafter_is_lighter(light):
    assert "fp8 matrices, drafts among 304 of 2048 tokens" in succeeds("inspect", light)
    drafter = json.loads(succeeds("inspect", light, "--json"))["drafter"]
    assert (drafter["draft_vocab_size"], drafter["linear_precision"]) == (304, "fp8")


def test_the_same_build_is_reused_and_another_text_is_another_engine(counted, light, tmp_path):
    asked = {"name": "tiny", "target": str(TINY / "target"), "drafter": str(TINY / "drafter"), "precision": "fp32"}
    asked |= {"max_seq_len": 2048, "draft_vocab": 304, "drafter_precision": "fp8"}
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(counted.read_bytes())
    assert build(BuildSettings.model_validate({**asked, "draft_text": str(moved)}), light) is False
    assert "draft_text" in read_config(light).sources
    moved.write_text('{"text": "another"}\n')
    for change in ({"draft_text": str(moved)}, {"draft_text": str(counted), "draft_vocab": 320}):
        with pytest.raises(EngineError, match="--force"):
            build(BuildSettings.model_validate({**asked, **change}), light)


def test_the_shipped_pair_has_a_text_of_its_own_and_others_must_name_one(tmp_path):
    flags = ["--model", "tiny", "--draft-vocab", 256, "--drafter-precision", "fp8"]
    output = ("--output", tmp_path / "engine")
    assert succeeds("build", *flags, "--backend", "torch", *output).endswith(f"{tmp_path / 'engine'}: built\n")
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    pair = ["--target", target, "--drafter", drafter, "--output", tmp_path / "other"]
    assert "--draft-text FILE" in refusal("build", *pair, "--draft-vocab", 64)
    (tmp_path / "text.txt").write_text("hello")
    line = refusal("build", *pair, "--draft-vocab", 64, "--draft-text", tmp_path / "text.txt")
    assert "--draft-vocab 64" in line and "no tokenizer" in line
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--draft-vocab", 1], "--draft-vocab 1: "),
        (["--draft-vocab", 2049], "--draft-vocab 2049: the vocabulary has 2048 tokens"),
        (["--draft-vocab", 3], "--draft-vocab 3: give at least 4, the number of special and stop tokens"),
        (["--draft-vocab", 301, "--tp", 2], "--draft-vocab 301: with --tp 2 it must be a multiple of 2, such as 300"),
        (["--draft-vocab", 300, "--drafter-precision", "fp8"], "--drafter-precision fp8 it must be a multiple of 16"),
        (["--draft-text", PROMPT_FILE], "--draft-text"),
        (["--draft-vocab", 2048, "--draft-text", PROMPT_FILE], "takes every token"),
        (["--draft-vocab", 64, "--draft-text", "nowhere.txt"], "--draft-text nowhere.txt: is not a file"),
        (["--drafter-precision", "fp4"], "--drafter-precision fp4: Input should be 'fp8'"),
    ],
)
def test_what_cannot_be_made_lighter_is_refused_by_name(flags, says, tmp_path):
    assert says in refusal("build", "--model", "tiny", "--output", tmp_path / "engine", *flags)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\nnot json\n', "line 2 is not a JSON object"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 is not a JSON object"),
        ("a.jsonl", b"[]\n", "line 1 is not a JSON object"),
    ],
)
def test_a_text_that_cannot_be_counted_is_refused(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    flags = ["--draft-vocab", 64, "--draft-text", tmp_path / name]
    line = refusal("build", "--model", "tiny", "--output", tmp_path / "engine", *flags)
    assert line.startswith(f"error: --draft-text {tmp_path / name}: ") and says in line
    assert os.listdir(tmp_path) == [name]


def test_a_drafter_without_a_full_vocabulary_or_with_odd_sides_is_refused(tmp_path):
    target = make_target(tmp_path / "target")
    reduced = make_drafter(tmp_path / "reduced", target, format="speculators", draft_vocab=32)
    full = make_drafter(tmp_path / "full", target)
    (tmp_path / "text.txt").write_text("hello")

    def said(*flags: object) -> str:
        return refusal("build", "--target", target, "--output", tmp_path / "engine", *flags)

    vocab = ["--draft-vocab", 16, "--draft-text", tmp_path / "text.txt"]
    assert "the drafter brings a vocabulary of its own, of 32 tokens" in said("--drafter", reduced, *vocab)
    fp8 = ["--drafter-precision", "fp8"]
    line = said("--drafter", full, *fp8, "--tp", 4)  # an FFN of 96
    assert "drafter.layers.0.mlp" in line and "with --tp 4, and FP8 needs multiples of 16" in line
    assert "--draft-vocab 16: there is no drafter" in said(*vocab)
    assert "--drafter-precision fp8: there is no drafter" in said(*fp8)
    # A head that the drafter brings is one of its matrices.
    succeeds("build", "--target", target, "--drafter", reduced, *fp8, "--output", tmp_path / "engine")
    assert rank_file(tmp_path / "engine")["drafter.lm_head.weight"].dtype == FP8


def test_a_shortlist_compiles_for_tensorrt(tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing can be compiled")
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_size": 64}
    target = make_target(tmp_path / "target", layers=2, vocab=2048, tied=True, **shape)
    drafter = make_drafter(tmp_path / "drafter", target, layers=1, tap_layers=(0, 1), **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((TINY / "target" / name).read_bytes())
    small = ["--max-batch", 1, "--max-seq-len", 128, "--chunk", 32, "--optimization-level", 0, "--greedy"]
    flags = ["--backend", "tensorrt", "--gpu", "sm120", "--draft-vocab", 300, "--draft-text", PROMPT_FILE]
    pair = ["--target", target, "--drafter", drafter]
    succeeds("build", *pair, *flags, *small, "--output", tmp_path / "engine")
    config = read_config(tmp_path / "engine")
    assert config.drafter is not None and config.drafter.draft_vocab_size == 300


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "1" * 5000 + "}"], ids=["nested", "digits"])
def test_a_line_to_count_that_json_cannot_hold_is_named(line, tmp_path):
    (tmp_path / "text.jsonl").write_text(line + "\n")
    flags = ("--draft-vocab", "300", "--draft-text", str(tmp_path / "text.jsonl"))
    said = refusal("build", "--model", "tiny", *flags, "--output", str(tmp_path / "engine"))
    assert "line 1 is not a JSON object with a text in one of" in said
