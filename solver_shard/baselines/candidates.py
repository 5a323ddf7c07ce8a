"""The plans that experts write, as points of a choice graph that was lowered without them: all that can be had, each at its least cost.

A template (:mod:`solver_shard.graph.templates`) forbids layouts of what is stored, and transitions. In a graph that was lowered
without it these are strategies and pairs of strategies; without them it is the graph that the template is lowered to, so its best plan has
the same price. Nothing is lowered again, and what is left of the graph is small (:mod:`solver_shard.graph.narrowing`).

    made = restrictions(program, costs.mesh)
    for name, plan in candidates(problem, made, ...):
        ...                                     # the all-replicated plan first

The optimum of a template without the memory limit, if it keeps the limit with all that its transitions hold, is taken; else the best one
that the solver finds within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from solver_shard.graph.choice_graph import Bools, ChoiceGraph, Ints
from solver_shard.graph.liveness import ACCUMULATE, UPDATE
from solver_shard.graph.narrowing import Shrunk, eased, shrink
from solver_shard.graph.nodes import PRODUCED, AccumulatorNode, HoldNode, Lowering, SourceNode, StateNode, TensorNode, group_of
from solver_shard.graph.templates import TemplateRestriction
from solver_shard.graph.transient_memory import Transients
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import Solution, objective_value, relative_gap

WORK, NODES = 1.0, 4e-3
"""Work units for one plan, and for each of its nodes: nearly all is decided, and what is left falls apart when it was presolved."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A plan within the memory limit: an assignment of the lowered graph, with its cost and its true peak.

    ``found`` is what is proven of it among the plans of its template.
    """

    assignment: Ints
    cost: int
    peak: int
    objective: int
    found: Solution

    @property
    def solution(self) -> Solution:
        """The plan as a solution of the graph that was lowered, with what is proven among the plans of its template."""
        bound = min(self.found.bound or 0, self.objective)
        return replace(
            self.found,
            assignment=tuple(self.assignment.tolist()),
            cost=self.cost,
            peak=self.peak,
            objective=self.objective,
            bound=bound,
            gap=relative_gap(self.objective, bound),
        )


def candidates(
    problem: Transients,
    made: Mapping[str, TemplateRestriction],
    *,
    objective: str,
    memory_weight: int,
    gap: float,
    seed: int,
    worth: Callable[[str, int], bool] = lambda name, objective: True,
    order: Callable[[str], tuple[int, ...]] = lambda name: (),
    ease: bool = False,
) -> Iterator[tuple[str, Candidate | None]]:
    """Every template by name, and its plan; None where it has none within the memory limit. One after the other, as they are asked for.

    Args:
        problem: tied or free, to which nothing was added yet.
        made: the templates (``templates.restrictions``).
        worth: whether a plan of this template with this objective is of use; those that have none are left out.
        order: which templates come first; all replicated does by default.
        ease: whether a template that is none of this graph is had but for the transitions around its dead ends.
    """
    graph = problem.graph
    for name in sorted(made, key=order):
        masks, pairs = narrowing(problem, made[name])
        small = shrink(graph, masks, pairs)
        if small is None and ease and (rest := eased(graph, masks, pairs)) is not None:
            small = shrink(graph, masks, rest)
        if small is None or (graph.limit is not None and _least(small.graph) > graph.limit):
            yield name, None
        elif worth(name, _floor(small.graph, objective)):
            found = completed(small.graph, objective=objective, memory_weight=memory_weight, gap=gap, seed=seed)
            yield name, within(problem, small, found, objective, memory_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of a template.

    Attributes:
        name, kind: as ``TemplateRestriction.kind``.
        plan: the best within the memory limit, or, where there is none, the best without it; None where it has none, or none that could be
            faster than another of its kind.
        fits: whether that is within the limit.
        least: the plan of smallest peak, where the best without a limit does not fit.
    """

    name: str
    kind: tuple[str, ...]
    plan: Candidate | None = None
    fits: bool = False
    least: Candidate | None = None


def try_all(problem: Transients, limit: int, made: Mapping[str, TemplateRestriction], *, gap: float, seed: int) -> tuple[Tried, ...]:
    """What comes of each template: its fastest plan within so many bytes, as far as it may be the fastest of its kind.

    ``problem`` has no memory limit; what does not keep this one is solved again for the smallest peak, and, if that does, within it.
    """
    known: dict[str, Tried] = {name: Tried(name=name, kind=template.kind) for name, template in made.items()}
    fastest: dict[tuple[str, ...], int] = {}

    def note(name: str, **more: object) -> None:
        known[name] = found = replace(known[name], **more)  # type: ignore[arg-type]
        if found.fits and found.plan is not None:
            fastest[found.kind] = min(found.plan.objective, fastest.get(found.kind, found.plan.objective))

    def worth(name: str, objective: int) -> bool:
        return objective < fastest.get(known[name].kind, objective + 1)

    for name, plan in candidates(problem, made, objective="time", memory_weight=0, gap=gap, seed=seed, worth=worth):
        note(name, plan=plan, fits=plan is not None and plan.peak <= limit)
    above = {name: made[name] for name, t in known.items() if t.plan is not None and not t.fits and worth(name, t.plan.objective)}
    for name, plan in candidates(problem, above, objective="memory", memory_weight=0, gap=gap, seed=seed):
        note(name, least=plan)
    below = {name: made[name] for name in above if (least := known[name].least) is not None and least.peak <= limit}
    if below:
        lowering = replace(problem.lowering, graph=replace(problem.lowering.graph, limit=limit))
        tight = Transients(lowering, problem.costs, problem.classes)
        for name, plan in candidates(tight, below, objective="time", memory_weight=0, gap=gap, seed=seed, worth=worth):
            if plan is not None:
                note(name, plan=plan, fits=True)
    return tuple(known.values())


def within(problem: Transients, small: Shrunk, found: Solution, objective: str, memory_weight: int) -> Candidate | None:
    """The plan of a solution, if it keeps the limit with all that its transitions hold."""
    if not found.feasible or found.assignment is None or found.cost is None:
        return None
    assignment = small.restore(np.array(found.assignment, dtype=np.int64))
    peak = problem.peak(assignment)
    if problem.graph.limit is not None and peak > problem.graph.limit:
        return None
    value = objective_value(objective, memory_weight, found.cost, peak)
    return Candidate(assignment=problem.plain(assignment), cost=found.cost, peak=peak, objective=value, found=found)


def completed(graph: ChoiceGraph, *, objective: str, memory_weight: int, gap: float, seed: int) -> Solution:
    """The best plan of a graph in which little is left to decide, in a little work."""
    work = WORK + NODES * graph.size
    return solve(graph, objective=objective, memory_weight=memory_weight, gap=gap, time_limit=None, work_limit=work, seed=seed)


def narrowing(problem: Transients, template: TemplateRestriction) -> tuple[dict[int, Bools], dict[tuple[int, int], Bools]]:
    """What a template leaves of the problem's graph: strategies by node, and pairs of strategies by two nodes that have an edge.

    Copies of a repeated layer are restricted as the first of them.
    """
    lowering, count = problem.lowering, problem.lowering.graph.size
    member = np.arange(count) if problem.folded is None else problem.folded.member[:count]
    masks: dict[int, Bools] = {}
    for c, v in enumerate(np.unique(member, return_index=True)[1].tolist()):
        node = lowering.nodes[v]
        if isinstance(node, HoldNode):
            if not template.keeps_copies(node.tensor):
                masks[c] = np.array(node.origins) == PRODUCED
        elif isinstance(node, (SourceNode, StateNode, AccumulatorNode)):
            stored = {SourceNode: template.source, StateNode: template.state, AccumulatorNode: template.accumulator}[type(node)]
            masks[c] = np.array([stored(node.tensor, layout) for layout in node.layouts], dtype=bool)
    pairs: dict[tuple[int, int], Bools] = {}
    edges = set(map(tuple, problem.graph.edges.tolist()))
    known: dict[object, Bools] = {}
    for move in problem.moves:
        a, b = int(member[move.start]), int(member[move.stop])
        if (a, b) in pairs or (b, a) in pairs:
            continue
        start, stop = lowering.tensor_node(move.start), lowering.tensor_node(move.stop)
        scope = template.scope(start.tensor, _purpose(lowering, start, stop))
        key = (scope, start.layouts, stop.layouts, move.aliases, (a, b) in edges)
        if key not in known:
            allowed = template.moves(scope, start.layouts, stop.layouts)
            allowed[:, : move.aliases] = True
            known[key] = allowed if (a, b) in edges else np.ascontiguousarray(allowed.T)
        pairs[(a, b) if (a, b) in edges else (b, a)] = known[key]
    return masks, pairs


def _purpose(lowering: Lowering, start: TensorNode, stop: TensorNode) -> str:
    """What a transition is for, as scopes of templates call it."""
    if isinstance(start, StateNode):
        return UPDATE
    group = group_of(stop, lowering.lives)
    return ACCUMULATE if group is None else group.purpose


def _least(graph: ChoiceGraph) -> int:
    """No assignment has a smaller peak: every node at its smallest usage."""
    return graph.peak([int(graph.node_usages(v).argmin()) for v in range(graph.size)])


def _floor(graph: ChoiceGraph, objective: str) -> int:
    """No assignment has a smaller objective: every node and every edge at its smallest cost, or usage."""
    if objective == "memory":
        return _least(graph)
    tables = [int(table.min()) for table in graph.tables]
    edges: list[int] = [tables[k] for k in graph.edge_tables.tolist()]
    nodes: list[int] = np.minimum.reduceat(graph.costs, graph.offsets[:-1]).tolist() if graph.size else []
    return sum(nodes) + sum(edges)
