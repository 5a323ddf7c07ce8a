"""Lower a Program to a choice graph: every placement decision becomes a node, every price a number, all memory node usage.

:mod:`solver_shard.graph` states the problem that is built here, term by term; the classes of nodes are in ``graph/nodes.py``, the tables
that say what fits together in ``graph/tables.py``. Tables are cached by the layouts that they relate, so a deep model has no more distinct
tables than a shallow one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from solver_shard.costs.layouts import free_moves, is_even, legal_layouts
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel, exposed
from solver_shard.costs.schedule import StepSchedule, bucket_sizes
from solver_shard.costs.transitions import FORBIDDEN, TransitionTable
from solver_shard.errors import InputError
from solver_shard.graph.choice_graph import ChoiceGraph, Ints, Loads, Uses, repeated
from solver_shard.graph.liveness import ACCUMULATE, FORWARD, OPTIMIZER, OUTPUT, UPDATE, Group, Member, Storage, either_order, liveness
from solver_shard.graph.nodes import (
    PRODUCED,
    AccumulateNode,
    AccumulatorNode,
    AheadNode,
    AnyNode,
    BehindNode,
    ClipNode,
    HoldNode,
    KeepNode,
    Layouts,
    Lowering,
    MasterNode,
    Node,
    NodeKey,
    OpNode,
    Pins,
    ReshardNode,
    ResultNode,
    SourceNode,
    StateNode,
    StepNode,
    StorageNode,
    TailNode,
    TensorNode,
    group_of,
)
from solver_shard.graph.strategies import OpStrategies, fused_tensors, op_nanoseconds, op_strategies, spill_nanoseconds
from solver_shard.graph.tables import (
    ahead_table,
    behind_table,
    chain_table,
    copied_table,
    equal_table,
    free_table,
    hold_table,
    in_place_table,
    keep_table,
    kept_table,
    longer_table,
    member_table,
    norm_table,
    read_table,
    reduced_table,
    reshard_table,
    result_table,
    sliced_table,
    stays_table,
    stepped_table,
    storage_table,
    stored_table,
    tail_table,
)
from solver_shard.graph.templates import TemplateRestriction
from solver_shard.layout import Layout
from solver_shard.program import DTYPE_BYTES, Program, Role, in_place, places
from solver_shard.rules.rulebook import Rulebook

LINEAR = ("avg", "sum")
"""Pending reductions that may wait until after the addition."""

NORM_BYTES = 4
"""Of the norm that all devices of a group sum up: one f32."""

Schedule = Literal["sequential", "windows"]
"""Whether a step takes one thing after the other, or windows of what runs side by side."""

_Value = TypeVar("_Value")


def lower(
    program: Program,
    rulebook: Rulebook,
    costs: CostModel,
    *,
    optimizer_state: OptimizerState,
    pins: Pins | None = None,
    limit: int | None = None,
    restriction: TemplateRestriction | None = None,
    fusion: bool = False,
    microbatches: int = 1,
    relays: Collection[int] = (),
    schedule: Schedule = "sequential",
) -> Lowering:
    """Build the choice graph of a program on the cost model's mesh.

    Args:
        rulebook: gives the rule of each op.
        costs: prices compute and transitions; holds the mesh and the overlap discount.
        optimizer_state: what the optimizer keeps and moves per element of a trained parameter; how gradients are reduced and clipped.
        pins: layouts that the user allows, by tensor position.
        limit: bytes that may be live on one device at any time.
        restriction: layouts and transitions that templates leave.
        fusion: price pointwise chains as fused, see ``graph/strategies.py``.
        microbatches: how many times a step runs the program before its update.
        relays: places of the program that are no pin's, by the tensor before each; see ``constraints``.
        schedule: whether times add up, or load windows (``costs.schedule``); then the overlap discount plays no part.

    Raises:
        InputError: a pin leaves a tensor without a layout.
    """
    lowerer = _Lowerer(program, rulebook, costs, optimizer_state, pins or {}, restriction, fusion, microbatches, schedule)
    return lowerer.lowering(limit, relays)


def accumulator_layouts(
    shape: Sequence[int], mesh_shape: Sequence[int], pending: Collection[str], wholes: Sequence[str] | None = None
) -> Layouts:
    """What an accumulator may be laid out as, where the gradient can be made with these reductions ``pending``.

    ``wholes``: as of ``legal_layouts``, where several axes may cut one dim in either order.
    """
    return legal_layouts(shape, mesh_shape, tuple(reduction for reduction in LINEAR if reduction in pending), wholes)


def addition_ns(aliases: int, own: Ints, held: Ints, dtype: str, costs: CostModel) -> Ints:
    """Time of adding once, per strategy of an ``AccumulateNode``: it reads what arrives and the accumulator, and writes the accumulator.

    The first microbatch's gradient is added, too: to zeros. (A kernel that adds weight gradients up as it makes them, Megatron-LM's
    ``gradient_accumulation_fusion``, pays less; it is not modelled.)

    Args:
        aliases: the strategies that read the gradient as made and convert it on the way; the others read it as it arrives.
        own, held: bytes per device of the strategy's layout in the gradient's dtype, and in the accumulator's.
    """
    arriving = np.where(np.arange(len(own)) < aliases, own, held)
    return costs.compute_ns(0, arriving + 2 * held, dtype)


def conversion_ns(own: Ints, held: Ints, dtype: str, costs: CostModel) -> Ints:
    """Time of bringing a gradient into the reduce dtype: it is read in its own (bytes ``own``), and written.

    As FSDP2's copy into the input of its reduce-scatter does.
    """
    return costs.compute_ns(0, own + held, dtype)


def norm_axes(mesh_shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Every set of axes over which a norm may be summed, smallest first; axes of one device are in none."""
    live = [a for a, size in enumerate(mesh_shape) if size > 1]
    return tuple(itertools.chain.from_iterable(itertools.combinations(live, k) for k in range(len(live) + 1)))


def longest_first(group: Group) -> tuple[int, int, str, str]:
    """By what the groups of a chain of tails are sorted: as evaluators of plans do, whose groups have names and no numbers."""
    return -group.stop, group.start, group.purpose, group.family


def whole_bytes(nbytes: Ints, part: int, whole: int) -> Ints:
    """Bytes of the ``whole`` of which these are the ``part`` (both in elements), or -1 where that is no whole number.

    >>> whole_bytes(np.array([8, 3]), 2, 4).tolist()
    [16, 6]
    """
    common = math.gcd(part, whole)
    scaled = nbytes * (whole // max(common, 1))  # bytes times elements would not fit 64 bits
    return np.where(scaled % (part // common) == 0, scaled // (part // common), -1) if part else np.zeros_like(scaled)


@dataclass(frozen=True, slots=True)
class _Move:
    """All ways of a tensor from what is held to what is needed, for a purpose; ``op`` says when they run, see ``StepSchedule.place``."""

    tensor: int
    purpose: str
    op: int | None
    held: Layouts
    need: Layouts


def _paid(table: Ints) -> Ints:
    """A table of costs with 0 where they are forbidden: that is said elsewhere."""
    return np.where(table >= FORBIDDEN, 0, table)


class _Lowerer:
    """The choice graph while it grows: nodes with costs, usages and a live interval each, edges with numbered tables."""

    def __init__(
        self,
        program: Program,
        rulebook: Rulebook,
        costs: CostModel,
        state: OptimizerState,
        pins: Pins,
        restriction: TemplateRestriction | None,
        fusion: bool,
        microbatches: int,
        schedule: Schedule,
    ) -> None:
        self.program, self.costs, self.state, self.pins, self.restriction = program, costs, state, pins, restriction
        self.microbatches, self.accumulates = microbatches, microbatches > 1
        self.mesh_shape = costs.mesh.shape
        self.rules = tuple(rulebook.rule(program, i) for i in range(len(program.ops)))
        self.even = rulebook.conservative
        self.lives = liveness(program, self.rules, accumulates=self.accumulates)
        self.fused = fused_tensors(program, self.rules) if fusion else frozenset()
        self.written = in_place(program)
        moves = [(t, group.purpose) for t, groups in self.lives.groups.items() for group in groups]
        moves += [(g, ACCUMULATE) for g in program.gradients.values()]
        self.buckets = bucket_sizes(program, [*moves, *((p, UPDATE) for p in program.gradients)])
        self.makers = {t: i for i, op in enumerate(program.ops) for t in op.results}
        self.sharing = {member.tensor for storage in self.lives.storages for member in storage.members}
        self.either = either_order(program)
        self.places = frozenset(places(program).values())
        self.pending: dict[int, frozenset[str]] = {}
        self.schedule: StepSchedule | None = None
        if schedule == "windows":
            self.schedule = StepSchedule.of([(op.module, op.phase.value) for op in program.ops], microbatches)
        self.node_loads: list[tuple[int, Ints, Uses]] = []
        self.edge_loads: list[tuple[int, int, Ints, Uses]] = []
        self.nodes: list[Node] = []
        self.index: dict[NodeKey, int] = {}
        self.node_costs: list[Ints] = []
        self.node_usages: list[Ints] = []
        self.node_intervals: list[tuple[tuple[int, int], ...]] = []
        self.edges: list[tuple[int, int]] = []
        self.edge_tables: list[int] = []
        self.tables: list[Ints] = []
        self.numbers: dict[Hashable, int] = {}
        self.cache: dict[Hashable, Any] = {}
        self.columns: list[OpStrategies] = []
        self.known: dict[Layouts, int] = {}
        self.positions: dict[int, tuple[int, Layouts]] = {}

    def lowering(self, limit: int | None, relays: Collection[int]) -> Lowering:
        # What is stored comes first: the layouts of sources and states are asked for by all that follows.
        for t in self.program.sources():
            self._source(t)
        if self.state.optimizer != "none":
            for p in self.program.gradients:
                self._state(p)
            if self.state.clip and self.program.gradients:
                self._clipping()
        # Then ops in their order, each behind the reshards from which it reads. Which strategies an op has depends on what may be pending
        # in its operands, so they are all known before the first reshard asks what its readers need.
        for i in range(len(self.program.ops)):
            self.columns.append(self._strategies(i))
        strategies = tuple(self.columns)
        for i in range(len(self.program.ops)):
            for j, t in self._read(i):
                self._reshard(t, self._group_of(t, i, j))
            self._op(i, strategies[i])
        for t in self.program.gradients.values():
            self._reshard(t, next(k for k, g in enumerate(self.lives.groups[t]) if g.purpose == OPTIMIZER))
        for t in dict.fromkeys(self.program.outputs):
            k = next(k for k, g in enumerate(self.lives.groups[t]) if g.purpose == OUTPUT)
            self._reshard(t, k)
            self._written_back(t, self.index[ReshardNode, t, k])
        # Last the nodes that only own bytes, which need all reshards of a tensor, and the edges to the ops.
        for t in self.lives.groups:
            self._tails(t)
        for storage in self.lives.storages:
            self._storage(storage)
        for t in self.lives.held:
            self._final_tails(t)
        self._read_edges(strategies)
        sizes = [len(c) for c in self.node_costs]
        graph = ChoiceGraph(
            names=tuple(self._name(n) for n in self.nodes),
            offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            costs=np.concatenate(self.node_costs),
            usages=np.concatenate(self.node_usages),
            interval_offsets=np.cumsum([0, *map(len, self.node_intervals)], dtype=np.int64),
            intervals=np.array([interval for own in self.node_intervals for interval in own], dtype=np.int64).reshape(-1, 2),
            edges=np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            edge_tables=np.array(self.edge_tables, dtype=np.int64),
            tables=tuple(self.tables),
            limit=limit,
            loads=self._loads(),
        )
        return Lowering(
            program=self.program,
            graph=graph,
            nodes=tuple(self.nodes),
            index=self.index,
            strategies=strategies,
            lives=self.lives,
            buckets=self.buckets,
            fused=self.fused,
            microbatches=self.microbatches,
            reduced={t: self._reduced_dtype(t) for t in self.program.gradients.values()},
            optimizer_state=self.state,
            relays=frozenset(relays),
        )

    # The graph as it grows, and what is asked of it.

    def _name(self, node: Node) -> str:
        if isinstance(node, OpNode):
            return f"op {node.op} {self.program.ops[node.op].name}"
        if not isinstance(node, TensorNode):
            return "gradient norm"
        group = group_of(node, self.lives)
        return f"{node.label} {self.program.tensors[node.tensor].name}" + (f" {group.family}" if group else "")

    def _add(self, node: Node, usages: Ints, interval: tuple[int, int], *more: tuple[int, int]) -> int:
        position = len(self.nodes)
        self.nodes.append(node)
        self.index[node.key] = position
        self.node_costs.append(np.zeros(len(usages), dtype=np.int64))
        self.node_usages.append(usages)
        self.node_intervals.append((interval, *more))
        return position

    def _edge(self, u: int, v: int, key: Hashable, build: Callable[..., Ints], *args: Any) -> None:
        """An edge with the table of this key, which is built from these arguments when it is first needed."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.tables)
            self.tables.append(build(*args))
        self.edges.append((u, v))
        self.edge_tables.append(number)

    def _once(self, key: Hashable, build: Callable[[], _Value]) -> _Value:
        """The value of a key, computed when it is first asked for."""
        if key not in self.cache:
            self.cache[key] = build()
        value: _Value = self.cache[key]
        return value

    def _node(self, kind: type[AnyNode], t: int, group: int = 0) -> tuple[int, AnyNode]:
        """Position and node of a key."""
        v = self.index[kind, t, group]
        return v, self.nodes[v]  # type: ignore[return-value]  # a key's class is its node's

    def _copies(self, reshard: ReshardNode) -> Layouts:
        """What a group may copy."""
        return self._once(("copies", self._number(reshard.layouts), reshard.aliases), lambda: reshard.layouts[reshard.aliases :])

    def _layouts(self, v: int) -> Layouts:
        layouts: Layouts = self.nodes[v].layouts  # type: ignore[attr-defined]  # only asked of nodes of tensors
        return layouts

    def _bytes(self, t: int, layouts: Layouts, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Ints:
        """Of the fullest shard of a tensor, or of one of another dtype or shape."""
        tensor = self.program.tensors[t]
        args = (shape or tensor.shape, dtype or tensor.dtype)
        return self._once(("bytes", args, self._number(layouts)), lambda: self.costs.local_bytes(*args, layouts))

    def _number(self, layouts: Layouts) -> int:
        """One of these layouts, in this order: stands for them in keys, as a tuple of tuples is hashed anew each time it is asked for."""
        number, _ = self.positions.get(id(layouts), (-1, layouts))
        if number < 0:
            number = self.known.setdefault(layouts, len(self.known))
            self.positions[id(layouts)] = number, layouts  # which keeps it alive, and so its id its own
        return number

    # Which layouts a tensor may have.

    def _legal(self, t: int) -> Layouts:
        """Layouts without pending reductions that the user allows."""
        return self._pinned(t, self._stored(self.program.tensors[t].shape, t in self.either))

    def _stored(self, shape: tuple[int, ...], orders: bool) -> Layouts:
        """Layouts without pending reductions; of conservative rules only those with equal shards."""
        layouts = self.costs.layouts(shape, (), orders)
        return tuple(layout for layout in layouts if is_even(layout, shape, self.mesh_shape)) if self.even else layouts

    def _pinned(self, t: int, layouts: Layouts) -> Layouts:
        pin = self.pins.get(t)
        kept = tuple(layout for layout in layouts if pin(layout)) if pin else layouts
        if not kept:
            shown = ", ".join(map(str, layouts[:12])) + (", ..." if len(layouts) > 12 else "")
            name = self.program.tensors[t].name
            raise InputError(f"the pins on {name!r} leave it no layout on mesh {self.costs.mesh}; legal ones are {shown}; loosen the pin")
        return kept

    def _restricted(self, t: int, layouts: Layouts, allows: Callable[[int, Layout], bool]) -> Layouts:
        kept = tuple(layout for layout in layouts if allows(t, layout))
        if not kept:
            beside, loosen = (" that its pins allow", ", or loosen the pin") if t in self.pins else ("", "")
            raise InputError(
                f"the template leaves {self.program.tensors[t].name!r} no layout{beside} on mesh {self.costs.mesh}; use another one{loosen}"
            )
        return kept

    def _needed(self, t: int, group: Group) -> Layouts:
        """Every layout that some reader of the group asks for, in a fixed order."""
        if group.purpose == OPTIMIZER:
            shared = self._legal(t)
            for p in self._parameters(t) if self.state.optimizer == "none" else ():
                stored = set(self._node(SourceNode, p)[1].layouts)
                shared = tuple(layout for layout in shared if layout in stored)
            if not shared:
                names = " and ".join(repr(self.program.tensors[x].name) for x in (t, *self._parameters(t)))
                raise InputError(
                    f"the pins on {names} leave them no common layout; a gradient is stored like its parameter; pin one of them"
                )
            return shared
        if group.purpose == OUTPUT:
            return self._legal(t)
        columns = [self.columns[i].operands[j].layouts for i, j in group.readers]
        key = ("need", *sorted({self._number(column) for column in columns}))
        return self._once(key, lambda: tuple(sorted({layout for column in columns for layout in column}, reverse=True)))

    def _common(self, need: Layouts, held: Layouts) -> Layouts:
        """Those of the one that are among the other."""
        key = ("common", self._number(need), self._number(held))
        return self._once(key, lambda: tuple(filter(set(held).__contains__, need)))

    # What is stored: sources, and the optimizer's states.

    def _source(self, t: int) -> None:
        layouts = self._legal(t)
        if self.restriction is not None:
            layouts = self._restricted(t, layouts, self.restriction.source)
        self._add(SourceNode(tensor=t, layouts=layouts), self._bytes(t, layouts), self.lives.base[t])

    def _state(self, p: int) -> None:
        """The optimizer's state of a parameter: its bytes, the time of the update, and the way of the new values."""
        tensor = self.program.tensors[p]
        layouts = self._stored(tensor.shape, True)
        if self.restriction is not None:
            layouts = self._restricted(p, layouts, self.restriction.state)
        elements = self._bytes(p, layouts) // DTYPE_BYTES[tensor.dtype]
        times = self.costs.compute_ns(np.zeros(len(layouts)), elements * self.state.update_bytes(tensor.dtype), tensor.dtype)
        times = times + self.costs.compute_ns(0, elements * self.state.norm_bytes(tensor.dtype), tensor.dtype, "reduction")
        usages = elements * self.state.resident_bytes(tensor.dtype)
        v = self._add(StateNode(tensor=p, layouts=layouts), usages, (0, self.lives.end))
        self._takes(v, times)
        if each := self.state.step_bytes(tensor.dtype):
            w = self._add(StepNode(tensor=p, layouts=layouts), elements * each, (self.lives.end - 1, self.lives.end))
            self._edge(v, w, ("equal", layouts, layouts), equal_table, layouts, layouts)
        parameter, source = self._node(SourceNode, p)
        apart = self.state.apart_bytes(tensor.dtype)
        if apart and not free_moves(source.layouts, layouts).all():
            m = self._add(MasterNode(tensor=p, layouts=2 * layouts), np.concatenate([0 * elements, elements * apart]), (0, self.lives.end))
            self._edge(v, m, ("master", layouts), lambda: np.tile(equal_table(layouts, layouts), 2))
            self._edge(parameter, m, ("stepped", source.layouts, layouts), stepped_table, source.layouts, layouts)
        scope = (self._scope(p, UPDATE), self._bucket(p, UPDATE))
        key = ("state", tensor.shape, tensor.dtype, self._number(layouts), self._number(source.layouts), scope)
        readers = [i for group in self.lives.groups.get(p, ()) for i, _ in group.readers]
        self._moved(v, parameter, key, _Move(p, UPDATE, min(readers, default=None), layouts, source.layouts))

    # Ops and their results.

    def _strategies(self, i: int) -> OpStrategies:
        op = self.program.ops[i]
        tensors = [self.program.tensors[t] for t in (*op.operands, *op.results)]
        pending = tuple(self.pending.get(t, frozenset()) for t in op.operands)
        key = ("strategies", id(self.rules[i]), tuple((t.shape, t.dtype) for t in tensors), pending)
        n = len(op.operands)
        column = self._once(
            key, lambda: op_strategies(self.rules[i], tensors[:n], tensors[n:], self.mesh_shape, pending, self.costs.mesh.inner)
        )
        for j, t in enumerate(op.results):
            self.pending[t] = frozenset(s.results[j].reduction for s in column.single if s.results[j].is_partial)
        return column

    def _op(self, i: int, column: OpStrategies) -> None:
        op = self.program.ops[i]
        fused = tuple(t in self.fused for t in (*op.operands, *op.results))
        times = self._once(
            ("op cost", id(column), op.name, fused, i in self.written),
            lambda: op_nanoseconds(self.program, i, column, self.costs, self.fused, i in self.written),
        )
        v = self._add(OpNode(op=i), np.zeros_like(times), (i, i))
        self._takes(
            v, times, op=i, lanes=lambda r: column.collective_nanoseconds(lambda *what: self.costs.collectives.lane_times(*what)[r])
        )
        for j, t in enumerate(op.results):
            result = column.results[j]
            final = any(g.purpose in (OPTIMIZER, OUTPUT) for g in self.lives.groups.get(t, ()))  # pins hold for what is stored or returned
            layouts = result.layouts if final else self._pinned(t, result.layouts)
            usages = self._bytes(t, layouts) if i not in self.lives.views else np.zeros(len(layouts), dtype=np.int64)
            r = self._add(ResultNode(tensor=t, layouts=layouts), usages, self.lives.base[t])
            self._edge(v, r, ("result", id(column), j, self._number(layouts)), result_table, result, layouts)

    def _read(self, i: int) -> list[tuple[int, int]]:
        """Index and tensor of the operands whose bytes an op reads."""
        return [(j, t) for j, t in enumerate(self.program.ops[i].operands) if self.rules[i].needs(j)]

    def _group_of(self, t: int, i: int, j: int) -> int:
        return next(k for k, g in enumerate(self.lives.groups[t]) if (i, j) in g.readers)

    def _read_edges(self, strategies: Sequence[OpStrategies]) -> None:
        for i in range(len(self.program.ops)):
            for j, t in self._read(i):
                v, reshard = self._node(ReshardNode, t, self._group_of(t, i, j))
                column, exact = strategies[i].operands[j], i in self.places
                key = ("read", self._number(reshard.layouts), id(column), exact)
                self._edge(v, self.index[OpNode, i, 0], key, read_table, reshard.layouts, column, exact)

    # Reshards: how a tensor gets from where it is made or held to a group of its readers.

    def _reshard(self, t: int, k: int) -> None:
        if (ReshardNode, t, k) in self.index:
            return
        group = self.lives.groups[t][k]
        if group.purpose == OPTIMIZER and (self.accumulates or self._reduced_dtype(t) != self.program.tensors[t].dtype):
            self._gradient(t, k)
            return
        producer = self._hold(t) if group.late else self._producer(t)
        held, need = self._layouts(producer), self._needed(t, group)
        alias = self._common(need, held)
        tensor = self.program.tensors[t]
        scope = (self._scope(t, group.purpose), self._bucket(t, group.purpose), t in self.fused, t in self.either)
        pair = (self._number(held), self._number(need))
        key = ("transition", (tensor.shape, tensor.dtype, *pair, self._discounted(t, group.purpose), bool(group.readers), scope))
        both = self._once(("both", *pair), lambda: alias + need)
        usages = self._bytes(t, both).copy()
        usages[: 0 if group.final and not group.kept else len(alias)] = 0
        node = ReshardNode(tensor=t, group=k, layouts=both, aliases=len(alias))
        v = self._add(node, usages, (group.start, group.stop))
        move = _Move(t, group.purpose, min((i for i, _ in group.readers), default=self.makers.get(t)), held, need)
        self._moved(producer, v, key, move, lambda moves: reshard_table(held, alias, need, moves), self._spilled(move))
        if tensor.role is Role.PARAMETER and group.readers:
            self._brought(v, t, k, self._times_ahead(group.start))
        if group.purpose == OPTIMIZER and move.op is not None:
            self._reduced(producer, v, t, move.op)
        if group.purpose == OPTIMIZER:
            self._handed_over(t, v)

    def _handed_over(self, t: int, v: int) -> None:
        """The update reads its slice of the reduced gradient; without an optimizer, it is stored like the parameter."""
        given = self._layouts(v)
        for p in self._parameters(t):
            sliced = (StateNode, p, 0) in self.index
            target = self.index[StateNode if sliced else SourceNode, p, 0]
            layouts = self._layouts(target)
            self._edge(v, target, (sliced, given, layouts), free_table if sliced else equal_table, given, layouts)

    def _written_back(self, t: int, v: int) -> None:
        """The new value of a buffer is written where the buffer lies, without communication."""
        given = self._layouts(v)
        for s in self.program.written(t):
            source, node = self._node(SourceNode, s)
            self._edge(v, source, (True, given, node.layouts), free_table, given, node.layouts)

    def _reduced_dtype(self, t: int) -> str:
        return self.state.gradient_dtype(self.program.tensors[t].dtype)

    def _producer(self, t: int) -> int:
        return self.index[ResultNode if t in self.makers else SourceNode, t, 0]

    def _parameters(self, gradient: int) -> tuple[int, ...]:
        return tuple(p for p, g in self.program.gradients.items() if g == gradient)

    def _discounted(self, t: int, purpose: str) -> bool:
        """Parameter gathers and gradient reductions can run beside compute; the overlap option discounts them."""
        return self.program.tensors[t].role is Role.PARAMETER or purpose in (ACCUMULATE, OPTIMIZER)

    def _bucket(self, t: int, purpose: str) -> int:
        """How many tensors share the launches of this one's transitions."""
        return self.buckets.get((t, purpose), 1)

    def _scope(self, t: int, purpose: str) -> Hashable:
        return None if self.restriction is None else self.restriction.scope(t, purpose)

    def _spilled(self, move: _Move) -> Callable[[], Ints] | None:
        """Time of writing and reading back a copy of a tensor that is fused away elsewhere."""
        if move.tensor not in self.fused:
            return None
        t, dtype = move.tensor, self.program.tensors[move.tensor].dtype
        return lambda: spill_nanoseconds(dtype, self._bytes(t, move.held)[:, None], self._bytes(t, move.need), self.costs)

    def _table(self, move: _Move) -> TransitionTable:
        tensor, purpose, t = self.program.tensors[move.tensor], move.purpose, move.tensor
        reductions = tuple(sorted({p.reduction for layout in (*move.held, *move.need) for p in layout if p.is_partial}))
        dtype = self._reduced_dtype(t) if purpose in (ACCUMULATE, OPTIMIZER) else tensor.dtype
        return self.costs.transitions(tensor.shape, dtype, reductions, self._bucket(t, purpose), t in self.either)

    def _moves(self, move: _Move) -> Ints:
        """Time of every transition of a tensor, in one run; what a template forbids is FORBIDDEN."""
        table = self._table(move).costs_between(move.held, move.need)
        if self.restriction is not None:
            scope = self.restriction.scope(move.tensor, move.purpose)
            table = np.where(self.restriction.moves(scope, move.held, move.need), table, FORBIDDEN)
        return table

    # What is held of a tensor for its later readers.

    def _hold(self, t: int) -> int:
        """The hold node of a tensor, made with its keep nodes when the first late group asks for it."""
        if (HoldNode, t, 0) in self.index:
            return self.index[HoldNode, t, 0]
        producer, until = self._producer(t), self.lives.until(t)
        held = self._layouts(producer)
        early = [k for k, g in enumerate(self.lives.groups[t]) if g.purpose == FORWARD]
        copying = self.restriction is None or self.restriction.keeps_copies(t)
        copies: dict[int, Layouts] = {}
        for k in early:
            _, reshard = self._node(ReshardNode, t, k)
            copies[k] = self._copies(reshard) if copying else ()
        parts = tuple((k, self._number(copies[k])) for k in early)
        options = ("held", self._number(held), parts)
        layouts, origins = self._once(
            options,
            lambda: (
                tuple(itertools.chain(held, *copies.values())),
                (PRODUCED,) * len(held) + tuple(k for k in early for _ in copies[k]),
            ),
        )
        v = self._add(HoldNode(tensor=t, layouts=layouts, origins=origins), np.zeros(len(layouts), dtype=np.int64), (0, 0))
        self._edge(producer, v, ("hold", options), hold_table, held, 0, PRODUCED, layouts, origins)
        for k in early:
            w, reshard = self._node(ReshardNode, t, k)
            key = ("hold", self._number(reshard.layouts), reshard.aliases, k, options)
            self._edge(w, v, key, hold_table, reshard.layouts, reshard.aliases, k, layouts, origins)
        # Who owns the bytes in the meantime: the copy that was held, or the producer's; a storage's members have theirs from ``_storage``.
        owners = [(k, copies[k], self.lives.groups[t][k].stop) for k in early]
        if t in self.makers and t not in self.sharing:
            owners.append((PRODUCED, held, self.lives.base[t][1]))
        ends = until + self.lives.groups[t][-1].final  # a final group's transition may be all that it is kept for
        for k, kept, start in owners:
            if kept and start < ends:
                usages = np.concatenate([[0], self._bytes(t, kept)])
                w = self._add(KeepNode(tensor=t, origin=k, layouts=(Layout(), *kept)), usages, (start, until))
                self._edge(v, w, ("keep", self._number(kept), k, options), keep_table, layouts, origins, k, kept)
        return v

    # Gradients that are accumulated, converted or clipped on their way to the update. Those that go there as they are made, one
    # microbatch in their own dtype, have a plain reshard with purpose "optimizer".

    def _gradient(self, t: int, k: int) -> None:
        """The optimizer reshard of a gradient, group ``k`` of tensor ``t``, with the accumulator that it starts from if there is one."""
        group, dtype = self.lives.groups[t][k], self._reduced_dtype(t)
        need = self._needed(t, group)
        if self.accumulates:
            producer, start, inside = self._accumulator(t, group), self.lives.end - 1, len(need)
        else:
            producer, start, inside = self._producer(t), group.start, 0
        held = self._layouts(producer)
        usages = np.concatenate([np.zeros(inside, dtype=np.int64), self._bytes(t, need, dtype)])
        v = self._add(ReshardNode(tensor=t, group=k, layouts=need[:inside] + need, aliases=inside), usages, (start, self.lives.end))
        key, move = self._gradient_key(t, OPTIMIZER, held, need), _Move(t, OPTIMIZER, self.makers.get(t), held, need)
        if self.accumulates:
            self._moved(producer, v, ("reduce", key), move, lambda moves: in_place_table(held, need, moves))
            self._brought(v, t, k, self._times_behind(move.op, once=True))
        else:
            self._moved(producer, v, ("convert", key), move, beside=self._converted(move))
            if move.op is not None:
                self._reduced(producer, v, t, move.op)
        self._handed_over(t, v)

    def _accumulator(self, t: int, group: Group) -> int:
        """The node of a gradient's accumulator, and that of its way there from each microbatch."""
        tensor, dtype, producer = self.program.tensors[t], self._reduced_dtype(t), self._producer(t)
        need = accumulator_layouts(tensor.shape, self.mesh_shape, self.pending.get(t, frozenset()), self.costs.mesh.wholes)
        if self.restriction is not None:
            need = self._restricted(t, need, self.restriction.accumulator)
        held = self._layouts(producer)
        alias = self._common(need, held)
        layouts = alias + need
        own, kept = self._bytes(t, layouts), self._bytes(t, layouts, dtype)
        times = addition_ns(len(alias), own, kept, tensor.dtype, self.costs)
        usages = np.concatenate([np.zeros(len(alias), dtype=np.int64), kept[len(alias) :]])
        v = self._add(AccumulateNode(tensor=t, layouts=layouts, aliases=len(alias)), usages, (group.start, group.stop))
        move = _Move(t, ACCUMULATE, self.makers.get(t), held, need)
        self._takes(v, times, op=move.op)
        key = ("arrive", self._gradient_key(t, ACCUMULATE, held, need))
        self._moved(producer, v, key, move, lambda moves: reshard_table(held, alias, need, moves), self._converted(move))
        if move.op is not None:
            self._brought(v, t, PRODUCED, self._times_behind(move.op))
            self._reduced(producer, v, t, move.op)
        w = self._add(AccumulatorNode(tensor=t, layouts=need), self._bytes(t, need, dtype), (0, self.lives.end))
        self._edge(v, w, ("equal", layouts, need), equal_table, layouts, need)
        return w

    def _converted(self, move: _Move) -> Callable[[], Ints] | None:
        """Time of bringing a gradient into the reduce dtype before its transition; None where that is its own."""
        t, own, dtype = move.tensor, self.program.tensors[move.tensor].dtype, self._reduced_dtype(move.tensor)
        if dtype == own:
            return None

        def times() -> Ints:
            once = conversion_ns(self._bytes(t, move.held), self._bytes(t, move.held, dtype), own, self.costs)
            return np.broadcast_to(once[:, None], (len(move.held), len(move.need)))

        return times

    def _gradient_key(self, t: int, purpose: str, held: Layouts, need: Layouts) -> Hashable:
        tensor = self.program.tensors[t]
        return tensor.shape, tensor.dtype, held, need, self._scope(t, purpose), self._bucket(t, purpose)

    def _clipping(self) -> None:
        """Over which axes the gradient norm is summed: at least those that cut any state."""
        groups = norm_axes(self.mesh_shape)
        times = np.array([self.costs.collective_ns("all_reduce", axes, NORM_BYTES) for axes in groups], dtype=np.int64)
        v = self._add(ClipNode(axes=groups), np.zeros_like(times), (0, 0))
        self._takes(v, times, lanes=lambda r: np.array([self._lane_times(axes)[r] for axes in groups], dtype=np.int64))
        for p in self.program.gradients:
            state, node = self._node(StateNode, p)
            self._edge(v, state, ("norm", node.layouts), norm_table, groups, node.layouts)

    # Bytes of the schedule: what is brought a window ahead is there from its start, what is reduced a window behind until its end.

    def _times_ahead(self, start: int) -> list[tuple[int, int]]:
        """When a parameter is there before its group reads it: in the window before, which may be the last of the microbatch before."""
        if self.schedule is None:
            return []
        k, spans = self.schedule.stretch[start], self.schedule.windows[1 : 1 + self.schedule.length]
        wrapped = [(spans[-1].start, self.lives.end - 1)] if self.accumulates and not k else []
        return [(spans[k - 1].start if k else 0, start), *wrapped]

    def _times_behind(self, op: int | None, *, once: bool = False) -> list[tuple[int, int]]:
        """When a gradient is there after it is made, for its reduction in the window after; ``once``: before the update that reads it."""
        if self.schedule is None or op is None:
            return []
        k, spans, update = self.schedule.stretch[op], self.schedule.windows[1 : 1 + self.schedule.length], self.lives.end - 1
        last = k + 1 == len(spans)
        if once:
            return [(update if last else spans[k + 1].start, update)]
        return [(op + 1, update if last else spans[k + 1].stop), *([(0, spans[0].stop)] if last and self.accumulates else [])]

    def _brought(self, v: int, t: int, k: int, times: Sequence[tuple[int, int]]) -> None:
        """The bytes of a node's copies at other times than its own."""
        times = [(start, stop) for start, stop in times if start < stop]
        if not times:
            return
        node = self.nodes[v]
        assert isinstance(node, (ReshardNode, AccumulateNode)), "only these have copies"
        copies = node.layouts[node.aliases :]
        dtype = self._reduced_dtype(t) if t in self.makers else None
        usages = np.concatenate([[0], self._bytes(t, copies, dtype)])
        w = self._add(AheadNode(tensor=t, group=k, layouts=(Layout(), *copies), aliases=0), usages, *times)
        self._edge(v, w, ("ahead", node.aliases, len(copies)), ahead_table, node.aliases, len(copies))

    def _reduced(self, producer: int, v: int, t: int, op: int) -> None:
        """The bytes of what a reduction starts from."""
        times = [(start, stop) for start, stop in self._times_behind(op) if start < stop]
        if not times:
            return
        held, node = self._layouts(producer), self.nodes[v]
        assert isinstance(node, (ReshardNode, AccumulateNode)), "only these have copies"
        usages = np.concatenate([[0], self._bytes(t, held, self._reduced_dtype(t))])
        w = self._add(BehindNode(tensor=t, layouts=(Layout(), *held)), usages, *times)
        self._edge(producer, w, ("behind", len(held)), behind_table, len(held))
        sizes = (node.aliases, len(node.layouts) - node.aliases, len(held))
        self._edge(v, w, ("reduced", sizes), reduced_table, *sizes)

    def _lane_times(self, axes: tuple[int, ...]) -> Ints:
        return self.costs.collectives.lane_times("all_reduce", axes, np.array(NORM_BYTES, dtype=np.int64))

    # What takes time: added up, or as loads of windows.

    def _takes(self, v: int, times: Ints, *, op: int | None = None, lanes: Callable[[int], Ints] | None = None) -> None:
        """Time of a node's strategies in each run of an op, or in the update; and what its collectives take of each lane."""
        if self.schedule is None:
            self.node_costs[v] = times if op is None else repeated(times, self.microbatches)
            return
        windows = (self.schedule.update,) if op is None else self.schedule.of_op(op)
        self.node_loads.append((v, times, self._uses(windows)))
        if lanes is not None:
            self.node_loads += [(v, lanes(r), self._uses(windows, r)) for r in range(len(self.costs.collectives.lanes))]

    def _moved(
        self,
        u: int,
        v: int,
        key: Hashable,
        move: _Move,
        table: Callable[[Ints], Ints] | None = None,
        beside: Callable[[], Ints] | None = None,
    ) -> None:
        """An edge of transitions.

        Args:
            table: makes it of their costs (held, need); without it, it is these.
            beside: time of device memory that each takes besides.
        """

        def made(costs: Ints) -> Ints:
            return costs if table is None else table(costs)

        if self.schedule is None:
            self._edge(u, v, key, lambda: made(self._summed(move, beside)))
            return
        self._edge(u, v, ("possible", key), lambda: made(np.where(self._moves(move) >= FORBIDDEN, FORBIDDEN, 0)))
        schedule, lanes = self.schedule, range(len(self.costs.collectives.lanes))
        parameter = self.program.tensors[move.tensor].role is Role.PARAMETER
        place = schedule.place(move.purpose, move.op, parameter=parameter, accumulated=self.accumulates)

        def load(part: Hashable, times: Callable[[], Ints], uses: Uses) -> None:
            found = self._once(("load", part, place.asynchronous, key), lambda: _paid(made(times())))
            self.edge_loads.append((u, v, found, uses))

        def loads(k: int) -> Ints:
            found: Ints = self._table(move).loads_between(move.held, move.need)[k]
            return found

        load("stream", (lambda: loads(0)) if place.asynchronous else lambda: self._moves(move), self._uses(place.windows))
        for r in lanes:
            load(r, lambda r=r: loads(1 + r), self._uses(place.windows, r))  # type: ignore[misc]  # mypy does not infer lambdas with defaults
        if beside is not None:
            load("beside", beside, self._uses(schedule.beside(move.purpose, move.op, accumulated=self.accumulates)))

    def _summed(self, move: _Move, beside: Callable[[], Ints] | None) -> Ints:
        """Cost of every transition, all its runs together, after the overlap discount where it applies."""
        moves = self._moves(move)
        paid = np.where(moves >= FORBIDDEN, 0, moves)
        if self._discounted(move.tensor, move.purpose):
            paid = exposed(paid, self.costs.overlap)
        total = np.where(moves >= FORBIDDEN, FORBIDDEN, paid if beside is None else paid + beside())
        return total if move.purpose in (OPTIMIZER, UPDATE) else repeated(total, self.microbatches)

    def _uses(self, windows: Sequence[int], lane: int | None = None) -> Uses:
        """The terms of the compute stream, or of a lane, in these windows, each as often as the window runs."""
        assert self.schedule is not None, "only what loads windows asks for terms"
        width, at = 1 + len(self.costs.collectives.lanes), 0 if lane is None else 1 + lane
        return [(w * width + at, self.schedule.windows[w].runs) for w in windows]

    def _loads(self) -> Loads | None:
        if self.schedule is None:
            return None
        width = 1 + len(self.costs.collectives.lanes)
        return Loads.of(np.repeat(np.arange(len(self.schedule.windows)), width), self.node_loads, self.edge_loads)

    # Tails: what readers of a tensor as it is keep of it beyond its own life. :mod:`solver_shard.graph` has a picture.

    def _tails(self, t: int) -> None:
        """The tails of a tensor whose reshards are all there: those that start from what its producer made, and from what is held."""
        for late in (False, True):
            stop = self.lives.held.get(t, 0) if late else self.lives.base[t][1]
            groups = [(g, k) for k, g in enumerate(self.lives.groups[t]) if g.late == late and g.stop > stop and not g.final]
            groups = [(g, k) for g, k in groups if self._aliases(t, k)]
            self._tail_chain(t, sorted(groups, key=lambda pair: longest_first(pair[0])), stop)

    def _tail_chain(self, t: int, groups: list[tuple[Group, int]], base_stop: int) -> None:
        """A tail per group, the longest first, each tied to the one before it."""
        longer: Layouts = ()
        before: int | None = None
        for j, (group, k) in enumerate(groups):
            start = groups[j + 1][0].stop if j + 1 < len(groups) else base_stop
            (v_reshard, reshard), alias = self._node(ReshardNode, t, k), self._aliases(t, k)
            stored = group.late and t not in self.makers  # kept as it is, it stays anyway: one more strategy, without bytes
            with_bytes = (*alias, *longer)
            usages = np.concatenate([[0], self._bytes(t, with_bytes), [0] * stored]).astype(np.int64)
            tail = TailNode(tensor=t, group=k, layouts=(Layout(), *with_bytes, *(Layout(),) * stored), aliases=len(alias))
            v = self._add(tail, usages, (start, group.stop))
            sizes = (len(alias), len(reshard.layouts) - len(alias), len(longer), stored)
            self._edge(v_reshard, v, ("tail", sizes), tail_table, *sizes)
            if stored:
                held, hold = self._node(HoldNode, t)
                self._edge(
                    held, v, ("stored", hold.layouts, hold.origins, with_bytes), stored_table, hold.layouts, hold.origins, with_bytes
                )
            if before is not None:
                above = self._layouts(before)
                args = (above, tail.layouts, len(alias), stored)
                self._edge(before, v, ("chain", *args), chain_table, *args)
            longer = tuple(dict.fromkeys(with_bytes))
            before = v

    def _final_tails(self, t: int) -> None:
        """The tails of a held tensor's final groups: without bytes where what they read as it is stays as held, or in a storage."""
        for k, group in enumerate(self.lives.groups[t]):
            alias = self._aliases(t, k) if group.kept else ()
            if not alias:
                continue
            if group.late:
                other, keep = self._node(KeepNode, t, PRODUCED)
                stays = np.arange(len(keep.layouts)) >= len(keep.layouts) - keep.stored
            else:
                other, hold = self._node(HoldNode, t)
                stays = np.array(hold.origins) == PRODUCED
            w, reshard = self._node(ReshardNode, t, k)
            aliases, copies = len(alias), len(reshard.layouts) - len(alias)
            usages = np.concatenate([[0, 0], self._bytes(t, alias)])
            tail = TailNode(tensor=t, group=k, layouts=(Layout(), Layout(), *alias), aliases=aliases)
            v = self._add(tail, usages, (group.start, group.stop))
            self._edge(other, v, ("stays", stays.tobytes(), aliases), stays_table, stays, aliases)
            self._edge(w, v, ("kept", aliases, copies), kept_table, aliases, copies)

    def _aliases(self, t: int, k: int) -> Layouts:
        """The layouts in which a group may read a tensor as it is; none of a gradient that its accumulator or reduce dtype takes away."""
        v, node = self._node(ReshardNode, t, k)
        return node.layouts[: node.aliases] if self.node_intervals[v][0][1] == self.lives.groups[t][k].stop else ()

    # Storages: what a view and the tensor that it views keep together is there once.

    def _storage(self, storage: Storage) -> None:
        """The keep nodes of a storage's members and the chain that owns its bytes."""
        owner = self._producer(storage.owner)
        sizes = self._bytes(storage.owner, self._layouts(owner))
        classes = np.unique(sizes)
        before: int | None = None
        for k, member in enumerate(storage.members):
            w, keep = self._member(storage, member, owner, sizes)
            if not storage.made:
                continue
            usages = np.concatenate([[0], classes, classes])
            start = max([storage.start, *(m.until for m in storage.members[k + 1 : k + 2])])
            node = StorageNode(tensor=member.tensor, layouts=(Layout(),) * len(usages))
            v = self._add(node, usages, (min(start, member.until), member.until))
            alone = len(keep.layouts) - keep.stored
            whole = self._whole(storage, member, keep.layouts[alone:])
            key = ("storage", (alone, tuple(whole.tolist()), tuple(classes.tolist()), k > 0))
            self._edge(w, v, key, storage_table, alone, whole, classes, k > 0)
            if before is not None:
                self._edge(before, v, ("longer", len(classes)), longer_table, len(classes))
            before = v

    def _member(self, storage: Storage, member: Member, owner: int, sizes: Ints) -> tuple[int, KeepNode]:
        """What a member keeps: strategy 0 nothing, then alone, for each reason, and last in the storage."""
        t, (held, hold) = member.tensor, self._node(HoldNode, member.tensor)
        layouts = tuple(layout for layout, origin in zip(hold.layouts, hold.origins, strict=True) if origin == PRODUCED)
        n, reasons = len(layouts), len(member.path) + 1 if member.path else 0
        nbytes, zeros = self._bytes(t, layouts, shape=self.lives.expanded.get(t)), np.zeros(n, dtype=np.int64)
        usages = np.concatenate([[0], *[nbytes] * reasons, zeros])
        node = KeepNode(tensor=t, origin=PRODUCED, layouts=(Layout(), *layouts * (reasons + 1)), stored=n)
        start, until = self.lives.base[t][1], self.lives.until(t)
        v = self._add(node, usages, (min(start, until), until))
        key: Hashable = ("keep alone", (hold.layouts, hold.origins, reasons))
        self._edge(held, v, key, member_table, hold.origins, n, reasons)
        for k, (x, group) in enumerate(member.path):
            w, reshard = self._node(ReshardNode, x, group)
            args = (reshard.aliases, len(reshard.layouts), k, reasons, n)
            self._edge(w, v, ("copied", *args), copied_table, *args)
        if member.path:
            whole = self._whole(storage, member, layouts)
            key = ("sliced", (tuple(sizes.tolist()), tuple(whole.tolist()), reasons))
            self._edge(owner, v, key, sliced_table, sizes, whole, reasons)
        return v, node

    def _whole(self, storage: Storage, member: Member, held: Layouts) -> Ints:
        tensors = self.program.tensors
        return whole_bytes(self._bytes(member.tensor, held), tensors[member.tensor].numel, tensors[storage.owner].numel)
