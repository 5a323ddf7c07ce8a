"""From the raw trace to the program the solver sees: one pass in trace order, then peepholes.

Every raw node is turned by the handler of its op (tables ``VIEWS``, ``MATMULS``, ``CONVOLUTIONS``, ``ROWS``); other pointwise ops, known
by torch's own tag, share one handler; anything else is written as it is, on operands of exactly the raw shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from solver_shard.program import Program
from solver_shard.tracing.clean.dims import BROADCAST, Dims
from solver_shard.tracing.clean.draft import Context, DraftValue, ProgramDraft, Result, uses_of
from solver_shard.tracing.clean.experts import Experts, UnfitError
from solver_shard.tracing.clean.finish import finish
from solver_shard.tracing.clean.products import CONVOLUTIONS, MATMULS
from solver_shard.tracing.clean.rows import ROWS, VIEWS, pointwise
from solver_shard.tracing.joint_graph import RawGraph, RawNode

_HANDLERS: dict[str, Callable[[Context, RawNode], Result]] = {**VIEWS, **MATMULS, **CONVOLUTIONS, **ROWS}


Seen = tuple[int, Dims]
"""A tensor of the program, and the lazy view of it that a raw value is (see :mod:`solver_shard.tracing.clean.dims`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedProgram:
    """A program beside the raw graph that it was cleaned from.

    Attributes:
        values: for every result of every raw node, which tensor of the program has that value; None where none has.
    """

    program: Program
    raw: RawGraph
    values: tuple[tuple[Seen | None, ...], ...]


def clean(raw: RawGraph) -> Program:
    """The canonical program of a raw graph; linear in its size."""
    return clean_with_values(raw).program


def clean_with_values(raw: RawGraph) -> TracedProgram:
    """The program, and where the values of the raw graph are in it."""
    try:
        context, program, position = _clean(raw, Experts(nodes=raw.nodes))
    except UnfitError:
        context, program, position = _clean(raw, None)
    values = tuple(tuple(_seen(value, context.draft, position) for value in results) for results in context.values)
    return TracedProgram(program=program, raw=raw, values=values)


def _seen(value: DraftValue | None, draft: ProgramDraft, position: dict[int, int]) -> Seen | None:
    if value is None:
        return None
    base, dims = value.base, value.dims
    while base not in position and base in draft.replaced:
        base, where = draft.replaced[base]
        dims = tuple(tuple(atom if atom[0] == BROADCAST else (where[atom[0]], *atom[1:]) for atom in group) for group in dims)
    return (position[base], dims) if base in position else None


def _clean(raw: RawGraph, experts: Experts | None) -> tuple[Context, Program, dict[int, int]]:
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
        context.values.append((result,) if isinstance(result, DraftValue) else result)
    if experts is not None:
        experts.check([use for _, use in (*raw.outputs, *raw.gradients)])
    return context, *finish(context, raw)


def _family(op: str) -> str:
    """``aten.add.Tensor`` is of family ``add``; ops of other namespaces have none."""
    namespace, name, *_ = op.split(".")
    return name if namespace == "aten" else ""
