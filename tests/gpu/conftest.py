"""What tests on a GPU share."""

import pytest
import torch


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
