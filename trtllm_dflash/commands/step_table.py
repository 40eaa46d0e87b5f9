"""The table of `bench step`."""

from rich.table import Table

from trtllm_dflash.bench.step import Line, StepReport
from trtllm_dflash.cost.acceptance import TREE_GAINS


def head_lines(report: StepReport) -> list[str]:
    """Write the engine, the machine and its rates."""
    config = report.config
    weights = ", random weights" if report.random_weights else ""
    ranks = f", tp {config.tp}" if config.tp > 1 else ""
    formats = config.target.linear_precision
    precision = config.precision if formats is None else f"{formats.value} (the rest {config.precision})"
    drafter = ""
    if config.drafter is not None and config.drafter.linear_precision is not None:
        drafter += f", drafter in {config.drafter.linear_precision.value}"
    if config.drafter is not None and config.drafter.draft_vocab_size is not None:
        drafter += f", {config.drafter.draft_vocab_size} tokens drafted"
    what = f"{report.name}, {config.target.layers} layers, {precision}{drafter}{ranks}{weights}"
    device = report.machine["gpu"] or report.machine["cpu"]
    rates = report.rates
    return [
        what,
        str(report.choice),
        f"{device}: copy {_tera(rates.copy)} TB/s (read + written), GEMM {_tera(rates.gemm)} TFLOP/s",
    ]


def step_table(report: StepReport) -> Table:
    """Write the times, a row for each arm and batch."""
    columns = ["step", "batch", "rows", "cache length", "ms", "ms / plain", "TB/s", "% of copy", "TFLOP/s", "floor ms"]
    columns.append("gap")
    if report.acceptance is not None:
        label = f"imposed acceptance {report.acceptance.tokens:g}"
        columns += [f"tokens/step\n{label}", f"tokens/s\n{label}", f"speedup\n{label}"]
    table = Table(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    batches = [line.batch for line in report.lines]
    for line, following in zip(report.lines, [*batches[1:], None], strict=True):
        table.add_row(line.arm.name, *_cells(report, line), end_section=line.batch != following)
    return table


def foot_lines(report: StepReport) -> list[str]:
    """Explain the table."""
    rounds = len(report.lines[0].rounds) if report.lines else 0
    notes = [
        f"ms: of a step, the median of {rounds} rounds of {report.steps} steps, the arms by turns. "
        "floor: the counted bytes at the copy rate or operations at the GEMM rate, whichever takes longer, for "
        "target and drafter in turn. gap: ms / floor.",
    ]
    if report.config.tp > 1:
        notes.append("TB/s, TFLOP/s and floor: of one rank; what ranks send each other is not in the floor.")
    if report.config.backend == "tensorrt":
        notes.append("plain: a TensorRT plan runs its drafter in every step, so it is slower than a plan without one.")
    imposed = report.acceptance
    if imposed is not None:
        note = f"imposed acceptance {imposed.tokens:g}: tokens a step with {imposed.block} rows; not measured."
        if any(line.arm.name == "drafted" and line.arm.rows < imposed.block for line in report.lines):
            note += (
                f" With fewer rows: each draft survives with {imposed.survival:.4f} once those before it have, "
                "which gives that figure for the whole block."
            )
        tree = max((line.arm.tree for line in report.lines), default=0)
        if tree and imposed.of_tree(tree):
            note += f" tree: {TREE_GAINS[tree]} times that, which trees of {tree} measured on the shipped pair alone."
        notes.append(note)
    return notes


def _cells(report: StepReport, line: Line) -> list[str]:
    moved, done = sum(part.bytes for part in line.work), sum(part.flops for part in line.work)
    plain = report.plain(line)
    cells = [
        str(line.batch),
        str(line.arm.rows),
        str(line.cache_length),
        f"{line.seconds * 1e3:.3f}",
        f"{line.seconds / plain.seconds:.3f}",
        _tera(moved / line.seconds),
        f"{moved / line.seconds / report.rates.copy:.1%}",
        _tera(done / line.seconds),
        f"{report.floor(line) * 1e3:.3f}",
        f"{line.seconds / report.floor(line):.2f}",
    ]
    tokens, rate = report.tokens_per_step(line), report.tokens_per_second(line)
    plain_rate = report.tokens_per_second(plain)
    if tokens is not None and rate is not None and plain_rate is not None:
        cells += [f"{tokens:.2f}", f"{rate:,.0f}", f"{rate / plain_rate:.2f}"]
    return cells


def _tera(x: float) -> str:
    """Format a number in units of 10^12, to about three digits."""
    x /= 1e12
    return f"{x:,.{0 if x >= 100 else 1 if x >= 10 else 2 if x >= 1 else 4}f}"
