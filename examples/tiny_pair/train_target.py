"""Trains a target, a Qwen3 of 8.4 million parameters or a Qwen3.5 of 4.2, and writes it as Hugging Face does."""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import qwen3
import qwen3_5
import torch
import torch.nn.functional as F
from conversations import Conversations
from corpus import ExchangesInParts
from safetensors.torch import load_file, save_file

SHAPES = {"qwen3": qwen3, "qwen3_5": qwen3_5}
GENERATION = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
PROMPT_WEIGHT = (
    0.1  # of the loss on a prompt's tokens: users are not to be imitated, but reading them is worth a little
)
SAVE_EVERY = 45  # seconds
Losses: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # weighted, and the replies' alone
#: What the published checkpoints keep in FP32.
FP32 = ("A_log", "linear_attn.norm.weight")


def rate(done: float, peak: float, warm_up: float) -> float:
    """Linear warm-up, then a cosine to nothing, where `done` of the training is behind and `warm_up` a share of it."""
    return peak * min(1.0, done / warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def save(model: torch.nn.Module, config: dict[str, Any], folder: Path) -> None:
    tensors = {
        f"model.{n}": (p.detach().float() if n.endswith(FP32) else p.detach().bfloat16()).cpu().contiguous()
        for n, p in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


class Step:
    """One step: losses of a batch, gradients, AdamW. On a GPU compiled and captured, for batches of known shapes."""

    def __init__(self, model: Any, device: str, peak: float) -> None:
        self.model, self.device, is_gpu = model, device, device == "cuda"
        rate: Any = torch.tensor(peak, device=device) if is_gpu else peak  # a graph reads it from there
        self.optimizer = torch.optim.AdamW(groups(model), lr=rate, betas=(0.9, 0.95), fused=is_gpu, capturable=is_gpu)
        self.of_logits = self.weighted
        self.graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Losses, Losses]] = {}
        if is_gpu:  # by layers: those of one kind are compiled once
            for layer in model.layers:
                layer.compile(dynamic=False)
            self.of_logits = torch.compile(self.weighted, dynamic=False)

    @staticmethod
    def weighted(x: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, parts: torch.Tensor) -> Losses:
        """Computes the loss and the replies' part of it from the rows before the head: x [B, S, H], head [V, H]."""
        logits = F.linear(x[:, :-1], head)
        each = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        reply = (parts[:, 1:] > 0).flatten().float()
        weight = reply + PROMPT_WEIGHT * (1 - reply)
        return (each * weight).sum() / weight.sum(), (each * reply).sum() / reply.sum()

    def whole(self, ids: torch.Tensor, parts: torch.Tensor) -> Losses:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16):
            loss, of_replies = self.of_logits(self.model.rows(ids), self.model.embed_tokens.weight, ids, parts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach(), of_replies.detach()

    def take(self, ids: torch.Tensor, parts: torch.Tensor, rate: float) -> Losses:
        for group in self.optimizer.param_groups:
            if self.device == "cuda":
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if ids.shape not in self.graphs:
            return self.whole(ids, parts)
        graph, inputs, losses = self.graphs[ids.shape]
        inputs[0].copy_(ids)
        inputs[1].copy_(parts)
        graph.replay()
        return losses

    def capture(self, rows: int, length: int) -> None:
        """Compiles and captures the step of a batch's shape, on tokens that mean nothing; changes no weight."""
        inputs = (
            torch.randint(4, 2048, (rows, length), device=self.device),
            torch.ones(rows, length, dtype=torch.long, device=self.device),
        )
        for group in self.optimizer.param_groups:
            group["lr"].zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.whole(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph, stream=stream):
                losses = self.whole(*inputs)
        except RuntimeError as error:  # slower, but the same steps
            print(f"not captured: {error}", flush=True)
        else:
            self.graphs[inputs[0].shape] = graph, inputs, losses
        for state in self.optimizer.state.values():  # what those steps have left
            for moment in state.values():
                moment.zero_()


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the target checkpoint; holds tokenizer.json already"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3")
    parser.add_argument("--steps", type=int, default=5600)
    parser.add_argument("--seconds", type=float, help="end so long after the start, however many steps that makes")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    # Short conversations for the common case, long ones for the far positions.
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096], help="of rows, in turns")
    parser.add_argument("--seed", type=int, default=1, help="of the exchanges")
    parser.add_argument("--exchanges", type=int, default=600_000, help="distinct training exchanges")
    parser.add_argument("--parts", type=int, default=1, help="processes that make them, each from a seed of its own")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--begin", type=Path, help="train this checkpoint further, instead of a new one")
    parser.add_argument("--kind", help="train on this kind of text alone")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    making = ExchangesInParts(args.seed, args.exchanges, args.kind, args.parts)  # before CUDA begins: they are forks
    shape = SHAPES[args.shape]
    model = shape.Target(shape.CONFIG).to(args.device)
    qwen3.initialise(model, shape.CONFIG["num_hidden_layers"])
    if args.begin is not None:
        there = load_file(args.begin / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): values for name, values in there.items()})
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    taking, batches = Step(model, args.device, args.rate), [(max(1, args.tokens // n), n) for n in args.lengths]
    if args.device == "cuda":
        for rows, length in batches:
            taking.capture(rows, length)
        torch.cuda.synchronize()
        print(f"compiled, {len(taking.graphs)} captured, {time.time() - began:.0f} s", flush=True)
    data = Conversations(args.out / "tokenizer.json", args.seed, making.joined())
    print(f"{len(data.turns)} exchanges, {data.tokens / 1e6:.1f} M tokens, {time.time() - began:.0f} s", flush=True)

    first = saved = time.time()
    left = math.inf if args.seconds is None else args.seconds - (first - began)
    warm_up = 200 / args.steps if args.seconds is None else 0.04
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(data.batch, *batches[0], args.device)
        for step in range(args.steps):
            now = time.time()
            done = max((step + 1) / args.steps, (now - first) / left)
            (ids, parts), length = batch.result(), batches[step % len(batches)][1]
            batch = pool.submit(data.batch, *batches[(step + 1) % len(batches)], args.device)
            loss, reply_loss = taking.take(ids, parts, rate(done, args.rate, warm_up))
            is_last = done >= 1
            if step % 250 < 2 or is_last:
                print(
                    f"step {step} length {length} loss {loss.item():.4f} reply {reply_loss.item():.4f} "
                    f"{time.time() - began:.0f} s",
                    flush=True,
                )
            if is_last or now - saved > SAVE_EVERY:
                save(model, shape.CONFIG, args.out)
                saved = now
            if is_last:
                break


if __name__ == "__main__":
    main()
