"""Integer programs on what is left of a problem: the kernel, two solvers for it, and claims that are held against another's.

    proof = prove(problem, margins, value=incumbent, ...)       # one kernel: a better assignment, or a better bound
    result = solve_kernel(kernel, dual, clock, cutoff=incumbent, ...)

A **kernel** (Angelelli, Mansini and Speranza 2010) holds the strategies whose min-marginal exceeds the relaxation's bound by less than some
delta: ``prove``. It is solved by enumeration where that is quick, else by HiGHS; what is claimed is made again by labels or CP-SAT:
``solve_kernel``.

**CP-SAT in a safe range.** CP-SAT's presolve (OR-Tools 9.15) looks for linear rows that others include, and where coefficients of a row sum
to 2**31 or more it may then drop what a solution needs: a program is called optimal at more than its least cost, or infeasible
(experiments/cpsat_presolve.md has the smallest one found). So that step is switched off, for all programs (``new_solver``); and a memory
row is given in units in which its coefficients sum to less than 2**30, usages and room both rounded down (``in_safe_units``): whatever
keeps the true row keeps this one, so what is proven of the program is true. A solution may break the true row; then a cover is added
(``covering``), which what keeps the true row keeps too, and the program is solved again.

**Windows.** A program has a variable per window that is at least the load of each of its terms; what a pair loads is told by the pair's
variable. HiGHS gets the loads as they are. CP-SAT gets what a window takes beyond its weighted terms, which the reparametrised costs have.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import MIB, WEIGHT, Ints, Loads
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.labels import TooMany, best_below, scaled_up, split_of
from solver_shard.solve.bounds.lagrangian import LagrangianDual
from solver_shard.solve.limits import Clock, call_watched
from solver_shard.solve.parameters import SolveParameters
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import Edge, Floats, Problem, distinct

SAFE_ROW = 2**30
"""Coefficients of a memory row together."""

SAFE_OBJECTIVE = 2**50
"""Coefficients of an objective together: the bound that CP-SAT gives is a float, exact up to 2**53."""


def new_solver(*, seed: int, seconds: float, work: float) -> cp_model.CpSolver:
    """A solver with one worker and these limits."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.catch_sigint_signal = False  # who handles signals decides what they mean
    solver.parameters.max_time_in_seconds = min(seconds, 1e6)
    if np.isfinite(work):
        solver.parameters.max_deterministic_time = work
    return solver


def class_literals(model: cp_model.CpModel, xs: Sequence[cp_model.IntVar], which: Ints, count: int) -> list[cp_model.IntVar]:
    """A literal per row of a table: some strategy of that row is chosen. ``which``: the row of each strategy."""
    members: list[list[cp_model.IntVar]] = [[] for _ in range(count)]
    for x, row in zip(xs, which.tolist(), strict=True):
        members[row].append(x)
    literals = []
    for group in members:
        literal = group[0]
        if len(group) > 1:
            literal = model.new_bool_var("")
            model.add(cp_model.LinearExpr.sum(group) == literal)
        literals.append(literal)
    return literals


def in_safe_units(usage: Ints, room: int) -> tuple[Ints, int]:
    """Usages and room of a row in a power of two of bytes, both rounded down: implied by the row.

    >>> in_safe_units(np.array([3, 5]), 6)
    (array([3, 5]), 6)
    >>> in_safe_units(np.array([2**31 + 1, 2**30]), 2**31)
    (array([536870912, 268435456]), 536870912)
    """
    shift = max(0, sum(usage.tolist()).bit_length() - SAFE_ROW.bit_length() + 1)
    return usage >> shift, room >> shift


def covering(usage: Ints, chosen: Ints, owner: Ints, room: int) -> list[Ints]:
    """Strategies of which not every group can be chosen from at once, where ``chosen`` together exceed the room of a row.

    A group for each of a few of the chosen strategies, those of most bytes, that exceed the room by themselves: the strategies of the
    same node with as many bytes or more.

    Args:
        usage: of the row, per flat strategy.
        chosen: flat strategies, one per node.
        owner: the node of each flat strategy.
        room: of the row.
    """
    order = chosen[np.argsort(-usage[chosen], kind="stable")]
    needed = int(np.flatnonzero(np.cumsum(usage[order]) > room)[0]) + 1
    return [np.flatnonzero((owner == owner[i]) & (usage >= usage[i])) for i in order[:needed].tolist()]


HIGHS_MARGIN = 1e-8
"""Relative. HiGHS allows 1e-7 of dual infeasibility per column; costs are scaled to about 1e6 in total, so that 1e4 columns
of range 1 can make its bound too high by 1e-9 of it."""


FINEST, FINE_STEP = 2.0**-20, 2.0**20
"""Least unit of an objective with the peak in it, and the price of a unit of the peak, in such units, that is fine enough."""


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


def solve_kernel(
    problem: Problem,
    dual: LagrangianDual,
    clock: Clock,
    *,
    cutoff: int | None,
    gap: float,
    seed: int,
    effort: float,
    sure: bool = True,
    weights: Ints | None = None,
) -> KernelResult:
    """Solve a reduced problem; every bound that is returned is the dual's, is enumerated, or is claimed by two solvers alike.

    1. *Labels* (labels.py) enumerate in exact integers. Most problems are small enough.
    2. *HiGHS* gets the local polytope: a variable per strategy and per allowed pair of an edge's core, marginals consistent. Its linear
       relaxation with memory rows is as strong as the dual, and its cuts on the memory rows close most of the rest. It sees memory rows
       only at the times that matter (lazy constraints). Its bound is in floating point, so it is lowered by ``HIGHS_MARGIN``.
    3. What HiGHS claims (a bound, an optimum, that there is nothing) is a *candidate*. A claim that raises a bound or ends a search is made
       again: by labels with the target that HiGHS gave, which drop all that does not come below it; or by CP-SAT with another program (the
       reparametrised costs in integers: a boolean per strategy, one per costly pair, a clause where a pair alone exceeds the target). What
       both claim counts: of two bounds the lower. Where neither confirms it, the claim is dropped, and the bound stays the dual's.

    Args:
        problem: presolved.
        dual: its dual, with good multipliers; of ``problem.priced(weights)`` where it has windows.
        clock: limits; work is added to it.
        cutoff: only solutions with an objective below this are of interest.
        gap: relative gap at which to stop.
        seed: random seed.
        effort: work units to spend at most, about, before a claim is made again.
        sure: whether what is claimed is held against something else; where only a better assignment is of use it need not be.
        weights: of the terms of its windows.
    """
    if problem.size == 0:
        value = problem.value(np.zeros(0, dtype=np.int64))
        if value is None or (cutoff is not None and value >= cutoff):
            return KernelResult(None, None, empty=True, proven=True)
        return KernelResult(np.zeros(0, dtype=np.int64), value, proven=True)
    if problem.limit is not None and problem.least() > problem.limit:
        return KernelResult(None, None, empty=True, proven=True)
    enumerated = _enumerated(problem, dual, clock, cutoff, min(tuned.QUICK_WORK, effort), weights)
    if enumerated is not None:
        return enumerated
    spent = clock.work
    result = _lazily(problem, _Highs(problem, dual, gap, seed), dual, clock, cutoff, effort, gap)
    if not sure:
        return result
    work = tuned.CHECK_WORK * max(1.0, clock.work - spent)
    return _confirmed(problem, dual, clock, result, cutoff=cutoff, seed=seed, work=work, weights=weights)


def _enumerated(
    problem: Problem, dual: LagrangianDual, clock: Clock, target: int | None, work: float, weights: Ints | None
) -> KernelResult | None:
    """The best below a target by labels; None where that takes more work."""
    try:
        answer = best_below(
            problem,
            target,
            split_of(dual),
            weights=weights,
            least_peak=dual.low,
            most_work=min(work, clock.work_left()),
            over=clock.over,
        )
    except TooMany as many:
        clock.spend(many.work)
        return None
    clock.spend(answer.work)
    if answer.assignment is None:
        return KernelResult(None, None, empty=True, proven=True)
    value = problem.value(answer.assignment)
    if value is None or (target is not None and value >= target):
        raise InternalError(f"labels found an assignment of {value} below {target}; please report this")
    return KernelResult(answer.assignment, value, proven=True)


def _confirmed(
    problem: Problem,
    dual: LagrangianDual,
    clock: Clock,
    result: KernelResult,
    *,
    cutoff: int | None,
    seed: int,
    work: float,
    weights: Ints | None,
) -> KernelResult:
    """A result without what only HiGHS claims; see ``solve_kernel``."""
    value = cutoff if result.assignment is None else problem.value(result.assignment)
    nothing = KernelResult(result.assignment, None)
    claim = value if result.empty or result.bound is None else result.bound if value is None else min(value, result.bound)
    if clock.over() or (result.bound is None and not result.proven):
        return nothing
    target = value if result.proven else claim  # only the margin of HiGHS or the gap is open: is there really nothing better?
    if target is not None and target <= dual.bound:
        return KernelResult(result.assignment, target, proven=result.proven)
    exact = _enumerated(problem, dual, clock, target, work, weights)
    if exact is not None and exact.assignment is not None:
        return exact
    if exact is not None:
        alone = result.assignment is None and target == cutoff
        return KernelResult(result.assignment, None if alone else target, empty=alone, proven=result.proven)
    if split_of(dual) is None:
        return nothing
    other = _lazily(problem, _CpSat(problem, dual, target, seed, weights), dual, clock, target, work, 0.0)
    if other.empty and result.empty:
        return KernelResult(None, None, empty=True, proven=True)
    better = None if other.assignment is None else problem.value(other.assignment)
    if better is not None and (claim is None or better < claim):  # what HiGHS claims is false
        return KernelResult(other.assignment, None)
    theirs = target if other.empty else other.bound
    best = result.assignment if better is None else other.assignment
    if claim is None or theirs is None:
        return KernelResult(best, None)
    return KernelResult(best, min(claim, theirs), proven=result.proven and other.proven)


def _joint(problem: Problem) -> tuple[dict[int, dict[int, Ints]], list[tuple[Edge, dict[int, Ints]]]]:
    """What each node loads by term; all edges, and other pairs that load anything, with what each cell of their cores loads by term."""
    if problem.loads is None:
        return {}, [(edge, {}) for edge in problem.edges]
    loads = problem.loads
    own: dict[int, dict[int, Ints]] = {}
    pairs: dict[tuple[int, int], dict[int, Ints]] = {}
    for v, number, term, times in loads.nodes.tolist():
        mine = own.setdefault(v, {})
        mine[term] = mine.get(term, 0) + loads.vectors[number] * times
    for u, v, number, term, times in loads.edges.tolist():
        table = loads.tables[number] if u < v else loads.tables[number].T
        both = pairs.setdefault((min(u, v), max(u, v)), {})
        both[term] = both.get(term, 0) + table * times
    edges = [(edge, edge.table(), pairs.pop((edge.a, edge.b), {})) for edge in problem.edges]
    for (a, b), terms in pairs.items():
        nothing = np.zeros((int(problem.sizes[a]), int(problem.sizes[b])), dtype=np.int64)
        edges.append((Edge(a=a, b=b, core=nothing, rows=np.arange(len(nothing)), cols=np.arange(nothing.shape[1])), nothing, terms))
    found: list[tuple[Edge, dict[int, Ints]]] = []
    for edge, plain, terms in edges:
        if not terms:
            found.append((edge, {}))
            continue
        tables = [np.minimum(plain, FORBIDDEN), *terms.values()]
        first, rows = distinct(np.concatenate(tables, axis=1))
        second, cols = distinct(np.concatenate(tables, axis=0).T)
        cells = [np.ascontiguousarray(table[first[:, None], second]) for table in tables]
        found.append((Edge(a=edge.a, b=edge.b, core=cells[0], rows=rows, cols=cols), dict(zip(terms, cells[1:], strict=True))))
    return own, found


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
    problem: Problem, backend: _CpSat | _Highs, dual: LagrangianDual, clock: Clock, cutoff: int | None, effort: float, gap: float
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
        broken = _broken(problem, problem.profile(answer.assignment), 10)
        new = [t for t in broken if t not in rows]
        if not new:
            if broken and not problem.weight and backend.add_cover(broken[0], answer.assignment):
                continue
            return KernelResult(best, bound, proven=answer.optimal)
        for t in new:
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
    """The reparametrised problem in integers: what it claims is true of the problem, for all that is rounded is rounded down.

    With multipliers p = whole penalties of a strategy, the objective is parts - penalties + constant: the penalties together are at most
    what the limit allows, ``top``, and ``slack`` is the rest of it.
    """

    def __init__(self, problem: Problem, dual: LagrangianDual, cutoff: int | None, seed: int, weights: Ints | None = None) -> None:
        self.problem, self.dual, self.seed, self.scale = problem, dual, seed, dual.scale
        if problem.weight:  # the peak is a variable: nothing to gain from penalties
            dual.multipliers = np.zeros_like(dual.multipliers)
        parts = dual.parts()
        penalties = [priced - plain for priced, plain in zip(dual.price(dual.multipliers), dual.messages.theta, strict=True)]
        model = self.model = cp_model.CpModel()
        self.xs = [[model.new_bool_var("") for _ in range(int(k))] for k in problem.sizes]
        self.flat = [x for row in self.xs for x in row]
        self.owner = np.repeat(np.arange(problem.size), problem.sizes)
        terms: list[cp_model.IntVar] = []
        prices: list[float] = []
        for row, unary in zip(self.xs, parts.unary, strict=True):
            model.add_exactly_one(row)
            terms += row
            prices += unary.tolist()
        room = (
            np.inf if cutoff is None or problem.weight else scaled_up(cutoff, self.scale) - dual.offset(dual.multipliers) - parts.constant
        )
        priced = {(edge.a, edge.b): (edge, table) for edge, table in zip(dual.problem.edges, parts.tables, strict=True)}
        own, edges = _joint(problem)
        loads: list[tuple[int, cp_model.IntVar, int]] = []  # (term, what loads it, nanoseconds)
        for v, mine in own.items():
            loads += [(term, x, cost) for term, costs in mine.items() for x, cost in zip(self.xs[v], costs.tolist(), strict=True) if cost]
        for edge, loaded in edges:
            table = _at(edge, *priced[edge.a, edge.b]) if (edge.a, edge.b) in priced else np.zeros(edge.core.shape)
            rows = class_literals(model, self.xs[edge.a], edge.rows, table.shape[0])
            cols = class_literals(model, self.xs[edge.b], edge.cols, table.shape[1])
            costly = table != 0
            for costs in loaded.values():
                costly |= costs != 0
            for i, j in zip(*np.nonzero(costly), strict=True):
                if table[i, j] >= room or not np.isfinite(table[i, j]):
                    model.add_bool_or([rows[i].negated(), cols[j].negated()])
                    continue
                y = model.new_bool_var("")
                model.add_bool_or([rows[i].negated(), cols[j].negated(), y])
                terms.append(y)
                prices.append(float(table[i, j]))
                if loaded:  # what a window takes beyond its weighted terms may fall with it
                    model.add_implication(y, rows[i])
                    model.add_implication(y, cols[j])
                    loads += [(term, y, int(costs[i, j])) for term, costs in loaded.items() if costs[i, j]]
        most = int(-dual.offset(dual.multipliers) // 1) + 1 if dual.multipliers.any() else 0
        paid = sum(float(row.sum()) for row in penalties)
        self.shift = max(0, (dual.high * len(self.flat)).bit_length() - SAFE_ROW.bit_length() + 1)
        step = Fraction(problem.weight << self.shift, MIB) * Fraction(self.scale)  # what a unit of the peak costs
        self.unit = 1.0
        beyond = 0.0 if problem.loads is None else problem.loads.most() * self.scale
        while max(sum(prices) + beyond + float(step * (dual.high >> self.shift)), most, paid) / self.unit > SAFE_OBJECTIVE:
            self.unit *= 2
        while (
            problem.weight
            and self.unit > FINEST
            and float(step) / self.unit < FINE_STEP
            and (sum(prices) + beyond + float(step * dual.high)) / self.unit < SAFE_OBJECTIVE / 2
        ):
            self.unit /= 2  # a unit of the peak costs whole numbers, rounded down
        objective = cp_model.LinearExpr.weighted_sum(terms, [int(price // self.unit) for price in prices])
        self.constant = Fraction(parts.constant)
        if problem.loads is not None and weights is not None:
            objective += self._beyond(problem.loads, loads, weights)
        self.peak = None
        if problem.weight:
            self.peak = model.new_int_var(dual.low >> self.shift, dual.high >> self.shift, "")
            objective += int(step / Fraction(self.unit)) * self.peak
        elif dual.multipliers.any():
            whole = [int(-(-p // self.unit)) for row in penalties for p in row.tolist()]
            top = int(most // self.unit) + 1 + problem.size
            slack = model.new_int_var(0, top, "")
            model.add(cp_model.LinearExpr.weighted_sum(self.flat, whole) + slack == top)
            objective += slack
            self.constant -= top * Fraction(self.unit)
        model.minimize(objective)

    def _beyond(self, loads: Loads, used: Sequence[tuple[int, cp_model.IntVar, int]], weights: Ints) -> cp_model.LinearExpr:
        """What windows take beyond their weighted terms, in units of the objective: at least as much for every term, rounded down."""
        total: list[cp_model.IntVar] = []
        steps: list[int] = []
        scale = Fraction(self.scale) / WEIGHT / Fraction(self.unit)
        by_window: list[dict[int, tuple[cp_model.IntVar, dict[int, int]]]] = [{} for _ in range(loads.count)]
        for term, x, cost in used:
            mine = by_window[int(loads.windows[term])].setdefault(x.index, (x, {}))[1]
            mine[term] = mine.get(term, 0) + cost
        for window, uses in enumerate(by_window):
            terms = np.flatnonzero(loads.windows == window).tolist()
            if len(terms) == 1:
                continue
            rows: list[tuple[list[cp_model.IntVar], list[int], int]] = []
            for term in terms:
                costs = [costs.get(term, 0) * WEIGHT - sum(costs.get(t, 0) * int(weights[t]) for t in terms) for _, costs in uses.values()]
                base = int(loads.base[term]) * WEIGHT - sum(int(loads.base[t]) * int(weights[t]) for t in terms)
                rows.append(([x for x, _ in uses.values()], [math.floor(cost * scale) for cost in costs], math.floor(base * scale)))
            shift = max(0, max(abs(base) + sum(map(abs, costs)) for _, costs, base in rows).bit_length() - SAFE_ROW.bit_length() + 1)
            most = max((base >> shift) + sum(max(0, cost >> shift) for cost in costs) for _, costs, base in rows)
            time = self.model.new_int_var(0, max(0, most), "")
            for xs, costs, base in rows:
                self.model.add(cp_model.LinearExpr.weighted_sum(xs, [cost >> shift for cost in costs]) + (base >> shift) <= time)
            total.append(time)
            steps.append(1 << shift)
        return cp_model.LinearExpr.weighted_sum(total, steps)

    def add_row(self, t: int) -> None:
        where, usage, least = row_of(self.problem, t)
        if self.peak is not None:  # in units, of what is in use and of the peak, both rounded down
            most = (self.dual.high >> self.shift) + 1
            usage, least = np.minimum(usage >> self.shift, most), least >> self.shift
            self.model.add(self._sum(where, usage) + least <= self.peak)
        elif self.problem.limit is not None:
            usage, room = in_safe_units(usage, self.problem.limit - least)
            self.model.add(self._sum(where, usage) <= room)

    def add_cover(self, t: int, chosen: Ints) -> bool:
        """Forbid what breaks the row of a time; true where that was done."""
        assert self.problem.limit is not None
        where, usage, least = row_of(self.problem, t)
        total = np.zeros(len(self.flat), dtype=np.int64)
        total[where] = usage
        groups = covering(total, self.problem.offsets[:-1] + chosen, self.owner, self.problem.limit - least)
        members = [self.flat[i] for group in groups for i in group.tolist()]
        self.model.add(cp_model.LinearExpr.sum(members) <= len(groups) - 1)
        return True

    def _sum(self, where: Ints, usage: Ints) -> cp_model.LinearExprT:
        return cp_model.LinearExpr.weighted_sum([self.flat[i] for i in where.tolist()], usage.tolist())

    def solve(self, clock: Clock, work: float, hint: Ints | None) -> _Answer:
        seconds = min(clock.time_left(), 1e6)
        solver = new_solver(seed=self.seed, seconds=seconds, work=work)
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
        """What the bound of the program proves, whose objective is a whole number."""
        if not np.isfinite(value):
            return None
        total = (math.ceil(value - 1e-6) * Fraction(self.unit) + self.constant) / Fraction(self.scale)
        return math.floor(total) if self.problem.weight % MIB else math.ceil(total)


def _at(edge: Edge, priced: Edge, table: Floats) -> Floats:
    """A table of the cells of one edge's core, at the cells of another's, whose lines it does not tell apart."""
    first = np.zeros(edge.core.shape[0], dtype=np.int64), np.zeros(edge.core.shape[1], dtype=np.int64)
    first[0][edge.rows], first[1][edge.cols] = priced.rows, priced.cols
    return np.asarray(table[first[0][:, None], first[1]])


class _Highs:
    """The local polytope with raw costs, built as flat arrays."""

    def __init__(self, problem: Problem, dual: LagrangianDual, gap: float, seed: int) -> None:
        self.problem, self.gap, self.seed = problem, gap, seed
        count = int(problem.offsets[-1])
        costs: list[Floats] = [np.concatenate(problem.unary).astype(np.float64)]
        triples: list[tuple[Ints, Ints, Floats]] = []
        owner = np.repeat(np.arange(problem.size), problem.sizes)
        triples.append((owner, np.arange(count), np.ones(count)))
        rights = [np.ones(problem.size)]
        rows, columns = problem.size, count
        own, edges = _joint(problem)
        loads = [(term, problem.offsets[v] + np.arange(len(mine[term])), mine[term]) for v, mine in own.items() for term in mine]
        for edge, loaded in edges:
            pairs = np.nonzero(edge.core < FORBIDDEN)
            loads += [(term, columns + np.arange(len(pairs[0])), load[pairs]) for term, load in loaded.items()]
            for start, classes, v in ((rows, edge.rows, edge.a), (rows + edge.core.shape[0], edge.cols, edge.b)):
                triples.append((start + classes, problem.offsets[v] + np.arange(len(classes)), -np.ones(len(classes))))
            rows, columns = self._edge(edge, rows, columns, triples, costs)
            rights.append(np.zeros(sum(edge.core.shape)))
        self.peak = None
        self.unit = 2.0 ** max(0, int(np.ceil(np.log2(max(abs(dual.best) / dual.scale, 1.0) / 1e6))))
        below = np.zeros(0)
        windows = 0 if problem.loads is None else problem.loads.count
        if problem.loads is not None:  # each term's load is at most its window's time
            terms = np.arange(len(problem.loads.windows))
            triples += [(np.full(len(x), rows + term), x, load / self.unit) for term, x, load in loads]
            triples.append((rows + terms, columns + problem.loads.windows, -np.ones(len(terms))))
            costs.append(np.full(windows, self.unit))
            below = -problem.loads.base / self.unit
            rows, columns = rows + len(terms), columns + windows
        self.row_unit = 1e4 / max(dual.high, 1)
        model = model_pb2.ModelProto()
        variables = model.variables
        total = columns + (1 if problem.weight else 0)
        objective = np.concatenate(costs) / self.unit
        lower, upper = np.zeros(total), np.ones(total)
        upper[columns - windows : columns] = np.inf
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
        model.linear_constraints.lower_bounds.extend([*right.tolist(), *[-np.inf] * len(below)])
        model.linear_constraints.upper_bounds.extend([*right.tolist(), *below.tolist()])
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

    def add_cover(self, t: int, chosen: Ints) -> bool:
        """Nothing to add: a row that is broken is broken by no more than the tolerance of HiGHS."""
        return False

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


@dataclass(frozen=True, slots=True, eq=False)
class MinMarginals:
    """Objective that any solution with a strategy exceeds ``base`` by, per node and strategy."""

    base: float
    extra: list[Floats]

    def room(self, value: int) -> float:
        """What no strategy of a solution below ``value`` exceeds ``base`` by, or reaches; rounded up, which counts beyond 2**53."""
        room = float(value - self.base)
        return room if Fraction(room) >= value - Fraction(self.base) else float(np.nextafter(room, np.inf))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proof:
    """What a kernel gave.

    Attributes:
        assignment: of the problem, within the limit and below the value that was known; or None.
        bound: every solution with an objective below the known value costs at least this; None where nothing better exists.
        whole: the kernel holds every strategy that may be part of a better solution.
        proven: it was solved to the end.
        large: it was too large to try.
        work: work spent.
        cells: pairs that were wanted.
        effort: of that work, the integer program's.
    """

    assignment: Ints | None = None
    bound: int | None = 0
    whole: bool = False
    proven: bool = True
    large: bool = False
    work: float = 0.0
    cells: int = 0
    effort: float = 0.0

    @property
    def quick(self) -> bool:
        """Whether the next larger one may be tried at once."""
        return self.proven and not self.whole and not self.large and self.assignment is None and self.effort <= tuned.KERNEL_QUICK


def prove_quickly(prove_one: Callable[[int], Proof], cells: int) -> Proof:
    """The kernel of so many pairs, and larger ones while they are solved at once and find nothing; the last one, with the best bound."""
    last = prove_one(cells)
    work, bound = last.work, last.bound
    while last.quick and bound is not None and work < tuned.KERNEL_AT_ONCE:
        last = prove_one(tuned.KERNEL_GROWTH * last.cells)
        work += last.work
        bound = bound if last.large else None if last.bound is None else max(bound, last.bound)
    return replace(last, work=work, bound=bound)


def prove(
    problem: Problem,
    margins: MinMarginals,
    *,
    value: int | None,
    multipliers: Mapping[int, float],
    least_peak: int,
    cells: int,
    patience: float,
    parameters: SolveParameters,
    clock: Clock,
    weights: Ints | None = None,
) -> Proof:
    """Solve the kernel of about so many pairs (before presolve): a better assignment, or a better bound.

    A solution of it is an incumbent. Whatever it proves, every other solution costs at least base + delta: so the bound rises to the
    smaller of both. Delta starts small and grows until the gap is closed.

    Args:
        problem: presolved.
        margins: of its strategies.
        value: only solutions with an objective below this are of interest.
        multipliers: cost per byte by time label.
        least_peak: a bound on the peak.
        cells: pairs wanted.
        patience: times the work units that such a size usually takes are spent at most.
        parameters: of the solve; the program stops at a quarter of its gap.
        clock: limits.
        weights: of the terms of its windows.
    """
    room = margins.room(value) if value is not None else np.inf
    delta = min(_delta(problem, margins.extra, cells), room)
    keep = [(row < delta) | (row <= row.min()) for row in margins.extra] if np.isfinite(delta) else [row >= 0 for row in margins.extra]
    whole = delta >= room or all(mask.all() for mask in keep)
    outside = None if whole else problem.whole(margins.base + delta)  # every solution with another strategy costs at least that
    spent = clock.work
    clock.spend(1e-3 * problem.size)
    try:
        kernel, postsolve = presolve(problem, keep)
    except NoAssignment:
        return Proof(bound=outside, whole=whole, work=clock.work - spent, cells=cells)
    linear = kernel if weights is None else kernel.priced(weights)
    size = cells_of(linear)
    if size > tuned.KERNEL_CELLS:
        return Proof(whole=whole, large=True, work=clock.work - spent, cells=cells)
    inner = LagrangianDual(linear, least_peak=least_peak)
    start = np.array([multipliers.get(t, 0.0) for t in kernel.times.tolist()]) * inner.scale
    for _ in range(4):
        inner.evaluate(start, 5)
    inner.multipliers = start
    clock.spend(inner.work)
    before = clock.work
    result = solve_kernel(
        kernel,
        inner,
        clock,
        cutoff=value,
        gap=parameters.gap / 4,
        seed=parameters.seed,
        effort=patience * usual_effort(size),
        weights=weights,
    )
    inside = max(inner.bound, result.bound if result.bound is not None else inner.bound)
    bound = outside if result.empty else inside if outside is None else min(inside, outside)
    assignment = None if result.assignment is None else postsolve.restore(result.assignment)
    return Proof(
        assignment=assignment,
        bound=bound,
        whole=whole,
        proven=result.proven,
        work=clock.work - spent,
        cells=cells,
        effort=clock.work - before,
    )


def enumerate_whole(
    problem: Problem, margins: MinMarginals, *, value: int, weights: Ints, work: float, clock: Clock
) -> tuple[int, Ints | None] | None:
    """A bound of all that costs less than a value, by labels, and the best there is below it; None where that takes more work.

    Args:
        problem: without memory, with windows.
        margins: of its strategies.
        value: the bound where nothing costs less.
        weights: of the terms of its windows.
    """
    room = margins.room(value)
    clock.spend(1e-3 * problem.size)
    try:
        kernel, postsolve = presolve(problem, [row < room for row in margins.extra])
    except NoAssignment:
        return value, None
    if kernel.size == 0:
        nothing = np.zeros(0, dtype=np.int64)
        cost = kernel.cost(nothing)
        return (cost, postsolve.restore(nothing)) if cost < value else (value, None)
    dual = LagrangianDual(kernel.priced(weights))
    for _ in range(12):
        dual.evaluate(np.zeros(0), 20, clock.over)
    clock.spend(dual.work)
    result = _enumerated(kernel, dual, clock, value, work, weights)
    if result is None:
        return None
    return (value, None) if result.assignment is None or result.bound is None else (result.bound, postsolve.restore(result.assignment))


def usual_effort(cells: int) -> float:
    """Work units that an integer program with so many pairs after presolve usually takes, and some more."""
    return min(60.0, 2.0 + cells / 1000)


def _delta(problem: Problem, extra: list[Floats], cells: int) -> float:
    """The largest threshold for which the edges between strategies below it have at most so many pairs."""
    values = np.unique(np.concatenate(extra))
    low, high = 0, len(values)
    while low < high:
        middle = (low + high + 1) // 2
        if middle == len(values) or _cells_below(problem, extra, float(values[middle])) <= cells:
            low = middle
            if middle == len(values):
                break
        else:
            high = middle - 1
    if low == len(values):
        return np.inf if _cells_below(problem, extra, np.inf) <= cells else float(values[-1])
    return float(values[low])


def _cells_below(problem: Problem, extra: list[Floats], threshold: float) -> int:
    masks = [row < threshold for row in extra]
    total = 0
    for edge in problem.edges:
        rows = np.zeros(edge.core.shape[0], dtype=bool)
        cols = np.zeros(edge.core.shape[1], dtype=bool)
        rows[edge.rows[masks[edge.a]]] = True
        cols[edge.cols[masks[edge.b]]] = True
        total += int(rows.sum()) * int(cols.sum())
    return total
