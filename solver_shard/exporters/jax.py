"""A plan as JAX PartitionSpecs by tensor name and as logical-axis rules; and such specs as pins.

>>> print(export(plan).text)
...
PARAMETERS = {
    "model.layers.*.self_attn.q_proj.weight": P("tp", "dp"),
...
>>> read('{"lm_head.weight": ["tp", null]}', {"lm_head.weight": 2}, Mesh.parse("dp=2,tp=4"))
('lm_head.weight=R,S(0)',)

A PartitionSpec names, per dim, the mesh axes that cut it, major to minor, in any order; so strided layouts (``_S(0)S(0)`` on ``dp,tp``:
``P(("tp", "dp"))``) are said as they are. JAX cuts dims into equal parts only. What modules hand on is given for
``with_sharding_constraint``; partial sums and the layouts inside modules are XLA's to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from solver_shard.errors import InputError
from solver_shard.exporters import Dropped, Exported, check_lossless, listing, merged
from solver_shard.exporters.literal import LiteralCall, read_assignments, read_value
from solver_shard.exporters.parallelize import fold_patterns
from solver_shard.layout import Layout, R, S, strided
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan, PlannedTensor
from solver_shard.program import module_outputs
from solver_shard.text import check_patterns, template

TARGET = "jax"
Spec = tuple[tuple[str, ...], ...]
"""Per dim, the names of the axes that cut it, major to minor."""


def spec_of(layout: Layout, dims: int, mesh: Mesh) -> Spec:
    """The spec of a layout without partial placements.

    >>> spec_of(Layout.parse("_S(0)S(0)"), 2, Mesh.parse("dp=2,tp=4"))
    (('tp', 'dp'), ())
    """
    return tuple(tuple(mesh.names[a] for a in layout.order(d)) for d in range(dims))


def layout_of(spec: Iterable[Iterable[str]], mesh: Mesh, where: str) -> Layout:
    """The layout of a spec.

    Raises:
        InputError: an unknown axis, one used twice, or an order that no layout has (one ascending run of axes, then another).
    """
    placements = [R] * len(mesh.axes)
    for d, names in enumerate(spec):
        axes = [mesh.index(name) for name in names]
        run = next((k for k in range(1, len(axes)) if axes[k] < axes[k - 1]), len(axes))
        for k, axis in enumerate(axes):
            if placements[axis] != R:
                raise InputError(f"{where}: axis {mesh.names[axis]!r} is used twice; an axis cuts one dim of a tensor")
            placements[axis] = S(d) if k < run else strided(d)
        if list(Layout(placements).order(d)) != axes or (run < len(axes) and not any(a > axes[run] for a in axes[:run])):
            raise InputError(
                f"{where}: dim {d} is cut by {', '.join(names)} in this order, which no layout on {mesh} says; legal: from left to right, "
                "or axes from left to right after others that have one to their right"
            )
    return Layout(placements)


def export(plan: Plan, *, lossy: bool = False) -> Exported:
    """A Python file of specs; InputError where a stored tensor cannot be said (unequal shards), unless ``lossy``."""
    dropped: list[Dropped] = []
    stored = {role: _specs(plan, role, dropped) for role in ("parameter", "buffer", "input")}
    states = {t.name: _spec(plan, t, t.state, dropped) for t in plan.tensors if t.role == "parameter" and t.state is not None}
    outputs = {plan.tensors[t].name: _spec(plan, plan.tensors[t], plan.tensors[t].layout, dropped) for t in plan.outputs}
    activations, free = _activations(plan)
    found = merged(dropped)
    check_lossless(TARGET, found, lossy=lossy)
    logical, rules = _logical(plan, stored["parameter"])
    notes = ["layouts inside modules, and the collectives between them, are XLA's choice from these specs"]
    if free:
        notes.append(f"{free} module outputs are left to XLA: they are partial, unequally cut, or several tensors")
    if any(t.state not in (None, t.layout) for t in plan.tensors):
        notes.append(
            "STATES differ from PARAMETERS: shard the optimizer's state by STATES, and constrain gradients to it before the update"
        )
    source = "".join(c if c.isprintable() and c not in '\\"' else "?" for c in f"{plan.name} on {plan.mesh}: {plan.provenance.source}")
    lines = [f'"""PartitionSpecs of {source}; written by solver-shard."""\n']
    if found:
        lines.append("# Left out of the plan, as the export was asked to be lossy:\n" + listing(found))
    lines.append("# In another way than in the plan:\n" + listing(notes))
    lines.append("from jax.sharding import PartitionSpec as P\n")
    lines.append(f"MESH_SHAPE = {plan.mesh.shape!r}\nMESH_NAMES = {plan.mesh.names!r}\n")
    titles = (
        ("PARAMETERS", "stored as these", stored["parameter"]),
        ("STATES", "of the optimizer, by parameter", states),
        ("BUFFERS", "stored as these", stored["buffer"]),
        ("INPUTS", "of the step", stored["input"]),
        ("OUTPUTS", "as the step returns them", outputs),
        ("ACTIVATIONS", "what modules hand on, as their readers get it", activations),
    )
    for title, comment, specs in titles:
        folded = fold_patterns({name: _text(spec) for name, spec in specs.items()})
        lines.append(
            f"{title} = {{  # {comment}; * is the number of a layer\n"
            + "".join(f"    {name!r}: {spec},\n" for name, spec in folded.items())
            + "}\n"
        )
    names = fold_patterns({name: repr(axes) for name, axes in logical.items()})
    lines.append(
        "LOGICAL_AXES = {  # names of parameters' dims, for LOGICAL_AXIS_RULES\n"
        + "".join(f"    {n!r}: {a},\n" for n, a in names.items())
        + "}\n"
    )
    lines.append("LOGICAL_AXIS_RULES = (\n" + "".join(f"    {(name, _axes(axes))!r},\n" for name, axes in rules.items()) + ")\n")
    return Exported(text="\n".join(lines), dropped=found, notes=tuple(notes))


def read(text: str, tensors: Mapping[str, int], mesh: Mesh) -> tuple[str, ...]:
    """Pins, in full, for the tensors that specs name.

    Args:
        text: the file that ``export`` wrote (its PARAMETERS, BUFFERS and INPUTS); or a dict, as JSON or a Python literal, of name to spec:
            ``P("tp", None)``, or a list per dim of an axis, a list of axes, or null.
        tensors: name to number of dims, of the model that the pins are for; ``*`` in a name stands for a number.
        mesh: whose axes the specs name.

    Raises:
        InputError: not such a file, a name that matches nothing, more entries than dims, unknown axes, or an order that no layout has.
    """
    calls = ("P", "PartitionSpec")
    found: dict[str, Any] = {}
    if "PARAMETERS" in text:
        parts = read_assignments(text, calls=calls)
        for title in ("PARAMETERS", "BUFFERS", "INPUTS"):
            found |= parts.get(title) or {}
    else:
        value = read_value(text, calls=calls)
        found = value if isinstance(value, dict) else {}
    if not found or not all(isinstance(name, str) for name in found):
        raise InputError("no specs were found; give {'name': P('tp', None), ...} as Python, or {\"name\": [\"tp\", null]} as JSON")
    check_patterns(found, "the specs")
    pins = []
    forms: dict[str, list[str]] = {}
    for name in tensors:
        forms.setdefault(template(name).replace("#", "*"), []).append(name)
    for pattern, value in found.items():
        names = [pattern] if pattern in tensors else forms.get(pattern, [])
        if not names:
            raise InputError(f"no tensor is called {pattern!r}; names look like {', '.join(list(tensors)[:3])}")
        for name in names:
            spec = _read_spec(value, tensors[name], name)
            layout = layout_of(spec, mesh, name)
            pins.append(f"{name}={','.join(map(str, layout))}")
    return tuple(pins)


def _read_spec(value: Any, dims: int, name: str) -> Spec:
    entries = value.args if isinstance(value, LiteralCall) and not value.kwargs else value
    if not isinstance(entries, list | tuple):
        raise InputError(f"{name}: {value!r:.80} is no spec; give P('tp', None), or a list with an entry per dim")
    if len(entries) > dims:
        raise InputError(f"{name}: the spec has {len(entries)} entries, the tensor {dims} dims; give at most one per dim")
    found = []
    for entry in (*entries, *[None] * (dims - len(entries))):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, list | tuple) else None
        if axes is None or not all(isinstance(axis, str) for axis in axes):
            raise InputError(f"{name}: {entry!r:.80} is no entry of a spec; give an axis, a tuple of axes, or None")
        found.append(axes)
    return tuple(found)


def _specs(plan: Plan, role: str, dropped: list[Dropped]) -> dict[str, Spec]:
    return {t.name: _spec(plan, t, t.layout, dropped) for t in plan.tensors if t.role == role}


def _spec(plan: Plan, tensor: PlannedTensor, layout: Layout, dropped: list[Dropped]) -> Spec:
    """The spec, without what JAX cannot do: dims of unequal shards are whole, partial axes too."""
    kept = []
    for d, axes in enumerate(spec_of(layout, len(tensor.shape), plan.mesh)):
        shards = _shards(plan, axes)
        if shards and tensor.shape[d] % shards:
            dropped.append(
                Dropped(
                    tensors=(tensor.name,),
                    what=f"dim {d} of {tensor.shape[d]} cut into {shards} unequal shards",
                    why="JAX cuts into equal ones only",
                )
            )
            axes = ()
        kept.append(axes)
    partial = [plan.mesh.names[a] for a, p in enumerate(layout) if p.is_partial]
    if partial:
        dropped.append(Dropped(tensors=(tensor.name,), what=f"partial on {', '.join(partial)}", why="a spec cannot say it"))
    return tuple(kept)


def _shards(plan: Plan, axes: Iterable[str]) -> int:
    found = 1
    for name in axes:
        found *= plan.mesh.shape[plan.mesh.index(name)]
    return found


def _activations(plan: Plan) -> tuple[dict[str, Spec], int]:
    """Module to the spec of the one tensor that it hands on, as its forward readers get it; and how many modules have none."""
    readers: dict[int, dict[Layout, None]] = {}
    for reshard in plan.reshards:
        if reshard.purpose == "forward":
            readers.setdefault(reshard.tensor, {})[reshard.layout] = None
    found: dict[str, Spec] = {}
    free = 0
    for path, outputs in module_outputs([op for op in plan.ops if op.phase == "forward"], plan.outputs).items():
        tensor = plan.tensors[outputs[0]]
        layouts = list(readers.get(outputs[0], {})) or [tensor.layout]
        problems: list[Dropped] = []
        spec = _spec(plan, tensor, layouts[0], problems)
        if len(outputs) > 1 or len(layouts) > 1 or problems:
            free += 1
        else:
            found[path] = spec
    return found, free


def _logical(plan: Plan, specs: Mapping[str, Spec]) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Logical names of parameters' dims, by size and by the axes that cut them, and the rule of each name."""
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    logical: dict[str, tuple[str, ...]] = {}
    rules: dict[str, tuple[str, ...]] = {}
    for name, spec in specs.items():
        names = []
        for size, axes in zip(shapes[name], spec, strict=True):
            word = "_".join([f"dim{size}", *(["by", *axes] if axes else ["whole"])])
            rules[word] = axes
            names.append(word)
        logical[name] = tuple(names)
    return logical, rules


def _axes(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _text(spec: Spec) -> str:
    last = max((d + 1 for d, axes in enumerate(spec) if axes), default=0)
    return f"P({', '.join(repr(_axes(axes)) for axes in spec[:last])})"
