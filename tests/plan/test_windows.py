"""A step by windows: sums that must hold for every plan, an event-by-event replay that must agree, and windows by name."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lowered import Lowered, lowered, random_assignment
from programs import trained_mlp

from solver_shard import optimize
from solver_shard.clock import StageClock
from solver_shard.costs.schedule import Load, StepSchedule, Window, window_time
from solver_shard.graph.lowering import Schedule
from solver_shard.pipeline import solve_lowered
from solver_shard.plan.plan import Plan
from solver_shard.plan.windows import WindowedStep, by_windows
from solver_shard.program import Program
from solver_shard.reports.timeline import EFFECTS, Manner, replay

BOXES = """
title = "boxes whose links are as slow as their devices"
launch_ns = 40
kappa = 0.25
[device]
name = "slow"
memory_gib = 1.0
reserve_gib = 0.0
memory_gb_per_s = 20.0
vector_tflops = 0.05
matmul_tflops = { f32 = 0.1 }
[device.efficiency]
matmul = 0.7
attention = 0.5
streaming = 0.9
reduction = 0.8
[[links]]
name = "inside"
size = 4
gb_per_s = 4.0
efficiency = 1.0
latency_ns = 30
[[links]]
name = "across"
gb_per_s = 2.0
efficiency = 1.0
latency_ns = 100
"""


@functools.cache
def boxes(topology: str) -> str:
    """A cluster file in which compute and collectives take about as long; the links across are a switch or a torus."""
    path = Path(tempfile.mkdtemp(prefix="boxes_")) / f"{topology}.toml"
    path.write_text(f'{BOXES}topology = "{topology}"\n', encoding="utf-8")
    return str(path)


@functools.cache
def in_blocks(layers: int = 3) -> Program:
    """Pairs of matrices, each pair in a block of its own, and a loss."""
    program = trained_mlp(96, 16, 24, layers)
    ops, module = [], ""
    for op in program.ops:
        text = " ".join(program.tensors[t].name for t in (*op.operands, *op.results))
        numbered = re.search(r"(\d+)\.(up|down)", text)
        same = op.name in ("aten.relu.default", "aten.threshold_backward.default")
        module = f"layers.{numbered[1]}" if numbered else module if same else "loss"
        ops.append(dataclasses.replace(op, module=module))
    return dataclasses.replace(program, ops=tuple(ops))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("2,4", {"cluster": "switch"}),
    ("8,2", {"cluster": "switch", "microbatches": 2}),
    ("2,2,4", {"cluster": "torus", "microbatches": 3, "clip": True, "reduce_dtype": "bf16"}),
    ("16", {"cluster": "switch", "microbatches": 7, "fusion": True, "overlap": 0.5, "master_weights": False}),
    ("4,8", {"cluster": "torus", "optimizer": "none", "overlap": 1.0}),
]


@functools.cache
def case(k: int, schedule: Schedule = "sequential") -> Lowered:
    mesh, options = CASES[k]
    return lowered(in_blocks(), mesh, **{**options, "cluster": boxes(options["cluster"]), "schedule": schedule})


def with_kappa(plan: Plan, kappa: float) -> Plan:
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, kappa=kappa))


def agrees(plan: Plan) -> WindowedStep:
    """All that must be true of the windows of any plan."""
    assert by_windows(with_kappa(plan, 1.0)).total_ns == plan.costs.total_ns + plan.costs.hidden_ns, "one thing after the other"
    whole = {kappa: by_windows(with_kappa(plan, kappa)) for kappa in (0.0, 0.3, 1.0)}
    for kappa, step in whole.items():
        assert sum(step.exposed.values()) == step.total_ns - step.compute_ns
        assert sum(step.exposed.values()) + sum(step.hidden.values()) == sum(c.runs * c.nanoseconds for c in plan.collectives())
        assert min([0, *step.exposed.values(), *step.hidden.values()]) == 0
        assert step.compute_ns == plan.costs.compute_ns + plan.costs.update_ns
        assert step.peak >= plan.memory.peak
        for r in range(len(step.lanes)):
            assert step.total_ns >= sum(time.window.runs * time.lanes[r] for time in step.windows), "no shorter than what a lane carries"
        assert replay(with_kappa(plan, kappa), Manner()) == step.total_ns
    assert whole[0.0].total_ns <= whole[0.3].total_ns <= whole[1.0].total_ns
    for manner in EFFECTS.values():
        assert replay(plan, manner) >= plan.costs.compute_ns + plan.costs.update_ns
    return whole[0.3]


@pytest.mark.parametrize("k", range(len(CASES)))
@pytest.mark.parametrize("seed", range(6))
def test_windows_of_any_plan_add_up_and_the_replay_and_the_graph_agree(k: int, seed: int) -> None:
    windowed = case(k, "windows")
    assignment = random_assignment(windowed.graph, seed)
    plan = case(k).plan(sequential(windowed, case(k), assignment))
    step = agrees(plan)
    assert windowed.graph.loads is not None
    windowed.graph.validate()
    assert windowed.graph.allowed(assignment)
    assert windowed.graph.cost(assignment) == by_windows(plan).total_ns
    assert [int(t) for t in windowed.graph.loads.times(assignment)] == [t.window.runs * t.nanoseconds for t in by_windows(plan).windows]
    assert windowed.peak(assignment) == step.peak


def sequential(windowed: Lowered, other: Lowered, assignment: Sequence[int]) -> tuple[int, ...]:
    """The same decisions for the graph without windows, which has all nodes but those of bytes that wait."""
    return tuple(assignment[windowed.lowering.index[node.key]] for node in other.lowering.nodes)


@pytest.mark.parametrize(("mesh", "options"), [("8", {}), ("2,2", {"microbatches": 3}), ("4", {"optimizer": "sgd", "clip": True})])
def test_what_is_solved_by_windows_is_no_slower_by_windows_than_the_best_plan_one_thing_after_the_other(
    mesh: str, options: dict[str, Any]
) -> None:
    found = {}
    for schedule in ("sequential", "windows"):
        solved = lowered(in_blocks(1), mesh, cluster=boxes("switch"), schedule=schedule, **options)  # type: ignore[arg-type]
        clock = StageClock()
        clock.bound_solver(60)
        solution, _ = solve_lowered(solved.lowering, solved.costs, solved.options, clock, workers=1)
        assert solution.assignment is not None
        assert solution.bound is not None
        # decoded by the other graph, which has the same nodes, so that nothing of the windowed one is believed
        other = lowered(in_blocks(1), mesh, cluster=boxes("switch"), **options)
        plan = other.plan(sequential(solved, other, solution.assignment))
        found[schedule] = by_windows(plan).total_ns, plan.costs.total_ns
        assert solution.cost == (found[schedule][0] if schedule == "windows" else found[schedule][1])
        assert solution.bound <= solution.cost <= solution.bound * 1.0001 + 1
    assert found["windows"][0] <= found["sequential"][0]
    assert found["windows"][1] >= found["sequential"][1]


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("template", ["ddp", "zero1", "zero2", "zero3"])
def test_windows_of_templates_hide_what_has_slack(template: str, microbatches: int) -> None:
    plan = optimize(in_blocks(), mesh="8", cluster=boxes("switch"), template=template, microbatches=microbatches)
    step = agrees(plan)
    hidden = {purpose for (purpose, _), nanoseconds in step.hidden.items() if nanoseconds}
    assert hidden
    assert hidden <= {"parameter gathers", "gradient reductions", "parameter updates"}
    assert {step.bound_by(time) for time in step.windows} > {"compute"}


def test_windows_have_the_names_and_neighbours_that_the_schedule_says() -> None:
    forward = ["emb", "", "layers.0.a", "", "layers.0.b", "layers.1.a", "head", "head.loss"]
    places = [(module, "forward") for module in forward] + [(module, "backward") for module in reversed(forward)]
    once = StepSchedule.of(places, 1)
    names = [window.name for window in once.windows]
    assert names == [
        "head", "emb forward", "layers.0 forward", "layers.1 forward", "head.loss forward",
        "head.loss backward", "layers.1 backward", "layers.0 backward", "emb backward", "tail", "update",
    ]  # fmt: skip
    several = StepSchedule.of(places, 5)
    assert [(window.microbatch, window.runs) for window in several.windows[1::8]] == [("first", 1), ("middle", 3), ("last", 1), ("", 1)]

    def named(schedule: StepSchedule, windows: tuple[int, ...]) -> list[str]:
        return [" ".join(filter(None, (schedule.windows[w].name, schedule.windows[w].microbatch))) for w in windows]

    assert named(once, once.ahead(0)) == ["head"]
    assert named(several, several.ahead(0)) == ["head", "emb backward first", "emb backward middle"]
    assert named(several, several.ahead(0, once=True)) == ["head"]
    assert named(several, several.ahead(5, once=True)) == ["layers.0 forward first"]
    assert named(several, several.ahead(5)) == [f"layers.0 forward {kind}" for kind in ("first", "middle", "last")]
    assert named(once, once.behind(15)) == ["tail"]
    assert named(several, several.behind(15)) == ["emb forward middle", "emb forward last", "tail"]
    assert named(several, several.behind(15, once=True)) == ["tail"]
    assert named(several, several.behind(8, once=True)) == ["layers.1 backward last"]
    assert named(several, several.ending()) == [f"emb backward {kind}" for kind in ("first", "middle", "last")]
    for schedule, count in ((once, 1), (several, 5)):
        for i in range(len(places)):
            for windows in (schedule.of_op(i), schedule.ahead(i), schedule.behind(i)):
                assert sum(schedule.windows[w].runs for w in windows) == count


def test_a_step_without_ops_of_a_unit_is_one_window_of_each_phase() -> None:
    schedule = StepSchedule.of([("", "forward"), ("", "forward"), ("", "backward")], 1)
    assert [window.name for window in schedule.windows] == [
        "head",
        "outside of modules forward",
        "outside of modules backward",
        "tail",
        "update",
    ]
    assert StepSchedule.of([], 3).ending() == (StepSchedule.of([], 3).update,)


def test_a_window_takes_what_is_fullest_and_says_what_is_exposed() -> None:
    window = Window(name="w", kind="forward", microbatch="only", runs=1, start=0, stop=1)
    gather = Load(key="gather", asynchronous=True, nanoseconds=500, contention=60, lanes=(100, 380))
    reduce = Load(key="reduce", asynchronous=True, nanoseconds=300, contention=40, lanes=(0, 290))
    inside = Load(key="inside", asynchronous=False, nanoseconds=50, contention=0, lanes=(45, 0))
    # 700 + 50 + 100 on the compute stream; 145 and 670 on the lanes
    busy = window_time(window, 700, [gather, reduce, inside], 2)
    assert (busy.nanoseconds, busy.lane, busy.lanes) == (850, None, (145, 670))
    assert busy.exposed == {"gather": 60, "reduce": 40, "inside": 50}
    assert busy.hidden == {"gather": 440, "reduce": 260, "inside": 0}
    # with 300 of compute the second lane is longer by 320 than compute and what stops it: 380 parts of 670, and 290
    idle = window_time(window, 300, [gather, reduce, inside], 2)
    assert (idle.nanoseconds, idle.lane) == (670, 1)
    assert idle.exposed == {"gather": 181, "reduce": 139, "inside": 50}
    assert window_time(window, 7, [], 0).nanoseconds == 7
