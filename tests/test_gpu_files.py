"""Files of tests for a GPU, which tests/gpu/conftest.py skips as a whole where there is none."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).parent.glob("gpu/test_*.py"))


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_it_can_be_read_and_leaves_out_no_test_that_could_run(name):
    marks = import_module(f"tests.gpu.{name}").pytestmark
    is_skipped = any(mark.args[0] for mark in (marks if isinstance(marks, list) else [marks]))
    assert is_skipped or torch.cuda.is_available()
