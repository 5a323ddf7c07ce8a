"""A plan as torchtitan's declarative sharding configs, module by module; and such configs as pins.

>>> print(export(plan).text)
...
SHARDING = {
    "model.layers.*.self_attn.q_proj": ShardingConfig(
        state_shardings={"weight": SpmdLayout({DP: spmd.R, CP: spmd.R, TP: spmd.S(0)})},
        in_src_shardings={"input": SpmdLayout({DP: spmd.S(0), CP: spmd.R, TP: spmd.R})},
        out_src_shardings=SpmdLayout({DP: spmd.S(0), CP: spmd.R, TP: spmd.S(-1)}),
    ),
...

The form is that of torchtitan 0.3: ``torchtitan.protocols.sharding.ShardingConfig`` over ``SpmdLayout`` (module paths are those of the
planned model). Along the tensor axis ``I`` is a tensor that is whole and the same in every process, with such a gradient; ``R`` is whole
with a partial gradient. So ``I`` to ``R`` costs nothing in forward and one all-reduce in backward: it is declared where
the tensor is made when only modules cut by columns read it, as behind a norm, and else at each reader. Data axes are torchtitan's
``DP``; how many of its devices cut parameters (always dim 0) is said by degrees beside the configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver_shard.errors import InputError
from solver_shard.exporters import Dropped, Exported, check_lossless, listing, merged
from solver_shard.exporters.eager import DataParallel, Eager, Parallel, compare, owner, read_data_parallel, read_eager
from solver_shard.exporters.literal import LiteralCall, Name, read_assignments
from solver_shard.exporters.parallelize import fold_patterns
from solver_shard.layout import Placement
from solver_shard.plan.plan import Plan
from solver_shard.text import check_lengths, check_patterns, template

TARGET = "torchtitan"
_CALLS = ("ShardingConfig", "ShardingSpec", "SpmdLayout", "LocalMapConfig", "S", "Shard", "Replicate", "Partial")

_HEAD = '''"""torchtitan sharding configs of {source}; written by solver-shard.

Before the model is built: set_sharding_config(config), and the degrees of PARALLELISM in the job's parallelism config.
"""
'''

_CODE = '''

def set_sharding_config(config) -> None:
    """Put every config on the module config that its path names; layers are lists or dicts of configs."""
    for pattern, sharding in SHARDING.items():
        found = [config]
        for part in pattern.split("."):
            found = [child for parent in found for child in _children(parent, part)]
        for module in found:
            module.sharding_config = sharding


def _children(parent, part):
    if isinstance(parent, dict):
        return list(parent.values()) if part == "*" else [parent[part]]
    if isinstance(parent, (list, tuple)):
        return list(parent) if part == "*" else [parent[int(part)]]
    return [getattr(parent, part)]
'''


def export(plan: Plan, *, lossy: bool = False) -> Exported:
    """A Python file; InputError where the form cannot express the plan, unless ``lossy``."""
    eager = read_eager(plan, reduces=True)
    data = read_data_parallel(plan, eager)
    makers = _makers(plan, eager)
    more, notes = compare(plan, eager, shared=frozenset(makers.values()))
    dropped = [*eager.dropped, *data.dropped, *more, *_beyond(plan, eager, data)]
    found = merged(dropped)
    check_lossless(TARGET, found, lossy=lossy)
    notes = [
        *data.notes,
        *notes,
        "inputs of modules are called 'input', as in nn.Linear and nn.Embedding",
        "reductions of gradients that stay partial outside modules with cut weights are as torchtitan's backend makes them",
    ]
    return Exported(text=_text(plan, eager, data, makers, found, notes), dropped=found, notes=tuple(notes))


def read(text: str, tensors: Mapping[str, int], *, axis: str = "tp", file: str = "file") -> tuple[str, ...]:
    """Pins on one axis for the parameters and buffers that a file's ``SHARDING`` (or only dict of configs) declares.

    Args:
        text: Python; every value is read as data, nothing is run. Layouts are ``SpmdLayout({TP: spmd.S(0)})`` or, as before torchtitan
            0.3, dicts of ``Shard(0)``, ``Replicate()``.
        tensors: name to number of dims, of the model that the pins are for.
        axis: the mesh axis that torchtitan's ``TP`` is.

    Raises:
        InputError: no configs, a state or module that does not exist, a placement that is unknown or partial.
    """
    parts = read_assignments(text, calls=_CALLS, file=file)
    sharding = parts.get("SHARDING")
    if not isinstance(sharding, Mapping):
        raise InputError(
            f"{file}: no SHARDING = {{'module.path': ShardingConfig(...), ...}} of literals was found; give the file that export wrote"
        )
    check_patterns([*map(str, sharding)], file)
    forms: dict[str, list[str]] = {}
    for name in tensors:
        forms.setdefault(template(name).replace("#", "*"), []).append(name)
    pins = []
    for pattern, config in sharding.items():
        if not isinstance(config, LiteralCall) or config.name not in ("ShardingConfig", "ShardingSpec") or not isinstance(pattern, str):
            raise InputError(f"{file}: {pattern!r} has no ShardingConfig")
        states = config.kwargs.get("state_shardings", {})
        for state, layout in states.items() if isinstance(states, Mapping) else ():
            full = f"{pattern}.{state}" if pattern else str(state)
            check_lengths([full], f"{file}: a name")
            names = [full] if full in tensors else forms.get(full, [])
            if not names and state != "bias":  # helpers declare a bias whether a module has one or not
                raise InputError(f"{file}: no tensor is called {full!r}; names look like {', '.join(list(tensors)[:3])}")
            placement = _placement_of(layout, file, full)
            for name in names if placement is not None else ():
                dim = placement if placement is not None and placement >= 0 else (placement or 0) + tensors[name]
                pins.append(f"{name}={axis}={'R' if placement == _WHOLE else f'S({dim})'}")
    return tuple(pins)


_WHOLE = 1 << 20


def _placement_of(layout: Any, file: str, name: str) -> int | None:
    """The dim that TP cuts, ``_WHOLE``, or None where TP is not declared."""
    axes = layout.args[0] if isinstance(layout, LiteralCall) and layout.name == "SpmdLayout" and layout.args else layout
    if not isinstance(axes, Mapping):
        raise InputError(f"{file}: {name} has no layout by axis; give SpmdLayout({{TP: spmd.S(0)}})")
    for key, value in axes.items():
        word = key.name if isinstance(key, Name) else str(key)
        if word.upper() != "TP":
            continue
        if isinstance(value, LiteralCall) and value.name in ("S", "Shard") and len(value.args) == 1 and type(value.args[0]) is int:
            return int(value.args[0])
        if (isinstance(value, Name) and value.name in ("R", "I")) or (isinstance(value, LiteralCall) and value.name == "Replicate"):
            return _WHOLE
        raise InputError(f"{file}: {name} has a placement that is no pin of a stored tensor; legal: spmd.S(dim), spmd.R, spmd.I")
    return None


def _makers(plan: Plan, eager: Eager) -> dict[str, int]:
    """Modules whose one output is read by modules cut by columns alone, in one group: they hand it on as ``R`` (path to group)."""
    made = {t: op for op in plan.ops if op.phase == "forward" for t in op.results}
    readers: dict[int, int] = {}
    for op in plan.ops:
        if op.phase == "forward":
            for t in op.operands:
                readers[t] = readers.get(t, 0) + 1
    groups: dict[int, list[Parallel]] = {}
    for module in eager.modules:
        if module.kind == "linear" and module.cut == "columns" and module.arrives.is_replicate and module.gradient:
            groups.setdefault(module.group, []).append(module)
    found: dict[str, int] = {}
    for group, members in groups.items():
        source = members[0].source
        maker = made.get(source)
        if maker is not None and maker.module in eager.whole and readers.get(source) == len(members):
            found[maker.module] = group
    return found


def _beyond(plan: Plan, eager: Eager, data: DataParallel) -> list[Dropped]:
    """What torchtitan's data parallelism cannot say."""
    found = []
    other = tuple(name for name, dim in data.dims.items() if dim)
    if other:
        found.append(
            Dropped(
                tensors=other, what=f"cut by dim {data.dims[other[0]]} over {', '.join(data.shard_axes)}", why="torchtitan cuts dim 0 there"
            )
        )
    idle = [name for name in eager.idle_axes if plan.mesh.shape[plan.mesh.index(name)] > 1]
    if idle:
        found.append(
            Dropped(
                tensors=tuple(t.name for t in plan.tensors if t.role == "input"),
                what=f"whole on {', '.join(idle)}",
                why="torchtitan has no such axis",
            )
        )
    if eager.tensor_axis is not None and eager.tensor_axis != plan.mesh.names[-1]:
        found.append(
            Dropped(
                tensors=tuple(m.path for m in eager.modules),
                what=f"cut by {eager.tensor_axis}, which is not the last axis of {plan.mesh}",
                why="torchtitan makes its TP the last one of the mesh",
            )
        )
    keeps = _keep(data)
    differ = tuple(name for name, kept in data.keeps.items() if kept != keeps and _regathered(plan, name))
    if differ:
        found.append(
            Dropped(
                tensors=differ,
                what=f"{'freed after forward' if keeps else 'kept gathered until backward'}, unlike others",
                why="fsdp_reshard_after_forward is one policy for all",
            )
        )
    return found


def _keep(data: DataParallel) -> bool:
    return 2 * sum(data.keeps.values()) > len(data.keeps)


def _regathered(plan: Plan, name: str) -> bool:
    """Whether the backward pass reads a parameter at all."""
    t = next(t for t, tensor in enumerate(plan.tensors) if tensor.name == name)
    return any(t in op.operands for op in plan.ops if op.phase == "backward")


def _text(plan: Plan, eager: Eager, data: DataParallel, makers: Mapping[str, int], dropped: tuple[Dropped, ...], notes: list[str]) -> str:
    source = "".join(c if c.isprintable() and c not in '\\"' else "?" for c in f"{plan.name} on {plan.mesh}: {plan.provenance.source}")
    lines = [_HEAD.format(source=source)]
    if dropped:
        lines.append("# Left out of the plan, as the export was asked to be lossy:\n" + listing(dropped))
    lines.append("# In another way than in the plan:\n" + listing(notes))
    lines.append("import spmd_types as spmd\n")
    lines.append(
        "from torchtitan.distributed.parallel_dims import MeshAxisName\n"
        "from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig, SpmdLayout\n"
    )
    lines.append("DP, CP, TP = MeshAxisName.DP, MeshAxisName.CP, MeshAxisName.TP\n")
    degrees = {
        "tensor_parallel_degree": 1 if eager.tensor_axis is None else plan.mesh.shape[plan.mesh.index(eager.tensor_axis)],
        "data_parallel_shard_degree": _degree(plan, data.shard_axes),
        "data_parallel_replicate_degree": _degree(plan, data.replicate_axes),
        "fsdp_reshard_after_forward": "never" if _keep(data) else "always",
    }
    lines.append(f"PARALLELISM = {degrees!r}\n")
    states: dict[str, list[str]] = {}
    for tensor in plan.tensors:
        if tensor.role in ("parameter", "buffer"):
            states.setdefault(owner(tensor.name), []).append(tensor.name)
    layouts = {tensor.name: tensor.layout for tensor in plan.tensors}
    axis = None if eager.tensor_axis is None else plan.mesh.index(eager.tensor_axis)
    groups = {group: path for path, group in makers.items()}
    modules = {module.path: module for module in eager.modules}
    configs: dict[str, str] = {}
    for path, names in states.items():
        module = modules.get(path)
        whole = "R" if module is not None or path in eager.partial else "I"  # the gradient of R is partial, that of I whole
        held = {name.rpartition(".")[2]: whole if axis is None else _word(layouts[name][axis], whole) for name in names}
        configs[path] = _config(held, module, path in makers, module is not None and module.group in groups)
    folded = fold_patterns(configs)
    lines.append("SHARDING = {\n" + "".join(f"    {path!r}: {text},\n" for path, text in folded.items()) + "}\n")
    return "\n".join(lines) + _CODE


def _degree(plan: Plan, axes: tuple[str, ...]) -> int:
    found = 1
    for name in axes:
        found *= plan.mesh.shape[plan.mesh.index(name)]
    return found


def _config(states: Mapping[str, str], module: Parallel | None, makes: bool, shared: bool) -> str:
    """The call that makes one module's config."""
    held = ", ".join(f"{name!r}: {_layout('spmd.R', word)}" for name, word in states.items())
    lines = [f"state_shardings={{{held}}}"]
    if makes:
        lines += [f"out_src_shardings={_activation('I')}", f"out_dst_shardings={_activation('R')}"]
    if module is not None:
        whole = "R" if shared or module.kind == "embedding" else "I"
        lines.append(f"in_src_shardings={{'input': {_activation(_word(module.arrives, whole))}}}")
        read = "R" if module.cut == "columns" or module.kind == "embedding" else "S(-1)"
        if _word(module.arrives, whole) != read and not (module.arrives == module.read and module.read.is_shard):
            lines.append(f"in_dst_shardings={{'input': {_activation(read)}}}")
        made = "P" if module.made.is_partial else "S(-1)"
        lines.append(f"out_src_shardings={_activation(made)}")
        given = made if module.given == module.made else _word(module.given, "I")
        if given != made:
            lines.append(f"out_dst_shardings={_activation(given)}")
        if module.kind == "embedding":
            lines.append("local_map=LocalMapConfig(in_grad_placements=None)")
    body = "".join(f"        {line},\n" for line in lines)
    return f"ShardingConfig(\n{body}    )"


def _word(placement: Placement, whole: str) -> str:
    return f"S({placement.dim})" if placement.is_shard else whole


def _activation(word: str) -> str:
    return _layout("spmd.S(0)", word)


def _layout(data: str, word: str) -> str:
    """A layout; where two axes cut one dim, their order is said apart."""
    if data == "spmd.S(0)" and word == "S(0)":
        return "SpmdLayout({DP: spmd.V, CP: spmd.R, TP: spmd.V}, partition_spec=((DP, TP),))"
    return f"SpmdLayout({{DP: {data}, CP: spmd.R, TP: spmd.{word}}})"
