"""A plan as a Python file of ``parallelize_module`` styles, FSDP2 calls and the device mesh; and such styles as pins.

>>> write_whole("eager.py", export(plan).text)          # torchrun --nproc-per-node 8 eager.py
>>> read('{"layers.*.up_proj": "ColwiseParallel", "layers.*.down_proj": "RowwiseParallel"}', program, axis="tp")
('layers.0.up_proj.weight=tp=S(0)', 'layers.0.down_proj.weight=tp=S(1)')

The file needs torch alone; its ``main`` builds the plan's model again to run steps, and needs this library for that. See
:mod:`solver_shard.exporters.eager` for what such a program can express.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from solver_shard.errors import InputError, printable
from solver_shard.exporters import Dropped, Exported, check_lossless, listing, merged
from solver_shard.exporters.eager import DataParallel, Eager, Parallel, compare, read_data_parallel, read_eager, wrap_order, wrapped
from solver_shard.exporters.literal import Cut, LiteralCall, Name, read_assignments, read_value, weight_pins
from solver_shard.layout import Placement
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.text import template

TARGET = "parallelize"
STYLES: Mapping[str, Cut] = {"ColwiseParallel": "columns", "RowwiseParallel": "rows", "SequenceParallel": "whole", "SharedInput": "columns"}


def export(plan: Plan, *, lossy: bool = False) -> Exported:
    """The file's text.

    Args:
        lossy: leave out what the form cannot express; the program still computes what the model computes.

    Raises:
        InputError: the form cannot express the plan, and ``lossy`` is false; or cannot run on its mesh at all.
    """
    eager = read_eager(plan)
    data = read_data_parallel(plan, eager)
    more, notes = compare(plan, eager, shared=True)
    dropped = merged((*eager.dropped, *data.dropped, *more, *_unsupported(plan, data)))
    check_lossless(TARGET, dropped, lossy=lossy)
    notes = [*data.notes, *notes]
    if plan.options.clip:
        notes.append("gradient clipping is the training loop's")
    if plan.options.master_weights and plan.options.dtype in ("bf16", "f16"):
        notes.append("f32 master weights are the optimizer's: give one that keeps them")
    return Exported(text=_text(plan, eager, data, dropped, notes), dropped=dropped, notes=tuple(notes))


def read(text: str, program: Program, *, axis: str = "tp") -> tuple[str, ...]:
    """Pins for the weights that a dict of styles names: module pattern to style name, or to a call such as ``RowwiseParallel(...)``.

    The file that ``export`` wrote is read too: its ``TENSOR_PARALLEL``. What a style says of activations is not pinned; the solver
    and the propagation passes find it from the weights.

    Raises:
        InputError: neither JSON nor literals, an unknown style, or a pattern that matches no module with parameters.
    """
    calls = (*STYLES, "Replicate", "Shard", "Partial")
    styles = read_assignments(text, calls=calls).get("TENSOR_PARALLEL") if "TENSOR_PARALLEL" in text else read_value(text, calls=calls)
    if not isinstance(styles, Mapping):
        raise InputError("no dict of parallel styles was found; give {'module pattern': 'ColwiseParallel', ...} as JSON or Python")
    return weight_pins({str(pattern): _cut(str(pattern), style) for pattern, style in styles.items()}, program, axis)


def _cut(pattern: str, style: Any) -> Cut:
    if isinstance(style, LiteralCall) and style.name == "SharedInput" and style.args:
        style = style.args[0]
    name = style.name if isinstance(style, LiteralCall | Name) else style
    if name not in STYLES:
        raise InputError(f"{pattern!r} has the style {name!r}; known are {', '.join(STYLES)}")
    return STYLES[name]


def _unsupported(plan: Plan, data: DataParallel) -> list[Dropped]:
    """Meshes on which ``fully_shard`` cannot be said; a lossy export replicates over the axes that are left."""
    both = data.shard_axes and data.replicate_axes
    if both and (
        len(data.shard_axes) > 1
        or len(data.replicate_axes) > 1
        or plan.mesh.index(data.replicate_axes[0]) > plan.mesh.index(data.shard_axes[0])
    ):
        raise InputError(
            f"parameters are replicated over {', '.join(data.replicate_axes)} and cut over {', '.join(data.shard_axes)}; fully_shard takes "
            "one axis of each kind, the replicated one to the left; export to dtensor-script, or solve on such a mesh"
        )
    return []


def _text(plan: Plan, eager: Eager, data: DataParallel, dropped: tuple[Dropped, ...], notes: list[str]) -> str:
    shared = _shared(eager.modules)
    styles = {m.path: _style(m, shared.get(m.path)) for m in eager.modules}
    folded = fold_patterns(styles)
    groups = sorted(set(shared.values()))
    lines = [HEAD.format(name=_comment(plan.name), mesh=plan.mesh, source=_comment(plan.provenance.source))]
    if dropped:
        lines.append("# Left out of the plan, as the export was asked to be lossy:\n" + listing(dropped))
    if notes:
        lines.append("# In another way than in the plan:\n" + listing(notes))
    lines.append(_imports(eager, data, bool(groups)))
    lines.append(MESH.format(names=repr(plan.mesh.names), shape=repr(plan.mesh.shape), source=repr(plan.provenance.source)))
    lines.append(f"INPUT_AXES = {eager.data_axes!r}  # they cut dim 0 of every input, in this order\n")
    if groups:
        lines.append(SHARED)
        for name in groups:
            lines.append(
                f"{name} = Lay({sum(1 for path, group in shared.items() if group == name and path in _first_copy(shared, name))})\n"
            )
    body = []
    if eager.modules:
        lines.append("TENSOR_PARALLEL = {\n" + "".join(f"    {_quoted(path)}: {style},\n" for path, style in folded.items()) + "}\n")
        body.append(f'    parallelize_module(model, mesh["{eager.tensor_axis}"], TENSOR_PARALLEL)\n')
    if data.shard_axes or data.replicate_axes:
        lines.append(_wrapping(plan, data))
        body.append(_mesh_line(data))
        body.append("    wrap(model, data)\n")
    lines.append(
        'def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:\n    """Lay the model out on the mesh, in place."""\n'
        + "".join(body)
        + "    return model\n"
    )
    forward_only = plan.options.forward_only
    optimizer = "None" if forward_only else "torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)"
    lines.append(MAIN.format(forward_only=forward_only, optimizer=optimizer))
    return "\n\n".join(line.rstrip("\n") for line in lines) + "\n"


def fold_patterns(values: Mapping[str, str]) -> dict[str, str]:
    """One entry for all copies of a repeated layer, with ``*`` for its number, where they share the value; else each by itself."""
    groups: dict[str, dict[str, str]] = {}
    for path, value in values.items():
        groups.setdefault(template(path).replace("#", "*"), {})[path] = value
    found: dict[str, str] = {}
    for pattern, members in groups.items():
        if len(set(members.values())) == 1:
            found[pattern] = next(iter(members.values()))
        else:
            found.update(members)
    return found


def _shared(modules: tuple[Parallel, ...]) -> dict[str, str]:
    """Module to the name of what lays its input out, for modules that share one with others; copies of a layer have one name."""
    groups: dict[tuple[int, int], list[str]] = {}
    for module in modules:
        if module.kind == "linear" and module.cut == "columns":
            groups.setdefault((module.group, int(module.read)), []).append(module.path)
    names: dict[tuple[str, ...], str] = {}
    found = {}
    for members in groups.values():
        if len(members) > 1:
            key = tuple(template(path) for path in members)
            name = names.setdefault(key, "_".join(["INPUT", *_words(members[0]), str(len(names))]))
            found.update(dict.fromkeys(members, name))
    return found


def _words(path: str) -> list[str]:
    return [re.sub(r"\W", "_", part).upper() for part in path.split(".")[-2:-1] if not part.isdigit()]


def _first_copy(shared: Mapping[str, str], name: str) -> list[str]:
    """Members of a shared input in one copy of their layer."""
    first = dict.fromkeys(template(path) for path, group in shared.items() if group == name)
    return [next(path for path, group in shared.items() if group == name and template(path) == form) for form in first]


def _style(module: Parallel, shared: str | None) -> str:
    last = "Shard(-1)"
    result = last if module.made == module.given and module.made.is_shard else _placement(module.given)
    if module.cut == "columns":
        arguments = [] if module.arrives.is_replicate or shared else [f"input_layouts={_placement(module.arrives)}"]
        arguments += [] if result == last else [f"output_layouts={result}"]
        style = f"ColwiseParallel({', '.join(arguments)})"
    else:
        enters = module.arrives == module.read or module.kind == "embedding"
        arguments = [] if enters else [f"input_layouts={_placement(module.arrives)}"]
        if module.kind == "embedding":
            arguments = [f"input_layouts={_placement(module.arrives)}"]
        arguments += [] if result == "Replicate()" else [f"output_layouts={result}"]
        style = f"RowwiseParallel({', '.join(arguments)})"
    return f"SharedInput({style}, {shared}, {_placement(module.arrives)})" if shared else style


def _placement(placement: Placement) -> str:
    return f"Shard({placement.dim})" if placement.is_shard else "Replicate()"


def _imports(eager: Eager, data: DataParallel, shared: bool) -> str:
    styles = sorted({"ColwiseParallel" if m.cut == "columns" else "RowwiseParallel" for m in eager.modules})
    lines = [
        "from __future__ import annotations",
        "",
        "import argparse",
        "import os",
        "import re",
        "",
        "import torch",
        "import torch.distributed as dist",
    ]
    lines += ["from torch import nn", "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh"]
    if data.shard_axes:
        lines.append("from torch.distributed.fsdp import fully_shard")
    elif data.replicate_axes:
        lines.append("from torch.distributed._composable.replicate_with_fsdp import replicate")
    names = (["DTensor"] if shared else []) + (["Replicate"] if styles else []) + (["Shard"] if styles or data.shard_axes else [])
    if names:
        lines.append(f"from torch.distributed.tensor import {', '.join(names)}")
    if styles:
        imported = [*styles, *(["ParallelStyle"] if shared else []), "parallelize_module"]
        lines.append(f"from torch.distributed.tensor.parallel import {', '.join(imported)}")
    return "\n".join(lines) + "\n"


def _wrapping(plan: Plan, data: DataParallel) -> str:
    if not data.shard_axes:
        return PLAIN
    keeps = wrapped(plan, data.keeps)
    frees = fold_patterns({path: repr(keeps[path]) for path in wrap_order(keeps)})
    dims = fold_patterns({name: str(dim) for name, dim in data.dims.items() if dim})
    text = "FULLY_SHARD = {  # module: whether its gathered parameters are freed after forward, and gathered again for backward\n"
    text += "".join(f"    {_quoted(path)}: {value},\n" for path, value in frees.items()) + "}\n"
    text += "CUT_DIMS = {  # parameter: the dim that is cut, where it is not 0\n"
    text += "".join(f"    {_quoted(name)}: {dim},\n" for name, dim in dims.items()) + "}\n"
    return text + FSDP


def _mesh_line(data: DataParallel) -> str:
    axes = [*data.replicate_axes, *data.shard_axes]
    names = ", ".join(f'"{name}"' for name in axes)
    if len(axes) == 1 or (data.shard_axes and data.replicate_axes):
        return f"    data = mesh[{names}]\n"
    return f'    data = mesh[{names}]._flatten("{"_".join(axes)}")\n'


def _quoted(text: str) -> str:
    """A name as a literal with double quotes; names come from a file, and must not end the literal that they stand in."""
    return printable(json.dumps(text, ensure_ascii=False))


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() and c not in '\\"' else "?" for c in text)


# The fixed parts of the Python files that exporters write.

HEAD = '''"""{name} on {mesh}, as parallelize_module styles and FSDP2 calls; written by solver-shard.

Planned from: {source}.
Use parallelize(model, mesh) in your program; run by itself, this file takes training steps with random weights and inputs:

    torchrun --nproc-per-node N FILE --steps 2
"""
'''

MESH = """MESH_NAMES = {names}
MESH_SHAPE = {shape}
SOURCE = {source}
"""

SHARED = '''class Lay:
    """Lays a tensor out for the modules of one layer that read it, once: one collective, and one for its gradient."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.left = 0
        self.tensor = self.made = None

    def __call__(self, tensor: torch.Tensor, mesh: DeviceMesh, placement) -> DTensor:
        if tensor is not self.tensor:
            made = DTensor.from_local(tensor, mesh, [placement], run_check=False).redistribute(placements=[Replicate()])
            self.tensor, self.made, self.left = tensor, made, self.readers
        made = self.made
        self.left -= 1
        if not self.left:
            self.tensor = self.made = None
        return made


class SharedInput(ParallelStyle):
    """A style for a module whose input is laid out together with that of others."""

    def __init__(self, style: ParallelStyle, lay: Lay, placement) -> None:
        super().__init__()
        self.style, self.lay, self.placement = style, lay, placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made = self.style._apply(module, device_mesh)
        made.register_forward_pre_hook(lambda _, args: (self.lay(args[0], device_mesh, self.placement), *args[1:]), prepend=True)
        return made
'''

PLAIN = '''def wrap(model: nn.Module, data: DeviceMesh) -> None:
    """Average the gradients over the data axes."""
    replicate(model, mesh=data)
'''

FSDP = '''

def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\\*", "[0-9]+"), name) is not None


def wrap(model: nn.Module, data: DeviceMesh) -> None:
    """Cut the parameters over the data axes; inner modules first."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = list(model.parameters())  # so that no id is given twice

    def cut(parameter: nn.Parameter) -> Shard:
        return Shard(next((dim for pattern, dim in CUT_DIMS.items() if _matches(pattern, names.get(id(parameter), ""))), 0))

    modules = dict(model.named_modules())
    for pattern, frees in FULLY_SHARD.items():
        for path, module in modules.items():
            if _matches(pattern, path):
                fully_shard(module, mesh=data, reshard_after_forward=frees, shard_placement_fn=cut)
    del kept
'''

MAIN = '''def device_mesh(device: str) -> DeviceMesh:
    """The plan's mesh; the job needs as many processes as it has devices."""
    return init_device_mesh(device, MESH_SHAPE, mesh_dim_names=MESH_NAMES)


def local_inputs(inputs: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The part of the batch that this process computes."""
    found = {{}}
    for name, value in inputs.items():
        for axis in INPUT_AXES if value.dim() else ():
            value = value.chunk(mesh[axis].size())[mesh[axis].get_local_rank()]
        found[name] = value.contiguous()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    from solver_shard.exporters.script import rebuild

    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    try:
        mesh = device_mesh(given.device)
        built = rebuild(SOURCE, seed=0, forward_only={forward_only})
        model = parallelize(built.model.to(given.device), mesh)
        inputs = {{name: value.to(given.device) for name, value in local_inputs(dict(built.inputs), mesh).items()}}
        # foreach kernels do not mix DTensors with the plain tensors of modules that are not parallel
        optimizer = {optimizer}
        for step in range(given.steps):
            with torch.set_grad_enabled(optimizer is not None):
                output = model(**inputs)
            if optimizer is None:
                shown = "forward pass done"
            else:
                loss = built.loss(output)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = loss.detach().clone()
                for axis in INPUT_AXES:
                    dist.all_reduce(value, op=dist.ReduceOp.SUM, group=mesh[axis].get_group())
                    value /= mesh[axis].size()
                shown = f"loss {{value.item():.6f}}"
            if dist.get_rank() == 0:
                print(f"step {{step}}: {{shown}}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
