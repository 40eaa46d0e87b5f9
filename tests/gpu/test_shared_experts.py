"""The kernels' mixtures with an expert of all rows, gates and logits that are parts of wider rows, and the stream."""

from dataclasses import replace

import pytest
import torch

from tests.flat_ops import rowless_ops
from tests.gpu.test_kernels import HALVES, assert_close
from tests.gpu.test_kernels import why_not as why_no_kernels
from tests.gpu.test_moe import FEW_AND_MANY, QWEN3_MOE, Case, captured_layers, make_kernel_inputs, moe_in_float64
from tests.quantized import quantize_stack
from trtllm_dflash.ops.activations import sigmoid
from trtllm_dflash.ops.cuda_experts import join_shared_experts, moe_kernel
from trtllm_dflash.ops.experts import Experts, activate
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.session.weights import multiplied_weights

pytestmark = pytest.mark.skipif(bool(why_no_kernels()), reason=why_no_kernels())

QWEN35 = replace(QWEN3_MOE, experts=256, count=256, hidden=512, columns=128)
CASES = [
    *(replace(QWEN35, rows=rows, dtype=dtype) for rows in (1, 8, 33, 128, 300) for dtype in HALVES),
    replace(QWEN35, rows=512, experts=16, count=16),
    replace(QWEN35, rows=20, first=128, count=128),
    replace(QWEN35, rows=9, top_k=31, logits_dtype=torch.float32),
    replace(QWEN35, rows=4, experts=384, count=384, normalized=False),
    *(replace(QWEN35, rows=rows, experts=512, count=512, top_k=10) for rows in (1, 11, 16, 90, 512)),  # Qwen3-Next
    replace(QWEN35, rows=40, experts=400, first=100, count=300),
    replace(QWEN35, rows=70, spread=0.0),
]
IN_FP8 = replace(QWEN35, experts=16, count=16, columns=256)
FP8_CASES = [
    *(replace(IN_FP8, rows=rows, dtype=dtype) for rows in (1, 8, 20, 300) for dtype in HALVES),
    replace(IN_FP8, rows=9, first=8, count=8),
    replace(IN_FP8, rows=33, top_k=2, hidden=1040, columns=112),  # parts of blocks, one of gates and ups
    replace(IN_FP8, rows=12, top_k=2, hidden=5120, columns=128),  # more blocks in a row than lanes
    replace(IN_FP8, rows=16, hidden=2048, columns=512),
]
FORMATS = [pytest.param(None, id="numbers"), pytest.param("blocks", id="fp8 by block")]


def make_stored(case: Case, fp8: str | None = None):
    """Tensors of `make_kernel_inputs`, experts' and the shared one's by itself; logits and gates are parts of rows."""
    weights, x, logits = make_kernel_inputs(case)
    generator = torch.Generator("cuda").manual_seed(7)
    for name in ("gate_up_proj", "down_proj"):
        stack = weights[f"mlp.experts.{name}.weight"]
        one = torch.randn(stack.shape[1:], generator=generator, device="cuda").to(case.dtype) / 8
        for stacks, numbers in (("experts", stack), ("shared_expert", one[None])):
            key = f"mlp.{stacks}.{name}."
            stored = {"weight": numbers} if fp8 is None else quantize_stack(_unlike(numbers.float()).cpu(), fp8)
            take = slice(None) if stacks == "experts" else 0
            weights |= {key + kind: tensor.cuda()[take] for kind, tensor in stored.items() if kind != "input_scale"}
    layer = replace(case.layer, has_shared=True)
    joined = torch.randn(case.rows, case.experts + 8, generator=generator, device="cuda").to(logits.dtype)
    joined[:, : case.experts] = logits
    return weights, layer, x, joined[:, : case.experts], joined[:, case.experts : case.experts + 1]


def _unlike(numbers):
    """Multiplies blocks of 128 by 128 of [E, O, I] by factors from 1/4 to 2, so that another's scale is seen."""
    experts, outputs, inputs = numbers.shape
    generator = torch.Generator("cuda").manual_seed(outputs + experts)
    shape = experts, -(-outputs // 128), -(-inputs // 128)
    factors = torch.exp2(torch.randint(-2, 2, shape, generator=generator, device="cuda").float())
    return numbers * factors.repeat_interleave(128, 1)[:, :outputs].repeat_interleave(128, 2)[..., :inputs]


def make_inputs(case: Case, fp8: str | None = None):
    """Tensors of `make_stored`, joined."""
    weights, layer, *inputs = make_stored(case, fp8)
    return join_shared_experts(weights, [layer], case.dtype, torch.device("cuda")), layer, *inputs


def in_float64(case, weights, x, logits, gate, stream, rounded=None):
    """[rows, H]: the experts chosen, the shared one by its gate, and the stream. Weights as in `moe_in_float64`."""
    out = moe_in_float64(case, weights, x, logits, rounded)
    experts = Experts.of(weights, case.layer, "experts+shared_expert")
    numbers = (matrix.numbers(case.count, torch.float32) for matrix in (experts.gate_up, experts.down))
    gate_up, down = (matrix.to(rounded or case.dtype).double() for matrix in numbers)
    own = activate(x.double() @ gate_up.T, case.layer) @ down.T
    return out + own * (1 if gate is None else sigmoid(gate.double())) + (0 if stream is None else stream.double())


@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_the_shared_expert_it_equals_float64(case, many, poisoned):
    weights, layer, x, logits, gate = make_inputs(case)
    stream = torch.randn_like(x)
    moe = moe_kernel(layer, Experts.of(weights, layer, "experts+shared_expert"), many)
    for given in ((gate, stream), (None, stream), (gate, None), (None, None)):
        assert moe.takes(x, logits, *given)
        out = moe(x, logits, *given)
        assert_close(out, in_float64(case, weights, x, logits, *given), case.dtype, roundings=3.0)
    assert all(moe(x, logits).equal(out) for _ in range(3))


@pytest.mark.parametrize("fp8", ["channel", "blocks"])
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_experts_in_fp8_have_a_shared_one_too(case, fp8, poisoned):
    weights, layer, x, logits, gate = make_inputs(case, fp8)
    experts = Experts.of(weights, layer, "experts+shared_expert")
    assert experts.gate_up.quantized.by_block == (fp8 == "blocks") and len(experts.gate_up.weight) == case.count + 1
    stream, moe = torch.randn_like(x), moe_kernel(layer, experts)
    for given in ((gate, stream), (None, stream), (gate, None), (None, None)):
        assert moe.takes(x, logits, *given)
        out = moe(x, logits, *given)
        expected = in_float64(case, weights, x, logits, *given, rounded=torch.float32)
        assert_close(out, expected, case.dtype, roundings=4.0)
    assert all(moe(x, logits).equal(out) for _ in range(3))


def test_a_step_computes_a_shared_expert_in_blocks_with_the_others_and_has_it_on_the_gpu_once():
    """Loaded as a session does, from the CPU."""
    case, device = replace(IN_FP8, rows=20), torch.device("cuda")
    weights, layer, x, logits, gate = make_stored(case, "blocks")
    stored = {name: tensor.cpu() for name, tensor in weights.items()}
    del weights

    def requested(when: str) -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    loaded = multiplied_weights(join_shared_experts(stored, [layer], case.dtype, device), case.dtype, device)
    most = requested("peak") - before
    assert most == sum(x.nbytes for x in stored.values()) == requested("current") - before
    assert all(loaded[f"mlp.shared_expert.{name}_proj.weight"].dtype == FP8 for name in ("gate_up", "down"))
    stream = torch.randn_like(x)
    given = (tensor[None] for tensor in (stream, x, logits, gate))
    out = rowless_ops(loaded).add_mixture(layer, *given)
    assert out.pending is None
    assert out.x[0].equal(
        moe_kernel(layer, Experts.of(loaded, layer, "experts+shared_expert"))(x, logits, gate, stream)
    )
    expected = in_float64(case, loaded, x, logits, gate, stream, rounded=torch.float32)
    assert_close(out.x[0], expected, case.dtype, roundings=4.0)


@pytest.mark.parametrize("fp8", FORMATS)
def test_among_more_experts_than_the_kernels_choose_it_stays_apart(fp8):
    """In FP8 by block it is dequantized then, at load and not in every step."""
    case, device = replace(QWEN35, rows=3, experts=544, count=544, hidden=128), torch.device("cuda")
    weights, layer, x, logits, gate = make_stored(case, fp8)
    joined = join_shared_experts(weights, [layer], case.dtype, device)
    assert joined.keys() == weights.keys()
    loaded = multiplied_weights(joined, case.dtype, device)
    assert all(loaded[f"mlp.shared_expert.{name}_proj.weight"].dtype == case.dtype for name in ("gate_up", "down"))
    assert rowless_ops(loaded).add_mixture(layer, x[None], x[None], logits[None], gate[None]).pending is not None


@pytest.mark.parametrize("case", [Case(1), Case(40), replace(QWEN3_MOE, rows=7)], ids=str)
def test_experts_without_a_shared_one_add_to_the_stream(case, poisoned):
    weights, x, logits = make_kernel_inputs(case)
    stream = torch.randn_like(x)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
    assert_close(
        moe(x, logits, None, stream), moe_in_float64(case, weights, x, logits) + stream.double(), case.dtype, 3.0
    )
    assert moe(x, logits, None, torch.zeros_like(x)).equal(moe(x, logits))


@pytest.mark.parametrize("fp8", FORMATS)
def test_a_rows_result_is_the_same_to_the_bit_alone_and_among_others(fp8):
    case = replace(QWEN35, rows=200, experts=16, count=16)
    weights, layer, x, logits, gate = make_inputs(case, fp8)
    moe = moe_kernel(layer, Experts.of(weights, layer, "experts+shared_expert"))
    out = moe(x, logits, gate, x)
    for rows in (slice(0, 1), slice(7, 15), slice(100, 177)):
        assert moe(x[rows], logits[rows], gate[rows], x[rows]).equal(out[rows])


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 13, 16])
def test_captured_behind_products_that_let_it_begin_it_follows_their_results(rows, fp8):
    """Blocks that rehearse see the logits, rows and stream of the replay before."""
    case = replace(QWEN35, rows=rows)
    weights, layer, *_ = make_inputs(case, fp8)
    moe = moe_kernel(layer, Experts.of(weights, layer, "experts+shared_expert"))

    def parts(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores[:, : case.experts], scores[:, case.experts : case.experts + 1]

    for x, scores, before, out in captured_layers(case, moe, case.experts + 16, parts):
        # FP8's numbers are not rounded.
        rounded = None if fp8 is None else torch.float32
        expected = in_float64(case, weights, x, *parts(scores), before, rounded=rounded)
        assert_close(out, expected, case.dtype, roundings=3.0 if fp8 is None else 4.0)


def test_what_does_not_belong_together_is_refused():
    case = replace(QWEN35, rows=3, experts=16, count=16)
    weights, layer, x, logits, gate = make_inputs(case)
    joined = Experts.of(weights, layer, "experts+shared_expert")
    with pytest.raises(ValueError, match="17 experts"):
        moe_kernel(layer, Experts.of(weights, layer))(x, logits)
    with pytest.raises(ValueError, match="no shared expert"):
        moe_kernel(case.layer, Experts.of(weights, case.layer))(x, logits, gate)
    with pytest.raises(ValueError, match="a residual that is not"):
        moe_kernel(layer, joined)(x, logits, gate, x[:2])
    assert not moe_kernel(layer, joined).takes(x, logits, gate.float())


@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("rows", [(1, 1), (5, 3), (0, 8), (40, 24)], ids=str)
def test_rows_of_nobody_go_through_no_expert_of_all_rows_either(rows, fp8, many):
    real, nobodys = rows
    weights, layer, x, logits, gates = make_inputs(replace(IN_FP8, rows=real + nobodys), fp8)
    experts = Experts.of(weights, layer, "experts+shared_expert")
    segments = torch.arange(len(x), dtype=torch.int32, device=x.device)
    segments[real:] = -1
    moe = moe_kernel(layer, experts, many)
    out, plain = (moe(x, logits, gates, x, each) for each in (segments, None))
    assert out[:real].equal(plain[:real]) and out[real:].equal(x[real:])
