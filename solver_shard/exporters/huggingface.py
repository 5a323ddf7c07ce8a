"""A plan as a Hugging Face ``tp_plan``, in the keyword arguments of transformers' ``DistributedConfig``; and such plans as pins.

>>> print(export(plan).text)
{
  "tp_size": 4,
  "tp_plan": {
    "model.layers.*.self_attn.q_proj": "colwise",
  ...
>>> read('{"layers.*.self_attn.q_proj": "colwise"}', program)
('model.layers.0.self_attn.q_proj.weight=tp=S(0)', 'model.layers.1.self_attn.q_proj.weight=tp=S(0)')

transformers merges such a dict into the plan that the model's class has, so every module with parameters is named, those that stay whole
too. A style says how a module's weight is cut, what it makes of its input and in what layout it returns its output; each module
moves its tensors by itself, so in training three projections of one tensor reduce its gradient three times. Along a data
axis transformers calls ``fully_shard``, which here cuts dim 0. Names of styles are those of the transformers that is installed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from solver_shard.errors import InputError
from solver_shard.exporters import Dropped, Exported, check_lossless, merged
from solver_shard.exporters.eager import Eager, Parallel, compare, owner, read_data_parallel, read_eager, wrapped
from solver_shard.exporters.literal import Cut, read_assignments, read_value, weight_pins
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role
from solver_shard.text import template

TARGET = "hf"
_INSTALL = "pip install 'solver-shard[hf]'"
_NAMES: Mapping[str, tuple[str, ...]] = {
    "columns": ("colwise",),
    "columns, gathered": ("colwise_gather_output", "colwise_rep"),
    "rows": ("rowwise",),
    "rows of a whole input": ("rowwise_split_input", "rowwise_rep"),
    "embedding by rows": ("embedding_rowwise",),
    "embedding by columns": ("embedding_colwise",),
    "whole": ("replicate",),
    "whole, of cut activations": ("replicated_with_grad_allreduce",),
}
"""What a style does to its names, newest first: releases of transformers 5 renamed some."""
STYLES: Mapping[str, Cut] = {
    "colwise": "columns", "colwise_gather_output": "columns", "colwise_rep": "columns", "local_colwise": "columns",
    "rowwise": "rows", "rowwise_split_input": "rows", "rowwise_rep": "rows", "local_rowwise": "rows",
    "embedding_rowwise": "rows", "embedding_colwise": "columns",
    "replicate": "whole", "sequence_parallel": "whole", "replicated_with_grad_allreduce": "whole",
}  # fmt: skip
"""The styles that pins can follow: those that cut a dim once. Packed and expert styles interleave or act on activations."""


def export(plan: Plan, *, lossy: bool = False) -> Exported:
    """JSON text: the arguments of ``DistributedConfig``.

    Raises:
        InputError: the form cannot express the plan, and ``lossy`` is false; transformers is missing or too old for a style.
    """
    eager = read_eager(plan, reduces=True)
    data = read_data_parallel(plan, eager)
    more, notes = compare(plan, eager, shared=False)
    dropped = [*eager.dropped, *data.dropped, *more]
    if eager.tensor_axis is None:
        dropped.append(
            Dropped(
                tensors=tuple(t.name for t in plan.tensors if t.role == "parameter"),
                what="not cut by any axis where they are used",
                why="a tp_plan is about such an axis",
            )
        )
    styles = _wildcards({m.path: _style(plan, m, dropped) for m in eager.modules} | _whole(eager), dropped)
    known = _known_styles()
    tp_plan = {pattern: _name(style, known) for pattern, style in styles.items()}
    made: dict[str, Any] = {
        "tp_size": 1 if eager.tensor_axis is None else plan.mesh.shape[plan.mesh.index(eager.tensor_axis)],
        "tp_plan": tp_plan,
    }
    if data.shard_axes or data.replicate_axes:
        made |= _fsdp(plan, data.shard_axes, data.replicate_axes, data.dims, data.keeps, dropped)
    if plan.mesh.names.index(eager.tensor_axis or plan.mesh.names[-1]) != len(plan.mesh.names) - 1:
        dropped.append(
            Dropped(
                tensors=tuple(m.path for m in eager.modules),
                what=f"cut by {eager.tensor_axis}, which is not the last axis of {plan.mesh}",
                why="transformers makes its tensor axis the last one of the mesh",
            )
        )
    found = merged(dropped)
    check_lossless(TARGET, found, lossy=lossy)
    return Exported(text=json.dumps(made, indent=2) + "\n", dropped=found, notes=(*data.notes, *notes))


def read(text: str, program: Program, *, axis: str = "tp") -> tuple[str, ...]:
    """Pins for the weights that a ``tp_plan`` cuts.

    Args:
        text: JSON or a Python literal: the dict itself, or one that holds it as ``tp_plan`` or ``base_model_tp_plan`` (a config.json
            does), whose names may leave out the prefix of the base model (``model.``).

    Raises:
        InputError: no such dict, a style that is no cut of whole dims, or a pattern that matches nothing.
    """
    value = read_assignments(text).get("base_model_tp_plan") if "base_model_tp_plan =" in text else read_value(text)
    if isinstance(value, Mapping):
        inner = [value[key] for key in ("tp_plan", "base_model_tp_plan") if isinstance(value.get(key), Mapping)]
        value = inner[0] if inner else value
    if not isinstance(value, Mapping) or not all(isinstance(item, str) for pair in value.items() for item in pair):
        raise InputError("no tp_plan was found; give {'layers.*.self_attn.q_proj': 'colwise', ...} as JSON or as a Python dict")
    unknown = sorted({style for style in value.values() if style not in STYLES})
    if unknown:
        raise InputError(
            f"tp_plan styles {', '.join(unknown)[:200]} cannot be said as pins; known are {', '.join(STYLES)}; take those rules out"
        )
    owners = {template(owner(t.name)).replace("#", "*") for t in program.tensors if t.role is Role.PARAMETER}
    owners |= {template(t.name).replace("#", "*") for t in program.tensors if t.role is Role.PARAMETER}
    prefixes = sorted({name.partition(".")[0] for name in owners if "." in name})
    cuts: dict[str, Cut] = {}
    for pattern, style in value.items():
        whole = next(
            (p for p in (pattern, *(f"{prefix}.{pattern}" for prefix in prefixes)) if template(p).replace("#", "*") in owners), pattern
        )
        cuts[whole] = STYLES[style]
    return weight_pins(cuts, program, axis)


def _style(plan: Plan, module: Parallel, dropped: list[Dropped]) -> str:
    """The key of ``_NAMES`` for a module; layouts of its input or output that no style has are dropped."""
    shape = plan.tensors[module.result].shape
    last = len(shape) - 1
    enters_whole = module.arrives.is_replicate
    if not enters_whole and not (module.cut == "rows" and module.arrives == module.read):
        dropped.append(
            Dropped(tensors=(module.path,), what=f"its input lies {module.arrives}", why="a style takes it whole, or cut as rows need it")
        )
    if not module.given.is_replicate and not (module.cut == "columns" and module.given == last and module.kind == "linear"):
        dropped.append(
            Dropped(
                tensors=(module.path,), what=f"its output is handed on {module.given}", why="a style returns it whole, or as columns lie"
            )
        )
    if module.kind == "embedding":
        return f"embedding by {module.cut}"
    if module.cut == "columns":
        return "columns, gathered" if module.given.is_replicate else "columns"
    return "rows of a whole input" if enters_whole else "rows"


def _whole(eager: Eager) -> dict[str, str]:
    return {path: "whole, of cut activations" if path in eager.partial else "whole" for path in eager.whole}


def _wildcards(styles: Mapping[str, str], dropped: list[Dropped]) -> dict[str, str]:
    """One rule for all copies of a layer: transformers replaces every number in a name before it looks a rule up."""
    groups: dict[str, dict[str, str]] = {}
    for path, style in styles.items():
        groups.setdefault(template(path).replace("#", "*"), {})[path] = style
    found = {}
    for pattern, members in groups.items():
        values = list(members.values())
        most = max(dict.fromkeys(values), key=values.count)
        other = tuple(path for path, style in members.items() if style != most)
        if other:
            dropped.append(
                Dropped(tensors=other, what=f"{members[other[0]]}, unlike other layers", why=f"one rule holds for all numbers: {most}")
            )
        found[pattern] = most
    return found


def _fsdp(
    plan: Plan,
    shard: tuple[str, ...],
    replicate: tuple[str, ...],
    dims: Mapping[str, int],
    keeps: Mapping[str, bool],
    dropped: list[Dropped],
) -> dict[str, Any]:
    """The arguments for the data axes."""

    def size(axes: tuple[str, ...]) -> int:
        found = 1
        for name in axes:
            found *= plan.mesh.shape[plan.mesh.index(name)]
        return found

    other = tuple(name for name, dim in dims.items() if dim)
    if other:
        dropped.append(
            Dropped(tensors=other, what=f"cut by dim {dims[other[0]]} over {', '.join(shard)}", why="transformers' fully_shard cuts dim 0")
        )
    if not shard:
        dropped.append(
            Dropped(
                tensors=tuple(dims),
                what=f"whole on {', '.join(replicate)}",
                why="transformers cuts parameters over its data axes (fsdp_size); data parallelism alone is the training loop's",
            )
        )
        return {}
    frees = wrapped(plan, keeps)
    folded = _wildcards({path: "free_full_weight" if free else "keep_full_weight" for path, free in frees.items() if path}, dropped)
    made: dict[str, Any] = {"fsdp_size": size(shard)}
    if replicate:
        made["dp_replicate_size"] = size(replicate)
    return made | {"fsdp_plan": folded}


def _known_styles() -> Collection[str]:
    try:
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        raise InputError(f"names of styles are those of the installed transformers, and it cannot be imported; run: {_INSTALL}") from None
    return list(ALL_PARALLEL_STYLES)


def _name(style: str, known: Collection[str]) -> str:
    for name in _NAMES[style]:
        if name in known:
            return name
    import transformers

    raise InputError(
        f"transformers {transformers.__version__} has no style for {style} (one of {', '.join(_NAMES[style])}); install a release that has"
    )
