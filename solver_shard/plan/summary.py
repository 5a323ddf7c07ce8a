"""A plan as a report that a person reads in a minute. Repeated layers are folded by their names, for display only."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from solver_shard.codec import encode
from solver_shard.costs.schedule import launch_of
from solver_shard.errors import InputError, printable
from solver_shard.layout import Layout
from solver_shard.options import Options
from solver_shard.plan.index import PURPOSES, PlanIndex, purpose_of_collective
from solver_shard.plan.plan import MemoryTimeline, Plan, PlannedOp, PlannedTensor, Reshard
from solver_shard.plan.windows import WindowedStep, by_windows
from solver_shard.program import DTYPE_BYTES
from solver_shard.text import fold_items, fold_names, format_bytes, format_ns, matching, shorten, suggestion, table, template, text_of

MAX_PARAMETERS = 24
MAX_ACTIVATIONS = 20
MAX_FALLBACKS = 8
MAX_COLLECTIVES = 20

PLACE_WIDTH = 60

MAX_IMPLEMENTATIONS = 12

CLIPPED = "the norm of all gradients"


def report(plan: Plan) -> str:
    """The whole report, about 60 to 90 lines of at most 140 or so characters."""
    sections = [
        _headline(plan),
        _parameters(plan),
        _sources(plan),
        _activations(plan),
        _collectives(plan),
        _implementations(plan),
        _time(plan),
        _by_windows(plan),
        _memory(plan),
        _fallbacks(plan),
        _fallbacks(plan, "dtensor"),
        _fallbacks(plan, "unproven"),
        _origin(plan),
    ]
    return "\n\n".join(text_of(lines) for lines in sections if lines)


def problem_text(plan: Plan) -> str:
    """What is proven, as one sentence."""
    certificate = plan.certificate
    kind = "tied plan (repeated layers alike)" if certificate.problem == "tied" else "plan"
    kind = "plan that keeps what propagation decided" if plan.options.propagation else kind
    kind += " of this template" if plan.options.template else ""
    show = format_bytes if plan.options.objective == "memory" else format_ns
    unit = "peak" if plan.options.objective == "memory" else "time" if not plan.options.memory_weight else "time + weight x peak"
    if certificate.status == "optimal" and certificate.gap == 0:
        return f"optimal: no {kind} has less {unit} than {show(certificate.bound)}"
    status: str = "optimal within the gap asked for" if certificate.status == "gap" else certificate.status
    if certificate.ended:
        status += ", when time or work ran out" if certificate.ended == "limit" else ", with nothing left that the solver would try"
    text = f"{status}: no {kind} has less {unit} than {show(certificate.bound)}, gap {100 * certificate.gap:.2g}%"
    stopped = "the solver stopped before it found a better one"
    return text + (f"; this is the plan of {_baselines(certificate.baseline)}: {stopped}" if certificate.baseline else "")


def _baselines(names: str) -> str:
    """Whose plan it is; ``names`` with commas are of baselines that decide alike."""
    *others, last = names.split(", ")
    return f"the baselines {', '.join(others)} and {last}, which agree" if others else f"the baseline {last}"


def _unpinned(options: Options) -> str:
    """Who chose the layouts where the user pinned none."""
    if options.propagation:
        return "nothing to propagate"
    return "the solver chose what the template leaves open" if options.template else "the solver chose every layout"


def _headline(plan: Plan) -> list[str]:
    title, rows = headline(plan)
    return [title, "", *table(rows)]


def headline(plan: Plan) -> tuple[str, list[tuple[str, str]]]:
    """What the plan is of, and its figures, limits and options as (word, text) rows."""
    options, memory, costs = plan.options, plan.memory, plan.costs
    step = format_ns(costs.total_ns)
    tokens = options.batch * options.seq if options.batch and options.seq else None
    if tokens and costs.total_ns:
        rate = tokens * 1e9 / costs.total_ns
        step += f"   {rate:,.0f} tokens/s, {rate / plan.mesh.size:,.0f} per device"
    sizes = [f"{name} {value}" for name, value in (("batch", options.batch), ("seq", options.seq)) if value is not None]
    sizes += [f"{options.microbatches} microbatches"] if options.microbatches > 1 else []
    asked = [*sizes, *([options.dtype] if options.dtype else []), _optimizer(plan)]
    asked += ["every layer checkpointed"] if options.checkpoint else []
    asked += ["pointwise chains fused"] if options.fusion else []
    asked += ["conservative rules"] if options.conservative else []
    asked += ["DTensor trusted"] if options.trust_dtensor else []
    asked.append(f"{options.objective} objective" + (f" + {options.memory_weight} ns per MiB of peak" if options.memory_weight else ""))
    rows = [
        *((("sub-axes", sub_axes(plan)),) if plan.mesh.splits else ()),
        ("step time", step),
        ("peak memory", f"{format_bytes(memory.peak)} of {format_bytes(memory.limit)} per device ({memory.peak / memory.limit:.0%})"),
        ("limit", _limit(plan)),
        ("proof", problem_text(plan)),
        ("asked", ", ".join(asked)),
        ("pins", "; ".join(options.pins) or f"none: {_unpinned(options)}"),
        *((("layouts", f"by template: {options.template}"),) if options.template else ()),
        *((("layouts", f"by propagation: {options.propagation}"),) if options.propagation else ()),
        *((("rules", _rules(plan)),) if options.rules else ()),
    ]
    count = sum(math.prod(tensor.shape) for tensor in plan.tensors if tensor.role == "parameter")
    devices = f"{plan.mesh.size} device{'s' * (plan.mesh.size > 1)}"
    title = f"{plan.name}: {count:,} parameters, {len(plan.ops):,} ops on {plan.mesh.whole} ({devices}), {plan.cluster.title}"
    return title, rows


def _rules(plan: Plan) -> str:
    """The user's rules files, and which ops run by their rows."""
    counts = Counter(op.name for op in plan.ops if op.source == "user")
    used = ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))
    return f"{', '.join(file.name for file in plan.options.rules)} for {used or 'no op of this model'}"


def sub_axes(plan: Plan) -> str:
    """What is split, and how to read layouts then."""
    return f"{'; '.join(plan.mesh.splits)}; a layout has one placement for each of {', '.join(plan.mesh.names)}"


def _limit(plan: Plan) -> str:
    """The limit given, the reserve, and what is left for tensors."""
    options = plan.options
    if not options.reserve:
        return f"{format_bytes(options.memory_limit)} per device, no reserve"
    left = format_bytes(options.usable_memory)
    return (
        f"{format_bytes(options.memory_limit)} per device, less a reserve of {format_bytes(options.reserve)} "
        f"(context, collective buffers, fragmentation): {left} for tensors"
    )


def _optimizer(plan: Plan) -> str:
    """What the optimizer keeps, as far as it can be otherwise for the parameters of this plan."""
    options, state = plan.options, plan.options.optimizer_state()
    if options.forward_only:
        return "forward only"
    if options.optimizer == "none":
        return "no optimizer"
    text = options.optimizer
    dtypes = {tensor.dtype for tensor in plan.tensors if tensor.name in plan.gradients}
    if any(state.master_bytes(dtype) for dtype in dtypes):
        text += " with f32 master weights"
    elif not options.master_weights:
        text += " without master weights"
    text += f", {options.state_bytes} bytes of state per element" if options.state_bytes is not None else ""
    text += f", gradients reduced in {options.reduce_dtype}" if options.reduce_dtype else ""
    return text + (", gradients clipped" if options.clip else "")


def _tensor_rows(plan: Plan, tensors: Iterable[tuple[str, PlannedTensor, Layout]]) -> list[tuple[str, str, str, str]]:
    """Folded rows: name, layout text, bytes per device, how many."""
    items = [(name, (tensor.shape, tensor.dtype, layout, tensor.state)) for name, tensor, layout in tensors]
    rows = []
    for name, (shape, dtype, layout, state), count in fold_items(items):
        text = layout.format(shape, dtype) + (f", state {state}" if state not in (None, layout) else "")
        rows.append((name, text, format_bytes(local_nbytes(plan, shape, dtype, layout)), f"x{count}" if count > 1 else ""))
    return rows


def local_nbytes(plan: Plan, shape: tuple[int, ...], dtype: str, layout: Layout) -> int:
    """Bytes on the device that holds most."""
    return math.prod(layout.local_shape(shape, plan.mesh.shape)) * DTYPE_BYTES[dtype]


def _parameters(plan: Plan) -> list[str]:
    chosen = [(tensor.name, tensor, tensor.layout) for tensor in plan.tensors if tensor.role == "parameter"]
    rows = _tensor_rows(plan, chosen)
    frozen = sum(not tensor.trainable for _, tensor, _ in chosen)
    title = (
        f"Parameters ({len(chosen)}{f', {frozen} not trained' if frozen and not plan.options.forward_only else ''}), bytes per device each"
    )
    lines = [title, *table(rows[:MAX_PARAMETERS], right=(2,))]
    strided = any(p.is_strided for _, tensor, _ in chosen for layout in (tensor.layout, tensor.state or ()) for p in layout)
    legend = ["  _S(d): cuts dim d after the axes with S(d) (DTensor's strided shard)"] if strided else []
    return [*lines, *_more(rows, MAX_PARAMETERS, "show PLAN '*' lists all"), *legend]


def _sources(plan: Plan) -> list[str]:
    chosen = [(tensor.name, tensor, tensor.layout) for tensor in plan.tensors if tensor.role in ("input", "buffer")]
    rows = [(role, *row) for role in ("input", "buffer") for row in _tensor_rows(plan, [c for c in chosen if c[1].role == role])]
    outs = [(plan.tensors[t].name, plan.tensors[t], plan.tensors[t].layout) for t in dict.fromkeys(plan.outputs)]
    rows += [("output", *row) for row in _tensor_rows(plan, outs)]
    return [
        "Inputs, buffers and outputs",
        *table(rows[:MAX_PARAMETERS], right=(3,)),
        *_more(rows, MAX_PARAMETERS, "show PLAN PATTERN shows them"),
        *(f"  {line}" for line in baked_in(plan)),
    ]


def baked_in(plan: Plan) -> list[str]:
    """A line about the tensors that the model, its loss or entry point closes over or makes, whose values are part of the plan; if any."""
    found = [tensor for tensor in plan.tensors if tensor.role == "buffer" and tensor.name.startswith("constant.")]
    if not found:
        return []
    named = [f"{tensor.name} {tensor.dtype}[{', '.join(map(str, tensor.shape))}]" for tensor in found]
    return [
        f"baked in: {shorten(named, PLACE_WIDTH)}: made or closed over by the model, its loss or entry point, with the values of when it "
        "was traced; make inputs of those that change from step to step"
    ]


def _activations(plan: Plan) -> list[str]:
    """The largest module outputs, with the layouts that their forward readers get where these differ."""
    index = PlanIndex(plan)
    copies: dict[int, list[Layout]] = {}
    for reshard in plan.reshards:
        if reshard.purpose in ("forward", "output") and reshard.copy and reshard.layout not in copies.setdefault(reshard.tensor, []):
            copies[reshard.tensor].append(reshard.layout)
    items = [
        (name, (plan.tensors[t].shape, plan.tensors[t].dtype, index.layout(t), tuple(copies.get(t, ()))))
        for t, name in sorted(index.output_names.items())
    ]
    folded = []
    for name, (shape, dtype, layout, read), count in fold_items(items):
        local = local_nbytes(plan, shape, dtype, layout)
        text = layout.format(shape, dtype) + (f" -> {', '.join(map(str, read))}" if read else "")
        folded.append((local * count, (name, text, format_bytes(local), f"x{count}" if count > 1 else "")))
    if not folded:
        return []
    least = sorted((size for size, _ in folded), reverse=True)[:MAX_ACTIVATIONS][-1]
    rows = [row for size, row in folded if size >= least][:MAX_ACTIVATIONS]
    lines = ["Activations: what modules hand on, as produced -> as copied for forward readers", *table(rows, right=(2,))]
    return [*lines, *_more(folded, MAX_ACTIVATIONS, "the smaller ones")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotals:
    """The collectives of one purpose, kind and group of mesh axes, over one step.

    Attributes:
        purpose: one of ``PURPOSES``.
        axes: names of the mesh axes that take part; parts of a split axis together under its own.
        count, launches: how many run, and how many launches they share.
        nbytes, nanoseconds: summed; time before overlap.
        where: parameters, or modules that make the tensors, repeated layers folded, those with most time first.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    count: int
    launches: int
    nbytes: int
    nanoseconds: int
    where: tuple[str, ...]


def collected(plan: Plan) -> list[CollectiveTotals]:
    """All collectives of a step, by purpose in the order of ``PURPOSES`` and then by time, the longest first."""
    index = PlanIndex(plan)
    found: dict[tuple[str, str, tuple[str, ...]], list[tuple[int, int, int, str]]] = {}
    launches: dict[tuple[str, str, tuple[str, ...]], dict[Hashable, int]] = {}
    for c in plan.collectives():
        where = CLIPPED if c.op is None else plan.ops[c.op].module or plan.ops[c.op].name
        where = where if c.reshard is None else index.place(plan.reshards[c.reshard])
        row = (purpose_of_collective(plan, c), c.kind, tuple(plan.mesh.joined(c.axes)))
        found.setdefault(row, []).append((c.runs, c.nanoseconds, c.nbytes, where))
        if c.reshard is not None:
            reshard = plan.reshards[c.reshard]
            shared = launch_of(reshard.purpose, where, plan.tensors[reshard.tensor].dtype, c.index, c.kind, c.axes)
            launches.setdefault(row, {})[shared if reshard.bucket > 1 else (c.reshard, c.index)] = c.runs
    rows = []
    for (purpose, kind, axes), steps in found.items():
        by_place: dict[str, int] = {}
        for n, ns, _, where in steps:
            by_place[where] = by_place.get(where, 0) + n * ns
        launched = launches.get((purpose, kind, axes))
        count = sum(n for n, _, _, _ in steps)
        rows.append(
            CollectiveTotals(
                purpose=purpose,
                kind=kind,
                axes=axes,
                count=count,
                launches=sum(launched.values()) if launched else count,
                nbytes=sum(n * size for n, _, size, _ in steps),
                nanoseconds=sum(n * ns for n, ns, _, _ in steps),
                where=tuple(fold_names(sorted(by_place, key=lambda where: -by_place[where]))),
            )
        )
    order = {purpose: i for i, purpose in enumerate(PURPOSES)}
    return sorted(rows, key=lambda row: (order[row.purpose], -row.nanoseconds, row.kind, row.axes))


def _collectives(plan: Plan) -> list[str]:
    found = collected(plan)
    if not found:
        return ["Collectives: none"]
    rows = [("purpose", "collective", "axes", "count", "launches", "bytes", "time", "where")]
    for row in found[:MAX_COLLECTIVES]:
        sums = (str(row.count), str(row.launches), format_bytes(row.nbytes), format_ns(row.nanoseconds))
        rows.append((row.purpose, row.kind, ",".join(row.axes), *sums, shorten(row.where, PLACE_WIDTH)))
    total = format_ns(sum(row.nanoseconds for row in found))
    rows.append(("all", "", "", str(sum(row.count for row in found)), "", "", total, ""))
    return [
        "Collectives per step, bytes and time summed, before overlap; parameters of one block share launches",
        *table(rows, right=(3, 4, 5, 6), header=True),
        *_more(found, MAX_COLLECTIVES, "less time"),
    ]


def _implementations(plan: Plan) -> list[str]:
    """Ops that run a named implementation, by its name, the axes it cuts and the op."""
    found: dict[tuple[str, str, str], list[PlannedOp]] = {}
    for op in plan.ops:
        if op.implementation:
            cut = [axis for axis, name in zip(plan.mesh.names, op.strategy, strict=True) if name == op.implementation]
            axes = ",".join(plan.mesh.joined(cut))
            found.setdefault((op.implementation, axes, op.name), []).append(op)
    if not found:
        return []
    rows = [("implementation", "axes", "op", "count", "compute", "collectives", "where")]
    ranked = sorted(found.items(), key=lambda item: (-sum(c.nanoseconds for op in item[1] for c in op.collectives), item[0]))
    for (name, axes, kind), ops in ranked[:MAX_IMPLEMENTATIONS]:
        compute = plan.options.microbatches * sum(op.nanoseconds for op in ops)
        talking = plan.options.microbatches * sum(c.nanoseconds for op in ops for c in op.collectives)
        places = fold_names(dict.fromkeys(op.module or "model" for op in ops))
        rows.append((name, axes, kind, str(len(ops)), format_ns(compute), format_ns(talking), shorten(places, PLACE_WIDTH)))
    title = "Ops run by named implementations, on dims that the op alone must see whole"
    return [title, *table(rows, right=(3, 4, 5), header=True), *_more(ranked, MAX_IMPLEMENTATIONS, "less time")]


def _time(plan: Plan) -> list[str]:
    costs = plan.costs
    overlap = f"overlap {plan.options.overlap:g}: {format_ns(costs.hidden_ns)} of gathers and reductions hidden"
    if not plan.options.overlap:
        overlap = "overlap 0: all communication counts as exposed, so the step time is an upper bound of the model"
        overlap = "overlap 0: no collective is hidden behind compute" if costs.unshared_ns else overlap
    total = max(costs.total_ns, 1)
    again = plan.options.microbatches * sum(op.nanoseconds for op in plan.ops if op.recompute)
    parts = [("compute", costs.compute_ns), ("update", costs.update_ns), ("communication", costs.communication_ns)]
    if again:
        parts.insert(1, ("  of it again in backward", again))
    rows = [(name, format_ns(ns), f"{ns / total:.1%}") for name, ns in parts]
    lines = table(rows, right=(1, 2))
    lines[-1] += f"   {overlap}"
    if costs.unshared_ns:
        lines.append(
            f"  not counted: {format_ns(costs.unshared_ns)} of launches, as parameters of one block move by different collectives; "
            f"with them {format_ns(costs.total_ns + costs.unshared_ns)}"
        )
    return ["Time", *lines]


def windows_text(plan: Plan, step: WindowedStep) -> str:
    """What a step takes where what has slack runs beside compute, as one sentence."""
    exposed, hidden = (format_ns(sum(part.values())) for part in (step.exposed, step.hidden))
    within = "within" if step.peak <= plan.memory.limit else "beyond"
    parts = f"{exposed} of collectives exposed, {hidden} hidden"
    return (
        f"By windows: {format_ns(step.total_ns)} ({parts}), peak {format_bytes(step.peak)} {within} the limit, "
        "where gathers run one block ahead and reductions one behind"
    )


def _by_windows(plan: Plan) -> list[str]:
    """The step with collectives beside compute: what is exposed, by purpose and lane, and what windows take their time for."""
    if not plan.collectives():
        return []
    step = by_windows(plan)
    rows = [("purpose", "lane", "exposed", "hidden")]
    for purpose, lane in sorted(step.exposed, key=lambda share: (PURPOSES.index(share[0]), share[1])):
        rows.append((purpose, lane, format_ns(step.exposed[purpose, lane]), format_ns(step.hidden[purpose, lane])))
    whole = [(step.bound_by(time), time) for time in step.windows if time.nanoseconds]
    bound = []
    for name in sorted({name for name, _ in whole}, key=lambda name: (name != "compute", name)):
        mine = [time for found, time in whole if found == name]
        count = sum(time.window.runs for time in mine)
        longest = fold_names(dict.fromkeys(time.window.name for time in sorted(mine, key=lambda time: -time.nanoseconds)))
        nanoseconds = sum(time.window.runs * time.nanoseconds for time in mine)
        bound.append(f"  {count} windows bound by {name}, {format_ns(nanoseconds)}: {shorten(longest, PLACE_WIDTH)}")
    return [f"{windows_text(plan, step)}; not proven", *table(rows, right=(2, 3), header=True), *bound]


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    rows = [(name, format_bytes(size), f"{size / memory.limit:.1%}") for name, size in memory.at_peak.items() if size]
    whole = "peak with intermediates" if memory.at_peak.get("intermediates") else "peak"
    rows.append((whole, format_bytes(memory.peak), f"{memory.peak / memory.limit:.1%}"))
    largest, kept = largest_holders(memory, 4), kept_for_backward(plan)
    lines = [
        f"Memory at the peak: time {memory.peak_time} of {len(plan.ops)}, {memory.peak_op}; share of the limit",
        *table(rows, right=(1, 2)),
    ]
    lines += [f"  largest: {'; '.join(largest)}"] if largest else []
    return [*lines, f"  kept from forward to backward readers: {'; '.join(kept)}"] if kept else lines


def kept_for_backward(plan: Plan) -> list[str]:
    """What is held when the backward pass starts of tensors that the forward pass has read: as produced, and as copies."""
    start = next((i for i, op in enumerate(plan.ops) if op.phase == "backward"), len(plan.ops))
    sizes: dict[str, list[int]] = {}
    for hold in plan.holds:
        if hold.start <= start < hold.stop:
            gathered = plan.tensors[hold.tensor].role == "parameter"
            kind = "as produced" if hold.reshard is None else "gathered parameters" if gathered else "resharded copies"
            sizes.setdefault(kind, []).append(hold.nbytes)
    return [f"{format_bytes(sum(found))} {kind} ({len(found)})" for kind, found in sorted(sizes.items())]


def largest_holders(memory: MemoryTimeline, count: int) -> list[str]:
    """What fills the memory at the peak, copies of a layer together, the largest first."""
    return [f"{name} ({category}) {format_bytes(size)}" for name, category, size, _ in holders(memory)[:count]]


def holders(memory: MemoryTimeline) -> list[tuple[str, str, int, int]]:
    """Name, category, bytes and number of copies of all that is held at the peak, copies of a layer together, the largest first."""
    sizes: dict[tuple[str, str], int] = {}
    for holder in memory.holders:
        sizes[holder.name, holder.category] = sizes.get((holder.name, holder.category), 0) + holder.nbytes
    items = fold_items((name, (category, size)) for (name, category), size in sizes.items())
    return sorted(((name, category, copies * size, copies) for name, (category, size), copies in items), key=lambda row: -row[2])


def _fallbacks(plan: Plan, source: str = "fallback") -> list[str]:
    """Ops without a rule, all replicated, or with one of DTensor's; with the price of computing them and of gathering what they read."""
    gathers: dict[int, int] = {}
    for reshard in plan.reshards:
        for reader, _ in reshard.readers[:1]:
            gathers[reader] = gathers.get(reader, 0) + plan.runs(reshard) * reshard.nanoseconds
    found: dict[str, list[int]] = {}
    for i, op in enumerate(plan.ops):
        if op.source == source:
            found.setdefault(op.name, []).append(i)
    if not found:
        return []
    rows = [("op", "count", "compute", "collectives", "where")]
    count = plan.options.microbatches
    ranked = sorted(found.items(), key=lambda item: -sum(count * plan.ops[i].nanoseconds + gathers.get(i, 0) for i in item[1]))
    for name, positions in ranked[:MAX_FALLBACKS]:
        places = fold_names(plan.ops[i].module or "model" for i in positions)
        compute, gather = count * sum(plan.ops[i].nanoseconds for i in positions), sum(gathers.get(i, 0) for i in positions)
        rows.append((name, str(len(positions)), format_ns(compute), format_ns(gather), shorten(places, PLACE_WIDTH)))
    title = "Ops without a rule, replicated on every axis (a row in a rule file would free them)"
    if source == "dtensor":
        title = "Ops without a rule here, by the strategies that are registered for them with DTensor, proven on numbers"
    if source == "unproven":
        title = "Ops without a rule here, by the strategies that are registered for them with DTensor, NOT PROVEN"
    return [title, *table(rows, right=(1, 2, 3), header=True), *_more(ranked, MAX_FALLBACKS, "less time")]


def _origin(plan: Plan) -> list[str]:
    stages = plan.certificate.stages
    main = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items() if ":" not in name)
    inner = ", ".join(f"{name.partition(': ')[2]} {seconds:.1f} s" for name, seconds in stages.items() if ":" in name)
    made = plan.provenance
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    return [
        f"Made by {made.tool} on {made.date}: {made.command}",
        f"  {main}{f' ({inner})' if inner else ''}; seed {plan.certificate.seed}; {versions}",
    ]


def _more(rows: Sequence[object], limit: int, hint: str) -> list[str]:
    return [f"  ... {len(rows) - limit} more ({hint})"] if len(rows) > limit else []


# What a plan says about the tensors that a pattern matches: layouts, producers, and every reshard around them.
#
# >>> print(lookup(plan, "*.q_proj.weight"))
# model.layers.{0..31}.self_attn.q_proj.weight  bf16[4096, 4096]| S(0)S(1)  (parameter, 128 KiB per device) x32
#   forward   matmul: S(0)S(1) -> RS(1)  all_gather dp 4.00 MiB, 112 us


def find(plan: Plan, pattern: str) -> list[int]:
    """Positions of the tensors that a glob matches: by name, else by module (its parameters, buffers and outputs).

    Raises:
        InputError: nothing matches; the closest names are given.
    """
    names = [tensor.name for tensor in plan.tensors]
    found = matching(pattern, names)
    if found:
        return found
    outputs = PlanIndex(plan).module_outputs
    held: dict[str, list[int]] = {}
    for t, tensor in enumerate(plan.tensors):
        if tensor.role in ("parameter", "buffer"):
            parts = tensor.name.split(".")
            for depth in range(1, len(parts)):
                held.setdefault(".".join(parts[:depth]), []).append(t)
    paths = sorted({*outputs, *held})
    modules = [paths[i] for i in matching(pattern.removesuffix(":out"), paths)]
    found = sorted({t for path in modules for t in (*outputs.get(path, ()), *(held.get(path, ()) if not pattern.endswith(":out") else ()))})
    if not found:
        raise InputError(f"no tensor or module of this plan is called {pattern!r}; {suggestion(pattern, [*names, *paths], plan.ties)}")
    return found


def lookup(plan: Plan, pattern: str) -> str:
    """Text about the matching tensors; those that differ only in numbers share one entry."""
    index = PlanIndex(plan)
    found = {plan.tensors[t].name: t for t in find(plan, pattern)}
    entries = [(name, _entry(index, t, template)) for name, t in found.items()]
    blocks = []
    for name, lines, count in fold_items(entries):
        head, *rest = lines if count > 1 else _entry(index, found[name], str)
        blocks.append(text_of([f"{name}  {head}{f' x{count}' if count > 1 else ''}", *rest]))
    legend = [sub_axes(plan)] if plan.mesh.splits else []
    return "\n".join([*map(printable, legend), *blocks])


def lookup_json(plan: Plan, pattern: str) -> str:
    """The same as JSON: one object per tensor, nothing folded."""
    index = PlanIndex(plan)
    found: list[dict[str, Any]] = []
    for t in find(plan, pattern):
        tensor = plan.tensors[t]
        op = index.makers.get(t)
        found.append(
            {
                **encode(tensor),
                "local_shape": list(tensor.layout.local_shape(tensor.shape, plan.mesh.shape)),
                "producer": None if op is None else {"op": op, "name": plan.ops[op].name, "module": plan.ops[op].module},
                "reshards": [encode(reshard) for reshard in index.reshards.get(t, ())],
                "holds": [encode(hold) for hold in index.saved.get(t, ())],
            }
        )
    return json.dumps(found, indent=1)


def _entry(index: PlanIndex, t: int, show: Callable[[str], str]) -> tuple[str, ...]:
    """Lines about one tensor without its name and without positions, so that copies of a layer can be folded.

    ``show`` turns module paths into text: ``template`` where entries are to be folded.
    """
    plan, tensor = index.plan, index.plan.tensors[t]
    local = format_bytes(local_nbytes(plan, tensor.shape, tensor.dtype, tensor.layout))
    state = f", optimizer state {tensor.state}" if tensor.state not in (None, tensor.layout) else ""
    lines = [f"{tensor.layout.format(tensor.shape, tensor.dtype)}  ({tensor.role}, {local} per device{state})"]
    if t in index.makers:
        op = plan.ops[index.makers[t]]
        chosen = ", ".join(f"{axis}: {name}" for axis, name in zip(plan.mesh.names, op.strategy, strict=True))
        lines.append(
            f"  made by {op.name} in {show(op.module) or 'the model'} ({op.phase}), strategy {chosen}, {format_ns(op.nanoseconds)}"
        )
    for reshard in index.reshards.get(t, ()):
        if reshard.purpose == "update" and not reshard.copy:
            continue
        readers = sorted({f"{plan.ops[i].name} in {show(plan.ops[i].module) or 'the model'}" for i, _ in reshard.readers})
        family = "" if reshard.family == reshard.purpose else f"{reshard.family}: "
        line = f"  {reshard.purpose:<9} {family}{_move(plan, reshard)}"
        line += f", in each of {plan.runs(reshard)} microbatches" if plan.runs(reshard) > 1 and reshard.copy else ""
        lines.append(
            line + (f"; for {', '.join(readers[:3])}{f', +{len(readers) - 3} more' if len(readers) > 3 else ''}" if readers else "")
        )
    for hold in index.saved.get(t, ()):
        if hold.nbytes:
            copied = "as produced" if hold.reshard is None else f"the copy for forward {plan.reshards[hold.reshard].family}"
            lines.append(f"  kept      {hold.layout}, {copied}, until the backward pass or the end ({format_bytes(hold.nbytes)})")
    return tuple(lines)


def _move(plan: Plan, reshard: Reshard) -> str:
    if not reshard.copy:
        return f"{reshard.layout} as it is"
    steps = ", ".join(
        f"{step.kind} {','.join(plan.mesh.joined(step.axes))} {format_bytes(step.nbytes)}, {format_ns(step.nanoseconds)}"
        for step in reshard.steps
    )
    copied = f" ({format_bytes(reshard.nbytes)} copy)" if reshard.nbytes else ""
    return f"{reshard.source} -> {reshard.layout}  {steps or 'local'}{copied}"
