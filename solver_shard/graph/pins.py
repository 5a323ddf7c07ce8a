"""Pins: layouts that the user fixes, in full or on some mesh axes, for the tensors that a pattern matches.

    PATTERN=LAYOUT       'model.layers.*.q_proj.weight=S(0),R'    one placement per mesh axis
                         'input_ids=dp=S(0)'                      only the named axes; the solver chooses the others
                         'lm_head.weight=S(*),*'                  S(*): any dim is cut; *: the solver chooses
                         'model.layers.*.mlp:out=R,S(2)'          what the modules hand on in the forward pass
                         'up_proj.weight=dp=_S(0),tp=S(0)'        both cut dim 0, tp first: parameters and their gradients

Patterns are globs over tensor names: parameters and buffers as in ``state_dict``, inputs, outputs (``loss``),
gradients (``grad(NAME)``) and activations. Pins on one tensor add up; two that leave nothing are an error.

A graph is lowered with what all pins leave (``resolve_pins``). Where they conflict, it is lowered without them, and each is masks on its
nodes that can be dropped (``pin_masks``).

On a mesh with a split axis (``tp=8x2``), a placement of the axis is one of each of its parts: ``tp=S(0)`` cuts dim 0 by all 16.
``tp.0=S(0)``, or one placement per part, pins the parts apart.

>>> pin = parse_pin("x=tp=S(1)", Mesh.parse("dp=2,tp=4"))
>>> pin.pattern, pin.choices
('x', ('*', 'S(1)'))
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.costs.layouts import is_ordered
from solver_shard.errors import InputError
from solver_shard.graph.choice_graph import Bools, Constraint, Ints
from solver_shard.graph.liveness import OPTIMIZER, OUTPUT, either_order
from solver_shard.graph.nodes import Lowering, NodeKey, OpNode, ReshardNode, ResultNode, SourceNode
from solver_shard.graph.symmetry import node_classes
from solver_shard.layout import REDUCTIONS, Layout, P, Placement, R, S, strided
from solver_shard.mesh import Mesh
from solver_shard.program import Phase, Program, Role, Tensor, module_outputs
from solver_shard.text import check_lengths, check_visits, is_glob, matching, suggestion

_CHOICE = re.compile(
    r"\s*(?P<text>\*|R|S\(\s*(?:\*|[0-9]{1,2})\s*\)|_S\(\s*[0-9]{1,2}\s*\)|P(?:\(\s*[a-z]+\s*\))?)\s*(?:,(?=.)|(?=[RSP_*]|\Z))"
)
_LEGAL = "R, S(dim), S(*) for any cut dim, _S(dim), P(sum|avg|max|min), or * to leave the axis to the solver"
_STORED = (Role.PARAMETER, Role.BUFFER, Role.INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One pin as read: not yet held against a model.

    Attributes:
        pattern: glob over tensor names, or over module paths where it ends in ``:out``.
        choices: per mesh axis, one of ``R``, ``S(d)``, ``S(*)``, ``_S(d)``, ``P(op)``, ``*``.
        text: what the user wrote.
    """

    pattern: str
    choices: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the pins leave of one tensor's layouts.

    Attributes:
        axes: per mesh axis the placements that are left, or None where the solver may choose any.
        pins: the texts of the pins that matched, in the order given.
    """

    axes: tuple[frozenset[Placement] | None, ...]
    pins: tuple[str, ...]

    def allows(self, layout: Layout) -> bool:
        """Whether the layout keeps every pin."""
        return all(left is None or placement in left for left, placement in zip(self.axes, layout, strict=True))


def parse_pin(text: str, mesh: Mesh) -> Pin:
    """Read ``PATTERN=LAYOUT``; InputError on a wrong form, an unknown axis or a wrong number of placements."""
    check_lengths([text], "a pin")
    pattern, sign, body = text.partition("=")
    pattern, body = pattern.strip(), body.strip()
    if not sign or not pattern or not body:
        raise InputError(
            f"cannot read pin {text!r}; write PATTERN=LAYOUT, as in 'lm_head.weight=S(0),R' or 'lm_head.weight={mesh.names[-1]}=S(0)'"
        )
    if "=" in body:
        choices = ["*"] * len(mesh.axes)
        named: set[str] = set()
        for part in body.split(","):
            name, sign, value = (piece.strip() for piece in part.partition("="))
            found = _choices(value, text) if sign else []
            if len(found) != 1:
                raise InputError(f"cannot read pin {text!r} at {part.strip()!r}; name every axis, as in 'PATTERN={mesh.names[-1]}=S(0)'")
            if name not in mesh.names and name not in mesh.whole.names:
                raise InputError(f"pin {text!r}: unknown mesh axis {name!r}; this mesh has {', '.join(mesh.names)}{_part_of(name, mesh)}")
            parts = {mesh.names[a] for a in mesh.positions(name)}
            if parts & named:
                raise InputError(f"pin {text!r} names axis {name!r} twice; give each axis one placement")
            named |= parts
            for a in mesh.positions(name):
                choices[a] = found[0]
    else:
        choices = _choices(body, text)
        if len(choices) == len(mesh.whole.axes):
            choices = list(mesh.spread(choices))
        if len(choices) != len(mesh.axes):
            raise InputError(
                f"pin {text!r} has {len(choices)} placement{'s' * (len(choices) != 1)}, mesh {mesh} has {len(mesh.axes)} axes; "
                f"give one placement per axis, or name the axes to pin, as in '{pattern}={mesh.names[-1]}={choices[-1]}'"
            )
    return Pin(pattern=pattern, choices=tuple(choices), text=text)


def check_pins(pins: Sequence[str], mesh: Mesh) -> None:
    """Read the pins before the model is traced, so that a slip shows at once."""
    for text in pins:
        parse_pin(text, mesh)


def resolve_pins(pins: Iterable[Pin], program: Program, mesh: Mesh) -> Mapping[int, Allowed]:
    """Hold pins against a program: tensor position to what is left of its layouts.

    Raises:
        InputError: a pattern matches nothing (the closest names are given), a dim does not exist or cannot be cut into
            so many shards, a stored tensor is pinned partial, ``_S(d)`` on what ops make for each other or without an
            axis to its right that can have ``S(d)``, or two pins on one tensor leave nothing.
    """
    left: dict[int, Allowed] = {}
    either = either_order(program)
    known = _Known(program)
    for pin in pins:
        for position in known.matching(pin):
            tensor = program.tensors[position]
            axes = tuple(
                _placements(choice, tensor, pin, strides=position in either) if axis.size > 1 else None  # one device: any is R
                for choice, axis in zip(pin.choices, mesh.axes, strict=True)
            )
            before = left.get(position, Allowed(axes=(None,) * len(axes), pins=()))
            both = Allowed(axes=tuple(map(_intersect, before.axes, axes)), pins=(*before.pins, pin.text))
            _check(both, tensor, mesh)
            left[position] = both
    return left


def pins_apart(pins: Iterable[Pin], program: Program, mesh: Mesh) -> dict[int, dict[str, Allowed]]:
    """What each pin alone leaves of the layouts of every tensor that it matches: tensor position to pin text to that.

    Tensors come in the order of ``resolve_pins``. InputError as there.
    """
    found: dict[int, dict[str, Allowed]] = {}
    for pin in pins:
        for t, allowed in resolve_pins([pin], program, mesh).items():
            found.setdefault(t, {})[pin.text] = allowed
    return found


def _part_of(name: str, mesh: Mesh) -> str:
    """A hint for parts of an axis that is not split."""
    axis, dot, _ = name.rpartition(".")
    return f"; {axis} has parts to pin once it is split by hand, as in --split {axis}=8x2" if dot and axis in mesh.names else ""


def _choices(body: str, whole: str) -> list[str]:
    found, position = [], 0
    while position < len(body):
        token = _CHOICE.match(body, position)
        if token is None:
            raise InputError(f"cannot read pin {whole!r} at {body[position:]!r}; write one of {_LEGAL} per mesh axis, as in 'S(0),R'")
        text = re.sub(r"\s", "", token["text"])
        if text.startswith("P") and text != "P" and text[2:-1] not in REDUCTIONS:
            raise InputError(f"pin {whole!r}: {text} is not a placement; legal reductions: {', '.join(REDUCTIONS)}")
        found.append("P(sum)" if text == "P" else text)
        position = token.end()
    return found


class _Known:
    """What pins can be about: tensors by name, and what modules hand on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tensors = {tensor.name: [t] for t, tensor in enumerate(program.tensors)}
        self.visits = 0

    @functools.cached_property
    def modules(self) -> Mapping[str, Collection[int]]:
        outputs = module_outputs([op for op in self.program.ops if op.phase is Phase.FORWARD], self.program.outputs)
        return {path: outputs[path] for path in sorted(outputs)}

    def matching(self, pin: Pin) -> list[int]:
        """Positions of the tensors that a pin is about, in program order; InputError when there is none."""
        of_modules, pattern = pin.pattern.endswith(":out"), pin.pattern.removesuffix(":out")
        known = self.modules if of_modules else self.tensors
        found = sorted(known.get(pattern, ()))
        if is_glob(pattern):
            self.visits += len(known)
            check_visits(self.visits, pattern)
            names = list(known)
            found = sorted({t for i in matching(pattern, names) for t in known[names[i]]})
        if not found:
            what, names = "module" if of_modules else "tensor", list(known)
            help_ = suggestion(pattern, names, None if of_modules else self.program.ties)
            raise InputError(f"pin {pin.text!r}: no {what} of {self.program.name} is called {pattern!r}; {help_}")
        return found


def _placements(choice: str, tensor: Tensor, pin: Pin, *, strides: bool) -> frozenset[Placement] | None:
    """The placements that one axis's choice leaves for this tensor; None for any."""
    dims = len(tensor.shape)
    if choice == "*":
        return None
    if choice == "R":
        return frozenset((R,))
    if choice.startswith("P"):
        if tensor.role in _STORED:
            raise InputError(
                f"pin {pin.text!r}: {tensor.role.value} {tensor.name} is stored, not computed, so it cannot be {choice}; legal: R or S(dim)"
            )
        return frozenset((P(choice[2:-1]),))
    if choice == "S(*)":
        if not dims:
            raise InputError(f"pin {pin.text!r}: {tensor.name} is a scalar and has no dim to cut; pin it R, or narrow the pattern")
        return frozenset(cut(dim) for dim in range(dims) for cut in ((S, strided) if strides else (S,)))
    late, dim = choice.startswith("_"), int(choice.lstrip("_")[2:-1])
    if late and not strides:
        raise InputError(
            f"pin {pin.text!r}: {tensor.role.value} {tensor.name} cannot be {choice}; only parameters and the gradients of "
            f"parameters may be cut by an axis after those to its right; legal: S({dim})"
        )
    if dim >= dims:
        legal = f"dims 0 to {dims - 1}" if dims > 1 else "dim 0" if dims else "no dims: pin it R"
        raise InputError(f"pin {pin.text!r}: {tensor.name} {tensor.dtype}{list(tensor.shape)} has {legal}; {choice} is not one of them")
    return frozenset(((strided if late else S)(dim),))


def _intersect(one: frozenset[Placement] | None, other: frozenset[Placement] | None) -> frozenset[Placement] | None:
    return other if one is None else one if other is None else one & other


def _check(both: Allowed, tensor: Tensor, mesh: Mesh) -> None:
    """InputError when the pins leave a tensor no layout that can be executed."""
    for axis, left in zip(mesh.axes, both.axes, strict=True):
        if left is not None and not left:
            raise InputError(f"pins {both.pins[-2]!r} and {both.pins[-1]!r} conflict on {tensor.name}, axis {axis.name}; drop one of them")
    narrow = [(axis, sorted(left)) for axis, left in zip(mesh.axes, both.axes, strict=True) if left is not None]
    late = {p.dim for _, left in narrow for p in left if p.is_strided}
    # an axis that is left to the solver may be the one that cuts before a strided one
    free = (R, *(S(d) for d in sorted(late)))
    options = [
        sorted(left) if left is not None else free if axis.size > 1 else (R,) for axis, left in zip(mesh.axes, both.axes, strict=True)
    ]
    fitting = (layout for layout in itertools.product(*options) if _fits(layout, mesh.shape, tensor))
    first = next(fitting, None)
    if first is not None and (not late or any(is_ordered(Layout(layout), mesh.wholes) for layout in (first, *fitting))):
        return
    if first is not None:
        axis, placement = next((axis, p) for axis, left in narrow for p in left if p.is_strided)
        give = f", or give S({placement.dim}) to an axis to the right" if axis is not mesh.axes[-1] else ""
        raise InputError(
            f"pin {' and '.join(map(repr, both.pins))}: {placement} of {tensor.name} on {axis.name} means that axes to its right cut dim "
            f"{placement.dim} first, but none of them can have S({placement.dim}); write {axis.name}=S({placement.dim}){give}"
        )
    cut = [axis for axis, left in narrow if all(p.is_shard for p in left) and axis.size > 1]
    shards = math.prod(axis.size for axis in cut)
    what = " and ".join(map(repr, both.pins)) + (" ask" if len(both.pins) > 1 else " asks")
    raise InputError(
        f"pin {what} for {shards} shards on {', '.join(f'{axis.name}={axis.size}' for axis in cut)}, but {tensor.name} "
        f"{tensor.dtype}{list(tensor.shape)} has too few elements along the cut dim; a dim of size n can be cut into at most n; "
        "pin it R there, or use a smaller axis or another dim"
    )


def _fits(layout: Sequence[Placement], sizes: Sequence[int], tensor: Tensor) -> bool:
    shards = [1] * len(tensor.shape)
    for placement, size in zip(layout, sizes, strict=True):
        if placement.is_shard:
            shards[placement.dim] *= size
    return all(count <= max(size, 1) for count, size in zip(shards, tensor.shape, strict=True))


def pin_masks(lowering: Lowering, t: int, allows: Callable[[Layout], bool]) -> dict[int, Bools]:
    """What a pin on a tensor leaves of the nodes of a graph lowered without it: as stored, as made, or as handed to update and caller.

    ``lower(pins=...)`` leaves out what pins forbid. To ask which pins conflict, a graph is needed that has them all apart: lowered without
    pins, each a mask on the nodes that decide how its tensors are stored, made or returned. With all masks it allows what the pinned graph
    allows, at the same cost and memory.
    """
    groups = lowering.lives.groups.get(t, ())
    last = [k for k, group in enumerate(groups) if group.purpose in (OPTIMIZER, OUTPUT)]
    keys: list[NodeKey] = [(SourceNode, t, 0), *((ReshardNode, t, k) for k in last), *([] if last else [(ResultNode, t, 0)])]
    nodes = [lowering.index[key] for key in keys if key in lowering.index]
    return {v: np.array([allows(layout) for layout in lowering.tensor_node(v).layouts], dtype=bool) for v in nodes}


def pin_constraints(lowering: Lowering, texts: Sequence[str], pins: Mapping[int, Mapping[str, Allowed]]) -> list[Constraint]:
    """Every pin as masks on the nodes of all the tensors that it matches; ``pins``: tensor to pin text to what it leaves."""
    allowed: dict[str, dict[int, Bools]] = {text: {} for text in dict.fromkeys(texts)}
    for t, own in pins.items():
        for text, left in own.items():
            allowed[text].update(pin_masks(lowering, t, left.allows))
    return [Constraint(name=text, allowed=found) for text, found in allowed.items()]


def pinned_classes(lowering: Lowering, pinned: Lowering, constraints: Sequence[Constraint]) -> Ints:
    """Which nodes are tied, in a graph lowered without pins: those that the pinned graph ties and that no constraint tells apart."""
    keys = {node.key: c for node, c in zip(pinned.nodes, node_classes(pinned).tolist(), strict=True)}
    own = node_classes(lowering).tolist()
    marks: list[list[tuple[int, bytes]]] = [[] for _ in lowering.nodes]
    for k, constraint in enumerate(constraints):
        for v, mask in constraint.allowed.items():
            marks[v].append((k, mask.tobytes()))
    known: dict[object, int] = {}
    found = [known.setdefault((own[v], keys.get(node.key, -1), tuple(marks[v])), len(known)) for v, node in enumerate(lowering.nodes)]
    return np.array(found, dtype=np.int64)


def op_constraints(lowering: Lowering, edges: Ints, member: Ints) -> tuple[list[Constraint], list[int]]:
    """Every op as a constraint that owns its edges, and the op position behind each; of ops that are tied the first.

    Args:
        lowering: the free graph's.
        edges: of the graph, tied or free.
        member: node of that graph behind each node of the lowering.
    """
    ops: dict[int, int] = {}
    for v, node in enumerate(lowering.nodes):
        if isinstance(node, OpNode):
            ops.setdefault(int(member[v]), node.op)
    owned: Mapping[int, list[int]] = {c: [] for c in ops}
    for e, (u, v) in enumerate(edges.tolist()):
        for c in (u, v):
            if c in owned:
                owned[c].append(e)
    names = [lowering.program.ops[i].name for i in ops.values()]
    return [Constraint(name=name, edges=tuple(owned[c])) for c, name in zip(ops, names, strict=True)], list(ops.values())
