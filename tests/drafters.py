"""Small random DFlash 2 and DSpark checkpoints in the published layouts, and what the published equations draft.

The equations are z-lab/dflash's (`DFlash2DraftModel`) and deepseek-ai/DeepSpec's (`Qwen3DSparkModel`), in float64: one
sequence, one block, no cache, nothing fused.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.checkpoints import edit_config, edit_tensors, make_drafter
from tests.conftest import TINY
from tests.test_drafter import PlainDrafter, target_states

Tensor = torch.Tensor

#: Ranks of selectors, channels of a convolution's group, and candidates, as small as the models.
RANK, GROUP, TOP = 8, 16, 8


def window_layers(path: Path, windows: list[int | None], **settings: object) -> Path:
    """Gives a drafter's layers windows, as z-lab's configurations do; with more settings at the top level."""
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    size = next((window for window in windows if window is not None), None)
    return edit_config(
        path, lambda raw: raw.update(layer_types=types, sliding_window=size, use_sliding_window=True, **settings)
    )


def _normal(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * scale


def add_convolutions(path: Path, scale: float, seed: int = 5) -> Path:
    """Adds both convolutions of each layer: the identity, and random numbers of this size."""
    generator = torch.Generator().manual_seed(seed)

    def add(tensors: dict[str, Tensor]) -> None:
        hidden = tensors["norm.weight"].shape[0]
        for i in range(sum(name.endswith("input_layernorm.weight") for name in tensors)):
            for place in ("attention_conv", "mlp_conv"):
                base = _normal((2, 2, hidden), scale, generator)
                base[:, 0] += 1
                tensors[f"layers.{i}.{place}.base_kernel"] = base
                shape = 2 * 2 * hidden // GROUP, hidden
                kernels = _normal(shape, scale / math.sqrt(hidden), generator)
                tensors[f"layers.{i}.{place}.kernel_projection.weight"] = kernels

    return edit_tensors(path, add)


def add_selector(path: Path, vocab: int, scale: float, seed: int = 6) -> Path:
    """Adds DFlash 2's candidate selector, whose scores are about this size."""
    generator = torch.Generator().manual_seed(seed)

    def add(tensors: dict[str, Tensor]) -> None:
        hidden = tensors["norm.weight"].shape[0]
        prefix = "candidate_selector."
        tensors[prefix + "hidden_projection.weight"] = _normal((RANK, hidden), 1 / math.sqrt(hidden), generator)
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[prefix + name] = _normal((vocab, RANK), math.sqrt(scale / math.sqrt(RANK)), generator)

    return edit_tensors(path, add)


def make_dflash2(path: Path, target: Path, *, windows: list[int | None] | None = None, **options: Any) -> Path:
    """A DFlash 2 drafter in z-lab's layout, or in speculators' (`format`): all layers with a window, not causal."""
    make_drafter(path, target, **options)
    raw = json.loads((path / "config.json").read_text())
    layers = raw.get("transformer_layer_config", raw)
    add_convolutions(path, 0.3)
    add_selector(path, layers["vocab_size"], 3.0)
    found = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP}
    if layers is not raw:
        windowed = ["sliding_attention"] * layers["num_hidden_layers"]
        nested = {**layers, "layer_types": windowed, "sliding_window": 24, "use_sliding_window": True}
        changes = {"speculators_model_type": "dflash2", "sliding_window_non_causal": True, "sample_from_anchor": False}
        changes |= {"architectures": ["DFlash2DraftModel"], "transformer_layer_config": nested, **found}
        return edit_config(path, lambda raw: raw.update(changes))
    window_layers(path, windows or [24] * layers["num_hidden_layers"], is_causal=False)

    def change(raw: dict[str, Any]) -> None:
        raw["architectures"] = ["DFlash2DraftModel"]
        raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta"), "rope_type": "default"}
        raw.pop("rope_scaling")
        raw["dflash_config"] |= {**found, "block_size": raw.pop("block_size")}
        raw["dflash_config"] |= {"output_multiplier": 0.5, "final_logit_softcapping": 4.0}

    return edit_config(path, change)


def make_dspark(path: Path, target: Path, *, head: str | None = "vanilla", scale: float = 3.0, **options: Any) -> Path:
    """A DSpark drafter in DeepSpec's layout, or in speculators' (`format`), with copies of the target's tensors.

    Without a `head` it is what DeepSpec calls DFlash: each row's likeliest token, from row 0 on.
    """
    generator = torch.Generator().manual_seed(8)
    make_drafter(path, target, **options)
    raw = json.loads((path / "config.json").read_text())
    layers = raw.get("transformer_layer_config", raw)
    vocab, hidden = layers["vocab_size"], layers["hidden_size"]

    def add(tensors: dict[str, Tensor]) -> None:
        size = math.sqrt(scale / math.sqrt(RANK))
        drafted = options.get("draft_vocab") or vocab
        if head is not None:
            tensors["markov_head.markov_w1.weight"] = _normal((vocab, RANK), size, generator)
            tensors["markov_head.markov_w2.weight"] = _normal((drafted, RANK), size, generator)
        if head == "gated":
            shape = RANK, hidden + RANK
            tensors["markov_head.gate_proj.weight"] = _normal(shape, 2 / math.sqrt(hidden), generator)
            tensors["markov_head.gate_proj.bias"] = _normal((RANK,), 1.0, generator)
        if head is not None:
            tensors["confidence_head.proj.weight"] = _normal((1, hidden + RANK), 0.1, generator)
            tensors["confidence_head.proj.bias"] = torch.zeros(1)
        if layers is raw:
            tensors["embed_tokens.weight"] = torch.zeros(vocab, hidden)
            tensors["lm_head.weight"] = torch.zeros(vocab, hidden)

    edit_tensors(path, add)
    settings: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": False}
    if head is not None:
        settings = {"markov_rank": RANK, "markov_head_type": head, "enable_confidence_head": True}
        settings["confidence_head_with_markov"] = True
    if layers is not raw:
        settings |= {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
        return edit_config(path, lambda raw: raw.update(settings, sample_from_anchor=True))

    def change(raw: dict[str, Any]) -> None:
        raw |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, **settings, **raw.pop("dflash_config")}

    return edit_config(path, change)


def make_shipped_second(path: Path) -> Path:
    """The shipped pair's drafter, made a DFlash 2 one that drafts a little otherwise."""
    shutil.copytree(TINY / "drafter", path)
    raw = json.loads((path / "config.json").read_text())
    add_convolutions(path, 0.005)
    add_selector(path, raw["vocab_size"], 0.3)
    found = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP}
    edit_config(path, lambda raw: raw.update(architectures=["DFlash2DraftModel"], **found))
    return window_layers(path, [64] * raw["num_hidden_layers"], is_causal=False)


def make_kind(name: str, path: Path, target: Path, head_size: int = 16) -> Path:
    """A drafter of one of `KINDS`, with more words for its format and choices.

    `head_size`: of its layers' attention.
    """
    options: dict[str, Any] = {"format": "speculators" if "speculators" in name else "z-lab", "head_size": head_size}
    if name.startswith("dflash2"):
        return make_dflash2(path, target, **options)
    if name == "anchor":
        return make_dspark(path, target, head=None, **options)
    if name.startswith("dspark"):
        vocabulary = {"draft_vocab": 48} if "reduced" in name else {}
        return make_dspark(path, target, head="gated" if "gated" in name else "vanilla", **options, **vocabulary)
    make_drafter(path, target, layers=3, head_size=head_size)
    return window_layers(path, [12, None, 12], **({"is_causal": False} if "free" in name else {}))


KINDS = ["windows", "windows, free", "anchor", "dflash2", "dflash2, speculators", "dspark", "dspark, gated"]


class PlainSecond(PlainDrafter):
    """The published equations of windows, DFlash 2 and DSpark."""

    whole = False  # DSpark's choice among the whole vocabulary, as it was published, instead of 16 of it

    def __init__(self, folder: Path) -> None:
        self.w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        raw = json.loads((folder / "config.json").read_text())
        self.raw = {**raw, **raw.get("dflash_config", {})}
        layers = raw.get("transformer_layer_config", raw)
        self.c = {**layers, **layers.get("rope_parameters", {})}
        taps = self.raw.get("aux_hidden_state_layer_ids")
        self.taps = self.raw["target_layer_ids"] if taps is None else [tap - 1 for tap in taps]
        self.mask = self.raw["mask_token_id"]
        deepspec = "Qwen3DSparkModel" in raw["architectures"]
        self.from_anchor = self.raw.get("sample_from_anchor", deepspec)
        self.is_causal = self.raw.get("is_causal", False if deepspec else None)
        if self.raw.get("sliding_window_non_causal"):
            self.is_causal = False
        self.map = None
        if "d2t" in self.w:
            offsets = self.w["d2t"].long()
            self.map = torch.arange(len(offsets)) + offsets

    def convolve(self, name: str, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """x [N, H], one row and channel at a time, as it is written."""
        base = self.w[name + ".base_kernel"][side]
        own = kernels.view(len(x), 2, 2, -1)[:, side]
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for offset in range(min(2, t + 1)):
                out[t] += (base[offset] + own[t, offset].repeat_interleave(GROUP)) * x[t - offset]
        return out

    def around(self, name: str, x: Tensor, sublayer: Any) -> Tensor:
        if name + ".base_kernel" not in self.w:
            return sublayer(x)
        kernels = self.linear(name + ".kernel_projection", x)
        return self.convolve(name, sublayer(self.convolve(name, x, kernels, 0)), kernels, 1)

    def seen(self, i: int, length: int, size: int) -> Tensor:
        """Which of all keys each block row of layer i sees: z-lab's `_attention_mask`."""
        query, key = torch.arange(length, length + size)[:, None], torch.arange(length + size)[None]
        slides = self.c["layer_types"][i] == "sliding_attention"
        visible = torch.ones(size, length + size, dtype=torch.bool)
        if slides if self.is_causal is None else self.is_causal:
            visible &= key <= query
        if slides:
            visible &= query - key < self.c["sliding_window"]
            visible &= key - query < self.c["sliding_window"]
        return visible

    def block_hidden(self, embedding: Tensor, hidden: list[Tensor], bonus: int, size: int) -> Tensor:
        c, length = self.c, hidden[0].shape[0]
        context = self.norm("hidden_norm", self.linear("fc", torch.cat([hidden[t] for t in self.taps], dim=-1)))
        x = embedding[torch.tensor([bonus] + [self.mask] * (size - 1))].double()
        here, before = torch.arange(length, length + size), torch.arange(length)
        for i in range(c["num_hidden_layers"]):
            layer = f"layers.{i}."

            def attend(h: Tensor, i: int = i, layer: str = layer) -> Tensor:
                def heads(name: str, rows: Tensor) -> Tensor:
                    projected = self.linear(f"{layer}self_attn.{name}_proj", rows)
                    return projected.unflatten(-1, (-1, c["head_dim"])).transpose(0, 1)

                q = self.rotate(self.norm(layer + "self_attn.q_norm", heads("q", h)), here)
                k = self.norm(layer + "self_attn.k_norm", torch.cat([heads("k", context), heads("k", h)], dim=1))
                k = self.rotate(k, torch.cat([before, here]))
                v = torch.cat([heads("v", context), heads("v", h)], dim=1)
                group = q.shape[0] // k.shape[0]
                scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(c["head_dim"])
                scores = scores.masked_fill(~self.seen(i, length, size), -torch.inf)
                mixed = scores.softmax(-1) @ v.repeat_interleave(group, 0)
                return self.linear(layer + "self_attn.o_proj", mixed.transpose(0, 1).flatten(1))

            def feed(h: Tensor, layer: str = layer) -> Tensor:
                gate, up = self.linear(layer + "mlp.gate_proj", h), self.linear(layer + "mlp.up_proj", h)
                return self.linear(layer + "mlp.down_proj", torch.nn.functional.silu(gate) * up)

            x = x + self.around(layer + "attention_conv", self.norm(layer + "input_layernorm", x), attend)
            x = x + self.around(layer + "mlp_conv", self.norm(layer + "post_attention_layernorm", x), feed)
        return self.norm("norm", x)

    def choose(self, rows: Tensor, logits: Tensor, bonus: int) -> list[int]:
        """The drafts of rows [N, H] with logits [N, V]."""
        tokens = torch.arange(logits.shape[1]) if self.map is None else self.map
        path, previous = [], bonus
        for row, scores in zip(rows, logits, strict=True):
            if "candidate_selector.hidden_projection.weight" in self.w:
                scores = scores * self.raw.get("output_multiplier", 1.0)
                if cap := self.raw.get("final_logit_softcapping"):
                    scores = cap * torch.tanh(scores / cap)
                best = scores.topk(self.raw["selector_top_k"]).indices
                context = self.w["candidate_selector.predecessor_codebook"][previous] * self.linear(
                    "candidate_selector.hidden_projection", row
                )
                scores = scores + self.w["candidate_selector.successor_codebook"] @ context
                choice = best[scores[best].argmax()]
            elif "markov_head.markov_w1.weight" in self.w:
                numbers = self.w["markov_head.markov_w1.weight"][previous]
                if "markov_head.gate_proj.weight" in self.w:
                    numbers = self.linear("markov_head.gate_proj", torch.cat([row, numbers])).sigmoid() * numbers
                best = torch.arange(len(scores)) if self.whole else scores.topk(16).indices
                scores = scores + self.w["markov_head.markov_w2.weight"] @ numbers
                choice = best[scores[best].argmax()]
            else:
                choice = scores.argmax()
            previous = int(tokens[choice])
            path.append(previous)
        return path

    def drafts(self, target: Path, ids: list[int], count: int, ends: list[int] | None = None) -> list[list[int]]:
        """Drafts so many tokens after `ids`, or after so many of them each; the last of those is the bonus token."""
        weights = load_file(target / "model.safetensors")
        table = weights["model.embed_tokens.weight"]
        head = weights.get("lm_head.weight", table) if self.map is None else self.w["lm_head.weight"]
        states = target_states(target, ids[:-1])  # which see no later token
        found = []
        for end in ends or [len(ids)]:
            bonus = ids[end - 1]
            rows = self.block_hidden(table, [x[: end - 1] for x in states], bonus, count + (not self.from_anchor))
            rows = rows if self.from_anchor else rows[1:]
            found.append(self.choose(rows, rows @ head.double().T, bonus))
        return found
