import re
import shutil

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from pydantic import ValidationError
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.conftest import refusal, run, succeeds
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.serving.repository import DeploySettings, deploy, render, streaming_and_deadline

MODELS = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}

# What clients of TensorRT-LLM's Triton backend send and read: name, type, dims, whether it may be left out. What an
# ensemble must be given is refused by our models, for Triton (2.51) would let a request without it wait for ever.
ENSEMBLE_INPUTS = """
text_input STRING 1; max_tokens INT32 1
bad_words STRING -1; stop_words STRING -1; exclude_input_in_output BOOL 1
end_id INT32 1; pad_id INT32 1; top_k INT32 1; min_tokens INT32 1; beam_width INT32 1; num_return_sequences INT32 1
top_p FP32 1; temperature FP32 1; length_penalty FP32 1; repetition_penalty FP32 1; presence_penalty FP32 1
frequency_penalty FP32 1; seed UINT64 1; stream BOOL 1; return_log_probs BOOL 1; return_context_logits BOOL 1
return_generation_logits BOOL 1; return_perf_metrics BOOL 1; return_num_input_tokens BOOL 1
return_num_output_tokens BOOL 1; embedding_bias_words STRING -1; embedding_bias_weights FP32 -1
"""
BLS_INPUTS = "num_draft_tokens INT32 1; use_draft_logits BOOL 1"
STATISTICS = """
cum_log_probs FP32 1; output_log_probs FP32 -1,-1; sequence_index INT32 1; batch_index INT32 1
kv_cache_alloc_new_blocks INT32 1; kv_cache_reused_blocks INT32 1; kv_cache_alloc_total_blocks INT32 1
acceptance_rate FP32 1; total_accepted_draft_tokens INT32 1; total_draft_tokens INT32 1; num_input_tokens INT32 1
num_output_tokens INT32 1; arrival_time_ns INT64 1; first_scheduled_time_ns INT64 1; first_token_time_ns INT64 1
last_token_time_ns INT64 1
"""
ENGINE_INPUTS = """
input_ids INT32 -1 required; input_lengths INT32 1 required; request_output_len INT32 1
end_id INT32 1; pad_id INT32 1; stop_words_list INT32 2,-1; bad_words_list INT32 2,-1; beam_width INT32 1
temperature FP32 1; runtime_top_k INT32 1; runtime_top_p FP32 1; seed UINT64 1; streaming BOOL 1; stop BOOL 1
exclude_input_in_output BOOL 1; length_penalty FP32 1; repetition_penalty FP32 1; presence_penalty FP32 1
frequency_penalty FP32 1; min_tokens INT32 1; num_return_sequences INT32 1; return_log_probs BOOL 1
return_context_logits BOOL 1; return_generation_logits BOOL 1; return_perf_metrics BOOL 1
return_num_input_tokens BOOL 1; return_num_output_tokens BOOL 1; decoder_input_ids INT32 -1
draft_input_ids INT32 -1
"""
PREPROCESSING_INPUTS = """
QUERY STRING 1; REQUEST_OUTPUT_LEN INT32 1; BAD_WORDS_DICT STRING -1; STOP_WORDS_DICT STRING -1
EMBEDDING_BIAS_WORDS STRING -1; EMBEDDING_BIAS_WEIGHTS FP32 -1; END_ID INT32 1; PAD_ID INT32 1
"""
PREPROCESSING_OUTPUTS = """
INPUT_ID INT32 -1; REQUEST_INPUT_LEN INT32 1; DECODER_INPUT_ID INT32 -1; REQUEST_DECODER_INPUT_LEN INT32 1
BAD_WORDS_IDS INT32 2,-1; STOP_WORDS_IDS INT32 2,-1; REQUEST_OUTPUT_LEN INT32 1; OUT_END_ID INT32 1; OUT_PAD_ID INT32 1
"""


def table(text):
    rows = [row.split() for row in re.split(r"[;\n]", text) if row.strip()]
    return {(row[0], "TYPE_" + row[1], row[2], len(row) == 3) for row in rows}


def declared(tensors):
    rows = set()
    for tensor in tensors:
        types = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
        dims = ",".join(map(str, tensor.dims))
        required = not getattr(tensor, "optional", True)
        rows.add((tensor.name, types[tensor.data_type].name, dims, not required))
    return rows


@pytest.fixture(scope="module")
def repository(tiny_engine, tmp_path_factory):
    output = tmp_path_factory.mktemp("repositories") / "repository"
    deploy(tiny_engine, output, DeploySettings())
    return output


def config(repository, model):
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), ModelConfig())


def test_a_repository_has_the_five_models(repository):
    assert {folder.name for folder in repository.iterdir()} == MODELS
    for model in MODELS:
        assert (repository / model / "1").is_dir()
        assert config(repository, model).max_batch_size == 8


def test_the_openai_api_reads_what_a_repository_was_deployed_with(repository, tiny_engine, tmp_path):
    assert streaming_and_deadline(repository) == (True, 600.0)
    assert streaming_and_deadline(tmp_path) == (True, 600.0)  # somebody's own
    deploy(tiny_engine, tmp_path / "own", DeploySettings(decoupled=False, deadline_seconds=1200.5))
    assert streaming_and_deadline(tmp_path / "own") == (False, 1200.5)
    file = tmp_path / "own" / "tensorrt_llm" / "config.pbtxt"
    file.write_text(file.read_text().replace("1200.5", "long"))
    with pytest.raises(SettingsError, match="deadline_seconds is long"):
        streaming_and_deadline(tmp_path / "own")


def test_clients_of_tensorrt_llm_find_their_names_types_and_shapes(repository):
    ensemble, engine = config(repository, "ensemble"), config(repository, "tensorrt_llm")
    assert table(ENSEMBLE_INPUTS) <= declared(ensemble.input)
    assert table("text_output STRING -1" + STATISTICS) <= declared(ensemble.output)
    assert table(ENGINE_INPUTS) <= declared(engine.input)
    assert table("output_ids INT32 -1,-1; sequence_length INT32 -1" + STATISTICS) <= declared(engine.output)
    preprocessing = config(repository, "preprocessing")
    assert table(PREPROCESSING_INPUTS) <= declared(preprocessing.input)
    assert table(PREPROCESSING_OUTPUTS) <= declared(preprocessing.output)


def test_what_is_required_is_what_clients_know(repository):
    for model, known in (("ensemble", ENSEMBLE_INPUTS), ("tensorrt_llm", ENGINE_INPUTS)):
        required = {row for row in declared(config(repository, model).input) if not row[3]}
        assert required == {row for row in table(known) if not row[3]}


def test_an_unstreamed_reply_begins_with_its_prompt_by_default_as_in_tensorrt_llm(repository):
    assert config(repository, "tensorrt_llm").parameters["exclude_input_in_output"].string_value == "false"


def test_bls_has_the_interface_of_the_ensemble(repository):
    ensemble, bls = config(repository, "ensemble"), config(repository, "tensorrt_llm_bls")
    assert declared(ensemble.input) | table(BLS_INPUTS) == declared(bls.input)
    assert declared(ensemble.output) == declared(bls.output)


def test_every_input_of_the_ensemble_reaches_a_step_of_the_same_type(repository):
    ensemble = config(repository, "ensemble")
    types = {tensor.name: tensor.data_type for tensor in ensemble.input}
    mapped = set()
    for step in ensemble.ensemble_scheduling.step:
        inputs = {tensor.name: tensor for tensor in config(repository, step.model_name).input}
        for name, source in step.input_map.items():
            if source in types:
                assert inputs[name].data_type == types[source]
                mapped.add(source)
    assert mapped == set(types)


def test_only_unary_calls_get_a_model_that_does_not_stream(repository, tiny_engine):
    streaming = {m for m in MODELS if config(repository, m).model_transaction_policy.decoupled}
    assert streaming == {"ensemble", "tensorrt_llm"}
    files = render(tiny_engine, DeploySettings(decoupled=False))
    assert not any("decoupled: true" in text for text in files.values())


def test_a_path_with_odd_characters_stays_what_it_is(tiny_engine, tmp_path):
    odd = tmp_path / 'a "quoted" \\ $engine\n'
    odd.symlink_to(tiny_engine)
    text = render(odd, DeploySettings())["tensorrt_llm/config.pbtxt"]
    parameters = text_format.Parse(text, ModelConfig()).parameters
    assert parameters["engine"].string_value == str(odd)


def test_a_folder_that_tritons_models_could_not_open_is_refused_by_its_flag(tiny_engine, tmp_path, monkeypatch):
    """Their Python encodes names of files in ASCII, whatever the locale."""
    odd = tmp_path / "modèles"
    odd.mkdir()
    (odd / "tiny").symlink_to(tiny_engine)
    assert refusal("deploy", "--engine", odd / "tiny", "--output", tmp_path / "r").startswith(f"error: --engine {odd}")
    with pytest.raises(SettingsError, match=f"^--harvest {odd}: .*ASCII"):
        render(tiny_engine, DeploySettings(harvest=str(odd)))
    with pytest.raises(SettingsError, match=r"^--harvest /dev/null: is no folder$"):
        render(tiny_engine, DeploySettings(harvest="/dev/null"))
    monkeypatch.chdir(odd)
    render(tiny_engine, DeploySettings())  # without a harvest the working directory is no matter


def test_settings_reach_the_engine(tiny_engine):
    settings = DeploySettings(
        device="cpu",
        kernels="torch",
        prefill_tokens=256,
        itl_slack=0.5,
        prefill_share=0.25,
        max_queue=3,
        draft=False,
        draft_length=7,
        draft_tree=31,
        exclude_input_in_output=True,
        deadline_seconds=90,
        harvest="/var/Harvest of 'mine'",
        harvest_share=0.5,
        harvest_mb=7,
    )
    text = render(tiny_engine, settings)["tensorrt_llm/config.pbtxt"]
    parameters = text_format.Parse(text, ModelConfig()).parameters
    values = {name: parameter.string_value for name, parameter in parameters.items()}
    assert values == {
        "engine": str(tiny_engine),
        "device": "cpu",
        "kernels": "torch",
        "draft": "false",
        "draft_length": "7",
        "draft_tree": "31",
        "prefill_tokens": "256",
        "itl_slack": "0.5",
        "prefill_share": "0.25",
        "max_queue": "3",
        "exclude_input_in_output": "true",
        "decoupled": "true",
        "deadline_seconds": "90.0",
        "harvest": "/var/Harvest of 'mine'",
        "harvest_share": "0.5",
        "harvest_mb": "7",
    }


def test_an_engine_that_lost_a_file_is_refused(tiny_engine, tmp_path):
    """It was deployed, and found when Triton loaded it."""
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    (engine / "rank0.safetensors").unlink()
    with pytest.raises(EngineError, match=f"^{engine}/rank0.safetensors: missing; build the engine again"):
        deploy(engine, tmp_path / "repository", DeploySettings())
    shutil.copy(tiny_engine / "rank0.safetensors", engine)
    (engine / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=f"^{engine}/tokenizer.json: its digest is not the one in config.json"):
        deploy(engine, tmp_path / "repository", DeploySettings())


def test_a_draft_length_beyond_the_block_is_refused(tiny_engine, tmp_path):
    with pytest.raises(SettingsError, match=r"--draft-length 16: this engine drafts up to 15"):
        deploy(tiny_engine, tmp_path / "repository", DeploySettings(draft_length=16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "tpu"},
        {"prefill_share": 0},
        {"prefill_tokens": 0},
        {"prefill_tokens": "many"},
        {"itl_slack": -0.1},
        {"max_queue": -1},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        DeploySettings.model_validate(wrong)


def test_deploying_the_same_again_leaves_it_as_it_is(repository, tiny_engine):
    before = (repository / "ensemble").stat().st_mtime_ns
    deploy(tiny_engine, repository, DeploySettings())
    assert (repository / "ensemble").stat().st_mtime_ns == before


def test_a_repository_that_differs_is_replaced_only_by_force(tiny_engine, tmp_path):
    output = tmp_path / "repository"
    output.mkdir()  # an empty folder is in nobody's way
    deploy(tiny_engine, output, DeploySettings())
    with pytest.raises(EngineError, match="exists and differs"):
        deploy(tiny_engine, output, DeploySettings(max_queue=1))
    deploy(tiny_engine, output, DeploySettings(max_queue=1), force=True)
    assert config(output, "tensorrt_llm").parameters["max_queue"].string_value == "1"
    assert list(tmp_path.iterdir()) == [output]


def test_what_is_no_repository_of_ours_is_never_replaced(tiny_engine, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    for force in (False, True):
        with pytest.raises(EngineError, match="is not a model repository of ours"):
            deploy(tiny_engine, tmp_path, DeploySettings(), force)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_repository_in_its_engine_is_refused(tiny_engine, tmp_path):
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    for output, knob in ((engine / "repository", "--output"), (engine / "a" / "b", "--repository")):
        with pytest.raises(EngineError, match=f"{output}: lies in the engine, .*; use another {knob}$"):
            deploy(engine, output, knob=knob)
    deploy(engine, tmp_path / "engine-repository")


def test_deploy_writes_a_repository_and_refuses_what_is_no_engine(tiny_engine, tmp_path):
    printed = succeeds("deploy", "--engine", tiny_engine, "--output", tmp_path / "repository", "--unary")
    assert str(tmp_path / "repository") in printed
    assert not config(tmp_path / "repository", "ensemble").model_transaction_policy.decoupled
    assert "not an engine directory" in refusal("deploy", "--engine", tmp_path, "--output", tmp_path / "other")
    share = refusal("deploy", "--engine", tmp_path, "--output", tmp_path / "other", "--harvest-share", "0.5")
    assert share == "error: --harvest-share goes with --harvest DIR"
    for flag, value in (("--draft-length", "7"), ("--draft-tree", "31")):
        both = refusal("deploy", "--engine", tmp_path, "--output", tmp_path / "other", "--no-draft", flag, value)
        assert both == f"error: {flag} and --no-draft: give one of them"
    assert "warning" not in printed
    spaced = run("deploy", "--engine", tiny_engine, "--output", tmp_path / "a repository")
    assert spaced.exit_code == 0
    assert spaced.stderr.startswith(f"warning: {tmp_path}/a repository: a Triton of your own does not load")
