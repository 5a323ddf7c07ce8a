"""What is left after reductions as an integer program: HiGHS, and CP-SAT where it is tiny or where the last digits matter.

Both see memory rows only at the times that matter: rows are added when a solution breaks them, and the program is solved again.

- *CP-SAT* gets the reparametrised costs, which are non-negative and mostly zero, in exact integers: a boolean per strategy, one
  per costly pair, a clause where a pair alone exceeds the incumbent.
- *HiGHS* gets the local polytope: a variable per strategy and per allowed pair of an edge's core, marginals consistent. Its linear
  relaxation with memory rows is as strong as the dual, and its cuts on the memory rows close most of the rest. Its bound is in
  floating point, so it is lowered by ``HIGHS_MARGIN``.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.errors import InternalError
from solver_shard.solve.clock import Clock
from solver_shard.solve.dual import Dual
from solver_shard.solve.problem import Edge, Floats, Problem
from solver_shard.solve.solution import MIB
from solver_shard.solve.waiting import call_watched

HIGHS_MARGIN = 1e-8
"""Relative. HiGHS allows 1e-7 of dual infeasibility per column; costs are scaled to about 1e6 in total, so that 1e4 columns
of range 1 can make its bound too high by 1e-9 of it."""

TINY_VALUES = 80
TINY_CELLS = 800
"""Sizes up to which CP-SAT is tried first."""

SMALL_VALUES = 400
SMALL_CELLS = 4000
"""Sizes up to which CP-SAT is asked whether an optimum of HiGHS is exact, when no gap is allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelResult:
    """What an integer program gave.

    Attributes:
        assignment: the best one within the limit, or None.
        bound: proven lower bound on the objective within the program, None where nothing is proven.
        empty: proven that the program has no solution within the limit (and below the cutoff).
        proven: solved to the end.
    """

    assignment: Ints | None
    bound: int | None
    empty: bool = False
    proven: bool = False


def cells_of(problem: Problem) -> int:
    """Allowed pairs over all edges."""
    return sum(int((edge.core < FORBIDDEN).sum()) for edge in problem.edges)


def solve_kernel(problem: Problem, dual: Dual, clock: Clock, *, cutoff: int | None, gap: float, seed: int, effort: float) -> KernelResult:
    """Solve a reduced problem.

    Args:
        problem: presolved.
        dual: its dual, with good multipliers.
        clock: limits; work is added to it.
        cutoff: only solutions with an objective below this are of interest.
        gap: relative gap at which to stop.
        seed: random seed.
        effort: work units to spend at most, about.
    """
    if problem.size == 0:
        value = problem.value(np.zeros(0, dtype=np.int64))
        if value is None or (cutoff is not None and value >= cutoff):
            return KernelResult(None, None, empty=True, proven=True)
        return KernelResult(np.zeros(0, dtype=np.int64), value, proven=True)
    if problem.limit is not None and problem.least() > problem.limit:
        return KernelResult(None, None, empty=True, proven=True)
    values, cells = int(problem.offsets[-1]), cells_of(problem)
    if values <= TINY_VALUES and cells <= TINY_CELLS:
        result = _lazily(problem, _CpSat(problem, dual, cutoff, seed), dual, clock, cutoff, min(effort, 1.0), 0.0)
        if result.proven:
            return result
    result = _lazily(problem, _Highs(problem, dual, gap, seed), dual, clock, cutoff, effort, gap)
    value = cutoff if result.assignment is None else problem.value(result.assignment)
    if result.empty or not result.proven or value is None or result.bound is None or result.bound >= value * (1 - gap):
        return result
    if values <= SMALL_VALUES and cells <= SMALL_CELLS:  # only the margin of HiGHS is open: is there really nothing better?
        last = _lazily(problem, _CpSat(problem, dual, value, seed), dual, clock, value, min(effort, 2.0), 0.0)
        if last.proven:
            return last if last.assignment is not None else KernelResult(result.assignment, value, proven=True)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    assignment: Ints | None
    bound: int | None
    empty: bool
    optimal: bool
    work: float


LEFT = _Answer(None, None, False, False, 0.0)
"""Of a solver that was left behind."""


def _lazily(
    problem: Problem, backend: _CpSat | _Highs, dual: Dual, clock: Clock, cutoff: int | None, effort: float, gap: float
) -> KernelResult:
    """Solve with the rows of the priced times; add rows that solutions break until none is broken, or the bound is near the best value.

    That value may be the cutoff, of a solution elsewhere: the backend does not know how near it is.
    """
    rows = set(np.flatnonzero(dual.multipliers > 0).tolist())
    for column in dual.columns[-20:]:
        rows |= set(_broken(problem, column.usage, 1))
    for t in sorted(rows):
        backend.add_row(t)
    best: Ints | None = None
    best_value: int | None = cutoff
    bound: int | None = None
    spent = 0.0
    while not clock.over() and spent < effort:
        answer = backend.solve(clock, min(effort - spent, clock.work_left()), best)
        clock.spend(answer.work)
        spent += answer.work
        if answer.empty:
            return KernelResult(best, None, empty=best is None, proven=True)
        if answer.bound is not None:
            bound = answer.bound if bound is None else max(bound, answer.bound)
        if answer.assignment is not None:
            value = problem.value(answer.assignment)
            if value is not None and (best_value is None or value < best_value):
                best, best_value = answer.assignment, value
        if bound is not None and best_value is not None and best_value - bound <= gap * abs(best_value):
            return KernelResult(best, bound, proven=True)
        if answer.assignment is None:
            break
        broken = [t for t in _broken(problem, problem.profile(answer.assignment), 10) if t not in rows]
        if not broken:
            return KernelResult(best, bound, proven=answer.optimal)
        for t in broken:
            rows.add(t)
            backend.add_row(t)
    return KernelResult(best, bound)


def _broken(problem: Problem, profile: Ints, most: int) -> list[int]:
    """Times of the largest excess over the limit; where the peak is part of the objective, of the largest use."""
    limit = problem.limit
    if problem.weight:
        order = np.argsort(-profile, kind="stable")[:most]
        return [int(t) for t in order]
    if limit is None or not len(profile):
        return []
    order = np.argsort(-profile, kind="stable")[:most]
    return [int(t) for t in order if profile[t] > limit]


def row_of(problem: Problem, t: int) -> tuple[Ints, Ints, int]:
    """Memory row of a time: (flat strategies, bytes above the node's least, bytes in use at least)."""
    total = np.zeros(int(problem.offsets[-1]), dtype=np.int64)
    counts = problem.rows(np.array([t]))[0][problem.columns] if problem.carriers else problem.columns
    for carrier, count in zip(problem.carriers, counts.tolist(), strict=True):
        if count:
            total[problem.offsets[carrier.node] : problem.offsets[carrier.node + 1]] += count * carrier.usage
    least = np.minimum.reduceat(total, problem.offsets[:-1])
    total -= np.repeat(least, problem.sizes)
    where = np.flatnonzero(total)
    return where, total[where], int(problem.base[t]) + int(least.sum())


class _CpSat:
    """The reparametrised problem in exact integers."""

    def __init__(self, problem: Problem, dual: Dual, cutoff: int | None, seed: int) -> None:
        self.problem, self.dual, self.seed = problem, dual, seed
        parts = dual.parts()
        scale = dual.scale
        penalties = [priced - plain for priced, plain in zip(dual.price(dual.multipliers), dual.messages.theta, strict=True)]
        if problem.weight:  # the peak is a variable: nothing to gain from penalties
            dual.multipliers = np.zeros_like(dual.multipliers)
            parts, penalties = dual.parts(), [np.zeros_like(row) for row in parts.unary]
        offset = parts.constant
        model = self.model = cp_model.CpModel()
        self.xs = [[model.new_bool_var("") for _ in range(int(k))] for k in problem.sizes]
        self.flat = [x for row in self.xs for x in row]
        terms: list[cp_model.IntVar] = []
        weights: list[float] = []
        for row, unary in zip(self.xs, parts.unary, strict=True):
            model.add_exactly_one(row)
            terms += row
            weights += unary.tolist()
        room = np.inf if cutoff is None or problem.weight else cutoff * scale - dual.offset(dual.multipliers) - offset
        for edge, table in zip(problem.edges, parts.tables, strict=True):
            rows = self._classes(edge.rows, table.shape[0], self.xs[edge.a])
            cols = self._classes(edge.cols, table.shape[1], self.xs[edge.b])
            for i, j in zip(*np.nonzero(table), strict=True):
                if table[i, j] >= room or not np.isfinite(table[i, j]):
                    model.add_bool_or([rows[i].negated(), cols[j].negated()])
                else:
                    y = model.new_bool_var("")
                    model.add_bool_or([rows[i].negated(), cols[j].negated(), y])
                    terms.append(y)
                    weights.append(float(table[i, j]))
        unit = 1.0
        while sum(weights) / unit > 2.0**58:
            unit *= 2
        self.constant = offset
        self.unit, self.scale = unit, scale
        objective = cp_model.LinearExpr.weighted_sum(terms, [int(w // unit) for w in weights])
        self.peak = None
        if problem.weight:
            self.peak = model.new_int_var(dual.low, dual.high, "")
            steps = MIB * max(1, int(unit / scale)) if unit >= scale else MIB
            paid = model.new_int_var(0, problem.weight * dual.high // steps + 1, "")
            shift = max(0, (problem.weight * dual.high).bit_length() - 60)  # products must stay within 64 bits: a little less is asked
            steps, weight = -(-steps >> shift), problem.weight >> shift
            model.add(steps * paid >= weight * self.peak - (steps - 1))
            objective += max(1, int(scale / unit)) * paid
        elif dual.multipliers.any():
            # All penalties together are at most what the limit allows: the rest is a slack that costs nothing less than zero.
            most = int(-dual.offset(dual.multipliers) // 1) + 1
            whole = [int(p // unit) + (p % unit > 0) for row in penalties for p in row.tolist()]
            top = int(most // unit) + 1 + problem.size
            slack = model.new_int_var(0, top, "")
            model.add(cp_model.LinearExpr.weighted_sum(self.flat, whole) + slack == top)
            objective += slack
            self.constant -= top * unit
        model.minimize(objective)

    def _classes(self, which: Ints, count: int, xs: list[cp_model.IntVar]) -> list[cp_model.IntVar]:
        """A literal per row of a core: some strategy of that row is chosen."""
        members: list[list[cp_model.IntVar]] = [[] for _ in range(count)]
        for x, row in zip(xs, which.tolist(), strict=True):
            members[row].append(x)
        literals = []
        for group in members:
            if len(group) == 1:
                literals.append(group[0])
                continue
            literal = self.model.new_bool_var("")
            self.model.add(cp_model.LinearExpr.sum(group) == literal)
            literals.append(literal)
        return literals

    def add_row(self, t: int) -> None:
        where, usage, least = row_of(self.problem, t)
        use = cp_model.LinearExpr.weighted_sum([self.flat[i] for i in where.tolist()], usage.tolist())
        if self.peak is not None:
            self.model.add(use + least <= self.peak)
        elif self.problem.limit is not None:
            self.model.add(use <= self.problem.limit - least)

    def solve(self, clock: Clock, work: float, hint: Ints | None) -> _Answer:
        seconds = min(clock.time_left(), 1e6)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.seed
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.catch_sigint_signal = False  # who handles signals decides what they mean
        if np.isfinite(work):
            solver.parameters.max_deterministic_time = work
        if hint is not None:
            self.model.clear_hints()  # type: ignore[no-untyped-call] # untyped in OR-Tools
            for row, x in zip(self.xs, hint.tolist(), strict=True):
                self.model.add_hint(row[x], 1)
        status = call_watched(lambda: solver.solve(self.model), clock, seconds=seconds, stop=solver.stop_search)
        if status is None:
            return LEFT
        done = solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return _Answer(None, None, True, True, done)
        if status == cp_model.MODEL_INVALID:
            raise InternalError(f"the solver built a program that CP-SAT rejects: {self.model.validate()}; please report this")
        bound = self._bound(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Answer(None, bound, False, False, done)
        chosen = [next(i for i, x in enumerate(row) if solver.boolean_value(x)) for row in self.xs]
        return _Answer(np.array(chosen, dtype=np.int64), bound, False, status == cp_model.OPTIMAL, done)

    def _bound(self, value: float) -> int | None:
        if not np.isfinite(value):
            return None
        total = (value * self.unit + self.constant) / self.scale
        return int(np.ceil(total - 1e-9))  # the objective of the program is a whole number of nanoseconds or bytes


class _Highs:
    """The local polytope with raw costs, built as flat arrays."""

    def __init__(self, problem: Problem, dual: Dual, gap: float, seed: int) -> None:
        self.problem, self.gap, self.seed = problem, gap, seed
        count = int(problem.offsets[-1])
        costs: list[Floats] = [np.concatenate(problem.unary).astype(np.float64)]
        triples: list[tuple[Ints, Ints, Floats]] = []
        owner = np.repeat(np.arange(problem.size), problem.sizes)
        triples.append((owner, np.arange(count), np.ones(count)))
        rights = [np.ones(problem.size)]
        rows, columns = problem.size, count
        for edge in problem.edges:
            for start, classes, v in ((rows, edge.rows, edge.a), (rows + edge.core.shape[0], edge.cols, edge.b)):
                triples.append((start + classes, problem.offsets[v] + np.arange(len(classes)), -np.ones(len(classes))))
            rows, columns = self._edge(edge, rows, columns, triples, costs)
            rights.append(np.zeros(sum(edge.core.shape)))
        self.peak = None
        self.unit = 2.0 ** max(0, int(np.ceil(np.log2(max(abs(dual.best) / dual.scale, 1.0) / 1e6))))
        self.row_unit = 1e4 / max(dual.high, 1)
        model = model_pb2.ModelProto()
        variables = model.variables
        total = columns + (1 if problem.weight else 0)
        objective = np.concatenate(costs) / self.unit
        lower, upper = np.zeros(total), np.ones(total)
        if problem.weight:
            self.peak = columns
            objective = np.append(objective, problem.weight / MIB / self.row_unit / self.unit)
            lower[-1], upper[-1] = dual.low * self.row_unit, dual.high * self.row_unit
        variables.ids.extend(range(total))
        variables.lower_bounds.extend(lower.tolist())
        variables.upper_bounds.extend(upper.tolist())
        variables.integers.extend([True] * count + [False] * (total - count))
        where = np.flatnonzero(objective)
        model.objective.linear_coefficients.ids.extend(where.tolist())
        model.objective.linear_coefficients.values.extend(objective[where].tolist())
        right = np.concatenate(rights)
        model.linear_constraints.ids.extend(range(rows))
        model.linear_constraints.lower_bounds.extend(right.tolist())
        model.linear_constraints.upper_bounds.extend(right.tolist())
        i, j, c = (np.concatenate(part) for part in zip(*triples, strict=True))
        order = np.lexsort((j, i))
        model.linear_constraint_matrix.row_ids.extend(i[order].tolist())
        model.linear_constraint_matrix.column_ids.extend(j[order].tolist())
        model.linear_constraint_matrix.coefficients.extend(c[order].tolist())
        self.model = mathopt.Model.from_model_proto(model)
        self.variables = list(self.model.variables())
        self.size = len(c)

    @staticmethod
    def _edge(edge: Edge, rows: int, columns: int, triples: list[tuple[Ints, Ints, Floats]], costs: list[Floats]) -> tuple[int, int]:
        i, j = np.nonzero(edge.core < FORBIDDEN)
        pair = columns + np.arange(len(i))
        costs.append(edge.core[i, j].astype(np.float64))
        triples.append((rows + i, pair, np.ones(len(i))))
        triples.append((rows + edge.core.shape[0] + j, pair, np.ones(len(j))))
        return rows + sum(edge.core.shape), columns + len(i)

    def add_row(self, t: int) -> None:
        where, usage, least = row_of(self.problem, t)
        terms = [(c * self.row_unit) * self.variables[i] for i, c in zip(where.tolist(), usage.tolist(), strict=True)]
        if self.peak is not None:
            self.model.add_linear_constraint(mathopt.fast_sum(terms) - self.variables[self.peak] <= -least * self.row_unit)
        elif self.problem.limit is not None:
            self.model.add_linear_constraint(mathopt.fast_sum(terms) <= (self.problem.limit - least) * self.row_unit)

    def solve(self, clock: Clock, work: float, hint: Ints | None) -> _Answer:
        seconds = min(clock.time_left(), 1e6)
        parameters = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=seconds),
            node_limit=max(1, int(min(work * 3e6 / self.size, 1e6))),
            relative_gap_tolerance=self.gap,
            absolute_gap_tolerance=0.0,
            random_seed=self.seed,
        )
        hints = mathopt.ModelSolveParameters()
        if hint is not None:
            hinted = self.problem.offsets[:-1] + hint
            values = {self.variables[i]: 1.0 for i in hinted.tolist()}
            hints = mathopt.ModelSolveParameters(solution_hints=[mathopt.SolutionHint(variable_values=values)])
        result = call_watched(
            lambda: mathopt.solve(self.model, mathopt.SolverType.HIGHS, params=parameters, model_params=hints), clock, seconds=seconds
        )
        if result is None:
            return LEFT
        stats = result.solve_stats
        done = 1e-8 * self.size * (10 + stats.node_count) + 2e-9 * self.size * stats.simplex_iterations
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return _Answer(None, None, True, True, done)
        value = result.termination.objective_bounds.dual_bound * self.unit
        bound = None
        if np.isfinite(value):
            value -= HIGHS_MARGIN * (abs(value) + 1e5 * self.unit)
            bound = self.problem.whole(value) + self.problem.constant
        if not result.has_primal_feasible_solution():
            return _Answer(None, bound, False, False, done)
        found = np.array(result.variable_values(self.variables[: int(self.problem.offsets[-1])]))
        chosen = np.array([int(row.argmax()) for row in np.split(found, self.problem.offsets[1:-1].tolist())], dtype=np.int64)
        return _Answer(chosen, bound, False, reason == mathopt.TerminationReason.OPTIMAL, done)
