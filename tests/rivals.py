"""What others would do with a choice graph: the edge-variable model for MILP solvers and CP-SAT, and a cost function network.

    answer = solve_with("highs", graph, seconds=60, gap=0.0)
    answer.status, answer.value, answer.bound

The edge-variable model is the one of published auto-sharding work (Alpa, the IOPDDL contest's baselines): a variable x per strategy of a
node, one of which is 1; a variable y per allowed pair of an edge, whose rows and columns sum to the x of its two nodes; a row of memory
per point of time whose live nodes are not a subset of another's. y needs no integrality where x has it. Nothing is presolved here:
each solver has its own. Parallel edges are summed. None of this shares code with ``solver_shard.solve``.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph

Ints = NDArray[np.int64]
Report = Callable[[float, float | None, float | None], None]
"""Called with seconds since the solver started, its best value and its bound, whenever it says so."""

RIVALS = ("highs", "scip", "cp-sat", "toulbar2")
LARGEST = 1e6
"""Costs and memory rows are scaled so that no coefficient of a MILP is larger."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rival found.

    Attributes:
        status: "optimal" (within the gap asked for), "infeasible", "feasible" or "unknown".
        assignment: the best one, or None.
        value: its exact cost, or None; only if it keeps the limit and chooses nothing forbidden.
        bound: what the solver says no assignment costs less than, or None.
        seconds: from the call of the solver, without building the model.
        build_seconds: of building it.
        size: variables or tuples of the model.
        unit: cost of one unit of the objective in the solver's own log.
    """

    status: str
    assignment: tuple[int, ...] | None
    value: int | None
    bound: float | None
    seconds: float
    build_seconds: float
    size: int
    unit: float = 1.0


def solve_with(
    name: str, graph: ChoiceGraph, *, seconds: float, gap: float = 0.0, workers: int = 1, seed: int = 0, report: Report | None = None
) -> Answer:
    """Solve a graph by one of ``RIVALS``.

    ``report`` hears of incumbents where the solver tells; HiGHS and toulbar2 only write a log to stdout (see ``incumbents``).
    """
    run = {"highs": _mathopt, "scip": _mathopt, "cp-sat": _cp_sat, "toulbar2": _toulbar2}[name]
    return run(graph, name, seconds, gap, workers, seed, report or (lambda *_: None))


def merged_edges(graph: ChoiceGraph) -> list[tuple[int, int, Ints]]:
    """Edges (u, v, table) with u < v, parallel ones summed; what any of them forbids is FORBIDDEN."""
    found: dict[tuple[int, int], Ints] = {}
    for (u, v), t in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        table = graph.tables[t] if u < v else graph.tables[t].T
        key = (min(u, v), max(u, v))
        if key in found:
            forbidden = (found[key] >= FORBIDDEN) | (table >= FORBIDDEN)
            table = np.where(forbidden, FORBIDDEN, np.where(forbidden, 0, found[key]) + np.where(forbidden, 0, table))
        found[key] = table
    return [(u, v, table) for (u, v), table in found.items()]


def memory_rows(graph: ChoiceGraph) -> list[Counter[int]]:
    """The live nodes (how often each) at the points of time that no later start follows before a stop; without doubles or subsets."""
    if graph.limit is None:
        return []
    events: dict[int, tuple[list[int], list[int]]] = {}
    for v in range(graph.size):
        for start, stop in graph.node_intervals(v).tolist():
            if start < stop:
                events.setdefault(start, ([], []))[0].append(v)
                events.setdefault(stop, ([], []))[1].append(v)
    rows: dict[tuple[tuple[int, int], ...], Counter[int]] = {}
    live: Counter[int] = Counter()
    grown = False
    for point in sorted(events):
        starts, stops = events[point]
        if stops and grown:
            rows.setdefault(tuple(sorted(live.items())), Counter(live))
            grown = False
        for v in stops:
            live[v] -= 1
            if not live[v]:
                del live[v]
        live.update(starts)
        grown = grown or bool(starts)
    return list(rows.values())


def exact_value(graph: ChoiceGraph, assignment: Sequence[int]) -> int | None:
    """The cost, None where the limit is broken or something forbidden chosen."""
    if not graph.allowed(assignment) or (graph.limit is not None and graph.peak(assignment) > graph.limit):
        return None
    return graph.cost(assignment)


@dataclass(frozen=True, kw_only=True)
class EdgeModel:
    """The model as arrays: columns (x first, then y) with costs, rows that sum to 0 or 1, memory rows of usages."""

    costs: Ints
    fixed: Ints
    integers: int
    rows: Ints
    columns: Ints
    signs: Ints
    right: Ints
    memory: tuple[tuple[Ints, Ints], ...]

    @property
    def size(self) -> int:
        return len(self.costs)


def edge_model(graph: ChoiceGraph) -> EdgeModel:
    """The standard edge-variable model of a graph."""
    count = int(graph.offsets[-1])
    forbidden = graph.costs >= FORBIDDEN
    costs = [np.where(forbidden, 0, graph.costs)]
    owner = np.repeat(np.arange(graph.size), graph.sizes())
    rows, columns, signs = [owner], [np.arange(count)], [np.ones(count, dtype=np.int64)]
    next_row, next_column = graph.size, count
    for u, v, table in merged_edges(graph):
        i, j = np.nonzero(table < FORBIDDEN)
        pair = next_column + np.arange(len(i))
        costs.append(table[i, j])
        for node, index, size, first in ((u, i, table.shape[0], next_row), (v, j, table.shape[1], next_row + table.shape[0])):
            rows += [first + index, first + np.arange(size)]
            columns += [pair, graph.offsets[node] + np.arange(size)]
            signs += [np.ones(len(pair), dtype=np.int64), -np.ones(size, dtype=np.int64)]
        next_row, next_column = next_row + sum(table.shape), next_column + len(i)
    memory = []
    for live in memory_rows(graph):
        where = np.concatenate([np.arange(graph.offsets[v], graph.offsets[v + 1]) for v in live])
        usage = np.concatenate([graph.node_usages(v) * times for v, times in live.items()])
        used = usage > 0
        if int(sum(int(graph.node_usages(v).max()) * times for v, times in live.items())) > (graph.limit or 0):
            memory.append((where[used], usage[used]))
    return EdgeModel(
        costs=np.concatenate(costs),
        fixed=np.flatnonzero(forbidden),
        integers=count,
        rows=np.concatenate(rows),
        columns=np.concatenate(columns),
        signs=np.concatenate(signs),
        right=np.concatenate([np.ones(graph.size, dtype=np.int64), np.zeros(next_row - graph.size, dtype=np.int64)]),
        memory=tuple(memory),
    )


def _mathopt(graph: ChoiceGraph, name: str, seconds: float, gap: float, workers: int, seed: int, report: Report) -> Answer:
    """HiGHS or SCIP as they come: neither lets OR-Tools set its threads."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

    started = time.monotonic()
    model = edge_model(graph)
    unit = max(1.0, float(model.costs.max(initial=0)) / LARGEST)
    upper = np.ones(model.size)
    upper[model.fixed] = 0.0
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(model.size))
    proto.variables.lower_bounds.extend([0.0] * model.size)
    proto.variables.upper_bounds.extend(upper.tolist())
    proto.variables.integers.extend([True] * model.integers + [False] * (model.size - model.integers))
    priced = np.flatnonzero(model.costs)
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend((model.costs[priced] / unit).tolist())
    lower, right = model.right.astype(np.float64).tolist(), model.right.astype(np.float64).tolist()
    rows, columns, values = [model.rows], [model.columns], [model.signs.astype(np.float64)]
    for where, usage in model.memory:
        scale = max(1.0, float(usage.max()) / LARGEST)
        rows.append(np.full(len(where), len(right), dtype=np.int64))
        columns.append(where)
        values.append(usage / scale)
        lower.append(-math.inf)
        right.append((graph.limit or 0) / scale)
    proto.linear_constraints.ids.extend(range(len(right)))
    proto.linear_constraints.lower_bounds.extend(lower)
    proto.linear_constraints.upper_bounds.extend(right)
    i, j, c = np.concatenate(rows), np.concatenate(columns), np.concatenate(values)
    order = np.lexsort((j, i))
    proto.linear_constraint_matrix.row_ids.extend(i[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(j[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(c[order].tolist())
    built = time.monotonic()

    def log(lines: Sequence[str]) -> None:
        for line in lines:
            value, bound = scip_line(line)
            if value is not None or bound is not None:
                report(time.monotonic() - built, None if value is None else value * unit, None if bound is None else bound * unit)

    scip = name == "scip"
    result = mathopt.solve(
        mathopt.Model.from_model_proto(proto),
        mathopt.SolverType.GSCIP if scip else mathopt.SolverType.HIGHS,
        params=mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=seconds),
            relative_gap_tolerance=gap,
            absolute_gap_tolerance=0.0 if gap else 0.5 / unit,
            random_seed=seed,
            enable_output=not scip,
        ),
        msg_cb=log if scip else None,
    )
    ended = time.monotonic()
    reason, assignment = result.termination.reason, None
    if result.has_primal_feasible_solution():
        found = result.variable_values()
        shares = np.fromiter(found.values(), dtype=np.float64, count=len(found))[: model.integers]
        assignment = tuple(int(part.argmax()) for part in np.split(shares, graph.offsets[1:-1].tolist()))
    infeasible = reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED)
    bound = result.termination.objective_bounds.dual_bound * unit
    return _answer(
        graph,
        assignment,
        None if infeasible or not math.isfinite(bound) else bound,
        proven=reason == mathopt.TerminationReason.OPTIMAL,
        infeasible=infeasible,
        times=(started, built, ended),
        size=model.size,
        unit=unit,
    )


def scip_line(line: str) -> tuple[float | None, float | None]:
    """Primal and dual bound in a line of SCIP's table.

    >>> scip_line("r 0.9s|258|123|3467|12.5|randroun|11|46|96|42|244|9|137|185|7.25e+02|7.14e+02|1.65%|")
    (714.0, 725.0)
    """
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) < 17 or not cells[0].rstrip("s").split()[-1:]:
        return None, None
    return _float(cells[15]), _float(cells[14])


def incumbents(name: str, log: Sequence[str], unit: float) -> list[tuple[float, float | None, float | None]]:
    """Seconds, value and bound from what HiGHS or toulbar2 wrote.

    HiGHS' columns are nodes | bounds and gap | cuts and conflicts | iterations and time.

    >>> incumbents("highs", [" L  0  0  0   0.00%   417   445   6.29%   0  0  0   0   0.1s"], 2.0)
    [(0.1, 890.0, 834.0)]
    >>> incumbents("toulbar2", ["New solution: 445 (0 backtracks, 0 nodes, depth 2, 0.001 seconds)"], 1.0)
    [(0.001, 445.0, None)]
    """
    found: list[tuple[float, float | None, float | None]] = []
    for line in log:
        if name == "toulbar2":
            match = re.match(r"New solution: (\d+) \(.*?([\d.]+) seconds", line)
            if match:
                found.append((float(match[2]), float(match[1]), None))
            continue
        cells = line.split()
        at = next((i for i, cell in enumerate(cells) if cell.endswith("%")), None)
        if at is None or len(cells) < at + 4 or not re.fullmatch(r"[\d.]+s", cells[-1]) or not cells[at - 1].isdigit():
            continue
        bound, value = _float(cells[at + 1]), _float(cells[at + 2])
        found.append((float(cells[-1][:-1]), None if value is None else value * unit, None if bound is None else bound * unit))
    return found


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < 1e19 else None


def _cp_sat(graph: ChoiceGraph, name: str, seconds: float, gap: float, workers: int, seed: int, report: Report) -> Answer:
    from ortools.sat.python import cp_model

    started = time.monotonic()
    arrays = edge_model(graph)
    model = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in range(arrays.size)]
    for i in arrays.fixed.tolist():
        model.add(variables[i] == 0)
    order = np.argsort(arrays.rows, kind="stable")
    stops = np.searchsorted(arrays.rows[order], np.arange(len(arrays.right) + 1)).tolist()
    columns, signs = arrays.columns[order].tolist(), arrays.signs[order].tolist()
    for row, right in enumerate(arrays.right.tolist()):
        low, high = stops[row], stops[row + 1]
        terms = [variables[c] for c in columns[low:high]]
        if right == 1:
            model.add_exactly_one(terms)
        else:
            model.add(cp_model.LinearExpr.weighted_sum(terms, signs[low:high]) == 0)
    for where, usage in arrays.memory:
        model.add(cp_model.LinearExpr.weighted_sum([variables[c] for c in where.tolist()], usage.tolist()) <= (graph.limit or 0))
    priced = np.flatnonzero(arrays.costs)
    model.minimize(cp_model.LinearExpr.weighted_sum([variables[c] for c in priced.tolist()], arrays.costs[priced].tolist()))
    built = time.monotonic()

    class Heard(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            report(time.monotonic() - built, self.objective_value, self.best_objective_bound)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.relative_gap_limit = gap
    status = solver.solve(model, Heard())
    ended = time.monotonic()
    assignment = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = np.array([solver.boolean_value(x) for x in variables[: arrays.integers]])
        assignment = tuple(int(part.argmax()) for part in np.split(chosen, graph.offsets[1:-1].tolist()))
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refuses the model: {model.validate()[:300]}")
    return _answer(
        graph,
        assignment,
        None if status == cp_model.INFEASIBLE else solver.best_objective_bound,
        proven=status == cp_model.OPTIMAL,
        infeasible=status == cp_model.INFEASIBLE,
        times=(started, built, ended),
        size=arrays.size,
    )


def _toulbar2(graph: ChoiceGraph, name: str, seconds: float, gap: float, workers: int, seed: int, report: Report) -> Answer:
    """A cost function network with a generalised linear (knapsack) constraint per memory row; one thread, proof of the last unit."""
    import pytoulbar2

    started = time.monotonic()
    edges = merged_edges(graph)
    costs = np.where(graph.costs >= FORBIDDEN, 0, graph.costs)
    top = 1 + sum(int(costs[graph.offsets[v] : graph.offsets[v + 1]].max()) for v in range(graph.size))
    top += sum(int(np.where(table >= FORBIDDEN, 0, table).max()) for _, _, table in edges)
    if top >= 2**53:
        raise ValueError(f"costs may sum to {top}; this interface passes them as floats, so at most 2**53 is exact")
    network = pytoulbar2.CFN(top, seed=seed, verbose=0)
    for v in range(graph.size):
        network.AddVariable(f"n{v}", range(len(graph.node_costs(v))))
    for v in range(graph.size):
        network.AddFunction([v], np.minimum(graph.node_costs(v), top).tolist())
    for u, v, table in edges:
        network.AddFunction([u, v], np.minimum(table, top).ravel().tolist())
    size = int(graph.offsets[-1]) + sum(table.size for _, _, table in edges)
    for live in memory_rows(graph):
        parts = {v: graph.node_usages(v) * times for v, times in live.items() if graph.node_usages(v).any()}
        if sum(int(usage.max()) for usage in parts.values()) <= (graph.limit or 0):
            continue
        # AddGeneralizedLinearConstraint looks for the tuples of each node among all: this is what it says in the end
        said = [str(-(graph.limit or 0))]
        for usage in parts.values():
            used = np.flatnonzero(usage).tolist()
            said += [str(len(used)), *(f"{i} {-int(usage[i])}" for i in used)]
        network.CFN.wcsp.postKnapsackConstraint(list(parts), " ".join(said), kp=True)
    built = time.monotonic()
    found = network.Solve(timeLimit=max(1, round(seconds)))
    ended = time.monotonic()
    finished = ended - built < seconds * 0.98  # its limit is CPU time, which wall time is never below
    assignment = None if found is None else tuple(int(x) for x in found[0][: graph.size])
    bound = None if found is None and finished else float(network.GetDDualBound())
    return _answer(
        graph,
        assignment,
        bound,
        proven=found is not None and bound is not None and bound >= found[1],
        infeasible=assignment is None and finished,
        times=(started, built, ended),
        size=size,
    )


def _answer(
    graph: ChoiceGraph,
    assignment: tuple[int, ...] | None,
    bound: float | None,
    *,
    proven: bool,
    infeasible: bool,
    times: tuple[float, float, float],
    size: int,
    unit: float = 1.0,
) -> Answer:
    value = None if assignment is None else exact_value(graph, assignment)
    status = "infeasible" if infeasible else "unknown" if value is None else "optimal" if proven else "feasible"
    started, built, ended = times
    return Answer(
        status=status,
        assignment=assignment,
        value=value,
        bound=bound,
        seconds=ended - built,
        build_seconds=built - started,
        size=size,
        unit=unit,
    )
