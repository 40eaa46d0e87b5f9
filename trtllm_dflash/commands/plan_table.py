"""The tables of `build --plan`."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from trtllm_dflash.build.plan import COMPARED, BuildPlan, Comparison, Pages, Point

_GB, _MB, _KB = 1e9, 1e6, 1e3


def plan_lines(plan: BuildPlan) -> list[Table | str]:
    """Write a GPU's whole plan, from top to bottom."""
    sums = [] if plan.tp == 1 else [_sum_line(plan)]
    return [*_head_lines(plan), _memory_table(plan), _fit_line(plan), _step_table(plan), *sums, *_foot_lines(plan)]


def comparison_lines(found: Comparison) -> list[Table | str]:
    """Write the comparison of GPUs, a line for each."""
    refused = [f"{gpu}: {why}" for gpu, why in found.refused.items()]
    if not found.plans:
        return [*refused]
    plan = found.plans[0]
    notes = shared_notes({each.gpu: each.assumptions for each in found.plans})
    head = f"{_what(plan)}; steps with {plan.cache_length:,} tokens in each slot"
    return [head, _comparison_table(found), *refused, "GB: with the caches of those slots.", *notes]


def shared_notes(of_gpus: Mapping[str, Sequence[str]]) -> list[str]:
    """Write each note of several GPUs' plans once, topic by topic; before one that is not of all of them, of which."""
    gpus: dict[str, list[str]] = {}
    for gpu, notes in of_gpus.items():
        for note in notes:
            gpus.setdefault(note, []).append(gpu)
    topics = list(dict.fromkeys(note.partition(":")[0] for note in gpus))
    lines = []
    for note in sorted(gpus, key=lambda note: topics.index(note.partition(":")[0])):
        is_said = len(gpus[note]) == len(of_gpus) or gpus[note][0] in note.replace(",", " ").split()
        lines.append(note if is_said else f"{', '.join(gpus[note])}: {note}")
    return lines


def _head_lines(plan: BuildPlan) -> list[str]:
    """Write the pair, the GPU, its published limits and the rates that the plan assumes."""
    limits = plan.limits
    link = "NVLink" if limits.nvlink else "PCIe"
    return [
        f"{_what(plan)}, on {plan.tp} x {plan.gpu}",
        f"{plan.gpu}, published: {limits.memory / _GB:.0f} GB, {limits.bandwidth / 1e12:.2f} TB/s, "
        f"{limits.flops / 1e12:,.0f} TFLOP/s in {plan.precision.upper()}, {link} {limits.link / _GB:.0f} GB/s one way; "
        f"counted on: {limits.bandwidth * limits.copy_share / 1e12:.2f} TB/s, "
        f"{limits.flops * limits.gemm_share / 1e12:,.0f} TFLOP/s",
    ]


def _what(plan: BuildPlan) -> str:
    ranks = "" if plan.tp == 1 else f", {'expert' if plan.expert_parallel else 'tensor'} parallel {plan.tp}"
    experts = "" if plan.expert_precision in (None, plan.precision) else f", experts in {plan.expert_precision.upper()}"
    matrices = "" if plan.linear_precision is None else f", matrices in {plan.linear_precision.upper()}"
    return f"{plan.model}: {plan.precision.upper()}{matrices}{experts}{ranks}"


def _memory_table(plan: BuildPlan) -> Table:
    """Write the memory of each GPU, by what fills it."""
    memory = plan.memory
    table = Table("memory on each GPU")
    table.add_column("GB", justify="right")
    table.add_column("")
    weights = {
        "attention": memory.attention,
        "feed-forward": memory.feed_forward,
        "experts": memory.experts,
        "embedding": memory.embedding,
        "LM head": memory.lm_head,
        "drafter": memory.drafter,
        "norms, routers, RoPE tables": memory.rest,
    }
    for name, count in weights.items():
        if count:
            table.add_row(name, f"{count / _GB:.3f}", "")
    per_slot = memory.target_cache_per_slot + memory.drafter_cache_per_slot
    each = f"{per_slot / _MB:,.1f} MB a slot of {plan.max_seq_len:,} tokens"
    if memory.drafter_cache_per_slot:
        each += f", {memory.drafter_cache_per_slot / _MB:,.1f} of it the drafter's"
    held = f"{memory.slots} slots, {each}" if plan.pages is None else _pages(plan.pages)
    table.add_row("K/V caches", f"{per_slot * memory.slots / _GB:.3f}", held)
    if memory.states:
        table.add_row("states", f"{memory.states / _GB:.3f}", "the slots', and those kept for prompts that begin alike")
    table.add_row("activations", f"{memory.scratch / _GB:.3f}", "an estimate")
    table.add_row("captured steps", f"{memory.graphs / _GB:.3f}", "an allowance")
    table.add_row("reserved", f"{memory.reserved / _GB:.3f}", "driver, fragmentation", end_section=True)
    table.add_row("all", f"{memory.total / _GB:.3f}", f"of {plan.limits.memory / _GB:.0f}")
    return table


def _pages(pages: Pages) -> str:
    return f"{pages.count:,} pages of {pages.rows:,} tokens"


def _comparison_table(found: Comparison) -> Table:
    """Write a line for each GPU: the slots that fit, and the speed with few and with more."""
    table = Table("GPU")
    for column in ("slots of\ntokens", "GB\non each", "largest\nbatch", "longest\ncontext"):
        table.add_column(column, justify="right")
    kinds = ["plain\ntokens/s/user", "DFlash\ntokens/s/user", "over\nplain"]
    if any(plan.acceptance is None for plan in found.plans):
        kinds = ["plain\ntokens/s/user", "tokens a step\nto be as fast"]
    for batch in COMPARED:
        for kind in kinds:
            table.add_column(f"batch {batch}\n{kind}", justify="right")
    for plan in found.plans:
        slots = f"{plan.max_batch} of {plan.max_seq_len:,}"
        row = [
            plan.gpu,
            slots,
            f"{plan.memory.total / _GB:.1f}",
            f"{plan.largest_batch:,}",
            f"{plan.largest_seq_len:,}",
        ]
        for batch in COMPARED:
            row += _compared(plan, batch, len(kinds))
        table.add_row(*row)
    return table


def _compared(plan: BuildPlan, batch: int, columns: int) -> list[str]:
    points = [point for point in plan.points if point.batch == batch]
    plain = next((point for point in points if point.arm == "plain"), None)
    drafted = next((point for point in points if _is_shown(plan, point)), None)
    if plain is None:
        return ["-"] * columns
    rates = [point.tokens_per_second_per_user for point in (plain, drafted) if point is not None]
    cells = [f"{rate:,.0f}" for rate in rates if rate is not None]
    if drafted is not None:
        cells.append(_over(plan, drafted, plain))
    return cells + ["-"] * (columns - len(cells))


def _fit_line(plan: BuildPlan) -> str:
    """Write the largest batch and the longest context that fit, or how many conversations the pages hold."""
    if plan.pages is not None:
        lengths = sorted({plan.cache_length, plan.max_seq_len})
        held = " or ".join(f"{plan.pages.conversations(length):,} of {length:,} tokens" for length in lengths)
        return f"conversations that fit, each with pages of its own: {held}; at most {plan.max_batch:,} have a slot"
    return (
        f"largest batch: {plan.largest_batch:,} slots of {plan.max_seq_len:,} tokens; "
        f"longest context: {plan.largest_seq_len:,} tokens in {plan.max_batch} slots"
    )


def _step_table(plan: BuildPlan) -> Table:
    """Write plain and drafted steps by batch: the best length at the given acceptance, without one the whole block."""
    columns = ["step", "batch", "K", "floor ms", "ms", "matrices", "attention", "layers"]
    columns += ["sums"] if plan.tp > 1 else []
    columns += ["limit"]
    columns += ["experts\nof a layer"] if plan.expert_precision else []
    tokens = ["tokens\na step", "tokens/s\nfor each user", "tokens/s\non each GPU", "over\nplain"]
    columns += tokens if plan.acceptance is not None else [*tokens[1:3], "tokens a step\nto be as fast"]
    table = Table(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="left" if column == "limit" else "right")
    shown = [point for point in plan.points if point.arm == "plain" or _is_shown(plan, point)]
    plain = {point.batch: point for point in shown if point.arm == "plain"}
    for point, following in zip(shown, [*shown[1:], None], strict=True):
        cells = _cells(plan, point, plain[point.batch])
        table.add_row(*cells, end_section=following is None or following.batch != point.batch)
    return table


def _sum_line(plan: BuildPlan) -> str:
    """Write number, size and time of the all-reduces in a step."""
    kinds = []
    for point in (p for p in plan.points if p.batch in (1, plan.points[-1].batch)):
        if point.arm == "plain" or _is_shown(plan, point):
            each = point.sums_seconds / point.sums
            rows = "plain" if point.arm == "plain" else f"K = {point.drafts}"
            kinds.append(
                f"batch {point.batch} {rows}: {point.sums} of {_size(point.sum_bytes)}, {each * 1e6:.1f} us each"
            )
    return "all-reduces a step: " + "; ".join(kinds)


def _foot_lines(plan: BuildPlan) -> list[str]:
    """Explain the tables, with one line for each assumption."""
    kinds = "matrices, attention, layers (their latency, norms, activations)" + (
        ", sums over ranks" if plan.tp > 1 else ""
    )
    return [
        f"ms: predicted, with {plan.cache_length:,} tokens in each slot; {kinds}: its parts, in ms.",
        "floor: the counted bytes or operations at the rates counted on, whichever take longer.",
        *plan.assumptions,
    ]


def _is_shown(plan: BuildPlan, point: Point) -> bool:
    return point.best if plan.acceptance is not None else point.drafts == plan.block_size - 1 and point.arm == "draft"


def _cells(plan: BuildPlan, point: Point, plain: Point) -> list[str]:
    times = [point.floor_seconds, point.seconds, point.products_seconds, point.attention_seconds, point.layers_seconds]
    times += [point.sums_seconds] if plan.tp > 1 else []
    cells = ["plain" if point.arm == "plain" else "DFlash", f"{point.batch:,}"]
    cells += ["" if point.arm == "plain" else str(point.drafts), *(f"{seconds * 1e3:.2f}" for seconds in times)]
    cells.append(point.limit)
    if point.experts_touched is not None:
        cells.append(f"{point.experts_touched:.1f}")
    user, gpu = point.tokens_per_second_per_user, point.tokens_per_second_per_gpu
    rates = ["", ""] if user is None or gpu is None else [f"{user:,.0f}", f"{gpu:,.0f}"]
    tokens = [] if plan.acceptance is None else [f"{point.tokens_per_step:.2f}"]
    return [*cells, *tokens, *rates, "" if point.arm == "plain" else _over(plan, point, plain)]


def _over(plan: BuildPlan, point: Point, plain: Point) -> str:
    """Write the speedup over plain; without an acceptance, the tokens a step at which drafting is as fast."""
    if plan.acceptance is None or point.tokens_per_step is None:
        return f"{point.seconds / plain.seconds:.2f}"
    return f"{point.tokens_per_step * plain.seconds / point.seconds:.2f}x"


def _size(count: int) -> str:
    return f"{count / _MB:.1f} MB" if count >= _MB else f"{count / _KB:.1f} KB"
