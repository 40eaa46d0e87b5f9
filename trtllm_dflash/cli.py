"""The `trtllm-dflash` command: its group, its error lines, and the commands that it has."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from trtllm_dflash import __version__
from trtllm_dflash.commands.bench import bench
from trtllm_dflash.commands.build import build
from trtllm_dflash.commands.compare import compare
from trtllm_dflash.commands.demo import demo
from trtllm_dflash.commands.deploy import deploy
from trtllm_dflash.commands.doctor import doctor
from trtllm_dflash.commands.export import export
from trtllm_dflash.commands.generate import generate
from trtllm_dflash.commands.inspect import inspect
from trtllm_dflash.commands.launch import launch
from trtllm_dflash.commands.models import models
from trtllm_dflash.commands.quantize import quantize
from trtllm_dflash.commands.report import report
from trtllm_dflash.commands.serve import serve
from trtllm_dflash.commands.sweep import sweep
from trtllm_dflash.commands.terminal import logged_to_terminal
from trtllm_dflash.commands.train import train
from trtllm_dflash.errors import DFlashError, SettingsError
from trtllm_dflash.signals import ENDING, Ended, unwind_on_signals

#: Objects that a command makes before Python looks for garbage among them: its 700 are a tenth of a command's start.
_YOUNG_OBJECTS = 10_000


class _Commands(click.Group):
    """Prints the package's own errors, and the system's, as one line; a signal ends it with 128 and its number."""

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with self._told():  # `--help` and `--version` are written here
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        unwind_on_signals()
        with self._told():
            _check_working_directory()
            return super().invoke(ctx)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except DFlashError as error:
            from trtllm_dflash.session.launcher import launched_rank

            if launched_rank():  # rank 0 speaks for all
                sys.exit(1)
            self._fail(str(error), 1)
        except KeyboardInterrupt:
            self._fail(ENDING[signal.SIGINT], 128 + signal.SIGINT)
        except Ended as ended:
            self._fail(ended.reason, ended.code)
        except BrokenPipeError:
            # The reader of our output has gone (`| head`): nothing is wrong, and nothing more can be said.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as error:  # a file that may not be read, a name that is too long, a disk that is full
            named = "" if error.filename is None else f"{error.filename}: "
            self._fail(f"{named}{error.strerror or error}", 1)

    @staticmethod
    def _fail(message: str, code: int) -> NoReturn:
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(code)


def _check_working_directory() -> None:
    """Refuses a working directory that was removed: libraries end the process there, and name something else."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise SettingsError("the working directory was removed; cd to one that is there") from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version")
@click.option("--verbose", "-v", is_flag=True, help="Say on standard error what is chosen when an engine is loaded.")
@click.pass_context
def main(context: click.Context, verbose: bool) -> None:
    """DFlash speculative decoding: the same text, several times sooner."""
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a reply may have more characters than a terminal's encoding
    if verbose:
        context.with_resource(logged_to_terminal())


main.add_command(models)
main.add_command(build)
main.add_command(quantize)
main.add_command(train)
main.add_command(inspect)
main.add_command(generate)
main.add_command(deploy)
main.add_command(serve)
main.add_command(bench)
main.add_command(sweep)
main.add_command(report)
main.add_command(demo)
main.add_command(doctor)
main.add_command(launch)
main.add_command(compare)
main.add_command(export)
