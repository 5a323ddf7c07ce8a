"""The strategies that a rule offers, written out: what one mesh axis may do to operands and results.

Passing averages, maxima and minima are left out of the lists (``P`` is ``P(sum)``); they follow the same operand sets.
"""

from __future__ import annotations

import pytest
from rules.cases import Case, case, flags, ints, t
from rules.execute import execute

from solver_shard.layout import Placement
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table

TABLE = load_table()
PASS3 = ["R -> R", "S0 -> S0", "S1 -> S1", "S2 -> S2", "P -> P"]
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def rule_of(made: Case) -> Rule:
    operands, results = made.tensors(execute)
    return build_rule(made.op, operands, results, TABLE)


def show(rule: Rule) -> list[str]:
    def text(placements: tuple[Placement, ...]) -> str:
        return " ".join(str(p).replace("P(sum)", "P").replace("(", "").replace(")", "") for p in placements)

    kept = [s for s in rule.strategies() if not s.name.startswith(("P(avg)", "P(max)", "P(min)"))]
    return [f"{text(s.operands)} -> {text(s.results)}".strip() for s in kept]


def sdpa(heads: int, kv: int) -> Case:
    """Grouped-query attention on the math variant, which takes fewer key-value heads."""
    return case(
        "aten._scaled_dot_product_attention_math.default", query=t(2, heads, 4, 8), key=t(2, kv, 4, 8), value=t(2, kv, 4, 8),
        attn_mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, scale=None, enable_gqa=True,
    )  # fmt: skip


EXPECTED = [
    (
        "matmul with a weight: batch, sequence, contracted (partial), columns; linear in each",
        case("aten.einsum.default", equation="abc,dc->abd", tensors=(t(4, 6, 8), t(5, 8))),
        ["R R -> R", "S0 R -> S0", "S1 R -> S1", "S2 S1 -> P", "R S0 -> S2", "P R -> P", "R P -> P"],
    ),
    (
        "weight gradient: rows are contracted",
        case("aten.einsum.default", equation="abd,abc->dc", tensors=(t(4, 6, 5), t(4, 6, 8))),
        ["R R -> R", "S0 S0 -> P", "S1 S1 -> P", "S2 R -> S0", "R S2 -> S1", "P R -> P", "R P -> P"],
    ),
    (
        "attention scores: batch and heads on both sides",
        case("aten.einsum.default", equation="abcd,abed->abce", tensors=(t(2, 4, 6, 5), t(2, 4, 3, 5))),
        ["R R -> R", "S0 S0 -> S0", "S1 S1 -> S1", "S2 R -> S2", "S3 S3 -> P", "R S2 -> S3", "P R -> P", "R P -> P"],
    ),
    (
        "a square by one operand is not linear",
        case("aten.mul.Tensor", self=(x := t(4, 6)), other=x),
        ["R -> R", "S0 -> S0", "S1 -> S1"],
    ),
    ("bias", case("aten.add.Tensor", self=t(4, 6), other=t(6), alpha=1), ["R R -> R", "S0 R -> S0", "S1 S0 -> S1", "P P -> P"]),
    ("adding a number is not linear", case("aten.add.Tensor", self=t(4, 6), other=1.0, alpha=1), ["R -> R", "S0 -> S0", "S1 -> S1"]),
    ("scaling by a number is", case("aten.mul.Tensor", self=t(4), other=2.0), ["R -> R", "S0 -> S0", "P -> P"]),
    ("division: the numerator only", case("aten.div.Tensor", self=t(4), other=t(4)), ["R R -> R", "S0 S0 -> S0", "P R -> P"]),
    ("rounding is not linear", case("aten._to_copy.default", self=t(4), dtype="i64"), ["R -> R", "S0 -> S0"]),
    ("a change of precision is", case("aten._to_copy.default", self=t(4), dtype="f32"), ["R -> R", "S0 -> S0", "P -> P"]),
    ("truth values are not sums", case("aten._to_copy.default", self=flags(4), dtype="f32"), ["R -> R", "S0 -> S0"]),
    (
        "where: both branches, not the condition",
        case("aten.where.self", condition=flags(4, 1), self=t(4, 6), other=t()),
        ["R R R -> R", "S0 S0 R -> S0", "R S1 R -> S1", "R P P -> P"],
    ),
    ("an activation", case("aten.gelu.default", self=t(4, 6)), ["R -> R", "S0 -> S0", "S1 -> S1"]),
    (
        "its backward is linear in the gradient",
        case("aten.gelu_backward.default", grad_output=t(4), self=t(4), approximate="none"),
        ["R R -> R", "S0 S0 -> S0", "P R -> P"],
    ),
    ("heads split", case("aten.view.default", self=t(2, 3, 8), size=(2, 3, 4, 2)), PASS3),
    ("heads merged", case("aten.view.default", self=t(2, 3, 4, 2), size=(2, 3, 8)), PASS3),
    ("rows merged: the major one", case("aten.view.default", self=t(4, 3, 8), size=(12, 8)), ["R -> R", "S0 -> S0", "S2 -> S1", "P -> P"]),
    ("sizes that share only a major part", case("aten.view.default", self=t(6, 4), size=(4, 6)), ["R -> R", "S0 -> S0", "P -> P"]),
    ("transpose", case("aten.permute.default", self=t(4, 6), dims=(1, 0)), ["R -> R", "S0 -> S1", "S1 -> S0", "P -> P"]),
    (
        "repeated key-value heads: the new dim can be cut while the operand stays whole",
        case("aten.expand.default", self=t(2, 4, 1, 3), size=(2, 4, 2, 3), implicit=False),
        ["R -> R", "S0 -> S0", "S1 -> S1", "R -> S2", "S3 -> S3", "P -> P"],
    ),
    ("slice", case("aten.slice.Tensor", self=t(4, 6), dim=1, start=0, end=3, step=1), ["R -> R", "S0 -> S0", "P -> P"]),
    ("select", case("aten.select.int", self=t(4, 6, 2), dim=1, index=0), ["R -> R", "S0 -> S0", "S2 -> S1", "P -> P"]),
    ("cat", case("aten.cat.default", tensors=(t(4, 2), t(4, 6)), dim=1), ["R R -> R", "S0 S0 -> S0", "P P -> P"]),
    ("split", case("aten.split.Tensor", self=t(4, 6), split_size=3, dim=1), ["R -> R R", "S0 -> S0 S0", "P -> P P"]),
    ("pad with zeros", case("aten.constant_pad_nd.default", self=t(4, 6), pad=(0, 1), value=0), ["R -> R", "S0 -> S0", "P -> P"]),
    ("pad with others", case("aten.constant_pad_nd.default", self=t(4, 6), pad=(0, 1), value=-100), ["R -> R", "S0 -> S0"]),
    ("sum", case("aten.sum.dim_IntList", self=t(4, 6), dim=(0,), keepdim=False, dtype=None), ["R -> R", "S0 -> P", "S1 -> S0", "P -> P"]),
    ("mean", case("aten.mean.dim", self=t(4, 6), dim=(-1,), keepdim=True, dtype=None), ["R -> R", "S0 -> S0", "S1 -> Pavg", "P -> P"]),
    ("maximum", case("aten.amax.default", self=t(4, 6), dim=(1,), keepdim=False), ["R -> R", "S0 -> S0", "S1 -> Pmax"]),
    ("softmax", case("aten._softmax.default", self=t(4, 6), dim=-1, half_to_float=False), ["R -> R", "S0 -> S0", "S1 -> S1"]),
    (
        "layer norm: rows, affine parameters together, and the normalised dim",
        case("aten.native_layer_norm.default", input=t(2, 4, 6), normalized_shape=(6,), weight=t(6), bias=t(6), eps=1e-5),
        ["R R R -> R R R", "S0 R R -> S0 S0 S0", "S1 R R -> S1 S1 S1", "R P P -> P R R", "S2 S0 S0 -> S2 R R"],
    ),
    (
        "layer norm backward: rows make partial parameter gradients",
        case(
            "aten.native_layer_norm_backward.default", grad_out=t(4, 6), input=t(4, 6), normalized_shape=(6,), mean=t(4, 1),
            rstd=t(4, 1), weight=t(6), bias=t(6), output_mask=(True, True, True),
        ),
        [
            "R R R R R R -> R R R", "S0 S0 S0 S0 R R -> S0 P P", "P R R R R R -> P P P", "R R R R P R -> P R R",
            "S1 S1 R R S0 S0 -> S1 S0 S0",
        ],
    ),
    (
        "embedding: rows, hidden, and the vocabulary",
        case("aten.embedding.default", weight=t(10, 6), indices=ints(10, 2, 3), padding_idx=-1, scale_grad_by_freq=False, sparse=False),
        ["R R -> R", "R S0 -> S0", "R S1 -> S1", "S1 R -> S2", "P R -> P", "S0 R -> P"],
    ),
    (
        "embedding backward: rows are summed; the vocabulary",
        case(
            "aten.embedding_dense_backward.default", grad_output=t(2, 3, 6), indices=ints(10, 2, 3), num_weights=10,
            padding_idx=-1, scale_grad_by_freq=False,
        ),
        ["R R -> R", "S0 S0 -> P", "S1 S1 -> P", "S2 R -> S1", "P R -> P", "R R -> S0"],
    ),
    (
        "loss: rows and classes are summed",
        case("shard.nll_loss_forward", self=t(2, 3, 5), target=ints(5, 2, 3), weight=None, ignore_index=-100),
        ["R R -> R R", "S0 S0 -> P P", "S1 S1 -> P P", "P R -> P R", "S2 R -> P R"],
    ),
    ("attention: batch and heads", sdpa(4, 4), ["R R R -> R R", "S0 S0 S0 -> S0 S0", "S1 S1 S1 -> S1 S1", "R R P -> P R"]),
    ("one key-value head: the batch, or its queries", sdpa(4, 1), ["R R R -> R R", "S0 S0 S0 -> S0 S0", "S1 R R -> S1 S1", "R R P -> P R"]),
    (
        "convolution without bias",
        case(
            "aten.convolution.default", input=t(2, 4, 4, 4), weight=t(6, 4, 2, 2), bias=None, stride=(2, 2), padding=(0, 0),
            dilation=(1, 1), transposed=False, output_padding=(0, 0), groups=1,
        ),
        ["R R -> R", "S0 R -> S0", "R S0 -> S1", "S1 S1 -> P", "P R -> P", "R P -> P"],
    ),
    ("a table by two indices", case("aten.index.Tensor", self=t(4, 6, 2), indices=(ints(4, 3, 1), ints(6, 5))),
     ["R R R -> R", "S2 R R -> S2", "R S0 R -> S0", "R R S0 -> S1", "P R R -> P"]),
    ("factories", case("aten.zeros.default", size=(4, 6)), ["-> R", "-> S0", "-> S1"]),
    ("an order of positions is made whole", case("aten.arange.default", end=6), ["-> R"]),
]  # fmt: skip


@pytest.mark.parametrize(("what", "made", "expected"), EXPECTED, ids=[what for what, _, _ in EXPECTED])
def test_strategies(what: str, made: Case, expected: list[str]) -> None:
    assert show(rule_of(made)) == expected, what


def test_heads_are_cut_in_whole_groups() -> None:
    rule = rule_of(sdpa(8, 2))
    heads = next(f for f in rule.factors if f.name == "heads")
    assert (heads.size, heads.even) == (2, True)
    assert [n for n in (2, 4, 8) if heads.legal(n)] == [2]


def test_a_split_hidden_dim_is_cut_in_whole_heads() -> None:
    rule = rule_of(case("aten.view.default", self=t(2, 24), size=(2, 3, 8)))
    heads = rule.factors[rule.operands[0][1][0]]
    assert [n for n in (2, 3, 4, 6) if heads.legal(n)] == [3]


def test_work_of_products_and_bytes_that_are_not_read() -> None:
    product = rule_of(case("aten.einsum.default", equation="abc,dc->abd", tensors=(t(4, 6, 8), t(5, 8))))
    assert (product.flops, product.matmul) == (2 * 4 * 6 * 8 * 5, True)
    causal = case(
        FLASH, query=t(2, 4, 6, 8), key=t(2, 4, 6, 8), value=t(2, 4, 6, 8), dropout_p=0.0, is_causal=True, attn_mask=None, scale=None
    )
    assert rule_of(causal).flops == 4 * 2 * 4 * 6 * 6 * 8 // 2
    assert rule_of(case("aten.copy.default", self=t(4), src=t(4))).reads == (False, True)
    assert rule_of(case("aten.view.default", self=t(4, 6), size=(24,))).view
    assert not rule_of(case("aten.clone.default", self=t(4, 6))).view
