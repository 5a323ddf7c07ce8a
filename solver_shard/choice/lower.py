"""Lower a Program to a choice graph: every placement decision becomes a node, every price a number.

Nodes: a source (parameter, buffer, input) chooses its layout; an op chooses a strategy; each of its results is a node
tied to it; each group of readers of a tensor has a reshard node that chooses a layout and whether it is an *alias* of
the producer's (no cost, no bytes) or a *copy* (the transition's cost, its own bytes). Edges from producer to reshard
carry transition costs, edges from reshard to reader allow equality and moves that need no communication. Where an alias
outlives its producer's own interval, a tail node carries those bytes. All memory is node usage.

Tables are cached by the layouts they relate, so a deep model has no more distinct tables than a shallow one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints
from solver_shard.choice.groups import OPTIMIZER, OUTPUT, Group, Lives, lives
from solver_shard.choice.strategies import LayoutColumn, OpStrategies, local_bytes, op_strategies
from solver_shard.costs.layouts import free_moves, legal_layouts
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel
from solver_shard.costs.overlap import exposed
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.program import Program, Role
from solver_shard.rulebook.build import Rulebook

Pins = Mapping[int, Callable[[Layout], bool]]
"""Tensor position to a predicate that tells which layouts the user allows."""


Layouts = tuple[Layout, ...]
"""Distinct layouts in a fixed order: the strategies of a node, or the columns of a table."""


class Kind(enum.Enum):
    """What a node of the choice graph decides."""

    SOURCE = "source"
    OP = "op"
    RESULT = "result"
    RESHARD = "reshard"
    TAIL = "tail"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One node: ``item`` is the op position for OP, the tensor position otherwise; ``group`` counts the tensor's groups.

    ``layouts`` has the layout of every strategy (not for OP). A RESHARD's first ``aliases`` strategies are aliases.
    """

    kind: Kind
    item: int
    group: int = 0
    layouts: Layouts = ()
    aliases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowering:
    """A choice graph and what its nodes mean."""

    program: Program
    graph: ChoiceGraph
    nodes: tuple[Node, ...]
    index: Mapping[tuple[Kind, int, int], int]
    strategies: tuple[OpStrategies, ...]
    lives: Lives


def lower(
    program: Program,
    rulebook: Rulebook,
    costs: CostModel,
    *,
    optimizer_state: OptimizerState,
    pins: Pins | None = None,
    limit: int | None = None,
) -> Lowering:
    """Build the choice graph of a program on the cost model's mesh.

    Args:
        rulebook: gives the rule of each op.
        costs: prices compute and transitions; holds the mesh and the overlap discount.
        optimizer_state: what the optimizer keeps and moves per element of a trained parameter.
        pins: layouts that the user allows, by tensor position.
        limit: bytes that may be live on one device at any time.

    Raises:
        InputError: a pin leaves a tensor without a layout.
    """
    return _Lowerer(program, rulebook, costs, optimizer_state, pins or {}).run(limit)


class _Lowerer:
    def __init__(self, program: Program, rulebook: Rulebook, costs: CostModel, state: OptimizerState, pins: Pins) -> None:
        self.program, self.costs, self.state, self.pins = program, costs, state, pins
        self.mesh_shape = costs.mesh.shape
        self.rules = tuple(rulebook.rule(program, i) for i in range(len(program.ops)))
        self.lives = lives(program, self.rules)
        self.made = {t for op in program.ops for t in op.results}
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
        strategies = [self._strategies(i) for i in range(len(self.program.ops))]
        for i, op in enumerate(self.program.ops):
            for j, t in enumerate(op.operands):
                self._reshard(t, self._group_of(t, i, j))
            self._op(i, strategies[i])
        for t in self.program.gradients.values():
            self._reshard(t, next(k for k, g in enumerate(self.lives.groups[t]) if g.purpose == OPTIMIZER))
        for t in dict.fromkeys(self.program.outputs):
            self._reshard(t, next(k for k, g in enumerate(self.lives.groups[t]) if g.purpose == OUTPUT))
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
        )

    def _name(self, node: Node) -> str:
        if node.kind is Kind.OP:
            return f"op {node.item} {self.program.ops[node.item].name}"
        suffix = f" {self.lives.groups[node.item][node.group].family}" if node.kind in (Kind.RESHARD, Kind.TAIL) else ""
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
        found = legal_layouts(self.program.tensors[t].shape, self.mesh_shape, ())
        return self._pinned(t, found)

    def _pinned(self, t: int, layouts: Layouts) -> Layouts:
        pin = self.pins.get(t)
        kept = tuple(layout for layout in layouts if pin(layout)) if pin else layouts
        if not kept:
            shown = ", ".join(map(str, layouts[:12])) + (", ..." if len(layouts) > 12 else "")
            name = self.program.tensors[t].name
            raise InputError(f"the pins on {name!r} leave it no layout on mesh {self.costs.mesh}; legal ones are {shown}; loosen the pin")
        return kept

    def _bytes(self, t: int, layouts: Layouts) -> Ints:
        tensor = self.program.tensors[t]
        key = ("bytes", tensor.shape, tensor.dtype, layouts)
        if key not in self.cache:
            self.cache[key] = np.array([local_bytes(tensor, layout, self.mesh_shape) for layout in layouts], dtype=np.int64)
        found: Ints = self.cache[key]
        return found

    def _source(self, t: int) -> None:
        tensor = self.program.tensors[t]
        layouts = self._legal(t)
        usages = self._bytes(t, layouts)
        costs = np.zeros(len(layouts), dtype=np.int64)
        if tensor.role is Role.PARAMETER and t in self.program.gradients:
            elements = usages // max(1, tensor.nbytes // max(1, tensor.numel))
            usages = usages + elements * self.state.resident_bytes(tensor.dtype)
            costs = self.costs.compute_ns(np.zeros(len(layouts)), elements * self.state.update_bytes(tensor.dtype), tensor.dtype, False)
        self._add(Node(kind=Kind.SOURCE, item=t, layouts=layouts), costs, usages, self.lives.base[t])

    def _strategies(self, i: int) -> OpStrategies:
        op = self.program.ops[i]
        tensors = [self.program.tensors[t] for t in (*op.operands, *op.results)]
        pending = tuple(self.pending.get(t, frozenset()) for t in op.operands)
        key = ("strategies", id(self.rules[i]), tuple((t.shape, t.dtype) for t in tensors), pending)
        if key not in self.cache:
            n = len(op.operands)
            self.cache[key] = op_strategies(self.rules[i], tensors[:n], tensors[n:], self.mesh_shape, pending)
        found: OpStrategies = self.cache[key]
        for j, t in enumerate(op.results):
            self.pending[t] = frozenset(s.results[j].reduction for s in found.single if s.results[j].is_partial)
        return found

    def _op(self, i: int, column: OpStrategies) -> None:
        op = self.program.ops[i]
        key = ("op cost", id(column), op.name)
        if key not in self.cache:
            self.cache[key] = op_nanoseconds(self.program, i, column, self.costs)
        times: Ints = self.cache[key]
        v = self._add(Node(kind=Kind.OP, item=i), times, np.zeros_like(times), (i, i))
        for j, t in enumerate(op.results):
            result = column.results[j]
            final = any(g.purpose in (OPTIMIZER, OUTPUT) for g in self.lives.groups.get(t, ()))  # pins hold for what is stored or returned
            layouts = result.layouts if final else self._pinned(t, result.layouts)
            held = self._bytes(t, layouts) if not column.rule.view else np.zeros(len(layouts), dtype=np.int64)
            r = self._add(Node(kind=Kind.RESULT, item=t, layouts=layouts), np.zeros(len(layouts), dtype=np.int64), held, self.lives.base[t])
            self._edge(v, r, ("result", id(column), j, layouts), lambda result=result, layouts=layouts: _result_table(result, layouts))  # type: ignore[misc]

    def _group_of(self, t: int, i: int, j: int) -> int:
        return next(k for k, g in enumerate(self.lives.groups[t]) if (i, j) in g.readers)

    def _reshard(self, t: int, k: int) -> None:
        if (Kind.RESHARD, t, k) in self.index:
            return
        tensor, group = self.program.tensors[t], self.lives.groups[t][k]
        producer = self.index[Kind.RESULT if t in self.made else Kind.SOURCE, t, 0]
        held = self.nodes[producer].layouts
        need = self._needed(t, group)
        alias = tuple(layout for layout in need if layout in set(held))
        key = (tensor.shape, tensor.dtype, held, need, self._discounted(t, group), bool(group.readers))
        usages = np.concatenate([np.zeros(len(alias), dtype=np.int64), self._bytes(t, need)])
        node = Node(kind=Kind.RESHARD, item=t, group=k, layouts=alias + need, aliases=len(alias))
        v = self._add(node, np.zeros(len(usages), dtype=np.int64), usages, (group.start, group.stop))
        self._edge(producer, v, ("transition", key), lambda: self._transition_table(t, group, held, alias, need))
        base_stop = self.lives.base[t][1]
        if group.stop > base_stop and alias:
            tail_usages = np.concatenate([[0], self._bytes(t, alias)])
            layouts = (Layout(), *alias)
            w = self._add(
                Node(kind=Kind.TAIL, item=t, group=k, layouts=layouts), np.zeros_like(tail_usages), tail_usages, (base_stop, group.stop)
            )
            self._edge(v, w, ("tail", len(alias), len(need)), lambda: _tail_table(len(alias), len(need)))
        if group.purpose == OPTIMIZER:
            for p in self._parameters(t):
                parameter = self.index[Kind.SOURCE, p, 0]
                target = self.nodes[parameter].layouts
                self._edge(v, parameter, ("equal", node.layouts, target), lambda target=target: _equal_table(node.layouts, target))  # type: ignore[misc]

    def _parameters(self, gradient: int) -> tuple[int, ...]:
        return tuple(p for p, g in self.program.gradients.items() if g == gradient)

    def _needed(self, t: int, group: Group) -> Layouts:
        """Every layout that some reader of the group asks for, in a fixed order."""
        if group.purpose == OPTIMIZER:
            shared = self._legal(t)
            for p in self._parameters(t):
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

    def _discounted(self, t: int, group: Group) -> bool:
        """Parameter gathers and gradient reductions can run beside compute; the overlap option discounts them."""
        return self.program.tensors[t].role is Role.PARAMETER or group.purpose == OPTIMIZER

    def _transition_table(self, t: int, group: Group, held: Layouts, alias: Layouts, need: Layouts) -> Ints:
        tensor = self.program.tensors[t]
        reductions = tuple(sorted({p.reduction for layout in (*held, *need) for p in layout if p.is_partial}))
        table = self.costs.transitions(tensor.shape, tensor.dtype, reductions).costs_between(held, need)
        if self._discounted(t, group):
            table = np.where(table >= FORBIDDEN, FORBIDDEN, exposed(np.where(table >= FORBIDDEN, 0, table), self.costs.overlap))
        same = _equal_table(held, need) == 0
        if group.readers:
            # a copy that needs no communication is the alias read through a free move, so it is left to the alias
            aliased = np.array([layout in set(alias) for layout in held], dtype=bool)
            same |= free_moves(held, need) & aliased[:, None]
        return np.concatenate([_equal_table(held, alias), np.where(same, FORBIDDEN, table)], axis=1)

    def _read_edges(self, strategies: Sequence[OpStrategies]) -> None:
        for i, op in enumerate(self.program.ops):
            for j, t in enumerate(op.operands):
                v = self.index[Kind.RESHARD, t, self._group_of(t, i, j)]
                given, column = self.nodes[v].layouts, strategies[i].operands[j]
                self._edge(v, self.index[Kind.OP, i, 0], ("read", given, id(column)), lambda g=given, c=column: _read_table(g, c))  # type: ignore[misc]


def op_nanoseconds(program: Program, i: int, column: OpStrategies, costs: CostModel) -> Ints:
    """Roofline time of an op under each of its strategies; views take none."""
    rule = column.rule
    if rule.view:
        return np.zeros(len(column.work), dtype=np.int64)
    nbytes = np.zeros(len(column.work), dtype=np.int64)
    for j, operand in enumerate(column.operands):
        if not rule.reads or rule.reads[j]:
            nbytes += operand.nbytes[operand.chosen]
    for result in column.results:
        nbytes += result.nbytes[result.chosen]
    return costs.compute_ns(rule.flops * column.work, nbytes, compute_dtype(program, i), rule.matmul)


def compute_dtype(program: Program, i: int) -> str:
    """Dtype an op computes in: its first floating-point operand's, else its first result's."""
    op = program.ops[i]
    dtypes = [program.tensors[t].dtype for t in (*op.operands, *op.results)]
    return next((d for d in dtypes if d[0] in "fb" and d != "bool"), dtypes[0])


def _equal_table(rows: Sequence[Layout], columns: Sequence[Layout]) -> Ints:
    position = {layout: k for k, layout in enumerate(columns)}
    table = np.full((len(rows), len(columns)), FORBIDDEN, dtype=np.int64)
    for r, layout in enumerate(rows):
        if layout in position:
            table[r, position[layout]] = 0
    return table


def _result_table(result: LayoutColumn, kept: Layouts) -> Ints:
    return _equal_table(result.layouts, kept)[result.chosen]


def _tail_table(alias: int, copies: int) -> Ints:
    table = np.full((alias + copies, 1 + alias), FORBIDDEN, dtype=np.int64)
    table[np.arange(alias), 1 + np.arange(alias)] = 0
    table[alias:, 0] = 0
    return table


def _read_table(given: Layouts, asked: LayoutColumn) -> Ints:
    table = np.where(free_moves(given, asked.layouts), 0, FORBIDDEN)
    return table[:, asked.chosen].astype(np.int64)
