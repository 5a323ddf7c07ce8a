"""The answer: every tensor's layout, every op's strategy, every collective, the memory over time, and the proof.

A plan is plain data, complete in itself: it names the mesh, the cluster and the options it was made for, so it can be
read, shown and executed without the model. ``str(plan)`` is a report; :mod:`solver_shard.plan.io` reads and writes it.

>>> plan = solver_shard.load_plan("plan.json")
>>> plan.layouts["model.layers.0.self_attn.q_proj.weight"], plan.memory.peak, plan.certificate.gap
(S(0)S(1), 71267516416, 0.0)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from solver_shard.codec import MAY_LACK
from solver_shard.costs.cluster import Cluster
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.program import Relays

SCHEMA_VERSION = 1

CATEGORIES = ("parameters", "optimizer", "gradients", "inputs", "activations", "copies", "intermediates")
"""What fills the memory: parameters (and buffers); optimizer states and master weights; gradients; the step's inputs;
results of ops; copies of tensors in another layout; and what transitions hold in between, buffers of their collectives included: at each
time of the one that holds most, because those that run before one op run one after the other, and only what is beyond the copies and
results that come after it and are counted at that time."""

LOCAL = ("slice", "local")
"""Kinds of steps in which no device needs another's part: they take no time and are no collectives."""

MOST_HOLDERS = 4096
"""Of what fills the memory at the peak, how many tensors a plan lists: the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor and its layout.

    Attributes:
        layout: in which it is stored or its producer leaves it; for outputs and gradients of trained parameters, in which
            the step hands them over (what the producer leaves is then the source of that reshard).
        name, shape, dtype, trainable: as in the program; shape is global.
        role: parameter, buffer, input, activation, gradient or output.
        state: layout of the optimizer's state, for a trained parameter that has an optimizer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Literal["parameter", "buffer", "input", "activation", "gradient", "output"]
    layout: Layout
    trainable: bool = False
    state: Layout | None = None

    def __str__(self) -> str:
        return f"{self.name}  {self.layout.format(self.shape, self.dtype)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCollective:
    """One collective inside an op's implementation, or of gradient clipping.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all.
        axes: names of the mesh axes that take part, as one group.
        nbytes: bytes per device, as in ``Step``.
        nanoseconds: its time; it is never overlapped.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    nanoseconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """An op and how it runs.

    Attributes:
        operands, results: positions in ``Plan.tensors``.
        strategy: per mesh axis, the name of the single-axis strategy (a factor, a partial set, an implementation, or R).
        operand_layouts: the layouts that the op reads, after resharding.
        result_layouts: the layouts that it produces.
        nanoseconds: time on the slowest device, without collectives; of one microbatch, as the collectives' is.
        source: where its rule comes from: table, user (a row of a rules file of the user's), family (an op that follows another op's
            row), dtensor (strategies registered with DTensor and proven), unproven (such strategies on the word of whoever registered
            them), or fallback (no rule: everything replicated).
        implementation: name of the implementation that it runs on the axes with that strategy; empty for none.
        collectives: those inside the implementation, in order.
        recompute: it executes a forward op again, for the backward pass (activation checkpointing).
    """

    name: str
    module: str
    phase: Literal["forward", "backward"]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    strategy: tuple[str, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    nanoseconds: int
    source: Literal["table", "user", "family", "dtensor", "unproven", "fallback"] = "table"
    implementation: str = ""
    collectives: tuple[OpCollective, ...] = ()
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStep:
    """One collective of a transition.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all; slice moves nothing between devices.
        axes: names of the mesh axes that take part.
        nbytes: bytes per device: gathered output, input before a scatter, or the buffer.
        nanoseconds: time of this step, its part of the launch and latency where it shares them, before any overlap.
        before, after: the tensor's layout around this step.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    nanoseconds: int
    before: Layout
    after: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """How one group of a tensor's readers gets it.

    Attributes:
        tensor: position in ``Plan.tensors``.
        purpose: the readers' phase; accumulate (a gradient's way into its accumulator, where a step has several microbatches);
            optimizer (a gradient's way to the update), update (the new values' way from the state's layout to the parameter's) or
            output (what the step returns). Those for optimizer and update run once in a step, the others in every microbatch.
        family: how the readers read it; part of what makes them one group.
        readers: (op position, operand index) pairs; empty for optimizer and output.
        source: the producer's layout; for later readers of a tensor that is held, the held one; for update, the state's; for
            optimizer, the accumulator's where there is one.
        layout: the layout that the readers get; equal to ``source`` where nothing is copied or converted. An accumulator's.
        copy: whether the group holds a copy of its own (False: it reads the producer's bytes). Where it has no bytes it lies where the
            old values or the accumulator's lay.
        steps: the collectives, in order; empty for an alias and for moves that need no communication.
        bucket: how many tensors of its block share one launch, and so its latency: parameters gathered for the same purpose, or
            gradients that are reduced.
        nanoseconds: what the objective pays each time for its collectives: the sum over ``steps`` after the overlap discount.
        traffic_ns: what it pays each time besides, to read and write device memory: where pointwise chains are priced as fused and
            the copy breaks one, for the tensor; of gradients, for a conversion to the reduce dtype and for the addition.
        start, stop: op positions between which the group's bytes live, half-open.
        nbytes: bytes per device that it adds to memory during that time.
    """

    tensor: int
    purpose: Literal["forward", "backward", "accumulate", "optimizer", "update", "output"]
    family: str
    readers: tuple[tuple[int, int], ...]
    source: Layout
    layout: Layout
    copy: bool
    steps: tuple[ReshardStep, ...] = ()
    bucket: int = 1
    traffic_ns: int = 0
    nanoseconds: int = 0
    start: int = 0
    stop: int = 0
    nbytes: int = 0


def runs_of(purpose: str, microbatches: int) -> int:
    """How many times a step runs what has this purpose: gradients go to the update, and new values home, once."""
    return 1 if purpose in ("optimizer", "update") else microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step, wherever the plan says it.

    Attributes:
        kind, axes, nbytes, nanoseconds: of one run; time before any overlap.
        runs: how many times a step runs it.
        reshard, op: position of the reshard that it is a step of, or of the op that it is inside; None both for gradient clipping.
        index: its position among the steps of that reshard, or the collectives of that op.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    nanoseconds: int
    runs: int
    reshard: int | None = None
    op: int | None = None
    index: int = 0


def collectives_of(
    ops: Iterable[PlannedOp], reshards: Iterable[Reshard], clip: OpCollective | None, microbatches: int
) -> Iterator[Collective]:
    """All that a step runs: those of reshards, inside ops, and of gradient clipping."""

    def made(found: ReshardStep | OpCollective, runs: int, **where: int) -> Collective:
        return Collective(kind=found.kind, axes=found.axes, nbytes=found.nbytes, nanoseconds=found.nanoseconds, runs=runs, **where)

    for r, reshard in enumerate(reshards):
        for k, step in enumerate(reshard.steps):
            if step.kind not in LOCAL:
                yield made(step, runs_of(reshard.purpose, microbatches), reshard=r, index=k)
    for i, op in enumerate(ops):
        for k, inside in enumerate(op.collectives):
            yield made(inside, microbatches, op=i, index=k)
    if clip is not None:
        yield made(clip, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """What is kept of a tensor between its forward readers and later ones.

    Attributes:
        tensor: position in ``Plan.tensors``.
        reshard: position in ``Plan.reshards`` of the forward copy that is kept; None where the producer's bytes are.
        layout: of what is kept.
        start, stop: op positions between which it owns bytes, half-open; empty for stored tensors that are kept as they are, and for
            what lies in a storage (a tensor and its views) that another hold needs longer: that one owns the whole storage.
        nbytes: bytes per device during that time.
    """

    tensor: int
    reshard: int | None
    layout: Layout
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """One entry of what fills the memory at the peak."""

    name: str
    category: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes per device over one step, by category; time is the position of the running op.

    Attributes:
        limit: bytes that tensors may have: what the options leave after the reserve.
        peak: largest total, at ``peak_time``, while ``peak_op`` runs (``optimizer`` after the last op).
        at_peak: bytes by category there.
        holders: the largest tensors and copies there, largest first.
        times: positions at which some category changes.
        series: category to bytes, from each of ``times`` until the next.
    """

    limit: int
    peak: int
    peak_time: int
    peak_op: str
    at_peak: Mapping[str, int]
    holders: tuple[MemoryEntry, ...] = ()
    times: tuple[int, ...] = ()
    series: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        series: Mapping[str, Sequence[int]],
        *,
        limit: int,
        ops: Sequence[PlannedOp],
        holders: Sequence[MemoryEntry] = (),
    ) -> MemoryTimeline:
        """From one total per category and time: finds the peak and keeps only the times at which something changes.

        Args:
            series: category to bytes at every time from 0; all of one length, at least 1. An unknown name is kept too.
            limit: bytes.
            ops: the plan's ops, to name the one that runs at the peak.
            holders: what fills the memory at the first peak, in any order.
        """
        names = tuple(name for name in (*CATEGORIES, *series) if name in series)
        names = tuple(dict.fromkeys(names))
        rows = list(zip(*([int(value) for value in series[name]] for name in names), strict=True))
        totals = [sum(row) for row in rows]
        peak = max(totals)
        time = totals.index(peak)
        times = tuple(t for t in range(len(rows)) if t == 0 or rows[t] != rows[t - 1])
        op = ops[time] if time < len(ops) else None
        return cls(
            limit=limit,
            peak=peak,
            peak_time=time,
            peak_op=f"{op.module or 'model'}: {op.name} ({op.phase})" if op else "optimizer",
            at_peak=dict(zip(names, rows[time], strict=True)),
            holders=tuple(sorted(holders, key=lambda h: (-h.nbytes, h.name))),
            times=times,
            series={name: tuple(rows[t][i] for t in times) for i, name in enumerate(names)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The parts of the objective, in integer nanoseconds per step, all its microbatches together.

    Attributes:
        compute_ns: all ops, without the collectives inside them, and the memory traffic of reshards.
        update_ns: the optimizer, with the passes over gradients that clipping takes.
        communication_ns: all reshards, after the overlap discount, the collectives inside ops and that of clipping.
        hidden_ns: what the overlap discount took off.
        total_ns: compute + update + communication: the step time.
        unshared_ns: what launches take beyond that (after the overlap discount), where tensors of one block move by different collectives.
        objective: what the solver minimised: nanoseconds plus weight times peak, or bytes.
        by_kind_ns: collective kind to its time before the overlap discount.
    """

    compute_ns: int
    update_ns: int
    communication_ns: int
    hidden_ns: int
    total_ns: int
    unshared_ns: int = 0
    objective: int
    by_kind_ns: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEvent:
    """A moment of the solve at which the best plan or the bound became better.

    Attributes:
        seconds: wall time since the solver started.
        objective: of the best plan so far, or None. By the memory that the search counted then; it may have found more to count later.
        bound: what was proven so far, or None.
        source: what found it: a stage of the solver, a warm start or a baseline.
    """

    seconds: float
    objective: int | None
    bound: int | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proven about the plan, and how it was found.

    Attributes:
        objective: of this plan, in the unit of the objective asked for.
        bound: no plan of ``problem`` has a lower objective.
        gap: (objective - bound) / objective.
        status: optimal, gap (feasible and proven within the gap asked for), feasible, or interrupted (feasible, and the user ended
            the search).
        problem: tied (copies of a repeated layer decide alike) or free; the bound is for this problem.
        baseline: the baseline whose plan this is (a template, or a greedy one by name), where the solver stopped before it found a
            better one or proved that there is none; else None.
        ended: of a plan that is feasible and no more, what ended the search: a limit on time or work, or the search itself, which had
            nothing left to try. Files of earlier releases have none.
        seed, work: with the same work limit they reproduce the plan.
        stages: stage to wall seconds.
        versions: package to version.
        history: how objective and bound came nearer, oldest first, thinned to at most 200 moments; the last one has the two of this
            certificate. Its seconds differ from run to run, as those of ``stages`` do. Files of earlier releases have none.
    """

    objective: int
    bound: int
    gap: float
    status: Literal["optimal", "gap", "feasible", "interrupted"]
    problem: Literal["tied", "free"]
    baseline: str | None = None
    seed: int
    work: float
    stages: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    history: tuple[SearchEvent, ...] = field(default=(), metadata=MAY_LACK)
    ended: Literal["limit", "search"] | None = field(default=None, metadata=MAY_LACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the plan comes from: tool and package versions, the command or call, UTC date, and the model's source."""

    tool: str
    versions: Mapping[str, str]
    command: str
    date: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sharding of one step of one model, with its price and its proof.

    Attributes:
        name: what the user calls the model.
        mesh, cluster, options: what the plan is for; the mesh as layouts speak of it (``mesh.whole`` has no axis split).
        tensors: all values, in the program's order; ``ops`` and ``reshards`` refer to them by position.
        ops: in executable order.
        outputs: positions of the tensors that the step returns.
        gradients: name of a trained parameter to the position of its gradient.
        clip: the all-reduce of the gradient norm; None where nothing is clipped, or no device needs another's part.
        relayed: behind which tensors the choice graph that was solved had relays, see ``constraints``.
        relays: tensors, as their ops make them, that an identity of the plan's own brings to another layout for all of their readers
            (:mod:`solver_shard.program`); positions are those in the program as it was traced, too.
        ties: other names of tied parameters and buffers, to the name of the tensor that they are. Files of earlier releases have none.
    """

    schema_version: Literal[1] = 1
    name: str
    mesh: Mesh
    cluster: Cluster
    options: Options
    tensors: tuple[PlannedTensor, ...]
    ops: tuple[PlannedOp, ...]
    outputs: tuple[int, ...]
    gradients: Mapping[str, int]
    reshards: tuple[Reshard, ...]
    holds: tuple[SavedTensor, ...]
    clip: OpCollective | None = None
    memory: MemoryTimeline
    costs: Costs
    certificate: Certificate
    provenance: Provenance
    relays: tuple[int, ...] = field(default=(), metadata=MAY_LACK)
    relayed: Relays = field(default="shared", metadata=MAY_LACK)
    ties: Mapping[str, str] = field(default_factory=dict, metadata=MAY_LACK)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layout by tensor name."""
        return {tensor.name: tensor.layout for tensor in self.tensors}

    def runs(self, reshard: Reshard) -> int:
        """How many times a step runs a reshard."""
        return runs_of(reshard.purpose, self.options.microbatches)

    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step: what reports, comparisons and traces count, so that none leaves one out."""
        return tuple(collectives_of(self.ops, self.reshards, self.clip, self.options.microbatches))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file is complete or absent."""
        from solver_shard.plan.io import save_plan

        save_plan(self, path)

    def __str__(self) -> str:
        from solver_shard.plan.summary import report

        return report(self)
