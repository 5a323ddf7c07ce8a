"""A plan as one HTML file: no network, opens from disk, prints.

>>> Path("plan.html").write_text(html(load_plan("plan.json")))

What a plan says is untrusted: the templates escape all of it, data for the script is JSON in which no tag can end, and the page's own
policy lets no script run but this one, and nothing be fetched.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from solver_shard.analysis.sweep.results import Sweep, load_sweep
from solver_shard.arguments import Several, checked, each
from solver_shard.errors import printable
from solver_shard.layout import Layout
from solver_shard.plan.index import PURPOSES
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan
from solver_shard.plan.summary import collected, headline, holders, kept_for_backward, problem_text, windows_text
from solver_shard.plan.windows import by_windows
from solver_shard.reports.charts import history_chart, memory_chart
from solver_shard.reports.dataflow import layer_graphs
from solver_shard.reports.modules import module_tree
from solver_shard.reports.studies import (
    Compared,
    PricedQuestion,
    comparison_table,
    prices_by_entry,
    read_comparison,
    read_prices,
    sweep_chart,
)
from solver_shard.reports.tensors import chips, picture, tensor_entries, title
from solver_shard.text import fold_members, format_bytes, format_ns, number_parts, shorten

if TYPE_CHECKING:
    from jinja2 import Environment


@checked
def report(
    plan: Plan | str | os.PathLike[str],
    *,
    compared: str | os.PathLike[str] | None = None,
    swept: str | os.PathLike[str] | None = None,
    explained: Several[str | os.PathLike[str]] = (),
) -> str:
    """A plan as one HTML page, which opens from disk without a network and prints.

    >>> Path("plan.html").write_text(report(plan), encoding="utf-8")  # doctest: +SKIP

    Args:
        plan: what to show, or its file: time and memory by module, the dataflow of a layer, how tensors are cut, what moves them and why.
        compared: file of ``compare -o FILE.json``, whose plans are shown beside this one.
        swept: folder of a sweep, or its ``sweep.json``, for a plot of step time against peak memory.
        explained: a file of, or several of ``explain --json``, whose prices stand with the tensors they are about.

    Returns:
        The text of the page.

    Raises:
        InputError: a file is not there, too large, or not of its form; the message names the place.
    """
    return html(
        load_plan(plan),
        comparison=None if compared is None else read_comparison(compared),
        sweep=None if swept is None else load_sweep(swept),
        asked=[read_prices(path) for path in each(explained)],
    )


def html(
    plan: Plan,
    *,
    comparison: Compared | None = None,
    sweep: Sweep | None = None,
    asked: Sequence[PricedQuestion] = (),
) -> str:
    """The page.

    Args:
        comparison: for the table of plans; ``read_comparison`` reads it from a file.
        sweep: for the table and plot of step time against peak memory; ``load_sweep`` reads it from a file.
        asked: prices of other layouts, which stand with the tensors they are about; ``read_prices`` reads them from files.
    """
    page = page_data(plan)
    page["comparison"] = None if comparison is None else comparison_table(comparison)
    page["sweep"] = None if sweep is None else sweep_chart(sweep)
    page["prices"] = prices_by_entry(asked, page["entries"])
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = {
        "entries": _search_index(page["entries"]),
        "columns": page["memory"]["chart"]["columns"],
        "names": page["memory"]["chart"]["names"],
    }
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            style=Markup(_asset("page.css")),
            script=Markup(script),
            policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
            data=Markup(embedded(data)),
        )
    )


def embedded(value: Any) -> str:
    """JSON for a ``<script type="application/json">``: no text in it can end the element or open a comment.

    >>> embedded({"name": "</script><!--"})
    '{"name":"\\\\u003c/script>\\\\u003c!--"}'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _search_index(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Names for the search, those of copies by the numbers in which they differ."""
    index = []
    for entry in entries:
        pieces, _ = number_parts(entry["members"][0])
        found: dict[str, Any] = {"name": printable(entry["name"]), "layout": entry["layout"], "role": entry["role"]}
        if entry["count"] > 1:
            found |= {"pieces": [printable(piece) for piece in pieces], "numbers": [number_parts(name)[1] for name in entry["members"]]}
        index.append(found)
    return index


def _asset(name: str) -> str:
    return resources.files("solver_shard.reports").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("solver_shard.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # control and direction characters show themselves
    )
    environment.filters.update(
        bytes=format_bytes,
        ns=format_ns,
        comma="{:,}".format,
        percent=lambda share: f"{100 * share:.1f}%",
    )
    return environment


# All that the page shows of a plan, as plain values; :mod:`solver_shard.reports.html` writes them down.
#
# >>> page = page_data(plan)
# >>> page["title"], page["figures"][0]
# ('llama3-8b', {'label': 'Step time', 'value': '383 ms', 'note': '1,368,173 tokens/s, 5,344 per device'})

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
    if by_purpose:
        notes.append(windows_text(plan, by_windows(plan)))
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
