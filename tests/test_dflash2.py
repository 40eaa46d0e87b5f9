"""DFlash 2, DSpark and windowed drafters against the published equations, written apart in `tests.drafters`."""

import shutil
from itertools import accumulate

import pytest
import torch

from tests.checkpoints import edit_config, edit_tensors, make_target
from tests.conftest import TINY, build_tiny, refusal
from tests.drafters import (
    KINDS,
    PlainSecond,
    make_dflash2,
    make_dspark,
    make_kind,
    make_shipped_second,
    window_layers,
)
from tests.family_checks import on_ranks
from tests.rank_replies import replies
from tests.stub_kernels import needs_cc, stub_library
from tests.test_drafter import first_drafts
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.export import export
from trtllm_dflash.build.planning import plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.cost.floor import step_work
from trtllm_dflash.errors import CheckpointError, EngineError, SettingsError
from trtllm_dflash.kernels import LIBRARY_VARIABLE
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.choice import find_kernels
from trtllm_dflash.step import Drafting


def load(target, drafter, **settings):
    return LLM.from_pretrained(str(target), str(drafter), precision="fp32", device="cpu", max_seq_len=128, **settings)


@pytest.mark.parametrize("name", [*KINDS, "dspark, speculators, reduced"])
def test_the_first_block_is_what_the_equations_give(name, tmp_path):
    target = make_target(tmp_path / "target")
    folder = make_kind(name, tmp_path / "drafter", target)
    llm, plain = load(target, folder), PlainSecond(folder)
    assert llm.config.block_size == 8 + plain.from_anchor
    text = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    for length in (1, 60):
        bonus, drafts = first_drafts(llm, text[:length])
        assert [drafts] == plain.drafts(target, [*text[:length], bonus], llm.config.block_size - 1)


def test_the_likeliest_tokens_are_enough_for_dspark(tmp_path):
    """DSpark's bias is for the whole vocabulary, and ours for the 16 likeliest tokens: one of them is chosen."""
    target = make_target(tmp_path / "target")
    folder = make_dspark(tmp_path / "drafter", target, scale=1.0)
    llm, plain = load(target, folder), PlainSecond(folder)
    plain.whole = True
    prompt = list(range(20, 60))
    bonus, drafts = first_drafts(llm, prompt)
    assert [drafts] == plain.drafts(target, [*prompt, bonus], 8)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The shipped pair's drafter, made a DFlash 2 one that drafts a little otherwise: (folder, engine)."""
    folder = make_shipped_second(tmp_path_factory.mktemp("second") / "drafter")
    engine = folder.parent / "engine"
    pair = {"name": "second", "target": str(TINY / "target"), "drafter": str(folder)}
    build(BuildSettings(**pair, precision="fp32", max_seq_len=512, max_batch=3), engine)
    return folder, engine


def assert_accepted_as_drafted(plain, prompt, reply):
    """Each step but the last accepts as many tokens as the equations' drafts have right."""
    ids = prompt + reply.token_ids
    before = list(accumulate(reply.accepted_per_step, lambda tokens, accepted: tokens + accepted + 1, initial=1))
    ends = [len(prompt) + tokens for tokens in before[:-1]]
    blocks = plain.drafts(TINY / "target", ids, 15, ends)
    for drafts, end, accepted in list(zip(blocks, ends, reply.accepted_per_step, strict=True))[:-1]:
        assert drafts[:accepted] == ids[end : end + accepted]
        assert accepted == 15 or drafts[accepted] != ids[end + accepted]


def test_what_is_accepted_of_every_later_block_is_what_the_equations_give(shipped):
    folder, engine = shipped
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM.load(engine, "cpu") as llm:
        prompt = llm.encode([{"role": "user", "content": read_prompts(1)["arithmetic"][0]}])
        reply, plainly = (llm.generate([prompt], params, draft)[0] for draft in (True, False))
    assert reply.token_ids == plainly.token_ids
    assert_accepted_as_drafted(PlainSecond(folder), prompt, reply)
    assert sum(reply.accepted_per_step) > 8, "the drafter no longer drafts well enough to show anything"


@pytest.mark.parametrize("name", ["dflash2", "dspark, gated"])
def test_a_slot_drafts_alone_as_in_a_batch_and_the_text_is_plain(name, tmp_path):
    # A vocabulary of 16: a drafter that knows nothing is still right now and then, so blocks are accepted in part.
    target = make_target(tmp_path / "target", vocab=16)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10] * 6]
    survived = 0
    with load(target, make_kind(name, tmp_path / "drafter", target), max_batch=3) as llm:
        for params in (SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.9, seed=3)):
            drafted, plain = llm.generate(prompts, params), llm.generate(prompts, params, draft=False)
            assert [reply.token_ids for reply in drafted] == [reply.token_ids for reply in plain]
            alone = [llm.generate([prompt], params)[0] for prompt in prompts]
            assert [reply.accepted_per_step for reply in drafted] == [reply.accepted_per_step for reply in alone]
            survived += sum(sum(reply.accepted_per_step) for reply in drafted)
    assert survived > 0


@pytest.mark.slow
@pytest.mark.principal("dflash2-16")
@pytest.mark.parametrize(("name", "vocab"), [("dflash2", 16), ("dspark, speculators, reduced", 64)])
def test_two_ranks_draft_as_one(name, vocab, tmp_path):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10] * 6]
    target = make_target(tmp_path / "target", vocab=vocab)
    drafter = make_kind(name, tmp_path / "drafter", target)
    with load(target, drafter) as llm:
        expected = replies(llm, prompts)
    assert any(count for said in expected for _, accepted in said for count in accepted)
    assert on_ranks(target, drafter, 2, lambda llm: replies(llm, prompts)) == expected


# -- windows of any drafter --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_drafter_is_given_windows_and_drafts_as_one_that_has_them(tmp_path):
    build_tiny(tmp_path / "engine", draft_window=64)
    shutil.copytree(TINY / "drafter", tmp_path / "drafter")
    window_layers(tmp_path / "drafter", [64, 64], is_causal=False)
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    with LLM.load(tmp_path / "engine", "cpu") as llm:
        assert llm.config.drafter is not None and llm.config.drafter.windows == (64, 64)
        prompt = llm.encode([{"role": "user", "content": read_prompts(1)["story"][0]}])
        reply, plainly = (llm.generate([prompt], params, draft)[0] for draft in (True, False))
    assert reply.token_ids == plainly.token_ids
    assert_accepted_as_drafted(PlainSecond(tmp_path / "drafter"), prompt, reply)
    assert sum(reply.accepted_per_step) >= 64  # of 95; 75 without windows


def test_a_window_keeps_smaller_ones_and_is_no_smaller_than_the_block(tmp_path):
    target = make_target(tmp_path / "target")
    drafter = make_kind("windows", tmp_path / "drafter", target)
    pair = open_pair(target, drafter)

    def planned(**settings):
        values = {"name": "x", "target": str(target), "drafter": str(drafter), "precision": "fp32", **settings}
        return plan_engine(pair, BuildSettings(**values)).config

    config = planned(draft_window=40, max_seq_len=256)
    assert config.drafter is not None and config.drafter.windows == (12, 40, 12)
    whole, narrow = (sum(work.bytes for work in step_work(c, Drafting.BLOCK, 1, 8, 200)) for c in (planned(), config))
    assert narrow < whole
    with pytest.raises(SettingsError, match="--draft-window 4: give at least the drafter's block of 8"):
        planned(draft_window=4)
    assert "there is no drafter" in refusal("build", "--target", target, "--draft-window", 64, "--precision", "fp32")


@needs_cc
def test_on_gpus_our_kernels_compute_their_flat_rows_which_no_slots_share(tmp_path, monkeypatch):
    monkeypatch.setenv(LIBRARY_VARIABLE, str(stub_library(tmp_path)))
    target = make_target(tmp_path / "target", heads=4, head_size=64)
    for name in ("dflash2", "dspark", "anchor", "windows"):
        pair = open_pair(target, make_kind(name, tmp_path / name, target, head_size=64))
        values = {"name": "x", "target": str(target), "drafter": "y", "precision": "bf16"}
        config = plan_engine(pair, BuildSettings(**values)).config
        library, why = find_kernels(config, "auto", (9, 0))
        assert library is not None and why == "heads of 64 on SM90"
        assert config.may_share_rows == (name == "windows")


def test_a_chain_s_choice_makes_no_trees(tmp_path):
    target = make_target(tmp_path / "target")
    with pytest.raises(SettingsError, match="--draft-tree 15: DFlash 2 and DSpark draft chains alone; leave it out"):
        load(target, make_dspark(tmp_path / "drafter", target), draft_tree=15)


# -- checkpoints that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 24}, "conv_group_size 24 does not divide 64"),
        ({"conv_kernel_size": 9}, "conv_kernel_size 9 is larger than the block of 8"),
        ({"conv_kernel_size": 3}, "attention_conv.base_kernel"),
        ({"selector_top_k": 129}, "selector_top_k 129 exceeds the vocabulary of 128"),
        ({"selector_rank": None}, "selector_rank is missing"),
        ({"output_multiplier": -1.0}, "multiplier: Input should be greater than 0"),
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported here"),
        ({"sliding_window": 4}, "sliding_window 4 is smaller than the block of 8"),
        ({"is_causal": "no"}, "is_causal 'no' is not true or false"),
        ({"use_sliding_window": False}, "use_sliding_window is false, but layer_types has sliding_attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must say"),
    ],
)
def test_a_dflash_2_drafter_that_contradicts_itself_is_refused(changes, message, tmp_path):
    target = make_target(tmp_path / "target")

    def change(raw):
        for key, value in changes.items():
            place = raw["dflash_config"] if key in raw["dflash_config"] or key == "sample_from_anchor" else raw
            place[key] = value

    folder = edit_config(make_dflash2(tmp_path / "drafter", target), change)
    with pytest.raises(CheckpointError) as caught:
        open_drafter(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_misshapen_tensors_of_both_are_named(tmp_path):
    target = make_target(tmp_path / "target")
    second, spark = make_dflash2(tmp_path / "second", target), make_dspark(tmp_path / "spark", target)
    edit_tensors(second, lambda tensors: tensors.pop("candidate_selector.successor_codebook"))
    with pytest.raises(CheckpointError, match=r"missing: candidate_selector\.successor_codebook"):
        open_drafter(second)
    edit_config(spark, lambda raw: raw.update(markov_head_type="rnn"))
    with pytest.raises(CheckpointError, match="markov_head_type 'rnn' is not supported; supported: vanilla, gated"):
        open_drafter(spark)
    edit_config(spark, lambda raw: raw.update(markov_head_type="vanilla", confidence_head_with_markov=False))
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.weight is \[1, 72\] instead of \[1, 64\]"):
        open_drafter(spark)


def test_dflash_2_is_exported_and_dspark_is_not(shipped, tmp_path):
    _, engine = shipped
    assert export(engine, tmp_path / "export")
    assert "candidate_selector.successor_codebook" in CheckpointFolder.open(tmp_path / "export" / "drafter").tensors
    target = make_target(tmp_path / "target")
    pair = {"name": "x", "target": str(target), "drafter": str(make_dspark(tmp_path / "spark", target))}
    build(BuildSettings(**pair, precision="fp32", max_seq_len=64), tmp_path / "engine")
    with pytest.raises(EngineError, match="a DSpark drafter is not written back; use its checkpoint itself"):
        export(tmp_path / "engine", tmp_path / "other")
    with pytest.raises(SettingsError, match="--draft-vocab 64: a DFlash 2 or DSpark drafter chooses among its whole"):
        plan_engine(open_pair(target, tmp_path / "spark"), BuildSettings(**pair, precision="fp32", draft_vocab=64))
