"""The CUDA kernels and the TensorRT plugin: that they compile, load and say what is wrong. tests/gpu runs them."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace

import pytest
import torch

from tests import kernel_build
from tests.flat_ops import rowless_ops
from tests.stub_kernels import needs_cc, stub_library
from trtllm_dflash import kernels
from trtllm_dflash.errors import EngineError
from trtllm_dflash.kernels import delta_net, library, norm, products
from trtllm_dflash.kernels.rows import BeginRowsParams
from trtllm_dflash.models.decoder import Features
from trtllm_dflash.ops import cuda_products, tensorrt_ops, tensorrt_plugin
from trtllm_dflash.ops.base import AttentionLayer, Residual
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.exact_ops import ExactOps
from trtllm_dflash.ops.fp8 import Fp8Weight, product_of_rounded, quantize_blocks, quantize_rows
from trtllm_dflash.ops.linear_weight import Nvfp4Weight, stored_tensors
from trtllm_dflash.ops.tensorrt_delta_plugin import DELTA_PLUGIN
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "plugins"
#: The number of the kernels' interface, and what the header says beside it (`test_a_number_names_one_interface`).
INTERFACE = (42, "46732d6123846bea")

needs_compiler = pytest.mark.skipif(
    bool(kernel_build.MISSING), reason=f"not installed: {', '.join(kernel_build.MISSING)}"
)


@pytest.fixture(scope="module")
def built():
    """The folder of what CMake builds, for SM90 alone; with the plugin where TENSORRT_INCLUDE names the headers."""
    said = kernel_build.build_kernels()
    assert "warning" not in said, said
    return kernel_build.FOLDER


@pytest.fixture
def load(monkeypatch):
    """Loads the library at a path, from here on."""

    def load(path):
        monkeypatch.setenv(kernels.LIBRARY_VARIABLE, str(path))
        return kernels.load()

    return load


@needs_compiler
def test_the_kernels_compile_without_a_warning_and_load_without_a_gpu(built, load):
    library = load(built / "libdflash_kernels.so")
    assert library.functions.dflash_error_string(0) == b"no error"
    assert library.architectures == ("90a-real",)
    assert library.path == built / "libdflash_kernels.so"


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would read what there is not")
def test_as_many_segments_as_we_say_are_laid_out(built, load):
    """What is refused without a GPU is not the number."""
    functions = load(built / "libdflash_kernels.so").functions
    segments, refused = kernels.MOST_SEGMENTS, 1  # cudaErrorInvalidValue

    def said(count):
        params = BeginRowsParams(segment_count=count, cut_rows=1, block=1)
        return functions.dflash_begin_rows(ctypes.byref(params), None)

    assert said(segments) != refused
    assert said(segments + 1) == refused


@needs_compiler
@pytest.mark.parametrize(
    ("outputs", "inputs", "swiglu", "thousandths"),
    [
        (6144, 4096, False, 1031),  # 64 tiles of 96, of two blocks each
        (151936, 4096, False, 1000),
        (34816, 5120, True, 1091),  # tiles of 96, three a block at most
        (5120, 17408, False, 1031),  # 64 of 80, of two blocks each, of which a warpgroup has five eights
        (2880, 4096, False, 1100),
        (2048, 4096, False, 1031),
        (14336, 5120, False, 1031),
        (19456, 2560, True, 1302),
        (5120, 17408, True, 2475),
        (4096, 64, False, 3093),  # one line, which no two blocks can share
    ],
)
def test_what_the_busiest_of_an_h200s_multiprocessors_reads_is_known(built, load, outputs, inputs, swiglu, thousandths):
    load(built / "libdflash_kernels.so")
    assert products._wide_load.__wrapped__(outputs, inputs, swiglu, 132) == thousandths


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "outputs", "thousandths"),
    [
        (256, 24576, 1031),  # 64 pairs of tiles, one for each of 66 clusters
        (192, 24576, 1375),  # a tile of rows is not full
        (512, 24576, 1031),
        (2048, 24576, 1031),
        (256, 34816, 1455),  # 91 pairs
    ],
)
def test_what_the_busiest_of_an_h200s_multiprocessors_multiplies_is_known(built, load, rows, outputs, thousandths):
    load(built / "libdflash_kernels.so")
    assert products._bulk_load.__wrapped__(rows, outputs, 4096, 132) == thousandths


@needs_compiler
@pytest.mark.parametrize(("segments", "most_rows"), [(1, 17), (1, 512), (4, 300), (1, 4096), (8, 16), (64, 17)])
@pytest.mark.parametrize("size", delta_net.DELTA_SIZES)
def test_what_nets_take_beside_them_is_planned(built, load, size, segments, most_rows):
    load(built / "libdflash_kernels.so")
    sizes = {"head_size": size, "key_heads": 3, "value_heads": 6, "pending": 16}
    params = delta_net.DeltaNetParams(rows=segments * most_rows, segment_count=segments, most_rows=most_rows, **sizes)
    needed = ctypes.c_size_t()
    library.run("dflash_delta_net_workspace", params, ctypes.byref(needed))
    has_prompts = most_rows > 16
    planned = delta_net.scratch_bytes(segments * most_rows, segments, 3, 6, size, prompts=has_prompts)
    assert needed.value == planned


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_kernel_fails_with_cudas_own_words(built, load):
    load(built / "libdflash_kernels.so")
    x, weight, out = (torch.ones(8, dtype=torch.bfloat16) for _ in range(3))
    addresses = {"x": x.data_ptr(), "weight": weight.data_ptr(), "out": out.data_ptr()}
    params = norm.RmsNormParams(dtype=1, slots=1, rows=1, size=8, x_slot_stride=8, x_row_stride=8, **addresses)
    with pytest.raises(EngineError, match=r"dflash_rms_norm: .*(driver|device)"):
        library.run("dflash_rms_norm", params, ctypes.c_void_p(0))


@needs_compiler
@pytest.mark.skipif("TENSORRT_INCLUDE" not in os.environ, reason="TENSORRT_INCLUDE names no TensorRT headers")
def test_the_plugin_compiles_and_its_harness_passes(built):
    """On a machine with a GPU the harness runs enqueue; else it creates the plugin and asks for shapes."""
    command = [built / "plugin_harness", built / "libdflash_plugin.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "equal float64" in done.stdout or not torch.cuda.is_available()


@needs_compiler
@pytest.mark.skipif("TENSORRT_INCLUDE" not in os.environ, reason="TENSORRT_INCLUDE names no TensorRT headers")
def test_tensorrts_registry_makes_plugins_of_the_fields_that_python_gives(built, monkeypatch):
    """The library itself, in the registry that TensorRT-RTX has too: only its networks have no plugin layers."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: there is no registry")
    monkeypatch.setattr(tensorrt_plugin, "load_tensorrt", lambda: trt)
    monkeypatch.setattr(tensorrt_ops, "load_tensorrt", lambda: trt)
    tensorrt_plugin.load_plugin(built / "libdflash_plugin.so")
    ops = tensorrt_plugin.TensorRTPluginOps(None, {}, {})
    for layer in (
        AttentionLayer("l.", "rope", 8, 2, 64, 1e-6),
        AttentionLayer("l.", "rope", 8, 8, 128, None, window=128, has_sinks=True),
    ):
        assert ops._plugin(layer, True, -1) is not None
        assert ops._plugin(layer, False, 3) is not None
    for heads in (
        {"key_heads": 16, "value_heads": 48, "head_size": 128},
        {"key_heads": 2, "value_heads": 2, "head_size": 16},
    ):
        assert ops._create(DELTA_PLUGIN, "l.", heads, 1e-6) is not None
    assert ops._create(DELTA_PLUGIN, "l.", {"key_heads": 2, "value_heads": 3, "head_size": 128}, 1e-6) is None
    with pytest.raises(EngineError, match="has no 8 heads of 80"):
        ops._plugin(AttentionLayer("l.", "rope", 8, 2, 80, None), True, -1)


@needs_compiler
def test_structures_have_the_layout_of_the_header(tmp_path):
    """Every structure and member that Python declares, by size and offset as the C compiler sees them."""
    modules = [import_module(f"{kernels.__name__}.{found.name}") for found in iter_modules(kernels.__path__)]
    values = [value for module in modules for value in vars(module).values()]
    structures = {value for value in values if isinstance(value, type(ctypes.Structure))}
    assert len(structures) == 33
    lines = []
    for kind in structures:
        lines.append(f'printf("{kind.__name__} %zu\\n", sizeof({kind.__name__}));')
        for name, _ in kind._fields_:
            lines.append(f'printf("{kind.__name__}.{name} %zu\\n", offsetof({kind.__name__}, {name}));')
    source = tmp_path / "layout.cu"
    source.write_text('#include <stdio.h>\n#include "dflash_kernels.h"\nint main()\n{\n' + "\n".join(lines) + "\n}\n")
    subprocess.run(["nvcc", f"-I{PLUGINS / 'include'}", source, "-o", tmp_path / "layout"], check=True)
    found = dict(line.split() for line in subprocess.check_output([tmp_path / "layout"], text=True).splitlines())
    for kind in structures:
        assert int(found[kind.__name__]) == ctypes.sizeof(kind)
        for name, _ in kind._fields_:
            assert int(found[f"{kind.__name__}.{name}"]) == getattr(kind, name).offset, f"{kind.__name__}.{name}"


def test_python_and_header_name_one_interface():
    header = (PLUGINS / "include" / "dflash_kernels.h").read_text()
    assert re.search(rf"DFLASH_ABI_VERSION {kernels.ABI_VERSION}\n", header)


def test_a_number_names_one_interface():
    """Whoever changes what C compiles of the header, and not the number, is told here.

    A library of the same number and another layout would be loaded, and read other members.
    """
    header = (PLUGINS / "include" / "dflash_kernels.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    digest = hashlib.sha256("".join(code.split()).encode()).hexdigest()[:16]
    assert (kernels.ABI_VERSION, digest) == INTERFACE, "raise both versions by one, and note them in INTERFACE"


def test_every_gpu_that_we_name_is_compiled_for():
    text = (PLUGINS / "CMakeLists.txt").read_text()
    assert "90a-real 100-real 103-real 120 " in text


@needs_compiler
def test_native_code_is_named_by_the_number_of_the_gpu_that_is_there(tmp_path):
    """What the library says of itself is read as numbers. What CMake finds of GPUs is put into its own file here."""
    configure = ["cmake", "-S", str(PLUGINS), "-B", str(tmp_path), "-DCMAKE_CUDA_ARCHITECTURES=native"]
    subprocess.run(configure, capture_output=True)  # without a GPU it is refused, but has found the compiler
    (found,) = tmp_path.glob("CMakeFiles/*/CMakeCUDACompiler.cmake")
    line = re.compile(r"set\(CMAKE_CUDA_ARCHITECTURES_NATIVE .*\)")
    found.write_text(line.sub('set(CMAKE_CUDA_ARCHITECTURES_NATIVE "90-real;120-real")', found.read_text()))
    done = subprocess.run(configure, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    flags = (tmp_path / "CMakeFiles" / "dflash_objects.dir" / "flags.make").read_text()
    assert 'DFLASH_ARCHITECTURES="90a-real,120-real"' in flags and "-DDFLASH_SM90A" in flags


def test_a_missing_library_says_how_to_build_it(load, tmp_path):
    with pytest.raises(EngineError, match="make kernels"):
        load(tmp_path / "nothing.so")


def test_a_checkout_and_an_installation_are_told_different_remedies(load, tmp_path):
    """Without the sources of the kernels there is nothing to make."""
    package = tmp_path / "trtllm_dflash"
    shutil.copytree(ROOT / "trtllm_dflash", package, ignore=shutil.ignore_patterns("__pycache__", "pairs", "*.so"))
    script = "from trtllm_dflash import kernels; kernels.load()"
    environment = {name: value for name, value in os.environ.items() if name != kernels.LIBRARY_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert "EngineError: there are no CUDA kernels: install a wheel that has them, as `make wheel`" in done.stderr


def test_the_library_is_what_the_variable_names_then_the_packages_then_the_checkouts(monkeypatch, tmp_path):
    packed, built, named = (tmp_path / name for name in ("packed.so", "built.so", "named.so"))
    monkeypatch.delenv(kernels.LIBRARY_VARIABLE, raising=False)
    places = (packed, built)
    assert kernels.find(places) is None
    built.touch()
    assert kernels.find(places) == built
    packed.touch()
    assert kernels.find(places) == packed
    monkeypatch.setenv(kernels.LIBRARY_VARIABLE, str(named))
    assert kernels.find(places) == named


@pytest.mark.parametrize(
    ("architectures", "runs", "does_not"),
    [
        ("90a-real", [(9, 0)], [(8, 9), (10, 0)]),
        ("100-real", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("103-real", [(10, 3)], [(10, 0)]),
        ("100f-real", [(10, 0), (10, 3)], [(12, 0)]),
        ("120", [(12, 0), (12, 1), (13, 0)], [(10, 3)]),
        ("90a-real,100-real,103-real,120", [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)], [(8, 9)]),
    ],
)
def test_code_runs_on_the_gpus_that_it_was_compiled_for(architectures, runs, does_not):
    library = kernels.Library(Path("k.so"), kernels.ABI_VERSION, tuple(architectures.split(",")), ctypes.CDLL(None))
    assert all(library.runs_on(capability) for capability in runs)
    assert not any(library.runs_on(capability) for capability in does_not)


def test_another_file_is_not_taken_for_the_library(load, tmp_path):
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(EngineError, match="is not a library of our CUDA kernels"):
        load(tmp_path / "text.so")


@needs_cc
def test_kernels_of_another_interface_are_refused(load, tmp_path):
    with pytest.raises(EngineError, match=rf"have interface 1, not {kernels.ABI_VERSION}: run `make kernels`"):
        load(stub_library(tmp_path, version=1))


def test_cuda_ops_need_the_library(load, tmp_path):
    with pytest.raises(EngineError, match="make kernels"):
        load(tmp_path / "nothing.so")
    with pytest.raises(EngineError, match="make kernels"):
        rowless_ops({})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_bias_is_added_to_a_product_of_rounded_rows(dtype, has_bias):
    generator = torch.Generator().manual_seed(0)
    rows, values = (torch.randn(count, 64, generator=generator).to(torch.float8_e4m3fn) for count in (7, 48))
    by_row, by_output = (torch.rand(count, generator=generator) + 0.5 for count in (7, 48))
    bias = 10 * torch.randn(48, generator=generator).to(dtype) if has_bias else None
    y = product_of_rounded(rows, by_row[:, None], Fp8Weight(values, by_output), dtype, bias)
    expected = rows.double() @ values.double().t() * by_row.double()[:, None] * by_output.double()
    expected = expected if bias is None else expected + bias.double()
    assert y.dtype == dtype and (y.double() - expected).norm() < 0.004 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "rows", "kernel"),
    [
        ("plain", 16, "skinny"),
        ("plain", 17, "wide"),
        ("plain", 128, "wide"),
        ("plain", 129, None),
        ("even", 129, "bulk"),
        ("even", 256, "bulk"),
        ("even", 257, None),
        ("uneven", 17, None),
        ("rows", 16, "skinny"),
        ("rows", 17, "wide fp8"),
        ("rows", 128, "wide fp8"),
        ("rows", 200, None),
        ("rows", 256, "halves"),
        ("rows", 257, None),
        ("blocks", 16, "skinny"),
        ("blocks", 17, "wide fp8"),
        ("blocks", 128, "wide fp8"),
        ("blocks", 129, None),
        ("nvfp4", 1, None),
    ],
)
def test_rows_go_to_the_kernel_for_so_many_where_the_weight_is_one_of_its_kinds(kind, rows, kernel, monkeypatch):
    matrix = 0.1 * torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    values, scale = quantize_rows(matrix)
    weight = {
        "plain": matrix.bfloat16(),
        "even": matrix.bfloat16(),
        "uneven": matrix.bfloat16(),
        "rows": Fp8Weight(values, scale.flatten()),
        "blocks": Fp8Weight(matrix.to(torch.float8_e4m3fn), torch.tensor([[0.5], [2.0]])),
        "nvfp4": Nvfp4Weight(
            torch.full((256, 64), 0x21, dtype=torch.uint8),
            torch.ones(256, 8).to(torch.float8_e4m3fn),
            torch.ones(256),
        ),
    }[kind]
    weights = {"a.bias": torch.ones(256, dtype=torch.bfloat16)}
    weights |= {"a.weight": weight} if isinstance(weight, torch.Tensor) else stored_tensors("a", weight)
    weights["norm.weight"] = torch.rand(128, generator=torch.Generator().manual_seed(2)).bfloat16()
    calls = []

    def skinny_gemm(x, values, scale, bias, swiglu, norm, residual, gelu, leaves_room):
        assert kernel == "skinny" and not leaves_room  # only beside the attention of single rows
        return product(x, values, scale, bias, swiglu, norm, residual, gelu)

    def wide_gemm(x, values, bias, swiglu, residual, gelu):
        assert kernel == "wide"
        return product(x, values, None, bias, swiglu, None, residual, gelu)

    def wide_gemm_fp8(x, factors, values, scale, bias, swiglu, residual, gelu):
        assert kernel in ("wide fp8", "halves")
        by = factors if scale.ndim == 1 else factors.t()  # 128 columns: one block of each row
        return product((x.float() * by).bfloat16(), values, scale, bias, swiglu, None, residual, gelu)

    def of_rounded(rows, factors, weight, dtype, bias):
        by = factors.t() if weight.by_block else factors
        y = (rows.float() * by) @ weight.dequantize().t()
        return (y if bias is None else y + bias).to(dtype)

    def rounding(quantize):
        def quantized(x, norm=None):
            ops = TorchOps({} if norm is None else {"norm.weight": norm.weight}, {})
            return quantize(x if norm is None else ops.rms_norm("norm", x, norm.eps))

        return quantized

    def bulk_gemm(x, values, bias, gelu):
        assert kernel == "bulk"
        return product(x, values, None, bias, True, None, None, gelu)

    def product(x, values, scale, bias, swiglu, norm, residual, gelu):
        calls.append((values, scale, swiglu + gelu, norm is not None, residual is not None))
        if norm is not None:
            x = TorchOps({"norm.weight": norm.weight}, {}).rms_norm("norm", x, norm.eps)
        numbers = values.float() if scale is None else Fp8Weight(values, scale).dequantize()
        y = x.float() @ numbers.t() + bias.float()
        activation = torch.nn.functional.gelu if gelu else torch.nn.functional.silu
        y = activation(y[..., :128]) * y[..., 128:] if swiglu else y
        return (y if residual is None else y + residual).to(x.dtype)

    monkeypatch.setattr(kernels, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "skinny_gemm", skinny_gemm)
    monkeypatch.setattr(kernels, "wide_gemm", wide_gemm)
    monkeypatch.setattr(kernels, "bulk_gemm", bulk_gemm)
    monkeypatch.setattr(kernels, "wide_gemm_fp8", wide_gemm_fp8)
    monkeypatch.setattr(cuda_products, "multiplies", lambda device, weight, dtype: True)
    monkeypatch.setattr(cuda_products, "product_of_rounded", of_rounded)
    for quantize in (quantize_rows, quantize_blocks):
        monkeypatch.setattr(kernels, quantize.__name__, rounding(quantize))
    monkeypatch.setattr(products, "is_hopper", lambda device: True)
    monkeypatch.setattr(products, "processors", lambda device: 132)
    monkeypatch.setattr(products, "_wide_load", lambda *sizes, **how: 1600 if kind == "uneven" else 1050)
    monkeypatch.setattr(products, "_bulk_load", lambda *sizes: 1050 if kind == "even" else 1200)
    gates = {False: TorchOps.swiglu, True: TorchOps.geglu}
    monkeypatch.setattr(kernels, "swiglu", lambda x, gelu=False: gates[gelu](None, x))
    torch_ops = TorchOps(weights, {})
    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(CudaOps, name, lambda self, *args, name=name: getattr(torch_ops, name)(*args))
    x = torch.randn(1, rows, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = x.repeat(1, 1, 2)
    ways = {
        "linear": lambda ops: ops.linear("a", x),
        "linear_swiglu": lambda ops: ops.linear_swiglu("a", x),
        "norm_linear": lambda ops: ops.norm_linear("norm", "a", Residual(x), 1e-6)[1],
        "norm_linear_swiglu": lambda ops: ops.norm_linear_swiglu("norm", "a", Residual(x), 1e-6)[1],
        "norm_linear_geglu": lambda ops: ops.norm_linear_geglu("norm", "a", Residual(x), 1e-6)[1],
        "add_product": lambda ops: ops.add_pending(ops.add_product("a", wide, x)),
        "with something to add": lambda ops: ops.norm_linear("norm", "a", Residual(x, x), 1e-6)[1],
    }
    for way in ways.values():
        found, expected = way(rowless_ops(weights)).float(), way(torch_ops).float()
        if kind in ("rows", "blocks"):  # rows are rounded, by cuBLAS's products too
            assert (found - expected).norm() < 0.05 * expected.norm()
        else:
            torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
    if kernel is not None:
        norms = int(kernel == "skinny")
        # gated, by SiLU or GELU; norm, residual
        kinds = [(0, 0, 0), (1, 0, 0), (0, norms, 0), (1, norms, 0), (2, norms, 0), (0, 0, 1), (0, 0, 0)]
        kinds = [kind for kind in kinds if kind[0]] if kernel == "bulk" else kinds  # it gates
        if kernel == "halves":  # another kernel gates behind it; behind a norm cuBLAS multiplies what is to be gated
            kinds = [(0, *kind[1:]) for kind in (*kinds[:3], *kinds[5:])]
        assert [tuple(map(int, call[2:])) for call in calls] == kinds
        assert all(call[0] is weights["a.weight"] and call[1] is weights.get("a.scale") for call in calls)
    else:
        assert not calls


@pytest.mark.parametrize(
    ("rows", "outputs", "has_bias", "dtype", "in_parts"),
    [
        (129, 4096, False, torch.bfloat16, True),
        (256, 4096, False, torch.float16, True),
        (257, 4096, False, torch.bfloat16, False),  # as a whole it is as fast
        (256, 2048, False, torch.bfloat16, False),  # and parts of so few outputs leave multiprocessors idle
        (256, 4096, True, torch.bfloat16, False),
        (256, 4096, False, torch.float32, False),  # a hybrid's, whose norm is torch's
    ],
)
def test_a_product_in_parts_is_added_up_where_the_stream_is_next_read(
    rows, outputs, has_bias, dtype, in_parts, monkeypatch
):
    def add_parts_norm(x, parts, weight, eps):
        taken.append(parts.shape)
        return TorchOps({"n.weight": weight}, {}).add_rms_norm("n", x, parts.sum(dim=0).to(x.dtype), eps)

    def add_rms_norm(x, y, weight, eps):
        return TorchOps({"n.weight": weight}, {}).add_rms_norm("n", x, y, eps)

    monkeypatch.setattr(kernels, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(products, "is_hopper", lambda device: True)
    monkeypatch.setattr(products, "processors", lambda device: 132)
    monkeypatch.setattr(products.torch, "bmm", lambda x, y, out_dtype: x.to(out_dtype) @ y.to(out_dtype))
    monkeypatch.setattr(kernels, "add_parts_norm", add_parts_norm)
    monkeypatch.setattr(kernels, "add_rms_norm", add_rms_norm)
    taken = []
    generator = torch.Generator().manual_seed(3)
    shapes = {"a.weight": (outputs, 256), "n.weight": (outputs,), "b.weight": (16, outputs), "c.weight": (8, outputs)}
    shapes |= {"a.bias": (outputs,)} if has_bias else {}
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    x, y = (torch.randn(1, rows, size, generator=generator).to(dtype) for size in (outputs, 256))
    ops, by_torch = rowless_ops(weights), TorchOps(weights, {})
    found, expected = ops.add_product("a", x, y), by_torch.add_product("a", x, y)
    assert found.pending.shape == ((2, 1, rows, outputs) if in_parts else (1, rows, outputs))
    ways = {
        "alone": lambda ops, x: [ops.add_pending(x)],
        "normed": lambda ops, x: ops.norm("n", x, 1e-6),
        "multiplied": lambda ops, x: ops.norm_linear("n", "b", x, 1e-6),
        "routed": lambda ops, x: [(found := ops.norm_and_linears("n", ("b", "c"), x, 1e-6))[0], found[1], *found[2]],
    }
    for way in ways.values():
        for got, right in zip(way(ops, found), way(by_torch, expected), strict=True):
            torch.testing.assert_close(got, right, atol=0.02 * float(right.abs().max()), rtol=0)
    assert len(taken) == (3 if in_parts else 0)


@pytest.mark.parametrize(
    ("kind", "rows", "all_rows", "segments", "is_taken", "together"),
    [
        (CudaOps, 1, 2, 2, True, True),
        (CudaOps, 1, 2, 2, False, False),
        (CudaOps, 2, 4, 2, True, False),  # drafts
        (CudaOps, 1, 9, 3, True, False),  # a piece of a prompt beside them
        (ExactOps, 1, 2, 2, True, False),
    ],
)
def test_one_row_a_slot_is_appended_and_attends_in_one_launch(
    kind, rows, all_rows, segments, is_taken, together, monkeypatch
):
    calls = []
    monkeypatch.setattr(kernels, "load", lambda: None)
    monkeypatch.setattr(kernels, "takes_single_rows", lambda append, keys, heads, slots: is_taken)
    monkeypatch.setattr(kernels, "attend_single_rows", lambda *given: calls.append("both") or given[7])
    monkeypatch.setattr(kernels.Append, "rows", lambda *given: calls.append("append"))
    monkeypatch.setattr(kernels, "attend_rows", lambda *given, **more: calls.append("attention"))
    ints = torch.zeros(all_rows, dtype=torch.int32)
    none, four = ints[:0], torch.zeros(segments, 4, dtype=torch.int32)
    layout = kernels.Rows(four, four[:2], four[2:], ints, ints, ints, none, none, none, none.view(0, 4), None)
    layer, table = AttentionLayer("layers.0.", "rope", 2, 1, 64, None), torch.zeros(4, 32)
    caches = {f"layers.0.{name}": torch.zeros(2, 1, 64, 64) for name in ("key", "value")}
    pages = kernels.Pages(torch.zeros(2, 1, dtype=torch.int32), 64)
    ops = kind({"rope.cos": table, "rope.sin": table}, caches, None, pages, layout, rows, arrivals=ints)
    out = ops.self_attention(layer, torch.zeros(1, all_rows, 4 * 64), ints)
    assert out.shape == (1, all_rows, 128)
    assert calls == (["both"] if together else ["append", "attention"])


def test_under_tensor_parallelism_a_product_is_summed_over_the_ranks_before_the_stream_gets_it(monkeypatch):
    calls = []
    monkeypatch.setattr(kernels, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        kernels,
        "skinny_gemm",
        lambda x, values, scale, bias, swiglu, norm, residual, *_: calls.append((norm, residual)) or x @ values.t(),
    )
    communicator = SimpleNamespace(size=2, rank=0, all_reduce=lambda x: 2 * x)
    x, weight = torch.ones(1, 4, 64).bfloat16(), torch.eye(64).bfloat16()
    found = rowless_ops({"a.weight": weight}, communicator).add_product("a", x, 3 * x)
    assert calls == [(None, None)]
    assert found.x is x and found.pending.equal(6 * x)


def test_a_steps_next_start_is_what_the_kernel_that_accepts_has_found(monkeypatch):
    accepted = torch.arange(8, dtype=torch.int32).view(4, 2).unbind()
    monkeypatch.setattr(kernels, "load", lambda: None)
    monkeypatch.setattr(kernels, "accept_rows", lambda rows, target_ids: accepted)
    ids = torch.zeros(1, 2, dtype=torch.int32)
    monkeypatch.setattr(kernels, "argmax", lambda logits: (logits, ids))
    hidden = torch.zeros(1, 2, 4)
    target = SimpleNamespace(
        forward=lambda *_: Features(hidden, []), logits=lambda ops, rows: rows, keep_path=lambda *_: None
    )
    inputs = StepInputs(ids, start=ids[0], row_count=ids[0], logit_rows=ids, block_offsets=ids)
    out = DraftVerifyStep(target, None)(rowless_ops({}), inputs, Drafting.OFF)
    assert out.next_start is accepted[3]
