"""What differs between two plans of one step: collectives and layouts, copies of a layer together, the largest effect first.

>>> print(difference(comparison.row("ours"), comparison.row("dp=zero3,tp=megatron")))
>>> changes(before, after).collectives[0]
CollectiveChange(kind='all_gather', axes=('tp',), nbytes=67108864, count=32, nanoseconds=12100000)

Both read every collective of a step once (:meth:`solver_shard.plan.plan.Plan.collectives`), and all of a tensor in a
:class:`solver_shard.plan.index.PlanIndex`.

:func:`difference` is what ``compare --diff`` shows of two rows of a comparison: collectives by what they are for, and layouts of tensors
with the effect of each. That is the difference in what its transitions cost, for parameters the gradient's way to the update and the new
values' way home too, and, where these are equal, in bytes per device. Activations are those that modules hand on, and those whose
transitions cost something else. Layouts of an axis that one of the plans has split are said of the whole axis where all parts are alike.

:func:`changes` is what ``explain`` shows of the plan that another layout of one tensor leads to: the calls that are more or fewer, and the
layouts that change with it; those that readers get where the tensor itself stays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from solver_shard.codec import encode
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.plan.index import PURPOSES, PlanIndex, purpose_of_collective
from solver_shard.plan.plan import Collective, Plan
from solver_shard.plan.summary import CLIPPED, local_nbytes
from solver_shard.program import DTYPE_BYTES
from solver_shard.text import fold_items, fold_names, format_bytes, format_ns, shorten, table, template, text_of

if TYPE_CHECKING:
    from solver_shard.analysis.compare import ComparisonRow


MAX_ROWS = 24
WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveDifference:
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
class TensorDifference:
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
class PlanDifference:
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
    collectives: tuple[CollectiveDifference, ...]
    tensors: tuple[TensorDifference, ...]
    alike: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found: dict[str, Any] = encode(self)
        return found

    def __str__(self) -> str:
        return text_of(_lines(self))


def difference(one: ComparisonRow, two: ComparisonRow) -> PlanDifference:
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
    return PlanDifference(
        names=(one.name, two.name), figures=figures, collectives=_collectives(one.plan, two.plan), tensors=tensors, alike=alike
    )


@dataclass(slots=True)
class _Tally:
    """Collectives of one plan, per step: how many, bytes and nanoseconds of all; and of which tensors, modules or else they are."""

    count: int = 0
    nbytes: int = 0
    nanoseconds: int = 0
    names: dict[str, None] = field(default_factory=dict, compare=False)

    def add(self, count: int, nbytes: int, nanoseconds: int, names: Iterable[str]) -> None:
        self.count, self.nbytes, self.nanoseconds = self.count + count, self.nbytes + nbytes, self.nanoseconds + nanoseconds
        self.names |= dict.fromkeys(names)


Key = TypeVar("Key", bound=Hashable)


def _tallies(one: Plan, two: Plan, key: Callable[[Plan, Collective, str], Key]) -> dict[Key, tuple[_Tally, _Tally]]:
    """The collectives of both plans by a key of each and of what it is of, where they differ in number, bytes or time."""
    tallies: dict[Key, tuple[_Tally, _Tally]] = {}
    for k, plan in enumerate((one, two)):
        index = PlanIndex(plan)
        for c in plan.collectives():
            name = CLIPPED if c.op is None else plan.ops[c.op].module or plan.ops[c.op].name
            if c.reshard is not None:
                name = index.owner(plan.reshards[c.reshard].tensor)
            pair = tallies.setdefault(key(plan, c, name), (_Tally(), _Tally()))
            pair[k].add(c.runs, c.runs * c.nbytes, c.runs * c.nanoseconds, (name,))
    return {key: (a, b) for key, (a, b) in tallies.items() if a != b}


def _collectives(one: Plan, two: Plan) -> tuple[CollectiveDifference, ...]:
    """Collectives of tensors for which they differ in number, bytes or time; their times add up to what all collectives differ by."""

    def of_tensors(plan: Plan, c: Collective, name: str) -> tuple[str, str, str, str]:
        return purpose_of_collective(plan, c), c.kind, ",".join(plan.mesh.joined(c.axes)), template(name)

    groups: dict[tuple[str, str, str], list[tuple[_Tally, _Tally]]] = {}
    for (purpose, kind, axes, _), pair in _tallies(one, two, of_tensors).items():
        groups.setdefault((purpose, kind, axes), []).append(pair)
    rows = []
    for (purpose, kind, axes), pairs in groups.items():
        pairs.sort(key=lambda pair: -abs(pair[1].nanoseconds - pair[0].nanoseconds))
        rows.append(
            CollectiveDifference(
                purpose=purpose,
                kind=kind,
                axes=axes,
                names=tuple(fold_names(dict.fromkeys(name for pair in pairs for tally in pair for name in tally.names))),
                count=(sum(a.count for a, _ in pairs), sum(b.count for _, b in pairs)),
                nbytes=(sum(a.nbytes for a, _ in pairs), sum(b.nbytes for _, b in pairs)),
                nanoseconds=(sum(a.nanoseconds for a, _ in pairs), sum(b.nanoseconds for _, b in pairs)),
            )
        )
    order = {purpose: k for k, purpose in enumerate(PURPOSES)}
    return tuple(sorted(rows, key=lambda row: (-abs(row.delta_ns), order.get(row.purpose, 0), row.kind, row.axes)))


def _tensors(one: Plan, two: Plan) -> tuple[tuple[TensorDifference, ...], int]:
    """Tensors that both plans have and that lie otherwise, and how many lie alike."""
    first, second = _Side(one), _Side(two)
    groups: dict[tuple[str, str, str, str], list[tuple[str, int, int]]] = {}
    alike = 0
    for name, t in first.index.positions.items():
        u, role = second.index.positions.get(name), one.tensors[t].role
        if u is None or "gradient" in (role, two.tensors[u].role):
            continue
        texts = (first.text(t), second.text(u))
        if texts[0] == texts[1]:
            alike += 1
            continue
        cost = second.nanoseconds[name] - first.nanoseconds[name]
        if role == "activation" and not cost and t not in first.index.output_names:
            continue
        more_bytes = second.nbytes(u) - first.nbytes(t)
        groups.setdefault((role, template(name), *texts), []).append((first.index.output_names.get(t, name), cost, more_bytes))
    rows = [
        TensorDifference(
            role=role,
            names=tuple(fold_names(name for name, _, _ in items)),
            count=len(items),
            layouts=(a, b),
            delta_ns=sum(cost for _, cost, _ in items),
            delta_bytes=sum(more_bytes for _, _, more_bytes in items),
        )
        for (role, _, a, b), items in groups.items()
    ]
    return tuple(sorted(rows, key=lambda x: (-abs(x.delta_ns), -abs(x.delta_bytes), x.names))), alike


class _Side:
    """One plan, by tensor name: what is said of a tensor, and what its transitions cost."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.index = plan, PlanIndex(plan)
        self.nanoseconds: Counter[str] = Counter()
        for c in plan.collectives():
            if c.reshard is not None:
                self.nanoseconds[self.index.owner(plan.reshards[c.reshard].tensor)] += c.runs * c.nanoseconds

    def text(self, t: int) -> str:
        """``S(0)R, state S(0)S(0), forward RR``: how it lies, its optimizer state where that is another, and copies for readers."""
        state, layout, mesh = self.plan.tensors[t].state, self.index.layout(t), self.plan.mesh
        said = [_whole(layout, mesh)]
        if state is not None and state != layout:
            said.append(f"state {_whole(state, mesh)}")
        for purpose in ("output", "forward", "backward"):
            read = [r.layout for r in self.index.reshards.get(t, ()) if r.purpose == purpose and r.layout != r.source]
            said += [f"{purpose} {' and '.join(_whole(x, mesh) for x in dict.fromkeys(read))}"] if read else []
        return ", ".join(said)

    def nbytes(self, t: int) -> int:
        """Bytes per device as it is stored or made."""
        tensor = self.plan.tensors[t]
        return local_nbytes(self.plan, tensor.shape, tensor.dtype, self.index.layout(t))


def _whole(layout: Layout, mesh: Mesh) -> str:
    """A layout with one placement for every axis of the whole mesh, where the parts of each are alike."""
    parts = [[layout[a] for a in mesh.positions(name)] for name in mesh.whole.names]
    return "".join(str(found[0]) for found in parts) if all(len(set(found)) == 1 for found in parts) else str(layout)


def _lines(found: PlanDifference) -> list[str]:
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


def _pairs(m: CollectiveDifference) -> list[tuple[int, int, int]]:
    return [(m.count[k], m.nbytes[k], m.nanoseconds[k]) for k in (0, 1)]


def _signed(value: int, is_bytes: bool = False) -> str:
    return "0" if not value else signed_bytes(value) if is_bytes else signed_ns(value)


def _more(items: tuple[object, ...]) -> list[str]:
    return [f"  ... {len(items) - MAX_ROWS} more of less effect (--json has all)"] if len(items) > MAX_ROWS else []


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
    def of_calls(plan: Plan, c: Collective, _: str) -> tuple[str, tuple[str, ...], int]:
        return c.kind, tuple(plan.mesh.joined(c.axes)), c.nbytes

    rows = [
        CollectiveChange(kind=kind, axes=axes, nbytes=nbytes, count=b.count - a.count, nanoseconds=b.nanoseconds - a.nanoseconds)
        for (kind, axes, nbytes), (a, b) in _tallies(before, after, of_calls).items()
    ]
    return tuple(sorted(rows, key=lambda c: (-abs(c.nanoseconds), c.kind, c.axes, c.nbytes)))


def _layout_changes(before: Plan, after: Plan) -> tuple[LayoutChange, ...]:
    first, second = PlanIndex(before), PlanIndex(after)
    items = []
    for name, t in first.positions.items():
        if name not in second.positions:
            continue
        one, two = _said(first, t), _said(second, second.positions[name])
        if one != two:
            tensor = before.tensors[t]
            items.append((name, (*_differing(one, two), math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype])))
    folded = [
        LayoutChange(name=name, count=count, before=one, after=two, nbytes=count * nbytes)
        for name, (one, two, nbytes), count in fold_items(items)
    ]
    return tuple(sorted(folded, key=lambda c: (-c.nbytes, c.name)))


Said = dict[str, Layout]
"""Layouts of a tensor: as it is handed over (no name), of its state, and by phase and family as its readers get it."""


def _said(index: PlanIndex, t: int) -> Said:
    tensor = index.plan.tensors[t]
    state = {} if tensor.state is None else {"state": tensor.state}
    reads = {f"{r.purpose} {r.family}": r.layout for r in index.reshards.get(t, ()) if r.purpose in ("forward", "backward")}
    return {"": tensor.layout, **state, **reads}


def _differing(first: Said, second: Said) -> tuple[str, str]:
    """The parts that differ, as text: ``RR``, ``state S(0)S(0)``, ``S(0)R in forward``."""
    keys = [key for key in dict.fromkeys((*first, *second)) if first.get(key) != second.get(key)]
    if "" in keys or "state" in keys:  # readers follow
        keys = [key for key in keys if key in ("", "state")]
    return _parts(first, keys), _parts(second, keys)


def _parts(said: Said, keys: list[str]) -> str:
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
