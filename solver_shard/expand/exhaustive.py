"""The full product over the mesh axes: every way to run an op, with the cheapest way to bring its inputs there.

S single-axis strategies on N axes make S^N combinations. What cannot be executed is left out: a dim shorter than its number of
shards, reductions that do not commute on one tensor, a result of an in-place op (or one written to ``out=``) that would not have
the layout of the tensor it is written to. This is what DTensor does when an op runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from solver_shard.errors import InputError
from solver_shard.expand.call import Kinds, show
from solver_shard.expand.pricing import Move, Pricing
from solver_shard.expand.single_axis import Prepared

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

    inputs: tuple[Kinds, ...]
    results: tuple[Kinds | None, ...]
    costs: tuple[float, ...]
    moves: tuple[Move, ...]
    visited: int
    product: int
    how: str
    unit: str

    @property
    def cost(self) -> float:
        """Of all moves."""
        return sum(self.costs)


def combinations(prepared: Prepared) -> Iterator[tuple[tuple[Kinds, ...], tuple[Kinds | None, ...]]]:
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
    seen: set[tuple[tuple[Kinds, ...], tuple[Kinds | None, ...]]] = set()
    fits: dict[tuple[int, Kinds], bool] = {}
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


def writable(prepared: Prepared, inputs: tuple[Kinds, ...], results: tuple[Kinds | None, ...]) -> bool:
    """Whether results that are written to tensors that exist have the layouts of these, and these do not move."""
    call = prepared.call
    if call.in_place and (inputs[0] != call.operands[0].layout or (results and results[0] not in (None, call.operands[0].layout))):
        return False
    return all(results[k] == call.operands[out].layout == inputs[out] for k, out in enumerate(call.outs) if k < len(results))


def expand_exhaustively(prepared: Prepared, pricing: Pricing) -> tuple[Expansion, ...]:
    """Every way to run the op whose inputs can be brought there, cheapest first.

    Among equal costs, one that moves no input comes first, then the order of the product (DTensor's choice).

    Raises:
        InputError: there is none.
    """
    call = prepared.call
    product = len(prepared.strategies) ** len(call.element_mesh.axes)
    paths: dict[tuple[int, Kinds], tuple[Move, ...] | None] = {}
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
