"""The ground truth of an op instance on one mesh axis: which placements of operands and results give the unsharded numbers.

    found = ground_truth(instance, devices=2)
    found.combinations[S(0), R]     # (frozenset({S(0)}),) for a matrix product: the result is then cut in its dim 0

Every combination of operand placements from ``R``, ``S(d)`` and ``P(sum | avg | max | min)`` is run: operands are cut or split
into random parts, the op runs on each device's, and each result is put together again under every placement that its shapes
allow. What gives the unsharded result on all draws is true.

**What is not run, and why nothing is lost.** Average, maximum and minimum of equal parts are that part, so a combination with an
operand pending in one of them can only be true where it is true with that operand replicated; these are searched outward from
true combinations. A pending sum is tried on every set of up to four replicated operands of every cut that the
op runs on at all. Only the
number of cuts is limited, by a budget: those that cut dims of one size come first, since that is how an index is shared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from solver_shard.errors import SolverShardError
from solver_shard.layout import Layout, P, Placement, R, S
from solver_shard.ops.run import SIZED
from solver_shard.program import Op
from solver_shard.rules.check.shards import assemble, close, distribute, tolerance_of

LocalRun = Callable[[Op, Sequence[torch.Tensor], Sequence[Sequence[int]]], Sequence[torch.Tensor]]
CallPlacements = tuple[Placement, ...]
ResultPlacements = tuple[frozenset[Placement], ...]
"""Per result, the placements under which it is the unsharded one."""

BUDGET = 1500
"""Cuts of the operands that are tried per instance and number of devices."""

_LARGEST_SET = 4
_PENDING = (P("avg"), P("max"), P("min"))
FAULTS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, SolverShardError)
"""What an op raises on shards that do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """True combinations of one instance.

    Attributes:
        combinations: operand placements to those of every result, each result on its own.
        tried: combinations that were run.
        cuts, known_cuts: how the operands can be cut in all, and how many of these were tried.
    """

    combinations: Mapping[CallPlacements, ResultPlacements]
    tried: int
    cuts: int
    known_cuts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCall:
    """Operands of one turn and the unsharded results."""

    operands: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]


def ground_truth(
    op: Op,
    draws: Sequence[DrawnCall],
    devices: int,
    run: LocalRun,
    *,
    alike: Sequence[int] = (),
    unread: Sequence[int] = (),
    budget: int = BUDGET,
    seed: int = 0,
) -> Truth:
    """Enumerate what is true of an op on ``devices`` devices.

    Args:
        draws: several sets of operands with their results; a combination has to hold on all.
        run: the op on one device: ``run(op, operands, result_shapes)``; only sized ops look at the shapes.
        alike: results that are not compared.
        unread: operands that give only their shape: these are not tried pending, which changes no shape.
    """
    search = _CombinationSearch(op, draws, devices, run, alike, unread, seed)
    shapes = [tuple(t.shape) for t in draws[0].operands]
    options = [[R, *(S(d) for d, size in enumerate(shape) if filled(size, devices))] for shape in shapes]
    total = 1
    for choice in options:
        total *= len(choice)
    runnable = []
    for cut in itertools.islice(_ordered(options, shapes, total, budget, seed), budget):
        if search.measure(cut):
            runnable.append(cut)
    numeric = [t.dtype != torch.bool and i not in unread for i, t in enumerate(draws[0].operands)]
    for cut in runnable:
        for chosen in _sets([i for i, p in enumerate(cut) if p == R and numeric[i]]):
            search.measure(tuple(P("sum") if i in chosen else p for i, p in enumerate(cut)))
    search.outward()
    return Truth(combinations=search.true, tried=search.tried, cuts=total, known_cuts=min(total, budget))


def holds(
    op: Op, draws: Sequence[DrawnCall], devices: int, run: LocalRun, ins: CallPlacements, *, alike: Sequence[int] = ()
) -> ResultPlacements | None:
    """What is true of one combination of operand placements: per result, its placements; None where some result has none."""
    search = _CombinationSearch(op, draws, devices, run, alike, (), 0)
    search.measure(ins)
    return search.true.get(ins)


def filled(size: int, devices: int) -> bool:
    """Whether torch.chunk gives every device a part."""
    return size >= devices and -(-size // -(-size // devices)) == devices


def _ordered(
    options: Sequence[Sequence[Placement]], shapes: Sequence[tuple[int, ...]], total: int, budget: int, seed: int
) -> Iterator[CallPlacements]:
    """All cuts; where they are more than the budget, those of one size first and then others at random."""
    if total <= budget:
        yield from itertools.product(*options)
        return
    seen = set()
    for size in sorted({size for shape in shapes for size in shape}):
        held = [[p for p in choice if p == R or shape[p] == size] for choice, shape in zip(options, shapes, strict=True)]
        for cut in itertools.product(*held):
            if cut not in seen:
                seen.add(cut)
                yield cut
    draw = random.Random(seed)
    while True:
        cut = tuple(draw.choice(choice) for choice in options)
        if cut not in seen:
            seen.add(cut)
            yield cut


def _sets(positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, min(len(positions), _LARGEST_SET) + 1):
        yield from itertools.combinations(positions, count)


class _CombinationSearch:
    """Runs combinations, each once, and keeps those that are true."""

    def __init__(
        self, op: Op, draws: Sequence[DrawnCall], devices: int, run: LocalRun, alike: Sequence[int], unread: Sequence[int], seed: int
    ) -> None:
        self.op, self.draws, self.devices, self.run = op, draws, devices, run
        self.alike, self.unread = frozenset(alike), frozenset(unread)
        self.true: dict[CallPlacements, ResultPlacements] = {}
        self.tried = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.parts: dict[tuple[int, int, Placement], list[torch.Tensor]] = {}
        self.least = [max((tolerance_of(t) for t in (*draw.operands, *draw.results)), default=0.0) for draw in draws]

    def measure(self, cut: CallPlacements, within: ResultPlacements | None = None) -> bool:
        """Run one combination; whether it runs at all. ``within`` are the placements that can still be true of its results."""
        self.tried += 1
        runs, held = True, within
        for number, draw in enumerate(self.draws):
            found = self._sized(cut, number, draw) if self.op.name in SIZED else self._plain(cut, number, draw, held)
            if found is None:
                runs = False
                break
            held = found if held is None else tuple(a & b for a, b in zip(held, found, strict=True))
            if not all(h or i in self.alike for i, h in enumerate(held)):
                return runs
        if runs and held is not None:
            self.true[cut] = held
        return runs

    def outward(self) -> None:
        """Average, maximum and minimum on one operand more, from what is true without it."""
        frontier = list(self.true)
        while frontier:
            grown: dict[CallPlacements, ResultPlacements] = {}
            for cut in frontier:
                for i, kind in itertools.product(range(len(cut)), _PENDING):
                    wider = (*cut[:i], kind, *cut[i + 1 :])
                    if cut[i] == R and wider not in grown and self._can_be(i, kind):
                        within = self._without(wider)
                        if within is not None:
                            grown[wider] = within
            frontier = []
            for cut, within in grown.items():
                self.measure(cut, within)
                if cut in self.true:
                    frontier.append(cut)

    def _can_be(self, operand: int, kind: Placement) -> bool:
        value = self.draws[0].operands[operand]
        if operand in self.unread or not value.numel():
            return False
        return value.is_floating_point() or value.is_complex() if kind == P("avg") else not value.is_complex()

    def _without(self, cut: CallPlacements) -> ResultPlacements | None:
        """What holds with each such operand replicated; None where one of these is not true."""
        held: ResultPlacements | None = None
        for i, placement in enumerate(cut):
            if placement in _PENDING:
                known = self.true.get((*cut[:i], R, *cut[i + 1 :]))
                if known is None:
                    return None
                held = known if held is None else tuple(a & b for a, b in zip(held, known, strict=True))
        return held

    def _local(self, cut: CallPlacements, number: int) -> list[list[torch.Tensor]]:
        """By device, the operands."""
        made = []
        for i, placement in enumerate(cut):
            key = (number, i, placement)
            if key not in self.parts:
                self.parts[key] = distribute(self.draws[number].operands[i], [placement], (self.devices,), self.generator)
            made.append(self.parts[key])
        return [[parts[device] for parts in made] for device in range(self.devices)]

    def _execute(self, cut: CallPlacements, number: int, shapes: Sequence[Sequence[Sequence[int]]]) -> list[Sequence[torch.Tensor]] | None:
        try:
            return [self.run(self.op, local, shapes[device]) for device, local in enumerate(self._local(cut, number))]
        except FAULTS:
            return None

    def _plain(self, cut: CallPlacements, number: int, draw: DrawnCall, within: ResultPlacements | None) -> ResultPlacements | None:
        whole = [tuple(t.shape) for t in draw.results]
        outs = self._execute(cut, number, [whole] * self.devices)
        if outs is None or any(len(made) != len(whole) for made in outs):
            return None
        return tuple(
            frozenset()
            if i in self.alike
            else self._held([made[i] for made in outs], expected, number, None if within is None else within[i])
            for i, expected in enumerate(draw.results)
        )

    def _sized(self, cut: CallPlacements, number: int, draw: DrawnCall) -> ResultPlacements | None:
        """The same for ops that are told the sizes of their results: every placement of these is a run of its own."""
        ran = False
        held: list[set[Placement]] = [set() for _ in draw.results]
        shapes = [tuple(t.shape) for t in draw.results]
        for placement in [R, *(S(d) for d in range(max(map(len, shapes))))]:
            kinds = [placement if placement == R or (placement < len(s) and filled(s[placement], self.devices)) else R for s in shapes]
            local = [
                [Layout((k,)).local_shape(shape, (self.devices,), (device,)) for k, shape in zip(kinds, shapes, strict=True)]
                for device in range(self.devices)
            ]
            if placement != R and R in kinds:
                continue
            outs = self._execute(cut, number, local)
            if outs is None or any(
                tuple(t.shape) != s for made, sizes in zip(outs, local, strict=True) for t, s in zip(made, sizes, strict=True)
            ):
                continue
            ran = True
            for i, expected in enumerate(draw.results):
                held[i] |= self._held([made[i] for made in outs], expected, number, None)
        return tuple(map(frozenset, held)) if ran else None

    def _held(
        self, parts: Sequence[torch.Tensor], expected: torch.Tensor, number: int, within: frozenset[Placement] | None
    ) -> frozenset[Placement]:
        """The placements under which these parts are the expected tensor."""
        least, shape = self.least[number], tuple(expected.shape)
        local = [tuple(part.shape) for part in parts]
        options: list[Placement] = []
        if all(found == shape for found in local):
            options = [R, P("max"), P("min")] if not expected.is_complex() else [R]
            options += [P("sum")] if expected.dtype != torch.bool else []
            options += [P("avg")] if expected.is_floating_point() or expected.is_complex() else []
        for d in range(len(shape)):
            wanted = [Layout((S(d),)).local_shape(shape, (self.devices,), (device,)) for device in range(self.devices)]
            options += [S(d)] if local == wanted else []
        good = set()
        for placement in options:
            if within is None or placement in within:
                made = assemble(parts, [placement], (self.devices,), least)
                if made is not None and close(made, expected, least):
                    good.add(placement)
        return frozenset(good)
