"""Sharding rules: rows in ``rules/*.toml``, the families they name, and the rule of an op instance."""

from solver_shard.rulebook.build import Rulebook, build_rule
from solver_shard.rulebook.rule import AxisStrategy, Factor, Linear, Rule
from solver_shard.rulebook.table import RuleTable, load_table

__all__ = ["AxisStrategy", "Factor", "Linear", "Rule", "RuleTable", "Rulebook", "build_rule", "load_table"]
