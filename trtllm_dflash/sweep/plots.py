"""A sweep's pictures: throughput against speed for each user, and acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtllm_dflash.sweep.pareto import frontier
from trtllm_dflash.sweep.results import Results
from trtllm_dflash.sweep.summary import Point

_COLORS = {"plain": "C7", "draft": "C2", "served": "C0"}
_OTHER_COLORS = ("C2", "C0", "C1", "C4", "C3", "C5", "C6", "C8", "C9")
_NAMES = {"draft": "drafted"}
_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP*X"
_LEAST_TRIED = 0.05  # of the first position's tries, for a position to be drawn
_LEAST_SHARE = 0.002  # down to which shares of ranks are drawn, at least
_WIDE = 10  # largest throughput over the smallest, from which on their axis is logarithmic
_SIDES = (9, 7), (9, -7), (-9, 7), (-9, -7)  # where a point's text may stand, in points
_TEXT = 14, 9  # width and height of a point's text, in points
_LETTER = 6.5  # width of a letter of an arm's name, in points


@dataclass(frozen=True)
class Predicted:
    """A plan's prediction for an arm: (batch, tokens/s/user, tokens/s/GPU) at each batch."""

    arm: str
    points: list[tuple[int, float, float]]


@dataclass(frozen=True)
class _Mark:
    """A point's place and the text beside it."""

    place: tuple[float, float]
    text: str
    color: str
    named: bool = False  # an arm's name, at its fastest point

    @property
    def width(self) -> float:
        """Width of the text, in points."""
        return len(self.text) * _LETTER if self.named else _TEXT[0]


@dataclass(frozen=True)
class _Ranked:
    """Accepted drafts of trees by rank, from 1, of one point."""

    label: str
    color: str
    counts: list[int]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_pareto(runs: list[Results], file: Path, plan: Sequence[Predicted] = ()) -> None:
    """Plots output tokens/s (of each GPU, where every run knows their number) against tokens/s of each user."""
    from matplotlib.ticker import LogLocator  # type: ignore[import-not-found, unused-ignore]

    figure, (axes,) = _figure()
    per_gpu = all(run.gpus for run in runs)
    marks: list[_Mark] = []
    named = len(runs) == 1 and len(runs[0].arms) > 1 and not plan and not runs[0].imposed_acceptance
    colors = arm_colors(runs)
    for number, run in enumerate(runs):
        for turn, arm in enumerate(run.arms):
            points = [point for point in run.points if point.arm == arm and point.tokens_per_second_per_user]
            said = "" if run.arms == ["served"] else _NAMES.get(arm, arm)
            name = said if len(runs) == 1 else _plain(f"{run.label} {said}".strip())
            if run.imposed_acceptance and arm != "plain":
                name += f" (imposed acceptance {run.imposed_acceptance['tokens_per_step']:g})"
            style = {"color": colors[arm], "linestyle": _STYLES[number % 4], "label": name or _plain(run.label)}
            _curve(axes, points, per_gpu, _marker(runs, number, turn), style)
            unit = "" if run.load_unit == "clients" else "/s"
            places = [_place(point, per_gpu) for point in points]
            if named and places:
                marks.insert(0, _Mark(max(places), said, colors[arm], named=True))
            marks += [
                _Mark(place, f"{point.load:g}{unit}", colors[arm]) for place, point in zip(places, points, strict=True)
            ]
    for prediction in plan:
        _, speeds, rates = zip(*prediction.points, strict=True)
        color = _COLORS.get(prediction.arm, "C4")
        name = f"{_NAMES.get(prediction.arm, prediction.arm)}, predicted"
        axes.plot(speeds, rates, "x:", color=color, alpha=0.8, markersize=6, label=name)
    heights = [mark.place[1] for mark in marks]
    if heights and max(heights) > _WIDE * min(heights):
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.08, y=0.1)
    axes.set_xlim(left=0)
    if named and marks:  # room for the names at the right
        letters = max(len(mark.text) for mark in marks if mark.named)
        axes.set_xlim(right=max(mark.place[0] for mark in marks) / (1 - min(0.3, 0.06 + 0.014 * letters)))
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.set_xlabel("speed for each user (tokens/s/user = 1 / median TPOT)")
    axes.set_ylabel(f"output throughput (tokens/s{'/GPU' if per_gpu else ''})")
    units = {"clients": "numbers at the points: clients", "requests/s": "numbers at the points: requests/s"}
    axes.set_title(_title(runs) + f"\n{units[runs[0].load_unit]}", fontsize=10)
    axes.grid(alpha=0.3)
    written = _annotate(figure, axes, marks, [point[1:] for prediction in plan for point in prediction.points])
    if not {mark.text for mark in marks if mark.named} <= set(written) or not named:
        axes.legend(fontsize=9)
    figure.savefig(file)


def _annotate(figure: Any, axes: Any, marks: list[_Mark], others: list[tuple[float, float]]) -> list[str]:
    """Writes the marks' texts beside them, where they cover no mark, nothing at `others`, no axis, and not one another.

    Returns the texts for which there was room. What is predicted lies above what is measured: then the texts go below.
    """
    figure.draw_without_rendering()  # the layout decides where things are
    spots = [axes.transData.transform(place) for place in (*(mark.place for mark in marks), *others)]
    written: list[str] = []
    taken: list[tuple[float, float, float]] = []  # centers of the texts, and their widths
    pixels = figure.dpi / 72
    for mark, (x, y) in zip(marks, spots, strict=False):
        aside = mark.width / 2 + 9
        sides = ((aside, -6.0), (aside, 6.0), (aside, -16.0), (0.0, 14.0)) if mark.named else _SIDES
        for right, up in sides[:: -1 if others else 1]:
            center = x + right * pixels, y + up * pixels
            clear = all(
                abs(center[0] - other) > (mark.width + width) / 2 * pixels or abs(center[1] - high) > _TEXT[1] * pixels
                for other, high, width in taken
            )
            near = (mark.width / 2 + 1) * pixels
            inside = axes.bbox.x0 + near <= center[0] <= axes.bbox.x1 - near
            free = all(abs(center[0] - spot[0]) > near or abs(center[1] - spot[1]) > 6 * pixels for spot in spots)
            if clear and free and inside:
                taken.append((*center, mark.width))
                written.append(mark.text)
                style = {"fontsize": 8, "color": mark.color, "ha": "center", "va": "center"}
                style |= {"fontsize": 10, "fontweight": "bold"} if mark.named else {}
                axes.annotate(mark.text, mark.place, (right, up), textcoords="offset points", **style)
                break
    return written


def arm_colors(runs: list[Results]) -> dict[str, str]:
    """Chooses a color for each arm, the same one in every run and picture."""
    arms = dict.fromkeys(arm for run in runs for arm in run.arms)
    taken = {_COLORS[arm] for arm in arms if arm in _COLORS}
    free = [color for color in _OTHER_COLORS if color not in taken]
    others = [arm for arm in arms if arm not in _COLORS]
    return {arm: _COLORS[arm] if arm in _COLORS else free[others.index(arm) % len(free)] for arm in arms}


def _marker(runs: list[Results], number: int, turn: int) -> str:
    return _MARKERS[(turn if len(runs) == 1 else number) % len(_MARKERS)]


def _place(point: Point, per_gpu: bool) -> tuple[float, float]:
    rate = point.tokens_per_second_per_gpu if per_gpu else point.output_tokens_per_second
    assert point.tokens_per_second_per_user is not None and rate is not None
    return point.tokens_per_second_per_user, rate


def _curve(axes: Any, points: list[Point], per_gpu: bool, marker: str, style: dict[str, Any]) -> None:
    """Draws the frontier as a line, every point as a mark."""
    places = [_place(point, per_gpu) for point in points]
    line = frontier(places)
    axes.plot([x for x, _ in line], [y for _, y in line], linewidth=1.8, marker=marker, markersize=5, **style)
    rest = [place for place in places if place not in line]
    axes.plot([x for x, _ in rest], [y for _, y in rest], marker, markersize=5, color=style["color"], alpha=0.5)


def plot_acceptance(runs: list[Results], file: Path) -> bool:
    """Plots acceptance by position of the draft, and by category; False where no run has any, and nothing is drawn.

    Of several arms that draft: by position at the middle load, and the acceptance length at every load. Beside either,
    where trees were drafted, accepted drafts by rank.
    """
    if len(runs) == 1 and len(_drafting(runs[0])) > 1:
        _plot_arms_acceptance(runs[0], file)
        return True
    curves = [(run, point) for run in runs for point in _typical(run)]
    if not any(point.acceptance_by_position for _, point in curves):
        return False
    bars = [(run, point) for run, point in curves if point.acceptance_length_by_category]
    ranked = [
        _Ranked(_load_label(run, point, len(runs) == 1), f"C{number}", point.accepted_by_rank)
        for number, (run, point) in enumerate(curves)
        if point.accepted_by_rank
    ]
    figure, (left, *more) = _figure(columns=1 + bool(bars) + bool(ranked))
    for number, (run, point) in enumerate(curves):
        shares = _tried_shares(point)
        label = _load_label(run, point, len(runs) == 1)
        if point.acceptance_length is not None:
            label += f": {point.acceptance_length:.2f} tokens a step"
        style = {"color": f"C{number}", "label": label, "marker": _MARKERS[number % 4]}
        left.plot(range(1, len(shares) + 1), shares, markersize=4, linewidth=1.5, **style)
    imposed = next((run.imposed_acceptance for run in runs if run.imposed_acceptance), None)
    if imposed is not None:
        survival, rows = imposed["survival"], int(imposed["rows"])
        curve = [survival**i for i in range(1, rows)]
        left.plot(range(1, rows), curve, "k:", label=f"imposed: {imposed['tokens_per_step']:g} tokens a step")
    left.set_ylim(0, 1.02)
    left.set_xlabel("position of the draft in its block")
    left.set_ylabel("share of verified drafts that were accepted")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    if bars:
        _category_bars(more[0], bars, len(runs) == 1)
    if ranked:
        _rank_bars(more[-1], ranked)
    figure.suptitle(_title(runs) + (", acceptance imposed" if imposed else ""), fontsize=10)
    figure.savefig(file)
    return True


def _drafting(run: Results) -> list[str]:
    told = {point.arm for point in run.points if point.acceptance_length is not None}
    return [arm for arm in run.arms if arm in told]


def _plot_arms_acceptance(run: Results, file: Path) -> None:
    colors = arm_colors([run])
    points = {arm: [p for p in run.points if p.arm == arm and p.acceptance_length is not None] for arm in run.arms}
    silent = [arm for arm in _drafting(run) if not points[arm][len(points[arm]) // 2].acceptance_by_position]
    middles = {arm: of[len(of) // 2] for arm, of in points.items() if of}
    ranked = [
        _Ranked(f"{arm}, {_load_label(run, middle, True)}", colors[arm], middle.accepted_by_rank)
        for arm, middle in middles.items()
        if middle.accepted_by_rank
    ]
    figure, (left, right, *more) = _figure(columns=3 if ranked else 2)
    if ranked:
        _rank_bars(more[0], ranked)
    for turn, arm in enumerate(run.arms):
        if not points[arm]:
            continue
        middle = middles[arm]
        style = {"color": colors[arm], "marker": _marker([run], 0, turn), "markersize": 5, "linewidth": 1.5}
        if arm not in silent:
            shares = _tried_shares(middle)
            left.plot(range(1, len(shares) + 1), shares, label=f"{arm}, {_load_label(run, middle, True)}", **style)
        right.plot([p.load for p in points[arm]], [p.acceptance_length for p in points[arm]], **style)
    _name_lengths(right, {arm: points[arm][-1] for arm in points if points[arm]}, colors)
    left.set_ylim(0, 1.02)
    left.set_xlabel("position of the draft in its block")
    left.set_ylabel("share of verified drafts that were accepted")
    if silent:
        left.set_title(f"not told by {', '.join(silent)}", fontsize=9)
    if len(silent) < len(_drafting(run)):
        left.legend(fontsize=9)
    right.set_xlabel(run.load_unit)
    right.set_ylabel("acceptance length (tokens a decoding step)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(_title([run]), fontsize=10)
    figure.savefig(file)


def _name_lengths(axes: Any, last: dict[str, Point], colors: dict[str, str]) -> None:
    """Writes each arm's name and acceptance length at the right of its last point, none over another."""
    lengths = {arm: point.acceptance_length or 1.0 for arm, point in last.items()}
    texts = {arm: f"{arm} {length:.2f}" for arm, length in lengths.items()}
    top = 1 + 1.1 * (max(axes.dataLim.y1, 1.5) - 1)
    letters = max(map(len, texts.values()))
    axes.set_ylim(1, top)
    axes.set_xlim(0, axes.dataLim.x1 / (1 - min(0.5, 0.04 + 0.021 * letters)))
    height = top
    for arm in sorted(lengths, key=lambda arm: -lengths[arm]):
        height = min(lengths[arm], height - 0.05 * (top - 1))
        style = {"color": colors[arm], "fontsize": 10, "fontweight": "bold", "va": "center"}
        axes.annotate(texts[arm], (last[arm].load, height), (8, 0), textcoords="offset points", **style)


def _tried_shares(point: Point) -> list[float]:
    """Shares accepted at the positions that were verified often enough: drafts of some lengths are rare."""
    enough = _LEAST_TRIED * max(point.verified_by_position, default=0)
    tried = zip(point.acceptance_by_position, point.verified_by_position, strict=True)
    return [share for share, tries in tried if tries >= enough]


def _typical(run: Results) -> list[Point]:
    """Chooses the points that drafted under the smallest, the middle and the largest load."""
    points = [point for point in run.points if point.acceptance_length is not None]
    return [points[i] for i in sorted({0, len(points) // 2, len(points) - 1})] if points else []


def _category_bars(axes: Any, bars: list[tuple[Results, Point]], one_run: bool) -> None:
    names = sorted({name for _, point in bars for name in point.acceptance_length_by_category})
    width = 0.8 / len(bars)
    for number, (run, point) in enumerate(bars):
        places = [i + (number - (len(bars) - 1) / 2) * width for i in range(len(names))]
        label = _load_label(run, point, one_run)
        heights = [point.acceptance_length_by_category.get(name, 0.0) for name in names]
        axes.bar(places, heights, width, label=label, color=f"C{number}")
    turned = {"rotation": 30, "ha": "right"} if len(names) > 5 else {}
    axes.set_xticks(range(len(names)), list(map(_plain, names)), **turned)
    axes.set_xlabel("category of the prompt")
    axes.set_ylabel("acceptance length (tokens a decoding step)")
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


def _rank_bars(axes: Any, ranked: list[_Ranked]) -> None:
    """Draws each rank's share of the accepted drafts of trees, on a logarithmic axis: the first is most."""
    width = 0.8 / len(ranked)
    least = _LEAST_SHARE
    for number, of in enumerate(ranked):
        places = [rank + (number - (len(ranked) - 1) / 2) * width for rank in range(1, len(of.counts) + 1)]
        shares = [count / sum(of.counts) for count in of.counts]
        drawn = axes.bar(places, shares, width, label=of.label, color=of.color)
        axes.bar_label(drawn, [f"{100 * share:.{int(share < 0.1)}f}" if share else "" for share in shares], fontsize=7)
        least = min(least, *(share for share in shares if share))
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 1.5)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_xticks(range(1, max(len(of.counts) for of in ranked) + 1))
    axes.set_xlabel("rank of the draft at its depth, 1: the drafter's likeliest")
    axes.set_ylabel("share of accepted drafts of trees")
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)


def _load_label(run: Results, point: Point, one_run: bool) -> str:
    unit = "client" if (point.load, run.load_unit) == (1, "clients") else run.load_unit
    return f"{point.load:g} {unit}" if one_run else f"{_plain(run.label)}, {point.load:g} {unit}"


def _title(runs: list[Results]) -> str:
    names = [_plain(run.label) for run in runs]
    return f"{names[0]}\n{runs[0].device}" if len(runs) == 1 else " and ".join(names)


def _plain(name: str) -> str:
    """Escapes what matplotlib would read as a formula."""
    return name.replace("$", r"\$")


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=({1: 8, 2: 11, 3: 15}[columns], 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]
