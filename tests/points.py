"""Random points of choice graphs, and the plans that they stand for: what is true of any plan is tried on these.

>>> point = random_point(lowering.graph, seed=0)
>>> plan = plan_of(lowering, point, costs, options)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.graph.narrowing import Narrowing
from solver_shard.graph.nodes import Lowering
from solver_shard.options import Options
from solver_shard.plan.decode import PlanWriter
from solver_shard.plan.plan import Plan, Provenance

ATTEMPTS = 10
"""Draws of a random point that may end in a dead end."""


def plan_of(lowering: Lowering, point: Sequence[int], costs: CostModel, options: Options, *, source: str = "") -> Plan:
    """The plan that a point of the free choice graph stands for, as the solver's solution becomes one; nothing of it is proven."""
    origin = Provenance(tool="solver-shard", versions={}, command="", date="", source=source)
    writer = PlanWriter(lowering=lowering, costs=costs, cluster=costs.cluster, options=options, origin=origin, relayed=options.relays)
    return writer.build_plan(point)


def random_point(graph: ChoiceGraph, seed: int, fixed: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """One strategy per node, drawn at random node after node; the same seed gives the same point.

    Args:
        fixed: strategies of some nodes, which are kept.

    Raises:
        InternalError: the fixed strategies do not fit together, or every attempt ends in a dead end.
    """
    for attempt in range(ATTEMPTS):
        point = _draw(graph, random.Random(seed if not attempt else f"{seed}, attempt {attempt}"), fixed or {})
        if point is not None:
            return point
    raise InternalError(f"{ATTEMPTS} draws from seed {seed} all end at a node without a strategy that fits; use another seed")


def _draw(graph: ChoiceGraph, draws: random.Random, fixed: Mapping[int, int]) -> tuple[int, ...] | None:
    narrowing = Narrowing(graph)
    if not narrowing.keep({v: np.arange(len(narrowing.left[v])) == strategy for v, strategy in fixed.items()}):
        raise InternalError("the fixed strategies do not fit together")
    for v in range(graph.size):
        options = np.flatnonzero(narrowing.left[v]).tolist()
        if len(options) == 1:
            continue
        draws.shuffle(options)
        if not any(narrowing.only(v, option) for option in options):
            return None
    return tuple(int(np.flatnonzero(narrowing.left[v])[0]) for v in range(graph.size))
