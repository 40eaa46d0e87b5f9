"""The inverse that gated delta nets need in TensorRT, evaluated alone."""

from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("rows", "most_rows"), [(1, 1), (4, 4), (13, 16), (97, 128)])
def test_the_inverse_is_exact_where_keys_are_nearly_parallel(rows: int, most_rows: int) -> None:
    """Powers of such a matrix have numbers of 1e28: a series of them would be wrong in every digit."""
    network: Any = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(
        1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    products = network.add_input("products", trt.float32, (1, 2, -1, -1))
    start, counted = network.add_input("start", trt.int32, (1,)), network.add_input("rows", trt.int32, (1, -1))
    ops = TensorRTOps(network, {}, {}, most_rows=most_rows)
    inverse = ops._inverse(products, ops._levels(counted), start)
    network.mark_output(inverse)
    generator = torch.Generator().manual_seed(0)
    matrix = 1 - 0.01 * torch.rand(1, 2, rows, rows, generator=generator)
    given = {"products": matrix, "start": torch.zeros(1), "rows": torch.zeros(1, rows)}
    given |= {name: given[name].int() for name in ("start", "rows")}
    (found,) = evaluate([network], [given])
    exact = torch.linalg.inv(torch.eye(rows).double() + matrix.double().tril(-1))
    assert (found[inverse.name].double() - exact).abs().max() < 1e-5
