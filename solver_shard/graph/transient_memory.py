"""What transitions hold in between, counted against the memory limit where it matters.

A transition needs its source and its destination, which are bytes of other nodes. One of several steps, or of a collective whose
pieces are no rows, also holds **intermediates** (``TransitionTable.intermediates``), and how many depends on where it starts
and where it ends: on the strategies of two nodes. A *transient* node knows both (``pairs``) and owns the bytes while the transition runs.

**Time.** Transitions that run before one op run one after the other, so what they need at once is the largest of them, not the sum:
every transient node has a time point of its own, put in right before the op's. At that point all that lives at the op's time is
live too, but for what the op is about to make and the copies of transitions that come later: they run in the order of
the op's operands (``turns_of``). A gradient is reduced right after the op that has made it: those points come after the op's, and what
the op has made is live. The optimizer's step is like an op at the end, but it comes first: what it makes is gone when the parameters are
brought their new values, one after the other.

What a final group starts from (:mod:`solver_shard.graph.liveness`) is not live at the op's time any more, but at the points before, the
group's own the last of them. What the group has, the same bytes or a copy of them, is live from the next point on; the transient node
owns the copy until then.

**Lazily.** Few of these nodes ever matter, and all of them would double the graph. So a graph starts without any; where a solution
needs more than the graph has counted, the nodes of those transitions are added and it is solved again (``solve.rounds``). Every such
graph is a relaxation of the true problem: its bound holds, and when nothing is missed any more its optimum is the true one. In a tied
problem a transition is added with all of its copies in the repeated layers; copies share a node only if they also share where the
transition starts, because otherwise the node would tie what may differ.

    problem = Transients(lowering, costs, node_classes(lowering))
    problem.graph, problem.peak(assignment), problem.add(problem.missed(assignment, above=limit))
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.model import CostModel
from solver_shard.costs.transitions import FORBIDDEN, TransitionTable, intermediates, update_held
from solver_shard.graph.choice_graph import ChoiceGraph, Ints, WarmStart
from solver_shard.graph.liveness import ACCUMULATE, OPTIMIZER, UPDATE, either_order, read_for
from solver_shard.graph.nodes import (
    PRODUCED,
    AccumulateNode,
    AccumulatorNode,
    HoldNode,
    KeepNode,
    Lowering,
    NodeKey,
    ReshardNode,
    ResultNode,
    SourceNode,
    StateNode,
    StepNode,
    TailNode,
)
from solver_shard.graph.symmetry import Folded, fold
from solver_shard.layout import Layout
from solver_shard.program import DTYPE_BYTES

NEAR = 3
"""Edges around an added transition within which a solution is decided anew when it is taken as a start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """A transition that the graph may make: from a strategy of node ``start`` to one of node ``stop``, before or ``after`` op ``time``.

    The first ``aliases`` strategies of ``stop`` move nothing. ``converted``: to ``dtype`` before the first step. ``operand``: of the
    op, whose turn it is; 0 where the op does not read it. ``update``: of a parameter, to a tensor beside the old values. ``turn``: bytes
    per element of the state that the optimizer's step holds for this parameter alone. ``final``: what it starts from is gone afterwards.
    """

    start: int
    stop: int
    time: int
    after: bool
    operand: int
    aliases: int
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    orders: bool
    converted: bool
    update: bool = False
    turn: int = 0
    final: bool = False

    @property
    def prices(self) -> Hashable:
        """What its transition table and its intermediates depend on, but for the reductions."""
        return self.shape, self.dtype, self.bucket, self.orders, self.converted, self.update, self.turn, self.final


def moves_of(lowering: Lowering) -> tuple[Move, ...]:
    """The transitions of every reshard, and of the new values from each optimizer state."""
    index, tensors, either = lowering.index, lowering.program.tensors, either_order(lowering.program)
    made = {t for op in lowering.program.ops for t in op.results}
    last = lowering.lives.end - 1
    found = []
    for v, node in enumerate(lowering.nodes):
        read = None
        if isinstance(node, StateNode):
            t = node.tensor
            start, stop, aliases, time, purpose = v, index[SourceNode, t, 0], 0, last, UPDATE
        elif isinstance(node, AccumulateNode):
            t = node.tensor
            start, stop, aliases, time, purpose = index[ResultNode, t, 0], v, node.aliases, lowering.lives.base[t][0], ACCUMULATE
        elif isinstance(node, ReshardNode):
            t, read = node.tensor, lowering.lives.groups[node.tensor][node.group]
            start = index[HoldNode if read.late else ResultNode if t in made else SourceNode, t, 0]
            stop, aliases, time, purpose = v, node.aliases, read.start, read.purpose
            if purpose == OPTIMIZER and (AccumulatorNode, t, 0) in index:  # those that stay in its bytes may take several steps too
                start, aliases, time = index[AccumulatorNode, t, 0], 0, last
        else:
            continue
        dtype = lowering.reduced[t] if purpose in (ACCUMULATE, OPTIMIZER) else tensors[t].dtype
        readers = read.readers if read is not None else ()
        leaves = purpose in (ACCUMULATE, OPTIMIZER) and not isinstance(lowering.nodes[start], AccumulatorNode)
        state = lowering.optimizer_state
        found.append(
            Move(
                start=start,
                stop=stop,
                time=time,
                after=leaves,
                operand=min((j for i, j in readers if i == time), default=0),
                aliases=aliases,
                shape=tensors[t].shape,
                dtype=dtype,
                bucket=lowering.buckets.get((t, purpose), 1),
                orders=t in either,
                converted=(leaves and dtype != tensors[t].dtype) or (purpose == UPDATE and state.master_bytes(dtype) > 0),
                update=purpose == UPDATE,
                turn=state.turn_bytes(dtype) if purpose == UPDATE else 0,
                final=read is not None and read.final,
            )
        )
    return tuple(found)


def turns_of(lowering: Lowering, moves: Sequence[Move]) -> Ints:
    """When in the first time of a node's life its bytes come to be, int64[nodes].

    0: at once; a copy for an operand k: with the transitions for that operand; what a final group has: after its transition; results of
    ops, what the optimizer's step makes, and copies that are made of results right away: with the op, after all of these.
    """
    turns = np.zeros(len(lowering.nodes), dtype=np.int64)
    for move in moves:
        if not move.after and isinstance(lowering.nodes[move.stop], ReshardNode):
            turns[move.stop] = move.operand + move.final
    with_op = turns.max(initial=0) + 1
    made = {t: i for i, op in enumerate(lowering.program.ops) for t in op.results}
    for v, node in enumerate(lowering.nodes):
        if isinstance(node, StepNode) or (isinstance(node, ResultNode) and lowering.lives.base[node.tensor][0] == made[node.tensor]):
            turns[v] = with_op  # a result that takes over is there before
    turns[[move.stop for move in moves if move.after]] = with_op
    for move in (move for move in moves if move.final):  # what takes over from what it starts from
        node = cast(ReshardNode, lowering.nodes[move.stop])
        own: list[NodeKey] = [(TailNode, node.tensor, node.group)]
        if not isinstance(lowering.nodes[move.start], HoldNode):
            own.append((KeepNode, node.tensor, PRODUCED))
        turns[[lowering.index[key] for key in own if key in lowering.index]] = turns[move.stop]
    return turns


def ends_of(lowering: Lowering, moves: Sequence[Move]) -> Ints:
    """Until whose turn in the time at which a node's life ends its bytes are there after all, int64[nodes]; 0: not at that time.

    What a final group for an operand k starts from is there until the turn of the next operand.
    """
    ends, index, lives = np.zeros(len(lowering.nodes), dtype=np.int64), lowering.index, lowering.lives
    makers = {t: i for i, op in enumerate(lowering.program.ops) for t in op.results}
    stops = lowering.graph.intervals[lowering.graph.interval_offsets[1:] - 1, 1].tolist()
    keeping: dict[int, list[int]] = {}
    for v, node in enumerate(lowering.nodes):
        if isinstance(node, KeepNode):
            keeping.setdefault(node.tensor, []).append(v)
    for move in (move for move in moves if move.final):
        t = lowering.tensor_node(move.stop).tensor
        owners = [index[ResultNode, t, 0]]
        if isinstance(lowering.nodes[move.start], HoldNode):
            owners = keeping.get(t, [])
        elif makers[t] in lives.views:
            x, k = read_for(lowering.program, lives, makers, t)
            owners = [index[key] for key in ((ReshardNode, x, k), (TailNode, x, k)) if key in index]
        ends[[v for v in owners if stops[v] == move.time]] = move.operand + 1
    return ends


class Transients:
    """A lowered graph, tied or free, with as many transient nodes as were added to it.

    Attributes:
        graph: to be solved; its nodes are those of ``lowering.graph`` (folded by ``classes``), then the transient ones.
        folded: how the tied graph was folded; None where nothing is tied.
    """

    def __init__(self, lowering: Lowering, costs: CostModel, classes: Ints | None = None) -> None:
        self.lowering, self.costs, self.classes = lowering, costs, classes
        self.moves = moves_of(lowering)
        self._aliases = np.array([move.aliases for move in self.moves], dtype=np.int64)
        self._stops = np.array([move.stop for move in self.moves], dtype=np.int64)
        self._turns, self._ends = turns_of(lowering, self.moves), ends_of(lowering, self.moves)
        self._absent, self._leaving = self._not_there(), self._still_there()
        self.added: set[int] = set()
        self._last: tuple[Ints, dict[int, int]] | None = None
        self._known: dict[Hashable, int] = {}
        self._numbers: dict[Hashable, Ints] = {}
        self._cells: dict[Hashable, Cells] = {}
        self.folded: Folded | None = None
        self.graph = self._build()
        if self.folded is not None and self.folded.graph.size == lowering.graph.size:
            self.classes = self.folded = None  # nothing repeats: what is proven holds for every plan
            self.graph = lowering.graph

    def plain(self, assignment: Sequence[int] | Ints) -> Ints:
        """The assignment of ``lowering.graph`` that one of this graph stands for."""
        chosen = np.asarray(assignment, dtype=np.int64)
        size = self.lowering.graph.size
        return chosen[:size] if self.folded is None else chosen[self.folded.member[:size]]

    def peak(self, assignment: Sequence[int] | Ints) -> int:
        """Largest number of bytes in use at any time, all intermediates counted."""
        plain = self.plain(assignment)
        profile = self.lowering.graph.profile(plain)
        return max([int(profile.max(initial=0)), *(self._during(m, plain, profile) + n for m, n in self._held(plain).items())])

    def missed(self, assignment: Sequence[int] | Ints, above: int) -> tuple[int, ...]:
        """Positions in ``moves`` of the transitions that are not in the graph and during which more than so many bytes are in use."""
        plain = self.plain(assignment)
        profile = self.lowering.graph.profile(plain)
        held = self._held(plain).items()
        return tuple(m for m, n in held if m not in self.added and self._during(m, plain, profile) + n > above)

    def add(self, moves: Collection[int]) -> None:
        """Count these transitions, all others that run at the same time, and the copies of all of them in repeated layers."""
        times = {self.moves[m].time for m in moves}
        wanted = {self._key(m) for m, move in enumerate(self.moves) if move.time in times}
        self.added |= {m for m in range(len(self.moves)) if self._key(m) in wanted and self._table(m).any()}
        self.graph = self._build()

    def start(self, assignment: Sequence[int] | Ints, moves: Collection[int]) -> WarmStart:
        """A solution of an earlier graph as a start for this one: kept but for what is near these transitions."""
        plain, graph = self.plain(assignment), self.lowering.graph
        near = np.zeros(graph.size, dtype=bool)
        near[[v for m in moves for v in (self.moves[m].start, self.moves[m].stop)]] = True
        for _ in range(NEAR):
            touched = near[graph.edges].any(axis=1)
            near[graph.edges[touched]] = True
        allowed = {}
        sizes, member = graph.sizes(), np.arange(graph.size) if self.folded is None else self.folded.member
        free = set(member[: graph.size][near].tolist())
        for v in range(graph.size):
            if (c := int(member[v])) not in free and c not in allowed:
                allowed[c] = np.arange(sizes[v]) == plain[v]
        return WarmStart(name="the last round's plan", allowed=allowed)

    def complete(self, assignment: Sequence[int] | Ints, name: str) -> WarmStart:
        """A plain assignment, equal on copies where the graph is tied, as a start that decides every node of the graph."""
        plain, sizes = np.asarray(assignment, dtype=np.int64), self.graph.sizes()
        chosen = plain.tolist()
        for m in sorted(self.added):
            cells, move = self._cells_of(m), self.moves[m]
            held = (cells.rows[plain[move.start]] == 0) & (cells.columns[plain[move.stop]] == 0)
            chosen.append(int(np.flatnonzero(held)[0]))  # the cells cover every pair once
        member = range(len(chosen)) if self.folded is None else self.folded.member.tolist()
        allowed: dict[int, NDArray[np.bool_]] = {}
        for c, x in zip(member, chosen, strict=True):
            if c not in allowed:
                allowed[c] = np.arange(sizes[c]) == x
        return WarmStart(name=name, allowed=allowed)

    def _not_there(self) -> tuple[Ints, ...]:
        """Per move, the nodes whose lives start at its time, but after it."""
        graph = self.lowering.graph
        starts, stops = graph.intervals[graph.interval_offsets[:-1]].T
        late: dict[int, list[int]] = {}
        for v in np.flatnonzero((self._turns > 0) & (starts < stops)).tolist():
            late.setdefault(int(starts[v]), []).append(v)
        found = []
        for move in self.moves:
            nodes = np.array([] if move.after else late.get(move.time, []), dtype=np.int64)
            found.append(nodes[self._turns[nodes] > move.operand])
        return tuple(found)

    def _still_there(self) -> tuple[Ints, ...]:
        """Per move, the nodes whose lives end at its time, but not before it."""
        stops = self.lowering.graph.intervals[self.lowering.graph.interval_offsets[1:] - 1, 1]
        leaving: dict[int, list[int]] = {}
        for v in np.flatnonzero(self._ends > 0).tolist():
            leaving.setdefault(int(stops[v]), []).append(v)
        nodes = {time: np.array(found, dtype=np.int64) for time, found in leaving.items()}
        found, nothing = [], np.zeros(0, dtype=np.int64)
        for move in self.moves:
            there = nothing if move.after else nodes.get(move.time, nothing)
            found.append(there[self._ends[there] > move.operand] if len(there) else nothing)
        return tuple(found)

    def _during(self, m: int, plain: Ints, profile: Ints) -> int:
        """Bytes in use while a transition runs, without what ``_held`` says."""
        graph = self.lowering.graph
        absent, leaving = (int(graph.usages[graph.offsets[x] + plain[x]].sum()) for x in (self._absent[m], self._leaving[m]))
        return int(profile[self.moves[m].time]) - absent + leaving

    def _held(self, plain: Ints) -> dict[int, int]:
        """Bytes of the intermediates of every transition of an assignment that has any, and of the copies of final groups."""
        if self._last is not None and np.array_equal(self._last[0], plain):
            return self._last[1]
        found = {}
        for m in np.flatnonzero(plain[self._stops] >= self._aliases).tolist():
            move = self.moves[m]
            source, target = self._layout(move.start, plain), self._layout(move.stop, plain)
            if (source != target or move.update) and (nbytes := self._between(move, source, target)):
                found[m] = nbytes
        self._last = plain, found
        return found

    def _between(self, move: Move, source: Layout, target: Layout) -> int:
        """What ``_held`` says of one transition, from its path: few pairs are ever asked, whole tables take longer."""
        key = (move.prices, source, target)
        if key not in self._known:
            table = self._transitions(move, (source, target))
            size = int(table.nbytes[table.index[source]])
            first, path = size if move.converted else 0, table.path(source, target)
            turn = size // DTYPE_BYTES[move.dtype] * move.turn
            self._known[key] = update_held(path, first, turn) if move.update else intermediates(path, first)
            if move.final:
                self._known[key] += int(table.nbytes[table.index[target]])
        return self._known[key]

    def _transitions(self, move: Move, layouts: Iterable[Layout]) -> TransitionTable:
        reductions = tuple(sorted({p.reduction for layout in layouts for p in layout if p.is_partial}))
        return self.costs.transitions(move.shape, move.dtype, reductions, move.bucket, move.orders)

    def _layout(self, v: int, plain: Ints) -> Layout:
        return self.lowering.tensor_node(v).layouts[int(plain[v])]

    def _key(self, m: int) -> Hashable:
        """What copies of a transition in repeated layers share."""
        move = self.moves[m]
        return m if self.classes is None else (int(self.classes[move.start]), int(self.classes[move.stop]))

    def _table(self, m: int) -> Ints:
        """What ``_held`` says, for every strategy of the one and the other node."""
        move = self.moves[m]
        held, taken = (self.lowering.tensor_node(v).layouts for v in (move.start, move.stop))
        key = (move.prices, held, taken, move.aliases)
        if key not in self._numbers:
            table = self._transitions(move, (*held, *taken))
            rows, columns = table.positions(held), table.positions(taken)
            numbers = table.intermediates(move.converted)[rows[:, None], columns]
            if move.final:
                numbers = numbers + table.nbytes[columns]
            numbers[:, : move.aliases] = 0
            if move.update:
                sizes, same = table.nbytes[rows], rows[:, None] == columns
                moved = np.where(same, (sizes * move.converted)[:, None], numbers + table.nbytes[columns])
                numbers = np.maximum(moved, (sizes // DTYPE_BYTES[move.dtype] * move.turn)[:, None])
            self._numbers[key] = numbers
        return self._numbers[key]

    def _cells_of(self, m: int) -> Cells:
        table = self._table(m)
        if id(table) not in self._cells:
            self._cells[id(table)] = cells_of(table)
        return self._cells[id(table)]

    def _build(self) -> ChoiceGraph:
        added = sorted(self.added)
        graph = self.lowering.graph
        if added:
            graph = with_cells(graph, [(self.moves[m], self._cells_of(m)) for m in added], self._turns, self._ends)
        if self.classes is None:
            return graph
        first = int(self.classes.max(initial=-1)) + 1
        known: dict[Hashable, int] = {}
        more = [known.setdefault((self._key(m), id(self._cells_of(m))), first + len(known)) for m in added]
        self.folded = fold(graph, np.concatenate([self.classes, np.array(more, dtype=np.int64)]))
        return self.folded.graph


def with_cells(graph: ChoiceGraph, added: Sequence[tuple[Move, Cells]], turns: Ints, ends: Ints) -> ChoiceGraph:
    """The graph with a transient node for each of these transitions, at time points of their own.

    Times move: instead of time t there are the points of what runs before op t, by operand, the op's own, and those of what runs after it.
    Lives go on through them; one that starts or ends at t starts or ends when it is the node's turn (``turns_of``, ``ends_of``).
    """
    end = int(graph.intervals[:, 1].max(initial=0))
    wide = int(turns.max(initial=0)) + 1
    times = np.array([move.time for move, _ in added], dtype=np.int64)
    after = np.array([move.after for move, _ in added], dtype=np.bool_)
    keys = times * wide + [move.operand for move, _ in added]
    put_in = np.bincount(times, minlength=end + 1)
    first = np.arange(end + 1) + np.cumsum(put_in) - put_in
    ahead = np.sort(keys[~after])

    def point(time: Ints, turn: Ints) -> Ints:
        """The first point at a time when it is this turn."""
        return np.asarray(first[time] + np.searchsorted(ahead, time * wide + turn) - np.searchsorted(ahead, time * wide))

    of_node, until = (np.repeat(x, np.diff(graph.interval_offsets)) for x in (turns, ends))
    lives = np.stack([point(graph.intervals[:, 0], of_node), point(graph.intervals[:, 1], until)], axis=1)
    empty = ((graph.intervals[:, 0] >= graph.intervals[:, 1]) & (until == 0)) | (lives[:, 0] >= lives[:, 1])
    lives[empty, 0] = lives[empty, 1]
    own = point(times, np.where(after, wide - 1, keys % wide)) + after
    order = np.argsort(own, kind="stable")  # those of one turn, one after the other
    own[order] += np.arange(len(order)) - np.searchsorted(own[order], own[order])
    intervals = [lives, np.stack([own, own + 1], axis=1)]
    tables = list(graph.tables)
    known: dict[int, tuple[int, int]] = {}
    edges: list[tuple[int, int]] = []
    edge_tables: list[int] = []
    for v, (move, cells) in enumerate(added, start=graph.size):
        if id(cells) not in known:
            known[id(cells)] = len(tables), len(tables) + 1
            tables += [cells.rows, cells.columns]
        edges += [(move.start, v), (move.stop, v)]
        edge_tables += known[id(cells)]
    sizes = [len(cells.values) for _, cells in added]
    return ChoiceGraph(
        names=(*graph.names, *(f"intermediates of {graph.names[move.stop]}" for move, _ in added)),
        offsets=np.concatenate([graph.offsets, graph.offsets[-1] + np.cumsum(sizes)]).astype(np.int64),
        costs=np.concatenate([graph.costs, np.zeros(sum(sizes), dtype=np.int64)]),
        usages=np.concatenate([graph.usages, *(cells.values for _, cells in added)]),
        interval_offsets=np.concatenate([graph.interval_offsets, graph.interval_offsets[-1] + 1 + np.arange(len(added))]).astype(np.int64),
        intervals=np.concatenate(intervals),
        edges=np.concatenate([graph.edges, np.array(edges, dtype=np.int64).reshape(-1, 2)]),
        edge_tables=np.concatenate([graph.edge_tables, np.array(edge_tables, dtype=np.int64)]),
        tables=tuple(tables),
        limit=graph.limit,
        loads=graph.loads,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """K cells: ``values`` int64[K]; ``rows`` int64[n, K] and ``columns`` int64[m, K] are the tables, 0 or FORBIDDEN.

    Nodes that know what two other nodes decide together: the pairs of their strategies that mean the same, as few as simple rows allow.

    A cost or usage of a choice graph belongs to one node, but what a transition needs depends on where it starts and where it ends. So a
    node is added whose strategies are **cells**: a set of strategies of the first node times a set of the second one's, on all pairs of
    which some number is the same. Its tables to the two nodes forbid all that is outside of the sets. The cells cover every pair once, so
    whatever the two nodes choose leaves the new one exactly one strategy, and the graph stays as it was but for that number.

    >>> cells = cells_of(np.array([[0, 0, 5], [0, 0, 5], [7, 0, 5]]))
    >>> [(value, rows.tolist(), columns.tolist()) for value, rows, columns in cells.listed()]
    [(0, [0, 1], [0, 1]), (5, [0, 1, 2], [2]), (0, [2], [1]), (7, [2], [0])]
    """

    values: Ints
    rows: Ints
    columns: Ints

    def listed(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Value, rows and columns of every cell."""
        for k, value in enumerate(self.values.tolist()):
            yield value, np.flatnonzero(self.rows[:, k] == 0), np.flatnonzero(self.columns[:, k] == 0)


def cells_of(numbers: Ints) -> Cells:
    """Cells that cover int64[n, m] once, from its distinct rows or from its distinct columns, whichever gives fewer."""
    by_row, by_column = _by_row(numbers), _by_row(numbers.T)
    if len(by_row[0]) <= len(by_column[0]):
        values, rows, columns = by_row
    else:
        values, columns, rows = by_column
    return Cells(values=values, rows=np.where(rows, 0, FORBIDDEN).T, columns=np.where(columns, 0, FORBIDDEN).T)


def _by_row(numbers: Ints) -> tuple[Ints, np.ndarray, np.ndarray]:
    """Per cell the value, the rows and the columns: each row is cut by value, equal parts of several rows are one cell."""
    known: dict[tuple[int, bytes], int] = {}
    values: list[int] = []
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    for r, row in enumerate(numbers):
        for value in np.unique(row).tolist():
            mask = row == value
            key = (value, mask.tobytes())
            if key not in known:
                known[key] = len(values)
                values.append(value)
                columns.append(mask)
                rows.append(np.zeros(len(numbers), dtype=bool))
            rows[known[key]][r] = True
    return np.array(values, dtype=np.int64), np.array(rows), np.array(columns)
