"""Flags of a model repository: those that `deploy` and `serve` share."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.commands.draft_tree_option import draft_tree_option
from trtllm_dflash.commands.kernels_option import kernels_option
from trtllm_dflash.commands.settings import flag_of, given, validated
from trtllm_dflash.errors import SettingsError

if TYPE_CHECKING:
    from trtllm_dflash.serving.repository import DeploySettings


def deploy_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that configure a repository's models."""
    options = (
        click.option("--device", help="cpu, cuda or auto.  [default: auto]"),
        kernels_option,
        click.option("--prefill-tokens", metavar="auto|N", help="Prompt tokens of a step.  [default: auto]"),
        click.option(
            "--itl-slack",
            type=float,
            help="How much longer prompts may make a step, as a share of its time: of --prefill-tokens auto.  "
            "[default: 1]",
        ),
        click.option(
            "--prefill-share",
            type=float,
            help="Share of steps that read prompts while replies run, where a step cannot do both.  [default: 0.5]",
        ),
        click.option("--max-queue", type=int, help="Requests that may wait for a slot.  [default: 256]"),
        click.option(
            "--deadline-seconds",
            type=float,
            help="Most seconds a request may take, waiting included; it may ask for less.  [default: 600]",
        ),
        click.option("--no-draft", is_flag=True, help="Plain decoding on the same engine."),
        click.option("--draft-length", metavar="auto|N", help="Tokens to draft a step.  [default: auto]"),
        draft_tree_option,
        click.option(
            "--harvest", metavar="DIR", help="Folder to keep replies in as token ids, for `train`.  [default: none]"
        ),
        click.option("--harvest-share", type=float, help="Share of the replies to keep.  [default: 0.01]"),
        click.option("--harvest-mb", type=int, help="Most MB of kept replies in all.  [default: 1000]"),
        click.option(
            "--decoupled/--unary", default=None, help="Stream replies, or answer once.  [default: --decoupled]"
        ),
        click.option(
            "--exclude-input-in-output/--include-input-in-output",
            default=None,
            help="Whether an unstreamed reply leaves out its prompt, where the request does not say.  "
            "[default: --include-input-in-output, as in TensorRT-LLM]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def deploy_settings(no_draft: bool, flags: Mapping[str, Any]) -> "DeploySettings":
    """Check those flags together; make the settings of a repository.

    Raises:
        SettingsError: one is wrong.
    """
    from trtllm_dflash.serving.repository import DeploySettings

    values = given(flags)
    for name in ("harvest_share", "harvest_mb"):
        if name in values and "harvest" not in values:
            raise SettingsError(f"{flag_of(name)} goes with --harvest DIR")
    for name in ("draft_length", "draft_tree"):
        if no_draft and name in values:
            raise SettingsError(f"{flag_of(name)} and --no-draft: give one of them")
    return validated(DeploySettings, {**values, **({"draft": False} if no_draft else {})})
