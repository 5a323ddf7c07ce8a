"""Is there any assignment? CP-SAT on what forbids, with memory rows added where they are broken, and assumptions to blame.

Two uses. ``decide`` answers yes or no for a presolved problem. ``blamed`` builds one program in which every constraint and every memory
row holds only while a literal of its own does, assumes all of these literals, and returns those that CP-SAT needs to refute it
(``sufficient_assumptions_for_infeasibility``): a conflicting set, not always a smallest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.solve.arcs import Arcs
from solver_shard.solve.clock import Clock
from solver_shard.solve.kernel import row_of
from solver_shard.solve.problem import Problem
from solver_shard.solve.spans import Bools

MOST_LITERALS = 1_500_000
"""In support clauses; a larger program is not built."""

ROWS_AT_A_TIME = 5


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Whether there is an assignment (None: not decided), and one."""

    possible: bool | None
    assignment: Ints | None = None


class _Program:
    """Strategies as literals, forbidden pairs as support clauses."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.model = cp_model.CpModel()
        self.xs = [[self.model.new_bool_var("") for _ in range(k)] for k in sizes]
        self.literals = 0
        for row in self.xs:
            self.model.add_exactly_one(row)

    def support(self, a: int, b: int, allowed: Bools, rows: Ints, cols: Ints, when: cp_model.IntVar | None = None) -> None:
        """A strategy needs an allowed partner; ``when``: only while this literal holds."""
        first, second = self._classes(self.xs[a], rows, allowed.shape[0]), self._classes(self.xs[b], cols, allowed.shape[1])
        unless = [] if when is None else [when.negated()]
        for own, theirs, table in ((first, second, allowed), (second, first, allowed.T)):
            for literal, partners in zip(own, table, strict=True):
                if not partners.all():
                    others = [theirs[j] for j in np.flatnonzero(partners).tolist()]
                    self.literals += len(others)
                    self.model.add_bool_or([literal.negated(), *unless, *others])

    def _classes(self, xs: list[cp_model.IntVar], which: Ints, count: int) -> list[cp_model.IntVar]:
        """A literal per row of a table: some strategy of that row is chosen."""
        members: list[list[cp_model.IntVar]] = [[] for _ in range(count)]
        for x, row in zip(xs, which.tolist(), strict=True):
            members[row].append(x)
        literals = []
        for group in members:
            literal = group[0]
            if len(group) > 1:
                literal = self.model.new_bool_var("")
                self.model.add(cp_model.LinearExpr.sum(group) == literal)
            literals.append(literal)
        return literals

    def row(self, where: Ints, usage: Ints, room: int, when: cp_model.IntVar | None = None) -> None:
        """Bytes of these strategies (flat positions) together are at most ``room``."""
        flat = [x for row in self.xs for x in row]
        made = self.model.add(cp_model.LinearExpr.weighted_sum([flat[i] for i in where.tolist()], usage.tolist()) <= room)
        if when is not None:
            made.only_enforce_if(when)

    def solve(self, clock: Clock, effort: float, seed: int) -> tuple[cp_model.CpSolver, bool | None]:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_time_in_seconds = min(clock.time_left(), 1e6)
        solver.parameters.max_deterministic_time = min(effort, clock.work_left())
        status = solver.solve(self.model)
        clock.spend(solver.response_proto.deterministic_time)
        return solver, None if status == cp_model.UNKNOWN else status != cp_model.INFEASIBLE


def decide(problem: Problem, clock: Clock, *, effort: float, seed: int) -> Decision:
    """Whether a presolved problem has an allowed assignment within its limit; costs do not matter."""
    if problem.limit is not None and problem.least() > problem.limit:
        return Decision(False)
    program = _Program(problem.sizes.tolist())
    for edge in problem.edges:
        program.support(edge.a, edge.b, edge.core < FORBIDDEN, edge.rows, edge.cols)
    if program.literals > MOST_LITERALS:
        return Decision(None)
    added: set[int] = set()
    while not clock.over():
        solver, possible = program.solve(clock, effort, seed)
        if not possible:
            return Decision(possible)
        found = np.array([next(i for i, x in enumerate(row) if solver.boolean_value(x)) for row in program.xs], dtype=np.int64)
        profile = problem.profile(found)
        order = np.argsort(-profile, kind="stable")[:ROWS_AT_A_TIME].tolist()
        broken = [t for t in order if problem.limit is not None and profile[t] > problem.limit and t not in added]
        if not broken:
            return Decision(True, found)
        for t in broken:
            added.add(t)
            where, usage, least = row_of(problem, t)
            assert problem.limit is not None
            program.row(where, usage, problem.limit - least)
    return Decision(None)


def blamed(
    arcs: Arcs, kept: Sequence[int], rows: Sequence[Ints], limit: int, clock: Clock, *, effort: float, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Constraints and memory rows that conflict, or None where that is not shown.

    Args:
        arcs: the graph and its constraints.
        kept: positions of the constraints that are kept.
        rows: bytes per strategy of the whole graph, one array per memory row.
        limit: of every row.
    """
    program = _Program([len(row) for row in arcs.alive])
    model = program.model
    flags = {k: model.new_bool_var("") for k in kept}
    counted = [model.new_bool_var("") for _ in rows]
    for row, alive in zip(program.xs, arcs.alive, strict=True):
        for i in np.flatnonzero(~alive).tolist():
            model.add(row[i] == 0)
    for arc in arcs.arcs:
        if arc.owner < 0 or arc.owner in flags:
            program.support(arc.a, arc.b, arc.allowed, arc.rows, arc.cols, flags.get(arc.owner))
            if program.literals > MOST_LITERALS:
                return None
    for k, flag in flags.items():
        for v, mask in arcs.constraints[k].allowed.items():
            for i in np.flatnonzero(arcs.alive[v] & ~mask).tolist():
                model.add_implication(flag, program.xs[v][i].negated())
    for flag, usage in zip(counted, rows, strict=True):
        where = np.flatnonzero(usage)
        program.row(where, usage[where], limit, flag)
    model.add_assumptions([*flags.values(), *counted])
    solver, possible = program.solve(clock, effort, seed)
    if possible is not False:
        return None
    needed = set(solver.sufficient_assumptions_for_infeasibility())
    return (
        tuple(k for k, flag in flags.items() if flag.index in needed),
        tuple(i for i, flag in enumerate(counted) if flag.index in needed),
    )
