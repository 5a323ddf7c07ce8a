"""Points of a choice graph without the solver: drawn at random, or as near as possible to given decisions.

>>> point = random_point(lowering.graph, seed=0)
>>> plan = plan_of(lowering, point, costs, options)

Arc consistency keeps forbidden pairs out: when the strategies of a node are narrowed, so are those of its neighbours to what
still has a partner, and so on. It is no search, so a draw can end in a dead end; it then starts again from another seed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph
from solver_shard.choice.nodes import Lowering
from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError
from solver_shard.plan.plan import Certificate, Options, Plan, Provenance
from solver_shard.writing import Writer

Masks = dict[int, NDArray[np.bool_]]
"""Node to what is left of its strategies."""

_ATTEMPTS = 10


class Narrowing:
    """What is left of a choice graph while decisions are taken.

    Attributes:
        left: by node, which strategies are left; arc consistent.
    """

    def __init__(self, graph: ChoiceGraph) -> None:
        self.graph = graph
        tables = [table < FORBIDDEN for table in graph.tables]
        self._arcs: list[list[tuple[int, NDArray[np.bool_]]]] = [[] for _ in range(graph.size)]
        for (u, v), table in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
            self._arcs[u].append((v, tables[table]))
            self._arcs[v].append((u, tables[table].T))
        self.left: Masks = {v: graph.node_costs(v) < FORBIDDEN for v in range(graph.size)}
        start = self._spread(self.left, list(self.left))
        if start is None:
            raise InternalError("the choice graph has no point: every strategy of some node is forbidden by its neighbours")
        self.left = start

    def keep(self, masks: Mapping[int, NDArray[np.bool_]]) -> bool:
        """Leave only these strategies of some nodes; False, and nothing is changed, where some node would have none."""
        narrowed = {v: self.left[v] & mask for v, mask in masks.items()}
        if not all(mask.any() for mask in narrowed.values()):
            return False
        spread = self._spread({**self.left, **narrowed}, list(narrowed))
        if spread is None:
            return False
        self.left = spread
        return True

    def only(self, v: int, strategy: int) -> bool:
        """Decide a node."""
        return self.keep({v: np.arange(len(self.left[v])) == strategy})

    def narrowed(self) -> ChoiceGraph:
        """The graph with everything else forbidden."""
        costs = self.graph.costs.copy()
        for v, mask in self.left.items():
            costs[self.graph.offsets[v] : self.graph.offsets[v + 1]][~mask] = FORBIDDEN
        return dataclasses.replace(self.graph, costs=costs)

    def _spread(self, left: Masks, queue: list[int]) -> Masks | None:
        """Arc consistency from the nodes of the queue on; None where a node has nothing left."""
        while queue:
            u = queue.pop()
            for v, table in self._arcs[u]:
                kept = left[v] & table[left[u]].any(axis=0)
                if not kept.any():
                    return None
                if (kept != left[v]).any():
                    left[v] = kept
                    queue.append(v)
        return left


def random_point(graph: ChoiceGraph, seed: int, fixed: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """One strategy per node, drawn at random node after node; the same seed gives the same point.

    Args:
        fixed: strategies of some nodes, which are kept.

    Raises:
        InternalError: the fixed strategies do not fit together, or every attempt ends in a dead end.
    """
    for attempt in range(_ATTEMPTS):
        found = _draw(graph, random.Random(seed if not attempt else f"{seed}, attempt {attempt}"), fixed or {})
        if found is not None:
            return found
    raise InternalError(f"{_ATTEMPTS} draws from seed {seed} all end at a node without a strategy that fits; use another seed")


def _draw(graph: ChoiceGraph, draws: random.Random, fixed: Mapping[int, int]) -> tuple[int, ...] | None:
    narrowing = Narrowing(graph)
    if not narrowing.keep({v: np.arange(len(narrowing.left[v])) == strategy for v, strategy in fixed.items()}):
        raise InternalError("the fixed strategies do not fit together")
    for v in range(graph.size):
        options = np.flatnonzero(narrowing.left[v]).tolist()
        draws.shuffle(options)
        if not any(narrowing.only(v, option) for option in options):
            return None
    return tuple(int(np.flatnonzero(narrowing.left[v])[0]) for v in range(graph.size))


def plan_of(lowering: Lowering, point: Sequence[int], costs: CostModel, options: Options, *, source: str = "") -> Plan:
    """The plan that a point of the free choice graph stands for, as the solver's solution becomes one; nothing of it is proven."""
    origin = Provenance(tool="solver-shard", versions={}, command="", date="", source=source)
    writer = Writer(
        program=lowering.program,
        lowering=lowering,
        costs=costs,
        cluster=costs.cluster,
        options=options,
        origin=origin,
        relayed=options.relays,
    )
    parts = writer.parts(point)
    unproven = Certificate(objective=parts.costs.objective, bound=0, gap=1.0, status="feasible", problem="free", seed=0, work=0)
    return writer.made(parts, unproven)
