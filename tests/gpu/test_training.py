"""The parts of a training on a GPU: attention equals a dense reference; features, losses and gradients the CPU's."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import HYBRID, TINY
from trtllm_dflash import LLM
from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.train.anchors import pick_anchors
from trtllm_dflash.train.documents import Document, Pack, generator
from trtllm_dflash.train.features import FrozenTarget
from trtllm_dflash.train.mask import MASKED, BlockVisibility, Flexible, MaskedAttention
from trtllm_dflash.train.network import TrainedDrafter
from trtllm_dflash.train.settings import TrainSettings
from trtllm_dflash.train.state import State
from trtllm_dflash.train.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CUDA = torch.device("cuda")


# -- attention ---------------------------------------------------------------------------------------------------------


def documents(lengths: list[int]) -> list[Document]:
    return [Document([1] * length, length // 3) for length in lengths]


@pytest.mark.parametrize(("block", "size"), [(16, 64), (10, 64), (16, 128)])
@pytest.mark.parametrize("kind", ["flex", "masked"])
def test_attention_and_its_gradients_equal_the_dense_reference(kind, block, size):
    """Two packs of different lengths: what was compiled for the first serves the second."""
    make = Flexible(1024, 48)
    for lengths, count in (([70, 300, 9, 411, 130], 48), ([500, 33, 128], 31)):
        pack = Pack.of(documents(lengths)).to(CUDA)
        anchors = pick_anchors(Pack.of(pack.documents), count, generator(count))
        visibility = BlockVisibility(pack, anchors, block)
        draw = partial(torch.randn, generator=torch.Generator(CUDA).manual_seed(count), device=CUDA)
        shapes = (8, visibility.rows), (4, visibility.keys), (4, visibility.keys), (8, visibility.rows)
        q, k, v, weight = (draw(1, heads, rows, size).bfloat16() for heads, rows in shapes)
        attention = make.blocks(pack, anchors, block) if kind == "flex" else MaskedAttention(visibility)
        found, expected = [], []
        for results, attend, dtype in ((found, attention, torch.bfloat16), (expected, None, torch.float64)):
            inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            if attend is None:
                wide = [x.repeat_interleave(2, dim=1) for x in inputs[1:]]
                scores = inputs[0] @ wide[0].transpose(2, 3) * size**-0.5
                out = scores.masked_fill(~visibility.dense(), -torch.inf).softmax(dim=-1) @ wide[1]
            else:
                out = attend(*inputs)
            results += [out.detach(), *torch.autograd.grad((out * weight.to(dtype)).sum(), inputs)]
        for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            error = (one.double() - other).norm() / other.norm()
            print(f"{kind} {block} {size} {len(pack.token_ids)} {name}: {error:.2e}")
            assert error < 0.01, name


# -- a step ------------------------------------------------------------------------------------------------------------


def texts() -> list[Document]:
    """Prompts and their references, as token ids."""
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()][::16]
    with LLM.from_pretrained(TINY / "target", None, device="cpu", max_seq_len=64) as llm:
        assert llm.codec is not None
        pairs = [(llm.codec.encode(row["prompt"]), llm.codec.encode(row["reference"])) for row in rows]
    return [Document([*prompt, *reply], len(prompt)) for prompt, reply in pairs]


def tiny_trainer(llm: LLM, rows: list[Document], folder: Path, **values: object) -> Trainer:
    """A trainer of the shipped drafter."""
    checkpoint = open_drafter(TINY / "drafter")
    target = FrozenTarget(llm, checkpoint.config.tap_layers)
    drafter = TrainedDrafter(checkpoint.config, target.embedding, 512)
    drafter.load({key: checkpoint.folder.read(checkpoint.keys[key]) for key in drafter.shapes()})
    packing = {"pack": 1024, "anchors": 64, "max_seq_len": 512, **values}
    settings = TrainSettings.model_validate({"target": "t", "data": "none", **packing})
    with State.opened(folder, "t") as state:
        return Trainer(drafter, target, rows, rows, settings, state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", [MASKED, Flexible(4096, 16)], ids=["masked", "flex"])
@pytest.mark.parametrize(("pair", "kernels"), [(TINY, "torch"), (HYBRID, "auto")], ids=["tiny", "tiny-hybrid"])
def test_features_of_a_pack_are_those_of_the_cpu(pair, kernels, attention, precision):
    pack = Pack.of(texts())
    both = []
    for device, dtype in (("cpu", "fp32"), ("cuda", precision)):
        with LLM.from_pretrained(
            pair / "target", None, dtype, device, max_seq_len=512, kernels=kernels, prepare=False
        ) as llm:
            features = FrozenTarget(llm, (1, 3, 5)).features(
                pack.to(torch.device(device)), MASKED if device == "cpu" else attention
            )
            both.append([x.float().cpu() for x in (*features.taps, features.hidden)])
    for one, other in zip(*both, strict=True):
        error = (one - other).norm() / other.norm()
        print(f"features {precision}: {error:.2e}")
        assert error < (1e-4 if precision == "fp32" else 0.03)


@pytest.mark.parametrize("attention", ["masked", "flex"])
@pytest.mark.parametrize("objective", ["ce", "kd", "greedy"])
def test_the_loss_and_its_gradient_are_those_of_the_cpu(objective, attention, tmp_path):
    rows, both = texts(), []
    for device, kind in (("cpu", "masked"), ("cuda", attention)):
        with LLM.from_pretrained(
            TINY / "target", None, device=device, max_seq_len=512, kernels="torch", prepare=False
        ) as llm:
            trainer = tiny_trainer(llm, rows, tmp_path / device, objective=objective, attention=kind)
            loss = trainer.loss(trainer.packs.pack(0, 0), 0)
            loss.value.backward()
            gradient = torch.cat([p.grad.flatten().float().cpu() for p in trainer.drafter.tensors().values()])
            both.append((loss.value.item(), loss.accepted.item(), gradient))
    (value, accepted, gradient), (cuda_value, cuda_accepted, cuda_gradient) = both
    cosine = F.cosine_similarity(gradient, cuda_gradient, dim=0).item()
    ratio = (cuda_gradient.norm() / gradient.norm()).item()
    print(f"{objective} {attention}: loss {value:.5f} {cuda_value:.5f}, accepted {accepted:.3f} {cuda_accepted:.3f}")
    print(f"gradient: cosine {cosine:.5f}, norms {ratio:.4f}")
    assert cuda_value == pytest.approx(value, rel=0.03)
    assert cuda_accepted == pytest.approx(accepted, rel=0.05)
    assert cosine > 0.99 and ratio == pytest.approx(1, abs=0.03)


def test_no_step_waits_for_the_device(tmp_path):
    torch._dynamo.reset()  # earlier compilations count against a limit, past which steps run uncompiled and wait
    with LLM.from_pretrained(
        TINY / "target", None, device="cuda", max_seq_len=512, kernels="torch", prepare=False
    ) as llm:
        trainer = tiny_trainer(llm, texts(), tmp_path, pack=512)
        trainer.loss(trainer.packs.pack(0, 0), 0).value.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.loss(trainer.packs.pack(0, 1), 1).value.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
