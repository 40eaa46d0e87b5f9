"""`serve`: an engine behind Triton, until it is interrupted."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.api_key import VARIABLE, read_api_key
from trtllm_dflash.commands.deploy_options import deploy_options, deploy_settings
from trtllm_dflash.commands.settings import flag_of, given
from trtllm_dflash.commands.terminal import progress_bar
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.signals import Ended

if TYPE_CHECKING:
    from trtllm_dflash.serving.endpoints import Endpoints
    from trtllm_dflash.serving.serve import Serving

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+")

#: As Triton takes it.
MOST_DRAIN_SECONDS = 2**31 // 1000


@click.command()
@click.option("--engine", type=click.Path(path_type=Path), required=True, help="Engine directory.")
@click.option("--host", default="127.0.0.1", help="Address of the OpenAI API.  [default: 127.0.0.1, this machine only]")
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=8000,
    help="Triton's HTTP port; 0: any free one.  [default: 8000]",
)
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=8001,
    help="Triton's gRPC port; 0: any free one.  [default: 8001]",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=8002,
    help="Port of Prometheus metrics; 0: any free one.  [default: 8002]",
)
@click.option("--openai-port", type=click.IntRange(0, 65535), help="Serve the OpenAI API too, at this port.")
@click.option(
    "--openai-api-key-file",
    type=click.Path(path_type=Path),
    help=f"File with the key that clients of the OpenAI API must send. {VARIABLE} may hold the key instead.",
)
@click.option(
    "--openai-origin",
    "openai_origins",
    multiple=True,
    help="Origin of a web page, as https://chat.example, that may use the OpenAI API from its visitors' browsers; may "
    "be given several times.  [default: none]",
)
@click.option(
    "--expose-triton",
    is_flag=True,
    help="Triton and its metrics listen at --host too. They have no key: whoever reaches them can fill the memory, and "
    "end a Triton with known holes.",
)
@click.option("--repository", type=click.Path(path_type=Path), help="A model repository that `deploy` wrote.")
@click.option("--log", type=click.Path(path_type=Path), help="File that Triton's log is added to.")
@click.option(
    "--drain-seconds",
    type=float,
    default=30.0,
    help="Seconds that running requests have to finish at the end; then they get an error.  [default: 30]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the endpoints as one line of JSON.")
@deploy_options
def serve(
    engine: Path,
    openai_api_key_file: Path | None,
    openai_origins: tuple[str, ...],
    repository: Path | None,
    log: Path | None,
    drain_seconds: float,
    as_json: bool,
    no_draft: bool,
    **flags: Any,
) -> None:
    """Serve an engine with Triton, until Ctrl-C."""
    from trtllm_dflash.serving.endpoints import Endpoints
    from trtllm_dflash.serving.serve import serving

    if not 0 <= drain_seconds <= MOST_DRAIN_SECONDS:
        raise SettingsError(f"--drain-seconds {drain_seconds:g}: must be from 0 to {MOST_DRAIN_SECONDS}")
    endpoints = Endpoints(**{field.name: flags.pop(field.name) for field in fields(Endpoints)})
    fixed = list(given({"no_draft": no_draft or None, **flags}))
    if repository is not None and fixed:
        raise SettingsError(f"{flag_of(fixed[0])}: --repository has its own settings; give this to deploy")
    key = _read_key(endpoints, openai_api_key_file)
    _check_origins(endpoints, openai_origins)
    for risk in _risks(endpoints, key):
        click.echo(f"warning: {risk}", err=True)
    settings = deploy_settings(no_draft, flags)
    try:
        with ExitStack() as stack:
            with progress_bar() as progress:
                running = stack.enter_context(
                    serving(
                        engine,
                        settings,
                        endpoints,
                        repository=repository,
                        api_key=key,
                        origins=openai_origins,
                        log=log,
                        progress=progress,
                        drain_seconds=drain_seconds,
                    )
                )
            _show_endpoints(engine, running, as_json)
            try:
                running.wait()
            except (KeyboardInterrupt, Ended):
                if sys.stderr is not None and sys.stderr.isatty():
                    click.echo(f"ending: what runs has {drain_seconds:g} s (Ctrl-C again ends it at once)", err=True)
                raise
    except KeyboardInterrupt:  # no error: this is how a server ends
        sys.exit(128 + signal.SIGINT)
    except Ended as ended:
        sys.exit(ended.code)


def _risks(endpoints: "Endpoints", key: str | None) -> Iterator[str]:
    """Says what others than this machine's users may do, in a line each."""
    if endpoints.local:
        return
    if endpoints.expose_triton:
        yield (
            f"--expose-triton: whoever reaches {endpoints.host} can use Triton without a key, fill its memory, and end "
            "one that is older than 25.07 with a single request"
        )
    if endpoints.openai_port is not None and key is None:
        yield f"--host {endpoints.host}: the OpenAI API has no key; give it one: --openai-api-key-file, or {VARIABLE}"


def _read_key(endpoints: "Endpoints", file: Path | None) -> str | None:
    if endpoints.openai_port is not None:
        return read_api_key(file, "--openai-api-key-file")
    if file is not None:
        raise SettingsError("--openai-api-key-file: there is no OpenAI API without --openai-port")
    return None


def _check_origins(endpoints: "Endpoints", origins: tuple[str, ...]) -> None:
    if origins and endpoints.openai_port is None:
        raise SettingsError("--openai-origin: there is no OpenAI API without --openai-port")
    for origin in origins:
        # Each is named: what any page may use, any page that somebody visits uses.
        if not _ORIGIN.fullmatch(origin):
            raise SettingsError(f"--openai-origin {origin}: give SCHEME://HOST or SCHEME://HOST:PORT, as browsers do")


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
        click.echo(json.dumps({"engine": str(engine), **rows, "loaded": running.server.said_at_load}))
    else:
        click.echo(f"serving {engine} (Ctrl-C ends it)")
        for name, place in rows.items():
            if place is not None:
                click.echo(f"  {name:<8} {place}")
        for line in running.server.said_at_load:
            click.echo(f"  {line}")
    sys.stdout.flush()
