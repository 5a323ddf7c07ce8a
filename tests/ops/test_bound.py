"""What is prepared gives what torch and the interpreter give, whatever the operands' strides."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from solver_shard.errors import InputError
from solver_shard.ops import kernels
from solver_shard.ops.bound import bind
from solver_shard.ops.run import call, product
from solver_shard.program import Op, Ref

SIZES = dict(zip("abcdef", (2, 3, 4, 5, 1, 6), strict=True))
EQUATIONS = [
    "ab,bc->ac", "ab,cb->ac", "ba,bc->ac", "ba,cb->ca", "abc,cd->abd", "abc,dc->abd", "abc,abd->cd", "abc,abd->dc", "abcd,abed->abce",
    "abcd,abde->acbe", "cab,bd->adc", "ab,ab->", "ab,ab->ab", "ab,b->a", "a,b->ba", "ab,->ab", "abe,be->a", "acb,bda->cd", "abc,cb->a",
    "ab->ba", "ab,bc,cd->ad", "aab,b->a", "ab,bc->c", "abf,fb->ab",
]  # fmt: skip


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_are_those_of_einsum(equation: str) -> None:
    torch.manual_seed(0)
    terms = equation.partition("->")[0].split(",")
    operands = [torch.randn([SIZES[letter] for letter in term]) for term in terms]
    strided = [torch.randn([SIZES[letter] for letter in reversed(term)]).permute(tuple(reversed(range(len(term))))) for term in terms]
    for given in (operands, strided):
        run = product(equation, [tuple(t.shape) for t in given])
        torch.testing.assert_close(run(*given), torch.einsum(equation, *given))


def test_any_product_of_two_is_that_of_einsum() -> None:
    draw = random.Random(0)
    for _ in range(100):
        left, right = ("".join(draw.sample("abcdf", draw.randint(1, 4))) for _ in range(2))
        every = sorted(set(left + right))
        out = "".join(draw.sample(every, draw.randint(0, len(every))))
        operands = [torch.randn([SIZES[letter] for letter in term], dtype=torch.float64) for term in (left, right)]
        equation = f"{left},{right}->{out}"
        run = product(equation, [tuple(t.shape) for t in operands])
        torch.testing.assert_close(run(*operands), torch.einsum(equation, *operands), msg=equation)


def test_a_dim_of_one_beside_a_longer_one_is_broadcast() -> None:
    x, y = torch.randn(2, 1), torch.randn(3, 4)
    torch.testing.assert_close(product("ab,bc->ac", [(2, 1), (3, 4)])(x, y), torch.einsum("ab,bc->ac", x, y))


def op(name: str, results: int, operands: int, **attributes: Any) -> Op:
    return Op(name=name, operands=tuple(range(operands)), results=tuple(range(operands, operands + results)), attributes=attributes)


X, W = torch.randn(4, 6, 8), torch.randn(8)
SCORES, TARGET = torch.randn(4, 5, 7).log_softmax(-1), torch.tensor([[1, 2, -100, 0, 6]]).repeat(4, 1)
_, MEAN, RSTD = torch.ops.aten.native_layer_norm.default(X, [8], W, None, 1e-5)
NLL = {"weight": None, "ignore_index": -100}
CASES: dict[str, tuple[Op, list[torch.Tensor]]] = {
    "view": (op("aten.view.default", 1, 1, self=Ref(0), size=(24, 8)), [X]),
    "expand": (op("aten.expand.default", 1, 1, self=Ref(0), size=(4, 6, 8), implicit=False), [W]),
    "permute": (op("aten.permute.default", 1, 1, self=Ref(0), dims=(2, 0, 1)), [X]),
    "scalar": (op("aten.mul.Tensor", 1, 1, self=Ref(0), other=0.5), [X]),
    "same operand twice": (op("aten.mul.Tensor", 1, 1, self=Ref(0), other=Ref(0)), [X]),
    "copy": (op("aten._to_copy.default", 1, 1, self=Ref(0), dtype="f64"), [X]),
    "copy as it is": (op("aten._to_copy.default", 1, 1, self=Ref(0), dtype=None), [X]),
    "sum in another dtype": (op("aten.sum.dim_IntList", 1, 1, self=Ref(0), dim=(0, 2), keepdim=True, dtype="f64"), [X]),
    "list of tensors": (op("aten.cat.default", 1, 2, tensors=(Ref(0), Ref(1), Ref(0)), dim=2), [X, X + 1]),
    "list with holes": (op("aten.index.Tensor", 1, 2, self=Ref(0), indices=(None, Ref(1))), [X, torch.tensor([1, 3])]),
    "split": (op("aten.split.Tensor", 3, 1, self=Ref(0), split_size=3, dim=2), [X]),
    "one part": (op("aten.split.Tensor", 1, 1, self=Ref(0), split_size=8, dim=2), [X]),
    "norm": (op("aten.native_layer_norm.default", 3, 2, input=Ref(0), normalized_shape=(8,), weight=Ref(1), bias=None, eps=1e-5), [X, W]),
    "norm backward, some results": (
        op(
            "aten.native_layer_norm_backward.default", 2, 5, grad_out=Ref(0), input=Ref(1), normalized_shape=(8,), mean=Ref(2),
            rstd=Ref(3), weight=Ref(4), bias=None, output_mask=(True, True, False),
        ),
        [X + 1, X, MEAN, RSTD, W],
    ),
    "zeros of a size": (op("aten.new_zeros.default", 1, 1, self=Ref(0), size=(3, 2)), [X]),
    "rows of a table": (
        op("aten.embedding_dense_backward.default", 1, 2, grad_output=Ref(0), indices=Ref(1), num_weights=9, padding_idx=-1,
           scale_grad_by_freq=False),
        [X, torch.randint(0, 9, (4, 6))],
    ),
    "gelu backward": (op("aten.gelu_backward.default", 1, 2, grad_output=Ref(0), self=Ref(1), approximate="none"), [X, X + 1]),
    "gelu backward, broadcast": (op("aten.gelu_backward.default", 1, 2, grad_output=Ref(0), self=Ref(1), approximate="none"), [W, X]),
    "losses": (op("shard.nll_loss_forward", 2, 2, self=Ref(0), target=Ref(1), **NLL), [SCORES, TARGET]),
    "weighted losses": (
        op("shard.nll_loss_forward", 2, 3, self=Ref(0), target=Ref(1), ignore_index=-100, weight=Ref(2)), [SCORES, TARGET, torch.rand(7)]
    ),
    "loss gradients": (
        op("shard.nll_loss_backward", 1, 4, grad_output=Ref(0), self=Ref(1), target=Ref(2), total_weight=Ref(3), reduction="mean", **NLL),
        [torch.tensor(2.0), SCORES, TARGET, torch.tensor(16.0)],
    ),
    "repeated": (op("aten.repeat.default", 1, 1, self=Ref(0), repeats=(2, 1, 1)), [X]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_prepared_ops_are_the_interpreted_ones(name: str) -> None:
    case, operands = CASES[name]
    wanted = {"expand": [X.shape], "view": [(24, 8)], "permute": [(8, 4, 6)], "zeros of a size": [(3, 2)], "rows of a table": [(9, 8)]}
    wanted |= {"split": [(4, 6, 3), (4, 6, 3), (4, 6, 2)], "one part": [X.shape], "repeated": [(8, 6, 8)]}
    expected = call(case, operands, wanted[name]) if name in wanted else None
    if expected is None:
        from solver_shard.ops.run import arguments_of, results_of

        expected = results_of(case, arguments_of(case, operands), [X.shape] * len(case.results))
    shapes = [tuple(t.shape) for t in expected]
    bound = bind(case, [tuple(t.shape) for t in operands], shapes)
    made = bound.function(*operands)
    made = (made,) if bound.single else tuple(made)
    assert [tuple(t.shape) for t in made] == shapes
    for found, value in zip(made, expected, strict=True):
        assert found.dtype == value.dtype
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("masked", ["no mask", "added", "boolean"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_the_kernel_is_that_of_the_kernel(masked: str, causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    mask = None if masked == "no mask" else torch.randn(2, 1, 5, 5)
    if masked == "boolean" and mask is not None:
        mask = (mask > 0) | torch.eye(5, dtype=torch.bool)
    if causal and mask is not None:
        pytest.skip("the kernel takes one of the two")
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    added = mask if mask is None or mask.dtype != torch.bool else torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    expected = kernel(query, key, value, 0.0, causal, attn_mask=added, scale=0.5)
    found = kernels.forward(query, key, value, mask=mask, causal=causal, scale=0.5)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
    gradient = torch.randn_like(query)
    slopes = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        gradient, query, key, value, *expected, 0.0, causal, attn_mask=added, scale=0.5
    )
    made = kernels.backward(gradient, query, key, value, *expected, mask=mask, causal=causal, scale=0.5)
    for one, two in zip(made, slopes, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_is_the_softmax_whose_weights_are_dropped(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keep = torch.rand(2, 3, 5, 5) < 0.7
    scores = query @ key.mT / 2
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf")) if causal else scores
    expected = (torch.softmax(scores, -1) * keep / 0.7) @ value
    gradient = torch.randn_like(expected)
    slopes = torch.autograd.grad(expected, (query, key, value), gradient)
    a = {"query": query, "key": key, "value": value, "dropout_p": 0.3, "is_causal": causal}
    with torch.no_grad():
        out, sums = kernels.run(a, keep)
        made = kernels.run(a | {"grad_out": gradient, "out": out, "logsumexp": sums}, keep)
    torch.testing.assert_close(out, expected)
    for one, two in zip(made, slopes, strict=True):
        torch.testing.assert_close(one, two)


def test_what_cannot_run_is_said_when_it_is_prepared() -> None:
    with pytest.raises(InputError, match=r"op my_lib.scaled.default is not registered here; import the library"):
        bind(op("my_lib.scaled.default", 1, 1, x=Ref(0)), [(2,)], [(2,)])
