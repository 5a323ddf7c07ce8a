"""The evaluator agrees with the choice graph to the integer on every plan, and refuses plans that are not legal."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from lowered import agrees, lowered, random_assignment, replicated
from programs import mlp, trained_mlp

from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout, strided
from solver_shard.mesh import Mesh
from solver_shard.plan import evaluate as evaluate_module
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.solve.engine import solve, solve_in_rounds

PROGRAMS = [mlp(16, 32, 64, 2), trained_mlp(12, 8, 20, 2), trained_mlp(13, 7, 23, 1)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.name} {len(p.ops)}")
@pytest.mark.parametrize("mesh", ["2", "2,2", "4,2", "2,1,3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": 0.37, "memory_weight": 1000},
        {"overlap": 1.0, "objective": "memory", "optimizer": "sgd", "cluster": "ethernet"},
        {"master_weights": False, "state_bytes": 3},
        {"fusion": True, "overlap": 0.5},
        {"microbatches": 3, "overlap": 0.5, "memory_weight": 1000},
        {"microbatches": 2, "reduce_dtype": "bf16", "clip": True, "fusion": True},
        {"reduce_dtype": "bf16", "clip": True, "overlap": 0.3},
        {"microbatches": 4, "optimizer": "none", "reduce_dtype": "f16"},
    ],
    ids=["time", "weighted", "memory", "state", "fusion", "accumulated", "accumulated, clipped", "reduced, clipped", "no update"],
)
def test_random_plans_cost_what_the_choice_graph_says(program: Program, mesh: str, options: dict[str, Any]) -> None:
    case = lowered(program, mesh, **options)
    for seed in range(4):
        agrees(case, random_assignment(case.graph, seed))


@pytest.mark.parametrize(("objective", "share"), [("time", None), ("time", 0.9), ("time", 0.6), ("memory", None)])
def test_solved_plans_cost_what_the_certificate_says(objective: str, share: float | None) -> None:
    program = trained_mlp(64, 32, 64, 1)
    limit = 2**40
    if share is not None:
        least = solve(lowered(program, "2,2").graph, objective="memory", time_limit=20)
        loose = solve(lowered(program, "2,2").graph, time_limit=20)
        assert least.peak is not None
        assert loose.peak is not None
        limit = int(least.peak + (1 - share) * (loose.peak - least.peak))
    case = lowered(program, "2,2", objective=objective, limit=limit)
    solution = solve_in_rounds(Transients(case.lowering, case.costs), objective=objective, time_limit=20)
    assert solution.assignment is not None
    agrees(case, solution.assignment)
    found = case.evaluate(case.plan(solution.assignment))
    assert (found.objective, found.peak) == (solution.objective, solution.peak)
    assert found.peak <= limit


@pytest.mark.parametrize(
    ("program", "mesh"), [(PROGRAMS[1], "2,2"), (PROGRAMS[2], "3,2"), (PROGRAMS[1], "2,2,2"), (PROGRAMS[1], "a=2,b=2x2")]
)
def test_weights_states_and_gradients_in_another_order_cost_what_the_choice_graph_says(program: Program, mesh: str) -> None:
    """Every weight and gradient that is long enough is stored in another order, once the wider, once the longer dim."""
    other = {t: lambda layout: any(p.is_strided for p in layout) for t in program.gradients}
    other |= {g: lambda layout: any(p.is_strided for p in layout) for g in program.gradients.values()}
    case = lowered(program, mesh, overlap=0.25, pins=other)
    for seed in range(4):
        plan = agrees(case, random_assignment(case.graph, seed))
        for parameter, gradient in program.gradients.items():
            assert any(p.is_strided for p in plan.tensors[parameter].layout)
            assert any(p.is_strided for p in plan.tensors[gradient].layout)


def _with_op(plan: Plan, i: int, **changes: Any) -> Plan:
    ops = list(plan.ops)
    ops[i] = dataclasses.replace(ops[i], **changes)
    return dataclasses.replace(plan, ops=tuple(ops))


def _with_reshard(plan: Plan, which: str | int, **changes: Any) -> Plan:
    reshards = list(plan.reshards)
    k = which if isinstance(which, int) else next(k for k, r in enumerate(reshards) if r.purpose == which)
    reshards[k] = dataclasses.replace(reshards[k], **changes)
    return dataclasses.replace(plan, reshards=tuple(reshards))


def _with_source(plan: Plan, layout: str, role: str = "parameter") -> Plan:
    tensors = list(plan.tensors)
    k = next(k for k, t in enumerate(tensors) if t.role == role)
    tensors[k] = dataclasses.replace(tensors[k], layout=Layout.parse(layout))
    return dataclasses.replace(plan, tensors=tuple(tensors))


def _with_state(plan: Plan, role: str, layout: str | Layout | None) -> Plan:
    tensors = list(plan.tensors)
    k = next(k for k, t in enumerate(tensors) if t.role == role)
    tensors[k] = dataclasses.replace(tensors[k], state=Layout.parse(layout) if isinstance(layout, str) else layout)
    return dataclasses.replace(plan, tensors=tuple(tensors))


def _position(plan: Plan, purpose: str) -> int:
    """A reshard of the tensor of the first hold."""
    return next(k for k, r in enumerate(plan.reshards) if r.purpose == purpose and r.tensor == plan.holds[0].tensor)


def _with_hold(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, holds=(dataclasses.replace(plan.holds[0], **changes), *plan.holds[1:]))


def _laid(text: str) -> Layout:
    return Layout.parse(text)


ILLEGAL: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "unknown strategy": (
        lambda p: _with_op(p, 0, strategy=("z", "R")),
        r"op 0 \(aten.einsum.default\) has strategy 'z' on axis 'd0'; its rule knows R, ",
    ),
    "operand layout": (
        lambda p: _with_op(p, 0, operand_layouts=(_laid("S(0)R"), _laid("RR"))),
        r"operand 0 has layout S\(0\)R, but its strategies R, R give RR",
    ),
    "result layout": (
        lambda p: _with_op(p, 0, result_layouts=(_laid("S(0)R"),)),
        r"result 0 has layout S\(0\)R, but its strategies R, R give RR",
    ),
    "state of parts that nobody orders": (
        lambda p: _with_state(p, "parameter", Layout((strided(0), _laid("S(1)")[0]))),
        r"state of '0.up': \[20, 8\] cannot have layout _S\(0\)S\(1\)",
    ),
    "input in another order": (lambda p: _with_source(p, "_S(0)S(0)", "input"), r"source 'x': \[12, 8\] cannot have layout _S\(0\)S\(0\)"),
    "activation in another order": (
        lambda p: _with_reshard(p, _position(p, "forward"), layout=_laid("_S(0)S(0)"), copy=True),
        r"but gets .* as _S\(0\)S\(0\), and a device cannot make the one from the other alone",
    ),
    "source in the order of another": (
        lambda p: _with_source(p, "_S(0)S(0)"),
        r"brings the new values to RR, but the parameter is stored as _S\(0\)S\(0\)|starts from RR, but the tensor is produced as _S",
    ),
    "partial source": (lambda p: _with_source(p, "P(sum)R"), "stored with a pending reduction"),
    "source cut too often": (lambda p: _with_source(p, "S(3)R"), r"cannot have layout S\(3\)R on mesh"),
    "reshard from elsewhere": (
        lambda p: _with_reshard(p, "forward", source=_laid("S(0)R")),
        r"starts from S\(0\)R, but the tensor is produced as RR",
    ),
    "no reshard": (lambda p: dataclasses.replace(p, reshards=p.reshards[1:]), "has no reshard for its readers"),
    "two reshards": (lambda p: dataclasses.replace(p, reshards=(*p.reshards, p.reshards[0])), "reshard 0 already serves this group"),
    "other readers": (lambda p: _with_reshard(p, "forward", readers=((0, 0), (1, 0))), "the group has"),
    "other group": (lambda p: _with_reshard(p, "forward", family="all"), "no such group of readers"),
    "gradient less than the state needs": (
        lambda p: _with_reshard(p, "optimizer", layout=_laid("S(0)R"), copy=True),
        r"gives S\(0\)R, of which the optimizer's state of '0.down', RR, is no slice",
    ),
    "copy of nothing": (lambda p: _with_reshard(p, "forward", copy=True), "a copy in the layout it starts from, RR"),
    "alias that moves": (
        lambda p: _with_reshard(p, "optimizer", layout=_laid("S(0)R")),
        "an alias that differs from the layout it starts from, RR",
    ),
    "no state": (lambda p: _with_state(p, "parameter", None), "'0.up' lacks a layout for its optimizer state"),
    "state of an input": (lambda p: _with_state(p, "input", "RR"), "'x' has no optimizer state"),
    "partial state": (lambda p: _with_state(p, "parameter", "RP(sum)"), r"state of '0.up' is stored with a pending reduction, RP\(sum\)"),
    "state cut too often": (lambda p: _with_state(p, "parameter", "S(3)R"), r"state of '0.up': \[20, 8\] cannot have layout S\(3\)R"),
    "update from elsewhere": (lambda p: _with_state(p, "parameter", "S(0)R"), r"starts from RR, but the optimizer's state is S\(0\)R"),
    "update to elsewhere": (lambda p: _with_source(p, "S(0)R"), r"brings the new values to RR, but the parameter is stored as S\(0\)R"),
    "no update": (
        lambda p: dataclasses.replace(p, reshards=tuple(r for r in p.reshards if r.purpose != "update"), holds=()),
        r"'0.up' has no reshard for its readers \(update, update\)",
    ),
    "no hold": (lambda p: dataclasses.replace(p, holds=p.holds[1:]), "is read in the forward pass and again later, but no hold says"),
    "two holds": (lambda p: dataclasses.replace(p, holds=(*p.holds, p.holds[0])), "hold 0 already says what is kept"),
    "hold of a gradient": (
        lambda p: dataclasses.replace(p, holds=(dataclasses.replace(p.holds[0], tensor=p.gradients["0.up"]), *p.holds[1:])),
        r"hold 0 of 'grad\(0.up\)': it has no readers in the forward pass and again later",
    ),
    "hold of another layout": (lambda p: _with_hold(p, layout=_laid("S(0)R")), r"keeps S\(0\)R, but the tensor is produced as RR"),
    "hold of an alias": (lambda p: _with_hold(p, reshard=_position(p, "forward")), "keeps reshard .*, which is no copy of it for forward"),
    "hold of a backward copy": (lambda p: _with_hold(p, reshard=_position(p, "backward")), "which is no copy of it for forward readers"),
    "later readers from elsewhere": (
        lambda p: _with_reshard(p, _position(p, "backward"), source=_laid("S(0)R"), copy=True),
        r"starts from S\(0\)R, but what is kept of the tensor is RR",
    ),
    "other source": (lambda p: _with_reshard(p, "output", source=_laid("RP(sum)")), r"starts from RP\(sum\)"),
    "shares a launch with others": (lambda p: _with_reshard(p, "optimizer", bucket=99), "shares its launch among 99, but the program has"),
    "partial output": (lambda p: _with_reshard(p, "output", layout=_laid("P(sum)R"), copy=True), "leaves a pending reduction"),
    "reader that needs more": (
        lambda p: _with_reshard(p, "forward", layout=_laid("S(0)R"), copy=True),
        r"op 0 .* asks operand 0 as RR, but gets 'x' as S\(0\)R",
    ),
}


@pytest.mark.parametrize(("change", "message"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_a_plan_that_is_not_legal_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    program, whole = trained_mlp(12, 8, 20, 1), _laid("RR")
    case = lowered(program, "2,2", pins={t: lambda layout: layout == whole for t in range(len(program.tensors))})
    plan = replicated(case)
    case.evaluate(plan)
    with pytest.raises(InternalError, match=message):
        case.evaluate(change(plan))


def test_without_an_optimizer_a_gradient_is_stored_like_its_parameter_and_nothing_is_updated() -> None:
    program, whole = trained_mlp(12, 8, 20, 1), _laid("RR")
    case = lowered(program, "2,2", optimizer="none", pins={t: lambda layout: layout == whole for t in range(len(program.tensors))})
    plan = replicated(case)
    assert not any(reshard.purpose == "update" for reshard in plan.reshards)
    assert case.evaluate(plan).update_ns == 0
    for change, message in [
        (_with_reshard(plan, "optimizer", layout=_laid("S(0)R"), copy=True), "its parameter '0.down' is stored as RR"),
        (_with_state(plan, "parameter", "RR"), "'0.up' has no optimizer state"),
    ]:
        with pytest.raises(InternalError, match=message):
            case.evaluate(change)


def test_a_cut_below_the_granularity_of_a_rule_is_refused() -> None:
    case = lowered(mlp(3, 8, 16), "2,2")
    assignment = random_assignment(case.graph, 0)
    plan = case.plan(assignment)
    rule = case.lowering.strategies[0].rule
    strategy = next(s for s in rule.strategies() if s.factor is not None and s.operands[0] == 0)
    cut = Layout((strategy.operands[0],) * 2), Layout((strategy.operands[1],) * 2)
    broken = _with_op(plan, 0, strategy=(strategy.name,) * 2, operand_layouts=cut, result_layouts=(Layout((strategy.results[0],) * 2),))
    with pytest.raises(InternalError, match=r"cannot have layout S\(0\)S\(0\)"):
        case.evaluate(broken)


def test_another_program_mesh_cluster_or_overlap_is_an_input_error() -> None:
    case = lowered(trained_mlp(12, 8, 20, 1), "2,2", overlap=0.5)
    plan = case.plan(random_assignment(case.graph, 1))

    def check(message: str, *, program: Program = case.program, costs: CostModel = case.costs) -> None:
        with pytest.raises(InputError, match=message):
            evaluate(plan, program, case.rulebook, costs)

    cluster = case.costs.cluster
    check("it has 16 tensors and 13 ops, the program 26 and 21", program=trained_mlp(12, 8, 20, 2))
    check("tensor 'x' f32", program=trained_mlp(24, 8, 20, 1))
    check(
        "the plan is for mesh d0=2,d1=2, the cost model for d0=4",
        costs=CostModel(Mesh.parse("4"), cluster),
    )
    check("the plan is for overlap 0.5, the cost model for 0", costs=CostModel(case.costs.mesh, cluster))
    check("the plan is for cluster 'h100', the cost model for 'a100'", costs=lowered(mlp(), "2,2", cluster="a100", overlap=0.5).costs)


def test_the_evaluator_sees_no_choice_graph() -> None:
    sources = [inspect.getsource(module) for module in (evaluate_module,)]
    names = [node.module or "" for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith(("solver_shard.graph", "solver_shard.solve", "solver_shard.plan.decode"))]
