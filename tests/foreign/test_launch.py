"""`launch`: what it writes for each runtime, what it refuses, and what it starts and ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import ValidationError
from transformers import AutoConfig

from tests import processes
from tests.conftest import TINY, refusal, run, succeeds
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.catalog import load_catalog
from trtllm_dflash.cost.gpus import GPUS
from trtllm_dflash.cost.published import PUBLISHED
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.foreign import calls, tensorrt_llm, vllm
from trtllm_dflash.foreign.plan import EAGLE3, LaunchSettings
from trtllm_dflash.foreign.registry import RUNTIMES, launch_of, plan_for
from trtllm_dflash.foreign.shapes import published_drafter, published_target, shape_of
from trtllm_dflash.text.reply.formats import ChatFormat

GOLDEN = Path(__file__).parents[1] / "golden"

#: The catalog's pairs, each on GPUs that it fits. `launch ... --dry-run > tests/golden/NAME` writes one anew.
PAIRS = {
    "gpt-oss-120b": "--tp 8 --gpu b300",
    "gpt-oss-20b": "--gpu h100",
    "qwen3-8b": "--gpu h200",
    "qwen3-4b": "--gpu rtx-5090 --max-seq-len 8192",
    "llama-3.1-8b": "--gpu b200",
    "qwen3-coder-30b-a3b": "--tp 2 --gpu rtx-pro-6000",
    "qwen3-coder-next": "--tp 4 --gpu h100",
    "qwen3.5-4b": "--gpu l40s",
    "qwen3.5-9b": "--gpu rtx-pro-6000",
    "qwen3.5-27b": "--gpu h200",
    "qwen3.6-27b": "--tp 2 --gpu h100",
    "qwen3.5-35b-a3b": "--gpu h200",
    "qwen3.6-35b-a3b": "--gpu b200",
    "qwen3.5-122b-a10b": "--tp 8 --gpu b300",
    "gemma-4-31b": "--tp 2 --gpu h100",
    "gemma-4-26b-a4b": "--gpu b300",
    "kimi-k2.5": "--tp 8 --gpu b300",
    "minimax-m2.5": "--tp 4 --gpu h200",
    "minimax-m2.7": "--tp 2 --gpu b300",
}


def launched(runtime, *arguments):
    return succeeds("launch", "--runtime", runtime, *arguments, "--dry-run")


def refused(runtime, *arguments):
    return refusal("launch", "--runtime", runtime, "--gpu", "h200", *arguments, "--dry-run")


def without_notes(script):
    """A script without the catalog's notes, which are the catalog's to change."""
    return [line for line in script.splitlines() if not line.startswith("# The catalog: ")]


def settings(runtime, **values):
    return LaunchSettings.model_validate({"runtime": runtime, "gpu": "h200", **values})


# -- what it writes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("model", PAIRS)
def test_the_catalogs_pairs_are_launched_as_was_read_and_agreed(runtime, model):
    script = launched(runtime, "--model", model, *PAIRS[model].split())
    golden = (GOLDEN / f"{model}-{runtime}.sh").read_text()
    assert without_notes(script) == without_notes(golden)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("method", ["dflash", "eagle3", "none"])
def test_a_pasted_script_runs_the_same_words_and_writes_the_same_files(tmp_path, runtime, method):
    launch = launch_of(settings(runtime, model="qwen3-8b", method=method))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("vllm", "trtllm-serve", "python"):
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" > words\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-eu"], input=launch.script(), text=True, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "words").read_text().split("\0")[:-1] == launch.words
    for name, text in launch.files.items():
        assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_option_and_key_has_a_reason(runtime):
    lines = launched(runtime, "--model", "gpt-oss-120b", "--tp", "8", "--gpu", "b300").splitlines()
    for before, line in pairwise(lines):
        is_key = ": " in line and not line.lstrip().startswith("#")
        if line.startswith("  --") or is_key:
            assert before.lstrip().startswith("# ") and len(before.strip()) > 4, line


def test_a_file_is_no_checkpoints_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").touch()
    asked = ("launch", "--runtime", "vllm", "--target", "notes", "--method", "none", "--gpu", "h200", "--dry-run")
    assert "notes is a file; pass the checkpoint's folder" in refusal(*asked)


def test_a_shorter_draft_reaches_each_runtime_in_its_own_counting():
    asked = ("--model", "qwen3-8b", "--gpu", "h200", "--draft-length", "7")
    assert '"num_speculative_tokens":7' in launched("vllm", *asked)
    assert "--speculative-num-draft-tokens 8" in launched("sglang", *asked)
    assert "  max_draft_len: 7\n" in launched("tensorrt-llm", *asked)


def test_methods_differ_in_drafting_alone():
    scripts = {}
    for method in ("dflash", "eagle3", "none"):
        words = launch_of(settings("vllm", model="qwen3-8b", method=method)).words
        scripts[method] = {word for word in words if not word.startswith(("{", "--spec")) and not word.isdecimal()}
    assert scripts["dflash"] == scripts["eagle3"] == scripts["none"]


def test_the_shipped_pair_is_launched_by_its_folders_and_fits_vllms_kernels():
    launch = launch_of(settings("vllm", model="tiny"))
    assert launch.command == ("vllm", "serve", str(TINY / "target"))
    config = json.loads(launch.words[launch.words.index("--speculative-config") + 1])
    assert config["model"] == str(TINY / "drafter") and config["num_speculative_tokens"] == 15
    assert vllm.head_size_fits(64, GPUS["h200"])
    by_folder = launch_of(settings("vllm", target=str(TINY / "target"), drafter=str(TINY / "drafter")))
    assert by_folder.words[3:] == [
        word.replace("tiny", "target") if word == "tiny" else word for word in launch.words[3:]
    ]


def test_a_published_drafters_configuration_needs_no_code_of_its_own(tmp_path):
    """Why no command has --trust-remote-code: transformers knows the family, and leaves auto_map alone."""
    raw = json.loads((TINY / "drafter" / "config.json").read_text())
    raw["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert config.model_type == "qwen3" and config.dflash_config["target_layer_ids"] == [1, 3, 5]


@pytest.mark.slow
def test_the_shape_of_every_pair_of_the_catalog_is_known():
    catalog = load_catalog()
    assert {*PAIRS, "tiny", "tiny-hybrid"} == {name for name, entry in catalog.items() if entry.kind == "dflash"}
    for name in PAIRS:
        target, drafter = published_target(name), published_drafter(name)
        assert (target.family, target.layers) == (catalog[name].family, catalog[name].target_layers)
        assert drafter.layers == catalog[name].drafter_layers
        assert plan_for(settings("vllm", model=name, gpu="b300", tp=4)).room is not None
    assert EAGLE3.keys() <= catalog.keys()


def test_only_dflash_drafters_are_launched():
    message = refused("vllm", "--model", "qwen3-8b-dspark")
    assert "--model qwen3-8b-dspark: only DFlash drafters are launched, not dspark's" in message


#: Of files that their publishers give: GiB of a drafter, GiB and billions of parameters of a target's text model in 16
#: bits, bytes of K/V a token, and MiB of a sequence's state.
FILES = {
    "qwen3.5-4b": (1.18, 4.2, 32768, 48),
    "qwen3.5-27b": (3.96, 26.9, 65536, 144),
    "qwen3.6-27b": (3.22, 26.9, 65536, 144),
    "qwen3.5-35b-a3b": (0.72, 34.7, 20480, 60),
    "qwen3.5-122b-a10b": (1.44, 122.1, 24576, 144),
    "qwen3-coder-next": (0.88, 79.7, 24576, 72),
    "gemma-4-31b": (2.86, 30.7, 81920, 0),
    "gemma-4-26b-a4b": (0.80, 25.2, 20480, 0),
    "minimax-m2.7": (1.04, 115.1, 253952, 0),  # whose target is in 8 bits: half as many as there are
}


@pytest.mark.parametrize("name", FILES)
def test_published_shapes_weigh_and_keep_what_their_files_do(name):
    target, drafter = published_target(name), published_drafter(name)
    drafter_gib, billions, kv_bytes, state_mib = FILES[name]
    assert drafter.weight_bytes / 2**30 == pytest.approx(drafter_gib, abs=0.005)
    assert target.weight_bytes / 2e9 == pytest.approx(billions, rel=0.002)
    assert target.cache_bytes(100_001, 1) - target.cache_bytes(100_000, 1) == kv_bytes  # windows are full
    assert target.state_bytes == state_mib * 2**20


def test_kimi_k2_5_keeps_one_latent_row_on_every_rank_and_its_experts_in_4_bits():
    target = published_target("kimi-k2.5")
    assert target.cache_bytes(1, tp=1) == target.cache_bytes(1, tp=8) == 61 * (512 + 64) * 2
    moe_layers = 60 * 384 * 3 * 2048 * 7168
    assert target.weight_bytes == 554 * 2**30  # as its card says
    assert moe_layers * 4.5 / 8 == pytest.approx(531.6 * 2**30, rel=0.001)


def test_several_nodes_meet_as_each_runtime_does_it():
    pair = ("--model", "gpt-oss-120b", "--gpu", "h100", "--tp", "16", "--nodes", "2")
    trtllm = launched("tensorrt-llm", *pair)
    assert "mpirun -n 16 --map-by ppr:8:node --hostfile hosts trtllm-llmapi-launch trtllm-serve" in trtllm
    assert "srun --mpi=pmix trtllm-llmapi-launch trtllm-serve openai/gpt-oss-120b --config" in trtllm
    assert "gpus_per_node: 8" in trtllm
    head = ("--head", "10.0.0.1")
    assert "ray start --head --port=6379 --num-gpus=8" in launched("vllm", *pair, *head)
    sglang = launched("sglang", *pair, *head, "--node-rank", "1")
    assert "--nnodes 2" in sglang and "--node-rank 1" in sglang and "--dist-init-addr 10.0.0.1:20000" in sglang


def test_gpt_oss_gets_kernels_with_attention_sinks_on_every_gpu():
    for gpu in GPUS:
        vllm_words = launch_of(LaunchSettings(runtime="vllm", model="gpt-oss-20b", gpu=gpu, tp=2)).words
        known = GPUS[gpu].capability
        sinks = known in (90, 100, 103)
        assert vllm_words[vllm_words.index("--attention-backend") + 1] == ("FLASH_ATTN" if sinks else "TRITON_ATTN")
        sglang_words = launch_of(LaunchSettings(runtime="sglang", model="gpt-oss-20b", gpu=gpu, tp=2)).words
        assert sglang_words[sglang_words.index("--attention-backend") + 1] in ("triton", "trtllm_mha", "fa3", "fa4")


def option_of(runtime, flag, **values):
    words = launch_of(settings(runtime, **values)).words
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("gpu", "vllm_target", "sglang_target"),
    [
        ("b300", "FLASHINFER_MLA", "trtllm_mla"),
        ("h200", "FLASH_ATTN_MLA", "fa3"),
        ("rtx-pro-6000", "TRITON_MLA", "triton"),
    ],
)
def test_latent_attention_gets_kernels_that_compute_it(gpu, vllm_target, sglang_target):
    pair = {"model": "kimi-k2.5", "gpu": gpu, "tp": 16, "nodes": 2, "head": "10.0.0.1"}
    assert option_of("vllm", "--attention-backend", **pair) == vllm_target
    assert json.loads(option_of("vllm", "--speculative-config", **pair))["attention_backend"] == "FLASH_ATTN"
    assert option_of("sglang", "--attention-backend", **pair) == sglang_target


def test_calls_are_read_as_the_targets_template_asks_for_them_or_as_its_name_says(tmp_path):
    target = shutil.copytree(TINY / "target", tmp_path / "target")
    pair = {"target": str(target), "drafter": str(TINY / "drafter")}
    assert "--tool-call-parser" not in launch_of(settings("vllm", **pair)).words  # its template knows no tools
    template = (target / "chat_template.jinja").read_text()
    for sign, ours, theirs in (("<tool_call>", "hermes", "qwen25"), ("<function=", "qwen3_coder", "qwen3_coder")):
        (target / "chat_template.jinja").write_text(template + "{# " + sign + " #}")
        assert option_of("vllm", "--tool-call-parser", **pair) == ours
        assert option_of("sglang", "--tool-call-parser", **pair) == theirs
    for model, ours in {"qwen3-coder-30b-a3b": "qwen3_coder", "qwen3-8b": "hermes", "gpt-oss-20b": "openai"}.items():
        assert option_of("vllm", "--tool-call-parser", model=model) == ours
        assert "--enable-auto-tool-choice" in launch_of(settings("vllm", model=model)).words
    assert "--reasoning-parser" not in launch_of(settings("sglang", model="qwen3-coder-30b-a3b")).words
    assert json.loads(option_of("sglang", "--default-chat-template-kwargs", model="qwen3-8b")) == {
        "enable_thinking": False
    }


def test_every_way_of_writing_calls_has_a_parser_of_each_runtime():
    formats = set(get_args(ChatFormat))
    assert set(calls.VLLM_CALLS) == set(calls.SGLANG_CALLS) == formats
    assert set(calls.VLLM_THINKING) == set(calls.SGLANG_THINKING)
    families = {entry.family for entry in load_catalog().values()}
    assert all(calls.format_of_target("somebody/model", family) in formats for family in families)


def test_a_tokenizer_that_is_code_is_left_to_the_user():
    for runtime, flag in {"vllm": "--trust-remote-code", "tensorrt-llm": "--trust_remote_code"}.items():
        script = launched(runtime, "--model", "kimi-k2.5", "--gpu", "b300", "--tp", 8)
        assert (
            f"Python code in its checkpoint, which {RUNTIMES[runtime].RUNTIME.title} runs with {flag} alone" in script
        )
        words = launch_of(settings(runtime, model="kimi-k2.5", gpu="b300", tp=8)).words
        assert flag not in words


@pytest.mark.parametrize(("gpu", "kernels"), [("h100", "TRITON_ATTN"), ("h200", "TRITON_ATTN"), ("b300", "FLASH_ATTN")])
@pytest.mark.parametrize("model", ["gemma-4-31b", "gemma-4-26b-a4b"])
def test_gemmas_heads_of_512_get_kernels_that_take_them(model, gpu, kernels):
    pair = {"model": model, "gpu": gpu, "tp": 2}
    assert option_of("vllm", "--attention-backend", **pair) == kernels
    assert json.loads(option_of("vllm", "--speculative-config", **pair))["attention_backend"] == "FLASH_ATTN"
    assert option_of("sglang", "--attention-backend", **pair) == ("trtllm_mha" if gpu == "b300" else "triton")


def test_vllm_keeps_rows_of_gpt_oss_in_one_group_where_it_drafts_with_dflash():
    flag = "--disable-hybrid-kv-cache-manager"
    for model in ("gpt-oss-20b", "gpt-oss-120b"):
        words = {
            method: launch_of(settings("vllm", model=model, gpu="b300", method=method)).words
            for method in ("dflash", "none")
        }
        assert flag in words["dflash"] and flag not in words["none"]
    room = {
        runtime: plan_for(settings(runtime, model="gpt-oss-20b", max_seq_len=16384)).room.per_sequence
        for runtime in ("vllm", "sglang")
    }
    windowed = 12 * 2 * 8 * 64 * 2  # bytes a token
    assert room["vllm"] - room["sglang"] == windowed * (16384 - 128)
    # Its drafter has layers of both kinds, for which vLLM takes a runner with several groups.
    assert flag not in launch_of(settings("vllm", model="gemma-4-31b", gpu="b300")).words


def test_states_of_gated_delta_nets_are_planned_for_each_row_of_a_step():
    drafted, plain = (plan_for(settings("vllm", model="qwen3.5-27b", method=m)).room for m in ("dflash", "none"))
    state = 144 * 2**20
    drafter = published_drafter("qwen3.5-27b").cache_bytes(16384, 1)
    assert drafted.per_sequence - plain.per_sequence == drafter + 15 * state
    assert plain.per_sequence == published_target("qwen3.5-27b").cache_bytes(16384, 1) + 2 * state


# -- limits ----------------------------------------------------------------------------------------------------------


def test_the_batch_is_what_the_memory_plan_holds_and_not_more():
    plan = plan_for(settings("vllm", model="qwen3-8b"))
    assert plan.room is not None and plan.max_batch <= plan.room.largest
    more = plan.room.largest + 1
    line = refused("vllm", "--model", "qwen3-8b", "--max-batch", more)
    assert f"--max-batch {more}: {plan.room.largest} sequences of 16384 tokens fit on a h200" in line
    assert "--max-num-seqs 37" in launched("vllm", "--model", "qwen3-8b", "--gpu", "h200", "--max-batch", "37")


def test_cache_bytes_are_those_of_heads_and_windows():
    assert published_target("qwen3-8b").cache_bytes(1000, tp=1) == 36 * 2 * 8 * 128 * 2 * 1000
    assert published_target("qwen3-8b").cache_bytes(1000, tp=16) == 36 * 2 * 1 * 128 * 2 * 1000
    assert published_target("gpt-oss-20b").cache_bytes(1000, tp=8) == 2 * 1 * 64 * 2 * (12 * 1000 + 12 * 128)


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-35b-a3b"])
def test_tensorrt_llms_pool_leaves_room_for_the_dense_context_arena(model):
    plan = plan_for(settings("tensorrt-llm", model=model))
    fraction = tensorrt_llm.cache_fraction(plan)
    free = 141e9 - 2e9 - 4e9 - plan.room.weights
    arena = (plan.max_batch + 1) * plan.drafter_shape.without_windows().cache_bytes(plan.max_seq_len, 1)
    assert fraction * free + arena <= free
    assert fraction * free >= (plan.max_batch - 1) * plan.shape.cache_bytes(plan.max_seq_len, 1)


def test_an_arena_that_leaves_nothing_is_refused():
    plan = plan_for(settings("tensorrt-llm", model="qwen3-8b"))
    with pytest.raises(SettingsError, match="--max-batch 4096: the drafter's rows of 4097 sequences"):
        tensorrt_llm.cache_fraction(replace(plan, max_batch=4096))


def test_layers_that_keep_some_rows_are_planned_by_their_own_setting():
    text = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "head_dim": 64}
    chunked = {**text, "layer_types": ["chunked_attention"] * 6 + ["full_attention"] * 2, "attention_chunk_size": 256}
    assert shape_of(chunked, 0).windows == (256,)
    sliding = {**text, "layer_types": ["sliding_attention"] * 8, "sliding_window": None}
    assert shape_of(sliding, 0).windows == ()
    assert shape_of(sliding, 0).cache_bytes(1000, tp=1) == 8 * 8 * 2 * 64 * 2 * 1000


def test_a_hybrid_that_names_an_interval_has_the_layers_of_one_that_names_them():
    named = PUBLISHED["qwen3-coder-next"].target
    interval = {key: value for key, value in named.items() if key != "layer_types"}
    assert interval["full_attention_interval"] == 4 and "layer_types" in named
    assert shape_of(interval, 0) == shape_of(named, 0)
    assert shape_of(interval, 0).state_bytes > 0


def test_tensorrt_llm_takes_all_rows_of_a_full_batch_in_a_step():
    args = tensorrt_llm.llm_args(plan_for(settings("tensorrt-llm", model="tiny", max_seq_len=256)))
    assert args.max_num_tokens >= args.max_batch_size * (1 + args.speculative_config.max_draft_len)


# -- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--model qwen3-8b --draft-length 16", "--draft-length 16: the drafter was trained for blocks of 16"),
        ("--model qwen3-8b --pp 2", "--pp 2: none of the runtimes drafts with pipeline parallelism"),
        ("--model qwen3-8b --tp 3", "--tp 3: does not divide the target's 32 query heads"),
        ("--model tiny-hybrid --tp 8", "the target's 4 query heads, nor the 2 key heads of its gated delta nets"),
        ("--model tiny-hybrid --tp 4", "--tp 4: does not divide the target's 2 key heads of its gated delta nets"),
        ("--model qwen3-8b --max-seq-len 50000", "--max-seq-len 50000: the target takes at most 40960 positions"),
        ("--model qwen3-8b --method none --draft-length 4", "--draft-length 4: --method none drafts nothing"),
        ("--model qwen3-8b --method none --drafter x", "--drafter x: --method none drafts nothing"),
        ("--model gpt-oss-20b --method eagle3", "no EAGLE-3 drafter is known for gpt-oss-20b; give --drafter"),
        ("--model qwen3-8b --tp 16", "16 GPUs are more than a node has; say over how many: --nodes"),
        ("--model qwen3-8b --tp 2 --nodes 3", "--nodes 3: does not divide the 2 GPUs"),
        ("--model qwen3-8b --node-rank 1", "--node-rank 1: nodes count from 0 to 0"),
        ("--model qwen3-8", "unknown model 'qwen3-8': did you mean"),
        ("--target org/model", "which drafter goes with it? give --drafter"),
        ("--target org/model --drafter org/drafter", "is not on this machine, so its block size is not known"),
        ("--target nowhere", "--target nowhere does not exist; pass a checkpoint folder or OWNER/NAME"),
        ("--target ./nowhere", "--target ./nowhere does not exist; pass a checkpoint folder"),
        ("--target nowhere --drafter /nowhere", "--target nowhere does not exist"),
        ("--target /nowhere --drafter org/drafter", "--target /nowhere does not exist"),
        ("--target org/model --drafter nowhere", "--drafter nowhere does not exist"),
        ("--target nowhere --method none", "--target nowhere does not exist"),
        ("--model qwen3-8b --method medusa", "--method medusa: Input should be 'dflash', 'eagle3' or 'none'"),
        ("--model qwen3-8b --port 70000", "--port 70000"),
        ("", "say what to launch: --model NAME"),
    ],
)
def test_what_would_not_run_is_refused_before_the_runtime_sees_it(runtime, arguments, reason):
    assert reason in refused(runtime, *arguments.split())


def test_a_model_too_large_for_the_gpu_is_refused_with_the_knobs():
    line = refusal("launch", "--runtime", "vllm", "--model", "gpt-oss-120b", "--gpu", "rtx-5090", "--dry-run")
    assert "leave a rtx-5090 no room for one sequence" in line and "--tp" in line and "--max-seq-len" in line
    for runtime in RUNTIMES:
        line = refusal("launch", "--runtime", runtime, "--model", "kimi-k2.5", "--gpu", "h100", "--tp", 1, "--dry-run")
        assert "--tp 1: 601.8 GB of weights leave a h100 no room for one sequence" in line


def test_no_gpu_here_and_none_named_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--gpu: there is no GPU here" in refusal("launch", "--runtime", "vllm", "--model", "tiny", "--dry-run")
    assert "--output: --dry-run writes nothing" in refused("vllm", "--model", "qwen3-8b", "--output", "folder")
    assert "--gpu a100 is not known" in refusal("launch", "--runtime", "vllm", "--model", "tiny", "--gpu", "a100")


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_several_nodes_need_the_first_ones_address(runtime):
    assert "--head ADDRESS" in refused(runtime, "--model", "qwen3-8b", "--tp", "16", "--nodes", "2")


def test_an_address_of_the_first_node_that_nobody_asks_for_is_refused():
    head = ("--head", "10.0.0.1")
    assert "--head 10.0.0.1: there is one node; see --nodes" in refused("vllm", "--model", "qwen3-8b", *head)
    two = ("--model", "qwen3-8b", "--tp", "16", "--nodes", "2", *head)
    assert "--head 10.0.0.1: TensorRT-LLM's ranks are MPI's to find" in refused("tensorrt-llm", *two)


@pytest.mark.parametrize("flag", ["--host", "--head"])
@pytest.mark.parametrize("address", ["", "a b", "a;b"])
def test_an_address_is_one_word(flag, address):
    line = refused("vllm", "--model", "qwen3-8b", flag, address)
    assert f"{flag} {address!r}: not an address, or a name of one" in line


def test_heads_that_no_kernel_of_vllm_takes_are_refused(tmp_path):
    for whose in ("target", "drafter"):
        raw = json.loads((TINY / whose / "config.json").read_text())
        (tmp_path / whose).mkdir()
        (tmp_path / whose / "config.json").write_text(json.dumps({**raw, "head_dim": 36}))
    folders = ("--target", tmp_path / "target", "--drafter", tmp_path / "drafter")
    assert "the target's heads of 36 fit none of FlashAttention's kernels" in refused("vllm", *folders)


def test_a_folder_that_is_no_drafters_is_refused():
    folders = ("--target", TINY / "target", "--drafter", TINY / "target")
    assert "is no DFlash drafter's" in refused("vllm", *folders)


def test_a_field_that_a_runtime_does_not_have_is_an_error_in_its_schema():
    with pytest.raises(ValidationError, match="num_spec_tokens"):
        vllm.SpeculativeConfig(method="dflash", model="m", num_speculative_tokens=1, num_spec_tokens=2)
    with pytest.raises(ValidationError, match="attention_backend"):
        tensorrt_llm.DFlashConfig(speculative_model="m", max_draft_len=1, attention_backend="FLASH")


# -- what a user adds ------------------------------------------------------------------------------------------------


def test_words_after_two_dashes_end_the_runtimes_command():
    asked = ("--model", "qwen3-8b", "--gpu", "h200")
    for runtime in RUNTIMES:
        plain = launched(runtime, *asked).splitlines()
        added = succeeds("launch", "--runtime", runtime, *asked, "--dry-run", "--", "--enforce-eager", "--seed=1 2")
        own = ["  # your own, after --", "  --enforce-eager '--seed=1 2'"]
        assert added.splitlines() == [*plain[:-2], *own, *plain[-2:]]


@pytest.mark.parametrize(("runtime", "checked"), [("vllm", True), ("sglang", True), ("tensorrt-llm", False)])
def test_the_parser_that_has_the_flags_reads_the_users_own(runtime, checked):
    launch = launch_of(settings(runtime, model="qwen3-8b")).with_words(("--its", "own"))
    assert launch.words[-2:] == ["--its", "own"]
    assert (launch.checked[-2:] == ("--its", "own")) is checked
    assert launch.with_words(()) is launch


def test_what_is_no_flag_is_not_handed_on():
    assert "qwen3-4b: no such argument" in refused("vllm", "--model", "qwen3-8b", "qwen3-4b")


# -- what it starts --------------------------------------------------------------------------------------------------


def test_a_runtime_that_is_missing_is_one_line_that_says_how_to_install_it():
    for runtime, package in {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt-llm"}.items():
        line = refusal("launch", "--runtime", runtime, "--model", "tiny", "--gpu", "h200")
        assert "is not installed here" in line and package in line and "--dry-run" in line


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A `vllm` whose parser knows the flags of the schema, and whose server starts a worker in a session of its own."""
    package = tmp_path / "site" / "vllm"
    entrypoints = package / "entrypoints"
    for folder in (package, entrypoints, entrypoints / "openai", entrypoints / "cli", package / "utils"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    flags = [f"--{name.replace('_', '-')}" for name in vllm.Serve.model_fields]
    (package / "utils" / "argparse_utils.py").write_text(
        "from argparse import ArgumentParser as FlexibleArgumentParser\n"
    )
    (entrypoints / "openai" / "cli_args.py").write_text(
        textwrap.dedent(f"""
        def make_arg_parser(parser):
            parser.add_argument("model")
            for flag in {flags!r}:
                parser.add_argument(flag)
            return parser

        def validate_parsed_serve_args(args):
            if args.port == "666":
                raise ValueError("port 666 is not for us")
        """)
    )
    (entrypoints / "cli" / "main.py").write_text(
        textwrap.dedent("""
        import signal, subprocess, sys, time
        worker = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
        print("serving", worker.pid, *sys.argv[1:], flush=True)
        time.sleep(3600)
        """)
    )
    return {**os.environ, "PYTHONPATH": f"{package.parent}:{os.environ.get('PYTHONPATH', '')}"}


def launch_vllm(environment, *arguments, ignored=()):
    words = [sys.executable, "-m", "trtllm_dflash", "launch", "--runtime", "vllm", "--model", "tiny", "--gpu", "h200"]
    return processes.start([*words, *arguments], ignored, env=environment)


def is_alive(process: Path) -> bool:
    """Whether a process of /proc runs."""
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # SIGTERM: by the next test
def test_ctrl_c_is_handed_on_and_nothing_stays(fake_vllm, number):
    process = launch_vllm(fake_vllm)
    said = process.stdout.readline().split()
    assert said[0] == "serving", process.stderr.read()
    assert said[2:4] == ["serve", str(TINY / "target")] and "--speculative-config" in said
    worker = Path("/proc", said[1])
    assert worker.exists()
    process.send_signal(number)
    assert process.wait(PATIENCE) == 128 + number
    wait_until(lambda: not is_alive(worker), "the worker is gone")


@pytest.mark.slow
def test_a_signal_that_it_was_started_deaf_to_is_not_handed_on(fake_vllm):
    """Ctrl-C on a script's terminal, and the terminal's end under nohup, are not for what runs in the background."""
    process = launch_vllm(fake_vllm, ignored=[signal.SIGINT, signal.SIGHUP])
    said = process.stdout.readline().split()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    wait_until(lambda: not is_alive(Path("/proc", said[1])), "the worker is gone")


@pytest.mark.slow
def test_what_the_runtimes_own_parser_refuses_is_one_line_and_nothing_starts(fake_vllm):
    process = launch_vllm(fake_vllm, "--port", "666")
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and output == ""
    assert "vLLM's own parser refuses this configuration, which was made for vLLM 0.26.0" in errors
    assert "port 666 is not for us" in errors and errors.count("\n") == 1


# -- Triton ----------------------------------------------------------------------------------------------------------


def test_deploy_writes_the_llmapi_model_with_the_same_keys(tmp_path):
    repository = tmp_path / "repository"
    asked = ("deploy", "--runtime", "tensorrt-llm", "--model", "gpt-oss-120b", "--tp", "8", "--gpu", "b300")
    assert "tritonserver --model-repository=" in succeeds(*asked, "--output", repository)
    written = yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    plan = plan_for(LaunchSettings(runtime="tensorrt-llm", model="gpt-oss-120b", tp=8, gpu="b300"))
    args = tensorrt_llm.llm_args(plan).model_dump(exclude_none=True)
    assert written == {
        **args,
        "model": "openai/gpt-oss-120b",
        "backend": "pytorch",
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }
    config = (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    for name in ("text_input", "streaming", "sampling_param_max_tokens", "text_output", "acceptance_rate"):
        assert f'name: "{name}"' in config
    succeeds(*asked, "--output", repository)  # the same: nothing to do
    assert "exists and differs" in refusal(*asked, "--draft-length", "4", "--output", repository)
    succeeds(*asked, "--draft-length", "4", "--output", repository, "--force")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    assert "is not a model repository of this command's" in refusal(*asked, "--output", tmp_path / "mine", "--force")


def test_the_deployed_model_is_the_one_in_the_servers_container(tmp_path):
    repository = tmp_path / "repository"
    succeeds("deploy", "--runtime", "tensorrt-llm", "--model", "tiny", "--gpu", "h200", "--output", repository)
    container = tmp_path / "container"
    container.mkdir()
    (container / "helpers.py").write_text("NAME = 'beside it'\n")
    (container / "model.py").write_text("from helpers import NAME\nclass TritonPythonModel:\n    name = NAME\n")
    folder = repository / "tensorrt_llm" / "1"
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import model; print(model.TritonPythonModel.name)"
    environment = {**os.environ, "LLMAPI_MODEL_FOLDER": str(container)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "beside it"


def test_deploy_on_a_runtime_takes_no_engine_and_no_other_runtime(tmp_path):
    asked = ("deploy", "--output", tmp_path / "x", "--model", "qwen3-8b", "--gpu", "h200")
    assert "--runtime vllm: Triton serves tensorrt-llm" in refusal(*asked, "--runtime", "vllm")
    assert "--engine: is for an engine of ours" in refusal(*asked, "--runtime", "tensorrt-llm", "--engine", "e")
    assert "--no-draft: is for an engine of ours" in refusal(*asked, "--runtime", "tensorrt-llm", "--no-draft")
    assert "--model: belongs to --runtime tensorrt-llm" in refusal(*asked)
    assert "--engine: say which engine" in refusal("deploy", "--output", tmp_path / "x")
    assert run("deploy", "--help").exit_code == 0
