"""Every name of TensorRT's API that our sources use is in the datacenter edition's bindings, with one signature."""

import importlib

import pytest

from tests.tensorrt.datacenter_api import DATACENTER_ONLY, RECORD, find, used_names

REGENERATE = "see tests/tensorrt/datacenter_api.py for how to write datacenter_api.txt again"


def recorded() -> dict[str, str]:
    lines = RECORD.read_text().splitlines()[1:]
    return dict(line.split("\t") for line in lines)


def test_names_we_use_are_those_found_in_the_datacenter_bindings() -> None:
    assert used_names() == set(recorded()), REGENERATE


def test_the_search_sees_names_of_each_kind() -> None:
    names = used_names()
    assert {"INetworkDefinition.add_attention_v2", "layer.num_elementwise_dims", "ReduceOperation.AVG"} <= names
    assert "IBuilderConfig.num_compute_capabilities" not in names  # TensorRT-RTX's alone, and used only there


@pytest.mark.parametrize("edition", ["tensorrt", "tensorrt_rtx"])
def test_the_installed_edition_has_them_too(edition: str) -> None:
    try:
        module = importlib.import_module(edition)
    except ImportError:
        pytest.skip(f"{edition} is not installed")
    if not hasattr(module, "Builder"):
        pytest.skip(f"{module} is not TensorRT")
    only = DATACENTER_ONLY if edition == "tensorrt_rtx" else set()
    for name, signatures in recorded().items():
        if name in only:
            continue
        found = find(module, name)
        assert found is not None, name
        # One edition may offer more ways to call than the other.
        assert set(found.split(" | ")) & set(signatures.split(" | ")), f"{name}: {found}; datacenter: {signatures}"
