"""The threads that a small model is computed with."""

import pytest
import torch

from tests.conftest import TINY
from trtllm_dflash.session import threads
from trtllm_dflash.session.threads import limited_threads


@pytest.mark.parametrize(("variable", "small", "expected"), [(None, True, 1), (None, False, 2), ("2", True, 2)])
def test_a_small_model_has_one_thread_unless_another_number_is_asked_for(monkeypatch, variable, small, expected):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    if not small:
        monkeypatch.setattr(threads, "SMALL_MODEL", 1)
    torch.set_num_threads(2)
    try:
        with limited_threads(TINY / "target"):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
