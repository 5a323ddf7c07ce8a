"""Greedy baselines as hints of the solver, and as what is returned when it stops before it has found anything better."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest
from dtensor_models import MODELS, inputs_of

from solver_shard.baselines import dijkstra_greedy, dtensor_greedy
from solver_shard.baselines import hints as fallback
from solver_shard.baselines.hints import hints, middles, origin, with_baselines
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.graph.choice_graph import WarmStart
from solver_shard.graph.lowering import lower
from solver_shard.graph.nodes import Lowering, SourceNode
from solver_shard.graph.symmetry import fold
from solver_shard.graph.templates import warm_starts
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.io import plan_from_json, plan_to_json
from solver_shard.rules.rulebook import Rulebook
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import Event, Solution, Stage, Status
from solver_shard.tracing.clean import TracedProgram, clean_with_values
from solver_shard.tracing.torch import trace_raw

pytestmark = pytest.mark.usefixtures("one_thread")

PASSES = {"basic", "aggressive", "op-priority", "user-priority"}
LIMIT = 2**30
MESH = Mesh.parse("2,2")


@functools.cache
def traced(name: str) -> TracedProgram:
    model = MODELS[name]()
    return clean_with_values(trace_raw(model, inputs_of(model), name=name, loss_fn=lambda output: (output**2).mean()))


@functools.cache
def lowered(name: str, limit: int = LIMIT) -> tuple[Lowering, CostModel]:
    costs = CostModel(MESH, load_cluster("h100"))
    state = Options(memory_limit=limit).optimizer_state()
    return lower(traced(name).program, Rulebook(), costs, optimizer_state=state, limit=limit), costs


@pytest.mark.parametrize("name", ["mlp"])
def test_every_greedy_baseline_is_a_hint_that_can_be_completed(name: str) -> None:
    lowering, costs = lowered(name)
    found = hints(lowering, costs, Rulebook(), {}, traced(name))
    assert {word for names in found for word in names.split(", ")} == {dtensor_greedy.NAME, dijkstra_greedy.NAME, *PASSES}
    source = next(
        v for v, node in enumerate(lowering.nodes) if isinstance(node, SourceNode) and traced(name).program.tensors[node.tensor].name == "x"
    )
    starts = warm_starts(lowering, None, MESH, found)
    assert [start.name for start in starts[: len(found)]] == list(found)
    best = solve(lowering.graph)
    assert best.objective is not None
    for start in starts[: len(found)]:
        (kept,) = [layout for layout, here in zip(lowering.nodes[source].layouts, start.allowed[source], strict=True) if here]
        assert kept == Layout.parse("S(0)S(0)")
        made = fallback._completed(Transients(lowering, costs), lowering.graph, start, "time", 0, 0, best)
        assert made is not None, start.name
        assert made.objective is not None
        assert made.objective >= best.objective * (1 - 1e-4)
        assert all(start.allowed[v][made.assignment[v]] for v in start.allowed if made.assignment)


def test_without_the_trace_there_is_no_hint_of_dtensors() -> None:
    lowering, costs = lowered("mlp")
    assert dtensor_greedy.NAME not in ", ".join(hints(lowering, costs, Rulebook(), {}))


def test_a_hint_restricts_only_the_nodes_that_are_asked_for() -> None:
    lowering, costs = lowered("mlp")
    assert middles(None) is None
    assert middles(fold(lowering.graph, np.arange(lowering.graph.size))) == frozenset(range(lowering.graph.size))
    nodes = frozenset(range(0, lowering.graph.size, 2))
    for masks in hints(lowering, costs, Rulebook(), {}, None, nodes).values():
        assert masks
        assert set(masks) <= nodes


@pytest.mark.parametrize("name", ["mlp"])
def test_a_plan_that_was_stopped_early_is_never_dearer_than_a_baseline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "LEAST", 1e9)  # however busy the machine is
    options = Options(memory_limit=LIMIT, time_limit=1e-6, tied=False)
    plan = plan_program(traced(name).program, mesh=MESH, cluster=load_cluster("h100"), options=options, traced=traced(name))
    lowering, costs = lowered(name)
    problem, nothing = Transients(lowering, costs), Solution(status=Status.UNKNOWN)
    starts = warm_starts(lowering, None, MESH, hints(lowering, costs, Rulebook(), {}, traced(name)))
    values = {}
    for start in starts:
        made = fallback._completed(problem, problem.graph, start, "time", 0, 0, nothing)
        if made is not None:
            values[start.name] = made.objective
    assert plan.certificate.status == "feasible"
    assert plan.certificate.objective == min(values.values())
    assert plan.certificate.baseline in values
    assert values[plan.certificate.baseline] == plan.certificate.objective
    assert 0 <= plan.certificate.bound <= plan.certificate.objective
    assert re.search(r"this is the plan of the baselines? [^:]*: the solver stopped before it found a better one", str(plan))
    assert plan_from_json(plan_to_json(plan)).certificate == plan.certificate
    found = evaluate(plan, traced(name).program, Rulebook(), CostModel(MESH, load_cluster("h100")))
    assert (found.objective, found.peak) == (plan.certificate.objective, plan.memory.peak)


def test_where_the_solver_has_found_nothing_within_the_limit_the_cheapest_baseline_is_returned() -> None:
    limit = 40_000  # the solver's first plan needs more, a fully sharded one does not
    options = Options(memory_limit=limit, time_limit=1e-6, tied=False)
    plan = plan_program(traced("mlp").program, mesh=MESH, cluster=load_cluster("h100"), options=options, traced=traced("mlp"))
    assert plan.memory.peak <= limit
    assert plan.certificate.baseline is not None
    assert plan.certificate.status == "feasible"
    assert plan.certificate.stages["solve: baselines"] >= 0


def test_a_proven_plan_is_nobodys_but_the_solvers() -> None:
    lowering, costs = lowered("mlp")
    problem = Transients(lowering, costs)
    found = solve(lowering.graph)
    starts = warm_starts(lowering, None, MESH)
    assert found.status in (Status.OPTIMAL, Status.GAP)
    assert with_baselines(found, problem, problem.graph, starts, objective="time", memory_weight=0, seed=0, seconds=9.0) == (found, None)


def test_baselines_that_the_search_has_completed_are_not_completed_again() -> None:
    lowering, costs = lowered("mlp")
    problem = Transients(lowering, costs)
    best = solve(lowering.graph)
    start = WarmStart(name="replicate", allowed={})
    dear = dataclasses.replace(best, status=Status.FEASIBLE, objective=10**9, history=(), stages=())
    again = dataclasses.replace(dear, stages=(Stage(name="warm start replicate", seconds=0.0, note="objective 7"),))
    without = dataclasses.replace(dear, stages=(Stage(name="warm start replicate", seconds=0.0, note="objective None"),))

    def run(found: Solution) -> str | None:
        return with_baselines(found, problem, problem.graph, (start,), objective="time", memory_weight=0, seed=0, seconds=9.0)[1]

    assert (run(dear), run(without), run(again)) == ("replicate", "replicate", None)


def test_a_plan_that_the_search_took_from_a_baseline_is_named_for_it() -> None:
    def solution(*sources: str) -> Solution:
        events = tuple(Event(seconds=0.0, work=0.0, objective=9 - k, bound=1, source=s) for k, s in enumerate(sources))
        return Solution(status=Status.FEASIBLE, history=events)

    assert origin(solution("messages", "warm start basic, aggressive, messages")) == "basic, aggressive"
    assert origin(solution("warm start megatron, messages", "annealing")) is None
    assert origin(solution()) is None
