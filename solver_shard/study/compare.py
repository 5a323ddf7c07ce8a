"""One table over plans for the same model and mesh, all priced by the same evaluator.

>>> found = compare(plan, recipes=("dp=zero3,tp=megatron", "user-priority"))
>>> print(found)                                # the table
>>> found.rows[1].regret                        # by how much that step is slower than any plan can be: (time - bound) / bound
0.118

A row is a plan that was given as a file, or what a *recipe* makes of the same step: an expert's template, a greedy pass, a plan for
another tool, a file of pins (:mod:`solver_shard.study.recipes`, :mod:`solver_shard.study.given`). The model is traced once, and the
figures of every row, a file's too, are those of :func:`solver_shard.plan.evaluate.evaluate`, which sees no solver: a plan's own
figures are only held against them.

The bound of the regret is the first plan's: no plan of its problem (:attr:`Comparison.bound_text` says which that is) that keeps the
memory limit takes less time. A row that does not fit, or that is of another problem, can be below it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from solver_shard.arguments import check_search
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError, SolverShardError
from solver_shard.plan.codec import encode
from solver_shard.plan.evaluate import Evaluation, evaluate
from solver_shard.plan.legal import evaluated
from solver_shard.plan.plan import CATEGORIES, Plan
from solver_shard.program import Program
from solver_shard.study.figures import Figures
from solver_shard.study.recipes import Made, Maker, default_recipes
from solver_shard.study.retrace import Retraced, retrace
from solver_shard.units import format_bytes, format_ns

if TYPE_CHECKING:
    import torch

    from solver_shard.study.given import Given

SCHEMA_VERSION = 1
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

MATTERS = (
    *("batch", "seq", "dtype", "microbatches", "optimizer", "master_weights", "state_bytes", "reduce_dtype", "clip"),
    *("forward_only", "checkpoint", "overlap", "fusion"),
)
"""Options in which plans of one table must agree: they say what a step is, and what it costs."""

TIME_LIMIT = 20.0
"""Seconds of solving for one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Figures):
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
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def row(self, name: str) -> Row:
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
        }

    def text(self, *, wide: bool = False) -> str:
        """The table for a terminal; ``wide``: with what fills the memory at the peak."""
        from solver_shard.study.compare_text import text

        return text(self, wide=wide)

    def markdown(self) -> str:
        """The wide table in Markdown."""
        from solver_shard.study.compare_text import markdown

        return markdown(self)

    def csv(self) -> str:
        """One line per row, nanoseconds and bytes."""
        from solver_shard.study.compare_text import csv_text

        return csv_text(self)

    def __str__(self) -> str:
        return self.text()


def compare(
    plan: Plan,
    others: Mapping[str, Plan] | None = None,
    *,
    recipes: Sequence[str] | None = None,
    given: Sequence[Given] = (),
    pins: Mapping[str, Sequence[str]] | None = None,
    name: str = "ours",
    model: str | torch.nn.Module | Program | None = None,
    inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    retraced: Retraced | None = None,
    time_limit: float = TIME_LIMIT,
    workers: int = 2,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Price plans for the step of the first one.

    Args:
        plan: says model, mesh, cluster, memory limit and options; its row is called ``name``.
        others: row name to another plan for the same step.
        recipes: names of greedy passes, and templates as in ``optimize(template=...)``; None for those of
            :func:`solver_shard.study.recipes.default_recipes`.
        given: plans for other tools, see :func:`solver_shard.study.given.read_tp_plan` and ``read_parallelize``.
        pins: row name to pins; everything else is the solver's choice.
        model, inputs, loss_fn: as of :func:`solver_shard.study.retrace.retrace`; ``retraced``: its result, where there is one.
        time_limit: seconds of solving for each row that is made.

    Raises:
        InputError: plans are not of one step (the first difference is named), or the model cannot be told from the plan.
        TraceError: the model cannot be traced.
    """
    for title, other in (others or {}).items():
        check_same(plan, other, title)
    check_search(plan.options, time_limit=time_limit, workers=workers)
    if retraced is None:
        if progress is not None:
            progress("tracing the model")
        retraced = retrace(plan, model, inputs, loss_fn=loss_fn)
    maker = Maker(plan, retraced, time_limit=time_limit, workers=workers, progress=progress)
    rows = [row_of(plan, maker.as_given(name, other)) for name, other in ((name, plan), *(others or {}).items())]
    left_out: list[tuple[str, str]] = []
    asked = default_recipes(retraced.program, plan.mesh.whole) if recipes is None else recipes
    jobs: list[tuple[str, Callable[[], Made]]] = [(text, partial(maker.recipe, text)) for text in asked]
    jobs += [(item.name, partial(maker.given, item)) for item in given]
    jobs += [(title, partial(maker.pinned, title, tuple(texts))) for title, texts in (pins or {}).items()]
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


def row_of(first: Plan, made: Made) -> Row:
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
    return Row(
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
