"""Lower a Program to a choice graph: every placement decision becomes a node, every price a number.

Nodes: a source (parameter, buffer, input) chooses its layout; an op chooses a strategy; each of its results is a node
tied to it; each group of readers of a tensor has a reshard node that chooses a layout and whether it is an *alias* of
the producer's (no cost, no bytes) or a *copy* (the transition's cost, its own bytes). Edges from producer to reshard
carry transition costs, edges from reshard to reader allow equality and moves that need no communication. Where an alias
outlives its producer's own interval, tail nodes carry those bytes, once for all aliases (:mod:`solver_shard.choice.tails`); an alias of
a final group has them itself.

A tensor that several groups read has a **relay** behind it, an identity that may bring it to another layout at once for all of them
(:mod:`solver_shard.constraints`): its own groups then start from there. Pinned activations have the same places.

A tensor that is read in the forward pass and again later has a hold node: what is kept of it in between, the producer's
bytes or the copy that a forward group made. Later groups start from there. Keep nodes, tied to the hold, own the bytes.
With a sharded parameter this is the choice between gathering once (ZeRO-2) and gathering again (ZeRO-3). Tensors that are
held in one storage, a tensor and its views, own its bytes together (:mod:`solver_shard.choice.storage`).

The optimizer's state of a trained parameter is a node of its own: the reduced gradient is cut to the state's layout for
free, the update costs time where the state is, and the updated values go from the state's layout to the parameter's. So
ZeRO-1, 2, 3, hybrid sharding and their mixtures are points of the graph. Parameters, their states and their gradients, once
reduced, may be cut by several axes on one dim in either order (``_S(d)``); no op reads or makes such a layout.

A step of several microbatches pays all ops and reshards of forward and backward that many times, and adds gradients up in
accumulators; see ``choice.accumulate``, and there for reduce dtypes and clipping too.

All memory is node usage.

Tables are cached by the layouts they relate, so a deep model has no more distinct tables than a shallow one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from solver_shard.choice.fusion import fused_tensors
from solver_shard.choice.gradients import lower_clipping, lower_gradient
from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints, repeated
from solver_shard.choice.groups import ACCUMULATE, FORWARD, OPTIMIZER, OUTPUT, UPDATE, Group, either_order, lives
from solver_shard.choice.nodes import Kind, Lowering, Node, Pins, Restriction
from solver_shard.choice.prices import op_nanoseconds, spill_nanoseconds
from solver_shard.choice.storage import add_storage
from solver_shard.choice.strategies import OpStrategies, op_strategies
from solver_shard.choice.tables import (
    Layouts,
    equal_table,
    free_table,
    hold_table,
    keep_table,
    read_table,
    result_table,
)
from solver_shard.choice.tails import add_kept, add_tails
from solver_shard.constraints import places
from solver_shard.costs.buckets import bucket_sizes
from solver_shard.costs.layouts import is_even
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel
from solver_shard.costs.overlap import exposed
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.program import DTYPE_BYTES, Program, Role
from solver_shard.rulebook.build import Rulebook


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
        fusion: price pointwise chains as fused, see ``choice.fusion``.
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
