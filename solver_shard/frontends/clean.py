"""From the raw trace to the program the solver sees: one pass in trace order, then peepholes.

Every raw node is turned by the handler of its op (tables ``VIEWS``, ``MATMULS``, ``CONVOLUTIONS``, ``ROWS``); other pointwise ops, known
by torch's own tag, share one handler; anything else is written as it is, on operands of exactly the raw shapes.
"""

from __future__ import annotations

from collections.abc import Callable

from solver_shard.frontends.clean_convolution import CONVOLUTIONS
from solver_shard.frontends.clean_experts import Experts, UnfitError
from solver_shard.frontends.clean_matmul import MATMULS
from solver_shard.frontends.clean_rows import ROWS, pointwise
from solver_shard.frontends.clean_views import VIEWS
from solver_shard.frontends.context import Context, Result, uses_of
from solver_shard.frontends.draft import Value
from solver_shard.frontends.finish import finish
from solver_shard.frontends.raw import RawGraph, RawNode
from solver_shard.program import Program

_HANDLERS: dict[str, Callable[[Context, RawNode], Result]] = {**VIEWS, **MATMULS, **CONVOLUTIONS, **ROWS}


def clean(raw: RawGraph) -> Program:
    """The canonical program of a raw graph; linear in its size."""
    try:
        return _clean(raw, Experts(nodes=raw.nodes))
    except UnfitError:
        return _clean(raw, None)


def _clean(raw: RawGraph, experts: Experts | None) -> Program:
    readers: dict[str, list[RawNode]] = {}
    for node in raw.nodes:
        for use in uses_of(node):
            readers.setdefault(raw.nodes[use.node].name, []).append(node)
    context = Context(readers=readers)
    for position, node in enumerate(raw.nodes):
        context.draft.node = node
        if node.source is not None:
            context.values.append((context.draft.source(node.source),))
            continue
        handler = _HANDLERS.get(_family(node.op), pointwise if node.pointwise else Context.generic)
        result = handler(context, node) if experts is None else experts.clean(context, position, handler)
        context.values.append((result,) if isinstance(result, Value) else result)
    if experts is not None:
        experts.check([use for _, use in (*raw.outputs, *raw.gradients)])
    return finish(context, raw)


def _family(op: str) -> str:
    """``aten.add.Tensor`` is of family ``add``; ops of other namespaces have none."""
    namespace, name, *_ = op.split(".")
    return name if namespace == "aten" else ""
