"""The command line around the two main commands: help, versions, the catalog, settings, and the doctor."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import click
import pytest
import yaml

from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY, refusal, run, succeeds
from tests.processes import start
from tests.waiting import PATIENCE
from trtllm_dflash import __main__ as entry
from trtllm_dflash import __version__, doctor
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.cli import main
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.signals import ENDING

CONFIGS = sorted(file.stem for file in (Path(__file__).parents[1] / "build_configs").glob("*.yaml"))
PYTHON = [sys.executable, "-m", "trtllm_dflash"]


@pytest.fixture(scope="module")
def own_pair(tmp_path_factory):
    """A build configuration of one's own, over a small random pair."""
    folder = tmp_path_factory.mktemp("own")
    target = make_target(folder / "target")
    drafter = make_drafter(folder / "drafter", target)
    file = folder / "mine.yaml"
    entry = {"name": "mine", "family": "qwen3", "target": str(target), "drafter": str(drafter), "target_layers": 4}
    build = {"precision": "bf16", "max_seq_len": 100, "max_batch": 2}
    file.write_text(json.dumps({**entry, "block_size": 8, "drafter_layers": 2, "build": build}))
    return file


# -- help and version ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag):
    assert succeeds(flag).split()[-1] == __version__


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_a_full_disk_is_one_line_for_help_and_version_too(flag):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PYTHON, flag], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_working_directory_that_was_removed_is_one_line(tmp_path, monkeypatch):
    """MKL would end the process there, and name a library that is not missing."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert refusal("inspect", "tiny") == "error: the working directory was removed; cd to one that is there"


def test_the_module_runs_as_a_program_and_does_not_wait_for_torch():
    script = (
        "import runpy, sys\n"
        "sys.argv = ['trtllm-dflash', '--version']\n"
        "try:\n"
        "    runpy.run_module('trtllm_dflash', run_name='__main__')\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    for command in ([*PYTHON, "--version"], [sys.executable, "-c", script]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.split()[-1:], done.stderr) == (0, [__version__], "")


def test_what_computes_nothing_does_not_wait_for_torch_either(tiny_engine, tmp_path):
    alone = "import sys; from transformers import PreTrainedTokenizerFast; sys.exit('torch' in sys.modules)"
    if subprocess.run([sys.executable, "-c", alone], check=False).returncode:
        pytest.skip("this transformers loads torch to read a tokenizer")
    script = f"""
import sys
from pathlib import Path
import trtllm_dflash.serving.gateway, trtllm_dflash.serving.serve
from trtllm_dflash.cli import main
from trtllm_dflash.text.tokenizer import TextCodec

def succeeds(*words):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code

succeeds("models")
succeeds("deploy", "--engine", {str(tiny_engine)!r}, "--output", {str(tmp_path / "repository")!r})
succeeds("launch", "--runtime", "vllm", "--model", "qwen3-8b", "--gpu", "h200", "--dry-run")
assert TextCodec.load(Path({str(tiny_engine)!r}), {{}}).encode("what a gateway loads")
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "qwen3-8b" in done.stdout
    assert (tmp_path / "repository" / "tensorrt_llm").is_dir()


@pytest.mark.parametrize("name", main.commands)
def test_every_command_says_what_it_and_each_of_its_options_does(name):
    text = succeeds(name, "--help")
    command = main.commands[name]
    assert command.help is not None
    assert " ".join(command.help.split()) in " ".join(text.split())
    for option in command.params:
        if isinstance(option, click.Argument):
            name_shown = option.metavar or option.name.upper()
            assert f" {name_shown}\n" in text
            continue
        assert isinstance(option, click.Option)
        assert option.help, f"{name} {option.name} has no help"
        assert option.opts[0] in text


def test_the_group_lists_its_commands():
    listed = re.findall(r"^  (\w+)  +\S", succeeds("--help").partition("Commands:")[2], re.MULTILINE)
    assert listed == sorted(main.commands)
    assert {"build", "demo", "doctor", "generate", "models"} <= set(listed)


def test_a_command_that_takes_several_words_shows_it():
    several = [
        (name, argument.metavar)
        for name, command in main.commands.items()
        for argument in command.params
        if isinstance(argument, click.Argument) and argument.nargs == -1
    ]
    assert {name for name, _ in several} == {"launch", "report"}
    assert not [(name, shown) for name, shown in several if not shown or "..." not in shown]


def test_an_unknown_command_or_flag_is_a_usage_error():
    assert run("biuld").exit_code == 2
    assert "--tpp" in run("build", "--tpp", 2).stderr


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("build", "--model", "tiny", "--output", LONG),
        ("build", "--model", LONG),
        ("build", "--model", f"{LONG}.yaml"),
        ("build", "--target", LONG),
        ("inspect", LONG),
        ("generate", "--engine", LONG, "--prompt", "hello"),
        ("export", "--engine", LONG, "--output", "export"),
        ("deploy", "--engine", LONG, "--output", "repository"),
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG"),
)
def test_a_name_that_is_too_long_is_one_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(*words)
    assert LONG in line and "File name too long" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Permission denied", "/some/file"), "error: /some/file: Permission denied"),
        (OSError(98, "Address already in use"), "error: Address already in use"),
        (OSError("libcudart: cannot open\nshared object file"), "error: libcudart: cannot open shared object file"),
    ],
)
def test_an_error_of_the_system_is_one_line(error, says, monkeypatch):
    monkeypatch.setattr(main.commands["models"], "callback", Mock(side_effect=error))
    assert refusal("models") == says


# -- models ----------------------------------------------------------------------------------------------------------


def test_models_lists_every_build_config():
    table = succeeds("models")
    rows = [re.split(r" *│ *", line.strip("│ ")) for line in table.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == CONFIGS
    assert {row[-1] for row in rows} == {"yes"}


def test_models_as_json_says_the_same():
    rows = json.loads(succeeds("models", "--json"))
    assert [row["name"] for row in rows] == CONFIGS
    tiny = rows[CONFIGS.index("tiny")]
    assert (tiny["buildable"], tiny["block_size"], tiny["tap_layers"]) == (True, 16, [1, 3, 5])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [pytest.param([], marks=pytest.mark.slow), ["--json"]], ids=["table", "json"])
def test_a_reader_that_goes_away_is_no_error(flags):
    """`trtllm-dflash models | head -1`, with the pipe closed before anything is written."""
    process = start([*PYTHON, "models", *flags])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(PATIENCE) == 0


# -- build settings --------------------------------------------------------------------------------------------------


def test_flags_override_set_and_set_overrides_the_build_config(own_pair, tmp_path):
    command = ["build", "--model", own_pair, "--force", "--output", tmp_path / "engine"]
    expected = {"precision": "bf16", "max_seq_len": 100, "max_batch": 2, "chunk": 100}
    steps: list[tuple[list[object], dict[str, object]]] = [
        ([], {}),
        (["--set", "max_seq_len=90", "--set", "precision=fp32", "--set", "chunk=11"], {"max_seq_len": 90, "chunk": 11}),
        (["--max-seq-len", 80, "--precision", "fp16"], {"max_seq_len": 80, "precision": "fp16"}),
    ]
    flags: list[object] = []
    for more, changes in steps:
        flags += more
        expected |= {"precision": "fp32"} if more else {}
        expected |= changes
        succeeds(*command, *flags)
        config = read_config(tmp_path / "engine")
        assert {key: getattr(config, key) for key in expected} == expected
        assert config.name == "mine"


def test_set_takes_structured_values_and_dashes(own_pair, tmp_path):
    output = tmp_path / "engine"
    sets = ["--set", "chat-arguments={enable_thinking: false}", "--set", "max-batch=3"]
    succeeds("build", "--model", own_pair, "--output", output, *sets)
    config = read_config(output)
    assert (config.chat_arguments, config.max_batch) == ({"enable_thinking": False}, 3)


def test_an_unknown_key_of_set_lists_those_that_there_are(own_pair, tmp_path):
    line = refusal("build", "--model", own_pair, "--output", tmp_path / "engine", "--set", "max_sequence=7")
    assert "--set max_sequence: no such setting" in line
    assert line.endswith(", ".join(name for name, field in BuildSettings.model_fields.items() if not field.exclude))


@pytest.mark.parametrize(
    "assignment",
    [
        "tp",
        "tp=",
        "tp=two",
        "tp=[",
        "tp=true",
        "=2",
        "name=[1",
        "name=2024-13-45",
        pytest.param("a=" + "[" * 5000, id="a"),
    ],
)
def test_an_assignment_that_cannot_be_read_is_refused(assignment, own_pair, tmp_path):
    line = refusal("build", "--model", own_pair, "--output", tmp_path / "engine", "--set", assignment)
    name = assignment.partition("=")[0]
    assert f"--set {assignment}" in line or f"--set {name}=" in line or f"--set {name}: no such setting" in line
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--kv-memory", "inf"), "--kv-memory inf: Input should be a finite number"),
        (("--precision", "x"), "--precision x: Input should be 'fp32', 'bf16', 'fp16', 'fp8', 'nvfp4' or 'auto'"),
        (("--drafter-precision", "x"), "--drafter-precision x: Input should be 'fp8', 'nvfp4' or 'auto'"),
        (("--kv-memory", "1e300"), "--kv-memory 1e+300: Input should be less than or equal to 1000000000"),
        (("--kv-memory", "1e-300"), "--kv-memory 1e-300: Input should be greater than or equal to 0.000000001"),
        (("--set", f"max_batch={10**20}"), f"--set max_batch={10**20}: Input should be less than 2147483648"),
        (("--draft-window", 10**20), f"--draft-window {10**20}: Input should be less than 2147483648"),
        (("--draft-vocab", 10**20), f"--draft-vocab {10**20}: Input should be less than 2147483648"),
        (("--set", "max_seq_len=1"), "--set max_seq_len=1: Input should be greater than or equal to 2"),
    ],
)
def test_a_number_that_no_engine_can_have_is_refused(flags, reason, own_pair, tmp_path):
    assert reason in refusal("build", "--model", own_pair, "--output", tmp_path / "engine", *flags)
    assert not (tmp_path / "engine").exists()


def test_what_to_build_must_be_said():
    assert "--model NAME" in refusal("build")
    assert "--target" in refusal("build", "--drafter", "anything")


def test_a_family_that_is_not_computed_says_so(tmp_path):
    entry = {"name": "another", "family": "bert", "target": "org/a", "drafter": "org/b", "block_size": 8}
    file = tmp_path / "another.yaml"
    file.write_text(yaml.safe_dump({**entry, "target_layers": 4, "drafter_layers": 2}))
    line = refusal("build", "--model", file)
    assert f"--model {file}: family bert cannot be built yet" in line
    assert "qwen3, llama" in line
    assert "bert cannot be built yet" in refusal("demo", "--model", file)


def test_a_target_s_repository_means_its_pair():
    command = ("build", "--plan", "--gpu", "h200", "--json", "--model")
    assert json.loads(succeeds(*command, "Qwen/Qwen3-8B")) == json.loads(succeeds(*command, "qwen3-8b"))


def test_a_folder_is_a_target_whose_drafter_is_said(tiny, tmp_path):
    target, drafter, output = TINY / "target", TINY / "drafter", tmp_path / "engine"
    assert "say its drafter too: --drafter" in refusal("build", "--model", target)
    assert "is no folder here and in no known pair, so say its drafter" in refusal("build", "--model", "org/finetuned")
    for nowhere in "./nope", "~/nope", tmp_path / "nope":
        assert refusal("build", "--model", nowhere) == f"error: --model {nowhere}: there is no such folder"
    line = refusal("build", "--model", target, "--target", "org/other", "--drafter", drafter)
    assert "--target org/other: --model" in line
    succeeds("build", "--model", target, "--drafter", drafter, "--precision", "fp32", "--output", output)
    config = read_config(output)
    assert (config.name, config.target, config.drafter) == ("target", tiny.config.target, tiny.config.drafter)


def test_an_unknown_model_suggests_the_closest():
    line = refusal("build", "--model", "qwen3-8B")
    assert "did you mean qwen3-8b" in line
    assert "trtllm-dflash models" in line


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_the_doctor_looks_at_everything_the_package_can_use():
    findings = json.loads(succeeds("doctor", "--json"))
    names = ["Python", "torch", "CUDA GPU", "CUDA kernels", "TensorRT", "TensorRT-RTX", "Triton server"]
    names += ["OpenAI gateway", "MPI", "ModelOpt", "Hugging Face token"]
    assert [finding["name"] for finding in findings] == names
    assert [finding["name"] for finding in findings if finding["present"]][:2] == ["Python", "torch"]
    without = {finding["name"]: finding["cost"] for finding in findings}
    assert without["TensorRT"].startswith("no TensorRT plans")  # torch's engines run on those GPUs
    lines = succeeds("doctor").splitlines()
    for finding in findings:
        mark = "ok" if finding["present"] else "missing"
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{mark:<7}  {finding['name']} ")]
        if not finding["present"]:
            assert finding["cost"] in lines[at + 1]
            assert finding["remedy"] in lines[at + 2]


def test_on_a_bare_machine_every_absence_has_a_cost_and_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    findings = doctor.examine()
    assert [finding.name for finding in findings if finding.present] == ["Python"]
    for finding in findings:
        assert finding.cost
        assert finding.remedy


# -- Ctrl-C while a command begins -----------------------------------------------------------------------------------


def test_ctrl_c_while_the_commands_are_imported_is_one_line(monkeypatch, capsys):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setitem(sys.modules, "trtllm_dflash.cli", Interrupted("cli"))
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            entry.start()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    os._exit.assert_called_once_with(130)
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_torch_is_imported_ends_the_command(number, tmp_path, tiny_engine):
    """Parts of torch's import clear what they meet, an interrupt too: so does all of this one's."""
    (tmp_path / "torch.py").write_text(
        f"import time\nprint('importing', flush=True)\ntry:\n    time.sleep({PATIENCE})\n"
        "except BaseException:\n    raise ImportError('the interrupt was cleared')\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = start([*PYTHON, "generate", "--engine", tiny_engine, "--prompt", "hello"], env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    assert process.communicate(timeout=PATIENCE) == ("", f"error: {ENDING[number]}\n")
    assert process.returncode == 128 + number
