"""Times vLLM's steps on a published pair's shape, with dummy weights and vLLM's own imposed acceptance.

    python benchmarks/vllm_steps.py --shape qwen3.5-35b-a3b --folder 35b --output plain.json
    python benchmarks/vllm_steps.py --shape qwen3.5-35b-a3b --folder 35b --drafts 15 --acceptance 6.49

Needs an NVIDIA GPU, and vLLM 0.26 in the same Python. One engine a run: 0 drafts decode plainly. A step is timed with
all sequences running and no prompt beside them; half of the tokens come before 1,024 are cached. With dummy weights a
drafter repeats tokens, so that drafted rows of a mixture choose fewer experts than a real drafter's would.

Untested: on one NVIDIA H200 an engine of Qwen3.5-35B-A3B's shape was not ready after 200 s, 48 of them torch.compile's,
whose cache is by the folder's name. No step has been timed.
"""

import argparse
import collections
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.random_checkpoint import write_configs
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
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the pair's configurations: one, once and for all"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batch.split(",")]
    settings = engine_settings(arguments, max(batches))
    engine, machine = start(settings)
    steps = []
    for batch in batches:
        steps.append(row_of(engine, batch, arguments))
        print(json.dumps(steps[-1]), flush=True)
    told = {name: value for name, value in settings.items() if name not in ("model", "speculative_config")}
    record = {"command": shlex.join(["python", *sys.argv]), **machine, "settings": told, "steps": steps}
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
        write_configs(arguments.folder, arguments.shape)
    raw = SHAPES[arguments.shape].target
    settings: dict[str, Any] = {"model": str(target), "load_format": "dummy", "dtype": "bfloat16", "seed": 0}
    settings |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 2 * CACHED}
    settings |= {"max_num_seqs": most, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.92}
    settings |= {"attention_backend": "FLASH_ATTN"}
    if "text_config" in raw:
        settings["language_model_only"] = True
    if "linear_attention" in raw.get("text_config", raw).get("layer_types", ()):
        settings["gdn_prefill_backend"] = "triton"
    if arguments.precision == "fp8-blocks":
        quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        settings["hf_overrides"] = {"quantization_config": quantized}
    rows = 1 + arguments.drafts
    sizes = [rows * batch for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64) if batch <= most]
    settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if arguments.drafts:
        settings["speculative_config"] = {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": arguments.drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": arguments.acceptance,
        }
    return settings


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
