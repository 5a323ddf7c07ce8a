"""How plans come about that the solver's is compared with: from a recipe's name to a plan, on one trace.

- a *template* (``dp=zero3,tp=megatron``) is solved as ``optimize(template=...)`` does: the best plan that does what it says; where nobody
  says which, all that experts write are tried on one choice graph (:mod:`solver_shard.baselines.candidates`), and the best of each kind
  is a row;
- the *propagation* passes ``basic``, ``aggressive``, ``op-priority`` and ``user-priority`` spread what they start from, and conflicts are
  paid for (:mod:`solver_shard.baselines.propagated`);
- the *greedy* walks ``dtensor-greedy`` and ``dijkstra-greedy`` decide op by op.

Passes and walks need layouts to start from: the pins of the first plan, or, where it has none, what a person would write down first:
inputs cut by batch over all axes but the rightmost, and the matrices of the blocks by that one as Megatron-LM cuts them; on one axis,
inputs cut by batch. Everything else follows from their rules.

Every recipe is completed at the least time, first without a memory limit. Where the result needs more than there is, the recipe's plan
of least time within the limit is looked for; where it has none either, the fastest stands in the table as one that does not fit, with
the smallest peak that the recipe can have beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from solver_shard.analysis.greedy_plans import NO_LIMIT, dtensor_greedy_plan, followable, stored_layouts
from solver_shard.analysis.reopen import Retraced
from solver_shard.baselines import MAX_NAMES
from solver_shard.baselines.candidates import Tried, try_all
from solver_shard.baselines.dijkstra_greedy import NAME as DIJKSTRA
from solver_shard.baselines.dijkstra_greedy import decide as decide_by_cost
from solver_shard.baselines.dtensor_greedy import Walk
from solver_shard.baselines.propagated import Propagation
from solver_shard.clock import StageClock
from solver_shard.codec import MAY_LACK
from solver_shard.errors import InfeasibleError, InputError
from solver_shard.graph.build import lower_program
from solver_shard.graph.pins import parse_pin, resolve_pins
from solver_shard.graph.sub_axes import MAX_LIVE_AXES, heads_of
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.templates import block_cut, parse_template, restrictions
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.plan.decode import PlanWriter, provenance
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role, constrain
from solver_shard.shardy.passes import PassName
from solver_shard.shardy.program import propagate_program
from solver_shard.solve.solution import Status

if TYPE_CHECKING:
    from solver_shard.analysis.other_tools import ToolPlan


PASSES: tuple[PassName, ...] = get_args(PassName)
GREEDY = ("dtensor-greedy", DIJKSTRA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A plan to be priced, the program that it is for, and what a reader must know of it; ``least_peak`` as in a row."""

    name: str
    kind: RowKind
    plan: Plan
    program: Program
    notes: tuple[str, ...] = ()
    least_peak: int | None = None
    least_proven: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedTemplate:
    """One of the templates that were tried: nanoseconds of a step and bytes at the peak; None where no plan carries it through the model,
    or where it cannot be faster than another of its kind; ``fits`` as in a row."""

    name: str
    step_ns: int | None = None
    peak: int | None = None
    fits: bool = False

    @classmethod
    def of(cls, tried: Tried) -> TriedTemplate:
        plan = tried.plan
        return (
            cls(name=tried.name, fits=tried.fits)
            if plan is None
            else cls(name=tried.name, step_ns=plan.cost, peak=plan.peak, fits=tried.fits)
        )


class Maker:
    """Makes plans for the step of one plan: same mesh, cluster and options, one trace."""

    def __init__(
        self,
        plan: Plan,
        retraced: Retraced,
        *,
        time_limit: float,
        workers: int = 2,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.plan, self.retraced, self.workers, self.progress = plan, retraced, workers, progress
        given = plan.options
        self.mesh = plan.mesh.whole if given.split in ("auto", "off") else plan.mesh
        self.options = dataclasses.replace(
            given,
            objective="time",
            memory_weight=0,
            pins=(),
            template=None,
            propagation=None,
            time_limit=time_limit,
            total_time_limit=None,
            work_limit=None,
        )
        self.started: tuple[str, ...] = ()
        self.spread: dict[tuple[Layout, ...], Made] = {}

    @property
    def program(self) -> Program:
        """Of the step, before pins."""
        return self.retraced.program

    def as_given(self, name: str, plan: Plan) -> Made:
        """A plan that was made before; InputError where its ops are not those of the step."""
        from solver_shard.runtime.apply import fitting

        return Made(name=name, kind="plan", plan=plan, program=fitting(plan, self.program))

    def recipe(self, name: str) -> Made:
        """What a pass, a walk or a template makes of the step.

        Raises:
            InputError: no such recipe, or it cannot be had of this model on this mesh.
        """
        if name in PASSES:
            return self._propagated(name)
        if name in GREEDY:
            return self._greedy(name)
        try:
            parse_template(name, self.mesh)
        except InputError as error:
            raise InputError(f"{name!r} is no pass or walk ({', '.join((*PASSES, *GREEDY))}), and as a template: {error}") from None
        options = dataclasses.replace(self.options, template=name)
        return self._fitting(name, "template", self.program, options, lambda asked: self._plan(self.program, asked))

    def templates(self) -> tuple[list[Made], tuple[TriedTemplate, ...]]:
        """Of each kind of template the fastest plan that fits, and all that were tried, on one choice graph.

        Kinds are what an axis does beside storing (tensor, vocabulary, sequence and expert parallelism and their combinations), and each
        is tried with every stage of ZeRO and hybrid sharding. Of a kind that does not fit there is the fastest without a limit, with its
        smallest peak. Repeated layers are alike.

        Raises:
            InputError: on a mesh of so many axes that a choice graph without a template would be too large.
        """
        options = dataclasses.replace(self.options, memory_limit=NO_LIMIT, reserve=0, tied=True)
        if sum(axis.size > 1 for axis in self.mesh.axes) > MAX_LIVE_AXES:
            raise InputError(f"{self.mesh} has too many axes to try every template; name those that are of interest (--with)")
        self._say("lowering the step for all templates")
        lowered = lower_program(self.program, mesh=self.mesh, cluster=self.plan.cluster, options=options, relays="none")
        problem = Transients(lowered.lowering, lowered.costs, node_classes(lowered.lowering))
        made = restrictions(lowered.program, lowered.mesh, accumulates=options.microbatches > 1, every=True)
        if len(self.mesh.axes) > 1:  # a plan without data parallelism is nobody's
            made = {name: template for name, template in made.items() if "" in template.kind}
        self._say(f"trying {len(made)} templates")
        tried = try_all(problem, self.plan.options.usable_memory, made, gap=options.gap, seed=options.seed)
        best: dict[tuple[str, ...], Tried] = {}
        for t in tried:
            if t.plan is not None and (t.kind not in best or _rank(t) < _rank(best[t.kind])):
                best[t.kind] = t
        rows = []
        for t in best.values():
            writer = PlanWriter(
                lowering=lowered.lowering,
                costs=lowered.costs,
                cluster=self.plan.cluster,
                options=dataclasses.replace(options, template=t.name),
                origin=provenance(self.retraced.source, f"solver-shard compare ... --with {t.name}"),
                relayed="none",
            )
            assert t.plan is not None, "of a kind that has a plan"
            plan = self._limited(writer.plan(t.plan.solution, problem, StageClock()))
            least = None if t.fits or t.least is None else t.least
            row = Made(name=t.name, kind="template", plan=plan, program=self.program)
            if least is not None:
                proven = least.found.status in (Status.OPTIMAL, Status.GAP)
                row = dataclasses.replace(row, least_peak=min(least.peak, plan.memory.peak), least_proven=proven)
            rows.append(row)
        return rows, tuple(map(TriedTemplate.of, tried))

    def pinned(self, name: str, pins: tuple[str, ...]) -> Made:
        """The best plan that keeps these pins."""
        options = dataclasses.replace(self.options, pins=pins)
        made = self._fitting(name, "pins", self.program, options, lambda asked: self._plan(self.program, asked))
        return dataclasses.replace(made, program=self.as_given(name, made.plan).program)

    def given(self, item: ToolPlan) -> Made:
        """What a plan for another tool runs, see :mod:`solver_shard.analysis.other_tools`."""
        from solver_shard.analysis.other_tools import FollowedPlan, follow

        followed: FollowedPlan = follow(item, self.program, self.mesh.whole)

        def make(asked: Options) -> Plan:
            return self._plan(followed.program, asked, mesh=self.mesh.whole, baseline=followed.narrow)

        options = dataclasses.replace(self.options, template=followed.template, split="off", tied=False)
        made = self._fitting(item.name, "given", followed.program, options, make)
        return dataclasses.replace(made, notes=(*followed.notes(), *made.notes))

    def _propagated(self, name: PassName) -> Made:
        """What a pass makes of the start; passes that lay every tensor out alike have one plan."""
        pins, propagation, mesh = self._start(), Propagation(name=name), self.mesh.whole
        options = dataclasses.replace(self.options, pins=pins, tied=False, split="off")
        resolved = resolve_pins([parse_pin(text, mesh) for text in pins], self.program, mesh)
        program, pinned = constrain(self.program, resolved)
        spread = propagate_program(program, mesh, pinned, name, options.rulebook(), propagation.options)
        if spread.layouts not in self.spread:

            def make(asked: Options) -> Plan:
                return self._plan(self.program, dataclasses.replace(asked, propagation=str(propagation)), baseline=propagation)

            self.spread[spread.layouts] = self._fitting(name, "propagation", program, options, make)
        same = self.spread[spread.layouts]
        recorded = dataclasses.replace(same.plan.options, propagation=propagation.record(program, spread.lost))
        return dataclasses.replace(same, name=name, plan=dataclasses.replace(same.plan, options=recorded))

    def _greedy(self, name: str) -> Made:
        pins, mesh = self._start(), self.mesh.whole
        options = dataclasses.replace(self.options, pins=pins, tied=False, split="off")
        if name == DIJKSTRA:
            program = self._constrained(pins, mesh)
            return _left_over(
                self._fitting(
                    name, "greedy", program, options, lambda asked: self._plan(self.program, asked, mesh=mesh, baseline=decide_by_cost)
                )
            )
        traced, cluster = followable(self.retraced.traced, options), self.plan.cluster
        stored = stored_layouts(self.program, resolve_pins([parse_pin(text, mesh) for text in pins], self.program, mesh))

        walks: list[Walk] = []

        def make(asked: Options) -> Plan:
            plan, walk = dtensor_greedy_plan(
                traced, mesh=mesh, cluster=cluster, options=asked, pins=stored, devices_per_host=cluster.levels[0].size or mesh.size
            )
            walks.append(walk)
            return plan

        made = _left_over(self._fitting(name, "greedy", self.program, options, make))
        return dataclasses.replace(made, notes=(*made.notes, *raising(walks[0])))

    @property
    def start_text(self) -> str:
        """What the passes and walks that were made start from."""
        if not self.started:
            return ""
        if self.plan.options.pins:
            return "the pins of the first plan"
        *data, tensor = self.mesh.whole.names
        blocks = f", and the matrices of the blocks by {tensor} as Megatron-LM does" if data else ""
        return f"inputs cut by batch over {', '.join(data) or tensor}{blocks}"

    def _start(self) -> tuple[str, ...]:
        """Where passes and walks start from, as pins; recorded, because a table must say it."""
        if not self.started:
            self.started = self.plan.options.pins or starting_pins(self.program, self.mesh.whole)
        return self.started

    def _plan(self, program: Program, options: Options, mesh: Mesh | None = None, **more: object) -> Plan:
        from solver_shard.pipeline import plan_program

        clock = StageClock(progress=self.progress)
        return plan_program(
            program,
            mesh=mesh or (self.mesh.whole if options.split == "off" else self.mesh),
            cluster=self.plan.cluster,
            options=options,
            source=self.retraced.source,
            clock=clock,
            workers=self.workers,
            traced=self.retraced.traced,
            **more,  # type: ignore[arg-type]  # baseline, as plan_program takes them
        )

    def _fitting(self, name: str, kind: RowKind, program: Program, options: Options, make: Callable[[Options], Plan]) -> Made:
        """The recipe's fastest plan within the limit; where it has none, its fastest, and its smallest peak."""
        limit, free = self.plan.options.usable_memory, dataclasses.replace(options, memory_limit=NO_LIMIT, reserve=0)
        self._say(f"{name}: without a memory limit")
        fastest = make(free)
        made = Made(name=name, kind=kind, plan=self._limited(fastest), program=program)
        if fastest.memory.peak <= limit:
            return made
        self._say(f"{name}: its smallest peak")
        lightest = make(dataclasses.replace(free, objective="memory"))
        if lightest.memory.peak > limit:
            proven = lightest.certificate.status in ("optimal", "gap")
            return dataclasses.replace(made, least_peak=min(lightest.memory.peak, fastest.memory.peak), least_proven=proven)
        self._say(f"{name}: within the memory limit")
        try:
            return dataclasses.replace(made, plan=self._limited(make(options)))
        except InfeasibleError:  # what was found above is the one that is known to fit
            note = "the only plan of this recipe that was found to fit is that of smallest peak"
            return dataclasses.replace(made, plan=self._limited(lightest), notes=(note,))

    def _say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def _limited(self, plan: Plan) -> Plan:
        """A plan that was made without a limit, as one for the first plan's limit, or for its own peak where that is more."""
        given = self.plan.options
        limit, reserve = (given.memory_limit, given.reserve) if plan.memory.peak <= given.usable_memory else (plan.memory.peak, 0)
        return dataclasses.replace(
            plan,
            options=dataclasses.replace(plan.options, memory_limit=limit, reserve=reserve),
            memory=dataclasses.replace(plan.memory, limit=limit - reserve),
        )

    def _constrained(self, pins: tuple[str, ...], mesh: Mesh) -> Program:
        """The program with places for pinned activations."""
        return constrain(self.program, resolve_pins([parse_pin(text, mesh) for text in pins], self.program, mesh))[0]


def _rank(tried: Tried) -> tuple[bool, int]:
    """Those that fit first, the fastest first."""
    assert tried.plan is not None, "only what has a plan has a place"
    return not tried.fits, tried.plan.cost


def starting_pins(program: Program, mesh: Mesh) -> tuple[str, ...]:
    """Inputs by batch over all axes but the rightmost, matrices of blocks by the rightmost as Megatron-LM cuts them.

    On one axis, inputs by batch. Matrices whose heads do not suffice for the axis stay open, as do all axes that are not named.
    """
    data = mesh.names[:-1] or mesh.names
    pins = []
    for t in program.sources():
        tensor = program.tensors[t]
        if tensor.role is Role.INPUT and tensor.shape:
            axes, rows = [], tensor.shape[0]
            for name in data:
                size = mesh.shape[mesh.index(name)]
                if size > 1 and rows % size == 0:
                    axes.append(f"{name}=S(0)")
                    rows //= size
            pins += [f"{tensor.name}={','.join(axes)}"] if axes else []
    if len(mesh.axes) > 1:
        cut, size = block_cut(program), mesh.shape[-1]
        heads = heads_of(program, cut)
        for t, dim in cut.items():
            if size > 1 and (t not in heads or heads[t].cut_by([size])[0]):
                pins.append(f"{program.tensors[t].name}={mesh.names[-1]}=S({dim})")
    return tuple(pins)


def raising(walk: Walk) -> tuple[str, ...]:
    """A note of the ops at which DTensor would raise, if there are any."""
    names = sorted({op.op for op in walk.unsupported})
    if not names:
        return ()
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    count = len(walk.unsupported)
    return (f"DTensor raises at {count} ops of this trace ({shown}); the walk goes on as if their inputs had been replicated before",)


def _left_over(made: Made) -> Made:
    """With a note of what a walk's plan records as left to the solver."""
    said = (made.plan.options.propagation or "").partition("; left to the solver: ")[2]
    note = f"the solver decides where the plan's ops cannot say what the walk does: {said}"
    return dataclasses.replace(made, notes=(*made.notes, note)) if said else made


# What a table of plans has of each: the JSON of a row of :mod:`solver_shard.analysis.compare`, which reports read too.

RowKind = Literal["plan", "template", "propagation", "greedy", "given", "pins"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The price of one plan; times in nanoseconds of a step, bytes per device.

    Attributes:
        name: what the table calls it.
        kind: plan (given as a plan), template, propagation, greedy, given (a plan for another tool) or pins.
        step_ns: compute + update + the collectives of ``by_kind_ns``.
        compute_ns, update_ns: ops without collectives; the optimizer.
        by_kind_ns: collective kind to its time, after the overlap discount; every key of ``compare.KINDS``.
        unshared_ns: launches that are not in ``step_ns``, see ``plan.Costs``.
        peak: the largest total of bytes at one time; ``at_peak`` has its categories, every key of ``plan.CATEGORIES``.
        fits: whether the peak is within what the first plan's limit leaves for tensors.
        least_peak: of a recipe of which no plan fits, the smallest peak that one was found to have; ``least_proven``: that none has less.
        regret: (step_ns - bound) / bound; None where there is no bound on the time.
        status: of the certificate: optimal, gap, feasible or interrupted; ``gap`` is relative to this row's own problem.
        notes: what a reader must know of the row, a sentence each.
    """

    name: str
    kind: RowKind
    step_ns: int
    compute_ns: int
    update_ns: int
    by_kind_ns: Mapping[str, int]
    unshared_ns: int
    peak: int
    at_peak: Mapping[str, int]
    fits: bool
    least_peak: int | None = field(default=None, metadata=MAY_LACK)
    least_proven: bool = field(default=False, metadata=MAY_LACK)
    regret: float | None
    status: str
    gap: float
    notes: tuple[str, ...] = ()

    @property
    def communication_ns(self) -> int:
        """All collectives."""
        return sum(self.by_kind_ns.values())

    @property
    def proven(self) -> bool:
        """Whether nothing that its recipe leaves open could be better by more than the gap asked for."""
        return self.status in ("optimal", "gap")
