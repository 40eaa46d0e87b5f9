"""Weights that a GPU's session joins, and norms that it has less one: the products stay what they were."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import Residual
from trtllm_dflash.ops.cuda_products import CudaProducts
from trtllm_dflash.ops.linear_weight import joined_name
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.weights import add_norms_less_one, join_weights

NAMES = "a", "b"


def weights(rows: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"{name}.weight": torch.randn(count, 64).to(dtype) for name, count in zip(NAMES, rows, strict=True)}
    return {**made, "norm.weight": 1 + torch.randn(64).bfloat16().float()}


def test_a_joined_product_is_both_products(monkeypatch):
    own = weights((32, 16), torch.bfloat16)
    x = Residual(torch.randn(1, 3, 64), torch.randn(1, 3, 64))
    expected = TorchOps({name: weight.float() for name, weight in own.items()}, {}).norm_linears("norm", NAMES, x, 1e-6)
    join_weights(own, [NAMES])
    whole = own[joined_name(NAMES) + ".weight"]
    assert [own[f"{name}.weight"].data_ptr() for name in NAMES] == [whole.data_ptr(), whole[32:].data_ptr()]
    # In FP32, in which all is torch's here; as if our kernels took the rows.
    monkeypatch.setattr(kernels, "takes_skinny", lambda x, weight: x.dtype == weight.dtype)
    monkeypatch.setattr(kernels, "skinny_gemm", lambda x, weight, *rest: x @ weight.t())
    ops = CudaProducts({name: weight.float() for name, weight in own.items()}, {})
    stream, (first, second) = ops.norm_linears("norm", NAMES, x, 1e-6)
    assert stream.equal(expected[0])
    torch.testing.assert_close(first, expected[1][0])
    torch.testing.assert_close(second, expected[1][1])


def test_zeros_fill_up_what_kernels_multiply_by_at_a_time():
    own = weights((32, 1), torch.bfloat16)
    before = dict(own)
    join_weights(own, [NAMES])
    whole = own[joined_name(NAMES) + ".weight"]
    assert whole.shape == (48, 64) and not whole[33:].any()
    assert all(own[name].equal(before[name]) for name in before)


def test_what_kernels_would_not_read_is_not_joined():
    own = weights((32, 16), torch.float32)
    before = dict(own)
    join_weights(own, [NAMES])
    assert own.keys() == before.keys()
    assert all(own[name] is before[name] for name in own)


def test_norms_have_their_numbers_less_one_where_none_is_lost():
    own = {"near.norm.weight": 1 + torch.tensor([0.0, 2**-12, -0.3, 1.7]).bfloat16().float()}
    own |= {"far.norm.weight": torch.tensor([1.1]), "half.norm.weight": torch.ones(2).bfloat16()}
    add_norms_less_one(own)
    assert {name for name in own if name.endswith("less_one")} == {"near.norm.less_one"}
    assert (own["near.norm.less_one"].float() + 1).equal(own["near.norm.weight"])
