"""Sweeps a real Triton server on the shipped pair on the CPU; with --aiperf, measures its gateway by AIPerf, too.

python benchmarks/sweep_cpu.py --output benchmarks/results/sweep-cpu
python benchmarks/sweep_cpu.py --aiperf BIN/aiperf --output benchmarks/results/sweep-cpu
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import trtllm_dflash
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.pairs.prompts import PROMPTS
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.repository import DeploySettings
from trtllm_dflash.serving.serve import serving

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
MAX_TOKENS, REQUESTS, TURNS = 128, 64, 2

#: AIPerf's name of a figure, and ours; AIPerf's are in milliseconds.
SPREADS = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2e"}


def sweep(*arguments: object) -> None:
    """Runs `trtllm-dflash sweep`."""
    subprocess.run([sys.executable, "-m", "trtllm_dflash", "sweep", *map(str, arguments)], check=True)


def ours(url: str, prompts: Path, clients: int, folder: Path) -> dict[str, float]:
    """Figures of a load on the gateway, by `sweep`."""
    load = ("--concurrency", clients, "--requests", REQUESTS, "--max-tokens", MAX_TOKENS)
    sweep("--url", url, "--dataset", prompts, *load, "--output", folder, "--force")
    (point,) = json.loads((folder / "results.json").read_text())["points"]
    figures = {
        "output_tokens_per_second": point["output_tokens_per_second"],
        "tokens_per_second_per_user_p50": point["tokens_per_second_per_user"],
    }
    return figures | {f"{name}_{part}_ms": point[name][part] * 1e3 for name in SPREADS.values() for part in PARTS}


PARTS = ("mean", "p50", "p90")


def aiperf(binary: Path, url: str, prompts: Path, clients: int, folder: Path) -> dict[str, float]:
    """The same by AIPerf."""
    command: list[object] = [
        binary,
        "profile",
        "--model",
        "tiny",
        "--url",
        url,
        "--endpoint-type",
        "chat",
        "--streaming",
    ]
    command += [
        "--tokenizer",
        "engine",
        "--input-file",
        prompts,
        "--custom-dataset-type",
        "single_turn",
        "--ui",
        "none",
    ]
    command += ["--concurrency", clients, "--request-count", REQUESTS, "--warmup-request-count", clients]
    command += ["--use-server-token-count", "--extra-inputs", "temperature:0"]
    command += ["--extra-inputs", f"max_tokens:{MAX_TOKENS}", "--artifact-dir", folder]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), check=True, cwd=prompts.parent, env=environment, stdout=subprocess.DEVNULL)
    file = min(folder.rglob("profile_export_aiperf.json"), key=lambda found: len(found.parts))
    found = json.loads(file.read_text())
    figures = {
        "output_tokens_per_second": found["output_token_throughput"]["avg"],
        "tokens_per_second_per_user_p50": found["output_token_throughput_per_user"]["p50"],
    }
    names = {"mean": "avg", "p50": "p50", "p90": "p90"}
    return figures | {f"{to}_{part}_ms": found[name][names[part]] for name, to in SPREADS.items() for part in PARTS}


def compare(binary: Path, url: str, folder: Path) -> list[dict[str, Any]]:
    """Both by turns on the same prompts, at 1 and at 8 clients; means of the turns."""
    prompts = folder / "prompts.jsonl"
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()][:: 256 // REQUESTS]
    prompts.write_text("".join(json.dumps({"text": row["prompt"]}) + "\n" for row in rows))
    table = []
    for clients in (1, 8):
        found: dict[str, list[dict[str, float]]] = {"aiperf": [], "sweep": []}
        for turn in range(TURNS):
            for tool in ("aiperf", "sweep") if turn % 2 == 0 else ("sweep", "aiperf"):
                if tool == "aiperf":
                    found[tool].append(aiperf(binary, url, prompts, clients, folder / f"aiperf-{clients}-{turn}"))
                else:
                    found[tool].append(ours(url, prompts, clients, folder / "sweep"))
        for name in found["sweep"][0]:
            means = {tool: sum(turn[name] for turn in turns) / TURNS for tool, turns in found.items()}
            row = {"clients": clients, "figure": name, **{tool: round(mean, 2) for tool, mean in means.items()}}
            table.append({**row, "difference": round(means["sweep"] / means["aiperf"] - 1, 4)})
            print(row["clients"], name, f"{means['aiperf']:.2f} {means['sweep']:.2f} {table[-1]['difference']:+.1%}")
    return table


def main() -> None:
    """Serves, measures, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, help="the program")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pair = {"name": "tiny", "target": str(PAIR / "target"), "drafter": str(PAIR / "drafter")}
    limits = {"precision": "fp32", "max_batch": 8, "max_seq_len": 2048}
    endpoints = Endpoints(http_port=0, grpc_port=0, metrics_port=0, openai_port=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = folder / "engine"
        build(BuildSettings.model_validate({**pair, **limits}), engine)
        with serving(engine, DeploySettings(device="cpu", draft_length="auto"), endpoints) as running:
            at = running.endpoints
            if arguments.aiperf is not None:
                record: dict[str, Any] = {"machine": machine(), "versions": versions(), "requests": REQUESTS}
                record["rows"] = compare(arguments.aiperf.absolute(), str(at.openai).removesuffix("/v1"), folder)
                (arguments.output / "aiperf.json").write_text(json.dumps(record, indent=1) + "\n")
            else:
                label = ("--label", "shipped pair in FP32, Triton on two CPU cores")
                load = ("--concurrency", "1,2,4,8", "--compare", "plain,draft", "--max-tokens", MAX_TOKENS)
                read = ("--at", "50,75,100", "--output", arguments.output, "--force")
                sweep("--url", at.grpc, "--tokenizer", engine, *load, *label, *read)


if __name__ == "__main__":
    main()
