"""Partial sums reduced before an addition rather than after it: two programs with the same numbers and collectives."""

from __future__ import annotations

import dataclasses

from solver_shard.layout import Layout, P, R
from solver_shard.plan.plan import Plan


def reduced_early(plan: Plan, axis: int) -> Plan:
    """The plan with partial sums along an axis reduced before additions, where it reduces them after: ``P + P -> P`` as ``R + R -> R``.

    A plan may add a partial product to a residual (as a part of it, which is free) and reduce the sum; reducing the product first moves
    the same bytes by as many collectives. Only additions whose every reader wants the whole sum, or adds it likewise, are changed.
    """
    partial = P("sum")
    readers: dict[int, list[tuple[int, int]]] = {}
    late: set[int] = set()
    for i, op in enumerate(plan.ops):
        if op.phase != "forward":
            break
        for k, t in enumerate(op.operands):
            readers.setdefault(t, []).append((i, k))
        if op.name == "aten.add.Tensor" and all(x[axis] == partial for x in (*op.operand_layouts, *op.result_layouts)):
            late.add(i)
    shrinking = True
    while shrinking:
        kept = {
            i
            for i in late
            if not set(plan.ops[i].results) & set(plan.outputs)
            and all(j in late or plan.ops[j].operand_layouts[k][axis] == R for j, k in readers.get(plan.ops[i].results[0], ()))
        }
        shrinking = kept != late
        late = kept

    def whole(layout: Layout) -> Layout:
        return Layout(R if a == axis else p for a, p in enumerate(layout))

    ops = list(plan.ops)
    for i in sorted(late):
        op = ops[i]
        ops[i] = dataclasses.replace(
            op, operand_layouts=tuple(map(whole, op.operand_layouts)), result_layouts=tuple(map(whole, op.result_layouts))
        )
    return dataclasses.replace(plan, ops=tuple(ops)) if late else plan
