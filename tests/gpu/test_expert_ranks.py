"""Mixtures of experts on two GPUs: the CPU's text in FP32, near-ties of it in 16 bits; slices of experts, and whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.test_cuda import tokens
from tests.gpu.test_expert_texts import CHOSEN, EXPERTS, OURS, WAYS, assert_near, make_pair, texts_of
from tests.gpu.test_hybrids import PROMPTS, load
from tests.gpu.test_kernels import why_not
from tests.gpu.test_tensor_parallel import GPUS, spawn
from trtllm_dflash import LLM
from trtllm_dflash.build.planning import as_planned, open_checkpoints, plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_engine_tensors
from trtllm_dflash.engine.config import DTYPES
from trtllm_dflash.ops.communicator import TorchDistributed
from trtllm_dflash.session.cuda_session import CudaSession

pytestmark = pytest.mark.skipif(GPUS < 2 or bool(why_not()), reason="needs two NVIDIA GPUs and our kernels")

#: Family, precision, whole experts a rank, experts of a row. In 16 bits all, so that no rounding chooses another.
CASES = [
    *[(family, "bf16", ep, EXPERTS) for family in ("gpt-oss", "qwen3-moe") for ep in (False, True)],
    *[(family, "fp32", ep, CHOSEN["some"]) for family in ("gpt-oss", "qwen3-moe") for ep in (False, True)],
    *[(family, "fp16", False, EXPERTS) for family in ("gpt-oss", "qwen3-moe")],
    ("qwen3-moe in fp8", None, False, EXPERTS),
]


def name_of(case: tuple[Any, ...]) -> str:
    family, precision, ep, top_k = case
    return f"{family}, {precision or 'bf16'}, {'whole experts' if ep else 'slices'}, {top_k} of a row"


class Kept(TorchDistributed):
    """A communicator of one session after another."""

    def close(self) -> None:
        """Stays; see `leave`."""

    def leave(self) -> None:
        super().close()


def generate(_: TorchDistributed, device: torch.device, folder: str) -> None:
    """Writes the texts of every case, or what went wrong."""
    group = dist.group.WORLD
    assert group is not None
    communicator = Kept(group)
    for case in CASES:
        family, precision, ep, top_k = case
        place = Path(folder) / f"{family}-{top_k}"
        values = {"name": "small", "target": str(place / "target"), "drafter": str(place / "drafter")}
        limits = {"tp": communicator.size, "ep": ep, "max_batch": 3, "max_seq_len": 256}
        settings = BuildSettings.model_validate({**values, **limits, "precision": precision, "backend": "torch"})
        checkpoints = open_checkpoints(settings)
        config = plan_engine(checkpoints, settings).config
        weights = read_engine_tensors(as_planned(checkpoints, config), config, communicator.rank)
        session = CudaSession(config, weights, device, communicator)
        if communicator.rank:
            session.follow()
            session.close()
            continue
        with LLM(session, None) as llm:
            found = texts_of(llm)
            made = {"texts": found, "attention": session.choice.attention, "experts": session.choice.experts}
        (Path(folder) / f"{name_of(case)}.json").write_text(json.dumps(made))
        print("two ranks:", name_of(case), flush=True)
    communicator.leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of pairs, and of the texts that two ranks made with them."""
    folder = tmp_path_factory.mktemp("ranks")
    for family, top_k in {(family, top_k) for family, _, _, top_k in CASES}:
        make_pair(folder / f"{family}-{top_k}", family, top_k)
    spawn(2, generate, str(folder))
    return folder


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_two_ranks_give_the_text_of_one_or_near_ties(case: tuple[Any, ...], found: Path) -> None:
    """Greedy and sampled, drafted and plain; in FP32 the CPU's, to the token."""
    family, precision, _, top_k = case
    made, place = json.loads((found / f"{name_of(case)}.json").read_text()), found / f"{family}-{top_k}"
    expected = "torch" if precision == "fp32" else OURS
    assert (made["attention"], made["experts"]) == (expected, expected)
    with load((place / "target", place / "drafter"), "cpu") as exact:
        if precision == "fp32":
            for name, texts in made["texts"].items():
                assert texts == tokens(exact.generate(PROMPTS, WAYS[name.split(",")[0]], draft=False)), name
            return
        assert_near(exact, made["texts"], DTYPES[precision or "bf16"], name_of(case))
