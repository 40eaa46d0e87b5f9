"""The tables of `build --plan --at`."""

from rich.table import Table

from trtllm_dflash.build.operating import NODE, AtSpeed, Method, OperatingComparison, OperatingPlan, Operation
from trtllm_dflash.commands.plan_table import shared_notes

_METHODS: tuple[Method, ...] = ("plain", "DFlash", "EAGLE-3")


def operating_lines(plan: OperatingPlan) -> list[Table | str]:
    """Write a node's plan: its operation at each speed, and what else must be known to read it."""
    published = plan.published
    said = []
    if published is not None:
        speeds = f"{published.slowest:,.0f} to {published.fastest:,.0f} tokens/s/user"
        said.append(
            f"published at {speeds}: {published.over_plain} plain, {published.over_eagle3} EAGLE-3 ({published.source})"
        )
    fastest = "; ".join(f"{method} {speed:,.0f}" for method, speed in plan.fastest.items())
    too_large = [f"TP {tp}: {why}" for tp, why in plan.too_large.items()]
    return [
        _head(plan),
        _table(plan),
        f"fastest, one user on each engine, tokens/s: {fastest}",
        *said,
        *too_large,
        f"Predicted: steps of H200s were within {plan.error_bound:.0%}, but as is said below; of other GPUs only those "
        "of an H100 have been compared.",
        *plan.assumptions,
    ]


def operating_comparison_lines(found: OperatingComparison) -> list[Table | str]:
    """Write a line for each GPU and speed."""
    refused = [f"{gpu}: {why}" for gpu, why in found.refused.items()]
    if not found.plans:
        return [*refused]
    table = Table("GPU", "tokens/s\nfor each user")
    methods = [method for method in _METHODS if method in found.plans[0].fastest]
    for method in methods:
        table.add_column(f"{method}\ntokens/s", justify="right")
    table.add_column("DFlash\nover plain", justify="right")
    for plan in found.plans:
        for i, point in enumerate(plan.points):
            cells = [_rate(point.best[method]) for method in methods]
            first = plan.gpu if i == 0 else ""
            table.add_row(first, f"{point.tokens_per_second_per_user:,.0f}", *cells, _over(point, "DFlash", "plain"))
    notes = shared_notes({plan.gpu: plan.assumptions for plan in found.plans})
    return [_head(found.plans[0], "each GPU"), table, *refused, *notes]


def _head(plan: OperatingPlan, gpu: str | None = None) -> str:
    eagle3 = "" if plan.eagle3_drafts is None else f", EAGLE-3 ({plan.eagle3_drafts}) {plan.eagle3_acceptance:g}"
    return (
        f"{plan.model}: {plan.precision.upper()} on {NODE} x {gpu or plan.gpu}, {plan.cache_length:,} tokens in each "
        f"slot; tokens a step: DFlash {plan.acceptance:g}{eagle3}"
    )


def _table(plan: OperatingPlan) -> Table:
    table = Table("tokens/s\nfor each user")
    table.add_column("")
    others = _others(plan)
    ratios = [f"over\n{other}" for other in others]
    columns = ["tokens/s\nof all GPUs", *ratios, "engines", "slots\nof each", "drafts", "tokens\na step", "step\nms"]
    for column in columns:
        table.add_column(column, justify="right")
    for point in plan.points:
        for i, method in enumerate(point.best):
            speed = f"{point.tokens_per_second_per_user:,.0f}" if i == 0 else ""
            table.add_row(speed, method, *_cells(point, method, others), end_section=i == len(point.best) - 1)
    return table


def _others(plan: OperatingPlan) -> list[Method]:
    """Lists the methods that others are compared with."""
    return ["plain"] if plan.eagle3_drafts is None else ["plain", "EAGLE-3"]


def _cells(point: AtSpeed, method: Method, others: list[Method]) -> list[str]:
    best = point.best[method]
    if best is None:
        return ["cannot reach it"]
    ratios = ["" if method == other else _over(point, method, other) for other in others]
    engines = f"{best.replicas} x TP {best.tp}"
    drafts = str(best.drafts) if best.drafts else ""
    numbers = [engines, f"{best.batch:,}", drafts, f"{best.tokens_per_step:.2f}", f"{best.seconds * 1e3:.2f}"]
    return [_rate(best), *ratios, *numbers]


def _rate(best: Operation | None) -> str:
    return "-" if best is None else f"{best.tokens_per_second:,.0f}"


def _over(point: AtSpeed, method: Method, other: Method) -> str:
    ratio = point.over(method, other)
    return "" if ratio is None else f"{ratio:.1f}x"
