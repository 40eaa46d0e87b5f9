"""Networks of DFlash 2, DSpark and windowed drafters compute what `TorchOps` computes, and TensorRT compiles them."""

import pytest
import torch

from tests.checkpoints import make_target
from tests.drafters import make_dflash2, make_dspark
from trtllm_dflash.checkpoint.pair import open_pair

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.test_compile import SHAPE, compile_pair
from tests.tensorrt.test_network import BLOCK, Both, builder, compare_generation, make_config  # noqa: F401

pytestmark = pytest.mark.slow


def make(kind, folder):
    target = make_target(folder / "target", layers=3)
    if kind == "dflash2":
        return open_pair(target, make_dflash2(folder / "drafter", target, windows=[12, 12], block_size=BLOCK))
    options = {"format": "speculators", "draft_vocab": 48} if "reduced" in kind else {}
    head = "gated" if "gated" in kind else "vanilla"
    return open_pair(target, make_dspark(folder / "drafter", target, head=head, block_size=BLOCK - 1, **options))


@pytest.mark.principal("dflash2-2", "dspark, gated-1")
@pytest.mark.parametrize(("kind", "tp"), [("dflash2", 1), ("dflash2", 2), ("dspark, gated", 1), ("dspark, reduced", 2)])
@torch.inference_mode()
def test_the_network_drafts_as_torch_ops_do(builder, tmp_path, kind, tp):  # noqa: F811
    pair = make(kind, tmp_path)
    both = Both(builder, pair, make_config(pair, tp).model_copy(update={"sampling": False}))
    assert both.config.block_size == BLOCK
    assert compare_generation(both, [20, 1], steps=3) > 0
    assert both.compared == 2 + 3


@pytest.mark.principal("dspark-sm120-1-False")
@pytest.mark.parametrize(
    ("kind", "gpu", "tp", "sampled"),
    [("dflash2", "sm89", 2, True), ("dspark", "sm120", 1, True), ("dspark", "sm120", 1, False)],
)
def test_both_profiles_compile(tmp_path, kind, gpu, tp, sampled):
    target = make_target(tmp_path / "target", layers=2, hidden=128, vocab=512, **SHAPE)
    make_drafter = make_dflash2 if kind == "dflash2" else make_dspark
    drafter = make_drafter(tmp_path / "drafter", target, layers=2, tap_layers=(0, 1), **SHAPE)
    assert compile_pair(open_pair(target, drafter), gpu, tp, sampled=sampled).data.nbytes > 0
