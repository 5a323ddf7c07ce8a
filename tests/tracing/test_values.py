"""Models that read values: known ones are read, what does not depend on others is traced, and anything else is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from traced_models import check

from solver_shard.errors import TraceError
from solver_shard.tracing.torch import progress, run_eagerly, trace
from solver_shard.tracing.values import Fixed

X = torch.randn(3, 6, 4)
GRID = torch.tensor([[1, 2], [2, 3], [2, 2]])


class Reader(nn.Module):
    """A layer, then something that looks at values."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor, grid: Tensor | None = None) -> Tensor:
        y: Tensor = self.layer(x)
        return (self.body(y) if grid is None else self.body(y, grid)).square().mean()


def split_by_grid(y: Tensor, grid: Tensor) -> Tensor:
    """Pictures of 2, 6 and 4 patches in a row."""
    rows = y.flatten(0, 1)[: int(grid.prod(-1).sum())]
    return torch.stack([part.sum(0) for part in torch.split(rows, grid.prod(-1).tolist())])


def gather_whole(y: Tensor) -> Tensor:
    lengths = torch.ones(y.shape[:2], dtype=torch.long).sum(-1)
    mask = torch.arange(y.shape[1])[None] < (lengths - 2)[:, None]
    return y[mask]


def repeat_by_known(y: Tensor, grid: Tensor) -> Tensor:
    return torch.repeat_interleave(y, grid[:, 0], dim=0)


def write_by_mask(y: Tensor) -> Tensor:
    z = y * 1.0
    z[y > 1] = 0.5
    z[y[..., 0] > 0] = y.sum((0, 1))
    return z


def scatter_by_mask(y: Tensor) -> Tensor:
    z = y * 1.0
    z[torch.arange(18).reshape(3, 6) > 11] = y[0]
    return z


def check_finite(y: Tensor) -> Tensor:
    if not torch.isfinite(y).all() or torch.isnan(y).any():
        raise ValueError
    torch._check_tensor_all(y.abs() < 1e9)
    return y


def gather_others(y: Tensor) -> Tensor:
    return y[:, ~(torch.arange(6) > 2)]


def align(y: Tensor) -> Tensor:
    """A loss of clips of 6 and 5 steps and their transcripts."""
    spoken = torch.tensor([[1, 2], [3, 0], [2, 2]])
    said = spoken.masked_select(spoken != 0)
    return F.ctc_loss(y.log_softmax(-1).transpose(0, 1), said, torch.tensor([6, 5, 6]), (spoken != 0).sum(-1))


@pytest.mark.parametrize("body", [gather_whole, gather_others, write_by_mask, scatter_by_mask, check_finite, align])
def test_values_that_are_known_or_do_not_matter_are_traced(body: Callable[..., Tensor]) -> None:
    check(Reader(body), {"x": X}, tolerance=1e-5)


@pytest.mark.parametrize("body", [split_by_grid, repeat_by_known])
def test_a_fixed_input_is_read_and_no_input_of_the_program(body: Callable[..., Tensor]) -> None:
    program = trace(Reader(body), {"x": X, "grid": Fixed(GRID)}, name="reader")
    assert [tensor.name for tensor in program.tensors if tensor.role.name == "INPUT"] == ["x"]


def decide(y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def count_in_place(y: Tensor) -> Tensor:
    """What was known is not any more, in views neither."""
    count = torch.zeros(3, dtype=torch.long)
    first = count[0]
    count[0] = y.sum().long()
    return y[: int(first)]


def any_large(y: Tensor) -> Tensor:
    return -y if (y > 5).any() else y


@pytest.mark.parametrize("body", [decide, count_in_place, any_large])
def test_a_value_that_decides_is_an_error_with_the_line(body: Callable[..., Tensor]) -> None:
    with pytest.raises(TraceError, match=r"in module 'Reader' at test_values\.py:\d+: it decides by the values of a tensor"):
        trace(Reader(body), {"x": X}, name="reader")


def test_a_dry_run_says_what_stops_it() -> None:
    assert progress(Reader(check_finite), {"x": X}, name="finite")[0] is None
    stopped, calls = progress(Reader(check_finite), {"x": X[..., :3]}, name="finite")
    assert isinstance(stopped, TraceError)
    assert calls


class Paired(nn.Module):
    """A loss of predictions and targets that the host pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = self.layer(x)
        pairs = [linear_sum_assignment(cost) for cost in torch.cdist(y, targets).cpu()]
        taken = [y[i][torch.as_tensor(ours)] - targets[i][torch.as_tensor(theirs)] for i, (ours, theirs) in enumerate(pairs)]
        return torch.stack(taken).square().sum()


def test_predictions_and_targets_are_paired_without_their_values() -> None:
    inputs = {"x": X, "targets": X[:, :2] + 1}
    assert trace(Paired(), inputs, name="paired").gradients
    model = Paired()
    found = run_eagerly(model, inputs, inputs)["loss"]  # pairs them as the trace does
    assert torch.allclose(found, (model.layer(X)[:, :2] - inputs["targets"]).square().sum())
