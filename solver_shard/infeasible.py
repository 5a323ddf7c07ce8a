"""What to tell where there is no plan: how small the peak can get, which pins and memory times conflict, and what dropping a pin gives.

The graph is lowered once more without pins; each pin is then a constraint of its own (``graph/pins.py``), and ``solve.conflict`` finds
a minimal set of pins and memory times that conflict. Where memory has no part in it, the ops at which the pins meet are found in the
same way, or those through which a template does not carry. Dropping a pin is priced by solving without it, in rounds, with
the intermediates of transitions counted.

All of it is of the problem that was solved: of plans whose repeated layers share their decisions, unless the search was free (layers
with different pins are apart). That a set is minimal is meant of its graph, with the intermediates that solving has counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.clock import StageClock
from solver_shard.errors import Conflict, DroppedPin, InfeasibleError, SolverShardError
from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import ChoiceGraph, Constraint, Ints
from solver_shard.graph.lowering import lower
from solver_shard.graph.nodes import Lowering
from solver_shard.graph.pins import op_constraints, pin_constraints, pinned_classes
from solver_shard.graph.symmetry import folded_masks
from solver_shard.graph.transient_memory import Transients
from solver_shard.plan.plan import MemoryTimeline
from solver_shard.plan.summary import largest_holders
from solver_shard.program import Program
from solver_shard.solve.engine import solve_in_rounds
from solver_shard.solve.iis import InfeasibleSubsystem, compute_infeasible_subsystem, least_bytes, masks
from solver_shard.solve.limits import Clock
from solver_shard.solve.solution import Solution, Status
from solver_shard.text import fold_names, format_bytes, format_ns

SHARE = 0.5
"""Of the limits on time and work: the most that looking for a conflict takes, where solving has left so much."""

LEAST_SHARE = 0.2
"""What it may take where solving has left nothing."""

SEARCH_SHARE, TIME_SHARE, OPS_SHARE = 0.5, 0.3, 0.5
"""Of what is left of that: for the conflict, for the bytes of each of its times, and for the ops at which pins meet."""

PRICE_GAP = 0.01
"""Relative gap of the prices of dropping pins; what is said is what is proven."""

MOST_OPS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unsolved:
    """A problem that has no plan.

    Attributes:
        lowered: what was solved; ``problem`` and ``solution`` are of it.
        memory: of the plan of smallest peak that was found, or None.
        clock: of the stages so far, the solving among them.
        stop: asked again and again; True ends the search for what conflicts, too.
    """

    lowered: Lowered
    problem: Transients
    solution: Solution
    memory: MemoryTimeline | None
    clock: StageClock
    stop: Callable[[], bool] | None = None


def infeasible(unsolved: Unsolved) -> SolverShardError:
    """The error for what cannot be kept, or was not within the time given; or for a time too short to find anything."""
    options, solution, name = unsolved.lowered.options, unsolved.solution, unsolved.lowered.program.name
    given, longer = _limits(unsolved)
    if solution.assignment is None and solution.status is Status.UNKNOWN:
        return SolverShardError(f"no plan of {name} was found within {given}, which does not prove that there is none; give {longer}")
    conflict = None
    wanted = solution.status is Status.INFEASIBLE and options.propagation is None and not solution.interrupted
    if wanted:
        unsolved.clock.say("looking for what conflicts")
        conflict = find(unsolved)
    lines: tuple[str, ...] = ()
    if conflict is not None:
        lines = tuple(conflict_lines(conflict, unsolved))
    elif wanted:
        lines = (f"which times{' and pins' if options.pins else ''} conflict was not found in the time for it; give {longer}",)
    limit = f"{format_bytes(options.usable_memory)} per device"
    if options.reserve:
        limit += f" ({format_bytes(options.memory_limit)} less the reserve of {format_bytes(options.reserve)})"
    blamed = options.pins if conflict is None else conflict.pins
    pins = ", ".join(map(repr, blamed))
    asks = solution.status is Status.INFEASIBLE and (options.pins or options.template) and solution.peak_bound <= options.usable_memory
    if solution.assignment is None and (asks or (conflict is not None and not conflict.times)):
        asked, ways = [f"keeps the pins {pins}"] if blamed else [], ["drop or loosen a pin"] if blamed else []
        if options.template:
            carry = "do not carry" if conflict is not None and not conflict.times else "may not carry"
            asked.append(f"is of the template {options.template!r}, whose layouts and transitions {carry} through all ops of this model")
            ways.append("use another template or none")
        within = conflict is None or conflict.times
        return InfeasibleError(
            f"no plan of {name} {', and '.join(asked) or 'exists'}{f', within {limit}' if within else ''}; "
            + ", ".join([*ways, *(["or give more --memory"] if within else [])]),
            peak_bound=solution.peak_bound or None,
            details=lines,
            conflict=conflict,
        )
    return _too_large(unsolved, limit, longer, pins, lines, conflict)


def _limits(unsolved: Unsolved) -> tuple[str, str]:
    """What the search was given, and what to give it."""
    options, clock = unsolved.lowered.options, unsolved.clock
    if unsolved.solution.interrupted:
        return f"the {clock.seconds['solve']:.1f} s until it was interrupted", "more time"
    if unsolved.solution.ended == "search":
        return "all that the solver would try", "another --seed"
    given, longer = f"{options.time_limit:g} s", "more --time-limit"
    if options.total_time_limit is not None and clock.solver_seconds < options.time_limit:
        given = f"the {clock.solver_seconds:.1f} s that tracing and pricing left of {options.total_time_limit:g} s"
        longer = "more --total-time-limit"
    if options.work_limit is not None:
        given, longer = f"{given} and {options.work_limit:g} work units", f"more --work-limit and {longer.removeprefix('more ')}"
    return given, longer


def _too_large(
    unsolved: Unsolved, limit: str, longer: str, pins: str, lines: tuple[str, ...], conflict: Conflict | None
) -> InfeasibleError:
    """The error for a memory limit that no plan keeps."""
    options, solution, memory = unsolved.lowered.options, unsolved.solution, unsolved.memory
    proven, tied = solution.status is Status.INFEASIBLE, unsolved.problem.folded is not None
    details: tuple[str, ...] = ()
    if memory is not None:
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.at_peak.items() if size)
        details = (
            f"at that peak, during {memory.peak_op}, a device holds {held}; the largest are",
            *(f"  {text}" for text in largest_holders(memory, 8)),
        )
    found = (
        f"the smallest peak found is {format_bytes(solution.peak)} ({solution.peak} bytes)"
        if solution.peak is not None
        else "no peak was reached"
    )
    bound = f", and no {'tied ' if tied else ''}plan needs less than {format_bytes(solution.peak_bound)}" if solution.peak_bound else ""
    enough = "at least the peak found" + (" and the reserve together" if options.reserve else "")
    enough += " (less, down to the bound, may do)" if solution.peak_bound and solution.peak != solution.peak_bound else ""
    smaller = "a smaller batch" if options.forward_only else "a smaller batch or more --microbatches"
    hint = f"give {f'--memory {enough}' if solution.peak is not None else 'more --memory'}, a larger mesh, or {smaller}" + (
        "; --free may need less" if tied else ""
    )
    if pins:
        hint += f"; or drop or loosen a pin ({pins})"
    what = f"no plan of {unsolved.lowered.program.name} {'fits' if proven else 'was found that fits'}"
    return InfeasibleError(
        f"{what} into {limit}: {found}{bound}; {hint}" + ("" if proven else f", or {longer}"),
        achieved_peak=solution.peak,
        peak_bound=solution.peak_bound or None,
        details=(*details, *lines),
        conflict=conflict,
    )


def find(unsolved: Unsolved) -> Conflict | None:
    """What conflicts in a problem without a plan; None where that is not found within its share of the limits."""
    clock, apart = _clock(unsolved), _pins_apart(unsolved)
    likely = _likely(unsolved, apart.problem)
    found = compute_infeasible_subsystem(
        apart.graph, apart.there, times=likely, seed=unsolved.lowered.options.seed, clock=_part(clock, SEARCH_SHARE)
    )
    if found is None:
        return None
    times = tuple(_need(unsolved, apart, found, t, _part(clock, TIME_SHARE)) for t in found.times)
    ops, minimal = ((), True) if times else _meeting(unsolved, apart, found.constraints, _part(clock, OPS_SHARE))
    return Conflict(
        pins=tuple(apart.constraints[k].name for k in found.constraints),
        times=times,
        ops=ops,
        minimal=found.minimal and minimal,
        dropped=_prices(unsolved, apart, found.constraints, times, clock),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Apart:
    """The problem with its pins apart: lowered without them, each a constraint on the free graph, and (``there``) on the problem's."""

    lowering: Lowering
    constraints: list[Constraint]
    classes: Ints | None
    problem: Transients
    there: list[Constraint]

    @property
    def graph(self) -> ChoiceGraph:
        return self.problem.graph


def _pins_apart(unsolved: Unsolved) -> _Apart:
    lowering, constraints = unsolved.lowered.lowering, list[Constraint]()
    if unsolved.lowered.pins:
        options = unsolved.lowered.options
        lowering = lower(
            unsolved.lowered.program,
            unsolved.lowered.rulebook,
            unsolved.lowered.costs,
            optimizer_state=options.optimizer_state(),
            restriction=unsolved.lowered.restriction,
            limit=options.usable_memory,
            fusion=options.fusion,
            microbatches=options.microbatches,
        )
        constraints = pin_constraints(lowering, options.pins, unsolved.lowered.pins_apart())
    classes = pinned_classes(lowering, unsolved.lowered.lowering, constraints) if unsolved.problem.folded is not None else None
    problem = _problem(unsolved, lowering, classes)
    there = [dataclasses.replace(one, allowed=folded_masks(one.allowed, problem.folded)) for one in constraints]
    return _Apart(lowering=lowering, constraints=constraints, classes=classes, problem=problem, there=there)


def _need(unsolved: Unsolved, apart: _Apart, found: InfeasibleSubsystem, t: int, clock: Clock) -> tuple[str, int | None, int]:
    """What runs at a time of a conflict, and the fewest bytes then, found and proven."""
    options = unsolved.lowered.options
    most, least = least_bytes(apart.graph, apart.there, found, t, gap=options.gap, seed=options.seed, clock=clock)
    return _running(unsolved, apart.problem, t), most, max(least, options.usable_memory + 1)


def _meeting(unsolved: Unsolved, apart: _Apart, blamed: Sequence[int], clock: Clock) -> tuple[tuple[str, ...], bool]:
    """The ops that cannot all run with these pins and the template, and whether each is needed for that."""
    bare = dataclasses.replace(apart.graph.narrowed(masks([apart.there[k] for k in blamed])), limit=None)
    folded = apart.problem.folded
    member = np.arange(apart.lowering.graph.size) if folded is None else folded.member
    owners, positions = op_constraints(apart.lowering, bare.edges, member)
    found = compute_infeasible_subsystem(bare, owners, seed=unsolved.lowered.options.seed, clock=clock)
    if found is None:
        return (), True
    return tuple(_op(unsolved.lowered.program, positions[k]) for k in found.constraints), found.minimal


def _prices(
    unsolved: Unsolved, apart: _Apart, blamed: Sequence[int], times: Sequence[tuple[str, int | None, int]], clock: Clock
) -> tuple[DroppedPin, ...]:
    """What dropping each of these pins gives; where memory is too small whatever the pins, what dropping all does."""
    pins = apart.constraints
    if not blamed and pins and times:
        price = _price(unsolved, apart, None, [], clock)
        if len(times) == 1:  # what one time needs without pins, every plan needs
            price = dataclasses.replace(price, peak_bound=max(price.peak_bound or 0, times[0][2]))
        return (price,)
    shares = [1 / (len(blamed) - i) for i in range(len(blamed))]
    return tuple(
        _price(unsolved, apart, pins[k].name, [pin for j, pin in enumerate(pins) if j != k], _part(clock, share))
        for k, share in zip(blamed, shares, strict=True)
    )


def conflict_lines(conflict: Conflict, unsolved: Unsolved) -> list[str]:
    """A conflict for a person, one fact a line."""
    options = unsolved.lowered.options
    lines = []
    if not conflict.minimal:
        lines.append("what is named here conflicts, but perhaps not all of it is needed: the time for finding out was up")
    pins = ", ".join(map(repr, conflict.pins))
    which = f"with {pins}" if pins else "even without pins" if options.pins else ""
    if conflict.times:
        which = f"{which}, " if which else ""
        if len(conflict.times) > 1:
            lines.append(f"{which}the limit cannot be kept at all of these times; kept at the others, a device needs")
        for running, _, least in conflict.times:
            needs = f"at least {format_bytes(least)} during {running}"
            lines.append(f"  {needs}" if len(conflict.times) > 1 else f"{which}a device needs {needs}")
    if conflict.ops:
        names = fold_names(conflict.ops)
        shown = "; ".join(names[:MOST_OPS]) + (f"; and {len(names) - MOST_OPS} more" if len(names) > MOST_OPS else "")
        what = " and ".join([*(["these pins"] if pins else []), *(["the template"] if options.template else [])])
        which = "these ops cannot all run" if len(conflict.ops) > 1 else "this op cannot run"
        lines.append(f"{f'with {what} ' if what else ''}{which}: {shown}")
    for dropped in conflict.dropped:
        lines.append(f"without {'any pin' if dropped.pin is None else repr(dropped.pin)}: {_worth(dropped)}")
    spared = [text for text in dict.fromkeys(options.pins) if text not in conflict.pins]
    if spared and conflict.pins:
        lines.append(f"no part in this conflict have {', '.join(map(repr, spared))}")
    return lines


def _worth(dropped: DroppedPin) -> str:
    """What dropping a pin gives."""
    if dropped.nanoseconds is not None:
        bound = f", and none is faster than {format_ns(dropped.bound)}" if dropped.bound not in (None, dropped.nanoseconds) else ""
        peak = f" with a peak of {format_bytes(dropped.peak)}" if dropped.peak is not None else ""
        return f"a plan of {format_ns(dropped.nanoseconds)} a step fits{peak}{bound}"
    least = f", and no plan needs less than {format_bytes(dropped.peak_bound)}" if dropped.peak_bound else ""
    if dropped.peak is not None:
        none = "still none fits" if dropped.proven else "none was found that fits"
        return f"{none}: the smallest peak found is {format_bytes(dropped.peak)}{least}"
    return "still no plan: something else conflicts as well" if dropped.proven else "no plan was found in the time for this"


def _clock(unsolved: Unsolved) -> Clock:
    """What solving has left, up to a share, and at least a little where that is still within the total time limit."""
    work, stages = unsolved.lowered.options.work_limit, unsolved.clock

    def part(whole: float, used: float) -> float:
        return min(SHARE * whole, max(whole - used, LEAST_SHARE * whole))

    seconds = min(part(stages.solver_seconds, stages.seconds["solve"]), stages.left())
    clock = Clock(seconds, None if work is None else part(work, unsolved.solution.work))
    clock.halt = unsolved.stop
    return clock


def _part(clock: Clock, share: float) -> Clock:
    left = clock.work_left()
    return clock.part(time_share=share, work=None if left == float("inf") else left * share)


def _problem(unsolved: Unsolved, lowering: Lowering, classes: Ints | None) -> Transients:
    """The lowering with the intermediates that the solved problem counted."""
    problem = Transients(lowering, unsolved.lowered.costs, classes)
    if unsolved.problem.added:
        problem.add(unsolved.problem.added)
    return problem


def _price(unsolved: Unsolved, apart: _Apart, pin: str | None, kept: Sequence[Constraint], clock: Clock) -> DroppedPin:
    """The best plan that keeps the pins but this one."""
    if clock.over():
        return DroppedPin(pin=pin)
    options, lowering = unsolved.lowered.options, apart.lowering
    problem = _problem(unsolved, lowering.narrowed(masks(kept)), apart.classes)
    work = clock.work_left()
    found = solve_in_rounds(
        problem,
        gap=max(options.gap, PRICE_GAP),
        time_limit=clock.time_left(),
        work_limit=None if work == float("inf") else work,
        seed=options.seed,
        stop=clock.halted,
    )
    clock.spend(found.work)
    return DroppedPin(
        pin=pin,
        nanoseconds=found.cost if found.feasible else None,
        bound=found.bound if found.feasible else None,
        peak=found.peak,
        peak_bound=found.peak_bound or None,
        proven=found.status is Status.INFEASIBLE,
    )


def _added_times(problem: Transients) -> Ints:
    """Op positions after which the graph has a time point of its own for the intermediates of a transition."""
    return np.sort(np.array([problem.moves[m].time for m in sorted(problem.added)], dtype=np.int64))


def _likely(unsolved: Unsolved, problem: Transients) -> tuple[int, ...]:
    """Times of the graph at the peak of the plan of smallest peak."""
    if unsolved.memory is None:
        return ()
    op, added = unsolved.memory.peak_time, _added_times(problem)
    first = op + int((added < op).sum())
    return tuple(range(first, first + 1 + int((added == op).sum())))


def _running(unsolved: Unsolved, problem: Transients, t: int) -> str:
    """What runs at a time of the graph."""
    added, ops = _added_times(problem), unsolved.lowered.program.ops
    starts = np.arange(len(ops) + 1) + np.searchsorted(added, np.arange(len(ops) + 1))  # a time's own points come around it
    i = int(np.searchsorted(starts, t, side="right")) - 1
    return _op(unsolved.lowered.program, i) if i < len(ops) else "optimizer"


def _op(program: Program, i: int) -> str:
    op = program.ops[i]
    return f"{op.module or 'model'}: {op.name} ({op.phase.value})"
