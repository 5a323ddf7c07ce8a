"""What a plan says about a tensor or an op, in words: where it lies, who reads it how, and what every collective around it is for.

>>> print(explanation(plan, "model.layers.*.self_attn.k_proj.weight"))
model.layers.{0..31}.self_attn.k_proj.weight  bf16[1024, 4096]  trained parameter  x32
  stored           RR       8.00 MiB per device
  optimizer state  S(0)S(0)
  ...

It is computed from the plan alone: no model, no solver. What another layout would cost is asked of :mod:`solver_shard.analysis.explain`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from solver_shard.codec import encode
from solver_shard.errors import InputError, printable
from solver_shard.layout import Layout, Placement
from solver_shard.plan.index import PlanIndex
from solver_shard.plan.plan import LOCAL, Plan, Reshard, ReshardStep
from solver_shard.plan.summary import find, local_nbytes, sub_axes
from solver_shard.text import fold_items, fold_names, format_bytes, format_ns, matching, suggestion, table, template, text_of

SOURCES = {
    "table": "a shipped rule",
    "user": "a rule of yours",
    "family": "the shipped rule of the op that it follows",
    "dtensor": "the strategies registered for it with DTensor that are proven on numbers",
    "unproven": "the strategies registered for it with DTensor, which nobody proved on numbers",
    "fallback": "no rule: replicated on every axis (a row in a rules file, --rules, would free it)",
}
"""Where the strategies of an op come from."""

MOST_SUBJECTS = 40

Subject = TypeVar("Subject", "TensorExplanation", "OpExplanation")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveExplanation:
    """One collective of one tensor or op.

    Attributes:
        when: forward, backward, accumulate, optimizer, update or output.
        kind: as in ``plan.Step``; slice moves nothing between devices.
        axes: of the mesh, all parts of a split axis as the axis.
        nbytes, nanoseconds: of one call.
        count: calls in a step, for one tensor.
        purpose: in words.
    """

    when: str
    kind: str
    axes: tuple[str, ...]
    nbytes: int
    nanoseconds: int
    count: int
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReading:
    """How one group of readers gets a tensor: ``layout`` is a copy of their own, or what is there (``copy`` False)."""

    when: str
    layout: Layout
    copy: bool
    readers: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorExplanation:
    """One tensor, or ``count`` that differ only in the numbers of their names.

    Attributes:
        layout: as stored or produced; ``nbytes`` per device.
        state: layout of the optimizer state; None where there is none.
        gradient: layout in which the update reads the gradient of a trained parameter; None where there is none.
        maker: the op that makes it; empty for what is stored.
        axes: mesh axis, name of the op's single-axis strategy, and what that cuts, in words.
        kept: what stays from the forward to the backward pass; empty where nothing does.
    """

    name: str
    count: int = 1
    shape: tuple[int, ...]
    dtype: str
    role: str
    layout: Layout
    nbytes: int
    state: Layout | None
    gradient: Layout | None
    maker: str
    axes: tuple[tuple[str, str, str], ...]
    readings: tuple[GroupReading, ...]
    kept: str
    collectives: tuple[CollectiveExplanation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpExplanation:
    """One op, or ``count`` alike.

    Attributes:
        name: module and op.
        phase: forward or backward, with a mark where it is computed again.
        axes: mesh axis, name of its single-axis strategy, and what that cuts, in words.
        source: where its strategies come from.
        nanoseconds: of one run, without collectives.
        operands, results: name, layout in which the op reads or makes it.
    """

    name: str
    count: int = 1
    phase: str
    axes: tuple[tuple[str, str, str], ...]
    implementation: str
    source: str
    nanoseconds: int
    operands: tuple[tuple[str, Layout], ...]
    results: tuple[tuple[str, Layout], ...]
    collectives: tuple[CollectiveExplanation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticExplanation:
    """Explanations of all that a pattern matches, copies of a layer as one."""

    plan: str
    mesh: str
    legend: str
    pattern: str
    tensors: tuple[TensorExplanation, ...]
    ops: tuple[OpExplanation, ...]

    def __str__(self) -> str:
        blocks = [tensor_text(t) for t in self.tensors[:MOST_SUBJECTS]]
        blocks += [op_text(o) for o in self.ops[: max(0, MOST_SUBJECTS - len(blocks))]]
        rest = len(self.tensors) + len(self.ops) - len(blocks)
        blocks += [f"... {rest} more match {self.pattern!r}; name fewer, or use --json"] if rest else []
        return "\n\n".join([*([printable(self.legend)] if self.legend else []), *blocks])

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(self.data(), indent=1)

    def data(self) -> dict[str, Any]:
        """JSON-able: fields in order, layouts as text."""
        found: dict[str, Any] = encode(self)
        return found


def explanation(plan: Plan, pattern: str) -> StaticExplanation:
    """Explain the tensors or ops that a pattern matches.

    Args:
        pattern: a tensor's name, an op's (``aten.mm.default``), a module's path for its ops, ``MODULE:OP`` or ``MODULE:out``; or a glob.

    Raises:
        InputError: nothing matches; the closest names are given.
    """
    tensors, ops = subjects(plan, pattern)
    explainer = Explainer(plan)
    return StaticExplanation(
        plan=plan.name,
        mesh=str(plan.mesh.whole),
        legend=sub_axes(plan) if plan.mesh.splits else "",
        pattern=pattern,
        tensors=tuple(_folded(tensors, lambda t, show: explainer.tensor(t, show))),
        ops=tuple(_folded(ops, lambda i, show: explainer.op(i, show))),
    )


def subjects(plan: Plan, pattern: str) -> tuple[list[int], list[int]]:
    """Positions of the tensors, or of the ops, that a pattern is about: tensors by name, ops by name or module, what modules hand on.

    Raises:
        InputError: nothing matches.
    """
    found = matching(pattern, [tensor.name for tensor in plan.tensors])
    if found:
        return found, []
    if pattern.endswith(":out"):
        return find(plan, pattern), []
    ops = matching(pattern, [op.name for op in plan.ops]) or matching(pattern, [f"{op.module}:{op.name}" for op in plan.ops])
    ops = ops or _in_modules(plan, pattern)
    if ops:
        return [], ops
    names = [tensor.name for tensor in plan.tensors]
    paths = sorted({op.module for op in plan.ops if op.module} | {op.name for op in plan.ops})
    raise InputError(f"no tensor, op or module of this plan is called {pattern!r}; {suggestion(pattern, [*names, *paths], plan.ties)}")


def different(plan: Plan, pattern: str) -> int:
    """How many different tensors or ops a pattern matches, those that differ only in numbers as one; alternatives are priced of one."""
    tensors, ops = subjects(plan, pattern)
    names = {template(plan.tensors[t].name) for t in tensors}
    return len(names | {f"{template(plan.ops[i].module)}:{plan.ops[i].name}:{plan.ops[i].phase}" for i in ops})


def _in_modules(plan: Plan, pattern: str) -> list[int]:
    """The ops of the modules that a pattern matches, or of those below them where these have none of their own."""
    prefixes: dict[str, list[int]] = {}
    for i, op in enumerate(plan.ops):
        parts = op.module.split(".")
        for depth in range(1, len(parts) + 1):
            prefixes.setdefault(".".join(parts[:depth]), []).append(i)
    paths = [path for path in prefixes if path]
    chosen = [paths[k] for k in matching(pattern, paths)]
    own = [i for path in chosen for i in prefixes[path] if plan.ops[i].module == path]
    return sorted(set(own or (i for path in chosen for i in prefixes[path])))


class Explainer:
    """Explains tensors and ops of one plan one by one.

    >>> explainer = Explainer(plan)
    >>> [explainer.tensor(t) for t in range(len(plan.tensors))]
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.index = plan, PlanIndex(plan)

    def tensor(self, t: int, show: Show = str) -> TensorExplanation:
        """One tensor; ``show`` makes text of the names of others."""
        plan, tensor = self.plan, self.plan.tensors[t]
        gradient = plan.gradients.get(tensor.name)
        reshards = self.index.reshards.get(t, [])
        later = [] if gradient is None else [r for r in self.index.reshards.get(gradient, []) if r.purpose in ("accumulate", "optimizer")]
        role = tensor.role
        if role == "parameter" and not plan.options.forward_only:
            role = "trained parameter" if tensor.trainable else "frozen parameter"  # type: ignore[assignment]  # text from here on
        maker, layout = self.index.makers.get(t), self.index.layout(t)
        return TensorExplanation(
            name=show(tensor.name),
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=role,
            layout=layout,
            nbytes=local_nbytes(plan, tensor.shape, tensor.dtype, layout),
            state=tensor.state,
            gradient=next((r.layout for r in later if r.purpose == "optimizer"), None),
            maker="" if maker is None else f"{op_label(plan, maker, show)} ({plan.ops[maker].name}, {plan.ops[maker].phase})",
            axes=() if maker is None else self._axes(maker, show),
            readings=tuple(self._reading(r, show) for r in reshards if r.purpose != "update"),
            kept=self._kept(t),
            collectives=tuple(c for r in self._ordered(reshards, later) for c in self._steps(r, show)),
        )

    def op(self, i: int, show: Show = str) -> OpExplanation:
        """One op."""
        plan, op = self.plan, self.plan.ops[i]
        inside = tuple(
            CollectiveExplanation(
                when=op.phase,
                kind=c.kind,
                axes=tuple(plan.mesh.joined(c.axes)),
                nbytes=c.nbytes,
                nanoseconds=c.nanoseconds,
                count=plan.options.microbatches,
                purpose=f"inside the implementation {op.implementation}",
            )
            for c in op.collectives
        )
        before = [
            r for t in dict.fromkeys(op.operands) for r in self.index.reshards.get(t, []) if any(reader == i for reader, _ in r.readers)
        ]
        return OpExplanation(
            name=f"{show(op.module) or 'the model'}: {op.name}",
            phase=op.phase + (", computed again" if op.recompute else ""),
            axes=self._axes(i, show),
            implementation=op.implementation,
            source=SOURCES[op.source],
            nanoseconds=op.nanoseconds,
            operands=self._named(op.operands, op.operand_layouts, show),
            results=self._named(op.results, op.result_layouts, show),
            collectives=(*(c for r in before for c in self._steps(r, show)), *inside),
        )

    def _named(self, tensors: Sequence[int], layouts: Sequence[Layout], show: Show) -> tuple[tuple[str, Layout], ...]:
        return tuple((show(self.plan.tensors[t].name), layout) for t, layout in zip(tensors, layouts, strict=True))

    def _ordered(self, own: Sequence[Reshard], gradient: Sequence[Reshard]) -> list[Reshard]:
        """In the order of a step: what readers get, then the gradient's way to the update, and the new values'."""
        return [*(r for r in own if r.purpose != "update"), *gradient, *(r for r in own if r.purpose == "update")]

    def _axes(self, i: int, show: Show) -> tuple[tuple[str, str, str], ...]:
        pairs = zip(self.plan.mesh.names, self.plan.ops[i].strategy, strict=True)
        return tuple((axis, name, self._cut(i, a, show)) for a, (axis, name) in enumerate(pairs))

    def _cut(self, i: int, a: int, show: Show) -> str:
        """What one mesh axis does in an op, from the placements of its operands and results."""
        op = self.plan.ops[i]
        cut = [
            f"{_tail(show(self.plan.tensors[t].name))} in dim {layout[a].dim}"
            for t, layout in zip(op.operands, op.operand_layouts, strict=True)
            if layout[a].is_shard
        ]
        partial = [layout[a].reduction for layout in op.operand_layouts if layout[a].is_partial]
        made = {layout[a] for layout in op.result_layouts}
        results = sorted({f"partial {p.reduction}s" if p.is_partial else f"cut in dim {p.dim}" if p.is_shard else "whole" for p in made})
        if not cut and not partial:
            return "whole everywhere" if results == ["whole"] else f"operands whole, result {' or '.join(results)}"
        read = f"cuts {', '.join(dict.fromkeys(cut))}" if cut else f"reads partial {partial[0]}s"
        return f"{read} -> {' or '.join(results) or 'nothing'}"

    def _reading(self, reshard: Reshard, show: Show) -> GroupReading:
        return GroupReading(
            when=reshard.purpose,
            layout=reshard.layout,
            copy=reshard.copy and reshard.layout != reshard.source,
            readers=readers_text(self.plan, reshard, show),
            nbytes=reshard.nbytes,
        )

    def _kept(self, t: int) -> str:
        for saved in self.index.saved.get(t, ()):
            if saved.nbytes:
                copied = (
                    "as produced" if saved.reshard is None else f"the copy for forward readers ({self.plan.reshards[saved.reshard].family})"
                )
                return f"{saved.layout}, {copied}, {format_bytes(saved.nbytes)} until the backward pass or the end"
        return ""

    def _steps(self, reshard: Reshard, show: Show) -> list[CollectiveExplanation]:
        plan = self.plan
        earlier = {(s.kind, s.axes) for r in self.index.reshards[reshard.tensor] if r.purpose == "forward" for s in r.steps}
        return [
            CollectiveExplanation(
                when=reshard.purpose,
                kind=step.kind,
                axes=tuple(plan.mesh.joined(step.axes)),
                nbytes=step.nbytes,
                nanoseconds=step.nanoseconds,
                count=plan.runs(reshard),
                purpose=step_purpose(
                    plan,
                    reshard,
                    step,
                    show,
                    again=reshard.purpose == "backward" and (step.kind, step.axes) in earlier and bool(step.nbytes),
                ),
            )
            for step in reshard.steps
        ]


def tensor_text(found: TensorExplanation) -> str:
    """Lines about one tensor."""
    head = f"{found.name}  {found.dtype}{list(found.shape)}  {found.role}{_times(found.count)}"
    rows = [("produced" if found.maker else "stored", str(found.layout), f"{format_bytes(found.nbytes)} per device")]
    if found.state is not None:
        rows.append(("optimizer state", str(found.state), "" if found.state != found.layout else "as the parameter"))
    if found.gradient is not None:
        rows.append(("reduced gradient", str(found.gradient), "as the update reads it"))
    for reading in found.readings:
        copied = f"a copy, {format_bytes(reading.nbytes)}" if reading.copy else "as it is"
        rows.append((_when(reading.when), str(reading.layout), f"{copied}, for {reading.readers}"))
    made = [f"  made by {found.maker}", *table([(axis, f"strategy {name}", words) for axis, name, words in found.axes], indent=4)]
    lines = [head, *(made if found.maker else []), *table(rows)]
    lines += [f"  kept  {found.kept}"] if found.kept else []
    return text_of([*lines, *_collective_lines(found.collectives, found.count)])


def op_text(found: OpExplanation) -> str:
    """Lines about one op."""
    lines = [
        f"{found.name}  {found.phase}, {format_ns(found.nanoseconds)} of compute{' each' if found.count > 1 else ''}{_times(found.count)}"
    ]
    lines += table([(axis, f"strategy {name}", words) for axis, name, words in found.axes])
    if found.implementation:
        lines.append(f"  run by the implementation {found.implementation}")
    lines += table([*(("reads", n, str(x)) for n, x in found.operands), *(("makes", n, str(x)) for n, x in found.results)])
    lines.append(f"  strategies from {found.source}")
    return text_of([*lines, *_collective_lines(found.collectives, found.count)])


def _collective_lines(collectives: Sequence[CollectiveExplanation], copies: int) -> list[str]:
    moving = [c for c in collectives if c.kind not in LOCAL]
    if not moving:
        return ["  no collectives" + (", only local cuts" if collectives else "")]
    rows = [
        (_when(c.when), c.kind, ",".join(c.axes), format_bytes(c.nbytes), format_ns(c.nanoseconds), f"x{copies * c.count}", c.purpose)
        for c in moving
    ]
    total = copies * sum(c.count * c.nanoseconds for c in moving)
    return [f"  collectives, {format_ns(total)} of a step before overlap", *table(rows, right=(3, 4, 5), indent=4)]


def _when(purpose: str) -> str:
    return {"optimizer": "to the update", "accumulate": "to its sum", "output": "returned"}.get(purpose, purpose)


def _times(count: int) -> str:
    return f"  x{count}" if count > 1 else ""


def _tail(name: str) -> str:
    """The last parts of a name: enough to tell the operands of one op apart."""
    return ".".join(name.split(".")[-2:])


def _folded(positions: Sequence[int], explain: Callable[[int, Show], Subject]) -> list[Subject]:
    """Explanations, those that differ only in numbers as one."""
    names = [explain(p, str).name for p in positions]
    bare = [dataclasses.replace(explain(p, template), name="") for p in positions]
    at: dict[tuple[str, Subject], int] = {}
    for name, value, p in zip(names, bare, positions, strict=True):
        at.setdefault((name, value), p)
    folded = fold_items(zip(names, bare, strict=True))
    return [
        explain(at[name, value], str) if count == 1 else dataclasses.replace(value, name=name, count=count) for name, value, count in folded
    ]


# What a collective is for, in words: from the reshard that it is a step of, and the layouts around it.
#
# >>> step_purpose(plan, reshard, reshard.steps[0], str)
# 'gathers dim 1 (8192), for gate_proj and up_proj'

MOST_READERS = 4

Show = Callable[[str], str]
"""Turns a module path into text: ``names.template`` where copies of a layer are to read alike."""


def step_purpose(plan: Plan, reshard: Reshard, step: ReshardStep, show: Show, *, again: bool = False) -> str:
    """Why a reshard has this step: what moves, and for whom; ``again``: the forward pass has moved it so before."""
    what = _moved(plan, reshard, step) + (" again" if again else "")
    if reshard.purpose in ("optimizer", "accumulate"):
        return what
    return f"{what} of the new values" if reshard.purpose == "update" else f"{what}, for {readers_text(plan, reshard, show)}"


def readers_text(plan: Plan, reshard: Reshard, show: Show) -> str:
    """The ops that read what a reshard makes, by the modules that they are in."""
    names = list(dict.fromkeys(op_label(plan, i, show) for i, _ in reshard.readers))
    if not names:
        return {"update": "the parameter", "output": "what the step returns"}.get(reshard.purpose, "the optimizer")
    names = fold_names(names)
    shown = names[:MOST_READERS]
    rest = len(names) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {rest} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def op_label(plan: Plan, i: int, show: Show) -> str:
    """An op as people call it: ``q_proj`` for the matrix product of a module of that name, else ``add in model.layers.3``."""
    op = plan.ops[i]
    leaf, kind = op.module.rpartition(".")[2], short(op.name)
    if kind == "einsum" and leaf and not leaf.isdecimal():
        return leaf
    return f"{kind} in {show(op.module) or 'the model'}"


def short(name: str) -> str:
    """``aten.mul.Tensor`` as ``mul``, ``aten._softmax.default`` as ``softmax``."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else name).lstrip("_") or name


def changed_axes(plan: Plan, step: ReshardStep) -> list[tuple[str, Placement, Placement]]:
    """Axis by axis what a step does to the layout."""
    pairs = zip(plan.mesh.names, step.before, step.after, strict=True)
    return [(axis, before, after) for axis, before, after in pairs if before != after]


def _moved(plan: Plan, reshard: Reshard, step: ReshardStep) -> str:
    shape = plan.tensors[reshard.tensor].shape
    changes = changed_axes(plan, step)
    before, after = [x for _, x, _ in changes], [y for _, _, y in changes]
    partial = "the gradient" if reshard.purpose in ("optimizer", "accumulate") else f"partial {_sums(before)}"
    if step.kind == "all_gather":
        return f"gathers {_dims(before, shape)}"
    if step.kind == "reduce_scatter":
        return f"adds up {partial}, each device keeps its part of {_dims(after, shape)}"
    if step.kind == "all_reduce":
        return f"adds up {partial}"
    if step.kind == "all_to_all":
        return f"moves the cut from {_dims(before, shape)} to {_dims(after, shape)}"
    return f"cuts {_dims(after, shape)} without communication"


def _dims(placements: Sequence[Placement], shape: tuple[int, ...]) -> str:
    dims = sorted({p.dim for p in placements if p.is_shard})
    return " and ".join(f"dim {d} ({shape[d]})" for d in dims) or "it"


def _sums(placements: Sequence[Placement]) -> str:
    kinds = sorted({p.reduction for p in placements if p.is_partial})
    return "sums" if kinds in ([], ["sum"]) else f"results ({', '.join(kinds)})"
