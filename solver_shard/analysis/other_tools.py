"""Plans for other tools as what they say of modules: a Hugging Face ``tp_plan``, a dict of ``parallelize_module`` styles.

>>> given = read_tp_plan('{"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}', name="tp_plan.json")
>>> given.styles["layers.*.self_attn.o_proj"]
Style(cut='rows', arrives=-1, given=None, ...)

Files are read as data and never run (:mod:`solver_shard.exporters.literal`). What a style does when it runs is
:mod:`solver_shard.analysis.other_tools`.

Sources: torch 2.13 ``torch.distributed.tensor.parallel.style`` and transformers 5.24 ``transformers.distributed.tensor_parallel``, whose
defaults stand here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from solver_shard.arguments import checked
from solver_shard.errors import InputError, InternalError
from solver_shard.exporters.literal import LiteralCall, Name, read_assignments, read_value
from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.nodes import Lowering, OpNode, SourceNode, StateNode
from solver_shard.layout import Placement, R, S
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor
from solver_shard.rules.rule import AxisStrategy, Rule
from solver_shard.rules.rulebook import Rulebook
from solver_shard.text import Paths, check_patterns, fold_names, suggestion

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
class ToolPlan:
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


@checked
def read_tp_plan(text: str, *, name: str, data: str | None = None, axis: str | None = None) -> ToolPlan:
    """A Hugging Face ``tp_plan``: the dict itself, or the arguments of a ``DistributedConfig``, or a config.json with one.

    transformers adds the plan that the model's class has (the head's, mostly) to a dict that it is given: ``model.tp_plan`` is the whole.

    >>> read_tp_plan('{"layers.*.q_proj": "colwise"}', name="mine").name  # doctest: +SKIP
    'mine'

    Args:
        text: JSON or a Python literal.
        name: of its row in a comparison.
        axis: the mesh axis that it is about; default tp, or the rightmost.
        data: template of the other mesh axes; by default ``zero3``, or ``ddp`` where the file has replicas and no ``fsdp_size``.

    Returns:
        What ``compare(given=[...])`` takes.

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
    return ToolPlan(
        name=name,
        tool="transformers",
        styles={pattern: _HF[style] for pattern, style in plan.items()},
        data=data or said,
        axis=axis,
        size=size if isinstance(size, int) else None,
        prefixed=True,
    )


@checked
def read_parallelize(text: str, *, name: str, data: str | None = None, axis: str | None = None) -> ToolPlan:
    """A dict of ``parallelize_module``: module pattern to style, by name or as a call such as ``RowwiseParallel(output_layouts=Shard(1))``.

    >>> read_parallelize('{"layers.*.q_proj": "ColwiseParallel"}', name="mine").name  # doctest: +SKIP
    'mine'

    Args:
        text: JSON, a Python literal, or a Python file that assigns such a dict: ``TENSOR_PARALLEL`` as ``export --format parallelize``
            writes it, or the only one of calls. The file is not run.
        name: of its row in a comparison.
        axis: the mesh axis that it is about; default tp, or the rightmost.
        data: template of the other mesh axes; by default ``zero3``, or ``ddp`` where the file is an exported one without ``fully_shard``.

    Returns:
        What ``compare(given=[...])`` takes.

    Raises:
        InputError: no such dict, or a style that cannot be followed.
    """
    styles, said = _dictionary(text, name)
    if not isinstance(styles, Mapping) or not styles:
        raise InputError(
            f"{name}: no dict of parallel styles was found; give {{'module pattern': 'ColwiseParallel', ...}} as JSON or Python"
        )
    check_patterns([*map(str, styles)], name)
    return ToolPlan(
        name=name,
        tool="parallelize_module",
        styles={str(pattern): _style(str(pattern), style) for pattern, style in styles.items()},
        data=data or said,
        axis=axis,
    )


def module_styles(given: ToolPlan, program: Program) -> dict[str, Style]:
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
    dicts = [value for value in dicts if all(isinstance(style, LiteralCall) for style in value.values())]
    if len(dicts) > 1:
        raise InputError(f"{name} assigns {len(dicts)} dicts of calls; call the one that is meant TENSOR_PARALLEL")
    return (dicts[0] if dicts else None), "zero3"


def _style(pattern: str, value: Any) -> Style:
    call = value if isinstance(value, LiteralCall) else LiteralCall(value.name if isinstance(value, Name) else str(value))
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
        given=_said(pattern, arguments.pop("output_layouts", None) or LiteralCall("Shard", (-1,))),
        local=bool(arguments.pop("use_local_output", True)),
    )


def _rows(pattern: str, arguments: dict[str, Any]) -> Style:
    return Style(
        cut="rows",
        arrives=_said(pattern, arguments.pop("input_layouts", None) or LiteralCall("Shard", (-1,))),
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
    name = value.name if isinstance(value, LiteralCall | Name) else None if value is None else str(value)
    if name in (None, "Replicate"):
        return None
    dims = [*value.args, *value.kwargs.values()] if isinstance(value, LiteralCall) else []
    if name != "Shard" or len(dims) != 1 or not isinstance(dims[0], int) or not -8 <= dims[0] < 8:
        raise InputError(f"{pattern!r}: the placement {name!r} cannot be followed; Replicate() and Shard(dim) can")
    return int(dims[0])


# What styles move where: a program in which every module of a style has a border, and the layouts along the tensor axis that follow.
#
# A style is about one mesh axis. Of a module it says how weights are cut, how the input arrives and how the output is handed on; at
# these borders tensors move, in backward their gradients the other way, and *each module moves its own*: three projections of one input
# that lies whole each reduce its gradient. In between there is no one who moves anything: ops run on what is there. So
#
# - a border that moves something is an identity op of its own, whose operand lies as the tensor arrives and whose result lies as it is
#   handed on; readers of one identity share nothing with readers of another, so every collective of the tool is one of the plan;
# - every other op runs in the one way that takes its operands as they lie (a whole operand may be cut by each device for itself). Where an
#   op has no such way, plain tensors would give wrong numbers, which is an error here; DTensors would move by DTensor's own greedy choice,
#   for which the fewest bytes stand here, with a note.
#
# At a border (torch's and transformers' styles are the same in this, but for what is said of DTensor inputs):
#
#     forward                                          backward
#     input: arrives -> as the weight's cut needs it   what the module leaves of the input's gradient -> as the input arrived
#     output: as the op leaves it -> as handed on      gradient as the output is handed on -> as the op left it, R where that was partial
#
# An input that is a DTensor already (``SequenceParallel``, ``PrepareModuleInput`` and styles with ``use_local_output=False`` hand them
# on) and is not moved has no border: its gradient flows on as it is, which is how one ``PrepareModuleInput`` serves several modules
# with one gather and one reduction. Checkpointed modules pass their borders again when they are computed again.

_EINSUM, _EMBEDDING, _ADD = "aten.einsum.default", "aten.embedding.default", "aten.add.Tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacements:
    """How an op runs on the tensor axis: placements of its operands and results, and the implementation, if it is one."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    implementation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bordered:
    """A program with borders.

    Attributes:
        stored: placement of every source.
        ways: of every op, in the program's order.
        notes: what DTensor decides, and where it would raise.
    """

    program: Program
    stored: Mapping[int, Placement]
    ways: tuple[OpPlacements, ...]
    notes: tuple[str, ...]


def bordered(program: Program, styles: Mapping[str, Style], size: int, rulebook: Rulebook) -> Bordered:
    """Put the borders of the styles into a program.

    Args:
        styles: by module path.
        size: devices along the axis that the styles are about.

    Raises:
        InputError: a module is no linear layer or embedding where its style needs one, an input does not lie as a style takes it to,
            or plain tensors would be computed with in part.
    """
    return _Follower(program, styles, size, rulebook).run()


@dataclass(slots=True, kw_only=True)
class _StyledModule:
    """A linear module or an embedding under a style; positions are the program's.

    Attributes:
        forward: its product or look-up, where it runs and where it is computed again.
        last: the op whose result is the module's output (that adds the bias, where there is one), for each of these.
        data: what makes the gradient of its input; None where that has none.
        gradient: what it is given in backward; None where nothing is.
        made, given: how its op leaves the output, and how it is handed on.
    """

    path: str
    style: Style
    linear: bool
    weight: int
    forward: dict[int, int] = field(default_factory=dict)
    data: int | None = None
    gradient: int | None = None
    made: Placement = R
    given: Placement = R


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A border at which an input is moved for some modules: by their own style, by what they share, or by a module around them.

    Attributes:
        merged: tensors: what the members leave of the input's gradient, added up.
        arrived: to where that is brought; None where the input is a DTensor that is not moved, so that there is no border.
    """

    where: str
    members: tuple[str, ...]
    style: Style
    merged: tuple[int, ...]
    arrived: Placement | None = None


class _Follower:
    def __init__(self, program: Program, styles: Mapping[str, Style], size: int, rulebook: Rulebook) -> None:
        self.program, self.styles, self.size, self.rulebook = program, styles, size, rulebook
        self.parameters = {tensor.name: t for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}
        self.readers = program.readers()
        self.tensors: list[Tensor] = list(program.tensors)
        self.ops: list[Op] = []
        self.ways: list[OpPlacements] = []
        self.notes: dict[str, None] = {}
        self.lies: dict[int, Placement] = {}
        self.dtensor: set[int] = set()
        self.entered: dict[tuple[int, int], None] = {}
        """Entry and input that have been dealt with."""
        self.within: set[tuple[str, int]] = set()
        """Module and input that is a DTensor inside it."""
        self.handed: dict[int, int] = {}
        """Tensor to what all later readers read in its place."""
        self.views: dict[tuple[str, int], int] = {}
        """Module and tensor to what the module reads in its place."""
        self.cores = {path: core for path, style in styles.items() if (core := self._core(path, style)) is not None}
        self.core_at = {i: core for core in self.cores.values() for i in core.forward}
        self.last_at = {i: core for core in self.cores.values() for i in core.forward.values()}
        self.entries = self._entries()
        self.stored = {t: self._stored(t) for t in program.sources()}

    def run(self) -> Bordered:
        self.lies |= self.stored
        self.dtensor |= {core.weight for core in self.cores.values()}
        for path, style in self.styles.items():
            if style.cut == "sequence":
                self.dtensor |= {t for name, t in self.parameters.items() if _inside(name, path)}
        for i, op in enumerate(self.program.ops):
            self._arrive(i, op)
            self._op(i, self._renamed(op))
            for t in op.results:
                self._leave(i, op, t)
        made = dataclasses.replace(
            self.program,
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            outputs=tuple(self.handed.get(t, t) for t in self.program.outputs),
        )
        return Bordered(program=made, stored=self.stored, ways=tuple(self.ways), notes=tuple(self.notes))

    # What the styles are about

    def _core(self, path: str, style: Style) -> _StyledModule | None:
        if style.cut not in ("columns", "rows"):
            return None
        weight = self.parameters.get(f"{path}.weight")
        if weight is None:
            raise InputError(f"{path} is cut by {style.cut}, and has no weight of its own (tied to another module's?); take the rule out")
        core = _StyledModule(path=path, style=style, linear=True, weight=weight)
        for i, k in self.readers.get(weight, ()):
            op = self.program.ops[i]
            if op.phase is Phase.FORWARD or op.recompute:
                core.linear = self._check_core(core, op, k)
                core.forward[i] = self._last(i, path)
            elif op.name == _EINSUM and self.program.tensors[op.results[0]].role is not Role.GRADIENT:
                core.data, core.gradient = i, op.operands[1 - k]
        if not core.forward:
            raise InputError(f"{path} is cut by {style.cut}, but the step does not run it; take the rule out")
        if core.gradient is None:
            core.gradient = self._given(core)
        return core

    def _check_core(self, core: _StyledModule, op: Op, k: int) -> bool:
        """Whether it is a linear module, rather than an embedding; others are refused, as torch does."""
        shape = self.program.tensors[core.weight].shape
        if op.name == _EMBEDDING:
            return False
        letters = op.attributes["equation"].split("->")[0].split(",") if op.name == _EINSUM else ["", ""]
        if op.name != _EINSUM or len(shape) != 2 or letters[k][-1] != letters[1 - k][-1]:
            raise InputError(f"{core.path} is cut by {core.style.cut}, and is neither an nn.Linear nor an nn.Embedding; take the rule out")
        return True

    def _last(self, i: int, path: str) -> int:
        """The op that makes a module's output: the product, or the addition of its bias."""
        bias = self.parameters.get(f"{path}.bias")
        for reader, _ in self.readers.get(self.program.ops[i].results[0], ()):
            if self.program.ops[reader].name == _ADD and bias in self.program.ops[reader].operands:
                return reader
        return i

    def _given(self, core: _StyledModule) -> int | None:
        """The gradient that a module without a gradient of its input is given: what its weight's gradient is made of."""
        for op in self.program.ops:
            made = op.phase is Phase.BACKWARD and not op.recompute and op.module == core.path
            if made and (op.name == _EINSUM or "embedding" in op.name):
                return op.operands[0]
        return None

    def _entries(self) -> list[_Entry]:
        """Borders of inputs, those of modules around others first."""
        found = []
        for path, style in self.styles.items():
            if style.cut == "input":
                members = tuple(core for core in self.cores if _inside(core, path))
                x = self._first_input(path)
                members = tuple(m for m in members if any(x in self.program.ops[i].operands for i in self.cores[m].forward))
                others = [i for i, _ in self.readers[x] if _inside(self.program.ops[i].module, path) and self._forward(i)]
                if not members or any(i not in self.core_at for i in others):
                    raise InputError(
                        f"PrepareModuleInput on {path}: its input {self.program.tensors[x].name} is read by more than linear modules that "
                        "are cut, which cannot be followed; put the style on these modules"
                    )
                found.append(_Entry(where=path, members=members, style=style, merged=self._merged(members)))
        shared: dict[tuple[str, int], list[_StyledModule]] = {}
        for path, core in self.cores.items():
            if core.style.shared:
                first = next(iter(core.forward))
                x = next(t for t in self.program.ops[first].operands if t != core.weight)
                shared.setdefault((core.style.shared, x), []).append(core)
            else:
                found.append(_Entry(where=path, members=(path,), style=core.style, merged=self._merged((path,))))
        for cores in shared.values():
            members = tuple(core.path for core in cores)
            found.append(_Entry(where=members[0], members=members, style=cores[0].style, merged=self._merged(members)))
        return found

    def _first_input(self, path: str) -> int:
        """The first activation from outside that a module's ops read: the hidden states."""
        inside = {t for op in self.program.ops if _inside(op.module, path) for t in op.results}
        for i, op in enumerate(self.program.ops):
            if _inside(op.module, path) and self._forward(i):
                for t in op.operands:
                    if t not in inside and self.program.tensors[t].role in (Role.ACTIVATION, Role.INPUT):
                        return t
        raise InputError(f"{path} reads nothing that could be moved; take the rule out")

    def _merged(self, members: Sequence[str]) -> tuple[int, ...]:
        """The gradients that modules leave of one input, as far as backward adds them to each other and to nothing else."""
        parts = {self.program.ops[core.data].results[0] for path in members if (core := self.cores[path]).data is not None}
        for op in self.program.ops:
            if op.phase is Phase.BACKWARD and op.name == _ADD and len(op.operands) == 2 and set(op.operands) <= parts:
                parts = (parts - set(op.operands)) | set(op.results)
        return tuple(sorted(parts))

    def _forward(self, i: int) -> bool:
        return self.program.ops[i].phase is Phase.FORWARD or self.program.ops[i].recompute

    def _stored(self, t: int) -> Placement:
        tensor = self.program.tensors[t]
        path, _, last = tensor.name.rpartition(".")
        core = self.cores.get(path) if tensor.role is Role.PARAMETER else None
        if core is None or (last != "weight" and core.style.cut == "rows"):
            return R
        return S(0) if (core.style.cut == "columns") == core.linear else S(1)

    # Borders

    def _arrive(self, i: int, op: Op) -> None:
        """Borders in front of an op: inputs of modules in forward, gradients of their outputs in backward."""
        if i in self.core_at:
            core = self.core_at[i]
            x = next(t for t in op.operands if t != core.weight)
            for k, entry in enumerate(self.entries):
                if core.path in entry.members and (k, x) not in self.entered:
                    self.entered[k, x] = None
                    self._enter(entry, core, x, op)
        elif self._forward(i):
            style = self.styles.get(op.module)
            if style is not None and style.cut == "sequence":
                self._check_sequence(op, style)
        elif (given := self.cores.get(op.module)) is not None and given.gradient in op.operands:
            self._return(given, op)

    def _enter(self, entry: _Entry, core: _StyledModule, x: int, op: Op) -> None:
        """An input's way into the modules of a border."""
        style, now = entry.style, self.views.get((core.path, x), self.handed.get(x, x))
        tensor, lies = self.tensors[now], self.lies[now]
        dims, held = len(tensor.shape), now in self.dtensor or (core.path, x) in self.within
        said = placed(style.arrives, dims)
        if not held and lies != said:
            raise InputError(
                f"the style of {entry.where} takes its input for {said}, but {tensor.name} arrives {lies} there, as a plain tensor, and "
                "the numbers would be wrong; say input_layouts as it arrives, or hand it on so before"
            )
        wanted = placed(style.wanted, dims) if style.cut == "input" else self._needed(core, dims)
        moves = lies != wanted and (style.always or not held or said != wanted)
        entry.arrived = lies if moves or not held else None
        if moves:
            lying = self._identity(now, lies, lies, f"{tensor.name} (as handed to {entry.where})", op)
            now = self._identity(lying, wanted, wanted, f"{tensor.name} (as read in {entry.where})", op)
        for path in entry.members:
            self.views[path, x] = now
            if style.cut != "input" or not style.local:
                self.within.add((path, x))
            else:
                self.within.discard((path, x))

    def _needed(self, core: _StyledModule, dims: int) -> Placement:
        return S(dims - 1) if core.linear and core.style.cut == "rows" else R

    def _leave(self, i: int, op: Op, t: int) -> None:
        """Borders behind an op: outputs of modules in forward, gradients of their inputs in backward."""
        core = self.last_at.get(i)
        if core is not None:
            core.made, core.given = self.lies[t], placed(core.style.given, len(self.tensors[t].shape))
            now = t
            if core.made != core.given:
                name = self.tensors[t].name
                self.tensors[t] = dataclasses.replace(self.tensors[t], name=f"{name} (as computed)")
                now = self.handed[t] = self._identity(t, core.given, core.given, name, op, role=self.tensors[t].role)
            (self.dtensor.discard if core.style.local else self.dtensor.add)(now)
        for entry in reversed(self.entries) if not self._forward(i) else ():
            if t in entry.merged and entry.arrived is not None:
                now, target = self.handed.get(t, t), R if entry.arrived.is_partial else entry.arrived
                if self.lies[now] != target:
                    name = f"{self.tensors[t].name} (as {entry.where} leaves it)"
                    self.handed[t] = self._identity(now, target, target, name, op)

    def _return(self, core: _StyledModule, op: Op) -> None:
        """A gradient's way into a module whose output was moved."""
        g = core.gradient
        if g is None or (core.path, g) in self.views or core.made == core.given:
            return
        now, target = self.handed.get(g, g), R if core.made.is_partial else core.made
        lies, name = self.lies[now], self.tensors[now].name
        if lies != target:
            lying = self._identity(now, lies, lies, f"{name} (as handed to {core.path})", op)
            now = self._identity(lying, target, target, f"{name} (as read in {core.path})", op)
        self.views[core.path, g] = now

    def _check_sequence(self, op: Op, style: Style) -> None:
        """Modules that run on a cut sequence take it as it arrives; moving it is not followed."""
        for t in op.operands:
            now = self.handed.get(t, t)
            tensor = self.tensors[now]
            wide = tensor.role is Role.ACTIVATION and len(tensor.shape) > (style.arrives or 0) and tensor.shape[style.arrives or 0] > 1
            wanted = placed(style.arrives, len(tensor.shape))
            if wide and self.lies[now] != wanted:
                raise InputError(
                    f"the style of {op.module} takes its input for {wanted}, but {tensor.name} arrives {self.lies[now]} there; let the "
                    "modules before it hand it on so, as in RowwiseParallel(output_layouts=Shard(1))"
                )

    def _identity(self, t: int, read: Placement, given: Placement, name: str, op: Op, role: Role = Role.ACTIVATION) -> int:
        """An identity op in front of or behind another; the tensor that it hands on."""
        made = len(self.tensors)
        names = {tensor.name for tensor in self.tensors[len(self.program.tensors) :]}
        while name in names:  # a module that runs several times
            name += "'"
        self.tensors.append(dataclasses.replace(self.tensors[t], name=name, role=role, trainable=False))
        self.ops.append(
            Op(
                name="aten.alias.default",
                operands=(t,),
                results=(made,),
                attributes={"self": Ref(0)},
                phase=op.phase,
                module=op.module,
                recompute=op.recompute,
            )
        )
        self.ways.append(OpPlacements(operands=(read,), results=(given,)))
        self.lies[made] = given
        return made

    # Ops in between

    def _renamed(self, op: Op) -> Op:
        """An op that reads what its module, or everyone by now, reads in the place of its operands."""
        operands = tuple(self.views.get((op.module, t), self.handed.get(t, t)) for t in op.operands)
        return dataclasses.replace(op, operands=operands)

    def _op(self, i: int, op: Op) -> None:
        rule, lies = self.rulebook.rule(self.program, i), tuple(self.lies[t] for t in op.operands)
        core = i in self.core_at
        style = self.styles.get(op.module)
        inside = style is not None and style.cut == "sequence"
        held = {t in self.dtensor for t in op.operands if self.tensors[t].numel > 1}
        if len(held) > 1 and self._forward(i) and not core and not inside and i not in self.last_at:
            self.notes.setdefault(f"DTensor raises in {op.module or 'the model'}: {op.name} is given DTensors and plain tensors")
        found, moved = self._way(rule, op, lies, implementations=core or "embedding" in op.name)
        if moved:
            what = ", ".join(f"{self.tensors[op.operands[j]].name} from {lies[j]} to {found.operands[j]}" for j in moved)
            if True not in held and self._forward(i) and not inside:
                raise InputError(
                    f"{op.name} in {op.module or 'the model'} would run on parts of plain tensors, and the numbers would be wrong: it "
                    f"needs {what}; give the module before it other output_layouts"
                )
            self.notes.setdefault(f"DTensor decides in {op.module or 'the model'}: {op.name} takes {what}, here the fewest bytes")
        self.ops.append(op)
        self.ways.append(OpPlacements(operands=found.operands, results=found.results, implementation=_name(found)))
        self.lies.update(zip(op.results, found.results, strict=True))
        if (True in held and not core) or inside:
            local = inside and style is not None and style.local
            self.dtensor |= set() if local else set(op.results)

    def _way(self, rule: Rule, op: Op, lies: tuple[Placement, ...], *, implementations: bool) -> tuple[AxisStrategy, tuple[int, ...]]:
        """The strategy that takes the operands as they lie, and the operands that must be moved for it, which are none if possible.

        Among those, first the one with the fewest bytes to move, then with the fewest local cuts, then the first.
        """
        shapes = [self.tensors[t].shape for t in (*op.operands, *op.results)]
        best: tuple[tuple[int, int], AxisStrategy, tuple[int, ...]] | None = None
        for strategy in rule.strategies():
            if (strategy.implementation is not None and not implementations) or not self._legal(rule, strategy, shapes):
                continue
            nbytes, cuts, moved = 0, 0, []
            for j, (now, wanted) in enumerate(zip(lies, strategy.operands, strict=True)):
                if now == wanted or not rule.needs(j):
                    continue
                if now == R:
                    cuts += 1
                    continue
                moved.append(j)
                nbytes += self.tensors[op.operands[j]].nbytes * (2 if now.is_partial and wanted == R else 1)
            if best is None or (nbytes, cuts) < best[0]:
                best = (nbytes, cuts), strategy, tuple(moved)
        assert best is not None, "an op can always run on whole tensors"
        return best[1], best[2]

    def _legal(self, rule: Rule, strategy: AxisStrategy, shapes: Sequence[tuple[int, ...]]) -> bool:
        if strategy.factor is not None and not rule.factors[strategy.factor].legal(self.size):
            return False
        placements = (*strategy.operands, *strategy.results)
        return all(not p.is_shard or shape[p.dim] >= self.size for p, shape in zip(placements, shapes, strict=True))


def _name(strategy: AxisStrategy) -> str:
    return "" if strategy.implementation is None else strategy.implementation.name


def _inside(path: str, module: str) -> bool:
    """Whether a module or parameter is a module, or lies in it."""
    return path == module or path.startswith(f"{module}.")


# Plans for other tools as plans of ours: what transformers or ``parallelize_module`` would run, collective by collective.
#
# >>> followed = follow(read_parallelize(text, name="tp.py"), program, mesh)
# >>> plan_program(followed.program, options=replace(options, template=followed.template, ...), baseline=followed.narrow, ...)
#
# :mod:`solver_shard.analysis.other_tools` says what moves along the tensor axis. On it the choice graph is narrowed to that: how every op
# runs, how every parameter is stored, its optimizer state like it. On the other axes, about which styles say nothing, the plan follows a
# template: ``zero3`` (as transformers' and torch's ``fully_shard`` do) or another one, by the name that ``ToolPlan.data`` has.
#
# What is counted: the collectives of forward and backward along the tensor axis are those that the tool issues, in number, kind and bytes
# (held against real processes in ``tests/analysis/test_given_processes.py``). What a tool leaves to the training loop is the plan's own:
# the gradients of parameters that are whole, and were used on cut activations, go to their parameters' layout before the update; along data
# axes it is what the template says.


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedPlan:
    """A given plan, followed through a program.

    Attributes:
        axis: position of the tensor axis.
        template: of all axes; ``free`` on the tensor axis, whose choices ``narrow`` takes away.
        whole: matrices that no style names.
    """

    given: ToolPlan
    bordered: Bordered
    mesh: Mesh
    axis: int
    template: str
    whole: tuple[str, ...]

    @property
    def program(self) -> Program:
        """With a place for every border."""
        return self.bordered.program

    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan must know."""
        name, others = self.mesh.names[self.axis], [axis for a, axis in enumerate(self.mesh.names) if a != self.axis]
        said = [f"what {self.given.tool} runs along {name}" + (f"; {', '.join(others)} by {self.given.data}" if others else "")]
        if self.whole:
            adds = "; transformers adds the rules of the model's class, write down model.tp_plan" if self.given.prefixed else ""
            said.append(f"no rule names {', '.join(self.whole)}: whole along {name}{adds}")
        return (*said, *fold_names(self.bordered.notes))

    def narrow(self, lowered: Lowered) -> tuple[Masks, str]:
        """The baseline: what is given as the only choice along the tensor axis, and what a plan records of it."""
        lowering = lowered.lowering
        masks: dict[int, NDArray[np.bool_]] = {}
        for v, node in enumerate(lowering.nodes):
            if isinstance(node, (SourceNode, StateNode)):
                wanted = self.bordered.stored[node.tensor]
                masks[v] = np.array([_cut(layout[self.axis]) == _cut(wanted) for layout in node.layouts])
            elif isinstance(node, OpNode):
                masks[v] = self._agreeing(lowering, node.op)
            if v in masks and not masks[v].any():
                where = (
                    lowering.program.ops[node.op] if isinstance(node, OpNode) else lowering.program.tensors[lowering.tensor_node(v).tensor]
                )
                raise InternalError(f"{self.given.name}: the choice graph has no such strategy of {where.name}")
        return masks, f"{self.given.tool}: {self.given.name}"

    def _agreeing(self, lowering: Lowering, i: int) -> NDArray[np.bool_]:
        """The strategies of an op that run it as is given along the tensor axis."""
        column, way = lowering.strategies[i], self.bordered.ways[i]
        wanted = [
            k
            for k, single in enumerate(column.single)
            if (single.operands, single.results) == (way.operands, way.results)
            and (single.implementation.name if single.implementation else "") == way.implementation
        ]
        found: NDArray[np.bool_] = np.isin(column.axis_choice[:, self.axis], wanted)
        return found


def follow(given: ToolPlan, program: Program, mesh: Mesh, rulebook: Rulebook | None = None) -> FollowedPlan:
    """Follow a given plan through a program.

    Raises:
        InputError: its patterns match nothing, it is for another mesh, or it does not compute what the model computes.
    """
    name = given.axis or ("tp" if "tp" in mesh.names else mesh.names[-1])
    axis = mesh.index(name)
    size = mesh.shape[axis]
    if given.size is not None and given.size != size:
        raise InputError(f"{given.name} is for {given.size} tensor-parallel devices, and {name} of {mesh} has {size}; make it for {size}")
    if size == 1:
        raise InputError(f"{given.name} is about an axis of several devices, and {name} of {mesh} has one; name another axis")
    styles = module_styles(given, program)
    made = bordered(program, styles, size, rulebook or Rulebook())
    whole = [
        tensor.name
        for tensor in program.tensors
        if tensor.role is Role.PARAMETER and len(tensor.shape) > 1 and tensor.name.rpartition(".")[0] not in styles
    ]
    return FollowedPlan(
        given=given,
        bordered=made,
        mesh=mesh,
        axis=axis,
        template=",".join(f"{other}={'free' if a == axis else given.data}" for a, other in enumerate(mesh.names)),
        whole=tuple(fold_names(whole)),
    )


def _cut(placement: Placement) -> int:
    """The dim that is cut, in whatever order; -1 for none."""
    return placement.dim if placement.is_shard else -1
