"""Prices of ops under their strategies, and of copies that break a fused chain."""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.choice.strategies import OpStrategies
from solver_shard.costs.kernels import kernel_of
from solver_shard.costs.model import CostModel
from solver_shard.program import Program


def op_nanoseconds(program: Program, i: int, column: OpStrategies, costs: CostModel, fused: frozenset[int] = frozenset()) -> Ints:
    """Roofline time of an op and the collectives inside it, under each of its strategies; views take none.

    Tensors that are ``fused`` are neither written nor read.
    """
    rule = column.rule
    if rule.view:
        return np.zeros(len(column.work), dtype=np.int64)
    nbytes = np.zeros(len(column.work), dtype=np.int64)
    op = program.ops[i]
    for j, operand in enumerate(column.operands):
        if rule.needs(j) and op.operands[j] not in fused:
            nbytes += operand.nbytes[operand.chosen]
    for j, result in enumerate(column.results):
        if op.results[j] not in fused:
            nbytes += result.nbytes[result.chosen]
    computing = costs.compute_ns(rule.flops * column.work, nbytes, compute_dtype(program, i), kernel_of(rule))
    return computing + column.collective_nanoseconds(costs.collectives.times)


def spill_nanoseconds(dtype: str, written: Ints, read: Ints, costs: CostModel) -> Ints:
    """What a copy of a fused tensor costs besides its collectives: the maker writes it after all, the reader reads it back."""
    return costs.compute_ns(0, written, dtype) + costs.compute_ns(0, read, dtype)


def compute_dtype(program: Program, i: int) -> str:
    """Dtype an op computes in: its first floating-point operand's, else its first result's."""
    op = program.ops[i]
    dtypes = [program.tensors[t].dtype for t in (*op.operands, *op.results)]
    return next((d for d in dtypes if d[0] in "fb" and d != "bool"), dtypes[0])
