"""All rule families by name; rows of a rules file name one of them."""

from __future__ import annotations

from collections.abc import Mapping

from solver_shard.rules.families import attention, experts, index, matrices, nn, pointwise, stablehlo, views
from solver_shard.rules.row import Family

FAMILIES: Mapping[str, Family] = {
    family.name: family for module in (pointwise, views, nn, index, attention, matrices, experts, stablehlo) for family in module.FAMILIES
}
