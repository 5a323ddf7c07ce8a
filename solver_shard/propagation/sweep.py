"""One sweep over a graph: every op is stepped, in an order that is part of the semantics.

A stack of all ops, the first on top. What a step changes puts the ops around the changed values back on the stack, on top, so that a
change is followed at once, the innermost last change first. Another order (a queue, repeated sweeps) reaches another fixed point in
about 2% of dense graphs, so it must not be changed.

A sweep ends because steps only add axes, with one exception: a manual computation gives its sharding group less than it takes itself
(``_update``). Its result and other values of the group may so take an axis from each other for ever; the reference never returns from such
a module. Here a value that comes back to the same sharding ``RETURNS`` times is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from solver_shard.errors import InputError
from solver_shard.propagation.graph import Direction, Kind, Traits
from solver_shard.propagation.rule import ShardingRule, identity_rule
from solver_shard.propagation.state import NO_OP, NO_SLOT, State
from solver_shard.propagation.step import StrategyName

Directions = Callable[[int, ShardingRule], tuple[Direction, ...]]
"""From an op's position and its rule to where each factor's axes may flow."""


RETURNS = 100
"""How often a value may come back to one sharding: those that settle do so once or twice."""


def any_direction(op: int, rule: ShardingRule) -> tuple[Direction, ...]:
    """Both ways along every factor."""
    return (Direction.BOTH,) * len(rule.sizes)


def sweep(state: State, strategy: StrategyName, directions: Directions = any_direction, *, conservative: bool = False) -> None:
    """Settle function results, then all ops, then function results once more."""
    _function_results(state, strategy)
    _Sweep(state, strategy, directions, conservative).run()
    _function_results(state, strategy)


def _function_results(state: State, strategy: StrategyName) -> None:
    """Step between what the main function returns and the shardings of its results."""
    body = state.graph.functions[state.main].body
    if not body.ops:
        return
    for value, slot in zip(state.graph.ops[body.ops[-1]].operands, state.result_slots[state.main], strict=True):
        if state.graph.values[value].shape is None:
            continue
        rule = identity_rule(state.graph.values[value].shape or (), 1)
        shardings = (state.get(value), state.numbers[slot])
        changes = state.stepper.step(
            rule, state.stepper.rule(rule), shardings, directions=(Direction.BOTH,) * len(rule.sizes), strategy=strategy
        )
        own = state.slots[value]
        modified = state.value_of.get(own, own)
        for position, number in changes:
            state.put(own if position == 0 else slot, number)
            for member in state.groups.get(modified, ()) if position == 0 else ():
                if member != modified:
                    state.put(state.slots[member], number)


class _Sweep:
    """The stack and what is put on it."""

    def __init__(self, state: State, strategy: StrategyName, directions: Directions, conservative: bool) -> None:
        self.state = state
        self.strategy: StrategyName = strategy
        self.directions = directions
        self.conservative = conservative
        alive = [op for op in state.order if not state.erased[op]]
        self.stack: list[int] = alive[::-1]
        self.place = {op: i for i, op in enumerate(self.stack)}
        self.current = NO_OP
        self.returns: Counter[tuple[int, int]] = Counter()

    def run(self) -> None:
        stack, place = self.stack, self.place
        while stack:
            op = stack.pop()
            if op == NO_OP:  # taken off since
                continue
            del place[op]
            if self.state.is_dead(op):
                self._erase(op)
            else:
                self.current = op
                self._step(op)

    def _step(self, op: int) -> None:
        state = self.state
        node = state.graph.ops[op]
        if node.kind is Kind.EDGE or node.kind is Kind.FUNC_EDGE:
            self._step_edge(op)
            return
        if node.kind is Kind.BARRIER:
            rule = identity_rule(state.graph.values[node.results[0]].shape or (), 1)
            directions = (node.direction,) * len(rule.sizes)
            number, conservative = state.stepper.rule(rule), False
        else:
            known = state.rules[op]
            if known is None:
                return
            rule, number, conservative = known, state.rule_numbers[op], self.conservative
            directions = self.directions(op, rule)
            if rule.blocked:
                directions = tuple(Direction.NONE if f in rule.blocked else d for f, d in enumerate(directions))
        tensors = (*node.operands, *node.results)
        changes = state.stepper.step(
            rule,
            number,
            tuple(state.get(value) for value in tensors),
            directions=directions,
            strategy=self.strategy,
            elementwise=bool(node.traits & Traits.ELEMENTWISE),
            conservative=conservative,
        )
        for position, changed in changes:
            self._update(state.slots[tensors[position]], changed)

    def _step_edge(self, op: int) -> None:
        state = self.state
        flow, target = state.flows[op], state.graph.ops[op].results[0]
        shape = state.graph.values[target].shape
        if shape is None:
            return
        rule = identity_rule(shape, len(flow.sources))
        stepper = state.stepper
        seen = stepper.number(flow.seen(stepper.sharding(state.numbers[target])))
        changes = stepper.step(
            rule,
            stepper.rule(rule),
            (*(state.get(value) for value in flow.sources), seen),
            directions=self.directions(op, rule),
            strategy=self.strategy,
        )
        for position, changed in changes:
            if position < len(flow.sources):
                self._update(state.slots[flow.sources[position]], changed)
            else:
                sharding = stepper.sharding(changed)
                assert sharding is not None, "a step never takes a sharding away"
                self._update(target, stepper.number(flow.stored(sharding)), alike=changed)

    def _update(self, slot: int, number: int, *, alike: int | None = None) -> None:
        """Store a new sharding, tell the ops around it, and give it to the sharding group.

        ``alike`` is what the group gets where a value keeps another sharding: the members of a manual computation's result get that of its
        body, without the manual axes, as the reference does.
        """
        state = self.state
        if slot == NO_SLOT:
            return
        value = state.value_of.get(slot, slot)
        self._count(value, slot, number)
        state.put(slot, number)
        self._notify(value)
        for member in state.groups.get(value, ()):
            if member != value:
                state.put(state.slots[member], number if alike is None else alike)
                self._notify(member)

    def _count(self, value: int, slot: int, number: int) -> None:
        """InputError where a value came to the same sharding again and again."""
        self.returns[slot, number] += 1
        if self.returns[slot, number] > RETURNS:
            group = next((op.group for op in self.state.graph.ops if op.kind is Kind.GROUP and value in op.operands), None)
            of = "" if group is None else f" of sharding group {group}"
            raise InputError(
                f"propagation never settles: values{of} take an axis from each other again and again, as the result of a manual "
                "computation can, which gives the group its sharding without the manual axes; take it out of the group"
            )

    def _notify(self, value: int) -> None:
        """Queue what reads or makes the value."""
        state = self.state
        maker = state.maker[value]
        if maker in state.flows:
            for target in state.flows[maker].others:
                self._notify_users(target)
        if maker != NO_OP:
            self._push(maker)
        self._notify_users(value)

    def _notify_users(self, value: int) -> None:
        """Queue what reads the value, here or in the functions that it is handed to or returned from; calls may form a circle."""
        seen, open_ = {value}, [self._readers(value)]
        while open_:
            for op, further in open_[-1]:
                if op != NO_OP:
                    self._push(op)
                elif further not in seen:
                    seen.add(further)
                    open_.append(self._readers(further))
                    break
            else:
                open_.pop()

    def _readers(self, value: int) -> Iterator[tuple[int, int]]:
        """Ops to queue, and, with NO_OP, values that are this one in another function."""
        state = self.state
        for op, index in state.uses(value):
            edge = state.edge_of_use.get((op, index))
            kind = state.graph.ops[op].kind
            if edge is not None:
                yield edge, value
            elif kind is Kind.CALL:
                yield NO_OP, self._argument(op, index)
            elif kind is Kind.RETURN:
                parent = state.parent[op]
                if parent != NO_OP:
                    yield parent, value
                else:
                    for call in state.calls.get(state.graph.functions[state.function[op]].name, ()):
                        if not state.erased[call]:
                            yield NO_OP, state.graph.ops[call].results[index]
            else:
                yield op, value

    def _argument(self, call: int, index: int) -> int:
        graph = self.state.graph
        callee = next(f for f in graph.functions if f.name == graph.ops[call].callee)
        return callee.body.arguments[index]

    def _push(self, op: int) -> None:
        if op not in self.place and op != self.current:
            self.place[op] = len(self.stack)
            self.stack.append(op)

    def _erase(self, op: int) -> None:
        """Erase an op and what it holds, last op first, and queue what may now be dead."""
        state = self.state
        node = state.graph.ops[op]
        for block in reversed(node.regions):
            for inner in reversed(block.ops):
                if not state.erased[inner]:
                    self._erase(inner)
        for value in node.operands:
            maker = state.maker[value]
            if maker == NO_OP or value not in state.graph.ops[maker].results:
                continue
            others = {user for user, _ in state.users[value]} - {op}
            if len(others) < 2 and maker not in self.place and not state.erased[maker]:
                self.place[maker] = len(self.stack)
                self.stack.append(maker)
        if op in self.place:
            self.stack[self.place.pop(op)] = NO_OP
        for value in set(node.operands):
            state.users[value] = [use for use in state.users[value] if use[0] != op]
        state.erased[op] = True
