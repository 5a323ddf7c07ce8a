"""What cleaning makes of the usual ways to write a layer, and that it computes the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from traced_models import Function, check, counts, squares, text

from solver_shard.program import Phase
from solver_shard.tracing.torch import trace

B, T, K, N = 3, 5, 8, 6
X = torch.randn(B, T, K)


def flat(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x.view(-1, K) @ w.t()).view(B, T, N)


def flat_to_the_end(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.reshape(B * T, K) @ w.t()


def heads(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, w).view(B, T, 2, N // 2).transpose(1, 2)
    return y @ y.transpose(-1, -2)


def batch_second(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.transpose(0, 1), w).transpose(0, 1)


def test_a_mask_of_zeros_is_no_mask() -> None:
    """Attention over an encoder without position biases, as T5 writes it; a mask of other numbers stays."""
    q, k, v = (torch.randn(2, 3, n, 4) for n in (5, 6, 6))
    for number, kept in ((0.0, False), (0.5, True)):

        def crossed(w: torch.Tensor, x: torch.Tensor, number: float = number) -> torch.Tensor:
            return F.scaled_dot_product_attention(x * w, k, v, attn_mask=torch.full((1, 3, 5, 6), number))

        program = trace(Function(crossed, 4), {"x": q}, name="crossed", loss_fn=squares)
        found = [op for op in program.ops if "attention" in op.name]
        assert len(found) == 2
        assert [op.attributes["attn_mask"] is not None for op in found] == [kept, kept]


CASES: list[tuple[str, Callable[..., torch.Tensor], list[str]]] = [
    ("linear", lambda w, x: F.linear(x, w), ["einsum abc,dc->abd"]),
    ("flattened rows", flat, ["einsum abc,dc->abd"]),
    ("flattened result", flat_to_the_end, ["einsum abc,dc->abd", "view [15, 6]"]),
    ("heads", heads, ["einsum abc,dc->abd", "view [3, 5, 2, 3]", "einsum abcd,aecd->acbe"]),
    ("rows transposed and back", batch_second, ["einsum abc,dc->abd"]),
    ("softmax of flattened rows", lambda w, x: flat_to_the_end(w, x).softmax(-1).view(B, T, N), ["einsum abc,dc->abd", "_softmax"]),
    ("broadcast matmul", lambda w, x: x @ w.t().expand(B, K, N), ["einsum abc,dc->abd"]),
    ("sum of flattened rows", lambda w, x: flat_to_the_end(w, x).sum(0), ["einsum abc,dc->abd", "sum [0, 1]"]),
    ("expanded mean", lambda w, x: x.mean(-1, keepdim=True).expand(B, T, N) * 2 * w[:, 0], ["mean", "mul", "slice", "view [6]", "mul"]),
    ("nothing but noise", lambda w, x: (F.linear(x, w) * 1.0 + 0).clone().contiguous().detach(), ["einsum abc,dc->abd"]),
    ("select", lambda w, x: F.linear(x, w)[:, 0], ["einsum abc,dc->abd", "slice", "view [3, 6]"]),
    ("transposed result", lambda w, x: F.linear(x, w).permute(2, 0, 1), ["einsum abc,dc->dab"]),
    ("vector", lambda w, x: x @ w[0], ["slice", "einsum abc,dc->ab"]),
]


@pytest.mark.parametrize(("function", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_forward_form(function: Callable[..., torch.Tensor], expected: list[str]) -> None:
    program = trace(Function(function, N, K), (X,), name="case", forward_only=True)
    assert text(program) == expected


@pytest.mark.parametrize("function", [case[1] for case in CASES if case[0] != "nothing but noise"])
def test_same_numbers_and_gradients(function: Callable[..., torch.Tensor]) -> None:
    check(Function(function, N, K), {"x": X}, loss_fn=squares)


def test_the_three_products_of_a_linear_layer() -> None:
    program = check(nn.Linear(K, N), {"input": X.requires_grad_(False)}, loss_fn=squares)
    equations = [op.attributes["equation"] for op in program.ops if op.name == "aten.einsum.default"]
    assert equations == ["abc,dc->abd", "abc,abd->cd"]
    sums = [op for op in program.ops if op.name == "aten.sum.dim_IntList"]
    assert [(op.attributes["dim"], op.attributes["keepdim"]) for op in sums] == [((0, 1), False)]
    assert not counts(program)["view"]


def test_data_gradient_reads_the_weight_as_it_is() -> None:
    program = check(nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)), {"input": X}, loss_fn=squares)
    equations = [op.attributes["equation"] for op in program.ops if op.phase is Phase.BACKWARD and op.name == "aten.einsum.default"]
    assert equations == ["abc,cd->abd", "abc,abd->cd", "abc,abd->cd"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_over_flattened_rows(reduction: str, weighted: bool) -> None:
    target = torch.randint(0, N, (B, T))
    target[0, 1] = -100
    weight = torch.rand(N) if weighted else None

    def loss(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.view(-1, N), target.view(-1), weight, reduction=reduction)

    model = nn.Linear(K, N)
    model.register_buffer("unused", torch.zeros(1))
    program = trace(model, (X,), name="loss", loss_fn=loss)
    ops = counts(program)
    assert ops["nll_loss_forward"] == ops["nll_loss_backward"] == 1
    assert ops["div"] == (reduction == "mean")
    assert all(op.attributes["size"] != (B * T, N) for op in program.ops if op.name == "aten.view.default")


def test_equal_factories_are_one() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(T).unsqueeze(0) + torch.arange(T).unsqueeze(0)
        return F.linear(x, w) * positions.unsqueeze(-1) + torch.zeros(T, 1) + torch.full((T, 1), 0.0)

    ops = counts(trace(Function(function, N, K), (X,), name="case", forward_only=True))
    assert ops["arange"] == 1
    assert ops["full"] == 1


def test_dead_ops_are_gone() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.sin(x).sum()
        return F.linear(x, w)

    assert text(trace(Function(function, N, K), (X,), name="case", forward_only=True)) == ["einsum abc,dc->abd"]


def test_split_is_one_op_with_all_its_results() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        one, two, three = F.linear(x, w).split(2, dim=-1)
        return one * two + three

    program = check(Function(function, N, K), {"x": X}, loss_fn=squares)
    (split,) = (op for op in program.ops if op.name == "aten.split.Tensor")
    assert len(split.results) == 3


def test_patch_embedding_is_a_product() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, N, kernel_size=4, stride=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embed(x).flatten(2).transpose(1, 2)

    program = check(Patches(), {"x": torch.randn(2, 3, 8, 12)}, loss_fn=squares)
    ops = counts(program)
    assert "convolution" not in ops
    assert "convolution_backward" not in ops
    assert ops["einsum"] == 2


def test_other_convolutions_stay() -> None:
    program = check(nn.Conv2d(3, 4, 3, padding=1), {"input": torch.randn(2, 3, 6, 6)}, loss_fn=squares)
    assert counts(program)["convolution"] == 1


class Chain(nn.Module):
    """A random chain of ops, the same one at every call."""

    KINDS = (
        *("permute", "flatten", "flatten", "unflatten", "unflatten", "matmul", "matmul", "addmm", "unary", "binary", "sum", "amax"),
        *("softmax", "norm", "unsqueeze", "squeeze", "expand", "narrow", "cat", "square", "select", "stack", "repeat"),
    )

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weights = nn.ParameterList()
        self.made = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw, used = random.Random(self.seed), 0

        def weight(*shape: int) -> torch.Tensor:
            nonlocal used
            if not self.made:
                self.weights.append(nn.Parameter(torch.randn(*shape) / 3))
            used += 1
            return self.weights[used - 1]

        pool = [x * weight(x.shape[-1])]
        for _ in range(draw.randint(6, 18)):
            result = self.step(draw.choice(self.KINDS), draw.choice(pool[-3:]), draw, weight)
            if 0 < result.numel() <= 2000 and result.ndim < 7:
                pool.append(result)
        self.made = True
        return sum((y**2).mean() for y in pool[-3:])  # type: ignore[return-value]

    @staticmethod
    def step(kind: str, y: torch.Tensor, draw: random.Random, weight: Callable[..., torch.Tensor]) -> torch.Tensor:
        rank = y.ndim
        if kind == "unary":
            return draw.choice([torch.tanh, F.silu])(y)
        if kind == "unsqueeze":
            return y.unsqueeze(draw.randint(0, rank))
        if kind == "squeeze":
            return y.squeeze()
        if kind == "expand":
            return y.unsqueeze(0).expand(2, *y.shape)
        if rank == 0:
            return y
        at = draw.randrange(rank)
        if kind == "permute":
            return y.permute(draw.sample(range(rank), rank))
        if kind == "flatten":
            return y.flatten(at, min(at + 1, rank - 1))
        if kind == "unflatten":
            part = draw.choice([n for n in range(1, y.shape[at] + 1) if y.shape[at] % n == 0])
            return y.unflatten(at, (part, y.shape[at] // part))
        if kind in ("matmul", "addmm"):
            rows, n = y.reshape(-1, y.shape[-1]), draw.choice([2, 3, 4])
            made = rows @ weight(y.shape[-1], n) if kind == "matmul" else torch.addmm(weight(n), rows, weight(y.shape[-1], n))
            return made.reshape(*y.shape[:-1], n) if draw.random() < 0.7 else made
        if kind == "binary":
            return y * weight(y.shape[-1])
        if kind in ("sum", "amax"):
            return getattr(y, kind)(at, keepdim=draw.random() < 0.5)
        if kind == "softmax":
            return y.softmax(at)
        if kind == "norm":
            return F.layer_norm(y, y.shape[at:], weight(*y.shape[at:]), weight(*y.shape[at:]))
        if kind == "narrow":
            return y.narrow(at, draw.randrange(y.shape[at]), 1)
        if kind == "cat":
            return torch.cat([y, y.tanh()], at)
        if kind == "square":
            return y @ y.transpose(-1, -2) if rank >= 3 else y
        if kind == "select":
            return y.select(at, draw.randrange(y.shape[at]))
        if kind == "stack":
            return torch.stack([y, y * 2], at)
        return y.repeat(*(draw.choice([1, 1, 2]) for _ in range(rank)))


@pytest.mark.parametrize("seed", range(40))
def test_random_chains_compute_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(1000 + seed)
    x = torch.randn(*(draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4))))
    model = Chain(seed)
    model(x)  # makes the weights
    check(model, {"x": x}, tolerance=1e-4)
