"""Lower a Program to a choice graph: every placement decision becomes a node, every price a number.

Nodes: a source (parameter, buffer, input) chooses its layout; an op chooses a strategy; each of its results is a node
tied to it; each group of readers of a tensor has a reshard node that chooses a layout and whether it is an *alias* of
the producer's (no cost, no bytes) or a *copy* (the transition's cost, its own bytes). Edges from producer to reshard
carry transition costs, edges from reshard to reader allow equality and moves that need no communication. Where an alias
outlives its producer's own interval, tail nodes carry those bytes, once for all aliases (``add_tails``); an alias of
a final group has them itself.

A tensor that several groups read has a **relay** behind it, an identity that may bring it to another layout at once for all of them
(:mod:`solver_shard.program`): its own groups then start from there. Pinned activations have the same places.

A tensor that is read in the forward pass and again later has a hold node: what is kept of it in between, the producer's
bytes or the copy that a forward group made. Later groups start from there. Keep nodes, tied to the hold, own the bytes.
With a sharded parameter this is the choice between gathering once (ZeRO-2) and gathering again (ZeRO-3). Tensors that are
held in one storage, a tensor and its views, own its bytes together (``_Storages``).

The optimizer's state of a trained parameter is a node of its own: the reduced gradient is cut to the state's layout for
free, the update costs time where the state is, and the updated values go from the state's layout to the parameter's. So
ZeRO-1, 2, 3, hybrid sharding and their mixtures are points of the graph. Parameters, their states and their gradients, once
reduced, may be cut by several axes on one dim in either order (``_S(d)``); no op reads or makes such a layout.

A step of several microbatches pays all ops and reshards of forward and backward that many times, and adds gradients up in
accumulators (``lower_gradient``); reduce dtypes and clipping stand there, too.

All memory is node usage.

Tables are cached by the layouts they relate, so a deep model has no more distinct tables than a shallow one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from solver_shard.costs.buckets import bucket_sizes
from solver_shard.costs.layouts import free_moves, is_even, legal_layouts
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel, exposed
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InputError
from solver_shard.graph.choice_graph import ChoiceGraph, Ints, repeated
from solver_shard.graph.liveness import ACCUMULATE, FORWARD, OPTIMIZER, OUTPUT, UPDATE, Group, Lives, Member, Storage, either_order, lives
from solver_shard.graph.nodes import (
    Kind,
    Layouts,
    Lowering,
    Node,
    Pins,
    Restriction,
    equal_table,
    free_table,
    hold_table,
    keep_table,
    kept_table,
    read_table,
    result_table,
    stays_table,
    stored_table,
    tail_table,
)
from solver_shard.graph.strategies import OpStrategies, fused_tensors, op_nanoseconds, op_strategies, spill_nanoseconds
from solver_shard.layout import Layout, R
from solver_shard.program import DTYPE_BYTES, Program, Role, places
from solver_shard.rules.rulebook import Rulebook


def lower(
    program: Program,
    rulebook: Rulebook,
    costs: CostModel,
    *,
    optimizer_state: OptimizerState,
    pins: Pins | None = None,
    limit: int | None = None,
    restriction: Restriction | None = None,
    fusion: bool = False,
    microbatches: int = 1,
    relays: Collection[int] = (),
) -> Lowering:
    """Build the choice graph of a program on the cost model's mesh.

    Args:
        rulebook: gives the rule of each op.
        costs: prices compute and transitions; holds the mesh and the overlap discount.
        optimizer_state: what the optimizer keeps and moves per element of a trained parameter; how gradients are reduced and clipped.
        pins: layouts that the user allows, by tensor position.
        limit: bytes that may be live on one device at any time.
        restriction: layouts and transitions to which the graph is narrowed.
        fusion: price pointwise chains as fused, see ``graph/strategies.py``.
        microbatches: how many times a step runs the program before its update.
        relays: places of the program that are no pin's, by the tensor before each; see ``constraints``.

    Raises:
        InputError: a pin leaves a tensor without a layout.
    """
    found = _Lowerer(program, rulebook, costs, optimizer_state, pins or {}, restriction, fusion, microbatches).run(limit)
    return replace(found, relays=frozenset(relays))


class _Lowerer:
    def __init__(
        self,
        program: Program,
        rulebook: Rulebook,
        costs: CostModel,
        state: OptimizerState,
        pins: Pins,
        restriction: Restriction | None,
        fusion: bool,
        microbatches: int,
    ) -> None:
        self.program, self.costs, self.state, self.pins, self.restriction = program, costs, state, pins, restriction
        self.microbatches, self.accumulates = microbatches, microbatches > 1
        self.mesh_shape = costs.mesh.shape
        self.rules = tuple(rulebook.rule(program, i) for i in range(len(program.ops)))
        self.even = rulebook.conservative
        self.lives = lives(program, self.rules, accumulates=self.accumulates)
        self.fused = fused_tensors(program, self.rules) if fusion else frozenset()
        moves = [(t, group.purpose) for t, groups in self.lives.groups.items() for group in groups]
        moves += [(g, ACCUMULATE) for g in program.gradients.values()]
        self.buckets = bucket_sizes(program, [*moves, *((p, UPDATE) for p in program.gradients)])
        self.made = {t for op in program.ops for t in op.results}
        self.sharing = {member.tensor for storage in self.lives.storages for member in storage.members}
        self.either = either_order(program)
        self.places = frozenset(places(program).values())
        self.pending: dict[int, frozenset[str]] = {}
        self.nodes: list[Node] = []
        self.index: dict[tuple[Kind, int, int], int] = {}
        self.node_costs: list[Ints] = []
        self.node_usages: list[Ints] = []
        self.node_intervals: list[tuple[int, int]] = []
        self.edges: list[tuple[int, int, int]] = []
        self.tables: list[Ints] = []
        self.cache: dict[Any, Any] = {}

    def run(self, limit: int | None) -> Lowering:
        for t in self.program.sources():
            self._source(t)
        if self.state.optimizer != "none":
            for p in self.program.gradients:
                self._state(p)
            if self.state.clip and self.program.gradients:
                lower_clipping(self)
        strategies = [self._strategies(i) for i in range(len(self.program.ops))]
        for i in range(len(self.program.ops)):
            for j, t in self._read(i):
                self._reshard(t, self._group_of(t, i, j))
            self._op(i, strategies[i])
        for t in self.program.gradients.values():
            self._reshard(t, next(k for k, g in enumerate(self.lives.groups[t]) if g.purpose == OPTIMIZER))
        for t in dict.fromkeys(self.program.outputs):
            k = next(k for k, g in enumerate(self.lives.groups[t]) if g.purpose == OUTPUT)
            self._reshard(t, k)
            self._written_back(t, self.index[Kind.RESHARD, t, k])
        for t in self.lives.groups:
            add_tails(self, t)
        for storage in self.lives.storages:
            add_storage(self, storage)
        for t in self.lives.held:
            add_kept(self, t)
        self._read_edges(strategies)
        sizes = [len(c) for c in self.node_costs]
        graph = ChoiceGraph(
            names=tuple(self._name(n) for n in self.nodes),
            offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            costs=np.concatenate(self.node_costs),
            usages=np.concatenate(self.node_usages),
            interval_offsets=np.arange(len(sizes) + 1, dtype=np.int64),
            intervals=np.array(self.node_intervals, dtype=np.int64).reshape(-1, 2),
            edges=np.array([e[:2] for e in self.edges], dtype=np.int64).reshape(-1, 2),
            edge_tables=np.array([e[2] for e in self.edges], dtype=np.int64),
            tables=tuple(self.tables),
            limit=limit,
        )
        return Lowering(
            program=self.program,
            graph=graph,
            nodes=tuple(self.nodes),
            index=self.index,
            strategies=tuple(strategies),
            lives=self.lives,
            buckets=self.buckets,
            fused=self.fused,
            microbatches=self.microbatches,
            reduced={t: self._reduced_dtype(t) for t in self.program.gradients.values()},
            optimizer_state=self.state,
        )

    def _name(self, node: Node) -> str:
        if node.kind is Kind.OP:
            return f"op {node.item} {self.program.ops[node.item].name}"
        if node.kind is Kind.CLIP:
            return "gradient norm"
        suffix = f" {self.lives.groups[node.item][node.group].family}" if node.kind in (Kind.RESHARD, Kind.TAIL) else ""
        if node.kind is Kind.KEEP and node.group:
            suffix = f" {self.lives.groups[node.item][node.group - 1].family}"
        return f"{node.kind.value} {self.program.tensors[node.item].name}{suffix}"

    def _add(self, node: Node, costs: Ints, usages: Ints, interval: tuple[int, int]) -> int:
        position = len(self.nodes)
        self.nodes.append(node)
        self.index[node.kind, node.item, node.group] = position
        self.node_costs.append(costs)
        self.node_usages.append(usages)
        self.node_intervals.append(interval)
        return position

    def _edge(self, u: int, v: int, key: Any, build: Callable[[], Ints]) -> None:
        if ("table", key) not in self.cache:
            self.cache["table", key] = len(self.tables)
            self.tables.append(build())
        self.edges.append((u, v, self.cache["table", key]))

    def _legal(self, t: int) -> Layouts:
        """Layouts without pending reductions that the user allows."""
        return self._pinned(t, self._stored(self.program.tensors[t].shape, t in self.either))

    def _stored(self, shape: tuple[int, ...], orders: bool) -> Layouts:
        """Layouts without pending reductions; of conservative rules only those with equal shards."""
        found = self.costs.layouts(shape, (), orders)
        return tuple(layout for layout in found if is_even(layout, shape, self.mesh_shape)) if self.even else found

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

    def _bytes(self, t: int, layouts: Layouts, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Ints:
        """Of the fullest shard of a tensor, or of one of another dtype or shape."""
        tensor = self.program.tensors[t]
        shape, dtype = shape or tensor.shape, dtype or tensor.dtype
        key = ("bytes", shape, dtype, layouts)
        if key not in self.cache:
            self.cache[key] = self.costs.local_bytes(shape, dtype, layouts)
        found: Ints = self.cache[key]
        return found

    def _source(self, t: int) -> None:
        layouts = self._legal(t)
        if self.restriction is not None:
            layouts = self._restricted(t, layouts, self.restriction.source)
        costs = np.zeros(len(layouts), dtype=np.int64)
        self._add(Node(kind=Kind.SOURCE, item=t, layouts=layouts), costs, self._bytes(t, layouts), self.lives.base[t])

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
        v = self._add(Node(kind=Kind.STATE, item=p, layouts=layouts), times, usages, (0, self.lives.end))
        if each := self.state.step_bytes(tensor.dtype):
            node = Node(kind=Kind.STEP, item=p, layouts=layouts)
            w = self._add(node, np.zeros_like(usages), elements * each, (self.lives.end - 1, self.lives.end))
            self._edge(v, w, ("equal", layouts, layouts), lambda: equal_table(layouts, layouts))
        parameter = self.index[Kind.SOURCE, p, 0]
        target = self.nodes[parameter].layouts
        key = ("state", tensor.shape, tensor.dtype, layouts, target, self._scope(p, UPDATE), self._bucket(p, UPDATE))
        self._edge(v, parameter, key, lambda: self._moves(p, UPDATE, layouts, target))

    def _strategies(self, i: int) -> OpStrategies:
        op = self.program.ops[i]
        tensors = [self.program.tensors[t] for t in (*op.operands, *op.results)]
        pending = tuple(self.pending.get(t, frozenset()) for t in op.operands)
        key = ("strategies", id(self.rules[i]), tuple((t.shape, t.dtype) for t in tensors), pending)
        if key not in self.cache:
            n = len(op.operands)
            self.cache[key] = op_strategies(self.rules[i], tensors[:n], tensors[n:], self.mesh_shape, pending, self.costs.mesh.inner)
        found: OpStrategies = self.cache[key]
        for j, t in enumerate(op.results):
            self.pending[t] = frozenset(s.results[j].reduction for s in found.single if s.results[j].is_partial)
        return found

    def _op(self, i: int, column: OpStrategies) -> None:
        op = self.program.ops[i]
        fused = tuple(t in self.fused for t in (*op.operands, *op.results))
        key = ("op cost", id(column), op.name, fused)
        if key not in self.cache:
            self.cache[key] = repeated(op_nanoseconds(self.program, i, column, self.costs, self.fused), self.microbatches)
        times: Ints = self.cache[key]
        v = self._add(Node(kind=Kind.OP, item=i), times, np.zeros_like(times), (i, i))
        for j, t in enumerate(op.results):
            result = column.results[j]
            final = any(g.purpose in (OPTIMIZER, OUTPUT) for g in self.lives.groups.get(t, ()))  # pins hold for what is stored or returned
            layouts = result.layouts if final else self._pinned(t, result.layouts)
            held = self._bytes(t, layouts) if i not in self.lives.views else np.zeros(len(layouts), dtype=np.int64)
            r = self._add(Node(kind=Kind.RESULT, item=t, layouts=layouts), np.zeros(len(layouts), dtype=np.int64), held, self.lives.base[t])
            self._edge(v, r, ("result", id(column), j, layouts), lambda result=result, layouts=layouts: result_table(result, layouts))  # type: ignore[misc]

    def _read(self, i: int) -> list[tuple[int, int]]:
        """Index and tensor of the operands whose bytes an op reads."""
        return [(j, t) for j, t in enumerate(self.program.ops[i].operands) if self.rules[i].needs(j)]

    def _group_of(self, t: int, i: int, j: int) -> int:
        return next(k for k, g in enumerate(self.lives.groups[t]) if (i, j) in g.readers)

    def _reshard(self, t: int, k: int) -> None:
        if (Kind.RESHARD, t, k) in self.index:
            return
        group = self.lives.groups[t][k]
        if group.purpose == OPTIMIZER and (self.accumulates or self._reduced_dtype(t) != self.program.tensors[t].dtype):
            lower_gradient(self, t, k)
            return
        producer = self._hold(t) if group.late else self._producer(t)
        held = self.nodes[producer].layouts
        need = self._needed(t, group)
        alias = self._common(need, held)
        tensor = self.program.tensors[t]
        scope = (self._scope(t, group.purpose), self._bucket(t, group.purpose), t in self.fused, t in self.either)
        key = (tensor.shape, tensor.dtype, held, need, self._discounted(t, group.purpose), bool(group.readers), scope)
        usages = self._bytes(t, alias + need).copy()
        usages[: 0 if group.final and not group.kept else len(alias)] = 0
        node = Node(kind=Kind.RESHARD, item=t, group=k, layouts=alias + need, aliases=len(alias))
        v = self._add(node, np.zeros(len(usages), dtype=np.int64), usages, (group.start, group.stop))
        self._edge(producer, v, ("transition", key), lambda: self._transition_table(t, group, held, alias, need))
        if group.purpose == OPTIMIZER:
            self._handed_over(t, v)

    def _common(self, need: Layouts, held: Layouts) -> Layouts:
        """Those of the one that are among the other."""
        key = ("common", need, held)
        if key not in self.cache:
            kept = set(held)
            self.cache[key] = tuple(layout for layout in need if layout in kept)
        found: Layouts = self.cache[key]
        return found

    def _handed_over(self, t: int, v: int) -> None:
        """The update reads its slice of the reduced gradient; without an optimizer, it is stored like the parameter."""
        given = self.nodes[v].layouts
        for p in self._parameters(t):
            sliced = (Kind.STATE, p, 0) in self.index
            target = self.index[Kind.STATE if sliced else Kind.SOURCE, p, 0]
            layouts, build = self.nodes[target].layouts, free_table if sliced else equal_table
            self._edge(v, target, (sliced, given, layouts), lambda b=build, y=layouts: b(given, y))  # type: ignore[misc]

    def _written_back(self, t: int, v: int) -> None:
        """The new value of a buffer is written where the buffer lies, without communication."""
        given = self.nodes[v].layouts
        for s in self.program.written(t):
            source = self.index[Kind.SOURCE, s, 0]
            layouts = self.nodes[source].layouts
            self._edge(v, source, (True, given, layouts), lambda y=layouts: free_table(given, y))  # type: ignore[misc]

    def _reduced_dtype(self, t: int) -> str:
        return self.state.gradient_dtype(self.program.tensors[t].dtype)

    def _producer(self, t: int) -> int:
        return self.index[Kind.RESULT if t in self.made else Kind.SOURCE, t, 0]

    def _hold(self, t: int) -> int:
        """The hold node of a tensor, made with its keep nodes when the first late group asks for it."""
        if (Kind.HOLD, t, 0) in self.index:
            return self.index[Kind.HOLD, t, 0]
        producer, until = self._producer(t), self.lives.until(t)
        held = self.nodes[producer].layouts
        early = [k for k, g in enumerate(self.lives.groups[t]) if g.purpose == FORWARD]
        copying = self.restriction is None or self.restriction.keeps_copies(t)
        copies = {k: self._copies(t, k) if copying else () for k in early}
        layouts, origins = held, (-1,) * len(held)
        for k in early:
            layouts, origins = layouts + copies[k], origins + (k,) * len(copies[k])
        zeros = np.zeros(len(layouts), dtype=np.int64)
        v = self._add(Node(kind=Kind.HOLD, item=t, layouts=layouts, origins=origins), zeros, zeros, (0, 0))
        self._edge(producer, v, ("hold", held, layouts, origins), lambda: hold_table(held, 0, -1, layouts, origins))
        for k in early:
            w = self.index[Kind.RESHARD, t, k]
            given, aliases = self.nodes[w].layouts, self.nodes[w].aliases
            key = ("hold", given, aliases, k, layouts, origins)
            self._edge(w, v, key, lambda g=given, a=aliases, k=k: hold_table(g, a, k, layouts, origins))  # type: ignore[misc]
        owners = [(k, copies[k], self.lives.groups[t][k].stop) for k in early]
        if t in self.made and t not in self.sharing:
            owners.append((-1, held, self.lives.base[t][1]))
        ends = until + self.lives.groups[t][-1].final  # a final group's transition may be all that it is kept for
        for k, kept, start in owners:
            if kept and start < ends:
                usages = np.concatenate([[0], self._bytes(t, kept)])
                w = self._add(
                    Node(kind=Kind.KEEP, item=t, group=k + 1, layouts=(Layout(), *kept)), np.zeros_like(usages), usages, (start, until)
                )
                self._edge(v, w, ("keep", kept, k, layouts, origins), lambda y=kept, k=k: keep_table(layouts, origins, k, y))  # type: ignore[misc]
        return v

    def _copies(self, t: int, k: int) -> Layouts:
        node = self.nodes[self.index[Kind.RESHARD, t, k]]
        return node.layouts[node.aliases :]

    def _parameters(self, gradient: int) -> tuple[int, ...]:
        return tuple(p for p, g in self.program.gradients.items() if g == gradient)

    def _needed(self, t: int, group: Group) -> Layouts:
        """Every layout that some reader of the group asks for, in a fixed order."""
        if group.purpose == OPTIMIZER:
            shared = self._legal(t)
            for p in self._parameters(t) if self.state.optimizer == "none" else ():
                held = set(self.nodes[self.index[Kind.SOURCE, p, 0]].layouts)
                shared = tuple(layout for layout in shared if layout in held)
            if not shared:
                names = " and ".join(repr(self.program.tensors[x].name) for x in (t, *self._parameters(t)))
                raise InputError(
                    f"the pins on {names} leave them no common layout; a gradient is stored like its parameter; pin one of them"
                )
            return shared
        if group.purpose == OUTPUT:
            return self._legal(t)
        columns = [self._strategies(i).operands[j].layouts for i, j in group.readers]
        key = ("need", tuple(columns))
        if key not in self.cache:
            self.cache[key] = tuple(sorted({layout for column in columns for layout in column}, reverse=True))
        found: Layouts = self.cache[key]
        return found

    def _discounted(self, t: int, purpose: str) -> bool:
        """Parameter gathers and gradient reductions can run beside compute; the overlap option discounts them."""
        return self.program.tensors[t].role is Role.PARAMETER or purpose in (ACCUMULATE, OPTIMIZER)

    def _bucket(self, t: int, purpose: str) -> int:
        """How many tensors share the launches of this one's transitions."""
        return self.buckets.get((t, purpose), 1)

    def _scope(self, t: int, purpose: str) -> Hashable:
        return None if self.restriction is None else self.restriction.scope(t, purpose)

    def _transition_table(self, t: int, group: Group, held: Layouts, alias: Layouts, need: Layouts) -> Ints:
        table = self._moves(t, group.purpose, held, need)
        if t in self.fused:
            spill = spill_nanoseconds(self.program.tensors[t].dtype, self._bytes(t, held)[:, None], self._bytes(t, need), self.costs)
            table = np.where(table >= FORBIDDEN, FORBIDDEN, table + spill)
        table = table if group.purpose == OPTIMIZER else repeated(table, self.microbatches)
        # A slice is a copy, too: it takes no time, has bytes of its own, and lets the whole tensor go. A copy in the layout that is
        # held already would be a clone, which no plan has: the alias has the same bytes, from where the producer's own end.
        same = equal_table(held, need) == 0
        return np.concatenate([equal_table(held, alias), np.where(same, FORBIDDEN, table)], axis=1)

    def _moves(self, t: int, purpose: str, held: Layouts, need: Layouts) -> Ints:
        """Cost of every transition of a tensor, after the overlap discount where it applies."""
        tensor = self.program.tensors[t]
        reductions = tuple(sorted({p.reduction for layout in (*held, *need) for p in layout if p.is_partial}))
        dtype = self._reduced_dtype(t) if purpose in (ACCUMULATE, OPTIMIZER) else tensor.dtype
        moves = self.costs.transitions(tensor.shape, dtype, reductions, self._bucket(t, purpose), t in self.either)
        table = moves.costs_between(held, need)
        if self.restriction is not None:
            table = np.where(self.restriction.moves(self.restriction.scope(t, purpose), held, need), table, FORBIDDEN)
        if not self._discounted(t, purpose):
            return table
        return np.where(table >= FORBIDDEN, FORBIDDEN, exposed(np.where(table >= FORBIDDEN, 0, table), self.costs.overlap))

    def _read_edges(self, strategies: Sequence[OpStrategies]) -> None:
        for i in range(len(self.program.ops)):
            for j, t in self._read(i):
                v = self.index[Kind.RESHARD, t, self._group_of(t, i, j)]
                given, column = self.nodes[v].layouts, strategies[i].operands[j]
                exact = i in self.places
                key = ("read", given, id(column), exact)
                self._edge(v, self.index[Kind.OP, i, 0], key, lambda g=given, c=column, e=exact: read_table(g, c, e))  # type: ignore[misc]


# The part of lowering that brings gradients to the update where they are accumulated, converted or clipped.
#
# Nodes and prices are those of :mod:`solver_shard.graph.lowering`. Gradients that go to the update as they are made, one microbatch
# in their own dtype, are not handled here: theirs is a plain reshard with purpose "optimizer".


def lower_gradient(low: _Lowerer, t: int, k: int) -> None:
    """The optimizer reshard of a gradient, group ``k`` of tensor ``t``, with the accumulator that it starts from if there is one."""
    group, dtype = low.lives.groups[t][k], low._reduced_dtype(t)
    need = low._needed(t, group)
    if low.accumulates:
        producer, start, inside = _accumulator(low, t, group), low.lives.end - 1, len(need)
    else:
        producer, start, inside = low._producer(t), group.start, 0
    held = low.nodes[producer].layouts
    usages = np.concatenate([np.zeros(inside, dtype=np.int64), low._bytes(t, need, dtype)])
    node = Node(kind=Kind.RESHARD, item=t, group=k, layouts=need[:inside] + need, aliases=inside)
    v = low._add(node, np.zeros_like(usages), usages, (start, low.lives.end))
    key = _key(low, t, OPTIMIZER, held, need)
    if low.accumulates:
        low._edge(producer, v, ("reduce", key), lambda: in_place_table(held, need, low._moves(t, OPTIMIZER, held, need)))
    else:
        low._edge(producer, v, ("convert", key), lambda: _converting(low, t, OPTIMIZER, held, need))
    low._handed_over(t, v)


def lower_clipping(low: _Lowerer) -> None:
    """Over which axes the gradient norm is summed: at least those that cut any state."""
    groups = norm_axes(low.mesh_shape)
    times = np.array([low.costs.collective_ns("all_reduce", axes, NORM_BYTES) for axes in groups], dtype=np.int64)
    v = low._add(Node(kind=Kind.CLIP, item=-1, axes=groups), times, np.zeros_like(times), (0, 0))
    for p in low.program.gradients:
        state = low.index[Kind.STATE, p, 0]
        layouts = low.nodes[state].layouts
        low._edge(v, state, ("norm", layouts), lambda y=layouts: norm_table(groups, y))  # type: ignore[misc]


def _accumulator(low: _Lowerer, t: int, group: Group) -> int:
    """The node of a gradient's accumulator, and that of its way there from each microbatch."""
    tensor, dtype, producer = low.program.tensors[t], low._reduced_dtype(t), low._producer(t)
    need = accumulator_layouts(tensor.shape, low.mesh_shape, low.pending.get(t, frozenset()), low.costs.mesh.wholes)
    if low.restriction is not None:
        need = low._restricted(t, need, low.restriction.accumulator)
    held = low.nodes[producer].layouts
    alias = tuple(layout for layout in need if layout in set(held))
    layouts = alias + need
    own, kept = low._bytes(t, layouts), low._bytes(t, layouts, dtype)
    times = repeated(addition_ns(len(alias), own, kept, tensor.dtype, low.costs), low.microbatches)
    usages = np.concatenate([np.zeros(len(alias), dtype=np.int64), kept[len(alias) :]])
    v = low._add(Node(kind=Kind.ACCUMULATE, item=t, layouts=layouts, aliases=len(alias)), times, usages, (group.start, group.stop))
    key = _key(low, t, ACCUMULATE, held, need)
    low._edge(producer, v, ("arrive", key), lambda: arrival_table(held, alias, need, _arrivals(low, t, held, need)))
    node = Node(kind=Kind.ACCUMULATOR, item=t, layouts=need)
    w = low._add(node, np.zeros(len(need), dtype=np.int64), low._bytes(t, need, dtype), (0, low.lives.end))
    low._edge(v, w, ("equal", layouts, need), lambda: equal_table(layouts, need))
    return w


def _arrivals(low: _Lowerer, t: int, held: Layouts, need: Layouts) -> Ints:
    return repeated(_converting(low, t, ACCUMULATE, held, need), low.microbatches)


def _converting(low: _Lowerer, t: int, purpose: str, held: Layouts, need: Layouts) -> Ints:
    """Transitions of a gradient in the reduce dtype, with the conversion before them where that is not its own."""
    table, own, dtype = low._moves(t, purpose, held, need), low.program.tensors[t].dtype, low._reduced_dtype(t)
    if dtype == own:
        return table
    times = conversion_ns(low._bytes(t, held), low._bytes(t, held, dtype), own, low.costs)
    return np.where(table >= FORBIDDEN, FORBIDDEN, table + times[:, None])


def _key(low: _Lowerer, t: int, purpose: str, held: Layouts, need: Layouts) -> object:
    tensor = low.program.tensors[t]
    return (tensor.shape, tensor.dtype, held, need, low._scope(t, purpose), low._bucket(t, purpose))


# What becomes of gradients until the optimizer steps: summed over microbatches, reduced in a dtype of their own, clipped to a norm.
#
# A step of N microbatches runs the program N times and then the update once. Where N > 1 every trained parameter's gradient has two
# nodes more. ACCUMULATE is its way from where it is made into the accumulator, taken N times: as it is (an alias: the addition reads
# the producer's bytes), or resharded first (a copy: the bytes that arrive live until they are added). ACCUMULATOR, tied to it,
# owns the accumulator's bytes for the whole step. The gradient's optimizer reshard then starts from the accumulator, once. So an
# accumulator may be
#
# - unreduced, ``P(sum)``, and reduced once: DDP's ``no_sync`` (Li et al., "PyTorch Distributed", VLDB 13(12), 2020, section 3.2.4),
#   ZeRO-1;
# - cut, each microbatch's gradient reduce-scattered into it: ZeRO-2 and 3 (Rajbhandari et al., "ZeRO", SC 2020), FSDP2;
# - cut inside a node and unreduced across nodes: FSDP2's ``set_requires_all_reduce`` for hybrid sharding.
#
# **Memory traffic.** The addition reads what arrives and the accumulator, and writes the accumulator, N times (the first one too: it
# is added to zeros). A conversion to the reduce dtype before a collective reads the gradient and writes the buffer that is
# communicated, as FSDP2's copy into its reduce-scatter input does; into an accumulator of the gradient's own layout the addition
# converts on the way. (A kernel that adds weight gradients up as it makes them, Megatron-LM's ``gradient_accumulation_fusion``, pays
# less; it is not modelled.) That a loss is a mean over N microbatches is a factor of 1/N in the loss, and free.
#
# **In place.** What a reduction leaves lies inside the accumulator's bytes wherever a device could cut it from the whole of what it
# accumulates: NCCL's all_reduce and reduce_scatter work in place.
#
# **Clipping** needs the norm of all gradients. Each device sums the squares of the slices that its optimizer states read, one
# all-reduce of one f32 sums over the axes that cut any state (CLIP chooses them), and each slice is scaled:
# ``torch.nn.utils.clip_grad_norm_`` in the sharded form that torchtitan and FSDP2 run.

LINEAR = ("avg", "sum")
"""Pending reductions that may wait until after the addition."""

NORM_BYTES = 4
"""Of the norm that all devices of a group sum up: one f32."""


def accumulator_layouts(
    shape: Sequence[int], mesh_shape: Sequence[int], pending: Collection[str], wholes: Sequence[str] | None = None
) -> Layouts:
    """What an accumulator may be laid out as, where the gradient can be made with these reductions ``pending``.

    ``wholes``: as of ``legal_layouts``, where several axes may cut one dim in either order.
    """
    return legal_layouts(shape, mesh_shape, tuple(reduction for reduction in LINEAR if reduction in pending), wholes)


def addition_ns(aliases: int, own: Ints, held: Ints, dtype: str, costs: CostModel) -> Ints:
    """Time of adding once, per strategy of ACCUMULATE: the first ``aliases`` read the gradient as made, the others as it arrives.

    Args:
        own, held: bytes per device of the strategy's layout in the gradient's dtype, and in the accumulator's.
    """
    arriving = np.where(np.arange(len(own)) < aliases, own, held)
    return costs.compute_ns(0, arriving + 2 * held, dtype)


def conversion_ns(own: Ints, held: Ints, dtype: str, costs: CostModel) -> Ints:
    """Time of bringing a gradient into the reduce dtype: it is read in its own (bytes ``own``), and written."""
    return costs.compute_ns(0, own + held, dtype)


def in_place_table(held: Layouts, need: Layouts, moves: Ints) -> Ints:
    """The way from an accumulator to the update: in its own bytes where they hold the result, else to a copy.

    ``moves`` has the transitions' costs, (held, need); the table's columns are ``need`` twice.
    """
    whole = tuple(Layout(R if p.is_partial else p for p in layout) for layout in held)
    inside = free_moves(whole, need)
    return np.concatenate([np.where(inside, moves, FORBIDDEN), np.where(inside, FORBIDDEN, moves)], axis=1)


def arrival_table(held: Layouts, alias: Layouts, need: Layouts, moves: Ints) -> Ints:
    """The way of a gradient to its accumulator: as it is, or to a copy where that has another layout."""
    same = equal_table(held, need) == 0
    return np.concatenate([equal_table(held, alias), np.where(same, FORBIDDEN, moves)], axis=1)


def norm_axes(mesh_shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Every set of axes over which a norm may be summed, smallest first; axes of one device are in none."""
    live = [a for a, size in enumerate(mesh_shape) if size > 1]
    return tuple(itertools.chain.from_iterable(itertools.combinations(live, k) for k in range(len(live) + 1)))


def norm_table(groups: Sequence[tuple[int, ...]], states: Layouts) -> Ints:
    """A norm that is summed over some axes may leave out none that cuts a state."""
    cut = [{a for a, placement in enumerate(layout) if placement.is_shard} for layout in states]
    return np.array([[0 if axes <= set(group) else FORBIDDEN for axes in cut] for group in groups], dtype=np.int64)


# Tensors that lie in one storage: what a view and the tensor that it views keep together is there once.
#
# A view has no bytes of its own while it is read: it prolongs the life of what it views. What is *held* of it, from forward to backward
# readers, is the whole storage it lies in, and other tensors of that storage may be held too: attention's output and the same
# output with its heads merged; queries, keys and values, split off one product. So the held tensors of one storage are a family:
#
#     c_attn ──split──► q ──► held until its attention's backward      a family of three: the storage of c_attn is there until
#               ├─────► k ──► held                                     the last of them that is held as produced is not needed
#               └─────► v ──► held as the copy that attention gathered
#
# What is expanded has the bytes of what it repeats.
#
# A member is held *in the storage* if it is held as produced, nothing on the way from the owner to it was copied or sliced (then its bytes
# are its part of the owner's), and *alone* otherwise. A chain of nodes, one per member, the longest held first, owns the storage's
# bytes: each is needed from the end of the next shorter one to its own, if its member or a longer one lies in the storage. What is
# held in the storage of a source costs nothing more.


class Builder(Protocol):
    """What this module needs of the lowering."""

    program: Program
    lives: Lives
    nodes: list[Node]
    index: dict[tuple[Kind, int, int], int]

    def _add(self, node: Node, costs: Ints, usages: Ints, interval: tuple[int, int]) -> int: ...
    def _edge(self, u: int, v: int, key: Any, build: Callable[[], Ints]) -> None: ...
    def _bytes(self, t: int, layouts: Layouts, *, shape: tuple[int, ...] | None = None) -> Ints: ...
    def _producer(self, t: int) -> int: ...


def add_storage(graph: Builder, storage: Storage) -> None:
    """The keep nodes of a storage's members and the chain that owns its bytes."""
    owner = graph._producer(storage.owner)
    layouts = graph.nodes[owner].layouts
    sizes = graph._bytes(storage.owner, layouts)
    classes = np.unique(sizes)
    before: int | None = None
    for k, member in enumerate(storage.members):
        keep = _keep(graph, storage, member, owner, sizes)
        if not storage.made:
            continue
        usages = np.concatenate([[0], classes, classes])
        low = max([storage.start, *(m.until for m in storage.members[k + 1 : k + 2])])
        node = Node(kind=Kind.STORAGE, item=member.tensor, layouts=(Layout(),) * len(usages))
        v = graph._add(node, np.zeros_like(usages), usages, (min(low, member.until), member.until))
        columns = graph.nodes[keep].layouts
        alone = len(columns) - graph.nodes[keep].aliases
        whole = _whole(graph, storage, member, columns[alone:])
        key = (alone, tuple(whole.tolist()), tuple(classes.tolist()), k > 0)
        graph._edge(keep, v, ("storage", key), lambda a=alone, w=whole, k=k: _need_table(a, w, classes, k > 0))  # type: ignore[misc]
        if before is not None:
            graph._edge(before, v, ("longer", len(classes)), lambda: _longer_table(len(classes)))
        before = v


def _keep(graph: Builder, storage: Storage, member: Member, owner: int, sizes: Ints) -> int:
    """What a member keeps: strategy 0 nothing, then alone, for each reason, and last in the storage."""
    t, hold = member.tensor, graph.index[Kind.HOLD, member.tensor, 0]
    held = tuple(x for x, origin in zip(graph.nodes[hold].layouts, graph.nodes[hold].origins, strict=True) if origin < 0)
    reasons, n = len(member.path) + 1, len(held)
    if not member.path:
        reasons = 0
    nbytes, zeros = graph._bytes(t, held, shape=graph.lives.expanded.get(t)), np.zeros(n, dtype=np.int64)
    usages = np.concatenate([[0], *[nbytes] * reasons, zeros])
    node = Node(kind=Kind.KEEP, item=t, layouts=(Layout(), *held * (reasons + 1)), aliases=n)
    start, until = graph.lives.base[t][1], graph.lives.until(t)
    v = graph._add(node, np.zeros_like(usages), usages, (min(start, until), until))
    key = (graph.nodes[hold].layouts, graph.nodes[hold].origins, reasons)
    graph._edge(hold, v, ("keep alone", key), lambda: _held_table(graph.nodes[hold].origins, n, reasons))
    for k, (x, group) in enumerate(member.path):
        w = graph.index[Kind.RESHARD, x, group]
        aliases, size = graph.nodes[w].aliases, len(graph.nodes[w].layouts)
        graph._edge(w, v, ("copied", aliases, size, k, reasons, n), lambda a=aliases, s=size, k=k: _copied_table(a, s, k, reasons, n))  # type: ignore[misc]
    if member.path:
        whole = _whole(graph, storage, member, held)
        key = (tuple(sizes.tolist()), tuple(whole.tolist()), reasons)
        graph._edge(owner, v, ("sliced", key), lambda: _sliced_table(sizes, whole, reasons))
    return v


def _whole(graph: Builder, storage: Storage, member: Member, held: Layouts) -> Ints:
    """Bytes of the storage in which a member of this layout is its part, or -1 where that is no whole number."""
    part, whole = graph.program.tensors[member.tensor].numel, graph.program.tensors[storage.owner].numel
    common = math.gcd(part, whole)
    scaled = graph._bytes(member.tensor, held) * (whole // max(common, 1))  # bytes times elements would not fit 64 bits
    return np.where(scaled % (part // common) == 0, scaled // (part // common), -1) if part else np.zeros_like(scaled)


def _held_table(origins: tuple[int, ...], n: int, reasons: int) -> Ints:
    """What is held, against what is kept: nothing of a copy, the layout that is held otherwise."""
    table = np.full((len(origins), 1 + n * (reasons + 1)), FORBIDDEN, dtype=np.int64)
    position = 0
    for row, origin in enumerate(origins):
        if origin >= 0:
            table[row, 0] = 0
        else:
            table[row, 1 + position :: n] = 0
            position += 1
    return table


def _copied_table(aliases: int, size: int, k: int, reasons: int, n: int) -> Ints:
    """Read ``k`` on the way, against reasons: an earlier one was a copy, this one, a later one, or (the last two) none was."""
    table = np.zeros((size, 1 + n * (reasons + 1)), dtype=np.int64)
    for reason in range(k, reasons + 1):
        columns = slice(1 + n * reason, 1 + n * (reason + 1))
        table[: aliases if reason == k else 0, columns] = FORBIDDEN
        table[aliases if reason > k else size :, columns] = FORBIDDEN
    return table


def _sliced_table(sizes: Ints, whole: Ints, reasons: int) -> Ints:
    """The owner's bytes, against reasons: in the storage is what has its part of them, the last reason is that it has not."""
    n = len(whole)
    table = np.zeros((len(sizes), 1 + n * (reasons + 1)), dtype=np.int64)
    part = sizes[:, None] == whole
    table[:, 1 + n * (reasons - 1) : 1 + n * reasons] = np.where(part, FORBIDDEN, 0)
    table[:, 1 + n * reasons :] = np.where(part, 0, FORBIDDEN)
    return table


def _need_table(alone: int, whole: Ints, classes: Ints, shorter: bool) -> Ints:
    """A member against its link of the chain: needed for it, with these bytes; else nothing, or needed for a longer one."""
    c = len(classes)
    table = np.full((alone + len(whole), 1 + 2 * c), FORBIDDEN, dtype=np.int64)
    table[:alone, 0] = 0
    table[:alone, 1 + c :] = 0 if shorter else FORBIDDEN
    table[alone:, 1 : 1 + c] = np.where(whole[:, None] == classes, 0, FORBIDDEN)
    return table


def _longer_table(c: int) -> Ints:
    """A link against the next shorter one: what is needed longer is there before, and what is not must be needed for itself."""
    table = np.full((1 + 2 * c, 1 + 2 * c), FORBIDDEN, dtype=np.int64)
    table[0, : 1 + c] = 0
    for size in range(c):
        for row in (1 + size, 1 + c + size):
            table[row, [1 + size, 1 + c + size]] = 0
    return table


# What readers of a tensor as it is keep of it beyond its own life: once, however many groups of readers there are.
#
# A tensor's own bytes end when the last of its groups of readers has begun (see ``graph/liveness.py``). A group that reads it
# as an alias goes on until its own last reader, and the bytes are there until then. Several such groups read the same bytes:
#
#     x ──own bytes──► 6                    the last group has begun
#       products (alias) ─────► 9           [6, 9) are bytes of the products' tail
#       sums     (alias) ──────────► 12     [9, 12) are bytes of the sums'
#       slices   (copy) ───► 7              has bytes of its own
#
# So the tails of one tensor are a chain, the longest first: each has the bytes from the end of the next shorter one to its own, if its
# group reads the tensor as it is or a longer one does. After a hold the same is true of what is held. Where that is a stored tensor, as it
# is stored, the bytes are there anyway.
#
# A final group has the bytes itself, unless they may be kept for another reason: then its tail has them where they are not.


def add_tails(low: _Lowerer, t: int) -> None:
    """The tails of a tensor whose reshards are all there: those that start from what its producer made, and from what is held."""
    for late in (False, True):
        stop = low.lives.base[t][1] if not late else low.lives.held.get(t, 0)
        groups = [(g, k) for k, g in enumerate(low.lives.groups[t]) if g.late == late and g.stop > stop and not g.final]
        groups = [(g, k) for g, k in groups if _aliases(low, t, k)]
        _add_chain(low, t, sorted(groups, key=lambda pair: longest_first(pair[0])), stop)


def add_kept(low: _Lowerer, t: int) -> None:
    """The tails of a held tensor's final groups: without bytes where what they read as it is stays as held, or in a storage."""
    for k, group in enumerate(low.lives.groups[t]):
        alias = _aliases(low, t, k) if group.kept else ()
        if not alias:
            continue
        other = low.index[Kind.KEEP if group.late else Kind.HOLD, t, 0]
        node, reshard = low.nodes[other], low.index[Kind.RESHARD, t, k]
        size = len(node.layouts)
        stays = np.arange(size) >= size - node.aliases if group.late else np.array(node.origins) < 0
        usages = np.concatenate([[0, 0], low._bytes(t, alias)])
        aliases, copies = len(alias), len(low.nodes[reshard].layouts) - len(alias)
        tail = Node(kind=Kind.TAIL, item=t, group=k, layouts=(Layout(), Layout(), *alias), aliases=aliases)
        v = low._add(tail, np.zeros_like(usages), usages, (group.start, group.stop))
        low._edge(other, v, ("stays", stays.tobytes(), aliases), lambda s=stays, n=aliases: stays_table(s, n))  # type: ignore[misc]
        low._edge(reshard, v, ("kept", aliases, copies), lambda n=aliases, c=copies: kept_table(n, c))  # type: ignore[misc]


def longest_first(group: Group) -> tuple[int, int, str, str]:
    """By what the groups of a chain are sorted: as evaluators of plans do, whose groups have names and no numbers."""
    return -group.stop, group.start, group.purpose, group.family


def _aliases(low: _Lowerer, t: int, k: int) -> Layouts:
    """The layouts in which a group may read a tensor as it is; none of a gradient that its accumulator or reduce dtype takes away."""
    v = low.index[Kind.RESHARD, t, k]
    node = low.nodes[v]
    return node.layouts[: node.aliases] if low.node_intervals[v][1] == low.lives.groups[t][k].stop else ()


def _add_chain(low: _Lowerer, t: int, groups: list[tuple[Group, int]], base_stop: int) -> None:
    longer: Layouts = ()
    before: int | None = None
    for j, (group, k) in enumerate(groups):
        start = groups[j + 1][0].stop if j + 1 < len(groups) else base_stop
        reshard, alias = low.index[Kind.RESHARD, t, k], _aliases(low, t, k)
        stored = group.late and t not in low.made  # kept as it is, it stays anyway: one more strategy, without bytes
        bytes_of = (*alias, *longer)
        usages = np.concatenate([[0], low._bytes(t, bytes_of), [0] * stored]).astype(np.int64)
        node = Node(kind=Kind.TAIL, item=t, group=k, layouts=(Layout(), *bytes_of, *(Layout(),) * stored), aliases=len(alias))
        v = low._add(node, np.zeros_like(usages), usages, (start, group.stop))
        sizes = (len(alias), len(low.nodes[reshard].layouts) - len(alias), len(longer), stored)
        low._edge(reshard, v, ("tail", sizes), lambda s=sizes: tail_table(*s))  # type: ignore[misc]
        if stored:
            held = low.index[Kind.HOLD, t, 0]
            given, origins = low.nodes[held].layouts, low.nodes[held].origins
            low._edge(held, v, ("stored", given, origins, bytes_of), lambda g=given, o=origins, x=bytes_of: stored_table(g, o, x))  # type: ignore[misc]
        if before is not None:
            above, below = low.nodes[before], low.nodes[v]
            key = ("chain", above.layouts, below.layouts, len(alias), stored)
            low._edge(before, v, key, lambda a=above, b=below, s=stored: _chain_table(a, b, s))  # type: ignore[misc]
        longer = tuple(dict.fromkeys(bytes_of))
        before = v


def _chain_table(above: Node, below: Node, stored: bool) -> Ints:
    """A tail against the next shorter one: bytes that are there longer are there before."""
    table = np.full((len(above.layouts), len(below.layouts)), FORBIDDEN, dtype=np.int64)
    own, end = 1 + below.aliases, len(below.layouts) - stored
    table[0, :own] = 0  # nothing above: what is there is for the group itself
    for row in range(1, len(above.layouts) - stored):
        table[row, [x for x in range(1, end) if below.layouts[x] == above.layouts[row]]] = 0
    if stored:
        table[0, -1] = 0
        table[-1, [0, -1]] = 0
    return table
