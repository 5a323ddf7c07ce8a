"""All that the page shows of a plan, as plain values; :mod:`solver_shard.report.html` writes them down.

>>> page = page_data(plan)
>>> page["title"], page["figures"][0]
('llama3-8b', {'label': 'Step time', 'value': '383 ms', 'note': '1,368,173 tokens/s, 5,344 per device'})
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from solver_shard.layout import Layout
from solver_shard.names import fold_members
from solver_shard.plan.plan import Plan
from solver_shard.plan.report import PURPOSES, collected, headline, holders, kept_for_backward, problem_text
from solver_shard.plan.table import shorten
from solver_shard.report.charts import history_chart, memory_chart
from solver_shard.report.chips import chips
from solver_shard.report.entries import tensor_entries, title
from solver_shard.report.graph import layer_graphs
from solver_shard.report.pictures import picture
from solver_shard.report.tree import module_tree
from solver_shard.units import format_bytes, format_ns

MAX_HOLDERS = 12
MAX_DEAREST = 8
MAX_PICTURES = 6
"""Ways to be cut that are drawn, of each kind of tensor; those of most bytes."""


def page_data(plan: Plan) -> dict[str, Any]:
    """The page's values, by section; text is as it is in the plan, and escaped where it is written."""
    entries, entry_of = tensor_entries(plan)
    _, rows = headline(plan)
    return {
        "title": plan.name,
        "subtitle": _subtitle(plan),
        "figures": _figures(plan),
        "axes": [{"name": axis.name, "size": axis.size} for axis in plan.mesh.axes],
        "asked": [row for row in rows if row[0] not in ("step time", "peak memory")],
        "time": _time(plan),
        "collectives": _collectives(plan),
        "tree": module_tree(plan, entry_of),
        "graph": layer_graphs(plan, entry_of),
        "memory": _memory(plan, entry_of),
        "cuts": _cuts(plan, entries),
        "entries": entries,
        "dearest": _dearest(entries),
        "history": history_chart(plan),
        "fallbacks": [(name, count) for name, count in sorted(Counter(op.name for op in plan.ops if op.source == "fallback").items())],
        "origin": _origin(plan),
        "text": str(plan),
    }


def _subtitle(plan: Plan) -> list[str]:
    count = sum(math.prod(tensor.shape) for tensor in plan.tensors if tensor.role == "parameter")
    devices = f"{plan.mesh.size:,} device{'s' * (plan.mesh.size > 1)}"
    return [f"{count:,} parameters", f"{len(plan.ops):,} ops", f"mesh {plan.mesh.whole} ({devices})", plan.cluster.title]


def _figures(plan: Plan) -> list[dict[str, str]]:
    """The headline: time, memory, what time goes to communication, and the proof in words."""
    options, costs, memory, certificate = plan.options, plan.costs, plan.memory, plan.certificate
    tokens = options.batch * options.seq if options.batch and options.seq else 0
    rate = tokens * 1e9 / costs.total_ns if costs.total_ns else 0.0
    speed = f"{rate:,.0f} tokens/s, {rate / plan.mesh.size:,.0f} per device" if rate else "per step"
    proven = "Optimal" if certificate.status == "optimal" and certificate.gap == 0 else f"Within {100 * certificate.gap:.2g}%"
    return [
        {"label": "Step time", "value": format_ns(costs.total_ns), "note": speed},
        {
            "label": "Peak memory",
            "value": format_bytes(memory.peak),
            "note": f"of {format_bytes(memory.limit)} per device, {memory.peak / memory.limit:.0%}",
        },
        {
            "label": "Communication",
            "value": f"{costs.communication_ns / max(costs.total_ns, 1):.0%}",
            "note": f"{format_ns(costs.communication_ns)} of the step, {format_ns(costs.compute_ns)} compute",
        },
        {"label": "Proof", "value": proven, "note": problem_text(plan).partition(": ")[2]},
    ]


def _dearest(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The moves that take most time, of all copies together: where to look first."""
    found = [
        {"entry": entry["id"], "name": entry["name"], "count": entry["count"], "steps": move["steps"], "title": move["title"], "ns": ns}
        for entry in entries
        for move in entry["moves"]
        if (ns := entry["count"] * move["runs"] * move["ns"])
    ]
    return sorted(found, key=lambda move: -move["ns"])[:MAX_DEAREST]


def _time(plan: Plan) -> dict[str, Any]:
    """Parts of the step: compute, update, and communication by purpose (before overlap)."""
    costs = plan.costs
    by_purpose: dict[str, int] = {}
    for row in collected(plan):
        by_purpose[row.purpose] = by_purpose.get(row.purpose, 0) + row.nanoseconds
    parts = [("compute", "compute", costs.compute_ns), ("optimizer update", "update", costs.update_ns)]
    parts += [(purpose, "communication", by_purpose[purpose]) for purpose in PURPOSES if purpose in by_purpose]
    whole = max(sum(ns for _, _, ns in parts), 1)
    notes = []
    if plan.options.overlap:
        notes.append(f"overlap {plan.options.overlap:g}: {format_ns(costs.hidden_ns)} of gathers and reductions are hidden behind compute")
    if costs.unshared_ns:
        notes.append(
            f"not counted: {format_ns(costs.unshared_ns)} of launches, as parameters of one block move by different collectives; "
            f"with them {format_ns(costs.total_ns + costs.unshared_ns)}"
        )
    if plan.options.microbatches > 1:
        notes.append(f"all {plan.options.microbatches} microbatches together")
    return {"parts": [{"name": n, "kind": k, "ns": ns, "share": ns / whole} for n, k, ns in parts if ns], "notes": notes}


def _collectives(plan: Plan) -> list[dict[str, Any]]:
    found = collected(plan)
    most = max((row.nanoseconds for row in found), default=1)
    return [
        {
            "purpose": row.purpose,
            "kind": row.kind,
            "title": title(row.kind),
            "axes": ",".join(row.axes),
            "count": row.count,
            "launches": row.launches,
            "bytes": row.nbytes,
            "ns": row.nanoseconds,
            "share": row.nanoseconds / max(most, 1),
            "where": shorten(row.where, 90),
            "all": ", ".join(row.where),
        }
        for row in found
    ]


def _memory(plan: Plan, entry_of: Sequence[int]) -> dict[str, Any]:
    memory = plan.memory
    position = {tensor.name: t for t, tensor in enumerate(plan.tensors)}
    entry = {name: entry_of[position[first]] for name, first in _first_members(plan).items() if first in position}
    found = holders(memory)
    rest = sum(size for _, _, size, _ in found[MAX_HOLDERS:])
    return {
        "chart": memory_chart(plan),
        "op": memory.peak_op,
        "time": memory.peak_time,
        "ops": len(plan.ops),
        "peak": memory.peak,
        "limit": memory.limit,
        "share": memory.peak / memory.limit,
        "at_peak": [{"name": name, "bytes": size, "share": size / memory.limit} for name, size in memory.at_peak.items() if size],
        "holders": [
            {
                "name": name,
                "category": category,
                "bytes": size,
                "count": copies,
                "share": size / max(memory.peak, 1),
                "entry": entry.get(name),
            }
            for name, category, size, copies in found[:MAX_HOLDERS]
        ],
        "rest": {"count": sum(copies for _, _, _, copies in found[MAX_HOLDERS:]), "bytes": rest},
        "kept": kept_for_backward(plan),
    }


def _first_members(plan: Plan) -> dict[str, str]:
    """Folded name of what is held at the peak to one of the tensors that it stands for."""
    sizes: dict[tuple[str, str], int] = {}
    for holder in plan.memory.holders:
        sizes[holder.name, holder.category] = sizes.get((holder.name, holder.category), 0) + holder.nbytes
    return {folded: members[0] for folded, _, members in fold_members((name, (kind, size)) for (name, kind), size in sizes.items())}


def _cuts(plan: Plan, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kind of tensor the layouts that it has, each drawn for its largest tensor."""
    forward = {t for op in plan.ops if op.phase == "forward" for t in op.results}
    kinds: dict[str, list[tuple[dict[str, Any], Layout]]] = {}
    for entry in entries:
        tensor = plan.tensors[entry["tensor"]]
        if tensor.role == "parameter":
            kinds.setdefault("Parameters", []).append((entry, tensor.layout))
            if tensor.state is not None:
                kinds.setdefault("Optimizer states", []).append((entry, tensor.state))
        elif entry["tensor"] in forward:
            kinds.setdefault("Activations of the forward pass", []).append((entry, tensor.layout))
    return [{"kind": kind, "layouts": _drawn(plan, found)} for kind, found in kinds.items()]


def _drawn(plan: Plan, found: Sequence[tuple[dict[str, Any], Layout]]) -> list[dict[str, Any]]:
    groups: dict[Layout, list[dict[str, Any]]] = {}
    for entry, layout in found:
        groups.setdefault(layout, []).append(entry)
    drawn = []
    for layout, group in sorted(groups.items(), key=lambda item: -sum(e["count"] * e["whole_bytes"] for e in item[1]))[:MAX_PICTURES]:
        largest = max(group, key=lambda entry: entry["whole_bytes"])
        drawn.append(
            {
                "chips": chips(layout, plan.mesh),
                "picture": picture(layout, plan.tensors[largest["tensor"]].shape, plan.mesh),
                "entry": largest["id"],
                "name": largest["name"],
                "count": sum(entry["count"] for entry in group),
                "bytes": sum(entry["count"] * entry["whole_bytes"] for entry in group),
            }
        )
    return drawn


def _origin(plan: Plan) -> dict[str, Any]:
    made, certificate = plan.provenance, plan.certificate
    return {
        "tool": made.tool,
        "date": made.date,
        "command": made.command,
        "source": made.source,
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
        "stages": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in certificate.stages.items()),
        "seed": certificate.seed,
    }
