"""What a rule family works with: the call it describes and the draft of a rule it fills in.

A family names the factors of a call, says which factors every dim of every tensor holds, and which tensors may be
partial together. Tensors are spoken of by the argument names of the op's schema, so that families and rows read like it:

    draft = RuleDraft(call)
    rows, columns = draft.factor("rows", 8), draft.factor("columns", 4, cut=False)
    draft.put("self", [rows, columns])
    draft.result(0, [rows, columns])
    draft.linear(("self",), ("sum", "avg"))
    rule = draft.rule(family="softmax", source="table")

Families of StableHLO ops speak of operands and results by position, and say of each factor where it is. Propagation goes through the
factors of a rule in the order in which they were made, so the order is part of the rule, as are factors of size 1. The factors of a
dim need not make up its size (``exact=False``):

    draft = RuleDraft(call, exact=False)
    draft.span((0, None), (0,), 8)                                 # rows: dim 0 of operand 0 and of result 0
    draft.span((1, 0), (None,), 4, "reduction", reduction="sum")   # contracted
    draft.span((None, 1), (1,), 2)                                 # columns
    rule = draft.rule(family="hlo.dot", source="table")
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from solver_shard.errors import RuleError
from solver_shard.layout import REDUCTIONS, Placement
from solver_shard.program import Op, Tensor, refs
from solver_shard.rules.rule import Factor, FactorDims, FactorKind, Implementation, InnerCollective, Linear, Rule, place_of

DimFactors = tuple[int, ...]
"""Factor positions that one dim holds, major to minor; empty for a dim of size 1."""

FALLBACK = "fallback"
"""``Rule.source`` and ``Rule.family`` of ops without a row."""

FLOATING = frozenset({"f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "c64", "c128"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One op with the tensors it reads and makes.

    Attributes:
        slots: the operand position of every tensor argument, in the order of the attributes; an operand read by two
            arguments (``x * x``) has two slots.
        names: argument name to the slots it fills: one, several for a list of tensors, none where no tensor was given.
        conservative: whether rules should leave out what could carry a sharding to a dim that it does not divide.
    """

    name: str
    attributes: Mapping[str, Any]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    slots: tuple[int, ...]
    names: Mapping[str, tuple[int, ...]]
    conservative: bool = False

    @classmethod
    def of(cls, op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], *, conservative: bool = False) -> OpCall:
        """The call of an op; RuleError when the attributes name an operand that is not there."""
        slots: list[int] = []
        names: dict[str, tuple[int, ...]] = {}
        for name, value in op.attributes.items():
            here = [ref.operand for ref in refs(value)]
            names[name] = tuple(range(len(slots), len(slots) + len(here)))
            slots.extend(here)
        if any(not 0 <= slot < len(operands) for slot in slots):
            raise RuleError(f"{op.name}: its arguments refer to operands {sorted(set(slots))}, but it was given {len(operands)} operands")
        return cls(
            name=op.name,
            attributes=op.attributes,
            operands=tuple(operands),
            results=tuple(results),
            slots=tuple(slots),
            names=names,
            conservative=conservative,
        )

    def attribute(self, name: str, default: Any = None) -> Any:
        """The argument's value, or the default where it is absent or None."""
        value = self.attributes.get(name)
        return default if value is None else value

    def known(self, name: str) -> tuple[int, ...]:
        """The slots of an argument; RuleError when the op has no argument of this name."""
        if name not in self.names:
            raise RuleError(f"{self.name}: its row names an argument {name!r}; legal: {', '.join(self.names) or 'none'}; correct the row")
        return self.names[name]

    def slot(self, name: str) -> int | None:
        """The slot of a tensor argument; None where it is absent, None or a number."""
        found = self.names.get(name, ())
        return found[0] if found else None

    def tensor(self, name: str) -> Tensor:
        """The tensor passed as this argument; RuleError when there is none."""
        slot = self.slot(name)
        if slot is None:
            raise RuleError(
                f"{self.name}: its rule needs a tensor argument {name!r}; the call has {', '.join(self.names) or 'no arguments'}"
            )
        return self.at(slot)

    def at(self, slot: int) -> Tensor:
        """The tensor in a slot."""
        return self.operands[self.slots[slot]]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor argument."""
        return self.tensor(name).shape

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """The dims that an argument names, counted from the front; all dims where it is absent, None or empty."""
        value = self.attributes.get(name)
        if value is None or (isinstance(value, tuple | list) and not value):
            return tuple(range(rank))
        return tuple(self.dim(d, rank) for d in (value if isinstance(value, tuple | list) else (value,)))

    def dim(self, value: int, rank: int) -> int:
        """One dim counted from the front; RuleError when the tensor has no such dim."""
        if not -max(rank, 1) <= value < max(rank, 1):
            raise RuleError(f"{self.name}: dim {value} does not exist in a tensor of {rank} dims")
        return value % max(rank, 1)

    def present(self, mask: str, count: int) -> tuple[int | None, ...]:
        """Result positions of ``count`` optional results that a bool list switches on; None for one that is not made.

        Programs may leave results out that are switched off, or keep all of them.
        """
        chosen = tuple(bool(m) for m in self.attribute(mask, (True,) * count))
        if len(self.results) == count:
            return tuple(range(count))
        if len(self.results) != sum(chosen):
            raise RuleError(f"{self.name}: {mask}={chosen} makes {sum(chosen)} results, the call has {len(self.results)}")
        positions = iter(range(count))
        return tuple(next(positions) if made else None for made in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImplementationDraft:
    """An implementation as a family asks for it."""

    name: str
    factor: int
    collectives: tuple[InnerCollective, ...]
    arguments: Mapping[str, Placement] = field(default_factory=dict)
    results: Mapping[int, Placement] = field(default_factory=dict)
    share: Literal["even", "triangle", "whole"] = "even"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearSet:
    """Slots that may be partial together: reductions of the operands, to those of the results; results that stay as they are."""

    slots: frozenset[int]
    reductions: Mapping[str, str]
    fixed: tuple[int, ...]


class RuleDraft:
    """A rule being filled in; every tensor that is left out stays whole.

    Args:
        exact: the factors of a dim make up its size, which ``rule`` checks; otherwise a dim may hold any, and one that is left without
            gets one of size 1.
    """

    def __init__(self, call: OpCall, *, exact: bool = True) -> None:
        self.call = call
        self.exact = exact
        self.factors: list[Factor] = []
        self.slots = [None if exact else _without_factors(call.at(slot)) for slot in range(len(call.slots))]
        self.results = [None if exact else _without_factors(result) for result in call.results]
        self.sets: list[_LinearSet] = []
        self.ways: list[_ImplementationDraft] = []
        self.unread: set[int] = set()
        self.alike: list[int] = []
        self.flops = 0
        self.matmul = False
        self.view = False
        self.window = 0
        self.propagates = True

    def factor(
        self, name: str, size: int, *, even: bool = False, filled: bool = False, cut: bool = True, reduction: str | None = None
    ) -> DimFactors:
        """A new factor as a dim holds it; nothing for sizes below 2, which no axis can cut."""
        if size < 2:
            return ()
        self.factors.append(Factor(name=name, size=size, even=even, filled=filled, cut=cut, reduction=reduction))
        return (len(self.factors) - 1,)

    def letters(self, shape: Sequence[int], *, whole: Iterable[int] = (), filled: bool = False) -> list[DimFactors]:
        """One new factor per dim, named a, b, c, ...; dims in ``whole`` are not cut."""
        kept = set(whole)
        return [self.factor(self.letter(), size, filled=filled, cut=d not in kept) for d, size in enumerate(shape)]

    def letter(self) -> str:
        """The next unused factor name: a to z, then a1, b1, ..."""
        round_, index = divmod(len(self.factors), 26)
        return chr(ord("a") + index) + (str(round_) if round_ else "")

    def whole(self, shape: Sequence[int]) -> list[DimFactors]:
        """New factors that no axis cuts, one per dim."""
        return self.letters(shape, whole=range(len(shape)))

    def put(self, argument: str, dims: Sequence[DimFactors]) -> None:
        """Say what the dims of a tensor argument hold; nothing happens where no tensor was passed."""
        for slot in self.call.names.get(argument, ()):
            self.put_slot(slot, dims)

    def put_slot(self, slot: int, dims: Sequence[DimFactors]) -> None:
        """The same for one slot."""
        self.slots[slot] = tuple(dims)

    def result(self, index: int | None, dims: Sequence[DimFactors]) -> None:
        """Say what the dims of a result hold; nothing happens for a result that is not made."""
        if index is not None:
            self.results[index] = tuple(dims)

    def span(
        self,
        operands: int | Sequence[int | None] | None,
        results: int | Sequence[int | None] | None,
        size: int,
        kind: FactorKind = "pass_through",
        *,
        blocked: bool = False,
        reduction: str | None = None,
    ) -> None:
        """A new factor, below those that its dims hold already: of one dim, or of none (None), of every operand and result.

        One number stands for that dim of all operands, or of all results, scalars aside. Where the factor has size 1, dims that hold one
        do without it.
        """
        index = self._append(size, kind, blocked, reduction)
        for tensors, places in ((self.slots, operands), (self.results, results)):
            if not isinstance(places, Sequence):
                places = [places if dims else None for dims in tensors]
            for position, (dims, dim) in enumerate(zip(tensors, places, strict=True)):
                if dim is None or dims is None:
                    continue
                if not 0 <= dim < len(dims):
                    raise IndexError(f"a factor of dim {dim} of a tensor of {len(dims)} dims")
                if size != 1 or not dims[dim]:
                    tensors[position] = (*dims[:dim], (*dims[dim], index), *dims[dim + 1 :])

    def restrict(
        self,
        held: DimFactors,
        *,
        cut: bool | None = None,
        even: bool | None = None,
        reduction: str | None = None,
        addends: Iterable[str] = (),
        apart: Iterable[int | None] = (),
    ) -> None:
        """Change what is known of factors made earlier."""
        for index in held:
            factor = self.factors[index]
            self.factors[index] = replace(
                factor,
                cut=factor.cut if cut is None else cut,
                even=factor.even if even is None else even,
                reduction=factor.reduction if reduction is None else reduction,
                addends=(*factor.addends, *(self.call.slots[slot] for name in addends for slot in self.call.names.get(name, ()))),
                apart=(*factor.apart, *(result for result in apart if result is not None)),
            )

    def linear(self, arguments: Iterable[str], reductions: Iterable[str], *, fixed: Iterable[int | None] = ()) -> None:
        """Tensor arguments that may be partial together, and the results with them, but for those that are ``fixed``.

        A number among them is the same on every device: an average passes beside it, a sum would count it many times. The set
        is dropped where an argument is None, or none is a tensor.
        """
        names = tuple(arguments)
        slots = [self.call.known(name) for name in names]
        numbers = [name for name, found in zip(names, slots, strict=True) if not found]
        if any(self.call.attributes[name] is None for name in numbers):
            return
        kept = [r for r in reductions if r != "sum"] if numbers else list(reductions)
        self.linear_slots((s for found in slots for s in found), kept, fixed=fixed)

    def linear_slots(self, slots: Iterable[int], reductions: Iterable[str], *, fixed: Iterable[int | None] = ()) -> None:
        """The same for slots; sums and averages pass only where dtypes add up: see ``_adds``."""
        chosen, still = frozenset(slots), tuple(sorted(index for index in fixed if index is not None))
        kept = {r: r for r in reductions if r in ("max", "min") or self._adds(chosen, still, r)}
        if chosen and kept:
            self.sets.append(_LinearSet(slots=chosen, reductions=kept, fixed=still))

    def monotone(self, argument: str, *, increasing: bool, only: str | None = None, fixed: Iterable[int | None] = ()) -> None:
        """A maximum and a minimum of this tensor pass (or ``only`` one); through a decreasing function one becomes the other."""
        if any(tensor.dtype in ("c64", "c128") for tensor in (*self.call.operands, *self.call.results)):
            return
        becomes = {"max": "max", "min": "min"} if increasing else {"max": "min", "min": "max"}
        kept = {r: made for r, made in becomes.items() if only in (None, r)}
        still = tuple(sorted(i for i in fixed if i is not None))
        for slot in self.call.known(argument):
            # an operand read twice has to be so in both places
            twin = next(
                (s for s in self.sets if s.reductions == kept and {self.call.slots[t] for t in s.slots} == {self.call.slots[slot]}), None
            )
            if twin is not None:
                self.sets.remove(twin)
            self.sets.append(_LinearSet(slots=frozenset({slot, *(twin.slots if twin else ())}), reductions=kept, fixed=still))

    def _adds(self, slots: frozenset[int], fixed: tuple[int, ...], reduction: str) -> bool:
        """Truth values are no sums, integers no averages, and parts of a sum must not be rounded to integers."""
        sources = {self.call.at(slot).dtype for slot in slots}
        made = {result.dtype for index, result in enumerate(self.call.results) if index not in (*fixed, *self.alike)}
        if reduction == "avg":
            return sources | made <= FLOATING
        return "bool" not in sources | made and (made <= FLOATING or not sources & FLOATING)

    def implement(
        self,
        name: str,
        factor: DimFactors,
        *collectives: InnerCollective,
        arguments: Mapping[str, Placement] | None = None,
        results: Mapping[int, Placement] | None = None,
        share: Literal["even", "triangle", "whole"] = "even",
    ) -> None:
        """A named implementation that cuts the factor; nothing happens for a factor of size below 2.

        Tensors that hold the factor are cut there and all others whole, unless ``arguments`` or ``results`` say otherwise.
        """
        for index in factor:
            self.ways.append(
                _ImplementationDraft(
                    name=name, factor=index, collectives=collectives, arguments=arguments or {}, results=results or {}, share=share
                )
            )

    def all_reduce(self, rows: Sequence[DimFactors], width: int, dtype: str) -> InnerCollective:
        """An all-reduce of ``width`` statistics per row; in f32, or in f64 where the op computes in that."""
        return InnerCollective(
            kind="all_reduce", rows=tuple(f for held in rows for f in held), width=width, dtype="f64" if dtype == "f64" else "f32"
        )

    def ignore(self, argument: str) -> None:
        """The argument's bytes are not read: only its shape or dtype matters, so that it may have any layout."""
        self.unread.update(self.call.known(argument))

    def rule(self, *, family: str, source: str) -> Rule:
        """The finished rule, checked against the tensors; RuleError says where they disagree."""
        if not self.exact:
            for tensors in (self.slots, self.results):
                tensors[:] = [tuple(held or (self._append(1),) for held in dims or ()) for dims in tensors]
        slots = [dims if dims is not None else tuple(self.whole(self.call.at(i).shape)) for i, dims in enumerate(self.slots)]
        results = [dims if dims is not None else tuple(self.whole(self.call.results[i].shape)) for i, dims in enumerate(self.results)]
        if self.exact:
            for i, dims in enumerate(slots):
                self._check(dims, self.call.at(i), f"operand {self.call.slots[i]}", family)
            for i, dims in enumerate(results):
                self._check(dims, self.call.results[i], f"result {i}", family)
        operands = self._merge(slots)
        return Rule(
            factors=tuple(replace(factor, kind=_kind(factor)) if self.exact else factor for factor in self.factors),
            operands=operands,
            results=tuple(results),
            linear=self._linear(),
            implementations=self._implementations(operands, results),
            flops=self.flops,
            matmul=self.matmul,
            view=self.view,
            window=self.window,
            reads=tuple(
                any(slot not in self.unread for slot, held in enumerate(self.call.slots) if held == operand)
                for operand in range(len(self.call.operands))
            ),
            alike=tuple(self.alike),
            propagates=self.propagates and source != FALLBACK,
            source=source,
            family=family,
        )

    def _append(self, size: int, kind: FactorKind = "pass_through", blocked: bool = False, reduction: str | None = None) -> int:
        """The position of a new factor of this kind."""
        # Shards of the other kinds need their neighbours' elements, and partial results a reduction that layouts can name.
        cut = kind == "pass_through" or (kind == "reduction" and reduction is not None)
        name = factor_name(len(self.factors))
        self.factors.append(Factor(name=name, size=size, cut=cut, reduction=reduction if cut else None, kind=kind, blocked=blocked))
        return len(self.factors) - 1

    def _check(self, dims: FactorDims | tuple[DimFactors, ...], tensor: Tensor, where: str, family: str) -> None:
        call = self.call
        if len(dims) != len(tensor.shape):
            raise RuleError(
                f"{call.name}: its rule (family {family!r}) gives {where} {len(dims)} dims, the tensor has shape {tensor.shape}; "
                "correct the row in the rules file, or remove it so that the op is replicated"
            )
        for d, held in enumerate(dims):
            units = math.prod(self.factors[f].size for f in held)
            size = tensor.shape[d]
            exact = all(self.factors[f].even or not self.factors[f].cut for f in held[:1])
            if (held and (size % units or (units != size and not exact))) or (not held and size > 1):
                names = " ".join(f"{self.factors[f].name}={self.factors[f].size}" for f in held) or "nothing"
                raise RuleError(
                    f"{call.name}: its rule (family {family!r}) puts {names} in dim {d} of {where}, which has size {size}; "
                    "the sizes do not fit: correct the row in the rules file, or remove it so that the op is replicated"
                )

    def _merge(self, slots: Sequence[tuple[DimFactors, ...]]) -> tuple[FactorDims, ...]:
        """Dims per operand; where one operand is read in two ways, the factors that differ are not cut."""
        merged: dict[int, tuple[DimFactors, ...]] = {}
        for slot, dims in enumerate(slots):
            operand = self.call.slots[slot]
            known = merged.setdefault(operand, dims)
            for held, other in zip(known, dims, strict=True):
                if held != other:
                    self.restrict((*held, *other), cut=False)
        missing = [i for i in range(len(self.call.operands)) if i not in merged]
        if missing:
            raise RuleError(f"{self.call.name}: no argument refers to operands {missing}")
        return tuple(merged[i] for i in range(len(self.call.operands)))

    def _linear(self) -> tuple[Linear, ...]:
        found = []
        for held in self.sets:
            operands = {self.call.slots[slot] for slot in held.slots}
            if all((slot in held.slots) or (operand not in operands) for slot, operand in enumerate(self.call.slots)):
                reductions = tuple(r for r in REDUCTIONS if r in held.reductions)
                becomes = tuple(held.reductions[r] for r in reductions)
                found.append(
                    Linear(
                        operands=tuple(sorted(operands)),
                        reductions=reductions,
                        becomes=() if becomes == reductions else becomes,
                        fixed=held.fixed,
                    )
                )
        return tuple(dict.fromkeys(found))

    def _implementations(self, operands: Sequence[FactorDims], results: Sequence[FactorDims]) -> tuple[Implementation, ...]:
        found = []
        for way in self.ways:
            if not self.factors[way.factor].cut:
                continue
            placements = [place_of(dims, way.factor) for dims in operands]
            for name, placement in way.arguments.items():
                for slot in self.call.names.get(name, ()):
                    placements[self.call.slots[slot]] = placement
            found.append(
                Implementation(
                    name=way.name,
                    factor=way.factor,
                    operands=tuple(placements),
                    results=tuple(way.results.get(i, place_of(dims, way.factor)) for i, dims in enumerate(results)),
                    collectives=way.collectives,
                    share=way.share,
                )
            )
        return tuple(found)


def _kind(factor: Factor) -> FactorKind:
    """What a factor is to propagation: gathered where an op must see it whole, summed where a result lacks it."""
    if not factor.cut:
        return "need_replication"
    return "pass_through" if factor.reduction is None else "reduction"


def _without_factors(tensor: Tensor) -> tuple[DimFactors, ...]:
    return ((),) * len(tensor.shape)


def factor_name(index: int) -> str:
    """The name of a factor in printed rules: i to z, then z_1, z_2, ...

    >>> [factor_name(i) for i in (0, 17, 18)]
    ['i', 'z', 'z_1']
    """
    return chr(ord("i") + index) if index < 18 else f"z_{index - 17}"
