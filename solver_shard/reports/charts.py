"""Geometry of the page's charts: memory over a step, the course of the solve, and step time against peak memory. Units of an SVG's viewBox.

>>> chart = memory_chart(plan)
>>> chart["areas"][0]["category"], chart["limit"]["label"]
('parameters', 'limit 64.0 GiB')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from solver_shard.plan.plan import Plan
from solver_shard.text import format_bytes, format_ns

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 22, 26
"""Room for labels around the plot."""

COLUMNS = 440
"""Columns of the memory chart; each shows the moment of its span at which most is held."""

ROOM = 3.0
"""A limit further above the peak than this is drawn at the top of a scale that does not reach it, and its label says so."""


def memory_chart(plan: Plan, height: int = 300) -> dict[str, Any]:
    """Bytes per device over the step, stacked by category.

    Returns:
        width, height, plot (left, top, right, bottom); areas from the bottom up (category, path); ticks; limit (y, label); peak (x, y,
        label); phases (label, x, x1); and, for a reader that moves over it, columns: left edges, op positions and bytes by category.
    """
    memory = plan.memory
    steps = len(plan.ops) + 1
    names = [name for name, values in memory.series.items() if any(values)]
    moments = _fullest(plan, steps, names)
    far = memory.limit > ROOM * max(memory.peak, 1)
    top = (1.25 if far else 1.06) * max(memory.peak, 0 if far else memory.limit, 1)
    right, bottom = WIDTH - RIGHT, height - BOTTOM

    def x_of(step: float) -> float:
        return round(LEFT + (right - LEFT) * step / steps, 1)

    def y_of(size: float) -> float:
        return round(bottom - (bottom - TOP) * min(max(size / top, 0.0), 1.0), 1)

    edges = [x_of(start) for start, _, _ in moments] + [x_of(steps)]
    areas = []
    below = [0] * len(moments)
    for k, name in enumerate(names):
        above = [low + values[k] for low, (_, _, values) in zip(below, moments, strict=True)]
        areas.append({"category": name, "path": _band(edges, [y_of(v) for v in above], [y_of(v) for v in below])})
        below = above
    label = f"limit {format_bytes(memory.limit)}"
    if far:
        label += f", {memory.limit / max(memory.peak, 1):.1f} times the peak, above this scale"
    first = next((i for i, op in enumerate(plan.ops) if op.phase == "backward"), None)
    spans = [("forward", 0, steps if first is None else first), *([("backward", first, steps)] if first is not None else [])]
    return {
        "width": WIDTH,
        "height": height,
        "plot": {"left": LEFT, "top": TOP, "right": right, "bottom": bottom},
        "areas": areas,
        "names": names,
        "ticks": [{"y": y_of(v), "label": format_bytes(v)} for v in byte_ticks(top)],
        "limit": {"y": TOP if far else y_of(memory.limit), "label": label},
        "peak": {"x": x_of(memory.peak_time + 0.5), "y": y_of(memory.peak), "label": f"peak {format_bytes(memory.peak)}"},
        "phases": [{"label": label, "x": x_of(a), "x1": x_of(b)} for label, a, b in spans],
        "columns": {"edges": edges, "at": [at for _, at, _ in moments], "values": [list(values) for _, _, values in moments]},
    }


def _fullest(plan: Plan, steps: int, names: Sequence[str]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Per column: where it starts, the op position at which most is held within it, and the bytes by category then."""
    memory = plan.memory
    rows = list(zip(*(memory.series[name] for name in names), strict=True)) if names else [() for _ in memory.times]
    bounds = [*memory.times, steps]
    width = max(1, -(-steps // COLUMNS))
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
        for column in range(start // width, (max(stop, start + 1) - 1) // width + 1):
            at = max(start, column * width)
            if column * width < steps and (column not in found or sum(row) > sum(found[column][1])):
                found[column] = (at, row)
    return [(column * width, at, row) for column, (at, row) in sorted(found.items())]


def _band(edges: Sequence[float], above: Sequence[float], below: Sequence[float]) -> str:
    """A step-shaped area between two lines, forth along the upper one and back along the lower."""
    forth = f"M{edges[0]:g} {above[0]:g}" + "".join(
        f"H{edges[k + 1]:g}" + (f"V{above[k + 1]:g}" if k + 1 < len(above) and above[k + 1] != above[k] else "") for k in range(len(above))
    )
    back = f"V{below[-1]:g}" + "".join(
        f"H{edges[k]:g}" + (f"V{below[k - 1]:g}" if k and below[k - 1] != below[k] else "") for k in range(len(below) - 1, -1, -1)
    )
    return forth + back + "Z"


def byte_ticks(top: float, low: float = 0.0) -> list[int]:
    """Four or so round sizes."""
    step = 2 ** math.ceil(math.log2(max((top - low) / 5, 1)))
    return [k * step for k in range(math.ceil(low / step), int(top / step) + 1)]


def round_ticks(top: float, low: float = 0.0) -> list[float]:
    """Four to ten multiples of 1, 2 or 5 times a power of ten, from ``low`` to ``top``."""
    span = max(top - low, 1e-9)
    power = math.floor(math.log10(span / 4))
    step = next(k for k in (1, 2, 5, 10) if span / (k * 10.0**power) <= 8)
    first = math.ceil(round(low / (step * 10.0**power), 9))
    return [round(k * step * 10.0**power, max(-power, 0)) for k in range(first, int(top / (step * 10.0**power)) + 1)]


def history_chart(plan: Plan, height: int = 240) -> dict[str, Any] | None:
    """How the best plan and the bound came nearer while the solver ran; None where the plan does not say.

    Returns:
        width, height, plot; lines (kind: objective or bound, path); ticks of both axes; rows for a table, oldest first.
    """
    moments = plan.certificate.history
    values = [v for m in moments for v in (m.objective, m.bound) if v is not None]
    if len(moments) < 2 or not values:
        return None
    show = format_bytes if plan.options.objective == "memory" else format_ns
    end = max(max(m.seconds for m in moments), 1e-3)
    low, high = max(min(values), 0), max(values)
    logarithmic = low > 0 and high > 4 * low
    scale: Callable[[float], float] = math.log if logarithmic else float
    base, span = scale(low), (scale(high) - scale(low)) or 1.0
    right, bottom = WIDTH - RIGHT, height - BOTTOM

    def x_of(seconds: float) -> float:
        return round(LEFT + (right - LEFT) * min(max(seconds / end, 0.0), 1.0), 1)

    def y_of(value: float) -> float:
        return round(bottom - 8 - (bottom - TOP - 8) * (scale(max(value, low)) - base) / span, 1)

    lines = []
    for kind in ("objective", "bound"):
        path = ""
        for m in moments:
            value = getattr(m, kind)
            if value is not None:
                path += f"H{x_of(m.seconds):g}V{y_of(value):g}" if path else f"M{x_of(m.seconds):g} {y_of(value):g}"
        if path:
            lines.append({"kind": kind, "path": f"{path}H{right:g}"})
    ticks = [math.exp(base + span * k / 4) if logarithmic else low + (high - low) * k / 4 for k in range(5)]
    return {
        "width": WIDTH,
        "height": height,
        "plot": {"left": LEFT, "top": TOP, "right": right, "bottom": bottom},
        "lines": lines,
        "logarithmic": logarithmic,
        "ticks": [{"y": y_of(v), "label": show(round(v))} for v in ticks] if high > low else [{"y": y_of(low), "label": show(low)}],
        "times": [{"x": x_of(seconds), "label": f"{seconds:g} s"} for seconds in round_ticks(end)],
        "rows": [
            {
                "seconds": f"{m.seconds:.2f} s",
                "objective": "" if m.objective is None else show(m.objective),
                "bound": "" if m.bound is None else show(m.bound),
                "gap": f"{(m.objective - m.bound) / m.objective:.2%}" if m.objective and m.bound is not None else "",
                "source": m.source,
            }
            for m in moments
        ],
    }
