"""The drafter against an independent, plain implementation of the paper's equations."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_drafter, make_target
from trtllm_dflash import LLM
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.step import Drafting, StepInputs

Weights = dict[str, torch.Tensor]


class PlainDrafter:
    """One sequence, one block, no cache, no fusing: everything recomputed from the target's hidden states."""

    def __init__(self, folder: Path) -> None:
        self.w: Weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        c = self.c = json.loads((folder / "config.json").read_text())
        self.taps = c["dflash_config"]["target_layer_ids"]
        self.mask = c["dflash_config"]["mask_token_id"]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.w[name + ".weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [heads, N, D]"""
        size = x.shape[-1]
        frequency = self.c["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angle = positions[:, None].double() * frequency
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )

    def block_hidden(self, embedding: torch.Tensor, hidden: list[torch.Tensor], bonus: int, size: int) -> torch.Tensor:
        """Final hidden rows [size, H] of the block that begins with `bonus`, after context of len(hidden[0]) tokens."""
        c, length = self.c, hidden[0].shape[0]
        context = self.norm("hidden_norm", self.linear("fc", torch.cat([hidden[t] for t in self.taps], dim=-1)))
        x = embedding[torch.tensor([bonus] + [self.mask] * (size - 1))].double()
        here, before = torch.arange(length, length + size), torch.arange(length)
        for i in range(c["num_hidden_layers"]):
            layer = f"layers.{i}."
            h = self.norm(layer + "input_layernorm", x)

            def heads(name: str, rows: torch.Tensor, layer: str = layer) -> torch.Tensor:
                projected = self.linear(f"{layer}self_attn.{name}_proj", rows)
                return projected.unflatten(-1, (-1, c["head_dim"])).transpose(0, 1)

            q = self.rotate(self.norm(layer + "self_attn.q_norm", heads("q", h)), here)
            k = self.norm(layer + "self_attn.k_norm", torch.cat([heads("k", context), heads("k", h)], dim=1))
            k = self.rotate(k, torch.cat([before, here]))
            v = torch.cat([heads("v", context), heads("v", h)], dim=1)
            group = q.shape[0] // k.shape[0]
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(c["head_dim"])
            mixed = scores.softmax(-1) @ v.repeat_interleave(group, 0)
            x = x + self.linear(layer + "self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
            h = self.norm(layer + "post_attention_layernorm", x)
            gate, up = self.linear(layer + "mlp.gate_proj", h), self.linear(layer + "mlp.up_proj", h)
            x = x + self.linear(layer + "mlp.down_proj", torch.nn.functional.silu(gate) * up)
        return self.norm("norm", x)


def target_states(folder: Path, ids: list[int]) -> list[torch.Tensor]:
    """The residual stream after each layer, [N, H] each, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    after: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _i, out: after.append((out[0] if isinstance(out, tuple) else out)[0]))
    with torch.inference_mode():
        model(torch.tensor([ids]))
    return after


def drafts_of(target: Path, drafter: Path, prompt: list[int], tokens: list[int], block_size: int) -> list[int]:
    """What the plain implementation drafts after prompt + tokens, whose last token is the bonus token."""
    plain = PlainDrafter(drafter)
    weights = load_file(target / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", table).double()
    ids = prompt + tokens
    rows = plain.block_hidden(table, target_states(target, ids[:-1]), ids[-1], block_size)
    return (rows[1:] @ head.T).argmax(-1).tolist()


def first_drafts(llm: LLM, prompt: list[int]) -> tuple[int, list[int]]:
    """Bonus token and drafts that come out of the prefill."""
    rows = torch.tensor([[len(prompt) - 1]], dtype=torch.int32)
    block = torch.arange(llm.config.block_size, dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    inputs = StepInputs(torch.tensor([prompt], dtype=torch.int32), zero, rows[:, 0] + 1, rows, block)
    tokens = llm.session.step(inputs, Drafting.BLOCK).next_tokens[0].tolist()
    return tokens[0], tokens[1:]


@pytest.mark.principal(
    "{}-False",
    "{'block_size': 16, 'tap_layers': (0, 1, 2), 'layers': 3}-True",
    "{'attention_bias': True}-False",
    "{'kv_heads': 1}-True",
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_heads": 1}, {"block_size": 16, "tap_layers": (0, 1, 2), "layers": 3}, {"attention_bias": True}],
    ids=str,
)
def test_the_first_block_is_what_the_equations_give(options, tied, tmp_path):
    target = make_target(tmp_path / "target", tied=tied)
    drafter = make_drafter(tmp_path / "drafter", target, **options)
    llm = LLM.from_pretrained(str(target), str(drafter), precision="fp32", device="cpu", max_seq_len=128)
    generator = torch.Generator().manual_seed(3)
    for length in (1, 2, 9, 60):
        prompt = torch.randint(0, 128, (length,), generator=generator).tolist()
        bonus, drafts = first_drafts(llm, prompt)
        assert drafts == drafts_of(target, drafter, prompt, [bonus], llm.config.block_size)


def test_every_later_block_too_after_rejected_and_accepted_drafts(tiny):
    """On the shipped pair, steps accept anything from none to all: each block must see exactly the committed tokens."""
    from tests.conftest import TINY

    prompt = tiny.encode([{"role": "user", "content": read_prompts(1)["arithmetic"][0]}])
    bonus, drafts = first_drafts(tiny, prompt)
    tokens = torch.tensor([[bonus, *drafts]], dtype=torch.int32)
    start = torch.tensor([len(prompt)], dtype=torch.int32)
    rows = torch.arange(16, dtype=torch.int32)[None]
    reply, accepted = [bonus], []
    for _ in range(8):
        inputs = StepInputs(tokens, start, torch.tensor([16], dtype=torch.int32), rows, rows)
        out = tiny.session.step(inputs, Drafting.BLOCK)
        accepted.append(int(out.accepted[0]))
        reply += out.target_ids[0, : accepted[-1] + 1].tolist()
        assert out.next_start.tolist() == [len(prompt) + len(reply) - 1]
        expected = drafts_of(TINY / "target", TINY / "drafter", prompt, reply, 16)
        assert out.next_tokens[0].tolist() == [reply[-1], *expected]
        tokens, start = out.next_tokens, out.next_start
    assert min(accepted) < 15 and max(accepted) > 2, "the prompt no longer exercises both"
