"""Layers with a window give their pages back in captured steps, and texts are those of torch over one page a slot."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import edit_config, make_drafter, make_gpt_oss
from tests.gpu.test_cuda import KERNELS, NEAR_TIE
from tests.near_ties import assert_only_near_ties_differ
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.runtime.scheduler import Scheduler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.skipif(KERNELS == "torch", reason="the CUDA kernels are not built (make kernels)")
def test_a_long_reply_holds_what_its_window_sees_and_is_the_same_text(tmp_path: Path) -> None:
    target = make_gpt_oss(tmp_path / "target", head_size=64, window=64)
    edit_config(target, lambda raw: raw.update(max_position_embeddings=4096))
    drafter = make_drafter(tmp_path / "drafter", target, head_size=64)
    prompts = [[1 + 7 * i % 120 for i in range(count)] for count in (600, 500, 3, 300, 600)]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with (
        LLM.from_pretrained(target, drafter, precision="bf16", device="cuda", max_batch=4, max_seq_len=2000) as llm,
        LLM.from_pretrained(
            target, drafter, precision="bf16", device="cuda", max_batch=4, max_seq_len=2000, kernels="torch"
        ) as without,
    ):
        paging = llm.session.paging
        assert 0 < paging.window_pages < paging.pages
        scheduler = Scheduler(llm.session)
        windows = scheduler._slots.pages.windows
        assert windows is not None
        sequences = [llm.intake.sequence(prompt, params) for prompt in prompts]
        for sequence in sequences:
            scheduler.submit(sequence)
        held = []
        while scheduler.busy:
            scheduler.step()
            held.append(windows.held)
        # Decoding, a slot has 64 rows that are seen and 24 that steps write, in at most four pages of 64.
        assert sorted(held)[len(held) // 2] <= 4 * 4
        assert held[-1] == 0
        assert scheduler.statistics.prefix_hits > 0
        texts = [sequence.token_ids for sequence in sequences]
        expected = [completion.token_ids for completion in without.generate(prompts, params)]
        assert_only_near_ties_differ(without, prompts, texts, expected, params, dtype=torch.bfloat16, count=NEAR_TIE)
