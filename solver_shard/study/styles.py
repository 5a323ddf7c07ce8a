"""Plans for other tools as what they say of modules: a Hugging Face ``tp_plan``, a dict of ``parallelize_module`` styles.

>>> given = read_tp_plan('{"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}', name="tp_plan.json")
>>> given.styles["layers.*.self_attn.o_proj"]
Style(cut='rows', arrives=-1, given=None, ...)

Files are read as data and never run (:mod:`solver_shard.export.literal`). What a style does when it runs is
:mod:`solver_shard.study.borders`.

Sources: torch 2.13 ``torch.distributed.tensor.parallel.style`` and transformers 5.24 ``transformers.distributed.tensor_parallel``, whose
defaults stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from solver_shard.errors import InputError
from solver_shard.export.literal import Call, Name, read_assignments, read_value
from solver_shard.layout import Placement, R, S
from solver_shard.names import Paths, check_patterns, suggestion
from solver_shard.program import Program, Role

Cut = Literal["columns", "rows", "sequence", "input", "whole"]

Said = int | None
"""A placement as a style says it: a dim that is cut, counted from the end where it is negative, or None for replicated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What one style does with a module.

    Attributes:
        cut: weights by columns or rows; ``sequence``: whole weights, activations cut by sequence; ``input``: only the module's
            first input is moved; ``whole``: nothing.
        arrives: how its input lies where it is a plain tensor: what the style takes it for, rightly or not.
        wanted: how its input is to be read, for ``input``; the others' follows from the weight's cut.
        given: how it hands its output on.
        local: whether what it hands on is a plain tensor, and no DTensor.
        always: an input that is a DTensor is brought to where the weights need it, whatever ``arrives`` says (transformers does).
        shared: the name of what lays the input out for several modules at once; empty where the module does it for itself.
    """

    cut: Cut
    arrives: Said = None
    wanted: Said = None
    given: Said = None
    local: bool = True
    always: bool = False
    shared: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A plan for another tool.

    Attributes:
        name: of its row.
        tool: what runs it.
        styles: module pattern to style; ``*`` stands for any name between two dots.
        data: the template of the mesh axes that the styles say nothing about.
        axis: the mesh axis that they are about; None for the one called ``tp``, else the rightmost.
        size: of that axis, where the file says it.
        prefixed: patterns may leave out the name of the base model (``model.``).
    """

    name: str
    tool: Literal["transformers", "parallelize_module"]
    styles: Mapping[str, Style]
    data: str = "zero3"
    axis: str | None = None
    size: int | None = None
    prefixed: bool = False


_HF: Mapping[str, Style] = {
    "colwise": Style(cut="columns", given=-1, always=True),
    "colwise_gather_output": Style(cut="columns", always=True),
    "colwise_rep": Style(cut="columns", always=True),
    "rowwise": Style(cut="rows", arrives=-1, always=True),
    "rowwise_split_input": Style(cut="rows", always=True),
    "rowwise_rep": Style(cut="rows", always=True),
    "embedding_rowwise": Style(cut="rows", always=True),
    "embedding_colwise": Style(cut="columns", always=True),
    "sequence_parallel": Style(cut="sequence", arrives=1, given=1),
    "replicate": Style(cut="whole"),
    "replicated_with_grad_allreduce": Style(cut="whole"),
}
_CALLS = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput", "SharedInput", "Replicate", "Shard", "Partial")


def read_tp_plan(text: str, *, name: str, data: str | None = None, axis: str | None = None) -> Given:
    """A Hugging Face ``tp_plan``: the dict itself, or the arguments of a ``DistributedConfig``, or a config.json with one.

    transformers adds the plan that the model's class has (the head's, mostly) to a dict that it is given: ``model.tp_plan`` is the whole.

    Args:
        text: JSON or a Python literal.
        data: template of the other mesh axes; by default ``zero3``, or ``ddp`` where the file has replicas and no ``fsdp_size``.

    Raises:
        InputError: no such dict, or a style that cannot be followed.
    """
    value = read_assignments(text, file=name).get("base_model_tp_plan") if "base_model_tp_plan =" in text else read_value(text, file=name)
    outer: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    inner = [outer[key] for key in ("tp_plan", "base_model_tp_plan") if isinstance(outer.get(key), Mapping)]
    plan = inner[0] if inner else value
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(item, str) for pair in plan.items() for item in pair):
        raise InputError(f"{name}: no tp_plan was found; give {{'layers.*.self_attn.q_proj': 'colwise', ...}} as JSON or as a Python dict")
    check_patterns(plan, name)
    unknown = sorted({style for style in plan.values() if style not in _HF})
    if unknown:
        raise InputError(
            f"{name}: tp_plan styles {', '.join(unknown)[:200]} cannot be followed; known are {', '.join(_HF)}; take those rules "
            "out, or pin their weights in a file of pins"
        )
    size, sharded, replicas = (outer.get(key) for key in ("tp_size", "fsdp_size", "dp_replicate_size"))
    said = "ddp" if isinstance(replicas, int) and not (isinstance(sharded, int) and sharded > 1) else "zero3"
    return Given(
        name=name,
        tool="transformers",
        styles={pattern: _HF[style] for pattern, style in plan.items()},
        data=data or said,
        axis=axis,
        size=size if isinstance(size, int) else None,
        prefixed=True,
    )


def read_parallelize(text: str, *, name: str, data: str | None = None, axis: str | None = None) -> Given:
    """A dict of ``parallelize_module``: module pattern to style, by name or as a call such as ``RowwiseParallel(output_layouts=Shard(1))``.

    Args:
        text: JSON, a Python literal, or a Python file that assigns such a dict: ``TENSOR_PARALLEL`` as ``export --format parallelize``
            writes it, or the only one of calls. The file is not run.
        data: template of the other mesh axes; by default ``zero3``, or ``ddp`` where the file is an exported one without ``fully_shard``.

    Raises:
        InputError: no such dict, or a style that cannot be followed.
    """
    styles, said = _dictionary(text, name)
    if not isinstance(styles, Mapping) or not styles:
        raise InputError(
            f"{name}: no dict of parallel styles was found; give {{'module pattern': 'ColwiseParallel', ...}} as JSON or Python"
        )
    check_patterns([*map(str, styles)], name)
    return Given(
        name=name,
        tool="parallelize_module",
        styles={str(pattern): _style(str(pattern), style) for pattern, style in styles.items()},
        data=data or said,
        axis=axis,
    )


def module_styles(given: Given, program: Program) -> dict[str, Style]:
    """Module path to style, in the program's order.

    Raises:
        InputError: a pattern matches no module, or two patterns that match one disagree.
    """
    paths = _paths(program)
    tree = Paths(paths)
    prefixes = sorted({path.partition(".")[0] for path in paths if "." in path}) if given.prefixed else []
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style in given.styles.items():
        if given.prefixed and pattern.rpartition(".")[2] in ("weight", "bias") and pattern.rpartition(".")[0] in given.styles:
            continue  # transformers cuts parameters by a rule of their own beside the module's
        tries = (tree.matching(whole) for whole in (pattern, *(f"{prefix}.{pattern}" for prefix in prefixes)))
        matched = next(filter(None, tries), [])
        if not matched:
            raise InputError(f"{given.name}: no module of {program.name} is called {pattern!r}; {suggestion(pattern, paths)}")
        for path in (paths[k] for k in matched):
            before = found.setdefault(path, (pattern, style))
            if before[1] != style:
                raise InputError(f"{given.name}: {before[0]!r} and {pattern!r} disagree on {path}; drop one of them")
    return {path: found[path][1] for path in paths if path in found}


def placed(said: Said, dims: int) -> Placement:
    """A placement as a style says it, for a tensor of so many dims."""
    if said is None:
        return R
    return S(said % dims if dims else 0)


def _paths(program: Program) -> list[str]:
    """Every module that has parameters or computes something, and those above, outermost first where they begin alike."""
    found: dict[str, None] = {}
    owned = [tensor.name.rpartition(".")[0] for tensor in program.tensors if tensor.role is Role.PARAMETER]
    for path in (*owned, *(op.module for op in program.ops)):
        parts = path.split(".") if path else []
        found.update(dict.fromkeys(".".join(parts[:depth]) for depth in range(1, len(parts) + 1)))
    return list(found)


def _dictionary(text: str, name: str) -> tuple[Any, str]:
    """The dict of styles in a text, and the template that the rest of the file speaks for."""
    try:
        return read_value(text, calls=_CALLS, file=name), "zero3"
    except InputError as error:
        found = read_assignments(text, calls=_CALLS, file=name)
        if not found:
            raise error from None
    if "TENSOR_PARALLEL" in found:
        return found["TENSOR_PARALLEL"], "ddp" if "INPUT_AXES" in found and "FULLY_SHARD" not in found else "zero3"
    dicts = [value for value in found.values() if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value)]
    dicts = [value for value in dicts if all(isinstance(style, Call) for style in value.values())]
    if len(dicts) > 1:
        raise InputError(f"{name} assigns {len(dicts)} dicts of calls; call the one that is meant TENSOR_PARALLEL")
    return (dicts[0] if dicts else None), "zero3"


def _style(pattern: str, value: Any) -> Style:
    call = value if isinstance(value, Call) else Call(value.name if isinstance(value, Name) else str(value))
    if call.name == "SharedInput":
        if len(call.args) != 3 or not isinstance(call.args[1], Name):
            raise InputError(f"{pattern!r}: SharedInput has a style, the name of what lays the input out, and a placement")
        inner = _style(pattern, call.args[0])
        return Style(cut=inner.cut, arrives=_said(pattern, call.args[2]), given=inner.given, local=inner.local, shared=call.args[1].name)
    if call.name not in _STYLES:
        raise InputError(f"{pattern!r} has the style {call.name!r}, which cannot be followed; known are {', '.join(_STYLES)}")
    if call.args:
        raise InputError(f"{pattern!r}: {call.name} takes arguments by name, as in {call.name}(input_layouts=Shard(1))")
    arguments = dict(call.kwargs)
    style = _STYLES[call.name](pattern, arguments)
    if arguments:
        raise InputError(f"{pattern!r}: {call.name} has no argument {next(iter(arguments))!r} that can be followed")
    return style


def _columns(pattern: str, arguments: dict[str, Any]) -> Style:
    return Style(
        cut="columns",
        arrives=_said(pattern, arguments.pop("input_layouts", None)),
        given=_said(pattern, arguments.pop("output_layouts", None) or Call("Shard", (-1,))),
        local=bool(arguments.pop("use_local_output", True)),
    )


def _rows(pattern: str, arguments: dict[str, Any]) -> Style:
    return Style(
        cut="rows",
        arrives=_said(pattern, arguments.pop("input_layouts", None) or Call("Shard", (-1,))),
        given=_said(pattern, arguments.pop("output_layouts", None)),
        local=bool(arguments.pop("use_local_output", True)),
    )


def _sequence(pattern: str, arguments: dict[str, Any]) -> Style:
    dim = arguments.pop("sequence_dim", 1)
    if not isinstance(dim, int) or not 0 <= dim < 8:
        raise InputError(f"{pattern!r}: sequence_dim {dim!r} is no dim")
    return Style(cut="sequence", arrives=dim, given=dim, local=bool(arguments.pop("use_local_output", False)))


def _input(pattern: str, arguments: dict[str, Any]) -> Style:
    layouts, wanted = arguments.pop("input_layouts", None), arguments.pop("desired_input_layouts", None)
    keywords, desired = arguments.pop("input_kwarg_layouts", None), arguments.pop("desired_input_kwarg_layouts", None)
    if not all(value is None or isinstance(value, Mapping) for value in (keywords, desired)):
        raise InputError(f"{pattern!r}: input_kwarg_layouts and desired_input_kwarg_layouts are dicts, as in {{'hidden_states': Shard(1)}}")
    pairs = list(zip(_sequence_of(layouts), _sequence_of(wanted), strict=False))
    pairs += [(value, (desired or {}).get(key)) for key, value in (keywords or {}).items()]
    moved = [(a, b) for a, b in pairs if a is not None]
    if len(moved) != 1 or moved[0][1] is None:
        raise InputError(
            f"{pattern!r}: PrepareModuleInput is followed where it says where from and where to of one tensor, the hidden states"
        )
    arrives, target = (_said(pattern, value) for value in moved[0])
    return Style(cut="input", arrives=arrives, wanted=target, given=target, local=bool(arguments.pop("use_local_output", False)))


_STYLES = {"ColwiseParallel": _columns, "RowwiseParallel": _rows, "SequenceParallel": _sequence, "PrepareModuleInput": _input}


def _sequence_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _said(pattern: str, value: Any) -> Said:
    """``Replicate()``, ``Shard(1)``, or None where the style's own default is Replicate."""
    name = value.name if isinstance(value, Call | Name) else None if value is None else str(value)
    if name in (None, "Replicate"):
        return None
    dims = [*value.args, *value.kwargs.values()] if isinstance(value, Call) else []
    if name != "Shard" or len(dims) != 1 or not isinstance(dims[0], int) or not -8 <= dims[0] < 8:
        raise InputError(f"{pattern!r}: the placement {name!r} cannot be followed; Replicate() and Shard(dim) can")
    return int(dims[0])
