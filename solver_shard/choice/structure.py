"""Find repeated layers by structure: which ops do the same thing at the same place of a repeated block.

Forward and backward are each a sequence of op signatures (name, attributes, shapes; never module names). A stack of
equal layers is a run in which the signature at i equals the one at i + period. The longest run is taken first, then the
rest left and right of it is searched again, so encoder and decoder stacks are both found. Ops of one run at equal
positions modulo the period form a class. Any such partition is a valid restriction of the problem: it can cost time,
never correctness, because folding ties only nodes with identical strategies and prices.

Among runs of equal length the shortest period wins, then the earliest start, so the result does not depend on chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.choice.nodes import Kind, Lowering
from solver_shard.program import Phase, Program, Role

_LEAST_BLOCK = 4
"""Shorter periods are chance repetitions of single ops, not layers."""


def op_classes(program: Program) -> Ints:
    """A class number per op (int64[ops]); ops outside repeated blocks are alone in their class."""
    known: dict[object, int] = {}
    signatures = np.array([known.setdefault(_signature(program, i), len(known)) for i in range(len(program.ops))], dtype=np.int64)
    forward = sum(op.phase is Phase.FORWARD for op in program.ops)
    classes = np.arange(len(program.ops), dtype=np.int64)
    for start, stop in ((0, forward), (forward, len(program.ops))):
        for run_start, run_stop, period in _runs(signatures, start, stop):
            positions = np.arange(run_start, run_stop)
            classes[positions] = run_start + (positions - run_start) % period
    return classes


def node_classes(lowering: Lowering) -> Ints:
    """A class number per node of the choice graph: copies of one layer share classes, and so one decision."""
    program = lowering.program
    ops = op_classes(program)
    tensor_key: dict[int, object] = {}
    for i, op in enumerate(program.ops):
        for j, t in enumerate(op.results):
            tensor_key[t] = ("result", int(ops[i]), j)
    readers = program.readers()
    for t in program.sources():
        uses = frozenset((int(ops[i]), j) for i, j in readers.get(t, ()))
        tied = program.tensors[t].role in (Role.PARAMETER, Role.BUFFER) and uses
        tensor_key[t] = ("source", uses) if tied else ("alone", t)
    known: dict[object, int] = {}
    classes = []
    for v, node in enumerate(lowering.nodes):
        key: tuple[object, ...]
        if node.kind is Kind.OP:
            key = (node.kind, int(ops[node.item]))
        elif node.kind is Kind.CLIP:
            key = (node.kind,)
        elif node.kind in (Kind.RESHARD, Kind.TAIL):
            group = lowering.lives.groups[node.item][node.group]
            key = (node.kind, tensor_key[node.item], group.purpose, group.family)
        elif node.kind is Kind.KEEP and node.group:
            group = lowering.lives.groups[node.item][node.group - 1]
            key = (node.kind, tensor_key[node.item], group.purpose, group.family)
        else:
            key = (node.kind, tensor_key[node.item])
        graph = lowering.graph
        content = (node.layouts, node.aliases, node.origins, graph.node_costs(v).tobytes(), graph.node_usages(v).tobytes())
        classes.append(known.setdefault((key, content), len(known)))
    return np.array(classes, dtype=np.int64)


def _signature(program: Program, i: int) -> object:
    op = program.ops[i]
    tensors = tuple((program.tensors[t].shape, program.tensors[t].dtype) for t in (*op.operands, *op.results))
    roles = tuple(program.tensors[t].role if program.tensors[t].role is not Role.GRADIENT else Role.ACTIVATION for t in op.operands)
    return (op.name, repr(sorted(op.attributes.items())), tensors, roles)


def _runs(signatures: Ints, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Disjoint (start, stop, period) runs inside [start, stop), longest first, then what is left of it and right of it."""
    found: list[tuple[int, int, int]] = []
    pending = [(start, stop)]
    while pending:
        low, high = pending.pop()
        best = _longest(signatures[low:high])
        if best is not None:
            run_start, run_stop, period = low + best[0], low + best[1], best[2]
            found.append((run_start, run_stop, period))
            pending += [(low, run_start), (run_stop, high)]
    return found


def _longest(sequence: Ints) -> tuple[int, int, int] | None:
    best: tuple[int, int, int] | None = None
    for period in range(_LEAST_BLOCK, len(sequence) // 2 + 1):
        start, length = _longest_true(sequence[:-period] == sequence[period:])
        if length >= period and (best is None or length + period > best[1] - best[0]):
            best = (start, start + length + period, period)
    return best


def _longest_true(flags: Sequence[bool] | np.ndarray) -> tuple[int, int]:
    """Start and length of the first longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], np.asarray(flags, dtype=bool), [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    k = int(np.argmax(stops - starts))
    return int(starts[k]), int(stops[k] - starts[k])
