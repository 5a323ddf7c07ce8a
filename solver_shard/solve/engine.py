"""The solver: a ChoiceGraph in, a Solution with its certificate out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from ortools.sat.python import cp_model

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph
from solver_shard.errors import InputError
from solver_shard.solve.solution import MIB, Event, Solution, Stage, Status, WarmStart, objective_value, relative_gap

Progress = Callable[[Event], None]


def solve(
    graph: ChoiceGraph,
    *,
    objective: str = "time",
    memory_weight: int = 0,
    gap: float = 1e-4,
    time_limit: float | None = 60.0,
    work_limit: float | None = None,
    seed: int = 0,
    warm_starts: Sequence[WarmStart] = (),
    workers: int = 2,
    progress: Progress | None = None,
) -> Solution:
    """Minimise step time or peak memory under the graph's limit."""
    if objective not in ("time", "memory"):
        raise InputError(f"objective {objective!r} is unknown; legal: 'time', 'memory'")
    started = time.monotonic()
    model = cp_model.CpModel()
    xs = [[model.new_bool_var("") for _ in range(k)] for k in graph.sizes().tolist()]
    terms, weights = [], []
    for v, row in enumerate(xs):
        model.add_exactly_one(row)
        for x, cost in zip(row, graph.node_costs(v).tolist(), strict=True):
            if cost >= FORBIDDEN:
                model.add(x == 0)
            elif cost:
                terms.append(x)
                weights.append(cost)
    for (u, v), t in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        table = graph.tables[t]
        for i, x in enumerate(xs[u]):
            costs = table[i]
            model.add_bool_or([xs[v][j] for j in np.flatnonzero(costs < FORBIDDEN).tolist()] + [x.negated()])
            for value in np.unique(costs[(costs < FORBIDDEN) & (costs > 0)]).tolist():
                y = model.new_bool_var("")
                terms.append(y)
                weights.append(int(value))
                model.add_bool_or([xs[v][j] for j in np.flatnonzero(costs != value).tolist()] + [x.negated(), y])
    limit = graph.limit
    peak_var = model.new_int_var(0, int(min(limit if limit is not None else 2**60, 2**60)), "peak")
    end = int(graph.intervals[:, 1].max(initial=0))
    for t in range(end):
        vs, cs = [], []
        for v in range(graph.size):
            spans = graph.node_intervals(v)
            count = int(((spans[:, 0] <= t) & (t < spans[:, 1])).sum())
            for x, usage in zip(xs[v], graph.node_usages(v).tolist(), strict=True):
                if count and usage:
                    vs.append(x)
                    cs.append(count * usage)
        if vs:
            model.add(cp_model.LinearExpr.weighted_sum(vs, cs) <= peak_var)
    if objective == "memory":
        model.minimize(peak_var)
    elif memory_weight:
        scaled = model.new_int_var(0, 2**60, "")
        model.add(MIB * scaled >= memory_weight * peak_var - (MIB - 1))
        model.minimize(cp_model.LinearExpr.weighted_sum(terms, weights) + scaled)
    else:
        model.minimize(cp_model.LinearExpr.weighted_sum(terms, weights))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.relative_gap_limit = gap
    if time_limit is not None:
        solver.parameters.max_time_in_seconds = time_limit
    status = solver.solve(model)
    seconds = time.monotonic() - started
    stages = (Stage(name="cp-sat", seconds=seconds),)
    if status == cp_model.INFEASIBLE:
        return Solution(status=Status.INFEASIBLE, stages=stages, seed=seed)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(status=Status.UNKNOWN, stages=stages, seed=seed)
    assignment = tuple(next(i for i, x in enumerate(row) if solver.boolean_value(x)) for row in xs)
    cost, peak = graph.cost(assignment), graph.peak(assignment)
    value = objective_value(objective, memory_weight, cost, peak)
    bound = min(value, int(np.ceil(solver.best_objective_bound - 1e-6)))
    found = relative_gap(value, bound)
    final = Status.OPTIMAL if value == bound else Status.GAP if found <= gap else Status.FEASIBLE
    event = Event(seconds=seconds, work=0.0, objective=value, bound=bound, source="cp-sat")
    if progress is not None:
        progress(event)
    return Solution(
        status=final,
        assignment=assignment,
        cost=cost,
        peak=peak,
        objective=value,
        bound=bound,
        gap=found,
        history=(event,),
        stages=stages,
        seed=seed,
    )
