"""Tensor parallelism over GPUs of one host: NCCL, and our small sums, inside captured steps."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.conftest import TINY
from tests.gpu.test_cuda import KERNELS, NEAR_TIE, acceptance, load_tiny, shipped_prompts, tokens
from tests.gpu.test_draft_trees import load_trees
from tests.gpu.test_kernels import why_not_hopper
from tests.near_ties import assert_only_near_ties_differ
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.planning import open_checkpoints, plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.ops.communicator import TorchDistributed
from trtllm_dflash.session.calls import Decode, Prefill, Prepare
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.trees import with_trees
from trtllm_dflash.step import Drafting
from trtllm_dflash.text.tokenizer import TextCodec

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs or more")

GREEDY = SamplingParams(max_tokens=64)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3)


def spawn(ranks: int, work: Any, *arguments: object) -> None:
    """Runs `work(communicator, device, *arguments)` in as many processes, each with a GPU of its own."""
    store = TCPStore("127.0.0.1", 0, ranks + 1, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(_rank, (ranks, store.port, work, arguments), nprocs=ranks)  # type: ignore[attr-defined]


def _rank(rank: int, ranks: int, port: int, work: Any, arguments: tuple[object, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, ranks + 1, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    work(TorchDistributed(group), device, *arguments)


def load_rank(
    communicator: TorchDistributed,
    device: torch.device,
    precision: str,
    draft_tree: int | str = "off",
    computed: Kernels = KERNELS,
) -> LLM:
    values: dict[str, Any] = {"precision": precision, "tp": communicator.size, "max_batch": 8, "max_seq_len": 1024}
    pair = {"name": "tiny", "target": str(TINY / "target"), "drafter": str(TINY / "drafter")}
    settings = BuildSettings.model_validate({**pair, **values})
    checkpoints = open_checkpoints(settings)
    config = with_trees(plan_engine(checkpoints, settings).config, draft_tree, device)
    weights = read_rank_weights(checkpoints, communicator.size, communicator.rank, config.dtype)
    session = CudaSession(config, weights, device, communicator, kernels=computed)
    return LLM(session, TextCodec.load(checkpoints.target_folder.path, config.chat_arguments))


def generate(
    communicator: TorchDistributed,
    device: torch.device,
    precision: str,
    per_kind: int,
    to: str,
    draft_tree: int | str = "off",
) -> None:
    with load_rank(communicator, device, precision, draft_tree) as llm:
        if communicator.rank:
            llm.session.follow()
            return
        prompts = shipped_prompts(per_kind)
        arms = {"drafted": (GREEDY, True), "plain": (GREEDY, False), "sampled": (SAMPLED, True)}
        found = {name: llm.generate(prompts, params, draft) for name, (params, draft) in arms.items()}
        texts = {name: [c.token_ids for c in completions] for name, completions in found.items()}
        Path(to).write_text(
            json.dumps({"texts": texts, "acceptance": acceptance(found["drafted"]), "small": bool(communicator._small)})
        )


def generate_exactly(communicator: TorchDistributed, device: torch.device, draft_tree: int | str, to: str) -> None:
    """Writes texts of a batch plainly, drafted, and alone; the long prompt's sums are of more bytes than one call's."""
    with load_rank(communicator, device, "bf16", draft_tree, "exact") as llm:
        if communicator.rank:
            llm.session.follow()
            return
        prompts: list[Any] = [[i * 7 % 2000 + 3 for i in range(700)], *shipped_prompts(3)]
        found = {}
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            plain, drafted = (tokens(llm.generate(prompts, params, draft)) for draft in (False, True))
            alone = [tokens(llm.generate([prompt], params))[0] for prompt in prompts[:4]]
            found[name] = {"plain": plain, "drafted": drafted, "alone": alone}
        Path(to).write_text(json.dumps({"exact": llm.session.choice.exact, "texts": found}))


@pytest.mark.skipif(bool(why_not_hopper("exact rows")), reason=why_not_hopper("exact rows"))
@pytest.mark.parametrize("draft_tree", ["off", 15])
@pytest.mark.parametrize("ranks", [n for n in (2, 4) if n <= GPUS])
def test_exact_ranks_give_a_text_whatever_is_beside_it(ranks, draft_tree, tmp_path):
    spawn(ranks, generate_exactly, draft_tree, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["exact"].endswith(f", tp {ranks}")
    for name, texts in found["texts"].items():
        assert texts["drafted"] == texts["plain"], name
        assert texts["alone"] == texts["plain"][: len(texts["alone"])], name


@pytest.mark.parametrize("ranks", [n for n in (2, 4) if n <= GPUS])
def test_ranks_give_the_text_of_one_in_fp32(ranks, tmp_path):
    spawn(ranks, generate, "fp32", 3, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    llm, prompts = load_tiny("fp32"), shipped_prompts(3)
    expected = llm.generate(prompts, GREEDY)
    assert found["texts"]["drafted"] == [c.token_ids for c in expected]
    assert found["texts"]["plain"] == [c.token_ids for c in expected]
    assert found["texts"]["sampled"] == [c.token_ids for c in llm.generate(prompts, SAMPLED)]
    assert found["acceptance"] == pytest.approx(acceptance(expected), rel=0.02)


@pytest.mark.parametrize("ranks", [n for n in (2, 4) if n <= GPUS])
def test_ranks_draft_as_well_as_one_in_bf16(ranks, tmp_path):
    spawn(ranks, generate, "bf16", 6, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    llm, prompts = load_tiny("bf16", draft_tree="off"), shipped_prompts(6)  # chains, as the ranks draft
    expected = llm.generate(prompts, GREEDY)
    assert found["small"] == (KERNELS == "auto")
    assert found["acceptance"] == pytest.approx(acceptance(expected), rel=0.08)
    for arm in ("drafted", "plain"):
        ids, texts = [llm.encode(prompt) for prompt in prompts], (found["texts"][arm], tokens(expected))
        same = assert_only_near_ties_differ(llm, ids, *texts, GREEDY, dtype=torch.bfloat16, count=NEAR_TIE)
        assert same >= len(prompts) // 2


@pytest.mark.skipif(KERNELS == "torch", reason="trees are our kernels', which are not built (make kernels)")
@pytest.mark.parametrize("ranks", [n for n in (2, 4) if n <= GPUS])
def test_ranks_draft_trees_as_one_does(ranks, tmp_path):
    spawn(ranks, generate, "bf16", 6, str(tmp_path / "found.json"), 15)
    found = json.loads((tmp_path / "found.json").read_text())
    llm, prompts = load_trees(15), shipped_prompts(6)
    expected, chains = llm.generate(prompts, GREEDY), load_trees("off").generate(prompts, GREEDY)
    print("tokens a step:", found["acceptance"], "one rank:", acceptance(expected), "chains:", acceptance(chains))
    assert found["acceptance"] == pytest.approx(acceptance(expected), rel=0.05)
    assert found["acceptance"] > 1.04 * acceptance(chains)
    ids, plain = [llm.encode(prompt) for prompt in prompts], llm.generate(prompts, GREEDY, draft=False)
    for arm in ("drafted", "plain"):
        texts = found["texts"][arm], tokens(plain)
        same = assert_only_near_ties_differ(llm, ids, *texts, GREEDY, dtype=torch.bfloat16, count=NEAR_TIE)
        assert same >= len(prompts) // 2
    sampled = tokens(llm.generate(prompts, SAMPLED, draft=False))
    assert sum(map(list.__eq__, found["texts"]["sampled"], sampled)) >= len(prompts) // 2


def loop_without_a_wait(communicator: TorchDistributed, device: torch.device) -> None:
    """torch raises at every call that waits for the device between the first launch and the last."""
    with load_rank(communicator, device, "bf16") as llm:
        if communicator.rank:
            llm.session.follow()
            return

        llm.session.prepare(Prepare((15,), sampled=False))

        def loop() -> list[object]:
            outcomes: list[object] = [
                llm.session.prefill(Prefill(slot, 0, [5] * 50, True, Drafting.BLOCK, 16)) for slot in range(4)
            ]
            return outcomes + [llm.session.decode(Decode([16] * 4, Drafting.BLOCK, 16, False)) for _ in range(8)]

        loop()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        loop()
        torch.cuda.set_sync_debug_mode("default")


def test_rank_0_does_not_wait_for_the_device() -> None:
    spawn(2, loop_without_a_wait)


def sums(communicator: TorchDistributed, device: torch.device) -> None:
    """Small sums, one after another and captured, equal those of NCCL to a rounding; all ranks have the same bits."""
    communicator.share_memory(device)
    assert communicator._small is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (8, 4096, 12_345 * 8, 1 << 18, 4096):
            xs = [torch.randn(count, device=device).to(dtype) for _ in range(5)]
            for x in xs:
                exact = x.double()
                dist.all_reduce(exact)
                found = communicator.all_reduce(x)
                limit = communicator.size * torch.finfo(dtype).eps
                assert (found.double() - exact).abs().max() <= limit * exact.abs().max()
                every = communicator.all_gather(found)
                assert all(other.equal(found) for other in every)
    x = torch.zeros(4096 * 16, dtype=torch.bfloat16, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(20):
            y = communicator.all_reduce(y) / communicator.size + 1
    for i in range(200):
        x.fill_(communicator.rank + i)
        graph.replay()
        if i % 20 == 0:
            expected = i + (communicator.size - 1) / 2 + 20
            assert (y - expected).abs().max() <= 0.02 * expected + 1
    torch.cuda.synchronize()
    del graph
    communicator.close()


@pytest.mark.parametrize("ranks", [n for n in (2, 4) if n <= GPUS])
def test_small_sums_are_the_same_on_all_ranks(ranks):
    if KERNELS == "torch":
        pytest.skip("the CUDA kernels are not built (make kernels)")
    spawn(ranks, sums)
