"""What other commands found about a plan, as the page shows it: comparisons, sweeps, prices of other layouts. Their JSON is untrusted.

>>> comparison_table(json.loads(Path("comparison.json").read_text()), plan)["rows"][0]["name"]
'solver'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from solver_shard.plan.plan import Plan


def comparison_table(comparison: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    raise NotImplementedError


def sweep_chart(sweep: Mapping[str, Any]) -> dict[str, Any]:
    raise NotImplementedError


def prices_by_entry(explained: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    return {}
