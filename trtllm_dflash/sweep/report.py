"""A sweep's report: a table on the terminal, and one HTML file that needs no other file."""

import base64
import html
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError
from rich.table import Table

from trtllm_dflash.checkpoint.validation import first_problem
from trtllm_dflash.errors import SettingsError, why_unreadable
from trtllm_dflash.sweep.pareto import Comparison, Reading, compare
from trtllm_dflash.sweep.plots import Predicted, plot_acceptance, plot_pareto
from trtllm_dflash.sweep.results import ACCEPTANCE, PARETO, REPORT, Results
from trtllm_dflash.sweep.summary import Point, Spread

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px } th, td { padding: .25em .7em; text-align: right }
th { border-bottom: 2px solid #888; vertical-align: bottom } td { border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } img { max-width: 100% }
.warning { background: #fff3cd; padding: .5em 1em } pre { background: #f4f4f4; padding: .7em; overflow-x: auto }
"""


_TERMS = (
    "TTFT: from when a request was due to its first response. E2E: to its last. TPOT: (E2E - TTFT) / (tokens - 1). "
    "ITL: between two responses of a reply, each of which may bring several tokens. tokens/s: output tokens of all "
    "requests. tokens/s/user: 1 / median TPOT. tokens a step: acceptance length, the bonus token included."
)


class _PlanPoint(BaseModel):
    batch: PositiveInt
    tokens_per_second_per_user: PositiveFloat | None  # None: at no acceptance that was given
    tokens_per_second_per_gpu: PositiveFloat | None
    arm: Literal["plain", "draft"]
    best: bool | None = None  # of the draft lengths of its batch; None: there is one


class _Plan(BaseModel):
    points: list[_PlanPoint]


def read_plan(file: Path) -> list[Predicted]:
    """Reads a plan's predictions by arm; of drafting, those with the best draft length of each batch.

    The file is JSON with `points`, each of `batch`, `tokens_per_second_per_user`, `tokens_per_second_per_gpu`, `arm`
    ("plain" or "draft") and, where draft lengths were compared, `best`; other fields are left alone.

    Raises:
        SettingsError: the file is not of that form.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(document, dict) and document.get("kind") == "plans":
            raise SettingsError(f"--plan {file}: is of several GPUs; name the one to draw: build --plan --gpu")
        plan = _Plan.model_validate(document)
    except ValidationError as error:
        raise SettingsError(f"--plan {file}: {first_problem(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--plan {file}: {why_unreadable(error)}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"--plan {file}: cannot be read as JSON: {error}") from None
    found: dict[str, list[tuple[int, float, float]]] = {}
    for point in plan.points:
        speed, rate = point.tokens_per_second_per_user, point.tokens_per_second_per_gpu
        if speed is not None and rate is not None and (point.arm == "plain" or point.best is not False):
            found.setdefault(point.arm, []).append((point.batch, speed, rate))
    if not found:
        raise SettingsError(f"--plan {file}: has no points")
    return [Predicted(arm, sorted(points)) for arm, points in found.items()]


def compare_runs(runs: list[Results], speeds: tuple[float, ...]) -> list[Comparison]:
    """Compares all arms of all runs at fixed speeds; with ratios within one run, or where there are just two arms."""
    if len(runs) == 1:
        return compare(runs[0].measured(), speeds, runs[0].reference)
    arms = {f"{run.label}: {arm}": loads for run in runs for arm, loads in run.measured().items()}
    if len(arms) < sum(len(run.arms) for run in runs):
        raise SettingsError("two runs have the same label; give each its own: sweep --label")
    return compare(arms, speeds, next(iter(arms)) if len(arms) == 2 else None)


# -- the terminal ----------------------------------------------------------------------------------------------------


def point_table(run: Results) -> Table:
    """Makes a table with a row for each load and arm."""
    table = Table(run.load_unit)
    table.add_column("arm")
    for column in _columns(run)[2:]:
        table.add_column(column, justify="right")
    loads = [point.load for point in run.points]
    for point, following in zip(run.points, [*loads[1:], None], strict=True):
        table.add_row(*_cells(run, point), end_section=point.load != following)
    return table


def fixed_speed_table(found: list[Comparison]) -> Table:
    """Makes a table with a row for each speed."""
    columns, rows = _fixed_speed(found)
    table = Table(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _fixed_speed(found: list[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Makes columns and rows: each arm's throughput, then each one's ratio to the reference."""
    columns = ["tokens/s/user", *(f"{name}\ntokens/s" for name in found[0].arms)]
    columns += [f"{name}\n/ {found[0].reference}" for name in found[0].ratios]
    rows = []
    for row in found:
        cells = [reading_text(reading) for reading in row.arms.values()]
        cells += [reading_text(ratio, digits=2) for ratio in row.ratios.values()]
        rows.append([f"{row.at:g}", *cells])
    return columns, rows


def reading_text(reading: Reading, digits: int = 0) -> str:
    """Formats a reading with its interval."""
    if reading.value is None:
        return reading.bound
    text = f"{reading.value:,.{digits}f}"
    if reading.low is not None and reading.high is not None:
        text += f" ({reading.low:,.{digits}f} to {reading.high:,.{digits}f})"
    return f"at least {text}" if reading.bound else text


def limit_lines(run: Results) -> list[str]:
    """Writes the result of the search for a load, a line for each arm."""
    lines = []
    for limit in run.limits:
        if limit.load is None:
            lines.append(f"{limit.arm}: no load meets the target; the smallest was {limit.missed:g} {run.load_unit}")
            continue
        point = next(point for point in run.points if (point.arm, point.load) == (limit.arm, limit.load))
        more = "the largest allowed" if limit.missed is None else f"{limit.missed:g} misses it"
        lines.append(
            f"{limit.arm}: {limit.load:g} {run.load_unit} meet the target, {more}: "
            f"{point.output_tokens_per_second:,.0f} tokens/s at "
            f"{point.tokens_per_second_per_user or 0:,.1f} tokens/s/user"
        )
    return lines


def _columns(run: Results) -> list[str]:
    columns = [run.load_unit, "arm", "tokens/s", "tokens/s/GPU"]
    columns += ["tokens/s/user", "TTFT ms\np50 / p90 / p99", "TPOT ms\np50 / p90 / p99", "ITL ms\np50 / p90 / p99"]
    columns += ["E2E s\np50 / p90 / p99", "tokens\na step", "requests", "errors"]
    return columns if run.gpus else [column for column in columns if column != "tokens/s/GPU"]


def _cells(run: Results, point: Point) -> list[str]:
    cells = [f"{point.load:g}", point.arm, f"{point.output_tokens_per_second:,.0f}"]
    if run.gpus:
        cells.append(f"{point.tokens_per_second_per_gpu or 0:,.0f}")
    speed, length = point.tokens_per_second_per_user, point.acceptance_length
    cells.append("" if speed is None else f"{speed:,.1f}")
    cells += [_spread(spread, 1e3, 1) for spread in (point.ttft, point.tpot, point.itl)]
    cells.append(_spread(point.e2e, 1, 2))
    step = "" if length is None else f"{length:.2f}" + ("*" if run.imposed_acceptance else "")
    return [*cells, step, str(point.requests), str(sum(point.errors.values()))]


def _spread(spread: Spread | None, unit: float, digits: int) -> str:
    if spread is None:
        return ""
    return " / ".join(f"{value * unit:,.{digits}f}" for value in (spread.p50, spread.p90, spread.p99))


def notes(run: Results) -> list[str]:
    """Writes the notes that a reader of the figures needs."""
    found = list(run.warnings)
    if run.imposed_acceptance is not None:
        tokens = run.imposed_acceptance["tokens_per_step"]
        found.append(f"* the acceptance, {tokens:g} tokens a step with the whole block, is imposed, not measured")
    said = {point.arm: point.acceptance_from for point in run.points if point.acceptance_from}
    if said and (set(said.values()) != {"replies"} or len(run.arms) > 2):
        found.append("tokens a step: " + "; ".join(f"{arm} from {_said(who)}" for arm, who in said.items()))
    failed = sum(sum(point.errors.values()) for point in run.points)
    if failed:
        first = next(error for point in run.points for error in point.errors)
        found.append(f"{failed} requests failed; the first: {first}")
    asked, short = run.asked.get("output_tokens") or 0, dict[str, float]()
    for point in run.points:
        if point.requests and point.mean_output_tokens < 0.995 * asked:
            short[point.arm] = min(point.mean_output_tokens, short.get(point.arm, asked))
    if short:
        had = "; ".join(f"{arm} {tokens:.4g}" for arm, tokens in short.items())
        found.append(
            f"tokens a reply, of {asked} asked for: {had}; its server ends replies sooner, and is measured on less"
        )
    if not run.complete:
        found.append("the sweep was interrupted: --resume measures what is missing")
    late = max((point.late.p99 for point in run.points if point.late is not None), default=0.0)
    if run.load_unit == "requests/s" and late > 0.01:
        found.append(f"the load generator was late by {late * 1e3:.0f} ms (p99); latencies count that in")
    return found


def differences(runs: list[Results]) -> list[str]:
    """Lists differences between runs besides the engine, which affect their ratios too."""
    sides: dict[str, list[object]] = {
        "the prompts": [run.dataset.get("sha256") for run in runs],
        "the length of replies": [(run.asked.get("output_tokens"), run.asked.get("max_tokens")) for run in runs],
        "sampling": [run.asked.get("sampling") for run in runs],
        "the number of GPUs": [run.gpus for run in runs],
        "imposed acceptance": [run.imposed_acceptance for run in runs],
    }
    unlike = [name for name, values in sides.items() if any(value != values[0] for value in values)]
    return [f"not the same in these sweeps: {', '.join(unlike)}; comparing them compares that, too"] if unlike else []


def _said(who: str) -> str:
    server, colon, url = who.partition(": ")
    mean = " (SGLang's own mean, of the time before each look)" if server == "sglang" else ""
    return f"{server}'s metrics at {url}{mean}" if colon else f"its {server}"


# -- files -----------------------------------------------------------------------------------------------------------


def write_reports(run: Results, folder: Path) -> None:
    """Writes a sweep's pictures and page into its folder."""
    _write([run], run.fixed_speed, folder, [])


def write_comparison(runs: list[Results], found: list[Comparison], folder: Path, plan: list[Predicted]) -> None:
    """Writes the pictures and the page of several runs, or of one against a plan."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(runs, found, folder, plan)


def _write(runs: list[Results], found: list[Comparison], folder: Path, plan: list[Predicted]) -> None:
    plot_pareto(runs, folder / PARETO, plan)
    pictures = {"Output tokens/s against tokens/s/user": folder / PARETO}
    if plot_acceptance(runs, folder / ACCEPTANCE):
        pictures["Acceptance by position, by category, and of trees by rank"] = folder / ACCEPTANCE
    else:
        (folder / ACCEPTANCE).unlink(missing_ok=True)
    (folder / REPORT).write_text(_render_html(runs, found, pictures), encoding="utf-8")


def _render_html(runs: list[Results], found: list[Comparison], pictures: dict[str, Path]) -> str:
    """Renders the page, with its pictures inside."""
    title = " and ".join(run.label for run in runs)
    parts = [f"<h1>{_e(title)}</h1>"]
    parts += [f'<p class="warning">{_e(note)}</p>' for note in differences(runs)]
    parts += [_image_html(said, file) for said, file in pictures.items()]
    if found:
        parts += ["<h2>Throughput at a fixed speed</h2>", _fixed_speed_html(found)]
        parts.append("<p>Read off the frontier; in brackets the bootstrap's 95% interval over requests.</p>")
    for run in runs:
        parts.append(f"<h2>{_e(run.label)}</h2>")
        parts += [f'<p class="warning">{_e(note)}</p>' for note in notes(run)]
        parts += [f"<p>{_e(line)}</p>" for line in limit_lines(run)]
        parts += [_table_html(_columns(run), [_cells(run, point) for point in run.points]), _facts_html(run)]
    parts.append(f"<p>{_e(_TERMS)}</p>")
    head = f'<meta charset="utf-8"><title>{_e(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _image_html(said: str, file: Path) -> str:
    image = base64.b64encode(file.read_bytes()).decode()
    return f'<p><img alt="{said}" src="data:image/png;base64,{image}"></p>'


def _fixed_speed_html(found: list[Comparison]) -> str:
    return _table_html(*_fixed_speed(found))


def _table_html(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{_e(column).replace(chr(10), '<br>')}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _facts_html(run: Results) -> str:
    dataset, machine = run.dataset, run.machine
    whose = "engine and load generator" if run.engine is not None else "load generator"
    facts = [
        f"dataset {dataset['name']}: {dataset['samples']} prompts, sha256 {dataset['sha256'][:16]}",
        f"{whose}: {machine['gpu'] or machine['cpu']}, {machine['cores']} cores",
        ", ".join(f"{name} {version}" for name, version in run.versions.items()),
    ]
    if run.engine is not None:
        facts.append("engine: " + ", ".join(f"{name} {value}" for name, value in run.engine.items()))
    lines = "<br>".join(map(_e, facts))
    return f"<p>{lines}</p><pre>{_e(run.command)}</pre>"


def _e(text: str) -> str:
    return html.escape(text)
