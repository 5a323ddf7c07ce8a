"""What differs between two plans of one step: collectives and layouts, copies of a layer together, the largest effect first.

>>> print(difference(found.row("ours"), found.row("dp=zero3,tp=megatron")))

The effect of a tensor is the difference in what its transitions cost, for parameters the gradient's way to the update and the new
values' way home too, and, where these are equal, in bytes per device. Activations are those that modules hand on, and those whose
transitions cost something else. Layouts of an axis that one of the plans has split are said of the whole axis where all parts are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.modules import module_outputs
from solver_shard.names import fold_names, template, text_of
from solver_shard.plan.codec import encode
from solver_shard.plan.plan import Plan
from solver_shard.plan.report import CLIPPED, PURPOSES, local_nbytes, output_names, purpose_of_collective
from solver_shard.plan.table import shorten, table
from solver_shard.study.changes import signed_bytes, signed_ns
from solver_shard.units import format_bytes, format_ns

if TYPE_CHECKING:
    from solver_shard.study.compare import Row

MAX_ROWS = 24
WIDTH = 60

_Move = tuple[int, int, int, str]
"""How often a collective runs in a step, its bytes and nanoseconds all times together, and of which tensor it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Collectives of one kind, over the same axes and for one purpose, of the tensors for which the plans differ in them.

    Attributes:
        names: these tensors, copies of a layer folded, the largest difference first.
        count, nbytes, nanoseconds: of the first plan and of the second, per step, summed.
    """

    purpose: str
    kind: str
    axes: str
    names: tuple[str, ...]
    count: tuple[int, int]
    nbytes: tuple[int, int]
    nanoseconds: tuple[int, int]

    @property
    def delta_ns(self) -> int:
        """What the second pays more."""
        return self.nanoseconds[1] - self.nanoseconds[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """Alike tensors that lie otherwise.

    Attributes:
        names: folded; ``count`` tensors.
        layouts: in the first plan and in the second, as text: how it is stored or made, its optimizer state, copies for readers.
        delta_ns, delta_bytes: what the second pays more for their transitions per step, and holds more of them per device, all together.
    """

    role: str
    names: tuple[str, ...]
    count: int
    layouts: tuple[str, str]
    delta_ns: int
    delta_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two rows of a comparison.

    Attributes:
        names: of the rows.
        figures: what is measured, and its value in both, in nanoseconds or bytes. A step is compute, update and communication, and
            communication is all collectives less what overlap hides of them.
        collectives, tensors: what differs, largest effect first.
        alike: how many tensors lie alike in both.
    """

    names: tuple[str, str]
    figures: Mapping[str, tuple[int, int]]
    collectives: tuple[Moved, ...]
    tensors: tuple[Laid, ...]
    alike: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found: dict[str, Any] = encode(self)
        return found

    def __str__(self) -> str:
        return text_of(_lines(self))


def difference(one: Row, two: Row) -> Difference:
    """What differs between two plans for the same step."""
    hidden = [sum(c.runs * c.nanoseconds for c in row.plan.collectives()) - row.communication_ns for row in (one, two)]
    figures = {
        "step": (one.step_ns, two.step_ns),
        "compute": (one.compute_ns, two.compute_ns),
        "update": (one.update_ns, two.update_ns),
        "communication": (one.communication_ns, two.communication_ns),
        "hidden": (hidden[0], hidden[1]),
        "peak": (one.peak, two.peak),
    }
    tensors, alike = _tensors(one.plan, two.plan)
    return Difference(
        names=(one.name, two.name), figures=figures, collectives=_collectives(one.plan, two.plan), tensors=tensors, alike=alike
    )


def _collectives(one: Plan, two: Plan) -> tuple[Moved, ...]:
    """Collectives of tensors for which they differ in number, bytes or time; their times add up to what all collectives differ by."""
    sides = [_moves(plan) for plan in (one, two)]
    groups: dict[tuple[str, str, str], list[tuple[list[_Move], list[_Move]]]] = {}
    for key in dict.fromkeys((*sides[0], *sides[1])):
        a, b = (side.get(key, []) for side in sides)
        if _sums(a) != _sums(b):
            groups.setdefault(key[:3], []).append((a, b))
    found = []
    for (purpose, kind, axes), pairs in groups.items():
        pairs.sort(key=lambda pair: -abs(_sums(pair[1])[2] - _sums(pair[0])[2]))
        names = fold_names(dict.fromkeys(name for pair in pairs for items in pair for *_, name in items))
        sums = [_sums([item for pair in pairs for item in pair[k]]) for k in (0, 1)]
        count, nbytes, nanoseconds = zip(*sums, strict=True)
        found.append(Moved(purpose=purpose, kind=kind, axes=axes, names=tuple(names), count=count, nbytes=nbytes, nanoseconds=nanoseconds))
    order = {purpose: k for k, purpose in enumerate(PURPOSES)}
    return tuple(sorted(found, key=lambda m: (-abs(m.delta_ns), order.get(m.purpose, 0), m.kind, m.axes)))


def _sums(items: Sequence[_Move]) -> tuple[int, int, int]:
    return sum(item[0] for item in items), sum(item[1] for item in items), sum(item[2] for item in items)


def _moves(plan: Plan) -> dict[tuple[str, str, str, str], list[_Move]]:
    """Collectives by purpose, kind, axes and form of the tensor's name: how often, bytes, nanoseconds, name."""
    owners = {gradient: name for name, gradient in plan.gradients.items()}
    found: dict[tuple[str, str, str, str], list[_Move]] = {}
    for c in plan.collectives():
        name = CLIPPED if c.op is None else plan.ops[c.op].module or plan.ops[c.op].name
        if c.reshard is not None:
            t = plan.reshards[c.reshard].tensor
            name = owners.get(t, plan.tensors[t].name)
        key = (purpose_of_collective(plan, c), c.kind, ",".join(plan.mesh.joined(c.axes)), template(name))
        found.setdefault(key, []).append((c.runs, c.runs * c.nbytes, c.runs * c.nanoseconds, name))
    return found


def _tensors(one: Plan, two: Plan) -> tuple[tuple[Laid, ...], int]:
    """Tensors that both plans have and that lie otherwise, and how many lie alike."""
    sides = [_Side(plan) for plan in (one, two)]
    groups: dict[tuple[str, str, str, str], list[tuple[str, int, int]]] = {}
    alike = 0
    for name, t in sides[0].positions.items():
        if name not in sides[1].positions:
            continue
        u = sides[1].positions[name]
        texts = (sides[0].text(t), sides[1].text(u))
        if texts[0] == texts[1]:
            alike += 1
            continue
        role = one.tensors[t].role
        cost = sides[1].nanoseconds.get(name, 0) - sides[0].nanoseconds.get(name, 0)
        if role == "activation" and not cost and t not in sides[0].handed_on:
            continue
        held = sides[1].nbytes(u) - sides[0].nbytes(t)
        groups.setdefault((role, template(name), *texts), []).append((sides[0].handed_on.get(t, name), cost, held))
    found = [
        Laid(
            role=role,
            names=tuple(fold_names(name for name, _, _ in items)),
            count=len(items),
            layouts=(a, b),
            delta_ns=sum(cost for _, cost, _ in items),
            delta_bytes=sum(held for _, _, held in items),
        )
        for (role, _, a, b), items in groups.items()
    ]
    return tuple(sorted(found, key=lambda x: (-abs(x.delta_ns), -abs(x.delta_bytes), x.names))), alike


class _Side:
    """One plan, by tensor name."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.positions = {tensor.name: t for t, tensor in enumerate(plan.tensors) if tensor.role != "gradient"}
        self.made = {t: layout for op in plan.ops for t, layout in zip(op.results, op.result_layouts, strict=True)}
        self.read: dict[int, dict[str, list[Layout]]] = {}
        self.nanoseconds: dict[str, int] = {}
        owners: dict[int, list[str]] = {}
        for name, gradient in plan.gradients.items():
            owners.setdefault(gradient, []).append(name)
        for c in plan.collectives():
            if c.reshard is not None:
                t = plan.reshards[c.reshard].tensor
                name = owners.get(t, [plan.tensors[t].name])[0]
                self.nanoseconds[name] = self.nanoseconds.get(name, 0) + c.runs * c.nanoseconds
        for reshard in plan.reshards:
            if reshard.purpose in ("forward", "backward", "output") and reshard.layout != reshard.source:
                layouts = self.read.setdefault(reshard.tensor, {}).setdefault(reshard.purpose, [])
                layouts += [] if reshard.layout in layouts else [reshard.layout]
        forward = [op for op in plan.ops if op.phase == "forward"]
        self.handed_on = output_names(module_outputs(forward, plan.outputs))

    def text(self, t: int) -> str:
        """``S(0)R, state S(0)S(0), forward RR``: how it lies, its optimizer state where that is another, and copies for readers."""
        tensor = self.plan.tensors[t]
        layout = self.made.get(t, tensor.layout)
        said = [_whole(layout, self.mesh)]
        if tensor.state is not None and tensor.state != layout:
            said.append(f"state {_whole(tensor.state, self.mesh)}")
        for purpose, layouts in sorted(self.read.get(t, {}).items(), reverse=True):
            said += [f"{purpose} {' and '.join(_whole(x, self.mesh) for x in layouts)}"]
        return ", ".join(said)

    def nbytes(self, t: int) -> int:
        """Bytes per device as it is stored or made."""
        tensor = self.plan.tensors[t]
        return local_nbytes(self.plan, tensor.shape, tensor.dtype, self.made.get(t, tensor.layout))


def _whole(layout: Layout, mesh: Mesh) -> str:
    """A layout with one placement for every axis of the whole mesh, where the parts of each are alike."""
    parts = [[layout[a] for a in mesh.positions(name)] for name in mesh.whole.names]
    return "".join(str(found[0]) for found in parts) if all(len(set(found)) == 1 for found in parts) else str(layout)


def _lines(found: Difference) -> list[str]:
    a, b = found.names
    figures = [("", "A", "B", "B - A")]
    for what, (x, y) in found.figures.items():
        if what == "hidden" and not x and not y:
            continue
        show = format_bytes if what == "peak" else format_ns
        figures.append((what, show(x), show(y), _signed(y - x, what == "peak")))
    lines = [f"A  {a}", f"B  {b}", "", *table(figures, right=(1, 2, 3))]
    if found.collectives:
        moved: list[tuple[str, ...]] = [("B - A", "purpose", "collective", "axes", "A", "B", "tensors")]
        for m in found.collectives[:MAX_ROWS]:
            cells = [f"{n}, {format_bytes(size)}, {format_ns(ns)}" if n else "-" for n, size, ns in _pairs(m)]
            moved.append((_signed(m.delta_ns), m.purpose, m.kind, m.axes, *cells, shorten(m.names, WIDTH)))
        lines += ["", "Collectives that differ, per step: count, bytes per device and time, summed", *table(moved, right=(0,), header=True)]
        lines += _more(found.collectives)
    if found.tensors:
        laid: list[tuple[str, ...]] = [("B - A", "tensor", "", "A", "B")]
        for tensor in found.tensors[:MAX_ROWS]:
            effect = _signed(tensor.delta_ns) if tensor.delta_ns else _signed(tensor.delta_bytes, True)
            laid.append((effect, shorten(tensor.names, WIDTH), f"x{tensor.count}" if tensor.count > 1 else "", *tensor.layouts))
        lines += [
            "",
            f"Layouts that differ ({found.alike:,} tensors lie alike), with what transitions cost more, or else bytes",
            *table(laid, right=(0,), header=True),
            *_more(found.tensors),
        ]
    if not found.collectives and not found.tensors:
        lines += ["", "Every tensor lies alike, and all collectives are the same."]
    return lines


def _pairs(m: Moved) -> list[tuple[int, int, int]]:
    return [(m.count[k], m.nbytes[k], m.nanoseconds[k]) for k in (0, 1)]


def _signed(value: int, is_bytes: bool = False) -> str:
    return "0" if not value else signed_bytes(value) if is_bytes else signed_ns(value)


def _more(items: tuple[object, ...]) -> list[str]:
    return [f"  ... {len(items) - MAX_ROWS} more of less effect (--json has all)"] if len(items) > MAX_ROWS else []
