"""A slice of torch's own op tests: traced, planned at random points, run and compared (experiments/op_database.py runs all of them)."""

from __future__ import annotations

import warnings

import pytest
from op_cases import cases, outcome

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = (
    "addr", "baddbmm", "cdist", "cummax", "cumprod", "diagonal_scatter", "div.floor_rounding", "frexp", "gather", "index_copy", "index_put",
    "kron", "kthvalue", "linalg.eigh", "linalg.lu_solve", "linalg.pinv", "linalg.solve", "linalg.solve_triangular", "linalg.svd",
    "logaddexp", "masked.softmax", "nn.functional.avg_pool3d", "nn.functional.cross_entropy", "nn.functional.grid_sample",
    "nn.functional.nll_loss", "nn.functional.threshold", "polygamma.polygamma_n_1", "renorm", "scatter_reduce.amax", "view_copy",
)  # fmt: skip
"""One of each kind: products, broadcasting, several results, indices, ties, decompositions, images, losses, registered strategies."""


@pytest.mark.parametrize("op", OPS)
def test_random_plans_of_an_op_hold(op: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (case,) = cases(op)
        found = outcome(case, ("2", "2,2"))
    assert found.kind == "holds", str(found)


def test_an_op_along_a_dim_of_a_number_holds() -> None:
    """torch lets a number have a dim 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_numbers = [c for op in ("mode", "gather", "softmax") for c in cases(op, 5) if not next(iter(c.model.parameters())).ndim]
        found = [outcome(case) for case in of_numbers]
    assert len(found) >= 2
    assert {one.kind for one in found} == {"holds"}, found
