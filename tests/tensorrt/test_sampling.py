"""Sampling and argmax in the graph: exact for any top_k and top_p, with ties, for any share of the vocabulary."""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps, ordered_values
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor
ROWS, VOCABULARY = 3, 1200

LOGITS = {torch.float32: "float32", torch.float16: "float16"}


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


def chosen(builder: Any, logits: Tensor, sampling: SamplingInputs[Tensor] | None, tp: int) -> list[Tensor]:
    """What the network of each rank chooses, each given its slice of the logits."""
    networks, inputs = [], []
    for rank, part in enumerate(logits.chunk(tp, dim=2)):
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        ops = TensorRTOps(network, {}, {}, tp, rank)
        given = network.add_input("logits", getattr(trt, LOGITS[logits.dtype]), (-1, -1, part.shape[2]))
        bound = {"logits": part}
        if sampling is None:
            ids = ops.argmax(given)
        else:
            floats = {"temperature": sampling.temperature, "top_p": sampling.top_p, "uniform": sampling.uniform}
            tensors = {name: network.add_input(name, trt.float32, (-1,) * x.dim()) for name, x in floats.items()}
            tensors["top_k"] = network.add_input("top_k", trt.int32, (-1,))
            bound |= floats | {"top_k": sampling.top_k}
            ids = ops.sample(given, SamplingInputs(**tensors))
        ids.name = "ids"
        network.mark_output(ids)
        networks.append((network, ops))
        inputs.append(bound)
    return [out["ids"] for out in evaluate([network for network, _ in networks], inputs)]


def reference(logits: Tensor, sampling: SamplingInputs[Tensor] | None) -> Tensor:
    ops = TorchOps({}, {})
    return ops.argmax(logits) if sampling is None else ops.sample(logits, sampling)


@pytest.mark.slow
@pytest.mark.principal("torch.float32-4", "torch.float16-1")
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("dtype", LOGITS, ids=str)
def test_sample_draws_what_sorting_draws(builder: Any, dtype: torch.dtype, tp: int) -> None:
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(ROWS, VOCABULARY, generator=generator) * 3
    kinds = {
        "spread": spread,
        "tied": (spread * 2).round() / 2,  # at the cuts too
        "flat": spread * 0.01,  # a nucleus of nearly the whole vocabulary
    }
    cases = list(itertools.product(kinds, [0, 1, 7, 5000], [0.0, 0.4, 0.95, 1.0], [0.0, 0.8, 2.5]))
    _, top_k, top_p, temperature = zip(*cases, strict=True)
    sampling = SamplingInputs(
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.rand(len(cases), ROWS, generator=generator),
    )
    logits = torch.stack([kinds[kind] for kind, *_ in cases]).to(dtype)
    expected = reference(logits, sampling)
    for ids in chosen(builder, logits, sampling, tp):
        wrong = [case for case, found, wanted in zip(cases, ids, expected, strict=True) if not found.equal(wanted)]
        assert not wrong


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_the_ends_of_the_uniform_number_stay_within_what_is_kept(builder: Any, uniform: float) -> None:
    logits = torch.randn(1, 4, VOCABULARY, generator=torch.Generator().manual_seed(3))
    sampling = SamplingInputs(
        torch.ones(1), torch.tensor([3], dtype=torch.int32), torch.ones(1), torch.full((1, 4), uniform)
    )
    kept = logits.topk(3).indices
    (ids,) = chosen(builder, logits, sampling, 1)
    expected = kept.amin(dim=2) if uniform == 0.0 else kept.amax(dim=2)
    assert torch.equal(ids, expected.int())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_argmax_takes_the_lowest_of_equals(builder: Any, tp: int) -> None:
    logits = torch.zeros(2, 2, 16, dtype=torch.float16)
    logits[0, 0, [3, 9, 15]] = 5.0  # in three ranks' shares
    logits[0, 1, 12] = 1.0
    logits[1] = -7.0
    for ids in chosen(builder, logits, None, tp):
        assert ids.tolist() == [[3, 12], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_search_knows_every_value_of_the_type(dtype: torch.dtype) -> None:
    values = ordered_values(dtype)
    assert values.dtype == dtype and len(values) == 1 << 16
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = patterns[patterns.isfinite()].unique()
    assert torch.equal(values.float().unique(), finite)
    assert (values.float().diff() >= 0).all() and values.float()[-1] == torch.finfo(dtype).max
