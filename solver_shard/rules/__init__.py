"""Sharding rules: rows in ``rules/*.toml``, the families they name, and the rule of an op instance."""

from __future__ import annotations

__all__ = ["AxisStrategy", "Factor", "Linear", "Rule", "RuleTable", "Rulebook", "build_rule", "load_table"]
