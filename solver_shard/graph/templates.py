"""The plans that experts write, axis by axis, as restrictions of the choice graph; and layouts of sources, as hints (``warm_starts``).

A template says what one mesh axis does: how it stores parameters, optimizer states and inputs, in which layout a
gradient is reduced, and which transitions it uses for what. Whatever that leaves open (where a free slice is taken, which of two
equal layouts an elementwise op has) the solver fills in at the least cost. Templates of several axes compose.

Where a step has several microbatches, gradients are accumulated as made and reduced once (``no_sync``), except that ``zero2`` and
``zero3`` reduce each microbatch's into a cut accumulator; ``zero1`` then reduce-scatters, as gradients are whole until the end.

| template | parameters | states | gradients | inputs | transitions |
|---|---|---|---|---|---|
| ``replicate`` | R | R | R | R | none |
| ``free`` | any | any | any | any | any: the solver decides on this axis |
| ``ddp`` | R | R | all-reduced | batch | gradients P to R |
| ``zero1`` | R | cut | all-reduced | batch | and states gathered after the step |
| ``zero2`` | R | cut | reduce-scattered | batch | the same |
| ``zero3`` | cut | cut | reduce-scattered | batch | parameters gathered before each use |
| ``megatron`` | columns, rows | alike | alike | R | activations P to R |
| ``megatron-sp`` | columns, rows | alike | alike | R | activations P to S(sequence) and back |
| ``vocab-parallel`` | embedding and head by vocabulary | alike | alike | R | activations P to R |
| ``context-parallel`` | R | R | all-reduced | sequence | keys and values gathered, their gradients reduce-scattered |
| (mixtures of experts) | | | | | and sequences gathered around the experts |
| ``expert-parallel`` | experts by expert | alike | all-reduced, of experts kept | batch | tokens exchanged around the experts |

``megatron+vocab-parallel`` on one axis does both. ``zero3+expert-parallel`` stores what is not an expert as ``zero3`` does; so do
the other data-parallel templates.

On an axis that is split into sub-axes, every part does what its axis does; tensor parallelism cuts each matrix by the parts
that its heads allow and leaves it whole on the others (8 key-value heads on ``tp=8x2``: keys and values are cut by 8, queries by
16), as Megatron-LM and its users do with fewer key-value heads than devices.

Sources: Rajbhandari et al., "ZeRO" (SC 2020) for the stages, DeepSpeed for what they do under accumulation (stages 2 and 3
reduce after every backward pass, github.com/deepspeedai/DeepSpeed/issues/2252; stage 1 at the end); Shoeybi et al.,
"Megatron-LM" (2019) and Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023) for
tensor and sequence parallelism; Lepikhin et al., "GShard" (ICLR 2021) and Rajbhandari et al., "DeepSpeed-MoE" (ICML 2022) for
expert parallelism within data parallelism. Hybrid sharding is ``ddp`` on the outer axis and ``zero3`` on the inner one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solver_shard.errors import InputError
from solver_shard.graph.choice_graph import Masks, WarmStart
from solver_shard.graph.liveness import ACCUMULATE, OPTIMIZER, OUTPUT, UPDATE
from solver_shard.graph.nodes import Layouts, Lowering, SourceNode
from solver_shard.graph.sub_axes import Heads, heads_of
from solver_shard.graph.symmetry import Folded, folded_masks
from solver_shard.layout import Layout, Placement, R
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Phase, Program, Ref, Role

TEMPLATES = (
    *("replicate", "ddp", "zero1", "zero2", "zero3", "megatron", "megatron-sp", "vocab-parallel"),
    *("context-parallel", "expert-parallel", "free"),
)
"""What one mesh axis can do."""

_DATA = ("ddp", "zero1", "zero2", "zero3")
_SCATTERED = ("zero2", "zero3")
"""Those that keep no whole gradient."""
_TENSOR = ("megatron", "megatron-sp")
_SEQUENCE = 1
_VOCABULARY = "vocab-parallel"
_EXPERTS = "expert-parallel"
_FREE = "free"
_JOINT = (*(f"{name}+{_VOCABULARY}" for name in _TENSOR), *(f"{name}+{_EXPERTS}" for name in _DATA))
"""Tensor parallelism of the blocks and of the vocabulary, data and expert parallelism, on one axis."""
_GROUPED = ("shard.grouped_mm.default", "shard.grouped_mm_weights.default")
_SPREAD = ("aten.view.default", "aten.expand.default", "aten._to_copy.default")
_SAME_EXPERTS = ("aten.permute.default", "aten._to_copy.default")
_WHOLE = ("aten._log_softmax.default", "aten._softmax.default", "aten.split.Tensor", "aten.split_with_sizes.default")


def parse_template(text: str, mesh: Mesh) -> tuple[str, ...]:
    """One template per mesh axis, from ``dp=zero3,tp=megatron`` or from one name for all axes; ``hsdp`` on two or more.

    >>> parse_template("dp=zero3,tp=megatron", Mesh.parse("dp=4,tp=2"))
    ('zero3', 'megatron')
    >>> parse_template("hsdp", Mesh.parse("nodes=4,gpus=8"))
    ('ddp', 'zero3')
    >>> parse_template("dp=zero3,tp=megatron", Mesh.parse("dp=4,tp=8x2"))
    ('zero3', 'megatron', 'megatron')
    """
    if mesh.whole != mesh:
        return mesh.spread(parse_template(text, mesh.whole))
    if "=" not in text:
        if text.strip() == "hsdp":
            if len(mesh.axes) < 2:
                raise InputError(f"template 'hsdp' needs two mesh axes, {mesh} has one; use zero3, or split the axis")
            return ("ddp", *("zero3",) * (len(mesh.axes) - 1))
        return (_name(text.strip()),) * len(mesh.axes)
    chosen: dict[str, str] = {}
    for part in text.split(","):
        axis, sign, name = (piece.strip() for piece in part.partition("="))
        if not sign:
            raise InputError(f"cannot read template {text!r} at {part!r}; write AXIS=TEMPLATE pairs, as in 'dp=zero3,tp=megatron'")
        mesh.index(axis)
        if axis in chosen:
            raise InputError(f"template {text!r} names axis {axis!r} twice; give each axis one template")
        chosen[axis] = _name(name)
    missing = [name for name in mesh.names if name not in chosen]
    if missing:
        raise InputError(f"template {text!r} says nothing of axis {', '.join(missing)}; name every axis ('replicate' leaves one alone)")
    return tuple(chosen[name] for name in mesh.names)


def tensor_axes(templates: Sequence[str]) -> tuple[int, ...]:
    """Positions of the axes with tensor parallelism, which wants whole heads."""
    return tuple(a for a, name in enumerate(templates) if _blocks(name) is not None)


def _blocks(name: str) -> str | None:
    """The tensor parallelism of the blocks that a name asks for."""
    first = name.partition("+")[0]
    return first if first in _TENSOR else None


def _data(name: str) -> str | None:
    """How a name stores what data parallelism replicates or cuts."""
    first = name.partition("+")[0]
    return "ddp" if first == _EXPERTS else first if first in _DATA else None


def _name(text: str) -> str:
    if text not in (*TEMPLATES, *_JOINT):
        close = difflib.get_close_matches(text, TEMPLATES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown template {text!r}; legal: {', '.join((*TEMPLATES, *_JOINT))}, or hsdp for a whole mesh{hint}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRestriction:
    """What the templates of all axes allow of layouts and transitions; every answer is the same on every call."""

    program: Program
    mesh: Mesh
    templates: tuple[str, ...]
    cut: Mapping[int, int]
    heads: Mapping[int, Heads]
    """What the cut dim of a matrix holds, where these are heads."""
    special: Mapping[int, str]
    """Activations that a template may treat apart: ``joined`` (gradients of the parts of a fused projection, which are joined
    whole), ``shifted`` (labels that are moved along the sequence), ``keys`` (keys and values, and their gradients), ``vocabulary``
    (what embedding and head leave partial), ``tokens`` (what is sorted by expert), ``rows`` (what is sorted) and ``ends`` (where the
    rows of each expert end)."""
    vocabulary: Mapping[int, int]
    """Embeddings of tokens and heads: the dim that is the vocabulary."""
    experts: frozenset[int]
    """Weights whose dim 0 is the expert."""
    parameters: Mapping[int, int]
    """By gradient."""
    accumulates: bool = False

    def source(self, t: int, layout: Layout) -> bool:
        """Whether a parameter, buffer or input may be stored so."""
        return all(self._stored(t, name, a, layout) for a, name in enumerate(self.templates))

    def state(self, p: int, layout: Layout) -> bool:
        """Whether a parameter's optimizer state may be stored so."""
        for a, name in enumerate(self.templates):
            if name == _FREE:
                continue
            if _data(name) in ("zero1", "zero2", "zero3") and not self._by_expert(p, name):
                if not self._cut_or_too_small(p, a, layout):
                    return False
            elif not self._stored(p, name, a, layout):
                return False
        return True

    def accumulator(self, t: int, layout: Layout) -> bool:
        """Whether the accumulator of a gradient may be laid out so."""
        return not any(placement.is_partial and _data(name) in _SCATTERED for name, placement in zip(self.templates, layout, strict=True))

    def keeps_copies(self, t: int) -> bool:
        """Whether a copy that the forward pass made may be kept for the backward pass."""
        return self.program.tensors[t].role is not Role.PARAMETER

    def scope(self, t: int, purpose: str) -> Hashable:
        """A key of tensors and purposes for which ``moves`` answers alike."""
        tensor = self.program.tensors[t]
        if purpose in (ACCUMULATE, OPTIMIZER, UPDATE):
            parameter = t if purpose == UPDATE else self.parameters[t]
            return (purpose, parameter in self.experts, self.accumulates)
        if tensor.role in (Role.PARAMETER, Role.BUFFER):
            return ("parameter", t in self.experts)
        if t in self.special:
            return (self.special[t], len(tensor.shape))
        return (OUTPUT if purpose == OUTPUT else "activation", len(tensor.shape), bool(tensor.shape) and tensor.shape[-1] > 1)

    def moves(self, scope: Hashable, sources: Layouts, targets: Layouts) -> NDArray[np.bool_]:
        """Which transitions may be used, by source and target; staying as it is is always allowed."""
        allowed = np.ones((len(sources), len(targets)), dtype=bool)
        for a, name in enumerate(self.templates):
            (before, row), (after, column) = (_placements(layouts, a) for layouts in (sources, targets))
            own = np.array([[_axis_move(name, scope, x, y) for y in after] for x in before], dtype=bool)
            allowed &= own.reshape(len(before), len(after))[row[:, None], column]
        return allowed

    def _stored(self, t: int, name: str, axis: int, layout: Layout) -> bool:
        """Whether a source may have this placement on one axis."""
        tensor, placement = self.program.tensors[t], layout[axis]
        if name == _FREE:
            return True
        if tensor.role is Role.INPUT:
            cut = 0 if _data(name) else _SEQUENCE if name == "context-parallel" else -1
            if 0 <= cut < len(tensor.shape) and self._divides(tensor.shape[cut], axis, cut, layout):
                return placement == cut
            return placement == R
        if self._by_expert(t, name):
            return placement == 0
        if tensor.role is Role.PARAMETER and _data(name) == "zero3" and t in self.program.gradients:
            return self._cut_or_too_small(t, axis, layout)
        if name.endswith(_VOCABULARY) and t in self.vocabulary:
            return placement == (self.vocabulary[t] if self._has_parts(t, self.vocabulary[t], axis) else R)
        if tensor.role is Role.PARAMETER and _blocks(name) and t in self.cut and self._whole_heads(t, axis):
            return placement == (self.cut[t] if self._has_parts(t, self.cut[t], axis) else R)
        return placement == R

    def _has_parts(self, t: int, dim: int, axis: int) -> bool:
        """Whether a dim has a part for every device of an axis and of the tensor axes before it: a gate of one row is kept whole."""
        shards, cut = 1, False
        for name, size in zip(self.templates[: axis + 1], self.mesh.shape, strict=False):
            tensor = _blocks(name) is not None or name.endswith(_VOCABULARY)
            cut = tensor and size > 1 and shards * size <= self.program.tensors[t].shape[dim]
            shards *= size if cut else 1
        return cut

    def _by_expert(self, t: int, name: str) -> bool:
        return name.endswith(_EXPERTS) and t in self.experts

    def _whole_heads(self, t: int, axis: int) -> bool:
        """Whether a part of a split axis cuts between heads; an axis that is not split is always used."""
        parent = self.mesh.axes[axis].parent
        if parent is None or t not in self.heads:
            return True
        parts = self.mesh.positions(parent)
        return self.heads[t].cut_by([self.mesh.shape[a] for a in parts])[parts.index(axis)]

    def _cut_or_too_small(self, t: int, axis: int, layout: Layout) -> bool:
        """Cut, or R where no dim is left that is long enough."""
        if layout[axis] != R:
            return True
        shape = self.program.tensors[t].shape
        return not any(self._divides(size, axis, d, layout) for d, size in enumerate(shape))

    def _divides(self, size: int, axis: int, dim: int, layout: Layout) -> bool:
        others = 1
        for a, placement in enumerate(layout):
            if a != axis and placement.is_shard and placement.dim == dim:
                others *= self.mesh.shape[a]
        return self.mesh.shape[axis] > 1 and size >= others * self.mesh.shape[axis]


def restriction(program: Program, mesh: Mesh, templates: tuple[str, ...], *, accumulates: bool = False) -> TemplateRestriction:
    """The restriction of a program to one template per mesh axis; ``accumulates``: of a step of several microbatches.

    InputError where a template has nothing in the program to cut.
    """
    found = _unrestricted(program, mesh, accumulates)
    for axis, name in zip(mesh.names, templates, strict=True):
        if lacks := _lacking(name, found):
            raise InputError(
                f"template {name!r} on axis {axis!r} has nothing to cut: {program.name} has no {' and no '.join(lacks)}; "
                f"give the axis another one, such as 'ddp', 'zero3' or 'replicate'"
            )
    return replace(found, templates=templates)


def restrictions(program: Program, mesh: Mesh, *, accumulates: bool = False) -> dict[str, TemplateRestriction]:
    """The templates that experts write for a mesh, by how they are asked for: those that have something in the program to cut.

    One for all axes, all replicated first; then each kind of data parallelism on the outer axes with one of another kind on the
    innermost one.
    """
    whole, found = mesh.whole, _unrestricted(program, mesh, accumulates)
    texts = [name for name in TEMPLATES if name != _FREE] if whole.axes else []
    outer = whole.names[:-1]
    if outer:
        texts.append("hsdp")
        for data in _DATA:
            experts = f"{data}+{_EXPERTS}"
            ends = [(data, inner) for inner in (*_TENSOR, *(f"{name}+{_VOCABULARY}" for name in _TENSOR), "context-parallel", experts)]
            ends += [(experts, inner) for inner in _TENSOR] if len(outer) > 1 else []
            rows = [(*(data,) * (len(outer) - 1), *end) for end in ends]
            texts += [",".join(f"{axis}={name}" for axis, name in zip(whole.names, row, strict=True)) for row in rows]
    made = {text: parse_template(text, mesh) for text in texts}
    return {text: replace(found, templates=names) for text, names in made.items() if not any(_lacking(name, found) for name in names)}


def _unrestricted(program: Program, mesh: Mesh, accumulates: bool) -> TemplateRestriction:
    """What the restrictions of a program have in common; of no template yet."""
    cut, vocabulary = block_cut(program), vocabulary_cut(program)
    return TemplateRestriction(
        program=program,
        mesh=mesh,
        templates=(),
        cut=cut,
        heads=heads_of(program, cut),
        special=_special(program, vocabulary),
        vocabulary=vocabulary,
        experts=expert_weights(program),
        parameters={g: p for p, g in reversed(list(program.gradients.items()))},
        accumulates=accumulates,
    )


def _lacking(name: str, found: TemplateRestriction) -> list[str]:
    """What a template cuts and the program has none of."""
    blocks = "matrices of blocks (products that feed a residual addition, and those before them)"
    vocabulary = "vocabulary (a table that is looked up by an input, a head before a log-softmax)"
    experts = "experts (weights with one matrix per expert, multiplied by rows that are grouped by expert)"
    return [
        *([blocks] if _blocks(name) and not found.cut else []),
        *([vocabulary] if name.endswith(_VOCABULARY) and not found.vocabulary else []),
        *([experts] if name.endswith(_EXPERTS) and not found.experts else []),
    ]


def vocabulary_cut(program: Program) -> dict[int, int]:
    """Weights that hold the vocabulary, and where.

    The head is the matrix whose product reaches a log-softmax; the embedding is the largest table that is looked up by
    an input.
    """
    blocks, readers = block_cut(program), program.readers()
    heads = {op.operands[1] for op in program.ops if op.phase is Phase.FORWARD and _is_head(program, readers, op)}
    cut = {w: d for w, d in row_cut(program).items() if w in heads and w not in blocks}
    lookups = [op.operands for op in program.ops if op.name == "aten.embedding.default"]
    tables = [table for table, ids in lookups if program.tensors[ids].role is Role.INPUT]
    largest = max(tables, key=lambda t: program.tensors[t].shape[0], default=None)
    return cut | ({largest: 0} if largest is not None else {})


def expert_weights(program: Program) -> frozenset[int]:
    """Parameters with one matrix per expert, read by products over rows that are sorted by expert, through views that keep dim 0."""
    made = {t: op for op in program.ops for t in op.results}
    found = set()
    for op in program.ops:
        if op.name in _GROUPED and isinstance(op.attributes.get("mat2"), Ref):
            t = op.operands[op.attributes["mat2"].operand]
            while t in made and made[t].name in _SAME_EXPERTS and made[t].attributes.get("dims", (0,))[0] == 0:
                t = made[t].operands[0]
            if program.tensors[t].role is Role.PARAMETER and len(program.tensors[t].shape) == 3:
                found.add(t)
    return frozenset(found)


def _sorted_rows(program: Program) -> dict[int, str]:
    """Activations that lie by expert, and the ends of each expert's rows."""
    found: dict[int, str] = {}
    lengths = set()
    for op in program.ops:
        if op.name in _GROUPED:
            rows, ends = (op.operands[op.attributes[name].operand] for name in ("self", "offs"))
            lengths.add(program.tensors[rows].shape[:2])
            found[ends] = "ends"
    for op in program.ops:
        found |= {t: "rows" for t in op.results if program.tensors[t].shape[:2] in lengths}
    return found


def _unsorted_tokens(program: Program) -> dict[int, str]:
    """What is brought into the order of the experts: hidden states, and gradients of what the experts hand back.

    Tokens are sorted over their whole sequence, so that context parallelism gathers it for them.
    """
    made = {t: op for op in program.ops for t in op.results}
    found: dict[int, str] = {}
    for op in program.ops:
        t = op.operands[0] if op.name == "shard.take.default" else -1
        while t >= 0:
            if len(program.tensors[t].shape) > 2:
                found[t] = "tokens"
            t = made[t].operands[0] if t in made and made[t].name in _SPREAD else -1
    return found


def _special(program: Program, vocabulary: Mapping[int, int]) -> dict[int, str]:
    found = _unsorted_tokens(program) | _sorted_rows(program)
    for op in program.ops:
        backward = op.phase is Phase.BACKWARD and not op.recompute
        if op.name == "aten.cat.default" and backward:
            found.update(dict.fromkeys(op.operands, "joined"))
        elif op.name == "aten.constant_pad_nd.default":
            found.update(dict.fromkeys(op.operands, "shifted"))
        elif "scaled_dot_product" in op.name:
            pairs = [op.attributes[name] for name in ("key", "value")]
            found.update({op.operands[ref.operand]: "keys" for ref in pairs})
            if backward:
                found.update(dict.fromkeys(op.results[1:3], "keys"))
        elif vocabulary.keys() & set(op.operands) and program.tensors[op.results[0]].role is not Role.GRADIENT:
            found[op.results[0]] = "vocabulary"
    return found


def _is_head(program: Program, readers: Mapping[int, list[tuple[int, int]]], op: Op) -> bool:
    return op.name == "aten.einsum.default" and reaches(program, readers, op.results[0], ("aten._log_softmax.default",))


def block_cut(program: Program) -> dict[int, int]:
    """How tensor parallelism cuts the matrices of the blocks.

    Without the head, whose output dim is the vocabulary, and without fused projections that are split along the dim that
    would be cut: their parts lie one after the other, so a shard would not hold whole heads of each.
    """
    return row_cut(program, whole=_WHOLE)


def _axis_move(name: str, scope: Hashable, source: Placement, target: Placement) -> bool:
    """Whether a template uses this change of one axis's placement."""
    if name == _FREE:
        return True
    if source == target or name == "replicate":
        return source == target
    assert isinstance(scope, tuple)
    by_expert = name.endswith(_EXPERTS)
    stays = by_expert and scope[0] in (ACCUMULATE, OPTIMIZER, UPDATE, "parameter") and scope[1]
    data = None if stays else _data(name)
    rules: dict[str, Callable[[], bool]] = {
        ACCUMULATE: lambda: data in _SCATTERED and _gradient(data, source, target),
        OPTIMIZER: lambda: not stays and _gradient("zero2" if data == "zero1" and scope[2] else data or name, source, target),
        UPDATE: lambda: data in ("zero1", "zero2") and source.is_shard and target == R,
        "parameter": lambda: data == "zero3" and source.is_shard and target == R,
        "activation": lambda: _activation(name, scope[1], scope[2], source, target),
        "tokens": lambda: _tokens(name, scope[1], source, target),
        "joined": lambda: _blocks(name) is not None and not source.is_replicate,
        "shifted": lambda: name == "context-parallel" and source.is_shard and target == R,
        "keys": lambda: name == "context-parallel" and ((source.is_shard and target == R) or (source.is_partial and target.is_shard)),
        "vocabulary": lambda: _vocabulary(name, scope[1], source, target),
        "rows": lambda: by_expert and {source, target} == {0, 1},
        "ends": lambda: by_expert and source == 0 and target == R,
        OUTPUT: lambda: source.is_partial and target == R,
    }
    return rules[scope[0]]()


def _placements(layouts: Layouts, axis: int) -> tuple[list[Placement], NDArray[np.int64]]:
    """The placements on one axis, and which of them each layout has."""
    known = {placement: k for k, placement in enumerate(dict.fromkeys(layout[axis] for layout in layouts))}
    return list(known), np.array([known[layout[axis]] for layout in layouts], dtype=np.int64)


def _gradient(name: str, source: Placement, target: Placement) -> bool:
    if name in _SCATTERED:
        return source.is_partial or (source == R and target.is_shard)
    return source.is_partial and target == R


def _vocabulary(name: str, dims: int, source: Placement, target: Placement) -> bool:
    """Sums over the vocabulary: what the embedding looks up, and the gradient that the head hands back."""
    return _activation(name, dims, True, source, target) or (name == _VOCABULARY and source.is_partial and target == R)


def _tokens(name: str, dims: int, source: Placement, target: Placement) -> bool:
    """What is sorted by expert: context parallelism gathers the sequence for it."""
    gathered = name == "context-parallel" and source == _SEQUENCE and target == R
    return gathered or _activation(name, dims, True, source, target)


def _activation(name: str, dims: int, wide: bool, source: Placement, target: Placement) -> bool:
    """Hidden states have three dims; tensors whose last dim is 1 are statistics of their rows."""
    blocks = _blocks(name)
    if name == "context-parallel":
        return dims <= 2 and source.is_partial and target == R
    if blocks == "megatron-sp" and dims == 3 and wide:
        return (source == _SEQUENCE and target == R) or (target == _SEQUENCE and (source.is_partial or source == R))
    if blocks and dims == 3 and wide:
        return source.is_partial and target == R
    # statistics of the loss; sums over a cut batch
    return dims <= 2 and source.is_partial and target == R


_THROUGH = ("aten.view.default", "aten.native_dropout.default", "aten.permute.default", "aten._to_copy.default")


def warm_starts(
    lowering: Lowering, folded: Folded | None = None, mesh: Mesh | None = None, others: Mapping[str, Masks] | None = None
) -> tuple[WarmStart, ...]:
    """Other baselines by name, then the templates, as restrictions of the graph's nodes (of the folded graph's, when there is one).

    Each template says how parameters, buffers and inputs are laid out; the solver fills in the rest.

    - ``replicate``: everything whole on every device.
    - ``data-parallel``: inputs cut by batch on all axes, parameters whole.
    - ``fully-sharded``: inputs cut by batch on all axes, parameters cut on all axes (Rajbhandari et al., "ZeRO", stage 3).
    - ``megatron`` and ``megatron-fully-sharded``: on the innermost axis, matrices that feed a residual addition are cut by
      rows, the others by columns (Shoeybi et al., "Megatron-LM"); the other axes as above.

    Given the mesh, tensor parallelism goes over all parts of an innermost axis that is split.
    """
    found = {**(others or {}), **_templates(lowering, mesh)}
    return tuple(WarmStart(name=name, allowed=folded_masks(masks, folded, lenient=True)) for name, masks in found.items())


def _templates(lowering: Lowering, mesh: Mesh | None) -> dict[str, Masks]:
    program = lowering.program
    rows = row_cut(program)
    axes = len(next((n.layouts[0] for n in lowering.nodes if isinstance(n, SourceNode)), ()))
    inner = min(mesh.positions(mesh.whole.names[-1])) if mesh is not None else axes - 1
    heads = heads_of(program, rows)

    def shape_of(t: int) -> tuple[int, ...]:
        return program.tensors[t].shape

    def by_batch(layout: Layout, outer_only: bool) -> int:
        """How well an input's layout is a cut of its batch dim."""
        wanted = [0 if a < inner or not outer_only else -1 for a in range(axes)]
        return sum(int(p) == w for p, w in zip(layout, wanted, strict=True)) if all(p in (R, 0) for p in layout) else -1

    def whole(t: int, layout: Layout) -> int:
        return sum(p == R for p in layout)

    def sharded(t: int, layout: Layout) -> int:
        return sum(2 * (p != R) + (p.is_shard and p.dim == 0) for p in layout)

    def megatron(outer: Callable[[int, Layout], int]) -> Callable[[int, Layout], int]:
        def score(t: int, layout: Layout) -> int:
            cut = heads[t].cut_by(mesh.shape[inner:]) if mesh is not None and inner < axes - 1 and t in heads else (True,) * (axes - inner)
            wanted = [rows.get(t, R) if here else R for here in cut]
            found = sum(int(p) == int(w) for p, w in zip(layout[inner:], wanted, strict=True))
            return 100 * found + outer(t, Layout((*layout[:inner], *(R,) * (axes - inner))))

        return score

    wholly = {"replicate": (whole, None), "data-parallel": (whole, False), "fully-sharded": (sharded, False)}
    split = {"megatron": (megatron(whole), True), "megatron-fully-sharded": (megatron(sharded), True)} if axes else {}
    found: dict[str, Masks] = {}
    for name, (score, outer_only) in {**wholly, **split}.items():
        masks = {}
        for v, node in enumerate(lowering.nodes):
            if not isinstance(node, SourceNode):
                continue
            if program.tensors[node.tensor].role is Role.INPUT and outer_only is not None and shape_of(node.tensor):
                scores = np.array([by_batch(layout, outer_only) for layout in node.layouts])
            else:
                scores = np.array([score(node.tensor, layout) for layout in node.layouts])
            masks[v] = scores == scores.max()
        found[name] = masks
    return found


def row_cut(program: Program, whole: tuple[str, ...] = ()) -> dict[int, int]:
    """For every parameter that Megatron would cut: the dim, by what its product feeds.

    A matrix whose product reaches an addition of two activations (the residual) is cut along the contracted dim, other
    matrices along the output dim, and a bias like the output it is added to. A matrix whose product reaches an op named
    in ``whole``, through views and additions, is not cut.
    """
    readers = program.readers()
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    cut: dict[int, int] = {}
    for op in program.ops:
        if op.phase is not Phase.FORWARD or op.name != "aten.einsum.default" or len(op.operands) != 2:
            continue
        x, w = op.operands
        if program.tensors[w].role is not Role.PARAMETER or program.tensors[x].role is Role.PARAMETER:
            continue
        if whole and reaches(program, readers, op.results[0], whole):
            continue
        left, result = op.attributes["equation"].split("->")
        letters = left.split(",")[1]
        residual, biases = _follow(program, readers, made, op.results[0])
        contracted = [d for d, letter in enumerate(letters) if letter not in result]
        output = [d for d, letter in enumerate(letters) if letter in result]
        chosen = contracted if residual else output
        if chosen:
            cut[w] = chosen[0]
        if not residual:
            cut.update(dict.fromkeys(biases, 0))
    return cut


def _follow(program: Program, readers: Mapping[int, list[tuple[int, int]]], made: Mapping[int, int], start: int) -> tuple[bool, list[int]]:
    """Whether a tensor reaches a residual addition through views, dropout, gates and bias additions; and those biases."""
    pending, seen = [start], {start}
    biases: list[int] = []
    while pending:
        t = pending.pop()
        for i, j in readers.get(t, ()):
            op = program.ops[i]
            if op.phase is not Phase.FORWARD:
                continue
            if op.name == "aten.add.Tensor" and len(op.operands) == 2:
                other = op.operands[1 - j]
                if program.tensors[other].role is Role.PARAMETER:
                    biases.append(other)
                elif made.get(other, -1) < made[start]:  # older than the product: the residual stream
                    return True, biases
            elif op.name not in _THROUGH and not _is_gated(program, op, t):
                continue
            if op.results[0] not in seen:
                seen.add(op.results[0])
                pending.append(op.results[0])
    return False, biases


def _is_gated(program: Program, op: Op, t: int) -> bool:
    """Whether an op multiplies a tensor by one number per row, as the gate of a shared expert does."""
    if op.name != "aten.mul.Tensor" or len(op.operands) != 2:
        return False
    (gate,) = (program.tensors[x].shape for x in op.operands if x != t) if t in op.operands and len({*op.operands}) == 2 else ((),)
    shape = program.tensors[t].shape
    return len(gate) == len(shape) and gate[-1:] == (1,) and shape[-1] > 1


def reaches(program: Program, readers: Mapping[int, list[tuple[int, int]]], start: int, names: tuple[str, ...]) -> bool:
    pending, seen = [start], {start}
    while pending:
        for i, _ in readers.get(pending.pop(), ()):
            op = program.ops[i]
            if op.name in names:
                return True
            if op.name in (*_THROUGH, "aten.add.Tensor") and op.results[0] not in seen:
                seen.add(op.results[0])
                pending.append(op.results[0])
    return False
