"""Repeated layers: which ops do the same thing at the same place of a repeated block, and the graph in which copies decide alike.

Forward and backward are each a sequence of op signatures (name, rule, shapes; never module names, nor arguments that no rule asks for,
such as the place that a step of a scan reads). A stack of equal layers is a run in which the signature at i equals the one at
i + period. The longest run is taken first, then the rest left and right of it is searched again, so encoder and decoder stacks are both
found. Ops of one run at equal positions modulo the period form a class. Blocks repeat inside blocks, too: the steps of a scan, experts
one by one. Where one block of a run has runs of at least ``_COPIES`` copies, their classes are those of the block.

    a b c c c c d | a b c c c c d | a b c c c c d       a run of three blocks, each of which has a run of four

Any such partition is a valid restriction of the problem: it can cost time, never correctness, because folding ties only nodes with
identical strategies and prices.

Among runs of equal length the shortest period wins, then the earliest start, so the result does not depend on chance.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Bools, ChoiceGraph, Ints, Loads, Masks, repeated
from solver_shard.graph.nodes import Lowering, OpNode, TensorNode, group_of
from solver_shard.program import Phase, Program, Role, places, without
from solver_shard.rules.rule import Rule

Signatures = NDArray[np.int32]

_LEAST_BLOCK = 4
"""Shorter periods are chance repetitions of single ops, not layers."""

_COPIES = 4
"""Of a block inside a block, at least: fewer are parts that look alike (keys and values), and are worth deciding one by one."""


def op_classes(program: Program, rules: Sequence[Rule] | None = None) -> Ints:
    """A class number per op (int64[ops]); ops outside repeated blocks are alone in their class.

    ``rules``: of every op; what they do not depend on makes no difference. By default all arguments do.
    """
    known: dict[object, int] = {}
    kinds = [repr(sorted(op.attributes.items())) for op in program.ops] if rules is None else rules
    signatures = np.array([known.setdefault(_signature(program, i, kinds[i]), len(known)) for i in range(len(program.ops))], dtype=np.int32)
    forward = sum(op.phase is Phase.FORWARD for op in program.ops)
    return np.concatenate([_classes(signatures[:forward]), forward + _classes(signatures[forward:])])


def node_classes(lowering: Lowering) -> Ints:
    """A class number per node of the choice graph: copies of one layer share classes, and so one decision."""
    program = lowering.program
    ops = _op_classes(lowering)
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
        place: object = None
        if isinstance(node, OpNode):
            place = int(ops[node.op])
        elif isinstance(node, TensorNode):
            group = group_of(node, lowering.lives)
            place = tensor_key[node.tensor], group and (group.purpose, group.family)
        graph = lowering.graph
        content = (node.strategies, graph.node_costs(v).tobytes(), graph.node_usages(v).tobytes())
        classes.append(known.setdefault((type(node), place, content), len(known)))
    return np.array(classes, dtype=np.int64)


def _op_classes(lowering: Lowering) -> Ints:
    """``op_classes`` as if tensors of a single group of readers had no relays: those repeat with what they are behind.

    So ties are the same in a graph that has relays everywhere (see ``lowered``), and it has all the tied plans of the graph that has not.
    """
    program, groups = lowering.program, lowering.lives.groups
    handing = places(program)
    handed = {t: program.ops[handing[t]].results[0] for t in lowering.relays}
    alone = {t for t, after in handed.items() if len(groups.get(after, ())) == 1}
    gone = {handing[t]: t for t in alone}
    left = [i for i in range(len(program.ops)) if i not in gone]
    rules = [lowering.strategies[i].rule for i in left]
    classes = np.zeros(len(program.ops), dtype=np.int64)
    classes[left] = op_classes(without(program, lowering.relays, alone).program, rules)
    known: dict[tuple[int, int], int] = {}
    makers = program.producers()
    for i, t in gone.items():
        maker, j = makers[t]
        classes[i] = known.setdefault((int(classes[maker]), j), len(left) + len(known))
    return classes


def _signature(program: Program, i: int, kind: Hashable) -> Hashable:
    op = program.ops[i]
    tensors = tuple((program.tensors[t].shape, program.tensors[t].dtype) for t in (*op.operands, *op.results))
    roles = tuple(program.tensors[t].role if program.tensors[t].role is not Role.GRADIENT else Role.ACTIVATION for t in op.operands)
    return (op.name, kind, tensors, roles)


def _classes(sequence: Signatures, copies: int = 2) -> Ints:
    """The first position of the same place in the same run, for every position; runs have at least so many copies of a block."""
    classes = np.arange(len(sequence), dtype=np.int64)
    for start, stop, period in _runs(sequence, copies):
        shift = _turn(sequence[start : start + period])
        block = (_classes(np.roll(sequence[start : start + period], -shift), _COPIES) + shift) % period
        positions = np.arange(stop - start)
        classes[start:stop] = start + block[(positions - shift) % period]
    return classes


def _turn(block: Signatures) -> int:
    """Where a block begins that has no run across its end: a run of layers begins anywhere in a layer, in the midst of a scan, too."""
    twice = np.concatenate([block, block])
    best = _longest(twice, _COPIES, len(block) // _COPIES)
    return 0 if best is None else best[0] % len(block)


def _runs(sequence: Signatures, copies: int) -> list[tuple[int, int, int]]:
    """Disjoint (start, stop, period) runs, longest first, then what is left of it and right of it."""
    found: list[tuple[int, int, int]] = []
    pending = [(0, len(sequence))]
    while pending:
        low, high = pending.pop()
        best = _longest(sequence[low:high], copies, (high - low) // copies)
        if best is not None:
            run_start, run_stop, period = low + best[0], low + best[1], best[2]
            found.append((run_start, run_stop, period))
            pending += [(low, run_start), (run_stop, high)]
    return found


def _longest(sequence: Signatures, copies: int, most: int) -> tuple[int, int, int] | None:
    """The longest run of blocks of at most so many positions."""
    best: tuple[int, int, int] | None = None
    for period in range(_LEAST_BLOCK, most + 1):
        least = (copies - 1) * period if best is None else max((copies - 1) * period, best[1] - best[0] - period + 1)
        same = sequence[:-period] == sequence[period:]
        if np.count_nonzero(same) < least:
            continue
        start, length = _longest_true(same)
        if length >= least:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folded:
    """A folded graph, the folded node of every free node, and the folded term of every free term of its windows."""

    graph: ChoiceGraph
    member: Ints
    terms: Ints


def fold(graph: ChoiceGraph, classes: Ints) -> Folded:
    """Tie all nodes with equal class number; they must have the same number of strategies, in the same order.

    A class of nodes with equal strategies becomes a single node whose cost is the sum over its members, with the intervals of all of them
    (so its usage counts once for every member that is live). Edges between members of two classes add up; an edge inside a class can only
    be used on its diagonal and becomes node cost. Each member's loads stay on the terms of its own windows; windows that then load alike
    (of the repeated layers) become one that counts for all of them. The folded problem is the free one restricted to assignments that are
    equal within each class: every folded assignment expands to a free one of exactly the same cost and memory profile. It does drop all
    others, so a bound of the folded problem is of tied plans only, and a certificate says so.

    >>> expand(folded, folded_assignment)  # doctest: +SKIP
    """
    _, first, member = np.unique(classes, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")  # folded nodes keep the order in which their first members appear
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    member = rank[member].astype(np.int64)
    leaders = first[order]
    copies = np.bincount(member)
    costs, usages, intervals = [], [], []
    members: list[list[int]] = [[] for _ in leaders]
    for v, c in enumerate(member.tolist()):
        members[c].append(v)
    for c, leader in enumerate(leaders.tolist()):
        cost = graph.node_costs(leader)
        costs.append(repeated(cost, int(copies[c])))
        usages.append(graph.node_usages(leader))
        intervals.append(np.concatenate([graph.node_intervals(v) for v in members[c]]))
    counts: dict[tuple[int, int, int, bool], int] = {}
    for (u, v), table in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        a, b = int(member[u]), int(member[v])
        if a == b:
            costs[a] = _plus(costs[a], np.diagonal(graph.tables[table]))
        else:
            key = (a, b, table, False) if a < b else (b, a, table, True)
            counts[key] = counts.get(key, 0) + 1
    tables: list[Ints] = []
    known: dict[tuple[int, bool, int], int] = {}
    edges, edge_tables = [], []
    for (a, b, table, flipped), count in counts.items():
        if (table, flipped, count) not in known:
            known[table, flipped, count] = len(tables)
            source = graph.tables[table]
            tables.append(repeated(source.T if flipped else source, count))
        edges.append((a, b))
        edge_tables.append(known[table, flipped, count])
    loads, terms = (None, np.zeros(0, dtype=np.int64)) if graph.loads is None else _folded_loads(graph.loads, member)
    folded = ChoiceGraph(
        names=tuple(graph.names[v] for v in leaders.tolist()),
        offsets=np.concatenate([[0], np.cumsum([len(c) for c in costs])]).astype(np.int64),
        costs=np.concatenate(costs),
        usages=np.concatenate(usages),
        interval_offsets=np.concatenate([[0], np.cumsum([len(x) for x in intervals])]).astype(np.int64),
        intervals=np.concatenate(intervals),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.array(edge_tables, dtype=np.int64),
        tables=tuple(tables),
        limit=graph.limit,
        loads=loads,
    )
    return Folded(graph=folded, member=member, terms=terms)


def _folded_loads(loads: Loads, member: Ints) -> tuple[Loads, Ints]:
    """Loads of the folded nodes, equal windows as one, and the folded term of each term.

    A sum of equal maxima is the maximum of the sums, so a window that stands for n is loaded n times as much.
    """
    apart = loads.substituted(member.tolist(), [None] * len(member))
    within = np.arange(len(apart.windows)) - apart.starts[apart.windows]
    inside: list[list[tuple[int, ...]]] = [[] for _ in range(apart.count)]
    for term, window in enumerate(apart.windows.tolist()):
        inside[window].append((-1, int(within[term]), int(apart.base[term])))
    for kind, rows in enumerate((apart.nodes, apart.edges)):
        for row in rows.tolist():
            inside[apart.windows[row[-2]]].append((kind, *row[:-2], int(within[row[-2]]), row[-1]))
    known: dict[tuple[tuple[int, ...], ...], int] = {}
    which = np.array([known.setdefault(tuple(sorted(rows)), len(known)) for rows in inside], dtype=np.int64)
    _, first, copies = np.unique(which, return_index=True, return_counts=True)
    windows = np.repeat(np.arange(len(first)), np.bincount(apart.windows)[first])
    starts = np.searchsorted(windows, np.arange(len(first)))
    terms = starts[which[apart.windows]] + within

    def kept(rows: Ints) -> Ints:
        """The rows of the first window of each kind, as many times as it stands for windows."""
        window = apart.windows[rows[:, -2]]
        rows = rows[first[which[window]] == window]
        number = which[apart.windows[rows[:, -2]]]
        return np.concatenate([rows[:, :-2], terms[rows[:, -2], None], (rows[:, -1] * copies[number])[:, None]], axis=1)

    base = np.zeros(len(windows), dtype=np.int64)
    np.add.at(base, terms, apart.base)
    folded = Loads(windows=windows, base=base, nodes=kept(apart.nodes), vectors=apart.vectors, edges=kept(apart.edges), tables=apart.tables)
    return folded, terms.astype(np.int64)


def folded_masks(masks: Masks, folded: Folded | None, *, lenient: bool = False) -> dict[int, Bools]:
    """Masks of the free graph's nodes as those of the folded one's: what all copies leave.

    ``lenient``: where that is nothing, what the first of them leave.
    """
    if folded is None:
        return dict(masks)
    together: dict[int, Bools] = {}
    for v, mask in masks.items():
        c = int(folded.member[v])
        both = together[c] & mask if c in together else mask
        together[c] = both if both.any() or not lenient or c not in together else together[c]
    return together


def expand(folded: Folded, assignment: Sequence[int] | Ints) -> tuple[int, ...]:
    """The free graph's assignment that a folded one stands for."""
    return tuple(np.asarray(assignment, dtype=np.int64)[folded.member].tolist())


def _plus(a: Ints, b: Ints) -> Ints:
    return np.where((a >= FORBIDDEN) | (b >= FORBIDDEN), FORBIDDEN, np.minimum(a, FORBIDDEN) + np.minimum(b, FORBIDDEN))
