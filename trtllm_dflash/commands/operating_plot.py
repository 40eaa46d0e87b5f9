"""A plan at fixed speeds as a picture: throughput over the speed of each user, for each method."""

from pathlib import Path

from trtllm_dflash.build.operating import OperatingPlan


def plot_operation(plan: OperatingPlan, file: Path) -> None:
    """Plots a node's throughput against the tokens/s of each user, one line per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for color, (method, operations) in enumerate(plan.frontier.items()):
        speeds = [each.tokens_per_second_per_user for each in operations]
        axes.plot(speeds, [each.tokens_per_second for each in operations], color=f"C{color}", label=method)
    for point in plan.points:
        axes.axvline(point.tokens_per_second_per_user, color="gray", linestyle="--", linewidth=1)
        for color, method in enumerate(plan.frontier):
            best = point.best[method]
            if best is not None:
                axes.plot(point.tokens_per_second_per_user, best.tokens_per_second, "o", color=f"C{color}")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens/s of each user")
    axes.set_ylabel(f"tokens/s of {plan.gpus} GPUs")
    said = (
        f"{plan.acceptance:g} tokens a step"
        if plan.eagle3_drafts is None
        else (f"{plan.acceptance:g} tokens a step; EAGLE-3: {plan.eagle3_drafts}, {plan.eagle3_acceptance:g}")
    )
    axes.set_title(f"{plan.model} on {plan.gpus} x {plan.gpu}, predicted\nDFlash: {said}", fontsize=11)
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", fontsize=9, ncols=len(plan.frontier))
    figure.savefig(file)
