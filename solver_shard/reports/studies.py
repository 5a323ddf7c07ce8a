"""What other commands found, as the page shows it: a comparison of plans, a sweep's plot of step time against peak memory, and what other
layouts of a tensor would cost.

>>> comparison_table(read_comparison("comparison.json"))["rows"][0]["name"]
'ours'
>>> asked = read_prices("explained.json")
>>> asked.about, [price.label for price in asked.prices]
(('model.layers.{0..31}.self_attn.k_proj.weight',), ['S(0)R', 'RS(0)'])
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from solver_shard.analysis.recipes import Figures
from solver_shard.codec import MAX_INTEGER, decode
from solver_shard.errors import InputError
from solver_shard.files import read_json, read_text
from solver_shard.reports.charts import BOTTOM, LEFT, RIGHT, TOP, WIDTH, byte_ticks, round_ticks
from solver_shard.text import format_bytes, format_ns

if TYPE_CHECKING:
    from solver_shard.analysis.sweep.results import Row, Sweep


MAX_STUDY_BYTES = 16 * 2**20

BEYOND = 5
"""A plan that takes more than this many times the fastest one's time does not stretch the scale of the bars."""

SHARED = ("seq", "dtype", "optimizer", "template")
"""What all points of a sweep share that the page tells."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A plan that could not be had, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What ``compare --json`` writes; :class:`solver_shard.analysis.compare.Comparison` has the attributes."""

    schema_version: Literal[1] = 1
    name: str
    mesh: str
    devices: int
    cluster: str
    limit: int
    bound_ns: int | None
    bound_text: str
    start: tuple[str, ...]
    rows: tuple[Figures, ...]
    left_out: tuple[LeftOut, ...] = field(default=())


def read_comparison(path: str | os.PathLike[str]) -> Compared:
    """Read what ``compare --json`` wrote.

    Raises:
        InputError: no such file, too large, or not of this form; the message names the place.
    """
    path = Path(path)
    hint = "'solver-shard compare PLAN -o comparison.json' writes one"
    try:
        data = read_json(read_text(path, MAX_STUDY_BYTES))
    except OSError as error:
        raise InputError(f"cannot read comparison {str(path)!r}: {error.strerror or error}; {hint}") from None
    except ValueError as error:
        raise InputError(f"{path}: not a comparison: not JSON ({error}); {hint}") from None
    try:
        compared: Compared = decode(Compared, _known(data))
    except InputError as error:
        raise InputError(f"{path}: not a comparison: {error}; {hint}") from None
    return compared


def _known(data: Any) -> Any:
    """Without what the page does not show: later versions may tell more."""

    def part(kind: type, value: Any) -> Any:
        names = {f.name for f in dataclasses.fields(kind)}
        return {key: item for key, item in value.items() if key in names} if isinstance(value, dict) else value

    found = part(Compared, data)
    if isinstance(found, dict) and isinstance(found.get("rows"), list):
        found["rows"] = [part(Figures, row) for row in found["rows"]]
    return found


def comparison_table(found: Compared) -> dict[str, Any]:
    """Rows with a bar of compute, update and each collective kind, to one scale; bars beyond it end where it ends."""
    least = min((row.step_ns for row in found.rows), default=1)
    longest = max((row.step_ns for row in found.rows if row.step_ns <= BEYOND * least), default=1) or 1
    notes = {note: k for k, note in enumerate(dict.fromkeys(note for row in found.rows for note in row.notes), start=1)}
    rows = []
    for row in found.rows:
        parts = [("compute", row.compute_ns), ("update", row.update_ns), *((k, row.by_kind_ns.get(k, 0)) for k in COLLECTIVES)]
        rows.append(
            {
                "name": row.name,
                "kind": row.kind,
                "ns": row.step_ns,
                "parts": [{"kind": kind, "ns": ns, "share": max(ns, 0) / longest} for kind, ns in parts if ns > 0],
                "compute": row.compute_ns,
                "communication": row.communication_ns,
                "by_kind": {kind: row.by_kind_ns.get(kind, 0) for kind in COLLECTIVES},
                "peak": row.peak,
                "at_peak": "; ".join(f"{name} {format_bytes(size)}" for name, size in row.at_peak.items() if size),
                "fits": row.fits,
                "fits_text": fits_text(row),
                "beyond": row.step_ns > longest,
                "regret": row.regret,
                "regret_text": regret_text(row.regret),
                "proven": row.proven,
                "notes": [notes[note] for note in row.notes],
            }
        )
    bound = None
    if found.bound_ns is not None:
        bound = {"text": f"no {found.bound_text} takes less than {format_ns(found.bound_ns)}", "share": found.bound_ns / longest}
    return {
        "rows": rows,
        "kinds": [kind for kind in COLLECTIVES if any(row.by_kind_ns.get(kind) for row in found.rows)],
        "limit": found.limit,
        "bound": bound,
        "notes": list(notes),
        "left_out": [{"name": left.name, "why": left.why} for left in found.left_out],
        "of": f"{found.name} on {found.mesh}, {found.cluster}",
    }


def fits_text(row: Figures) -> str:
    """Whether a plan fits, and what its recipe needs where it does not."""
    if row.fits or row.least_peak is None:
        return "yes" if row.fits else "no"
    return f"no, least {'' if row.least_proven else 'found '}{format_bytes(row.least_peak)}"


def regret_text(regret: float | None) -> str:
    """``+12.3%``, ``0``, or nothing where there is no bound."""
    if regret is None:
        return ""
    share = 100 * regret
    if share == 0:
        return "0"
    return f"{share:+.0f}%" if abs(share) >= 99.5 else f"{share:+.1f}%" if abs(share) >= 0.095 else f"{share:+.2g}%"


def sweep_chart(sweep: Sweep, height: int = 340) -> dict[str, Any]:
    """Points of step time against peak memory with the front, and the table's rows, fastest first; what has no plan after them.

    Points of different batches are compared by the time of one sequence, as the sweep's own table does.
    """
    from solver_shard.analysis.sweep.results import front, ranked, time_of

    rows = ranked(sweep.rows)
    best = {row.name for row in front(rows)}
    several = len({row.batch for row in rows}) > 1
    times = [float(time_of(row)) if several else float(row.step_ns or 0) for row in rows]
    peaks = [row.peak or 0 for row in rows]
    right, bottom = WIDTH - RIGHT - 8, height - BOTTOM - 14
    (near, far), (small, large) = _range(times), _range(peaks)

    def x_of(time: float) -> float:
        return round(LEFT + (right - LEFT) * (time - near) / (far - near), 1)

    def y_of(size: float) -> float:
        return round(bottom - (bottom - TOP) * (size - small) / (large - small), 1)

    places: dict[tuple[float, float], list[Row]] = {}
    for row, time, size in zip(rows, times, peaks, strict=True):
        places.setdefault((x_of(time), y_of(size)), []).append(row)
    points = [
        {
            "x": x,
            "y": y,
            "name": ", ".join(row.name for row in found),
            "label": found[0].mesh + (f" +{len(found) - 1}" if len(found) > 1 else ""),
            "front": any(row.name in best for row in found),
        }
        for (x, y), found in places.items()
    ]
    _place_labels(points, right)
    stairs = [(p["x"], p["y"]) for p in points if p["front"]]
    path = "".join(f"M{x:g} {TOP}V{y:g}" if not k else f"H{x:g}V{y:g}" for k, (x, y) in enumerate(stairs)) + (
        f"H{right:g}" if stairs else ""
    )
    return {
        "width": WIDTH,
        "height": height,
        "plot": {"left": LEFT, "top": TOP, "right": right, "bottom": bottom},
        "points": points,
        "front": path,
        "x_label": "time of one sequence" if several else "step time",
        "x_ticks": [{"x": x_of(v), "label": format_ns(round(v))} for v in round_ticks(far, near)],
        "y_ticks": [{"y": y_of(v), "label": format_bytes(v)} for v in byte_ticks(large, small)],
        "rows": [_sweep_row(row, row.name in best) for row in rows],
        "without": [_without(row) for row in sweep.rows if not row.fits],
        "batches": several,
        "limits": len({row.memory_limit for row in sweep.rows}) > 1,
        "clusters": len({row.cluster for row in sweep.rows}) > 1,
        "of": f"{sweep.model}, {', '.join(f'{key} {value}' for key, value in sweep.asked.items() if key in SHARED and value != 'none')}",
    }


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis: with room at both, from zero where the smallest value is not far from it."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.12 * (high - low) or 0.1 * max(high, 1.0)
    return (0.0 if low < 0.35 * high else low - room), high + room


def _place_labels(points: list[dict[str, Any]], right: float) -> None:
    """Give each point on the front, and each of few points, a label beside it that covers no other; none where there is no room."""
    taken = [(p["x"] - 6, p["y"] - 6, p["x"] + 6, p["y"] + 6) for p in points]
    for k, point in enumerate(points):
        point["text"] = None
        if not point["front"] and len(points) > 8:
            continue
        width = 6.6 * len(point["label"])
        for side, above in ((1, True), (1, False), (-1, True), (-1, False)):
            x = point["x"] + 8 * side
            y = point["y"] - 7 if above else point["y"] + 15
            box = (min(x, x + side * width), y - 11, max(x, x + side * width), y + 2)
            free = not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for i, (a, b, c, d) in enumerate(taken) if i != k)
            if free and box[0] > LEFT and box[2] < right:
                point["text"] = {"x": round(x, 1), "y": round(y, 1), "anchor": "start" if side > 0 else "end"}
                taken.append(box)
                break


def _sweep_row(row: Row, best: bool) -> dict[str, Any]:
    from solver_shard.analysis.sweep.results import per_second

    rate = per_second(row)
    return {
        "mesh": row.mesh,
        "devices": row.devices,
        "batch": "" if row.batch is None else str(row.batch),
        "limit": row.memory_limit,
        "cluster": row.cluster,
        "ns": row.step_ns or 0,
        "rate": 0 if rate is None else round(rate),
        "communication": (row.communication_ns or 0) / max(row.step_ns or 0, 1),
        "peak": row.peak or 0,
        "gap": 100 * (row.gap or 0.0),
        "status": row.status,
        "front": best,
    }


def _without(row: Row) -> dict[str, Any]:
    words = {"infeasible": "no plan fits", "error": "failed", "pending": "not run yet"}
    why = words.get(row.status, row.status)
    if row.status == "infeasible" and row.peak is not None:
        why += f"; the smallest peak found is {format_bytes(row.peak)}"
    elif row.message:
        why += f": {row.message[:200]}"
    return {"name": row.name, "why": why}


MAX_PRICES_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAlternative:
    """One alternative: its layout or strategy, and its price in words."""

    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedQuestion:
    """The alternatives of one question.

    Attributes:
        about: names of the tensors or ops, repeated layers folded.
        of: which decision: layout, state, forward, backward or strategy.
    """

    about: tuple[str, ...]
    of: str
    prices: tuple[PricedAlternative, ...]


def read_prices(path: str | os.PathLike[str]) -> PricedQuestion:
    """Read what ``explain --json`` wrote.

    Raises:
        InputError: no such file, too large, or not of this form.
    """
    path = Path(path)
    hint = "'solver-shard explain PLAN TENSOR --json > FILE' writes one"
    try:
        data = read_json(read_text(path, MAX_PRICES_BYTES))
    except OSError as error:
        raise InputError(f"cannot read explanation {str(path)!r}: {error.strerror or error}; {hint}") from None
    except ValueError as error:
        raise InputError(f"{path}: not an explanation: not JSON ({error}); {hint}") from None
    try:
        objective = _whole(data["now"]["objective"])
        show = format_bytes if data["unit"] == "memory" else format_ns
        found = [data["instead"], *data["alternatives"], *data["others"]]
        prices = tuple(PricedAlternative(label=_text(p["label"]), text=_price(p, show, objective)) for p in found if p is not None)
        return PricedQuestion(about=tuple(_text(name) for name in data["about"]), of=_text(data["of"]), prices=prices)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not an explanation with prices: {type(error).__name__} {error}; {hint}") from None


def _price(price: Mapping[str, Any], show: Any, objective: int) -> str:
    """The price, between its bounds where it is not proven, and what the plan with it needs."""
    outcome, best = price["outcome"], price["best"]
    if best is None:
        if outcome == "too large":
            smallest = price["smallest"]
            return "no plan with it fits" + ("" if smallest is None else f"; the smallest peak found is {format_bytes(_whole(smallest))}")
        return "no op runs so" if outcome == "impossible" else "no plan with it was found within the limits"
    low, high = _whole(best["low"]), _whole(best["high"])
    share = f" ({100 * high / objective:+.2g}%)" if objective else ""
    cost = f"{_signed(high, show)}{share}" if low == high else f"between {_signed(low, show)} and {_signed(high, show)}{share}"
    return f"{cost}; then {format_ns(_whole(best['total_ns']))} and a peak of {format_bytes(_whole(best['peak']))}"


def _signed(value: int, show: Any) -> str:
    return f"{'-' if value < 0 else '+'}{show(abs(value))}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= MAX_INTEGER:
        raise TypeError(f"expected a whole number below 2^63, got a {'larger one' if type(value) is int else type(value).__name__}")
    return value


def prices_by_entry(asked: Sequence[PricedQuestion], entries: Sequence[Mapping[str, Any]]) -> dict[int, list[dict[str, str]]]:
    """Entry to the prices asked about its tensors, by the folded name or by one of the names that it stands for."""
    position = {name: entry["id"] for entry in entries for name in (*entry["members"], entry["name"])}
    found: dict[int, list[dict[str, str]]] = {}
    for question in asked:
        for entry in dict.fromkeys(position[name] for name in question.about if name in position):
            found.setdefault(entry, []).extend({"of": question.of, "label": p.label, "text": p.text} for p in question.prices)
    return found
