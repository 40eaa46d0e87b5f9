"""Flags of a pair on another runtime: those that `launch` and `deploy` share."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.commands.settings import given, validated
from trtllm_dflash.errors import SettingsError

if TYPE_CHECKING:
    from trtllm_dflash.foreign.plan import LaunchSettings

#: The parameters that `pair_options` adds to a command.
PAIR_FLAGS = ("runtime", "model", "target", "drafter", "method", "gpu", "tp", "max_batch", "max_seq_len")


def pair_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that choose a pair, a runtime and a GPU."""
    options = (
        click.option("--runtime", help="tensorrt-llm, vllm or sglang."),
        click.option("--model", help="A known pair (see `models`)."),
        click.option("--target", help="Target: a folder or a Hugging Face name."),
        click.option("--drafter", help="Drafter: a folder or a Hugging Face name."),
        click.option("--method", help="dflash, eagle3 or none.  [default: dflash]"),
        click.option("--gpu", help="GPU to plan for: b300, h200, ...  [default: the one present]"),
        click.option("--tp", type=int, help="Tensor-parallel GPUs.  [default: 1]"),
        click.option("--max-batch", type=int, help="Sequences at a time.  [default: what fits, at most 64]"),
        click.option("--max-seq-len", type=int, help="Prompt and reply together.  [default: 16384, or what is taken]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def launch_settings(flags: Mapping[str, Any]) -> "LaunchSettings":
    """Check those flags and `launch`'s own together; make its settings.

    Raises:
        SettingsError: one is wrong, or there is no runtime.
    """
    from trtllm_dflash.foreign.plan import LaunchSettings

    values = given(flags)
    if "runtime" not in values:
        raise SettingsError("--runtime: say which: tensorrt-llm, vllm or sglang")
    return validated(LaunchSettings, values)
