"""What tests on a GPU share."""

from pathlib import Path

import pytest
import torch


class Unread(pytest.Module):
    """A file of tests that is not read, and says why."""

    def collect(self):
        pytest.skip(f"{self.path.name} needs an NVIDIA GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Unread | None:
    """Skips whole files where there is no GPU: each process of a run would make thousands of tests to skip them."""
    return None if torch.cuda.is_available() else Unread.from_parent(parent, path=module_path)


@pytest.fixture
def captures(monkeypatch):
    """The CUDA graphs captured since the test began: one entry each."""
    made = []
    graph = torch.cuda.graph

    def counted(*arguments, **options):
        made.append(arguments)
        return graph(*arguments, **options)

    monkeypatch.setattr(torch.cuda, "graph", counted)
    return made


@pytest.fixture
def poisoned(monkeypatch):
    """What a kernel does not write is NaN, or -1: the bytes of outputs and scratch begin as 255."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(x):
        if x.dim():  # one number alone has no bytes to see
            x.view(torch.uint8).fill_(255)
        return x

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: filled(empty(*shape, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: filled(empty_like(x, **options)))
