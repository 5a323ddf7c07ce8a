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
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from solver_shard.errors import printable
from solver_shard.names import number_parts
from solver_shard.plan.plan import Plan
from solver_shard.report.data import page_data
from solver_shard.report.prices import Asked, prices_by_entry
from solver_shard.report.studies import Compared, comparison_table, sweep_chart
from solver_shard.units import format_bytes, format_ns

if TYPE_CHECKING:
    from jinja2 import Environment

    from solver_shard.study.sweep_result import Sweep


def html(
    plan: Plan,
    *,
    comparison: Compared | None = None,
    sweep: Sweep | None = None,
    asked: Sequence[Asked] = (),
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
    return resources.files("solver_shard.report").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("solver_shard.report"),
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
