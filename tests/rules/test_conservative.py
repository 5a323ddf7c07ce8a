"""Conservative rules allow only equal shards, and no cut inside a dim."""

from __future__ import annotations

import pytest
import torch
from lowered import with_relays
from rules.cases import Case, case, t
from rules.execute import execute
from torch import nn

from solver_shard.api import optimize
from solver_shard.costs.layouts import is_even
from solver_shard.costs.model import CostModel
from solver_shard.layout import Layout
from solver_shard.plan.evaluate import evaluate
from solver_shard.rules.check import UNSET, draws_of
from solver_shard.rules.check.instances import load_instances, tensor_of
from solver_shard.rules.check.shards import legal_strategies, run_local, verify
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import build_rule, conservative
from solver_shard.rules.table import load_table
from solver_shard.tracing.torch import trace

TABLE = load_table()
INSTANCES = load_instances()


def rule_of(made: Case) -> Rule:
    operands, results = made.tensors(execute)
    return conservative(build_rule(made.op, operands, results, TABLE))


def cuts(rule: Rule, shards: int) -> list[str]:
    return [s.name for s in rule.strategies() if s.name == "R" or (s.factor is not None and rule.factors[s.factor].legal(shards))]


def test_shards_are_equal() -> None:
    rule = rule_of(case("aten.relu.default", self=t(6, 8)))
    assert cuts(rule, 2) == ["R", "a", "b"]
    assert cuts(rule, 4) == ["R", "b"]
    assert cuts(rule, 3) == ["R", "a"]


def test_a_view_is_cut_in_whole_dims_only() -> None:
    passing = cuts(rule_of(case("aten.view.default", self=t(8, 12), size=(96,))), 4)
    assert passing == ["R", "a"]  # the whole first dim, not a part of the second
    split = rule_of(case("aten.view.default", self=t(6, 4), size=(4, 6)))
    assert cuts(split, 2) == ["R"]  # would cut inside both
    assert not rule_of(case("aten.view.default", self=t(8, 12), size=(96,))).minor_strategies()


@pytest.mark.parametrize("family", sorted({row.family for row in TABLE.values()} - {"replicated"}))
def test_all_shards_of_all_rows_are_even_and_still_sound(family: str) -> None:
    count = 0
    for op in [op for op, row in TABLE.items() if row.family == family and op not in UNSET][:12]:
        call = INSTANCES[op][0]
        draws, random = draws_of(call, 1)
        results = [tensor_of(f"y{i}", value) for i, value in enumerate(draws[0].results)]
        rule = conservative(build_rule(call.op, call.operands(), results, TABLE))
        shapes = [spec.shape for spec in call.specs], [x.shape for x in results]
        for mesh in ((2,), (3,), (2, 2)):
            for axes in legal_strategies(rule, *shapes, mesh):
                count += 1
                for i, shape in enumerate(shapes[0]):
                    assert is_even(Layout(axis.operands[i] for axis in axes), shape, mesh), (call.text, axes)
                for i, shape in enumerate(shapes[1]):
                    assert is_even(Layout(axis.results[i] for axis in axes), shape, mesh), (call.text, axes)
        if not random:
            checked = verify(call.op, draws[0].operands, rule, run_local, result_shapes=shapes[1], mesh_shape=(2,))
            assert not checked.failures
    assert count > 0


class Odd(nn.Module):
    """Widths that three devices divide and two do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(30, 9), nn.Linear(9, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))) ** 2).mean()


def test_a_conservative_plan_holds_no_uneven_shard() -> None:
    program = trace(Odd(), {"x": torch.empty(10, 30)}, name="odd")
    for careful in (False, True):
        plan = optimize(program, mesh="4", conservative=careful, objective="memory", gap=0.01, time_limit=15)
        found = [(tensor.layout, tensor.shape) for tensor in plan.tensors] + [(t.state, t.shape) for t in plan.tensors if t.state]
        found += [(reshard.layout, plan.tensors[reshard.tensor].shape) for reshard in plan.reshards]
        assert all(is_even(layout, shape, (4,)) for layout, shape in found) is careful
        assert (
            evaluate(plan, with_relays(program, plan), plan.options.rulebook(), CostModel(plan.mesh, plan.cluster)).peak == plan.memory.peak
        )
