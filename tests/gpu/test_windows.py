"""Layers with a window give their pages back in captured steps, and texts are those over one page a slot."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import edit_config, make_drafter, make_gpt_oss
from tests.gpu.test_cuda import KERNELS
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.cuda_session import CudaSession

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.skipif(KERNELS == "torch", reason="the CUDA kernels are not built (make kernels)")
def test_a_long_reply_holds_what_its_window_sees_and_is_the_same_text(tmp_path: Path) -> None:
    target = make_gpt_oss(tmp_path / "target", head_size=64, window=64)
    edit_config(target, lambda raw: raw.update(max_position_embeddings=4096))
    drafter = make_drafter(tmp_path / "drafter", target, head_size=64)
    # Nothing is shared, so that the steps are the same, row by row: rounding would send a row to other experts.
    prompts = [[1 + (7 * i + 11 * k) % 120 for i in range(count)] for k, count in enumerate((600, 500, 3, 300, 600))]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    texts = []
    with LLM.from_pretrained(target, drafter, precision="bf16", device="cuda", max_batch=4, max_seq_len=2000) as made:
        assert isinstance(made.session, CudaSession)
        for rows in (64, 4096):  # of a page; the latter: one a slot
            config = made.config.model_copy(update={"page_size": rows})
            llm = LLM(CudaSession(config, made.session.weights, made.session.device), made.codec)
            scheduler = Scheduler(llm.session)
            windows = scheduler._slots.pages.windows
            assert (windows is None) == llm.session.paging.linear == (rows == 4096)
            sequences = [llm.intake.sequence(prompt, params) for prompt in prompts]
            for sequence in sequences:
                scheduler.submit(sequence)
            held = []
            while scheduler.busy:
                scheduler.step()
                held.append(windows.held if windows else 0)
            texts.append([sequence.token_ids for sequence in sequences])
            if windows is not None:
                # Decoding, a slot has 64 rows that are seen and 24 that steps write, in at most four pages of 64.
                assert 0 < sorted(held)[len(held) // 2] <= 4 * 4
                assert held[-1] == 0
    assert texts[0] == texts[1]
    assert all(len(text) == params.max_tokens for text in texts[0])
