"""The modules that train the tiny targets compute what our engine serves."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import trtllm_dflash
from tests.near_ties import all_logits
from trtllm_dflash import LLM

EXAMPLE = Path(trtllm_dflash.__file__).parents[1] / "examples" / "tiny_pair"


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the example; no other test is to find modules of its names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(EXAMPLE)
    yield import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLE)):
            del sys.modules[name]


@pytest.mark.parametrize("shape", ["qwen3", "qwen3_5"])
def test_a_target_in_training_has_the_logits_that_are_served(shape, example, tmp_path):
    module, training = example(shape), example("train_target")
    torch.manual_seed(0)
    model = module.Target(module.CONFIG)
    example("qwen3").initialise(model, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and decays that are not those of the beginning
                parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter if name.endswith(training.FP32) else parameter.bfloat16())
    training.save(model, module.CONFIG, tmp_path)
    ids = torch.randint(4, 2048, (150,)).tolist()  # of a delta net three chunks, the last not full
    with torch.inference_mode():
        trained = model(torch.tensor([ids]))[0]
    with LLM.from_pretrained(tmp_path, None, precision="fp32", device="cpu", max_batch=1, max_seq_len=256) as llm:
        served = all_logits(llm, ids)
    assert (served - trained).abs().max() < 1e-3 < served.std()


def test_chunks_of_a_delta_net_are_its_recurrence(example):
    module, generator = example("qwen3_5"), torch.Generator().manual_seed(1)
    shape = 2, 3, 150

    def draw(*sizes):
        return torch.rand(*shape, *sizes, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(16), dim=-1) for _ in range(2))  # keys that are alike
    v, shares, logs = draw(16) - 0.5, draw(), -0.1 * draw()
    state, read = torch.zeros(*shape[:2], 16, 16, dtype=torch.float64), []
    for t in range(shape[2]):
        state = state * logs[:, :, t].exp()[..., None, None]
        key = k[:, :, t, :, None]
        state = state + key * ((v[:, :, t] - (key * state).sum(-2)) * shares[:, :, t, None])[..., None, :]
        read.append((q[:, :, t, :, None] * state).sum(-2))
    inputs = [x.requires_grad_() for x in (q, k, v, shares, logs)]
    out = module.gated_delta(*inputs)
    torch.testing.assert_close(out, torch.stack(read, 2))
    # Its derivative, along one direction.
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    turns = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs]
    with torch.no_grad():
        up, down = (
            module.gated_delta(*(x + e * turn for x, turn in zip(inputs, turns, strict=True))).square().sum()
            for e in (1e-6, -1e-6)
        )
    along = sum((gradient * turn).sum() for gradient, turn in zip(gradients, turns, strict=True))
    assert ((up - down) / 2e-6).item() == pytest.approx(float(along), rel=1e-6)
