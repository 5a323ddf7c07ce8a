"""Is there any assignment? Labels, or CP-SAT on what forbids, with memory rows added where they are broken; and assumptions to blame.

Two uses. ``decide`` answers yes or no for a presolved problem. ``blamed`` builds one program in which every constraint and every memory
row holds only while a literal of its own does, assumes all of these literals, and returns those that CP-SAT needs to refute it
(``sufficient_assumptions_for_infeasibility``).

What rests on what: an assignment is checked in exact integers. That there is none is enumerated (labels.py), or CP-SAT's word alone: then
``Decision.sure`` is false, and who asks has it proven in another way (``solve.conflict`` asks the solver). A set that ``blamed`` returns
is a candidate, and not always a smallest one.
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
from solver_shard.solve.labels import TooMany, best_below
from solver_shard.solve.problem import Problem
from solver_shard.solve.programs import covering, in_safe_units, new_solver
from solver_shard.solve.spans import Bools

MOST_LITERALS = 1_500_000
"""In support clauses; a larger program is not built."""

ROWS_AT_A_TIME = 5

LABEL_WORK = 0.5
"""Of enumerating, before CP-SAT is asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Whether there is an assignment (None: not decided), and one; ``sure``: that rests on more than one solver's word."""

    possible: bool | None
    assignment: Ints | None = None
    sure: bool = True


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
        usage, room = in_safe_units(usage, room)
        flat = self.flat
        made = self.model.add(cp_model.LinearExpr.weighted_sum([flat[i] for i in where.tolist()], usage.tolist()) <= room)
        if when is not None:
            made.only_enforce_if(when)

    def cover(self, groups: list[Ints]) -> None:
        """Not something of every group."""
        flat = self.flat
        self.model.add(cp_model.LinearExpr.sum([flat[i] for group in groups for i in group.tolist()]) <= len(groups) - 1)

    @property
    def flat(self) -> list[cp_model.IntVar]:
        return [x for row in self.xs for x in row]

    def solve(self, clock: Clock, effort: float, seed: int) -> tuple[cp_model.CpSolver, bool | None]:
        solver = new_solver(seed=seed, seconds=clock.time_left(), work=min(effort, clock.work_left()))
        status = solver.solve(self.model)
        clock.spend(solver.response_proto.deterministic_time)
        return solver, None if status == cp_model.UNKNOWN else status != cp_model.INFEASIBLE


def decide(problem: Problem, clock: Clock, *, effort: float, seed: int) -> Decision:
    """Whether a presolved problem has an allowed assignment within its limit; costs do not matter."""
    if problem.limit is not None and problem.least() > problem.limit:
        return Decision(False)
    try:
        answer = best_below(problem, None, most_work=min(LABEL_WORK, clock.work_left()), over=clock.over)
    except TooMany as many:
        clock.spend(many.work)
    else:
        clock.spend(answer.work)
        return Decision(answer.assignment is not None, answer.assignment)
    program = _Program(problem.sizes.tolist())
    for edge in problem.edges:
        program.support(edge.a, edge.b, edge.core < FORBIDDEN, edge.rows, edge.cols)
    if program.literals > MOST_LITERALS:
        return Decision(None)
    owner = np.repeat(np.arange(problem.size), problem.sizes)
    added: set[int] = set()
    while not clock.over():
        solver, possible = program.solve(clock, effort, seed)
        if not possible:
            return Decision(possible, sure=False)
        found = np.array([next(i for i, x in enumerate(row) if solver.boolean_value(x)) for row in program.xs], dtype=np.int64)
        profile = problem.profile(found)
        order = np.argsort(-profile, kind="stable")[:ROWS_AT_A_TIME].tolist()
        broken = [t for t in order if problem.limit is not None and profile[t] > problem.limit]
        if not broken:
            return Decision(True, found)
        for t in broken:
            where, usage, least = row_of(problem, t)
            assert problem.limit is not None
            if t not in added:
                added.add(t)
                program.row(where, usage, problem.limit - least)
            else:  # the row is in units; what it lets through and the limit does not is forbidden
                total = np.zeros(len(owner), dtype=np.int64)
                total[where] = usage
                program.cover(covering(total, problem.offsets[:-1] + found, owner, problem.limit - least))
    return Decision(None)


def blamed(
    arcs: Arcs, kept: Sequence[int], rows: Sequence[Ints], limit: int, clock: Clock, *, effort: float, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Constraints and memory rows that conflict if CP-SAT is right, or None where it finds no conflict.

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
