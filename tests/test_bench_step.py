"""`bench step`: what it counts, launches and reports. How fast anything is is no test's matter."""

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import refusal, run, succeeds
from trtllm_dflash.bench import machine, plot, random_session, step
from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.bench.step import StepBenchSettings, open_bench
from trtllm_dflash.cost import rates
from trtllm_dflash.cost.acceptance import TREE_GAINS, ImposedAcceptance
from trtllm_dflash.cost.floor import Work, floor_seconds, step_work
from trtllm_dflash.cost.gpus import Rates
from trtllm_dflash.cost.memory import weight_bytes
from trtllm_dflash.cost.shapes import SHAPES, shape_config
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.step import Drafting

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
QUICK = ("--shape", "tiny", "--device", "cpu", "--cache-length", 16, "--rounds", 2, "--steps", 3)

# The tiny shape: hidden 64, 6 layers, 4 heads and 2 key/value heads of 16, FFN 128, vocabulary 512; 2 drafter layers.
LAYER = (64 + 2 * 32) * 64 + 64 * 64 + 2 * 128 * 64 + 128 * 64
HEAD = 512 * 64
LAYER_NORMS = 64 + 64 + 16 + 16


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    """Limits that need no measuring."""
    monkeypatch.setattr(step, "measure_rates", lambda device, dtype: Rates(copy=1e10, gemm=1e11))


def tiny(**settings):
    return shape_config(
        "tiny", **{"precision": "fp32", "tp": 1, "max_batch": 4, "max_seq_len": 200, "chunk": 8, **settings}
    )


# -- the floor -------------------------------------------------------------------------------------------------------


def test_a_plain_steps_bytes_and_operations_are_those_counted_by_hand():
    (target,) = step_work(tiny(), Drafting.OFF, batch=3, rows=1, length=100)
    weights = 6 * (LAYER + LAYER_NORMS) + 64 + HEAD
    caches = 6 * 2 * 32 * 3 * (100 + 1)
    assert target.bytes == 4 * (weights + 3 * 64 + caches)
    assert target.flops == 2 * 3 * (6 * LAYER + HEAD) + 4 * 3 * 101 * 6 * 64


def test_a_drafted_steps_bytes_and_operations_are_those_counted_by_hand():
    target, drafter = step_work(tiny(), Drafting.BLOCK, batch=2, rows=8, length=100)
    pairs = 2 * sum(100 + i + 1 for i in range(8))
    assert target.flops == 2 * 2 * 8 * (6 * LAYER + HEAD) + 4 * pairs * 6 * 64
    context, joined = 2 * 2 * 32 * 64, 64 * 2 * 64
    weights = context + joined + 64 + 2 * (LAYER + LAYER_NORMS) + 64 + HEAD
    caches = 2 * 2 * 32 * 2 * (100 + 1 + 8)
    assert drafter.bytes == 4 * (weights + 2 * 8 * 64 + caches)
    rows = 2 * 8
    assert drafter.flops == (
        2 * rows * (context + joined) + 2 * rows * 2 * LAYER + 2 * 2 * 7 * HEAD + 4 * rows * 109 * 2 * 64
    )


def test_a_context_only_step_reads_no_drafter_layer():
    target, drafter = step_work(tiny(), Drafting.CONTEXT, batch=2, rows=1, length=100)
    assert [target] == step_work(tiny(), Drafting.OFF, batch=2, rows=1, length=100)
    context, joined, norms = 2 * 2 * 32 * 64, 64 * 2 * 64, 64 + 2 * 16
    assert drafter.bytes == 4 * (context + joined + norms + 2 * 2 * 32 * 2)
    assert drafter.flops == 2 * 2 * (context + joined)


def test_a_rank_of_two_does_half_of_the_operations():
    for drafting, rows in ((Drafting.OFF, 1), (Drafting.BLOCK, 8)):
        alone, one_of_two = (step_work(tiny(tp=tp), drafting, 2, rows, 100) for tp in (1, 2))
        assert 2 * one_of_two[0].flops == alone[0].flops
        joined = 2 * 2 * rows * 64 * 2 * 64  # fc is whole on every rank
        assert all(2 * (x.flops - joined) == y.flops - joined for x, y in zip(one_of_two[1:], alone[1:], strict=True))


def test_a_tied_head_is_read_like_any_other():
    config = tiny()
    tied = config.model_copy(update={"target": config.target.model_copy(update={"tied_embeddings": True})})
    assert step_work(tied, Drafting.BLOCK, 2, 4, 50) == step_work(config, Drafting.BLOCK, 2, 4, 50)


def test_a_lighter_drafter_is_less_to_read():
    (_, full), (_, light) = (
        step_work(tiny(**lighter), Drafting.BLOCK, 2, 8, 100)
        for lighter in ({}, {"drafter_precision": "fp8", "draft_vocab": 128})
    )
    matrices = 2 * 2 * 32 * 64 + 64 * 2 * 64 + 2 * LAYER
    scales = 2 * 2 * 32 + 64 + 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64) + 128
    assert full.bytes - light.bytes == 3 * matrices + 4 * HEAD - 128 * 64 - 4 * scales
    assert full.flops - light.flops == 2 * 8 * matrices + 2 * 7 * (2 * HEAD - 128 * 64)


def test_the_floor_is_the_longer_of_memory_and_arithmetic_part_by_part():
    assert floor_seconds([Work(bytes=30, flops=10), Work(bytes=10, flops=60)], Rates(copy=10, gemm=20)) == 3 + 3


def test_the_floor_of_qwen3_8b_agrees_with_its_size():
    config = shape_config("qwen3-8b", precision="bf16", tp=1, max_batch=1, max_seq_len=2048, chunk=16)
    assert config.drafter.tap_layers == (1, 9, 17, 25, 33)
    target, drafter = step_work(config, Drafting.BLOCK, batch=1, rows=16, length=1024)
    assert target.bytes == pytest.approx(15.1e9, rel=0.02)  # the GEMMs' weights alone are 15.1 GB
    assert drafter.bytes == pytest.approx(3.4e9, rel=0.05)


# -- shapes ----------------------------------------------------------------------------------------------------------


def test_more_layers_than_a_shape_has_are_refused():
    with pytest.raises(SettingsError, match="--layers 7: tiny has 6"):
        shape_config("tiny", layers=7, precision="fp32", tp=1, max_batch=1, max_seq_len=64, chunk=8)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layers", [1, 3, None])
def test_every_shape_makes_an_engine_whose_taps_are_inside_the_target(name, layers):
    config = shape_config(name, layers=layers, precision="bf16", tp=1, max_batch=1, max_seq_len=64, chunk=8)
    assert config.drafter.block_size == SHAPES[name].block_size
    assert config.drafter.step_rows == config.block_size
    assert all(0 <= tap < config.target.layers for tap in config.drafter.tap_layers)
    assert 0 <= config.drafter.mask_token_id < config.target.vocab_size


def test_random_weights_keep_activations_finite():
    weights = random_weights(tiny(), 0, torch.device("cpu"))
    assert set(weights["model.norm.weight"].tolist()) == {1.0}
    assert weights["lm_head.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


# -- imposed acceptance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 1.5, 6.49, 15.9, 16])
def test_imposed_acceptance_gives_its_figure_for_the_whole_block_and_less_for_less_of_it(tokens):
    imposed = ImposedAcceptance(tokens, 16)
    assert sum(imposed.survival**i for i in range(16)) == pytest.approx(tokens)
    by_rows = [imposed.at(rows) for rows in range(1, 17)]
    assert by_rows[0] == 1
    assert by_rows[-1] == tokens
    assert by_rows == sorted(by_rows)


def test_half_of_the_drafts_surviving_is_worked_out():
    imposed = ImposedAcceptance(1.75, 3)  # 1 + 1/2 + 1/4
    assert imposed.survival == pytest.approx(0.5)
    assert imposed.at(2) == pytest.approx(1.5)


@pytest.mark.parametrize("tokens", [0.5, 16.1, float("nan"), float("inf")])
def test_imposed_acceptance_beyond_the_block_is_refused(tokens):
    with pytest.raises(SettingsError, match="a block of 16 rows commits 1 to 16 tokens"):
        ImposedAcceptance(tokens, 16)


def test_a_trees_acceptance_is_what_the_shipped_pairs_trees_measured_over_its_chains():
    record = json.loads((RESULTS / "draft-trees-cpu.json").read_text())["greedy"]
    for nodes, gain in TREE_GAINS.items():
        assert gain == pytest.approx(record[f"tree of {nodes}"]["over the chain's"], abs=6e-4)
        assert ImposedAcceptance(6.49, 16).of_tree(nodes) == pytest.approx(6.49 * gain)
    assert ImposedAcceptance(15.0, 16).of_tree(63) == 16  # no deeper than the block
    assert ImposedAcceptance(3, 8).of_tree(15) is None, "no such blocks were measured"


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_report_holds_every_arm_at_every_batch(tmp_path):
    file = tmp_path / "step.json"
    arguments = (*QUICK, "--batch", "2,1", "--rows", "8,1,4", "--simulate-acceptance", 3)
    text = succeeds("bench", "step", *arguments, "--json", file)
    report = json.loads(file.read_text())
    assert set(report) == {
        "command",
        "schema_version",
        "machine",
        "versions",
        "shape",
        "random_weights",
        "config",
        "target",
        "drafter",
        "session",
        "computes",
        "copy_bytes_per_second",
        "gemm_flops_per_second",
        "memory",
        "steps_per_round",
        "imposed_acceptance",
        "complete",
        "rows",
    }
    assert report["schema_version"] == 1
    assert report["complete"]
    assert report["memory"]["planned_bytes"] > 0
    assert report["memory"]["used_bytes"] is None  # of a GPU alone
    assert (report["shape"], report["random_weights"], report["session"]) == ("tiny", True, "TorchSession")
    arms = [("plain", 1), ("context only", 1), ("drafted", 4), ("drafted", 8)]
    rows = report["rows"]
    assert [(row["batch"], row["arm"], row["rows"]) for row in rows] == [(b, *arm) for b in (1, 2) for arm in arms]
    for row in rows:
        plain = next(other for other in rows if other["batch"] == row["batch"])
        assert len(row["seconds_by_round"]) == 2
        assert row["cache_length"] == 16
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["share_of_copy_rate"] == pytest.approx(row["bytes_per_second"] / 1e10)
        assert row["gap"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert row["floor_seconds"] == pytest.approx(sum(part["seconds"] for part in row["floor_parts"].values()))
        assert row["seconds_over_plain"] == pytest.approx(row["seconds"] / plain["seconds"])
        tokens = {"plain": 1, "context only": 1}.get(row["arm"], ImposedAcceptance(3, 8).at(row["rows"]))
        assert row["imposed_tokens_per_second"] == pytest.approx(row["batch"] * tokens / row["seconds"])
        speedup = tokens * plain["seconds"] / row["seconds"]
        assert row["imposed_tokens_per_second_over_plain"] == pytest.approx(speedup)
    assert text.count("drafted") == 4
    assert "imposed acceptance 3" in text
    assert "not measured" in text


def test_an_engine_with_short_pages_is_timed(tmp_path):
    engine = tmp_path / "engine"
    succeeds("build", "--model", "tiny", "--backend", "torch", "--page-size", 64, "--output", engine)
    flags = ("--batch", 2, "--rows", 16, "--cache-length", 128, "--rounds", 1, "--steps", 2, "--device", "cpu")
    succeeds("bench", "step", "--engine", engine, *flags, "--json", tmp_path / "step.json")
    assert {row["arm"] for row in json.loads((tmp_path / "step.json").read_text())["rows"]} == {"plain", "drafted"}


def test_without_imposed_acceptance_there_are_no_tokens_a_second(tmp_path):
    text = succeeds("bench", "step", *QUICK, "--batch", 1, "--json", tmp_path / "step.json")
    assert "tokens/s" not in text
    (row, *_) = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert not any("imposed" in key for key in row)


def test_steps_are_launched_as_the_scheduler_launches_them_around_the_cache_length():
    settings = StepBenchSettings(
        shape="tiny", batch=(2,), rows=(1, 4), cache_length=30, rounds=1, steps=10, device="cpu"
    )
    with open_bench(settings) as bench:
        prefills, decodes = [], []
        prefill, decode = bench.session.prefill, bench.session.decode
        bench.session.prefill = lambda call: prefills.append(call) or prefill(call)
        bench.session.decode = lambda call: decodes.append(call) or decode(call)
        bench.run()
    # One round to warm up, one that counts; in each, the arms take turns.
    kinds = [(call.drafting, call.block, call.row_counts) for call in decodes]
    turns = [(Drafting.OFF, 1, [1, 1]), (Drafting.CONTEXT, 1, [1, 1]), (Drafting.BLOCK, 4, [4, 4])]
    assert kinds == [turn for _ in range(2) for turn in turns for _ in range(10)]
    # A prefilled token at 24 leaves the slot at 25, half a round before 30.
    assert {(call.slot, call.start) for call in prefills} == {(0, 24), (1, 24)}


def test_an_engine_directory_is_timed_within_its_own_limits(tiny_engine, tmp_path):
    file = tmp_path / "step.json"
    quick = ("--rounds", 1, "--steps", 2, "--rows", 4, "--cache-length", 8, "--device", "cpu")
    succeeds("bench", "step", "--engine", tiny_engine, *quick, "--batch", 1, "--json", file)
    report = json.loads(file.read_text())
    assert (report["shape"], report["random_weights"]) == ("tiny", False)
    assert [row["arm"] for row in report["rows"]] == ["plain", "drafted"]
    assert "--batch 64" in refusal("bench", "step", "--engine", tiny_engine, "--batch", 64)
    assert "--cache-length 5000" in refusal("bench", "step", "--engine", tiny_engine, "--cache-length", 5000)
    assert "--steps 9999: slots of " in refusal("bench", "step", "--engine", tiny_engine, "--steps", 9999)
    assert "--precision bf16" in refusal("bench", "step", "--engine", tiny_engine, "--precision", "bf16")


def test_a_shape_with_a_lighter_drafter_runs(tmp_path):
    lighter = ("--drafter-precision", "fp8", "--draft-vocab", 128)
    text = succeeds("bench", "step", *QUICK, "--batch", 1, "--rows", 8, *lighter, "--json", tmp_path / "step.json")
    assert "drafter in fp8, 128 tokens drafted" in text
    drafter = json.loads((tmp_path / "step.json").read_text())["drafter"]
    assert (drafter["linear_precision"], drafter["draft_vocab_size"]) == ("fp8", 128)


def test_a_shape_is_timed_as_its_fp8_checkpoint_is_published(tmp_path):
    blocks = ("--precision", "fp8-blocks")
    assert "fp8-blocks (the rest fp32)" in succeeds("bench", "step", *QUICK, "--batch", 1, "--rows", 8, *blocks)
    limits = {"precision": "bf16", "tp": 1, "max_batch": 1, "max_seq_len": 64, "chunk": 8}
    gigabytes = [
        weight_bytes(shape_config("qwen3-coder-next", target_precision=precision, **limits)) / 1e9
        for precision in (None, "fp8", "fp8-blocks")
    ]
    assert gigabytes == pytest.approx([160, 159, 83], abs=1)  # `build --precision fp8` leaves experts as they are
    refused = refusal("bench", "step", "--shape", "gpt-oss-20b", *blocks)
    assert "--precision fp8-blocks: gpt-oss-20b is published in other few bits; leave it out" in refused


def test_ctrl_c_shows_what_is_finished(monkeypatch, tmp_path):
    def timed(self, arm, batch):
        if batch == 2:
            raise KeyboardInterrupt
        return 0.001

    monkeypatch.setattr(step.StepBench, "timed", timed)
    result = run("bench", "step", *QUICK, "--batch", "1,2", "--json", tmp_path / "step.json")
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted\n"
    assert "plain" in result.stdout
    report = json.loads((tmp_path / "step.json").read_text())
    assert not report["complete"]
    assert {row["batch"] for row in report["rows"]} == {1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give one of --engine DIR and --shape NAME"),
        (("--shape", "qwen9"), "--shape qwen9 is not known; known: qwen3-8b"),
        (("--shape", "tiny", "--engine", "somewhere"), "give one of --engine DIR and --shape NAME"),
        (("--engine", "somewhere"), "not an engine directory"),
        (("--shape", "tiny", "--rows", "1,9"), "--rows 9: the drafter's block has 8 rows"),
        (("--shape", "tiny", "--rows", "1;9"), "--rows 1;9: write positive whole numbers"),
        (("--shape", "tiny", "--batch", ""), "--batch : write positive whole numbers"),
        (("--shape", "tiny", "--batch", "0"), "--batch 0: write positive whole numbers"),
        (("--shape", "tiny", "--steps", "1"), "--steps 1"),
        (("--shape", "tiny", "--precision", "int3"), "--precision int3"),
        (("--shape", "tiny", "--tp", "3"), "--tp 3 does not divide"),
        (("--shape", "tiny", "--draft-vocab", "100"), "--draft-vocab 100: must be a multiple of 16, at most 512"),
        (("--shape", "tiny", "--drafter-precision", "int4"), "--drafter-precision int4"),
        (("--shape", "tiny", "--cache-length", "50000"), "--cache-length 50000: --shape tiny takes 40960 positions"),
        (("--shape", "tiny", "--steps", "50000"), "--steps 50000: --shape tiny takes 40960 positions"),
        (("--shape", "tiny", "--simulate-acceptance", "9"), "--simulate-acceptance 9: a block of 8 rows"),
        (("--shape", "tiny", "--json", "nowhere/step.json"), "--json nowhere/step.json: there is no folder nowhere"),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments, words, monkeypatch):
    monkeypatch.setattr("trtllm_dflash.session.launcher.launch_ranks", lambda tp, arguments: None)
    monkeypatch.setattr("trtllm_dflash.bench.step.World", lambda tp: pytest.fail("refused too late"))
    assert words in refusal("bench", "step", *arguments)


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_that_may_not_be_written_is_refused_before_steps_are_timed(flag, monkeypatch, tmp_path):
    monkeypatch.setattr("trtllm_dflash.bench.step.World", lambda tp: pytest.fail("refused too late"))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # as root, who may write anywhere, sees none
    line = refusal("bench", "step", *QUICK, flag, tmp_path / "step.png")
    assert line == f"error: {flag} {tmp_path / 'step.png'}: cannot be written (Permission denied)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused():
    assert "--device cuda" in refusal("bench", "step", *QUICK, "--device", "cuda")


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(random_session, "free_memory", lambda device: 10**6)
    monkeypatch.setattr(random_session, "random_weights", lambda *arguments: pytest.fail("allocated"))
    line = refusal("bench", "step", *QUICK, "--device", "cpu")
    assert "--shape tiny with 32 slots" in line
    assert "use a smaller --batch, --cache-length or --layers" in line


# -- the machine, the plot -------------------------------------------------------------------------------------------


def test_the_limits_are_measured_and_the_machine_is_described(monkeypatch):
    monkeypatch.setattr(rates, "_CPU_COPY", 1 << 20)
    monkeypatch.setattr(rates, "_CPU_GEMM", 64)
    monkeypatch.setattr(rates, "_SECONDS", 0.001)
    measured = rates.measure_rates(torch.device("cpu"), torch.float32)
    assert measured.copy > 0
    assert measured.gemm > 0
    assert machine.machine(torch.device("cpu"))["gpu"] is None
    assert rates.free_memory(torch.device("cpu")) > 0


def test_without_matplotlib_a_plot_is_refused_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert pip_install("plots") in refusal("bench", "step", *QUICK, "--plot", "step.png")


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the plots extra)")
    file = tmp_path / "step.png"
    succeeds("bench", "step", *QUICK, "--batch", "1,2", "--plot", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "end its name in" in refusal("bench", "step", *QUICK, "--plot", tmp_path / "step.jpeg")


def test_slots_share_rows_on_a_gpu_alone(capsys):
    settings = StepBenchSettings(shape="qwen3-0.6b", layers=1, device="cpu", batch="16", rows="8", share_rows=True)
    with pytest.raises(SettingsError, match=r"--share-rows: 9 slots and more .* on one GPU"), open_bench(settings):
        pass
