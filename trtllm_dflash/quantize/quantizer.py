"""`quantize`: checkpoints of a pair in, quantized checkpoints and a report out."""

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from trtllm_dflash.checkpoint.hub import resolve
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.engine.config import Progress
from trtllm_dflash.engine.directory import check_apart, not_replaced, stands, written_aside
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.llm import LLM
from trtllm_dflash.models import build_target
from trtllm_dflash.pairs.prompts import PROMPTS
from trtllm_dflash.quantize.drafter import quantize_drafter
from trtllm_dflash.quantize.modelopt import check_modelopt, load_modelopt
from trtllm_dflash.quantize.report import QuantizeReport, as_json, measure
from trtllm_dflash.quantize.target import quantize_target
from trtllm_dflash.quantize.text import Samples, check_text, read_samples
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.threads import limited_threads
from trtllm_dflash.text.tokenizer import TextCodec

REPORT_FILE = "report.json"

#: Tokens of a sample, at least: fewer say nothing of what a matrix meets.
LEAST_LENGTH = 16


class QuantizeSettings(BaseModel):
    """Settings of `quantize`; each field is a flag."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str  # a folder, or a Hugging Face name
    drafter: str | None = None  # likewise
    format: Literal["fp8", "nvfp4"]
    kv: Literal["fp8"] | None = None  # scales of the target's caches, too
    only: Literal["target", "drafter"] | None = None
    text: Path = PROMPTS
    samples: PositiveInt = 128
    held_back: Annotated[int, Field(ge=1)] = 8
    length: Annotated[int, Field(ge=LEAST_LENGTH)] = 512  # tokens of a sample, at most
    max_tokens: PositiveInt = 128  # of a reply, for acceptance
    device: str = "auto"


def quantize(
    settings: QuantizeSettings, output: Path, force: bool = False, progress: Progress = lambda *_: None
) -> QuantizeReport:
    """Writes `output/target`, `output/drafter` (those that are quantized) and `output/report.json`.

    Raises:
        DFlashError: checkpoints, settings or the output cannot be used; nothing is left half-written.
    """
    check_modelopt()
    pick_device(settings.device)
    _check_output(output, force)  # before checkpoints come from a hub
    check_text(settings.text)
    folders = {"target": resolve(settings.target, with_tokenizer=True)}
    if settings.drafter is not None:
        folders["drafter"] = resolve(settings.drafter)
    pair = open_pair(folders["target"], folders.get("drafter"))
    roles = _roles(settings, pair)
    codec = TextCodec.load(folders["target"], {})
    if codec is None:
        raise SettingsError(f"--target {settings.target}: there is no tokenizer.json to read a text with")
    positions = pair.target_config.max_positions
    length = min(settings.length, positions - settings.max_tokens)
    if length < LEAST_LENGTH:
        raise SettingsError(
            f"--max-tokens {settings.max_tokens}: the target takes {positions} positions, of which a sample needs "
            f"{LEAST_LENGTH} besides"
        )
    samples = read_samples(settings.text, codec, settings.samples, settings.held_back, length)
    check_apart(output, folders)
    load_modelopt()  # what is wrong with the settings has been said by now
    report = QuantizeReport(
        settings.format, settings.kv, len(samples.calibration), len(samples.held_back), computed_in=""
    )
    with limited_threads(folders["target"]), written_aside(output, "quantized checkpoint", replaces=force) as aside:
        made = _quantize(settings, pair, folders, roles, samples, aside, report, progress)
        measure(report, folders, made, samples.held_back, settings.max_tokens, settings.device, progress)
        for file in aside.rglob("*.safetensors"):
            file.chmod(aside.stat().st_mode & 0o666)
        (aside / REPORT_FILE).write_text(json.dumps(as_json(report), indent=2) + "\n", encoding="utf-8")
    return report


def _check_output(output: Path, force: bool) -> None:
    if stands(output) and not _is_quantized(output):
        raise not_replaced(output, "no quantized pair")
    if stands(output) and not force:
        raise EngineError(f"--output {output}: exists; use another, or --force to replace it")


def _is_quantized(output: Path) -> bool:
    """Whether a folder is what `quantize` writes, and nothing else: trainings have a report, too."""
    names = {entry.name for entry in output.iterdir()} if output.is_dir() else set()
    return REPORT_FILE in names and names <= {REPORT_FILE, "target", "drafter"}


def _quantize(
    settings: QuantizeSettings,
    pair: Pair,
    folders: dict[str, Path],
    roles: list[str],
    samples: Samples,
    aside: Path,
    report: QuantizeReport,
    progress: Progress,
) -> dict[str, Path]:
    """Quantizes the models in `roles` into `aside`; returns the folders of target and drafter to use from then on."""
    made = dict(folders)
    device = pick_device(settings.device)
    if "target" in roles:
        made["target"] = aside / "target"
        report.experts_without_tokens = quantize_target(
            folders["target"],
            made["target"],
            settings.format,
            settings.kv,
            samples.calibration,
            device,
            lambda done, total: progress("calibrating the target", done, total),
        )
    if "drafter" in roles:
        assert pair.drafter is not None
        # On the features of the target that it will draft for: the quantized one, where there is one.
        length = max(len(sample.token_ids) for sample in samples.calibration) + pair.drafter.config.block_size
        source = made["target"], folders["drafter"]
        # It looks at torch's operations one by one.
        with LLM.from_pretrained(
            *source, device=settings.device, max_seq_len=length, kv="engine", kernels="torch", prepare=False
        ) as llm:
            quantize_drafter(
                pair.drafter,
                aside / "drafter",
                settings.format,
                samples.calibration,
                llm,
                lambda done, total: progress("calibrating the drafter", done, total),
            )
        made["drafter"] = aside / "drafter"
    torch.cuda.empty_cache()
    return made


def _roles(settings: QuantizeSettings, pair: Pair) -> list[str]:
    """Chooses which of target and drafter are quantized."""
    models = {"target": pair.target_config, **({"drafter": pair.drafter.config} if pair.drafter is not None else {})}
    if settings.only is not None and settings.only not in models:
        raise SettingsError("--only drafter: there is no drafter; give --drafter")
    if settings.kv is not None and settings.only == "drafter":
        raise SettingsError(f"--kv {settings.kv}: is of the target's caches; leave out --only drafter")
    roles = [role for role in models if settings.only in (None, role)]
    for role in roles:
        held = models[role].linear_precision
        if held is not None:
            raise SettingsError(f"--{role} {getattr(settings, role)}: is quantized already, to {held.value}")
    if "target" in roles:
        _check_experts(settings, pair)
    return roles


def _check_experts(settings: QuantizeSettings, pair: Pair) -> None:
    """Refuses gpt-oss, whose experts are stored in a form of its own."""
    moe = pair.target_config.moe
    if moe is None or any(w.stack and w.is_matrix for w in build_target(pair.target_config).weights()):
        return
    held = "are in MXFP4 as published" if moe.mxfp4 else "are quantized in the published checkpoint alone, to MXFP4"
    raise SettingsError(
        f"--target {settings.target}: its experts {held}, and stay as they are; give --only drafter, or round its "
        "attention at a build: build --precision fp8"
    )
