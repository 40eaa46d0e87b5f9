"""MXFP4's numbers, bit for bit."""

import math

import pytest
import torch

from trtllm_dflash.ops.formats import E8M0_NAN, MXFP4_BLOCK
from trtllm_dflash.ops.mxfp4 import dequantize, in_order, interleave


def e2m1(code: int) -> float:
    """As the OCP specification says it: a sign, two bits of exponent (bias 1), one of mantissa, and subnormals."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_at_every_scale_is_exact(dtype):
    # Block s has all sixteen codes in both halves of its bytes, at scale s.
    codes = [(code, 15 - code) for code in range(16)]
    block = torch.tensor([low | high << 4 for low, high in codes], dtype=torch.uint8)
    scales = torch.arange(E8M0_NAN, dtype=torch.uint8)
    numbers = dequantize(block.expand(E8M0_NAN, -1), scales, dtype)
    assert numbers.shape == (E8M0_NAN * MXFP4_BLOCK,)
    largest = torch.finfo(dtype).max
    for scale in range(E8M0_NAN):
        for place, code in enumerate(code for pair in codes for code in pair):
            expected = math.ldexp(e2m1(code), scale - 127)
            actual = float(numbers[scale * MXFP4_BLOCK + place])
            assert actual == (expected if abs(expected) <= largest else math.copysign(math.inf, expected))
            assert math.copysign(1, actual) == math.copysign(1, expected)


def test_interleaved_words_are_a_step_or_two_from_pairs_of_bf16_and_come_back():
    blocks = torch.randint(256, (3, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[0, 0] = torch.arange(16) * 17  # every number in both halves of a byte
    words = interleave(blocks)
    assert words.shape == (3, 20) and words.dtype == torch.int32
    assert in_order(words).equal(blocks)
    numbers = dequantize(blocks, torch.full((3, 5), 127, dtype=torch.uint8), torch.float32).view(3, 20, 8)
    pair = 0x81C081C0
    for row, column in ((0, 0), (0, 3), (1, 7), (2, 19)):
        word = int(words[row, column]) & 0xFFFFFFFF
        # As `mxfp4.cuh` does it.
        rotated = [word, word << 10 | word >> 22, word << 13 | word >> 19, (word & 0x001B001B) * 0x1084]
        for i, bits in enumerate(rotated):
            for half, number in ((0, i), (16, i + 4)):
                bf16 = torch.tensor(((bits & pair) >> half & 0xFFFF) << 16, dtype=torch.int64).to(torch.int32)
                assert float(bf16.view(torch.float32)) * 2.0**126 == numbers[row, column, number]


def test_a_scale_that_is_not_a_number_gives_none():
    assert (
        dequantize(torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([E8M0_NAN], dtype=torch.uint8), torch.float32)
        .isnan()
        .all()
    )


def test_transformers_decodes_the_same():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), generator=generator, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [3, 64, 10]
        assert torch.equal(dequantize(blocks, scales, dtype), theirs.transpose(1, 2))
