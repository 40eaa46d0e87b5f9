"""Greedy draft-and-verify on the held-out prompts: acceptance of the drafter and quality of the target, by kind.

Independent of the product and of the training code: the target is transformers' own model, the drafter a few
functions over the checkpoint's tensors. Every reply is checked against the target alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import defaultdict
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from stories import asked_for, is_story
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel


class Drafter:
    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self.c = json.loads((folder / "config.json").read_text())
        self.w = {n: t.float().to(target.device) for n, t in load_file(folder / "model.safetensors").items()}
        self.taps, self.mask = self.c["dflash_config"]["target_layer_ids"], self.c["dflash_config"]["mask_token_id"]
        self.embedding = target.get_input_embeddings().weight

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.w[name + ".weight"]

    def heads(self, x: Tensor, name: str, positions: Tensor | None) -> Tensor:
        """x [S, H] through q_proj, k_proj or v_proj -> [heads, S, D]; queries and keys are normed and turned."""
        x = F.linear(x, self.w[name + "_proj.weight"]).unflatten(-1, (-1, self.c["head_dim"])).transpose(0, 1)
        if positions is None:
            return x
        x, half = self.norm(x, name + "_norm"), self.c["head_dim"] // 2
        angle = positions[:, None] * self.c["rope_theta"] ** -(torch.arange(half, device=x.device) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def context(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Rows [S, H] of the tokens that the target has just seen; hidden_states[0] is the embedding, hence the + 1."""
        taps = torch.cat([hidden_states[i + 1][0] for i in self.taps], -1)
        return self.norm(F.linear(taps, self.w["fc.weight"]), "hidden_norm")

    def draft(self, context: Tensor, anchor: int, count: int) -> list[int]:
        """`count` tokens after the anchor token, whose position is the number of context rows."""
        return self.logits(context, anchor, count).argmax(-1).tolist()

    def logits(self, context: Tensor, anchor: int, count: int) -> Tensor:
        """Logits [count, V] of those tokens."""
        s = len(context)
        x = self.embedding[torch.tensor([anchor] + [self.mask] * count, device=context.device)]
        positions = torch.arange(s + 1 + count, device=x.device)
        for i in range(self.c["num_hidden_layers"]):
            name = f"layers.{i}.self_attn."
            y = self.norm(x, f"layers.{i}.input_layernorm")
            rows = torch.cat([context, y])
            q = self.heads(y, name + "q", positions[s:])
            k, v = self.heads(rows, name + "k", positions), self.heads(rows, name + "v", None)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0]
            x = x + F.linear(out.transpose(0, 1).flatten(1), self.w[name + "o_proj.weight"])
            y, mlp = self.norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp."
            gated = F.silu(F.linear(y, self.w[mlp + "gate_proj.weight"])) * F.linear(y, self.w[mlp + "up_proj.weight"])
            x = x + F.linear(gated, self.w[mlp + "down_proj.weight"])
        return F.linear(self.norm(x, "norm")[1:], self.embedding)


def run(
    target: PreTrainedModel, ids: list[int], cache: DynamicCache, hidden: bool
) -> tuple[list[int], tuple[Tensor, ...]]:
    out = target(torch.tensor([ids], device=target.device), past_key_values=cache, output_hidden_states=hidden)
    return out.logits[0].argmax(-1).tolist(), out.hidden_states


def is_greedy(target: PreTrainedModel, prompt: list[int], reply: list[int]) -> bool:
    """Whether each token of the reply is the target's choice in one pass over the text, without drafts or cache."""
    choice = target(torch.tensor([prompt + reply], device=target.device)).logits[0].argmax(-1).tolist()
    return bool(choice[len(prompt) - 1 : -1] == reply)


def drafted(
    target: PreTrainedModel, drafter: Drafter, prompt: list[int], end: int, limit: int, count: int
) -> tuple[list[int], list[int]]:
    """The reply, and how many tokens each verify pass committed (accepted drafts and the target's own next choice)."""
    cache = DynamicCache(config=target.config)
    choice, hidden = run(target, prompt, cache, True)
    context, reply, steps = drafter.context(hidden), [choice[-1]], []
    recurs = "linear_attention" in target.config.layer_types  # whose state cannot be cropped
    while len(reply) < limit and end not in reply:
        drafts = drafter.draft(context, reply[-1], count)
        before, last = deepcopy(cache) if recurs else None, reply[-1]
        choice, hidden = run(target, [last, *drafts], cache, True)
        accepted = 0
        while accepted < count and drafts[accepted] == choice[accepted]:
            accepted += 1
        context = torch.cat([context, drafter.context(hidden)[: accepted + 1]])
        if before is not None:
            cache = before
            run(target, [last, *drafts[:accepted]], cache, False)
        elif accepted < count:
            cache.crop(accepted - count)  # negative: that many rows fewer
        new = choice[: accepted + 1]
        reply += new[: new.index(end) + 1] if end in new else new
        steps.append(accepted + 1)
    return reply[:limit], steps


def code_of(reply: str) -> str | None:
    fenced = re.search(r"```python\n(.*?)\n```", reply, re.DOTALL)
    return fenced and fenced.group(1)


def definitions(code: str) -> str:
    """The syntax tree without docstrings and without the example call, whose arguments no prompt settles."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
        if isinstance(node, ast.ClassDef):
            node.body = [entry for entry in node.body if not isinstance(entry, ast.Expr)]
    return ast.dump(tree)


def checks(kind: str, prompt: str, reply: str, reference: str) -> dict[str, bool]:
    if kind == "story":
        return {"well formed": is_story(reply), "as asked": asked_for(prompt, reply)}
    if kind == "arithmetic":
        sums = [eval(a) == int(b) for a, b in re.findall(r"(\d+ [-+*/] \d+) = (\d+)", reply)]
        return {
            "all sums right": all(sums),
            "answer": reply.rpartition("Answer:")[2].strip() == reference.rpartition("Answer:")[2].strip(),
        }
    if kind == "python":
        try:
            code = definitions(code_of(reply) or "(")
        except SyntaxError:
            return {"parses": False, "same code": False}
        return {"parses": True, "same code": code == definitions(code_of(reference) or "")}
    bare = [re.sub(r"^.*```json\n|\n```$", "", text, flags=re.DOTALL) for text in (reply, reference)]
    try:
        return {"parses": True, "right fields": json.loads(bare[0]) == json.loads(bare[1])}
    except json.JSONDecodeError:
        return {"parses": False, "right fields": False}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafts", type=int, default=15, help="drafts a step (K)")
    parser.add_argument("--limit", type=int, default=320, help="most tokens of a reply")
    parser.add_argument("--each", type=int, default=64, help="prompts of each kind")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--show", action="store_true", help="print the replies that are wrong")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(args.device).eval()
    drafter = Drafter(args.drafter, target)
    steps: dict[str, list[int]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    quality: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    differ = 0
    for row in map(json.loads, args.prompts.read_text(encoding="utf-8").splitlines()):
        kind = row["kind"]
        if len(lengths[kind]) >= args.each:
            continue
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        reply, committed = drafted(target, drafter, prompt, tokenizer.eos_token_id, args.limit, args.drafts)
        differ += not is_greedy(target, prompt, reply)
        steps[kind] += committed
        lengths[kind].append(len(reply))
        said = tokenizer.decode(reply, skip_special_tokens=True)
        found = checks(kind, row["prompt"], said, row["reference"]) | {"exact text": said == row["reference"]}
        for name, passed in found.items():
            quality[kind][name].append(passed)
        if args.show and not all(found.values()):
            print(f"--- {found}\n{row['prompt']}\n--- got\n{said}\n--- expected\n{row['reference']}\n")
    for kind, committed in steps.items():
        rates = ", ".join(f"{name} {sum(p)}/{len(p)}" for name, p in quality[kind].items())
        print(
            f"{kind:10s} acceptance {sum(committed) / len(committed):5.2f}  "
            f"reply {sum(lengths[kind]) / len(lengths[kind]):.0f} tokens  {rates}"
        )
    total = [n for committed in steps.values() for n in committed]
    print(
        f"{'overall':10s} acceptance {sum(total) / len(total):5.2f}  "
        f"replies that are not the greedy text: {differ} of {sum(map(len, lengths.values()))}"
    )


if __name__ == "__main__":
    main()
