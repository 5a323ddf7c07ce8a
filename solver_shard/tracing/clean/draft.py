"""The program while it is being cleaned: real tensors and ops so far, lazy views over them, and what handlers ask of it.

Every raw value is a ``DraftValue``: a tensor that exists plus a lazy view of it. Ops ask for the form they need
(``ProgramDraft.form``), and only then view, permute and expand ops are written, each at most once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from solver_shard.program import Phase, Ref, Tensor
from solver_shard.tracing.clean import dims as D
from solver_shard.tracing.joint_graph import RawNode, Use, uses

Shape = tuple[int, ...]
CONSTANT_LIMIT = 1 << 22
"""Equal values that depend on no input are merged up to this many elements; larger ones would hold memory for long."""


@dataclass(frozen=True, slots=True)
class DraftValue:
    """Tensor ``base`` seen through ``dims``; ``raws`` are the view nodes on the way."""

    base: int
    dims: D.Dims
    raws: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        return D.shape(self.dims)


@dataclass(slots=True, kw_only=True)
class DraftOp:
    """An op that peepholes may still change.

    Attributes:
        region: checkpointed regions that it runs in, outermost first; constants run in none.
        view: a view, permute or expand that was written on demand.

    Others as in ``program.Op``.
    """

    name: str
    operands: list[int]
    results: list[int]
    attributes: dict[str, Any]
    phase: Phase
    module: str
    raw: list[str]
    region: tuple[int, ...] = ()
    view: bool = False
    recompute: bool = False


@dataclass(slots=True)
class ProgramDraft:
    """Tensors and ops under construction.

    Attributes:
        replaced: a tensor that a peephole took away, to the one that has its elements, and which of its dims is where in that one.
    """

    tensors: list[Tensor] = field(default_factory=list)
    ops: list[DraftOp] = field(default_factory=list)
    node: RawNode | None = None
    replaced: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _equal: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    _constant: set[int] = field(default_factory=set)
    _claimed: set[str] = field(default_factory=set)
    _merged: set[tuple[int, D.Group]] = field(default_factory=set)

    def source(self, tensor: Tensor) -> DraftValue:
        """A parameter, buffer or input."""
        self.tensors.append(tensor)
        return self.whole(len(self.tensors) - 1)

    def whole(self, tensor: int) -> DraftValue:
        """The tensor as it is."""
        return DraftValue(tensor, D.identity(self.tensors[tensor].shape))

    def base_shape(self, value: DraftValue) -> Shape:
        return self.tensors[value.base].shape

    def dtype(self, value: DraftValue) -> str:
        return self.tensors[value.base].dtype

    def emit(
        self,
        name: str,
        operands: Sequence[int],
        attributes: Mapping[str, Any],
        results: Sequence[tuple[Shape, str]],
        *,
        raws: Iterable[str] = (),
        view: bool = False,
        random: bool = False,
    ) -> tuple[int, ...]:
        """Write one op; equal views and equal constants are written once. Returns the result tensors."""
        assert self.node is not None
        constant = not random and all(t in self._constant for t in operands) and sum(_numel(s) for s, _ in results) <= CONSTANT_LIMIT
        key = None
        if view or constant:
            key = (name, tuple(operands), _key(attributes), tuple(results))
            if key in self._equal:
                return self._equal[key]
        first = len(self.tensors)
        for shape, dtype in results:
            self.tensors.append(Tensor(name="", shape=tuple(shape), dtype=dtype))
        made = tuple(range(first, len(self.tensors)))
        names = [n for n in (raws if view else (*raws, self.node.name)) if n not in self._claimed]
        self._claimed.update(names)
        self.ops.append(
            DraftOp(
                name=name,
                operands=list(operands),
                results=list(made),
                attributes=dict(attributes),
                phase=self.node.phase,
                module=self.node.module,
                raw=names,
                region=() if constant else self.node.region,
                view=view,
            )
        )
        if key is not None:
            self._equal[key] = made
        if constant:
            self._constant.update(made)
        return made

    def form(self, value: DraftValue, groups: D.Dims, *, trim: bool = False) -> int:
        """The tensor whose dims are exactly ``groups`` of the value's atoms; with ``trim``, leading dims of size 1 may be missing.

        Expanded atoms that no group holds stay unexpanded.
        """
        target, base = D.shape(groups), self.base_shape(value)
        atoms = [atom for group in groups for atom in group]
        inner = [atom for atom in atoms if atom[0] != D.BROADCAST]
        moved = [atom for atom in inner if atom[2] != 1]
        straight = all(D.place(a) < D.place(b) for a, b in itertools.pairwise(moved))
        if straight and len(inner) == len(atoms):
            if target == base:
                return value.base
            if trim:
                lead = next((i for i, n in enumerate(target) if n != 1), len(target))
                if any(target[i:] == base for i in range(1, lead + 1)):
                    return value.base
            return self._view(value.base, target, value.raws)
        tensor, order = self._split(value, inner)
        if order != sorted(order):
            shape = self.tensors[tensor].shape
            tensor = self.emit(
                "aten.permute.default",
                (tensor,),
                {"self": Ref(0), "dims": tuple(order)},
                [(tuple(shape[i] for i in order), self.tensors[tensor].dtype)],
                raws=value.raws,
                view=True,
            )[0]
        if len(inner) < len(atoms):
            sizes = tuple(atom[2] for atom in atoms)
            tensor = self._view(tensor, tuple(1 if atom[0] == D.BROADCAST else atom[2] for atom in atoms), value.raws)
            tensor = self.emit(
                "aten.expand.default",
                (tensor,),
                {"self": Ref(0), "size": sizes, "implicit": False},
                [(sizes, self.tensors[tensor].dtype)],
                raws=value.raws,
                view=True,
            )[0]
        return self._view(tensor, target, value.raws)

    def _split(self, value: DraftValue, wanted: list[D.Atom]) -> tuple[int, list[int]]:
        """View the base so that every wanted atom is a dim; returns it and the wanted order of those dims."""
        ordered = sorted(wanted, key=D.place)
        tensor = self._view(value.base, tuple(atom[2] for atom in ordered), value.raws)
        where = {atom: i for i, atom in enumerate(ordered)}
        return tensor, [where[atom] for atom in wanted]

    def _view(self, tensor: int, shape: Shape, raws: tuple[str, ...]) -> int:
        if self.tensors[tensor].shape == shape:
            return tensor
        attributes = {"self": Ref(0), "size": shape}
        return self.emit("aten.view.default", (tensor,), attributes, [(shape, self.tensors[tensor].dtype)], raws=raws, view=True)[0]

    def plain(self, value: DraftValue) -> int:
        """The tensor with exactly the value's shape, expanded."""
        return self.form(value, value.dims)

    def settle(self, value: DraftValue, merge: Iterable[int] = ()) -> DraftValue:
        """Make every dim in ``merge``, and every atom of the others, a whole dim of its base; expanded atoms of the others stay lazy.

        Base order is kept where it can be: a merged group lies where its last atom lies.
        """
        merge = set(merge)
        groups: list[tuple[tuple[int, int], int, D.Group]] = []
        for d, group in enumerate(value.dims):
            if d in merge:
                inner = [atom for atom in group if atom[0] != D.BROADCAST]
                groups.append((max(map(D.place, inner)) if inner else (-1, d), d, group))
            else:
                groups.extend((D.place(atom), d, (atom,)) for atom in group if atom[0] != D.BROADCAST)
        groups.sort(key=lambda item: item[0])
        base = self.form(value, tuple(group for _, _, group in groups))
        self._merged.update((value.base, D.solid(value.dims[d])) for d in merge)
        where: dict[Any, int] = {("merged", d) if d in merge else group[0]: i for i, (_, d, group) in enumerate(groups)}
        result: list[D.Group] = []
        for d, group in enumerate(value.dims):
            if d in merge:
                result.append(((where["merged", d], 1, D.size(group)),))
            else:
                result.append(tuple(atom if atom[0] == D.BROADCAST else (where[atom], 1, atom[2]) for atom in group))
        return DraftValue(base, tuple(result), value.raws)

    def merged(self, value: DraftValue, d: int) -> bool:
        """Whether dim ``d`` of the value was made whole before, for another reader."""
        return (value.base, D.solid(value.dims[d])) in self._merged

    def is_whole(self, value: DraftValue, d: int) -> bool:
        """Whether dim ``d`` is one full dim of the base."""
        group = value.dims[d]
        return len(group) == 1 and group[0][0] != D.BROADCAST and group[0][2] == self.base_shape(value)[group[0][0]]

    def make_whole(self, value: DraftValue, *where: int) -> DraftValue:
        """The value with these dims whole dims of the base."""
        if all(self.is_whole(value, d) for d in where):
            return value
        return self.settle(value, where)

    def real(self, value: DraftValue) -> DraftValue:
        """The value without lazy expansion."""
        if all(atom[0] != D.BROADCAST for group in value.dims for atom in group):
            return value
        return self.whole(self.plain(value))


def _numel(shape: Shape) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _key(value: Any) -> Any:
    """A hashable stand-in that tells 1, 1.0 and True apart."""
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(_key(item) for item in value)
    return (type(value).__name__, repr(value))


Result = DraftValue | tuple[DraftValue | None, ...]


@dataclass(slots=True)
class Context:
    """What every cleaning handler gets, and how it writes an op unchanged.

    Attributes:
        readers: the nodes that read each raw node.
        draft: the program so far.
        values: the results of every raw node met.
    """

    readers: Mapping[str, Sequence[RawNode]] = field(default_factory=dict)
    draft: ProgramDraft = field(default_factory=ProgramDraft)
    values: list[tuple[DraftValue | None, ...]] = field(default_factory=list)

    def value(self, use: Use) -> DraftValue:
        """The value that a raw argument stands for."""
        found = self.values[use.node][use.result]
        assert found is not None, use
        return found

    def first(self, node: RawNode) -> DraftValue:
        """The first tensor argument."""
        return self.value(next(item for item in node.arguments.values() if isinstance(item, Use)))

    def result(self, node: RawNode, index: int = 0) -> tuple[Shape, str]:
        """Raw shape and dtype of a result."""
        found = node.results[index]
        assert found is not None, node.name
        return found

    def generic(self, node: RawNode) -> Result:
        """Write the op as it is, on operands of exactly the raw shapes."""
        operands: list[int] = []
        attributes = refer(node.arguments, lambda use: self.draft.plain(self.value(use)), operands)
        return self.write(node, node.op, operands, attributes)

    def binary(self, node: RawNode, name: str, one: DraftValue, two: DraftValue, extra: Mapping[str, Any]) -> DraftValue:
        """Write a pointwise op of two values (``self`` and ``other``) that the raw node implies."""
        shape, dtype = self.result(node)
        common = align(self.draft, [one, two], shape)
        operands: list[int] = list(dict.fromkeys(common.tensors))
        refs = [Ref(operands.index(t)) for t in common.tensors]
        attributes = {"self": refs[0], "other": refs[1], **extra}
        made = self.draft.emit(name, operands, attributes, [(common.shape, dtype)], raws=(*one.raws, *two.raws))
        return DraftValue(made[0], common.dims)

    def write(self, node: RawNode, name: str, operands: Sequence[int], attributes: Mapping[str, Any]) -> Result:
        """Write an op whose results have the raw shapes."""
        raws = [raw for use in uses_of(node) for raw in self.value(use).raws]
        real = [r for r in node.results if r is not None]
        made = iter(self.draft.emit(name, operands, attributes, real, raws=raws, random=node.random))
        return tuple(None if r is None else self.draft.whole(next(made)) for r in node.results)


def uses_of(node: RawNode) -> list[Use]:
    """Tensor arguments in schema order."""
    return list(uses(tuple(node.arguments.values())))


def refer(arguments: Mapping[str, Any], tensor_of: Any, operands: list[int]) -> dict[str, Any]:
    """Arguments as op attributes: each Use becomes a Ref into ``operands``, which is filled with ``tensor_of(use)``."""

    def walk(value: Any) -> Any:
        if isinstance(value, Use):
            tensor = tensor_of(value)
            if tensor not in operands:
                operands.append(tensor)
            return Ref(operands.index(tensor))
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        return value

    return {name: walk(item) for name, item in arguments.items()}


Slot = tuple[int, int]
"""Raw dim, and which of the separate dims it became."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Operands of one op in a common form.

    Attributes:
        tensors: one per value, each broadcasting against ``shape``.
        shape: sizes of the common form.
        dims: the raw result as a lazy view of a tensor of that shape.
        position: raw dim to its dim in the common form, for the whole ones.
    """

    tensors: tuple[int, ...]
    shape: Shape
    dims: D.Dims
    position: dict[int, int]


def align(
    draft: ProgramDraft,
    values: Sequence[DraftValue],
    shape: Shape,
    *,
    whole: Collection[int] = (),
    expanded: bool = False,
    ordered: bool = False,
    tails: Sequence[int] | None = None,
) -> Aligned:
    """Find the common form of values that broadcast to ``shape``.

    Bring the operands of a row-wise op to one shape in which merged dims are apart again.

    Pointwise ops, norms and losses do not care that (batch, sequence) was flattened: the operands' bases are read with
    separate dims, the op runs on those, and its result is a lazy view that is flattened in the same way.

    Args:
        whole: raw dims that must be one dim each (softmax dim, normalised dims, the dim of a concatenation).
        expanded: lazily expanded operands must be real (random ops, ops that are not pointwise).
        ordered: keep the raw order of dims; otherwise the order that needs the fewest permutes.
        tails: per value, how many trailing dims of ``shape`` it lacks (row operands of losses and embeddings).
    """
    quick = None if ordered or tails else _same(draft, values, shape, whole, expanded)
    if quick is not None:
        return quick
    rank = len(shape)
    lacks = tuple(tails) if tails is not None else (0,) * len(values)
    padded = [((),) * (rank - lack - len(v.dims)) + v.dims + ((),) * lack for v, lack in zip(values, lacks, strict=True)]
    slots: list[Slot] = []
    sizes: dict[Slot, int] = {}
    parts: list[dict[Slot, D.Group]] = [{} for _ in values]
    lazy: dict[int, D.Group] = {}
    for d, n in enumerate(shape):
        groups = [dims[d] for dims in padded]
        lengths, hollow = _cut(groups, n, d in whole, expanded)
        if hollow is not None:
            lazy[d] = hollow
            continue
        for j, length in enumerate(lengths):
            slots.append((d, j))
            sizes[d, j] = length
        for part, group in zip(parts, groups, strict=True):
            if D.size(group) == 1 and n != 1:
                continue
            if len(lengths) == 1:
                pieces: list[D.Group] | None = [group]
            else:
                pieces = D.match(group, lengths)
            assert pieces is not None
            for j, piece in enumerate(pieces):
                hidden = not expanded and d not in whole and bool(piece) and all(atom[0] == D.BROADCAST for atom in piece)
                part[d, j] = () if hidden else piece
    hidden_slots = {s for s in slots if sizes[s] != 1 and s[0] not in whole and not expanded and not any(part.get(s) for part in parts)}
    every, slots = slots, [s for s in slots if s not in hidden_slots]
    if not ordered:
        slots = _order(slots, parts, values)
    tensors = []
    for value, part, lack in zip(values, parts, lacks, strict=True):
        if not value.dims and not lack and rank:
            tensors.append(draft.plain(value))
            continue
        keep = [slot for slot in slots if slot[0] < rank - lack]
        while keep and not lack and keep[0][0] < rank - len(value.dims):
            keep.pop(0)
        tensors.append(draft.form(value, tuple(part.get(slot, ()) for slot in keep), trim=not lack and not whole))
    common = tuple(sizes[slot] for slot in slots)
    if not any(lacks):
        have = max((len(draft.tensors[t].shape) for t in tensors), default=0)
        lost = len(common) - have
    else:
        lost = 0
    where = {slot: i - lost for i, slot in enumerate(slots)}
    dims: list[D.Group] = []
    for d in range(rank):
        if d in lazy:
            dims.append(lazy[d])
        else:
            mine = [s for s in every if s[0] == d and where.get(s, 0) >= 0]
            dims.append(tuple((D.BROADCAST, 0, sizes[s]) if s in hidden_slots else (where[s], 1, sizes[s]) for s in mine))
    position = {d: where[d, 0] for d in whole if (d, 0) in where}
    return Aligned(tensors=tuple(tensors), shape=common[lost:], dims=tuple(dims), position=position)


def _same(draft: ProgramDraft, values: Sequence[DraftValue], shape: Shape, whole: Collection[int], expanded: bool) -> Aligned | None:
    """All operands are the same view of equal bases (or scalars): run on the bases as they are."""
    shaped = [v for v in values if v.dims]
    if not shaped or shaped[0].shape != shape:
        return None
    first, base = shaped[0], draft.base_shape(shaped[0])
    if any(v.dims != first.dims or draft.base_shape(v) != base for v in shaped[1:]):
        return None
    if any(not draft.is_whole(first, d) for d in whole):
        return None
    if expanded and any(atom[0] == D.BROADCAST for group in first.dims for atom in group):
        return None
    tensors = tuple(v.base if v.dims else draft.plain(v) for v in values)
    return Aligned(tensors=tensors, shape=base, dims=first.dims, position={d: first.dims[d][0][0] for d in whole})


def _cut(groups: Sequence[D.Group], n: int, whole: bool, expanded: bool) -> tuple[tuple[int, ...], D.Group | None]:
    """Sizes of the separate dims of one raw dim; or, where every operand is expanded along it, the expanded group."""
    if whole or n == 1:
        return (n,), None
    full = [group for group in groups if D.size(group) == n]
    solid = full if expanded else [group for group in full if D.real(group)]
    if not solid:
        return (), D.solid(full[0]) if full else ((D.BROADCAST, 0, n),)
    with_units = {tuple(atom[2] for atom in group) for group in solid}
    if len(with_units) == 1 and len(solid) == len(full):
        return with_units.pop(), None
    return D.common([D.solid(group) for group in full]), None


def _order(slots: list[Slot], parts: Sequence[dict[Slot, D.Group]], values: Sequence[DraftValue]) -> list[Slot]:
    """Raw order, or the largest operand's own order where that leaves fewer operands to permute."""
    places = [{slot: max(map(D.place, D.real(piece))) for slot, piece in part.items() if D.real(piece)} for part in parts]
    largest = max(range(len(values)), key=lambda i: len(places[i]))
    keys: dict[Slot, tuple[int, int]] = {}
    last = (-1, 0)
    for slot in slots:
        last = keys[slot] = places[largest].get(slot, last)
    own = sorted(slots, key=lambda slot: keys[slot])

    def permuted(order: list[Slot]) -> int:
        return sum([p[s] for s in order if s in p] != sorted(p.values()) for p in places)

    return own if permuted(own) < permuted(slots) else slots
