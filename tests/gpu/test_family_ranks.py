"""Families on two GPUs: the CPU's text in FP32, near-ties of it in 16 bits; experts in slices, and whole ones."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoints import edit_tensors, make_drafter
from tests.gpu.test_cuda import tokens
from tests.gpu.test_expert_texts import CHOSEN, EXPERTS, FAMILIES, OURS, WAYS, assert_near, make_pair, texts_of
from tests.gpu.test_hybrids import PROMPTS, load
from tests.gpu.test_hybrids import SHAPE as HYBRID
from tests.gpu.test_kernels import why_not
from tests.gpu.test_second_drafters import make_half_pair
from tests.gpu.test_tensor_parallel import GPUS, spawn
from trtllm_dflash import LLM
from trtllm_dflash.build.planning import as_planned, open_checkpoints, plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_engine_tensors
from trtllm_dflash.engine.dtypes import DTYPES
from trtllm_dflash.ops.communicator import TorchDistributed
from trtllm_dflash.session.cuda_session import CudaSession

pytestmark = pytest.mark.skipif(GPUS < 2 or bool(why_not()), reason="needs two NVIDIA GPUs and our kernels")


#: Kinds of drafters, of `tests.drafters.KINDS`: each way of choosing a block's tokens, and windows.
SECOND = ["dflash2", "dspark", "dspark, gated", "windows"]


@dataclass(frozen=True)
class Case:
    """An engine of two ranks. In 16 bits a row has all experts, so that no rounding chooses another."""

    family: str
    precision: str | None
    ep: bool = False  # whole experts a rank

    @property
    def top_k(self) -> int:
        return CHOSEN["some"] if self.precision == "fp32" else EXPERTS

    def __str__(self) -> str:
        return f"{self.family}, {self.precision or 'bf16'}{', whole experts' * self.ep}"


CASES = [
    *[Case("gpt-oss", precision, ep) for precision in ("bf16", "fp32") for ep in (False, True)],
    *[Case("qwen3-moe", precision, ep) for precision in ("bf16", "fp32") for ep in (False, True)],
    *[Case(family, "fp16") for family in ("gpt-oss", "qwen3-moe")],
    Case("qwen3-moe in fp8", None),
    *[Case(family, precision) for family in ("minimax-m2", "qwen3.5", "gemma-4") for precision in ("bf16", "fp32")],
    *[Case(f"qwen3 with {kind}", precision) for kind in SECOND for precision in ("bf16", "fp32")],
]


def hybrid(folder: Path) -> tuple[Path, Path]:
    from tests.hybrid_checkpoints import make_hybrid  # it needs a transformers that has Qwen3.5

    target = make_hybrid(folder / "target", "qwen3_5_text", vocab=16, **HYBRID)
    edit_tensors(target, lambda tensors: tensors.update({name: x.bfloat16() for name, x in tensors.items()}))
    return target, make_drafter(folder / "drafter", target, block_size=16, head_size=64)


def gemma(folder: Path) -> tuple[Path, Path]:
    from tests.gpu.test_gemma import SHAPE, soften
    from tests.test_gemma4 import gemma_pair  # likewise, Gemma 4

    target, _ = gemma_pair(folder, **SHAPE)
    edit_tensors(target, soften)
    return target, make_drafter(folder / "ours", target, tap_layers=(0, 2, 5), seed=3, head_size=64, intermediate=128)


def second(kind: str, folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    return make_half_pair(kind, folder)


#: Makers of pairs without experts.
DENSE: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "qwen3.5": hybrid,
    "gemma-4": gemma,
    **{f"qwen3 with {kind}": partial(second, kind) for kind in SECOND},
}


def pair_of(case: Case, folder: Path) -> tuple[Path, Path]:
    """Makes a case's pair, once."""
    place, noted = folder / f"{case.family}-{case.top_k}", folder / f"{case.family}-{case.top_k}.json"
    if not noted.exists():
        made = DENSE[case.family](place) if case.family in DENSE else make_pair(place, case.family, case.top_k)
        noted.write_text(json.dumps([str(path) for path in made]))
    target, drafter = json.loads(noted.read_text())
    return Path(target), Path(drafter)


class Kept(TorchDistributed):
    """A communicator of one session after another."""

    def close(self) -> None:
        """Stays; see `leave`."""

    def leave(self) -> None:
        super().close()


def generate(_: TorchDistributed, device: torch.device, folder: Path, cases: list[Case]) -> None:
    """Writes the texts of every case."""
    group = dist.group.WORLD
    assert group is not None
    communicator = Kept(group)
    for case in cases:
        target, drafter = pair_of(case, folder)
        values = {"name": "small", "target": str(target), "drafter": str(drafter), "precision": case.precision}
        limits = {"tp": communicator.size, "ep": case.ep, "max_batch": 3, "max_seq_len": 256, "backend": "torch"}
        settings = BuildSettings.model_validate({**values, **limits})
        checkpoints = open_checkpoints(settings)
        config = plan_engine(checkpoints, settings).config
        weights = read_engine_tensors(as_planned(checkpoints, config), config, communicator.rank)
        session = CudaSession(config, weights, device, communicator)
        if communicator.rank:
            session.follow()
            session.close()
            continue
        with LLM(session, None) as llm:
            choice = session.choice
            made = {"texts": texts_of(llm), "attention": choice.attention, "experts": choice.experts}
        (folder / f"{case}.texts").write_text(json.dumps(made))
        print("two ranks:", case, flush=True)
    communicator.leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's pairs, and of the texts that two ranks made with them."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            folder = made[family] = tmp_path_factory.mktemp("ranks")
            cases = [case for case in CASES if case.family == family]
            for case in cases:
                pair_of(case, folder)
            spawn(2, generate, folder, cases)
        return made[family]

    return of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_give_the_text_of_one_or_near_ties(case: Case, found: Callable[[str], Path]) -> None:
    """Greedy and sampled, drafted and plain; in FP32 the CPU's, to the token."""
    folder = found(case.family)
    made = json.loads((folder / f"{case}.texts").read_text())
    if case.family in FAMILIES:
        expected = "torch" if case.precision == "fp32" else OURS
        assert (made["attention"], made["experts"]) == (expected, expected)
    with load(pair_of(case, folder), "cpu") as exact:
        if case.precision == "fp32":
            for name, texts in made["texts"].items():
                assert texts == tokens(exact.generate(PROMPTS, WAYS[name.split(",")[0]], draft=False)), name
            return
        assert_near(exact, made["texts"], DTYPES[case.precision or "bf16"], str(case))  # type: ignore[index]
