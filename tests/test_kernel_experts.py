"""Experts' matrices on their way to the kernels, which read as many numbers as shapes say."""

import pytest
import torch

from trtllm_dflash.kernels import Matrix, MoE, Routing, experts, takes_nvfp4

EXPERTS, OUTPUTS, INPUTS = 3, 160, 256


def zeros(*shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def halves(*shape):
    return zeros(*shape, dtype=torch.bfloat16)


@pytest.fixture
def no_library(monkeypatch):
    """Nothing here gets as far as the library."""
    monkeypatch.setattr(experts, "load", lambda: None)


#: Of each format the numbers, the scales' type and their shape.
FORMATS = {
    "INT4": (zeros(EXPERTS, OUTPUTS, INPUTS // 8, dtype=torch.int32), torch.bfloat16, (EXPERTS, OUTPUTS, 8)),
    "MXFP4": (zeros(EXPERTS, OUTPUTS, INPUTS // 32, 16, dtype=torch.uint8), torch.uint8, (EXPERTS, OUTPUTS, 8)),
    "MXFP4 in words": (zeros(EXPERTS, OUTPUTS, INPUTS // 8, dtype=torch.int32), torch.uint8, (EXPERTS, OUTPUTS, 8)),
    "NVFP4": (
        zeros(EXPERTS, OUTPUTS, INPUTS // 2, dtype=torch.uint8),
        torch.float8_e4m3fn,
        (EXPERTS, OUTPUTS // 8, INPUTS // 32, 8, 2),
    ),
    "NVFP4 in words": (
        zeros(EXPERTS, OUTPUTS, INPUTS // 8, dtype=torch.int32),
        torch.float8_e4m3fn,
        (EXPERTS, OUTPUTS // 8, INPUTS // 32, 8, 2),
    ),
    "FP8": (zeros(EXPERTS, OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn), torch.float32, (EXPERTS, OUTPUTS)),
    "FP8 by block": (zeros(EXPERTS, OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn), torch.float32, (EXPERTS, 2, 2)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_takes_scales_of_its_own_shape_and_no_other(name):
    values, dtype, shape = FORMATS[name]
    more = (None, zeros(EXPERTS, OUTPUTS, dtype=torch.float32)) if name.startswith("NVFP4") else ()
    assert Matrix(values, zeros(*shape, dtype=dtype), *more).shape == (EXPERTS, OUTPUTS, INPUTS)
    for place in range(len(shape)):
        wrong = list(shape)
        wrong[place] += 1
        with pytest.raises(ValueError) as caught:
            Matrix(values, zeros(*wrong, dtype=dtype), *more)
        what = f"scales {wrong}, not {list(shape)}: {name.removesuffix(' in words')} of experts"
        assert str(caught.value) == f"the CUDA kernels cannot take this: {what} [{EXPERTS}, {OUTPUTS}, {INPUTS}]"


def test_int4_refuses_scales_for_other_blocks_than_32_or_for_rows():
    values, dtype, _ = FORMATS["INT4"]
    for shape in ((EXPERTS, OUTPUTS, INPUTS // 128), (EXPERTS, OUTPUTS), (EXPERTS, OUTPUTS, 8, 1), (OUTPUTS, 8)):
        with pytest.raises(ValueError, match=r"scales .*, not \[3, 160, 8\]: INT4 of experts \[3, 160, 256\]"):
            Matrix(values, zeros(*shape, dtype=dtype))


def test_nvfp4_alone_has_a_scale_for_each_row():
    values, dtype, shape = FORMATS["NVFP4"]
    scales = zeros(*shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"NVFP4 alone has rows' scales, and always: NVFP4 of experts \[3, 160, 256\]"):
        Matrix(values, scales)
    with pytest.raises(ValueError, match=r"rows' scales \[3\], not \[3, 160\]: NVFP4 of"):
        Matrix(values, scales, None, zeros(EXPERTS, dtype=torch.float32))
    numbers = zeros(EXPERTS, OUTPUTS, INPUTS, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"NVFP4 alone has rows' scales, and always: numbers of experts"):
        Matrix(numbers, row_scales=zeros(EXPERTS, OUTPUTS, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nvfp4_suits_rows_of_the_type_that_its_numbers_are_in_the_order_of(dtype):
    rows = zeros(EXPERTS, OUTPUTS, dtype=torch.float32)
    for name, suited in (("NVFP4", torch.float16), ("NVFP4 in words", torch.bfloat16)):
        values, scaled, shape = FORMATS[name]
        if dtype != torch.float32:
            assert Matrix(values, zeros(*shape, dtype=scaled), None, rows).suits(dtype) == (dtype == suited)
        assert not Matrix(values, zeros(*shape, dtype=scaled), None, rows.double()).suits(dtype)


def test_a_matrix_takes_biases_of_its_own_shape_and_no_other():
    numbers = zeros(EXPERTS, OUTPUTS, INPUTS, dtype=torch.bfloat16)
    Matrix(numbers, None, zeros(EXPERTS, OUTPUTS, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"biases \[3, 256\], not \[3, 160\]: numbers of experts"):
        Matrix(numbers, None, zeros(EXPERTS, INPUTS, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("count", "down", "rows", "logits", "what"),
    [
        (2, (3, 256, 32), (5, 256), (5, 8), r"gate and up \[3, 64, 256\] beside down \[3, 256, 32\] of 2 experts"),
        (3, (3, 256, 64), (5, 256), (5, 8), r"gate and up \[3, 64, 256\] beside down \[3, 256, 64\] of 3 experts"),
        (3, (3, 256, 32), (5, 128), (5, 8), r"rows \[5, 128\] and logits \[5, 8\] of 8 experts of 256"),
        (3, (3, 256, 32), (5, 256), (4, 8), r"rows \[5, 256\] and logits \[4, 8\] of 8 experts of 256"),
    ],
)
def test_experts_matrices_rows_and_logits_must_fit_together(count, down, rows, logits, what, no_library):
    routing = Routing(8, 0, count, 2, normalized=True)
    moe = MoE(routing, Matrix(halves(3, 64, 256)), Matrix(halves(*down)))
    with pytest.raises(ValueError, match=what):
        moe.takes(halves(*rows), halves(*logits))


def test_experts_in_a_type_that_the_kernels_do_not_have_are_not_refused_but_left_to_torch(no_library):
    """NVFP4's numbers are two a byte: their shape is half as wide."""
    matrices = (Matrix(zeros(3, *shape, dtype=torch.uint8)) for shape in ((64, 128), (256, 16)))
    assert not MoE(Routing(8, 0, 3, 2, normalized=True), *matrices).takes(halves(5, 256), halves(5, 8))


@pytest.mark.parametrize(("capability", "widest"), [((9, 0), 8256), ((10, 0), 8256), ((12, 0), 2816)])
def test_nvfp4_is_taken_as_wide_as_a_blocks_shared_memory_holds(capability, widest):
    """The widest are those of `Layout` in experts_work.cuh, compiled for the host."""
    sizes = range(32, 12_000, 32)
    assert [size for size in sizes if takes_nvfp4(size, 32, capability)] == list(range(32, widest + 1, 32))
    assert [size for size in sizes if takes_nvfp4(32, size, capability)] == list(range(32, widest + 1, 32))
    assert not takes_nvfp4(1024, 48, capability) and not takes_nvfp4(80, 64, capability)
