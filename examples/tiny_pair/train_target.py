"""Trains the target, a Qwen3 of 8.4 million parameters, and writes it as a Hugging Face checkpoint in BF16."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conversations import Conversations
from qwen3 import Target, initialise
from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 8,
    "layer_types": ["full_attention"] * 8,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
GENERATION = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
PROMPT_WEIGHT = (
    0.1  # of the loss on a prompt's tokens: users are not to be imitated, but reading them is worth a little
)


def rate(step: int, steps: int, peak: float, warm_up: int = 200) -> float:
    """Linear warm-up, then a cosine to nothing."""
    return peak * min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the target checkpoint; holds tokenizer.json already"
    )
    parser.add_argument("--steps", type=int, default=5600)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--exchanges", type=int, default=600_000, help="distinct training exchanges")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--begin", type=Path, help="train this checkpoint further, instead of a new one")
    parser.add_argument("--kind", help="train on this kind of text alone")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    began = time.time()
    data = Conversations(args.out / "tokenizer.json", seed=1, exchanges=args.exchanges, kind=args.kind)
    print(f"{len(data.turns)} exchanges, {data.tokens / 1e6:.1f} M tokens, {time.time() - began:.0f} s", flush=True)

    model = Target(CONFIG).to(args.device)
    initialise(model, CONFIG["num_hidden_layers"])
    if args.begin is not None:
        there = load_file(args.begin / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): values for name, values in there.items()})
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(groups(model), lr=args.rate, betas=(0.9, 0.95), fused=args.device == "cuda")

    def losses(ids: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(args.device, torch.bfloat16):
            logits = model(ids)
        each = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        reply = (parts[:, 1:] > 0).flatten().float()
        weight = reply + PROMPT_WEIGHT * (1 - reply)
        return (each * weight).sum() / weight.sum(), (each * reply).sum() / reply.sum()

    compiled = torch.compile(losses, dynamic=False) if args.device == "cuda" else losses
    for step in range(args.steps):
        length = 4096 if step % 2 else 512  # long conversations for the far positions, short ones for the common case
        ids, parts = data.batch(max(1, args.tokens // length), length, args.device)
        loss, reply_loss = compiled(ids, parts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 < 2 or step == args.steps - 1:
            print(
                f"step {step} length {length} loss {loss.item():.4f} reply {reply_loss.item():.4f} "
                f"{time.time() - began:.0f} s",
                flush=True,
            )

    save_file(
        {f"model.{n}": p.detach().bfloat16().cpu().contiguous() for n, p in model.named_parameters()},
        args.out / "model.safetensors",
        {"format": "pt"},
    )
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (args.out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


if __name__ == "__main__":
    main()
