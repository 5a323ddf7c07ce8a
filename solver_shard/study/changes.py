"""What differs between two plans for the same step: collectives, time, memory, and the layouts of tensors, folded by repeated layer.

>>> found = changes(before, after)
>>> found.collectives[0]
CollectiveChange(kind='all_gather', axes=('tp',), nbytes=67108864, count=32, nanoseconds=12100000)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from solver_shard.layout import Layout
from solver_shard.names import fold_items
from solver_shard.plan.plan import Plan
from solver_shard.program import DTYPE_BYTES
from solver_shard.units import format_bytes, format_ns


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
