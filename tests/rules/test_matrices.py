"""Linear algebra: every matrix of a batch by itself, forward and backward, on batches, single matrices and vectors."""

from __future__ import annotations

import pytest
import torch
from points import plan_of, random_point
from torch import nn

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.graph.lowering import lower
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.rules.check import check_rules
from solver_shard.rules.table import load_table
from solver_shard.verification import check
from solver_shard.verification.subject import subject_of

pytestmark = pytest.mark.usefixtures("one_thread")


def spread(x: torch.Tensor) -> torch.Tensor:
    """Symmetric and positive definite, with eigenvalues apart."""
    return x @ x.mT + torch.diag(torch.arange(1.0, 1 + x.shape[-1], dtype=x.dtype))


STEPS = {
    "cholesky": lambda x: torch.linalg.cholesky(spread(x)),
    "inv": lambda x: torch.linalg.inv(spread(x)),
    "solve": lambda x: torch.linalg.solve(spread(x), x[..., :3]),
    "solve, vectors": lambda x: torch.linalg.solve(spread(x), x[..., 0]),
    "solve, one matrix": lambda x: torch.linalg.solve(spread(x[:1]), x),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(spread(x[0]), x, upper=False),
    "solve_triangular, one matrix of a batch": lambda x: torch.linalg.solve_triangular(spread(x[:1]), x, upper=True, left=False),
    "cholesky_solve": lambda x: torch.cholesky_solve(x[..., :2], torch.linalg.cholesky(spread(x))),
    "logdet": lambda x: torch.logdet(spread(x)),
    "slogdet": lambda x: torch.linalg.slogdet(spread(x))[1],
    "det": lambda x: torch.linalg.det(spread(x) / 6),
    "eigh": lambda x: torch.linalg.eigh(spread(x))[0],
    "eigvalsh": lambda x: torch.linalg.eigvalsh(spread(x)),
    "svdvals": lambda x: torch.linalg.svdvals(spread(x)),
    "qr": lambda x: torch.linalg.qr(spread(x))[1],
    "lu": lambda x: torch.linalg.lu(spread(x))[2],
    "pinv": lambda x: torch.linalg.pinv(spread(x)),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x / 4),
}


class Step(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        torch.manual_seed(0)
        self.x = nn.Parameter(torch.randn(4, 6, 6, dtype=torch.float64))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        made = STEPS[self.name](self.x)
        return (made * weight[tuple(slice(size) for size in made.shape)].to(made.dtype)).sum()


@pytest.mark.parametrize("name", STEPS)
def test_random_plans_of_linear_algebra_hold(name: str) -> None:
    torch.manual_seed(1)
    rank = {"eigh": 2, "eigvalsh": 2, "svdvals": 2, "solve, vectors": 2, "logdet": 1, "slogdet": 1, "det": 1}.get(name, 3)
    weight = torch.rand((4, 6, 6)[:rank], dtype=torch.float64) + 0.5
    case = subject_of(Step(name), (weight,), name=name)
    options = Options(memory_limit=2**40, tied=False)
    for mesh in ("2", "2,2"):
        costs = CostModel(Mesh.parse(mesh), load_cluster("h100"))
        lowering = lower(case.program, options.rulebook(), costs, optimizer_state=options.optimizer_state())
        verdict = check(plan_of(lowering, random_point(lowering.graph, 1), costs, options), case)
        assert verdict.holds, str(verdict)


def test_a_batch_of_matrices_can_be_cut_and_a_matrix_cannot() -> None:
    rows = [op for op, row in load_table().items() if row.family == "matrices" and "cholesky" in op]
    report = check_rules(["aten._linalg_solve_ex.default", "aten.linalg_solve_triangular.default", "aten.lu_unpack.default", *rows])
    assert report.passed, [(op.op, op.wrong, op.missing) for op in report.ops if not op.passed]
    assert sum(op.strategies for op in report.ops) > 300
