"""The dataflow of one layer: which ops hand which tensors to which, in which layouts, and the collectives in between.

Ops of one module that pass tensors on without a collective are one box; tensors and collectives are boxes of their own, so that every
layout has a place to stand.

>>> drawn = layer_graphs(plan, entry_of)
>>> drawn["name"], [graph["phase"] for graph in drawn["graphs"]]
('model.layers.16', ['forward', 'backward'])
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from solver_shard.layout import Layout
from solver_shard.plan.index import PlanIndex
from solver_shard.plan.plan import Plan, PlannedOp, Reshard
from solver_shard.plan.summary import local_nbytes
from solver_shard.reports.tensors import chips, short_op, summary, title
from solver_shard.text import format_bytes, format_ns, template

MAX_BOXES = 160
"""A graph with more is not drawn: nobody could read it."""

MAX_OPS = 400
"""Ops of one layer and phase that are looked at; larger parts are not drawn."""

MAX_MARKS = 4
"""Tensors told of in the box of an op that reads them from elsewhere."""

_CHARACTER, _BOLD = 6.35, 6.9
"""Widths of letters in the drawing's text of 10.5 and 11 units."""

_HEAVY = ("einsum", "mm", "bmm", "addmm", "matmul", "convolution", "embedding", "attention")


@dataclass(slots=True)
class _Group:
    """Ops drawn as one box."""

    module: str
    ops: list[int] = field(default_factory=list)
    heavy: bool = False


@dataclass(slots=True)
class _Sketch:
    """Boxes and edges on the way to a drawing."""

    boxes: list[dict[str, Any]] = field(default_factory=list)
    edges: dict[tuple[int, int, int | None], None] = field(default_factory=dict)

    def box(self, **what: Any) -> int:
        self.boxes.append(what)
        return len(self.boxes) - 1

    def edge(self, start: tuple[int, int | None], end: int) -> None:
        """From a box, or from one of the tensors at the bottom of an op's box."""
        self.edges[start[0], end, start[1]] = None


def layer_graphs(plan: Plan, entry_of: Sequence[int]) -> dict[str, Any] | None:
    """The graphs of a layer that stands for the most frequent kind of repeated layer, or of the whole model where none repeats.

    Returns:
        name of the layer, copies (how many like it), and per phase that it has: phase, width, height, nodes and edges. None where every
        graph would have more than ``MAX_BOXES`` boxes.
    """
    name, copies = representative(plan)
    graphs = []
    for phase in ("forward", "backward"):
        positions = [i for i, op in enumerate(plan.ops) if op.phase == phase and _inside(op.module, name)]
        if positions and len(positions) <= MAX_OPS:
            sketch = _sketch(plan, positions, name, entry_of)
            if len(sketch.boxes) <= MAX_BOXES:
                graphs.append({"phase": phase, **_drawn(sketch)})
    return {"name": name, "copies": copies, "graphs": graphs} if graphs else None


def representative(plan: Plan) -> tuple[str, int]:
    """Path of the layer to draw, one from the middle of its kind, and how many there are; ``("", 1)`` where nothing repeats.

    Layers are children with a number for a name; those with most compute together are taken.
    """
    spent: dict[str, dict[str, int]] = {}
    for op in plan.ops:
        parts = op.module.split(".")
        for depth, part in enumerate(parts, 1):
            if part.isdigit():
                path = ".".join(parts[:depth])
                paths = spent.setdefault(template(path), {})
                paths[path] = paths.get(path, 0) + op.nanoseconds
    repeated = {form: paths for form, paths in spent.items() if len(paths) > 1}
    if not repeated:
        return "", 1
    # a layer inside a layer (an expert, a convolution) never has more compute than the one around it
    best = max(repeated, key=lambda form: (sum(repeated[form].values()), -len(form)))
    alike = list(repeated[best])
    return alike[len(alike) // 2], len(alike)


def _inside(module: str, name: str) -> bool:
    return not name or module == name or module.startswith(f"{name}.")


def _moved(reshard: Reshard) -> bool:
    return bool(reshard.copy and reshard.steps)


def _sketch(plan: Plan, positions: Sequence[int], name: str, entry_of: Sequence[int]) -> _Sketch:
    """Boxes for groups of ops, for the tensors between them and for the collectives on their way.

    Of what comes from outside, parameters, tensors kept from the forward pass and smaller side inputs stand in the boxes of the ops that
    read them; the largest that the same phase makes is drawn as the way in.
    """
    moved = {where: r for r, reshard in enumerate(plan.reshards) if _moved(reshard) for where in reshard.readers}
    groups = _groups(plan, positions, moved)
    group_of = {i: g for g, group in enumerate(groups) for i in group.ops}
    producer = {t: group_of[i] for i in positions for t in plan.ops[i].results}
    index = PlanIndex(plan)
    way_in = _ways_in(index, positions, producer)
    sketch = _Sketch()
    ops = [sketch.box(**_op_box(plan, group, name, entry_of, {*producer, *way_in})) for group in groups]
    tensors: dict[int, tuple[int, int | None]] = {}
    collectives: dict[int, int] = {}

    def tensor_at(t: int) -> tuple[int, int | None]:
        if t not in tensors:
            told = _tensor_box(plan, t, index.layout(t), name, entry_of, outside=t not in producer)
            if t in producer:
                outs = sketch.boxes[ops[producer[t]]]["outs"]
                outs.append(told)
                tensors[t] = (ops[producer[t]], len(outs) - 1)
            else:
                tensors[t] = (sketch.box(**told), None)
        return tensors[t]

    def collective_box(r: int, start: tuple[int, int | None] | None) -> int:
        if r not in collectives:
            collectives[r] = sketch.box(**_collective_box(plan, plan.reshards[r], entry_of, of_what=start is None))
            if start is not None:
                sketch.edge(start, collectives[r])
        return collectives[r]

    for i in positions:
        for k, t in enumerate(plan.ops[i].operands):
            drawn, by = t in producer or t in way_in, moved.get((i, k))
            if by is not None:
                sketch.edge((collective_box(by, tensor_at(t) if drawn else None), None), ops[group_of[i]])
            elif drawn and producer.get(t) != group_of[i]:
                sketch.edge(tensor_at(t), ops[group_of[i]])
    inside = set(positions)
    leaving = {t for t in producer if t in plan.outputs}
    for i, op in enumerate(plan.ops):
        if i not in inside and op.phase == plan.ops[positions[0]].phase:
            leaving.update(t for t in op.operands if t in producer)
    for t in sorted(leaving):
        box, port = tensor_at(t)
        sketch.boxes[box]["outs"][port]["leaves"] = True
    for r, reshard in enumerate(plan.reshards):
        if reshard.purpose in ("optimizer", "accumulate") and reshard.tensor in producer and _moved(reshard):
            collective_box(r, tensor_at(reshard.tensor))
    return sketch


def _ways_in(index: PlanIndex, positions: Sequence[int], producer: dict[int, int]) -> set[int]:
    """The largest of the tensors that the ops read, the same phase makes elsewhere, and no parameter or input is."""
    plan, makers = index.plan, index.makers
    phase = plan.ops[positions[0]].phase
    found = dict.fromkeys(t for i in positions for t in plan.ops[i].operands if t not in producer and t in makers)
    sizes = {
        t: local_nbytes(plan, plan.tensors[t].shape, plan.tensors[t].dtype, plan.tensors[t].layout)
        for t in found
        if plan.ops[makers[t]].phase == phase
    }
    largest = max(sizes.values(), default=0)
    return {t for t, size in sizes.items() if size == largest}


def _groups(plan: Plan, positions: Sequence[int], moved: dict[tuple[int, int], int]) -> list[_Group]:
    """Ops of one module that are connected without a collective, at most one matmul or so in each, and no cycle between groups.

    Args:
        moved: (op, operand index) to the reshard whose collectives bring it.
    """
    producer = {t: i for i in positions for t in plan.ops[i].results}
    groups: dict[int, _Group] = {}
    group_of: dict[int, int] = {}
    after: dict[int, set[int]] = {}  # what reads a group: other groups, and reshards as -1 - r, which in turn have readers

    def reaches(start: int, end: int) -> bool:
        """Whether there is a way by way of a third group or a collective."""
        seen = {start}
        stack = [following for following in after[start] if following != end]
        while stack:
            node = stack.pop()
            if end in after[node]:
                return True
            fresh = after[node] - seen
            seen |= fresh
            stack.extend(fresh)
        return False

    def fits(g: int, op: PlannedOp) -> bool:
        return groups[g].module == op.module and not (_is_heavy(op) and groups[g].heavy)

    for i in positions:
        op = plan.ops[i]
        made = [(k, producer[t]) for k, t in enumerate(op.operands) if producer.get(t) in group_of]
        direct = dict.fromkeys(group_of[j] for k, j in made if (i, k) not in moved)
        groups[i] = _Group(module=op.module, ops=[i], heavy=_is_heavy(op))
        group_of[i], after[i] = i, set()
        for g in direct:
            after[g].add(i)
        for k, j in made:
            if (i, k) in moved:
                after[group_of[j]].add(-1 - moved[i, k])
                after.setdefault(-1 - moved[i, k], set()).add(i)
        for g in direct:  # a group that is merged with its reader must have no other way there
            if fits(g, op) and not (groups[g].heavy and groups[i].heavy) and not reaches(g, i):
                groups[i].ops = sorted([*groups.pop(g).ops, *groups[i].ops])
                groups[i].heavy = any(_is_heavy(plan.ops[j]) for j in groups[i].ops)
                group_of.update(dict.fromkeys(groups[i].ops, i))
                after[i] |= after.pop(g) - {i}
                for readers in after.values():
                    if g in readers:
                        readers.discard(g)
                        readers.add(i)
    return sorted(groups.values(), key=lambda group: group.ops[0])


def _is_heavy(op: PlannedOp) -> bool:
    return bool(op.implementation) or any(word in short_op(op.name) for word in _HEAVY)


def _relative(path: str, name: str) -> str:
    return path.removeprefix(f"{name}.") if name else path


def _op_box(plan: Plan, group: _Group, name: str, entry_of: Sequence[int], drawn: set[int]) -> dict[str, Any]:
    ops = [plan.ops[i] for i in group.ops]
    spent = format_ns(plan.options.microbatches * sum(op.nanoseconds for op in ops))
    inside = [f"{title(c.kind)} {','.join(plan.mesh.joined(c.axes))} inside" for op in ops for c in op.collectives]
    own = group.module == name
    lines = [summary(ops, 2), spent] if own else [_relative(group.module, name), f"{summary(ops, 2)} · {spent}"]
    read = {
        t: layout
        for op in ops
        for t, layout in zip(op.operands, op.operand_layouts, strict=True)
        if t not in drawn and plan.tensors[t].shape
    }
    marks = [(_short(plan.tensors[t].name, name), layout, t) for t, layout in read.items()]
    more = [f"+{len(marks) - MAX_MARKS} more read"] if len(marks) > MAX_MARKS else []
    return {
        "kind": "op",
        "lines": [*lines, *inside, *more],
        "marks": [{"name": text, "chips": chips(layout, plan.mesh), "entry": entry_of[t]} for text, layout, t in marks[:MAX_MARKS]],
        "outs": [],
    }


def _short(name: str, layer: str) -> str:
    """A tensor's name by its last parts: the op that made it and the module of that."""
    parts = _relative(name, layer).split(".")
    number = f".{parts.pop()}" if len(parts) > 1 and parts[-1].isdigit() else ""
    last = parts[-1]
    if "dot_product" in last:
        last = "attention" + last[last.index("[") :] * last.endswith("]")
    return ".".join([*(part for part in parts[:-1] if part != "backward"), last.strip("_")][-2:]) + number


def _tensor_box(plan: Plan, t: int, layout: Layout, name: str, entry_of: Sequence[int], *, outside: bool) -> dict[str, Any]:
    tensor = plan.tensors[t]
    short = "grad" if tensor.role == "gradient" else _short(tensor.name, name)
    if not outside:  # it stands at the bottom of its op's box, which names the module
        short = ".".join(short.split(".")[-2:] if short[-1:].isdigit() else short.split(".")[-1:])
    return {
        "kind": "tensor",
        "lines": [short],
        "marks": [{"name": "", "chips": chips(layout, plan.mesh)}],
        "name": tensor.name,
        "entry": entry_of[t],
        "leaves": False,
    }


def _collective_box(plan: Plan, reshard: Reshard, entry_of: Sequence[int], *, of_what: bool) -> dict[str, Any]:
    steps = " + ".join(f"{title(step.kind)} {','.join(plan.mesh.joined(step.axes))}" for step in reshard.steps)
    of = f" of {_short(plan.tensors[reshard.tensor].name, '')}" if of_what else ""
    moved = max(step.nbytes for step in reshard.steps)
    return {
        "kind": "collective",
        "lines": [f"◆ {steps}{of}", f"{format_bytes(moved)}, {format_ns(reshard.nanoseconds)}"],
        "marks": [{"name": "to", "chips": chips(reshard.layout, plan.mesh), "entry": entry_of[reshard.tensor]}],
        "entry": entry_of[reshard.tensor],
    }


def _drawn(sketch: _Sketch) -> dict[str, Any]:
    """Sizes from the text, places from the layout, one path per edge."""
    for box in sketch.boxes:
        _arrange(box)
    edges = list(sketch.edges)
    drawing = draw([DrawnBox(box["width"], box["height"]) for box in sketch.boxes], [(start, end) for start, end, _ in edges])
    nodes = [
        {**box, "id": k, "x": round(x - box["width"] / 2, 1), "y": round(y - box["height"] / 2, 1)}
        for k, (box, (x, y)) in enumerate(zip(sketch.boxes, drawing.places, strict=True))
    ]
    lines = []
    for (start, end, port), points in zip(edges, drawing.lines, strict=True):
        if port is not None:
            out = sketch.boxes[start]["outs"][port]
            points = ((nodes[start]["x"] + out["x"] + out["width"] / 2, points[0][1]), *points[1:])
        moved = "collective" in (nodes[start]["kind"], nodes[end]["kind"])
        lines.append({"path": _path(points), "kind": "moved" if moved else "plain"})
    return {"width": round(drawing.width), "height": round(drawing.height), "nodes": nodes, "edges": lines}


def _arrange(box: dict[str, Any]) -> None:
    """Give a box its size, and the chips, lines and tensors in it their places."""
    pad = 8
    if box["kind"] == "tensor":  # name and chips on one line
        mark = box["marks"][0]
        mark["x"], mark["y"] = round(pad + len(box["lines"][0]) * _CHARACTER + 5, 1), 3.0
        box["width"], box["height"] = round(_chip_places(mark, mark["x"]) + pad - 4, 1), 20
        return
    widest = max(len(line) * (_CHARACTER if k else _BOLD) for k, line in enumerate(box["lines"]))
    y = 15.0 * len(box["lines"]) + 6
    for mark in box["marks"]:
        mark["y"] = y
        mark["x"] = round(pad + (len(mark["name"]) * _CHARACTER + 5 if mark["name"] else 0), 1)
        widest = max(widest, _chip_places(mark, mark["x"]) - pad)
        y += 18
    outs = box.get("outs", [])
    for out in outs:
        _arrange(out)
    along = sum(out["width"] + 6 for out in outs) - 6
    widest = max(widest, along)
    box["width"] = round(widest + 2 * pad, 1)
    box["body"] = round(y + (2 if box["marks"] else 0) + (12 if outs else 0), 1)
    box["height"] = box["body"] + (10 if outs else 0)
    x = (box["width"] - along) / 2
    for out in outs:  # astride the box's lower edge
        out["x"], out["y"] = round(x, 1), round(box["body"] - 10, 1)
        x += out["width"] + 6


def _chip_places(mark: dict[str, Any], x: float) -> float:
    for chip in mark["chips"]:
        chip["x"], chip["width"] = round(x, 1), round(len(chip["text"]) * 6.1 + 7, 1)
        x += chip["width"] + 2
    return x


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A smooth line through the points, vertical at each."""
    (x, y), *rest = points
    text = f"M{x:g} {y:g}"
    for a, b in rest:
        middle = round((y + b) / 2, 1)
        text += f"C{x:g} {middle:g} {a:g} {middle:g} {a:g} {b:g}"
        x, y = a, b
    return text


# A layered drawing of a directed acyclic graph, top to bottom: layers, order within them, places, and the lines' turning points.
#
# The steps are those of Sugiyama, Tagawa and Toda (1981): longest-path layers, one dummy per layer that a line passes, orders by
# barycentres in alternating sweeps; then every layer is placed by least squares under its order (isotonic regression by pooling adjacent
# violators), which keeps lines straight where there is room. Deterministic: ties keep the order given.
#
# >>> drawn = draw([DrawnBox(40, 20), DrawnBox(40, 20)], [(0, 1)])
# >>> drawn.places
# ((20.0, 10.0), (20.0, 52.0))

SWEEPS = 12
"""Passes down and up that order the layers, and as many that place them."""


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """Size of a node, in the drawing's units."""

    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Where everything is.

    Attributes:
        width, height: of the whole.
        places: per node, its centre.
        lines: per edge, points from the bottom of its start to the top of its end.
    """

    width: float
    height: float
    places: tuple[tuple[float, float], ...]
    lines: tuple[tuple[tuple[float, float], ...], ...]


def draw(boxes: Sequence[DrawnBox], edges: Sequence[tuple[int, int]], *, gap: float = 14, rise: float = 18) -> Drawing:
    """Lay the graph out.

    Args:
        boxes: one per node.
        edges: (from, to) pairs; together without a cycle.
        gap: least distance of neighbours in a layer.
        rise: distance between layers.
    """
    layers = _layers(len(boxes), edges)
    sizes = list(boxes)
    levels = list(layers)
    chains: list[list[int]] = []
    for start, end in edges:
        chain = [start]
        for level in range(layers[start] + 1, layers[end]):
            chain.append(len(sizes))
            sizes.append(DrawnBox(6, 0))
            levels.append(level)
        chains.append([*chain, end])
    above: list[list[int]] = [[] for _ in sizes]
    below: list[list[int]] = [[] for _ in sizes]
    for chain in chains:
        for a, b in itertools.pairwise(chain):
            below[a].append(b)
            above[b].append(a)
    rows: list[list[int]] = [[] for _ in range(max(levels, default=-1) + 1)]
    for node, level in enumerate(levels):
        rows[level].append(node)
    rows = _ordered(rows, above, below)
    x = _placed(rows, above, below, sizes, gap, [chain[1:-1] for chain in chains if len(chain) > 3])
    y = [0.0] * len(sizes)
    spans = []
    top = 0.0
    for row in rows:
        tallest = max(sizes[node].height for node in row)
        for node in row:
            y[node] = top + tallest / 2
        spans.append((round(top, 1), round(top + tallest, 1)))
        top += tallest + rise
    lines = []
    for chain in chains:
        first, last = chain[0], chain[-1]
        # a line that passes a layer goes straight down beside its boxes
        points = [(x[first], y[first] + sizes[first].height / 2), *((x[n], edge) for n in chain[1:-1] for edge in spans[levels[n]])]
        lines.append((*points, (x[last], y[last] - sizes[last].height / 2)))
    width = max((x[n] + sizes[n].width / 2 for n in range(len(sizes))), default=0.0)
    return Drawing(
        width=width, height=max(top - rise, 0.0), places=tuple(zip(x[: len(boxes)], y[: len(boxes)], strict=True)), lines=tuple(lines)
    )


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Longest path from the sources; then sources move down to just above their first reader."""
    successors: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in edges:
        successors[a].append(b)
        waiting[b] += 1
    level = [0] * count
    sources = [n for n in range(count) if not waiting[n]]
    ready = list(sources)
    for node in ready:
        for after in successors[node]:
            level[after] = max(level[after], level[node] + 1)
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    if len(ready) < count:
        raise ValueError("the graph has a cycle, and no layers")
    for node in sources:
        level[node] = min((level[after] - 1 for after in successors[node]), default=0)
    least = min(level, default=0)
    used = {value: k for k, value in enumerate(sorted(set(level)))}
    return [used[value] for value in level] if least >= 0 else level


def _ordered(rows: list[list[int]], above: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> list[list[int]]:
    """The order with the fewest crossings that alternating sweeps come by."""
    best, least = [list(row) for row in rows], _crossings(rows, below)
    current = [list(row) for row in rows]
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for level in range(1, len(current)) if down else range(len(current) - 2, -1, -1):
            fixed = {node: k for k, node in enumerate(current[level - 1 if down else level + 1])}
            near = above if down else below
            at = {node: k for k, node in enumerate(current[level])}
            centre = {n: sum(fixed[m] for m in near[n]) / len(near[n]) if near[n] else at[n] * len(fixed) / len(at) for n in current[level]}
            current[level].sort(key=lambda n, centre=centre, at=at: (centre[n], at[n]))  # type: ignore[misc]  # defaults bind the loop's values
        found = _crossings(current, below)
        if found < least:
            best, least = [list(row) for row in current], found
    return best


def _crossings(rows: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> int:
    total = 0
    for row, after in itertools.pairwise(rows):
        at = {node: k for k, node in enumerate(after)}
        ends = [sorted(at[m] for m in below[n]) for n in row]
        total += sum(a > b for i, left in enumerate(ends) for right in ends[i + 1 :] for a in left for b in right)
    return total


def _placed(
    rows: Sequence[Sequence[int]],
    above: Sequence[Sequence[int]],
    below: Sequence[Sequence[int]],
    sizes: Sequence[DrawnBox],
    gap: float,
    passing: Sequence[Sequence[int]],
) -> list[float]:
    """Centres: each row as near to the mean of its neighbours as its order and the gaps allow; at last, lines that pass layers straight."""
    x = [0.0] * len(sizes)
    for row in rows:
        edge = 0.0
        for node in row:
            x[node] = edge + sizes[node].width / 2
            edge += sizes[node].width + gap
        for node in row:
            x[node] -= edge / 2
    for sweep in range(2 * SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for node in row:
                near = [*above[node], *below[node]] if sweep >= SWEEPS else above[node] if sweep % 2 == 0 else below[node]
                # lines that pass a layer weigh more, so that they run straight
                wanted.append((sum(x[m] for m in near) / len(near) if near else x[node], 16.0 if not sizes[node].height else 1.0))
            _settle(row, wanted, x, sizes, gap)
    first, last = {row[0] for row in rows}, {row[-1] for row in rows}
    straight: dict[int, float] = {}
    for chain in passing:
        at = sorted(x[n] for n in chain)
        aim = at[-1] if last.issuperset(chain) else at[0] if first.issuperset(chain) else at[len(at) // 2]
        straight.update(dict.fromkeys(chain, aim))
    for row in rows:
        _settle(row, [(straight.get(n, x[n]), 100.0 if n in straight else 1.0) for n in row], x, sizes, gap)
    left = min((x[n] - sizes[n].width / 2 for n in range(len(sizes))), default=0.0)
    return [round(value - left, 1) for value in x]


def _settle(row: Sequence[int], wanted: Sequence[tuple[float, float]], x: list[float], sizes: Sequence[DrawnBox], gap: float) -> None:
    """Put a row's nodes as near to the wanted (centre, weight) pairs as their order and the gaps allow."""
    offsets = [0.0]
    for a, b in itertools.pairwise(row):
        offsets.append(offsets[-1] + (sizes[a].width + sizes[b].width) / 2 + gap)
    found = isotonic([(w - offset, weight) for (w, weight), offset in zip(wanted, offsets, strict=True)])
    for node, value, offset in zip(row, found, offsets, strict=True):
        x[node] = value + offset


def isotonic(values: Sequence[tuple[float, float]]) -> list[float]:
    """The non-decreasing sequence nearest to (value, weight) pairs by least squares, by pooling adjacent violators.

    >>> isotonic([(1, 1), (3, 1), (2, 1)])
    [1.0, 2.5, 2.5]
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in values:
        blocks.append((float(value), weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, count in blocks for _ in range(count)]
