"""The `trtllm-dflash` command; each subcommand is a few lines over one function of the package."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from pydantic import BaseModel, ValidationError
from rich.table import Table

from trtllm_dflash import __version__, api_key
from trtllm_dflash.api_key import read_api_key
from trtllm_dflash.commands.sweep import report_command, sweep_command
from trtllm_dflash.errors import DFlashError, SettingsError
from trtllm_dflash.foreign.commands import PAIR_FLAGS, RUNTIME, compare, deploy_runtime, export, launch, pair_options
from trtllm_dflash.terminal import progress_bar, show

if TYPE_CHECKING:
    from trtllm_dflash.bench.step import StepReport
    from trtllm_dflash.llm import LLM, Prompt, SamplingParams
    from trtllm_dflash.serving.serve import Serving

ENGINES = Path("engines")
DEMO_GPU = "sm120"  # what the demo compiles for, where TensorRT-RTX is installed


class _Commands(click.Group):
    """Prints the package's own errors as one line, and ends an interrupted command with 130."""

    def invoke(self, ctx: click.Context) -> Any:
        # A polite kill unwinds as an error does: what is half-written goes, and the ranks are let go.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            return super().invoke(ctx)
        except DFlashError as error:
            from trtllm_dflash.session.ranks import launched_rank

            if launched_rank():  # rank 0 speaks for all
                sys.exit(1)
            self._fail(str(error), 1)
        except KeyboardInterrupt:
            self._fail("interrupted", 128 + signal.SIGINT)
        except BrokenPipeError:
            # The reader of our output has gone (`| head`): nothing is wrong, and nothing more can be said.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)

    @staticmethod
    def _fail(message: str, code: int) -> NoReturn:
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version")
def main() -> None:
    """DFlash speculative decoding: the same text, several times sooner."""


# -- models ----------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the known pairs, and which can be built today."""
    from trtllm_dflash.catalog import load_catalog

    entries = load_catalog()
    if as_json:
        rows = [{**entry.model_dump(mode="json"), "buildable": entry.buildable} for entry in entries.values()]
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "family", "target", "drafter", "block", "tap layers / target layers", "builds today")
    for entry in entries.values():
        taps = ",".join(map(str, entry.tap_layers)) if entry.tap_layers else "from checkpoint"
        layers = f"{taps} / {entry.target_layers}"
        block = str(entry.block_size) if entry.block_size else "?"
        built = "yes" if entry.buildable else "no"
        table.add_row(entry.name, entry.family, entry.target, entry.drafter, block, layers, built)
    show(table)


# -- build -----------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--model", help="A known pair (see `models`), or a build configuration file (.yaml).")
@click.option("--target", help="Target checkpoint: a folder or a Hugging Face name.")
@click.option("--drafter", help="Drafter checkpoint: a folder or a Hugging Face name.")
@click.option("--output", type=click.Path(path_type=Path), help="Engine directory.  [default: engines/NAME]")
@click.option(
    "--precision",
    help="fp32, bf16, fp16, fp8 or nvfp4; auto: the fewest bits that the GPU multiplies and the checkpoint allows.  "
    "[default: a quantized checkpoint's own, else bf16 with a GPU, fp32 without]",
)
@click.option("--tp", type=int, help="Tensor-parallel ranks.")
@click.option("--ep", is_flag=True, default=None, help="Whole experts on each rank, not a slice of each.")
@click.option("--max-batch", type=int, help="Slots: sequences at a time.")
@click.option("--max-seq-len", type=int, help="Prompt and reply together, tokens.")
@click.option("--chunk", type=int, help="Prompt tokens in one prefill step.")
@click.option("--block-size", type=int, help="Bonus token and drafts; at most the drafter's.")
@click.option("--draft-vocab", type=int, help="Draft among the N most frequent tokens only; the text stays the same.")
@click.option("--draft-text", help="What those are counted in: a text file, or JSON lines (.jsonl).")
@click.option("--drafter-precision", help="auto, fp8 or nvfp4: of the drafter's matrices; the text stays the same.")
@click.option(
    "--kv",
    help="fp8: caches in half the bytes; engine: in the engine's own type.  [default: auto, as the target's says]",
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any of these settings by its name.")
@click.option("--force", is_flag=True, help="Replace what stands at --output.")
@click.option("--backend", help="torch or tensorrt.  [default: torch]")
@click.option("--gpu", help="tensorrt, --plan: for which GPU: its name, or to compile sm89, sm120, ...")
@click.option("--sampling/--greedy", default=None, help="tensorrt: whether the plan can sample.  [default: --sampling]")
@click.option("--optimization-level", type=int, help="tensorrt: 0 (fast to build) to 5.  [default: 3]")
@click.option("--workspace", type=int, help="tensorrt: MiB of scratch that a kernel may take.")
@click.option("--workers", type=int, help="tensorrt: ranks compiled at a time.  [default: 1]")
@click.option(
    "--plugin",
    is_flag=False,
    flag_value=str(Path(__file__).parents[1] / "plugins" / "build" / "libdflash_plugin.so"),
    metavar="[FILE]",
    help="tensorrt, datacenter edition: attention is our plugin.  [FILE: plugins/build/libdflash_plugin.so]",
)
@click.option("--plan", is_flag=True, help="Build nothing: print memory and speed on --gpu. Needs no checkpoint.")
@click.option("--acceptance", type=float, help="--plan: tokens a step with the drafter's whole block, for tokens/s.")
@click.option(
    "--cache-length", type=int, help="--plan: tokens that each slot holds in a step.  [default: 1024, or less]"
)
@click.option("--json", "as_json", is_flag=True, help="--plan: print JSON.")
def build(
    model: str | None,
    output: Path | None,
    assignments: tuple[str, ...],
    force: bool,
    plan: bool,
    acceptance: float | None,
    cache_length: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Build an engine directory from a target and its drafter."""
    from trtllm_dflash.build import builder
    from trtllm_dflash.engine.directory import read_config

    given = {key: value for key, value in flags.items() if value is not None}
    asked = {"acceptance": acceptance, "cache_length": cache_length, "json": as_json or None}
    if plan:
        for name in [name for name, value in {"output": output, "force": force or None}.items() if value is not None]:
            raise SettingsError(f"--{name}: --plan writes nothing")
        _show_plan(model, assignments, given, asked)
        return
    for name, value in asked.items():
        if value is not None:
            raise SettingsError(f"--{name.replace('_', '-')}: goes with --plan")
    settings = _build_settings(model, assignments, given)
    output = output or ENGINES / settings.name
    said: list[str] = []
    with progress_bar() as progress:
        built = builder.build(settings, output, force, progress=progress, say=said.append)
    for line in said:
        click.echo(line)
    click.echo(f"{output}: {'built' if built else 'up to date'}")
    if transcoded := read_config(output).transcoded:
        click.echo(f"{output}: {transcoded}")


def _show_plan(model: str | None, assignments: tuple[str, ...], flags: dict[str, Any], asked: dict[str, Any]) -> None:
    from trtllm_dflash.build.plan import BuildPlan, PlanSettings, compare_gpus, make_plan
    from trtllm_dflash.commands.plan_table import comparison_lines, plan_lines

    settings = _build_settings(model, assignments, {key: value for key, value in flags.items() if key != "gpu"})
    gpu, as_json = flags.get("gpu") or settings.gpu, asked.pop("json")
    values = {key: value for key, value in asked.items() if value is not None}
    wanted = validated(PlanSettings, {**values, **({"gpu": gpu.lower()} if gpu else {})}, "--")
    settings = settings.model_copy(update={"gpu": None})
    found = make_plan(settings, wanted) if gpu else compare_gpus(settings, wanted)
    if as_json:
        command = shlex.join(["trtllm-dflash", *sys.argv[1:]])
        click.echo(found.model_copy(update={"command": command}).model_dump_json(indent=2))
        return
    show(*(plan_lines(found) if isinstance(found, BuildPlan) else comparison_lines(found)))


def _build_settings(model: str | None, assignments: tuple[str, ...], flags: dict[str, Any]) -> Any:
    """Settings from the pair's build configuration, then --set, then flags; each overrides the one before."""
    from trtllm_dflash.build.builder import BuildSettings
    from trtllm_dflash.build.values import merge_values

    return validated(BuildSettings, merge_values(model, assignments, flags), "--")


def validated(kind: type[BaseModel], values: dict[str, Any], prefix: str = "") -> Any:
    """A settings object; what is wrong is one line that names the knob.

    Raises:
        SettingsError: a value is of the wrong type, out of range, or unknown.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        knob = prefix + str(first["loc"][0]).replace("_", "-")
        if len(first["loc"]) > 1 and isinstance(first["loc"][1], int):  # a flag that may be repeated is in the singular
            knob = knob.removesuffix("s")
        if first["type"] == "extra_forbidden":
            known = ", ".join(name for name, field in kind.model_fields.items() if not field.exclude)
            raise SettingsError(f"{knob}: no such setting; there are: {known}") from None
        raise SettingsError(f"{knob} {first['input']}: {first['msg']}") from None


# -- quantize --------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--model", help="A known pair (see `models`), or a target's folder.")
@click.option("--target", help="Target checkpoint: a folder or a Hugging Face name.")
@click.option("--drafter", help="Drafter checkpoint: a folder or a Hugging Face name.")
@click.option("--format", required=True, help="fp8 or nvfp4.")
@click.option("--kv", help="fp8: find the scales of FP8 caches too.")
@click.option("--only", help="target or drafter.  [default: both]")
@click.option("--output", type=click.Path(path_type=Path), help="Folder.  [default: quantized/NAME-FORMAT]")
@click.option("--text", type=click.Path(path_type=Path), help="To calibrate on: text, or .jsonl.  [default: shipped]")
@click.option("--samples", type=int, help="To calibrate with.  [default: 128]")
@click.option("--held-back", type=int, help="Other samples, to measure with.  [default: 8]")
@click.option("--length", type=int, help="Tokens of a sample, at most.  [default: 512]")
@click.option("--max-tokens", type=int, help="Of the replies that acceptance is measured on.  [default: 128]")
@click.option("--device", default="auto", help="cpu, cuda or auto.  [default: auto]")
@click.option("--force", is_flag=True, help="Replace what stands at --output.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def quantize(model: str | None, output: Path | None, force: bool, as_json: bool, **flags: Any) -> None:
    """Quantize a pair with NVIDIA ModelOpt and report what that costs."""
    from trtllm_dflash.catalog import find_entry
    from trtllm_dflash.quantize import quantizer, report

    values = {key: value for key, value in flags.items() if value is not None}
    if model is not None and Path(model).is_dir():
        values.setdefault("target", model)
    elif model is not None:
        entry = find_entry(model)
        values = {"target": entry.target, "drafter": entry.drafter, **values}
    if "target" not in values:
        raise SettingsError("say what to quantize: --model NAME or DIR, or --target with --drafter")
    settings = validated(quantizer.QuantizeSettings, values, "--")
    name = model if model is not None and not Path(model).is_dir() else Path(str(values["target"])).resolve().name
    output = output or Path("quantized") / f"{name}-{settings.format}"
    with progress_bar() as progress:
        made = quantizer.quantize(settings, output, force, progress)
    if as_json:
        click.echo(json.dumps(report.as_json(made), indent=2))
        return
    click.echo(report.as_markdown(made))
    click.echo(f"\n{output}: written; build with --target and --drafter, and what was quantized from there")


# -- inspect ---------------------------------------------------------------------------------------------------------


@main.command("inspect")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--caches", is_flag=True, help="List the K/V caches among the inputs and outputs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(engine: Path, caches: bool, as_json: bool) -> None:
    """Say what an engine directory holds, and the memory it needs."""
    from trtllm_dflash.build.inspection import inspect_engine
    from trtllm_dflash.engine.directory import PLUGIN_FILE

    found = inspect_engine(engine)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    config, memory = found.config, found.memory
    pair = f"{config.target.family}, {config.target.layers} layers of {config.target.hidden_size}"
    if found.drafter is not None:
        pair += f"; {found.drafter}"
    rows = {
        "engine": f"{config.name} ({config.backend})",
        "pair": pair,
        "precision": found.precision + (", caches in fp8" if config.kv == "fp8" else ""),
        "tp": str(config.tp),
        "limits": f"{config.max_batch} slots, {config.max_seq_len} tokens, prefill chunks of {config.chunk}",
        "GPU": config.gpu or "any",
        "versions": ", ".join(f"{name} {version}" for name, version in config.versions.items()),
    }
    for rank, plan in enumerate(config.plans):
        rows[f"plan {rank}"] = f"{plan.layers} layers, {plan.weights} weights, compiled in {plan.seconds:.1f} s"
    if config.plugin is not None:
        rows["attention"] = f"plugin, {PLUGIN_FILE} {config.plugin[:12]}"
    if config.transcoded is not None:
        rows["experts"] = str(config.transcoded)
    rows |= {name: f"{size / 1e6:,.1f} MB" for name, size in found.sizes.items()}
    parts = {"weights": memory.weights, "target cache": memory.target_cache, "drafter cache": memory.drafter_cache}
    parts |= {"scratch (estimate)": memory.scratch, "total": memory.total}
    rows["memory per GPU"] = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in parts.items())
    for name, text in rows.items():
        click.echo(f"{name:<18} {text}")
    hidden = set() if caches else {name for name in (*found.io.inputs, *found.io.outputs) if ".layers." in name}
    for side, bindings in (("input", found.io.inputs), ("output", found.io.outputs)):
        for name, binding in bindings.items():
            if name not in hidden:
                shape = "[" + ", ".join("?" if size == -1 else str(size) for size in binding.shape) + "]"
                click.echo(f"{side:<18} {name} {shape} {str(binding.dtype).removeprefix('torch.')}")
    if hidden:
        click.echo(f"{'':<18} and {len(hidden) // 2} K/V caches, updated in place (--caches lists them)")


# -- generate --------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--engine", type=click.Path(path_type=Path), required=True, help="Engine directory.")
@click.option("--prompt", "-p", help="A prompt; '-' reads it from standard input.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help='A file of prompts: JSON lines with "prompt", or text lines.'
)
@click.option("--chat/--raw", default=True, help="Through the chat template, or as it is.  [default: --chat]")
@click.option("--system", help="A system message for the chat template.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.  [default: 256]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 0]")
@click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all.  [default: 0]")
@click.option("--top-p", type=float, help="Keep the most likely tokens that reach P together.  [default: 1]")
@click.option("--seed", type=int, help="Seed of sampling.  [default: 0]")
@click.option("--stop", multiple=True, help="A text that ends the reply; may be given again.")
@click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="A token that ends the reply.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end token.")
@click.option(
    "--no-draft", is_flag=True, help="Plain decoding on the same engine. A TensorRT plan still runs its drafter."
)
@click.option("--device", default="auto", help="cpu, cuda or auto.  [default: auto]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
def generate(
    engine: Path,
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    system: str | None,
    no_draft: bool,
    device: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Generate replies; one prompt streams to the terminal."""
    from trtllm_dflash.engine.directory import read_config
    from trtllm_dflash.runtime.request import SamplingParams
    from trtllm_dflash.session.ranks import end_on_interrupt, launch_ranks, launched_rank

    given = {key: value for key, value in flags.items() if value not in (None, ())}
    params = validated(SamplingParams, given, "--")
    if system is not None and not chat:
        raise SettingsError("--system: a raw prompt has no system message; leave out --raw")
    texts = read_prompts(prompt, prompts)
    tp = read_config(engine).tp
    if tp > 1 and launched_rank() is None:
        if prompt == "-":
            raise SettingsError("--prompt -: several ranks cannot share standard input; use --prompts FILE")
        launch_ranks(tp, sys.argv[1:])
    end_on_interrupt()

    from trtllm_dflash.llm import LLM
    from trtllm_dflash.session.threads import limit_threads

    limit_threads(read_config(engine))
    with LLM.load(engine, device) as llm:
        if llm.session.communicator.rank != 0:
            llm.session.follow()
            return
        asked = [_as_chat(text, system) if chat else text for text in texts]
        if prompt is not None and not as_json:
            _stream(llm, asked[0], params, not no_draft)
            return
        for text, completion in zip(texts, llm.generate(asked, params, not no_draft), strict=True):
            if as_json:
                click.echo(json.dumps(completion.as_json()))
            else:
                click.echo(f">>> {text}\n{completion.text}\n")


def _as_chat(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    if (prompt is None) == (file is None):
        raise SettingsError("give one of --prompt TEXT and --prompts FILE")
    if file is None:
        assert prompt is not None
        return [_read_standard_input() if prompt == "-" else prompt]
    try:
        # Not splitlines: it also splits at U+2028 and the like, which stand as they are inside JSON.
        lines = [line.rstrip("\r") for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompts {file}: cannot be read: {error}") from None
    prompts = [_read_prompt_line(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise SettingsError(f"--prompts {file}: holds no prompt")
    return prompts


def _read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SettingsError(f"--prompt -: standard input is not text: {error}") from None


def _read_prompt_line(file: Path, number: int, line: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        text = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError):
        text = None
    if not isinstance(text, str):
        raise SettingsError(f'--prompts {file}: line {number} is not a JSON object with a text "prompt"')
    return text


def _stream(llm: "LLM", prompt: "Prompt", params: "SamplingParams", draft: bool) -> None:
    completion = None
    for chunk in llm.stream(prompt, params, draft):
        click.echo(chunk.text if llm.codec else "".join(f"{token} " for token in chunk.token_ids), nl=False)
        sys.stdout.flush()
        completion = chunk.completion
    assert completion is not None
    rate = len(completion.token_ids) / completion.seconds
    drafted = f", {completion.acceptance_length:.2f} tokens a step" if completion.steps else ""
    click.echo(f"\n[{len(completion.token_ids)} tokens, {rate:.0f} tokens/s{drafted}]", err=True)


# -- deploy, serve ---------------------------------------------------------------------------------------------------


def _deploy_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags of a model repository."""
    options = (
        click.option("--device", help="cpu, cuda or auto.  [default: auto]"),
        click.option("--prefill-share", type=float, help="Share of steps for prompts beside replies.  [default: 0.5]"),
        click.option("--max-queue", type=int, help="Requests that may wait for a slot.  [default: 256]"),
        click.option("--no-draft", is_flag=True, help="Plain decoding on the same engine."),
        click.option("--draft-length", metavar="auto|N", help="Tokens to draft a step.  [default: auto]"),
        click.option("--decoupled/--unary", default=None, help="Whether models stream.  [default: --decoupled]"),
        click.option(
            "--exclude-input-in-output/--include-input-in-output",
            default=None,
            help="Whether a reply leaves out its prompt.  [default: --exclude-input-in-output]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _deploy_settings(no_draft: bool, flags: dict[str, Any]) -> Any:
    from trtllm_dflash.serving.repository import DeploySettings

    given = {key: value for key, value in flags.items() if value is not None}
    if str(given.get("draft_length", "auto")).isdecimal():
        given["draft_length"] = int(given["draft_length"])
    return validated(DeploySettings, {**given, **({"draft": False} if no_draft else {})}, "--")


@main.command("deploy")
@click.option("--engine", type=click.Path(path_type=Path), help="Engine directory.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Model repository to write.")
@click.option("--force", is_flag=True, help="Replace what stands at --output.")
@_deploy_options
@RUNTIME
@pair_options
def deploy_command(engine: Path | None, output: Path, force: bool, no_draft: bool, **flags: Any) -> None:
    """Write a Triton model repository: of an engine, or of a pair (--runtime)."""
    pair = {name: flags.pop(name) for name in PAIR_FLAGS}
    if pair["runtime"] is not None:
        deploy_runtime(output, force, pair, {"engine": engine, "no_draft": no_draft or None, **flags})
        return
    given = next((name for name, value in pair.items() if value is not None), None)
    if given is not None:
        raise SettingsError(f"--{given.replace('_', '-')}: belongs to --runtime tensorrt-llm; an engine has its own")
    if engine is None:
        raise SettingsError("--engine: say which engine to deploy, or a pair: --runtime tensorrt-llm --model NAME")
    from trtllm_dflash.serving.repository import deploy

    deploy(engine, output, _deploy_settings(no_draft, flags), force)
    click.echo(f"{output}: written; serve it: trtllm-dflash serve --engine {engine} --repository {output}")


@main.command()
@click.option("--engine", type=click.Path(path_type=Path), required=True, help="Engine directory.")
@click.option("--host", default="127.0.0.1", help="Address to listen at.  [default: 127.0.0.1, this machine only]")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, help="0: any free one.  [default: 8000]")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, help="0: any free one.  [default: 8001]")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=8002, help="Prometheus.  [default: 8002]")
@click.option("--openai-port", type=click.IntRange(0, 65535), help="Serve the OpenAI API too, at this port.")
@click.option(
    "--openai-api-key-file",
    type=click.Path(path_type=Path),
    help=f"File with the key that clients of the OpenAI API must send. {api_key.VARIABLE} may hold the key instead.",
)
@click.option("--repository", type=click.Path(path_type=Path), help="A model repository that `deploy` wrote.")
@click.option("--log", type=click.Path(path_type=Path), help="File that Triton's log is added to.")
@click.option("--json", "as_json", is_flag=True, help="Print the endpoints as one line of JSON.")
@_deploy_options
def serve(
    engine: Path,
    openai_api_key_file: Path | None,
    repository: Path | None,
    log: Path | None,
    as_json: bool,
    no_draft: bool,
    **flags: Any,
) -> None:
    """Serve an engine with Triton, until Ctrl-C."""
    from trtllm_dflash.serving.serve import serving
    from trtllm_dflash.serving.server import Endpoints

    at = {name: flags.pop(name) for name in ("host", "http_port", "grpc_port", "metrics_port", "openai_port")}
    endpoints = Endpoints(**at)
    fixed = [name for name, value in {"no_draft": no_draft or None, **flags}.items() if value is not None]
    if repository is not None and fixed:
        flag = "--" + fixed[0].replace("_", "-")
        raise SettingsError(f"{flag}: --repository has its own settings; give this to deploy")
    key = None
    if endpoints.openai_port is not None:
        key = read_api_key(openai_api_key_file, "--openai-api-key-file")
    elif openai_api_key_file is not None:
        raise SettingsError("--openai-api-key-file: there is no OpenAI API without --openai-port")
    if not endpoints.local:
        click.echo(f"warning: at --host {endpoints.host} anyone who reaches this machine can use Triton", err=True)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    settings = _deploy_settings(no_draft, flags)
    if endpoints.openai_port is not None and not settings.decoupled:
        raise SettingsError("--unary: the OpenAI API streams, which these models would not; leave out --openai-port")
    try:
        with ExitStack() as stack:
            with progress_bar() as progress:
                running = stack.enter_context(
                    serving(engine, settings, endpoints, repository=repository, api_key=key, log=log, progress=progress)
                )
            _show_endpoints(engine, running, as_json)
            running.wait()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _show_endpoints(engine: Path, running: "Serving", as_json: bool) -> None:
    at = running.endpoints
    rows = {
        "http": at.http,
        "grpc": at.grpc,
        "metrics": at.metrics,
        "openai": at.openai,
        "log": str(running.server.log),
    }
    if as_json:
        click.echo(json.dumps({"engine": str(engine), **rows}))
    else:
        click.echo(f"serving {engine} (Ctrl-C ends it)")
        for name, place in rows.items():
            if place is not None:
                click.echo(f"  {name:<8} {place}")
    sys.stdout.flush()


# -- bench -----------------------------------------------------------------------------------------------------------


@main.group()
def bench() -> None:
    """Measure what this machine makes of an engine."""


@bench.command("step")
@click.option("--engine", type=click.Path(path_type=Path), help="Engine directory.")
@click.option("--shape", help="Random weights of a model's shape instead: qwen3-8b, llama-3.1-8b, tiny, ...")
@click.option("--precision", help="--shape: auto, fp32, bf16, fp16 or fp8; auto is bf16 with a GPU, fp32 without.")
@click.option("--tp", type=int, help="--shape: tensor-parallel ranks.  [default: 1]")
@click.option("--layers", type=int, help="--shape: layers of the target, for a smaller try.  [default: the shape's]")
@click.option("--drafter-precision", help="--shape: fp8: of the drafter's matrices.  [default: the target's]")
@click.option("--kv", help="--shape: fp8: of the caches.  [default: --precision's own type]")
@click.option("--draft-vocab", type=int, help="--shape: tokens that can be drafted.  [default: all]")
@click.option("--device", default="auto", help="cpu, cuda or auto.  [default: auto]")
@click.option("--batch", metavar="N,N,...", help="Slots that decode together.  [default: 1,8,32]")
@click.option("--rows", metavar="N,N,...", help="Rows a step verifies; 1: no drafts.  [default: 1, half a block, all]")
@click.option("--cache-length", type=int, help="Tokens that each slot holds.  [default: 1024, or less where less fits]")
@click.option("--simulate-acceptance", type=float, help="Tokens a step to impose on the whole block, for tokens/s.")
@click.option("--rounds", type=int, help="The median is taken of so many.  [default: 7]")
@click.option("--steps", type=int, help="In a round.  [default: 20]")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON to this file.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it: a .png, .pdf or .svg file.")
def bench_step(json_file: Path | None, plot: Path | None, **flags: Any) -> None:
    """Time plain and drafted steps against the least that they could take."""
    from trtllm_dflash.bench.plot import check_plot, plot_steps
    from trtllm_dflash.bench.step import StepBenchSettings, open_bench, ranks_of
    from trtllm_dflash.session.ranks import end_on_interrupt, launch_ranks, launched_rank

    given = {key: value for key, value in flags.items() if value is not None}
    settings = validated(StepBenchSettings, given, "--")
    for flag, file in {"--json": json_file, "--plot": plot}.items():
        if file is not None and not file.absolute().parent.is_dir():
            raise SettingsError(f"{flag} {file}: there is no folder {file.parent}")
    if plot is not None:
        check_plot(plot)
    tp = ranks_of(settings)
    if tp > 1 and launched_rank() is None:
        launch_ranks(tp, sys.argv[1:])
    end_on_interrupt()
    with open_bench(settings) as steps:
        if steps is None:
            return
        try:
            with progress_bar() as progress:
                steps.run(progress)
        finally:  # interrupted: what was finished by then
            if steps.report.lines:
                _show_steps(steps.report)
                if json_file is not None:
                    command = shlex.join(["trtllm-dflash", *sys.argv[1:]])
                    _write(json_file, json.dumps({"command": command, **steps.report.as_json()}, indent=2) + "\n")
        if plot is not None:
            plot_steps(steps.report, plot)


def _show_steps(report: "StepReport") -> None:
    from trtllm_dflash.commands.step_table import foot_lines, head_lines, step_table

    show(*head_lines(report), step_table(report), *foot_lines(report))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise SettingsError(f"{file}: cannot be written ({error.strerror})") from None


main.add_command(sweep_command)
main.add_command(report_command)


# -- demo, doctor ----------------------------------------------------------------------------------------------------


@main.command()
@click.option("--model", default="tiny", help="A known pair.  [default: tiny]")
@click.option("--prompts-per-kind", type=click.IntRange(min=1), default=6, help="Prompts of each kind.  [default: 6]")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, help="Most tokens a reply.  [default: 256]")
@click.option("--device", default="auto", help="cpu, cuda or auto.  [default: auto]")
@click.option("--output", type=click.Path(path_type=Path), help="Engine directory.  [default: engines/NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")
def demo(model: str, prompts_per_kind: int, max_tokens: int, device: str, output: Path | None, as_json: bool) -> None:
    """Watch the drafter speed up the model without changing a token."""
    from trtllm_dflash.build import builder
    from trtllm_dflash.demo import run_demo
    from trtllm_dflash.engine.directory import read_config
    from trtllm_dflash.ops.tensorrt_ops import load_tensorrt

    settings = _build_settings(model, (), {"precision": "fp32"})
    engine = output or ENGINES / settings.name
    with progress_bar() as progress:
        builder.build(settings, engine, refresh=True, progress=progress)
    result = run_demo(engine, prompts_per_kind, max_tokens, device, show=not as_json)
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    elif find_spec("tensorrt_rtx") and load_tensorrt().__name__ == "tensorrt_rtx":
        plan = engine.with_name(f"{engine.name}-{DEMO_GPU}")
        compiled = _build_settings(model, (), {"backend": "tensorrt", "gpu": DEMO_GPU})
        with progress_bar() as progress:
            builder.build(compiled, plan, refresh=True, progress=progress)
        summary = read_config(plan).plans[0]
        click.echo(
            f"\n{plan}: the same step compiled by TensorRT-RTX for {DEMO_GPU.upper()}, not run here: "
            f"{summary.layers} layers, {summary.bytes / 1e6:.0f} MB, {summary.seconds:.1f} s"
        )
    if not result.identical:
        sys.exit(1)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine has, what each absence costs, and how to get it."""
    from trtllm_dflash.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.__dict__ for finding in findings], indent=2))
        return
    for finding in findings:
        mark = "ok     " if finding.present else "missing"
        click.echo(f"{mark}  {finding.name:<16} {finding.detail}")
        if not finding.present:
            click.echo(f"{'':<26} costs: {finding.cost}\n{'':<26} get it: {finding.remedy}")


# -- other runtimes --------------------------------------------------------------------------------------------------

main.add_command(launch)
main.add_command(compare)
main.add_command(export)
