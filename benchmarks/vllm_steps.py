"""Times vLLM's steps on a published pair's shape, with dummy weights and vLLM's own imposed acceptance.

    python benchmarks/vllm_steps.py --shape qwen3.5-35b-a3b --folder 35b --output plain.json
    python benchmarks/vllm_steps.py --shape qwen3.5-35b-a3b --folder 35b --drafts 15 --acceptance 6.49

Needs an NVIDIA GPU, and vLLM 0.26 in the same Python. One engine a run: 0 drafts decode plainly. A step is timed with
all sequences running and no prompt beside them; half of the tokens come before 1,024 are cached. With dummy weights a
drafter repeats tokens, so that drafted rows of a mixture choose fewer experts than a real drafter's would: with
`--random-drafts` they are as unlike as ours.

Starting takes minutes: for the best of some 90 forms of delta nets' kernels of prompts, which no timed step runs
(`--first-forms` takes the first of each); for torch.compile, whose cache is by the folder's name (`--no-compile`:
vLLM's own kernels, full graphs of steps still); and for graphs, which it captures once more where the caches' size is
not given (`--cache-gib`). `--layers` cuts a target, so that two engines fit; vLLM takes a drafter only where no kind of
the target's layers is fewer than the drafter's layers: 24 of Qwen3.5-35B-A3B's, not 20. Two processes start side by
side and take turns by files: each makes its `--ready` and waits for its `--after`.

On one NVIDIA H200 an engine of 24 of Qwen3.5-35B-A3B's layers was ready after 99 s.
"""

import argparse
import collections
import json
import random
import shlex
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.random_checkpoint import write_configs
from trtllm_dflash.checkpoint.drafter_config import default_tap_layers
from trtllm_dflash.cost.shapes import SHAPES

CACHED = 1024  # tokens in front of the step in the middle
SETTLED = 16  # tokens of every sequence before the first step that counts
PLAIN_TOKENS, DRAFTED_TOKENS = 256, 640  # of a sequence


def main() -> None:
    """Starts the engine, times its steps and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--acceptance", type=float, help="tokens a step, of drafted steps")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--precision", choices=("bf16", "fp8-blocks"), default="bf16", help="of the target")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, help="of the target; the shape's where not given")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of prompts a step, at most")
    parser.add_argument("--cache-gib", type=float, help="for caches; what is left of the GPU where not given")
    parser.add_argument("--first-forms", action="store_true", help="of the kernels that Triton would choose by timing")
    parser.add_argument("--random-drafts", action="store_true", help="verify random tokens, as unlike as real drafts")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--ready", type=Path, help="file to make when the engine is ready")
    parser.add_argument("--after", type=Path, help="file to wait for before steps are timed")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the pair's configurations: one, once and for all"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batch.split(",")]
    settings = engine_settings(arguments, max(batches))
    change_engine(first_forms=arguments.first_forms, random_drafts=arguments.random_drafts)
    engine, machine = start(settings)
    if arguments.ready is not None:
        arguments.ready.touch()
    while arguments.after is not None and not arguments.after.exists():
        time.sleep(0.1)
    told = {name: value for name, value in settings.items() if name not in ("model", "speculative_config")}
    record = {"command": shlex.join(["python", *sys.argv]), **machine, "settings": told, "steps": []}
    for batch in batches:
        row = row_of(engine, batch, arguments)
        print(json.dumps(row), flush=True)
        record["steps"].append(row)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(record, indent=2) + "\n")


def row_of(engine: Any, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is recorded of steps of a batch: each round's milliseconds, and the least of them."""
    drafts = arguments.drafts
    tokens = DRAFTED_TOKENS if drafts else PLAIN_TOKENS
    # The first round compiles what is not compiled yet.
    _, *rounds = [time_steps(engine, batch, drafts, tokens) for _ in range(1 + arguments.rounds)]
    row = {"batch": batch, "drafts": drafts, "ms": round(min(ms for ms, _ in rounds), 3)}
    row["ms_of_rounds"] = [round(ms, 3) for ms, _ in rounds]
    row["tokens_per_step"] = round(statistics.fmean(told for _, told in rounds), 3)
    return row


def engine_settings(arguments: argparse.Namespace, most: int) -> dict[str, Any]:
    """What vLLM is asked for; the pair's configurations are written where they do not stand yet."""
    target, drafter = arguments.folder / "target", arguments.folder / "drafter"
    if not target.exists():
        write_cut_configs(arguments.folder, arguments.shape, arguments.layers)
    raw = SHAPES[arguments.shape].target
    settings: dict[str, Any] = {"model": str(target), "load_format": "dummy", "dtype": "bfloat16", "seed": 0}
    settings |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 2 * CACHED}
    settings |= {"max_num_seqs": most, "max_num_batched_tokens": arguments.chunk, "gpu_memory_utilization": 0.92}
    if arguments.cache_gib is not None:  # then the utilization is only what must be free when the engine starts
        settings |= {"kv_cache_memory_bytes": int(arguments.cache_gib * 2**30), "gpu_memory_utilization": 0.3}
    settings |= {"attention_backend": "FLASH_ATTN"}
    if "text_config" in raw:
        settings["language_model_only"] = True
    if "linear_attention" in raw.get("text_config", raw).get("layer_types", ()):
        settings["gdn_prefill_backend"] = "triton"
    if arguments.precision == "fp8-blocks":
        quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        settings["hf_overrides"] = {"quantization_config": quantized}
    rows = 1 + arguments.drafts
    # Captured: steps of the batches, and of all powers of two below the largest.
    batches = {int(batch) for batch in arguments.batch.split(",")} | {2**i for i in range(most.bit_length())}
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": [rows * batch for batch in sorted(batches)]}
    if arguments.no_compile:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    settings["compilation_config"] = graphs
    if arguments.drafts:
        settings["speculative_config"] = {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": arguments.drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": arguments.acceptance,
        }
    return settings


def write_cut_configs(folder: Path, name: str, layers: int | None) -> None:
    """Writes a pair's configurations, of a target of so many layers."""
    shape = SHAPES[name]
    if layers is not None and layers % max(1, len(shape.kinds)):
        raise SystemExit(f"--layers {layers}: {name} repeats {len(shape.kinds)} layers; give a multiple")
    _, drafter = write_configs(folder, name, layers)
    if layers is not None:
        file = drafter / "config.json"
        settings = json.loads(file.read_text())
        settings["dflash_config"]["target_layer_ids"] = tap_layers(layers, len(shape.tap_layers))
        file.write_text(json.dumps(settings, indent=2) + "\n")


def tap_layers(layers: int, taps: int) -> list[int]:
    """Layers of a cut target that its drafter reads, by z-lab's rule: vLLM gives each once, if named twice too."""
    chosen = default_tap_layers(layers, taps)
    if len(set(chosen)) < taps or min(chosen) < 0:
        raise SystemExit(f"--layers {layers}: the drafter reads {taps} layers of its target")
    return chosen


def change_engine(**changes: bool) -> None:
    """Has vLLM's process of the engine begin by `run_changed`, be it forked or spawned."""
    from vllm.v1.engine.core import EngineCoreProc  # type: ignore[import-not-found]

    run_changed.run = EngineCoreProc.run_engine_core  # type: ignore[attr-defined]
    EngineCoreProc.run_engine_core = partial(run_changed, **changes)


def run_changed(*rest: Any, first_forms: bool, random_drafts: bool, **more: Any) -> None:
    """Runs vLLM's engine in its process.

    Args:
        first_forms: `triton.autotune` takes the first of its configurations.
        random_drafts: random tokens are verified in the place of drafts.
    """
    if first_forms:
        import triton  # type: ignore[import-not-found]

        choose = triton.autotune
        triton.autotune = lambda configs, *others, **named: choose(configs[:1], *others, **named)
    from vllm.v1.engine.core import EngineCoreProc

    run = getattr(run_changed, "run", EngineCoreProc.run_engine_core)  # none of a process that was spawned
    if random_drafts:
        import torch
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # type: ignore[import-not-found]

        propose = SpecDecodeBaseProposer.propose

        def drawn(proposer: Any, *arguments: Any, **named: Any) -> torch.Tensor:
            return torch.randint_like(propose(proposer, *arguments, **named), 1000, 150_000)

        SpecDecodeBaseProposer.propose = drawn
    run(*rest, **more)


def start(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The running engine, and what it runs on."""
    import torch
    import vllm

    begin = time.perf_counter()
    engine = vllm.LLM(**settings).llm_engine
    seconds = round(time.perf_counter() - begin, 1)
    print(f"ready after {seconds} s", flush=True)
    versions = {"torch": torch.__version__, "vllm": vllm.__version__}
    return engine, {"gpu": torch.cuda.get_device_name(), "versions": versions, "ready_seconds": seconds}


def time_steps(engine: Any, batch: int, drafts: int, tokens: int) -> tuple[float, float]:
    """Milliseconds and tokens of a sequence's step, from many of a batch."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    delta = RequestOutputKind.DELTA
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=delta)
    draw = random.Random(tokens)
    for i in range(batch):
        prompt = [draw.randrange(1000, 150_000) for _ in range(CACHED - tokens // 2)]
        engine.add_request(f"{batch}.{tokens}.{time.time_ns()}.{i}", {"prompt_token_ids": prompt}, params)
    have: dict[str, int] = collections.Counter()
    counted: list[tuple[float, int]] = []  # when each step was done, and all tokens by then
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            have[output.request_id] += len(output.outputs[0].token_ids)
        running = len(have) == batch and min(have.values()) >= SETTLED and max(have.values()) < tokens - drafts
        if outputs and running:
            counted.append((now, sum(have.values())))
    (begin, before), (end, after) = counted[0], counted[-1]
    steps = len(counted) - 1
    return 1e3 * (end - begin) / steps, (after - before) / steps / batch


if __name__ == "__main__":
    main()
