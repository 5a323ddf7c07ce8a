"""The program's validator: each law, broken once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from programs import trained_mlp

from solver_shard.errors import InternalError
from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor, refs


def broken(change: Callable[[Program], Program]) -> Program:
    return change(trained_mlp(16, 8, 12, 1))


def with_op(program: Program, index: int, **fields: object) -> Program:
    ops = list(program.ops)
    ops[index] = dataclasses.replace(ops[index], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(program, ops=tuple(ops))


def with_tensor(program: Program, index: int, **fields: object) -> Program:
    tensors = list(program.tensors)
    tensors[index] = dataclasses.replace(tensors[index], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(program, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: with_tensor(p, 1, name=p.tensors[0].name), "two tensors are named"),
        (lambda p: with_tensor(p, 0, dtype="f99"), "unknown dtype"),
        (lambda p: with_tensor(p, 0, shape=(-1,)), "negative size"),
        (lambda p: dataclasses.replace(p, ops=p.ops[1:]), "is produced by no op"),
        (lambda p: dataclasses.replace(p, ops=(p.ops[1], p.ops[0], *p.ops[2:])), "not computed yet"),
        (lambda p: with_op(p, 1, results=(*p.ops[1].results, *p.ops[0].results)), "computed twice"),
        (lambda p: with_op(p, 0, attributes={}), "attributes refer to operands"),
        (lambda p: with_op(p, 0, phase=Phase.BACKWARD), "forward op comes after a backward op"),
        (lambda p: dataclasses.replace(p, outputs=(999,)), "never computed"),
        (lambda p: dataclasses.replace(p, gradients={0: p.ops[0].results[0]}), "cannot be the gradient"),
    ],
)
def test_a_program_that_breaks_a_law_is_named(change: Callable[[Program], Program], message: str) -> None:
    trained_mlp(16, 8, 12, 1).validate()
    with pytest.raises(InternalError, match=message):
        broken(change).validate()


def test_refs_are_found_in_nested_arguments_in_order() -> None:
    op = Op(name="x", operands=(5, 6, 7), results=(), attributes={"a": (Ref(0), (None, Ref(1))), "b": {"c": Ref(2)}, "d": 3})
    assert [ref.operand for ref in refs(op.attributes)] == [0, 1, 2]


def test_sizes_in_bytes_follow_the_dtype() -> None:
    tensor = Tensor(name="w", shape=(3, 5), dtype="bf16", role=Role.PARAMETER)
    assert (tensor.numel, tensor.nbytes) == (15, 30)
