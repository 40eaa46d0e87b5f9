"""`compare`: the same prompts to two servers."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.api_key import VARIABLE, read_api_key
from trtllm_dflash.commands.prompts import read_prompts
from trtllm_dflash.commands.settings import flag_of, given, validated
from trtllm_dflash.errors import SettingsError

if TYPE_CHECKING:
    from trtllm_dflash.foreign.compare import Comparison

#: The exit code of `compare` where the swap is not safe; 1 and 2 are errors, as everywhere.
UNSAFE = 3


@click.command(
    epilog="Exit code 0: safe. Every greedy text is the same, or each first difference is a near-tie by the "
    f"log-probabilities that the servers offer. {UNSAFE}: unsafe. \n\n"
    f"{VARIABLE}, where it is set, is sent to both."
)
@click.option("--a", required=True, metavar="URL", help="A server with OpenAI's API: http://HOST:PORT.")
@click.option("--b", required=True, metavar="URL", help="The server that would replace it: http://HOST:PORT.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompts, as for `generate`.  [default: shipped ones]")
@click.option("--number", type=click.IntRange(min=1), default=16, help="Shipped prompts to send.  [default: 16]")
@click.option("--max-tokens", type=int, help="Most tokens a reply.  [default: 128]")
@click.option(
    "--near-tie", type=float, help="Difference of log-probabilities up to which tokens are near-tied.  [default: 0.25]"
)
@click.option("--chat/--raw", default=True, help="Send prompts as chats, or as texts to continue.  [default: --chat]")
@click.option("--model-a", help="A's model.  [default: its only one]")
@click.option("--model-b", help="B's model.  [default: its only one]")
@click.option("--body-a", metavar="JSON", help='Further fields of A\'s requests, such as {"draft": false}.')
@click.option("--body-b", metavar="JSON", help="Further fields of B's requests.")
@click.option("--metrics-a", metavar="URL", help="A's metrics.  [default: URL/metrics]")
@click.option("--metrics-b", metavar="URL", help="B's metrics.  [default: URL/metrics]")
@click.option("--timeout", type=float, help="Seconds for a reply.  [default: 300]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(prompts: Path | None, number: int, as_json: bool, **flags: Any) -> None:
    """Send the same prompts to two servers: may B take A's place?"""
    from trtllm_dflash.foreign.compare import CompareSettings, shipped_prompts
    from trtllm_dflash.foreign.compare import compare as run

    values = given(flags)
    for name in ("body_a", "body_b"):
        if name in values:
            values[name] = _json_object(flag_of(name), values[name])
    values["prompts"] = tuple(read_prompts(None, prompts)) if prompts is not None else shipped_prompts(number)
    values["api_key"] = read_api_key(None, VARIABLE)
    found = run(validated(CompareSettings, values))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)
    sys.exit(0 if found.safe else UNSAFE)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SettingsError(f"{flag} {text}: is not a JSON object")
    return value


def _show(found: "Comparison") -> None:
    report = found.as_json()
    rows = {
        "server": lambda side: side["url"],
        "model": lambda side: side["model"],
        "acceptance length": lambda side: _number(side["acceptance_length"]),
        "acceptance rate": lambda side: _number(side["acceptance_rate"]),
        "first text, median": lambda side: f"{side['time_to_first_text_s']['median']:.3f} s",
        "reply, median": lambda side: f"{side['reply_s']['median']:.3f} s",
        "tokens/s": lambda side: _number(side["tokens_per_second"]),
        "log-probabilities": lambda side: "offered" if side["logprobs"] else "not offered",
    }
    width = max(len(report["a"]["url"]), len(report["a"]["model"]), 12)
    for name, cell in rows.items():
        click.echo(f"{name:<20} {cell(report['a']):<{width}}  {cell(report['b'])}")
    for difference in report["differences"]:
        margins = ", ".join(f"{side.upper()} by {margin:.3f}" for side, margin in difference["margins"].items())
        kind = (
            f"near-tie ({margins})" if difference["near_tie"] else f"differs ({margins or 'nobody says by how much'})"
        )
        place = "" if difference["token"] is None else f", token {difference['token']}"
        click.echo(f"\n{kind}: {difference['prompt'][:80]!r}, character {difference['position']}{place}")
        click.echo(f"  A: {difference['a']!r}\n  B: {difference['b']!r}")
    verdict = "safe" if found.safe else "unsafe"
    click.echo(f"\n{verdict}: {report['equal']} of {report['prompts']} texts equal, {report['near_ties']} near-ties")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
