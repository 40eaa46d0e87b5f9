"""Mixtures of experts, windows and sinks on a GPU: what torch computes where no kernel of ours does."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.checkpoints import make_drafter, make_gpt_oss
from tests.flat_ops import rowless_ops
from tests.gpu.test_kernels import HALVES, assert_close
from tests.gpu.test_kernels import why_not as why_no_kernels
from tests.quantized import METHODS, quantize_stack
from tests.test_experts import CLAMP, make
from trtllm_dflash import LLM, SamplingParams, kernels
from trtllm_dflash.ops.base import ClampedSwiglu, MoELayer
from trtllm_dflash.ops.cuda_experts import moe_kernel, takes_experts, tile_experts
from trtllm_dflash.ops.experts import Experts, activate
from trtllm_dflash.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
needs_kernels = pytest.mark.skipif(bool(why_no_kernels()), reason=why_no_kernels())


@pytest.mark.parametrize("kind", ["numbers", "mxfp4", "tensor", "channel", "blocks", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_captured_experts_equal_the_cpus_for_any_routing(rows, kind):
    layer = MoELayer("mlp.", 16, 4, 8, 4, True, CLAMP)
    weights = make(8, layer, packed=kind == "mxfp4")
    if kind in METHODS:
        for name in ("gate_up_proj", "down_proj"):
            key = f"mlp.experts.{name}."
            stored = quantize_stack(weights.pop(key + "weight"), kind)
            weights |= {key + suffix: tensor for suffix, tensor in stored.items()}
    ops = TorchOps({name: tensor.cuda() for name, tensor in weights.items()}, {})
    x, logits = torch.zeros(1, rows, 32, device="cuda"), torch.zeros(1, rows, 16, device="cuda")
    ops.moe(layer, x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.moe(layer, x, logits)
    generator = torch.Generator().manual_seed(0)
    for spread in (1.0, 0.0):
        given = torch.randn(x.shape, generator=generator), spread * torch.randn(logits.shape, generator=generator)
        x.copy_(given[0])
        logits.copy_(given[1])
        graph.replay()
        torch.testing.assert_close(out.cpu(), TorchOps(weights, {}).moe(layer, *given), rtol=1e-3, atol=1e-3)


# -- the kernels -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Rows and experts; `spread` of the logits: 0 makes all of a row equal, and whole numbers make ties."""

    rows: int
    dtype: torch.dtype = torch.bfloat16
    packed: bool = True
    experts: int = 32
    first: int = 0
    count: int = 32
    top_k: int = 4
    hidden: int = 2880
    columns: int = 384
    clamp: ClampedSwiglu | None = CLAMP
    normalized: bool = True
    bias: bool = True
    spread: float = 1.0
    whole: bool = False
    logits_dtype: torch.dtype | None = None
    scales: tuple[int, int] = (118, 122)
    gelu: bool = False  # as in Gemma, with a scale of each expert's shares

    def __str__(self) -> str:
        kind = "mxfp4" if self.packed else "numbers"
        own = f"{self.first}+{self.count}of{self.experts}top{self.top_k}"
        kind += "-gelu" * self.gelu
        return f"{self.rows}x{self.hidden}x{self.columns}-{kind}-{str(self.dtype)[6:]}-{own}-{self.spread}"

    @property
    def layer(self) -> MoELayer:
        own = self.experts, self.first, self.count, self.top_k, self.normalized, self.clamp
        return MoELayer("mlp.", *own, activation="gelu" if self.gelu else "silu")


QWEN3_MOE = Case(
    1, packed=False, experts=128, count=128, top_k=8, hidden=1024, columns=384, clamp=None, bias=False, spread=0.5
)
GEMMA = replace(QWEN3_MOE, hidden=2816, columns=704, gelu=True)
CASES = [
    *(replace(GEMMA, rows=rows, dtype=dtype) for rows in (1, 16, 100) for dtype in HALVES),
    replace(GEMMA, rows=10, first=32, count=64),
    *(Case(rows, dtype) for rows in (1, 2, 8, 9, 80) for dtype in HALVES),
    *(Case(rows, packed=False) for rows in (1, 8, 33, 256)),
    *(replace(QWEN3_MOE, rows=rows) for rows in (1, 2, 16, 17, 100)),  # of up to 16 blocks find the routing themselves
    replace(QWEN3_MOE, rows=12, top_k=10),  # 120 pairs: likewise
    replace(QWEN3_MOE, rows=13, top_k=10, dtype=torch.float16),  # 130: not
    replace(QWEN3_MOE, rows=4, normalized=False),
    replace(QWEN3_MOE, rows=7, logits_dtype=torch.float32),
    *(replace(QWEN3_MOE, rows=rows, first=96, count=32) for rows in (1, 5, 16)),
    replace(QWEN3_MOE, rows=40, dtype=torch.float16, normalized=False, logits_dtype=torch.float32),
    Case(10, first=8, count=8, columns=2880),  # a rank's experts
    Case(3, experts=256, first=200, count=56),
    *(Case(rows, experts=64, first=60, count=4) for rows in (1, 2)),  # few rows, if any, chose one of this rank's
    *(Case(rows, spread=0.0) for rows in (1, 13)),
    Case(1, normalized=False),  # a kernel routes, and both products of one row begin behind it
    Case(1, torch.float16, logits_dtype=torch.float32),
    Case(1, hidden=544, columns=160, experts=8, count=8, whole=True),
    Case(256, columns=736),  # a rank's columns: an odd number of blocks
    Case(512, hidden=512, columns=96, top_k=8),
    Case(64, spread=0.0),  # all choose the first four
    Case(300, spread=0.0, top_k=1, hidden=576),
    Case(50, whole=True),
    Case(50, torch.float16, whole=True, normalized=False),
    Case(20, hidden=32, columns=32, experts=5, count=5, top_k=5),
    Case(20, packed=False, hidden=16, columns=48, experts=5, count=5, top_k=2),
    Case(20, hidden=7168, columns=128, clamp=None),
    Case(5, scales=(112, 129), hidden=320, columns=64, clamp=None, bias=False),
    Case(5, torch.float16, scales=(80, 129), hidden=320, columns=64, clamp=None, bias=False),
    # 416 outputs are 26 granules: the last slab has two.
    *(Case(rows, hidden=416, columns=160, experts=5, count=5, top_k=3) for rows in (3, 15, 27, 60, 130)),
]


def make_kernel_inputs(case: Case, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Tensors of the experts, x [rows, H] and logits [rows, experts], on the GPU."""
    weights = make(case.count, case.layer, case.hidden, case.columns, case.packed, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name in list(weights):
        if name.endswith("scales"):
            shape = weights[name].shape
            weights[name] = torch.randint(*case.scales, shape, generator=generator, dtype=torch.uint8)
        elif name.endswith("bias") and not case.bias:
            del weights[name]
    if case.gelu:
        weights["mlp.router.expert_scale"] = torch.rand(case.experts, generator=generator) + 0.5
    kept = {
        name: tensor.cuda() if tensor.dtype == torch.uint8 else tensor.to("cuda", case.dtype)
        for name, tensor in weights.items()
    }
    tile_experts(kept, case.dtype, torch.cuda.get_device_capability())
    x = torch.randn(case.rows, case.hidden, generator=generator)
    # Numbers of large scales are large.
    x *= 2.0 ** min(0, 125 - case.scales[1]) if case.packed else 1.0
    logits = case.spread * torch.randn(case.rows, case.experts, generator=generator)
    logits = logits.round() if case.whole else logits
    return kept, x.to("cuda", case.dtype), logits.to("cuda", case.logits_dtype or case.dtype)


def moe_in_float64(
    case: Case,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    logits: torch.Tensor,
    rounded: torch.dtype | None = None,
) -> torch.Tensor:
    """[rows, H], expert by expert. Weights are rounded to the rows' type, or as given."""
    experts, layer = Experts.of(weights, case.layer), case.layer
    ids, shares = experts.route(layer, logits)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for own in range(layer.count):
        rows, slots = torch.where(ids == layer.first + own)
        h = x[rows].double()
        for matrix in (experts.gate_up, experts.down):
            h = h @ matrix.numbers(own, torch.float32).to(rounded or case.dtype).double().T
            h = h if matrix.bias is None else h + matrix.bias[own].double()
            h = activate(h, layer) if matrix is experts.gate_up else h
        out.index_add_(0, rows, h * shares[rows, slots, None].double())
    return out


MANY = pytest.param(
    True,
    id="many",
    marks=pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs SM90"
    ),
)
FEW_AND_MANY = [pytest.param(False, id="few"), MANY]


@needs_kernels
@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_moe_equals_float64(case, many, poisoned):
    weights, x, logits = make_kernel_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer), many)
    assert moe.takes(x, logits)
    expected = moe_in_float64(case, weights, x, logits)
    assert_close(moe(x, logits), expected, case.dtype, roundings=3.0)


RAGGED = [
    replace(GEMMA, rows=300, experts=32, count=32),
    Case(512, packed=False, hidden=128, columns=64, experts=4, count=4),  # every row chose every expert
    Case(512, hidden=256, columns=64, experts=4, count=4),
    Case(512, packed=False, spread=0.0, top_k=1, hidden=256, columns=80),  # all chose the first
    *(Case(rows, packed=False, hidden=1040, columns=112, experts=8, count=5) for rows in (15, 63, 97, 130, 250)),
    *(Case(rows, hidden=544, columns=160, experts=8, first=3, count=5) for rows in (15, 63, 97, 130, 250)),
    *(Case(rows) for rows in (1, 8, 16)),
    *(replace(QWEN3_MOE, rows=rows) for rows in (1, 16, 512)),
    replace(QWEN3_MOE, rows=300, dtype=torch.float16),
    Case(320, experts=128, count=128, columns=736),
    Case(256, columns=2880),
    Case(256, torch.float16, columns=2880),
]


@needs_kernels
@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_moe_of_uneven_routing_equals_float64_and_itself_to_the_bit(case, many, poisoned):
    weights, x, logits = make_kernel_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer), many)
    out = moe(x, logits)
    assert_close(out, moe_in_float64(case, weights, x, logits), case.dtype, roundings=3.0)
    assert all(moe(x, logits).equal(out) for _ in range(10))


@needs_kernels
@pytest.mark.parametrize("many", [MANY])
@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_few_and_many_rows_are_computed_to_the_same_bits(case, many):
    weights, x, logits = make_kernel_inputs(case)
    few, many = (moe_kernel(case.layer, Experts.of(weights, case.layer), kind)(x, logits) for kind in (False, many))
    differ = (few != many).nonzero()
    assert len(differ) == 0, f"{len(differ)} of {few.numel()}, up to {(few - many).abs().max()}; first {differ[0]}"


@needs_kernels
@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "mxfp4"])
@pytest.mark.parametrize("many", FEW_AND_MANY)
def test_one_captured_moe_serves_any_routing(packed, many, poisoned):
    case = Case(80, packed=packed)
    weights, x, logits = make_kernel_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer), many)
    moe(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, logits)
    for spread in (1.0, 0.0, 10.0):
        torch.manual_seed(2)
        x.normal_()
        logits.normal_().mul_(spread)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, moe_in_float64(case, weights, x, logits), case.dtype, roundings=3.0)


def captured_layers(case, moe, outputs, parts=lambda scores: (scores, None)):
    """Captures three layers, each behind a norm and a router, and lets them run on twelve streams.

    Yields the last layer's rows, what its router said, the stream before it and behind it.

    Args:
        outputs: of the router.
        parts: what of them are logits and gates.
    """
    router = torch.randn(outputs, case.hidden, device="cuda", dtype=case.dtype) / 8
    norm = torch.ones(case.hidden, device="cuda", dtype=case.dtype)
    given = torch.zeros(case.rows, case.hidden, device="cuda", dtype=case.dtype)

    def step() -> tuple[torch.Tensor, ...]:
        stream = given
        for _ in range(3):  # what one of them leaves lies where the next one's will
            x = kernels.rms_norm(stream[None], norm, 1e-6)[0]
            scores = kernels.skinny_gemm(x, router)
            before, stream = stream, moe(x, *parts(scores), stream)
        return x, scores, before, stream

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = step()
    for seed in range(12):
        torch.manual_seed(seed)
        given.normal_()
        graph.replay()
        yield last


@needs_kernels
@pytest.mark.parametrize("rows", [1, 8])
def test_captured_behind_products_that_let_it_begin_it_follows_their_results(rows):
    """One row's second product begins beside the first, when what it will read is still that of the layer before."""
    case = Case(rows)
    weights, *_ = make_kernel_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
    for x, logits, before, out in captured_layers(case, moe, case.experts):
        expected = moe_in_float64(case, weights, x, logits) + before.double()
        assert_close(out, expected, case.dtype, roundings=3.0)


@needs_kernels
@pytest.mark.parametrize("many", [None, *FEW_AND_MANY])
@pytest.mark.parametrize("case", [Case(200), replace(QWEN3_MOE, rows=200)], ids=str)
def test_a_rows_result_is_the_same_to_the_bit_alone_and_among_others(case, many):
    weights, x, logits = make_kernel_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer), many)
    out = moe(x, logits)
    assert all(moe(x, logits).equal(out) for _ in range(10))
    for rows in (slice(0, 1), slice(7, 15), slice(100, 177)):
        assert moe(x[rows], logits[rows]).equal(out[rows])


@needs_kernels
@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("rows", [(1, 0), (0, 1), (5, 3), (12, 4), (20, 12), (0, 8), (200, 56)], ids=str)
@pytest.mark.parametrize(
    "kind",
    [Case(1), QWEN3_MOE, replace(QWEN3_MOE, first=96, count=32), Case(1, logits_dtype=torch.float32), GEMMA],
    ids=str,
)
def test_rows_of_nobody_choose_no_expert_and_change_no_other_row(kind, rows, many):
    """Those behind a step's rows, where a larger step was captured: all alike, and each expert of theirs was read."""
    real, nobodys = rows
    case = replace(kind, rows=real + nobodys)
    weights, x, logits = make_kernel_inputs(case)
    residual = torch.randn_like(x)
    segments = torch.arange(case.rows, dtype=torch.int32, device=x.device)
    segments[real:] = -1
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer), many)
    out, plain = (moe(x, logits, None, residual, each) for each in (segments, None))
    assert out[:real].equal(plain[:real]) and out[real:].equal(residual[real:])


NOT_TAKEN = [
    Case(4, hidden=1 << 15, columns=32),  # too wide for shared memory
    Case(4, torch.float32, False),
    Case(4, scales=(112, 135)),  # of two factors of BF16
    Case(4, torch.float16, scales=(110, 256)),  # some are not numbers
]


@needs_kernels
@pytest.mark.parametrize("case", NOT_TAKEN, ids=str)
def test_what_the_kernels_do_not_take_torch_computes(case):
    weights, x, logits = make_kernel_inputs(case)
    assert not takes_experts(case.layer, weights, case.hidden, case.dtype)
    ops, plain = rowless_ops(weights), TorchOps(weights, {})
    found, expected = (each.moe(case.layer, x[None], logits[None]) for each in (ops, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_more_rows_than_the_kernels_take_are_computed_in_parts():
    case = Case(1100, hidden=64, columns=32)
    weights, x, logits = make_kernel_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
    out = rowless_ops(weights).moe(case.layer, x[None], logits[None])[0]
    for rows in (slice(0, 512), slice(512, 1024), slice(1024, 1100)):
        assert out[rows].equal(moe(x[rows], logits[rows]))
    assert_close(out, moe_in_float64(case, weights, x, logits), case.dtype, roundings=3.0)


# -- attention ---------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 30, 1000])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("start", [0, 200])
def test_a_chunks_attention_has_windows_and_sinks(start, has_sinks, window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 100, 64, generator=generator).bfloat16()
    keys, values = (torch.randn(1, 2, 400, 64, generator=generator).bfloat16() for _ in range(2))
    sinks = torch.randn(8, generator=generator) * 3
    lengths, name = torch.tensor([start + 100], dtype=torch.int32), "sinks" if has_sinks else None
    wide = [x.float() for x in (q, keys, values)]
    expected = TorchOps({"sinks": sinks}, {}).attention(*wide, lengths, True, window, name)
    rows, keys, values = q[0].transpose(0, 1).contiguous().cuda(), keys.cuda(), values.cuda()
    cuts = [[0, start + first, first, min(kernels.MAX_ROWS, 100 - first)] for first in range(0, 100, kernels.MAX_ROWS)]
    actual = kernels.attend_rows(
        rows,
        keys,
        values,
        kernels.Pages(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), 400),
        torch.tensor(cuts, dtype=torch.int32, device="cuda"),
        kernels.MAX_ROWS,
        out=torch.empty(1, 100, 8 * 64, dtype=torch.bfloat16, device="cuda"),
        causal=True,
        window=window or 0,
        sinks=sinks.cuda() if has_sinks else None,
    )
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=0.02, atol=0.02)


def test_gpt_oss_in_fp32_gives_the_cpus_tokens(tmp_path):
    target = make_gpt_oss(tmp_path / "target", layers=3, vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target, attention_bias=True, block_size=8)
    prompts = [[1, 2, 3] * 20, [4, 5]]
    texts = []
    for device in ("cpu", "cuda"):
        with LLM.from_pretrained(target, drafter, precision="fp32", device=device, max_batch=2, max_seq_len=128) as llm:
            texts.append([c.token_ids for c in llm.generate(prompts, SamplingParams(max_tokens=40))])
    assert texts[0] == texts[1]
