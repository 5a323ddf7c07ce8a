"""One op at a time: on whole tensors and on shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from traced_models import MLP, squares

from solver_shard.errors import InputError, InternalError
from solver_shard.ops.run import call, run
from solver_shard.program import Op, Ref
from solver_shard.tracing.torch import trace


def op(name: str, operands: int = 1, results: int = 1, **attributes: object) -> Op:
    return Op(name=name, operands=tuple(range(operands)), results=tuple(range(operands, operands + results)), attributes=attributes)


X = torch.randn(4, 6, 8)
SIZED = [
    ("view", op("aten.view.default", self=Ref(0), size=(4, 6, 2, 4)), (2, 6, 2, 4)),
    ("expand", op("aten.expand.default", self=Ref(0), size=(3, 4, 6, 8), implicit=False), (3, 2, 6, 8)),
    (
        "slice_backward",
        op("aten.slice_backward.default", grad_output=Ref(0), input_sizes=(4, 9, 8), dim=1, start=1, end=7, step=1),
        (2, 9, 8),
    ),
]


@pytest.mark.parametrize(("case", "shape"), [row[1:] for row in SIZED], ids=[row[0] for row in SIZED])
def test_sizes_follow_the_shard(case: Op, shape: tuple[int, ...]) -> None:
    (made,) = call(case, [X[:2]], [shape])
    assert tuple(made.shape) == shape


def test_factories_follow_the_shard() -> None:
    (made,) = call(op("aten.full.default", 0, size=(4, 6), fill_value=2.5, dtype="f32"), [], [(2, 6)])
    assert made.shape == (2, 6)
    assert bool((made == 2.5).all())


def test_split_of_a_shard() -> None:
    case = op("aten.split.Tensor", 1, 2, self=Ref(0), split_size=4, dim=2)
    made = call(case, [X[:, :2]], [(4, 2, 4), (4, 2, 4)])
    assert [tuple(t.shape) for t in made] == [(4, 2, 4), (4, 2, 4)]


def test_dtypes_by_short_name() -> None:
    (made,) = call(op("aten._to_copy.default", self=Ref(0), dtype="bf16"), [X], [X.shape])
    assert made.dtype is torch.bfloat16
    (made,) = call(op("aten.sum.dim_IntList", self=Ref(0), dim=(2,), keepdim=False, dtype="f64"), [X], [(4, 6)])
    assert made.dtype is torch.float64


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_sums_of_row_shards_add_up(weighted: bool) -> None:
    scores = torch.randn(4, 6, 8, requires_grad=True)
    target = torch.randint(0, 8, (4, 6))
    target[1, 2] = -1
    weight = torch.rand(8) if weighted else None
    expected = F.nll_loss(scores.flatten(0, 1), target.flatten(), weight, ignore_index=-1)
    expected.backward()
    extra = {"weight": Ref(2) if weighted else None, "ignore_index": -1}
    forward = op("shard.nll_loss_forward", 3 if weighted else 2, 2, self=Ref(0), target=Ref(1), **extra)
    parts = []
    with torch.no_grad():
        for rows in (slice(0, 2), slice(2, 4)):
            operands = [scores[rows], target[rows], *([weight] if weight is not None else [])]
            parts.append(call(forward, operands, [(), ()]))
        numerator, total = (sum(column) for column in zip(*parts, strict=True))
        torch.testing.assert_close(numerator / total, expected)
        names = {"grad_output": Ref(0), "self": Ref(1), "target": Ref(2), "total_weight": Ref(3)}
        extra = {"weight": Ref(4) if weighted else None, "ignore_index": -1, "reduction": "mean"}
        backward = op("shard.nll_loss_backward", 5 if weighted else 4, **names, **extra)
        operands = [torch.tensor(1.0), scores[:2], target[:2], total, *([weight] if weight is not None else [])]
        (gradient,) = call(backward, operands, [(2, 6, 8)])
    assert scores.grad is not None
    torch.testing.assert_close(gradient, scores.grad[:2])


def test_gelu_backward_of_an_expanded_gradient() -> None:
    case = op("aten.gelu_backward.default", 2, grad_output=Ref(0), self=Ref(1), approximate="none")
    gradient = torch.randn(4, 1, 8)
    (made,) = call(case, [gradient, X], [X.shape])
    torch.testing.assert_close(made, torch.ops.aten.gelu_backward(gradient.expand(X.shape), X))


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(InternalError, match="expected"):
        call(op("aten.relu.default", self=Ref(0)), [X], [(4, 6, 9)])


def test_a_missing_argument_is_an_error() -> None:
    with pytest.raises(InternalError, match="'other'"):
        call(op("aten.mul.Tensor", self=Ref(0)), [X], [X.shape])


def test_attention_with_dropout_needs_its_draws() -> None:
    case = op("aten._scaled_dot_product_flash_attention_for_cpu.default", 1, 2, query=Ref(0), key=Ref(0), value=Ref(0), dropout_p=0.1)
    with pytest.raises(InputError, match="without what its dropout leaves; run the whole program"):
        call(case, [torch.randn(1, 2, 3, 4)], [(1, 2, 3, 4), (1, 2, 3)])


def test_run_wants_every_source_in_its_shape() -> None:
    program = trace(MLP(), {"x": X}, name="mlp", loss_fn=squares)
    with pytest.raises(InputError, match=r"needs a value for parameter 'up\.weight'"):
        run(program, {})
    values = {t: torch.zeros(program.tensors[t].shape) for t in program.sources()}
    with pytest.raises(InputError, match=r"has shape \(12, 8\)"):
        run(program, values | {0: torch.zeros(3)})
    assert run(program, values)[program.outputs[0]].item() == 0
