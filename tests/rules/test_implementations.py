"""Named implementations: what they ask and leave, what their collectives cost, and that they give the unsharded numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rules.cases import Case, case, flags, ints, t
from rules.execute import execute

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError
from solver_shard.graph.strategies import op_strategies
from solver_shard.mesh import Mesh
from solver_shard.ops import implementations, kernels
from solver_shard.ops.implementations import Part, Way, perform
from solver_shard.rules.check.shards import legal_strategies, verify
from solver_shard.rules.rule import Implementation, Rule
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table
from solver_shard.tracing.attention import ATTENTION, ATTENTION_BACKWARD

TABLE = load_table()
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
MESHES = ((2,), (3,), (2, 2), (2, 3), (4,))


def rule_of(made: Case) -> Rule:
    operands, results = made.tensors(execute)
    return build_rule(made.op, operands, results, TABLE)


def lookup() -> Case:
    return case("aten.embedding.default", weight=t(7, 6), indices=ints(7, 2, 3), padding_idx=2, scale_grad_by_freq=False, sparse=False)


def lookup_backward(padding: int = 2, scaled: bool = False) -> Case:
    return case(
        "aten.embedding_dense_backward.default",
        grad_output=t(3, 4, 6), indices=ints(7, 3, 4), num_weights=7, padding_idx=padding, scale_grad_by_freq=scaled,
    )  # fmt: skip


def softmax(name: str = "_log_softmax", dim: int = -1, x: torch.Tensor | None = None) -> Case:
    rest: dict[str, object] = {"dtype": None} if "safe" in name else {"half_to_float": False}
    return case(f"aten.{name}.default", self=t(3, 4, 5) * 4 if x is None else x, dim=dim, **rest)


def softmax_backward(name: str = "_log_softmax", dim: int = -1) -> Case:
    output = torch.log_softmax(t(3, 4, 5), dim) if "log" in name else torch.softmax(t(3, 4, 5), dim)
    return case(f"aten.{name}_backward_data.default", grad_output=t(3, 4, 5), output=output, dim=dim, input_dtype="f64")


def targets() -> torch.Tensor:
    found = ints(7, 3, 4)
    found[0, 1] = found[2, 3] = -100
    return found


def loss(weight: torch.Tensor | None = None) -> Case:
    return case("shard.nll_loss_forward", self=torch.log_softmax(t(3, 4, 7), -1), target=targets(), weight=weight, ignore_index=-100)


def loss_backward(weight: torch.Tensor | None = None, reduction: str = "mean") -> Case:
    return case(
        "shard.nll_loss_backward", grad_output=t(), self=t(3, 4, 7), target=targets(), weight=weight, ignore_index=-100,
        total_weight=torch.tensor(5.0, dtype=torch.float64), reduction=reduction,
    )  # fmt: skip


def norm(affine: bool = True) -> Case:
    weight, bias = (t(7), t(7)) if affine else (None, None)
    return case("aten.native_layer_norm.default", input=t(3, 4, 7) + 2, normalized_shape=(7,), weight=weight, bias=bias, eps=1e-5)


def norm_backward(mask: tuple[bool, bool, bool] = (True, True, True)) -> Case:
    x, w, b = t(3, 4, 7) + 2, t(7), t(7)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [7], w, b, 1e-5)
    return case(
        "aten.native_layer_norm_backward.default", grad_out=t(3, 4, 7), input=x, normalized_shape=(7,), mean=mean, rstd=rstd,
        weight=w, bias=b, output_mask=mask,
    )  # fmt: skip


def rms_norm() -> Case:
    return case("aten._fused_rms_norm.default", input=t(3, 4, 7) + 2, normalized_shape=(7,), weight=t(7), eps=1e-5)


def attention(causal: bool, mask: torch.Tensor | None = None, *, backward: bool = False, heads: int = 2, keys: int = 5) -> Case:
    q, k, v = t(2, heads, 5, 4), t(2, 2, keys, 4), t(2, 2, keys, 4)
    settings = {"dropout_p": 0.0, "is_causal": causal, "attn_mask": mask, "scale": None}
    if not backward:
        return case(f"{FLASH}.default", query=q, key=k, value=v, **settings)
    out, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, attn_mask=mask)
    return case(
        f"{FLASH}_backward.default", grad_out=torch.randn_like(q), query=q, key=k, value=v, out=out, logsumexp=statistics, **settings
    )


WINDOW = '[["aten.sub.Tensor", {"self": "%q", "other": "%kv"}], ["aten.lt.Scalar", {"self": "%0", "other": 3}]]'
CAUSAL = '[["aten.ge.Tensor", {"self": "%q", "other": "%kv"}]]'
LEARNED = (
    '[["aten.sub.Tensor", {"self": "%q", "other": "%kv"}], ["aten.add.Tensor", {"self": "%0", "other": 7}], '
    '["aten.index.Tensor", {"self": "%x0", "indices": ["%h", "%1"]}], ["aten.mul.Tensor", {"self": "%score", "other": "%2"}], '
    '["aten.index.Tensor", {"self": "%x1", "indices": ["%b.own"]}], ["aten.add.Tensor", {"self": "%3", "other": "%4"}]]'
)


def own_attention(*, backward: bool = False, slope: bool = False, kv: int = 2, **settings: Any) -> Case:
    """``shard.attention`` of 4 heads of 3 and values of 5 elements."""
    q, k, v = t(3, 4, 5, 3), t(3, kv, 7, 3), t(3, kv, 7, 5)
    given = {"query": q, "key": k, "value": v, "attn_mask": None, "buffers": (), "batches": None, "heads": None, "score": "", "mask": ""}
    given |= {"dropout_p": 0.0, "is_causal": False, "scale": 0.4, **settings}
    if not backward:
        return case(ATTENTION, **given)
    out, sums = kernels.run(given)
    wanted = (given["attn_mask"] is not None, *(x.is_floating_point() for x in given["buffers"]))
    incoming = {"grad_out": torch.randn_like(out), "grad_logsumexp": torch.randn_like(sums) if slope else None}
    return case(ATTENTION_BACKWARD, **incoming, **given, out=out, logsumexp=sums, wanted=wanted)


def flex(*, backward: bool = False) -> Case:
    places = {"buffers": (t(4, 14), t(3)), "batches": torch.arange(3), "heads": torch.arange(4).unsqueeze(1)}
    return own_attention(backward=backward, slope=True, score=LEARNED, mask=WINDOW, **places)


def some_rows_masked() -> torch.Tensor:
    x = t(3, 4, 5)
    x[1, 2] = float("-inf")
    x[0, 0, :3] = float("-inf")
    return x


def distinct(*shape: int) -> torch.Tensor:
    """Indices below 7 that differ along dim 1."""
    return (
        torch.stack([torch.roll(torch.arange(7), k)[: shape[1]] for k in range(shape[0] * shape[2])])
        .reshape(shape[0], shape[2], shape[1])
        .movedim(2, 1)
    )


BAGS = {"indices": torch.tensor([3, 0, 6, 3, 2, 2, 5, 1, 3]), "offsets": torch.tensor([0, 2, 2, 5, 8])}
"""Five bags of nine rows of seven, one of them empty."""


def bag_case(mode: int = 0, padding_idx: int = -1, per_sample_weights: torch.Tensor | None = None) -> Case:
    rest = {"scale_grad_by_freq": False, "sparse": False, "include_last_offset": False}
    return case(
        "aten._embedding_bag.default", weight=t(7, 6), **BAGS, mode=mode, per_sample_weights=per_sample_weights, padding_idx=padding_idx,
        **rest,
    )  # fmt: skip


def bag_gradient(mode: int, padding_idx: int = -1, per_sample_weights: torch.Tensor | None = None, *, scaled: bool = False) -> Case:
    sizes, none = torch.ones(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return case(
        "aten._embedding_bag_backward.default", grad=t(5, 6), **BAGS, offset2bag=none, bag_size=sizes, maximum_indices=sizes.clone(),
        num_weights=7, scale_grad_by_freq=scaled, mode=mode, sparse=False, per_sample_weights=per_sample_weights, padding_idx=padding_idx,
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "padding"), [("sum", None), ("mean", 3)])
def test_bags_and_their_gradients_are_those_of_torch(mode: str, padding: int | None) -> None:
    weight = t(7, 6).requires_grad_()
    made = bag_case(("sum", "mean").index(mode), -1 if padding is None else padding)
    expected = torch.nn.functional.embedding_bag(BAGS["indices"], weight, BAGS["offsets"], mode=mode, padding_idx=padding)
    ours = execute(made.op, [weight.detach(), *made.values[1:]], [(5, 6), (9,), (5,), (5,)])
    torch.testing.assert_close(ours[0], expected.detach())
    gradient = t(5, 6)
    expected.backward(gradient)
    back = bag_gradient(("sum", "mean").index(mode), -1 if padding is None else padding)
    values = [gradient, *back.values[1:4], ours[2], *back.values[5:]]
    torch.testing.assert_close(execute(back.op, values, [(7, 6)])[0], weight.grad)


def bounds(x: torch.Tensor) -> torch.Tensor:
    """Rows with the extreme at both ends, and with ties."""
    x[0, 0], x[1, 1], x[2, 2, 1:] = 9.0, -9.0, 3.0
    x[0, 2, 4] = x[0, 3, 0] = 20.0
    return x


def batch_norm(name: str = "_native_batch_norm_legit_functional.default", **rest: object) -> Case:
    running: dict[str, object] = {} if "no_stats" in name else {"running_mean": t(4), "running_var": t(4).abs()}
    return case(f"aten.{name}", input=t(5, 4, 3, 2) + 2, weight=t(4), bias=t(4), **running, training=True, momentum=0.1, eps=1e-5, **rest)


def batch_norm_backward(mask: tuple[bool, bool, bool] = (True, True, True)) -> Case:
    x, w, mean, var = t(5, 4, 3, 2) + 2, t(4), t(4), t(4).abs()
    _, saved, inverse, _, _ = torch.ops.aten._native_batch_norm_legit_functional.default(x, w, t(4), mean, var, True, 0.1, 1e-5)
    return case(
        "aten.native_batch_norm_backward.default", grad_out=t(5, 4, 3, 2), input=x, weight=w, running_mean=mean, running_var=var,
        save_mean=saved, save_invstd=inverse, train=True, eps=1e-5, output_mask=mask,
    )  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {
    "batch norm": batch_norm,
    "batch norm without running statistics": lambda: batch_norm("_native_batch_norm_legit.no_stats"),
    "batch norm backward": batch_norm_backward,
    "variance": lambda: case("aten.var.correction", self=t(3, 4, 5) + 3, dim=(2,), correction=1, keepdim=False),
    "variance and mean": lambda: case("aten.var_mean.correction", self=t(3, 4, 5), dim=(1,), correction=1, keepdim=True),
    "standard deviation": lambda: case("aten.std.dim", self=t(3, 4, 5), dim=(1,), unbiased=False, keepdim=False),
    "log-sum-exp": lambda: case("aten.logsumexp.default", self=t(3, 4, 5) * 9, dim=(2,), keepdim=False),
    "norm": lambda: case("aten.linalg_vector_norm.default", self=t(3, 4, 5), ord=2, dim=(1,), keepdim=False, dtype=None),
    "norm of everything": lambda: case("aten.linalg_vector_norm.default", self=t(3, 4, 5), ord=2, dim=None, keepdim=False, dtype=None),
    "maximum and its place": lambda: case("aten.max.dim", self=bounds(t(3, 4, 5)), dim=2, keepdim=False),
    "minimum and its place": lambda: case("aten.min.dim", self=bounds(t(3, 4, 5)), dim=-2, keepdim=True),
    "place of the maximum": lambda: case("aten.argmax.default", self=bounds(t(3, 4, 5)), dim=1, keepdim=False),
    "place of the minimum": lambda: case("aten.argmin.default", self=ints(9, 3, 4, 5), dim=0, keepdim=False),
    "embedding": lookup,
    "embedding backward": lookup_backward,
    "embedding backward, last row padded": lambda: lookup_backward(6),
    "embedding backward, scaled": lambda: lookup_backward(-1, scaled=True),
    "log-softmax": softmax,
    "log-softmax along another dim": lambda: softmax(dim=1),
    "softmax": lambda: softmax("_softmax"),
    "safe softmax": lambda: softmax("_safe_softmax", x=some_rows_masked()),
    "log-softmax backward": softmax_backward,
    "softmax backward": lambda: softmax_backward("_softmax", dim=0),
    "gather": lambda: case("aten.gather.default", self=t(3, 4, 7), dim=2, index=ints(7, 3, 4, 2)),
    "picked rows": lambda: case("aten.index_select.default", self=t(7, 6), dim=0, index=ints(7, 9)),
    "scatter": lambda: case("aten.scatter.src", self=t(3, 7, 4), dim=1, index=distinct(3, 5, 4), src=t(3, 6, 4)),
    "scattered number": lambda: case("aten.scatter.value", self=t(3, 7, 4), dim=1, index=ints(7, 3, 5, 4), value=2.5),
    "scattered sum": lambda: case("aten.scatter_add.default", self=t(3, 7, 4), dim=-2, index=ints(7, 3, 9, 4), src=t(3, 9, 4)),
    "scattered mean": lambda: case(
        "aten.scatter_reduce.two", self=t(3, 7), dim=1, index=ints(7, 3, 9), src=t(3, 9), reduce="mean", include_self=False
    ),
    "scattered maximum": lambda: case(
        "aten.scatter_reduce.two", self=t(3, 7), dim=1, index=ints(7, 3, 9), src=t(3, 9), reduce="amax", include_self=True
    ),
    "copied rows": lambda: case("aten.index_copy.default", self=t(3, 7, 4), dim=1, index=torch.tensor([6, 0, 3]), source=t(3, 3, 4)),
    "added rows": lambda: case("aten.index_add.default", self=t(7, 4), dim=0, index=ints(7, 9), source=t(9, 4), alpha=2),
    "put rows": lambda: case(
        "aten.index_put.default", self=t(3, 7, 4), indices=(None, torch.tensor([[6, 0], [3, 1]])), values=t(2, 2, 4), accumulate=False
    ),
    "put sums": lambda: case("aten.index_put.default", self=t(7, 4), indices=(ints(7, 9),), values=t(9, 4), accumulate=True),
    "bags": bag_case,
    "weighted bags": lambda: bag_case(mode=0, per_sample_weights=t(9)),
    "means of bags": lambda: bag_case(mode=1, padding_idx=3),
    "bags backward": lambda: bag_gradient(mode=0, per_sample_weights=t(9)),
    "bags backward, scaled": lambda: bag_gradient(mode=0, scaled=True),
    "means of bags backward": lambda: bag_gradient(mode=1, padding_idx=3),
    "masked rows": lambda: case("aten.masked_scatter.default", self=t(5, 4, 6), mask=flags(5, 4, 1), source=t(20, 6)),
    "masked numbers": lambda: case("aten.masked_scatter.default", self=t(5, 4), mask=flags(4), source=t(30)),
    "masked rows backward": lambda: case(
        "aten.masked_scatter_backward.default", grad_output=t(5, 4, 6), mask=flags(5, 4, 1), sizes=(20, 6)
    ),
    "trace": lambda: case("aten.trace.default", self=t(5, 7)),
    "loss": loss,
    "loss with class weights": lambda: loss(t(7).abs()),
    "loss backward": loss_backward,
    "loss backward with class weights": lambda: loss_backward(t(7).abs(), "sum"),
    "layer norm": norm,
    "layer norm without weights": lambda: norm(affine=False),
    "layer norm backward": norm_backward,
    "root mean square norm": rms_norm,
    "attention": lambda: attention(False),
    "causal attention": lambda: attention(True),
    "attention with a mask": lambda: attention(False, t(2, 1, 5, 5)),
    "attention with a mask of queries by keys": lambda: attention(False, t(5, 7), keys=7),
    "attention backward": lambda: attention(False, t(5, 5), backward=True),
    "causal attention backward": lambda: attention(True, backward=True),
    "latent attention": own_attention,
    "causal latent attention": lambda: own_attention(mask=CAUSAL),
    "latent attention backward": lambda: own_attention(backward=True, is_causal=True),
    "attention with a learned mask backward": lambda: own_attention(backward=True, kv=4, attn_mask=t(3, 4, 5, 7)),
    "attention with functions of scores": flex,
    "attention with functions of scores backward": lambda: flex(backward=True),
}


@pytest.mark.parametrize("name", CASES)
def test_implementations_give_the_unsharded_numbers(name: str) -> None:
    made = CASES[name]()
    rule = rule_of(made)
    _, results = made.tensors(execute)
    ways = rule.implementations
    shapes = [tuple(v.shape) for v in made.values]
    count = 0
    for mesh in MESHES:
        checked = verify(made.op, made.values, rule, execute, result_shapes=[r.shape for r in results], mesh_shape=mesh)
        assert not checked.failures, "\n".join(map(str, checked.failures))
        combinations = legal_strategies(rule, shapes, [r.shape for r in results], mesh)
        count += sum(any(s.implementation in ways for s in combination if s.implementation) for combination in combinations)
    assert count > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "log-softmax", "log-softmax backward", "layer norm", "layer norm backward", "embedding"])
def test_statistics_of_narrow_dtypes_are_reduced_in_f32(name: str, dtype: torch.dtype) -> None:
    wide = CASES[name]()
    made = dataclasses.replace(wide, values=tuple(v.to(dtype) if v.is_floating_point() else v for v in wide.values))
    attributes = {
        k: {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype] if k == "input_dtype" else v for k, v in made.op.attributes.items()
    }
    made = dataclasses.replace(made, op=dataclasses.replace(made.op, attributes=attributes))
    rule = rule_of(made)
    assert {c.dtype for way in rule.implementations for c in way.collectives} <= {"f32"}
    _, results = made.tensors(execute)
    checked = verify(made.op, made.values, rule, execute, result_shapes=[r.shape for r in results], mesh_shape=(2, 2))
    assert not checked.failures, checked.failures[0]


TEXT = {
    "batch norm": "batch-statistics: S(0) R R R R -> S(0) R R R R; even; all_reduce 96",
    "batch norm backward": "batch-statistics: S(0) S(0) R R R R R -> S(0) R R; even; all_reduce 64",
    "variance": "moment-statistics: S(2) -> R; even; all_reduce 96, all_reduce 96",
    "log-sum-exp": "class-statistics: S(2) -> R; even; all_reduce 96, all_reduce 96",
    "maximum and its place": "extreme-statistics: S(2) -> R R; even; all_reduce 96, all_reduce 96",
    "embedding": "masked-lookup: S(0) R -> P(sum); whole",
    "embedding backward": "own-rows: R R -> S(0); whole",
    "gather": "masked-lookup: S(2) R -> P(sum); whole",
    "scattered sum": "own-rows: S(1) R R -> S(1); whole",
    "put rows": "own-rows: S(1) R R -> S(1); whole",
    "log-softmax": "class-statistics: S(2) -> S(2); even; all_reduce 96, all_reduce 96",
    "log-softmax backward": "class-statistics: S(2) S(2) -> S(2); even; all_reduce 96",
    "loss": "own-classes: S(2) R -> P(sum) R; whole",
    "loss with class weights": "own-classes: S(2) R R -> P(sum) R; whole",
    "loss backward": "own-classes: R S(2) R R -> S(2); whole",
    "layer norm": "norm-statistics: S(2) S(0) S(0) -> S(2) R R; even; all_reduce 192",
    "layer norm backward": "norm-statistics: S(2) S(2) R R S(0) S(0) -> S(2) S(0) S(0); even; all_reduce 192",
    "root mean square norm": "norm-statistics: S(2) S(0) -> S(2) R; even; all_reduce 96",
    "causal attention": "cut-queries: S(2) R R -> S(2) S(2); triangle",
    "attention with a mask": "cut-queries: S(2) R R S(2) -> S(2) S(2); even",
    "latent attention": "cut-queries: S(2) R R -> S(2) S(2); even",
    "causal latent attention": "cut-queries: S(2) R R -> S(2) S(2); triangle",
    "attention with a learned mask backward": "cut-queries: S(2) S(2) R R S(2) S(2) S(2) -> S(2) P(sum) P(sum) S(2); even",
    "attention with functions of scores backward": (
        "cut-queries: S(2) S(2) S(2) R R R R R R S(2) S(2) -> S(2) P(sum) P(sum) P(sum) P(sum); even"
    ),
    "causal attention backward": "cut-queries: S(2) S(2) R R S(2) S(2) -> S(2) P(sum) P(sum); triangle",
}


def shown(rule: Rule, way: Implementation) -> str:
    """With the bytes of collectives where nothing else is cut."""
    sides = " -> ".join(" ".join(map(str, side)) for side in (way.operands, way.results))
    inside = ", ".join(f"{c.kind} {c.local_nbytes(rule.factors, [1] * len(rule.factors))}" for c in way.collectives)
    return "; ".join(filter(None, (f"{way.name}: {sides}", way.share, inside)))


@pytest.mark.parametrize("name", TEXT)
def test_what_an_implementation_asks_and_leaves(name: str) -> None:
    rule = rule_of(CASES[name]())
    assert [shown(rule, way) for way in rule.implementations] == [TEXT[name]]
    assert rule.strategies()[-1].implementation == rule.implementations[0]
    assert [s.name for s in rule.strategies() if s.factor == rule.implementations[0].factor] == [rule.implementations[0].name]


def test_ops_that_cannot_be_taken_apart_have_none() -> None:
    image = case("aten.native_layer_norm.default", input=t(4, 6, 8), normalized_shape=(6, 8), weight=None, bias=None, eps=1e-5)
    assert not rule_of(image).implementations, "two normalised dims"
    assert not rule_of(attention(True, keys=6)).implementations, "a causal mask that is not square"
    assert rule_of(attention(False, keys=6)).implementations


def test_a_gradient_that_is_not_wanted_needs_no_collective() -> None:
    made = norm_backward((False, True, True))
    operands, results = made.tensors(execute)
    rule = build_rule(made.op, operands, [r for r in results if r.shape == (7,)], TABLE)
    (way,) = rule.implementations
    assert way.collectives == ()


@pytest.mark.parametrize(("size", "shards"), list(itertools.product((1, 5, 6, 8, 24), (1, 2, 3, 4, 5))))
def test_the_share_of_causal_attention_is_that_of_the_busiest_device(size: int, shards: int) -> None:
    made = attention(True)
    rule = rule_of(made)
    (way,) = rule.implementations
    factors = list(rule.factors)
    factors[way.factor] = dataclasses.replace(factors[way.factor], size=size)
    rule = dataclasses.replace(rule, factors=tuple(factors))
    chunk = -(-size // shards)
    areas = [sum(i + 0.5 for i in range(r * chunk, min((r + 1) * chunk, size))) for r in range(shards)]
    assert rule.share(way.factor, shards) == pytest.approx(max(areas) / (size * size / 2))
    if size % shards == 0:
        assert rule.share(way.factor, shards) == pytest.approx((2 * shards - 1) / shards**2)


def test_collectives_run_over_the_axes_that_share_the_cut_on_what_others_leave() -> None:
    made = softmax(x=t(8, 4, 24))
    operands, results = made.tensors(execute)
    column = op_strategies(rule_of(made), operands, results, (2, 3), (frozenset(),))
    found = {column.names(k): column.collectives(k) for k in range(len(column.axis_choice))}
    rows = 8 * 4 * 8
    assert found["R", "R"] == found["a", "b"] == ()
    assert found["R", "class-statistics"] == (("all_reduce", (1,), rows),) * 2
    assert found["class-statistics", "R"] == (("all_reduce", (0,), rows),) * 2
    assert found["a", "class-statistics"] == (("all_reduce", (1,), rows // 2),) * 2
    assert found["class-statistics", "a"] == (("all_reduce", (0,), 3 * 4 * 8),) * 2
    assert found["class-statistics", "class-statistics"] == (("all_reduce", (0, 1), rows),) * 2
    costs = CostModel(Mesh.parse("2,3"), load_cluster("h100"))
    times = column.collective_nanoseconds(costs.collectives.times)
    for k in range(len(column.axis_choice)):
        assert times[k] == sum(costs.collective_ns(*collective) for collective in column.collectives(k))
        assert column.implementation(k) == ("class-statistics" if column.collectives(k) else "")


def test_two_implementations_do_not_run_at_once() -> None:
    made = softmax(x=t(8, 4, 24))
    operands, results = made.tensors(execute)
    rule = rule_of(made)
    (way,) = rule.implementations
    other = dataclasses.replace(
        way, name="other", factor=0, operands=(rule.strategies()[1].operands[0],), results=rule.strategies()[1].results
    )
    rule = dataclasses.replace(rule, implementations=(way, other))
    column = op_strategies(rule, operands, results, (2, 2), (frozenset(),))
    names = [set(column.names(k)) for k in range(len(column.axis_choice))]
    assert {"other"} in names
    assert not [found for found in names if found == {"other", way.name}]


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("name", ["log-softmax", "layer norm", "layer norm backward"])
def test_collectives_that_the_rule_does_not_list_are_caught(name: str, times: int) -> None:
    made = CASES[name]()
    rule = rule_of(made)
    (way,) = rule.implementations
    wrong = dataclasses.replace(rule, implementations=(dataclasses.replace(way, collectives=way.collectives * times),))
    _, results = made.tensors(execute)
    failures = verify(made.op, made.values, wrong, execute, result_shapes=[r.shape for r in results]).failures
    assert {failure.strategy for failure in failures} == {way.name}


@pytest.mark.parametrize(
    "name", ["embedding", "embedding backward", "loss", "loss backward", "causal attention", "gather", "scatter", "copied rows", "put rows"]
)
def test_a_device_that_does_not_know_its_part_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CASES[name]()
    rule = rule_of(made)
    (way,) = rule.implementations
    known = implementations.WAYS[way.name, made.op.name]
    wrong = dataclasses.replace(known, run=lambda op, a, part: known.run(op, a, dataclasses.replace(part, start=0)))
    monkeypatch.setattr(implementations, "WAYS", {(way.name, made.op.name): wrong})
    _, results = made.tensors(execute)
    failures = verify(made.op, made.values, rule, execute, result_shapes=[r.shape for r in results]).failures
    assert {failure.strategy for failure in failures} == {way.name}


def test_an_unknown_implementation_and_devices_that_differ_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lookup()
    parts = [Part(start=0, length=4, size=7), Part(start=4, length=3, size=7)]
    operands = [list(made.values)] * 2
    with pytest.raises(InternalError, match="no implementation 'guess'"):
        perform("guess", made.op, operands, parts, [[(2, 3, 6)]] * 2, [torch.float64], lambda kind, buffers: buffers)

    def uneven(op: object, a: dict[str, torch.Tensor], part: Part):  # type: ignore[no-untyped-def]
        if part.start:
            yield "sum", a["weight"]
        return (a["weight"],)

    monkeypatch.setattr(implementations, "WAYS", {("mine", made.op.name): Way(run=uneven, argument="weight", dim=0)})
    with pytest.raises(InternalError, match="devices differ in the collectives of 'mine'"):
        perform("mine", made.op, operands, parts, [[(7, 6)]] * 2, [torch.float64], lambda kind, buffers: buffers)
