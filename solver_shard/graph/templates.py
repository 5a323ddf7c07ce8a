"""The plans that experts write, axis by axis, as restrictions of the choice graph; and layouts of sources, as hints (``warm_starts``).

A template says what one mesh axis does: how it stores parameters, optimizer states and inputs, in which layout a
gradient is reduced, and which transitions it uses for what. Whatever that leaves open (where a free slice is taken, which of two
equal layouts an elementwise op has) the solver fills in at the least cost. Templates of several axes compose.

Where a step has several microbatches, gradients are accumulated as made and reduced once (``no_sync``), except that ``zero2`` and
``zero3`` reduce each microbatch's into a cut accumulator. In a step of one, ``zero1`` and ``zero2`` are the same.

| template | parameters | states | gradients | inputs | transitions |
|---|---|---|---|---|---|
| ``replicate`` | R | R | R | R | none |
| ``free`` | any | any | any | any | any: the solver decides on this axis |
| ``ddp`` | R | R | all-reduced | batch | gradients P to R |
| ``zero1`` | R | cut | reduce-scattered once | batch | and states gathered after the step |
| ``zero2`` | R | cut | reduce-scattered | batch | the same |
| ``zero3`` | cut | cut | reduce-scattered | batch | parameters gathered before each use |
| ``megatron`` | columns, rows | alike | alike | R | activations P to R |
| ``megatron-sp`` | columns, rows | alike | alike | R | activations P to S(sequence) and back |
| ``vocab-parallel`` | embedding and head by vocabulary | alike | alike | R | activations P to R |
| ``context-parallel`` | R | R | all-reduced | sequence | keys and values gathered, their gradients reduce-scattered |
| (mixtures of experts) | | | | | and sequences gathered around the experts |
| ``ulysses`` | R | R | all-reduced | sequence | queries, keys and values exchanged from sequence to heads, results back |
| ``expert-parallel`` | experts by expert | alike | all-reduced, of experts kept | batch | tokens exchanged around the experts |

``megatron+vocab-parallel`` on one axis does both. ``zero3+expert-parallel`` stores what is not an expert as ``zero3`` does,
``zero3+ulysses`` and ``zero3+context-parallel`` cut the sequence and store as ``zero3`` does; so do the other data-parallel templates.

On an axis that is split into sub-axes, every part does what its axis does; tensor parallelism cuts each matrix by the parts
that its heads allow and leaves it whole on the others (8 key-value heads on ``tp=8x2``: keys and values are cut by 8, queries by
16), as Megatron-LM and its users do with fewer key-value heads than devices.

Sources: Rajbhandari et al., "ZeRO" (SC 2020) for the stages, DeepSpeed for what they do under accumulation (stages 2 and 3
reduce after every backward pass, github.com/deepspeedai/DeepSpeed/issues/2252; stage 1 at the end) and Megatron-LM for its distributed
optimizer, which reduce-scatters (docs.nvidia.com/megatron-core, "dist_optimizer"); Jacobs et al., "DeepSpeed Ulysses" (2023), whose
stages of ZeRO are over data and sequence axes together, as Megatron-LM's and torchtitan's are over data and context; Shoeybi et al.,
"Megatron-LM" (2019) and Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023) for
tensor and sequence parallelism; Lepikhin et al., "GShard" (ICLR 2021) and Rajbhandari et al., "DeepSpeed-MoE" (ICML 2022) for
expert parallelism within data parallelism. Hybrid sharding is ``ddp`` on the outer axis and ``zero3`` on the inner one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from solver_shard.rules.rule import AxisStrategy
from solver_shard.rules.rulebook import Rulebook

TEMPLATES = (
    *("replicate", "ddp", "zero1", "zero2", "zero3", "megatron", "megatron-sp", "vocab-parallel"),
    *("context-parallel", "ulysses", "expert-parallel", "free"),
)
"""What one mesh axis can do."""

_DATA = ("ddp", "zero1", "zero2", "zero3")
_SCATTERED = ("zero2", "zero3")
"""Those that keep no whole gradient."""
_TENSOR = ("megatron", "megatron-sp")
_SEQUENCES = ("context-parallel", "ulysses")
"""Those that cut the sequence, attention's too."""
_SEQUENCE, _HEADS = 1, 1
"""Dims of the sequence in hidden states, and of heads in attention's tensors, whose sequence comes next."""
_VOCABULARY = "vocab-parallel"
_EXPERTS = "expert-parallel"
_FREE = "free"
_JOINT = (*(f"{name}+{_VOCABULARY}" for name in _TENSOR), *(f"{name}+{other}" for other in (_EXPERTS, *_SEQUENCES) for name in _DATA))
"""Tensor parallelism of the blocks and of the vocabulary, or a way to store beside expert or sequence parallelism, on one axis."""
_GROUPED = ("shard.grouped_mm.default", "shard.grouped_mm_weights.default")
_SPREAD = ("aten.view.default", "aten.expand.default", "aten._to_copy.default")
_SAME_MATRIX = ("aten.permute.default", "aten._to_copy.default")
_EINSUM, _LOOKUP = "aten.einsum.default", "aten.embedding.default"
_ADDS = ("aten.add.Tensor", "aten.add_.Tensor")


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
    """Positions of the axes with tensor parallelism or Ulysses, which want whole heads."""
    return tuple(a for a, name in enumerate(templates) if _blocks(name) is not None or _sequence(name) == "ulysses")


def _blocks(name: str) -> str | None:
    """The tensor parallelism of the blocks that a name asks for."""
    first = name.partition("+")[0]
    return first if first in _TENSOR else None


def _data(name: str) -> str | None:
    """How a name stores what data parallelism replicates or cuts."""
    first = name.partition("+")[0]
    return "ddp" if first in (_EXPERTS, *_SEQUENCES) else first if first in _DATA else None


def _sequence(name: str) -> str | None:
    """How a name cuts the sequence, if it does."""
    last = name.rpartition("+")[2]
    return last if last in _SEQUENCES else None


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
    """Activations that a template may treat apart: ``joined`` (gradients of the parts of a fused projection, which are joined whole),
    ``sliced`` (gradients of what a matrix reads: cut where the matrix is cut by rows, whole where its operand was), ``shifted`` (labels
    that are moved along the sequence), ``keys`` (keys and values, and their gradients), ``queries`` (what else attention reads and
    makes), ``statistics`` (of a norm over all heads), ``vocabulary`` (what embedding and head leave partial), ``tokens`` (what is sorted
    by expert), ``rows`` (what is sorted) and ``ends`` (where the rows of each expert end)."""
    vocabulary: Mapping[int, int]
    """Embeddings of tokens and heads: the dim that is the vocabulary."""
    experts: frozenset[int]
    """Weights whose dim 0 is the expert."""
    parameters: Mapping[int, int]
    """By gradient."""

    @property
    def kind(self) -> tuple[str, ...]:
        """What each axis does beside storing: empty for data parallelism."""
        return tuple("+".join(word for word in name.split("+") if word not in _DATA) for name in self.templates)

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
            return (purpose, parameter in self.experts)
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
            part = self.mesh.axes[a].parent is not None
            own = np.array([[_axis_move(name, scope, x, y, part=part) for y in after] for x in before], dtype=bool)
            allowed &= own.reshape(len(before), len(after))[row[:, None], column]
        return allowed

    def _stored(self, t: int, name: str, axis: int, layout: Layout) -> bool:
        """Whether a source may have this placement on one axis."""
        tensor, placement = self.program.tensors[t], layout[axis]
        if name == _FREE:
            return True
        if tensor.role is Role.INPUT:
            cut = _SEQUENCE if _sequence(name) else 0 if _data(name) else -1
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


def restriction(program: Program, mesh: Mesh, templates: tuple[str, ...]) -> TemplateRestriction:
    """The restriction of a program to one template per mesh axis; InputError where a template has nothing in the program to cut."""
    found = _unrestricted(program, mesh)
    for axis, name in zip(mesh.names, templates, strict=True):
        if lacks := _lacking(name, found):
            raise InputError(
                f"template {name!r} on axis {axis!r} has nothing to cut: {program.name} has no {' and no '.join(lacks)}; "
                f"give the axis another one, such as 'ddp', 'zero3' or 'replicate'"
            )
    return replace(found, templates=templates)


def restrictions(program: Program, mesh: Mesh, *, accumulates: bool = False, every: bool = False) -> dict[str, TemplateRestriction]:
    """The templates that experts write for a mesh, by how they are asked for: those that have something in the program to cut.

    One for all axes, all replicated first; then each kind of data parallelism on the outer axes with each of another kind on the
    innermost one.

    Args:
        accumulates: whether a step has several microbatches; where it has one, ``zero2`` stands for ``zero1`` too.
        every: also hybrid sharding on the outer axes, and sequence or expert parallelism between data and tensor parallelism.
    """
    whole, found = mesh.whole, _unrestricted(program, mesh)
    data = [name for name in _DATA if accumulates or name != "zero1"]
    texts = [name for name in TEMPLATES if name not in (_FREE, *({*_DATA} - {*data}))] if whole.axes else []
    outer = len(whole.names) - 1
    if outer:
        texts.append("hsdp")
        stores: list[tuple[str, ...]] = [(name,) * outer for name in data]
        stores += [("ddp", *(name,) * (outer - 1)) for name in data if every and outer > 1 and name != "ddp"]
        tensor = (*_TENSOR, *(f"{name}+{_VOCABULARY}" for name in _TENSOR))
        for store in stores:
            beside = [f"{store[-1]}+{other}" for other in (_EXPERTS, *_SEQUENCES)]
            rows = [(*store, end) for end in (*tensor, _VOCABULARY, *beside)]
            if outer > 1:
                rows += [
                    (*store[:-1], middle, end) for middle in (beside if every else beside[:1]) for end in (tensor if every else _TENSOR)
                ]
            texts += [",".join(f"{axis}={name}" for axis, name in zip(whole.names, row, strict=True)) for row in rows]
    made = {text: parse_template(text, mesh) for text in texts}
    return {text: replace(found, templates=names) for text, names in made.items() if not any(_lacking(name, found) for name in names)}


def _unrestricted(program: Program, mesh: Mesh) -> TemplateRestriction:
    """What the restrictions of a program have in common; of no template yet."""
    products = products_of(program)
    cut, vocabulary = block_cut(program, products), vocabulary_cut(program, products)
    return TemplateRestriction(
        program=program,
        mesh=mesh,
        templates=(),
        cut=cut,
        heads=heads_of(program, cut),
        special=_special(program, vocabulary, cut) | _statistics(program, products, cut),
        vocabulary=vocabulary,
        experts=expert_weights(program),
        parameters={g: p for p, g in reversed(list(program.gradients.items()))},
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


def vocabulary_cut(program: Program, products: Sequence[Product] | None = None) -> dict[int, int]:
    """Weights that hold the vocabulary, and where: matrices whose product reaches a log-softmax, and the table that inputs look up."""
    lookups = [op.operands for op in program.ops if op.name == _LOOKUP]
    tables = [table for table, ids in lookups if program.tensors[ids].role is Role.INPUT]
    largest = max(tables, key=lambda t: program.tensors[t].shape[0], default=None)
    return {product.parameter: product.output for product in products or products_of(program) if product.head} | (
        {largest: 0} if largest is not None else {}
    )


def expert_weights(program: Program) -> frozenset[int]:
    """Parameters with one matrix per expert, read by products over rows that are sorted by expert, through views that keep dim 0."""
    made = {t: op for op in program.ops for t in op.results}
    found = set()
    for op in program.ops:
        if op.name in _GROUPED and isinstance(op.attributes.get("mat2"), Ref):
            t = op.operands[op.attributes["mat2"].operand]
            while t in made and made[t].name in _SAME_MATRIX and made[t].attributes.get("dims", (0,))[0] == 0:
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


def _special(program: Program, vocabulary: Mapping[int, int], cut: Mapping[int, int]) -> dict[int, str]:
    found = _unsorted_tokens(program) | _sorted_rows(program)
    matrices = set(cut)
    for op in program.ops:
        backward = op.phase is Phase.BACKWARD and not op.recompute
        if op.name in _SAME_MATRIX and op.operands[0] in matrices:
            matrices.update(op.results)
        elif backward and op.name in (_EINSUM, *_GROUPED) and matrices & set(op.operands):
            found = dict.fromkeys(op.results, "sliced") | found
        elif op.name == "aten.cat.default" and backward:
            found.update(dict.fromkeys(op.operands, "joined"))
        elif op.name == "aten.constant_pad_nd.default":
            found.update(dict.fromkeys(op.operands, "shifted"))
        elif "scaled_dot_product" in op.name:
            pairs = [op.attributes[name] for name in ("key", "value")]
            beside = [t for t in (*op.operands, *op.results) if len(program.tensors[t].shape) == 4]
            found = dict.fromkeys(beside, "queries") | found | {op.operands[ref.operand]: "keys" for ref in pairs}
            if backward:
                found.update(dict.fromkeys(op.results[1:3], "keys"))
        elif vocabulary.keys() & set(op.operands) and program.tensors[op.results[0]].role is not Role.GRADIENT:
            found[op.results[0]] = "vocabulary"
    return found


def _statistics(program: Program, products: Sequence[Product], cut: Mapping[int, int]) -> dict[int, str]:
    """Sums over what is cut by columns, as of a norm over all heads, in both passes."""
    modules = {program.ops[i].module for product in products if cut.get(product.parameter) == product.output for i in product.sums}
    results = [t for op in program.ops if op.module in modules for t in op.results]
    return dict.fromkeys((t for t in results if program.tensors[t].shape[-1:] == (1,)), "statistics")


def _axis_move(name: str, scope: Hashable, source: Placement, target: Placement, *, part: bool) -> bool:
    """Whether a template uses this change of one axis's placement; ``part``: of an axis that is a part of another."""
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
        OPTIMIZER: lambda: not stays and _gradient("zero2" if data == "zero1" else data or name, source, target),
        UPDATE: lambda: data in ("zero1", "zero2") and source.is_shard and target == R,
        "parameter": lambda: data == "zero3" and source.is_shard and target == R,
        "activation": lambda: _activation(name, scope[1], scope[2], source, target),
        "tokens": lambda: _tokens(name, scope[1], source, target),
        "joined": lambda: _blocks(name) is not None and not source.is_replicate,
        "sliced": lambda: (
            (_blocks(name) is not None and source.is_shard and target == R) or _activation(name, scope[1], True, source, target)
        ),
        "shifted": lambda: _sequence(name) is not None and source.is_shard and target == R,
        "keys": lambda: _attended(name, scope[1], source, target) or (_gathers_keys(name, part) and _gathered(source, target)),
        "queries": lambda: _attended(name, scope[1], source, target),
        "vocabulary": lambda: _vocabulary(name, scope[1], source, target),
        "statistics": lambda: _blocks(name) is not None and source.is_partial and target == R,
        "rows": lambda: (by_expert and {source, target} == {0, 1}) or (_blocks(name) is not None and source != 0 and target == R),
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


def _attended(name: str, dims: int, source: Placement, target: Placement) -> bool:
    """What attention reads and makes: Ulysses exchanges cuts of the sequence and cuts of the heads."""
    exchanged = _sequence(name) == "ulysses" and {source, target} == {_HEADS, _HEADS + 1}
    return exchanged or _activation(name, dims, True, source, target)


def _gathers_keys(name: str, part: bool) -> bool:
    """Context parallelism gathers keys and values, Ulysses only along a part of an axis, for which there may be too few heads."""
    return _sequence(name) == "context-parallel" or (_sequence(name) == "ulysses" and part)


def _gathered(source: Placement, target: Placement) -> bool:
    """Keys and values are gathered, their gradients reduce-scattered."""
    return (source.is_shard and target == R) or (source.is_partial and target.is_shard)


def _tokens(name: str, dims: int, source: Placement, target: Placement) -> bool:
    """What is sorted by expert: what cuts the sequence gathers it for that."""
    gathered = _sequence(name) is not None and source == _SEQUENCE and target == R
    return gathered or _activation(name, dims, True, source, target)


def _activation(name: str, dims: int, wide: bool, source: Placement, target: Placement) -> bool:
    """Hidden states have three dims; tensors whose last dim is 1 are statistics of their rows."""
    blocks = _blocks(name)
    if blocks == "megatron-sp" and dims == 3 and wide:
        return (source == _SEQUENCE and target == R) or (target == _SEQUENCE and (source.is_partial or source == R))
    if blocks and dims == 3 and wide:
        return source.is_partial and target == R
    # statistics of the loss; sums over a cut batch
    return dims <= 2 and source.is_partial and target == R


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
    products = products_of(program)
    rows = vocabulary_cut(program, products) | block_cut(program, products)
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


# Which matrices of the blocks tensor parallelism cuts, and how.


def block_cut(program: Program, products: Sequence[Product] | None = None) -> dict[int, int]:
    """How tensor parallelism cuts the parameters of the blocks: the dim of each that is cut; what must stay whole is not there.

    As Shoeybi et al. (2019) alternate columns and rows: a matrix whose product can stay cut until another matrix contracts it is cut by
    columns (along its output dim), that other one by rows (along its contracted dim), as is one whose product reaches a residual addition.
    What is added to or multiplied with the columns on the way (a bias, the weight of a norm over all heads) is cut with them. Whole stay

    - a matrix whose product some op must see whole along the cut dim: a router's, a head's, and a fused projection whose parts lie one
      after the other, so that a shard would not hold whole heads of each (where they lie head by head, as in GPT-NeoX, it is cut);
    - one that only feeds another which makes heads or meets other columns: the down-projections of latent attention (DeepSeek-AI,
      "DeepSeek-V2", 2024, section 2.1) and the first matrix of an adapter (Hu et al., "LoRA", 2021) beside a matrix that is cut.
    """
    products = products_of(program) if products is None else products
    sure = {product.parameter for product in products if product.sure}
    cut: dict[int, int] = {}
    rows: dict[int, int] = {}
    for product in products:
        p = product.parameter
        if p in rows and p not in sure:
            cut[p] = rows[p]
        elif product.residual:
            cut[p] = product.contracted
        elif product.by_columns and not product.rows.keys() & sure:
            cut |= {p: product.output, **product.vectors}
            rows |= product.rows
    return cut


def products_of(program: Program) -> tuple[Product, ...]:
    """The products of the forward pass with a parameter, in order, and what lies behind each."""
    return tuple(_Walks(program).products)


@dataclass(slots=True, kw_only=True)
class Product:
    """What lies behind the product of a parameter, while it stays cut along the parameter's output dim.

    Attributes:
        parameter, output, contracted: its dims; the two are the same for a table.
        tensors: tensor to its cut dim.
        rows: parameters by which it is contracted, and their dims.
        vectors: parameters that it meets, and their dims.
        others: activations that are cut with it.
        sums: positions of the ops that add it up along the cut dim, by itself.
        residual: it is added to an older tensor that is not cut.
        whole: an op must see it whole.
        heads: it goes into attention.
        head: it is the operand of a log-softmax.
    """

    parameter: int
    output: int
    contracted: int
    tensors: dict[int, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    vectors: dict[int, int] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)
    sums: list[int] = field(default_factory=list)
    residual: bool = False
    whole: bool = False
    heads: bool = False
    head: bool = False

    @property
    def by_columns(self) -> bool:
        """Whether it can be cut by columns, if nothing behind it objects."""
        return not (self.residual or self.whole) and (self.sure or bool(self.rows))

    @property
    def sure(self) -> bool:
        """Whether it is cut by columns even where it is behind others that could be."""
        return not (self.residual or self.whole) and (self.heads or bool(self.others - self.tensors.keys()))


class _Walks:
    """From every product to what reads it."""

    def __init__(self, program: Program) -> None:
        self.program, self.readers, self.rulebook = program, program.readers(), Rulebook()
        self.makers = {t: i for i, op in enumerate(program.ops) for t in op.results}
        self.carried: dict[int, int] = {}  # by matrices that can be cut by columns
        self.products: list[Product] = []
        for i, op in enumerate(program.ops):
            if op.phase is Phase.FORWARD and op.name in (_EINSUM, *_GROUPED):
                self.products += self._product(i, op)

    def _product(self, i: int, op: Op) -> list[Product]:
        """The product of an op, if one of its operands is a parameter that it contracts."""
        for position, t in enumerate(op.operands):
            parameter, dims = self._stored(t)
            if parameter is None or len(self.program.tensors[t].shape) < 2:
                continue
            strategies = [s for s in self._strategies(i) if s.operands[position].is_shard]
            columns = [s for s in strategies if s.results[0].is_shard and all(not p.is_shard for p in _others(s.operands, position))]
            rows = [s for s in strategies if s.results[0].is_partial]
            if columns and rows:
                output, contracted = (dims[chosen[0].operands[position].dim] for chosen in (columns, rows))
                found = Product(parameter=parameter, output=output, contracted=contracted)
                self._follow(found, i, op.results[0], columns[0].results[0].dim)
                if found.by_columns:
                    self.carried |= found.tensors
                return [found]
        return []

    def _follow(self, product: Product, first: int, start: int, dim: int) -> None:
        """Walk from a product through all that can keep it cut."""
        product.tensors[start] = dim
        pending = [start]
        while pending:
            t = pending.pop()
            for i, position in self.readers.get(t, ()):
                op = self.program.ops[i]
                if op.phase is not Phase.FORWARD:
                    continue
                product.heads |= "scaled_dot_product" in op.name
                product.head |= op.name == "aten._log_softmax.default"
                ways = [s for s in self._strategies(i) if s.operands[position] == product.tensors[t]]
                if not ways:
                    product.whole = True
                    continue
                beside = {j: p.dim for j, p in enumerate(ways[0].operands) if j != position and p.is_shard}
                if any(self._is_residual(product, op, t, op.operands[j], d, first) for j, d in beside.items()):
                    product.residual = True
                    continue
                self._meet(product, op, beside, contracts=ways[0].results[0].is_partial)
                product.sums += [i] if ways[0].results[0].is_partial and not beside else []
                for result, placement in zip(op.results, ways[0].results, strict=True):
                    if placement.is_shard and result not in product.tensors:
                        product.tensors[result] = placement.dim
                        pending.append(result)

    def _meet(self, product: Product, op: Op, beside: Mapping[int, int], *, contracts: bool) -> None:
        """Note what an op reads beside a cut tensor and is cut with it, by operand."""
        for j, d in beside.items():
            t = op.operands[j]
            if t in self.makers and self._is_bias(lookup := self.program.ops[self.makers[t]]):
                t, d = lookup.operands[0], 1
            parameter, dims = self._stored(t)
            if parameter is None:
                product.others.add(t)
            elif contracts and op.name in (_EINSUM, *_GROUPED):
                product.rows[parameter] = dims[d]
            else:
                product.vectors[parameter] = dims[d]

    def _is_residual(self, product: Product, op: Op, t: int, other: int, dim: int, first: int) -> bool:
        """Whether an op adds the tensor to an older one of its shape that no matrix has cut."""
        tensors, maker = self.program.tensors, self.makers.get(other, -1)
        return (
            op.name in _ADDS
            and tensors[other].role is not Role.PARAMETER
            and tensors[other].shape == tensors[t].shape
            and maker < first
            and self.carried.get(other) != dim
            and not (maker >= 0 and self._is_bias(self.program.ops[maker]))
        )

    def _is_bias(self, op: Op) -> bool:
        """Whether an op looks up the bias of each row's expert: its indices are no input of the model."""
        return op.name == _LOOKUP and self.program.tensors[op.operands[1]].role is not Role.INPUT

    def _strategies(self, i: int) -> list[AxisStrategy]:
        """The ways to cut an op without more ado."""
        return [s for s in self.rulebook.rule(self.program, i).strategies() if s.implementation is None and not s.after]

    def _stored(self, t: int) -> tuple[int | None, tuple[int, ...]]:
        """The parameter that a tensor is, through transpositions and casts, and which of its dims each dim is; a vector in any shape."""
        dims, same = tuple(range(len(self.program.tensors[t].shape))), True
        while t in self.makers and (op := self.program.ops[self.makers[t]]).name in (*_SAME_MATRIX, *_SPREAD):
            if op.name in _SAME_MATRIX and same:
                order = op.attributes.get("dims", range(len(dims)))
                dims = tuple(order[d] % len(dims) for d in dims)
            same &= op.name in _SAME_MATRIX
            t = op.operands[0]
        tensor, vector = self.program.tensors[t], len(self.program.tensors[t].shape) == 1
        return (t if tensor.role is Role.PARAMETER and (same or vector) else None), (0,) * len(dims) if vector else dims


def _others(placements: Sequence[Placement], position: int) -> list[Placement]:
    return [placement for j, placement in enumerate(placements) if j != position]
