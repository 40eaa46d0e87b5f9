"""`build` without flags: the backend, the slots and their length that it chooses, and the reasons that it gives."""

import pytest

from tests.checkpoints import make_target
from tests.conftest import TINY, refusal, succeeds
from trtllm_dflash import LLM
from trtllm_dflash.build.defaults import choose_backend, choose_limits
from trtllm_dflash.build.plan import BuildPlan, planned_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.catalog import ServingLimits, load_catalog
from trtllm_dflash.cost.gpus import GPU, GPUS
from trtllm_dflash.cost.memory import fits_in
from trtllm_dflash.cost.shapes import shape_models
from trtllm_dflash.errors import EngineError, SettingsError

TARGET, _ = shape_models("tiny")


class FakeTensorRT:
    """An edition of TensorRT, as `compile_target` asks it."""

    __name__, __version__ = "tensorrt", "11.4"


class FakeRTX(FakeTensorRT):
    __name__ = "tensorrt_rtx"

    class ComputeCapability:
        __members__ = ("SM89", "SM120")


def chosen(monkeypatch, module, present, **settings):
    """Chooses a backend with that edition installed (None: none) and a GPU of that capability present (None: none)."""

    def load():
        if module is None:
            raise EngineError("TensorRT is not installed")
        return module()

    gpu = None if present is None else GPU("here", 96, present)
    for name in ("trtllm_dflash.build.defaults.present_gpu", "trtllm_dflash.build.tensorrt_compiler.present_gpu"):
        monkeypatch.setattr(name, lambda: gpu)
    monkeypatch.setattr("trtllm_dflash.build.defaults.load_tensorrt", load)
    return choose_backend(BuildSettings(name="x", target="x", **settings), TARGET)


@pytest.mark.parametrize(
    ("module", "present", "gpu", "backend", "compiled"),
    [
        (FakeTensorRT, 90, None, "tensorrt", "sm90"),
        (FakeTensorRT, 90, "h200", "tensorrt", "h200"),
        (FakeTensorRT, 90, "b300", "torch", "b300"),
        (FakeRTX, 90, None, "torch", None),
        (FakeRTX, 120, None, "tensorrt", "sm120"),
        (FakeRTX, None, "rtx-pro-6000", "tensorrt", "rtx-pro-6000"),
        (FakeRTX, None, "h200", "torch", "h200"),
        (FakeRTX, None, None, "torch", None),
        (None, 90, None, "torch", None),
    ],
)
def test_tensorrt_is_taken_where_it_compiles_for_the_gpu(monkeypatch, module, present, gpu, backend, compiled):
    choice = chosen(monkeypatch, module, present, gpu=gpu)
    assert (choice.backend, choice.gpu) == (backend, compiled)
    assert choice.remark.startswith(f"backend: {backend}, since ") and "\n" not in choice.remark


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"kv_memory": 1.0}, "--kv-memory"), ({"kv": "fp8"}, "--kv fp8"), ({"precision": "fp32"}, "--precision fp32")],
)
def test_settings_of_torch_alone_choose_it_and_those_of_tensorrt_refuse_it(monkeypatch, settings, flag):
    choice = chosen(monkeypatch, FakeRTX, 120, **settings)
    assert choice.backend == "torch" and f"since {flag} is torch's" in choice.remark
    with pytest.raises(
        SettingsError, match="--workers is a setting of --backend tensorrt; here it is torch, since there"
    ):
        chosen(monkeypatch, FakeRTX, None, workers=2)
    with pytest.raises(SettingsError, match=r"^--greedy is a setting of --backend tensorrt"):
        chosen(monkeypatch, FakeRTX, None, sampling=False)


def test_build_says_which_backend_it_takes_and_why(tmp_path):
    text = succeeds("build", "--model", "tiny", "--output", tmp_path / "engine", "--precision", "fp32")
    assert "backend: torch, since --precision fp32 is torch's; --backend says otherwise" in text
    assert "backend: " not in succeeds("build", "--model", "tiny", "--output", tmp_path / "e", "--backend", "torch")
    assert "--gpu nope is not known" in refusal("build", "--model", "tiny", "--output", tmp_path / "f", "--gpu", "nope")


def test_an_llm_of_checkpoints_is_torchs_whatever_is_installed(monkeypatch):
    monkeypatch.setattr("trtllm_dflash.build.planning.choose_backend", lambda *_: pytest.fail("nobody asked"))
    llm = LLM.from_pretrained(TINY / "target", TINY / "drafter", device="cpu", max_seq_len=64)
    assert llm.config.backend == "torch"


# -- limits ----------------------------------------------------------------------------------------------------------


def planned(name, *flags):
    return BuildPlan.model_validate_json(succeeds("build", "--plan", "--model", name, *flags, "--json"))


def test_gpt_oss_120b_on_eight_gpus_has_64_slots_of_16384_tokens():
    for gpu in ("b300", "h200", "h100"):
        plan = planned("gpt-oss-120b", "--gpu", gpu, "--tp", 8)
        assert (plan.max_batch, plan.max_seq_len) == (64, 16384)
    limits = {name: entry.limits for name, entry in load_catalog().items()}
    assert {limits.pop(name) for name in ("tiny", "tiny-hybrid")} == {None}  # they ship, for a laptop
    assert set(limits.values()) == {ServingLimits(max_batch=64, max_seq_len=16384)}


@pytest.mark.parametrize("gpu", ["h100", "l40s", "rtx-5090"])
def test_slots_and_length_are_as_many_as_fit_and_no_more(gpu):
    name = "gpt-oss-20b"
    settings = BuildSettings(name=name, target="org/x", limits=ServingLimits(max_batch=64, max_seq_len=16384))
    engine, known = planned_engine(settings, gpu), GPUS[gpu]
    room = known.usable_bytes
    assert fits_in(room, engine, known)
    assert 8 <= engine.max_batch <= 64
    if engine.max_batch < 64:
        assert not fits_in(room, engine.model_copy(update={"max_batch": engine.max_batch + 1}), known)
    if engine.max_seq_len < 16384:
        longer = engine.model_copy(update={"max_batch": 8, "max_seq_len": 2 * engine.max_seq_len})
        assert not fits_in(room, longer, known)


def test_what_is_asked_for_is_kept_and_the_other_limit_fits_it():
    asked = planned("gpt-oss-120b", "--gpu", "h100", "--max-seq-len", 32768)
    assert asked.max_seq_len == 32768 and 1 <= asked.max_batch < 8
    asked = planned("gpt-oss-120b", "--gpu", "h100", "--max-batch", 32)
    assert asked.max_batch == 32 and asked.max_seq_len == 4096
    assert "more than rtx-4090 has: use --tp 4" in refusal(
        "build", "--plan", "--model", "gpt-oss-120b", "--gpu", "rtx-4090"
    )


def test_limits_are_explained_in_one_line():
    settings = BuildSettings(name="qwen3-8b", target="org/x", limits=ServingLimits(max_batch=64, max_seq_len=16384))
    asked = settings.model_copy(update={"max_batch": 8, "max_seq_len": 4096})
    engine = planned_engine(asked, "h200")
    said = {name: choose_limits(engine, settings, gpu).remark for name, gpu in {**GPUS, "none": None}.items()}
    assert said["b300"] == "limits: 64 slots of 16,384 tokens, the pair's, which fit a b300"
    assert said["rtx-4090"].endswith("as many as fit a rtx-4090 (24 GB), not 64 of 16,384")
    assert said["none"].startswith("limits: 8 slots of 4,096 tokens, as no GPU's memory is known; with --gpu NAME")
    assert choose_limits(engine, asked, GPUS["b300"]).remark is None


def test_defaults_are_said_on_one_line_with_their_reasons(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    target = make_target(tmp_path / "target")

    def said(*flags):
        text = succeeds(
            "build", "--target", target, *flags, "--backend", "torch", "--force", "--output", tmp_path / "e"
        )
        return [line.removeprefix("defaults: ") for line in text.splitlines() if line.startswith("defaults: ")]

    pages = "pages of 64 tokens with our kernels, else of a whole slot"
    monkeypatch.setattr("trtllm_dflash.build.defaults.present_gpu", lambda: None)
    (line,) = said()
    assert (
        line
        == f"fp32, as there is no GPU; 8 slots of 512 tokens (the target's most), as no GPU's memory is known; {pages}"
    )
    assert said("--gpu", "h200", "--max-seq-len", 64) == [f"bf16, as for a GPU; 8 slots, which fit a h200; {pages}"]
    assert said("--precision", "bf16", "--max-batch", 2, "--max-seq-len", 64, "--page-size", 64) == []


def test_a_target_without_a_tokenizer_is_built_with_a_word_and_generate_names_the_way_out(tmp_path):
    engine = tmp_path / "engine"
    way_out = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    target = make_target(tmp_path / "target")
    text = succeeds("build", "--target", target, "--precision", "fp32", "--output", engine)
    assert f"no tokenizer.json in {target}: the engine takes token ids alone" in text and way_out in text
    line = refusal("generate", "--engine", engine, "-p", "hello", "--device", "cpu")
    assert line.startswith(f"error: --engine {engine}: has no tokenizer") and way_out in line
    assert "no tokenizer" not in succeeds("build", "--model", "tiny", "--output", tmp_path / "tiny")
