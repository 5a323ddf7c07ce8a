"""Sharding rules and their text: specification section 3."""

from __future__ import annotations

import pytest
from shardy.annotation_text import parse_rule

from solver_shard.errors import InputError
from solver_shard.rules.draft import factor_name
from solver_shard.shardy.graph import ShardingRule, identity_rule

TEXTS = [
    "#sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=8, j=4, k=2} reduction={k}>",
    "#sdy.op_sharding_rule<([ij])->([i, j]) {i=2, j=4}>",
    "#sdy.op_sharding_rule<([i, j], [])->([i, j], [j]) {i=8, j=4} need_replication={i} permutation={j} blocked_propagation={i, j}, custom>",
    "#sdy.op_sharding_rule<([], [])->([])>",
    "#sdy.op_sharding_rule<()->()>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_rules_goes_in_and_out(text: str) -> None:
    assert str(parse_rule(text)) == text
    assert parse_rule(text.removeprefix("#sdy.op_sharding_rule")) == parse_rule(text)


def test_factors_beyond_z_are_numbered() -> None:
    many = identity_rule((2,) * 20, 1)
    assert [factor_name(f) for f in (0, 16, 17, 18, 19)] == ["i", "y", "z", "z_1", "z_2"]
    assert parse_rule(str(many)) == many


def test_factors_without_a_type_pass_through() -> None:
    rule = parse_rule("<([i, j, k, l])->([i, j, k]) {i=2, j=2, k=2, l=2} reduction={l} need_replication={j} permutation={k}>")
    assert [rule.passes_through(f) for f in range(4)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("([i])->([i]) {i=2}", "cannot read sharding rule"),
        ("<([i])->([i]) {i=2} colour={i}>", "after the sizes come reduction, need_replication"),
        ("<([i])->([i]) {j=2}>", "sizes are given in the order i, j"),
        ("<([a])->([i]) {i=2}>", "factors are i to z"),
        ("<([i)->([i]) {i=2}>", "a tensor is written as in"),
        ("<([i, j])->([i]) {i=2}>", "operand 0 names a factor without a size"),
        ("<([i, i])->([i]) {i=2}>", "operand 0 uses a factor twice"),
        ("<([i, ])->([i]) {i=2}>", "operand 0 has a dim without factors"),
        ("<([ij])->([i]) {i=2, j=1}>", "factor of size 1 beside others"),
        ("<([i])->([i]) {i=2, j=4}>", "no tensor uses factor j"),
        ("<([i, j])->([i, j]) {i=2, j=4} reduction={j, i}>", "reduction must list factors that exist, in ascending order"),
        ("<([i, j])->([i]) {i=2, j=4} reduction={j} permutation={j}>", "only one of reduction, need_replication and permutation"),
    ],
)
def test_bad_rules_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_rule(text)
    assert message in str(caught.value)


def test_the_identity_rule_has_a_factor_per_dim() -> None:
    dims = ((0,), (1,))
    assert identity_rule((8, 4), 2) == ShardingRule(sizes=(8, 4), operands=(dims, dims), results=(dims,))
