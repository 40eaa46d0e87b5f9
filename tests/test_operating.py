"""`build --plan --at`: a node's throughput at a speed for each user, plain, with DFlash and with EAGLE-3."""

import pytest

from tests.conftest import refusal, succeeds
from trtllm_dflash.build.operating import OperatingComparison, OperatingPlan
from trtllm_dflash.build.plan import BuildPlan
from trtllm_dflash.catalog import load_catalog
from trtllm_dflash.cost.eagle3 import Eagle3Count, Eagle3Draft
from trtllm_dflash.cost.gpus import GPUS
from trtllm_dflash.cost.shapes import shape_config

PLAN = ("build", "--plan", "--model", "gpt-oss-120b", "--gpu", "b300", "--acceptance", 5.4)


def planned(*arguments, command=PLAN):
    return OperatingPlan.model_validate_json(succeeds(*command, *arguments, "--json"))


def test_a_node_is_planned_at_speeds_that_plain_decoding_reaches_and_at_one_that_it_does_not(tmp_path):
    plot = tmp_path / "plan.png"
    command = (*PLAN, "--at", "400,640", "--eagle3-acceptance", 3.2, "--max-batch", 80)
    text = succeeds(*command, "--plot", plot)
    assert "cannot reach it" in text and "published at 500 to 600 tokens/s/user: over 15x plain, 1.5x EAGLE-3" in text
    assert plot.read_bytes()[:4] == b"\x89PNG"
    without = succeeds(*PLAN, "--at", "400", "--max-batch", 80)
    assert ["EAGLE-3" in each.split("fastest")[0] for each in (text, without)] == [True, False]
    plan = planned(command=command)
    slow, fast = plan.points
    assert [point.tokens_per_second_per_user for point in plan.points] == [400, 640]
    assert fast.best["plain"] is None and plan.fastest["plain"] < 640
    assert slow.over("DFlash", "plain") > 7 and fast.over("DFlash", "plain") is None
    assert fast.over("DFlash", "EAGLE-3") > 1.2
    for point in plan.points:
        for method, best in point.best.items():
            if best is None:
                continue
            assert best.method == method and best.tp * best.replicas == plan.gpus == 8
            assert best.tokens_per_second_per_user >= point.tokens_per_second_per_user
            assert best.tokens_per_second == pytest.approx(
                best.replicas * best.batch * best.tokens_per_step / best.seconds
            )
            on_it = [each for each in plan.frontier[method] if each == best]
            better = [each for each in plan.frontier[method] if each.tokens_per_second > best.tokens_per_second]
            assert on_it and all(each.tokens_per_second_per_user < point.tokens_per_second_per_user for each in better)


def test_its_steps_are_those_of_the_plan_of_one_engine():
    plan = planned("--at", "400", "--tp", 4, "--max-batch", 32)
    engine = BuildPlan.model_validate_json(succeeds(*PLAN, "--tp", 4, "--max-batch", 32, "--json"))
    seconds = {(point.arm, point.batch, point.drafts): point.seconds for point in engine.points}
    operations = [*plan.frontier["plain"], *plan.frontier["DFlash"]]
    compared = [
        (each.seconds, seconds[arm, each.batch, each.drafts])
        for each in operations
        if (arm := "plain" if each.method == "plain" else "draft", each.batch, each.drafts) in seconds
    ]
    assert len(compared) >= 5
    assert all(one == pytest.approx(other, rel=1e-3) for one, other in compared)
    assert {each.tp for each in operations} == {4} and max(each.batch for each in operations) == 32


def test_eagle3s_chain_may_be_shorter_and_its_tree_is_what_it_is():
    chain = planned("--at", "400", "--tp", 8, "--eagle3-acceptance", 3, "--eagle3-drafts", 4)
    assert chain.eagle3_drafts == "a chain of 4"
    assert {each.drafts for each in chain.frontier["EAGLE-3"]} <= {1, 2, 3, 4}
    tree = planned("--at", "400", "--tp", 8, "--eagle3-acceptance", 3, "--eagle3-drafts", "8x10x60")
    assert {each.drafts for each in tree.frontier["EAGLE-3"]} == {60}
    assert all(each.tokens_per_step == 3 for each in tree.frontier["EAGLE-3"])
    # Sixty rows for each slot cost a mixture of experts more than they bring.
    assert tree.fastest["EAGLE-3"] < chain.fastest["EAGLE-3"]


def test_eagle3s_drafter_weighs_what_published_ones_do():
    config = shape_config("llama-3.1-8b", precision="bf16", tp=1, max_batch=1, max_seq_len=64, chunk=8)
    count = Eagle3Count(config)
    hidden, columns = 4096, 14336
    attention = 2 * hidden * (32 + 2 * 8) * 128 + 32 * 128 * hidden
    assert count.bytes == 2 * (attention + 3 * hidden * columns + 32000 * hidden + 3 * hidden * hidden)
    first, *others = count.parts(Eagle3Draft(3, 1, 4), batch=2, length=100)
    assert [part.rows for part in (first, *others)] == [8, 2, 2]
    assert [part.rows for part in count.parts(Eagle3Draft(8, 10, 61), 2, 100)] == [18] + [20] * 7


@pytest.mark.principal("qwen3-8b", "gpt-oss-120b", "qwen3.5-27b", "kimi-k2.5", "qwen3-coder-30b-a3b", "gemma-4-31b")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(load_catalog().keys() - {"tiny", "tiny-hybrid"}))
def test_every_pair_is_planned_at_a_speed(name):
    command = ("build", "--plan", "--model", name, "--gpu", "b300", "--acceptance", 3, "--tp", 8, "--max-batch", 4)
    if name.startswith("minimax"):
        command += ("--ep",)  # an eighth of its columns is no whole number of FP8 blocks
    plan = planned("--at", "10", "--eagle3-acceptance", 2, command=command)
    (point,) = plan.points
    assert all(best is not None and best.batch == 4 for best in point.best.values())


def test_without_a_gpu_all_are_compared():
    command = ("build", "--plan", "--model", "qwen3-8b", "--acceptance", 5, "--max-batch", 2, "--at", "10")
    found = OperatingComparison.model_validate_json(succeeds(*command, "--json"))
    assert {plan.gpu for plan in found.plans} | found.refused.keys() == GPUS.keys()
    assert "b300" in succeeds(*command)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--at", "fast"), "--at fast: write positive numbers, such as 100,200"),
        (("--at", "500", "--eagle3-acceptance", 5), "--eagle3-acceptance 5: a block of 4 rows commits 1 to 4 tokens"),
        (("--at", "500", "--eagle3-drafts", 4), "--eagle3-drafts: say with --eagle3-acceptance"),
        (("--at", "500", "--eagle3-acceptance", 2, "--eagle3-drafts", "3x"), "--eagle3-drafts 3x: write the drafts of"),
        (("--at", "5", "--eagle3-acceptance", 2, "--eagle3-drafts", "2x2x9"), "--eagle3-drafts 2x2x9: write the"),
        (("--at", "5", "--eagle3-acceptance", 2, "--eagle3-drafts", 65), "--eagle3-drafts 65: write the drafts of"),
        (("--at", "5", "--eagle3-acceptance", 2, "--eagle3-drafts", "65x1x65"), "8x10x60; at most 64 passes"),
        (("--at", "5", "--eagle3-acceptance", 2, "--eagle3-drafts", "2x99999x9"), "--eagle3-drafts 2x99999x9: write"),
        (("--eagle3-acceptance", 3), "--eagle3-acceptance: goes with --at"),
        (("--plot", "p.png"), "--plot: goes with --at"),
        (("--at", "500", "--plot", "p.jpeg"), "--plot p.jpeg: end its name in .png"),
        (("--at", "500", "--plot", "/nowhere/p.png"), "--plot /nowhere/p.png: cannot be written"),
        (("--at", "500", "--tp", 3), "--tp 3 does not divide"),
        (("--at", "500", "--tp", 16), "--tp 16: --at plans a node of 8 GPUs; at most 8"),
    ],
)
def test_what_cannot_be_planned_at_a_speed_is_refused(arguments, words):
    assert words in refusal(*PLAN, *arguments)


def test_a_speed_needs_an_acceptance_a_plan_and_a_gpu_that_fits():
    pair = ("build", "--model", "gpt-oss-120b")
    assert "--at: goes with --plan" in refusal(*pair, "--at", 500)
    assert "--at: say with --acceptance" in refusal(*pair, "--plan", "--gpu", "b300", "--at", 500)
    too_small = refusal(*pair, "--plan", "--gpu", "rtx-4090", "--at", 5, "--acceptance", 5, "--tp", 1)
    assert "more than rtx-4090 has" in too_small
    assert "--plot: is drawn for one GPU" in refusal(*pair, "--plan", "--acceptance", 5, "--at", 5, "--plot", "p.png")
