"""What differs between two plans of one step: collectives and layouts, copies of a layer together, the largest effect first.

>>> print(difference(found.row("ours"), found.row("dp=zero3,tp=megatron")))

The effect of a tensor is the difference in what its transitions cost, for parameters the gradient's way to the update and the new
values' way home too, and, where these are equal, in bytes per device. Activations are those that modules hand on, and those whose
transitions cost something else. Layouts of an axis that one of the plans has split are said of the whole axis where all parts are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solver_shard.codec import encode
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan
from solver_shard.plan.summary import CLIPPED, PURPOSES, local_nbytes, output_names, purpose_of_collective
from solver_shard.program import DTYPE_BYTES, module_outputs
from solver_shard.text import fold_items, fold_names, format_bytes, format_ns, shorten, table, template, text_of

if TYPE_CHECKING:
    from solver_shard.analysis.compare import Row


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


# What differs between two plans for the same step: collectives, time, memory, and the layouts of tensors, folded by repeated layer.
#
# >>> found = changes(before, after)
# >>> found.collectives[0]
# CollectiveChange(kind='all_gather', axes=('tp',), nbytes=67108864, count=32, nanoseconds=12100000)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """Calls of one collective that a step makes more, or (negative) fewer, or as many that take another time (launches are shared).

    Attributes:
        nbytes: of one call, per device.
        count: calls.
        nanoseconds: of all of them, before overlap.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    count: int
    nanoseconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChange:
    """A tensor whose layout is another one, or ``count`` alike.

    Attributes:
        name: folded over numbers.
        before, after: what is said of it, as in ``RR, state S(0)S(0)``.
        nbytes: global size of all of them.
    """

    name: str
    count: int
    before: str
    after: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """From one plan to another; numbers are the second's less the first's.

    Attributes:
        compute_ns, update_ns, communication_ns, total_ns: parts of the step time; the first three add up to the last.
        hidden_ns: what overlap hides of the collectives; these, less it, add up to ``communication_ns``.
        peak: bytes per device.
        collectives: those whose number or time differs, the most time first.
        layouts: the largest first.
    """

    compute_ns: int
    update_ns: int
    communication_ns: int
    hidden_ns: int
    total_ns: int
    peak: int
    collectives: tuple[CollectiveChange, ...]
    layouts: tuple[LayoutChange, ...]

    @property
    def nothing(self) -> bool:
        """Whether the two plans do the same."""
        return not (self.collectives or self.layouts or self.total_ns or self.peak)


def changes(before: Plan, after: Plan) -> Changes:
    """Compare two plans on the same mesh, tensor by tensor of the same name."""
    a, b = before.costs, after.costs
    return Changes(
        compute_ns=b.compute_ns - a.compute_ns,
        update_ns=b.update_ns - a.update_ns,
        communication_ns=b.communication_ns - a.communication_ns,
        hidden_ns=b.hidden_ns - a.hidden_ns,
        total_ns=b.total_ns - a.total_ns,
        peak=after.memory.peak - before.memory.peak,
        collectives=_collective_changes(before, after),
        layouts=_layout_changes(before, after),
    )


def _collective_changes(before: Plan, after: Plan) -> tuple[CollectiveChange, ...]:
    counts: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    times: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for plan, sign in ((before, -1), (after, 1)):
        for c in plan.collectives():
            key = (c.kind, tuple(plan.mesh.joined(c.axes)), c.nbytes)
            counts[key] += sign * c.runs
            times[key] += sign * c.runs * c.nanoseconds
    found = [
        CollectiveChange(kind=kind, axes=axes, nbytes=nbytes, count=count, nanoseconds=times[kind, axes, nbytes])
        for (kind, axes, nbytes), count in counts.items()
        if count or times[kind, axes, nbytes]
    ]
    return tuple(sorted(found, key=lambda c: (-abs(c.nanoseconds), c.kind, c.axes, c.nbytes)))


def _layout_changes(before: Plan, after: Plan) -> tuple[LayoutChange, ...]:
    ours, theirs = _said(before), _said(after)
    items = []
    for name, (first, size, dtype_bytes) in ours.items():
        if name not in theirs:
            continue
        second = theirs[name][0]
        if first != second:
            items.append((name, (*_differing(first, second), size * dtype_bytes)))
    folded = [
        LayoutChange(name=name, count=count, before=one, after=two, nbytes=count * nbytes)
        for name, (one, two, nbytes), count in fold_items(items)
    ]
    return tuple(sorted(folded, key=lambda c: (-c.nbytes, c.name)))


Said = tuple[tuple[str, Layout], ...]


def _said(plan: Plan) -> dict[str, tuple[Said, int, int]]:
    """By tensor: what is said of its layouts, its elements, and the bytes of one."""
    reads: dict[int, list[tuple[str, Layout]]] = {}
    for reshard in plan.reshards:
        if reshard.purpose in ("forward", "backward"):
            reads.setdefault(reshard.tensor, []).append((f"{reshard.purpose} {reshard.family}", reshard.layout))
    found = {}
    for t, tensor in enumerate(plan.tensors):
        state = [] if tensor.state is None else [("state", tensor.state)]
        said = (("", tensor.layout), *state, *reads.get(t, ()))
        elements = 1
        for size in tensor.shape:
            elements *= size
        found[tensor.name] = (tuple(said), elements, DTYPE_BYTES[tensor.dtype])
    return found


def _differing(first: Said, second: Said) -> tuple[str, str]:
    """The parts that differ, as text: ``RR``, ``state S(0)S(0)``, ``S(0)R in forward``."""
    one, two = dict(first), dict(second)
    keys = [key for key in dict.fromkeys((*one, *two)) if one.get(key) != two.get(key)]
    if "" in keys or "state" in keys:  # readers follow
        keys = [key for key in keys if key in ("", "state")]
    return _parts(one, keys), _parts(two, keys)


def _parts(said: dict[str, Layout], keys: list[str]) -> str:
    texts = []
    for key in keys:
        if key in said:
            phase, _, family = key.partition(" ")
            layout = str(said[key])
            texts.append(layout if not key else f"state {layout}" if key == "state" else f"{layout} for {phase} {family}")
    return ", ".join(dict.fromkeys(texts)) or "-"


def brief(found: Changes, most: int = 2) -> str:
    """The collectives that differ most, in one line: ``+32 all_gather tp 64.0 MiB; -32 ...; 3 more``."""
    counts = [f"{c.count:+}" if c.count else f"{signed_ns(c.nanoseconds)} of" for c in found.collectives[:most]]
    texts = [f"{n} {c.kind} {','.join(c.axes)} {format_bytes(c.nbytes)}" for n, c in zip(counts, found.collectives, strict=False)]
    rest = len(found.collectives) - len(texts)
    texts += [f"{rest} more"] if rest else []
    if not texts:
        compute = found.compute_ns + found.update_ns
        return f"{signed_ns(compute)} of compute, no other collectives" if compute else "layouts only: the same collectives and time"
    return "; ".join(texts)


def signed_ns(nanoseconds: int) -> str:
    """``+12.1 ms``, ``-3 ns``."""
    return f"{'-' if nanoseconds < 0 else '+'}{format_ns(abs(nanoseconds))}"


def signed_bytes(nbytes: int) -> str:
    """``+1.50 GiB``, ``-8 B``."""
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"
