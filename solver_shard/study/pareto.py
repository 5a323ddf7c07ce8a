"""Which points of a sweep are worth a look: the front of time against memory, the ranking, and how far it is proven.

Points with different batches are compared by the time that one sequence (one sample) takes: the step time over the batch. With one batch
this is the order of step times. A point is on the front where no other is at least as good in both time and peak, and better in one.

The solver proves a bound for each point: no plan of it is faster. Where the bound of a point lies below the time of another one that
ranks before it, a longer search could still turn the two around; the table says so instead of promising an order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from solver_shard.names import text_of
from solver_shard.plan.table import table
from solver_shard.study.sweep_result import Row, Sweep
from solver_shard.units import format_bytes, format_ns

MOST_NAMED = 6
"""Points that one sentence names."""

MOST_TEXT = 300
"""Characters of a message in the table; the file has all of it."""


def time_of(row: Row) -> Fraction:
    """Nanoseconds per sequence, exact; of the whole step where there is no batch. Only of rows that fit."""
    assert row.step_ns is not None, "a row that fits has a step time"
    return Fraction(row.step_ns, row.batch or 1)


def per_second(row: Row) -> float | None:
    """Tokens per second; without a sequence length samples, and without a batch steps. None where there is no plan."""
    return (row.seq or 1 if row.batch else 1) * 1e9 / float(time_of(row)) if row.fits and row.step_ns else None


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Those that fit, fastest first, of equal ones the smaller peak; then in the order of the points."""
    return sorted((row for row in rows if row.fits), key=_time_and_peak)


def front(rows: Iterable[Row]) -> list[Row]:
    """Those that fit and that no other beats by being at least as fast and at least as small, one of the two strictly; fastest first."""
    found: list[Row] = []
    for row in ranked(rows):
        if not found or _peak(row) < _peak(found[-1]) or _time_and_peak(row) == _time_and_peak(found[-1]):
            found.append(row)
    return found


def proves_time(sweep: Sweep) -> bool:
    """Whether the bounds are of the step time: with another objective they say nothing of the ranking."""
    return sweep.asked.get("objective") == "time" and sweep.asked.get("memory_weight") == "0"


def not_proven_slower(row: Row, than: Row) -> bool:
    """Whether a longer search could make a point as fast as one that ranks before it: its bound is below the other's time."""
    assert row.bound is not None, "a row that fits has a bound"
    return Fraction(row.bound, row.batch or 1) < time_of(than)


def table_text(sweep: Sweep) -> str:
    """The table that a person reads: fastest first with the front marked, then what does not fit, failed, or is not run yet."""
    rows = sweep.rows
    shown = [part for part in _PARTS if len({part.text(row) for row in rows}) > 1 or part.name == "mesh"]
    lines = [_title(sweep), *_asked(sweep, shown)]
    for section in (_plans(sweep, shown), _misfits(rows, shown), _failures(rows, shown)):
        lines += ["", *section] if section else []
    waiting = sum(row.status == "pending" for row in rows)
    lines += ["", f"{waiting} of {len(rows)} points are not run yet"] if waiting else []
    return text_of(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of what identifies a point, as a column."""

    name: str
    text: Callable[[Row], str]
    right: bool = True


_PARTS = (
    _Part(name="mesh", text=lambda row: row.mesh, right=False),
    _Part(name="devices", text=lambda row: str(row.devices)),
    _Part(name="batch", text=lambda row: "" if row.batch is None else str(row.batch)),
    _Part(name="limit", text=lambda row: format_bytes(row.memory_limit)),
    _Part(name="cluster", text=lambda row: row.cluster, right=False),
)


def _title(sweep: Sweep) -> str:
    rows = sweep.rows
    counts = [
        (sum(row.fits for row in rows), "with a plan"),
        (sum(row.status == "infeasible" for row in rows), "without one that fits"),
        (sum(row.status == "error" for row in rows), "failed"),
    ]
    said = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{sweep.model}: {len(rows)} point{'s' * (len(rows) != 1)}{f', {said}' if said else ''}"


def _asked(sweep: Sweep, shown: Sequence[_Part]) -> list[str]:
    """What all points share; the columns say the rest."""
    row, asked, names = sweep.rows[0], sweep.asked, {part.name for part in shown}
    said = [f"{row.devices} device{'s' * (row.devices != 1)}"] if "devices" not in names else []
    said += [f"batch {row.batch}"] if "batch" not in names and row.batch is not None else []
    said += [f"seq {row.seq}"] if row.seq is not None else []
    said += [text for name in ("dtype", "optimizer") if (text := asked.get(name, "none")) != "none"]
    said += [f"{asked['microbatches']} microbatches"] if asked.get("microbatches", "1") != "1" else []
    said += ["forward only"] if asked.get("forward_only") == "true" else []
    said += ["every layer checkpointed"] if asked.get("checkpoint") == "true" else []
    said += [f"cluster {row.cluster}"] if "cluster" not in names else []
    if "limit" not in names:
        said += [f"{format_bytes(row.memory_limit)} per device" + (f" less {format_bytes(row.reserve)} reserve" if row.reserve else "")]
    kept = [asked[name] for name in ("template", "pins") if asked.get(name, "none") != "none"]
    return [f"  {', '.join(said)}", *(f"  {text}" for text in kept)]


def _plans(sweep: Sweep, shown: Sequence[_Part]) -> list[str]:
    rows = ranked(sweep.rows)
    if not rows:
        return []
    best, marked, proves = rows[0], {row.name for row in front(rows)}, proves_time(sweep)
    unsure = {row.name for above, row in itertools.pairwise(rows) if proves and not_proven_slower(row, above)}
    rate = "tokens/s" if best.seq and best.batch else "samples/s" if best.batch else "steps/s"
    head = ["", *(part.name for part in shown), "step time", rate, "slower by", "peak", "communication", "gap"]
    cells = [head]
    for row in rows:
        step, talk, gap = row.step_ns or 0, row.communication_ns or 0, row.gap or 0.0
        slower = "best" if time_of(row) == time_of(best) else f"{100 * float(time_of(row) / time_of(best) - 1):.1f}%"
        cells.append(
            [
                ("*" if row.name in marked else " ") + ("~" if row.name in unsure else " "),
                *(part.text(row) for part in shown),
                format_ns(step),
                f"{per_second(row) or 0:,.0f}" if (per_second(row) or 0) >= 10 else f"{per_second(row) or 0:.3g}",
                slower,
                format_bytes(_peak(row)),
                f"{100 * talk / max(step, 1):.0f}%",
                f"{100 * gap:.2g}%" + (f" ({row.baseline})" if row.baseline else ""),
            ]
        )
    right = [i + 1 for i, part in enumerate(shown) if part.right]
    right += range(len(shown) + 1, len(head))
    lines = table(cells, right=right, header=True)
    lines.append("  *  on the front: no other plan is at least as fast and as small, and better in one")
    if not proves:
        return [*lines, "  the proofs are not of the step time, for another objective was asked: nothing is proven of this order"]
    if unsure:
        lines.append("  ~  not proven slower than the row above: its bound is lower than that one's step time")
    return [*lines, *_proof(rows, shown)]


def _proof(rows: Sequence[Row], shown: Sequence[_Part]) -> list[str]:
    """What is proven of the fastest."""
    best, *others = rows
    if not others:
        return []
    rivals = [row for row in others if not_proven_slower(row, best)]
    name = _label(best, shown)
    if not rivals:
        return [f"  proven: none of the others is faster than {name}"]
    named = [f"{_label(row, shown)} (bound {format_ns(row.bound or 0)})" for row in rivals[:MOST_NAMED]]
    more = f", +{len(rivals) - MOST_NAMED} more" if len(rivals) > MOST_NAMED else ""
    return [f"  not proven slower than {name}: {', '.join(named)}{more}"]


def _misfits(rows: Sequence[Row], shown: Sequence[_Part]) -> list[str]:
    misfits = [row for row in rows if row.status == "infeasible"]
    if not misfits:
        return []
    cells = [[*(part.text(row) for part in shown), *_needs(row)] for row in misfits]
    right = [i for i, part in enumerate(shown) if part.right] + [len(shown), len(shown) + 1, len(shown) + 2]
    head = [*(part.name for part in shown), "for tensors", "least peak found", "proven least"]
    lines = ["No plan fits", *table([head, *cells], right=right, header=True)]
    return lines + [f"  {_label(row, shown)}: {_short(row.message)}" for row in misfits if row.peak is None and row.peak_bound is None]


def _needs(row: Row) -> list[str]:
    return [
        format_bytes(row.memory_limit - row.reserve),
        *("" if size is None else format_bytes(size) for size in (row.peak, row.peak_bound)),
    ]


def _failures(rows: Sequence[Row], shown: Sequence[_Part]) -> list[str]:
    failed = [f"  {_label(row, shown)}: {_short(row.message)}" for row in rows if row.status == "error"]
    return ["Failed; the same command runs them again", *failed] if failed else []


def _label(row: Row, shown: Sequence[_Part]) -> str:
    """A point in a sentence."""
    words = {"mesh": "", "devices": None, "batch": "batch ", "limit": "", "cluster": ""}
    return " ".join(f"{words[part.name]}{text}" for part in shown if words[part.name] is not None and (text := part.text(row)))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 3]}..."


def _time_and_peak(row: Row) -> tuple[Fraction, int]:
    return time_of(row), _peak(row)


def _peak(row: Row) -> int:
    assert row.peak is not None, "a row that fits has a peak"
    return row.peak
