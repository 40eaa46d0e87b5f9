"""The report of a training: JSON, one picture, and the drafter's model card."""

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.train.settings import TrainSettings

#: Files of the state directory.
REPORT, PLOT, CARD = "report.json", "report.png", "README.md"

_ARXIV = "https://arxiv.org/abs/2602.06036"


def make_report(
    settings: TrainSettings, config: DrafterConfig, phases: dict[str, dict[str, Any]], log: list[dict[str, Any]]
) -> dict[str, Any]:
    """Joins the phases' facts and the log.

    Args:
        phases: facts of each phase, by its name.
        log: of the training; see `trainer.read_log`.
    """
    evaluations = [{"step": row["step"], **row["acceptance"]} for row in log if "acceptance" in row]
    return {
        "target": settings.target,
        "begun_with": settings.start,
        "drafter": {
            "layers": config.layers,
            "block_size": config.block_size,
            "tap_layers": list(config.tap_layers),
            "mask_token_id": config.mask_token_id,
        },
        "recipe": {
            "objective": settings.objective,
            "weighting": settings.weighting,
            "optimizer": settings.optimizer,
            "rate": settings.peak_rate,
            "steps": phases["train"]["steps"],
            "packs": settings.packs,
            "pack": settings.pack,
            "anchors": settings.anchors,
            "seed": settings.seed,
        },
        "phases": phases,
        "before": evaluations[0],
        "exported": phases["evaluate"]["simulated"],
        "decoded": phases["evaluate"]["decoded"],
        "trees": phases["evaluate"]["trees"],
        "losses": [{"step": row["step"], "loss": row["loss"]} for row in log if "loss" in row],
        "evaluations": evaluations,
    }


def model_card(report: dict[str, Any]) -> str:
    """Writes the drafter's model card: what it is, how it was trained, and how far its drafts are accepted."""
    shape, recipe, phases = report["drafter"], report["recipe"], report["phases"]
    split, train = phases["split"], phases["train"]
    begun = "from nothing" if report["begun_with"] is None else f"from {report['begun_with']}"
    domains = report["exported"]["by_domain"]
    rows = [f"| {_label(name, domains)} | {tau:.2f} |" for name, tau in domains.items()]
    if len(domains) > 1:
        rows.append(f"| all | {report['exported']['tau']:.2f} |")
    positions = report["exported"]["by_position"]
    return "\n".join(
        [
            f"# DFlash drafter for {report['target']}",
            "",
            f"Drafts blocks of {shape['block_size']} tokens ([DFlash]({_ARXIV})) for this target, and for no other. "
            "Trained with `trtllm-dflash train`.",
            "",
            "| | |",
            "|---|---|",
            f"| layers, taps | {shape['layers']}; {', '.join(map(str, shape['tap_layers']))} |",
            f"| mask token | {shape['mask_token_id']} |",
            f"| begun | {begun} |",
            f"| prompts | {split['training']:,}, sha256 {split['data']} |",
            f"| tokens | {train['tokens']:,} of prompts and replies |",
            f"| steps | {train['best_step']} of {recipe['steps']}, the best on held-out prompts |",
            f"| of a step | {recipe['packs']} x {recipe['pack']:,} tokens, {recipe['anchors']} random blocks each |",
            f"| loss | {recipe['objective']}, {recipe['weighting']} weights |",
            f"| optimizer | {recipe['optimizer']}, peak rate {recipe['rate']:g}, warm-up, cosine |",
            f"| target's files | sha256 {phases['split']['target']} |",
            "",
            f"Tokens a decoding step on {split['held_out']} held-out prompts, greedy ({report['decoded']['tau']:.2f} "
            "in real decoding):",
            "",
            "| domain | tokens a step |",
            "|---|---|",
            *rows,
            "",
            ", ".join(f"{tau:.2f} with trees of {nodes} drafts" for nodes, tau in report["trees"].items()),
            "",
            "| position | " + " | ".join(str(i) for i in range(1, len(positions) + 1)) + " |",
            "|" + "---|" * (len(positions) + 1),
            "| accepted | " + " | ".join(f"{share:.2f}" for share in positions) + " |",
            "",
        ]
    )


def _label(domain: str, domains: Collection[str]) -> str:
    """Names a domain in a table's cell; records that name none are all, or the others."""
    return " ".join(domain.split()).replace("|", r"\|") or ("other" if len(domains) > 1 else "all")


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(report: dict[str, Any], file: Path) -> None:
    """Draws loss and acceptance over the steps, and acceptance by position and by domain."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    (loss, taus), (positions, domains) = figure.subplots(2, 2)
    loss.plot([row["step"] for row in report["losses"]], [row["loss"] for row in report["losses"]], linewidth=1)
    loss.set_xlabel("step")
    loss.set_ylabel("loss")
    rows = report["evaluations"]
    taus.plot([row["step"] for row in rows], [row["tau"] for row in rows], "o-", markersize=4)
    taus.axhline(report["exported"]["tau"], linestyle=":", color="gray")
    taus.set_xlabel("step")
    taus.set_ylabel("tokens a decoding step")
    for name, style in (("before", "C7o--"), ("exported", "C2o-")):
        shares = report[name]["by_position"]
        positions.plot(range(1, len(shares) + 1), shares, style, markersize=4, label=name)
    positions.set_ylim(0, 1.02)
    positions.set_xlabel("position of the draft in its block")
    positions.set_ylabel("share of steps that accept so far")
    positions.legend(fontsize=9)
    by_domain = report["exported"]["by_domain"]
    domains.bar([_label(name, by_domain) for name in by_domain], list(by_domain.values()), color="C2")
    domains.set_ylabel("tokens a decoding step")
    for axes in (loss, taus, positions, domains):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(file, format="png")
