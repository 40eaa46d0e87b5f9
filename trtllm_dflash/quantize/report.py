"""The cost of quantizing: sizes, the error of each matrix's product, perplexity, and acceptance of all combinations."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from trtllm_dflash.llm import LLM
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import PREFIX
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.quantize.drafter import draft_blocks, ops_over, target_features
from trtllm_dflash.quantize.text import Sample
from trtllm_dflash.runtime.request import SamplingParams

Tensor = torch.Tensor

_LISTED = 4  # layers whose experts a line names


@dataclass(frozen=True)
class Closeness:
    """The error of a quantized product [N, O] against the unquantized one. Cosine alone does not see a wrong scale."""

    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Acceptance:
    """Acceptance in drafted, greedy replies to the held-back prompts."""

    target: str  # precision
    drafter: str
    length: float  # tokens a decoding step
    is_plain_text: bool  # every reply is what the same target says without drafts


@dataclass
class QuantizeReport:
    """The quantized checkpoints' sizes, and their errors, perplexity and acceptance on held-back samples."""

    format: str
    kv: str | None
    calibration_samples: int
    held_back_samples: int
    computed_in: str  # what this machine computes with
    experts_without_tokens: dict[str, list[int]] = field(default_factory=dict)  # in calibration, by their router
    bytes_before: dict[str, int] = field(default_factory=dict)  # by target and drafter
    bytes_after: dict[str, int] = field(default_factory=dict)
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    errors: dict[str, Closeness] = field(default_factory=dict)  # by the engine's linear, and "logits"
    acceptance: list[Acceptance] = field(default_factory=list)


@dataclass
class Observed:
    """Products and perplexity of a pass over the held-back samples."""

    products: dict[str, list[Tensor]]  # of each linear, by sample, and "logits"
    perplexity: float


class ProductOps(TorchOps):
    """TorchOps that keeps the output of each linear and of each layer's experts."""

    products: dict[str, list[Tensor]]

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = super().linear(name, x)
        # The head's logits over a whole vocabulary are looked at once, of the target.
        if name != "lm_head":
            self.products.setdefault(name, []).append(y.flatten(0, 1).cpu())
        return y

    def moe(self, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
        y = super().moe(layer, x, logits)
        self.products.setdefault(layer.prefix + "experts", []).append(y.flatten(0, 1).cpu())
        return y


@torch.inference_mode()
def observe(llm: LLM, samples: list[Sample]) -> Observed:
    """Runs samples through the target and, where there is one, the drafter; they fit the engine's length."""
    ops = ops_over(llm, ProductOps)
    ops.products = {}
    target = build_target(llm.config.target)
    loss, count = 0.0, 0
    for sample in samples:
        if llm.config.drafter is not None:
            for _ in draft_blocks(ops, llm, sample):
                pass
            # The target's outputs are compared below; here they only fed the drafter.
            for name in [name for name in ops.products if not name.startswith(PREFIX)]:
                del ops.products[name]
    kept, ops.products = ops.products, {}
    for sample in samples:
        ids = torch.tensor([sample.token_ids], dtype=torch.int32, device=llm.session.device)
        logits = target.logits(ops, target_features(ops, llm, ids, ()).hidden)[0].float()
        ops.products.setdefault("logits", []).append(logits.cpu())
        loss += F.cross_entropy(logits[:-1], ids[0, 1:].long(), reduction="sum").item()
        count += ids.shape[1] - 1
    return Observed({**ops.products, **kept}, math.exp(loss / count))


def closeness(before: list[Tensor], after: list[Tensor]) -> Closeness:
    """Compares products over all rows of all samples."""
    a, b = (torch.cat([x.flatten() for x in tensors]).double() for tensors in (before, after))
    return Closeness(float(a @ b / (a.norm() * b.norm())), float(b.norm() / a.norm()))


def measure(
    report: QuantizeReport,
    before: dict[str, Path],
    after: dict[str, Path],
    samples: list[Sample],
    max_tokens: int,
    device: str,
    progress: Callable[[str, int, int], None],
) -> None:
    """Fills in a report.

    Args:
        before, after: the folders of "target" and "drafter"; what was not quantized is the same in both.
    """
    for role in before:
        report.bytes_before[role], report.bytes_after[role] = _bytes(before[role]), _bytes(after[role])
    length = max(len(sample.token_ids) for sample in samples) + max_tokens
    plain: Observed | None = None
    arms = list(_arms(report.format, before, after))
    for done, (names, folders) in enumerate(arms):
        progress("measuring", done, len(arms))
        with LLM.from_pretrained(
            folders["target"],
            folders.get("drafter"),
            device=device,
            max_batch=min(8, len(samples)),
            max_seq_len=length,
            kv="engine",  # what is compared are weights
            kernels="torch",  # by torch's operations, one by one
        ) as llm:
            found = observe(llm, samples)
            if plain is None:
                plain = found
                report.computed_in = f"{llm.config.precision} on {llm.session.device.type}"
                report.perplexity_before = found.perplexity
            elif folders["target"] != before["target"] and report.perplexity_after is None:
                report.perplexity_after = found.perplexity
            changed = [name for name in found.products if _only_changed(name, folders, before)]
            for name in changed:
                report.errors[name] = closeness(plain.products[name], found.products[name])
            if "drafter" in folders:
                report.acceptance.append(_acceptance(llm, samples, max_tokens, names))
    progress("measuring", len(arms), len(arms))


def as_markdown(report: QuantizeReport) -> str:
    """Writes the report as Markdown: sizes and perplexity, acceptance, and the matrices that lost most."""
    samples = f"{report.calibration_samples} samples to calibrate, {report.held_back_samples} others to measure"
    lines = [f"{report.format}, {samples}, computed in {report.computed_in}"]
    if report.experts_without_tokens:
        lines.append(_without_tokens(report.experts_without_tokens))
    lines += ["", "| | before | after |", "|---|---|---|"]
    for role, size in report.bytes_before.items():
        lines.append(f"| {role}, MB | {size / 1e6:.2f} | {report.bytes_after[role] / 1e6:.2f} |")
    if report.perplexity_before is not None and report.perplexity_after is not None:
        lines.append(f"| perplexity | {report.perplexity_before:.4f} | {report.perplexity_after:.4f} |")
    if report.acceptance:
        lines += ["", "| target | drafter | acceptance length | text is the target's |", "|---|---|---|---|"]
        for row in report.acceptance:
            text = "yes" if row.is_plain_text else "no"
            lines.append(f"| {row.target} | {row.drafter} | {row.length:.2f} | {text} |")
    if report.errors:
        lines += ["", "| product | cosine | norm ratio |", "|---|---|---|"]
        worst = sorted((name for name in report.errors if name != "logits"), key=lambda n: report.errors[n].cosine)[:5]
        for name in (["logits"] if "logits" in report.errors else []) + worst:
            error = report.errors[name]
            lines.append(f"| {name} | {error.cosine:.5f} | {error.norm_ratio:.4f} |")
    return "\n".join(lines)


def _without_tokens(experts: dict[str, list[int]]) -> str:
    """Writes one line on the experts that no calibration token chose."""
    named = [f"{router} {', '.join(map(str, ids))}" for router, ids in experts.items()]
    more = f"; and of {len(named) - _LISTED} more layers, in report.json" if len(named) > _LISTED else ""
    return (
        f"{sum(map(len, experts.values()))} experts saw no token ({'; '.join(named[:_LISTED])}{more}): their weights "
        "are scaled by themselves, as all are, and what goes into them as into the layer's others; more --samples "
        "reach more"
    )


def _arms(
    format: str, before: dict[str, Path], after: dict[str, Path]
) -> Iterator[tuple[dict[str, str], dict[str, Path]]]:
    """Yields every combination of precisions: names, and folders."""
    seen = []
    for drafter in (before, after):
        for target in (before, after):
            folders = {"target": target["target"]}
            if "drafter" in before:
                folders["drafter"] = drafter["drafter"]
            if folders not in seen:
                seen.append(folders)
                yield {role: format if folders[role] != before[role] else "as it was" for role in folders}, folders


def _only_changed(name: str, folders: dict[str, Path], before: dict[str, Path]) -> bool:
    """Whether a product belongs to the only model that is quantized in this combination."""
    changed = [role for role in folders if folders[role] != before[role]]
    return changed == ["drafter" if name.startswith(PREFIX) else "target"]


def _acceptance(llm: LLM, samples: list[Sample], max_tokens: int, names: dict[str, str]) -> Acceptance:
    prompts = [sample.token_ids[: sample.prompt] for sample in samples]
    params = SamplingParams(max_tokens=max_tokens)
    drafted = llm.generate(list(prompts), params)
    plain = llm.generate(list(prompts), params, draft=False)
    tokens = sum(reply.step_tokens for reply in drafted)
    same = [reply.token_ids for reply in drafted] == [reply.token_ids for reply in plain]
    return Acceptance(names["target"], names["drafter"], tokens / max(1, sum(reply.steps for reply in drafted)), same)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def as_json(report: QuantizeReport) -> dict[str, Any]:
    """Turns the report into the content of report.json."""
    errors = {name: vars(error) for name, error in report.errors.items()}
    return {**vars(report), "errors": errors, "acceptance": [vars(row) for row in report.acceptance]}
