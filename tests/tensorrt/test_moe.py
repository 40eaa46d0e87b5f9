"""A mixture of experts emitted for TensorRT computes what TorchOps computes, in each of its forms."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt
from trtllm_dflash.ops.base import ClampedSwiglu, MoELayer
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

SLOTS, ROWS, HIDDEN, COLUMNS, EXPERTS = 2, 5, 64, 32, 8
GPT_OSS = MoELayer("mlp.", EXPERTS, 0, EXPERTS, 4, True, ClampedSwiglu(1.702, 1.0))
LAYERS = {
    "gpt-oss": GPT_OSS,
    "qwen3": MoELayer("mlp.", EXPERTS, 0, EXPERTS, 3, True),
    "not normalized": MoELayer("mlp.", EXPERTS, 0, EXPERTS, 2, False),
    "some experts": replace(GPT_OSS, first=2, count=3),
}


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


def make_weights(layer: MoELayer, mxfp4: bool, biases: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights: dict[str, Tensor] = {}
    for name, rows, columns in (("gate_up_proj", 2 * COLUMNS, HIDDEN), ("down_proj", HIDDEN, COLUMNS)):
        prefix = f"mlp.experts.{name}."
        if mxfp4:
            blocks = torch.randint(0, 256, (layer.count, rows, columns // 32, 16), generator=generator)
            scales = torch.randint(120, 128, (layer.count, rows, columns // 32), generator=generator)
            weights |= {prefix + "blocks": blocks.to(torch.uint8), prefix + "scales": scales.to(torch.uint8)}
        else:
            weights[prefix + "weight"] = torch.randn(layer.count, rows, columns, generator=generator) / 8
        if biases:
            weights[prefix + "bias"] = torch.randn(layer.count, rows, generator=generator) / 4
    return weights


def compare(builder: Any, layer: MoELayer, weights: dict[str, Tensor], capability: int | None) -> TensorRTOps:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SLOTS, ROWS, HIDDEN, generator=generator)
    logits = torch.randn(SLOTS, ROWS, EXPERTS, generator=generator) * 2
    logits[0, 0] = 1.0  # all equal
    logits[0, 1] = torch.tensor([0.0, 1, 1, 0, 1, 1, 1, 2])  # equals at the edge
    expected = TorchOps(weights, {}).moe(layer, x, logits)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    ops = TensorRTOps(network, weights, {}, capability=capability)
    given = {
        name: network.add_input(name, trt.float32, (-1, -1, size)) for name, size in (("x", HIDDEN), ("l", EXPERTS))
    }
    y = ops.moe(layer, given["x"], given["l"])
    y.name = "y"
    network.mark_output(y)
    (found,) = evaluate([network], [{"x": x, "l": logits}])
    # Sums are in another order: their rounding is that of the largest terms.
    torch.testing.assert_close(found["y"], expected, atol=2e-6 * float(expected.abs().max()), rtol=2e-5)
    return ops


def constants(ops: TensorRTOps, dtype: Any) -> int:
    """Numbers of the network's constants of a type."""
    layers = (ops.network.get_layer(i) for i in range(ops.network.num_layers))
    outputs = [layer.get_output(0) for layer in layers if layer.type == trt.LayerType.CONSTANT]
    return sum(torch.Size(output.shape).numel() for output in outputs if output.dtype == dtype)


@pytest.mark.parametrize("capability", [89, 120, 103])
@pytest.mark.parametrize("mxfp4", [False, True], ids=["numbers", "mxfp4"])
@pytest.mark.parametrize("kind", LAYERS)
def test_moe_is_that_of_torch_ops(builder: Any, kind: str, mxfp4: bool, capability: int) -> None:
    layer = LAYERS[kind]
    ops = compare(builder, layer, make_weights(layer, mxfp4, biases=layer.clamp is not None), capability)
    numbers = layer.count * 3 * COLUMNS * HIDDEN
    assert constants(ops, trt.fp4) == (numbers if mxfp4 and capability >= 100 else 0)
    kinds = {ops.network.get_layer(i).type for i in range(ops.network.num_layers)}
    assert (trt.LayerType.MOE in kinds) == (capability == 103)


@pytest.mark.parametrize("capability", [120, 103])
def test_a_rank_without_the_bias_after_the_sum_adds_none(builder: Any, capability: int) -> None:
    weights = make_weights(GPT_OSS, mxfp4=True, biases=True)
    del weights["mlp.experts.down_proj.bias"]
    compare(builder, GPT_OSS, weights, capability)


def test_what_the_transcode_rounds_is_counted(builder: Any) -> None:
    weights = make_weights(GPT_OSS, mxfp4=True, biases=True)
    exact = compare(builder, GPT_OSS, weights, 103).transcoded
    blocks = EXPERTS * 3 * COLUMNS * HIDDEN // 32
    assert (exact.blocks, exact.rounded, exact.largest_error) == (blocks, 0, 0.0)
    scales = weights["mlp.experts.gate_up_proj.scales"]
    scales[0, 0, 0] = 90  # 2^-37: too small to change anything but the count
    lossy = compare(builder, GPT_OSS, weights, 103).transcoded
    assert (lossy.blocks, lossy.rounded) == (blocks, 1) and 0 < lossy.largest_error <= 6 * 2.0**-37


@pytest.mark.parametrize(("gpu", "bits"), [(120, 4.25), (89, 16)])
def test_mxfp4_experts_stay_mxfp4_in_a_plan_where_the_gpu_multiplies_fp4(builder: Any, gpu: int, bits: float) -> None:
    size, columns = 256, 1024
    blocks = {"gate_up_proj": (EXPERTS, 2 * columns, size // 32), "down_proj": (EXPERTS, size, columns // 32)}
    weights = {f"mlp.experts.{name}.scales": torch.full(shape, 120).to(torch.uint8) for name, shape in blocks.items()}
    for name, shape in blocks.items():
        weights[f"mlp.experts.{name}.blocks"] = torch.randint(0, 256, (*shape, 16)).to(torch.uint8)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    ops = TensorRTOps(network, weights, {}, capability=gpu)
    given = {name: network.add_input(name, trt.bfloat16, (-1, -1, n)) for name, n in (("x", size), ("l", EXPERTS))}
    network.mark_output(ops.moe(GPT_OSS, given["x"], given["l"]))
    options = builder.create_builder_config()
    options.num_compute_capabilities = 1
    options.set_compute_capability(getattr(trt.ComputeCapability, f"SM{gpu}"), 0)
    for slots, rows in ((1, 512), (8, 10)):
        profile = builder.create_optimization_profile()
        for name, n in (("x", size), ("l", EXPERTS)):
            profile.set_shape(name, (1, 1, n), (slots, rows, n), (slots, rows, n))
        options.add_optimization_profile(profile)
    experts = EXPERTS * 3 * size * columns * bits / 8
    kernels = 3_000_000
    assert experts <= builder.build_serialized_network(network, options).nbytes < experts + kernels
