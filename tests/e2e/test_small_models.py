"""Small models of many kinds: what a device holds is what the plan says, and every plan has a schedule, whatever is pinned."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping

import pytest
import torch
from e2e.test_simulate import near
from measured import measure
from points import plan_of, random_point
from small_models import MODELS, make

from solver_shard.graph.build import Lowered, lower_program
from solver_shard.graph.nodes import OpNode
from solver_shard.graph.transient_memory import Transients
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Relays, without
from solver_shard.runtime.schedule import schedule
from solver_shard.tracing.torch import trace

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Options(memory_limit=1 << 40, split="off", tied=False)
APART = {"bilinear upsampling": 0.06, "factorisation machine": 0.2}
"""Of random plans: a copy that a view cuts, or that is made for a view that others hold, counts until the view's reader is done."""


@functools.cache
def traced(name: str) -> tuple[Program, Mapping[int, torch.Tensor]]:
    model, inputs = make(name)
    program = trace(model, inputs, name=name)
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False)) | inputs
    return program, {t: state[program.tensors[t].name].detach() for t in program.sources()}


def drawn(made: Lowered, seed: int, *, whole: bool = False) -> tuple[Plan, Program]:
    """A random plan and its program, as far as it has relays; ``whole``: with every op replicated. The graph says what the plan does."""
    graph, relays = made.lowering.graph, made.lowering.relays
    fixed = {v: 0 for v, node in enumerate(made.lowering.nodes) if isinstance(node, OpNode)} if whole else {}
    point = random_point(graph, seed, fixed)
    plan = plan_of(made.lowering, point, made.costs, made.options)
    assert Transients(made.lowering, made.costs).peak(point) == plan.memory.peak
    return plan, without(made.program, relays, relays.difference(plan.relays)).program


def lowered(name: str, mesh: str, *pins: str, relays: Relays = "everywhere") -> Lowered:
    options = dataclasses.replace(OPTIONS, pins=pins)
    return lower_program(traced(name)[0], mesh=Mesh.parse(mesh), cluster=near(), options=options, relays=relays)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_device_holds_is_within_five_percent_of_the_plan(name: str) -> None:
    values = traced(name)[1]
    for mesh, whole in (("2,2", True), ("2", False)):
        made = lowered(name, mesh, relays="none")
        plan, program = drawn(made, 1, whole=whole)
        said, found = evaluate(plan, program, made.rulebook, made.costs), measure(plan, program, values)
        assert max(said.totals[:-1]) == pytest.approx(max(found.totals[:-1]), rel=0.05 if whole else APART.get(name, 0.05)), mesh
        assert abs(said.totals[-1] - found.totals[-1]) <= 1024


@pytest.mark.parametrize("name", MODELS)
def test_a_random_plan_under_random_pins_has_a_schedule_and_the_memory_that_the_evaluator_finds(name: str) -> None:
    free = drawn(lowered(name, "2"), 1)[0]
    named = [tensor for t, tensor in enumerate(free.tensors) if t not in free.relays and "=" not in tensor.name]
    pins = [f"{tensor.name}={tensor.layout}" for tensor in random.Random(name).sample(named, 4)]
    made = lowered(name, "2", *pins)
    plan, program = drawn(made, 2)
    assert schedule(plan, program).instructions
    assert evaluate(plan, program, made.rulebook, made.costs).peak == plan.memory.peak
