"""`generate`: replies of an engine in this process."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.commands.draft_tree_option import draft_tree_option
from trtllm_dflash.commands.kernels_option import kernels_option
from trtllm_dflash.commands.prompts import check_prompts, check_text, read_prompts
from trtllm_dflash.commands.settings import flag_of, given, validated
from trtllm_dflash.commands.terminal import progress_bar
from trtllm_dflash.errors import RequestError, SettingsError

if TYPE_CHECKING:
    from trtllm_dflash.llm import LLM, Prompt, SamplingParams
    from trtllm_dflash.session.kernels import Kernels


@click.command()
@click.option("--engine", type=click.Path(path_type=Path), required=True, help="Engine directory.")
@click.option("--prompt", "-p", help="A prompt; '-' reads it from standard input.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help='A file of prompts: JSON lines with "prompt", or text lines.'
)
@click.option("--chat/--raw", default=True, help="Apply the chat template to the prompt, or not.  [default: --chat]")
@click.option("--system", help="A system message for the chat template.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.  [default: 256]")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.  [default: 0]")
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
@kernels_option
@draft_tree_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
def generate(
    engine: Path,
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    system: str | None,
    no_draft: bool,
    device: str,
    kernels: "Kernels | None",
    draft_tree: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Generate replies; one prompt streams to the terminal."""
    from trtllm_dflash.engine.directory import read_config
    from trtllm_dflash.runtime.request import SamplingParams
    from trtllm_dflash.session.launcher import check_launched, end_on_interrupt, launch_ranks, launched_rank

    params = validated(SamplingParams, given(flags))
    _check_sampled(flags)
    if system is not None and not chat:
        raise SettingsError("--system: a raw prompt has no system message; leave out --raw")
    if no_draft and draft_tree is not None:
        raise SettingsError("--draft-tree and --no-draft: give one of them")
    texts = read_prompts(prompt, prompts)
    check_text("--system", system or "")
    tp = read_config(engine).tp
    if tp > 1 and launched_rank() is None:
        if prompt == "-":
            raise SettingsError("--prompt -: several ranks cannot share standard input; use --prompts FILE")
        launch_ranks(tp, sys.argv[1:])
    if tp > 1:
        check_launched(tp)
    end_on_interrupt()

    from trtllm_dflash.llm import LLM
    from trtllm_dflash.session.threads import limit_threads
    from trtllm_dflash.text.tokenizer import MAKE_TOKENIZER

    limit_threads(read_config(engine))
    with progress_bar() as progress:
        loaded = LLM.load(engine, device, kernels or "auto", progress=progress, draft_tree=draft_tree or "auto")
    with loaded as llm, _flags_named():
        if llm.session.communicator.rank != 0:
            llm.session.follow()
            return
        if llm.codec is None:
            raise SettingsError(f"--engine {engine}: has no tokenizer, and generate takes texts; {MAKE_TOKENIZER}")
        asked = [_as_chat(text, system) if chat else text for text in texts]
        check_prompts(llm.encode, asked, prompt, prompts)
        if prompt is not None and not as_json:
            _stream(llm, asked[0], params, not no_draft)
            return
        for text, completion in zip(texts, llm.generate_each(asked, params, not no_draft), strict=True):
            if as_json:
                click.echo(json.dumps(completion.as_json()))
            else:
                click.echo(f">>> {text}\n{completion.text}\n")


def _check_sampled(flags: Mapping[str, Any]) -> None:
    """Refuses flags of sampling beside none that has replies sampled: the reply would be the greedy one.

    A seed is none: a greedy reply is the same with any.
    """
    for name in given({name: flags[name] for name in ("top_k", "top_p")}):
        if flags["temperature"] is None:
            raise SettingsError(f"{flag_of(name)}: without --temperature replies are greedy; give both")


@contextmanager
def _flags_named() -> Iterator[None]:
    """Gives a parameter that the engine refuses the name of its flag."""
    try:
        yield
    except RequestError as error:
        if error.field is None:
            raise
        flag = "--stop-token-id" if error.field == "stop_token_ids" else flag_of(error.field)
        raise SettingsError(f"{flag}: {error.reason}") from None


def _as_chat(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]


def _stream(llm: "LLM", prompt: "Prompt", params: "SamplingParams", draft: bool) -> None:
    chunk = None
    try:
        for chunk in llm.stream(prompt, params, draft):
            # echo flushes, so that each chunk is seen at once
            click.echo(chunk.text, nl=False)
    except BaseException:
        if chunk is not None:
            click.echo(err=True)  # the error has a line of its own
        raise
    assert chunk is not None and chunk.completion is not None
    completion = chunk.completion
    rate = len(completion.token_ids) / completion.seconds
    drafted = f", {completion.acceptance_length:.2f} tokens a step" if completion.steps else ""
    click.echo(f"\n[{len(completion.token_ids)} tokens, {rate:.0f} tokens/s{drafted}]", err=True)
