"""A plan as Shardy annotations on StableHLO text, and such annotations as pins.

>>> print(export(plan).text)
module @llama {
  sdy.mesh @mesh = <["dp"=2, "tp"=2]>
  func.func private @step(
      tensor<128x32xf32> {solver_shard.name = "model.embed_tokens.weight", sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>},
  ...
>>> read(text, plan.mesh)["model.embed_tokens.weight"]
S(0)R

A plan of a traced PyTorch model has no StableHLO ops, so the text declares the step's signature: its parameters, buffers and inputs,
then its outputs, each with name and sharding, and a second function for the optimizer's states where these lie apart. ``annotate``
writes the same shardings on the arguments of a module that you have of that model. A StableHLO module that was propagated
(``solver-shard propagate MODULE.mlir -o FILE``) is written with all its shardings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from solver_shard.errors import InputError
from solver_shard.exporters import Dropped, Exported, check_lossless, listing, merged
from solver_shard.layout import Layout, P, R, S, strided
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan, PlannedTensor
from solver_shard.shardy.sharding import AxisRef, DimSharding, MeshSpec, TensorSharding, format_sharding
from solver_shard.shardy.stablehlo import StablehloModule, check_bounds, parse_error
from solver_shard.shardy.stablehlo.read import ShardingReader, bindings, read_mesh

TARGET = "sdy"
MESH = "mesh"
_NAME = "solver_shard.name"
_TYPES: Mapping[str, str] = {
    "f64": "f64", "f32": "f32", "f16": "f16", "bf16": "bf16", "f8e4m3": "f8E4M3FN", "f8e5m2": "f8E5M2",
    "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8", "u64": "ui64", "u32": "ui32", "u16": "ui16", "u8": "ui8", "bool": "i1",
    "c64": "complex<f32>", "c128": "complex<f64>",
}  # fmt: skip


def mesh_spec(mesh: Mesh) -> MeshSpec:
    """The mesh as Shardy sees it: axes that are split here are whole there, and used in parts."""
    return MeshSpec(axes=tuple((axis.name, axis.size) for axis in mesh.whole.axes))


def sharding_of(layout: Layout, dims: int, mesh: Mesh) -> TensorSharding:
    """The sharding of a layout, with every dim closed; InputError for a reduction that Shardy cannot say.

    >>> print(format_sharding(sharding_of(Layout.parse("_S(0)S(0)"), 2, mesh), {"mesh": mesh_spec(mesh)}))
    #sdy.sharding<@mesh, [{"tp", "dp"}, {}]>
    """
    refs = _refs(mesh)
    partial = [a for a, p in enumerate(layout) if p.is_partial]
    other = sorted({layout[a].reduction for a in partial} - {"sum"})
    if other:
        raise InputError(f"partial results to be reduced by {', '.join(other)} cannot be said in Shardy, only sums")
    return TensorSharding(
        mesh=MESH,
        dims=tuple(DimSharding(axes=_joined([refs[a] for a in layout.order(d)])) for d in range(dims)),
        unreduced=_joined([refs[a] for a in partial]),
    )


def layout_of(sharding: TensorSharding, mesh: Mesh, where: str = "sharding") -> Layout:
    """The layout of a sharding on this mesh; axes that are not named, or only open, are replicated.

    Raises:
        InputError: parts of an axis that the mesh does not have, or an order of axes on one dim that no layout has.
    """
    parts = {ref: a for a, ref in enumerate(_refs(mesh))}
    placements = [R] * len(mesh.axes)
    for d, dim in enumerate(sharding.dims):
        axes = [a for ref in dim.axes for a in _positions(ref, parts, where, mesh)]
        run = next((k for k in range(1, len(axes)) if axes[k] < axes[k - 1]), len(axes))
        for k, a in enumerate(axes):
            placements[a] = S(d) if k < run else strided(d)
        if list(Layout(placements).order(d)) != axes or (run < len(axes) and axes[run] > max(axes[:run])):
            raise InputError(f"{where}: dim {d} is cut by axes in an order that no layout on {mesh} has; name them from left to right")
    for ref in sharding.unreduced:
        for a in _positions(ref, parts, where, mesh):
            placements[a] = P(sharding.reduction)
    return Layout(placements)


def export(plan: Plan, *, lossy: bool = False) -> Exported:
    """The text of a module; InputError where a tensor's layout cannot be said, unless ``lossy``, or jaxlib cannot read the text."""
    dropped: list[Dropped] = []
    stored = [t for t in plan.tensors if t.role in ("parameter", "buffer", "input")]
    arguments = [_entry(plan, t, t.layout, dropped) for t in stored]
    results = [_entry(plan, plan.tensors[t], plan.tensors[t].layout, dropped) for t in plan.outputs]
    apart = [t for t in plan.tensors if t.state is not None and t.state != t.layout]
    states = [_entry(plan, t, t.state, dropped) for t in plan.tensors if t.state is not None] if apart else []
    found = merged(dropped)
    check_lossless(TARGET, found, lossy=lossy)
    notes = ["layouts inside the step are the compiler's to propagate from these"]
    text = "".join(
        [
            listing([f"{plan.name} on {plan.mesh}; written by solver-shard", *notes], "// "),
            listing([f"left out: {item}" for item in found], "// "),
            f"module @{_symbol(plan.name)} {{\n  sdy.mesh @{MESH} = {mesh_spec(plan.mesh)}\n",
            _function("step", arguments, results),
            _function("optimizer_states", states, []) if states else "",
            "}\n",
        ]
    )
    StablehloModule.parse(text, "the exported module")
    return Exported(text=text, dropped=found, notes=tuple(notes))


def read(text: str, mesh: Mesh, *, function: str = "step", file: str = "module") -> dict[str, Layout]:
    """Layouts by tensor name of the arguments that a module's function names; ``pins`` makes pins of them.

    Raises:
        InputError: jaxlib is missing or cannot read the text; no such function; the module's mesh is another one; or a sharding
            that no layout of this mesh says.
    """
    check_bounds(text, file)
    mlir = bindings()
    with mlir.context():
        try:
            module = mlir.ir.Module.parse(text)
        except mlir.ir.MLIRError as error:
            raise parse_error(error, text, file) from None
        meshes = {
            op.attributes["sym_name"].value: read_mesh(op.attributes["mesh"], mlir)
            for op in module.body.operations
            if op.operation.name == "sdy.mesh"
        }
        for name, spec in meshes.items():
            if spec.axes != mesh_spec(mesh).axes:
                raise InputError(f"{file}: mesh @{name} is {spec}, and the plan's is {mesh_spec(mesh)}; give the module of this mesh")
        functions = {op.attributes["sym_name"].value: op for op in module.body.operations if op.operation.name == "func.func"}
        if function not in functions:
            raise InputError(f"{file}: it has no function @{function}; it has {', '.join('@' + f for f in functions) or 'none'}")
        reader = ShardingReader(mlir, meshes)
        found: dict[str, Layout] = {}
        attributes = functions[function].attributes
        given = attributes["arg_attrs"] if "arg_attrs" in attributes else ()  # noqa: SIM401 - it is no dict and has no get
        for entry in given:
            if _NAME in entry and "sdy.sharding" in entry:
                name = entry[_NAME].value
                found[name] = layout_of(reader.one(entry["sdy.sharding"]), mesh, f"{file}, {name}")
    return found


def pins(layouts: Mapping[str, Layout]) -> tuple[str, ...]:
    """Pins, in full, of layouts by name.

    >>> pins({"w": Layout.parse("S(0)R")})
    ('w=S(0),R',)
    """
    return tuple(f"{name}={','.join(map(str, layout))}" for name, layout in layouts.items())


def annotate(text: str, plan: Plan, names: Sequence[str | None], *, file: str = "module") -> str:
    """A StableHLO module of the plan's model with the plan's shardings on the arguments of its first function.

    Args:
        text: the module; it has no mesh, or the plan's mesh as ``@mesh``.
        names: per argument, the name of the plan's tensor that it is, or None to leave it as it is.

    Raises:
        InputError: jaxlib is missing or cannot read the text; a name, a shape or the number of arguments does not fit.
    """
    spec = mesh_spec(plan.mesh)
    module = StablehloModule.parse(text, file)
    held = module.graph.meshes.get(MESH)
    if held is None:
        opening = re.search(r"module\s*(@[\w.$-]+\s*)?(attributes\s*\{[^}]*\}\s*)?\{", text)
        if opening is None:
            raise InputError(f"{file}: no 'module {{' to put a mesh into; give the text of a module")
        text = f"{text[: opening.end()]}\n  sdy.mesh @{MESH} = {spec}\n{text[opening.end() :]}"
        module = StablehloModule.parse(text, file)
    elif held != spec:
        raise InputError(f"{file}: mesh @{MESH} is {held}, and the plan's is {spec}; give a module without it, or with the plan's")
    if not module.graph.functions:
        raise InputError(f"{file}: it has no function to annotate")
    arguments = module.graph.functions[0].body.arguments
    if len(arguments) != len(names):
        raise InputError(f"{file}: its first function has {len(arguments)} arguments, and {len(names)} names were given; give one for each")
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    values = list(module.graph.values)
    for value, name in zip(arguments, names, strict=True):
        if name is None:
            continue
        tensor = tensors.get(name)
        if tensor is None or values[value].shape != tensor.shape:
            shape = "unknown" if tensor is None else list(tensor.shape)
            raise InputError(
                f"{file}: argument {values[value].name} {values[value].shape} cannot be {name!r}, which is {shape} in the plan"
            )
        values[value] = dataclasses.replace(values[value], sharding=sharding_of(tensor.layout, len(tensor.shape), plan.mesh))
    return module.print(dataclasses.replace(module.graph, values=tuple(values)))


def _entry(plan: Plan, tensor: PlannedTensor, layout: Layout, dropped: list[Dropped]) -> str:
    """Type, name and sharding of a tensor."""
    kept = layout
    try:
        sharding = sharding_of(layout, len(tensor.shape), plan.mesh)
    except InputError as error:
        dropped.append(Dropped(tensors=(tensor.name,), what=f"laid out {layout}", why=str(error)))
        kept = Layout(R if p.is_partial else p for p in layout)
        sharding = sharding_of(kept, len(tensor.shape), plan.mesh)
    for d in range(len(tensor.shape)):
        axes = kept.order(d)
        shards = 1
        for a in axes:
            shards *= plan.mesh.shape[a]
        if len(axes) > 1 and tensor.shape[d] % shards:
            dropped.append(
                Dropped(
                    tensors=(tensor.name,),
                    what=f"dim {d} of {tensor.shape[d]} cut by several axes into {shards} unequal shards",
                    why="Shardy pads the dim once, the plan axis after axis, so shards differ",
                )
            )
    shape = "".join(f"{size}x" for size in tensor.shape)
    named = "".join(c if c.isprintable() and c not in '"\\' else f"\\{ord(c):02X}" if ord(c) < 256 else "?" for c in tensor.name)
    text = format_sharding(sharding, {MESH: mesh_spec(plan.mesh)})
    return f'tensor<{shape}{_TYPES[tensor.dtype]}> {{{_NAME} = "{named}", sdy.sharding = {text}}}'


def _function(name: str, arguments: Sequence[str], results: Sequence[str]) -> str:
    ends = f" -> (\n      {(',' + chr(10) + '      ').join(results)})" if results else ""
    return f"  func.func private @{name}(\n      {(',' + chr(10) + '      ').join(arguments)}){ends}\n"


def _symbol(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name) or "model"


def _refs(mesh: Mesh) -> list[AxisRef]:
    """Per axis, the axis or the part of one that it is for Shardy."""
    found, sizes = [], dict(mesh_spec(mesh).axes)
    before: dict[str, int] = {}
    for axis, whole in zip(mesh.axes, mesh.wholes, strict=True):
        found.append(AxisRef(whole, before.get(whole, 1), axis.size) if axis.parent else AxisRef(whole, 1, sizes[whole]))
        before[whole] = before.get(whole, 1) * axis.size
    return found


def _joined(refs: Sequence[AxisRef]) -> tuple[AxisRef, ...]:
    """Neighbouring parts that are one."""
    found: list[AxisRef] = []
    for ref in refs:
        if found and found[-1].name == ref.name and found[-1].pre * found[-1].size == ref.pre:
            ref = AxisRef(ref.name, found[-1].pre, found[-1].size * ref.size)
            found.pop()
        found.append(ref)
    return tuple(found)


def _positions(ref: AxisRef, parts: Mapping[AxisRef, int], where: str, mesh: Mesh) -> list[int]:
    """The mesh's axes that an axis, or a part of one, is."""
    if ref in parts:
        return [parts[ref]]
    inside = [(p, a) for p, a in parts.items() if p.name == ref.name and ref.pre <= p.pre and p.pre * p.size <= ref.pre * ref.size]
    size = 1
    for p, _ in inside:
        size *= p.size
    if not inside or size != ref.size or inside[0][0].pre != ref.pre:
        raise InputError(f'{where}: "{ref.name}":({ref.pre}){ref.size} is no axis of {mesh}; split the axis alike, as in --split')
    return [a for _, a in inside]
