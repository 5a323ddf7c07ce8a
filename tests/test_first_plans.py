"""A plan stands early, and no solve ends without one where a template has one."""

from __future__ import annotations

import numpy as np
import pytest
import small_models

import solver_shard
import solver_shard.pipeline
from solver_shard import Mesh, load_cluster
from solver_shard.baselines.candidates import Candidate, candidates
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.build import lower_program
from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.graph.narrowing import eased, shrink
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.templates import restrictions
from solver_shard.graph.transient_memory import Transients
from solver_shard.options import Options
from solver_shard.program import Program
from solver_shard.tracing.load import program_of

MODELS = ("unet", "sparse mixture")


def program_named(name: str) -> Program:
    return program_of(*small_models.make(name))[0]


def templates_of(program: Program, mesh: str) -> list[Candidate]:
    """Every template's cheapest plan without a limit."""
    lowered = lower_program(program, mesh=Mesh.parse(mesh), cluster=load_cluster("h100"), options=Options(memory_limit=1 << 40, reserve=0))
    problem = Transients(lowered.lowering, lowered.costs, node_classes(lowered.lowering))
    made = restrictions(lowered.program, lowered.mesh)
    plans = candidates(problem, made, objective="time", memory_weight=0, gap=0.01, seed=0, ease=True)
    return [plan for _, plan in plans if plan is not None]


@pytest.mark.parametrize("name", MODELS)
def test_no_solve_ends_without_a_plan_where_a_template_has_one(name: str) -> None:
    program = program_named(name)
    peaks = sorted(plan.peak for plan in templates_of(program, "dp=2,tp=2"))
    assert peaks
    for limit in {peaks[0], peaks[len(peaks) // 2], peaks[-1]}:
        plan = solver_shard.optimize(program, mesh="dp=2,tp=2", memory=limit, reserve=0, time_limit=1e-3)
        assert plan.memory.peak <= limit


def test_the_caller_has_a_template_s_plan_before_the_search_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    program, given = program_named("attention"), list[int]()
    limit = max(plan.peak for plan in templates_of(program, "dp=2,tp=2"))
    monkeypatch.setattr(solver_shard.pipeline, "MANY", 0)
    monkeypatch.setattr(solver_shard.pipeline, "FIRST_INCUMBENT", 1e9)  # the search itself hands on nothing
    plan = solver_shard.optimize(
        program, mesh="dp=2,tp=2", memory=limit, reserve=0, incumbent=lambda plan: given.append(plan.costs.total_ns)
    )
    assert len(given) == 1
    assert plan.costs.total_ns <= given[0]


def test_a_pattern_is_kept_but_for_what_is_around_a_dead_end() -> None:
    nodes, table = 12, np.zeros((2, 2), dtype=np.int64)
    costs = np.zeros(2 * nodes, dtype=np.int64)
    costs[-1] = FORBIDDEN  # the last one cannot be cut
    graph = ChoiceGraph(
        names=tuple(f"tensor {v}" for v in range(nodes)),
        offsets=2 * np.arange(nodes + 1),
        costs=costs,
        usages=np.zeros(2 * nodes, dtype=np.int64),
        interval_offsets=np.arange(nodes + 1),
        intervals=np.zeros((nodes, 2), dtype=np.int64),
        edges=np.stack([np.arange(nodes - 1), np.arange(1, nodes)], axis=1),
        edge_tables=np.zeros(nodes - 1, dtype=np.int64),
        tables=(table,),
    )
    masks, same = {0: np.array([False, True])}, np.eye(2, dtype=bool)
    pairs = {(v, v + 1): same for v in range(nodes - 1)}
    assert shrink(graph, masks, pairs) is None
    kept = eased(graph, masks, pairs)
    assert kept is not None
    assert nodes - 1 - len(kept) <= 2
    small = shrink(graph, masks, kept)
    assert small is not None
    assert small.kept[0].tolist() == [1]
    assert eased(graph, {nodes - 1: np.array([False, True])}, pairs) is None  # no pattern is at fault there
