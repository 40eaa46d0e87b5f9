"""Trains drafters and measures what comes of it: the shipped target's, one for a target that was fine-tuned, ablations,
and how fast a step of a published shape is.

    python benchmarks/train.py replies --records records.jsonl --work DIR --output replies.json
    python benchmarks/train.py shipped --records records.jsonl --work DIR --output shipped.json
    python benchmarks/train.py ablations --records records.jsonl --work DIR --output ablations.json
    python benchmarks/train.py adapt --target FINE-TUNED --records records.jsonl --work DIR --output adapt.json
    python benchmarks/train.py rate --shape qwen3-8b --output rate.json

The first makes what the next two share. Records come from examples/tiny_pair/drafter_records.py, a fine-tuned target
from train_target.py --begin --kind there.
"""

import argparse
import json
import shutil
import time
from math import prod
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.cost.gpus import GEMM_SHARE
from trtllm_dflash.cost.shapes import asked_precision, shape_config
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import pair_weights
from trtllm_dflash.models.drafter import PREFIX
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.sweep.local_engine import random_llm
from trtllm_dflash.train.documents import Document, Packs, generator
from trtllm_dflash.train.evaluation import simulate
from trtllm_dflash.train.features import FrozenTarget
from trtllm_dflash.train.network import TrainedDrafter
from trtllm_dflash.train.optimizer import Optimizer
from trtllm_dflash.train.phases import train
from trtllm_dflash.train.settings import TrainSettings
from trtllm_dflash.train.state import State
from trtllm_dflash.train.trainer import LOG, Trainer, computing, read_log

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"

#: The recipe of the shipped target's drafter.
SHAPE: dict[str, Any] = {"layers": 2, "taps": (1, 3, 5)}
RECIPE: dict[str, Any] = {"pack": 16384, "anchors": 2048, "rate": 2e-3, "steps": 6000, "evaluate_every": 2000}
RECIPE |= {"objective": "greedy"}  # its text is the target's at 96 to 99% of the tokens
#: D-PACE weighs a story, of which few drafts are accepted, less than a sum; but stories are most of the steps.
RECIPE |= {"weighting": "exponential"}
DATA: dict[str, Any] = {"held_out": 0.001, "max_tokens": 320, "max_seq_len": 4096}

#: What the runs in a folder share: a state directory with replies to train on, and replies to measure on.
REPLIES, HELD_OUT = "replies", "held_out.json"

#: Of each ablation: what differs from the recipe.
ABLATIONS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "1 layer": {"layers": 1},
    "4 layers": {"layers": 4},
    "taps 1": {"taps": (1,)},
    "taps 1, 5": {"taps": (1, 5)},
    "taps 1, 2, 3, 4, 5, 6": {"taps": (1, 2, 3, 4, 5, 6)},
    "block 8": {"block": 8},
    "block 10": {"block": 10},
    "ce": {"objective": "ce"},
    "kd": {"objective": "kd"},
    "muon": {"optimizer": "muon"},
    "D-PACE": {"weighting": "dpace"},
}


def settings_of(arguments: argparse.Namespace, **changes: Any) -> TrainSettings:
    target = getattr(arguments, "target", None) or PAIR / "target"
    common = {"target": str(target), "data": arguments.records, "device": arguments.device}
    common |= {"attention": arguments.attention}
    names = "pack", "anchors", "steps", "evaluate_every"
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    return TrainSettings.model_validate({**common, **SHAPE, **RECIPE, **DATA, **changes, **given})


def replies(arguments: argparse.Namespace) -> dict[str, Any]:
    """Replies to train on, and the target's greedy ones to the shipped held-out prompts: what all runs share."""
    train(settings_of(arguments), arguments.work / REPLIES, "regenerate", say=print)
    settings = settings_of(arguments)
    tau, documents = decoded(Path(settings.target), PAIR / "drafter", settings.device, arguments.each)
    rows = [{"token_ids": list(d.token_ids), "prompt": d.prompt, "domain": d.domain} for d in documents]
    (arguments.work / HELD_OUT).write_text(json.dumps(rows))
    return {"shipped": tau, "held_out_replies": len(rows)}


def decoded(target: Path, drafter: Path, device: str, each: int) -> tuple[dict[str, float], list[Document]]:
    """Greedy replies to the shipped held-out prompts: tokens a decoding step, by kind and over all, and the texts."""
    asked = [(kind, text) for kind, texts in read_prompts(each).items() for text in texts]
    with LLM.from_pretrained(target, drafter, device=device, max_batch=32, max_seq_len=1024) as llm:
        prompts = [llm.encode([{"role": "user", "content": text}]) for _, text in asked]
        made = llm.generate(list(prompts), SamplingParams(max_tokens=320))
    counts: dict[str, list[tuple[int, int]]] = {}
    for (kind, _), reply in zip(asked, made, strict=True):
        for name in (kind, "all"):
            counts.setdefault(name, []).append((len(reply.token_ids) - 1, reply.steps))
    tau = {kind: sum(t for t, _ in pairs) / sum(s for _, s in pairs) for kind, pairs in counts.items()}
    texts = [
        Document([*prompt, *reply.token_ids], len(prompt), kind)
        for (kind, _), prompt, reply in zip(asked, prompts, made, strict=True)
    ]
    return tau, texts


def simulated(arguments: argparse.Namespace, settings: TrainSettings, folder: Path) -> dict[str, float]:
    """Simulated tokens a decoding step on the shipped held-out prompts, by kind and over all."""
    rows = json.loads((arguments.work / HELD_OUT).read_text())
    checkpoint = open_drafter(folder)
    with LLM.from_pretrained(
        settings.target, None, device=settings.device, max_seq_len=1024, kernels="torch", prepare=False
    ) as llm:
        target = FrozenTarget(llm, checkpoint.config.tap_layers)
        drafter = TrainedDrafter(checkpoint.config, target.embedding, 1024)
        drafter.load({key: checkpoint.folder.read(checkpoint.keys[key]) for key in drafter.shapes()})
        with computing(target.device):
            found = simulate(drafter, target, [Document(**row) for row in rows])
    return {"all": found.overall.length, **{kind: tally.length for kind, tally in found.domains.items()}}


def run(arguments: argparse.Namespace, name: str, settings: TrainSettings, until: str = "report") -> dict[str, Any]:
    """Trains in a folder of its own, on the shipped target's replies where they are there and it is the target."""
    output = arguments.work / name.replace(" ", "-").replace(",", "")
    made = arguments.work / REPLIES
    if made.exists() and not output.exists() and settings.target == str(PAIR / "target"):
        for folder in ("prompts", "replies"):
            shutil.copytree(made / folder, output / folder)
        shutil.copy(made / "manifest.json", output)
    report = train(settings, output, until, say=print)
    facts = json.loads((output / "manifest.json").read_text())["phases"]["train"]["facts"]
    log = read_log(output / LOG)
    taus = [{"step": row["step"], "tau": row["acceptance"]["tau"]} for row in log if "acceptance" in row]
    return {"name": name, "training": facts, "evaluations": taus, "report": report}


def shipped(arguments: argparse.Namespace) -> dict[str, Any]:
    """The shipped target's drafter from nothing."""
    settings = settings_of(arguments)
    made = run(arguments, "shipped", settings)
    tau, _ = decoded(Path(settings.target), arguments.work / "shipped" / "drafter", settings.device, arguments.each)
    print(f"{tau['all']:.2f} tokens a step on the held-out prompts", flush=True)
    return {**made, "tau": tau}


def ablations(arguments: argparse.Namespace) -> dict[str, Any]:
    """One setting changed at a time, all with the same steps."""
    chosen = arguments.only or list(ABLATIONS)
    runs = []
    for name in chosen:
        settings = settings_of(arguments, **ABLATIONS[name])
        made = run(arguments, name, settings, "export")
        folder = arguments.work / name.replace(" ", "-").replace(",", "") / "drafter"
        tau = simulated(arguments, settings, folder)
        print(f"{name}: {tau['all']:.2f} tokens a step on the held-out prompts", flush=True)
        runs.append({**made, "changes": ABLATIONS[name], "simulated": tau})
    return {"steps": arguments.steps or RECIPE["steps"], "runs": runs}


def adapt(arguments: argparse.Namespace) -> dict[str, Any]:
    """The shipped drafter on another target, before and after 500 steps from it."""
    own = {"layers": None, "taps": None, "from": str(PAIR / "drafter"), "rate": 1e-4, "steps": arguments.steps or 500}
    name = f"adapted-{arguments.target.name}"
    made = run(arguments, name, settings_of(arguments, **own), "export")
    place = arguments.device, arguments.each
    taus = {
        "shipped": decoded(PAIR / "target", PAIR / "drafter", *place)[0],
        "before": decoded(arguments.target, PAIR / "drafter", *place)[0],
        "after": decoded(arguments.target, arguments.work / name / "drafter", *place)[0],
    }
    for kind, tau in taus.items():
        print(f"{name}, {kind}: " + ", ".join(f"{key} {value:.2f}" for key, value in tau.items()), flush=True)
    return {**taus, **made}


def rate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Packed tokens a second, and peak memory, of whole steps with random weights."""
    device = pick_device(arguments.device)
    limits = {"tp": 1, "max_batch": 1, "max_seq_len": arguments.length, "chunk": min(512, arguments.length)}
    config = shape_config(arguments.shape, **asked_precision(None, device), **limits)
    assert config.drafter is not None
    packing: dict[str, Any] = {"pack": arguments.pack, "anchors": arguments.anchors, "max_seq_len": arguments.length}
    packing["attention"] = arguments.attention
    settings = TrainSettings.model_validate({"target": arguments.shape, "data": Path("none"), **packing})
    ids = torch.randint(0, config.target.vocab_size, (8 * arguments.pack,), generator=generator(0)).tolist()
    size = arguments.length
    documents = [Document(ids[first : first + size], size // 4) for first in range(0, len(ids) - size + 1, size)]
    alone = config.model_copy(update={"drafter": None, "block_size": 1})
    steps = []
    with (
        random_llm(alone, device, None, kernels="torch") as llm,
        State.opened(arguments.work / "rate", "random") as state,
    ):
        target = FrozenTarget(llm, config.drafter.tap_layers)
        drafter = TrainedDrafter(config.drafter, target.embedding, arguments.length)
        trainer = Trainer(drafter, target, documents, documents[:1], settings, state)
        optimizer, packs = Optimizer(drafter, 1e-4, arguments.steps or 20), Packs(documents, arguments.pack, 0)
        for number in range(arguments.steps or 20):
            began = time.perf_counter()
            pack = packs.pack(0, number % len(packs.epoch(0)))
            trainer.loss(pack, number).value.backward()
            optimizer.step(number)
            if device.type == "cuda":
                torch.cuda.synchronize()
            steps.append((len(pack.token_ids), time.perf_counter() - began))
    settled = steps[len(steps) // 4 :]  # the first ones compile, and allocate
    speed = sum(tokens for tokens, _ in settled) / sum(seconds for _, seconds in settled)
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    each = operations(config, arguments.anchors / arguments.pack)
    estimate = arguments.tflops * 1e12 / each
    print(f"{arguments.shape}: {speed:,.0f} packed tokens/s, peak {memory} GB")
    print(f"estimated: {estimate:,.0f}, by {each / 1e9:.1f} GFLOP a token at {arguments.tflops:g} TFLOP/s")
    found = {"tokens_per_second": speed, "estimated": estimate, "peak_gb": memory, "steps": steps}
    return {"shape": arguments.shape, **found, **packing}


def operations(config: EngineConfig, blocks_a_token: float) -> float:
    """Operations of training on a token: the target's pass, its context rows, and so many blocks, forward and back."""
    drafter = config.drafter
    assert drafter is not None
    table = config.target.vocab_size * config.target.hidden_size
    matrices = {
        weight.name: prod(weight.shape(1, 0)) for weight in pair_weights(config.target, drafter) if weight.is_matrix
    }
    target = 2 * sum(size for name, size in matrices.items() if not name.startswith(PREFIX))
    context = 6 * sum(matrices[PREFIX + name + ".weight"] for name in ("fc", "context_kv_proj"))
    row = 6 * sum(size for name, size in matrices.items() if name.startswith(PREFIX + "layers."))
    head = 6 * table  # forward, again in the backward pass, and the rows' gradient
    return target + context + blocks_a_token * drafter.block_size * (row + head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (replies, shipped, ablations, adapt, rate):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("--work", type=Path, default=Path("trainings"), help="folder of the state directories")
        command.add_argument("--output", type=Path, required=True, help="record to write")
        command.add_argument("--device", default="auto")
        command.add_argument("--steps", type=int)
        if function is rate:
            command.add_argument("--shape", default="qwen3-8b")
            command.add_argument("--pack", type=int, default=8192)
            command.add_argument("--anchors", type=int, default=512)
            command.add_argument("--tflops", type=float, default=GEMM_SHARE * 989, help="to estimate by; an H200's")
            command.add_argument("--length", type=int, default=4096, help="tokens of a document")
            command.add_argument("--attention", default="auto", help="masked or flex")
        else:
            command.add_argument("--records", type=Path, required=True)
            command.add_argument("--each", type=int, default=64, help="held-out prompts of each kind")
            command.add_argument("--attention", default="auto", help="masked or flex")
            command.add_argument("--evaluate-every", type=int)
            command.add_argument("--pack", type=int)
            command.add_argument("--anchors", type=int)
        if function is ablations:
            command.add_argument("--only", nargs="+", choices=list(ABLATIONS), help="these of them")
        if function is adapt:
            command.add_argument("--target", type=Path, required=True, help="the fine-tuned target")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    found = arguments.function(arguments)
    record = {"machine": machine(pick_device(arguments.device)), "versions": versions(), **found}
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
