"""Experts in MXFP4 and NVFP4 in our kernels' order: the same bits, and what the kernels make of them, exact."""

from dataclasses import replace

import pytest
import torch

from tests.quantized import quantize_stack
from trtllm_dflash.kernels import HOPPER
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.cuda_experts import tile_experts
from trtllm_dflash.ops.expert_tiles import ExpertTiles
from trtllm_dflash.ops.experts import Experts, in_tiles, one_by_one
from trtllm_dflash.ops.mxfp4 import E2M1, interleave
from trtllm_dflash.session.weights import multiplied_weights

Tensor = torch.Tensor

HALVES = (torch.bfloat16, torch.float16)
LAYER = MoELayer("mlp.", 6, 0, 4, 2, True)
#: By which the kernels divide what they multiply: `Nvfp4::kRest`.
REST = 128.0


def stored(hidden: int = 96, columns: int = 64, kind: str = "nvfp4", seed: int = 0) -> dict[str, Tensor]:
    """A layer's experts as an engine has them."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, *sides in (("gate_up_proj", 2 * columns, hidden), ("down_proj", hidden, columns)):
        key = f"mlp.experts.{name}."
        if kind == "nvfp4":
            numbers = torch.randn(LAYER.count, *sides, generator=generator)
            weights |= {key + last: x for last, x in quantize_stack(numbers, "nvfp4").items()}
            continue
        blocks = LAYER.count, sides[0], sides[1] // 32
        weights[key + "blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8, generator=generator)
        weights[key + "scales"] = torch.randint(110, 129, blocks, dtype=torch.uint8, generator=generator)
    return weights


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


KINDS = pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])


@KINDS
@pytest.mark.parametrize("is_gate_up", [True, False], ids=["gate and up", "down"])
@pytest.mark.parametrize(("rows", "inputs"), [(128, 256), (96, 416), (16, 32), (80, 96)])
def test_each_number_and_scale_lies_where_the_kernels_find_it(rows, inputs, is_gate_up, kind):
    """As `dflash_kernels.h` says it."""
    blocks, of_block = inputs // 32, 1 if kind == "mxfp4" else 2
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(256, (3, rows, blocks, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(127, (3, rows, blocks, of_block), dtype=torch.uint8, generator=generator)
    if kind == "mxfp4":
        made = ExpertTiles.of(values, scales.squeeze(-1), is_gate_up, interleaved=False)
    else:
        of_block_16 = scales.flatten(2).view(torch.float8_e4m3fn)
        made = ExpertTiles.of(values, of_block_16, is_gate_up, False, torch.ones(3, rows))
    part = 272 if kind == "mxfp4" else 288
    assert made.tiles.shape == (3, rows // 16, blocks * part)
    flat = made.tiles.flatten(1)
    for row in range(rows):
        granule, half = (row % (rows // 2) // 8, row // (rows // 2)) if is_gate_up else (row // 16, row % 16 // 8)
        slab = min(4, rows // 16 - granule // 4 * 4)
        for block in range(blocks):
            n = min(4, blocks - block // 4 * 4)
            tile = granule // 4 * 4 * blocks * part + block // 4 * 4 * slab * part + granule % 4 * n * part
            first, place = tile + block % 4 * part, row % 8
            if kind == "mxfp4":  # even rows come before odd ones
                place = place // 2 + place % 2 * 4
            at, scale_at = first + (half * 8 + place) * 16, first + 256 + (place * 2 + half) * of_block
            assert flat[2, at : at + 16].equal(values[2, row, block])
            assert flat[2, scale_at : scale_at + of_block].equal(scales[2, row, block])


@KINDS
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_loaded_experts_stand_for_what_is_stored_to_the_bit(dtype, kind):
    weights = stored(kind=kind)
    loaded = multiplied_weights(copied(weights), dtype, torch.device("cpu"))
    assert loaded.keys() == weights.keys()  # nothing is dequantized
    tile_experts(loaded, dtype, HOPPER)
    for name in ("gate_up", "down"):
        key = f"mlp.experts.{name}_proj."
        gone = ("weight", "scale") if kind == "nvfp4" else ("blocks", "scales")
        assert all((key + "tiles" in loaded) == (key + last not in loaded) == (dtype in HALVES) for last in gone)
        matrix, before = (getattr(Experts.of(x, LAYER), name) for x in (loaded, weights))
        assert dtype not in HALVES or matrix.tiles.tiles.dtype == (
            torch.int32 if dtype == torch.bfloat16 else torch.uint8
        )
        for which in (2, torch.tensor([3, 0, 3]), torch.tensor([[1], [2]])):
            assert matrix.numbers(which, torch.float32).equal(before.numbers(which, torch.float32))
    held, given = (sum(x.nbytes for x in each.values()) for each in (loaded, weights))
    assert held == given


@KINDS
def test_what_stood_in_another_order_is_freed_whoever_holds_it(kind):
    """Experts of 61 GB, which a GPU of 80 holds once."""
    weights = stored(kind=kind)
    before = dict(weights)
    tile_experts(weights, torch.bfloat16, HOPPER)
    kept = [name for name in before if name in weights]
    assert all(before[name].numel() == 0 for name in before if name not in kept)
    assert all(name.endswith("global_scale") and before[name] is weights[name] for name in kept)


@KINDS
def test_tiles_stay_as_they_are_where_a_second_session_takes_the_weights(kind):
    weights = stored(kind=kind)
    tile_experts(weights, torch.bfloat16, HOPPER)
    once = dict(weights)
    tile_experts(weights, torch.bfloat16, HOPPER)
    assert weights.keys() == once.keys() and all(weights[name] is once[name] for name in once)


def test_bits_are_interleaved_beside_bf16():
    weights = stored(kind="mxfp4")
    blocks = weights["mlp.experts.down_proj.blocks"].clone()
    tile_experts(weights, torch.bfloat16, HOPPER)
    tiles = weights["mlp.experts.down_proj.tiles"]
    # 16 bytes of row 0 and its first 32 columns are the first.
    assert tiles[1, 0, :4].equal(interleave(blocks)[1, 0, :4])


@KINDS
@pytest.mark.parametrize("compute", [one_by_one, in_tiles])
@pytest.mark.parametrize("dtype", HALVES)
def test_torch_computes_the_same_of_experts_in_the_kernels_order(dtype, compute, kind):
    weights = stored(kind=kind)
    ordered = copied(weights)
    tile_experts(ordered, dtype, HOPPER)
    generator = torch.Generator().manual_seed(1)
    x, logits = (torch.randn(7, size, generator=generator) for size in (96, LAYER.experts))
    layer = replace(LAYER, first=1)
    found, expected = (compute(layer, Experts.of(each, layer), x.to(dtype), logits) for each in (ordered, weights))
    assert found.equal(expected)


def is_kept(weights: dict[str, Tensor], capability: tuple[int, int]) -> bool:
    """Whether all of a layer stays as it is stored: none of its matrices is in another order."""
    after = dict(weights)
    tile_experts(after, torch.bfloat16, capability)
    return after.keys() == weights.keys() and all(after[name] is weights[name] for name in weights)


def test_what_the_kernels_have_no_order_for_stays_as_it_is_stored():
    """Columns that are no blocks of 32, rows that are no sixteens, and scales that nobody writes."""
    odd = [stored(hidden=80), stored(), stored(), stored(), *(stored(kind="mxfp4") for _ in range(3))]
    for name in ("weight", "scale", "global_scale"):
        key = f"mlp.experts.down_proj.{name}"
        odd[1][key] = odd[1][key][:, :88].contiguous()
    odd[2]["mlp.experts.down_proj.scale"].view(torch.uint8)[3, 5, 2] += 0x80
    odd[3]["mlp.experts.down_proj.scale"].view(torch.uint8)[3, 5, 2] = 0x7F
    odd[4]["mlp.experts.gate_up_proj.scales"][3, 5, 2] = 129  # two factors of BF16 would be needed
    odd[5]["mlp.experts.down_proj.scales"][3, 5, 1] = 255
    del odd[6]["mlp.experts.gate_up_proj.blocks"]
    for weights in odd:
        assert is_kept(weights, HOPPER)


@pytest.mark.parametrize(("kind", "widest", "of_hopper"), [("nvfp4", 3968, 12160), ("mxfp4", 4096, 12288)])
def test_layers_that_the_kernels_do_not_compute_stay_as_they_are_stored(kind, widest, of_hopper):
    """Too wide for a block's shared memory, or with one matrix of two in columns that are no blocks of 32."""
    for hidden, columns, taken in ((widest, 32, (12, 0)), (32, widest, (12, 0)), (of_hopper, 32, HOPPER)):
        assert not is_kept(stored(hidden, columns, kind), taken)
    for hidden, columns, other in (
        (widest + 32, 32, (12, 0)),
        (32, widest + 32, (12, 1)),
        (of_hopper + 32, 32, HOPPER),
    ):
        assert is_kept(stored(hidden, columns, kind), other)
    assert kind == "mxfp4" or is_kept(stored(96, 48, kind), HOPPER)


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
