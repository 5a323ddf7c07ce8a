"""Why there is no solution: a minimal set of constraints and memory times that conflict, and what dropping each would give.

    conflict = find_conflict(graph, pins, time_limit=30)
    [pins[k].name for k in conflict.constraints], conflict.times      # together impossible; without any one of them possible
    without(graph, pins, k, time_limit=30)                            # the best solution that keeps all other constraints
    least_bytes(graph, pins, conflict, t, time_limit=30)              # what time t needs, all else of the conflict kept

The graph is the one without the constraints, which are masks on its nodes (:class:`Constraint`). A memory time of a conflict is a time at
which the limit has to hold; at all others it does not matter to the conflict.

**How.** Whether a set of constraints and times is possible is asked of four methods, the cheapest first: arc consistency
(``solve.arcs``), the least use of what it leaves, a search on the presolved graph (``solve.feasible``), and the solver, whose dual proves
what needs much memory. Costs do not matter, so presolve leaves little. A single time is asked otherwise: its bytes are the costs, and
nothing is limited, which message passing and elimination solve exactly in most cases.

**What the proof rests on.** That a set is possible rests on an assignment, which is checked against the graph. That it is not rests on
exact integers (arcs, least use, labels), or on the solver, whose bounds rest on more than one program's word (``solve.kernel``); CP-SAT's
word that there is none only makes the solver look. What assumption literals blame is a candidate: it is asked again. So is, last of all,
every conflict before it is returned: it is impossible, and without any one of its elements possible, or it does not say ``minimal``.

Times are added as they are broken. What is then known to conflict is made smaller by the reasons of arc consistency or by assumption
literals, and minimal by deletion: what is still impossible without one element needs that element no more. Constraints are tried before
times: where memory is too small for every plan, no constraint is blamed. If a question is not decided within the limits, its element
stays, and the conflict says that it may not be minimal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints
from solver_shard.errors import InternalError
from solver_shard.solve.arcs import Arcs, Constraint
from solver_shard.solve.clock import Clock
from solver_shard.solve.engine import clock_of, solve
from solver_shard.solve.feasible import blamed, decide
from solver_shard.solve.presolve import NoAssignment, presolve
from solver_shard.solve.problem import from_graph
from solver_shard.solve.solution import Solution, Status
from solver_shard.solve.spans import Bools

__all__ = ["Conflict", "Constraint", "find_conflict", "least_bytes", "masks", "narrowed", "without"]

EFFORT = 2.0
"""Work units of one question to CP-SAT; what it leaves open the solver is asked."""

SHARE = 0.3
"""Of the time and work that are left: what one question to the solver may take."""

TIMES_AT_A_TIME = 3
SINGLE_TIMES = 4
"""How many times are asked alone before several are taken together."""

BLAME = 6
"""Elements from which on assumption literals are worth their program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """What cannot be had together.

    Attributes:
        constraints: positions of the constraints, ascending.
        times: times of the graph at which its limit cannot be kept with them, ascending; none where memory does not matter.
        minimal: proven that every one of them is needed: without it, the others are possible.
    """

    constraints: tuple[int, ...]
    times: tuple[int, ...] = ()
    minimal: bool = True


def find_conflict(
    graph: ChoiceGraph,
    constraints: Sequence[Constraint],
    *,
    times: Sequence[int] = (),
    time_limit: float | None = 60.0,
    work_limit: float | None = None,
    seed: int = 0,
    clock: Clock | None = None,
) -> Conflict | None:
    """A minimal conflict of the constraints and the graph's limit; None where none is found: there is a solution, or limits struck.

    Args:
        graph: without the constraints.
        constraints: what may be dropped.
        times: where memory is likely to be short; asked first.
        time_limit, work_limit: of everything together; without a time limit that strikes, the same graph and work limit give the same.
        seed: of random choices.
        clock: in place of the two limits, where this is a part of something larger.
    """
    return _Question(graph, constraints, clock or clock_of(time_limit, work_limit), seed).run(tuple(times))


def without(
    graph: ChoiceGraph,
    constraints: Sequence[Constraint],
    dropped: int,
    *,
    gap: float = 1e-4,
    time_limit: float | None = 60.0,
    work_limit: float | None = None,
    seed: int = 0,
) -> Solution:
    """The price of dropping one constraint: the best solution that keeps all others.

    Where that is infeasible too, it is the one of least peak, with the bound on any's, as ``engine.solve`` gives it.
    """
    kept = [constraint for k, constraint in enumerate(constraints) if k != dropped]
    narrow = narrowed(graph, masks(kept), dropped=constraints[dropped].edges)
    return solve(narrow, gap=gap, time_limit=time_limit, work_limit=work_limit, seed=seed)


def least_bytes(
    graph: ChoiceGraph,
    constraints: Sequence[Constraint],
    conflict: Conflict,
    time: int,
    *,
    gap: float = 0.0,
    time_limit: float | None = 60.0,
    work_limit: float | None = None,
    seed: int = 0,
    clock: Clock | None = None,
) -> tuple[int | None, int]:
    """The price of dropping one time of a conflict: (bytes found, bytes proven) that are in use then at least.

    The conflict's constraints and the limit at its other times are kept.
    """
    question = _Question(graph, constraints, clock or clock_of(time_limit, work_limit), seed)
    found = question.bytes_at(conflict.constraints, time, [t for t in conflict.times if t != time], gap)
    return found.objective, found.bound or 0


def masks(constraints: Sequence[Constraint]) -> dict[int, Bools]:
    """What constraints leave of each node's strategies together."""
    found: dict[int, Bools] = {}
    for constraint in constraints:
        for v, mask in constraint.allowed.items():
            found[v] = found[v] & mask if v in found else mask
    return found


class _Question:
    """One call: questions about sets of constraints and times."""

    def __init__(self, graph: ChoiceGraph, constraints: Sequence[Constraint], clock: Clock, seed: int) -> None:
        self.graph, self.constraints, self.clock, self.seed = graph, constraints, clock, seed
        self.arcs = Arcs(graph, constraints)
        self._answers: dict[tuple[frozenset[int], frozenset[int]], tuple[bool | None, Ints | None]] = {}
        self._plain = tuple(np.where(table >= FORBIDDEN, FORBIDDEN, 0) for table in graph.tables)

    def run(self, likely: tuple[int, ...]) -> Conflict | None:
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
        return Conflict(constraints=tuple(sorted(kept)), times=tuple(sorted(times)), minimal=self._minimal(kept, times))

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
        return solve(narrow, gap=gap, seed=self.seed, clock=self.clock.part(time_share=SHARE, work=self._part()))

    def _searched(self, kept: Sequence[int], times: Sequence[int]) -> tuple[bool | None, Ints | None]:
        """CP-SAT on the presolved graph, then the solver."""
        nothing = np.zeros_like(self.graph.costs)
        narrow = narrowed(self.graph, self._masks(kept), costs=nothing, times=times, dropped=self._dropped(kept), tables=self._plain)
        problem, order = from_graph(narrow, limit=self.graph.limit if times else None, memory_counts=bool(times))
        try:
            small, undo = presolve(problem, stop=self.clock.over)
        except NoAssignment:
            return False, None
        self.clock.spend(1e-3 * problem.size)
        decision = decide(small, self.clock, effort=EFFORT, seed=self.seed)
        if decision.assignment is not None:
            found = np.empty_like(order)
            found[order] = undo.restore(decision.assignment)
            return True, found
        if decision.sure and decision.possible is not None:
            return decision.possible, None
        if self.clock.over():
            return None, None
        if not times:
            narrow = replace(narrow, limit=None)
        solution = solve(narrow, gap=0.0, seed=self.seed, clock=self.clock.part(time_share=SHARE, work=self._part()))
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
            for t in [*alone, *broken][: max(0, SINGLE_TIMES - asked)]:
                asked += 1
                possible, _ = self.possible(kept, [t])
                if possible is False:
                    return [t]
            times += dict.fromkeys([*alone, *broken[:TIMES_AT_A_TIME]])
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
        if len(kept) + len(times) < BLAME:
            return kept, times
        rows = [self._use(t) for t in times]
        limit = self.graph.limit if self.graph.limit is not None else 0
        found = blamed(self.arcs, kept, rows, limit, self.clock, effort=EFFORT, seed=self.seed)
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
        return None if left == float("inf") else left * SHARE

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
