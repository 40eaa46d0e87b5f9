"""Experts' matrices on their way to the kernels, which read as many numbers as shapes say."""

from types import SimpleNamespace

import pytest
import torch

from trtllm_dflash.kernels import MOE_ROWS, Matrix, MoE, Routing, experts, takes_tiles
from trtllm_dflash.ops import cuda_experts
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.cuda_slots import CudaSlotOps
from trtllm_dflash.ops.experts import Experts

EXPERTS, OUTPUTS, INPUTS = 3, 160, 256


def zeros(*shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def halves(*shape):
    return zeros(*shape, dtype=torch.bfloat16)


@pytest.fixture
def no_library(monkeypatch):
    """Nothing here gets as far as the library."""
    monkeypatch.setattr(experts, "load", lambda: None)


#: Of each format with scales apart the numbers, the scales' type and their shape.
FORMATS = {
    "INT4": (zeros(EXPERTS, OUTPUTS, INPUTS // 8, dtype=torch.int32), torch.bfloat16, (EXPERTS, OUTPUTS, 8)),
    "FP8": (zeros(EXPERTS, OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn), torch.float32, (EXPERTS, OUTPUTS)),
    "FP8 by block": (zeros(EXPERTS, OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn), torch.float32, (EXPERTS, 2, 2)),
}


#: Bytes of 16 rows' tiles.
TILES = {"MXFP4": INPUTS // 32 * 272, "NVFP4": INPUTS // 32 * 288}


def tiles(name, dtype=torch.uint8):
    return zeros(EXPERTS, OUTPUTS // 16, TILES[name] // dtype.itemsize, dtype=dtype)


def row_scales(name):
    return zeros(EXPERTS, OUTPUTS, dtype=torch.float32) if name == "NVFP4" else None


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_takes_scales_of_its_own_shape_and_no_other(name):
    values, dtype, shape = FORMATS[name]
    assert Matrix(values, zeros(*shape, dtype=dtype)).shape == (EXPERTS, OUTPUTS, INPUTS)
    for place in range(len(shape)):
        wrong = list(shape)
        wrong[place] += 1
        with pytest.raises(ValueError) as caught:
            Matrix(values, zeros(*wrong, dtype=dtype))
        what = f"scales {wrong}, not {list(shape)}: {name} of experts"
        assert str(caught.value) == f"the CUDA kernels cannot take this: {what} [{EXPERTS}, {OUTPUTS}, {INPUTS}]"


def test_int4_refuses_scales_for_other_blocks_than_32_or_for_rows():
    values, dtype, _ = FORMATS["INT4"]
    for shape in ((EXPERTS, OUTPUTS, INPUTS // 128), (EXPERTS, OUTPUTS), (EXPERTS, OUTPUTS, 8, 1), (OUTPUTS, 8)):
        with pytest.raises(ValueError, match=r"scales .*, not \[3, 160, 8\]: INT4 of experts \[3, 160, 256\]"):
            Matrix(values, zeros(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("name", TILES)
def test_tiles_tell_their_matrixs_sizes(name, dtype):
    matrix = Matrix(tiles(name, dtype), None, None, row_scales(name))
    assert matrix.shape == (EXPERTS, OUTPUTS, INPUTS) and str(matrix) == f"{name} of experts [3, 160, 256]"
    with pytest.raises(ValueError, match="are not whole blocks of 32 columns"):
        Matrix(tiles(name, dtype)[..., 4:], None, None, row_scales(name))
    with pytest.raises(ValueError, match="are not whole blocks of 32 columns"):
        Matrix(tiles(name, dtype)[None], None, None, row_scales(name))


def test_nvfp4_alone_has_a_scale_for_each_row():
    with pytest.raises(ValueError, match=r"rows' scales \[3\], not \[3, 160\]: NVFP4 of"):
        Matrix(tiles("NVFP4"), None, None, zeros(EXPERTS, dtype=torch.float32))
    numbers = zeros(EXPERTS, OUTPUTS, INPUTS, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"NVFP4 alone has rows' scales: numbers of experts"):
        Matrix(numbers, row_scales=zeros(EXPERTS, OUTPUTS, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TILES)
def test_tiles_suit_rows_of_the_type_that_their_numbers_are_in_the_order_of(name, dtype):
    for of_tiles, suited in ((torch.uint8, torch.float16), (torch.int32, torch.bfloat16)):
        assert Matrix(tiles(name, of_tiles), None, None, row_scales(name)).suits(dtype) == (dtype == suited)
    if name == "NVFP4":
        assert not Matrix(tiles(name), None, None, row_scales(name).double()).suits(torch.float16)


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
    matrices = (Matrix(zeros(3, *shape, dtype=torch.float64)) for shape in ((64, 256), (256, 32)))
    assert not MoE(Routing(8, 0, 3, 2, normalized=True), *matrices).takes(halves(5, 256), halves(5, 8))


@pytest.mark.parametrize(
    ("is_nvfp4", "capability", "widest"),
    [
        (True, (9, 0), 12160),
        (True, (10, 0), 12160),
        (True, (12, 0), 3968),
        (False, (9, 0), 12288),
        (False, (12, 0), 4096),
    ],
)
def test_tiles_are_taken_as_wide_as_a_blocks_shared_memory_holds(is_nvfp4, capability, widest):
    """The widest are those of `Layout` in experts_work.cuh."""

    def is_taken(hidden, columns):
        return takes_tiles(hidden, columns, capability, is_nvfp4=is_nvfp4)

    sizes = range(32, 14_000, 32)
    assert [size for size in sizes if is_taken(size, 32)] == list(range(32, widest + 1, 32))
    assert [size for size in sizes if is_taken(32, size)] == list(range(32, widest + 1, 32))
    assert not is_taken(1024, 48) and not is_taken(80, 64)


@pytest.mark.parametrize(
    ("top_k", "scores", "few", "many"),
    [
        pytest.param(4, torch.bfloat16, 16, 17, id="blocks find the routing of up to 16 rows"),
        pytest.param(8, torch.bfloat16, 16, 17, id="and of up to 128 pairs"),
        pytest.param(10, torch.bfloat16, 12, 13, id="of more a kernel does"),
        pytest.param(4, torch.float32, 9, 10, id="as where logits are of another type"),
    ],
)
def test_experts_in_tiles_have_the_kernels_for_many_rows_as_soon_as_a_kernel_routes(
    top_k, scores, few, many, monkeypatch
):
    asked = []

    class Functions:
        def __getattr__(self, name):
            return lambda *_: asked.append(name.removesuffix("_workspace"))

    monkeypatch.setattr(experts, "load", lambda: SimpleNamespace(functions=Functions()))
    of = [
        zeros(16, rows // 16, columns // 32 * 272 // 4, dtype=torch.int32) for rows, columns in ((64, 256), (256, 32))
    ]
    moe = MoE(Routing(16, 0, 16, top_k, normalized=True), *(Matrix(x) for x in of))
    for rows in (few, many):
        assert moe.takes(halves(rows, 256), zeros(rows, 16, dtype=scores))
    assert asked == ["dflash_moe", "dflash_moe_many"]


class Recorder:
    """Takes all rows, and notes what it was told of whose they are."""

    def __init__(self):
        self.told = []

    def takes(self, *_):
        return True

    def __call__(self, x, logits, shared_gate, residual, row_segment):
        self.told.append(None if row_segment is None else row_segment.tolist())
        return x


@pytest.mark.parametrize("rows", [5, MOE_ROWS, MOE_ROWS + 7])
def test_kernels_are_told_which_of_a_steps_flat_rows_are_somebodys(rows, monkeypatch):
    compute = Recorder()
    monkeypatch.setattr(cuda_experts, "moe_kernel", lambda layer, experts: compute)
    monkeypatch.setattr(cuda_experts, "_is_known", lambda layer, experts: True)
    monkeypatch.setattr(Experts, "of", lambda *_: None)
    segments = torch.arange(rows, dtype=torch.int32)
    segments[3:] = -1
    x, logits, layer = torch.zeros(1, rows, 4), torch.zeros(1, rows, 8), MoELayer("", 8, 0, 8, 2, True, None, "softmax")
    flat, slots = object.__new__(CudaOps), object.__new__(CudaSlotOps)
    for ops in (flat, slots):
        ops.weights = {}
    flat._layout = SimpleNamespace(row_segment=segments)
    assert flat.moe(layer, x, logits).shape == x.shape
    assert [segment for call in compute.told for segment in call] == segments.tolist()
    assert [len(call) for call in compute.told] == [len(part) for part in x[0].split(MOE_ROWS)]
    # Rows of another number than the step's are not its flat rows; those of slots are not flat.
    for ops, given in ((flat, x[:, 1:]), (slots, x)):
        compute.told.clear()
        ops.moe(layer, given, logits[:, : given.shape[1]])
        assert set(compute.told) == {None}
