"""The plan that would be best if something were otherwise: one decision is forced, and the problem solved again from the plan there is.

>>> found = solve_instead(reopened, question, question.masks(allows), limits=Limits(seconds=30.0))
>>> found.objective, found.bound
(395101223, 395101223)

The forced decision narrows the choice graph; everything else (pins, template, limit, tied or free) is as it was. The search starts near
the present plan: first everything is kept but what is within some edges of the forced decision, then the whole problem is solved, with
what that gave as the incumbent. Of several best plans it ends with one near the present, because only a better one replaces an incumbent;
so what differs is what has to. The bound is of the whole problem.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from solver_shard.analysis.explanation import subjects
from solver_shard.analysis.reopen import Reopened, decided, writer_of
from solver_shard.clock import StageClock
from solver_shard.errors import InputError
from solver_shard.graph.build import Lowered, lower_program
from solver_shard.graph.choice_graph import ChoiceGraph, Ints, Masks
from solver_shard.graph.nodes import Lowering, NodeKey, OpNode, ReshardNode, ResultNode, SourceNode, StateNode
from solver_shard.graph.pins import parse_pin, pin_masks, resolve_pins
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.pipeline import is_enough
from solver_shard.plan.plan import Plan
from solver_shard.program import AS_MADE, BEFORE, Kept, Program, Role, Tensor, places, without
from solver_shard.solve.engine import solve, solve_in_rounds
from solver_shard.solve.parameters import SolveParameters
from solver_shard.solve.solution import Solution, Status, objective_value
from solver_shard.text import fold_names

NEAR = (4, 12)
"""Edges around the forced nodes within which the plan is decided anew, at first."""

NEAR_SHARE = 0.15
"""Of the limits: the most that each of these takes."""

LEAST_SHARE = 0.2
"""Of the limits: what the whole problem gets at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a search may take: ``seconds`` of wall time and units of ``work``, each None for as much as it needs."""

    seconds: float | None
    work: float | None = None

    def part(self, share: float) -> Limits:
        """A share of both."""
        return Limits(seconds=None if self.seconds is None else share * self.seconds, work=None if self.work is None else share * self.work)

    def less(self, seconds: float, work: float) -> Limits:
        """What is left of them, and at least the least share."""

        def left(whole: float | None, used: float) -> float | None:
            return None if whole is None else max(whole - used, LEAST_SHARE * whole)

        return Limits(seconds=left(self.seconds, seconds), work=left(self.work, work))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CounterfactualAnswer:
    """What is known of the problem with the forced decision.

    Attributes:
        solution: with its status and, where nothing fits, what any plan needs.
        bound: no plan with the forced decision has a lower objective; never below the present plan's bound where the graph is the plan's.
        plan: the best that was found within the limit, or None.
        impossible: no plan runs so at all, whatever the memory.
        lowered: the graph that ``solution`` is of.
    """

    solution: Solution
    bound: int
    plan: Plan | None
    impossible: bool
    lowered: Lowered


def solve_instead(
    reopened: Reopened,
    question: Question,
    masks: Masks,
    *,
    limits: Limits,
    gap: float | None = None,
    seed: int | None = None,
    workers: int = 2,
    start: Sequence[int] | None = None,
    stop: Callable[[], bool] | None = None,
) -> CounterfactualAnswer | None:
    """The best plan with some nodes of the question's graph narrowed to ``masks``.

    None where the graph has relays only where they save time, and the best plan without the memory limit does not keep it: then bytes
    count, and the answer is to be looked for in the graph that has them everywhere (``with_all_relays``).

    Args:
        limits: of the whole search. Where only work is limited, the same limit and seed give the same answer.
        gap, seed: the plan's own where None.
        start: an assignment of the question's graph to start from, in place of the present plan.
    """
    options, lowered = reopened.plan.options, question.lowered
    lowering = lowered.lowering.narrowed(masks)
    problem = Transients(lowering, lowered.costs, question.classes)
    began = time.monotonic()
    asked = SolveParameters(
        objective=options.objective,
        memory_weight=options.memory_weight,
        gap=options.gap if gap is None else gap,
        seed=options.seed if seed is None else seed,
        workers=workers,
        limited=lowered.relays != "shared",
    )
    starts = [] if start is None else [problem.complete(np.array(start), "the plan so far")]
    near, work = _near(reopened, question, masks, problem, asked, limits.part(NEAR_SHARE), stop) if start is None else (None, 0.0)
    if near is not None:
        starts = [problem.complete(near, "the present plan, but for what is near")]
    left = limits.less(time.monotonic() - began, work)
    found = solve_in_rounds(
        problem,
        parameters=dataclasses.replace(asked, time_limit=left.seconds, work_limit=left.work),
        warm_starts=tuple(starts),
        stop=stop,
    )
    if not (asked.limited or is_enough(found)):
        return None
    bound = found.bound or 0
    if question.own and reopened.bounded:
        bound = max(bound, reopened.plan.certificate.bound)
    if found.feasible:
        assert found.objective is not None, "a feasible solution has an objective"
        bound = min(bound, found.objective)
        writer = dataclasses.replace(writer_of(reopened.plan, lowered), lowering=lowering)
        return CounterfactualAnswer(
            solution=found, bound=bound, plan=writer.plan(found, problem, StageClock()), impossible=False, lowered=lowered
        )
    impossible = found.status is Status.INFEASIBLE and found.assignment is None and found.peak_bound <= options.usable_memory
    return CounterfactualAnswer(solution=found, bound=bound, plan=None, impossible=impossible, lowered=lowered)


def _near(
    reopened: Reopened,
    question: Question,
    masks: Masks,
    problem: Transients,
    asked: SolveParameters,
    limits: Limits,
    stop: Callable[[], bool] | None,
) -> tuple[Ints | None, float]:
    """The best plan, plain, that decides anew only what is near the forced nodes, None where none of these fits; and the work it took.

    ``limits`` are those of each try.
    """
    graph = problem.graph
    asked = dataclasses.replace(asked, time_limit=limits.seconds, work_limit=limits.work, limited=True)
    if question.own:
        kept: Masks = {v: np.arange(size) == k for v, (size, k) in enumerate(zip(_sizes(question), reopened.assignment, strict=True))}
    else:
        kept = {v: mask for v, mask in decided(reopened.plan, question.lowered.lowering).items() if mask.any()}
    member = np.arange(question.lowered.lowering.graph.size) if problem.folded is None else problem.folded.member
    there = {int(member[v]): mask for v, mask in kept.items()}
    best: tuple[int, Ints] | None = None
    work = 0.0
    for radius in NEAR:
        if stop is not None and stop():
            break
        around = _around(graph, [int(member[v]) for v in masks], radius)
        left = graph.narrowed({c: mask for c, mask in there.items() if not around[c]})
        found = solve(left, asked)
        work += found.work
        if not found.feasible or found.assignment is None or found.cost is None:
            continue
        peak = problem.peak(found.assignment)
        value = objective_value(reopened.plan.options.objective, reopened.plan.options.memory_weight, found.cost, peak)
        if peak <= reopened.plan.options.usable_memory and (best is None or value < best[0]):
            best = value, problem.plain(found.assignment)
    return (None if best is None else best[1]), work


def _sizes(question: Question) -> Sequence[int]:
    sizes: list[int] = question.lowered.lowering.graph.sizes().tolist()
    return sizes


def _around(graph: ChoiceGraph, nodes: Sequence[int], radius: int) -> np.ndarray:
    """Which nodes are within so many edges of some."""
    near = np.zeros(graph.size, dtype=bool)
    near[list(nodes)] = True
    for _ in range(radius):
        touched = near[graph.edges].any(axis=1)
        near[graph.edges[touched]] = True
    return near


# What is asked of a plan's choice graph: which nodes an answer would decide, what they may be, and what is asked of them as masks.
#
# >>> question = ask(reopened, "model.layers.*.self_attn.k_proj.weight")
# >>> [str(label) for label in question.labels][:3], str(question.present)
# (['S(1)S(1)', 'S(1)S(0)', 'S(1)R'], 'RR')
#
# ``of`` says which decision of a tensor is meant:
#
#     layout     how it is stored; of an activation, how it is handed on to its readers; what a pin (``solve --pin``) fixes
#     state      where its optimizer state is
#     forward    the layout that its forward readers get
#     backward   the layout that its backward readers get
#     strategy   how the op that makes it runs, one single-axis strategy per mesh axis; of an op, its own
#
# An activation is pinned in a place of its own, after the op that computes it (:mod:`solver_shard.program`), so its question is asked
# of a graph that has such a place: the one that ``solve`` would have with that pin. Where the plan is tied, copies of a repeated layer
# decide alike: a question about one is a question about all of them.

Of = Literal["layout", "state", "forward", "backward", "strategy"]

Label = Layout | tuple[str, ...]
"""A layout, or names of single-axis strategies, one per mesh axis."""

MOST_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A decision of some nodes.

    Attributes:
        names: what it is about, folded.
        wider: it is about more than was named, because copies decide alike.
        lowered: the graph that it is asked of: the plan's, or one with places for activations (``own`` False).
        classes: which nodes are tied; None in a free problem.
        nodes: node to what each of its strategies is called.
        labels: what all of them may be, in the order of the first.
        present: what they are in the plan; None where they differ.
    """

    pattern: str
    of: Of
    names: tuple[str, ...]
    count: int
    wider: bool
    lowered: Lowered
    own: bool
    classes: Ints | None
    nodes: Mapping[int, tuple[Label, ...]]
    labels: tuple[Label, ...]
    present: Label | None

    def masks(self, allows: Callable[[Label], bool]) -> Masks:
        """What is left of the nodes."""
        known: dict[int, np.ndarray] = {}
        found = {}
        for v, labels in self.nodes.items():
            if id(labels) not in known:
                known[id(labels)] = np.array([allows(label) for label in labels], dtype=bool)
            found[v] = known[id(labels)]
        return found


def ask(reopened: Reopened, pattern: str, of: Of = "layout", clock: StageClock | None = None) -> Question:
    """The question that a pattern and a kind of decision ask of a plan's graph.

    Raises:
        InputError: nothing matches, or what matches has no such decision.
    """
    plan = reopened.plan
    tensors, ops, of = _decision(plan, pattern, of)
    classes = None if reopened.problem.folded is None else node_classes(reopened.lowered.lowering)
    kept = _kept(reopened)
    if of == "strategy":  # of what makes a tensor, before a relay
        program, relays = reopened.lowered.program, reopened.lowered.lowering.relays
        before = {program.ops[i].results[0]: t for t, i in places(program).items() if t in relays}
        own = {t: before.get(there, there) for there, t in enumerate(kept.tensors)}
        at = {i: there for there, i in enumerate(kept.times[: len(reopened.lowered.program.ops)])}
        return _of_ops(reopened, pattern, [own[t] for t in tensors], [at[i] for i in ops], classes)
    own = {t: there for there, t in enumerate(kept.tensors)}
    tensors = [own[t] for t in tensors]
    if of == "layout":
        return _of_layouts(reopened, pattern, tensors, classes, clock)
    return _of_nodes(reopened, pattern, tensors, of, classes)


def _decision(plan: Plan, pattern: str, of: Of) -> tuple[list[int], list[int], Of]:
    """The tensors, or the ops, that a pattern is about, and which of their decisions is meant."""
    tensors, ops = subjects(plan, pattern)
    tensors = [t for t in tensors if not plan.tensors[t].name.endswith((BEFORE, AS_MADE))]
    if ops and of == "layout":
        of = "strategy"
    if ops and of != "strategy":
        raise InputError(f"{pattern!r} names ops, which have no {of}; name a tensor (show lists what ops make), or leave --of out")
    return tensors, ops, of


def check_asked(plan: Plan, pattern: str, of: Of, text: str | None) -> None:
    """Refuse what no graph can answer, before the model is traced for one: a decision that there is none of, a layout or strategy that
    cannot be read, or that the tensors have no dims for. What more is illegal ``allowed`` says.
    """
    tensors, _, of = _decision(plan, pattern, of)
    if text is None:
        return
    if of == "strategy":
        _named_strategies(plan.mesh, text)
        return
    pin = parse_pin(f"{pattern.removesuffix(':out')}={text}", plan.mesh)
    if any(choice.startswith("_") for choice in pin.choices):
        return  # which tensors may be cut in another order, their readers say
    for t in tensors:
        planned = plan.tensors[t]
        alone = Tensor(name=planned.name, dtype=planned.dtype, shape=planned.shape, role=Role(planned.role))
        program = Program(name=plan.name, tensors=(alone,), ops=(), outputs=())
        resolve_pins([dataclasses.replace(pin, pattern=_exactly(alone.name))], program, plan.mesh)


def _kept(reopened: Reopened) -> Kept:
    """The plan's program in the graph's, which has more relays; what one hands on comes after what it reads."""
    relays = reopened.lowered.lowering.relays
    return without(reopened.lowered.program, relays, relays.difference(reopened.plan.relays))


def allowed(question: Question, text: str) -> Callable[[Label], bool]:
    """What a layout or strategy, as the user wrote it, leaves of the labels.

    Raises:
        InputError: it cannot be read, or leaves nothing; what is legal is said.
    """
    if question.of == "strategy":
        return _allowed_strategies(question, text)
    mesh, program = question.lowered.mesh, question.lowered.program
    pin = parse_pin(f"{question.pattern.removesuffix(':out')}={text}", mesh)
    named = {tensor.name: t for t, tensor in enumerate(program.tensors)}
    left = [
        resolve_pins([dataclasses.replace(pin, pattern=name)], program, mesh)[named[name]]
        for name in {program.tensors[question.lowered.lowering.tensor_node(v).tensor].name: None for v in question.nodes}
    ]

    def allows(label: Label) -> bool:
        return isinstance(label, Layout) and all(one.allows(label) for one in left)

    for v, labels in question.nodes.items():
        if not any(map(allows, labels)):
            raise _illegal(question, text, v, labels)
    return allows


def _illegal(question: Question, text: str, v: int, labels: Sequence[Label]) -> InputError:
    """Why a layout is none of a node's."""
    lowering, plan_options = question.lowered.lowering, question.lowered.options
    node = lowering.tensor_node(v)
    name = question.lowered.program.tensors[node.tensor].name
    shown = ", ".join(map(label_text, labels[:MOST_SHOWN])) + (f" and {len(labels) - MOST_SHOWN} more" if len(labels) > MOST_SHOWN else "")
    what = {"layout": "", "state": "the optimizer state of "}.get(question.of, f"the {question.of} readers of ")
    pins = question.lowered.pinned.get(node.tensor)
    held = [text for text in (pins.pins if pins and question.of == "layout" else ()) if not text.endswith(_ANY)]
    because = f" The plan's pins {', '.join(map(repr, held))} are kept." if held else ""
    if plan_options.template:
        because += f" The plan's template {plan_options.template!r} is kept."
    return InputError(f"{text} is no legal layout of {what}{name!r} on mesh {question.lowered.mesh}; legal: {shown}.{because}".rstrip("."))


def _allowed_strategies(question: Question, text: str) -> Callable[[Label], bool]:
    mesh = question.lowered.mesh
    wanted = _named_strategies(mesh, text)

    def allows(label: Label) -> bool:
        return all(name in ("*", label[a]) for a, name in wanted.items())

    for v, labels in question.nodes.items():
        if not any(map(allows, labels)):
            op = question.lowered.program.ops[question.lowered.lowering.op_node(v).op]
            legal = [f"{axis}: {', '.join(sorted({str(label[a]) for label in labels}))}" for a, axis in enumerate(mesh.names)]
            raise InputError(f"{text} is no strategy of {op.name} in {op.module or 'the model'} on mesh {mesh}; legal: {'; '.join(legal)}")
    return allows


def _named_strategies(mesh: Mesh, text: str) -> dict[int, str]:
    """The names that a text gives, by position of the axis."""
    parts = [part.strip() for part in text.split(",")]
    wanted: dict[int, str] = {}
    if any("=" in part for part in parts):
        for part in parts:
            axis, _, name = (piece.strip() for piece in part.partition("="))
            if axis not in mesh.names and axis not in mesh.whole.names:
                raise InputError(f"strategy {text!r}: unknown mesh axis {axis!r}; this mesh has {', '.join(mesh.names)}")
            wanted.update(dict.fromkeys(mesh.positions(axis), name))
    else:
        if len(parts) == len(mesh.whole.axes):
            parts = list(mesh.spread(parts))
        if len(parts) != len(mesh.axes):
            raise InputError(f"strategy {text!r} names {len(parts)} axes, mesh {mesh} has {len(mesh.axes)}; give one name per axis")
        wanted = dict(enumerate(parts))
    return wanted


def label_text(label: Label) -> str:
    """``S(0)R``, or ``a,R`` for a strategy."""
    return str(label) if isinstance(label, Layout) else ",".join(label)


def _of_layouts(reopened: Reopened, pattern: str, tensors: Sequence[int], classes: Ints | None, clock: StageClock | None) -> Question:
    """The layouts that pins fix, in a graph that has a place for each."""
    plan, lowered = reopened.plan, reopened.lowered
    wider = _with_copies(lowered.lowering, tensors, classes)
    program = lowered.program
    final = {*program.outputs, *program.gradients.values()}
    made = {t for op in program.ops for t in op.results}
    names = [program.tensors[t].name for t in wider]
    known = {tensor.name for tensor in program.tensors}
    free = [name for t, name in zip(wider, names, strict=True) if t in made and t not in final]
    free = [name for name in free if name + BEFORE not in known and name + AS_MADE not in known]
    if free:
        pins = tuple(f"{_exactly(name)}={','.join('*' * len(plan.mesh.axes))}" for name in free)
        options = dataclasses.replace(plan.options, pins=(*plan.options.pins, *pins))
        lowered = lower_program(lowered.given, mesh=plan.mesh, cluster=plan.cluster, options=options, clock=clock, relays=lowered.relays)
        classes = None if classes is None else node_classes(lowered.lowering)
    at = {tensor.name: t for t, tensor in enumerate(lowered.program.tensors)}
    nodes: dict[int, tuple[Label, ...]] = {}
    for name in names:
        found = pin_masks(lowered.lowering, at[name], lambda layout: True)
        nodes.update({v: lowered.lowering.tensor_node(v).layouts for v in found})
    present = {plan.tensors[_kept(reopened).tensors[t]].layout for t in wider}
    return _question(pattern, "layout", names, len(wider) > len(tensors), lowered, lowered is reopened.lowered, classes, nodes, present)


_ANY = "=*"
_SPECIAL = re.compile(r"[*?=]")


def _exactly(name: str) -> str:
    """A pattern for one name; a mark that globs or pins use stands for any character."""
    return _SPECIAL.sub("?", name)


def _of_nodes(reopened: Reopened, pattern: str, tensors: Sequence[int], of: Of, classes: Ints | None) -> Question:
    """Optimizer states, or what the readers of one phase get: nodes of the plan's own graph."""
    lowering = reopened.lowered.lowering
    wider = _with_copies(lowering, tensors, classes)
    nodes: dict[int, tuple[Label, ...]] = {}
    for t in wider:
        keys: list[NodeKey] = [(StateNode, t, 0)] if of == "state" else []
        if of in ("forward", "backward"):
            keys = [(ReshardNode, t, k) for k, group in enumerate(lowering.lives.groups.get(t, ())) if group.purpose == of]
        found = [lowering.index[key] for key in keys if key in lowering.index]
        if not found:
            have = "optimizer state" if of == "state" else f"{of} readers"
            name = reopened.lowered.program.tensors[t].name
            raise InputError(f"{name!r} has no {have} in this plan; narrow the pattern {pattern!r}, or give another --of")
        nodes.update({v: lowering.tensor_node(v).layouts for v in found})
    names = [reopened.lowered.program.tensors[t].name for t in wider]
    present = {lowering.tensor_node(v).layouts[reopened.assignment[v]] for v in nodes}
    return _question(pattern, of, names, len(wider) > len(tensors), reopened.lowered, True, classes, nodes, present)


def _of_ops(reopened: Reopened, pattern: str, tensors: Sequence[int], ops: Sequence[int], classes: Ints | None) -> Question:
    lowering, program = reopened.lowered.lowering, reopened.lowered.program
    makers = {t: i for i, op in enumerate(program.ops) for t in op.results}
    for t in tensors:
        if t not in makers:
            raise InputError(f"{program.tensors[t].name!r} is made by no op; ask for its layout (leave --of out), or name what an op makes")
    asked = {lowering.index[OpNode, i, 0] for i in (*ops, *(makers[t] for t in tensors))}
    wider = _spread(asked, classes)
    known: dict[int, tuple[Label, ...]] = {}
    nodes: dict[int, tuple[Label, ...]] = {}
    for v in wider:
        column = lowering.strategies[lowering.op_node(v).op]
        if id(column) not in known:
            known[id(column)] = tuple(column.names(k) for k in range(len(column.axis_choice)))
        nodes[v] = known[id(column)]
    found = [program.ops[lowering.op_node(v).op] for v in wider]
    names = [program.tensors[op.results[0]].name if tensors and op.results else f"{op.module}:{op.name}" for op in found]
    present = {nodes[v][reopened.assignment[v]] for v in wider}
    return _question(pattern, "strategy", names, len(wider) > len(asked), reopened.lowered, True, classes, nodes, present)


def _question(
    pattern: str,
    of: Of,
    names: Sequence[str],
    wider: bool,
    lowered: Lowered,
    own: bool,
    classes: Ints | None,
    nodes: Mapping[int, tuple[Label, ...]],
    present: Iterable[Label],
) -> Question:
    nodes = {v: nodes[v] if v in nodes else lowered.lowering.tensor_node(v).layouts for v in _spread(nodes, classes)}
    first = next(iter(nodes.values()))
    common = [label for label in dict.fromkeys(first) if all(label in labels for labels in {id(x): x for x in nodes.values()}.values())]
    now = list(present)
    return Question(
        pattern=pattern,
        of=of,
        names=tuple(fold_names(names)),
        count=len(names),
        wider=wider,
        lowered=lowered,
        own=own,
        classes=classes,
        nodes=nodes,
        labels=tuple(common),
        present=now[0] if len(now) == 1 else None,
    )


def _with_copies(lowering: Lowering, tensors: Sequence[int], classes: Ints | None) -> list[int]:
    """Tensors, and those that are tied to them, in the program's order."""
    own = [_primary(lowering, t) for t in tensors]
    return sorted(set(tensors) | {lowering.tensor_node(v).tensor for v in _spread(own, classes)})


def _primary(lowering: Lowering, t: int) -> int:
    """The node of a tensor as it is stored or made."""
    return lowering.index.get((SourceNode, t, 0), lowering.index.get((ResultNode, t, 0), -1))


def _spread(nodes: Iterable[int], classes: Ints | None) -> list[int]:
    asked = sorted({v for v in nodes if v >= 0})
    if classes is None:
        return asked
    return np.flatnonzero(np.isin(classes, classes[asked])).tolist()
