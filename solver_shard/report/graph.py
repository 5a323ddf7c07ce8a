"""The dataflow of one layer: which ops hand which tensors to which, in which layouts, and the collectives in between.

Ops of one module that pass tensors on without a collective are one box; tensors and collectives are boxes of their own, so that every
layout has a place to stand.

>>> drawn = layer_graphs(plan, entry_of)
>>> drawn["name"], [graph["phase"] for graph in drawn["graphs"]]
('model.layers.16', ['forward', 'backward'])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from solver_shard.layout import Layout
from solver_shard.names import template
from solver_shard.plan.plan import Plan, PlannedOp, Reshard
from solver_shard.plan.report import local_nbytes
from solver_shard.report.chips import chips
from solver_shard.report.entries import short_op, summary, title
from solver_shard.report.layered import Box, draw
from solver_shard.units import format_bytes, format_ns

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
    made = {t: layout for op in plan.ops for t, layout in zip(op.results, op.result_layouts, strict=True)}
    way_in = _ways_in(plan, positions, producer)
    sketch = _Sketch()
    ops = [sketch.box(**_op_box(plan, group, name, entry_of, {*producer, *way_in})) for group in groups]
    tensors: dict[int, tuple[int, int | None]] = {}
    collectives: dict[int, int] = {}

    def tensor_at(t: int) -> tuple[int, int | None]:
        if t not in tensors:
            told = _tensor_box(plan, t, made.get(t, plan.tensors[t].layout), name, entry_of, outside=t not in producer)
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


def _ways_in(plan: Plan, positions: Sequence[int], producer: dict[int, int]) -> set[int]:
    """The largest of the tensors that the ops read, the same phase makes elsewhere, and no parameter or input is."""
    phase = plan.ops[positions[0]].phase
    makers = {t: op for op in plan.ops for t in op.results}
    found = dict.fromkeys(t for i in positions for t in plan.ops[i].operands if t not in producer and t in makers)
    sizes = {
        t: local_nbytes(plan, plan.tensors[t].shape, plan.tensors[t].dtype, plan.tensors[t].layout)
        for t in found
        if makers[t].phase == phase
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
    drawing = draw([Box(box["width"], box["height"]) for box in sketch.boxes], [(start, end) for start, end, _ in edges])
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
