"""What a plan costs and needs, worked out anew from the program: the check on everything that lowering and solving did.

The evaluator shares the rules and the cost model with the solver, and nothing else: it sees no choice graph. Of the plan
it believes only decisions: the strategy of every op, the layouts of sources and of optimizer states, the reshard of every
group of readers, and what is kept of a tensor between forward and backward readers. Prices, times, lives and bytes are
computed again (:mod:`solver_shard.plan.lives`), and every decision is checked to be legal:

>>> evaluation = evaluate(plan, program, rulebook, costs)
>>> evaluation.objective == plan.certificate.objective, evaluation.peak == plan.memory.peak
(True, True)

The optimizer's update works where its state is: it reads its slice of the reduced gradient, and the new values then go from
the state's layout to the parameter's, by a reshard of their own with purpose "update". What its step makes is there while it runs (see
:mod:`solver_shard.costs.memory`), and gone when the new values are brought.

A step of several microbatches pays for each of them, and for what its update does once (:mod:`solver_shard.plan.evaluate_gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from solver_shard.constraints import IDENTITY
from solver_shard.costs.buckets import Paid, bucket_sizes, launch_of, unshared_ns
from solver_shard.costs.layouts import free_move
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel
from solver_shard.costs.overlap import exposed
from solver_shard.costs.staging import beyond, intermediates, update_held
from solver_shard.layout import Layout
from solver_shard.plan.evaluate_gradients import GradientCheck
from solver_shard.plan.evaluate_ops import OpCheck, check_question, check_rules, illegal
from solver_shard.plan.lives import ACCUMULATE, Key, Life, Profile, distinct_shape, find_lives
from solver_shard.plan.plan import Plan, Reshard, runs_of
from solver_shard.program import DTYPE_BYTES, Program, Role
from solver_shard.rulebook.build import Rulebook

_MIB = 2**20
_STORED = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.INPUT: "inputs"}
_UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The price and the memory of a plan, recomputed.

    Attributes:
        compute_ns, update_ns, communication_ns: nanoseconds of ops (and of the traffic of reshards), optimizer and all collectives
            (those of reshards after the overlap discount), of all microbatches.
        total_ns: their sum, the time of a step.
        unshared_ns: what launches take beyond that, see :mod:`solver_shard.costs.buckets`.
        objective: what the plan's options minimise: nanoseconds plus weight times peak, or bytes.
        peak: bytes per device at the fullest time, the intermediates of transitions included.
        profile: by category, the bytes per device at each time from 0 to T.
        op_ns: nanoseconds of each op, in program order, without the collectives inside it; of one microbatch.
        inside_ns: nanoseconds of the collectives inside each op; of one microbatch.
        reshard_ns: nanoseconds of each run of each reshard, in the plan's order.
        traffic_ns: nanoseconds of each run of each reshard for device memory: breaking a fused chain, converting, adding up.
        clip_ns: nanoseconds of the collective of the gradient norm.
        reshard_lives: start, stop and bytes of each reshard, in the plan's order.
        hold_lives: the same of each hold.
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
    inside_ns: tuple[int, ...]
    reshard_ns: tuple[int, ...]
    traffic_ns: tuple[int, ...]
    clip_ns: int
    reshard_lives: tuple[Life, ...]
    hold_lives: tuple[Life, ...]

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
    return _Walk(plan, program, rulebook, costs, plan.options.optimizer_state()).run()


class _Walk:
    def __init__(self, plan: Plan, program: Program, rulebook: Rulebook, costs: CostModel, state: OptimizerState) -> None:
        self.plan, self.program, self.costs, self.state = plan, program, costs, state
        self.mesh_shape = costs.mesh.shape
        self.rules = [rulebook.rule(program, i) for i in range(len(program.ops))]
        check_rules(plan, self.rules)
        self.ops = OpCheck(plan, program, self.rules, costs)
        self.made = {t: i for i, op in enumerate(program.ops) for t in op.results}
        self.parameter_of: dict[int, list[int]] = {}
        for parameter, gradient in program.gradients.items():
            self.parameter_of.setdefault(gradient, []).append(parameter)
        self.gradients = GradientCheck(plan, program, costs, state, self.ops)
        self.lives = find_lives(program, self.rules, accumulates=self.gradients.accumulates)
        self.profile = Profile(self.lives.end)
        self.before: dict[int, list[tuple[int, int, int, int]]] = {}
        self.after: dict[int, int] = {}
        self.results: dict[int, int] = {}
        self.shared: list[Paid] = []

    def run(self) -> Evaluation:
        self.produced = {t: self._stored(t) for t in self.program.sources()}
        op_ns = [self.ops.nanoseconds(i) for i in range(len(self.program.ops))]
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
                life = self.profile.add(self._category(t), start, stop, self.ops.local_bytes(t, self.produced[t]))
                if start == i:  # what takes over is there before the next op's transitions
                    self._made_at(life)
        self.lent = self._lent(reshards)
        for t, layout in self.accumulators.items():
            self.profile.add("gradients", 0, self.lives.end, self.gradients.held_bytes(t, layout))
        hold_lives = [self._hold(k) for k in range(len(self.plan.holds))]
        keys = {position: key for key, position in reshards.items()}
        reshard_ns = [self._reshard(position, keys[position]) for position in sorted(keys)]
        reshard_lives = [self._owned(position, keys[position]) for position in sorted(keys)]
        for start in sorted({*self.before, *self.after}):
            ahead = beyond(self.before.get(start, []), self.results.get(start, 0))
            self.profile.add("intermediates", start, start + 1, max([self.after.get(start, 0), *ahead]))
        profile = self.profile.series()
        peak = max(map(sum, zip(*profile.values(), strict=True)))
        inside_ns = [self.ops.inside_nanoseconds(i) for i in range(len(self.program.ops))]
        traffic_ns = [self._traffic(position, keys[position]) for position in sorted(keys)]
        clip_ns = self.gradients.norm_nanoseconds(self.states)
        options = self.plan.options
        count = options.microbatches
        runs = [runs_of(keys[position][1], count) for position in sorted(keys)]
        compute_ns = count * sum(op_ns) + sum(n * ns for n, ns in zip(runs, traffic_ns, strict=True))
        communication_ns = sum(n * ns for n, ns in zip(runs, reshard_ns, strict=True)) + count * sum(inside_ns) + clip_ns
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
            op_ns=tuple(op_ns),
            inside_ns=tuple(inside_ns),
            reshard_ns=tuple(reshard_ns),
            traffic_ns=tuple(traffic_ns),
            clip_ns=clip_ns,
            reshard_lives=tuple(reshard_lives),
            hold_lives=tuple(hold_lives),
        )

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

    def _reshard(self, position: int, key: Key) -> int:
        """Check one reshard; its nanoseconds."""
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
            return 0
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
            self.after[time] = max(self.after.get(time, 0), held)
        else:
            turn = min((j for i, j in self.lives.readers.get(key, ()) if i == time), default=0)
            goes = self._goes(key, source) if key in self.lives.taking and not self._stays(key) else 0
            self.before.setdefault(time, []).append((turn, held, self.ops.local_bytes(t, reshard.layout, dtype), goes))
        parameter = self.program.tensors[self.parameter_of[t][-1]] if purpose in (ACCUMULATE, "optimizer") else tensor
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
        nanoseconds = sum(step.nanoseconds for step in path)
        hidden = tensor.role is Role.PARAMETER or purpose in (ACCUMULATE, "optimizer")
        return exposed(nanoseconds, self.costs.overlap) if hidden else nanoseconds

    def _goes(self, key: Key, source: Layout) -> int:
        """Bytes of what a group starts from that nothing else needs: a view's are those of what it was read from."""
        t = key[0]
        if self.made[t] not in self.lives.views or self.lives.later(key):
            return self.ops.local_bytes(t, source)
        i, x = self.made[t], self.program.ops[self.made[t]].operands[0]
        while self.program.ops[i].name == IDENTITY and x in self.made and self.made[x] in self.lives.views:
            i, x = self.made[x], self.program.ops[self.made[x]].operands[0]  # a place behind a view hands it on
        read = next(other for other, uses in self.lives.readers.items() if other[0] == x and (i, 0) in uses)
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
        if key[0] in self.parameter_of and key[1] in (ACCUMULATE, "optimizer"):
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
        self.profile.add(self._category(t), 0, self.lives.end, self.ops.local_bytes(t, self.produced[t]))
        if t not in self.states:
            return 0
        elements = math.prod(self.states[t].local_shape(tensor.shape, self.mesh_shape))
        self.profile.add("optimizer", 0, self.lives.end, elements * self.state.resident_bytes(tensor.dtype))
        step = elements * self.state.step_bytes(tensor.dtype)
        self._made_at(self.profile.add("optimizer", self.lives.end - 1, self.lives.end, step))
        norm = self.costs.compute_ns(0, elements * self.state.norm_bytes(tensor.dtype), tensor.dtype, "reduction")
        return int(norm) + int(self.costs.compute_ns(0, elements * self.state.update_bytes(tensor.dtype), tensor.dtype))

    def _hold(self, position: int) -> Life:
        """Own what is kept, from where its forward life ends; a source stays anyway."""
        hold = self.plan.holds[position]
        t, stop = hold.tensor, self.lives.held_stop[hold.tensor]
        if t in self.lent:
            owner, start, nbytes = self.lent[t]
            return self.profile.add(self._category(owner), start if nbytes else stop, stop, nbytes)
        stop = self._kept_until(t)
        if hold.reshard is None:
            elements = math.prod(hold.layout.local_shape(distinct_shape(self.program, self.made, t), self.mesh_shape))
            nbytes = elements * DTYPE_BYTES[self.program.tensors[t].dtype]
            return self.profile.add(self._category(t), self.lives.base_stop[t], stop, nbytes)
        kept = self.plan.reshards[hold.reshard]
        return self.profile.add("copies", self.lives.stop[t, kept.purpose, kept.family], stop, self.ops.local_bytes(t, hold.layout))

    def _kept_until(self, t: int) -> int:
        """When what is held alone is no longer needed for any reshard."""
        taken = [self.lives.first[key] for key in self.lives.taking if key[0] == t and self.lives.later(key)]
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
            return self.profile.add("gradients", start, lives.end, nbytes)
        if purpose == _UPDATE:  # the new values are written where the old ones are
            return lives.end - 1, lives.end - 1, 0
        if reshard.copy:
            gradient = purpose in (ACCUMULATE, "optimizer")
            life = self.profile.add("gradients" if gradient else "copies", lives.first[key], lives.stop[key], nbytes)
            return self._made_at(life) if self._leaves(key) else life
        category, start = self._category(t), lives.base_stop[t]
        if lives.later(key):
            copied = self.plan.holds[self.kept[t]].reshard is not None
            category = "copies" if copied else category
            start = lives.held_stop[t] if copied or t in self.made else lives.end
        if key in lives.taking:
            start = lives.end if self._stays(key) else lives.first[key]
        return self.profile.add(category, max([start, *self._read_before(key)]), lives.stop[key], nbytes)

    def _read_before(self, key: Key) -> list[int]:
        """When other groups are done that read the same bytes as they are, and are done before."""
        lives = self.lives

        def order(key: Key) -> tuple[int, int, str, str]:
            return -lives.stop[key], lives.first[key], key[1], key[2]

        return [
            lives.stop[other]
            for other, position in self.reshards.items()
            if other[0] == key[0]
            and lives.later(other) == lives.later(key)
            and not self.plan.reshards[position].copy
            and other[1] not in (_UPDATE, ACCUMULATE)
            and not (other[1] == "optimizer" and other[0] in self.accumulators)
            and order(other) > order(key)
        ]

    def _category(self, t: int) -> str:
        role = self.program.tensors[t].role
        return _STORED.get(role, "gradients" if role is Role.GRADIENT else "activations")
