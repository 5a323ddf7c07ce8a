"""One table over plans for the same model and mesh, all priced by the same evaluator.

>>> found = compare(plan, recipes=("dp=zero3,tp=megatron", "user-priority"))
>>> print(found)                                # the table
>>> found.rows[1].regret                        # by how much that step is slower than any plan can be: (time - bound) / bound
0.118

A row is a plan that was given as a file, or what a *recipe* makes of the same step: an expert's template, a greedy pass, a plan for
another tool, a file of pins (:mod:`solver_shard.analysis.recipes`, :mod:`solver_shard.analysis.other_tools`). The model is traced once, and
the figures of every row, a file's too, are those of :func:`solver_shard.plan.evaluate.evaluate`, which sees no solver: a plan's own figures
are only held against them.

The bound of the regret is the first plan's: no plan of its problem (:attr:`Comparison.bound_text` says which that is) that keeps the
memory limit takes less time. A row that does not fit, or that is of another problem, can be below it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from solver_shard.analysis.recipes import GREEDY, PASSES, Figures, Made, Maker, TriedTemplate
from solver_shard.analysis.reopen import Retraced, retrace
from solver_shard.arguments import Several, checked, each
from solver_shard.codec import encode
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError, SolverShardError
from solver_shard.options import OPTIONS, check_search
from solver_shard.plan.evaluate import Evaluation, evaluate, evaluated
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import CATEGORIES, Plan
from solver_shard.program import Program
from solver_shard.text import format_bytes, format_ns, table, text_of

if TYPE_CHECKING:
    import torch

    from solver_shard.analysis.other_tools import ToolPlan


SCHEMA_VERSION = 1
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

MATTERS = tuple(entry.recorded for entry in OPTIONS.values() if entry.of_step)
"""Options in which plans of one table must agree: they say what a step is, and what it costs."""

TIME_LIMIT = 20.0
"""Seconds of solving for one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow(Figures):
    """One plan and its price, with the plan and its program as priced; these are not in JSON."""

    plan: Plan = field(repr=False)
    program: Program = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """All but the plan itself."""
        figures = {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(Figures)}
        return {**figures, "communication_ns": self.communication_ns, "proven": self.proven}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows, the first plan's first and the others by time, and what they have in common.

    Attributes:
        name, mesh, cluster: of the model's step; the mesh without split axes.
        limit: bytes per device that tensors may have.
        bound_ns: no plan of the first plan's problem that fits takes less; None where the first plan was not made for least time.
        bound_text: which plans those are, as ``tied plan (repeated layers alike) within 64.0 GiB``.
        start, start_text: from which layouts the greedy rows start, as pins and in words; empty where there are no such rows.
        left_out: name and reason of recipes that cannot be had.
        templates: all templates that were tried, where nobody said which; the best of each kind has a row.
    """

    name: str
    mesh: str
    devices: int
    cluster: str
    limit: int
    bound_ns: int | None
    bound_text: str
    start: tuple[str, ...]
    start_text: str
    rows: tuple[ComparisonRow, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    templates: tuple[TriedTemplate, ...] = ()

    @property
    def strongest(self) -> ComparisonRow | None:
        """The fastest template that fits; None where there is none in the table."""
        return min((row for row in self.rows if row.kind == "template" and row.fits), key=lambda row: row.step_ns, default=None)

    def row(self, name: str) -> ComparisonRow:
        """The row of that name; InputError with the names there are, or why there is none of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        why = dict(self.left_out).get(name)
        if why is not None:
            raise InputError(f"{name} is left out: {why}")
        raise InputError(f"no row is called {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def to_json(self) -> dict[str, Any]:
        """Plain data: what the table shows and its wide form, times in nanoseconds and sizes in bytes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "mesh": self.mesh,
            "devices": self.devices,
            "cluster": self.cluster,
            "limit": self.limit,
            "bound_ns": self.bound_ns,
            "bound_text": self.bound_text,
            "start": list(self.start),
            "start_text": self.start_text,
            "rows": [row.to_json() for row in self.rows],
            "left_out": [{"name": name, "why": why} for name, why in self.left_out],
            "strongest": self.strongest.name if self.strongest else None,
            "templates": [encode(tried) for tried in self.templates],
        }

    def text(self, *, wide: bool = False) -> str:
        """The table for a terminal; ``wide``: with what fills the memory at the peak."""

        return text(self, wide=wide)

    def markdown(self) -> str:
        """The wide table in Markdown."""

        return markdown(self)

    def csv(self) -> str:
        """One line per row, nanoseconds and bytes."""

        return csv_text(self)

    def __str__(self) -> str:
        return self.text()


@checked
def compare(
    plan: Plan | str | os.PathLike[str],
    others: Mapping[str, Plan | str | os.PathLike[str]] | None = None,
    *,
    recipes: Several[str] | None = None,
    given: Several[ToolPlan] = (),
    pins: Mapping[str, Several[str]] | None = None,
    name: str = "ours",
    model: str | os.PathLike[str] | torch.nn.Module | Program | None = None,
    inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    retraced: Retraced | None = None,
    time_limit: float = TIME_LIMIT,
    workers: int = 2,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Price plans for the step of the first one.

    >>> found = compare(plan, recipes=["dp=zero3,tp=megatron", "user-priority"], given=[read_tp_plan(text, name="mine")])  # doctest: +SKIP
    >>> print(found)                                                                                                     # doctest: +SKIP

    Args:
        plan, name: the plan, or its file: says model, mesh, cluster, memory limit and options; its row is called ``name``.
        others: row name to another plan for the same step, or its file.
        recipes: names of greedy passes, and templates as in ``optimize(template=...)``; None for all passes, both greedy walks, and of each
            kind of template the fastest that fits (``Maker.templates`` in :mod:`solver_shard.analysis.recipes`).
        given: plans for other tools, see :func:`solver_shard.read_tp_plan` and :func:`solver_shard.read_parallelize`.
        pins: row name to pins; everything else is the solver's choice.
        model, inputs, loss_fn: as of :func:`solver_shard.analysis.reopen.retrace`; ``retraced``: its result, where there is one.
        time_limit: seconds of solving for each row that is made.
        workers, progress: as of ``solver_shard.optimize``.

    Returns:
        A row for each plan, with times in nanoseconds and bytes per device; ``str()`` is the table.

    Raises:
        InputError: plans are not of one step (the first difference is named), or the model cannot be told from the plan.
        TraceError: the model cannot be traced.
    """
    plan, beside = load_plan(plan), {title: load_plan(other) for title, other in (others or {}).items()}
    for title, other in beside.items():
        check_same(plan, other, title)
    check_search(plan.options, time_limit=time_limit, workers=workers)
    if retraced is None:
        if progress is not None:
            progress("tracing the model")
        retraced = retrace(plan, model, inputs, loss_fn=loss_fn)
    maker = Maker(plan, retraced, time_limit=time_limit, workers=workers, progress=progress)
    rows = [row_of(plan, maker.as_given(name, other)) for name, other in ((name, plan), *beside.items())]
    left_out: list[tuple[str, str]] = []
    tried: tuple[TriedTemplate, ...] = ()
    if recipes is None:
        try:
            best, tried = maker.templates()
        except InputError as error:
            left_out.append(("templates", str(error)))
        else:
            rows += [row_of(plan, made) for made in best]
    asked = (*PASSES, *GREEDY) if recipes is None else each(recipes)
    jobs: list[tuple[str, Callable[[], Made]]] = [(text, partial(maker.recipe, text)) for text in asked]
    jobs += [(item.name, partial(maker.given, item)) for item in each(given)]
    jobs += [(title, partial(maker.pinned, title, each(texts))) for title, texts in (pins or {}).items()]
    for title, make in jobs:
        try:
            rows.append(row_of(plan, make()))
        except InternalError:
            raise
        except SolverShardError as error:
            left_out.append((title, str(error).splitlines()[0]))
    names = [row.name for row in rows]
    twice = next((title for title in names if names.count(title) > 1), None)
    if twice is not None:
        raise InputError(f"two rows are called {twice!r}; give each another name")
    return Comparison(
        name=plan.name,
        mesh=str(plan.mesh.whole),
        devices=plan.mesh.size,
        cluster=plan.cluster.title,
        limit=plan.options.usable_memory,
        bound_ns=bound_of(plan),
        bound_text=_bound_text(plan),
        start=maker.started,
        start_text=maker.start_text,
        rows=(rows[0], *sorted(rows[1:], key=lambda row: (row.step_ns, row.name))),
        left_out=tuple(left_out),
        templates=tried,
    )


def bound_of(plan: Plan) -> int | None:
    """What a plan proves of the step time, in nanoseconds; None where it was not made for the least time."""
    timed = plan.options.objective == "time" and not plan.options.memory_weight
    return plan.certificate.bound if timed else None


def check_same(plan: Plan, other: Plan, title: str) -> None:
    """InputError where another plan is not for the same step on the same devices; the message names the first difference."""
    pairs: list[tuple[str, Any, Any]] = [
        ("model", plan.name, other.name),
        ("mesh", str(plan.mesh.whole), str(other.mesh.whole)),
        ("cluster", plan.cluster, other.cluster),
        *((key.replace("_", " "), getattr(plan.options, key), getattr(other.options, key)) for key in MATTERS),
    ]
    for what, mine, theirs in pairs:
        if mine != theirs:
            shown = (plan.cluster.name, other.cluster.name) if what == "cluster" else (mine, theirs)
            if shown[0] == shown[1]:
                shown = (f"{shown[0]} of other figures", shown[1])
            raise InputError(
                f"{title} is no plan for the same step: its {what} is {shown[1]}, that of the first plan {shown[0]}; compare plans for one "
                "model, mesh, cluster and batch, or solve it anew with these options"
            )


def row_of(first: Plan, made: Made) -> ComparisonRow:
    """The row of a plan, with the figures of the evaluator."""
    plan, options = made.plan, made.plan.options
    if made.kind == "plan":
        found = evaluated(plan, made.program)
    else:
        found = evaluate(plan, made.program, options.rulebook(), CostModel(plan.mesh, plan.cluster, overlap=options.overlap))
    bound, totals = bound_of(first), found.totals
    fullest = totals.index(found.peak)
    notes = list(made.notes)
    if (found.total_ns, found.peak) != (plan.costs.total_ns, plan.memory.peak):
        notes.append(
            f"the file says {format_ns(plan.costs.total_ns)} and {format_bytes(plan.memory.peak)}: its figures are not those of this "
            "version's prices, which stand here"
        )
    return ComparisonRow(
        name=made.name,
        kind=made.kind,
        step_ns=found.total_ns,
        compute_ns=found.compute_ns,
        update_ns=found.update_ns,
        by_kind_ns=by_kind(plan, found),
        unshared_ns=found.unshared_ns,
        peak=found.peak,
        at_peak={key: found.profile[key][fullest] if key in found.profile else 0 for key in CATEGORIES},
        fits=found.peak <= first.options.usable_memory,
        regret=(found.total_ns - bound) / bound if bound else None,
        status=plan.certificate.status,
        gap=plan.certificate.gap,
        notes=tuple(notes),
        plan=plan,
        program=made.program,
        least_peak=made.least_peak,
        least_proven=made.least_proven,
    )


def by_kind(plan: Plan, found: Evaluation) -> dict[str, int]:
    """What an evaluation pays for collectives, by kind; a transition of several steps by the share of each."""
    totals = dict.fromkeys(KINDS, 0)
    for (reshard, op), group in itertools.groupby(plan.collectives(), key=lambda c: (c.reshard, c.op)):
        moves = tuple(group)
        paid = found.reshard_ns[reshard] if reshard is not None else found.inside_ns[op] if op is not None else found.clip_ns
        _share(totals, [(c.kind, c.nanoseconds) for c in moves], moves[0].runs * paid)
    return totals


def _share(totals: dict[str, int], steps: Sequence[tuple[str, int]], nanoseconds: int) -> None:
    """Add nanoseconds to the kinds of the steps in proportion to the steps' own times, without losing one to rounding."""
    moving = [(kind, weight) for kind, weight in steps if kind in totals and weight]
    whole, left = sum(weight for _, weight in moving), nanoseconds
    for k, (kind, weight) in enumerate(moving):
        part = left if k == len(moving) - 1 else nanoseconds * weight // whole
        totals[kind] += part
        left -= part


def _bound_text(plan: Plan) -> str:
    """Which plans the bound of the first one is about."""
    if bound_of(plan) is None:
        return ""
    options, limit = plan.options, format_bytes(plan.options.usable_memory)
    kind = "tied plan (repeated layers alike)" if plan.certificate.problem == "tied" else "plan"
    kept = [
        *(["its pins"] if options.pins else []),
        *([f"the template {options.template}"] if options.template else []),
        *(["what its propagation decided"] if options.propagation else []),
    ]
    return f"{kind} within {limit}" + (f" that keeps {' and '.join(kept)}" if kept else "")


# A comparison as text: the table of a terminal, Markdown, and CSV.

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
        *_strongest(found),
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
    said = [f"- {line.strip()}" for line in _strongest(found)]
    said += [f"- {_cell(row.name)}: {_cell(note)}" for row in found.rows for note in row.notes]
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


def regret(row: ComparisonRow) -> str:
    """``+12.3%``, ``0``, or a dash where there is no bound."""
    if row.regret is None:
        return "-"
    if row.regret == 0:
        return "0"
    share = 100 * row.regret
    return f"{share:+.0f}%" if abs(share) >= 99.5 else f"{share:+.1f}%" if abs(share) >= 0.095 else f"{share:+.2g}%"


def _strongest(found: Comparison) -> list[str]:
    """Which template is the fastest that fits, where all were tried."""
    row = found.strongest
    if not found.templates:
        return []
    text = f"  {len(found.templates)} templates were tried, a row is the best of its kind; "
    if row is None:
        return [f"{text}none fits"]
    return [f"{text}the strongest that fits is {row.name}: {format_ns(row.step_ns)}, {format_bytes(row.peak)}"]


def _together(rows: Sequence[ComparisonRow]) -> list[tuple[str, ComparisonRow]]:
    """Passes that come to plans of the same figures as one row under all their names."""
    found: dict[object, list[ComparisonRow]] = {}
    for k, row in enumerate(rows):
        figures = (row.step_ns, row.compute_ns, tuple(row.by_kind_ns.values()), row.peak, row.least_peak, row.notes)
        found.setdefault(figures if row.kind == "propagation" else k, []).append(row)
    return [(", ".join(row.name for row in alike), alike[0]) for alike in found.values()]


def _fits(row: ComparisonRow) -> str:
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
