"""Experts in NVFP4 in our kernels' order: the same bits, and what the kernels make of them, exact in both types."""

from dataclasses import replace

import pytest
import torch

from tests.quantized import quantize_stack
from trtllm_dflash.kernels import HOPPER
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.cuda_experts import interleave_experts
from trtllm_dflash.ops.experts import Experts, in_tiles, one_by_one
from trtllm_dflash.ops.linear_weight import Nvfp4Weight
from trtllm_dflash.ops.mxfp4 import E2M1, interleave
from trtllm_dflash.ops.nvfp4_tiles import Nvfp4Tiles, scales_in_order, tile_scales
from trtllm_dflash.session.weights import multiplied_weights

Tensor = torch.Tensor

HALVES = (torch.bfloat16, torch.float16)
LAYER = MoELayer("mlp.", 6, 0, 4, 2, True)
#: By which the kernels divide what they multiply: `Nvfp4::kRest`.
REST = 128.0


def stored(hidden: int = 96, columns: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """A layer's experts as an engine has them."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, *sides in (("gate_up_proj", 2 * columns, hidden), ("down_proj", hidden, columns)):
        numbers = torch.randn(LAYER.count, *sides, generator=generator)
        weights |= {f"mlp.experts.{name}.{last}": x for last, x in quantize_stack(numbers, "nvfp4").items()}
    return weights


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def test_scales_of_eight_rows_32_numbers_lie_beside_each_other_and_come_back():
    scale = torch.arange(2 * 24 * 10).remainder(126).to(torch.uint8).view(2, 24, 10).view(torch.float8_e4m3fn)
    tiles = tile_scales(scale)
    assert tiles.shape == (2, 3, 5, 8, 2) and tiles.is_contiguous()
    assert scales_in_order(tiles).view(torch.uint8).equal(scale.view(torch.uint8))
    for expert, row, block in ((0, 0, 0), (1, 7, 3), (1, 23, 9), (0, 12, 4)):
        found = tiles.view(torch.uint8)[expert, row // 8, block // 2, row % 8, block % 2]
        assert found == scale.view(torch.uint8)[expert, row, block]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_loaded_experts_stand_for_what_is_stored_to_the_bit(dtype):
    weights = stored()
    loaded = multiplied_weights(copied(weights), dtype, torch.device("cpu"))
    assert loaded.keys() == weights.keys()  # nothing is dequantized
    interleave_experts(loaded, dtype, HOPPER)
    for name in ("gate_up", "down"):
        key = f"mlp.experts.{name}_proj."
        assert (key + "tiles" in loaded) == (key + "scale" not in loaded) == (dtype in HALVES)
        assert (key + "words" in loaded) == (key + "weight" not in loaded) == (dtype == torch.bfloat16)
        matrix, before = (getattr(Experts.of(x, LAYER), name) for x in (loaded, weights))
        assert isinstance(matrix.quantized, Nvfp4Tiles if dtype in HALVES else Nvfp4Weight)
        for which in (2, torch.tensor([3, 0, 3]), torch.tensor([[1], [2]])):
            assert matrix.numbers(which, torch.float32).equal(before.numbers(which, torch.float32))
    held, given = (sum(x.nbytes for x in each.values()) for each in (loaded, weights))
    assert held == given


def test_numbers_are_put_in_order_where_they_lie():
    """Experts of 61 GB, which a GPU of 80 holds once, are taken in order there."""
    weights = stored() | {"other.experts.down_proj.blocks": torch.randint(256, (11, 16, 3, 16), dtype=torch.uint8)}
    before, blocks = dict(weights), weights["other.experts.down_proj.blocks"].clone()
    interleave_experts(weights, torch.bfloat16, HOPPER)
    pairs = [("other.experts.down_proj.", "blocks")] + [
        (f"mlp.experts.{name}_proj.", "weight") for name in ("gate_up", "down")
    ]
    for key, name in pairs:
        assert weights[key + "words"].data_ptr() == before[key + name].data_ptr()
        assert weights[key + "words"].nbytes == before[key + name].nbytes
    assert weights["other.experts.down_proj.words"].equal(interleave(blocks))


@pytest.mark.parametrize("compute", [one_by_one, in_tiles])
@pytest.mark.parametrize("dtype", HALVES)
def test_torch_computes_the_same_of_experts_in_the_kernels_order(dtype, compute):
    weights = stored()
    ordered = copied(weights)
    interleave_experts(ordered, dtype, HOPPER)
    generator = torch.Generator().manual_seed(1)
    x, logits = (torch.randn(7, size, generator=generator) for size in (96, LAYER.experts))
    layer = replace(LAYER, first=1)
    found, expected = (compute(layer, Experts.of(each, layer), x.to(dtype), logits) for each in (ordered, weights))
    assert found.equal(expected)


def is_kept(weights: dict[str, Tensor], capability: tuple[int, int]) -> bool:
    """Whether all of a layer stays as it is stored: none of its matrices is in another order."""
    after = dict(weights)
    interleave_experts(after, torch.bfloat16, capability)
    return after.keys() == weights.keys() and all(after[name] is weights[name] for name in weights)


def test_what_the_kernels_have_no_order_for_stays_as_it_is_stored():
    """Columns that are no blocks of 32, rows that are not eights, and scales with a sign or NaN, which none writes."""
    odd = [stored(hidden=80), stored(), stored(), stored()]
    for name in ("weight", "scale", "global_scale"):
        key = f"mlp.experts.down_proj.{name}"
        odd[1][key] = odd[1][key][:, :92].contiguous()
    odd[2]["mlp.experts.down_proj.scale"].view(torch.uint8)[3, 5, 2] += 0x80
    odd[3]["mlp.experts.down_proj.scale"].view(torch.uint8)[3, 5, 2] = 0x7F
    for weights in odd:
        assert is_kept(weights, HOPPER)


def test_layers_that_the_kernels_do_not_compute_stay_as_they_are_stored():
    """Too wide for a block's shared memory, or with one matrix of two in columns that are no blocks of 32."""
    for hidden, columns, taken in ((2816, 32, (12, 0)), (32, 2816, (12, 0)), (2848, 32, HOPPER), (8256, 32, HOPPER)):
        assert not is_kept(stored(hidden, columns), taken)
    for hidden, columns, other in ((2848, 32, (12, 0)), (32, 2848, (12, 1)), (8288, 32, HOPPER), (96, 48, HOPPER)):
        assert is_kept(stored(hidden, columns), other)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_times_every_scale_is_exact_as_the_kernels_multiply_them(dtype):
    """As `nvfp4.cuh` does it: bits put where the type has its exponent's low bits, and products of the type."""
    is_half = dtype == torch.float16
    mantissa, powers = (10, (15,)) if is_half else (7, (119, 120))
    codes, scales = torch.arange(8, dtype=torch.int16), torch.arange(127, dtype=torch.int16)
    numbers = (codes << (mantissa - 1)).view(dtype)
    factors = (scales << (mantissa - 3)).view(dtype)
    for power in powers:
        factors = factors * torch.tensor(2.0**power, dtype=dtype)
    products = numbers[:, None] * factors
    assert products.isfinite().all()
    exact = torch.tensor(E2M1[:8]).double()[:, None] * scales.to(torch.uint8).view(torch.float8_e4m3fn).double()
    assert (products.double() * REST).equal(exact)
    assert exact.max() == 2688 and exact[exact > 0].min() == 2.0**-10
