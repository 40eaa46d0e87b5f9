"""Hybrids in captured steps: the tokens of the CPU in FP32, drafted as plain, and near-ties in 16 bits.

In FP32 rows lie in [slots, rows]; in 16 bits they are flat, and caches are pages.
"""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_config, edit_tensors, make_drafter
from tests.conftest import HYBRID
from tests.gpu.test_cuda import NEAR_TIE, acceptance, shipped_prompts, tokens
from tests.gpu.test_kernels import why_not
from tests.hybrid_checkpoints import LAYOUTS, make_hybrid
from tests.near_ties import all_logits, assert_each_is_nearly_the_largest
from tests.quantized import quantize_folder
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.calls import Decode, Piece, Prepare, Step
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.step import Drafting

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

CHANCE = random.Random(4)
PROMPTS = [[CHANCE.randrange(15) for _ in range(n)] for n in (3, 40, 90, 17)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
HALF_LAYOUTS = "qwen3_next", "qwen3_5_text", "qwen3_5_moe, stacked"
#: The published sizes of heads, which our kernels have.
SHAPE = {
    "hidden_size": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 8,
    "head_dim": 256,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A hybrid and its drafter, by layout."""
    made = {}

    def make(layout, router=1, stored=None, **shape):
        """`router`: what its routers' weights are divided by; `stored`: the layout of `METHODS` of its experts."""
        key = layout, router, stored, tuple(shape.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("pair")
            target = make_hybrid(folder / "target", layout, vocab=16, **shape)
            if shape:  # as published: in BF16
                (path,) = target.glob("*.safetensors")
                save_file({name: x.bfloat16() for name, x in load_file(path).items()}, path, {"format": "pt"})
            if shape and ("moe" in layout or layout == "qwen3_next"):
                # All experts: another choice of them would be no near-tie of the logits.
                edit_config(target, lambda raw: raw.get("text_config", raw).update(num_experts_per_tok=8))
                edit_tensors(target, lambda tensors: _divide(tensors, ".mlp.gate.weight", router))
            if stored is not None:
                quantize_folder(target, stored, within=".mlp.")
            # Of heads that our kernels have, where the target's are.
            made[key] = target, make_drafter(folder / "drafter", target, block_size=16, head_size=64 if shape else 16)
        return made[key]

    return make


def _divide(tensors, ending, by):
    names = [name for name in tensors if name.endswith(ending)]
    assert names
    tensors.update({name: tensors[name] / by for name in names})


def load(folders, device="cuda", precision="fp32", **settings):
    limits = {"max_batch": 3, "max_seq_len": 256, **settings}
    return LLM.from_pretrained(*folders, precision=precision, device=device, **limits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_logit_is_the_cpus(layout, pair):
    ids = (PROMPTS[2] + PROMPTS[1])[:48]
    with load(pair(layout)) as gpu, load(pair(layout), "cpu") as cpu:
        errors = _errors(all_logits(gpu, ids), all_logits(cpu, ids))
    assert errors.max() < 1e-4, errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafted_and_plain_text_are_the_cpus_in_fp32(layout, pair):
    """More prompts than slots; captured steps, and pieces of prompts between them."""
    with load(pair(layout)) as gpu, load(pair(layout), "cpu") as cpu:
        assert isinstance(gpu.session, CudaSession)
        assert "gated delta nets by our CUDA kernels" in gpu.session.choice.why
        expected = tokens(cpu.generate(PROMPTS, PARAMS, draft=False))
        assert tokens(gpu.generate(PROMPTS, PARAMS, draft=False)) == expected
        drafted = gpu.generate(PROMPTS, PARAMS)
        assert tokens(drafted) == expected
        print(layout, [len(c.token_ids) / c.steps for c in drafted])


@pytest.mark.parametrize("layout", HALF_LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_each_token_is_fp32s_or_a_near_tie(layout, precision, pair):
    """Drafted as plain. Routers' logits deviate by 1: where by 4, as `make_hybrid` has them, one expert or another has
    nearly all of a row, and rounding to BF16 moves one token in 200 by more than this bound, on a CPU too.
    """
    folders = pair(layout, router=4, **SHAPE)
    with load(folders, precision=precision) as llm:
        assert llm.session.library is not None and llm.session.limits.mixes and not llm.session.paging.linear
        # Nets' two linears are one, and products norm their rows.
        assert (
            sum(".in_proj+" in name for name in llm.session.weights) == 3
            and "model.norm.less_one" in llm.session.weights
        )
        texts = [tokens(llm.generate(PROMPTS, PARAMS, draft)) for draft in (True, False)]
        dtype = llm.config.dtype
    with load(folders, "cpu") as exact:
        for each in texts:
            assert all(len(text) == PARAMS.max_tokens for text in each)
            others = assert_each_is_nearly_the_largest(exact, PROMPTS, each, dtype=dtype, count=2 * NEAR_TIE)
            print(layout, precision, others, "near-ties; texts alike:", sum(map(list.__eq__, *texts)))


def test_experts_in_fp8_blocks_have_the_shared_one_among_them_and_each_token_is_fp32s_or_a_near_tie(pair):
    """Drafted as plain, BF16 beside."""
    sizes = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    folders = pair("qwen3_5_moe", router=4, stored="blocks", **SHAPE, **sizes)
    with load(folders, precision=None) as llm:
        assert llm.config.dtype == torch.bfloat16
        names = [f"model.layers.{i}.mlp.{{}}.{name}_proj." for i in range(4) for name in ("gate_up", "down")]
        for name in names:
            scales = [
                llm.session.weights[name.format(stack) + "scale"] for stack in ("experts+shared_expert", "experts")
            ]
            assert [len(scale) for scale in scales] == [9, 8] and scales[0].ndim == 3
            assert llm.session.weights[name.format("shared_expert") + "weight"].dtype == FP8
        texts = [tokens(llm.generate(PROMPTS, PARAMS, draft)) for draft in (True, False)]
    with load(folders, "cpu") as exact:
        for each in texts:
            assert all(len(text) == PARAMS.max_tokens for text in each)
            others = assert_each_is_nearly_the_largest(exact, PROMPTS, each, dtype=torch.bfloat16, count=2 * NEAR_TIE)
            print(others, "near-ties; texts alike:", sum(map(list.__eq__, *texts)))


@pytest.mark.parametrize("layout", HALF_LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_logits_are_as_near_to_fp32_as_the_cpus(layout, precision, pair):
    """A prompt's rows at once, as many as a block has, and one by one."""
    ids, folders = PROMPTS[2] + PROMPTS[1], pair(layout, **SHAPE)
    with load(folders, "cpu", precision) as rounded, load(folders, "cpu") as exact:
        expected = all_logits(exact, ids)
        of_cpu = _errors(all_logits(rounded, ids), expected)
    with load(folders, precision=precision) as gpu:
        found = [_errors(all_logits(gpu, ids, rows), expected) for rows in (None, 16, 1)]
    for errors in (of_cpu, *found):
        print(layout, precision, *(f"{float(x):.5f}" for x in (errors.mean(), errors.median(), errors.max())))
    for errors in found:
        assert errors.mean() < 1.25 * of_cpu.mean()
        assert errors.median() < 1.25 * of_cpu.median()


def _errors(found, expected):
    """[N]: how far rows of logits [N, V] lie from what is expected, by how large that is."""
    return (found.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize("layout", ["qwen3_next", "qwen3_5_text"])
def test_blocks_accepted_in_part_leave_the_states_of_plain_decoding(layout, pair):
    """Known replies, drafted right up to a random place: rows change in each step, slots rest, end and begin again."""
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    chance = random.Random(5)
    with load(pair(layout)) as llm:
        session = llm.session
        replies = tokens(llm.generate(PROMPTS, params, draft=False))
        session.prepare(Prepare((0, 15), sampled=False))
        written = [0] * 3  # rows of each slot
        texts = [0, 1, 2]
        accepted = set()
        for step in range(220):
            for slot in range(3):
                prompt, reply = PROMPTS[texts[slot]], replies[texts[slot]]
                if written[slot] >= len(prompt) + len(reply) - 2 or chance.random() < 0.01:
                    texts[slot], written[slot] = chance.randrange(4), 0  # ends, or is cancelled
            waiting = [s for s in range(3) if written[s] < len(PROMPTS[texts[s]])]
            if waiting:
                slot = chance.choice(waiting)
                prompt = PROMPTS[texts[slot]]
                ids = prompt[written[slot] : written[slot] + chance.randint(1, 48)]
                last = written[slot] + len(ids) == len(prompt)
                (found,) = session.run(Step([], [Piece(slot, written[slot], ids, last)], Drafting.OFF, 1, False)).read()
                assert not last or list(found) == replies[texts[slot]][:1], (step, slot)
                written[slot] += len(ids)
            decode = [s for s in range(3) if s not in waiting and chance.random() < 0.8]
            decode = [s for s in decode if written[s] < len(PROMPTS[texts[s]]) + len(replies[texts[s]]) - 2]
            if not decode:
                continue
            counts, expected = [0] * (max(decode) + 1), {}
            for slot in decode:
                at, reply = written[slot] - len(PROMPTS[texts[slot]]), replies[texts[slot]]
                count = chance.randint(1, min(16, len(reply) - at - 1))
                right = min(count - 1, chance.choice((0, 0, 1, 2, 3, 15)))
                rows = reply[at : at + count]
                rows[right + 1 :] = [(token + 1) % 16 for token in rows[right + 1 :]]
                with session._stream():
                    session._slots.tokens[slot, :count] = torch.tensor(rows, dtype=torch.int32).cuda()
                counts[slot], expected[slot] = count, reply[at + 1 : at + 2 + right]
            found = session.decode(Decode(counts, Drafting.CONTEXT, 1, False)).read()
            for slot, ids in expected.items():
                assert list(found[slot]) == ids, (step, slot, written, counts)
                written[slot] += len(ids)
                accepted.add(len(ids) - 1)
    assert accepted >= {0, 1, 2, 3}
    print(layout, sorted(accepted))


def test_a_conversation_goes_on_from_a_state_that_is_kept(pair):
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    chance = random.Random(1)
    talk = [chance.randrange(15) for _ in range(60)]
    with load(pair("qwen3_5_text"), max_batch=2) as llm:
        scheduler = Scheduler(llm.session)
        for _ in range(4):
            sequence = llm.intake.sequence(talk, params)
            scheduler.submit(sequence)
            while scheduler.busy:
                scheduler.step()
            assert llm.generate([talk], params, draft=False)[0].token_ids == sequence.token_ids
            talk = talk + sequence.token_ids + [chance.randrange(15) for _ in range(7)]
        assert scheduler.statistics.reused_tokens > 0


def test_prompts_ride_along_over_pages_that_begin_with_what_others_left(pair):
    """In steps of flat rows: pieces of several prompts beside slots that draft; states are kept at their ends."""
    chance = random.Random(7)
    shared = [chance.randrange(15) for _ in range(300)]
    # The last ones come when the first ones' states stand.
    prompts = [shared + [chance.randrange(15) for _ in range(n)] for n in (3, 20, 70, 33, 9, 50)] + PROMPTS
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    folders = pair("qwen3_5_text", **SHAPE)
    with load(folders, precision="bf16", max_batch=4, max_seq_len=512) as llm:
        scheduler, run = Scheduler(llm.session), llm.session.run
        mixed = []

        def watched(call):
            mixed.append((len(call.decode), len(call.pieces), len(call.state_copies)))
            return run(call)

        llm.session.run = watched
        sequences = [llm.intake.sequence(prompt, params) for prompt in prompts]
        for i, sequence in enumerate(sequences):
            scheduler.submit(sequence)
            if i != 1:  # two of them ride along at once
                scheduler.step()
        while scheduler.busy:
            scheduler.step()
        dtype = llm.config.dtype
    assert any(decode and pieces for decode, pieces, _ in mixed) and any(pieces > 1 for _, pieces, _ in mixed)
    assert scheduler.statistics.reused_tokens >= 256 and any(copies for _, _, copies in mixed)
    texts = [sequence.token_ids for sequence in sequences]
    assert all(len(text) == params.max_tokens for text in texts)
    with load(folders, "cpu", max_seq_len=512) as exact:
        assert_each_is_nearly_the_largest(exact, prompts, texts, dtype=dtype, count=2 * NEAR_TIE)


def test_sequences_that_wait_for_pages_go_on_with_the_text_that_they_had(pair, tmp_path):
    """A sequence that gives its pages up loses its state with them, a step before the host knows of its last tokens."""
    chance = random.Random(11)
    prompts = [[chance.randrange(15) for _ in range(n)] for n in (60, 30, 100, 5, 75, 44)]
    params = SamplingParams(max_tokens=110, ignore_eos=True)
    folders = pair("qwen3_5_text", **SHAPE)
    told = {"name": "hybrid", "target": str(folders[0]), "drafter": str(folders[1]), "precision": "bf16"}
    # 8 pages beside the states; four sequences have up to 14.
    settings = BuildSettings(**told, max_batch=4, max_seq_len=256, page_size=64, kv_memory=0.01755)
    build(settings, tmp_path / "engine")
    with LLM.load(tmp_path / "engine", "cuda") as llm:
        assert llm.session.limits.mixes and llm.session.paging.pages == 8
        scheduler = Scheduler(llm.session)
        sequences = [llm.intake.sequence(prompt, params) for prompt in prompts]
        for sequence in sequences:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        dtype = llm.config.dtype
    assert scheduler.statistics.preemptions > 1
    texts = [sequence.token_ids for sequence in sequences]
    assert all(len(text) == params.max_tokens for text in texts)
    with load(folders, "cpu") as exact:
        assert_each_is_nearly_the_largest(exact, prompts, texts, dtype=dtype, count=2 * NEAR_TIE)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_shipped_hybrids_drafts_are_accepted_as_on_the_cpu(precision):
    params = SamplingParams(max_tokens=64)
    folders = HYBRID / "target", HYBRID / "drafter"
    with load(folders, "cpu", max_seq_len=512) as cpu:
        prompts = [cpu.encode(prompt) for prompt in shipped_prompts(4)]
        expected = cpu.generate(prompts, params)
    with load(folders, precision=precision, max_seq_len=512) as llm:
        drafted, plain = llm.generate(prompts, params), llm.generate(prompts, params, draft=False)
    print(precision, acceptance(drafted), acceptance(expected), sum(map(list.__eq__, tokens(drafted), tokens(plain))))
    assert acceptance(drafted) == pytest.approx(acceptance(expected), rel=0.02 if precision == "fp32" else 0.1)
    if precision == "fp32":
        assert tokens(drafted) == tokens(plain) == tokens(expected)


def test_torchs_operations_alone_compute_no_hybrid(pair):
    with pytest.raises(EngineError, match=r"--kernels torch: on a GPU the gated delta nets of .* are our kernels'"):
        load(pair("qwen3_next"), kernels="torch")
