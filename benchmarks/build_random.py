"""Builds a published pair from random weights in its exact layout, as `build` would, and records what that took.

    python benchmarks/build_random.py --shape gpt-oss-120b --tp 8 --gpu sm120 --folder random --output record.json
    python benchmarks/build_random.py --shape gpt-oss-20b --layers 2 --gpu sm120 --folder random
    python benchmarks/build_random.py --shape gpt-oss-20b --folder random --write-only     # for another runtime
    trtllm-dflash launch --runtime vllm --target random/gpt-oss-20b-all/target --drafter random/gpt-oss-20b-all/drafter

Shards that stand in the folder are used again. Ranks are compiled one after another; of each, the record has the time
and the size of its plan, and of all the host memory that the largest took. Nothing is run.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from shape_engine import write_tokenizer

from trtllm_dflash.bench import machine
from trtllm_dflash.bench.random_checkpoint import write_random_pair
from trtllm_dflash.cost.shapes import SHAPES
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.models import read_target_config

#: gpt-oss's special tokens (openai/harmony, `registry.rs`), which other runtimes look up when they start.
HARMONY = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}


def main() -> int:
    """Writes the checkpoints, builds, and writes the record; the exit code is the build's."""
    arguments = parse_arguments()
    begin = time.perf_counter()
    pair = write_pair(arguments.folder, arguments.shape, arguments.layers)
    written = time.perf_counter() - begin
    print(f"{pair}: {size_of(pair) / 1e9:.1f} GB, {written:.0f} s")
    if arguments.write_only:
        return 0
    engine = arguments.folder / f"{pair.name}-tp{arguments.tp}"
    command = [sys.executable, "-m", "trtllm_dflash", "build", "--target", str(pair / "target")]
    command += ["--drafter", str(pair / "drafter"), "--output", str(engine), "--tp", str(arguments.tp), "--force"]
    command += ["--gpu", arguments.gpu, *arguments.build]
    begin = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        return code
    config = read_config(engine)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "build": shlex.join(["trtllm-dflash", *command[3:]]),
        "machine": machine.machine(),
        "versions": config.versions,
        "shape": arguments.shape,
        "target_layers": config.target.layers,
        "backend": config.backend,
        "precision": config.precision,
        "limits": {"max_batch": config.max_batch, "max_seq_len": config.max_seq_len, "chunk": config.chunk},
        "checkpoint_bytes": size_of(pair),
        "write_seconds": round(written, 1),
        "build_seconds": round(time.perf_counter() - begin, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,  # of the largest process
        "ranks": [plan.model_dump(include={"layers", "weights", "bytes", "seconds"}) for plan in config.plans],
        "engine_bytes": size_of(engine),
        "run": False,
    }
    print(json.dumps(record, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def write_pair(folder: Path, shape: str, layers: int | None = None, device: str = "cpu") -> Path:
    """Writes target and drafter of a shape, with a made-up tokenizer, unless they stand there; returns their folder."""
    pair = folder / f"{shape}-{layers or 'all'}"
    if not (pair / "written").is_file():
        target, _ = write_random_pair(pair, shape, layers, report, device)
        special = HARMONY if SHAPES[shape].family == "gpt_oss" else None
        write_tokenizer(target, read_target_config(SHAPES[shape].target).vocab_size, special)
        (pair / "written").touch()
    return pair


def parse_arguments() -> argparse.Namespace:
    """The command line; what it does not know goes to `build`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="of the target, where not the shape's: for a try")
    parser.add_argument("--tp", type=int, default=1, help="ranks")
    parser.add_argument("--gpu", default="sm120", help="as for build; need not be present with TensorRT-RTX")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and the engine are written")
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    parser.add_argument("--write-only", action="store_true", help="only the checkpoints")
    arguments, of_build = parser.parse_known_args()
    arguments.build = of_build
    return arguments


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def report(what: str, done: int, total: int) -> None:
    """Shows how far the writing is."""
    print(f"\r{what}: {done} of {total}", end="" if done < total else "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
