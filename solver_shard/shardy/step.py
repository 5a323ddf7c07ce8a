"""One step on one op: from the shardings of its operands and results to those that change; and what the passes change.

A step is a pure function of shardings, so a ``Stepper`` remembers what it has computed: repeated layers and repeated sweeps ask
for the same steps over and over. It keeps shardings by number (equal shardings have one number), 0 for none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from solver_shard.shardy.data_flow import EdgeFlow, axis_order, edge_flows, with_manual, without_manual
from solver_shard.shardy.graph import Block, Direction, Function, GraphOp, OpKind, PropagationGraph, ShardingRule, Traits
from solver_shard.shardy.projection import Setting, Strategy, aggressive, basic, project, unproject
from solver_shard.shardy.sharding import DimSharding, MeshSpec, TensorSharding

StrategyName = Literal["basic", "aggressive"]
Changes = tuple[tuple[int, int], ...]
"""Positions of tensors (operands first, then results) with the numbers of their new shardings, in order."""

NO_SHARDING = 0
_STRATEGIES: Mapping[StrategyName, Strategy] = {"basic": basic, "aggressive": aggressive}


class Stepper:
    """Steps, and the numbers of shardings, for the modules whose mesh symbols are given."""

    def __init__(self, meshes: Mapping[str, MeshSpec]) -> None:
        self._meshes = meshes
        self._shardings: list[TensorSharding | None] = [None]
        self._numbers: dict[TensorSharding | None, int] = {None: NO_SHARDING}
        self._steps: dict[tuple[object, ...], Changes] = {}
        self._rules: dict[ShardingRule, int] = {}

    def number(self, sharding: TensorSharding | None) -> int:
        """The number of a sharding; equal ones have the same."""
        found = self._numbers.get(sharding)
        if found is None:
            found = self._numbers[sharding] = len(self._shardings)
            self._shardings.append(sharding)
        return found

    def sharding(self, number: int) -> TensorSharding | None:
        """The sharding with this number."""
        return self._shardings[number]

    def rule(self, rule: ShardingRule) -> int:
        """A number for a rule, to be given to ``step``."""
        return self._rules.setdefault(rule, len(self._rules))

    def mesh(self, symbol: str | MeshSpec) -> MeshSpec:
        """What a sharding's mesh stands for."""
        return self._meshes[symbol] if isinstance(symbol, str) else symbol

    def step(
        self,
        rule: ShardingRule,
        rule_number: int,
        shardings: tuple[int, ...],
        *,
        directions: tuple[Direction, ...],
        strategy: StrategyName,
        elementwise: bool = False,
        conservative: bool = False,
    ) -> Changes:
        """What one step changes; ``shardings`` are those of the operands, then of the results, by number."""
        if not any(shardings):
            return ()
        key = (rule_number, shardings, directions, strategy, elementwise, conservative)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._compute(rule, shardings, directions, strategy, elementwise, conservative)
        return found

    def _compute(
        self,
        rule: ShardingRule,
        numbers: tuple[int, ...],
        directions: tuple[Direction, ...],
        strategy: StrategyName,
        elementwise: bool,
        conservative: bool,
    ) -> Changes:
        shardings = [self._shardings[n] for n in numbers]
        symbol = self.common_mesh(shardings)
        if symbol is None:
            return ()
        mesh = self.mesh(symbol)
        if mesh.is_maximal:
            return ()
        dims = (*rule.operands, *rule.results)
        tensors = [project(sharding, held, rule.sizes) for sharding, held in zip(shardings, dims, strict=True)]
        setting = Setting(
            sizes=rule.sizes,
            operands=len(rule.operands),
            directions=directions,
            mesh=mesh,
            elementwise=elementwise,
            conservative=conservative,
        )
        changes = []
        for position in sorted(_STRATEGIES[strategy](tensors, setting)):
            new = unproject(tensors[position], dims[position], rule.sizes, symbol)
            old = shardings[position]
            if new != old if old is not None else _has_axes(new):
                changes.append((position, self.number(new)))
        return tuple(changes)

    def common_mesh(self, shardings: Sequence[TensorSharding | None]) -> str | MeshSpec | None:
        """The mesh symbol that all shardings can be bound to; None if there are none, or two meshes differ."""
        found: str | MeshSpec | None = None
        for sharding in shardings:
            if sharding is None:
                continue
            if found is None:
                found = sharding.mesh
                continue
            known, other = self.mesh(found), self.mesh(sharding.mesh)
            if known.is_empty and not other.is_empty:
                found = sharding.mesh
            elif not known.is_empty and not other.is_empty and known != other:
                return None
        return found


def _has_axes(sharding: TensorSharding) -> bool:
    return bool(sharding.replicated or sharding.unreduced or any(dim.axes for dim in sharding.dims))


NO_SLOT = -1
NO_OP = -1


class PropagationState:
    """Shardings, uses and liveness of one graph while passes run over it.

    What the passes change: the sharding of every place that can hold one, and which ops are still there.

    A place ("slot") is a function argument, an op's result, an entry of ``in_shardings``, or a function's result. A value reads and
    writes one slot: its own, or that of the edge it is a target of, or of the region op it belongs to. Slots hold shardings by number
    (see ``step.Stepper``).

    Attributes:
        graph: as given to the pass, sharding groups resolved.
        main: the position of the function whose results take part; the others are swept, but their results are not touched.
        rules: per op its rule, or None.
        in_slots: per computation the slots of its in_shardings, which hold them as its body sees them, without manual axes.
        slots: per value the slot that it reads and writes, or NO_SLOT.
        result_slots: per function, the slots of its results.
        numbers: per slot the number of its sharding.
        value_of: the block argument that an entry of in_shardings belongs to; every other slot of a value has that value's number.
        users: per value the (op, operand position) that use it, in the order in which they were created.
        maker: per value the op that defines it, or for a block argument the op that holds the block; NO_OP for function arguments.
        flows: per edge op, what it connects.
        edge_of_use: the edge that an operand of an op is a source of.
        groups: per value the values that it shares a sharding group with, itself included.
        calls: the call ops of every function, by name.
    """

    def __init__(
        self, graph: PropagationGraph, main: int, rules: Sequence[ShardingRule | None], constrained: Mapping[int, Sequence[int]]
    ) -> None:
        self.graph = graph
        self.main = main
        self.rules = list(rules)
        self.stepper = Stepper(graph.meshes)
        self.order = graph.walk()
        self.erased = [True] * len(graph.ops)
        for op in self.order:
            self.erased[op] = False
        self._earliest_first = frozenset(value for members in constrained.values() for value in members)
        self._parents()
        self._uses()
        self.flows: dict[int, EdgeFlow] = edge_flows(graph, self.maker)
        self.edge_of_use = {use: edge for edge, flow in self.flows.items() for use in flow.uses}
        self._place()
        self.groups = _groups(graph, self.order, constrained)
        self.rule_numbers = [self.stepper.rule(rule) if rule else 0 for rule in self.rules]

    def _parents(self) -> None:
        """Which op or function holds every op, and defines every value."""
        graph = self.graph
        self.parent = [NO_OP] * len(graph.ops)
        self.function = [0] * len(graph.ops)
        self.maker = [NO_OP] * len(graph.values)
        self.calls: dict[str, list[int]] = {}
        for position, function in enumerate(graph.functions):
            for held in function.body.ops:
                self.function[held] = position
        for i in self.order:
            op = graph.ops[i]
            for value in op.results:
                self.maker[value] = i
            for block in op.regions:
                for value in block.arguments:
                    self.maker[value] = i
                for inner in block.ops:
                    self.parent[inner] = i
                    self.function[inner] = self.function[i]
            if op.kind is OpKind.CALL and op.callee is not None:
                self.calls.setdefault(op.callee, []).append(i)

    def _uses(self) -> None:
        self.users: list[list[tuple[int, int]]] = [[] for _ in self.graph.values]
        for function in self.graph.functions:
            self._uses_in(function.body)

    def _uses_in(self, block: Block) -> None:
        for i in block.ops:
            op = self.graph.ops[i]
            for inner in op.regions:  # an op is created after what it holds
                self._uses_in(inner)
            for index, value in enumerate(op.operands):
                self.users[value].append((i, index))

    def _place(self) -> None:
        """Give every value its slot, and every slot its sharding."""
        graph = self.graph
        number = self.stepper.number
        self.slots = list(range(len(graph.values)))
        self.numbers = [number(value.sharding) for value in graph.values]
        self.ranks = [len(value.shape or ()) for value in graph.values]
        self.siblings: dict[int, tuple[int, ...]] = {}
        self.in_slots: dict[int, tuple[int, ...]] = {}
        self.value_of: dict[int, int] = {}
        for i in self.order:
            op = graph.ops[i]
            if len(op.results) > 1:
                self.siblings.update(dict.fromkeys(op.results, op.results))
            for block in op.regions:
                for value in block.arguments:
                    self.slots[value] = NO_SLOT
            if op.kind is OpKind.WHILE:
                for block in op.regions:
                    for value, result in zip(block.arguments, op.results, strict=True):
                        self.slots[value] = result
            elif op.kind in (OpKind.MANUAL, OpKind.NAMED):
                held: Sequence[TensorSharding | None] = op.in_shardings or (None,) * len(op.operands)
                held = [without_manual(sharding, op.manual_axes) if sharding else None for sharding in held]
                arguments = op.regions[0].arguments
                made = self._new_slots(held, [self.ranks[v] for v in arguments])
                self.in_slots[i] = made
                self.siblings.update(dict.fromkeys(made, made))
                for value, slot in zip(arguments, made, strict=True):
                    self.slots[value] = slot
                    self.value_of[slot] = value
        for edge, flow in self.flows.items():
            for value in flow.targets:
                self.slots[value] = graph.ops[edge].results[0]
        self.result_slots: list[tuple[int, ...]] = []
        for function in graph.functions:
            returned = graph.ops[function.body.ops[-1]].operands if function.body.ops else ()
            given = function.result_shardings or (None,) * len(returned)
            self.result_slots.append(self._new_slots(given, [self.ranks[v] for v in returned]))

    def _new_slots(self, shardings: Sequence[TensorSharding | None], ranks: Sequence[int]) -> tuple[int, ...]:
        first = len(self.numbers)
        self.numbers.extend(self.stepper.number(sharding) for sharding in shardings)
        self.ranks.extend(ranks)
        return tuple(range(first, len(self.numbers)))

    def get(self, value: int) -> int:
        """The number of a value's sharding."""
        slot = self.slots[value]
        return NO_SHARDING if slot == NO_SLOT else self.numbers[slot]

    def put(self, slot: int, number: int) -> None:
        """Set a slot; the first sharding of an op's results gives the other results open ones."""
        if slot == NO_SLOT:
            return
        if self.numbers[slot] == NO_SHARDING and slot in self.siblings:
            sharding = self.stepper.sharding(number)
            assert sharding is not None, "only slots are ever emptied that never held a sharding"
            for other in self.siblings[slot]:
                if self.numbers[other] == NO_SHARDING:
                    dims = (DimSharding(open=True),) * self.ranks[other]
                    self.numbers[other] = self.stepper.number(TensorSharding(mesh=sharding.mesh, dims=dims))
        self.numbers[slot] = number

    def uses(self, value: int) -> Sequence[tuple[int, int]]:
        """The uses of a value, in the order in which they are to be queued."""
        return self.users[value] if value in self._earliest_first else self.users[value][::-1]

    def is_dead(self, op: int) -> bool:
        """Whether the op may be erased: nothing reads it and it does nothing else."""
        node = self.graph.ops[op]
        return bool(node.traits & Traits.PURE) and all(not self.users[value] for value in node.results)

    def snapshot(self, *, keep_rules: bool) -> PropagationGraph:
        """The graph as it stands; without ``keep_rules`` only custom rules are on ops."""
        graph = self.graph
        values = list(graph.values)
        for i, value in enumerate(values):
            if self.slots[i] == i:
                sharding = self.stepper.sharding(self.numbers[i])
                if sharding is not value.sharding:
                    values[i] = dataclasses.replace(value, sharding=sharding)
        ops = list(graph.ops)
        for i in self.order:
            if self.erased[i]:
                continue
            op, rule = ops[i], self.rules[i]
            if rule is not None and not (keep_rules or rule.custom):
                rule = None
            changes: dict[str, object] = {}
            if rule != op.rule:
                changes["rule"] = rule
            if op.regions:
                changes["regions"] = tuple(self._listed(block) for block in op.regions)
            if i in self.in_slots:
                changes["in_shardings"] = self._in_shardings(op, self.in_slots[i])
            if changes:
                ops[i] = dataclasses.replace(op, **changes)  # type: ignore[arg-type]  # the names above are fields of Op
        functions = tuple(
            Function(name=f.name, body=self._listed(f.body), result_shardings=tuple(map(self._sharding_in, slots)))
            for f, slots in zip(graph.functions, self.result_slots, strict=True)
        )
        return PropagationGraph(values=tuple(values), ops=tuple(ops), functions=functions, meshes=graph.meshes)

    def _sharding_in(self, slot: int) -> TensorSharding | None:
        return self.stepper.sharding(self.numbers[slot])

    def _in_shardings(self, op: GraphOp, slots: Sequence[int]) -> tuple[TensorSharding, ...] | None:
        """The in_shardings of a computation, whose block arguments see them without manual axes."""
        given: Sequence[TensorSharding | None] = op.in_shardings or (None,) * len(slots)
        made: list[TensorSharding] = []
        for outer, inner in zip(given, map(self._sharding_in, slots), strict=True):
            if inner is None:
                return None
            if outer is not None and without_manual(outer, op.manual_axes) == inner:
                made.append(outer)
            else:
                made.append(with_manual(outer or inner, inner, op.manual_axes, axis_order(self.graph, inner)))
        return tuple(made) if made else op.in_shardings

    def _listed(self, block: Block) -> Block:
        return Block(arguments=block.arguments, ops=tuple(op for op in block.ops if not self.erased[op]))


def _groups(graph: PropagationGraph, order: Sequence[int], constrained: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
    members: dict[int, list[int]] = {}
    for i in order:
        op: GraphOp = graph.ops[i]
        if op.kind is OpKind.GROUP and op.group is not None:
            members.setdefault(op.group, []).append(op.operands[0])
    found: dict[int, Sequence[int]] = {**members, **constrained}
    return {value: values for values in found.values() for value in values}
