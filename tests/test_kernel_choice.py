"""Which kernels compute an engine on a GPU: ours wherever they can, or a refusal; never torch's in silence."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import TINY, refusal, run, succeeds
from tests.stub_kernels import needs_cc, stub_library
from trtllm_dflash import LLM, kernels
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.doctor import find_kernels as diagnosed
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.step_times import FILE, step_times
from trtllm_dflash.session import choice
from trtllm_dflash.session.choice import Choice, find_kernels, find_parts
from trtllm_dflash.session.trees import with_trees

HOPPER, ADA = (9, 0), (8, 9)


@pytest.fixture
def library(monkeypatch):
    """Makes the library at a path the one that is loaded."""
    return lambda path: monkeypatch.setenv(kernels.LIBRARY_VARIABLE, str(path))


@pytest.fixture
def config(tiny):
    """An engine of the shipped pair in BF16, whose heads our kernels have."""
    return tiny.config.model_copy(update={"precision": "bf16"})


def unusual(config):
    """The same with heads of 80."""
    return config.model_copy(update={"target": config.target.model_copy(update={"head_size": 80})})


@needs_cc
def test_our_kernels_compute_what_they_support(config, library, tmp_path):
    library(stub_library(tmp_path))
    found, why = find_kernels(config, "auto", HOPPER)
    assert str(found) == f"our CUDA kernels {kernels.ABI_VERSION}"
    assert found.path == tmp_path / "libdflash_kernels.so"
    assert why == f"heads of {config.target.head_size} on SM90"


def test_an_engine_that_they_support_does_not_load_without_them(config, library, tmp_path):
    library(tmp_path / "nothing.so")
    with pytest.raises(EngineError) as refusal:
        find_kernels(config, "auto", HOPPER)
    said = str(refusal.value)
    assert "there is no such file" in said and "make kernels" in said and said.endswith("--kernels torch")
    assert "\n" not in said


@needs_cc
def test_nor_with_kernels_of_another_interface(config, library, tmp_path):
    library(stub_library(tmp_path, version=1))
    with pytest.raises(EngineError, match=r"interface 1, not \d+: run `make kernels`; or, slower, .*--kernels torch"):
        find_kernels(config, "auto", HOPPER)


@needs_cc
def test_nor_with_kernels_for_other_gpus(config, library, tmp_path):
    library(stub_library(tmp_path, architectures="100-real,120"))
    with pytest.raises(
        EngineError, match=r"are for 100-real, 120, not for SM90: run `make kernels`; .*--kernels torch"
    ):
        find_kernels(config, "auto", HOPPER)


def test_torchs_compute_where_that_is_said_though_ours_are_missing(config, library, tmp_path):
    library(tmp_path / "nothing.so")
    assert find_kernels(config, "torch", HOPPER) == (None, "as --kernels torch says")


@pytest.mark.parametrize(
    ("change", "capability", "why"),
    [
        (lambda config: config.model_copy(update={"precision": "fp32"}), HOPPER, "in BF16 and FP16, not in float32"),
        (unusual, HOPPER, "heads of 64 and 128, not of 80"),
        (lambda config: config.model_copy(update={"block_size": 33}), HOPPER, "blocks of at most 32 rows, not of 33"),
        (lambda config: config.model_copy(update={"max_batch": 1742}), HOPPER, "at most 1,741 slots, not of 1,742"),
        (lambda config: config, ADA, "for SM90 and later, not for SM89"),
    ],
    ids=["type", "heads", "block", "slots", "gpu"],
)
def test_what_ours_do_not_compute_is_torchs_with_the_reason(config, library, tmp_path, change, capability, why):
    library(tmp_path / "nothing.so")
    found, said = find_kernels(change(config), "auto", capability)
    assert found is None
    assert why in said


@needs_cc
def test_exact_rows_are_our_kernels_on_hopper_with_the_drafts_of_auto(config, library, tmp_path):
    library(stub_library(tmp_path))
    found, _ = find_kernels(with_trees(config, "auto", torch.device("cuda")), "exact", HOPPER)
    assert found is not None


@pytest.mark.parametrize(
    ("change", "capability", "why"),
    [
        ({"precision": "fp32"}, HOPPER, "not in fp32, in BF16 and FP16 alone"),
        ({"tp": 3}, HOPPER, "not on 3 ranks, on 2, 4 and 8 alone"),
        ({"draft_tree": 15, "block_size": 17}, HOPPER, "not with --draft-tree of blocks of 17, of 16 at most"),
        ({}, (10, 0), "not on SM100, on Hopper alone"),
    ],
    ids=["type", "ranks", "trees", "gpu"],
)
def test_where_rows_are_not_exact_that_is_refused_in_one_line(config, change, capability, why):
    with pytest.raises(EngineError, match=f"^--kernels exact: {why}; leave it out$"):
        find_kernels(config.model_copy(update=change), "exact", capability)


@needs_cc
def test_parts_of_what_ours_do_not_compute_as_a_whole_are_theirs(config, library, tmp_path):
    library(stub_library(tmp_path))
    found = find_parts(unusual(config), "auto", HOPPER)
    assert str(found) == f"our CUDA kernels {kernels.ABI_VERSION}"
    in_fp32 = config.model_copy(update={"precision": "fp32"})
    others = (unusual(config), "torch", HOPPER), (in_fp32, "auto", HOPPER), (config, "auto", ADA)
    for changed, asked, capability in others:
        assert find_parts(changed, asked, capability) is None


def test_nor_does_an_engine_of_such_parts_load_without_them(config, library, tmp_path):
    library(tmp_path / "nothing.so")
    with pytest.raises(EngineError, match=r"there is no such file: .*--kernels torch"):
        find_parts(unusual(config), "auto", HOPPER)


def test_tensorrt_plans_have_theirs_compiled_in(tiny_engine, tmp_path):
    engine = shutil.copytree(tiny_engine, tmp_path / "plans")
    values = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**values, "backend": "tensorrt"}))
    with pytest.raises(SettingsError, match="--kernels torch: this engine is TensorRT plans"):
        LLM.load(engine, "cpu", kernels="torch")


def test_every_command_that_loads_an_engine_takes_the_flag(tiny_engine):
    words = "--engine", tiny_engine, "--prompt", "1 + 1 =", "--max-tokens", 1, "--device", "cpu"
    assert succeeds("generate", *words, "--kernels", "torch") == succeeds("generate", *words)
    assert "--kernels goes with --engine or --shape" in refusal(
        "sweep", "--url", "x:1", "--kernels", "torch", "--output", tiny_engine.parent / "sweep"
    )
    for command in (("generate",), ("deploy",), ("serve",), ("bench", "step"), ("sweep",), ("demo",)):
        assert "--kernels" in succeeds(*command, "--help")
        assert "'ours' is not one of 'auto', 'exact', 'torch'" in run(*command, "--kernels", "ours").stderr


# -- who says which --------------------------------------------------------------------------------------------------


def test_loading_logs_what_computes_and_why_once(tiny_engine, caplog):
    with caplog.at_level(logging.INFO, "trtllm_dflash"), LLM.load(tiny_engine, "cpu"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: torch on cpu: precision fp32, attention torch, products torch, experts none, exact yes "
        "(our CUDA kernels need a GPU)"
    ]


def test_a_reader_sees_that_with_verbose(tiny_engine):
    arguments = "generate", "--engine", tiny_engine, "--prompt", "1 + 1 =", "--max-tokens", 1, "--device", "cpu"
    assert "attention torch" in run("--verbose", *arguments).stderr
    assert "attention torch" not in run(*arguments).stderr


def test_a_pair_from_its_checkpoints_says_so_too(caplog):
    folders = str(TINY / "target"), str(TINY / "drafter")
    with caplog.at_level(logging.INFO, "trtllm_dflash"), LLM.from_pretrained(*folders, precision="bf16", device="cpu"):
        pass
    assert "precision bf16, attention torch" in caplog.text


def test_a_choice_names_the_library_and_not_in_a_metric(tmp_path):
    ours = "our CUDA kernels 8"
    choice = Choice("torch, captured", "NVIDIA H200", "bf16", ours, ours, "torch", "heads of 128 on SM90", tmp_path)
    assert str(choice).startswith("torch, captured on NVIDIA H200: precision bf16, attention our CUDA kernels 8, ")
    assert str(choice).endswith(f"experts torch, exact no (heads of 128 on SM90; library {tmp_path})")
    assert str(tmp_path) not in str(choice.labels)


def test_a_metric_says_what_computes(tiny):
    (sample,) = [s for s in Scheduler(tiny.session).statistics.samples() if s.name == "dflash_kernels_info"]
    processor, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    assert sample.value == 1
    assert sample.labels == {
        "backend": "torch",
        "precision": "fp32",
        "attention": "torch",
        "products": "torch",
        "experts": "none",
        "exact": f"torch {torch.__version__}, {processor}, threads {threads}, tp 1",
    }


def test_step_times_of_other_kernels_are_not_taken(tiny, tmp_path, monkeypatch):
    most = tiny.config.max_batch
    measured = {(slots, 0): 1.0 for slots in (1, most)}
    monkeypatch.setattr("trtllm_dflash.runtime.step_times.measure", lambda session, lengths, shared: measured)
    step_times(tiny.session, tmp_path, [0])
    kept = json.loads((tmp_path / FILE).read_text())
    kept["times"] = {"drafting": [[slots, 0, 0, 2.0] for slots in (1, most)]}
    (tmp_path / FILE).write_text(json.dumps(kept))
    assert step_times(tiny.session, tmp_path, [0]) == {(slots, 0, 0): 2.0 for slots in (1, most)}
    kept["machine"]["attention"] = "our CUDA kernels 7"
    (tmp_path / FILE).write_text(json.dumps(kept))
    assert step_times(tiny.session, tmp_path, [0]) == {(slots, 0, 0): 1.0 for slots in (1, most)}


# -- the doctor ------------------------------------------------------------------------------------------------------


@needs_cc
def test_the_doctor_names_the_kernels_and_the_gpus_that_they_are_for(library, tmp_path):
    library(stub_library(tmp_path, architectures="90a-real,120"))
    finding = diagnosed("CUDA kernels", {HOPPER})
    assert finding.present
    assert finding.detail == f"{kernels.ABI_VERSION} ({tmp_path / 'libdflash_kernels.so'}) for SM90a-real, SM120"


@needs_cc
def test_the_doctor_sees_kernels_that_are_not_for_this_gpu(library, tmp_path):
    library(stub_library(tmp_path, architectures="120"))
    finding = diagnosed("CUDA kernels", {HOPPER})
    assert not finding.present
    assert finding.detail.endswith("are for 120, not for SM90")
    assert "--kernels torch" in finding.cost
    assert finding.remedy == "run `make kernels`"


def test_without_a_gpu_missing_kernels_cost_nothing(library, tmp_path):
    library(tmp_path / "nothing.so")
    finding = diagnosed("CUDA kernels", set())
    assert not finding.present
    assert finding.cost.startswith("nothing here")


@pytest.mark.parametrize("asked", ["fast", None, 1])
def test_kernels_that_there_are_not_are_refused_on_a_cpu_too(asked):
    for load in (LLM.load, lambda path, kernels: LLM.from_pretrained(path, None, kernels=kernels)):
        with pytest.raises(SettingsError) as caught:
            load("nowhere", kernels=asked)
        assert str(caught.value) == f"kernels {asked!r}: choose auto, exact or torch"


@pytest.mark.parametrize(
    ("taken", "said"),
    [({0, 1, 35}, "ours"), ({0, 35}, "ours and torch"), (set(), "torch")],
    ids=["all", "some", "none"],
)
def test_who_computes_experts_is_said_of_all_layers(taken, said, monkeypatch):
    """One layer's scales may be what our kernels do not take."""
    config = shape_config("gpt-oss-120b", precision="bf16", tp=1, max_batch=1, max_seq_len=1024, chunk=64)
    weights = {f"model.layers.{i}.mlp.experts.down_proj.tiles": torch.empty(0) for i in (0, 1, 35)}
    prefixes = {f"model.layers.{i}.mlp." for i in taken}
    monkeypatch.setattr(choice, "takes_experts", lambda layer, *_: layer.prefix in prefixes)
    assert choice.experts_of(config, weights, SimpleNamespace(size=1, rank=0), "ours") == said
