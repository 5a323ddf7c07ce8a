"""The program while it is being cleaned: real tensors and ops so far, and lazy views over them.

Every raw value is a ``Value``: a tensor that exists plus a lazy view of it. Ops ask for the form they need
(``Draft.form``), and only then view, permute and expand ops are written, each at most once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from solver_shard.frontends import dims as D
from solver_shard.frontends.raw import RawNode
from solver_shard.program import Phase, Ref, Tensor

Shape = tuple[int, ...]
CONSTANT_LIMIT = 1 << 22
"""Equal values that depend on no input are merged up to this many elements; larger ones would hold memory for long."""


@dataclass(frozen=True, slots=True)
class Value:
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
class Draft:
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

    def source(self, tensor: Tensor) -> Value:
        """A parameter, buffer or input."""
        self.tensors.append(tensor)
        return self.whole(len(self.tensors) - 1)

    def whole(self, tensor: int) -> Value:
        """The tensor as it is."""
        return Value(tensor, D.identity(self.tensors[tensor].shape))

    def base_shape(self, value: Value) -> Shape:
        return self.tensors[value.base].shape

    def dtype(self, value: Value) -> str:
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

    def form(self, value: Value, groups: D.Dims, *, trim: bool = False) -> int:
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

    def _split(self, value: Value, wanted: list[D.Atom]) -> tuple[int, list[int]]:
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

    def plain(self, value: Value) -> int:
        """The tensor with exactly the value's shape, expanded."""
        return self.form(value, value.dims)

    def settle(self, value: Value, merge: Iterable[int] = ()) -> Value:
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
        return Value(base, tuple(result), value.raws)

    def merged(self, value: Value, d: int) -> bool:
        """Whether dim ``d`` of the value was made whole before, for another reader."""
        return (value.base, D.solid(value.dims[d])) in self._merged

    def is_whole(self, value: Value, d: int) -> bool:
        """Whether dim ``d`` is one full dim of the base."""
        group = value.dims[d]
        return len(group) == 1 and group[0][0] != D.BROADCAST and group[0][2] == self.base_shape(value)[group[0][0]]

    def make_whole(self, value: Value, *where: int) -> Value:
        """The value with these dims whole dims of the base."""
        if all(self.is_whole(value, d) for d in where):
            return value
        return self.settle(value, where)

    def real(self, value: Value) -> Value:
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
