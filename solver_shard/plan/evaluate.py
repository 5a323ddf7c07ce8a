"""What a plan costs and needs, worked out anew from the program: the check on everything that lowering and solving did.

The evaluator shares the rules and the cost model with the solver, and nothing else: it sees no choice graph. Of the plan
it believes only decisions: the strategy of every op, the layouts of sources and of optimizer states, the reshard of every
group of readers, and what is kept of a tensor between forward and backward readers. Prices, times, lives and bytes are
computed from these alone, and every decision is checked to be legal:

>>> evaluation = evaluate(plan, program, rulebook, costs)
>>> evaluation.objective == plan.certificate.objective, evaluation.peak == plan.memory.peak
(True, True)

So are the figures of every plan that is made (:func:`priced`), and a plan that comes from outside is held against its model
(:func:`evaluated`). The parts, from the top: :class:`Evaluation` and the questions that are asked; ``_Evaluator``, which follows every
tensor from where it is stored or made through its reshards; :class:`OpCheck`, which prices ops; :class:`GradientCheck`, what is between the
backward pass and the update; :class:`Lifetimes`, who reads a tensor together and when its bytes end; :class:`MemoryProfile`, which adds up.

The optimizer's update works where its state is: it reads its slice of the reduced gradient, and the new values then go from
the state's layout to the parameter's, by a reshard of their own with purpose "update". What its step makes is there while it runs (see
:mod:`solver_shard.costs.memory`), and gone when the new values are brought.

A step of several microbatches pays for each of them, and for what its update does once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from solver_shard.costs.layouts import free_move, is_legal
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel, exposed
from solver_shard.costs.schedule import Paid, bucket_sizes, launch_of, unshared_ns
from solver_shard.costs.transitions import TransitionStep, beyond, intermediates, update_held
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout, R
from solver_shard.plan.plan import (
    CATEGORIES,
    MOST_HOLDERS,
    Costs,
    MemoryEntry,
    MemoryTimeline,
    OpCollective,
    Plan,
    PlannedOp,
    Reshard,
    ReshardStep,
    collectives_of,
    runs_of,
)
from solver_shard.program import DTYPE_BYTES, IDENTITY, Phase, Program, Role, in_place, places
from solver_shard.rules.rule import AxisStrategy, Rule
from solver_shard.rules.rulebook import Rulebook

_MIB = 2**20
_STORED = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.INPUT: "inputs"}
ACCUMULATE = "accumulate"
_UPDATE = "update"
LATER = ("backward", "output")
"""Purposes whose readers start from what is held of a tensor."""
_GRADIENT = (ACCUMULATE, "optimizer")
Key = tuple[int, str, str]
"""A group of readers: tensor, purpose, and how they read it."""
Life = tuple[int, int, int]
"""From when until when how many bytes are owned: start, stop, bytes per device; the same start and stop for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The price and the memory of a plan, recomputed.

    Attributes:
        compute_ns, update_ns, communication_ns: nanoseconds of ops (and of the traffic of reshards), optimizer and all collectives
            (those of reshards after the overlap discount), of all microbatches.
        total_ns: their sum, the time of a step.
        unshared_ns: what launches take beyond that, see :mod:`solver_shard.costs.schedule`.
        objective: what the plan's options minimise: nanoseconds plus weight times peak, or bytes.
        peak: bytes per device at the fullest time, the intermediates of transitions included.
        profile: by category, the bytes per device at each time from 0 to T.
        op_ns: nanoseconds of each op, in program order, without the collectives inside it; of one microbatch.
        inside: the collectives inside each op.
        steps: the steps of each reshard, in the plan's order.
        reshard_ns: nanoseconds of each run of each reshard, after the overlap discount.
        traffic_ns: nanoseconds of each run of each reshard for device memory: breaking a fused chain, converting, adding up.
        clip_ns: nanoseconds of the collective of the gradient norm.
        reshard_lives: start, stop and bytes of each reshard, in the plan's order.
        hold_lives: the same of each hold.
        at_peak: what fills the memory at the first of the fullest times, the largest first.
    """

    compute_ns: int
    update_ns: int
    communication_ns: int
    total_ns: int
    unshared_ns: int
    objective: int
    peak: int
    profile: Mapping[str, tuple[int, ...]]
    op_ns: tuple[int, ...]
    inside: tuple[tuple[OpCollective, ...], ...]
    steps: tuple[tuple[ReshardStep, ...], ...]
    reshard_ns: tuple[int, ...]
    traffic_ns: tuple[int, ...]
    clip_ns: int
    reshard_lives: tuple[Life, ...]
    hold_lives: tuple[Life, ...]
    at_peak: tuple[MemoryEntry, ...]

    @property
    def inside_ns(self) -> tuple[int, ...]:
        """Nanoseconds of the collectives inside each op; of one microbatch."""
        return tuple(sum(c.nanoseconds for c in collectives) for collectives in self.inside)

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes per device at each time, all categories together."""
        return tuple(map(sum, zip(*self.profile.values(), strict=True)))


def evaluate(plan: Plan, program: Program, rulebook: Rulebook, costs: CostModel) -> Evaluation:
    """Check a plan and compute its price and memory from the program, the rules and the cost model alone.

    Args:
        program: the one that the plan was made for.
        costs: on the plan's mesh, cluster and overlap.

    Raises:
        InputError: program or cost model are not those of the plan.
        InternalError: the plan decides something that is not legal; the message names the op, tensor or reshard.
    """
    check_question(plan, program, costs)
    rules = [rulebook.rule(program, i) for i in range(len(program.ops))]
    check_rules(plan, rules)
    return _Evaluator(plan, program, rules, costs).run()


def evaluated(plan: Plan, program: Program) -> Evaluation:
    """What a plan from outside costs and needs by its model, its rules and its cluster.

    >>> evaluated(load_plan("plan.json"), program).total_ns
    383012345

    The evaluator takes a decision that is not legal for a mistake of ours (an InternalError), as it prices what solving has made. In a plan
    that was read from a file it is the file's.

    Args:
        program: the model's, with places for the plan's pins (:func:`solver_shard.runtime.apply.fitting`).

    Raises:
        InputError: the plan decides what the model cannot run; the message names the op, tensor or reshard.
    """
    costs = CostModel(plan.mesh, plan.cluster, overlap=plan.options.overlap)
    try:
        return evaluate(plan, program, plan.options.rulebook(), costs)
    except InternalError as error:
        raise InputError(
            f"{error}. It was made by {plan.provenance.tool or 'another tool'}, perhaps of another state, or was changed after it was "
            "written; take it as solve wrote it, or solve again with the same options"
        ) from None


def priced(plan: Plan, program: Program, rules: Sequence[Rule], costs: CostModel) -> Plan:
    """A plan of which only the decisions are known, with the figures that follow from them; the certificate stays as it is.

    Args:
        plan: as for :func:`evaluate`; its prices, steps, lives, memory and costs are not read.
        program, costs: those that it was made for.
        rules: of every op of the program.

    Raises:
        InternalError: the plan decides something that is not legal.
    """
    found = _Evaluator(plan, program, rules, costs).run()
    ops = tuple(
        replace(op, nanoseconds=nanoseconds, collectives=collectives)
        for op, nanoseconds, collectives in zip(plan.ops, found.op_ns, found.inside, strict=True)
    )
    reshards = tuple(
        replace(reshard, steps=steps, nanoseconds=nanoseconds, traffic_ns=traffic_ns, start=start, stop=stop, nbytes=nbytes)
        for reshard, steps, nanoseconds, traffic_ns, (start, stop, nbytes) in zip(
            plan.reshards, found.steps, found.reshard_ns, found.traffic_ns, found.reshard_lives, strict=True
        )
    )
    holds = tuple(
        replace(hold, start=start, stop=stop, nbytes=nbytes)
        for hold, (start, stop, nbytes) in zip(plan.holds, found.hold_lives, strict=True)
    )
    by_kind: dict[str, int] = {}
    for c in collectives_of(ops, reshards, plan.clip, plan.options.microbatches):
        by_kind[c.kind] = by_kind.get(c.kind, 0) + c.runs * c.nanoseconds
    return replace(
        plan,
        ops=ops,
        reshards=reshards,
        holds=holds,
        memory=MemoryTimeline.build(found.profile, limit=plan.options.usable_memory, ops=ops, holders=found.at_peak[:MOST_HOLDERS]),
        costs=Costs(
            compute_ns=found.compute_ns,
            update_ns=found.update_ns,
            communication_ns=found.communication_ns,
            hidden_ns=sum(by_kind.values()) - found.communication_ns,
            total_ns=found.total_ns,
            unshared_ns=found.unshared_ns,
            objective=found.objective,
            by_kind_ns=dict(sorted(by_kind.items())),
        ),
    )


def check_question(plan: Plan, program: Program, costs: CostModel) -> None:
    """Check that the plan is for this program, mesh, cluster and overlap."""
    if plan.mesh != costs.mesh:
        raise InputError(f"the plan is for mesh {plan.mesh}, the cost model for {costs.mesh}; give the plan's own mesh")
    if plan.cluster != costs.cluster:
        raise InputError(
            f"the plan is for cluster {plan.cluster.name!r}, the cost model for {costs.cluster.name!r} or another version of it"
        )
    if plan.options.overlap != costs.overlap:
        raise InputError(f"the plan is for overlap {plan.options.overlap:g}, the cost model for {costs.overlap:g}; give the plan's own")
    other = f"the plan is not for this program ({program.name!r}): "
    if (len(plan.tensors), len(plan.ops)) != (len(program.tensors), len(program.ops)):
        raise InputError(
            f"{other}it has {len(plan.tensors)} tensors and {len(plan.ops)} ops, "
            f"the program {len(program.tensors)} and {len(program.ops)}; trace the model as when the plan was made"
        )
    for planned, tensor in zip(plan.tensors, program.tensors, strict=True):
        if (planned.name, planned.shape, planned.dtype, planned.role) != (tensor.name, tensor.shape, tensor.dtype, tensor.role.value):
            raise InputError(f"{other}tensor {tensor.name!r} {tensor.dtype}{list(tensor.shape)} is {planned} in the plan")
    for i, (step, op) in enumerate(zip(plan.ops, program.ops, strict=True)):
        found = (step.name, step.operands, step.results, step.phase, step.recompute)
        if found != (op.name, op.operands, op.results, op.phase.value, op.recompute):
            raise InputError(f"{other}op {i} is {op.name}, in the plan {step.name}, or reads and makes other tensors there")
    gradients = {program.tensors[p].name: g for p, g in program.gradients.items()}
    if plan.outputs != program.outputs or dict(plan.gradients) != gradients:
        raise InputError(f"{other}its outputs or gradients are others")


def check_rules(plan: Plan, rules: Sequence[Rule]) -> None:
    """Check that every op's rule comes from where it came from when the plan was made."""
    files = ", ".join(file.name for file in plan.options.rules)
    for i, (op, rule) in enumerate(zip(plan.ops, rules, strict=True)):
        if op.source == rule.source:
            continue
        what = f"op {i} ({op.name}) was planned by {_SOURCES[op.source]}, here it has {_SOURCES[rule.source]}"
        if op.source in ("dtensor", "unproven"):
            raise InputError(f"{what}; import the library that registers the op's strategies with DTensor first")
        raise InputError(f"{what}; the plan keeps its rules files ({files or 'none'}): use plan.options.rulebook()")


_SOURCES = {
    "table": "its shipped row",
    "user": "a row of the user's",
    "family": "the row of the op that it follows",
    "dtensor": "a strategy registered with DTensor",
    "unproven": "a strategy registered with DTensor that is not proven",
    "fallback": "no rule",
}


def illegal(problem: str) -> NoReturn:
    """Say what is not legal about a plan."""
    raise InternalError(f"the plan is not legal: {problem}")


class _Evaluator:
    """One evaluation; ``rules`` has one rule per op of the program."""

    def __init__(self, plan: Plan, program: Program, rules: Sequence[Rule], costs: CostModel) -> None:
        self.plan, self.program, self.rules, self.costs, self.state = plan, program, rules, costs, plan.options.optimizer_state()
        self.mesh_shape = costs.mesh.shape
        self.ops = OpCheck(plan, program, rules, costs)
        self.made = {t: i for i, op in enumerate(program.ops) for t in op.results}
        self.parameter_of: dict[int, list[int]] = {}
        for parameter, gradient in program.gradients.items():
            self.parameter_of.setdefault(gradient, []).append(parameter)
        self.gradients = GradientCheck(plan, program, costs, self.state, self.ops)
        self.lives = find_lives(program, self.rules, accumulates=self.gradients.accumulates)
        self.profile = MemoryProfile(self.lives.end)
        self.keys_of: dict[int, list[Key]] = {}
        for key in self.lives.readers:
            self.keys_of.setdefault(key[0], []).append(key)
        self.before: dict[int, list[tuple[int, int, int, int]]] = {}
        self.moved_before: dict[int, list[int]] = {}
        self.after: dict[int, list[tuple[int, int]]] = {}
        self.results: dict[int, int] = {}
        self.shared: list[Paid] = []

    def run(self) -> Evaluation:
        self.produced = {t: self._stored(t) for t in self.program.sources()}
        prices = [self.ops.price(i) for i in range(len(self.program.ops))]
        op_ns, inside = tuple(nanoseconds for nanoseconds, _ in prices), tuple(collectives for _, collectives in prices)
        self.produced |= {t: x for op in self.plan.ops for t, x in zip(op.results, op.result_layouts, strict=True)}
        self.states = self._states()
        readers = dict(self.lives.readers) | dict.fromkeys(((p, _UPDATE, _UPDATE) for p in self.states), ())
        self.reshards = reshards = self._reshards_by_group(readers)
        self.buckets = bucket_sizes(self.program, [(t, purpose) for t, purpose, _ in readers])
        self._all_operands_fit(reshards)
        self.accumulators = {key[0]: self.plan.reshards[k].layout for key, k in reshards.items() if key[1] == ACCUMULATE}
        self.kept = self._kept()
        update_ns = sum(self._source(t) for t in self.program.sources())
        for t, i in self.made.items():
            if i not in self.lives.views:
                start, stop = self.lives.base_start[t], self.lives.base_stop[t]
                life = self.profile.add(t, self._category(t), start, stop, self.ops.local_bytes(t, self.produced[t]))
                if start == i:  # what takes over is there before the next op's transitions
                    self._made_at(life)
        self.lent = self._lent(reshards)
        for t, layout in self.accumulators.items():
            self.profile.add(t, "gradients", 0, self.lives.end, self.gradients.held_bytes(t, layout))
        keys = {position: key for key, position in reshards.items()}
        steps = [self._reshard(position, keys[position]) for position in sorted(keys)]
        reshard_ns = [self._exposed(keys[position], path) for position, path in zip(sorted(keys), steps, strict=True)]
        reshard_lives = [self._owned(position, keys[position]) for position in sorted(keys)]
        hold_lives = [self._hold(k) for k in range(len(self.plan.holds))]
        for start in sorted({*self.before, *self.after}):  # they run one after the other; of those that hold as much the first tensor's
            ahead = beyond(self.before.get(start, []), self.results.get(start, 0))
            held = zip(ahead, self.moved_before.get(start, ()), strict=True)
            nbytes, t = max([*self.after.get(start, ()), *held], key=lambda most: (most[0], -most[1]))
            self.profile.add(t, "intermediates", start, start + 1, nbytes)
        profile = self.profile.series()
        totals = [sum(row) for row in zip(*profile.values(), strict=True)]
        peak = max(totals)
        traffic_ns = [self._traffic(position, keys[position]) for position in sorted(keys)]
        clip_ns = self.gradients.norm_nanoseconds(self.states)
        options = self.plan.options
        count = options.microbatches
        runs = [runs_of(keys[position][1], count) for position in sorted(keys)]
        compute_ns = count * sum(op_ns) + sum(n * ns for n, ns in zip(runs, traffic_ns, strict=True))
        communication_ns = sum(n * ns for n, ns in zip(runs, reshard_ns, strict=True)) + clip_ns
        communication_ns += count * sum(c.nanoseconds for collectives in inside for c in collectives)
        total = compute_ns + update_ns + communication_ns
        return Evaluation(
            compute_ns=compute_ns,
            update_ns=update_ns,
            communication_ns=communication_ns,
            total_ns=total,
            unshared_ns=exposed(unshared_ns(self.shared, self.costs.collective_ns), self.costs.overlap),
            objective=peak if options.objective == "memory" else total + options.memory_weight * peak // _MIB,
            peak=peak,
            profile=profile,
            op_ns=op_ns,
            inside=inside,
            steps=tuple(map(self._planned, steps)),
            reshard_ns=tuple(reshard_ns),
            traffic_ns=tuple(traffic_ns),
            clip_ns=clip_ns,
            reshard_lives=tuple(reshard_lives),
            hold_lives=tuple(hold_lives),
            at_peak=self._entries(totals.index(peak)),
        )

    def _planned(self, path: Sequence[TransitionStep]) -> tuple[ReshardStep, ...]:
        """The steps of a transition as a plan lists them."""
        return tuple(
            ReshardStep(
                kind=step.kind,
                axes=tuple(self.plan.mesh.names[a] for a in step.axes),
                nbytes=step.nbytes,
                nanoseconds=step.nanoseconds,
                before=step.before,
                after=step.after,
            )
            for step in path
        )

    def _entries(self, time: int) -> tuple[MemoryEntry, ...]:
        """What fills the memory at a time, the largest first."""
        entries = [
            MemoryEntry(name=self.program.tensors[t].name, category=category, nbytes=nbytes)
            for t, category, start, stop, nbytes in self.profile.lives
            if start <= time < stop and nbytes
        ]
        return tuple(sorted(entries, key=lambda entry: (-entry.nbytes, entry.name)))

    def _stored(self, t: int) -> Layout:
        layout = self.plan.tensors[t].layout
        self.ops.executable(t, layout, f"source {self.program.tensors[t].name!r}", orders=self._either_order(t))
        if any(placement.is_partial for placement in layout):
            illegal(f"source {self.program.tensors[t].name!r} is stored with a pending reduction, {layout}")
        return layout

    def _either_order(self, t: int) -> bool:
        """Whether several axes may cut one dim of a tensor in another order than from left to right: parameters and gradients of them."""
        return self.program.tensors[t].role is Role.PARAMETER or t in self.parameter_of

    # Who reads what through which reshard

    def _reshards_by_group(self, readers: Mapping[Key, tuple[tuple[int, int], ...]]) -> dict[Key, int]:
        """Position of the one reshard of each group."""
        found: dict[Key, int] = {}
        for position, reshard in enumerate(self.plan.reshards):
            key = (reshard.tensor, reshard.purpose, reshard.family)
            where = f"reshard {position} of {self.program.tensors[reshard.tensor].name!r} ({reshard.purpose}, {reshard.family})"
            if key not in readers:
                illegal(f"{where}: the program has no such group of readers")
            if key in found:
                illegal(f"{where}: reshard {found[key]} already serves this group")
            if sorted(reshard.readers) != sorted(readers[key]):
                illegal(f"{where} has readers {list(reshard.readers)}; the group has {list(readers[key])}")
            found[key] = position
        for t, purpose, family in readers:
            if (t, purpose, family) not in found:
                illegal(f"{self.program.tensors[t].name!r} has no reshard for its readers ({purpose}, {family})")
        return found

    def _all_operands_fit(self, reshards: Mapping[Key, int]) -> None:
        for key, position in reshards.items():
            reshard = self.plan.reshards[position]
            for i, j in reshard.readers:
                asked = self.plan.ops[i].operand_layouts[j]
                if not (reshard.layout == asked if i in self.lives.places else free_move(reshard.layout, asked)):
                    illegal(
                        f"op {i} ({self.program.ops[i].name}) asks operand {j} as {asked}, but gets {self.program.tensors[key[0]].name!r} "
                        f"as {reshard.layout}, and a device cannot make the one from the other alone"
                    )

    def _reshard(self, position: int, key: Key) -> tuple[TransitionStep, ...]:
        """Check one reshard; its collectives."""
        (t, purpose, _), reshard = key, self.plan.reshards[position]
        tensor = self.program.tensors[t]
        where = f"reshard {position} of {tensor.name!r} ({reshard.purpose}, {reshard.family})"
        self.ops.executable(t, reshard.layout, where, orders=self._either_order(t))
        source, what = self.produced[t], "the tensor is produced as"
        if self.lives.later(key):
            source, what = self.plan.holds[self.kept[t]].layout, "what is kept of the tensor is"
        elif purpose == _UPDATE:
            source, what = self.states[t], "the optimizer's state is"
        elif purpose == "optimizer" and t in self.accumulators:
            source, what = self.accumulators[t], "the accumulator is"
        if reshard.source != source:
            illegal(f"{where} starts from {reshard.source}, but {what} {source}")
        converted = self.gradients.converts(t, purpose) and (purpose == "optimizer" or reshard.layout != source)
        if reshard.copy == (reshard.layout == source and not converted):
            illegal(f"{where} is {'a copy in' if reshard.copy else 'an alias that differs from'} the layout it starts from, {source}")
        self._handed_over(where, key, reshard)
        bucket = self.buckets.get((t, purpose), 1)
        if reshard.bucket != bucket:
            illegal(f"{where} shares its launch among {reshard.bucket}, but the program has {bucket} such tensors in this unit")
        if not reshard.copy and purpose != _UPDATE:
            return ()
        reductions = {placement.reduction for placement in (*source, *reshard.layout) if placement.is_partial}
        orders, dtype = self._either_order(t), self.gradients.dtype(t, purpose)
        path = self.costs.transitions(tensor.shape, dtype, tuple(sorted(reductions)), bucket, orders).path(source, reshard.layout)
        time = self.lives.end - 1 if purpose == _UPDATE else self.lives.first[key]
        held = intermediates(path, self.ops.local_bytes(t, source, dtype) if converted else 0)
        if purpose == _UPDATE:
            elements, mine = math.prod(source.local_shape(tensor.shape, self.mesh_shape)), self.state
            cast = self.ops.local_bytes(t, source) if mine.master_bytes(tensor.dtype) else 0
            held = update_held(path, cast, elements * mine.turn_bytes(tensor.dtype))
        if self._leaves(key):
            self.after.setdefault(time, []).append((held, t))
        else:
            turn = min((j for i, j in self.lives.readers.get(key, ()) if i == time), default=0)
            goes = self._goes(key, source) if key in self.lives.taking and not self._stays(key) else 0
            self.before.setdefault(time, []).append((turn, held, self.ops.local_bytes(t, reshard.layout, dtype), goes))
            self.moved_before.setdefault(time, []).append(t)
        parameter = self.program.tensors[self.parameter_of[t][-1]] if purpose in _GRADIENT else tensor
        for k, step in enumerate(path) if bucket > 1 else ():
            if step.nbytes:
                launch = launch_of(purpose, parameter.name, tensor.dtype, k, step.kind, step.axes)
                paid = Paid(
                    launch=launch,
                    kind=step.kind,
                    axes=step.axes,
                    nbytes=step.nbytes,
                    nanoseconds=step.nanoseconds,
                    runs=self.plan.runs(reshard),
                )
                self.shared.append(paid)
        return path

    def _exposed(self, key: Key, path: Sequence[TransitionStep]) -> int:
        """Nanoseconds that a reshard's collectives take, but for what an overlap hides of them."""
        nanoseconds = sum(step.nanoseconds for step in path)
        hidden = self.program.tensors[key[0]].role is Role.PARAMETER or key[1] in _GRADIENT
        return exposed(nanoseconds, self.costs.overlap) if hidden else nanoseconds

    def _goes(self, key: Key, source: Layout) -> int:
        """Bytes of what a group starts from that nothing else needs: a view's are those of what it was read from."""
        t = key[0]
        if self.made[t] not in self.lives.views or self.lives.later(key):
            return self.ops.local_bytes(t, source)
        i, x = self.made[t], self.program.ops[self.made[t]].operands[0]
        while self.program.ops[i].name == IDENTITY and x in self.made and self.made[x] in self.lives.views:
            i, x = self.made[x], self.program.ops[self.made[x]].operands[0]  # a place behind a view hands it on
        read = next(key for key in self.keys_of[x] if (i, 0) in self.lives.readers[key])
        return self.ops.local_bytes(x, self.plan.reshards[self.reshards[read]].layout)

    def _leaves(self, key: Key) -> bool:
        """Whether a reshard runs right after the op that makes its tensor: a gradient on its way to the update or its accumulator."""
        return key[1] == ACCUMULATE or (key[1] == "optimizer" and key[0] not in self.accumulators)

    def _made_at(self, life: Life) -> Life:
        """Bytes that an op makes, or that are made of its results right after it: they come after the transitions before the op."""
        start, stop, nbytes = life
        self.results[start] = self.results.get(start, 0) + (nbytes if start < stop else 0)
        return life

    def _traffic(self, position: int, key: Key) -> int:
        """What a copy of a fused tensor pays for writing it and reading it back, and a gradient for its way to the update."""
        reshard = self.plan.reshards[position]
        if key[0] in self.parameter_of and key[1] in _GRADIENT:
            return self.gradients.traffic_nanoseconds(reshard)
        if not reshard.copy or reshard.tensor not in self.ops.fused:
            return 0
        dtype = self.program.tensors[reshard.tensor].dtype
        return sum(int(self.costs.compute_ns(0, self.ops.local_bytes(reshard.tensor, x), dtype)) for x in (reshard.source, reshard.layout))

    def _handed_over(self, where: str, key: Key, reshard: Reshard) -> None:
        """What outlives the step is whole and where it belongs: each state finds its slice of the gradient, new values go home."""
        t, purpose, _ = key
        if purpose == ACCUMULATE and any(
            placement.is_partial and placement.reduction not in ("sum", "avg") for placement in reshard.layout
        ):
            illegal(f"{where} adds up what waits for a reduction that additions do not keep, {reshard.layout}")
        if purpose in ("optimizer", "output") and any(placement.is_partial for placement in reshard.layout):
            illegal(f"{where} leaves a pending reduction, {reshard.layout}")
        if purpose == _UPDATE and reshard.layout != self.produced[t]:
            illegal(f"{where} brings the new values to {reshard.layout}, but the parameter is stored as {self.produced[t]}")
        for stored in self.program.written(t) if purpose == "output" else ():
            if not free_move(reshard.layout, self.produced[stored]):
                name = self.program.tensors[stored].name
                illegal(f"{where} makes the new value of {name!r} as {reshard.layout}, but it is stored as {self.produced[stored]}")
        for parameter in self.parameter_of.get(t, ()) if purpose == "optimizer" else ():
            name, wanted = self.program.tensors[parameter].name, self.states.get(parameter)
            if wanted is None and reshard.layout != self.produced[parameter]:
                illegal(f"{where} gives {reshard.layout}, but its parameter {name!r} is stored as {self.produced[parameter]}")
            if wanted is not None and not free_move(reshard.layout, wanted):
                illegal(f"{where} gives {reshard.layout}, of which the optimizer's state of {name!r}, {wanted}, is no slice")

    # What is kept between forward and later readers, and where the optimizer works

    def _states(self) -> dict[int, Layout]:
        """Layout of the optimizer's state of every parameter that has one."""
        found = {}
        for t, planned in enumerate(self.plan.tensors):
            layout, trained = planned.state, t in self.program.gradients and self.state.optimizer != "none"
            if trained != (layout is not None):
                illegal(f"{planned.name!r} {'lacks a layout for its' if trained else 'has no'} optimizer state")
            if layout is not None:
                self.ops.executable(t, layout, f"optimizer state of {planned.name!r}", orders=True)
                if any(placement.is_partial for placement in layout):
                    illegal(f"optimizer state of {planned.name!r} is stored with a pending reduction, {layout}")
                found[t] = layout
        return found

    def _kept(self) -> dict[int, int]:
        """Position of the hold of every tensor that must have one; each keeps what the forward pass has."""
        found: dict[int, int] = {}
        for position, hold in enumerate(self.plan.holds):
            t, name = hold.tensor, self.program.tensors[hold.tensor].name
            where = f"hold {position} of {name!r}"
            if t not in self.lives.held_stop:
                illegal(f"{where}: it has no readers in the forward pass and again later")
            if t in found:
                illegal(f"{where}: hold {found[t]} already says what is kept")
            found[t] = position
            has, what = self.produced[t], "the tensor is produced as"
            if hold.reshard is not None:
                kept = self.plan.reshards[hold.reshard]
                has, what = kept.layout, f"reshard {hold.reshard} gives"
                if (kept.tensor, kept.purpose) != (t, "forward") or not kept.copy:
                    illegal(f"{where} keeps reshard {hold.reshard}, which is no copy of it for forward readers")
            if hold.layout != has:
                illegal(f"{where} keeps {hold.layout}, but {what} {has}")
        for t in self.lives.held_stop:
            if t not in found:
                illegal(f"{self.program.tensors[t].name!r} is read in the forward pass and again later, but no hold says what is kept")
        return found

    def _lent(self, reshards: Mapping[Key, int]) -> dict[int, tuple[int, int, int]]:
        """What is held in a storage: its owner, since when, and how many bytes; the member that is held longest has them all."""
        found: dict[int, tuple[int, int, int]] = {}
        for owner, members in self.lives.storages.items():
            whole, held = self.ops.local_bytes(owner, self.produced[owner]), self.lives.held_stop
            start = min(self.lives.stop[way[-1]] if way else self.lives.base_stop[owner] for way in members.values())
            start = self.lives.base_stop[owner] if owner in members else start
            inside = [
                t
                for t, way in members.items()
                if self.plan.holds[self.kept[t]].reshard is None
                and not any(self.plan.reshards[reshards[key]].copy for key in way)
                and self.ops.local_bytes(t, self.produced[t]) * self.program.tensors[owner].numel == whole * self.program.tensors[t].numel
            ]
            longest = min(inside, key=lambda t: (-held[t], t), default=None)
            for t in inside:
                found[t] = owner, start, whole if t == longest and owner in self.made else 0
        return found

    # Memory over time

    def _source(self, t: int) -> int:
        """Own a source for the whole step, with its optimizer state; nanoseconds of its update."""
        tensor = self.program.tensors[t]
        self.profile.add(t, self._category(t), 0, self.lives.end, self.ops.local_bytes(t, self.produced[t]))
        if t not in self.states:
            return 0
        elements = math.prod(self.states[t].local_shape(tensor.shape, self.mesh_shape))
        apart = 0 if free_move(self.produced[t], self.states[t]) else self.state.apart_bytes(tensor.dtype)
        self.profile.add(t, "optimizer", 0, self.lives.end, elements * (self.state.resident_bytes(tensor.dtype) + apart))
        step = elements * self.state.step_bytes(tensor.dtype)
        self._made_at(self.profile.add(t, "optimizer", self.lives.end - 1, self.lives.end, step))
        norm = self.costs.compute_ns(0, elements * self.state.norm_bytes(tensor.dtype), tensor.dtype, "reduction")
        return int(norm) + int(self.costs.compute_ns(0, elements * self.state.update_bytes(tensor.dtype), tensor.dtype))

    def _hold(self, position: int) -> Life:
        """Own what is kept, from where its forward life ends; a source stays anyway."""
        hold = self.plan.holds[position]
        t, stop = hold.tensor, self.lives.held_stop[hold.tensor]
        if t in self.lent:
            owner, start, nbytes = self.lent[t]
            since = start
            for until, member in sorted((self.lives.held_stop[m], -m) for m in self.lives.storages[owner]) if nbytes else ():
                until = min(until, stop)
                self.profile.add(-member, self._category(owner), since, until, nbytes)  # as the member that is done next
                since = max(since, until)
            return (start, stop, nbytes) if nbytes and start < stop else (stop, stop, 0)
        stop = self._kept_until(t)
        if hold.reshard is None:
            elements = math.prod(hold.layout.local_shape(distinct_shape(self.program, self.made, t), self.mesh_shape))
            nbytes = elements * DTYPE_BYTES[self.program.tensors[t].dtype]
            return self.profile.add(t, self._category(t), self.lives.base_stop[t], stop, nbytes)
        kept = self.plan.reshards[hold.reshard]
        return self.profile.add(t, "copies", self.lives.stop[t, kept.purpose, kept.family], stop, self.ops.local_bytes(t, hold.layout))

    def _kept_until(self, t: int) -> int:
        """When what is held alone is no longer needed for any reshard."""
        taken = [self.lives.first[key] for key in self.keys_of[t] if key in self.lives.taking and self.lives.later(key)]
        return taken[0] if taken else self.lives.held_stop[t]

    def _stays(self, key: Key) -> bool:
        """Whether what a group starts from is kept for another reason than its readers: it is held, or in a storage that others need."""
        t = key[0]
        if self.lives.later(key):
            return t in self.lent
        return t in self.kept and self.plan.holds[self.kept[t]].reshard is None

    def _owned(self, position: int, key: Key) -> Life:
        """Own the bytes of a group: of its copy, or of what it reads as it is beyond the life of that."""
        (t, purpose, _), reshard, lives = key, self.plan.reshards[position], self.lives
        nbytes = self.ops.local_bytes(t, reshard.layout, self.gradients.dtype(t, purpose))
        if purpose == "optimizer" and t in self.accumulators:
            start = lives.end if self.gradients.in_place(reshard) else lives.first[key]
            return self.profile.add(t, "gradients", start, lives.end, nbytes)
        if purpose == _UPDATE:  # the new values are written where the old ones are
            return lives.end - 1, lives.end - 1, 0
        if reshard.copy:
            gradient = purpose in _GRADIENT
            life = self.profile.add(t, "gradients" if gradient else "copies", lives.first[key], lives.stop[key], nbytes)
            return self._made_at(life) if self._leaves(key) else life
        category, start = self._category(t), lives.base_stop[t]
        if lives.later(key):
            copied = self.plan.holds[self.kept[t]].reshard is not None
            category = "copies" if copied else category
            start = lives.held_stop[t] if copied or t in self.made else lives.end
        if key in lives.taking:
            start = lives.end if self._stays(key) else lives.first[key]
        return self.profile.add(t, category, max([start, *self._read_before(key)]), lives.stop[key], nbytes)

    def _read_before(self, key: Key) -> list[int]:
        """When other groups are done that read the same bytes as they are, and are done before."""
        lives = self.lives

        def order(key: Key) -> tuple[int, int, str, str]:
            return -lives.stop[key], lives.first[key], key[1], key[2]

        return [
            lives.stop[other]
            for other in self.keys_of[key[0]]
            if lives.later(other) == lives.later(key)
            and not self.plan.reshards[self.reshards[other]].copy
            and other[1] != ACCUMULATE
            and not (other[1] == "optimizer" and other[0] in self.accumulators)
            and order(other) > order(key)
        ]

    def _category(self, t: int) -> str:
        role = self.program.tensors[t].role
        return _STORED.get(role, "gradients" if role is Role.GRADIENT else "activations")


class OpCheck:
    """The ops of a plan: each is checked against its rule and priced anew; ``rules`` has one rule per op."""

    def __init__(self, plan: Plan, program: Program, rules: Sequence[Rule], costs: CostModel) -> None:
        self.plan, self.program, self.rules, self.costs = plan, program, rules, costs
        self.mesh_shape = costs.mesh.shape
        self.fused = self._fused() if plan.options.fusion else set()
        self.written = in_place(program)
        self._named: dict[int, tuple[dict[str, AxisStrategy], dict[str, AxisStrategy]]] = {}

    def price(self, i: int) -> tuple[int, tuple[OpCollective, ...]]:
        """Check the layouts of an op against its strategies; its nanoseconds and the collectives inside it, which are not among these."""
        op, planned, rule = self.program.ops[i], self.plan.ops[i], self.rules[i]
        where = f"op {i} ({op.name})"
        axes = self._strategies(where, rule, planned.strategy)
        for j, t in enumerate((*op.operands, *op.results)):
            k = j - len(op.operands)
            layout = Layout(axis.operands[j] if k < 0 else axis.results[k] for axis in axes)
            found = planned.operand_layouts[j] if k < 0 else planned.result_layouts[k]
            what = f"{where}, operand {j}" if k < 0 else f"{where}, result {k}"
            if layout != found:
                illegal(f"{what} has layout {found}, but its strategies {', '.join(planned.strategy)} give {layout}")
            self.executable(t, layout, what)
        share, inside = self._share(where, rule, axes), self._inside(where, planned, rule, axes)
        if rule.view:
            return 0, inside
        read = [(t, planned.operand_layouts[j]) for j, t in enumerate(op.operands) if rule.needs(j)]
        made = list(zip(op.results, planned.result_layouts, strict=True))
        moved = 0
        if i in self.written and rule.window:  # of what it writes into, and of its result, which lies there, only what it writes
            read, made = read[1:], made[1:]
            moved = round(rule.window * share) * DTYPE_BYTES[self.program.tensors[op.results[0]].dtype]
        moved += sum(self.local_bytes(t, layout) for t, layout in (*read, *made) if t not in self.fused)
        return int(self.costs.compute_ns(rule.flops * share, moved, self._dtype(i), rule.kernel)), inside

    def _inside(self, where: str, planned: PlannedOp, rule: Rule, axes: list[AxisStrategy]) -> tuple[OpCollective, ...]:
        """The collectives inside an op: those of the implementation that its axes share."""
        ways = {axis.implementation.name: axis.implementation for axis in axes if axis.implementation is not None}
        if len(ways) > 1:
            illegal(f"{where} would run two implementations at once, {' and '.join(ways)}")
        if planned.implementation != "".join(ways):
            illegal(f"{where} says it runs implementation {planned.implementation!r}, its strategies are {', '.join(planned.strategy)}")
        collectives = []
        for implementation in ways.values():
            group = tuple(a for a, axis in enumerate(axes) if axis.implementation is not None)
            names = tuple(self.plan.mesh.names[a] for a in group)
            for collective in implementation.collectives:
                rows = math.prod(math.ceil(rule.factors[f].size / self._shards(axes, f)) for f in collective.rows)
                nbytes = rows * collective.width * DTYPE_BYTES[collective.dtype]
                nanoseconds = self.costs.collective_ns(collective.kind, group, nbytes)
                collectives.append(OpCollective(kind=collective.kind, axes=names, nbytes=nbytes, nanoseconds=nanoseconds))
        return tuple(collectives)

    def executable(self, t: int, layout: Layout, where: str, *, orders: bool = False) -> None:
        """Check that a tensor can have a layout; ``orders``: whether it may be a strided one."""
        shape = self.program.tensors[t].shape
        if not is_legal(layout, shape, self.mesh_shape, self.plan.mesh.wholes if orders else None):
            illegal(f"{where}: {list(shape)} cannot have layout {layout} on mesh {self.plan.mesh}")

    def local_bytes(self, t: int, layout: Layout, dtype: str | None = None) -> int:
        """Bytes of a tensor on the device that holds most, in its own dtype or another."""
        tensor = self.program.tensors[t]
        return math.prod(layout.local_shape(tensor.shape, self.mesh_shape)) * DTYPE_BYTES[dtype or tensor.dtype]

    def _strategies(self, where: str, rule: Rule, names: tuple[str, ...]) -> list[AxisStrategy]:
        if id(rule) not in self._named:  # ``rules`` keeps its rules, one for all ops alike
            everywhere = {strategy.name: strategy for strategy in rule.strategies()}
            self._named[id(rule)] = everywhere, everywhere | {strategy.name: strategy for strategy in rule.minor_strategies()}
        everywhere, on_parts = self._named[id(rule)]
        chosen = []
        for a, (axis, name) in enumerate(zip(self.plan.mesh.axes, names, strict=True)):
            known = on_parts if a in self.plan.mesh.inner else everywhere
            if name not in known:
                illegal(f"{where} has strategy {name!r} on axis {axis.name!r}; its rule knows {', '.join(known)}")
            if axis.size == 1 and name != "R":
                illegal(f"{where} has strategy {name!r} on axis {axis.name!r} of size 1, which can only replicate")
            chosen.append(known[name])
        if not rule.complete(chosen, self.mesh_shape):
            illegal(f"{where} has strategies {', '.join(names)}, of which one cuts below a factor that axes to the left leave in one piece")
        return chosen

    def _share(self, where: str, rule: Rule, axes: list[AxisStrategy]) -> float:
        """The part of the op's work that the busiest device does."""
        share = 1.0
        for index, factor in enumerate(rule.factors):
            shards = self._shards(axes, index)
            if not factor.legal(shards):
                illegal(f"{where} cuts its factor {factor.name!r} of size {factor.size} into {shards}")
            share *= rule.share(index, shards)
        return share

    def _shards(self, axes: list[AxisStrategy], factor: int) -> int:
        return math.prod(size for axis, size in zip(axes, self.mesh_shape, strict=True) if axis.factor == factor)

    def _dtype(self, i: int) -> str:
        op = self.program.ops[i]
        dtypes = [self.program.tensors[t].dtype for t in (*op.operands, *op.results)]
        floating = [dtype for dtype in dtypes if dtype.startswith(("f", "bf"))]
        return (floating or dtypes)[0]

    def _fused(self) -> set[int]:
        """Results that a pointwise chain hands on without memory: op by op, each asks who reads what it made."""
        chained = {i for i, rule in enumerate(self.rules) if rule.family in ("pointwise", "cast")}
        readers, made = self.program.readers(), {t: i for i, op in enumerate(self.program.ops) for t in op.results}
        kept = {*self.program.outputs, *self.program.gradients.values()}
        found = set()
        handing = places(self.program)
        for t in (t for i in sorted(chained) for t in self.program.ops[i].results):
            last, handed = t, {t}
            while last in handing:  # what it is called after the place of a pin or a relay
                (last,) = self.program.ops[handing[last]].results
                handed.add(last)
            reading = [i for i, j in readers.get(last, ()) if self.rules[i].needs(j)]
            if handed & kept or len(reading) != 1:
                continue
            i, op = reading[0], self.program.ops[reading[0]]
            alike = self.program.tensors[op.results[0]].shape == self.program.tensors[t].shape
            if i in chained and alike and op.phase is self.program.ops[made[t]].phase:
                found |= handed
        return found


class GradientCheck:
    """What happens to the gradients of one plan between the backward pass and the update: accumulators, reduce dtype, clipping.

    - In a step of several microbatches a gradient is added to its accumulator where it is made: what arrives and the accumulator are
      read, the accumulator is written. What arrives is the gradient as made, or in the accumulator's layout and dtype if it had to be
      communicated first. The accumulator's own bytes stay for the whole step, and the reduction after the last microbatch works in
      them unless a device gets more than its part of them.
    - A gradient that is communicated in another dtype than its own is read once and written once before; with a single microbatch
      it is held in that dtype until the update, so that it is converted even where nothing is communicated.
    - The norm of all gradients is one f32, all-reduced over at least every axis that cuts an optimizer state.

    Attributes:
        accumulates: a step has several microbatches.
    """

    def __init__(self, plan: Plan, program: Program, costs: CostModel, state: OptimizerState, ops: OpCheck) -> None:
        self.plan, self.program, self.costs, self.state, self.ops = plan, program, costs, state, ops
        self.accumulates = plan.options.microbatches > 1

    def dtype(self, t: int, purpose: str) -> str:
        """In which a tensor is communicated, and held afterwards."""
        own = self.program.tensors[t].dtype
        return (self.state.reduce_dtype or own) if purpose in _GRADIENT else own

    def converts(self, t: int, purpose: str) -> bool:
        """Whether what a reshard starts from is in another dtype than what it communicates."""
        fresh = purpose == (ACCUMULATE if self.accumulates else "optimizer")
        return fresh and self.dtype(t, purpose) != self.program.tensors[t].dtype

    def held_bytes(self, t: int, layout: Layout) -> int:
        """Bytes per device of an accumulator."""
        return self.ops.local_bytes(t, layout, self.dtype(t, ACCUMULATE))

    def in_place(self, reshard: Reshard) -> bool:
        """Whether every device cuts its part of the reduced gradient from its own part of the accumulator."""
        whole = Layout(R if placement.is_partial else placement for placement in reshard.source)
        return free_move(whole, reshard.layout)

    def traffic_nanoseconds(self, reshard: Reshard) -> int:
        """Time of converting and adding, each time that the reshard runs."""
        t, own = reshard.tensor, self.program.tensors[reshard.tensor].dtype
        other = self.dtype(t, reshard.purpose)
        total = 0
        if reshard.copy and self.converts(t, reshard.purpose):
            moved = self.ops.local_bytes(t, reshard.source, own) + self.ops.local_bytes(t, reshard.source, other)
            total += int(self.costs.compute_ns(0, moved, own))
        if reshard.purpose == ACCUMULATE:
            arriving = self.ops.local_bytes(t, reshard.layout, other if reshard.copy else own)
            total += int(self.costs.compute_ns(0, arriving + 2 * self.held_bytes(t, reshard.layout), own))
        return total

    def norm_nanoseconds(self, states: Mapping[int, Layout]) -> int:
        """Check the all-reduce of the gradient norm; its time."""
        clip, mesh = self.plan.clip, self.plan.mesh
        if not self.plan.options.clip or not states:
            if clip is not None:
                illegal("it reduces a gradient norm, but nothing is clipped")
            return 0
        needed = {mesh.names[a] for layout in states.values() for a, placement in enumerate(layout) if placement.is_shard}
        axes = () if clip is None else clip.axes
        if not needed <= set(axes):
            illegal(f"the gradient norm is summed over {', '.join(axes) or 'no axis'}, but states are cut by {', '.join(sorted(needed))}")
        if clip is None:
            return 0
        nanoseconds = self.costs.collective_ns("all_reduce", tuple(mesh.index(name) for name in axes), 4)
        if (clip.kind, clip.nbytes, clip.nanoseconds) != ("all_reduce", 4, nanoseconds):
            illegal(f"the gradient norm is an all_reduce of 4 bytes in {nanoseconds} ns, not {clip}")
        return nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Groups of readers and the ends of lives.

    Times are op positions; the update runs at T, the number of ops; the step ends at T + 1; all lives are half-open.

    - The readers of a tensor that share one reshard are those of one phase that read it in the same way. The reshard runs
      just before the first of them. An op that needs only the shape of an operand is none of its readers. A use by a view op lasts as
      long as the bytes that the view's result borrows.
    - A tensor that a forward op or nobody made, with forward readers and later ones (backward, or the step's output), is *held*:
      its own bytes end with its forward readers, what is kept of it stays until the last group of later readers has begun.
    - What is held of a view as its op produced it is the storage that it lies in. Held tensors of one storage have it together, from
      the end of its owner's own bytes (of the first member's, where the owner is not held) until none of them is needed.
    - An identity that alone reads what an op has made, the place of a pin or a relay, takes over: what it hands on owns the bytes from one
      past its time, as they are or copied, and the tensor before it ends there. Behind a view it is a view, and what is viewed lives on.
    - The bytes of any other tensor end when the last group of its readers has begun. Sources stay for the whole step.
    - If nothing but that last group (of a held tensor: the last of the forward and of the later ones) can have a use for them when it
      begins, it takes them as they are, or they end with its reshard, before its first reader runs. So it is where all other groups have
      ended, and a view's tensor has no other readers, nor is it held. What is held is kept all the same, from when the last forward reshard
      has run, and so is a storage that several tensors share, until the later reader of each has run.
    - What an expanded tensor repeats stays until the last of its readers is done, however they get it.
    - With several microbatches the times are those of any one of them. A gradient then has a group of its own, "accumulate", that ends
      with the addition, and the update's group starts from the accumulator, after the last microbatch.

    Attributes:
        end: of the step.
        readers: (op position, operand index) of every group; none for optimizer and output.
        first, stop: when the reshard of a group runs; one past the group's last use.
        views: ops whose results have no bytes of their own.
        places: identities that alone read what an op has made.
        base_start, base_stop: when a tensor's own bytes begin and end; of tensors that ops make, and of all.
        held_stop: when what is held of a tensor is no longer needed for any reshard; only of tensors that are held. Where the last group
            takes it, that is its first reader, but for what lies in a storage that is shared.
        taking: groups that take what is left of a tensor, or leave nothing of it.
        storages: by owner, the held tensors that may lie in what it is, with the groups that view ops read on the way; where there
            are several, or one that is a part, or the owner is a source.
    """

    end: int
    readers: Mapping[Key, tuple[tuple[int, int], ...]]
    first: Mapping[Key, int]
    stop: Mapping[Key, int]
    views: frozenset[int]
    places: frozenset[int]
    base_start: Mapping[int, int]
    base_stop: Mapping[int, int]
    held_stop: Mapping[int, int]
    taking: frozenset[Key]
    storages: Mapping[int, Mapping[int, tuple[Key, ...]]]

    def later(self, key: Key) -> bool:
        """Whether a group starts from what is held."""
        return key[0] in self.held_stop and key[1] in LATER


def find_lives(program: Program, rules: Sequence[Rule], *, accumulates: bool = False) -> Lifetimes:
    """The groups of readers of every tensor and when bytes end; ``rules`` has one rule per op."""
    found = _lifetimes(program, rules, accumulates, frozenset(), frozenset())
    shared = frozenset(t for members in found.storages.values() for t in members)
    return _lifetimes(program, rules, accumulates, _taking(program, found, shared), shared)


def _readers(program: Program, rules: Sequence[Rule]) -> dict[Key, tuple[tuple[int, int], ...]]:
    """Readers of one tensor, in one phase, that read it in the same way."""
    found: dict[Key, list[tuple[int, int]]] = {}
    for i, op in enumerate(program.ops):
        matmul = rules[i].matmul and op.name == "aten.einsum.default"
        for j, t in enumerate(op.operands):
            if not rules[i].needs(j):
                continue
            found.setdefault((t, op.phase.value, "matmul" if matmul else op.name), []).append((i, j))
    for t in program.gradients.values():
        found[t, "optimizer", "update"] = []
    for t in program.outputs:
        found[t, "output", "output"] = []
    return {key: tuple(uses) for key, uses in found.items()}


def _lifetimes(program: Program, rules: Sequence[Rule], accumulates: bool, taking: frozenset[Key], shared: frozenset[int]) -> Lifetimes:
    update = len(program.ops)
    end = update + 1
    readers = _readers(program, rules)
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    before = places(program)
    written = in_place(program)
    views = {i for i, rule in enumerate(rules) if rule.view or i in written}
    takers = {i for t, i in before.items() if made[t] not in views}
    views -= takers
    base_start = {t: i + (i in takers) for t, i in made.items()}
    leaving = "optimizer"
    if accumulates:  # what the producer has made is added up; only the sum goes to the update
        leaving = ACCUMULATE
        readers |= dict.fromkeys(((t, ACCUMULATE, ACCUMULATE) for t in program.gradients.values()), ())
    summed = [key for key in readers if accumulates and key[1] == "optimizer"]
    of_tensor: dict[int, list[Key]] = {}
    for key in readers:
        if key not in summed:
            of_tensor.setdefault(key[0], []).append(key)
    first = {key: min(i for i, _ in uses) if uses else made[key[0]] if key[1] == leaving else update for key, uses in readers.items()}
    stop: dict[Key, int] = dict.fromkeys(summed, end)
    base_stop: dict[int, int] = {}
    held_stop: dict[int, int] = {}
    for t in (*reversed(made), *program.sources()):  # what is viewed after its views
        keys = of_tensor.get(t, [])
        for key in keys:
            stops = [] if readers[key] else [first[key] + 1] if key[1] == ACCUMULATE else [end]
            for i, j in readers[key]:
                stops.append(i + 1)
                if i in views and (i not in written or j == 0):
                    stops += [base_stop[r] for r in program.ops[i].results]
            stop[key] = max(stops)
        later = [key for key in keys if key[1] in LATER]
        early = [key for key in keys if key[1] not in LATER]
        forward = t not in made or program.ops[made[t]].phase is Phase.FORWARD
        held = forward and later and any(key[1] == "forward" for key in early)
        begun = {key: stop[key] if readers[key] and _expanded(program, made, t) else first[key] + (key not in taking) for key in keys}
        if held:
            held_stop[t] = max(first[key] + 1 if t in shared and key in taking else begun[key] for key in later)
        if t not in made:
            base_stop[t] = end
        elif before.get(t) in views:
            base_stop[t] = base_stop[program.ops[before[t]].results[0]]
        elif held:
            base_stop[t] = max(first[key] if key in taking else stop[key] for key in early)
        else:
            base_stop[t] = max(begun.values(), default=base_start[t] + 1)
    together: dict[int, dict[int, tuple[Key, ...]]] = {}
    for t in held_stop:
        owner, way = _viewed(program, views, written, made, readers, of_tensor, t)
        if owner != t or t in made:
            together.setdefault(owner, {})[t] = way
    storages = {
        owner: members
        for owner, members in together.items()
        if owner not in made or len(members) > 1 or any(program.tensors[t].numel != program.tensors[owner].numel for t in members)
    }
    return Lifetimes(
        end=end,
        readers=readers,
        first=first,
        stop=stop,
        views=frozenset(views),
        places=frozenset(before.values()),
        base_start=base_start,
        base_stop=base_stop,
        held_stop=held_stop,
        taking=taking,
        storages=storages,
    )


def _taking(program: Program, lives: Lifetimes, shared: frozenset[int]) -> frozenset[Key]:
    """The groups that nothing else outlives, by lives that have none yet."""
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    keys: dict[int, list[Key]] = {}
    for key in lives.readers:
        if key[1] != "optimizer" or (key[0], ACCUMULATE, ACCUMULATE) not in lives.readers:  # whose group starts from the accumulator
            keys.setdefault(key[0], []).append(key)

    def unused(t: int, time: int) -> bool:
        """Whether nothing reads at a time or later what a view is of, but for the view."""
        if t not in made or made[t] not in lives.views:
            return t in made
        (x, *others), mine = program.ops[made[t]].operands, ((made[t], 0),)
        alike = program.tensors[x].numel == program.tensors[t].numel
        over = all(lives.readers[key] == mine or lives.stop[key] <= time for key in keys[x])
        return not others and alike and x not in lives.held_stop and over and unused(x, time)

    def owned(t: int, time: int) -> bool:
        """Whether the group that reads what is viewed has the bytes, not what is viewed itself."""
        x, mine = program.ops[made[t]].operands[0], ((made[t], 0),)
        if program.ops[made[t]].name == IDENTITY and x in made and made[x] in lives.views:
            return owned(x, time)  # a place behind a view hands it on
        return lives.base_stop[x] < time or any(key in found and lives.readers[key] == mine for key in keys[x])

    found: set[Key] = set()
    for t in made:
        if _expanded(program, made, t):
            continue
        held = t in lives.held_stop
        for later in (False, True):
            groups = [key for key in keys.get(t, ()) if lives.later(key) == later]
            if not groups or (t in shared and not later):
                continue
            last = max(groups, key=lambda key: lives.first[key])
            time, before_view = lives.first[last], any(i in lives.views and i in lives.places for i, _ in lives.readers[last])
            # what is held may lie in what an update reads
            over = all(lives.stop[key] <= time for key in (keys[t] if later else groups) if key != last)
            if not lives.readers[last] or not over or before_view:
                continue
            if (t in shared and lives.stop[last] > time + 1) or (held and not later and lives.stop[last] >= lives.held_stop[t]):
                continue
            if later or made[t] not in lives.views or (owned(t, time) and unused(t, time)):
                found.add(last)
    return frozenset(found)


def _viewed(
    program: Program,
    views: Collection[int],
    written: Collection[int],
    made: Mapping[int, int],
    readers: Mapping[Key, tuple[tuple[int, int], ...]],
    of_tensor: Mapping[int, Sequence[Key]],
    t: int,
) -> tuple[int, tuple[Key, ...]]:
    """The tensor in whose storage a view lies, and the groups through which views read it, back from the view."""
    way: list[Key] = []
    while t in made and made[t] in views and (len(program.ops[made[t]].operands) == 1 or made[t] in written):
        x = program.ops[made[t]].operands[0]
        grows = program.tensors[t].numel > program.tensors[x].numel
        merged = _expanded(program, made, x) and program.ops[made[t]].name != IDENTITY  # an expanded tensor that is merged is written out
        if merged or (grows and not _expanded(program, made, t)):
            break
        way.append(next(key for key in of_tensor[x] if (made[t], 0) in readers[key]))
        t = x
    return t, tuple(way)


def _expanded(program: Program, made: Mapping[int, int], t: int) -> bool:
    """Whether dims of a tensor are repeated without being written out."""
    return distinct_shape(program, made, t) != program.tensors[t].shape


def distinct_shape(program: Program, made: Mapping[int, int], t: int) -> tuple[int, ...]:
    """A tensor's shape, with 1 for dims that are repeated without being written out."""
    whole = program.tensors[t].shape
    while t in made and program.ops[made[t]].name == IDENTITY:
        (t,) = program.ops[made[t]].operands
    if t not in made or program.ops[made[t]].name != "aten.expand.default":
        return whole
    before = program.tensors[program.ops[made[t]].operands[0]].shape
    return (1,) * (len(whole) - len(before)) + before


class MemoryProfile:
    """Bytes per device over time, by category, filled life after life."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.change = {category: np.zeros(end + 1, dtype=np.int64) for category in CATEGORIES}
        self.lives: list[tuple[int, str, int, int, int]] = []

    def add(self, t: int, category: str, start: int, stop: int, nbytes: int) -> Life:
        """Own bytes of a tensor from start to stop; nothing if that is not later. The life as plans state it."""
        if start >= stop:
            return stop, stop, 0
        self.change[category][start] += nbytes
        self.change[category][stop] -= nbytes
        self.lives.append((t, category, start, stop, nbytes))
        return start, stop, nbytes

    def series(self) -> dict[str, tuple[int, ...]]:
        """Bytes at each time from 0 to the end."""
        return {category: tuple(np.cumsum(change)[: self.end].tolist()) for category, change in self.change.items()}
