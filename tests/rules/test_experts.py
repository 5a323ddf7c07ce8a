"""Products per expert and the picks around them: strategies, numbers on shards, shares of work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from rules.cases import Case, case, ints, t

from solver_shard.graph.strategies import op_strategies
from solver_shard.ops import implementations
from solver_shard.ops.implementations import free
from solver_shard.ops.run import call
from solver_shard.program import Tensor
from solver_shard.rules.check.shards import legal_strategies, verify
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table

TABLE = load_table()
MESHES = ((2,), (3,), (2, 2))
EXPERTS, BATCH, ROWS = 5, 4, 6


def ends(*counts: list[int]) -> torch.Tensor:
    return torch.tensor([torch.tensor(c).cumsum(0).tolist() for c in counts], dtype=torch.int32)


UNEVEN = ends([1, 2, 0, 2, 1], [6, 0, 0, 0, 0], [0, 0, 0, 0, 6], [2, 1, 1, 1, 1])
"""Where the rows of five experts end, in four sequences of six rows: any routing must come out right."""


def products(dtype: torch.dtype = torch.float64) -> Case:
    rows, weights = t(BATCH, ROWS, 8, dtype=dtype), t(EXPERTS, 8, 12, dtype=dtype)
    return case("shard.grouped_mm.default", self=rows, mat2=weights, offs=UNEVEN)


def gradients(dtype: torch.dtype = torch.float64) -> Case:
    rows, others = t(BATCH, ROWS, 8, dtype=dtype), t(BATCH, ROWS, 12, dtype=dtype)
    return case("shard.grouped_mm_weights.default", self=rows, mat2=others, offs=UNEVEN)


def flat(left: tuple[int, ...], right: tuple[int, ...]) -> Case:
    stops = torch.tensor([3, 3, 8], dtype=torch.int32)
    half = torch.bfloat16
    return case("aten._grouped_mm.default", self=t(*left, dtype=half), mat2=t(*right, dtype=half), offs=stops, bias=None, out_dtype=None)


CASES: dict[str, tuple[Callable[[], Case], tuple[int, ...]]] = {
    "rows by weights": (products, (BATCH, ROWS, 12)),
    "gradient of weights": (gradients, (EXPERTS, 8, 12)),
    "rows by weights in bf16": (lambda: products(torch.bfloat16), (BATCH, ROWS, 12)),
    "rows of one list by weights": (lambda: flat((8, 16), (3, 16, 32)), (8, 32)),
    "gradient of weights, rows of one list": (lambda: flat((16, 8), (8, 32)), (3, 16, 32)),
    "tokens picked": (lambda: case("shard.take.default", self=t(BATCH, 5, 6), index=ints(5, BATCH, 7)), (BATCH, 7, 6)),
    "numbers picked": (lambda: case("shard.take.default", self=t(BATCH, 5), index=ints(5, BATCH, 7)), (BATCH, 7)),
    "rows counted": (lambda: case("shard.count.default", self=ints(5, BATCH, 7).double(), bins=5), (BATCH, 5)),
}


def built(name: str) -> tuple[Case, Rule, tuple[int, ...]]:
    make, shape = CASES[name]
    made = make()
    names = {torch.float64: "f64", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32"}
    operands = [Tensor(name="x", shape=tuple(v.shape), dtype=names[v.dtype]) for v in made.values]
    return made, build_rule(made.op, operands, [Tensor(name="y", shape=shape, dtype=operands[0].dtype)], TABLE), shape


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_gives_the_unsharded_numbers(name: str, mesh: tuple[int, ...]) -> None:
    made, rule, shape = built(name)
    checked = verify(made.op, made.values, rule, call, result_shapes=[shape], mesh_shape=mesh)
    assert not checked.failures, "\n".join(map(str, checked.failures))
    shapes = [tuple(v.shape) for v in made.values]
    if rule.implementations and len(mesh) == 1:
        found = legal_strategies(rule, shapes, [shape], mesh)
        assert any(s.implementation for combination in found for s in combination) == (
            rule.factors[rule.implementations[0].factor].size >= mesh[0]
        )


SHOWN = {
    "rows by weights": ["R R R -> R", "S(0) R S(0) -> S(0)", "S(2) S(1) R -> P(sum)", "R S(2) R -> S(2)", "S(1) S(0) R -> S(1)"],
    "gradient of weights": ["R R R -> R", "S(0) S(0) S(0) -> P(sum)", "S(2) R R -> S(1)", "R S(2) R -> S(2)", "S(1) S(1) R -> S(0)"],
    "rows of one list by weights": ["R R R -> R", "R S(2) R -> S(1)", "S(1) S(1) R -> P(sum)", "S(0) S(0) R -> S(0)"],
    "gradient of weights, rows of one list": ["R R R -> R", "S(0) R R -> S(1)", "R S(1) R -> S(2)", "S(1) S(0) R -> S(0)"],
    "tokens picked": ["R R -> R", "S(0) S(0) -> S(0)", "R S(1) -> S(1)", "S(2) R -> S(2)", "S(1) R -> P(sum)"],
    "rows counted": ["R -> R", "S(0) -> S(0)", "S(1) -> P(sum)"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_one_axis_may_do(name: str) -> None:
    _, rule, _ = built(name)
    found = [s for s in rule.strategies() if not s.name.startswith("P(")]
    assert [" -> ".join(" ".join(map(str, side)) for side in (s.operands, s.results)) for s in found] == SHOWN[name]


@pytest.mark.parametrize(("shards", "share"), [(1, 1.0), (2, 3 / 5), (3, 2 / 5), (4, 2 / 5), (5, 1 / 5)])
def test_own_experts_do_their_even_share_without_collectives(shards: int, share: float) -> None:
    for name in ("rows by weights", "gradient of weights"):
        _, rule, _ = built(name)
        (way,) = rule.implementations
        assert (way.name, way.collectives) == ("own-experts", ())
        assert rule.share(way.factor, shards) == pytest.approx(share)


def test_sequences_and_experts_are_cut_by_different_axes() -> None:
    made, rule, shape = built("rows by weights")
    operands = [Tensor(name="x", shape=tuple(v.shape), dtype="f64") for v in made.values]
    column = op_strategies(rule, operands, [Tensor(name="y", shape=shape, dtype="f64")], (2, 5), (frozenset(),) * 3)
    k = next(k for k in range(len(column.axis_choice)) if column.names(k) == ("batch", "own-experts"))
    assert column.work[k] == pytest.approx(1 / 10)
    assert [str(c.layouts[c.chosen[k]]) for c in (*column.operands, *column.results)] == ["S(0)S(1)", "RS(0)", "S(0)R", "S(0)S(1)"]


@pytest.mark.parametrize("name", ["rows by weights", "gradient of weights", "rows of one list by weights", "tokens picked"])
def test_a_device_that_does_not_know_its_experts_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rule, shape = built(name)
    (way,) = rule.implementations
    known = implementations.WAYS[way.name, made.op.name]
    wrong = dataclasses.replace(known, run=lambda op, a, part: known.run(op, a, dataclasses.replace(part, start=0)))
    monkeypatch.setattr(implementations, "WAYS", {(way.name, made.op.name): wrong})
    failures = verify(made.op, made.values, rule, call, result_shapes=[shape]).failures
    assert {failure.strategy for failure in failures} == {way.name}


def test_what_is_free_stays_within_its_team() -> None:
    buffers = [torch.tensor(n) for n in (1, 2, 4, 8)]
    teams = [(0, 2), (1, 3)]
    assert [int(x) for x in free("offset", buffers, teams)] == [0, 0, 1, 2]
    assert [int(x) for x in free("exchange", buffers, teams)] == [5, 10, 5, 10]
