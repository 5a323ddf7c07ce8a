"""Why there is no solution: an infeasible subsystem (IIS) of constraints and memory times, by a deletion filter, and what each costs.

    conflict = compute_infeasible_subsystem(graph, pins, time_limit=30)
    [pins[k].name for k in conflict.constraints], conflict.times      # together impossible; without any one of them possible
    without(graph, pins, k, time_limit=30)                            # the best solution that keeps all other constraints
    least_bytes(graph, pins, conflict, t, time_limit=30)              # what time t needs, all else of the conflict kept

The graph is the one without the constraints, which are masks on its nodes (:class:`Constraint`). A memory time of a conflict is a time at
which the limit has to hold; at all others it does not matter to the conflict.

**How.** Whether a set of constraints and times is possible is asked of four methods, the cheapest first: arc consistency
(``ExplainedArcs``), the least use of what it leaves, a search on the presolved graph (``decide``), and the solver, whose dual proves
what needs much memory. Costs do not matter, so presolve leaves little. A single time is asked otherwise: its bytes are the costs, and
nothing is limited, which message passing and elimination solve exactly in most cases.

**What the proof rests on.** That a set is possible rests on an assignment, which is checked against the graph. That it is not rests on
exact integers (arcs, least use, labels), or on the solver, whose bounds rest on more than one program's word; CP-SAT's word that there is
none only makes the solver look. What assumption literals blame is a candidate: it is asked again. So is, last of all,
every conflict before it is returned: it is impossible, and without any one of its elements possible, or it does not say ``minimal``.

The filter (Chinneck and Dravnieks 1991). Times are added as they are broken. What is then known to conflict is made smaller by the reasons
of arc consistency or by assumption literals, and minimal by deletion: what is still impossible without one element needs that element no
more. Constraints are tried before times: where memory is too small for every plan, no constraint is blamed. If a question is not decided
within the limits, its element stays, and the conflict says that it may not be minimal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import Bools, ChoiceGraph, Constraint, Ints
from solver_shard.graph.narrowing import Arc, Arcs
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.labels import TooMany, best_below
from solver_shard.solve.engine import solve
from solver_shard.solve.integer_program import class_literals, covering, in_safe_units, new_solver, row_of
from solver_shard.solve.limits import Clock, clock_of
from solver_shard.solve.parameters import SolveParameters
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import Problem, compact_table, from_graph
from solver_shard.solve.solution import Solution, Status

__all__ = ["Constraint", "InfeasibleSubsystem", "compute_infeasible_subsystem", "least_bytes", "masks", "narrowed", "without"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibleSubsystem:
    """What cannot be had together.

    Attributes:
        constraints: positions of the constraints, ascending.
        times: times of the graph at which its limit cannot be kept with them, ascending; none where memory does not matter.
        minimal: proven that every one of them is needed: without it, the others are possible.
    """

    constraints: tuple[int, ...]
    times: tuple[int, ...] = ()
    minimal: bool = True


def compute_infeasible_subsystem(
    graph: ChoiceGraph,
    constraints: Sequence[Constraint],
    parameters: SolveParameters | None = None,
    *,
    times: Sequence[int] = (),
    clock: Clock | None = None,
    **changes: Any,
) -> InfeasibleSubsystem | None:
    """A minimal conflict of the constraints and the graph's limit; None where none is found: there is a solution, or limits struck.

    Args:
        graph: without the constraints.
        constraints: what may be dropped.
        parameters: seed, and limits of everything together; without a time limit that strikes, the same graph and work limit give the same.
        times: where memory is likely to be short; asked first.
        clock: in place of the two limits, where this is a part of something larger.
        changes: fields of the parameters by name.
    """
    return _filter(graph, constraints, SolveParameters.of(parameters, changes), clock).run(tuple(times))


def _filter(graph: ChoiceGraph, constraints: Sequence[Constraint], asked: SolveParameters, clock: Clock | None) -> _DeletionFilter:
    return _DeletionFilter(graph, constraints, clock or clock_of(asked.time_limit, asked.work_limit), asked.seed)


def without(
    graph: ChoiceGraph,
    constraints: Sequence[Constraint],
    dropped: int,
    parameters: SolveParameters | None = None,
    **changes: Any,
) -> Solution:
    """The price of dropping one constraint: the best solution that keeps all others.

    Where that is infeasible too, it is the one of least peak, with the bound on any's, as ``engine.solve`` gives it.
    """
    kept = [constraint for k, constraint in enumerate(constraints) if k != dropped]
    narrow = narrowed(graph, masks(kept), dropped=constraints[dropped].edges)
    return solve(narrow, parameters, **changes)


def least_bytes(
    graph: ChoiceGraph,
    constraints: Sequence[Constraint],
    conflict: InfeasibleSubsystem,
    time: int,
    parameters: SolveParameters | None = None,
    *,
    clock: Clock | None = None,
    **changes: Any,
) -> tuple[int | None, int]:
    """The price of dropping one time of a conflict: (bytes found, bytes proven) that are in use then at least.

    The conflict's constraints and the limit at its other times are kept.
    """
    asked = SolveParameters.of(parameters or SolveParameters(gap=0.0), changes)
    question = _filter(graph, constraints, asked, clock)
    found = question.bytes_at(conflict.constraints, time, [t for t in conflict.times if t != time], asked.gap)
    return found.objective, found.bound or 0


def masks(constraints: Sequence[Constraint]) -> dict[int, Bools]:
    """What constraints leave of each node's strategies together."""
    found: dict[int, Bools] = {}
    for constraint in constraints:
        for v, mask in constraint.allowed.items():
            found[v] = found[v] & mask if v in found else mask
    return found


class _DeletionFilter:
    """One call: questions about sets of constraints and times."""

    def __init__(self, graph: ChoiceGraph, constraints: Sequence[Constraint], clock: Clock, seed: int) -> None:
        self.graph = replace(graph, loads=None)  # what is possible does not depend on what it costs
        self.constraints, self.clock, self.seed = constraints, clock, seed
        self.arcs = ExplainedArcs(graph, constraints)
        self._answers: dict[tuple[frozenset[int], frozenset[int]], tuple[bool | None, Ints | None]] = {}
        self._plain = tuple(np.where(table >= FORBIDDEN, FORBIDDEN, 0) for table in graph.tables)

    def run(self, likely: tuple[int, ...]) -> InfeasibleSubsystem | None:
        kept = list(range(len(self.constraints)))
        possible, witness = self.possible(kept, [])
        if possible is None:
            return None
        times: list[int] = []
        if possible:
            found = self._short_times(kept, witness, likely)
            if found is None:
                return None
            times = found
        kept, times = self._less(kept, times)
        kept = self._fewest(kept, times)
        times = self._fewest_times(kept, times)
        if not kept and len(times) == 1:
            times = self._worst(times)
        if self.possible(kept, times)[0] is not False:
            return None
        return InfeasibleSubsystem(constraints=tuple(sorted(kept)), times=tuple(sorted(times)), minimal=self._minimal(kept, times))

    def _minimal(self, kept: list[int], times: list[int]) -> bool:
        """Whether without any one element the others are possible: for each there is an assignment."""
        rests = [([other for other in kept if other != k], times) for k in kept]
        rests += [(kept, [other for other in times if other != t]) for t in times]
        return all(self.possible(constraints, points)[0] is True for constraints, points in rests)

    def possible(self, kept: Sequence[int], times: Sequence[int]) -> tuple[bool | None, Ints | None]:
        """Whether these constraints can be kept with the limit at these times (None: not decided), and an assignment that does."""
        key = frozenset(kept), frozenset(times)
        if self._answers.get(key, (None, None))[0] is None:
            possible, found = self._possible(kept, times)
            if found is not None and not self._keeps(found, kept, times):
                raise InternalError("what keeps some constraints by the solver's account does not keep them; please report this")
            self._answers[key] = possible, found
        return self._answers[key]

    def _keeps(self, assignment: Ints, kept: Sequence[int], times: Sequence[int]) -> bool:
        """Whether an assignment keeps these constraints, and the limit at these times."""
        graph = self.graph
        if any(not mask[assignment[v]] for k in kept for v, mask in self.constraints[k].allowed.items()):
            return False
        dropped = list(self._dropped(kept))
        free = np.ones(len(graph.edges), dtype=bool)
        free[dropped] = False
        bare = replace(graph, edges=graph.edges[free], edge_tables=graph.edge_tables[free]) if dropped else graph
        if not bare.allowed(assignment):
            return False
        return graph.limit is None or not times or bool((graph.profile(assignment)[list(times)] <= graph.limit).all())

    def _possible(self, kept: Sequence[int], times: Sequence[int]) -> tuple[bool | None, Ints | None]:
        left = self.arcs.left(kept)
        self.clock.spend(1e-5 * self.graph.size)
        if left.core is not None:
            return False, None
        limit = self.graph.limit
        if times and limit is not None and (self._least_use(left.alive)[list(times)] > limit).any():
            return False, None
        if self.clock.over():
            return None, None
        if len(times) == 1 and limit is not None:
            found = self.bytes_at(kept, times[0], [], 0.0)
            if found.bound is not None and found.bound > limit:
                return False, None
            reached = found.objective is not None and found.objective <= limit
            return (True, np.array(found.assignment)) if reached else (False if found.status is Status.INFEASIBLE else None, None)
        return self._searched(kept, times)

    def bytes_at(self, kept: Sequence[int], time: int, others: Sequence[int], gap: float) -> Solution:
        """Fewest bytes at one time, with these constraints and the limit at the other times."""
        dropped = self._dropped(kept)
        narrow = narrowed(self.graph, self._masks(kept), costs=self._use(time), times=others, dropped=dropped, tables=self._plain)
        if not others:
            narrow = replace(narrow, limit=None)
        return solve(narrow, gap=gap, seed=self.seed, clock=self.clock.part(time_share=tuned.IIS_SHARE, work=self._part()))

    def _searched(self, kept: Sequence[int], times: Sequence[int]) -> tuple[bool | None, Ints | None]:
        """CP-SAT on the presolved graph, then the solver."""
        nothing = np.zeros_like(self.graph.costs)
        narrow = narrowed(self.graph, self._masks(kept), costs=nothing, times=times, dropped=self._dropped(kept), tables=self._plain)
        problem, order = from_graph(narrow, limit=self.graph.limit if times else None, memory_counts=bool(times))
        try:
            small, postsolve = presolve(problem, stop=self.clock.over)
        except NoAssignment:
            return False, None
        self.clock.spend(1e-3 * problem.size)
        decision = decide(small, self.clock, effort=tuned.IIS_EFFORT, seed=self.seed)
        if decision.assignment is not None:
            found = np.empty_like(order)
            found[order] = postsolve.restore(decision.assignment)
            return True, found
        if decision.sure and decision.possible is not None:
            return decision.possible, None
        if self.clock.over():
            return None, None
        if not times:
            narrow = replace(narrow, limit=None)
        solution = solve(narrow, gap=0.0, seed=self.seed, clock=self.clock.part(time_share=tuned.IIS_SHARE, work=self._part()))
        if solution.feasible:
            return True, np.array(solution.assignment)
        return (False if solution.status is Status.INFEASIBLE else None), None

    def _short_times(self, kept: list[int], witness: Ints | None, likely: tuple[int, ...]) -> list[int] | None:
        """Times at which the limit cannot be kept, a few too many perhaps; None where there are none, or it is not decided."""
        limit = self.graph.limit
        if limit is None:
            return None
        least = self._least_use(self.arcs.left(kept).alive)
        if least.max(initial=0) > limit:
            return [int(least.argmax())]
        assert witness is not None
        profile = self.graph.profile(witness)
        alone = [t for t in likely if 0 <= t < len(profile)]
        times: list[int] = []
        asked = 0
        while True:
            broken = [t for t in _peaks(profile) if profile[t] > limit and t not in times]
            if not broken and not alone:
                return None
            for t in [*alone, *broken][: max(0, tuned.IIS_SINGLE_TIMES - asked)]:
                asked += 1
                possible, _ = self.possible(kept, [t])
                if possible is False:
                    return [t]
            times += dict.fromkeys([*alone, *broken[: tuned.IIS_TIMES]])
            alone = []
            possible, found = self.possible(kept, times)
            if possible is False:
                return times
            if found is None:
                return None
            profile = self.graph.profile(found)

    def _less(self, kept: list[int], times: list[int]) -> tuple[list[int], list[int]]:
        """What the reasons of arc consistency, or assumption literals, leave of a conflicting set."""
        core = self.arcs.left(kept).core
        if core is not None:
            return list(core), []
        if len(kept) + len(times) < tuned.IIS_BLAME:
            return kept, times
        rows = [self._use(t) for t in times]
        limit = self.graph.limit if self.graph.limit is not None else 0
        found = core_by_assumptions(self.arcs, kept, rows, limit, self.clock, effort=tuned.IIS_EFFORT, seed=self.seed)
        if found is None:
            return kept, times
        fewer = list(found[0]), [times[i] for i in found[1]]
        return fewer if self.possible(*fewer)[0] is False else (kept, times)

    def _fewest(self, kept: list[int], times: list[int]) -> list[int]:
        """The constraints that are needed, by deletion."""
        if kept and self.possible([], times)[0] is False:
            return []
        for k in list(kept):
            if k not in kept:
                continue
            rest = [other for other in kept if other != k]
            possible, _ = self.possible(rest, times)
            if possible is False:
                core = self.arcs.left(rest).core
                kept = rest if core is None else list(core)
        return kept

    def _fewest_times(self, kept: list[int], times: list[int]) -> list[int]:
        for t in list(times):
            rest = [other for other in times if other != t]
            possible, _ = self.possible(kept, rest)
            if possible is False:
                times = rest
        return times

    def _worst(self, times: list[int]) -> list[int]:
        """In place of a single time that blames no constraint, one that needs more: the better reason."""
        least = self._least_use(self.arcs.alive)
        worst = int(least.argmax())
        limit = self.graph.limit
        return [worst] if limit is not None and least[worst] > max(limit, int(least[times[0]])) else times

    def _masks(self, kept: Sequence[int]) -> dict[int, Bools]:
        return masks([self.constraints[k] for k in kept])

    def _dropped(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Edges of the constraints that are not kept."""
        own = set(kept)
        return tuple(e for k, constraint in enumerate(self.constraints) if k not in own for e in constraint.edges)

    def _part(self) -> float | None:
        left = self.clock.work_left()
        return None if left == float("inf") else left * tuned.IIS_SHARE

    def _use(self, time: int) -> Ints:
        """Bytes of every strategy at one time."""
        counts: Ints = np.repeat(_living(self.graph, [time])[0], self.graph.sizes())
        return np.asarray(self.graph.usages * counts)

    def _least_use(self, alive: Sequence[Bools]) -> Ints:
        """Bytes in use at each time at least, every node at its smallest."""
        most = np.iinfo(np.int64).max
        least = np.array([np.where(row, self.graph.node_usages(v), most).argmin() for v, row in enumerate(alive)], dtype=np.int64)
        return self.graph.profile(least)


def _peaks(profile: Ints) -> list[int]:
    """Times of the local maxima of the use, the largest first; of a plateau its first."""
    rises = np.flatnonzero(np.diff(np.concatenate([[-1], profile])) > 0)
    falls = np.flatnonzero(np.diff(np.concatenate([profile, [-1]])) < 0)
    tops = rises[np.unique(np.searchsorted(rises, falls, side="right") - 1)] if len(rises) else rises
    return [int(t) for t in tops[np.argsort(-profile[tops], kind="stable")]]


def _living(graph: ChoiceGraph, times: Sequence[int]) -> Ints:
    """How often each node's usage counts at each of these times, int64[times, nodes]."""
    node = np.repeat(np.arange(graph.size), np.diff(graph.interval_offsets))
    counts = np.zeros((len(times), graph.size), dtype=np.int64)
    for i, t in enumerate(times):
        there = (graph.intervals[:, 0] <= t) & (t < graph.intervals[:, 1])
        counts[i] = np.bincount(node[there], minlength=graph.size)
    return counts


def narrowed(
    graph: ChoiceGraph,
    allowed: Mapping[int, Bools],
    *,
    costs: Ints | None = None,
    times: Sequence[int] | None = None,
    dropped: Collection[int] = (),
    tables: tuple[Ints, ...] | None = None,
) -> ChoiceGraph:
    """The graph with what masks leave of it.

    Args:
        allowed: strategies by node.
        costs: in place of the graph's; what is forbidden stays so.
        times: the only ones that count; all where None.
        dropped: edges to leave out.
        tables: in place of the graph's.
    """
    own = graph.costs if costs is None else np.where(graph.costs >= FORBIDDEN, FORBIDDEN, costs)
    own = own.copy()
    for v, mask in allowed.items():
        own[graph.offsets[v] : graph.offsets[v + 1]][~mask] = FORBIDDEN
    keep = np.ones(len(graph.edges), dtype=bool)
    keep[list(dropped)] = False
    found = replace(
        graph, costs=own, edges=graph.edges[keep], edge_tables=graph.edge_tables[keep], tables=graph.tables if tables is None else tables
    )
    if times is None:
        return found
    counts = _living(graph, times).T  # [nodes, times]
    points = np.repeat(np.tile(np.arange(len(times)), graph.size), counts.ravel())
    return replace(
        found,
        interval_offsets=np.concatenate([[0], np.cumsum(counts.sum(axis=1))]).astype(np.int64),
        intervals=np.stack([points, points + 1], axis=1).astype(np.int64).reshape(-1, 2),
    )


_ALIVE, _ALWAYS = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """What arc consistency leaves: the strategies of every node; or, where ``core`` is not None, nothing, because of these constraints."""

    alive: list[Bools]
    core: tuple[int, ...] | None = None


class ExplainedArcs:
    """Arc consistency that remembers why: made once without any constraint, and then from there for each set of them.

    A strategy goes when a kept constraint's mask forbids it, or when a kept edge leaves it without a partner. Each remembers the one reason
    for which it went, so that an emptied node leads back to the constraints that emptied it: these alone empty it too. That is a conflict,
    though seldom a smallest one, and it costs milliseconds. Not every conflict shows in this way: where nothing is emptied, a search
    decides.
    """

    def __init__(self, graph: ChoiceGraph, constraints: Sequence[Constraint]) -> None:
        self.constraints = constraints
        owner = {e: k for k, constraint in enumerate(constraints) for e in constraint.edges}
        compact: dict[int, tuple[Bools, Ints, Ints] | None] = {}
        arcs: list[Arc] = []
        for e, ((u, v), t) in enumerate(zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True)):
            if t not in compact:
                forbidden = graph.tables[t] >= FORBIDDEN
                compact[t] = None
                if forbidden.any():
                    core, rows, cols = compact_table(forbidden.astype(np.int64))
                    compact[t] = core == 0, rows, cols
            table = compact[t]
            if table is not None:
                arcs.append(Arc(u, v, *table, owner.get(e, -1)))
        self.arcs = Arcs(graph.size, arcs)
        self.alive: list[Bools] = [graph.node_costs(v) < FORBIDDEN for v in range(graph.size)]
        self.never = self.arcs.propagate(self.alive, range(graph.size), owners=()) is not None
        """No assignment even without all constraints."""

    def left(self, kept: Sequence[int]) -> Left:
        """What these constraints leave together."""
        if self.never:
            return Left(self.alive, ())
        alive = [row.copy() for row in self.alive]
        cause = [np.where(row, _ALIVE, _ALWAYS) for row in alive]
        start: list[int] = []
        for k in kept:
            for v, mask in self.constraints[k].allowed.items():
                cause[v][alive[v] & ~mask] = k
                alive[v] &= mask
                start.append(v)
        for v in start:
            if not alive[v].any():
                return Left(alive, self._because(v, cause))
        own = frozenset(kept)
        start += [v for arc in self.arcs.arcs if arc.owner in own for v in (arc.a, arc.b)]

        def remember(w: int, _before: Bools, gone: Bools, number: int) -> None:
            cause[w][gone] = len(self.constraints) + number

        emptied = self.arcs.propagate(alive, dict.fromkeys(start), removed=remember, owners=own)
        return Left(alive, None if emptied is None else self._because(emptied, cause))

    def _because(self, emptied: int, cause: list[Ints]) -> tuple[int, ...]:
        """The constraints that the loss of all of a node's strategies rests on."""
        found: set[int] = set()
        seen = {emptied: np.ones(len(cause[emptied]), dtype=bool)}
        todo = [(emptied, seen[emptied].copy())]
        while todo:
            v, gone = todo.pop()
            for reason in np.unique(cause[v][gone]).tolist():
                if 0 <= reason < len(self.constraints):
                    found.add(reason)
                elif reason >= 0:
                    arc = self.arcs.arcs[reason - len(self.constraints)]
                    found |= {arc.owner} - {-1}
                    allowed, own, theirs, w = arc.seen_from(v)
                    lost = own[gone & (cause[v] == reason)]
                    possible: Bools = np.logical_or.reduce(allowed[lost], axis=0)
                    partners = possible[theirs]  # all of them had gone before
                    known = seen.setdefault(w, np.zeros(len(cause[w]), dtype=bool))
                    fresh = partners & ~known
                    if fresh.any():
                        seen[w] = known | fresh
                        todo.append((w, fresh))
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Whether there is an assignment (None: not decided), and one.

    ``sure``: that rests on more than one solver's word. An assignment is checked in exact integers. That there is none is enumerated
    (labels.py), or CP-SAT's word alone: then it is not sure, and who asks has it proven in another way.
    """

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
        first, second = (
            class_literals(self.model, self.xs[v], lines, count)
            for v, lines, count in ((a, rows, allowed.shape[0]), (b, cols, allowed.shape[1]))
        )
        unless = [] if when is None else [when.negated()]
        for own, theirs, table in ((first, second, allowed), (second, first, allowed.T)):
            for literal, partners in zip(own, table, strict=True):
                if not partners.all():
                    others = [theirs[j] for j in np.flatnonzero(partners).tolist()]
                    self.literals += len(others)
                    self.model.add_bool_or([literal.negated(), *unless, *others])

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
        answer = best_below(problem, None, most_work=min(tuned.IIS_LABEL_WORK, clock.work_left()), over=clock.over)
    except TooMany as many:
        clock.spend(many.work)
    else:
        clock.spend(answer.work)
        return Decision(answer.assignment is not None, answer.assignment)
    program = _Program(problem.sizes.tolist())
    for edge in problem.edges:
        program.support(edge.a, edge.b, edge.core < FORBIDDEN, edge.rows, edge.cols)
    if program.literals > tuned.IIS_LITERALS:
        return Decision(None)
    owner = np.repeat(np.arange(problem.size), problem.sizes)
    added: set[int] = set()
    while not clock.over():
        solver, possible = program.solve(clock, effort, seed)
        if not possible:
            return Decision(possible, sure=False)
        found = np.array([next(i for i, x in enumerate(row) if solver.boolean_value(x)) for row in program.xs], dtype=np.int64)
        profile = problem.profile(found)
        order = np.argsort(-profile, kind="stable")[: tuned.IIS_ROWS].tolist()
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


def core_by_assumptions(
    arcs: ExplainedArcs, kept: Sequence[int], rows: Sequence[Ints], limit: int, clock: Clock, *, effort: float, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Constraints and memory rows that conflict if CP-SAT is right, or None where it finds no conflict.

    Every constraint and every memory row holds only while a literal of its own does; all of these are assumed, and those that CP-SAT needs
    to refute them (``sufficient_assumptions_for_infeasibility``) are returned: a candidate, and not always a smallest one.

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
    for arc in arcs.arcs.arcs:
        if arc.owner < 0 or arc.owner in flags:
            program.support(arc.a, arc.b, arc.allowed, arc.rows, arc.cols, flags.get(arc.owner))
            if program.literals > tuned.IIS_LITERALS:
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
