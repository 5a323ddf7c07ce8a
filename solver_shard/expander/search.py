"""The cheapest way to run an op on the mesh, by search over the layouts of its inputs, or by the full product.

A state is the layouts of all inputs; the search starts from those they have and ends at the first state that a single-axis
strategy fits on every axis. A move changes one input along one axis by one collective:

    R → S(d)   slice, free            S(d) → R      all-gather        P → R      all-reduce
    R → P      free                   S(d) → S(e)   all-to-all        P → S(d)   reduce-scatter

An axis may cut or join dim d only if no axis to its right cuts d, since layouts cut from left to right. Shards and partials are
those that the op's strategies mention for the input. A move is also refused where the input could not have gone from its
original placement on that axis to the new one (S → R → P: nothing makes a shard partial).

States are taken in the order of what they cost plus what they still need at least: the sum over the axes of the cheapest way to a
strategy that fits the axis, were its moves made on the smallest buffers that there can be. That is never too much, so the first
state that fits is the cheapest; it leads the search to it. Of equal sums, the state with fewer axes left comes first, then the one
that was found first, so that the result is the same every time. Costs of the inputs add up and each depends on the layouts of its own
input alone, so the moves of an input are priced once per layout that it comes to, not once per state.

The states of an op that reads many tensors on many axes are too many to hold (nine of three dims on three axes have 4^27 of them), while
its strategies stay few. So the search gives up once it holds ``MAX_STATES``, as if it had found nothing: the caller then expands the
full product, which has S^N combinations whatever the number of inputs.

The algorithm is that of torch 2.13, ``_dijkstra_expand_single_dim_strategy_to_mesh``, which DTensor does not call and which bounds
neither what is left nor what it holds: E. W. Dijkstra, "A note on two problems in connexion with graphs" (1959); P. E. Hart,
N. J. Nilsson, B. Raphael, "A formal basis for the heuristic determination of minimum cost paths" (1968).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from solver_shard.errors import InputError
from solver_shard.expander.pricing import MovePricing, OperandMove, impossible
from solver_shard.expander.single_axis import Prepared
from solver_shard.layout import Placement, Placements, R, show

State = tuple[int, ...]
"""Per input, the number of its layout."""

MAX_STATES = 50_000
"""States held, looked at or waiting: about 50 MB, and a second. The 2,000 calls of experiments/expand.py hold at most
7,173 each."""


def searchable(prepared: Prepared) -> bool:
    """Whether the search covers the call: no strided shards, unknown sizes, lists of tensors, keyword tensors or second meshes."""
    call = prepared.call
    return not (
        call.lists
        or call.keywords
        or call.outs
        or prepared.elsewhere
        or not call.operands
        or any(kind.is_strided for layout in call.layouts for kind in layout)
        or any(size is None for operand in call.operands for size in operand.shape)
    )


def search(
    prepared: Prepared, pricing: MovePricing, matches: set[tuple[Placements, ...]] | None = None, *, most: int = MAX_STATES
) -> Expansion | None:
    """The cheapest way to run the op; None when no state that can be reached fits, or none of the first ``most`` states did.

    ``matches``: for tests, collects every state that fits; the whole graph of moves is then explored.
    """
    operands = prepared.call.operands
    product = len(prepared.strategies) ** len(prepared.call.element_mesh.axes)
    given = prepared.call.layouts
    results = _results(prepared, given)
    if results is not None and matches is None:
        return Expansion(
            inputs=given,
            results=results,
            costs=(0.0,) * len(operands),
            moves=(),
            visited=1,
            product=product,
            how="match",
            unit=pricing.unit,
        )
    inputs = [_Input(prepared, pricing, i) for i in range(len(operands))]
    bound = _Bound(prepared, pricing, inputs)
    count = len(given[0])
    start: State = (0,) * len(operands)
    rests = tuple(bound.rest(axis, column) for axis, column in enumerate(zip(*given, strict=True)))
    heap: list[_Entry] = [(_total(rests), _unmatched(rests), 0, start, (0.0,) * len(operands), rests)]
    best: dict[State, float] = {start: 0.0}
    came: dict[State, State] = {}
    done: set[State] = set()
    counter = itertools.count(1)
    first: Expansion | None = None
    while heap and len(best) <= most:
        _, _, _, state, costs, rests = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        layouts = tuple(held.layouts[number] for held, number in zip(inputs, state, strict=True))
        if not _unmatched(rests) and (results := _results(prepared, layouts)) is not None:
            if first is None:
                first = Expansion(
                    inputs=layouts,
                    results=results,
                    costs=costs,
                    moves=_moves(inputs, came, state, pricing),
                    visited=len(done),
                    product=product,
                    how="search",
                    unit=pricing.unit,
                )
            if matches is None:
                return first
            matches.add(layouts)
        edges = [held.edges(number) for held, number in zip(inputs, state, strict=True)]
        for axis in range(count):
            column = tuple(layout[axis] for layout in layouts)
            for i, held in enumerate(edges):
                for number, step, kind in held[axis]:
                    after = (*state[:i], number, *state[i + 1 :])
                    if after in done:
                        continue
                    then = (*costs[:i], costs[i] + step, *costs[i + 1 :])
                    total = sum(then)
                    # a later arrival at the same cost would only be dropped when its turn comes
                    if total >= best.get(after, math.inf):
                        continue
                    rest = bound.rest(axis, (*column[:i], kind, *column[i + 1 :]))
                    if rest[0] == math.inf:
                        continue
                    best[after] = total
                    came[after] = state
                    left = (*rests[:axis], rest, *rests[axis + 1 :])
                    heapq.heappush(heap, (total + _total(left), _unmatched(left), next(counter), after, then, left))
    return first


Rest = tuple[float, int]
"""What an axis still needs at least, and 1 where no strategy fits it yet."""
_Entry = tuple[float, int, int, State, tuple[float, ...], tuple[Rest, ...]]


def _total(rests: tuple[Rest, ...]) -> float:
    return sum(cost for cost, _ in rests)


def _unmatched(rests: tuple[Rest, ...]) -> int:
    return sum(open_ for _, open_ in rests)


class _Bound:
    """What the placements on one axis still need at least, were that axis alone: never more than what they will cost."""

    def __init__(self, prepared: Prepared, pricing: MovePricing, inputs: list[_Input]) -> None:
        self._prepared, self._pricing, self._inputs = prepared, pricing, inputs
        self._goals = tuple(prepared.lookup)
        self._rests: dict[tuple[int, Placements], Rest] = {}
        self._least: dict[tuple[int, int, Placement, Placement], float] = {}

    def rest(self, axis: int, column: Placements) -> Rest:
        """Of one axis, given the placement of every input on it."""
        found = self._rests.get((axis, column))
        if found is None:
            if column in self._prepared.lookup:
                found = 0.0, 0
            else:
                found = (
                    min(
                        sum(self.least(i, axis, now, goal) for i, (now, goal) in enumerate(zip(column, key, strict=True)))
                        for key in self._goals
                    ),
                    1,
                )
            self._rests[axis, column] = found
        return found

    def least(self, number: int, axis: int, now: Placement, goal: Placement) -> float:
        """What an input needs at least to get from one placement to another on an axis, in any number of moves."""
        if now == goal or now.is_replicate:
            return 0.0
        found = self._least.get((number, axis, now, goal))
        if found is None:
            operand = self._prepared.call.operands[number]
            found = math.inf
            if not impossible(operand.layout[axis], goal):
                found = self._pricing.least(operand, axis, now, R)  # and from there for free
                if goal.is_shard:
                    found = min(found, self._pricing.least(operand, axis, now, goal))
            self._least[number, axis, now, goal] = found
        return found


def _results(prepared: Prepared, layouts: tuple[Placements, ...]) -> tuple[Placements | None, ...] | None:
    found = prepared.results(layouts)
    return found if found is not None and writable(prepared, layouts, found) else None


def _moves(inputs: list[_Input], came: dict[State, State], state: State, pricing: MovePricing) -> tuple[OperandMove, ...]:
    found: list[OperandMove] = []
    while state in came:
        before = came[state]
        i = next(i for i, (a, b) in enumerate(zip(before, state, strict=True)) if a != b)
        found.append(inputs[i].move(before[i], state[i], pricing))
        state = before
    return tuple(reversed(found))


@dataclass(slots=True)
class _Input:
    """The layouts that one input comes to, numbered as they are found, and its moves from each."""

    prepared: Prepared
    pricing: MovePricing
    number: int
    layouts: list[Placements]
    _numbers: dict[Placements, int]
    _edges: dict[int, list[list[tuple[int, float, Placement]]]]

    def __init__(self, prepared: Prepared, pricing: MovePricing, number: int) -> None:
        self.prepared, self.pricing, self.number = prepared, pricing, number
        self.layouts = [prepared.call.operands[number].layout]
        self._numbers = {self.layouts[0]: 0}
        self._edges = {}

    def edges(self, number: int) -> list[list[tuple[int, float, Placement]]]:
        """Per axis, the layouts that a move on it leads to, with its cost and what the axis becomes."""
        found = self._edges.get(number)
        if found is None:
            found = self._edges[number] = [self._on(number, axis) for axis in range(len(self.layouts[0]))]
        return found

    def _on(self, number: int, axis: int) -> list[tuple[int, float, Placement]]:
        operand, layout = self.prepared.call.operands[self.number], self.layouts[number]
        found = []
        for kind in neighbours(layout, axis, self.prepared.shardings[self.number], self.prepared.partials[self.number]):
            if impossible(operand.layout[axis], kind):
                continue
            cost = self.pricing.cost(operand, layout, axis, kind)
            if math.isinf(cost):
                continue
            after = (*layout[:axis], kind, *layout[axis + 1 :])
            if after not in self._numbers:
                self._numbers[after] = len(self.layouts)
                self.layouts.append(after)
            found.append((self._numbers[after], cost, kind))
        return found

    def move(self, before: int, after: int, pricing: MovePricing) -> OperandMove:
        src, dst = self.layouts[before], self.layouts[after]
        axis = next(a for a, (p, q) in enumerate(zip(src, dst, strict=True)) if p != q)
        return pricing.move(self.number, self.prepared.call.operands[self.number], src, axis, dst[axis])


def neighbours(layout: Placements, axis: int, shardings: tuple[Placement, ...], partials: tuple[Placement, ...]) -> list[Placement]:
    """What one collective can make of the placement on an axis."""
    now = layout[axis]
    held = {kind.dim for kind in layout[axis + 1 :] if kind.is_shard}
    cuts = [kind for kind in shardings if kind.dim not in held]
    if now.is_replicate:
        return [*cuts, *partials]
    if now.is_shard and now.dim in held:
        return []
    return [R, *(kind for kind in cuts if kind != now)]


MAX_COMBINATIONS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """A way to run an op on the whole mesh.

    Attributes:
        inputs: layout of every input while the op runs.
        results: layout of every result; None where it is masked off.
        costs: per input, the sum of its moves, in ``unit``.
        moves: in the order in which they were found; those of one input are in order of execution.
        visited: states that a search looked at, or combinations of the full product.
        product: S^N.
        how: ``match`` (the inputs are fine as they are), ``search`` or ``exhaustive``.
    """

    inputs: tuple[Placements, ...]
    results: tuple[Placements | None, ...]
    costs: tuple[float, ...]
    moves: tuple[OperandMove, ...]
    visited: int
    product: int
    how: str
    unit: str

    @property
    def cost(self) -> float:
        """Of all moves."""
        return sum(self.costs)


def combinations(prepared: Prepared) -> Iterator[tuple[tuple[Placements, ...], tuple[Placements | None, ...]]]:
    """Layouts of inputs and results of every executable combination, each pair of them once, in the order of the product.

    Raises:
        InputError: the product is larger than ``MAX_COMBINATIONS``.
    """
    call, axes = prepared.call, len(prepared.call.element_mesh.axes)
    size = len(prepared.strategies) ** axes
    if size > MAX_COMBINATIONS:
        raise InputError(
            f"{call.op}: {len(prepared.strategies)} strategies on {axes} axes make {size} combinations, at most {MAX_COMBINATIONS} are "
            "expanded; use fewer mesh axes"
        )
    seen: set[tuple[tuple[Placements, ...], tuple[Placements | None, ...]]] = set()
    fits: dict[tuple[int, Placements], bool] = {}
    for chosen in itertools.product(range(len(prepared.strategies)), repeat=axes):
        results = prepared.made(chosen)
        if results is None:
            continue
        inputs = tuple(
            operand.layout if i in prepared.elsewhere else tuple(prepared.inputs[c][i] for c in chosen)
            for i, operand in enumerate(call.operands)
        )
        for key in enumerate(inputs):
            if key not in fits:
                fits[key] = prepared.fits(*key)
        if (inputs, results) in seen or not all(fits[key] for key in enumerate(inputs)) or not writable(prepared, inputs, results):
            continue
        seen.add((inputs, results))
        yield inputs, results


def writable(prepared: Prepared, inputs: tuple[Placements, ...], results: tuple[Placements | None, ...]) -> bool:
    """Whether results that are written to tensors that exist have the layouts of these, and these do not move."""
    call = prepared.call
    if call.in_place and (inputs[0] != call.operands[0].layout or (results and results[0] not in (None, call.operands[0].layout))):
        return False
    return all(results[k] == call.operands[out].layout == inputs[out] for k, out in enumerate(call.outs) if k < len(results))


def expand_exhaustively(prepared: Prepared, pricing: MovePricing) -> tuple[Expansion, ...]:
    """Every way to run the op whose inputs can be brought there, cheapest first.

    The full product over the mesh axes: every way to run an op, with the cheapest way to bring its inputs there.

    S single-axis strategies on N axes make S^N combinations. What cannot be executed is left out: a dim shorter than its number of
    shards, reductions that do not commute on one tensor, a result of an in-place op (or one written to ``out=``) that would not have
    the layout of the tensor it is written to. This is what DTensor does when an op runs.

    Among equal costs, one that moves no input comes first, then the order of the product (DTensor's choice).

    Raises:
        InputError: there is none.
    """
    call = prepared.call
    product = len(prepared.strategies) ** len(call.element_mesh.axes)
    paths: dict[tuple[int, Placements], tuple[OperandMove, ...] | None] = {}
    found: list[Expansion] = []
    for inputs, results in combinations(prepared):
        for i, layout in enumerate(inputs):
            if (i, layout) not in paths:
                paths[i, layout] = pricing.path(i, call.operands[i], call.operands[i].layout, layout)
        here = [paths[key] for key in enumerate(inputs)]
        moves = [path for path in here if path is not None]
        if len(moves) < len(here):
            continue
        found.append(
            Expansion(
                inputs=inputs,
                results=results,
                costs=tuple(sum((move.cost for move in path), 0.0) for path in moves),
                moves=tuple(itertools.chain.from_iterable(moves)),
                visited=product,
                product=product,
                how="exhaustive",
                unit=pricing.unit,
            )
        )
    if not found:
        given = ", ".join(map(show, call.layouts))
        if call.in_place or call.outs:
            raise InputError(
                f"{call.op}: no strategy keeps the layout of the tensor that it writes to, and that tensor cannot move; its inputs are "
                f"{given}; use the op that returns a new tensor, or redistribute the tensor before"
            )
        raise InputError(f"{call.op}: no strategy can be reached from inputs {given}; redistribute them to R first")
    return tuple(sorted(found, key=lambda e: (e.cost, bool(e.moves))))
