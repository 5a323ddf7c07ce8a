"""Losses of every pixel, whose classes are dim 1: ignored labels and weights of classes are counted once, whatever is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from points import plan_of, random_point
from torch import nn

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.graph.lowering import lower
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.plan.plan import Plan
from solver_shard.rules.check import check_rules
from solver_shard.verification import check
from solver_shard.verification.subject import Subject, subject_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Segmentation(nn.Module):
    def __init__(self, *, weighted: bool, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.reduction = nn.Conv2d(3, 6, 1), reduction
        self.register_buffer("weight", torch.rand(6) + 0.5 if weighted else None)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.classes(x), labels, weight=self.weight, reduction=self.reduction)
        return loss if loss.ndim == 0 else (loss * x.amax(1)).mean()  # a weight of every pixel


def case(*, weighted: bool, reduction: str) -> Subject:
    torch.manual_seed(1)
    labels = torch.randint(6, (4, 6, 4))
    labels[0, :3] = -100
    labels[1:, 0, 1] = -100
    return subject_of(Segmentation(weighted=weighted, reduction=reduction), (torch.randn(4, 3, 6, 4), labels), name="segmentation")


def plans(subject: Subject, mesh: str, count: int) -> list[Plan]:
    options, costs = Options(memory_limit=2**40, tied=False), CostModel(Mesh.parse(mesh), load_cluster("h100"))
    lowering = lower(subject.program, options.rulebook(), costs, optimizer_state=options.optimizer_state())
    return [plan_of(lowering, random_point(lowering.graph, seed), costs, options) for seed in range(count)]


@pytest.mark.parametrize("mesh", ["2", "3", "2,2"])
@pytest.mark.parametrize(("weighted", "reduction"), [(False, "mean"), (True, "mean"), (True, "sum"), (True, "none")])
def test_random_plans_of_a_segmentation_loss_hold(weighted: bool, reduction: str, mesh: str) -> None:
    subject = case(weighted=weighted, reduction=reduction)
    for plan in plans(subject, mesh, 2):
        verdict = check(plan, subject)
        assert verdict.holds, str(verdict)


def test_rows_of_a_segmentation_loss_are_those_of_any_other() -> None:
    names = [op.name for op in case(weighted=True, reduction="mean").program.ops]
    assert {"shard.nll_loss_forward", "shard.nll_loss_backward"} <= set(names)
    assert not any("nll_loss2d" in name for name in names)


def test_a_loss_of_every_pixel_is_cut_by_pixels() -> None:
    """torch's own op, whose losses are not added up."""
    program = case(weighted=True, reduction="none").program
    (at,) = [i for i, op in enumerate(program.ops) if op.name == "aten.nll_loss2d_forward.default"]
    found = {(str(s.operands[0]), str(s.results[0])) for s in Options(memory_limit=2**40).rulebook().rule(program, at).strategies()}
    assert {("S(0)", "S(0)"), ("S(2)", "S(1)"), ("S(3)", "S(2)")} <= found


def test_the_rules_of_torchs_own_pixel_losses_are_sound_and_whole() -> None:
    report = check_rules(["aten.nll_loss2d_forward.default", "aten.nll_loss2d_backward.default"])
    assert report.passed, [(op.op, op.wrong, op.missing) for op in report.ops]
