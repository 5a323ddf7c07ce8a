"""A plan held against the clock: steps of the applied plan in real processes, beside what the plan says of them.

    torchrun --nproc-per-node 4 -m solver_shard measure plan.json gpt2

Every process applies the plan (``solver_shard.apply``), takes some steps that nothing watches and whose time is the step time, then some
with a clock around every op, every collective and the update, and one in which the bytes of every tensor are counted. Where devices work
beside the program that drives them (CUDA), the clock waits for them before it is read, so the parts of a step may sum to more than it.

What a collective takes is from when this process calls it: it includes waiting for the process that comes last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from solver_shard.arguments import checked
from solver_shard.costs.memory import WAYS
from solver_shard.errors import InputError
from solver_shard.ops.run import DTYPES
from solver_shard.ops.shards import boxes
from solver_shard.options import Options
from solver_shard.plan.plan import CATEGORIES, Plan, Reshard, runs_of
from solver_shard.program import Program, Role
from solver_shard.runtime.apply import Runtime, apply, runtime_of
from solver_shard.runtime.collectives import Exchange, Move, Processes
from solver_shard.runtime.optimizer import ShardedOptimizer, clip_grad_norm_
from solver_shard.runtime.schedule import Run
from solver_shard.runtime.step import Compiled, GradientSum, StepState, compile_step
from solver_shard.text import format_bytes, format_ns, table, text_of
from solver_shard.tracing.torch import Inputs, named_tensors
from solver_shard.verification.subject import example_value, model_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PROFILED = 3
"""Steps with a clock around every op: their medians are the parts of the step."""

MAX_STEPS = 100_000
_NORM = 1.0
_RATE = 1e-5
"""Of the optimizer: numbers stay near where they begin, however many steps are taken."""

_SCALE = 0.02
"""Of weights that nobody gave values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """A part of the step, planned and measured.

    Attributes:
        kind: compute, collective, local (what brings tensors into place without another device: slices, packing, casts), update.
        name: kind of kernel, or of collective.
        axes: names of the mesh axes that a collective runs along.
        count: how many run in a step.
        planned_ns, measured_ns: nanoseconds of all of them in one step.
    """

    kind: str
    name: str = ""
    axes: tuple[str, ...] = ()
    count: int
    planned_ns: int
    measured_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBytes:
    """Bytes of one category on the fullest device, each at its own largest; ``peak`` is of all together."""

    category: str
    planned: int
    measured: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Steps of a plan on real devices.

    ``str()`` is the report, :meth:`to_json` the same data.

    Attributes:
        plan: what the plan is called, and its mesh.
        run: what ran: processes, backend, device, threads.
        planned_ns: the plan's step time.
        step_ns: measured, one for each step: of the process that took longest.
        parts: of a step, on device 0.
        memory: by category, and ``peak``.
        loss: of the last step, where the plan trains.
    """

    plan: str
    run: str
    planned_ns: int
    step_ns: tuple[int, ...]
    parts: tuple[MeasuredPart, ...]
    memory: tuple[MeasuredBytes, ...]
    loss: float | None = None

    @property
    def median_ns(self) -> int:
        """The median step."""
        return int(statistics.median(self.step_ns))

    @property
    def spread(self) -> float:
        """From the first to the ninth tenth of the steps, relative to the median."""
        ordered = sorted(self.step_ns)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return (high - low) / self.median_ns

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self) | {"median_ns": self.median_ns, "spread": self.spread}, indent=1)

    def __str__(self) -> str:
        lines = [f"{self.plan}: {len(self.step_ns)} steps, {self.run}", ""]
        rows = [("", "planned", "measured", "measured / planned")]
        rows.append(("step", format_ns(self.planned_ns), format_ns(self.median_ns), _ratio(self.planned_ns, self.median_ns)))
        for part in self.parts:
            title = " ".join(word for word in (part.kind, part.name, f"over {', '.join(part.axes)}" if part.axes else "") if word)
            ratio = _ratio(part.planned_ns, part.measured_ns)
            rows.append((f"  {title} ({part.count})", format_ns(part.planned_ns), format_ns(part.measured_ns), ratio))
        lines += table(rows, right=(1, 2, 3), header=True)
        lines += ["", f"  the middle eight of ten steps lie within {self.spread:.0%} of the median"]
        rows = [("memory", "planned", "measured", "measured / planned")]
        rows += [(b.category, format_bytes(b.planned), format_bytes(b.measured), _ratio(b.planned, b.measured)) for b in self.memory]
        return text_of([*lines, "", *table(rows, right=(1, 2, 3), header=True)])


def _ratio(planned: int, measured: int) -> str:
    return f"{measured / planned:.2f}" if planned else "-"


@checked
def measure(
    plan: Plan | str | os.PathLike[str],
    model: str | os.PathLike[str] | nn.Module,
    inputs: Inputs | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    steps: int = 20,
    warmup: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Take steps of a plan, and hold step time, its parts and peak memory against what the plan says.

    Called by all processes of a run under torchrun alike, as many as the plan has devices; NCCL where there are GPUs, else gloo.

    >>> print(measure("plan.json", "gpt2", steps=50))  # doctest: +SKIP

    Args:
        plan: what ``optimize`` returned, or its file.
        model: what the plan is for, as ``optimize`` takes it; of presets and configs the plan says batch, sequence length and dtype, and
            weights are drawn shard by shard.
        inputs: of a module: example tensors as they were given to ``optimize``.
        loss_fn: of a module: as it was given to ``optimize``.
        steps: how many are timed, 1 to 100,000.
        warmup: how many run before.
        seed: of weights that have no values, and of inputs.
        progress: called with a line of text when a stage starts.

    Returns:
        The same in all processes: nanoseconds, and bytes of a device.

    Raises:
        InputError: not as many processes as devices, no run under torchrun, or the model is not the plan's.
        TraceError: the model cannot be traced.
    """
    from solver_shard.plan.io import load_plan

    for name, number, low in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not low <= number <= MAX_STEPS:
            raise InputError(f"{name} {number!r} was asked; give a whole number from {low} to {MAX_STEPS:,}")
    given = load_plan(plan)
    say = progress or (lambda line: None)
    with _process_group(given) as device_mesh:
        say("building the model")
        source = os.fspath(model) if isinstance(model, os.PathLike) else model
        if isinstance(source, str) and (inputs is not None or loss_fn is not None):
            raise InputError("inputs and a loss function are given with a module; presets, configs and entry points make their own")
        torch.manual_seed(seed)  # a model with values has the same in all processes
        module, inputs, loss_fn, limits = model_of(given, source, inputs, loss_fn, weights=False, seed=seed)
        say("applying the plan")
        return _MeasuredSteps(given, module, inputs, loss_fn, limits, device_mesh, seed).measurement(steps, warmup, say)


@contextlib.contextmanager
def _process_group(plan: Plan) -> Iterator[DeviceMesh]:
    """The plan's mesh of processes; a group that is made here is ended here."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    own = not dist.is_initialized()
    if own:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise InputError(
                f"a plan is measured in {plan.mesh.size} processes that torchrun has started: "
                f"torchrun --nproc-per-node {plan.mesh.size} -m solver_shard measure PLAN MODEL"
            )
        count = int(os.environ["WORLD_SIZE"])
    else:
        count = dist.get_world_size()
    if count != plan.mesh.size:
        raise InputError(f"the plan is for {plan.mesh.size} devices ({plan.mesh.whole}), {count} processes run; start {plan.mesh.size}")
    if own:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield init_device_mesh(kind, plan.mesh.whole.shape, mesh_dim_names=plan.mesh.whole.names)
    finally:
        if own:
            dist.destroy_process_group()


class _Clock:
    """Nanoseconds by what they were spent on, while it is on."""

    def __init__(self, device: str) -> None:
        self.on = False
        self.spent: Counter[tuple[str, ...]] = Counter()
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.others = 0
        self._wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def now(self) -> int:
        """Nanoseconds, when all that was asked of the device is done."""
        self._wait()
        return time.perf_counter_ns()

    def timed(self, what: tuple[str, ...], call: Callable[..., Any]) -> Callable[..., Any]:
        """A call whose time counts for this, but for what other timed calls inside it take."""

        def run(*arguments: Any) -> Any:
            if not self.on:
                return call(*arguments)
            before, self.others = self.others, 0
            start = self.now()
            result = call(*arguments)
            whole = self.now() - start
            self.spent[what] += whole - self.others
            self.counts[what] += 1
            self.others = before + whole
            return result

        return run


class _TimedProcesses(Processes):
    """One process of a mesh, with a clock around its collectives."""

    def __init__(self, plan: Plan, device_mesh: DeviceMesh, clock: _Clock) -> None:
        super().__init__(plan.mesh, device_mesh)
        self.clock = clock

    def stages(self, exchange: Exchange) -> tuple[Move, ...]:
        pack, call, unpack = super().stages(exchange)
        return pack, self.clock.timed(("collective", exchange.kind, *exchange.axes), call), unpack

    def free(self, axes: Sequence[int], reduction: str) -> Move:
        names = tuple(self.mesh.names[axis] for axis in axes)
        return self.clock.timed(("collective", "exchange", *names), super().free(axes, reduction))


class _MeasuredSteps:
    """An applied model, and what it takes to step it."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        inputs: Inputs,
        loss_fn: Callable[..., Any] | None,
        limits: Mapping[str, int | None],
        device_mesh: DeviceMesh,
        seed: int,
    ) -> None:
        self.plan = plan
        self.sharded = apply(model, plan, device_mesh, inputs=inputs, loss_fn=loss_fn)
        runtime = self.runtime = runtime_of(self.sharded)
        place = self.place = torch.device(runtime.mesh.device_type)
        self.clock = _Clock(place.type)
        processes = runtime.processes = _TimedProcesses(plan, runtime.mesh, self.clock)
        step = compile_step(plan, runtime.program, device=processes.device, communicator=processes, place=place)
        self.kernels = _kernels(plan, runtime.program)
        runtime.step = _with_clock(step, self.kernels, self.clock)
        runtime.gradients = GradientSum(plan, runtime.program, processes.device, processes)
        _fill(runtime, torch.Generator().manual_seed(seed + processes.device))
        numbers = torch.Generator().manual_seed(seed)
        named = named_tensors(model, inputs)
        self.inputs = {name: example_value(name, value, limits.get(name), numbers).to(place) for name, value in named.items()}
        self.trains = not plan.options.forward_only
        self.optimizer: torch.optim.Optimizer | None = None
        if self.trains and plan.options.optimizer != "none":
            kind = torch.optim.AdamW if plan.options.optimizer in WAYS else torch.optim.SGD
            self.optimizer = ShardedOptimizer(self.sharded, kind, lr=_RATE)
        self._update = self.clock.timed(("update",), self._updated)

    def once(self) -> float | None:
        """One step: all microbatches, and the update."""
        count, loss = self.plan.options.microbatches, None
        for _ in range(count):
            result = self.sharded(**self.inputs)
            if self.trains:
                loss = result
                (result / count).backward()
        if self.trains:
            self._update()
            self.sharded.zero_grad()
        return None if loss is None else loss.detach()

    def _updated(self) -> None:
        if self.plan.options.clip:
            clip_grad_norm_(self.sharded, _NORM)
        if self.optimizer is not None:
            self.optimizer.step()

    def measurement(self, steps: int, warmup: int, say: Callable[[str], None]) -> Measurement:
        """Warm up, time steps, then their parts, then memory."""
        say(f"taking {warmup} steps to warm up, and {steps} that count")
        loss = None
        for _ in range(max(warmup, 1)):  # the first step checks shapes, and the optimizer makes its states
            loss = self.once()
        if self.place.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        own = []
        for _ in range(steps):
            dist.barrier()
            start = self.clock.now()
            loss = self.once()
            own.append(self.clock.now() - start)
        say(f"timing the parts of {PROFILED} steps")
        parts = self._parts()
        say("counting the bytes of a step")
        measured = torch.cuda.max_memory_allocated() if self.place.type == "cuda" else 0
        memory = self._memory()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (own, memory, measured))
        slowest = tuple(max(times) for times in zip(*(times for times, _, _ in every), strict=True))
        fullest = {name: max(device[name] for _, device, _ in every) for name in memory}
        if allocated := max(of for _, _, of in every):
            fullest["peak"] = allocated
        return Measurement(
            plan=f"{self.plan.name} on {self.plan.mesh.whole}",
            run=_ran(self.plan, self.place),
            planned_ns=self.plan.costs.total_ns,
            step_ns=slowest,
            parts=_first(parts),
            memory=tuple(MeasuredBytes(category=name, planned=_planned_bytes(self.plan, name), measured=n) for name, n in fullest.items()),
            loss=None if loss is None else _first(float(loss)),
        )

    def _parts(self) -> tuple[MeasuredPart, ...]:
        """Planned and measured time by what it is spent on."""
        clock, spent = self.clock, defaultdict[tuple[str, ...], list[int]](list)
        counts: Counter[tuple[str, ...]] = Counter()
        for _ in range(PROFILED):
            dist.barrier()
            clock.spent.clear()
            clock.counts.clear()
            clock.on = True
            self.once()
            clock.on = False
            counts |= clock.counts
            for what, nanoseconds in clock.spent.items():
                spent[what].append(nanoseconds)
        planned = _planned_parts(self.plan, self.kernels)
        order = {"compute": 0, "collective": 1, "local": 2, "update": 3}
        keys = sorted(set(planned) | set(spent), key=lambda what: (order[what[0]], *what[1:]))
        return tuple(
            MeasuredPart(
                kind=what[0],
                name=what[1] if len(what) > 1 else "",
                axes=what[2:],
                count=counts[what],
                planned_ns=planned.get(what, 0),
                measured_ns=int(statistics.median(spent[what])) if what in spent else 0,
            )
            for what in keys
            if planned.get(what) or spent.get(what)
        )

    def _memory(self) -> dict[str, int]:
        """Most bytes of this device by category while a step runs, and of all together."""
        meter, runtime, plan = Meter(), self.runtime, self.plan
        meter.tick()
        for t, tensor in runtime.stored.items():
            local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
            meter.made(local, "parameters" if runtime.program.tensors[t].role is not Role.INPUT else "inputs")
        for local in _states(self.optimizer):
            meter.made(local, "optimizer")
        kept, total, device = runtime.step, runtime.gradients, runtime.processes.device
        runtime.gradients = _MeteredSum(plan, runtime.program, device, runtime.processes)
        runtime.gradients.meter = meter
        watch = MemoryWatch(plan, meter)
        runtime.step = compile_step(plan, runtime.program, device=device, communicator=runtime.processes, place=self.place, watch=watch)
        try:
            bound = runtime.given.bind((), self.inputs)
            for local in bound.values():
                meter.made(local, "inputs")
            for _ in range(2):  # the first pass of a compiled step checks every slot, and keeps what it checks
                for _ in range(plan.options.microbatches):
                    watch.last = -1
                    result = self.sharded(**self.inputs)
                    if self.trains:
                        (result / plan.options.microbatches).backward()
                del result
                if self.trains and self.optimizer is not None:
                    updates = [reshard for reshard in plan.reshards if reshard.purpose == "update"]
                    tensors = runtime.program.tensors
                    shards = [
                        (boxes(r.source, tensors[r.tensor].shape, plan.mesh)[device].length, tensors[r.tensor].dtype) for r in updates
                    ]
                    meter.tick()
                    meter.step(plan.options, shards)
                self.sharded.zero_grad()
                most = {name: max(row[name] for row in meter.times) for name in CATEGORIES}
                peak = max(sum(row.values()) for row in meter.times)
                meter.times.clear()
                meter.tick()
        finally:
            runtime.step, runtime.gradients = kept, total
        return {name: nbytes for name, nbytes in most.items() if nbytes} | {"peak": peak}


def _with_clock(step: Compiled, kernels: Sequence[str], clock: _Clock) -> Compiled:
    """The same step with a clock around every instruction."""
    what = [("compute", kernels[one.op]) if isinstance(one, Run) else ("local",) for one in step.order.instructions]
    every = [clock.timed(name, call) for name, call in zip(what, (*step.ahead, *step.back), strict=True)]
    return dataclasses.replace(step, ahead=tuple(every[: len(step.ahead)]), back=tuple(every[len(step.ahead) :]))


def _kernels(plan: Plan, program: Program) -> list[str]:
    """The kind of kernel of each op."""
    rules = plan.options.rulebook()
    return [rules.rule(program, i).kernel for i in range(len(program.ops))]


def _planned_parts(plan: Plan, kernels: Sequence[str]) -> dict[tuple[str, ...], int]:
    """What the plan says of the parts of a step."""
    planned: Counter[tuple[str, ...]] = Counter({("update",): plan.costs.update_ns})
    for op, kernel in zip(plan.ops, kernels, strict=True):
        planned["compute", kernel] += plan.options.microbatches * op.nanoseconds
    for one in plan.collectives():
        planned["collective", one.kind, *one.axes] += one.runs * one.nanoseconds
    for reshard in plan.reshards:
        planned["local",] += runs_of(reshard.purpose, plan.options.microbatches) * reshard.traffic_ns
    return dict(planned)


def _planned_bytes(plan: Plan, category: str) -> int:
    return plan.memory.peak if category == "peak" else max(plan.memory.series.get(category, ()), default=0)


def _first(value: Any) -> Any:
    """What the first process says, in all."""
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _ran(plan: Plan, place: torch.device) -> str:
    count = f"{plan.mesh.size} process{'es' * (plan.mesh.size > 1)}"
    if place.type == "cuda":
        return f"{count} on {torch.cuda.get_device_name()} by NCCL"
    return f"{count} on CPUs by gloo, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each"


def _fill(runtime: Runtime, numbers: torch.Generator) -> None:
    """Values for what was on the meta device: what they are does not matter to the clock, but that they are finite and small."""
    with torch.no_grad():
        for local in runtime.empty.values():
            if local.is_floating_point():
                drawn = torch.randn(local.shape, generator=numbers) * _SCALE
                local.copy_(drawn if local.ndim > 1 else drawn.abs_() + _SCALE)
            else:
                local.zero_()


def _states(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """Local tensors that an optimizer keeps: states, and masters that lie apart from their parameters."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for master in group["params"]:
            yield master._local_tensor
    for kept in optimizer.state.values():
        for value in kept.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                yield getattr(value, "_local_tensor", value)


class _MeteredSum(GradientSum):
    """The gradients of a step, whose accumulators a meter is told of."""

    meter: Meter

    def take(self, gradients: dict[int, torch.Tensor], state: StepState) -> dict[int, torch.Tensor] | None:
        reduced = super().take(gradients, state)
        for part in (*self.sums.values(), *(reduced or {}).values()):
            self.meter.made(part, "gradients")
        return reduced


class MemoryWatch:
    """Tells a meter what a step makes on its device; what ``compile_step`` takes as ``watch``.

    Attributes:
        last: the last time that has begun; -1 before a microbatch.
    """

    def __init__(self, plan: Plan, meter: Meter) -> None:
        self.plan, self.meter = plan, meter
        self.last = -1

    def begin(self, time: int) -> None:
        if time > self.last:
            self.last = time
            self.meter.tick()

    def results(self, run: Run, results: Sequence[torch.Tensor]) -> None:
        for t, part in zip(self.plan.ops[run.op].results, results, strict=True):
            self.meter.made(part, "gradients" if self.plan.tensors[t].role == "gradient" else "activations")

    def moved(self, reshard: Reshard, before: torch.Tensor, after: torch.Tensor, *, last: bool) -> None:
        told_of_move(self.meter, reshard, before, after, last=last)


def told_of_move(meter: Any, reshard: Reshard, before: torch.Tensor, after: torch.Tensor, *, last: bool) -> None:
    """Tell a meter of what a step of a reshard has made."""
    if reshard.purpose == "update":  # what is stepped is there already, and the new values take over from the old ones
        if after.untyped_storage()._cdata != before.untyped_storage()._cdata:
            meter.made(after, "intermediates")
    elif last:
        meter.made(after, "gradients" if reshard.purpose in ("accumulate", "optimizer") else "copies")
    else:
        meter.made(after, "intermediates")


class Meter:
    """Counts storages by category; ``simulate`` tells it of every tensor that it makes on device 0."""

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.category: dict[int, str] = {}
        self.times: list[dict[str, int]] = []

    def tick(self) -> None:
        """The next time begins."""
        self.times.append(dict(self.live))

    def made(self, tensor: torch.Tensor, category: str) -> None:
        """A tensor is there; one in a storage that is known already adds nothing, but a gradient or copy gives it its category."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.category:
            self.live[category] += storage.nbytes()
            weakref.finalize(storage, functools.partial(self._gone, key, storage.nbytes()))
            self.category[key] = category
        elif self.category[key] in ("activations", "copies", "intermediates") and category in ("gradients", "copies"):
            self.live[self.category[key]] -= storage.nbytes()
            self.live[category] += storage.nbytes()
            self.category[key] = category
        if sum(self.live.values()) >= sum(self.times[-1].values()):
            self.times[-1] = dict(self.live)

    def step(self, options: Options, shards: Sequence[tuple[tuple[int, ...], str]]) -> None:
        """The optimizer steps: shape and dtype of each parameter's shard in its state's layout. Parameters and states are there already."""
        state = options.optimizer_state()
        dtypes = [DTYPES["f32" if state.master_bytes(dtype) else dtype] for _, dtype in shards]
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for (shape, _), dtype in zip(shards, dtypes, strict=True)]
        ways = WAYS.get(options.optimizer)
        with torch.enable_grad():
            optimizer = torch.optim.SGD(parameters) if ways is None else torch.optim.AdamW(parameters, **ways)
        gradients = [torch.zeros(shape, dtype=DTYPES[state.gradient_dtype(dtype)]) for shape, dtype in shards]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()  # its states come to be
        for parameter in parameters:
            parameter.grad = None
        with _Made(self, [*parameters, *gradients, *(x for kept in optimizer.state.values() for x in kept.values())]):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()

    def _gone(self, key: int, nbytes: int) -> None:
        self.live[self.category.pop(key)] -= nbytes


class _Made(TorchDispatchMode):  # type: ignore[misc]  # torch is not checked
    """Tells a meter of every tensor that is made, in a storage that is not among those of the known ones."""

    def __init__(self, meter: Meter, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.meter, self.known = meter, {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else (made,):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.known:
                self.meter.made(item, "optimizer")
        return made
