"""MXFP4 as NVFP4: the same numbers, bit for bit, wherever NVFP4 can hold them; what it cannot is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.ops.mxfp4 import E2M1
from trtllm_dflash.ops.nvfp4 import NVFP4, from_mxfp4
from trtllm_dflash.ops.transcoded import Transcoded

Tensor = torch.Tensor


def numbers(x: NVFP4) -> Tensor:
    """What it stands for, [..., I], in double."""
    codes = torch.stack([x.packed & 15, x.packed >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1, dtype=torch.float64)[codes.long()]
    return values * x.scales.double().repeat_interleave(16, dim=-1) * x.scale.double()


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """What MXFP4 stands for, [..., n * 32], in double: in FP32 the largest are infinite."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1, dtype=torch.float64)[codes.long()]
    return (values * torch.exp2(scales.double() - 127)[..., None]).flatten(-2)


def random_blocks(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (*shape, 16), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def block_of(*values: float) -> Tensor:
    """A block [1, 16] that holds these numbers again and again."""
    codes = [E2M1.index(values[i % len(values)]) for i in range(32)]
    return torch.tensor(
        [[low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]], dtype=torch.uint8
    )


@pytest.mark.parametrize("lowest", [0, 1, 100, 127, 230, 237])
def test_eighteen_neighbouring_exponents_are_exact(lowest: int) -> None:
    blocks = random_blocks(4, 36)
    scales = (lowest + torch.arange(36) % 18).to(torch.uint8).expand(4, -1)
    found, transcoded = from_mxfp4(blocks, scales)
    assert torch.equal(numbers(found), mxfp4_numbers(blocks, scales))
    assert torch.equal(found.packed, blocks.flatten(-2))
    assert transcoded == Transcoded(4 * 36)
    assert found.scales.shape == (4, 72) and found.scales.dtype == torch.float8_e4m3fn and found.scale.shape == ()


def test_every_code_and_both_zeros_keep_their_bits() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    found, _ = from_mxfp4(blocks, torch.full((16, 1), 127, dtype=torch.uint8))
    assert torch.equal(found.packed, blocks.flatten(-2))
    assert torch.equal(numbers(found), mxfp4_numbers(blocks, torch.full((16, 1), 127, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("distance", "values"),
    [
        (1, (0.5, -1, 1.5, 2, 3, 0)),
        (2, (0.5, 1, -1.5)),
        (3, (0.5, 0)),
        (-1, (1, 2, -3, 4, 6)),
        (-2, (2, 4, 6)),
        (-3, (4,)),
    ],
)
def test_a_block_outside_is_exact_where_its_numbers_can_be_doubled_or_halved(
    distance: int, values: tuple[float, ...]
) -> None:
    blocks = torch.cat([random_blocks(36), block_of(*values)])
    scale = 117 + distance if distance > 0 else 100 + distance
    scales = torch.tensor([100, 117] * 18 + [scale]).to(torch.uint8)
    found, transcoded = from_mxfp4(blocks, scales)
    assert torch.equal(numbers(found), mxfp4_numbers(blocks, scales).flatten())
    assert transcoded == Transcoded(37)


def test_what_cannot_be_held_is_rounded_and_counted() -> None:
    blocks = torch.cat([random_blocks(36), block_of(6.0, 3.0), block_of(0.5, 4.0)])
    scales = torch.tensor([100, 117] * 18 + [118, 99]).to(torch.uint8)
    found, transcoded = from_mxfp4(blocks, scales)
    off = (numbers(found) - mxfp4_numbers(blocks, scales).flatten()).abs()
    assert not off[: 36 * 32].any()
    assert set(off[36 * 32 : 37 * 32].tolist()) == {6 * 2.0**-10, 0.0}  # 12 is held as 6; 3 doubled is 6
    assert set(off[37 * 32 :].tolist()) == {0.25 * 2.0**-27, 0.0}  # 0.25 lies between 0 and 0.5
    assert transcoded == Transcoded(38, 2, 6 * 2.0**-10)


def test_most_blocks_are_kept_and_the_highest_among_equals() -> None:
    blocks = random_blocks(9)
    _, transcoded = from_mxfp4(blocks, torch.tensor([100] * 5 + [140] * 4).to(torch.uint8))
    assert transcoded.rounded == 4
    found, transcoded = from_mxfp4(blocks[:8], torch.tensor([100] * 4 + [140] * 4).to(torch.uint8))
    assert transcoded.rounded == 4
    high = mxfp4_numbers(blocks[4:8], torch.full((4,), 140, dtype=torch.uint8))
    assert torch.equal(numbers(found)[128:], high.flatten())


def test_zeros_have_no_say_and_are_kept() -> None:
    blocks = torch.cat([random_blocks(4), block_of(0.0), block_of(0.0)])
    scales = torch.tensor([127] * 4 + [0, 254]).to(torch.uint8)
    found, transcoded = from_mxfp4(blocks, scales)
    assert transcoded == Transcoded(6) and not numbers(found)[128:].any()
    found, transcoded = from_mxfp4(blocks[4:], scales[4:])
    assert transcoded == Transcoded(2) and not numbers(found).any()


def test_a_scale_that_is_no_number_is_refused() -> None:
    with pytest.raises(CheckpointError, match="scale is not a number"):
        from_mxfp4(random_blocks(1), torch.tensor([255], dtype=torch.uint8))


def test_reports_add_up_and_say_what_was_lost() -> None:
    assert Transcoded(3, 1, 0.5) + Transcoded(4, 2, 0.25) == Transcoded(7, 3, 0.5)
    assert str(Transcoded(1000)) == "1,000 blocks of MXFP4 as NVFP4, all exact"
    assert str(Transcoded(7, 3, 0.5)) == "7 blocks of MXFP4 as NVFP4, 3 of them rounded, by at most 0.5"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 254), st.integers(0, 40))
def test_the_count_and_the_error_are_those_of_the_numbers(seed: int, lowest: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = random_blocks(3, 8, seed=seed)
    scales = torch.randint(lowest, min(lowest + spread, 254) + 1, (3, 8), generator=generator).to(torch.uint8)
    found, transcoded = from_mxfp4(blocks, scales)
    off = (numbers(found) - mxfp4_numbers(blocks, scales)).abs().view(3, 8, 32).amax(dim=-1)
    assert transcoded == Transcoded(24, int((off > 0).sum()), float(off.max()))
    if spread < 18:
        assert transcoded.rounded == 0
