"""The weights of an exact step, whose quantized ones are dequantized."""

import torch

from trtllm_dflash.models.drafter import PREFIX
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight
from trtllm_dflash.session import weights as session_weights
from trtllm_dflash.session.weights import multiplied_weights

CPU = torch.device("cpu")
LINEAR = "model.layers.0.mlp.gate_up_proj"


def test_matrices_of_an_exact_target_are_dequantized_and_the_drafter_s_are_not(monkeypatch):
    monkeypatch.setattr(session_weights, "multiplies", lambda device, weight, dtype: True)
    torch.manual_seed(0)
    stored = {}
    for name in (LINEAR, PREFIX + LINEAR):
        stored |= {f"{name}.weight": torch.randn(32, 64).to(FP8), f"{name}.scale": torch.rand(32)}
    usual = multiplied_weights(stored, torch.bfloat16, CPU)
    assert {name: x.dtype for name, x in usual.items()} == {name: x.dtype for name, x in stored.items()}
    exact = multiplied_weights(stored, torch.bfloat16, CPU, exact=True)
    expected = Fp8Weight(stored[f"{LINEAR}.weight"], stored[f"{LINEAR}.scale"]).dequantize().bfloat16()
    assert exact.pop(f"{LINEAR}.weight").equal(expected)
    assert exact.keys() == {f"{PREFIX}{LINEAR}.weight", f"{PREFIX}{LINEAR}.scale"}
    assert exact[f"{PREFIX}{LINEAR}.weight"].dtype == FP8
