"""Small models of many kinds: what a device holds is what the plan says, and every plan has a schedule, whatever is pinned."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from e2e.test_simulate import near
from small_models import MODELS, make

from solver_shard import Mesh
from solver_shard.choice.lower import lower
from solver_shard.costs.model import CostModel
from solver_shard.export.measure import measure
from solver_shard.export.points import plan_of, random_point
from solver_shard.export.schedule import schedule
from solver_shard.frontends.torch import trace
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Options, Plan
from solver_shard.program import Program
from solver_shard.rulebook.build import Rulebook

pytestmark = pytest.mark.usefixtures("one_thread")

MEASURED = ("writing by index", "message passing", "upsampling", "recurrent cell", "sparse mixture", "scatter and gather", "frequencies")
OPTIONS = Options(memory_limit=1 << 40)


@functools.cache
def traced(name: str) -> tuple[Program, Mapping[int, torch.Tensor]]:
    model, inputs = make(name)
    program = trace(model, inputs, name=name)
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False)) | inputs
    return program, {t: state[program.tensors[t].name].detach() for t in program.sources()}


def drawn(name: str, mesh: str, seed: int, *, whole: bool = False) -> tuple[Plan, CostModel]:
    """A random plan; ``whole``: with every op replicated."""
    program, costs = traced(name)[0], CostModel(Mesh.parse(mesh), near())
    lowering = lower(program, Rulebook(), costs, optimizer_state=OPTIONS.optimizer_state())
    fixed = {v: 0 for v, node in enumerate(lowering.nodes) if node.kind.value == "op"} if whole else {}
    return plan_of(lowering, random_point(lowering.graph, seed, fixed), costs, OPTIONS), costs


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_device_holds_is_within_five_percent_of_the_plan(name: str) -> None:
    program, values = traced(name)
    plan, costs = drawn(name, "2", 0, whole=True)
    said, found = evaluate(plan, program, Rulebook(), costs), measure(plan, program, values)
    assert max(said.totals[:-1]) == pytest.approx(max(found.totals[:-1]), rel=0.05)
    assert abs(said.totals[-1] - found.totals[-1]) <= 64


@pytest.mark.parametrize("name", MODELS)
def test_a_random_plan_has_a_schedule_and_the_memory_that_the_evaluator_finds(name: str) -> None:
    program = traced(name)[0]
    plan, costs = drawn(name, "2", 1)
    assert schedule(plan, program).instructions
    assert evaluate(plan, program, Rulebook(), costs).peak == plan.memory.peak
