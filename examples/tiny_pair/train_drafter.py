"""Trains the DFlash drafter on the shipped target and writes it in the z-lab format.

The target's weights are those of the checkpoint (rounded to BF16), computed in FP32. A label is the target's own greedy
choice after the text so far; a block counts only up to the first place where the text leaves that choice, so every
label is what the target would really say there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conversations import FIRST, Conversations
from qwen3 import Layer, RMSNorm, Target, initialise, rope_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_target import groups, rate

BLOCK, MASK_ID, DECAY = 16, 3, 7.0


def load_target(folder: Path, device: str) -> Target:
    model = Target(json.loads((folder / "config.json").read_text()))
    weights = {name.removeprefix("model."): w.float() for name, w in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.to(device).requires_grad_(False)


def drafter_config(target: dict[str, Any], layers: int, taps: list[int]) -> dict[str, Any]:
    config = {k: v for k, v in target.items() if k not in ("use_cache", "bos_token_id")}
    return config | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
        "block_size": BLOCK,
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": taps},
    }


class Drafter(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.config = c
        self.fc = nn.Linear(
            len(c["dflash_config"]["target_layer_ids"]) * c["hidden_size"], c["hidden_size"], bias=False
        )
        self.hidden_norm, self.norm = (
            RMSNorm(c["hidden_size"], c["rms_norm_eps"]),
            RMSNorm(c["hidden_size"], c["rms_norm_eps"]),
        )
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))

    def forward(self, taps: Tensor, block: Tensor, anchors: Tensor) -> Tensor:
        """taps [B, S, taps * H]; block [B, A, 16, H], embedded; anchors [B, A], positions -> hidden [B, A, 16, H].

        All anchors of a row share its context rows; the mask gives each block the rows before its anchor and its own.
        """
        c, (b, s, _), a = self.config, taps.shape, anchors.shape[1]
        context = self.hidden_norm(self.fc(taps))
        at = torch.arange(s, device=taps.device)
        positions = (anchors[..., None] + torch.arange(BLOCK, device=taps.device)).flatten(1)  # [B, A * 16]
        mine = torch.arange(a, device=taps.device).repeat_interleave(BLOCK)
        sees_context = (at < anchors[..., None]).repeat_interleave(BLOCK, 1)  # [B, A * 16, S]
        sees_block = (mine[:, None] == mine).expand(b, -1, -1)  # not causal
        mask = torch.cat([sees_context, sees_block], -1).unsqueeze(1)
        rope, context_rope = (rope_of(p, c["head_dim"], c["rope_theta"]) for p in (positions, at))
        x = block.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, rope, context, context_rope, mask)
        hidden: Tensor = self.norm(x).unflatten(1, (a, BLOCK))
        return hidden


def pick_anchors(parts: Tensor, count: int) -> Tensor:
    """Positions [B, count] in replies, with room for a block; the first, where every decoding begins, weighs more."""
    weight = (parts > 0).float() + 4 * (parts == FIRST).float()
    weight[:, -BLOCK:] = 0
    return torch.multinomial(weight + 1e-9, count, replacement=True).clamp(max=parts.shape[1] - BLOCK)


def labels_of(ids: Tensor, choice: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The target's choices [B, A, 15] for rows 1.. of each block, and whether the text has kept to them so far."""
    rows = torch.arange(ids.shape[0], device=ids.device)[:, None, None]
    at = anchors[..., None] + torch.arange(1, BLOCK, device=ids.device)
    labels = choice[rows, at - 1]
    kept = (labels == ids[rows, at]).long().cumprod(-1)
    return labels, torch.cat([torch.ones_like(kept[..., :1]), kept[..., :-1]], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--taps", type=int, nargs="+", default=[1, 3, 5], help="0-based target layers whose output is tapped"
    )
    parser.add_argument("--steps", type=int, default=3800)
    parser.add_argument(
        "--rows", type=int, default=16, help="rows of 1024 tokens a step; every fourth step has half as many of 4096"
    )
    parser.add_argument("--anchors", type=int, default=128, help="blocks a row")
    parser.add_argument("--exchanges", type=int, default=300_000)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(2)
    torch.set_float32_matmul_precision("high")
    began = time.time()
    data = Conversations(args.target / "tokenizer.json", seed=2, exchanges=args.exchanges)
    target = load_target(args.target, args.device)
    config = drafter_config(target.config, args.layers, args.taps)
    assert max(args.taps) < target.config["num_hidden_layers"] - 1, "--taps: the last layer is never tapped"
    drafter = Drafter(config).to(args.device)
    initialise(drafter, args.layers)
    print(f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(groups(drafter), lr=args.rate, betas=(0.9, 0.95), fused=args.device == "cuda")
    decay = torch.exp(-torch.arange(BLOCK - 1, device=args.device) / DECAY)  # exp(-(k - 1) / 7) for row k

    def losses(taps: Tensor, ids: Tensor, choice: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        labels, kept = labels_of(ids, choice, anchors)
        block = torch.full((*anchors.shape, BLOCK), MASK_ID, device=ids.device)
        block[..., 0] = ids.gather(1, anchors)
        with torch.autocast(args.device, torch.bfloat16):
            logits = target.lm_head(drafter(taps, target.embed_tokens(block), anchors)[:, :, 1:])
        each = F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
        weight = kept * decay
        right = ((logits.argmax(-1) == labels) & (kept > 0)).long().cumprod(-1).sum(-1)
        full = kept[..., -1] > 0  # a block cut short by the text says nothing about how far the drafter would have come
        return (each * weight).sum() / weight.sum(), 1 + (right * full).sum() / full.sum().clamp(min=1)

    compiled = torch.compile(losses, dynamic=False) if args.device == "cuda" else losses
    for step in range(args.steps):
        rows, length = (max(1, args.rows // 2), 4096) if step % 4 == 3 else (args.rows, 1024)
        ids, parts = data.batch(rows, length, args.device)
        with torch.no_grad():
            logits, taps = target(ids, tuple(args.taps))
            choice = logits.argmax(-1)
        anchors = pick_anchors(parts, args.anchors)
        loss, accepted = compiled(taps, ids, choice, anchors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 < 4 or step == args.steps - 1:
            agree = (choice[:, :-1] == ids[:, 1:])[parts[:, 1:] > 0].float().mean()
            print(
                f"step {step} length {length} loss {loss.item():.4f} accepted {accepted.item():.2f} "
                f"text is the target's {agree:.4f} {time.time() - began:.0f} s",
                flush=True,
            )

    args.out.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: p.detach().bfloat16().cpu().contiguous() for n, p in drafter.named_parameters()},
        args.out / "model.safetensors",
        {"format": "pt"},
    )
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
