"""Experts that every row goes through, as the last of their layer's stack."""

from dataclasses import replace

import pytest
import torch

from trtllm_dflash.ops.base import ClampedSwiglu, MoELayer
from trtllm_dflash.ops.cuda_experts import join_shared_experts
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
LAYER = MoELayer("mlp.", 6, 0, 6, 2, True, has_shared=True)
JOINED = "mlp.experts+shared_expert.gate_up_proj.weight"


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
    weights = join_shared_experts(weights, [LAYER], dtype, CPU)
    assert all(weights[name].equal(tensor) and weights[name].is_contiguous() for name, tensor in before.items())
    for name in ("gate_up_proj", "down_proj"):
        stack = weights[f"mlp.experts+shared_expert.{name}.weight"]
        assert stack.shape[0] == 7 and stack[6].equal(before[f"mlp.shared_expert.{name}.weight"])
        parts = weights[f"mlp.experts.{name}.weight"], weights[f"mlp.shared_expert.{name}.weight"]
        held = given[f"mlp.experts.{name}.weight"], given[f"mlp.shared_expert.{name}.weight"]
        assert {part.untyped_storage().data_ptr() for part in parts + held} == {stack.untyped_storage().data_ptr()}
    x, logits = torch.randn(1, 5, 64).to(dtype), torch.randn(1, 5, 6)
    plain, joined = (TorchOps(tensors, {}).moe(LAYER, x, logits) for tensors in (before, weights))
    assert plain.equal(joined)


def make_fp8(by_block=False):
    weights = {name: tensor.to(FP8) for name, tensor in make().items()}
    for name in list(weights):
        shape = weights[name].shape
        scales = (*shape[:-2], -(-shape[-2] // 128), 1) if by_block else shape[:-1]
        weights[name.removesuffix("weight") + "scale"] = torch.rand(scales)
    return weights


def test_fp8_is_joined_with_its_scales():
    before = {name: tensor.clone() for name, tensor in make_fp8().items()}
    weights = join_shared_experts(dict(before), [LAYER], torch.bfloat16, CPU)
    assert all(weights[name].float().equal(tensor.float()) for name, tensor in before.items())
    stack = Experts.of(weights, LAYER, "experts+shared_expert").gate_up
    values = before["mlp.shared_expert.gate_up_proj.weight"].float()
    assert stack.numbers(6, torch.float32).equal(values * before["mlp.shared_expert.gate_up_proj.scale"][:, None])


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
        pytest.param(make_fp8(by_block=True), LAYER, torch.bfloat16, id="FP8 by block"),
        pytest.param({**make_fp8(), **make(torch.float32)}, LAYER, torch.bfloat16, id="scales of other types"),
        pytest.param(make(), replace(LAYER, has_shared=False), torch.bfloat16, id="none that all rows go through"),
        pytest.param({}, LAYER, torch.bfloat16, id="no experts"),
    ],
)
def test_what_is_not_alike_stays_apart(weights, layer, dtype):
    joined = join_shared_experts(weights, [layer], dtype, CPU)
    assert joined.keys() == weights.keys() and all(joined[name] is tensor for name, tensor in weights.items())


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
