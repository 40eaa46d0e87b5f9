"""`deploy --runtime tensorrt-llm`: the Triton model repository of TensorRT-LLM's `llmapi` model.

Inputs, outputs and the keys of model.yaml are those of TensorRT-LLM's triton_backend/all_models/llmapi (read at
config.pbtxt 0a71057, model.py 044a90d, 2026). The model's code stays where it is: in the server's container, at the
version that fits the library there.
"""

from pathlib import Path

from trtllm_dflash.engine.directory import not_replaced, stands, written_aside
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.foreign import tensorrt_llm
from trtllm_dflash.foreign.plan import Plan

#: Begins the configuration that is written; it is how a repository is known to be ours.
MARK = "# Written by `trtllm-dflash deploy --runtime tensorrt-llm`"

#: Where Triton's container for TensorRT-LLM (tritonserver:YY.MM-trtllm-python-py3) has the model's code.
MODEL_FOLDER = "/app/all_models/llmapi/tensorrt_llm/1"

_INPUTS = {
    "text_input": ("STRING", -1, False),
    "streaming": ("BOOL", 1, True),
    "sampling_param_best_of": ("INT32", 1, True),
    "sampling_param_temperature": ("FP32", 1, True),
    "sampling_param_top_k": ("INT32", 1, True),
    "sampling_param_top_p": ("FP32", 1, True),
    "sampling_param_frequency_penalty": ("FP32", 1, True),
    "sampling_param_presence_penalty": ("FP32", 1, True),
    "sampling_param_max_tokens": ("INT32", 1, True),
    "sampling_param_stop": ("STRING", -1, True),
    "sampling_param_seed": ("UINT64", 1, True),
    "sampling_param_exclude_input_from_output": ("BOOL", 1, True),
    "sampling_param_return_perf_metrics": ("BOOL", 1, True),
    "return_finish_reason": ("BOOL", 1, True),
    "return_stop_reason": ("BOOL", 1, True),
    "return_cumulative_logprob": ("BOOL", 1, True),
    "stop": ("BOOL", 1, True),
}
_OUTPUTS = {
    "text_output": ("STRING", -1),
    "finish_reason": ("STRING", -1),
    "stop_reason": ("STRING", -1),
    "cumulative_logprob": ("FP32", -1),
    "kv_cache_reused_block": ("INT32", -1),
    "kv_cache_missed_block": ("INT32", -1),
    "kv_cache_alloc_new_blocks": ("INT32", -1),
    "kv_cache_alloc_total_blocks": ("INT32", -1),
    "kv_cache_hit_rate": ("FP32", -1),
    "arrival_time_ns": ("INT64", 1),
    "first_scheduled_time_ns": ("INT64", 1),
    "first_token_time_ns": ("INT64", 1),
    "last_token_time_ns": ("INT64", 1),
    "acceptance_rate": ("FP32", 1),
    "total_accepted_draft_tokens": ("INT32", 1),
    "total_draft_tokens": ("INT32", 1),
}

_MODEL = f'''"""TensorRT-LLM's own Triton model, from this server's container (or the folder in LLMAPI_MODEL_FOLDER)."""

import importlib.util
import os
import sys

folder = os.environ.get("LLMAPI_MODEL_FOLDER", "{MODEL_FOLDER}")
sys.path.insert(0, folder)  # for the modules beside it
spec = importlib.util.spec_from_file_location("tensorrt_llm_llmapi_model", os.path.join(folder, "model.py"))
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
TritonPythonModel = module.TritonPythonModel  # it reads model.yaml in this folder
'''


def render(plan: Plan) -> dict[str, str]:
    """Writes the repository's files, as text by path."""
    extra: tuple[tuple[str, object, str], ...] = (
        ("model", plan.target, "the target"),
        ("backend", "pytorch", "the only backend of TensorRT-LLM that drafts blocks"),
        (
            "triton_config",
            {"max_batch_size": 0, "decoupled": True},
            "Triton batches nothing, the engine does; replies may stream (unary gRPC clients: decoupled: false)",
        ),
    )
    remarks = "".join(f"{remark}\n" for remark in tensorrt_llm.launch(plan).remarks)
    return {
        "tensorrt_llm/config.pbtxt": _pbtxt(),
        "tensorrt_llm/1/model.yaml": remarks + tensorrt_llm.render(plan, extra),
        "tensorrt_llm/1/model.py": _MODEL,
    }


def deploy_llmapi(plan: Plan, output: Path, force: bool = False) -> None:
    """Writes the repository. Where the same one stands already, nothing happens.

    Args:
        force: a repository that this command wrote, and that differs, is replaced.

    Raises:
        SettingsError: the plan is for several nodes.
        EngineError: `output` is something else, or cannot be written.
    """
    if plan.settings.nodes > 1:
        raise SettingsError(f"--nodes {plan.settings.nodes}: the llmapi model is served on one node; use launch")
    files = render(plan)
    if stands(output):
        config = output / "tensorrt_llm" / "config.pbtxt"
        if not (config.is_file() and config.read_text(errors="replace").startswith(MARK)):
            raise not_replaced(output, "not a model repository of this command's")
        if all(
            (output / name).is_file() and (output / name).read_bytes() == text.encode() for name, text in files.items()
        ):
            return
        if not force:
            raise EngineError(f"{output}: exists and differs; use another --output, or --force to replace it")
    with written_aside(output, "model repository", replaces=force) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def _pbtxt() -> str:
    lines = [
        MARK,
        "# max_batch_size and whether replies stream: 1/model.yaml, which the model reads when it starts.",
        'name: "tensorrt_llm"',
        'backend: "python"',
        "instance_group [{ count: 1 kind: KIND_CPU }]  # its processes take the GPUs themselves",
        "input [",
    ]
    inputs = [
        f'  {{ name: "{name}" data_type: TYPE_{kind} dims: [ {size} ]{" optional: true" if optional else ""} }}'
        for name, (kind, size, optional) in _INPUTS.items()
    ]
    outputs = [
        f'  {{ name: "{name}" data_type: TYPE_{kind} dims: [ {size} ] }}' for name, (kind, size) in _OUTPUTS.items()
    ]
    return "\n".join([*lines, ",\n".join(inputs), "]", "output [", ",\n".join(outputs), "]"]) + "\n"
