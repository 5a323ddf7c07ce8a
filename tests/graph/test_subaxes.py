"""Which axis is split, and what a part of it may cut."""

from __future__ import annotations

import pytest
import torch
from programs import Builder
from rules.cases import Case, case, t
from rules.execute import execute

import solver_shard
import solver_shard.pipeline
from solver_shard.graph.strategies import op_strategies
from solver_shard.graph.sub_axes import Heads, split_where_needed
from solver_shard.mesh import Mesh
from solver_shard.program import Program, Ref, Role
from solver_shard.rules.check.shards import verify
from solver_shard.rules.rulebook import Rulebook, build_rule
from solver_shard.rules.table import load_table

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
TABLE = load_table()


def attention(batch: int, heads: int, kv: int) -> Program:
    b = Builder()
    q, k, v = b.input("q", batch, heads, 32, 16), b.input("k", batch, kv, 32, 16), b.input("v", batch, kv, 32, 16)
    attributes = {"query": Ref(0), "key": Ref(1), "value": Ref(2), "dropout_p": 0.0, "is_causal": True, "attn_mask": None, "scale": None}
    out = b.call(FLASH, (q, k, v), attributes, (batch, heads, 32, 16), (batch, heads, 32), role=Role.OUTPUT)
    return b.program(out, out + 1)


@pytest.mark.parametrize(
    ("heads", "mesh", "split"),
    [
        ((64, 8), "dp=16,tp=16", "dp=16,tp=8x2"),
        ((64, 8), "dp=16,tp=8", None),
        ((12, 12), "dp=2,tp=8", "dp=2,tp=4x2"),
        ((9, 3), "dp=2,tp=8", None),  # no part of the axis divides them
        ((64, 8), "a=2,b=2,c=16", None),  # enough axes
        ((64, 8), "dp=16,tp=16,one=1", "dp=16,tp=8x2,one=1"),
        ((64, 8), "dp=16,tp=2x8", None),  # the user did
        ((16, 2), "tp=8", None),  # the batch can be cut by all devices
    ],
)
def test_the_innermost_axis_is_split_where_heads_ask_for_it(heads: tuple[int, int], mesh: str, split: str | None) -> None:
    found = split_where_needed(attention(32, *heads), Rulebook(TABLE), Mesh.parse(mesh))
    assert str(found) == (split or mesh)


def test_a_mesh_of_one_axis_is_split_where_nothing_else_can_be_cut_by_it() -> None:
    assert str(split_where_needed(attention(4, 16, 2), Rulebook(TABLE), Mesh.parse("tp=8"))) == "tp=2x4"


def test_only_the_axes_asked_about_are_split() -> None:
    program, mesh = attention(32, 64, 8), Mesh.parse("tp=16,dp=16")
    assert split_where_needed(program, Rulebook(TABLE), mesh, ()) == mesh
    assert str(split_where_needed(program, Rulebook(TABLE), mesh, (0,))) == "tp=8x2,dp=16"
    assert str(split_where_needed(program, Rulebook(TABLE), Mesh.parse("a=2,b=2,tp=16"), (2,))) == "a=2,b=2,tp=8x2"


def test_a_split_that_nobody_asked_for_is_undone_where_the_limits_are_too_small_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program, lines = attention(32, 64, 8), list[str]()
    asked = {"mesh": "dp=2,tp=16", "memory": "1GiB", "reserve": 0}
    assert str(solver_shard.optimize(program, **asked).mesh) == "dp=2,tp=8x2"
    monkeypatch.setattr(solver_shard.pipeline, "SPLIT_PAIRS", 0)
    plan = solver_shard.optimize(program, **asked, progress=lines.append)
    assert str(plan.mesh) == "dp=2,tp=16"
    assert any("stays whole" in line and "--split" in line for line in lines)
    assert str(solver_shard.optimize(program, **(asked | {"mesh": "dp=2,tp=8x2"})).mesh) == "dp=2,tp=8x2", "the user asked for this one"


def grouped(heads: int, kv: int, *, backward: bool = False) -> Case:
    torch.manual_seed(0)
    q, k, v = t(2, heads, 6, 8), t(2, kv, 6, 8), t(2, kv, 6, 8)
    rest = {"dropout_p": 0.0, "is_causal": True, "attn_mask": None, "scale": None}
    if not backward:
        return case(FLASH, query=q, key=k, value=v, **rest)
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    name = FLASH.replace(".default", "_backward.default")
    return case(name, grad_out=t(2, heads, 6, 8), query=q, key=k, value=v, out=out, logsumexp=logsumexp, **rest)


@pytest.mark.parametrize(
    ("made", "mesh"),
    [
        (grouped(4, 2), (2, 2)),
        (grouped(8, 2), (2, 2)),
        (grouped(8, 2), (2, 2, 2)),
        (grouped(12, 3), (3, 2)),
        (grouped(8, 2, backward=True), (2, 2)),
        (grouped(12, 3, backward=True), (3, 4)),
        (case("aten.view.default", self=t(2, 2, 6), size=(2, 12)), (2, 2)),
        (case("aten.view.default", self=t(4, 3, 5), size=(12, 5)), (2, 2, 3)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else value.op.name,
)
def test_minor_cuts_give_the_unsharded_numbers(made: Case, mesh: tuple[int, ...]) -> None:
    operands, results = made.tensors(execute)
    rule = build_rule(made.op, operands, results, TABLE)
    checked = verify(made.op, made.values, rule, execute, result_shapes=[r.shape for r in results], mesh_shape=mesh, minor=True)
    assert checked.strategies
    assert not checked.failures, "\n".join(map(str, checked.failures))


def test_groups_are_cut_only_after_their_heads_and_on_inner_parts() -> None:
    made = grouped(8, 2)
    operands, results = made.tensors(execute)
    rule = build_rule(made.op, operands, results, TABLE)
    assert [(s.name, [str(p) for p in s.operands]) for s in rule.minor_strategies()] == [("group", ["S(1)", "R", "R"])]
    pending = (frozenset(),) * 3

    def names(mesh: tuple[int, ...], inner: set[int]) -> set[tuple[str, ...]]:
        column = op_strategies(rule, operands, results, mesh, pending, inner)
        return {column.names(k) for k in range(len(column.axis_choice)) if "group" in column.names(k)}

    assert names((2, 4), {1}) == {("heads", "group")}
    assert names((2, 4), set()) == set()
    assert names((4, 2), {1}) == set(), "heads cannot be cut by 4"
    assert names((2, 2, 2), {2}) == {("heads", other, "group") for other in ("R", "batch", "cut-queries")} | {
        (other, "heads", "group") for other in ("R", "batch", "cut-queries")
    }
    assert names((2, 8), {1}) == set(), "a group has 4 queries"


@pytest.mark.parametrize(
    ("heads", "sizes", "cut"),
    [
        (Heads(shared=8, group=8), (8, 2), (True, True)),
        (Heads(shared=8), (8, 2), (True, False)),
        (Heads(shared=8, group=8), (2, 8), (False, True)),
        (Heads(shared=12), (4, 2), (True, False)),
        (Heads(shared=6, group=4), (2, 4), (True, False)),
        (Heads(shared=4, group=3), (4, 2), (True, False)),
        (Heads(shared=3), (2, 2), (False, False)),
    ],
)
def test_matrices_are_cut_between_heads(heads: Heads, sizes: tuple[int, ...], cut: tuple[bool, ...]) -> None:
    assert heads.cut_by(sizes) == cut
