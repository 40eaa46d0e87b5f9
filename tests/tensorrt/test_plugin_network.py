"""Plans whose attention is our plugin, up to the plan: no GPU, and no datacenter edition, is needed.

The network is TensorRT's own but for its plugin layers (see `plugin_network`); the evaluator computes those from the
plugin's contract. `plugins/harness` holds the plugin itself to the same contract, on a GPU.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter, make_gpt_oss
from tests.conftest import refusal, succeeds
from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.cost.memory import cache_shapes
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import PLUGIN_FILE, digest, read_config
from trtllm_dflash.errors import EngineError

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.plugin_network import LIBRARY, PluginBuilder, PluginTensorRT, use_plugins
from tests.tensorrt.test_draft_tree import Sessions, make_prompts
from tests.tensorrt.test_draft_tree import make_pair as make_tree_pair
from tests.tensorrt.test_moe_network import make_moe_pair
from tests.tensorrt.test_network import Both, compare_generation, make_config, make_pair
from tests.tensorrt.test_session import CPU, EvaluatedEngine, replies
from trtllm_dflash.build.tensorrt_compiler import Plan
from trtllm_dflash.build.tensorrt_network import build_network
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.ops.tensorrt_plugin import has_plugin_layers, load_plugin
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.session.tensorrt_session import TensorRTSession, load_engine
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.session.weights import complete_weights

pytestmark = pytest.mark.slow


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file that the datacenter edition of these tests takes for the plugin's library."""
    path = tmp_path / "built" / "libdflash_plugin.so"
    path.parent.mkdir()
    path.write_bytes(LIBRARY)
    return path


@pytest.fixture
def datacenter(monkeypatch: pytest.MonkeyPatch) -> PluginTensorRT:
    return use_plugins(monkeypatch)


@pytest.fixture
def builder(datacenter: PluginTensorRT, library: Path) -> PluginBuilder:
    """With the plugin loaded."""
    load_plugin(library)
    return PluginBuilder(trt.Builder(trt.Logger(trt.Logger.ERROR)))


def with_plugin(config: EngineConfig, **changes: Any) -> EngineConfig:
    return config.model_copy(update={"plugin": "0" * 64, "sampling": False, **changes})


def make(folder: Path, family: str) -> Pair:
    if family == "gpt-oss":
        return make_moe_pair(folder, family)
    return make_pair(folder, family, {} if family == "qwen3" else None, attention_bias=family == "llama")


@pytest.mark.principal("gpt-oss-1-fp32", "qwen3-1-fp16")
@pytest.mark.parametrize(
    ("family", "tp", "precision"),
    [("qwen3", 1, "fp32"), ("qwen3", 2, "fp32"), ("qwen3", 1, "fp16"), ("llama", 1, "fp32"), ("gpt-oss", 1, "fp32")],
)
@torch.inference_mode()
def test_network_with_plugins_computes_what_torch_ops_computes(
    builder: PluginBuilder, tmp_path: Path, family: str, tp: int, precision: str
) -> None:
    pair = make(tmp_path, family)
    both = Both(builder, pair, with_plugin(make_config(pair, tp, precision)), 120)
    # Prompts longer than a block, a chunk, and gpt-oss's windows.
    compare_generation(both, [58, 5, 1])
    assert both.compared == 5 + 4


@torch.inference_mode()
def test_every_layers_attention_is_one_plugin(builder: PluginBuilder, tmp_path: Path) -> None:
    pair = make_moe_pair(tmp_path, "gpt-oss")
    both = Both(builder, pair, with_plugin(make_config(pair)), 120)
    network = both.emitted[0].network
    kinds = [str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers)]
    target, drafter = both.config.target, both.config.drafter
    assert drafter is not None and target.windows is not None
    assert kinds.count("PLUGIN_V3") == target.layers + drafter.layers
    assert not {"ATTENTION_INPUT", "KV_CACHE_UPDATE", "ROTARY_EMBEDDING"} & set(kinds)
    plugins = [layer for _, layer in network.plugins]
    assert [layer.name for layer in plugins[:2]] == [f"model.layers.{i}.self_attn/plugin" for i in (0, 1)]
    settings = [layer.plugin for layer in plugins]
    assert [s["window"] or None for s in settings[: target.layers]] == list(target.windows)
    assert [s["has_sinks"] for s in settings] == [1] * target.layers + [0] * drafter.layers
    assert [s["causal"] for s in settings] == [1] * target.layers + [0] * drafter.layers
    assert [s["context_index"] for s in settings[target.layers :]] == list(range(drafter.layers))
    # Sinks are no keys: caches have the model's own shape.
    shapes = {shape[2:] for name, shape in cache_shapes(both.config).items() if name.startswith("model.")}
    assert shapes == {(both.config.cache_length, target.head_size)}


@pytest.mark.principal("qwen3")
@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_a_session_gets_the_same_replies_from_a_plan_with_plugins(
    builder: PluginBuilder, tmp_path: Path, family: str
) -> None:
    """What a plugin updates is not aliased in the plan: the session binds both to one address, which is checked."""
    pair = make(tmp_path, family)
    plain = make_config(pair).model_copy(update={"sampling": False})
    config = with_plugin(plain, backend="tensorrt")
    weights = read_rank_weights(pair, 1, 0, config.dtype)
    step = build_network(builder, config, complete_weights(weights, config, 0), 0)
    session = TensorRTSession(config, EvaluatedEngine(step, aliased=False), CPU)
    # The last begins as the second does, and starts from that one's rows.
    prompts = [[5, 6, 7], list(range(30)), [9] * 11, [*range(28), 3, 3]]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert replies(TorchSession(plain, weights, CPU), prompts, params) == replies(session, prompts, params)


@pytest.mark.parametrize(("family", "nodes"), [("qwen3", 63), ("gpt-oss", 15)])
def test_plugins_attend_along_the_paths_of_trees(
    builder: PluginBuilder, tmp_path: Path, family: str, nodes: int
) -> None:
    sessions = Sessions(make_tree_pair(tmp_path, family, window=16), nodes, builder=builder, plugin="0" * 64)
    for slot, prompt in enumerate(make_prompts(30, 5)):
        sessions.read(slot, prompt)
    for _ in range(4):
        sessions.decode([(0, nodes + 1), (1, nodes + 1)])
    sessions.decode([(0, nodes + 1), (1, nodes + 1)], block=8)
    sessions.decode([(0, 8), (1, 8)])
    assert sum(sessions.accepted) > 0 and sessions.moved > 0


# -- from the command line to the plan, and back -----------------------------------------------------------------------


@pytest.fixture
def build(tmp_path: Path) -> list[object]:
    """The command that builds a pair of checkpoints."""
    target = make_gpt_oss(tmp_path / "target", layers=3, head_size=64)
    drafter = make_drafter(tmp_path / "drafter", target, head_size=64)
    return ["build", "--backend", "tensorrt", "--gpu", "sm120", "--target", target, "--drafter", drafter]


@pytest.fixture
def compiled(builder: PluginBuilder, datacenter: PluginTensorRT, monkeypatch: pytest.MonkeyPatch) -> PluginTensorRT:
    """Builds end before the compiler: TensorRT-RTX would refuse the plugins."""

    def compile_rank(config: EngineConfig, weights: Any, rank: int, *_: Any) -> Plan:
        step = build_network(builder, config, weights, rank, 120)
        return Plan(memoryview(b"plan"), step.network.num_layers, step.weight_count, step.transcoded)

    monkeypatch.setattr("trtllm_dflash.build.tensorrt_ranks.compile_rank", compile_rank)
    datacenter.libraries.clear()
    return datacenter


def test_an_engine_keeps_its_plugins_library(
    build: list[object], compiled: PluginTensorRT, library: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    build = [*build, "--output", engine, "--plugin", library]
    assert "built" in succeeds(*build)
    config = read_config(engine)
    assert config.plugin == digest(library) == config.files[PLUGIN_FILE]
    assert (engine / PLUGIN_FILE).read_bytes() == library.read_bytes()
    assert f"plugin, {PLUGIN_FILE} {digest(library)[:12]}" in succeeds("inspect", engine)
    assert "up to date" in succeeds(*build)
    assert "is not this engine" in refusal(*build[:-2])  # TensorRT's own layers
    library.write_bytes(LIBRARY + b", changed")
    assert "is not this engine" in refusal(*build)


def test_a_plan_is_deserialized_with_its_plugin_loaded(
    build: list[object], compiled: PluginTensorRT, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "engine"
    succeeds(*build, "--output", engine, "--plugin", library)
    compiled.libraries.clear()  # another process
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: (plan, list(compiled.libraries)))
    monkeypatch.setattr(compiled, "Runtime", lambda logger: runtime, raising=False)
    config = read_config(engine)
    assert load_engine(engine / "rank0.engine", config) == (b"plan", [str(engine / PLUGIN_FILE)])
    (engine / PLUGIN_FILE).write_bytes(b"another")
    with pytest.raises(EngineError, match=r"libdflash_plugin\.so: its digest is not"):
        load_engine(engine / "rank0.engine", config)


def test_another_library_is_not_taken_for_the_plugins(
    build: list[object], compiled: PluginTensorRT, library: Path, tmp_path: Path
) -> None:
    library.write_bytes(b"something else")
    build = [*build, "--output", tmp_path / "engine"]
    assert "has no plugin DFlashBlockAttention of version 2; build it with `make plugin`" in refusal(
        *build, "--plugin", library
    )
    assert "is not a file; `make plugin` builds libdflash_plugin.so" in refusal(*build, "--plugin", tmp_path / "none")


def test_heads_that_the_plugin_does_not_compute_are_refused(
    compiled: PluginTensorRT, library: Path, tmp_path: Path
) -> None:
    target = make_gpt_oss(tmp_path / "target", layers=2, head_size=32)
    build = ["build", "--backend", "tensorrt", "--gpu", "sm120", "--target", target, "--plugin", library]
    assert "--plugin: it has head sizes 64 and 128, not 32" in refusal(*build, "--output", tmp_path / "engine")


def test_tensorrt_rtx_and_the_torch_backend_have_no_plugins(tmp_path: Path) -> None:
    build = ["build", "--model", "tiny", "--output", tmp_path / "engine"]
    assert "--plugin is a setting of --backend tensorrt" in refusal(*build, "--plugin")
    if not has_plugin_layers(trt):
        said = refusal(*build, "--backend", "tensorrt", "--gpu", "sm120", "--plugin")
        assert "--plugin needs the datacenter edition of TensorRT" in said
