"""`train`: a drafter for one's own target."""

import json
import shlex
from pathlib import Path
from typing import Any

import click

from trtllm_dflash.commands.settings import given, validated
from trtllm_dflash.commands.terminal import progress_bar
from trtllm_dflash.errors import SettingsError

_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--target", required=True, help="Target checkpoint: a folder or a Hugging Face name.")
@click.option("--data", required=True, type=_FILE, help="Prompts: JSON lines; see docs/train.md.")
@click.option("--output", required=True, type=_FILE, help="State directory; an interrupted training goes on in it.")
@click.option(
    "--from", "from_", help="Drafter to begin with: a folder or a Hugging Face name.  [default: from nothing]"
)
@click.option("--layers", type=int, help="Layers of the drafter.  [default: 5]")
@click.option("--head", help="dflash; or dflash2: each draft is chosen by the one before it.  [default: dflash]")
@click.option("--block", type=int, help="Anchor and drafts: rows of a block.  [default: 16]")
@click.option("--taps", metavar="N,N,...", help="Target layers whose outputs it reads, from 0.  [default: auto, even]")
@click.option("--mask-token", type=int, help="Id that masks drafts.  [default: one that no text uses]")
@click.option("--domain-key", help="Field of a record that names its domain.  [default: domain]")
@click.option("--held-out", type=float, help="Share of the prompts to measure on.  [default: 0.03125]")
@click.option("--evaluate-on", type=int, help="Held-out prompts, at most.  [default: 256]")
@click.option("--general", type=_FILE, help="General prompts mixed in, against forgetting.")
@click.option("--general-share", type=float, help="Share of the --general prompts among all.  [default: 0.15]")
@click.option("--thinking", type=float, help="Share of the prompts with thinking on.  [default: as the template does]")
@click.option(
    "--temperature", type=float, help="Temperature of the replies.  [default: the target's generation_config.json]"
)
@click.option("--max-seq-len", type=int, help="Tokens of a prompt and its reply.  [default: 4096, or less]")
@click.option("--max-tokens", type=int, help="Most tokens of a reply.  [default: 2048]")
@click.option("--max-batch", type=int, help="Replies generated at a time.  [default: 32]")
@click.option(
    "--objective", help="ce: the text's tokens; greedy or kd: the target's choice or distribution.  [default: ce]"
)
@click.option("--weighting", help="Weights of a block's positions in the loss: dpace or exponential.  [default: dpace]")
@click.option("--optimizer", help="adamw, or muon for matrices.  [default: adamw]")
@click.option("--pack", type=int, help="Tokens of a pack, which the drafter reads together.  [default: 8192]")
@click.option("--packs", type=int, help="Packs in each optimizer step.  [default: 1]")
@click.option("--anchors", type=int, help="Blocks trained in each pack.  [default: 512]")
@click.option("--rate", type=float, help="Peak learning rate.  [default: 6e-4; with --from 1e-4]")
@click.option("--epochs", type=int, help="[default: 6]")
@click.option("--steps", type=int, help="Optimizer steps, instead of --epochs.")
@click.option("--hours", type=float, help="Most hours of training.")
@click.option("--evaluate-every", type=int, help="Steps between evaluations.  [default: a twentieth of all]")
@click.option("--save-every", type=int, help="Steps between checkpoints.  [default: 500]")
@click.option("--patience", type=int, help="Evaluations without a better one before it ends.  [default: 5]")
@click.option("--attention", help="masked, or flex: torch's flex_attention.  [default: auto, flex on a GPU]")
@click.option("--seed", type=int, help="Random seed.  [default: 0]")
@click.option("--device", help="cpu, cuda or auto.  [default: auto]")
@click.option("--ranks", type=int, help="Processes, a GPU each, that divide --packs among them.  [default: 1]")
@click.option("--until", help="Last phase: split, regenerate, train, export, evaluate or report.  [default: report]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def train(output: Path, from_: str | None, taps: str | None, until: str | None, as_json: bool, **flags: Any) -> None:
    """Train a drafter for a target, on features of the engine that will serve both."""
    from trtllm_dflash.train import phases
    from trtllm_dflash.train.settings import TrainSettings

    until = until or phases.PHASES[-1]
    if until not in phases.PHASES:
        raise SettingsError(f"--until {until}: choose {', '.join(phases.PHASES)}")
    values = given({**flags, "from": from_, "taps": _layers(taps)})
    if "steps" in values and "epochs" in values:
        raise SettingsError("--steps and --epochs: give one of them")
    if "general_share" in values and "general" not in values:
        raise SettingsError("--general-share goes with --general FILE")
    settings = validated(TrainSettings, values)
    with progress_bar() as progress:
        report = phases.train(settings, output, until, progress, lambda line: click.echo(line, err=as_json))
    if as_json and report is not None:
        click.echo(json.dumps(report, indent=2))
    elif report is not None:
        words = ["--target", str(settings.target), "--drafter", str(output / "drafter")]
        click.echo(f"{output}: trained; build with {shlex.join(words)}")


def _layers(taps: str | None) -> tuple[int, ...] | None:
    if taps in (None, "auto"):
        return None
    assert taps is not None
    try:
        layers = tuple(int(tap) for tap in taps.split(","))
    except ValueError:
        layers = ()
    if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
        raise SettingsError(f"--taps {taps}: give layers as numbers from 0, each once: 1,9,17, or auto")
    return layers
