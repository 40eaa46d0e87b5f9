"""Experts that every row goes through, as the last of their layer's stack."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trtllm_dflash.kernels import Matrix
from trtllm_dflash.ops.base import ClampedSwiglu, MoELayer
from trtllm_dflash.ops.cuda_experts import join_shared_experts
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.weights import multiplied_weights

CPU = torch.device("cpu")
LAYER = MoELayer("mlp.", 6, 0, 6, 2, True, has_shared=True)
MATRICES = "gate_up_proj", "down_proj"

#: As if the kernels computed all experts: what they do compute they say on a GPU alone.
join = partial(join_shared_experts, takes=lambda *experts: True)


def make(dtype=torch.bfloat16, shared=32, experts=6, hidden=64, columns=32):
    """A layer's stacks, and its shared expert of so many columns."""
    torch.manual_seed(0)
    of = {"experts": (experts, columns), "shared_expert": (None, shared)}
    weights = {}
    for name, (count, size) in of.items():
        for matrix, shape in (("gate_up", (2 * size, hidden)), ("down", (hidden, size))):
            whole = shape if count is None else (count, *shape)
            weights[f"mlp.{name}.{matrix}_proj.weight"] = (torch.randn(whole) / 8).to(dtype)
    return weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_joined_is_what_it_was_and_in_memory_once(dtype):
    weights, before = make(dtype), make(dtype)
    given = dict(weights)
    weights = join(weights, [LAYER], dtype, CPU)
    assert all(weights[name].equal(tensor) and weights[name].is_contiguous() for name, tensor in before.items())
    for name in MATRICES:
        stack = weights[f"mlp.experts+shared_expert.{name}.weight"]
        assert stack.shape[0] == 7 and stack[6].equal(before[f"mlp.shared_expert.{name}.weight"])
        parts = weights[f"mlp.experts.{name}.weight"], weights[f"mlp.shared_expert.{name}.weight"]
        held = given[f"mlp.experts.{name}.weight"], given[f"mlp.shared_expert.{name}.weight"]
        assert {part.untyped_storage().data_ptr() for part in parts + held} == {stack.untyped_storage().data_ptr()}
    x, logits = torch.randn(1, 5, 64).to(dtype), torch.randn(1, 5, 6)
    plain, joined = (TorchOps(tensors, {}).moe(LAYER, x, logits) for tensors in (before, weights))
    assert plain.equal(joined)


def make_fp8(by_block=False, **sizes):
    """Those of `make` in FP8, whose scales are all different."""
    weights = {name: tensor.to(FP8) for name, tensor in make(**sizes).items()}
    for name in list(weights):
        *stack, rows, columns = weights[name].shape
        scales = (*stack, -(-rows // 128), -(-columns // 128)) if by_block else (*stack, rows)
        weights[name.removesuffix("weight") + "scale"] = torch.rand(scales)
    return weights


SCALED = {
    "rows": {},
    "blocks": {"by_block": True, "shared": 256, "columns": 256, "hidden": 384},
    "parts of blocks": {"by_block": True, "shared": 80, "columns": 80, "hidden": 144},  # one has gates and ups
}


def parts_of(weights, stack):
    """A stack's or one expert's matrices in FP8."""
    return [Fp8Weight(*(weights[f"mlp.{stack}.{name}.{kind}"] for kind in ("weight", "scale"))) for name in MATRICES]


@pytest.mark.parametrize("scaled", SCALED)
def test_fp8_is_joined_with_its_scales(scaled):
    before, given = make_fp8(**SCALED[scaled]), make_fp8(**SCALED[scaled])
    weights = join(given, [LAYER], torch.bfloat16, CPU)
    made = {f"mlp.experts+shared_expert.{name}.{kind}" for name in MATRICES for kind in ("weight", "scale")}
    assert weights.keys() == before.keys() | made
    for name, tensor in before.items():
        assert weights[name].float().equal(tensor.float()) and weights[name].is_contiguous()
        whole = weights["mlp.experts+shared_expert." + name.split(".", 2)[2]]
        assert len(whole) == 7 and whole.is_contiguous()
        for held in (weights[name], given[name]):
            assert held.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    experts = Experts.of(weights, LAYER, "experts+shared_expert")
    for matrix, own, one in zip(
        (experts.gate_up, experts.down), parts_of(before, "experts"), parts_of(before, "shared_expert"), strict=True
    ):
        assert Matrix(matrix.quantized.values, matrix.quantized.scale).suits(torch.bfloat16)  # else it is refused
        assert matrix.numbers(6, torch.float32).equal(one.dequantize())
        assert matrix.numbers(torch.arange(6), torch.float32).equal(own.dequantize())


@pytest.mark.parametrize("scaled", SCALED)
def test_a_shared_expert_in_fp8_is_not_dequantized_at_load_once_it_is_joined(scaled):
    """Nor is anything in memory twice; by itself it is dequantized, and computes the same."""
    before = make_fp8(**SCALED[scaled])
    joined = join({name: tensor.clone() for name, tensor in before.items()}, [LAYER], torch.bfloat16, CPU)
    loaded, apart = (multiplied_weights(of, torch.bfloat16, CPU) for of in (joined, before))
    assert loaded.keys() == joined.keys() and all(loaded[name] is tensor for name, tensor in joined.items())
    assert not any(name.startswith("mlp.shared_expert") and name.endswith("scale") for name in apart)
    x, logits = torch.randn(2, 3, len(before["mlp.shared_expert.down_proj.weight"])).bfloat16(), torch.randn(2, 3, 6)
    sums = [TorchOps(of, {}).add_mixture(LAYER, x, x, logits, logits[..., :1].bfloat16()) for of in (loaded, apart)]
    assert sums[0].pending.equal(sums[1].pending)


class Allocations(TorchDispatchMode):
    """The most bytes that some tensors and what is allocated beside them had at once.

    Args:
        given: may be set to other memory meanwhile.
    """

    def __init__(self, given):
        super().__init__()
        self._given, self._made = list(given), []
        self.most = self.now()

    def now(self):
        tensors = self._given + [tensor for ref in self._made if (tensor := ref()) is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format:
            self._made.append(weakref.ref(out))
            self.most = max(self.most, self.now())
        return out


@pytest.mark.parametrize("scaled", SCALED)
def test_no_more_than_one_matrix_is_in_memory_twice(scaled):
    given = make_fp8(**SCALED[scaled])
    largest = max(tensor.nbytes for tensor in given.values())
    of_one = sum(tensor.nbytes for name, tensor in given.items() if "shared_expert" in name)
    with Allocations(given.values()) as memory:
        before = memory.now()
        joined = join(given, [LAYER], torch.bfloat16, CPU)
        assert memory.now() == before
    assert len(joined) == 3 * len(given) // 2
    assert before + largest < memory.most <= before + largest + of_one


@pytest.mark.parametrize(
    ("weights", "layer", "dtype"),
    [
        pytest.param(make(shared=48), LAYER, torch.bfloat16, id="other sizes"),
        pytest.param(make(torch.float32), LAYER, torch.float32, id="FP32"),
        pytest.param(
            {**make(), "mlp.shared_expert.down_proj.weight": make(torch.float16)["mlp.shared_expert.down_proj.weight"]},
            LAYER,
            torch.bfloat16,
            id="other types",
        ),
        pytest.param(
            {**make(), "mlp.experts.gate_up_proj.bias": torch.zeros(6, 64, dtype=torch.bfloat16)},
            LAYER,
            torch.bfloat16,
            id="biases",
        ),
        pytest.param(
            make(), MoELayer("mlp.", 6, 0, 6, 2, True, activation="gelu", has_shared=True), torch.bfloat16, id="GELU"
        ),
        pytest.param(
            make(),
            MoELayer("mlp.", 6, 0, 6, 2, True, ClampedSwiglu(1.702, 7.0), has_shared=True),
            torch.bfloat16,
            id="a clamp",
        ),
        pytest.param(
            {**make(), "mlp.shared_expert.gate_up_proj.bias": torch.zeros(64, dtype=torch.bfloat16)},
            LAYER,
            torch.bfloat16,
            id="a bias of the shared one alone",
        ),
        pytest.param(
            {**make_fp8(), **{name: x for name, x in make_fp8(by_block=True).items() if "shared_expert" in name}},
            LAYER,
            torch.bfloat16,
            id="FP8 by row beside FP8 by block",
        ),
        pytest.param(
            {**make_fp8(by_block=True), **make_fp8(by_block=True, shared=160)},
            LAYER,
            torch.bfloat16,
            id="other sizes in blocks",
        ),
        pytest.param(
            {**make_fp8(by_block=True), "mlp.shared_expert.down_proj.scale": torch.ones(1, 1).bfloat16()},
            LAYER,
            torch.bfloat16,
            id="scales in BF16",
        ),
        pytest.param(make_fp8(by_block=True), LAYER, torch.float32, id="FP8 beside FP32"),
        pytest.param(
            {name: x for name, x in make_fp8(by_block=True).items() if name != "mlp.shared_expert.down_proj.scale"},
            LAYER,
            torch.bfloat16,
            id="a scale missing",
        ),
        pytest.param({**make_fp8(), **make(torch.float32)}, LAYER, torch.bfloat16, id="scales of other types"),
        pytest.param(make(), replace(LAYER, has_shared=False), torch.bfloat16, id="none that all rows go through"),
        pytest.param({}, LAYER, torch.bfloat16, id="no experts"),
    ],
)
def test_what_is_not_alike_stays_apart(weights, layer, dtype):
    joined = join(weights, [layer], dtype, CPU)
    assert joined.keys() == weights.keys() and all(joined[name] is tensor for name, tensor in weights.items())


def test_what_the_kernels_do_not_compute_stays_apart():
    """So it is dequantized once, at load. The kernels are asked for the experts that the rank has."""
    weights, asked = make_fp8(by_block=True), []
    layer = replace(LAYER, experts=12, first=0, count=12)

    def takes(*experts):
        asked.append(experts)
        return False

    joined = join_shared_experts(weights, [layer], torch.bfloat16, CPU, takes)
    assert joined.keys() == weights.keys() and all(joined[name] is tensor for name, tensor in weights.items())
    ((own, _, hidden, dtype),) = asked
    assert (own, hidden, dtype) == (replace(layer, count=6), 64, torch.bfloat16)


@pytest.mark.parametrize("gated", [False, True])
def test_a_mixture_is_its_experts_and_the_shared_one(gated):
    weights = make(torch.float32)
    ops = TorchOps(weights, {})
    stream, x = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    logits, gate = torch.randn(2, 3, 6), torch.randn(2, 3, 1)
    sum_ = ops.add_mixture(LAYER, stream, x, logits, *[gate] * gated)
    gates, ups = (x @ weights["mlp.shared_expert.gate_up_proj.weight"].T).chunk(2, dim=-1)
    own = (torch.nn.functional.silu(gates) * ups) @ weights["mlp.shared_expert.down_proj.weight"].T
    expected = stream + ops.moe(LAYER, x, logits) + own * (gate.sigmoid() if gated else 1)
    torch.testing.assert_close(ops.add_pending(sum_), expected, rtol=1e-5, atol=1e-5)
