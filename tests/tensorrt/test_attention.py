"""Windows and sinks in TensorRT's own layers give what TorchOps gives, and compile with fused kernels."""

from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import TYPES, evaluate, trt
from trtllm_dflash.ops.tensorrt_attention import PRESENT, SINK_SIZE, write_sink_key
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

SLOTS, HEADS, KV_HEADS, SIZE, ROOM = 3, 4, 2, 16, 40
TRT_TYPES = {known: emitted for emitted, known in TYPES.items()}


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


def cache_shape(sinks: bool, size: int = SIZE, room: int = ROOM) -> tuple[int, int, int]:
    return (KV_HEADS, room + 1, size + SINK_SIZE) if sinks else (KV_HEADS, room, size)


def emit(
    builder: Any,
    dtype: torch.dtype,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
    shape: tuple[int, int, int],
) -> tuple[Any, TensorRTOps]:
    """A network that appends rows of keys and values at `start` and attends over the caches."""
    size = shape[2] if sinks is None else shape[2] - SINK_SIZE
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    rows = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    caches = {name: network.add_input(name, TRT_TYPES[dtype], (-1, *shape)) for name in ("key", "value")}
    given = {name: network.add_input(name, TRT_TYPES[dtype], (-1, heads, -1, size)) for name, heads in rows.items()}
    start = network.add_input("start", trt.int32, (-1,))
    for tensor in (*caches.values(), *given.values(), start):
        tensor.set_dimension_name(0, "slots")
    ops = TensorRTOps(network, {} if sinks is None else {"sinks": sinks}, caches)
    lengths = ops._binary("SUM", start, ops._reshape(ops._row_count(given["q"]), (1,)), "lengths")
    keys, values = (ops.append_kv(name, given[rows], start) for name, rows in (("key", "k"), ("value", "v")))
    out = ops.attention(given["q"], keys, values, lengths, causal, window, None if sinks is None else "sinks")
    out.name = "out"
    network.mark_output(out)
    return network, ops


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_attention_is_that_of_torch_ops(builder: Any, causal: bool, window: int | None, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    sinks = torch.randn(HEADS, generator=generator) * 2 if has_sinks else None
    network, _ops = emit(builder, torch.float32, causal, window, sinks, cache_shape(has_sinks))
    caches = {name: torch.zeros(SLOTS, *cache_shape(has_sinks)) for name in ("key", "value")}
    if has_sinks:
        write_sink_key(caches["key"])
    expected_caches = {name: torch.zeros(SLOTS, KV_HEADS, ROOM + 8, SIZE) for name in ("key", "value")}
    torch_ops = TorchOps({} if sinks is None else {"sinks": sinks}, expected_caches)
    # The last call's rows pass the caches' end in one slot, as padded rows may.
    for start, rows, real in (([0, 0, 0], 9, 9), ([9, 4, 1], 5, 5), ([14, 9, 36], 6, 4)):
        first = torch.tensor(start, dtype=torch.int32)
        q, k, v = (torch.randn(SLOTS, n, rows, SIZE, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
        (found,) = evaluate([network], [caches | {"q": q, "k": k, "v": v, "start": first}])
        keys, values = (torch_ops.append_kv(name, x, first) for name, x in (("key", k), ("value", v)))
        expected = torch_ops.attention(
            q, keys, values, first + rows, causal, window, None if sinks is None else "sinks"
        )
        if causal or real == rows:
            torch.testing.assert_close(found["out"][:, :real], expected[:, :real], atol=2e-5, rtol=2e-5)
        token_rows = slice(int(has_sinks), None)
        for name, cache in expected_caches.items():
            assert torch.equal(found[name + PRESENT][:, :, token_rows, :SIZE], cache[:, :, :ROOM])
    if has_sinks:
        key = torch.zeros(SIZE + SINK_SIZE)
        key[SIZE] = 1
        assert (caches["key"][:, :, 0] == key).all() and not caches["value"][:, :, 0].any()
        assert not any(cache[:, :, 1:, SIZE:].any() for cache in caches.values())


@pytest.mark.principal("64-128-torch.float16-SM89", "64-None-torch.bfloat16-SM120")
@pytest.mark.parametrize(
    ("size", "window", "dtype", "gpu"),
    [
        (64, None, torch.bfloat16, "SM120"),
        (64, 128, torch.bfloat16, "SM120"),
        (128, 128, torch.float16, "SM120"),
        (64, 128, torch.float16, "SM89"),
    ],
    ids=str,
)
def test_sinks_and_windows_compile_with_fused_kernels(
    builder: Any, size: int, window: int | None, dtype: torch.dtype, gpu: str
) -> None:
    sinks = torch.zeros(HEADS, dtype=dtype)
    shape = cache_shape(True, size, room=1024)
    network, ops = emit(builder, dtype, True, window, sinks, shape)
    options = builder.create_builder_config()
    options.num_compute_capabilities = 1
    options.set_compute_capability(getattr(trt.ComputeCapability, gpu), 0)
    for slots, rows in ((1, 256), (4, 10)):
        profile = builder.create_optimization_profile()
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            largest = (slots, heads, rows, size)
            profile.set_shape(name, (1, heads, 1, size), largest, largest)
        for name in ("key", "value"):
            profile.set_shape(name, (1, *shape), (slots, *shape), (slots, *shape))
        profile.set_shape("start", (1,), (slots,), (slots,))
        options.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, options) is not None
    del ops  # owns the constants
