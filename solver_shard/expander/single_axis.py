"""What an op may do along one mesh axis: lists of placements, for its outputs and then its inputs.

>>> from solver_shard.expander.call import PlacedCall, Meta, Operand
>>> from solver_shard.mesh import Mesh
>>> from solver_shard.program import Ref
>>> strategies = Strategies()
>>> @strategies.register("my.scale.default", allow_uneven_sharding=True)
... def scale(call):
...     return [[Cut(d), Cut(d), R] for d in range(len(call.operands[0].shape))] + [[P("sum"), P("sum"), R]]
>>> mesh = Mesh.parse("2,2")
>>> call = PlacedCall(
...     op="my.scale.default", mesh=mesh, operands=(Operand.parse("f32[8, 8]| S(1)P", mesh), Operand.parse("f32[]| RR", mesh)),
...     results=(Meta(shape=(8, 8), dtype="f32"),), attributes={"self": Ref(0), "scale": Ref(1)},
... )
>>> prepared = prepare(call, strategies.of(call))
>>> for placements in prepared.strategies:
...     print(*placements)
R R R
S(0) S(0) R
S(1) S(1) R
P(sum) P(sum) R
>>> prepared.results(call.layouts)
((S(1), P(sum)),)

``Cut(d)`` stands for "sharded on dim d, whatever the kind of shard". It is filled with the kinds that the inputs of the call really
have, plain or strided with some split factor: with none, the strategy does not apply. Replicating everything is always legal and is
added where it is not listed. ``None`` stands for an output that is masked off.

Strategies come from a function that the user registered, from a rule (see ``of_rule``), or from one registered with DTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from solver_shard.arguments import checked
from solver_shard.errors import InputError, RuleError
from solver_shard.expander.call import Meta, PlacedCall
from solver_shard.layout import P, Placement, Placements, R, S, show, strided
from solver_shard.program import refs
from solver_shard.rules.rule import Rule

__all__ = ["Cut", "P", "Prepared", "R", "S", "SingleAxis", "Strategies", "of_rule", "prepare", "register_single_axis_strategy"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Sharded on ``dim``, whatever the kind of shard."""

    dim: int


Entry = Placement | Cut | None
Function = Callable[[PlacedCall], Iterable[Sequence[Entry]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleAxis:
    """The strategies of one call, before they are filled in.

    Attributes:
        strategies: outputs, then inputs.
        allow_uneven_sharding: an input may keep a layout that leaves devices without a part of a dim.
        allow_unbacked_sharding: whether a dim of unknown size may be cut; None: that is an error.
        different_mesh_args: positions of the arguments that may live on another mesh; they must be replicated.
        legal: given the strategies that the axes use (positions in ``strategies``, -1 for the added one), whether they go together.
    """

    strategies: tuple[tuple[Entry, ...], ...]
    allow_uneven_sharding: bool = False
    allow_unbacked_sharding: bool | None = None
    different_mesh_args: tuple[int, ...] = ()
    legal: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A function that the user registered, with what he said about it."""

    function: Function
    allow_uneven_sharding: bool
    allow_unbacked_sharding: bool | None
    different_mesh_args: tuple[int, ...]
    static_arguments: tuple[str, ...] | None

    def of(self, call: PlacedCall) -> SingleAxis:
        return SingleAxis(
            strategies=tuple(tuple(entries) for entries in self.function(call)),
            allow_uneven_sharding=self.allow_uneven_sharding,
            allow_unbacked_sharding=self.allow_unbacked_sharding,
            different_mesh_args=self.different_mesh_args,
        )


class Strategies:
    """Functions that return the single-axis strategies of ops, by op name."""

    def __init__(self) -> None:
        self._held: dict[str, Registered] = {}

    def register(
        self,
        op: str | Sequence[str],
        allow_uneven_sharding: bool = False,
        allow_unbacked_sharding: bool | None = None,
        different_mesh_args: Sequence[int] | None = None,
        static_arguments: Sequence[str] | None = None,
    ) -> Callable[[Function], Function]:
        """A decorator that registers a function for one op or a list of them (``aten.mm.default``).

        The function takes a ``PlacedCall`` and returns lists of placements, outputs then inputs; replicating everything need not be listed.
        ``static_arguments`` names the arguments, tensors aside, that the result depends on (default: all); ``memory_format`` always
        counts. Registering an op again replaces what it had.
        """

        def keep(function: Function) -> Function:
            static = None if static_arguments is None else tuple(dict.fromkeys((*static_arguments, "memory_format")))
            for name in (op,) if isinstance(op, str) else op:
                self._held[name] = Registered(
                    function=function,
                    allow_uneven_sharding=allow_uneven_sharding,
                    allow_unbacked_sharding=allow_unbacked_sharding,
                    different_mesh_args=tuple(different_mesh_args or ()),
                    static_arguments=static,
                )
            return function

        return keep

    def get(self, op: str) -> Registered | None:
        """What was registered for the op."""
        return self._held.get(op)

    def of(self, call: PlacedCall) -> SingleAxis:
        """The strategies of a call; RuleError where nothing was registered for its op."""
        found = self.get(call.op)
        if found is None:
            raise RuleError(f"no single-axis strategy is registered for {call.op}; registered: {', '.join(self._held) or 'none'}")
        return found.of(call)


USER_STRATEGIES = Strategies()
"""Where ``register_single_axis_strategy`` keeps them."""


@checked
def register_single_axis_strategy(
    op: str | Sequence[str],
    allow_uneven_sharding: bool = False,
    allow_unbacked_sharding: bool | None = None,
    different_mesh_args: Sequence[int] | None = None,
    static_arguments: Sequence[str] | None = None,
) -> Callable[[Function], Function]:
    """Register the strategies that an op has along one mesh axis, for the whole process: ``expand`` takes them before rules and DTensor's.

    The signature is that of DTensor's ``register_single_dim_strategy``.

    >>> @register_single_axis_strategy("my.scale.default", allow_uneven_sharding=True)  # doctest: +SKIP
    ... def scale(call):
    ...     return [[Cut(d), Cut(d), R] for d in range(len(call.operands[0].shape))]

    Args:
        op: one op, ``aten.mm.default``, or a list of them.
        allow_uneven_sharding: shards of a dim may differ in size.
        allow_unbacked_sharding: dims of unknown size may be cut.
        different_mesh_args: positions of tensor arguments that may lie on another mesh.
        static_arguments: names of the arguments, tensors aside, that the result depends on; default all.

    Returns:
        A decorator of a function that takes a ``Call`` and returns lists of placements, outputs then inputs; replicating everything need
        not be listed.

    Raises:
        RuleError: where the function is used, if what it returns does not fit the op.
    """
    return USER_STRATEGIES.register(op, allow_uneven_sharding, allow_unbacked_sharding, different_mesh_args, static_arguments)


def of_rule(rule: Rule, mesh_shape: Sequence[int]) -> SingleAxis:
    """The single-axis strategies of a rule, but for its implementations: an op by itself cannot run these.

    Shards are placeholders. Axes go together where every factor can be cut into as many parts as they make of it.
    """
    used = [s for s in rule.strategies() if s.implementation is None]

    def legal(chosen: Sequence[int]) -> bool:
        cuts: dict[int, int] = {}
        for axis, number in enumerate(chosen):
            factor = used[number].factor if number >= 0 else None
            if factor is not None:
                cuts[factor] = cuts.get(factor, 1) * mesh_shape[axis]
        return all(rule.factors[factor].legal(shards) for factor, shards in cuts.items())

    rows = tuple(tuple(Cut(p.dim) if p.is_shard else p for p in (*s.results, *s.operands)) for s in used)
    return SingleAxis(strategies=rows, allow_unbacked_sharding=False, legal=legal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Strategies fitted to one call.

    Attributes:
        strategies: outputs then inputs, placeholders filled, replicating everything among them.
        inputs: per strategy, the placements of the inputs.
        origins: per strategy, its position in ``given.strategies``; -1 for the added one.
        lookup: placements of the inputs on one axis to the first strategy that has them.
        shardings, partials: per input, what it may be along an axis, in order of first mention.
        elsewhere: inputs on another mesh; they stay as they are.
    """

    call: PlacedCall
    given: SingleAxis
    outputs: int
    strategies: tuple[tuple[Placement | None, ...], ...]
    inputs: tuple[Placements, ...]
    origins: tuple[int, ...]
    lookup: Mapping[Placements, int]
    shardings: tuple[tuple[Placement, ...], ...]
    partials: tuple[tuple[Placement, ...], ...]
    elsewhere: tuple[int, ...]

    def fits(self, operand: int, layout: Placements) -> bool:
        """Whether an input may have this layout: every shard has something to hold, or it has the layout already and may keep it."""
        held = self.call.operands[operand]
        if mixed(layout):
            return False
        sizes = (held.mesh or self.call.mesh).shape
        fine = shardable(held, layout, sizes, self.given.allow_unbacked_sharding, self.call.op)
        return fine or (self.given.allow_uneven_sharding and layout == held.layout)

    def results(self, layouts: Sequence[Placements]) -> tuple[Placements | None, ...] | None:
        """Layouts of the results when the inputs have these; None where no strategies allow them."""
        chosen = []
        for column in zip(*(self._seen(i, layout) for i, layout in enumerate(layouts)), strict=True):
            found = self.lookup.get(column)
            if found is None:
                return None
            chosen.append(found)
        if not all(self.fits(i, layout) for i, layout in enumerate(layouts)):
            return None
        return self.made(chosen)

    def made(self, chosen: Sequence[int]) -> tuple[Placements | None, ...] | None:
        """Layouts of the results when the axes use these strategies; None where they do not go together."""
        if self.given.legal is not None and not self.given.legal([self.origins[c] for c in chosen]):
            return None
        found: list[Placements | None] = []
        for k in range(self.outputs):
            column = [self.strategies[c][k] for c in chosen]
            if any(kind is None for kind in column):
                found.append(None)
                continue
            layout = tuple(kind for kind in column if kind is not None)
            if mixed(layout):
                return None
            found.append(layout)
        return tuple(found)

    def _seen(self, operand: int, layout: Placements) -> Placements:
        """An input on another mesh is replicated on this one, too."""
        return (R,) * len(self.call.element_mesh.axes) if operand in self.elsewhere else layout


def prepare(call: PlacedCall, given: SingleAxis) -> Prepared:
    """Fit strategies to a call.

    Raises:
        RuleError: a strategy has too few or too many placements, or no place for a result that is there.
        InputError: inputs live on different meshes and the op does not allow it, or one that may is not replicated.
    """
    elsewhere = _elsewhere(call, given)
    outputs, inputs = len(call.results), len(call.operands)
    for number, entries in enumerate(given.strategies):
        if len(entries) != outputs + inputs:
            raise RuleError(
                f"{call.op}: single-axis strategy {number} has {len(entries)} placements, expected {outputs + inputs} "
                f"({outputs} outputs, then {inputs} inputs, keyword arguments included); correct the strategy"
            )
    rows = list(zip(range(len(given.strategies)), given.strategies, strict=True))
    if not any(all(entry is None or entry == R for entry in entries) for _, entries in rows):
        rows.insert(0, (-1, (*(None if meta is None else R for meta in call.results), *(R,) * inputs)))
    fillers = _fillers(call)
    filled: list[tuple[Placement | None, ...]] = []
    origins: list[int] = []
    for number, entries in rows:
        if any(isinstance(entry, Cut) for entry in entries):
            for filler in fillers:
                filled.append(tuple(filler(entry.dim) if isinstance(entry, Cut) else entry for entry in entries))
                origins.append(number)
        else:
            filled.append(tuple(entry for entry in entries if not isinstance(entry, Cut)))
            origins.append(number)
    lookup: dict[Placements, int] = {}
    reads: list[Placements] = []
    for number, kinds in enumerate(filled):
        read = tuple(kind for kind in kinds[outputs:] if kind is not None)
        if len(read) != inputs:
            raise RuleError(
                f"{call.op}: single-axis strategy {origins[number]} has no placement for an input; only outputs can be masked off"
            )
        lookup.setdefault(read, number)
        reads.append(read)
    columns = [[read[i] for read in reads] for i in range(inputs)]
    return Prepared(
        call=call,
        given=given,
        outputs=outputs,
        strategies=tuple(filled),
        inputs=tuple(reads),
        origins=tuple(origins),
        lookup=lookup,
        shardings=tuple(tuple(dict.fromkeys(k for k in column if k.is_shard)) for column in columns),
        partials=tuple(tuple(dict.fromkeys(k for k in column if k.is_partial)) for column in columns),
        elsewhere=elsewhere,
    )


def _fillers(call: PlacedCall) -> list[Callable[[int], Placement]]:
    """One way to fill a placeholder for every kind of shard among the inputs, in order of first mention."""
    splits = dict.fromkeys(placement.split for layout in call.layouts for placement in layout if placement.is_shard)
    return [functools.partial(_shard, split=split) for split in splits]


def _shard(dim: int, split: int) -> Placement:
    return strided(dim, split) if split else S(dim)


def _elsewhere(call: PlacedCall, given: SingleAxis) -> tuple[int, ...]:
    """Inputs that live on another mesh than the op runs on, checked."""
    allowed = {
        ref.operand
        for position, value in enumerate(call.attributes.values())
        if position in given.different_mesh_args
        for ref in refs(value)
    }
    mesh, found = call.element_mesh, []
    for i, operand in enumerate(call.operands):
        own = operand.mesh or call.mesh
        if own == mesh:
            continue
        if i not in allowed:
            raise InputError(
                f"{call.op}: its inputs live on different meshes, {mesh} and {own} (input {i}); move them to one mesh, or name the "
                "argument in different_mesh_args when the strategy is registered"
            )
        if not all(kind.is_replicate for kind in operand.layout):
            raise InputError(
                f"{call.op}: input {i} lives on mesh {own}, not on {mesh}, so it must be replicated there, but it is {show(operand.layout)}"
            )
        found.append(i)
    return tuple(found)


def mixed(layout: Placements) -> bool:
    """Whether reductions are pending that do not commute; sum and avg do."""
    partial = {kind for kind in layout if kind.is_partial}
    return len(partial) > 1 and not partial <= {P("sum"), P("avg")}


def shardable(meta: Meta, layout: Placements, mesh_shape: Sequence[int], unknown: bool | None, op: str) -> bool:
    """Whether every dim is at least as long as the number of its shards (times the split factor of strided ones).

    Raises:
        InputError: a dim of unknown size is cut and ``unknown`` does not say whether that is fine.
    """
    shards = [1] * len(meta.shape)
    for axis, kind in enumerate(layout):
        if not kind.is_shard:
            continue
        if kind.dim >= len(shards):
            return False
        shards[kind.dim] *= mesh_shape[axis]
        size, least = meta.shape[kind.dim], shards[kind.dim] * (kind.split or 1)
        if size is None:
            if unknown is None:
                raise InputError(
                    f"{op}: dim {kind.dim} of {meta} has no known size, and the op does not say whether it may be cut; register its "
                    "strategy with allow_unbacked_sharding=True or False"
                )
            if not unknown:
                return False
        elif size < least:
            return False
    return True
