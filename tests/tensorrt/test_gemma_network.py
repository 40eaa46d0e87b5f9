"""Gemma 4 as TensorRT networks: evaluated, they are TorchOps; compiled, they are plans."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_tensors, make_drafter
from tests.test_gemma4 import make_gemma4
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.errors import SettingsError

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.test_network import BLOCK, Both, compare_generation, make_config
from tests.tensorrt.test_quantized import compiled
from tests.tensorrt.test_session import assert_both_sessions_reply_alike

pytestmark = pytest.mark.slow


def make_pair(folder: Path, drafter: dict[str, Any] | None = None, **target: Any) -> Pair:
    path = make_gemma4(folder / "target", **target)
    # So small that a drafter, which knows nothing, does not draft the mask alone: what it embeds is scaled, too.
    name = "model.language_model.embed_tokens.weight"
    edit_tensors(path, lambda tensors: tensors[name].div_(8))
    shape = {"block_size": BLOCK, "tap_layers": (0, 1, 2), "seed": 3, **(drafter or {})}
    return open_pair(path, make_drafter(folder / "drafter", path, **shape))


def layers(*full: bool) -> dict[str, Any]:
    kinds = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


@pytest.mark.principal("2-True-False-fp32", "1-False-True-fp32")
@pytest.mark.parametrize(
    ("tp", "experts", "sampled", "precision"),
    [(1, False, True, "fp32"), (2, True, False, "fp32"), (1, True, False, "fp16")],
)
@torch.inference_mode()
def test_network_computes_what_torch_ops_computes(
    tmp_path: Path, tp: int, experts: bool, sampled: bool, precision: str
) -> None:
    """Logits are capped, which sampling sees; the longest prompt passes the window of 8, and the chunk."""
    shape = {"vocab_size": 16, "final_logit_softcapping": 0.1, **layers(False, True, False, True)}
    if precision == "fp16":
        # All experts are chosen: at a near-tie of a router either side might choose another one, by its CPU. Three
        # layers, as each one after the other makes roundings larger.
        shape |= {**layers(True, False, True), "top_k_experts": 8}
    pair = make_pair(tmp_path, experts=experts, **shape)
    config = make_config(pair, tp, precision).model_copy(update={"sampling": sampled})
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), pair, config, 120)
    survived = compare_generation(both, [30, 5, 1], steps=3)
    assert both.compared == 4 + 3
    assert sampled or survived > 0


@pytest.mark.exhaustive(
    beside="tests/tensorrt/test_session.py::test_the_scheduler_gets_the_same_replies_from_both_sessions"
)
@torch.inference_mode()
def test_the_scheduler_gets_the_same_replies_from_both_sessions(tmp_path: Path) -> None:
    """Caches of two sizes; the last prompt starts from rows of the second."""
    pair = make_pair(tmp_path, experts=True, vocab_size=32, **layers(False, True, False, True))
    assert_both_sessions_reply_alike(pair)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Heads of 256 with a window and of 512 without, as published, which two ranks can divide."""
    shape = {"hidden_size": 128, "vocab_size": 512, "head_dim": 256, "global_head_dim": 512, "sliding_window": 32}
    shape |= {"intermediate_size": 128, "num_attention_heads": 4, **layers(False, True)}
    drafter = {"layers": 1, "heads": 4, "kv_heads": 2, "head_size": 128, "tap_layers": (0, 1)}
    return {
        kind: make_pair(tmp_path_factory.mktemp(kind), drafter, experts=kind == "experts", published=False, **shape)
        for kind in ("dense", "experts")
    }


@pytest.mark.principal("experts-sm120-2")
@pytest.mark.parametrize(("kind", "gpu", "tp"), [("dense", "sm89", 1), ("experts", "sm120", 2)])
def test_steps_compile(pairs: dict[str, Pair], kind: str, gpu: str, tp: int) -> None:
    assert compiled(pairs[kind], gpu, tp, sampling=False).data.nbytes > 0


@torch.inference_mode()
def test_heads_of_512_alone_are_decomposed(pairs: dict[str, Pair]) -> None:
    """There is no fused attention for them; the scores that then pass through memory are planned."""
    config = make_config(pairs["dense"]).model_copy(update={"sampling": False, "gpu": "sm120"})
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), pairs["dense"], config, 120)
    compare_generation(both, [12, 5], steps=1)
    network = both.emitted[0].network
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    attention = {x.name: x for x in layers if x.type == trt.LayerType.ATTENTION_INPUT}
    decomposed = []
    for name, layer in attention.items():
        layer.__class__ = trt.IAttentionInputLayer
        decomposed += [name] if layer.attention.decomposable else []
    assert len(attention) == 3 and len(decomposed) == 1, decomposed
    sizes = [
        plan_memory(config.model_copy(update={"backend": "tensorrt", "max_seq_len": n})).scratch for n in (64, 128)
    ]
    assert sizes[1] - sizes[0] == 2 * 24 * 4 * 64 * 4  # both sides of the softmax: rows, heads, keys, bytes


def test_a_plugin_without_keys_as_values_is_refused(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_dflash.build.planning.has_plugin_layers", lambda module: True)
    with pytest.raises(SettingsError, match="--plugin: it has no keys as values; leave it out"):
        compiled(pairs["dense"], "sm120", 1, plugin="libdflash_plugin.so")
