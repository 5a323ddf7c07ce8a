"""A comparison as text: the table of a terminal, Markdown, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from solver_shard.names import text_of
from solver_shard.plan.plan import CATEGORIES
from solver_shard.plan.table import table
from solver_shard.units import format_bytes, format_ns

if TYPE_CHECKING:
    from solver_shard.study.compare import Comparison, Row

SHORT = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce", "all_to_all": "exchange"}
"""Column heads of the collective kinds."""
LEGEND = "gather: all_gather; scatter: reduce_scatter; reduce: all_reduce; exchange: all_to_all"


def text(found: Comparison, *, wide: bool = False) -> str:
    """A headline, the table, what every reader must know of its rows, and what is not in it."""
    shown = [kind for kind in SHORT if any(row.by_kind_ns[kind] for row in found.rows)]
    held = [name for name in CATEGORIES if any(row.at_peak[name] for row in found.rows)] if wide else []
    shown_rows = _together(found.rows)
    notes = list(dict.fromkeys(note for row in found.rows for note in row.notes))
    numbers = {note: k for k, note in enumerate(notes, start=1)}
    head = ("plan", "step", "regret", "compute", "update", *(SHORT[kind] for kind in shown), *held, "peak", "fits")
    rows = [
        (
            name + "".join(f" [{numbers[note]}]" for note in row.notes),
            format_ns(row.step_ns),
            regret(row),
            format_ns(row.compute_ns),
            _time(row.update_ns),
            *(_time(row.by_kind_ns[kind]) for kind in shown),
            *(_size(row.at_peak[name]) for name in held),
            format_bytes(row.peak),
            _fits(row),
        )
        for name, row in shown_rows
    ]
    lines = [
        f"{found.name} on {found.mesh} ({found.devices} device{'s' * (found.devices > 1)}), {found.cluster}",
        f"  limit   {format_bytes(found.limit)} per device for tensors",
        *(
            [f"  bound   {format_ns(found.bound_ns)}: proven that no {found.bound_text} takes less; regret is (step - bound) / bound"]
            if found.bound_ns is not None
            else ["  bound   none: the first plan was not made for the least time"]
        ),
        "",
        *table([head, *rows], right=range(1, len(head) - 1), header=True),
        "",
        f"  {LEGEND}",
    ]
    if found.start_text:
        lines.append(f"  passes and greedy walks start from {found.start_text} (--json lists them)")
    lines += [f"  [{k}] {note}" for note, k in numbers.items()]
    unproven = [row.name for row in found.rows[1:] if not row.proven]
    if unproven:
        lines.append(f"  the time was up before the best plan of its recipe was proven: {', '.join(unproven)}")
    if found.left_out:
        lines += ["", "Left out", *(f"  {name}: {why}" for name, why in found.left_out)]
    return text_of(lines)


def markdown(found: Comparison) -> str:
    """The wide table, times in milliseconds and sizes in GiB."""
    head = ("plan", "step, ms", "regret", "compute", "update", *SHORT, *CATEGORIES, "peak, GiB", "fits")
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 2) + "---|"]
    for row in found.rows:
        times = [row.step_ns, row.compute_ns, row.update_ns, *(row.by_kind_ns[kind] for kind in SHORT)]
        cells = [f"{ns / 1e6:.1f}" for ns in times]
        sizes = [f"{size / 2**30:.2f}" for size in (*(row.at_peak[name] for name in CATEGORIES), row.peak)]
        cells = [_cell(row.name), cells[0], regret(row), *cells[1:], *sizes, _fits(row)]
        lines.append("| " + " | ".join(cells) + " |")
    said = [f"- {_cell(row.name)}: {_cell(note)}" for row in found.rows for note in row.notes]
    said += [f"- {_cell(row.name)}: the best plan of its recipe is not proven" for row in found.rows[1:] if not row.proven]
    said += [f"- {_cell(name)} is left out: {_cell(why)}" for name, why in found.left_out]
    return "\n".join([*lines, *(["", *said] if said else [])]) + "\n"


def csv_text(found: Comparison) -> str:
    """One line per row; nanoseconds and bytes as whole numbers."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    kinds = [f"{kind}_ns" for kind in SHORT]
    writer.writerow(("plan", "kind", "step_ns", "regret", "compute_ns", "update_ns", *kinds, *CATEGORIES, "peak", "fits", "status"))
    for row in found.rows:
        times = [row.compute_ns, row.update_ns, *(row.by_kind_ns[kind] for kind in SHORT)]
        share = "" if row.regret is None else f"{row.regret:.6f}"
        sizes = [row.at_peak[name] for name in CATEGORIES]
        writer.writerow((row.name, row.kind, row.step_ns, share, *times, *sizes, row.peak, int(row.fits), row.status))
    return file.getvalue()


def regret(row: Row) -> str:
    """``+12.3%``, ``0``, or a dash where there is no bound."""
    if row.regret is None:
        return "-"
    if row.regret == 0:
        return "0"
    share = 100 * row.regret
    return f"{share:+.0f}%" if abs(share) >= 99.5 else f"{share:+.1f}%" if abs(share) >= 0.095 else f"{share:+.2g}%"


def _together(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Passes that come to plans of the same figures as one row under all their names."""
    found: dict[object, list[Row]] = {}
    for k, row in enumerate(rows):
        figures = (row.step_ns, row.compute_ns, tuple(row.by_kind_ns.values()), row.peak, row.least_peak, row.notes)
        found.setdefault(figures if row.kind == "propagation" else k, []).append(row)
    return [(", ".join(row.name for row in alike), alike[0]) for alike in found.values()]


def _fits(row: Row) -> str:
    if row.fits or row.least_peak is None:
        return "yes" if row.fits else "no"
    return f"no, {'least' if row.least_proven else 'least found'} {format_bytes(row.least_peak)}"


def _time(nanoseconds: int) -> str:
    return format_ns(nanoseconds) if nanoseconds else "-"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _cell(words: str) -> str:
    """Text that cannot end a cell of a Markdown table."""
    return words.replace("|", "\\|").replace("\n", " ")
